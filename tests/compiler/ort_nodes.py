"""Execute models of one operator in onnxruntime: the reference of the numerics tests."""

from functools import cache
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike, DTypeLike, NDArray
from onnx import helper

from ..oracle import opened

Array = NDArray[Any]


def run_node(op: str, *inputs: Array, out: DTypeLike, domain: str = "com.microsoft", **attributes: Any) -> Array:
    """Return the output of one node. Every input is an input of the model, so that one session serves many scales."""
    key = (op, domain, tuple((a.dtype.str, a.ndim) for a in inputs), np.dtype(out).str, tuple(attributes.items()))
    result: Array = _session(*key).run(None, {f"i{k}": a for k, a in enumerate(inputs)})[0]
    return result


def f32(value: ArrayLike) -> Array:
    return np.array(value, np.float32)


@cache
def _session(
    op: str, domain: str, inputs: tuple[tuple[str, int], ...], out: str, attributes: tuple[tuple[str, Any], ...]
) -> Any:
    names = [f"i{k}" for k in range(len(inputs))]
    node = helper.make_node(op, names, ["y"], domain=domain, **dict(attributes))
    graph = helper.make_graph(
        [node],
        op,
        [_value(name, dtype, [f"{name}_{d}" for d in range(ndim)]) for name, (dtype, ndim) in zip(names, inputs)],
        [_value("y", out, None)],
    )
    opsets = [helper.make_opsetid("", 24 if op == "Swish" else 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return opened(model)


def _value(name: str, dtype: str, shape: list[str] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
