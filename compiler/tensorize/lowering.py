"""Lower layers to tensor expressions over activations in blocks of channels.

All layers take the same path: their input, padded, in a scratchpad; sums of products in `acc`, where GEMM multiplies;
`out`, one pass of the vector unit; `y` in DRAM. templates.py gives the expressions their loops.

`lower_layer` chooses the lowering. In order: single layers, whose tensors layer_lowering.py makes (a grouped
convolution is one computation for each run of output blocks whose input blocks advance evenly); blocks; softmax and
normalisations, which work on rows (the channels of a pixel); and attention, a block whose scores stay in vin and whose
probabilities stay in inp, each row's entries in sequence. Its heads are rows of the computation, its queries columns:

    scores = requantise(Q · Kᵀ)  → vin        probabilities = softmax(scores)  → inp        y = requantise(P · V)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from celosia.compiler.expr import Axis, Expr, Tensor, compute, reduce_axis
from celosia.compiler.expr.nodes import INDEX, Const, minimum
from celosia.compiler.expr.tensor import sum as sum_over
from celosia.compiler.layer import Activation, Layer, Norm, TilingError, Window
from celosia.compiler.numerics.norm import INT, sums
from celosia.compiler.tensorize import pack
from celosia.compiler.tensorize.block_space import BlockWorkload
from celosia.compiler.tensorize.computation import ActivationGrid, BlockStage, LayerComputation, Rows
from celosia.compiler.tensorize.intrinsics import (
    NORM_SUMS,
    VectorOp,
    largest_element,
    norm_results,
    shifted,
    softmax_share,
    sum_of_powers,
    tile_shape,
)
from celosia.compiler.tensorize.layer_lowering import PLACES, ImageSumsLowering, LayerLowering, window_of
from celosia.compiler.tensorize.space import Workload
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode, formats
from celosia.hw.spec.scratchpads import depths


def lower_layer(cfg: Config, layer: Layer) -> list[LayerComputation]:
    """Lower `layer` to computations that together make its output. Raises TilingError if the accelerator cannot.

    It is one computation, or one for each run of a grouped convolution (`pack.weight_runs`).
    """
    if layer.is_block:
        if layer.layers[0].product is not None:
            return [_lower_attention(cfg, layer)]
        return [_lower_with_maps(cfg, layer) if layer.layers[-1].is_map else _lower_chain(cfg, layer)]
    if layer.sums_on_gemm:
        return [ImageSumsLowering(cfg, layer).lower_image_sums()]
    matrix = _is_matrix(layer)
    if layer.gemm is not None and not layer.is_depthwise(cfg):
        stored = pack.stored_weights(cfg, layer.gemm)
        return [
            LayerLowering(cfg, layer, matrix, run.first, run.blocks).lower_convolution(run, stored)
            for run in pack.weight_runs(cfg, layer.gemm)
        ]
    blocks = pack.blocks(layer.y.channels, cfg.block_out)
    if layer.works_on_rows:
        return [_RowLowering(cfg, layer, matrix, 0, blocks).lower_rows()]
    lowering = LayerLowering(cfg, layer, matrix, 0, blocks)
    return [lowering.lower_vector_layer() if layer.product is None else lowering.lower_product(layer.product)]


def _is_matrix(layer: Layer) -> bool:
    """Whether the layer works on matrices whose rows are images of one pixel, which are then computed as one row of
    pixels."""
    return all(act.height * act.width == 1 for act in (layer.x, layer.y)) and window_of(layer).pointwise


# Blocks of convolutions, poolings and maps ---------------------------------------------------------------------


def _lower_with_maps(cfg: Config, block: Layer) -> LayerComputation:
    """Lower a convolution and the maps after it, whose vector passes follow in each of its tiles.

    Raises TilingError if they use more tables than fit scratchpad lut.
    """
    conv, *maps = block.layers
    room = depths(cfg)["lut"]
    if sum(layer.epilogue.table is not None for layer in block.layers) > room:
        raise TilingError(f"a tile looks up in more tables than the {room} of lut_count")
    assert conv.gemm is not None
    matrix, blocks = _is_matrix(conv), pack.blocks(conv.y.channels, cfg.block_out)
    (run,) = pack.weight_runs(cfg, conv.gemm)
    lowering = LayerLowering(cfg, conv, matrix, 0, blocks)
    on_chip = lowering.make_input("inp", run.inputs, conv.pad_value)
    stage, workload = lowering.make_gemm_stage(on_chip, run, pack.stored_weights(cfg, conv.gemm))
    stages = [stage]
    for number, following in enumerate(maps, 1):
        to = LayerLowering(cfg, following, matrix, 0, blocks, str(number), lowering)
        stages[-1] = replace(stages[-1], vector=replace(stages[-1].vector, to="vin"))
        result_on_chip = lowering.make_pass_result(stages[-1], to)
        stages.append(to.make_following_stage(result_on_chip))
        lowering = to
    workload = replace(workload, behind=tuple(layer.epilogue.residual is not None for layer in maps))
    return lowering.finish_computation(stages[-1], workload, stages[:-1])


def _lower_chain(cfg: Config, block: Layer) -> LayerComputation:
    """Lower a chain of convolutions and poolings: each vector pass but the last writes the next layer's input on
    chip."""
    lowerings: list[LayerLowering] = []
    for number, layer in enumerate(block.layers):
        blocks = pack.blocks(layer.y.channels, cfg.block_out)
        lowerings.append(LayerLowering(cfg, layer, False, 0, blocks, str(number), lowerings[-1] if lowerings else None))
    lowering = lowerings[0]
    scope = "acc" if block.layers[0].multiply is not None else lowering.scope
    on_chip = lowering.make_input(scope, lowering.input_blocks, block.layers[0].pad_value)
    stages: list[BlockStage] = []
    workloads: list[Workload] = []
    for number, lowering in enumerate(lowerings):
        stage, workload = lowering.make_stage(on_chip)
        stages.append(stage)
        workloads.append(workload)
        if number + 1 < len(lowerings):
            to = lowerings[number + 1]
            stages[-1] = replace(stage, vector=replace(stage.vector, to=to.scope, padded=to.has_padding))
            on_chip = lowering.make_pass_result(stages[-1], to)
    return lowering.finish_computation(stages[-1], BlockWorkload(tuple(workloads), block.cuts), stages[:-1])


# Softmax and normalisations ------------------------------------------------------------------------------------


class _RowLowering(LayerLowering):
    """Makes the tensors of a softmax or normalisation."""

    def lower_rows(self) -> LayerComputation:
        """Lower the layer. Raises TilingError if the Config lacks the operation or cannot hold its numbers."""
        if self.layer.norm is not None:
            return self._lower_norm(self.layer.norm)
        if not self.cfg.softmax:
            raise TilingError("a softmax needs a Config with softmax")
        on_chip = self._make_input_rows()
        return self._finish_rows(on_chip, *_softmax_rows(self, on_chip))

    def _lower_norm(self, norm: Norm) -> LayerComputation:
        """Lower a normalisation."""
        if not self.cfg.norm:
            raise TilingError("a normalisation needs a Config with norm")
        count = self.layer.row_length
        if count == 1:
            raise TilingError("a row of one element is nothing but its offset")
        (epsilon_field,) = (field for field in formats(self.cfg)[Opcode.VECTOR].fields if field.name == "scale_c")
        if norm.epsilon >> (max_bits := epsilon_field.width - 1):
            raise TilingError(f"its epsilon, for rows of {count}, takes more than {max_bits} bits")
        on_chip, lanes = self._make_input_rows(), self.blocks * self.cfg.block_out
        assert self.layer.requantise is not None
        par = self.add_constant(pack.arrange_parameters(self.cfg, self.layer.requantise), (lanes,), "uint64", "par")
        return self._finish_rows(on_chip, *_norm_rows(self, on_chip, par), par)

    def _make_input_rows(self) -> Tensor:
        """Make x in vin as rows, [images, rows, columns, channels]."""
        cfg = self.cfg
        lanes = self.blocks * cfg.block_out
        pixels = self.x.images, self.x.rows, self.x.columns
        x = self.add_activation(self.x, "x", self.layer.x.storage_groups - self.layer.x.group_offset)
        last = x.shape[1] - 1

        def read(image: Expr, row: Expr, column: Expr, channel: Expr) -> Expr:
            """Return the element of x; channels beyond its last group repeat that group."""
            group = channel // cfg.group
            if lanes > (last + 1) * cfg.group:
                group = minimum(group, last)
            return x[image, group, row, column, 0, channel % cfg.group]

        return compute((*pixels, lanes), read, "near", axes=("image", "row", "column", "channel"))

    def _finish_rows(
        self, on_chip: Tensor, out: Tensor, operation: Rows, par: Tensor | None = None
    ) -> LayerComputation:
        """Return the computation of a layer that works on rows: make y from `out`, [images, rows, columns,
        channels]."""
        cfg, pixels = self.cfg, on_chip.shape[:3]
        groups, p = self.layer.y.groups(cfg), cfg.group
        shape = (*pixels[:1], groups, *pixels[1:], cfg.batch, p)
        y = compute(shape, lambda i, n, r, c, b, g: out[i, r, c, n * p + g], "y",
                    axes=("image", "group", "row", "column", "b", "g"))  # fmt: skip
        _, self.places[y] = self.y.tensor(cfg, "y", groups)
        stage = BlockStage(VectorOp("vin"), on_chip, "vin", par=par)
        workload = replace(self.vector_workload("vin", False), whole=True, norm=par is not None)
        return LayerComputation(workload, (stage,), out, y, tuple(self.inputs), self.places, self.scalars, operation)


def _softmax_rows(lowering: LayerLowering, on_chip: Tensor) -> tuple[Tensor, Rows]:
    """Compute the softmax of the layer over rows `on_chip`, [images, rows, columns, channels] int8.

    Returns results of the same shape, and the operation with the largest element, int8, and the total, float32, of each
    row.
    """
    softmax, pixels = lowering.layer.softmax, on_chip.shape[:3]
    assert softmax is not None
    names, count = ("image", "row", "column", "channel"), lowering.layer.row_length
    powers = lowering.add_constant(softmax.powers.view(np.uint8), (1, len(softmax.powers)), "float32", "powers")
    k, j = reduce_axis(count, "k"), reduce_axis(count, "j")
    largest = compute(pixels, lambda *i: largest_element(lambda c: on_chip[(*i, c)], k), "largest", axes=names[:3])
    total = compute(
        pixels, lambda *i: sum_of_powers(lambda c: on_chip[(*i, c)], powers, largest[i], j), "total", axes=names[:3]
    )
    limits = _add_limits(lowering, softmax.zero_point)

    def share(i: Expr, y: Expr, x: Expr, c: Expr) -> Expr:
        element = lambda k: on_chip[i, y, x, k]  # noqa: E731
        return softmax_share(element, powers, largest[i, y, x], total[i, y, x], c, count, *limits)

    operation = Rows("softmax", count, {"total": total, "largest": largest}, powers)
    return compute(on_chip.shape, share, f"out{lowering.suffix}", axes=names), operation


def _norm_rows(lowering: LayerLowering, on_chip: Tensor, par: Tensor) -> tuple[Tensor, Rows]:
    """Compute the norm of the layer over rows `on_chip`, [images, rows, columns, channels] int8.

    par: parameters of all channels, as entries of scratchpad par.

    Returns results of the same shape, and the operation with the sum of each row, and that of its squares, int64.
    """
    layer, names = lowering.layer, ("image", "row", "column", "channel")
    assert layer.norm is not None and layer.requantise is not None
    count, centre = layer.row_length, layer.norm.centre
    offset = lowering.add_scalar("offset", INT, layer.norm.offset)
    epsilon = lowering.add_scalar("epsilon", INT, layer.norm.epsilon)
    limits = _add_limits(lowering, layer.requantise.zero_point)

    def element(*i: Expr) -> Expr:
        return shifted(on_chip[i], offset)

    used_sums = NORM_SUMS if centre else NORM_SUMS[1:]
    summed = dict(zip(NORM_SUMS, sums(element, count)))
    within = {name: compute(on_chip.shape[:3], summed[name], name, axes=names[:3]) for name in used_sums}
    total, squares = (lambda *i, name=name: within[name][i] for name in NORM_SUMS)
    results = norm_results(element, lambda c: par[c], (total, squares), epsilon, count, centre, limits)
    name = "layer_norm" if centre else "rms_norm"
    return compute(on_chip.shape, results, "out", axes=names), Rows(name, count, within)


def _add_limits(lowering: LayerLowering, zero_point: int) -> tuple[Expr, Expr, Expr]:
    """Add the zero point, the lowest and the highest result of an operation on rows to the scalars; return them."""
    low, high = lowering.layer.epilogue.clip
    return (
        lowering.add_scalar("zero_point", "float32", zero_point),
        lowering.add_scalar("lo", "float32", low),
        lowering.add_scalar("hi", "float32", high),
    )


# Attention -----------------------------------------------------------------------------------------------------

BY_ROW = ("image", "row", "column", "block")
"""First axes of tensors between GEMM and the vector unit. The entries of some queries lie side by side, so that the
unit that reads them waits for these only."""


def _lower_attention(cfg: Config, block: Layer) -> LayerComputation:
    """Lower a product, the softmax of its rows, and the product of these.

    Raises TilingError if the Config lacks softmax or `forward`, a zero point of an operand is not 0, or heads or keys
    fill no whole entries of inp.
    """
    scores, rows, mixed = block.layers
    assert scores.product is not None and rows.softmax is not None and mixed.product is not None
    if not cfg.softmax or not cfg.forward or cfg.batch > 1 or cfg.block_in < cfg.block_out:
        raise TilingError("attention as a block needs softmax, forward, batch = 1 and block_in of block_out at least")
    if (
        not all(product.window.pointwise for product in (scores.product, mixed.product))
        or rows.row_length % cfg.block_in
    ):
        raise TilingError("attention as a block takes zero points of 0 and keys in whole blocks of block_in")
    if any(layer.epilogue.residual is not None for layer in block.layers) or rows.epilogue.table is not None:
        raise TilingError("attention as a block adds nothing, and looks nothing up behind its softmax")
    first = _HeadsLowering(cfg, scores, "0")
    queries = first.make_queries()
    stage = first.make_head_stage(queries, lambda i, k, y, x, e, c: queries[i, y, k, x, e, 0, c], "vin")
    on_chip = first.make_rows(stage)
    middle = LayerLowering(cfg, rows, False, 0, rows.row_length // cfg.group, "1", first)
    shares, rows_operation = _softmax_rows(middle, on_chip)
    last = _HeadsLowering(cfg, mixed, "2", middle)
    final = last.make_head_stage(
        shares, lambda i, k, y, x, e, c: shares[i, y, x, k * cfg.block_in + e * cfg.group + c], "out"
    )
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
        if layer.row_length % cfg.block_in:
            raise TilingError("attention as a block takes heads of whole blocks of block_in channels")
        blocks = layer.y.channels // layer.heads // cfg.group
        super().__init__(cfg, layer, False, 0, blocks, suffix, before)
        self.y = self._grid_of_heads(layer.y)

    @property
    def input_blocks(self) -> int:
        return self.layer.row_length // self.cfg.block_in

    def _grid_of_heads(self, act: Activation) -> ActivationGrid:
        """Return the grid of an activation of several matrices (heads): a row for each matrix, its rows as columns."""
        grid, heads = ActivationGrid.of(self.cfg, act, False), self.layer.heads
        image, plane, _, column = grid.strides
        groups = act.channels // heads // self.cfg.group
        return replace(grid, rows=heads, strides=(image, plane, groups * plane, column))

    def make_queries(self) -> Tensor:
        """Make the queries in inp, [1, heads, blocks, columns, pieces, 1, group]."""
        grid, pieces = self._grid_of_heads(self.layer.x), self.cfg.inp_pieces
        source = self.add_activation(grid, "x", self.input_blocks * pieces)
        shape = (1, grid.rows, self.input_blocks, grid.columns, pieces, 1, self.cfg.group)
        axes = ("image", "row", "block", "column", *PLACES[4:])
        return compute(
            shape, lambda i, y, n, x, piece, b, c: source[i, n * pieces + piece, y, x, b, c], "queries", axes=axes
        )

    def make_head_stage(self, on_chip: Tensor, element: Callable[..., Expr], to: str) -> BlockStage:
        """Make the stage of one of the two products, with a pass that writes to scratchpad `to`.

        element: gives the value of `on_chip` by image, input block, head, query, piece and channel. Sums are [1, heads,
        columns, blocks, 1, 1, group], weights [heads, blocks, input blocks, pieces, block_out, group].
        """
        cfg, layer, size, pieces = self.cfg, self.layer, self.cfg.group, self.cfg.inp_pieces
        assert layer.product is not None
        w = self.add_activation(self._grid_of_heads(layer.product.w), "w", self.input_blocks * pieces)
        weights = compute(
            (layer.heads, self.blocks, self.input_blocks, *tile_shape(cfg, "wgt")),
            lambda h, n, k, e, m, c: w[0, k * pieces + e, h, n * size + m, 0, c], f"weights{self.suffix}",
            axes=("h", "n", "k", "e", "m", "c"),
        )  # fmt: skip
        k, e, c = reduce_axis(self.input_blocks, "k"), reduce_axis(pieces, "e"), reduce_axis(size, "c")

        def product(i: Expr, y: Expr, x: Expr, n: Expr, piece: Expr, b: Expr, m: Expr) -> Expr:
            value = element(i, k, y, x, e, c).astype("int32")
            return sum_over(weights[y, n, k, e, m, c].astype("int32") * value, (k, e, c))

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
