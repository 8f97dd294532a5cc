"""Decompose PyTorch's fused kernels: torch.onnx does not know them, and a quantiser must see the products in them.

Modules call these kernels in evaluation mode for speed (nn.TransformerEncoderLayer, nn.MultiheadAttention), which
PyTorch's documentation calls their fast path. Each function here computes a kernel in plain operators.
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
    """Compute softmax over the elements where `mask` is not true.

    mask: [queries, keys] (mask_type 0), [samples, keys] (1), or of the shape of x (2).
    """
    if mask_type == 1 and mask.dim() == 2:
        mask = mask[:, None, None, :]
    masked = x.masked_fill(mask.to(torch.bool), float("-inf"))
    return masked.softmax(x.dim() - 1 if dim is None else dim)


def native_multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_head: int, qkv_weight: Tensor, qkv_bias: Tensor,
    proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True,
    average_attn_weights: bool = True, mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute multi-head attention. query, key, value: [samples, tokens, embed_dim].

    mask: true, or not 0, for keys that are hidden. Returns the result, and the attention weights if they are needed.
    """
    if query is key and key is value:  # then the weights are not sliced, and a quantiser recognises them
        parts = F.linear(query, qkv_weight, qkv_bias).chunk(3, -1)
    else:
        inputs = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3))
        parts = tuple(F.linear(x, weight, bias) for x, weight, bias in inputs)
    q, k, v = (part.unflatten(2, (num_head, -1)).transpose(1, 2) for part in parts)
    scores = (q * (embed_dim // num_head) ** -0.5) @ k.transpose(2, 3)
    attention_weights = scores.softmax(3) if mask is None else masked_softmax(scores, mask, 3, mask_type)
    y = F.linear((attention_weights @ v).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights:
        return y, None
    return y, attention_weights.mean(1) if average_attn_weights else attention_weights


def transformer_encoder_layer(
    src: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor,
    proj_bias: Tensor, use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Tensor, norm_bias_1: Tensor,
    norm_weight_2: Tensor, norm_bias_2: Tensor, ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor,
    ffn_bias_2: Tensor, mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    """Compute a transformer encoder layer. src: [samples, tokens, embed_dim]."""

    def attend(x: Tensor) -> Tensor:
        weights = qkv_weight, qkv_bias, proj_weight, proj_bias
        return native_multi_head_attention(x, x, x, embed_dim, num_heads, *weights, mask, False, True, mask_type)[0]

    def feed_forward(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attend(norm_1(src))
        return x + feed_forward(norm_2(x))
    x = norm_1(src + attend(src))
    return norm_2(x + feed_forward(x))


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
"""Decompositions of the fused kernels that torch.onnx does not know."""


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute attention. query: [..., queries, inner], key: [..., keys, inner], value: [..., keys, outer], float32.

    attn_mask: bool, true for keys that are attended to, or floats that are added. Scores are scaled after their
    product: quantised, a scaling is one look-up table of the accelerator; scaling both operands would take two.
    """
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = (query @ key.transpose(-2, -1)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        is_later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(is_later, float("-inf"))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    attention_weights = scores.softmax(-1)
    if attn_mask is not None:  # a mask may hide all keys of a query
        attention_weights = attention_weights.masked_fill(attention_weights.isnan(), 0.0)
    return (F.dropout(attention_weights, dropout_p) if dropout_p else attention_weights) @ value


def baddbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """Compute beta x + alpha a b. x: [n, m, k] or what broadcasts to that, a: [n, m, i], b: [n, i, k]."""
    product = torch.bmm(a, b)
    return (x if beta == 1 else x * beta) + (product if alpha == 1 else product * alpha)


PRODUCTS: dict[Any, Callable[..., Any]] = {
    **FUSED,
    aten.scaled_dot_product_attention.default: scaled_dot_product_attention,
    aten.baddbmm.default: baddbmm,
}
"""FUSED, and decompositions of kernels that torch.onnx knows but that have products of two activations inside."""


def expose_products(model: GraphModule, keep: Callable[[Node], bool]) -> None:
    """Decompose the operators of PRODUCTS in `model`, in place, except those for which `keep` is true."""
    for node in list(model.graph.nodes):
        if node.target in PRODUCTS and not keep(node):
            _inline_decomposition(model, node, PRODUCTS[node.target])
    model.graph.eliminate_dead_code()
    model.recompile()


def _inline_decomposition(model: GraphModule, node: Node, function: Callable[..., Any]) -> None:
    """Replace `node` by the operators of its decomposition `function`, in place. They keep the metadata of `node`."""
    leaves, tree_spec = tree_flatten((node.args, node.kwargs))
    input_nodes = list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Node)))

    def call(*inputs: Any) -> Any:
        """Call `function` with `inputs` in place of the operands of `node`, so that it can be traced."""
        value_of = dict(zip(input_nodes, inputs))
        args, kwargs = tree_unflatten(
            [value_of[leaf] if isinstance(leaf, Node) else leaf for leaf in leaves], tree_spec
        )
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
    for user in list(node.users):  # users read elements of a tuple
        if isinstance(element := result[user.args[1]], Node):  # None for an unused element
            user.replace_all_uses_with(copies[element])
        model.graph.erase_node(user)
    model.graph.erase_node(node)  # PyTorch keeps random operators, such as dropout, as not dead


def decompose_fused(program: ExportedProgram) -> ExportedProgram:
    """Decompose FUSED operators and fake quantisations in `program`; return it as it is where it has none."""
    table = {**FUSED, **PAIRS}
    if not any(node.target in table for node in program.graph.nodes):
        return program
    return program.run_decompositions(table)
