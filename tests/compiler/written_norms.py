"""Models of one normalisation in single operators, in many orders, forms and layouts, and the real result of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Floats = NDArray[np.float64]
SX, ZX = 0.05, -7


@dataclass(frozen=True)
class Form:
    """How a normalisation is written.

    axis: of the rows. is_centred: whether it subtracts the mean. mean: "reduce", "sum", "product" (by equal weights),
    "drop" (an axis that Unsqueeze inserts again). square: "Pow" or "Mul". variance: "centred" or "difference" (of the
    mean square and the squared mean). inverse: how rows are divided by the root. subtract: "Sub" or "Add" (of minus the
    mean). factors: whether gamma is multiplied "last", "first" (with the inverse root), or there is "none". is_swapped:
    whether constants are first operands. quantised: whether all tensors are rounded to bytes. casts: whether there are
    Casts. turned: a permutation of x before, which is undone behind. beta: whether an offset is added.
    """

    axis: int = -1
    is_centred: bool = True
    mean: str = "reduce"
    square: str = "Pow"
    variance: str = "centred"
    inverse: str = "Div"
    subtract: str = "Sub"
    factors: str = "last"
    is_swapped: bool = False
    quantised: bool = False
    casts: bool = False
    turned: tuple[int, ...] = ()
    beta: bool = True
    epsilon: float = 1e-3


@dataclass
class Writer:
    """Writes the operators of a model, with their values for inputs and for the same inputs negated.

    These values give the ranges of quantisation, as a calibration does.
    """

    quantised: bool
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    values: dict[str, Floats] = field(default_factory=dict)
    constants: list[onnx.TensorProto] = field(default_factory=list)

    def constant(self, array: Any, kind: Any = np.float32) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array, kind), name))
        self.values[name] = np.asarray(array, np.float64)
        return name

    def op(
        self, op: str, function: Callable[..., Floats], *inputs: str, extra: tuple[str, ...] = (), **how: Any
    ) -> str:
        """Add an operator; with `quantised`, also a pair that rounds what it computes."""
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, [*inputs, *extra], [name], **how))
        self.values[name] = function(*(self.values[value] for value in inputs))
        return self.rounded(name) if self.quantised and op not in ("Cast", "Transpose") else name

    def rounded(self, name: str) -> str:
        """Add a pair that rounds `name` to bytes of its range."""
        low, high = min(0.0, self.values[name].min()), max(0.0, self.values[name].max())
        step = np.float32((high - low) / 254 or 1)
        zero = int(np.clip(np.ceil(-128 - low / step), -128, 127))
        parameters = self.constant(step), self.constant(zero, np.int8)
        pair = f"{name}_q", f"{name}_d"
        self.nodes.append(helper.make_node("QuantizeLinear", [name, *parameters], [pair[0]]))
        self.nodes.append(helper.make_node("DequantizeLinear", [pair[0], *parameters], [pair[1]]))
        self.values[pair[1]] = self.values[name]
        return pair[1]


def gamma_of(size: int) -> Floats:
    return (np.float32(1.5) ** np.linspace(-1, 1, size).astype(np.float32)).astype(np.float32).astype(np.float64)


def beta_of(size: int) -> Floats:
    return np.linspace(0.5, -0.4, size).astype(np.float32).astype(np.float64)


def real(form: Form, x: NDArray[np.int8]) -> Floats:
    """Return the real result, computed in float64 from the bytes x."""
    u, axis = (x.astype(np.float64) - ZX) * float(np.float32(SX)), form.axis % x.ndim
    size = [x.shape[axis] if number == axis else 1 for number in range(x.ndim)]
    centred = u - u.mean(axis, keepdims=True) if form.is_centred else u
    z = centred / np.sqrt((centred**2).mean(axis, keepdims=True) + float(np.float32(form.epsilon)))
    gamma = 1.0 if form.factors == "none" else gamma_of(x.shape[axis]).reshape(size)
    return np.asarray(z * gamma + (beta_of(x.shape[axis]).reshape(size) if form.beta and form.is_centred else 0))


def written(form: Form, x: NDArray[np.int8]) -> tuple[onnx.ModelProto, float, int]:
    """Return the model of `form` for inputs like `x`, with scale and zero point of its result."""
    w = Writer(form.quantised)
    step, zero = w.constant(SX), w.constant(ZX, np.int8)
    w.nodes.append(helper.make_node("DequantizeLinear", ["x", step, zero], ["real"]))
    u = (x.astype(np.float64) - ZX) * float(np.float32(SX))
    w.values["real"] = np.concatenate((u, -u))
    value, axis = "real", form.axis % x.ndim
    if form.turned:
        value = w.op("Transpose", lambda a: a.transpose(form.turned), value, perm=form.turned)
        axis = form.turned.index(axis)
    size = w.values[value].shape[axis]
    wide = [size if number == axis else 1 for number in range(x.ndim)]
    if form.casts:
        value = w.op("Cast", lambda a: a, value, to=TensorProto.FLOAT)

    def binary(op: str, function: Callable[..., Floats], a: str, b: str) -> str:
        a, b = (b, a) if form.is_swapped and op in ("Add", "Mul") else (a, b)
        return w.op(op, function, a, b)

    def mean(a: str) -> str:
        def over(v: Floats) -> Floats:
            return v.mean(axis, keepdims=True)

        if form.mean == "sum":
            total = w.op("ReduceSum", lambda v: over(v) * size, a, extra=(w.constant([axis], np.int64),), keepdims=1)
            return binary("Mul", np.multiply, total, w.constant(1 / size))
        if form.mean == "drop":
            axes = w.constant([axis], np.int64)
            dropped = w.op("ReduceMean", lambda v: v.mean(axis), a, axes=[axis], keepdims=0)
            return w.op("Unsqueeze", lambda v: np.expand_dims(v, axis), dropped, extra=(axes,))
        if form.mean == "product" and axis == x.ndim - 1:
            return w.op("MatMul", lambda v, _: over(v), a, w.constant(np.full((size, 1), 1 / size)))
        if form.mean == "product" and axis == 1 and x.ndim == 4:
            return w.op("Conv", lambda v, _: over(v), a, w.constant(np.full((1, size, 1, 1), 1 / size)))
        return w.op("ReduceMean", over, a, axes=[axis], keepdims=1)

    def square(a: str) -> str:
        if form.square == "Mul":
            return w.op("Mul", np.multiply, a, a)
        return w.op("Pow", lambda v, _: v**2, a, w.constant(2))

    centred, average = value, ""
    if form.is_centred:
        average = mean(value)
        if form.subtract == "Sub":
            centred = w.op("Sub", np.subtract, value, average)
        else:
            minus = w.op("Neg", np.negative, average) if not form.casts else binary(
                "Mul", np.multiply, average, w.constant(-1)
            )  # fmt: skip
            centred = binary("Add", np.add, value, minus)
    if form.is_centred and form.variance == "difference":
        variance = w.op("Sub", np.subtract, mean(square(value)), square(average))
    else:
        variance = mean(square(centred))
    variance = binary("Add", np.add, variance, w.constant(form.epsilon))
    gamma = w.constant(gamma_of(size).reshape(wide if axis < x.ndim - 1 else [size]))
    if form.inverse == "Div":
        root = w.op("Sqrt", np.sqrt, variance)
        result = w.op("Div", np.divide, centred, root)
        result = binary("Mul", np.multiply, result, gamma) if form.factors == "first" else result
    else:
        if form.inverse == "Pow":
            factor = w.op("Pow", lambda v, e: v**e, variance, w.constant(-0.5))
        elif form.inverse == "root last":
            factor = w.op("Sqrt", np.sqrt, w.op("Reciprocal", np.reciprocal, variance))
        else:
            factor = w.op("Reciprocal", np.reciprocal, w.op("Sqrt", np.sqrt, variance))
        factor = binary("Mul", np.multiply, factor, gamma) if form.factors == "first" else factor
        result = binary("Mul", np.multiply, centred, factor)
    if form.factors == "last":
        result = binary("Mul", np.multiply, result, gamma)
    if form.beta and form.is_centred:
        result = binary("Add", np.add, result, w.constant(beta_of(size).reshape(wide if axis < x.ndim - 1 else [size])))
    if form.turned:
        result = w.op("Transpose", lambda a: a.transpose(np.argsort(form.turned)), result, perm=np.argsort(form.turned))
    if result.endswith("_d"):  # the last pair is the result's own
        w.nodes.pop()
        quantise = w.nodes.pop()
        result = quantise.input[0]
    largest = np.abs(w.values[result]).max()
    sy, zy = float(np.float32(largest / 120)), 5
    w.nodes.append(helper.make_node("QuantizeLinear", [result, w.constant(sy), w.constant(zy, np.int8)], ["y"]))
    ends = [helper.make_tensor_value_info(name, TensorProto.INT8, x.shape) for name in ("x", "y")]
    graph = helper.make_graph(w.nodes, "written", ends[:1], ends[1:], w.constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), sy, zy
