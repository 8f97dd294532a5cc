"""Instructions whose addresses depend on the loops around them: fields that stay constant, and fields that change.

instruction_builder.py builds one from an intrinsic and its loops, once. `fields` then gives the instruction for values
of the loops outside, by additions only: addresses are linear in these loops, and padding is how far a block reaches
beyond the borders of its tensor.

In order: GEMM and VECTOR; LOAD and STORE; addresses and limits in terms of the loops outside; and how the dimensions of
a block are merged, so that one LOAD or STORE moves it in long rows of DRAM.
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
from celosia.compiler.tensorize.intrinsic import Compute
from celosia.hw.spec.isa import OUTER_LOOPS, PAD_BITS, X_BITS, YZ_BITS, Opcode

Env = dict[Var, int]
"""Value of each loop variable."""
Fields = dict[str, int]
"""Value of each field of an instruction."""


class RenderError(ValueError):
    """Raised for loops that the accelerator cannot run; the message says why."""


class NotOneInstruction(Exception):
    """Raised for loops that are not a single instruction, so that the outermost is unrolled; the message says why."""


# GEMM and VECTOR -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComputeInstruction:
    """GEMM or VECTOR whose addresses are not known yet.

    static: fields that are always the same. bases: fields that hold addresses: (field, scratchpad tensor, address
    within it, addresses of one entry). begins: for GEMM, the loops outside that must be at 0 for it to overwrite acc;
    None if it always accumulates. parameters: of the rule's fields. bounds: (loop's letter, limit); iterations outside
    of the limits write the number `pad`.
    """

    opcode: Opcode
    static: Fields
    bases: tuple[tuple[str, Tensor, LinearForm, int], ...]
    begins: tuple[Var, ...] | None
    parameters: Mapping[str, Expr]
    rule: Compute
    bounds: tuple[tuple[str, Limit], ...] = ()
    pad: Expr | None = None

    @property
    def scratchpads(self) -> list[Tensor]:
        """Scratchpad tensors that the instruction reads or writes."""
        return [tensor for _, tensor, _, _ in self.bases]

    def touched_entries(self, env: Env, of: Tensor, constants: Fields, written: bool, taps: int) -> set[int]:
        """Return the entries of tensor `of` that are written (if `written`) or read, counted from its first. taps:
        Config's."""
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
        """Return the fields that no loop outside changes. scalars: values of the function's scalars."""
        values = {name: _scalar(e, scalars) for name, e in self.parameters.items()}
        fields = self.static | self.rule.fields(**values) if values else self.static
        return fields if self.pad is None else fields | {PAD: int(_scalar(self.pad, scalars))}

    def instructions(self, env: Env, slots: Mapping[Tensor, int], constants: Fields) -> Iterator[Fields]:
        """Yield the fields of the instruction for the iterations that exist, then of instructions that fill the others.

        slots: first entries of the tensors. constants: from the method `constants`.
        """
        fields = self.fields(env, slots, constants)
        pad = fields.pop(PAD, 0)
        if not self.bounds:
            yield fields
            return
        ranges: dict[str, tuple[int, int]] = {}
        for loop, bound in self.bounds:
            first, end = ranges.get(loop, (0, fields[f"extent_{loop}"]))
            limit = bound.at(env)
            ranges[loop] = (max(first, limit), end) if bound.lower else (first, min(end, limit))
        if any(first >= end for first, end in ranges.values()):
            raise TilingError("a tile that lies in the padding alone")
        inside = _restrict(fields, ranges)
        yield inside
        # An instruction that fills reads an entry that exists, and clips it to the number.
        filled = {name: value for name, value in fields.items() if name in _FILL_FIELDS}
        filled |= {"a_base": inside["a_base"], "extent_r": 1, "extent_s": 1, "clip_lo": pad, "clip_hi": pad}
        for loop, (first, end) in ranges.items():
            for part in ((0, first), (end, filled[f"extent_{loop}"])):
                if part[0] < part[1]:
                    yield _restrict(filled, {loop: part})
            filled = _restrict(filled, {loop: (first, end)})

    def fields(self, env: Env, slots: Mapping[Tensor, int], constants: Fields) -> Fields:
        """Return all fields for values of the loops outside. slots, constants: see `instructions`."""
        fields = dict(constants)
        for name, tensor, place, places in self.bases:
            fields[name] = slots[tensor] * places + place.at(env)
        if self.opcode == Opcode.GEMM:
            fields["accumulate"] = int(self.begins is None or any(env[var] for var in self.begins))
        return fields


PAD = "pad"
"""Key among an instruction's constants: the number that fills entries without a result."""
_FILL_FIELDS = {"a_source", "destination", "dst_base", "extent_r", "extent_s"} | {
    f"{name}_{loop}" for name in ("extent", "dst") for loop in OUTER_LOOPS
}
"""Fields that an instruction which only fills takes over."""


def _restrict(fields: Fields, ranges: Mapping[str, tuple[int, int]]) -> Fields:
    """Return the fields of an instruction restricted to iterations [first, end) of some of its loops."""
    fields = dict(fields)
    for loop, (first, end) in ranges.items():
        fields[f"extent_{loop}"] = end - first
        for base in [name for name in fields if name.endswith("_base")]:
            fields[base] += first * fields.get(f"{base.removesuffix('_base')}_{loop}", 0)
    return fields


# LOAD and STORE ------------------------------------------------------------------------------------------------


class _PartialMove(NamedTuple):
    """A LOAD or STORE of which only some iterations exist.

    fields: without addresses. address, place: bytes of DRAM and pieces of the scratchpad by which it begins later than
    the whole block.
    """

    fields: Fields
    address: int
    place: int


@dataclass(frozen=True)
class MoveInstruction:
    """LOAD or STORE of a block of up to three dimensions.

    static: fields that are always the same. on_chip, tensor: tensors in the scratchpad and in DRAM. pieces: pieces of
    an entry. place: pieces from the begin of `on_chip`. address: bytes from the begin of `tensor`. dims: of the loops,
    from the outermost. whole: fields if all iterations exist. bounds: limits of the loops; a LOAD fills iterations
    outside with padding, a STORE leaves them out. pad: value of padding. index: for each dimension of `tensor`, the
    index where the block begins, and how far the block reaches beyond it.
    """

    opcode: Opcode
    static: Fields
    on_chip: Tensor
    tensor: Tensor
    pieces: int
    place: LinearForm
    address: LinearForm
    dims: tuple[Dim, ...]
    whole: Fields
    bounds: tuple[Limit, ...]
    pad: Expr | None
    piece_bytes: int
    index: tuple[tuple[LinearForm, int], ...]
    _partial_moves: dict[Hashable, _PartialMove | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Cache by the iterations that exist; the tiles of a loop have few different ones."""

    @property
    def loads(self) -> bool:
        """Whether it is a LOAD."""
        return self.opcode == Opcode.LOAD

    @property
    def scratchpads(self) -> list[Tensor]:
        """The tensor in the scratchpad."""
        return [self.on_chip]

    def at_entry(self, fields: Fields, first: int) -> Fields:
        """Change `fields`, computed for entry 0 of the scratchpad, to begin at entry `first`, and return them."""
        fields["sram_base"] += first * self.pieces
        return fields

    def constants(self, scalars: Mapping[str, Any]) -> Fields:
        """Return the fields of a block of which all iterations exist, with the value of padding."""
        return self.whole if self.pad is None else self.whole | {"pad_value": int(_scalar(self.pad, scalars))}

    def fields(self, env: Env, first: int, begin: int, constants: Fields) -> Fields | None:
        """Return all fields for values of the loops outside; None if there is nothing to move.

        first: entry of the scratchpad tensor. begin: byte of the tensor in DRAM. constants: from the method
        `constants`. Raises TilingError if it is padding only, or no single transfer.
        """
        address, place = begin + self.address.at(env), first * self.pieces + self.place.at(env)
        ranges = self._ranges(env)
        if ranges is None:
            fields = dict(constants)
        else:
            part = self._partial_move(ranges)
            if part is None:
                return None
            fields, address, place = dict(part.fields), address + part.address, place + part.place
            if self.loads:
                fields["pad_value"] = constants["pad_value"]
        fields["dram_addr"], fields["sram_base"] = address, place
        return fields

    def _ranges(self, env: Env) -> dict[int, tuple[int, int]] | None:
        """Return the iterations [first, end) of each loop of which not all exist; None if all exist."""
        ranges: dict[int, tuple[int, int]] = {}
        for bound in self.bounds:
            extent = self.dims[bound.number].count
            first, end = ranges.get(bound.number, (0, extent))
            limit = bound.at(env)
            first, end = (max(first, limit), end) if bound.lower else (first, min(end, limit))
            if (first, end) != (0, extent):
                ranges[bound.number] = first, end
        return ranges or None

    def _partial_move(self, ranges: dict[int, tuple[int, int]]) -> _PartialMove | None:
        """Return the transfer of these iterations, computed once; None if there is nothing to move. Raises
        TilingError."""
        key = tuple(ranges.items())
        if key not in self._partial_moves:
            self._partial_moves[key] = self._make_partial_move(ranges)
        return self._partial_moves[key]

    def _make_partial_move(self, ranges: dict[int, tuple[int, int]]) -> _PartialMove | None:
        """Compute the transfer of these iterations; see `_partial_move`."""
        if any(first >= end for first, end in ranges.values()):
            if not self.loads:
                return None
            raise TilingError("a tile that lies in the padding alone")
        try:
            return self._pad_load(ranges) if self.loads else self._cut_store(ranges)
        except NotOneInstruction as refused:
            raise TilingError(str(refused)) from None

    def _cut_store(self, ranges: dict[int, tuple[int, int]]) -> _PartialMove:
        """Return the STORE of these ranges of its dimensions only."""
        dims = list(self.dims)
        address = place = 0
        for number, (first, end) in ranges.items():
            dim = dims[number]
            address, place = address + first * dim.dram, place + first * dim.sram
            dims[number] = replace(dim, count=end - first)
        return _PartialMove({**self.static, **block_fields(dims, self.piece_bytes)}, address, place)

    def _pad_load(self, ranges: dict[int, tuple[int, int]]) -> _PartialMove:
        """Return the LOAD of these ranges of its dimensions, with padding for the other iterations."""
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
        return _PartialMove({**self.static, **pads, **fields}, address, 0)

    def check(self, env: Env) -> None:
        """Raise TilingError if `fields` would for these values of the loops outside."""
        if ranges := self._ranges(env):
            self._partial_move(ranges)

    def span(self, dimension: int, env: Env) -> tuple[int, int]:
        """Return the indices [first, end) of one dimension of `tensor` that are moved, without padding.

        launch/overlap.py derives from them which rows a tile needs, and which it completes.
        """
        first, reach = self.index[dimension]
        begin = first.at(env)
        return max(begin, 0), min(begin + reach + 1, self.tensor.shape[dimension])

    def moved_pieces(self, env: Env) -> int:
        """Return the number of pieces that are moved, without padding, for the work by which overlap.py mixes tiles."""
        ranges = self._ranges(env) or {}
        return prod(ranges[n][1] - ranges[n][0] if n in ranges else dim.count for n, dim in enumerate(self.dims))


def _scalar(e: Expr, scalars: Mapping[str, Any]) -> Any:
    """Return the value of a parameter: a constant or one of `scalars`. Raises RenderError for another expression."""
    if isinstance(e, Const):
        return e.value
    if isinstance(e, Var) and e.name in scalars:
        return scalars[e.name]
    raise RenderError(f"{e} is no constant, as a parameter of an instruction must be")


# Addresses and limits ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearForm:
    """An index or address: base + sum of variable * step over the loops outside the instruction.

    terms: (variable, step). others: (expression of these loops that is no variable, step).
    """

    base: int
    terms: tuple[tuple[Var, int], ...] = ()
    others: tuple[tuple[Expr, int], ...] = ()

    def at(self, env: Mapping[Var, int]) -> int:
        """Return the value for these values of the variables."""
        total = self.base
        for var, step in self.terms:
            total += env[var] * step
        for other, step in self.others:
            total += int(evaluate(other, env)) * step
        return total

    def plus(self, base: int) -> LinearForm:
        """Return the sum with a constant."""
        return LinearForm(self.base + base, self.terms, self.others)

    def scaled(self, by: int) -> LinearForm:
        """Return the product with a constant."""
        return LinearForm(self.base * by, _scale_steps(self.terms, by), _scale_steps(self.others, by))

    def divided(self, by: int) -> LinearForm | None:
        """Return the quotient by a constant; None if the base or a step is no multiple of it."""
        parts = (*self.terms, *self.others)
        if self.base % by or any(step % by for _, step in parts):
            return None
        return LinearForm(self.base // by, _divide_steps(self.terms, by), _divide_steps(self.others, by))


def _scale_steps(parts: tuple[tuple[Any, int], ...], by: int) -> tuple[tuple[Any, int], ...]:
    """Return `parts` with all steps multiplied."""
    return tuple((part, step * by) for part, step in parts)


def _divide_steps(parts: tuple[tuple[Any, int], ...], by: int) -> tuple[tuple[Any, int], ...]:
    """Return `parts` with all steps divided."""
    return tuple((part, step // by) for part, step in parts)


@dataclass(frozen=True)
class TileAccess:
    """Where a tile begins in its tensor, in elements, and the step by which each loop of the instruction moves it."""

    begin: LinearForm
    steps: tuple[int, ...]

    def in_units(self, size: int, what: object) -> TileAccess:
        """Convert to units of `size` elements. Raises NotOneInstruction, naming `what`, if these are no whole
        numbers."""
        begin = self.begin.divided(size)
        if begin is None or any(step % size for step in self.steps):
            raise NotOneInstruction(f"{what} begins or moves by other than multiples of {size} elements")
        return TileAccess(begin, tuple(step // size for step in self.steps))


@dataclass(frozen=True)
class Limit:
    """A bound of loop `number` of the instruction.

    Iterations i exist for which low + i * step >= 0 if it is a `lower` bound, else those for which i * step < low.
    """

    number: int
    low: LinearForm
    step: int
    lower: bool

    def at(self, env: Mapping[Var, int]) -> int:
        """Return the first iteration that exists, of a `lower` bound; else the end of those that exist."""
        value = self.low.at(env)
        return -(value // self.step) if self.lower else -(-value // self.step)


# Dimensions of a block in DRAM ---------------------------------------------------------------------------------

X_MAX, YZ_MAX, PAD_MAX = (1 << X_BITS) - 1, (1 << YZ_BITS) - 1, (1 << PAD_BITS) - 1
"""Largest values of an instruction's fields: pieces of a row, rows or planes, and padding on one side."""


@dataclass(frozen=True)
class Dim:
    """One dimension of a block: number of steps, bytes of a step in DRAM, pieces of a step in the scratchpad."""

    count: int
    dram: int
    sram: int


def coalesce(dims: list[Dim], piece: int) -> list[Dim]:
    """Merge dimensions into [x, y, z], the three that an instruction has, which visit the same pieces; x is contiguous.

    piece: bytes of a piece. Raises TilingError if more than three are left, or one is too long for its field.
    """
    dims = [dim for dim in dims if dim.count > 1]
    dims.sort(key=lambda dim: (dim.dram == 0, dim.dram))
    merged: list[Dim] = []
    for dim in dims:
        last = merged[-1] if merged else None
        if (
            last is not None
            and dim.dram == last.count * last.dram
            and dim.sram == last.count * last.sram
            and last.count * dim.count <= (X_MAX if last.dram == piece else YZ_MAX)
        ):
            merged[-1] = Dim(last.count * dim.count, last.dram, last.sram)
        else:
            merged.append(dim)
    if not merged or merged[0].dram != piece:
        merged.insert(0, Dim(1, piece, 1))
    merged += [Dim(1, 0, 0)] * (3 - len(merged))
    if len(merged) > 3 or merged[0].count > X_MAX or max(dim.count for dim in merged[1:]) > YZ_MAX:
        raise TilingError(f"a block of {'x'.join(str(d.count) for d in merged)} pieces is not one transfer")
    return merged


def block_fields(dims: Sequence[Dim], piece: int) -> Fields:
    """Return the size and stride fields of a STORE, or of a LOAD without padding. Raises NotOneInstruction.

    piece: bytes of a piece in DRAM.
    """
    try:
        x, y, z = coalesce(list(dims), piece)
    except TilingError as error:
        raise NotOneInstruction(str(error)) from None
    return {
        "dram_y": y.dram, "dram_z": z.dram, "x_size": x.count, "y_size": y.count, "z_size": z.count,
        "sram_x": x.sram, "sram_y": y.sram, "sram_z": z.sram,
    }  # fmt: skip


Numbered = tuple[int, Dim]
"""Number of a loop and its dimension."""


@cache
def as_planes(dims: tuple[Dim, ...], piece: int, bounded: frozenset[int]) -> tuple[Numbered, Numbered, Numbered]:
    """Arrange dimensions as (planes, rows, elements) of a padded LOAD, each with the number of its loop.

    Only rows and elements can have padding, so bounded loops must become these; other loops may be joined. Raises
    NotOneInstruction if that is impossible.
    """
    candidates = [(number, dim) for number, dim in enumerate(dims) if dim.count > 1 or number in bounded]
    reason = "a padded block has at most planes, rows and elements"
    for planes, rows, elements in product((None, *candidates), repeat=3):
        chosen = [part for part in (planes, rows, elements) if part is not None]
        numbers = [number for number, _ in chosen]
        if len(set(numbers)) != len(chosen) or (planes is not None and planes[0] in bounded):
            continue
        if elements is not None and elements[1].dram != piece:
            continue
        if not bounded <= set(numbers):
            continue
        if any(number not in numbers for number, _ in candidates):
            continue
        no_loop = (-1, Dim(1, 0, 0))
        z, y, x = planes or no_loop, rows or no_loop, elements or (-1, Dim(1, piece, 1))
        if x[1].count <= X_MAX and max(y[1].count, z[1].count) <= YZ_MAX:
            return z, y, x
    fewer_dims = _join_even_loops(dims, bounded)
    if fewer_dims is not None:
        return as_planes(fewer_dims, piece, bounded)
    raise NotOneInstruction(reason)


def _join_even_loops(dims: tuple[Dim, ...], bounded: frozenset[int]) -> tuple[Dim, ...] | None:
    """Join two unbounded loops of which one continues the other, so that the block has one loop less; None if none
    do."""
    for a, outer in enumerate(dims):
        for b, inner in enumerate(dims):
            can_join = a != b and a not in bounded and b not in bounded and outer.count > 1 and inner.count > 1
            if can_join and (outer.dram, outer.sram) == (inner.count * inner.dram, inner.count * inner.sram):
                changed = list(dims)
                changed[a], changed[b] = Dim(1, 0, 0), Dim(outer.count * inner.count, inner.dram, inner.sram)
                return tuple(changed)
    return None
