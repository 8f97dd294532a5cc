"""The compiler proves that samples are independent: tests of each rule, random graphs, and graphs to refuse."""

from __future__ import annotations

from collections import Counter
from typing import Any

import graph_text
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from oracle import opened
from thorough import tries

from celosia.compiler.graph.importer import import_model, open_model
from celosia.compiler.graph.importing.dimensions import with_shapes
from celosia.compiler.graph.importing.sample_independence import why_samples_mix

Array = NDArray[Any]


def reason(proto: onnx.ModelProto, samples: int = 1) -> str:
    """Return why samples mix in a model whose inputs have a first axis `n`, or ""."""
    proto, name = open_model(proto)
    inputs = [value.name for value in proto.graph.input if value.type.tensor_type.shape.dim[0].dim_param == "n"]
    return why_samples_mix(import_model(with_shapes(proto, {}, {"n": samples}), name), inputs)


CHAIN = f"""g (float[n,3,8,8] x, float[n,4] z) => (float[n,10] y, float[n,2,4] s)
    <float[4,3,3,3] w = {{{",".join("1" * 108)}}}, float[8,10] v = {{{",".join("1" * 80)}}}, float[1,4] m = {{1,2,3,4}},
     int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] four = {{4}}, int64[1] last = {{-1}},
     float[1,2,4] token = {{1,2,3,4,5,6,7,8}}> {{
    c = Conv<pads=[1,1,1,1]>(x, w)
    p = GlobalAveragePool(c)
    f = Flatten(p)
    a = Add(f, m)
    b = Concat<axis=1>(a, z)
    y = MatMul(b, v)
    counted = Shape<end=1>(x)
    number = Squeeze(counted)
    count = Reshape(number, last)
    both = Concat<axis=0>(count, two, four)
    e = Expand(token, both)
    row = Concat<axis=0>(count, one, four)
    g = Reshape(a, row)
    h = Transpose<perm=[0,2,1]>(e)
    i = Transpose<perm=[0,2,1]>(h)
    s = Add(i, g)
}}"""


@pytest.mark.parametrize("samples", [1, 3])
def test_a_chain_that_leaves_samples_alone(samples: int) -> None:
    assert not reason(graph_text.proto(CHAIN, opset=17), samples)


X = "g (float[n,4] x) => (float[{}] y)"
MIXED = {
    "a softmax over samples": ("n,4", "y = Softmax<axis=0>(x)", r"Softmax \(y\).*axis 0 counts samples"),
    "a sum of samples": ("4", "y = ReduceSum<keepdims=0>(x, a0)", "axis 0 counts samples"),
    "a sum of all": ("", "y = ReduceSum<keepdims=0>(x)", "it reduces all axes"),
    "a transpose": ("4,n", "y = Transpose(x)", "moves the axis"),
    "samples joined": ("1,m", "y = Reshape(x, one_rest)", "has the size 1 for any number of samples"),
    "samples cut": ("m,2", "y = Reshape(x, rest_two)", "joins or cuts samples"),
    "flat": ("1,m", "y = Flatten<axis=0>(x)", "joins samples"),
    "a product with its transpose": ("n,m", "t = Transpose(x) y = MatMul(x, t)", r"Transpose \(t\)"),
    "a mean by their number": (
        "n,4", "s = Shape<end=1>(x) f = Cast<to=1>(s) y = Div(x, f)", r"Div \(y\) computes with the number of samples"),
    "a part for each sample": ("n,4", "y = Add(x, two_rows)", "has a part for each sample"),
    "one axis fewer": ("n,n,4", "u = Unsqueeze(x, a0) y = Add(u, x)", r"Unsqueeze \(u\)"),
    "broadcasting against others": ("n,n,4", "u = Unsqueeze(x, a1) y = Add(u, x)", "'x' has fewer axes"),
    "some samples": ("m,4", "y = Slice(x, zero, a1)", "may take some samples only"),
    "one sample": ("4", "y = Gather(x, first)", "axis 0 counts samples"),
    "samples twice": ("m,4", "y = Concat<axis=0>(x, x)", "axis 0 counts samples"),
    "another at the end": ("m,4", "y = Pad(x, more)", "adds samples"),
    "a running sum": ("n,4", "y = CumSum(x, first)", "axis 0 counts samples"),
    "as many columns": (
        "n,m", "s = Shape<end=1>(x) t = Concat<axis=0>(a1, s) y = Tile(x, t)", r"Tile \(y\) computes"),
    "dynamic quantisation": ("n,4", "q, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(q, s, z)", "may mix"),
    "random numbers": ("n,4", "r = RandomNormalLike(x) y = Add(x, r)", "RandomNormalLike"),
    "their number": ("1", "s = Shape<end=1>(x) y = Cast<to=1>(s)", "output 'y' does not count samples"),
    "nothing of them": ("4", "y = Identity(row)", "output 'y' does not count samples"),
}  # fmt: skip
CONSTANTS = """<int64[1] a0 = {0}, int64[1] a1 = {1}, int64[1] zero = {0}, int64 first = {0},
    int64[2] one_rest = {1, -1}, int64[2] rest_two = {-1, 2}, int64[4] more = {0, 0, 1, 0},
    float[2,4] two_rows = {1,2,3,4,5,6,7,8},
    float[4] row = {1,2,3,4}>"""


@pytest.mark.parametrize("what", MIXED)
@pytest.mark.parametrize("samples", [1, 2])
def test_what_mixes_samples_is_found(what: str, samples: int) -> None:
    dims, nodes, words = MIXED[what]
    proto = graph_text.proto(f"{X.format(dims)} {CONSTANTS} {{ {nodes} }}", opset=17)
    found = reason(proto, samples)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(found)


class Graphs:
    """Builds random operators on x [n, 4, 6], most of which keep samples independent."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.name, self.shape = "x", (0, 4, 6)  # 0 stands for n

    def constant(self, array: Any) -> str:
        self.constants.append(numpy_helper.from_array(np.asarray(array), f"c{len(self.constants)}"))
        return f"c{len(self.constants) - 1}"

    def floats(self, *shape: int) -> str:
        seed = self.draw(st.integers(0, 99))
        return self.constant(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))

    def node(self, op: str, *inputs: str, **attrs: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [f"v{len(self.nodes)}"], **attrs))
        return f"v{len(self.nodes) - 1}"

    def axis(self) -> int:
        rank = len(self.shape)
        return self.draw(st.sampled_from([*range(rank), *range(-rank, 0)]))

    def add(self) -> None:
        kind = self.draw(st.sampled_from([
            "unary", "scalar", "self", "row", "softmax", "reduce", "transpose", "reshape", "matmul", "slice", "gather",
            "concat", "cumsum", "unsqueeze", "norm", "square",
        ]))  # fmt: skip
        x, shape, rank = self.name, self.shape, len(self.shape)
        if kind == "unary":
            self.name = self.node(self.draw(st.sampled_from(["Tanh", "Neg", "Sigmoid"])), x)
        elif kind == "scalar":
            self.name = self.node("Mul", x, self.floats())
        elif kind == "self":
            self.name = self.node("Add", x, self.node("Neg", x) if self.draw(st.booleans()) else x)
        elif kind == "row":
            self.name = self.node("Add", x, self.floats(*[max(n, 1) for n in shape[self.draw(st.integers(0, rank)) :]]))
        elif kind == "softmax":
            self.name = self.node("Softmax", x, axis=self.axis())
        elif kind == "reduce" and rank > 1:
            axis, keep = self.axis(), self.draw(st.booleans())
            self.name = self.node("ReduceMean", x, axes=[axis], keepdims=int(keep))
            place = axis % rank
            self.shape = (*shape[:place], *([1] if keep else []), *shape[place + 1 :])
        elif kind == "transpose":
            order = self.draw(st.permutations(range(rank)))
            self.name, self.shape = self.node("Transpose", x, perm=order), tuple(shape[k] for k in order)
        elif kind == "reshape" and rank > 1:
            first = self.draw(st.sampled_from([0, -1, 1]))
            rest = int(np.prod([n for n in shape if n]))
            cut = self.draw(st.sampled_from([(rest,), (rest // 2, 2), (2, -1), (-1,), (rest * 2,)]))
            dims = [first, *cut]
            if dims.count(-1) > 1:
                return
            if self.draw(st.booleans()) and first == 0:
                count = self.node("Shape", x, start=0, end=1)
                target = self.node("Concat", count, self.constant(np.array(cut, np.int64)), axis=0)
            else:
                target = self.constant(np.array(dims, np.int64))
            self.name = self.node("Reshape", x, target)
            self.shape = (0, *(n if n > 0 else rest // max(1, -int(np.prod(cut))) for n in cut))
        elif kind == "matmul" and rank > 1 and shape[-1]:
            self.name, self.shape = self.node("MatMul", x, self.floats(shape[-1], 5)), (*shape[:-1], 5)
        elif kind == "square" and rank > 1:
            turned = self.node("Transpose", x, perm=[*range(rank - 2), rank - 1, rank - 2])
            self.name, self.shape = self.node("MatMul", x, turned), (*shape[:-1], shape[-2])
        elif kind == "slice" and rank:
            axis = self.axis()
            parts = [self.constant(np.array([v], np.int64)) for v in (0, 1, axis)]
            self.name = self.node("Slice", x, *parts)
            self.shape = tuple(1 if a == axis % rank else n for a, n in enumerate(shape))
        elif kind == "gather" and rank > 1:
            axis = self.axis()
            self.name = self.node("Gather", x, self.constant(np.array(0)), axis=axis)
            self.shape = tuple(n for a, n in enumerate(shape) if a != axis % rank)
        elif kind == "concat":
            axis = self.axis()
            self.name = self.node("Concat", x, x, axis=axis)
            self.shape = tuple(2 * n if a == axis % rank else n for a, n in enumerate(shape))
        elif kind == "cumsum":
            self.name = self.node("CumSum", x, self.constant(np.array(self.axis())))
        elif kind == "unsqueeze":
            place = self.draw(st.integers(0, rank))
            self.name = self.node("Unsqueeze", x, self.constant(np.array([place])))
            self.shape = (*shape[:place], 1, *shape[place:])
        elif kind == "norm" and shape[-1]:
            self.name = self.node("LayerNormalization", x, self.floats(shape[-1]), axis=-1)

    def model(self) -> onnx.ModelProto:
        self.nodes.append(helper.make_node("Identity", [self.name], ["y"]))
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4, 6])
        y = onnx.ValueInfoProto(name="y")
        y.type.tensor_type.elem_type = TensorProto.FLOAT
        graph = helper.make_graph(self.nodes, "g", [x], [y], self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def outputs(proto: onnx.ModelProto, x: Array) -> Array:
    return np.asarray(opened(proto).run(None, {"x": x})[0])


def test_what_is_proved_holds() -> None:
    """Samples of a proved graph give the same results alone and together, in onnxruntime."""
    seen: Counter[bool] = Counter()

    @settings(max_examples=tries(100), deadline=None)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        graphs = data.draw(st.composite(Graphs)())
        for _ in range(data.draw(st.integers(1, 6))):
            graphs.add()
        proto = graphs.model()
        x = np.random.default_rng(data.draw(st.integers(0, 99))).standard_normal((3, 4, 6)).astype(np.float32)
        try:
            proved = not reason(proto)
        except ValueError:  # no model for one sample
            return
        seen[proved] += 1
        if proved:
            whole = outputs(proto, x)
            assert len(whole) == 3
            for number in range(3):
                np.testing.assert_allclose(
                    outputs(proto, x[number : number + 1])[0], whole[number], rtol=1e-5, atol=1e-6
                )

    check()
    assert min(seen[True], seen[False]) >= tries(20)
