"""GroupQueryAttention of onnxruntime (com.microsoft): several query heads share one head of keys and values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from celosia.compiler import expr as T
from celosia.compiler.expr import INDEX, Expr, Tensor, call, select, wrap
from celosia.compiler.ops.attention import heads
from celosia.compiler.ops.contrib import F32, apply, scaled, transposed
from celosia.compiler.ops.normalisation import softmax
from celosia.compiler.ops.registry import Node, at, op, reshaped
from celosia.compiler.program.op_spec import Kind

REFUSED = ("sliding_window_cache", "qk_output", "kv_cache_bit_width")
FLOAT32_MIN = float(np.finfo(np.float32).min)


@op(
    "GroupQueryAttention", kind=Kind.OPAQUE, wide=True, domain="com.microsoft",
    operands="query key? value? past_key? past_value? seqlens_k total_sequence_length:shape cos_cache? sin_cache? "
    "position_ids? attention_bias? head_sink? k_scale:data? v_scale:data? q_norm_weight? k_norm_weight?",
)  # fmt: skip
def group_query_attention(node: Node) -> list[Tensor]:
    """Build GroupQueryAttention: attention with shared key heads, caches, rotary embedding and sinks.

    Queries [B, S, heads * D] may have keys and values beside them. A cache [B, key heads, positions, D] is filled up to
    the last position of each sample; it is returned with the new keys and values, and zeros behind them.
    """
    for name in REFUSED:
        if node.attrs.get(name, 0):
            raise node.fail(f"the attribute {name}")
    if any(node.has(name) for name in ("k_scale", "v_scale", "q_norm_weight", "k_norm_weight")):
        raise node.fail("a quantised cache, or queries and keys that are normalised")
    q, k, v = _sides(node)
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
        given = node.optional("position_ids")
        if given is None or total == steps:  # of the places given for the first steps, the first one counts
            first = before if given is None else lambda b: given.flat(0).astype(INDEX)
            places = T.compute((batch, steps), lambda b, s: first(b) + s, "places")
        else:
            places = given
        pairs, angles = int(node.attrs.get("rotary_interleaved", 0)), (node.input("cos_cache"), node.input("sin_cache"))
        q, k = (apply(node, "com.microsoft.RotaryEmbedding", x, places, *angles, interleaved=pairs) for x in (q, k))

    def present(new: Tensor, name: str) -> Tensor:
        """Return the cache, input `number`, with `new` keys or values [B, key heads, S, D] appended."""
        past = node.optional(name) if total > steps else None  # what a cache holds at the first step is no past
        size = max(total, node.input(name).shape[2] if node.has(name) else 0)

        def element(b: Expr, h: Expr, t: Expr, d: Expr) -> Expr:
            step = t - before(b)
            here = select((step >= 0) & (step < steps), new[b, h, T.clip(step, 0, steps - 1), d], 0)
            if past is None or not past.shape[2]:
                return here
            return select(step < 0, past[b, h, T.minimum(t, past.shape[2] - 1), d], here)

        return T.compute((batch, new.shape[1], size, new.shape[3]), element, "present")

    keys, values = present(k, "past_key"), present(v, "past_value")
    y = _attend(node, q, _shared(keys, count), _shared(values, count), _seen(node, before))
    return [y, keys, values][: node.outputs]


def _sides(node: Node) -> list[Tensor]:
    """Return queries, keys and values [B, heads, S, D], from one packed tensor or three."""
    count, shared = int(node.attrs["num_heads"]), int(node.attrs["kv_num_heads"])
    x = node.input("query")
    packed = not node.has("key")
    if shared < 1 or count % shared or len(x.shape) != 3 or x.shape[2] % (count + 2 * shared * packed):
        raise node.fail(f"{count} heads of queries and {shared} of keys in {list(x.shape)}")
    if not packed:
        return [heads(x, count), heads(node.input("key"), shared), heads(node.input("value"), shared)]
    size, start, sides = x.shape[2] // (count + 2 * shared), 0, []
    for number in (count, shared, shared):
        part = T.compute((*x.shape[:2], number * size), lambda b, s, h, first=start: x[b, s, h + first], "side")
        sides.append(heads(part, number))
        start += number * size
    return sides


def _shared(x: Tensor, count: int) -> Tensor:
    """Repeat each key head for all of its query heads."""
    each = count // x.shape[1]
    if each == 1:
        return x
    return T.compute((x.shape[0], count, *x.shape[2:]), lambda b, h, *i: x[(b, h // each, *i)], "each")


Seen = Callable[[tuple[Expr, ...]], Expr]
"""Function of (sample, head, row, column): whether the query of a row attends to the key of a column."""


def _seen(node: Node, before: Callable[[Expr], Expr]) -> Seen:
    """Return the visibility mask: keys up to the sample's last position, causal, and within the local window."""
    last, causal = node.input("seqlens_k"), node.attrs.get("causal", 1)
    window = int(node.attrs.get("local_window_size", -1))

    def seen(i: tuple[Expr, ...]) -> Expr:
        sample, _, row, column = i
        known = column <= last.flat(sample).astype(INDEX)
        if not causal:
            return known
        place = before(sample) + row
        here = known & (column <= place)
        return here if window < 1 else here & (column > place - window)

    return seen


def _attend(node: Node, q: Tensor, k: Tensor, v: Tensor, seen: Seen) -> Tensor:
    """Return softmax(cap(q kᵀ * scale) + bias) v of [B, H, S, D], as [B, S, H * D]; a sink takes part in the
    softmax.
    """
    scale = float(node.attrs.get("scale", 0.0)) or 1 / float(np.sqrt(q.shape[-1]))
    scores = scaled(apply(node, "MatMul", q, transposed(node, k, (0, 1, 3, 2))), scale)
    cap, bias = float(node.attrs.get("softcap", 0.0)), node.optional("attention_bias")
    sinks = node.optional("head_sink")
    columns = k.shape[2]
    more = int(sinks is not None or bool(node.attrs.get("smooth_softmax", 0)))  # the sink is one more column

    def score(*i: Expr) -> Expr:
        """Return a score after softcap, bias and mask; the extra last column is the sink."""
        place = (*i[:3], T.minimum(i[3], columns - 1)) if more else i
        value = scores[place]
        if cap > 0:
            value = call("tanh", value / cap) * cap
        if bias is not None:  # which may have fewer columns than a cache
            value = value + at(bias, (*i[:3], T.minimum(i[3], bias.shape[3] - 1)))
        value = select(seen(place), value, FLOAT32_MIN)
        if not more:
            return value
        return select(i[3] < columns, value, wrap(0, F32) if sinks is None else sinks[i[1]])

    whole = T.compute((*scores.shape[:3], columns + more), score, "scores")
    weights = softmax(Node("Softmax", {}, (whole,), (None,), 1, 21, node.name))
    assert isinstance(weights, Tensor)
    if more:
        weights = T.compute(scores.shape, lambda *i, all=weights: all[i], "weights")
    y = transposed(node, apply(node, "MatMul", weights, v), (0, 2, 1, 3))
    return reshaped(y, (*y.shape[:2], y.shape[2] * y.shape[3]))
