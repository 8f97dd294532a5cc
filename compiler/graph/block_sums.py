"""Compute MatMulNBits on accelerators that store int32 sums: as integer sums of blocks, which the CPU scales.

    y = MatMulNBits(x, w, scales, zeros)      ->      q, x_scales = QuantizeBlocks(x)          CPU: bytes by blocks
        accuracy_level 4                              s = BlockSums(q, w - zeros)           int32, byte by byte
                                                      y = ScaleSums(s, x_scales, scales)       CPU: floats, to [..., N]

The integers and scales are onnxruntime's; only the order in which floats are added differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.operands import operand
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
from celosia.compiler.ops.contrib import BYTES_OF_BLOCKS
from celosia.compiler.tensorize import pack
from celosia.hw.spec.config import Config
from celosia.hw.spec.scratchpads import depths

MAX_OUTPUT_BLOCKS = 32
"""Blocks of `block_out` output columns that one BlockSums computes from the same activations, at most."""
MAX_ACTIVATION = 127
"""Largest magnitude of an activation in bytes."""
Int32Array = NDArray[np.int32]
"""An int32 array."""


@dataclass(frozen=True)
class _Weights:
    """Unpacked weights of a MatMulNBits.

    values: int8 [N, blocks, size], less their zero points where the difference fits int8. scales: float32 [N, blocks].
    zeros: int32 [N, blocks], zero points that are still to be subtracted; None if there are none.
    """

    values: NDArray[np.int8]
    scales: NDArray[np.float32]
    zeros: Int32Array | None


def replace_by_block_sums(model: ir.Model, cfg: Config) -> None:
    """Replace each MatMulNBits on bytes by QuantizeBlocks, BlockSums and ScaleSums, if `cfg` can store sums."""
    for node in list(model.graph):
        if cfg.sums and is_op(node, "MatMulNBits") and (weights := _unpacked_weights(node)) is not None:
            _replace_node(node, weights, cfg)


def _unpacked_weights(node: ir.Node) -> _Weights | None:
    """Return the weights of a MatMulNBits that multiplies bytes; None for another, or one of inconsistent sizes."""
    x, bias, zero_points = operand(node, "a"), operand(node, "bias"), operand(node, "zero_points")
    bits, block_size, k, n = (attribute(node, name, 4) for name in ("bits", "block_size", "K", "N"))
    packed, scales, zeros = (constant(value) for value in (operand(node, "b"), operand(node, "scales"), zero_points))
    dims = None if x is None else shape(x)
    if (
        attribute(node, "accuracy_level", 0) != 4
        or block_size not in BYTES_OF_BLOCKS.get(bits, ())
        or operand(node, "g_idx") is not None
    ):
        return None
    if x is None or dims is None or 0 in dims or dims[-1:] != (k,) or dtype_name(x) != "float32":
        return None
    if packed is None or scales is None or (zero_points is not None and (zeros is None or zeros.dtype != np.uint8)):
        return None
    blocks = -(-k // block_size)
    zero_row_bytes = -(-blocks * bits // 8)
    sizes_fit = packed.size == n * blocks * block_size * bits // 8 and scales.size == n * blocks
    if packed.dtype != np.uint8 or not sizes_fit or (zeros is not None and zeros.size != n * zero_row_bytes):
        return None
    if bias is not None and shape(bias) != (n,):
        return None
    unsigned = _unpack_bits(packed.reshape(n, -1), bits).reshape(n, blocks, block_size)
    midpoints = np.full((n, blocks), 1 << bits - 1, np.int32)
    zero_values = midpoints if zeros is None else _unpack_bits(zeros.reshape(n, zero_row_bytes), bits)[:, :blocks]
    values = unsigned - (zero_values if bits < 8 else midpoints)[..., None]
    values.reshape(n, -1)[:, k:] = 0  # padding of the last block, where no activation is
    remaining_zeros = zero_values - midpoints if bits == 8 and zeros is not None else None
    return _Weights(values.astype(np.int8), scales.reshape(n, blocks).astype(np.float32), remaining_zeros)


def _unpack_bits(packed: NDArray[np.uint8], bits: int) -> Int32Array:
    """Unpack numbers of `bits` bits along the last axis, low bits first, as int32."""
    parts = packed[..., None] >> np.arange(0, 8, bits).astype(np.uint8) & (1 << bits) - 1
    return parts.reshape(*packed.shape[:-1], -1).astype(np.int32)


def _replace_node(node: ir.Node, weights: _Weights, cfg: Config) -> None:
    """Replace `node` by the operators of the module's docstring, then cut padded columns off and add the bias.

    The sums are int32 numbers cut to as few bytes as the largest possible sum needs (`sum_bytes`).
    """
    x, y, graph, name = node.inputs[0], node.outputs[0], node.graph, node.name
    assert x is not None and isinstance(graph, ir.Graph)
    dims, (n, blocks, size) = shape(x) or (), weights.values.shape
    largest_sum = MAX_ACTIVATION * int(np.abs(weights.values.astype(np.int32)).sum(axis=-1).max())
    sum_bytes = next(sum_bytes for sum_bytes in range(1, 5) if largest_sum < 1 << 8 * sum_bytes - 1)
    parts, lanes = _choose_parts(cfg, n, size, prod(dims[:-1]), sum_bytes)
    tiles = _arrange_tiles(weights.values, parts, lanes)

    def insert(
        op: str, inputs: list[ir.Value | None], outputs: list[ir.Value], domain: str = "celosia", **attrs: Any
    ) -> list[ir.Value]:
        """Insert an operator before `node` and return its outputs."""
        node_name = f"{name}_{op.lower()}"
        graph.insert_before(node, ir.Node(domain, op, inputs, attributes(**attrs), outputs=outputs, name=node_name))
        return outputs

    def new_value(suffix: str, dtype: ir.DataType, *last: int) -> ir.Value:
        """Make a value whose shape is that of x but for the last axis, which becomes `last`."""
        value_name = derived_name(graph, f"{y.name}_{suffix}")
        return ir.Value(name=value_name, shape=ir.Shape((*dims[:-1], *last)), type=ir.TensorType(dtype))

    integers, floats = ir.DataType.INT8, ir.DataType.FLOAT
    k = dims[-1]
    outputs = [new_value("bytes", integers, blocks, size), new_value("x_scales", floats, blocks)]
    q, x_scales = insert("QuantizeBlocks", [x], outputs, block_size=size)
    w = new_constant(graph, f"{name}_weights", tiles)
    (sums,) = insert(
        "BlockSums",
        [q, w],
        [new_value("sums", integers, parts, sum_bytes, blocks, lanes)],
        sum_bytes=sum_bytes,
        K=k,
        N=n,
    )
    scales = new_constant(graph, f"{name}_scales", _arrange_tiles(weights.scales, parts, lanes))
    zeros = (
        []
        if weights.zeros is None
        else [q, new_constant(graph, f"{name}_zeros", _arrange_tiles(weights.zeros, parts, lanes))]
    )
    (result,) = insert("ScaleSums", [sums, x_scales, scales, *zeros], [new_value("scaled", floats, parts, lanes)])
    columns, row = parts * lanes, new_constant(graph, f"{name}_shape", np.array((*dims[:-1], parts * lanes)))
    (result,) = insert("Reshape", [result, row], [new_value("columns", floats, columns)], domain="")
    if columns > n:
        ends = [
            new_constant(graph, f"{name}_{suffix}", np.array([at]))
            for suffix, at in (("start", 0), ("end", n), ("axis", -1))
        ]
        (result,) = insert("Slice", [result, *ends], [new_value("sliced", floats, n)], domain="")
    if (bias := operand(node, "bias")) is not None:
        (result,) = insert("Add", [result, bias], [new_value("biased", floats, n)], domain="")
    ir.convenience.replace_all_uses_with(y, result, replace_graph_outputs=True)
    output_name = y.name
    graph.remove(node, safe=True)
    y.name = None
    result.name = output_name


def _arrange_tiles(rows: NDArray[Any], parts: int, lanes: int) -> NDArray[Any]:
    """Arrange what belongs to output columns [N, blocks, ...] as BlockSums and ScaleSums read it.

    Returns [parts, blocks, columns of a part, ...], with zeros beyond N. rows: weights, scales or zeros. lanes: number
    of columns of a part.
    """
    padded = np.zeros((parts * lanes, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    return padded.reshape(parts, lanes, *rows.shape[1:]).swapaxes(1, 2)


def _choose_parts(cfg: Config, n: int, size: int, rows: int, count: int) -> tuple[int, int]:
    """Return (parts, columns of each) of the N output columns.

    The columns of a part read the same activations; a part must fit half of each scratchpad for up to 16 rows.

    size: activations in a block. rows: rows of activations. count: bytes of a sum.
    """
    capacity, pixels = depths(cfg), min(-(-rows // cfg.batch), 16)
    blocks_that_fit = min(capacity["out"] // 2 // (count * pixels), capacity["acc"] // 2 // pixels, MAX_OUTPUT_BLOCKS)
    blocks_that_fit = (
        min(blocks_that_fit, capacity["wgt"] // 2 // pack.blocks(size, cfg.block_in))
        * min(size, cfg.block_in)
        // cfg.block_in
    )
    blocks = pack.blocks(n, cfg.block_out)
    parts = -(-blocks // max(blocks_that_fit, 1))
    return parts, -(-blocks // parts) * cfg.block_out
