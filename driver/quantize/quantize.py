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
from celosia.compiler.graph.importing.dimensions import is_quantised, resized
from celosia.compiler.graph.importing.importer import read
from celosia.compiler.graph.importing.normalise import for_checker, normalise_model, restore_onnxruntime_domains
from celosia.compiler.graph.importing.validation import validation_error
from celosia.compiler.graph.quantized.integerise import PER_CHANNEL_OPSET
from celosia.compiler.program import InputError
from celosia.compiler.program.safe_files import OutputError, check_writable, replacing
from celosia.driver.choices import ACTIVATIONS, METHODS, OPERATORS, WEIGHTS, parse_alpha
from celosia.driver.data.calibration import Input, Samples, open_samples
from celosia.driver.data.images import Pixels
from celosia.driver.generate.cached_attention import decompose_cached_attention
from celosia.driver.host.oracle import MissingLibrary, OracleError, add_types, open_session
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
from celosia.driver.quantize.gemms import normalise_gemm_biases
from celosia.driver.quantize.score_masks import replace_masks_by_sums
from celosia.driver.quantize.smooth import is_smoothable
from celosia.driver.quantize.smooth import smooth as smooth_floats
from celosia.hw.spec.config import Config, did_you_mean
from celosia.plain import Sentence

Array = NDArray[Any]
ENOUGH_TO_HOLD_OUT = 20
HELD_OUT = 5
"""One sample of so many is kept from the calibration and measured, where there are enough."""
MAX_BYTES = 2**31 - 2**20
"""Largest size of a protobuf."""


class QuantizeError(Sentence, ValueError):
    """A model that cannot be quantised; one sentence with the reason."""


@dataclass(frozen=True)
class QuantizerChoices:
    """Settings of onnxruntime's quantiser, as `quantize` describes, and whether the model is a decoder; ValueError for
    an unknown name."""

    per_channel: bool
    activations: str
    method: str
    operators: str
    exclude: tuple[str, ...]
    weights: int = WEIGHTS[0]
    smooth: float | str | None = None
    symmetric: bool = False
    decoder: bool = False

    @property
    def centred(self) -> bool:
        """Whether activations have no zero point: with one a product of two of them takes three times as long, as
        docs/attention.md says."""
        return self.symmetric or (bool(self.chosen) and self.activations == ACTIVATIONS[0])

    @property
    def chosen(self) -> str:
        """Operators that the quantiser gets by name: "products", those of "rotary" positions, "attention" or a
        "decoder", too; "" where it takes all that it can."""
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
    operators: str | None = None, smooth: float | str | None = None, samples: int | None = None,
    exclude: Sequence[str] = (), mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,),
    config: str | Path | Config = "pynq", progress: Callable[[str], None] | None = None,
    told: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Any]:  # fmt: skip
    """Write the float model `model` to `output` with int8 weights and 8-bit activations, as QuantizeLinear and
    DequantizeLinear pairs.

    calibration: a folder, an .npz file, or arrays by input name with samples along the first axis; see
    `calibration.open_samples`; for a decoder, `decoders.complete_decoder_samples` says what may be missing.
    weights: their bits; 4, 2 or 1 write int8 that is so few bits times a factor for each group of input channels
    (four_bits.py). symmetric: activations, int8, have no zero point.
    method: how ranges come from samples: "minmax", "entropy" or "percentile".
    operators: "all" that the quantiser can, or "products" (MatMul and Gemm with their biases, int8 activations
    symmetric), by default those for decoders, all for others; "rotary" is products and rotary positions, "attention"
    masks and softmaxes, too, of decoders "all" is these, the residual stream and norms. smooth: alpha, or "auto", of
    smooth.py. samples: use no more than these. exclude: names of operators that stay float. mean, std: of images, for
    pixels in 0..1. config: the accelerator whose share of the work is reported. Dynamic sizes of the model become those
    of the samples, but for decoders, whose stay open.

    >>> x = np.random.default_rng(0).normal(size=(8, 2, 4, 4)).astype(np.float32)
    >>> text = "g (float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] y) <float[2, 2, 1, 1] w = {1, 2, 3, -4}> {y = Conv(x, w)}"
    >>> model = onnx.parser.parse_model('<ir_version: 9, opset_import: ["" : 17]> ' + text)
    >>> folder = Path(tempfile.mkdtemp())
    >>> onnx.save(model, folder / "float.onnx")
    >>> report = quantize(folder / "float.onnx", {"x": x}, folder / "int8.onnx", config="tiny")
    >>> report["accelerator"]["macs_accelerator"], report["outputs"][0]["sqnr_db"] > 30
    (64, True)

    Returns a report of plain data: `outputs` (error of each output against the float model, both under onnxruntime; for
    a decoder's logits also the `perplexity` of both), `outputs_with_int8_weights` (where weights have 8 bits),
    `outputs_with_products` (of products alone, where attention or all of a decoder is quantised, else None), `smooth`
    and `outputs_without_smoothing` (None without it), `four_bits` (`matrices` with weights of 4 bits or less, and their
    `sqnr_db`; None without), `operators` (quantised or why not), `accelerator` (its share of the multiplications), and
    where an output is worse than POOR `losing` (the layers that lose most) and `advice` (what to try), else both empty.
    told: called with a sentence for each image that is resized or converted. ModelError, CalibrationError,
    QuantizeError, OutputError, ConfigError, MissingLibrary.
    """
    say, cfg = progress or (lambda stage: None), Config.load(config)
    kinds = operators or OPERATORS[0]
    choices = QuantizerChoices(per_channel, activations, method, kinds, tuple(exclude), weights, smooth, symmetric)
    _check_before_work(model, output)
    say("reading the model")
    proto = _read_float_model(Path(model), exclude)
    inputs, pixels = _tensor_inputs(proto), Pixels(tuple(mean), tuple(std), told)
    if is_decoder(inputs):
        choices = replace(choices, operators=operators or "products", decoder=True)
    chosen = open_samples(calibration, inputs, samples, pixels, complete_decoder_samples if choices.decoder else None)
    proto = _split_fused_operators(proto, operators) if choices.decoder else _fix_open_sizes(proto, chosen.inputs)
    quantised, report = _quantise_and_report(proto, chosen, choices, say)
    if not any(row["quantised"] for row in report["operators"]):
        raise QuantizeError(f"{model} has no operator that onnxruntime's quantiser can quantise; nothing is written")
    say(f"compiling for {cfg.name}")
    share = reporting.accelerator_share(quantised, cfg, chosen.inputs if choices.decoder else ())
    with replacing(output) as temporary:
        onnx.save(quantised, temporary)
    return {"model": str(model), "output": str(output), **report, "accelerator": share}


def _quantise_and_report(
    float_model: onnx.ModelProto, samples: Samples, choices: QuantizerChoices, say: Callable[[str], None]
) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """Return the quantised model, and the report but for the accelerator's share."""
    (fitting, measured), decoder = _split_samples(samples), choices.decoder
    with tempfile.TemporaryDirectory() as scratch, _silence_quantiser():
        say("preparing the model")
        prepared, result = _prepare_model(float_model, Path(scratch), decoder), Path(scratch) / "int8.onnx"
        products = plain = smoothed = None
        if choices.smooth is not None:
            say("quantising without smoothing, to compare")
            shutil.copy(prepared, rough := Path(scratch) / "rough.onnx")  # for masks in it are bounded
            _run_quantiser(rough, result, fitting, choices)
            plain = _measure_output_errors(float_model, onnx.load(result), measured, decoder)
            say("smoothing")
            smoothed = _smooth_file(prepared, fitting, choices)
        if choices.chosen not in ("", "products"):
            say("quantising products alone, to compare")
            _run_quantiser(prepared, result, fitting, replace(choices, operators="products"))
            products = _measure_output_errors(float_model, onnx.load(result), measured, decoder)
        say(f"calibrating with {len(fitting)} samples")
        _run_quantiser(prepared, result, fitting, choices)
        quantised = onnx.load(result)
        say(f"measuring with {len(measured)} samples")
        outputs = eight = _measure_output_errors(float_model, quantised, measured, decoder)
        four = None
        if choices.weights < WEIGHTS[0]:
            say(f"fitting weights of {choices.weights} bits")
            four = quantise_to_four_bits(quantised, onnx.load(prepared), fitting, choices.weights)
            onnx.save(quantised, result)
            outputs = _measure_output_errors(float_model, quantised, measured, decoder)
        poor = reporting.is_poor(outputs)
        losing = reporting.find_losing_operators(prepared, result, next(iter(measured))) if poor else []
        smoothable = poor and choices.smooth is None and is_smoothable(onnx.load(prepared))
    tried = reporting.advise(losing, choices.per_channel, choices.method, len(fitting), smoothable) if poor else []
    return quantised, {
        "weights": choices.weights, "four_bits": four, "outputs_with_int8_weights": eight,
        "outputs_with_products": products, "smooth": smoothed, "outputs_without_smoothing": plain,
        "per_channel": choices.per_channel, "activations": choices.activations, "method": choices.method,
        "samples_calibration": len(fitting), "samples_measured": len(measured), "held_out": fitting is not measured,
        "outputs": outputs, "operators": reporting.list_operators(quantised, choices.chosen, choices.exclude),
        "losing": losing, "advice": tried,
    }  # fmt: skip


def _measure_output_errors(
    float_model: onnx.ModelProto, quantised: onnx.ModelProto, samples: Samples, decoder: bool
) -> list[dict[str, Any]]:
    """Measure how far the quantised outputs are from the float ones. Raises QuantizeError."""
    try:
        return reporting.measure_outputs(float_model, quantised, samples, decoder)
    except OracleError as error:
        raise QuantizeError(str(error)) from None


def _check_before_work(model: str | Path, output: str | Path) -> None:
    """Check libraries and the output path before any work. MissingLibrary, OutputError."""
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
    """Silence the quantiser's prints and logs."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


# The model ------------------------------------------------------------------------------------------------------


def _read_float_model(path: Path, exclude: Sequence[str]) -> onnx.ModelProto:
    """Read and check the float model. ModelError, QuantizeError."""
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
    """Convert `proto` to an opset that has QuantizeLinear with an axis."""
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
    """Inputs of the model that are no constants. QuantizeError where one is no tensor of known rank."""
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
    """Split a decoder's fused operators of onnxruntime, which its quantiser leaves float."""
    plain = decompose_cached_attention(proto)
    return separate_residual_sums(plain) if operators == "all" else plain


def _fix_open_sizes(proto: onnx.ModelProto, inputs: Sequence[Input]) -> onnx.ModelProto:
    """Return `proto` with the sizes of `inputs` for those that it leaves open."""
    if all(None not in tensor.shape for tensor in _tensor_inputs(proto)):
        return proto
    return resized(proto, {tensor.name: [size or 0 for size in tensor.shape] for tensor in inputs})


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# Quantising -----------------------------------------------------------------------------------------------------


def _split_samples(samples: Samples) -> tuple[Samples, Samples]:
    """Split samples: (for calibration, to be measured), apart where there are enough, else all twice."""
    if len(samples) < ENOUGH_TO_HOLD_OUT:
        return samples, samples
    held = range(HELD_OUT - 1, len(samples), HELD_OUT)
    return samples.pick(k for k in range(len(samples)) if k not in held), samples.pick(held)


def _prepare_model(proto: onnx.ModelProto, scratch: Path, decoder: bool) -> Path:
    """Run onnxruntime's own preparation of the model: fold normalisations, infer shapes.

    Heads of a decoder stay where they are computed: onnxruntime would move them behind the rotary positions of tokens.
    """
    from onnxruntime.quantization.shape_inference import quant_pre_process

    source, prepared = scratch / "float.onnx", scratch / "prepared.onnx"
    onnx.save(proto, source)
    try:
        if decoder:
            open_session(proto, "BASIC", save=source, int8=False, without=["TransposeOptimizer"])
        quant_pre_process(source, prepared, skip_optimization=decoder, skip_symbolic_shape=True)
    except Exception as error:  # onnxruntime raises many classes
        raise QuantizeError(f"onnxruntime cannot prepare the model: {_first_line(error)}") from None
    onnx.save(normalise_gemm_biases(add_types(onnx.load(prepared))), prepared)
    return prepared


def _smooth_file(prepared: Path, samples: Samples, choices: QuantizerChoices) -> dict[str, Any]:
    """Smooth the model of a file, as `choices` say. QuantizeError where there is no place for it."""
    model = onnx.load(prepared)
    try:
        smoothed = smooth_floats(
            model, samples, parse_alpha(choices.smooth or 0.0), choices.centred, choices.per_channel
        )
    except OracleError as error:
        raise QuantizeError(str(error)) from None
    if not smoothed["places"]:
        raise QuantizeError(
            "there is nothing to smooth: products by constants are all that reads a norm, or a product, nowhere in the "
            "model; leave --smooth out"
        )
    onnx.save(model, prepared)
    return smoothed


def _run_quantiser(source: Path, result: Path, samples: Samples, choices: QuantizerChoices) -> None:
    """Run onnxruntime's quantiser on the file `source`, and write `result`."""
    from onnxruntime.quantization import (
        CalibrationDataReader,
        CalibrationMethod,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    class CalibrationReader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.samples = iter(samples)

        def get_next(self) -> dict[str, Array] | None:
            return next(self.samples, None)

    int8 = choices.activations == "int8"
    prepared = onnx.load(source)
    chosen = _choose_options(prepared, samples, choices)
    onnx.save(prepared, source)
    try:
        quantize_static(
            source, result, CalibrationReader(), quant_format=QuantFormat.QDQ, per_channel=choices.per_channel,
            weight_type=QuantType.QInt8, activation_type=QuantType.QInt8 if int8 else QuantType.QUInt8,
            calibrate_method=CalibrationMethod[METHODS[choices.method]], **chosen,
        )  # fmt: skip
    except InputError:  # a sample's
        raise
    except Exception as error:  # onnxruntime raises many classes
        raise QuantizeError(f"onnxruntime cannot quantise the model: {_first_line(error)}") from None
    if names := chosen.get("nodes_to_quantize"):
        quantised = restore_float_constants(onnx.load(result), prepared, names)
        onnx.save(isolate_quantised_products(quantised, names), result)


def _choose_options(model: onnx.ModelProto, samples: Samples, choices: QuantizerChoices) -> dict[str, Any]:
    """Choose the quantiser's options for the operators of `model`, which is changed. QuantizeError."""
    if choices.chosen:
        _name_nodes(model)
    names, scores, masks = quantised_products(model), dict[str, Any](), list[str]()
    if choices.chosen != "products":
        if choices.chosen != "rotary":
            masks += replace_masks_by_sums(model, find_attention_scores(model))
        between = operators_between_products(model, choices.chosen or OPERATORS[0])
        try:
            ranges = measure_score_ranges(model, between.masked, samples)
        except OracleError as error:
            raise QuantizeError(str(error)) from None
        masks += bound_masks(model, between.masked, ranges)
        # Masked scores lie far below the others, and a softmax does not multiply, so that a zero point costs nothing.
        scores = {
            name: [{"rmin": np.float32(pair.low), "rmax": np.float32(pair.high), "symmetric": False}]
            for name, pair in ranges.items()
        }
        names += between.operators
    options = {"ActivationSymmetric": choices.centred, "TensorQuantOverrides": scores}
    if not choices.chosen:
        return {"nodes_to_exclude": [*choices.exclude, *masks], "extra_options": options}
    names = [name for name in names if name not in choices.exclude]
    if not names:  # no names would mean all operators
        raise QuantizeError("the model has no MatMul and no Gemm that could be quantised; take --operators all")
    kinds = {node.op_type for node in model.graph.node if node.name in names}
    return {"nodes_to_quantize": names, "op_types_to_quantize": sorted(kinds), "extra_options": options}


def _name_nodes(model: onnx.ModelProto) -> None:
    """Give each node of `model` a name, by which the quantiser chooses and excludes it."""
    names = {node.name for node in model.graph.node}
    for node in model.graph.node:
        if not node.name:
            node.name = next(name for k in count() if (name := f"{node.op_type}_{k}") not in names)
            names.add(node.name)
