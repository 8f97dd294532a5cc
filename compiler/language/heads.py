"""Layers of kernels on matrices whose rows are pixels: softmaxes, products of heads, and attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.graph.select.forms import ActivationLayout, NotOffloadable
from celosia.compiler.graph.select.matrices import can_multiply_activations, form_of_matrices
from celosia.compiler.language.attention_kernels import AttentionKernel, HeadProduct, Heads, HeadsKernel
from celosia.compiler.language.lowered import Arrays, LoweredKernel, epilogue_of, requantise_of
from celosia.compiler.language.rows import SoftmaxKernel, SoftmaxOfRows
from celosia.compiler.language.tile import ArrayArgument
from celosia.compiler.launch.order import order_around_softmaxes
from celosia.compiler.layer import Activation, ActivationGemm, Layer, Softmax, TilingError
from celosia.compiler.program.model import matrix_counts
from celosia.compiler.tensorize import pack
from celosia.compiler.tensorize.lowering import lower_layer
from celosia.compiler.tensorize.plan import Planner
from celosia.compiler.tensorize.roofline import attention_cycles
from celosia.compiler.tensorize.space import Tiling, Workload, candidates, parts, point, why_not
from celosia.hw.spec.config import Config

NO_SOFTMAX = 'a softmax on the accelerator takes a Config with softmax; target="cpu" runs it'


class SoftmaxLayers(LoweredKernel):
    """Softmaxes of rows, one layer for each matrix."""

    def __init__(self, cfg: Config, name: str, found: SoftmaxKernel, at: str) -> None:
        super().__init__(cfg, name, found.y, found.tile, at)
        self.found = found
        if not cfg.softmax:
            self.refuse(NO_SOFTMAX)
        self.constants = constants_of(found.rows)
        self.acts = {
            array: Activation.alone(cfg, array.name, *self.form(array).dims) for array in (found.x, found.y)
        }  # fmt: skip

    def form(self, array: ArrayArgument) -> ActivationLayout:
        pad = self.found.rows.zero_point if array is self.y else 0
        return form_of_matrices(self.cfg, array.shape, "rows", pad)

    def layers(self, arrays: Arrays) -> list[Layer]:
        """Build one Softmax for each matrix of the arrays."""
        x, y = self.acts[self.found.x], self.acts[self.y]
        count, columns, rows = matrix_counts("rows", self.y.shape)
        dims, groups = (1, columns, 1, rows), pack.blocks(columns, self.cfg.group)
        powers = powers_of(self, self.found.rows, arrays)
        return [
            Layer(
                f"{self.name}.{n}" if count > 1 else self.name, x.region(dims, n * groups, x.pixels),
                y.region(dims, n * groups, y.pixels), softmax=Softmax(powers, self.found.rows.zero_point),
            )
            for n in range(count)
        ]  # fmt: skip

    def _decide(self, p: Workload) -> Tiling:
        rows = self.tile[-2]
        way = "take smaller blocks" if rows > 1 else 'its rows are too long for this Config; target="cpu" runs it'
        (found,) = self.fitting(p, [rows_of(self.cfg, p, rows)], way)
        return found


class HeadLayers(LoweredKernel):
    """Products of matrices, one layer for each head, with tiles that the compiler chooses."""

    def __init__(self, cfg: Config, name: str, found: AttentionKernel | HeadsKernel, at: str) -> None:
        """Collect the arrays that are read with their layouts. Raises LanguageError without a suitable Config."""
        super().__init__(cfg, name, found.y, found.tile, at)
        self.out, self.x = found.out, found.x
        products = [found.product] if isinstance(found, HeadsKernel) else [found.scores, found.mixed]
        if not can_multiply_activations(cfg):
            self.refuse(
                "a product of two activations on the accelerator takes a Config with batch = 1 and "
                'block_in = block_out; target="cpu" runs it'
            )
        self.products, self.constants = products, []
        self.sides = {found.x.array: (found.x, 1, -products[0].offsets[0]), found.y: (found.out, 1, 0)}
        for made in products:
            self._add_side(made.w, cfg.block_out, -made.offsets[1])
            if made.bias is not None:
                self._add_side(made.bias, 1, 0)
            self.constants += [each for each in (made.scales, made.table) if each is not None]
        self.acts = {array: Activation.alone(cfg, array.name, *self._form(array).dims) for array in self.sides}

    def _add_side(self, side: Heads, block: int, pad: int) -> None:
        """Register an array that is read, with rows in blocks of `block`, and `pad` beyond its columns."""
        if side.array in self.sides:
            self.refuse(f"{side.array.name} is read as several of queries, keys, values and masks; give copies of it")
        self.sides[side.array] = side, block, pad

    def _form(self, array: ArrayArgument) -> ActivationLayout:
        """Return the layout of an array as [heads, rows, columns]."""
        side, block, pad = self.sides[array]
        return form_of_matrices(self.cfg, side.shape, side.pixels, pad, block)

    def form(self, array: ArrayArgument) -> ActivationLayout:
        side = self.sides[array][0]
        if side.beside and (side.pixels != "rows" or side.columns % self.cfg.group):
            raise NotOffloadable(
                f"the columns of {array.name} are several heads, which the host would have to take apart; "
                "pass each head as an array"
            )
        return self._form(array)

    def placed(self, array: ArrayArgument, values: NDArray[Any]) -> NDArray[np.int8]:
        side = self.sides[array][0]
        whole = values.reshape(side.rows, side.heads, -1).swapaxes(0, 1) if side.beside else values
        return np.asarray(self._form(array).info.arrange(whole.reshape(side.shape)))

    def taken(self, values: NDArray[np.int8]) -> NDArray[np.int8]:
        y, shape = self.out, self.y.shape
        whole = self._form(y.array).info.restore(values, y.shape)
        return np.asarray(whole.swapaxes(0, 1) if y.beside else whole).reshape(shape)

    def layers(self, arrays: Arrays) -> list[Layer]:
        self.planner = self.planner or Planner(self.cfg)
        x, y, columns = self.acts[self.x.array], self.acts[self.y], self.out.columns
        whole = self._product(self.name, self.products[0], x, y, columns, arrays)
        return [self._head(whole, n, self.x.columns, columns) for n in range(self.out.heads)]

    def _product(
        self, name: str, made: HeadProduct, x: Activation, y: Activation, columns: int, arrays: Arrays
    ) -> Layer:
        """Build the product of all heads."""
        requantise = requantise_of(np.resize(arrays[made.scales], columns), int(made.requantise["zero_point"]))
        table, operand = made.table, None if made.bias is None else self.acts[made.bias.array]
        clip = made.requantise["clip"]
        epilogue = epilogue_of(clip, None if table is None else arrays[table], operand, made.rescale)
        product = ActivationGemm(self.acts[made.w.array], *made.offsets)
        return Layer(name, x, y, product=product, requantise=requantise, epilogue=epilogue, heads=self.out.heads)

    def _head(self, layer: Layer, head: int, inner: int, columns: int) -> Layer:
        """Return one head of a layer of all heads."""

        def part(act: Activation, channels: int, of: int = head) -> Activation:
            groups = pack.blocks(channels, self.cfg.group)
            return act.region((1, channels, 1, act.width), of * groups, act.pixels)

        name = f"{layer.name}.{head}" if layer.heads > 1 else layer.name
        x, y = part(layer.x, inner), part(layer.y, columns)
        if layer.product is None:
            return replace(layer, name=name, x=x, y=y, heads=1)
        residual = layer.epilogue.residual
        if residual is not None:
            several = residual.operand.channels > pack.blocks(columns, self.cfg.group) * self.cfg.group
            residual = replace(residual, operand=part(residual.operand, columns, head if several else 0))
        epilogue = replace(layer.epilogue, residual=residual)
        product = replace(layer.product, w=part(layer.product.w, inner))
        return replace(layer, name=name, x=x, y=y, product=product, heads=1, epilogue=epilogue)


class AttentionLayers(HeadLayers):
    """Attention: one block where it fits, else a product, a softmax and a product for each head."""

    def __init__(self, cfg: Config, name: str, found: AttentionKernel, at: str) -> None:
        super().__init__(cfg, name, found, at)
        self.found = found
        if not cfg.softmax:
            self.refuse(NO_SOFTMAX)
        self.constants += constants_of(found.rows)

    def layers(self, arrays: Arrays) -> list[Layer]:
        """Build one block of all heads, or the layers of each head interleaved with the softmaxes."""
        f, heads = self.found, self.out.heads
        pixels, each = self.acts[f.y].width, pack.blocks(f.rows.count, self.cfg.group) * self.cfg.group
        names = f"{self.name}.scores", f"{self.name}.shares"
        scores, shares = (Activation.alone(self.cfg, name, 1, heads * each, 1, pixels) for name in names)
        first = self._product(scores.name, f.scores, self.acts[f.x.array], scores, f.rows.count, arrays)
        softmax = Softmax(powers_of(self, f.rows, arrays), f.rows.zero_point)
        rows = Layer(shares.name, scores, shares, softmax=softmax, heads=heads)
        last = self._product(self.name, f.mixed, shares, self.acts[f.y], f.out.columns, arrays)
        block = Layer.block((first, rows, last))
        if self._is_block(block):
            return [block]
        found = [
            self._head(layer, n, *channels)
            for layer, channels in ((first, (f.x.columns, f.rows.count)), (rows, (f.rows.count,) * 2),
                                    (last, (f.rows.count, f.out.columns)))
            for n in range(heads)
        ]  # fmt: skip
        return [found[number] for number in order_around_softmaxes(self.cfg, found)]

    def _is_block(self, block: Layer) -> bool:
        """Return whether all heads can be one layer: whole groups of channels, and a tile that fits."""
        f = self.found
        if any(size % self.cfg.group for size in (f.x.columns, f.rows.count, f.out.columns)):
            return False
        try:
            (computation,) = lower_layer(self.cfg, block)
        except TilingError:
            return False
        assert isinstance(computation.workload, Workload)
        return next(candidates(self.cfg, computation.workload), None) is not None

    def _decide(self, p: Workload) -> Tiling:
        """Choose the tile: a program's queries, of as many heads at a time as is fastest by the estimate."""
        found = self.fitting(p, [rows_of(self.cfg, p, self.tile[-2])])
        several = (rows_of(self.cfg, p, self.tile[-2], heads) for heads in parts(p.rows))
        found += [d for d in several if why_not(self.cfg, p, d) is None]
        return min(found, key=lambda d: attention_cycles(self.cfg, p, d))


def rows_of(cfg: Config, p: Workload, rows: int, heads: int = 1) -> Tiling:
    """Return the decisions for a tile of complete rows, of each head."""
    return point(cfg, p, p.out_blocks, heads, min(rows, p.columns), 1, "rows")


def constants_of(rows: SoftmaxOfRows) -> list[ArrayArgument]:
    """Return the arrays that become constants of the layer."""
    return [each for each in (rows.powers, rows.steps) if isinstance(each, ArrayArgument)]


def powers_of(kernel: LoweredKernel, rows: SoftmaxOfRows, arrays: Arrays) -> Any:
    """Return powers and shares, [512] float32.

    Raises LanguageError for those that the hardware would round differently.
    """
    powers = arrays[rows.powers]
    steps = arrays[rows.steps] if isinstance(rows.steps, ArrayArgument) else rows.steps
    with np.errstate(all="ignore"):
        table = np.concatenate([powers, powers * np.float32(steps)])
        is_valid = np.isfinite(table).all() and np.isfinite(powers.max() * np.float32(2 * rows.count))
    if not is_valid or np.signbit(table).any() or powers[-1] == 0:
        kernel.refuse(
            f"the powers of {rows.powers.name}, and their products with the steps, are numbers from 0 on of which "
            f"{rows.count} have a sum, and that of the largest element is not 0: as cl.powers makes them"
        )
    return table
