"""The space of tilings of a block of layers, and an estimate that chooses among them.

A block is one group of layers, or several with whole images on chip between them; each group has a tiling of its own.
A tile is y rows and x columns of what a group makes, with all its channels. The last layer's sum is cut in slices of k
input blocks; for each slice, the layers before it compute what it reads, with the halo that their windows need. So GEMM
is at one slice of the first layer while the vector unit is at the slice before.

In this file `p` is a block or group, and `d` a tiling. Single layers: space.py and roofline.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from celosia.compiler.layer import TilingError
from celosia.compiler.tensorize.roofline import LOAD_LATENCY, REFRESH_FACTOR, STORE_LATENCY
from celosia.compiler.tensorize.space import EXTENT_MAX, Tiling, Workload, parts, recorded_text
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import instruction_bytes
from celosia.hw.spec.pipeline import VECTOR_STAGES
from celosia.hw.spec.scratchpads import depths, scratchpads

WAITING_SHARE = 0.1
"""Share of a slice's cycles that GEMM and the vector unit wait for each other, once in each tile."""
VECTOR_TURNAROUND = VECTOR_STAGES + 4
"""Cycles that a VECTOR waits if it reads the result of the VECTOR before it."""


@dataclass(frozen=True)
class BlockWorkload:
    """The workloads of a block's layers; each layer reads the output of the one before it.

    cuts: numbers of the layers that begin a group, whose input lies in a scratchpad as whole images.
    """

    layers: tuple[Workload, ...]
    cuts: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return recorded_text("BlockProblem", self)

    @property
    def groups(self) -> list[Group]:
        """The groups between cuts, in order."""
        bounds = (0, *self.cuts, len(self.layers))
        return [Group(self.layers[a:b], a > 0, (*self.layers, None)[b]) for a, b in itertools.pairwise(bounds)]


@dataclass(frozen=True)
class Group:
    """The layers of a block between two cuts, which run tile by tile together.

    resident: whether its input lies in a scratchpad as a whole. following: the first layer of the next group, whose
    whole input this group makes in a scratchpad; None if the group makes the block's output.
    """

    layers: tuple[Workload, ...]
    resident: bool = False
    following: Workload | None = None

    @property
    def last(self) -> Workload:
        """The workload whose tiles decide those of the others."""
        return self.layers[-1]

    @property
    def rows(self) -> int:
        """Rows of the result, with the padding that the following layer reads."""
        return self.last.rows if self.following is None else self.following.input_rows(self.following.rows)

    @property
    def columns(self) -> int:
        """Columns of the result, with the padding that the following layer reads."""
        return self.last.columns if self.following is None else self.following.input_columns(self.following.columns)

    @property
    def padding(self) -> tuple[int, int]:
        """Rows of padding at the top and at the bottom of the result."""
        if self.following is None:
            return 0, 0
        top = self.following.window.pads[0]
        return top, max(0, self.rows - top - self.last.rows)

    @property
    def residents(self) -> list[Workload]:
        """Layers whose whole inputs lie in scratchpads while this group runs: its own first one, and the following
        one."""
        return [self.layers[0]] * self.resident + ([] if self.following is None else [self.following])

    @property
    def text(self) -> str:
        """The group in one line, the key of its tiling in files and records. It must not change."""
        chain = "; then ".join(layer.text for layer in self.layers)
        source = "of what lies on chip, " if self.resident else ""
        return source + chain + ("" if self.following is None else "; kept on chip")


class _Level(NamedTuple):
    """One layer in a slice of a tile.

    blocks, out: output blocks and pixels that the slice computes. input_pixels: pixels of the input that it reads.
    """

    workload: Workload
    blocks: int
    out: int
    input_pixels: int

    @property
    def in_blocks(self) -> int:
        """Input blocks that the slice reads."""
        return self.workload.in_blocks or self.blocks

    @property
    def gemm(self) -> int:
        """Cycles of GEMM."""
        return self.blocks * self.workload.in_blocks * self.workload.places * self.out

    @property
    def steps(self) -> int:
        """Cycles of the vector unit for an entry: 1, or those in which it adds up a window."""
        return max(1, self.workload.sums)


Levels = list[_Level]
"""The layers of a group in a slice, in order."""


def _slice_levels(cfg: Config, p: Group, d: Tiling) -> Levels:
    """Return what each layer computes in a slice, derived from the last layer's tile back to the first layer.

    A layer computes the pixels that the next layer's windows read, as far as they are inside the image.
    """
    levels: list[_Level] = []
    rows, columns = min(d.y, p.last.rows), min(d.x, p.last.columns)
    blocks = p.last.out_blocks if p.last.in_blocks else d.n
    ratio = max(1, cfg.block_in // cfg.block_out)
    for number in reversed(range(len(p.layers))):
        layer = p.layers[number]
        input_rows, input_columns = layer.input_rows(rows), layer.input_columns(columns)
        levels.append(_Level(layer, blocks, rows * columns, input_rows * input_columns))
        if number:
            before = p.layers[number - 1]
            rows, columns = min(input_rows, before.rows), min(input_columns, before.columns)
            if layer is p.last and layer.in_blocks:
                blocks = min(d.k * ratio, before.out_blocks)
            elif layer.in_blocks:
                blocks = before.out_blocks
    return levels[::-1]


def why_not(cfg: Config, p: Group, d: Tiling) -> str | None:
    """Return why the tiling `d` is not a point of the space of group `p`; None if it is."""
    last = p.last
    for name, size in (("n", last.out_blocks), ("y", p.rows), ("x", p.columns), ("k", max(last.in_blocks, 1))):
        if not 1 <= getattr(d, name) <= size:
            return f"{name} must be between 1 and {size}, not {getattr(d, name)}"
    if d.ahead < 0 or d.part < 1:
        return "ahead must be at least 0, and part at least 1"
    if d.order != "block":
        return f"order must be block, not {d.order}"
    if not _is_possible_size(p, d.y, d.x):
        return "a tile of what stays on chip must have whole rows, and more than padding"
    return _too_large(cfg, p, d, _slice_levels(cfg, p, d))


def _is_possible_size(p: Group, y: int, x: int) -> bool:
    """Whether the group can compute its result in tiles of y rows and x columns.

    If the result stays on chip, tiles must be whole rows, and none may be padding only.
    """
    top, bottom = p.padding
    return p.following is None or not (x < p.columns or y <= top or (p.rows - 1) % y < bottom)


def _too_large(cfg: Config, p: Group, d: Tiling, levels: Levels) -> str | None:
    """Return why a tile with these levels does not fit, or None. If a tile fits, so do those with smaller n or k."""
    for scope, entries, depth in _needs(cfg, p, d, levels):
        if entries > depth:
            return f"a tile takes {entries} entries of {scope}, where {depth} are to be had"
    if max(d.y, d.x, d.n) > EXTENT_MAX:
        return f"a tile is larger than {EXTENT_MAX} in one direction"
    return None


def _needs(cfg: Config, p: Group, d: Tiling, levels: Levels) -> Iterator[tuple[str, int, int]]:
    """Yield (scratchpad, entries that a tile takes, entries available) for each scratchpad."""
    first, last = levels[0], levels[-1]
    pixels = last.out
    resident = {"inp": 0, "vin": 0}
    for layer in p.residents:
        size = layer.input_rows(layer.rows) * layer.input_columns(layer.columns) * layer.images
        resident[layer.scratchpad] += (layer.in_blocks or layer.out_blocks) * size
    ratio = max(1, cfg.block_in // cfg.block_out)
    inp = vin = acc = 0
    for before, level in itertools.pairwise(levels):
        if level.workload.in_blocks:
            inp += 2 * -(-before.blocks // ratio) * level.input_pixels
        else:
            vin += level.blocks * level.input_pixels
        acc += 2 * before.blocks * before.out if before.workload.in_blocks else 0
    if last.workload.in_blocks:
        acc += last.blocks * pixels
    if p.resident:
        pass
    elif first.workload.in_blocks:
        inp += first.in_blocks * first.input_pixels
    else:
        input_entries = 2 * first.blocks * first.input_pixels
        acc += input_entries if first.workload.scratchpad == "acc" else 0
        vin += input_entries if first.workload.scratchpad == "vin" or first.workload.residual else 0
    room = depths(cfg)
    yield "inp", inp, room["inp"] - resident["inp"]
    yield "acc", acc, room["acc"]
    yield "vin", vin + (d.n * pixels if p.last.residual else 0), room["vin"] - resident["vin"]
    if p.following is None:
        yield "out", d.n * pixels, room["out"] // 2
    yield "wgt", 2 * sum(_weight_entries(d, level, last) for level in levels), room["wgt"]
    if cfg.taps:
        yield "tap", 2 * sum(v.blocks * v.steps for v in levels if v.workload.weighted), room["tap"]
    yield "par", 2 * max(d.n, sum(level.blocks for level in levels[:-1])) + d.n, room["par"]


def _weight_entries(d: Tiling, level: _Level, last: _Level) -> int:
    """Return the entries of wgt that a slice takes for the layer of `level`."""
    return (
        level.blocks
        * (d.k if level is last else level.workload.in_blocks)
        * level.workload.places
        * bool(level.workload.in_blocks)
    )


def candidates(cfg: Config, p: Group) -> Iterator[Tiling]:
    """Yield the points of the space of group `p`."""
    return (d for d, _ in _points_with_levels(cfg, p))


def _points_with_levels(cfg: Config, p: Group) -> Iterator[tuple[Tiling, Levels]]:
    """Yield the points of the space of group `p`, each with its levels."""
    for x in parts(p.columns)[:3]:
        for y in parts(p.rows):
            if _is_possible_size(p, y, x):
                beats = p.layers[0].input_rows(y) * p.layers[0].input_columns(x) * cfg.piece_bytes // cfg.bus_bytes
                yield from _points_of_size(cfg, p, Tiling(1, y, x, 1, "block", part=max(1, 1024 // max(1, beats))))


def _points_of_size(cfg: Config, p: Group, least: Tiling) -> Iterator[tuple[Tiling, Levels]]:
    """Yield for each k the point with the largest n that fits, for tiles of the rows and columns of `least` (n = k =
    1)."""
    last = p.last
    if _too_large(cfg, p, least, _slice_levels(cfg, p, least)):
        return
    for k in parts(max(last.in_blocks, 1)):
        if last.cuts_packs(cfg, k):
            continue
        d = Tiling(1, least.y, least.x, k, "block", part=least.part)
        levels = _slice_levels(cfg, p, d)
        if _too_large(cfg, p, d, levels):
            continue
        for n in parts(last.out_blocks):
            d = Tiling(n, least.y, least.x, k, "block", part=least.part)
            if not last.in_blocks:  # else they are the same for each n
                levels = _slice_levels(cfg, p, d)
            if _too_large(cfg, p, d, levels) is None:
                yield d, levels
                break


def estimate(cfg: Config, p: BlockWorkload, d: Tiling) -> float:
    """Estimate the cycles of the block `p` under the tiling `d`."""
    return sum(estimate_group(cfg, group, tiling) for group, tiling in zip(p.groups, d.groups, strict=True))


def estimate_group(cfg: Config, p: Group, d: Tiling) -> float:
    """Estimate the cycles of the group `p` under the tiling `d`."""
    return _estimate_levels(cfg, p, d, _slice_levels(cfg, p, d))


def _estimate_levels(cfg: Config, p: Group, d: Tiling, levels: Levels) -> float:
    """Estimate the cycles of a group: those of the busiest unit in each slice, plus what no other work hides."""
    first, last = levels[0], levels[-1]
    tiles = -(-p.rows // d.y) * -(-p.columns // d.x) * p.last.images
    fill_of_tiles = (p.rows * p.columns * p.last.images) / (tiles * d.y * d.x)
    slices = -(-p.last.in_blocks // d.k) if p.last.in_blocks else -(-p.last.out_blocks // d.n)
    fill_of_slices = (p.last.in_blocks / d.k if p.last.in_blocks else p.last.out_blocks / d.n) / slices
    entry_beats = max(1, cfg.lanes // cfg.bus_bytes)
    inp_beats = scratchpads(cfg)["inp"].beats(cfg.bus_bytes)

    gemm = sum(level.gemm for level in levels[:-1]) + last.gemm * d.k / max(p.last.in_blocks, 1)
    vector = 0.0
    for level, following in itertools.pairwise(levels):
        vector += (
            level.blocks * (level.steps * level.out + max(0, following.input_pixels - level.out)) + VECTOR_TURNAROUND
        )
        if not following.workload.in_blocks and following.input_pixels > level.out:
            vector += 4 * VECTOR_TURNAROUND
    vector += _bank_stalls(cfg, levels, d)
    if not p.last.in_blocks:
        vector += d.n * d.y * d.x * last.steps
    weight_entries = sum(_weight_entries(d, level, last) for level in levels)
    constants = sum(_weight_entries(d, level, last) * level.workload.weight_beats(cfg) for level in levels)
    constants += sum(level.blocks * (2 * cfg.block_out * 4 // cfg.bus_bytes) for level in levels[:-1])
    room = depths(cfg)
    # Weights of all slices stay if they take half of the rings; the other half is for the next layer's.
    weights_stay = 2 * weight_entries * slices <= room["wgt"]
    weights_stay = weights_stay and 2 * sum(level.blocks for level in levels[:-1]) * slices <= room["par"]
    input_beats = (
        0
        if p.resident
        else first.in_blocks * first.input_pixels * (inp_beats if first.workload.in_blocks else entry_beats)
    )
    last_pass = p.last.out_blocks * d.y * d.x if p.last.in_blocks else 0
    store = p.last.out_blocks * d.y * d.x * entry_beats if p.following is None else 0
    instructions = (6 + 4 * len(levels)) * max(1, instruction_bytes(cfg) // cfg.bus_bytes)
    load_cycles = (
        input_beats / slices + constants / (tiles if weights_stay else 1) + (store / slices if p.last.residual else 0)
    )
    load_cycles = load_cycles * REFRESH_FACTOR + instructions
    slice_cycles = max(gemm, vector + last_pass / slices, load_cycles, store / slices) * fill_of_slices
    acc = next(entries for scope, entries, _ in _needs(cfg, p, d, levels) if scope == "acc")
    exposed = (
        0.0 if acc + last.blocks * d.y * d.x <= room["acc"] or tiles == 1 else last_pass + VECTOR_TURNAROUND + gemm / 2
    )
    exposed += WAITING_SHARE * min(gemm, vector)
    if p.resident:  # with several tiles, the first ones overlap with the last ones of the group before
        start = gemm + vector if tiles < 3 else 0.0
    else:
        start = input_beats + constants + LOAD_LATENCY + gemm + vector
    drain = last_pass + store / 2 + STORE_LATENCY if p.following is None else 0
    return tiles * fill_of_tiles * (slices * slice_cycles + exposed) + start / 2 + drain


def _bank_stalls(cfg: Config, levels: list[_Level], d: Tiling) -> float:
    """Return the cycles of a slice in which the vector unit waits to read sums, as GEMM adds to others in the same
    bank.

    Sums of the last layer lie in the first bank of acc. Those handed on inside the block lie at the end of the second
    bank, and may reach into the first.
    """
    last, half = levels[-1], scratchpads(cfg)["acc"].bank_depth
    handed_on = sum(2 * level.blocks * level.out for level in levels[:-1] if level.workload.in_blocks)
    if handed_on <= half or not last.workload.in_blocks:
        return 0.0
    adds = last.blocks * last.out
    reads = sum(level.blocks * level.out for level in levels[:-1] if level.workload.in_blocks)
    return min(adds, reads) * (handed_on - half) / handed_on


def best_by_piece(cfg: Config, p: Group, count: int = 2) -> list[Tiling]:
    """Return the `count` points with the fewest estimated cycles for each k; the search of blocks measures them."""
    ranked = [d for d, _ in sorted(_points_with_levels(cfg, p), key=lambda point: _estimate_levels(cfg, p, *point))]
    best = {d.k: [other for other in ranked if other.k == d.k][:count] for d in ranked}
    return [d for points in best.values() for d in points]


def choose(cfg: Config, p: BlockWorkload) -> Tiling:
    """Return the tiling with the fewest estimated cycles in each group. Raises TilingError if a group has none."""
    return Tiling.of_groups([_choose_for_group(cfg, group) for group in p.groups])


@cache
def _choose_for_group(cfg: Config, p: Group) -> Tiling:
    """Return the tiling of a group with the fewest estimated cycles. Raises TilingError if there is none."""
    best = min(_points_with_levels(cfg, p), key=lambda point: _estimate_levels(cfg, p, *point), default=None)
    if best is None:
        raise TilingError(f"no tile of the block fits the scratchpads: {p.text}")
    return best[0]
