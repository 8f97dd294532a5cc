"""Values of scalars for all programs and all iterations of the loops around them, computed in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.expr.interpret import BINARY
from celosia.compiler.language.tile import KernelRun, Scope, Tile, TracedLoop

MAX_COMBINATIONS = 1 << 22
"""Limit of the combinations of programs and iterations that are computed."""


class UnknownScalar(ValueError):
    """A scalar that depends on data, or on too many combinations."""


def scalar_range(run: KernelRun, tile: Tile) -> tuple[int, int]:
    """Return the least and the greatest value of a scalar. Raises UnknownScalar."""
    all_values = scalar_values(run, tile)
    return int(all_values.min()), int(all_values.max())


def scalar_values(run: KernelRun, tile: Tile) -> NDArray[Any]:
    """Return the values of a scalar in all programs and iterations.

    The result has an axis for each of the three grid axes, and one for each loop around, the outermost first. An axis
    has size 1 where the scalar does not depend on it. Raises UnknownScalar.
    """
    more = tile.more
    match tile.op:
        case "const":
            return np.full((1, 1, 1), more["number"], tile.dtype)
        case "program_id":
            return _numbers_along(run.grid[more["axis"]], more["axis"])
        case "index":
            return _numbers_along(more["loop"].steps, 3 + _loop_depth(more["loop"]))
        case "phi" if "same" in more:
            return scalar_values(run, more["same"])
        case "phi" if "first" in more:
            more["fixed"] = True  # traced_loops.range refuses a loop that changes it after all
            return scalar_values(run, more["first"])
        case "cast" | "broadcast" | "reshape" if not tile.shape:
            return scalar_values(run, tile.args[0]).astype(tile.dtype)
        case "binary" | "where" if not tile.shape:
            args = [scalar_values(run, arg) for arg in tile.args]
            rank = max(arg.ndim for arg in args)
            args = [arg.reshape(*arg.shape, *(1,) * (rank - arg.ndim)) for arg in args]
            if np.prod(np.broadcast_shapes(*(arg.shape for arg in args))) > MAX_COMBINATIONS:
                raise UnknownScalar(tile.at)
            with np.errstate(all="ignore"):
                return BINARY[more["name"]](*args) if tile.op == "binary" else np.where(*args)
    raise UnknownScalar(tile.at)


def _numbers_along(size: int, axis: int) -> NDArray[Any]:
    """Return 0, 1, ..., size - 1 along `axis` of an array with at least three axes, whose others have size 1."""
    return np.arange(size).reshape((1,) * axis + (size,) + (1,) * max(0, 2 - axis))


def _loop_depth(loop: Scope) -> int:
    """Count the loops around `loop`."""
    depth, scope = 0, loop.parent
    while isinstance(scope, TracedLoop):
        depth, scope = depth + 1, scope.parent
    return depth
