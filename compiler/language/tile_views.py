"""Views of tiles: which element of the source each element of a view is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.language.tile import Tile, origin

VIEWS = ("reshape", "broadcast", "trans")
"""Operations that only arrange or repeat elements."""


def before_reshapes(tile: Tile) -> Tile:
    """Return the tile of which `tile` is a reshape, or a reshape of a reshape; it has the same elements in order."""
    return origin(tile, "reshape")


def source_of_view(tile: Tile) -> Tile:
    """Return the tile that `tile` is a view of."""
    return origin(tile, *VIEWS)


def apply_view(elements: NDArray[np.int64], view: Tile) -> NDArray[np.int64]:
    """Arrange `elements` as the operation of `view` arranges the elements of its argument.

    Applied to element numbers, it says which element of the source each element of the view is.
    """
    match view.op:
        case "trans":
            return elements.transpose(view.more["axes"])
        case "reshape":
            return elements.reshape(view.shape)
        case "broadcast":
            return np.broadcast_to(elements, view.shape)
    return elements


def element_order(tile: Tile, source: Tile) -> NDArray[np.int64]:
    """Return which element of `source` each element of its view `tile` is: numbers in the shape of `tile`."""
    views = []
    while tile is not source:
        views.append(tile)
        tile = tile.more["same"] if "same" in tile.more else tile.args[0]
    elements = np.arange(source.size).reshape(source.shape)
    for view in reversed(views):
        elements = apply_view(elements, view)
    return elements


def is_in_order(tile: Tile, source: Tile) -> bool:
    """Return whether the view `tile` has each element of `source` once, in order."""
    return np.array_equal(element_order(tile, source).ravel(), np.arange(source.size))


def is_identity_order(elements: NDArray[np.int64]) -> bool:
    """Return whether `elements` are all numbers from 0 on, in order."""
    return np.array_equal(elements.ravel(), np.arange(elements.size))
