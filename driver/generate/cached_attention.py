"""Rewrite attention operators with a cache inside, as onnxruntime-genai writes them, to plain operators, as optimum
does.

    y, present_k, present_v = GroupQueryAttention(q, k, v, past_k, past_v, last, total, cos, sin)
        ->
    present_k = Concat(past_k, turned(heads(k)))    present_v = Concat(past_v, heads(v))
    y = Softmax(turned(heads(q)) · present_kᵀ · scale + mask) · present_v

The mask is made of the model's own: which tokens are seen, and in which order. So rows that hold nothing may lie
between those of tokens, which onnxruntime's operator does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importing.functions import opset_of
from celosia.driver.generate.position_source import require_position_inputs
from celosia.driver.generate.roles import CACHE_AXIS, Cache, Roles, find_roles
from celosia.driver.generate.rotary import Rotary
from celosia.driver.generate.writer import GraphWriter

GROUPED, MULTIPLE = "GroupQueryAttention", "MultiHeadAttention"
PASTS = {GROUPED: (3, 4), MULTIPLE: (6, 7)}
"""The inputs of each that are a cache."""
PLAIN = {
    GROUPED: ("num_heads", "kv_num_heads", "scale", "softcap", "local_window_size", "do_rotary", "rotary_interleaved"),
    MULTIPLE: ("num_heads", "scale", "unidirectional", "mask_filter_value"),
}
"""Attributes of each that are written in plain operators."""
DEFAULTS = {"causal": 1, "k_quant_type": b"NONE", "v_quant_type": b"NONE"}
"""Values beside 0 of other attributes that change nothing."""
INPUTS = {GROUPED: 11, MULTIPLE: 8}
"""Number of inputs of each operator that can be written in plain operators."""
OPSET = 13
"""The first in which axes are inputs."""
MASKED = -10000.0
"""Number that MULTIPLE adds to scores that a mask hides, unless an attribute gives another one."""
END = np.iinfo(np.int64).max


def decompose_cached_attention(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return `proto`, a decoder, without attention that has a cache inside; itself where it has none. ModelError where
    plain operators cannot express it."""
    if not any(map(_has_cache, proto.graph.node)):
        return proto
    if (opset := opset_of(proto, "")) < OPSET:
        raise ModelError(f"attention with a cache inside it needs opset {OPSET}, not {opset}; export the model with it")
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    roles = find_roles(proto)
    writer = GraphWriter(result.graph, "attention")
    for node in proto.graph.node:
        if not _has_cache(node):
            writer.nodes.append(node)
            continue
        _require_plain(node)
        if node.op_type == GROUPED:
            require_position_inputs(proto, node, roles)
            _Grouped(writer, node, roles).write()
        else:
            _Multiple(writer, node, roles).write()
    writer.close()
    return result


def _has_cache(node: onnx.NodeProto) -> bool:
    return node.op_type in PASTS and all(_input_name(node, number) for number in PASTS[node.op_type])


def _input_name(node: onnx.NodeProto, number: int) -> str:
    """Name of an input of a node, "" where there is none."""
    return node.input[number] if number < len(node.input) else ""


def _attribute_values(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _node_name(node: onnx.NodeProto) -> str:
    return f"{node.op_type} ({node.name or node.output[0]})"


def _require_plain(node: onnx.NodeProto) -> None:
    """Raise ModelError where `node` has attributes or inputs that the decomposition does not support."""
    for name, value in _attribute_values(node).items():
        if name not in PLAIN[node.op_type] and value != DEFAULTS.get(name, 0):
            raise ModelError(
                f"{_node_name(node)} has {name} = {value!r}, which cannot be run step by step; leave it out"
            )
    if unsupported := [name for name in node.input[INPUTS[node.op_type] :] if name]:
        raise ModelError(f"{_node_name(node)} takes {unsupported[0]!r}, which cannot be run step by step; leave it out")


class _Attention:
    """Writer of what both operators share: heads, a cache, scores, softmax. ModelError where the cache is none of the
    model's."""

    def __init__(self, writer: GraphWriter, node: onnx.NodeProto, roles: Roles) -> None:
        self.writer, self.op, self.node, self.roles, self.attrs = (
            writer,
            writer.op,
            node,
            roles,
            _attribute_values(node),
        )
        caches = {cache.past: cache for cache in roles.caches}
        self.pasts = [node.input[number] for number in PASTS[node.op_type]]
        for past in self.pasts:
            if past not in caches:
                raise ModelError(f"{_node_name(node)} has a cache {past!r}, which is no input; export it as one")
        self.cache: Cache = caches[self.pasts[0]]
        self.heads, self.size = int(self.attrs.get("num_heads", 0)), self.cache.size
        self.dtype = np.dtype(self.cache.dtype)

    def real(self, value: Any) -> str:
        """Write a constant of the type of queries, keys and values."""
        return self.writer.constant(value, self.dtype)

    def split(self, x: str, heads: int) -> str:
        """Write [batch, heads, steps, size] from [batch, steps, heads * size]."""
        parts = self.op("Reshape", x, self.writer.ints(0, 0, heads, self.size))
        return self.op("Transpose", parts, perm=(0, 2, 1, 3))

    def attend(self, q: str, k: str, v: str, added: list[str]) -> None:
        """Write attention of [batch, heads, steps, size], keys and values behind the cache. added: to the scores."""
        outputs = [*self.node.output, "", ""]
        k, v = (
            self.op("Concat", past, new, called=present, axis=CACHE_AXIS)
            for past, new, present in zip(self.pasts, (k, v), outputs[1:])
        )
        keys, values = self.repeated(k), self.repeated(v)
        scores = self.op("MatMul", q, self.op("Transpose", keys, perm=(0, 1, 3, 2)))
        scale = self.attrs.get("scale", 0.0) or 1 / np.sqrt(self.size)
        scores = self.op("Mul", scores, self.real(scale))
        if cap := self.attrs.get("softcap", 0.0):
            scores = self.op("Mul", self.op("Tanh", self.op("Div", scores, self.real(cap))), self.real(cap))
        for node in added:
            scores = self.op("Add", scores, node)
        mixed = self.op("MatMul", self.op("Softmax", scores, axis=-1), values)
        rows = self.op("Transpose", mixed, perm=(0, 2, 1, 3))
        self.op("Reshape", rows, self.writer.ints(0, 0, self.heads * self.size), called=outputs[0])

    def repeated(self, x: str) -> str:
        """Write each head of keys or values once for each of its queries."""
        group_size = self.heads // self.cache.heads
        if group_size == 1:
            return x
        several = self.op("Unsqueeze", x, self.writer.ints(2))
        several = self.op("Expand", several, self.writer.ints(1, 1, group_size, 1, 1))
        return self.op("Reshape", several, self.writer.ints(0, self.heads, -1, self.size))

    def hidden(self, seen: str, value: float) -> str:
        """Write the mask to add to scores: 0 where `seen`, a tensor of bool, else `value`."""
        return self.writer.once("Where", seen, self.real(0), self.real(value))

    def last_entries(self, x: str) -> str:
        """Write the last entries of x [batch, total]: those of the new tokens."""
        steps = self.writer.once("Shape", self.roles.tokens)
        steps = self.writer.once("Gather", steps, self.writer.ints(1))
        begin = self.writer.once("Neg", steps)
        return self.writer.once("Slice", x, begin, self.writer.ints(END), self.writer.ints(1))

    def places(self) -> str:
        """Write the position of each token of the mask [batch, total]: the number of seen tokens before it."""
        once = self.writer.once
        seen = once("Cast", self.roles.mask, to=TensorProto.INT64)
        return once("Sub", once("CumSum", seen, self.writer.constant(1)), self.writer.constant(1))

    def in_order(self, window: int) -> str:
        """Whether a token is seen [batch, 1, steps, total]: not behind the one that sees, nor as far before it."""
        once, places = self.writer.once, self.places()
        columns, rows = self.writer.ints(1, 2), self.writer.ints(1, 3)
        valid = once("Unsqueeze", once("Cast", self.roles.mask, to=TensorProto.BOOL), columns)
        rows, columns = once("Unsqueeze", self.last_entries(places), rows), once("Unsqueeze", places, columns)
        seen = once("And", valid, once("LessOrEqual", columns, rows))
        if window > 0:
            seen = once("And", seen, once("Less", once("Sub", rows, self.writer.constant(window)), columns))
        return seen


class _Grouped(_Attention):
    """GroupQueryAttention: query, key and value, or all of them in one tensor, a cache, the last place and the number
    of places, cosines and sines, places of new tokens, and what is added to scores."""

    def write(self) -> None:
        """Write the operator in plain operators."""
        groups = self.cache.heads
        if self.attrs.get("kv_num_heads") != groups or not self.heads or self.heads % groups:
            raise ModelError(
                f"{_node_name(self.node)} has {self.heads} heads of queries, and its cache {groups} of keys"
            )
        sides = self.node.input[:3]
        if not _input_name(self.node, 1):
            sides = self.split_last_axis(sides[0], [self.heads * self.size, *[groups * self.size] * 2])
        q, k, v = (self.split(x, heads) for x, heads in zip(sides, (self.heads, groups, groups)))
        if self.attrs.get("do_rotary", 0):
            tables, pairs = (
                [_input_name(self.node, number) for number in (7, 8)],
                self.attrs.get("rotary_interleaved", 0),
            )
            places = _input_name(self.node, 9) or self.last_entries(self.places())
            rotary = Rotary(self.writer, _node_name(self.node), tables, self.size, bool(pairs), places)
            q, k = rotary.rotated(q), rotary.rotated(k)
        added = [bias] if (bias := _input_name(self.node, 10)) else []
        mask = self.hidden(self.in_order(self.attrs.get("local_window_size", -1)), np.finfo(self.dtype).min)
        self.attend(q, k, v, [*added, mask])

    def split_last_axis(self, x: str, sizes: Sequence[int]) -> list[str]:
        """Parts of these sizes of the last axis: products of their own, where one by a constant makes x, whose results
        then have scales of their own, too."""
        node, constants = self.writer.makers.get(x, onnx.NodeProto()), self.writer.constants
        if node.op_type not in ("MatMul", "Add") or node.input[1] not in constants:
            return self.writer.parts(x, sizes)
        packed = numpy_helper.to_array(constants[node.input[1]])
        if packed.ndim != (2 if node.op_type == "MatMul" else 1):
            return self.writer.parts(x, sizes)
        parts = [self.writer.constant(part, part.dtype) for part in np.split(packed, np.cumsum(sizes)[:-1], axis=-1)]
        operands = self.split_last_axis(node.input[0], sizes) if node.op_type == "Add" else [node.input[0]] * len(sizes)
        return [self.op(node.op_type, other, part) for other, part in zip(operands, parts)]


class _Multiple(_Attention):
    """MultiHeadAttention: query, key, value, bias of all three, mask of keys [batch, total], what is added to scores, a
    cache."""

    def write(self) -> None:
        """Write the operator in plain operators."""
        sides = list(self.node.input[:3])
        if not all(sides) or self.cache.heads != self.heads:
            raise ModelError(f"{_node_name(self.node)} has not {self.heads} heads of queries, keys and values each")
        if bias := _input_name(self.node, 3):
            parts = self.writer.parts(bias, [self.heads * self.size] * 3)
            sides = [self.op("Add", x, part) for x, part in zip(sides, parts)]
        q, k, v = (self.rotated(x) for x in sides)
        hidden, added = self.attrs.get("mask_filter_value", MASKED), []
        if mask := _input_name(self.node, 4):
            seen = self.writer.once("Cast", mask, to=TensorProto.BOOL)
            added.append(self.hidden(self.writer.once("Unsqueeze", seen, self.writer.ints(1, 2)), hidden))
        if extra := _input_name(self.node, 5):
            added.append(extra)
        if self.attrs.get("unidirectional", 0):
            added.append(self.hidden(self.in_order(0), np.finfo(self.dtype).min))
        self.attend(q, k, v, added)

    def rotated(self, x: str) -> str:
        """Write heads of x with rotary positions, where the operator rotates them."""
        node = self.writer.makers.get(x, onnx.NodeProto())
        attrs = _attribute_values(node)
        plain = attrs.get("scale", 1.0) == 1.0 and not attrs.get("is_packed_batching", 0)
        are_constant = all(name in self.writer.constants for name in node.input[2:4])
        if node.op_type != "RotaryEmbedding" or not (plain and are_constant) or node.input[1] != self.roles.positions:
            return self.split(x, self.heads)
        pairs = bool(attrs.get("interleaved", 0))
        rotary = Rotary(self.writer, _node_name(node), node.input[2:4], self.size, pairs, self.roles.positions)
        covers_head = attrs.get("rotary_embedding_dim", 0) or 2 * rotary.half == self.size
        heads = self.split(node.input[0] if covers_head else x, self.heads)
        return rotary.rotated(heads) if covers_head else heads
