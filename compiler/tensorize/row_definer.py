"""The tensors of a layer that works row by row: the channels of a pixel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from celosia.compiler.expr import Expr, Tensor, compute, reduce_axis
from celosia.compiler.expr.nodes import minimum
from celosia.compiler.expr.norm_expressions import INT, sums
from celosia.compiler.layer import Norm, Softmax, TilingError
from celosia.compiler.tensorize import norm, pack
from celosia.compiler.tensorize import softmax as rows
from celosia.compiler.tensorize.definer import LayerLowering
from celosia.compiler.tensorize.definition import BlockStage, LayerComputation, Rows
from celosia.compiler.tensorize.intrinsics import Pass
from celosia.hw.spec.isa import Opcode, formats


def softmax_rows(definer: LayerLowering, layer: Softmax, near: Tensor) -> tuple[Tensor, Rows]:
    """Compute the softmax `layer` of rows `near` [images, rows, columns, channels] int8: results like these, and of
    each row the largest element int8 and the total float32."""
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

    found = Rows("softmax", count, {"total": whole, "largest": most}, powers)
    return compute(near.shape, made, f"out{definer.suffix}", axes=names), found


def norm_rows(definer: LayerLowering, layer: Norm, near: Tensor, par: Tensor) -> tuple[Tensor, Rows]:
    """Compute the norm `layer`: of each row the sum and that of its squares, int64. par: for all channels."""
    names = ("image", "row", "column", "channel")
    offset, epsilon = definer.scalar("offset", INT, layer.offset), definer.scalar("epsilon", INT, layer.epsilon)
    limits = tuple(definer.scalar(name, "float32", value) for name, value in
                   zip(("zero_point", "lo", "hi"), (layer.requantise.zero_point, *layer.epilogue.clip)))  # fmt: skip

    def element(*i: Expr) -> Expr:
        return norm.shifted(near[i], offset)

    used = norm.SUMS if layer.centre else norm.SUMS[1:]
    summed = dict(zip(norm.SUMS, sums(element, layer.count)))
    within = {name: compute(near.shape[:3], summed[name], name, axes=names[:3]) for name in used}
    total, squares = (lambda *i, name=name: within[name][i] for name in norm.SUMS)
    made = norm.results(
        element,
        lambda c: par[c],
        (total, squares),
        epsilon,
        layer.count,
        layer.centre,
        (limits[0], limits[1], limits[2]),
    )
    name = "layer_norm" if layer.centre else "rms_norm"
    return compute(near.shape, made, "out", axes=names), Rows(name, layer.count, within)


class RowDefiner(LayerLowering):
    """Makes the tensors of a softmax, or of a norm."""

    def softmax(self, layer: Softmax) -> LayerComputation:
        """Lower a softmax of channels. TilingError where the Config has none, or a row is too long for the
        scratchpads."""
        if not self.cfg.softmax:
            raise TilingError("a softmax needs a Config with softmax")
        near = self._near(layer)
        return self._of_rows(near, *softmax_rows(self, layer, near))

    def norm(self, layer: Norm) -> LayerComputation:
        """Lower a norm of channels. TilingError where the Config has none, or an instruction cannot hold it."""
        if not self.cfg.norm:
            raise TilingError("a normalisation needs a Config with norm")
        if layer.count == 1:
            raise TilingError("a row of one element is nothing but its offset")
        (holds,) = (field for field in formats(self.cfg)[Opcode.VECTOR].fields if field.name == "scale_c")
        if layer.epsilon >> (most := holds.width - 1):
            raise TilingError(f"its epsilon, for rows of {layer.count}, takes more than {most} bits")
        near, lanes = self._near(layer), self.blocks * self.cfg.block_out
        par = self.constant(pack.parameters(self.cfg, layer.requantise), (lanes,), "uint64", "par")
        return self._of_rows(near, *norm_rows(self, layer, near, par), par)

    def _near(self, layer: Softmax | Norm) -> Tensor:
        """x in vin, [images, rows, columns, channels]."""
        cfg = self.cfg
        lanes = self.blocks * cfg.block_out
        pixels = self.x.images, self.x.rows, self.x.columns
        x = self.given(self.x, "x", layer.x.storage_groups - layer.x.group_offset)
        last = x.shape[1] - 1

        def read(image: Expr, row: Expr, column: Expr, channel: Expr) -> Expr:
            group = channel // cfg.group
            if lanes > (last + 1) * cfg.group:
                group = minimum(group, last)
            return x[image, group, row, column, 0, channel % cfg.group]

        return compute((*pixels, lanes), read, "near", axes=("image", "row", "column", "channel"))

    def _of_rows(self, near: Tensor, out: Tensor, found: Rows, par: Tensor | None = None) -> LayerComputation:
        cfg, pixels = self.cfg, near.shape[:3]
        groups, p = self.layer.y.groups(cfg), cfg.group
        shape = (*pixels[:1], groups, *pixels[1:], cfg.batch, p)
        y = compute(shape, lambda i, n, r, c, b, g: out[i, r, c, n * p + g], "y",
                    axes=("image", "group", "row", "column", "b", "g"))  # fmt: skip
        _, self.places[y] = self.y.tensor(cfg, "y", groups)
        level = BlockStage(Pass("vin"), near, "vin", par=par)
        problem = replace(self.problem("vin", False), whole=True, norm=par is not None)
        return LayerComputation(problem, (level,), out, y, tuple(self.inputs), self.places, self.scalars, found)
