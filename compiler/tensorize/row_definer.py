"""The tensors of a layer that works row by row: the channels of a pixel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from celosia.compiler.expr import Expr, Tensor, compute, reduce_axis
from celosia.compiler.expr.nodes import minimum
from celosia.compiler.layer import Softmax, Untileable
from celosia.compiler.tensorize import softmax as rows
from celosia.compiler.tensorize.definer import Definer
from celosia.compiler.tensorize.definition import Definition, Level, Rows
from celosia.compiler.tensorize.intrinsics import Pass


def row_tensors(definer: Definer, layer: Softmax, near: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the softmax `layer` of rows `near` [images, rows, columns, channels] int8: results like these, the largest
    element int8 and the total float32 of each row, and the powers in DRAM."""
    pixels = near.shape[:3]
    names, count = ("image", "row", "column", "channel"), layer.count
    powers = definer.constant(layer.powers.view(np.uint8), (1, len(layer.powers)), "float32", "powers")
    k, j = reduce_axis(count, "k"), reduce_axis(count, "j")
    most = compute(pixels, lambda *i: rows.largest(lambda c: near[(*i, c)], k), "largest", axes=names[:3])
    whole = compute(pixels, lambda *i: rows.total(lambda c: near[(*i, c)], powers, most[i], j), "total", axes=names[:3])
    limits = [definer.scalar(name, "float32", value) for name, value in
              zip(("zero_point", "lo", "hi"), (layer.zero_point, *layer.epilogue.clip))]  # fmt: skip

    def made(i: Expr, y: Expr, x: Expr, c: Expr) -> Expr:
        element = lambda k: near[i, y, x, k]  # noqa: E731
        return rows.share(element, powers, most[i, y, x], whole[i, y, x], c, count, *limits)

    return compute(near.shape, made, f"out{definer.suffix}", axes=names), most, whole, powers


class RowDefiner(Definer):
    """Makes the tensors of a softmax."""

    def softmax(self, layer: Softmax) -> Definition:
        """Of a softmax of channels. Untileable where the Config has none, or a row is too long for the scratchpads."""
        cfg, count = self.cfg, layer.x.channels
        if not cfg.softmax:
            raise Untileable("a softmax needs a Config with softmax")
        lanes = self.blocks * cfg.block_out
        pixels = self.x.images, self.x.rows, self.x.columns
        x = self.given(self.x, "x", layer.x.storage_groups - layer.x.group_offset)
        last = x.shape[1] - 1

        def read(image: Expr, row: Expr, column: Expr, channel: Expr) -> Expr:
            group = channel // cfg.group
            if lanes > (last + 1) * cfg.group:
                group = minimum(group, last)
            return x[image, group, row, column, 0, channel % cfg.group]

        names = ("image", "row", "column", "channel")
        near = compute((*pixels, lanes), read, "near", axes=names)
        out, most, whole, powers = row_tensors(self, layer, near)
        groups, p = layer.y.groups(cfg), cfg.group
        shape = (*pixels[:1], groups, *pixels[1:], cfg.batch, p)
        y = compute(shape, lambda i, n, r, c, b, g: out[i, r, c, n * p + g], "y",
                    axes=("image", "group", "row", "column", "b", "g"))  # fmt: skip
        _, self.places[y] = self.y.tensor(cfg, "y", groups)
        level, found = Level(Pass("vin"), near, "vin"), Rows(count, most, whole, powers)
        problem = replace(self.problem("vin", False), whole=True)
        return Definition(problem, (level,), out, y, tuple(self.inputs), self.places, self.scalars, found)
