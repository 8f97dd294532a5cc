"""Views of tiles: which element of the source each element of a view is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.language.tile import Tile, origin

VIEWS = ("reshape", "broadcast", "trans")


def before_reshapes(tile: Tile) -> Tile:
    """Return the tile before reshapes, with the same elements in order."""
    return origin(tile, "reshape")


def source_of_view(tile: Tile) -> Tile:
    """Return the tile that `tile` is a view of."""
    return origin(tile, *VIEWS)


def apply_view(elements: NDArray[np.int64], step: Tile) -> NDArray[np.int64]:
    """Apply one view to `elements`, numbers of source elements."""
    match step.op:
        case "trans":
            return elements.transpose(step.more["axes"])
        case "reshape":
            return elements.reshape(step.shape)
        case "broadcast":
            return np.broadcast_to(elements, step.shape)
    return elements


def element_order(tile: Tile, source: Tile) -> NDArray[np.int64]:
    """Return the numbers of the elements of `source` as the view `tile` has them."""
    steps = []
    while tile is not source:
        steps.append(tile)
        tile = tile.more["same"] if "same" in tile.more else tile.args[0]
    elements = np.arange(source.size).reshape(source.shape)
    for step in reversed(steps):
        elements = apply_view(elements, step)
    return elements


def is_in_order(tile: Tile, source: Tile) -> bool:
    """Return whether the view `tile` has each element of `source` once, in order."""
    return np.array_equal(element_order(tile, source).ravel(), np.arange(source.size))


def is_identity_order(elements: NDArray[np.int64]) -> bool:
    """Return whether `elements` are all numbers from 0 on, in order."""
    return np.array_equal(elements.ravel(), np.arange(elements.size))
