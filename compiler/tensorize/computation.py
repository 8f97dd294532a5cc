"""LayerComputation: a layer as tensor expressions, and where its tensors lie."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.expr import Axis, Tensor, Var, placeholder
from celosia.compiler.expr.nodes import walk
from celosia.compiler.layer import Activation, Storage
from celosia.compiler.tensorize.block_space import BlockWorkload
from celosia.compiler.tensorize.intrinsics import VectorOp
from celosia.compiler.tensorize.space import Workload
from celosia.hw.spec.config import Config

Blob = NDArray[np.uint8]


PIECE_AXIS = 4
"""The axis of pieces in constant weights, [blocks, input blocks, rows and columns of the window, *entry of wgt]."""


@dataclass(frozen=True)
class DramPlace:
    """The place of a tensor in DRAM: `offset` bytes after the begin of `home`, a storage of activations or constants.

    strides: bytes from one index to the next in each dimension; 0 for values within an entry of packed weights.
    book_bytes: size of the codebooks at the begin of `home` that expand packed weights; 0 for other tensors.
    """

    home: Storage | NDArray[np.uint8]
    offset: int
    strides: tuple[int, ...]
    book_bytes: int = 0


@dataclass(frozen=True)
class ActivationGrid:
    """An activation as images x groups x rows x columns of pieces.

    If every image is one pixel (a matrix), the images become the columns of a single row, so that a tile can hold many
    of them; this must then be so for input, output and operands of the layer. images: batches of images. strides: bytes
    from one image, group, row and column to the next. offset: byte in its storage where it begins.
    """

    act: Activation
    images: int
    rows: int
    columns: int
    strides: tuple[int, int, int, int]
    offset: int

    @staticmethod
    def of(cfg: Config, act: Activation, matrix: bool) -> ActivationGrid:
        """Return the grid of an activation. matrix: whether its batches become columns."""
        pixels, piece = act.pixels, cfg.piece_bytes
        row, plane = pixels.columns * piece, pixels.rows * pixels.columns * piece
        image = act.storage_groups * plane
        offset = act.group_offset * plane + pixels.top * row + pixels.left * piece
        if matrix:
            return ActivationGrid(act, 1, 1, act.batches(cfg), (0, plane, 0, image), offset)
        strides = (image, plane, pixels.down * row, pixels.across * piece)
        return ActivationGrid(act, act.batches(cfg), act.height, act.width, strides, offset)

    def repeated(self, times: int) -> ActivationGrid:
        """Return the grid with its only row repeated `times` times, all at the same place in DRAM."""
        return replace(self, rows=times, strides=(*self.strides[:2], 0, self.strides[3]))

    def tensor(self, cfg: Config, name: str, groups: int, first: int = 0) -> tuple[Tensor, DramPlace]:
        """Return the tensor [images, groups, rows, columns, batch, group] from group `first` on, and its place in
        DRAM."""
        shape = (self.images, groups, self.rows, self.columns, cfg.batch, cfg.group)
        strides = (*self.strides, cfg.group, 1)
        offset = self.offset + first * self.strides[1]
        return placeholder(shape, "int8", name), DramPlace(self.act.storage, offset, strides)


@dataclass(frozen=True)
class BlockStage:
    """One layer of a computation: a pass of the vector unit over `acc`, the sums of GEMM, or over `on_chip` itself.

    vector: the operations of the pass. on_chip: the padded input in scratchpad `scope`, [images, blocks, rows, columns,
    *entry]; printed loops call it "near". acc: sums of GEMM, [images, blocks, rows, columns, *entry]. weights, taps,
    par, table: constants in DRAM; taps are the weights of a depthwise convolution on the vector unit. The weights of a
    product of two activations are a tensor computed from one of them. b: operand B of the pass, in vin: the result of
    the stage before, or an activation.
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
    """A softmax or normalisation of rows of `count` elements, computed by the intrinsic `name`.

    within: name of an intrinsic -> sum or maximum of each row that the instruction computes itself, [images, rows,
    columns]; the last one computed is first. powers: of a softmax, [1, 512] float32 in DRAM.
    """

    name: str
    count: int
    within: Mapping[str, Tensor]
    powers: Tensor | None = None


@dataclass(frozen=True)
class LayerComputation:
    """A layer, a part of one, or a block of layers, as tensor expressions.

    stages: its layers in order; `on_chip` or `b` of each but the first is the result of the stage before. out: the
    result of the last pass, [images, blocks, rows, columns, *entry]. y: the same in DRAM, [images, groups, rows,
    columns, batch, group], without groups that hold no channels. inputs: tensors in DRAM that it reads. places: where
    inputs and y lie. scalars: numbers by name; loops do not depend on them. rows: for a softmax or norm, whose on_chip
    and out are [images, rows, columns, channels].
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
        """Key that is equal for computations with the same loops; addresses, data and scalars do not count.

        Nor does the axis of pieces in weights whose entries have one piece: tuning records may be older than it.
        """
        arrays = (*self.inputs, self.y)
        weights = [stage.weights for stage in self.stages]

        def layout(t: Tensor) -> tuple[Hashable, ...]:
            """Return the shape of a tensor in DRAM and the bytes from one index to the next."""
            shape, strides = t.shape, self.places[t].strides
            if any(t is w for w in weights) and shape[PIECE_AXIS] == 1:
                kept = [axis for axis in range(len(shape)) if axis != PIECE_AXIS]
                return tuple(shape[axis] for axis in kept), tuple(strides[axis] for axis in kept)
            return shape, strides

        passes = tuple(
            (stage.vector, str(stage.on_chip.body)) for stage in self.stages
        )  # the body says whether it is padded
        rows: tuple[Hashable, ...] = () if self.rows is None else (self.rows.count,)
        if self.rows is not None and self.rows.powers is None:
            rows = *rows, self.rows.name
        return self.workload, passes, tuple((t.name, *layout(t)) for t in arrays), *rows

    @cached_property
    def digest(self) -> str:
        """Digest of the signature, the same in all processes."""
        return hashlib.sha256(repr(self.signature).encode()).hexdigest()
