"""A float ONNX model to one of 8-bit integers, through onnxruntime.quantization, and what that costs in accuracy."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from celosia.compiler.compile import compile as compile_model
from celosia.compiler.graph.importer import ModelError, read
from celosia.compiler.graph.interface import is_quantised, resized
from celosia.compiler.graph.lenient import conform, for_checker
from celosia.compiler.graph.quantized import PER_CHANNEL_OPSET
from celosia.compiler.graph.sound import complaint
from celosia.compiler.program import InputError
from celosia.compiler.program.files import OutputError, check_writable, replacing
from celosia.driver.calibration import Input, Samples, open_samples
from celosia.driver.choices import ACTIVATIONS, METHODS, OPERATORS
from celosia.driver.compare import Graph, add_noise
from celosia.driver.decoders import LOGITS, PRODUCTS, TOKENS, completed, is_decoder, not_products, perplexity
from celosia.driver.images import Pixels
from celosia.driver.oracle import MissingLibrary, OracleError, session, tensors
from celosia.hw.config import Config, did_you_mean

Array = NDArray[Any]
ENOUGH_TO_HOLD_OUT = 20
HELD_OUT = 5
"""One sample of so many is kept from the calibration and measured, where there are enough."""
POOR_DB, POOR_AGREEMENT = 20.0, 0.95
"""An output below these, an error of a tenth of it or another class for one sample of twenty, needs advice."""
LOSES_DB, TOLD = 3.0, 3
"""Operators that lose more are told, so many of them."""
SAMPLES_ENOUGH = 100
MAX_BYTES = 2**31 - 2**20
"""What a protobuf can hold."""


class QuantizeError(ValueError):
    """A model that cannot be quantised; one sentence with the reason."""


def quantize(
    model: str | Path, calibration: str | Path | Mapping[str, Array], output: str | Path, *, per_channel: bool = True,
    activations: str = "int8", method: str = "minmax", operators: str | None = None, samples: int | None = None,
    exclude: Sequence[str] = (), mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,), config: str | Path | Config = "pynq",
    progress: Callable[[str], None] | None = None, told: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Any]:  # fmt: skip
    """Write the float model `model` to `output` with int8 weights and 8-bit activations, as QuantizeLinear and
    DequantizeLinear pairs.

    calibration: a folder, an .npz file, or arrays by input name with samples along the first axis; see
    `calibration.open_samples`; for a decoder, `decoders.completed` says what may be missing. method: how ranges come
    from samples: "minmax", "entropy" or "percentile". operators: "all" that the quantiser can, or "products" (MatMul
    and Gemm with their biases, int8 activations symmetric); by default those for decoders, all for others. samples:
    use no more than these. exclude: names of operators that stay float. mean, std: of images, for pixels in 0..1.
    config: the accelerator whose share of the work is reported. Dynamic sizes of the model become those of the
    samples, but for decoders, whose stay open.

    >>> x = np.random.default_rng(0).normal(size=(8, 2, 4, 4)).astype(np.float32)
    >>> text = "g (float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] y) <float[2, 2, 1, 1] w = {1, 2, 3, -4}> {y = Conv(x, w)}"
    >>> model = onnx.parser.parse_model('<ir_version: 9, opset_import: ["" : 17]> ' + text)
    >>> folder = Path(tempfile.mkdtemp())
    >>> onnx.save(model, folder / "float.onnx")
    >>> report = quantize(folder / "float.onnx", {"x": x}, folder / "int8.onnx", config="tiny")
    >>> report["accelerator"]["macs_accelerator"], report["outputs"][0]["sqnr_db"] > 30
    (64, True)

    Returns a report of plain data: `outputs` (error of each output against the float model, both under onnxruntime;
    for a decoder's logits also the `perplexity` of both), `operators` (quantised or why not), `accelerator` (its share of the multiplications), and where an output is worse
    than POOR `losing` (the layers that lose most) and `advice` (what to try), else both empty. told: called with a
    sentence for each image that is resized or converted. Raises ModelError,
    CalibrationError, QuantizeError, OutputError, ConfigError, and MissingLibrary without onnxruntime.
    """
    say = progress or (lambda stage: None)
    cfg = Config.load(config)
    _check(model, output, activations, method, operators)
    say("reading the model")
    proto = _float_model(Path(model), exclude)
    inputs = _inputs(proto)
    decoder = is_decoder(inputs)
    operators = operators or ("products" if decoder else "all")
    complete = completed if decoder else None
    chosen = open_samples(calibration, inputs, samples, Pixels(tuple(mean), tuple(std), told), complete)
    if not decoder:
        proto = _of_sizes(proto, chosen.inputs)
    fitting, measured = _split(chosen)
    with tempfile.TemporaryDirectory() as scratch, _quiet():
        say("preparing the model")
        prepared = _prepared(proto, Path(scratch))
        result = Path(scratch) / "int8.onnx"
        _quantise(prepared, result, fitting, per_channel, activations, method, operators, exclude, say)
        quantised = onnx.load(result)
        outputs = _measure(proto, quantised, measured, decoder, say)
        losing = _losing(prepared, result, next(iter(measured))) if poor(outputs) else []
    rows = _operators(quantised, operators, exclude)
    if not any(row["quantised"] for row in rows):
        raise QuantizeError(f"{model} has no operator that onnxruntime's quantiser can quantise; nothing is written")
    say(f"compiling for {cfg.name}")
    accelerator = _accelerator(quantised, cfg, chosen.inputs if decoder else ())
    with replacing(output) as temporary:
        onnx.save(quantised, temporary)
    return {
        "model": str(model), "output": str(output), "per_channel": per_channel, "activations": activations,
        "method": method, "samples_calibration": len(fitting), "samples_measured": len(measured),
        "held_out": fitting is not measured, "outputs": outputs, "operators": rows, "accelerator": accelerator,
        "losing": losing, "advice": _advice(losing, per_channel, method, len(fitting)) if poor(outputs) else [],
    }  # fmt: skip


def _check(model: str | Path, output: str | Path, activations: str, method: str, operators: str | None) -> None:
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations are {' or '.join(ACTIVATIONS)}, not {activations!r}")
    if method not in METHODS:
        raise ValueError(f"the method is {', '.join(METHODS)}, not {method!r}")
    if operators not in (None, *OPERATORS):
        raise ValueError(f"operators are {' or '.join(OPERATORS)}, not {operators!r}")
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
def _quiet() -> Iterator[None]:
    """Without what the quantiser prints and logs."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


# The model ------------------------------------------------------------------------------------------------------


def _float_model(path: Path, exclude: Sequence[str]) -> onnx.ModelProto:
    proto = read(path)
    if proto.ByteSize() > MAX_BYTES:
        raise QuantizeError(f"{path} takes {proto.ByteSize():,} bytes; models of 2 GB or more cannot be quantised")
    if why := complaint(proto, str(path.parent)):
        raise ModelError(f"{path} is not a valid ONNX model: {why}")
    proto = conform(proto)
    try:
        onnx.checker.check_model(for_checker(proto))
    except Exception as error:  # onnx raises several unrelated classes
        raise ModelError(f"{path} is not a valid ONNX model: {_line(error)}") from None
    if is_quantised(proto):
        raise QuantizeError(f"{path} is quantised already; give the float model, or compile this one")
    names = {node.name for node in proto.graph.node}
    for name in exclude:
        if name not in names:
            raise QuantizeError(f"{path} has no operator {name!r} to exclude{did_you_mean(name, names)}")
    return _of_opset(proto, path)


def _of_opset(proto: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """`proto` in an opset that has QuantizeLinear with an axis."""
    entry = next((each for each in proto.opset_import if each.domain in ("", "ai.onnx")), None)
    if entry is None or entry.version >= PER_CHANNEL_OPSET:
        return proto
    try:
        newer: onnx.ModelProto = onnx.version_converter.convert_version(proto, PER_CHANNEL_OPSET)
    except Exception as error:
        raise QuantizeError(
            f"{path} is of opset {entry.version} and cannot be brought to {PER_CHANNEL_OPSET}, which the quantiser "
            f"needs ({_line(error)}); export it again with opset {PER_CHANNEL_OPSET} or newer"
        ) from None
    return newer


def _inputs(proto: onnx.ModelProto) -> list[Input]:
    constants = {tensor.name for tensor in proto.graph.initializer}
    found = []
    for value in proto.graph.input:
        if value.name in constants:
            continue
        kind = value.type.tensor_type
        if not value.type.HasField("tensor_type") or not kind.HasField("shape"):
            raise QuantizeError(f"input {value.name!r} is no tensor of known rank; export the model with shapes")
        dims = tuple(d.dim_value if d.HasField("dim_value") and d.dim_value > 0 else None for d in kind.shape.dim)
        found.append(Input(value.name, np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)), dims))
    if not found:
        raise QuantizeError("the model has no inputs, so there is nothing to calibrate")
    return found


def _of_sizes(proto: onnx.ModelProto, inputs: Sequence[Input]) -> onnx.ModelProto:
    """`proto` with the sizes of `inputs` for those that it leaves open."""
    if all(None not in each.shape for each in _inputs(proto)):
        return proto
    return resized(proto, {each.name: [size or 0 for size in each.shape] for each in inputs})


def _line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# Quantising -----------------------------------------------------------------------------------------------------


def _split(samples: Samples) -> tuple[Samples, Samples]:
    """(for calibration, to be measured): apart where there are enough, else all twice."""
    if len(samples) < ENOUGH_TO_HOLD_OUT:
        return samples, samples
    held = range(HELD_OUT - 1, len(samples), HELD_OUT)
    return samples.pick(k for k in range(len(samples)) if k not in held), samples.pick(held)


def _prepared(proto: onnx.ModelProto, scratch: Path) -> Path:
    """The model after onnxruntime's own preparation: normalisations folded, shapes inferred."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    source, prepared = scratch / "float.onnx", scratch / "prepared.onnx"
    onnx.save(proto, source)
    try:
        quant_pre_process(source, prepared, skip_symbolic_shape=True)
    except Exception as error:  # onnxruntime raises many classes
        raise QuantizeError(f"onnxruntime cannot prepare the model: {_line(error)}") from None
    return prepared


def _quantise(
    source: Path, result: Path, samples: Samples, per_channel: bool, activations: str, method: str, operators: str,
    exclude: Sequence[str], say: Callable[[str], None],
) -> None:  # fmt: skip
    from onnxruntime.quantization import (
        CalibrationDataReader,
        CalibrationMethod,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    say(f"calibrating with {len(samples)} samples")

    class CalibrationReader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.samples = iter(samples)

        def get_next(self) -> dict[str, Array] | None:
            return next(self.samples, None)

    chosen: dict[str, Any] = {"nodes_to_exclude": list(exclude)}
    if operators == "products":
        prepared = _with_names(onnx.load(source))
        onnx.save(prepared, source)
        # A product of two activations takes three times as long with zero points: docs/attention.md
        chosen = {"op_types_to_quantize": [*PRODUCTS, "Add"], "nodes_to_exclude": [*exclude, *not_products(prepared)],
                  "extra_options": {"ActivationSymmetric": activations == "int8"}}  # fmt: skip
    try:
        quantize_static(
            source, result, CalibrationReader(), quant_format=QuantFormat.QDQ, per_channel=per_channel,
            weight_type=QuantType.QInt8,
            activation_type=QuantType.QInt8 if activations == "int8" else QuantType.QUInt8,
            calibrate_method=CalibrationMethod[METHODS[method]], **chosen,
        )  # fmt: skip
    except InputError:  # a sample's
        raise
    except Exception as error:  # onnxruntime raises many classes
        raise QuantizeError(f"onnxruntime cannot quantise the model: {_line(error)}") from None


def _with_names(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model`, whose nodes all have a name from now on: the quantiser excludes them by it."""
    taken = {node.name for node in model.graph.node}
    for node in model.graph.node:
        if not node.name:
            node.name = next(name for k in count() if (name := f"{node.op_type}_{k}") not in taken)
            taken.add(node.name)
    return model


# Report ---------------------------------------------------------------------------------------------------------


def _measure(
    float_model: onnx.ModelProto, quantised: onnx.ModelProto, samples: Samples, decoder: bool,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """Errors of each float output over `samples`, both models under onnxruntime."""
    say(f"measuring with {len(samples)} samples")
    try:
        sessions = [session(float_model), session(quantised)]
    except OracleError as error:
        raise QuantizeError(str(error)) from None
    names = [value.name for value in float_model.graph.output]
    found: dict[str, list[tuple[Array, Array]]] = {name: [] for name in names}
    for sample in samples:
        expected, got = (each.run(names, sample) for each in sessions)
        for name, a, b in zip(names, expected, got):
            if isinstance(a, np.ndarray) and a.dtype.kind == "f":
                found[name].append((a, b))
    rows = [_errors(name, pairs) for name, pairs in found.items() if pairs]
    for row in rows:
        row["perplexity"] = _perplexity(found[row["name"]], samples) if decoder and row["name"] == LOGITS else None
    return rows


def _perplexity(pairs: list[tuple[Array, Array]], samples: Samples) -> dict[str, float | None] | None:
    """Of the float and the int8 model; None where there are no tokens that logits [1, steps, vocabulary] are for."""
    if TOKENS not in {each.name for each in samples.inputs} or pairs[0][0].ndim != 3:
        return None
    return {kind: perplexity((pair[k] for pair in pairs), samples) for k, kind in enumerate(("float", "int8"))}


def _errors(name: str, pairs: list[tuple[Array, Array]]) -> dict[str, Any]:
    """sqnr_db: power of the float output over that of the error, None where there is no error."""
    wide = [(a.astype(np.float64), b.astype(np.float64)) for a, b in pairs]
    errors = [np.abs(a - b) for a, b in wide]
    elements = sum(a.size for a, _ in wide)
    noise, signal = sum(float((e**2).sum()) for e in errors), sum(float((a**2).sum()) for a, _ in wide)
    return {
        "name": name,
        "max_abs": max((float(e.max()) for e in errors if e.size), default=0.0),
        "mean_abs": sum(float(e.sum()) for e in errors) / max(elements, 1),
        "largest": max((float(np.abs(a).max()) for a, _ in wide if a.size), default=0.0),
        "sqnr_db": 10 * float(np.log10(signal / noise)) if noise and signal else None,
        "top1_agreement": _agreement(wide),
    }


def _agreement(pairs: list[tuple[Array, Array]]) -> float | None:
    """Share of equal largest classes, for outputs [batch, classes] (further axes of 1); None for others."""
    shape = pairs[0][0].shape
    if len(shape) < 2 or shape[1] < 2 or any(n != 1 for n in shape[2:]):
        return None
    return float(np.mean([a.argmax(1) == b.argmax(1) for a, b in pairs]))


# Advice ---------------------------------------------------------------------------------------------------------


def poor(outputs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an output is far from the float model's."""
    return any(
        (row["sqnr_db"] is not None and row["sqnr_db"] < POOR_DB) or (row["top1_agreement"] or 1.0) < POOR_AGREEMENT
        for row in outputs
    )


def _losing(prepared: Path, result: Path, sample: Mapping[str, Array]) -> list[dict[str, Any]]:
    """The operators whose outputs lose most against their operands, of one sample: name, op, sqnr_db and lost_db."""
    proto = onnx.load(result)
    graph, found = Graph(proto), tensors(result, sample, optimised=False)
    rows: list[dict[str, Any]] = [
        {"name": name, "op": graph.maker(name).op_type, "node": graph.maker(name).name, "float": None, "matched": None,
         "sqnr_db": None, "lost_db": None} for name in graph.made if isinstance(found.get(name), np.ndarray)
    ]  # fmt: skip
    add_noise(proto, graph, rows, found, sample, prepared)
    best: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["lost_db"] or 0.0, reverse=True):
        if row["node"] and row["op"] not in ("QuantizeLinear", "DequantizeLinear") and (row["lost_db"] or 0) > LOSES_DB:
            kept = {"name": row["node"], "op": row["op"], "sqnr_db": row["sqnr_db"], "lost_db": row["lost_db"]}
            best.setdefault(row["node"], kept)
    return list(best.values())[:TOLD]


def _advice(losing: Sequence[Mapping[str, Any]], per_channel: bool, method: str, samples: int) -> list[str]:
    """What to try where the result is poor, the cheapest first."""
    found = []
    if not per_channel:
        found.append("leave --per-tensor out: a scale for each output channel costs nothing on the accelerator")
    if samples < SAMPLES_ENOUGH:
        found.append(f"more samples for --calibration, as the model sees them in use: {samples} are few")
    others = [name for name in ("percentile", "entropy", "minmax") if name != method]
    found.append(f"other ranges: --method {others[0]}, or {others[1]}")
    if losing:
        found.append(f"keep what loses most in floats, on the CPU: --exclude {losing[0]['name']}")
    found.append("train the model with quantisation, so that it gets used to it: docs/pytorch.md")
    return found


def _operators(quantised: onnx.ModelProto, operators: str, exclude: Sequence[str]) -> list[dict[str, Any]]:
    """Each operator of the model, and why it is not quantised."""
    from onnxruntime.quantization.registry import QDQRegistry

    nodes = [node for node in quantised.graph.node if node.op_type not in ("QuantizeLinear", "DequantizeLinear")]
    pairs = {n.output[0] for n in quantised.graph.node if n.op_type == "DequantizeLinear"}
    floats = _floats(quantised) - pairs
    rows = []
    for node in nodes:
        reason = ""
        if not pairs.intersection(node.input) or floats.intersection(node.input):
            if node.name in exclude:
                reason = "it is excluded"
            elif operators == "products" and node.op_type not in PRODUCTS:
                reason = "it is no product"
            elif node.op_type not in QDQRegistry:
                reason = "onnxruntime's quantiser has no rule for it"
            else:
                reason = "the quantiser's rule does not apply: no constant weights, no floats, or float neighbours"
        rows.append({"name": node.name, "op": node.op_type, "quantised": not reason, "reason": reason})
    return rows


def _floats(model: onnx.ModelProto) -> set[str]:
    """Names of all values of a floating-point type."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    kinds = {each.name: each.type.tensor_type.elem_type for each in (*graph.input, *graph.value_info, *graph.output)}
    kinds |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    floats = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE, onnx.TensorProto.BFLOAT16}
    return {name for name, kind in kinds.items() if kind in floats}


def _accelerator(quantised: onnx.ModelProto, cfg: Config, inputs: Sequence[Input]) -> dict[str, Any]:
    """What the accelerator takes of the quantised model, for `inputs` where sizes are open, and why it does not take the rest."""
    try:
        program = compile_model(quantised, cfg, shapes={each.name: [n or 0 for n in each.shape] for each in inputs})
    except ModelError as error:
        return {"config": cfg.name, "error": str(error)}
    reasons = Counter((row["op"], row["reason"]) for row in program.placements if row["place"] == "cpu")
    return {
        "config": cfg.name,
        "macs_total": program.macs_total,
        "macs_accelerator": program.macs_accelerator,
        "operators": dict(Counter(row["place"] for row in program.placements)),
        "cpu": [{"op": op, "count": count, "reason": reason} for (op, reason), count in reasons.most_common()],
    }
