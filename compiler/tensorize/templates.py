"""Schedule templates: the primitives by which a layer's computation gets its loops, under a tiling.

There is a template for products (GEMM into acc, then the vector unit), for simple layers (the vector unit alone), for
blocks, for layers that work on rows, and for attention. In all of them a tile of y is one iteration of a pipelined
loop; everything that the tile needs is computed there, in scratchpads, and what was loaded is kept for tiles that read
the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from celosia.compiler.expr import Axis, Schedule, Select, Stage, Tensor, create_schedule
from celosia.compiler.expr.loops import Declared
from celosia.compiler.expr.nodes import Cast
from celosia.compiler.tensorize.block_space import BlockWorkload
from celosia.compiler.tensorize.computation import BlockStage, LayerComputation, Rows
from celosia.compiler.tensorize.intrinsics import declared
from celosia.compiler.tensorize.space import CUT, Tiling, Workload, query_part
from celosia.hw.spec.config import Config


def schedule(cfg: Config, d: LayerComputation, c: Tiling) -> Schedule:
    """Schedule the computation `d` under the tiling `c`, which must be a point of its space."""
    template = _Template(cfg, d, c)
    if isinstance(d.workload, BlockWorkload):
        return template.block()
    if d.rows is not None:
        return template.of_rows(d.rows) if len(d.stages) == 1 else template.attention(d.rows)
    return template.product() if d.stages[0].acc is not None else template.simple()


class _Template:
    """The schedule templates, for one computation under one tiling."""

    def __init__(self, cfg: Config, d: LayerComputation, c: Tiling) -> None:
        self.cfg, self.d, self.c = cfg, d, c
        self.s = create_schedule(d.y)
        self.hw: Mapping[str, Declared] = declared(cfg)

    def product(self) -> Schedule:
        """Schedule a product. In each tile of y, acc is the whole reduction, or the sum of a loop over its pieces."""
        d, c = self.d, self.c
        first, y = d.stages[0], self.s[d.y]
        places, tile = self._tiles()
        self._pass(tile)
        for layer_stage, following in reversed(list(pairwise(d.stages))):
            self._before(layer_stage, following, tile)
        reader, loop = self._pieces(first, y, places) if c.order in CUT else (y, tile)
        if c.order not in CUT:
            self._sum(first, reader, loop)
        self._bring(first.on_chip, reader, loop, "inp")
        self._weights(first, reader, loop)
        return self.s

    def _before(self, layer_stage: BlockStage, following: BlockStage, tile: Axis) -> None:
        """Compute the pass of `layer_stage` in the tile of y, in front of the pass of the map that reads its result."""
        handed, y = following.on_chip if following.b is None else following.b, self.s[self.d.y]
        self.s[handed].compute_at(y, tile)
        self._makes(self.s[handed], self.s[handed].order[1:], layer_stage, following)
        self._constants(layer_stage, handed, y, tile)
        self._operands(layer_stage, y, tile)

    def block(self) -> Schedule:
        """Schedule a block: for each tile of y, or of the input of the layers after a cut, all layers of the group."""
        d, c = self.d, self.c
        assert isinstance(d.workload, BlockWorkload)
        ends = [*d.workload.cuts, len(d.stages)]
        for first, end, self.c in zip([0, *ends], ends, c.groups):
            if end < len(d.stages):
                reader, places, loop = self._resident(d.stages[end - 1], d.stages[end])
            else:
                places, loop = self._tiles()
                self._pass(loop)
                reader = self.s[d.y]
            if d.stages[end - 1].acc is not None:
                reader, loop = self._pieces(d.stages[end - 1], reader, places)
            self._weights(d.stages[end - 1], reader, loop)
            for number in reversed(range(first + 1, end)):
                self._hand_on(d.stages[number - 1], d.stages[number], reader, loop)
            if first == 0:
                self._bring(d.stages[0].on_chip, reader, loop, d.stages[0].scope)
        return self.s

    def _hand_on(self, layer_stage: BlockStage, following: BlockStage, reader: Stage, loop: Axis) -> None:
        """Compute the result of `layer_stage` for the next layer at `loop`, with its sums, weights and constants."""
        on_chip = self.s[following.on_chip]
        on_chip.compute_at(reader, loop)
        self._makes(on_chip, on_chip.order[1:], layer_stage, following)
        self._constants(layer_stage, following.on_chip, reader, loop)
        if layer_stage.acc is not None:
            self._sum(layer_stage, reader, loop)
        self._weights(layer_stage, reader, loop)

    def _makes(self, on_chip: Stage, tile: Sequence[Axis], layer_stage: BlockStage, following: BlockStage) -> None:
        """Tensorize the pass of `layer_stage` that makes `on_chip`. tile: axes block, row, column, and of an entry."""
        on_chip.set_scope("vin" if following.b is on_chip.tensor else following.scope)
        block, row, column, piece, b, *rest = tile
        if piece.extent > self.cfg.out_pieces:  # entries of inp are larger than those of the vector unit
            on_chip.reorder(piece, block, row, column, b, *rest)
            piece = b
        on_chip.tensorize(piece, self.hw[layer_stage.vector.name])

    def _resident(self, layer_stage: BlockStage, following: BlockStage) -> tuple[Stage, Axis, Axis]:
        """Compute all of the result of `layer_stage` that layers after a cut read.

        Returns its stage, the loop over places, and the loop over tiles.
        """
        on_chip, c = self.s[following.on_chip], self.c
        image, block, row, column, *entry = on_chip.order
        blocks, block = on_chip.split(block, c.n, "peel")
        rows, row = on_chip.split(row, c.y, "peel")
        columns, column = on_chip.split(column, c.x, "peel")
        tile = (block, row, column, *entry)
        on_chip.reorder(image, rows, columns, blocks, *tile)
        on_chip.pipeline(blocks)
        self._makes(on_chip, tile, layer_stage, following)
        self._constants(layer_stage, following.on_chip, on_chip, blocks)
        return on_chip, columns, blocks

    def simple(self) -> Schedule:
        """Schedule a layer of the vector unit alone."""
        d = self.d
        _, tile = self._tiles()
        self._pass(tile)
        self._weights(d.last, self.s[d.y], tile)
        self._bring(d.last.on_chip, self.s[d.y], tile, d.last.scope)
        return self.s

    def of_rows(self, rows: Rows) -> Schedule:
        """Schedule a layer that works on rows, in tiles of whole rows. The instruction computes their largest elements
        or sums itself."""
        s, d = self.s, self.d
        _, tile = self._tiles()
        self._row_results(rows, d.out, rows.name, tile)
        on_chip = s[d.last.on_chip]
        on_chip.set_scope("vin")
        on_chip.compute_at(s[d.y], tile)
        on_chip.keep()
        image, row, column, channel = on_chip.order
        group, lane = on_chip.split(channel, self.cfg.group)
        on_chip.reorder(image, group, row, column, lane)
        on_chip.tensorize(lane, self.hw["load_vin"])
        return s

    def attention(self, rows: Rows) -> Schedule:
        """Schedule attention in tiles of queries of some heads: scores, their softmax, and its product with the
        values."""
        s, d = self.s, self.d
        first, middle, last = d.stages
        y = s[d.y]
        image, group, head, query, b, _ = y.order
        heads, head = y.split(head, self.c.y, "peel")
        queries, query = y.split(query, self.c.x, "peel")
        y.reorder(image, heads, queries, head, query, group)
        self._by_parts(y, head, query, (group,))
        y.pipeline(queries)
        y.tensorize(b, self.hw["store"])
        self._pass(queries)
        out = s[d.out]
        image, head, query, block, *_ = out.order
        self._by_parts(out, head, query, (block,))
        self._of_heads(last, queries)
        self._row_results(rows, last.on_chip, f"{rows.name}_to_inp", queries)
        scores = s[middle.on_chip]
        scores.set_scope("vin")
        scores.compute_at(y, queries)
        image, head, query, channel = scores.order
        block, lane = scores.split(channel, self.cfg.group)
        scores.reorder(image, head, query, block, lane)
        self._by_parts(scores, head, query)
        scores.tensorize(lane, self.hw[first.vector.name])
        self._constants(first, middle.on_chip, y, queries)
        self._of_heads(first, queries)
        on_chip = s[first.on_chip]
        on_chip.set_scope("inp")
        on_chip.compute_at(y, queries)
        on_chip.keep()
        _, head, _, _, _, b, _ = on_chip.order
        on_chip.unroll(head)
        on_chip.tensorize(b, self.hw["load_inp"])
        return s

    def _of_heads(self, layer_stage: BlockStage, tile: Axis) -> None:
        """Compute the sums of `layer_stage` on GEMM for each head of a tile, and load its weights."""
        assert layer_stage.acc is not None and layer_stage.weights is not None
        acc, weights = self.s[layer_stage.acc], self.s[layer_stage.weights]
        acc.set_scope("acc")
        acc.compute_at(self.s[self.d.y], tile)
        image, head, query, block, piece, b, m, k, lane = acc.order
        acc.reorder(image, head, query, block, k, piece, b, m, lane)
        self._by_parts(acc, head, query, (block,))
        acc.tensorize(piece, self.hw["gemm"])
        weights.set_scope("wgt")
        weights.compute_at(self.s[self.d.y], tile)
        weights.keep()
        weights.unroll(weights.order[0])
        weights.tensorize(weights.order[3], self.hw["load_wgt"])

    def _by_parts(self, stage: Stage, head: Axis, query: Axis, inside: tuple[Axis, ...] = ()) -> None:
        """Split a stage into an instruction for each head and part of its queries, so that the other unit can begin
        behind the first."""
        part, query = stage.split(query, query_part(self.cfg), "peel")
        stage.reorder(head, part, *inside, query)
        stage.unroll(head)
        stage.unroll(part)

    def _row_results(self, rows: Rows, results: Tensor, name: str, tile: Axis) -> None:
        """Compute the results of rows at `tile` by the intrinsic `name`, and load its powers or parameters."""
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
            self._by_parts(s[results], row, column)
        s[results].tensorize(channel, self.hw[f"{name}_{rows.count}"])
        for number, tensor in rows.within.items():
            s[tensor].set_scope("row")
            s[tensor].compute_at(y, tile)
            s[tensor].tensorize(s[tensor].order[3], self.hw[f"{number}_{rows.count}"])
        s[constant].compute_at(y, tile)
        s[constant].keep()
        s[constant].tensorize(s[constant].split(s[constant].order[-1], size)[1], self.hw[f"load_{scope}"])

    def _pieces(self, layer_stage: BlockStage, reader: Stage, places: Axis) -> tuple[Stage, Axis]:
        """Compute the sum of `layer_stage` at `places`, cut into pieces. Returns its stage and the loop over pieces."""
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

    def _sum(self, layer_stage: BlockStage, reader: Stage, loop: Axis) -> None:
        """Compute the whole sum of `layer_stage` on GEMM at `loop`."""
        assert layer_stage.acc is not None
        acc = self.s[layer_stage.acc]
        acc.set_scope("acc")
        acc.compute_at(reader, loop)
        image, block, row, column, piece, b, m, k, r, t, e, lane = acc.order
        shares = []
        if (share := self._share(layer_stage)) > 1:
            around, block = acc.split(block, share, "peel")
            shares.append(around)
        acc.reorder(image, *shares, block, row, column, k, r, t, piece, b, m, e, lane)
        acc.tensorize(piece, self.hw["gemm"])

    def _share(self, layer_stage: BlockStage) -> int:
        """Output blocks that read the same input blocks, of a grouped convolution."""
        workload = self.d.workload
        return workload.share if isinstance(workload, Workload) else 1

    def _weights(self, layer_stage: BlockStage, reader: Stage, loop: Axis) -> None:
        """Load the weights or taps of `layer_stage` at `loop`."""
        for source, scope, inner in ((layer_stage.weights, "wgt", 4), (layer_stage.taps, "tap", 3)):
            if source is None:
                continue
            if source.body is not None:  # of an activation
                stage = self.s[source]
                stage.set_scope(scope)
            else:
                stage = self.s[self.s.cache_read(source, scope, *self._readers(layer_stage))]
            stage.compute_at(reader, loop)
            stage.keep()
            stage.tensorize(stage.order[inner], self.hw[_load(stage, scope)])

    def _constants(self, layer_stage: BlockStage, reads: Tensor, reader: Stage, loop: Axis) -> None:
        """Load parameters and table of the pass of `layer_stage`, which makes `reads`, at `loop`."""
        for source, scope in ((layer_stage.par, "par"), (layer_stage.table, "lut")):
            if source is not None:
                on_chip = self.s.cache_read(source, scope, reads)
                self.s[on_chip].compute_at(reader, loop)
                self.s[on_chip].keep()
                self.s[on_chip].tensorize(self.s[on_chip].order[1], self.hw[f"load_{scope}"])

    def _readers(self, layer_stage: BlockStage) -> tuple[Tensor, ...]:
        """The tensors that read the weights of `layer_stage`."""
        if layer_stage.acc is not None:
            return (layer_stage.acc,)
        number = self.d.stages.index(layer_stage)
        return (self.d.out if layer_stage is self.d.last else self.d.stages[number + 1].on_chip,)

    def _tiles(self) -> tuple[Axis, Axis]:
        """Cut y into tiles: (the loop over places, the innermost loop over tiles)."""
        y, c, p = self.s[self.d.y], self.c, self.cfg.out_pieces
        *several, image, group, row, column, b, _ = y.order  # bytes of each sum, or nothing
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
            alone, block = y.split(block, c.n, "peel")
            outside = (*outside, alone)
        apart = (*several, *([group] if p > 1 else []))
        y.reorder(*outside, *apart, block, row, column)
        for axis in apart:
            y.unroll(axis)
        y.pipeline(outside[-1])
        y.tensorize(b, self.hw["store"])
        return columns, outside[-1]

    def _pass(self, tile: Axis) -> None:
        """Compute the last pass of the vector unit at the tile, and load its constants and operand B."""
        s, d = self.s, self.d
        y, out = s[d.y], s[d.out]
        out.set_scope("out")
        out.compute_at(y, tile)
        if d.last.vector.byte:  # an instruction for each byte of the sums
            out.unroll(out.order[0])
        out.tensorize(next(axis for axis in out.order if axis.name == "piece"), self.hw[d.last.vector.name])
        self._constants(d.last, d.out, y, tile)
        self._operands(d.last, y, tile)

    def _operands(self, layer_stage: BlockStage, reader: Stage, loop: Axis) -> None:
        """Load operand B of the pass of `layer_stage` at `loop`, where it has one; or A, where B is the result of the
        pass before."""
        if layer_stage.b is None:
            return
        handed = isinstance(self.d.workload, Workload) and layer_stage is not self.d.stages[0]
        self._bring(layer_stage.on_chip if handed else layer_stage.b, reader, loop, "acc" if handed else "vin")

    def _bring(self, on_chip: Tensor, reader: Stage, loop: Axis, scope: str) -> None:
        """Load an activation at `loop`, in parts, an entry's pieces apart."""
        stage = self.s[on_chip]
        stage.set_scope(scope)
        stage.compute_at(reader, loop)
        stage.keep()
        image, block, row, column, piece, b, _ = stage.order
        parts, block = stage.split(block, self.c.part, "peel")
        stage.reorder(parts, piece, image, block, row, column)
        stage.unroll(parts)
        stage.unroll(piece)
        stage.tensorize(b, self.hw[_load(stage, scope)])


def _load(stage: Stage, scope: str) -> str:
    """Choose the intrinsic that brings a tensor into `scope`."""
    if isinstance(stage.body, Select):
        return f"padded_load_{scope}"
    return "widening_load" if isinstance(stage.body, Cast) else f"load_{scope}"
