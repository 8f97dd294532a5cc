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


def span(program: KernelRun, tile: Tile) -> tuple[int, int]:
    """Return the least and the greatest value of a scalar. Raises UnknownScalar."""
    all_values = values(program, tile)
    return int(all_values.min()), int(all_values.max())


def values(program: KernelRun, tile: Tile) -> NDArray[Any]:
    """Return all values: an axis for each of three grid axes, and one for each loop around, the outermost first.

    An axis has size 1 where nothing depends on it. Raises UnknownScalar.
    """
    more = tile.more
    match tile.op:
        case "const":
            return np.full((1, 1, 1), more["number"], tile.dtype)
        case "program_id":
            return _along(program.grid[more["axis"]], more["axis"])
        case "index":
            return _along(more["loop"].steps, 3 + _depth(more["loop"]))
        case "phi" if "same" in more:
            return values(program, more["same"])
        case "phi" if "first" in more:
            more["fixed"] = True  # until the end of the loop shows it, see loops.range
            return values(program, more["first"])
        case "cast" | "broadcast" | "reshape" if not tile.shape:
            return values(program, tile.args[0]).astype(tile.dtype)
        case "binary" | "where" if not tile.shape:
            args = [values(program, arg) for arg in tile.args]
            rank = max(arg.ndim for arg in args)
            args = [arg.reshape(*arg.shape, *(1,) * (rank - arg.ndim)) for arg in args]
            if np.prod(np.broadcast_shapes(*(arg.shape for arg in args))) > MAX_COMBINATIONS:
                raise UnknownScalar(tile.at)
            with np.errstate(all="ignore"):
                return BINARY[more["name"]](*args) if tile.op == "binary" else np.where(*args)
    raise UnknownScalar(tile.at)


def _along(size: int, axis: int) -> NDArray[Any]:
    return np.arange(size).reshape((1,) * axis + (size,) + (1,) * max(0, 2 - axis))


def _depth(loop: Scope) -> int:
    """Count the loops around `loop`."""
    depth, scope = 0, loop.parent
    while isinstance(scope, TracedLoop):
        depth, scope = depth + 1, scope.parent
    return depth
