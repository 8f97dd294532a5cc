"""One intrinsic in its loops as one instruction: what is the same in all iterations, and what loops outside change.

`make` looks at the loops once. `fields` then gives the instruction for values of the loops outside, with additions
only: addresses are sums over these loops, and padding is how far a block reaches over the borders of its tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import prod
from typing import Any

from celosia.compiler.expr.affine import linear
from celosia.compiler.expr.interpret import evaluate
from celosia.compiler.expr.loops import For, Intrinsic
from celosia.compiler.expr.nodes import INDEX, Binary, Const, Expr, Load, Tensor, Var, strides, substitute, walk
from celosia.compiler.layer import Untileable
from celosia.compiler.tensorize import intrinsic as rules
from celosia.compiler.tensorize.intrinsic import TensorIntrinsic
from celosia.compiler.tensorize.intrinsics import BUFFERS, element_shape, tile_shape
from celosia.compiler.tensorize.transfer import PAD_MAX, X_MAX, YZ_MAX, Dim, coalesce
from celosia.hw.config import Config
from celosia.hw.isa import EXTENT_BITS, OUTER_LOOPS, Opcode, formats

Env = dict[Var, int]
Fields = dict[str, int]


BY_BLOCK = ("wgt", "par", "tap")
"""Operands that are the same for all pixels of an output block."""


class RenderError(ValueError):
    """Loops that the accelerator cannot run; the message says why."""


class Refused(Exception):
    """Why these loops are not one instruction."""


@dataclass(frozen=True)
class Sum:
    """base + sum of variable * step: an index, by the loops outside. others: expressions of them that are no variables,
    and their steps."""

    base: int
    terms: tuple[tuple[Var, int], ...] = ()
    others: tuple[tuple[Expr, int], ...] = ()

    def at(self, env: Mapping[Var, int]) -> int:
        total = self.base
        for var, step in self.terms:
            total += env[var] * step
        for other, step in self.others:
            total += int(evaluate(other, env)) * step
        return total

    def plus(self, base: int) -> Sum:
        return Sum(self.base + base, self.terms, self.others)

    def scaled(self, by: int) -> Sum:
        return Sum(self.base * by, _times(self.terms, by), _times(self.others, by))

    def divided(self, by: int) -> Sum | None:
        """None where a part cannot be divided."""
        parts = (*self.terms, *self.others)
        if self.base % by or any(step % by for _, step in parts):
            return None
        return Sum(self.base // by, _over(self.terms, by), _over(self.others, by))


@dataclass(frozen=True)
class Access:
    """The begin of a tile, as elements of its tensor, and by how much each loop of the instruction moves it."""

    begin: Sum
    steps: tuple[int, ...]

    def in_units(self, size: int, what: object) -> Access:
        begin = self.begin.divided(size)
        if begin is None or any(step % size for step in self.steps):
            raise Refused(f"{what} begins or moves by other than multiples of {size} elements")
        return Access(begin, tuple(step // size for step in self.steps))


@dataclass(frozen=True)
class Bound:
    """Which iterations i of loop `number` exist: those with low + i * step >= 0 where `lower`, else those with
    i * step < low."""

    number: int
    low: Sum
    step: int
    lower: bool

    def at(self, env: Mapping[Var, int]) -> int:
        value = self.low.at(env)
        return -(value // self.step) if self.lower else -(-value // self.step)


@dataclass(frozen=True)
class Compute:
    """GEMM or VECTOR. bases: fields that hold addresses, with the scratchpad tensor, the place within it, and how many
    places are an entry.

    bounds: which iterations exist of which loop of the instruction; the others give the number `pad`.
    """

    opcode: Opcode
    static: Fields
    bases: tuple[tuple[str, Tensor, Sum, int], ...]
    begins: tuple[Var, ...] | None
    """GEMM: loops outside that must be at 0 for it to overwrite; None where it always accumulates."""
    parameters: Mapping[str, Expr]
    rule: rules.Compute
    bounds: tuple[tuple[str, Bound], ...] = ()
    pad: Expr | None = None

    @property
    def scratchpads(self) -> list[Tensor]:
        return [tensor for _, tensor, _, _ in self.bases]

    def touched(self, env: Env, of: Tensor, constants: Fields, written: bool, taps: int) -> set[int]:
        """Entries of `of`, counted from its first one, that it writes, or that it reads. taps: those of the Config."""
        found: set[int] = set()
        for name, tensor, _, places in self.bases:
            if tensor is not of or written != (name == "dst_base"):
                continue
            operand = name.removesuffix("_base")
            for fields in self.instructions(env, dict.fromkeys(self.scratchpads, 0), constants):
                entries = {fields[name]}
                for loop in (field.removeprefix("extent_") for field in fields if field.startswith("extent_")):
                    step = fields.get(f"{operand}_{loop}", 0)
                    entries = {entry + i * step for entry in entries for i in range(fields[f"extent_{loop}"])}
                reach = taps if fields.get("taps") and operand == "a" else 1
                found |= {entry // places + i for entry in entries for i in range(reach)}
        return found

    def constants(self, scalars: Mapping[str, Any]) -> Fields:
        """The fields that no loop outside changes."""
        values = {name: _scalar(e, scalars) for name, e in self.parameters.items()}
        fields = self.static | self.rule.fields(**values) if values else self.static
        return fields if self.pad is None else fields | {PAD: int(_scalar(self.pad, scalars))}

    def instructions(self, env: Env, slots: Mapping[Tensor, int], constants: Fields) -> Iterator[Fields]:
        """The fields of what computes the iterations that exist, and of what fills the others."""
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
            raise Untileable("a tile that lies in the padding alone")
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
        """All fields, with `constants` as they were found before."""
        fields = dict(constants)
        for name, tensor, place, places in self.bases:
            fields[name] = slots[tensor] * places + place.at(env)
        if self.opcode == Opcode.GEMM:
            fields["accumulate"] = int(self.begins is None or any(env[var] for var in self.begins))
        return fields


PAD = "pad"
"""Among the constants of an instruction: what fills places that have no result."""
_FILLING = {"a_source", "destination", "dst_base", "extent_r", "extent_s"} | {
    f"{name}_{loop}" for name in ("extent", "dst") for loop in OUTER_LOOPS
}


def _restricted(fields: Fields, ranges: Mapping[str, tuple[int, int]]) -> Fields:
    """The instruction for iterations [first, end) of loops alone."""
    fields = dict(fields)
    for loop, (first, end) in ranges.items():
        fields[f"extent_{loop}"] = end - first
        for base in [name for name in fields if name.endswith("_base")]:
            fields[base] += first * fields.get(f"{base.removesuffix('_base')}_{loop}", 0)
    return fields


@dataclass(frozen=True)
class Move:
    """LOAD or STORE of a block of up to three dimensions.

    near, tensor: in the scratchpad and in DRAM. pieces: elements of an entry. address: bytes from the begin of
    `tensor`. dims: as the loops have them, from the outermost. bounds: which iterations exist; of a LOAD the others are
    padding, of a STORE they are left out.
    """

    opcode: Opcode
    static: Fields
    near: Tensor
    tensor: Tensor
    pieces: int
    place: Sum
    address: Sum
    dims: tuple[Dim, ...]
    whole: Fields
    bounds: tuple[Bound, ...]
    pad: Expr | None
    piece_bytes: int
    index: tuple[tuple[Sum, int], ...]
    """For each dimension of `tensor`: the index at the begin, and how far the block reaches beyond it."""

    @property
    def loads(self) -> bool:
        return self.opcode == Opcode.LOAD

    @property
    def scratchpads(self) -> list[Tensor]:
        return [self.near]

    def moved(self, fields: Fields, first: int) -> Fields:
        """`fields`, with the scratchpad tensor at entry `first` in the place of 0."""
        fields["sram_base"] += first * self.pieces
        return fields

    def constants(self, scalars: Mapping[str, Any]) -> Fields:
        """The fields that no loop outside changes, of a block that exists as a whole; and the value of padding."""
        return self.whole if self.pad is None else self.whole | {"pad_value": int(_scalar(self.pad, scalars))}

    def fields(self, env: Env, first: int, begin: int, constants: Fields) -> Fields | None:
        """All fields; None where nothing is to be moved. Untileable for padding alone, or no single transfer.

        first: entry of the scratchpad tensor. begin: byte of the tensor in DRAM. constants: as they were found before.
        """
        address, place = begin + self.address.at(env), first * self.pieces + self.place.at(env)
        ranges = self._ranges(env)
        if ranges is None:
            fields = dict(constants)
            fields["dram_addr"], fields["sram_base"] = address, place
            return fields
        try:
            return self._partly(ranges, address, place, constants)
        except Refused as refused:
            raise Untileable(str(refused)) from None

    def _ranges(self, env: Env) -> dict[int, tuple[int, int]] | None:
        """For each loop that is bounded the iterations [first, end) that exist; None where all do."""
        ranges: dict[int, tuple[int, int]] = {}
        for bound in self.bounds:
            extent = self.dims[bound.number].count
            first, end = ranges.get(bound.number, (0, extent))
            at = bound.at(env)
            first, end = (max(first, at), end) if bound.lower else (first, min(end, at))
            if (first, end) != (0, extent):
                ranges[bound.number] = first, end
        return ranges or None

    def _partly(self, ranges: dict[int, tuple[int, int]], address: int, place: int, constants: Fields) -> Fields | None:
        if any(first >= end for first, end in ranges.values()):
            if not self.loads:
                return None
            raise Untileable("a tile that lies in the padding alone")
        if not self.loads:
            dims = list(self.dims)
            for number, (first, end) in ranges.items():
                dim = dims[number]
                address, place = address + first * dim.dram, place + first * dim.sram
                dims[number] = replace(dim, count=end - first)
            fields = _block(dims, self.piece_bytes)
            return {**self.static, **fields, "dram_addr": address, "sram_base": place}
        z, y, x = _as_planes(self.dims, self.piece_bytes, frozenset(ranges))
        pads: dict[str, int] = {}
        sizes = []
        for (number, dim), sides in zip((z, y, x), (None, ("top", "bottom"), ("left", "right"))):
            first, end = ranges.get(number, (0, dim.count))
            sizes.append(end - first)
            address += first * dim.dram
            if sides is not None:
                pads |= {f"pad_{sides[0]}": first, f"pad_{sides[1]}": dim.count - end}
        if max(pads.values()) > PAD_MAX:
            raise Untileable(f"more than {PAD_MAX} rows or columns of padding")
        return {
            **self.static, **pads, "pad_value": constants["pad_value"], "dram_addr": address,
            "dram_y": y[1].dram, "dram_z": z[1].dram, "x_size": sizes[2], "y_size": sizes[1], "z_size": sizes[0],
            "sram_base": place, "sram_x": x[1].sram, "sram_y": y[1].sram, "sram_z": z[1].sram,
        }  # fmt: skip

    def check(self, env: Env) -> None:
        """Untileable where `fields` is."""
        if self.bounds:
            self.fields(env, 0, 0, self.whole | {"pad_value": 0})

    def span(self, dimension: int, env: Env) -> tuple[int, int]:
        """Indices [first, end) of one dimension of `tensor` that it touches, those in the padding left out."""
        first, reach = self.index[dimension]
        begin = first.at(env)
        return max(begin, 0), min(begin + reach + 1, self.tensor.shape[dimension])

    def moved_pieces(self, env: Env) -> int:
        """Elements that it moves, padding left out."""
        ranges = self._ranges(env) or {}
        return prod(ranges[n][1] - ranges[n][0] if n in ranges else dim.count for n, dim in enumerate(self.dims))


def _scalar(e: Expr, scalars: Mapping[str, Any]) -> Any:
    """The value of a parameter: a constant, or a scalar of the function."""
    if isinstance(e, Const):
        return e.value
    if isinstance(e, Var) and e.name in scalars:
        return scalars[e.name]
    raise RenderError(f"{e} is no constant, as a parameter of an instruction must be")


# Making them --------------------------------------------------------------------------------------------------


def make(
    cfg: Config, loops: Sequence[For], tests: Sequence[Expr], leaf: Intrinsic, fixed: Env,
    scopes: Mapping[Tensor, str], places: Mapping[Tensor, tuple[int, ...]],
) -> Compute | Move:  # fmt: skip
    """`leaf` inside all of `loops`, where `tests` hold, as one instruction. Refused where it is none.

    fixed: values of loops around. scopes: the scratchpad of tensors. places: see render.compile_loops.
    """
    intrinsic = leaf.declared
    assert isinstance(intrinsic, TensorIntrinsic)
    tiles, values, first = intrinsic.split_args(leaf.args)
    window = intrinsic.window(leaf.args)
    fixed = fixed | {loop.var: 0 for loop in loops if loop.extent == 1} | {w: 0 for w in window if w.extent == 1}
    inner = [(loop.var, loop.extent) for loop in loops if loop.extent > 1]
    inner += [(axis, axis.extent) for axis in window if axis.extent > 1]
    maker = _Maker(cfg, inner, fixed, scopes, places)
    if isinstance(intrinsic.rule, rules.Compute):
        if tests:
            raise Refused("it has a condition")
        return maker.compute(intrinsic, intrinsic.rule, tiles, values, first, set(window))
    return maker.move(intrinsic, intrinsic.rule, tiles, values, tests)


class _Maker:
    def __init__(
        self, cfg: Config, loops: list[tuple[Var, int]], fixed: Env, scopes: Mapping[Tensor, str],
        places: Mapping[Tensor, tuple[int, ...]],
    ) -> None:  # fmt: skip
        self.cfg, self.loops, self.fixed, self.scopes, self.places = cfg, loops, fixed, scopes, places
        self.number = {var: d for d, (var, _) in enumerate(loops)}

    def _sum(self, parts: Iterable[tuple[Expr, int]], what: object) -> Access:
        """The sum of expressions times factors."""
        base, steps = 0, [0] * len(self.loops)
        terms: dict[Var, int] = {}
        others: list[tuple[Expr, int]] = []
        for e, factor in parts:
            for atom, k in linear(e).items():
                if atom is None:
                    base += k * factor
                elif isinstance(atom, Var) and atom in self.number:
                    steps[self.number[atom]] += k * factor
                elif any(isinstance(node, Var) and node in self.number for node in walk(atom)):
                    raise Refused(f"{what} is not affine in its loops")
                elif isinstance(atom, Var) and atom not in self.fixed:
                    terms[atom] = terms.get(atom, 0) + k * factor
                elif all(n in self.fixed for n in walk(atom) if isinstance(n, Var)):
                    base += k * factor * int(evaluate(atom, {v: i for v, i in self.fixed.items() if _reads(atom, v)}))
                else:
                    others.append((substitute(atom, {v: Const(i, INDEX) for v, i in self.fixed.items()}), k * factor))
        begin = Sum(base, tuple((var, k) for var, k in terms.items() if k), tuple(others))
        return Access(begin, tuple(steps))

    def _near(self, load: Load, unit: int) -> Access:
        """In units of `unit` elements of the tensor in a scratchpad."""
        if load.tensor not in self.scopes:
            raise RenderError(f"{load.tensor.name} is in no scratchpad")
        shape = load.tensor.shape
        parts = [(load.index[0], 1)] if len(load.index) == 1 else list(zip(load.index, strides(shape)))
        return self._sum(parts, load).in_units(unit, load)

    # GEMM and VECTOR

    def compute(
        self, intrinsic: TensorIntrinsic, rule: rules.Compute, tiles: Mapping[Tensor, Load], values: Mapping[Var, Expr],
        first: Expr, window: set[Any],
    ) -> Compute:  # fmt: skip
        accesses = {rule.operands[tile.name]: self._near(load, intrinsic.unit(tile)) for tile, load in tiles.items()}
        tensors = {rule.operands[tile.name]: load.tensor for tile, load in tiles.items()}
        places = {
            rule.operands[tile.name]: prod(tile_shape(self.cfg, self.scopes[load.tensor])) // intrinsic.unit(tile)
            for tile, load in tiles.items()
        }
        target = rule.operands[intrinsic.behaviour.name]
        named = {var.name: e for var, e in values.items()}
        found = [self._bound(test) for test in _conjuncts(named.pop("inside", Const(True, "bool")))]
        bounds = [bound for bound in found if bound is not None]
        bounded = {bound.number for bound in bounds}
        data: Dims = []
        sums: Dims = []
        for d, (var, extent) in enumerate(self.loops):
            steps = {name: access.steps[d] for name, access in accesses.items()}
            (sums if var in window or not steps[target] else data).append((extent, steps, d if d in bounded else None))
        begins: tuple[Var, ...] | None = ()
        if intrinsic.reduces:
            begins = self._begins(first)
            if rule.opcode != Opcode.GEMM and begins != ():
                raise Refused("its reduction does not fit into one instruction")
        elif any(var not in window for (var, _), row in zip(self.loops, self._steps(accesses)) if not row[target]):
            raise Refused("it writes the same place again")
        form = formats(self.cfg)[rule.opcode]
        static = {field.name: 1 for field in form.fields if field.name.startswith("extent_")}
        slot_of: dict[int | None, str] = {}
        inner = {Opcode.GEMM: "krs", Opcode.VECTOR: "rs"}[rule.opcode]
        for slots, dims in (("nyx", _merged(data)), (inner, _merged(sums))):
            if len(dims) > len(slots):
                raise Refused(f"{rule.opcode.name} has {len(slots)} such loops, not {len(dims)}")
            names = slots[len(slots) - len(dims) :]
            blocks = [steps for _, steps, _ in dims if slots == "nyx" and any(steps.get(name) for name in BY_BLOCK)]
            if len(blocks) > 1:
                raise Refused("output blocks are one loop of an instruction")
            if blocks and blocks[0] is dims[0][1]:
                names = slots[0] + slots[len(slots) - len(dims) + 1 :]  # output blocks are loop n, pixels y and x
            if len(dims) == 1 and slots == "krs":
                names = "k"  # input blocks, where the window is one pixel
            for slot, (extent, steps, number) in zip(names, dims):
                slot_of[number] = slot
                static[f"extent_{slot}"] = extent
                static |= {f"{name}_{slot}": step for name, step in steps.items() if step}
        bases = []
        for name, access in accesses.items():
            if any(access.steps) and name == "table":
                raise Refused("one instruction looks up in one table")
            field = "table" if name == "table" else f"{name}_base"
            bases.append((field, tensors[name], access.begin, places[name]))
        if any(bound.number not in slot_of for bound in bounds):
            raise Refused("whether it exists depends on other than its loops")
        for name, e in named.items():
            if any(isinstance(node, Var) and node in self.number for node in walk(e)):
                raise Refused(f"{name} is not the same in all iterations")
        pad = named.pop(PAD, None)
        if not named:
            static |= rule.fields()
        self._check(rule.opcode, static)
        limits = tuple((slot_of[bound.number], bound) for bound in bounds)
        return Compute(rule.opcode, static, tuple(bases), begins, named, rule, limits, pad)

    def _steps(self, accesses: Mapping[str, Access]) -> list[dict[str, int]]:
        return [{name: a.steps[d] for name, a in accesses.items()} for d in range(len(self.loops))]

    def _begins(self, first: Expr) -> tuple[Var, ...] | None:
        """The loops outside that must be at 0, where this instruction's own are; None if it can never begin."""
        found: list[Var] = []
        for test in _conjuncts(first):
            match test:
                case Const(value):
                    if not value:
                        return None
                case Binary("eq", Var() as var, Const(0)):
                    if var in self.number:
                        continue
                    if var in self.fixed:
                        if self.fixed[var]:
                            return None
                    else:
                        found.append(var)
                case _:
                    raise Refused(f"{test} does not say where a reduction begins")
        return tuple(found)

    def _check(self, opcode: Opcode, static: Fields) -> None:
        """Refused where a value does not fit its field, whatever the loops outside do."""
        for field in formats(self.cfg)[opcode].fields:
            try:
                field.check(int(static.get(field.name, 0)), opcode.name)
            except ValueError as error:
                raise Refused(str(error)) from None

    # LOAD and STORE

    def move(
        self, intrinsic: TensorIntrinsic, rule: rules.Move, tiles: Mapping[Tensor, Load], values: Mapping[Var, Expr],
        tests: Sequence[Expr],
    ) -> Move:  # fmt: skip
        loads = rule.opcode == Opcode.LOAD
        near, far = intrinsic.tiles if loads else reversed(intrinsic.tiles)
        place = self._near(tiles[near], near.size)
        tensor, index = tiles[far].tensor, tiles[far].index
        item = tensor.nbytes // max(tensor.size, 1)
        steps = self.places.get(tensor) or tuple(stride * item for stride in strides(tensor.shape))
        by_number = len(index) == 1 and len(tensor.shape) != 1
        away = self._sum([(index[0], item)] if by_number else list(zip(index, steps)), tiles[far])
        if any(step < 0 for step in (*away.steps, *place.steps)):
            raise Refused("a loop runs backwards through memory")
        piece = prod(far.shape) * item  # bytes of one element in DRAM
        dims = [Dim(extent, a, p) for (_, extent), a, p in zip(self.loops, away.steps, place.steps)]
        dims = dims or [Dim(1, piece, 1)]
        named = {v.name: e for v, e in values.items()}
        conditions = [*tests, *([named["inside"]] if "inside" in named else [])]
        found = [self._bound(test) for condition in conditions for test in _conjuncts(condition)]
        bounds = tuple(bound for bound in found if bound is not None)
        scope = intrinsic.scopes[near.name]
        static = {"buffer": int(BUFFERS[scope]), **rule.fields()} if loads else dict(rule.fields())
        if bounds and loads:
            _as_planes(tuple(dims), piece, frozenset(b.number for b in bounds))  # whether padding can be said at all
        whole = static | _block(dims, piece)
        self._check(rule.opcode, whole)
        if loads and bounds and "pad" not in named:
            raise Refused("a block that exists in part has no value of padding")
        reach = [] if by_number else [self._reach(i) for i in index]
        entry = prod(tile_shape(self.cfg, scope)) // prod(element_shape(self.cfg, scope))
        return Move(
            rule.opcode, static, tiles[near].tensor, tensor, entry, place.begin, away.begin, tuple(dims), whole, bounds,
            named.get("pad"), piece, tuple(reach),
        )  # fmt: skip

    def _reach(self, index: Expr) -> tuple[Sum, int]:
        access = self._sum([(index, 1)], index)
        return access.begin, sum(step * (extent - 1) for step, (_, extent) in zip(access.steps, self.loops))

    def _bound(self, test: Expr) -> Bound | None:
        """What `test` says of the iterations of one loop; None where it always holds."""
        match test:
            case Const(value) if value:
                return None
            case Binary("le", a, b):
                difference, strict = self._sum([(b, 1), (a, -1)], test), 0
            case Binary("lt", a, b):
                difference, strict = self._sum([(b, 1), (a, -1)], test), 1
            case _:
                raise Refused(f"{test} is no border of a block")
        moving = [(d, step) for d, step in enumerate(difference.steps) if step]
        if len(moving) > 1:
            raise Refused(f"{test} depends on more than one loop of a block")
        low = difference.begin.plus(-strict)
        if not moving:
            # It holds for all iterations or for none: those of a loop that begins at -low, times what no loop reaches.
            return Bound(max(len(self.loops) - 1, 0), low.scaled(LARGE), 1, True)
        [(number, step)] = moving
        if step > 0:  # low + i * step >= 0
            return Bound(number, low, step, True)
        return Bound(number, low.plus(1), -step, False)  # i * |step| <= low


LARGE = 1 << 40


def _times(parts: tuple[tuple[Any, int], ...], by: int) -> tuple[tuple[Any, int], ...]:
    return tuple((part, step * by) for part, step in parts)


def _over(parts: tuple[tuple[Any, int], ...], by: int) -> tuple[tuple[Any, int], ...]:
    return tuple((part, step // by) for part, step in parts)


def _reads(e: Expr, var: Var) -> bool:
    return any(node is var for node in walk(e))


def _conjuncts(e: Expr) -> Iterator[Expr]:
    if isinstance(e, Binary) and e.op == "and":
        yield from _conjuncts(e.a)
        yield from _conjuncts(e.b)
    else:
        yield e


def _block(dims: Sequence[Dim], piece: int) -> Fields:
    """Fields of the sizes and steps of a LOAD without padding, or of a STORE."""
    try:
        x, y, z = coalesce(list(dims), piece)
    except Untileable as error:
        raise Refused(str(error)) from None
    return {
        "dram_y": y.dram, "dram_z": z.dram, "x_size": x.count, "y_size": y.count, "z_size": z.count,
        "sram_x": x.sram, "sram_y": y.sram, "sram_z": z.sram,
    }  # fmt: skip


Numbered = tuple[int, Dim]


@cache
def _as_planes(dims: tuple[Dim, ...], piece: int, bounded: frozenset[int]) -> tuple[Numbered, Numbered, Numbered]:
    """(planes, rows, elements), each with the number of its loop: the bounded loops are rows and elements of their own,
    others are planes or are joined with each other. Refused where that cannot be."""
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
        found = planes or nothing, rows or nothing, elements or (-1, Dim(1, piece, 1))
        z, y, x = found
        if x[1].count <= X_MAX and max(y[1].count, z[1].count) <= YZ_MAX:
            return found
    joined = _joined(dims, bounded)
    if joined is not None:
        return _as_planes(joined, piece, bounded)
    raise Refused(reason)


def _joined(dims: tuple[Dim, ...], bounded: frozenset[int]) -> tuple[Dim, ...] | None:
    """The same block with one loop less: two that are not bounded, and step evenly, are one. None where none are."""
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


def _merged(dims: Dims) -> Dims:
    """Neighbouring loops through which every operand walks evenly become one."""
    done: Dims = []
    for extent, steps, number in dims:
        last = done[-1] if done else None
        even = last is not None and all(last[1][name] == extent * step for name, step in steps.items())
        if last is not None and even and last[2] is number is None and last[0] * extent < 1 << EXTENT_BITS:
            done[-1] = last[0] * extent, steps, None
        else:
            done.append((extent, steps, number))
    return done
