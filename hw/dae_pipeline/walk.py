"""The two sides of a three-dimensional copy: which rows of DRAM, and which elements of a scratchpad."""

from __future__ import annotations

from amaranth import Module, Mux, Signal
from amaranth.hdl import ShapeLike
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.dae_pipeline.dma import OFFSET_BITS, row_layout

X_BITS, Y_BITS, Z_BITS = 16, 12, 12
"""Widths of x_size, y_size and z_size in LOAD and STORE."""


def block_layout(shift_bits: int) -> data.StructLayout:
    """The DRAM side of a LOAD or STORE. shift: log2 of an element's bytes."""
    return data.StructLayout({
        "addr": OFFSET_BITS, "y_step": OFFSET_BITS, "z_step": OFFSET_BITS,
        "x_size": X_BITS, "y_size": Y_BITS, "z_size": Z_BITS, "shift": shift_bits,
    })  # fmt: skip


class Rows(wiring.Component):
    """Lists the rows of blocks, one a cycle. Rows of a plane without gaps between them become one long row.

    block: what to list. row: the rows; `final` marks the last one of a block. shift: that of the row's block.
    """

    def __init__(self, max_shift: int) -> None:
        self._max_shift = max_shift
        self.bytes_bits = max(OFFSET_BITS, X_BITS + Y_BITS + max_shift)
        shift_bits = max_shift.bit_length()
        super().__init__({
            "block": In(stream.Signature(block_layout(shift_bits))),
            "row": Out(stream.Signature(row_layout(self.bytes_bits))),
            "shift": Out(shift_bits),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        # A block waits here while the product of its sizes is formed ...
        block = Signal.like(self.block.payload)
        waiting = Signal()
        plane_size = Signal(X_BITS + Y_BITS)
        # ... and is listed from here.
        busy, begin, ends = Signal(), Signal(), Signal()
        y_step, z_step = Signal(OFFSET_BITS), Signal(OFFSET_BITS)
        offset, plane = Signal(OFFSET_BITS), Signal(OFFSET_BITS)
        bytes_ = Signal(self.bytes_bits)
        rows, rows_left = Signal(Y_BITS), Signal(Y_BITS)
        planes_left = Signal(Z_BITS)

        m.d.comb += [begin.eq(waiting & (~busy | ends)), self.block.ready.eq(~waiting | begin)]
        with m.If(self.block.valid & self.block.ready):
            m.d.sync += [
                waiting.eq(1),
                block.eq(self.block.payload),
                plane_size.eq(self.block.payload.x_size * self.block.payload.y_size),
            ]
        with m.Elif(begin):
            m.d.sync += waiting.eq(0)

        last_row, last_plane = rows_left == 1, planes_left == 1
        m.d.comb += [
            self.row.valid.eq(busy),
            self.row.payload.offset.eq(offset),
            self.row.payload.bytes.eq(bytes_),
            self.row.payload.final.eq(last_row & last_plane),
            ends.eq(busy & self.row.ready & last_row & last_plane),
        ]
        with m.If(busy & self.row.ready):
            next_plane = (plane + z_step)[:OFFSET_BITS]
            with m.If(last_row):
                m.d.sync += [
                    rows_left.eq(rows),
                    planes_left.eq(planes_left - 1),
                    plane.eq(next_plane),
                    offset.eq(next_plane),
                    busy.eq(~last_plane),
                ]
            with m.Else():
                m.d.sync += [rows_left.eq(rows_left - 1), offset.eq(offset + y_step)]
        with m.If(begin):
            row_bytes = block.x_size << block.shift
            merged = row_bytes == block.y_step
            count = Mux(merged, 1, block.y_size)
            m.d.sync += [
                busy.eq(1),
                y_step.eq(block.y_step),
                z_step.eq(block.z_step),
                offset.eq(block.addr),
                plane.eq(block.addr),
                bytes_.eq(Mux(merged, plane_size, block.x_size) << block.shift),
                rows.eq(count),
                rows_left.eq(count),
                planes_left.eq(block.z_size),
                self.shift.eq(block.shift),
            ]
        return m


class Walker(wiring.Component):
    """Walks over the elements of blocks in a scratchpad, x innermost, and over the steps of each element.

    job: a block: `base` and the steps between elements in x, y and z; the last index in x, y and z; the last step of
    an element; and a `tag` that comes along. Accepted while the last step of the job before is taken.
    step: `element`, an address modulo its width; `step` within it; `x` and `y` (indices); `last` of the job; its `tag`.
    whole: the step that is offered is the only one of its element.
    """

    def __init__(self, element_bits: int, step_bits: int, tag: ShapeLike) -> None:
        self._element_bits, self._step_bits = element_bits, step_bits
        self.job_layout = data.StructLayout({
            "base": element_bits, "x_step": element_bits, "y_step": element_bits, "z_step": element_bits,
            "x_end": X_BITS + 1, "y_end": Y_BITS + 1, "z_end": Z_BITS, "step_end": step_bits, "tag": tag,
        })  # fmt: skip
        self.step_layout = data.StructLayout({
            "element": element_bits, "step": step_bits, "x": X_BITS + 1, "y": Y_BITS + 1, "last": 1, "tag": tag,
        })  # fmt: skip
        super().__init__({
            "job": In(stream.Signature(self.job_layout)),
            "step": Out(stream.Signature(self.step_layout)),
            "whole": In(1),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        job, busy = Signal(self.job_layout), Signal()
        x, y, z = Signal(X_BITS + 1), Signal(Y_BITS + 1), Signal(Z_BITS)
        step = Signal(self._step_bits)
        element, row, plane = (Signal(self._element_bits, name=name) for name in ("element", "row", "plane"))

        last_step = self.whole | (step == job.step_end)
        last_x, last_y, last_z = x == job.x_end, y == job.y_end, z == job.z_end
        last = Signal()
        out = self.step.payload
        m.d.comb += [
            last.eq(last_step & last_x & last_y & last_z),
            self.step.valid.eq(busy),
            out.element.eq(element),
            out.step.eq(step),
            out.x.eq(x),
            out.y.eq(y),
            out.last.eq(last),
            out.tag.eq(job.tag),
            self.job.ready.eq(~busy | (self.step.ready & last)),
        ]
        with m.If(busy & self.step.ready):
            next_row, next_plane = (Signal(self._element_bits, name=name) for name in ("next_row", "next_plane"))
            m.d.comb += [next_row.eq(row + job.y_step), next_plane.eq(plane + job.z_step)]
            with m.If(~last_step):
                m.d.sync += step.eq(step + 1)
            with m.Else():
                m.d.sync += step.eq(0)
                with m.If(~last_x):
                    m.d.sync += [x.eq(x + 1), element.eq(element + job.x_step)]
                with m.Elif(~last_y):
                    m.d.sync += [x.eq(0), y.eq(y + 1), row.eq(next_row), element.eq(next_row)]
                with m.Elif(~last_z):
                    m.d.sync += [
                        x.eq(0), y.eq(0), z.eq(z + 1),
                        plane.eq(next_plane), row.eq(next_plane), element.eq(next_plane),
                    ]  # fmt: skip
                with m.Else():
                    m.d.sync += busy.eq(0)
        with m.If(self.job.valid & self.job.ready):
            base = self.job.payload.base
            m.d.sync += [busy.eq(1), job.eq(self.job.payload), x.eq(0), y.eq(0), z.eq(0), step.eq(0)]
            m.d.sync += [plane.eq(base), row.eq(base), element.eq(base)]
        return m
