"""LOAD: copies blocks from DRAM to the scratchpads, through one or two memory ports."""

from __future__ import annotations

from collections.abc import Sequence

from amaranth import Cat, Const, Module, Mux, ResetInserter, Signal, Value
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from celosia.hw.dae_pipeline.address_generators import DramAddressGenerator, ElementSplitter
from celosia.hw.dae_pipeline.aligner import Aligner, chunk_position, chunk_stop
from celosia.hw.dae_pipeline.dma import OFFSET_BITS, ReadEngine, beat_layout, row_layout
from celosia.hw.dae_pipeline.fifo import RegisteredFifo
from celosia.hw.dae_pipeline.retire_queue import RetireQueue
from celosia.hw.dae_pipeline.scratchpad_writer import LoadChannelSizes, ScratchpadWriter, connect_pads, pads_of, ports
from celosia.hw.lib.axi import ADDR_BITS, ReadBus
from celosia.hw.lib.layout import unit_members, write_port
from celosia.hw.lib.probes import probes
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Buffer, Opcode, buffers, element_bytes, load_channels
from celosia.hw.spec.packing import packing
from celosia.hw.spec.pipeline import (
    MAX_IN_FLIGHT,
    MAX_OUTSTANDING_BURSTS,
    MAX_UNRETIRED,
    REQUEST_QUEUE_DEPTH,
    SKID_DEPTH,
)
from celosia.hw.spec.scratchpads import scratchpads


class LoadChannel(wiring.Component):
    """Copy blocks from DRAM, through one memory port, to some of the scratchpads.

    Rows of later instructions are requested while data of earlier ones still arrives. Rows may begin at any byte. Of
    spread weights, a channel reads and writes one half. `halt` is also 1 after an error in either channel.

    Parameters
    ----------
    cfg : Config
    buffers : Sequence[Buffer]  Scratchpads that the channel fills.
    outstanding : int           Largest number of bursts under way at once.
    number : int                Number of the channel, and of the half that it moves of each element of spread weights.

    Members
    -------
    Those of `unit_members`, and:
    bus : Out(ReadBus)              The read channel.
    dma_base, dma_size : In         Address at which DRAM begins, a multiple of 4096, and how many bytes may be read.
    inp, wgt, acc, vin, par, lut, tap, exp : Out(WritePort)     The scratchpads of `buffers`, if the Config has them.
    """

    def __init__(
        self, cfg: Config, buffers: Sequence[Buffer], outstanding: int = MAX_OUTSTANDING_BURSTS, number: int = 0
    ) -> None:
        self._cfg, self._sizes, self._outstanding = cfg, LoadChannelSizes(cfg, buffers, number), outstanding
        super().__init__({
            **unit_members(cfg, Opcode.LOAD),
            "bus": Out(ReadBus(cfg.bus_bytes)),
            "dma_base": In(ADDR_BITS),
            "dma_size": In(OFFSET_BITS),
            **ports(cfg, buffers),
        })  # fmt: skip
        self.pads = pads_of(self, cfg, buffers)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        cfg, sizes = self._cfg, self._sizes
        # All parts but the engine, which must complete its bursts, are reset by `halt`.
        max_shift = max(sizes.element_shift(buffer) for buffer in sizes.buffers)
        rows = DramAddressGenerator(max_shift, packing(cfg).stretch if sizes.expands else None)
        writer, aligner = ScratchpadWriter(cfg, sizes.buffers, sizes.number), Aligner(cfg.bus_bytes)
        jobs = RegisteredFifo(writer.job.payload.shape(), MAX_IN_FLIGHT)
        positions = RegisteredFifo(aligner.row.payload.shape(), 2 * self._outstanding + 1)  # a ring of 2^n entries
        # Queues that cut combinational paths: between `rows` and the engine, the engine's buffer and the aligner, the
        # aligner and the writer.
        requests, chunks = (
            RegisteredFifo(row_layout(rows.bytes_bits), REQUEST_QUEUE_DEPTH),
            RegisteredFifo(aligner.chunk.payload.shape(), SKID_DEPTH),
        )
        beats = RegisteredFifo(beat_layout(cfg.bus_bytes), SKID_DEPTH)
        parts = {
            "rows": rows, "jobs": jobs, "writer": writer, "positions": positions, "aligner": aligner,
            "requests": requests, "beats": beats, "chunks": chunks,
        }  # fmt: skip
        row = rows.row
        if sizes.spreads:
            half = element_bytes(cfg, Buffer.WGT) // 2
            parts["halves"] = halves = ElementSplitter(rows.row.payload.shape(), 2 * half, cfg.bus_bytes)
            wiring.connect(m, rows.row, halves.row)
            row = halves.half
        for name, part in parts.items():
            m.submodules[name] = ResetInserter(self.halt)(part)
        m.submodules.engine = engine = ReadEngine(cfg.bus_bytes, rows.bytes_bits, self._outstanding)

        accept = self._accept(m, rows, jobs)
        wiring.connect(m, jobs.o, writer.job)
        self._request_rows(m, row, requests, positions)
        wiring.connect(m, requests.o, engine.row)
        wiring.connect(m, positions.o, aligner.row)
        wiring.connect(m, engine.beat, beats.i)
        wiring.connect(m, beats.o, aligner.beat)
        wiring.connect(m, aligner.chunk, chunks.i)
        wiring.connect(m, chunks.o, writer.chunk)
        wiring.connect(m, engine.bus, wiring.flipped(self.bus))
        m.d.comb += [
            engine.dma_base.eq(self.dma_base),
            engine.dma_size.eq(self.dma_size),
            engine.halt.eq(self.halt),
        ]
        connect_pads(m, writer.pads, self.pads)

        self._drive_status(m, accept, writer, engine)
        probes(self, **parts, engine=engine)
        return m

    def _drive_status(self, m: Module, accept: Value, writer: ScratchpadWriter, engine: ReadEngine) -> None:
        """Count the instructions in flight, and drive the outputs that every unit has (`unit_members`).

        accept: an instruction is accepted in this cycle.
        """
        in_flight = Signal(range(2 * MAX_IN_FLIGHT))
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
            self.stalled.eq((in_flight != 0) & ~writer.moves & ~self.halt),
            self.idle.eq((in_flight == 0) & engine.idle),
        ]

    def _accept(self, m: Module, rows: DramAddressGenerator, jobs: RegisteredFifo) -> Value:
        """Accept an instruction: pass its block to `rows`, which generates DRAM addresses, and its job to the writer.

        jobs: the queue of the writer's jobs. Returns whether an instruction is accepted in this cycle.
        """
        f = self.instr.payload.fields
        cfg, sizes = self._cfg, self._sizes
        accept = Signal()
        shift = sizes.by_buffer(f, sizes.element_shift)
        block, cut = rows.block.payload, f.spread if sizes.spreads else Const(0)
        expand = f.expand if sizes.expands else Const(0)
        half_offset = sizes.number * element_bytes(cfg, Buffer.WGT) // 2
        m.d.comb += [
            self.instr.ready.eq(rows.block.ready & jobs.i.ready & ~self.halt),
            accept.eq(self.instr.valid & self.instr.ready),
            rows.block.valid.eq(accept),
            jobs.i.valid.eq(accept),
            block.addr.eq(f.dram_addr + Mux(cut, half_offset, 0) if sizes.number else f.dram_addr),
            block.y_step.eq(f.dram_y),
            block.z_step.eq(f.dram_z),
            block.x_size.eq(f.x_size),
            block.y_size.eq(f.y_size),
            block.z_size.eq(f.z_size),
            block.shift.eq(Mux(expand, packing(cfg).shift, shift) if sizes.expands else shift),
            block.cut.eq(cut),
            block.stretch.eq(expand),
        ]
        for name, value in sizes.job(self.instr.payload).items():
            m.d.comb += Value.cast(jobs.i.payload[name]).eq(value)
        return accept

    def _request_rows(
        self, m: Module, rows: stream.Interface, requests: RegisteredFifo, positions: RegisteredFifo
    ) -> None:
        """Pass each row to the read engine (`requests`), and its position in bus words to the aligner (`positions`)."""
        bus_bytes, word_bits = self._cfg.bus_bytes, exact_log2(self._cfg.bus_bytes)
        row, shift_bits = rows.payload, len(positions.i.payload.shift)
        shift = Mux(row.stretch, word_bits, row.shift) if self._sizes.expands else row.shift
        # Signals as wide as their expressions. If these were computed in bits of the payload, on which other bits of
        # the same payload depend, tools would report a combinational loop.
        chunk_shift = Signal(shift_bits)
        last = Signal.like(row.offset[:word_bits] + row.bytes[:word_bits] - 1)
        stop = Signal.like(chunk_stop(bus_bytes, row.offset, chunk_shift))
        m.d.comb += [
            requests.i.valid.eq(rows.valid & positions.i.ready & ~self.halt),
            *(requests.i.payload[name].eq(row[name]) for name, _ in requests.i.payload.shape()),
            positions.i.valid.eq(rows.valid & requests.i.ready & ~self.halt),
            rows.ready.eq(positions.i.ready & requests.i.ready),  # without `halt`, which resets `rows`
            chunk_shift.eq(Mux(shift > word_bits, Const(word_bits, shift_bits), shift[:shift_bits])),
            last.eq(row.offset[:word_bits] + row.bytes[:word_bits] - 1),
            stop.eq(chunk_stop(bus_bytes, row.offset, chunk_shift)),
            positions.i.payload.chunk.eq(chunk_position(bus_bytes, row.offset, stop, last)),
            positions.i.payload.last.eq(last),
            positions.i.payload.shift.eq(chunk_shift),
        ]


class Load(wiring.Component):
    """Copy blocks from DRAM to the scratchpads, as `load` in `sim/functional/reference.py` defines it.

    Each memory port has a `LoadChannel`. A channel executes its instructions in program order, in parallel with the
    other channel.

    Parameters
    ----------
    cfg : Config
    outstanding : int   Largest number of bursts that each channel has under way at once.

    Members
    -------
    Those of `unit_members`, and:
    active, stalled : Out(ports)    As in `unit_members`, but with a bit for each channel.
    buses : Out(ReadBus)            The read channel of each port to memory.
    dma_base, dma_size : In         Address at which DRAM begins, a multiple of 4096, and how many bytes may be read.
    inp, wgt, acc, vin, par, lut, tap, exp : Out(WritePort)     The scratchpads that the Config has.
    near_wgt : Out(WritePort)       Lower halves of entries of wgt, written by the first channel if weights are spread.
    """

    def __init__(self, cfg: Config, outstanding: int = MAX_OUTSTANDING_BURSTS) -> None:
        self._cfg, self._outstanding = cfg, outstanding
        super().__init__({
            **unit_members(cfg, Opcode.LOAD),
            "active": Out(cfg.ports),
            "stalled": Out(cfg.ports),
            "buses": Out(ReadBus(cfg.bus_bytes)).array(cfg.ports),
            "dma_base": In(ADDR_BITS),
            "dma_size": In(OFFSET_BITS),
            **ports(cfg, buffers(cfg)),
            **({"near_wgt": Out(write_port(scratchpads(cfg)["wgt"]))} if scratchpads(cfg)["wgt"].spread else {}),
        })  # fmt: skip
        self.pads = pads_of(self, cfg, buffers(cfg))

    def elaborate(self, platform: object) -> Module:
        m = Module()
        channels = [
            LoadChannel(self._cfg, buffers_of_channel, self._outstanding, number)
            for number, buffers_of_channel in enumerate(load_channels(self._cfg))
        ]
        # After an error in one channel, all channels stop.
        failed = Signal()
        stop = Signal()
        errors = Cat(channel.error.valid for channel in channels)
        m.d.comb += stop.eq(self.halt | errors.any() | failed)
        with m.If(self.halt):
            m.d.sync += failed.eq(0)
        with m.Elif(errors.any()):
            m.d.sync += failed.eq(1)

        for number, (channel, bus) in enumerate(zip(channels, self.buses)):
            m.submodules[f"channel{number}"] = channel
            wiring.connect(m, channel.bus, wiring.flipped(bus))
            near = {"wgt": self.near_wgt} if number == 0 and scratchpads(self._cfg)["wgt"].spread else {}
            connect_pads(m, channel.pads, self.pads | near)
            m.d.comb += [channel.dma_base.eq(self.dma_base), channel.dma_size.eq(self.dma_size), channel.halt.eq(stop)]
        done, all_retired = self._dispatch(m, channels, stop)
        m.d.comb += [
            self.done.valid.eq(done.valid & ~self.halt),
            self.done.payload.eq(done.payload),
            self.error.valid.eq(errors.any() & ~self.halt),
            self.error.payload.eq(Mux(errors[0], channels[0].error.payload, channels[-1].error.payload)),
            self.active.eq(Cat(channel.active for channel in channels)),
            self.stalled.eq(Cat(channel.stalled for channel in channels)),
            self.idle.eq(Cat(channel.idle for channel in channels).all() & all_retired),
        ]
        return m

    def _is_for_channel(self, instr: Value, buffer: Buffer, alone: bool) -> Value:
        """Return whether `instr` fills `buffer` through a certain channel.

        alone: the channel also fills `buffer` if the instruction is not spread. The other channel takes part in filling
        a buffer of both channels only if it is.
        """
        shared = all(buffer in buffers_of_channel for buffers_of_channel in load_channels(self._cfg))
        return (instr.fields.buffer == buffer) & (1 if alone or not shared else instr.fields.spread)

    def _must_wait(self, m: Module, instr: Value, goes: Value, order: RetireQueue) -> Value:
        """Return whether `instr` must wait: it spreads weights and the last LOAD of wgt did not, or vice versa.

        Both may write the same entries through different channels. Without the wait, the earlier instruction might
        write last. goes: `instr` is dispatched in this cycle. order: the instructions that have not retired.
        """
        if not scratchpads(self._cfg)["wgt"].spread:
            return Const(0)
        spread = Signal()
        is_wgt = instr.fields.buffer == Buffer.WGT
        with m.If(goes & is_wgt):
            m.d.sync += spread.eq(instr.fields.spread)
        return is_wgt & (instr.fields.spread != spread) & ~order.empty

    def _dispatch(self, m: Module, channels: list[LoadChannel], stop: Value) -> tuple[wiring.PureInterface, Value]:
        """Pass each instruction to its channel, or to both if it is spread.

        stop: drops all instructions. Returns `done` in program order, and whether all instructions have retired.
        """
        if len(channels) == 1:
            wiring.connect(m, wiring.flipped(self.instr), channels[0].instr)
            return channels[0].done, Const(1)
        order = RetireQueue(len(channels), MAX_UNRETIRED)
        m.submodules.order = ResetInserter(stop)(order)
        instr, handed = self.instr.payload, order.handed
        targets = Signal(len(channels))  # a bit for each channel that executes the instruction
        busy = targets & ~Cat(channel.instr.ready for channel in channels)
        may_go = handed.ready & ~self._must_wait(m, instr, self.instr.valid & self.instr.ready, order)
        m.d.comb += [
            self.instr.ready.eq(~busy.any() & may_go),
            handed.valid.eq(self.instr.valid & self.instr.ready),
            handed.payload.channels.eq(targets),
            handed.payload.done.post.eq(instr.fields.post),
            handed.payload.done.index.eq(instr.index),
            order.ended.eq(Cat(channel.done.valid for channel in channels)),
        ]
        for number, (channel, buffers_of_channel) in enumerate(zip(channels, load_channels(self._cfg))):
            alone = number == len(channels) - 1  # the first channel only helps with spread weights
            m.d.comb += [
                targets[number].eq(
                    Cat(self._is_for_channel(instr, buffer, alone) for buffer in buffers_of_channel).any()
                ),
                channel.instr.payload.eq(instr),
                channel.instr.valid.eq(self.instr.valid & may_go & targets[number] & ~(busy & ~(1 << number)).any()),
            ]
        return order.done, order.empty
