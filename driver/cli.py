"""The command `celosia`. Slow imports wait until a command needs them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from celosia.driver import bitstream
from celosia.driver.commands import EXIT_CODES, Debug, Quiet, command

if TYPE_CHECKING:
    import onnx_ir as ir

    from celosia.compiler.passes import Watch
    from celosia.compiler.program import Program
    from celosia.driver.deploy import Remote
    from celosia.driver.progress import Stages
    from celosia.driver.runtime import Result

app = typer.Typer(
    name="celosia", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


class Activations(StrEnum):
    """What `--activations` takes."""

    int8 = "int8"
    uint8 = "uint8"


class Method(StrEnum):
    """What `--method` takes."""

    minmax = "minmax"
    entropy = "entropy"
    percentile = "percentile"


class DeviceName(StrEnum):
    """What `--device` takes."""

    functional = "functional"
    rtl = "rtl"


DEVICES = ("functional", "rtl", "board")
"""What `run --device` takes, beside ssh://USER@BOARD."""

app.add_typer(bitstream.app, name="bitstream")

Model = Annotated[Path, typer.Argument(metavar="MODEL.onnx|PROGRAM", help="An ONNX model, or what `compile` wrote.")]
ConfigOption = Annotated[
    str,
    typer.Option("--config", metavar="NAME|FILE", help="The accelerator: tiny, pynq, ..., or a .toml or .json file."),
]
MaybeConfig = Annotated[
    str | None,
    typer.Option("--config", metavar="NAME|FILE", help="The accelerator, by default pynq, or the Program's."),
]
NoCheck = Annotated[
    bool,
    typer.Option("--no-check", help="Do not compare each compiled layer with the model's operators on random inputs."),
]
Sudo = Annotated[bool, typer.Option("--sudo", help="Run as root there through sudo, which must not ask.")]


@contextmanager
def _stages(quiet: bool) -> Iterator[Stages]:
    from celosia.driver.progress import Stages

    with Stages(quiet) as stages:
        yield stages


def _destinations(sources: list[Path], *paths: Path | None) -> None:
    """OutputError where a file cannot be written, now and not after minutes of work."""
    from celosia.compiler.files import OutputError, check_writable

    seen = {path.resolve(): "an input" for path in sources}
    for path in paths:
        if path is None:
            continue
        check_writable(path)
        if path.resolve() in seen and (path.is_file() or not path.exists()):  # /dev/null may be given twice
            raise OutputError(f"cannot write {path}: it is {seen[path.resolve()]}, too; give another name")
        seen[path.resolve()] = "another output"


def _check_source(path: Path) -> None:
    """ModelError where there is no file, now and not after a login on a board."""
    if not path.exists():
        from celosia.compiler.graph.importer import ModelError

        raise ModelError(f"there is no model at {path}")


def _program(
    source: Path, config: str | None, stages: Stages, no_check: bool, watch: Watch | None = None,
    target: str | None = None,
) -> Program:  # fmt: skip
    """The Program in `source`, or the one that the ONNX model there compiles to, for `target`, watched by `watch`."""
    from celosia.compiler.program import Program, ProgramError
    from celosia.hw.config import Config

    cfg = None if config is None else Config.load(config)
    if source.is_file() and Program.is_program(source):
        stages("reading the Program")
        program = Program.load(source)
        if cfg is not None and cfg.digest != program.config.digest:
            raise ProgramError(
                f"{source} was compiled for Config {program.config.name}, not for {cfg.name}; compile the model again "
                f"with --config {config}, or leave --config out"
            )
        return program
    from celosia.compiler.compile import compile as compile_model

    return compile_model(source, cfg or "pynq", progress=stages, watch=watch, target=target, check=not no_check)


# Commands -----------------------------------------------------------------------------------------------------


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"celosia {version('celosia')}")
        raise typer.Exit


@app.callback(epilog=EXIT_CODES)
def celosia(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Compile int8 ONNX models for a tensor accelerator described in Python, and run them on its RTL.

    \b
    Examples:
      celosia demo
      celosia run model.onnx --input image=image.npy --device rtl
      celosia COMMAND --help
    """


def _preset(target: str | None) -> str:
    """The Config for a board that names none."""
    from celosia.bitstreams.boards import BOARDS

    return BOARDS[target].preset if target in BOARDS else "pynq"


@app.command(name="compile")
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
    """
    with _stages(quiet) as stages:
        _destinations([model], output)
        from celosia.compiler.compile import compile as compile_model

        program = compile_model(model, config or _preset(target), progress=stages, target=target, check=not no_check)
        stages("writing the Program")
        program.save(output)
    if not quiet:
        from celosia.driver import show

        out = show.console()
        out.print(show.overview(program))
        out.print(f"{output}: {show.megabytes(output.stat().st_size)}", markup=False)


@app.command()
@command
def run(
    model: Model,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", "-i", metavar="NAME=FILE.npy", help="An input's array; once for each input."),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            metavar="functional|rtl|board|ssh://USER@BOARD",
            help="Numpy, the Verilated RTL with cycle counts, this board's accelerator, or that of a board over ssh.",
        ),
    ] = "functional",
    config: MaybeConfig = None,
    threads: Annotated[
        int | None, typer.Option(help="Of the CPU's part; else $CELOSIA_THREADS, else one a processor, at most 8.")
    ] = None,
    sudo: Sudo = False,
    address: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="Address of the registers on a board, if its bitstream has its own."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="OUT.npz", help="Write the outputs.")] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="REPORT.json", help="Write cycles, layers and what each unit did.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="TIMELINE.json", help="Write each instruction's time, for ui.perfetto.dev.")
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Print every layer, not the longest only.")] = False,
    no_check: NoCheck = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run a model, or a compiled Program, on a simulator of the accelerator, or on a board.

    \b
    Examples:
      celosia run model.onnx --input image=image.npy --output out.npz
      celosia run resnet18.celosia -i image.npy --device rtl --report report.json --trace timeline.json
      celosia run resnet18.celosia -i image.npy --device ssh://root@pynq
    """
    if trace is not None and device != "rtl":
        raise typer.BadParameter("--trace needs --device rtl: the others do not tell each instruction's time")
    if device not in DEVICES and not device.startswith("ssh://"):
        raise typer.BadParameter(f"there is no device {device!r}; take {', '.join(DEVICES)} or ssh://USER@BOARD")
    options = _address(address)
    from celosia.driver import arrays
    from celosia.driver.runtime import Runtime

    given = inputs or []
    with _stages(quiet) as stages:
        _check_source(model)
        _destinations([model], output, report, trace)
        arrays.check_files(given)
        if device.startswith("ssh://"):
            program, result = _run_there(device, sudo, model, config, given, threads, options, stages, no_check)
        else:
            program = _program(model, config, stages, no_check)
            if device == "rtl":
                options = {"progress": stages.cycles, "quiet": quiet}
            with Runtime(program, device, threads, **options) as runtime:
                values = runtime.check(arrays.read_inputs(given, program.inputs))
                with stages.paused():
                    runtime.open()
                stages(f"running on the {device} device")
                result = runtime.run(values)
    _write(result, program, output, report, trace)
    if not quiet:
        _show(result, layers)


def _address(text: str | None) -> dict[str, Any]:
    """Options of a board's device."""
    if text is None:
        return {}
    try:
        return {"base": int(text, 0)}
    except ValueError:
        raise typer.BadParameter(f"--address {text} is no number; write it as 0x43c00000") from None


def _run_there(
    url: str,
    sudo: bool,
    source: Path,
    config: str | None,
    given: list[str],
    threads: int | None,
    options: dict[str, Any],
    stages: Stages,
    no_check: bool,
) -> tuple[Program, Result]:
    """Run on a board over ssh: ssh://USER@BOARD for its accelerator, ssh://USER@BOARD/functional for numpy there."""
    from celosia.driver import arrays, deploy
    from celosia.driver.ssh import connected

    place, _, device = url.removeprefix("ssh://").partition("/")
    if device not in ("", "board", "functional"):
        raise typer.BadParameter(
            f"there is no device {device!r} on a board; take ssh://{place}, or /functional after it"
        )
    with stages.paused(), connected(place) as connection:
        remote = deploy.Remote(connection, sudo=sudo)
        stages(f"connected to {place}")
        program = _program_there(source, config, stages, remote, no_check)
        values = arrays.read_inputs(given, program.inputs)
        stages(f"running on {place}")
        return program, deploy.run(remote, program, values, device or "board", threads, **options)


def _program_there(source: Path, config: str | None, stages: Stages, remote: Remote, no_check: bool) -> Program:
    """As `_program`, for the board's processor where a model is compiled."""
    from celosia.compiler.program import Program
    from celosia.driver import deploy

    compiled = source.is_file() and Program.is_program(source)
    target = None if compiled else deploy.target_of(remote.status())
    return _program(source, config, stages, no_check, target=target)


def _write(result: Result, program: Program, output: Path | None, report: Path | None, trace: Path | None) -> None:
    from celosia.compiler.files import write_text
    from celosia.driver import arrays

    if output is not None:
        arrays.write_outputs(output, result.outputs)
    if report is not None:
        write_text(report, json.dumps(result.report, indent=1) + "\n")
    if trace is not None:
        from celosia.driver.timeline import timeline

        write_text(trace, json.dumps(timeline(program, result.counters)) + "\n")


def _show(result: Result, layers: bool) -> None:
    from celosia.driver import show

    out = show.console()
    out.print(show.summary(result.report))
    if result.report["layers"]:
        out.print()
        out.print(show.layers(result.report, layers))
    out.print()
    for name, array in result.outputs.items():
        out.print(show.output(name, array), markup=False)


@app.command()
@command
def deploy(
    model: Model,
    host: Annotated[str, typer.Option("--host", metavar="USER@BOARD", help="The board, as ssh knows it.")],
    config: MaybeConfig = None,
    sudo: Sudo = False,
    no_check: NoCheck = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Put a Program and what runs it on a board, over ssh, and say what the board lacks.

    \b
    Examples:
      celosia deploy resnet18.celosia --host root@pynq
      celosia run resnet18.celosia -i image.npy --device ssh://root@pynq
    """
    from celosia.driver import deploy as deployment
    from celosia.driver.ssh import connected

    _check_source(model)
    with _stages(quiet) as stages, stages.paused(), connected(host) as connection:
        remote = deployment.Remote(connection, sudo=sudo)
        stages(f"connected to {host}")
        program = _program_there(model, config, stages, remote, no_check)
        stages(f"copying to {host}")
        files = deployment.runner(), deployment.program_file(program)
        board = remote.status(*files)
        sent = remote.install(board, *files)
        deployment.require(board, program, "board", host)
    if not quiet:
        python = ".".join(map(str, board.python))
        typer.echo(f"{host}: {board.machine}, Python {python}, numpy {board.numpy}, pynq {board.pynq}")
        typer.echo(f"{deployment.FOLDER}: {', '.join(file.name for file in files)}; {sent:,} bytes sent")


@app.command()
@command
def flash(
    bit: Annotated[
        Path, typer.Argument(metavar="FILE.bit", help="The bitstream; its .hwh and manifest lie beside it.")
    ],
    board: Annotated[str, typer.Option("--board", metavar="NAME", help="pynq-z1, pynq-z2, ultra96 or zcu104.")],
    host: Annotated[
        str | None,
        typer.Option("--host", metavar="USER@BOARD", help="The board, as ssh knows it; by default this one."),
    ] = None,
    sudo: Sudo = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Load a bitstream into a board's FPGA, and check that its accelerator answers.

    JTAG is no way to do it: on a Zynq it leaves the clocks of the logic as they were.

    \b
    Examples:
      celosia flash build/pynq-z2/pynq-z2-pynq.bit --board pynq-z2 --host root@pynq
    """
    from celosia.bitstreams.project import find_board
    from celosia.driver import deploy as deployment
    from celosia.driver.flash import load, prepare
    from celosia.driver.ssh import connected
    from celosia.hw.config import Config

    manifest = prepare(bit, board, find_board(board).part)
    if host is None:
        clock = load(str(bit), manifest)
    else:
        with _stages(quiet) as stages, stages.paused(), connected(host) as connection:
            stages(f"loading on {host}")
            clock = deployment.flash(deployment.Remote(connection, sudo=sudo), bit, manifest)
    if not quiet:
        what = f"{Config.from_dict(manifest.config).name} ({manifest.identity:08x}) at {clock:g} MHz"
        typer.echo(f"{host or 'this board'}: {bit.name} is loaded, accelerator {what} answers at {manifest.address:#x}")


@app.command()
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
    """
    graphs: dict[str, str] = {}

    def keep(name: str, graph: ir.Model) -> None:
        from celosia.compiler.graph.printer import text

        graphs[name] = text(graph.graph)

    with _stages(quiet) as stages:
        program = _program(model, config, stages, no_check, keep if passes or one_pass is not None else None)
    from celosia.driver import show

    disassemble = disassemble or layer is not None
    passes = passes or one_pass is not None
    every = not (operators or layers or buffers or passes or disassemble)
    out = show.console()
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
            typer.echo(line)
    if disassemble:
        for line in show.disassembly(program, layer):
            typer.echo(line)


@app.command()
@command
def quantize(
    model: Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="The float model.")],
    calibration: Annotated[
        Path,
        typer.Option(
            metavar="DIR|NPZ",
            help="A folder of .npy, .npz or image files, one for each sample; or an .npz of arrays by input name whose "
            "first axis counts samples.",
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
    mean: Annotated[
        list[float] | None, typer.Option(help="Of images: what is subtracted from pixels in 0..1; once or per channel.")
    ] = None,
    std: Annotated[
        list[float] | None, typer.Option(help="Of images: what they are divided by then; once or per channel.")
    ] = None,
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
    with _stages(quiet) as stages:
        _destinations([model, calibration], output, report)
        from celosia.driver.quantize import quantize as quantize_model

        found = quantize_model(
            model, calibration, output, per_channel=not per_tensor, activations=activations.value, method=method.value,
            samples=samples, exclude=exclude or (), mean=mean or (0.0,), std=std or (1.0,), config=config,
            progress=stages,
        )  # fmt: skip
    if report is not None:
        from celosia.compiler.files import write_text

        write_text(report, json.dumps(found, indent=1) + "\n")
    if not quiet:
        from celosia.driver import show

        out = show.console()
        for table in show.quantised(found):
            out.print(table)
            out.print()
        out.print(f"{output}: {show.megabytes(output.stat().st_size)}", markup=False)


@app.command()
@command
def verilog(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="TOP.v", help="The file to write.")],
    config: ConfigOption = "pynq",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write the Verilog of one accelerator.

    \b
    Examples:
      celosia verilog -o top.v
      celosia verilog --config my_accelerator.toml -o top.v
    """
    with _stages(quiet) as stages:
        _destinations([], output)
        from celosia.compiler.files import write_text
        from celosia.hw.config import Config

        cfg = Config.load(config)
        stages(f"elaborating {cfg.name}")
        from celosia.hw.verilog import TOP
        from celosia.hw.verilog import verilog as text_of

        text = text_of(cfg)
        write_text(output, text)
    if not quiet:
        typer.echo(f"{output}: module {TOP}, {text.count(chr(10)):,} lines")


@app.command()
@command
def demo(
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=100, help="How many images.")] = 10,
    device: Annotated[DeviceName, typer.Option(help="Numpy, or the Verilated RTL with cycle counts.")] = DeviceName.rtl,
    config: ConfigOption = "pynq",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Classify pictures of clothes with a ResNet-8 on the RTL, and compare every byte with onnxruntime.

    \b
    Examples:
      celosia demo
      celosia demo --count 100 --config tiny
    """
    from celosia.driver.demo import run as run_demo

    with _stages(quiet) as stages:
        run_demo(count, device.value, config, stages)


def main() -> None:
    """Entry point of the command."""
    app()


if __name__ == "__main__":
    main()
