"""PyTorch's fused kernels as the operators that they stand for: torch.onnx knows those alone, and a quantiser has
to see the products in them.

Modules take these kernels by themselves in evaluation mode (nn.TransformerEncoderLayer, nn.MultiheadAttention), for
speed on PyTorch's side; docs call it their fast path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from celosia.driver.torch.fake_quantize import PAIRS

aten = torch.ops.aten


def masked_softmax(x: Tensor, mask: Tensor, dim: int | None = None, mask_type: int | None = None) -> Tensor:
    """Softmax over the elements that `mask` does not hide. mask: of queries and keys (mask_type 0), of samples and keys
    (1), or as x."""
    if mask_type == 1 and mask.dim() == 2:
        mask = mask[:, None, None, :]
    masked = x.masked_fill(mask.to(torch.bool), float("-inf"))
    return masked.softmax(x.dim() - 1 if dim is None else dim)


def native_multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_head: int, qkv_weight: Tensor, qkv_bias: Tensor,
    proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True,
    average_attn_weights: bool = True, mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Decompose multi-head attention. query, key, value: [samples, tokens, embed_dim]. A mask is true, or not 0, where
    it hides."""
    if query is key and key is value:  # then the weights stay whole, and a quantiser knows them
        parts = F.linear(query, qkv_weight, qkv_bias).chunk(3, -1)
    else:
        inputs = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3))
        parts = tuple(F.linear(x, weight, bias) for x, weight, bias in inputs)
    q, k, v = (part.unflatten(2, (num_head, -1)).transpose(1, 2) for part in parts)
    scores = (q * (embed_dim // num_head) ** -0.5) @ k.transpose(2, 3)
    shares = scores.softmax(3) if mask is None else masked_softmax(scores, mask, 3, mask_type)
    y = F.linear((shares @ v).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights:
        return y, None
    return y, shares.mean(1) if average_attn_weights else shares


def transformer_encoder_layer(
    src: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor,
    proj_bias: Tensor, use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Tensor, norm_bias_1: Tensor,
    norm_weight_2: Tensor, norm_bias_2: Tensor, ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor,
    ffn_bias_2: Tensor, mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    """Decompose a transformer encoder layer. src: [samples, tokens, embed_dim]."""

    def attend(x: Tensor) -> Tensor:
        weights = qkv_weight, qkv_bias, proj_weight, proj_bias
        return native_multi_head_attention(x, x, x, embed_dim, num_heads, *weights, mask, False, True, mask_type)[0]

    def feed(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attend(norm_1(src))
        return x + feed(norm_2(x))
    x = norm_1(src + attend(src))
    return norm_2(x + feed(x))


def addmm_activation(
    bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1, use_gelu: bool = False
) -> Tensor:
    """Compute relu or gelu of beta bias + alpha a b."""
    y = torch.addmm(bias, a, b, beta=beta, alpha=alpha)
    return F.gelu(y) if use_gelu else F.relu(y)


FUSED: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten._transformer_encoder_layer_fwd.default: transformer_encoder_layer,
    aten._native_multi_head_attention.default: native_multi_head_attention,
    aten._masked_softmax.default: masked_softmax,
    aten._addmm_activation.default: addmm_activation,
}


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Decompose attention. query: [..., queries, inner], key: [..., keys, inner], value: [..., keys, outer], float32.
    attn_mask: bool, of what is looked at, or floats that are added. The scores are scaled behind their product, as one
    table there, and not before it in two."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = (query @ key.transpose(-2, -1)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    shares = scores.softmax(-1)
    if attn_mask is not None:  # a mask may hide all keys of a query
        shares = shares.masked_fill(shares.isnan(), 0.0)
    return (F.dropout(shares, dropout_p) if dropout_p else shares) @ value


def baddbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """Compute beta x + alpha a b. x: [n, m, k] or what broadcasts to that, a: [n, m, i], b: [n, i, k]."""
    product = torch.bmm(a, b)
    return (x if beta == 1 else x * beta) + (product if alpha == 1 else product * alpha)


PRODUCTS: dict[Any, Callable[..., Any]] = {
    **FUSED,
    aten.scaled_dot_product_attention.default: scaled_dot_product_attention,
    aten.baddbmm.default: baddbmm,
}
"""FUSED ones, and what torch.onnx knows but has products of two activations inside."""


def expose_products(model: GraphModule, keep: Callable[[Node], bool]) -> None:
    """Write the products in `model` out, in place, where `keep` is false of the operator that they are in."""
    for node in list(model.graph.nodes):
        if node.target in PRODUCTS and not keep(node):
            _inline_decomposition(model, node, PRODUCTS[node.target])
    model.graph.eliminate_dead_code()
    model.recompile()


def _inline_decomposition(model: GraphModule, node: Node, function: Callable[..., Any]) -> None:
    """Write the operators of `function` in place of `node`, in the same module."""
    leaves, form = tree_flatten((node.args, node.kwargs))
    input_nodes = list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Node)))

    def call(*inputs: Any) -> Any:
        value_of = dict(zip(input_nodes, inputs))
        args, kwargs = tree_unflatten([value_of[leaf] if isinstance(leaf, Node) else leaf for leaf in leaves], form)
        return function(*args, **kwargs)

    traced = make_fx(call, pre_dispatch=True)(*(traced_node.meta["val"] for traced_node in input_nodes)).graph
    copies = dict(zip(traced.find_nodes(op="placeholder"), input_nodes))
    with model.graph.inserting_before(node):
        for traced_node in traced.nodes:
            if traced_node.op == "call_function":
                copies[traced_node] = model.graph.node_copy(traced_node, copies.__getitem__)
                copies[traced_node].meta = {**node.meta, "val": traced_node.meta["val"]}
    (result,) = traced.output_node().args
    if isinstance(result, Node):
        node.replace_all_uses_with(copies[result])
    for user in list(node.users):  # users take parts of a tuple
        if isinstance(part := result[user.args[1]], Node):  # None for an unused part
            user.replace_all_uses_with(copies[part])
        model.graph.erase_node(user)
    model.graph.erase_node(node)  # dropout, which may be in it, makes PyTorch keep it


def decompose_fused(program: ExportedProgram) -> ExportedProgram:
    """Decompose FUSED operators and fake quantisations in `program`; itself where it has none."""
    table = {**FUSED, **PAIRS}
    if not any(node.target in table for node in program.graph.nodes):
        return program
    return program.run_decompositions(table)
