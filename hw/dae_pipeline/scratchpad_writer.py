"""Writer of chunks into the scratchpads that LOAD fills."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amaranth import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from celosia.hw.dae_pipeline.address_generators import ScratchpadAddressGenerator, job_layout
from celosia.hw.dae_pipeline.fifo import RegisteredFifo
from celosia.hw.dae_pipeline.weight_decompressor import (
    PackHeaderParser,
    WeightDecompressor,
    choices_layout,
    chunk_layout,
)
from celosia.hw.lib.layout import ERROR_BITS, INDEX_BITS, Pulse, done_layout, error_layout, load_port
from celosia.hw.lib.probes import probes
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Buffer, Opcode, element_bytes, formats
from celosia.hw.spec.packing import packing
from celosia.hw.spec.pipeline import EXPAND_STAGES, SKID_DEPTH
from celosia.hw.spec.regs import Error
from celosia.hw.spec.scratchpads import Scratchpad, scratchpads


def ports(cfg: Config, buffers: Sequence[Buffer]) -> dict[str, wiring.Member]:
    """Return the ports that write `buffers`, by scratchpad. Codebooks have none: they lie inside the decompressor."""
    outside = (_pad(cfg, buffer) for buffer in buffers if buffer != Buffer.BOOK)
    return {pad.name: Out(load_port(cfg, pad)) for pad in outside}


def connect_pads(m: Module, inner: Mapping[str, Any], outer: Mapping[str, Any]) -> None:
    """Connect the scratchpad ports of a part to those around it."""
    for name, port in inner.items():
        wiring.connect(m, port, wiring.flipped(outer[name]))


def _pad(cfg: Config, buffer: Buffer) -> Scratchpad:
    """Return the scratchpad of a buffer of LOAD."""
    return scratchpads(cfg)[buffer.name.lower()]


def pads_of(part: wiring.Component, cfg: Config, buffers: Sequence[Buffer]) -> dict[str, Any]:
    """Return the scratchpad ports of `part`, by the names of the scratchpads."""
    return {name: getattr(part, name) for name in ports(cfg, buffers)}


@dataclass(frozen=True)
class LoadChannelSizes:
    """Sizes of one channel of LOAD, which follow from the buffers that it fills.

    number: number of the channel, and of the half of each element that it fills if weights are spread.
    """

    cfg: Config
    buffers: Sequence[Buffer]
    number: int = 0

    @property
    def spreads(self) -> bool:
        """Whether the channel may fill one half of each element, of spread weights."""
        return scratchpads(self.cfg)["wgt"].spread and Buffer.WGT in self.buffers

    @property
    def expands(self) -> bool:
        """Whether the channel has a decompressor for packed weights."""
        return self.cfg.weight_bits < 8 and Buffer.WGT in self.buffers and self.number == self.cfg.ports - 1

    def element_shift(self, buffer: Buffer, widen: bool = False) -> int:
        """Return log2 of the bytes of an element of `buffer` in DRAM. Without `int32` one of acc is always widened."""
        return exact_log2(element_bytes(self.cfg, buffer, widen or (buffer == Buffer.ACC and not self.cfg.int32)))

    def step_shift(self, buffer: Buffer, widen: bool = False) -> int:
        """Return log2 of the steps in which an element of `buffer` is written."""
        return max(0, self.element_shift(buffer, widen) - exact_log2(self.cfg.bus_bytes))

    def by_buffer(self, fields: Any, size: Callable[[Buffer, bool], int]) -> Value | int:
        """Select `size` of the buffer that a LOAD fills, by the fields of the instruction."""
        selected: Value | int = size(self.buffers[0], False)
        for buffer in self.buffers:
            selected = Mux(fields.buffer == buffer, size(buffer, False), selected)
        if Buffer.ACC in self.buffers and self.cfg.int32:
            selected = Mux(fields.widen, size(Buffer.ACC, True), selected)
        return selected

    @property
    def flags(self) -> tuple[str, ...]:
        """Names of the fields of an instruction that not every channel uses."""
        return ("spread",) * self.spreads + ("expand",) * self.expands

    @property
    def tag(self) -> data.StructLayout:
        """Layout of the fields of the instruction that go along with each step of a job."""
        bits = {field.name: field.width for field in formats(self.cfg)[Opcode.LOAD].fields}
        return data.StructLayout(
            {"index": INDEX_BITS, "post": 4, "buffer": bits["buffer"], "widen": 1, "pad_value": 8}
            | dict.fromkeys(self.flags, 1)
        )

    @property
    def walk(self) -> tuple[int, int, data.StructLayout, bool]:
        """Parameters of the channel's `ScratchpadAddressGenerator`."""
        bits = {field.name: field.width for field in formats(self.cfg)[Opcode.LOAD].fields}
        return bits["sram_base"], max(1, *(self.step_shift(buffer) for buffer in self.buffers)), self.tag, True

    def job(self, instr: Value) -> dict[str, Value]:
        """Return the fields of `job_layout` from the payload of `instr`."""
        f = instr.fields
        x_stop, y_stop = f.pad_left + f.x_size, f.pad_top + f.y_size
        step_end = self.by_buffer(f, lambda *buffer: (1 << self.step_shift(*buffer)) - 1)
        steps = 1 << self.step_shift(Buffer.WGT)
        if self.spreads:  # whose chunks are half of an element
            step_end = Mux(f.spread, steps // 2 - 1, step_end)
        if self.expands:
            step_end = Mux(f.expand, steps // packing(self.cfg).expansion - 1, step_end)
        return {
            "base": f.sram_base, "x_step": f.sram_x, "y_step": f.sram_y, "z_step": f.sram_z,
            "x_end": x_stop + f.pad_right - 1, "y_end": y_stop + f.pad_bottom - 1, "z_end": f.z_size - 1,
            "x_first": f.pad_left, "x_stop": x_stop, "y_first": f.pad_top, "y_stop": y_stop,
            "step_end": step_end,
            "tag": Cat(instr.index, f.post, f.buffer, f.widen, f.pad_value, *(f[name] for name in self.flags)),
        }  # fmt: skip


class ScratchpadWriter(wiring.Component):
    """Writes chunks to the scratchpads of some buffers, and padding around them.

    Parameters
    ----------
    cfg : Config
    buffers : Sequence[Buffer]  Buffers that it fills.
    channel : int               Number of its channel of LOAD, which fills that half of each element of spread weights.

    Members
    -------
    job : In(stream)            Blocks to write, as `LoadChannelSizes.job` makes them from instructions.
    chunk : In(stream)          The data of all jobs, in order.
    inp, wgt, acc, vin, par, lut, tap, exp : Out(WritePort)     The scratchpads of `buffers`, those that the Config has.
    done, error : Out(Pulse)    Those of the unit LOAD.
    moves : Out(1)              A step is done in this cycle.
    """

    def __init__(self, cfg: Config, buffers: Sequence[Buffer], channel: int = 0) -> None:
        self._cfg, self._buffers, self._sizes = cfg, buffers, LoadChannelSizes(cfg, buffers, channel)
        super().__init__({
            "job": In(stream.Signature(job_layout(*self._sizes.walk))),
            "chunk": In(stream.Signature(chunk_layout(cfg.bus_bytes))),
            **ports(cfg, buffers),
            "done": Out(Pulse(done_layout)),
            "error": Out(Pulse(error_layout)),
            "moves": Out(1),
        })  # fmt: skip
        self.pads = pads_of(self, cfg, buffers)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        cfg = self._cfg
        m.submodules.walker = walker = ScratchpadAddressGenerator(*self._sizes.walk)
        wiring.connect(m, wiring.flipped(self.job), walker.job)

        # Steps, in a queue, so that the walk does not wait for chunks within a cycle.
        at, tag = walker.step.payload, walker.step.payload.tag
        m.submodules.step_queue = step_queue = RegisteredFifo(
            data.StructLayout({
                "element": at.element.shape(), "step": at.step.shape(), "last": 1, "outside": 1,
                **tag.shape().members,
            }), SKID_DEPTH,
        )  # fmt: skip
        m.d.comb += [
            step_queue.i.valid.eq(walker.step.valid),
            walker.step.ready.eq(step_queue.i.ready),
            *(step_queue.i.payload[name].eq(at[name]) for name in ("element", "step", "last", "outside")),
            *(step_queue.i.payload[name].eq(tag[name]) for name, _ in tag.shape()),
        ]

        # What is to be written, in a queue, too: whether its port is free is known late in a cycle.
        m.submodules.write_queue = write_queue = RegisteredFifo(
            data.StructLayout({
                "element": at.element.shape(), "step": at.step.shape(), "enable": len(Buffer), "widen": 1, "whole": 1,
                "far": 1, "last": 1, "word": 8 * cfg.bus_bytes, "done": done_layout, "error": ERROR_BITS,
                **({"expand": 1, "choices": choices_layout(packing(cfg).chunk_blocks)} if self._sizes.expands else {}),
            }), SKID_DEPTH,
        )  # fmt: skip
        self._take(m, step_queue, write_queue, self._chunks(m, step_queue, write_queue))
        write = write_queue.o.payload
        failed = Signal()
        ports_ = self.pads | self._expander(m, write)
        accepted = Cat(write.enable[b] & ports_[_pad(cfg, b).name].ready for b in self._buffers)
        m.d.comb += [failed.eq(write.error != Error.NONE), write_queue.o.ready.eq(accepted.any() | failed)]
        done, error = self._reports(m)
        # An error is reported in its turn, after the ends of all steps before it.
        m.d.sync += [
            done.valid.eq(write_queue.o.valid & write_queue.o.ready & write.last & ~failed),
            done.payload.eq(write.done),
            error.valid.eq(write_queue.o.valid & failed),
            error.payload.code.eq(write.error),
            error.payload.index.eq(write.done.index),
        ]

        self._write(m, write_queue, ports_)
        probes(self, write_queue=write_queue, failed=failed)
        return m

    def _reports(self, m: Module) -> tuple[Any, Any]:
        """Return pulses for `done` and `error`, to be set in the cycle after a step has left the queue of steps.

        The step is committed in that cycle, or one later. With a decompressor, the members follow EXPAND_STAGES cycles
        later, as the writes to wgt do.
        """
        if not self._sizes.expands:
            return self.done, self.error
        now: tuple[Any, Any] = (self.done, self.error)
        for stage in range(EXPAND_STAGES):
            done = Pulse(done_layout).create(path=(f"done{stage}",))
            earlier = done, Pulse(error_layout).create(path=(f"error{stage}",))
            for later, pulse in zip(now, earlier):
                m.d.sync += [later.valid.eq(pulse.valid), later.payload.eq(pulse.payload)]
            now = earlier
        return now

    def _chunks(self, m: Module, step_queue: RegisteredFifo, write_queue: RegisteredFifo) -> stream.Interface:
        """Return the stream of chunks to write: all but the heads of packs, which the parser takes out."""
        if not self._sizes.expands:
            return self.chunk
        out, to = step_queue.o.payload, write_queue.i.payload
        m.submodules.heads = heads = PackHeaderParser(self._cfg)
        wiring.connect(m, wiring.flipped(self.chunk), heads.chunk)
        m.d.comb += [
            heads.packed.eq(step_queue.o.valid & out.expand & ~out.outside),
            to.expand.eq(out.expand & ~out.outside),
            to.choices.eq(heads.choices),
        ]
        return heads.rest

    def _take(
        self, m: Module, step_queue: RegisteredFifo, write_queue: RegisteredFifo, chunks: stream.Interface
    ) -> None:
        """Move a step to the queue of writes, together with its chunk; padding has no chunk."""
        cfg = self._cfg
        out = step_queue.o.payload
        to = write_queue.i.payload
        moves = Signal()
        error = Signal(ERROR_BITS)
        m.d.comb += [
            moves.eq(step_queue.o.valid & (out.outside | chunks.valid) & write_queue.i.ready),
            step_queue.o.ready.eq(moves),
            chunks.ready.eq(step_queue.o.valid & ~out.outside & write_queue.i.ready),
            error.eq(Mux(out.outside, Error.NONE, chunks.payload.error)),
            self.moves.eq(
                moves | (self.chunk.valid & self.chunk.ready) if self._sizes.expands else moves
            ),  # heads, too
            write_queue.i.valid.eq(moves),
            to.error.eq(error),
            to.element.eq(out.element),
            to.step.eq(self._place(out)),
            to.enable.eq(Mux(error == Error.NONE, 1 << out.buffer, 0)),  # nothing is written of it
            to.widen.eq(out.widen | out.outside),
            to.whole.eq(out.outside),
            to.far.eq(self._is_second_half(out)),
            to.word.eq(Mux(out.outside, out.pad_value.replicate(cfg.bus_bytes), chunks.payload.data)),
            to.last.eq(out.last),
            to.done.index.eq(out.index),
            to.done.post.eq(out.post),
        ]
        probes(self, out=out, moves=moves)

    def _is_second_half(self, step: data.View[data.StructLayout]) -> Value:
        """Return whether this channel fills only the second half of the element: spread weights, second channel."""
        return step.spread if self._sizes.spreads and self._sizes.number else Const(0)

    def _place(self, step: data.View[data.StructLayout]) -> Value:
        """Return the number of the part of its element that a step writes; of packed weights, the first of several."""
        place = step.step | Mux(self._is_second_half(step), (1 << self._sizes.step_shift(Buffer.WGT)) // 2, 0)
        if not self._sizes.expands:
            return place
        return Mux(step.expand & ~step.outside, step.step << exact_log2(packing(self._cfg).expansion), place)

    def _padded(self, write: data.View[data.StructLayout], steps: int) -> Value:
        """Return a mask of the parts of an element that padding fills.

        The second channel leaves out the first half: the other channel may already have written new data there.
        """
        near = write.whole & ~write.far
        return Cat(near.replicate(steps // 2), write.whole.replicate(steps - steps // 2))

    def _write(self, m: Module, write_queue: RegisteredFifo, ports_: Mapping[str, Any]) -> None:
        """Connect the oldest write to the port of its scratchpad."""
        write = write_queue.o.payload
        for buffer in self._buffers:
            pad = _pad(self._cfg, buffer)
            port, pieces = ports_[pad.name], pad.pieces
            if buffer == Buffer.ACC:
                value, mask = self._acc(write.word, write.step, write.widen, write.whole)
            else:
                steps = 1 << self._sizes.step_shift(buffer)
                value = write.word[: pad.grain]
                mask = _one_of(write.step, steps) | self._padded(write, steps)
                if self._sizes.expands and buffer == Buffer.WGT:
                    mask = self._expanded(write, steps) | self._padded(write, steps)
            m.d.comb += [
                port.en.eq(write_queue.o.valid & write.enable[buffer]),
                port.addr.eq(write.element[exact_log2(pieces) :][: pad.address_bits] if pad.depth > 1 else 0),
                port.mask.eq(mask << (write.element[: exact_log2(pieces)] * len(mask)) if pieces > 1 else mask),
                port.data.eq(value.replicate(len(port.data) // len(value))),
            ]

    def _expanded(self, write: data.View[data.StructLayout], steps: int) -> Value:
        """Return a mask of the parts of an element that a step fills: one, or all that packed weights expand to."""
        times = packing(self._cfg).expansion
        bits = exact_log2(times)
        own = _one_of(write.step[:bits], times) | write.expand.replicate(times)
        return _spread(_one_of(write.step[bits:], steps // times), times) & own.replicate(steps // times)

    def _expander(self, m: Module, write: data.View[data.StructLayout]) -> dict[str, Any]:
        """Build the decompressor, if the channel has one. Returns its write ports, by the names "wgt" and "book"."""
        if not self._sizes.expands:
            return {}
        m.submodules.expander = expander = WeightDecompressor(self._cfg)
        m.d.comb += [expander.expand.eq(write.expand), expander.choices.eq(write.choices)]
        wiring.connect(m, expander.wgt, wiring.flipped(self.wgt))
        return {"wgt": expander.write, "book": expander.book}

    def _acc(self, word: Value, step: Value, widen: Value, whole: Value) -> tuple[Value, Value]:
        """Return the data of some lanes of acc, and the mask of these lanes within a piece.

        widen: `word` holds int8, to be extended to int32; else int32. step: number of the word in its piece. whole:
        padding fills all lanes. In a Config without `int32`, data stay int8 here.
        """
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
    """Return `count` bits, of which bit `index` is set."""
    return (1 << index[: max(1, exact_log2(count))])[:count] if count > 1 else Value.cast(1)


def _spread(mask: Value, times: int) -> Value:
    """Repeat each bit of a mask `times` times."""
    return Cat(bit.replicate(times) for bit in mask)
