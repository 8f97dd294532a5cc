"""The arguments of `celosia.compile` beside the model, once: their names, types and defaults. Its text says what they
mean."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import update_wrapper
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar

import onnx
from numpy.typing import NDArray

from celosia.compiler.graph.importing.dimensions import Shapes
from celosia.compiler.graph.passes import Watch
from celosia.compiler.program.model import ROUNDINGS
from celosia.compiler.target import Target
from celosia.compiler.tune.network import Tuned
from celosia.compiler.tune.shipped import SHIPPED
from celosia.hw.spec.config import Config

Source: TypeAlias = str | Path | onnx.ModelProto
Progress = Callable[[str], None]
Run = Callable[[Mapping[str, NDArray[Any]]], Mapping[str, NDArray[Any]]]
"""The outputs of a model by name, of its inputs by name."""
Oracle = Callable[[onnx.ModelProto], Run]
"""What opens a model in the runtime whose bytes are right. Both raise ValueError, in a sentence, for one that does not
run there."""


@dataclass(frozen=True)
class Options:
    """See compile.compile."""

    config: str | Path | Config = "pynq"
    progress: Progress | None = None
    accelerator: bool = True
    watch: Watch | None = None
    target: str | Target | None = None
    check: bool = True
    decisions: str | Path | Mapping[str, Any] | None = None
    shapes: Shapes | None = None
    keep: str | Sequence[str] = ()
    caches: Sequence[str] = ()
    records: str | Path | None = SHIPPED
    tuned: Tuned | None = None
    optimise: str | float | None = None
    fast_math: bool = False
    place: Mapping[str, str] = field(default_factory=dict)
    oracle: Oracle | None = None
    without: str | Sequence[str] = ()
    rounding: str = ROUNDINGS[0]

    @property
    def left_out(self) -> tuple[str, ...]:
        """The names in `without`."""
        return (self.without,) if isinstance(self.without, str) else tuple(self.without)

    def say(self, stage: str) -> None:
        """Tell `progress`, if there is one."""
        if self.progress is not None:
            self.progress(stage)


P = ParamSpec("P")
Made = TypeVar("Made", covariant=True)


class OfModel(Protocol[P, Made]):
    """A function of a model and of what options are made of."""

    def __call__(self, source: Source, *given: P.args, **named: P.kwargs) -> Made: ...


def expand_options(options: Callable[P, Options]) -> Callable[[Callable[[Source, Options], Made]], OfModel[P, Made]]:
    """A function of a model and Options as one that takes the options as its own arguments."""

    def made(function: Callable[[Source, Options], Made]) -> OfModel[P, Made]:
        def called(source: Source, *given: P.args, **named: P.kwargs) -> Made:
            return function(source, options(*given, **named))

        update_wrapper(called, function)
        own, others = inspect.signature(function), inspect.signature(options).parameters.values()
        vars(called)["__signature__"] = own.replace(parameters=[own.parameters["source"], *others])
        return called

    return made
