"""Lower softmax and normalisations, which work on rows. A row is the channels of a pixel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from celosia.compiler.expr import Expr, Tensor, compute, reduce_axis
from celosia.compiler.expr.nodes import minimum
from celosia.compiler.expr.norm_expressions import INT, sums
from celosia.compiler.layer import Norm, TilingError
from celosia.compiler.tensorize import norm, pack
from celosia.compiler.tensorize import softmax as rows
from celosia.compiler.tensorize.computation import BlockStage, LayerComputation, Rows
from celosia.compiler.tensorize.intrinsics import VectorOp
from celosia.compiler.tensorize.layer_lowering import LayerLowering
from celosia.hw.spec.isa import Opcode, formats


def softmax_rows(lowering: LayerLowering, on_chip: Tensor) -> tuple[Tensor, Rows]:
    """Compute the softmax of the layer over rows `on_chip`, [images, rows, columns, channels] int8.

    Returns results of the same shape, and the operation with the largest element, int8, and the total, float32, of each
    row.
    """
    softmax, pixels = lowering.layer.softmax, on_chip.shape[:3]
    assert softmax is not None
    names, count = ("image", "row", "column", "channel"), lowering.layer.row_length
    powers = lowering.add_constant(softmax.powers.view(np.uint8), (1, len(softmax.powers)), "float32", "powers")
    k, j = reduce_axis(count, "k"), reduce_axis(count, "j")
    largest = compute(pixels, lambda *i: rows.largest(lambda c: on_chip[(*i, c)], k), "largest", axes=names[:3])
    total = compute(
        pixels, lambda *i: rows.total(lambda c: on_chip[(*i, c)], powers, largest[i], j), "total", axes=names[:3]
    )
    limits = [lowering.add_scalar(name, "float32", value) for name, value in
              zip(("zero_point", "lo", "hi"), (softmax.zero_point, *lowering.layer.epilogue.clip))]  # fmt: skip

    def share(i: Expr, y: Expr, x: Expr, c: Expr) -> Expr:
        element = lambda k: on_chip[i, y, x, k]  # noqa: E731
        return rows.share(element, powers, largest[i, y, x], total[i, y, x], c, count, *limits)

    operation = Rows("softmax", count, {"total": total, "largest": largest}, powers)
    return compute(on_chip.shape, share, f"out{lowering.suffix}", axes=names), operation


def norm_rows(lowering: LayerLowering, on_chip: Tensor, par: Tensor) -> tuple[Tensor, Rows]:
    """Compute the norm of the layer over rows `on_chip`, [images, rows, columns, channels] int8.

    par: parameters of all channels, as entries of scratchpad par.

    Returns results of the same shape, and the operation with the sum of each row, and that of its squares, int64.
    """
    layer, names = lowering.layer, ("image", "row", "column", "channel")
    assert layer.norm is not None and layer.requantise is not None
    count, centre = layer.row_length, layer.norm.centre
    offset = lowering.add_scalar("offset", INT, layer.norm.offset)
    epsilon = lowering.add_scalar("epsilon", INT, layer.norm.epsilon)
    limits = tuple(lowering.add_scalar(name, "float32", value) for name, value in
                   zip(("zero_point", "lo", "hi"), (layer.requantise.zero_point, *layer.epilogue.clip)))  # fmt: skip

    def element(*i: Expr) -> Expr:
        return norm.shifted(on_chip[i], offset)

    used_sums = norm.SUMS if centre else norm.SUMS[1:]
    summed = dict(zip(norm.SUMS, sums(element, count)))
    within = {name: compute(on_chip.shape[:3], summed[name], name, axes=names[:3]) for name in used_sums}
    total, squares = (lambda *i, name=name: within[name][i] for name in norm.SUMS)
    results = norm.results(
        element,
        lambda c: par[c],
        (total, squares),
        epsilon,
        count,
        centre,
        (limits[0], limits[1], limits[2]),
    )
    name = "layer_norm" if centre else "rms_norm"
    return compute(on_chip.shape, results, "out", axes=names), Rows(name, count, within)


class RowLowering(LayerLowering):
    """Makes the tensors of a softmax or normalisation."""

    def lower_rows(self) -> LayerComputation:
        """Lower the layer. Raises TilingError if the Config lacks the operation or cannot hold its numbers."""
        return self._lower_softmax() if self.layer.norm is None else self._lower_norm(self.layer.norm)

    def _lower_softmax(self) -> LayerComputation:
        """Lower a softmax."""
        if not self.cfg.softmax:
            raise TilingError("a softmax needs a Config with softmax")
        on_chip = self._make_input_rows()
        return self._finish_rows(on_chip, *softmax_rows(self, on_chip))

    def _lower_norm(self, norm: Norm) -> LayerComputation:
        """Lower a normalisation."""
        if not self.cfg.norm:
            raise TilingError("a normalisation needs a Config with norm")
        count = self.layer.row_length
        if count == 1:
            raise TilingError("a row of one element is nothing but its offset")
        (epsilon_field,) = (field for field in formats(self.cfg)[Opcode.VECTOR].fields if field.name == "scale_c")
        if norm.epsilon >> (max_bits := epsilon_field.width - 1):
            raise TilingError(f"its epsilon, for rows of {count}, takes more than {max_bits} bits")
        on_chip, lanes = self._make_input_rows(), self.blocks * self.cfg.block_out
        assert self.layer.requantise is not None
        par = self.add_constant(pack.arrange_parameters(self.cfg, self.layer.requantise), (lanes,), "uint64", "par")
        return self._finish_rows(on_chip, *norm_rows(self, on_chip, par), par)

    def _make_input_rows(self) -> Tensor:
        """Make x in vin as rows, [images, rows, columns, channels]."""
        cfg = self.cfg
        lanes = self.blocks * cfg.block_out
        pixels = self.x.images, self.x.rows, self.x.columns
        x = self.add_activation(self.x, "x", self.layer.x.storage_groups - self.layer.x.group_offset)
        last = x.shape[1] - 1

        def read(image: Expr, row: Expr, column: Expr, channel: Expr) -> Expr:
            """Return the element of x; channels beyond its last group repeat that group."""
            group = channel // cfg.group
            if lanes > (last + 1) * cfg.group:
                group = minimum(group, last)
            return x[image, group, row, column, 0, channel % cfg.group]

        return compute((*pixels, lanes), read, "near", axes=("image", "row", "column", "channel"))

    def _finish_rows(
        self, on_chip: Tensor, out: Tensor, operation: Rows, par: Tensor | None = None
    ) -> LayerComputation:
        """Return the computation of a layer that works on rows: make y from `out`, [images, rows, columns,
        channels]."""
        cfg, pixels = self.cfg, on_chip.shape[:3]
        groups, p = self.layer.y.groups(cfg), cfg.group
        shape = (*pixels[:1], groups, *pixels[1:], cfg.batch, p)
        y = compute(shape, lambda i, n, r, c, b, g: out[i, r, c, n * p + g], "y",
                    axes=("image", "group", "row", "column", "b", "g"))  # fmt: skip
        _, self.places[y] = self.y.tensor(cfg, "y", groups)
        stage = BlockStage(VectorOp("vin"), on_chip, "vin", par=par)
        workload = replace(self.vector_workload("vin", False), whole=True, norm=par is not None)
        return LayerComputation(workload, (stage,), out, y, tuple(self.inputs), self.places, self.scalars, operation)
