"""LOAD: from DRAM to the scratchpads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from amaranth import Cat, Const, Module, Mux, ResetInserter, Signal, Value
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from celosia.hw.dae_pipeline.align import Aligner
from celosia.hw.dae_pipeline.dma import OFFSET_BITS, ReadEngine, beat_layout
from celosia.hw.dae_pipeline.fifo import RegisteredFifo
from celosia.hw.dae_pipeline.inorder import RetireQueue
from celosia.hw.dae_pipeline.walk import DramAddressGenerator, ElementSplitter
from celosia.hw.dae_pipeline.write import ScratchpadWriter, by_buffer, connect_pads, element_shift, pads_of, ports
from celosia.hw.lib.axi import ADDR_BITS, ReadBus
from celosia.hw.lib.layout import unit_members, write_port
from celosia.hw.lib.probes import probes
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Buffer, Opcode, buffers, element_bytes, load_channels
from celosia.hw.spec.packing import packing
from celosia.hw.spec.pipeline import MAX_IN_FLIGHT, MAX_OUTSTANDING_BURSTS, MAX_UNRETIRED, SKID_DEPTH
from celosia.hw.spec.scratchpads import scratchpads


def _max_shift(cfg: Config, buffers: Sequence[Buffer]) -> int:
    return max(element_shift(cfg, buffer) for buffer in buffers)


class LoadChannel(wiring.Component):
    """A way from a port to memory to the scratchpads of `buffers`; `halt` comes from an error on, in whichever lane.
    Of elements that are spread, lane `number` fetches and writes that half.

    Asks for the rows of later instructions while data of earlier ones still arrives. Rows may begin at any byte.

    Members beyond `unit_members`
    -----------------------------
    bus : Out(ReadBus)              the read channel.
    dma_base, dma_size : In         where DRAM begins, a multiple of 4096, and how many bytes may be read.
    inp, wgt, ...                   `write_port`s of the scratchpads.
    """

    def __init__(
        self, cfg: Config, buffers: Sequence[Buffer], outstanding: int = MAX_OUTSTANDING_BURSTS, number: int = 0
    ) -> None:
        self._cfg, self._buffers, self._outstanding, self._number = cfg, buffers, outstanding, number
        self._spread = scratchpads(cfg)["wgt"].spread and Buffer.WGT in buffers
        self._expands = cfg.weight_bits < 8 and Buffer.WGT in buffers and number == cfg.ports - 1
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
        cfg = self._cfg
        # The parts that need not answer to the bus are reset on an error.
        rows = DramAddressGenerator(_max_shift(cfg, self._buffers), packing(cfg).stretch if self._expands else None)
        writer, aligner = ScratchpadWriter(cfg, self._buffers, self._number), Aligner(cfg.bus_bytes)
        jobs = RegisteredFifo(writer.walker.job_layout, MAX_IN_FLIGHT)
        places = RegisteredFifo(aligner.row_layout, 2 * self._outstanding + 1)  # its ring is a power of two
        # Queues that part the paths of the engine from those of `rows`, the aligner's from the engine's memory of beats
        # and from the writer's.
        asked, units = (
            RegisteredFifo(rows.row.payload.shape(), SKID_DEPTH),
            RegisteredFifo(aligner.unit.payload.shape(), SKID_DEPTH),
        )
        beats = RegisteredFifo(beat_layout(cfg.bus_bytes), SKID_DEPTH)
        parts = {
            "rows": rows, "jobs": jobs, "writer": writer, "places": places, "aligner": aligner, "asked": asked,
            "beats": beats, "units": units,
        }  # fmt: skip
        row = rows.row
        if self._spread:
            half = element_bytes(cfg, Buffer.WGT) // 2
            parts["halves"] = halves = ElementSplitter(rows.row.payload.shape(), 2 * half, cfg.bus_bytes)
            wiring.connect(m, rows.row, halves.row)
            m.d.comb += [halves.cut.eq(rows.cut), halves.alone.eq(rows.alone)]
            row = halves.half
        for name, part in parts.items():
            m.submodules[name] = ResetInserter(self.halt)(part)
        m.submodules.engine = engine = ReadEngine(cfg.bus_bytes, rows.bytes_bits, self._outstanding)

        accept = self._accept(m, rows, jobs, writer)
        wiring.connect(m, jobs.o, writer.job)
        shift = Mux(rows.stretch, exact_log2(cfg.bus_bytes), rows.shift) if self._expands else rows.shift
        self._list(m, row, shift, asked, places, aligner)
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
        connect_pads(m, writer.pads, self.pads)

        self._tell(m, accept, writer, engine)
        probes(self, **parts, engine=engine)
        return m

    def _tell(self, m: Module, accept: Value, writer: ScratchpadWriter, engine: ReadEngine) -> None:
        """What others see of it."""
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
            self.held.eq((in_flight != 0) & ~writer.moves & ~self.halt),
            self.quiet.eq((in_flight == 0) & engine.quiet),
        ]

    def _accept(self, m: Module, rows: DramAddressGenerator, jobs: RegisteredFifo, writer: ScratchpadWriter) -> Value:
        """An instruction goes to both sides: to `rows` for its addresses, to `jobs` for what becomes of the data.
        Returns when."""
        f = self.instr.payload.fields
        cfg = self._cfg
        accept = Signal()
        shift = by_buffer(cfg, self._buffers, f, partial(element_shift, cfg))
        block, cut = rows.block.payload, f.spread if self._spread else Const(0)
        expand = f.expand if self._expands else Const(0)
        own_half = self._number * element_bytes(cfg, Buffer.WGT) // 2
        m.d.comb += [
            self.instr.ready.eq(rows.block.ready & jobs.i.ready & ~self.halt),
            accept.eq(self.instr.valid & self.instr.ready),
            rows.block.valid.eq(accept),
            jobs.i.valid.eq(accept),
            block.addr.eq(f.dram_addr + Mux(cut, own_half, 0) if self._number else f.dram_addr),
            block.y_step.eq(f.dram_y),
            block.z_step.eq(f.dram_z),
            block.x_size.eq(f.x_size),
            block.y_size.eq(f.y_size),
            block.z_size.eq(f.z_size),
            block.shift.eq(Mux(expand, packing(cfg).shift, shift) if self._expands else shift),
            block.cut.eq(cut),
            block.stretch.eq(expand),
        ]
        for name, value in writer.job_of(self.instr.payload).items():
            m.d.comb += Value.cast(jobs.i.payload[name]).eq(value)
        return accept

    def _list(
        self,
        m: Module,
        rows: stream.Interface,
        shift: Value,
        asked: RegisteredFifo,
        places: RegisteredFifo,
        aligner: Aligner,
    ) -> None:
        """A row goes to the engine, and its place within its bus words to the aligner."""
        word_bits = exact_log2(self._cfg.bus_bytes)
        row, shift_bits = rows.payload, len(places.i.payload.shift)
        # As wide as what computes them: cut to bits of the payload, on which other bits of it depend, they would look
        # like a combinational loop.
        unit_shift = Signal(shift_bits)
        last = Signal.like(row.offset[:word_bits] + row.bytes[:word_bits] - 1)
        stop = Signal.like(aligner.stop(row.offset, unit_shift))
        m.d.comb += [
            asked.i.valid.eq(rows.valid & places.i.ready & ~self.halt),
            asked.i.payload.eq(row),
            places.i.valid.eq(rows.valid & asked.i.ready & ~self.halt),
            rows.ready.eq(places.i.ready & asked.i.ready),  # whatever `halt` says, for it resets `rows`
            unit_shift.eq(Mux(shift > word_bits, Const(word_bits, shift_bits), shift[:shift_bits])),
            last.eq(row.offset[:word_bits] + row.bytes[:word_bits] - 1),
            stop.eq(aligner.stop(row.offset, unit_shift)),
            places.i.payload.unit.eq(aligner.facts(row.offset, stop, last)),
            places.i.payload.last.eq(last),
            places.i.payload.shift.eq(unit_shift),
        ]


class Load(wiring.Component):
    """Copies blocks from DRAM to the scratchpads; `sim.reference.load` says exactly what.

    Hands instructions in program order to a `Lane` for each port to memory; the lanes work at the same time.

    Members beyond `unit_members`
    -----------------------------
    active, held : Out(ports)       a bit for each lane.
    buses : Out(ReadBus)            the read channel of each port to memory.
    dma_base, dma_size : In         where DRAM begins, a multiple of 4096, and how many bytes may be read.
    inp, wgt, ...                   `write_port`s of the scratchpads.
    near_wgt : Out(WritePort)       of what the first lane writes there, in the lower half of entries, where it does.
    """

    def __init__(self, cfg: Config, outstanding: int = MAX_OUTSTANDING_BURSTS) -> None:
        self._cfg, self._outstanding = cfg, outstanding
        super().__init__({
            **unit_members(cfg, Opcode.LOAD),
            "active": Out(cfg.ports),
            "held": Out(cfg.ports),
            "buses": Out(ReadBus(cfg.bus_bytes)).array(cfg.ports),
            "dma_base": In(ADDR_BITS),
            "dma_size": In(OFFSET_BITS),
            **ports(cfg, buffers(cfg)),
            **({"near_wgt": Out(write_port(scratchpads(cfg)["wgt"]))} if scratchpads(cfg)["wgt"].spread else {}),
        })  # fmt: skip
        self.pads = pads_of(self, cfg, buffers(cfg))

    def elaborate(self, platform: object) -> Module:
        m = Module()
        parts = [
            LoadChannel(self._cfg, own, self._outstanding, number)
            for number, own in enumerate(load_channels(self._cfg))
        ]
        # From an error on, all stand still.
        failed = Signal()
        stop = Signal()
        errors = Cat(lane.error.valid for lane in parts)
        m.d.comb += stop.eq(self.halt | errors.any() | failed)
        with m.If(self.halt):
            m.d.sync += failed.eq(0)
        with m.Elif(errors.any()):
            m.d.sync += failed.eq(1)

        for number, (lane, bus) in enumerate(zip(parts, self.buses)):
            m.submodules[f"lane{number}"] = lane
            wiring.connect(m, lane.bus, wiring.flipped(bus))
            near = {"wgt": self.near_wgt} if number == 0 and scratchpads(self._cfg)["wgt"].spread else {}
            connect_pads(m, lane.pads, self.pads | near)
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

    def _goes(self, instr: Value, buffer: Buffer, alone: bool) -> Value:
        """Whether an instruction fills `buffer`, and not alone through another lane."""
        shared = all(buffer in own for own in load_channels(self._cfg))
        return (instr.fields.buffer == buffer) & (1 if alone or not shared else instr.fields.spread)

    def _changes(self, m: Module, instr: Value, goes: Value, order: RetireQueue) -> Value:
        """Whether an instruction fills WGT in another way than the one before, which may not have ended: where both
        write, the first one's bytes might stay."""
        if not scratchpads(self._cfg)["wgt"].spread:
            return Const(0)
        spread = Signal()
        is_wgt = instr.fields.buffer == Buffer.WGT
        with m.If(goes & is_wgt):
            m.d.sync += spread.eq(instr.fields.spread)
        return is_wgt & (instr.fields.spread != spread) & ~order.empty

    def _hand_out(self, m: Module, parts: list[LoadChannel], stop: Value) -> tuple[wiring.PureInterface, Value]:
        """Instructions to their lanes. Returns `done`, in program order, and whether it has told of all of them."""
        if len(parts) == 1:
            wiring.connect(m, wiring.flipped(self.instr), parts[0].instr)
            return parts[0].done, Const(1)
        order = RetireQueue(len(parts), MAX_UNRETIRED)
        m.submodules.order = ResetInserter(stop)(order)
        instr, handed = self.instr.payload, order.handed
        to = Signal(len(parts))  # where it goes to
        busy = to & ~Cat(lane.instr.ready for lane in parts)
        may = handed.ready & ~self._changes(m, instr, self.instr.valid & self.instr.ready, order)
        m.d.comb += [
            self.instr.ready.eq(~busy.any() & may),
            handed.valid.eq(self.instr.valid & self.instr.ready),
            handed.payload.lanes.eq(to),
            handed.payload.done.post.eq(instr.fields.post),
            handed.payload.done.index.eq(instr.index),
            order.ended.eq(Cat(lane.done.valid for lane in parts)),
        ]
        for number, (lane, own) in enumerate(zip(parts, load_channels(self._cfg))):
            alone = number == len(parts) - 1  # fills what others fill only where it is spread
            m.d.comb += [
                to[number].eq(Cat(self._goes(instr, buffer, alone) for buffer in own).any()),
                lane.instr.payload.eq(instr),
                lane.instr.valid.eq(self.instr.valid & may & to[number] & ~(busy & ~(1 << number)).any()),
            ]
        return order.done, order.empty
