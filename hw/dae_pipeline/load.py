"""LOAD: from DRAM to the scratchpads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from amaranth import Cat, Const, Module, Mux, ResetInserter, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.axi import ADDR_BITS, ReadBus
from celosia.hw.config import Config
from celosia.hw.dae_pipeline.dma import OFFSET_BITS, ReadEngine, beat_layout
from celosia.hw.dae_pipeline.fifo import HeadFifo
from celosia.hw.dae_pipeline.inorder import InOrder
from celosia.hw.dae_pipeline.walk import Rows, Walker
from celosia.hw.isa import Buffer, Opcode, element_bytes, formats, lanes
from celosia.hw.layout import (
    ERROR_BITS,
    INDEX_BITS,
    Pulse,
    done_layout,
    error_layout,
    handles,
    unit_members,
    write_port,
)
from celosia.hw.pipeline import IN_FLIGHT, OUTSTANDING, PARTING, UNTOLD
from celosia.hw.regs import Error
from celosia.hw.scratchpads import Scratchpad, scratchpads


def _log2(value: int) -> int:
    return value.bit_length() - 1


def _ports(cfg: Config, buffers: Sequence[Buffer]) -> dict[str, wiring.Member]:
    """The members through which `buffers` are written."""
    return {pad.name: Out(write_port(pad)) for pad in (_pad(cfg, buffer) for buffer in buffers)}


def _connect(m: Module, inner: Mapping[str, Any], outer: Mapping[str, Any]) -> None:
    """The ports of a part's scratchpads to those around it."""
    for name, port in inner.items():
        wiring.connect(m, port, wiring.flipped(outer[name]))


def _pad(cfg: Config, buffer: Buffer) -> Scratchpad:
    return scratchpads(cfg)[buffer.name.lower()]


def _named(part: wiring.Component, cfg: Config, buffers: Sequence[Buffer]) -> dict[str, Any]:
    """Those members of `part`, by the names of the scratchpads."""
    names = _ports(cfg, buffers)
    return dict(zip(names, handles(part, *names)))


def element_shift(cfg: Config, buffer: Buffer, widen: bool = False) -> int:
    """log2 of the bytes that an element of `buffer` takes in DRAM."""
    return _log2(element_bytes(cfg, buffer, widen))


def _max_shift(cfg: Config, buffers: Sequence[Buffer]) -> int:
    return max(element_shift(cfg, buffer) for buffer in buffers)


class Aligner(wiring.Component):
    """Cuts the beats of rows into units: the first bytes of a unit may lie anywhere in a beat.

    row: of each row where its first unit lies (`facts`), the place of its last byte in its bus word, and log2 of the
    bytes of a unit, which divide the row. unit: `data` in the low bytes. A beat with an error gives a unit with it.
    """

    def __init__(self, bus_bytes: int) -> None:
        self._bus_bytes = bus_bytes
        word_bits = _log2(bus_bytes)
        # Of a unit: its first byte in its bus word, where the next one begins, whether it reaches into the next word,
        # and whether it ends where the row's last unit does in its word. Known a unit ahead.
        self._facts = data.StructLayout({"first": word_bits, "stop": word_bits + 1, "crosses": 1, "final": 1})
        self.row_layout = data.StructLayout({"unit": self._facts, "last": word_bits, "shift": word_bits.bit_length()})
        super().__init__({
            "row": In(stream.Signature(self.row_layout)),
            "beat": In(stream.Signature(beat_layout(bus_bytes))),
            "unit": Out(stream.Signature(data.StructLayout({"data": 8 * bus_bytes, "error": ERROR_BITS}))),
        })  # fmt: skip

    def stop(self, first: Value, shift: Value) -> Value:
        """Where the unit that begins at place `first` ends."""
        word_bits = _log2(self._bus_bytes)
        return first[:word_bits] + (1 << shift)[: word_bits + 1]

    def facts(self, first: Value, stop: Value, last: Value) -> Value:
        """Of the unit from place `first` to `stop`, in a row that ends at place `last`."""
        word_bits = _log2(self._bus_bytes)
        final = (stop - 1)[:word_bits] == last[:word_bits]
        return Cat(first[:word_bits], stop[: word_bits + 1], stop[word_bits] & stop[:word_bits].any(), final)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        word_bits = _log2(self._bus_bytes)
        row, beat = self.row.payload, self.beat.payload
        # The oldest beat is held here, the one after it is `beat`.
        held, holds = Signal(beat_layout(self._bus_bytes)), Signal()
        inside, following, present = Signal(), Signal(self._facts), Signal(self._facts)
        next_beat, crosses, row_end, take = Signal(), Signal(), Signal(), Signal()
        m.d.comb += [
            present.eq(Mux(inside, following, row.unit)),
            next_beat.eq(present.stop[word_bits]),  # the unit reaches the end of the held beat,
            crosses.eq(present.crosses),  # and beyond
            row_end.eq(present.final & Mux(crosses, beat.last, held.last)),
            self.unit.valid.eq(self.row.valid & holds & (~crosses | self.beat.valid | (held.error != Error.NONE))),
            self.unit.payload.data.eq(Cat(held.data, beat.data) >> (present.first << 3)),
            self.unit.payload.error.eq(Mux(crosses & (held.error == Error.NONE), beat.error, held.error)),
            take.eq(self.unit.valid & self.unit.ready),
            self.row.ready.eq(take & row_end),
            self.beat.ready.eq(~holds | (take & (row_end | next_beat))),
        ]
        with m.If(take):
            stop = self.stop(present.stop, row.shift)
            m.d.sync += [inside.eq(~row_end), following.eq(self.facts(present.stop, stop, row.last))]
        with m.If(self.beat.ready):
            m.d.sync += holds.eq(self.beat.valid & ~(take & row_end & crosses))
            with m.If(self.beat.valid):
                m.d.sync += held.eq(beat)
        return m


class Writer(wiring.Component):
    """Writes units to the scratchpads, those of `buffers`, and padding around them.

    job: where to (`job_of` makes it from an instruction). unit: the data of all jobs, in order.
    done, error: those of the unit LOAD. moves: 1 where a step is done.
    """

    def __init__(self, cfg: Config, buffers: Sequence[Buffer]) -> None:
        self._cfg, self._buffers = cfg, buffers
        self._tag = data.StructLayout({
            "index": INDEX_BITS, "post": 4, "buffer": 3, "widen": 1, "pad_value": 8,
        })  # fmt: skip
        element_bits = next(f.width for f in formats(cfg)[Opcode.LOAD].fields if f.name == "sram_base")
        self._step_bits = max(1, *(self._step_shift(buffer) for buffer in buffers))
        self.walker = Walker(element_bits, self._step_bits, self._tag, padded=True)
        super().__init__({
            "job": In(stream.Signature(self.walker.job_layout)),
            "unit": In(stream.Signature(data.StructLayout({"data": 8 * cfg.bus_bytes, "error": ERROR_BITS}))),
            **_ports(cfg, buffers),
            "done": Out(Pulse(done_layout)),
            "error": Out(Pulse(error_layout)),
            "moves": Out(1),
        })  # fmt: skip
        self.pads = _named(self, cfg, buffers)

    def _step_shift(self, buffer: Buffer, widen: bool = False) -> int:
        """log2 of the steps in which an element is written."""
        return max(0, element_shift(self._cfg, buffer, widen) - _log2(self._cfg.bus_bytes))

    def job_of(self, instr: Value) -> dict[str, Value]:
        """The fields of a job, from the payload of `instr`."""
        f = instr.fields
        x_stop, y_stop = f.pad_left + f.x_size, f.pad_top + f.y_size
        step_end = (1 << self._step_shift(self._buffers[0])) - 1
        for buffer in self._buffers:
            step_end = Mux(f.buffer == buffer, (1 << self._step_shift(buffer)) - 1, step_end)
        if Buffer.ACC in self._buffers:
            step_end = Mux(f.widen, (1 << self._step_shift(Buffer.ACC, True)) - 1, step_end)
        return {
            "base": f.sram_base, "x_step": f.sram_x, "y_step": f.sram_y, "z_step": f.sram_z,
            "x_end": x_stop + f.pad_right - 1, "y_end": y_stop + f.pad_bottom - 1, "z_end": f.z_size - 1,
            "x_first": f.pad_left, "x_stop": x_stop, "y_first": f.pad_top, "y_stop": y_stop,
            "step_end": step_end, "tag": Cat(instr.index, f.post, f.buffer, f.widen, f.pad_value),
        }  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        cfg = self._cfg
        m.submodules.walker = walker = self.walker
        wiring.connect(m, wiring.flipped(self.job), walker.job)

        # Steps, in a queue, so that the walk does not wait for units within a cycle.
        at, tag = walker.step.payload, walker.step.payload.tag
        m.submodules.plan = plan = HeadFifo(
            data.StructLayout({
                "element": at.element.shape(), "step": at.step.shape(), "last": 1, "outside": 1,
                **{name: tag[name].shape() for name in ("index", "post", "buffer", "widen", "pad_value")},
            }), PARTING,
        )  # fmt: skip
        m.d.comb += [
            plan.i.valid.eq(walker.step.valid),
            walker.step.ready.eq(plan.i.ready),
            *(plan.i.payload[name].eq(at[name]) for name in ("element", "step", "last", "outside")),
            *(plan.i.payload[name].eq(tag[name]) for name in ("index", "post", "buffer", "widen", "pad_value")),
        ]

        # What is to be written, in a queue, too: whether its port is free is known late in a cycle.
        m.submodules.leaving = leaving = HeadFifo(
            data.StructLayout({
                "element": at.element.shape(), "step": at.step.shape(), "enable": len(Buffer), "widen": 1, "whole": 1,
                "last": 1, "word": 8 * cfg.bus_bytes, "done": done_layout,
            }), PARTING,
        )  # fmt: skip
        out, to, moves, fails = plan.o.payload, leaving.i.payload, Signal(), Signal()
        m.d.comb += [
            moves.eq(plan.o.valid & (out.outside | self.unit.valid) & leaving.i.ready),
            plan.o.ready.eq(moves),
            self.unit.ready.eq(plan.o.valid & ~out.outside & leaving.i.ready),
            fails.eq(moves & ~out.outside & (self.unit.payload.error != Error.NONE)),
            self.moves.eq(moves),
            leaving.i.valid.eq(moves & ~fails),
            to.element.eq(out.element),
            to.step.eq(out.step),
            to.enable.eq(1 << out.buffer),
            to.widen.eq(out.widen | out.outside),
            to.whole.eq(out.outside),
            to.word.eq(Mux(out.outside, out.pad_value.replicate(cfg.bus_bytes), self.unit.payload.data)),
            to.last.eq(out.last),
            to.done.index.eq(out.index),
            to.done.post.eq(out.post),
        ]
        m.d.sync += [
            self.error.valid.eq(fails),
            self.error.payload.code.eq(self.unit.payload.error),
            self.error.payload.index.eq(out.index),
        ]
        write = leaving.o.payload
        taken = Cat(write.enable[b] & port.ready for b, port in zip(self._buffers, self.pads.values()))
        m.d.comb += leaving.o.ready.eq(taken.any())
        m.d.sync += [
            self.done.valid.eq(leaving.o.valid & leaving.o.ready & write.last),
            self.done.payload.eq(write.done),
        ]

        for buffer in self._buffers:
            pad = _pad(cfg, buffer)
            port, pieces = self.pads[pad.name], pad.pieces
            if buffer == Buffer.ACC:
                value, mask = self._acc(write.word, write.step, write.widen, write.whole)
            else:
                steps = 1 << self._step_shift(buffer)
                value = write.word[: pad.grain]
                mask = _one_of(write.step, steps) | write.whole.replicate(steps)
            m.d.comb += [
                port.en.eq(leaving.o.valid & write.enable[buffer]),
                port.addr.eq(write.element[_log2(pieces) :][: pad.address_bits] if pad.depth > 1 else 0),
                port.mask.eq(mask << (write.element[: _log2(pieces)] * len(mask)) if pieces > 1 else mask),
                port.data.eq(value.replicate(pad.width // len(value))),
            ]
        return m

    def _acc(self, word: Value, step: Value, widen: Value, whole: Value) -> tuple[Value, Value]:
        """Data for some int32 lanes, and the mask of the lanes of a piece: int8 values if `widen`, else int32."""
        cfg = self._cfg
        wide, narrow = min(cfg.bus_bytes, cfg.piece_bytes), min(cfg.bus_bytes // 4, cfg.piece_bytes)
        lanes = []
        for lane in range(wide):
            byte, int32 = word.word_select(lane, 8), word.word_select(lane % narrow, 32)
            lanes.append(Mux(widen, Cat(byte, byte[7].replicate(24)), int32))
        wide_mask = _spread(_one_of(step, cfg.piece_bytes // wide), wide)
        narrow_mask = _spread(_one_of(step, cfg.piece_bytes // narrow), narrow)
        return Cat(lanes), Mux(widen, wide_mask, narrow_mask) | whole.replicate(cfg.piece_bytes)


def _one_of(index: Value, count: int) -> Value:
    """`count` bits, of which bit `index` is set."""
    return (1 << index[: max(1, _log2(count))])[:count] if count > 1 else Value.cast(1)


def _spread(mask: Value, times: int) -> Value:
    return Cat(bit.replicate(times) for bit in mask)


class Lane(wiring.Component):
    """A way from a port to memory to the scratchpads of `buffers`; `halt` comes from an error on, in whichever lane.

    Asks for the rows of later instructions while data of earlier ones still arrives. Rows may begin at any byte.

    Members beyond `unit_members`
    -----------------------------
    bus : Out(ReadBus)              the read channel.
    dma_base, dma_size : In         where DRAM begins, a multiple of 4096, and how many bytes may be read.
    inp, wgt, ...                   `write_port`s of the scratchpads.
    """

    def __init__(self, cfg: Config, buffers: Sequence[Buffer], outstanding: int = OUTSTANDING) -> None:
        self._cfg, self._buffers, self._outstanding = cfg, buffers, outstanding
        super().__init__({
            **unit_members(cfg, Opcode.LOAD),
            "bus": Out(ReadBus(cfg.bus_bytes)),
            "dma_base": In(ADDR_BITS),
            "dma_size": In(OFFSET_BITS),
            **_ports(cfg, buffers),
        })  # fmt: skip
        self.pads = _named(self, cfg, buffers)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        cfg = self._cfg
        word_bits = _log2(cfg.bus_bytes)

        # The parts that need not answer to the bus are reset on an error.
        rows = Rows(_max_shift(cfg, self._buffers))
        writer, aligner = Writer(cfg, self._buffers), Aligner(cfg.bus_bytes)
        jobs = HeadFifo(writer.walker.job_layout, IN_FLIGHT)
        places = HeadFifo(aligner.row_layout, 2 * self._outstanding)
        # Queues that part the paths of the engine from those of `rows`, the aligner's from the engine's memory of beats
        # and from the writer's.
        asked, units = HeadFifo(rows.row.payload.shape(), PARTING), HeadFifo(aligner.unit.payload.shape(), PARTING)
        beats = HeadFifo(beat_layout(cfg.bus_bytes), PARTING)
        parts = {
            "rows": rows, "jobs": jobs, "writer": writer, "places": places, "aligner": aligner, "asked": asked,
            "beats": beats, "units": units,
        }  # fmt: skip
        for name, part in parts.items():
            m.submodules[name] = ResetInserter(self.halt)(part)
        m.submodules.engine = engine = ReadEngine(cfg.bus_bytes, rows.bytes_bits, self._outstanding)

        # An instruction goes to both sides: to `rows` for its addresses, to `jobs` for what becomes of the data.
        f = self.instr.payload.fields
        accept = Signal()
        shift = element_shift(cfg, self._buffers[0])
        for buffer in self._buffers:
            shift = Mux(f.buffer == buffer, element_shift(cfg, buffer), shift)
        if Buffer.ACC in self._buffers:
            shift = Mux(f.widen, element_shift(cfg, Buffer.ACC, True), shift)
        block = rows.block.payload
        m.d.comb += [
            self.instr.ready.eq(rows.block.ready & jobs.i.ready & ~self.halt),
            accept.eq(self.instr.valid & self.instr.ready),
            rows.block.valid.eq(accept),
            jobs.i.valid.eq(accept),
            block.addr.eq(f.dram_addr),
            block.y_step.eq(f.dram_y),
            block.z_step.eq(f.dram_z),
            block.x_size.eq(f.x_size),
            block.y_size.eq(f.y_size),
            block.z_size.eq(f.z_size),
            block.shift.eq(shift),
        ]
        for name, value in writer.job_of(self.instr.payload).items():
            m.d.comb += Value.cast(jobs.i.payload[name]).eq(value)
        wiring.connect(m, jobs.o, writer.job)

        # A row goes to the engine, and its place within its bus words to the aligner.
        row, shift_bits = rows.row.payload, len(places.i.payload.shift)
        # As wide as what computes them: cut to bits of the payload, on which other bits of it depend, they would look
        # like a combinational loop.
        unit_shift, last = Signal(shift_bits), Signal.like(row.offset[:word_bits] + row.bytes[:word_bits] - 1)
        stop = Signal.like(aligner.stop(row.offset, unit_shift))
        m.d.comb += [
            asked.i.valid.eq(rows.row.valid & places.i.ready & ~self.halt),
            asked.i.payload.eq(row),
            places.i.valid.eq(rows.row.valid & asked.i.ready & ~self.halt),
            rows.row.ready.eq(places.i.ready & asked.i.ready),  # whatever `halt` says, for it resets `rows`
            unit_shift.eq(Mux(rows.shift > word_bits, Const(word_bits, shift_bits), rows.shift[:shift_bits])),
            last.eq(row.offset[:word_bits] + row.bytes[:word_bits] - 1),
            stop.eq(aligner.stop(row.offset, unit_shift)),
            places.i.payload.unit.eq(aligner.facts(row.offset, stop, last)),
            places.i.payload.last.eq(last),
            places.i.payload.shift.eq(unit_shift),
        ]
        wiring.connect(m, asked.o, engine.row)
        wiring.connect(m, places.o, aligner.row)
        wiring.connect(m, engine.beat, beats.i)
        wiring.connect(m, beats.o, aligner.beat)
        wiring.connect(m, aligner.unit, units.i)
        wiring.connect(m, units.o, writer.unit)
        wiring.connect(m, engine.bus, wiring.flipped(self.bus))
        m.d.comb += [
            engine.dma_base.eq(self.dma_base),
            engine.dma_size.eq(self.dma_size),
            engine.halt.eq(self.halt),
        ]
        _connect(m, writer.pads, self.pads)

        in_flight = Signal(range(2 * IN_FLIGHT))
        with m.If(self.halt):
            m.d.sync += in_flight.eq(0)
        with m.Elif(accept != writer.done.valid):
            m.d.sync += in_flight.eq(Mux(accept, in_flight + 1, in_flight - 1))
        m.d.comb += [
            self.done.valid.eq(writer.done.valid),
            self.done.payload.eq(writer.done.payload),
            self.error.valid.eq(writer.error.valid),
            self.error.payload.eq(writer.error.payload),
            self.active.eq(writer.moves & ~self.halt),
            self.held.eq((in_flight != 0) & ~writer.moves & ~self.halt),
            self.quiet.eq((in_flight == 0) & engine.quiet),
        ]
        return m


class Load(wiring.Component):
    """Copies blocks from DRAM to the scratchpads; `sim.reference.load` says exactly what.

    Hands instructions in program order to a `Lane` for each port to memory; the lanes work at the same time.

    Members beyond `unit_members`
    -----------------------------
    active, held : Out(ports)       a bit for each lane.
    bus, bus1 : Out(ReadBus)        the read channels; `bus1` where there are two ports.
    dma_base, dma_size : In         where DRAM begins, a multiple of 4096, and how many bytes may be read.
    inp, wgt, ...                   `write_port`s of the scratchpads.
    """

    def __init__(self, cfg: Config, outstanding: int = OUTSTANDING) -> None:
        self._cfg, self._outstanding = cfg, outstanding
        super().__init__({
            **unit_members(cfg, Opcode.LOAD),
            "active": Out(cfg.ports),
            "held": Out(cfg.ports),
            **{name: Out(ReadBus(cfg.bus_bytes)) for name in ("bus", "bus1")[: cfg.ports]},
            "dma_base": In(ADDR_BITS),
            "dma_size": In(OFFSET_BITS),
            **_ports(cfg, [buffer for own in lanes(cfg) for buffer in own]),
        })  # fmt: skip
        self.pads = _named(self, cfg, [buffer for own in lanes(cfg) for buffer in own])
        self.buses = handles(self, *("bus", "bus1")[: cfg.ports])

    def elaborate(self, platform: object) -> Module:
        m = Module()
        parts = [Lane(self._cfg, own, self._outstanding) for own in lanes(self._cfg)]
        # From an error on, all stand still.
        failed, stop = Signal(), Signal()
        errors = Cat(lane.error.valid for lane in parts)
        m.d.comb += stop.eq(self.halt | errors.any() | failed)
        with m.If(self.halt):
            m.d.sync += failed.eq(0)
        with m.Elif(errors.any()):
            m.d.sync += failed.eq(1)

        for number, (lane, bus) in enumerate(zip(parts, self.buses)):
            m.submodules[f"lane{number}"] = lane
            wiring.connect(m, lane.bus, wiring.flipped(bus))
            _connect(m, lane.pads, self.pads)
            m.d.comb += [lane.dma_base.eq(self.dma_base), lane.dma_size.eq(self.dma_size), lane.halt.eq(stop)]
        done, told = self._hand_out(m, parts, stop)
        m.d.comb += [
            self.done.valid.eq(done.valid & ~self.halt),
            self.done.payload.eq(done.payload),
            self.error.valid.eq(errors.any() & ~self.halt),
            self.error.payload.eq(Mux(errors[0], parts[0].error.payload, parts[-1].error.payload)),
            self.active.eq(Cat(lane.active for lane in parts)),
            self.held.eq(Cat(lane.held for lane in parts)),
            self.quiet.eq(Cat(lane.quiet for lane in parts).all() & told),
        ]
        return m

    def _hand_out(self, m: Module, parts: list[Lane], stop: Value) -> tuple[wiring.PureInterface, Value]:
        """Instructions to their lanes. Returns `done`, in program order, and whether it has told of all of them."""
        if len(parts) == 1:
            wiring.connect(m, wiring.flipped(self.instr), parts[0].instr)
            return parts[0].done, Const(1)
        order = InOrder(len(parts), UNTOLD)
        m.submodules.order = ResetInserter(stop)(order)
        instr, handed = self.instr.payload, order.handed
        free = Signal()  # of the lane that it goes to
        m.d.comb += [
            self.instr.ready.eq(free & handed.ready),
            handed.valid.eq(self.instr.valid & free),
            handed.payload.done.post.eq(instr.fields.post),
            handed.payload.done.index.eq(instr.index),
            order.ended.eq(Cat(lane.done.valid for lane in parts)),
        ]
        for number, (lane, own) in enumerate(zip(parts, lanes(self._cfg))):
            m.d.comb += lane.instr.payload.eq(instr)
            with m.If(Cat(instr.fields.buffer == buffer for buffer in own).any()):
                m.d.comb += [
                    handed.payload.lane.eq(number),
                    free.eq(lane.instr.ready),
                    lane.instr.valid.eq(self.instr.valid & handed.ready),
                ]
        return order.done, order.empty
