"""Activations in the accelerator's layout and layers over them, in one file as all of the compiler speaks of both.

A layer is one anchor (convolution, pooling or an elementwise map) with its epilogue. Everything here is integers;
the numbers that make it exact (multipliers, shifts, tables) were derived and proved before.
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
    """A layer that no tiling fits into the scratchpads; the message says which one is too small."""


@dataclass(frozen=True, eq=False)
class Storage:
    """Memory of activations, with `groups` channel groups for each image. The object is its identity; `name` is for
    messages, and may be empty or that of another. lasting: what it holds stays there from run to run."""

    name: str
    groups: int
    lasting: bool = False


@dataclass(frozen=True)
class Activation:
    """An int8 tensor in DRAM, [images/batch][channels/group][height][width][batch][group].

    Several activations share a storage where a tensor is a part of another: this one begins `group_offset` channel
    groups into it, and where it has not all of its pixels, `strided_view` says which. Of a matrix [rows, columns] the
    rows are images and the columns channels. Two activations of the same place and dimensions are equal: the name, for
    messages, does not count.
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
        """An activation in a storage of its own."""
        storage = Storage(name, padded_groups(cfg, channels), lasting)
        return Activation(name, images, channels, height, width, storage)

    @property
    def dims(self) -> tuple[int, int, int, int]:
        """(images, channels, height, width)."""
        return self.images, self.channels, self.height, self.width

    @property
    def storage_groups(self) -> int:
        """Channel groups of the storage, of which this may be a part."""
        return self.storage.groups

    @property
    def pixels(self) -> StridedView:
        """Strided view of the storage's pixels that belong to this activation."""
        return self.strided_view or StridedView(self.height, self.width)

    def cut(self, cfg: Config) -> tuple[slice, slice, slice]:
        """Channel groups, rows and columns of the storage that it has."""
        groups = slice(self.group_offset, self.group_offset + self.groups(cfg))
        return groups, *self.pixels.cut(self.height, self.width)

    def region(self, dims: tuple[int, int, int, int], group: int, strided_view: StridedView) -> Activation:
        """The part of it with `dims`, from its channel group `group` on, of those of its pixels in `strided_view`."""
        images, channels, height, width = dims
        pixels = strided_view.within(self.pixels)
        whole = pixels == StridedView(height, width)
        offset = self.group_offset + group
        return Activation(self.name, images, channels, height, width, self.storage, offset, None if whole else pixels)

    def moved(self, whole: Activation) -> Activation:
        """Re-base this view: its storage is now a region of `whole`."""
        pixels = self.pixels
        if (pixels.rows, pixels.columns) == (whole.height, whole.width):
            return replace(whole.region(self.dims, self.group_offset, pixels), name=self.name)
        pixels = pixels.column_within(whole.pixels, whole.width)
        offset = whole.group_offset + self.group_offset
        return replace(self, storage=whole.storage, group_offset=offset, strided_view=pixels)

    def overlaps(self, cfg: Config, other: Activation) -> bool:
        """Whether the two share pieces."""
        if self.storage is not other.storage:
            return False
        sides = list(zip(self.cut(cfg), other.cut(cfg), strict=True))
        if (self.pixels.rows, self.pixels.columns) != (other.pixels.rows, other.pixels.columns):
            sides = sides[:1]  # one has the rows of the other as other rows
        return all(_meet(range(a.stop)[a], range(b.stop)[b]) for a, b in sides)

    def batches(self, cfg: Config) -> int:
        """Batches of `cfg.batch` images, the last perhaps not full."""
        return -(-self.images // cfg.batch)

    def groups(self, cfg: Config) -> int:
        """Channel groups that hold channels of this activation."""
        return whole_groups(cfg, self.channels) // cfg.group

    def size(self, cfg: Config) -> int:
        """Bytes of the whole storage."""
        pixels = self.pixels.rows * self.pixels.columns
        return self.batches(cfg) * self.storage_groups * pixels * cfg.piece_bytes


def _meet(a: range, b: range) -> bool:
    """Whether the two have a number in common."""
    few, many = sorted((a, b), key=len)
    return any(number in many for number in few)


def whole_groups(cfg: Config, channels: int) -> int:
    """Channels of the groups that hold so many."""
    return -(-channels // cfg.group) * cfg.group


def padded_groups(cfg: Config, channels: int) -> int:
    """Channel groups of a storage: whole blocks both for the input and for the output side."""
    block = max(cfg.block_in, cfg.block_out)
    return -(-channels // block) * block // cfg.group


@dataclass(frozen=True)
class Requantise:
    """Per-channel scaling of int32 sums: bias int32, multiplier (24 bit), shift (0..63), each of shape [channels]."""

    bias: NDArray[np.int32]
    multiplier: NDArray[np.uint32]
    shift: NDArray[np.uint8]
    zero_point: int


UNSCALED = Requantise(np.zeros(0, np.int32), np.zeros(0, np.uint32), np.zeros(0, np.uint8), 0)
"""Requantisation of sums that stay as they are."""


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
    """Operations on each int8 value after its anchor: clip, then a table, then a residual."""

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
        """True where each output position reads the same position of the input."""
        return self.kernel == (1, 1) and self.strides == (1, 1) and not any(self.pads)

    def reach(self, axis: int) -> int:
        """Input positions that one output position spans."""
        return (self.kernel[axis] - 1) * self.dilations[axis] + 1


@dataclass(frozen=True)
class Conv:
    """y = epilogue(requantise(sum over window of x * weights)); weights [out, in/groups, kernel_h, kernel_w] int8.

    Matrix multiplication is a 1x1 convolution over images of one pixel. spare: columns at the end of y that its tensor
    has not, made of padding. filling: weights that only fill up blocks, and mean no multiplication. sum_bytes: where
    not 0, y has that many bytes of each sum, in place of a scaled one: the lowest ones of all output channels first.
    These are whole blocks then, and `requantise` is UNSCALED.
    """

    name: str
    x: Activation
    y: Activation
    weights: Int8
    requantise: Requantise
    window: Window
    groups: int = 1
    pad_value: int = 0
    epilogue: Epilogue = field(default_factory=Epilogue)
    spare: int = 0
    filling: int = 0
    sum_bytes: int = 0

    @property
    def macs(self) -> int:
        """Multiplications that the layer means, padding and layout losses not counted."""
        return self.y.images * self.y.height * (self.y.width - self.spare) * (self.weights.size - self.filling)


@dataclass(frozen=True)
class Pool:
    """y = epilogue(max, or requantise(sum), over the window of x)."""

    name: str
    x: Activation
    y: Activation
    window: Window
    requantise: Requantise | None = None
    pad_value: int = -128
    epilogue: Epilogue = field(default_factory=Epilogue)
    macs: int = 0


@dataclass(frozen=True)
class Map:
    """y = epilogue(x), for a table or a residual addition of two tensors."""

    name: str
    x: Activation
    y: Activation
    epilogue: Epilogue = field(default_factory=Epilogue)
    macs: int = 0


@dataclass(frozen=True)
class Multiply:
    """y = epilogue(requantise((x + x_offset) * (b + b_offset))); b has the shape of x, or one pixel for all of x's."""

    name: str
    x: Activation
    b: Activation
    y: Activation
    x_offset: int
    b_offset: int
    requantise: Requantise
    epilogue: Epilogue = field(default_factory=Epilogue)
    macs: int = 0


@dataclass(frozen=True)
class ActivationProduct:
    """y = epilogue(requantise(sum over channels of (x + x_offset) * (w + w_offset))): both are activations.

    x [1, channels, 1, rows], w [1, channels, 1, columns], y [1, columns, 1, rows]: pixels of w are the channels of y,
    in whole blocks of the array; those beyond the channels of y make none that anyone looks at. Channels beyond the
    last of either are loaded, too: in one of them they are minus the offset, and so add nothing. moves: x is the
    identity, so that the layer turns w and means no multiplication. heads: so many products with one `requantise`, of
    equal shares of the channels of x, w and y, whole groups.
    """

    name: str
    x: Activation
    w: Activation
    y: Activation
    x_offset: int
    w_offset: int
    requantise: Requantise
    epilogue: Epilogue = field(default_factory=Epilogue)
    moves: bool = False
    heads: int = 1

    @property
    def macs(self) -> int:
        """Multiplications that the layer means, those by offsets not counted, nor those of channels that y only has to
        fill its last group."""
        return 0 if self.moves else len(self.requantise.bias) * self.y.width * self.x.channels

    @property
    def x_pads(self) -> list[int]:
        """Rows of padding below x, which add up to its offset; all are alike."""
        return summands(self.x_offset)

    @property
    def w_pads(self) -> list[int]:
        """Pads of w."""
        return summands(self.w_offset)

    @property
    def window(self) -> Window:
        """The terms of each product as places of a kernel: x times the padding of w, x times w, and the padding of x
        times w. x is repeated for the first ones, and w for the last. What offsets add alone is in `parameters`."""
        return Window((len(self.w_pads) + 1 + len(self.x_pads), 1), pads=(0, 0, len(self.x_pads), 0))

    @property
    def pad_value(self) -> int:
        """Value of the rows of padding below x."""
        return max(self.x_pads, default=0, key=abs)

    def parameters(self, cfg: Config) -> Requantise:
        """`requantise` with the products of the offsets, for all channels that are loaded."""
        added = -(-self.x.channels // self.heads // cfg.group) * cfg.group * self.x_offset * self.w_offset
        return replace(self.requantise, bias=(self.requantise.bias.astype(np.int64) + added).astype(np.int32))


def summands(offset: int) -> list[int]:
    """Equal bytes that add up to `offset`, at most 128: as few as can be.

    >>> summands(-5), summands(128), summands(0)
    ([-5], [64, 64], [])
    """
    return [] if not offset else [offset] if offset < 128 else [offset // 2] * 2


@dataclass(frozen=True)
class Softmax:
    """y = softmax of each pixel's channels, as QLinearSoftmax computes it, clipped. powers: [512] float32, as
    `numerics.softmax_powers` makes them; channels beyond the last get the zero point. heads: so many equal shares of
    the channels, whole groups, are rows of their own."""

    name: str
    x: Activation
    y: Activation
    powers: NDArray[np.float32]
    zero_point: int
    epilogue: Epilogue = field(default_factory=Epilogue)
    macs: int = 0
    heads: int = 1

    @property
    def count(self) -> int:
        """Elements of a row."""
        return self.x.channels // self.heads


@dataclass(frozen=True)
class Norm:
    """y = requantised rows of each pixel's channels over their deviation, see sim/functional/norm.py.

    offset: added to x. centre: less their mean. epsilon: what is added to variances. requantise: of results with
    NORM_FRACTION bits behind the point.
    """

    name: str
    x: Activation
    y: Activation
    offset: int
    centre: bool
    epsilon: int
    requantise: Requantise
    epilogue: Epilogue = field(default_factory=Epilogue)
    macs: int = 0

    @property
    def count(self) -> int:
        """Elements of a row."""
        return self.x.channels


Part = Conv | Pool | Map | ActivationProduct | Softmax
"""What a block may consist of."""
BETWEEN_GROUPS = " | "
"""In the name of a block."""


@dataclass(frozen=True)
class Block:
    """Layers that run as one, each on what the one before it has left in a scratchpad.

    The y of each but the last is read by the next and by nobody else, as its x, or as the operand of its residual where
    it is a Map; its storage lies nowhere in DRAM. Either only the last has a residual, and none is a Map, or all are
    Maps but the first, which is a Conv. Or they are attention: a product of two activations, the softmax of its rows,
    and the product of these by another activation.

    cuts: numbers of layers that begin only when all of what they read lies in a scratchpad, whole images. The layers
    between two cuts run tile by tile together.
    """

    layers: tuple[Part, ...]
    cuts: tuple[int, ...] = ()

    @property
    def groups(self) -> list[tuple[Part, ...]]:
        """The layers between cuts."""
        return [self.layers[a:b] for a, b in pairwise((0, *self.cuts, len(self.layers)))]

    @property
    def name(self) -> str:
        """First and last layer of each group."""
        return BETWEEN_GROUPS.join(f"{g[0].name} .. {g[-1].name}" if len(g) > 1 else g[0].name for g in self.groups)

    @staticmethod
    def names(name: str) -> list[str]:
        """The names of the groups of the block of that name."""
        return name.split(BETWEEN_GROUPS)

    @property
    def x(self) -> Activation:
        """What the first layer reads."""
        return self.layers[0].x

    @property
    def y(self) -> Activation:
        """What the last layer writes."""
        return self.layers[-1].y

    @property
    def epilogue(self) -> Epilogue:
        """Epilogue of the last layer."""
        return self.layers[-1].epilogue

    @property
    def macs(self) -> int:
        """MACs of all layers."""
        return sum(layer.macs for layer in self.layers)

    def kept(self, cfg: Config) -> int:
        """Bytes of the intermediates."""
        return sum(layer.y.size(cfg) for layer in self.layers[:-1])


Layer = Conv | Pool | Map | Multiply | ActivationProduct | Softmax | Norm | Block


def inputs(layer: Layer) -> list[Activation]:
    """The activations that `layer` reads in DRAM."""
    if isinstance(layer, Block):
        inside = {each.y for each in layer.layers[:-1]}
        return [act for each in layer.layers for act in inputs(each) if act not in inside]
    operands = [layer.x]
    if isinstance(layer, Multiply):
        operands.append(layer.b)
    if isinstance(layer, ActivationProduct):
        operands.append(layer.w)
    if layer.epilogue.residual is not None:
        operands.append(layer.epilogue.residual.operand)
    return operands


def ending(layer: Layer, epilogue: Epilogue, y: Activation) -> Layer:
    """`layer`, which is no block, with another end."""
    assert not isinstance(layer, Block)
    return replace(layer, epilogue=epilogue, y=y)


def moved(layer: Layer, placed: Callable[[Activation], Activation]) -> Layer:
    """`layer` on the activations that `placed` puts in the places of its own."""
    if isinstance(layer, Block):
        parts = [moved(each, placed) for each in layer.layers]
        return Block(tuple(part for part in parts if isinstance(part, Part)), layer.cuts)
    epilogue = layer.epilogue
    if epilogue.residual is not None:
        residual = replace(epilogue.residual, operand=placed(epilogue.residual.operand))
        epilogue = replace(epilogue, residual=residual)
    layer = replace(layer, x=placed(layer.x), y=placed(layer.y), epilogue=epilogue)
    if isinstance(layer, ActivationProduct):
        return replace(layer, w=placed(layer.w))
    return replace(layer, b=placed(layer.b)) if isinstance(layer, Multiply) else layer
