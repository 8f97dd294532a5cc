"""What a run returns: outputs, counters, times, and the report, which is built when it is first read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

from numpy.typing import NDArray

from celosia.compiler.program import Program
from celosia.compiler.program.model import html_table
from celosia.sim.device import Counters

Array = NDArray[Any]
Times = tuple[dict[str, float], list[float]]
"""Seconds of each phase by name (see `Result.seconds`), and seconds of each step of the Program."""


class Tensors(dict[str, Array]):
    """Arrays by name. The KeyError of a tensor that is not returned says how to compile a Program that returns it."""

    def __missing__(self, name: str) -> Array:
        raise KeyError(
            f"tensor {name!r} is not kept: it stays on chip, in a kernel, or in memory that is used again; "
            f"celosia.compile(model, keep=[{name!r}]), or keep='all', makes a Program that returns it"
        )


@dataclass(repr=False)
class Result:
    """Result of a run: outputs, counters, and its report.

    The functions `_report`, `_times` and `_draw` compute the report, the times, and figures in HTML when they are
    needed.

    Attributes:
        outputs: Output arrays by name.
        counters: Counters of each launch; without cycles on a device without a clock.
        tensors: Outputs, and the tensors that the Program was compiled to keep, by name.
        report: Content of REPORT.json, a dictionary that is computed when it is first read. On devices without a clock,
            cycles, utilization and all times of units are None. driver/run/explain.py makes its rows for layers. Its
            keys:

            - `model`, `device`, `rounding`, `memory_model`: names
            - `config`: fields of the Config
            - `cycles`: clock cycles of all launches
            - `utilization`: macs_accelerator / cycles / MACs per cycle, 0 to 1
            - `macs_total`, `macs_accelerator`: multiplications of the model, and of the accelerator
            - `launches`: number of launches that ran
            - `cpu_nodes`: name, op and reason of each operator on the CPU
            - `saved_traffic`: bytes that fusion on the CPU saves
            - `arena`: bytes of the memory that CPU steps share, and the lower bound of any plan
            - `layers`: a row for each layer
            - `units`: clock cycles of load, gemm, vector and store: busy, wait_token and wait_memory
            - `seconds`: seconds by phase
        seconds: Seconds by phase: "compile" and "build" before the run, "run", and "cpu", the part of "run" on the CPU.
        step_seconds: Seconds of each step of the Program on this machine; for a launch, those of its simulation.
        program: Program that ran; None where a board ran it.

    Examples:
        >>> import celosia
        >>> images, _, _ = celosia.models.demo_images()
        >>> program = celosia.compile(celosia.models.demo_model_path(), "tiny")
        >>> celosia.Runtime(program).run({"image": images[:1]})
        <Result of 'resnet8_fashion_int8' on functional: logits float32[1, 10]>
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
        """Seconds by phase: "compile" and "build" before the run, "run", and "cpu", the part of "run" on the CPU."""
        return self._times()[0]

    @cached_property
    def step_seconds(self) -> list[float]:
        """Seconds of each step of the Program on this machine; for a launch, those of its simulation."""
        return self._times()[1]

    @cached_property
    def report(self) -> dict[str, Any]:
        """The report as plain data: cycles, layers, operators on the CPU, seconds of each phase."""
        return self._report()

    def __repr__(self) -> str:
        outputs = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in self.outputs.items())
        report = self.report
        cycles = "" if report["cycles"] is None else (
            f"; {report['cycles']:,} cycles, {report['utilization']:.1%} of the multipliers"
        )  # fmt: skip
        return f"<Result of {report['model']!r} on {report['device']}: {outputs}{cycles}>"

    def _repr_html_(self) -> str:
        """Return a table of layers for notebooks, or figures where Bokeh is installed."""
        head = ["layer", "what", "MACs", "cycles", "array", "bound by", "advice"]
        keys = ["name", "what", "macs", "cycles", "utilization", "bound", "advice"]
        rows = [[row[key] for key in keys] for row in self.report["layers"]]
        figures = self._draw(self)
        return f"<p>{escape(repr(self))}</p>{figures}" + (html_table(head, rows) if rows and not figures else "")
