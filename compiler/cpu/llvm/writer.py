"""Statements and expressions of a kernel as LLVM IR, scalar or over the lanes of a vectorised loop.

In all methods `env` has the LLVM values of variables. `memo` has the values of expressions that were written before, by
(id of the node, lane), so that each part of an expression is written once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from celosia.compiler.cpu.llvm import amx, arithmetic, dot, nan_free_extremes, operations
from celosia.compiler.cpu.llvm.memory_access import (
    I64,
    MemoryWriter,
    UnrolledLoop,
    V,
    constant_lanes,
    mask_and,
    mask_not,
    position_mask,
)
from celosia.compiler.cpu.llvm.operations import converts_exactly, is_vector, llvm_type, memory_type, requantise, splat
from celosia.compiler.expr.affine import flatten, is_in_bounds, is_nonnegative, linear
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
from celosia.compiler.target import TILE_STEPS


class BodyWriter(MemoryWriter):
    """Writes the body of the LLVM function `fn`.

    shared_loop: the loop whose iterations threads share; this function runs part share[0] of share[1] of it.
    """

    # Statements ---------------------------------------------------------------------------------------------------

    def stmt(self, s: Stmt, env: dict[Var, V]) -> None:
        """Write a statement and those inside it. Raises ValueError for one that no CPU runs."""
        match s:
            case Block(body):
                for inner in body:
                    self.stmt(inner, env)
            case For() if s is self.shared_loop:
                self._write_thread_share(s, env)
            case For() if (tiles := amx.match(s, self.features)) is not None and self.tile_rows in (0, tiles.rows):
                self._write_amx_nest(s, tiles, env)
            case For(var, extent, body, "serial" | "ordered" | "parallel"):
                self._write_serial_loop(var, extent, body, env)
            case For(var, extent, body, "unrolled"):
                outer, self.unrolled = self.unrolled, UnrolledLoop(var, extent, body)
                for self.unrolled.iteration in range(extent):
                    self.stmt(body, env | {var: I64(self.unrolled.iteration)})
                self.unrolled = outer
            case For(var, extent, body, "vectorized"):
                self._write_vectorized(var, extent, body, env)
            case For(kind=kind):
                raise ValueError(f"the CPU cannot run a {kind} loop")
            case Store(tensor, index, value):
                self._store(tensor, index, self.expr(value, env, {}), env)
            case Update(kind, tensor, index, value):
                self._write_update(kind, tensor, index, value, env)
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

    def _write_serial_loop(self, var: Var, extent: int, body: Stmt, env: dict[Var, V]) -> None:
        """Write a loop over range(extent), or its body alone for one iteration."""
        if extent == 1:
            return self.stmt(body, env | {var: I64(0)})
        return self._write_loop(var, I64(0), I64(extent), body, env)

    def _write_amx_nest(self, loop: For, nest: amx.AmxNest, env: dict[Var, V]) -> None:
        """Write a nest with AMX tiles, 16 steps at a time, and the remaining steps with vectors."""
        if not self.tile_rows:
            self.tile_rows = nest.rows
            amx.configure(self.entry, self.fn.module, nest.rows)
        env = env | dict.fromkeys(nest.zero, I64(0))
        columns = [env if nest.columns is None else env | {nest.columns.var: I64(c)} for c in range(nest.width)]
        accumulators = [self._lane_pointer(None, *nest.acc, column_env) for column_env in columns]
        for tile, pointer in enumerate(accumulators):
            amx.load(self.b, tile, pointer, 4 * nest.acc_row)

        def write_tile_steps(k: V) -> None:
            """Write TILE_STEPS steps of the reduction from step `k` on, for all columns."""
            pointer = self._lane_pointer(None, nest.x.tensor, nest.x.index, env | {nest.k: k})
            amx.load(self.b, amx.TILE_A, pointer, 4 * nest.x_row)
            for tile, column_env in enumerate(columns):
                pointer = self._lane_pointer(None, nest.w.tensor, nest.w.index, column_env | {nest.k: k})
                amx.load(self.b, amx.TILE_B, pointer, 4 * nest.w_step)
                amx.multiply(self.b, tile)

        full_steps = nest.steps // TILE_STEPS
        self._write_counted_loop(I64(0), I64(full_steps), lambda i: write_tile_steps(self.b.mul(i, I64(TILE_STEPS))))
        for tile, pointer in enumerate(accumulators):
            amx.store(self.b, tile, pointer, 4 * nest.acc_row)
        if nest.steps % TILE_STEPS:
            self._write_loop(loop.var, I64(full_steps * TILE_STEPS), I64(nest.steps), loop.body, env)

    def _write_thread_share(self, loop: For, env: dict[Var, V]) -> None:
        """Write the iterations of a shared loop that this thread runs; threads differ by at most one iteration."""
        part, parts = self.share
        ends = (part, self.b.add(part, I64(1)))
        first, end = (self.b.udiv(self.b.mul(boundary, I64(loop.extent)), parts) for boundary in ends)
        with self.b.if_then(self.b.icmp_unsigned("<", first, end)):
            self._write_loop(loop.var, first, end, loop.body, env)

    def _write_loop(self, var: Var, first: V, end: V, body: Stmt, env: dict[Var, V]) -> None:
        """Write a loop over `var` from `first` to `end` - 1 that runs at least once."""
        self._write_counted_loop(first, end, lambda i: self._write_iteration(var, body, env | {var: i}))

    def _write_iteration(self, var: Var, body: Stmt, env: dict[Var, V]) -> None:
        """Write the body of a loop; a loop in `prefetched` first fetches an element of the next block of weights.

        cpu/schedule/prefetch.py chooses loop and element. It goes to the second-level cache: later tiles read it.
        """
        if (target := self.prefetched.get(var)) is not None:
            element = memory_type(target.tensor.dtype)
            operations.prefetch(
                self.b, self.memory[target.tensor], self.expr(target.element, env, {}), element, to_first_level=False
            )
        self.stmt(body, env)

    def _write_counted_loop(self, first: V, end: V, body: Callable[[V], None]) -> None:
        """Write a loop that runs `body`, a function of the index, for first, ..., end - 1, at least once."""
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

    def _write_vectorized(self, var: Var, extent: int, body: Stmt, env: dict[Var, V]) -> None:
        """Write a loop whose iterations are lanes. Raises ValueError inside of another such loop."""
        if self.vector is not None:
            raise ValueError(f"vectorized loop {var.name} inside vectorized {self.vector[0].name}")
        if extent == 1:
            return self.stmt(body, env | {var: I64(0)})
        self.vector = var, extent
        self.stmt(body, env)
        self.vector = None
        return None

    def _write_update(self, kind: str, tensor: Tensor, index: tuple[Expr, ...], value: Expr, env: dict[Var, V]) -> None:
        """Write a step of a reduction: a fused product, a sum of byte products, or a plain combination."""
        memo: dict[Any, V] = {}
        step = self._lane_stride(tensor, index)
        if self.vector is not None and step not in (0, 1):
            raise ValueError(f"{tensor.name}: lanes of {self.vector[0].name} update scattered elements")
        if kind == "sum" and step == (self.vector is not None) and tensor.dtype in ("float32", "float64"):
            match value:  # products are added without rounding them first
                case Binary("mul", a, b):
                    old = self._load(tensor, index, env)
                    factors = self._broadcast_to_vectors(self.expr(a, env, memo), self.expr(b, env, memo), old)
                    self._store(tensor, index, operations.multiply_add(self.b, *factors), env)
                    return
        if kind == "sum" and step == (self.vector is not None) and isinstance(value, Call) and value.name in dot.DOTS:
            old = self._load(tensor, index, env)
            old, *operands = self._broadcast_to_vectors(old, *self._product_operands(value, env, memo))
            self._store(tensor, index, dot.DOTS[value.name](self.b, old, *operands, self.features), env)
            return
        op, plain = Reduce.COMBINE[kind], tensor in self.nan_free
        new = self.expr(nan_free_extremes.without_nan_test(value) if plain else value, env, memo)
        if self.vector is not None and step == 0:
            new = operations.reduce_lanes(self.b, op, tensor.dtype, splat(self.b, new, self.vector[1]), plain)
            saved, self.vector = self.vector, None
            self._write_accumulation(kind, tensor, index, new, env | {saved[0]: I64(0)})
            self.vector = saved
            return
        self._write_accumulation(kind, tensor, index, new, env)

    def _product_operands(self, product: Call, env: dict[Var, V], memo: dict[Any, V]) -> list[V]:
        """Write the arguments of a sum of products; two adjacent scalars are loaded by one instruction."""
        values = [self.expr(arg, env, memo) for arg in product.args]
        lanes = 1 if self.vector is None else self.vector[1]
        match product.args:
            case (_, _, Load(tensor, index), Load(other, after)) if tensor is other and dot.can_load_pair(
                lanes, self.features
            ):
                first_terms, second_terms = (linear(flatten(tensor.shape, i)) for i in (index, after))
                is_next = second_terms == first_terms | {None: first_terms.get(None, 0) + 1}
                if is_next and self._lane_stride(tensor, index) == 0:
                    values[2:] = dot.load_pair(self.b, self._lane_pointer(0, tensor, index, env), self.features)
        return values

    def _write_accumulation(
        self, kind: str, tensor: Tensor, index: tuple[Expr, ...], new: V, env: dict[Var, V]
    ) -> None:
        """Write tensor[index] = kind(tensor[index], new)."""
        old = self._load(tensor, index, env)
        if is_vector(old):
            new = splat(self.b, new, old.type.count)
        free, plain = kind != "ordered_sum", tensor in self.nan_free
        result = arithmetic.binary(self.b, Reduce.COMBINE[kind], tensor.dtype, old, new, any_order=free, nan_free=plain)
        self._store(tensor, index, result, env)

    # Expressions --------------------------------------------------------------------------------------------------

    def expr(self, e: Expr, env: dict[Var, V], memo: dict[Any, V]) -> V:
        """Write an expression, each part of it once for a `memo`, and return its value."""
        key = (id(e), self.lane)
        if key not in memo:
            memo[key] = self._write_expr(e, env, memo), e  # the reference to `e` keeps its id from being reused
        return memo[key][0]

    def _write_expr(self, e: Expr, env: dict[Var, V], memo: dict[Any, V]) -> V:
        """Write an expression, without memoising it."""
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
                if id(e) in self.prefetch_distance and self.lane is None:
                    pointer = self._lane_pointer(0, tensor, index, env)
                    operations.prefetch(self.b, pointer, I64(self.prefetch_distance[id(e)]), memory_type(tensor.dtype))
                return self._load(tensor, index, env)
            case Binary("lt" | "le" as op, a, b) if (
                mask := self._write_position_mask(op, a, b, env, memo)
            ) is not None:
                return mask
            case Binary("and", a, b) if e.dtype == "bool" and self.vector is not None:
                return mask_and(self.b, *self._broadcast_to_vectors(self.expr(a, env, memo), self.expr(b, env, memo)))
            case Binary(op, a, b):
                x, y = self._broadcast_to_vectors(self.expr(a, env, memo), self.expr(b, env, memo))
                if op in COMPARISONS:
                    return arithmetic.compare(self.b, op, a.dtype, x, y)
                if op in ("floordiv", "mod") and a.dtype == INDEX and isinstance(b, Const) and b.value > 0:
                    return arithmetic.index_division(self.b, op, is_nonnegative(a), x, y)
                return arithmetic.binary(self.b, op, a.dtype, x, y)
            case Call(name, args, dtype):
                values = self._broadcast_to_vectors(*(self.expr(arg, env, memo) for arg in args))
                if name in dot.DOTS:
                    zero = ir.Constant(operations.vector_type_like(values[0], llvm_type("int32")), None)
                    return dot.DOTS[name](self.b, zero, *values, self.features)
                if name == "bitcast":
                    return self.b.bitcast(values[0], operations.vector_type_like(values[0], llvm_type(dtype)))
                return arithmetic.call(self.b, name, args[0].dtype, *values)
            case Cast(Call("clamp")) if (requantised := self._write_requantised(e, env, memo)) is not None:
                return requantised
            case Cast(Call("clamp", (_, Const(low), Const(high))) as value, dtype) if converts_exactly(
                low, high, dtype
            ):
                return operations.convert_small(self.b, self.expr(value, env, memo), dtype)
            case Cast(value, dtype):
                return operations.convert(self.b, self.expr(value, env, memo), value.dtype, dtype)
            case Select(cond, a, b):
                return self._write_select(cond, a, b, env, memo)
        raise ValueError(f"the CPU cannot compute {type(e).__name__}")

    def _write_requantised(self, e: Cast, env: dict[Var, V], memo: dict[Any, V]) -> V:
        """Write a requantisation to bytes in NEON's instructions; None where `e` is something else."""
        lanes = 1 if self.vector is None or self.lane is not None else self.vector[1]
        return requantise(self.b, e, lanes, self.features, lambda part: self.expr(part, env, memo))

    def _write_position_mask(self, op: str, a: Expr, b: Expr, env: dict[Var, V], memo: dict[Any, V]) -> V:
        """Write a comparison of indices as a mask of bytes, for NEON; None where that is not possible."""
        if self.vector is None or self.lane is not None or a.dtype != INDEX or "neon" not in self.features:
            return None
        return position_mask(self.b, op, a, b, self.vector, env, lambda e: self.expr(e, env, memo))

    def _broadcast_to_vectors(self, *values: V) -> tuple[V, ...]:
        """Broadcast scalars to vectors where any of `values` is a vector."""
        widths = {value.type.count for value in values if is_vector(value)}
        return tuple(splat(self.b, value, *widths) for value in values) if widths else values

    def _write_select(self, cond: Expr, a: Expr, b: Expr, env: dict[Var, V], memo: dict[Any, V]) -> V:
        """Write a selection of `a` where `cond` holds, else `b`.

        It is one arm where the condition is a constant, a select instruction where both arms may be read, masked loads
        for a condition that differs between lanes, and else a branch.
        """
        test = self.expr(cond, env, memo)
        if is_vector(test) and (lanes := constant_lanes(test)) is not None and len(set(lanes)) == 1:
            return splat(self.b, self.expr(a if lanes[0] else b, env, memo), len(lanes))
        loads = [node for arm in (a, b) for node in walk(arm) if isinstance(node, Load)]
        if all((id(load), self.lane) in memo or is_in_bounds(load) for load in loads):
            test, x, y = self._broadcast_to_vectors(test, self.expr(a, env, memo), self.expr(b, env, memo))
            return self.b.select(test, x, y)
        if is_vector(test):
            return self.b.select(test, *self._write_masked_arms(((test, a), (mask_not(self.b, test), b)), env, memo))
        result = self.fn.append_basic_block("selected")
        yes, no = self.fn.append_basic_block("yes"), self.fn.append_basic_block("no")
        self.b.cbranch(test, yes, no)
        arms = []
        for arm, arm_block in ((a, yes), (b, no)):
            self.b.position_at_end(arm_block)
            arms.append((self.expr(arm, env, dict(memo)), self.b.block))
        widths = {value.type.count for value, _ in arms if is_vector(value)}  # empty where all lanes have one value
        values = []
        for value, arm_block in arms:
            self.b.position_at_end(arm_block)
            values.append(splat(self.b, value, *widths) if widths else value)
            self.b.branch(result)
        self.b.position_at_end(result)
        phi = self.b.phi(values[0].type)
        for value, (_, arm_block) in zip(values, arms):
            phi.add_incoming(value, arm_block)
        return phi

    def _write_masked_arms(self, arms: Any, env: dict[Var, V], memo: dict[Any, V]) -> list[V]:
        """Write the arms of a selection, (mask, expression) pairs; an arm reads nothing in lanes outside its mask."""
        saved, values = self.mask, []
        for mask, arm in arms:
            self.mask = mask if saved is None else mask_and(self.b, saved, mask)
            values.append(splat(self.b, self.expr(arm, env, dict(memo)), mask.type.count))
        self.mask = saved
        return values
