"""Address generators of the two sides of a three-dimensional copy: rows of DRAM, and elements of a scratchpad."""

from __future__ import annotations

from typing import Any

from amaranth import Cat, Const, Module, Mux, Signal, Value
from amaranth.hdl import ShapeLike
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.dae_pipeline.dma import OFFSET_BITS, row_layout
from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.isa import X_BITS, YZ_BITS


def block_layout(shift_bits: int) -> data.StructLayout:
    """Return the layout of a block of DRAM that a LOAD or STORE moves: planes of rows of elements.

    addr: byte offset of the first element. y_step, z_step: bytes from one row, or plane, to the next. x_size, y_size,
    z_size: elements in a row, rows in a plane, planes. shift: log2 of an element's bytes. cut: only one half of each
    element is moved (spread weights). stretch: an element has more bytes (packed weights), see `DramAddressGenerator`.
    """
    return data.StructLayout({
        "addr": OFFSET_BITS, "y_step": OFFSET_BITS, "z_step": OFFSET_BITS,
        "x_size": X_BITS, "y_size": YZ_BITS, "z_size": YZ_BITS, "shift": shift_bits, "cut": 1, "stretch": 1,
    })  # fmt: skip


def listed_row_layout(bytes_bits: int, shift_bits: int) -> data.StructLayout:
    """Return the layout of a row for the DMA engine, with `shift`, `cut` and `stretch` of its block.

    alone: the row has only one element.
    """
    return data.StructLayout(row_layout(bytes_bits).members | {"shift": shift_bits, "cut": 1, "stretch": 1, "alone": 1})


class DramAddressGenerator(wiring.Component):
    """Generate the rows of blocks, one a cycle. If the rows of a plane lie in DRAM without gaps, they become one row.

    Parameters
    ----------
    max_shift : int     log2 of the bytes of the largest element.
    stretch : int       In blocks with bit `stretch`, an element has (1 + 2^stretch) * 2^shift bytes, and rows are never
                        merged; None: no block has the bit.

    Members
    -------
    block : In(stream)  Blocks, `block_layout`.
    row : Out(stream)   Their rows, `listed_row_layout`; `final` marks the last one of a block.
    """

    def __init__(self, max_shift: int, stretch: int | None = None) -> None:
        self._max_shift, self._stretch = max_shift, stretch
        self.bytes_bits = max(OFFSET_BITS, X_BITS + YZ_BITS + max_shift)
        shift_bits = max_shift.bit_length()
        super().__init__({
            "block": In(stream.Signature(block_layout(shift_bits))),
            "row": Out(stream.Signature(listed_row_layout(self.bytes_bits, shift_bits))),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        busy = Signal()
        begin = Signal()
        ends = Signal()
        waiting, block, plane_size, merged = self._hold_next_block(m, begin)
        y_step, z_step, offset, plane = (
            Reg(OFFSET_BITS, name=name) for name in ("y_step", "z_step", "offset", "plane")
        )
        bytes_ = Reg(self.bytes_bits)
        rows, rows_left, planes_left = (Reg(YZ_BITS, name=name) for name in ("rows", "rows_left", "planes_left"))
        # Known a step ahead: the row is the last one of its plane; the plane is the last one; planes have a single row.
        last_row = Reg()
        last_plane = Reg()
        single = Reg()
        row = self.row.payload
        kept = {name: Signal.like(row[name], name=name) for name in ("shift", "cut", "stretch", "alone")}

        m.d.comb += [
            begin.eq(waiting & (~busy | ends)),
            self.row.valid.eq(busy),
            row.offset.eq(offset),
            row.bytes.eq(bytes_),
            row.final.eq(last_row & last_plane),
            *(row[name].eq(value) for name, value in kept.items()),
            ends.eq(busy & self.row.ready & last_row & last_plane),
        ]
        with m.If(busy & self.row.ready):
            next_plane = (plane + z_step)[:OFFSET_BITS]
            with m.If(last_row):
                m.d.sync += [
                    rows_left.eq(rows),
                    last_row.eq(single),
                    planes_left.eq(planes_left - 1),
                    last_plane.eq(planes_left == 2),
                    plane.eq(next_plane),
                    offset.eq(next_plane),
                    busy.eq(~last_plane),
                ]
            with m.Else():
                m.d.sync += [
                    rows_left.eq(rows_left - 1),
                    last_row.eq(rows_left == 2),
                    offset.eq(offset + y_step),
                ]
        with m.If(begin):
            count = Mux(merged, 1, block.y_size)
            m.d.sync += [
                busy.eq(1),
                y_step.eq(block.y_step),
                z_step.eq(block.z_step),
                offset.eq(block.addr),
                plane.eq(block.addr),
                bytes_.eq(self._stretch_row(block, Mux(merged, plane_size, block.x_size)) << block.shift),
                rows.eq(count),
                rows_left.eq(count),
                last_row.eq(count == 1),
                single.eq(count == 1),
                planes_left.eq(block.z_size),
                last_plane.eq(block.z_size == 1),
                kept["shift"].eq(block.shift),
                kept["cut"].eq(block.cut),
                kept["stretch"].eq(block.stretch),
                kept["alone"].eq(Mux(merged, plane_size == 1, block.x_size == 1)),
            ]
        probes(
            self, waiting=waiting, block=block, plane_size=plane_size, merged=merged, y_step=y_step, z_step=z_step,
            rows=rows, rows_left=rows_left, planes_left=planes_left, last_row=last_row, last_plane=last_plane,
            single=single, plane=plane,
        )  # fmt: skip
        return m

    def _stretch_row(self, block: Any, elements: Value) -> Value:
        """Return the length of a row in units of 2^shift bytes: `elements`, or (1 + 2^stretch) times as many.

        The addition begins at bit `stretch`, as it does not change the bits below.
        """
        if self._stretch is None:
            return elements
        low, high = self._stretch, self._stretch + X_BITS + 1
        return Cat(
            elements[:low], (elements[low:high] + Mux(block.stretch, block.x_size, 0))[: high - low], elements[high:]
        )

    def _hold_next_block(self, m: Module, begin: Signal) -> tuple[Signal, Any, Signal, Signal]:
        """Hold the next block in registers until it may `begin`, as the product of its plane size takes a cycle.

        Returns whether a block waits, the block, the number of elements of a plane, and whether the rows of a plane are
        merged into one, since they have no gaps.
        """
        block = Signal.like(self.block.payload, reset_less=True)
        new = self.block.payload
        waiting = Signal()
        merged = Reg()
        rows_touch = (new.x_size << new.shift) == new.y_step
        plane_size = Reg(X_BITS + YZ_BITS)
        # `ready` does not depend on `begin`: that keeps the path short, and costs only a cycle between two blocks.
        m.d.comb += self.block.ready.eq(~waiting)
        with m.If(~waiting):
            m.d.sync += [
                waiting.eq(self.block.valid),
                block.eq(self.block.payload),
                plane_size.eq(self.block.payload.x_size * self.block.payload.y_size),
                merged.eq(rows_touch if self._stretch is None else rows_touch & ~new.stretch),
            ]
        with m.Elif(begin):
            m.d.sync += waiting.eq(0)
        return waiting, block, plane_size, merged


class ElementSplitter(wiring.Component):
    """Cut rows of spread weights: each element becomes a row of its own with one half of the element's bytes.

    The first half begins where the row begins, the next ones an element's bytes further each. Rows without `cut` pass
    unchanged.

    Parameters
    ----------
    row : StructLayout  Layout of the rows, with the fields of `listed_row_layout`.
    element : int       Bytes of an element, a power of two.
    bus : int           Bytes of a bus word, a power of two that divides the half.

    Members
    -------
    row : In(stream)    Rows; those with `cut` consist of whole elements.
    half : Out(stream)  The rows, or the halves of their elements; `final` marks the last half of a final row.
    """

    def __init__(self, row: data.StructLayout, element: int, bus: int) -> None:
        self._row, self._shift, self._low = row, element.bit_length() - 1, bus.bit_length() - 1
        super().__init__({"row": In(stream.Signature(row)), "half": Out(stream.Signature(row))})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        row, half, shift, low = self.row.payload, self.half.payload, self._shift, self._low
        # begin, last: offset of the next half in bus words, and whether it is the row's last. They are valid if
        # `inside`, that is, if the next half is not the first one of its row.
        inside = Signal()
        last = Signal()
        begin = Signal(OFFSET_BITS - low)
        left = Signal(len(row.bytes) - shift)
        here = Signal.like(begin)
        following = Signal.like(begin)
        count = Signal.like(left)
        is_last = Signal()
        m.d.comb += [
            here.eq(Mux(inside, begin, row.offset[low:])),
            count.eq(Mux(inside, left, row.bytes[shift:])),
            is_last.eq(~row.cut | Mux(inside, last, row.alone)),
            following.eq(here + (1 << (shift - low))),
            self.half.valid.eq(self.row.valid),
            self.row.ready.eq(self.half.ready & is_last),
            half.eq(row),
            half.offset.eq(Cat(row.offset[:low], here)),
            half.bytes.eq(Mux(row.cut, 1 << (shift - 1), row.bytes)),
            half.final.eq(row.final & is_last),
        ]
        with m.If(self.row.valid & self.half.ready):
            m.d.sync += [inside.eq(~is_last), begin.eq(following), left.eq(count - 1), last.eq(count == 2)]
        probes(self, inside=inside, left=left, last=last, begin=begin)
        return m


class LoopIndex:
    """One loop index of a `ScratchpadAddressGenerator`, which says a step ahead whether it is last or in the padding.

    Arguments: end: the last index. borders: the first index inside the padding, and the first one behind it; None: the
    axis has no padding.

    last, outside : whether the present index is the last one, and whether it lies in the padding: registers.
    next_last, next_outside : the same for the next step.
    moves : assignments to the registers, for each step.

    In each cycle the caller calls one of `load`, `advance` and `restart` within `m.If`, or none: the index then stays.
    """

    def __init__(self, m: Module, name: str, end: Value, borders: tuple[Value, Value] | None) -> None:
        self._m, self._end, self._borders = m, end, borders
        self._following, self._single = Reg(len(end), name=f"{name}_following"), Reg(name=f"{name}_single")
        self.last, self.outside = Reg(name=f"{name}_last"), Reg(name=f"{name}_outside")
        self._begins_outside = Reg(name=f"{name}_begins_outside")
        self.next_last, self.next_outside = Signal(name=f"{name}_next_last"), Signal(name=f"{name}_next_outside")
        self._next = Signal(len(end), name=f"{name}_next_following")
        self._set_next(self._following, self.last, self.outside)
        self.moves = [
            self._following.eq(self._next), self.last.eq(self.next_last), self.outside.eq(self.next_outside),
        ]  # fmt: skip

    def _set_next(self, following: Value | int, last: Value, outside: Value) -> None:
        """Set the state of the next step. following: the index after the next one. last, outside: of the next index."""
        self._m.d.comb += [self._next.eq(following), self.next_last.eq(last), self.next_outside.eq(outside)]

    def load(self, end: Value, first: Value | None) -> list[object]:
        """Go to the first index of a new job. Returns assignments that save the state of this index, for `restart`.

        end: the job's last index. first: its first index inside the padding; None: the axis has no padding.
        """
        outside = first != 0 if first is not None else Const(0)
        self._set_next(1, end == 0, outside)
        return [self._single.eq(end == 0), self._begins_outside.eq(outside)]

    def advance(self) -> None:
        """Go to the next index."""
        outside: Value = Const(0)
        if self._borders is not None:
            first, stop = (self._following == border for border in self._borders)
            outside = stop | (self.outside & ~first)
        self._set_next(self._following + 1, self._following == self._end, outside)

    def restart(self) -> None:
        """Go to the first index again."""
        self._set_next(1, self._single, self._begins_outside)


BORDERS = {"x": X_BITS + 1, "y": YZ_BITS + 1}
"""Axes that may have padding, with the width of an index that includes the padding."""


def job_layout(element_bits: int, step_bits: int, tag: ShapeLike, padded: bool = False) -> data.StructLayout:
    """Return the layout of a block of elements in a scratchpad; see `ScratchpadAddressGenerator` for all names."""
    borders = {f"{axis}_{edge}": bits for axis, bits in BORDERS.items() for edge in ("first", "stop") if padded}
    return data.StructLayout({
        "base": element_bits, "x_step": element_bits, "y_step": element_bits, "z_step": element_bits,
        "x_end": X_BITS + 1, "y_end": YZ_BITS + 1, "z_end": YZ_BITS, "step_end": step_bits, **borders, "tag": tag,
    })  # fmt: skip


def step_layout(element_bits: int, step_bits: int, tag: ShapeLike) -> data.StructLayout:
    """Return the layout of one step of a job; see `ScratchpadAddressGenerator`, also for arguments."""
    return data.StructLayout({"element": element_bits, "step": step_bits, "outside": 1, "last": 1, "tag": tag})


class ScratchpadAddressGenerator(wiring.Component):
    """Generate the addresses of the elements of blocks in a scratchpad, x innermost, and the steps of each element.

    An element that is wider than the bus is moved in several steps, one for each bus word.

    Parameters
    ----------
    element_bits : int  Width of an element's address.
    step_bits : int     Width of the number of a step within an element.
    tag : ShapeLike     Shape of the value that a job passes on to each of its steps.
    padded : bool       Blocks have padding. `x_first`, `x_stop`, `y_first` and `y_stop` of a job are the first index
                        inside the padding, and the first one behind it.

    Members
    -------
    job : In(stream)    A block: address `base` and its strides in x, y and z; the last index in x, y and z; the number
                        of the last step of an element; and a `tag`. Accepted while the last step of the previous job is
                        taken.
    step : Out(stream)  `element`, its address, which wraps; `step` within the element; `outside`: the element is
                        padding, which takes one step only; `last` step of the job; `tag` of the job.
    """

    def __init__(self, element_bits: int, step_bits: int, tag: ShapeLike, padded: bool = False) -> None:
        self._element_bits, self._step_bits, self._padded = element_bits, step_bits, padded
        super().__init__({
            "job": In(stream.Signature(job_layout(element_bits, step_bits, tag, padded))),
            "step": Out(stream.Signature(step_layout(element_bits, step_bits, tag))),
        })  # fmt: skip

    def _has_borders(self, axis: str) -> bool:
        """Return whether jobs have padding along this axis."""
        return self._padded and axis in BORDERS

    def _borders(self, axis: str, job: data.View[data.StructLayout]) -> tuple[Value, Value] | None:
        """Return the first index inside the padding of an axis, and the first one behind; None without padding."""
        return (job[f"{axis}_first"], job[f"{axis}_stop"]) if self._has_borders(axis) else None

    def elaborate(self, platform: object) -> Module:
        m = Module()
        job = Reg(self.job.payload.shape())
        busy = Signal()
        x, y, z = (LoopIndex(m, axis, job[f"{axis}_end"], self._borders(axis, job)) for axis in "xyz")
        step, step_last, single_step = (Reg(bits, name=name) for name, bits in (
            ("step", self._step_bits), ("step_last", 1), ("single_step", 1),
        ))  # fmt: skip
        element, row, plane = (Reg(self._element_bits, name=name) for name in ("element", "row", "plane"))
        # State of the step that is offered. Many registers depend on it, so it is computed a step ahead, in registers.
        outside, last_step, last = (Reg(name=name) for name in ("outside", "last_step", "last"))
        out = self.step.payload
        m.d.comb += [
            self.step.valid.eq(busy),
            out.element.eq(element),
            out.step.eq(step),
            out.outside.eq(outside),
            out.last.eq(last),
            out.tag.eq(job.tag),
            self.job.ready.eq(~busy | (self.step.ready & last)),
        ]

        # The next state is computed whether the step is taken or not, as only the enables depend on that. Behind the
        # last step it is loaded from `job`, valid or not.
        state = (step, step_last, element, row, plane)
        next_state = [Signal(register.shape(), name=f"next_{register.name}") for register in state]
        next_step, next_step_last, next_element, next_row, next_plane = next_state
        next_outside = x.next_outside | y.next_outside
        next_last_step = Signal()
        m.d.comb += [next_.eq(register) for next_, register in zip(next_state, state)]
        m.d.comb += next_last_step.eq(next_outside | next_step_last)
        loads: list[object] = []
        with m.If(~busy | last):
            new = self.job.payload
            single = new.step_end == 0
            m.d.comb += [next_step.eq(0), next_step_last.eq(single)]
            m.d.comb += [next_element.eq(new.base), next_row.eq(new.base), next_plane.eq(new.base)]
            loads += [busy.eq(self.job.valid), job.eq(new), single_step.eq(single)]
            for axis, index in zip("xyz", (x, y, z)):
                loads += index.load(new[f"{axis}_end"], new[f"{axis}_first"] if self._has_borders(axis) else None)
        with m.Elif(~last_step):
            m.d.comb += [next_step.eq(step + 1), next_step_last.eq(step + 1 == job.step_end)]
        with m.Else():
            m.d.comb += [next_step.eq(0), next_step_last.eq(single_step)]
            self._go_to_next_element(m, job, (x, y, z), (element, row, plane), (next_element, next_row, next_plane))
        with m.If(self.job.ready):
            m.d.sync += loads
        with m.If(~busy | self.step.ready):
            m.d.sync += [next_ for index in (x, y, z) for next_ in index.moves]
            m.d.sync += [register.eq(next_) for register, next_ in zip(state, next_state)]
            m.d.sync += [
                outside.eq(next_outside),
                last_step.eq(next_last_step),
                last.eq(next_last_step & x.next_last & y.next_last & z.next_last),
            ]
        probes(
            self, job=job, step_last=step_last, single_step=single_step, outside=outside, last_step=last_step,
            last=last, x=x, y=y, z=z, plane=plane, row=row,
        )  # fmt: skip
        return m

    def _go_to_next_element(
        self,
        m: Module,
        job: Any,
        indices: tuple[LoopIndex, ...],
        now: tuple[Signal, ...],
        following: tuple[Signal, ...],
    ) -> None:
        """Go to the next element, else the first one of the next row, else that of the next plane.

        now, following: present and next addresses of the element, its row and its plane.
        """
        (x, y, z), (element, row, plane), (next_element, next_row, next_plane) = indices, now, following
        with m.If(~x.last):
            x.advance()
            m.d.comb += next_element.eq(element + job.x_step)
        with m.Elif(~y.last):
            x.restart()
            y.advance()
            m.d.comb += [next_row.eq(row + job.y_step), next_element.eq(next_row)]
        with m.Else():
            x.restart()
            y.restart()
            z.advance()
            m.d.comb += next_plane.eq(plane + job.z_step)
            m.d.comb += [next_row.eq(next_plane), next_element.eq(next_plane)]
