"""Casts and quantisation for element types that kernels lack: bfloat16, small floats, 2- and 4-bit integers,
strings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from celosia.compiler.program.dtypes import ONNX_TYPES, is_float, numpy_dtype
from celosia.compiler.program.host.op import Array, HostOp, host, numpy_type


@host("Cast")
def cast(op: HostOp, x: Array) -> Array:
    """Convert to the type in the attribute."""
    return convert(op, x, numpy_type(op.attrs["to"]))


@host("CastLike")
def cast_like(op: HostOp, x: Array, like: Array) -> Array:
    """Convert to the type of `like`."""
    return convert(op, x, like.dtype)


def convert(op: HostOp, x: Array, kind: np.dtype[Any]) -> Array:
    """Convert x to the element type `kind`, as Cast with the attributes of `op` defines it."""
    if kind.kind == "O":
        return np.array([_text(value) for value in x.reshape(-1)], object).reshape(x.shape)
    if x.dtype.kind == "O":
        return _parse_numbers(op, x, kind)
    if kind == x.dtype:
        return x
    if kind.kind == "b":
        return x.astype(np.float32) != 0 if x.dtype.kind == "V" else x.astype(bool)
    if is_float(kind) and kind.itemsize == 1:
        return small_float(x, kind, bool(op.attr("saturate", 1)), op.attr("round_mode", "up"))
    if not is_float(kind) and kind.kind not in "iu":  # 2- and 4-bit integers keep the low bits
        wide = x.astype(np.float32).astype(np.int32) if x.dtype.kind not in "iu" else x
        return wide.astype(np.int8).astype(kind)
    if x.dtype.kind == "V" and kind.kind in "iu":
        return x.astype(np.float32).astype(kind)
    with np.errstate(all="ignore"):
        return x.astype(kind)


def small_float(x: Array, kind: np.dtype[Any], saturate: bool, rounding: str = "up") -> Array:
    """Convert to a float of 8 bits or fewer.

    saturate: values beyond the largest become the largest; else infinite or NaN. rounding: the attribute round_mode,
    for powers of two.
    """
    import ml_dtypes

    info = ml_dtypes.finfo(kind)
    wide = x.astype(np.float32)
    if kind == ml_dtypes.float8_e8m0fnu:
        return _to_power_of_two(wide, kind, saturate, rounding)
    if saturate:
        top = np.float32(info.max)
        wide = np.where(np.isnan(wide), wide, np.clip(wide, -top, top))
    with np.errstate(all="ignore"):
        return wide.astype(kind)


def _to_power_of_two(x: Array, kind: np.dtype[Any], saturate: bool, rounding: str) -> Array:
    """Convert float32 to float8_e8m0fnu, a power of two, by its exponent; rounding: "up", "nearest" or "down"."""
    bits = np.abs(x).view(np.uint32)
    exponent, mantissa = (bits >> 23).astype(np.int32), bits & 0x7FFFFF
    if rounding == "up":
        exponent += mantissa > 0
    elif rounding == "nearest":
        exponent += mantissa >= 0x400000
    special = ~np.isfinite(x)
    code = np.clip(exponent, 0, 254 if saturate else 255)
    code = np.where(np.isinf(x) & saturate, 254, np.where(special, 255, code))
    return code.astype(np.uint8).view(kind)


def _text(value: Any) -> str:
    """Format a value as onnxruntime casts it to a string."""
    if isinstance(value, (bool, np.bool_)):
        return "1" if value else "0"
    if isinstance(value, (int, str, np.integer)):
        return str(value)
    real = float(value)
    if np.isnan(real):
        return "NaN"
    if np.isinf(real):
        return "INF" if real > 0 else "-INF"
    return f"{real:.8g}"


_INTEGER = re.compile(r"\s*([+-]?\d+)", re.ASCII)
"""An integer at the beginning of a text."""
_REAL = re.compile(
    r"\s*([+-]?)(0x[\da-f]+(?:\.[\da-f]*)?(?:p[+-]?\d+)?|inf|nan|(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)", re.I | re.A
)
"""A decimal or hexadecimal number, an infinity or NaN at the beginning of a text."""


def _parse_numbers(op: HostOp, texts: Array, kind: np.dtype[Any]) -> Array:
    """Parse the number at the beginning of each text, as C does: hexadecimal, too, for floats."""
    if kind.kind == "O":
        return texts
    numbers = [(_parse_float if is_float(kind) else _parse_int)(op, str(text), kind) for text in texts.reshape(-1)]
    return np.array(numbers, np.float64 if is_float(kind) else object).astype(kind).reshape(texts.shape)


def _parse_int(op: HostOp, text: str, kind: np.dtype[Any]) -> int:
    """Parse an integer of 64 bits, of which the type `kind` keeps the lowest. Raises HostError where there is none."""
    match = _INTEGER.match(text)
    if match is None or not -(2**63) <= int(match[1]) < 2 ** (64 if kind == np.uint64 else 63):
        raise op.fail(f"{text[:40]!r} is no integer of 64 bits")
    if kind.kind == "b":
        return int(int(match[1]) != 0)
    size = int(8 * kind.itemsize)
    low: int = int(match[1]) % 2**size
    return low - 2**size if kind.kind == "i" and low >= 2 ** (size - 1) else low


def _parse_float(op: HostOp, text: str, kind: np.dtype[Any]) -> float:
    """Parse a float. Raises HostError where there is none, or it exceeds the type."""
    match = _REAL.match(text)
    if match is None:
        raise op.fail(f"{text[:40]!r} is no number")
    read = float.fromhex if match[2][:2] in ("0x", "0X") else float
    value = read(match[1] + match[2])
    top = np.finfo(np.float64 if kind.itemsize == 8 else np.float32).max
    if abs(value) > top and match[2].lower() != "inf":
        raise op.fail(f"{text[:40]!r} is beyond the numbers of {kind}")
    return value


@host("BitCast")
def bit_cast(op: HostOp, x: Array) -> Array:
    """Reinterpret the bits as another type. Raises HostError where sizes differ."""
    kind = numpy_type(op.attrs["to"])
    if kind.itemsize != x.dtype.itemsize:
        raise op.fail(f"{x.dtype} and {kind} differ in size")
    return np.asarray(x, order="C").view(kind)


def _broadcast_parameters(op: HostOp, values: Array, x: Array) -> Array:
    """Broadcast scales or zero points of `op` to the elements of x. Raises HostError where they do not fit."""
    try:
        return broadcast_parameters(values, x.shape, op.attr("axis", 1), op.attr("block_size", 0))
    except ValueError as error:
        raise op.fail(str(error)) from None


def broadcast_parameters(values: Array, shape: tuple[int, ...], axis: int, block: int) -> Array:
    """Broadcast scales or zero points to a tensor of `shape`, which they quantise.

    There is one for all, one for each index of `axis`, or one for each block of `block` indices (0: no blocks). Raises
    ValueError where they do not fit.
    """
    if why := parameter_shape_error(values.shape, shape, axis, block):
        raise ValueError(why)
    if block:
        return np.take(np.repeat(values, block, axis), np.arange(shape[axis]), axis)
    if values.size == 1:
        return values.reshape(())
    across = [1] * len(shape)
    across[axis] = -1
    return values.reshape(across)


def parameter_shape_error(parameters: Sequence[int], shape: Sequence[int | None], axis: int, block: int) -> str:
    """Return why scales or zero points of shape `parameters` do not fit `shape`, in a sentence; "" where they do.

    The rules are onnxruntime's. None in `shape` is an unknown size, which fits everything.
    """
    count = prod(parameters)
    if not block and len(parameters) <= 1 and count == 1:
        return ""
    count_text = "1 scale or zero point" if count == 1 else f"{count} scales or zero points"
    parameters_text = f"scales or zero points {[*parameters]}" if len(parameters) > 1 else count_text
    subject = f"{parameters_text} along axis {axis} of shape {['?' if n is None else n for n in shape]}"
    if not -len(shape) <= axis < len(shape):
        return f"{subject}; give an axis from {-len(shape)} to {len(shape) - 1}"
    if not block and len(parameters) != 1:
        return f"{subject}; give block_size, one scale for all, or one for each place along the axis"
    position, size = axis % len(shape), shape[axis]
    if not block:
        return "" if size in (None, count) else f"{subject}; give one for all, or {size}"
    blocks = [-(-n // block) if d == position and n is not None else n for d, n in enumerate(shape)]
    is_valid = len(parameters) == len(blocks) and all(n in (None, m) for n, m in zip(blocks, parameters))
    return "" if is_valid else f"{subject} in blocks of {block}; give {blocks}"


def _bounds(kind: np.dtype[Any]) -> tuple[int, int]:
    """Return the least and the greatest value of an integer type."""
    if kind.kind in "iu":
        return int(np.iinfo(kind).min), int(np.iinfo(kind).max)
    import ml_dtypes

    return int(ml_dtypes.iinfo(kind).min), int(ml_dtypes.iinfo(kind).max)


def quantised_type(op: HostOp, zero: Array | None) -> np.dtype[Any]:
    """Return the result type of a QuantizeLinear: that of its zero point, else `output_dtype`, else uint8."""
    return numpy_dtype(ONNX_TYPES.get(op.attr("output_dtype", 0), "uint8")) if zero is None else zero.dtype


@host("QuantizeLinear")
def quantize(op: HostOp, x: Array, scale: Array, zero: Array | None = None) -> Array:
    """Quantise by tensor, by channel or by block."""
    kind = quantised_type(op, zero)
    precision = numpy_type(op.attrs["precision"]) if op.attr("precision", 0) else np.dtype(np.float32)
    y = x.astype(precision) / _broadcast_parameters(op, scale, x).astype(precision)
    if is_float(kind):
        return small_float(y.astype(np.float32), kind, bool(op.attr("saturate", 1)))
    low, high = _bounds(kind)
    start = np.float32(0) if zero is None else _broadcast_parameters(op, zero, x).astype(np.float32)
    return np.clip(np.rint(y.astype(np.float32)) + start, low, high).astype(np.int32).astype(kind)


@host("DequantizeLinear")
def dequantize(op: HostOp, x: Array, scale: Array, zero: Array | None = None) -> Array:
    """Dequantise by tensor, by channel or by block."""
    kind = numpy_type(op.attrs["output_dtype"]) if op.attr("output_dtype", 0) else scale.dtype
    if zero is not None and zero.dtype != x.dtype:
        raise op.fail(f"zero points of {zero.dtype} for integers of {x.dtype}; give both one type")
    y = x.astype(np.float32)
    start = None if zero is None else _broadcast_parameters(op, zero, x).astype(np.float32)
    if start is not None and start.any():
        y = y - start
    return np.asarray(y * _broadcast_parameters(op, scale, x).astype(np.float32)).astype(kind, copy=False)


@host("GatherBlockQuantized", domain="com.microsoft", operands="data indices scales zero_points?")
def gather_block_quantised(op: HostOp, x: Array, indices: Array, scales: Array, zeros: Array | None = None) -> Array:
    """Gather elements of x, whose blocks have a scale and a zero point each, and dequantise them.

    An index out of range gives 0. Bytes hold one number of 8 bits, or several smaller ones in the last axis, low bits
    first.
    """
    shapes = [list(array.shape) for array in (x, scales, *(() if zeros is None else (zeros,)))]
    bits, size = op.attr("bits", 4) if x.dtype == np.uint8 else 8, op.attr("block_size", 128)
    along, across = op.attr("gather_axis", 0), op.attr("quantize_axis", 1)
    if problem := block_shape_error(shapes, x.dtype.name, bits, size, along, across):
        raise op.fail(problem)
    along, across = along % x.ndim, across % x.ndim
    wrapped = np.where(indices < 0, indices + x.shape[along], indices).astype(np.int64)
    inside = (wrapped >= 0) & (wrapped < x.shape[along])
    wrapped = np.where(inside, wrapped, 0)
    blocks = wrapped // size if along == across else wrapped
    y = _unpack_bits(np.take(x, wrapped, along), bits)
    axis = across if across < along else across + indices.ndim - 1

    def for_elements(parameters: Array) -> Array:
        """Gather the parameters of blocks like x, and repeat each for all elements of its block."""
        gathered: Array = np.take(parameters, blocks, along)
        if along == across:
            return gathered
        repeated: Array = np.take(gathered, np.arange(y.shape[axis]) // size, axis)
        return repeated

    level = y.astype(np.int32) - (1 << (bits - 1) if x.dtype == np.uint8 else 0)
    if zeros is not None:
        level = y.astype(np.int32) - for_elements(_unpack_bits(zeros, bits)).astype(np.int32)
    real = level.astype(np.float32) * for_elements(scales).astype(np.float32)
    is_valid = inside.reshape((1,) * along + inside.shape + (1,) * (x.ndim - along - 1))
    return np.where(is_valid, real, 0).astype(scales.dtype)


def block_shape_error(
    shapes: Sequence[Sequence[int]], dtype: str, bits: int, size: int, along: int, across: int
) -> str:  # fmt: skip
    """Return why the shapes of a GatherBlockQuantized are illegal, in a sentence; "" where they are legal.

    shapes: of numbers, scales and perhaps zero points. bits: of a number where bytes (`dtype` uint8) hold several; 8
    for other types. along, across: its axes.
    """
    x, *others = map(list, shapes)
    rank, packed = len(x), dtype == "uint8"
    if dtype not in ("uint8", "int4", "uint4") or bits not in (2, 4, 8):
        subject = f"{bits} bits" if packed else dtype
        return f"it gathers numbers of {subject}; give uint8 that holds those of 2, 4 or 8 bits, int4 or uint4"
    if size < 16 or size & size - 1:
        return f"block_size is {size}; give a power of two from 16 on"
    if not (-rank <= along < rank and -rank <= across < rank):
        return f"gather_axis {along} or quantize_axis {across} is no axis of numbers {x}"
    if packed and across % rank != rank - 1:
        return f"quantize_axis is {across}; bytes that hold several numbers have their blocks along the last axis"
    blocks = [*x]
    blocks[across] = -(-x[across] * (8 // bits) // size)
    expected = [blocks, [*blocks[:-1], -(-blocks[-1] // (8 // bits)) if packed else blocks[-1]]]
    for subject, actual, expected_shape in zip(("scales", "zero points"), others, expected):
        if actual != expected_shape:
            return f"{subject} {actual} for numbers {x} in blocks of {size} along axis {across}; give {expected_shape}"
    return ""


def _unpack_bits(x: Array, bits: int) -> Array:
    """Unpack numbers of `bits` bits, several in a byte along the last axis, the first in the lowest bits."""
    if bits == 8:
        return x
    parts = x[..., None] >> np.arange(0, 8, bits, dtype=np.uint8) & np.uint8((1 << bits) - 1)
    return parts.reshape(*x.shape[:-1], -1)
