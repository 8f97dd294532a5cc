"""From units to the scratchpads that LOAD writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from amaranth import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from celosia.hw.dae_pipeline.expand import CHOICE_BITS, PackHeaderParser, WeightDecompressor, unit_layout
from celosia.hw.dae_pipeline.fifo import RegisteredFifo
from celosia.hw.dae_pipeline.walk import ScratchpadAddressGenerator
from celosia.hw.lib.layout import ERROR_BITS, INDEX_BITS, Pulse, done_layout, error_layout, load_port
from celosia.hw.lib.probes import probes
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Buffer, Opcode, element_bytes, formats
from celosia.hw.spec.packing import packing
from celosia.hw.spec.pipeline import EXPAND_STAGES, SKID_DEPTH
from celosia.hw.spec.regs import Error
from celosia.hw.spec.scratchpads import Scratchpad, scratchpads


def ports(cfg: Config, buffers: Sequence[Buffer]) -> dict[str, wiring.Member]:
    """The members through which `buffers` are written; codebooks stay inside."""
    outside = (_pad(cfg, buffer) for buffer in buffers if buffer != Buffer.BOOK)
    return {pad.name: Out(load_port(cfg, pad)) for pad in outside}


def connect_pads(m: Module, inner: Mapping[str, Any], outer: Mapping[str, Any]) -> None:
    """The ports of a part's scratchpads to those around it."""
    for name, port in inner.items():
        wiring.connect(m, port, wiring.flipped(outer[name]))


def _pad(cfg: Config, buffer: Buffer) -> Scratchpad:
    return scratchpads(cfg)[buffer.name.lower()]


def pads_of(part: wiring.Component, cfg: Config, buffers: Sequence[Buffer]) -> dict[str, Any]:
    """Those members of `part`, by the names of the scratchpads."""
    return {name: getattr(part, name) for name in ports(cfg, buffers)}


def element_shift(cfg: Config, buffer: Buffer, widen: bool = False) -> int:
    """log2 of the bytes that an element of `buffer` takes in DRAM; of acc it is always widened without `int32`."""
    return exact_log2(element_bytes(cfg, buffer, widen or (buffer == Buffer.ACC and not cfg.int32)))


def by_buffer(cfg: Config, buffers: Sequence[Buffer], fields: Any, of: Callable[[Buffer, bool], int]) -> Value | int:
    """What `of` gives for the buffer of a LOAD, of `buffers`, and for whether it widens."""
    found: Value | int = of(buffers[0], False)
    for buffer in buffers:
        found = Mux(fields.buffer == buffer, of(buffer, False), found)
    if Buffer.ACC in buffers and cfg.int32:
        found = Mux(fields.widen, of(Buffer.ACC, True), found)
    return found


class ScratchpadWriter(wiring.Component):
    """Writes units to the scratchpads, those of `buffers`, and padding around them.

    job: where to (`job_of` makes it from an instruction). unit: the data of all jobs, in order.
    done, error: those of the unit LOAD. moves: 1 where a step is done.
    lane: which half of an element is its own, where it is spread.
    """

    def __init__(self, cfg: Config, buffers: Sequence[Buffer], lane: int = 0) -> None:
        self._cfg, self._buffers, self._lane = cfg, buffers, lane
        self._spread = scratchpads(cfg)["wgt"].spread and Buffer.WGT in buffers
        bits = {field.name: field.width for field in formats(cfg)[Opcode.LOAD].fields}
        self._facts = {"index": INDEX_BITS, "post": 4, "buffer": bits["buffer"], "widen": 1, "pad_value": 8}
        self.expands = cfg.weight_bits < 8 and Buffer.WGT in buffers and lane == cfg.ports - 1
        flags = {"spread": self._spread, "expand": self.expands}
        self._flags = [name for name, has in flags.items() if has]
        self._facts |= dict.fromkeys(self._flags, 1)
        self._tag = data.StructLayout(self._facts)
        self._step_bits = max(1, *(self._step_shift(buffer) for buffer in buffers))
        self.walker = ScratchpadAddressGenerator(bits["sram_base"], self._step_bits, self._tag, padded=True)
        super().__init__({
            "job": In(stream.Signature(self.walker.job_layout)),
            "unit": In(stream.Signature(unit_layout(cfg.bus_bytes))),
            **ports(cfg, buffers),
            "done": Out(Pulse(done_layout)),
            "error": Out(Pulse(error_layout)),
            "moves": Out(1),
        })  # fmt: skip
        self.pads = pads_of(self, cfg, buffers)

    def _step_shift(self, buffer: Buffer, widen: bool = False) -> int:
        """log2 of the steps in which an element is written."""
        return max(0, element_shift(self._cfg, buffer, widen) - exact_log2(self._cfg.bus_bytes))

    def job_of(self, instr: Value) -> dict[str, Value]:
        """The fields of a job, from the payload of `instr`."""
        f = instr.fields
        x_stop, y_stop = f.pad_left + f.x_size, f.pad_top + f.y_size
        step_end = by_buffer(self._cfg, self._buffers, f, lambda *of: (1 << self._step_shift(*of)) - 1)
        steps = 1 << self._step_shift(Buffer.WGT)
        if self._spread:  # whose units are half of an element
            step_end = Mux(f.spread, steps // 2 - 1, step_end)
        if self.expands:
            step_end = Mux(f.expand, steps // packing(self._cfg).expansion - 1, step_end)
        return {
            "base": f.sram_base, "x_step": f.sram_x, "y_step": f.sram_y, "z_step": f.sram_z,
            "x_end": x_stop + f.pad_right - 1, "y_end": y_stop + f.pad_bottom - 1, "z_end": f.z_size - 1,
            "x_first": f.pad_left, "x_stop": x_stop, "y_first": f.pad_top, "y_stop": y_stop,
            "step_end": step_end,
            "tag": Cat(instr.index, f.post, f.buffer, f.widen, f.pad_value, *(f[name] for name in self._flags)),
        }  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        cfg = self._cfg
        m.submodules.walker = walker = self.walker
        wiring.connect(m, wiring.flipped(self.job), walker.job)

        # Steps, in a queue, so that the walk does not wait for units within a cycle.
        at, tag = walker.step.payload, walker.step.payload.tag
        m.submodules.plan = plan = RegisteredFifo(
            data.StructLayout({
                "element": at.element.shape(), "step": at.step.shape(), "last": 1, "outside": 1,
                **self._facts,
            }), SKID_DEPTH,
        )  # fmt: skip
        m.d.comb += [
            plan.i.valid.eq(walker.step.valid),
            walker.step.ready.eq(plan.i.ready),
            *(plan.i.payload[name].eq(at[name]) for name in ("element", "step", "last", "outside")),
            *(plan.i.payload[name].eq(tag[name]) for name in self._facts),
        ]

        # What is to be written, in a queue, too: whether its port is free is known late in a cycle.
        m.submodules.leaving = leaving = RegisteredFifo(
            data.StructLayout({
                "element": at.element.shape(), "step": at.step.shape(), "enable": len(Buffer), "widen": 1, "whole": 1,
                "far": 1, "last": 1, "word": 8 * cfg.bus_bytes, "done": done_layout, "error": ERROR_BITS,
                **({"expand": 1, "choices": CHOICE_BITS * packing(cfg).chunk_blocks} if self.expands else {}),
            }), SKID_DEPTH,
        )  # fmt: skip
        self._take(m, plan, leaving, self._units(m, plan, leaving))
        write = leaving.o.payload
        failed = Signal()
        ports_ = self.pads | self._expander(m, write)
        taken = Cat(write.enable[b] & ports_[_pad(cfg, b).name].ready for b in self._buffers)
        m.d.comb += [failed.eq(write.error != Error.NONE), leaving.o.ready.eq(taken.any() | failed)]
        done, error = self._told(m)
        # An error is told in its turn, after the ends of all steps before it.
        m.d.sync += [
            done.valid.eq(leaving.o.valid & leaving.o.ready & write.last & ~failed),
            done.payload.eq(write.done),
            error.valid.eq(leaving.o.valid & failed),
            error.payload.code.eq(write.error),
            error.payload.index.eq(write.done.index),
        ]

        self._write(m, leaving, ports_)
        probes(self, leaving=leaving, failed=failed)
        return m

    def _told(self, m: Module) -> tuple[Any, Any]:
        """What is told of ends and errors, in the cycle after a step has left: that in which it is committed, or one
        before it, where weights take one more."""
        if not self.expands:
            return self.done, self.error
        now: tuple[Any, Any] = (self.done, self.error)
        for stage in range(EXPAND_STAGES):
            done = Pulse(done_layout).create(path=(f"done{stage}",))
            earlier = done, Pulse(error_layout).create(path=(f"error{stage}",))
            for later, pulse in zip(now, earlier):
                m.d.sync += [later.valid.eq(pulse.valid), later.payload.eq(pulse.payload)]
            now = earlier
        return now

    def _units(self, m: Module, plan: RegisteredFifo, leaving: RegisteredFifo) -> stream.Interface:
        """The units of steps: all, or those that are not heads of packed weights."""
        if not self.expands:
            return self.unit
        out, to = plan.o.payload, leaving.i.payload
        m.submodules.heads = heads = PackHeaderParser(self._cfg)
        wiring.connect(m, wiring.flipped(self.unit), heads.unit)
        m.d.comb += [
            heads.packed.eq(plan.o.valid & out.expand & ~out.outside),
            to.expand.eq(out.expand & ~out.outside),
            to.choices.eq(heads.choices),
        ]
        return heads.rest

    def _take(self, m: Module, plan: RegisteredFifo, leaving: RegisteredFifo, units: stream.Interface) -> None:
        """A step, with its unit where it is not padding, to those that leave."""
        cfg = self._cfg
        out = plan.o.payload
        to = leaving.i.payload
        moves = Signal()
        error = Signal(ERROR_BITS)
        m.d.comb += [
            moves.eq(plan.o.valid & (out.outside | units.valid) & leaving.i.ready),
            plan.o.ready.eq(moves),
            units.ready.eq(plan.o.valid & ~out.outside & leaving.i.ready),
            error.eq(Mux(out.outside, Error.NONE, units.payload.error)),
            self.moves.eq(moves | (self.unit.valid & self.unit.ready) if self.expands else moves),  # heads, too
            leaving.i.valid.eq(moves),
            to.error.eq(error),
            to.element.eq(out.element),
            to.step.eq(self._place(out)),
            to.enable.eq(Mux(error == Error.NONE, 1 << out.buffer, 0)),  # nothing is written of it
            to.widen.eq(out.widen | out.outside),
            to.whole.eq(out.outside),
            to.far.eq(self._far(out)),
            to.word.eq(Mux(out.outside, out.pad_value.replicate(cfg.bus_bytes), units.payload.data)),
            to.last.eq(out.last),
            to.done.index.eq(out.index),
            to.done.post.eq(out.post),
        ]
        probes(self, out=out, moves=moves)

    def _far(self, step: data.View[data.StructLayout]) -> Value:
        """Whether only the second half of its element is this lane's: of what is spread, in a lane that is not the
        first."""
        return step.spread if self._spread and self._lane else Const(0)

    def _place(self, step: data.View[data.StructLayout]) -> Value:
        """Where in its element a step writes: at the first of several places, where it is expanded."""
        place = step.step | Mux(self._far(step), (1 << self._step_shift(Buffer.WGT)) // 2, 0)
        if not self.expands:
            return place
        return Mux(step.expand & ~step.outside, step.step << exact_log2(packing(self._cfg).expansion), place)

    def _padded(self, write: data.View[data.StructLayout], steps: int) -> Value:
        """The parts of an element that padding fills: not those that the other lane may have filled again since."""
        near = write.whole & ~write.far
        return Cat(near.replicate(steps // 2), write.whole.replicate(steps - steps // 2))

    def _write(self, m: Module, leaving: RegisteredFifo, ports_: Mapping[str, Any]) -> None:
        """What leaves, to the port of its scratchpad."""
        write = leaving.o.payload
        for buffer in self._buffers:
            pad = _pad(self._cfg, buffer)
            port, pieces = ports_[pad.name], pad.pieces
            if buffer == Buffer.ACC:
                value, mask = self._acc(write.word, write.step, write.widen, write.whole)
            else:
                steps = 1 << self._step_shift(buffer)
                value = write.word[: pad.grain]
                mask = _one_of(write.step, steps) | self._padded(write, steps)
                if self.expands and buffer == Buffer.WGT:
                    mask = self._expanded(write, steps) | self._padded(write, steps)
            m.d.comb += [
                port.en.eq(leaving.o.valid & write.enable[buffer]),
                port.addr.eq(write.element[exact_log2(pieces) :][: pad.address_bits] if pad.depth > 1 else 0),
                port.mask.eq(mask << (write.element[: exact_log2(pieces)] * len(mask)) if pieces > 1 else mask),
                port.data.eq(value.replicate(len(port.data) // len(value))),
            ]

    def _expanded(self, write: data.View[data.StructLayout], steps: int) -> Value:
        """The parts of an element that a step fills: one, or as many neighbours as it is expanded to."""
        times = packing(self._cfg).expansion
        bits = exact_log2(times)
        own = _one_of(write.step[:bits], times) | write.expand.replicate(times)
        return _spread(_one_of(write.step[bits:], steps // times), times) & own.replicate(steps // times)

    def _expander(self, m: Module, write: data.View[data.StructLayout]) -> dict[str, Any]:
        """The ports through which wgt is written some cycles later, by units that may be expanded, and codebooks; none
        where nothing is."""
        if not self.expands:
            return {}
        m.submodules.expander = expander = WeightDecompressor(self._cfg)
        m.d.comb += [expander.expand.eq(write.expand), expander.choices.eq(write.choices)]
        wiring.connect(m, expander.wgt, wiring.flipped(self.wgt))
        return {"wgt": expander.write, "book": expander.book}

    def _acc(self, word: Value, step: Value, widen: Value, whole: Value) -> tuple[Value, Value]:
        """Data for some lanes, and the mask of the lanes of a piece: int8 values if `widen`, else int32. Without
        `int32` they are int8 here, too."""
        cfg = self._cfg
        wide, narrow = min(cfg.bus_bytes, cfg.piece_bytes), min(cfg.bus_bytes // 4, cfg.piece_bytes)
        bytes_ = [word.word_select(lane, 8) for lane in range(wide)]
        lanes = list(bytes_)
        mask = _spread(_one_of(step, cfg.piece_bytes // wide), wide)
        if cfg.int32:
            lanes = [Cat(byte, byte[7].replicate(24)) for byte in bytes_]
            lanes = [Mux(widen, byte, word.word_select(lane % narrow, 32)) for lane, byte in enumerate(lanes)]
            mask = Mux(widen, mask, _spread(_one_of(step, cfg.piece_bytes // narrow), narrow))
        return Cat(lanes), mask | whole.replicate(cfg.piece_bytes)


def _one_of(index: Value, count: int) -> Value:
    """`count` bits, of which bit `index` is set."""
    return (1 << index[: max(1, exact_log2(count))])[:count] if count > 1 else Value.cast(1)


def _spread(mask: Value, times: int) -> Value:
    return Cat(bit.replicate(times) for bit in mask)
