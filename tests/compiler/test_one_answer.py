"""Operators with several implementations (kernel, host, self-check) give one answer.

Each runs on the inputs of ONNX's node tests and on extreme values. The reference is onnxruntime if it runs the
operator, else the first implementation.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import helper
from thorough import paired, some

from celosia.compiler.cpu.kernels import compile_op
from celosia.compiler.cpu.parse import parse
from celosia.compiler.ops import OPS, Unsupported, op_spec
from celosia.compiler.ops.registry import TYPES, InputType
from celosia.compiler.program.host.hostops import HOST, RANDOM, sized_function
from celosia.compiler.program.host.op import DOMAINS, HostError, HostOp
from celosia.compiler.selfcheck import operator_results
from celosia.compiler.selfcheck.imported_model import QUICK

from ..oracle import opened
from .onnx_nodes import cases, slow_cases

Array = NDArray[Any]
Value = Any
INDICES = {"Gather": (1,), "GatherElements": (1,), "GatherND": (1,), "TopK": (1,), "CumSum": (1,), "Where": (0,)}
"""Inputs that say where, not what."""
SUMS = frozenset(
    ["BatchNormalization", "Conv", "CumSum", "Gemm", "GlobalAveragePool", "GRU", "LSTM", "MatMul", "ReduceMean",
     "ReduceProd", "ReduceSum", "RNN", "Softmax", "LogSoftmax"]
)  # fmt: skip
"""What large numbers add up to depends on the order; infinities do not."""
NO_NAN_RULE = frozenset(
    ["ArgMax", "ArgMin", "GRU", "LogSoftmax", "LSTM", "MaxPool", "ReduceMax", "ReduceMin", "RNN", "TopK"]
)
"""onnxruntime's answer to what is no number depends on the order of comparisons; see docs/numerics.md."""
ELSEWHERE = frozenset(["Cast", "CastLike", "DequantizeLinear", "QuantizeLinear"])
"""Floats beyond an integer type are onnxruntime's own; see docs/numerics.md, and test_numerics.py for steps."""
DTYPES = (
    "float32", "float16", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"
)  # fmt: skip
TOLERANCE = {"float16": 2e-3, "float32": 2e-5, "float64": 1e-9}


@dataclass(frozen=True)
class NodeCase:
    """A node test of one operator: its model, the operator, and its inputs in the operator's order."""

    name: str
    model: onnx.ModelProto
    op: HostOp
    inputs: tuple[Array | None, ...]

    @property
    def data(self) -> list[int]:
        """Return the numbers of the inputs whose values are arbitrary."""
        fixed = {*op_spec(self.op.op).shape_inputs, *INDICES.get(self.op.op, ())}
        return [
            k for k, x in enumerate(self.inputs)
            if x is not None and k not in fixed and x.dtype.name in DTYPES
        ]  # fmt: skip


@functools.cache
def node_cases() -> dict[str, list[NodeCase]]:
    """Return the node tests with arrays for all inputs, for each operator with several implementations."""
    by_operator = by_name(cases("node"))
    return {op: by_operator[op] for op in sorted(by_operator)}


def by_name(node_tests: dict[str, Any]) -> dict[str, list[NodeCase]]:
    """Return node tests by the name of their operator, as `node_cases` does."""
    by_operator: dict[str, list[NodeCase]] = defaultdict(list)
    for name, case in node_tests.items():
        model = case.model
        if model is None or len(model.graph.node) != 1 or name.endswith("_expanded"):
            continue
        node = model.graph.node[0]
        if node.op_type not in several() or node.op_type in RANDOM:
            continue
        op = parse(node, {opset.domain: opset.version for opset in model.opset_import})
        arrays = dict(zip((value.name for value in model.graph.input), case.data_sets[0][0]))
        inputs = tuple(arrays[name] if name else None for name in node.input)
        if all(x is None or isinstance(x, np.ndarray) for x in inputs):
            by_operator[op.op].append(NodeCase(name, model, op, inputs))
    return by_operator


def several() -> frozenset[str]:
    """Return the names of operators that may have several implementations."""
    return frozenset({*OPS, *QUICK} & {*(name for _, name in HOST), *SIZED, *QUICK})


SIZED = frozenset(
    name for name in OPS
    if sized_function(HostOp(name, "", "", (), (), {}, 21, b"")) is not None
)  # fmt: skip


def kernel(op: HostOp, args: Sequence[Array | None], data: Sequence[int]) -> list[Array]:
    """Return the outputs of the kernel of compiler/ops, for which sizes and indices are constants."""
    inputs = [
        None if x is None else InputType(x.shape, x.dtype.name, None if k in data else x) for k, x in enumerate(args)
    ]
    compiled = compile_op(op.op, op.attrs, inputs, outputs=op.wanted, opset=op.opset)
    return compiled(*(x for x in args if x is not None))


def answers(op: HostOp, args: Sequence[Array | None], data: Sequence[int]) -> dict[str, list[Array]]:
    """Return the outputs of each implementation that does not refuse the operator."""
    implementations: dict[str, Callable[[], Value]] = {}
    if op.domain in DOMAINS and op.op in OPS and all(x is None or x.dtype.name in TYPES for x in args):
        implementations["kernel"] = lambda: kernel(op, args, data)
    if (sized := sized_function(op)) is not None:
        implementations["host, of any size"] = lambda: sized(op, *args)
    if (host := HOST.get((op.domain, op.op))) is not None:
        implementations["host"] = lambda: host(op, *args)
    if op.op in QUICK and op.wanted == 1 and all(x is None or x.dtype == np.float32 for x in args):
        implementations["self-check"] = lambda: QUICK[op.op](op, *args)
    outputs: dict[str, list[Array]] = {}
    for name, compute in implementations.items():
        try:
            with np.errstate(all="ignore"):
                result = compute()
        except (Unsupported, HostError):
            continue
        if result is not NotImplemented:
            outputs[name] = list(result) if isinstance(result, list | tuple) else [np.asarray(result)]
    return outputs


def oracle(model: onnx.ModelProto, op: HostOp, args: Sequence[Array | None]) -> list[Array] | None:
    """Return onnxruntime's outputs, empty arrays for omitted ones, or None if it refuses the model."""
    feed = {name: x for name, x in zip(op.inputs, args) if name}
    try:
        results = iter(opened(model).run(None, feed))
    except Exception:  # of many classes
        return None
    return [next(results) if name else np.zeros(0) for name in op.outputs]


def extremes(shape: Sequence[int], dtype: str, seed: int, sums: bool) -> Array:
    """Draw an array of values at which computations go wrong most easily."""
    rng, kind = np.random.default_rng(seed), np.dtype(dtype)
    if kind.kind == "b":
        return rng.random(shape) < 0.5
    if kind.kind == "f":
        info = np.finfo(kind)
        values = [np.inf, -np.inf, np.nan, 0.0, -0.0, 0.5, -0.5, 1.5, -1.5, 2.5, 1.0, -1.0, 0.1, 3.7, -3.7]
        values += [] if sums else [info.max, info.min, info.tiny, -info.tiny, info.smallest_subnormal, 300.7, 7e4]
        with np.errstate(over="ignore"):
            return rng.choice(np.array(values).astype(kind), shape)
    limits = np.iinfo(kind)
    values_near_limits = [limits.max, limits.min, limits.max - 1, limits.min + 1, 0, 1, 2, 3, -1 if limits.min else 7]
    return rng.choice(np.array(values_near_limits, kind), shape)


def differs(a: Array, b: Array) -> str:
    """Return how two arrays differ, or ""."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype}{a.shape}, not {b.dtype}{b.shape}"
    if a.dtype.name not in TOLERANCE:
        same = np.asarray(a == b)
    else:
        bound = TOLERANCE[a.dtype.name]
        same = np.isclose(a.astype(np.float64), b.astype(np.float64), bound, bound / 20, equal_nan=True)
    wrong = np.flatnonzero(~same.reshape(-1))
    return f"{a.reshape(-1)[wrong[:3]]}, not {b.reshape(-1)[wrong[:3]]}" if wrong.size else ""


def check(case: NodeCase, args: Sequence[Array | None], model: onnx.ModelProto) -> Iterator[str]:
    """Yield a description of each difference between implementations."""
    op = case.op
    outputs = answers(op, args, case.data)
    is_finite = all(x is None or x.dtype.name not in TOLERANCE or np.isfinite(x).all() for x in args)
    is_open = op.op in ELSEWHERE or (op.op in NO_NAN_RULE and not is_finite)
    expected = None if is_open or op.attr("layout") else oracle(model, op, args)
    if expected is not None:
        outputs = {"onnxruntime": expected, **outputs}
    if not outputs:
        return
    (base, wanted), *others = outputs.items()
    for name, actual in others:
        for number, (a, b) in enumerate(zip(actual, wanted)):
            if op.outputs[number] and (why := differs(np.asarray(a), np.asarray(b))):
                yield f"{case.name}: output {number} of {name} is {why} of {base}"


OPERATORS = [*node_cases()]


@pytest.mark.parametrize("op", OPERATORS)
def test_the_node_tests(op: str) -> None:
    """All implementations agree on the first node test of an operator; the thorough test runs all node tests."""
    assert not [why for case in node_cases()[op][:1] for why in check(case, case.inputs, case.model)]


@pytest.mark.thorough
@pytest.mark.parametrize("op", OPERATORS)
def test_all_node_tests(op: str) -> None:
    slow = by_name(slow_cases()).get(op, [])
    assert not [why for case in [*node_cases()[op], *slow] for why in check(case, case.inputs, case.model)]


def extreme(case: NodeCase, dtype: str | None, seed: int) -> tuple[list[Array | None], onnx.ModelProto]:
    """Return extreme inputs and the model for them. dtype: the type of all data; None: as in the node test."""
    args: list[Array | None] = list(case.inputs)
    model = onnx.ModelProto.FromString(case.model.SerializeToString())
    for k in case.data:
        x = args[k]
        assert x is not None
        if k and case.op.op in ("DequantizeLinear", "QuantizeLinear"):
            continue  # scales and zero points stay what they are
        values = extremes(x.shape, dtype or x.dtype.name, seed + k, case.op.op in SUMS)
        if case.op.op == "QuantizeLinear":  # ONNX does not say which integer a NaN becomes
            values[np.isnan(values)] = 0
        args[k] = values
    if dtype is not None:
        names = {case.op.inputs[k] for k in case.data}
        for value in model.graph.input:
            if value.name in names:
                value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        for value in model.graph.output:
            value.ClearField("type")  # onnxruntime finds it
    return args, model


@pytest.mark.parametrize("op", OPERATORS)
def test_extreme_values(op: str) -> None:
    """All implementations agree on extreme values of the node tests' types."""
    case = node_cases()[op][0]
    assert not [why for seed in range(2) for why in check(case, *extreme(case, None, seed))]


@pytest.mark.thorough
@pytest.mark.parametrize("op", OPERATORS)
def test_extreme_values_of_all_node_tests(op: str) -> None:
    assert not [why for case in node_cases()[op] for why in check(case, *extreme(case, None, 9))]


def typed(op: str) -> NodeCase | None:
    """Return the first case of an operator whose data has one type, or None."""
    for case in node_cases()[op]:
        if case.data and len({case.inputs[k].dtype for k in case.data}) == 1:  # type: ignore[union-attr]
            return case
    return None


TYPED = [op for op in OPERATORS if op not in {*ELSEWHERE, "LSTM", "GRU", "RNN"} and typed(op) is not None]


@pytest.mark.parametrize("op, dtype", paired(TYPED, DTYPES))
def test_extreme_values_of_every_type(op: str, dtype: str) -> None:
    """All implementations agree on extreme values of each type that onnxruntime supports."""
    case = typed(op)
    assert case is not None
    args, model = extreme(case, dtype, 5)
    try:
        opened(model)
    except Exception:  # it has no such type
        return
    assert not [*check(case, args, model)]


MAXIMA = [{}, {"pads": 1}, {"dilations": 2, "pads": 1}, {"strides": 2, "ceil_mode": 1}]
"""Attributes of MaxPool; a value is for all dimensions."""


@pytest.mark.parametrize("window, rank", paired(MAXIMA, [1, 2, 3]))
def test_maxima_of_minus_infinity(window: dict[str, int], rank: int) -> None:
    """MaxPool of -inf alone, also beyond the input, gives the result of onnxruntime's float64.

    Its float32 gives -inf or the smallest finite number, depending on rank and padding.
    """
    for size, kernel in ((1, 2), (5, 2), (7, 3)):
        reach = (kernel - 1) * window.get("dilations", 1) + 1
        if size + 2 * window.get("pads", 0) < reach:
            continue
        counts = {"strides": rank, "dilations": rank, "pads": 2 * rank}
        attributes = {name: [value] * counts[name] if name in counts else value for name, value in window.items()}
        x = np.full((1, 2, *[size] * rank), -np.inf)
        node = helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[kernel] * rank, **attributes)
        double = onnx.TensorProto.DOUBLE
        graph = helper.make_graph(
            [node], "g", [helper.make_tensor_value_info("x", double, x.shape)],
            [helper.make_tensor_value_info("y", double, None)],
        )  # fmt: skip
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        (expected,) = opened(model).run(None, {"x": x})
        least = np.finfo(np.float32).min
        wanted = np.where(np.isinf(expected), -np.inf, least).astype(np.float32)
        result = answers(parse(node, {"": 17}), [x.astype(np.float32)], [0])
        assert result.keys() == {"kernel", "host", "self-check"}
        for name, (y, *_) in result.items():
            np.testing.assert_array_equal(y, wanted, f"{name}, size {size}")


# Operators on integers, of which the self-check has its own ---------------------------------------------------------


def node_of(op: str, inputs: Sequence[Array], attributes: dict[str, Any], shape: Sequence[int]) -> tuple[Any, Any]:
    """Return the operator with one variable input, and its model for onnxruntime."""
    domain = "" if op in ("QLinearConv", "QLinearMatMul", "MaxPool") else "com.microsoft"
    names = [f"i{k}" for k in range(len(inputs))]
    kinds = [helper.np_dtype_to_tensor_dtype(x.dtype) for x in inputs]
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], domain=domain, **attributes)], op,
        [helper.make_tensor_value_info("i0", kinds[0], inputs[0].shape)],
        [helper.make_tensor_value_info("y", kinds[0], shape)],
        [onnx.numpy_helper.from_array(x, name) for name, x in zip(names[1:], inputs[1:])],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return next(iter(ir.serde.deserialize_model(model).graph)), model


def scale(rng: np.random.Generator) -> Array:
    """Draw a scale from 1e-4 to 10."""
    return np.array(10.0 ** rng.uniform(-4, 1), np.float32)


def integer_case(op: str, dtype: str, rng: np.random.Generator, bits: int) -> tuple[list[Array], dict[str, Any]]:
    """Draw (inputs, attributes) of an operator; data, weights and zero points include the ends of their range.

    bits: of weights. Without a better instruction, onnxruntime adds pairs of products in 16 bits: its sums are exact
    only for weights of seven bits.
    """
    most = (1 << (bits - 1)) - 1
    limits = np.iinfo(dtype)

    def whole(*shape: int) -> Array:
        return rng.choice(
            np.array([limits.min, limits.max, *rng.integers(limits.min, limits.max, 9, endpoint=True)]), shape
        ).astype(dtype)

    def zero() -> Array:
        return np.array(rng.choice([limits.min, limits.max, (limits.min + limits.max + 1) // 2, 3]), dtype)

    def weights(*shape: int) -> Array:
        return rng.choice(np.array([-most - 1, most, -most, *rng.integers(-most, most, 9)]), shape).astype(np.int8)

    middle = np.zeros((), np.int8)
    match op:
        case "QLinearConv":
            group, stride, size = (int(rng.choice(each)) for each in ((1, 2, 4), (1, 2), (1, 3)))
            x, w = whole(1, 4, 6, 5), weights(8, 4 // group, size, size)
            bias = rng.choice(np.array([0, 5, -999, 1 << 20, -(1 << 20)]), 8).astype(np.int32)
            steps = np.array([scale(rng) for _ in range(8)], np.float32)
            kernel_wide = {"group": group, "strides": [stride] * 2, "pads": [size // 2] * 4, "kernel_shape": [size] * 2}
            return [x, scale(rng), zero(), w, steps, np.zeros(8, np.int8), scale(rng), zero(), bias], kernel_wide
        case "QLinearMatMul":
            return [whole(3, 12), scale(rng), zero(), weights(12, 5), scale(rng), middle, scale(rng), zero()], {}
        case "QGemm":
            bias = rng.integers(-9999, 9999, 5).astype(np.int32)
            fixed = [weights(5, 12), scale(rng), middle, bias, scale(rng), zero()]
            return [whole(3, 12), scale(rng), zero(), *fixed], {"transB": 1}
        case "QLinearAdd" | "QLinearMul":
            return [whole(3, 7), scale(rng), zero(), whole(3, 7), scale(rng), zero(), scale(rng), zero()], {}
        case "QLinearGlobalAveragePool":
            step = scale(rng)
            near = np.array(step * 10.0 ** rng.uniform(-1, 1), np.float32)  # onnxruntime refuses others
            return [whole(1, 3, 4, 5), step, zero(), near, zero()], {}
    return [whole(1, 3, 7, 6)], {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 1, 1, 1]}


INTEGER_OPERATORS = (
    "QLinearConv", "QLinearMatMul", "QGemm", "QLinearAdd", "QLinearMul", "QLinearGlobalAveragePool", "MaxPool"
)  # fmt: skip


@pytest.mark.parametrize("dtype", ("uint8", "int8"))
@pytest.mark.parametrize("op, seed", some([(op, seed) for op in INTEGER_OPERATORS for seed in range(20)],
                                          [(op, seed) for op in INTEGER_OPERATORS for seed in range(2)]))  # fmt: skip
def test_integer_operators(op: str, dtype: str, seed: int) -> None:
    """Kernel, self-check and onnxruntime give the same bytes."""
    bits = 8 if seed % 2 else 7
    inputs, attributes = integer_case(op, dtype, np.random.default_rng(seed), bits)
    varying = [(inputs[0].shape, dtype), *inputs[1:]]
    (by_kernel,) = compile_op(op, attributes, varying)(*inputs)
    node, model = node_of(op, inputs, attributes, by_kernel.shape)
    given = operator_results.compute(node, [operator_results.codes(inputs[0])])
    np.testing.assert_array_equal(given, operator_results.codes(by_kernel))
    if bits == 7 or not any(x.dtype == np.int8 and x.ndim > 1 for x in inputs[1:]):
        (expected,) = opened(model).run(None, {"i0": inputs[0]})
        np.testing.assert_array_equal(by_kernel, expected)
