"""Layers to instructions: the loops over tiles, whose bodies are the accelerator's intrinsics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from celosia.compiler.tensorize import conv, pack
from celosia.compiler.tensorize.constants import Constants
from celosia.compiler.tensorize.layer import (
    Activation,
    Conv,
    Epilogue,
    Layer,
    Map,
    Multiply,
    Pool,
    Requantise,
    Storage,
    Untileable,
)
from celosia.compiler.tensorize.tile import Box, Tile, clip_window, fit_strides, spans
from celosia.compiler.tensorize.transfer import Dim, Grid, transfer
from celosia.compiler.vthread.stream import Compute, Stream
from celosia.hw.config import Config
from celosia.hw.isa import ASource, BinaryOp, BSource, Buffer, Destination, Opcode, ReduceOp

LOAD_PART_BEATS = 1024
"""A tile of activations is loaded in parts of about so many beats: a part can start once its own producers end."""


class Lowering:
    """Turns layers into tiles, which emit their instructions into `stream`.

    addresses: DRAM address of each storage. Tiles emitted in order leave the stream a correct sequential program.
    """

    def __init__(self, cfg: Config, stream: Stream, constants: Constants, addresses: dict[Storage, int]) -> None:
        self.cfg, self.stream, self.constants, self.addresses = cfg, stream, constants, addresses
        self.following = False
        """Whether the rows that the tile reads are known to be there, though other rows are not."""

    def tiles(self, layer: Layer, rows_first: bool = False) -> list[Tile]:
        """The tiles of `layer` in order. Untileable where it does not fit the scratchpads.

        rows_first: rather complete the output row by row than channel by channel, if it costs next to nothing.
        """
        matrix = all(act.height * act.width == 1 for act in (layer.x, layer.y))
        if isinstance(layer, Conv):
            return conv.tiles(self, layer, matrix, rows_first)
        if isinstance(layer, Pool):
            return self._pool(layer, matrix)
        return self._elementwise(layer, matrix)

    # Shared pieces ----------------------------------------------------------------------------------------

    def grid(self, act: Activation, matrix: bool) -> Grid:
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
            self.load_entries(Buffer.LUT, self.constants.place(blob), 1, slot)
        return {"lookup": 1, "table": slot}

    def load_entries(self, buffer: Buffer, address: int, count: int, base: int) -> None:
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
            self.load_entries(Buffer.PAR, address + n[0] * size, n[1], slot)
        return slot

    def load_block(
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

    def prepare(self, layer: Layer, matrix: bool, box: Box, requantise: Requantise | None) -> dict[str, int]:
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
            self.load_block(
                Buffer.VIN, self.grid(r.operand, matrix), r.operand, box.image, box.n, (*box.y, 1), box.x, base
            )
            fields |= {
                "b_source": BSource.VIN, "b_base": base, "b_n": box.pixels, "b_y": box.x[1], "b_x": 1, "rescale_add": 1,
                "scale_v": r.scale_v, "scale_b": r.scale_b, "scale_c": r.scale_c, "scale_shift": r.shift,
                "add_lo": r.lo, "add_hi": r.hi,
            }  # fmt: skip
        return fields

    def finish(self, layer: Layer, matrix: bool, box: Box, fields: dict[str, int]) -> None:
        """The vector instruction with `fields`, and the store of its result as `box`."""
        out = self.stream.out.take(box.entries)
        result = {"dst_base": out, "dst_n": box.pixels, "dst_y": box.x[1], "dst_x": 1}
        self.stream.add(Opcode.VECTOR, **fit_strides(fields | result))
        self._store_box(self.grid(layer.y, matrix), layer.y, box, out)

    # Pooling and elementwise ------------------------------------------------------------------------------

    def _boxes(self, layer: Layer, matrix: bool, fits: Callable[[int, int, int], bool]) -> Iterator[Box]:
        """Output tiles as large as `fits(blocks, rows, columns)` allows: whole rows first, then blocks."""
        grid = self.grid(layer.y, matrix)
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
        x_grid = self.grid(layer.x, matrix)

        def sizes(y: int, x: int) -> tuple[int, int]:
            return (y - 1) * w.strides[0] + w.reach(0), (x - 1) * w.strides[1] + w.reach(1)

        def fits(n: int, y: int, x: int) -> bool:
            rows, columns = sizes(y, x)
            return self._fits_out(layer, n, n * y * x) and n * rows * columns <= cfg.vin_depth // 2

        tiles = []
        for box in self._boxes(layer, matrix, fits):
            rows, columns = sizes(box.y[1], box.x[1])
            read, pads = clip_window(w, box, x_grid, rows, columns)
            emit = partial(self._pool_tile, layer, matrix, box, (rows, columns), read, pads)
            tiles.append(Tile(box.image * x_grid.rows + read[0] + read[1], 0, emit))
        return tiles

    def _pool_tile(
        self, layer: Pool, matrix: bool, box: Box, size: tuple[int, int], read: tuple[int, int, int, int],
        pads: tuple[int, int, int, int],
    ) -> Compute:  # fmt: skip
        w, (rows, columns) = layer.window, size
        base = self.stream.take(self.stream.vin, box.n[1] * rows * columns)
        self.load_block(
            Buffer.VIN, self.grid(layer.x, matrix), layer.x, box.image, box.n, (read[0], read[1], 1),
            (read[2], read[3]), base, pads, layer.pad_value,
        )  # fmt: skip
        fields = self.prepare(layer, matrix, box, layer.requantise)
        fields |= {
            "a_source": ASource.VIN, "a_base": base, "a_n": rows * columns, "a_y": w.strides[0] * columns,
            "a_x": w.strides[1], "a_r": w.dilations[0] * columns, "a_s": w.dilations[1],
            "extent_r": w.kernel[0], "extent_s": w.kernel[1],
            "reduce_op": ReduceOp.MAX if layer.requantise is None else ReduceOp.ADD,
        }  # fmt: skip
        return partial(self.finish, layer, matrix, box, fields)

    def _elementwise(self, layer: Map | Multiply, matrix: bool) -> list[Tile]:
        cfg = self.cfg
        if isinstance(layer, Multiply) and layer.epilogue.residual is not None:
            raise Untileable("a multiplication and its residual both need vin")

        def fits(n: int, y: int, x: int) -> bool:
            entries = n * y * x
            limit = min(cfg.vin_depth, cfg.acc_depth) // 2
            return self._fits_out(layer, n, entries) and entries <= limit

        rows = self.grid(layer.x, matrix).rows
        return [
            Tile(box.image * rows + sum(box.y), 0, partial(self._elementwise_tile, layer, matrix, box))
            for box in self._boxes(layer, matrix, fits)
        ]

    def _elementwise_tile(self, layer: Map | Multiply, matrix: bool, box: Box) -> Compute:
        two = isinstance(layer, Multiply) or layer.epilogue.residual is not None
        ring, buffer = (self.stream.acc, Buffer.ACC) if two else (self.stream.vin, Buffer.VIN)
        base = self.stream.take(ring, box.entries)
        grid = self.grid(layer.x, matrix)
        self.load_block(buffer, grid, layer.x, box.image, box.n, (*box.y, 1), box.x, base, widen=buffer == Buffer.ACC)
        fields = self.prepare(layer, matrix, box, layer.requantise if isinstance(layer, Multiply) else None)
        fields |= {
            "a_source": ASource.ACC if two else ASource.VIN,
            "a_base": base, "a_n": box.pixels, "a_y": box.x[1], "a_x": 1,
        }  # fmt: skip
        if isinstance(layer, Multiply):
            fields |= self._factor(layer, box, matrix)
        return partial(self.finish, layer, matrix, box, fields)

    def _factor(self, layer: Multiply, box: Box, matrix: bool) -> dict[str, int]:
        """Operand B of a multiplication, loaded; one pixel of it serves all where it has no more."""
        b = layer.b
        broadcast = b.height * b.width == 1 and layer.x.height * layer.x.width > 1
        fields = {
            "b_source": BSource.VIN, "binary_op": BinaryOp.MUL, "a_offset": layer.x_offset, "b_offset": layer.b_offset,
        }  # fmt: skip
        if broadcast:
            base = self.stream.take(self.stream.vin, box.n[1])
            self.load_block(Buffer.VIN, self.grid(b, False), b, box.image, box.n, (0, 1, 1), (0, 1), base)
            return fields | {"b_base": base, "b_n": 1, "b_y": 0, "b_x": 0}
        base = self.stream.take(self.stream.vin, box.entries)
        self.load_block(Buffer.VIN, self.grid(b, matrix), b, box.image, box.n, (*box.y, 1), box.x, base)
        return fields | {"b_base": base, "b_n": box.pixels, "b_y": box.x[1], "b_x": 1}
