"""The space of tilings of a layer: its workload, the points (tilings), and what limits them.

In this file `p` is a workload and `d` a tiling. Blocks of layers have a space of their own (block_space.py).
roofline.py estimates the cycles of a point; plan.py chooses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as dataclass_fields
from enum import Enum
from typing import Any

from celosia.compiler.layer import Window
from celosia.compiler.vthread.pipeline import AHEAD
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import EXTENT_BITS, Buffer, element_bytes
from celosia.hw.spec.packing import packing
from celosia.hw.spec.pipeline import MAX_NORM_ROWS, tile_rows
from celosia.hw.spec.scratchpads import depths

EXTENT_MAX = (1 << EXTENT_BITS) - 1
"""Largest number of iterations of a loop of an instruction."""
ATTENTION_AHEAD = 1
"""Tiles that load ahead in attention: its tiles take long, and more loads would delay the first tile's
products."""
LOAD_PART_BEATS = 1024
"""Bus beats of one LOAD of activations, about. A tile is loaded in parts, so that each can start when its data is
ready."""


class CompletionOrder(Enum):
    """In which order the output of a layer is to become complete, since a layer after it waits for parts of it."""

    ANY = "any"
    ROWS = "rows"
    COLUMNS = "columns"


def recorded_text(name: str, value: Any) -> str:
    """Return the repr of a dataclass as tuning records know it, under a `name` and field names that must not change.

    The digest of a layer is made of such texts, and records are found by it. Fields
    declared with repr=False are left out; metadata["recorded"] is the former name of a renamed field.
    """
    shown = {f.metadata.get("recorded", f.name): getattr(value, f.name) for f in dataclass_fields(value) if f.repr}
    return f"{name}({', '.join(f'{field_name}={content!r}' for field_name, content in shown.items())})"


@dataclass(frozen=True)
class Workload:
    """Everything that the choice of a tiling depends on.

    The output has `out_blocks` x `images` x `rows` x `columns` entries; each is a sum over `in_blocks` input blocks and
    the elements of `window`.

    in_blocks: 0 for a layer without GEMM.
    residual: whether an operand B of the size of the output comes through vin.
    step, share: for groups: each `share` output blocks read the same input blocks, the next ones `step` blocks further.
    scratchpad: where the input lies.
    beyond: columns of the input that are read beyond the windows.
    sums: steps in which the vector unit computes an entry of the output, if it adds up windows; else 0.
    weighted: whether it multiplies by weights there, as for a depthwise convolution.
    whole: whether each tile has all output blocks.
    behind: for each pass of the vector unit that follows in each tile, whether it adds an operand from acc.
    packed: whether weights lie packed in DRAM, so that pieces of the reduction must be whole packs.
    apart: whether the blocks of a pixel lie side by side in DRAM and pixels apart, as in a matrix of several rows.
    attends: for attention, whose rows are heads and whose columns are queries: (output blocks of keys,
    input blocks of channels).
    sum_bytes: bytes of each sum that the output holds; 0 if sums are requantised.
    norm: whether whole rows are normalised.
    one_weight: whether all products are by the same entry of wgt.
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
    scratchpad: str = field(default="inp", metadata={"recorded": "near"})
    beyond: int = 0
    sums: int = 0
    weighted: bool = False
    whole: bool = field(default=False, repr=False)  # this and later fields have no place in recorded_text
    behind: tuple[bool, ...] = field(default=(), repr=False)
    packed: bool = field(default=False, repr=False)
    apart: bool = field(default=False, repr=False)
    attends: tuple[int, int] | None = field(default=None, repr=False)
    sum_bytes: int = field(default=0, repr=False)
    norm: bool = field(default=False, repr=False)
    one_weight: bool = field(default=False, repr=False)

    def __repr__(self) -> str:
        return recorded_text("Problem", self)

    @property
    def text(self) -> str:
        """The workload in one line, the key of tilings in files and records. It must not change."""
        w = self.window
        shape = f"{self.images}x{self.rows}x{self.columns} of {self.out_blocks} blocks"
        window = "window " + " ".join(
            f"{name} {'x'.join(map(str, sizes))}"
            for name, sizes in (("of", w.kernel), ("strides", w.strides), ("dilations", w.dilations), ("pads", w.pads))
        )
        whole = ", whole" * self.whole + ", normalised" * self.norm + ", packed" * self.packed
        whole += ", by one entry of weights" * self.one_weight
        if self.attends is not None:
            return f"attention, {shape}, to {self.attends[0]} blocks of keys of {self.attends[1]} blocks"
        whole += f", {self.sum_bytes} bytes of sums" * (self.sum_bytes > 0)
        whole += "".join(", then a sum" if adds else ", then a map" for adds in self.behind)
        terms = f"from {self.in_blocks} blocks" + (f" {self.step} further each {self.share}" if self.step else "")
        return f"{shape} {terms} in {self.scratchpad}, {window}{', two operands' if self.residual else ''}{whole}"

    @property
    def places(self) -> int:
        """Elements of the window: rows times columns of the kernel."""
        return self.window.kernel[0] * self.window.kernel[1]

    @property
    def steps(self) -> int:
        """Cycles in which GEMM computes: products of one block of channels by another, one a cycle."""
        return self.out_blocks * self.in_blocks * self.places * self.rows * self.columns * self.images

    def weight_entries(self, n: Any, k: Any) -> Any:
        """Return the entries of wgt for `n` output blocks and `k` input blocks, which may be arrays."""
        return n * k * self.places if not self.one_weight else 0 * n * k + 1

    @property
    def output_bytes(self) -> int:
        """Bytes of each output value: 1, or those of an unscaled sum."""
        return max(self.sum_bytes, 1)

    @property
    def added_operands(self) -> int:
        """Number of passes behind that add an operand."""
        return sum(self.behind)

    @property
    def grouped(self) -> bool:
        """Whether the layer is a grouped convolution, whose output blocks read different input blocks."""
        return self.step > 0

    def weight_bytes(self, cfg: Config) -> int:
        """Return the bytes of an entry of wgt in DRAM."""
        return cfg.inp_pieces * element_bytes(cfg, Buffer.WGT, expand=self.packed)

    def weight_beats(self, cfg: Config) -> float:
        """Return the cycles in which LOAD writes an entry of wgt."""
        return max(1, self.weight_bytes(cfg) / cfg.bus_bytes)

    def cuts_packs(self, cfg: Config, k: int) -> bool:
        """Whether weights are packed and those of `k` input blocks are not whole packs, which LOAD cannot load."""
        return self.packed and k * self.places * cfg.inp_pieces % packing(cfg).pieces > 0

    def input_blocks_of(self, blocks: int) -> int:
        """Return the number of input blocks that `blocks` output blocks read; they must be whole shares."""
        return self.in_blocks + self.step * ((blocks - 1) // self.share)

    def input_rows(self, rows: int) -> int:
        """Return the input rows in the scratchpad for `rows` output rows; a kernel of one row skips rows between
        strides."""
        w = self.window
        return rows if w.kernel[0] == 1 else (rows - 1) * w.strides[0] + w.reach(0)

    def input_columns(self, columns: int) -> int:
        """Return the input columns in the scratchpad for `columns` output columns."""
        return (columns - 1) * self.window.strides[1] + self.window.reach(1) + self.beyond


ORDERS = ("weights", "input", "split", "pieces", "rows", "block")
"""Orders of the loops over tiles (see `Tiling`), named after what stays in its scratchpad longest.

A new order needs a case in `why_not`, `too_large`, `product_sizes` and in the template (templates.py), too.
"""
CUT_ORDERS = ("split", "pieces", "block")
"""Orders in which the reduction is cut into pieces of k input blocks."""


@dataclass(frozen=True)
class Tiling:
    """One point of the space. A tile has n output blocks, y rows and x columns; it sums over k input blocks at a time.

    order: the nesting of the loops over tiles, from the outside.
        "weights": output blocks, images, rows, columns; whole reductions.
        "input": images, rows, columns, output blocks; whole reductions.
        "rows": images, rows, output blocks, columns; layers without GEMM.
        "split": as "input", but the reduction is cut into pieces of k; the sums of all output blocks of a pixel stay in
            acc meanwhile.
        "pieces": as "weights", but the reduction of a tile is cut into pieces of k.
        "block": images, rows, columns of a block of layers; the last sum in pieces of k, then n blocks at a time.
    ahead: number of tiles that may load before the oldest of them has computed.
    part: number of blocks of activations that one LOAD brings.
    earlier: for a block of several groups, the tilings of the groups before the last.
    """

    n: int
    y: int
    x: int
    k: int
    order: str
    ahead: int = AHEAD
    part: int = 1 << 12
    earlier: tuple[Tiling, ...] = ()

    def __repr__(self) -> str:
        return recorded_text("Decisions", self)

    @property
    def groups(self) -> tuple[Tiling, ...]:
        """The tiling of each group of a block, in order."""
        return *self.earlier, replace(self, earlier=())

    @staticmethod
    def of_groups(groups: Sequence[Tiling]) -> Tiling:
        """Combine the tilings of a block's groups into one."""
        return replace(groups[-1], earlier=tuple(groups[:-1]))

    def to_json(self) -> dict[str, int | str]:
        """Return the tiling as JSON, without those of earlier groups."""
        fields = asdict(self)
        del fields["earlier"]
        return fields

    @staticmethod
    def from_json(fields: Any) -> Tiling:
        """Parse the JSON of a tiling. Raises ValueError if it is none."""
        if not isinstance(fields, Mapping):
            raise ValueError(f"decisions are values by name, not {fields!r}")
        known = [f.name for f in dataclass_fields(Tiling) if f.name != "earlier"]
        if unknown := sorted(set(fields) - set(known)):
            raise ValueError(f"there is no decision {unknown[0]!r}; there are {', '.join(known)}")
        for name in known:
            if name not in fields:
                raise ValueError(f"the decision {name!r} is missing")
            value = fields[name]
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            if (name == "order" and value not in ORDERS) or (name != "order" and not is_count):
                raise ValueError(f"the decision {name} cannot be {value!r}")
        return Tiling(**fields)


def parts(size: int) -> list[int]:
    """Return the sizes of a part when `size` is cut into 1, 2, 3, ... nearly equal parts; of many only about twelve."""
    sizes = dict.fromkeys(-(-size // count) for count in range(1, size + 1))
    if len(sizes) > 12:
        largest_first = list(sizes)
        middle = largest_first[6 : -4 : max(1, (len(largest_first) - 10) // 4)]
        return largest_first[:6] + middle + largest_first[-4:]
    return list(sizes)


def candidates(cfg: Config, p: Workload) -> Iterator[Tiling]:
    """Generate the points that fit the scratchpads. For a layer without GEMM the first is a good one."""
    fitting_sizes = _vector_sizes(cfg, p) if not p.in_blocks else product_sizes(cfg, p)
    return (point(cfg, p, *sizes) for sizes in fitting_sizes)


Sizes = tuple[int, int, int, int, str]
"""(n, y, x, k, order) of a point."""


def point(cfg: Config, p: Workload, n: int, y: int, x: int, k: int, order: str) -> Tiling:
    """Return the tiling with these sizes, which loads activations in parts of about LOAD_PART_BEATS."""
    beats = p.input_rows(y) * p.input_columns(x) * cfg.piece_bytes // cfg.bus_bytes
    ahead = AHEAD if p.attends is None else ATTENTION_AHEAD
    return Tiling(n, y, x, k, order, ahead, max(1, LOAD_PART_BEATS // max(1, beats)))


def why_not(cfg: Config, p: Workload, d: Tiling) -> str | None:
    """Return why the tiling `d` is not a point of the space of `p`; None if it is."""
    for name, size in (("n", p.out_blocks), ("y", p.rows), ("x", p.columns), ("k", max(p.in_blocks, 1))):
        if not 1 <= getattr(d, name) <= size:
            return f"{name} must be between 1 and {size}, not {getattr(d, name)}"
    if p.whole and d.n != p.out_blocks:
        return f"n must be {p.out_blocks}, of whole rows, not {d.n}"
    if d.n % p.share and d.n != p.out_blocks:
        return f"n must be a multiple of {p.share}, not {d.n}"
    if d.ahead < 0 or d.part < 1:
        return "ahead must be at least 0, and part at least 1"
    allowed = ("weights", "input", "split", "pieces") if p.in_blocks else ("rows",)
    if d.order not in allowed:
        return f"order must be one of {', '.join(allowed)}, not {d.order}"
    if d.order not in CUT_ORDERS and p.in_blocks and d.k != p.in_blocks:
        return f"k must be {p.in_blocks} where the order is {d.order}"
    if p.cuts_packs(cfg, d.k):
        return f"k must be of whole packs of {packing(cfg).pieces} pieces of weights, not {d.k}"
    if d.order in CUT_ORDERS and p.grouped:
        return "the reduction of a grouped convolution is not split"
    return too_large(cfg, p, d)


def _in_padding(p: Workload, y: int, x: int) -> bool:
    """Whether some tile of y rows and x columns would read padding only, which no LOAD can express."""
    w = p.window
    for axis, (size, tile) in enumerate(((p.rows, y), (p.columns, x))):
        before, after = ((w.pads[axis + end] - w.reach(axis)) // w.strides[axis] + 1 for end in (0, 2))
        if tile <= before or size - (-(-size // tile) - 1) * tile <= after:
            return True
    return False


def too_large(cfg: Config, p: Workload, d: Tiling) -> str | None:
    """Return why a tile of `d` does not fit the scratchpads or an instruction's fields; None if it does."""
    if _in_padding(p, d.y, d.x):
        return "a tile lies in the padding alone"
    if p.attends is not None:
        return _first_excess(_attention_needs(cfg, p, d)) or _why_not_queries(cfg, p, d)
    pixels, span = d.y * d.x, p.input_rows(d.y) * p.input_columns(d.x)
    entries = d.n * pixels
    room = depths(cfg)
    needs = [("out", entries * p.output_bytes, room["out"] // 2)]
    if p.norm:
        needs += [("par", d.n, room["par"]), ("rows of a norm", pixels, MAX_NORM_ROWS)]
    if not (p.whole or p.sum_bytes):
        needs.append(("par", d.n, room["par"] // 2))
    if p.residual or p.behind:
        needs.append(("vin", entries * (2 * p.residual + len(p.behind)), room["vin"]))
    accs = entries * (2 * p.added_operands)
    if not p.in_blocks:
        needs.append(("acc" if p.scratchpad == "acc" else "vin", d.n * span, room[p.scratchpad] // 2))
    elif d.order in CUT_ORDERS:
        needs.append(("acc", 2 * entries + accs, room["acc"]))
        if d.order == "split":
            needs.append(("acc", p.out_blocks * pixels + accs, room["acc"]))
        needs.append(("inp", d.k * span, room["inp"] // 2))
        needs.append(("wgt", p.weight_entries(d.n, d.k), room["wgt"] // 2))
    else:
        needs.append(("acc", 2 * entries + accs, room["acc"]))
        needs.append(("inp", p.input_blocks_of(d.n) * span, room["inp"]))
        needs.append(("wgt", p.weight_entries(d.n, p.in_blocks), room["wgt"]))
    if (reason := _first_excess(needs)) is not None:
        return reason
    if max(d.y, d.x, d.n) > EXTENT_MAX:
        return f"a tile is larger than {EXTENT_MAX} in one direction"
    return None


def _first_excess(needs: Iterable[tuple[str, int, int]]) -> str | None:
    """Return why a tile does not fit, or None. needs: (scratchpad, entries that it takes, entries available)."""
    for scope, entries, depth in needs:
        if entries > depth:
            return f"a tile takes {entries} entries of {scope}, where {depth} are to be had"
    return None


def _attention_needs(cfg: Config, p: Workload, d: Tiling) -> Iterator[tuple[str, int, int]]:
    """Yield the scratchpad entries of a tile of attention, d.y heads and d.x queries, and those available.

    Probabilities of two tiles, and queries, keys and values of the next one, must fit.
    """
    assert p.attends is not None
    (keys, channels), rows, room = p.attends, d.y * d.x, depths(cfg)
    shares = keys // cfg.inp_pieces  # entries of inp that hold the probabilities of all keys
    yield "vin", rows * keys, room["vin"]
    yield "inp", 2 * rows * (shares + channels), room["inp"]
    yield "acc", rows * (keys + p.out_blocks), room["acc"]
    yield "wgt", 2 * d.y * (keys * channels + shares * p.out_blocks), room["wgt"]
    yield "out", rows * p.out_blocks, room["out"] // 2
    yield "loops of an instruction", max(rows, keys), EXTENT_MAX


def query_part(cfg: Config) -> int:
    """Return how many queries one instruction of attention takes at most; the other unit starts after the first one."""
    return 4 * tile_rows(cfg)


def _why_not_queries(cfg: Config, p: Workload, d: Tiling) -> str | None:
    """Return why tiles of several heads cannot have d.x queries each; None if they can."""
    part = query_part(cfg)
    if d.y > 1 and any(size > part and size % part for size in (d.x, p.columns % d.x)):
        return f"a tile of several heads takes at most {part} queries, or a multiple of that"
    return None


def _vector_sizes(cfg: Config, p: Workload) -> Iterator[Sizes]:
    """Generate the tile sizes of a layer without GEMM: first the largest that fits, then all others.

    The largest has as many rows and columns as fit, and then as many blocks.
    """

    def fits(n: int, y: int, x: int) -> bool:
        return too_large(cfg, p, Tiling(n, y, x, 1, "rows")) is None

    least = p.out_blocks if p.whole else 1
    n, y, x = least, p.rows, p.columns
    while y > 1 and not fits(least, y, x):
        y = -(-y // 2)
    while x > 1 and not fits(least, y, x):
        x = -(-x // 2)
    if not fits(least, y, x):
        return
    while n < p.out_blocks and fits(n + 1, y, x):
        n += 1
    yield n, y, x, 1, "rows"
    step = tile_rows(cfg) if p.attends is None else cfg.softmax
    steps = range(step, p.columns, step) if p.whole and not p.norm else ()
    columns = dict.fromkeys((*parts(p.columns), *steps))
    others = ((n, y, x) for x in columns for y in parts(p.rows) for n in parts(p.out_blocks) if n >= least)
    yield from ((*sizes, 1, "rows") for sizes in others if sizes != (n, y, x) and fits(*sizes))


def product_sizes(cfg: Config, p: Workload) -> Iterator[Sizes]:
    """Generate the tile sizes of a layer on GEMM that fit the scratchpads, tiles with most columns first."""
    room = depths(cfg)
    columns = [x for x in parts(p.columns) if p.input_columns(x) <= room["inp"] and x <= EXTENT_MAX]
    blocks = list(dict.fromkeys(min(-(-n // p.share) * p.share, p.out_blocks) for n in parts(p.out_blocks)))
    pieces = [k for k in parts(p.in_blocks)[1:] if not p.cuts_packs(cfg, k)]
    vin = 2 * p.residual + len(p.behind)
    limit = min(
        room["out"] // 2 // p.output_bytes,
        room["acc"] // (2 + 2 * p.added_operands),
        *([room["vin"] // vin] if vin else []),
    )
    for x in columns[:5] + columns[5:][-1:]:  # the widest, and the narrowest for where no other fits
        for y in parts(p.rows):
            pixels = y * x
            if pixels > limit or y > EXTENT_MAX or _in_padding(p, y, x):
                continue
            span = p.input_rows(y) * p.input_columns(x)
            for n in blocks:
                if n * pixels > limit or (n > room["par"] // 2 and not p.sum_bytes):
                    continue
                if p.input_blocks_of(n) * span <= room["inp"] and p.weight_entries(n, p.in_blocks) <= room["wgt"]:
                    yield n, y, x, p.in_blocks, "weights"
                    if not p.grouped:
                        yield n, y, x, p.in_blocks, "input"
                if p.grouped:
                    continue
                fitting_pieces = [
                    k for k in pieces if k * span <= room["inp"] // 2 and p.weight_entries(n, k) <= room["wgt"] // 2
                ]
                if (p.out_blocks + 2 * n * p.added_operands) * pixels <= room["acc"]:
                    yield from ((n, y, x, k, "split") for k in fitting_pieces)
                if fitting_pieces and p.weight_entries(n, p.in_blocks) > room["wgt"] // 2:
                    yield n, y, x, fitting_pieces[0], "pieces"
