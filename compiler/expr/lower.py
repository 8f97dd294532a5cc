"""Tensors and their schedule to the loop IR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from celosia.compiler.expr.affine import flatten
from celosia.compiler.expr.bounds import Region, Sums, region, simplified, statements
from celosia.compiler.expr.loops import (
    SCRATCHPADS,
    Alloc,
    Block,
    Declared,
    For,
    Function,
    If,
    Stmt,
    Store,
    Update,
    block,
    exprs,
    map_accesses,
)
from celosia.compiler.expr.nodes import (
    INDEX,
    Axis,
    Const,
    Expr,
    Load,
    Reduce,
    Scan,
    Tensor,
    Var,
    equal,
    is_float,
)
from celosia.compiler.expr.pieces import (
    guarded,
    in_lanes,
    leaves,
    reduce_and,
    replaced,
    start_value,
    with_copies,
    with_whole_tiles,
    without_single,
)
from celosia.compiler.expr.schedule import Fuse, Schedule, ScheduleError, Split, Stage, create_schedule
from celosia.compiler.expr.transform import inline
from celosia.compiler.expr.walk import substitute, walk


def lower(
    what: Tensor | Sequence[Tensor] | Schedule, inputs: Sequence[Tensor] | None = None, name: str | None = None,
    scalars: Sequence[Var] = (),
) -> Function:  # fmt: skip
    """The loops of a schedule, or of tensors under the plain one.

    `inputs` orders the kernel's parameters; left out, they are the placeholders in the order of first use.
    ValueError where a placeholder that is needed is not among them; ScheduleError where the schedule cannot be
    followed.
    """
    schedule = what if isinstance(what, Schedule) else create_schedule(what)
    needed = [t for t in schedule.tensors if t not in schedule.stages and t.value is None]
    inputs = tuple(needed if inputs is None else inputs)
    if missing := [t.name for t in needed if t not in inputs]:
        raise ValueError(f"placeholders {missing} are read but not among the inputs")

    lowering = _Lowering(schedule)
    code = block(*(lowering.nest(t) for t in lowering.bodies if schedule[t].attached is None))
    for tensor in reversed(lowering.bodies):
        stage = schedule[tensor]
        if tensor not in schedule.outputs and stage.attached is None:
            code = Alloc(tensor, code, stage.scope, stage.kept)
    lowering.check_readers(code)
    if lowering.tensorized:
        code = lowering.with_intrinsics(code, {})
    if any(stage.attached for stage in schedule.stages.values()):
        code = without_single(code)
    return Function(name or schedule.outputs[0].name, inputs, schedule.outputs, code, scalars=tuple(scalars))


LOCAL_BYTES = 4096  # tensors of one iteration up to this size need no place in the workspace


class _Lowering:
    """Loop nests of the stages of one schedule. `bodies`: what is computed, tensors that are inlined left out."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.bodies: dict[Tensor, Expr] = {}
        self.tensorized: dict[Var, tuple[Declared, Expr]] = {}  # outermost loop of a tile -> by what, when it is first
        copies: dict[Tensor, Tensor] = {}  # inlined tensors whose own definition was rewritten
        for tensor, stage in schedule.stages.items():
            body = inline(with_copies(stage.body, copies), set(copies.values()))
            if stage.inlined and tensor not in schedule.outputs:
                copies[tensor] = Tensor(tensor.name, tensor.shape, tensor.dtype, tensor.axes, body)
            else:
                self.bodies[tensor] = body
        for tensor, stage in schedule.stages.items():
            if tensor in schedule.outputs and stage.scope != "workspace":
                raise ScheduleError(f"{tensor.name} is an output, so it is not kept in {stage.scope}; see cache_write")
            if stage.attached is None:
                continue
            consumer, axis = stage.attached
            if tensor in schedule.outputs:
                raise ScheduleError(f"{tensor.name} is an output: all of it is needed after {consumer.tensor.name}")
            if consumer.tensor not in self.bodies:
                raise ScheduleError(f"{tensor.name} is computed at {consumer.tensor.name}, which is inlined")
            if axis not in consumer.order:
                what = f"{tensor.name} is computed at loop {axis.name} of {consumer.tensor.name}"
                raise ScheduleError(f"{what}, which was split or fused since")
            around = consumer.order[: consumer.order.index(axis) + 1]
            if vectorized := [loop for loop in around if consumer.kinds.get(loop) == "vectorized"]:
                raise ScheduleError(f"{tensor.name} cannot be computed inside the vectorized loop {vectorized[0].name}")

    def nest(self, tensor: Tensor, part: Region | None = None, target: Tensor | None = None) -> Stmt:
        """The loops of `tensor`, or those that write only `part` of it, as the tensor `target`."""
        if isinstance(body := self.bodies[tensor], Scan):
            if part is not None:
                raise ScheduleError(f"{tensor.name} is a scan, so it is not computed in parts")
            step = self.schedule[tensor].step
            assert step is not None
            return _steps(body, step, tensor)
        return Nest(self, self.schedule[tensor], part, target or tensor).code

    def with_attached(self, stage: Stage, axis: Axis, inner: Stmt) -> Stmt:
        """`inner`, the body of loop `axis`, after what is computed there."""
        for tensor in reversed(self.bodies):
            if self.schedule.stages[tensor].attached == (stage, axis):
                inner = self._attach(tensor, f"{stage.tensor.name} at loop {axis.name}", inner)
        return inner

    def _attach(self, tensor: Tensor, where: str, inner: Stmt) -> Stmt:
        part = region(tensor, inner)
        if part is None:
            raise ScheduleError(f"{tensor.name} is computed inside {where}, where nothing reads it")
        part = with_whole_tiles(self.schedule[tensor], part)
        small = Tensor(tensor.name, tuple(count for _, count in part), tensor.dtype)
        sums = Sums()

        def moved(e: Expr) -> Expr | None:
            if not isinstance(e, Load) or e.tensor is not tensor:
                return None
            if len(e.index) != len(tensor.shape):
                if small.shape != tensor.shape:
                    raise ScheduleError(f"{tensor.name}: it is read by element numbers, so its part cannot be told")
                return Load(small, e.index)
            return Load(small, tuple(sums.difference(i, first) for i, (first, _) in zip(e.index, part)))

        code = block(self.nest(tensor, part, small), map_accesses(inner, moved, of=tensor))
        scope = self.schedule[tensor].scope
        if scope == "workspace" and small.nbytes <= LOCAL_BYTES:
            scope = "local"
        return Alloc(small, code, scope, self.schedule[tensor].kept)

    def check_readers(self, code: Stmt) -> None:
        """ScheduleError where a tensor that is computed inside a loop is read outside it."""
        read = {n.tensor for s in statements(code) for e in exprs(s) for n in walk(e) if isinstance(n, Load)}
        for tensor in self.bodies:
            attached = self.schedule[tensor].attached
            if attached is not None and tensor in read:
                consumer, axis = attached
                raise ScheduleError(
                    f"{tensor.name} is computed at loop {axis.name} of {consumer.tensor.name}, but also read outside it"
                )

    def with_intrinsics(self, code: Stmt, scopes: dict[Tensor, str]) -> Stmt:
        """`code` with the tiles that are tensorized replaced. ValueError where one means another thing."""
        match code:
            case For(var) if var in self.tensorized:
                intrinsic, first = self.tensorized[var]
                return intrinsic.match(code, first, lambda t: scopes.get(t, "dram"))
            case For(var, extent, body, kind):
                return For(var, extent, self.with_intrinsics(body, scopes), kind)
            case If(cond, body, orelse):
                other = None if orelse is None else self.with_intrinsics(orelse, scopes)
                return If(cond, self.with_intrinsics(body, scopes), other)
            case Alloc(tensor, body, scope):
                memory = "dram" if scope == "workspace" else scope
                return replace(code, body=self.with_intrinsics(body, {**scopes, tensor: memory}))
            case Block(body):
                return Block(tuple(self.with_intrinsics(inner, scopes) for inner in body))
        return code


def _steps(scan: Scan, schedule: Schedule, history: Tensor) -> Stmt:
    """The states before the first step, then a loop over the steps."""
    size, rows = scan.states[0].size, scan.axis.extent + 1
    sources = {given: read.tensor for given, read in zip(scan.inputs, scan.reads)}
    places: dict[Tensor, Expr] = {}  # states before and after a step -> where they begin
    for number, (before, after) in enumerate(zip(scan.states, schedule.outputs)):
        places[before] = (scan.axis + number * rows) * size
        places[after] = (scan.axis + (number * rows + 1)) * size

    def target(tensor: Tensor, index: tuple[Expr, ...]) -> tuple[Tensor, tuple[Expr, ...]]:
        if tensor not in places:
            return sources.get(tensor, tensor), index
        return history, (places[tensor] + flatten(tensor.shape, index),)

    def change(e: Expr) -> Expr | None:
        return Load(*target(e.tensor, e.index)) if isinstance(e, Load) else None

    if not size:
        return block()
    parts: list[Stmt] = []
    for number, first in enumerate(scan.initial):
        i = Axis("i", extent=size)
        parts.append(For(i, size, Store(history, (i + number * rows * size,), Load(first.tensor, (i,)))))
    if scan.axis.extent:
        step = lower(schedule, (*scan.states, *scan.inputs), scalars=(scan.axis,))
        parts.append(For(scan.axis, scan.axis.extent, map_accesses(step.body, change, target), "ordered"))
    return block(*parts)


class Nest:
    """All loops of one tensor: `code`.

    Where a last tile is smaller and peeled, the loops inside are made for whole tiles and for the last one. Data loops
    inside the first reduction loop form a tile that is accumulated in "local" tensors:
    start, update, and only then the element itself, into which everything after the reduction is computed.
    A tensor in a scratchpad is accumulated in place. From the first reduction loop on nothing is peeled but where an
    intrinsic accumulates: start and end would be there twice.
    """

    def __init__(self, lowering: _Lowering, original: Stage, part: Region | None, target: Tensor) -> None:
        self.lowering, self.original, self.target = lowering, original, target
        self.part = part
        extents = {} if part is None else {axis: count for axis, (_, count) in zip(original.tensor.axes, part)}
        self.code = self._peeled(*original.resized(extents), 0)

    def _peeled(self, stage: Stage, new: dict[Axis, Axis], at: int) -> Stmt:
        """The loops of `stage` from number `at` on; new: its loops by those of the original."""
        for number, axis in enumerate(stage.order[at:], at):
            if axis.reduce and stage.intrinsic is None:
                break
            for split in stage.ragged(axis):
                whole, size = divmod(split.parent.extent, split.inner.extent)
                sizes = (0, whole, split.inner.extent), (split.parent.extent - size, 1, size)
                tiles = [stage.resized({}, split, *each) for each in sizes]
                if any(tile.order[:number] != stage.order[:number] for tile, _ in tiles):
                    continue  # loops around the tiles count what is in them, and are there only once
                moves = [{old: moved.get(fresh, fresh) for old, fresh in new.items()} for _, moved in tiles]
                parts = [self._peeled(tile, moved, number) for (tile, _), moved in zip(tiles, moves)]
                self._follow(stage, new)
                return self._loops(stage.order[at:number], block(*parts))
        self._at(stage, new)
        self.outside = set(stage.order[:at])
        code = self._code()
        self.outside = set()
        return code

    def _follow(self, stage: Stage, new: dict[Axis, Axis]) -> None:
        """Make loops of `stage` from now on."""
        self.stage, self.outside = stage, set[Axis]()
        self.old = {fresh: axis for axis, fresh in new.items()}

    def _at(self, stage: Stage, new: dict[Axis, Axis]) -> None:
        """Make loops of `stage` from now on, and the values and guards that they compute."""
        self._follow(stage, new)
        tensor, part, target, lowering = self.original.tensor, self.part, self.target, self.lowering
        values, self.guards = stage.index_values()
        self.guards = [simplified(guard) for guard in self.guards]
        own: dict[Var, Expr] = {axis: values[fresh] for axis, fresh in new.items() if fresh in values}
        at: dict[Var, Expr] = dict(own)
        if part is not None:
            at |= {axis: first + own[axis] for axis, (first, _) in zip(tensor.axes, part)}
        sizes = tuple(new[axis].extent for axis in tensor.axes)
        if sizes == target.shape and target.shape:
            self.index = tuple(simplified(own[axis]) for axis in tensor.axes)
        else:
            number = flatten(sizes, tuple(own[axis] for axis in tensor.axes)) if sizes else Const(0, INDEX)
            self.index = (simplified(number),)
        self.body = simplified(substitute(lowering.bodies[tensor], at))
        self.reduces = [node for node in walk(self.body) if isinstance(node, Reduce)]
        if any(isinstance(node, Reduce) for reduce in self.reduces for node in walk(reduce.value)):
            raise ValueError(f"{tensor.name}: a reduction inside a reduction; make the inner one a tensor")

    def _loops(self, axes: Sequence[Axis], inner: Stmt, attach: bool = True) -> Stmt:
        for axis in reversed([axis for axis in axes if axis not in self.outside]):
            if axis.extent == 0:
                return block()
            if attach:
                inner = self.lowering.with_attached(self.original, self.old[axis], inner)
            inner = For(axis, axis.extent, inner, self.stage.kinds.get(axis, "serial"))
        return inner

    def _code(self) -> Stmt:
        stage, name = self.stage, self.target.name
        self._check_vectorized()
        if stage.intrinsic is not None:
            return self._tensorized(*stage.intrinsic)
        if not self.reduces:
            return self._loops(stage.order, guarded(self.guards, Store(self.target, self.index, self.body)))
        first = next((i for i, axis in enumerate(stage.order) if axis.reduce), len(stage.order))
        outer, inner = stage.order[:first], stage.order[first:]
        self._check_fused()
        self._check_lanes(inner)
        self._check_order()
        if any(self._has_attached(axis) for axis in inner):
            if len(self.reduces) > 1 or stage.lanes:
                raise ScheduleError(f"{name}: nothing can be computed inside one of several reductions, or of lanes")
            self._check_after(inner)
        if stage.scope in SCRATCHPADS and self.body is self.reduces[0]:
            self._check_in_place()
            tile = [axis for axis in inner if not axis.reduce]
            kind, value = self.reduces[0].kind, self.reduces[0].value
            reset = guarded(self._data_guards(), Store(self.target, self.index, start_value(kind, self.target.dtype)))
            update = guarded(self.guards, Update(kind, self.target, self.index, value))
            return self._loops(outer, block(self._loops(tile, reset, attach=False), self._loops(inner, update)))
        return self._loops(outer, self._accumulated(inner))

    def _check_vectorized(self) -> None:
        """ScheduleError where a vectorized loop contains another."""
        stage = self.stage
        vectorized = [axis.name for axis in stage.order if stage.kinds.get(axis) == "vectorized"]
        if len(vectorized) > 1:
            raise ScheduleError(
                f"{self.target.name}: the vectorized loop {vectorized[0]} contains the vectorized loop {vectorized[1]}"
            )

    def _check_fused(self) -> None:
        """ScheduleError where one loop is over axes of different reductions."""
        for reduce in self.reduces:
            own = {leaf for axis in reduce.axes for leaf in leaves(self.stage, axis)}
            for relation in self.stage.relations:
                if isinstance(relation, Fuse) and (relation.outer in own) != (relation.inner in own):
                    raise ScheduleError(
                        f"{self.target.name}: the loops {relation.outer.name} and {relation.inner.name} of different "
                        "reductions were fused"
                    )

    def _check_lanes(self, inner: Sequence[Axis]) -> None:
        """ScheduleError where the reductions cannot be accumulated in lanes; `inner`: from the first reduction on."""
        stage, name = self.stage, self.target.name
        if not stage.lanes:
            return
        for axis in stage.lanes:
            if axis not in stage.order[-1:]:
                raise ScheduleError(
                    f"{name}: {axis.name}, which is accumulated in lanes, is not the innermost loop any more"
                )
        if data := [axis.name for axis in inner if not axis.reduce]:
            raise ScheduleError(f"{name}: the loop {data[0]} inside a reduction that is accumulated in lanes")
        if vectorized := [axis.name for axis in stage.order if stage.kinds.get(axis) == "vectorized"]:
            raise ScheduleError(f"{name}: the vectorized loop {vectorized[0]} around a reduction in lanes")
        if any(self._in_order(reduce) for reduce in self.reduces):
            raise ScheduleError(f"{name}: an ordered sum of floats cannot be accumulated in lanes")

    @staticmethod
    def _in_order(reduce: Reduce) -> bool:
        """Whether the result depends on the order of the steps."""
        return reduce.kind == "ordered_sum" and is_float(reduce.dtype)

    def _check_order(self) -> None:
        """ScheduleError where loops take the steps of an ordered sum in another order."""
        for reduce in filter(self._in_order, self.reduces):
            loops = list(reduce.axes)
            for relation in self.stage.relations:
                match relation:
                    case Split(parent, outer, inner) if parent in loops:
                        at = loops.index(parent)
                        loops[at : at + 1] = [outer, inner]
                    case Fuse(outer, inner, fused) if (outer, inner) in pairwise(loops):
                        at = loops.index(outer)
                        loops[at : at + 2] = [fused]
            if loops != [axis for axis in self.stage.order if axis in loops]:
                raise ScheduleError(
                    f"{self.target.name}: an ordered sum of floats over {', '.join(axis.name for axis in reduce.axes)} "
                    "in another order"
                )

    def _data_guards(self) -> list[Expr]:
        """Those of the guards that say which elements exist."""
        return [g for g in self.guards if not any(isinstance(node, Axis) and node.reduce for node in walk(g))]

    def _has_attached(self, axis: Axis) -> bool:
        here = self.original, self.old[axis]
        return any(self.lowering.schedule[t].attached == here for t in self.lowering.bodies)

    def _check_after(self, inner: Sequence[Axis]) -> None:
        """ScheduleError where what is computed inside the reduction is also read after it."""
        after = replaced(self.body, {id(r): start_value(r.kind, r.dtype) for r in self.reduces})
        read = {n.tensor for n in walk(after) if isinstance(n, Load)}
        for axis in inner:
            for tensor in self.lowering.bodies:
                attached = self.lowering.schedule[tensor].attached
                if attached == (self.original, self.old[axis]) and tensor in read:
                    raise ScheduleError(
                        f"{tensor.name} is computed at loop {axis.name} of {self.target.name}, but also read outside it"
                    )

    def _check_in_place(self) -> None:
        for relation in self.stage.relations:
            if isinstance(relation, Split) and not relation.parent.reduce and relation.tail == "shift":
                size, factor = relation.parent.extent, relation.inner.extent
                if size % factor:
                    raise ScheduleError(
                        f"{self.target.name} is accumulated in place, so tiles of {factor} must divide the "
                        f"{size} of {relation.parent.name}"
                    )

    def _tensorized(self, axis: Axis, intrinsic: Declared) -> Stmt:
        stage, name = self.stage, self.target.name
        at = stage.order.index(axis)
        if empty := [loop.name for loop in stage.order if loop.reduce and not loop.extent]:
            raise ScheduleError(f"{name}: the reduction {empty[0]} has no steps, and {intrinsic.name} takes some")
        for inner in stage.order[at:]:
            if inner in stage.kinds:
                raise ScheduleError(f"{name}: loop {inner.name} is {stage.kinds[inner]} and part of {intrinsic.name}")
            if self._has_attached(inner):
                raise ScheduleError(f"{name}: something is computed at loop {inner.name}, inside {intrinsic.name}")
        first: Expr = Const(True, "bool")
        order = stage.order
        inside = {*order[at:], *(loop for loop in order if loop.reduce)}
        if any(node in inside for guard in self.guards for node in walk(guard)):
            raise ScheduleError(f"{name}: tiles do not divide what {intrinsic.name} computes at once, or its reduction")
        if self.reduces and self.body is self.reduces[0]:
            self._check_in_place()
            tests = [equal(outer, 0) for outer in order[:at] if outer.reduce and outer.extent > 1]
            begun = any(isinstance(r, Split) and r.parent.reduce and r.first for r in stage.relations)
            first = Const(False, "bool") if begun else reduce_and(tests)
            statement: Stmt = Update(self.reduces[0].kind, self.target, self.index, self.reduces[0].value)
        elif self.reduces and intrinsic.reduces:
            raise ScheduleError(f"{name}: {intrinsic.name} accumulates, so what follows must be a tensor of its own")
        else:  # a reduction in the midst of the expression is part of the intrinsic, with its loops
            if any(window not in order for reduce in self.reduces for window in reduce.axes):
                raise ScheduleError(f"{name}: the reduction is part of {intrinsic.name}, so its loops stay as they are")
            order = [loop for loop in order if not loop.reduce]
            at = order.index(axis)
            statement = Store(self.target, self.index, self.body)
        self.lowering.tensorized[axis] = intrinsic, first
        code = self._loops(order[at:], statement)
        return self._loops(order[:at], guarded(self.guards, code))

    def _accumulated(self, inner: Sequence[Axis]) -> Stmt:
        stage, tensor, index, guards = self.stage, self.target, self.index, self.guards
        data = self._data_guards()
        tile = [axis for axis in inner if not axis.reduce]
        where: tuple[Expr, ...] = tuple(tile)
        accumulators: dict[int, Expr] = {}
        parts: list[Stmt] = []
        locals_: list[Tensor] = []
        for number, reduce in enumerate(self.reduces):
            name = f"{tensor.name}.acc{number or ''}"
            acc = Tensor(name, tuple(axis.extent for axis in tile), reduce.dtype)
            locals_.append(acc)
            roots = {leaf for root in reduce.axes for leaf in leaves(stage, root)}
            value = reduce.value
            own = [g for g in guards if any(node in roots for node in walk(g))]
            update = guarded([*data, *own], Update(reduce.kind, acc, where, value))
            parts.append(self._loops(tile, Store(acc, where, start_value(reduce.kind, reduce.dtype)), attach=False))
            if own_lanes := [axis for axis in stage.lanes if axis in roots]:
                axes = [axis for axis in inner if axis in roots]
                if own:
                    raise ScheduleError(f"{tensor.name}: tiles do not divide its reduction, so lanes cannot add them")
                parts.append(guarded(data, in_lanes(stage, own_lanes[0], axes, acc, reduce.kind, value, locals_)))
            else:
                parts.append(self._loops([axis for axis in inner if not axis.reduce or axis in roots], update))
            accumulators[id(reduce)] = Load(acc, where)
        final = replaced(self.body, accumulators)
        parts.append(self._loops(tile, guarded(data, Store(tensor, index, final)), attach=False))
        code: Stmt = block(*parts)
        for acc in reversed(locals_):
            code = Alloc(acc, code, "local")
        return code
