"""Element types, arrays and host operators are saved to files and loaded again."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper

from celosia.compiler.cpu.parse import parse
from celosia.compiler.program.dtypes import ONNX_TYPES, is_float, numpy_dtype
from celosia.compiler.program.program_file import array_bytes, load_array, load_op, op_bytes


@pytest.mark.parametrize("number", ONNX_TYPES)
def test_types_are_those_of_onnx(number: int) -> None:
    kind = numpy_dtype(ONNX_TYPES[number])
    assert kind == helper.tensor_dtype_to_np_dtype(number)
    if kind.kind != "O":
        try:
            ml_dtypes.finfo(kind)
            float_there = True
        except ValueError:
            float_there = False
        assert is_float(kind) == float_there


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3), np.array(2.5), np.array(["a", "ü"], object),
        np.arange(3).astype(ml_dtypes.bfloat16), np.arange(4).astype(ml_dtypes.int4).reshape(2, 2),
        np.zeros((0, 2), np.float32),
    ],
    ids=lambda array: array.dtype.name,
)  # fmt: skip
def test_arrays(array: np.ndarray) -> None:
    found = load_array(array_bytes(array))
    assert found.dtype == array.dtype and found.shape == array.shape and np.array_equal(found, array)


def test_operators_with_subgraphs() -> None:
    text = """
        <ir_version: 9, opset_import: ["" : 20]>
        g (float[2] x, bool c) => (float[2] y) {
            y = If (c) <
                then_branch = a () => (float[2] t) <float[2] k = {1, 2}> { t = Add (x, k) },
                else_branch = b () => (float[2] e) { e = LeakyRelu <alpha = 0.1> (x) }
            >
        }
    """
    op = parse(onnx.parser.parse_model(text).graph.node[0], {"": 20})
    found = load_op(op_bytes(op))

    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, np.ndarray) else repr(value)

    then, again = op.attrs["then_branch"], found.attrs["then_branch"]
    assert {k: plain(v) for k, v in then.constants.items()} == {k: plain(v) for k, v in again.constants.items()}
    assert (then.ops, then.captured, op.attrs["else_branch"]) == (again.ops, again.captured, found.attrs["else_branch"])
    assert (op.key, op.inputs, op.outputs, op.opset) == (found.key, found.inputs, found.outputs, found.opset)


@pytest.mark.parametrize("data", [b"[1]", b'{"a": 1}', b'{"<kind>": "HostOp"}', b"no"])
def test_what_is_no_operator(data: bytes) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        load_op(data)
