"""Small networks with attention, normalisations or image blocks, as users write them in PyTorch.

They differ in how heads are split, how masks, tables of positions and class tokens enter, which normalisation they use,
and in sizes that fill no blocks. `VARIANTS` says how each is exported and quantised; `build` writes the model.
No part of celosia is imported before a model is quantised by it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

Floats = NDArray[np.float32]


# Parts of transformers ------------------------------------------------------------------------------------------------


class Heads(nn.Module):  # type: ignore[misc]
    """Self-attention. split: how queries, keys and values come out of one projection, or "separate".

    scale: where scores are multiplied by 1/sqrt(d): "after", "query", "both" or "divide". keys: how keys are
    transposed, "last" (the last two axes of [B, heads, T, d]) or "direct" (permuted from [B, T, heads, d]). mask: "",
    "where" (causal), "add" (causal) or "relative" (a table of biases). shared: heads with keys of their own; 0 for all.
    """

    def __init__(
        self, dim: int, heads: int, tokens: int = 0, split: str = "separate", scale: str = "after", keys: str = "last",
        mask: str = "", shared: int = 0, bias: bool = True, inner: int = 0, rotary: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.d = heads, inner or dim // heads
        self.split, self.scale, self.keys, self.mask, self.shared = split, scale, keys, mask, shared or heads
        wide, narrow = heads * self.d, self.shared * self.d
        if split == "separate":
            self.q, self.k, self.v = (nn.Linear(dim, size, bias=bias) for size in (wide, narrow, narrow))
        else:
            self.qkv = nn.Linear(dim, 3 * wide, bias=bias)
        self.out = nn.Linear(wide, dim, bias=bias)
        causal = torch.tril(torch.ones(tokens, tokens)).view(1, 1, tokens, tokens)
        if mask == "where":
            self.register_buffer("causal", causal)
        elif mask == "add":
            self.register_buffer("causal", (1 - causal) * -20.0)
        elif mask == "relative":
            self.register_buffer("relative", torch.randn(1, heads, tokens, tokens))
        self.rotary = rotary
        if rotary:
            angles = torch.arange(tokens)[:, None] / 100 ** (torch.arange(self.d // 2) * 2 / self.d)
            self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1))
            self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1))

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, heads, T, d]."""
        count, tokens, _ = x.shape
        if self.split == "permute":
            packed = self.qkv(x).reshape(count, tokens, 3, self.heads, self.d).permute(2, 0, 3, 1, 4)
            return packed.unbind(0)  # type: ignore[no-any-return]
        if self.split == "index":
            packed = self.qkv(x).reshape(count, tokens, 3, self.heads, self.d).permute(2, 0, 3, 1, 4)
            return packed[0], packed[1], packed[2]
        if self.split == "heads":  # queries, keys and values of a head side by side, as in GPT-NeoX
            packed = self.qkv(x).view(count, tokens, self.heads, 3 * self.d).transpose(1, 2)
            return packed.chunk(3, dim=-1)  # type: ignore[no-any-return]
        wide = self.heads * self.d
        if self.split == "chunk":
            parts = self.qkv(x).chunk(3, dim=-1)
        elif self.split == "split":
            parts = self.qkv(x).split(wide, dim=2)
        elif self.split == "slice":
            packed = self.qkv(x)
            parts = packed[..., :wide], packed[..., wide : 2 * wide], packed[..., 2 * wide :]
        else:
            parts = self.q(x), self.k(x), self.v(x)
        sizes = self.heads, self.shared, self.shared
        q, k, v = (
            part.reshape(count, tokens, heads, self.d).transpose(1, 2) for part, heads in zip(parts, sizes, strict=True)
        )
        return q, k, v

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self._projected(x)
        if self.rotary:
            q, k = (
                t * self.cos + torch.cat([-t[..., self.d // 2 :], t[..., : self.d // 2]], -1) * self.sin for t in (q, k)
            )
        if self.shared < self.heads:
            k, v = (t.repeat_interleave(self.heads // self.shared, dim=1) for t in (k, v))
        if self.scale == "query":
            q = q * self.d**-0.5
        elif self.scale == "both":
            q, k = q * self.d**-0.25, k * self.d**-0.25
        scores = q @ (k.permute(0, 2, 1, 3).permute(0, 2, 3, 1) if self.keys == "direct" else k.transpose(-2, -1))
        if self.scale == "after":
            scores = scores * self.d**-0.5
        elif self.scale == "divide":
            scores = scores / math.sqrt(self.d)
        if self.mask == "where":
            scores = scores.masked_fill(self.causal[:, :, : x.shape[1], : x.shape[1]] == 0, -30.0)
        elif self.mask == "add":
            scores = scores + self.causal
        elif self.mask == "relative":
            scores = scores + self.relative
        if mask is not None:
            scores = scores + mask
        mixed = scores.softmax(dim=-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))  # type: ignore[no-any-return]


class Fused(nn.Module):  # type: ignore[misc]
    """Self-attention by PyTorch's fused operator, which exporters take apart."""

    def __init__(self, dim: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        count, tokens, dim = x.shape
        q, k, v = self.qkv(x).view(count, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(count, tokens, dim))  # type: ignore[no-any-return]


class RMSNorm(nn.Module):  # type: ignore[misc]
    """Root-mean-square normalisation written out, as Llama's code has it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class PlainNorm(nn.Module):  # type: ignore[misc]
    """Layer normalisation written out."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(1 + 0.1 * torch.randn(dim)), nn.Parameter(0.1 * torch.randn(dim))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight + self.bias


class Norm2d(nn.Module):  # type: ignore[misc]
    """Layer normalisation over the channels of images [N, C, H, W], written out (ConvNeXt, NAFNet, SAM)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(1 + 0.1 * torch.randn(dim)), nn.Parameter(0.1 * torch.randn(dim))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        return self.weight[:, None, None] * ((x - mean) / torch.sqrt(variance + 1e-6)) + self.bias[:, None, None]


class Mlp(nn.Module):  # type: ignore[misc]
    def __init__(self, dim: int, wide: int, act: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(dim, wide), nn.Linear(wide, dim), act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))  # type: ignore[no-any-return]


class Gated(nn.Module):  # type: ignore[misc]
    def __init__(self, dim: int, wide: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(a, b, bias=False) for a, b in ((dim, wide), (dim, wide), (wide, dim))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):  # type: ignore[misc]
    """A layer of attention and MLP. before: whether normalisations come first. layer_scale: factors of channels."""

    def __init__(
        self, attention: nn.Module, mlp: nn.Module, dim: int, norm: Callable[[int], nn.Module] = nn.LayerNorm,
        before: bool = True, layer_scale: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.attention, self.mlp, self.before = attention, mlp, before
        self.first, self.second = norm(dim), norm(dim)
        self.scales = nn.Parameter(0.5 + 0.1 * torch.randn(2, dim)) if layer_scale else None

    def forward(self, x: Tensor, *mask: Tensor) -> Tensor:
        if not self.before:
            x = self.first(x + self.attention(x, *mask))
            return self.second(x + self.mlp(x))  # type: ignore[no-any-return]
        a = self.attention(self.first(x), *mask)
        x = x + (a if self.scales is None else a * self.scales[0])
        m = self.mlp(self.second(x))
        return x + (m if self.scales is None else m * self.scales[1])


class Vision(nn.Module):  # type: ignore[misc]
    """Patches of images, blocks, and a classifier. patches: "conv" or "reshape". head: "class", "mean"; extra: tokens
    before those of patches."""

    def __init__(
        self, dim: int, size: int, patch: int, blocks: list[nn.Module], patches: str = "conv", head: str = "class",
        extra: int = 1, flatten: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.patch, self.patches, self.head, self.flatten = patch, patches, head, flatten
        count = (size // patch) ** 2
        if patches == "conv":
            self.embed: nn.Module = nn.Conv2d(3, dim, patch, patch)
        else:
            self.embed = nn.Linear(3 * patch * patch, dim)
        self.extra = nn.Parameter(torch.randn(1, extra, dim)) if extra else None
        self.positions = nn.Parameter(0.5 * torch.randn(1, count + extra, dim))
        self.blocks, self.norm, self.classify = nn.ModuleList(blocks), nn.LayerNorm(dim), nn.Linear(dim, 10)

    def forward(self, image: Tensor) -> Tensor:
        if self.patches == "conv":
            x = self.embed(image)
            x = (
                x.flatten(2).transpose(1, 2)
                if self.flatten
                else x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, x.shape[1])
            )
        else:
            n, c, h, w = image.shape
            p = self.patch
            x = image.reshape(n, c, h // p, p, w // p, p).permute(0, 2, 4, 3, 5, 1).reshape(n, -1, p * p * c)
            x = self.embed(x)
        if self.extra is not None:
            x = torch.cat((self.extra.expand(x.shape[0], -1, -1), x), dim=1)
        x = x + self.positions
        for block in self.blocks:
            x = block(x)
        if self.head == "class":
            return self.classify(self.norm(x)[:, 0])  # type: ignore[no-any-return]
        return self.classify(self.norm(x.mean(1)) if self.head == "mean" else self.norm(x).mean(1))  # type: ignore[no-any-return]


class Sequence(nn.Module):  # type: ignore[misc]
    """Blocks on tokens [B, T, C]. positions: whether a table is added first. final: the last normalisation."""

    def __init__(
        self, blocks: list[nn.Module], dim: int, tokens: int, positions: bool = True, final: Any = None
    ) -> None:
        super().__init__()
        self.positions = nn.Parameter(0.5 * torch.randn(tokens, dim)) if positions else None
        self.blocks, self.final = nn.ModuleList(blocks), final

    def forward(self, x: Tensor, *mask: Tensor) -> Tensor:
        x = x if self.positions is None else x + self.positions
        for block in self.blocks:
            x = block(x, *mask)
        return x if self.final is None else self.final(x)  # type: ignore[no-any-return]


class CrossDecoder(nn.Module):  # type: ignore[misc]
    """A layer that attends to its own tokens and to those of another sequence."""

    def __init__(self, dim: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.heads, self.d = heads, dim // heads
        self.own = Heads(dim, heads, tokens, mask="add")
        self.q, self.kv, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.norms, self.mlp = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3)), Mlp(dim, 2 * dim, F.relu)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.norms[0](x + self.own(x))
        count, tokens, dim = x.shape
        q = self.q(x).view(count, tokens, self.heads, self.d).transpose(1, 2)
        k, v = self.kv(memory).view(count, -1, 2, self.heads, self.d).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.transpose(-1, -2) / math.sqrt(self.d)).softmax(-1) @ v
        x = self.norms[1](x + self.out(mixed.transpose(1, 2).reshape(count, tokens, dim)))
        return self.norms[2](x + self.mlp(x))  # type: ignore[no-any-return]


# Networks of images with attention or normalisations ------------------------------------------------------------------


class Swin(nn.Module):  # type: ignore[misc]
    """A layer of Swin on [B, H, W, C]: attention in windows, perhaps shifted."""

    def __init__(self, dim: int, heads: int, window: int, side: int, shift: int = 0) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        self.attention = Heads(dim, heads, window * window, split="permute", scale="query", mask="relative")
        self.first, self.second, self.mlp = nn.LayerNorm(dim), nn.LayerNorm(dim), Mlp(dim, 2 * dim)
        self.embed = nn.Conv2d(3, dim, 2, 2)

    def forward(self, image: Tensor) -> Tensor:
        x = self.embed(image).permute(0, 2, 3, 1)
        n, h, w, c = x.shape
        p, shortcut = self.window, x
        x = self.first(x)
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = x.view(n, h // p, p, w // p, p, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, p * p, c)
        x = self.attention(x)
        x = x.view(n, h // p, w // p, p, p, c).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, c)
        if self.shift:
            x = torch.roll(x, (self.shift, self.shift), (1, 2))
        x = shortcut + x
        return x + self.mlp(self.second(x))  # type: ignore[no-any-return]


class ConvNeXt(nn.Module):  # type: ignore[misc]
    """Two blocks of ConvNeXt behind a stem. linear: pointwise layers as Linear on [N, H, W, C], or as convolutions."""

    def __init__(self, dim: int, linear: bool) -> None:
        super().__init__()
        self.linear = linear
        self.stem, self.stem_norm = nn.Conv2d(3, dim, 2, 2), Norm2d(dim)
        self.depthwise = nn.ModuleList(nn.Conv2d(dim, dim, 7, padding=3, groups=dim) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(dim, eps=1e-6) if linear else Norm2d(dim) for _ in range(2))
        make: Any = nn.Linear if linear else partial(nn.Conv2d, kernel_size=1)
        self.up = nn.ModuleList(make(dim, 4 * dim) for _ in range(2))
        self.down = nn.ModuleList(make(4 * dim, dim) for _ in range(2))
        self.scale, self.head = nn.Parameter(0.5 + 0.1 * torch.randn(2, dim)), nn.Linear(dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem_norm(self.stem(x))
        for number in range(2):
            y = self.depthwise[number](x)
            y = y.permute(0, 2, 3, 1) if self.linear else y
            y = self.down[number](F.gelu(self.up[number](self.norms[number](y))))
            scale = self.scale[number]
            y = (scale * y).permute(0, 3, 1, 2) if self.linear else scale[:, None, None] * y
            x = x + y
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class MobileViT(nn.Module):  # type: ignore[misc]
    """MobileViT's block: convolutions, patches unfolded to sequences, a transformer, folded again, and a skip."""

    def __init__(self, channels: int, dim: int, patch: int = 2) -> None:
        super().__init__()
        self.patch = patch
        self.local, self.project = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, dim, 1, bias=False)
        self.block, self.norm = (
            Block(Heads(dim, 4, split="permute", scale="query"), Mlp(dim, 2 * dim, F.silu), dim),
            nn.LayerNorm(dim),
        )
        self.back, self.fuse = nn.Conv2d(dim, channels, 1), nn.Conv2d(2 * channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = x
        x = self.project(F.silu(self.local(x)))
        n, c, h, w = x.shape
        p, count = self.patch, h * w // self.patch**2
        x = x.reshape(n * c * h // p, p, w // p, p).transpose(1, 2)
        x = x.reshape(n, c, count, p * p).transpose(1, 3).reshape(n * p * p, count, c)
        x = self.norm(self.block(x))
        x = x.reshape(n, p * p, count, c).transpose(1, 3)
        x = x.reshape(n * c * h // p, w // p, p, p).transpose(1, 2).reshape(n, c, h, w)
        return F.silu(self.fuse(torch.cat((skip, F.silu(self.back(x))), dim=1)))


class UNetBlock(nn.Module):  # type: ignore[misc]
    """A residual block of a diffusion U-Net, and attention over its pixels. norm: of the number of channels."""

    def __init__(self, channels: int, norm: Callable[[int], nn.Module], attends: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.norms = nn.ModuleList(norm(channels) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.attends = attends
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)
        self.down = nn.Conv2d(channels, channels, 3, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        y = self.convs[0](F.silu(self.norms[0](x)))
        x = x + self.convs[1](F.silu(self.norms[1](y)))
        if self.attends:
            n, c, h, w = x.shape
            q, k, v = self.qkv(self.norms[2](x)).reshape(n, 3, c, h * w).unbind(1)
            weights = (q.transpose(1, 2) @ k * c**-0.5).softmax(-1)
            x = x + self.out((v @ weights.transpose(1, 2)).reshape(n, c, h, w))
        return self.down(x)  # type: ignore[no-any-return]


class NAF(nn.Module):  # type: ignore[misc]
    """NAFNet's block (Chen et al. 2022): gates in place of activation functions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.intro, self.ending = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 3, 3, padding=1)
        self.norms = nn.ModuleList(Norm2d(channels) for _ in range(2))
        self.c1, self.c3 = nn.Conv2d(channels, 2 * channels, 1), nn.Conv2d(channels, channels, 1)
        self.c2 = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, groups=2 * channels)
        self.attention = nn.Conv2d(channels, channels, 1)
        self.c4, self.c5 = nn.Conv2d(channels, 2 * channels, 1), nn.Conv2d(channels, channels, 1)
        self.beta, self.gamma = (nn.Parameter(0.5 + 0.1 * torch.randn(1, channels, 1, 1)) for _ in range(2))

    def forward(self, image: Tensor) -> Tensor:
        x = self.intro(image)
        a, b = self.c2(self.c1(self.norms[0](x))).chunk(2, dim=1)
        y = a * b
        y = x + self.c3(y * self.attention(F.adaptive_avg_pool2d(y, 1))) * self.beta
        a, b = self.c4(self.norms[1](y)).chunk(2, dim=1)
        return self.ending(y + self.c5(a * b) * self.gamma) + image  # type: ignore[no-any-return]


class TCN(nn.Module):  # type: ignore[misc]
    """Two blocks of a temporal convolutional network: padded on both sides, and cut at the end."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        sizes = [(8, channels), (channels, channels), (channels, channels), (channels, channels)]
        self.convs = nn.ModuleList(
            nn.Conv1d(a, b, 3, padding=2 * dilation, dilation=dilation)
            for (a, b), dilation in zip(sizes, (1, 1, 2, 2), strict=True)
        )
        self.skip, self.head = nn.Conv1d(8, channels, 1), nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        for number in range(2):
            y = x
            for conv in self.convs[2 * number : 2 * number + 2]:
                y = F.relu(conv(y)[:, :, : -conv.padding[0]].contiguous())
            x = F.relu(y + (self.skip(x) if not number else x))
        return self.head(x[:, :, -1])  # type: ignore[no-any-return]


class Mixer(nn.Module):  # type: ignore[misc]
    """A layer of MLP-Mixer: an MLP over tokens, then one over channels."""

    def __init__(self, dim: int, tokens: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.tokens, self.channels = Mlp(tokens, 2 * tokens), Mlp(dim, 2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norms[1](x))  # type: ignore[no-any-return]


class Reduced(nn.Module):  # type: ignore[misc]
    """Attention whose keys come from fewer tokens, by a convolution of the tokens as an image (PVT, SegFormer)."""

    def __init__(self, dim: int, heads: int, side: int) -> None:
        super().__init__()
        self.heads, self.d, self.side = heads, dim // heads, side
        self.q, self.kv, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.reduce, self.norm = nn.Conv2d(dim, dim, 2, 2), nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q = self.q(x).reshape(n, t, self.heads, self.d).permute(0, 2, 1, 3)
        image = x.permute(0, 2, 1).reshape(n, c, self.side, self.side)
        small = self.norm(self.reduce(image).reshape(n, c, -1).permute(0, 2, 1))
        k, v = self.kv(small).reshape(n, -1, 2, self.heads, self.d).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = (q @ k.transpose(-2, -1) * self.d**-0.5).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(n, t, c))  # type: ignore[no-any-return]


class Conformer(nn.Module):  # type: ignore[misc]
    """The convolution module of a Conformer behind attention: [B, T, C] to [B, C, T] and back."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norms = (
            Heads(dim, heads, scale="divide"),
            nn.ModuleList(nn.LayerNorm(dim) for _ in range(3)),
        )
        self.gate, self.depthwise = nn.Conv1d(dim, 2 * dim, 1), nn.Conv1d(dim, dim, 7, padding=3, groups=dim)
        self.batch_norm, self.out, self.mlp = nn.BatchNorm1d(dim), nn.Conv1d(dim, dim, 1), Mlp(dim, 2 * dim, F.silu)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        y = F.glu(self.gate(self.norms[1](x).transpose(1, 2)), dim=1)
        y = self.out(F.silu(self.batch_norm(self.depthwise(y)))).transpose(1, 2)
        x = x + y
        return x + 0.5 * self.mlp(self.norms[2](x))  # type: ignore[no-any-return]


class Listen(nn.Module):  # type: ignore[misc]
    """The encoder of Whisper: convolutions of a spectrogram, then tokens."""

    def __init__(self, dim: int, heads: int, frames: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(20, dim, 3, padding=1), nn.Conv1d(dim, dim, 3, stride=2, padding=1)
        self.positions = nn.Parameter(torch.randn(frames // 2, dim))
        self.block, self.norm = Block(Heads(dim, heads, scale="both"), Mlp(dim, 2 * dim), dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.second(F.gelu(self.first(x)))).permute(0, 2, 1)
        return self.norm(self.block(x + self.positions))  # type: ignore[no-any-return]


class Pooled(nn.Module):  # type: ignore[misc]
    """A layer of PoolFormer: a pooling in place of attention, GroupNorm of one group, and convolutions."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, dim, 4, 4)
        self.norms = nn.ModuleList(nn.GroupNorm(1, dim) for _ in range(2))
        self.up, self.down = nn.Conv2d(dim, 2 * dim, 1), nn.Conv2d(2 * dim, dim, 1)
        self.scale = nn.Parameter(0.5 + 0.1 * torch.randn(2, dim, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        y = self.norms[0](x)
        x = x + self.scale[0] * (F.avg_pool2d(y, 3, 1, 1, count_include_pad=False) - y)
        return x + self.scale[1] * self.down(F.gelu(self.up(self.norms[1](x))))  # type: ignore[no-any-return]


# The family -----------------------------------------------------------------------------------------------------------


def _vit(split: str, dim: int = 48, heads: int = 3, size: int = 32, depth: int = 1, **how: Any) -> nn.Module:
    scale = how.pop("scale", "query")
    layer_scale = how.pop("layer_scale", False)
    blocks = [
        Block(Heads(dim, heads, split=split, scale=scale), Mlp(dim, 2 * dim), dim, layer_scale=layer_scale)
        for _ in range(depth)
    ]
    return Vision(dim, size, 4, list(blocks), **how)


def _tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _encoder(
    dim: int, heads: int, tokens: int, mlp: Any = None, norm: Any = nn.LayerNorm, before: bool = True, depth: int = 1,
    positions: bool = True, final: bool = True, **how: Any,
) -> nn.Module:  # fmt: skip
    mlp = mlp or Mlp
    blocks = [Block(Heads(dim, heads, tokens, **how), mlp(dim, 2 * dim), dim, norm, before) for _ in range(depth)]
    return Sequence(list(blocks), dim, tokens, positions, norm(dim) if final and before else None)


class TorchLayer(nn.Module):  # type: ignore[misc]
    """PyTorch's own encoder layer. It keeps off its fused kernel, which no exporter writes."""

    def __init__(self, dim: int, heads: int, before: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, batch_first=True, norm_first=before)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Variant:
    """A network, the shapes of its inputs, and how it becomes a quantised ONNX model.

    export: "torchscript" or "dynamo". quantiser: "ort" (uint8), "ort-symmetric" (int8), "celosia",
    "celosia-symmetric" or "pt2e".
    """

    network: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    export: str = "dynamo"
    quantiser: str = "ort-symmetric"


VARIANTS: dict[str, Variant] = {
    "vit_permute": Variant(lambda: _vit("permute"), ((1, 3, 32, 32),)),
    "vit_index": Variant(lambda: _vit("index", depth=2), ((1, 3, 32, 32),), "torchscript", "celosia"),
    "vit_49_mean": Variant(
        lambda: _vit("permute", 192, 3, 28, extra=0, head="mean-after"), ((1, 3, 28, 28),), "torchscript", "ort"
    ),
    "vit_197": Variant(
        lambda: _vit("chunk", 64, 2, 56, head="class"), ((1, 3, 56, 56),), "dynamo", "celosia-symmetric"
    ),
    "vit_reshape": Variant(
        lambda: _vit("slice", 80, 5, 24, patches="reshape", extra=4, head="mean", layer_scale=True), ((1, 3, 24, 24),)
    ),
    "vit_two_images": Variant(
        lambda: _vit("permute", size=28, extra=0, head="mean", flatten=False),
        ((2, 3, 28, 28),),
        "dynamo",
        "ort-symmetric",
    ),
    "vit_fused": Variant(
        lambda: Vision(48, 32, 4, [Block(Fused(48, 3), Mlp(48, 96), 48)]), ((1, 3, 32, 32),), "dynamo", "celosia"
    ),
    "gpt2": Variant(
        lambda: _encoder(64, 4, 33, partial(Mlp, act=_tanh_gelu), split="split", scale="divide", mask="where", depth=2),
        ((1, 33, 64),),
        "torchscript",
        "ort-symmetric",
    ),
    "nanogpt": Variant(
        lambda: Sequence([Block(Fused(64, 4, True), Mlp(64, 128), 64)], 64, 32, True, nn.LayerNorm(64)),
        ((1, 32, 64),),
        "dynamo",
        "celosia",
    ),
    "neox": Variant(
        lambda: _encoder(64, 4, 48, split="heads", mask="add", scale="after", depth=1),
        ((1, 48, 64),),
        "dynamo",
        "ort-symmetric",
    ),
    "bert": Variant(
        lambda: _encoder(64, 4, 49, before=False, scale="divide", keys="direct"),
        ((1, 49, 64), (1, 1, 1, 49)),
        "torchscript",
        "ort",
    ),
    "bert_two": Variant(
        lambda: _encoder(64, 2, 24, before=False, scale="divide"), ((2, 24, 64),), "dynamo", "ort-symmetric"
    ),
    "torch_layer": Variant(lambda: TorchLayer(64, 4, False), ((1, 32, 64),), "dynamo", "ort-symmetric"),
    "torch_layer_first": Variant(lambda: TorchLayer(48, 3, True), ((1, 20, 48),), "torchscript", "celosia"),
    "odd_12x21": Variant(
        lambda: _encoder(252, 12, 49, split="split", scale="after", norm=PlainNorm),
        ((1, 49, 252),),
        "dynamo",
        "ort-symmetric",
    ),
    "odd_5x40": Variant(
        lambda: _encoder(200, 5, 33, split="chunk", scale="both"), ((1, 33, 200),), "torchscript", "ort"
    ),
    "llama": Variant(
        lambda: _encoder(
            64, 4, 32, Gated, RMSNorm, shared=2, bias=False, mask="add", scale="divide", rotary=True, positions=False
        ),
        ((1, 32, 64),),
        "dynamo",
        "ort-symmetric",
    ),
    "grouped": Variant(
        lambda: _encoder(96, 6, 40, Gated, RMSNorm, shared=2, scale="query", bias=False),
        ((1, 40, 96),),
        "torchscript",
        "celosia-symmetric",
    ),
    "t5": Variant(
        lambda: _encoder(64, 4, 32, partial(Mlp, act=F.relu), RMSNorm, scale="", mask="relative", bias=False),
        ((1, 32, 64),),
        "dynamo",
        "celosia-symmetric",
    ),
    "cross": Variant(lambda: CrossDecoder(64, 4, 20), ((1, 20, 64), (1, 33, 64)), "dynamo", "ort-symmetric"),
    "swin": Variant(lambda: Swin(48, 3, 4, 16), ((1, 3, 32, 32),), "dynamo", "ort-symmetric"),
    "swin_shifted": Variant(lambda: Swin(32, 2, 7, 14, 3), ((1, 3, 28, 28),), "torchscript", "celosia-symmetric"),
    "convnext_linear": Variant(lambda: ConvNeXt(40, True), ((1, 3, 32, 32),), "dynamo", "ort-symmetric"),
    "convnext_conv": Variant(lambda: ConvNeXt(48, False), ((1, 3, 32, 32),), "torchscript", "celosia"),
    "mobilevit": Variant(lambda: MobileViT(32, 64), ((1, 32, 16, 16),), "dynamo", "celosia-symmetric"),
    "unet_group": Variant(
        lambda: UNetBlock(32, partial(nn.GroupNorm, 8), True), ((1, 3, 16, 16),), "dynamo", "ort-symmetric"
    ),
    "unet_instance": Variant(
        lambda: UNetBlock(32, partial(nn.InstanceNorm2d, affine=True), False),
        ((1, 3, 16, 16),),
        "torchscript",
        "celosia",
    ),
    "nafnet": Variant(lambda: NAF(32), ((1, 3, 32, 32),), "dynamo", "ort-symmetric"),
    "tcn": Variant(lambda: TCN(32), ((1, 8, 64),), "dynamo", "ort-symmetric"),
    "mixer": Variant(
        lambda: Vision(64, 28, 4, [Mixer(64, 49)], head="mean", extra=0), ((1, 3, 28, 28),), "dynamo", "ort-symmetric"
    ),
    "reduced": Variant(
        lambda: Vision(64, 32, 4, [Block(Reduced(64, 2, 8), Mlp(64, 128), 64)], extra=0, head="mean"),
        ((1, 3, 32, 32),),
        "dynamo",
        "ort-symmetric",
    ),
    "conformer": Variant(lambda: Conformer(64, 4), ((1, 40, 64),), "torchscript", "ort-symmetric"),
    "whisper": Variant(lambda: Listen(64, 4, 80), ((1, 20, 80),), "dynamo", "celosia-symmetric"),
    "poolformer": Variant(lambda: Pooled(48), ((1, 3, 32, 32),), "dynamo", "ort-symmetric"),
    "vit_pt2e": Variant(lambda: _vit("permute"), ((1, 3, 32, 32),), "dynamo", "pt2e"),
    "convnext_pt2e": Variant(lambda: ConvNeXt(32, True), ((1, 3, 32, 32),), "dynamo", "pt2e"),
}
"""Name -> variant. Names are for tables and tests only."""


def feeds(variant: Variant, count: int, seed: int = 0) -> Iterator[dict[str, Floats]]:
    """Yield random inputs; those of further inputs of one row are masks, with a few large negative numbers."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        arrays = [random.normal(size=shape).astype(np.float32) for shape in variant.shapes]
        arrays = [np.where(a > 1, -10, 0).astype(np.float32) if a.ndim == 4 and a.shape[2] == 1 else a for a in arrays]
        yield {f"x{number}": array for number, array in enumerate(arrays)}


def build(name: str, folder: Path) -> Path:
    """Write the quantised model of a variant into `folder`, and return its path."""
    variant = VARIANTS[name]
    torch.manual_seed(0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = variant.network().eval()
        path = folder / f"{name}.onnx"
        if variant.quantiser == "pt2e":
            return _quantised_in_torch(variant, network, path)
        floats = folder / f"{name}_float.onnx"
        _export(network, variant, floats)
        return _quantised(variant, floats, path)


def _export(network: nn.Module, variant: Variant, path: Path) -> None:
    inputs = tuple(torch.from_numpy(array) for array in next(feeds(variant, 1)).values())
    names = [f"x{number}" for number in range(len(inputs))]
    if variant.export == "dynamo":
        torch.onnx.export(
            network, inputs, path, input_names=names, opset_version=18, dynamo=True, external_data=False, verbose=False
        )
    else:
        torch.onnx.export(network, inputs, path, input_names=names, opset_version=17, dynamo=False)


def _quantised(variant: Variant, floats: Path, path: Path) -> Path:
    kind, _, symmetric = variant.quantiser.partition("-")
    samples = list(feeds(variant, 4))
    if kind == "celosia":
        from celosia.driver.quantize.quantize import quantize

        arrays = {key: np.concatenate([sample[key] for sample in samples]) for key in samples[0]}
        quantize(floats, arrays, path, symmetric=bool(symmetric))
        return path
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Samples(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter(samples)

        def get_next(self) -> dict[str, Floats] | None:
            return next(self.left, None)

    prepared = floats.with_name(f"{floats.stem}_prepared.onnx")
    quant_pre_process(floats, prepared, skip_symbolic_shape=True)
    quantize_static(
        prepared, path, Samples(), weight_type=QuantType.QInt8, per_channel=False,
        activation_type=QuantType.QInt8 if symmetric else QuantType.QUInt8,
        extra_options={"ActivationSymmetric": bool(symmetric)},
    )  # fmt: skip
    return path


def _quantised_in_torch(variant: Variant, network: nn.Module, path: Path) -> Path:
    import onnx
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    import celosia
    from celosia.driver.torch.export import to_onnx

    samples = [tuple(map(torch.from_numpy, feed.values())) for feed in feeds(variant, 4)]
    prepared = prepare_pt2e(torch.export.export(network, samples[0]).module(), celosia.CelosiaQuantizer())
    for sample in samples:
        prepared(*sample)
    names = [f"x{number}" for number in range(len(samples[0]))]
    onnx.save(to_onnx(convert_pt2e(prepared), samples[0], input_names=names), path)
    return path
