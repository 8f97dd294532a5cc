"""Compare the output shapes of windows that onnx infers with our own (compiler/program/host/window_geometry.py).

Where attributes are such that onnx is known to infer other shapes than onnxruntime makes, it is overruled. Where they
are not, another shape is a fault, of one or the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx

from celosia.compiler.ops import op_spec
from celosia.compiler.program.host.window_geometry import WindowError, transposed_windows, windows

Dims = tuple[int, ...]


def corrected_window_shapes(graph: onnx.GraphProto, inferred: onnx.GraphProto) -> dict[str, onnx.ValueInfoProto]:
    """Return the right shapes, by name, of outputs that onnx has inferred otherwise than onnxruntime computes them.

    The importer then infers again all that depends on them. Raises ValueError for attributes without a meaning, and for
    a difference at attributes for which onnx is known to be right.
    """
    known = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    types = {value.name: value.type.tensor_type for value in (*graph.input, *inferred.value_info, *inferred.output)}
    wrong: dict[str, onnx.ValueInfoProto] = {}
    tainted: set[str] = set()
    for node in graph.node:
        if tainted.intersection(node.input):
            tainted.update(node.output)
            continue
        if node.domain not in ("", "ai.onnx") or not op_spec(node.op_type).windows:
            continue
        place = op_spec(node.op_type).weights
        x, w, y = (_dims(known, types, name) for name in (node.input[0], node.input[place or 0], node.output[0]))
        if x is None or w is None or y is None or len(x) < 3:
            continue
        attrs = {attr.name: onnx.helper.get_attribute_value(attr) for attr in node.attribute}
        attrs["auto_pad"] = attrs.get("auto_pad", b"NOTSET").decode()
        label = f"{node.op_type} ({node.name or node.output[0]})"
        try:
            out = _out(node.op_type, attrs, x[2:], None if place is None else w[2:])
        except WindowError as error:
            raise ValueError(f"{label}: {error}") from None
        if out == y[2:]:
            continue
        is_partial = len(y) < len(x) and "output_shape" in attrs  # onnx stops where an output is shorter than the input
        if not (_onnx_may_differ(node.op_type, attrs) or is_partial) or len(y) < 2:
            raise ValueError(f"{label} has windows with {list(out)} outputs, of which onnx infers {list(y[2:])}")
        for name in filter(None, node.output):
            wrong[name] = onnx.helper.make_tensor_value_info(name, types[name].elem_type, [*y[:2], *out])
        tainted.update(node.output)
    return wrong


def _out(op: str, attrs: Mapping[str, Any], size: Dims, kernel: Dims | None) -> Dims:
    return (
        transposed_windows(attrs, size, kernel).out if op == "ConvTranspose" else windows(op, attrs, size, kernel).out
    )


def _onnx_may_differ(op: str, attrs: Mapping[str, Any]) -> bool:
    """Transposed: automatic padding where kernels are shorter than strides. Pooling: a last window that would begin
    outside (ceil_mode), and automatic padding, which onnxruntime makes without dilations and onnx with them."""
    same = attrs["auto_pad"] in ("SAME_UPPER", "SAME_LOWER")
    if op == "ConvTranspose":
        return same
    return op.endswith("Pool") and bool(attrs.get("ceil_mode") or (same and max(attrs.get("dilations") or [1]) > 1))


def _dims(known: Mapping[str, Dims], types: Mapping[str, Any], name: str) -> Dims | None:
    if name in known:
        return known[name]
    kind = types.get(name)
    if kind is None or not kind.HasField("shape") or not all(dim.HasField("dim_value") for dim in kind.shape.dim):
        return None
    return tuple(dim.dim_value for dim in kind.shape.dim)
