"""Write the chunks of LOAD, and padding, to the scratchpads."""

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
    """Return the write ports of the scratchpads of `buffers`, by name. Codebooks lie inside the decompressor."""
    pads = (_scratchpad_of(cfg, buffer) for buffer in buffers if buffer != Buffer.BOOK)
    return {pad.name: Out(load_port(cfg, pad)) for pad in pads}


def connect_pads(m: Module, inner: Mapping[str, Any], outer: Mapping[str, Any]) -> None:
    """Connect the scratchpad ports of a submodule to those of the component around it, by name."""
    for name, port in inner.items():
        wiring.connect(m, port, wiring.flipped(outer[name]))


def _scratchpad_of(cfg: Config, buffer: Buffer) -> Scratchpad:
    """Return the scratchpad of a buffer of LOAD."""
    return scratchpads(cfg)[buffer.name.lower()]


def pads_of(part: wiring.Component, cfg: Config, buffers: Sequence[Buffer]) -> dict[str, Any]:
    """Return the scratchpad ports of `part`, by the names of the scratchpads."""
    return {name: getattr(part, name) for name in ports(cfg, buffers)}


@dataclass(frozen=True)
class LoadChannelSizes:
    """Sizes of one channel of LOAD, which follow from the buffers that it fills.

    cfg : Config of the accelerator.
    buffers : scratchpads that the channel fills.
    number : number of the channel, and of the half of each element that it fills if weights are spread.
    """

    cfg: Config
    buffers: Sequence[Buffer]
    number: int = 0

    @property
    def spreads(self) -> bool:
        """Whether the channel moves halves of elements, for spread weights."""
        return scratchpads(self.cfg)["wgt"].spread and Buffer.WGT in self.buffers

    @property
    def expands(self) -> bool:
        """Whether the channel has a decompressor for packed weights."""
        return self.cfg.weight_bits < 8 and Buffer.WGT in self.buffers and self.number == self.cfg.ports - 1

    def element_shift(self, buffer: Buffer, widen: bool = False) -> int:
        """Return log2 of the bytes in DRAM of an element of `buffer`.

        widen: the elements are int8 that become int32 in acc. Without `int32` in the Config they always are.
        """
        return exact_log2(element_bytes(self.cfg, buffer, widen or (buffer == Buffer.ACC and not self.cfg.int32)))

    def step_shift(self, buffer: Buffer, widen: bool = False) -> int:
        """Return log2 of the steps in which an element of `buffer` is written, one for each bus word."""
        return max(0, self.element_shift(buffer, widen) - exact_log2(self.cfg.bus_bytes))

    def by_buffer(self, fields: Any, size: Callable[[Buffer, bool], int]) -> Value | int:
        """Return `size(buffer, widen)` of the scratchpad that an instruction fills, selected by its `fields`."""
        selected: Value | int = size(self.buffers[0], False)
        for buffer in self.buffers:
            selected = Mux(fields.buffer == buffer, size(buffer, False), selected)
        if Buffer.ACC in self.buffers and self.cfg.int32:
            selected = Mux(fields.widen, size(Buffer.ACC, True), selected)
        return selected

    @property
    def flags(self) -> tuple[str, ...]:
        """Names of those optional fields of an instruction that this channel uses: spread, expand."""
        return ("spread",) * self.spreads + ("expand",) * self.expands

    @property
    def tag(self) -> data.StructLayout:
        """Layout of the values of an instruction that each step of its job needs."""
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
        """Return the job of the channel's ScratchpadAddressGenerator that writes what LOAD instruction `instr` loads.

        By the names of the fields of `job_layout`.
        """
        f = instr.fields
        x_stop, y_stop = f.pad_left + f.x_size, f.pad_top + f.y_size
        step_end = self.by_buffer(f, lambda buffer, widen: (1 << self.step_shift(buffer, widen)) - 1)
        steps = 1 << self.step_shift(Buffer.WGT)
        if self.spreads:  # the channel writes half of each element
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
    """Write chunks to some of the scratchpads, and padding around them.

    Parameters
    ----------
    cfg : Config
    buffers : Sequence[Buffer]  Scratchpads that it fills.
    channel : int               Number of its channel of LOAD, and of the half of each element of spread weights.

    Members
    -------
    job : In(stream)            Blocks to write, as `LoadChannelSizes.job` makes them from instructions.
    chunk : In(stream)          The data of all jobs, in order.
    inp, wgt, acc, vin, par, lut, tap, exp : Out(WritePort)     The scratchpads of `buffers`, if the Config has them.
    done, error : Out(Pulse)    The pulses of unit LOAD with these names.
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

        # A queue of steps cuts the combinational path from chunks to the address generator.
        address, tag = walker.step.payload, walker.step.payload.tag
        m.submodules.step_queue = step_queue = RegisteredFifo(
            data.StructLayout({
                "element": address.element.shape(), "step": address.step.shape(), "last": 1, "outside": 1,
                **tag.shape().members,
            }), SKID_DEPTH,
        )  # fmt: skip
        m.d.comb += [
            step_queue.i.valid.eq(walker.step.valid),
            walker.step.ready.eq(step_queue.i.ready),
            *(step_queue.i.payload[name].eq(address[name]) for name in ("element", "step", "last", "outside")),
            *(step_queue.i.payload[name].eq(tag[name]) for name, _ in tag.shape()),
        ]

        # A queue of writes cuts the path from the ports' `ready`, which comes late in a cycle.
        m.submodules.write_queue = write_queue = RegisteredFifo(
            data.StructLayout({
                "element": address.element.shape(), "step": address.step.shape(), "enable": len(Buffer),
                "widen": 1, "whole": 1, "far": 1, "last": 1, "word": 8 * cfg.bus_bytes, "done": done_layout,
                "error": ERROR_BITS,
                **({"expand": 1, "choices": choices_layout(packing(cfg).chunk_blocks)} if self._sizes.expands else {}),
            }), SKID_DEPTH,
        )  # fmt: skip
        self._queue_writes(m, step_queue, write_queue, self._strip_heads(m, step_queue, write_queue))
        write = write_queue.o.payload
        failed = Signal()
        ports_ = self.pads | self._build_decompressor(m, write)
        accepted = Cat(write.enable[b] & ports_[_scratchpad_of(cfg, b).name].ready for b in self._buffers)
        m.d.comb += [failed.eq(write.error != Error.NONE), write_queue.o.ready.eq(accepted.any() | failed)]
        done, error = self._report_pulses(m)
        # An error is reported in order, after all earlier steps have ended.
        m.d.sync += [
            done.valid.eq(write_queue.o.valid & write_queue.o.ready & write.last & ~failed),
            done.payload.eq(write.done),
            error.valid.eq(write_queue.o.valid & failed),
            error.payload.code.eq(write.error),
            error.payload.index.eq(write.done.index),
        ]

        self._drive_ports(m, write_queue, ports_)
        probes(self, write_queue=write_queue, failed=failed)
        return m

    def _report_pulses(self, m: Module) -> tuple[Any, Any]:
        """Return the pulses to set for `done` and `error` in the cycle after a write has left the queue of writes.

        Without a decompressor these are the members themselves. With one, writes to wgt are EXPAND_STAGES cycles late,
        so the members follow as many cycles after the pulses.
        """
        if not self._sizes.expands:
            return self.done, self.error
        pulses: tuple[Any, Any] = (self.done, self.error)
        for stage in range(EXPAND_STAGES):
            done = Pulse(done_layout).create(path=(f"done{stage}",))
            delayed = done, Pulse(error_layout).create(path=(f"error{stage}",))
            for later, pulse in zip(pulses, delayed):
                m.d.sync += [later.valid.eq(pulse.valid), later.payload.eq(pulse.payload)]
            pulses = delayed
        return pulses

    def _strip_heads(self, m: Module, step_queue: RegisteredFifo, write_queue: RegisteredFifo) -> stream.Interface:
        """Return the stream of chunks to write: `chunk`, without the heads of packs if there are any."""
        if not self._sizes.expands:
            return self.chunk
        step, write = step_queue.o.payload, write_queue.i.payload
        m.submodules.heads = heads = PackHeaderParser(self._cfg)
        wiring.connect(m, wiring.flipped(self.chunk), heads.chunk)
        m.d.comb += [
            heads.packed.eq(step_queue.o.valid & step.expand & ~step.outside),
            write.expand.eq(step.expand & ~step.outside),
            write.choices.eq(heads.choices),
        ]
        return heads.rest

    def _queue_writes(
        self, m: Module, step_queue: RegisteredFifo, write_queue: RegisteredFifo, chunks: stream.Interface
    ) -> None:
        """Join each step with its chunk, and put both into the queue of writes. Padding has no chunk."""
        cfg = self._cfg
        step = step_queue.o.payload
        write = write_queue.i.payload
        moves = Signal()
        error = Signal(ERROR_BITS)
        m.d.comb += [
            moves.eq(step_queue.o.valid & (step.outside | chunks.valid) & write_queue.i.ready),
            step_queue.o.ready.eq(moves),
            chunks.ready.eq(step_queue.o.valid & ~step.outside & write_queue.i.ready),
            error.eq(Mux(step.outside, Error.NONE, chunks.payload.error)),
            self.moves.eq(
                moves | (self.chunk.valid & self.chunk.ready) if self._sizes.expands else moves
            ),  # heads, too
            write_queue.i.valid.eq(moves),
            write.error.eq(error),
            write.element.eq(step.element),
            write.step.eq(self._part_number(step)),
            write.enable.eq(Mux(error == Error.NONE, 1 << step.buffer, 0)),  # a chunk with an error is not written
            write.widen.eq(step.widen | step.outside),
            write.whole.eq(step.outside),
            write.far.eq(self._is_second_half(step)),
            write.word.eq(Mux(step.outside, step.pad_value.replicate(cfg.bus_bytes), chunks.payload.data)),
            write.last.eq(step.last),
            write.done.index.eq(step.index),
            write.done.post.eq(step.post),
        ]
        probes(self, out=step, moves=moves)

    def _is_second_half(self, step: data.View[data.StructLayout]) -> Value:
        """Return whether the step writes the second half of an element: spread weights in the second channel."""
        return step.spread if self._sizes.spreads and self._sizes.number else Const(0)

    def _part_number(self, step: data.View[data.StructLayout]) -> Value:
        """Return which part of its element a step writes, counted in bus words; the first one for packed weights."""
        place = step.step | Mux(self._is_second_half(step), (1 << self._sizes.step_shift(Buffer.WGT)) // 2, 0)
        if not self._sizes.expands:
            return place
        return Mux(step.expand & ~step.outside, step.step << exact_log2(packing(self._cfg).expansion), place)

    def _padding_mask(self, write: data.View[data.StructLayout], steps: int) -> Value:
        """Return a mask of the `steps` parts of an element, those that padding fills; 0 if the step is no padding.

        The second channel does not pad the first half, as the other channel may already have written new data there.
        """
        near = write.whole & ~write.far
        return Cat(near.replicate(steps // 2), write.whole.replicate(steps - steps // 2))

    def _drive_ports(self, m: Module, write_queue: RegisteredFifo, ports_: Mapping[str, Any]) -> None:
        """Drive the port of its scratchpad with the oldest write: address, data, and the mask of grains."""
        write = write_queue.o.payload
        for buffer in self._buffers:
            pad = _scratchpad_of(self._cfg, buffer)
            port, pieces = ports_[pad.name], pad.pieces
            if buffer == Buffer.ACC:
                value, mask = self._acc_values(write.word, write.step, write.widen, write.whole)
            else:
                steps = 1 << self._sizes.step_shift(buffer)
                value = write.word[: pad.grain]
                mask = _one_hot(write.step, steps) | self._padding_mask(write, steps)
                if self._sizes.expands and buffer == Buffer.WGT:
                    mask = self._step_mask(write, steps) | self._padding_mask(write, steps)
            m.d.comb += [
                port.en.eq(write_queue.o.valid & write.enable[buffer]),
                port.addr.eq(write.element[exact_log2(pieces) :][: pad.address_bits] if pad.depth > 1 else 0),
                port.mask.eq(mask << (write.element[: exact_log2(pieces)] * len(mask)) if pieces > 1 else mask),
                port.data.eq(value.replicate(len(port.data) // len(value))),
            ]

    def _step_mask(self, write: data.View[data.StructLayout], steps: int) -> Value:
        """Return a mask of the `steps` parts of an element, those that a step fills.

        It is one part, or with packed weights all parts into which a chunk expands.
        """
        expansion = packing(self._cfg).expansion
        bits = exact_log2(expansion)
        within_chunk = _one_hot(write.step[:bits], expansion) | write.expand.replicate(expansion)
        return _repeat_bits(_one_hot(write.step[bits:], steps // expansion), expansion) & within_chunk.replicate(
            steps // expansion
        )

    def _build_decompressor(self, m: Module, write: data.View[data.StructLayout]) -> dict[str, Any]:
        """Build the decompressor, if the channel has one. Returns its input ports as "wgt" and "book", else {}."""
        if not self._sizes.expands:
            return {}
        m.submodules.expander = expander = WeightDecompressor(self._cfg)
        m.d.comb += [expander.expand.eq(write.expand), expander.choices.eq(write.choices)]
        wiring.connect(m, expander.wgt, wiring.flipped(self.wgt))
        return {"wgt": expander.write, "book": expander.book}

    def _acc_values(self, word: Value, step: Value, widen: Value, whole: Value) -> tuple[Value, Value]:
        """Return the values that a bus word brings to acc, and the mask of those values within a piece.

        word: the bus word. step: its number in the piece. widen: it holds int8 that are extended to int32; else int32.
        whole: it is padding, which fills the whole piece. In a Config without `int32` the values stay int8 here.
        """
        cfg = self._cfg
        wide, narrow = min(cfg.bus_bytes, cfg.piece_bytes), min(cfg.bus_bytes // 4, cfg.piece_bytes)
        bytes_ = [word.word_select(lane, 8) for lane in range(wide)]
        lanes = list(bytes_)
        mask = _repeat_bits(_one_hot(step, cfg.piece_bytes // wide), wide)
        if cfg.int32:
            lanes = [Cat(byte, byte[7].replicate(24)) for byte in bytes_]
            lanes = [Mux(widen, byte, word.word_select(lane % narrow, 32)) for lane, byte in enumerate(lanes)]
            mask = Mux(widen, mask, _repeat_bits(_one_hot(step, cfg.piece_bytes // narrow), narrow))
        return Cat(lanes), mask | whole.replicate(cfg.piece_bytes)


def _one_hot(index: Value, count: int) -> Value:
    """Return a one-hot mask of `count` bits, with bit `index` set."""
    return (1 << index[: max(1, exact_log2(count))])[:count] if count > 1 else Value.cast(1)


def _repeat_bits(mask: Value, times: int) -> Value:
    """Repeat each bit of a mask `times` times."""
    return Cat(bit.replicate(times) for bit in mask)
