"""The whole compiler on one screen: an ONNX model to a Program."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx
import onnx_ir as ir

from celosia.compiler.cpu.llvm import link_library
from celosia.compiler.cpu.schedule.chosen import Choices, choosing
from celosia.compiler.cpu.target import compiling_for, find_target
from celosia.compiler.graph.batchnorm import fold_batchnorm
from celosia.compiler.graph.channels import order_channels
from celosia.compiler.graph.cost import total_macs
from celosia.compiler.graph.cse import merge_equal
from celosia.compiler.graph.dead import remove_dead
from celosia.compiler.graph.dimensions import Shapes
from celosia.compiler.graph.float_weights import quantise_weights
from celosia.compiler.graph.fold import fold, fold_imported
from celosia.compiler.graph.identities import remove_wires, simplify
from celosia.compiler.graph.importer import ModelError
from celosia.compiler.graph.keep import Kept
from celosia.compiler.graph.launches import LaunchPlan
from celosia.compiler.graph.layout import layout
from celosia.compiler.graph.limits import require_memory, require_numpy
from celosia.compiler.graph.passes import Pass, Pipeline, Watch
from celosia.compiler.graph.quantized import Integerise
from celosia.compiler.graph.shapes import infer_shapes
from celosia.compiler.graph.specialise import specialise
from celosia.compiler.graph.tables import compose_tables
from celosia.compiler.graph.transposed import convolve_transposed
from celosia.compiler.launch.assemble import Assembler
from celosia.compiler.launch.image import Image
from celosia.compiler.launch.lowering import LaunchLayers, Lowered, lower
from celosia.compiler.options import Improve, Options, Progress, Source, taking
from celosia.compiler.program import Program
from celosia.compiler.program.host.op import HostError
from celosia.compiler.selfcheck.check import self_check
from celosia.compiler.selfcheck.original import Original
from celosia.compiler.selfcheck.rewriting import RewriteError, check_pass, check_rewriting, units_of
from celosia.compiler.tensorize.decisions import Given
from celosia.compiler.tensorize.plan import Planner
from celosia.compiler.tune.measure import TIMED
from celosia.compiler.tune.network import Network, apply, chains
from celosia.compiler.tune.records import Records
from celosia.compiler.tune.shipped import asked_for, shipped
from celosia.compiler.vthread.verify import Run, verify_provenance
from celosia.hw.config import Config

COLLECTED = 100_000
"""Objects after which the garbage collector runs while a model is compiled; it takes a sixth of the time otherwise."""

PASSES = Pipeline(
    Pass("shapes", "shapes come from the operators' expressions or are compared", infer_shapes, inside=False),
    Pass("fold", "operators on constants are computed, and the shapes that depend on them", fold_imported),
    Pass("wires", "Identity, Dropout and Cast to the same type go", remove_wires),
    Pass("integer", "QDQ patterns become integer operators", lambda model: Integerise(model).run()),
    Pass("tables", "functions of one 8-bit tensor become tables", compose_tables),
    Pass("fold-quantised", "constants that QDQ patterns did not take are computed", partial(fold, keep=frozenset())),
    Pass("identities", "operators that change nothing go, two that make one become one", simplify),
    Pass("batch-norm", "scales and offsets of channels move into weights", fold_batchnorm),
    Pass("channels", "channels are chosen and ordered in the weights of the convolution before", order_channels),
    Pass("phases", "transposed convolutions of floats become convolutions", convolve_transposed),
    Pass("common", "operators that compute the same are computed once", merge_equal),
    Pass("layout", "float convolutions, and what is between them, work on blocks of channels", layout, inside=False),
    Pass("fold-again", "what has become constant is computed", partial(fold, keep=frozenset())),
    Pass("dead", "what nothing reads is removed", remove_dead),
)
"""What happens to the graph before operators are placed, in order."""


@taking(Options)
def compile(source: Source, options: Options) -> Program:
    """Compile a model for the accelerator `config` (a preset's name, a TOML or JSON file, or a Config).

    >>> import celosia
    >>> program = celosia.compile(celosia.models.demo_model_path(), config="tiny")
    >>> program.macs_accelerator == program.macs_total
    True

    progress: called with the name of each stage. accelerator: False leaves every operator to the CPU. watch: called
    after each of PASSES with the graph. target: a board, its .toml file, or a processor of cpu.target, that the CPU's
    part is compiled for; by default this machine. check: run the accelerator's part on random inputs and compare it
    with the graph's operators on the CPU, layer by layer (compiler/selfcheck). decisions: how layers are scheduled, as
    a file or what it holds (tensorize/decisions.py); the compiler decides the others. shapes: of inputs, by name, where
    the model leaves sizes open, as {"input": (1, 80, 400)}; None or -1 leaves one open. graph/specialise.py says which
    may stay so; `Runtime` compiles a model for the shapes of the inputs that it gets. keep: names of tensors inside the
    model, or "all": a run returns them in `Result.tensors`. They are written to memory, so layers are not joined across
    them and blocks do not keep them on chip; outputs stay what they are, cycles do not. records: what `celosia tune`
    has measured, beside what comes with Celosia for the presets; it decides layers where the whole then takes fewer
    cycles, and the Program's `schedules` says what it did; kernels of this CPU are scheduled by it, too. "none": the
    compiler decides. improve: makes the image of all layers in the place of the compiler's own, which it is given, and
    says how; driver/tune.py searches so.

    Raises ModelError for a model, ConfigError for a Config, DecisionsError for decisions that do not fit, RecordsError
    for records that cannot be read, TargetError and BoardError for a target, LinkError where the linker for another
    processor is missing, and SelfCheckError where the check finds a fault of Celosia.
    """
    processor = None if options.target is None else find_target(options.target)
    with compiling_for(processor), _of_shapes(options.shapes), _seldom_collected():
        known = asked_for(options.records)
        if options.improve is None and known is not None:
            options = replace(options, improve=_from_records(known, options.say))
        choices = _measured(known) if known and known.trials and processor is None else None
        with choosing(choices) if choices else nullcontext():
            program = _compile(source, options, known is not None)
        if choices and (told := str(choices)):
            options.say(told)
            program.schedules = "; ".join(filter(None, (program.schedules, told)))
    if processor is not None:
        options.say("linking kernels")
        require_numpy(program)
        program.machine = processor.machine
        program.library = link_library(program.kernels, processor) if program.kernels else b""
        program.kernels = [replace(kernel, code=b"") for kernel in program.kernels]
    return program


def _measured(records: Records) -> Choices:
    """What was measured of kernels. Only who has such records imports what tunes."""
    from celosia.compiler.tune.kernels.tuner import recorded

    return Choices(recorded(records))


def _from_records(given: Records, say: Progress) -> Improve:
    def improve(network: Network) -> tuple[Image, str]:
        if not network.launches:
            return network.image, ""
        ours = shipped(network.cfg)
        image, applied = apply(network, given.joined(ours), TIMED, ours)
        damaged = f"; {given.damaged} damaged lines of {given.path} left out" if given.damaged else ""
        say(f"{applied}{damaged}")
        return image, f"{applied}{damaged}"

    return improve


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Let Python look for cycles of garbage every so many objects only: nearly all that is made here lives on."""
    before = gc.get_threshold()
    if 0 < before[0] < COLLECTED:
        gc.set_threshold(COLLECTED, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def _of_shapes(shapes: Shapes | None) -> Iterator[None]:
    """Say for which shapes a model was refused."""
    try:
        yield
    except ModelError as error:
        if not shapes:
            raise
        given = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ModelError(f"{error} (with the shapes given: {given})") from None


def _compile(source: Source, options: Options, with_records: bool) -> Program:
    started = time.perf_counter()
    say, check = options.say, options.check
    cfg = Config.load(options.config)
    given = None if options.decisions is None else Given.load(options.decisions, cfg)
    planner = Planner(cfg, given)
    if with_records and given is None:
        planner.timed |= chains(cfg, shipped(cfg))
    say("reading the model")
    found = specialise(source, options.shapes, cfg.batch)
    model = found.graph
    quantise_weights(model)
    require_memory(model)
    say("graph passes")
    kept = Kept(model, options.keep)
    originals: list[Original] = []
    watch = options.watch
    if check:
        watch = _after("import", lambda imported: originals.append(Original(imported)), watch)
    macs: list[int] = []  # of the model's own operators, once their shapes are known
    watch = _after("fold", lambda folded: macs.append(total_macs(folded.graph)), watch)
    passes = PASSES.run(model, kept.watched(watch))
    require_memory(model)
    say("placing operators")
    refused = {} if options.accelerator else dict.fromkeys(model.graph, "compiled for the CPU alone")
    schedules = ""

    def improved(plan: LaunchLayers, planner: Planner) -> Image:
        nonlocal schedules
        network = Network(cfg, *plan, planner)
        image, schedules = (network.image, "") if options.improve is None else options.improve(network)
        return image

    lowered = lower(cfg, model, planner, refused, () if given is None else given.layers, say, improved)
    selection, steps, plan, image = lowered.selection, lowered.steps, lowered.plan, lowered.image
    if given is not None:
        given.check_all_taken()
    say("verifying instructions")
    runs = [
        Run(image.code(launch), layers, launch.layer_of, packed, taken)
        for launch, layers, packed, taken in zip(image.launches, *plan, strict=True)
    ]
    verify_provenance(cfg, runs, image.addresses, image.constants_address, image.constants, image.size)
    say("kernels for the CPU")
    try:
        program = Assembler(model, cfg, selection, steps, image).run()
    except HostError as error:
        raise ModelError(str(error)) from None
    if check:
        say("checking")
        _check(program, model, lowered, originals[0], lambda: specialise(source, options.shapes, cfg.batch).graph)
    program.outputs, program.kept = program.outputs[: kept.outputs], program.outputs[kept.outputs :]
    program.name = "model" if isinstance(source, onnx.ModelProto) else Path(source).stem
    program.batched = found.batched
    program.macs_total = sum(macs)
    program.passes = passes
    program.schedules = schedules
    program.compile_seconds = time.perf_counter() - started
    return program


def _check(
    program: Program, model: ir.Model, lowered: Lowered, original: Original, again: Callable[[], ir.Model]
) -> None:
    """Compare `program` with the graph that it was made of, and that with the model. SelfCheckError. again: imports."""
    selection = lowered.selection
    plans = [step for step in lowered.steps if isinstance(step, LaunchPlan)]
    checked = self_check(program, plans, selection, lowered.image.addresses)
    try:
        units = units_of(program, model.graph, selection, checked.computed)
        check_rewriting(original, units, program.constants, checked.held)
    except RewriteError:  # and which pass was it?
        PASSES.run(again(), lambda name, model: check_pass(original, name, model))
        raise


def _after(stage: str, take: Callable[[ir.Model], None], watch: Watch | None) -> Watch:
    """`watch`, after `take` of the graph as it is after that pass, or "import"."""

    def both(name: str, model: ir.Model) -> None:
        if name == stage:
            take(model)
        if watch is not None:
            watch(name, model)

    return both


__all__ = ["ModelError", "compile"]
