"""Strided views: regular selections of the pixels of an image, such as every second row and column."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StridedView:
    """Pixels of images of `rows` x `columns`: from (top, left) on, every `down`-th row and `across`-th column."""

    rows: int
    columns: int
    top: int = 0
    left: int = 0
    down: int = 1
    across: int = 1

    def cut(self, height: int, width: int) -> tuple[slice, slice]:
        """Return the slices of the image's rows and columns that are the view's first `height` x `width` pixels."""
        return (
            slice(self.top, self.top + (height - 1) * self.down + 1, self.down),
            slice(self.left, self.left + (width - 1) * self.across + 1, self.across),
        )

    def within(self, outer: StridedView) -> StridedView:
        """Compose two views: return the view that selects with `self` from the pixels that `outer` selects."""
        top, left = outer.top + self.top * outer.down, outer.left + self.left * outer.across
        return StridedView(outer.rows, outer.columns, top, left, self.down * outer.down, self.across * outer.across)

    def column_within(self, outer: StridedView, width: int) -> StridedView:
        """Compose with `outer` for a view that is one column of pixels.

        `self` selects from images of `width` columns whose pixels are numbered as one row; the result selects in the
        same way from the images of `outer`.
        """
        row, column = divmod(self.left, width)
        left = (outer.top + row * outer.down) * outer.columns + outer.left + column * outer.across
        return StridedView(1, outer.rows * outer.columns, 0, left, 1, self.across // width * outer.down * outer.columns)
