"""Lower a traced kernel to loops for the CPU.

Programs are loops around everything. Element-wise tiles are computed where they are read. Reductions, products, tiles
that a loop carries, and expensive tiles with two readers lie in local tensors. Products are tensor expressions under
the compiler's own schedule; loop_vectors.py vectorises the other loops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from celosia.compiler import expr as T
from celosia.compiler.cpu.schedule.kernel_schedules import Knobs, schedule
from celosia.compiler.expr import (
    Alloc,
    Axis,
    Expr,
    For,
    Function,
    If,
    Let,
    Load,
    Stmt,
    Tensor,
    Update,
    Var,
    lower,
    wrap,
)
from celosia.compiler.expr import Store as Put
from celosia.compiler.expr.affine import flatten, from_linear, interval, linear, unravel
from celosia.compiler.expr.loop_passes import fold_condition, merge, partition
from celosia.compiler.expr.loops import block, map_accesses, sequence
from celosia.compiler.expr.lower import reduction_identity
from celosia.compiler.expr.nodes import INDEX, Const, binary, call, cast, clip, select, walk
from celosia.compiler.language.loop_vectors import vectorise
from celosia.compiler.language.tile import (
    KernelRun,
    Scope,
    Tile,
    TracedLoop,
    TracedStore,
    fail,
    origin,
    scopes,
    stores,
    upstream,
)
from celosia.compiler.language.traced_loops import UnknownScalar, scalar_values
from celosia.compiler.ops.integer import ZeroPoint, matrix_product
from celosia.compiler.tensorize.intrinsics import requantised, rescaled

Element = Callable[[Expr, Expr], Expr]
"""Element [i, j] of a matrix, as a function of i and j."""


def loop_over_shape(shape: Sequence[int], body: Callable[..., Stmt]) -> Stmt:
    """Return loops over all indices of `shape` around the statement body(*index)."""
    axes = [Axis(f"i{d}", extent=size) for d, size in enumerate(shape)]
    return loops_over(axes, body(*axes))


def loops_over(axes: Sequence[Axis], stmt: Stmt) -> Stmt:
    """Wrap `stmt` in loops over `axes`."""
    for axis in reversed(axes):
        stmt = For(axis, axis.extent, stmt)
    return stmt


def add_product(into: Tensor, overwrite: bool, a: Element, b: Element, steps: int, zeros: tuple[int, int]) -> Stmt:
    """Return loops that compute into[m, n] += (a[m, k] - za) · (b[k, n] - zb); = instead of += with `overwrite`.

    a, b: elements of the operands. steps: k. zeros: za and zb, 0 unless the operands are int8. The loops have the
    schedule of the compiler's own products.
    """
    m, n = into.shape

    def finish(total: Expr, index: tuple[Expr, ...]) -> Expr:
        """Return the stored element, from the sum of products `total`."""
        return total if overwrite else into[index] + total

    left, right = T.compute((m, steps), a, "a"), T.compute((steps, n), b, "b")
    if left.dtype == "int8":
        za, zb = (wrap(zero, "int32") for zero in (zeros[0] + 128, zeros[1]))
        result = matrix_product(left, right, za, ZeroPoint(lambda _: zb, is_zero=not zeros[1]), finish)
    else:
        k = T.reduce_axis(steps, "k")
        result = T.compute((m, n), lambda i, j: finish(T.sum(a(i, k) * b(k, j), k), (i, j)), "product")
    result = replace(result, name="into.sums")  # no array has such a name
    scheduled = schedule((result,), {result.name: Knobs(tail="peel")})
    (result,) = scheduled.outputs
    return map_accesses(lower(scheduled).body, lambda _: None, lambda t, i: (into if t is result else t, i))


Index = tuple[Expr, ...]
COSTLY = ("exp", "log", "tanh", "sin", "cos", "sqrt")
"""Functions that take many times as long as an addition."""
EXPENSIVE = 24
"""Number of operations from which on a tile with two readers is stored in memory, and not computed for each reader.
One function of `COSTLY` counts as so many."""


class CpuKernel:
    """A kernel as a loop function: its inputs are the arrays that are only read, its outputs those that are written.

    live: tiles that stores need. uses: readers of each tile. loop_invariant: operands of products that a loop around
    does not change. buffers: the local tensor that holds a tile. stored_in: the store whose output memory holds a tile.
    accumulator_of: the tensor of a carried sum into which a product is added. costs: operations that recompute a tile.
    known: expressions of elements that were built already. lets: the variable of a scalar, and its value. axes: the
    variable of each traced loop. ids: the variables of the loops over programs.
    """

    def __init__(self, name: str, run: KernelRun) -> None:
        """Build the loops: the kernel's scopes inside loops over programs, with conditions partitioned and vectors."""
        self.run = run
        self.live = live_tiles(run.top)
        self.stores = stores(run.top)
        self.written = {output.array for output in self.stores}
        self.read = read = [tile.attributes["array"] for tile in self.live if tile.op == "load"]
        self.arrays = list(dict.fromkeys([*(a for a in read if a not in self.written), *self.written]))
        self.tensors = {a: Tensor(a.name, (max(a.size, 1),), a.dtype) for a in self.arrays}
        self.uses = Counter(arg for tile in self.live for arg in tile.args)
        self.uses.update(arg for output in self.stores for arg in output.args)
        factors = [(dot, origin(side)) for dot in self.live if dot.op == "dot" for side in dot.args[:2]]
        self.loop_invariant = {side for dot, side in factors if side.scope is not dot.scope}
        self.buffers: dict[Tile, Tensor] = {}
        self.stored_in: dict[Tile, TracedStore] = {}
        self.accumulator_of: dict[Tile, Tensor] = {}
        self.costs: dict[Tile, int] = {}
        self.known: dict[tuple[Any, ...], Expr] = {}
        self.lets: dict[Tile, tuple[Axis, Expr]] = {}
        self.axes = {
            loop: Axis(f"t{n}", extent=loop.steps)
            for n, loop in enumerate(scopes(run.top))
            if isinstance(loop, TracedLoop)
        }
        self.ids = [Axis(f"p{axis}", extent=size) for axis, size in enumerate(run.grid)]
        body = self._lower_scope(run.top)
        for var, value in reversed(self.lets.values()):
            body = Let(var, value, body)
        for axis in reversed(self.ids):
            body = For(axis, axis.extent, body)
        inputs, outputs = (
            [self.tensors[a] for a in self.arrays if (a in self.written) == side] for side in (False, True)
        )
        function = partition(Function(name, tuple(inputs), tuple(outputs), body))
        self.function = Function(name, function.inputs, function.outputs, _share_programs(vectorise(function.body)))

    # Statements ---------------------------------------------------------------------------------------------------

    def _lower_scope(self, scope: Scope, updates: Sequence[tuple[Tile, Tile]] = ()) -> Stmt:
        """Return the statements of a scope (the body of the kernel or of a loop), inside allocations for its tiles.

        updates: for each variable that a loop carries, its placeholder and its tile after the body.
        """
        memory: list[Tensor] = []
        done: list[Stmt] = []
        for item in scope.body:
            if isinstance(item, TracedStore):
                done.append(self._lower_store(item, item.value))
            elif isinstance(item, TracedLoop):
                done.append(self._lower_loop(item, memory))
            elif item in self.live and self._needs_memory(item):
                done.append(self._compute_into_memory(item, memory))
        # Bodies of different depth stay apart, since merged loops with loops inside would not become vectors.
        done = merge([part for stmt in done for part in sequence(stmt)], same_depth=True)
        body = block(*done, self._update_carried(updates, memory))
        for tensor in memory:
            body = Alloc(tensor, body, "local")
        return body

    def _needs_memory(self, tile: Tile) -> bool:
        """Return whether a tile is computed once into memory rather than at each reader."""
        if tile.op in ("reduce", "dot") or tile in self.loop_invariant:
            return True
        if tile.op == "load" and tile.attributes["array"] in self.written:
            return True  # a store that follows must not change it
        if tile.op == "lookup" or self.uses[tile] < 2:
            return False
        return (
            tile.op == "requantise" or tile.op == "residual" or (tile.dtype != INDEX and self._cost(tile) >= EXPENSIVE)
        )

    def _cost(self, tile: Tile) -> int:
        """Count the operations that it takes to compute a tile again, up to EXPENSIVE; 0 for a tile in memory."""
        if tile not in self.costs:
            views = ("unary", "binary", "where", "cast", "broadcast", "reshape", "trans")
            own_cost = EXPENSIVE if tile.attributes.get("name") in (*COSTLY, "div") and tile.dtype != INDEX else 1
            is_recomputed = tile not in self.buffers and tile not in self.stored_in and tile.op in views
            self.costs[tile] = min(own_cost + sum(map(self._cost, tile.args)), EXPENSIVE) if is_recomputed else 0
        return self.costs[tile]

    def _allocate(self, tile: Tile, memory: list[Tensor]) -> Tensor:
        """Create a local tensor for `tile`, and append it to `memory`, the allocations of the current scope."""
        tensor = Tensor(f"{tile.op}{len(self.known)}_{len(memory)}", tile.shape, tile.dtype)
        memory.append(tensor)
        return tensor

    def _compute_into_memory(self, tile: Tile, memory: list[Tensor]) -> Stmt:
        """Return the statements that compute `tile` into a local tensor, or into the kernel's output.

        Later readers load it from there.
        """
        self.costs[tile] = 0
        if tile.op == "dot":
            return self._lower_dot(tile, memory)
        if tile.op == "reduce":
            return self._lower_reduction(tile, memory)
        if self._can_use_output(tile):
            stmt = self._lower_store(self.stores[0], tile)
            self.stored_in[tile] = self.stores[0]
            return stmt
        buffer = self._allocate(tile, memory)
        stmt = self._fill(buffer, tile)
        self.buffers[tile] = buffer
        return stmt

    def _can_use_output(self, tile: Tile) -> bool:
        """Return whether `tile` can lie in the memory of the kernel's only output.

        Each element of the output must be computed from the same element of `tile`. Output memory is written anyway, so
        that the processor fetches it while it computes.
        """
        output_store = self.stores[0]
        if (
            len(self.stores) > 1
            or output_store.array in self.read
            or (tile.shape, tile.dtype) != (output_store.value.shape, output_store.array.dtype)
        ):
            return False
        if output_store.mask is not None:
            inside = self.element(output_store.mask, tuple(Axis("x", extent=size) for size in tile.shape))
            if not isinstance(inside, Const) or not inside.value:
                return False
        assert tile.scope is not None
        return any(other is output_store for other in tile.scope.body) and _is_pointwise(output_store.value, tile)

    def _fill(self, buffer: Tensor, tile: Tile) -> Stmt:
        """Return loops that compute all elements of `tile` into `buffer`."""
        return loop_over_shape(tile.shape, lambda *i: Put(buffer, i, self.element(tile, i)))

    def _lower_store(self, target_store: TracedStore, value: Tile) -> Stmt:
        """Return loops that store the elements of `value` at the offsets and under the mask of `target_store`."""

        def write_element(*index: Expr) -> Stmt:
            """Write the element at `index` of the tile, under the store's mask."""
            stmt: Stmt = Put(
                self.tensors[target_store.array],
                (self.element(target_store.offsets, index),),
                self.element(value, index),
            )
            if target_store.mask is None:
                return stmt
            cond = self.element(target_store.mask, index)
            if isinstance(cond, Const):
                return stmt if cond.value else block()
            return If(cond, stmt)

        return loop_over_shape(target_store.offsets.shape, write_element)

    def _lower_reduction(self, tile: Tile, memory: list[Tensor]) -> Stmt:
        """Return loops that compute a reduction into a local tensor.

        The reduced axis is the innermost loop where it is the last axis, else the outermost, so that reads are
        contiguous.
        """
        (x,), axis, kind = tile.args, tile.attributes["axis"], tile.attributes["name"]
        buffer = self._allocate(tile, memory)
        initialise = loop_over_shape(tile.shape, lambda *i: Put(buffer, i, reduction_identity(kind, tile.dtype)))
        axes = [Axis(f"r{d}", extent=size) for d, size in enumerate(x.shape)]
        stmt: Stmt = Update(
            kind,
            buffer,
            tuple(a for d, a in enumerate(axes) if d != axis),
            cast(self.element(x, tuple(axes)), tile.dtype),
        )
        order = [d for d in range(len(axes)) if d != axis] + [axis] if axis == len(axes) - 1 else range(len(axes))
        for d in reversed(order):
            stmt = For(axes[d], axes[d].extent, stmt)
        self.buffers[tile] = buffer
        return block(initialise, stmt)

    def _lower_dot(self, tile: Tile, memory: list[Tensor]) -> Stmt:
        """Return loops that compute acc + a · b into a local tensor, or in place in the sum that a loop carries.

        Operands that are not simply loaded, or have another type, are copied to local tensors first.
        """
        a, b = map(origin, tile.args[:2])
        dtype = "int8" if a.dtype == "int8" else tile.dtype
        done: list[Stmt] = []
        read: list[Element] = []
        for side in (a, b):
            direct = self.element(side, tuple(Axis("x", extent=size) for size in side.shape))
            if side.dtype == dtype and isinstance(direct, Load) and (side is a or side in self.buffers):
                read.append(lambda *i, t=side: self.element(t, i))
                continue
            buffer = Tensor(f"{'ab'[side is b]}{len(self.known)}", side.shape, dtype)
            memory.append(buffer)
            done.append(
                loop_over_shape(side.shape, lambda *i, t=side, u=buffer: Put(u, i, cast(self.element(t, i), dtype)))
            )
            read.append(lambda *i, u=buffer: Load(u, i))
        accumulator_of, fresh = self.accumulator_of.get(tile), len(tile.args) == 2
        if accumulator_of is None:
            accumulator_of = self._allocate(tile, memory)
        if not fresh and self.buffers.get(tile.args[2]) is not accumulator_of:
            done.append(self._fill(accumulator_of, tile.args[2]))
        self.buffers[tile] = accumulator_of
        left, right = read
        return block(*done, add_product(accumulator_of, fresh, left, right, a.shape[1], tile.attributes["zeros"]))

    def _lower_loop(self, loop: TracedLoop, memory: list[Tensor]) -> Stmt:
        """Return a loop with the initialisation of the tiles that it carries; nothing where no store needs it."""
        inside = [item for scope in scopes(loop) for item in scope.body]
        if not any(isinstance(item, TracedStore) or item in self.live for item in inside):
            return block()
        axis, before = self.axes[loop], []
        updated: list[tuple[Tile, Tile]] = []
        for first, carried_tile, last, result in loop.carried:
            if not {carried_tile, result} & self.live.keys() or self._induction(carried_tile) is not None:
                continue
            buffer = self._allocate(carried_tile, memory)
            before.append(self._fill(buffer, first))
            self.buffers[carried_tile] = self.buffers[result] = buffer
            updated.append((carried_tile, last))
            if (
                last.op == "dot"
                and len(last.args) == 3
                and self.uses[carried_tile] == 1
                and _is_pointwise(last.args[2], carried_tile)
            ):
                self.accumulator_of[last] = buffer  # acc = dot(a, b, acc), or acc * c: added in place
        body = self._lower_scope(loop, updated)
        if loop.bound is not None:
            index = self.element(loop.start, ()) + axis * loop.step
            body = If(self._build_binary("lt", index, self.element(loop.bound, ())), body)
        return block(*before, For(axis, axis.extent, body, "ordered" if updated else "serial"))

    def _update_carried(self, rows: Sequence[tuple[Tile, Tile]], memory: list[Tensor]) -> Stmt:
        """Return statements that store the carried tiles with which the next iteration starts.

        rows: placeholder and new value of each. A placeholder's memory is overwritten once no other new value reads it;
        values that need each other are copied to local tensors first.
        """
        done: list[Stmt] = []
        remaining: dict[Tile, tuple[tuple[Axis, ...], Expr]] = {}
        for carried_tile, last in rows:
            if self.buffers.get(last) is not self.buffers[carried_tile]:
                index = tuple(Axis(f"i{d}", extent=size) for d, size in enumerate(carried_tile.shape))
                remaining[carried_tile] = index, self.element(last, index)
        while remaining:
            next_tile = next(
                (carried_tile for carried_tile in remaining if self._can_update(carried_tile, remaining)), None
            )
            if next_tile is not None:
                index, value = remaining.pop(next_tile)
                done.append(loops_over(index, Put(self.buffers[next_tile], index, value)))
                continue
            copies = {carried_tile: self._allocate(carried_tile, memory) for carried_tile in remaining}
            done += [
                loops_over(index, Put(copies[carried_tile], index, value))
                for carried_tile, (index, value) in remaining.items()
            ]
            for carried_tile, (index, _) in remaining.items():
                done.append(
                    loops_over(index, Put(self.buffers[carried_tile], index, Load(copies[carried_tile], index)))
                )
            break
        return block(*done)

    def _can_update(self, carried_tile: Tile, remaining: dict[Tile, tuple[tuple[Axis, ...], Expr]]) -> bool:
        """Return whether `carried_tile` can be overwritten: no value of `remaining` reads it.

        Its own new value may read it at the same index.
        """
        return not any(
            self._reads_elsewhere(value, carried_tile, index if other is carried_tile else None)
            for other, (index, value) in remaining.items()
        )

    def _reads_elsewhere(self, e: Expr, carried_tile: Tile, index: Index | None) -> bool:
        """Return whether `e` reads `carried_tile` at another index than `index`; with None, whether it reads it."""
        tensor = self.buffers[carried_tile]
        loads = (node for node in walk(e) if isinstance(node, Load) and node.tensor is tensor)
        return any(index is None or any(a is not b for a, b in zip(node.index, index)) for node in loads)

    # Expressions --------------------------------------------------------------------------------------------------

    def element(self, tile: Tile, index: Index) -> Expr:
        """Return the expression of the element of `tile` at `index`; equal requests give one expression."""
        key = (tile, *index, self.buffers.get(tile), tile in self.stored_in)
        if key not in self.known:
            self.known[key] = self._build_element(tile, index)
        return self.known[key]

    def _build_element(self, tile: Tile, index: Index) -> Expr:
        """Build the element of `tile` at `index`, by the operation that makes the tile."""
        if tile in self.buffers:
            return Load(self.buffers[tile], index)
        if tile in self.stored_in:
            home = self.stored_in[tile]
            return Load(self.tensors[home.array], (self.element(home.offsets, index),))
        attributes, args = tile.attributes, tile.args
        match tile.op:
            case "const":
                return wrap(attributes["number"], tile.dtype)
            case "program_id":
                return self.ids[int(attributes["axis"])]
            case "index":
                loop: TracedLoop = attributes["loop"]
                return self.axes[loop]
            case "arange":
                return index[0] + int(attributes["start"])
            case "phi" | "result":
                return self._build_carried(tile, index)
            case "broadcast":
                source_index = index[len(index) - len(args[0].shape) :]
                zero = Const(0, INDEX)
                pairs = zip(args[0].shape, source_index)
                return self.element(args[0], tuple(zero if size == 1 else i for size, i in pairs))
            case "reshape":
                return self.element(args[0], _reshaped_index(tile.shape, index, args[0].shape))
            case "trans":
                back = {axis: i for axis, i in zip(attributes["axes"], index)}
                return self.element(args[0], tuple(back[d] for d in range(len(index))))
            case "load":
                return self._build_load(tile, index)
            case "lookup":
                return self.element(args[1], (cast(self.element(args[0], index), INDEX) + 128,))
        values = [self.element(arg, index) for arg in args]
        match tile.op:
            case "binary" if attributes["name"] == "div" and args[1].op == "broadcast" and "nearest" not in attributes:
                return values[0] * (1 / values[1])  # the reciprocal of a shared divisor is computed once
            case "binary":
                result = self._build_binary(attributes["name"], *values)
                return self._bind_to_variable(tile, result) if not tile.shape and tile.dtype == INDEX else result
            case "unary":
                return call(attributes["name"], *values)
            case "where":
                return select(values[0], values[1], values[2])
            case "cast":
                return cast(values[0], tile.dtype)
            case "requantise":
                low, high = (float(bound) for bound in attributes["clip"])
                return requantised(values[0], values[1], float(attributes["zero_point"]), low, high)
            case "residual":
                v, b, c = (float(attributes[name]) for name in ("scale_v", "scale_b", "scale_c"))
                total = rescaled(values[0], values[1], v, b, c, 2.0 ** -attributes["shift"])
                return clip(total, *(float(bound) for bound in attributes["clip"])).astype("int8")
        raise TypeError(f"the CPU knows no {tile.op}")

    def _build_binary(self, op: str, a: Expr, b: Expr) -> Expr:
        """Build a op b, folded where the ranges of loops decide it."""
        result = binary(op, a, b)
        folded = fold_condition(result)
        return result if folded is None else folded

    def _bind_to_variable(self, tile: Tile, value: Expr) -> Expr:
        """Return an expression for the scalar index `tile`, whose value is `value`, with a known range.

        A quotient, minimum or similar of program numbers becomes a variable, an Axis of the range that it takes, since
        interval arithmetic on the expression itself would be too coarse. Sums and products are returned unchanged.
        """
        if tile in self.lets:
            return self.lets[tile][0]
        if tile.attributes["name"] in ("add", "sub", "mul") or isinstance(value, (Const, Var)):
            return value
        try:
            all_values = scalar_values(self.run, tile)
        except UnknownScalar:
            return value
        if (all_values.ndim > 3 and all_values.size != np.prod(all_values.shape[:3])) or all_values.min() < 0:
            return value
        if all_values.min() == all_values.max():
            return Const(int(all_values.min()), INDEX)
        var = Axis(f"v{len(self.lets)}", extent=int(all_values.max()) + 1)
        self.lets[tile] = var, value
        return var

    def _induction(self, carried_tile: Tile) -> tuple[Tile, Tile, TracedLoop] | None:
        """Return (start, step, loop) of a tile that each iteration increases by `step`; None for other tiles."""
        induction: tuple[Tile, Tile, TracedLoop] | None = carried_tile.attributes.get("induction")
        return None if induction is None or induction[2].bound is not None else induction

    def _build_carried(self, tile: Tile, index: Index) -> Expr:
        """Build the element of a tile that a loop carries without memory: an unchanged one, or an induction variable.

        tile: the placeholder in the loop, or the result after it.
        """
        if "same" in tile.attributes:
            return self.element(tile.attributes["same"], index)
        carried_tile = tile
        if tile.op == "result":
            carried_tile = next(p for loop in self.axes for _, p, _, result in loop.carried if result is tile)
        induction = self._induction(carried_tile)
        assert induction is not None, "what a loop carries has memory"
        first, step, loop = induction
        count: Expr = self.axes[loop] if tile is carried_tile else Const(loop.steps, INDEX)
        return self.element(first, index) + self.element(step, index) * count

    def _build_load(self, tile: Tile, index: Index) -> Expr:
        """Build the load of an element, under its mask. Raises LanguageError where it leaves the array unmasked."""
        tensor = self.tensors[tile.attributes["array"]]
        offset = self.element(tile.args[0], index)
        if len(tile.args) == 1:
            bounds = interval(from_linear(linear(offset)))
            is_exact = all(atom is None or isinstance(atom, Axis) for atom in linear(offset))
            if bounds is not None and is_exact and (bounds[0] < 0 or bounds[1] >= tensor.size):
                element = bounds[0] if bounds[0] < 0 else bounds[1]
                fail(
                    f"{tensor.name} has {tensor.size} elements, and this reads number {element}; give it a mask",
                    tile.at,
                )
            return Load(tensor, (offset,))
        return select(self.element(tile.args[1], index), Load(tensor, (offset,)), self.element(tile.args[2], index))


def _is_pointwise(value: Tile, tile: Tile) -> bool:
    """Return whether each element of `value` reads `tile` only at its own index."""

    def is_elementwise(part: Tile) -> bool:
        return part.op in ("binary", "unary", "where") and part.shape == tile.shape

    parts = upstream([value], lambda part: part.args if part is not tile and is_elementwise(part) else ())
    return not any(_reads_tile(part, tile) for part in parts if part is not tile and not is_elementwise(part))


def _reads_tile(value: Tile, tile: Tile) -> bool:
    """Return whether computing `value` reads `tile`, where reductions and products are in memory already."""
    parts = upstream([value], lambda part: () if part.op in ("reduce", "dot") else part.args)
    return any(part is tile for part in parts)


def _reshaped_index(shape: tuple[int, ...], index: Index, other: tuple[int, ...]) -> Index:
    """Return the index in an array of shape `other` of the element that has `index` in `shape`.

    Where only axes of size 1 differ, no division is needed.
    """
    nontrivial = [(size, i) for size, i in zip(shape, index) if size > 1]
    if [size for size, _ in nontrivial] == [size for size in other if size > 1]:
        remaining = iter(i for _, i in nontrivial)
        return tuple(next(remaining) if size > 1 else Const(0, INDEX) for size in other)
    if not other:
        return ()
    return unravel(other, flatten(shape, index))


def _share_programs(stmt: Stmt) -> Stmt:
    """Mark the outermost loop over several programs as "parallel", so that threads share its iterations."""
    if isinstance(stmt, For) and stmt.var.name.startswith("p"):
        if stmt.extent == 1:
            return For(stmt.var, 1, _share_programs(stmt.body), stmt.kind)
        return For(stmt.var, stmt.extent, stmt.body, "parallel")
    body = getattr(stmt, "body", None)
    return block(*map(_share_programs, body)) if isinstance(body, tuple) else stmt


def live_tiles(top: Scope) -> dict[Tile, None]:
    """Return the tiles on which stores depend; all others are dead code."""
    loops = [scope for scope in scopes(top) if isinstance(scope, TracedLoop)]
    bounds = [bound for loop in loops for bound in (loop.start, loop.bound) if bound is not None]
    carried = {value: row for loop in loops for row in loop.carried for value in row[1:2] + row[3:]}

    def predecessors(tile: Tile) -> tuple[Tile, ...]:
        unchanged = (tile.attributes["same"],) if "same" in tile.attributes else ()
        return *tile.args, *carried.get(tile, ()), *unchanged

    return dict.fromkeys(upstream([*(arg for value in stores(top) for arg in value.args), *bounds], predecessors))
