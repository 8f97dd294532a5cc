"""Functions of the language for products (dot) and the operations behind them: requantise, lookup, residual_add."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.language.language_errors import fail
from celosia.compiler.language.tile import (
    Tile,
    TracedLoop,
    broadcast_all,
    current_run,
    make_tile,
    origin,
    scopes,
    upstream,
)
from celosia.compiler.numerics.requantiser import fold_scale
from celosia.compiler.numerics.softmax_and_norm import softmax_powers
from celosia.compiler.tensorize.pack import pack_parameters
from celosia.hw.spec.scratchpads import EXP_ENTRIES


def parameters(bias: Any, scale: Any) -> NDArray[np.uint64]:
    """Pack what `requantise` needs for each column, [columns]: bias (int32) and scale (float32, not negative)."""
    return pack_parameters(bias, *fold_scale(scale))


def powers(count: int, scale: float) -> NDArray[np.float32]:
    """Tabulate exp(scale · (index - 255)) for index 0 to 255, float32[256]: the powers of QLinearSoftmax.

    They are scaled so that the sum of `count` of them is a finite float32. scale: of the int8 input.
    """
    if not (count >= 1 and 0 < scale < np.inf):
        fail(f"cl.powers takes a positive count and a positive scale, and not {count!r} and {scale!r}")
    return np.asarray(softmax_powers(count, scale, 1.0)[: EXP_ENTRIES // 2])


def dot(a: Tile, b: Tile, acc: Tile | None = None, **hints: Any) -> Tile:
    """Multiply a [M, K] by b [K, N] and add acc [M, N].

    int8 is computed in int32, float16 in float32, other types in themselves. Zero points of `quantised` arrays are
    subtracted first.
    """
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        fail(f"cl.dot multiplies [M, K] by [K, N], not {list(a.shape)} by {list(b.shape)}; b.T turns a tile")
    if a.dtype != b.dtype:
        fail(f"cl.dot of {a} and {b}: cast one, so that both have one type")
    if a.dtype not in ("int8", "int32", "float16", "float32", "float64"):
        fail(f"cl.dot has no products of {a.dtype}; take int8, int32, float16, float32 or float64")
    dtype = {"int8": "int32", "float16": "float32"}.get(a.dtype, a.dtype)
    shape = (a.shape[0], b.shape[1])
    zeros = (zero_point_of(a), zero_point_of(b)) if a.dtype == "int8" else (0, 0)
    if acc is None:
        return make_tile("dot", (a, b), shape, dtype, zeros=zeros)
    if acc.shape != shape or acc.dtype != dtype:
        fail(f"cl.dot of {a} and {b} is {dtype}{list(shape)}, and it is to be added to {acc}")
    return make_tile("dot", (a, b, acc), shape, dtype, zeros=zeros)


def zero_point_of(side: Tile) -> int:
    """Return the zero point of the array of which `side`, an operand of `dot`, is a block; 0 for a computed operand.

    Raises LanguageError for an operand that is computed from an array with a zero point, as its own is not known.
    """
    tile = origin(side, "reshape", "broadcast", "trans")
    while tile.op == "phi":
        tile = origin(tile.more["first"], "reshape", "broadcast", "trans")
    if tile.op == "load":
        return int(tile.more["array"].zero_point)
    for source in upstream([tile], _int8_sources):
        if source.op == "load" and (zero := source.more["array"].zero_point):
            name = source.more["array"].name
            fail(
                f"this side of cl.dot is computed of {name}, whose zero point is {zero}, and that of the result is not "
                f"known; subtract it where {name} is loaded: x.to(cl.int32) - {name}.zero_point"
            )
    return 0


def _int8_sources(tile: Tile) -> Iterator[Tile]:
    """Yield the int8 tiles from which `tile` is computed, through the variables of loops, too, to find the arrays
    whose zero points the result may have.
    """
    sources = tile.args
    if tile.op == "phi":
        sources = (tile.more["first"],)
    elif tile.op == "result":
        loops = (scope for scope in scopes(current_run().top) if isinstance(scope, TracedLoop))
        sources = next((first, last) for loop in loops for first, _, last, after in loop.carried if after is tile)
    return (source for source in sources if source.dtype == "int8")


def requantise(acc: Tile, parameters: Tile, zero_point: int = 0, clip: tuple[int, int] = (-128, 127)) -> Tile:
    """Convert int32 to int8: clip(round((acc + bias) * scale) + zero_point), with a float32 product, ties to even.

    parameters: uint64, bias, multiplier and shift of each column, as `parameters` packs them.
    """
    if acc.dtype != "int32":
        fail(f"cl.requantise takes int32, and this is {acc}")
    if parameters.dtype != "uint64":
        fail(f"the parameters of cl.requantise are uint64, as cl.parameters packs them, and these are {parameters}")
    low, high = _byte_range(clip)
    if not isinstance(zero_point, int) or not -128 <= zero_point <= 127:
        fail(f"a zero point of int8 is between -128 and 127, and not {zero_point!r}")
    acc, parameters = broadcast_all("cl.requantise", acc, parameters)
    return make_tile("requantise", (acc, parameters), acc.shape, "int8", zero_point=zero_point, clip=(low, high))


def _byte_range(clip: tuple[int, int]) -> tuple[int, int]:
    """Return `clip`, the limits of a result; LanguageError where it is no range of int8."""
    low, high = clip
    if not -128 <= low <= high <= 127:
        fail(f"a range of int8 is between -128 and 127, and not {clip}")
    return low, high


def lookup(x: Tile, table: Tile) -> Tile:
    """Look up table[x + 128] of int8 x in a table [256] of int8."""
    if x.dtype != "int8":
        fail(f"cl.lookup takes int8, and this is {x}")
    if table.shape != (256,) or table.dtype != "int8":
        fail(f"a table of cl.lookup is int8[256], and this is {table}")
    return make_tile("lookup", (x, table), x.shape, "int8")


def residual_add(
    v: Tile, b: Tile, scale_v: int, scale_b: int, scale_c: int, shift: int, clip: tuple[int, int] = (-128, 127)
) -> Tile:
    """Add two int8: clip(round((v * scale_v + b * scale_b + scale_c) / 2^shift)), ties to even."""
    if v.dtype != "int8" or b.dtype != "int8":
        fail(f"cl.residual_add takes two int8, and these are {v} and {b}")
    v, b = broadcast_all("cl.residual_add", v, b)
    for name, number, bits in (("scale_v", scale_v, 32), ("scale_b", scale_b, 32), ("scale_c", scale_c, 48)):
        if not isinstance(number, int) or not -(1 << bits - 1) <= number < 1 << bits - 1:
            fail(f"{name} of cl.residual_add is an integer of {bits} bits, and not {number!r}")
    if not isinstance(shift, int) or not 0 <= shift < 48:
        fail(f"the shift of cl.residual_add is between 0 and 47, and not {shift!r}")
    more = {"scale_v": scale_v, "scale_b": scale_b, "scale_c": scale_c, "shift": shift, "clip": _byte_range(clip)}
    return make_tile("residual", (v, b), v.shape, "int8", **more)
