"""The tile loops of a convolution, on gemm; matrix multiplications and depthwise convolutions are among them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from celosia.compiler.tensorize import pack
from celosia.compiler.tensorize.layer import Conv
from celosia.compiler.tensorize.tile import Box, Tile, clip_window, fit_strides, spans
from celosia.compiler.tensorize.tiling import Problem, Tiling, choose
from celosia.compiler.vthread.stream import Compute
from celosia.hw.isa import ASource, Buffer, Opcode

if TYPE_CHECKING:
    from celosia.compiler.tensorize.lower import Lowering


def tiles(lowering: Lowering, layer: Conv, matrix: bool, rows_first: bool) -> list[Tile]:
    """The tiles of `layer` under the tiling of the fewest cycles. Untileable where none fits."""
    cfg = lowering.cfg
    matrix = matrix and layer.window.pointwise
    ranges = pack.input_ranges(cfg, layer)
    grid = lowering.grid(layer.y, matrix)
    problem = Problem(
        layer.window, grid.images, grid.rows, grid.columns, len(ranges), max(b - a for a, b in ranges),
        layer.epilogue.residual is not None, layer.groups > 1,
    )  # fmt: skip
    return _ConvTiles(lowering, layer, matrix, problem, choose(cfg, problem, rows_first), ranges).tiles()


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
        self.input = object()  # what of the input lies in inp is known by this layer's own mark, not by a name
        self.x_grid = self.lowering.grid(self.layer.x, self.matrix)
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
            # Between pieces of a reduction its sums are no thread's: nothing may follow before the last one.
            return _done_at_the_end([tile for place in spatial for tile in self._split(place)], p)
        outputs = list(spans(p.out_blocks, t.n))
        if t.order == "weights":
            boxes = [Box(image, n, y, x) for n in outputs for image, y, x in spatial]
            return _done_at_the_end([Tile(0, 0, partial(self._whole, box)) for box in boxes], p)
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
            self.lowering.finish(self.layer, self.matrix, box, fields)

        return compute

    def _split(self, place: tuple[int, tuple[int, int], tuple[int, int]]) -> list[Tile]:
        """All output blocks of one place, the reduction in pieces; they share their accumulators."""
        image, y, x = place
        outputs = [Box(image, n, y, x) for n in spans(self.problem.out_blocks, self.tiling.n)]
        pieces = [(first, first + count) for first, count in spans(self.problem.in_blocks, self.tiling.k)]
        sums: list[int] = []  # first accumulator, once the first tile has taken them
        return [Tile(0, 0, partial(self._piece, box, k, k == pieces[-1], sums)) for k in pieces for box in outputs]

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
                self.lowering.finish(self.layer, self.matrix, box, fields)

        return compute

    def _prepare(self, box: Box, acc: int) -> dict[str, int]:
        """Fields of the vector instruction that reads the accumulators of `box`, what it needs loaded."""
        a = {"a_source": ASource.ACC, "a_base": acc, "a_n": box.pixels, "a_y": box.x[1], "a_x": 1}
        return self.lowering.prepare(self.layer, self.matrix, box, self.layer.requantise) | a

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
            self.lowering.load_entries(Buffer.WGT, self.weights + first * size, last - first, slot)
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
        key = (self.input, box.image, box.y, box.x, k)
        slot = self.stream.find(self.stream.inp, key)
        if slot is not None:
            return slot
        rows, columns = self.problem.input_rows(box.y[1]), self.problem.input_columns(box.x[1])
        read, pads = clip_window(self.layer.window, box, self.x_grid, rows, columns, self.row_step)
        slot = self.stream.take(self.stream.inp, (k[1] - k[0]) * rows * columns, key)
        self.lowering.load_block(
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
            self.stream.add(Opcode.GEMM, **fit_strides(fields))


def _done_at_the_end(tiles: list[Tile], p: Problem) -> list[Tile]:
    """The last tile completes all rows."""
    return [*tiles[:-1], tiles[-1]._replace(done=p.images * p.rows)]


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
