"""`celosia run` and `demo`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from celosia.driver.cli import common
from celosia.driver.cli import options as opt
from celosia.driver.cli.common import Trust
from celosia.driver.cli.errors import command
from celosia.sim.devices import DEVICES, SIMULATORS, SSH_PREFIX, WITH_CYCLES

if TYPE_CHECKING:
    from rich.console import RenderableType

    from celosia.compiler.program import Program
    from celosia.driver.run.run_result import Result
    from celosia.driver.show.progress import Stages

Device = Annotated[
    str,
    typer.Option(
        metavar="|".join((*DEVICES, SSH_PREFIX + "USER@BOARD")),
        help="Device: numpy; numpy with cycles of the timing model; the RTL under Verilator; the accelerator of this "
        "board, or of a board over ssh.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="Threads for kernels on the CPU. Default: $CELOSIA_THREADS, else one for each processor, at most 8."
    ),
]
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="OUT.npz", help="Write the outputs to a file.")]
Report = Annotated[
    Path | None, typer.Option(metavar="REPORT.json", help="Write cycles, layers and counters of units as JSON.")
]
Html = Annotated[Path | None, typer.Option(metavar="PAGE.html", help="Write an HTML page on the run.")]
Trace = Annotated[
    Path | None,
    typer.Option(metavar="TIMELINE.json", help="Write the start and end of each instruction, for ui.perfetto.dev."),
]
Dump = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TENSOR|all", help="Also write this inner tensor of the model to --output, or all; may be repeated."
    ),
]
Layers = Annotated[bool, typer.Option("--layers", help="Print all layers, not only the longest.")]


@command
def run(
    model: opt.Model,
    inputs: opt.Inputs = None,
    random: opt.Random = False,
    device: Device = "functional",
    config: opt.MaybeConfig = None,
    memory: opt.Memory = None,
    threads: Threads = None,
    sudo: opt.Sudo = False,
    address: opt.Address = None,
    output: Output = None,
    report: Report = None,
    html: Html = None,
    trace: Trace = None,
    dump: Dump = None,
    shape: opt.ShapeOption = None,
    set_: opt.SetOption = None,
    place: opt.Place = None,
    mean: opt.Mean = None,
    std: opt.Std = None,
    layers: Layers = False,
    no_check: opt.NoCheck = False,
    trust: opt.Trusted = False,
    digest: opt.Digest = None,
    rebuild_kernels: opt.Rebuild = False,
    imports: opt.Import = None,
    quiet: opt.Quiet = False,
) -> None:
    """Run a model, or a compiled Program, on a simulator of the accelerator, or on a board.

    The loops in a Program are checked and compiled on this machine. A Program for a board also holds machine code,
    which runs only with --trust or --digest, because checksums inside a file do not prove who made it.

    \b
    Examples:
      celosia run model.onnx --input image=image.npy --output out.npz
      celosia run model.onnx --input photo.jpg --mean 0.5 --std 0.5
      celosia run model.onnx --random --dump all --output tensors.npz
      celosia run detector.onnx --random --shape image=1,3,320,320
      celosia run resnet18.celosia -i image.npy --device rtl --report report.json --trace timeline.json
      celosia run resnet18.celosia -i image.npy --device timed --memory pynq-z2 --html page.html
      celosia run resnet18.celosia -i image.npy --device ssh://root@pynq
      celosia run model.onnx --random --import my_ops.py
    """
    common.import_files(imports)
    options = device_options(device, memory, address)
    files = _Files(output, report, html, trace, dump or [])
    source = _Source(
        model, config, common.parse_keep(dump), Trust(trust, digest, rebuild_kernels), no_check,
        common.parse_place(place), common.parse_shapes(shape), common.parse_set(set_),
    )  # fmt: skip
    with common.progress_stages(quiet) as stages:
        files.check(device, model)
        threads = _prepare_machine(device, model, threads)
        pixels = common.image_conversion(mean, std, quiet)
        values = common.read_inputs(model, inputs, random, pixels, source.given_shapes, source.set)
        if device.startswith(SSH_PREFIX):
            program, result = _run_on_board(source, device, values, threads, stages, sudo, **options)
        else:
            options |= {"progress": stages.cycles, "quiet": quiet} if device == "rtl" else {}
            program, result = _run_here(source, device, values, threads, stages, **options)
    files.write(program, result)
    common.advise(program, quiet)
    if not quiet:
        _print_result(result, layers)


def device_options(device: str, memory: str | None, address: str | None) -> dict[str, Any]:
    """Return the options --memory or --address for a --device. BadParameter for an unknown device or address."""
    if device not in DEVICES and not device.startswith(SSH_PREFIX):
        common.raise_unknown_device(device, DEVICES)
    board_options, simulator_options = common.parse_address(address), common.parse_memory(memory, device)
    return simulator_options if device in SIMULATORS else board_options


def _prepare_machine(device: str, model: Path, threads: int | None) -> int:
    """Check that the tools of a device on this machine are installed. Return the number of threads for the CPU's part.

    BuildError, DeviceError, ThreadsError.
    """
    from celosia.compiler.program.host.thread_team import check_thread_count, default_threads
    from celosia.driver.workstation.tools import require_tools

    if not device.startswith(SSH_PREFIX):
        require_tools(device, model)
    return default_threads() if threads is None else check_thread_count(threads)


@dataclass(frozen=True)
class _Source:
    """Source of a Program: its file, or a model, with the arguments of `common.load_or_compile`.

    given_shapes: those of --shape. set: values of --set.
    """

    path: Path
    config: str | None
    keep: str | list[str]
    trust: Trust
    no_check: bool
    place: dict[str, str]
    given_shapes: dict[str, tuple[int, ...]]
    set: dict[str, str]

    def shapes(self, values: dict[str, Any]) -> dict[str, tuple[int | None, ...]]:
        """Return the shapes to compile for: those of the arrays `values`, and those of --shape.

        Only inputs whose sizes the model leaves open need one.
        """
        from celosia.compiler.graph.importer import read
        from celosia.compiler.graph.importing.dimensions import open_inputs

        if not self.path.is_file() or common.is_program(self.path) or not open_inputs(read(self.path, data=False)):
            return dict(self.given_shapes)
        from celosia.driver.workstation.specialise import OpenModel, fill_open_sizes

        shapes = OpenModel(self.path, self.set).shapes(values)
        return {name: fill_open_sizes(shape, self.given_shapes.get(name)) for name, shape in shapes.items()}


def _run_here(
    source: _Source, device: str, values: dict[str, Any], threads: int, stages: Stages, **options: Any
) -> tuple[Program, Result]:
    """Load or compile the Program, and run it on a device of this machine."""
    from celosia.driver.runtime import Runtime

    program = common.load_or_compile(
        source.path, source.config, stages, source.no_check, shapes=source.shapes(values), keep=source.keep,
        trust=source.trust, place=source.place, set=source.set,
    )  # fmt: skip
    with Runtime(program, device, threads, **options) as runtime:
        with stages.paused():
            runtime.open()
        stages(f"running on the {device} device")
        return program, runtime.run(values)


def _run_on_board(
    source: _Source, url: str, values: dict[str, Any], threads: int, stages: Stages, sudo: bool, **options: Any
) -> tuple[Program, Result]:
    """Load or compile the Program for a board, and run it there over ssh.

    url: ssh://USER@BOARD for its accelerator, ssh://USER@BOARD/functional for the functional simulator there.
    """
    from celosia.driver.remote import deploy
    from celosia.driver.remote.ssh import connect

    host, _, device = url.removeprefix(SSH_PREFIX).partition("/")
    if device not in ("", "board", "functional"):
        raise typer.BadParameter(
            f"there is no device {device!r} on a board; take {SSH_PREFIX}{host}, or /functional after it"
        )
    with stages.paused(), connect(host) as connection:
        remote = deploy.Remote(connection, sudo=sudo)
        stages(f"connected to {host}")
        program = common.load_or_compile_for_board(
            source.path, source.config, stages, remote, source.no_check, source.shapes(values), source.keep,
            source.trust, source.place, source.set,
        )  # fmt: skip
        stages(f"running on {host}")
        return program, deploy.run(remote, program, values, device or "board", threads, **options)


@dataclass(frozen=True)
class _Files:
    """Files that a run writes; None: not written. dump: tensors inside the model that are also written to `output`."""

    output: Path | None
    report: Path | None
    html: Path | None
    trace: Path | None
    dump: list[str]

    def check(self, device: str, model: Path) -> None:
        """Check that all files can be written, before anything slow. BadParameter, OutputError, MissingLibrary."""
        if self.trace is not None and device == "functional":
            raise typer.BadParameter(
                f"--trace needs --device {' or '.join(WITH_CYCLES)}, or a board whose Config has a trace_depth: the "
                "others do not tell each instruction's time"
            )
        if self.dump and self.output is None:
            raise typer.BadParameter("--dump needs --output OUT.npz, where the tensors go")
        common.check_source(model)
        common.check_destinations([model], self.output, self.report, self.trace, self.html)
        if self.html is not None:
            from celosia.driver.pages.page import require_bokeh

            require_bokeh()

    def write(self, program: Program, result: Result) -> None:
        """Write the files of a run. OutputError."""
        if self.output is not None:
            from celosia.driver.data import arrays

            names = result.tensors if "all" in self.dump else self.dump
            arrays.write_outputs(self.output, result.outputs | {name: result.tensors[name] for name in names})
        common.write_json(self.report, result.report)
        if self.trace is not None:
            _write_trace(self.trace, program, result)
        if self.html is not None:
            from celosia.driver.pages.run_page import page_of_run

            page_of_run(program, result.report, result.counters).save(self.html)


def _write_trace(path: Path, program: Program, result: Result) -> None:
    """Write the timeline of a run as JSON for Perfetto."""
    from celosia.compiler.program.safe_files import write_text
    from celosia.driver.pages.chrome_trace import chrome_trace
    from celosia.hw.boards.boards import clock_of_report

    if result.counters and not any(counters.events for counters in result.counters):
        raise typer.BadParameter(
            "--trace: the accelerator has kept no instruction's time; take a Config with a trace_depth, and a "
            "bitstream of it"
        )
    memory = result.report["memory_model"]
    trace_json = chrome_trace(program, result.counters, result.step_seconds, memory, clock_of_report(memory))
    write_text(path, json.dumps(trace_json) + "\n")


def _print_result(result: Result, layers: bool) -> None:
    """Print the summary of a run, its layers and its outputs."""
    from celosia.driver.show import run_summary as show

    parts: list[RenderableType] = [show.summary(result.report)]
    if result.report["layers"]:
        tables = show.layers(result.report, layers), show.advice_on_layers(result.report), show.blocks(result.report)
        parts += [part for table in tables if table is not None for part in ("", table)]
    common.show([*parts, "", *(show.output(name, array) for name, array in result.outputs.items())])


Count = Annotated[int, typer.Option("--count", "-n", min=1, max=100, help="Number of images.")]


@command
def demo(
    count: Count = 10,
    device: opt.Simulator = "rtl",
    config: opt.ConfigOption = "pynq",
    memory: opt.Memory = None,
    quiet: opt.Quiet = False,
) -> None:
    """Classify pictures of clothes with a ResNet-8 on the RTL, and compare every byte with onnxruntime.

    \b
    Examples:
      celosia demo
      celosia demo --count 100 --config tiny
      celosia demo --device timed --memory pynq-z2
    """
    simulated = common.parse_memory(memory, device)
    from celosia.driver.demo import run as run_demo

    with common.progress_stages(quiet) as stages:
        run_demo(count, device, config, stages, **simulated)
