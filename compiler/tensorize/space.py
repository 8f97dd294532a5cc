"""The space of schedules of a layer: named decisions, their limits, and an estimate that chooses among them.

The estimate is the roofline of one layer: the busiest of gemm, load and store, plus what cannot overlap: the load of
the first tile and the drain of the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from dataclasses import fields as dataclass_fields
from functools import cache
from typing import Any

from celosia.compiler.layer import Untileable, Window
from celosia.compiler.vthread.pipeline import AHEAD
from celosia.hw.config import Config
from celosia.hw.isa import EXTENT_BITS, PAD_BITS, instruction_bytes

GEMM_CYCLES = 4
"""Cycles that a gemm instruction costs beside its steps."""
INSTRUCTIONS_PER_TILE = 6
LATENCY = 120
"""Cycles from the request of a load to the first step that uses it, through the tokens, and likewise for a store."""
BURST_BEATS = 16
SHORT_BURST_CYCLES = 8
"""Cycles that a burst takes at least: eight of them are under way during the latency of about fifty."""
EXTENT_MAX = (1 << EXTENT_BITS) - 1
PAD_MAX = (1 << PAD_BITS) - 1
LOAD_PART_BEATS = 1024
"""A tile of activations is loaded in parts of about so many beats: a part can start once its own producers end."""


@dataclass(frozen=True)
class Problem:
    """What the choice depends on: output blocks x images x rows x columns, each of `in_blocks` input blocks and a
    window.

    in_blocks: 0 where gemm has nothing to do. residual: an operand B of the size of the output comes through vin.
    step: input blocks from those of one output block to those of the next. near: the scratchpad of the input.
    """

    window: Window
    images: int
    rows: int
    columns: int
    out_blocks: int
    in_blocks: int
    residual: bool
    step: int = 0
    near: str = "inp"

    @property
    def taps(self) -> int:
        return self.window.kernel[0] * self.window.kernel[1]

    @property
    def grouped(self) -> bool:
        return self.step > 0

    def held(self, blocks: int) -> int:
        """Input blocks that `blocks` output blocks read."""
        return self.in_blocks + self.step * (blocks - 1)

    def input_rows(self, rows: int) -> int:
        """Input rows in the scratchpad for `rows` output rows; a kernel of one row skips the rows between strides."""
        if self.window.kernel[0] == 1:
            return rows
        return (rows - 1) * self.window.strides[0] + self.window.reach(0)

    def input_columns(self, columns: int) -> int:
        return (columns - 1) * self.window.strides[1] + self.window.reach(1)


ORDERS = ("weights", "input", "split", "rows")


@dataclass(frozen=True)
class Decisions:
    """One point of the space. A tile is n output blocks, y rows, x columns and k input blocks.

    order: which loops are outside. "weights": output blocks, then images, rows, columns; whole reductions. "input":
    images, rows, columns, then output blocks; whole reductions. "rows": images, rows, output blocks, columns; layers
    without gemm. "split": as "input", but the accumulators of all output blocks of a place stay, and the reduction is
    cut in pieces of k. ahead: how many tiles may load before the oldest of them has computed. part: blocks of
    activations that one LOAD brings.
    """

    n: int
    y: int
    x: int
    k: int
    order: str
    ahead: int = AHEAD
    part: int = 1 << 12

    def to_json(self) -> dict[str, int | str]:
        return asdict(self)

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Decisions:
        """ValueError for what are no decisions."""
        known = {f.name: f.type for f in dataclass_fields(Decisions)}
        if unknown := sorted(set(fields) - set(known)):
            raise ValueError(f"there is no decision {unknown[0]!r}; there are {', '.join(known)}")
        for name in known:
            if name not in fields:
                raise ValueError(f"the decision {name!r} is missing")
            value = fields[name]
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            if (name == "order" and value not in ORDERS) or (name != "order" and not whole):
                raise ValueError(f"the decision {name} cannot be {value!r}")
        return Decisions(**fields)


def _parts(size: int) -> list[int]:
    """Sizes of a part when `size` is cut into 1, 2, 3, ... nearly equal parts."""
    sizes = dict.fromkeys(-(-size // count) for count in range(1, size + 1))
    if len(sizes) > 12:
        kept = list(sizes)
        return kept[:6] + kept[6 : -4 : max(1, (len(kept) - 10) // 4)] + kept[-4:]
    return list(sizes)


def candidates(cfg: Config, p: Problem) -> Iterator[Decisions]:
    """The points of the space: what fits the scratchpads."""
    found = _simple(cfg, p) if not p.in_blocks else _products(cfg, p)
    for d in found:
        yield replace(d, part=load_part(cfg, p, d))


def why_not(cfg: Config, p: Problem, d: Decisions) -> str | None:
    """Why `d` is not a point of the space, or None."""
    for name, size in (("n", p.out_blocks), ("y", p.rows), ("x", p.columns), ("k", max(p.in_blocks, 1))):
        if not 1 <= getattr(d, name) <= size:
            return f"{name} must be between 1 and {size}, not {getattr(d, name)}"
    if d.ahead < 1 or d.part < 1:
        return "ahead and part must be at least 1"
    allowed = ("weights", "input", "split") if p.in_blocks else ("rows",)
    if d.order not in allowed:
        return f"order must be one of {', '.join(allowed)}, not {d.order}"
    if d.order != "split" and p.in_blocks and d.k != p.in_blocks:
        return f"k must be {p.in_blocks} where the order is not split"
    if d.order == "split" and p.grouped:
        return "the reduction of a grouped convolution is not split"
    return _too_large(cfg, p, d)


def _too_large(cfg: Config, p: Problem, d: Decisions) -> str | None:
    """Which scratchpad cannot hold the tile `d`, or None."""
    pixels, span = d.y * d.x, p.input_rows(d.y) * p.input_columns(d.x)
    entries = d.n * pixels
    needs = [("out", entries, cfg.out_depth // 2), ("par", d.n, cfg.par_depth // 2)]
    if p.residual:
        needs.append(("vin", entries, cfg.vin_depth // 2))
    if not p.in_blocks:
        needs.append(("acc" if p.near == "acc" else "vin", d.n * span, near_depth(cfg, p.near) // 2))
    elif d.order == "split":
        needs.append(("acc", entries, cfg.acc_depth // 2))
        needs.append(("acc", p.out_blocks * pixels, cfg.acc_depth))
        needs.append(("inp", d.k * span, cfg.inp_depth // 2))
        needs.append(("wgt", d.n * d.k * p.taps, cfg.wgt_depth // 2))
    else:
        needs.append(("acc", entries, cfg.acc_depth // 2))
        needs.append(("inp", p.held(d.n) * span, cfg.inp_depth))
        needs.append(("wgt", d.n * p.in_blocks * p.taps, cfg.wgt_depth))
    for scope, entries, depth in needs:
        if entries > depth:
            return f"a tile takes {entries} entries of {scope}, where {depth} are to be had"
    if max(d.y, d.x, d.n) > EXTENT_MAX:
        return f"a tile is larger than {EXTENT_MAX} in one direction"
    return None


def near_depth(cfg: Config, scope: str) -> int:
    return {"inp": cfg.inp_depth, "vin": cfg.vin_depth, "acc": cfg.acc_depth}[scope]


def load_part(cfg: Config, p: Problem, d: Decisions) -> int:
    """Blocks that one LOAD brings of a tile."""
    beats = p.input_rows(d.y) * p.input_columns(d.x) * cfg.piece_bytes // cfg.bus_bytes
    return max(1, LOAD_PART_BEATS // max(1, beats))


def _simple(cfg: Config, p: Problem) -> Iterator[Decisions]:
    """Without gemm: as large as fits, whole rows first, then blocks; then all others."""

    def tile(n: int, y: int, x: int) -> Decisions:
        return Decisions(n, y, x, 1, "rows")

    def fits(n: int, y: int, x: int) -> bool:
        return _too_large(cfg, p, tile(n, y, x)) is None

    n, y, x = 1, p.rows, p.columns
    while y > 1 and not fits(1, y, x):
        y = -(-y // 2)
    while x > 1 and not fits(1, y, x):
        x = -(-x // 2)
    if not fits(1, y, x):
        return
    while n < p.out_blocks and fits(n + 1, y, x):
        n += 1
    yield tile(n, y, x)
    others = ((n, y, x) for x in _parts(p.columns) for y in _parts(p.rows) for n in _parts(p.out_blocks))
    yield from (tile(*sizes) for sizes in others if sizes != (n, y, x) and fits(*sizes))


def _products(cfg: Config, p: Problem) -> Iterator[Decisions]:
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
                in_blocks = p.held(n)
                if in_blocks * span <= cfg.inp_depth and n * p.in_blocks * p.taps <= cfg.wgt_depth:
                    yield Decisions(n, y, x, p.in_blocks, "weights")
                    if not p.grouped:
                        yield Decisions(n, y, x, p.in_blocks, "input")
                if p.grouped or p.out_blocks * pixels > cfg.acc_depth:
                    continue
                for k in _parts(p.in_blocks)[1:]:
                    if k * span <= cfg.inp_depth // 2 and n * k * p.taps <= cfg.wgt_depth // 2:
                        yield Decisions(n, y, x, k, "split")


def _row_cost(beats: int) -> float:
    """Cycles for each beat of a row of its own in DRAM: its last burst of up to 16 beats may be short."""
    rest = beats % BURST_BEATS
    if not beats:
        return 1.0
    return (beats - rest + (max(rest, SHORT_BURST_CYCLES) if rest else 0)) / beats


def estimate(cfg: Config, p: Problem, t: Decisions) -> float:
    """Cycles of the whole layer under tiling `t`."""
    n_tiles, y_tiles, x_tiles = -(-p.out_blocks // t.n), -(-p.rows // t.y), -(-p.columns // t.x)
    spatial = y_tiles * x_tiles * p.images
    k_tiles = -(-p.in_blocks // t.k)
    gemm = p.out_blocks * p.in_blocks * p.taps * p.rows * p.columns * p.images

    span = p.input_rows(t.y) * p.input_columns(t.x)
    in_blocks = p.held(t.n) if p.grouped else t.k
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


@cache
def choose(cfg: Config, p: Problem, rows_first: bool = False) -> Decisions:
    """The tiling with the fewest estimated cycles. Untileable where none fits.

    rows_first: prefer one that completes the output row by row.
    """
    if max(p.window.kernel) > EXTENT_MAX or max(p.window.pads) > PAD_MAX:
        raise Untileable(f"kernel {p.window.kernel} with pads {p.window.pads} is beyond an instruction's fields")
    if not p.in_blocks:
        for tiling in candidates(cfg, p):
            return tiling
        raise Untileable("one output pixel's operands do not fit vin, acc or out")
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
