"""Rotary position embedding in plain operators: rotate pairs of elements of heads by angles of their positions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import numpy_helper

from celosia.compiler.graph.errors import ModelError
from celosia.driver.generate.writer import GraphWriter

Array = NDArray[Any]


class Rotary:
    """Writes the rotation of heads of `size` elements.

    owner: the operator that it replaces, for errors. tables: names of constant cosines and sines, [positions, half].
    is_interleaved: neighbouring elements are a pair; else an element and the one `half` behind it. positions: name of
    the new tokens' positions, [batch, steps]. ModelError where the tables do not fit such heads.
    """

    def __init__(
        self, writer: GraphWriter, owner: str, tables: list[str], size: int, is_interleaved: bool, positions: str
    ) -> None:  # fmt: skip
        self.writer, self.size, self.is_interleaved, self.positions = writer, size, is_interleaved, positions
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

    def rotate(self, x: str) -> str:
        """Write the rotation of x [batch, heads, steps, size]: x * cos + exchanged * sin. Return the result's name.

        `exchanged` is x with the two elements of each pair exchanged, and the first one negated. Elements that are not
        rotated have cos 1 and sin 0.
        """
        op, half, unrotated = self.writer.op, self.half, self.size - 2 * self.half
        cos, sin = self.cos, self.sin
        if self.is_interleaved:
            cos, sin = (np.stack(pair, -1).reshape(len(cos), -1) for pair in ((cos, cos), (-sin, sin)))
            order = np.arange(self.size)
            order[: 2 * half] ^= 1
            exchanged = op("Gather", x, self.writer.constant(order), axis=-1)
        else:
            cos, sin = np.hstack([cos, cos]), np.hstack([sin, sin])
            first, second, *end = self.writer.slice_last_axis(x, [half, half, *[unrotated] * (unrotated > 0)])
            exchanged = op("Concat", op("Neg", second), first, *end, axis=-1)
        cos, sin = (np.pad(table, ((0, 0), (0, unrotated)), constant_values=n) for table, n in ((cos, 1), (sin, 0)))
        return op(
            "Add", op("Mul", x, self._rows_of_new_tokens(cos)), op("Mul", exchanged, self._rows_of_new_tokens(sin))
        )

    def _rows_of_new_tokens(self, table: Array) -> str:
        """Gather the rows of `table` [positions, size] at the new tokens' positions, which follow the cached ones.

        Returns a tensor's name, [batch, 1, steps, size]. All layers share the nodes: `once` emits them for the first.
        """
        rows = self.writer.once("Gather", self.writer.constant(table, table.dtype), self.positions)
        return self.writer.once("Unsqueeze", rows, self.writer.ints(1))
