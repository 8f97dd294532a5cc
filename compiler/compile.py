"""The whole compiler on one screen: an ONNX model to a Program."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import onnx
import onnx_ir as ir

from celosia.compiler.cpu.llvm import link_library
from celosia.compiler.cpu.schedule.kernel_schedules import KernelSchedules, using_schedules
from celosia.compiler.cpu.target import compiling_for, find_target
from celosia.compiler.graph.cost import total_macs
from celosia.compiler.graph.debug_outputs import DebugOutputs
from celosia.compiler.graph.dimensions import Shapes
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.float_weights import quantise_weights
from celosia.compiler.graph.importer import check_parameters, read
from celosia.compiler.graph.launches import LaunchPlan
from celosia.compiler.graph.limits import require_memory, require_numpy
from celosia.compiler.graph.passes import Pipeline, Watch
from celosia.compiler.graph.pipeline import for_hardware, passes_of
from celosia.compiler.graph.select.placement import CACHE
from celosia.compiler.graph.shapes import Disagreement
from celosia.compiler.graph.specialise import SpecialisedModel, specialise
from celosia.compiler.launch.assemble import Assembler
from celosia.compiler.launch.image import Image, LayerErrors
from celosia.compiler.launch.lowering import LaunchLayers, Lowered, lower
from celosia.compiler.layer import TilingError
from celosia.compiler.options import Options, Source, expand_options
from celosia.compiler.placing import PlacementRequest
from celosia.compiler.program import PassInfo, Program
from celosia.compiler.program.host.op import HostError
from celosia.compiler.selfcheck.check_launches import CheckFailed, SelfCheckError, self_check
from celosia.compiler.selfcheck.check_rewriting import RewriteError, check_pass, check_rewriting, units_of
from celosia.compiler.selfcheck.imported_model import Original
from celosia.compiler.superoptimise.price import INFEASIBLE, Price, Pricing, price_of
from celosia.compiler.switches import leaving_out
from celosia.compiler.tensorize.decisions import ScheduleFile
from celosia.compiler.tensorize.plan import Planner
from celosia.compiler.tune.layer_trial import TIMED
from celosia.compiler.tune.network import Network, apply_records, follow_decisions, known_chains
from celosia.compiler.tune.records import Records
from celosia.compiler.tune.shipped import SHIPPED, asked_for, shipped
from celosia.compiler.vthread.verify import Run, verify_provenance
from celosia.garbage import raised_gc_threshold
from celosia.hw.spec.config import Config, did_you_mean


@expand_options(Options)
def compile(source: Source, options: Options) -> Program:
    """Compile a model for the accelerator `config` (a preset's name, a TOML or JSON file, or a Config).

    >>> import celosia
    >>> program = celosia.compile(celosia.models.demo_model_path(), config="tiny")
    >>> program.macs_accelerator == program.macs_total
    True

    progress: called with the name of each stage. accelerator: False leaves every operator to the CPU. watch: called
    after each of PASSES with the graph. target: a board, its .toml file, or a processor of cpu.target, that the CPU's
    part is compiled for, by default this machine; for a Target itself kernels stay objects. check: run the
    accelerator's part on random inputs and compare it with the graph's operators on the CPU, layer by layer
    (compiler/selfcheck). decisions: how layers are scheduled, as a file or what it holds (tensorize/decisions.py); the
    compiler decides the others. shapes: of inputs, by name, where the model leaves sizes open, as {"input": (1, 80,
    400)}; None or -1 leaves one open. graph/specialise.py says which may stay so; `Runtime` compiles a model for the
    shapes of the inputs that it gets. keep: names of tensors inside the model, or "all": a run returns them in
    `Result.tensors`. They are written to memory, so layers are not joined across them and blocks do not keep them on
    chip; outputs stay what they are, cycles do not. caches: inputs [..., rows, columns] of which few rows differ from
    run to run: the accelerator's memory keeps the others, as `ProgramRuntime.run_on` says. records: what `celosia tune`
    has measured, beside what comes with Celosia for the presets; it decides layers where the whole then takes fewer
    cycles, and the Program's `schedules` says what it did; kernels of this CPU are scheduled by it, too. "none": the
    compiler decides. tuned: decisions by workload, as a search finds them in what `network_of` gives; they go before
    those of records. DecisionsError where a layer cannot follow them. optimise: how long to look for a model that
    computes the same bytes in fewer cycles first, as "60s" or seconds (compiler/superoptimise). fast_math: floats count
    as real numbers there. without: names of passes and parts to leave out (PASSES, compiler/switches.py), to see what
    each is good for: the bytes stay as they are. oracle: opens a model in the runtime that compares the two; by default
    onnxruntime, which `celosia.compile` hands in. place: where operators run, by name, as {"conv1": "cpu"}, or
    "accelerator", where it is an error if that cannot be; {"*": "cost"} leaves launches to the CPU which it is done
    with sooner (compiler/placing.py), {"*": "cpu"} all that have no place. rounding: "correct" makes of normalisations,
    sums and averages between bytes operators of integers, which round the real numbers; by default they are
    onnxruntime's floats, byte for byte (compiler/graph/norms.py, sums.py, averages.py).

    Raises ModelError for a model, ConfigError for a Config, DecisionsError for decisions that do not fit, RecordsError
    for records that cannot be read, TargetError and BoardError for a target, LinkError where the linker for another
    processor is missing, BudgetError for a time that is none, MissingLibrary where onnxruntime is missing,
    OracleError for a model that it does not run, SelfCheckError where the check finds a fault of Celosia, and
    CheckFailed, which holds the Program, where the check itself ends in an error.
    """
    processor = find_target(options.target) if isinstance(options.target, str) else options.target
    given, derivation = source, ""
    if options.optimise is not None or options.fast_math:
        source, derivation = _optimised(source, options)
        options = replace(options, optimise=None, fast_math=False)
    with compiling_for(processor), _of_shapes(options.shapes), raised_gc_threshold(), leaving_out(options.left_out):
        known = asked_for(options.records)
        choices = _measured(known) if known and known.trials and processor is None else None
        with using_schedules(choices) if choices else nullcontext():
            program, failure = _compile(source, options, known)
        if choices and (told := str(choices)):
            options.say(told)
            program.schedules = "; ".join(filter(None, (program.schedules, told)))
    program.name, program.derivation = _name(given), derivation
    if processor is not None:
        program.machine = processor.machine
    if isinstance(options.target, str) and processor is not None:
        options.say("linking kernels")
        require_numpy(program)
        program.library = link_library(program.kernels, processor) if program.kernels else b""
        program.kernels = [replace(kernel, code=b"") for kernel in program.kernels]
    if failure is not None:
        failure.program = program
        raise failure
    return program


def _optimised(source: Source, options: Options) -> tuple[Source, str]:
    """A model of fewer cycles and how it came to be, or `source`. Who does not ask for it imports none of this."""
    from celosia.compiler.superoptimise.budget import BudgetError, seconds
    from celosia.compiler.superoptimise.derivation import text_in
    from celosia.compiler.superoptimise.optimise import optimise
    from celosia.compiler.tune.kernels.kernel_trial import processor

    if options.optimise is None:
        raise BudgetError('fast_math is of a search, which has no time here: give optimise="60s", or leave it out')
    if options.oracle is None:
        raise BudgetError("there is no oracle to compare an optimised model with; call celosia.compile, or give one")
    options.say("looking for a model that takes less time")
    known = asked_for(options.records)
    found = optimise(
        source, pricing(source, options.config, options.accelerator, options.records),
        seconds(options.optimise), options.oracle, options.shapes, floats=not options.accelerator,
        records=known if known and known.path else None,
        config=Config.load(options.config).digest if options.accelerator else processor(), fast_math=options.fast_math,
    )  # fmt: skip
    options.say(f"{found.before} at first, {found.after} after {len(found.steps)} steps")
    return (found.model, text_in(found.model)) if found.steps else (source, "")


def _measured(records: Records) -> KernelSchedules:
    """What was measured of kernels. Only who has such records imports what tunes."""
    from celosia.compiler.tune.kernels.kernel_tuner import recorded_traces

    return KernelSchedules(recorded_traces(records))


@expand_options(Options)
def network_of(source: Source, options: Options) -> Network:
    """The layers that `compile` puts on the accelerator under the same options: what a search for schedules searches.

    Raises what `compile` does; nothing is checked.
    """
    with _of_shapes(options.shapes), raised_gc_threshold():
        front = _front(source, replace(options, check=False), asked_for(options.records))
        lowered = _lowered(front, options)
        return Network(front.cfg, *lowered.plan, lowered.planner)


@expand_options(Options)
def price(source: Source, options: Options) -> Price:
    """What the model costs under the same options: cycles of its launches, and an estimate of the CPU's part.

    INFEASIBLE where layers do not fit. Raises what `compile` does; nothing is checked.
    """
    with _of_shapes(options.shapes), raised_gc_threshold():
        known = asked_for(options.records)
        front = _front(source, replace(options, check=False), known)
        timed = _timed(front.cfg)
        if len(timed) > MOST_TIMED:
            timed.clear()
        timed |= front.planner.timed
        front.planner.timed = timed

        def made(plan: LaunchLayers, planner: Planner) -> Image:
            return _decided(Network(front.cfg, *plan, planner), options, known)[0]

        try:
            lowered = _lowered(front, options, made)
            network = Network(front.cfg, *lowered.plan, lowered.planner)
            return price_of(network, lowered.image, lowered.selection)
        except (LayerErrors, TilingError):
            return INFEASIBLE


def pricing(
    source: Source, config: Config | str | Path = "pynq", accelerator: bool = True, records: str | Path | None = SHIPPED
) -> Pricing:
    """What prices models that are made of `source`. accelerator: False for the time that the CPU takes alone."""
    if accelerator:
        cfg = Config.load(config)
        return Pricing(lambda each: price(each, cfg, records=records), lambda each: price(each, cfg, records=None))
    from celosia.compiler.superoptimise.measured import gain, is_large, nanoseconds

    large = is_large((source if isinstance(source, onnx.ModelProto) else read(Path(source))).ByteSize())

    def made(each: onnx.ModelProto) -> Program:
        return compile(each, config, accelerator=False, check=False, records=records)

    def measured(each: onnx.ModelProto) -> Price:
        return Price(0, nanoseconds(made(each), large), True)

    held: list[tuple[onnx.ModelProto, Program]] = []

    def anew(before: onnx.ModelProto, after: onnx.ModelProto) -> float:
        if not held or held[0][0] is not before:
            held[:] = [(before, made(before))]
        return gain(held[0][1], made(after), large)

    return Pricing(measured, measured, anew)


MOST_TIMED = 20_000
"""Chains of layers of a Config whose cycles are kept."""


@lru_cache(maxsize=8)
def _timed(cfg: Config) -> dict[str, float]:
    """Cycles of chains of layers, as Planner.timed has them, for models that are priced on one of the last Configs."""
    return {}


def _decided(network: Network, options: Options, known: Records | None) -> tuple[Image, str]:
    """The image of all layers, and in a sentence what was decided: by the caller, else by records, else here."""
    if options.tuned is not None:
        return follow_decisions(network, options.tuned), ""
    if known is None or not network.launches:
        return network.image, ""
    ours = shipped(network.cfg)
    image, applied = apply_records(network, known.joined(ours), TIMED, ours)
    damaged = f"; {known.damaged} damaged lines of {known.path} left out" if known.damaged else ""
    options.say(f"{applied}{damaged}")
    return image, f"{applied}{damaged}"


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


@dataclass(frozen=True)
class Front:
    """A model as PASSES leave it. given: the user's decisions. originals: the graph as imported, where it is to be
    compared with. macs: of the model's own operators. passes: what they did. declared: as of `specialise`. weighed:
    sentences on what was placed by cost."""

    cfg: Config
    given: ScheduleFile | None
    planner: Planner
    model: SpecialisedModel
    kept: DebugOutputs
    originals: list[Original]
    macs: int
    passes: list[PassInfo]
    declared: bool = True
    weighed: list[str] = field(default_factory=list)


def _front(source: Source, options: Options, known: Records | None) -> Front:
    """The front end. Shapes that the model declares and its operators do not make are left out, with a warning."""
    try:
        return _front_of(source, options, known, True)
    except Disagreement as error:
        front = _front_of(source, options, known, False)
        warnings.warn(f"the model declares wrong shapes, which are left out: {error}", stacklevel=2)
        return front


def _front_of(source: Source, options: Options, known: Records | None, declared: bool) -> Front:
    cfg = Config.load(options.config)
    given = None if options.decisions is None else ScheduleFile.load(options.decisions, cfg)
    planner = Planner(cfg, given)
    if known is not None and given is None:
        planner.timed |= known_chains(cfg, shipped(cfg))
    options.say("reading the model")
    found = specialise(source, options.shapes, cfg.batch, declared)
    quantise_weights(found.graph)
    require_memory(found.graph)
    options.say("graph passes")
    kept = DebugOutputs(found.graph, options.keep)
    _mark_caches(found.graph, options.caches)
    originals: list[Original] = []
    watch = options.watch
    if options.check:
        watch = _after("import", lambda imported: originals.append(Original(imported)), watch)
    macs: list[int] = []  # once shapes are known
    watch = _after("fold", lambda folded: macs.append(total_macs(folded.graph)), watch)
    passes = Pipeline(*passes_of(options.left_out, options.rounding), *for_hardware(cfg)).run(
        found.graph, kept.watched(watch)
    )
    check_parameters(found.graph)
    require_memory(found.graph)
    return Front(cfg, given, planner, found, kept, originals, sum(macs), passes, declared)


def _mark_caches(model: ir.Model, names: Sequence[str]) -> None:
    inputs = {value.name: value for value in model.graph.inputs}
    for name in names:
        if name not in inputs:
            raise ModelError(f"cache {name!r} is no input{did_you_mean(name, filter(None, inputs))}")
        inputs[name].meta[CACHE] = inputs[name]


def _lowered(front: Front, options: Options, made: Callable[[LaunchLayers, Planner], Image] | None = None) -> Lowered:
    options.say("placing operators")
    graph, given = front.model.graph.graph, front.given
    placed = PlacementRequest(options.place)
    refused = placed.refused(graph)
    if not options.accelerator:
        refused = dict.fromkeys(graph, "compiled for the CPU alone")
    decided = () if given is None else given.layers
    lowered = lower(front.cfg, front.model.graph, front.planner, refused, decided, options.say, made)
    while slower_on_accelerator := placed.slower_on_accelerator(front.cfg, lowered):
        refused |= slower_on_accelerator
        lowered = lower(front.cfg, front.model.graph, front.planner, refused, decided, options.say, made)
    placed.require(graph, lowered.selection)
    front.weighed.extend(placed.weighed.values())
    if given is not None:
        given.check_all_taken()
    return lowered


def _compile(source: Source, options: Options, known: Records | None) -> tuple[Program, CheckFailed | None]:
    """The Program, and why its check says nothing about it, None where it passed or was not asked for."""
    started, say = time.perf_counter(), options.say
    front = _front(source, options, known)
    cfg, model = front.cfg, front.model.graph
    schedules = ""

    def made(plan: LaunchLayers, planner: Planner) -> Image:
        nonlocal schedules
        image, schedules = _decided(Network(cfg, *plan, planner), options, known)
        return image

    lowered = _lowered(front, options, made)
    image = lowered.image
    say("verifying instructions")
    runs = [
        Run(image.code(launch), layers, launch.layer_of, packed, taken)
        for launch, layers, packed, taken in zip(image.launches, *lowered.plan, strict=True)
    ]
    verify_provenance(cfg, runs, image.addresses, image.constants_address, image.constants, image.size)
    say("kernels for the CPU")
    try:
        program = Assembler(model, cfg, lowered.selection, lowered.steps, image).run()
    except HostError as error:
        raise ModelError(str(error)) from None
    failure: CheckFailed | None = None
    if options.check:
        say("checking")
        imported = lambda: specialise(source, options.shapes, cfg.batch, front.declared).graph  # noqa: E731
        try:
            _check(program, model, lowered, front.originals[0], imported, passes_of(options.left_out, options.rounding))
        except CheckFailed as error:
            failure = error
    outputs = front.kept.outputs
    program.outputs, program.kept = program.outputs[:outputs], program.outputs[outputs:]
    program.batched = front.model.batched
    program.macs_total = front.macs
    program.passes, program.rounding = front.passes, options.rounding
    program.schedules = "; ".join(filter(None, (schedules, *front.weighed)))
    program.compile_seconds = time.perf_counter() - started
    return program, failure


def _name(source: Source) -> str:
    return "model" if isinstance(source, onnx.ModelProto) else Path(source).stem


def _check(
    program: Program, model: ir.Model, lowered: Lowered, original: Original, again: Callable[[], ir.Model],
    passes: Pipeline,
) -> None:  # fmt: skip
    """Compare `program` with the graph that `passes` made, and that with the model. again: imports it anew.

    SelfCheckError where they differ, CheckFailed for any other error.
    """
    selection = lowered.selection
    plans = [step for step in lowered.steps if isinstance(step, LaunchPlan)]
    try:
        checked = self_check(program, plans, selection, lowered.image.addresses)
        units = units_of(program, model.graph, selection, checked.computed)
        check_rewriting(original, units, program.constants, checked.held)
    except RewriteError:  # and which pass was it?
        with suppress(CheckFailed):
            passes.run(again(), lambda name, model: check_pass(original, name, model))
        raise
    except (SelfCheckError, CheckFailed, MemoryError):
        raise
    except Exception as error:
        raise CheckFailed(error) from error


def _after(stage: str, take: Callable[[ir.Model], None], watch: Watch | None) -> Watch:
    """`watch`, after `take` of the graph as it is after that pass, or "import"."""

    def both(name: str, model: ir.Model) -> None:
        if name == stage:
            take(model)
        if watch is not None:
            watch(name, model)

    return both


__all__ = ["ModelError", "compile", "network_of", "price"]
