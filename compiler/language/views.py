"""Tiles as views of others: which element each of theirs is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.language.tile import Tile, origin

VIEWS = ("reshape", "broadcast", "trans")


def regrouped(tile: Tile) -> Tile:
    """What `tile` is with the same elements in the same order."""
    return origin(tile, "reshape")


def viewed(tile: Tile) -> Tile:
    """What `tile` is a view of."""
    return origin(tile, *VIEWS)


def seen(found: NDArray[np.int64], step: Tile) -> NDArray[np.int64]:
    """`found`, elements by their numbers, as the view `step` has them."""
    match step.op:
        case "trans":
            return found.transpose(step.more["axes"])
        case "reshape":
            return found.reshape(step.shape)
        case "broadcast":
            return np.broadcast_to(found, step.shape)
    return found


def order(tile: Tile, source: Tile) -> NDArray[np.int64]:
    """The elements of `source`, by number, as the view `tile` of it has them."""
    steps = []
    while tile is not source:
        steps.append(tile)
        tile = tile.more["same"] if "same" in tile.more else tile.args[0]
    found = np.arange(source.size).reshape(source.shape)
    for step in reversed(steps):
        found = seen(found, step)
    return found


def in_order(tile: Tile, source: Tile) -> bool:
    """Whether the view `tile` has the elements of `source`, each once, in their order."""
    return np.array_equal(order(tile, source).ravel(), np.arange(source.size))


def is_counted(where: NDArray[np.int64]) -> bool:
    """Whether these are all elements, by number, in their order."""
    return np.array_equal(where.ravel(), np.arange(where.size))
