"""Images in blocks of channels around convolutions, so that the CPU's vectors go over channels.

    y = Conv(x, w)                           y16 = BlockedConv(x, w16)
    z = Relu(y)                       ->     z16 = Relu(y16)
    u = MaxPool(z)                           u16 = BlockedMaxPool(z16); u = Unblock(u16)

What the next operator takes in blocks is never converted back. Weights are constants, which are arranged here. The
operators are those of ops/blocked.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.operands import joins_parts, operand
from celosia.compiler.graph.simplify.batchnorm import is_training
from celosia.compiler.graph.values import RESERVED, attribute, attributes, constant, new_constant, shape
from celosia.compiler.ops import OPS, op_spec
from celosia.compiler.ops.elementwise import BINARY, UNARY, VARIADIC
from celosia.compiler.program.op_spec import Kind
from celosia.compiler.target import target

Shape = tuple[int, ...]
ELEMENTWISE = frozenset((*UNARY, *BINARY, *VARIADIC, "Clip"))
_BLOCKED = {name.removeprefix("Blocked"): op_spec(name) for name in OPS if name.startswith("Blocked")}
CONVOLUTIONS = frozenset(name for name, spec in _BLOCKED.items() if spec.weights is not None)
GLOBAL_POOLS = frozenset(name for name, spec in _BLOCKED.items() if spec.kind is Kind.REDUCTION)
POOLS = _BLOCKED.keys() - CONVOLUTIONS - GLOBAL_POOLS


def layout(model: ir.Model, lanes: int | None = None) -> None:
    """Rewrite float32 convolutions, and what stands between them, in place. lanes: the largest block of channels."""
    _Layout(model.graph, lanes or target().lanes("float32")).run()


DEEP = 160
"""Channels that are added up, from which on a tile that reads them one by one reads more pages of memory than the
processor finds fast."""


def _is_shallow(node: ir.Node, w: NDArray[Any]) -> bool:
    """Whether a convolution is of single pixels that are neighbours, and adds up few of them."""
    return prod(w.shape[2:]) == 1 and w.shape[1] < DEEP and set(attribute(node, "strides", [1])) == {1}


class _Layout:
    """`blocked`: the blocked form of values that have one. `done`: nodes replaced so far, with what they make now."""

    def __init__(self, graph: ir.Graph, lanes: int) -> None:
        self.graph, self.lanes = graph, lanes
        self.blocked: dict[ir.Value, ir.Value] = {}
        self.done: list[tuple[ir.Node, ir.Value]] = []
        self.names = {value.name for node in graph for value in node.outputs} | graph.meta.get(RESERVED, frozenset())

    def run(self) -> None:
        for node in list(self.graph):
            if node.domain in ("", "ai.onnx") and _in_floats(node):
                y = self._rewrite(node)
                if y is not None:
                    self.done.append((node, y))
        for node, y in reversed(self.done):
            self._replace(node, y)

    def _rewrite(self, node: ir.Node) -> ir.Value | None:
        """Return the output of `node` as blocked or plain operators make it; None if `node` stays."""
        if node.op_type in CONVOLUTIONS:
            y = self._conv(node)
        elif node.op_type in GLOBAL_POOLS:
            return self._global_pool(node)
        elif node.op_type in POOLS:
            y = self._pool(node)
        elif joins_parts(node):
            y = self._concat(node)
        elif node.op_type == "BatchNormalization":
            y = self._batch_norm(node)
        else:
            y = self._elementwise(node) if node.op_type in ELEMENTWISE else None
        if y is not None:
            self.blocked[node.outputs[0]] = y
        return y

    def _replace(self, node: ir.Node, y: ir.Value) -> None:
        old = node.outputs[0]
        if old.uses() or old.is_graph_output():
            if old in self.blocked:
                y = self._unblock(node, y, _dims(old))
            ir.convenience.replace_all_uses_with(old, y, replace_graph_outputs=True)
            name, old.name = old.name, None
            y.name = name
        self.graph.remove(node, safe=True)

    # Operators -------------------------------------------------------------------------------------------------

    def _conv(self, node: ir.Node) -> ir.Value | None:
        x, w = node.inputs[0], constant(node.inputs[1])
        assert x is not None
        out = _dims(node.outputs[0])
        if w is None or w.ndim < 3:
            return None
        group, channels = attribute(node, "group", 1), _dims(x)[1]
        m, bias = self._block(out[1]), [value for value in (operand(node, "b"),) if value is not None]
        fixed = all(constant(value) is not None for value in bias)
        if m < self.lanes < out[1] and group == 1 and fixed and self._leads_to_global_pool(node):
            m, more = self.lanes, -out[1] % self.lanes  # channels of zeros, which the pool leaves out
            out, w = (out[0], out[1] + more, *out[2:]), _longer(w, more)
            bias = [self._longer_bias(value, more) for value in bias]
        if not m:
            return None
        by_channel = group == channels == out[1]
        fills = by_channel and 2 * out[-1] >= self.lanes  # with a line of the image, half a vector or more
        if x not in self.blocked and (fills or _is_shallow(node, w)) and not self._leads_to_conv(node):
            return None  # as fast as it is, without conversions
        if by_channel:
            x, c = self._blocks_of(x, node), 1
            if x is None:
                return None
        else:
            if group == 1 and channels // self.lanes:  # fewer channels are read faster as they are
                x = self._blocks_of(x, node) or x
            x = self.blocked.get(x, x)
            c = _dims(x)[-1] if len(_dims(x)) > w.ndim else 1
            if channels // group % c or out[1] // group % m:
                return None
        weights = new_constant(self.graph, f"{_name(node.inputs[1])}.blocked", _arranged(w, c, m))
        weights.meta.update(node.inputs[1].meta)  # type: ignore[union-attr]
        return self._emit(node, "BlockedConv", [x, weights, *bias], _blocked_dims(out, m))

    def _leads_to_conv(self, node: ir.Node) -> bool:
        """Whether operators that keep blocks lead from `node` to another convolution."""
        users = [use.node for use in node.outputs[0].uses()]
        keep = (*ELEMENTWISE, *POOLS, "BatchNormalization")
        through = [user for user in users if user.op_type in keep or joins_parts(user)]
        return any(user.op_type in CONVOLUTIONS for user in users) or any(map(self._leads_to_conv, through))

    def _leads_to_global_pool(self, node: ir.Node) -> bool:
        """Whether all that reads what `node` makes is a global pool, with but functions of one element between."""
        y = node.outputs[0]
        users = [use.node for use in y.uses()]
        if len(users) != 1 or y.is_graph_output():
            return False
        if users[0].domain not in ("", "ai.onnx") or not _in_floats(users[0]):
            return False
        if users[0].op_type in GLOBAL_POOLS:
            return True
        limits = users[0].inputs[1:] if users[0].op_type == "Clip" else []
        alone = users[0].op_type in (*UNARY, "Clip") and all(x is None or prod(_dims(x)) == 1 for x in limits)
        return alone and self._leads_to_global_pool(users[0])

    def _longer_bias(self, bias: ir.Value, more: int) -> ir.Value:
        array = constant(bias)
        assert array is not None
        return new_constant(self.graph, f"{_name(bias)}.longer", _longer(array, more))

    def _pool(self, node: ir.Node) -> ir.Value | None:
        x = self.blocked.get(_first(node))
        if x is None or any(out.uses() or out.is_graph_output() for out in node.outputs[1:]):
            return None
        dims = _blocked_dims(_dims(node.outputs[0]), _dims(x)[-1])
        return self._emit(node, f"Blocked{node.op_type}", [x], dims)

    def _global_pool(self, node: ir.Node) -> ir.Value | None:
        x, out = self.blocked.get(_first(node)), _dims(node.outputs[0])
        if x is None:
            return None
        channels = _dims(x)[1] * _dims(x)[-1]
        y = self._emit(node, f"Blocked{node.op_type}", [x], (out[0], channels, *out[2:]))
        if channels == out[1]:
            return y
        first, last, axis = (new_constant(self.graph, "slice", np.array([n], np.int64)) for n in (0, out[1], 1))
        return self._emit(node, "Slice", [y, first, last, axis], out)

    def _concat(self, node: ir.Node) -> ir.Value | None:
        found = [self.blocked.get(x) for x in node.inputs if x is not None]
        parts = [x for x in found if x is not None]
        out = _dims(node.outputs[0])
        blocks = {_dims(x)[-1] for x in parts}
        if len(parts) < len(found) or len(blocks) != 1 or attribute(node, "axis") not in (1, 1 - len(out)):
            return None
        return self._emit(node, node.op_type, parts, _blocked_dims(out, blocks.pop()), axis=1)

    def _batch_norm(self, node: ir.Node) -> ir.Value | None:
        """As y = x * factor + offset."""
        x, fixed = self.blocked.get(_first(node)), [constant(value) for value in node.inputs[1:]]
        if x is None or is_training(node) or any(array is None for array in fixed):
            return None
        scale, bias, mean, variance = (np.asarray(array, np.float64) for array in fixed)
        factor = scale / np.sqrt(variance + attribute(node, "epsilon", 1e-5))
        dims = _dims(x)
        across = (dims[1], *(1,) * (len(dims) - 3), dims[-1])
        for op, array in (("Mul", factor), ("Add", bias - mean * factor)):
            value = new_constant(self.graph, f"{node.name}.{op.lower()}", array.astype(np.float32).reshape(across))
            x = self._emit(node, op, [x, value], dims)
        return x

    def _elementwise(self, node: ir.Node) -> ir.Value | None:
        """An operator of which some operand is in blocks, and none is large and not."""
        out = _dims(node.outputs[0])
        c = next(
            (_dims(self.blocked[x])[-1] for x in node.inputs if x in self.blocked and _dims(x)[1:2] == out[1:2]), 0
        )
        if not c:
            return None
        operands = [None if x is None else self._operand(x, out, c, node) for x in node.inputs]
        if any(new is None for new, x in zip(operands, node.inputs) if x is not None):
            return None
        blocks = max(_dims(self.blocked[x])[1] for x in node.inputs if x in self.blocked)
        return self._emit(node, node.op_type, operands, (out[0], blocks, *out[2:], c))

    def _operand(self, x: ir.Value, out: Shape, c: int, node: ir.Node) -> ir.Value | None:
        """x as it is broadcast to `out` in blocks of c channels; None where that takes work."""
        dims, fixed = _dims(x), constant(x)
        if x in self.blocked:
            return self.blocked[x] if dims[1] == out[1] else None
        if prod(dims) == 1:
            return x if len(dims) < len(out) else self._reshape(node, x, (1,) * (len(out) + 1))
        if len(dims) > len(out):
            return None
        dims = (*(1,) * (len(out) - len(dims)), *dims)
        if fixed is None:
            return self._blocks_of(x, node) if prod(dims[2:]) == 1 and dims == _dims(x) and dims[1] == out[1] else None
        step = c if dims[1] == out[1] else 1
        array = np.moveaxis(fixed.reshape(dims[0], dims[1] // step, step, *dims[2:]), 2, -1)
        return new_constant(self.graph, f"{x.name}.blocked", array)

    # Conversion ------------------------------------------------------------------------------------------------

    def _block(self, channels: int) -> int:
        """Channels of a block; 0 where no block divides them all."""
        return next((c for c in (self.lanes, self.lanes // 2) if c > 1 and channels % c == 0), 0)

    def _blocks_of(self, x: ir.Value, node: ir.Node) -> ir.Value | None:
        """x in blocks, converted before `node` where it is not. None where no block divides its channels."""
        if x not in self.blocked:
            dims = _dims(x)
            if not (c := self._block(dims[1])):
                return None
            into = _blocked_dims(dims, c)
            one = prod(dims[2:]) == 1
            self.blocked[x] = self._reshape(node, x, into) if one else self._emit(node, "Block", [x], into, block=c)
        return self.blocked[x]

    def _unblock(self, node: ir.Node, x: ir.Value, dims: Shape) -> ir.Value:
        return self._reshape(node, x, dims) if prod(dims[2:]) == 1 else self._emit(node, "Unblock", [x], dims)

    def _reshape(self, node: ir.Node, x: ir.Value, dims: Shape) -> ir.Value:
        return self._emit(node, "Reshape", [x, new_constant(self.graph, "dims", np.array(dims, np.int64))], dims)

    def _emit(self, node: ir.Node, op: str, inputs: Sequence[ir.Value | None], dims: Shape, **attrs: Any) -> ir.Value:
        """The output of a new operator before `node`, with its attributes where it stands for `node`."""
        ours = "Block" in op or op == "Unblock"
        given = list(node.attributes.values()) if op.removeprefix("Blocked") == node.op_type and not attrs else []
        wanted = f"{_name(node.outputs[0])}.{op.lower()}"
        name = next(n for k in itertools.count() if (n := f"{wanted}{k or ''}") not in self.names)
        self.names.add(name)
        out = ir.Value(name=name, shape=ir.Shape(dims), type=ir.TensorType(ir.DataType.FLOAT))
        label = node.name if op.removeprefix("Blocked") == node.op_type else name
        fresh = ir.Node(
            "celosia" if ours else "", op, inputs, [*given, *attributes(**attrs)], outputs=[out], name=label
        )
        self.graph.insert_before(node, fresh)
        return out


def _longer(array: NDArray[Any], more: int) -> NDArray[Any]:
    """With so many more zeros along the first axis."""
    return np.concatenate([array, np.zeros((more, *array.shape[1:]), array.dtype)])


def _arranged(w: NDArray[Any], c: int, m: int) -> NDArray[Any]:
    """[M, C, ...] as [M/m, C/c, ..., c, m]."""
    out, channels, *kernel = w.shape
    split = w.reshape(out // m, m, channels // c, c, *kernel)
    return np.moveaxis(split, (3, 1), (-2, -1))


def _blocked_dims(dims: Shape, c: int) -> Shape:
    return dims[0], dims[1] // c, *dims[2:], c


def _in_floats(node: ir.Node) -> bool:
    """Whether `node` computes float32 from float32, of known shapes that have channels."""
    values = [value for value in (*node.inputs, *node.outputs[:1]) if value is not None]
    known = all(shape(value) is not None and value.dtype == ir.DataType.FLOAT for value in values)
    return known and len(_dims(node.outputs[0])) >= 3 and 0 not in _dims(node.outputs[0])


def _dims(value: ir.Value) -> Shape:
    dims = shape(value)
    assert dims is not None
    return dims


def _first(node: ir.Node) -> ir.Value:
    x = node.inputs[0]
    assert x is not None
    return x


def _name(value: ir.Value | None) -> str:
    return (value.name if value is not None else None) or ""
