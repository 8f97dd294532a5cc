"""The tensors of one layer, in DRAM and in scratchpads; in one file as kinds of layers differ in a line or two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from celosia.compiler.expr import Axis, Expr, Tensor, Var, compute, is_float, placeholder, reduce_axis, select, sum
from celosia.compiler.expr.nest_parts import reduce_and
from celosia.compiler.expr.nodes import INDEX, Const, minimum
from celosia.compiler.layer import (
    Activation,
    ActivationProduct,
    Conv,
    Epilogue,
    Layer,
    Map,
    Multiply,
    Pool,
    Requantise,
    TilingError,
)
from celosia.compiler.tensorize import pack
from celosia.compiler.tensorize.definition import (
    ActivationGrid,
    Blob,
    BlockStage,
    LayerComputation,
    depthwise,
    window_of,
    within,
    zero_point,
)
from celosia.compiler.tensorize.intrinsics import PARAMETERS, Pass, tile_shape, vector_value
from celosia.compiler.tensorize.space import Problem
from celosia.compiler.tensorize.transfer import DramPlace
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Buffer, element_bytes

PLACES = ("image", "block", "row", "column", "piece", "b", "g")
"""The axes of what a vector unit reads and writes."""


class LayerLowering:
    """Makes the tensors of one layer, for `blocks` output blocks from `first` on.

    suffix: of the names of tensors and scalars, in a definition of several layers. before: the definer of the layer
    before, in the same definition.
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
        """Where a part of a block reads its input."""
        return "vin" if isinstance(self.layer, Pool | Map) or depthwise(self.cfg, self.layer) else "inp"

    @property
    def sum_bytes(self) -> int:
        """Bytes of each sum that leave as they are; 0 where sums are scaled."""
        return self.layer.sum_bytes if isinstance(self.layer, Conv) else 0

    @property
    def input_blocks(self) -> int:
        """Entries of `scope` for a pixel of x."""
        return pack.blocks(self.layer.x.channels, self.cfg.block_out if self.scope == "vin" else self.cfg.block_in)

    @property
    def skip(self) -> int:
        """Rows of x from one row in the scratchpad to the next: a kernel of one row skips those between."""
        return self.window.strides[0] if self.window.kernel[0] == 1 else 1

    @property
    def input_size(self) -> tuple[int, int]:
        """Rows and columns in the scratchpad."""
        w = self.window
        rows = self.y.rows if w.kernel[0] == 1 else (self.y.rows - 1) * w.strides[0] + w.reach(0)
        return rows, (self.y.columns - 1) * w.strides[1] + w.reach(1) + self.beyond

    @property
    def beyond(self) -> int:
        """Columns that a depthwise sum reads, with weights of zero, beyond its windows."""
        if self.scope == "inp" or not isinstance(self.layer, Conv):
            return 0
        steps, step = pack.tap_steps(self.cfg, self.window)
        return (steps - 1) * step + self.cfg.taps - self.window.reach(1)

    def inside(self, y: Expr, x: Expr) -> list[Expr]:
        """Tests that row `y` and column `x` of x exist, for those that the scratchpad has."""
        rows, columns = self.input_size
        top, left, _, _ = self.window.pads
        return within(y, self.x.rows, rows, self.skip, top) + within(x, self.x.columns, columns, 1, left)

    @property
    def pads(self) -> bool:
        """Whether windows reach beyond x."""
        return bool(self.inside(Var("y", INDEX), Var("x", INDEX)))

    # Tensors in DRAM ------------------------------------------------------------------------------------------

    def given(self, grid: ActivationGrid, name: str, groups: int, first: int = 0) -> Tensor:
        """An activation in DRAM, see `ActivationGrid.tensor`."""
        tensor, place = grid.tensor(self.cfg, name + self.suffix, groups, first)
        self.places[tensor] = place
        self.inputs.append(tensor)
        return tensor

    def constant(self, blob: Blob, shape: tuple[int, ...], dtype: str, name: str, offset: int = 0) -> Tensor:
        """`blob`, from byte `offset` on, as a tensor in DRAM."""
        tensor = placeholder(shape, dtype, name + self.suffix)
        size = tensor.nbytes // max(tensor.size, 1)
        strides = tuple(int(np.prod(shape[d + 1 :])) * size for d in range(len(shape)))
        self.places[tensor] = DramPlace(blob, offset, strides)
        self.inputs.append(tensor)
        return tensor

    def _parameters(self, requantise: Requantise) -> Tensor:
        blob = pack.parameters(self.cfg, requantise)
        shape = (self.blocks, self.cfg.block_out)
        return self.constant(blob, shape, "uint64", "par", self.first * self.cfg.block_out * 8)

    def looked_up(self, epilogue: Epilogue) -> Tensor | None:
        """The table of `epilogue`, where it has one."""
        if epilogue.table is None:
            return None
        return self.constant(epilogue.table.astype(np.int8).view(np.uint8), (1, len(epilogue.table)), "int8", "table")

    # Tensors in scratchpads -----------------------------------------------------------------------------------

    def near(self, scope: str, blocks: int, pad_value: int, first: int = 0) -> Tensor:
        """x in entries of `scope`, from group `first` on, with what the window reads beyond its borders.

        [images, blocks, rows, columns, *entry]. With a kernel of one row, the rows between strides are left out.
        """
        entry = tile_shape(self.cfg, scope)
        top, left, _, _ = self.window.pads
        rows, columns = self.input_size
        exist = self.layer.x.storage_groups - self.layer.x.group_offset
        x = self.given(self.x, "x", exist - first, first)
        last = x.shape[1] - 1

        def read(image: Expr, block: Expr, row: Expr, column: Expr, piece: Expr, b: Expr, k: Expr) -> Expr:
            group = block * entry[0] + piece
            if blocks * entry[0] > last + 1:
                group = minimum(group, last)  # channels that no weight and no one else looks at
            y, c = row * self.skip - top, column - left
            value = x[image, group, y, c, b, k]
            value = value.astype("int32") if scope == "acc" else value
            inside = self.inside(y, c)
            return select(reduce_and(inside), value, self.scalar("pad", value.dtype, pad_value)) if inside else value

        names = ("image", "block", "row", "column", "piece", "b", "k")
        return compute((self.x.images, blocks, rows, columns, *entry), read, f"near{self.suffix}", axes=names)

    def scalar(self, name: str, dtype: str, value: float) -> Var:
        """A number that the loops do not depend on."""
        name += self.suffix
        self.scalars[name] = float(value) if is_float(dtype) else int(value)
        return self.variables.setdefault(name, Var(name, dtype))

    def other(self, act: Activation, matrix: bool) -> Tensor:
        """Operand B in entries of vin, [images, blocks, rows, columns, *entry]; one pixel where it has no more."""
        grid, entry = ActivationGrid.of(self.cfg, act, matrix), tile_shape(self.cfg, "vin")
        exist = act.storage_groups - act.group_offset - self.first * entry[0]
        source = self.given(grid, "b", exist, self.first * entry[0])

        def read(i: Expr, n: Expr, y: Expr, x: Expr, piece: Expr, b: Expr, g: Expr) -> Expr:
            group = n * entry[0] + piece
            if self.blocks * entry[0] > exist:
                group = minimum(group, exist - 1)
            return source[i, group, y, x, b, g]

        return compute(
            (grid.images, self.blocks, grid.rows, grid.columns, *entry), read, f"operand{self.suffix}", axes=PLACES
        )

    def vector(
        self, level: BlockStage, epilogue: Epilogue, values: dict[str, float], to: LayerLowering | None = None
    ) -> Tensor:
        """What the pass of `level` makes: out [images, blocks, rows, columns, *entry], or what `to` reads, padded."""
        made = self.passed(level, epilogue, values)
        if to is not None:
            return self._handed(made, to)
        shape = (self.y.images, self.blocks, self.y.rows, self.y.columns, *tile_shape(self.cfg, "out"))
        if level.vector.byte:
            every = (self.sum_bytes, *shape)
            return compute(every, lambda byte, *i: made(*i, byte=byte), "out", axes=("byte", *PLACES))
        return compute(shape, made, "out", axes=PLACES)

    def passed(self, level: BlockStage, epilogue: Epilogue, values: dict[str, float]) -> Callable[..., Expr]:
        """What the pass of `level` makes at [image, block, row, column, *entry]."""
        window = self._reduced(level.vector)
        values = {"lo": epilogue.clip[0], "hi": epilogue.clip[1], "clip_lo": epilogue.clip[0]} | values
        values["clip_hi"] = epilogue.clip[1]
        if (residual := epilogue.residual) is not None:
            scales = {"scale_v": residual.scale_v, "scale_b": residual.scale_b, "scale_c": residual.scale_c}
            values |= {**scales, "unit": 2.0**-residual.shift, "add_lo": residual.lo, "add_hi": residual.hi}

        def made(*index: Expr, byte: Expr | None = None) -> Expr:
            def parameter(name: str) -> Expr:
                return self.scalar(name, PARAMETERS[name], values[name]) if byte is None else byte

            return vector_value(level.vector, lambda name: self._read(level, name, window, index), parameter, window)

        return made

    def _reduced(self, p: Pass) -> tuple[Axis, ...]:
        """The axes over which a pass reduces its operand A."""
        kernel = self.window.kernel
        if p.taps:
            steps, _ = pack.tap_steps(self.cfg, self.window)
            return reduce_axis(kernel[0], "r"), reduce_axis(steps, "s"), reduce_axis(self.cfg.taps, "t")
        return (reduce_axis(kernel[0], "r"), reduce_axis(kernel[1], "s")) if p.reduce else ()

    def _read(self, level: BlockStage, name: str, window: tuple[Axis, ...], index: tuple[Expr, ...]) -> Expr:
        """The element of operand `name` of a pass for element `index` of its result."""
        i, n, y, x, piece, image, g = index
        if name == "a":
            a = level.near if level.acc is None else level.acc
            return a[i, n, *self._under(window, y, x), piece, image, g]
        channel = piece * self.cfg.group + g
        tile = {"par": level.par, "table": level.table, "tap": level.taps, "b": level.b}[name]
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

    def _under(self, window: tuple[Axis, ...], y: Expr, x: Expr) -> tuple[Expr, Expr]:
        """Row and column under a place of the window whose result is at y, x."""
        if not window:
            return y, x
        w = self.window
        rows = y if w.kernel[0] == 1 else y * w.strides[0] + window[0] * w.dilations[0]
        if len(window) == 2:
            return rows, x * w.strides[1] + window[1] * w.dilations[1]
        return rows, x * w.strides[1] + (window[1] * pack.tap_steps(self.cfg, w)[1] + window[2])

    def _handed(self, made: Callable[..., Expr], to: LayerLowering) -> Tensor:
        """What `to` reads of the elements that this layer has `made`, with padding around them."""
        top, left, _, _ = to.window.pads
        pieces = tile_shape(self.cfg, to.scope)[0] // tile_shape(self.cfg, "out")[0]

        def handed(i: Expr, n: Expr, row: Expr, column: Expr, piece: Expr, image: Expr, g: Expr) -> Expr:
            if pieces > 1:
                n, piece = n * pieces + piece, Const(0, INDEX)
                if to.input_blocks * pieces > self.blocks:
                    n = minimum(n, self.blocks - 1)  # no weight looks at it
            y, x = row * to.skip - top, column - left
            value, inside = made(i, n, y, x, piece, image, g), to.inside(y, x)
            if not inside:
                return value
            assert isinstance(to.layer, Conv | Pool)
            return select(reduce_and(inside), value, to.scalar("pad", "int8", to.layer.pad_value))

        shape = (self.y.images, to.input_blocks, *to.input_size, *tile_shape(self.cfg, to.scope))
        return compute(shape, handed, f"near{to.suffix}", axes=PLACES)

    def result(self, out: Tensor) -> Tensor:
        """y [images, groups, rows, columns, batch, group], of the groups that hold channels."""
        cfg, p, several = self.cfg, self.cfg.out_pieces, self.sum_bytes
        whole = self.layer.y.groups(cfg) // max(several, 1)
        groups = min(self.blocks * p, whole - self.first * p)
        shape = (self.y.images, groups, self.y.rows, self.y.columns, cfg.batch, cfg.group)
        names = ("image", "group", "row", "column", "b", "g")
        _, place = self.y.tensor(cfg, "y", groups, self.first * p)
        if several:
            every = lambda byte, i, n, r, c, b, g: out[byte, i, n // p, r, c, n % p, b, g]  # noqa: E731
            y = compute((several, *shape), every, "y", axes=("byte", *names))
            place = replace(place, strides=(whole * self.y.strides[1], *place.strides))
        else:
            y = compute(shape, lambda i, n, r, c, b, g: out[i, n // p, r, c, n % p, b, g], "y", axes=names)
        self.places[y] = place
        return y

    # Layers ---------------------------------------------------------------------------------------------------

    def convolution(self, layer: Conv, run: pack.WeightRun, stored: pack.StoredWeights) -> LayerComputation:
        """One run of output blocks."""
        epilogue = layer.epilogue
        near = self.near("inp", run.step * ((run.blocks - 1) // run.share) + run.inputs, layer.pad_value,
                         run.input * self.cfg.inp_pieces)  # fmt: skip
        level, problem = self.products(layer, near, run, stored)
        return self.definition(self.added(level, epilogue), problem, epilogue, zero_point(layer))

    def level(self, layer: Conv | Pool, near: Tensor) -> tuple[BlockStage, Problem]:
        """A convolution of one run, a depthwise one, or a pooling, on the input `near`."""
        if isinstance(layer, Pool):
            kernel = layer.window.kernel
            level = replace(self.pooled(layer, near), table=self.looked_up(layer.epilogue))
            return level, self.problem("vin", False, kernel[0] * kernel[1])
        if self.scope == "vin":
            return self.sums(layer, near)
        run = pack.runs(self.cfg, layer)[0]
        level, problem = self.products(layer, near, run, pack.stored_weights(self.cfg, layer))
        return self.added(level, layer.epilogue), problem

    def products(
        self, layer: Conv, near: Tensor, run: pack.WeightRun, stored: pack.StoredWeights
    ) -> tuple[BlockStage, Problem]:
        """Products of gemm."""
        cfg, w = self.cfg, self.window
        taps = w.kernel[0] * w.kernel[1]
        shape = (run.blocks, run.inputs, *w.kernel, cfg.block_out, cfg.block_in)
        entry = element_bytes(cfg, Buffer.WGT, expand=stored.packed)
        first = stored.first + run.weights * taps * entry
        weights = self.constant(stored.data, shape, "int8", "weights", first)
        if stored.packed:  # a value has no bytes of its own
            place, entries = self.places[weights], shape[1:4]
            strides = (*(int(np.prod(entries[d:])) * entry for d in range(4)), 0, 0)
            self.places[weights] = replace(place, strides=strides, book_bytes=stored.book_bytes)
        level, problem = self._gemm(layer, near, run, weights, layer.requantise)
        return level, replace(problem, packed=stored.packed)

    def product(self, layer: ActivationProduct) -> LayerComputation:
        """A product of two activations. TilingError where a block of outputs is no entry of wgt as it lies in DRAM."""
        cfg, epilogue = self.cfg, layer.epilogue
        if (cfg.batch, cfg.block_in) != (1, cfg.block_out):
            raise TilingError("a product of two activations needs batch = 1 and block_in = block_out")
        self.x = self.x.repeated(len(layer.w_pads) + 1)
        near = self.near("inp", self.input_blocks, layer.pad_value)
        run = pack.WeightRun(0, self.blocks, 0, self.input_blocks, 0, self.blocks, 0)
        weights = self._activation_weights(layer)
        level, problem = self._gemm(layer, near, run, weights, layer.parameters(cfg))
        return self.definition(self.added(level, epilogue), problem, epilogue, zero_point(layer))

    def _activation_weights(self, layer: ActivationProduct) -> Tensor:
        """[blocks, input blocks, places, 1, block_out, block_in]: entries of wgt are neighbouring pixels of w; those of
        the first places are padding."""
        cfg, before = self.cfg, len(layer.w_pads)
        grid = ActivationGrid.of(cfg, layer.w, False).repeated(len(layer.x_pads) + 1)
        w = self.given(grid, "w", layer.w.storage_groups - layer.w.group_offset)

        def read(n: Expr, k: Expr, r: Expr, s: Expr, m: Expr, c: Expr) -> Expr:
            row = r - before
            value = w[0, k, row, n * cfg.block_out + m, 0, c]
            return select(row >= 0, value, self.scalar("w_pad", "int8", layer.w_pads[0])) if before else value

        shape = (self.blocks, self.input_blocks, *self.window.kernel, cfg.block_out, cfg.block_in)
        return compute(shape, read, f"weights{self.suffix}", axes=("n", "k", "r", "s", "m", "c"))

    def _gemm(
        self, layer: Conv | ActivationProduct, near: Tensor, run: pack.WeightRun, weights: Tensor, scale: Requantise
    ) -> tuple[BlockStage, Problem]:
        """Sums of gemm over `near` and `weights` [blocks, input blocks, *kernel, block_out, block_in]."""
        cfg, w, epilogue = self.cfg, self.window, layer.epilogue
        q, g = cfg.inp_pieces, cfg.group
        k, r, s = reduce_axis(run.inputs, "k"), reduce_axis(w.kernel[0], "r"), reduce_axis(w.kernel[1], "s")
        e, c = reduce_axis(q, "e"), reduce_axis(g, "c")

        def product(i: Expr, n: Expr, y: Expr, x: Expr, piece: Expr, b: Expr, m: Expr) -> Expr:
            row = y if w.kernel[0] == 1 else y * w.strides[0] + r * w.dilations[0]
            value = near[i, n // run.share * run.step + k, row, x * w.strides[1] + s * w.dilations[1], e, b, c].astype(
                "int32"
            )
            weight = weights[n, k, r, s, piece * g + m, e * g + c].astype("int32")
            return sum(weight * value, (k, r, s, e, c))  # weights first: they are loaded in this order

        names = ("image", "block", "row", "column", "piece", "b", "m")
        shape_y = (self.y.images, self.blocks, self.y.rows, self.y.columns, *tile_shape(cfg, "acc"))
        acc = compute(shape_y, product, f"acc{self.suffix}", axes=names)
        p = Pass("acc", "", False, True, epilogue.table is not None, epilogue.residual is not None)
        p = Pass("acc", byte=True) if self.sum_bytes else p
        par, table = None if p.byte else self._parameters(scale), self.looked_up(epilogue)
        problem = Problem(
            w, self.y.images, self.y.rows, self.y.columns, self.blocks, run.inputs, epilogue.residual is not None,
            run.step, run.share if run.step else 1, apart=self.matrix and self.y.columns > 1, sum_bytes=self.sum_bytes,
        )  # fmt: skip
        return BlockStage(p, near, "inp", acc, weights, None, par, table), problem

    def sums(self, layer: Conv, near: Tensor) -> tuple[BlockStage, Problem]:
        """Products of the vector unit, each channel with weights of its own."""
        steps, _ = pack.tap_steps(self.cfg, self.window)
        shape = (self.blocks, self.window.kernel[0], steps, *tile_shape(self.cfg, "tap"))
        taps = self.constant(pack.taps(self.cfg, layer), shape, "int8", "taps")
        p = Pass("vin", "sum", False, True, layer.epilogue.table is not None, taps=True)
        par, table = self._parameters(layer.requantise), self.looked_up(layer.epilogue)
        return BlockStage(p, near, "vin", None, None, taps, par, table), self.problem("vin", False, shape[1] * shape[2])

    def problem(self, scope: str, two: bool, sums: int = 0) -> Problem:
        """That of a layer which gemm has nothing to do with. two: it has an operand B."""
        y, weighted = self.y, isinstance(self.layer, Conv)
        return Problem(
            self.window, y.images, y.rows, y.columns, self.blocks, 0, two, 1, 1, scope, self.beyond, sums, weighted
        )

    def depthwise(self, layer: Conv) -> LayerComputation:
        """Lower a depthwise convolution. TilingError."""
        level, problem = self.sums(layer, self.near("vin", self.blocks, layer.pad_value))
        return self.definition(level, problem, layer.epilogue, zero_point(layer))

    def definition(
        self, level: BlockStage, problem: Problem, epilogue: Epilogue, values: dict[str, float]
    ) -> LayerComputation:
        """The definition of a layer that is no block."""
        out = self.vector(level, epilogue, values)
        y = self.result(out)
        return LayerComputation(problem, (level,), out, y, tuple(self.inputs), self.places, self.scalars)

    def added(self, level: BlockStage, epilogue: Epilogue) -> BlockStage:
        """`level` with the operand of the residual, where there is one."""
        residual = epilogue.residual
        return level if residual is None else replace(level, b=self.other(residual.operand, self.matrix))

    def pool(self, layer: Pool) -> LayerComputation:
        """Lower a pooling. TilingError with a residual."""
        if layer.epilogue.residual is not None:
            raise TilingError("a pooling and its residual both need vin")
        level = self.pooled(layer, self.near("vin", self.blocks, layer.pad_value))
        return self._simple(level, layer.epilogue, zero_point(layer))

    def pooled(self, layer: Pool, near: Tensor) -> BlockStage:
        """The level of a pooling whose input is `near`."""
        kind = "max" if layer.requantise is None else "sum"
        p = Pass("vin", kind, False, layer.requantise is not None, layer.epilogue.table is not None)
        return BlockStage(p, near, "vin", par=None if layer.requantise is None else self._parameters(layer.requantise))

    def map(self, layer: Map | Multiply) -> LayerComputation:
        """Lower a layer that works element by element. TilingError where both operands need vin."""
        product, residual = isinstance(layer, Multiply), layer.epilogue.residual
        if product and residual is not None:
            raise TilingError("a multiplication and its residual both need vin")
        two = product or residual is not None
        near = self.near("acc" if two else "vin", self.blocks, 0)
        p = Pass("acc" if two else "vin", "", product, product, layer.epilogue.table is not None, residual is not None)
        level = BlockStage(p, near, "acc" if two else "vin")
        if not isinstance(layer, Multiply):
            return self._simple(self.added(level, layer.epilogue), layer.epilogue, {})
        values = {"a_offset": layer.x_offset, "b_offset": layer.b_offset} | zero_point(layer)
        par = self._parameters(layer.requantise)
        pixels = layer.b.height * layer.b.width == 1 and layer.x.height * layer.x.width > 1
        b = self.other(layer.b, self.matrix and not pixels)
        return self._simple(replace(level, par=par, b=b), layer.epilogue, values)

    def behind(self, layer: Map, handed: Tensor) -> BlockStage:
        """A map of what a pass before it in the same tile has `handed` on, in vin: of that, or with it as operand B."""
        p = Pass("vin", lookup=layer.epilogue.table is not None)
        if layer.epilogue.residual is None:
            return BlockStage(p, handed, "vin", table=self.looked_up(layer.epilogue))
        p = replace(p, source="acc", residual=True)
        return BlockStage(p, self.near("acc", self.blocks, 0), "acc", table=self.looked_up(layer.epilogue), b=handed)

    def _simple(self, level: BlockStage, epilogue: Epilogue, values: dict[str, float]) -> LayerComputation:
        level = replace(level, table=self.looked_up(epilogue))
        return self.definition(level, self.problem(level.scope, level.b is not None), epilogue, values)
