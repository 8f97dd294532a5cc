"""Schedules of CPU kernels: those that were chosen elsewhere, such as by tuning, and the default schedule.

    with using_schedules(KernelSchedules(traces)) as schedules:
        compile(model)

    schedules.workloads     # of all kernels that were compiled

A workload is the expression that a kernel computes, with all shapes and types. Its name has a digest of its
loops under the base schedule.

The default schedule follows from the strides of the accesses and not from the operator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from celosia.compiler.cpu.schedule.output_reuse import place_in_outputs
from celosia.compiler.cpu.schedule.register_tiles import RegisterTile, apply_register_tile, stride_of
from celosia.compiler.expr import (
    INDEX,
    Axis,
    Function,
    Load,
    Reduce,
    Schedule,
    Select,
    Stage,
    Tensor,
    collapse,
    fuse_epilogues,
    fuse_injective,
    fuse_loops,
    lower,
)
from celosia.compiler.expr.affine import flatten, is_in_bounds
from celosia.compiler.expr.loop_passes import partition
from celosia.compiler.expr.nodes import Expr, Scan, depends_on, redirect_loads, topological, unused_name, walk
from celosia.compiler.expr.schedule import ReplayError, Trace
from celosia.compiler.target import target


@dataclass(frozen=True, eq=False)
class KernelWorkload:
    """The computation of one kernel, without a schedule: the key of tuning records.

    outputs: tensors to compute. inputs: the placeholders that are read, in the order of the kernel's parameters.
    constants: inputs with the same values in every run, such as weights.
    """

    name: str
    outputs: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    constants: frozenset[Tensor] = frozenset()

    @staticmethod
    def of(outputs: Sequence[Tensor], inputs: Sequence[Tensor], constants: Iterable[Tensor] = ()) -> KernelWorkload:
        """Create the workload of `outputs`; those of `inputs` that are not read are dropped."""
        base = base_schedule(outputs)
        used = tuple(tensor for tensor in inputs if tensor in base.tensors)
        digest = hashlib.sha256(str(lower(base, used, "kernel")).encode()).hexdigest()[:12]
        shapes = ", ".join(f"{t.name} {t.dtype}{list(t.shape)}" for t in base.outputs)
        return KernelWorkload(f"{shapes} #{digest}", tuple(outputs), used, frozenset(constants) & frozenset(used))

    @property
    def constant_bytes(self) -> int:
        """Bytes of the inputs that are weights."""
        return sum(tensor.nbytes for tensor in self.constants)

    def default_trace(self) -> Trace:
        """Return the trace of the compiler's own schedule."""
        return schedule(self.outputs).trace

    def apply(self, trace: Trace) -> Schedule:
        """Apply `trace` to the base schedule; ReplayError where it does not fit."""
        result = base_schedule(self.outputs)
        trace.replay(result)
        return result

    def loops(self, scheduled: Schedule) -> Function:
        """Lower a schedule of this workload; ValueError where it cannot be followed."""
        return lower_kernel(scheduled, self.inputs)


def lower_kernel(scheduled: Schedule, inputs: Sequence[Tensor]) -> Function:
    """Lower the schedule of a kernel and run the passes on its loops: fusion, reuse of outputs, loop partitioning.

    Raises ValueError where the schedule cannot be followed.
    """
    return partition(place_in_outputs(fuse_loops(lower(scheduled, inputs, "kernel"))))


@dataclass
class KernelSchedules:
    """Traces for kernels by workload, and a record of how they were used.

    traces: by the name of a workload. workloads: those that were compiled, with how often, in order. refused: why a
    trace could not be followed, by workload; the compiler's own schedule was used then.
    """

    traces: Mapping[str, Trace] = field(default_factory=dict)
    workloads: dict[str, tuple[KernelWorkload, int]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return one sentence on the records that were used and refused; "" where there were none."""
        used = self.traces.keys() & self.workloads.keys() - self.refused.keys()
        sentences = (
            [f"records: {len(used)} of {len(self.workloads)} kernels for this CPU are scheduled by them"]
            if used
            else []
        )
        sentences += [f"records: that of {name} cannot be followed: {why}" for name, why in self.refused.items()]
        return "; ".join(sentences)

    def loops(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], constants: Iterable[Tensor]) -> Function:
        """Return the loops of a kernel, under its trace if there is one."""
        workload = KernelWorkload.of(outputs, inputs, constants)
        times = self.workloads[workload.name][1] if workload.name in self.workloads else 0
        self.workloads[workload.name] = workload, times + 1
        if (trace := self.traces.get(workload.name)) is not None:
            try:
                return workload.loops(workload.apply(trace))
            except (ReplayError, ValueError) as error:
                self.refused[workload.name] = str(error)
        return workload.loops(schedule(outputs))


_current: ContextVar[KernelSchedules | None] = ContextVar("choices", default=None)
"""Schedules that `using_schedules` has selected in this context."""


@contextmanager
def using_schedules(schedules: KernelSchedules | None) -> Iterator[KernelSchedules | None]:
    """Schedule the kernels that are compiled inside with `schedules`; None for the compiler's own schedules."""
    token = _current.set(schedules)
    try:
        yield schedules
    finally:
        _current.reset(token)


def kernel_loops(outputs: Sequence[Tensor], inputs: Sequence[Tensor], constants: Iterable[Tensor] = ()) -> Function:
    """Return the loops of the kernel that computes `outputs` from those of `inputs` that it reads.

    The schedule comes from the context of `using_schedules`, else from `schedule`.
    """
    schedules = _current.get()
    if schedules is not None:
        return schedules.loops(outputs, inputs, constants)
    scheduled = schedule(outputs)
    return lower_kernel(scheduled, [tensor for tensor in inputs if tensor in scheduled.tensors])


@dataclass(frozen=True)
class Knobs:
    """Choices for the schedule of one tensor that replace the compiler's own, for the kernel tuner.

    tile: selects one of the possible register tiles. vectors: how many a loop computes at once, where there is no tile.
    tail: as in Stage.set_tail; "peel" where no element may be computed twice.
    """

    tile: Callable[[list[RegisterTile]], RegisterTile] | None = None
    vectors: int = 1
    tail: str = "shift"


def schedule(outputs: Sequence[Tensor], knobs: Mapping[str, Knobs] | None = None) -> Schedule:
    """Create the default schedule of a kernel: vectors along contiguous axes, register tiles for reductions.

    knobs: choices of the tuner, by the name of a tensor.
    """
    result = base_schedule(outputs)
    for tensor, stage in result.stages.items():
        if not isinstance(stage.body, Scan):
            schedule_stage(stage, (knobs or {}).get(tensor.name, Knobs()))
    return result


def base_schedule(outputs: Sequence[Tensor]) -> Schedule:
    """Create the schedule from which all others start: element-wise chains fused, neighbouring axes merged.

    Each computed tensor gets a unique name, by which traces refer to it. Steps of scans are scheduled here, as a trace
    does not reach into them.
    """
    result = Schedule(_with_unique_names(collapse(fuse_epilogues(fuse_injective(outputs)))))
    for stage in result.stages.values():
        if isinstance(stage.body, Scan):
            stage.step = schedule(stage.body.updates)
    return result


def _with_unique_names(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Rename computed tensors so that no two share a name."""
    order = topological(outputs)
    used = {tensor.name for tensor in order if tensor.body is None}
    names = {tensor: unused_name(tensor.name, used) for tensor in order if tensor.body is not None}
    if all(name == tensor.name for tensor, name in names.items()):
        return tuple(outputs)
    new: dict[Tensor, Tensor] = {}
    for tensor in order:
        if tensor.body is not None:
            new[tensor] = replace(tensor, name=names[tensor], body=redirect_loads(tensor.body, new))
    return tuple(new.get(tensor, tensor) for tensor in outputs)


def schedule_stage(stage: Stage, knobs: Knobs = Knobs()) -> None:
    """Vectorise one tensor along its innermost axis, where the strides of its reads allow it.

    A reduction gets a register tile, or accumulates in lanes along contiguous elements. LLVM gets all other loops as
    they are.
    """
    tensor = stage.tensor
    assert tensor.body is not None
    if knobs.tail != stage.tail:
        stage.set_tail(knobs.tail)
    reduces = [node for node in walk(tensor.body) if isinstance(node, Reduce)]
    data = [axis for axis in stage.order if not axis.reduce]
    if len(reduces) > 1 or (reduces and _guarded_loads(tensor.body, data[-1:])):
        return
    reads = [node for node in walk(tensor.body) if isinstance(node, Load)]
    if not reduces:
        _vectorize_elementwise(stage, data, reads, knobs.vectors)
    elif not apply_register_tile(stage, reduces[0], data, reads, knobs.tile):
        _vectorize_reduction(stage, reduces[0], reads, knobs.vectors)


def _vectorize_elementwise(stage: Stage, data: list[Axis], reads: list[Load], vectors: int) -> None:
    """Vectorise an element-wise tensor: interleaved, gathered, transposed, or plainly along the last axis.

    Nothing is scheduled where the loads allow none of these.
    """
    assert stage.tensor.body is not None
    if not data or _vectorize_interleaved(stage, data, reads) or data[-1].extent < 4:
        return
    if any(stride_of(read, data[-1]) is None for read in reads) and _vectorize_gather(stage, data, reads):
        return
    if any(stride_of(read, data[-1]) not in (0, 1, 2) for read in reads):
        return _tile_transpose(stage, data, reads)
    if any(stride_of(read, data[-1]) != 1 for read in _guarded_loads(stage.tensor.body, data[-1:])):
        return
    values = [node.dtype for node in walk(stage.tensor.body) if node.dtype != INDEX]  # positions take no vectors
    lanes = vectors * min(target().lanes(dtype) for dtype in (stage.tensor.dtype, *values))
    outer, inner = stage.split(data[-1], _vector_extent(lanes, data[-1].extent))
    limit = MAX_UNROLLED_MASKED if _guarded_loads(stage.tensor.body, data[-1:]) else MAX_UNROLLED
    if target().interleave > 1 and outer.extent <= limit:
        stage.unroll(outer)
    stage.vectorize(inner)


MAX_UNROLLED_MASKED, MAX_UNROLLED = 16, 4
"""Limits of the iterations that are unrolled for an in-order processor, with and without masked reads. Unrolled, each
masked vector has a constant mask (llvm/memory_access.py)."""


def _vector_extent(lanes: int, extent: int) -> int:
    """Return how many elements one iteration of an element-wise loop computes.

    Several vectors on processors that wait for each result (`interleave` of the target). lanes: elements of one vector.
    extent: elements of the loop.
    """
    if target().interleave == 1:
        return min(lanes, extent)
    return min(lanes * target().interleave, 1 << extent.bit_length() - 1)


INTERLEAVED_EXTENTS = range(2, 9)
"""Extents of a short axis whose elements are interleaved in memory; shuffles grow with the square of the extent."""


def _vectorize_interleaved(stage: Stage, data: list[Axis], reads: list[Load]) -> bool:
    """Vectorise along the longer of two axes where the shorter one is contiguous: `x[p, c]` with few c.

    The loop over the short axis is unrolled inside, so that contiguous elements are loaded or stored together and lanes
    are shuffled. Returns False, with the stage unchanged, where no access is interleaved.
    """
    assert stage.tensor.body is not None
    written = flatten(tuple(axis.extent for axis in data), tuple(data))
    accesses = [*reads, Load(stage.tensor, (written,))]
    for row in (axis for axis in data if axis.extent in INTERLEAVED_EXTENTS):
        columns = [axis for axis in data if axis is not row]
        if not columns or (column := columns[-1]).extent < 4 or _guarded_loads(stage.tensor.body, [row, column]):
            continue
        strides = [(stride_of(access, column), stride_of(access, row)) for access in accesses]
        interleaved = [pair == (row.extent, 1) for pair in strides]
        is_regular = all(crossed or pair[0] in (0, 1) for crossed, pair in zip(interleaved, strides))
        if not any(interleaved) or not is_regular:
            continue
        outer, inner = stage.split(column, _vector_extent(target().lanes(stage.tensor.dtype), column.extent))
        if target().interleave > 1 and outer.extent <= MAX_UNROLLED:
            stage.unroll(outer)
        stage.reorder(*columns[:-1], outer, row, inner)
        stage.unroll(row)
        stage.vectorize(inner)
        return True
    return False


GATHERED_ROWS = 16
"""Rows of a gather that one iteration computes with the same indices."""


def _vectorize_gather(stage: Stage, data: list[Axis], reads: list[Load]) -> bool:
    """Vectorise gathers for several rows at once, where the indices do not depend on the row and are computed once.

    (Found by tuning a bilinear resize, which becomes five times as fast.) Returns False, with the stage unchanged,
    where there are no such rows.
    """
    assert stage.tensor.body is not None
    column = data[-1]
    rows = [axis for axis in data[:-1] if axis.extent >= 4 and all(stride_of(read, axis) is not None for read in reads)]
    if not rows or _guarded_loads(stage.tensor.body, [*rows, column]):
        return False
    row = max(rows, key=lambda axis: axis.extent)
    row_outer, row_inner = stage.split(row, min(GATHERED_ROWS, row.extent))
    outer, inner = stage.split(column, min(4 * target().lanes(stage.tensor.dtype), column.extent))
    stage.reorder(row_outer, *(axis for axis in data[:-1] if axis is not row), outer, row_inner, inner)
    stage.unroll(row_inner)
    stage.vectorize(inner)
    return True


def _tile_transpose(stage: Stage, data: list[Axis], reads: list[Load]) -> None:
    """Tile a transposition in squares of vectors, so that both reads and writes are contiguous.

    The stage stays as it is where no axis makes the reads contiguous.
    """
    assert stage.tensor.body is not None
    column = data[-1]
    across = [read for read in reads if stride_of(read, column) not in (0, 1)]
    rows = [axis for axis in data[:-1] if axis.extent >= 4 and all(stride_of(read, axis) == 1 for read in across)]
    if (
        not rows
        or any(stride_of(read, column) is None for read in reads)
        or _guarded_loads(stage.tensor.body, [*rows, column])
    ):
        return
    row = max(rows, key=lambda axis: axis.extent)
    lanes = min(16, target().lanes(stage.tensor.dtype), row.extent, column.extent)
    lanes = 1 << lanes.bit_length() - 1
    row_outer, row_inner = stage.split(row, lanes)
    outer, inner = stage.split(column, lanes)
    others = [axis for axis in data[:-1] if axis is not row]
    stage.reorder(*others, row_outer, outer, row_inner, inner)
    stage.unroll(row_inner)
    stage.vectorize(inner)


def _vectorize_reduction(stage: Stage, reduce: Reduce, reads: list[Load], vectors: int) -> None:
    """Accumulate a contiguous reduction in lanes, unless it is ordered or short."""
    axis = stage.order[-1]
    if not axis.reduce or reduce.kind == "ordered_sum" or axis.extent < 4:
        return
    inside = [node for node in walk(reduce.value) if isinstance(node, Load)]
    if any(stride_of(read, axis) not in (0, 1) for read in inside):
        return
    lanes = target().lanes(reduce.dtype)
    stage.accumulate_lanes(axis, tuple(w for w in (4 * vectors * lanes, lanes, 4) if w <= axis.extent))


def _guarded_loads(body: Expr, along: list[Axis]) -> list[Load]:
    """Return the loads that may be out of bounds, under a condition that depends on an axis of `along`.

    In vectors along such an axis they need a mask, which only consecutive elements can have.
    """
    selects = [node for node in walk(body) if isinstance(node, Select)]
    arms = [arm for node in selects if any(depends_on(node.cond, axis) for axis in along) for arm in (node.a, node.b)]
    return [node for arm in arms for node in walk(arm) if isinstance(node, Load) and not is_in_bounds(node)]
