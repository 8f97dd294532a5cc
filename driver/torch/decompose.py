"""PyTorch's fused kernels as the operators that they stand for: torch.onnx knows those alone.

Modules take these kernels by themselves in evaluation mode (nn.TransformerEncoderLayer, nn.MultiheadAttention), for
speed on PyTorch's side; docs call it their fast path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.nn import functional as F

aten = torch.ops.aten


def masked_softmax(x: Tensor, mask: Tensor, dim: int | None = None, mask_type: int | None = None) -> Tensor:
    """Softmax where `mask` is not set. mask: of queries and keys (mask_type 0), of samples and keys (1), or as x."""
    if mask_type == 1 and mask.dim() == 2:
        mask = mask[:, None, None, :]
    kept = x.masked_fill(mask.to(torch.bool), float("-inf"))
    return kept.softmax(x.dim() - 1 if dim is None else dim)


def native_multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_head: int, qkv_weight: Tensor, qkv_bias: Tensor,
    proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True,
    average_attn_weights: bool = True, mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """query, key, value: [samples, tokens, embed_dim]. What a mask leaves out is true in it, or no 0."""
    weights, biases = qkv_weight.chunk(3), qkv_bias.chunk(3)
    q, k, v = (
        F.linear(x, weight, bias).unflatten(2, (num_head, -1)).transpose(1, 2)
        for x, weight, bias in zip((query, key, value), weights, biases)
    )
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
    """src: [samples, tokens, embed_dim]."""

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
    """relu or gelu of beta bias + alpha a b."""
    y = torch.addmm(bias, a, b, beta=beta, alpha=alpha)
    return F.gelu(y) if use_gelu else F.relu(y)


FUSED: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten._transformer_encoder_layer_fwd.default: transformer_encoder_layer,
    aten._native_multi_head_attention.default: native_multi_head_attention,
    aten._masked_softmax.default: masked_softmax,
    aten._addmm_activation.default: addmm_activation,
}


def without_fused(program: ExportedProgram) -> ExportedProgram:
    """`program` with the operators that FUSED ones stand for; itself where it has none."""
    if not any(node.target in FUSED for node in program.graph.nodes):
        return program
    return program.run_decompositions(FUSED)
