"""Instructions whose addresses depend on the loops around them: the fields that stay, and those that change.

instruction_builder.py makes one of an intrinsic and its loops, once. `fields` then gives the instruction for values of
the loops outside, with additions only: addresses are sums over these loops, and padding is how far a block reaches over
the borders of its tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

from celosia.compiler.expr.interpret import evaluate
from celosia.compiler.expr.nodes import Const, Expr, Tensor, Var
from celosia.compiler.layer import TilingError
from celosia.compiler.tensorize import intrinsic as rules
from celosia.compiler.tensorize.transfer import PAD_MAX, X_MAX, YZ_MAX, Dim, coalesce
from celosia.hw.spec.isa import OUTER_LOOPS, Opcode

Env = dict[Var, int]
Fields = dict[str, int]


BY_BLOCK = ("wgt", "par", "tap")
"""Operands with one entry for all pixels of an output block."""


class RenderError(ValueError):
    """Loops that the accelerator cannot run; the message says why."""


class NotOneInstruction(Exception):
    """Loops that are not one instruction; the message says why."""


@dataclass(frozen=True)
class Sum:
    """An index as base + sum of variable * step over the loops outside. others: expressions of these loops that are no
    variables, and their steps."""

    base: int
    terms: tuple[tuple[Var, int], ...] = ()
    others: tuple[tuple[Expr, int], ...] = ()

    def at(self, env: Mapping[Var, int]) -> int:
        """Evaluate the sum for values of the variables."""
        total = self.base
        for var, step in self.terms:
            total += env[var] * step
        for other, step in self.others:
            total += int(evaluate(other, env)) * step
        return total

    def plus(self, base: int) -> Sum:
        """Add a constant."""
        return Sum(self.base + base, self.terms, self.others)

    def scaled(self, by: int) -> Sum:
        """Multiply by a constant."""
        return Sum(self.base * by, _times(self.terms, by), _times(self.others, by))

    def divided(self, by: int) -> Sum | None:
        """Divide by a constant; None where a step is no multiple of it."""
        parts = (*self.terms, *self.others)
        if self.base % by or any(step % by for _, step in parts):
            return None
        return Sum(self.base // by, _over(self.terms, by), _over(self.others, by))


@dataclass(frozen=True)
class TileAccess:
    """The begin of a tile as an element of its tensor, and the step by which each loop of the instruction moves it."""

    begin: Sum
    steps: tuple[int, ...]

    def in_units(self, size: int, what: object) -> TileAccess:
        """Convert to units of `size` elements. NotOneInstruction, naming `what`, where these are no whole numbers."""
        begin = self.begin.divided(size)
        if begin is None or any(step % size for step in self.steps):
            raise NotOneInstruction(f"{what} begins or moves by other than multiples of {size} elements")
        return TileAccess(begin, tuple(step // size for step in self.steps))


@dataclass(frozen=True)
class Limit:
    """Bound of loop `number`: its iterations i exist with low + i * step >= 0 where `lower`, else with
    i * step < low."""

    number: int
    low: Sum
    step: int
    lower: bool

    def at(self, env: Mapping[Var, int]) -> int:
        """The first iteration that exists where `lower`, else the end of those that do."""
        value = self.low.at(env)
        return -(value // self.step) if self.lower else -(-value // self.step)


@dataclass(frozen=True)
class ComputeInstruction:
    """GEMM or VECTOR with open addresses.

    bases: fields that hold addresses, each with its scratchpad tensor, the place within it, and places of an entry.
    bounds: limits of the instruction's loops; iterations outside give the number `pad`.
    """

    opcode: Opcode
    static: Fields
    bases: tuple[tuple[str, Tensor, Sum, int], ...]
    begins: tuple[Var, ...] | None
    """GEMM: loops outside that must be at 0 for it to overwrite; None where it always accumulates."""
    parameters: Mapping[str, Expr]
    rule: rules.Compute
    bounds: tuple[tuple[str, Limit], ...] = ()
    pad: Expr | None = None

    @property
    def scratchpads(self) -> list[Tensor]:
        """Scratchpad tensors that the instruction reads or writes."""
        return [tensor for _, tensor, _, _ in self.bases]

    def touched(self, env: Env, of: Tensor, constants: Fields, written: bool, taps: int) -> set[int]:
        """Entries of the tensor `of`, counted from its first, that are `written`, or else read. taps: of the Config."""
        touched: set[int] = set()
        for name, tensor, _, places in self.bases:
            if tensor is not of or written != (name == "dst_base"):
                continue
            operand = name.removesuffix("_base")
            for fields in self.instructions(env, dict.fromkeys(self.scratchpads, 0), constants):
                entries = {fields[name]}
                for loop in (name.removeprefix("extent_") for name in fields if name.startswith("extent_")):
                    step = fields.get(f"{operand}_{loop}", 0)
                    entries = {entry + i * step for entry in entries for i in range(fields[f"extent_{loop}"])}
                reach = taps if fields.get("taps") and operand == "a" else 1
                touched |= {entry // places + i for entry in entries for i in range(reach)}
        return touched

    def constants(self, scalars: Mapping[str, Any]) -> Fields:
        """The fields that no loop outside changes."""
        values = {name: _scalar(e, scalars) for name, e in self.parameters.items()}
        fields = self.static | self.rule.fields(**values) if values else self.static
        return fields if self.pad is None else fields | {PAD: int(_scalar(self.pad, scalars))}

    def instructions(self, env: Env, slots: Mapping[Tensor, int], constants: Fields) -> Iterator[Fields]:
        """Generate the fields of the instruction for iterations that exist, and of those that fill the others."""
        fields = self.fields(env, slots, constants)
        pad = fields.pop(PAD, 0)
        if not self.bounds:
            yield fields
            return
        ranges: dict[str, tuple[int, int]] = {}
        for loop, bound in self.bounds:
            first, end = ranges.get(loop, (0, fields[f"extent_{loop}"]))
            at = bound.at(env)
            ranges[loop] = (max(first, at), end) if bound.lower else (first, min(end, at))
        if any(first >= end for first, end in ranges.values()):
            raise TilingError("a tile that lies in the padding alone")
        inside = _restricted(fields, ranges)
        yield inside
        # What is filled reads an entry that is there, and clips it to the one number.
        filled = {name: value for name, value in fields.items() if name in _FILLING}
        filled |= {"a_base": inside["a_base"], "extent_r": 1, "extent_s": 1, "clip_lo": pad, "clip_hi": pad}
        for loop, (first, end) in ranges.items():
            for part in ((0, first), (end, filled[f"extent_{loop}"])):
                if part[0] < part[1]:
                    yield _restricted(filled, {loop: part})
            filled = _restricted(filled, {loop: (first, end)})

    def fields(self, env: Env, slots: Mapping[Tensor, int], constants: Fields) -> Fields:
        """All fields, for values of the loops outside. constants: from the method `constants`."""
        fields = dict(constants)
        for name, tensor, place, places in self.bases:
            fields[name] = slots[tensor] * places + place.at(env)
        if self.opcode == Opcode.GEMM:
            fields["accumulate"] = int(self.begins is None or any(env[var] for var in self.begins))
        return fields


PAD = "pad"
"""Key among an instruction's constants: the number that fills places without a result."""
_FILLING = {"a_source", "destination", "dst_base", "extent_r", "extent_s"} | {
    f"{name}_{loop}" for name in ("extent", "dst") for loop in OUTER_LOOPS
}


def _restricted(fields: Fields, ranges: Mapping[str, tuple[int, int]]) -> Fields:
    """Restrict an instruction to iterations [first, end) of some of its loops."""
    fields = dict(fields)
    for loop, (first, end) in ranges.items():
        fields[f"extent_{loop}"] = end - first
        for base in [name for name in fields if name.endswith("_base")]:
            fields[base] += first * fields.get(f"{base.removesuffix('_base')}_{loop}", 0)
    return fields


class _Part(NamedTuple):
    """A block of which only some iterations exist: its fields, and the bytes of DRAM and places of the scratchpad by
    which it begins later than the whole block."""

    fields: Fields
    address: int
    place: int


@dataclass(frozen=True)
class MoveInstruction:
    """LOAD or STORE of a block of up to three dimensions.

    on_chip, tensor: tensors in the scratchpad and in DRAM. pieces: elements of an entry. address: bytes from the begin
    of `tensor`. dims: of the loops, from the outermost. bounds: limits of the loops; iterations outside are padding of
    a LOAD, and left out of a STORE.
    """

    opcode: Opcode
    static: Fields
    on_chip: Tensor
    tensor: Tensor
    pieces: int
    place: Sum
    address: Sum
    dims: tuple[Dim, ...]
    whole: Fields
    bounds: tuple[Limit, ...]
    pad: Expr | None
    piece_bytes: int
    index: tuple[tuple[Sum, int], ...]
    """For each dimension of `tensor`: the index at the begin, and how far the block reaches beyond it."""
    _parts: dict[Hashable, _Part | None] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By the iterations that exist: most tiles of a loop have one of a few."""

    @property
    def loads(self) -> bool:
        """Whether it is a LOAD."""
        return self.opcode == Opcode.LOAD

    @property
    def scratchpads(self) -> list[Tensor]:
        """The tensor in the scratchpad."""
        return [self.on_chip]

    def moved(self, fields: Fields, first: int) -> Fields:
        """Move the scratchpad tensor of `fields` from entry 0 to entry `first`."""
        fields["sram_base"] += first * self.pieces
        return fields

    def constants(self, scalars: Mapping[str, Any]) -> Fields:
        """The fields that no loop outside changes, of a block that exists as a whole; and the value of padding."""
        return self.whole if self.pad is None else self.whole | {"pad_value": int(_scalar(self.pad, scalars))}

    def fields(self, env: Env, first: int, begin: int, constants: Fields) -> Fields | None:
        """All fields, for values of the loops outside; None where nothing is to be moved.

        first: entry of the scratchpad tensor. begin: byte of the tensor in DRAM. constants: from the method
        `constants`. TilingError for padding alone, or where the block is no single transfer.
        """
        address, place = begin + self.address.at(env), first * self.pieces + self.place.at(env)
        ranges = self._ranges(env)
        if ranges is None:
            fields = dict(constants)
        else:
            part = self._part(ranges)
            if part is None:
                return None
            fields, address, place = dict(part.fields), address + part.address, place + part.place
            if self.loads:
                fields["pad_value"] = constants["pad_value"]
        fields["dram_addr"], fields["sram_base"] = address, place
        return fields

    def _ranges(self, env: Env) -> dict[int, tuple[int, int]] | None:
        """The iterations [first, end) of each bounded loop that exist; None where all do."""
        ranges: dict[int, tuple[int, int]] = {}
        for bound in self.bounds:
            extent = self.dims[bound.number].count
            first, end = ranges.get(bound.number, (0, extent))
            at = bound.at(env)
            first, end = (max(first, at), end) if bound.lower else (first, min(end, at))
            if (first, end) != (0, extent):
                ranges[bound.number] = first, end
        return ranges or None

    def _part(self, ranges: dict[int, tuple[int, int]]) -> _Part | None:
        """The block of these iterations, remembered; None where nothing is to be moved. TilingError as in `fields`."""
        key = tuple(ranges.items())
        if key not in self._parts:
            self._parts[key] = self._partly(ranges)
        return self._parts[key]

    def _partly(self, ranges: dict[int, tuple[int, int]]) -> _Part | None:
        """Compute the block of these iterations; see `_part`."""
        if any(first >= end for first, end in ranges.values()):
            if not self.loads:
                return None
            raise TilingError("a tile that lies in the padding alone")
        try:
            return self._padded(ranges) if self.loads else self._cut(ranges)
        except NotOneInstruction as refused:
            raise TilingError(str(refused)) from None

    def _cut(self, ranges: dict[int, tuple[int, int]]) -> _Part:
        """The STORE of these ranges of its dimensions alone."""
        dims = list(self.dims)
        address = place = 0
        for number, (first, end) in ranges.items():
            dim = dims[number]
            address, place = address + first * dim.dram, place + first * dim.sram
            dims[number] = replace(dim, count=end - first)
        return _Part({**self.static, **block_fields(dims, self.piece_bytes)}, address, place)

    def _padded(self, ranges: dict[int, tuple[int, int]]) -> _Part:
        """The LOAD of these ranges of its dimensions, with padding around them."""
        z, y, x = as_planes(self.dims, self.piece_bytes, frozenset(ranges))
        pads: dict[str, int] = {}
        sizes = []
        address = 0
        for (number, dim), sides in zip((z, y, x), (None, ("top", "bottom"), ("left", "right"))):
            first, end = ranges.get(number, (0, dim.count))
            sizes.append(end - first)
            address += first * dim.dram
            if sides is not None:
                pads |= {f"pad_{sides[0]}": first, f"pad_{sides[1]}": dim.count - end}
        if max(pads.values()) > PAD_MAX:
            raise TilingError(f"more than {PAD_MAX} rows or columns of padding")
        fields = {
            "dram_y": y[1].dram, "dram_z": z[1].dram, "x_size": sizes[2], "y_size": sizes[1], "z_size": sizes[0],
            "sram_x": x[1].sram, "sram_y": y[1].sram, "sram_z": z[1].sram,
        }  # fmt: skip
        return _Part({**self.static, **pads, **fields}, address, 0)

    def check(self, env: Env) -> None:
        """Raise the TilingError of `fields`, if there is one."""
        if ranges := self._ranges(env):
            self._part(ranges)

    def span(self, dimension: int, env: Env) -> tuple[int, int]:
        """Indices [first, end) of one dimension of `tensor` that are moved, without padding."""
        first, reach = self.index[dimension]
        begin = first.at(env)
        return max(begin, 0), min(begin + reach + 1, self.tensor.shape[dimension])

    def moved_pieces(self, env: Env) -> int:
        """Elements that are moved, without padding."""
        ranges = self._ranges(env) or {}
        return prod(ranges[n][1] - ranges[n][0] if n in ranges else dim.count for n, dim in enumerate(self.dims))


def _scalar(e: Expr, scalars: Mapping[str, Any]) -> Any:
    """The value of a parameter: a constant, or a scalar of the function."""
    if isinstance(e, Const):
        return e.value
    if isinstance(e, Var) and e.name in scalars:
        return scalars[e.name]
    raise RenderError(f"{e} is no constant, as a parameter of an instruction must be")


LARGE = 1 << 40


def _times(parts: tuple[tuple[Any, int], ...], by: int) -> tuple[tuple[Any, int], ...]:
    return tuple((part, step * by) for part, step in parts)


def _over(parts: tuple[tuple[Any, int], ...], by: int) -> tuple[tuple[Any, int], ...]:
    return tuple((part, step // by) for part, step in parts)


def block_fields(dims: Sequence[Dim], piece: int) -> Fields:
    """Fields of the sizes and steps of a LOAD without padding, or of a STORE."""
    try:
        x, y, z = coalesce(list(dims), piece)
    except TilingError as error:
        raise NotOneInstruction(str(error)) from None
    return {
        "dram_y": y.dram, "dram_z": z.dram, "x_size": x.count, "y_size": y.count, "z_size": z.count,
        "sram_x": x.sram, "sram_y": y.sram, "sram_z": z.sram,
    }  # fmt: skip


Numbered = tuple[int, Dim]


@cache
def as_planes(dims: tuple[Dim, ...], piece: int, bounded: frozenset[int]) -> tuple[Numbered, Numbered, Numbered]:
    """Arrange dimensions as planes, rows and elements of a padded LOAD, each with the number of its loop.

    Bounded loops are rows and elements of their own, others are planes or are joined with each other.
    NotOneInstruction where that is impossible.
    """
    some = [(number, dim) for number, dim in enumerate(dims) if dim.count > 1 or number in bounded]
    reason = "a padded block has at most planes, rows and elements"
    for planes, rows, elements in product((None, *some), repeat=3):
        chosen = [part for part in (planes, rows, elements) if part is not None]
        numbers = [number for number, _ in chosen]
        if len(set(numbers)) != len(chosen) or (planes is not None and planes[0] in bounded):
            continue
        if elements is not None and elements[1].dram != piece:
            continue
        if not bounded <= set(numbers):
            continue
        rest = [dim for number, dim in some if number not in numbers]
        if rest:
            continue
        nothing = (-1, Dim(1, 0, 0))
        z, y, x = planes or nothing, rows or nothing, elements or (-1, Dim(1, piece, 1))
        if x[1].count <= X_MAX and max(y[1].count, z[1].count) <= YZ_MAX:
            return z, y, x
    joined = _joined(dims, bounded)
    if joined is not None:
        return as_planes(joined, piece, bounded)
    raise NotOneInstruction(reason)


def _joined(dims: tuple[Dim, ...], bounded: frozenset[int]) -> tuple[Dim, ...] | None:
    """Join two loops that are not bounded and step evenly, so that the block has one less. None where none do."""
    for a, outer in enumerate(dims):
        for b, inner in enumerate(dims):
            free = a != b and a not in bounded and b not in bounded and outer.count > 1 and inner.count > 1
            if free and (outer.dram, outer.sram) == (inner.count * inner.dram, inner.count * inner.sram):
                changed = list(dims)
                changed[a], changed[b] = Dim(1, 0, 0), Dim(outer.count * inner.count, inner.dram, inner.sram)
                return tuple(changed)
    return None


Dims = list[tuple[int, dict[str, int], int | None]]
"""Loops: extent, step of each operand, and the loop's number where only some of its iterations exist."""
