"""Schedules that were decided elsewhere, such as by tuning, in the place of the compiler's own.

    with choosing(Choices(traces)) as choices:
        compile(model)
    choices.met             # workloads of all kernels that were made

A workload is the expression that a kernel computes, with all shapes and types: its name has a digest of the loops that
it has under no schedule at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from celosia.compiler.cpu.schedule.arrange import plain, schedule
from celosia.compiler.cpu.schedule.within import within_outputs
from celosia.compiler.expr import Function, Schedule, Tensor, fuse_loops, lower
from celosia.compiler.expr.partition import partition
from celosia.compiler.expr.trace import ReplayError, Trace


@dataclass(frozen=True, eq=False)
class KernelWorkload:
    """outputs: what is computed. inputs: the placeholders that it reads, in the order of the kernel's parameters.
    constants: those of them that are the same in every run, such as weights."""

    name: str
    outputs: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    constants: frozenset[Tensor] = frozenset()

    @staticmethod
    def of(outputs: Sequence[Tensor], inputs: Sequence[Tensor], constants: Iterable[Tensor] = ()) -> KernelWorkload:
        """inputs: what may be read; what is not is left out."""
        base = plain(outputs)
        used = tuple(tensor for tensor in inputs if tensor in base.tensors)
        digest = hashlib.sha256(str(lower(base, used, "kernel")).encode()).hexdigest()[:12]
        shapes = ", ".join(f"{t.name} {t.dtype}{list(t.shape)}" for t in base.outputs)
        return KernelWorkload(f"{shapes} #{digest}", tuple(outputs), used, frozenset(constants) & frozenset(used))

    @property
    def constant_bytes(self) -> int:
        """Bytes of inputs that are weights."""
        return sum(tensor.nbytes for tensor in self.constants)

    def own(self) -> Trace:
        """The compiler's own schedule."""
        return schedule(self.outputs).trace

    def scheduled(self, trace: Trace) -> Schedule:
        """Under `trace`. ReplayError."""
        made = plain(self.outputs)
        trace.replay(made)
        return made

    def loops(self, made: Schedule) -> Function:
        """ValueError where the schedule cannot be followed."""
        return finished(made, self.inputs)


def finished(made: Schedule, inputs: Sequence[Tensor]) -> Function:
    """The loops of a kernel. ValueError where the schedule cannot be followed."""
    return partition(within_outputs(fuse_loops(lower(made, inputs, "kernel"))))


@dataclass
class Choices:
    """traces: by the name of a workload. met: the workloads that were asked for, with how often, in order. refused: why
    traces could not be followed, by workload; the compiler's own schedule was taken."""

    traces: Mapping[str, Trace] = field(default_factory=dict)
    met: dict[str, tuple[KernelWorkload, int]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """What they did; "" for nothing."""
        taken = self.traces.keys() & self.met.keys() - self.refused.keys()
        told = [f"records: {len(taken)} of {len(self.met)} kernels for this CPU are scheduled by them"] if taken else []
        told += [f"records: that of {name} cannot be followed: {why}" for name, why in self.refused.items()]
        return "; ".join(told)

    def loops(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], constants: Iterable[Tensor]) -> Function:
        """The loops of a kernel, under its trace if there is one."""
        workload = KernelWorkload.of(outputs, inputs, constants)
        times = self.met[workload.name][1] if workload.name in self.met else 0
        self.met[workload.name] = workload, times + 1
        if (trace := self.traces.get(workload.name)) is not None:
            try:
                return workload.loops(workload.scheduled(trace))
            except (ReplayError, ValueError) as error:
                self.refused[workload.name] = str(error)
        return workload.loops(schedule(outputs))


_current: ContextVar[Choices | None] = ContextVar("choices", default=None)


@contextmanager
def choosing(choices: Choices | None) -> Iterator[Choices | None]:
    """Kernels that are made inside are scheduled as `choices` say; None for the compiler's own."""
    token = _current.set(choices)
    try:
        yield choices
    finally:
        _current.reset(token)


def arranged(outputs: Sequence[Tensor], inputs: Sequence[Tensor], constants: Iterable[Tensor] = ()) -> Function:
    """The loops of the kernel that computes `outputs` from those of `inputs` that it reads."""
    choices = _current.get()
    if choices is not None:
        return choices.loops(outputs, inputs, constants)
    made = schedule(outputs)
    return finished(made, [tensor for tensor in inputs if tensor in made.tensors])
