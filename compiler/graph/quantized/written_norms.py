"""Recognise normalisations of rows that a model writes in single operators, and write each as one operator.

    m = ReduceMean(x)    c = Sub(x, m)    v = ReduceMean(Pow(c, 2))
    y = Add(Mul(Div(c, Sqrt(Add(v, 1e-6))), gamma), beta)               ->      y = LayerNormalization(x, gamma, beta)

The operators may stand in any order, along any axis, and with Cast, Transpose, Reshape, QuantizeLinear and
DequantizeLinear between them: what they compute is followed as a polynomial of the elements, mean and mean square of a
row (row_polynomials.py). The mean may also be a product by equal weights.

This is done with `compile(rounding="correct")` or "bytes" alone: the result of the one operator is rounded once, so
that roundings between the single operators, in floats or to bytes, are left out. This changes results, so it is part of
the import. It is done only where integers compute the normalisation (rounded.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler import numerics
from celosia.compiler.cpu.parse import parse
from celosia.compiler.graph.qdq import (
    Quantised,
    activation,
    dequantised,
    have_same_parameters,
    quantised_by,
    scale_and_zero,
)
from celosia.compiler.graph.quantized.commute import MOVING_OPS, reduced_axes
from celosia.compiler.graph.quantized.exact_products import ROUNDED
from celosia.compiler.graph.quantized.rounded import CENTRED, NORMS
from celosia.compiler.graph.quantized.row_polynomials import (
    ELEMENT,
    NUMBER,
    TOLERANCE,
    NormalForm,
    NotARowError,
    Polynomial,
    add,
    may_be_negative,
    mean,
    multiply,
    normal_form,
    power,
    scale,
)
from celosia.compiler.graph.quantized.tables import ELEMENTWISE_OPS
from celosia.compiler.graph.simplify.fold import fold
from celosia.compiler.graph.simplify.redundant import drop_unused
from celosia.compiler.graph.values import attribute, attributes, constant, derived_name, is_op, new_constant, shape
from celosia.compiler.program.host.execute import execute
from celosia.compiler.program.host.op import HostError

NOTE = "the operators of a normalisation are one, whose result is rounded once"
"""Note of a layer that replaces single operators."""
PAIR = ("QuantizeLinear", "DequantizeLinear")
CLAMPS = ("Relu", "Clip")
"""Functions that move behind QuantizeLinear (integerise.py)."""
MAX_CONSTANT = 1 << 22
"""Elements of the largest constant that is computed to compare its elements."""
MAX_BASES = 8
"""Quantised tensors before a mean that are tried as the tensor which is normalised."""
Labels = tuple[tuple[int, ...], ...]
"""For each axis of a tensor: the axes of the normalised tensor that it runs over; () for an axis of size 1."""


def write_norms(model: ir.Model) -> None:
    """Replace single operators that together normalise rows by LayerNormalization or RMSNormalization."""
    fold(model)
    graph = model.graph
    positions = {node: number for number, node in enumerate(graph)}
    for node in list(graph):
        if node.graph is None or _rule_of(node) not in STARTS:
            continue
        for base in _bases(node):
            if _Region(graph, base, node, positions).replace():
                drop_unused(graph)
                positions = {node: number for number, node in enumerate(graph)}
                break


def _bases(reduction: ir.Node) -> Iterator[ir.Value]:
    """Yield the dequantised bytes, perhaps moved, of which known operators compute the operand of `reduction`."""
    waiting, seen, count = list(reduction.inputs[:1]), set[ir.Value](), 0
    while waiting and count < (1 if is_op(reduction, *NORMS) else MAX_BASES):
        value = waiting.pop(0)
        if value is None or value in seen:
            continue
        seen.add(value)
        if _bytes_of(value) is not None:
            count += 1
            yield value
        node = value.producer()
        if node is not None and (_rule_of(node) is not None or is_op(node, *PAIR)):
            waiting += node.inputs


def _bytes_of(value: ir.Value | None) -> Quantised | None:
    """Return the bytes that `value` dequantises, perhaps moved."""
    node = value.producer() if value is not None else None
    if node is not None and is_op(node, *MOVING_OPS):
        return _bytes_of(node.inputs[0])
    return activation(value)


def _equal_values(value: ir.Value) -> list[ir.Value]:
    """Return `value` and the results of other DequantizeLinear that dequantise the same bytes alike."""
    q = dequantised(value)
    others = [] if q is None else [use.node.outputs[0] for use in q.value.uses()]
    equal = [other for other in others if (p := dequantised(other)) is not None and have_same_parameters(p, q)]  # type: ignore[arg-type]
    return [value, *(other for other in equal if other is not value)]


@dataclass(frozen=True)
class _Tensor:
    """A tensor that consists of polynomials of rows of the base."""

    polynomial: Polynomial
    labels: Labels


Operand = _Tensor | NDArray[Any]
Rule = Callable[["_Region", ir.Node, Sequence[Operand]], _Tensor]


@dataclass
class _Region:
    """The operators that compute polynomials of rows of `base`.

    start: an operator that must be among those which are replaced. positions: numbers of the graph's operators. axis:
    the axis of `base` that its rows run along, once an operator has reduced it. tensors: what is known of results.
    """

    graph: ir.Graph
    base: ir.Value
    start: ir.Node
    positions: Mapping[ir.Node, int]
    axis: int | None = None
    tensors: dict[ir.Value, _Tensor] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the base."""
        return shape(self.base) or ()

    def replace(self) -> bool:
        """Replace the normalisations of the base; return whether there are any, and integers compute all of them."""
        if len(self.sizes) < 2 or 0 in self.sizes:
            return False
        self._follow()
        ends = self._ends()
        if not ends or not self._reads_start(ends):
            return False
        forms = {end: form for end in ends if (form := normal_form(self.tensors[end].polynomial)) is not None}
        if not all(self._is_representable(form, ends[end]) for end, form in forms.items()):
            return False
        for end, form in forms.items():
            self._replace_by_norm(end, form, ends[end])
        return True

    # Polynomials of results ------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Fill `tensors`, from the base on, in the order of the graph."""
        labels = tuple((axis,) if size > 1 else () for axis, size in enumerate(self.sizes))
        for value in _equal_values(self.base):
            self.tensors[value] = _Tensor(Polynomial({ELEMENT: np.ones(1)}), labels)
        waiting, seen = list[tuple[int, ir.Node]](), set[ir.Node]()

        def wait_for_readers(value: ir.Value) -> None:
            for use in value.uses():
                if use.node in self.positions and use.node not in seen:
                    seen.add(use.node)
                    heappush(waiting, (self.positions[use.node], use.node))

        for value in list(self.tensors):
            wait_for_readers(value)
        while waiting:
            node = heappop(waiting)[1]
            tensor = self._result_of(node)
            if tensor is not None:
                self.tensors[node.outputs[0]] = tensor
                wait_for_readers(node.outputs[0])

    def _result_of(self, node: ir.Node) -> _Tensor | None:
        """Return what `node` computes of known tensors and constants; None if it is no polynomial of rows."""
        rule = _rule_of(node)
        if (rule is None and not is_op(node, *PAIR)) or shape(node.outputs[0]) is None:
            return None
        if is_op(node, *PAIR):
            return self._unrounded(node)
        operands = list[Operand]()
        for value in node.inputs:
            known = self.tensors[value] if value in self.tensors else _known(value)
            if known is None and value is not None:
                return None
            if known is not None:
                operands.append(known)
        assert rule is not None
        try:
            result = rule(self, node, operands)
        except (NotARowError, HostError):
            return None
        return result if len(result.labels) == len(shape(node.outputs[0]) or ()) else None

    def _unrounded(self, node: ir.Node) -> _Tensor | None:
        """Return the operand of a QuantizeLinear or DequantizeLinear, as if it did not round; None if it clamps.

        A quantiser folds a Relu into a range without negative numbers, which is no rounding. Means of rows may lie in
        such a range without a Relu.
        """
        tensor = None if node.inputs[0] is None else self.tensors.get(node.inputs[0])
        if tensor is None or is_op(node, "DequantizeLinear"):
            return tensor if dequantised(node.outputs[0]) is not None else None
        y = quantised_by(node)
        if y is None:
            return None
        x = _bytes_of(self.base)
        assert x is not None
        zero, info = int(y.zero.item()), np.iinfo(y.dtype)
        may_clamp = may_be_negative(tensor.polynomial, elements=int(x.zero.item()) != np.iinfo(x.dtype).min)
        return None if may_clamp and zero in (info.min, info.max) else tensor

    # Where normalisations end ----------------------------------------------------------------------------------

    def _steps(self) -> set[ir.Value]:
        """Return the tensors that are normalised, or from which a normalised one is computed."""
        steps = set[ir.Value]()
        for value in reversed(self.tensors):
            readers = [use.node for use in value.uses()]
            if normal_form(self.tensors[value].polynomial) or any(not steps.isdisjoint(r.outputs) for r in readers):
                steps.add(value)
        return steps

    def _ends(self) -> dict[ir.Value, list[ir.Node | None]]:
        """Return the normalised float tensors that are read by no further step: these readers, and None if returned."""
        steps, ends = self._steps(), dict[ir.Value, list[ir.Node | None]]()
        for value, tensor in self.tensors.items():
            if normal_form(tensor.polynomial) is None or is_op(value.producer(), *PAIR):
                continue
            readers: list[ir.Node | None] = [None] if value.is_graph_output() else []
            for node in dict.fromkeys(use.node for use in value.uses()):
                beyond = _readers_beyond_pairs(node) if is_op(node, *PAIR) else [node]
                if any(reader is None or steps.isdisjoint(reader.outputs) for reader in beyond):
                    readers.append(node)
            if readers:
                ends[value] = readers
        return ends

    def _reads_start(self, ends: Iterable[ir.Value]) -> bool:
        """Return whether `start` is a step of the normalisations, and arithmetic follows it if it is one itself."""
        waiting, seen, is_written = list(ends), set[ir.Value](), not is_op(self.start, *NORMS)
        bases = _equal_values(self.base)
        while waiting:
            value = waiting.pop()
            node = value.producer()
            if node is None or value in seen or value in bases:
                continue
            seen.add(value)
            is_written = is_written or not is_op(node, *PAIR, *MOVING_OPS, *NORMS)
            waiting += [v for v in node.inputs if v in self.tensors]
        return is_written and self.start.outputs[0] in seen

    def _is_representable(self, form: NormalForm, readers: list[ir.Node | None]) -> bool:
        """Return whether `readers` round the normalisation `form` of the base to bytes, and integers compute it."""
        x, quantised = _bytes_of(self.base), [y for reader in readers for y in _quantised_by(reader)]
        assert x is not None and self.axis is not None
        gamma, beta = self._row(form.gamma), self._row(form.beta)
        if gamma is None or beta is None or None in quantised or (np.any(beta) and not form.is_centred):
            return False
        for y in quantised:
            assert y is not None
            if y.dtype != x.dtype:
                return False
            try:
                numerics.norm_constants(gamma, beta, scale_and_zero(x)[0], scale_and_zero(y)[0], form.epsilon)
            except numerics.NormError:
                return False
        return True

    def _row(self, coefficients: NDArray[np.float64]) -> NDArray[np.float32] | None:
        """Return gamma or beta as a float32 value for each element of a row; None if they vary along other axes."""
        assert self.axis is not None
        if coefficients.size > 1 and coefficients.shape[self.axis] != coefficients.size:
            return None
        return np.broadcast_to(coefficients.reshape(-1), self.sizes[self.axis]).astype(np.float32)

    # The operator that replaces them ---------------------------------------------------------------------------

    def _replace_by_norm(self, end: ir.Value, form: NormalForm, readers: list[ir.Node | None]) -> None:
        """Let these readers of `end` read a normalisation of the base."""
        producer, rank, axis = end.producer(), len(self.sizes), self.axis
        assert producer is not None and axis is not None
        rows_last = [*(other for other in range(rank) if other != axis), axis]
        row = derived_name(self.graph, f"{end.name}_norm")
        parts = {"scale": self._row(form.gamma), "offset": self._row(form.beta)}
        scales = [
            new_constant(self.graph, f"{row}_{part}", array) for part, array in parts.items() if array is not None
        ]
        rows = self._transposed(producer, self.base, self.sizes, rows_last)
        op = CENTRED if form.is_centred else "RMSNormalization"
        sizes = tuple(self.sizes[other] for other in rows_last)
        inputs = [rows, *scales[: 2 if form.is_centred else 1]]
        normalised = self._insert(producer, op, inputs, sizes, row, axis=-1, epsilon=form.epsilon)
        normalised.producer().meta[ROUNDED] = NOTE  # type: ignore[union-attr]
        order = [axis for label in self.tensors[end].labels for axis in label]
        order += [axis for axis in range(rank) if axis not in order]  # these have size 1
        result = self._transposed(producer, normalised, sizes, [rows_last.index(axis) for axis in order])
        dims, moved = shape(end) or (), tuple(self.sizes[axis] for axis in order)
        if dims != moved:
            target = new_constant(self.graph, f"{row}_shape", np.array(dims, np.int64))
            result = self._insert(producer, "Reshape", [result, target], dims, f"{row}_shaped")
        for use in [use for use in end.uses() if use.node in readers]:
            use.node.replace_input_with(use.idx, result)

    def _transposed(self, before: ir.Node, value: ir.Value, sizes: tuple[int, ...], perm: Sequence[int]) -> ir.Value:
        """Return `value` of shape `sizes` with its axes in the order `perm`."""
        if list(perm) == list(range(len(perm))):
            return value
        dims = tuple(sizes[axis] for axis in perm)
        return self._insert(before, "Transpose", [value], dims, f"{value.name}_turned", perm=list(perm))

    def _insert(
        self, before: ir.Node, op: str, inputs: Sequence[ir.Value], dims: tuple[int, ...], name: str, **attrs: Any
    ) -> ir.Value:
        """Insert an operator of floats before a node, and return its result."""
        name = derived_name(self.graph, name)
        out = ir.Value(name=name, shape=ir.Shape(dims), type=ir.TensorType(ir.DataType.FLOAT))
        self.graph.insert_before(before, ir.Node("", op, inputs, attributes(**attrs), outputs=[out], name=name))
        return out


def _readers_beyond_pairs(node: ir.Node) -> Iterator[ir.Node | None]:
    """Yield the readers of the result of `node`, with those of QuantizeLinear and DequantizeLinear in their place.

    None stands for the reader of a graph's output.
    """
    if node.outputs[0].is_graph_output():
        yield None
    for reader in dict.fromkeys(use.node for use in node.outputs[0].uses()):
        if is_op(reader, *PAIR):
            yield from _readers_beyond_pairs(reader)
        else:
            yield reader


def _quantised_by(reader: ir.Node | None) -> Iterator[Quantised | None]:
    """Yield the bytes to which a reader rounds its operand, perhaps after moving or clamping it; None for others."""
    if reader is None or not is_op(reader, *MOVING_OPS, *CLAMPS):
        yield None if reader is None else quantised_by(reader)
        return
    if reader.outputs[0].is_graph_output():
        yield None
    for other in dict.fromkeys(use.node for use in reader.outputs[0].uses()):
        yield from _quantised_by(other)


def _known(value: ir.Value | None) -> NDArray[Any] | None:
    """Return a constant, also one that is computed from dequantised constants; None for other values."""
    array = constant(value)
    if array is not None or value is None:
        return array
    node, dims = value.producer(), shape(value)
    if node is None or not is_op(node, *PAIR, *MOVING_OPS, *ELEMENTWISE_OPS) or len(node.outputs) != 1:
        return None
    if dims is None or prod(dims) > MAX_CONSTANT or node.graph is None:
        return None
    operands = {v.name or "": _known(v) for v in node.inputs if v is not None}
    if any(array is None for array in operands.values()):
        return None
    try:
        (result,) = execute(parse(ir.serde.serialize_node(node), dict(node.graph.opset_imports)), operands, once=True)
    except HostError:
        return None
    return np.asarray(result)


# Rules of operators ---------------------------------------------------------------------------------------------------


def _aligned(region: _Region, array: NDArray[Any], tensor: _Tensor) -> _Tensor:
    """Return a constant as a tensor whose axes are those of `tensor`, with which it is combined element by element."""
    dims, labels = array.shape, tensor.labels
    if len(dims) > len(labels):
        if prod(dims[: len(dims) - len(labels)]) != 1:
            raise NotARowError
        labels = ((),) * (len(dims) - len(labels)) + labels
    dims = (1,) * (len(labels) - len(dims)) + dims
    axes, own = list[int](), list[tuple[int, ...]]()
    for size, label in zip(dims, labels):
        if size == 1:
            own.append(())
            continue
        if not label and region.axis is not None and size == region.sizes[region.axis]:
            label = (region.axis,)
        if len(label) != 1 or region.sizes[label[0]] != size:
            raise NotARowError
        axes.append(label[0])
        own.append(label)
    if not np.issubdtype(array.dtype, np.number) or not np.all(np.isfinite(array)) or len(set(axes)) < len(axes):
        raise NotARowError
    coefficients = array.astype(np.float64).reshape([region.sizes[axis] for axis in axes])
    coefficients = coefficients.transpose(np.argsort(axes))
    full = [size if axis in axes else 1 for axis, size in enumerate(region.sizes)]
    return _Tensor(Polynomial({NUMBER: coefficients.reshape(full)}), tuple(own))


def _pair(region: _Region, operands: Sequence[Operand]) -> tuple[Polynomial, Polynomial, Labels]:
    """Return two operands that are combined element by element, and the labels of the result."""
    if len(operands) != 2:
        raise NotARowError
    a, b = operands
    if not isinstance(a, _Tensor) and isinstance(b, _Tensor):
        a = _aligned(region, a, b)
    if not isinstance(b, _Tensor) and isinstance(a, _Tensor):
        b = _aligned(region, b, a)
    if not isinstance(a, _Tensor) or not isinstance(b, _Tensor):
        raise NotARowError
    rank = max(len(a.labels), len(b.labels))
    first, second = (((),) * (rank - len(t.labels)) + t.labels for t in (a, b))
    if any(p and q and p != q for p, q in zip(first, second)):
        raise NotARowError
    return a.polynomial, b.polynomial, tuple(p or q for p, q in zip(first, second))


def _sum(region: _Region, node: ir.Node, operands: Sequence[Operand]) -> _Tensor:
    a, b, labels = _pair(region, operands)
    return _Tensor(add(a, scale(b, -np.ones(1)) if is_op(node, "Sub") else b), labels)


def _product(region: _Region, node: ir.Node, operands: Sequence[Operand]) -> _Tensor:
    a, b, labels = _pair(region, operands)
    return _Tensor(multiply(a, power(b, -1) if is_op(node, "Div") else b), labels)


def _power(region: _Region, node: ir.Node, operands: Sequence[Operand]) -> _Tensor:
    x, *others = operands
    if is_op(node, "Pow"):
        if not others or isinstance(others[0], _Tensor) or others[0].size != 1 or others[0].ndim > 1:
            raise NotARowError
        exponent = float(others[0].item())
        if np.isclose(2 * exponent, round(2 * exponent), TOLERANCE, TOLERANCE):  # it may have been quantised
            exponent = round(2 * exponent) / 2
    else:
        exponent = {"Sqrt": 0.5, "Reciprocal": -1.0}[node.op_type]
    if not isinstance(x, _Tensor):
        raise NotARowError
    return _Tensor(power(x.polynomial, exponent), x.labels)


def _same(region: _Region, node: ir.Node, operands: Sequence[Operand]) -> _Tensor:
    """Return the operand of a Cast between floats, or minus that of a Neg."""
    (x,) = operands[:1]
    kind = node.outputs[0].dtype
    if not isinstance(x, _Tensor) or kind is None or not kind.is_floating_point():
        raise NotARowError
    return _Tensor(scale(x.polynomial, -np.ones(1)), x.labels) if is_op(node, "Neg") else x


def _move(region: _Region, node: ir.Node, operands: Sequence[Operand]) -> _Tensor:
    """Follow the axes of the operand through Transpose, Reshape and the like."""
    x = operands[0]
    before, after = (None if value is None else shape(value) for value in (node.inputs[0], node.outputs[0]))
    if not isinstance(x, _Tensor) or before is None or after is None:
        raise NotARowError
    if is_op(node, "Transpose"):
        perm = attribute(node, "perm", list(reversed(range(len(before)))))
        return _Tensor(x.polynomial, tuple(x.labels[axis] for axis in perm))
    waiting = [axis for label in x.labels for axis in label]
    if prod(region.sizes[axis] for axis in waiting) != prod(after):  # a mean that was broadcast
        raise NotARowError
    labels = list[tuple[int, ...]]()
    for size in after:
        label = list[int]()
        while prod(region.sizes[axis] for axis in label) < size and waiting:
            label.append(waiting.pop(0))
        if prod(region.sizes[axis] for axis in label) != size:
            raise NotARowError
        labels.append(tuple(label))
    return _Tensor(x.polynomial, tuple(labels))


def _reduced(region: _Region, x: Operand, axes: Sequence[int], keep: bool) -> _Tensor:
    """Return the mean of `x` over `axes`, which must be the axis of rows, and axes of size 1."""
    if not isinstance(x, _Tensor):
        raise NotARowError
    rows = [axis for number in axes for axis in x.labels[number]]
    if len(rows) != 1 or (region.axis is not None and rows != [region.axis]):
        raise NotARowError
    polynomial = mean(x.polynomial, rows[0])
    region.axis = rows[0]
    labels = tuple(
        () if number in axes else label for number, label in enumerate(x.labels) if keep or number not in axes
    )
    return _Tensor(polynomial, labels)


def _reduce(region: _Region, node: ir.Node, operands: Sequence[Operand]) -> _Tensor:
    """Return the mean of a ReduceMean, ReduceSum, ReduceSumSquare, ReduceL2 or GlobalAveragePool."""
    x = operands[0]
    rank = len(node.inputs[0].shape or ()) if node.inputs[0] is not None else 0
    axes = list(range(2, rank)) if is_op(node, "GlobalAveragePool") else reduced_axes(node)
    if not axes or not isinstance(x, _Tensor):
        raise NotARowError
    if is_op(node, "ReduceSumSquare", "ReduceL2"):
        x = _Tensor(power(x.polynomial, 2), x.labels)
    result = _reduced(region, x, axes, is_op(node, "GlobalAveragePool") or bool(attribute(node, "keepdims", 1)))
    assert region.axis is not None
    if not is_op(node, "ReduceMean", "GlobalAveragePool"):
        result = _Tensor(scale(result.polynomial, np.full(1, float(region.sizes[region.axis]))), result.labels)
    return _Tensor(power(result.polynomial, 0.5), result.labels) if is_op(node, "ReduceL2") else result


def _weigh(region: _Region, node: ir.Node, operands: Sequence[Operand]) -> _Tensor:
    """Return the sum of a Conv or MatMul by equal weights, for one output channel or as many as there are inputs."""
    (x, *_), weights = operands, _equal_weights(node)
    if not isinstance(x, _Tensor) or weights is None:
        raise NotARowError
    factor, count, outputs = weights
    channel = 1 if is_op(node, "Conv") else len(x.labels) - 1
    result = _reduced(region, x, [channel], True)
    polynomial = scale(result.polynomial, np.full(1, factor * count))
    return _Tensor(polynomial, result.labels if outputs == 1 else x.labels)


def _equal_weights(node: ir.Node) -> tuple[float, int, int] | None:
    """Return (weight, input channels, output channels) of a pointwise Conv or MatMul that only adds up channels.

    None if its weights differ or are no constants, or if outputs are neither one nor as many as inputs.
    """
    dims = shape(node.inputs[1]) if len(node.inputs) == 2 and node.inputs[1] is not None else None
    if dims is None or len(dims) < 2:
        return None
    outputs, count = dims[:2] if is_op(node, "Conv") else dims[:-3:-1]
    if prod(dims) != outputs * count or outputs not in (1, count) or count == 0:
        return None
    strides, pads = attribute(node, "strides", [1]), attribute(node, "pads", [0])
    if attribute(node, "group", 1) != 1 or any(pads) or any(stride != 1 for stride in strides):
        return None
    weights = _known(node.inputs[1]) if _ends_are_equal(node.inputs[1]) else None
    if weights is None:
        return None
    factor = float(weights.reshape(-1)[0])
    is_equal = np.all(np.abs(weights - factor) <= TOLERANCE * abs(factor))
    return (factor, count, outputs) if is_equal else None


def _ends_are_equal(value: ir.Value | None) -> bool:
    """Return whether the first and the last element of weights are equal: a check that takes no time."""
    while value is not None and is_op(node := value.producer(), "DequantizeLinear", *MOVING_OPS):
        value = node.inputs[0]  # type: ignore[union-attr]
    array = constant(value)
    return array is not None and array.size > 0 and bool(array.flat[0] == array.flat[array.size - 1])


def _normalise(region: _Region, node: ir.Node, operands: Sequence[Operand]) -> _Tensor:
    """Return the result of a LayerNormalization or RMSNormalization, whose scale and offset other operators follow."""
    x, *scales = operands
    if not isinstance(x, _Tensor) or not 1 <= len(scales) <= 2 or any(isinstance(s, _Tensor) for s in scales):
        raise NotARowError
    if attribute(node, "axis", -1) % len(x.labels) != len(x.labels) - 1 or len(node.outputs) > 1:
        raise NotARowError
    average = _reduced(region, x, [len(x.labels) - 1], True).polynomial
    is_centred = is_op(node, CENTRED)
    centred = add(x.polynomial, scale(average, -np.ones(1))) if is_centred else x.polynomial
    assert region.axis is not None
    variance = mean(multiply(centred, centred), region.axis)
    epsilon = Polynomial({NUMBER: np.full(1, float(attribute(node, "epsilon", 1e-5)))})
    result = _Tensor(multiply(centred, power(add(variance, epsilon), -0.5)), x.labels)
    for combine, array in zip((multiply, add), scales):
        assert not isinstance(array, _Tensor)
        result = _Tensor(combine(result.polynomial, _aligned(region, array, result).polynomial), x.labels)
    return result


RULES: dict[str, Rule] = {
    **dict.fromkeys(("Add", "Sub"), _sum),
    **dict.fromkeys(("Mul", "Div"), _product),
    **dict.fromkeys(("Pow", "Sqrt", "Reciprocal"), _power),
    **dict.fromkeys(("Cast", "Neg"), _same),
    **dict.fromkeys(MOVING_OPS, _move),
    **dict.fromkeys(("ReduceMean", "GlobalAveragePool"), _reduce),
    **dict.fromkeys(("ReduceSum", "ReduceSumSquare", "ReduceL2"), _reduce),
    **dict.fromkeys(("Conv", "MatMul"), _weigh),
    **dict.fromkeys(NORMS, _normalise),
}
"""Operator -> the function that returns what it computes of polynomials of rows. It raises NotARowError for others."""
STARTS = (_reduce, _weigh, _normalise)
"""Rules of operators that every normalisation has one of."""


def _rule_of(node: ir.Node) -> Rule | None:
    """Return the rule of an operator; None if there is none."""
    rule = RULES.get(node.op_type) if is_op(node, node.op_type) else None
    return None if rule is _weigh and _equal_weights(node) is None else rule
