"""Result of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

from numpy.typing import NDArray

from celosia.compiler.program import Program
from celosia.compiler.program.html import table
from celosia.sim.device import Counters

Array = NDArray[Any]
Times = tuple[dict[str, float], list[float]]
"""Seconds of the whole, by name, and of each step."""


class Tensors(dict[str, Array]):
    """Arrays by name. KeyError, with the way to a tensor that a Program computes and does not return."""

    def __missing__(self, name: str) -> Array:
        raise KeyError(
            f"tensor {name!r} is not kept: it stays on chip, in a kernel, or in memory that is used again; "
            f"celosia.compile(model, keep=[{name!r}]), or keep='all', makes a Program that returns it"
        )


@dataclass(repr=False)
class Result:
    """Result of a run: outputs, counters, and its report.

    >>> import celosia
    >>> images, _, _ = celosia.models.demo_images()
    >>> program = celosia.compile(celosia.models.demo_model_path(), "tiny")
    >>> celosia.Runtime(program).run({"image": images[:1]})
    <Result of 'resnet8_fashion_int8' on functional: logits float32[1, 10]>

    outputs: arrays by name. counters: of each launch. tensors: outputs and what the Program keeps, by name. report:
    what REPORT.json holds, see `Runtime.run`. program: that ran; None where a board ran it.
    """

    outputs: dict[str, Array]
    counters: list[Counters]
    _report: Callable[[], dict[str, Any]]
    tensors: Tensors
    _times: Callable[[], Times] = lambda: ({}, [])
    program: Program | None = None
    _draw: Callable[[Result], str] = lambda result: ""

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds of the phases: "compile" and "build" before the run, "run", and "cpu", the host's part of that."""
        return self._times()[0]

    @cached_property
    def step_seconds(self) -> list[float]:
        """Seconds of each step of the Program on this machine, the simulation of launches included."""
        return self._times()[1]

    @cached_property
    def report(self) -> dict[str, Any]:
        """Plain data: cycles, layers, operators on the CPU, seconds of each step."""
        return self._report()

    def __repr__(self) -> str:
        outputs = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in self.outputs.items())
        report = self.report
        cycles = "" if report["cycles"] is None else (
            f"; {report['cycles']:,} cycles, {report['utilization']:.1%} of the multipliers"
        )  # fmt: skip
        return f"<Result of {report['model']!r} on {report['device']}: {outputs}{cycles}>"

    def _repr_html_(self) -> str:
        """Table of limits and layers, for notebooks; with bars where Bokeh is installed."""
        head = ["layer", "what", "MACs", "cycles", "array", "bound by", "advice"]
        keys = ["name", "what", "macs", "cycles", "utilization", "bound", "advice"]
        rows = [[row[key] for key in keys] for row in self.report["layers"]]
        figures = self._draw(self)
        return f"<p>{escape(repr(self))}</p>{figures}" + (table(head, rows) if rows and not figures else "")
