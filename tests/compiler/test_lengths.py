"""The compiler knows lengths of ranges between open sizes."""

from __future__ import annotations

import graph_text
import pytest

from celosia.compiler.graph.importer import import_model, open_model
from celosia.compiler.graph.importing.shape_inference import fixed_ranges

KNOWN = {
    "a constant more": ("t = Add(p, three) y = Range(p, t, one)", 3),
    "less": ("t = Sub(p, three) y = Range(t, p, one)", 3),
    "in steps of two": ("t = Add(p, three) y = Range(p, t, two)", 2),
    "backwards, so nothing": ("t = Add(p, three) y = Range(t, p, one)", 0),
    "by way of lists": ("l = Unsqueeze(p, zero) m = Concat<axis=0>(l, list) g = Gather(m, zero) s = Squeeze(g) "
                        "t = Add(p, three) u = Identity(t) y = Range(s, u, one)", 3),
    "of two tensors of one size": ("q = Shape<start=1>(z) r = Squeeze(q) t = Add(p, three) y = Range(r, t, one)", 3),
    "open sizes added on both sides": ("d = Add(p, p) t = Add(d, three) y = Range(d, t, one)", 3),
}  # fmt: skip
OPEN = {
    "from 0 to an open size": "y = Range(nought, p, one)",
    "between two names": "q = Shape<end=1>(z) r = Squeeze(q) y = Range(p, r, one)",
    "twice as many": "d = Add(p, p) y = Range(p, d, one)",
    "steps that are open": "t = Add(p, three) y = Range(p, t, p)",
    "steps back": "t = Add(p, three) y = Range(p, t, back)",
    "a product": "d = Mul(p, two) t = Add(d, three) y = Range(d, t, one)",
    "a value": "v = ReduceMax<keepdims=0>(n) t = Add(v, three) y = Range(p, t, one)",
    "a gather beyond the list": "l = Gather(list, far) t = Add(l, three) y = Range(l, t, one)",
}
CONSTANTS = """<int64[1] zero = {0}, int64 nought = {0}, int64 one = {1}, int64 two = {2}, int64 three = {3},
    int64 back = {-1}, int64[2] list = {7, 8}, int64 far = {2}>"""


def found(nodes: str) -> dict[str, list[int]]:
    source = f"""g (float[past, 4] x, float[m, past] z, int64[k] n) => (int64[count] y) {CONSTANTS}
        {{ s = Shape<end=1>(x) p = Squeeze(s) {nodes} }}"""
    ranges = fixed_ranges(graph_text.onnx.shape_inference.infer_shapes(graph_text.proto(source, opset=17)).graph)
    return {name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for name, value in ranges.items()}


@pytest.mark.parametrize("what", KNOWN)
def test_a_difference_that_is_known(what: str) -> None:
    nodes, count = KNOWN[what]
    assert found(nodes) == {"y": [count]}


@pytest.mark.parametrize("what", OPEN)
def test_a_difference_that_is_open(what: str) -> None:
    assert found(OPEN[what]) == {}


def test_shapes_that_follow_are_known() -> None:
    source = f"""g (float[past, 4] x) => (float[rows, 4] y) {CONSTANTS}
        {{ s = Shape<end=1>(x) p = Squeeze(s) t = Add(p, three) r = Range(p, t, one) y = Gather(table, r) }}"""
    proto = graph_text.proto(
        source.replace("int64 far = {2}>", "int64 far = {2}, float[2,4] table = {1,2,3,4,5,6,7,8}>")
    )
    model = import_model(*open_model(proto))
    assert list(model.graph.outputs[0].shape or ()) == [3, 4]
