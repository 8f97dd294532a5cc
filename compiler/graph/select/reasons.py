"""Texts for users: why a node that is no integer operator stays on the CPU, and what would change that."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from celosia.compiler.graph.qdq import MADE_OF, dequantised, quantised
from celosia.compiler.graph.quantized.commute import MAXIMA
from celosia.compiler.graph.quantized.integerise import PER_CHANNEL_OPSET, QUANTISABLE, is_function_of_one
from celosia.compiler.graph.quantized.rounded import NORMS, WHY
from celosia.compiler.graph.quantized.tables import ELEMENTWISE_OPS
from celosia.compiler.graph.select.movement import SAME_BYTES
from celosia.compiler.graph.select.placement import NO_WAY
from celosia.compiler.graph.values import attribute, constant, is_op, only_use
from celosia.compiler.ops import op_spec
from celosia.compiler.program.op_spec import quantised_forms

CHOSEN = ("placed on the CPU",)
"""Reasons that are the user's own choice; they need no advice."""
# Parts of reasons: before the semicolon why, after it what to do.
FLOAT = "it is float"
QUANTISE = "`celosia quantize` makes an int8 model"
PAIR = "QuantizeLinear and DequantizeLinear"
RESULT = f"its output is float; put {PAIR} after it"
WEIGHTS = "its weights are float; quantise them to int8, too"
OLD_WEIGHTS = (
    f"its weights are float, or have a scale for each channel, which opsets before {PER_CHANNEL_OPSET} do not know; "
    f"export the model with opset {PER_CHANNEL_OPSET} or later, and quantise them"
)
STEPS = (
    "its weights have {}, and integer operators take 8 bits or fewer with a float32 scale for all or for each output "
    "channel; quantise them so"
)
MISMATCH = (
    "its types, scales, bias or attributes are not those of an integer operator; quantise operands and result to one "
    "8-bit type, and a bias to int32 in steps of the operands' scales"
)
BY_BLOCKS = {
    "QuantizeBlocks": "each block of each row has a scale of its own, which is known when it runs; quantise statically",
    "ScaleSums": "each block of sums has a scale of its own, and their sum is one of floats; quantise without blocks",
}
"""Operator of block-quantised products (graph/block_sums.py) -> its reason."""
ONLY_IMAGES = "the accelerator reduces all rows and columns of images [N, C, H, W] of bytes, and no other axes"
EXPORT = "export the model with attributes that fit its shapes"
"""Advice for an operator whose attributes do not fit its shapes."""
TILING = "give the Config deeper scratchpads or other units, or the layer fewer channels or a smaller window"
"""Advice for an operator whose layer has no tiling."""
BYTES = (ir.DataType.INT8, ir.DataType.UINT8)
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE, ir.DataType.BFLOAT16)
"""Element types of bytes, and of floats."""


def is_float(graph: ir.Graph) -> bool:
    """Whether nothing in `graph` is quantised."""
    return not any("DequantizeLinear" in node.op_type or node.op_type.startswith("QLinear") for node in graph)


def with_change(reason: str, change: str) -> str:
    """Return `reason` with the advice `change`, unless it has advice already or is a choice (of the user or by
    cost)."""
    return reason if "; " in reason or reason in CHOSEN or reason.startswith("weighed:") else f"{reason}; {change}"


def why_on_cpu(node: ir.Node, opset: int, in_floats: bool) -> str:
    """Return why `node` stays on the CPU, and what the user can do about it.

    in_floats: whether the model has no quantised tensor.
    """
    if is_op(node, "QuantizeLinear", "DequantizeLinear"):
        return _why_conversion(node)
    kind = node.outputs[0].dtype
    if kind is not None and kind not in (*FLOATS, *BYTES):
        return f"it computes {kind.name.lower()}, and the accelerator bytes; {NO_WAY}"
    if node.op_type in ("Block", "Unblock"):
        return "it arranges floats for the float operators around it; quantise those"
    if node.op_type == "MatMulIntegerToFloat":
        return RESULT
    if node.op_type in BY_BLOCKS:
        return BY_BLOCKS[node.op_type]
    if node.meta.get(WHY):
        return with_change(f"{FLOAT}, and stays so: {node.meta[WHY]}", NO_WAY)
    if is_op(node, *NORMS) and not in_floats:
        return 'it is onnxruntime\'s, in floats; rounding="correct" makes it integers, for a Config with norm, too'
    if not _has_integers(node):
        op = _unblocked_name(node)
        if is_op(node, *ELEMENTWISE_OPS):
            return with_change(f"the accelerator computes {op} only of one tensor and constants of one element", NO_WAY)
        return f"the accelerator has no {op}; the CPU computes it, and {NO_WAY}"
    if is_op(node, *MAXIMA) and not in_floats:
        return with_change(ONLY_IMAGES, NO_WAY)
    return f"{FLOAT}; {QUANTISE}" if in_floats else _why_float(node, opset)


def _why_conversion(node: ir.Node) -> str:
    """Return why a QuantizeLinear or DequantizeLinear stays on the CPU."""
    if constant(node.inputs[1]) is None:
        return "its scale is not constant; quantise statically (`celosia quantize` does)"
    x, y = node.inputs[0], node.outputs[0]
    if y.is_graph_output() or (x is not None and x.is_graph_input()):
        return (
            "the model's border: the host turns floats into bytes and back; a model of int8 inputs and outputs has none"
        )
    for other in _float_neighbours(node):
        if not _has_integers(other):
            return f"it stands between bytes and {other.op_type}, which is in floats; {NO_WAY}"
    return "it stands between a float operator and bytes; quantise that operator, too"


def _float_neighbours(node: ir.Node) -> Iterator[ir.Node]:
    """Yield the operators that make the floats of a QuantizeLinear, or read those of a DequantizeLinear.

    Operators that only arrange elements are skipped.
    """
    waiting, quantises = [node], node.op_type == "QuantizeLinear"
    while waiting:
        current = waiting.pop()
        producer = current.inputs[0].producer() if current.inputs[0] is not None else None
        for other in [producer] if quantises else [use.node for use in current.outputs[0].uses()]:
            if other is not None and (other.op_type in ("Block", "Unblock") or is_op(other, *SAME_BYTES)):
                waiting.append(other)
            elif other is not None:
                yield other


def _unblocked_name(node: ir.Node) -> str:
    """Return the operator type that `node` had before it was changed to work on blocks of channels."""
    return node.op_type.removeprefix("Blocked")


def _has_integers(node: ir.Node) -> bool:
    """Whether there is an integer operator for the float operator `node`."""
    known = node.domain in ("", "ai.onnx", "celosia", "com.microsoft")
    return known and (_unblocked_name(node) in QUANTISABLE or is_function_of_one(node))


def _why_weights(node: ir.Node, opset: int) -> str:
    """Return why the float weights of a product are not those of an integer operator.

    "" if they were dequantised from integers of which an integer operator could be made.
    """
    w = node.inputs[1]
    steps = w.meta.get(MADE_OF)  # type: ignore[union-attr]
    if steps is None or opset < PER_CHANNEL_OPSET:
        return WEIGHTS if steps is None and opset >= PER_CHANNEL_OPSET else OLD_WEIGHTS
    first = op_spec(_unblocked_name(node)).windows or attribute(node, "transB", 0)
    of_outputs = 0 if first else len(w.shape or ()) - 1  # type: ignore[union-attr]
    if not steps.obstacle and steps.axis not in (None, of_outputs):
        return STEPS.format(f"a scale for each element of axis {steps.axis}")
    return STEPS.format(steps.obstacle) if steps.obstacle else ""


def _why_float(node: ir.Node, opset: int) -> str:
    """Return why `node` is still float, though it has a quantised form and other operators of the model are
    quantised."""
    operands = [_before_blocks(value) for value in node.inputs if value is not None and value.dtype in FLOATS]
    varying = [value for value in operands if constant(value) is None]
    pairs = [value for value in varying if is_op(value.producer(), "DequantizeLinear")]
    if not pairs:
        return f"{FLOAT} among quantised operators; put {PAIR} around it, too"
    for value in varying:
        if value not in pairs:
            return f"its input {value.name!r} is float; quantise what makes that, or put {PAIR} after it"
    if any(op_spec(form).multiplies_bytes for form in quantised_forms(_unblocked_name(node))):
        w = node.inputs[1]
        if w in operands and w not in varying and (why := _why_weights(node, opset)):
            return why
    for value in pairs:
        if dequantised(value) is None:
            return f"{value.name!r} is not int8 or uint8, or its scale is no float32 constant; quantise it to 8 bits"
    y = _after_blocks(node.outputs[0])
    if quantised(y) is None:
        several = len(y.uses()) > 1 and any(is_op(use.node, "QuantizeLinear") for use in y.uses())
        others = "its float output has other readers beside QuantizeLinear; let them read the DequantizeLinear after it"
        return others if several else RESULT
    return MISMATCH


def _before_blocks(value: ir.Value) -> ir.Value:
    """Return the tensor that `value` holds in blocks of channels; `value` itself if it is not blocked."""
    producer = value.producer()
    return producer.inputs[0] if is_op(producer, "Block") else value  # type: ignore[union-attr,return-value]


def _after_blocks(value: ir.Value) -> ir.Value:
    """Return the tensor that the only reader of `value` makes by undoing blocks of channels; else `value` itself."""
    reader = only_use(value)
    return reader.outputs[0] if is_op(reader, "Unblock") else value  # type: ignore[union-attr]
