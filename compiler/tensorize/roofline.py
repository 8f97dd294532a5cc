"""Estimate the cycles of a layer under a tiling, and choose the tiling with the fewest (blocks: block_space.py).

It is the roofline of one layer: the busiest of gemm, load and store, plus what cannot overlap: loads that find no room
before gemm has used what lies there, and part of the load of the first tile and the drain of the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.layer import TilingError
from celosia.compiler.tensorize.instruction import PAD_MAX
from celosia.compiler.tensorize.space import (
    EXTENT_MAX,
    CompletionOrder,
    Sizes,
    Tiling,
    Workload,
    candidates,
    parts,
    point,
    product_sizes,
    query_part,
    too_large,
)
from celosia.hw.boards.memory import ZYNQ_HP
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import instruction_bytes
from celosia.hw.spec.pipeline import (
    MAX_BURST,
    MAX_OUTSTANDING_BURSTS,
    PAIR_STAGES,
    VECTOR_STAGES,
    softmax_parts,
    tile_rows,
)
from celosia.hw.spec.scratchpads import depths, scratchpads
from celosia.sim.timing import latency
from celosia.sim.timing.engine_cycles import softmax_beats, softmax_cycles, softmax_tail_cycles

MEMORY = ZYNQ_HP
"""The memory that the estimate assumes."""
LOAD_LATENCY = (
    latency.START_TO_ASK + latency.ASK_TO_ADDRESS + MEMORY.read_latency + latency.BEAT_TO_STEP + latency.STEP_TO_END
)  # fmt: skip
"""Cycles from the start of a LOAD to its end, without its beats."""
STORE_LATENCY = (
    PAIR_STAGES + latency.GEMM_STAGES + VECTOR_STAGES + latency.WRITE_TO_END + latency.START_TO_STEP
    + latency.UNIT_TO_BEAT + MEMORY.write_latency + latency.RESPONSE_TO_END
)  # fmt: skip
"""Cycles from gemm's last step to the end of the STORE of its result, without the beats."""
REFRESH_FACTOR = MEMORY.refresh_period / (MEMORY.refresh_period - MEMORY.refresh_cycles)
"""Cycles of a beat in a long transfer: slightly more than 1, since DRAM is refreshed in between."""
SHORT_BURST_CYCLES = (
    latency.ASK_TO_ADDRESS + MEMORY.read_latency + MAX_BURST + latency.END_TO_ASK
) // MAX_OUTSTANDING_BURSTS
"""Least cycles of a burst: MAX_OUTSTANDING_BURSTS of them share the latency of one."""
GEMM_OVERHEAD = 4
"""Cycles of a gemm instruction beside its steps: it waits for tokens even if its data is there."""
INSTRUCTIONS_PER_TILE = 6
"""Cycles that the fetch of a depthwise tile's instructions costs, about one each."""
EXPOSED_SHARE = 0.5
"""Share of a layer's first load and last drain that counts if gemm is the busiest unit: neighbouring layers hide the
rest."""
Cycles = NDArray[np.float64]
"""Cycles for each of several points."""


def _row_cost(beats: NDArray[np.int64]) -> Cycles:
    """Return the mean cycles of a beat in rows of `beats` beats that lie apart in DRAM: the last burst of each is
    short."""
    rest = beats % MAX_BURST
    last = np.where(rest > 0, np.maximum(rest, SHORT_BURST_CYCLES), 0)
    return np.where(beats > 0, (beats - rest + last) / np.maximum(beats, 1), 1.0)


def estimate(cfg: Config, p: Workload, d: Tiling) -> float:
    """Estimate the cycles of the layer `p` under the tiling `d`."""
    return float(terms(cfg, p, [(d.n, d.y, d.x, d.k, d.order)])["cycles"][0])


def terms(cfg: Config, p: Workload, points: Sequence[Sizes], cold: bool = False) -> dict[str, Cycles]:
    """Estimate each of `points`. Returns the cycles and the terms that they consist of, by name, each [points].

    gemm: cycles of GEMM. beats: of the load port. store: of the store port. exposed: loads that nothing hides. ends:
    first load and last drain. tiles: their number. cold: see `rank_tilings`.
    """
    t = _TileCosts(cfg, p, points)
    gemm, beats, store, exposed = t.gemm, t.beats(), t.store, t.exposed()
    ends = t.ends(beats, cold)
    busy = _overlap_rounds(
        np.maximum(gemm, store), beats, t.resident_beats(), np.where(t.by_blocks, t.n_tiles, t.spatial)
    )
    one_by_one = np.maximum(gemm + beats, store)
    cycles = np.minimum(busy + exposed, one_by_one) + ends
    columns = dict(cycles=cycles, gemm=gemm, beats=beats, store=store, exposed=exposed, ends=ends, tiles=t.tiles)
    return {name: np.broadcast_to(value, cycles.shape).astype(np.float64) for name, value in columns.items()}


class _TileCosts:
    """The tiles of each point: their number, the scratchpad entries that one takes, and how often these are loaded.

    Attributes are arrays [points]. weights: whether the order is "weights" or "pieces". cut: whether the reduction is
    cut. n_tiles, spatial, pieces: numbers of tiles along output blocks, along pixels and images, and along the
    reduction; tiles: their product. by_blocks: whether the outer loop is over output blocks, not over pixels. gemm,
    store: cycles of these units. tile_inp, all_inp: entries of inp that a tile reads, and all tiles; inp_stays: whether
    all stay on chip; inp_loads: entries that are loaded; ..._wgt: the same of weights. inp_beats, wgt_beats,
    entry_beats: cycles of the memory port for an entry of inp, wgt and out.
    """

    def __init__(self, cfg: Config, p: Workload, points: Sequence[Sizes]) -> None:
        self.cfg, self.p, self.room = cfg, p, depths(cfg)
        self.n, self.y, self.x, self.k, self.order = n, y, x, k, order = [np.array(sizes) for sizes in zip(*points)]
        self.weights = (order == "weights") | (order == "pieces")
        self.cut = (order == "split") | (order == "pieces")
        self.n_tiles, self.spatial = -(-p.out_blocks // n), -(-p.rows // y) * -(-p.columns // x) * p.images
        self.pieces = -(-p.in_blocks // k)
        self.tiles = self.n_tiles * self.spatial * self.pieces
        self.gemm = p.steps + self.tiles * GEMM_OVERHEAD
        self.by_blocks = (order != "split") & ((self.weights & (self.n_tiles > 1)) | (self.spatial == 1))
        self.entry_beats = max(1, cfg.lanes // cfg.bus_bytes)
        self.inp_beats, self.wgt_beats = scratchpads(cfg)["inp"].beats(cfg.bus_bytes), p.weight_beats(cfg)
        self._count_entries()
        out = p.out_blocks * p.rows * p.columns * p.images * p.output_bytes
        beat_cycles = self._cycles_per_beat(n, p.out_blocks, x, self.entry_beats)
        self.store = out * self.entry_beats * beat_cycles
        # Of an entry of the last tile. Short bursts count for all tiles together, but for pixels that lie apart.
        self.last_beats = self.entry_beats * beat_cycles if p.apart else self.entry_beats

    def _count_entries(self) -> None:
        """Count scratchpad entries of input and weights: those of a tile, whether all stay on chip, how many are
        loaded."""
        p, n, y, x, k = self.p, self.n, self.y, self.x, self.k
        self.columns = (x - 1) * p.window.strides[1] + p.window.reach(1)
        rows = y if p.window.kernel[0] == 1 else (y - 1) * p.window.strides[0] + p.window.reach(0)
        span = rows * self.columns
        self.tile_inp = (p.in_blocks + p.step * ((n - 1) // p.share) if p.grouped else k) * span
        self.all_inp = p.in_blocks * span * self.spatial * (p.out_blocks if p.grouped else 1)
        self.tile_wgt, self.all_wgt = p.weight_entries(n, k), p.weight_entries(p.out_blocks, p.in_blocks)
        self.inp_stays = np.bool_(p.grouped) | (self.all_inp <= self.room["inp"])
        self.wgt_stays = self.all_wgt <= self.room["wgt"]
        self.inp_loads = self.all_inp * np.where(self.weights & ~self.inp_stays, self.n_tiles, 1)
        self.wgt_loads = self.all_wgt * np.where((self.order == "weights") | self.wgt_stays, 1, self.spatial)
        self.inp_cost = self._cycles_per_beat(k, p.in_blocks, self.columns, self.inp_beats)

    def _cycles_per_beat(self, blocks: NDArray[np.int64], of: int, columns: NDArray[np.int64], beats: int) -> Cycles:
        """Return the mean cycles of a beat when tiles of `blocks` and `columns` are moved, with `beats` for an entry.

        Whole rows, or all blocks of a pixel (`of` is their number), are long bursts; parts of them are short ones.
        """
        if self.p.apart:
            return np.where(blocks == of, 1.0, _row_cost(blocks * beats))
        return np.where(self.x == self.p.columns, 1.0, _row_cost(columns * beats))

    def beats(self) -> Cycles:
        """Return the cycles of the load port: all loads, and the instructions that are fetched through it."""
        p = self.p
        load = self.inp_loads * self.inp_beats * self.inp_cost + self.wgt_loads * self.wgt_beats
        load = load + self.store * (p.residual + p.added_operands)
        # GEMM; VECTOR and STORE; LOADs of weights, of the input, of the residual's other operand.
        count = (
            self.tiles
            + (2 * p.output_bytes + p.residual + len(p.behind) + p.added_operands) * self.n_tiles * self.spatial
        )
        weights_stay = (self.order == "weights") | self.wgt_stays
        count = count + np.where(weights_stay, self.n_tiles * self.pieces, self.tiles)
        count = count + self.spatial * self.pieces * np.where(self.weights & ~self.inp_stays, self.n_tiles, 1)
        fetched = count * max(1, instruction_bytes(self.cfg) // self.cfg.bus_bytes)
        return np.asarray(load * REFRESH_FACTOR + fetched)

    def resident_beats(self) -> Cycles:
        """Return the beats of what is loaded in the first iteration of the outer loop and stays for the others."""
        inp = np.where(self.inp_stays, self.all_inp * self.inp_beats * self.inp_cost, 0)
        wgt = np.where(self.wgt_stays & (self.spatial > 1), self.all_wgt * self.wgt_beats, 0)
        return np.asarray(np.where(self.by_blocks, inp, wgt) * REFRESH_FACTOR)

    def _late_weights(self) -> NDArray[np.bool_]:
        """Return whether weights take more than half of wgt, so that they cannot load while earlier ones are in use."""
        room = self.room["wgt"]
        entries = np.where(self.weights | self.cut | (self.all_wgt > room), self.tile_wgt, self.all_wgt)
        return np.asarray(entries > room // 2)

    def exposed(self) -> Cycles:
        """Return the beats of loads that no computation hides, since they take more than half of a scratchpad."""
        late = (self.tile_inp > self.room["inp"] // 2) & (self.spatial > 1)
        exposed = np.where(late, (self.inp_loads - self.tile_inp) * self.inp_beats, 0)
        return np.asarray(exposed + np.where(self._late_weights(), self.wgt_loads * self.wgt_beats, 0))

    def _drain(self) -> Cycles:
        """Return the cycles from gemm's last step to the end of the last STORE."""
        p, tile = self.p, self.n * self.y * self.x
        if p.sum_bytes:  # more bytes to store than to load; the last tile may have fewer blocks than others
            tile = (p.out_blocks - (self.n_tiles - 1) * self.n) * self.y * self.x
        drain = tile * (1 + p.output_bytes * self.last_beats) + STORE_LATENCY
        # With the order "split", all output of a pixel is stored during the last piece.
        last = self.y * self.x * (p.out_blocks * self.last_beats - (p.out_blocks - self.n) * self.k * p.places)
        return np.asarray(drain + np.where(self.order == "split", np.maximum(0, last - tile * self.last_beats), 0))

    def ends(self, beats: Cycles, cold: bool) -> Cycles:
        """Return the cycles of the first load and the last drain that nothing hides. beats: see `beats`; cold: see
        `terms`."""
        p, first, drain = self.p, self.tile_inp * self.inp_beats + LOAD_LATENCY, self._drain()
        start = first + self.tile_wgt * self.wgt_beats if cold else EXPOSED_SHARE * first
        # Where gemm waits for loads, what it computes after the last of them is exposed: a tile, or all that reads it.
        by_tile = np.where(~self.by_blocks & self.wgt_stays, self.n_tiles, 1)
        tail = np.where(self.by_blocks & self.inp_stays & (self.order != "pieces"), self.spatial, by_tile)
        ends = np.where(
            beats > self.gemm,
            LOAD_LATENCY
            + EXPOSED_SHARE * (first - LOAD_LATENCY)
            + drain
            + tail * self.n * self.y * self.x * self.k * p.places,
            start + EXPOSED_SHARE * drain,
        )
        # The next weights are loaded while gemm is at the last blocks, which may be fewer.
        pixels = np.where(self.cut, self.y * self.x, p.rows * p.columns * p.images)
        last = (p.out_blocks - (self.n_tiles - 1) * self.n) * pixels * self.k * p.places
        behind = self.tile_wgt * self.wgt_beats - last
        hidden = self._late_weights() | (beats > self.gemm) | (self.order == "input")
        return np.asarray(ends + np.where(hidden, 0, np.maximum(behind, 0)))


def _rank_depthwise(cfg: Config, p: Workload) -> Iterator[Tiling]:
    """Yield the points of a depthwise convolution or pooling, those with the fewest estimated cycles first."""
    beats = max(1, cfg.lanes // cfg.bus_bytes)

    def cycles(d: Tiling) -> float:
        """Estimate all tiles by the busiest unit in each, plus the first load and the last store."""
        tiles = -(-p.out_blocks // d.n) * -(-p.rows // d.y) * -(-p.columns // d.x) * p.images
        load, out = d.n * p.input_rows(d.y) * p.input_columns(d.x) * beats, d.n * d.y * d.x
        tile_cycles = max(load * REFRESH_FACTOR, out * p.sums, out * beats) + INSTRUCTIONS_PER_TILE
        fullness = p.out_blocks * p.rows * p.columns * p.images / (tiles * out)
        return tiles * fullness * tile_cycles + load + out * beats

    sizes = [(n, y, x) for x in parts(p.columns) for y in range(1, p.rows + 1) for n in parts(p.out_blocks)]
    points = (point(cfg, p, *size, 1, "rows") for size in sizes)
    yield from sorted((d for d in points if too_large(cfg, p, d) is None), key=cycles)


def _rank_elementwise(cfg: Config, p: Workload) -> Iterator[Tiling]:
    """Yield the points of a pooling, map or multiplication, those with the fewest estimated cycles first.

    Of equal points the one with the largest tiles comes first.
    """
    beats, fetch = max(1, cfg.lanes // cfg.bus_bytes), max(1, instruction_bytes(cfg) // cfg.bus_bytes)

    def cycles(d: Tiling) -> float:
        """Estimate the first load, then the busiest unit in each tile, then the last result and its store."""
        tiles = -(-p.out_blocks // d.n) * -(-p.rows // d.y) * -(-p.columns // d.x) * p.images
        out = p.out_blocks * p.rows * p.columns * p.images / tiles
        span = p.input_rows(d.y) * p.input_columns(d.x) / (d.y * d.x)
        load = out * (span + p.residual) * beats * REFRESH_FACTOR + (3 + p.residual) * fetch
        vector = out * p.window.kernel[0] * p.window.kernel[1] + VECTOR_STAGES
        store = out * beats
        return load + (tiles - 1) * max(load, vector, store) + vector + store

    yield from sorted(candidates(cfg, p), key=cycles)


def _rank_softmax(cfg: Config, p: Workload) -> Iterator[Tiling]:
    """Yield the points of a softmax, those with the fewest tiles (of rows) of the softmax engine first.

    Tiles of one instruction follow each other closely; a new instruction leaves a gap.
    """

    def tiles(d: Tiling) -> tuple[int, int]:
        """Return the tiles of the softmax engine, and the number of instructions."""
        count, rest = divmod(p.columns, d.x)
        instruction_rows = [d.y * x for x in [d.x] * count + [rest] * (rest > 0)]
        tiles_of_columns = sum(-(-rows // tile_rows(cfg)) for rows in instruction_rows)
        return tiles_of_columns * -(-p.rows // d.y), len(instruction_rows)

    yield from sorted(candidates(cfg, p), key=tiles)


def attention_cycles(cfg: Config, p: Workload, d: Tiling) -> float:
    """Estimate the cycles of attention: all tiles, what comes before the first softmax, and what comes after the last.

    A tile takes as long as the vector unit or GEMM, whichever takes longer. The vector unit requantises the products by
    the values while a softmax runs, so that they cost nothing there. If a tile has one softmax, the scores of the next
    tile are requantised after it, but not before GEMM has made them. If GEMM is late, every second tile waits, and two
    tiles together take softmax + gemm + scores.
    """
    assert p.attends is not None
    keys, channels = p.attends

    def tile_cycles(heads: int, queries: int) -> float:
        """Estimate the cycles of one tile of attention."""
        if not heads or not queries:
            return 0
        softmax = _tile_softmax_cycles(cfg, heads, queries, keys)
        scores = heads * queries * keys
        gemm = heads * queries * (keys * channels + keys // cfg.inp_pieces * p.out_blocks)
        if heads == 1 and queries <= query_part(cfg):
            return max(softmax + keys, (softmax + gemm + scores) / 2, gemm) + 2 * VECTOR_STAGES
        return max(softmax + scores + 2 * VECTOR_STAGES, gemm)

    (full_rows, rest_heads), (full_columns, rest_queries) = divmod(p.rows, d.y), divmod(p.columns, d.x)
    tiles = full_rows * (full_columns * tile_cycles(d.y, d.x) + tile_cycles(d.y, rest_queries))
    tiles = tiles + full_columns * tile_cycles(rest_heads, d.x) + tile_cycles(rest_heads, rest_queries)
    part, entry_beats = min(d.x, query_part(cfg)), max(1, cfg.lanes // cfg.bus_bytes)
    head = max(d.x * channels * entry_beats + keys * channels * p.weight_beats(cfg), d.x * keys * channels)
    start = LOAD_LATENCY + d.y * head + part * keys * channels
    return tiles + start + part * p.out_blocks * (keys + 1 + entry_beats) + STORE_LATENCY


def _tile_softmax_cycles(cfg: Config, heads: int, queries: int, groups: int) -> float:
    """Estimate the cycles of the softmax instructions of a tile of attention, `groups` channel groups to a row.

    An instruction overlaps with the one before it, but starts only when the second last has ended. The largest elements
    and the last quotients of an instruction take two more tiles of the engine.
    """
    full_parts, rest = divmod(queries, query_part(cfg))
    rows = [*[query_part(cfg)] * full_parts, *[rest] * (rest > 0)] * heads
    beat = tile_rows(cfg) * softmax_beats(cfg, groups) * softmax_parts(cfg)
    tiles = [-(-count // tile_rows(cfg)) for count in rows[:-1]]
    tail = softmax_tail_cycles(cfg, tile_rows(cfg), groups) - beat  # quotients, and what follows them
    overlapped = sum(max(count * beat, ((count + 1) * beat + tail) / 2) for count in tiles)
    return float(overlapped + softmax_cycles(cfg, rows[-1], groups))


def _overlap_rounds(work: Cycles, beats: Cycles, resident_beats: Cycles, rounds: NDArray[np.int64]) -> Cycles:
    """Return the cycles of `rounds` iterations of the outer loop: the larger of work and beats, and waits of the first.

    The first one loads what stays on chip, `resident_beats` of all beats, and may wait for that while the others do
    not. The layer before hides part of the wait.
    """
    later = (beats - resident_beats) * (1 - 1 / rounds)
    first = np.maximum(work / rounds, beats - later)
    busy = np.maximum(work, beats)
    return np.asarray(busy + EXPOSED_SHARE * np.maximum(0, first + np.maximum(work - work / rounds, later) - busy))


ROWS_FIRST_COST = 1.02
"""Factor of cycles that a tiling may take more if it completes the output in the order that a later layer waits for."""


PARTS_BY_ROWS = 4
"""Least number of parts of rows that a layer without gemm is cut into, if it waits for rows of the layer before."""


@cache
def rank_tilings(
    cfg: Config, p: Workload, first: CompletionOrder = CompletionOrder.ANY, cold: bool = False, count: int = 1
) -> tuple[Tiling, ...]:
    """Return the `count` tilings with the fewest estimated cycles, the best first; without GEMM only one.

    first: prefer tilings that complete the output row by row, or column by column. cold: no layer before hides the
    first loads, of weights, too. Raises TilingError if there is none.
    """
    if max(p.window.kernel) > EXTENT_MAX or max(p.window.pads) > PAD_MAX:
        raise TilingError(f"kernel {p.window.kernel} with pads {p.window.pads} is beyond an instruction's fields")
    if not p.in_blocks:
        tilings = (
            _rank_depthwise(cfg, p)
            if p.sums
            else candidates(cfg, p)
            if p.norm or (max(p.window.kernel) > 1 and p.rows > 1)  # windows overlap: larger tiles load less
            else _rank_elementwise(cfg, p)
            if not p.whole
            else _rank_softmax(cfg, p)
        )
        if p.attends is not None:
            tilings = iter(sorted(candidates(cfg, p), key=lambda d: attention_cycles(cfg, p, d)))
        if first is CompletionOrder.ROWS and not p.sums:  # a part of the image does not wait for the rest
            tilings = iter(sorted(tilings, key=lambda d: PARTS_BY_ROWS * d.y > max(p.rows, PARTS_BY_ROWS)))
        best = next(tilings, None)
        if best is None:
            raise TilingError("one output pixel's operands do not fit vin, acc or out")
        return (best,)
    points = list(product_sizes(cfg, p))
    if not points:
        room = "inp_depth {inp}, wgt_depth {wgt}, acc_depth {acc}, out_depth {out} and par_depth {par}"
        kernel = "x".join(map(str, p.window.kernel))
        raise TilingError(
            f"no tile of {p.in_blocks} input blocks with a {kernel} kernel fits {room.format(**depths(cfg))}"
        )
    costs = terms(cfg, p, points, cold)["cycles"]
    order = np.argsort(costs, kind="stable")
    if first is not CompletionOrder.ANY:
        by_columns = first is CompletionOrder.COLUMNS
        is_cut = [x < p.columns if by_columns else y < p.rows for _, y, x, _, _ in points]
        in_order = np.array(is_cut) & np.array([order == "input" for *_, order in points])
        good = order[in_order[order] & (costs[order] <= ROWS_FIRST_COST * costs[order[0]])]
        order = np.concatenate([good, order[~np.isin(order, good)]])
    return tuple(point(cfg, p, *points[i]) for i in order[:count])


def choose(cfg: Config, p: Workload, first: CompletionOrder = CompletionOrder.ANY, cold: bool = False) -> Tiling:
    """Return the tiling with the fewest estimated cycles; see `rank_tilings`."""
    return rank_tilings(cfg, p, first, cold)[0]
