"""Code generation: loop IR to LLVM IR.

A kernel is `void name(arguments, part, parts)`: a list of pointers to inputs, outputs and a workspace, which do not
overlap, and two integers; an in-place input is read through the pointer of its output. Where threads can share loops
there are more functions, see `render`. Arithmetic is exactly as written: no contraction, no reordering.
Only Update of kind "sum" may add in any order, and adds products with one rounding.

In order: the functions of a kernel (`render`), its statements and expressions (BodyWriter), and which minima and maxima
never see a NaN.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from celosia.compiler.cpu.llvm import arithmetic, operations
from celosia.compiler.cpu.llvm.byte_products import (
    DOTS,
    TILE_A,
    TILE_B,
    AmxNest,
    can_load_pair,
    configure_tiles,
    load_pair,
    load_tile,
    match_amx,
    multiply_tiles,
    release_tiles,
    store_tile,
)
from celosia.compiler.cpu.llvm.memory_access import (
    MemoryWriter,
    UnrolledLoop,
    constant_lanes,
    mask_and,
    mask_not,
    position_mask,
)
from celosia.compiler.cpu.llvm.operations import (
    I64,
    V,
    align_size,
    converts_exactly,
    is_vector,
    llvm_type,
    memory_type,
    requantise,
    splat,
)
from celosia.compiler.cpu.schedule.caches import next_block_prefetches, next_iteration_prefetches, streamed_outputs
from celosia.compiler.cpu.schedule.parallel import Phase, legalise_vector_loops, split_phases
from celosia.compiler.expr.affine import flatten, is_in_bounds, is_nonnegative, linear
from celosia.compiler.expr.loops import Alloc, Block, For, Function, If, Let, Stmt, Store, Update, statements
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
    is_float,
    walk,
)
from celosia.compiler.target import TILE_STEPS, target


@dataclass(frozen=True)
class Rendered:
    """LLVM IR of a module that defines a kernel (`text`), and the bytes of workspace that the kernel needs.

    phases: for a function with loops that threads share, whether each of its phases has one; see `render`.
    shared_bytes: the part of the workspace that all threads share; each thread has its own copy of the rest.
    """

    text: str
    workspace_bytes: int
    shared_bytes: int = 0
    phases: tuple[bool, ...] = ()


def render(function: Function, features: frozenset[str] | None = None) -> Rendered:
    """Render `name(arguments, part, parts)`, which does all of the work, and functions for threads.

    Where threads can share loops, `name.0`, `name.1`, ... do part `part` of `parts` of each phase. All threads pass the
    same arguments. Behind the shared part of the workspace, each thread has a part of its own. features: of the
    processor, in LLVM's names; by default those of the target.
    """
    function = legalise_vector_loops(function)
    module = ir.Module(name=function.name)
    module.features = target().features if features is None else features
    shared, phases = split_phases(function)
    has_shared_loops = len(phases) > 1 or phases[0].loop is not None
    workspace_offsets: dict[Tensor, int] = {}
    shared_bytes = own_bytes = 0
    for tensor in shared:
        workspace_offsets[tensor] = shared_bytes
        shared_bytes += align_size(tensor.nbytes)
    bodies = []
    for position, phase in enumerate(phases):
        body, size = _render_body(module, function, f"{function.name}.body{position}", phase, workspace_offsets)
        bodies.append(body)
        own_bytes = max(own_bytes, size)
    _render_entry(module, function, function.name, bodies, shared_bytes)
    for position, body in enumerate(bodies if has_shared_loops else []):
        _render_entry(module, function, f"{function.name}.{position}", [body], shared_bytes, own_bytes)
    return Rendered(
        str(module), shared_bytes + own_bytes, shared_bytes,
        tuple(phase.loop is not None for phase in phases) if has_shared_loops else (),
    )  # fmt: skip


def _render_body(
    module: Any, function: Function, name: str, phase: Phase, workspace_offsets: dict[Tensor, int]
) -> tuple[Any, int]:
    """Render a phase as `name(tensors..., shared workspace, own workspace, part, parts)`.

    Returns (the LLVM function, bytes of its own workspace). workspace_offsets: byte of the shared workspace at which
    each tensor that several phases touch begins.
    """
    tensors = len(function.inputs) + len(function.outputs)
    body, *arguments = _declare_function(module, name, tensors + 2, (I64, I64))
    body.linkage = "internal"
    body.attributes.add("noinline")  # inlined, the pointers would lose the attributes of arguments
    writer = BodyWriter(
        body, _tensor_pointers(function, arguments), arguments[-3], phase.loop, (arguments[-2], arguments[-1])
    )
    for tensor, offset in workspace_offsets.items():
        writer.memory[tensor] = writer.entry.gep(
            arguments[-4], [I64(offset)], inbounds=True, source_etype=ir.IntType(8)
        )
    stmt = phase.body
    for tensor in phase.private:
        stmt = Alloc(tensor, stmt, "local")
    writer.prefetch_distance = next_iteration_prefetches(phase.body)
    writer.prefetched = next_block_prefetches(phase.body)
    writer.streaming_stores = streamed_outputs(function)
    writer.nan_free = nan_free_extremes(function.body)
    writer.stmt(stmt, {})
    if writer.streaming_stores:
        operations.fence(writer.b)
    if writer.tile_rows:
        release_tiles(writer.b)
    writer.b.ret_void()
    return body, writer.workspace_bytes


def _render_entry(
    module: Any, function: Function, name: str, bodies: list[Any], shared_bytes: int, own_bytes: int | None = None
) -> None:
    """Render `name(arguments, part, parts)`, which calls `bodies`.

    own_bytes: size of a thread's own workspace, where the function does one part of the work; the workspaces of threads
    lie behind each other. None where it does all of the work.
    """
    fn, arguments, *share = _declare_function(module, name, 1, (I64, I64))
    if target().machine:
        fn.linkage = "weak_odr"  # of equal kernels in several objects, which have one symbol, a linker takes one
    if own_bytes is None:
        share, own_bytes = [I64(0), I64(1)], 0
    b = ir.IRBuilder(fn.append_basic_block("start"))
    pointer, byte = ir.PointerType(), ir.IntType(8)
    slots = [
        b.gep(arguments, [I64(k)], inbounds=True, source_etype=pointer)
        for k in range(len(function.inputs) + len(function.outputs) + 1)
    ]
    pointers = [b.load(slot, typ=pointer) for slot in slots]
    start = b.add(I64(shared_bytes), b.mul(share[0], I64(own_bytes)))
    own_workspace = b.gep(pointers[-1], [start], inbounds=True, source_etype=byte)
    for body in bodies:
        b.call(body, [*pointers, own_workspace, *share])
    b.ret_void()


def _declare_function(module: Any, name: str, pointers: int, more: tuple[Any, ...] = ()) -> list[V]:
    """Declare a function of `pointers` pointers to memory that does not overlap, then arguments of the types `more`.

    Returns [function, its arguments...].
    """
    fn = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.PointerType()] * pointers + [*more]), name)
    fn.attributes.add("nounwind")
    for position, arg in enumerate(fn.args[:pointers]):
        arg.add_attribute("noalias")
        arg.add_attribute("captures(none)")
        arg.name = f"p{position}"
    return [fn, *fn.args]


def _tensor_pointers(function: Function, arguments: list[V]) -> dict[Tensor, V]:
    """Return the pointers of inputs and outputs; an in-place input has that of its output."""
    pointers = dict(zip((*function.inputs, *function.outputs), arguments))
    for output, input_position in function.in_place:
        pointers[function.inputs[input_position]] = pointers[function.outputs[output]]
    return pointers


class BodyWriter(MemoryWriter):
    """Writes the body of the LLVM function `fn`: statements and expressions, scalar or over lanes of a vectorised loop.

    shared_loop: the loop whose iterations threads share; this function runs part share[0] of share[1] of it.

    In all methods `env` has the LLVM values of variables. `memo` has the values of expressions that were written
    before, by (id of the node, lane), so that each part of an expression is written once.
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
            case For() if (tiles := match_amx(s, self.features)) is not None and self.tile_rows in (0, tiles.rows):
                self._write_amx_nest(s, tiles, env)
            case For(var, 1, body, "serial" | "ordered" | "parallel"):
                self.stmt(body, env | {var: I64(0)})
            case For(var, extent, body, "serial" | "ordered" | "parallel"):
                self._write_loop(var, I64(0), I64(extent), body, env)
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

    def _write_amx_nest(self, loop: For, nest: AmxNest, env: dict[Var, V]) -> None:
        """Write a nest with AMX tiles, 16 steps at a time, and the remaining steps with vectors."""
        if not self.tile_rows:
            self.tile_rows = nest.rows
            configure_tiles(self.entry, nest.rows)
        env = env | dict.fromkeys(nest.zero, I64(0))
        columns = [env if nest.columns is None else env | {nest.columns.var: I64(c)} for c in range(nest.width)]
        accumulators = [self._lane_pointer(None, *nest.acc, column_env) for column_env in columns]
        for tile, pointer in enumerate(accumulators):
            load_tile(self.b, tile, pointer, 4 * nest.acc_row)

        def write_tile_steps(k: V) -> None:
            """Write TILE_STEPS steps of the reduction from step `k` on, for all columns."""
            pointer = self._lane_pointer(None, nest.x.tensor, nest.x.index, env | {nest.k: k})
            load_tile(self.b, TILE_A, pointer, 4 * nest.x_row)
            for tile, column_env in enumerate(columns):
                pointer = self._lane_pointer(None, nest.w.tensor, nest.w.index, column_env | {nest.k: k})
                load_tile(self.b, TILE_B, pointer, 4 * nest.w_step)
                multiply_tiles(self.b, tile)

        full_steps = nest.steps // TILE_STEPS
        self._write_counted_loop(I64(0), I64(full_steps), lambda i: write_tile_steps(self.b.mul(i, I64(TILE_STEPS))))
        for tile, pointer in enumerate(accumulators):
            store_tile(self.b, tile, pointer, 4 * nest.acc_row)
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

        cpu/schedule/caches.py chooses loop and element. It goes to the second-level cache: later tiles read it.
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
        if kind == "sum" and step == (self.vector is not None) and isinstance(value, Call) and value.name in DOTS:
            old = self._load(tensor, index, env)
            old, *operands = self._broadcast_to_vectors(old, *self._product_operands(value, env, memo))
            self._store(tensor, index, DOTS[value.name](self.b, old, *operands, self.features), env)
            return
        op, plain = Reduce.COMBINE[kind], tensor in self.nan_free
        new = self.expr(without_nan_test(value) if plain else value, env, memo)
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
            case (_, _, Load(tensor, index), Load(other, after)) if tensor is other and can_load_pair(
                lanes, self.features
            ):
                first_terms, second_terms = (linear(flatten(tensor.shape, i)) for i in (index, after))
                is_next = second_terms == first_terms | {None: first_terms.get(None, 0) + 1}
                if is_next and self._lane_stride(tensor, index) == 0:
                    values[2:] = load_pair(self.b, self._lane_pointer(0, tensor, index, env), self.features)
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
                if name in DOTS:
                    zero = ir.Constant(operations.vector_type_like(values[0], llvm_type("int32")), None)
                    return DOTS[name](self.b, zero, *values, self.features)
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

        An arm that is not selected may read outside of a tensor. So the code is one arm where the condition is a
        constant, a select instruction where both arms may be read, masked loads for a condition that differs between
        lanes, and else a branch.
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


def without_nan_test(value: Expr) -> Expr:
    """Return x of `x == x ? x : infinity`, which excludes NaN from an extreme; other expressions are unchanged."""
    match value:
        case Select(Binary("eq", a, b), x, Const(bound)) if is_float(x.dtype) and math.isinf(bound):
            return x if a is b is x or str(a) == str(b) == str(x) else value
    return value


def nan_free_extremes(body: Stmt) -> frozenset[Tensor]:
    """Return the tensors of `body` that hold extremes and never a NaN, so that one instruction computes them.

    m = -inf; m max= x[i] == x[i] ? x[i] : -inf; n = -inf; n max= m: these are m and n. An example is the maximum in a
    softmax: the expression excludes NaN from it, as the result has NaN anyway.
    """
    writes: dict[Tensor, list[Store | Update]] = defaultdict(list)
    for stmt in statements(body):
        if isinstance(stmt, Store | Update):
            writes[stmt.tensor].append(stmt)
    nan_free: set[Tensor] = set()

    def is_nan_free(stmt: Store | Update) -> bool:
        """Return whether a statement writes no NaN, if the tensors in `nan_free` hold none."""
        if isinstance(stmt, Store):
            return isinstance(stmt.value, Const) and not math.isnan(stmt.value.value)
        known = isinstance(stmt.value, Load) and stmt.value.tensor in nan_free
        return stmt.kind in ("max", "min") and (known or without_nan_test(stmt.value) is not stmt.value)

    new = set(writes)
    while new:
        candidates = (t for t, stores in writes.items() if t not in nan_free and is_float(t.dtype))
        new = {
            t
            for t in candidates
            if any(isinstance(stmt, Update) for stmt in writes[t]) and all(map(is_nan_free, writes[t]))
        }
        nan_free |= new
    return frozenset(nan_free)
