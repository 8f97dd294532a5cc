"""Kernels as workloads, and schedules of them that were chosen elsewhere, such as by tuning.

    with using_schedules(KernelSchedules(traces)) as schedules:
        compile(model)

    schedules.workloads     # of all kernels that were compiled

A workload is the expression that a kernel computes, with all shapes and types. Its name has a digest of its
loops under the base schedule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from celosia.compiler.cpu.schedule.output_reuse import place_in_outputs
from celosia.compiler.cpu.schedule.vectorize import base_schedule, schedule
from celosia.compiler.expr import Function, Schedule, Tensor, fuse_loops, lower
from celosia.compiler.expr.loop_partition import partition
from celosia.compiler.expr.trace import ReplayError, Trace


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
