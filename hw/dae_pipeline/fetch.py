"""Fetch: reads the instructions of a run, checks them, and passes them to the queues of the units."""

from __future__ import annotations

from functools import reduce
from operator import or_

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.dae_pipeline.fifo import StreamFifo
from celosia.hw.lib.axi import ADDR_BITS, ReadBus
from celosia.hw.lib.layout import UNITS, Pulse, error_layout, instruction_layout, instructions, layout
from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import UNIT_OF, formats, instruction_bytes
from celosia.hw.spec.legality import rules
from celosia.hw.spec.pipeline import FETCH_BURSTS, fetch_burst
from celosia.hw.spec.regs import Error


class Fetch(wiring.Component):
    """Fetch instructions, check each by the rules of `legality.rules`, and put it into the queue of its unit.

    Instructions are prefetched in bursts of up to two. A burst is requested only if the buffer has room for all of its
    beats, so that fetch never stalls the read channel.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    run : In(1)             From 0 to 1: start; everything here has been reset before.
    halt : In(1)            Requests and dispatches nothing more.
    instr_addr, instr_count, dma_base, dma_size : In     Stable while `run`. instr_addr: a multiple of an instruction's
                            bytes and of the bus' bytes.
    bus : Out(ReadBus)      The read channel.
    queues : Out(PerUnit)   Instructions of each unit, in program order, from its queue.
    error : Out(Pulse)      ILLEGAL_INSTRUCTION, ADDRESS (instructions outside the limits) or READ. No instruction is
                            dispatched after it.
    finished : Out(1)       Every instruction has left its queue.
    idle : Out(1)           Nothing is in flight on the bus.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        super().__init__({
            "run": In(1),
            "halt": In(1),
            "instr_addr": In(32),
            "instr_count": In(32),
            "dma_base": In(ADDR_BITS),
            "dma_size": In(32),
            "bus": Out(ReadBus(cfg.bus_bytes)),
            "queues": Out(instructions(cfg)),
            "error": Out(Pulse(error_layout)),
            "finished": Out(1),
            "idle": Out(1),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        cfg = self._cfg
        m = Module()
        word_bytes, bus_bytes = instruction_bytes(cfg), cfg.bus_bytes
        depth = FETCH_BURSTS * fetch_burst(cfg)
        m.submodules.buffer = buffer = StreamFifo(data.StructLayout({"data": 8 * bus_bytes, "error": 1}), depth)
        word = stream.Signature(data.StructLayout({"data": 8 * word_bytes, "error": 1})).create(path=("word",))
        going = Signal()
        m.d.comb += going.eq(self._check_limits(m, word_bytes) & ~self.halt)
        self._request_bursts(m, going, buffer, depth, word_bytes)
        if bus_bytes <= word_bytes:
            self._join_beats(m, buffer.o, word)
        else:
            self._split_beats(m, buffer.o, word)
        self._dispatch(m, going, word)
        probes(self, going=going, buffer=buffer, depth=depth)
        return m

    def _check_limits(self, m: Module, word_bytes: int) -> Value:
        """Report error ADDRESS, once, if the run's instructions do not lie within the DMA limits.

        Returns a register that is 1 during `run`, a cycle late, if they do. word_bytes: bytes of an instruction.
        """
        bad = Signal()
        checked = Signal()
        allowed = Signal()
        unaligned = self.instr_addr % max(word_bytes, self._cfg.bus_bytes) != 0
        fitting = Signal(32)  # instructions between the first one and the limit
        outside = Signal()
        bytes_to_limit = Mux(self.instr_addr < self.dma_size, (self.dma_size - self.instr_addr)[:32], 0)
        end_offset = self.instr_addr + self.instr_count * word_bytes  # one sum, and no quotient before the comparison
        m.d.comb += [
            fitting.eq(Mux(unaligned, 0, bytes_to_limit // word_bytes)),
            outside.eq((self.instr_count != 0) & (unaligned | (end_offset > self.dma_size))),
        ]
        m.d.sync += [bad.eq(outside), checked.eq(self.run), allowed.eq(self.run & ~outside)]
        with m.If(self.run & ~self.halt & checked & bad):
            m.d.comb += [
                self.error.valid.eq(1),
                self.error.payload.code.eq(Error.ADDRESS),
                self.error.payload.index.eq(fitting),
            ]
        probes(self, bad=bad, allowed=allowed, checked=checked)
        return allowed

    def _request_bursts(self, m: Module, going: Value, buffer: StreamFifo, depth: int, word_bytes: int) -> None:
        """Request bursts while the buffer has room for all their beats, and put the beats that return into it.

        going: instructions may be fetched. depth: beats of the buffer. Bursts end at multiples of their greatest
        length, which divides 4096 bytes, so that none crosses that boundary.
        """
        bus_bytes, request, response = self._cfg.bus_bytes, self.bus.request, self.bus.response
        longest = fetch_burst(self._cfg)
        left = Reg(32 + 7)  # beats that have not been requested
        next_ = Reg(32)  # number of the next beat's bus word
        position = next_[: (longest - 1).bit_length()]  # `next_` modulo `longest`
        # Beats of the next burst, and whether there is one. They are a cycle late, which does no harm: at most every
        # other cycle requests a burst, and `left` is loaded only while nothing is fetched.
        length = Signal(range(longest + 1))
        more = Signal()
        m.d.sync += [length.eq(Mux(left < longest - position, left, longest - position)), more.eq(going & (left != 0))]
        asks = Signal()
        room = Signal(range(depth + 1), init=depth)  # beats of room in the buffer that are neither in use nor reserved
        pending = Signal(range(depth + 1))  # beats that have been requested and not arrived
        m.d.comb += asks.eq(going & ~request.valid & more & (room >= longest))
        with m.If(asks):
            m.d.sync += [
                request.valid.eq(1),
                request.payload.addr.eq(self.dma_base + next_ * bus_bytes),
                request.payload.len.eq(length - 1),
                next_.eq(next_ + length),
                left.eq(left - length),
            ]
        with m.Elif(request.ready):
            m.d.sync += request.valid.eq(0)
        with m.If(~going & ~request.valid & (pending == 0)):
            m.d.sync += [
                next_.eq(self.instr_addr // bus_bytes),
                left.eq((self.instr_count * word_bytes + bus_bytes - 1) // bus_bytes),
            ]
        promised = Mux(asks, length, 0)
        m.d.sync += [
            room.eq(room - promised + (buffer.o.valid & buffer.o.ready)),
            pending.eq(pending + promised - response.valid),
        ]
        m.d.comb += [
            response.ready.eq(1),
            buffer.i.valid.eq(response.valid),
            buffer.i.payload.data.eq(response.payload.data),
            buffer.i.payload.error.eq(response.payload.error),
            self.idle.eq(pending == 0),
        ]
        probes(self, pending=pending, room=room, next_=next_, left=left, more=more, length=length)

    def _join_beats(self, m: Module, beats: stream.Interface, word: stream.Interface) -> None:
        """Join beats to instruction words, for a bus narrower than an instruction, without a gap between words."""
        beat = beats.payload
        joined = Reg(len(word.payload.data))
        parts = len(joined) // len(beat.data)
        count = Signal(range(parts + 1))
        m.d.comb += [
            word.valid.eq(count == parts),
            word.payload.data.eq(joined),
            beats.ready.eq(~word.valid | word.ready),
        ]
        with m.If(beats.valid & beats.ready):
            m.d.sync += [
                joined.eq(Cat(joined, beat.data) >> len(beat.data)),
                word.payload.error.eq(beat.error | (word.payload.error & ~word.valid)),
                count.eq(Mux(word.valid, 1, count + 1)),
            ]
        with m.Elif(word.ready & word.valid):
            m.d.sync += count.eq(0)

    def _split_beats(self, m: Module, beats: stream.Interface, word: stream.Interface) -> None:
        """Split beats into instruction words, lowest bytes first, for a bus wider than an instruction."""
        parts = len(beats.payload.data) // len(word.payload.data)
        part = Signal(range(parts))
        m.d.comb += [
            word.valid.eq(beats.valid),
            word.payload.data.eq(beats.payload.data.word_select(part, len(word.payload.data))),
            word.payload.error.eq(beats.payload.error),
            beats.ready.eq(word.ready & (part == parts - 1)),
        ]
        with m.If(word.valid & word.ready):
            m.d.sync += part.eq(part + 1)

    def _dispatch(self, m: Module, going: Value, word: stream.Interface) -> None:
        """Check each word, and a cycle later put it into the queue of its unit, or report an error."""
        index = Signal(32)  # number of the word that waits for its queue
        last = Signal()  # `index` is behind the last instruction
        holds = Signal()
        instr = Reg(len(word.payload.data))
        error = Reg()
        legal = Reg()
        goes = Signal()
        accepted = Signal()
        is_legal = Signal()
        queues, belongs_to_queue = [], []
        for number, (opcode, fmt) in enumerate(formats(self._cfg).items()):
            unit = UNIT_OF[opcode]
            queue = StreamFifo(instruction_layout(self._cfg, opcode), self._cfg.queue_depth, block_ram=True)
            m.submodules[f"queue_{UNITS[unit]}"] = queue
            wiring.connect(m, queue.o, wiring.flipped(self.queues.each[unit]))
            coming = data.View(layout(fmt), word.payload.data[: fmt.width])
            has_opcode, belongs_here = coming.opcode == opcode, Reg(name=f"belongs_{number}")
            with m.If(has_opcode):
                m.d.comb += is_legal.eq(~reduce(or_, (broken(coming) for broken in rules(self._cfg)[opcode].values())))
            with m.If(word.ready):
                m.d.sync += belongs_here.eq(has_opcode)
            m.d.comb += [
                queue.i.payload.index.eq(index),
                queue.i.payload.fields.eq(data.View(layout(fmt), instr[: fmt.width])),
                queue.i.valid.eq(goes & belongs_here),
            ]
            with m.If(belongs_here):
                m.d.comb += accepted.eq(queue.i.ready)
            queues.append(queue)
            belongs_to_queue.append(belongs_here)
        check = going & holds & ~last
        m.d.comb += [
            goes.eq(check & legal & ~error & accepted),
            word.ready.eq(~holds),
            self.finished.eq(going & last & Cat(queue.empty for queue in queues).all()),
        ]
        with m.If(word.ready):
            m.d.sync += [
                holds.eq(word.valid), instr.eq(word.payload.data), error.eq(word.payload.error), legal.eq(is_legal),
            ]  # fmt: skip
        following = (index + 1)[: len(index)]
        with m.If(goes):
            m.d.sync += [holds.eq(0), index.eq(following), last.eq(following == self.instr_count)]
        with m.If(~going):
            m.d.sync += last.eq(index == self.instr_count)
        with m.If(check & (error | ~legal)):
            m.d.comb += [
                self.error.valid.eq(1),
                self.error.payload.code.eq(Mux(error, Error.READ, Error.ILLEGAL_INSTRUCTION)),
                self.error.payload.index.eq(index),
            ]
        probes(
            self, holds=holds, error=error, index=index, instr=instr, goes=goes, legal=legal, belongs=belongs_to_queue,
            last=last, queues=queues,
        )  # fmt: skip
