"""Interpreter: the meaning of each operation in numpy, with which every target must agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler import numerics
from celosia.compiler.expr.interpret import BINARY, cast
from celosia.compiler.expr.math_functions import INTRINSICS
from celosia.compiler.language.tile import ArrayArgument, KernelRun, Tile, TracedStore, fail
from celosia.compiler.tensorize.pack import unpack_parameters

Values = NDArray[Any]
"""Elements of a tile."""
ERF: Callable[[Values], Values] = np.vectorize(math.erf, otypes=[np.float64])
"""The error function, which numpy lacks."""


def value_of(tile: Tile, run: KernelRun) -> Values:
    """Compute the value of a tile whose arguments have values. `make_tile` calls it while a kernel is interpreted."""
    args = [arg.value for arg in tile.args]
    with np.errstate(all="ignore"):
        result = _evaluate(tile, args, run)
    return np.asarray(result).astype(tile.dtype, copy=False)


CONSTANT_OPERATIONS = ("const", "arange", "binary", "where", "cast", "reshape", "broadcast", "trans")
"""Operations whose result depends on their arguments alone, not on the program or on arrays."""


def constant_value(tile: Tile) -> Values | None:
    """Return the value of a tile that is computed from constants alone; None where it depends on programs or data."""
    if "same" in tile.attributes:
        return constant_value(tile.attributes["same"])
    args = [constant_value(arg) for arg in tile.args] if tile.op in CONSTANT_OPERATIONS else [None]
    known = [arg for arg in args if arg is not None]
    return None if len(known) < len(args) else np.asarray(_evaluate(tile, known, None)).astype(tile.dtype, copy=False)


def _evaluate(tile: Tile, args: list[Values], run: KernelRun | None) -> Any:
    """Compute the operation of `tile` on the values of its arguments.

    run: the interpreted run, for the program's numbers; None where the tile is known to be constant.
    """
    attributes = tile.attributes
    match tile.op:
        case "const":
            return np.asarray(attributes["number"])
        case "program_id":
            assert run is not None and run.ids is not None
            return np.asarray(run.ids[attributes["axis"]])
        case "index":
            return np.asarray(attributes["number"])
        case "arange":
            return np.arange(attributes["start"], attributes["start"] + tile.shape[0])
        case "unary" if attributes["name"] == "erf":
            return ERF(args[0])
        case "unary":
            return INTRINSICS[attributes["name"]](args[0])
        case "binary":
            return BINARY[attributes["name"]](*args)
        case "where":
            return np.where(*args)
        case "cast":
            return cast(args[0], tile.args[0].dtype, tile.dtype)
        case "reduce" if attributes["name"] == "ordered_sum":
            return np.take(
                np.add.accumulate(args[0].astype(tile.dtype), axis=attributes["axis"]), -1, attributes["axis"]
            )
        case "reduce":
            return getattr(np, attributes["name"])(args[0].astype(tile.dtype), axis=attributes["axis"])
        case "dot":
            a, b = (arg.astype(tile.dtype) - np.array(zero, tile.dtype) for arg, zero in zip(args, attributes["zeros"]))
            product = a @ b
            return product if len(args) == 2 else product + args[2]
        case "reshape":
            return args[0].reshape(tile.shape)
        case "broadcast":
            return np.broadcast_to(args[0], tile.shape)
        case "trans":
            return args[0].transpose(attributes["axes"])
        case "load":
            return load(tile, attributes["array"], *args)
        case "requantise":
            words = np.broadcast_to(args[1], args[0].shape)
            return numerics.requantize(
                args[0], *unpack_parameters(words), attributes["zero_point"], *attributes["clip"]
            )
        case "lookup":
            return args[1][args[0].astype(np.int64) + 128]
        case "residual":
            scales = (attributes[name] for name in ("scale_v", "scale_b", "scale_c", "shift"))
            return numerics.rescale_add(args[0], args[1], numerics.RescaleAdd(*scales, *attributes["clip"]))
    raise TypeError(f"the interpreter knows no {tile.op}")


# Memory -----------------------------------------------------------------------------------------------------------


def load(
    tile: Tile, array: ArrayArgument, offsets: Values, mask: Values | None = None, other: Values | None = None
) -> Values:
    """Load elements of `array` at `offsets`, `other` (else 0) where `mask` is false.

    Raises LanguageError out of bounds.
    """
    elements = _check_offsets(array, offsets, mask, tile.at, "reads")
    assert array.data is not None
    values = array.data.reshape(-1)[elements] if array.size else np.zeros(offsets.shape, tile.dtype)
    return values if mask is None or other is None else np.where(mask, values, other)


def store(traced: TracedStore) -> None:
    """Write the values of a store where its mask holds. Raises LanguageError out of bounds."""
    offsets, value = traced.offsets.value, traced.value.value
    mask = None if traced.mask is None else traced.mask.value
    elements = _check_offsets(traced.array, offsets, mask, traced.at, "writes")
    assert traced.array.data is not None
    flat = traced.array.data.reshape(-1)
    if mask is None:
        flat[elements] = value
    else:
        flat[elements[mask]] = value[mask]


def _check_offsets(array: ArrayArgument, offsets: Values, mask: Values | None, at: str, verb: str) -> Values:
    """Return the offsets with 0 where the mask does not hold, so that numpy may read all of them. Raises LanguageError
    where the mask holds and the offset is out of bounds.
    """
    safe_offsets = offsets if mask is None else np.where(mask, offsets, 0)
    used = offsets if mask is None else offsets[mask]
    if used.size and (used.min() < 0 or used.max() >= array.size):
        element = int(used.min() if used.min() < 0 else used.max())
        fail(f"{array.name} has {array.size} elements, and this {verb} number {element}; give it a mask", at)
    return safe_offsets
