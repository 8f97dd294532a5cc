"""Schedule templates: turn a computation and a tiling into loops, by scheduling primitives (split, compute_at, ...).

There is a template for products (GEMM into acc, then the vector unit), for simple layers (the vector unit alone), for
blocks, for layers that work on rows, and for attention. In all of them a tile of y is one iteration of a pipelined
loop; everything that the tile needs is computed there, in scratchpads, and what was loaded is kept for tiles that read
the same. `_attach_...` computes a stage at a loop of its reader; `_load_...` does so with a load from DRAM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from celosia.compiler.expr import Axis, Schedule, Select, Stage, Tensor, create_schedule
from celosia.compiler.expr.loops import Declared
from celosia.compiler.expr.nodes import Binary, Cast, Expr, walk
from celosia.compiler.tensorize.block_space import BlockWorkload
from celosia.compiler.tensorize.computation import BlockStage, LayerComputation, Rows
from celosia.compiler.tensorize.intrinsics import declared
from celosia.compiler.tensorize.space import CUT_ORDERS, Tiling, Workload, query_part
from celosia.hw.spec.config import Config


def schedule(cfg: Config, d: LayerComputation, c: Tiling) -> Schedule:
    """Schedule the computation `d` under the tiling `c`, which must be a point of its space."""
    template = _Template(cfg, d, c)
    if isinstance(d.workload, BlockWorkload):
        return template.schedule_block()
    if d.rows is not None:
        return template.schedule_rows(d.rows) if len(d.stages) == 1 else template.schedule_attention(d.rows)
    return template.schedule_product() if d.stages[0].acc is not None else template.schedule_vector_layer()


class _Template:
    """The schedule templates, for one computation `d` under one tiling `c`.

    s: the schedule under construction. hw: the intrinsics of the Config, by name.
    """

    def __init__(self, cfg: Config, d: LayerComputation, c: Tiling) -> None:
        self.cfg, self.d, self.c = cfg, d, c
        self.s = create_schedule(d.y)
        self.hw: Mapping[str, Declared] = declared(cfg)

    def schedule_product(self) -> Schedule:
        """Schedule a product on GEMM: each tile of y sums the whole reduction in acc, or adds it up piece by piece."""
        d, c = self.d, self.c
        first, y = d.stages[0], self.s[d.y]
        places, tile = self._cut_into_tiles()
        self._attach_last_pass(tile)
        for layer_stage, following in reversed(list(pairwise(d.stages))):
            self._attach_earlier_pass(layer_stage, following, tile)
        reader, loop = self._attach_sum_in_pieces(first, y, places) if c.order in CUT_ORDERS else (y, tile)
        if c.order not in CUT_ORDERS:
            self._attach_sum(first, reader, loop)
        self._load_activation(first.on_chip, reader, loop, "inp")
        self._load_weights(first, reader, loop)
        return self.s

    def _attach_earlier_pass(self, layer_stage: BlockStage, following: BlockStage, tile: Axis) -> None:
        """Compute the vector pass of `layer_stage` in the tile of y, before the pass of `following` that reads its
        result."""
        result, y = following.on_chip if following.b is None else following.b, self.s[self.d.y]
        self.s[result].compute_at(y, tile)
        self._tensorize_pass(self.s[result], self.s[result].order[1:], layer_stage, following)
        self._load_constants(layer_stage, result, y, tile)
        self._load_operand(layer_stage, y, tile)

    def schedule_block(self) -> Schedule:
        """Schedule a block: each tile of a group's result (y, or the resident input of the next group) computes all its
        layers."""
        d, c = self.d, self.c
        assert isinstance(d.workload, BlockWorkload)
        ends = [*d.workload.cuts, len(d.stages)]
        for first, end, self.c in zip([0, *ends], ends, c.groups):
            if end < len(d.stages):
                reader, places, loop = self._attach_resident(d.stages[end - 1], d.stages[end])
            else:
                places, loop = self._cut_into_tiles()
                self._attach_last_pass(loop)
                reader = self.s[d.y]
            if d.stages[end - 1].acc is not None:
                reader, loop = self._attach_sum_in_pieces(d.stages[end - 1], reader, places)
            self._load_weights(d.stages[end - 1], reader, loop)
            for number in reversed(range(first + 1, end)):
                self._attach_inner_layer(d.stages[number - 1], d.stages[number], reader, loop)
            if first == 0:
                self._load_activation(d.stages[0].on_chip, reader, loop, d.stages[0].scope)
                self._load_operand(d.stages[0], reader, loop)
        return self.s

    def _attach_inner_layer(self, layer_stage: BlockStage, following: BlockStage, reader: Stage, loop: Axis) -> None:
        """Compute the result of `layer_stage` for the `following` layer at `loop`, with its sums, weights and
        constants."""
        on_chip = self.s[following.on_chip]
        on_chip.compute_at(reader, loop)
        self._tensorize_pass(on_chip, on_chip.order[1:], layer_stage, following)
        self._load_constants(layer_stage, following.on_chip, reader, loop)
        if layer_stage.acc is not None:
            self._attach_sum(layer_stage, reader, loop)
        self._load_weights(layer_stage, reader, loop)

    def _tensorize_pass(
        self, on_chip: Stage, tile: Sequence[Axis], layer_stage: BlockStage, following: BlockStage
    ) -> None:
        """Replace the pass of `layer_stage` that makes `on_chip` by its intrinsic.

        tile: the axes of a tile: block, row, column, and those of an entry.
        """
        on_chip.set_scope("vin" if following.b is on_chip.tensor else following.scope)
        block, row, column, piece, b, *rest = tile
        if piece.extent > self.cfg.out_pieces:  # entries of inp are larger than those of the vector unit
            on_chip.reorder(piece, block, row, column, b, *rest)
            piece = b
        on_chip.tensorize(piece, self.hw[layer_stage.vector.name])

    def _attach_resident(self, layer_stage: BlockStage, following: BlockStage) -> tuple[Stage, Axis, Axis]:
        """Compute the whole result of `layer_stage`, in tiles, before the layers after a cut read it from a scratchpad.

        Returns its stage, the innermost loop over pixels, and the loop over tiles.
        """
        on_chip, c = self.s[following.on_chip], self.c
        image, block, row, column, *entry = on_chip.order
        blocks, block = on_chip.split(block, c.n, "peel")
        rows, row = on_chip.split(row, c.y, "peel")
        columns, column = on_chip.split(column, c.x, "peel")
        tile = (block, row, column, *entry)
        on_chip.reorder(image, rows, columns, blocks, *tile)
        on_chip.pipeline(blocks)
        self._tensorize_pass(on_chip, tile, layer_stage, following)
        self._load_constants(layer_stage, following.on_chip, on_chip, blocks)
        return on_chip, columns, blocks

    def schedule_vector_layer(self) -> Schedule:
        """Schedule a layer of the vector unit alone."""
        d = self.d
        _, tile = self._cut_into_tiles()
        self._attach_last_pass(tile)
        self._load_weights(d.last, self.s[d.y], tile)
        self._load_activation(d.last.on_chip, self.s[d.y], tile, d.last.scope)
        return self.s

    def schedule_rows(self, rows: Rows) -> Schedule:
        """Schedule a softmax or normalisation in tiles of whole rows.

        One instruction computes a row's intermediate values (largest element, sums), too.
        """
        s, d = self.s, self.d
        _, tile = self._cut_into_tiles()
        self._attach_row_results(rows, d.out, rows.name, tile)
        on_chip = s[d.last.on_chip]
        on_chip.set_scope("vin")
        on_chip.compute_at(s[d.y], tile)
        on_chip.keep()
        image, row, column, channel = on_chip.order
        group, lane = on_chip.split(channel, self.cfg.group)
        on_chip.reorder(image, group, row, column, lane)
        on_chip.tensorize(lane, self.hw["load_vin"])
        return s

    def schedule_attention(self, rows: Rows) -> Schedule:
        """Schedule attention in tiles of some heads and queries: scores, their softmax, its product with the values."""
        s, d = self.s, self.d
        first, middle, last = d.stages
        y = s[d.y]
        image, group, head, query, b, _ = y.order
        heads, head = y.split(head, self.c.y, "peel")
        queries, query = y.split(query, self.c.x, "peel")
        y.reorder(image, heads, queries, head, query, group)
        self._split_queries(y, head, query, (group,))
        y.pipeline(queries)
        y.tensorize(b, self.hw["store"])
        self._attach_last_pass(queries)
        out = s[d.out]
        image, head, query, block, *_ = out.order
        self._split_queries(out, head, query, (block,))
        self._attach_head_sums(last, queries)
        self._attach_row_results(rows, last.on_chip, f"{rows.name}_to_inp", queries)
        scores = s[middle.on_chip]
        scores.set_scope("vin")
        scores.compute_at(y, queries)
        image, head, query, channel = scores.order
        block, lane = scores.split(channel, self.cfg.group)
        scores.reorder(image, head, query, block, lane)
        self._split_queries(scores, head, query)
        scores.tensorize(lane, self.hw[first.vector.name])
        self._load_constants(first, middle.on_chip, y, queries)
        self._attach_head_sums(first, queries)
        on_chip = s[first.on_chip]
        on_chip.set_scope("inp")
        on_chip.compute_at(y, queries)
        on_chip.keep()
        _, head, _, _, _, b, _ = on_chip.order
        on_chip.unroll(head)
        on_chip.tensorize(b, self.hw["load_inp"])
        return s

    def _attach_head_sums(self, layer_stage: BlockStage, tile: Axis) -> None:
        """Compute the sums of `layer_stage` on GEMM for each head of a tile, and load its weights."""
        assert layer_stage.acc is not None and layer_stage.weights is not None
        acc, weights = self.s[layer_stage.acc], self.s[layer_stage.weights]
        acc.set_scope("acc")
        acc.compute_at(self.s[self.d.y], tile)
        image, head, query, block, piece, b, m, k, e, lane = acc.order
        acc.reorder(image, head, query, block, k, piece, b, m, e, lane)
        self._split_queries(acc, head, query, (block,))
        acc.tensorize(piece, self.hw["gemm"])
        weights.set_scope("wgt")
        weights.compute_at(self.s[self.d.y], tile)
        weights.keep()
        weights.unroll(weights.order[0])
        weights.tensorize(weights.order[4], self.hw["load_wgt"])

    def _split_queries(self, stage: Stage, head: Axis, query: Axis, within: tuple[Axis, ...] = ()) -> None:
        """Split a stage into one instruction for each head and part of its queries.

        The other unit can then start after the first of these. within: axes between the part and its queries.
        """
        part, query = stage.split(query, query_part(self.cfg), "peel")
        stage.reorder(head, part, *within, query)
        stage.unroll(head)
        stage.unroll(part)

    def _attach_row_results(self, rows: Rows, results: Tensor, name: str, tile: Axis) -> None:
        """Compute the results of rows at `tile` by the intrinsic `name`, and load its powers (softmax) or parameters
        (norm)."""
        s, y = self.s, self.s[self.d.y]
        if rows.powers is not None:
            constant, scope, size = s.cache_read(rows.powers, "exp", (rows.within["total"], results)), "exp", 1
        else:
            par = self.d.stages[0].par
            assert par is not None
            constant, scope, size = s.cache_read(par, "par", results), "par", self.cfg.block_out
        s[results].set_scope("out" if results is self.d.out else "inp")
        s[results].compute_at(y, tile)
        _, row, column, channel = s[results].order
        if results is not self.d.out:
            self._split_queries(s[results], row, column)
        s[results].tensorize(channel, self.hw[f"{name}_{rows.count}"])
        for number, tensor in rows.within.items():
            s[tensor].set_scope("row")
            s[tensor].compute_at(y, tile)
            s[tensor].tensorize(s[tensor].order[3], self.hw[f"{number}_{rows.count}"])
        s[constant].compute_at(y, tile)
        s[constant].keep()
        s[constant].tensorize(s[constant].split(s[constant].order[-1], size)[1], self.hw[f"load_{scope}"])

    def _attach_sum_in_pieces(self, layer_stage: BlockStage, reader: Stage, places: Axis) -> tuple[Stage, Axis]:
        """Compute the sum of `layer_stage` at loop `places` in pieces of k blocks. Returns its stage and the loop over
        tiles."""
        c = self.c
        assert layer_stage.acc is not None
        acc = self.s[layer_stage.acc]
        acc.set_scope("acc")
        acc.compute_at(reader, places)
        image, block, row, column, piece, b, m, k, r, t, e, lane = acc.order
        loop, k = acc.split(k, c.k, "peel")
        inside = [row, column, k, r, t, piece, b, m, e, lane]
        if c.order == "split":
            pieces = loop
            loop, block = acc.split(block, c.n, "peel")
            acc.reorder(pieces, loop, image, block, *inside)
        else:
            acc.reorder(loop, image, block, *inside)
        acc.pipeline(loop)
        acc.tensorize(piece, self.hw["gemm"])
        return acc, loop

    def _attach_sum(self, layer_stage: BlockStage, reader: Stage, loop: Axis) -> None:
        """Compute the whole sum of `layer_stage` on GEMM at `loop` of its reader."""
        assert layer_stage.acc is not None
        acc = self.s[layer_stage.acc]
        acc.set_scope("acc")
        acc.compute_at(reader, loop)
        image, block, row, column, piece, b, m, k, r, t, e, lane = acc.order
        shares = []
        if (share := self._share(layer_stage)) > 1:
            shared, block = acc.split(block, share, "peel")
            shares.append(shared)
        acc.reorder(image, *shares, block, row, column, k, r, t, piece, b, m, e, lane)
        acc.tensorize(piece, self.hw["gemm"])

    def _share(self, layer_stage: BlockStage) -> int:
        """Return how many output blocks read the same input blocks, in a grouped convolution; else 1."""
        workload = self.d.workload
        return workload.share if isinstance(workload, Workload) else 1

    def _load_weights(self, layer_stage: BlockStage, reader: Stage, loop: Axis) -> None:
        """Load the weights or taps of `layer_stage` at `loop`."""
        for source, scope, first_axis in ((layer_stage.weights, "wgt", 5), (layer_stage.taps, "tap", 3)):
            if source is None:
                continue
            if source.body is not None:  # an activation that is read as weights
                stage = self.s[source]
                stage.set_scope(scope)
            else:
                stage = self.s[self.s.cache_read(source, scope, *self._weight_readers(layer_stage))]
            stage.compute_at(reader, loop)
            stage.keep()
            if source.body is not None and self.cfg.inp_pieces > 1:
                *loops, input_block, piece, _, _ = stage.order
                group = stage.fuse(input_block, piece)  # LOAD can pad the groups behind the last
                if _repeats_groups(stage.body):
                    stage.reorder(group, *loops)
                    stage.unroll(group)
                first_axis -= 1
            stage.tensorize(stage.order[first_axis], self.hw[_load_intrinsic(stage, scope)])

    def _load_constants(self, layer_stage: BlockStage, result: Tensor, reader: Stage, loop: Axis) -> None:
        """Load the parameters and the table of the pass of `layer_stage` at `loop`. result: the tensor that the pass
        makes."""
        for source, scope in ((layer_stage.par, "par"), (layer_stage.table, "lut")):
            if source is not None:
                on_chip = self.s.cache_read(source, scope, result)
                self.s[on_chip].compute_at(reader, loop)
                self.s[on_chip].keep()
                self.s[on_chip].tensorize(self.s[on_chip].order[1], self.hw[f"load_{scope}"])

    def _weight_readers(self, layer_stage: BlockStage) -> tuple[Tensor, ...]:
        """Return the tensors that read the weights of `layer_stage`."""
        if layer_stage.acc is not None:
            return (layer_stage.acc,)
        number = self.d.stages.index(layer_stage)
        return (self.d.out if layer_stage is self.d.last else self.d.stages[number + 1].on_chip,)

    def _cut_into_tiles(self) -> tuple[Axis, Axis]:
        """Cut y into tiles.

        Returns the innermost loop over tiles of the image, at which sums in pieces are attached, and the innermost loop
        over all tiles, which is pipelined.
        """
        y, c, p = self.s[self.d.y], self.c, self.cfg.out_pieces
        *byte_axes, image, group, row, column, b, _ = y.order  # an axis of the bytes of each sum, or none
        block = group
        if p > 1:
            block, group = y.split(group, p, "guard")
        blocks, block = y.split(block, c.n, "peel")
        rows, row = y.split(row, c.y, "peel")
        columns, column = y.split(column, c.x, "peel")
        outside: tuple[Axis, ...] = {
            "weights": (blocks, image, rows, columns), "rows": (image, rows, blocks, columns),
            "input": (image, rows, columns, blocks), "split": (image, rows, columns, blocks),
            "pieces": (blocks, image, rows, columns), "block": (image, rows, columns, blocks),
        }[c.order]  # fmt: skip
        if c.order == "pieces":  # one tile, after all pieces
            single, block = y.split(block, c.n, "peel")
            outside = (*outside, single)
        unrolled = (*byte_axes, *([group] if p > 1 else []))
        y.reorder(*outside, *unrolled, block, row, column)
        for axis in unrolled:
            y.unroll(axis)
        y.pipeline(outside[-1])
        y.tensorize(b, self.hw["store"])
        return columns, outside[-1]

    def _attach_last_pass(self, tile: Axis) -> None:
        """Compute the last pass of the vector unit, which makes the results in out, at `tile`; load its constants and
        operands."""
        s, d = self.s, self.d
        y, out = s[d.y], s[d.out]
        out.set_scope("out")
        out.compute_at(y, tile)
        if d.last.vector.byte:  # an instruction for each byte of the sums
            out.unroll(out.order[0])
        out.tensorize(next(axis for axis in out.order if axis.name == "piece"), self.hw[d.last.vector.name])
        self._load_constants(d.last, d.out, y, tile)
        self._load_operand(d.last, y, tile)

    def _load_operand(self, layer_stage: BlockStage, reader: Stage, loop: Axis) -> None:
        """Load operand B of the pass of `layer_stage` at `loop`, if it has one; or A, if B is the result of the pass
        before."""
        if layer_stage.b is None:
            return
        b_is_on_chip = isinstance(self.d.workload, Workload) and layer_stage is not self.d.stages[0]
        self._load_activation(
            layer_stage.on_chip if b_is_on_chip else layer_stage.b, reader, loop, "acc" if b_is_on_chip else "vin"
        )

    def _load_activation(self, on_chip: Tensor, reader: Stage, loop: Axis, scope: str) -> None:
        """Load an activation into `scope` at `loop`: one LOAD for each part of its blocks and each piece of an
        entry."""
        stage = self.s[on_chip]
        stage.set_scope(scope)
        stage.compute_at(reader, loop)
        stage.keep()
        image, block, row, column, piece, b, _ = stage.order
        parts, block = stage.split(block, self.c.part, "peel")
        stage.reorder(parts, piece, image, block, row, column)
        stage.unroll(parts)
        stage.unroll(piece)
        stage.tensorize(b, self.hw[_load_intrinsic(stage, scope)])


def _repeats_groups(body: Expr | None) -> bool:
    """Whether the element that `body` reads is one of the last channel group for all groups behind it."""
    return body is not None and any(isinstance(node, Binary) and node.op == "min" for node in walk(body))


def _load_intrinsic(stage: Stage, scope: str) -> str:
    """Return the name of the intrinsic that loads the tensor of `stage` into `scope`: with padding, widening, or
    plain."""
    if isinstance(stage.body, Select):
        return f"padded_load_{scope}"
    return "widening_load" if isinstance(stage.body, Cast) else f"load_{scope}"
