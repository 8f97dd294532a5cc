"""What each layer computes, as tensor expressions over activations in blocks of channels.

Every layer has the same shape: `near` brings its input, padded, into a scratchpad; a convolution sums products in
`acc`; `out` is one pass of the vector unit; `y` puts the result into DRAM. What differs is written here once, and
templates.py says in which loops it runs.

A grouped convolution is one definition for each run of output blocks whose input blocks advance evenly.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.expr import Axis, Expr, Tensor, Var, compute, is_float, placeholder, reduce_axis, select, sum
from celosia.compiler.expr.lower import reduce_and
from celosia.compiler.expr.nodes import minimum, walk
from celosia.compiler.layer import (
    Activation,
    Conv,
    Epilogue,
    Layer,
    Map,
    Multiply,
    Pool,
    Requantise,
    Untileable,
    Window,
)
from celosia.compiler.tensorize import pack
from celosia.compiler.tensorize.intrinsics import PARAMETERS, Pass, tile_shape, vector_value
from celosia.compiler.tensorize.space import Problem
from celosia.compiler.tensorize.transfer import Place
from celosia.hw.config import Config

Blob = NDArray[np.uint8]


@dataclass(frozen=True)
class Grid:
    """An activation as images x groups x rows x columns of pieces.

    Where every image is one pixel (a matrix), the images become the columns of a single row, so that a tile can hold
    many of them; `matrix` must then hold for all sides of a layer.
    """

    act: Activation
    images: int
    rows: int
    columns: int
    strides: tuple[int, int, int, int]
    offset: int

    @staticmethod
    def of(cfg: Config, act: Activation, matrix: bool) -> Grid:
        piece = cfg.piece_bytes
        plane = act.height * act.width * piece
        image, offset = act.storage_groups * plane, act.group_offset * plane
        if matrix:
            return Grid(act, 1, 1, act.batches(cfg), (0, plane, 0, image), offset)
        strides = (image, plane, act.width * piece, piece)
        return Grid(act, act.batches(cfg), act.height, act.width, strides, offset)

    def tensor(self, cfg: Config, name: str, groups: int, first: int = 0) -> tuple[Tensor, Place]:
        """[images, groups, rows, columns, batch, group] from group `first` on."""
        shape = (self.images, groups, self.rows, self.columns, cfg.batch, cfg.group)
        strides = (*self.strides, cfg.group, 1)
        offset = self.offset + first * self.strides[1]
        return placeholder(shape, "int8", name), Place(self.act.storage, offset, strides)


@dataclass(frozen=True)
class Definition:
    """Tensors of (a part of) a layer.

    near [images, blocks, rows, columns, *entry]: x where the layer reads it, in `near_scope`. acc, out [images, blocks,
    rows, columns, *entry]. y [images, groups, rows, columns, batch, group]: in DRAM, `groups` of it exist. b: operand
    B, in vin. inputs: what lies in DRAM; places says where. scalars: numbers by name, of which no loop depends.
    """

    problem: Problem
    vector: Pass
    near: Tensor
    near_scope: str
    out: Tensor
    y: Tensor
    inputs: tuple[Tensor, ...]
    places: Mapping[Tensor, Place]
    acc: Tensor | None = None
    weights: Tensor | None = None
    par: Tensor | None = None
    table: Tensor | None = None
    b: Tensor | None = None
    scalars: Mapping[str, float] = field(default_factory=dict)

    @property
    def variables(self) -> tuple[Var, ...]:
        """The scalars, as they occur in the expressions."""
        bodies = [t.body for t in (self.near, self.acc, self.out, self.y) if t is not None and t.body is not None]
        found = (n for body in bodies for n in walk(body) if isinstance(n, Var) and not isinstance(n, Axis))
        return tuple(dict.fromkeys(found))

    @property
    def signature(self) -> Hashable:
        """Equal for definitions whose loops are the same, wherever their arrays lie and whatever their scalars are."""
        arrays = (*self.inputs, self.y)
        near = str(self.near.body)  # with the padding that it has
        return self.problem, self.vector, near, tuple((t.name, t.shape, self.places[t].strides) for t in arrays)


def define(cfg: Config, layer: Layer) -> list[Definition]:
    """The definitions of `layer`, which together compute it. Untileable where none can."""
    return list(_definitions(cfg, layer))


def _definitions(cfg: Config, layer: Layer) -> Iterator[Definition]:
    acts = [layer.x, layer.y]
    window = layer.window if isinstance(layer, Conv | Pool) else Window((1, 1))
    matrix = all(act.height * act.width == 1 for act in acts) and window.pointwise
    if isinstance(layer, Conv):
        parts = pack.weights(cfg, layer)
        for run in pack.runs(cfg, layer):
            yield _Definer(cfg, layer, matrix, window, run.first, run.blocks).convolution(layer, run, parts)
        return
    blocks = pack.blocks(layer.y.channels, cfg.block_out)
    definer = _Definer(cfg, layer, matrix, window, 0, blocks)
    yield definer.pool(layer) if isinstance(layer, Pool) else definer.map(layer)


class _Definer:
    """Makes the tensors of one definition, for `blocks` output blocks from `first` on."""

    def __init__(self, cfg: Config, layer: Layer, matrix: bool, window: Window, first: int, blocks: int) -> None:
        self.cfg, self.layer, self.matrix, self.window = cfg, layer, matrix, window
        self.first, self.blocks = first, blocks
        self.x, self.y = Grid.of(cfg, layer.x, matrix), Grid.of(cfg, layer.y, matrix)
        self.places: dict[Tensor, Place] = {}
        self.inputs: list[Tensor] = []
        self.scalars: dict[str, float] = {}
        self.variables: dict[str, Var] = {}

    # Tensors in DRAM ------------------------------------------------------------------------------------------

    def _given(self, grid: Grid, name: str, groups: int, first: int = 0) -> Tensor:
        tensor, place = grid.tensor(self.cfg, name, groups, first)
        self.places[tensor] = place
        self.inputs.append(tensor)
        return tensor

    def _constant(self, blob: Blob, shape: tuple[int, ...], dtype: str, name: str, offset: int = 0) -> Tensor:
        tensor = placeholder(shape, dtype, name)
        size = tensor.nbytes // max(tensor.size, 1)
        strides = tuple(int(np.prod(shape[d + 1 :])) * size for d in range(len(shape)))
        self.places[tensor] = Place(blob, offset, strides)
        self.inputs.append(tensor)
        return tensor

    def _parameters(self, requantise: Requantise) -> Tensor:
        blob = pack.parameters(self.cfg, requantise)
        shape = (self.blocks, self.cfg.block_out)
        return self._constant(blob, shape, "uint64", "par", self.first * self.cfg.block_out * 8)

    def _table(self, epilogue: Epilogue) -> Tensor | None:
        if epilogue.table is None:
            return None
        return self._constant(epilogue.table.astype(np.int8).view(np.uint8), (1, len(epilogue.table)), "int8", "table")

    # Tensors in scratchpads -----------------------------------------------------------------------------------

    def near(self, scope: str, blocks: int, pad_value: int, first: int = 0) -> Tensor:
        """x in entries of `scope`, from group `first` on, with what the window reads beyond its borders.

        [images, blocks, rows, columns, *entry]. With a kernel of one row, the rows between strides are left out.
        """
        cfg, w = self.cfg, self.window
        entry = tile_shape(cfg, scope)
        top, left, _, _ = w.pads
        skip = w.strides[0] if w.kernel[0] == 1 else 1
        rows = self.y.rows if skip > 1 or w.kernel[0] == 1 else (self.y.rows - 1) * w.strides[0] + w.reach(0)
        columns = (self.y.columns - 1) * w.strides[1] + w.reach(1)
        exist = self.layer.x.storage_groups - self.layer.x.group_offset
        x = self._given(self.x, "x", exist - first, first)
        last = x.shape[1] - 1

        def read(image: Expr, block: Expr, row: Expr, column: Expr, piece: Expr, b: Expr, k: Expr) -> Expr:
            group = block * entry[0] + piece
            if blocks * entry[0] > last + 1:
                group = minimum(group, last)  # channels that no weight and no one else looks at
            y, c = row * skip - top, column - left
            value = x[image, group, y, c, b, k]
            value = value.astype("int32") if scope == "acc" else value
            inside = _within(y, self.x.rows, rows, skip, top) + _within(c, self.x.columns, columns, 1, left)
            return select(reduce_and(inside), value, self.scalar("pad", value.dtype, pad_value)) if inside else value

        names = ("image", "block", "row", "column", "piece", "b", "k")
        return compute((self.x.images, blocks, rows, columns, *entry), read, "near", axes=names)

    def scalar(self, name: str, dtype: str, value: float) -> Var:
        """A number that the loops do not depend on."""
        self.scalars[name] = float(value) if is_float(dtype) else int(value)
        return self.variables.setdefault(name, Var(name, dtype))

    def other(self, act: Activation, matrix: bool) -> Tensor:
        """Operand B in entries of vin, [images, blocks, rows, columns, *entry]; one pixel where it has no more."""
        grid, entry = Grid.of(self.cfg, act, matrix), tile_shape(self.cfg, "vin")
        exist = act.storage_groups - act.group_offset - self.first * entry[0]
        source = self._given(grid, "b", exist, self.first * entry[0])

        def read(i: Expr, n: Expr, y: Expr, x: Expr, piece: Expr, b: Expr, g: Expr) -> Expr:
            group = n * entry[0] + piece
            if self.blocks * entry[0] > exist:
                group = minimum(group, exist - 1)
            return source[i, group, y, x, b, g]

        names = ("image", "block", "row", "column", "piece", "b", "g")
        return compute((grid.images, self.blocks, grid.rows, grid.columns, *entry), read, "operand", axes=names)

    def vector(
        self, p: Pass, a: Tensor, epilogue: Epilogue, values: dict[str, float], **tiles: Tensor | None
    ) -> Tensor:
        """out [images, blocks, rows, columns, *entry]; a: what it is made of, acc or near."""
        cfg, w = self.cfg, self.window
        window = (reduce_axis(w.kernel[0], "r"), reduce_axis(w.kernel[1], "s")) if p.reduce else ()
        r = epilogue.residual
        values = {"lo": epilogue.clip[0], "hi": epilogue.clip[1], "clip_lo": epilogue.clip[0]} | values
        values["clip_hi"] = epilogue.clip[1]
        if r is not None:
            scales = {"scale_v": r.scale_v, "scale_b": r.scale_b, "scale_c": r.scale_c, "unit": 2.0**-r.shift}
            values |= {**scales, "add_lo": r.lo, "add_hi": r.hi}

        def element(i: Expr, n: Expr, y: Expr, x: Expr, piece: Expr, b: Expr, g: Expr) -> Expr:
            def operand(name: str) -> Expr:
                if name == "a":
                    if not window:
                        return a[i, n, y, x, piece, b, g]
                    dy, dx = (axis * step for axis, step in zip(window, w.dilations))
                    rows = y if w.kernel[0] == 1 else y * w.strides[0] + dy
                    return a[i, n, rows, x * w.strides[1] + dx, piece, b, g]
                tile = tiles[name]
                assert tile is not None
                if name == "par":
                    return tile[n, piece * cfg.group + g]
                if name == "table":
                    return tile[0, 0]
                pixel = (y, x) if tile.shape[2:4] == (self.y.rows, self.y.columns) else (0, 0)
                return tile[i, n, *pixel, piece, b, g]

            return vector_value(p, operand, lambda name: self.scalar(name, PARAMETERS[name], values[name]), window)

        names = ("image", "block", "row", "column", "piece", "b", "g")
        shape = (self.y.images, self.blocks, self.y.rows, self.y.columns, *tile_shape(cfg, "out"))
        return compute(shape, element, "out", axes=names)

    def result(self, out: Tensor) -> Tensor:
        """y [images, groups, rows, columns, batch, group], of the groups that hold channels."""
        cfg, p = self.cfg, self.cfg.out_pieces
        groups = min(self.blocks * p, self.layer.y.groups(cfg) - self.first * p)
        shape = (self.y.images, groups, self.y.rows, self.y.columns, cfg.batch, cfg.group)
        names = ("image", "group", "row", "column", "b", "g")
        y = compute(shape, lambda i, n, r, c, b, g: out[i, n // p, r, c, n % p, b, g], "y", axes=names)
        _, self.places[y] = self.y.tensor(cfg, "y", groups, self.first * p)
        return y

    # Layers ---------------------------------------------------------------------------------------------------

    def convolution(self, layer: Conv, run: pack.Run, parts: Blob) -> Definition:
        cfg, w, epilogue = self.cfg, self.window, layer.epilogue
        q, g = cfg.inp_pieces, cfg.group
        held = run.step * ((run.blocks - 1) // run.share) + run.inputs
        near = self.near("inp", held, layer.pad_value, run.input * q)
        taps = w.kernel[0] * w.kernel[1]
        shape = (run.blocks, run.inputs, *w.kernel, cfg.block_out, cfg.block_in)
        weights = self._constant(parts, shape, "int8", "weights", run.weights * taps * cfg.wgt_bytes)
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
        acc = compute(shape_y, product, "acc", axes=names)
        p = Pass("acc", "", False, True, epilogue.table is not None, epilogue.residual is not None)
        par, table = self._parameters(layer.requantise), self._table(epilogue)
        b = None if epilogue.residual is None else self.other(epilogue.residual.operand, self.matrix)
        values: dict[str, float] = {"zero_point": layer.requantise.zero_point}
        out = self.vector(p, acc, epilogue, values, par=par, table=table, b=b)
        problem = Problem(
            w, self.y.images, self.y.rows, self.y.columns, self.blocks, run.inputs, b is not None, run.step,
            run.share if run.step else 1,
        )  # fmt: skip
        y = self.result(out)
        return Definition(
            problem, p, near, "inp", out, y, tuple(self.inputs), self.places, acc, weights, par, table, b, self.scalars
        )  # fmt: skip

    def pool(self, layer: Pool) -> Definition:
        if layer.epilogue.residual is not None:
            raise Untileable("a pooling and its residual both need vin")
        near = self.near("vin", self.blocks, layer.pad_value)
        kind = "max" if layer.requantise is None else "sum"
        p = Pass("vin", kind, False, layer.requantise is not None, layer.epilogue.table is not None)
        par = None if layer.requantise is None else self._parameters(layer.requantise)
        values: dict[str, float] = {} if layer.requantise is None else {"zero_point": layer.requantise.zero_point}
        return self._simple(p, near, "vin", layer.epilogue, values, par, None)

    def map(self, layer: Map | Multiply) -> Definition:
        product, residual = isinstance(layer, Multiply), layer.epilogue.residual
        if product and residual is not None:
            raise Untileable("a multiplication and its residual both need vin")
        two = product or residual is not None
        near = self.near("acc" if two else "vin", self.blocks, 0)
        p = Pass("acc" if two else "vin", "", product, product, layer.epilogue.table is not None, residual is not None)
        values: dict[str, float] = {}
        par = b = None
        if isinstance(layer, Multiply):
            values = {"a_offset": layer.x_offset, "b_offset": layer.b_offset}
            values["zero_point"] = layer.requantise.zero_point
            par = self._parameters(layer.requantise)
            pixels = layer.b.height * layer.b.width == 1 and layer.x.height * layer.x.width > 1
            b = self.other(layer.b, self.matrix and not pixels)
        elif residual is not None:
            b = self.other(residual.operand, self.matrix)
        return self._simple(p, near, "acc" if two else "vin", layer.epilogue, values, par, b)

    def _simple(
        self, p: Pass, near: Tensor, scope: str, epilogue: Epilogue, values: dict[str, float],
        par: Tensor | None, b: Tensor | None,
    ) -> Definition:  # fmt: skip
        table = self._table(epilogue)
        out = self.vector(p, near, epilogue, values, par=par, table=table, b=b)
        y = self.result(out)
        problem = Problem(
            self.window, self.y.images, self.y.rows, self.y.columns, self.blocks, 0, b is not None, 1, 1, scope
        )  # fmt: skip
        return Definition(
            problem, p, near, scope, out, y, tuple(self.inputs), self.places, None, None, par, table, b, self.scalars
        )  # fmt: skip


def _within(index: Expr, size: int, count: int, step: int, before: int) -> list[Expr]:
    """Tests that `index`, i * step - before for i < count, is one of `size`; only those that can fail."""
    tests = [index >= 0] if before > 0 else []
    if (count - 1) * step - before >= size:
        tests.append(index < size)
    return tests
