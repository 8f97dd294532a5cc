"""The compiler on one page: compile an ONNX model to a Program, stage by stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import onnx

from celosia.compiler.cpu.llvm import link_library
from celosia.compiler.cpu.schedule.kernel_schedules import KernelSchedules, using_schedules
from celosia.compiler.frontend import PreparedModel, import_again, naming_shapes, prepare
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importer import with_inputs_set
from celosia.compiler.launch.assemble import assemble
from celosia.compiler.lowering import Lowered, lower_prepared, planner_for
from celosia.compiler.options import Options, Source, expand_options
from celosia.compiler.program import HostStep, Program, with_inner_steps
from celosia.compiler.program.dtypes import numpy_dtype
from celosia.compiler.program.host.execute import needs_compiler
from celosia.compiler.selfcheck.check_launches import CheckFailed, SelfCheckError, self_check
from celosia.compiler.selfcheck.check_rewriting import RewriteError, check_pass, check_rewriting, units_of
from celosia.compiler.switches import leaving_out
from celosia.compiler.target import Target, compiling_for, find_target
from celosia.compiler.tune.network import Network
from celosia.compiler.tune.records import Records, load_requested
from celosia.compiler.vthread.verify import Run, verify_provenance
from celosia.garbage import raised_gc_threshold


@expand_options(Options)
def compile(source: Source, options: Options) -> Program:
    """Compile an ONNX model to a Program for an accelerator.

    The accelerator runs the operators that it supports; kernels for the CPU run the others. `celosia.Runtime` runs the
    Program.

    Args:
        source: The model: its path, or its contents as an onnx.ModelProto.
        config: The accelerator: the name of a preset, the path of a TOML or JSON file, or a Config.
        progress: Function that is called with the name of each stage. None: no function is called.
        accelerator: False leaves every operator to the CPU.
        watch: Function that is called with the name and the graph after each pass. None: no function is called.
        target: Processor for which kernels are compiled and linked: a board, its .toml file, or a processor of
            compiler/target.py. None: this machine. Kernels for a Target itself stay objects.
        check: Compare the Program with the model on random inputs, layer by layer (compiler/selfcheck).
        decisions: Tilings of some layers, as a file or its contents (compiler/tensorize/plan.py). None: no
            tiling is fixed.
        shapes: Shapes of inputs by name, if the model leaves sizes open: `{"input": (1, 80, 400)}`. A size of None or
            -1 stays open, if compiler/graph/importer.py supports it. None: no shape is fixed.
        keep: Names of tensors inside the model, or "all". A run returns them in `Result.tensors`. They are written to
            memory, so layers are not joined across them: outputs stay the same, cycles do not. By default none.
        caches: Names of inputs [..., rows, columns] of which few rows differ from run to run. The accelerator's memory
            keeps the other rows (`ProgramRuntime.run_on`). By default none.
        records: File of measurements by `celosia tune`, to which those for the presets are added. They schedule layers
            and kernels of this CPU, if the whole model then takes fewer cycles. The Program's `schedules` says what
            they did. "shipped": only those for the presets. "none" or None: the compiler uses its own estimates.
        tuned: Tilings by workload, as a search tries them on `network_of`. They have priority over records. None: there
            are none.
        optimise: Time of a search for a model that computes the same bytes in fewer cycles, as "60s" or in seconds
            (compiler/superoptimise). The search runs before the compilation. None: no search, except with `fast_math`.
        fast_math: The search of `optimise` treats floats as real numbers.
        place: Where operators run, by name: `{"conv1": "cpu"}`. The place "accelerator" is an error if the operator
            cannot run there. `{"*": "cpu"}` places all others. `{"*": "cost"}` moves launches to the CPU that are
            slower than CPU kernels, `{"*": "accelerator"}` none; by default launches without products, and softmax and
            normalisations in engines, are compared with the CPU (compiler/lowering.py).
        oracle: Function that opens a model in the runtime with which `optimise` compares. None: `celosia.compile`
            passes onnxruntime.
        without: Names of passes and parts to leave out, to see what each gains (compiler/graph/pipeline.py,
            compiler/switches.py). The bytes stay the same, unless a pass of the import is left out.
        rounding: "onnxruntime" computes normalisations, sums and averages between bytes as onnxruntime's floats, byte
            for byte. "correct" computes them, and products of bytes that onnxruntime computes in floats, in integers
            that round the real result (compiler/graph/quantized/rounded.py and exact_products.py). Single operators
            that normalise rows become one operator, which is rounded once (written_norms.py). "bytes" also rounds float
            tensors between quantised ones to bytes, so that their operators become integer operators, too (between.py).
        set: Values of inputs by name, as `{"sr": 16000}`: these inputs become constants, so that Ifs on them become one
            of their branches, and shapes become static. None: all inputs stay inputs.

    Returns:
        The Program, which `celosia.Runtime` runs and `Program.save` writes to a file.

    Raises:
        ModelError: The model is invalid, or the compiler does not support it.
        ConfigError: The Config is invalid, or there is none of that name.
        DecisionsError: A layer cannot follow its tiling in `decisions`.
        RecordsError: The file of records cannot be read.
        TargetError: There is no such target.
        BoardError: The board's file is invalid.
        LinkError: The linker for another processor is missing.
        BudgetError: The time in `optimise` is invalid.
        MissingLibrary: onnxruntime is not installed, and `optimise` needs it.
        OracleError: onnxruntime does not run the model.
        SelfCheckError: The check has detected a fault of Celosia.
        CheckFailed: The check itself ended in an error. The exception holds the Program.

    Examples:
        >>> import celosia
        >>> program = celosia.compile(celosia.models.demo_model_path(), config="tiny")
        >>> program.macs_accelerator == program.macs_total
        True
    """
    started = time.perf_counter()
    processor = find_target(options.target) if isinstance(options.target, str) else options.target
    records = load_requested(options.records)
    model, derivation = _optimise(with_inputs_set(source, options.set), options)
    with (
        compiling_for(processor), naming_shapes(options.shapes), raised_gc_threshold(), leaving_out(options.left_out),
        _using_recorded_kernels(records, processor) as kernels,
    ):  # fmt: skip
        prepared = prepare(model, options)
        lowered = lower_prepared(prepared, planner_for(prepared, options, records), options, records)
        options.say("verifying instructions")
        _verify(prepared, lowered)
        options.say("kernels for the CPU")
        program = assemble(prepared.graph, prepared.cfg, lowered.partition, lowered.steps, lowered.image)
        failure = None
        if options.check:
            options.say("checking")
            failure = _check(program, prepared, lowered, model, options)
    if kernel_records := str(kernels):
        options.say(kernel_records)
    _add_model_facts(program, prepared, source, options, processor)
    program.schedules, program.derivation = "; ".join(filter(None, (lowered.notes, kernel_records))), derivation
    program.compile_seconds = time.perf_counter() - started
    if failure is not None:
        failure.program = program
        raise failure
    return program


@expand_options(Options)
def network_of(source: Source, options: Options) -> Network:
    """Return the layers that `compile` puts on the accelerator under the same options, for a search of schedules.

    Raises what `compile` does; nothing is checked.
    """
    options = replace(options, check=False)
    with naming_shapes(options.shapes), raised_gc_threshold():
        prepared = prepare(with_inputs_set(source, options.set), options)
        return lower_prepared(
            prepared, planner_for(prepared, options, load_requested(options.records)), options
        ).network


def _optimise(source: Source, options: Options) -> tuple[Source, str]:
    """Search for an equal model that takes less time, if the options ask for it.

    Returns the model, and a text on how it was derived; `source` and "" without a search.
    """
    if options.optimise is None and not options.fast_math:
        return source, ""
    from celosia.compiler.pricing import optimise_source  # so that other compilations do not import the search

    return optimise_source(source, options, compile)


@contextmanager
def _using_recorded_kernels(records: Records | None, processor: Target | None) -> Iterator[KernelSchedules | str]:
    """Schedule CPU kernels inside the context as records say, if they were measured on this processor.

    Yields an object whose text is a sentence on what the records did; "" without such records.
    """
    if not (records and records.trials and processor is None):
        yield ""
        return
    from celosia.compiler.tune.kernel_tuner import recorded_traces  # imported only where there are such records

    schedules = KernelSchedules(recorded_traces(records))
    with using_schedules(schedules):
        yield schedules


def _verify(prepared: PreparedModel, lowered: Lowered) -> None:
    """Prove that the instructions compute the layers. Raises VerifyError or ProvenanceError if they do not."""
    image, network = lowered.image, lowered.network
    runs = [
        Run(image.code(launch), layers, launch.layer_of, packed, unpacked)
        for launch, layers, packed, unpacked in zip(
            image.launches, network.launches, network.written, network.read, strict=True
        )
    ]
    verify_provenance(prepared.cfg, runs, image.addresses, image.constants_address, image.constants, image.size)


def _check(
    program: Program, prepared: PreparedModel, lowered: Lowered, source: Source, options: Options
) -> CheckFailed | None:
    """Compare a Program with the graph that it was made from, and that graph with the imported model.

    If the graph is wrong, the model is imported once more, and the passes run again on that, to name the wrong one.

    Raises SelfCheckError if two of them differ. Returns CheckFailed if the check itself ends in an error, which says
    nothing about the Program; None if all is equal.
    """
    assert prepared.original is not None
    graph, original = prepared.graph.graph, prepared.original
    try:
        checked = self_check(program, lowered.launches, lowered.partition, lowered.image.addresses)
        units = units_of(program, graph, lowered.partition, checked.computed)
        check_rewriting(original, units, program.constants, checked.held)
    except RewriteError:
        with suppress(CheckFailed):
            imported = import_again(source, options, prepared)
            prepared.pipeline.run(imported, lambda name, model: check_pass(original, name, model))
        raise
    except (SelfCheckError, MemoryError):
        raise
    except CheckFailed as error:
        return error
    except Exception as error:
        failure = CheckFailed(error)
        failure.__cause__ = error
        return failure
    return None


def _add_model_facts(
    program: Program, prepared: PreparedModel, source: Source, options: Options, processor: Target | None
) -> None:
    """Add the facts about the whole model to an assembled Program, and link its kernels for another machine."""
    program.name = "model" if isinstance(source, onnx.ModelProto) else Path(source).stem
    program.outputs, program.kept = program.outputs[: prepared.outputs], program.outputs[prepared.outputs :]
    program.batched, program.macs_total = prepared.batched, prepared.macs
    program.passes, program.rounding = prepared.infos, options.rounding
    if processor is None:
        return
    program.machine = processor.machine
    if isinstance(options.target, str):
        options.say("linking kernels")
        _require_numpy(program)
        program.library = link_library(program.kernels, processor) if program.kernels else b""
        program.kernels = [replace(kernel, code=b"") for kernel in program.kernels]


def _require_numpy(program: Program) -> None:
    """Raise ModelError where a board, which has numpy and no compiler, cannot run `program`."""
    for step in with_inner_steps(program.steps):
        if isinstance(step, HostStep) and (reason := needs_compiler(step.op)):
            raise ModelError(f"{reason}; run the model on this machine, without --target")
    for tensor in (*program.tensors.values(), *program.inputs, *program.outputs):
        if numpy_dtype(tensor.dtype).isbuiltin == 2:
            raise ModelError(
                f"tensor {tensor.name!r} has element type {tensor.dtype}, which numpy on the board does not know; "
                "run the model on this machine, without --target"
            )


__all__ = ["ModelError", "compile", "network_of"]
