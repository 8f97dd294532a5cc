"""GroupQueryAttention of onnxruntime (com.microsoft): several query heads share one head of keys and values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from celosia.compiler import expr as T
from celosia.compiler.expr import INDEX, Expr, Tensor, call, select, wrap
from celosia.compiler.ops.attention import split_heads
from celosia.compiler.ops.contrib import F32, build_operator, scale_tensor, transpose_axes
from celosia.compiler.ops.normalisation import softmax
from celosia.compiler.ops.registry import Node, at, op, reshaped
from celosia.compiler.program.op_spec import Kind

REFUSED_ATTRIBUTES = ("sliding_window_cache", "qk_output", "kv_cache_bit_width")
"""Attributes of which only 0 can be built."""
FLOAT32_MIN = float(np.finfo(np.float32).min)
"""The score that hides a key from a query."""


@op(
    "GroupQueryAttention", kind=Kind.OPAQUE, wide=True, domain="com.microsoft",
    operands="query key? value? past_key? past_value? seqlens_k total_sequence_length:shape cos_cache? sin_cache? "
    "position_ids? attention_bias? head_sink? k_scale:data? v_scale:data? q_norm_weight? k_norm_weight?",
)  # fmt: skip
def group_query_attention(node: Node) -> list[Tensor]:
    """Build GroupQueryAttention: attention with shared key heads, caches, rotary embedding and sinks.

    Queries [B, S, heads * D] may have keys and values beside them in one tensor. A cache [B, key heads, positions, D]
    is filled up to the last position of each sample. It is returned with the new keys and values, and zeros behind
    them. Raises Unsupported for quantised caches, normalised queries, and the REFUSED_ATTRIBUTES.
    """
    for name in REFUSED_ATTRIBUTES:
        if node.attrs.get(name, 0):
            raise node.fail(f"the attribute {name}")
    if any(node.has(name) for name in ("k_scale", "v_scale", "q_norm_weight", "k_norm_weight")):
        raise node.fail("a quantised cache, or queries and keys that are normalised")
    q, k, v = _split_query_key_value(node)
    batch, count, steps, _ = q.shape
    total = int(node.constant("total_sequence_length").reshape(()))
    if total < steps or (batch > 1 and 1 < steps < total):
        raise node.fail(f"{steps} steps of {batch} samples that end at place {total}")
    last = node.input("seqlens_k")
    if last.size != batch:
        raise node.fail(f"the last places of {last.size} samples, not of {batch}")

    def before(b: Expr) -> Expr:
        """Return the number of cached positions before the first step of sample `b`."""
        return wrap(0, INDEX) if total == steps else T.maximum(last.flat(b).astype(INDEX) + (1 - steps), 0)

    if node.attrs.get("do_rotary", 0):
        position_ids = node.optional("position_ids")
        if position_ids is None or total == steps:  # of the position_ids of the first steps, only the first one counts
            first = before if position_ids is None else lambda b: position_ids.flat(0).astype(INDEX)
            positions = T.compute((batch, steps), lambda b, s: first(b) + s, "places")
        else:
            positions = position_ids
        pairs, angles = int(node.attrs.get("rotary_interleaved", 0)), (node.input("cos_cache"), node.input("sin_cache"))
        q, k = (
            build_operator(node, "com.microsoft.RotaryEmbedding", x, positions, *angles, interleaved=pairs)
            for x in (q, k)
        )

    def present(new: Tensor, name: str) -> Tensor:
        """Return the cache, operand `name`, with `new` keys or values [B, key heads, S, D] appended."""
        past = node.optional(name) if total > steps else None  # at the first step a cache holds nothing of use
        size = max(total, node.input(name).shape[2] if node.has(name) else 0)

        def element(b: Expr, h: Expr, t: Expr, d: Expr) -> Expr:
            """Return a new element at the steps of this call, an old one before them, and 0 behind them."""
            step = t - before(b)
            appended = select((step >= 0) & (step < steps), new[b, h, T.clip(step, 0, steps - 1), d], 0)
            if past is None or not past.shape[2]:
                return appended
            return select(step < 0, past[b, h, T.minimum(t, past.shape[2] - 1), d], appended)

        return T.compute((batch, new.shape[1], size, new.shape[3]), element, "present")

    keys, values = present(k, "past_key"), present(v, "past_value")
    y = _attend(node, q, _repeat_heads(keys, count), _repeat_heads(values, count), _visibility(node, before))
    return [y, keys, values][: node.outputs]


def _split_query_key_value(node: Node) -> list[Tensor]:
    """Return queries, keys and values [B, heads, S, D], from one packed tensor or three."""
    query_heads, key_heads = int(node.attrs["num_heads"]), int(node.attrs["kv_num_heads"])
    x = node.input("query")
    is_packed = not node.has("key")
    all_heads = query_heads + 2 * key_heads * is_packed
    if key_heads < 1 or query_heads % key_heads or len(x.shape) != 3 or x.shape[2] % all_heads:
        raise node.fail(f"{query_heads} heads of queries and {key_heads} of keys in {list(x.shape)}")
    if not is_packed:
        key, value = node.input("key"), node.input("value")
        return [split_heads(x, query_heads), split_heads(key, key_heads), split_heads(value, key_heads)]
    size, start, sides = x.shape[2] // all_heads, 0, []
    for number in (query_heads, key_heads, key_heads):
        part = T.compute((*x.shape[:2], number * size), lambda b, s, h, first=start: x[b, s, h + first], "side")
        sides.append(split_heads(part, number))
        start += number * size
    return sides


def _repeat_heads(x: Tensor, count: int) -> Tensor:
    """Repeat each head of keys or values [B, key heads, S, D] for all of its query heads; count: number of these."""
    group_size = count // x.shape[1]
    if group_size == 1:
        return x
    return T.compute((x.shape[0], count, *x.shape[2:]), lambda b, h, *i: x[(b, h // group_size, *i)], "each")


Visibility = Callable[[tuple[Expr, ...]], Expr]
"""Function of (sample, head, row, column) that returns whether the query of a row attends to the key of a column."""


def _visibility(node: Node, before: Callable[[Expr], Expr]) -> Visibility:
    """Return the mask: keys up to the sample's last position, not after the query, and within the local window.

    before: returns the number of cached positions of a sample.
    """
    last, causal = node.input("seqlens_k"), node.attrs.get("causal", 1)
    window = int(node.attrs.get("local_window_size", -1))

    def is_visible(i: tuple[Expr, ...]) -> Expr:
        """Return whether the key of a score may be attended to."""
        sample, _, row, column = i
        is_filled = column <= last.flat(sample).astype(INDEX)
        if not causal:
            return is_filled
        position = before(sample) + row
        is_past = is_filled & (column <= position)
        return is_past if window < 1 else is_past & (column > position - window)

    return is_visible


def _attend(node: Node, q: Tensor, k: Tensor, v: Tensor, is_visible: Visibility) -> Tensor:
    """Return softmax(cap(q kᵀ * scale) + bias) v as [B, S, H * D]. q, k, v: [B, H, S, D].

    A sink, one more score of each head, takes part in the softmax only.
    """
    scale = float(node.attrs.get("scale", 0.0)) or 1 / float(np.sqrt(q.shape[-1]))
    scores = scale_tensor(build_operator(node, "MatMul", q, transpose_axes(node, k, (0, 1, 3, 2))), scale)
    cap, bias = float(node.attrs.get("softcap", 0.0)), node.optional("attention_bias")
    sinks = node.optional("head_sink")
    columns = k.shape[2]
    has_sink = sinks is not None or bool(node.attrs.get("smooth_softmax", 0))

    def score(*i: Expr) -> Expr:
        """Return a score after softcap, bias and mask; the extra last column is the sink."""
        index = (*i[:3], T.minimum(i[3], columns - 1)) if has_sink else i
        value = scores[index]
        if cap > 0:
            value = call("tanh", value / cap) * cap
        if bias is not None:  # it may have fewer columns than the cache
            value = value + at(bias, (*i[:3], T.minimum(i[3], bias.shape[3] - 1)))
        value = select(is_visible(index), value, FLOAT32_MIN)
        if not has_sink:
            return value
        return select(i[3] < columns, value, wrap(0, F32) if sinks is None else sinks[i[1]])

    all_scores = T.compute((*scores.shape[:3], columns + has_sink), score, "scores")
    weights = softmax(Node("Softmax", {}, (all_scores,), (None,), 1, 21, node.name))
    assert isinstance(weights, Tensor)
    if has_sink:  # its column is dropped
        weights = T.compute(scores.shape, lambda *i, all=weights: all[i], "weights")
    y = transpose_axes(node, build_operator(node, "MatMul", weights, v), (0, 2, 1, 3))
    return reshaped(y, (*y.shape[:2], y.shape[2] * y.shape[3]))
