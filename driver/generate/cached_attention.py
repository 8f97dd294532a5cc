"""Rewrite attention operators that onnxruntime-genai exports, with a cache inside, to plain operators.

    y, present_k, present_v = GroupQueryAttention(q, k, v, past_k, past_v, last, total, cos, sin)
        ->
    present_k = Concat(past_k, rotated(heads(k)))    present_v = Concat(past_v, heads(v))
    y = Softmax(rotated(heads(q)) · present_kᵀ · scale + mask) · present_v

The mask is computed from the model's own mask: which tokens are seen, and in which order. So a cache of fixed length
may have unused rows between those of past and of new tokens, which onnxruntime's operator does not support. Plain
operators can also be quantised, and then run on the accelerator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importing.inlining import opset_of
from celosia.driver.generate.position_source import require_position_inputs
from celosia.driver.generate.roles import CACHE_AXIS, Cache, Roles, find_roles
from celosia.driver.generate.rotary import Rotary
from celosia.driver.generate.writer import GraphWriter

GROUPED, MULTIPLE = "GroupQueryAttention", "MultiHeadAttention"
"""The two operators with a cache inside."""
CACHE_INPUTS = {GROUPED: (3, 4), MULTIPLE: (6, 7)}
"""Numbers of the inputs that are caches of keys and values, by operator."""
SUPPORTED_ATTRIBUTES = {
    GROUPED: ("num_heads", "kv_num_heads", "scale", "softcap", "local_window_size", "do_rotary", "rotary_interleaved"),
    MULTIPLE: ("num_heads", "scale", "unidirectional", "mask_filter_value"),
}
"""Attributes that the rewriting supports, by operator."""
HARMLESS_VALUES = {"causal": 1, "k_quant_type": b"NONE", "v_quant_type": b"NONE"}
"""Values of other attributes, besides 0, that change nothing."""
SUPPORTED_INPUTS = {GROUPED: 11, MULTIPLE: 8}
"""Number of inputs that the rewriting supports, by operator; the others must be left out."""
MIN_OPSET = 13
"""The first opset in which axes of Squeeze and Unsqueeze are inputs."""
DEFAULT_MASK_VALUE = -10000.0
"""Number that MULTIPLE adds to scores of masked keys, unless an attribute gives another one."""
END = np.iinfo(np.int64).max
"""End of a Slice up to the last element."""


def decompose_cached_attention(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of the decoder `proto` in which plain operators replace attention with a cache inside.

    `proto` itself where there is none. ModelError where plain operators cannot express an attention.
    """
    if not any(map(_has_cache, proto.graph.node)):
        return proto
    if (opset := opset_of(proto, "")) < MIN_OPSET:
        raise ModelError(
            f"attention with a cache inside it needs opset {MIN_OPSET}, not {opset}; export the model with it"
        )
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    roles = find_roles(proto)
    writer = GraphWriter(result.graph, "attention")
    for node in proto.graph.node:
        if not _has_cache(node):
            writer.nodes.append(node)
            continue
        _require_supported(node)
        if node.op_type == GROUPED:
            require_position_inputs(proto, node, roles)
            _Grouped(writer, node, roles).write()
        else:
            _Multiple(writer, node, roles).write()
    writer.close()
    return result


def _has_cache(node: onnx.NodeProto) -> bool:
    """Whether `node` is an attention operator with caches as inputs."""
    return node.op_type in CACHE_INPUTS and all(_input_name(node, number) for number in CACHE_INPUTS[node.op_type])


def _input_name(node: onnx.NodeProto, number: int) -> str:
    """Return the name of input `number` of a node; "" where it is left out."""
    return node.input[number] if number < len(node.input) else ""


def _attribute_values(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes of a node as Python values, by name."""
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _node_name(node: onnx.NodeProto) -> str:
    """Return a node's operator and name for errors."""
    return f"{node.op_type} ({node.name or node.output[0]})"


def _require_supported(node: onnx.NodeProto) -> None:
    """Raise ModelError where `node` has attributes or inputs that the decomposition does not support."""
    for name, value in _attribute_values(node).items():
        if name not in SUPPORTED_ATTRIBUTES[node.op_type] and value != HARMLESS_VALUES.get(name, 0):
            raise ModelError(
                f"{_node_name(node)} has {name} = {value!r}, which cannot be run step by step; leave it out"
            )
    if unsupported := [name for name in node.input[SUPPORTED_INPUTS[node.op_type] :] if name]:
        raise ModelError(f"{_node_name(node)} takes {unsupported[0]!r}, which cannot be run step by step; leave it out")


class _Attention:
    """Writes one attention node as plain operators: the parts that both operators share.

    Methods write nodes and return the names of their results. heads: number of query heads; size: elements of a head.
    cache: the keys' cache. pasts: names of both caches' inputs. ModelError where a cache is no input of the model.
    """

    def __init__(self, writer: GraphWriter, node: onnx.NodeProto, roles: Roles) -> None:
        self.writer, self.op = writer, writer.op
        self.node, self.roles, self.attrs = node, roles, _attribute_values(node)
        caches = {cache.past: cache for cache in roles.caches}
        self.pasts = [node.input[number] for number in CACHE_INPUTS[node.op_type]]
        for past in self.pasts:
            if past not in caches:
                raise ModelError(f"{_node_name(node)} has a cache {past!r}, which is no input; export it as one")
        self.cache: Cache = caches[self.pasts[0]]
        self.heads, self.size = int(self.attrs.get("num_heads", 0)), self.cache.size
        self.dtype = np.dtype(self.cache.dtype)

    def float_constant(self, value: Any) -> str:
        """Write a constant of the element type of queries, keys and values."""
        return self.writer.constant(value, self.dtype)

    def split_heads(self, x: str, heads: int) -> str:
        """Write [batch, heads, steps, size] from [batch, steps, heads * size]."""
        parts = self.op("Reshape", x, self.writer.ints(0, 0, heads, self.size))
        return self.op("Transpose", parts, perm=(0, 2, 1, 3))

    def attend(self, q: str, k: str, v: str, added: list[str]) -> None:
        """Write scaled dot-product attention of q, k and v [batch, heads, steps, size] to the node's outputs.

        The new keys and values are appended to the caches. added: tensors that are added to the scores, such as masks.
        """
        outputs = [*self.node.output, "", ""]
        k, v = (
            self.op("Concat", past, new, called=present, axis=CACHE_AXIS)
            for past, new, present in zip(self.pasts, (k, v), outputs[1:])
        )
        keys, values = self.repeat_for_queries(k), self.repeat_for_queries(v)
        scores = self.op("MatMul", q, self.op("Transpose", keys, perm=(0, 1, 3, 2)))
        scale = self.attrs.get("scale", 0.0) or 1 / np.sqrt(self.size)
        scores = self.op("Mul", scores, self.float_constant(scale))
        if soft_cap := self.attrs.get("softcap", 0.0):
            scores = self.op(
                "Mul",
                self.op("Tanh", self.op("Div", scores, self.float_constant(soft_cap))),
                self.float_constant(soft_cap),
            )
        for bias in added:
            scores = self.op("Add", scores, bias)
        mixed = self.op("MatMul", self.op("Softmax", scores, axis=-1), values)
        rows = self.op("Transpose", mixed, perm=(0, 2, 1, 3))
        self.op("Reshape", rows, self.writer.ints(0, 0, self.heads * self.size), called=outputs[0])

    def repeat_for_queries(self, x: str) -> str:
        """Repeat each head of keys or values for the query heads that share it (grouped-query attention)."""
        group_size = self.heads // self.cache.heads
        if group_size == 1:
            return x
        several = self.op("Unsqueeze", x, self.writer.ints(2))
        several = self.op("Expand", several, self.writer.ints(1, 1, group_size, 1, 1))
        return self.op("Reshape", several, self.writer.ints(0, self.heads, -1, self.size))

    def additive_mask(self, seen: str, value: float) -> str:
        """Write a mask to add to scores: 0 where the bool tensor `seen` is true, else `value`."""
        return self.writer.once("Where", seen, self.float_constant(0), self.float_constant(value))

    def last_entries(self, x: str) -> str:
        """Slice x [batch, total] to the new tokens, which are the last ones."""
        steps = self.writer.once("Shape", self.roles.tokens)
        steps = self.writer.once("Gather", steps, self.writer.ints(1))
        begin = self.writer.once("Neg", steps)
        return self.writer.once("Slice", x, begin, self.writer.ints(END), self.writer.ints(1))

    def token_positions(self) -> str:
        """Write the position of each token of the mask [batch, total]: the number of unmasked tokens before it."""
        once = self.writer.once
        seen = once("Cast", self.roles.mask, to=TensorProto.INT64)
        return once("Sub", once("CumSum", seen, self.writer.constant(1)), self.writer.constant(1))

    def causal_mask(self, window: int) -> str:
        """Write the bool mask [batch, 1, steps, total] of the keys that each new token attends to.

        They are unmasked and not after the token. window: if positive, also fewer than so many positions before it.
        """
        once, positions = self.writer.once, self.token_positions()
        columns, rows = self.writer.ints(1, 2), self.writer.ints(1, 3)
        valid = once("Unsqueeze", once("Cast", self.roles.mask, to=TensorProto.BOOL), columns)
        rows, columns = once("Unsqueeze", self.last_entries(positions), rows), once("Unsqueeze", positions, columns)
        seen = once("And", valid, once("LessOrEqual", columns, rows))
        if window > 0:
            seen = once("And", seen, once("Less", once("Sub", rows, self.writer.constant(window)), columns))
        return seen


class _Grouped(_Attention):
    """Writes a GroupQueryAttention.

    Its inputs: query, key and value (or all in the first), two caches, the last position and the number of positions,
    cosines, sines, positions of new tokens, and a bias of the scores.
    """

    def write(self) -> None:
        """Write the operator as plain operators. ModelError where its heads do not fit its cache."""
        kv_heads = self.cache.heads
        if self.attrs.get("kv_num_heads") != kv_heads or not self.heads or self.heads % kv_heads:
            raise ModelError(
                f"{_node_name(self.node)} has {self.heads} heads of queries, and its cache {kv_heads} of keys"
            )
        qkv = self.node.input[:3]
        if not _input_name(self.node, 1):
            qkv = self.split_last_axis(qkv[0], [self.heads * self.size, *[kv_heads * self.size] * 2])
        q, k, v = (self.split_heads(x, heads) for x, heads in zip(qkv, (self.heads, kv_heads, kv_heads)))
        if self.attrs.get("do_rotary", 0):
            tables = [_input_name(self.node, number) for number in (7, 8)]
            is_interleaved = bool(self.attrs.get("rotary_interleaved", 0))
            positions = _input_name(self.node, 9) or self.last_entries(self.token_positions())
            rotary = Rotary(self.writer, _node_name(self.node), tables, self.size, is_interleaved, positions)
            q, k = rotary.rotate(q), rotary.rotate(k)
        added = [bias] if (bias := _input_name(self.node, 10)) else []
        mask = self.additive_mask(self.causal_mask(self.attrs.get("local_window_size", -1)), np.finfo(self.dtype).min)
        self.attend(q, k, v, [*added, mask])

    def split_last_axis(self, x: str, sizes: Sequence[int]) -> list[str]:
        """Split the last axis of `x` into parts of these sizes.

        If a product with a constant (and a bias) computes `x`, it is split into products instead of slicing: quantised,
        queries, keys and values then have scales of their own.
        """
        node, constants = self.writer.makers.get(x, onnx.NodeProto()), self.writer.constants
        if node.op_type not in ("MatMul", "Add") or node.input[1] not in constants:
            return self.writer.slice_last_axis(x, sizes)
        packed = numpy_helper.to_array(constants[node.input[1]])
        if packed.ndim != (2 if node.op_type == "MatMul" else 1):
            return self.writer.slice_last_axis(x, sizes)
        parts = [self.writer.constant(part, part.dtype) for part in np.split(packed, np.cumsum(sizes)[:-1], axis=-1)]
        operands = self.split_last_axis(node.input[0], sizes) if node.op_type == "Add" else [node.input[0]] * len(sizes)
        return [self.op(node.op_type, operand, part) for operand, part in zip(operands, parts)]


class _Multiple(_Attention):
    """Writes a MultiHeadAttention.

    Its inputs: query, key, value, a bias of all three, a mask of keys [batch, total], a bias of the scores, two caches.
    """

    def write(self) -> None:
        """Write the operator as plain operators. ModelError where its heads do not fit its cache."""
        qkv = list(self.node.input[:3])
        if not all(qkv) or self.cache.heads != self.heads:
            raise ModelError(f"{_node_name(self.node)} has not {self.heads} heads of queries, keys and values each")
        if bias := _input_name(self.node, 3):
            parts = self.writer.slice_last_axis(bias, [self.heads * self.size] * 3)
            qkv = [self.op("Add", x, part) for x, part in zip(qkv, parts)]
        q, k, v = (self.split_rotated_heads(x) for x in qkv)
        mask_value, added = self.attrs.get("mask_filter_value", DEFAULT_MASK_VALUE), []
        if mask := _input_name(self.node, 4):
            seen = self.writer.once("Cast", mask, to=TensorProto.BOOL)
            added.append(self.additive_mask(self.writer.once("Unsqueeze", seen, self.writer.ints(1, 2)), mask_value))
        if score_bias := _input_name(self.node, 5):
            added.append(score_bias)
        if self.attrs.get("unidirectional", 0):
            added.append(self.additive_mask(self.causal_mask(0), np.finfo(self.dtype).min))
        self.attend(q, k, v, added)

    def split_rotated_heads(self, x: str) -> str:
        """Split x into heads. If a RotaryEmbedding with constant tables computes x, rotate the heads of its input
        instead.

        The rotation is then in plain operators, which `celosia quantize --operators rotary` can quantise so that they
        run in the launch of attention. x stays as it is where the rotation is of another kind: scaled, packed, at
        other positions than the model's, or of heads of another size.
        """
        node = self.writer.makers.get(x, onnx.NodeProto())
        attrs = _attribute_values(node)
        is_unscaled = attrs.get("scale", 1.0) == 1.0 and not attrs.get("is_packed_batching", 0)
        are_constant = all(name in self.writer.constants for name in node.input[2:4])
        if (
            node.op_type != "RotaryEmbedding"
            or not (is_unscaled and are_constant)
            or node.input[1] != self.roles.positions
        ):
            return self.split_heads(x, self.heads)
        is_interleaved = bool(attrs.get("interleaved", 0))
        rotary = Rotary(self.writer, _node_name(node), node.input[2:4], self.size, is_interleaved, self.roles.positions)
        # Without rotary_embedding_dim, RotaryEmbedding has heads of 2 * half elements, which may not be attention's.
        has_same_heads = bool(attrs.get("rotary_embedding_dim", 0)) or (2 * rotary.half == self.size)
        heads = self.split_heads(node.input[0] if has_same_heads else x, self.heads)
        return rotary.rotate(heads) if has_same_heads else heads
