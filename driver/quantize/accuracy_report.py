"""The report of quantising: errors of outputs, operators that stay float and why, the accelerator's share, advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from celosia.compiler.compile import compile as compile_model
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.quantized.rounded import NORMS
from celosia.driver.accuracy.compare import ModelTensors, add_float_comparison
from celosia.driver.data.calibration import Input, Samples
from celosia.driver.quantize.decoders import LOGITS, PRODUCTS, TOKENS, perplexity
from celosia.driver.quantize.supported_forms import RECURRENT
from celosia.driver.workstation.oracle import compute_tensors, open_session
from celosia.hw.spec.config import Config

Array = NDArray[Any]
POOR_DB, POOR_AGREEMENT = 20.0, 0.95
"""An output is poor below these: an error of a tenth of it, or another class for more than one sample of twenty."""
LOSING_DB, MAX_LOSING = 3.0, 3
"""Operators that lose more decibels are reported, so many of them at most."""
ENOUGH_SAMPLES = 100
"""Samples for calibration below which advice is to give more."""
WHY_NOT = {
    "products": "it is no product",
    "rotary": "it is no product, and no rotary position",
    "attention": "it is no product, and no sum or softmax in attention",
    "decoder": "it is no product, sum, norm or softmax between embeddings and logits",
}
"""Reason why an operator stays float, by the kind of operators that were to be quantised."""


def measure_outputs(
    float_model: onnx.ModelProto, quantised: onnx.ModelProto, samples: Samples, decoder: bool
) -> list[dict[str, Any]]:  # fmt: skip
    """Measure the errors of each float output over `samples`, both models under onnxruntime. OracleError.

    Returns `outputs` of the report (see `quantize`). decoder: also measure the perplexity of logits.
    """
    sessions = [open_session(float_model), open_session(quantised)]
    names = [value.name for value in float_model.graph.output]
    pairs_of: dict[str, list[tuple[Array, Array]]] = {name: [] for name in names}
    for sample in samples:
        float_outputs, quantised_outputs = (session.run(names, sample) for session in sessions)
        for name, a, b in zip(names, float_outputs, quantised_outputs):
            if isinstance(a, np.ndarray) and a.dtype.kind == "f":
                pairs_of[name].append((a, b))
    rows = [_output_errors(name, pairs) for name, pairs in pairs_of.items() if pairs]
    for row in rows:
        row["perplexity"] = (
            _perplexity_pair(pairs_of[row["name"]], samples) if decoder and row["name"] == LOGITS else None
        )
    return rows


def _perplexity_pair(pairs: list[tuple[Array, Array]], samples: Samples) -> dict[str, float | None] | None:
    """Return the perplexity of the float and the int8 model; None unless logits are for tokens [batch, steps].

    pairs: logits of both models for each sample.
    """
    tokens = next((tensor.shape for tensor in samples.inputs if tensor.name == TOKENS), ())
    if len(tokens) != 2 or pairs[0][0].shape[:-1] != tokens:
        return None
    return {kind: perplexity((pair[k] for pair in pairs), samples) for k, kind in enumerate(("float", "int8"))}


def _output_errors(name: str, pairs: list[tuple[Array, Array]]) -> dict[str, Any]:
    """Return the errors of an output over all samples. pairs: its values in both models.

    `sqnr_db` is the power of the float output over that of the error; None where there is no error.
    """
    pairs64 = [(a.astype(np.float64), b.astype(np.float64)) for a, b in pairs]
    errors = [np.abs(a - b) for a, b in pairs64]
    elements = sum(a.size for a, _ in pairs64)
    noise, signal = sum(float((e**2).sum()) for e in errors), sum(float((a**2).sum()) for a, _ in pairs64)
    return {
        "name": name,
        "max_abs": max((float(e.max()) for e in errors if e.size), default=0.0),
        "mean_abs": sum(float(e.sum()) for e in errors) / max(elements, 1),
        "largest": max((float(np.abs(a).max()) for a, _ in pairs64 if a.size), default=0.0),
        "sqnr_db": 10 * float(np.log10(signal / noise)) if noise and signal else None,
        "top1_agreement": _top_class_agreement(pairs64),
    }


def _top_class_agreement(pairs: list[tuple[Array, Array]]) -> float | None:
    """Return the share of samples whose class of highest score is equal; None unless outputs are [batch, classes]."""
    shape = pairs[0][0].shape
    if len(shape) < 2 or shape[1] < 2 or any(n != 1 for n in shape[2:]):
        return None
    return float(np.mean([a.argmax(1) == b.argmax(1) for a, b in pairs]))


# Advice ---------------------------------------------------------------------------------------------------------


def is_poor(outputs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an output is far from the float model's."""
    return any(
        (row["sqnr_db"] is not None and row["sqnr_db"] < POOR_DB) or (row["top1_agreement"] or 1.0) < POOR_AGREEMENT
        for row in outputs
    )


def find_losing_operators(prepared: Path, result: Path, sample: Mapping[str, Array]) -> list[dict[str, Any]]:
    """List the operators that lose most decibels of signal-to-noise ratio against their operands, for one sample.

    prepared, result: files of the float and the quantised model. Returns `name`, `op`, `sqnr_db` and `lost_db` of each.
    """
    proto = onnx.load(result)
    graph, values = ModelTensors(proto), compute_tensors(result, sample, optimised=False)
    rows: list[dict[str, Any]] = [
        {"name": name, "op": graph.maker(name).op_type, "node": graph.maker(name).name, "float": None, "matched": None,
         "sqnr_db": None, "lost_db": None} for name in graph.makers if isinstance(values.get(name), np.ndarray)
    ]  # fmt: skip
    add_float_comparison(proto, graph, rows, values, sample, prepared)
    losing_operators: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["lost_db"] or 0.0, reverse=True):
        if (
            row["node"]
            and row["op"] not in ("QuantizeLinear", "DequantizeLinear")
            and (row["lost_db"] or 0) > LOSING_DB
        ):
            entry = {"name": row["node"], "op": row["op"], "sqnr_db": row["sqnr_db"], "lost_db": row["lost_db"]}
            losing_operators.setdefault(row["node"], entry)
    return list(losing_operators.values())[:MAX_LOSING]


def advise(
    losing: Sequence[Mapping[str, Any]], per_channel: bool, method: str, samples: int, smoothable: bool
) -> list[str]:  # fmt: skip
    """Return advice for a poor result, the cheapest first.

    losing: see `find_losing_operators`. smoothable: `smooth` was not used and has a place in the model.
    """
    advice = []
    if not per_channel:
        advice.append("leave --per-tensor out: a scale for each output channel costs nothing on the accelerator")
    if samples < ENOUGH_SAMPLES:
        advice.append(f"more samples for --calibration, as the model sees them in use: {samples} are few")
    other_methods = [name for name in ("percentile", "entropy", "minmax") if name != method]
    advice.append(f"other ranges: --method {other_methods[0]}, or {other_methods[1]}")
    if smoothable:
        advice.append("--smooth auto, where a few channels are much larger than the others")
    if losing:
        advice.append(f"keep what loses most in floats, on the CPU: --exclude {losing[0]['name']}")
    advice.append("train the model with quantisation, so that it gets used to it: docs/pytorch.md")
    return advice


def list_operators(quantised: onnx.ModelProto, operator_kind: str, exclude: Sequence[str]) -> list[dict[str, Any]]:
    """List each operator of the quantised model, and the reason if it is not quantised.

    operator_kind: the kind of operators that were to be quantised, a key of WHY_NOT; "" for all that can be.
    """
    from onnxruntime.quantization.registry import QDQRegistry

    nodes = [node for node in quantised.graph.node if node.op_type not in ("QuantizeLinear", "DequantizeLinear")]
    dequantised = {n.output[0] for n in quantised.graph.node if n.op_type == "DequantizeLinear"}
    float_tensors = _float_names(quantised) - dequantised
    rows = []
    for node in nodes:
        operands = node.input[:1] if node.op_type in NORMS else node.input  # norms have float constants in any case
        reason = ""
        if not dequantised.intersection(operands) or float_tensors.intersection(operands):
            if node.name in exclude:
                reason = "it is excluded"
            elif operator_kind in WHY_NOT and node.op_type not in PRODUCTS:
                reason = WHY_NOT[operator_kind]
            elif node.op_type in RECURRENT:
                reason = "its states are products of the step before; --recurrent quantises the products of its input"
            elif node.op_type not in QDQRegistry:
                reason = "onnxruntime's quantiser has no rule for it"
            else:
                reason = "the quantiser's rule does not apply: no constant weights, no floats, or float neighbours"
        rows.append({"name": node.name, "op": node.op_type, "quantised": not reason, "reason": reason})
    return rows


def _float_names(model: onnx.ModelProto) -> set[str]:
    """Return the names of all tensors of a floating-point type."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info, *graph.output)}
    kinds |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    floats = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE, onnx.TensorProto.BFLOAT16}
    return {name for name, kind in kinds.items() if kind in floats}


def accelerator_share(quantised: onnx.ModelProto, cfg: Config, inputs: Sequence[Input]) -> dict[str, Any]:
    """Compile the quantised model; return the accelerator's share of it, and why operators stay on the CPU.

    inputs: sizes for those that the model leaves open.
    """
    try:
        program = compile_model(
            quantised, cfg, shapes={tensor.name: [n or 0 for n in tensor.shape] for tensor in inputs}
        )
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
