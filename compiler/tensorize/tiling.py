"""Choice of tile sizes by an estimate of cycles.

The estimate is the roofline of one layer: the busiest of gemm, load and store, plus what cannot overlap: the load of
the first tile and the drain of the last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from celosia.compiler.tensorize.layer import Untileable, Window
from celosia.hw.config import Config
from celosia.hw.isa import instruction_bytes

GEMM_CYCLES = 4
"""Cycles that a gemm instruction costs beside its steps."""
INSTRUCTIONS_PER_TILE = 6
LATENCY = 120
"""Cycles from the request of a load to the first step that uses it, through the tokens, and likewise for a store."""
BURST_BEATS = 16
SHORT_BURST_CYCLES = 8
"""Cycles that a burst takes at least: eight of them are under way during the latency of about fifty."""
EXTENT_MAX = (1 << 12) - 1
PAD_MAX = 255


@dataclass(frozen=True)
class Problem:
    """A convolution in blocks: `out_blocks` of `in_blocks` each (the widest range of one output block)."""

    window: Window
    images: int
    rows: int
    columns: int
    out_blocks: int
    in_blocks: int
    residual: bool
    grouped: bool

    @property
    def taps(self) -> int:
        return self.window.kernel[0] * self.window.kernel[1]

    def input_rows(self, rows: int) -> int:
        """Input rows in the scratchpad for `rows` output rows; a kernel of one row skips the rows between strides."""
        if self.window.kernel[0] == 1:
            return rows
        return (rows - 1) * self.window.strides[0] + self.window.reach(0)

    def input_columns(self, columns: int) -> int:
        return (columns - 1) * self.window.strides[1] + self.window.reach(1)


@dataclass(frozen=True)
class Tiling:
    """Sizes of a tile: output blocks, rows, columns, input blocks; and which loop is outermost.

    order "weights": output blocks outside, rows and columns inside, whole reductions.
    order "input": rows and columns outside, output blocks inside, whole reductions.
    order "split": the accumulators of all output blocks of a tile stay, the reduction is cut in pieces of k.
    """

    n: int
    y: int
    x: int
    k: int
    order: str


def _parts(size: int) -> list[int]:
    """Sizes of a part when `size` is cut into 1, 2, 3, ... nearly equal parts."""
    sizes = dict.fromkeys(-(-size // count) for count in range(1, size + 1))
    if len(sizes) > 12:
        kept = list(sizes)
        return kept[:6] + kept[6 : -4 : max(1, (len(kept) - 10) // 4)] + kept[-4:]
    return list(sizes)


def candidates(cfg: Config, p: Problem) -> Iterator[Tiling]:
    """Tilings that fit the scratchpads."""
    columns = [x for x in _parts(p.columns) if p.input_columns(x) <= cfg.inp_depth and x <= EXTENT_MAX]
    for x in columns[:5] + columns[5:][-1:]:  # the widest, and the narrowest for where no other fits
        for y in _parts(p.rows):
            pixels = y * x
            if pixels > cfg.out_depth // 2 or y > EXTENT_MAX:
                continue
            span = p.input_rows(y) * p.input_columns(x)
            for n in _parts(p.out_blocks):
                if n * pixels > cfg.out_depth // 2 or n > cfg.par_depth // 2 or n * pixels > cfg.acc_depth // 2:
                    continue
                if p.residual and n * pixels > cfg.vin_depth // 2:
                    continue
                in_blocks = p.in_blocks * (n if p.grouped else 1)
                if in_blocks * span <= cfg.inp_depth and n * p.in_blocks * p.taps <= cfg.wgt_depth:
                    yield Tiling(n, y, x, p.in_blocks, "weights")
                    if not p.grouped:
                        yield Tiling(n, y, x, p.in_blocks, "input")
                if p.grouped or p.out_blocks * pixels > cfg.acc_depth:
                    continue
                for k in _parts(p.in_blocks)[1:]:
                    if k * span <= cfg.inp_depth // 2 and n * k * p.taps <= cfg.wgt_depth // 2:
                        yield Tiling(n, y, x, k, "split")


def _row_cost(beats: int) -> float:
    """Cycles for each beat of a row of its own in DRAM: its last burst of up to 16 beats may be short."""
    rest = beats % BURST_BEATS
    if not beats:
        return 1.0
    return (beats - rest + (max(rest, SHORT_BURST_CYCLES) if rest else 0)) / beats


def estimate(cfg: Config, p: Problem, t: Tiling) -> float:
    """Cycles of the whole layer under tiling `t`."""
    n_tiles, y_tiles, x_tiles = -(-p.out_blocks // t.n), -(-p.rows // t.y), -(-p.columns // t.x)
    spatial = y_tiles * x_tiles * p.images
    k_tiles = -(-p.in_blocks // t.k)
    gemm = p.out_blocks * p.in_blocks * p.taps * p.rows * p.columns * p.images

    span = p.input_rows(t.y) * p.input_columns(t.x)
    in_blocks = t.k * (t.n if p.grouped else 1)
    tile_inp = in_blocks * span
    all_inp = p.in_blocks * span * spatial * (p.out_blocks if p.grouped else 1)
    tile_wgt, all_wgt = t.n * t.k * p.taps, p.out_blocks * p.in_blocks * p.taps
    if t.order == "weights":
        inp_loads = all_inp * (1 if p.grouped or all_inp <= cfg.inp_depth else n_tiles)
        wgt_loads = all_wgt
    else:
        inp_loads = all_inp
        wgt_loads = all_wgt * (1 if all_wgt <= cfg.wgt_depth else spatial)
    if t.order == "split":
        wgt_loads = all_wgt * spatial
    out = p.out_blocks * p.rows * p.columns * p.images
    entry_beats = max(1, cfg.lanes // cfg.bus_bytes)
    inp_beats = max(cfg.inp_pieces, cfg.inp_bytes // cfg.bus_bytes)
    wgt_beats = max(1, cfg.wgt_bytes // cfg.bus_bytes)
    whole = t.x == p.columns  # whole rows follow each other in DRAM, parts of rows are bursts of their own
    inp_cost = 1.0 if whole else _row_cost(p.input_columns(t.x) * inp_beats)
    out_cost = 1.0 if whole else _row_cost(t.x * entry_beats)
    store = out * entry_beats * out_cost
    load = inp_loads * inp_beats * inp_cost + wgt_loads * wgt_beats + (store if p.residual else 0)
    tiles = n_tiles * spatial * k_tiles
    fetched = tiles * INSTRUCTIONS_PER_TILE * max(1, instruction_bytes(cfg) // cfg.bus_bytes)
    beats = load * 1.03 + fetched  # refresh and row ends; instructions come through the same port
    # Tiles that take more than half a ring cannot be loaded while the tile before is still used.
    exposed = 0.0
    if tile_inp > cfg.inp_depth // 2 and spatial > 1:
        exposed += (inp_loads / max(tile_inp, 1) - 1) * tile_inp * inp_beats
    if tile_wgt > cfg.wgt_depth // 2 and (all_wgt > cfg.wgt_depth or t.order == "split"):
        exposed += (wgt_loads / max(tile_wgt, 1) - 1) * tile_wgt * wgt_beats
    chunk = t.n * t.y * t.x
    first = tile_inp * inp_beats + LATENCY
    drain = chunk * (1 + entry_beats) + LATENCY
    busy = max(gemm + tiles * GEMM_CYCLES, beats, store)
    return busy + exposed + first + drain


ROWS_FIRST_COST = 1.02
"""How many times the cycles a tiling may take that completes the output row by row, where a layer waits for rows."""


def choose(cfg: Config, p: Problem, rows_first: bool = False) -> Tiling:
    """The tiling with the fewest estimated cycles. Untileable where none fits.

    rows_first: prefer one that completes the output row by row.
    """
    if max(p.window.kernel) > EXTENT_MAX or max(p.window.pads) > PAD_MAX:
        raise Untileable(f"kernel {p.window.kernel} with pads {p.window.pads} is beyond an instruction's fields")
    costs = {tiling: estimate(cfg, p, tiling) for tiling in candidates(cfg, p)}
    best = min(costs, key=costs.__getitem__, default=None)
    if best is not None and rows_first:
        by_rows = [tiling for tiling in costs if tiling.order == "input" and tiling.y < p.rows]
        good = min(by_rows, key=costs.__getitem__, default=best)
        best = good if costs[good] <= ROWS_FIRST_COST * costs[best] else best
    if best is None:
        raise Untileable(
            f"no tile of {p.in_blocks} input blocks with a {p.window.kernel[0]}x{p.window.kernel[1]} kernel fits "
            f"inp_depth {cfg.inp_depth}, wgt_depth {cfg.wgt_depth}, acc_depth {cfg.acc_depth} and "
            f"out_depth {cfg.out_depth}"
        )
    return best
