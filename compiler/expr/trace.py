"""Traces: a schedule as data, every primitive that was applied, in order.

A trace prints as the Python that makes the schedule, goes to JSON and back, and can be applied to a fresh definition of
the same tensors. (The idea is that of TVM's `Trace`.)

>>> from celosia.compiler.expr import placeholder, compute, create_schedule
>>> a = placeholder((8,), "float32", "a")
>>> b = compute((8,), lambda i: a[i] + 1.0, "b")
>>> s = create_schedule(b)
>>> _ = s["b"].split("i0", 4)
>>> s["b"].vectorize("i0.i")
>>> print(s.trace)
s["b"].split("i0", 4)
s["b"].vectorize("i0.i")
>>> again = create_schedule(b)
>>> Trace.from_json(s.trace.to_json()).replay(again)
>>> print(again.trace == s.trace)
True
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, ParamSpec, TypeVar

from celosia.compiler.expr.loops import Declared
from celosia.compiler.expr.nodes import Axis, Tensor

P = ParamSpec("P")
R = TypeVar("R")


class ReplayError(ValueError):
    """A trace step that cannot be applied; the message says which and why."""


@dataclass(frozen=True)
class TraceStep:
    """One applied primitive. stage: name of the tensor whose loops it changes, "" for one of the complete schedule.

    args: loops, tensors and intrinsics by name, numbers, and lists of these; {"stage": name} stands for the loops of a
    tensor.
    """

    stage: str
    primitive: str
    args: tuple[Any, ...]

    def __str__(self) -> str:
        target = f'["{self.stage}"]' if self.stage else ""
        return f"s{target}.{self.primitive}({', '.join(_source_text(arg) for arg in self.args)})"


@dataclass
class Trace:
    """The primitives that made a schedule, in order. Tuning records store schedules so."""

    steps: list[TraceStep] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))

    def to_json(self) -> list[list[Any]]:
        """Convert to plain data: stage, primitive and arguments of each step."""
        return [[step.stage, step.primitive, *step.args] for step in self.steps]

    @staticmethod
    def from_json(rows: Any) -> Trace:
        """Read the data of `to_json`; ReplayError where it is not a trace."""
        steps = []
        for row in rows if isinstance(rows, list) else [rows]:
            if not isinstance(row, list) or len(row) < 2 or not all(isinstance(text, str) for text in row[:2]):
                raise ReplayError(f"a step of a trace is [stage, primitive, arguments ...], not {row!r}")
            steps.append(TraceStep(row[0], row[1], tuple(row[2:])))
        return Trace(steps)

    def replay(self, schedule: Any, intrinsics: Mapping[str, Declared] | None = None) -> None:
        """Apply all steps to a fresh `schedule`; ReplayError for one that does not apply.

        intrinsics: by name, those that tensorize may use.
        """
        for position, step in enumerate(self.steps):
            try:
                target = schedule[step.stage] if step.stage else schedule
                if step.primitive not in PRIMITIVES or not hasattr(target, step.primitive):
                    owner = "a tensor" if hasattr(target, "order") else "the schedule"
                    raise ValueError(f"{owner} has no primitive {step.primitive!r}")
                _check_arguments(step)
                args = [_from_data(schedule, arg) for arg in step.args]
                if step.primitive == "tensorize":
                    if args[-1] not in (intrinsics or {}):
                        raise ValueError(f"no intrinsic is called {args[-1]!r}")
                    args[-1] = (intrinsics or {})[args[-1]]
                getattr(target, step.primitive)(*args)
            except ValueError as error:
                raise ReplayError(f"step {position}, {step}: {error}") from None


PRIMITIVES: dict[str, Signature] = {}
"""Name of each recorded method of Stage and Schedule -> its signature."""


def _is_text(arg: Any) -> bool:
    return isinstance(arg, str)


def _is_number(arg: Any) -> bool:
    return isinstance(arg, int) and not isinstance(arg, bool)


_FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "Axis | str": ("the name of a loop", _is_text),
    "Tensor | str": ("the name of a tensor", _is_text),
    "Tensor | str | Sequence[Tensor | str]": (
        "the name of a tensor, or a list of them",
        lambda arg: _is_text(arg) or (isinstance(arg, list | tuple) and all(map(_is_text, arg))),
    ),
    "Stage": (
        'loops, {"stage": name}',
        lambda arg: isinstance(arg, dict) and list(arg) == ["stage"] and _is_text(arg["stage"]),
    ),
    "Declared": ("the name of an intrinsic", _is_text),
    "int": ("a whole number", _is_number),
    "str": ("a name", _is_text),
    "str | None": ("a name", lambda arg: arg is None or _is_text(arg)),
    "tuple[int, ...]": (
        "a list of whole numbers", lambda arg: isinstance(arg, list | tuple) and all(map(_is_number, arg))
    ),
}  # fmt: skip
"""Annotation of a primitive's parameter -> description of its form in a trace, and the test for that form."""


def _check_arguments(step: TraceStep) -> None:
    """Raise ValueError where the arguments of `step` do not match the signature of its primitive."""
    try:
        bound = PRIMITIVES[step.primitive].bind(None, *step.args)
    except TypeError as error:
        raise ValueError(str(error)) from None
    for name, value in list(bound.arguments.items())[1:]:
        parameter = PRIMITIVES[step.primitive].parameters[name]
        description, is_valid = _FORMS[parameter.annotation]
        for arg in value if parameter.kind is Parameter.VAR_POSITIONAL else (value,):
            if not is_valid(arg):
                raise ValueError(f"{name} is {description}, not {arg!r}")


def recorded(primitive: Callable[P, R]) -> Callable[P, R]:
    """Decorate a primitive of a stage or a schedule so that it appends a TraceStep to the trace."""
    PRIMITIVES[primitive.__name__] = form = signature(primitive)
    assert all(p.annotation in _FORMS for p in list(form.parameters.values())[1:]), form

    @wraps(primitive)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        """Run the primitive and record it as one step, in place of the steps of primitives that it calls."""
        owner: Any = args[0]
        trace: Trace | None = owner.trace
        if trace is None:
            return primitive(*args, **kwargs)
        before = len(trace.steps)
        result = primitive(*args, **kwargs)
        del trace.steps[before:]  # steps of primitives that this one called
        stage = owner.tensor.name if hasattr(owner, "order") else ""
        bound = form.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = list(bound.args[1:])
        while arguments and arguments[-1] is None:
            arguments.pop()
        trace.steps.append(TraceStep(stage, primitive.__name__, tuple(_to_data(arg) for arg in arguments)))
        return result

    return call


def _to_data(arg: Any) -> Any:
    """Convert an argument to what a trace stores: names of loops, tensors and intrinsics, numbers, lists."""
    if isinstance(arg, Axis | Tensor):
        return arg.name
    if isinstance(arg, list | tuple):
        return [_to_data(element) for element in arg]
    if hasattr(arg, "order"):
        return {"stage": arg.tensor.name}
    return arg if isinstance(arg, int | str) else arg.name


def _from_data(schedule: Any, arg: Any) -> Any:
    """Resolve a stored argument against `schedule`; the inverse of `_to_data`."""
    if isinstance(arg, dict):
        return schedule[arg["stage"]]
    return tuple(arg) if isinstance(arg, list) else arg


def _source_text(arg: Any) -> str:
    """Return a stored argument as the Python that makes it."""
    if isinstance(arg, dict) and "stage" in arg:
        return f'''s["{arg["stage"]}"]'''
    if isinstance(arg, list):
        return f"[{', '.join(_source_text(element) for element in arg)}]"
    return f'"{arg}"' if isinstance(arg, str) else repr(arg)
