"""Kernels that are recognised as softmax, product of two activations or attention, lowered to one layer a matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.graph.select.forms import ActivationLayout, NotOffloadable
from celosia.compiler.graph.select.matrices import can_multiply_activations, form_of_matrices
from celosia.compiler.language.attention_kernels import AttentionKernel, HeadProduct, Heads, HeadsKernel
from celosia.compiler.language.lowered_kernel import Arrays, LoweredKernel, build_epilogue, unpack_requantise
from celosia.compiler.language.softmax_of_rows import SoftmaxKernel, SoftmaxOfRows
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
"""Error for a Config without a softmax engine."""


class SoftmaxLayers(LoweredKernel):
    """A kernel that was recognised as a softmax of rows, lowered to one Softmax layer for each matrix.

    at: file and line of the kernel, for errors.
    """

    def __init__(self, cfg: Config, name: str, kernel: SoftmaxKernel, at: str) -> None:
        """Create the activations of x and y. Raises LanguageError for a Config without softmax."""
        super().__init__(cfg, name, kernel.y, kernel.tile, at)
        self.kernel = kernel
        if not cfg.softmax:
            self.refuse(NO_SOFTMAX)
        self.constants = softmax_constants(kernel.rows)
        self.acts = {
            array: Activation.alone(cfg, array.name, *self.form(array).dims) for array in (kernel.x, kernel.y)
        }  # fmt: skip

    def form(self, array: ArrayArgument) -> ActivationLayout:
        pad = self.kernel.rows.zero_point if array is self.y else 0
        return form_of_matrices(self.cfg, array.shape, "rows", pad)

    def layers(self, arrays: Arrays) -> list[Layer]:
        """Build one Softmax for each matrix of the arrays."""
        x, y = self.acts[self.kernel.x], self.acts[self.y]
        count, columns, rows = matrix_counts("rows", self.y.shape)
        dims, groups = (1, columns, 1, rows), pack.blocks(columns, self.cfg.group)
        powers = softmax_table(self, self.kernel.rows, arrays)
        return [
            Layer(
                f"{self.name}.{n}" if count > 1 else self.name, x.region(dims, n * groups, x.pixels),
                y.region(dims, n * groups, y.pixels), softmax=Softmax(powers, self.kernel.rows.zero_point),
            )
            for n in range(count)
        ]  # fmt: skip

    def _choose_tiling(self, p: Workload) -> Tiling:
        rows = self.tile[-2]
        way = "take smaller blocks" if rows > 1 else 'its rows are too long for this Config; target="cpu" runs it'
        (tiling,) = self.fitting_tilings(p, [row_tiling(self.cfg, p, rows)], way)
        return tiling


class HeadLayers(LoweredKernel):
    """Products of matrices, one layer for each head, with tiles that the compiler chooses.

    products: the matrix products of the kernel, in order. sides: for each array that is read or written, its matrices,
    the rows of a block of its layout, and the value beyond its columns.
    """

    def __init__(self, cfg: Config, name: str, kernel: AttentionKernel | HeadsKernel, at: str) -> None:
        """Collect the arrays that are read with their layouts. Raises LanguageError without a suitable Config."""
        super().__init__(cfg, name, kernel.y, kernel.tile, at)
        self.out, self.x = kernel.out, kernel.x
        products = [kernel.product] if isinstance(kernel, HeadsKernel) else [kernel.scores, kernel.mixed]
        if not can_multiply_activations(cfg):
            self.refuse(
                "a product of two activations on the accelerator takes a Config with batch = 1 and "
                'block_in = block_out; target="cpu" runs it'
            )
        self.products, self.constants = products, []
        self.sides = {kernel.x.array: (kernel.x, 1, -products[0].offsets[0]), kernel.y: (kernel.out, 1, 0)}
        for product in products:
            self._add_side(product.w, cfg.block_out, -product.offsets[1])
            if product.bias is not None:
                self._add_side(product.bias, 1, 0)
            self.constants += [array for array in (product.scales, product.table) if array is not None]
        self.acts = {array: Activation.alone(cfg, array.name, *self._head_form(array).dims) for array in self.sides}

    def _add_side(self, side: Heads, block: int, pad: int) -> None:
        """Register an array that is read, with rows in blocks of `block`, and the value `pad` beyond its columns.

        Raises LanguageError for an array with two roles.
        """
        if side.array in self.sides:
            self.refuse(f"{side.array.name} is read as several of queries, keys, values and masks; give copies of it")
        self.sides[side.array] = side, block, pad

    def _head_form(self, array: ArrayArgument) -> ActivationLayout:
        """Return the layout of an array that the host has arranged as [heads, rows, columns]."""
        side, block, pad = self.sides[array]
        return form_of_matrices(self.cfg, side.shape, side.pixels, pad, block)

    def form(self, array: ArrayArgument) -> ActivationLayout:
        side = self.sides[array][0]
        if side.side_by_side and (side.pixels != "rows" or side.columns % self.cfg.group):
            raise NotOffloadable(
                f"the columns of {array.name} are several heads, which the host would have to take apart; "
                "pass each head as an array"
            )
        return self._head_form(array)

    def arrange_argument(self, array: ArrayArgument, values: NDArray[Any]) -> NDArray[np.int8]:
        side = self.sides[array][0]
        matrices = values.reshape(side.rows, side.heads, -1).swapaxes(0, 1) if side.side_by_side else values
        return np.asarray(self._head_form(array).info.arrange(matrices.reshape(side.shape)))

    def restore_output(self, values: NDArray[np.int8]) -> NDArray[np.int8]:
        y, shape = self.out, self.y.shape
        matrices = self._head_form(y.array).info.restore(values, y.shape)
        return np.asarray(matrices.swapaxes(0, 1) if y.side_by_side else matrices).reshape(shape)

    def layers(self, arrays: Arrays) -> list[Layer]:
        self.planner = self.planner or Planner(self.cfg)
        x, y, columns = self.acts[self.x.array], self.acts[self.y], self.out.columns
        all_heads = self._product_layer(self.name, self.products[0], x, y, columns, arrays)
        return [self._head_layer(all_heads, head, self.x.columns, columns) for head in range(self.out.heads)]

    def _product_layer(
        self, name: str, product: HeadProduct, x: Activation, y: Activation, columns: int, arrays: Arrays
    ) -> Layer:
        """Build the layer that computes a product for all heads. columns: of the result of one head."""
        zero_point = int(product.requantise["zero_point"])
        requantise = unpack_requantise(np.resize(arrays[product.scales], columns), zero_point)
        table, operand = product.table, None if product.bias is None else self.acts[product.bias.array]
        clip = product.requantise["clip"]
        epilogue = build_epilogue(clip, None if table is None else arrays[table], operand, product.rescale)
        gemm = ActivationGemm(self.acts[product.w.array], *product.offsets)
        return Layer(name, x, y, product=gemm, requantise=requantise, epilogue=epilogue, heads=self.out.heads)

    def _head_layer(self, layer: Layer, head: int, depth: int, columns: int) -> Layer:
        """Return the layer of one head, from a layer of all heads.

        depth, columns: channels of one head in x and w, and in y.
        """

        def head_region(act: Activation, channels: int, number: int = head) -> Activation:
            """Return the region of `act` that holds head `number`, of so many channels."""
            groups = pack.blocks(channels, self.cfg.group)
            return act.region((1, channels, 1, act.width), number * groups, act.pixels)

        name = f"{layer.name}.{head}" if layer.heads > 1 else layer.name
        x, y = head_region(layer.x, depth), head_region(layer.y, columns)
        if layer.product is None:
            return replace(layer, name=name, x=x, y=y, heads=1)
        residual = layer.epilogue.residual
        if residual is not None:
            has_all_heads = residual.operand.channels > pack.blocks(columns, self.cfg.group) * self.cfg.group
            operand = head_region(residual.operand, columns, head if has_all_heads else 0)
            residual = replace(residual, operand=operand)
        epilogue = replace(layer.epilogue, residual=residual)
        product = replace(layer.product, w=head_region(layer.product.w, depth))
        return replace(layer, name=name, x=x, y=y, product=product, heads=1, epilogue=epilogue)


class AttentionLayers(HeadLayers):
    """Attention: one block where it fits, else a product, a softmax and a product for each head."""

    def __init__(self, cfg: Config, name: str, kernel: AttentionKernel, at: str) -> None:
        super().__init__(cfg, name, kernel, at)
        self.kernel = kernel
        if not cfg.softmax:
            self.refuse(NO_SOFTMAX)
        self.constants += softmax_constants(kernel.rows)

    def layers(self, arrays: Arrays) -> list[Layer]:
        """Build one block of all heads, or the layers of each head interleaved with the softmaxes."""
        f, heads = self.kernel, self.out.heads
        pixels, head_channels = self.acts[f.y].width, pack.blocks(f.rows.count, self.cfg.group) * self.cfg.group
        names = f"{self.name}.scores", f"{self.name}.shares"
        scores, shares = (Activation.alone(self.cfg, name, 1, heads * head_channels, 1, pixels) for name in names)
        first = self._product_layer(scores.name, f.scores, self.acts[f.x.array], scores, f.rows.count, arrays)
        softmax = Softmax(softmax_table(self, f.rows, arrays), f.rows.zero_point)
        rows = Layer(shares.name, scores, shares, softmax=softmax, heads=heads)
        last = self._product_layer(self.name, f.mixed, shares, self.acts[f.y], f.out.columns, arrays)
        block = Layer.block((first, rows, last))
        if self._fits_as_block(block):
            return [block]
        head_layers = [
            self._head_layer(layer, head, *channels)
            for layer, channels in ((first, (f.x.columns, f.rows.count)), (rows, (f.rows.count,) * 2),
                                    (last, (f.rows.count, f.out.columns)))
            for head in range(heads)
        ]  # fmt: skip
        return [head_layers[number] for number in order_around_softmaxes(self.cfg, head_layers)]

    def _fits_as_block(self, block: Layer) -> bool:
        """Return whether all heads can be one layer, which keeps scores on chip: whole groups of channels, and a tile
        that fits. Else each head has layers of its own.
        """
        f = self.kernel
        if any(size % self.cfg.group for size in (f.x.columns, f.rows.count, f.out.columns)):
            return False
        try:
            (computation,) = lower_layer(self.cfg, block)
        except TilingError:
            return False
        assert isinstance(computation.workload, Workload)
        return next(candidates(self.cfg, computation.workload), None) is not None

    def _choose_tiling(self, p: Workload) -> Tiling:
        """Return the tiling whose tile is a program's queries, for as many heads as is fastest by the estimate."""
        tilings = self.fitting_tilings(p, [row_tiling(self.cfg, p, self.tile[-2])])
        several_heads = (row_tiling(self.cfg, p, self.tile[-2], heads) for heads in parts(p.rows))
        tilings += [d for d in several_heads if why_not(self.cfg, p, d) is None]
        return min(tilings, key=lambda d: attention_cycles(self.cfg, p, d))


def row_tiling(cfg: Config, p: Workload, rows: int, heads: int = 1) -> Tiling:
    """Return the tiling whose tile has `rows` complete rows of each of `heads` heads."""
    return point(cfg, p, p.out_blocks, heads, min(rows, p.columns), 1, "rows")


def softmax_constants(rows: SoftmaxOfRows) -> list[ArrayArgument]:
    """Return the arrays of a softmax that become constants of the layer: powers, and steps if they are an array."""
    return [array for array in (rows.powers, rows.steps) if isinstance(array, ArrayArgument)]


def softmax_table(kernel: LoweredKernel, rows: SoftmaxOfRows, arrays: Arrays) -> Any:
    """Return the table of a Softmax layer, float32[512]: the powers, then each power times the steps.

    Raises LanguageError for values that the hardware would round differently.
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
