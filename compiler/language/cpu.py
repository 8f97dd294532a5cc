"""A traced kernel as loops for the CPU.

Programs are loops around everything. Elementwise tiles are computed where they are read; what is reduced, multiplied,
carried by a loop or costs much and is read twice lies in a local tensor. Products are tensor expressions under the
compiler's own schedule; of the other loops vectors.py makes vectors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from celosia.compiler.expr import Alloc, Axis, Expr, For, Function, If, Let, Load, Stmt, Tensor, Update, Var, wrap
from celosia.compiler.expr import Store as Put
from celosia.compiler.expr.affine import flatten, from_linear, interval, linear, unravel
from celosia.compiler.expr.fuse import merge
from celosia.compiler.expr.loop_partition import fold_condition, partition
from celosia.compiler.expr.loops import block, sequence
from celosia.compiler.expr.nest_parts import reduction_identity
from celosia.compiler.expr.nodes import INDEX, Const, binary, call, cast, clip, select
from celosia.compiler.expr.walk import walk
from celosia.compiler.language.bounds import UnknownScalar, values
from celosia.compiler.language.errors import fail
from celosia.compiler.language.products import Element, loops_over, nest, product
from celosia.compiler.language.tile import (
    KernelRun,
    Scope,
    Tile,
    TracedLoop,
    TracedStore,
    origin,
    scopes,
    stores,
    upstream,
)
from celosia.compiler.language.vectors import vectorised
from celosia.compiler.tensorize.intrinsics import requantised, rescaled

Index = tuple[Expr, ...]
COSTLY = ("exp", "log", "tanh", "sin", "cos", "sqrt")
MUCH = 24
"""Operations from which on what is read twice lies in memory; each of `COSTLY` counts as so many."""


class CpuKernel:
    """function: its inputs are the arrays that are only read, its outputs those that are written."""

    def __init__(self, name: str, program: KernelRun) -> None:
        self.program = program
        self.live = live_tiles(program.top)
        self.stores = stores(program.top)
        self.written = {each.array for each in self.stores}
        self.read = read = [tile.more["array"] for tile in self.live if tile.op == "load"]
        self.arrays = list(dict.fromkeys([*(a for a in read if a not in self.written), *self.written]))
        self.tensors = {a: Tensor(a.name, (max(a.size, 1),), a.dtype) for a in self.arrays}
        self.uses = Counter(arg for tile in self.live for arg in tile.args)
        self.uses.update(arg for each in self.stores for arg in each.args)
        factors = [(dot, origin(side)) for dot in self.live if dot.op == "dot" for side in dot.args[:2]]
        self.ahead = {side for dot, side in factors if side.scope is not dot.scope}  # of all iterations of a loop
        self.buffers: dict[Tile, Tensor] = {}
        self.homes: dict[Tile, TracedStore] = {}
        self.into: dict[Tile, Tensor] = {}
        self.costs: dict[Tile, int] = {}
        self.known: dict[tuple[Any, ...], Expr] = {}
        self.lets: dict[Tile, tuple[Axis, Expr]] = {}
        self.axes = {
            loop: Axis(f"t{n}", extent=loop.steps)
            for n, loop in enumerate(scopes(program.top))
            if isinstance(loop, TracedLoop)
        }
        self.ids = [Axis(f"p{axis}", extent=size) for axis, size in enumerate(program.grid)]
        body = self._scope(program.top)
        for var, value in reversed(self.lets.values()):
            body = Let(var, value, body)
        for axis in reversed(self.ids):
            body = For(axis, axis.extent, body)
        inputs, outputs = (
            [self.tensors[a] for a in self.arrays if (a in self.written) == side] for side in (False, True)
        )
        function = partition(Function(name, tuple(inputs), tuple(outputs), body))
        self.function = Function(name, function.inputs, function.outputs, _parallel(vectorised(function.body)))

    # Statements ---------------------------------------------------------------------------------------------------

    def _scope(self, scope: Scope, handed_on: Sequence[tuple[Tile, Tile]] = ()) -> Stmt:
        """The statements of a scope, with memory for its tiles around them."""
        memory: list[Tensor] = []
        done: list[Stmt] = []
        for each in scope.body:
            if isinstance(each, TracedStore):
                done.append(self._store(each))
            elif isinstance(each, TracedLoop):
                done.append(self._loop(each, memory))
            elif each in self.live and self._needs_memory(each):
                done.append(self._computed(each, memory))
        done = merge([part for stmt in done for part in sequence(stmt)], same_depth=True)  # or they are no vectors
        body = block(*done, self._handed_on(handed_on, memory))
        for tensor in memory:
            body = Alloc(tensor, body, "local")
        return body

    def _needs_memory(self, tile: Tile) -> bool:
        if tile.op in ("reduce", "dot") or tile in self.ahead:
            return True
        if tile.op == "load" and tile.more["array"] in self.written:
            return True  # a store that follows must not change it
        if tile.op == "lookup" or self.uses[tile] < 2:
            return False
        return tile.op == "requantise" or tile.op == "residual" or (tile.dtype != INDEX and self._cost(tile) >= MUCH)

    def _cost(self, tile: Tile) -> int:
        """Operations that it takes to compute it again."""
        if tile not in self.costs:
            views = ("unary", "binary", "where", "cast", "broadcast", "reshape", "trans")
            here = MUCH if tile.more.get("name") in (*COSTLY, "div") and tile.dtype != INDEX else 1
            again = tile not in self.buffers and tile not in self.homes and tile.op in views
            self.costs[tile] = min(here + sum(map(self._cost, tile.args)), MUCH) if again else 0
        return self.costs[tile]

    def _local(self, tile: Tile, memory: list[Tensor]) -> Tensor:
        tensor = Tensor(f"{tile.op}{len(self.known)}_{len(memory)}", tile.shape, tile.dtype)
        memory.append(tensor)
        return tensor

    def _computed(self, tile: Tile, memory: list[Tensor]) -> Stmt:
        """`tile` in memory of its own."""
        self.costs[tile] = 0
        if tile.op == "dot":
            return self._dot(tile, memory)
        if tile.op == "reduce":
            return self._reduce(tile, memory)
        if self._is_under_way(tile):
            stmt = self._put(self.stores[0], tile)
            self.homes[tile] = self.stores[0]
            return stmt
        buffer = self._local(tile, memory)
        stmt = self._fill(buffer, tile)
        self.buffers[tile] = buffer
        return stmt

    def _is_under_way(self, tile: Tile) -> bool:
        """Whether `tile` can lie where the kernel's only store, element by element, puts what it makes of it: memory
        that is written anyway is fetched while the processor computes."""
        each = self.stores[0]
        if (
            len(self.stores) > 1
            or each.array in self.read
            or (tile.shape, tile.dtype) != (each.value.shape, each.array.dtype)
        ):
            return False
        if each.mask is not None:
            inside = self.at(each.mask, tuple(Axis("x", extent=size) for size in tile.shape))
            if not isinstance(inside, Const) or not inside.value:
                return False
        assert tile.scope is not None
        return any(other is each for other in tile.scope.body) and _pointwise(each.value, tile)

    def _fill(self, buffer: Tensor, tile: Tile) -> Stmt:
        return nest(tile.shape, lambda *i: Put(buffer, i, self.at(tile, i)))

    def _store(self, each: TracedStore) -> Stmt:
        return self._put(each, each.value)

    def _put(self, each: TracedStore, value: Tile) -> Stmt:
        """`value` where `each` stores."""

        def put(*index: Expr) -> Stmt:
            stmt: Stmt = Put(self.tensors[each.array], (self.at(each.offsets, index),), self.at(value, index))
            if each.mask is None:
                return stmt
            cond = self.at(each.mask, index)
            if isinstance(cond, Const):
                return stmt if cond.value else block()
            return If(cond, stmt)

        return nest(each.offsets.shape, put)

    def _reduce(self, tile: Tile, memory: list[Tensor]) -> Stmt:
        (x,), axis, kind = tile.args, tile.more["axis"], tile.more["name"]
        buffer = self._local(tile, memory)
        start = nest(tile.shape, lambda *i: Put(buffer, i, reduction_identity(kind, tile.dtype)))
        axes = [Axis(f"r{d}", extent=size) for d, size in enumerate(x.shape)]
        stmt: Stmt = Update(
            kind, buffer, tuple(a for d, a in enumerate(axes) if d != axis), cast(self.at(x, tuple(axes)), tile.dtype)
        )
        order = [d for d in range(len(axes)) if d != axis] + [axis] if axis == len(axes) - 1 else range(len(axes))
        for d in reversed(order):
            stmt = For(axes[d], axes[d].extent, stmt)
        self.buffers[tile] = buffer
        return block(start, stmt)

    def _dot(self, tile: Tile, memory: list[Tensor]) -> Stmt:
        """acc + a · b, into memory of its own, or of the accumulator that a loop carries."""
        a, b = map(origin, tile.args[:2])
        dtype = "int8" if a.dtype == "int8" else tile.dtype
        done: list[Stmt] = []
        read: list[Element] = []
        for side in (a, b):
            direct = self.at(side, tuple(Axis("x", extent=size) for size in side.shape))
            if side.dtype == dtype and isinstance(direct, Load) and (side is a or side in self.buffers):
                read.append(lambda *i, t=side: self.at(t, i))
                continue
            buffer = Tensor(f"{'ab'[side is b]}{len(self.known)}", side.shape, dtype)
            memory.append(buffer)
            done.append(nest(side.shape, lambda *i, t=side, u=buffer: Put(u, i, cast(self.at(t, i), dtype))))
            read.append(lambda *i, u=buffer: Load(u, i))
        into, fresh = self.into.get(tile), len(tile.args) == 2
        if into is None:
            into = self._local(tile, memory)
        if not fresh and self.buffers.get(tile.args[2]) is not into:
            done.append(self._fill(into, tile.args[2]))
        self.buffers[tile] = into
        left, right = read
        return block(*done, product(into, fresh, left, right, a.shape[1], tile.more["zeros"]))

    def _loop(self, loop: TracedLoop, memory: list[Tensor]) -> Stmt:
        inside = [each for scope in scopes(loop) for each in scope.body]
        if not any(isinstance(each, TracedStore) or each in self.live for each in inside):
            return block()
        axis, before = self.axes[loop], []
        updated: list[tuple[Tile, Tile]] = []
        for first, place, last, result in loop.carried:
            if not {place, result} & self.live.keys() or self._induction(place) is not None:
                continue
            buffer = self._local(place, memory)
            before.append(self._fill(buffer, first))
            self.buffers[place] = self.buffers[result] = buffer
            updated.append((place, last))
            if last.op == "dot" and len(last.args) == 3 and self.uses[place] == 1 and _pointwise(last.args[2], place):
                self.into[last] = buffer  # acc = dot(a, b, acc), or acc * c: added where it is
        body = self._scope(loop, updated)
        if loop.bound is not None:
            now = self.at(loop.start, ()) + axis * loop.step
            body = If(self.at_binary("lt", now, self.at(loop.bound, ())), body)
        return block(*before, For(axis, axis.extent, body, "ordered" if updated else "serial"))

    def _handed_on(self, rows: Sequence[tuple[Tile, Tile]], memory: list[Tensor]) -> Stmt:
        """What the next iteration begins with. A tile is written where it was once no other needs it; those that need
        each other by way of copies."""
        done: list[Stmt] = []
        left: dict[Tile, tuple[tuple[Axis, ...], Expr]] = {}
        for place, last in rows:
            if self.buffers.get(last) is not self.buffers[place]:
                index = tuple(Axis(f"i{d}", extent=size) for d, size in enumerate(place.shape))
                left[place] = index, self.at(last, index)
        while left:
            free = next((place for place in left if self._is_free(place, left)), None)
            if free is not None:
                index, value = left.pop(free)
                done.append(loops_over(index, Put(self.buffers[free], index, value)))
                continue
            copies = {place: self._local(place, memory) for place in left}
            done += [loops_over(index, Put(copies[place], index, value)) for place, (index, value) in left.items()]
            for place, (index, _) in left.items():
                done.append(loops_over(index, Put(self.buffers[place], index, Load(copies[place], index))))
            break
        return block(*done)

    def _is_free(self, place: Tile, left: dict[Tile, tuple[tuple[Axis, ...], Expr]]) -> bool:
        return not any(self._reads(e, place, index if p is place else None) for p, (index, e) in left.items())

    def _reads(self, e: Expr, place: Tile, index: Index | None) -> bool:
        """Whether `e` reads what `place` holds elsewhere than at `index`."""
        tensor = self.buffers[place]
        loads = (node for node in walk(e) if isinstance(node, Load) and node.tensor is tensor)
        return any(index is None or any(a is not b for a, b in zip(node.index, index)) for node in loads)

    # Expressions --------------------------------------------------------------------------------------------------

    def at(self, tile: Tile, index: Index) -> Expr:
        """The element of `tile` at `index`."""
        key = (tile, *index, self.buffers.get(tile), tile in self.homes)
        if key not in self.known:
            self.known[key] = self._at(tile, index)
        return self.known[key]

    def _at(self, tile: Tile, index: Index) -> Expr:
        if tile in self.buffers:
            return Load(self.buffers[tile], index)
        if tile in self.homes:
            home = self.homes[tile]
            return Load(self.tensors[home.array], (self.at(home.offsets, index),))
        more, args = tile.more, tile.args
        match tile.op:
            case "const":
                return wrap(more["number"], tile.dtype)
            case "program_id":
                return self.ids[int(more["axis"])]
            case "index":
                loop: TracedLoop = more["loop"]
                return self.axes[loop]
            case "arange":
                return index[0] + int(more["start"])
            case "phi" | "result":
                return self._carried(tile, index)
            case "broadcast":
                inner = index[len(index) - len(args[0].shape) :]
                zero = Const(0, INDEX)
                return self.at(args[0], tuple(zero if size == 1 else i for size, i in zip(args[0].shape, inner)))
            case "reshape":
                return self.at(args[0], _regrouped(tile.shape, index, args[0].shape))
            case "trans":
                back = {axis: i for axis, i in zip(more["axes"], index)}
                return self.at(args[0], tuple(back[d] for d in range(len(index))))
            case "load":
                return self._load(tile, index)
            case "lookup":
                return self.at(args[1], (cast(self.at(args[0], index), INDEX) + 128,))
        values = [self.at(arg, index) for arg in args]
        match tile.op:
            case "binary" if more["name"] == "div" and args[1].op == "broadcast" and "nearest" not in more:
                return values[0] * (1 / values[1])  # of one divisor for many, the reciprocal is computed once
            case "binary":
                found = self.at_binary(more["name"], *values)
                return self._bound(tile, found) if not tile.shape and tile.dtype == INDEX else found
            case "unary":
                return call(more["name"], *values)
            case "where":
                return select(values[0], values[1], values[2])
            case "cast":
                return cast(values[0], tile.dtype)
            case "requantise":
                low, high = (float(each) for each in more["clip"])
                return requantised(values[0], values[1], float(more["zero_point"]), low, high)
            case "residual":
                v, b, c = (float(more[name]) for name in ("scale_v", "scale_b", "scale_c"))
                total = rescaled(values[0], values[1], v, b, c, 2.0 ** -more["shift"])
                return clip(total, *(float(each) for each in more["clip"])).astype("int8")
        raise TypeError(f"the CPU knows no {tile.op}")

    def at_binary(self, op: str, a: Expr, b: Expr) -> Expr:
        """a op b; decided where the ranges of loops decide it."""
        found = binary(op, a, b)
        decided = fold_condition(found)
        return found if decided is None else decided

    def _bound(self, tile: Tile, value: Expr) -> Expr:
        """A scalar of program numbers that is no sum: a variable whose range is known."""
        if tile in self.lets:
            return self.lets[tile][0]
        if tile.more["name"] in ("add", "sub", "mul") or isinstance(value, (Const, Var)):
            return value
        try:
            found = values(self.program, tile)
        except UnknownScalar:
            return value
        if (found.ndim > 3 and found.size != np.prod(found.shape[:3])) or found.min() < 0:
            return value
        if found.min() == found.max():
            return Const(int(found.min()), INDEX)
        var = Axis(f"v{len(self.lets)}", extent=int(found.max()) + 1)
        self.lets[tile] = var, value
        return var

    def _induction(self, place: Tile) -> tuple[Tile, Tile, TracedLoop] | None:
        found: tuple[Tile, Tile, TracedLoop] | None = place.more.get("induction")
        return None if found is None or found[2].bound is not None else found

    def _carried(self, tile: Tile, index: Index) -> Expr:
        if "same" in tile.more:
            return self.at(tile.more["same"], index)
        place = tile
        if tile.op == "result":
            place = next(p for loop in self.axes for _, p, _, result in loop.carried if result is tile)
        found = self._induction(place)
        assert found is not None, "what a loop carries has memory"
        first, step, loop = found
        count: Expr = self.axes[loop] if tile is place else Const(loop.steps, INDEX)
        return self.at(first, index) + self.at(step, index) * count

    def _load(self, tile: Tile, index: Index) -> Expr:
        tensor = self.tensors[tile.more["array"]]
        offset = self.at(tile.args[0], index)
        if len(tile.args) == 1:
            reach = interval(from_linear(linear(offset)))
            exact = all(atom is None or isinstance(atom, Axis) for atom in linear(offset))
            if reach is not None and exact and (reach[0] < 0 or reach[1] >= tensor.size):
                place = reach[0] if reach[0] < 0 else reach[1]
                fail(
                    f"{tensor.name} has {tensor.size} elements, and this reads number {place}; give it a mask", tile.at
                )
            return Load(tensor, (offset,))
        return select(self.at(tile.args[1], index), Load(tensor, (offset,)), self.at(tile.args[2], index))


def _pointwise(value: Tile, tile: Tile) -> bool:
    """Whether each element of `value`, where it is computed, reads `tile` at its own place and nowhere else."""

    def alike(part: Tile) -> bool:
        return part.op in ("binary", "unary", "where") and part.shape == tile.shape

    parts = upstream([value], lambda part: part.args if part is not tile and alike(part) else ())
    return not any(_reaches(part, tile) for part in parts if part is not tile and not alike(part))


def _reaches(value: Tile, tile: Tile) -> bool:
    """Whether `tile` is read where `value` is computed; sums and products lie in memory by then."""
    parts = upstream([value], lambda part: () if part.op in ("reduce", "dot") else part.args)
    return any(part is tile for part in parts)


def _regrouped(shape: tuple[int, ...], index: Index, other: tuple[int, ...]) -> Index:
    """Index the same element in an array of the shape `other`; sizes of 1 come and go for free."""
    real = [(size, i) for size, i in zip(shape, index) if size > 1]
    if [size for size, _ in real] == [size for size in other if size > 1]:
        rest = iter(i for _, i in real)
        return tuple(next(rest) if size > 1 else Const(0, INDEX) for size in other)
    if not other:
        return ()
    return unravel(other, flatten(shape, index))


def _parallel(stmt: Stmt) -> Stmt:
    """Loops over programs, outermost, shared by threads."""
    if isinstance(stmt, For) and stmt.var.name.startswith("p"):
        if stmt.extent == 1:
            return For(stmt.var, 1, _parallel(stmt.body), stmt.kind)
        return For(stmt.var, stmt.extent, stmt.body, "parallel")
    inner = getattr(stmt, "body", None)
    return block(*map(_parallel, inner)) if isinstance(inner, tuple) else stmt


def live_tiles(top: Scope) -> dict[Tile, None]:
    """The tiles of which stores depend."""
    loops = [scope for scope in scopes(top) if isinstance(scope, TracedLoop)]
    bounds = [bound for loop in loops for bound in (loop.start, loop.bound) if bound is not None]
    carried = {each: row for loop in loops for row in loop.carried for each in row[1:2] + row[3:]}

    def before(tile: Tile) -> tuple[Tile, ...]:
        same = (tile.more["same"],) if "same" in tile.more else ()
        return *tile.args, *carried.get(tile, ()), *same

    return dict.fromkeys(upstream([*(arg for each in stores(top) for arg in each.args), *bounds], before))
