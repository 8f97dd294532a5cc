"""Quantise a float ONNX model to 8-bit integers, through onnxruntime.quantization, and measure the loss of accuracy."""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importer import read
from celosia.compiler.graph.importing.dimensions import is_quantised, resized
from celosia.compiler.graph.importing.normalise import for_checker, normalise_model, restore_onnxruntime_domains
from celosia.compiler.graph.importing.set_inputs import InputValues, set_inputs
from celosia.compiler.graph.importing.validation import validation_error
from celosia.compiler.graph.quantized.integerise import PER_CHANNEL_OPSET
from celosia.compiler.program import InputError
from celosia.compiler.program.safe_files import OutputError, check_writable, replacing
from celosia.driver.choices import ACTIVATIONS, METHODS, OPERATORS, WEIGHTS, parse_alpha
from celosia.driver.data.calibration import Input, Samples, open_samples
from celosia.driver.data.images import Pixels
from celosia.driver.generate.cached_attention import decompose_cached_attention
from celosia.driver.quantize import accuracy_report as reporting
from celosia.driver.quantize.attention_scales import (
    bound_masks,
    find_attention_scores,
    measure_score_ranges,
    operators_between_products,
    restore_float_constants,
)
from celosia.driver.quantize.decoders import (
    complete_decoder_samples,
    is_decoder,
    isolate_quantised_products,
    quantised_products,
    separate_residual_sums,
)
from celosia.driver.quantize.four_bits import quantise_to_four_bits
from celosia.driver.quantize.score_masks import replace_masks_by_sums
from celosia.driver.quantize.smooth import is_smoothable
from celosia.driver.quantize.smooth import smooth as smooth_floats
from celosia.driver.quantize.supported_forms import (
    convolve_channels,
    normalise_gemm_biases,
    pool_pixels,
    project_inputs,
    separate_differences,
    separate_shared_biases,
    separate_sums,
)
from celosia.driver.workstation.oracle import MissingLibrary, OracleError, add_types, open_session
from celosia.hw.spec.config import Config, did_you_mean
from celosia.plain import Sentence

Array = NDArray[Any]
ENOUGH_TO_HOLD_OUT = 20
"""Samples from which on some are held out of the calibration and used for measuring only."""
HELD_OUT_INTERVAL = 5
"""One sample of so many is held out."""
MAX_BYTES = 2**31 - 2**20
"""Largest size of a protobuf."""


class QuantizeError(Sentence, ValueError):
    """A model that cannot be quantised. The message is one sentence with the reason."""


@dataclass(frozen=True)
class QuantizerChoices:
    """Settings of the quantiser, as `quantize` describes them, and whether the model is a decoder.

    ValueError for unknown names and impossible combinations.
    """

    per_channel: bool
    activations: str
    method: str
    operators: str
    exclude: tuple[str, ...]
    weights: int = WEIGHTS[0]
    smooth: float | str | None = None
    symmetric: bool = False
    recurrent: bool = False
    decoder: bool = False

    @property
    def centred(self) -> bool:
        """Whether activations get no zero point: the range of their values is symmetric to 0.

        This holds if the user asks for it (`symmetric`), or if only operators of one kind (`operator_kind`) are
        quantised, with int8. These may be products of two activations, which take three times as long if both have a
        zero point (docs/attention.md).
        """
        return self.symmetric or (bool(self.operator_kind) and self.activations == ACTIVATIONS[0])

    @property
    def operator_kind(self) -> str:
        """The kind of operators that the quantiser gets by name: "products", "rotary", "attention" or "decoder".

        Each includes those before it. "" where the quantiser quantises all operators that it can.
        """
        if self.operators != "all":
            return self.operators
        return "decoder" if self.decoder else ""

    def __post_init__(self) -> None:
        if self.activations not in ACTIVATIONS:
            raise ValueError(f"activations are {' or '.join(ACTIVATIONS)}, not {self.activations!r}")
        if self.method not in METHODS:
            raise ValueError(f"the method is {', '.join(METHODS)}, not {self.method!r}")
        if self.operators not in OPERATORS:
            raise ValueError(f"operators are {', '.join(OPERATORS[:-1])} or {OPERATORS[-1]}, not {self.operators!r}")
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights have {' or '.join(map(str, WEIGHTS))} bits, not {self.weights!r}")
        if self.weights < WEIGHTS[0] and not self.per_channel:
            raise ValueError(
                f"weights of {self.weights} bits have a scale for each output channel; leave --per-tensor out"
            )
        if self.symmetric and self.activations != ACTIVATIONS[0]:
            raise ValueError(f"symmetric activations are {ACTIVATIONS[0]}, not {self.activations}")
        if self.smooth is not None:
            parse_alpha(self.smooth)


def quantize(
    model: str | Path, calibration: str | Path | Mapping[str, Array], output: str | Path, *, per_channel: bool = True,
    weights: int = WEIGHTS[0], activations: str = "int8", symmetric: bool = False, method: str = "minmax",
    operators: str | None = None, recurrent: bool = False, smooth: float | str | None = None,
    samples: int | None = None,
    exclude: Sequence[str] = (), mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,),
    config: str | Path | Config = "pynq", set: InputValues | None = None,
    progress: Callable[[str], None] | None = None,
    told: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Any]:  # fmt: skip
    """Quantise a float model to int8 weights and 8-bit activations, and write it to a file.

    The quantised model has pairs of QuantizeLinear and DequantizeLinear (QDQ). Open sizes of the model become those of
    the samples, except for decoders, whose sizes stay open.

    Args:
        model: Path of the float ONNX model.
        calibration: Samples: a folder, an .npz file, or arrays by input name with samples along the first axis (see
            `calibration.open_samples`). For a decoder, some arrays may be missing (see
            `decoders.complete_decoder_samples`).
        output: Path of the quantised model to write.
        per_channel: Weights have a scale for each output channel; False: one scale for each tensor.
        weights: Bits of the weights: 8, 4, 2 or 1. 4, 2 and 1 write int8 that is so few bits times a factor for each
            group of input channels (four_bits.py).
        activations: Type of activations, "int8" or "uint8".
        symmetric: Activations have no zero point; they are then int8.
        method: How ranges come from samples: "minmax", "entropy" or "percentile".
        operators: Operators to quantise. "all": those that the quantiser supports. "products": MatMul and Gemm with
            their biases, with symmetric int8 activations. "rotary": also rotary positions. "attention": also masks and
            softmaxes. For decoders "all" is "attention" with the residual stream and norms. None: "products" for
            decoders, else "all".
        recurrent: Also quantise the products of the inputs of LSTM, GRU and RNN, as one MatMul for all steps. Their
            sums get 8 bits, which can lose some decibels.
        smooth: Alpha of smooth.py, 0 to 1, or "auto". None: no smoothing.
        samples: Largest number of samples that are used. None: all of them.
        exclude: Names of operators that stay float. By default none.
        mean: Mean of images for each channel, or one for all, for pixels in 0..1.
        std: Standard deviation of images for each channel, or one for all, for pixels in 0..1.
        config: Accelerator whose share of the work is reported, as `celosia.compile` takes it.
        set: Values of inputs that become constants of the quantised model, as `celosia.compile` takes them.
        progress: Function that is called with the name of each stage. None: no function is called.
        told: Function that is called with a sentence for each image that is resized or converted.

    Returns:
        A report, a dictionary of plain data with these keys:

            - `model`, `output`: paths
            - `weights`: bits of the weights
            - `per_channel`, `activations`, `method`: as passed
            - `samples_calibration`, `samples_measured`: numbers of samples
            - `held_out`: whether the samples for measuring were left out of the calibration
            - `outputs`: error of each output against the float model, both under onnxruntime, with the keys below
            - `outputs_with_int8_weights`: the same where weights have 8 bits
            - `outputs_with_products`: the same of products alone, where attention or all of a decoder is quantised,
              else None
            - `smooth`: `places`, and `changed`: tensor, alpha and gain in decibels; None without smoothing
            - `outputs_without_smoothing`: as `outputs`; None without smoothing
            - `four_bits`: `matrices` with weights of 4 bits or less, and their `sqnr_db`; None without such weights
            - `operators`: name and op of each operator, whether it is quantised, and the reason if not
            - `accelerator`: the accelerator's share of the multiplications
            - `losing`: where an output is poor (`accuracy_report.is_poor`), the layers that lose most, in decibels;
              else empty
            - `advice`: where an output is poor, sentences on what to try; else empty

            A row of `outputs`:

            - `name` of the output
            - `max_abs`, `mean_abs`: largest and mean absolute error
            - `largest`: largest absolute value of the float output
            - `sqnr_db`: signal-to-noise ratio in decibels; None without an error
            - `top1_agreement`: share of samples with the same best class, 0 to 1
            - `perplexity`: for a decoder's logits, that of the "float" and of the "int8" model; else None

    Raises:
        ModelError: The model is invalid.
        CalibrationError: The samples do not fit the model.
        QuantizeError: The model cannot be quantised.
        OutputError: The file cannot be written.
        ConfigError: The Config is invalid, or there is none of that name.
        ValueError: A choice is unknown, or two choices exclude each other.
        MissingLibrary: onnxruntime or a library of its quantiser is not installed.

    Examples:
        >>> x = np.random.default_rng(0).normal(size=(8, 2, 4, 4)).astype(np.float32)
        >>> text = "g (float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] y) "
        >>> text += "<float[2, 2, 1, 1] w = {1, 2, 3, -4}> {y = Conv(x, w)}"
        >>> model = onnx.parser.parse_model('<ir_version: 9, opset_import: ["" : 17]> ' + text)
        >>> folder = Path(tempfile.mkdtemp())
        >>> onnx.save(model, folder / "float.onnx")
        >>> report = quantize(folder / "float.onnx", {"x": x}, folder / "int8.onnx", config="tiny")
        >>> report["accelerator"]["macs_accelerator"], report["outputs"][0]["sqnr_db"] > 30
        (64, True)
    """
    say, cfg = progress or (lambda stage: None), Config.load(config)
    operator_kinds = operators or OPERATORS[0]
    choices = QuantizerChoices(
        per_channel, activations, method, operator_kinds, tuple(exclude), weights, smooth, symmetric, recurrent
    )
    _check_before_work(model, output)
    say("reading the model")
    proto = set_inputs(_read_float_model(Path(model), exclude), set or {})
    inputs, pixels = _tensor_inputs(proto), Pixels(tuple(mean), tuple(std), told)
    if is_decoder(inputs):
        choices = replace(choices, operators=operators or "products", decoder=True)
    chosen_samples = open_samples(
        calibration, inputs, samples, pixels, complete_decoder_samples if choices.decoder else None
    )
    proto = (
        _split_fused_operators(proto, operators) if choices.decoder else _fix_open_sizes(proto, chosen_samples.inputs)
    )
    quantised, report = _quantise_and_report(proto, chosen_samples, choices, say)
    if not any(row["quantised"] for row in report["operators"]):
        raise QuantizeError(f"{model} has no operator that onnxruntime's quantiser can quantise; nothing is written")
    say(f"compiling for {cfg.name}")
    share = reporting.accelerator_share(quantised, cfg, chosen_samples.inputs if choices.decoder else ())
    with replacing(output) as temporary:
        onnx.save(quantised, temporary)
    return {"model": str(model), "output": str(output), **report, "accelerator": share}


def _quantise_and_report(
    float_model: onnx.ModelProto, samples: Samples, choices: QuantizerChoices, say: Callable[[str], None]
) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """Return the quantised model, and the report without the accelerator's share.

    The model is quantised several times, where the report compares: without smoothing, and products only.
    """
    (calibration_samples, measured_samples), decoder = _split_samples(samples), choices.decoder
    with tempfile.TemporaryDirectory() as scratch, _silence_quantiser():
        say("preparing the model")
        separate = separate_sums(float_model, choices.exclude)
        prepared, result = _prepare_model(separate, Path(scratch), choices), Path(scratch) / "int8.onnx"
        outputs_with_products = outputs_without_smoothing = smooth_report = None
        if choices.smooth is not None:
            say("quantising without smoothing, to compare")
            unsmoothed = Path(scratch) / "rough.onnx"
            shutil.copy(prepared, unsmoothed)  # the quantiser changes masks in the file that it reads
            _run_quantiser(unsmoothed, result, calibration_samples, choices)
            outputs_without_smoothing = _measure_output_errors(
                float_model, onnx.load(result), measured_samples, decoder
            )
            say("smoothing")
            smooth_report = _smooth_file(prepared, calibration_samples, choices)
        if choices.operator_kind not in ("", "products"):
            say("quantising products alone, to compare")
            _run_quantiser(prepared, result, calibration_samples, replace(choices, operators="products"))
            outputs_with_products = _measure_output_errors(float_model, onnx.load(result), measured_samples, decoder)
        say(f"calibrating with {len(calibration_samples)} samples")
        _run_quantiser(prepared, result, calibration_samples, choices)
        quantised = onnx.load(result)
        say(f"measuring with {len(measured_samples)} samples")
        outputs = outputs_with_int8_weights = _measure_output_errors(float_model, quantised, measured_samples, decoder)
        four_bits = None
        if choices.weights < WEIGHTS[0]:
            say(f"fitting weights of {choices.weights} bits")
            four_bits = quantise_to_four_bits(quantised, onnx.load(prepared), calibration_samples, choices.weights)
            onnx.save(quantised, result)
            outputs = _measure_output_errors(float_model, quantised, measured_samples, decoder)
        is_poor = reporting.is_poor(outputs)
        losing = reporting.find_losing_operators(prepared, result, next(iter(measured_samples))) if is_poor else []
        smoothable = is_poor and choices.smooth is None and is_smoothable(onnx.load(prepared))
    advice = (
        reporting.advise(losing, choices.per_channel, choices.method, len(calibration_samples), smoothable)
        if is_poor
        else []
    )
    return quantised, {
        "weights": choices.weights, "four_bits": four_bits, "outputs_with_int8_weights": outputs_with_int8_weights,
        "outputs_with_products": outputs_with_products, "smooth": smooth_report,
        "outputs_without_smoothing": outputs_without_smoothing,
        "per_channel": choices.per_channel, "activations": choices.activations, "method": choices.method,
        "samples_calibration": len(calibration_samples), "samples_measured": len(measured_samples),
        "held_out": calibration_samples is not measured_samples,
        "outputs": outputs, "operators": reporting.list_operators(quantised, choices.operator_kind, choices.exclude),
        "losing": losing, "advice": advice,
    }  # fmt: skip


def _measure_output_errors(
    float_model: onnx.ModelProto, quantised: onnx.ModelProto, samples: Samples, decoder: bool
) -> list[dict[str, Any]]:
    """Measure the errors of outputs as `accuracy_report.measure_outputs` does. QuantizeError."""
    try:
        return reporting.measure_outputs(float_model, quantised, samples, decoder)
    except OracleError as error:
        raise QuantizeError(str(error)) from None


def _check_before_work(model: str | Path, output: str | Path) -> None:
    """Check that libraries are installed and `output` can be written, before minutes of work.

    MissingLibrary, OutputError.
    """
    try:
        import onnxruntime.quantization.shape_inference  # noqa: F401
    except ImportError as error:
        raise MissingLibrary(
            f"to quantise, {error.name or 'onnxruntime'} is needed: pip install 'celosia[quantize]'"
        ) from None
    if Path(output).resolve() == Path(model).resolve():
        raise OutputError(f"cannot write {output}: it is the float model, too; give another name")
    check_writable(output)


@contextlib.contextmanager
def _silence_quantiser() -> Iterator[None]:
    """Silence the prints and logs of onnxruntime's quantiser."""
    disabled_level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(disabled_level)


# The model ------------------------------------------------------------------------------------------------------


def _read_float_model(path: Path, exclude: Sequence[str]) -> onnx.ModelProto:
    """Read the float model, check it, and convert it to an opset that the quantiser supports.

    exclude: names of operators; here it is only checked that the model has them. ModelError for an invalid model.
    QuantizeError for one that is too large or quantised already, lacks an operator of `exclude`, or cannot be
    converted.
    """
    proto = read(path)
    if proto.ByteSize() > MAX_BYTES:
        raise QuantizeError(f"{path} takes {proto.ByteSize():,} bytes; models of 2 GB or more cannot be quantised")
    if reason := validation_error(proto, str(path.parent)):
        raise ModelError(f"{path} is not a valid ONNX model: {reason}")
    proto = normalise_model(proto)
    try:
        onnx.checker.check_model(for_checker(proto))
    except Exception as error:  # onnx raises several unrelated classes
        raise ModelError(f"{path} is not a valid ONNX model: {_first_line(error)}") from None
    if is_quantised(proto):
        raise QuantizeError(f"{path} is quantised already; give the float model, or compile this one")
    names = {node.name for node in proto.graph.node}
    for name in exclude:
        if name not in names:
            raise QuantizeError(f"{path} has no operator {name!r} to exclude{did_you_mean(name, names)}")
    return _convert_opset(restore_onnxruntime_domains(proto), path)


def _convert_opset(proto: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """Convert `proto` to an opset that has QuantizeLinear with an axis, if it is older.

    QuantizeError. path: for errors.
    """
    entry = next((opset for opset in proto.opset_import if opset.domain in ("", "ai.onnx")), None)
    if entry is None or entry.version >= PER_CHANNEL_OPSET:
        return proto
    try:
        newer: onnx.ModelProto = onnx.version_converter.convert_version(proto, PER_CHANNEL_OPSET)
    except Exception as error:
        raise QuantizeError(
            f"{path} is of opset {entry.version} and cannot be brought to {PER_CHANNEL_OPSET}, which the quantiser "
            f"needs ({_first_line(error)}); export it again with opset {PER_CHANNEL_OPSET} or newer"
        ) from None
    return newer


def _tensor_inputs(proto: onnx.ModelProto) -> list[Input]:
    """Return the inputs of the model that are no constants. QuantizeError where one is no tensor of known rank."""
    constants = {tensor.name for tensor in proto.graph.initializer}
    inputs = []
    for value in proto.graph.input:
        if value.name in constants:
            continue
        kind = value.type.tensor_type
        if not value.type.HasField("tensor_type") or not kind.HasField("shape"):
            raise QuantizeError(f"input {value.name!r} is no tensor of known rank; export the model with shapes")
        dims = tuple(d.dim_value if d.HasField("dim_value") and d.dim_value > 0 else None for d in kind.shape.dim)
        inputs.append(Input(value.name, np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)), dims))
    if not inputs:
        raise QuantizeError("the model has no inputs, so there is nothing to calibrate")
    return inputs


def _split_fused_operators(proto: onnx.ModelProto, operators: str | None) -> onnx.ModelProto:
    """Split operators that onnxruntime has fused in a decoder: its quantiser leaves fused ones float."""
    decomposed = decompose_cached_attention(proto)
    return separate_residual_sums(decomposed) if operators == "all" else decomposed


def _fix_open_sizes(proto: onnx.ModelProto, inputs: Sequence[Input]) -> onnx.ModelProto:
    """Return `proto` with the sizes of `inputs`, those of the samples, in place of open ones.

    onnxruntime's quantiser infers shapes, which open sizes would leave unknown.
    """
    if all(None not in tensor.shape for tensor in _tensor_inputs(proto)):
        return proto
    return resized(proto, {tensor.name: [size or 0 for size in tensor.shape] for tensor in inputs})


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message that is not empty; else the name of its class."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# Quantising -----------------------------------------------------------------------------------------------------


def _split_samples(samples: Samples) -> tuple[Samples, Samples]:
    """Split samples into those for calibration and those for measuring: disjoint if there are enough, else all for
    both."""
    if len(samples) < ENOUGH_TO_HOLD_OUT:
        return samples, samples
    held_out = range(HELD_OUT_INTERVAL - 1, len(samples), HELD_OUT_INTERVAL)
    return samples.pick(k for k in range(len(samples)) if k not in held_out), samples.pick(held_out)


def _prepare_model(proto: onnx.ModelProto, scratch: Path, choices: QuantizerChoices) -> Path:
    """Run onnxruntime's own preparation of the model (fold normalisations, infer shapes), and bring operators to the
    forms that its quantiser supports. Return the file of the result.

    For decoders without onnxruntime's transpose optimiser: it would move the split into heads behind the rotary
    positions. QuantizeError.
    """
    from onnxruntime.quantization.shape_inference import quant_pre_process

    source, prepared = scratch / "float.onnx", scratch / "prepared.onnx"
    onnx.save(proto, source)
    try:
        if choices.decoder:
            open_session(proto, "BASIC", save=source, int8=False, without=["TransposeOptimizer"])
        quant_pre_process(source, prepared, skip_optimization=choices.decoder, skip_symbolic_shape=True)
    except Exception as error:  # onnxruntime raises many classes
        raise QuantizeError(f"onnxruntime cannot prepare the model: {_first_line(error)}") from None
    typed = add_types(onnx.load(prepared))
    if choices.operator_kind == "":
        for change in (convolve_channels, pool_pixels, separate_differences):
            typed = add_types(change(typed, choices.exclude))
    if choices.recurrent:
        typed = add_types(project_inputs(typed, choices.exclude))
    onnx.save(separate_shared_biases(normalise_gemm_biases(typed)), prepared)
    return prepared


def _smooth_file(prepared: Path, samples: Samples, choices: QuantizerChoices) -> dict[str, Any]:
    """Smooth the model in the file `prepared`; return the report of it. QuantizeError where nothing can be smoothed."""
    model = onnx.load(prepared)
    try:
        smooth_report = smooth_floats(
            model, samples, parse_alpha(choices.smooth or 0.0), choices.centred, choices.per_channel
        )
    except OracleError as error:
        raise QuantizeError(str(error)) from None
    if not smooth_report["places"]:
        raise QuantizeError(
            "there is nothing to smooth: products by constants are all that reads a norm, or a product, nowhere in the "
            "model; leave --smooth out"
        )
    onnx.save(model, prepared)
    return smooth_report


def _run_quantiser(source: Path, result: Path, samples: Samples, choices: QuantizerChoices) -> None:
    """Run onnxruntime's quantiser on the file `source`, whose masks are rewritten before, and write `result`.

    QuantizeError, and InputError where a sample cannot be read.
    """
    from onnxruntime.quantization import (
        CalibrationDataReader,
        CalibrationMethod,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    class CalibrationReader(CalibrationDataReader):  # type: ignore[misc]
        """Hands the samples to onnxruntime's calibration one by one."""

        def __init__(self) -> None:
            self.samples = iter(samples)

        def get_next(self) -> dict[str, Array] | None:
            return next(self.samples, None)

    is_int8 = choices.activations == "int8"
    prepared = onnx.load(source)
    options = _choose_options(prepared, samples, choices)
    onnx.save(prepared, source)
    try:
        quantize_static(
            source, result, CalibrationReader(), quant_format=QuantFormat.QDQ, per_channel=choices.per_channel,
            weight_type=QuantType.QInt8, activation_type=QuantType.QInt8 if is_int8 else QuantType.QUInt8,
            calibrate_method=CalibrationMethod[METHODS[choices.method]], **options,
        )  # fmt: skip
    except InputError:  # a sample's
        raise
    except Exception as error:  # onnxruntime raises many classes
        raise QuantizeError(f"onnxruntime cannot quantise the model: {_first_line(error)}") from None
    if names := options.get("nodes_to_quantize"):
        quantised = restore_float_constants(onnx.load(result), prepared, names)
        onnx.save(isolate_quantised_products(quantised, names), result)


def _choose_options(model: onnx.ModelProto, samples: Samples, choices: QuantizerChoices) -> dict[str, Any]:
    """Choose the options of onnxruntime's quantiser: which nodes it quantises, and the ranges of masked scores.

    `model` is changed: its nodes get names, and its masks are rewritten and bounded. QuantizeError.
    """
    if choices.operator_kind:
        _name_nodes(model)
    names, range_overrides, mask_nodes = quantised_products(model), dict[str, Any](), list[str]()
    if choices.operator_kind != "products":
        if choices.operator_kind != "rotary":
            mask_nodes += replace_masks_by_sums(model, find_attention_scores(model))
        inner_operators = operators_between_products(model, choices.operator_kind or OPERATORS[0])
        try:
            ranges = measure_score_ranges(model, inner_operators.masked, samples)
        except OracleError as error:
            raise QuantizeError(str(error)) from None
        mask_nodes += bound_masks(model, inner_operators.masked, ranges)
        # Masked scores lie far below the others, so the range is asymmetric; a zero point costs a softmax nothing.
        range_overrides = {
            name: [{"rmin": np.float32(score_range.low), "rmax": np.float32(score_range.high), "symmetric": False}]
            for name, score_range in ranges.items()
        }
        names += inner_operators.operators
    options = {"ActivationSymmetric": choices.centred, "TensorQuantOverrides": range_overrides}
    if not choices.operator_kind:
        return {"nodes_to_exclude": [*choices.exclude, *mask_nodes], "extra_options": options}
    names = [name for name in names if name not in choices.exclude]
    if not names:  # no names would mean all operators
        raise QuantizeError("the model has no MatMul and no Gemm that could be quantised; take --operators all")
    op_types = {node.op_type for node in model.graph.node if node.name in names}
    return {"nodes_to_quantize": names, "op_types_to_quantize": sorted(op_types), "extra_options": options}


def _name_nodes(model: onnx.ModelProto) -> None:
    """Give each node of `model` a name: the quantiser chooses nodes by name."""
    names = {node.name for node in model.graph.node}
    for node in model.graph.node:
        if not node.name:
            node.name = next(name for k in count() if (name := f"{node.op_type}_{k}") not in names)
            names.add(node.name)
