"""Report of quantising: errors of outputs, float operators and why, the accelerator's share, advice."""

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
from celosia.driver.accuracy.compare import Graph, add_float_comparison
from celosia.driver.data.calibration import Input, Samples
from celosia.driver.host.oracle import compute_tensors, open_session
from celosia.driver.quantize.decoders import LOGITS, PRODUCTS, TOKENS, perplexity
from celosia.hw.spec.config import Config

Array = NDArray[Any]
POOR_DB, POOR_AGREEMENT = 20.0, 0.95
"""An output below these, an error of a tenth of it or another class for one sample of twenty, needs advice."""
LOSES_DB, TOLD = 3.0, 3
"""Operators that lose more are told, so many of them."""
SAMPLES_ENOUGH = 100
WHY_NOT = {
    "products": "it is no product",
    "rotary": "it is no product, and no rotary position",
    "attention": "it is no product, and no sum or softmax in attention",
    "decoder": "it is no product, sum, norm or softmax between embeddings and logits",
}
"""Why an operator stays float that is no product, by what was to be quantised."""


def measure_outputs(
    float_model: onnx.ModelProto, quantised: onnx.ModelProto, samples: Samples, decoder: bool
) -> list[dict[str, Any]]:  # fmt: skip
    """Measure the errors of each float output over `samples`, both models under onnxruntime. OracleError."""
    sessions = [open_session(float_model), open_session(quantised)]
    names = [value.name for value in float_model.graph.output]
    pairs_of: dict[str, list[tuple[Array, Array]]] = {name: [] for name in names}
    for sample in samples:
        expected, got = (session.run(names, sample) for session in sessions)
        for name, a, b in zip(names, expected, got):
            if isinstance(a, np.ndarray) and a.dtype.kind == "f":
                pairs_of[name].append((a, b))
    rows = [_output_errors(name, pairs) for name, pairs in pairs_of.items() if pairs]
    for row in rows:
        row["perplexity"] = (
            _perplexity_pair(pairs_of[row["name"]], samples) if decoder and row["name"] == LOGITS else None
        )
    return rows


def _perplexity_pair(pairs: list[tuple[Array, Array]], samples: Samples) -> dict[str, float | None] | None:
    """Perplexity of the float and the int8 model; None where there are no tokens [batch, steps] that logits are for."""
    tokens = next((tensor.shape for tensor in samples.inputs if tensor.name == TOKENS), ())
    if len(tokens) != 2 or pairs[0][0].shape[:-1] != tokens:
        return None
    return {kind: perplexity((pair[k] for pair in pairs), samples) for k, kind in enumerate(("float", "int8"))}


def _output_errors(name: str, pairs: list[tuple[Array, Array]]) -> dict[str, Any]:
    """Errors of an output. sqnr_db: power of the float output over that of the error, None where there is no error."""
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
        "top1_agreement": _top_class_agreement(wide),
    }


def _top_class_agreement(pairs: list[tuple[Array, Array]]) -> float | None:
    """Share of equal largest classes, for outputs [batch, classes] (further axes of 1); None for others."""
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
    """List the operators whose outputs lose most against their operands, for one sample: name, op, sqnr_db and
    lost_db."""
    proto = onnx.load(result)
    graph, values = Graph(proto), compute_tensors(result, sample, optimised=False)
    rows: list[dict[str, Any]] = [
        {"name": name, "op": graph.maker(name).op_type, "node": graph.maker(name).name, "float": None, "matched": None,
         "sqnr_db": None, "lost_db": None} for name in graph.makers if isinstance(values.get(name), np.ndarray)
    ]  # fmt: skip
    add_float_comparison(proto, graph, rows, values, sample, prepared)
    best: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["lost_db"] or 0.0, reverse=True):
        if row["node"] and row["op"] not in ("QuantizeLinear", "DequantizeLinear") and (row["lost_db"] or 0) > LOSES_DB:
            entry = {"name": row["node"], "op": row["op"], "sqnr_db": row["sqnr_db"], "lost_db": row["lost_db"]}
            best.setdefault(row["node"], entry)
    return list(best.values())[:TOLD]


def advise(
    losing: Sequence[Mapping[str, Any]], per_channel: bool, method: str, samples: int, smoothable: bool
) -> list[str]:  # fmt: skip
    """Advice where the result is poor, the cheapest first."""
    advice = []
    if not per_channel:
        advice.append("leave --per-tensor out: a scale for each output channel costs nothing on the accelerator")
    if samples < SAMPLES_ENOUGH:
        advice.append(f"more samples for --calibration, as the model sees them in use: {samples} are few")
    other_methods = [name for name in ("percentile", "entropy", "minmax") if name != method]
    advice.append(f"other ranges: --method {other_methods[0]}, or {other_methods[1]}")
    if smoothable:
        advice.append("--smooth auto, where a few channels are much larger than the others")
    if losing:
        advice.append(f"keep what loses most in floats, on the CPU: --exclude {losing[0]['name']}")
    advice.append("train the model with quantisation, so that it gets used to it: docs/pytorch.md")
    return advice


def list_operators(quantised: onnx.ModelProto, chosen: str, exclude: Sequence[str]) -> list[dict[str, Any]]:
    """List each operator of the model, and why it is not quantised. chosen: one of WHY_NOT, or "" for all that can
    be."""
    from onnxruntime.quantization.registry import QDQRegistry

    nodes = [node for node in quantised.graph.node if node.op_type not in ("QuantizeLinear", "DequantizeLinear")]
    pairs = {n.output[0] for n in quantised.graph.node if n.op_type == "DequantizeLinear"}
    floats = _float_names(quantised) - pairs
    rows = []
    for node in nodes:
        reason, operands = "", node.input[:1] if node.op_type in NORMS else node.input  # others of norms stay floats
        if not pairs.intersection(operands) or floats.intersection(operands):
            if node.name in exclude:
                reason = "it is excluded"
            elif chosen in WHY_NOT and node.op_type not in PRODUCTS:
                reason = WHY_NOT[chosen]
            elif node.op_type not in QDQRegistry:
                reason = "onnxruntime's quantiser has no rule for it"
            else:
                reason = "the quantiser's rule does not apply: no constant weights, no floats, or float neighbours"
        rows.append({"name": node.name, "op": node.op_type, "quantised": not reason, "reason": reason})
    return rows


def _float_names(model: onnx.ModelProto) -> set[str]:
    """Names of all values of a floating-point type."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info, *graph.output)}
    kinds |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    floats = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE, onnx.TensorProto.BFLOAT16}
    return {name for name, kind in kinds.items() if kind in floats}


def accelerator_share(quantised: onnx.ModelProto, cfg: Config, inputs: Sequence[Input]) -> dict[str, Any]:
    """Share of the quantised model that the accelerator takes, for `inputs` where it has open sizes, and why not the
    rest."""
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
