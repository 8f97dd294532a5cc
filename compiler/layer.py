"""Activations in the accelerator's layout, and layers over them.

A `Layer` is what the accelerator computes in one go: activations that it reads and writes, an optional matrix product
on the GEMM unit, and the operations of the vector unit that follow, in the order of its pipeline. Everything here is
integers; the numbers that make it exact (multipliers, shifts, tables) were derived and proved before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.strided_view import StridedView
from celosia.hw.spec.config import Config

Int8 = NDArray[np.int8]


class TilingError(ValueError):
    """No tiling of a layer fits the scratchpads or an instruction's fields; the message says which limit is too low."""


@dataclass(frozen=True, eq=False)
class Storage:
    """Memory of activations, with `groups` channel groups for each image.

    The object is its identity; `name` is for messages, and need not be unique. lasting: whether the content stays from
    run to run.
    """

    name: str
    groups: int
    lasting: bool = False


@dataclass(frozen=True)
class Activation:
    """An int8 tensor in DRAM, [images/batch][channels/group][height][width][batch][group].

    Several activations share a storage where a tensor is a part of another: this one begins `group_offset` channel
    groups into it, and `strided_view` selects its pixels, where these are not all. The rows of a matrix are images, its
    columns channels. Two activations of the same place and dimensions are equal: the name, for messages, does not
    count.
    """

    name: str = field(compare=False)
    images: int
    channels: int
    height: int
    width: int
    storage: Storage
    group_offset: int = 0
    strided_view: StridedView | None = None

    @staticmethod
    def alone(
        cfg: Config, name: str, images: int, channels: int, height: int, width: int, lasting: bool = False
    ) -> Activation:
        """Create an activation in a storage of its own."""
        storage = Storage(name, padded_groups(cfg, channels), lasting)
        return Activation(name, images, channels, height, width, storage)

    @property
    def dims(self) -> tuple[int, int, int, int]:
        """(images, channels, height, width)."""
        return self.images, self.channels, self.height, self.width

    @property
    def storage_groups(self) -> int:
        """Channel groups of the whole storage."""
        return self.storage.groups

    @property
    def pixels(self) -> StridedView:
        """Strided view of the storage's pixels that belong to this activation."""
        return self.strided_view or StridedView(self.height, self.width)

    def cut(self, cfg: Config) -> tuple[slice, slice, slice]:
        """Slices of the storage's channel groups, rows and columns that are this activation."""
        groups = slice(self.group_offset, self.group_offset + self.groups(cfg))
        return groups, *self.pixels.cut(self.height, self.width)

    def region(self, dims: tuple[int, int, int, int], group: int, strided_view: StridedView) -> Activation:
        """A part of this activation: of size `dims`, from its channel group `group` on, of the pixels that
        `strided_view` selects."""
        images, channels, height, width = dims
        pixels = strided_view.within(self.pixels)
        is_all = pixels == StridedView(height, width)
        offset = self.group_offset + group
        return Activation(self.name, images, channels, height, width, self.storage, offset, None if is_all else pixels)

    def rebased(self, whole: Activation) -> Activation:
        """Return this activation as a part of the storage of `whole`, of which its own storage has become a part.

        A concatenation does so with the parts that layers have written: they then write into its storage.
        """
        pixels = self.pixels  # of its storage, which may have all rows and columns of `whole`, or some columns
        if (pixels.rows, pixels.columns) == (whole.height, whole.width):
            return replace(whole.region(self.dims, self.group_offset, pixels), name=self.name)
        pixels = pixels.column_within(whole.pixels, whole.width)
        offset = whole.group_offset + self.group_offset
        return replace(self, storage=whole.storage, group_offset=offset, strided_view=pixels)

    def overlaps(self, cfg: Config, other: Activation) -> bool:
        """Whether the two activations share pieces of a storage."""
        if self.storage is not other.storage:
            return False
        sides = list(zip(self.cut(cfg), other.cut(cfg), strict=True))
        if (self.pixels.rows, self.pixels.columns) != (other.pixels.rows, other.pixels.columns):
            sides = sides[:1]  # their rows and columns are not comparable
        return all(_meet(range(a.stop)[a], range(b.stop)[b]) for a, b in sides)

    def batches(self, cfg: Config) -> int:
        """Count of batches of `cfg.batch` images, the last perhaps not full."""
        return -(-self.images // cfg.batch)

    def groups(self, cfg: Config) -> int:
        """Count of channel groups that hold channels of this activation."""
        return whole_groups(cfg, self.channels) // cfg.group

    def size(self, cfg: Config) -> int:
        """Bytes of the whole storage."""
        pixels = self.pixels.rows * self.pixels.columns
        return self.batches(cfg) * self.storage_groups * pixels * cfg.piece_bytes


def _meet(a: range, b: range) -> bool:
    """Whether two ranges have a number in common."""
    short, long = sorted((a, b), key=len)
    return any(number in long for number in short)


def whole_groups(cfg: Config, channels: int) -> int:
    """Round channels up to whole groups."""
    return -(-channels // cfg.group) * cfg.group


def padded_groups(cfg: Config, channels: int) -> int:
    """Count of channel groups of a storage: whole blocks of the array, both as its input and as its output."""
    block = max(cfg.block_in, cfg.block_out)
    return -(-channels // block) * block // cfg.group


@dataclass(frozen=True)
class Requantise:
    """Per-channel scaling of int32 sums: bias int32, multiplier (24 bit), shift (0..63), each of shape [channels]."""

    bias: NDArray[np.int32]
    multiplier: NDArray[np.uint32]
    shift: NDArray[np.uint8]
    zero_point: int


@dataclass(frozen=True)
class Residual:
    """y = clip(round((v * scale_v + b * scale_b + scale_c) / 2^shift), lo, hi), b the int8 of activation `operand`."""

    operand: Activation
    scale_v: int
    scale_b: int
    scale_c: int
    shift: int
    lo: int = -128
    hi: int = 127


@dataclass(frozen=True)
class Epilogue:
    """The last operations of a layer, on each int8 value: clip, then look up in a table, then add a residual."""

    clip: tuple[int, int] = (-128, 127)
    table: Int8 | None = None
    residual: Residual | None = None


@dataclass(frozen=True)
class Window:
    """Geometry of a convolution or pooling, (vertical, horizontal); pads are (top, left, bottom, right)."""

    kernel: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    dilations: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def pointwise(self) -> bool:
        """Whether each output position reads the same position of the input alone."""
        return self.kernel == (1, 1) and self.strides == (1, 1) and not any(self.pads)

    def reach(self, axis: int) -> int:
        """Input positions along an axis that the kernel of one output position spans."""
        return (self.kernel[axis] - 1) * self.dilations[axis] + 1


@dataclass(frozen=True)
class Gemm:
    """Sums of products of the window with constant `weights`, [out, in/groups, kernel_h, kernel_w] int8.

    Matrix multiplication is a 1x1 window over images of one pixel. spare: columns at the end of y that its tensor has
    not, made of padding. filling: weights that only fill up blocks and are no multiplication of the model. sum_bytes:
    where not 0, y holds that many bytes of each sum in place of a scaled one, the lowest bytes of all output channels
    first; the output channels are whole blocks then, and the layer has no `requantise`.
    """

    weights: Int8
    groups: int = 1
    spare: int = 0
    filling: int = 0
    sum_bytes: int = 0


@dataclass(frozen=True)
class ActivationGemm:
    """Sums over channels of (x + x_offset) * (w + w_offset), where w is an activation, too.

    x [1, channels, 1, rows], w [1, channels, 1, columns], y [1, columns, 1, rows]: pixels of w are the channels of y,
    in whole blocks of the array; pixels beyond the channels of y make none that anything reads. Channels beyond the
    last of either are loaded, too: in one of them they are minus the offset, and so add nothing. transposes: x is the
    identity matrix, so that the layer transposes w and multiplies nothing of the model.
    """

    w: Activation
    x_offset: int
    w_offset: int
    transposes: bool = False

    @property
    def x_pads(self) -> list[int]:
        """Rows of padding below x, which add up to its offset; all are alike."""
        return summands(self.x_offset)

    @property
    def w_pads(self) -> list[int]:
        """Pads of w, which add up to its offset."""
        return summands(self.w_offset)

    @property
    def window(self) -> Window:
        """The terms of each product as positions of a kernel: x times the padding of w, x times w, and the padding of
        x times w. x is repeated for the first ones, and w for the last. `Layer.parameters` adds the product of the
        offsets."""
        return Window((len(self.w_pads) + 1 + len(self.x_pads), 1), pads=(0, 0, len(self.x_pads), 0))

    @property
    def pad_value(self) -> int:
        """Value of the rows of padding below x."""
        return max(self.x_pads, default=0, key=abs)


def summands(offset: int) -> list[int]:
    """Equal bytes that add up to `offset`, at most 128: as few as can be.

    >>> summands(-5), summands(128), summands(0)
    ([-5], [64, 64], [])
    """
    return [] if not offset else [offset] if offset < 128 else [offset // 2] * 2


@dataclass(frozen=True)
class Multiplication:
    """Product by another activation, element by element: (x + x_offset) * (b + b_offset).

    b has the shape of x, or one pixel for all of x's.
    """

    b: Activation
    x_offset: int
    b_offset: int


@dataclass(frozen=True)
class Softmax:
    """Softmax of each pixel's channels, as QLinearSoftmax computes it.

    powers: [512] float32, as `numerics.softmax_powers` makes them. Channels beyond the last get the zero point.
    """

    powers: NDArray[np.float32]
    zero_point: int


@dataclass(frozen=True)
class Norm:
    """Normalisation: each pixel's channels over their deviation, see sim/functional/norm.py; requantised from
    NORM_FRACTION bits behind the point.

    offset: added to x. centre: whether the mean is subtracted. epsilon: added to variances.
    """

    offset: int
    centre: bool
    epsilon: int


@dataclass(frozen=True)
class Layer:
    """One step of the accelerator: read x, optionally multiply matrices, run the vector unit's pipeline, write y.

    The fields after `pad_value` stand in the order in which they are applied, as in the hardware; what is None or empty
    is left out. At most one of gemm, product, reduce, multiply, softmax and norm is there; with none of them the layer
    is its epilogue alone.

    gemm: product with constant weights; of one channel each, the vector unit may compute it, see `is_depthwise`.
    product: product with an activation. window, pad_value: of gemm or reduce. reduce: combine the window of x by "max"
    or "sum". multiply: by another activation. softmax, norm: over the channels of each pixel. heads: equal shares of
    the channels, whole groups, that are products or rows of their own. requantise: scale int32 results to int8.

    A *block* is layers that run as one, each on what the one before it has left in a scratchpad; see `Layer.block`.
    """

    name: str
    x: Activation
    y: Activation
    window: Window = Window((1, 1))
    pad_value: int = 0
    gemm: Gemm | None = None
    product: ActivationGemm | None = None
    reduce: str = ""
    multiply: Multiplication | None = None
    softmax: Softmax | None = None
    norm: Norm | None = None
    requantise: Requantise | None = None
    epilogue: Epilogue = field(default_factory=Epilogue)
    heads: int = 1
    layers: tuple[Layer, ...] = ()
    cuts: tuple[int, ...] = ()

    @staticmethod
    def block(layers: tuple[Layer, ...], cuts: tuple[int, ...] = ()) -> Layer:
        """Layers that run as one.

        The y of each but the last is read by the next and by nothing else, as its x, or as the operand of its residual
        where it is a map; its storage lies nowhere in DRAM. Either only the last has a residual, and none is a map, or
        all are maps but the first, which has a `gemm`. Or they are attention: a product of two activations, the softmax
        of its rows, and the product of these by another activation.

        cuts: numbers of layers that begin only when all of their input lies in a scratchpad, whole images. The layers
        between two cuts run tile by tile together.
        """
        groups = [layers[a:b] for a, b in pairwise((0, *cuts, len(layers)))]
        name = BETWEEN_GROUPS.join(f"{g[0].name} .. {g[-1].name}" if len(g) > 1 else g[0].name for g in groups)
        last = layers[-1]
        return Layer(name, layers[0].x, last.y, epilogue=last.epilogue, layers=layers, cuts=cuts)

    @property
    def is_block(self) -> bool:
        """Whether this is several layers that run as one."""
        return bool(self.layers)

    @property
    def kind(self) -> str:
        """Name of the first operation, as reports and Program files show it."""
        operations = {
            "Block": self.is_block, "Conv": self.gemm, "ActivationProduct": self.product, "Pool": self.reduce,
            "Multiply": self.multiply, "Softmax": self.softmax, "Norm": self.norm,
        }  # fmt: skip
        return next((name for name, operation in operations.items() if operation), "Map")

    @property
    def is_map(self) -> bool:
        """Whether the layer is its epilogue alone: a copy, a table, or an addition of two tensors."""
        return self.kind == "Map"

    @property
    def works_on_rows(self) -> bool:
        """Whether all channels of a pixel are needed for each of its results."""
        return self.softmax is not None or self.norm is not None

    @property
    def row_length(self) -> int:
        """Channels of x in a row of a softmax or norm, or in a head of a product."""
        return self.x.channels // self.heads

    @property
    def macs(self) -> int:
        """Multiplications of the model. Those of padding, of offsets, and of channels that fill up a group of y do not
        count."""
        if self.is_block:
            return sum(layer.macs for layer in self.layers)
        if self.gemm is not None:
            pixels = self.y.images * self.y.height * (self.y.width - self.gemm.spare)
            return pixels * (self.gemm.weights.size - self.gemm.filling)
        if self.product is None or self.product.transposes:
            return 0
        assert self.requantise is not None
        return len(self.requantise.bias) * self.y.width * self.x.channels

    def is_depthwise(self, cfg: Config) -> bool:
        """Whether the vector unit multiplies: each channel is made of one of its own."""
        if self.gemm is None or not cfg.taps or self.epilogue.residual is not None:
            return False
        return 1 < self.gemm.groups == self.x.channels == self.y.channels

    def uses_gemm(self, cfg: Config) -> bool:
        """Whether the GEMM unit multiplies by constant weights."""
        return self.gemm is not None and not self.is_depthwise(cfg)

    def parameters(self, cfg: Config) -> Requantise | None:
        """The requantisation of sums. For a product, its bias includes what the offsets alone add over all channels."""
        if self.product is None or self.requantise is None:
            return self.requantise
        channels = -(-self.row_length // cfg.group) * cfg.group
        added = channels * self.product.x_offset * self.product.w_offset
        bias = (self.requantise.bias.astype(np.int64) + added).astype(np.int32)
        return replace(self.requantise, bias=bias)

    def intermediate_bytes(self, cfg: Config) -> int:
        """Bytes of the activations between the layers of a block, which never reach DRAM."""
        return sum(layer.y.size(cfg) for layer in self.layers[:-1])

    def inputs(self) -> list[Activation]:
        """The activations that are read in DRAM: x, then the second operand, then that of the residual."""
        if self.is_block:
            inside = {layer.y for layer in self.layers[:-1]}
            return [act for layer in self.layers for act in layer.inputs() if act not in inside]
        read = [self.x]
        if self.multiply is not None:
            read.append(self.multiply.b)
        if self.product is not None:
            read.append(self.product.w)
        if self.epilogue.residual is not None:
            read.append(self.epilogue.residual.operand)
        return read

    def map_activations(self, change: Callable[[Activation], Activation]) -> Layer:
        """Return this layer on other activations: `change` gives the new one for each."""
        if self.is_block:
            return Layer.block(tuple(layer.map_activations(change) for layer in self.layers), self.cuts)
        product, multiply, epilogue = self.product, self.multiply, self.epilogue
        if product is not None:
            product = replace(product, w=change(product.w))
        if multiply is not None:
            multiply = replace(multiply, b=change(multiply.b))
        if epilogue.residual is not None:
            residual = replace(epilogue.residual, operand=change(epilogue.residual.operand))
            epilogue = replace(epilogue, residual=residual)
        x, y = change(self.x), change(self.y)
        return replace(self, x=x, y=y, product=product, multiply=multiply, epilogue=epilogue)


BETWEEN_GROUPS = " | "
"""In the name of a block, between the layers of one group and those of the next."""


def group_names(block_name: str) -> list[str]:
    """Names of the groups of the block called `block_name`."""
    return block_name.split(BETWEEN_GROUPS)
