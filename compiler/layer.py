"""Activations in the accelerator's layout, and layers over them.

A `Layer` is what the accelerator computes together: activations that it reads and writes, an optional matrix product on
the GEMM unit, and the operations of the vector unit that follow, in the order of its pipeline. All values are integers;
the numbers that make them exact (multipliers, shifts, tables) are derived in numerics/. A `StridedView` selects pixels
of an image, such as every second row and column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from celosia.hw.spec.config import Config

Int8 = NDArray[np.int8]


class TilingError(ValueError):
    """Raised if no tiling of a layer fits the scratchpads or an instruction's fields; the message says which limit is
    too low."""


@dataclass(frozen=True, eq=False)
class Storage:
    """A piece of DRAM that holds activations, with `groups` channel groups for each image.

    Two storages are equal only if they are the same object; `name` is for messages and need not be unique. lasting:
    whether the content stays from run to run, as a cache's does.
    """

    name: str
    groups: int
    lasting: bool = False


@dataclass(frozen=True)
class StridedView:
    """Pixels of images of `rows` x `columns`: from (top, left) on, every `down`-th row and `across`-th column."""

    rows: int
    columns: int
    top: int = 0
    left: int = 0
    down: int = 1
    across: int = 1

    def cut(self, height: int, width: int) -> tuple[slice, slice]:
        """Return the slices of the image's rows and columns that are the view's first `height` x `width` pixels."""
        return (
            slice(self.top, self.top + (height - 1) * self.down + 1, self.down),
            slice(self.left, self.left + (width - 1) * self.across + 1, self.across),
        )

    def within(self, outer: StridedView) -> StridedView:
        """Compose two views: return the view that selects with `self` from the pixels that `outer` selects."""
        top, left = outer.top + self.top * outer.down, outer.left + self.left * outer.across
        return StridedView(outer.rows, outer.columns, top, left, self.down * outer.down, self.across * outer.across)

    def column_within(self, outer: StridedView, width: int) -> StridedView:
        """Compose with `outer` for a view that is one column of pixels.

        `self` selects from images of `width` columns whose pixels are numbered as one row; the result selects in the
        same way from the images of `outer`.
        """
        row, column = divmod(self.left, width)
        left = (outer.top + row * outer.down) * outer.columns + outer.left + column * outer.across
        return StridedView(1, outer.rows * outer.columns, 0, left, 1, self.across // width * outer.down * outer.columns)


@dataclass(frozen=True)
class Activation:
    """An int8 tensor in DRAM, [images/batch][channels/group][height][width][batch][group].

    Several activations share a storage if a tensor is a part of another: this one begins `group_offset` channel groups
    into it, and `strided_view` selects its pixels; None if it has all. A matrix has its rows as images and its columns
    as channels. Two activations of the same place and dimensions are equal: `name` is for messages and does not count.
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
        """Return the slices of the storage's channel groups, rows and columns that are this activation."""
        groups = slice(self.group_offset, self.group_offset + self.groups(cfg))
        return groups, *self.pixels.cut(self.height, self.width)

    def region(self, dims: tuple[int, int, int, int], group: int, strided_view: StridedView) -> Activation:
        """Return a part of this activation.

        dims: its [images, channels, height, width]. group: its first channel group in this activation. strided_view:
        selects its pixels from those of this activation.
        """
        images, channels, height, width = dims
        pixels = strided_view.within(self.pixels)
        has_all_pixels = pixels == StridedView(height, width)
        offset = self.group_offset + group
        return Activation(
            self.name, images, channels, height, width, self.storage, offset, None if has_all_pixels else pixels
        )

    def rebased(self, whole: Activation) -> Activation:
        """Return this activation moved to the storage of `whole`: its own storage becomes that region.

        Concatenations do so: layers that make their parts then write into the storage of the result.
        """
        pixels = self.pixels  # of its storage, which may have all rows and columns of `whole`, or some columns
        if (pixels.rows, pixels.columns) == (whole.height, whole.width):
            return replace(whole.region(self.dims, self.group_offset, pixels), name=self.name)
        pixels = pixels.column_within(whole.pixels, whole.width)
        offset = whole.group_offset + self.group_offset
        return replace(self, storage=whole.storage, group_offset=offset, strided_view=pixels)

    def overlaps(self, cfg: Config, other: Activation) -> bool:
        """Whether the two activations have pieces of a storage in common."""
        if self.storage is not other.storage:
            return False
        sides = list(zip(self.cut(cfg), other.cut(cfg), strict=True))
        if (self.pixels.rows, self.pixels.columns) != (other.pixels.rows, other.pixels.columns):
            sides = sides[:1]  # their rows and columns are not comparable
        return all(_intersect(range(a.stop)[a], range(b.stop)[b]) for a, b in sides)

    def batches(self, cfg: Config) -> int:
        """Return the number of batches of `cfg.batch` images; the last one may not be full."""
        return -(-self.images // cfg.batch)

    def groups(self, cfg: Config) -> int:
        """Return the number of channel groups that hold channels of this activation."""
        return whole_groups(cfg, self.channels) // cfg.group

    def size(self, cfg: Config) -> int:
        """Return the size in bytes of the whole storage."""
        pixels = self.pixels.rows * self.pixels.columns
        return self.batches(cfg) * self.storage_groups * pixels * cfg.piece_bytes


def _intersect(a: range, b: range) -> bool:
    """Whether two ranges have a number in common."""
    short, long = sorted((a, b), key=len)
    return any(number in long for number in short)


def whole_groups(cfg: Config, channels: int) -> int:
    """Round channels up to whole groups."""
    return -(-channels // cfg.group) * cfg.group


def padded_groups(cfg: Config, channels: int) -> int:
    """Return the number of channel groups of a storage: whole blocks of the array, as its input and as its output."""
    block = max(cfg.block_in, cfg.block_out)
    return -(-channels // block) * block // cfg.group


@dataclass(frozen=True)
class Requantise:
    """Per-channel scaling of int32 sums to int8: round((sum + bias) * multiplier / 2^shift) + zero_point.

    bias: int32. multiplier: 24 bits. shift: 0 to 63. Each has the shape [channels].
    """

    bias: NDArray[np.int32]
    multiplier: NDArray[np.uint32]
    shift: NDArray[np.uint8]
    zero_point: int


@dataclass(frozen=True)
class Residual:
    """Addition y = clip(round((v * scale_v + b * scale_b + scale_c) / 2^shift), lo, hi), b the int8 of activation
    `operand`."""

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
    """Geometry of a convolution or pooling; fields are (vertical, horizontal), pads (top, left, bottom, right)."""

    kernel: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    dilations: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def pointwise(self) -> bool:
        """Whether each output position reads only the same position of the input."""
        return self.kernel == (1, 1) and self.strides == (1, 1) and not any(self.pads)

    def reach(self, axis: int) -> int:
        """Return the number of input positions along an axis that the kernel of one output position spans."""
        return (self.kernel[axis] - 1) * self.dilations[axis] + 1


@dataclass(frozen=True)
class Gemm:
    """Sums of products of the window with constant `weights`, [out, in/groups, kernel_h, kernel_w] int8.

    A matrix multiplication is a 1x1 window over images of one pixel.

    spare: columns at the end of y that do not belong to its tensor and are made of padding. filling: number of weights
    that only fill up blocks and are no multiplications of the model. sum_bytes: if not 0, y holds that many bytes of
    each sum instead of a requantised one, the lowest bytes of all output channels first; the output channels are whole
    blocks then, and the layer has no `requantise`.
    """

    weights: Int8
    groups: int = 1
    spare: int = 0
    filling: int = 0
    sum_bytes: int = 0


@dataclass(frozen=True)
class ActivationGemm:
    """Product of two activations: sums over channels of (x + x_offset) * (w + w_offset).

    x is [1, channels, 1, rows], w [1, channels, 1, columns], y [1, columns, 1, rows]. Pixels of w are the channels of
    y, in whole blocks of the array; nothing reads what those beyond the channels of y make. Channels beyond the last of
    x and w are loaded, too: in one of both they hold minus its offset, and so add nothing. transposes: whether x is the
    identity matrix, so that the layer transposes w and multiplies nothing of the model. filling: number of products
    that only fill up blocks and are no multiplications of the model.
    """

    w: Activation
    x_offset: int
    w_offset: int
    transposes: bool = False
    filling: int = 0

    @property
    def x_pads(self) -> list[int]:
        """Values of rows of padding below x that add up to its offset; all are equal."""
        return summands(self.x_offset)

    @property
    def w_pads(self) -> list[int]:
        """Values of rows of padding above w that add up to its offset; all are equal."""
        return summands(self.w_offset)

    @property
    def window(self) -> Window:
        """The terms of each product as rows of a kernel: x by the padding of w, x by w, the padding of x by w.

        x is repeated for the first of these, and w for the last. `Layer.parameters` adds the product of the offsets.
        """
        return Window((len(self.w_pads) + 1 + len(self.x_pads), 1), pads=(0, 0, len(self.x_pads), 0))

    @property
    def pad_value(self) -> int:
        """Value of the rows of padding below x."""
        return max(self.x_pads, default=0, key=abs)


def summands(offset: int) -> list[int]:
    """Return equal bytes that add up to `offset`, at most 128, as few as possible.

    >>> summands(-5), summands(128), summands(0)
    ([-5], [64, 64], [])
    """
    return [] if not offset else [offset] if offset < 128 else [offset // 2] * 2


@dataclass(frozen=True)
class Multiplication:
    """Product by another activation, element by element: (x + x_offset) * (b + b_offset).

    b has the shape of x, or one pixel that all of x's are multiplied by.
    """

    b: Activation
    x_offset: int
    b_offset: int


@dataclass(frozen=True)
class Softmax:
    """Softmax of each pixel's channels, as QLinearSoftmax computes it.

    powers: [512] float32 from `numerics.softmax_powers`. Channels beyond the last get the zero point.
    """

    powers: NDArray[np.float32]
    zero_point: int


@dataclass(frozen=True)
class Norm:
    """Normalisation: divide each pixel's channels by their deviation (sim/functional/norm.py).

    The result has NORM_FRACTION bits behind the point and is then requantised. offset: added to x. centre: whether the
    mean is subtracted. epsilon: added to variances.
    """

    offset: int
    centre: bool
    epsilon: int


@dataclass(frozen=True)
class Layer:
    """An operation of the accelerator with its fused operators: read x, compute, requantise, epilogue, write y.

    The fields from `gemm` to `epilogue` are applied in their order, as in the hardware; None or "" leaves an operation
    out. At most one of gemm, product, reduce, multiply, softmax and norm is set; with none of them the layer is its
    epilogue.

    window, pad_value: of gemm or reduce. gemm: product with constant weights; the vector unit computes depthwise ones,
    see `is_depthwise`. product: product with an activation. reduce: combine the window of x by "max" or "sum".
    sums_on_gemm: whether GEMM adds up whole images for `reduce`, since they do not fit vin; all channels are then
    requantised alike. multiply: by another activation. softmax, norm: over the channels of each pixel. requantise:
    scale int32 results to int8. epilogue: clip, table and residual. heads: number of equal parts of the channels, each
    of whole channel groups; each part has products or rows of its own.

    A *block* is layers that run as one, each on what the one before has left in a scratchpad. layers: those of a block,
    else (). cuts: see `Layer.block`.
    """

    name: str
    x: Activation
    y: Activation
    window: Window = Window((1, 1))
    pad_value: int = 0
    gemm: Gemm | None = None
    product: ActivationGemm | None = None
    reduce: str = ""
    sums_on_gemm: bool = False
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
        """Create a block: layers that run as one.

        Only the next layer reads the y of each but the last: as its x, or, if it is a map, as the operand of its
        residual. That y is not in DRAM. A block has one of three forms. In a chain none is a map, and only the last may
        have a residual. A convolution with maps has maps only after the first layer, which has a `gemm`. Attention is a
        product of two activations, the softmax of its rows, and the product of these by another activation.

        cuts: numbers of layers that start only when all of their input, whole images, lies in a scratchpad. The layers
        between two cuts are a group, and run tile by tile together.
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
        """Whether each result needs all channels of its pixel: a softmax or normalisation."""
        return self.softmax is not None or self.norm is not None

    @property
    def row_length(self) -> int:
        """Number of channels of x in a row of a softmax or norm, or in a head of a product."""
        return self.x.channels // self.heads

    @property
    def macs(self) -> int:
        """Multiplications of the model. Those by padding and offsets, and those that fill up blocks, do not count."""
        if self.is_block:
            return sum(layer.macs for layer in self.layers)
        if self.gemm is not None:
            pixels = self.y.images * self.y.height * (self.y.width - self.gemm.spare)
            return pixels * (self.gemm.weights.size - self.gemm.filling)
        if self.product is None or self.product.transposes:
            return 0
        assert self.requantise is not None
        return len(self.requantise.bias) * self.y.width * self.x.channels - self.product.filling

    def is_depthwise(self, cfg: Config) -> bool:
        """Whether it is a depthwise convolution on the vector unit: each output channel reads one input channel."""
        if self.gemm is None or not cfg.taps or self.epilogue.residual is not None:
            return False
        return 1 < self.gemm.groups == self.x.channels == self.y.channels

    def uses_gemm(self, cfg: Config) -> bool:
        """Whether the GEMM unit multiplies by constant weights."""
        return self.sums_on_gemm or (self.gemm is not None and not self.is_depthwise(cfg))

    def parameters(self, cfg: Config) -> Requantise | None:
        """Return the requantisation of sums; None if there is none.

        For a product its bias includes the product of the offsets, summed over all channels.
        """
        if self.product is None or self.requantise is None:
            return self.requantise
        channels = -(-self.row_length // cfg.group) * cfg.group
        added = channels * self.product.x_offset * self.product.w_offset
        bias = (self.requantise.bias.astype(np.int64) + added).astype(np.int32)
        return replace(self.requantise, bias=bias)

    def intermediate_bytes(self, cfg: Config) -> int:
        """Return the bytes of the activations between the layers of a block, which never reach DRAM."""
        return sum(layer.y.size(cfg) for layer in self.layers[:-1])

    def inputs(self) -> list[Activation]:
        """Return the activations that are read from DRAM: x, then the second operand, then that of the residual."""
        if self.is_block:
            intermediate = {layer.y for layer in self.layers[:-1]}
            return [act for layer in self.layers for act in layer.inputs() if act not in intermediate]
        read = [self.x]
        if self.multiply is not None:
            read.append(self.multiply.b)
        if self.product is not None:
            read.append(self.product.w)
        if self.epilogue.residual is not None:
            read.append(self.epilogue.residual.operand)
        return read

    def map_activations(self, change: Callable[[Activation], Activation]) -> Layer:
        """Return this layer with each activation that it reads or writes replaced by `change` of it."""
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
"""Separates the names of groups in the name of a block."""


def group_names(block_name: str) -> list[str]:
    """Return the names of the groups of the block called `block_name`."""
    return block_name.split(BETWEEN_GROUPS)
