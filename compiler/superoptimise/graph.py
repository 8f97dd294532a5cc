"""A model as the algebra sees it: operators on bytes and accumulators, and between them ONNX's as they are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler import numerics

Array = NDArray[Any]
ONNX = "onnx"
"""An operator that the algebra knows nothing of; attribute `proto` is its node."""
ONNX_NAMES = {
    "convolve": "Conv", "float_convolve": "Conv", "multiply": "MatMul", "float_multiply": "MatMul", "plus": "Add",
    "largest": "MaxPool", "largest_again": "MaxPool", "average": "AveragePool", "average_by_products": "Conv",
    "real_plus": "Add", "real_shift": "Add", "real_scale": "Mul", "real_average": "AveragePool", "real_pad": "Pad",
    "real_normalised": "BatchNormalization", "phases": "SpaceToDepth", "interleave": "DepthToSpace",
    "transpose": "Transpose", "reshape": "Reshape", "slice": "Slice", "concat": "Concat", "pad": "Pad",
}  # fmt: skip
"""ONNX's operator of each operator of the algebra that one stands for."""


@dataclass(frozen=True)
class Meant:
    """Scale and zero point of bytes for one operator: real = (byte - zero) * scale."""

    scale: float
    zero: int

    @property
    def pair(self) -> tuple[float, int]:
        """Scale and zero point, as numerics takes them."""
        return self.scale, self.zero


@dataclass(frozen=True)
class ByteMap:
    """An operator of floats between DequantizeLinear and QuantizeLinear, or one of onnxruntime's that is the same: a
    function of single bytes.

    operator: ONNX's. attributes: by name, numbers. qdq: how it was written. others: inputs that are constants.
    """

    operator: str
    attributes: tuple[tuple[str, Any], ...]
    operands: tuple[Meant, ...]
    result: Meant
    dtype: str
    qdq: bool
    others: tuple[str, ...] = ()

    def __call__(self, *operands: Array) -> Array:
        """Apply it to arrays of bytes of one shape. KeyError for an operator of which numerics has no table."""
        a, y = self.operands[0].pair, self.result.pair
        if len(operands) == 1:
            lowest = np.iinfo(self.dtype).min
            found = self.table[operands[0].astype(np.int64) - lowest].astype(np.int64) + (lowest + 128)
            return found.astype(self.dtype)
        function = numerics.BINARY[self.operator].of_bytes
        return np.asarray(function(operands[0], operands[1], *a, *self.operands[1].pair, *y))

    @cached_property
    def table(self) -> Array:
        """[256] int8, of bytes in rising order, less 128 where they are uint8; for one operand. KeyError."""
        given = dict(self.attributes)
        return numerics.unary_table(
            self.operator, given, *self.operands[0].pair, *self.result.pair, np.dtype(self.dtype)
        )

    def __str__(self) -> str:
        return self.operator


@dataclass(frozen=True)
class FloatMap:
    """An operator of floats that is a function of single elements. operator, attributes: as in ByteMap."""

    operator: str
    attributes: tuple[tuple[str, Any], ...]

    def __call__(self, *operands: Array) -> Array:
        """Raises ValueError: who runs the model computes it."""
        raise ValueError(f"{self.operator} of floats is not computed here")

    @property
    def table(self) -> Array:
        """Raises KeyError: there is none."""
        raise KeyError(self.operator)

    def __str__(self) -> str:
        return self.operator


@dataclass(frozen=True)
class Written:
    """Original form of a requantised product: its operator of ONNX, whether with QDQ, and the scales of x, w and y.

    biased: it had a bias.
    """

    operator: str
    qdq: bool
    x: float
    w: tuple[float, ...]
    y: float
    biased: bool


Note = Written | Meant | None
"""Data of an operation that only the writer needs: Written of `requantise`; Meant of movement between QDQ."""


@dataclass(frozen=True)
class GraphOp:
    """A node. inputs: "" for one that is left out, of an operator of ONNX alone."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[tuple[str, Any], ...] = ()
    note: Note = None

    def __getitem__(self, name: str) -> Any:
        return dict(self.attributes)[name]

    @property
    def given(self) -> dict[str, Any]:
        """Attributes by name."""
        return dict(self.attributes)


@dataclass(frozen=True)
class TensorKind:
    """Kind of a tensor. shape: None where it is not known."""

    shape: tuple[int, ...] | None
    dtype: str


@dataclass(frozen=True)
class BytesGraph:
    """operations: in order. kinds: of all tensors of the algebra. inputs, outputs: names, in the model's order. labels:
    names of nodes in the model, by the tensor that they make."""

    operations: tuple[GraphOp, ...]
    constants: Mapping[str, Array]
    kinds: Mapping[str, TensorKind]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    labels: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    _names: list[int] = field(default_factory=lambda: [0], compare=False, repr=False)
    _digests: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Digests of constants, which graphs that are made of each other share; none of them has another of the same
    name."""

    @cached_property
    def makers(self) -> dict[str, GraphOp]:
        """The operation that makes each tensor."""
        return {name: each for each in self.operations for name in each.outputs if name}

    @cached_property
    def places(self) -> dict[str, int]:
        """Position in `operations` of the operation that makes each tensor."""
        return {name: place for place, each in enumerate(self.operations) for name in each.outputs if name}

    @cached_property
    def by_operator(self) -> dict[str, list[GraphOp]]:
        """The operations of each operator, in order."""
        found: dict[str, list[GraphOp]] = {}
        for each in self.operations:
            found.setdefault(each.op, []).append(each)
        return found

    @cached_property
    def readers(self) -> dict[str, list[GraphOp]]:
        """The operations that read each tensor."""
        found: dict[str, list[GraphOp]] = {}
        for each in self.operations:
            for name in dict.fromkeys(filter(None, each.inputs)):
                found.setdefault(name, []).append(each)
        return found

    @cached_property
    def digest(self) -> str:
        """Digest of what is computed and how it is written, whatever tensors inside are called."""
        lines, numbers = self._numbered
        lines = sorted(lines) + [f"output {name} {numbers.get(name)}" for name in self.outputs]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]

    @property
    def numbers(self) -> dict[str, str]:
        """Digest of what each tensor is computed from, without names."""
        return self._numbered[1]

    @cached_property
    def _numbered(self) -> tuple[list[str], dict[str, str]]:
        numbers = {name: f"input {name}" for name in self.inputs}
        lines = []
        for each in self.operations:
            read = [numbers.get(name) or self._digest(name) for name in each.inputs]
            lines.append(f"{each.op} {read} {each.attributes} {each.note}")
            mine = hashlib.sha256(lines[-1].encode()).hexdigest()[:24]
            numbers |= {name: f"{mine}.{place}" for place, name in enumerate(each.outputs)}
        return lines, numbers

    def _digest(self, name: str) -> str:
        if name not in self._digests:
            self._digests[name] = _digest(self.constants.get(name))
        return self._digests[name]

    def fresh(self, near: str) -> str:
        """A name that no tensor has, of this graph or of one that is made of it."""
        while True:
            self._names[0] += 1
            name = f"{near.split('__')[0]}__{self._names[0]}"
            if name not in self.kinds and name not in self.constants and name not in self.makers:
                return name

    def ordered(self, operations: Sequence[GraphOp]) -> BytesGraph:
        """The graph with other operations, in any order; what no output needs is left out."""
        return replace(self, operations=tuple(_needed(operations, self.outputs)), _names=self._names)


def _digest(array: Array | None) -> str:
    if array is None:
        return "unknown"
    text = f"{array.dtype} {array.shape} ".encode()
    return hashlib.sha256(text + np.ascontiguousarray(array).tobytes()).hexdigest()[:24]


def _needed(operations: Sequence[GraphOp], outputs: Sequence[str]) -> Iterator[GraphOp]:
    """Yield the operations that outputs are made of, each behind those that make its inputs, else in their order."""
    makers = {name: each for each in operations for name in each.outputs if name}
    wanted: set[int] = set()
    waiting = [makers[name] for name in outputs if name in makers]
    while waiting:
        each = waiting.pop()
        if id(each) not in wanted:
            wanted.add(id(each))
            waiting += [makers[name] for name in each.inputs if name in makers]
    done: set[int] = set()
    limit = sum(len(each.inputs) + 1 for each in operations) * 2
    for each in operations:
        stack = [each] if id(each) in wanted else []
        while stack:
            if len(stack) > limit:
                raise ValueError("operations that read each other in a circle")
            top = stack[-1]
            before = [makers[name] for name in top.inputs if name in makers and id(makers[name]) not in done]
            if id(top) in done:
                stack.pop()
            elif before:
                stack += before
            else:
                done.add(id(top))
                stack.pop()
                yield top
