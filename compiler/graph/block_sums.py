"""Products by weights of few bits as sums of integers by blocks, where the accelerator gives sums as they are.

    y = MatMulNBits(x, w, scales, zeros)      ->      q, steps = QuantizeBlocks(x)          CPU: bytes by blocks
        accuracy_level 4                              s = BlockSums(q, w - zeros)           int32, byte by byte
                                                      y = ScaleSums(s, steps, scales)       CPU: floats, to [..., N]

These are the integers that onnxruntime adds up, and the same scales; only the order in which floats are added differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.cpu.ops.contrib import BYTES_OF_BLOCKS
from celosia.compiler.graph.values import (
    attribute,
    attributes,
    constant,
    derived_name,
    dtype_name,
    is_op,
    new_constant,
    shape,
)
from celosia.compiler.tensorize import pack
from celosia.hw.spec.config import Config
from celosia.hw.spec.scratchpads import depths

MOST_BLOCKS = 32
"""Output blocks that read the same input, in one instruction."""
LARGEST = 127
"""Largest magnitude of activations in bytes."""
Numbers = NDArray[np.int32]


@dataclass(frozen=True)
class _Weights:
    """values [N, blocks, size] int8; scales [N, blocks]; zeros [N, blocks]: what is to be taken off of values still, or
    None."""

    values: NDArray[np.int8]
    scales: NDArray[np.float32]
    zeros: Numbers | None


def sum_blocks(model: ir.Model, cfg: Config) -> None:
    """Change `model`: what `cfg` can make sums of is three operators."""
    for node in list(model.graph):
        if cfg.sums and is_op(node, "MatMulNBits") and (found := _weights(node)) is not None:
            _split(node, found, cfg)


def _weights(node: ir.Node) -> _Weights | None:
    """Those of a MatMulNBits that multiplies bytes; None for any other, and for one that is damaged."""
    inputs = [*node.inputs, *[None] * 6]
    x, bias = inputs[0], inputs[5]
    bits, size, inner, n = (attribute(node, name, 4) for name in ("bits", "block_size", "K", "N"))
    packed, scales, zeros = (constant(value) for value in inputs[1:4])
    dims = None if x is None else shape(x)
    if attribute(node, "accuracy_level", 0) != 4 or size not in BYTES_OF_BLOCKS.get(bits, ()) or inputs[4] is not None:
        return None
    if x is None or dims is None or 0 in dims or dims[-1:] != (inner,) or dtype_name(x) != "float32":
        return None
    if packed is None or scales is None or (inputs[3] is not None and (zeros is None or zeros.dtype != np.uint8)):
        return None
    blocks = -(-inner // size)
    row = -(-blocks * bits // 8)
    sizes = packed.size == n * blocks * size * bits // 8 and scales.size == n * blocks
    if packed.dtype != np.uint8 or not sizes or (zeros is not None and zeros.size != n * row):
        return None
    if bias is not None and shape(bias) != (n,):
        return None
    numbers = _unpacked(packed.reshape(n, -1), bits).reshape(n, blocks, size)
    middle = np.full((n, blocks), 1 << bits - 1, np.int32)
    starts = middle if zeros is None else _unpacked(zeros.reshape(n, row), bits)[:, :blocks]
    inside = numbers - (starts if bits < 8 else middle)[..., None]
    inside.reshape(n, -1)[:, inner:] = 0  # of which no activation is there
    rest = starts - middle if bits == 8 and zeros is not None else None
    return _Weights(inside.astype(np.int8), scales.reshape(n, blocks).astype(np.float32), rest)


def _unpacked(packed: NDArray[np.uint8], bits: int) -> Numbers:
    """Numbers of `bits` bits along the last axis, the low bits first."""
    parts = packed[..., None] >> np.arange(0, 8, bits).astype(np.uint8) & (1 << bits) - 1
    return parts.reshape(*packed.shape[:-1], -1).astype(np.int32)


def _split(node: ir.Node, weights: _Weights, cfg: Config) -> None:
    x, y, graph, name = node.inputs[0], node.outputs[0], node.graph, node.name
    assert x is not None and isinstance(graph, ir.Graph)
    dims, (n, blocks, size) = shape(x) or (), weights.values.shape
    most = LARGEST * int(np.abs(weights.values.astype(np.int32)).sum(axis=-1).max())
    count = next(count for count in range(1, 5) if most < 1 << 8 * count - 1)
    parts, lanes = _parts(cfg, n, size, prod(dims[:-1]), count)
    tiles = _tiles(weights.values, parts, lanes)

    def made(
        op: str, inputs: list[ir.Value | None], outputs: list[ir.Value], domain: str = "celosia", **attrs: Any
    ) -> list[ir.Value]:
        of_name = f"{name}_{op.lower()}"
        graph.insert_before(node, ir.Node(domain, op, inputs, attributes(**attrs), outputs=outputs, name=of_name))
        return outputs

    def value(what: str, dtype: ir.DataType, *last: int) -> ir.Value:
        of_part = derived_name(graph, f"{y.name}_{what}")
        return ir.Value(name=of_part, shape=ir.Shape((*dims[:-1], *last)), type=ir.TensorType(dtype))

    integers, floats = ir.DataType.INT8, ir.DataType.FLOAT
    inner = dims[-1]
    outputs = [value("bytes", integers, blocks, size), value("steps", floats, blocks)]
    q, steps = made("QuantizeBlocks", [x], outputs, block_size=size)
    w = new_constant(graph, f"{name}_weights", tiles)
    (sums,) = made(
        "BlockSums", [q, w], [value("sums", integers, parts, count, blocks, lanes)], sum_bytes=count, K=inner, N=n
    )
    scales = new_constant(graph, f"{name}_scales", _tiles(weights.scales, parts, lanes))
    zeros = (
        [] if weights.zeros is None else [q, new_constant(graph, f"{name}_zeros", _tiles(weights.zeros, parts, lanes))]
    )
    (found,) = made("ScaleSums", [sums, steps, scales, *zeros], [value("scaled", floats, parts, lanes)])
    columns, row = parts * lanes, new_constant(graph, f"{name}_shape", np.array((*dims[:-1], parts * lanes)))
    (found,) = made("Reshape", [found, row], [value("columns", floats, columns)], domain="")
    if columns > n:
        ends = [
            new_constant(graph, f"{name}_{what}", np.array([at]))
            for what, at in (("start", 0), ("end", n), ("axis", -1))
        ]
        (found,) = made("Slice", [found, *ends], [value("sliced", floats, n)], domain="")
    if len(node.inputs) > 5 and node.inputs[5] is not None:
        (found,) = made("Add", [found, node.inputs[5]], [value("biased", floats, n)], domain="")
    ir.convenience.replace_all_uses_with(y, found, replace_graph_outputs=True)
    kept = y.name
    graph.remove(node, safe=True)
    y.name = None
    found.name = kept


def _tiles(rows: NDArray[Any], parts: int, lanes: int) -> NDArray[Any]:
    """rows [N, blocks, ...] as [parts, blocks, lanes, ...], zeros beyond N."""
    padded = np.zeros((parts * lanes, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    return padded.reshape(parts, lanes, *rows.shape[1:]).swapaxes(1, 2)


def _parts(cfg: Config, n: int, size: int, rows: int, count: int) -> tuple[int, int]:
    """(parts, columns of each): few enough for a tile to hold all that read the same input, for several rows."""
    room, pixels = depths(cfg), min(-(-rows // cfg.batch), 16)
    fits = min(room["out"] // 2 // (count * pixels), room["acc"] // 2 // pixels, MOST_BLOCKS)
    fits = min(fits, room["wgt"] // 2 // pack.blocks(size, cfg.block_in)) * min(size, cfg.block_in) // cfg.block_in
    blocks = pack.blocks(n, cfg.block_out)
    parts = -(-blocks // max(fits, 1))
    return parts, -(-blocks // parts) * cfg.block_out
