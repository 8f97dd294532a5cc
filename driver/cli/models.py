"""`celosia compile`, `inspect`, `report` and `quantize`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from celosia.driver.cli.errors import Debug, Quiet, command, say
from celosia.driver.cli.options import (
    ConfigOption,
    Keep,
    MaybeConfig,
    Mean,
    Memory,
    Model,
    NoCheck,
    ShapeOption,
    Std,
    advise,
    check_destinations,
    check_source,
    keep_of,
    memory_options,
    program_of,
    progress_stages,
    shapes_of,
    telling_once,
)

if TYPE_CHECKING:
    import onnx_ir as ir


class Activations(StrEnum):
    """What `--activations` takes."""

    int8 = "int8"
    uint8 = "uint8"


class Method(StrEnum):
    """What `--method` takes."""

    minmax = "minmax"
    entropy = "entropy"
    percentile = "percentile"


def _preset(target: str | None) -> str:
    """The Config for a board that names none."""
    from celosia.sim.boards import BOARDS

    return BOARDS[target].preset if target in BOARDS else "pynq"


@command
def compile_(
    model: Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="The model: int8, or with QDQ nodes.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PROGRAM", help="The file to write.")],
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="NAME|FILE", help="The accelerator, by default the target board's, or pynq."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="BOARD|PROCESSOR",
            help="Where it will run: pynq-z1, pynq-z2, ultra96, zcu104, armv7 or aarch64; by default this machine.",
        ),
    ] = None,
    decisions: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Schedules of layers, as `inspect --decisions` writes them."),
    ] = None,
    records: Annotated[
        str,
        typer.Option(
            metavar="FILE|none",
            help="What `tune` has measured, beside what comes with Celosia; none: the compiler decides alone.",
        ),
    ] = "shipped",
    keep: Keep = None,
    shape: ShapeOption = None,
    no_check: NoCheck = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Compile an ONNX model to a Program for one accelerator.

    \b
    Examples:
      celosia compile resnet18.onnx -o resnet18.celosia
      celosia compile resnet18.onnx -o resnet18.celosia --config my_accelerator.toml
      celosia compile resnet18.onnx -o resnet18.celosia --target pynq-z1
      celosia compile resnet18.onnx -o resnet18.celosia --decisions decisions.json
      celosia compile resnet18.onnx -o resnet18.celosia --records tuned.jsonl
      celosia compile encoder.onnx -o encoder.celosia --shape mel=1,80,400
    """
    with progress_stages(quiet) as stages:
        shapes = shapes_of(shape)
        check_destinations([model], output)
        from celosia.compiler.compile import compile as compile_model

        program = compile_model(
            model, config or _preset(target), progress=stages, target=target, check=not no_check, decisions=decisions,
            keep=keep_of(keep),
            shapes=shapes, records=records,
        )  # fmt: skip
        stages("writing the Program")
        program.save(output)
    advise(program, quiet)
    if not quiet:
        from celosia.driver.show import program as show
        from celosia.driver.show.table import console, megabytes

        out = console()
        out.print(show.overview(program))
        out.print(f"{output}: {megabytes(output.stat().st_size)}")


@command
def inspect(
    model: Model,
    config: MaybeConfig = None,
    operators: Annotated[bool, typer.Option("--operators", help="Only where each operator runs, and why.")] = False,
    layers: Annotated[bool, typer.Option("--layers", help="Only the layers and their instructions.")] = False,
    buffers: Annotated[bool, typer.Option("--buffers", help="Only DRAM, arena and scratchpads.")] = False,
    disassemble: Annotated[
        bool, typer.Option("--disassemble", "-d", help="Only the text of every instruction.")
    ] = False,
    layer: Annotated[str | None, typer.Option(metavar="NAME", help="Disassemble this layer alone.")] = None,
    passes: Annotated[bool, typer.Option("--passes", help="Only the graph after each pass, and kernels.")] = False,
    one_pass: Annotated[
        str | None, typer.Option("--pass", metavar="NAME", help="Only the graph after this pass, or `import`.")
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Only the cycles of each layer, by the timing model, and what bounds it.")
    ] = False,
    memory: Memory = None,
    loops: Annotated[
        str | None, typer.Option(metavar="LAYER", help="Only the loops of this layer, and the schedule that made them.")
    ] = None,
    decisions: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write what was decided for each layer, to change it.")
    ] = None,
    shape: ShapeOption = None,
    no_check: NoCheck = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Show what became of a model: operators with the reason of their place, layers, buffers, instructions.

    \b
    Examples:
      celosia inspect model.onnx
      celosia inspect model.onnx --operators --config tiny
      celosia inspect model.onnx --passes | less
      celosia inspect model.celosia --disassemble --layer conv1 | less
      celosia inspect model.onnx --estimate --memory pynq-z2
      celosia inspect model.onnx --loops conv1
      celosia inspect model.onnx --decisions decisions.json
    """
    if memory is not None and not estimate:
        raise typer.BadParameter("--memory needs --estimate: nothing else here depends on it")
    behind = memory_options(memory, "timed")
    graphs: dict[str, str] = {}

    def keep(name: str, graph: ir.Model) -> None:
        from celosia.compiler.graph.printer import text

        graphs[name] = text(graph.graph)

    with progress_stages(quiet) as stages:
        check_destinations([model], decisions)
        watch = keep if passes or one_pass is not None else None
        program = program_of(model, config, stages, no_check, watch, shapes=shapes_of(shape))
    advise(program, quiet)
    from celosia.driver.show import program as show
    from celosia.driver.show import run as show_run
    from celosia.driver.show.table import console

    if decisions is not None:
        from celosia.compiler.program.files import write_text
        from celosia.compiler.tensorize.decisions import decisions_of

        write_text(decisions, json.dumps(decisions_of(program), indent=1) + "\n")
    if loops is not None:
        for line in show.loops(program, loops):
            say(line)
    if loops is not None or decisions is not None:
        return
    if estimate:
        for each in show_run.estimate(program, **behind):
            console().print(each)
        return
    disassemble = disassemble or layer is not None
    passes = passes or one_pass is not None
    every = not (operators or layers or buffers or passes or disassemble)
    out = console()
    if every:
        out.print(show.overview(program))
    for wanted, table in ((operators, show.operators), (layers, show.program_layers), (buffers, show.buffers)):
        if every or wanted:
            if every:
                out.print()
            out.print(table(program))
    if passes and one_pass is None:
        out.print(show.passes(program))
        out.print()
        out.print(show.kernels(program))
    if passes:
        for line in show.graphs(program, graphs, one_pass):
            say(line)
    if disassemble:
        for line in show.disassembly(program, layer):
            say(line)


@command
def report(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="PROGRAM|REPORT.json|front.json|MODEL.onnx",
            help="What `compile`, `run --report` or `explore` wrote, or a model.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PAGE.html", help="The file to write.")],
    config: MaybeConfig = None,
    memory: Memory = None,
    shape: ShapeOption = None,
    no_check: NoCheck = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write a page for a browser: what limits each layer, roofline, timeline, where bytes go, what runs where.

    Of a Program or a model, cycles are those of the timing model; of a report, those of its run. The page is one file
    that needs no network.

    \b
    Examples:
      celosia report model.celosia -o page.html
      celosia report model.onnx --config pynq --memory pynq-z2 -o page.html
      celosia report report.json -o page.html
      celosia report front/front.json -o front.html
    """
    behind = memory_options(memory, "timed")
    from celosia.driver.pages import front, page, run

    page.require()
    with progress_stages(quiet) as stages:
        check_source(source)
        check_destinations([source], output)
        if source.suffix == ".json":
            for option, given in (("--config", config), ("--memory", memory), ("--shape", shape)):
                if given:
                    raise typer.BadParameter(f"{option} is for a model or Program: {source} says what its run had")
            made = front.of_front(source) if front.is_front(source) else run.of_report(source)
        else:
            program = program_of(source, config, stages, no_check, shapes=shapes_of(shape))
            stages("drawing")
            made = run.of_program(program, **behind)
        made.save(output)
    if not quiet:
        say(f"{output}: {output.stat().st_size / 1e6:.1f} MB, for a browser; it needs no network")


@command
def quantize(
    model: Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="The float model.")],
    calibration: Annotated[
        Path,
        typer.Option(
            metavar="DIR|NPZ",
            help="A folder of .npy, .npz or image files, one for each sample, or of a folder of them for each class; "
            "or an .npz of arrays by input name whose first axis counts samples, perhaps with an array labels.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT.onnx", help="The file to write.")],
    per_tensor: Annotated[
        bool, typer.Option("--per-tensor", help="One scale for a weight tensor, not one for each output channel.")
    ] = False,
    activations: Annotated[Activations, typer.Option(help="Type of activations; weights are int8.")] = Activations.int8,
    method: Annotated[Method, typer.Option(help="How ranges come from the samples.")] = Method.minmax,
    samples: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Use no more, spread over all, by default all.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="An operator that stays float; may be repeated.")
    ] = None,
    mean: Mean = None,
    std: Std = None,
    config: ConfigOption = "pynq",
    report: Annotated[Path | None, typer.Option(metavar="REPORT.json", help="Write the report.")] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Quantise a float model to int8, and compare its outputs with the float model's.

    \b
    Examples:
      celosia quantize model.onnx --calibration samples.npz -o model_int8.onnx
      celosia quantize model.onnx --calibration photos/ --mean 0.5 --std 0.5 -o model_int8.onnx --report report.json
    """
    with progress_stages(quiet) as stages:
        check_destinations([model, calibration], output, report)
        from celosia.driver.quantize import quantize as quantize_model

        found = quantize_model(
            model, calibration, output, per_channel=not per_tensor, activations=activations.value, method=method.value,
            samples=samples, exclude=exclude or (), mean=mean or (0.0,), std=std or (1.0,), config=config,
            progress=stages, told=telling_once(quiet),
        )  # fmt: skip
    if report is not None:
        from celosia.compiler.program.files import write_text

        write_text(report, json.dumps(found, indent=1) + "\n")
    if not quiet:
        from celosia.driver.show import quantize as show
        from celosia.driver.show.table import console, megabytes

        out = console()
        for table in show.quantised(found):
            out.print(table)
            out.print()
        out.print(f"{output}: {megabytes(output.stat().st_size)}")
