"""What each operation means, in numpy: the interpreter, to which every target is held."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler import numerics
from celosia.compiler.expr.interpret import BINARY
from celosia.compiler.expr.nodes import INTRINSICS
from celosia.compiler.language.tile import Array, Program, Store, Tile, fail

Values = NDArray[Any]

REDUCE: dict[str, Any] = {"sum": np.sum, "max": np.max, "min": np.min}


def value_of(tile: Tile, program: Program) -> Values:
    """The value of a tile whose arguments have theirs."""
    args = [arg.value for arg in tile.args]
    with np.errstate(all="ignore"):
        found = _value(tile, args, program)
    return np.asarray(found).astype(tile.dtype, copy=False)


def _value(tile: Tile, args: list[Values], program: Program) -> Any:
    more = tile.more
    match tile.op:
        case "const":
            return np.asarray(more["number"])
        case "program_id":
            assert program.ids is not None
            return np.asarray(program.ids[more["axis"]])
        case "index":
            return np.asarray(more["number"])
        case "full":
            return np.full(tile.shape, args[0])
        case "arange":
            return np.arange(more["start"], more["start"] + tile.shape[0])
        case "unary":
            return INTRINSICS[more["name"]](args[0])
        case "binary":
            return binary(more["name"], *args)
        case "where":
            return np.where(*args)
        case "cast":
            return cast(args[0], tile.dtype)
        case "reduce":
            return REDUCE[more["name"]](args[0].astype(tile.dtype), axis=more["axis"])
        case "dot":
            product = args[0].astype(tile.dtype) @ args[1].astype(tile.dtype)
            return product if len(args) == 2 else product + args[2]
        case "reshape":
            return args[0].reshape(tile.shape)
        case "broadcast":
            return np.broadcast_to(args[0], tile.shape)
        case "trans":
            return args[0].transpose(more["axes"])
        case "load":
            return load(tile, more["array"], *args)
        case "requantise":
            words = np.broadcast_to(args[1], args[0].shape)
            return numerics.requantize(args[0], *parameters(words), more["zero_point"], *more["clip"])
        case "lookup":
            return args[1][args[0].astype(np.int64) + 128]
        case "residual":
            how = numerics.RescaleAdd(more["scale_v"], more["scale_b"], more["scale_c"], more["shift"])
            return numerics.rescale_add(args[0], args[1], how, *more["clip"])
    raise TypeError(f"the interpreter knows no {tile.op}")


def binary(name: str, a: Values, b: Values) -> Values:
    if name in ("shl", "shr"):  # by the width or more gives 0, or the sign
        width = a.dtype.itemsize * 8
        inside = (b >= 0) & (b < width)
        by = np.where(inside, b, 0).astype(a.dtype)
        moved = np.left_shift(a, by) if name == "shl" else np.right_shift(a, by)
        beyond = np.where(a < 0, -1, 0).astype(a.dtype) if name == "shr" else np.zeros_like(a)
        return np.where(inside, moved, beyond).astype(a.dtype)
    return np.asarray(BINARY[name](a, b))


def cast(value: Values, dtype: str) -> Values:
    """Floats to integers: towards zero, to the nearest that there is, NaN to 0."""
    if value.dtype.kind != "f" or dtype[0] not in "iu":
        return value.astype(dtype)
    limits = np.iinfo(dtype)
    whole = np.trunc(np.nan_to_num(value.astype(np.float64), posinf=np.inf, neginf=-np.inf))
    inside = np.clip(whole, float(limits.min), float(limits.max))
    over, under = whole >= float(limits.max), whole <= float(limits.min)
    safe = np.where(over | under, 0, inside).astype(dtype)
    highest, lowest = (np.dtype(dtype).type(limit) for limit in (limits.max, limits.min))
    return np.asarray(np.where(over, highest, np.where(under, lowest, safe)))


def parameters(word: Values) -> tuple[Values, Values, Values]:
    """Bias, multiplier and shift of words of `par`."""
    bias = (word & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)
    multiplier = (word >> np.uint64(32) & np.uint64(0xFFFFFF)).astype(np.int64)
    return bias, multiplier, (word >> np.uint64(56) & np.uint64(63)).astype(np.int64)


# Memory -----------------------------------------------------------------------------------------------------------


def load(tile: Tile, array: Array, offsets: Values, mask: Values | None = None, other: Values | None = None) -> Values:
    places = _places(array, offsets, mask, tile.at, "reads")
    assert array.data is not None
    values = array.data.reshape(-1)[places] if array.size else np.zeros(offsets.shape, tile.dtype)
    return values if mask is None or other is None else np.where(mask, values, other)


def store(each: Store) -> None:
    offsets, value = each.offsets.value, each.value.value
    mask = None if each.mask is None else each.mask.value
    places = _places(each.array, offsets, mask, each.at, "writes")
    assert each.array.data is not None
    flat = each.array.data.reshape(-1)
    if mask is None:
        flat[places] = value
    else:
        flat[places[mask]] = value[mask]


def _places(array: Array, offsets: Values, mask: Values | None, at: str, verb: str) -> Values:
    """Offsets that exist; 0 where the mask does not hold."""
    wanted = offsets if mask is None else np.where(mask, offsets, 0)
    used = offsets if mask is None else offsets[mask]
    if used.size and (used.min() < 0 or used.max() >= array.size):
        place = int(used.min() if used.min() < 0 else used.max())
        fail(f"{array.name} has {array.size} elements, and this {verb} number {place}; give it a mask", at)
    return wanted
