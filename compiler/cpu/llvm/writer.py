"""The LLVM IR of a kernel's body: statements and expressions, scalar or over lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from celosia.compiler.cpu.llvm import amx, arithmetic, dot, masks, numbers, operations, unrolled
from celosia.compiler.cpu.llvm.operations import aligned, fits, is_vector, llvm_type, memory_type, splat
from celosia.compiler.cpu.llvm.requantise import requantised
from celosia.compiler.cpu.llvm.unrolled import UnrolledLoop
from celosia.compiler.cpu.schedule.following import Following
from celosia.compiler.cpu.schedule.streamed import LINE
from celosia.compiler.cpu.target import TILE_STEPS
from celosia.compiler.expr.affine import flatten, in_range, linear, nonnegative, stride_along
from celosia.compiler.expr.functions import OF_PAIRS
from celosia.compiler.expr.loops import Alloc, Block, For, If, Let, Stmt, Store, Update
from celosia.compiler.expr.nodes import (
    COMPARISONS,
    INDEX,
    Binary,
    Call,
    Cast,
    Const,
    Expr,
    Load,
    Reduce,
    Select,
    Tensor,
    Var,
)
from celosia.compiler.expr.walk import walk
from celosia.compiler.program.dtypes import itemsize

V = Any  # an LLVM value; llvmlite has no types
I64 = ir.IntType(64)
STACK_LIMIT = 16 << 10  # larger "local" tensors go to the workspace,
STACK_MOST = 256 << 10  # and so do those that follow so many bytes of others


class BodyWriter:
    """Writes the body of `fn`. loop: the one of which only part `share[0]` of `share[1]` is to run."""

    def __init__(
        self, fn: Any, memory: dict[Tensor, V], workspace: V, loop: For | None = None, share: tuple[V, ...] = ()
    ) -> None:
        self.fn, self.workspace, self.shared_loop, self.share = fn, workspace, loop, share
        self.features = fn.module.features
        self.entry = ir.IRBuilder(fn.append_basic_block("entry"))
        self.b = ir.IRBuilder(fn.append_basic_block("start"))
        self.entry.branch(self.b.block)
        self.entry.position_before(self.entry.block.terminator)
        self.memory = memory
        self.workspace_bytes = self.stack_bytes = 0
        self.vector: tuple[Var, int] | None = None  # the loop whose iterations are lanes
        self.lane: int | None = None  # the lane for which scalars are written, inside an index
        self.rows: UnrolledLoop | None = None  # the innermost unrolled loop
        self.tile_rows = 0  # of the tiles that this function uses, if it does
        self.ahead: dict[int, int] = {}  # loads, by id, and how far ahead of them memory is fetched
        self.following: dict[Var, Following] = {}  # loops, and what each iteration fetches
        self.streamed: frozenset[Tensor] = frozenset()  # outputs whose lines pass by the caches
        self.numbers: frozenset[Tensor] = frozenset()  # extremes that are never NaN
        self.mask: V = None  # the lanes that may read outside a tensor's range, inside the arm of a selection

    # Statements

    def stmt(self, s: Stmt, env: dict[Var, V]) -> None:
        """Writes a statement. env: the values of its variables."""
        match s:
            case Block(body):
                for each in body:
                    self.stmt(each, env)
            case For() if s is self.shared_loop:
                self._part(s, env)
            case For() if (tiles := amx.match(s, self.features)) is not None and self.tile_rows in (0, tiles.rows):
                self._tiles(s, tiles, env)
            case For(var, extent, body, "serial" | "ordered" | "parallel"):
                self._loop(var, extent, body, env)
            case For(var, extent, body, "unrolled"):
                outer, self.rows = self.rows, UnrolledLoop(var, extent, body)
                for self.rows.at in range(extent):
                    self.stmt(body, env | {var: I64(self.rows.at)})
                self.rows = outer
            case For(var, extent, body, "vectorized"):
                self._vectorized(var, extent, body, env)
            case For(kind=kind):
                raise ValueError(f"the CPU cannot run a {kind} loop")
            case Store(tensor, index, value):
                self._store(tensor, index, self.expr(value, env, {}), env)
            case Update(kind, tensor, index, value):
                self._update(kind, tensor, index, value, env)
            case Let(var, value, body):
                self.stmt(body, env | {var: self.expr(value, env, {})})
            case If(cond, body, orelse):
                test = self.expr(cond, env, {})
                if orelse is None:
                    with self.b.if_then(test):
                        self.stmt(body, env)
                else:
                    with self.b.if_else(test) as (then, otherwise):
                        with then:
                            self.stmt(body, env)
                        with otherwise:
                            self.stmt(orelse, env)
            case Alloc(tensor, body, scope):
                self.memory[tensor] = self._alloc(tensor, scope)
                self.stmt(body, env)
            case _:
                raise ValueError(f"the CPU cannot run {type(s).__name__} {getattr(s, 'name', '')}")

    def _loop(self, var: Var, extent: int, body: Stmt, env: dict[Var, V]) -> None:
        if extent == 1:
            return self.stmt(body, env | {var: I64(0)})
        return self._range(var, I64(0), I64(extent), body, env)

    def _tiles(self, loop: For, nest: amx.AmxNest, env: dict[Var, V]) -> None:
        """16 steps at a time in tiles, the rest in vectors."""
        if not self.tile_rows:
            self.tile_rows = nest.rows
            amx.configure(self.entry, self.fn.module, nest.rows)
        env = env | dict.fromkeys(nest.zero, I64(0))
        columns = [env if nest.columns is None else env | {nest.columns.var: I64(c)} for c in range(nest.width)]
        places = [self._in_lane(None, *nest.acc, each) for each in columns]
        for number, place in enumerate(places):
            amx.load(self.b, number, place, 4 * nest.acc_row)

        def steps(k: V) -> None:
            place = self._in_lane(None, nest.x.tensor, nest.x.index, env | {nest.k: k})
            amx.load(self.b, amx.TILE_A, place, 4 * nest.x_row)
            for number, each in enumerate(columns):
                place = self._in_lane(None, nest.w.tensor, nest.w.index, each | {nest.k: k})
                amx.load(self.b, amx.TILE_B, place, 4 * nest.w_step)
                amx.multiply(self.b, number)

        whole = nest.steps // TILE_STEPS
        self._count(I64(0), I64(whole), lambda i: steps(self.b.mul(i, I64(TILE_STEPS))))
        for number, place in enumerate(places):
            amx.store(self.b, number, place, 4 * nest.acc_row)
        if nest.steps % TILE_STEPS:
            self._range(loop.var, I64(whole * TILE_STEPS), I64(nest.steps), loop.body, env)

    def _part(self, loop: For, env: dict[Var, V]) -> None:
        """The iterations of this thread: as many as others have, or one more."""
        part, parts = self.share
        ends = (part, self.b.add(part, I64(1)))
        first, end = (self.b.udiv(self.b.mul(each, I64(loop.extent)), parts) for each in ends)
        with self.b.if_then(self.b.icmp_unsigned("<", first, end)):
            self._range(loop.var, first, end, loop.body, env)

    def _range(self, var: Var, first: V, end: V, body: Stmt, env: dict[Var, V]) -> None:
        """At least one iteration."""
        self._count(first, end, lambda i: self._iteration(var, body, env | {var: i}))

    def _iteration(self, var: Var, body: Stmt, env: dict[Var, V]) -> None:
        if (each := self.following.get(var)) is not None:
            element = memory_type(each.tensor.dtype)
            operations.fetch(self.b, self.memory[each.tensor], self.expr(each.place, env, {}), element, near=False)
        self.stmt(body, env)

    def _count(self, first: V, end: V, body: Callable[[V], None]) -> None:
        """`body` of first, ..., end - 1, at least once."""
        before = self.b.block
        head = self.fn.append_basic_block("loop")
        done = self.fn.append_basic_block("done")
        self.b.branch(head)
        self.b.position_at_end(head)
        i = self.b.phi(I64)
        i.add_incoming(first, before)
        body(i)
        after = self.b.add(i, I64(1), flags=("nuw", "nsw"))
        i.add_incoming(after, self.b.block)
        self.b.cbranch(self.b.icmp_unsigned("<", after, end), head, done)
        self.b.position_at_end(done)

    def _vectorized(self, var: Var, extent: int, body: Stmt, env: dict[Var, V]) -> None:
        if self.vector is not None:
            raise ValueError(f"vectorized loop {var.name} inside vectorized {self.vector[0].name}")
        if extent == 1:
            return self.stmt(body, env | {var: I64(0)})
        self.vector = var, extent
        self.stmt(body, env)
        self.vector = None
        return None

    def _alloc(self, tensor: Tensor, scope: str) -> V:
        if scope == "local" and tensor.nbytes <= min(STACK_LIMIT, STACK_MOST - self.stack_bytes):
            self.stack_bytes += aligned(tensor.nbytes)
            slot = self.entry.alloca(ir.ArrayType(memory_type(tensor.dtype), max(tensor.size, 1)))
            slot.align = operations.ALIGN
            slot.type = ir.PointerType()  # llvmlite would check the type of what is stored against that of the array
            return slot
        at = self.workspace_bytes
        self.workspace_bytes += aligned(tensor.nbytes)
        return self.entry.gep(self.workspace, [I64(at)], inbounds=True, source_etype=ir.IntType(8))

    # Memory

    def _pointer(self, tensor: Tensor, at: V) -> V:
        if tensor.value is not None and tensor not in self.memory:
            self.memory[tensor] = self._table(tensor)
        return self.b.gep(self.memory[tensor], [at], inbounds=True, source_etype=memory_type(tensor.dtype))

    def _table(self, tensor: Tensor) -> V:
        assert tensor.value is not None
        data = bytearray(tensor.value.tobytes())
        kind = ir.ArrayType(ir.IntType(8), max(len(data), 1))
        table = ir.GlobalVariable(self.fn.module, kind, f"{self.fn.name}.table{len(self.fn.module.global_values)}")
        table.linkage, table.global_constant, table.align = "private", True, operations.ALIGN
        table.initializer = ir.Constant(kind, data or bytearray(1))
        table.type = ir.PointerType()
        return table

    def _offset(self, tensor: Tensor, index: tuple[Expr, ...], env: dict[Var, V], memo: dict[Any, V]) -> V:
        """The element number, as a scalar."""
        total: V = None
        constant = 0
        for atom, k in linear(flatten(tensor.shape, index)).items():
            if atom is None:
                constant += k
                continue
            term = self.expr(atom, env, memo)
            if k != 1:
                term = self.b.mul(term, I64(k), flags=("nsw",))
            total = term if total is None else self.b.add(total, term, flags=("nsw",))
        if total is None:
            return I64(constant)
        return self.b.add(total, I64(constant), flags=("nsw",)) if constant else total

    def _lanes(self, tensor: Tensor, index: tuple[Expr, ...]) -> int | None:
        """How far lanes lie apart in memory; None where that is not a constant."""
        if self.vector is None or self.lane is not None:
            return 0
        return stride_along(tensor, index, self.vector[0])

    def _in_lane(self, lane: int | None, tensor: Tensor, index: tuple[Expr, ...], env: dict[Var, V]) -> V:
        saved, self.lane = self.lane, lane
        at = self._offset(tensor, index, env, {})
        self.lane = saved
        return self._pointer(tensor, at)

    def _load(self, tensor: Tensor, index: tuple[Expr, ...], env: dict[Var, V]) -> V:
        element = memory_type(tensor.dtype)
        align = itemsize(tensor.dtype)
        step = self._lanes(tensor, index)
        if step == 0:
            if self.mask is not None and self.lane is None and not in_range(Load(tensor, index)):
                raise ValueError(f"{tensor.name}: all lanes read one element where a condition of each holds")
            at = self._in_lane(self.lane or 0, tensor, index, env)
            value = self.b.load(at, typ=element, align=align)
        else:
            assert self.vector is not None
            n = self.vector[1]
            wide = ir.VectorType(element, n)
            if self.mask is not None and not in_range(Load(tensor, index)):
                if step != 1:
                    raise ValueError(f"{tensor.name}: lanes {step} apart read where a condition holds")
                value = self._masked_load(tensor, index, env)
            elif step == 1:
                value = self.b.load(self._in_lane(0, tensor, index, env), typ=wide, align=align)
            elif (tile := self._tile(tensor, index, env)) is not None:
                assert self.rows is not None
                value = tile[self.rows.at]
            elif step == 2:  # both halves of what the lanes span, then every other element
                first = self._in_lane(0, tensor, index, env)
                second = self.b.gep(first, [I64(n - 1)], inbounds=True, source_etype=element)
                halves = [self.b.load(at, typ=wide, align=align) for at in (first, second)]
                pick = [2 * k if 2 * k < n else 2 * k + 1 for k in range(n)]
                value = self.b.shuffle_vector(*halves, ir.Constant(ir.VectorType(ir.IntType(32), n), pick))
            else:
                value = ir.Constant(wide, ir.Undefined)
                for lane in range(n):
                    at = self._in_lane(lane, tensor, index, env)
                    one = self.b.load(at, typ=element, align=align)
                    value = self.b.insert_element(value, one, ir.IntType(32)(lane))
        if tensor.dtype == "bool":
            value = self.b.icmp_unsigned("!=", value, ir.Constant(value.type, None))
        return value

    def _masked_load(self, tensor: Tensor, index: tuple[Expr, ...], env: dict[Var, V]) -> V:
        """Where the processor would go lane by lane, a plain vector, if all of it is inside the tensor."""
        element, n = memory_type(tensor.dtype), self.mask.type.count
        saved, self.lane = self.lane, 0
        at = self._offset(tensor, index, env, {})
        self.lane = saved
        place, align = self._pointer(tensor, at), itemsize(tensor.dtype)
        if (run := masks.load_run(self.b, place, self.mask, element, align)) is not None:
            return run
        if "neon" not in self.features or tensor.size < n:
            return operations.masked_load(self.b, place, self.mask, element, align)
        inside = self.b.icmp_unsigned("<=", at, I64(tensor.size - n))
        return operations.load_if(self.b, inside, place, self.mask, element, align)

    def _tile(self, tensor: Tensor, index: tuple[Expr, ...], env: dict[Var, V]) -> list[V] | None:
        """What all iterations of the unrolled loop read, where that lies in lines."""
        rows, vector = self.rows, self.vector
        if rows is None or vector is None:
            return None
        count = rows.lines(tensor, index, self._lanes(tensor, index), vector[1])
        if count is None:
            return None
        key = (tensor, *map(id, index), id(self.b.block))  # of this block only, in which code runs from top to bottom
        if key not in rows.tiles:
            first = env | {rows.var: I64(0)}
            starts = [self._in_lane(lane, tensor, index, first) for lane in range(count)]
            wide = ir.VectorType(memory_type(tensor.dtype), vector[1] * rows.extent // count)
            lines = [self.b.load(at, typ=wide, align=itemsize(tensor.dtype)) for at in starts]
            rows.tiles[key] = unrolled.columns(self.b, lines, rows.extent)
        return rows.tiles[key]

    def _store(self, tensor: Tensor, index: tuple[Expr, ...], value: V, env: dict[Var, V]) -> None:
        if tensor.dtype == "bool":
            byte = ir.IntType(8)
            value = self.b.zext(value, ir.VectorType(byte, value.type.count) if is_vector(value) else byte)
        align = itemsize(tensor.dtype)
        step = self._lanes(tensor, index)
        if self.vector is None:
            self.b.store(value, self._in_lane(None, tensor, index, env), align=align)
            return
        n = self.vector[1]
        if self.rows is not None and self._held(self.rows, tensor, index, splat(self.b, value, n), env):
            return
        if step == 1:
            done = self.b.store(splat(self.b, value, n), self._in_lane(0, tensor, index, env), align=align)
            if tensor in self.streamed and n * align == LINE:
                done.set_metadata("nontemporal", self.fn.module.add_metadata([ir.IntType(32)(1)]))
            return
        for lane in range(n):
            one = self.b.extract_element(value, ir.IntType(32)(lane)) if is_vector(value) else value
            self.b.store(one, self._in_lane(lane, tensor, index, env), align=align)

    def _held(self, rows: UnrolledLoop, tensor: Tensor, index: tuple[Expr, ...], value: V, env: dict[Var, V]) -> bool:
        """Whether `value` is stored together with those of the other iterations of the unrolled loop, by the last."""
        if not rows.holds(tensor, index, self._lanes(tensor, index)):
            return False
        held = rows.held.setdefault(tensor, [])
        held.append(value)
        if len(held) == rows.extent:
            at = self._in_lane(0, tensor, index, env | {rows.var: I64(0)})
            self.b.store(unrolled.interleaved(self.b, held), at, align=itemsize(tensor.dtype))
        return True

    def _update(self, kind: str, tensor: Tensor, index: tuple[Expr, ...], value: Expr, env: dict[Var, V]) -> None:
        memo: dict[Any, V] = {}
        step = self._lanes(tensor, index)
        if self.vector is not None and step not in (0, 1):
            raise ValueError(f"{tensor.name}: lanes of {self.vector[0].name} update scattered elements")
        if kind == "sum" and step == (self.vector is not None) and tensor.dtype in ("float32", "float64"):
            match value:  # products are added without rounding them first
                case Binary("mul", a, b):
                    old = self._load(tensor, index, env)
                    factors = self._same_width(self.expr(a, env, memo), self.expr(b, env, memo), old)
                    self._store(tensor, index, operations.multiply_add(self.b, *factors), env)
                    return
        if kind == "sum" and step == (self.vector is not None) and isinstance(value, Call) and value.name in dot.DOTS:
            old = self._load(tensor, index, env)
            *factors, old = self._same_width(*self._factors(value, env, memo), old)
            self._store(tensor, index, dot.DOTS[value.name](self.b, old, *factors, self.features), env)
            return
        op, plain = Reduce.COMBINE[kind], tensor in self.numbers
        new = self.expr(numbers.number(value) if plain else value, env, memo)
        if self.vector is not None and step == 0:
            new = operations.horizontal(self.b, op, tensor.dtype, splat(self.b, new, self.vector[1]), plain)
            saved, self.vector = self.vector, None
            self._combine(kind, tensor, index, new, env | {saved[0]: I64(0)})
            self.vector = saved
            return
        self._combine(kind, tensor, index, new, env)

    def _factors(self, product: Call, env: dict[Var, V], memo: dict[Any, V]) -> list[V]:
        """The arguments of a sum of products; two numbers for all lanes that lie side by side are read together."""
        rest, last = product.args[:-2], product.args[-2:]
        match last:
            case (Load(tensor, index), Load(other, after)) if tensor is other and product.name in OF_PAIRS:
                here, there = (linear(flatten(tensor.shape, i)) for i in (index, after))
                follows = there == here | {None: here.get(None, 0) + 1}
                if (
                    follows
                    and self._lanes(tensor, index) == 0
                    and dot.reads_both(self.vector[1] if self.vector else 1, self.features)
                ):
                    both = dot.both(self.b, self._in_lane(0, tensor, index, env), self.features)
                    return [*(self.expr(arg, env, memo) for arg in rest), *both]
        return [self.expr(arg, env, memo) for arg in product.args]

    def _combine(self, kind: str, tensor: Tensor, index: tuple[Expr, ...], new: V, env: dict[Var, V]) -> None:
        old = self._load(tensor, index, env)
        if is_vector(old):
            new = splat(self.b, new, old.type.count)
        free, plain = kind != "ordered_sum", tensor in self.numbers
        result = arithmetic.binary(self.b, Reduce.COMBINE[kind], tensor.dtype, old, new, any_order=free, numbers=plain)
        self._store(tensor, index, result, env)

    # Expressions

    def expr(self, e: Expr, env: dict[Var, V], memo: dict[Any, V]) -> V:
        """Writes an expression, each part of it once for a `memo`, and returns its value."""
        key = (id(e), self.lane)
        if key not in memo:
            memo[key] = self._expr(e, env, memo), e  # holding `e` keeps its id its own
        return memo[key][0]

    def _expr(self, e: Expr, env: dict[Var, V], memo: dict[Any, V]) -> V:
        match e:
            case Const(value, dtype):
                return operations.constant(dtype, value)
            case Var():
                if self.vector is not None and e is self.vector[0]:
                    if self.lane is not None:
                        return I64(self.lane)
                    n = self.vector[1]
                    return ir.Constant(ir.VectorType(I64, n), list(range(n)))
                return env[e]
            case Load(tensor, index):
                if id(e) in self.ahead and self.lane is None:
                    at = self._in_lane(0, tensor, index, env)
                    operations.fetch(self.b, at, I64(self.ahead[id(e)]), memory_type(tensor.dtype))
                return self._load(tensor, index, env)
            case Binary("lt" | "le" as op, a, b) if (mask := self._mask(op, a, b, env, memo)) is not None:
                return mask
            case Binary("and", a, b) if e.dtype == "bool" and self.vector is not None:
                return masks.both(self.b, *self._same_width(self.expr(a, env, memo), self.expr(b, env, memo)))
            case Binary(op, a, b):
                x, y = self._same_width(self.expr(a, env, memo), self.expr(b, env, memo))
                if op in COMPARISONS:
                    return arithmetic.compare(self.b, op, a.dtype, x, y)
                if op in ("floordiv", "mod") and a.dtype == INDEX and isinstance(b, Const) and b.value > 0:
                    return arithmetic.index_division(self.b, op, nonnegative(a), x, y)
                return arithmetic.binary(self.b, op, a.dtype, x, y)
            case Call(name, args, dtype):
                values = self._same_width(*(self.expr(arg, env, memo) for arg in args))
                if name in dot.DOTS:
                    zero = ir.Constant(operations.widened(values[0], llvm_type("int32")), None)
                    return dot.DOTS[name](self.b, zero, *values, self.features)
                if name == "bitcast":
                    return self.b.bitcast(values[0], operations.widened(values[0], llvm_type(dtype)))
                return arithmetic.call(self.b, name, args[0].dtype, *values)
            case Cast(Call("clamp")) if (found := self._requantised(e, env, memo)) is not None:
                return found
            case Cast(Call("clamp", (_, Const(low), Const(high))) as value, dtype) if fits(low, high, dtype):
                return operations.convert_small(self.b, self.expr(value, env, memo), dtype)
            case Cast(value, dtype):
                return operations.convert(self.b, self.expr(value, env, memo), value.dtype, dtype)
            case Select(cond, a, b):
                return self._select(cond, a, b, env, memo)
        raise ValueError(f"the CPU cannot compute {type(e).__name__}")

    def _requantised(self, e: Cast, env: dict[Var, V], memo: dict[Any, V]) -> V:
        lanes = 1 if self.vector is None or self.lane is not None else self.vector[1]
        return requantised(self.b, e, lanes, self.features, lambda part: self.expr(part, env, memo))

    def _mask(self, op: str, a: Expr, b: Expr, env: dict[Var, V], memo: dict[Any, V]) -> V:
        if self.vector is None or self.lane is not None or a.dtype != INDEX or "neon" not in self.features:
            return None
        return masks.compared(self.b, op, a, b, self.vector, env, lambda e: self.expr(e, env, memo))

    def _same_width(self, *values: V) -> tuple[V, ...]:
        widths = {value.type.count for value in values if is_vector(value)}
        return tuple(splat(self.b, value, *widths) for value in values) if widths else values

    def _select(self, cond: Expr, a: Expr, b: Expr, env: dict[Var, V], memo: dict[Any, V]) -> V:
        test = self.expr(cond, env, memo)
        if is_vector(test) and (lanes := masks.fixed(test)) is not None and len(set(lanes)) == 1:
            return splat(self.b, self.expr(a if lanes[0] else b, env, memo), len(lanes))
        loads = [node for arm in (a, b) for node in walk(arm) if isinstance(node, Load)]
        if all((id(load), self.lane) in memo or in_range(load) for load in loads):
            test, x, y = self._same_width(test, self.expr(a, env, memo), self.expr(b, env, memo))
            return self.b.select(test, x, y)
        if is_vector(test):
            return self.b.select(test, *self._masked(((test, a), (masks.inverse(self.b, test), b)), env, memo))
        join = []
        result = self.fn.append_basic_block("selected")
        yes, no = self.fn.append_basic_block("yes"), self.fn.append_basic_block("no")
        self.b.cbranch(test, yes, no)
        for arm, at in ((a, yes), (b, no)):
            self.b.position_at_end(at)
            value = self.expr(arm, env, dict(memo))
            if self.vector is not None and self.lane is None:
                value = splat(self.b, value, self.vector[1])
            join.append((value, self.b.block))
            self.b.branch(result)
        self.b.position_at_end(result)
        phi = self.b.phi(join[0][0].type)
        for value, at in join:
            phi.add_incoming(value, at)
        return phi

    def _masked(self, arms: Any, env: dict[Var, V], memo: dict[Any, V]) -> list[V]:
        """Both arms of a selection, each of which reads nothing in the lanes where it is not taken."""
        saved, values = self.mask, []
        for mask, arm in arms:
            self.mask = mask if saved is None else masks.both(self.b, saved, mask)
            values.append(splat(self.b, self.expr(arm, env, dict(memo)), mask.type.count))
        self.mask = saved
        return values
