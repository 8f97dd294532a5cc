"""Arrange images in blocks of channels around convolutions, so that the CPU's vectors go over channels.

    y = Conv(x, w)                           y16 = BlockedConv(x, w16)
    z = Relu(y)                       ->     z16 = Relu(y16)
    u = MaxPool(z)                           u16 = BlockedMaxPool(z16); u = Unblock(u16)

A tensor stays in blocks as long as its readers take blocks. Weights are constants, which are arranged here. The blocked
operators are those of ops/celosia_domain.py.
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
from celosia.compiler.graph.simplify.convolutions import is_training
from celosia.compiler.graph.values import RESERVED, attribute, attributes, constant, new_constant, shape
from celosia.compiler.ops import OPS, op_spec
from celosia.compiler.ops.elementwise import BINARY, INTRINSICS, UNARY, VARIADIC
from celosia.compiler.program.op_spec import Kind
from celosia.compiler.target import target

Shape = tuple[int, ...]
"""A static shape."""
FUNCTIONS = frozenset((*UNARY, *INTRINSICS, "Clip"))
"""Functions of one element."""
ELEMENTWISE = frozenset((*FUNCTIONS, *BINARY, *VARIADIC, "Where"))
"""Operators that compute element by element, in any layout."""
MOVEMENTS = frozenset(("Slice", "Pad"))
"""Operators that move rows and columns, in any layout."""
_BLOCKED = {name.removeprefix("Blocked"): op_spec(name) for name in OPS if name.startswith("Blocked")}
"""Operator -> OpSpec of its blocked form."""
CONVOLUTIONS = frozenset(name for name, spec in _BLOCKED.items() if spec.weights_input is not None)
"""Operators whose blocked form has weights."""
GLOBAL_POOLS = frozenset(name for name, spec in _BLOCKED.items() if spec.kind is Kind.REDUCTION)
"""Operators whose blocked form reduces the whole image, and whose result is in no blocks."""
POOLS = _BLOCKED.keys() - CONVOLUTIONS - GLOBAL_POOLS
"""Operators whose blocked form pools windows."""


def use_blocked_layout(model: ir.Model, lanes: int | None = None) -> None:
    """Rewrite float32 convolutions, and the operators between them, into blocks of channels, in place.

    lanes: channels of the largest block; None stands for the float32 lanes of the target's vectors.
    """
    _Layout(model.graph, lanes or target().lanes("float32")).run()


DEEP_CHANNELS = 160
"""Input channels from which on reading them one by one touches more memory pages than the CPU reads fast."""


MAX_PLAIN_STRIDE = 2
"""Largest stride along a row for which the plain form reads vectors."""


def _is_shallow(node: ir.Node, w: NDArray[Any]) -> bool:
    """Return whether a convolution is 1x1 with stride 1 and sums fewer than DEEP_CHANNELS input channels."""
    return prod(w.shape[2:]) == 1 and w.shape[1] < DEEP_CHANNELS and set(attribute(node, "strides", [1])) == {1}


class _Layout:
    """The rewriting of one graph.

    blocked: plain value -> its blocked form, which may have further channels in its last block. replacements: (replaced
    node, its new result). names: names of values, which new ones must not take.
    """

    def __init__(self, graph: ir.Graph, lanes: int) -> None:
        self.graph, self.lanes = graph, lanes
        self.blocked: dict[ir.Value, ir.Value] = {}
        self.replacements: list[tuple[ir.Node, ir.Value]] = []
        self.names = {value.name for node in graph for value in node.outputs} | graph.meta.get(RESERVED, frozenset())

    def run(self) -> None:
        """Insert blocked operators front to back, then remove the replaced nodes back to front."""
        for node in list(self.graph):
            if node.domain in ("", "ai.onnx") and _is_image_operator(node):
                y = self._rewrite(node)
                if y is not None:
                    self.replacements.append((node, y))
        for node, y in reversed(self.replacements):
            self._remove_replaced(node, y)

    def _rewrite(self, node: ir.Node) -> ir.Value | None:
        """Insert the replacement of `node`, blocked or plain, and return its output; None if `node` stays."""
        if node.op_type in CONVOLUTIONS:
            y = self._insert_conv(node)
        elif node.op_type in GLOBAL_POOLS:
            return self._insert_global_pool(node)
        elif node.op_type in POOLS:
            y = self._insert_pool(node)
        elif node.op_type in MOVEMENTS:
            y = self._insert_movement(node)
        elif joins_parts(node):
            y = self._insert_concat(node)
        elif node.op_type == "BatchNormalization":
            y = self._insert_batch_norm(node)
        else:
            y = self._insert_elementwise(node) if node.op_type in ELEMENTWISE else None
        if y is not None:
            self.blocked[node.outputs[0]] = y
        return y

    def _remove_replaced(self, node: ir.Node, y: ir.Value) -> None:
        """Remove a replaced node; its remaining readers get the new result `y`, in plain layout."""
        old_result = node.outputs[0]
        if old_result.uses() or old_result.is_graph_output():
            if old_result in self.blocked:
                y = self._insert_unblock(node, y, _dims(old_result))
            ir.convenience.replace_all_uses_with(old_result, y, replace_graph_outputs=True)
            name, old_result.name = old_result.name, None
            y.name = name
        self.graph.remove(node, safe=True)

    # Operators -------------------------------------------------------------------------------------------------

    def _insert_conv(self, node: ir.Node) -> ir.Value | None:
        """Insert the blocked form of a convolution; None if it stays plain, because blocks would not be faster.

        Output channels are padded with zeros to whole vectors before a global pool, which drops them, and where that is
        faster than the plain form or half vectors. The input stays plain where it has few channels, which are read
        faster so, and where it is padded.
        """
        x, w = node.inputs[0], constant(node.inputs[1])
        assert x is not None
        out_dims = _dims(node.outputs[0])
        if w is None or w.ndim < 3:
            return None
        group, channels = attribute(node, "group", 1), _dims(x)[1]
        out_block, bias = self._block_size(out_dims[1]), [value for value in (operand(node, "b"),) if value is not None]
        constant_bias = all(constant(value) is not None for value in bias)
        if (
            out_block < self.lanes < out_dims[1] and group == 1 and constant_bias
            and (self._leads_to_global_pool(node) or self._gains_by_padding(node, out_block))
        ):  # fmt: skip
            out_block, padding = self.lanes, -out_dims[1] % self.lanes
            out_dims, w = (out_dims[0], out_dims[1] + padding, *out_dims[2:]), _pad_with_zeros(w, padding)
            bias = [self._pad_bias(value, padding) for value in bias]
        if not out_block:
            return None
        is_depthwise = group == channels == out_dims[1]
        fills_vectors = is_depthwise and 2 * out_dims[-1] >= self.lanes  # a row of the image fills half a vector
        if x not in self.blocked and (fills_vectors or _is_shallow(node, w)) and not self._leads_to_conv(node):
            return None  # the plain form is as fast, and needs no conversions
        if is_depthwise:
            x, in_block = self._in_blocks(x, node), 1
            if x is None:
                return None
        else:
            if group == 1 and channels // self.lanes:  # fewer channels are read faster as they are
                x = self._in_blocks(x, node) or x
            x = x if self._is_padded(x) else self.blocked.get(x, x)
            in_block = _dims(x)[-1] if len(_dims(x)) > w.ndim else 1
            if channels // group % in_block or out_dims[1] // group % out_block:
                return None
        weights = new_constant(
            self.graph, f"{_name_of(node.inputs[1])}.blocked", _arrange_weights(w, in_block, out_block)
        )
        weights.meta.update(node.inputs[1].meta)  # type: ignore[union-attr]
        return self._insert(node, "BlockedConv", [x, weights, *bias], _blocked_dims(out_dims, out_block))

    def _gains_by_padding(self, node: ir.Node, out_block: int) -> bool:
        """Return whether a convolution is faster with padded channels, which no convolution can read, than without.

        out_block: channels of a block without padding; 0 for the plain form, which computes vectors of neighbours in a
        row, and is slow where it reads every third element or fewer.
        """
        if not out_block:
            return bool(attribute(node, "strides", [1])[-1] > MAX_PLAIN_STRIDE)
        return not self._leads_to_conv(node)

    def _is_padded(self, x: ir.Value) -> bool:
        """Return whether the blocked form of a plain value has further channels, of no meaning, behind its own."""
        y = self.blocked.get(x)
        return y is not None and _dims(y)[1] * _dims(y)[-1] != _dims(x)[1]

    def _leads_to_conv(self, node: ir.Node) -> bool:
        """Return whether only operators that keep blocks lie between `node` and some later convolution."""
        users = [use.node for use in node.outputs[0].uses()]
        block_keeping = (*ELEMENTWISE, *POOLS, *MOVEMENTS, "BatchNormalization")
        keeping_users = [user for user in users if user.op_type in block_keeping or joins_parts(user)]
        return any(user.op_type in CONVOLUTIONS for user in users) or any(map(self._leads_to_conv, keeping_users))

    def _leads_to_global_pool(self, node: ir.Node) -> bool:
        """Return whether the result of `node` goes to a global pool alone, perhaps through functions of one element."""
        y = node.outputs[0]
        users = [use.node for use in y.uses()]
        if len(users) != 1 or y.is_graph_output():
            return False
        if users[0].domain not in ("", "ai.onnx") or not _is_image_operator(users[0]):
            return False
        if users[0].op_type in GLOBAL_POOLS:
            return True
        limits = users[0].inputs[1:] if users[0].op_type == "Clip" else []
        is_unary = users[0].op_type in FUNCTIONS and all(x is None or prod(_dims(x)) == 1 for x in limits)
        return is_unary and self._leads_to_global_pool(users[0])

    def _pad_bias(self, bias: ir.Value, zeros: int) -> ir.Value:
        """Add a constant: `bias` with this number of zeros appended."""
        array = constant(bias)
        assert array is not None
        return new_constant(self.graph, f"{_name_of(bias)}.longer", _pad_with_zeros(array, zeros))

    def _insert_pool(self, node: ir.Node) -> ir.Value | None:
        """Insert the blocked form of a pooling whose input is in blocks and whose indices nobody reads; else None."""
        x = self.blocked.get(_first_input(node))
        if x is None or any(out.uses() or out.is_graph_output() for out in node.outputs[1:]):
            return None
        dims = _blocked_dims(_dims(node.outputs[0]), _dims(x)[-1])
        return self._insert(node, f"Blocked{node.op_type}", [x], dims)

    def _insert_global_pool(self, node: ir.Node) -> ir.Value | None:
        """Insert the blocked form of a global pool, and a Slice that drops padded channels; None for a plain input."""
        x, out = self.blocked.get(_first_input(node)), _dims(node.outputs[0])
        if x is None:
            return None
        channels = _dims(x)[1] * _dims(x)[-1]
        y = self._insert(node, f"Blocked{node.op_type}", [x], (out[0], channels, *out[2:]))
        return y if channels == out[1] else self._insert_first_channels(node, y, out[1])

    def _insert_first_channels(self, node: ir.Node, x: ir.Value, count: int) -> ir.Value:
        """Insert a Slice that keeps the first channels of a plain value."""
        dims = _dims(x)
        first, last, axis = (new_constant(self.graph, "slice", np.array([n], np.int64)) for n in (0, count, 1))
        return self._insert(node, "Slice", [x, first, last, axis], (dims[0], count, *dims[2:]))

    def _insert_concat(self, node: ir.Node) -> ir.Value | None:
        """Insert a Concat of blocks; None if parts are plain, or of different blocks, or of different samples."""
        blocked_inputs = [self.blocked.get(x) for x in node.inputs if x is not None]
        parts = [x for x in blocked_inputs if x is not None]
        out = _dims(node.outputs[0])
        blocks, axis = {_dims(x)[-1] for x in parts}, attribute(node, "axis") % len(out)
        is_padded = any(x is not None and self._is_padded(x) for x in node.inputs)
        if len(parts) < len(blocked_inputs) or len(blocks) != 1 or axis == 0 or (axis == 1 and is_padded):
            return None
        return self._insert(node, node.op_type, parts, _blocked_dims(out, blocks.pop()), axis=axis)

    def _insert_movement(self, node: ir.Node) -> ir.Value | None:
        """Insert a Slice or Pad of blocks along rows and columns; None for a plain input, and along other axes."""
        x, out = self.blocked.get(_first_input(node)), _dims(node.outputs[0])
        bounds = constant(operand(node, "starts" if node.op_type == "Slice" else "pads"))
        if x is None or bounds is None or _dims(_first_input(node))[:2] != out[:2]:
            return None
        axes_value, rank = operand(node, "axes"), len(out)
        given_axes = range(rank)[: len(bounds)] if axes_value is None else constant(axes_value)
        if given_axes is None:
            return None
        axes = [int(axis) % rank for axis in given_axes]
        if node.op_type == "Pad":
            pads = np.zeros((2, rank + 1), np.int64)
            pads[:, axes] = np.reshape(bounds, (2, -1))
            parameters = [new_constant(self.graph, "pads", pads.reshape(-1)), operand(node, "constant_value")]
        else:
            new_axes = new_constant(self.graph, "axes", np.array(axes, np.int64))
            parameters = [operand(node, "starts"), operand(node, "ends"), new_axes, operand(node, "steps")]
        while parameters[-1] is None:
            parameters.pop()
        return self._insert(node, node.op_type, [x, *parameters], _blocked_dims(out, _dims(x)[-1]))

    def _insert_batch_norm(self, node: ir.Node) -> ir.Value | None:
        """Insert y = x * factor + offset for a BatchNormalization of blocks; None for a plain input or in training."""
        x, parameters = self.blocked.get(_first_input(node)), [constant(value) for value in node.inputs[1:]]
        if x is None or is_training(node) or any(array is None for array in parameters):
            return None
        scale, bias, mean, variance = (np.asarray(array, np.float64) for array in parameters)
        factor = scale / np.sqrt(variance + attribute(node, "epsilon", 1e-5))
        dims = _dims(x)
        parameter_dims = (dims[1], *(1,) * (len(dims) - 3), dims[-1])
        for op, array in (("Mul", factor), ("Add", bias - mean * factor)):
            padded = _pad_with_zeros(array.astype(np.float32), dims[1] * dims[-1] - len(array))
            value = new_constant(self.graph, f"{node.name}.{op.lower()}", padded.reshape(parameter_dims))
            x = self._insert(node, op, [x, value], dims)
        return x

    def _insert_elementwise(self, node: ir.Node) -> ir.Value | None:
        """Insert an elementwise operator on blocks.

        None if no operand is in blocks, or one would have to be converted.
        """
        out_dims = _dims(node.outputs[0])
        block = next(
            (_dims(self.blocked[x])[-1] for x in node.inputs if x in self.blocked and _dims(x)[1:2] == out_dims[1:2]), 0
        )
        if not block:
            return None
        operands = [None if x is None else self._block_operand(x, out_dims, block, node) for x in node.inputs]
        if any(new_operand is None for new_operand, x in zip(operands, node.inputs) if x is not None):
            return None
        blocks = max(_dims(self.blocked[x])[1] for x in node.inputs if x in self.blocked)
        return self._insert(node, node.op_type, operands, (out_dims[0], blocks, *out_dims[2:], block))

    def _block_operand(self, x: ir.Value, out: Shape, c: int, node: ir.Node) -> ir.Value | None:
        """Return operand `x` so that it broadcasts to `out` in blocks of `c` channels; None if that would cost time."""
        dims, array = _dims(x), constant(x)
        if x in self.blocked:
            return self.blocked[x] if dims[1] == out[1] and _dims(self.blocked[x])[-1] == c else None
        if prod(dims) == 1:
            return x if len(dims) < len(out) else self._insert_reshape(node, x, (1,) * (len(out) + 1))
        if len(dims) > len(out):
            return None
        dims = (*(1,) * (len(out) - len(dims)), *dims)
        if array is None:
            is_vector = prod(dims[2:]) == 1 and dims == _dims(x) and dims[1] == out[1] and not out[1] % c
            return self._in_blocks(x, node) if is_vector else None
        channels_per_block = c if dims[1] == out[1] else 1
        array = np.moveaxis(
            _pad_with_zeros(np.moveaxis(array.reshape(dims), 1, 0), -dims[1] % channels_per_block), 0, 1
        )
        array = np.moveaxis(array.reshape(dims[0], -1, channels_per_block, *dims[2:]), 2, -1)
        return new_constant(self.graph, f"{x.name}.blocked", array)

    # Conversion ------------------------------------------------------------------------------------------------

    def _block_size(self, channels: int) -> int:
        """Return the channels of a block: a vector or half of one; 0 if neither divides `channels`."""
        return next((c for c in (self.lanes, self.lanes // 2) if c > 1 and channels % c == 0), 0)

    def _in_blocks(self, x: ir.Value, node: ir.Node) -> ir.Value | None:
        """Return `x` in blocks, converted before `node` if it is not yet; None if no block divides its channels."""
        if x not in self.blocked:
            dims = _dims(x)
            if not (c := self._block_size(dims[1])):
                return None
            blocked_dims = _blocked_dims(dims, c)
            is_single_pixel = prod(dims[2:]) == 1
            self.blocked[x] = (
                self._insert_reshape(node, x, blocked_dims)
                if is_single_pixel
                else self._insert(node, "Block", [x], blocked_dims, block=c)
            )
        return self.blocked[x]

    def _insert_unblock(self, node: ir.Node, x: ir.Value, dims: Shape) -> ir.Value:
        """Insert the conversion of blocks to the plain shape `dims`; single pixels only need a Reshape."""
        padded = (dims[0], _dims(x)[1] * _dims(x)[-1], *dims[2:])
        is_pixel = prod(dims[2:]) == 1
        y = self._insert_reshape(node, x, padded) if is_pixel else self._insert(node, "Unblock", [x], padded)
        return y if padded == dims else self._insert_first_channels(node, y, dims[1])

    def _insert_reshape(self, node: ir.Node, x: ir.Value, dims: Shape) -> ir.Value:
        """Insert a Reshape to `dims` before `node`."""
        return self._insert(node, "Reshape", [x, new_constant(self.graph, "dims", np.array(dims, np.int64))], dims)

    def _insert(self, node: ir.Node, op: str, inputs: Sequence[ir.Value | None], dims: Shape, **attrs: Any) -> ir.Value:
        """Insert an operator before `node` and return its output.

        If it is the operator of `node`, or its blocked form, it gets the attributes and the name of `node`.
        """
        is_own = "Block" in op or op == "Unblock"
        copied = list(node.attributes.values()) if op.removeprefix("Blocked") == node.op_type and not attrs else []
        wanted_name = f"{_name_of(node.outputs[0])}.{op.lower()}"
        name = next(n for k in itertools.count() if (n := f"{wanted_name}{k or ''}") not in self.names)
        self.names.add(name)
        is_form = op.removeprefix("Blocked") == node.op_type
        source = node.outputs[0] if is_form else inputs[0]
        out = ir.Value(name=name, shape=ir.Shape(dims), type=source.type if source else None)
        new_node = ir.Node(
            "celosia" if is_own else "", op, inputs, [*copied, *attributes(**attrs)], outputs=[out],
            name=node.name if is_form else name,
        )  # fmt: skip
        if is_form:
            new_node.meta.update(node.meta)
        self.graph.insert_before(node, new_node)
        return out


def _pad_with_zeros(array: NDArray[Any], zeros: int) -> NDArray[Any]:
    """Return `array` with this number of `zeros` behind it along the first axis."""
    return np.concatenate([array, np.zeros((zeros, *array.shape[1:]), array.dtype)])


def _arrange_weights(w: NDArray[Any], c: int, m: int) -> NDArray[Any]:
    """Arrange weights [M, C, ...] as [M/m, C/c, ..., c, m]."""
    out, channels, *kernel = w.shape
    in_blocks = w.reshape(out // m, m, channels // c, c, *kernel)
    return np.moveaxis(in_blocks, (3, 1), (-2, -1))


def _blocked_dims(dims: Shape, c: int) -> Shape:
    """Return the shape of an image of shape `dims` in blocks of `c` channels: [N, ceil(C / c), ..., c]."""
    return dims[0], -(-dims[1] // c), *dims[2:], c


def _is_image_operator(node: ir.Node) -> bool:
    """Return whether `node` computes images from images: of floats or truth values, known shapes, and no size 0.

    Operands beside data, such as the bounds of a Slice, may have any type.
    """
    op = node.op_type
    data = [value for value in (*node.inputs, *node.outputs[:1]) if value is not None]
    if op in MOVEMENTS:
        data = [value for value in (*node.inputs[:1], *node.outputs) if value is not None]
    types = (ir.DataType.FLOAT, ir.DataType.BOOL) if op in (*ELEMENTWISE, *MOVEMENTS) else (ir.DataType.FLOAT,)
    is_supported = all(shape(value) is not None and value.dtype in types for value in data)
    return is_supported and len(_dims(node.outputs[0])) >= 3 and 0 not in _dims(node.outputs[0])


def _dims(value: ir.Value) -> Shape:
    """Return the shape of a value, which must be known."""
    dims = shape(value)
    assert dims is not None
    return dims


def _first_input(node: ir.Node) -> ir.Value:
    """Return the first input of a node, which must be there."""
    x = node.inputs[0]
    assert x is not None
    return x


def _name_of(value: ir.Value | None) -> str:
    """Return the name of a value; "" for none."""
    return (value.name if value is not None else None) or ""
