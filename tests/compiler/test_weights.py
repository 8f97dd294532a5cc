"""Products of floats by weights of 2, 4 and 8 bits (MatMulNBits and QDQ models) give onnxruntime's results."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper, shape_inference
from oracle import opened
from thorough import paired, some

import celosia
from celosia.compiler.graph.onnxruntime_rules.low_precision import round_activations
from celosia.driver.runtime import Runtime

CLOSE = 4e-6
"""Of the root mean square: the order of float32 sums. Bytes in the place of floats, or the reverse, are beyond FAR."""
FAR = 1e-3
TYPES = {
    "int2": TensorProto.INT2, "uint2": TensorProto.UINT2, "int4": TensorProto.INT4, "uint4": TensorProto.UINT4,
    "int8": TensorProto.INT8, "uint8": TensorProto.UINT8,
}  # fmt: skip
RNG = np.random.default_rng(0)


def onnxruntime(model: ModelProto, feed: dict[str, np.ndarray], level: str = "4") -> list[np.ndarray]:
    session = opened(model, int8=True, qdq_matmulnbits_accuracy_level=level)
    return list(session.run(None, feed))


def apart(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference, as a part of the root mean square of b."""
    return float(np.abs(a.astype(np.float64) - b).max() / np.sqrt((b.astype(np.float64) ** 2).mean()))


def packed(values: np.ndarray, bits: int) -> np.ndarray:
    """Pack integers of `bits` bits along the last axis into bytes, the low bits first."""
    count = 8 // bits
    padded = np.pad(values, [*[(0, 0)] * (values.ndim - 1), (0, -values.shape[-1] % count)])
    parts = padded.reshape(*padded.shape[:-1], -1, count)
    return np.bitwise_or.reduce(parts << np.arange(count) * bits, axis=-1).astype(np.uint8)


def n_bits(bits: int, size: int, zeros: bool, level: int, dtype: str, constants: tuple[int, ...]) -> Any:
    """Return a model of one MatMulNBits, and its inputs."""
    k, n = int(RNG.choice([size // 2 + 1, 2 * size, 2 * size + 5])), int(RNG.choice([1, 8, 33]))
    blocks, shape = -(-k // size), [(5, k), (1, k), (2, 3, k)][int(RNG.integers(3))]
    arrays = {
        "x": RNG.standard_normal(shape).astype(dtype),
        "w": packed(RNG.integers(0, 1 << bits, (n, blocks, size)), bits),
        "scale": RNG.uniform(0.01, 0.1, (n, blocks)).astype(dtype),
    }
    if zeros:
        arrays["zero"] = packed(RNG.integers(0, 1 << bits, (n, blocks)), bits)
    kept = {name for number, name in enumerate(arrays) if number in constants}
    attrs = dict(K=k, N=n, bits=bits, block_size=size, accuracy_level=level)
    node = helper.make_node("MatMulNBits", list(arrays), ["y"], domain="com.microsoft", **attrs)
    kind = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in arrays.items()}
    graph = helper.make_graph(
        [node], "g",
        [helper.make_tensor_value_info(name, kind[name], a.shape) for name, a in arrays.items() if name not in kept],
        [helper.make_tensor_value_info("y", kind["x"], (*shape[:-1], n))],
        [numpy_helper.from_array(arrays[name], name) for name in kept],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return model, {name: array for name, array in arrays.items() if name not in kept}


@pytest.mark.parametrize("sizes", some([[16, 64], [16, 32, 64, 128, 256]], [[16, 64]]), ids=len)
@pytest.mark.parametrize(("level", "bits"), paired([0, 1, 2, 3, 4], [2, 4, 8]))
def test_matmul_n_bits(level: int, bits: int, sizes: list[int]) -> None:
    for number, size in enumerate(sizes):
        dtype = "float16" if number == level else "float32"
        model, feed = n_bits(
            bits, size, zeros=bool((number + level) % 2), level=level, dtype=dtype, constants=(1, 2, 3)
        )
        wanted = onnxruntime(model, feed)[0]
        found = Runtime(celosia.compile(model, "tiny")).run(feed).outputs["y"]
        assert found.dtype == wanted.dtype
        assert apart(found, wanted) < (CLOSE if dtype == "float32" else 1.1e-3)


def test_blocks_of_zeros_and_of_denormal_numbers() -> None:
    model, feed = n_bits(4, 32, zeros=True, level=4, dtype="float32", constants=(1, 2, 3))
    feed["x"][..., :8] = 0
    feed["x"][..., 8:32] = np.float32(1e-40)
    for x in (feed["x"], np.zeros_like(feed["x"])):
        wanted = onnxruntime(model, {"x": x})[0]
        np.testing.assert_allclose(
            Runtime(celosia.compile(model, "tiny")).run({"x": x}).outputs["y"], wanted, 1e-5, 1e-5
        )


def test_weights_that_are_no_constants_are_multiplied_as_floats() -> None:
    model, feed = n_bits(4, 32, zeros=True, level=4, dtype="float32", constants=())
    found = Runtime(celosia.compile(model, "tiny")).run(feed).outputs["y"]
    assert apart(found, onnxruntime(model, feed)[0]) < CLOSE


@dataclass(frozen=True)
class Product:
    """A Gemm or MatMul by dequantised weights [128, 64], with later operators as (operator, inputs, output)."""

    type: str = "int4"
    size: int = 32
    axis: int = 0
    scale: tuple[int, ...] | None = None
    zeros: bool = True
    op: str = "MatMul"
    attrs: dict[str, Any] = field(default_factory=dict)
    inputs: str = "x wf"
    x: tuple[int, ...] = (4, 128)
    then: tuple[tuple[str, str, str], ...] = ()
    outputs: str = "y"


def model_of(p: Product) -> ModelProto:
    """Return the model of a Product.

    `row` [64], `rows` [1, 64], `step`, `low`, `flat` and `zero` are constants that `then` may read.
    """
    bits, signed = int(p.type[-1]), p.type[0] == "i"
    low, high = (-(1 << bits - 1), 1 << bits - 1) if signed else (0, 1 << bits)
    dims = list(p.scale) if p.scale is not None else [128, 64]
    if p.scale is None:
        dims[p.axis] = -(-dims[p.axis] // p.size)
    integers = {"w": RNG.integers(low, high, (128, 64)), "z": RNG.integers(low, high, dims)}
    floats = {"s": RNG.uniform(0.01, 0.1, dims), "row": RNG.standard_normal(64), "rows": RNG.standard_normal((1, 64)),
              "step": np.array(0.5), "low": np.array(0.0)}  # fmt: skip
    known = [helper.make_tensor(n, TYPES[p.type], a.shape, a.flatten().tolist()) for n, a in integers.items()]
    known += [numpy_helper.from_array(a.astype(np.float32), name) for name, a in floats.items()]
    known += [numpy_helper.from_array(np.uint8(120), "zero"), numpy_helper.from_array(np.array([-1]), "flat")]
    attrs = {"axis": p.axis, **({"block_size": p.size} if p.size else {})}
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s", *(["z"] if p.zeros else [])], ["wf"], **attrs),
        helper.make_node(p.op, p.inputs.split(), ["y"], **p.attrs),
        *(helper.make_node(op, inputs.split(), [out]) for op, inputs, out in p.then),
    ]
    if "xm" in p.inputs:
        nodes.insert(1, helper.make_node("Reshape", ["xf", "flat"], ["xm"]))
    if "xf" in nodes[1].input:
        nodes = [helper.make_node("QuantizeLinear", ["x", "step", "zero"], ["xq"]),
                 helper.make_node("DequantizeLinear", ["xq", "step", "zero"], ["xf"]), *nodes]  # fmt: skip
    names = ["x", *(["x2"] if any("x2" in inputs for _, inputs, _ in p.then) else [])]
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info(name, TensorProto.FLOAT, p.x) for name in names],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in p.outputs.split()],
        [tensor for tensor in known if tensor.name in used],
    )  # fmt: skip
    opset = helper.make_opsetid("", 25 if bits == 2 else 21)
    return shape_inference.infer_shapes(helper.make_model(graph, opset_imports=[opset], ir_version=12))


Q = (("QuantizeLinear", "y step zero", "q"), ("DequantizeLinear", "q step zero", "o"))
BYTES = [
    *(Product(kind, zeros=zeros) for kind in TYPES for zeros in (False, True)),
    *(Product(size=size) for size in (16, 64, 128, 256)),
    Product("int8", 0, 1, (64,)), Product("uint8", 0, 1, ()), Product("int4", 0, 1, (64,), zeros=False),
    Product(x=(2, 5, 128)), Product(x=(128,)),
    Product(op="Gemm"), Product(op="Gemm", inputs="x wf row"),
    Product(then=(("Add", "y row", "a"),), outputs="a"),
    Product(then=(("Relu", "y", "r"),), outputs="r"),
    Product(then=(("Relu", "y", "r"), ("Sigmoid", "r", "o")), outputs="o r"),
    Product(then=(("Relu", "y", "r"), ("Sigmoid", "r", "o"), ("Tanh", "y", "t")), outputs="o t"),
    Product(then=(("Sigmoid", "y", "t"), ("Relu", "t", "r"), ("Sigmoid", "r", "o")), outputs="o"),
    Product(x=(2, 3, 128), then=(("Add", "y row", "a"), ("Relu", "a", "r"), ("Sigmoid", "r", "o")), outputs="o"),
]  # fmt: skip
FLOATS = [
    Product(size=512), Product(size=8), Product(axis=1), Product(axis=-2), Product("int2", 16), Product("int2", 256),
    Product("int8", 0, -1, (64,)), Product("int8", 0, 0, (128,)), Product("int8", 0, 1, (1,)),
    Product(op="Gemm", attrs={"alpha": 0.5}), Product(op="Gemm", attrs={"beta": 0.5}, inputs="x wf row"),
    Product(op="Gemm", attrs={"transA": 1}, x=(128, 4)), Product(op="Gemm", inputs="x wf rows"),
    Product(inputs="xf wf"), Product(inputs="xm wf", x=(128,)),
    Product(then=(("MatMul", "x2 wf", "o"),), outputs="y o"),
    Product(then=(("Relu", "y", "r"), ("Sigmoid", "r", "o")), outputs="o"),
    Product(then=(("Relu", "y", "r"), ("Sigmoid", "r", "o")), outputs="o y"),
    Product(then=(("Clip", "y low", "r"), ("Reshape", "r flat", "o")), outputs="o"),
    Product(x=(2, 3, 128), then=(("Relu", "y", "r"), ("Sigmoid", "r", "o")), outputs="o"),
    Product(then=(("Add", "y row", "a"), ("Relu", "a", "r"), ("Sigmoid", "r", "o")), outputs="o"),
    Product(then=(("Add", "y rows", "a"),), outputs="a"),
]  # fmt: skip
QUICK = [*BYTES[:2], *BYTES[5:6], *BYTES[10:12], *BYTES[12:13], *BYTES[16:20], *BYTES[21::2], *FLOATS[::2]]
"""Types of four bits, with signs and without, types of eight bits, and half of the other forms."""


@pytest.mark.parametrize("product", some([*BYTES, *FLOATS], QUICK), ids=str)
def test_what_onnxruntime_makes_of_dequantised_weights(product: Product) -> None:
    """Products of bytes and products of floats are chosen as in onnxruntime."""
    model = model_of(product)
    feed = {value.name: RNG.standard_normal(product.x).astype(np.float32) for value in model.graph.input}
    found = Runtime(celosia.compile(model, "tiny")).run(feed).outputs
    for array, wanted in zip(found.values(), onnxruntime(model, feed), strict=True):
        assert apart(array, wanted) < CLOSE
    if product in BYTES:  # otherwise the comparison could not tell bytes from floats
        assert max(map(apart, onnxruntime(model, feed), onnxruntime(model, feed, level="1"))) > FAR


@pytest.mark.parametrize("moved", [False, True])
def test_a_result_that_is_quantised(moved: bool) -> None:
    """A quantised result differs from onnxruntime's in less than 1% of the elements.

    Floats that are rounded by blocks would differ more often.
    """
    then = (("Reshape", "y flat", "v"), ("QuantizeLinear", "v step zero", "q"), Q[1]) if moved else Q
    model = model_of(Product("int8", 0, 1, (64,), then=then, outputs="o"))
    feed = {"x": RNG.standard_normal((4, 128)).astype(np.float32)}
    found, wanted = Runtime(celosia.compile(model, "tiny")).run(feed).outputs["o"], onnxruntime(model, feed)[0]
    assert np.mean(found != wanted) < 0.01


def test_the_comparison_sees_what_is_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(round_activations.__globals__, "BYTES_OF_BLOCKS", {})
    with pytest.raises(AssertionError):
        test_what_onnxruntime_makes_of_dequantised_weights(BYTES[0])


ROWS, DEPTH, COLUMNS = 4, 64, 32
"""Of the products below, whose results can be added and multiplied again."""


class Network:
    """A random network of products by dequantised constants in all forms that exporters write.

    Operators share some constants. All products read inputs, so that a product of floats in place of one of bytes is
    found.
    """

    def __init__(self, seed: int, half: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        self.kind = np.float16 if half else np.float32
        self.nodes: list[NodeProto] = []
        self.known: dict[str, TensorProto] = {}
        self.inputs: dict[str, tuple[int, ...]] = {"x0": (ROWS, DEPTH), "x1": (DEPTH, ROWS), "x2": (2, 3, DEPTH)}
        self.outputs: list[str] = []
        self.results: list[str] = []
        for _ in range(int(self.rng.integers(2, 5))):
            self.product()
        for _ in range(int(self.rng.integers(3))):
            self.reader()
        self.outputs += [name for name in self.results if not any(name in node.input for node in self.nodes)]
        self.outputs += [str(self.rng.choice(self.results))] if self.rng.random() < 0.2 else []
        self.outputs = list(dict.fromkeys(self.outputs))

    def pick(self, *options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def chance(self, part: float) -> bool:
        return bool(self.rng.random() < part)

    def constant(self, array: np.ndarray, again: float = 0.4) -> str:
        """Return the name of a new constant, or of an existing one of the same type and shape."""
        alike = [n for n, t in self.known.items() if tuple(t.dims) == array.shape
                 and t.data_type == helper.np_dtype_to_tensor_dtype(array.dtype)]  # fmt: skip
        if alike and self.chance(again):
            return str(self.pick(*alike))
        name = f"c{len(self.known)}"
        self.known[name] = numpy_helper.from_array(np.asarray(array), name)
        return name

    def add(self, op: str, *inputs: str, **attrs: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=f"n{len(self.nodes)}", **attrs))
        return name

    def weights(self, turned: bool) -> str:
        """Append weights [DEPTH, COLUMNS], or transposed, dequantised from bytes or four bits."""
        shape = (COLUMNS, DEPTH) if turned else (DEPTH, COLUMNS)
        axis = 0 if turned else 1
        granularity = self.pick("one", "column", "column", "block")
        dims: tuple[int, ...] = {"one": (), "column": (COLUMNS,)}.get(granularity, (2, COLUMNS)[:: -1 if turned else 1])
        scale = np.float32(self.pick(0.02, 0.03)) if dims == () else self.rng.uniform(0.01, 0.1, dims)
        s = self.constant(np.asarray(scale, self.kind))
        signed = self.chance(0.5)
        byte = np.int8 if signed else np.uint8
        zero = [self.constant(self.rng.integers(1, 99, dims).astype(byte))] if self.chance(0.5) else []
        attrs: dict[str, Any] = {"axis": axis - 2 if self.chance(0.1) else axis} if turned or self.chance(0.5) else {}
        if granularity == "block":
            attrs = {"axis": 1 - axis, "block_size": 32}
        if granularity != "block" and self.chance(0.15):
            floats = self.constant(self.rng.standard_normal(shape).astype(self.kind))
            if not zero:
                zero = [self.constant(np.zeros(dims, byte), again=0)]
            q = self.add("QuantizeLinear", floats, s, *zero, axis=axis)
        else:
            q = self.constant(self.rng.integers(-99 if signed else 0, 99, shape).astype(byte))
        if self.chance(0.1):
            q = self.add("Identity", q)
        return self.add("DequantizeLinear", q, s, *zero, **attrs)

    def product(self) -> None:
        turned = self.chance(0.4)
        w = self.weights(turned)
        gemm = self.chance(0.35)
        attrs: dict[str, Any] = {}
        if turned and gemm and self.chance(0.3):
            attrs["transB"] = 1
        elif turned:
            w = self.add("Transpose", w, **({"perm": [1, 0]} if self.chance(0.7) else {}))
        if self.chance(0.1):
            w = self.add("Identity", w)
        x = self.pick("x0", "x0", "x1", "x0" if gemm else "x2")
        if x == "x1" and gemm and self.chance(0.5):
            attrs["transA"] = 1
        elif x == "x1":
            x = self.add("Transpose", x, perm=[1, 0])
        elif self.chance(0.2):
            x = self.add("Relu", x)
        row = self.rng.standard_normal(COLUMNS).astype(self.kind)
        if not gemm:
            y = self.add("MatMul", x, w)
            if x == "x2":
                self.outputs.append(y)
                return
            if self.chance(0.3):
                y = self.add("Add", *self.shuffled(y, self.constant(row)))
        elif self.chance(0.4):
            y = self.add("Gemm", x, w, self.constant(row), beta=self.pick(1.0, 0.5), **attrs)
        else:
            y = self.add("Gemm", x, w, alpha=self.pick(1.0, 1.0, 2.0), **attrs)
        self.results.append(y)

    def shuffled(self, *names: str) -> tuple[str, ...]:
        return names if self.chance(0.5) else names[::-1]

    def reader(self) -> None:
        y = str(self.pick(*self.results)) if self.results else ""
        if not y:
            return
        op = self.pick("Add", "Add", "Sum", "Relu", "Clip", "Transpose", "Mul", "Sigmoid")
        if op in ("Add", "Sum"):
            rows = self.constant(self.rng.standard_normal((ROWS, COLUMNS)).astype(self.kind))
            made = self.add(op, *self.shuffled(y, self.pick(rows, *self.results)))
        elif op == "Mul":
            made = self.add(op, y, self.constant(np.asarray(self.pick(0.02, 0.03), self.kind)))
        elif op == "Transpose":
            self.outputs.append(self.add("Transpose", y, perm=[1, 0]))
            return
        else:
            made = self.add(op, y)
        self.results.append(made)

    def model(self, condition: bool | None = None) -> ModelProto:
        """Return the model. condition: put all in a branch of an If, whose condition is a constant; False: an input."""
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.kind))
        used = {name for node in self.nodes for name in node.input}
        known = [tensor for name, tensor in self.known.items() if name in used]
        inputs = [helper.make_tensor_value_info(n, kind, dims) for n, dims in self.inputs.items()]
        outputs = [helper.make_tensor_value_info(name, kind, None) for name in self.outputs]
        graph = helper.make_graph(self.nodes, "g", inputs, outputs, known)
        if condition is not None:
            branch = helper.make_graph(self.nodes, "then", [], outputs, known)
            other = [helper.make_node("Abs", ["x0"], [f"{name}_other"]) for name in self.outputs]
            idle = helper.make_graph(
                other, "else", [], [helper.make_tensor_value_info(n.output[0], kind, None) for n in other]
            )
            taken = helper.make_node(
                "If", ["c"], [f"{n}_if" for n in self.outputs], then_branch=branch, else_branch=idle
            )
            given = [] if condition else [helper.make_tensor_value_info("c", TensorProto.BOOL, [])]
            graph = helper.make_graph(
                [taken], "g", [*inputs, *given],
                [helper.make_tensor_value_info(name, kind, None) for name in taken.output],
                [numpy_helper.from_array(np.array(True), "c")] if condition else [],
            )  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

    def feed(self, model: ModelProto) -> dict[str, np.ndarray]:
        fed = {name: self.rng.standard_normal(dims).astype(self.kind) for name, dims in self.inputs.items()}
        names = {value.name for value in model.graph.input}
        return {name: array for name, array in (*fed.items(), ("c", np.array(True))) if name in names}


CONFIGS = ("tiny", "pynq", "wide")
FORMS = ("plain", "half", "branch", "constant")
"""How a network is written: in float32 or float16, or in a branch that is taken, of a condition that is an input or a
constant."""
NETWORKS = [(seed, form) for seed in range(200) for form in FORMS]


def accepted(seed: int, form: str) -> tuple[onnx.ModelProto, dict[str, Any], list[Any]]:
    """Return a random network, its inputs and onnxruntime's outputs, for the first seed that onnxruntime accepts.

    onnxruntime refuses networks whose sizes do not fit.
    """
    for candidate in range(seed, seed + 10_000, 1000):
        network = Network(candidate, half=form == "half")
        model = network.model({"branch": False, "constant": True}.get(form))
        feed = network.feed(model)
        with suppress(Exception):
            return model, feed, onnxruntime(model, feed)
    raise AssertionError("onnxruntime refuses all of them")


@pytest.mark.parametrize(("seed", "form"), some(NETWORKS, [(seed, FORMS[seed % 4]) for seed in range(1, 6)]))
def test_random_networks_decide_as_onnxruntime(seed: int, form: str) -> None:
    """Random networks compute products of bytes or of floats as onnxruntime does.

    The wrong choice gives a difference above FAR. Sums of terms that cancel may differ by more than CLOSE.
    """
    model, feed, wanted = accepted(seed, form)
    found = Runtime(celosia.compile(model, CONFIGS[seed % 3])).run(feed).outputs
    for array, expected in zip(found.values(), wanted, strict=True):
        if expected.any():
            assert apart(array, expected) < (8 * CLOSE if form != "half" else 1.1e-3)
        else:
            assert not array.any()
