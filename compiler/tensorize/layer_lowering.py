"""Lower one layer to tensor expressions: its tensors in DRAM and in scratchpads.

    x in DRAM → near (padded, in a scratchpad) → acc (sums of GEMM) → out (a pass of the vector unit) → y in DRAM

`LayerLowering` holds all kinds of layers but those of rows (lowering.py), as they share most of these tensors.
`add_...` adds an input or scalar to the computation, `make_...` a tensor or stage; `lower_...` returns a computation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from celosia.compiler.expr import Axis, Expr, Tensor, Var, compute, is_float, placeholder, reduce_axis, select, sum
from celosia.compiler.expr.lower import reduce_and
from celosia.compiler.expr.nodes import INDEX, Const, minimum
from celosia.compiler.layer import Activation, ActivationGemm, Layer, Storage, TilingError, Window
from celosia.compiler.tensorize import pack
from celosia.compiler.tensorize.block_space import BlockWorkload
from celosia.compiler.tensorize.computation import (
    ActivationGrid,
    Blob,
    BlockStage,
    DramPlace,
    LayerComputation,
)
from celosia.compiler.tensorize.intrinsics import PARAMETERS, VectorOp, tile_shape, vector_value
from celosia.compiler.tensorize.space import EXTENT_MAX, Workload
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Buffer, element_bytes
from celosia.hw.spec.scratchpads import depths

PLACES = ("image", "block", "row", "column", "piece", "b", "g")
"""Names of the axes of tensors that the vector unit reads and writes."""


class LayerLowering:
    """Make the tensors of one layer, for `blocks` output blocks from `first` on.

    matrix: whether images are pixels of one row, see ActivationGrid. suffix: end of the names of tensors and scalars,
    to tell layers of one computation apart. before: the lowering of the layer before in the same computation; both
    share their inputs, places and scalars.
    """

    def __init__(
        self, cfg: Config, layer: Layer, matrix: bool, first: int, blocks: int, suffix: str = "",
        before: LayerLowering | None = None,
    ) -> None:  # fmt: skip
        self.cfg, self.layer, self.matrix, self.window = cfg, layer, matrix, window_of(layer)
        self.first, self.blocks, self.suffix = first, blocks, suffix
        self.x, self.y = ActivationGrid.of(cfg, layer.x, matrix), ActivationGrid.of(cfg, layer.y, matrix)
        self.places: dict[Tensor, DramPlace] = {} if before is None else before.places
        self.inputs: list[Tensor] = [] if before is None else before.inputs
        self.scalars: dict[str, float] = {} if before is None else before.scalars
        self.variables: dict[str, Var] = {} if before is None else before.variables

    @property
    def scope(self) -> str:
        """The scratchpad from which the layer reads its input."""
        return "inp" if self.layer.product is not None or self.layer.uses_gemm(self.cfg) else "vin"

    @property
    def sum_bytes(self) -> int:
        """Bytes of each sum that are stored unscaled; 0 if sums are requantised."""
        return 0 if self.layer.gemm is None else self.layer.gemm.sum_bytes

    @property
    def input_blocks(self) -> int:
        """Entries of `scope` for a pixel of x."""
        return pack.blocks(self.layer.x.channels, self.cfg.block_out if self.scope == "vin" else self.cfg.block_in)

    @property
    def row_step(self) -> int:
        """Distance in x of two neighbouring rows in the scratchpad; a kernel of one row skips the rows between
        strides."""
        return self.window.strides[0] if self.window.kernel[0] == 1 else 1

    @property
    def input_size(self) -> tuple[int, int]:
        """Rows and columns of the padded input in the scratchpad."""
        w = self.window
        rows = self.y.rows if w.kernel[0] == 1 else (self.y.rows - 1) * w.strides[0] + w.reach(0)
        return rows, (self.y.columns - 1) * w.strides[1] + w.reach(1) + self.extra_columns

    @property
    def extra_columns(self) -> int:
        """Columns right of its windows that a depthwise sum reads and multiplies by zero, to fill the taps of a
        step."""
        if self.layer.gemm is None or self.scope == "inp":
            return 0
        steps, step = pack.tap_steps(self.cfg, self.window)
        return (steps - 1) * step + self.cfg.taps - self.window.reach(1)

    def inside_conditions(self, y: Expr, x: Expr) -> list[Expr]:
        """Return the conditions under which row `y` and column `x` of the padded input lie in x, not in the padding."""
        rows, columns = self.input_size
        top, left, _, _ = self.window.pads
        return _range_conditions(y, self.x.rows, rows, self.row_step, top) + _range_conditions(
            x, self.x.columns, columns, 1, left
        )

    @property
    def has_padding(self) -> bool:
        """Whether windows reach beyond x, so that the input needs padding."""
        return bool(self.inside_conditions(Var("y", INDEX), Var("x", INDEX)))

    # Tensors in DRAM ------------------------------------------------------------------------------------------

    def add_activation(self, grid: ActivationGrid, name: str, groups: int, first: int = 0) -> Tensor:
        """Add an activation in DRAM to the inputs, from channel group `first` on; see `ActivationGrid.tensor`."""
        tensor, place = grid.tensor(self.cfg, name + self.suffix, groups, first)
        self.places[tensor] = place
        self.inputs.append(tensor)
        return tensor

    def add_constant(self, blob: Blob, shape: tuple[int, ...], dtype: str, name: str, offset: int = 0) -> Tensor:
        """Add a constant to the inputs: `blob` in DRAM, from byte `offset` on."""
        tensor = placeholder(shape, dtype, name + self.suffix)
        size = tensor.nbytes // max(tensor.size, 1)
        strides = tuple(int(np.prod(shape[d + 1 :])) * size for d in range(len(shape)))
        self.places[tensor] = DramPlace(blob, offset, strides)
        self.inputs.append(tensor)
        return tensor

    def _add_parameters(self) -> Tensor | None:
        """Add bias, multiplier and shift of the output channels, [blocks, block_out]; None if the layer does not
        requantise."""
        requantise = self.layer.parameters(self.cfg)
        if requantise is None:
            return None
        blob = pack.arrange_parameters(self.cfg, requantise)
        shape = (self.blocks, self.cfg.block_out)
        return self.add_constant(blob, shape, "uint64", "par", self.first * self.cfg.block_out * 8)

    def _add_table(self) -> Tensor | None:
        """Add the table of the epilogue, [1, 256]; None if it has none."""
        table = self.layer.epilogue.table
        if table is None:
            return None
        return self.add_constant(table.astype(np.int8).view(np.uint8), (1, len(table)), "int8", "table")

    # Tensors in scratchpads -----------------------------------------------------------------------------------

    def make_input(self, scope: str, blocks: int, pad_value: int, first: int = 0) -> Tensor:
        """Make the input in scratchpad `scope`, [images, blocks, rows, columns, *entry], from group `first` on.

        Padding that the window reads has `pad_value`. With a kernel of one row, rows between strides are left out.
        """
        entry = tile_shape(self.cfg, scope)
        top, left, _, _ = self.window.pads
        rows, columns = self.input_size
        exist = self.layer.x.storage_groups - self.layer.x.group_offset
        x = self.add_activation(self.x, "x", exist - first, first)
        last = x.shape[1] - 1

        def read(image: Expr, block: Expr, row: Expr, column: Expr, piece: Expr, b: Expr, k: Expr) -> Expr:
            """Return the element of x at this place of the padded input, or the padding."""
            group = block * entry[0] + piece
            if blocks * entry[0] > last + 1:
                group = minimum(group, last)  # channels that no weight reads
            y, c = row * self.row_step - top, column - left
            value = x[image, group, y, c, b, k]
            value = value.astype("int32") if scope == "acc" else value
            inside = self.inside_conditions(y, c)
            return (
                select(reduce_and(inside), value, self.add_scalar("pad", value.dtype, pad_value)) if inside else value
            )

        names = ("image", "block", "row", "column", "piece", "b", "k")
        return compute((self.x.images, blocks, rows, columns, *entry), read, f"near{self.suffix}", axes=names)

    def add_scalar(self, name: str, dtype: str, value: float) -> Var:
        """Add a scalar and return its variable; loops do not depend on its value, so that layers can share them."""
        name += self.suffix
        self.scalars[name] = float(value) if is_float(dtype) else int(value)
        return self.variables.setdefault(name, Var(name, dtype))

    def _make_operand(self) -> Tensor | None:
        """Make operand B in vin, of the multiplication or of the residual; None if the layer has neither."""
        multiply, residual, x = self.layer.multiply, self.layer.epilogue.residual, self.layer.x
        if multiply is not None:
            one_pixel = multiply.b.height * multiply.b.width == 1 and x.height * x.width > 1
            return self.make_operand_of(multiply.b, self.matrix and not one_pixel)
        return None if residual is None else self.make_operand_of(residual.operand, self.matrix)

    def make_operand_of(self, act: Activation, matrix: bool) -> Tensor:
        """Make operand B in vin from `act`, [images, blocks, rows, columns, *entry]; rows and columns of `act`, perhaps
        1 x 1."""
        grid, entry = ActivationGrid.of(self.cfg, act, matrix), tile_shape(self.cfg, "vin")
        exist = act.storage_groups - act.group_offset - self.first * entry[0]
        source = self.add_activation(grid, "b", exist, self.first * entry[0])

        def read(i: Expr, n: Expr, y: Expr, x: Expr, piece: Expr, b: Expr, g: Expr) -> Expr:
            """Return the element of `act`; channels beyond its last group repeat that group."""
            group = n * entry[0] + piece
            if self.blocks * entry[0] > exist:
                group = minimum(group, exist - 1)
            return source[i, group, y, x, b, g]

        return compute(
            (grid.images, self.blocks, grid.rows, grid.columns, *entry), read, f"operand{self.suffix}", axes=PLACES
        )

    def make_pass_result(self, stage: BlockStage, to: LayerLowering | None = None) -> Tensor:
        """Make the result of a stage's vector pass: [images, blocks, rows, columns, *entry] in out.

        to: the lowering of the next layer, if the result is its padded input instead.
        """
        element = self.pass_element(stage)
        if to is not None:
            return self._make_next_input(element, to)
        shape = (self.y.images, self.blocks, self.y.rows, self.y.columns, *tile_shape(self.cfg, "out"))
        if stage.vector.byte:
            all_bytes = (self.sum_bytes, *shape)
            return compute(all_bytes, lambda byte, *i: element(*i, byte=byte), "out", axes=("byte", *PLACES))
        return compute(shape, element, "out", axes=PLACES)

    def pass_element(self, stage: BlockStage) -> Callable[..., Expr]:
        """Return the function that gives an element of the result of a stage's pass, by [image, block, row, column,
        *entry]."""
        window, epilogue, multiply = self._window_axes(stage.vector), self.layer.epilogue, self.layer.multiply
        low, high = epilogue.clip
        values: dict[str, float] = {"lo": low, "hi": high, "clip_lo": low, "clip_hi": high}
        if self.layer.requantise is not None:
            values["zero_point"] = self.layer.requantise.zero_point
        if multiply is not None:
            values |= {"a_offset": multiply.x_offset, "b_offset": multiply.b_offset}
        if (residual := epilogue.residual) is not None:
            scales = {"scale_v": residual.scale_v, "scale_b": residual.scale_b, "scale_c": residual.scale_c}
            values |= {**scales, "unit": 2.0**-residual.shift, "add_lo": residual.lo, "add_hi": residual.hi}

        def element(*index: Expr, byte: Expr | None = None) -> Expr:
            """Return the element at `index`; byte: the number of the byte that a pass takes of a sum."""

            def parameter(name: str) -> Expr:
                return self.add_scalar(name, PARAMETERS[name], values[name]) if byte is None else byte

            return vector_value(
                stage.vector, lambda name: self._operand_element(stage, name, window, index), parameter, window
            )

        return element

    def _window_axes(self, p: VectorOp) -> tuple[Axis, ...]:
        """Return the axes of the window over which a pass reduces its operand A; () if it does not."""
        kernel = self.window.kernel
        if p.taps:
            steps, _ = pack.tap_steps(self.cfg, self.window)
            return reduce_axis(kernel[0], "r"), reduce_axis(steps, "s"), reduce_axis(self.cfg.taps, "t")
        return (reduce_axis(kernel[0], "r"), reduce_axis(kernel[1], "s")) if p.reduce else ()

    def _operand_element(self, stage: BlockStage, name: str, window: tuple[Axis, ...], index: tuple[Expr, ...]) -> Expr:
        """Return the element of operand `name` that a pass reads for element `index` of its result."""
        i, n, y, x, piece, image, g = index
        if name == "a":
            a = stage.on_chip if stage.acc is None else stage.acc
            return a[i, n, *self._input_position(window, y, x), piece, image, g]
        channel = piece * self.cfg.group + g
        tile = {"par": stage.par, "table": stage.table, "tap": stage.taps, "b": stage.b}[name]
        assert tile is not None
        match name:
            case "par":
                return tile[n, channel]
            case "table":
                return tile[0, 0]
            case "tap":
                return tile[n, *window, channel]
        pixel = (y, x) if tile.shape[2:4] == (self.y.rows, self.y.columns) else (0, 0)
        return tile[i, n, *pixel, piece, image, g]

    def _input_position(self, window: tuple[Axis, ...], y: Expr, x: Expr) -> tuple[Expr, Expr]:
        """Return row and column of the input at position `window` of the window whose result is at row y, column x."""
        if not window:
            return y, x
        w = self.window
        rows = y if w.kernel[0] == 1 else y * w.strides[0] + window[0] * w.dilations[0]
        if len(window) == 2:
            return rows, x * w.strides[1] + window[1] * w.dilations[1]
        return rows, x * w.strides[1] + (window[1] * pack.tap_steps(self.cfg, w)[1] + window[2])

    def _make_next_input(self, element: Callable[..., Expr], to: LayerLowering) -> Tensor:
        """Make the padded input of the next layer, `to`, in its scratchpad, from the elements of this layer's
        result."""
        top, left, _, _ = to.window.pads
        pieces = tile_shape(self.cfg, to.scope)[0] // tile_shape(self.cfg, "out")[0]

        def next_input(i: Expr, n: Expr, row: Expr, column: Expr, piece: Expr, image: Expr, g: Expr) -> Expr:
            """Return the element of this layer's result at this place of the padded input, or the padding."""
            if pieces > 1:
                n, piece = n * pieces + piece, Const(0, INDEX)
                if to.input_blocks * pieces > self.blocks:
                    n = minimum(n, self.blocks - 1)  # channels that no weight reads
            y, x = row * to.row_step - top, column - left
            value, inside = element(i, n, y, x, piece, image, g), to.inside_conditions(y, x)
            if not inside:
                return value
            return select(reduce_and(inside), value, to.add_scalar("pad", "int8", to.layer.pad_value))

        shape = (self.y.images, to.input_blocks, *to.input_size, *tile_shape(self.cfg, to.scope))
        return compute(shape, next_input, f"near{to.suffix}", axes=PLACES)

    def make_output(self, out: Tensor) -> Tensor:
        """Make y in DRAM from `out`: [images, groups, rows, columns, batch, group], of the groups that hold
        channels."""
        cfg, p, sum_bytes = self.cfg, self.cfg.out_pieces, self.sum_bytes
        groups_of_byte = self.layer.y.groups(cfg) // max(sum_bytes, 1)
        groups = min(self.blocks * p, groups_of_byte - self.first * p)
        shape = (self.y.images, groups, self.y.rows, self.y.columns, cfg.batch, cfg.group)
        names = ("image", "group", "row", "column", "b", "g")
        _, place = self.y.tensor(cfg, "y", groups, self.first * p)
        if sum_bytes:
            element = lambda byte, i, n, r, c, b, g: out[byte, i, n // p, r, c, n % p, b, g]  # noqa: E731
            y = compute((sum_bytes, *shape), element, "y", axes=("byte", *names))
            place = replace(place, strides=(groups_of_byte * self.y.strides[1], *place.strides))
        else:
            y = compute(shape, lambda i, n, r, c, b, g: out[i, n // p, r, c, n % p, b, g], "y", axes=names)
        self.places[y] = place
        return y

    # Layers ---------------------------------------------------------------------------------------------------

    def lower_convolution(self, run: pack.WeightRun, stored: pack.StoredWeights) -> LayerComputation:
        """Lower one run of output blocks of a product with constant weights. stored: all weights of the layer."""
        blocks = run.step * ((run.blocks - 1) // run.share) + run.inputs
        on_chip = self.make_input("inp", blocks, self.layer.pad_value, run.input * self.cfg.inp_pieces)
        return self.finish_computation(*self.make_gemm_stage(on_chip, run, stored))

    def lower_product(self, product: ActivationGemm) -> LayerComputation:
        """Lower a product of two activations. Raises TilingError if w cannot be loaded as weights."""
        if self.cfg.batch > 1:
            raise TilingError("a product of two activations needs batch = 1")
        if self.layer.x.groups(self.cfg) % self.cfg.inp_pieces and product.w_offset:
            raise TilingError("the channels of x fill no entries of inp, and w has an offset")
        self.x = self.x.repeated(len(product.w_pads) + 1)
        on_chip = self.make_input("inp", self.input_blocks, product.pad_value)
        run = pack.WeightRun(0, self.blocks, 0, self.input_blocks, 0, self.blocks, 0)
        return self.finish_computation(*self._make_product_stage(on_chip, run, self._make_activation_weights(product)))

    def lower_vector_layer(self) -> LayerComputation:
        """Lower a depthwise convolution, a pooling, or a layer that works element by element.

        Raises TilingError if two operands need vin.
        """
        layer = self.layer
        if layer.epilogue.residual is not None and layer.reduce:
            raise TilingError("a pooling and its residual both need vin")
        if layer.epilogue.residual is not None and layer.multiply is not None:
            raise TilingError("a multiplication and its residual both need vin")
        if layer.gemm is not None:
            return self.finish_computation(
                *self.make_depthwise_stage(self.make_input("vin", self.blocks, layer.pad_value))
            )
        scope = "vin" if layer.multiply is None and layer.epilogue.residual is None else "acc"
        stage = self.make_vector_stage(self.make_input(scope, self.blocks, layer.pad_value), scope)
        return self.finish_computation(stage, self.vector_workload(scope, stage.b is not None))

    def finish_computation(
        self, stage: BlockStage, workload: Workload | BlockWorkload, earlier: Sequence[BlockStage] = ()
    ) -> LayerComputation:
        """Return the computation whose last stage is `stage`, of this layer: add out and y.

        earlier: the stages before, if the layer is the last of a block.
        """
        out = self.make_pass_result(stage)
        y = self.make_output(out)
        return LayerComputation(workload, (*earlier, stage), out, y, tuple(self.inputs), self.places, self.scalars)

    # Stages ---------------------------------------------------------------------------------------------------

    def make_stage(self, on_chip: Tensor) -> tuple[BlockStage, Workload]:
        """Make the stage of a layer inside a block, whose input is `on_chip`.

        It is a convolution without groups, a depthwise one, or a pooling.
        """
        gemm, kernel = self.layer.gemm, self.window.kernel
        if self.layer.multiply is not None:
            return self.make_vector_stage(on_chip, "acc"), self.vector_workload("acc", True)
        if gemm is None:
            return self.make_vector_stage(on_chip, "vin"), self.vector_workload("vin", False, kernel[0] * kernel[1])
        if self.scope == "vin":
            return self.make_depthwise_stage(on_chip)
        (run, *_), stored = pack.weight_runs(self.cfg, gemm), pack.stored_weights(self.cfg, gemm)
        return self.make_gemm_stage(on_chip, run, stored)

    def make_gemm_stage(
        self, on_chip: Tensor, run: pack.WeightRun, stored: pack.StoredWeights
    ) -> tuple[BlockStage, Workload]:
        """Make the stage of a product with constant weights on GEMM, for one run of output blocks."""
        cfg, kernel = self.cfg, self.window.kernel
        shape = (run.blocks, run.inputs, *kernel, *tile_shape(cfg, "wgt"))
        piece = element_bytes(cfg, Buffer.WGT, expand=stored.packed)
        first = stored.first + run.weights * kernel[0] * kernel[1] * cfg.inp_pieces * piece
        weights = self.add_constant(stored.data, shape, "int8", "weights", first)
        if stored.packed:  # several values share a byte
            place, pieces = self.places[weights], shape[1:5]
            strides = (*(int(np.prod(pieces[d:])) * piece for d in range(5)), 0, 0)
            self.places[weights] = replace(place, strides=strides, book_bytes=stored.book_bytes)
        stage, workload = self._make_product_stage(on_chip, run, weights)
        return stage, replace(workload, packed=stored.packed)

    def _make_activation_weights(self, product: ActivationGemm) -> Tensor:
        """Make the weights of a product of two activations, [blocks, terms, 1, input blocks, *entry of wgt].

        A piece of an entry is `block_out` neighbouring pixels of a channel group of w. Those of the first terms are
        padding, see `ActivationGemm.window`. Channel groups beyond the last that fill an entry are 0. If x has such
        groups, too, they add nothing (`columns_multiple`), and the last group of w stands in their place.
        """
        cfg, before, w_act = self.cfg, len(product.w_pads), product.w
        pieces, groups = cfg.inp_pieces, w_act.groups(cfg)
        is_zero = not before and self.layer.x.groups(cfg) % pieces > 0
        grid = ActivationGrid.of(cfg, w_act, False).repeated(len(product.x_pads) + 1)
        w = self.add_activation(grid, "w", w_act.storage_groups - w_act.group_offset)

        def read(n: Expr, r: Expr, s: Expr, k: Expr, e: Expr, m: Expr, c: Expr) -> Expr:
            """Return the element for output channel m and channel c of input group k * pieces + e, or the padding."""
            row, group = r - before, k * pieces + e
            if groups % pieces and not is_zero:
                group = minimum(group, groups - 1)
            value = w[0, group, row, n * cfg.block_out + m, 0, c]
            if before:
                return select(row >= 0, value, self.add_scalar("w_pad", "int8", product.w_pads[0]))
            return select(group < groups, value, self.add_scalar("w_pad", "int8", 0)) if is_zero else value

        shape = (self.blocks, *self.window.kernel, self.input_blocks, *tile_shape(cfg, "wgt"))
        return compute(shape, read, f"weights{self.suffix}", axes=("n", "r", "s", "k", "e", "m", "c"))

    def _make_product_stage(self, on_chip: Tensor, run: pack.WeightRun, weights: Tensor) -> tuple[BlockStage, Workload]:
        """Return the expression of a product on GEMM of `on_chip` and weights, with the Workload that is tiled for it.

        It serves constant weights, [blocks, input blocks, *kernel, *entry of wgt], and those that are activations,
        [blocks, *kernel, input blocks, *entry]; [1, 1, 1, 1, *entry] if all products are by one entry. run: which input
        blocks an output block reads: `share` output blocks in a row read the same ones, and the next begin `step` input
        blocks later.
        """
        cfg, w = self.cfg, self.window
        q, g = cfg.inp_pieces, cfg.group
        k, r, s = reduce_axis(run.inputs, "k"), reduce_axis(w.kernel[0], "r"), reduce_axis(w.kernel[1], "s")
        e, c = reduce_axis(q, "e"), reduce_axis(g, "c")
        one_weight = self.layer.sums_on_gemm

        def product(i: Expr, n: Expr, y: Expr, x: Expr, piece: Expr, b: Expr, m: Expr) -> Expr:
            row = y if w.kernel[0] == 1 else y * w.strides[0] + r * w.dilations[0]
            value = on_chip[
                i, n // run.share * run.step + k, row, x * w.strides[1] + s * w.dilations[1], e, b, c
            ].astype("int32")
            entry = (0, 0, 0, 0) if one_weight else (n, k, r, s) if weights.body is None else (n, r, s, k)
            weight = weights[*entry, e, piece * g + m, c].astype("int32")
            return sum(weight * value, (k, r, s, e, c))  # weights first, since loads are emitted in this order

        names = ("image", "block", "row", "column", "piece", "b", "m")
        shape_y = (self.y.images, self.blocks, self.y.rows, self.y.columns, *tile_shape(cfg, "acc"))
        acc = compute(shape_y, product, f"acc{self.suffix}", axes=names)
        operation = VectorOp.of(self.layer, "acc")
        par, table = self._add_parameters(), self._add_table()
        workload = Workload(
            w, self.y.images, self.y.rows, self.y.columns, self.blocks, run.inputs, operation.residual,
            run.step, run.share if run.step else 1, apart=self.matrix and self.y.columns > 1, sum_bytes=self.sum_bytes,
            one_weight=one_weight,
        )  # fmt: skip
        return BlockStage(
            operation, on_chip, "inp", acc, weights, par=par, table=table, b=self._make_operand()
        ), workload

    def make_depthwise_stage(self, on_chip: Tensor) -> tuple[BlockStage, Workload]:
        """Make the stage of a depthwise convolution on the vector unit: each channel has weights of its own."""
        assert self.layer.gemm is not None
        steps, _ = pack.tap_steps(self.cfg, self.window)
        shape = (self.blocks, self.window.kernel[0], steps, *tile_shape(self.cfg, "tap"))
        taps = self.add_constant(
            pack.arrange_taps(self.cfg, self.layer.gemm.weights, self.window), shape, "int8", "taps"
        )
        operation = replace(VectorOp.of(self.layer, "vin"), reduce="sum", taps=True)
        stage = BlockStage(operation, on_chip, "vin", taps=taps, par=self._add_parameters(), table=self._add_table())
        return stage, self.vector_workload("vin", False, shape[1] * shape[2])

    def make_vector_stage(self, on_chip: Tensor, scope: str) -> BlockStage:
        """Make the stage of a pooling, a map or a multiplication over `on_chip`, in `scope`."""
        par, b = self._add_parameters(), self._make_operand()
        return BlockStage(VectorOp.of(self.layer, scope), on_chip, scope, par=par, b=b, table=self._add_table())

    def make_following_stage(self, earlier_result: Tensor) -> BlockStage:
        """Make the stage of a map that follows another pass in the same tile.

        earlier_result: the result of that pass, in vin. It is x of the map, or operand B if the map adds x to it.
        """
        if self.layer.epilogue.residual is None:
            return self.make_vector_stage(earlier_result, "vin")
        on_chip = self.make_input("acc", self.blocks, 0)
        return BlockStage(VectorOp.of(self.layer, "acc"), on_chip, "acc", table=self._add_table(), b=earlier_result)

    def vector_workload(self, scope: str, has_b: bool, sums: int = 0) -> Workload:
        """Return the workload of a layer that the vector unit computes, such as a pooling or a depthwise convolution.

        has_b: whether it has an operand B. sums: steps in which the vector unit computes an entry of the output, if it
        adds up windows; else 0.
        """
        y, weighted = self.y, self.layer.gemm is not None
        return Workload(
            self.window, y.images, y.rows, y.columns, self.blocks, 0, has_b, 1, 1, scope, self.extra_columns, sums,
            weighted,
        )  # fmt: skip


class ImageSumsLowering(LayerLowering):
    """Lowers sums of whole images on GEMM, see `Layer.sums_on_gemm`.

    A group of channels of an image fits no scratchpad. So it is an image of its own here, and parts of its pixels are
    its groups: x, [images, groups, rows, columns], is read as [images * groups, parts, 1, pixels of a part], and y,
    [images, groups, 1, 1], is written as [images * groups, 1, 1, 1].
    """

    def __init__(self, cfg: Config, layer: Layer) -> None:
        x, y, part = layer.x, layer.y, pixels_of_part(cfg, layer.x, layer.y)
        if part is None:
            raise TilingError("the pixels of its images cannot be cut into equal parts")
        images, parts, piece = x.batches(cfg) * x.groups(cfg), x.height * x.width // part, cfg.piece_bytes
        x_form = Activation(x.name, images * cfg.batch, parts * cfg.group, 1, part, Storage(x.name, parts))
        y_form = Activation(y.name, images * cfg.batch, cfg.group, 1, 1, Storage(y.name, 1))
        form = replace(layer, x=x_form, y=y_form, window=Window((1, part)), reduce="")
        super().__init__(cfg, form, False, 0, 1)
        x_offset, y_offset = (ActivationGrid.of(cfg, act, False).offset for act in (x, y))
        self.x = ActivationGrid(x, images, 1, part, (parts * part * piece, part * piece, 0, piece), x_offset)
        self.y = ActivationGrid(y, images, 1, 1, (piece, 0, 0, 0), y_offset)

    def lower_image_sums(self) -> LayerComputation:
        """Lower the layer as a product by identity matrices, all of which are one entry of wgt."""
        cfg, group = self.cfg, self.cfg.group
        on_chip = self.make_input("inp", self.input_blocks, 0)
        entry = np.zeros(tile_shape(cfg, "wgt"), np.uint8)
        entry[:, :group] = np.eye(group, dtype=np.uint8)
        weights = self.add_constant(entry.reshape(-1), (1, 1, 1, 1, *entry.shape), "int8", "weights")
        run = pack.WeightRun(0, 1, 0, self.input_blocks, 0, 1, 0)
        return self.finish_computation(*self._make_product_stage(on_chip, run, weights))


MIN_PART = 16
"""Least pixels of a part of an image whose pixels GEMM adds up; an instruction for fewer costs more than it does."""


def pixels_of_part(cfg: Config, x: Activation, y: Activation) -> int | None:
    """Return how many pixels of `x` GEMM reads at a time where it adds up whole images; None if it cannot.

    All parts have equally many pixels, at least MIN_PART. Where the pixels can be cut so, several parts fit inp at a
    time, and the tiling chooses how many of them GEMM takes (k).
    """
    for act in (x, y):
        if act.strided_view is not None or (act.batches(cfg) > 1 and act.storage_groups != act.groups(cfg)):
            return None
    pixels, room = x.height * x.width, depths(cfg)["inp"]
    counts = range(cfg.inp_pieces, pixels // MIN_PART + 1, cfg.inp_pieces)
    equal = [pixels // parts for parts in counts if pixels % parts == 0]
    sizes = [size for size in equal if size <= min(room // 2, EXTENT_MAX)]
    return next((size for size in sizes if size <= room // 8), sizes[-1] if sizes else None)


def window_of(layer: Layer) -> Window:
    """Return the window over x of the sums of `layer`; that of a product of activations has rows for zero points."""
    return layer.window if layer.product is None else layer.product.window


def _range_conditions(index: Expr, size: int, count: int, step: int, before: int) -> list[Expr]:
    """Return the conditions for 0 <= `index` < `size` that can fail.

    index: i * step - before, for some i from 0 to count - 1.
    """
    tests = [index >= 0] if before > 0 else []
    if (count - 1) * step - before >= size:
        tests.append(index < size)
    return tests
