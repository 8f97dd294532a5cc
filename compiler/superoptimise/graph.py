"""A model in the algebra: operators on bytes and accumulators, between ONNX nodes that are kept as they are.

reading.py makes a BytesGraph of an ONNX model, rules rewrite it, and writing.py makes an ONNX model of it again.

The parts: functions of bytes, and how the model wrote them; the graph; the scales of ONNX for given multipliers.
onnxruntime computes the multiplier of each channel as f32(f32(sx * sw) / sy). A rule says which multipliers a product
has; here the scales of its weights are found, and the scale of its result, bit by bit. Readers of the result use scales
of their own, so that any scale of the result will do.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler import numerics
from celosia.compiler.graph.quantized.tables import function_of_operator
from celosia.compiler.numerics import conv_scale
from celosia.compiler.ops import op_spec

Array = NDArray[Any]
ONNX = "onnx"
"""The operator of a node that the algebra does not know; its attribute `proto` is the serialised node."""


@dataclass(frozen=True)
class Quantisation:
    """Scale and zero point with which an operator reads or writes bytes: real = (byte - zero) * scale."""

    scale: float
    zero: int

    @property
    def pair(self) -> tuple[float, int]:
        """Scale and zero point as a tuple, as numerics takes them."""
        return self.scale, self.zero


@dataclass(frozen=True)
class ByteMap:
    """A function of single bytes: a float operator between DequantizeLinear and QuantizeLinear, or its quantised form.

    operator, attributes: of ONNX's float operator. operands, result: quantisation of each. dtype: of all bytes. qdq:
    whether the model had QDQ around the float operator. others: further inputs, which are constants.
    """

    operator: str
    attributes: tuple[tuple[str, Any], ...]
    operands: tuple[Quantisation, ...]
    result: Quantisation
    dtype: str
    qdq: bool
    others: tuple[str, ...] = ()

    def __call__(self, *operands: Array) -> Array:
        """Apply the function to arrays of bytes of one shape. KeyError for an operator that is no function of
        one tensor.
        """
        a, y = self.operands[0].pair, self.result.pair
        if len(operands) == 1:
            lowest = np.iinfo(self.dtype).min
            result = self.table[operands[0].astype(np.int64) - lowest].astype(np.int64) + (lowest + 128)
            return result.astype(self.dtype)
        function = numerics.BINARY[self.operator].of_bytes
        return np.asarray(function(operands[0], operands[1], *a, *self.operands[1].pair, *y))

    @cached_property
    def table(self) -> Array:
        """The table of a function of one byte: [256] int8 for the bytes in rising order, less 128 where they are uint8.
        KeyError for an operator that is no function of one tensor.
        """
        function = function_of_operator(self.operator, dict(self.attributes))
        return numerics.unary_table(function, *self.operands[0].pair, *self.result.pair, np.dtype(self.dtype))

    def __str__(self) -> str:
        return self.operator


@dataclass(frozen=True)
class FloatMap:
    """A float operator that is a function of single elements, such as Relu. operator, attributes: as in ByteMap."""

    operator: str
    attributes: tuple[tuple[str, Any], ...]

    def __call__(self, *operands: Array) -> Array:
        """Raise ValueError: only the runtime of the model computes floats."""
        raise ValueError(f"{self.operator} of floats is not computed here")

    @property
    def table(self) -> Array:
        """Raise KeyError, as for a ByteMap without a table."""
        raise KeyError(self.operator)

    def __str__(self) -> str:
        return self.operator


@dataclass(frozen=True)
class OriginalForm:
    """How the model wrote a requantised product, so that the writer can write it alike.

    operator: of ONNX. qdq: whether QDQ was around it. x, w, y: scales of operands and result, for w one or one for each
    output. biased: whether it had a bias.
    """

    operator: str
    qdq: bool
    x: float
    w: tuple[float, ...]
    y: float
    biased: bool


Note = OriginalForm | Quantisation | None
"""Remark for the writer on an operation: the original ONNX form of a `requantise`, or the quantisation of the QDQ nodes
around an operator of bytes; None without one.
"""


@dataclass(frozen=True)
class GraphOp:
    """An operation of a graph.

    op: an operator of the algebra, or ONNX. inputs: names of tensors; "" for an input that an ONNX node leaves out.
    attributes: (name, value), sorted by name. note: for the writer.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[tuple[str, Any], ...] = ()
    note: Note = None

    def __getitem__(self, name: str) -> Any:
        return dict(self.attributes)[name]

    @property
    def attributes_by_name(self) -> dict[str, Any]:
        """The attributes as a dict."""
        return dict(self.attributes)


@dataclass(frozen=True)
class TensorKind:
    """Shape and element type of a tensor. shape: None where it is not known."""

    shape: tuple[int, ...] | None
    dtype: str


@dataclass(frozen=True)
class BytesGraph:
    """A model in the algebra.

    operations: in an order in which they can be computed. constants: by name. kinds: of all tensors of the algebra.
    inputs, outputs: names in the model's order. labels: the name of the model's node that made a tensor, by the
    tensor's name.
    """

    operations: tuple[GraphOp, ...]
    constants: Mapping[str, Array]
    kinds: Mapping[str, TensorKind]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    labels: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    _names: list[int] = field(default_factory=lambda: [0], compare=False, repr=False)
    """The number of names that `fresh` has made. Graphs that are made of each other share it."""
    _digests: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Digests of constants by name. Graphs that are made of each other share it; no two of their constants have one
    name.
    """

    @cached_property
    def makers(self) -> dict[str, GraphOp]:
        """The operation that makes each tensor, by the tensor's name."""
        return {name: operation for operation in self.operations for name in operation.outputs if name}

    @cached_property
    def places(self) -> dict[str, int]:
        """The position in `operations` of the operation that makes each tensor."""
        return {name: place for place, operation in enumerate(self.operations) for name in operation.outputs if name}

    @cached_property
    def by_operator(self) -> dict[str, list[GraphOp]]:
        """The operations of each operator, in order."""
        operations: dict[str, list[GraphOp]] = {}
        for operation in self.operations:
            operations.setdefault(operation.op, []).append(operation)
        return operations

    @cached_property
    def readers(self) -> dict[str, list[GraphOp]]:
        """The operations that read each tensor, in order."""
        readers: dict[str, list[GraphOp]] = {}
        for operation in self.operations:
            for name in dict.fromkeys(filter(None, operation.inputs)):
                readers.setdefault(name, []).append(operation)
        return readers

    @cached_property
    def digest(self) -> str:
        """Digest of what the graph computes and how it is written; names of inner tensors do not matter. The search
        recognises graphs by it.
        """
        lines, numbers = self._lines_and_numbers
        lines = sorted(lines) + [f"output {name} {numbers.get(name)}" for name in self.outputs]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]

    @property
    def value_numbers(self) -> dict[str, str]:
        """The value number of each tensor: equal for tensors that are computed alike, whatever their names."""
        return self._lines_and_numbers[1]

    @cached_property
    def _lines_and_numbers(self) -> tuple[list[str], dict[str, str]]:
        """A line of text for each operation, with value numbers for names, and the value number of each tensor."""
        numbers = {name: f"input {name}" for name in self.inputs}
        lines = []
        for operation in self.operations:
            inputs = [numbers.get(name) or self._constant_digest(name) for name in operation.inputs]
            lines.append(f"{operation.op} {inputs} {operation.attributes} {operation.note}")
            digest = hashlib.sha256(lines[-1].encode()).hexdigest()[:24]
            numbers |= {name: f"{digest}.{place}" for place, name in enumerate(operation.outputs)}
        return lines, numbers

    def _constant_digest(self, name: str) -> str:
        """Return the digest of a constant, or "unknown" for a tensor that is none; digests are remembered."""
        if name not in self._digests:
            digest, array = "unknown", self.constants.get(name)
            if array is not None:
                content = f"{array.dtype} {array.shape} ".encode() + np.ascontiguousarray(array).tobytes()
                digest = hashlib.sha256(content).hexdigest()[:24]
            self._digests[name] = digest
        return self._digests[name]

    def fresh(self, near: str) -> str:
        """Return a name, made of `near`, that no tensor has, neither of this graph nor of one that is made of it."""
        while True:
            self._names[0] += 1
            name = f"{near.split('__')[0]}__{self._names[0]}"
            if name not in self.kinds and name not in self.constants and name not in self.makers:
                return name

    def ordered(self, operations: Sequence[GraphOp]) -> BytesGraph:
        """Return a graph with these operations instead. They may come in any order; those that no output needs are
        dropped.
        """
        return replace(self, operations=tuple(_needed_operations(operations, self.outputs)), _names=self._names)


def _needed_operations(operations: Sequence[GraphOp], outputs: Sequence[str]) -> Iterator[GraphOp]:
    """Yield the operations that `outputs` depend on, each after those that make its inputs and else in the old order.
    ValueError for a cycle.
    """
    makers = {name: operation for operation in operations for name in operation.outputs if name}
    needed: set[int] = set()
    waiting = [makers[name] for name in outputs if name in makers]
    while waiting:
        operation = waiting.pop()
        if id(operation) not in needed:
            needed.add(id(operation))
            waiting += [makers[name] for name in operation.inputs if name in makers]
    done: set[int] = set()
    limit = sum(len(operation.inputs) + 1 for operation in operations) * 2  # a longer stack is a cycle
    for operation in operations:
        stack = [operation] if id(operation) in needed else []
        while stack:
            if len(stack) > limit:
                raise ValueError("operations that read each other in a circle")
            top = stack[-1]
            unordered = [makers[name] for name in top.inputs if name in makers and id(makers[name]) not in done]
            if id(top) in done:
                stack.pop()
            elif unordered:
                stack += unordered
            else:
                done.add(id(top))
                stack.pop()
                yield top


Floats = NDArray[np.float32]
NEIGHBOURS = 6
"""Number of floats on each side of the quotient that are tried as scales."""


def weights_of(m: Floats, sx: float, sy: float) -> Floats | None:
    """Find [channels] scales of weights with conv_scale(sx, scales, sy) == m; None where a channel has none.

    >>> weights_of(np.array([0.5, 0.1], np.float32), 0.25, 0.125).tolist()
    [0.25, 0.05000000074505806]
    """
    with np.errstate(all="ignore"):
        guess = (m.astype(np.float64) * np.float32(sy) / np.float32(sx)).astype(np.float32)
        if not np.all(np.isfinite(guess)) or np.any(guess < np.finfo(np.float32).tiny):
            return None
        steps = np.arange(-NEIGHBOURS, NEIGHBOURS + 1)
        neighbours = (guess.view(np.int32)[:, None] + steps[np.argsort(np.abs(steps), kind="stable")]).astype(np.int32)
        candidates = neighbours.view(np.float32)
        is_exact = conv_scale(sx, candidates, sy) == m[:, None]
    if not np.all(is_exact.any(1)):
        return None
    return np.asarray(candidates[np.arange(len(m)), is_exact.argmax(1)])


def realised(m: Floats, notes: Sequence[OriginalForm]) -> OriginalForm | None:
    """Find scales for a product with the multipliers `m`, written like those of `notes`; None where there are none.

    Scales of a note that give the multipliers are kept. Where no note has scales of x and y for all channels, these
    become powers of two: multiplying by them is exact, so that every multiplier has a scale of weights.
    """
    kinds = {(op_spec(note.operator).windows, note.qdq) for note in notes}
    if len(kinds) != 1:
        return None
    biased = any(note.biased for note in notes)
    operator = next((note.operator for note in notes if note.biased), notes[0].operator)
    rounded = [replace(note, x=_nearest_power_of_two(note.x), y=_nearest_power_of_two(note.y)) for note in notes[:1]]
    for form in (*notes, *rounded):
        scales = _scales_with_multipliers(m, [note for note in notes if (note.x, note.y) == (form.x, form.y)])
        is_known = np.isfinite(scales)
        others = weights_of(m[~is_known], form.x, form.y)
        if others is None:
            continue
        scales[~is_known] = others
        return replace(form, operator=operator, biased=biased, w=tuple(float(scale) for scale in scales))
    return None


def _nearest_power_of_two(scale: float) -> float:
    """Return the power of two whose logarithm is nearest to that of `scale`."""
    return float(2.0 ** round(math.log2(scale)))


def _scales_with_multipliers(m: Floats, notes: Sequence[OriginalForm]) -> Floats:
    """Return [channels] the scales of weights in `notes` that have the multipliers `m`; NaN where none has."""
    result = np.full(m.shape, np.nan, np.float32)
    for note in notes:
        scales = np.array(note.w, np.float32)
        multipliers = conv_scale(note.x, scales, note.y)
        scale_of = {float(multiplier): scale for multiplier, scale in zip(multipliers, scales)}
        for channel, multiplier in enumerate(m):
            if np.isnan(result[channel]) and float(multiplier) in scale_of:
                result[channel] = scale_of[float(multiplier)]
    return result
