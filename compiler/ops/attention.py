"""Attention of onnxruntime (com.microsoft): split into heads, mask scores, append to caches of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from celosia.compiler import expr as T
from celosia.compiler.expr import INDEX, Expr, Tensor, select, wrap
from celosia.compiler.ops.contrib import F32, apply, plus, scaled, transposed
from celosia.compiler.ops.normalisation import softmax
from celosia.compiler.ops.registry import Node, at, op, reshaped
from celosia.compiler.program.op_spec import Kind

Added = Callable[[tuple[Expr, ...]], Expr] | None
"""Function of (b, h, row, column) that returns the bias of a score; None for no bias."""
MASKED = -10000.0
"""Bias of masked scores in onnxruntime, unless the attribute mask_filter_value says otherwise."""


def heads(x: Tensor, count: int) -> Tensor:
    """Split [B, S, H * D] into heads: [B, H, S, D]."""
    b, s, hidden = x.shape
    return T.compute((b, count, s, hidden // count), lambda i, h, k, d: x[i, k, h * (hidden // count) + d], "heads")


def attend(node: Node, q: Tensor, k: Tensor, v: Tensor, added: Added) -> Tensor:
    """Return softmax(q kᵀ * scale + added) v of [B, H, S, D], as [B, S, H * D]; `added`: bias of a score."""
    scale = float(node.attrs.get("scale", 0.0)) or 1 / float(np.sqrt(q.shape[-1]))
    scores = scaled(apply(node, "MatMul", q, transposed(node, k, (0, 1, 3, 2))), scale)
    ahead = k.shape[2] - q.shape[2]

    def score(*i: Expr) -> Expr:
        value = scores[i] if added is None else scores[i] + added(i)
        if not node.attrs.get("unidirectional", 0):
            return value
        return select(i[3] <= i[2] + ahead, value, wrap(float(np.finfo(np.float32).min), F32))

    weights = softmax(Node("Softmax", {}, (T.compute(scores.shape, score, "scores"),), (None,), 1, 21, node.name))
    assert isinstance(weights, Tensor)
    y = transposed(node, apply(node, "MatMul", weights, v), (0, 2, 1, 3))
    return reshaped(y, (*y.shape[:2], y.shape[2] * y.shape[3]))


def appended(node: Node, past: Tensor | None, x: Tensor) -> Tensor:
    """Append keys or values `x` to the cache `past`, if any, along the sequence."""
    return x if past is None else apply(node, "Concat", past, x, axis=2)


def masked(node: Node, mask: Tensor | None, batch: int, columns: int) -> Added:
    """Return the bias of scores by a mask; None without one. Raises Unsupported for other shapes.

    mask: [B, columns] or [B, rows, columns], 0 where hidden; or [B], the number of visible keys; or [2 * B], that
    number, then the first visible key.
    """
    if mask is None:
        return None
    hidden = wrap(float(node.attrs.get("mask_filter_value", MASKED)), F32)
    if len(mask.shape) == 2 and mask.shape[1] == columns:
        return lambda i: select(T.equal(mask[i[0], i[3]].astype("int32"), 0), hidden, wrap(0, F32))
    if len(mask.shape) == 3 and mask.shape[2] == columns:
        return lambda i: select(T.equal(mask[i[0], i[2], i[3]].astype("int32"), 0), hidden, wrap(0, F32))
    if len(mask.shape) == 1 and mask.shape[0] == batch:
        return lambda i: select(i[3] < mask[i[0]].astype(INDEX), wrap(0, F32), hidden)
    if len(mask.shape) == 1 and mask.shape[0] == 2 * batch:
        return lambda i: select(
            (mask[i[0] + batch].astype(INDEX) <= i[3]) & (i[3] < mask[i[0]].astype(INDEX)), wrap(0, F32), hidden
        )
    raise node.fail(f"a mask of shape {list(mask.shape)}")


def added_to_scores(hide: Added, extra: Tensor | None) -> Added:
    """Return the sum of the bias by a mask and a tensor `extra` that is broadcast over scores."""
    if extra is None:
        return hide
    return lambda i: at(extra, i) if hide is None else hide(i) + at(extra, i)


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
    hidden, bias = q.shape[2], node.optional("bias")
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
        sides.append(heads(x, count))
    q, k, v = sides
    k, v = appended(node, node.optional("past_key"), k), appended(node, node.optional("past_value"), v)
    hide = masked(node, node.optional("key_padding_mask"), k.shape[0], k.shape[2])
    extra, value = node.optional("attention_bias"), node.input("value")

    y = attend(node, q, k, v, added_to_scores(hide, extra))
    if y.shape[2] != hidden and len(value.shape) == 3 and y.shape[2] != value.shape[2]:
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
    known = [node.value(name) if name in ("weight", "weight_zero_point") else None for name in names]
    both = apply(node, "MatMulIntegerToFloat", *(node.optional(name) for name in names), values=known)
    return _attention(node, both, (both.shape[2] // 3,) * 3, node.optional("mask_index"), node.optional("past"))


@op(
    "com.microsoft.Attention", kind=Kind.OPAQUE, domain="com.microsoft",
    operands="input weights:weights bias:bias? mask_index? past? attention_bias? past_sequence_length?",
)  # fmt: skip
def attention(node: Node) -> list[Tensor]:
    """Build Attention of com.microsoft: a product x w that gives queries, keys and values side by side, then
    attention.
    """
    for name in ("do_rotary", "past_present_share_buffer"):
        if node.attrs.get(name, 0):
            raise node.fail(f"the attribute {name}")
    both = plus(node, apply(node, "MatMul", node.input("input"), node.input("weights")), "bias")
    sizes = [int(size) for size in node.attrs.get("qkv_hidden_sizes", ())] or [both.shape[2] // 3] * 3
    if len(sizes) != 3 or sum(sizes) != both.shape[2] or sizes[0] != sizes[1]:
        raise node.fail(f"queries, keys and values of {sizes} in weights of {both.shape[2]}")
    more = (node.optional(name) for name in ("mask_index", "past", "attention_bias"))
    return _attention(node, both, sizes, *more)


def _attention(
    node: Node, both: Tensor, sizes: Sequence[int], mask: Tensor | None, past: Tensor | None,
    extra: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Attend with queries, keys and values of `sizes` side by side in `both` [B, S, sum of sizes].

    Returns y, and the cache of keys and values [2, B, H, S, D] where the node has two outputs.
    """
    count, sides, start = int(node.attrs["num_heads"]), [], 0
    for size in sizes:
        side = T.compute((*both.shape[:2], size), lambda b, s, h, first=start: both[b, s, h + first], "side")
        sides.append(heads(side, count))
        start += size
    q, k, v = sides
    if past is not None:
        before = [T.compute(past.shape[1:], lambda *i, n=n: past[(n, *i)], "past") for n in (0, 1)]
        k, v = appended(node, before[0], k), appended(node, before[1], v)
    y = attend(node, q, k, v, added_to_scores(masked(node, mask, *k.shape[:3:2]), extra))
    if node.outputs == 1:
        return [y]
    return [y, T.compute((2, *k.shape), lambda n, *i: select(T.equal(n, 0), k[i], v[i]), "present")]


@op(
    "com.microsoft.RotaryEmbedding", kind=Kind.OPAQUE, domain="com.microsoft",
    operands="input position_ids cos_cache sin_cache",
)  # fmt: skip
def rotary_embedding(node: Node) -> Tensor:
    """Build RotaryEmbedding: rotate pairs of the first R elements of each head by the angle of their position.

    x: [B, S, heads * D] or [B, heads, S, D]. positions: [B, S], or the first one. cosines, sines: [positions, R / 2].
    """
    x, places, cos, sin = (node.input(name) for name in ("input", "position_ids", "cos_cache", "sin_cache"))
    if node.attrs.get("is_packed_batching", 0):
        raise node.fail("the attribute is_packed_batching")
    turned = 2 * cos.shape[1]
    size = turned
    if len(x.shape) == 4:
        size = x.shape[3]
    elif node.attrs.get("rotary_embedding_dim", 0):
        size = x.shape[2] // max(int(node.attrs.get("num_heads", 0)), 1)
    if size < turned or x.shape[-1] % size:
        raise node.fail(f"heads of {size} elements, of which {turned} are turned, in {list(x.shape)}")
    neighbours, half = bool(node.attrs.get("interleaved", 0)), turned // 2
    distance = 1 if neighbours else half

    def element(*i: Expr) -> Expr:
        """Return one element: rotated by its pair partner, or copied beyond R."""
        step, j = i[-2], i[-1] % size
        place = places[i[0], step].astype(INDEX) if places.size > 1 else places.flat(0).astype(INDEX) + step
        at_place = T.clip(place, 0, cos.shape[0] - 1), T.minimum(j // 2 if neighbours else j % half, half - 1)
        first = T.equal(j % 2, 0) if neighbours else j < half
        other = x[(*i[:-1], select(first, i[-1] + distance, i[-1] - distance))] * sin[at_place]
        value = x[i] * cos[at_place] + select(first, -other, other)
        return value if size == turned else select(j < turned, value, x[i])

    return T.compute(x.shape, element, "turned")
