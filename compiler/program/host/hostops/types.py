"""Element types that kernels do not know: bfloat16, 8-bit and smaller floats, 2- and 4-bit integers, strings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from celosia.compiler.program.dtypes import ONNX_TYPES, is_float, numpy_dtype
from celosia.compiler.program.host.hostops.registry import Array, host, numpy_type
from celosia.compiler.program.host.op import HostOp


@host("Cast")
def cast(op: HostOp, x: Array) -> Array:
    """To the type that the attribute names."""
    return convert(op, x, numpy_type(op.attrs["to"]))


@host("CastLike")
def cast_like(op: HostOp, x: Array, like: Array) -> Array:
    """To the type of `like`."""
    return convert(op, x, like.dtype)


def convert(op: HostOp, x: Array, kind: np.dtype[Any]) -> Array:
    """x as another element type, as Cast defines it."""
    if kind.kind == "O":
        return np.array([_text(value) for value in x.reshape(-1)], object).reshape(x.shape)
    if x.dtype.kind == "O":
        return _numbers(op, x, kind)
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
    """x as a float of 8 bits or fewer; values beyond the largest become it where `saturate`, else infinite or NaN."""
    import ml_dtypes

    info = ml_dtypes.finfo(kind)
    wide = x.astype(np.float32)
    if kind == ml_dtypes.float8_e8m0fnu:
        return _power(wide, kind, saturate, rounding)
    if saturate:
        top = np.float32(info.max)
        wide = np.where(np.isnan(wide), wide, np.clip(wide, -top, top))
    with np.errstate(all="ignore"):
        return wide.astype(kind)


def _power(x: Array, kind: np.dtype[Any], saturate: bool, rounding: str) -> Array:
    """Powers of two, from the exponent's bits."""
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
    if isinstance(value, (bool, np.bool_)):
        return "1" if value else "0"
    if isinstance(value, (int, str, np.integer)):
        return str(value)
    number = float(value)
    if np.isnan(number):
        return "NaN"
    if np.isinf(number):
        return "INF" if number > 0 else "-INF"
    return f"{number:.8g}"


_WHOLE = re.compile(r"\s*([+-]?\d+)", re.ASCII)
_REAL = re.compile(
    r"\s*([+-]?)(0x[\da-f]+(?:\.[\da-f]*)?(?:p[+-]?\d+)?|inf|nan|(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)", re.I | re.A
)


def _numbers(op: HostOp, texts: Array, kind: np.dtype[Any]) -> Array:
    """The number at the beginning of each text, as C reads it: hexadecimal, too, where it is a float."""
    if kind.kind == "O":
        return texts
    found = [(_real if is_float(kind) else _whole)(op, str(text), kind) for text in texts.reshape(-1)]
    return np.array(found, np.float64 if is_float(kind) else object).astype(kind).reshape(texts.shape)


def _whole(op: HostOp, text: str, kind: np.dtype[Any]) -> int:
    """As a number of 64 bits of which the type keeps the lowest."""
    match = _WHOLE.match(text)
    if match is None or not -(2**63) <= int(match[1]) < 2 ** (64 if kind == np.uint64 else 63):
        raise op.fail(f"{text[:40]!r} is no integer of 64 bits")
    if kind.kind == "b":
        return int(int(match[1]) != 0)
    size = int(8 * kind.itemsize)
    low: int = int(match[1]) % 2**size
    return low - 2**size if kind.kind == "i" and low >= 2 ** (size - 1) else low


def _real(op: HostOp, text: str, kind: np.dtype[Any]) -> float:
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
    """Read the same bits as another type. HostError where sizes differ."""
    kind = numpy_type(op.attrs["to"])
    if kind.itemsize != x.dtype.itemsize:
        raise op.fail(f"{x.dtype} and {kind} differ in size")
    return np.asarray(x, order="C").view(kind)


def _along(op: HostOp, values: Array, x: Array) -> Array:
    """`spread` over the elements of x. HostError."""
    try:
        return spread(values, x.shape, op.attr("axis", 1), op.attr("block_size", 0))
    except ValueError as error:
        raise op.fail(str(error)) from None


def spread(values: Array, shape: tuple[int, ...], axis: int, block: int) -> Array:
    """Broadcast the scales or zero points of a tensor of `shape` to it: one for all, one for each place along `axis`,
    or one for each block of `block` places along it. ValueError where they do not fit.
    """
    if why := spread_complaint(values.shape, shape, axis, block):
        raise ValueError(why)
    if block:
        return np.take(np.repeat(values, block, axis), np.arange(shape[axis]), axis)
    if values.size == 1:
        return values.reshape(())
    across = [1] * len(shape)
    across[axis] = -1
    return values.reshape(across)


def spread_complaint(parameters: Sequence[int], shape: Sequence[int | None], axis: int, block: int) -> str:
    """Why scales or zero points of shape `parameters` do not fit a tensor of `shape`, in a sentence; "" where they do.

    The rules are onnxruntime's. None in `shape` is an unknown size, which fits everything.
    """
    count = prod(parameters)
    if not block and len(parameters) <= 1 and count == 1:
        return ""
    few = "1 scale or zero point" if count == 1 else f"{count} scales or zero points"
    many = f"scales or zero points {[*parameters]}" if len(parameters) > 1 else few
    what = f"{many} along axis {axis} of shape {['?' if n is None else n for n in shape]}"
    if not -len(shape) <= axis < len(shape):
        return f"{what}; give an axis from {-len(shape)} to {len(shape) - 1}"
    if not block and len(parameters) != 1:
        return f"{what}; give block_size, one scale for all, or one for each place along the axis"
    place, size = axis % len(shape), shape[axis]
    if not block:
        return "" if size in (None, count) else f"{what}; give one for all, or {size}"
    blocks = [-(-n // block) if d == place and n is not None else n for d, n in enumerate(shape)]
    fits = len(parameters) == len(blocks) and all(n in (None, m) for n, m in zip(blocks, parameters))
    return "" if fits else f"{what} in blocks of {block}; give {blocks}"


def _bounds(kind: np.dtype[Any]) -> tuple[int, int]:
    if kind.kind in "iu":
        return int(np.iinfo(kind).min), int(np.iinfo(kind).max)
    import ml_dtypes

    return int(ml_dtypes.iinfo(kind).min), int(ml_dtypes.iinfo(kind).max)


def quantised_type(op: HostOp, zero: Array | None) -> np.dtype[Any]:
    """The element type of what a QuantizeLinear makes: that of its zero point, else `output_dtype`, else uint8."""
    return numpy_dtype(ONNX_TYPES.get(op.attr("output_dtype", 0), "uint8")) if zero is None else zero.dtype


@host("QuantizeLinear")
def quantize(op: HostOp, x: Array, scale: Array, zero: Array | None = None) -> Array:
    """By tensor, by channel or by block."""
    kind = quantised_type(op, zero)
    precision = numpy_type(op.attrs["precision"]) if op.attr("precision", 0) else np.dtype(np.float32)
    y = x.astype(precision) / _along(op, scale, x).astype(precision)
    if is_float(kind):
        return small_float(y.astype(np.float32), kind, bool(op.attr("saturate", 1)))
    low, high = _bounds(kind)
    start = np.float32(0) if zero is None else _along(op, zero, x).astype(np.float32)
    return np.clip(np.rint(y.astype(np.float32)) + start, low, high).astype(np.int32).astype(kind)


@host("DequantizeLinear")
def dequantize(op: HostOp, x: Array, scale: Array, zero: Array | None = None) -> Array:
    """By tensor, by channel or by block."""
    kind = numpy_type(op.attrs["output_dtype"]) if op.attr("output_dtype", 0) else scale.dtype
    if zero is not None and zero.dtype != x.dtype:
        raise op.fail(f"zero points of {zero.dtype} for integers of {x.dtype}; give both one type")
    y = x.astype(np.float32)
    start = None if zero is None else _along(op, zero, x).astype(np.float32)
    if start is not None and start.any():
        y = y - start
    return np.asarray(y * _along(op, scale, x).astype(np.float32)).astype(kind, copy=False)


@host("GatherBlockQuantized", domain="com.microsoft", operands="data indices scales zero_points?")
def gather_block_quantised(op: HostOp, x: Array, indices: Array, scales: Array, zeros: Array | None = None) -> Array:
    """Elements of x, in blocks with a scale and a zero point each; nothing, 0, where an index is outside.

    Bytes hold one number of 8 bits, or several smaller ones side by side in the last axis, the low bits first.
    """
    shapes = [list(each.shape) for each in (x, scales, *(() if zeros is None else (zeros,)))]
    bits, size = op.attr("bits", 4) if x.dtype == np.uint8 else 8, op.attr("block_size", 128)
    along, across = op.attr("gather_axis", 0), op.attr("quantize_axis", 1)
    if why := block_complaint(shapes, x.dtype.name, bits, size, along, across):
        raise op.fail(why)
    along, across = along % x.ndim, across % x.ndim
    chosen = np.where(indices < 0, indices + x.shape[along], indices).astype(np.int64)
    inside = (chosen >= 0) & (chosen < x.shape[along])
    chosen = np.where(inside, chosen, 0)
    blocks = chosen // size if along == across else chosen
    y = _numbers_of_bits(np.take(x, chosen, along), bits)
    axis = across if across < along else across + indices.ndim - 1

    def of_each(values: Array) -> Array:
        """What blocks have, for each of their elements."""
        values = np.take(values, blocks, along)
        if along == across:
            return values
        spread: Array = np.take(values, np.arange(y.shape[axis]) // size, axis)
        return spread

    level = y.astype(np.int32) - (1 << (bits - 1) if x.dtype == np.uint8 else 0)
    if zeros is not None:
        level = y.astype(np.int32) - of_each(_numbers_of_bits(zeros, bits)).astype(np.int32)
    real = level.astype(np.float32) * of_each(scales).astype(np.float32)
    seen = inside.reshape((1,) * along + inside.shape + (1,) * (x.ndim - along - 1))
    return np.where(seen, real, 0).astype(scales.dtype)


def block_complaint(
    shapes: Sequence[Sequence[int]], dtype: str, bits: int, size: int, along: int, across: int
) -> str:  # fmt: skip
    """What is wrong with a GatherBlockQuantized of numbers, scales and perhaps zero points of these shapes; "" where
    nothing. bits: of a number where bytes, `dtype` uint8, hold several; 8 for other types. along, across: its axes."""
    x, *others = map(list, shapes)
    rank, packed = len(x), dtype == "uint8"
    if dtype not in ("uint8", "int4", "uint4") or bits not in (2, 4, 8):
        what = f"{bits} bits" if packed else dtype
        return f"it gathers numbers of {what}; give uint8 that holds those of 2, 4 or 8 bits, int4 or uint4"
    if size < 16 or size & size - 1:
        return f"block_size is {size}; give a power of two from 16 on"
    if not (-rank <= along < rank and -rank <= across < rank):
        return f"gather_axis {along} or quantize_axis {across} is no axis of numbers {x}"
    if packed and across % rank != rank - 1:
        return f"quantize_axis is {across}; bytes that hold several numbers have their blocks along the last axis"
    blocks = [*x]
    blocks[across] = -(-x[across] * (8 // bits) // size)
    wanted = [blocks, [*blocks[:-1], -(-blocks[-1] // (8 // bits)) if packed else blocks[-1]]]
    for what, found, right in zip(("scales", "zero points"), others, wanted):
        if found != right:
            return f"{what} {found} for numbers {x} in blocks of {size} along axis {across}; give {right}"
    return ""


def _numbers_of_bits(x: Array, bits: int) -> Array:
    """The numbers that bytes hold along the last axis."""
    if bits == 8:
        return x
    parts = x[..., None] >> np.arange(0, 8, bits, dtype=np.uint8) & np.uint8((1 << bits) - 1)
    return parts.reshape(*x.shape[:-1], -1)
