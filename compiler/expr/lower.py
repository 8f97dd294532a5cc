"""Lower tensors and their schedule to the loop IR.

In order: `lower`, the loops of a scan, those of one tensor (Nest), and their parts: guards, accumulation in lanes,
reduction identities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

import numpy as np

from celosia.compiler.expr.affine import Region, SharedAtoms, flatten, region, simplify_index
from celosia.compiler.expr.loops import (
    MAX_LOCAL_BYTES,
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
    map_accesses,
    statements,
    tensors_read,
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
    loaded,
    redirect_loads,
    substitute,
    walk,
    wrap,
)
from celosia.compiler.expr.schedule import Fuse, Schedule, ScheduleError, Split, Stage, create_schedule
from celosia.compiler.expr.transform import inline


def lower(
    computation: Tensor | Sequence[Tensor] | Schedule, inputs: Sequence[Tensor] | None = None, name: str | None = None,
    scalars: Sequence[Var] = (),
) -> Function:  # fmt: skip
    """Build the loops of a schedule, or of tensors under the default schedule.

    inputs: order of the kernel's parameters; by default the placeholders in the order of first use. Raises ValueError
    where a needed placeholder is missing, ScheduleError where the schedule cannot be followed.
    """
    schedule = computation if isinstance(computation, Schedule) else create_schedule(computation)
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
        code = lowering.replace_tensorized(code, {})
    if any(stage.attached for stage in schedule.stages.values()):
        code = drop_unit_loops(code)
    return Function(name or schedule.outputs[0].name, inputs, schedule.outputs, code, scalars=tuple(scalars))


class _Lowering:
    """State of lowering one schedule.

    bodies: definitions of the tensors that get loops of their own, over inlined producers. tensorized: the outermost
    loop of each tile that an intrinsic computes -> the intrinsic, and the condition under which its reduction begins.
    """

    def __init__(self, schedule: Schedule) -> None:
        """Inline what the schedule inlines, and raise ScheduleError where a compute_at cannot be followed."""
        self.schedule = schedule
        self.bodies: dict[Tensor, Expr] = {}
        self.tensorized: dict[Var, tuple[Declared, Expr]] = {}
        copies: dict[Tensor, Tensor] = {}  # inlined tensors whose own definition was rewritten
        for tensor, stage in schedule.stages.items():
            body = inline(redirect_loads(stage.body, copies), set(copies.values()))
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
                reason = f"{tensor.name} is computed at loop {axis.name} of {consumer.tensor.name}"
                raise ScheduleError(f"{reason}, which was split or fused since")
            enclosing = consumer.order[: consumer.order.index(axis) + 1]
            if vectorized := [loop for loop in enclosing if consumer.kinds.get(loop) == "vectorized"]:
                raise ScheduleError(f"{tensor.name} cannot be computed inside the vectorized loop {vectorized[0].name}")

    def nest(self, tensor: Tensor, part: Region | None = None, target: Tensor | None = None) -> Stmt:
        """Return the loops that compute `tensor`, or only its region `part`, into `target` (by default itself).

        Raises ScheduleError for a part of a scan.
        """
        if isinstance(body := self.bodies[tensor], Scan):
            if part is not None:
                raise ScheduleError(f"{tensor.name} is a scan, so it is not computed in parts")
            step = self.schedule[tensor].step
            assert step is not None
            return _lower_scan(body, step, tensor)
        return Nest(self, self.schedule[tensor], part, target or tensor).code

    def prepend_attached(self, stage: Stage, axis: Axis, body: Stmt) -> Stmt:
        """Prepend to `body`, the body of loop `axis`, the tensors that are computed at that loop."""
        for tensor in reversed(self.bodies):
            if self.schedule.stages[tensor].attached == (stage, axis):
                body = self._attach(tensor, f"{stage.tensor.name} at loop {axis.name}", body)
        return body

    def _attach(self, tensor: Tensor, location: str, body: Stmt) -> Stmt:
        """Compute the region of `tensor` that `body` reads in a buffer of that size, and redirect the reads to it.

        location: the loop around, for errors. Raises ScheduleError where nothing reads the tensor there.
        """
        part = region(tensor, body)
        if part is None:
            raise ScheduleError(f"{tensor.name} is computed inside {location}, where nothing reads it")
        part = with_whole_tiles(self.schedule[tensor], part)
        small = Tensor(tensor.name, tuple(count for _, count in part), tensor.dtype)
        sums = SharedAtoms()

        def rebase_load(e: Expr) -> Expr | None:
            if not isinstance(e, Load) or e.tensor is not tensor:
                return None
            if len(e.index) != len(tensor.shape):
                if small.shape != tensor.shape:
                    raise ScheduleError(f"{tensor.name}: it is read by element numbers, so its part cannot be told")
                return Load(small, e.index)
            return Load(small, tuple(sums.difference(i, first) for i, (first, _) in zip(e.index, part)))

        code = block(self.nest(tensor, part, small), map_accesses(body, rebase_load, only=tensor))
        scope = self.schedule[tensor].scope
        if scope == "workspace" and small.nbytes <= MAX_LOCAL_BYTES:
            scope = "local"
        return Alloc(small, code, scope, self.schedule[tensor].kept)

    def check_readers(self, code: Stmt) -> None:
        """Raise ScheduleError where a tensor that is computed inside a loop is read outside it."""
        read = tensors_read(code)
        for tensor in self.bodies:
            attached = self.schedule[tensor].attached
            if attached is not None and tensor in read:
                consumer, axis = attached
                raise ScheduleError(
                    f"{tensor.name} is computed at loop {axis.name} of {consumer.tensor.name}, but also read outside it"
                )

    def replace_tensorized(self, code: Stmt, scopes: dict[Tensor, str]) -> Stmt:
        """Replace tensorized loops by their intrinsics. Raises ValueError where a loop computes something else.

        scopes: memory of each tensor that is allocated around `code`.
        """
        match code:
            case For(var) if var in self.tensorized:
                intrinsic, first = self.tensorized[var]
                return intrinsic.match(code, first, lambda t: scopes.get(t, "dram"))
            case For(var, extent, body, kind):
                return For(var, extent, self.replace_tensorized(body, scopes), kind)
            case If(cond, body, orelse):
                other = None if orelse is None else self.replace_tensorized(orelse, scopes)
                return If(cond, self.replace_tensorized(body, scopes), other)
            case Alloc(tensor, body, scope):
                memory = "dram" if scope == "workspace" else scope
                return replace(code, body=self.replace_tensorized(body, {**scopes, tensor: memory}))
            case Block(body):
                return Block(tuple(self.replace_tensorized(statement, scopes) for statement in body))
        return code


def _lower_scan(scan: Scan, schedule: Schedule, history: Tensor) -> Stmt:
    """Return loops that store the initial states of a scan in `history`, then an ordered loop over its steps.

    schedule: of one step. history: the tensor of all states.
    """
    size, rows = scan.states[0].size, scan.axis.extent + 1
    sources = {placeholder: read.tensor for placeholder, read in zip(scan.inputs, scan.reads)}
    offsets: dict[Tensor, Expr] = {}  # state before or after a step -> its first element in `history`
    for position, (before, after) in enumerate(zip(scan.states, schedule.outputs)):
        offsets[before] = (scan.axis + position * rows) * size
        offsets[after] = (scan.axis + (position * rows + 1)) * size

    def redirect(tensor: Tensor, index: tuple[Expr, ...]) -> tuple[Tensor, tuple[Expr, ...]]:
        """Return where an element lies: a state in `history`, an input in the tensor that it stands for."""
        if tensor not in offsets:
            return sources.get(tensor, tensor), index
        return history, (offsets[tensor] + flatten(tensor.shape, index),)

    def redirect_load(e: Expr) -> Expr | None:
        return Load(*redirect(e.tensor, e.index)) if isinstance(e, Load) else None

    if not size:
        return block()
    parts: list[Stmt] = []
    for position, first in enumerate(scan.initial):
        i = Axis("i", extent=size)
        parts.append(For(i, size, Store(history, (i + position * rows * size,), Load(first.tensor, (i,)))))
    if scan.axis.extent:
        step = lower(schedule, (*scan.states, *scan.inputs), scalars=(scan.axis,))
        parts.append(For(scan.axis, scan.axis.extent, map_accesses(step.body, redirect_load, redirect), "ordered"))
    return block(*parts)


class Nest:
    """All loops that compute one tensor, or a region `part` of it, into `target`: `code`.

    Where a smaller last tile is peeled, the loops inside exist twice: for full tiles and for the last one. Data loops
    inside the first reduction loop form a tile that is accumulated in "local" tensors: initialisation, updates, and
    only then the element itself, into which everything after the reduction is computed. A tensor in a scratchpad is
    accumulated in place. From the first reduction loop on nothing is peeled, as initialisation and epilogue would run
    twice, except where an intrinsic accumulates.

    original: the tensor's stage in the schedule. stage: the copy whose loops are built now, for the extents of a region
    or of peeled tiles. old: loop of `stage` -> the loop of `original` that it copies. outside: loops that are emitted
    already around the current ones. index, guards, body: the written element, its conditions and its value, in terms of
    the loops of `stage`. reduces: reductions in `body`.
    """

    def __init__(self, lowering: _Lowering, original: Stage, part: Region | None, target: Tensor) -> None:
        self.lowering, self.original, self.target = lowering, original, target
        self.part = part
        extents = {} if part is None else {axis: count for axis, (_, count) in zip(original.tensor.axes, part)}
        self.code = self._build_peeled(*original.resized(extents), 0)

    def _build_peeled(self, stage: Stage, new: dict[Axis, Axis], start: int) -> Stmt:
        """Return the loops of `stage` from position `start` on, with last tiles peeled.

        new: loop of the original stage -> its copy in `stage`.
        """
        for depth, axis in enumerate(stage.order[start:], start):
            if axis.reduce and stage.intrinsic is None:
                break
            for split in stage.peeled_splits(axis):
                full_tiles, size = divmod(split.parent.extent, split.inner.extent)
                sizes = (0, full_tiles, split.inner.extent), (split.parent.extent - size, 1, size)
                tiles = [stage.resized({}, split, *bounds) for bounds in sizes]
                if any(tile.order[:depth] != stage.order[:depth] for tile, _ in tiles):
                    continue  # extents of loops around the tiles depend on the split, and these loops are shared
                moves = [{old: moved.get(fresh, fresh) for old, fresh in new.items()} for _, moved in tiles]
                parts = [self._build_peeled(tile, moved, depth) for (tile, _), moved in zip(tiles, moves)]
                self._use_stage(stage, new)
                return self._wrap_in_loops(stage.order[start:depth], block(*parts))
        self._bind_indices(stage, new)
        self.outside = set(stage.order[:start])
        code = self._build_loops()
        self.outside = set()
        return code

    def _use_stage(self, stage: Stage, new: dict[Axis, Axis]) -> None:
        """Select the stage whose loops are built next. new: loop of the original stage -> its copy in `stage`."""
        self.stage, self.outside = stage, set[Axis]()
        self.old = {fresh: axis for axis, fresh in new.items()}

    def _bind_indices(self, stage: Stage, new: dict[Axis, Axis]) -> None:
        """Compute the indices, guards and the body of the selected stage in terms of its loops.

        Raises ValueError for a reduction nested in a reduction.
        """
        self._use_stage(stage, new)
        tensor, part, target, lowering = self.original.tensor, self.part, self.target, self.lowering
        values, self.guards = stage.index_values()
        self.guards = [simplify_index(guard) for guard in self.guards]
        axis_values: dict[Var, Expr] = {axis: values[fresh] for axis, fresh in new.items() if fresh in values}
        index_values: dict[Var, Expr] = dict(axis_values)
        if part is not None:
            index_values |= {axis: first + axis_values[axis] for axis, (first, _) in zip(tensor.axes, part)}
        sizes = tuple(new[axis].extent for axis in tensor.axes)
        if sizes == target.shape and target.shape:
            self.index = tuple(simplify_index(axis_values[axis]) for axis in tensor.axes)
        else:
            element = flatten(sizes, tuple(axis_values[axis] for axis in tensor.axes)) if sizes else Const(0, INDEX)
            self.index = (simplify_index(element),)
        self.body = simplify_index(substitute(lowering.bodies[tensor], index_values))
        self.reduces = [node for node in walk(self.body) if isinstance(node, Reduce)]
        if any(isinstance(node, Reduce) for reduce in self.reduces for node in walk(reduce.value)):
            raise ValueError(f"{tensor.name}: a reduction inside a reduction; make the inner one a tensor")

    def _wrap_in_loops(self, axes: Sequence[Axis], body: Stmt, attach: bool = True) -> Stmt:
        """Wrap `body` in the loops `axes`; an empty block where one of them has no iterations.

        attach: prepend, in each loop, the tensors that the schedule computes there.
        """
        for axis in reversed([axis for axis in axes if axis not in self.outside]):
            if axis.extent == 0:
                return block()
            if attach:
                body = self.lowering.prepend_attached(self.original, self.old[axis], body)
            body = For(axis, axis.extent, body, self.stage.kinds.get(axis, "serial"))
        return body

    def _build_loops(self) -> Stmt:
        """Return the loops of the current stage: element-wise, by an intrinsic, or as a reduction."""
        stage, name = self.stage, self.target.name
        self._check_vectorized()
        if stage.intrinsic is not None:
            return self._build_intrinsic_loops(*stage.intrinsic)
        if not self.reduces:
            return self._wrap_in_loops(stage.order, if_all(self.guards, Store(self.target, self.index, self.body)))
        first = next((i for i, axis in enumerate(stage.order) if axis.reduce), len(stage.order))
        outer, inner_loops = stage.order[:first], stage.order[first:]
        self._check_fused()
        self._check_lanes(inner_loops)
        self._check_order()
        if any(self._has_attached(axis) for axis in inner_loops):
            if len(self.reduces) > 1 or stage.lanes:
                raise ScheduleError(f"{name}: nothing can be computed inside one of several reductions, or of lanes")
            self._check_reads_after(inner_loops)
        if stage.scope in SCRATCHPADS and self.body is self.reduces[0]:
            self._check_in_place()
            tile = [axis for axis in inner_loops if not axis.reduce]
            kind, value = self.reduces[0].kind, self.reduces[0].value
            reset = if_all(
                self._data_guards(), Store(self.target, self.index, reduction_identity(kind, self.target.dtype))
            )
            update = if_all(self.guards, Update(kind, self.target, self.index, value))
            return self._wrap_in_loops(
                outer, block(self._wrap_in_loops(tile, reset, attach=False), self._wrap_in_loops(inner_loops, update))
            )
        return self._wrap_in_loops(outer, self._build_accumulation(inner_loops))

    def _check_vectorized(self) -> None:
        """Raise ScheduleError where a vectorized loop contains another."""
        stage = self.stage
        vectorized = [axis.name for axis in stage.order if stage.kinds.get(axis) == "vectorized"]
        if len(vectorized) > 1:
            raise ScheduleError(
                f"{self.target.name}: the vectorized loop {vectorized[0]} contains the vectorized loop {vectorized[1]}"
            )

    def _check_fused(self) -> None:
        """Raise ScheduleError where one loop fuses axes of different reductions."""
        for reduce in self.reduces:
            reduction_loops = {leaf for axis in reduce.axes for leaf in derived_loops(self.stage, axis)}
            for relation in self.stage.relations:
                if isinstance(relation, Fuse) and (relation.outer in reduction_loops) != (
                    relation.inner in reduction_loops
                ):
                    raise ScheduleError(
                        f"{self.target.name}: the loops {relation.outer.name} and {relation.inner.name} of different "
                        "reductions were fused"
                    )

    def _check_lanes(self, inner_loops: Sequence[Axis]) -> None:
        """Raise ScheduleError where the reductions cannot be accumulated in lanes.

        inner_loops: the loops from the first reduction loop on.
        """
        stage, name = self.stage, self.target.name
        if not stage.lanes:
            return
        for axis in stage.lanes:
            if axis not in stage.order[-1:]:
                raise ScheduleError(
                    f"{name}: {axis.name}, which is accumulated in lanes, is not the innermost loop any more"
                )
        if data := [axis.name for axis in inner_loops if not axis.reduce]:
            raise ScheduleError(f"{name}: the loop {data[0]} inside a reduction that is accumulated in lanes")
        if vectorized := [axis.name for axis in stage.order if stage.kinds.get(axis) == "vectorized"]:
            raise ScheduleError(f"{name}: the vectorized loop {vectorized[0]} around a reduction in lanes")
        if any(self._depends_on_order(reduce) for reduce in self.reduces):
            raise ScheduleError(f"{name}: an ordered sum of floats cannot be accumulated in lanes")

    @staticmethod
    def _depends_on_order(reduce: Reduce) -> bool:
        """Return whether the result depends on the order of the steps: an ordered sum of floats."""
        return reduce.kind == "ordered_sum" and is_float(reduce.dtype)

    def _check_order(self) -> None:
        """Raise ScheduleError where the loops take the steps of an ordered sum of floats in another order, which would
        change its rounding.
        """
        for reduce in filter(self._depends_on_order, self.reduces):
            loops = list(reduce.axes)
            for relation in self.stage.relations:
                match relation:
                    case Split(parent, outer, inner) if parent in loops:
                        position = loops.index(parent)
                        loops[position : position + 1] = [outer, inner]
                    case Fuse(outer, inner, fused) if (outer, inner) in pairwise(loops):
                        position = loops.index(outer)
                        loops[position : position + 2] = [fused]
            if loops != [axis for axis in self.stage.order if axis in loops]:
                raise ScheduleError(
                    f"{self.target.name}: an ordered sum of floats over {', '.join(axis.name for axis in reduce.axes)} "
                    "in another order"
                )

    def _data_guards(self) -> list[Expr]:
        """Return the guards that involve no reduction axis: conditions under which an element exists."""
        return [g for g in self.guards if not any(isinstance(node, Axis) and node.reduce for node in walk(g))]

    def _has_attached(self, axis: Axis) -> bool:
        """Return whether the schedule computes a tensor at this loop."""
        loop = self.original, self.old[axis]
        return any(self.lowering.schedule[t].attached == loop for t in self.lowering.bodies)

    def _check_reads_after(self, inner_loops: Sequence[Axis]) -> None:
        """Raise ScheduleError where a tensor that is computed inside the reduction loops is also read after them.

        inner_loops: the loops from the first reduction loop on.
        """
        after = replace_nodes(self.body, {id(r): reduction_identity(r.kind, r.dtype) for r in self.reduces})
        read = loaded(after)
        for axis in inner_loops:
            for tensor in self.lowering.bodies:
                attached = self.lowering.schedule[tensor].attached
                if attached == (self.original, self.old[axis]) and tensor in read:
                    raise ScheduleError(
                        f"{tensor.name} is computed at loop {axis.name} of {self.target.name}, but also read outside it"
                    )

    def _check_in_place(self) -> None:
        """Raise ScheduleError where overlapping last tiles would be accumulated twice in a scratchpad."""
        for relation in self.stage.relations:
            if isinstance(relation, Split) and not relation.parent.reduce and relation.tail == "shift":
                size, factor = relation.parent.extent, relation.inner.extent
                if size % factor:
                    raise ScheduleError(
                        f"{self.target.name} is accumulated in place, so tiles of {factor} must divide the "
                        f"{size} of {relation.parent.name}"
                    )

    def _build_intrinsic_loops(self, axis: Axis, intrinsic: Declared) -> Stmt:
        """Return the loops around a tensorized tile, which `replace_tensorized` later matches with `intrinsic`.

        Raises ScheduleError where tiles do not divide what the intrinsic computes at once.
        """
        stage, name = self.stage, self.target.name
        position = stage.order.index(axis)
        if empty := [loop.name for loop in stage.order if loop.reduce and not loop.extent]:
            raise ScheduleError(f"{name}: the reduction {empty[0]} has no steps, and {intrinsic.name} takes some")
        for tile_loop in stage.order[position:]:
            if tile_loop in stage.kinds:
                kind = stage.kinds[tile_loop]
                raise ScheduleError(f"{name}: loop {tile_loop.name} is {kind} and part of {intrinsic.name}")
            if self._has_attached(tile_loop):
                raise ScheduleError(f"{name}: something is computed at loop {tile_loop.name}, inside {intrinsic.name}")
        first: Expr = Const(True, "bool")
        order = stage.order
        inside = {*order[position:], *(loop for loop in order if loop.reduce)}
        if any(node in inside for guard in self.guards for node in walk(guard)):
            raise ScheduleError(f"{name}: tiles do not divide what {intrinsic.name} computes at once, or its reduction")
        if self.reduces and self.body is self.reduces[0]:
            self._check_in_place()
            tests = [equal(outer, 0) for outer in order[:position] if outer.reduce and outer.extent > 1]
            is_later_tile = any(isinstance(r, Split) and r.parent.reduce and r.first for r in stage.relations)
            first = Const(False, "bool") if is_later_tile else reduce_and(tests)
            statement: Stmt = Update(self.reduces[0].kind, self.target, self.index, self.reduces[0].value)
        elif self.reduces and intrinsic.reduces:
            raise ScheduleError(f"{name}: {intrinsic.name} accumulates, so what follows must be a tensor of its own")
        else:  # a reduction in the midst of the expression is part of the intrinsic, with its loops
            if any(window not in order for reduce in self.reduces for window in reduce.axes):
                raise ScheduleError(f"{name}: the reduction is part of {intrinsic.name}, so its loops stay as they are")
            order = [loop for loop in order if not loop.reduce]
            position = order.index(axis)
            statement = Store(self.target, self.index, self.body)
        self.lowering.tensorized[axis] = intrinsic, first
        code = self._wrap_in_loops(order[position:], statement)
        return self._wrap_in_loops(order[:position], if_all(self.guards, code))

    def _build_accumulation(self, inner_loops: Sequence[Axis]) -> Stmt:
        """Return code that accumulates each reduction in a local tensor and then computes the element from it.

        inner_loops: the loops from the first reduction on; those over data form the tile of accumulators.
        """
        stage, tensor, index, guards = self.stage, self.target, self.index, self.guards
        data = self._data_guards()
        tile = [axis for axis in inner_loops if not axis.reduce]
        tile_index: tuple[Expr, ...] = tuple(tile)
        accumulators: dict[int, Expr] = {}
        parts: list[Stmt] = []
        locals_: list[Tensor] = []
        for position, reduce in enumerate(self.reduces):
            name = f"{tensor.name}.acc{position or ''}"
            acc = Tensor(name, tuple(axis.extent for axis in tile), reduce.dtype)
            locals_.append(acc)
            roots = {leaf for root in reduce.axes for leaf in derived_loops(stage, root)}
            value = reduce.value
            reduction_guards = [g for g in guards if any(node in roots for node in walk(g))]
            update = if_all([*data, *reduction_guards], Update(reduce.kind, acc, tile_index, value))
            parts.append(
                self._wrap_in_loops(
                    tile, Store(acc, tile_index, reduction_identity(reduce.kind, reduce.dtype)), attach=False
                )
            )
            if own_lanes := [axis for axis in stage.lanes if axis in roots]:
                axes = [axis for axis in inner_loops if axis in roots]
                if reduction_guards:
                    raise ScheduleError(f"{tensor.name}: tiles do not divide its reduction, so lanes cannot add them")
                parts.append(
                    if_all(data, accumulate_in_lanes(stage, own_lanes[0], axes, acc, reduce.kind, value, locals_))
                )
            else:
                parts.append(
                    self._wrap_in_loops([axis for axis in inner_loops if not axis.reduce or axis in roots], update)
                )
            accumulators[id(reduce)] = Load(acc, tile_index)
        final = replace_nodes(self.body, accumulators)
        parts.append(self._wrap_in_loops(tile, if_all(data, Store(tensor, index, final)), attach=False))
        code: Stmt = block(*parts)
        for acc in reversed(locals_):
            code = Alloc(acc, code, "local")
        return code


def with_whole_tiles(stage: Stage, part: Region) -> Region:
    """Widen a region that is smaller than a tile of the stage's intrinsic to complete dimensions of that tile.

    An intrinsic always computes a complete tile. Other regions are returned unchanged.
    """
    if stage.intrinsic is None:
        return part
    tile, intrinsic = stage.intrinsic_loops(), stage.intrinsic[1]
    if prod(count for axis, (_, count) in zip(stage.tensor.axes, part) if axis in tile) >= intrinsic.size:
        return part
    full: tuple[Expr, int]
    widened = []
    for axis, size, interval in zip(stage.tensor.axes, stage.tensor.shape, part):
        full = Const(0, INDEX), size
        widened.append(full if axis in tile else interval)
    return tuple(widened)


def drop_unit_loops(code: Stmt) -> Stmt:
    """Remove loops of one iteration, of which regions of tensors have many."""
    zero: Expr = Const(0, INDEX)
    unit_variables = {s.var for s in statements(code) if isinstance(s, For) and s.extent == 1 and s.kind != "pipelined"}

    def without_unit_loops(s: Stmt) -> Stmt:
        """Rebuild a statement without its unit loops."""
        match s:
            case For(var, extent, body, kind):
                return (
                    without_unit_loops(body)
                    if var in unit_variables
                    else For(var, extent, without_unit_loops(body), kind)
                )
            case If(cond, body, orelse):
                return If(cond, without_unit_loops(body), None if orelse is None else without_unit_loops(orelse))
            case Alloc(body=body):
                return replace(s, body=without_unit_loops(body))
            case Block(body):
                return block(*(without_unit_loops(inner) for inner in body))
        return s

    return without_unit_loops(
        map_accesses(code, lambda e: zero if isinstance(e, Var) and e in unit_variables else None)
    )


def reduction_identity(kind: str, dtype: str) -> Const:
    """Return the identity element of a reduction, with which accumulation starts."""
    if kind in ("sum", "ordered_sum", "prod"):
        return wrap(kind == "prod", dtype)  # type: ignore[return-value]
    if is_float(dtype):
        return Const(float("-inf") if kind == "max" else float("inf"), dtype)
    if dtype == "bool":
        return Const(kind == "min", dtype)
    info = np.iinfo(dtype)
    return Const(int(info.min if kind == "max" else info.max), dtype)


def if_all(tests: Sequence[Expr], code: Stmt) -> Stmt:
    """Run `code` only where all of `tests` hold."""
    return If(reduce_and(tests), code) if tests else code


def reduce_and(tests: Sequence[Expr]) -> Expr:
    """Build the conjunction of `tests`; True for none."""
    if not tests:
        return Const(True, "bool")
    conjunction, *rest = tests
    for test in rest:
        conjunction = conjunction & test
    return conjunction


def accumulate_in_lanes(
    stage: Stage, axis: Axis, axes: list[Axis], acc: Tensor, kind: str, value: Expr, locals_: list[Tensor]
) -> Stmt:
    """Return loops that update `acc` with `value` over `axes`, whose innermost loop `axis` runs in vectors.

    The vectors have the stage's widths, wide ones first (Stage.accumulate_lanes). Each accumulates partial results in
    its lanes, which are combined at the end. The tensors of the vectors are appended to `locals_`.
    """
    if any(a.extent == 0 for a in axes):
        return block()
    parts: list[Stmt] = []
    done = 0
    for width in (*stage.lanes[axis], 1):
        count = (axis.extent - done) // width
        if count == 0:
            continue
        step, lane = Axis(f"{axis.name}.o", extent=count, reduce=True), Axis(f"{axis.name}.i", extent=width)
        lane_value = substitute(value, {axis: step * width + lane + done})
        done += count * width
        vector = acc if width == 1 else Tensor(f"{acc.name}.x{width}", (width,), acc.dtype)
        lane_index: tuple[Expr, ...] = () if width == 1 else (lane,)
        code: Stmt = For(lane, width, Update(kind, vector, lane_index, lane_value), "vectorized")
        code = For(step, count, code)
        for a in reversed([a for a in axes if a is not axis]):
            code = For(a, a.extent, code, stage.kinds.get(a, "serial"))
        if width > 1:
            locals_.append(vector)
            start = Store(vector, lane_index, reduction_identity(kind, acc.dtype))
            last = Update(kind, acc, (), Load(vector, lane_index))
            code = block(For(lane, width, start, "vectorized"), code, For(lane, width, last, "vectorized"))
        parts.append(code)
    return block(*parts)


def replace_nodes(body: Expr, by_id: dict[int, Expr]) -> Expr:
    """Replace the nodes of `body` whose ids are keys of `by_id`.

    It goes top-down: nodes are recognised before their operands are rebuilt, which nodes.rewrite would do first.
    """
    done: dict[int, Expr] = {}

    def rebuild(node: Expr) -> Expr:
        if id(node) in by_id:
            return by_id[id(node)]
        if id(node) not in done:
            before = node.children()
            after = tuple(rebuild(child) for child in before)
            done[id(node)] = node if all(x is y for x, y in zip(before, after)) else node.rebuild(after)
        return done[id(node)]

    return rebuild(body)


def derived_loops(stage: Stage, root: Axis) -> list[Axis]:
    """Return the loops that `root` became by splits and fusions, `root` included."""
    loops = [root]
    for relation in stage.relations:
        match relation:
            case Split(parent, outer, inner) if parent in loops:
                loops += [outer, inner]
            case Fuse(outer, inner, fused) if outer in loops or inner in loops:
                loops.append(fused)
    return loops
