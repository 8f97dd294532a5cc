"""Kernels of matrices whose rows are pixels: softmaxes, and attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from celosia.compiler.graph.select.forms import Form
from celosia.compiler.graph.select.matrices import form_of_matrices
from celosia.compiler.language.lowered import Arrays, LoweredKernel
from celosia.compiler.language.rows import Softmax as SoftmaxOfRows
from celosia.compiler.language.rows import SoftmaxKernel
from celosia.compiler.language.tile import ArrayArgument
from celosia.compiler.layer import Activation, Layer, Softmax
from celosia.compiler.program.model import matrix_counts
from celosia.compiler.tensorize import pack
from celosia.compiler.tensorize.space import Decisions, Problem, point
from celosia.hw.config import Config


class SoftmaxLayers(LoweredKernel):
    """Softmaxes of rows, a layer for each matrix."""

    found: SoftmaxKernel

    def __init__(self, cfg: Config, name: str, found: SoftmaxKernel, at: str) -> None:
        super().__init__(cfg, name, at)
        self.found = found
        if not cfg.softmax:
            self.refuse('a softmax on the accelerator takes a Config with softmax; target="cpu" runs it')
        self.constants = constants_of(found.rows)
        self.acts = {
            array: Activation.alone(cfg, array.name, *self.form(array).dims) for array in (found.x, found.y)
        }  # fmt: skip

    def form(self, array: ArrayArgument) -> Form:
        pad = self.found.rows.zero_point if array is self.found.y else 0
        return form_of_matrices(self.cfg, array.shape, "rows", pad)

    def layers(self, arrays: Arrays) -> list[Layer]:
        x, y = self.acts[self.found.x], self.acts[self.found.y]
        count, columns, rows = matrix_counts("rows", self.found.y.shape)
        dims, groups = (1, columns, 1, rows), pack.blocks(columns, self.cfg.group)
        powers = powers_of(self, self.found.rows, arrays)
        return [
            Softmax(
                f"{self.name}.{n}" if count > 1 else self.name, x.region(dims, n * groups, x.pixels),
                y.region(dims, n * groups, y.pixels), powers, self.found.rows.zero_point,
            )
            for n in range(count)
        ]  # fmt: skip

    def _decide(self, p: Problem) -> Decisions:
        (found,) = self.fitting(p, [rows_of(self.cfg, p, self.found.tile[-2])])
        return found


def rows_of(cfg: Config, p: Problem, rows: int) -> Decisions:
    """A tile of so many whole rows."""
    return point(cfg, p, p.out_blocks, 1, min(rows, p.columns), 1, "rows")


def constants_of(rows: SoftmaxOfRows) -> list[ArrayArgument]:
    """The arrays that are part of a layer."""
    return [each for each in (rows.powers, rows.steps) if isinstance(each, ArrayArgument)]


def powers_of(kernel: LoweredKernel, rows: SoftmaxOfRows, arrays: Arrays) -> Any:
    """Powers and shares, [512] float32. LanguageError for those of which the hardware makes other bits than floats."""
    powers = arrays[rows.powers]
    steps = arrays[rows.steps] if isinstance(rows.steps, ArrayArgument) else rows.steps
    with np.errstate(all="ignore"):
        found = np.concatenate([powers, powers * np.float32(steps)])
        sound = np.isfinite(found).all() and np.isfinite(powers.max() * np.float32(2 * rows.count))
    if not sound or np.signbit(found).any() or powers[-1] == 0:
        kernel.refuse(
            f"the powers of {rows.powers.name}, and their products with the steps, are numbers from 0 on of which "
            f"{rows.count} have a sum, and that of the largest element is not 0: as cl.powers makes them"
        )
    return found
