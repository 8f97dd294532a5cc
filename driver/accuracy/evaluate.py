"""Evaluate a model on a data set: accuracy, speed, and agreement with onnxruntime."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from celosia.compiler.compile import compile as compile_model
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importer import read
from celosia.compiler.graph.importing.dimensions import inputs_of, resized
from celosia.compiler.program import InputError, Program, TensorInfo
from celosia.compiler.program.host.thread_team import processors
from celosia.driver.accuracy.compare import largest_difference
from celosia.driver.data.calibration import Input, Sample, Samples
from celosia.driver.data.dataset import Dataset, open_dataset
from celosia.driver.data.images import IN_UNITS, Pixels
from celosia.driver.run.stream import SAMPLE_ERRORS
from celosia.driver.runtime import Runtime
from celosia.driver.workstation import oracle
from celosia.driver.workstation.tools import require_tools
from celosia.hw.spec.config import Config, ConfigError

Array = NDArray[Any]
TOP = 5
"""A label counts for `top5` if its class is among so many with the highest scores."""
WITHOUT_CYCLES = "functional"
"""Default device. It reports no cycles, so samples may run in batches on an accelerator with a larger batch."""
BATCH = 16
"""Samples that run at a time on the functional device: the largest `batch` of a Config."""
Count = Callable[[int, int], None]
"""Progress callback: called with the number of samples done and the number of all."""


class Evaluation(dict[str, Any]):
    """Result of `evaluate`, as plain data with a short display."""

    def __repr__(self) -> str:
        return f"<Evaluation of {self['samples']:,} samples of {self['model']}; keys: {', '.join(self)}>"


def evaluate(
    model: str | Path, data: str | Path | Mapping[str, Array], labels: str | Path | Array | None = None, *,
    config: str | Path | Config | None = None, device: str = WITHOUT_CYCLES, against: bool = False,
    samples: int | None = None, pixels: Pixels = IN_UNITS, workers: int | None = None, check: bool = True,
    progress: Callable[[str], None] | None = None, count: Count | None = None, **options: Any,
) -> Evaluation:  # fmt: skip
    """Run an ONNX model, or a Program, on every sample of a data set.

    Samples are read while devices run. On the functional device a model of batch 1 runs as one of a larger batch, on
    the accelerator of that batch. Its first batch must give the bytes of the model as it is, or else the larger batch
    is not used.

    Samples that cannot be read, or fail in the run, are left out. If all fail, the first error is raised.

    Args:
        model: Path of an ONNX model or of a saved Program.
        data: Samples: a folder, an .npz file, or arrays by input name with samples along the first axis (see
            `dataset.open_dataset`).
        labels: One class number for each sample, as an array, a .npy or .npz file, or a text (see
            `dataset.open_dataset`). None: those in `data`, if it has any.
        config: Accelerator, as `celosia.compile` takes it. None: "pynq" for a model, and its own Config for a Program.
        device: Name of the devices that run the samples, as `Runtime` takes it.
        against: Also run the model under onnxruntime (with numerics.INT8).
        samples: Largest number of samples that run, spread evenly over all. None: all of them.
        pixels: How images become inputs, as (pixel / 255 - mean) / std. By default pixels become 0..1.
        workers: Number of devices that run at a time. None: one for each processor that may be used on "rtl", else one,
            as numpy holds the interpreter.
        check: Compare the Program with the model, as `celosia.compile` does.
        progress: Function that is called with the name of each stage. None: no function is called.
        count: Function that is called with the number of samples done and of all samples. None: no function is called.
        **options: Keyword arguments of the devices.

    Returns:
        An Evaluation, a dictionary of plain data with these keys:

            - `model`: path
            - `config`: fields of the Config
            - `device`: name of the devices
            - `samples`: number of samples that ran
            - `failed`: the error message of each other sample
            - `batch`: number of samples that ran at a time
            - `workers`: number of devices that ran at a time
            - `seconds`: time of the run, in seconds
            - `compile_seconds`: time of the compilation, in seconds
            - `images_per_second`: samples a second, without compiling
            - `cycles`: mean clock cycles of an image; None on a device without a clock
            - `top1`, `top5`: shares of samples, 0 to 1, with the label among the best one, or five, classes. None
              without labels, or for an output that is not [batch, classes]. `top5` is also None for five classes or
              fewer
            - `against`: None, or the dictionary below

            The dictionary `against`:

            - `onnxruntime`: its version
            - `top1`, `top5` and `images_per_second` of onnxruntime
            - `differ`: number of samples with an output that differs, as `compare` counts it
            - `bytes`: number of bytes of all outputs
            - `bytes_different`: number of these that differ
            - `top1_agreement`: share of samples with the same best class, 0 to 1

    Raises:
        ModelError: The model is invalid, or `celosia.compile` does not support it. Its other errors are raised, too.
        ConfigError: The Config is invalid, there is none of that name, or a Program has another one.
        CalibrationError: The samples do not fit the model.
        InputError: A label is no class, or an input is no tensor.
        OracleError: onnxruntime does not run the model.
        MissingLibrary: `against` is set, and onnxruntime is not installed.
        ValueError: There is no device of that name.
        DeviceError: All runs ended in an error status. The other errors of `Runtime` are raised, too.

    Examples:
        >>> import celosia
        >>> images, labels, _ = celosia.models.demo_images()
        >>> report = evaluate(celosia.models.demo_model_path(), {"image": images}, labels, samples=20, config="tiny")
        >>> report["samples"], report["top1"] > 0.8
        (20, True)
    """
    say = progress or (lambda stage: None)
    for name in device.split(","):
        require_tools(name.strip(), model)
    program = _load_program(model, against)
    model_inputs = program.inputs if program is not None else inputs_of(read(Path(model), data=False))
    dataset = open_dataset(data, _dataset_inputs(model_inputs), labels, samples, pixels)
    if program is not None:
        _require_config(model, program, config)
        engine = _Engine(program, 1)
    else:
        proto = _fix_open_sizes(read(Path(model)), model_inputs, dataset.samples)
        program = compile_model(proto, config or "pynq", progress=progress, check=check)
        program.name = Path(model).stem
        batched = _compile_for_batches(proto, program, dataset.samples, say) if device == WITHOUT_CYCLES else None
        engine = batched or _Engine(program, 1)
    session = oracle.open_session(Path(model)) if against else None
    say(f"running {len(dataset.samples)} samples on the {device} device")
    run = _run_samples([engine, _Engine(program, 1)], dataset.samples, device, workers, count, options)
    dataset = _drop_failed_samples(dataset, run.failed)
    report = {
        "model": str(model), "config": program.config.to_dict(), "device": device, "samples": len(dataset.samples),
        "failed": [str(error) for error in run.failed.values()], "batch": run.batch, "workers": run.workers,
        "seconds": run.seconds, "images_per_second": len(dataset.samples) / run.seconds, "cycles": run.cycles,
        "compile_seconds": program.compile_seconds, **_top_accuracies(run.outputs, dataset.labels), "against": None,
    }  # fmt: skip
    if session is not None:
        say("running under onnxruntime")
        report["against"] = _compare_with_onnxruntime(session, dataset, run.outputs)
    return Evaluation(report)


def _load_program(model: str | Path, against: bool) -> Program | None:
    """Load the Program in the file `model`; None where that is an ONNX model.

    against: the samples will run under onnxruntime, too, which needs an ONNX model: ModelError for a Program.
    """
    if against:
        oracle.require_onnxruntime()
    if not (Path(model).is_file() and Program.is_program(model)):
        return None
    if against:
        raise ModelError(f"{model} is a Program; give the ONNX model to compare it with onnxruntime")
    return Program.load(model)


def _require_config(model: str | Path, program: Program, config: str | Path | Config | None) -> None:
    """Raise ConfigError where the user's `config` is not the one that `program` was compiled for."""
    if config is not None and Config.load(config).digest != program.config.digest:
        raise ConfigError(f"{model} was compiled for Config {program.config.name}; leave --config out")


def _dataset_inputs(tensors: Sequence[TensorInfo]) -> list[Input]:
    """Convert a Program's inputs to those of samples. InputError for other kinds than tensors."""
    for tensor in tensors:
        if tensor.kind != "tensor":
            raise InputError(f"input {tensor.name!r} is a {tensor.kind} of tensors, of which there are no samples")
    return [
        Input(tensor.name, np.dtype(tensor.dtype), tuple(None if size < 0 else size for size in tensor.shape))
        for tensor in tensors
    ]


def _drop_failed_samples(dataset: Dataset, failed: Mapping[int, Exception]) -> Dataset:
    """Drop failed samples; raise the first error where none is left."""
    evaluated = [number for number in range(len(dataset.samples)) if number not in failed]
    if not evaluated:
        raise failed[0]
    return Dataset(dataset.samples.pick(evaluated), None if dataset.labels is None else dataset.labels[evaluated])


def _fix_open_sizes(proto: onnx.ModelProto, inputs: Sequence[TensorInfo], samples: Samples) -> onnx.ModelProto:
    """Return `proto` with the samples' sizes where it leaves some open.

    A Program is compiled for sizes that are known, and all samples have those of the first one.
    """
    if all(min(tensor.shape, default=0) >= 0 for tensor in inputs):
        return proto
    # `samples.inputs` has no open size: `or 0` is there for the type checker only.
    return resized(proto, {tensor.name: [size or 0 for size in tensor.shape] for tensor in samples.inputs})


# Running --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Engine:
    """A Program, and the number of samples that one run of it takes: its batch axis has this size."""

    program: Program
    batch: int

    def join_samples(self, samples: Sequence[Sample]) -> Sample:
        """Join samples to one batch, the last repeated where there are too few."""
        if self.batch == 1:
            return dict(samples[0])
        filled = [*samples, *[samples[-1]] * (self.batch - len(samples))]
        return {name: np.concatenate([sample[name] for sample in filled]) for name in samples[0]}

    def split_batch(self, outputs: Mapping[str, Array], count: int) -> list[dict[str, Array]]:
        """Split the outputs of a run into those of its first `count` samples."""
        if self.batch == 1:
            return [dict(outputs)]
        return [{name: array[k : k + 1] for name, array in outputs.items()} for k in range(count)]


@dataclass(frozen=True)
class _Run:
    """Results of running all samples.

    outputs: of the samples that ran, in order. failed: the errors of the others, by number of the sample. batch,
    workers: samples and devices that ran at a time. cycles: mean of a sample; None on a device that counts none.
    """

    outputs: list[dict[str, Array]]
    failed: dict[int, Exception]
    batch: int
    workers: int
    seconds: float
    cycles: float | None


def _compile_for_batches(
    proto: onnx.ModelProto, single: Program, samples: Samples, say: Callable[[str], None]
) -> _Engine | None:
    """Compile the model for BATCH samples at a time, which simulates faster than one by one.

    None where the model has no batch axis of 1, cannot be compiled so, there are fewer samples, or the first batch does
    not give the bytes that `single`, the Program for one sample, gives.
    """
    tensors = (*single.inputs, *single.outputs)
    if len(samples) < BATCH or any(tensor.kind != "tensor" or tensor.shape[:1] != (1,) for tensor in tensors):
        return None
    say(f"compiling for batches of {BATCH}")
    shapes = {tensor.name: (BATCH, *tensor.shape[1:]) for tensor in single.inputs}
    try:
        batched_program = compile_model(resized(proto, shapes), replace(single.config, batch=BATCH), check=False)
    except (ModelError, ConfigError):
        return None
    if any(
        batched.shape != (BATCH, *unbatched.shape[1:])
        for batched, unbatched in zip(batched_program.outputs, single.outputs)
    ):
        return None
    engine, single_runtime = _Engine(batched_program, BATCH), Runtime(single)
    try:
        first = list(samples.pick(range(BATCH)))
        batched_outputs = engine.split_batch(
            Runtime(batched_program).run(engine.join_samples(first), trace=False).outputs, BATCH
        )
        single_outputs = [single_runtime.run(sample, trace=False).outputs for sample in first]
    except SAMPLE_ERRORS:
        return None
    equal = all(a[name].tobytes() == b[name].tobytes() for a, b in zip(single_outputs, batched_outputs) for name in a)
    return engine if equal else None


def _run_samples(
    engines: Sequence[_Engine], samples: Samples, device: str, workers: int | None,
    count: Count | None, options: dict[str, Any],
) -> _Run:  # fmt: skip
    """Run all samples with the first of `engines`; if one fails, run all again with the next.

    The last engine takes samples one by one, so that one bad sample does not lose a whole batch. workers: devices at a
    time; None for the default (see `evaluate`).
    """
    worker_limit = workers or (processors() if device == "rtl" else 1)
    for engine in engines:
        run = _run_engine(engine, samples, device, worker_limit, count or (lambda done, total: None), options)
        if not run.failed or engine.batch == 1:
            break
    return run


def _run_engine(
    engine: _Engine, samples: Samples, device: str, worker_limit: int, count: Count, options: dict[str, Any]
) -> _Run:  # fmt: skip
    """Run samples with `engine` on at most `worker_limit` devices, one thread each; this thread reads samples in order.

    options: of the Runtime.
    """
    outputs: list[dict[str, Array]] = []
    failed: dict[int, Exception] = {}
    cycles: list[int] = []
    pending_sizes: deque[int] = deque()  # samples of each batch that has been read and has no result yet

    def read_batches() -> Iterator[Sample | InputError]:
        """Yield joined batches; in place of a batch with an unreadable sample, that sample's error."""
        for group in _group_samples(samples, engine.batch):
            pending_sizes.append(len(group))
            errors = [sample for sample in group if isinstance(sample, InputError)]
            readable = [sample for sample in group if not isinstance(sample, InputError)]
            yield errors[0] if errors else engine.join_samples(readable)

    workers = min(worker_limit, -(-len(samples) // engine.batch))
    devices = ",".join([device] * workers)
    with Runtime(engine.program, devices, threads=1 if workers > 1 else None, **options) as runtime:
        runtime.open()
        started = time.perf_counter()
        with closing(runtime.run_each(read_batches(), trace=False)) as results:
            while (done_count := len(outputs) + len(failed)) < len(samples):
                try:
                    result = next(results)
                except SAMPLE_ERRORS as error:
                    failed |= dict.fromkeys(range(done_count, done_count + pending_sizes.popleft()), error)
                else:
                    outputs += engine.split_batch(result.outputs, pending_sizes.popleft())
                    cycles += [counters.cycles for counters in result.counters if counters.cycles is not None]
                count(len(outputs) + len(failed), len(samples))
        seconds = time.perf_counter() - started
    return _Run(outputs, failed, engine.batch, workers, seconds, sum(cycles) / len(outputs) if cycles else None)


def _group_samples(samples: Samples, size: int) -> Iterator[list[Sample | InputError]]:
    """Yield groups of `size` samples, the last one shorter; an unreadable sample is its error."""
    group: list[Sample | InputError] = []
    for sample in samples.read_or_errors():
        group.append(sample)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


# Scoring --------------------------------------------------------------------------------------------------------


def _class_scores(outputs: Sequence[Mapping[str, Array]]) -> Array | None:
    """Return the first output of all samples as one array [samples, classes].

    None where an output is not [1, classes] or [1, classes, 1, ...]: the model is no classifier.
    """
    first = [next(iter(sample.values())) for sample in outputs]
    shape = first[0].shape
    if len(shape) < 2 or shape[0] != 1 or shape[1] < 2 or any(n != 1 for n in shape[2:]):
        return None
    return np.stack([array.reshape(-1) for array in first])


def _top_accuracies(
    outputs: Sequence[Mapping[str, Array]], labels: NDArray[np.int64] | None
) -> dict[str, float | None]:
    """Return `top1` and `top5`: shares of samples whose label has the highest score, or one of the five highest.

    Of equal scores the first class counts as higher. None without labels, or where the model is no classifier. `top5`
    is None for five classes or fewer. InputError where a label is no class.
    """
    scores = _class_scores(outputs)
    if scores is None or labels is None:
        return {"top1": None, "top5": None}
    classes = scores.shape[1]
    if labels.max() >= classes or labels.min() < 0:
        first_invalid = int(np.flatnonzero((labels >= classes) | (labels < 0))[0])
        raise InputError(
            f"sample {first_invalid} has the label {labels[first_invalid]}, and the model has {classes} classes"
        )
    is_label_at_rank = np.argsort(-scores.astype(np.float64), axis=1, kind="stable") == labels[:, None]
    top5 = float(is_label_at_rank[:, :TOP].any(1).mean()) if classes > TOP else None
    return {"top1": float(is_label_at_rank[:, 0].mean()), "top5": top5}


def _compare_with_onnxruntime(
    session: Any, dataset: Dataset, computed: Sequence[Mapping[str, Array]]
) -> dict[str, Any]:
    """Run the samples in an onnxruntime session; return `against` of the report (see `evaluate`).

    computed: outputs of the Program for each sample. Reading samples does not count as onnxruntime's time.
    """
    expected, seconds = [], 0.0
    for sample in dataset.samples:
        started = time.perf_counter()
        expected.append(oracle.run_session(session, sample))
        seconds += time.perf_counter() - started
    pairs = [(a[name], b[name]) for a, b in zip(computed, expected) for name in b]
    computed_scores, expected_scores = _class_scores(computed), _class_scores(expected)
    differ = [any(_is_different(a[name], b[name]) for name in b) for a, b in zip(computed, expected)]
    agreement = None
    if computed_scores is not None and expected_scores is not None:
        agreement = float(np.mean(computed_scores.argmax(1) == expected_scores.argmax(1)))
    return {
        "onnxruntime": oracle.version(), **_top_accuracies(expected, dataset.labels), "differ": sum(differ),
        "bytes": sum(b.nbytes for _, b in pairs), "bytes_different": sum(_count_different_bytes(a, b) for a, b in
        pairs), "top1_agreement": agreement, "images_per_second": len(expected) / seconds,
    }  # fmt: skip


def _is_different(computed: Array, expected: Array) -> bool:
    """Whether two outputs differ by more than `compare` tolerates."""
    return computed.shape != expected.shape or (
        computed.tobytes() != expected.tobytes() and largest_difference(computed, expected)[1]
    )


def _count_different_bytes(computed: Array, expected: Array) -> int:
    """Count the bytes in which two outputs differ; of outputs of different sizes, all bytes of the larger one."""
    if computed.nbytes != expected.nbytes:
        return max(computed.nbytes, expected.nbytes)
    raw = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (computed, expected))
    return int(np.count_nonzero(np.not_equal(*raw)))
