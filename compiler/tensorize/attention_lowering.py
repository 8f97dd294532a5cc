"""Lower attention as a block: scores and probabilities lie in vin and inp, a row's entries one behind another.

    scores = requantise(Q · Kᵀ)  → vin        probabilities = softmax(scores)  → inp        y = requantise(P · V)

Heads are rows of the computation, queries its columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from celosia.compiler.expr import Axis, Expr, Tensor, compute, reduce_axis, sum
from celosia.compiler.expr.nodes import INDEX, Const
from celosia.compiler.layer import Activation, Layer, TilingError, Window
from celosia.compiler.tensorize import pack
from celosia.compiler.tensorize.computation import ActivationGrid, BlockStage, LayerComputation
from celosia.compiler.tensorize.intrinsics import VectorOp
from celosia.compiler.tensorize.layer_lowering import PLACES, LayerLowering
from celosia.compiler.tensorize.row_lowering import softmax_rows
from celosia.compiler.tensorize.space import Workload
from celosia.hw.spec.config import Config


def attention(cfg: Config, block: Layer) -> LayerComputation:
    """Lower a product, the softmax of its rows, and the product of these.

    TilingError where the Config lacks softmax or forwarding, where zero points of the operands are not 0, or heads are
    no whole groups of channels.
    """
    scores, rows, mixed = block.layers
    assert scores.product is not None and rows.softmax is not None and mixed.product is not None
    if not cfg.softmax or not cfg.forward or cfg.batch > 1 or cfg.block_in != cfg.block_out:
        raise TilingError("attention as a block needs softmax, forward, batch = 1 and block_in = block_out")
    if not all(product.window.pointwise for product in (scores.product, mixed.product)) or rows.row_length % cfg.group:
        raise TilingError("attention as a block takes zero points of 0 and keys in whole groups")
    if any(layer.epilogue.residual is not None for layer in block.layers) or rows.epilogue.table is not None:
        raise TilingError("attention as a block adds nothing, and looks nothing up behind its softmax")
    first = _HeadsLowering(cfg, scores, "0")
    queries = first.queries()
    stage = first.stage_of(queries, lambda i, k, y, x, c: queries[i, y, k, x, 0, 0, c], "vin")
    on_chip = first.rows_of(stage)
    middle = LayerLowering(cfg, rows, False, 0, rows.row_length // cfg.group, "1", first)
    shares, rows_operation = softmax_rows(middle, on_chip)
    last = _HeadsLowering(cfg, mixed, "2", middle)
    final = last.stage_of(shares, lambda i, k, y, x, c: shares[i, y, x, k * cfg.group + c], "out")
    out, y = last.results(final)
    workload = Workload(
        Window((1, 1)), 1, mixed.heads, mixed.y.width, last.blocks, 0, False, 1, 1, "vin", whole=True,
        attends=(first.blocks, first.input_blocks),
    )  # fmt: skip
    stages = stage, BlockStage(VectorOp("vin"), on_chip, "vin"), final
    return LayerComputation(workload, stages, out, y, tuple(last.inputs), last.places, last.scalars, rows_operation)


class _HeadsLowering(LayerLowering):
    """Make the tensors of a product of all heads, each of which is a row."""

    def __init__(self, cfg: Config, layer: Layer, suffix: str, before: LayerLowering | None = None) -> None:
        if any(act.channels % (layer.heads * cfg.group) for act in (*layer.inputs(), layer.y)):
            raise TilingError("attention as a block takes heads of whole groups of channels")
        blocks = layer.y.channels // layer.heads // cfg.group
        super().__init__(cfg, layer, False, 0, blocks, suffix, before)
        self.y = self._heads(layer.y)

    @property
    def input_blocks(self) -> int:
        return self.layer.row_length // self.cfg.group

    def _heads(self, act: Activation) -> ActivationGrid:
        """View an activation of several matrices, whose rows are pixels, with a row for each matrix."""
        grid, heads = ActivationGrid.of(self.cfg, act, False), self.layer.heads
        image, plane, _, column = grid.strides
        groups = act.channels // heads // self.cfg.group
        return replace(grid, rows=heads, strides=(image, plane, groups * plane, column))

    def queries(self) -> Tensor:
        """Make x in entries of inp, [1, heads, blocks, columns, 1, 1, group]."""
        grid = self._heads(self.layer.x)
        source = self.activation(grid, "x", self.input_blocks)
        shape = (1, grid.rows, self.input_blocks, grid.columns, 1, 1, self.cfg.group)
        axes = ("image", "row", "block", "column", *PLACES[4:])
        return compute(shape, lambda i, y, n, x, piece, b, c: source[i, n, y, x, b, c], "queries", axes=axes)

    def stage_of(self, on_chip: Tensor, element: Callable[..., Expr], to: str) -> BlockStage:
        """Make the stage of a product on GEMM, and the pass behind it, which writes to scratchpad `to`.

        Sums [1, heads, columns, blocks, 1, 1, group] are of products of each `element` of `on_chip` and weights [heads,
        blocks, input blocks, block_out, block_in].
        """
        cfg, layer, size = self.cfg, self.layer, self.cfg.group
        assert layer.product is not None
        w = self.activation(self._heads(layer.product.w), "w", self.input_blocks)
        weights = compute(
            (layer.heads, self.blocks, self.input_blocks, cfg.block_out, cfg.block_in),
            lambda h, n, k, m, c: w[0, k, h, n * size + m, 0, c], f"weights{self.suffix}",
            axes=("h", "n", "k", "m", "c"),
        )  # fmt: skip
        k, c = reduce_axis(self.input_blocks, "k"), reduce_axis(size, "c")

        def product(i: Expr, y: Expr, x: Expr, n: Expr, piece: Expr, b: Expr, m: Expr) -> Expr:
            value = element(i, k, y, x, c).astype("int32")
            return sum(weights[y, n, k, m, c].astype("int32") * value, (k, c))

        shape = (1, layer.heads, self.y.columns, self.blocks, 1, 1, size)
        acc = compute(shape, product, f"acc{self.suffix}", axes=(*BY_ROW, "piece", "b", "m"))
        behind = replace(VectorOp.of(layer, "acc"), to=to)
        par, table = self._uniform(), self._table()
        return BlockStage(behind, on_chip, "inp", acc, weights, par=par, table=table)

    def _uniform(self) -> Tensor:
        """Add the parameters, one entry for all channels. TilingError where channels differ."""
        r, size = self.layer.requantise, self.cfg.block_out
        assert r is not None
        if any((values != values[0]).any() for values in (r.bias, r.multiplier, r.shift)):
            raise TilingError("attention as a block requantises all channels alike")
        bias, multiplier, shift = r.bias[:1].repeat(size), r.multiplier[:1].repeat(size), r.shift[:1].repeat(size)
        one = replace(r, bias=bias, multiplier=multiplier, shift=shift)
        return self.constant(pack.parameters(self.cfg, one), (1, size), "uint64", "par")

    def _read(self, stage: BlockStage, name: str, window: tuple[Axis, ...], index: tuple[Expr, ...]) -> Expr:
        """The element of operand `name` for element `index` of a pass; products have their blocks last."""
        i, n, y, x, *entry = index
        if name == "a":
            assert stage.acc is not None
            return stage.acc[i, y, x, n, *entry]
        return super()._read(stage, name, window, (i, Const(0, INDEX), y, x, *entry))

    def rows_of(self, stage: BlockStage) -> Tensor:
        """Make the result of a stage's pass as rows of channels, [1, heads, columns, channels]."""
        value, zero, size = self.passed(stage), Const(0, INDEX), self.cfg.group
        shape = (1, self.layer.heads, self.y.columns, self.blocks * size)
        return compute(
            shape, lambda i, y, x, c: value(i, c // size, y, x, zero, zero, c % size), "scores",
            axes=("image", "row", "column", "channel"),
        )  # fmt: skip

    def results(self, stage: BlockStage) -> tuple[Tensor, Tensor]:
        """Make the result of a stage's pass, [1, heads, columns, blocks, 1, 1, group], and y, [1, groups, heads,
        columns, 1, group]."""
        value, heads, size = self.passed(stage), self.layer.heads, self.cfg.group
        shape = (1, heads, self.y.columns, self.blocks, 1, 1, size)
        out = compute(shape, lambda i, y, x, n, *e: value(i, n, y, x, *e), "out", axes=(*BY_ROW, *PLACES[4:]))
        zero = Const(0, INDEX)
        y = compute(
            (1, self.blocks, heads, self.y.columns, 1, size), lambda i, n, y, x, b, g: out[i, y, x, n, zero, b, g], "y",
            axes=("image", "group", "row", "column", "b", "g"),
        )  # fmt: skip
        _, self.places[y] = self.y.tensor(self.cfg, "y", self.blocks)
        return out, y


BY_ROW = ("image", "row", "column", "block")
"""First axes of tensors between GEMM and the vector unit: the entries of a part of the queries lie in a row, so that
the other unit waits for these alone."""
