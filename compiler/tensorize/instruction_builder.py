"""Build one instruction from an intrinsic and the loops around it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from celosia.compiler.expr.affine import join_quotients, linear
from celosia.compiler.expr.interpret import evaluate
from celosia.compiler.expr.loops import For, Intrinsic
from celosia.compiler.expr.nodes import INDEX, Binary, Const, Expr, Load, Tensor, Var, strides, substitute, walk
from celosia.compiler.tensorize.instruction import (
    PAD,
    ComputeInstruction,
    Dim,
    Env,
    Fields,
    Limit,
    LinearForm,
    MoveInstruction,
    NotOneInstruction,
    RenderError,
    TileAccess,
    as_planes,
    block_fields,
)
from celosia.compiler.tensorize.intrinsic import Compute, Move, TensorIntrinsic
from celosia.compiler.tensorize.intrinsics import BUFFERS, element_shape, tile_shape
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import EXTENT_BITS, Opcode, formats
from celosia.hw.spec.packing import packing

BY_BLOCK = ("wgt", "par", "tap")
"""Operands of which all pixels of an output block use the same entry."""
LARGE = 1 << 40
"""A number of iterations beyond all loops, see `_limit_of`."""
Dims = list[tuple[int, dict[str, int], int | None]]
"""Loops: (extent, step of each operand, number of the loop if only some of its iterations exist, else None)."""


def build_instruction(
    cfg: Config, loops: Sequence[For], tests: Sequence[Expr], leaf: Intrinsic, fixed: Env,
    scopes: Mapping[Tensor, str], places: Mapping[Tensor, tuple[int, ...]],
) -> ComputeInstruction | MoveInstruction:  # fmt: skip
    """Build the instruction of intrinsic `leaf` inside all of `loops`, for iterations for which `tests` hold.

    fixed: values of unrolled loops around. scopes: the scratchpads of tensors. places: see render.compile_loops. Raises
    NotOneInstruction if these loops are no single instruction.
    """
    intrinsic = leaf.declared
    assert isinstance(intrinsic, TensorIntrinsic)
    tiles, values, first = intrinsic.split_args(leaf.args)
    window = intrinsic.window(leaf.args)
    fixed = fixed | {loop.var: 0 for loop in loops if loop.extent == 1} | {w: 0 for w in window if w.extent == 1}
    instruction_loops = [(loop.var, loop.extent) for loop in loops if loop.extent > 1]
    instruction_loops += [(axis, axis.extent) for axis in window if axis.extent > 1]
    builder = _InstructionBuilder(cfg, instruction_loops, fixed, scopes, places)
    if isinstance(intrinsic.rule, Compute):
        if tests:
            raise NotOneInstruction("it has a condition")
        return builder.build_compute(intrinsic, intrinsic.rule, tiles, values, first, set(window))
    assert isinstance(intrinsic.rule, Move)
    return builder.build_move(intrinsic, intrinsic.rule, tiles, values, tests)


class _InstructionBuilder:
    """Builds the instruction of one intrinsic inside its loops.

    loops: (variable, extent), from the outermost. number: variable of a loop -> its position. Others: see
    `build_instruction`.
    """

    def __init__(
        self, cfg: Config, loops: list[tuple[Var, int]], fixed: Env, scopes: Mapping[Tensor, str],
        places: Mapping[Tensor, tuple[int, ...]],
    ) -> None:  # fmt: skip
        self.cfg, self.loops, self.fixed, self.scopes, self.places = cfg, loops, fixed, scopes, places
        self.number = {var: d for d, (var, _) in enumerate(loops)}

    def _linear_access(self, parts: Iterable[tuple[Expr, int]], what: object) -> TileAccess:
        """Return the sum of (expression, factor) `parts`, split into loops of the instruction and loops outside.

        what: named in the error. Raises NotOneInstruction if it is not linear in the instruction's loops.
        """
        base, steps = 0, [0] * len(self.loops)
        terms: dict[Var, int] = {}
        others: list[tuple[Expr, int]] = []
        total: dict[Expr | None, int] = {}
        for e, factor in parts:
            for atom, k in linear(e).items():
                total[atom] = total.get(atom, 0) + k * factor
        for atom, k in join_quotients(total).items():
            if atom is None:
                base += k
            elif isinstance(atom, Var) and atom in self.number:
                steps[self.number[atom]] += k
            elif any(isinstance(node, Var) and node in self.number for node in walk(atom)):
                raise NotOneInstruction(f"{what} is not affine in its loops")
            elif isinstance(atom, Var) and atom not in self.fixed:
                terms[atom] = k
            elif all(n in self.fixed for n in walk(atom) if isinstance(n, Var)):
                base += k * int(evaluate(atom, {v: i for v, i in self.fixed.items() if _reads(atom, v)}))
            else:
                others.append((substitute(atom, {v: Const(i, INDEX) for v, i in self.fixed.items()}), k))
        begin = LinearForm(base, tuple((var, k) for var, k in terms.items() if k), tuple(others))
        return TileAccess(begin, tuple(steps))

    def _scratchpad_access(self, load: Load, unit: int) -> TileAccess:
        """Return where a tile lies in its scratchpad, in units of `unit` elements."""
        if load.tensor not in self.scopes:
            raise RenderError(f"{load.tensor.name} is in no scratchpad")
        shape = load.tensor.shape
        parts = [(load.index[0], 1)] if len(load.index) == 1 else list(zip(load.index, strides(shape)))
        return self._linear_access(parts, load).in_units(unit, load)

    # GEMM and VECTOR

    def build_compute(
        self, intrinsic: TensorIntrinsic, rule: Compute, tiles: Mapping[Tensor, Load], values: Mapping[Var, Expr],
        first: Expr, window: set[Any],
    ) -> ComputeInstruction:  # fmt: skip
        """Build GEMM or VECTOR. Raises NotOneInstruction if its own loops cannot express these."""
        operands = {tile: rule.operands[tile.name] for tile in tiles if tile.name in rule.operands}
        loads = {operands[tile]: load for tile, load in tiles.items() if tile in operands}
        units = {name: intrinsic.unit(tile) for tile, name in operands.items()}
        accesses = {name: self._scratchpad_access(load, units[name]) for name, load in loads.items()}
        target = rule.operands[intrinsic.behaviour.name]
        fixed: dict[Var, Expr] = {var: Const(i, INDEX) for var, i in self.fixed.items()}
        parameters = {var.name: substitute(e, fixed) for var, e in values.items()}
        bounds = self._limits_of([parameters.pop("inside", Const(True, "bool"))])
        data, sums = self._split_loops(accesses, target, window, {bound.number for bound in bounds})
        begins = self._reduction_starts(first) if intrinsic.reduces else ()
        if begins != () and rule.opcode != Opcode.GEMM:
            raise NotOneInstruction("its reduction does not fit into one instruction")
        if not intrinsic.reduces and any(
            not steps[target] and var not in window for var, steps in self._loop_steps(accesses)
        ):
            raise NotOneInstruction("it writes the same place again")
        static, slot_of = self._assign_loops(rule, data, sums)
        bases = tuple(
            self._address_field(name, load.tensor, accesses[name], units[name]) for name, load in loads.items()
        )
        if any(bound.number not in slot_of for bound in bounds):
            raise NotOneInstruction("whether it exists depends on other than its loops")
        for name, e in parameters.items():
            if any(isinstance(node, Var) and node in self.number for node in walk(e)):
                raise NotOneInstruction(f"{name} is not the same in all iterations")
        pad = parameters.pop(PAD, None)
        if not parameters:
            static |= rule.fields()
        self._check(rule.opcode, static)
        limits = tuple((slot_of[bound.number], bound) for bound in bounds)
        return ComputeInstruction(rule.opcode, static, bases, begins, parameters, rule, limits, pad)

    def _loop_steps(self, accesses: Mapping[str, TileAccess]) -> Iterator[tuple[Var, dict[str, int]]]:
        """Yield the variable of each loop, with its step in each operand."""
        for d, (var, _) in enumerate(self.loops):
            yield var, {name: access.steps[d] for name, access in accesses.items()}

    def _split_loops(
        self, accesses: Mapping[str, TileAccess], target: str, window: set[Any], bounded: set[int]
    ) -> tuple[Dims, Dims]:
        """Split the loops into those over results and those of the reduction, merged where possible.

        GEMM and VECTOR have few loops for each kind, which `_assign_loops` fills. target: the operand that is written.
        window: axes over which the intrinsic itself reduces tiles. bounded: numbers of loops with limits.
        """
        data: Dims = []
        sums: Dims = []
        for d, (var, steps) in enumerate(self._loop_steps(accesses)):
            dims = sums if var in window or not steps[target] else data
            dims.append((self.loops[d][1], steps, d if d in bounded else None))
        return _merge_loops(data), _merge_loops(sums)

    def _assign_loops(self, rule: Compute, data: Dims, sums: Dims) -> tuple[Fields, dict[int | None, str]]:
        """Assign loops to the instruction's loops. Returns its fields, and the letter of each loop that has a
        number."""
        opcode = rule.opcode
        static = {field.name: 1 for field in formats(self.cfg)[opcode].fields if field.name.startswith("extent_")}
        slot_of: dict[int | None, str] = {}
        reduction_slots = {Opcode.GEMM: "krs", Opcode.VECTOR: "rs"}[opcode]
        for slots, dims in ((rule.slots, data), (reduction_slots, sums)):
            if len(dims) > len(slots):
                raise NotOneInstruction(f"{opcode.name} has {len(slots)} such loops, not {len(dims)}")
            for slot, (extent, steps, number) in zip(_loop_letters(slots, dims), dims):
                slot_of[number] = slot
                static[f"extent_{slot}"] = extent
                static |= {f"{name}_{slot}": step for name, step in steps.items() if step}
        return static, slot_of

    def _address_field(
        self, name: str, tensor: Tensor, access: TileAccess, unit: int
    ) -> tuple[str, Tensor, LinearForm, int]:
        """Return the element of `ComputeInstruction.bases` for an operand."""
        if any(access.steps) and name == "table":
            raise NotOneInstruction("one instruction looks up in one table")
        places = prod(tile_shape(self.cfg, self.scopes[tensor])) // unit
        return "table" if name == "table" else f"{name}_base", tensor, access.begin, places

    def _reduction_starts(self, first: Expr) -> tuple[Var, ...] | None:
        """Return the loops outside of this instruction whose variables are all 0 when its reduction begins.

        There the instruction overwrites its accumulators; elsewhere it adds to them. None: the reduction never begins
        here, for these values of unrolled loops. first: the condition under which it begins.
        """
        outside: list[Var] = []
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
                        outside.append(var)
                case _:
                    raise NotOneInstruction(f"{test} does not say where a reduction begins")
        return tuple(outside)

    def _check(self, opcode: Opcode, static: Fields) -> None:
        """Raise NotOneInstruction if a static value does not fit its field."""
        for field in formats(self.cfg)[opcode].fields:
            try:
                field.check(int(static.get(field.name, 0)), opcode.name)
            except ValueError as error:
                raise NotOneInstruction(str(error)) from None

    # LOAD and STORE

    def build_move(
        self, intrinsic: TensorIntrinsic, rule: Move, tiles: Mapping[Tensor, Load], values: Mapping[Var, Expr],
        tests: Sequence[Expr],
    ) -> MoveInstruction:  # fmt: skip
        """Build LOAD or STORE. Raises NotOneInstruction if the block is no single transfer."""
        loads = rule.opcode == Opcode.LOAD
        on_chip, in_dram = intrinsic.tiles if loads else reversed(intrinsic.tiles)
        chip_access = self._scratchpad_access(tiles[on_chip], on_chip.size)
        tensor, index = tiles[in_dram].tensor, tiles[in_dram].index
        item = tensor.nbytes // max(tensor.size, 1)
        steps = self.places.get(tensor) or tuple(stride * item for stride in strides(tensor.shape))
        by_number = len(index) == 1 and len(tensor.shape) != 1
        dram_access = self._linear_access([(index[0], item)] if by_number else list(zip(index, steps)), tiles[in_dram])
        if any(step < 0 for step in (*dram_access.steps, *chip_access.steps)):
            raise NotOneInstruction("a loop runs backwards through memory")
        scope = intrinsic.scopes[on_chip.name]
        packed = scope == "wgt" and steps[-1] == 0
        piece = packing(self.cfg).piece_bytes if packed else prod(in_dram.shape) * item  # bytes of one element in DRAM
        dims = [Dim(extent, a, p) for (_, extent), a, p in zip(self.loops, dram_access.steps, chip_access.steps)]
        dims = dims or [Dim(1, piece, 1)]
        named = {v.name: e for v, e in values.items()}
        conditions = [*tests, *([named["inside"]] if "inside" in named else [])]
        bounds = self._limits_of(conditions)
        static = {"buffer": int(BUFFERS[scope]), **rule.fields()} if loads else dict(rule.fields())
        if bounds and loads:
            as_planes(tuple(dims), piece, frozenset(b.number for b in bounds))  # raises if padding cannot be expressed
        if packed:
            static["expand"] = 1
        whole = static | block_fields(dims, piece)
        if packed:
            self._check_packs(whole, dram_access.begin)
        self._check(rule.opcode, whole)
        if loads and bounds and "pad" not in named:
            raise NotOneInstruction("a block that exists in part has no value of padding")
        reach = [] if by_number else [self._index_reach(i) for i in index]
        entry = prod(tile_shape(self.cfg, scope)) // prod(element_shape(self.cfg, scope))
        return MoveInstruction(
            rule.opcode, static, tiles[on_chip].tensor, tensor, entry, chip_access.begin, dram_access.begin,
            tuple(dims), whole, bounds, named.get("pad"), piece, tuple(reach),
        )  # fmt: skip

    def _check_packs(self, whole: Fields, begin: LinearForm) -> None:
        """Raise NotOneInstruction if rows of packed weights are not whole packs."""
        size, pieces = packing(self.cfg).pack_bytes, packing(self.cfg).pieces
        steps = (begin.base, whole["dram_y"], whole["dram_z"], *(step for _, step in (*begin.terms, *begin.others)))
        if whole["x_size"] % pieces or any(step % size for step in steps):
            raise NotOneInstruction(f"packed weights are loaded in packs of {pieces} pieces")

    def _index_reach(self, index: Expr) -> tuple[LinearForm, int]:
        """Return the first value of an index in the block, and how far loops move it, for `MoveInstruction.span`."""
        access = self._linear_access([(index, 1)], index)
        return access.begin, sum(step * (extent - 1) for step, (_, extent) in zip(access.steps, self.loops))

    def _limits_of(self, conditions: Iterable[Expr]) -> tuple[Limit, ...]:
        """Return the limits of loops that `conditions` express."""
        bounds = [self._limit_of(test) for condition in conditions for test in _conjuncts(condition)]
        return tuple(bound for bound in bounds if bound is not None)

    def _limit_of(self, test: Expr) -> Limit | None:
        """Return the limit of one loop that `test` expresses; None if it always holds."""
        match test:
            case Const(value) if value:
                return None
            case Binary("le", a, b):
                difference, strict = self._linear_access([(b, 1), (a, -1)], test), 0
            case Binary("lt", a, b):
                difference, strict = self._linear_access([(b, 1), (a, -1)], test), 1
            case _:
                raise NotOneInstruction(f"{test} is no border of a block")
        loop_steps = [(d, step) for d, step in enumerate(difference.steps) if step]
        if len(loop_steps) > 1:
            raise NotOneInstruction(f"{test} depends on more than one loop of a block")
        low = difference.begin.plus(-strict)
        if not loop_steps:
            # All iterations exist or none: scaled by LARGE, the bound lies before the first or behind the last.
            return Limit(max(len(self.loops) - 1, 0), low.scaled(LARGE), 1, True)
        [(number, step)] = loop_steps
        if step > 0:  # low + i * step >= 0
            return Limit(number, low, step, True)
        return Limit(number, low.plus(1), -step, False)  # i * |step| <= low


def _reads(e: Expr, var: Var) -> bool:
    """Whether `var` occurs in `e`."""
    return any(node is var for node in walk(e))


def _conjuncts(e: Expr) -> Iterator[Expr]:
    """Yield the conditions that `and` joins in `e`."""
    if isinstance(e, Binary) and e.op == "and":
        yield from _conjuncts(e.a)
        yield from _conjuncts(e.b)
    else:
        yield e


def _loop_letters(slots: str, dims: Dims) -> str:
    """Return the letters, among `slots`, of the instruction's loops that `dims` become, from the outermost."""
    if len(dims) == 1 and slots == "krs":
        return "k"  # input blocks, where the window is one pixel
    names = slots[len(slots) - len(dims) :]
    blocks = [steps for _, steps, _ in dims if slots == "nyx" and any(steps.get(name) for name in BY_BLOCK)]
    if len(blocks) > 1:
        raise NotOneInstruction("output blocks are one loop of an instruction")
    if blocks and blocks[0] is dims[0][1]:
        names = slots[0] + slots[len(slots) - len(dims) + 1 :]  # output blocks are loop n, pixels y and x
    return names


def _merge_loops(dims: Dims) -> Dims:
    """Merge neighbouring loops if every operand steps evenly through both and neither is bounded.

    An instruction has few loops, so that more of the nest fits into one.
    """
    merged: Dims = []
    for extent, steps, number in dims:
        last = merged[-1] if merged else None
        is_even = last is not None and all(last[1][name] == extent * step for name, step in steps.items())
        if last is not None and is_even and last[2] is number is None and last[0] * extent < 1 << EXTENT_BITS:
            merged[-1] = last[0] * extent, steps, None
        else:
            merged.append((extent, steps, number))
    return merged
