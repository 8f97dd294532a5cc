"""The arguments of `celosia.compile` apart from the model: their names, types and defaults.

The docstring of compile.compile says what they mean.
"""

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
from celosia.compiler.graph.importing.set_inputs import InputValues
from celosia.compiler.graph.passes import Watch
from celosia.compiler.program.model import ROUNDINGS
from celosia.compiler.target import Target
from celosia.compiler.tune.network import Tuned
from celosia.compiler.tune.records import SHIPPED
from celosia.hw.spec.config import Config

Source: TypeAlias = str | Path | onnx.ModelProto
"""A model: its path, or its contents."""
Progress = Callable[[str], None]
"""Called with the name of each stage."""
Run = Callable[[Mapping[str, NDArray[Any]]], Mapping[str, NDArray[Any]]]
"""Runs a model: inputs by name -> outputs by name."""
Oracle = Callable[[onnx.ModelProto], Run]
"""Opens a model in the runtime whose bytes count as right. It and the `Run` raise ValueError, with a sentence, for a
model that does not run there."""


@dataclass(frozen=True)
class Options:
    """The arguments of compile.compile, where each is explained."""

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
    set: InputValues | None = None

    @property
    def left_out(self) -> tuple[str, ...]:
        """The names in `without`, as a tuple."""
        return (self.without,) if isinstance(self.without, str) else tuple(self.without)

    def say(self, stage: str) -> None:
        """Report the name of a stage to `progress`, if there is one."""
        if self.progress is not None:
            self.progress(stage)


P = ParamSpec("P")
Result = TypeVar("Result", covariant=True)


class ModelFunction(Protocol[P, Result]):
    """A function of a model and of the fields of Options as arguments."""

    def __call__(self, source: Source, *args: P.args, **kwargs: P.kwargs) -> Result: ...


def expand_options(
    options: Callable[P, Options],
) -> Callable[[Callable[[Source, Options], Result]], ModelFunction[P, Result]]:
    """Return a decorator: a function of (model, Options) becomes one that takes the fields of Options as arguments.

    options: the class Options, which declares these arguments once for `compile`, `network_of` and `price`.
    """

    def decorate(function: Callable[[Source, Options], Result]) -> ModelFunction[P, Result]:
        def call(source: Source, *args: P.args, **kwargs: P.kwargs) -> Result:
            return function(source, options(*args, **kwargs))

        update_wrapper(call, function)
        signature, others = inspect.signature(function), inspect.signature(options).parameters.values()
        vars(call)["__signature__"] = signature.replace(parameters=[signature.parameters["source"], *others])
        return call

    return decorate
