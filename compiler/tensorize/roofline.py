"""An estimate of a layer's cycles, and the tiling that it chooses.

It is the roofline of one layer: the busiest of gemm, load and store, plus what cannot overlap: loads that find no room
before gemm has used what lies there, and part of the load of the first tile and the drain of the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.layer import TilingError
from celosia.compiler.tensorize.space import (
    EXTENT_MAX,
    CompletionOrder,
    Sizes,
    Tiling,
    Workload,
    candidates,
    parts,
    point,
    products,
    query_part,
    too_large,
)
from celosia.compiler.tensorize.transfer import PAD_MAX
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
"""Cycles from the start of a LOAD to its end, beside its beats."""
STORE_LATENCY = (
    PAIR_STAGES + latency.GEMM_STAGES + VECTOR_STAGES + latency.WRITE_TO_END + latency.START_TO_STEP
    + latency.UNIT_TO_BEAT + MEMORY.write_latency + latency.RESPONSE_TO_END
)  # fmt: skip
"""Cycles from gemm's last step to the end of the STORE of its result, beside its beats."""
REFRESHED = MEMORY.refresh_period / (MEMORY.refresh_period - MEMORY.refresh_cycles)
"""Cycles for each beat of a long transfer."""
SHORT_BURST = (latency.ASK_TO_ADDRESS + MEMORY.read_latency + MAX_BURST + latency.END_TO_ASK) // MAX_OUTSTANDING_BURSTS
"""Cycles that a burst takes at least, as so many are under way during the latency of one."""
GEMM_CYCLES = 4
"""Cycles that a gemm instruction costs beside its steps: tokens that it waits for, though data is there."""
INSTRUCTIONS_PER_TILE = 6
ENDS = 0.5
"""How much of a layer's first load and last drain counts where gemm is the busiest: the layers around it overlap."""
Cycles = NDArray[np.float64]


def _row_cost(beats: NDArray[np.int64]) -> Cycles:
    """Cycles for each beat of a row of its own in DRAM: its last burst of up to 16 beats may be short."""
    rest = beats % MAX_BURST
    last = np.where(rest > 0, np.maximum(rest, SHORT_BURST), 0)
    return np.where(beats > 0, (beats - rest + last) / np.maximum(beats, 1), 1.0)


def estimate(cfg: Config, p: Workload, d: Tiling) -> float:
    """Estimated cycles of the whole layer under the tiling `d`."""
    return float(terms(cfg, p, [(d.n, d.y, d.x, d.k, d.order)])["cycles"][0])


def terms(cfg: Config, p: Workload, points: Sequence[Sizes], cold: bool = False) -> dict[str, Cycles]:
    """Estimate each of `points`: the cycles, and the terms that they consist of, by name. cold: see `ranked`."""
    t = _Tiles(cfg, p, points)
    gemm, beats, store, exposed = t.gemm, t.beats(), t.store, t.exposed()
    ends = t.ends(beats, cold)
    busy = _in_rounds(np.maximum(gemm, store), beats, t.kept(), np.where(t.by_blocks, t.n_tiles, t.spatial))
    one_by_one = np.maximum(gemm + beats, store)
    cycles = np.minimum(busy + exposed, one_by_one) + ends
    columns = dict(cycles=cycles, gemm=gemm, beats=beats, store=store, exposed=exposed, ends=ends, tiles=t.tiles)
    return {name: np.broadcast_to(value, cycles.shape).astype(np.float64) for name, value in columns.items()}


class _Tiles:
    """The tiles of each point, [points]: how many there are, what one takes of the scratchpads, and how often that is
    loaded. inp and wgt count entries; beats are cycles of the port.
    """

    def __init__(self, cfg: Config, p: Workload, points: Sequence[Sizes]) -> None:
        self.cfg, self.p, self.room = cfg, p, depths(cfg)
        self.n, self.y, self.x, self.k, self.order = n, y, x, k, order = [np.array(sizes) for sizes in zip(*points)]
        self.weights = (order == "weights") | (order == "pieces")
        self.cut = (order == "split") | (order == "pieces")
        self.n_tiles, self.spatial = -(-p.out_blocks // n), -(-p.rows // y) * -(-p.columns // x) * p.images
        self.pieces = -(-p.in_blocks // k)
        self.tiles = self.n_tiles * self.spatial * self.pieces
        self.gemm = p.steps + self.tiles * GEMM_CYCLES
        self.by_blocks = (order != "split") & ((self.weights & (self.n_tiles > 1)) | (self.spatial == 1))
        self.entry_beats = max(1, cfg.lanes // cfg.bus_bytes)
        self.inp_beats, self.wgt_beats = scratchpads(cfg)["inp"].beats(cfg.bus_bytes), p.weight_beats(cfg)
        self._held()
        out = p.out_blocks * p.rows * p.columns * p.images * p.stored
        moved = self._moved(n, p.out_blocks, x, self.entry_beats)
        self.store = out * self.entry_beats * moved
        self.last_beats = self.entry_beats * moved if p.apart else self.entry_beats
        """For an entry of the last tile: that parts of rows are short bursts is a matter of all tiles."""

    def _held(self) -> None:
        """Scratchpad entries of the input and of weights: what a tile takes, whether all of them stay, and how much is
        loaded."""
        p, n, y, x, k = self.p, self.n, self.y, self.x, self.k
        self.columns = (x - 1) * p.window.strides[1] + p.window.reach(1)
        rows = y if p.window.kernel[0] == 1 else (y - 1) * p.window.strides[0] + p.window.reach(0)
        span = rows * self.columns
        self.tile_inp = (p.in_blocks + p.step * ((n - 1) // p.share) if p.grouped else k) * span
        self.all_inp = p.in_blocks * span * self.spatial * (p.out_blocks if p.grouped else 1)
        self.tile_wgt, self.all_wgt = n * k * p.places, p.out_blocks * p.in_blocks * p.places
        self.inp_stays = np.bool_(p.grouped) | (self.all_inp <= self.room["inp"])
        self.wgt_stays = self.all_wgt <= self.room["wgt"]
        self.inp_loads = self.all_inp * np.where(self.weights & ~self.inp_stays, self.n_tiles, 1)
        self.wgt_loads = self.all_wgt * np.where((self.order == "weights") | self.wgt_stays, 1, self.spatial)
        self.inp_cost = self._moved(k, p.in_blocks, self.columns, self.inp_beats)

    def _moved(self, blocks: NDArray[np.int64], of: int, columns: NDArray[np.int64], beats: int) -> Cycles:
        """Cycles for each beat of `blocks` and columns of a tile, of `beats` for an entry: what follows each other in
        DRAM, whole rows or all blocks of a pixel, is long bursts; of others each is a burst of its own."""
        if self.p.apart:
            return np.where(blocks == of, 1.0, _row_cost(blocks * beats))
        return np.where(self.x == self.p.columns, 1.0, _row_cost(columns * beats))

    def beats(self) -> Cycles:
        """Beats of all loads, and of instructions, which come through the same port."""
        p = self.p
        load = self.inp_loads * self.inp_beats * self.inp_cost + self.wgt_loads * self.wgt_beats
        load = load + self.store * (p.residual + p.added)
        # GEMM; VECTOR and STORE; LOADs of weights, of the input, of the residual's other operand.
        count = self.tiles + (2 * p.stored + p.residual + len(p.behind) + p.added) * self.n_tiles * self.spatial
        weights_stay = (self.order == "weights") | self.wgt_stays
        count = count + np.where(weights_stay, self.n_tiles * self.pieces, self.tiles)
        count = count + self.spatial * self.pieces * np.where(self.weights & ~self.inp_stays, self.n_tiles, 1)
        fetched = count * max(1, instruction_bytes(self.cfg) // self.cfg.bus_bytes)
        return np.asarray(load * REFRESHED + fetched)

    def kept(self) -> Cycles:
        """Beats of what is loaded in the first round and stays for the others."""
        inp = np.where(self.inp_stays, self.all_inp * self.inp_beats * self.inp_cost, 0)
        wgt = np.where(self.wgt_stays & (self.spatial > 1), self.all_wgt * self.wgt_beats, 0)
        return np.asarray(np.where(self.by_blocks, inp, wgt) * REFRESHED)

    def _late_weights(self) -> NDArray[np.bool_]:
        """Whether weights take more than half a ring: they cannot be loaded while what was there before, perhaps of
        another layer, is used."""
        room = self.room["wgt"]
        taken = np.where(self.weights | self.cut | (self.all_wgt > room), self.tile_wgt, self.all_wgt)
        return np.asarray(taken > room // 2)

    def exposed(self) -> Cycles:
        """Beats of what takes more than half a ring."""
        late = (self.tile_inp > self.room["inp"] // 2) & (self.spatial > 1)
        exposed = np.where(late, (self.inp_loads - self.tile_inp) * self.inp_beats, 0)
        return np.asarray(exposed + np.where(self._late_weights(), self.wgt_loads * self.wgt_beats, 0))

    def _drain(self) -> Cycles:
        """Cycles from gemm's last step to the end of the last STORE."""
        p, tile = self.p, self.n * self.y * self.x
        if p.sum_bytes:  # of which there is more to store than to load; the last tile may have fewer groups than others
            tile = (p.out_blocks - (self.n_tiles - 1) * self.n) * self.y * self.x
        drain = tile * (1 + p.stored * self.last_beats) + STORE_LATENCY
        # Where the sum of a place is cut in pieces, all of its output is stored during the last of them.
        last = self.y * self.x * (p.out_blocks * self.last_beats - (p.out_blocks - self.n) * self.k * p.places)
        return np.asarray(drain + np.where(self.order == "split", np.maximum(0, last - tile * self.last_beats), 0))

    def ends(self, beats: Cycles, cold: bool) -> Cycles:
        """Cycles of the first load and the last drain that nothing else hides."""
        p, first, drain = self.p, self.tile_inp * self.inp_beats + LOAD_LATENCY, self._drain()
        start = first + self.tile_wgt * self.wgt_beats if cold else ENDS * first
        # Where gemm waits for loads, what it computes after the last of them is exposed: a tile, or all that reads it.
        by_tile = np.where(~self.by_blocks & self.wgt_stays, self.n_tiles, 1)
        tail = np.where(self.by_blocks & self.inp_stays & (self.order != "pieces"), self.spatial, by_tile)
        ends = np.where(
            beats > self.gemm,
            LOAD_LATENCY + ENDS * (first - LOAD_LATENCY) + drain + tail * self.n * self.y * self.x * self.k * p.places,
            start + ENDS * drain,
        )
        # The next weights are loaded while gemm is at the last blocks, which may be fewer.
        pixels = np.where(self.cut, self.y * self.x, p.rows * p.columns * p.images)
        last = (p.out_blocks - (self.n_tiles - 1) * self.n) * pixels * self.k * p.places
        behind = self.tile_wgt * self.wgt_beats - last
        hidden = self._late_weights() | (beats > self.gemm) | (self.order == "input")
        return np.asarray(ends + np.where(hidden, 0, np.maximum(behind, 0)))


def _depthwise(cfg: Config, p: Workload) -> Iterator[Tiling]:
    """The points for a depthwise convolution in which tiles take the fewest cycles, the best first."""
    beats = max(1, cfg.lanes // cfg.bus_bytes)

    def cycles(d: Tiling) -> float:
        tiles = -(-p.out_blocks // d.n) * -(-p.rows // d.y) * -(-p.columns // d.x) * p.images
        load, out = d.n * p.input_rows(d.y) * p.input_columns(d.x) * beats, d.n * d.y * d.x
        tile = max(load * REFRESHED, out * p.sums, out * beats) + INSTRUCTIONS_PER_TILE
        fullness = p.out_blocks * p.rows * p.columns * p.images / (tiles * out)
        return tiles * fullness * tile + load + out * beats

    sizes = [(n, y, x) for x in parts(p.columns) for y in range(1, p.rows + 1) for n in parts(p.out_blocks)]
    points = (point(cfg, p, *size, 1, "rows") for size in sizes)
    yield from sorted((d for d in points if too_large(cfg, p, d) is None), key=cycles)


def _rows(cfg: Config, p: Workload) -> Iterator[Tiling]:
    """The points for a softmax, first those with the fewest tiles of rows in its engine, as one instruction's run close
    behind those of the one before it."""

    def tiles(d: Tiling) -> tuple[int, int]:
        count, rest = divmod(p.columns, d.x)
        passes = [d.y * x for x in [d.x] * count + [rest] * (rest > 0)]
        return sum(-(-rows // tile_rows(cfg)) for rows in passes) * -(-p.rows // d.y), len(passes)

    yield from sorted(candidates(cfg, p), key=tiles)


def attention_cycles(cfg: Config, p: Workload, d: Tiling) -> float:
    """Cycles of attention: those of all tiles in the vector unit, where results run beside a softmax, or in gemm, if
    that takes longer; what comes before the first tile's softmax, and behind the last one. Scores of the next tile run
    behind the rows of a tile's only softmax, but not before gemm has made them: where that is late, the next softmax
    begins late and ends late, so that those of the tile after it are early."""
    assert p.attends is not None
    keys, channels = p.attends

    def tile(heads: int, queries: int) -> float:
        if not heads or not queries:
            return 0
        softmax = _softmaxes(cfg, heads, queries, keys)
        scores, gemm = heads * queries * keys, heads * queries * keys * (channels + p.out_blocks)
        if heads == 1 and queries <= query_part(cfg):
            return max(softmax + keys, (softmax + gemm + scores) / 2, gemm) + 2 * VECTOR_STAGES
        return max(softmax + scores + 2 * VECTOR_STAGES, gemm)

    (many, few), (most, rest) = divmod(p.rows, d.y), divmod(p.columns, d.x)
    tiles = many * (most * tile(d.y, d.x) + tile(d.y, rest)) + most * tile(few, d.x) + tile(few, rest)
    part, entry = min(d.x, query_part(cfg)), max(1, cfg.lanes // cfg.bus_bytes)
    head = max(d.x * channels * entry + keys * channels * p.weight_beats(cfg), d.x * keys * channels)
    start = LOAD_LATENCY + d.y * head + part * keys * channels
    return tiles + start + part * p.out_blocks * (keys + 1 + entry) + STORE_LATENCY


def _softmaxes(cfg: Config, heads: int, queries: int, groups: int) -> float:
    """Cycles of the softmaxes of a tile of attention. One goes along with the one before it, but begins only when the
    one before that has ended, whose largest elements and last quotients take two of its tiles more."""
    many, rest = divmod(queries, query_part(cfg))
    rows = [*[query_part(cfg)] * many, *[rest] * (rest > 0)] * heads
    beat = tile_rows(cfg) * softmax_beats(cfg, groups) * softmax_parts(cfg)
    tiles = [-(-count // tile_rows(cfg)) for count in rows[:-1]]
    more = softmax_tail_cycles(cfg, tile_rows(cfg), groups) - beat  # quotients, and what follows them
    along = sum(max(count * beat, ((count + 1) * beat + more) / 2) for count in tiles)
    return float(along + softmax_cycles(cfg, rows[-1], groups))


def _in_rounds(work: Cycles, beats: Cycles, kept: Cycles, rounds: NDArray[np.int64]) -> Cycles:
    """Cycles of `rounds` of an outer loop, the first of which loads what stays on chip, `kept` of all beats, and may
    wait for it while the others do not; the layer before hides part of that."""
    later = (beats - kept) * (1 - 1 / rounds)
    first = np.maximum(work / rounds, beats - later)
    busy = np.maximum(work, beats)
    return np.asarray(busy + ENDS * np.maximum(0, first + np.maximum(work - work / rounds, later) - busy))


ROWS_FIRST_COST = 1.02
"""How many times the cycles a tiling may take that completes the output row by row, where a layer waits for rows."""


PARTS_BY_ROWS = 4
"""Into how many parts of rows a layer without gemm is cut at least, where it waits for rows."""


@cache
def ranked(
    cfg: Config, p: Workload, first: CompletionOrder = CompletionOrder.ANY, cold: bool = False, count: int = 1
) -> tuple[Tiling, ...]:
    """The `count` points with the fewest estimated cycles, the best first. TilingError where there is none.

    first: prefer one that completes the output row by row, or column by column. cold: nothing hides the first loads,
    those of weights among them.
    """
    if max(p.window.kernel) > EXTENT_MAX or max(p.window.pads) > PAD_MAX:
        raise TilingError(f"kernel {p.window.kernel} with pads {p.window.pads} is beyond an instruction's fields")
    if not p.in_blocks:
        tilings = _depthwise(cfg, p) if p.sums else candidates(cfg, p) if p.norm or not p.whole else _rows(cfg, p)
        if p.attends is not None:
            tilings = iter(sorted(candidates(cfg, p), key=lambda d: attention_cycles(cfg, p, d)))
        if first is CompletionOrder.ROWS and not p.sums:  # a part of the image does not wait for the rest
            tilings = iter(sorted(tilings, key=lambda d: PARTS_BY_ROWS * d.y > max(p.rows, PARTS_BY_ROWS)))
        best = next(tilings, None)
        if best is None:
            raise TilingError("one output pixel's operands do not fit vin, acc or out")
        return (best,)
    points = list(products(cfg, p))
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
        cut = [x < p.columns if by_columns else y < p.rows for _, y, x, _, _ in points]
        by_rows = np.array(cut) & np.array([order == "input" for *_, order in points])
        good = order[by_rows[order] & (costs[order] <= ROWS_FIRST_COST * costs[order[0]])]
        order = np.concatenate([good, order[~np.isin(order, good)]])
    return tuple(point(cfg, p, *points[i]) for i in order[:count])


def choose(cfg: Config, p: Workload, first: CompletionOrder = CompletionOrder.ANY, cold: bool = False) -> Tiling:
    """The best point by the estimate; see `ranked`."""
    return ranked(cfg, p, first, cold)[0]
