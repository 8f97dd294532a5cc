"""Lower attention as one block: its scores stay in vin and its probabilities in inp, each row's entries in sequence.

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


def lower_attention(cfg: Config, block: Layer) -> LayerComputation:
    """Lower a product, the softmax of its rows, and the product of these.

    Raises TilingError if the Config lacks softmax or `forward`, a zero point of an operand is not 0, or heads are no
    whole groups of channels.
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
    queries = first.make_queries()
    stage = first.make_head_stage(queries, lambda i, k, y, x, c: queries[i, y, k, x, 0, 0, c], "vin")
    on_chip = first.make_rows(stage)
    middle = LayerLowering(cfg, rows, False, 0, rows.row_length // cfg.group, "1", first)
    shares, rows_operation = softmax_rows(middle, on_chip)
    last = _HeadsLowering(cfg, mixed, "2", middle)
    final = last.make_head_stage(shares, lambda i, k, y, x, c: shares[i, y, x, k * cfg.group + c], "out")
    out, y = last.make_head_results(final)
    workload = Workload(
        Window((1, 1)), 1, mixed.heads, mixed.y.width, last.blocks, 0, False, 1, 1, "vin", whole=True,
        attends=(first.blocks, first.input_blocks),
    )  # fmt: skip
    stages = stage, BlockStage(VectorOp("vin"), on_chip, "vin"), final
    return LayerComputation(workload, stages, out, y, tuple(last.inputs), last.places, last.scalars, rows_operation)


class _HeadsLowering(LayerLowering):
    """Makes the tensors of a product for all heads; each head is a row."""

    def __init__(self, cfg: Config, layer: Layer, suffix: str, before: LayerLowering | None = None) -> None:
        if any(act.channels % (layer.heads * cfg.group) for act in (*layer.inputs(), layer.y)):
            raise TilingError("attention as a block takes heads of whole groups of channels")
        blocks = layer.y.channels // layer.heads // cfg.group
        super().__init__(cfg, layer, False, 0, blocks, suffix, before)
        self.y = self._grid_of_heads(layer.y)

    @property
    def input_blocks(self) -> int:
        return self.layer.row_length // self.cfg.group

    def _grid_of_heads(self, act: Activation) -> ActivationGrid:
        """Return the grid of an activation of several matrices (heads): a row for each matrix, its rows as columns."""
        grid, heads = ActivationGrid.of(self.cfg, act, False), self.layer.heads
        image, plane, _, column = grid.strides
        groups = act.channels // heads // self.cfg.group
        return replace(grid, rows=heads, strides=(image, plane, groups * plane, column))

    def make_queries(self) -> Tensor:
        """Make the queries in inp, [1, heads, blocks, columns, 1, 1, group]."""
        grid = self._grid_of_heads(self.layer.x)
        source = self.add_activation(grid, "x", self.input_blocks)
        shape = (1, grid.rows, self.input_blocks, grid.columns, 1, 1, self.cfg.group)
        axes = ("image", "row", "block", "column", *PLACES[4:])
        return compute(shape, lambda i, y, n, x, piece, b, c: source[i, n, y, x, b, c], "queries", axes=axes)

    def make_head_stage(self, on_chip: Tensor, element: Callable[..., Expr], to: str) -> BlockStage:
        """Make the stage of one of the two products, with a pass that writes to scratchpad `to`.

        element: gives the value of `on_chip` by image, input block, head, query and channel. Sums are [1, heads,
        columns, blocks, 1, 1, group], weights [heads, blocks, input blocks, block_out, block_in].
        """
        cfg, layer, size = self.cfg, self.layer, self.cfg.group
        assert layer.product is not None
        w = self.add_activation(self._grid_of_heads(layer.product.w), "w", self.input_blocks)
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
        operation = replace(VectorOp.of(layer, "acc"), to=to)
        par, table = self._add_uniform_parameters(), self._add_table()
        return BlockStage(operation, on_chip, "inp", acc, weights, par=par, table=table)

    def _add_uniform_parameters(self) -> Tensor:
        """Add the parameters as one entry for all channels. Raises TilingError if channels differ."""
        r, size = self.layer.requantise, self.cfg.block_out
        assert r is not None
        if any((values != values[0]).any() for values in (r.bias, r.multiplier, r.shift)):
            raise TilingError("attention as a block requantises all channels alike")
        bias, multiplier, shift = r.bias[:1].repeat(size), r.multiplier[:1].repeat(size), r.shift[:1].repeat(size)
        entry = replace(r, bias=bias, multiplier=multiplier, shift=shift)
        return self.add_constant(pack.arrange_parameters(self.cfg, entry), (1, size), "uint64", "par")

    def _operand_element(self, stage: BlockStage, name: str, window: tuple[Axis, ...], index: tuple[Expr, ...]) -> Expr:
        """Return the element of operand `name` for element `index` of a pass; in sums of heads, blocks come after
        columns."""
        i, n, y, x, *entry = index
        if name == "a":
            assert stage.acc is not None
            return stage.acc[i, y, x, n, *entry]
        return super()._operand_element(stage, name, window, (i, Const(0, INDEX), y, x, *entry))

    def make_rows(self, stage: BlockStage) -> Tensor:
        """Make the result of a stage's pass as rows for the softmax, [1, heads, columns, channels]."""
        value, zero, size = self.pass_element(stage), Const(0, INDEX), self.cfg.group
        shape = (1, self.layer.heads, self.y.columns, self.blocks * size)
        return compute(
            shape, lambda i, y, x, c: value(i, c // size, y, x, zero, zero, c % size), "scores",
            axes=("image", "row", "column", "channel"),
        )  # fmt: skip

    def make_head_results(self, stage: BlockStage) -> tuple[Tensor, Tensor]:
        """Make out, [1, heads, columns, blocks, 1, 1, group], and y in DRAM, [1, groups, heads, columns, 1, group]."""
        value, heads, size = self.pass_element(stage), self.layer.heads, self.cfg.group
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
"""First axes of tensors between GEMM and the vector unit. The entries of some queries lie side by side, so that the
unit that reads them waits for these only."""
