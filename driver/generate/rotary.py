"""Rotary positions in plain operators: pairs of elements of heads, rotated by the angles of their positions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import numpy_helper

from celosia.compiler.graph.errors import ModelError
from celosia.driver.generate.writer import GraphWriter

Array = NDArray[Any]


class Rotary:
    """Turns heads of `size` elements. owner: the operator that did, for errors. tables: names of cosines and sines
    [places, half], constants. pairs: neighbours are rotated, not halves. places: of new tokens [batch, steps].
    ModelError where tables are none for such heads."""

    def __init__(
        self, writer: GraphWriter, owner: str, tables: list[str], size: int, pairs: bool, places: str
    ) -> None:  # fmt: skip
        self.writer, self.size, self.pairs, self.places = writer, size, pairs, places
        for name in tables:
            if name not in writer.constants:
                raise ModelError(
                    f"{owner} turns by {name!r}, which is no constant; export the model with constant cosines and sines"
                )
        self.cos, self.sin = (numpy_helper.to_array(writer.constants[name]) for name in tables)
        if self.cos.shape != self.sin.shape or self.cos.ndim != 2 or 2 * self.cos.shape[1] > size:
            raise ModelError(
                f"{owner} turns heads of {size} elements by cosines {list(self.cos.shape)} and sines "
                f"{list(self.sin.shape)}; both must be [places, {size // 2}], or fewer columns"
            )
        self.half = self.cos.shape[1]

    def rotated(self, x: str) -> str:
        """Rotate pairs of elements of x [batch, heads, steps, size]: x * cos + others * sin.

        `others` is x with the two elements of each pair exchanged, and the first one negated. Elements that are not
        rotated have cos 1 and sin 0.
        """
        op, half, rest = self.writer.op, self.half, self.size - 2 * self.half
        cos, sin = self.cos, self.sin
        if self.pairs:
            cos, sin = (np.stack(pair, -1).reshape(len(cos), -1) for pair in ((cos, cos), (-sin, sin)))
            order = np.arange(self.size)
            order[: 2 * half] ^= 1
            rotated = op("Gather", x, self.writer.constant(order), axis=-1)
        else:
            cos, sin = np.hstack([cos, cos]), np.hstack([sin, sin])
            first, second, *end = self.writer.parts(x, [half, half, *[rest] * (rest > 0)])
            rotated = op("Concat", op("Neg", second), first, *end, axis=-1)
        cos, sin = (np.pad(table, ((0, 0), (0, rest)), constant_values=n) for table, n in ((cos, 1), (sin, 0)))
        return op("Add", op("Mul", x, self._rows_of_new_tokens(cos)), op("Mul", rotated, self._rows_of_new_tokens(sin)))

    def _rows_of_new_tokens(self, table: Array) -> str:
        """Gather the rows of `table` [positions, size] at the new tokens' positions, which follow the cached ones.

        Returns a tensor's name, [batch, 1, steps, size]. All layers share the nodes: `once` emits them for the first.
        """
        rows = self.writer.once("Gather", self.writer.constant(table, table.dtype), self.places)
        return self.writer.once("Unsqueeze", rows, self.writer.ints(1))
