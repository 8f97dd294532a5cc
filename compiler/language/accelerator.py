"""Kernels on the accelerator: the layers that a recognised kernel becomes, their tiles, and their execution.

The layers are like those of a model (compiler/layer.py), but their tile is the block of a program. The compiler adds
scratchpads, tokens and loads ahead, as for models.

A sum of products, a maximum or an element-wise function becomes one layer (`KernelLayer`, `ProductLayer`). A softmax
becomes one layer for each matrix (`SoftmaxLayers`), a product of two activations one for each head (`HeadLayers`), and
attention one block where it fits (`AttentionLayers`). `AcceleratorVariant` runs any of these.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.graph.select.matrices import can_multiply_activations, matrices_form
from celosia.compiler.graph.select.placement import ActivationLayout, NotOffloadable
from celosia.compiler.language.attention_kernels import (
    AttentionKernel,
    HeadProduct,
    Heads,
    HeadsKernel,
    SoftmaxKernel,
    SoftmaxOfRows,
)
from celosia.compiler.language.block_reader import ON_CPU
from celosia.compiler.language.recognise import RecognisedLayer, recognise
from celosia.compiler.language.tile import ArrayArgument, KernelRun, fail
from celosia.compiler.launch.image import Image, LayerErrors, build
from celosia.compiler.launch.order import order_around_softmaxes
from celosia.compiler.layer import (
    Activation,
    ActivationGemm,
    Epilogue,
    Gemm,
    Layer,
    Requantise,
    Residual,
    Softmax,
    TilingError,
)
from celosia.compiler.program.model import matrix_counts, pack_activation, unpack_activation
from celosia.compiler.tensorize import pack
from celosia.compiler.tensorize.lowering import lower_layer
from celosia.compiler.tensorize.plan import FixedSchedule, Planner
from celosia.compiler.tensorize.roofline import attention_cycles, estimate
from celosia.compiler.tensorize.space import CUT_ORDERS, Tiling, Workload, candidates, parts, point, why_not
from celosia.compiler.vthread.verify import Run, verify_provenance
from celosia.hw.spec.config import Config
from celosia.sim.timing import predict

TIMEOUT = 1 << 40
"""Cycles after which a run is given up."""
NO_SOFTMAX = 'a softmax on the accelerator takes a Config with softmax; target="cpu" runs it'
"""Error for a Config without a softmax engine."""
Arrays = dict[ArrayArgument, NDArray[Any]]
"""Values of the arrays of a call."""


def lower_to_layers(
    cfg: Config, name: str, run: KernelRun, at: str, varying: Collection[ArrayArgument] = ()
) -> LoweredKernel:
    """Lower a traced kernel to layers on a Config. Raises LanguageError where the accelerator cannot run it.

    varying: arrays whose values change from run to run, besides those that are `quantised`.
    """
    kernel = recognise(run, varying)
    if isinstance(kernel, SoftmaxKernel):
        return SoftmaxLayers(cfg, name, kernel, at)
    if isinstance(kernel, AttentionKernel):
        return AttentionLayers(cfg, name, kernel, at)
    if isinstance(kernel, HeadsKernel):
        return HeadLayers(cfg, name, kernel, at)
    w = kernel.w
    if w is None or not (w.quantised or w in varying):
        return KernelLayer(cfg, name, kernel, at)
    if can_multiply_activations(cfg) and len(kernel.y.shape) == len(w.shape) == 2 and w is not kernel.x:
        return ProductLayer(cfg, name, kernel, w, at)
    if w in varying or w.zero_point:
        fail(
            f"{w.name} is no constant, or has a zero point: the accelerator multiplies matrices by such, others than "
            f"{w.name} itself, on a Config with batch = 1{ON_CPU}", kernel.w_at,
        )  # fmt: skip
    return KernelLayer(cfg, name, kernel, at)


class LoweredKernel:
    """A kernel as layers for a Config; subclasses say which layers. Each program writes a block of y of sizes `tile`.

    acts: the activation of each array that changes from call to call, y among them. constants: arrays that become part
    of the layers. planner: decides the layers' schedules; None until layers are made. at: file and line of the kernel.
    """

    acts: dict[ArrayArgument, Activation]
    constants: list[ArrayArgument]

    def __init__(self, cfg: Config, name: str, y: ArrayArgument, tile: tuple[int, ...], at: str) -> None:
        self.cfg, self.name, self.y, self.tile, self.at = cfg, name, y, tile, at
        self.planner: Planner | None = None

    def layers(self, arrays: Arrays) -> list[Layer]:
        """Return the layers of a launch, in order, with the values of the call's constants."""
        raise NotImplementedError

    def tilings(self, layer: Layer) -> list[Tiling]:
        """Return the tilings with which a layer's tile is the block of a program, one for each of its computations."""
        return [self._choose_tiling(d.workload) for d in lower_layer(self.cfg, layer)]  # type: ignore[arg-type]

    def _choose_tiling(self, p: Workload) -> Tiling:
        """Return the tiling of a workload. Raises LanguageError where the block of a program does not fit."""
        raise NotImplementedError

    def form(self, array: ArrayArgument) -> ActivationLayout:
        """Return the layout of an array as an activation of a graph. Raises NotOffloadable where it has none."""
        raise NotImplementedError

    def arrange_argument(self, array: ArrayArgument, values: NDArray[Any]) -> NDArray[np.int8]:
        """Arrange an array as its activation, [images, channels, height, width]."""
        return np.asarray(self.form(array).info.arrange(values))

    def restore_output(self, values: NDArray[np.int8]) -> NDArray[np.int8]:
        """Return the values of y, in its shape, from its activation [images, channels, height, width]."""
        return np.asarray(self.form(self.y).info.restore(values, self.y.shape))

    def refuse(self, sentence: str) -> NoReturn:
        """Raise LanguageError for the kernel."""
        fail(f"{self.name} on {self.cfg.name}: {sentence}", self.at)

    def fitting_tilings(
        self, p: Workload, points: Sequence[Tiling], otherwise: str = "take smaller blocks"
    ) -> list[Tiling]:
        """Return the tilings among `points` that fit the scratchpads. Raises LanguageError where none does.

        otherwise: advice for the error.
        """
        reasons = {d: why_not(self.cfg, p, d) for d in points}
        fitting = [d for d, reason in reasons.items() if reason is None]
        if not fitting:
            self.refuse(f"a block of {list(self.tile)} does not fit: {[*reasons.values()][-1]}; {otherwise}")
        return fitting

    def build_image(self, layers: Sequence[Layer]) -> Image:
        """Return the verified instructions of `layers`. Raises LanguageError where they do not fit."""
        try:
            if self.planner is None:
                is_one_kind = all(layer.kind == layers[0].kind for layer in layers)
                self.planner = Planner(self.cfg, FixedSchedule(self.tilings(layers[0])) if is_one_kind else None)
            return build_verified_image(self.cfg, layers, self.planner)
        except (LayerErrors, TilingError) as error:
            self.refuse(f"it does not fit: {error}")


# Sums of products, maxima, element-wise functions -----------------------------------------------------------------


class KernelLayer(LoweredKernel):
    """A kernel that is one layer: a sum of products with constants, a maximum or an element-wise function."""

    def __init__(self, cfg: Config, name: str, recognised: RecognisedLayer, at: str) -> None:
        """Create the activations of x, y and the residual. Raises LanguageError for ranks other than 2 to 4."""
        super().__init__(cfg, name, recognised.y, recognised.tile, at)
        self.recognised = recognised
        constants = recognised.w, recognised.par, recognised.table
        self.constants = [array for array in constants if array is not None]
        for array in (recognised.x, self.y):
            if not 2 <= len(array.shape) <= 4:
                fail(f"the accelerator has matrices and images; {array.name} has {len(array.shape)} dimensions", at)
        self.acts = {
            array: Activation.alone(cfg, array.name, *dims_of(array.shape))
            for array in (recognised.x, self.y, recognised.residual) if array is not None
        }  # fmt: skip

    def form(self, array: ArrayArgument) -> ActivationLayout:
        if len(array.shape) != 2:
            raise NotOffloadable("its images have their channels last; the accelerator's have them first")
        return ActivationLayout((*array.shape, 1, 1))

    def arrange_argument(self, array: ArrayArgument, values: NDArray[Any]) -> NDArray[np.int8]:
        """Return an argument of the kernel, channels last, as the accelerator reads it: channels first."""
        images, channels, rows, columns = self.acts[array].dims
        return np.asarray(values.reshape(images, rows, columns, channels).transpose(0, 3, 1, 2))

    def restore_output(self, values: NDArray[np.int8]) -> NDArray[np.int8]:
        """Return the output of the accelerator, [N, C, H, W], in the shape of the kernel's y: channels last."""
        return np.asarray(values.transpose(0, 2, 3, 1).reshape(self.y.shape))

    def layers(self, arrays: Arrays) -> list[Layer]:
        return [self._layer(arrays)]

    def _layer(self, arrays: Arrays) -> Layer:
        """Build the layer with the values of a call's constants: a pooling, an element-wise layer, or a convolution.

        The zero point of x is folded into the bias of a convolution.
        """
        f = self.recognised
        x, y = self.acts[f.x], self.acts[f.y]
        if f.pool:
            return Layer(self.name, x, y, f.window, f.pad, reduce="max", epilogue=self._epilogue(arrays))
        if f.w is None or f.par is None:
            return Layer(self.name, x, y, epilogue=self._epilogue(arrays))
        out, into = f.axes
        others = [d for d in range(len(f.w.shape)) if d not in f.axes]
        moved = arrays[f.w].transpose(out, into, *others)
        channels = slice(None), slice(None)
        weights: Any = np.stack([np.stack([moved[channels + tap] for tap in row], -1) for row in f.taps], -2)
        requantise = self._requantise(arrays)
        if f.x.zero_point:  # int32 wraps in the bias as it does in the sum
            sums = weights.reshape(len(weights), -1).sum(1, dtype=np.int64)
            requantise = replace(requantise, bias=(requantise.bias - f.x.zero_point * sums).astype(np.int32))
        gemm, epilogue = Gemm(np.ascontiguousarray(weights)), self._epilogue(arrays)
        return Layer(self.name, x, y, f.window, f.pad, gemm, requantise=requantise, epilogue=epilogue)

    def _requantise(self, arrays: Arrays) -> Requantise:
        """Unpack the requantisation from the values of its parameters."""
        f = self.recognised
        assert f.par is not None
        return unpack_requantise(arrays[f.par], int(f.attributes["zero_point"]))

    def _epilogue(self, arrays: Arrays) -> Epilogue:
        """Build the table and the residual that follow the requantisation."""
        f = self.recognised
        operand = None if f.residual is None else self.acts[f.residual]
        return build_epilogue(
            f.attributes.get("clip", (-128, 127)), None if f.table is None else arrays[f.table], operand, f.rescale
        )

    def _choose_tiling(self, p: Workload) -> Tiling:
        """Return the tiling whose tile is a program's block, with the loop order of the fewest estimated cycles."""
        cfg, tile = self.cfg, self.tile
        if tile[-1] % cfg.block_out and tile[-1] < self.y.shape[-1]:
            self.refuse(f"columns of a block come in multiples of block_out, {cfg.block_out}, and not {tile[-1]}")
        n = min(-(-tile[-1] // cfg.block_out), p.out_blocks)
        if len(tile) == 2:
            if tile[0] % cfg.batch and tile[0] < self.y.shape[0]:
                self.refuse(f"rows of a block come in multiples of the batch, {cfg.batch}, and not {tile[0]}")
            y, x = 1, min(-(-tile[0] // cfg.batch), p.columns)
        else:
            y, x = min(tile[-3], p.rows), min(tile[-2], p.columns)
        fitting = self.fitting_tilings(p, [
            point(cfg, p, n, y, x, k, order)
            for order in (("weights", "input", "split", "pieces") if p.in_blocks else ("rows",))
            for k in (parts(p.in_blocks)[1:] if order in CUT_ORDERS else [max(p.in_blocks, 1)])
        ])  # fmt: skip
        return min(fitting, key=lambda d: estimate(cfg, p, d)) if p.in_blocks else fitting[0]


def dims_of(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return (images, channels, height, width) of an array [rows, channels] or [images, height, width, channels]."""
    if len(shape) == 2:
        return shape[0], shape[1], 1, 1
    images = shape[0] if len(shape) == 4 else 1
    return images, shape[-1], shape[-3], shape[-2]


class ProductLayer(KernelLayer):
    """A matrix product whose second operand w is an activation, and no constant."""

    def __init__(self, cfg: Config, name: str, recognised: RecognisedLayer, w: ArrayArgument, at: str) -> None:
        super().__init__(cfg, name, recognised, at)
        self.w = w
        self.constants.remove(w)
        self.acts = {array: Activation.alone(cfg, array.name, *self.form(array).dims) for array in (*self.acts, w)}

    def form(self, array: ArrayArgument) -> ActivationLayout:
        is_w = array is self.w
        pixels = "columns" if is_w and self.recognised.axes == (1, 0) else "rows"
        pad = array.zero_point if is_w or array is self.recognised.x else 0
        return matrices_form(self.cfg, array.shape, pixels, pad, self.cfg.block_out if is_w else 1)

    arrange_argument, restore_output = LoweredKernel.arrange_argument, LoweredKernel.restore_output

    def _layer(self, arrays: Arrays) -> Layer:
        f, requantise, epilogue = self.recognised, self._requantise(arrays), self._epilogue(arrays)
        product = ActivationGemm(self.acts[self.w], -f.x.zero_point, -self.w.zero_point)
        return Layer(
            self.name, self.acts[f.x], self.acts[f.y], product=product, requantise=requantise, epilogue=epilogue
        )


# Softmaxes, products by heads, attention --------------------------------------------------------------------------


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
        return matrices_form(self.cfg, array.shape, "rows", pad)

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
                'a product of two activations on the accelerator takes a Config with batch = 1; target="cpu" runs it'
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
        return matrices_form(self.cfg, side.shape, side.pixels, pad, block)

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


# Constants of layers ----------------------------------------------------------------------------------------------


def unpack_requantise(words: NDArray[np.uint64], zero_point: int) -> Requantise:
    """Unpack parameters of `cl.parameters`, [columns], to a requantisation."""
    bias, multiplier, shift = pack.unpack_parameters(words)
    return Requantise(bias.astype(np.int32), multiplier.astype(np.uint32), shift.astype(np.uint8), zero_point)


def build_epilogue(
    clip: tuple[int, int], table: NDArray[np.int8] | None, operand: Activation | None, rescale: dict[str, Any]
) -> Epilogue:
    """Build the epilogue of a layer: a lookup table, and a residual that adds `operand`.

    rescale: the arguments of cl.residual_add: scales, shift and clip.
    """
    residual = None
    if operand is not None:
        scales = rescale["scale_v"], rescale["scale_b"], rescale["scale_c"], rescale["shift"]
        residual = Residual(operand, *scales, *rescale["clip"])
    return Epilogue(clip, None if table is None else table.copy(), residual)


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


# Execution --------------------------------------------------------------------------------------------------------


class AcceleratorVariant:
    """A kernel for one set of types and shapes.

    positions: of each array among the kernel's arguments. constants: values with which `image` and `layers` were made,
    which are made again when these values change.
    """

    def __init__(self, kernel: Any, run: KernelRun, positions: dict[ArrayArgument, int]) -> None:
        self.kernel, self.cfg = kernel, kernel.machine
        self.lowered = lower_to_layers(self.cfg, kernel.name, run, kernel.at)
        self.positions = positions
        self.constants: list[NDArray[Any]] = []
        self.image: Image | None = None
        self.layers: list[Layer] = []

    def prepare(self, arrays: list[Any]) -> Image:
        """Return the image for the constants among the arguments `arrays`, compiled again where these changed."""
        constants = [arrays[self.positions[array]] for array in self.lowered.constants]
        if self.image is None or not all(map(np.array_equal, constants, self.constants)):
            self.layers = self.lowered.layers({array: arrays[n] for array, n in self.positions.items()})
            self.image = self.lowered.build_image(self.layers)
            self.constants = [values.copy() for values in constants]
        return self.image

    def cycles(self, arrays: list[Any]) -> int:
        """Predict the cycles by the timing model."""
        image = self.prepare(arrays)
        (launch,) = image.launches
        return predict(self.cfg, image.code(launch).tobytes(), address=launch.address).cycles

    def __call__(self, arrays: list[Any], device: Any, addresses: object = None) -> dict[str, Any]:
        """Run the kernel on `device`, write its output array, and return the report of the run."""
        image, cfg = self.prepare(arrays), self.cfg
        (launch,) = image.launches
        machine = self.kernel.device(device)
        started = time.perf_counter()
        machine.allocate(image.size)
        machine.write(image.constants_address, image.constants)
        for array, act in self.lowered.acts.items():
            if array is not self.lowered.y:
                values = self.lowered.arrange_argument(array, arrays[self.positions[array]])
                machine.write(image.addresses[act.storage], pack_activation(cfg, values, act.storage_groups))
        counters = machine.run(launch.address, launch.count, TIMEOUT)
        y = self.lowered.y
        act, out = self.lowered.acts[y], arrays[self.positions[y]]
        data = machine.read(image.addresses[act.storage], act.size(cfg))
        out[...] = self.lowered.restore_output(unpack_activation(cfg, data, act.dims, act.storage_groups))
        return {
            "target": "accelerator", "device": device if isinstance(device, str) else type(device).__name__,
            "config": cfg.name, "cycles": counters.cycles, "instructions": launch.count,
            "bytes_stored": sum(launch.bytes_stored),
            "seconds": time.perf_counter() - started, "counters": counters.values,
        }  # fmt: skip


def build_verified_image(cfg: Config, layers: Sequence[Layer], planner: Planner) -> Image:
    """Return the image of one launch of `layers`, whose instructions are proved to compute them.

    Raises LayerErrors, TilingError.
    """
    outputs = {layers[-1].y.storage}
    inputs = {act.storage for layer in layers for act in layer.inputs()} - {layer.y.storage for layer in layers}
    image = build(cfg, [list(layers)], [inputs], [outputs], planner)
    (launch,) = image.launches
    run = Run(image.code(launch), list(layers), launch.layer_of, inputs, outputs)
    verify_provenance(cfg, [run], image.addresses, image.constants_address, image.constants, image.size)
    return image
