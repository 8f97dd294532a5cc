"""Attention of onnxruntime (com.microsoft), with masks, caches and rotary embedding.

Its parts, in order: MultiHeadAttention, Attention and QAttention; RotaryEmbedding; GroupQueryAttention, in which
several query heads share one head of keys and values.

Shapes: B samples, S positions of a sequence, H heads of D elements. Scores have the shape [B, H, rows (queries),
columns (keys)].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from celosia.compiler import expr as T
from celosia.compiler.expr import INDEX, Expr, Tensor, call, select, wrap
from celosia.compiler.ops.contrib import add_operand, build_operator, scale_tensor, transpose_axes
from celosia.compiler.ops.normalisation import softmax
from celosia.compiler.ops.registry import F32, Node, at, op, reshaped
from celosia.compiler.program.op_spec import Kind

ScoreBias = Callable[[tuple[Expr, ...]], Expr] | None
"""Function of the index of a score (sample, head, row, column) that returns its bias; None for no bias."""
MASKED_BIAS = -10000.0
"""Bias that onnxruntime adds to masked scores, unless the attribute mask_filter_value says otherwise."""
FLOAT32_MIN = float(np.finfo(np.float32).min)
"""Score that hides a key from a query."""


def split_heads(x: Tensor, count: int) -> Tensor:
    """Split [B, S, H * D] into heads: [B, H, S, D]."""
    b, s, width = x.shape
    return T.compute((b, count, s, width // count), lambda i, h, k, d: x[i, k, h * (width // count) + d], "heads")


def attend(node: Node, q: Tensor, k: Tensor, v: Tensor, bias: ScoreBias) -> Tensor:
    """Return softmax(q kᵀ * scale + bias) v as [B, S, H * D]. q, k, v: [B, H, S, D].

    With the attribute `unidirectional`, a query attends to keys up to its own position.
    """
    scale = float(node.attrs.get("scale", 0.0)) or 1 / float(np.sqrt(q.shape[-1]))
    scores = scale_tensor(build_operator(node, "MatMul", q, transpose_axes(node, k, (0, 1, 3, 2))), scale)
    cached_positions = k.shape[2] - q.shape[2]

    def score(*i: Expr) -> Expr:
        value = scores[i] if bias is None else scores[i] + bias(i)
        if not node.attrs.get("unidirectional", 0):
            return value
        return select(i[3] <= i[2] + cached_positions, value, wrap(FLOAT32_MIN, F32))

    weights = softmax(Node("Softmax", {}, (T.compute(scores.shape, score, "scores"),), (None,), 1, 21, node.name))
    assert isinstance(weights, Tensor)
    y = transpose_axes(node, build_operator(node, "MatMul", weights, v), (0, 2, 1, 3))
    return reshaped(y, (*y.shape[:2], y.shape[2] * y.shape[3]))


def append_to_cache(node: Node, past: Tensor | None, x: Tensor) -> Tensor:
    """Append keys or values `x` to the cache `past`, if any, along the sequence."""
    return x if past is None else build_operator(node, "Concat", past, x, axis=2)


def mask_bias(node: Node, mask: Tensor | None, batch: int, columns: int) -> ScoreBias:
    """Return the bias that hides masked keys from queries; None without a mask. Raises Unsupported for other shapes.

    mask: [B, columns] or [B, rows, columns], 0 where hidden; or [B], the number of visible keys; or [2 * B], that
    number, then the first visible key. batch, columns: shape of the scores.
    """
    if mask is None:
        return None
    masked_bias = wrap(float(node.attrs.get("mask_filter_value", MASKED_BIAS)), F32)
    if len(mask.shape) == 2 and mask.shape[1] == columns:
        return lambda i: select(T.equal(mask[i[0], i[3]].astype("int32"), 0), masked_bias, wrap(0, F32))
    if len(mask.shape) == 3 and mask.shape[2] == columns:
        return lambda i: select(T.equal(mask[i[0], i[2], i[3]].astype("int32"), 0), masked_bias, wrap(0, F32))
    if len(mask.shape) == 1 and mask.shape[0] == batch:
        return lambda i: select(i[3] < mask[i[0]].astype(INDEX), wrap(0, F32), masked_bias)
    if len(mask.shape) == 1 and mask.shape[0] == 2 * batch:
        return lambda i: select(
            (mask[i[0] + batch].astype(INDEX) <= i[3]) & (i[3] < mask[i[0]].astype(INDEX)), wrap(0, F32), masked_bias
        )
    raise node.fail(f"a mask of shape {list(mask.shape)}")


def add_biases(hiding_bias: ScoreBias, bias: Tensor | None) -> ScoreBias:
    """Return the sum of the bias by a mask and of a tensor `bias` that is broadcast to the scores."""
    if bias is None:
        return hiding_bias
    return lambda i: at(bias, i) if hiding_bias is None else hiding_bias(i) + at(bias, i)


@op(
    "MultiHeadAttention", kind=Kind.OPAQUE, domain="com.microsoft",
    operands="query key? value? bias:bias? key_padding_mask? attention_bias? past_key? past_value? "
    "past_sequence_length? cache_indirection?",
)  # fmt: skip
def multi_head_attention(node: Node) -> list[Tensor]:
    """Build MultiHeadAttention of separate queries, keys and values, with optional mask, bias and caches."""
    count = int(node.attrs["num_heads"])
    q = node.input("query")
    if len(q.shape) != 3 or not node.has("key") or not node.has("value"):
        raise node.fail("query, key and value in one tensor")
    hidden_size, bias = q.shape[2], node.optional("bias")
    sides, start = [], 0
    for name in ("query", "key", "value"):
        x = node.input(name)
        if len(x.shape) == 4:  # keys and values as heads
            sides.append(x)
            continue
        width, first = x.shape[2], start
        if bias is not None:
            x = T.compute(x.shape, lambda b, s, h, x=x, first=first: x[b, s, h] + bias[h + first], "biased")
        start += width
        sides.append(split_heads(x, count))
    q, k, v = sides
    k, v = append_to_cache(node, node.optional("past_key"), k), append_to_cache(node, node.optional("past_value"), v)
    padding_bias = mask_bias(node, node.optional("key_padding_mask"), k.shape[0], k.shape[2])
    value = node.input("value")
    y = attend(node, q, k, v, add_biases(padding_bias, node.optional("attention_bias")))
    if y.shape[2] != hidden_size and len(value.shape) == 3 and y.shape[2] != value.shape[2]:
        raise node.fail(f"{count} heads of {y.shape[2]} values")
    return [y, k, v][: node.outputs]


@op(
    "QAttention", kind=Kind.OPAQUE, domain="com.microsoft",
    operands="input weight:weights bias:bias input_scale weight_scale mask_index? input_zero_point? "
    "weight_zero_point? past?",
)  # fmt: skip
def quantised_attention(node: Node) -> list[Tensor]:
    """Build QAttention: an integer product x w that gives queries, keys and values, then attention in float."""
    names = ["input", "weight", "input_scale", "weight_scale", "input_zero_point", "weight_zero_point", "bias"]
    constants = [node.value(name) if name in ("weight", "weight_zero_point") else None for name in names]
    qkv = build_operator(node, "MatMulIntegerToFloat", *(node.optional(name) for name in names), values=constants)
    return _attend_to_packed(node, qkv, (qkv.shape[2] // 3,) * 3, node.optional("mask_index"), node.optional("past"))


@op(
    "com.microsoft.Attention", kind=Kind.OPAQUE, domain="com.microsoft",
    operands="input weights:weights bias:bias? mask_index? past? attention_bias? past_sequence_length?",
)  # fmt: skip
def attention(node: Node) -> list[Tensor]:
    """Build Attention of com.microsoft: one product x w gives queries, keys and values side by side; then attention."""
    for name in ("do_rotary", "past_present_share_buffer"):
        if node.attrs.get(name, 0):
            raise node.fail(f"the attribute {name}")
    qkv = add_operand(node, build_operator(node, "MatMul", node.input("input"), node.input("weights")), "bias")
    sizes = [int(size) for size in node.attrs.get("qkv_hidden_sizes", ())] or [qkv.shape[2] // 3] * 3
    if len(sizes) != 3 or sum(sizes) != qkv.shape[2] or sizes[0] != sizes[1]:
        raise node.fail(f"queries, keys and values of {sizes} in weights of {qkv.shape[2]}")
    mask, past, bias = (node.optional(name) for name in ("mask_index", "past", "attention_bias"))
    return _attend_to_packed(node, qkv, sizes, mask, past, bias)


def _attend_to_packed(
    node: Node, qkv: Tensor, sizes: Sequence[int], mask: Tensor | None, past: Tensor | None,
    bias: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Attend with queries, keys and values of `sizes`, which lie side by side in `qkv` [B, S, sum of sizes].

    mask: see `mask_bias`. past: cache of keys and values [2, B, H, S, D]. bias: of scores. Returns y, and the cache
    with the new keys and values where the node has two outputs.
    """
    count, sides, start = int(node.attrs["num_heads"]), [], 0
    for size in sizes:
        side = T.compute((*qkv.shape[:2], size), lambda b, s, h, first=start: qkv[b, s, h + first], "side")
        sides.append(split_heads(side, count))
        start += size
    q, k, v = sides
    if past is not None:
        past_sides = [T.compute(past.shape[1:], lambda *i, n=n: past[(n, *i)], "past") for n in (0, 1)]
        k, v = append_to_cache(node, past_sides[0], k), append_to_cache(node, past_sides[1], v)
    y = attend(node, q, k, v, add_biases(mask_bias(node, mask, k.shape[0], k.shape[2]), bias))
    if node.outputs == 1:
        return [y]
    return [y, T.compute((2, *k.shape), lambda n, *i: select(T.equal(n, 0), k[i], v[i]), "present")]


@op(
    "com.microsoft.RotaryEmbedding", kind=Kind.OPAQUE, domain="com.microsoft",
    operands="input position_ids cos_cache sin_cache",
)  # fmt: skip
def rotary_embedding(node: Node) -> Tensor:
    """Build RotaryEmbedding: rotate pairs of the first R elements of each head by the angle of their position.

    Operands: x [B, S, heads * D] or [B, heads, S, D]; positions [B, S], or the first one; cosines and sines
    [positions, R / 2]. A pair is two neighbours (attribute `interleaved`), or two elements R / 2 apart.
    """
    x, positions, cos, sin = (node.input(name) for name in ("input", "position_ids", "cos_cache", "sin_cache"))
    if node.attrs.get("is_packed_batching", 0):
        raise node.fail("the attribute is_packed_batching")
    rotated = 2 * cos.shape[1]
    size = rotated
    if len(x.shape) == 4:
        size = x.shape[3]
    elif node.attrs.get("rotary_embedding_dim", 0):
        size = x.shape[2] // max(int(node.attrs.get("num_heads", 0)), 1)
    if size < rotated or x.shape[-1] % size:
        raise node.fail(f"heads of {size} elements, of which {rotated} are turned, in {list(x.shape)}")
    neighbours, half = bool(node.attrs.get("interleaved", 0)), rotated // 2
    distance = 1 if neighbours else half

    def element(*i: Expr) -> Expr:
        """Return one element: rotated by its pair partner, or copied beyond R."""
        step, j = i[-2], i[-1] % size
        if positions.size > 1:
            position = positions[i[0], step].astype(INDEX)
        else:
            position = positions.flat(0).astype(INDEX) + step
        angle = T.clip(position, 0, cos.shape[0] - 1), T.minimum(j // 2 if neighbours else j % half, half - 1)
        is_first = T.equal(j % 2, 0) if neighbours else j < half
        partner = x[(*i[:-1], select(is_first, i[-1] + distance, i[-1] - distance))] * sin[angle]
        value = x[i] * cos[angle] + select(is_first, -partner, partner)
        return value if size == rotated else select(j < rotated, value, x[i])

    return T.compute(x.shape, element, "turned")


REFUSED_ATTRIBUTES = ("sliding_window_cache", "qk_output", "kv_cache_bit_width")
"""Attributes of which only 0 can be built."""


@op(
    "GroupQueryAttention", kind=Kind.OPAQUE, rounded_once=True, domain="com.microsoft",
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

    def cached_positions(b: Expr) -> Expr:
        """Return the number of cached positions before the first step of sample `b`."""
        return wrap(0, INDEX) if total == steps else T.maximum(last.flat(b).astype(INDEX) + (1 - steps), 0)

    if node.attrs.get("do_rotary", 0):
        position_ids = node.optional("position_ids")
        if position_ids is None or total == steps:  # of the position_ids of the first steps, only the first one counts
            first = cached_positions if position_ids is None else lambda b: position_ids.flat(0).astype(INDEX)
            positions = T.compute((batch, steps), lambda b, s: first(b) + s, "places")
        else:
            positions = position_ids
        pairs, angles = int(node.attrs.get("rotary_interleaved", 0)), (node.input("cos_cache"), node.input("sin_cache"))
        q, k = (
            build_operator(node, "com.microsoft.RotaryEmbedding", x, positions, *angles, interleaved=pairs)
            for x in (q, k)
        )

    def present(appended_states: Tensor, name: str) -> Tensor:
        """Return the cache, operand `name`, with `new` keys or values [B, key heads, S, D] appended."""
        past = node.optional(name) if total > steps else None  # at the first step a cache holds nothing of use
        size = max(total, node.input(name).shape[2] if node.has(name) else 0)

        def element(b: Expr, h: Expr, t: Expr, d: Expr) -> Expr:
            """Return a new element at the steps of this call, an old one before them, and 0 behind them."""
            step = t - cached_positions(b)
            appended = select((step >= 0) & (step < steps), appended_states[b, h, T.clip(step, 0, steps - 1), d], 0)
            if past is None or not past.shape[2]:
                return appended
            return select(step < 0, past[b, h, T.minimum(t, past.shape[2] - 1), d], appended)

        return T.compute((batch, appended_states.shape[1], size, appended_states.shape[3]), element, "present")

    keys, values = present(k, "past_key"), present(v, "past_value")
    y = _attend_grouped(
        node, q, _repeat_heads(keys, count), _repeat_heads(values, count), _visibility(node, cached_positions)
    )
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


def _visibility(node: Node, cached_positions: Callable[[Expr], Expr]) -> Visibility:
    """Return the mask as a function: keys up to the sample's last position, not after the query, within the window.

    Where the attribute `causal` is 0, all keys up to the last position are visible. cached_positions: returns their
    number for a sample.
    """
    last, causal = node.input("seqlens_k"), node.attrs.get("causal", 1)
    window = int(node.attrs.get("local_window_size", -1))

    def is_visible(i: tuple[Expr, ...]) -> Expr:
        """Return whether the query of a score may attend to its key. i: sample, head, query, key."""
        sample, _, row, column = i
        is_filled = column <= last.flat(sample).astype(INDEX)
        if not causal:
            return is_filled
        position = cached_positions(sample) + row
        is_past = is_filled & (column <= position)
        return is_past if window < 1 else is_past & (column > position - window)

    return is_visible


def _attend_grouped(node: Node, q: Tensor, k: Tensor, v: Tensor, is_visible: Visibility) -> Tensor:
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
