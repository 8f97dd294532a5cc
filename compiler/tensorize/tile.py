"""Tiles of a layer: the box of output that each makes, and the thread that makes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from celosia.compiler.tensorize.layer import Untileable, Window
from celosia.compiler.tensorize.tiling import PAD_MAX
from celosia.compiler.tensorize.transfer import Grid
from celosia.compiler.vthread.stream import Load


def spans(size: int, step: int) -> Iterator[tuple[int, int]]:
    """(first, count) of consecutive parts of `step`."""
    for first in range(0, size, step):
        yield first, min(step, size - first)


@dataclass(frozen=True)
class Box:
    """A tile of output: blocks from n, rows from y, columns from x, of one image; each (first, count)."""

    image: int
    n: tuple[int, int]
    y: tuple[int, int]
    x: tuple[int, int]

    @property
    def pixels(self) -> int:
        return self.y[1] * self.x[1]

    @property
    def entries(self) -> int:
        return self.n[1] * self.pixels


class Tile(NamedTuple):
    """One iteration of a layer's tile loops: a virtual thread, see `Stream`.

    Rows count through all images of an activation: `needs` rows of the layer's x must be there before, `done` rows of
    its y are there afterwards.
    """

    needs: int
    done: int
    load: Load


def clip_window(
    w: Window, box: Box, grid: Grid, rows: int, columns: int, row_step: int = 1
) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """What of the input under `box` exists: (first row, rows, first column, columns), and the pads around it."""
    top = box.y[0] * w.strides[0] - w.pads[0]
    left = box.x[0] * w.strides[1] - w.pads[1]
    if row_step > 1:  # a kernel of one row: every row read is inside, or padding is not expressible
        first, last = top, top + (rows - 1) * row_step
        if first < 0 or last >= grid.rows:
            raise Untileable("padding above or below a strided kernel of one row")
        pad_top, pad_bottom, held_rows = 0, 0, rows
    else:
        pad_top = max(0, -top)
        pad_bottom = max(0, top + rows - grid.rows)
        first, held_rows = max(0, top), rows - pad_top - pad_bottom
    pad_left = max(0, -left)
    pad_right = max(0, left + columns - grid.columns)
    held_columns = columns - pad_left - pad_right
    if held_rows < 1 or held_columns < 1:
        raise Untileable("a tile that lies in the padding alone")
    if max(pad_top, pad_left, pad_bottom, pad_right) > PAD_MAX:
        raise Untileable(f"more than {PAD_MAX} rows or columns of padding")
    return (first, held_rows, max(0, left), held_columns), (pad_top, pad_left, pad_bottom, pad_right)


def fit_strides(fields: dict[str, int]) -> dict[str, int]:
    """Strides of loops that run once do not matter; 0 always fits their field."""
    for name in list(fields):
        loop = name.rpartition("_")[2]
        if not name.startswith("extent") and fields.get(f"extent_{loop}") == 1 and loop in "nyxkrs":
            fields[name] = 0
    return fields
