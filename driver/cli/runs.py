"""`celosia run` and `demo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from celosia.driver.cli.errors import Debug, Quiet, command
from celosia.driver.cli.options import (
    WITH_CYCLES,
    Address,
    ConfigOption,
    DeviceName,
    Digest,
    Inputs,
    MaybeConfig,
    Mean,
    Memory,
    Model,
    NoCheck,
    Random,
    Rebuild,
    Simulator,
    Std,
    Sudo,
    Trust,
    Trusted,
    address_options,
    advise,
    check_destinations,
    check_source,
    keep_of,
    memory_options,
    pixels_of,
    program_of,
    program_there,
    progress_stages,
    read_inputs,
)

if TYPE_CHECKING:
    from celosia.compiler.program import Program
    from celosia.driver.progress import Stages
    from celosia.driver.run.result import Result


DEVICES = ("functional", "timed", "rtl", "board")
"""What `run --device` takes, beside ssh://USER@BOARD."""


@command
def run(
    model: Model,
    inputs: Inputs = None,
    random: Random = False,
    device: Annotated[
        str,
        typer.Option(
            metavar="functional|timed|rtl|board|ssh://USER@BOARD",
            help="Numpy, numpy with modelled cycle counts, the Verilated RTL with its own, this board's accelerator, "
            "or that of a board over ssh.",
        ),
    ] = "functional",
    config: MaybeConfig = None,
    memory: Memory = None,
    threads: Annotated[
        int | None, typer.Option(help="Of the CPU's part; else $CELOSIA_THREADS, else one a processor, at most 8.")
    ] = None,
    sudo: Sudo = False,
    address: Address = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="OUT.npz", help="Write the outputs.")] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="REPORT.json", help="Write cycles, layers and what each unit did.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="PAGE.html", help="Write figures of the run, for a browser.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="TIMELINE.json", help="Write each instruction's time, for ui.perfetto.dev.")
    ] = None,
    dump: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TENSOR|all", help="Write this tensor inside the model to --output, too, or all; may be repeated."
        ),
    ] = None,
    mean: Mean = None,
    std: Std = None,
    layers: Annotated[bool, typer.Option("--layers", help="Print every layer, not the longest only.")] = False,
    no_check: NoCheck = False,
    trust: Trusted = False,
    digest: Digest = None,
    rebuild_kernels: Rebuild = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run a model, or a compiled Program, on a simulator of the accelerator, or on a board.

    Of a Program, its loops are checked and compiled here. Machine code in one for a board is run with --trust or
    --digest only; checksums inside a file are no proof of who made it.

    \b
    Examples:
      celosia run model.onnx --input image=image.npy --output out.npz
      celosia run model.onnx --input photo.jpg --mean 0.5 --std 0.5
      celosia run model.onnx --random --dump all --output tensors.npz
      celosia run resnet18.celosia -i image.npy --device rtl --report report.json --trace timeline.json
      celosia run resnet18.celosia -i image.npy --device timed --memory pynq-z2 --html page.html
      celosia run resnet18.celosia -i image.npy --device ssh://root@pynq
    """
    on_board = device == "board" or device.startswith("ssh://")
    if trace is not None and device not in WITH_CYCLES and not on_board:
        raise typer.BadParameter(
            "--trace needs --device timed or rtl, or a board whose Config has a trace_depth: the others do not tell "
            "each instruction's time"
        )
    if device not in DEVICES and not device.startswith("ssh://"):
        from celosia.hw.config import did_you_mean

        near = did_you_mean(device, DEVICES)
        raise typer.BadParameter(f"there is no device {device!r}{near}; take {', '.join(DEVICES)} or ssh://USER@BOARD")
    if dump and output is None:
        raise typer.BadParameter("--dump needs --output OUT.npz, where the tensors go")
    trusted = Trust(trust, digest, rebuild_kernels)
    options, simulated, keep = address_options(address), memory_options(memory, device), keep_of(dump)
    from celosia.compiler.program.host.threads import default_threads, thread_count
    from celosia.driver.runtime import Runtime
    from celosia.driver.tools import require_tools

    with progress_stages(quiet) as stages:
        check_source(model)
        check_destinations([model], output, report, trace, html)
        if html is not None:
            from celosia.driver.pages.page import require

            require()
        if not device.startswith("ssh://"):
            require_tools(device, model)
        threads = default_threads() if threads is None else thread_count(threads)
        values = read_inputs(model, inputs, random, pixels_of(mean, std, quiet))
        if device.startswith("ssh://"):
            program, result = _run_there(
                device, sudo, model, config, values, threads, options, stages, no_check, keep, trusted
            )
        else:
            shapes = _shapes(model, values)
            program = program_of(model, config, stages, no_check, shapes=shapes, keep=keep, trust=trusted)
            if device == "rtl":
                simulated |= {"progress": stages.cycles, "quiet": quiet}
            options = options if device == "board" else simulated
            with Runtime(program, device, threads, **options) as runtime:
                with stages.paused():
                    runtime.open()
                stages(f"running on the {device} device")
                result = runtime.run(values)
    _write(result, program, output, dump, report, trace)
    if html is not None:
        from celosia.driver.pages.run import of_run

        of_run(program, result.report, result.counters).save(html)
    advise(program, quiet)
    if not quiet:
        _show(result, layers)


def _shapes(source: Path, values: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the arrays given for inputs whose sizes the model in `source` leaves open; none for a Program."""
    from celosia.compiler.program import Program

    if not source.is_file() or Program.is_program(source):
        return {}
    from celosia.compiler.graph.dimensions import open_inputs
    from celosia.compiler.graph.importer import read

    if not open_inputs(read(source, data=False)):
        return {}
    from celosia.driver.specialise import OpenModel

    return OpenModel(source).shapes(values)


def _run_there(
    url: str,
    sudo: bool,
    source: Path,
    config: str | None,
    values: dict[str, Any],
    threads: int | None,
    options: dict[str, Any],
    stages: Stages,
    no_check: bool,
    keep: str | list[str],
    trust: Trust,
) -> tuple[Program, Result]:
    """Run on a board over ssh: ssh://USER@BOARD for its accelerator, ssh://USER@BOARD/functional for numpy there."""
    from celosia.driver.remote import deploy
    from celosia.driver.remote.ssh import connected

    place, _, device = url.removeprefix("ssh://").partition("/")
    if device not in ("", "board", "functional"):
        raise typer.BadParameter(
            f"there is no device {device!r} on a board; take ssh://{place}, or /functional after it"
        )
    with stages.paused(), connected(place) as connection:
        remote = deploy.Remote(connection, sudo=sudo)
        stages(f"connected to {place}")
        program = program_there(source, config, stages, remote, no_check, _shapes(source, values), keep, trust)
        stages(f"running on {place}")
        return program, deploy.run(remote, program, values, device or "board", threads, **options)


def _write(
    result: Result, program: Program, output: Path | None, dump: list[str] | None, report: Path | None,
    trace: Path | None,
) -> None:  # fmt: skip
    from celosia.compiler.program.files import write_text
    from celosia.driver import arrays

    if output is not None:
        names = result.tensors if "all" in (dump or []) else dump or []
        arrays.write_outputs(output, result.outputs | {name: result.tensors[name] for name in names})
    if report is not None:
        write_text(report, json.dumps(result.report, indent=1) + "\n")
    if trace is not None:
        from celosia.driver.timeline import timeline
        from celosia.sim.memory import clock_mhz

        if result.counters and not any(each.events for each in result.counters):
            raise typer.BadParameter(
                "--trace: the accelerator has kept no instruction's time; take a Config with a trace_depth, and a "
                "bitstream of it"
            )
        memory = result.report["memory_model"]
        made = timeline(program, result.counters, result.step_seconds, memory, clock_mhz(memory))
        write_text(trace, json.dumps(made) + "\n")


def _show(result: Result, layers: bool) -> None:
    from celosia.driver.show import run as show
    from celosia.driver.show.table import console

    out = console()
    out.print(show.summary(result.report))
    if result.report["layers"]:
        out.print()
        out.print(show.layers(result.report, layers))
        for table in (show.advice_on_layers(result.report), show.blocks(result.report)):
            if table is not None:
                out.print()
                out.print(table)
    out.print()
    for name, array in result.outputs.items():
        out.print(show.output(name, array))


@command
def demo(
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=100, help="How many images.")] = 10,
    device: Simulator = DeviceName.rtl,
    config: ConfigOption = "pynq",
    memory: Memory = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Classify pictures of clothes with a ResNet-8 on the RTL, and compare every byte with onnxruntime.

    \b
    Examples:
      celosia demo
      celosia demo --count 100 --config tiny
      celosia demo --device timed --memory pynq-z2
    """
    simulated = memory_options(memory, device.value)
    from celosia.driver.demo import run as run_demo

    with progress_stages(quiet) as stages:
        run_demo(count, device.value, config, stages, **simulated)
