"""Round float tensors between quantised tensors to bytes, where users ask for it (`rounding="bytes"`).

    c = Conv(DequantizeLinear(x8), DequantizeLinear(w8))            c = Conv(...)
    h = HardSwish(c)                                        ->      d = DequantizeLinear(QuantizeLinear(c, s, z), s, z)
    y8 = QuantizeLinear(h, sy, zy)                                  y8 = QuantizeLinear(HardSwish(d), sy, zy)

Some quantisers write QuantizeLinear and DequantizeLinear only before products, so that everything between products is
float. With bytes between, each operator becomes one of integers. Bytes must cover an interval, which no calibration
gives here: it follows from the quantised tensors behind. A value beyond the interval is saturated there in any case:

- behind QuantizeLinear, the interval is that of its bytes;
- behind a function of one tensor, it ends where the function's result no longer changes, or leaves its own interval;
- behind the addition of a quantised tensor, it is wider by the range of that tensor.

A tensor whose interval is not known stays float. If a QuantizeLinear reads a float tensor, other operators read its
bytes, too. This changes results, so it is part of the import.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from celosia.compiler import numerics
from celosia.compiler.graph.operands import joins_parts
from celosia.compiler.graph.qdq import Quantised, activation, adds_bias, dequantised, quantised_by, scale_and_zero
from celosia.compiler.graph.quantized.exact_products import PRODUCTS, ROUNDED
from celosia.compiler.graph.quantized.tables import ELEMENTWISE_OPS, Function, compose, function_of
from celosia.compiler.graph.simplify.fold import fold_imported
from celosia.compiler.graph.simplify.redundant import drop_unused, remove_wires
from celosia.compiler.graph.values import constant, derived_name, is_op, new_constant, only_use
from celosia.compiler.ops import operators_with
from celosia.compiler.program.host.op import HostError
from celosia.compiler.program.op_spec import Moves

Interval = tuple[float, float]
"""Least and greatest value; infinite where it is not known."""
UNKNOWN: Interval = (-np.inf, np.inf)
MOVES = operators_with("moves", Moves.ALL, Moves.SOME, Moves.JOIN)
"""Operators whose results are elements of their operands."""
AVERAGES = ("AveragePool", "GlobalAveragePool", "ReduceMean")
CLAMPS = ("Relu", "Clip")
"""Functions that move behind QuantizeLinear (integerise.py), so that no bytes are needed before them."""
GRID = np.sinh(np.linspace(-9, 9, 8191)) / np.sinh(9.0)
"""Where functions are tried, as shares of the largest value: denser near 0."""
STEPS = 510
"""Half steps of a byte: a function whose result changes by less than its range over this has the same bytes."""


@dataclass(frozen=True)
class Reading:
    """A reader of a function of a tensor. value: the operand that it reads. function: what that is of the tensor.

    is_clamp: whether only clamps and movements lie between.
    """

    reader: ir.Node
    value: ir.Value
    function: Function
    is_clamp: bool


def round_between(model: ir.Model) -> None:
    """Insert QuantizeLinear and DequantizeLinear behind float operators between quantised tensors."""
    fold_imported(model)
    remove_wires(model)
    rounding = _ByteRounding(model.graph)
    for value in [out for node in model.graph for out in node.outputs]:
        rounding.share_bytes(value)
    for node in list(model.graph):
        if is_op(node, *numerics.BINARY, *AVERAGES):
            rounding.round_operands(node)
        if is_op(node, *numerics.BINARY, *AVERAGES, *PRODUCTS):
            rounding.round_result(node)
    drop_unused(model.graph)


class _ByteRounding:
    """Inserts pairs of QuantizeLinear and DequantizeLinear into `graph`."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph

    def share_bytes(self, value: ir.Value) -> None:
        """Let all readers of a float tensor read the bytes that one of them, a QuantizeLinear, makes of it."""
        users = [use.node for use in value.uses()]
        quantise = next((node for node in users if quantised_by(node) is not None), None)
        producer = value.producer()
        if quantise is None or producer is None or _is_bytes(value) or len(users) < 2:
            return
        if value.dtype != ir.DataType.FLOAT:
            return
        self.graph.remove(quantise)
        self.graph.insert_after(producer, quantise)
        name = derived_name(self.graph, f"{value.name}_bytes")
        dequantise = ir.Node(
            quantise.domain, "DequantizeLinear", [quantise.outputs[0], *quantise.inputs[1:]],
            outputs=[ir.Value(name=name, shape=value.shape, type=value.type)],
        )  # fmt: skip
        self.graph.insert_after(quantise, dequantise)
        for node, number in [(use.node, use.idx) for use in value.uses()]:
            if node is not quantise and quantised_by(node) is None:
                node.replace_input_with(number, dequantise.outputs[0])

    def round_result(self, node: ir.Node) -> None:
        """Round the result of a sum or product, unless only clamps lie between it and one QuantizeLinear.

        The result of a MatMul is rounded behind the bias that is added to it.
        """
        value, floats = node.outputs[0], [v for v in node.inputs if v is not None and constant(v) is None]
        add = only_use(value) if is_op(node, "MatMul") else None
        if (
            add is not None
            and is_op(add, "Add")
            and any(adds_bias(node, v) for v in add.inputs if constant(v) is not None)
        ):
            value = add.outputs[0]
        readings = list(self._readings(value))
        if not all(map(_is_bytes, floats)) or value.is_graph_output():
            return
        clamped = len(readings) == 1 and readings[0].is_clamp and quantised_by(readings[0].reader) is not None
        if readings and not clamped:
            needed, possible = self._needed(value), _result_range(node)
            self._insert_pair(value, (max(needed[0], possible[0]), min(needed[1], possible[1])))

    def round_operands(self, node: ir.Node) -> None:
        """Round operands of a sum or average that are functions of quantised tensors, if its result is quantised."""
        if self._kind(node.outputs[0]) is None:
            return
        for value in list(node.inputs):
            if value is not None and constant(value) is None and not _is_bytes(value):
                self._insert_pair(value, _range(value), self._kind(node.outputs[0]))

    def _insert_pair(self, value: ir.Value, interval: Interval, kind: np.dtype[Any] | None = None) -> None:
        """Let all readers of `value` read bytes that cover `interval` and 0, if that is known."""
        low, high, kind = min(interval[0], 0.0), max(interval[1], 0.0), kind or self._kind(value)
        producer = value.producer()
        if kind is None or producer is None or value.is_graph_output() or value.dtype != ir.DataType.FLOAT:
            return
        if not 0 < high - low < np.finfo(np.float32).max:
            return
        first = np.iinfo(kind).min
        scale = np.float32((high - low) / (254 if low and high else 255))  # a zero point between two bytes costs a step
        zero = np.clip(np.ceil(first - low / scale), first, first + 255).astype(kind)
        name = derived_name(self.graph, f"{value.name}_bytes")
        parameters = [new_constant(self.graph, f"{name}_scale", np.asarray(scale, np.float32))]
        parameters.append(new_constant(self.graph, f"{name}_zero", np.asarray(zero)))
        names = name, derived_name(self.graph, f"{name}_dequantised")
        bytes_, floats = (ir.Value(name=text, shape=value.shape) for text in names)
        bytes_.type, floats.type = ir.TensorType(ir.DataType.from_numpy(kind)), ir.TensorType(ir.DataType.FLOAT)
        readers = [(use.node, use.idx) for use in value.uses()]
        quantise = ir.Node("", "QuantizeLinear", [value, *parameters], outputs=[bytes_], name=name)
        dequantise = ir.Node("", "DequantizeLinear", [bytes_, *parameters], outputs=[floats], name=floats.name)
        quantise.meta[ROUNDED] = f"its float result is rounded to bytes between {low:.4g} and {high:.4g}"
        self.graph.insert_after(producer, [quantise, dequantise])
        for node, number in readers:
            node.replace_input_with(number, floats)

    def _kind(self, value: ir.Value) -> np.dtype[Any] | None:
        """Return the type of the first bytes that are made of `value`; None if it does not become bytes."""
        waiting, seen = [value], {value}
        while waiting:
            for use in waiting.pop(0).uses():
                y = quantised_by(use.node)
                if y is not None:
                    return y.dtype
                if is_op(use.node, *ELEMENTWISE_OPS, *MOVES, *AVERAGES):
                    waiting += [out for out in use.node.outputs if out not in seen]
                    seen.update(use.node.outputs)
        return None

    def _readings(self, value: ir.Value) -> Iterator[Reading]:
        """Yield the readers of `value` and of functions of it that are no such functions themselves."""
        functions: dict[ir.Value, tuple[Function, bool, bool]] = {value: (lambda x: x, True, False)}
        waiting = [value]
        while waiting:
            current = waiting.pop(0)
            for node in dict.fromkeys(use.node for use in current.uses()):
                function, is_clamp, is_moved = functions[current]
                operands = [v for v in node.inputs if v is not None]
                varying = [v for v in operands if constant(v) is None]
                is_known = all(v in functions for v in varying)
                if is_op(node, *MOVES) and varying == [current] and not joins_parts(node):
                    result = (function, is_clamp, True)
                elif not is_op(node, *ELEMENTWISE_OPS) or len(node.outputs) != 1:
                    yield Reading(node, current, function, is_clamp)
                    continue
                elif not is_known:
                    if any(_depends(v, functions) for v in varying if v not in functions):
                        continue  # an operand of it is a function that is still to come
                    yield Reading(node, current, function, is_clamp)
                    continue
                elif len(varying) > 1 and any(functions[v][2] for v in varying):
                    yield Reading(node, current, function, False)  # elements of other places meet
                    continue
                else:
                    scalars = {v: function_of(v, longest=0) for v in operands if v not in functions}
                    if None in scalars.values():
                        yield Reading(node, current, function, is_clamp)
                        continue
                    parts = {v.name or "": functions[v][0] for v in varying}
                    parts |= {v.name or "": scalar[1] for v, scalar in scalars.items() if scalar is not None}
                    result = (compose(node, parts), is_clamp and is_op(node, *CLAMPS), is_moved)
                new = [out for out in node.outputs if out not in functions]
                functions.update((out, result) for out in new)
                waiting += new
            if current.is_graph_output():
                yield Reading(current.producer(), current, functions[current][0], False)  # type: ignore[arg-type]

    def _needed(self, value: ir.Value) -> Interval:
        """Return the interval of `value` beyond which no quantised tensor behind it changes."""
        low, high = np.inf, -np.inf
        for reading in self._readings(value):
            if reading.reader is reading.value.producer():  # it is returned
                return UNKNOWN
            ends = self._needed_by(reading.reader, reading.value)
            if reading.value is not value:
                ends = _preimage(reading.function, ends)
            low, high = min(low, ends[0]), max(high, ends[1])
        return (low, high) if low <= high else UNKNOWN

    def _needed_by(self, reader: ir.Node, value: ir.Value) -> Interval:
        """Return the interval of `value` that one of its readers needs."""
        y = quantised_by(reader)
        if y is not None:
            return _ends(y)
        if joins_parts(reader):
            return self._needed(reader.outputs[0])
        if is_op(reader, "Add"):
            (low, high), (least, greatest) = self._needed(reader.outputs[0]), (0.0, 0.0)
            others = [v for v in reader.inputs if v is not value]
            if len(others) == 1 and others[0] is not None:
                least, greatest = _range(others[0])
                return low - greatest, high - least
        return UNKNOWN


def _depends(value: ir.Value | None, functions: dict[ir.Value, Any], depth: int = 12) -> bool:
    """Return whether `value` is computed from one of `functions` by few element-wise operators."""
    node = value.producer() if value is not None else None
    if value in functions:
        return True
    if node is None or depth == 0 or not is_op(node, *ELEMENTWISE_OPS):
        return False
    return any(_depends(v, functions, depth - 1) for v in node.inputs)


def _is_bytes(value: ir.Value | None) -> bool:
    """Return whether `value` holds dequantised bytes, perhaps moved or joined."""
    node = value.producer() if value is not None else None
    if node is None or not is_op(node, *MOVES):
        return dequantised(value) is not None
    parts = node.inputs if joins_parts(node) else node.inputs[:1]
    return all(_is_bytes(part) for part in parts)


def _ends(q: Quantised) -> Interval:
    """Return the least and the greatest value that the bytes `q` stand for."""
    (scale, zero), info = scale_and_zero(q), np.iinfo(q.dtype)
    return (int(info.min) - zero) * scale, (int(info.max) - zero) * scale


def _range(value: ir.Value) -> Interval:
    """Return the least and the greatest value of a function of a quantised tensor, or of a constant."""
    array = constant(value)
    if array is not None:
        return (float(array.min()), float(array.max())) if array.size else UNKNOWN
    node = value.producer()
    if node is not None and is_op(node, *MOVES) and not joins_parts(node) and node.inputs[0] is not None:
        return _range(node.inputs[0])
    known = function_of(value)
    q = activation(known[0]) if known is not None else None
    if known is None or q is None:
        return UNKNOWN
    codes = np.arange(np.iinfo(q.dtype).min, np.iinfo(q.dtype).max + 1).astype(q.dtype)
    try:
        with np.errstate(all="ignore"):
            results = known[1](numerics.dequantize_linear(codes, *scale_and_zero(q)))
    except HostError:
        return UNKNOWN
    return (float(results.min()), float(results.max())) if np.all(np.isfinite(results)) else UNKNOWN


def _result_range(node: ir.Node) -> Interval:
    """Return the least and the greatest result of a sum, product or average of functions of quantised tensors."""
    ranges = [_range(value) for value in node.inputs if value is not None]
    if is_op(node, *AVERAGES):
        return ranges[0]
    if not is_op(node, *numerics.BINARY) or not np.all(np.isfinite(ranges)):
        return UNKNOWN
    combine = np.add if is_op(node, "Add") else np.multiply
    corners = combine.outer(*ranges)
    return float(corners.min()), float(corners.max())


def _preimage(function: Function, needed: Interval) -> Interval:
    """Return the interval of x beyond which `function` of x, within `needed`, changes by less than half a step."""
    largest = max([16.0, *(abs(end) for end in needed if np.isfinite(end))])
    x = (GRID * 4 * largest).astype(np.float32)
    try:
        with np.errstate(all="ignore"):
            y = np.clip(function(x).astype(np.float64), *needed)
    except HostError:
        return UNKNOWN
    if y.shape != x.shape or not np.all(np.isfinite(y)):
        return UNKNOWN
    tolerance = (y.max() - y.min()) / STEPS
    above, below = np.flatnonzero(np.abs(y - y[-1]) > tolerance), np.flatnonzero(np.abs(y - y[0]) > tolerance)
    if not above.size or not below.size:  # it is constant
        return 0.0, 0.0
    high, low = int(above[-1]) + 1, int(below[0]) - 1
    return (
        -np.inf if low <= 0 else float(x[low]),
        np.inf if high >= len(x) - 1 else float(x[high]),
    )
