"""A layer as tensor expressions, and where its tensors lie."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.expr import Axis, Expr, Tensor, Var, placeholder
from celosia.compiler.expr.walk import walk
from celosia.compiler.layer import Activation, Layer, Window
from celosia.compiler.tensorize.block_space import BlockWorkload
from celosia.compiler.tensorize.intrinsics import VectorOp
from celosia.compiler.tensorize.space import Workload
from celosia.compiler.tensorize.transfer import DramPlace
from celosia.hw.spec.config import Config

Blob = NDArray[np.uint8]


@dataclass(frozen=True)
class ActivationGrid:
    """An activation as images x groups x rows x columns of pieces.

    Where every image is one pixel (a matrix), the images become the columns of a single row, so that a tile can hold
    many of them; `matrix` must then hold for all sides of a layer.
    """

    act: Activation
    images: int
    rows: int
    columns: int
    strides: tuple[int, int, int, int]
    offset: int

    @staticmethod
    def of(cfg: Config, act: Activation, matrix: bool) -> ActivationGrid:
        """Grid of the activation; matrix: its batches lie along columns."""
        pixels, piece = act.pixels, cfg.piece_bytes
        row, plane = pixels.columns * piece, pixels.rows * pixels.columns * piece
        image = act.storage_groups * plane
        offset = act.group_offset * plane + pixels.top * row + pixels.left * piece
        if matrix:
            return ActivationGrid(act, 1, 1, act.batches(cfg), (0, plane, 0, image), offset)
        strides = (image, plane, pixels.down * row, pixels.across * piece)
        return ActivationGrid(act, act.batches(cfg), act.height, act.width, strides, offset)

    def repeated(self, times: int) -> ActivationGrid:
        """Images whose only row is there as often, at the same place."""
        return replace(self, rows=times, strides=(*self.strides[:2], 0, self.strides[3]))

    def tensor(self, cfg: Config, name: str, groups: int, first: int = 0) -> tuple[Tensor, DramPlace]:
        """[images, groups, rows, columns, batch, group] from group `first` on."""
        shape = (self.images, groups, self.rows, self.columns, cfg.batch, cfg.group)
        strides = (*self.strides, cfg.group, 1)
        offset = self.offset + first * self.strides[1]
        return placeholder(shape, "int8", name), DramPlace(self.act.storage, offset, strides)


@dataclass(frozen=True)
class BlockStage:
    """One layer of a computation: a pass of the vector unit over `acc`, the sums of GEMM, or over `on_chip` itself.

    on_chip [images, blocks, rows, columns, *entry]: its input, padded, in scratchpad `scope`; the tensor is called
    "near" in printed loops. acc [images, blocks, rows, columns,
    *entry]. weights, taps, par, table: constants in DRAM; taps are those of a depthwise sum of the vector unit. weights
    of a product of two activations are computed from one of them. b: operand B of the pass, in vin: what the pass of
    the stage before makes, or an activation.
    """

    vector: VectorOp
    on_chip: Tensor
    scope: str
    acc: Tensor | None = None
    weights: Tensor | None = None
    taps: Tensor | None = None
    par: Tensor | None = None
    table: Tensor | None = None
    b: Tensor | None = None


@dataclass(frozen=True)
class Rows:
    """Operation on rows of `count` elements by the intrinsic `name`.

    within: sums or maxima of each row, [images, rows, columns], by the names of their intrinsics, the last one first.
    powers: of a softmax, [1, 512] float32 in DRAM.
    """

    name: str
    count: int
    within: Mapping[str, Tensor]
    powers: Tensor | None = None


@dataclass(frozen=True)
class LayerComputation:
    """A layer, a part of one, or a block of layers, as tensor expressions.

    stages: its layers in order; `on_chip` or `b` of each but the first is the result of the one before. out [images,
    blocks, rows, columns, *entry]: what the last pass makes. y [images, groups, rows, columns, batch, group]: in DRAM,
    `groups` of it exist. inputs: what lies in DRAM; places says where. scalars: numbers
    by name, of which no loop depends. rows: of a softmax or norm, whose on_chip and out are [images, rows, columns,
    channels].
    """

    workload: Workload | BlockWorkload
    stages: tuple[BlockStage, ...]
    out: Tensor
    y: Tensor
    inputs: tuple[Tensor, ...]
    places: Mapping[Tensor, DramPlace]
    scalars: Mapping[str, float] = field(default_factory=dict)
    rows: Rows | None = None

    @property
    def last(self) -> BlockStage:
        """The stage that makes the output."""
        return self.stages[-1]

    @property
    def variables(self) -> tuple[Var, ...]:
        """The scalars, as they occur in the expressions."""
        tensors = [tensor for stage in self.stages for tensor in (stage.on_chip, stage.acc)]
        bodies = [t.body for t in (*tensors, self.out, self.y) if t is not None and t.body is not None]
        variables = (n for body in bodies for n in walk(body) if isinstance(n, Var) and not isinstance(n, Axis))
        return tuple(dict.fromkeys(variables))

    @cached_property
    def signature(self) -> Hashable:
        """Equal for computations whose loops are the same, wherever their arrays lie and whatever their scalars are."""
        arrays = (*self.inputs, self.y)
        passes = tuple((stage.vector, str(stage.on_chip.body)) for stage in self.stages)  # with the padding that it has
        rows: tuple[Hashable, ...] = () if self.rows is None else (self.rows.count,)
        if self.rows is not None and self.rows.powers is None:
            rows = *rows, self.rows.name
        return self.workload, passes, tuple((t.name, t.shape, self.places[t].strides) for t in arrays), *rows

    @cached_property
    def digest(self) -> str:
        """Digest of the signature, the same wherever it is asked for."""
        return hashlib.sha256(repr(self.signature).encode()).hexdigest()


def window_of(layer: Layer) -> Window:
    """Window over x of the sums of `layer`: that of a product of activations has rows for their offsets."""
    return layer.window if layer.product is None else layer.product.window


def zero_point(layer: Layer) -> dict[str, float]:
    """The scalar of VECTOR that holds the zero point of y; {} without requantisation."""
    return {} if layer.requantise is None else {"zero_point": layer.requantise.zero_point}


def within(index: Expr, size: int, count: int, step: int, before: int) -> list[Expr]:
    """Tests that `index`, i * step - before for i < count, is one of `size`; only those that can fail."""
    tests = [index >= 0] if before > 0 else []
    if (count - 1) * step - before >= size:
        tests.append(index < size)
    return tests
