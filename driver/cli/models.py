"""`celosia compile`, `inspect`, `report` and `quantize`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from celosia.driver.choices import ACTIVATIONS, METHODS, OPERATORS, WEIGHTS, parse_alpha
from celosia.driver.cli import common
from celosia.driver.cli import options as opt
from celosia.driver.cli.errors import command, say
from celosia.hw.boards.boards import BOARDS, find_board, is_board_file
from celosia.hw.spec.config import PRESETS, Config

if TYPE_CHECKING:
    import onnx_ir as ir
    from rich.console import RenderableType

    from celosia.compiler.program import Program
    from celosia.driver.pages.page import Page

ProgramFile = Annotated[Path, typer.Option("--output", "-o", metavar="PROGRAM", help="The file to write.")]
TargetConfig = Annotated[
    str | None,
    typer.Option(
        "--config", metavar="NAME|FILE", help="The accelerator. Default: that of the target board, else pynq."
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        metavar="BOARD|FILE|PROCESSOR",
        help=f"Board or processor that runs the Program: {', '.join(BOARDS)}, a board's .toml file, armv7 or aarch64. "
        "Default: this machine.",
    ),
]


def _target_config(target: str | None) -> Config:
    """Return the Config to compile for where none is named: the board's if --target is a board, else `pynq`."""
    if target is None or not (target in BOARDS or is_board_file(target)):
        return PRESETS["pynq"]
    return find_board(target).config


@command
def compile_(
    model: opt.OnnxModel,
    output: ProgramFile,
    config: TargetConfig = None,
    target: Target = None,
    decisions: opt.TakenDecisions = None,
    records: opt.KnownRecords = "shipped",
    keep: opt.Keep = None,
    without: opt.Without = None,
    rounding: opt.Rounding = None,
    shape: opt.ShapeOption = None,
    set_: opt.SetOption = None,
    place: opt.Place = None,
    imports: opt.Import = None,
    no_check: opt.NoCheck = False,
    quiet: opt.Quiet = False,
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
      celosia compile silero_vad.onnx -o vad.celosia --shape input=1,576 --shape state=2,1,128 --set sr=16000
      celosia compile detector.onnx -o detector.celosia --place cost --place /head/Conv=cpu
      celosia compile minilm.onnx -o minilm.celosia --rounding correct
      celosia compile model.onnx -o model.celosia --import my_ops.py
    """
    common.import_files(imports)
    with common.progress_stages(quiet) as stages:
        shapes = common.parse_shapes(shape)
        common.check_destinations([model], output)
        from celosia.compiler.compile import compile as compile_model

        program = _compile_to_file(output, lambda: compile_model(
            model, config or _target_config(target), progress=stages, target=target, check=not no_check,
            decisions=decisions, keep=common.parse_keep(keep), shapes=shapes, records=records,
            place=common.parse_place(place), set=common.parse_set(set_),
            without=without or (), **common.rounding_option(rounding),
        ), stages)  # fmt: skip
    common.advise(program, quiet)
    if not quiet:
        from celosia.driver.show import program_summary as show

        common.show([show.overview(program), _file_size_text(output)])


def _compile_to_file(path: Path, compile_program: Callable[[], Program], stages: Callable[[str], None]) -> Program:
    """Compile a Program and write it to `path`; also one whose check failed itself, for which it raises CheckFailed."""
    from celosia.compiler.selfcheck.check_launches import CheckFailed

    try:
        program = compile_program()
    except CheckFailed as failure:
        if failure.program is not None:
            failure.program.save(path)
            say(f"{path} is written, and not checked", error=True)
        raise
    stages("writing the Program")
    program.save(path)
    return program


def _file_size_text(path: Path) -> str:
    """Return a line with a file's name and size."""
    from celosia.driver.show.text_table import megabytes

    return f"{path}: {megabytes(path.stat().st_size)}"


Operators = Annotated[bool, typer.Option("--operators", help="Show only where each operator runs, and why.")]
Layers = Annotated[bool, typer.Option("--layers", help="Show only the layers and their instructions.")]
Buffers = Annotated[bool, typer.Option("--buffers", help="Show only the use of DRAM, arena and scratchpads.")]
Disassemble = Annotated[bool, typer.Option("--disassemble", "-d", help="Show only every instruction as text.")]
Layer = Annotated[str | None, typer.Option(metavar="NAME", help="Show only the instructions of this layer as text.")]
Passes = Annotated[bool, typer.Option("--passes", help="Show only the graph after each pass, and the kernels.")]
OnePass = Annotated[
    str | None, typer.Option("--pass", metavar="NAME", help="Show only the graph after this pass, or after `import`.")
]
Estimate = Annotated[
    bool,
    typer.Option("--estimate", help="Show only the cycles of each layer by the timing model, and its bound."),
]
Loops = Annotated[
    str | None, typer.Option(metavar="LAYER", help="Show only the loops of this layer, and their schedule.")
]
Derivation = Annotated[
    bool,
    typer.Option(
        "--derivation", help="Show only the rewrites by which `optimise` made the model, with proof and gain."
    ),
]
Tiling = Annotated[
    Path | None,
    typer.Option(metavar="FILE.json", help="Write the schedule of each layer to a file, which you can change."),
]


@command
def inspect(
    model: opt.Model,
    config: opt.MaybeConfig = None,
    operators: Operators = False,
    layers: Layers = False,
    buffers: Buffers = False,
    disassemble: Disassemble = False,
    layer: Layer = None,
    passes: Passes = False,
    one_pass: OnePass = None,
    estimate: Estimate = False,
    memory: opt.Memory = None,
    loops: Loops = None,
    decisions: Tiling = None,
    derivation: Derivation = False,
    shape: opt.ShapeOption = None,
    place: opt.Place = None,
    rounding: opt.Rounding = None,
    imports: opt.Import = None,
    no_check: opt.NoCheck = False,
    quiet: opt.Quiet = False,
) -> None:
    """Show how a model is compiled: where operators run and why, layers, buffers and instructions.

    \b
    Examples:
      celosia inspect model.onnx
      celosia inspect model.onnx --operators --config tiny
      celosia inspect model.onnx --passes | less
      celosia inspect model.celosia --disassemble --layer conv1 | less
      celosia inspect model.onnx --estimate --memory pynq-z2
      celosia inspect model.onnx --loops conv1
      celosia inspect model.onnx --decisions decisions.json
      celosia inspect faster.onnx --derivation
    """
    if derivation:
        _show_derivation(model)
        return
    if memory is not None and not estimate:
        raise typer.BadParameter("--memory needs --estimate: nothing else here depends on it")
    common.import_files(imports)
    memory_args = common.parse_memory(memory, "timed")
    parts = _Parts(operators, layers, buffers, disassemble or layer is not None, layer, passes, one_pass)
    with common.progress_stages(quiet) as stages:
        common.check_destinations([model], decisions)
        compile_options = common.compile_options(shape, place, rounding)
        program = common.load_or_compile(model, config, stages, no_check, parts.watch, **compile_options)
    common.advise(program, quiet)
    from celosia.driver.show import program_summary as show
    from celosia.driver.show import run_summary as show_run

    if decisions is not None:
        from celosia.compiler.tensorize.plan import collect_tilings

        common.write_json(decisions, collect_tilings(program))
    if loops is not None:
        _print_lines(show.layer_loops(program, loops))
    elif decisions is None:
        common.show(show_run.estimate(program, **memory_args) if estimate else parts.tables(program))
    if loops is None and decisions is None and not estimate:
        _print_lines(parts.lines(program))


def _show_derivation(model: Path) -> None:
    """Print how `celosia optimise` made a model, or the model of a Program. ModelError where it did not."""
    common.check_source(model)
    from celosia.compiler.graph.errors import ModelError
    from celosia.compiler.superoptimise.derivation import derivation_in
    from celosia.driver.show import optimise_summary as show

    report = derivation_in(model)
    if report is None:
        raise ModelError(f"{model} holds no derivation; write a model with `celosia optimise` and look at that")
    common.show(show.steps(report))


class _Parts:
    """The parts of a Program that `inspect` shows: those that options name, or all tables.

    graphs: the graph as text after each pass, by the pass's name; filled during compilation if --passes or --pass is
    given.
    """

    def __init__(
        self, operators: bool, layers: bool, buffers: bool, disassemble: bool, layer: str | None, passes: bool,
        one_pass: str | None,
    ) -> None:  # fmt: skip
        self._wanted_tables = operators, layers, buffers
        self.disassemble, self.layer, self.one_pass = disassemble, layer, one_pass
        self.passes = passes or one_pass is not None
        self.graphs: dict[str, str] = {}

    @property
    def watch(self) -> Callable[[str, ir.Model], None] | None:
        """The function that compilation calls after each pass; None where no graph is wanted."""
        return self._keep_graph if self.passes else None

    def _keep_graph(self, name: str, graph: ir.Model) -> None:
        """Keep the text of the graph after the pass `name`."""
        from celosia.compiler.graph.printer import text

        self.graphs[name] = text(graph.graph)

    def tables(self, program: Program) -> Iterator[RenderableType]:
        """Yield the tables, with an empty line before each but the first."""
        from celosia.driver.show import program_summary as show

        show_all = not (any(self._wanted_tables) or self.passes or self.disassemble)
        if show_all:
            yield show.overview(program)
        for is_wanted, table in zip(self._wanted_tables, (show.operators, show.program_layers, show.buffers)):
            if show_all:
                yield ""
            if show_all or is_wanted:
                yield table(program)
        if self.passes and self.one_pass is None:
            yield from (show.passes(program), "", show.kernels(program))

    def lines(self, program: Program) -> Iterator[str]:
        """Yield graphs and instructions as text. ProgramError for an unknown name."""
        from celosia.driver.show import program_summary as show

        if self.passes:
            yield from show.graphs(program, self.graphs, self.one_pass)
        if self.disassemble:
            yield from show.disassembly(program, self.layer)


def _print_lines(lines: Iterable[str]) -> None:
    """Print each line with control characters escaped."""
    for line in lines:
        say(line)


Source = Annotated[
    Path,
    typer.Argument(
        metavar="PROGRAM|REPORT.json|front.json|MODEL.onnx",
        help="A model, or a file from `compile`, `run --report`, `explore` or `optimise`.",
    ),
]
PageFile = Annotated[Path, typer.Option("--output", "-o", metavar="PAGE.html", help="The file to write.")]


@command
def report(
    source: Source,
    output: PageFile,
    config: opt.MaybeConfig = None,
    memory: opt.Memory = None,
    shape: opt.ShapeOption = None,
    no_check: opt.NoCheck = False,
    quiet: opt.Quiet = False,
) -> None:
    """Write an HTML page on a model, a run or an exploration: bound of each layer, roofline, timeline, memory traffic.

    Cycles of a Program or a model are those of the timing model. Cycles of a report are those of its run. The page is
    one file that needs no network.

    \b
    Examples:
      celosia report model.celosia -o page.html
      celosia report model.onnx --config pynq --memory pynq-z2 -o page.html
      celosia report report.json -o page.html
      celosia report front/front.json -o front.html
      celosia report faster.onnx -o page.html
    """
    memory_args = common.parse_memory(memory, "timed")
    from celosia.driver.pages import derivation, page
    from celosia.driver.pages import run_page as run

    page.require_bokeh()
    with common.progress_stages(quiet) as stages:
        common.check_source(source)
        common.check_destinations([source], output)
        if source.suffix == ".json":
            for option, value in (("--config", config), ("--memory", memory), ("--shape", shape)):
                if value:
                    raise typer.BadParameter(f"{option} is for a model or Program: {source} says what its run had")
            written_page = _page_of_saved_report(source)
        else:
            program = common.load_or_compile(source, config, stages, no_check, shapes=common.parse_shapes(shape))
            stages("drawing")
            written_page = run.page_of_prediction(program, **memory_args)
            written_page = derivation.add_derivation(written_page, source)
        written_page.save(output)
    if not quiet:
        say(f"{output}: {output.stat().st_size / 1e6:.1f} MB, for a browser; it needs no network")


def _page_of_saved_report(report: Path) -> Page:
    """Return the page of a JSON report that `run --report`, `explore` or `optimise --report` wrote."""
    from celosia.driver.pages import derivation
    from celosia.driver.pages import exploration_page as front
    from celosia.driver.pages import run_page as run

    if derivation.is_derivation(report):
        return derivation.page_of_derivation(report)
    return front.page_of_front(report) if front.is_front(report) else run.page_of_report(report)


FloatModel = Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="The float model.")]
Calibration = Annotated[Path, typer.Option(metavar="DIR|NPZ", help=opt.SAMPLES)]
Quantised = Annotated[Path, typer.Option("--output", "-o", metavar="OUT.onnx", help="The file to write.")]
PerTensor = Annotated[
    bool, typer.Option("--per-tensor", help="Use one scale for each weight tensor, not one for each output channel.")
]
Weights = Annotated[
    str,
    opt.one_of(
        "--weights",
        names=tuple(map(str, WEIGHTS)),
        help="Bits of weights. Weights of 4, 2 or 1 bits are int8 with few values, which an accelerator with that "
        "`weight_bits` loads faster.",
    ),
]
Activations = Annotated[str, opt.one_of(names=ACTIVATIONS, help="Type of activations; weights are int8.")]
Symmetric = Annotated[
    bool, typer.Option("--symmetric", help="Give activations no zero point, which makes attention faster.")
]
Method = Annotated[str, opt.one_of(names=METHODS, help="Method that computes ranges from the samples.")]
Kinds = Annotated[
    str | None,
    opt.one_of("--operators", names=OPERATORS, help="Operators to quantise. Default: products for decoders, else all."),
]
Recurrent = Annotated[
    bool,
    typer.Option(
        "--recurrent",
        help="Also quantise the products of the inputs of LSTM, GRU and RNN, which can lose some decibels.",
    ),
]
Smooth = Annotated[
    str | None,
    typer.Option(
        "--smooth", metavar="ALPHA|auto",
        help="Scale large channels of activations down and their weights up (SmoothQuant): from 0, nothing, to 1, all. "
        "auto: search for the best value at each place.",
    ),
]  # fmt: skip
Exclude = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Name of an operator that stays float; may be repeated.")
]


@command
def quantize(
    model: FloatModel,
    calibration: Calibration,
    output: Quantised,
    per_tensor: PerTensor = False,
    weights: Weights = str(WEIGHTS[0]),
    activations: Activations = ACTIVATIONS[0],
    symmetric: Symmetric = False,
    method: Method = "minmax",
    operators: Kinds = None,
    recurrent: Recurrent = False,
    smooth: Smooth = None,
    samples: opt.Samples = None,
    exclude: Exclude = None,
    mean: opt.Mean = None,
    std: opt.Std = None,
    set_: opt.SetOption = None,
    config: opt.ConfigOption = "pynq",
    report: opt.Report = None,
    quiet: opt.Quiet = False,
) -> None:
    """Quantise a float model to int8, and compare its outputs with the float model's.

    \b
    Examples:
      celosia quantize model.onnx --calibration samples.npz -o model_int8.onnx
      celosia quantize model.onnx --calibration photos/ --mean 0.5 --std 0.5 -o model_int8.onnx --report report.json
      celosia quantize decoder.onnx --calibration tokens.npz -o decoder_int8.onnx
      celosia quantize decoder.onnx --calibration tokens.npz --weights 4 -o decoder_w4.onnx
      celosia quantize decoder.onnx --calibration tokens.npz --smooth auto -o decoder_int8.onnx
    """
    if per_tensor and int(weights) < WEIGHTS[0]:
        raise typer.BadParameter(f"--per-tensor: weights of {weights} bits have a scale for each output channel")
    if symmetric and activations != ACTIVATIONS[0]:
        raise typer.BadParameter(f"--symmetric: activations are {ACTIVATIONS[0]} then, not {activations}")
    try:
        alpha = None if smooth is None else parse_alpha(smooth)
    except ValueError as error:
        raise typer.BadParameter(f"--smooth: {error}") from None
    with common.progress_stages(quiet) as stages:
        common.check_destinations([model, calibration], output, report)
        from celosia.driver.quantize.quantize import quantize as quantize_model

        quantised = quantize_model(
            model, calibration, output, per_channel=not per_tensor, activations=activations, method=method,
            symmetric=symmetric, operators=operators, recurrent=recurrent, samples=samples, exclude=exclude or (),
            mean=mean or (0.0,), std=std or (1.0,), weights=int(weights), smooth=alpha, config=config,
            set=common.parse_set(set_), progress=stages, told=common.printer_of_first_sentence(quiet),
        )  # fmt: skip
    common.write_json(report, quantised)
    if not quiet:
        from celosia.driver.show import quantize_summary as show

        tables = (part for table in show.quantised(quantised) for part in (table, ""))
        common.show([*tables, _file_size_text(output)])
