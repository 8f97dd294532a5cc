"""The space of schedules of a layer: named decisions, their limits, and an estimate that chooses among them.

The estimate is the roofline of one layer: the busiest of gemm, load and store, plus what cannot overlap: loads that
find no room before gemm has used what lies there, and part of the load of the first tile and the drain of the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from dataclasses import fields as dataclass_fields
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.layer import Untileable, Window
from celosia.compiler.tensorize.transfer import PAD_MAX
from celosia.compiler.vthread.pipeline import AHEAD
from celosia.hw.config import Config
from celosia.hw.isa import EXTENT_BITS, instruction_bytes
from celosia.hw.pipeline import MAX_BURST, OUTSTANDING, VECTOR_STAGES
from celosia.hw.scratchpads import depths, scratchpads
from celosia.sim.memory import ZYNQ_HP
from celosia.sim.timing import latency

MEMORY = ZYNQ_HP
"""The memory that the estimate assumes."""
LOAD_LATENCY = (
    latency.START_TO_ASK + latency.ASK_TO_ADDRESS + MEMORY.read_latency + latency.BEAT_TO_STEP + latency.STEP_TO_END
)  # fmt: skip
"""Cycles from the start of a LOAD to its end, beside its beats."""
STORE_LATENCY = (
    latency.GEMM_STAGES + VECTOR_STAGES + latency.WRITE_TO_END + latency.START_TO_STEP + latency.UNIT_TO_BEAT
    + MEMORY.write_latency + latency.RESPONSE_TO_END
)  # fmt: skip
"""Cycles from gemm's last step to the end of the STORE of its result, beside its beats."""
REFRESHED = MEMORY.refresh_period / (MEMORY.refresh_period - MEMORY.refresh_cycles)
"""Cycles for each beat of a long transfer."""
SHORT_BURST = (latency.ASK_TO_ADDRESS + MEMORY.read_latency + MAX_BURST + latency.END_TO_ASK) // OUTSTANDING
"""Cycles that a burst takes at least, as so many are under way during the latency of one."""
GEMM_CYCLES = 4
"""Cycles that a gemm instruction costs beside its steps: tokens that it waits for, though data is there."""
INSTRUCTIONS_PER_TILE = 6
ENDS = 0.5
"""How much of a layer's first load and last drain counts where gemm is the busiest: the layers around it overlap."""
EXTENT_MAX = (1 << EXTENT_BITS) - 1
LOAD_PART_BEATS = 1024
"""A tile of activations is loaded in parts of about so many beats: a part can start once its own producers end."""


@dataclass(frozen=True)
class Problem:
    """What the choice depends on: output blocks x images x rows x columns, each of `in_blocks` input blocks and a
    window.

    in_blocks: 0 where gemm has nothing to do. residual: an operand B of the size of the output comes through vin.
    step: input blocks from those of `share` output blocks to those of the next. near: the scratchpad of the input.
    beyond: columns of it that are read beyond the windows. sums: steps in which the vector unit sums for an entry
    of the output, where it does. weighted: whether it multiplies there.
    """

    window: Window
    images: int
    rows: int
    columns: int
    out_blocks: int
    in_blocks: int
    residual: bool
    step: int = 0
    share: int = 1
    near: str = "inp"
    beyond: int = 0
    sums: int = 0
    weighted: bool = False

    @property
    def text(self) -> str:
        """All of it in a line, by which decisions are known to be for this problem."""
        w = self.window
        shape = f"{self.images}x{self.rows}x{self.columns} of {self.out_blocks} blocks"
        window = "window " + " ".join(
            f"{name} {'x'.join(map(str, sizes))}"
            for name, sizes in (("of", w.kernel), ("strides", w.strides), ("dilations", w.dilations), ("pads", w.pads))
        )
        terms = f"from {self.in_blocks} blocks" + (f" {self.step} further each {self.share}" if self.step else "")
        return f"{shape} {terms} in {self.near}, {window}{', two operands' if self.residual else ''}"

    @property
    def taps(self) -> int:
        return self.window.kernel[0] * self.window.kernel[1]

    @property
    def steps(self) -> int:
        """Cycles that gemm computes."""
        return self.out_blocks * self.in_blocks * self.taps * self.rows * self.columns * self.images

    @property
    def grouped(self) -> bool:
        return self.step > 0

    def held(self, blocks: int) -> int:
        """Input blocks that `blocks` output blocks read, whole shares of them."""
        return self.in_blocks + self.step * ((blocks - 1) // self.share)

    def input_rows(self, rows: int) -> int:
        """Input rows in the scratchpad for `rows` output rows; a kernel of one row skips the rows between strides."""
        w = self.window
        return rows if w.kernel[0] == 1 else (rows - 1) * w.strides[0] + w.reach(0)

    def input_columns(self, columns: int) -> int:
        return (columns - 1) * self.window.strides[1] + self.window.reach(1) + self.beyond


ORDERS = ("weights", "input", "split", "pieces", "rows", "block")
CUT = ("split", "pieces", "block")
"""Orders in which the reduction is cut in pieces of k."""


@dataclass(frozen=True)
class Decisions:
    """One point of the space. A tile is n output blocks, y rows, x columns and k input blocks.

    order: which loops are outside. "weights": output blocks, then images, rows, columns; whole reductions. "input":
    images, rows, columns, then output blocks; whole reductions. "rows": images, rows, output blocks, columns; layers
    without gemm. "split": as "input", but the accumulators of all output blocks of a place stay, and the reduction is
    cut in pieces of k. "pieces": as "weights", but the reduction of a tile is cut in pieces of k. "block": of a block
    of layers: images, rows, columns; the last sum in pieces of k, then n output blocks at a time. ahead: how many
    tiles may load before the oldest of them has computed. part: blocks of activations that one LOAD brings.
    """

    n: int
    y: int
    x: int
    k: int
    order: str
    ahead: int = AHEAD
    part: int = 1 << 12
    earlier: tuple[Decisions, ...] = ()
    """Of a block of several groups: those of the groups before the last."""

    @property
    def groups(self) -> tuple[Decisions, ...]:
        return *self.earlier, replace(self, earlier=())

    @staticmethod
    def of_groups(groups: Sequence[Decisions]) -> Decisions:
        return replace(groups[-1], earlier=tuple(groups[:-1]))

    def to_json(self) -> dict[str, int | str]:
        """Without those of other groups."""
        fields = asdict(self)
        del fields["earlier"]
        return fields

    @staticmethod
    def from_json(fields: Any) -> Decisions:
        """ValueError for what are no decisions."""
        if not isinstance(fields, Mapping):
            raise ValueError(f"decisions are values by name, not {fields!r}")
        known = [f.name for f in dataclass_fields(Decisions) if f.name != "earlier"]
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


def parts(size: int) -> list[int]:
    """Sizes of a part when `size` is cut into 1, 2, 3, ... nearly equal parts."""
    sizes = dict.fromkeys(-(-size // count) for count in range(1, size + 1))
    if len(sizes) > 12:
        kept = list(sizes)
        return kept[:6] + kept[6 : -4 : max(1, (len(kept) - 10) // 4)] + kept[-4:]
    return list(sizes)


def candidates(cfg: Config, p: Problem) -> Iterator[Decisions]:
    """The points of the space: what fits the scratchpads. The first is a good one where gemm has nothing to do."""
    found = _simple(cfg, p) if not p.in_blocks else _products(cfg, p)
    return (point(cfg, p, *sizes) for sizes in found)


def sample(cfg: Config, p: Problem, count: int, rng: np.random.Generator) -> list[Decisions]:
    """`count` points of the space, each drawn from all of them. ValueError where there are none."""
    found = list(_simple(cfg, p) if not p.in_blocks else _products(cfg, p))
    if not found:
        raise ValueError(f"nothing of {p.text} fits the scratchpads")
    return [point(cfg, p, *found[i]) for i in rng.integers(0, len(found), count)]


Sizes = tuple[int, int, int, int, str]
"""n, y, x, k and order of a point."""


def point(cfg: Config, p: Problem, n: int, y: int, x: int, k: int, order: str) -> Decisions:
    """The point of these sizes, which loads activations in parts of about LOAD_PART_BEATS."""
    beats = p.input_rows(y) * p.input_columns(x) * cfg.piece_bytes // cfg.bus_bytes
    return Decisions(n, y, x, k, order, part=max(1, LOAD_PART_BEATS // max(1, beats)))


def why_not(cfg: Config, p: Problem, d: Decisions) -> str | None:
    """Why `d` is not a point of the space, or None."""
    for name, size in (("n", p.out_blocks), ("y", p.rows), ("x", p.columns), ("k", max(p.in_blocks, 1))):
        if not 1 <= getattr(d, name) <= size:
            return f"{name} must be between 1 and {size}, not {getattr(d, name)}"
    if d.n % p.share and d.n != p.out_blocks:
        return f"n must be a multiple of {p.share}, not {d.n}"
    if d.ahead < 1 or d.part < 1:
        return "ahead and part must be at least 1"
    allowed = ("weights", "input", "split", "pieces") if p.in_blocks else ("rows",)
    if d.order not in allowed:
        return f"order must be one of {', '.join(allowed)}, not {d.order}"
    if d.order not in CUT and p.in_blocks and d.k != p.in_blocks:
        return f"k must be {p.in_blocks} where the order is {d.order}"
    if d.order in CUT and p.grouped:
        return "the reduction of a grouped convolution is not split"
    return _too_large(cfg, p, d)


def _too_large(cfg: Config, p: Problem, d: Decisions) -> str | None:
    """Which scratchpad cannot hold the tile `d`, or None."""
    pixels, span = d.y * d.x, p.input_rows(d.y) * p.input_columns(d.x)
    entries = d.n * pixels
    room = depths(cfg)
    needs = [("out", entries, room["out"] // 2), ("par", d.n, room["par"] // 2)]
    if p.residual:
        needs.append(("vin", entries, room["vin"] // 2))
    if not p.in_blocks:
        needs.append(("acc" if p.near == "acc" else "vin", d.n * span, room[p.near] // 2))
    elif d.order in CUT:
        needs.append(("acc", entries, room["acc"] // 2))
        if d.order == "split":
            needs.append(("acc", p.out_blocks * pixels, room["acc"]))
        needs.append(("inp", d.k * span, room["inp"] // 2))
        needs.append(("wgt", d.n * d.k * p.taps, room["wgt"] // 2))
    else:
        needs.append(("acc", entries, room["acc"] // 2))
        needs.append(("inp", p.held(d.n) * span, room["inp"]))
        needs.append(("wgt", d.n * p.in_blocks * p.taps, room["wgt"]))
    for scope, entries, depth in needs:
        if entries > depth:
            return f"a tile takes {entries} entries of {scope}, where {depth} are to be had"
    if max(d.y, d.x, d.n) > EXTENT_MAX:
        return f"a tile is larger than {EXTENT_MAX} in one direction"
    return None


def _simple(cfg: Config, p: Problem) -> Iterator[Sizes]:
    """Without gemm: as large as fits, whole rows first, then blocks; then all others."""

    def fits(n: int, y: int, x: int) -> bool:
        return _too_large(cfg, p, Decisions(n, y, x, 1, "rows")) is None

    n, y, x = 1, p.rows, p.columns
    while y > 1 and not fits(1, y, x):
        y = -(-y // 2)
    while x > 1 and not fits(1, y, x):
        x = -(-x // 2)
    if not fits(1, y, x):
        return
    while n < p.out_blocks and fits(n + 1, y, x):
        n += 1
    yield n, y, x, 1, "rows"
    others = ((n, y, x) for x in parts(p.columns) for y in parts(p.rows) for n in parts(p.out_blocks))
    yield from ((*sizes, 1, "rows") for sizes in others if sizes != (n, y, x) and fits(*sizes))


def _depthwise(cfg: Config, p: Problem) -> Iterator[Decisions]:
    """The points for a depthwise convolution in which tiles take the fewest cycles, the best first."""
    beats = max(1, cfg.lanes // cfg.bus_bytes)

    def cycles(d: Decisions) -> float:
        tiles = -(-p.out_blocks // d.n) * -(-p.rows // d.y) * -(-p.columns // d.x) * p.images
        load, out = d.n * p.input_rows(d.y) * p.input_columns(d.x) * beats, d.n * d.y * d.x
        tile = max(load * REFRESHED, out * p.sums, out * beats) + INSTRUCTIONS_PER_TILE
        whole = p.out_blocks * p.rows * p.columns * p.images / (tiles * out)
        return tiles * whole * tile + load + out * beats

    sizes = [(n, y, x) for x in parts(p.columns) for y in range(1, p.rows + 1) for n in parts(p.out_blocks)]
    points = (point(cfg, p, *size, 1, "rows") for size in sizes)
    yield from sorted((d for d in points if _too_large(cfg, p, d) is None), key=cycles)


def _products(cfg: Config, p: Problem) -> Iterator[Sizes]:
    room = depths(cfg)
    columns = [x for x in parts(p.columns) if p.input_columns(x) <= room["inp"] and x <= EXTENT_MAX]
    blocks = list(dict.fromkeys(min(-(-n // p.share) * p.share, p.out_blocks) for n in parts(p.out_blocks)))
    pieces = parts(p.in_blocks)[1:]
    limit = min(room["out"], room["acc"], *([room["vin"]] if p.residual else [])) // 2
    for x in columns[:5] + columns[5:][-1:]:  # the widest, and the narrowest for where no other fits
        for y in parts(p.rows):
            pixels = y * x
            if pixels > limit or y > EXTENT_MAX:
                continue
            span = p.input_rows(y) * p.input_columns(x)
            for n in blocks:
                if n * pixels > limit or n > room["par"] // 2:
                    continue
                if p.held(n) * span <= room["inp"] and n * p.in_blocks * p.taps <= room["wgt"]:
                    yield n, y, x, p.in_blocks, "weights"
                    if not p.grouped:
                        yield n, y, x, p.in_blocks, "input"
                if p.grouped:
                    continue
                fitting = [k for k in pieces if k * span <= room["inp"] // 2 and n * k * p.taps <= room["wgt"] // 2]
                if p.out_blocks * pixels <= room["acc"]:
                    yield from ((n, y, x, k, "split") for k in fitting)
                if fitting and n * p.in_blocks * p.taps > room["wgt"] // 2:
                    yield n, y, x, fitting[0], "pieces"


Cycles = NDArray[np.float64]


def _row_cost(beats: NDArray[np.int64]) -> Cycles:
    """Cycles for each beat of a row of its own in DRAM: its last burst of up to 16 beats may be short."""
    rest = beats % MAX_BURST
    last = np.where(rest > 0, np.maximum(rest, SHORT_BURST), 0)
    return np.where(beats > 0, (beats - rest + last) / np.maximum(beats, 1), 1.0)


def estimate(cfg: Config, p: Problem, d: Decisions) -> float:
    """Cycles of the whole layer under the decisions `d`."""
    return float(_estimates(cfg, p, [(d.n, d.y, d.x, d.k, d.order)])[0])


def _estimates(cfg: Config, p: Problem, points: list[Sizes]) -> Cycles:
    """The same for many points."""
    return terms(cfg, p, points)["cycles"]


def terms(cfg: Config, p: Problem, points: Sequence[Sizes]) -> dict[str, Cycles]:
    """What the estimate is made of, by name, for each of `points`: `cycles` is the estimate."""
    n, y, x, k, order = (np.array(each) for each in zip(*points))
    weights, cut = (order == "weights") | (order == "pieces"), (order == "split") | (order == "pieces")
    n_tiles, spatial = -(-p.out_blocks // n), -(-p.rows // y) * -(-p.columns // x) * p.images

    columns = (x - 1) * p.window.strides[1] + p.window.reach(1)
    rows = y if p.window.kernel[0] == 1 else (y - 1) * p.window.strides[0] + p.window.reach(0)
    span = rows * columns
    tile_inp = (p.in_blocks + p.step * ((n - 1) // p.share) if p.grouped else k) * span
    all_inp = p.in_blocks * span * spatial * (p.out_blocks if p.grouped else 1)
    tile_wgt, all_wgt = n * k * p.taps, p.out_blocks * p.in_blocks * p.taps
    room = depths(cfg)
    stays = np.bool_(p.grouped) | (all_inp <= room["inp"])
    inp_loads = all_inp * np.where(weights & ~stays, n_tiles, 1)
    wgt_stays = all_wgt <= room["wgt"]
    wgt_loads = all_wgt * np.where((order == "weights") | wgt_stays, 1, spatial)
    out = p.out_blocks * p.rows * p.columns * p.images
    entry_beats = max(1, cfg.lanes // cfg.bus_bytes)
    inp_beats, wgt_beats = (scratchpads(cfg)[name].beats(cfg.bus_bytes) for name in ("inp", "wgt"))
    whole = x == p.columns  # whole rows follow each other in DRAM, parts of rows are bursts of their own
    inp_cost = np.where(whole, 1.0, _row_cost(columns * inp_beats))
    out_cost = np.where(whole, 1.0, _row_cost(x * entry_beats))
    store = out * entry_beats * out_cost
    load = inp_loads * inp_beats * inp_cost + wgt_loads * wgt_beats + (store if p.residual else 0)
    pieces = -(-p.in_blocks // k)
    tiles = n_tiles * spatial * pieces
    # GEMM; VECTOR and STORE; LOADs of weights, of the input, of the residual's other operand.
    instructions = tiles + (2 + p.residual) * n_tiles * spatial
    instructions = instructions + np.where((order == "weights") | wgt_stays, n_tiles * pieces, tiles)
    instructions = instructions + spatial * pieces * np.where(weights & ~stays, n_tiles, 1)
    fetched = instructions * max(1, instruction_bytes(cfg) // cfg.bus_bytes)
    beats = load * REFRESHED + fetched  # instructions come through the same port
    by_blocks = (order != "split") & ((weights & (n_tiles > 1)) | (spatial == 1))
    kept_inp = np.where(stays, all_inp * inp_beats * inp_cost, 0)
    kept_wgt = np.where(wgt_stays & (spatial > 1), all_wgt * wgt_beats, 0)
    kept = np.where(by_blocks, kept_inp, kept_wgt) * REFRESHED
    # What takes more than half a ring cannot be loaded while what was there before, perhaps of another layer, is used.
    late_inp = (tile_inp > room["inp"] // 2) & (spatial > 1)
    late_wgt = np.where(weights | cut | (all_wgt > room["wgt"]), tile_wgt, all_wgt) > room["wgt"] // 2
    exposed = np.where(late_inp, (inp_loads - tile_inp) * inp_beats, 0)
    exposed = exposed + np.where(late_wgt, wgt_loads * wgt_beats, 0)
    first = tile_inp * inp_beats + LOAD_LATENCY
    drain = n * y * x * (1 + entry_beats) + STORE_LATENCY
    # Where the sum of a place is cut in pieces, all of its output is stored during the last of them.
    last = y * x * (p.out_blocks * entry_beats - (p.out_blocks - n) * k * p.taps)
    drain = drain + np.where(order == "split", np.maximum(0, last - n * y * x * entry_beats), 0)
    gemm = p.steps + tiles * GEMM_CYCLES
    busy = _in_rounds(np.maximum(gemm, store), beats, kept, np.where(by_blocks, n_tiles, spatial))
    one_by_one = np.maximum(gemm + beats, store)
    # Where gemm waits for loads, what it computes after the last of them is exposed: a tile, or all that reads it.
    tail = np.where(by_blocks & stays & (order != "pieces"), spatial, np.where(~by_blocks & wgt_stays, n_tiles, 1))
    ends = np.where(
        beats > gemm,
        LOAD_LATENCY + ENDS * (first - LOAD_LATENCY) + drain + tail * n * y * x * k * p.taps,
        ENDS * (first + drain),
    )
    # The next weights are loaded while gemm is at the last blocks, which may be fewer.
    pixels = np.where(cut, y * x, p.rows * p.columns * p.images)
    behind = tile_wgt * wgt_beats - (p.out_blocks - (n_tiles - 1) * n) * pixels * k * p.taps
    ends += np.where(late_wgt | (beats > gemm) | (order == "input"), 0, np.maximum(behind, 0))
    cycles = np.minimum(busy + exposed, one_by_one) + ends
    found = dict(cycles=cycles, gemm=gemm, beats=beats, store=store, exposed=exposed, ends=ends, tiles=tiles)
    return {name: np.broadcast_to(value, cycles.shape).astype(np.float64) for name, value in found.items()}


def _in_rounds(work: Cycles, beats: Cycles, kept: Cycles, rounds: NDArray[np.int64]) -> Cycles:
    """Cycles of `rounds` of an outer loop, the first of which loads what stays on chip, `kept` of all beats, and may
    wait for it while the others do not; the layer before hides part of that."""
    later = (beats - kept) * (1 - 1 / rounds)
    first = np.maximum(work / rounds, beats - later)
    busy = np.maximum(work, beats)
    return np.asarray(busy + ENDS * np.maximum(0, first + np.maximum(work - work / rounds, later) - busy))


ROWS_FIRST_COST = 1.02
"""How many times the cycles a tiling may take that completes the output row by row, where a layer waits for rows."""


@cache
def ranked(cfg: Config, p: Problem, rows_first: bool = False, count: int = 1) -> tuple[Decisions, ...]:
    """The `count` points with the fewest estimated cycles, the best first. Untileable where there is none.

    rows_first: prefer one that completes the output row by row.
    """
    if max(p.window.kernel) > EXTENT_MAX or max(p.window.pads) > PAD_MAX:
        raise Untileable(f"kernel {p.window.kernel} with pads {p.window.pads} is beyond an instruction's fields")
    if not p.in_blocks:
        found = _depthwise(cfg, p) if p.sums else candidates(cfg, p)
        first = next(found, None)
        if first is None:
            raise Untileable("one output pixel's operands do not fit vin, acc or out")
        return (first,)
    points = list(_products(cfg, p))
    if not points:
        raise Untileable(
            f"no tile of {p.in_blocks} input blocks with a {p.window.kernel[0]}x{p.window.kernel[1]} kernel fits "
            "inp_depth {inp}, wgt_depth {wgt}, acc_depth {acc} and out_depth {out}".format(**depths(cfg))
        )
    costs = _estimates(cfg, p, points)
    order = np.argsort(costs, kind="stable")
    if rows_first:
        by_rows = np.array([order == "input" and y < p.rows for _, y, _, _, order in points])
        good = order[by_rows[order] & (costs[order] <= ROWS_FIRST_COST * costs[order[0]])]
        order = np.concatenate([good, order[~np.isin(order, good)]])
    return tuple(point(cfg, p, *points[i]) for i in order[:count])


def choose(cfg: Config, p: Problem, rows_first: bool = False) -> Decisions:
    """The best point by the estimate; see `ranked`."""
    return ranked(cfg, p, rows_first)[0]
