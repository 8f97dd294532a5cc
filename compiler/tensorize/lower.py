"""Layers to instructions: the loops over tiles, whose bodies are the accelerator's intrinsics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.tensorize import pack
from celosia.compiler.tensorize.layer import (
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
from celosia.compiler.tensorize.tiling import PAD_MAX, Problem, Tiling, choose
from celosia.compiler.tensorize.transfer import Dim, Grid, transfer
from celosia.compiler.vthread.stream import Compute, Load, Stream
from celosia.hw.config import Config
from celosia.hw.isa import ASource, BinaryOp, BSource, Buffer, Destination, Opcode, ReduceOp

LOAD_PART_BEATS = 1024
"""A tile of activations is loaded in parts of about so many beats: a part can start once its own producers end."""


@dataclass
class Constants:
    """The constant part of DRAM under construction, from address `base`; equal blobs are stored once."""

    base: int
    parts: list[NDArray[np.uint8]] = field(default_factory=list)
    size: int = 0
    known: dict[bytes, int] = field(default_factory=dict)

    def place(self, blob: NDArray[np.uint8]) -> int:
        """DRAM address of `blob`, aligned to 64 bytes."""
        key = blob.tobytes()
        if key not in self.known:
            self.known[key] = self.base + self.size
            padded = np.zeros(-(-len(blob) // 64) * 64, np.uint8)
            padded[: len(blob)] = blob
            self.parts.append(padded)
            self.size += len(padded)
        return self.known[key]

    def data(self) -> NDArray[np.uint8]:
        return np.concatenate([*self.parts, np.zeros(0, np.uint8)])


def spans(size: int, step: int) -> Iterator[tuple[int, int]]:
    """(first, count) of consecutive parts of `step`."""
    for first in range(0, size, step):
        yield first, min(step, size - first)


@dataclass(frozen=True)
class Box:
    """A tile of output: blocks from n, rows from y, columns from x, of one image; each (first, count)."""

    image: int
    n: tuple[int, int]
    y: tuple[int, int]
    x: tuple[int, int]

    @property
    def pixels(self) -> int:
        return self.y[1] * self.x[1]

    @property
    def entries(self) -> int:
        return self.n[1] * self.pixels


class Tile(NamedTuple):
    """One iteration of a layer's tile loops: a virtual thread, see `Stream`.

    Rows count through all images of an activation: `needs` rows of the layer's x must be there before, `done` rows of
    its y are there afterwards.
    """

    needs: int
    done: int
    load: Load


class Lowering:
    """Turns layers into tiles, which emit their instructions into `stream`.

    addresses: DRAM address of each storage. Tiles emitted in order leave the stream a correct sequential program.
    """

    def __init__(self, cfg: Config, stream: Stream, constants: Constants, addresses: dict[str, int]) -> None:
        self.cfg, self.stream, self.constants, self.addresses = cfg, stream, constants, addresses
        self.following = False
        """Whether the rows that the tile reads are known to be there, though other rows are not."""

    def tiles(self, layer: Layer, rows_first: bool = False) -> list[Tile]:
        """The tiles of `layer` in order. Untileable where it does not fit the scratchpads.

        rows_first: rather complete the output row by row than channel by channel, if it costs next to nothing.
        """
        matrix = all(act.height * act.width == 1 for act in (layer.x, layer.y))
        if isinstance(layer, Conv):
            return self._conv(layer, matrix, rows_first)
        if isinstance(layer, Pool):
            return self._pool(layer, matrix)
        return self._elementwise(layer, matrix)

    # Shared pieces ----------------------------------------------------------------------------------------

    def _grid(self, act: Activation, matrix: bool) -> Grid:
        return Grid.of(self.cfg, act, self.addresses[act.storage], matrix)

    def _tables(self, epilogue: Epilogue) -> dict[str, int]:
        """Fields of the look-up of `epilogue`, its table loaded."""
        if epilogue.table is None:
            return {}
        blob = epilogue.table.astype(np.int8).view(np.uint8)
        key = blob.tobytes()
        slot = self.stream.find(self.stream.lut, key)
        if slot is None:
            slot = self.stream.take(self.stream.lut, 1, key)
            self._load_entries(Buffer.LUT, self.constants.place(blob), 1, slot)
        return {"lookup": 1, "table": slot}

    def _load_entries(self, buffer: Buffer, address: int, count: int, base: int) -> None:
        self.stream.add(
            Opcode.LOAD, buffer=buffer, dram_addr=address, x_size=count, y_size=1, z_size=1, sram_base=base, sram_x=1
        )

    def _parameters(self, requantise: Requantise, n: tuple[int, int]) -> int:
        """First entry of par for blocks `n` of `requantise`."""
        address = self.constants.place(pack.parameters(self.cfg, requantise))
        key = (address, n)
        slot = self.stream.find(self.stream.par, key)
        if slot is None:
            size = 8 * self.cfg.block_out
            slot = self.stream.take(self.stream.par, n[1], key)
            self._load_entries(Buffer.PAR, address + n[0] * size, n[1], slot)
        return slot

    def _load_block(
        self,
        buffer: Buffer,
        grid: Grid,
        act: Activation,
        image: int,
        blocks: tuple[int, int],
        rows: tuple[int, int, int],
        columns: tuple[int, int],
        base: int,
        pads: tuple[int, int, int, int] = (0, 0, 0, 0),
        pad_value: int = 0,
        widen: bool = False,
    ) -> None:
        """Load blocks x rows x columns of `act` as entries [block][row][column] from entry `base`.

        rows: (first, count, step); pads (top, left, bottom, right) surround what is read.
        """
        cfg = self.cfg
        if not self.following:
            self.stream.settle(act.storage)
        pieces = cfg.inp_pieces if buffer == Buffer.INP else cfg.out_pieces
        top, left, bottom, right = pads
        width = left + columns[1] + right
        height = top + rows[1] + bottom
        beats_per_block = max(1, rows[1] * columns[1] * cfg.piece_bytes // cfg.bus_bytes)
        step = max(1, LOAD_PART_BEATS // beats_per_block)
        for first, count in spans(blocks[1], step):
            for piece in range(pieces):
                group = (blocks[0] + first) * pieces + piece
                held = min(count, -(-(act.storage_groups - act.group_offset - group) // pieces))
                if held <= 0:  # the storage ends within the entry
                    continue
                address = grid.at(image, group, rows[0], columns[0])
                place = (base + first * height * width) * pieces + piece
                planes = Dim(held, pieces * grid.group, height * width * pieces if held > 1 else 0)
                lines = Dim(rows[1], rows[2] * grid.row, width * pieces)
                points = Dim(columns[1], grid.column, pieces)
                if any(pads):
                    if grid.column != cfg.piece_bytes:
                        raise Untileable("padding needs pixels that are neighbours in DRAM")
                    fields = {
                        "dram_addr": address, "dram_y": lines.dram, "dram_z": planes.dram,
                        "x_size": points.count, "y_size": lines.count, "z_size": planes.count,
                        "sram_base": place, "sram_x": points.sram, "sram_y": lines.sram, "sram_z": planes.sram,
                        "pad_top": top, "pad_bottom": bottom, "pad_left": left, "pad_right": right,
                        "pad_value": pad_value,
                    }  # fmt: skip
                else:
                    fields = transfer([planes, lines, points], cfg.piece_bytes, address, place)
                self.stream.add(Opcode.LOAD, buffer=buffer, widen=int(widen), **fields)

    def _store_box(self, grid: Grid, act: Activation, box: Box, base: int) -> None:
        """Store entries [block][row][column] from `base` of out as `box` of `act`."""
        pieces = self.cfg.out_pieces
        for piece in range(pieces):
            group = box.n[0] * pieces + piece
            held = min(box.n[1], -(-(act.groups(self.cfg) - group) // pieces))
            if held <= 0:
                continue
            dims = [
                Dim(held, pieces * grid.group, box.pixels * pieces),
                Dim(box.y[1], grid.row, box.x[1] * pieces),
                Dim(box.x[1], grid.column, pieces),
            ]
            address = grid.at(box.image, group, box.y[0], box.x[0])
            fields = transfer(dims, self.cfg.piece_bytes, address, base * pieces + piece)
            self.stream.add(Opcode.STORE, **fields)

    def _prepare(self, layer: Layer, matrix: bool, box: Box, requantise: Requantise | None) -> dict[str, int]:
        """Load what the vector instruction for `box` needs beside A; its fields but those of A and of the result."""
        epilogue = layer.epilogue
        fields: dict[str, int] = {
            "destination": Destination.OUT, "extent_n": box.n[1], "extent_y": box.y[1], "extent_x": box.x[1],
            "extent_r": 1, "extent_s": 1, "clip_lo": epilogue.clip[0], "clip_hi": epilogue.clip[1],
        }  # fmt: skip
        fields |= self._tables(epilogue)
        if requantise is not None:
            fields |= {"requantise": 1, "zero_point": requantise.zero_point, "par_n": 1}
            fields["par_base"] = self._parameters(requantise, box.n)
        if epilogue.residual is not None:
            r = epilogue.residual
            base = self.stream.take(self.stream.vin, box.entries)
            self._load_block(
                Buffer.VIN, self._grid(r.operand, matrix), r.operand, box.image, box.n, (*box.y, 1), box.x, base
            )
            fields |= {
                "b_source": BSource.VIN, "b_base": base, "b_n": box.pixels, "b_y": box.x[1], "b_x": 1, "rescale_add": 1,
                "scale_v": r.scale_v, "scale_b": r.scale_b, "scale_c": r.scale_c, "scale_shift": r.shift,
                "add_lo": r.lo, "add_hi": r.hi,
            }  # fmt: skip
        return fields

    def _finish(self, layer: Layer, matrix: bool, box: Box, fields: dict[str, int]) -> None:
        """The vector instruction with `fields`, and the store of its result as `box`."""
        out = self.stream.out.take(box.entries)
        result = {"dst_base": out, "dst_n": box.pixels, "dst_y": box.x[1], "dst_x": 1}
        self.stream.add(Opcode.VECTOR, **_fit_strides(fields | result))
        self._store_box(self._grid(layer.y, matrix), layer.y, box, out)

    # Convolution ------------------------------------------------------------------------------------------

    def _conv(self, layer: Conv, matrix: bool, rows_first: bool) -> list[Tile]:
        cfg = self.cfg
        matrix = matrix and layer.window.pointwise
        ranges = pack.input_ranges(cfg, layer)
        grid = self._grid(layer.y, matrix)
        problem = Problem(
            layer.window, grid.images, grid.rows, grid.columns, len(ranges), max(b - a for a, b in ranges),
            layer.epilogue.residual is not None, layer.groups > 1,
        )  # fmt: skip
        tiling = choose(cfg, problem, rows_first)
        return _ConvTiles(self, layer, matrix, problem, tiling, ranges).tiles()

    # Pooling and elementwise ------------------------------------------------------------------------------

    def _boxes(self, layer: Layer, matrix: bool, fits: Callable[[int, int, int], bool]) -> Iterator[Box]:
        """Output tiles as large as `fits(blocks, rows, columns)` allows: whole rows first, then blocks."""
        grid = self._grid(layer.y, matrix)
        blocks = pack.blocks(layer.y.channels, self.cfg.block_out)
        n, y, x = 1, grid.rows, grid.columns
        while y > 1 and not fits(1, y, x):
            y = -(-y // 2)
        while x > 1 and not fits(1, y, x):
            x = -(-x // 2)
        if not fits(1, y, x):
            raise Untileable("one output pixel's operands do not fit vin, acc or out")
        while n < blocks and fits(n + 1, y, x):
            n += 1
        for image in range(grid.images):
            for rows in spans(grid.rows, y):
                for block in spans(blocks, n):
                    for columns in spans(grid.columns, x):
                        yield Box(image, block, rows, columns)

    def _fits_out(self, layer: Layer, n: int, entries: int) -> bool:
        cfg = self.cfg
        vin = layer.epilogue.residual is not None
        return entries <= cfg.out_depth // 2 and n <= cfg.par_depth // 2 and (not vin or entries <= cfg.vin_depth // 2)

    def _pool(self, layer: Pool, matrix: bool) -> list[Tile]:
        cfg, w = self.cfg, layer.window
        matrix = matrix and w.pointwise
        if layer.epilogue.residual is not None:
            raise Untileable("a pooling and its residual both need vin")
        x_grid = self._grid(layer.x, matrix)

        def sizes(y: int, x: int) -> tuple[int, int]:
            return (y - 1) * w.strides[0] + w.reach(0), (x - 1) * w.strides[1] + w.reach(1)

        def fits(n: int, y: int, x: int) -> bool:
            rows, columns = sizes(y, x)
            return self._fits_out(layer, n, n * y * x) and n * rows * columns <= cfg.vin_depth // 2

        tiles = []
        for box in self._boxes(layer, matrix, fits):
            rows, columns = sizes(box.y[1], box.x[1])
            read, pads = _clip_window(w, box, x_grid, rows, columns)
            emit = partial(self._pool_tile, layer, matrix, box, (rows, columns), read, pads)
            tiles.append(Tile(box.image * x_grid.rows + read[0] + read[1], 0, emit))
        return tiles

    def _pool_tile(
        self, layer: Pool, matrix: bool, box: Box, size: tuple[int, int], read: tuple[int, int, int, int],
        pads: tuple[int, int, int, int],
    ) -> Compute:  # fmt: skip
        w, (rows, columns) = layer.window, size
        base = self.stream.take(self.stream.vin, box.n[1] * rows * columns)
        self._load_block(
            Buffer.VIN, self._grid(layer.x, matrix), layer.x, box.image, box.n, (read[0], read[1], 1),
            (read[2], read[3]), base, pads, layer.pad_value,
        )  # fmt: skip
        fields = self._prepare(layer, matrix, box, layer.requantise)
        fields |= {
            "a_source": ASource.VIN, "a_base": base, "a_n": rows * columns, "a_y": w.strides[0] * columns,
            "a_x": w.strides[1], "a_r": w.dilations[0] * columns, "a_s": w.dilations[1],
            "extent_r": w.kernel[0], "extent_s": w.kernel[1],
            "reduce_op": ReduceOp.MAX if layer.requantise is None else ReduceOp.ADD,
        }  # fmt: skip
        return partial(self._finish, layer, matrix, box, fields)

    def _elementwise(self, layer: Map | Multiply, matrix: bool) -> list[Tile]:
        cfg = self.cfg
        if isinstance(layer, Multiply) and layer.epilogue.residual is not None:
            raise Untileable("a multiplication and its residual both need vin")

        def fits(n: int, y: int, x: int) -> bool:
            entries = n * y * x
            limit = min(cfg.vin_depth, cfg.acc_depth) // 2
            return self._fits_out(layer, n, entries) and entries <= limit

        rows = self._grid(layer.x, matrix).rows
        return [
            Tile(box.image * rows + sum(box.y), 0, partial(self._elementwise_tile, layer, matrix, box))
            for box in self._boxes(layer, matrix, fits)
        ]

    def _elementwise_tile(self, layer: Map | Multiply, matrix: bool, box: Box) -> Compute:
        two = isinstance(layer, Multiply) or layer.epilogue.residual is not None
        ring, buffer = (self.stream.acc, Buffer.ACC) if two else (self.stream.vin, Buffer.VIN)
        base = self.stream.take(ring, box.entries)
        grid = self._grid(layer.x, matrix)
        self._load_block(buffer, grid, layer.x, box.image, box.n, (*box.y, 1), box.x, base, widen=buffer == Buffer.ACC)
        fields = self._prepare(layer, matrix, box, layer.requantise if isinstance(layer, Multiply) else None)
        fields |= {
            "a_source": ASource.ACC if two else ASource.VIN,
            "a_base": base, "a_n": box.pixels, "a_y": box.x[1], "a_x": 1,
        }  # fmt: skip
        if isinstance(layer, Multiply):
            fields |= self._factor(layer, box, matrix)
        return partial(self._finish, layer, matrix, box, fields)

    def _factor(self, layer: Multiply, box: Box, matrix: bool) -> dict[str, int]:
        """Operand B of a multiplication, loaded; one pixel of it serves all where it has no more."""
        b = layer.b
        broadcast = b.height * b.width == 1 and layer.x.height * layer.x.width > 1
        fields = {
            "b_source": BSource.VIN, "binary_op": BinaryOp.MUL, "a_offset": layer.x_offset, "b_offset": layer.b_offset,
        }  # fmt: skip
        if broadcast:
            base = self.stream.take(self.stream.vin, box.n[1])
            self._load_block(Buffer.VIN, self._grid(b, False), b, box.image, box.n, (0, 1, 1), (0, 1), base)
            return fields | {"b_base": base, "b_n": 1, "b_y": 0, "b_x": 0}
        base = self.stream.take(self.stream.vin, box.entries)
        self._load_block(Buffer.VIN, self._grid(b, matrix), b, box.image, box.n, (*box.y, 1), box.x, base)
        return fields | {"b_base": base, "b_n": box.pixels, "b_y": box.x[1], "b_x": 1}


def _clip_window(
    w: Window, box: Box, grid: Grid, rows: int, columns: int, row_step: int = 1
) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """What of the input under `box` exists: (first row, rows, first column, columns), and the pads around it."""
    top = box.y[0] * w.strides[0] - w.pads[0]
    left = box.x[0] * w.strides[1] - w.pads[1]
    if row_step > 1:  # a kernel of one row: every row read is inside, or padding is not expressible
        first, last = top, top + (rows - 1) * row_step
        if first < 0 or last >= grid.rows:
            raise Untileable("padding above or below a strided kernel of one row")
        pad_top, pad_bottom, held_rows = 0, 0, rows
    else:
        pad_top = max(0, -top)
        pad_bottom = max(0, top + rows - grid.rows)
        first, held_rows = max(0, top), rows - pad_top - pad_bottom
    pad_left = max(0, -left)
    pad_right = max(0, left + columns - grid.columns)
    held_columns = columns - pad_left - pad_right
    if held_rows < 1 or held_columns < 1:
        raise Untileable("a tile that lies in the padding alone")
    if max(pad_top, pad_left, pad_bottom, pad_right) > PAD_MAX:
        raise Untileable(f"more than {PAD_MAX} rows or columns of padding")
    return (first, held_rows, max(0, left), held_columns), (pad_top, pad_left, pad_bottom, pad_right)


def _fit_strides(fields: dict[str, int]) -> dict[str, int]:
    """Strides of loops that run once do not matter; 0 always fits their field."""
    for name in list(fields):
        loop = name.rpartition("_")[2]
        if not name.startswith("extent") and fields.get(f"extent_{loop}") == 1 and loop in "nyxkrs":
            fields[name] = 0
    return fields


@dataclass
class _ConvTiles:
    """The tile loops of one convolution."""

    lowering: Lowering
    layer: Conv
    matrix: bool
    problem: Problem
    tiling: Tiling
    ranges: list[tuple[int, int]]

    def __post_init__(self) -> None:
        self.cfg, self.stream = self.lowering.cfg, self.lowering.stream
        self.x_grid = self.lowering._grid(self.layer.x, self.matrix)
        self.weights = self.lowering.constants.place(pack.weights(self.cfg, self.layer))
        sizes = np.array([last - first for first, last in self.ranges])
        self.offsets = np.concatenate([[0], np.cumsum(sizes)]) * self.problem.taps
        self.row_step = self.layer.window.strides[0] if self.layer.window.kernel[0] == 1 else 1

    def tiles(self) -> list[Tile]:
        t, p = self.tiling, self.problem
        spatial = [
            (image, y, x) for image in range(p.images) for y in spans(p.rows, t.y) for x in spans(p.columns, t.x)
        ]
        if t.order == "split":
            return [tile for place in spatial for tile in self._split(place)]
        outputs = list(spans(p.out_blocks, t.n))
        if t.order == "weights":
            boxes = [Box(image, n, y, x) for n in outputs for image, y, x in spatial]
            tiles = [Tile(0, 0, partial(self._whole, box)) for box in boxes]
            return [*tiles[:-1], tiles[-1]._replace(done=p.images * p.rows)]
        return [
            Tile(0, self._done(place) if n is outputs[-1] else 0, partial(self._whole, Box(place[0], n, *place[1:])))
            for place in spatial for n in outputs
        ]  # fmt: skip

    def _done(self, place: tuple[int, tuple[int, int], tuple[int, int]]) -> int:
        """Rows of y that are complete when everything up to `place` is."""
        image, y, x = place
        return image * self.problem.rows + (sum(y) if sum(x) == self.problem.columns else y[0])

    def _whole(self, box: Box) -> Compute:
        """One tile with its whole reduction."""
        k = (self.ranges[box.n[0]][0], self.ranges[sum(box.n) - 1][1])
        wgt = self._load_weights(box.n, None)
        inp = self._load_input(box, k)
        acc = self.stream.take(self.stream.acc, box.entries)
        fields = self._prepare(box, acc)

        def compute() -> None:
            self._gemm(box, k, inp, wgt, acc, accumulate=False)
            self.lowering._finish(self.layer, self.matrix, box, fields)

        return compute

    def _split(self, place: tuple[int, tuple[int, int], tuple[int, int]]) -> list[Tile]:
        """All output blocks of one place, the reduction in pieces; they share their accumulators."""
        image, y, x = place
        outputs = [Box(image, n, y, x) for n in spans(self.problem.out_blocks, self.tiling.n)]
        pieces = [(first, first + count) for first, count in spans(self.problem.in_blocks, self.tiling.k)]
        sums: list[int] = []  # first accumulator, once the first tile has taken them
        tiles = [Tile(0, 0, partial(self._piece, box, k, k == pieces[-1], sums)) for k in pieces for box in outputs]
        return [*tiles[:-1], tiles[-1]._replace(done=self._done(place))]

    def _piece(self, box: Box, k: tuple[int, int], last: bool, sums: list[int]) -> Compute:
        """One piece of the reduction of one tile."""
        size = self.problem.out_blocks * box.pixels
        wgt = self._load_weights(box.n, k)
        inp = self._load_input(box, k)
        if sums:
            self.stream.hold(self.stream.acc, sums[0], size)
        else:
            sums.append(self.stream.take(self.stream.acc, size))
        acc = sums[0] + box.n[0] * box.pixels
        fields = self._prepare(box, acc) if last else {}

        def compute() -> None:
            self._gemm(box, k, inp, wgt, acc, accumulate=k[0] > 0)
            if last:
                self.lowering._finish(self.layer, self.matrix, box, fields)

        return compute

    def _prepare(self, box: Box, acc: int) -> dict[str, int]:
        """Fields of the vector instruction that reads the accumulators of `box`, what it needs loaded."""
        a = {"a_source": ASource.ACC, "a_base": acc, "a_n": box.pixels, "a_y": box.x[1], "a_x": 1}
        return self.lowering._prepare(self.layer, self.matrix, box, self.layer.requantise) | a

    def _load_weights(self, n: tuple[int, int], k: tuple[int, int] | None) -> int:
        """First entry of the weights [output block][input block][kernel row][kernel column] of `n` and `k`."""
        taps, size = self.problem.taps, self.cfg.wgt_bytes
        key = (self.weights, n, k)
        slot = self.stream.find(self.stream.wgt, key)
        if slot is not None:
            return slot
        first, last = int(self.offsets[n[0]]), int(self.offsets[n[0] + n[1]])
        if k is None or k == (0, self.problem.in_blocks):
            slot = self.stream.take(self.stream.wgt, last - first, key)
            self.lowering._load_entries(Buffer.WGT, self.weights + first * size, last - first, slot)
            return slot
        count = (k[1] - k[0]) * taps
        slot = self.stream.take(self.stream.wgt, n[1] * count, key)
        self.stream.add(
            Opcode.LOAD, buffer=Buffer.WGT, dram_addr=self.weights + (first + k[0] * taps) * size,
            dram_y=self.problem.in_blocks * taps * size, x_size=count, y_size=n[1], z_size=1,
            sram_base=slot, sram_x=1, sram_y=count if n[1] > 1 else 0,
        )  # fmt: skip
        return slot

    def _load_input(self, box: Box, k: tuple[int, int]) -> int:
        """First entry of the input [input block][row][column] under `box`."""
        key = (self.layer.name, box.image, box.y, box.x, k)
        slot = self.stream.find(self.stream.inp, key)
        if slot is not None:
            return slot
        rows, columns = self.problem.input_rows(box.y[1]), self.problem.input_columns(box.x[1])
        read, pads = _clip_window(self.layer.window, box, self.x_grid, rows, columns, self.row_step)
        slot = self.stream.take(self.stream.inp, (k[1] - k[0]) * rows * columns, key)
        self.lowering._load_block(
            Buffer.INP, self.x_grid, self.layer.x, box.image, (k[0], k[1] - k[0]), (read[0], read[1], self.row_step),
            (read[2], read[3]), slot, pads, self.layer.pad_value,
        )  # fmt: skip
        return slot

    def _gemm(self, box: Box, k: tuple[int, int], inp: int, wgt: int, acc: int, accumulate: bool) -> None:
        """One instruction where the input blocks advance evenly with the output blocks, else one per output block."""
        w, taps = self.layer.window, self.problem.taps
        rows, columns = self.problem.input_rows(box.y[1]), self.problem.input_columns(box.x[1])
        n_first, n_count = box.n
        if self.layer.groups == 1:
            runs = [(n_first, n_count, k[0], k[1] - k[0], 0)]
        else:
            runs = _even_runs(self.ranges, n_first, n_count)
        for first, count, k_first, k_count, k_step in runs:
            fields = {
                "accumulate": int(accumulate),
                "extent_n": count, "extent_y": box.y[1], "extent_x": box.x[1],
                "extent_k": k_count, "extent_r": w.kernel[0], "extent_s": w.kernel[1],
                "acc_base": acc + (first - n_first) * box.pixels, "acc_n": box.pixels, "acc_y": box.x[1], "acc_x": 1,
                "inp_base": inp + (k_first - k[0]) * rows * columns,
                "inp_n": k_step * rows * columns,
                "inp_y": columns * (1 if w.kernel[0] == 1 else w.strides[0]),
                "inp_x": w.strides[1],
                "inp_k": rows * columns, "inp_r": w.dilations[0] * columns, "inp_s": w.dilations[1],
                "wgt_base": wgt + (int(self.offsets[first] - self.offsets[n_first]) if self.layer.groups > 1 else 0),
                "wgt_n": k_count * taps, "wgt_k": taps, "wgt_r": w.kernel[1], "wgt_s": 1,
            }  # fmt: skip
            self.stream.add(Opcode.GEMM, **_fit_strides(fields))


def _even_runs(ranges: list[tuple[int, int]], first: int, count: int) -> list[tuple[int, int, int, int, int]]:
    """Runs (first block, blocks, first input block, input blocks, step of it) within which one instruction serves."""
    runs: list[tuple[int, int, int, int, int]] = []
    for n in range(first, first + count):
        start, stop = ranges[n]
        if runs:
            r_first, r_count, r_start, r_size, r_step = runs[-1]
            step = start - r_start if r_count == 1 else r_step
            if stop - start == r_size and start == r_start + r_count * step and step >= 0:
                runs[-1] = (r_first, r_count + 1, r_start, r_size, step)
                continue
        runs.append((n, 1, start, stop - start, 0))
    return runs
