"""STORE: copies blocks from scratchpad out to DRAM."""

from __future__ import annotations

from amaranth import Module, Mux, ResetInserter, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from celosia.hw.dae_pipeline.address_generators import DramAddressGenerator, ScratchpadAddressGenerator, job_layout
from celosia.hw.dae_pipeline.dma import OFFSET_BITS, WriteEngine, row_layout, write_beat_layout
from celosia.hw.dae_pipeline.fifo import RegisteredFifo
from celosia.hw.lib.axi import ADDR_BITS, Axi4Write
from celosia.hw.lib.layout import INDEX_BITS, read_port, unit_members
from celosia.hw.lib.probes import probes
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode
from celosia.hw.spec.pipeline import (
    MAX_IN_FLIGHT,
    MAX_OUTSTANDING_BURSTS,
    MAX_UNANSWERED,
    REQUEST_QUEUE_DEPTH,
    SKID_DEPTH,
)
from celosia.hw.spec.regs import Error
from celosia.hw.spec.scratchpads import scratchpads


def packed_row_layout(bus_bytes: int, count_bits: int) -> data.StructLayout:
    """Return the layout of a row for `BeatPacker`.

    first: number of its first byte in its bus word. fills: its first chunk reaches the end of that word. chunks: number
    of its chunks, less one. single: it has only one chunk.
    """
    return data.StructLayout({"first": exact_log2(bus_bytes), "fills": 1, "chunks": count_bits, "single": 1})


def fills_word(bus_bytes: int, chunk_bytes: int, first: Value) -> Value:
    """Return whether a chunk that begins at byte `first` reaches the end of its bus word."""
    word_bits = exact_log2(bus_bytes)
    return (first[:word_bits] + chunk_bytes)[word_bits]


class BeatPacker(wiring.Component):
    """Join chunks into the beats of rows: the inverse of `Aligner`, for chunks of one size.

    Parameters
    ----------
    bus_bytes : int     Bytes of a beat.
    chunk_bytes : int   Bytes of a chunk, at most those of a beat.
    count_bits : int    Width of a row's count of chunks.

    Members
    -------
    row : In(stream)    `packed_row_layout` of each row.
    chunk : In(stream)  The chunks of all rows, in order.
    beat : Out(stream)  Their beats, in order.
    """

    def __init__(self, bus_bytes: int, chunk_bytes: int, count_bits: int) -> None:
        self._bus_bytes, self.chunk_bytes = bus_bytes, chunk_bytes
        super().__init__({
            "row": In(stream.Signature(packed_row_layout(bus_bytes, count_bits))),
            "chunk": In(stream.Signature(8 * chunk_bytes)),
            "beat": Out(stream.Signature(write_beat_layout(bus_bytes))),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        bus, word_bits = self._bus_bytes, exact_log2(self._bus_bytes)
        row = self.row.payload
        count = Signal.like(row.chunks, init=1)  # number of the row's chunks so far, with the next one
        # If `inside` a row: byte at which its next chunk begins, whether that fills its word, whether it is the last.
        inside = Signal()
        place = Signal(word_bits)
        next_fills = Signal()
        last = Signal()
        flush = Signal()  # the row has ended within the word that is held
        held = Signal(write_beat_layout(bus))  # the bytes of the word so far; zeros elsewhere

        first = Mux(inside, place, row.first)
        stop = Signal(word_bits + 1)
        bytes_ = Signal(16 * bus)
        strobe = Signal(2 * bus)
        row_end = Signal()
        fills = Signal()
        crosses = Signal()
        take = Signal()
        m.d.comb += [
            stop.eq(first + self.chunk_bytes),
            fills.eq(1 if self.chunk_bytes == bus else Mux(inside, next_fills, row.fills)),
            crosses.eq(fills & stop[:word_bits].any()),
            row_end.eq(Mux(inside, last, row.single)),
            bytes_.eq(self.chunk.payload << (first << 3)),
            strobe.eq(((1 << self.chunk_bytes) - 1) << first),
            self.chunk.ready.eq(self.row.valid & ~flush & (self.beat.ready | ~(fills | row_end))),
            take.eq(self.chunk.valid & self.chunk.ready),
            self.row.ready.eq(take & row_end),
            self.beat.valid.eq(flush | (self.row.valid & self.chunk.valid & (fills | row_end))),
            self.beat.payload.data.eq(held.data | Mux(flush, 0, bytes_[: 8 * bus])),
            self.beat.payload.strobe.eq(held.strobe | Mux(flush, 0, strobe[:bus])),
        ]
        with m.If(take):
            m.d.sync += [
                inside.eq(~row_end),
                place.eq(stop),
                next_fills.eq(fills_word(bus, self.chunk_bytes, stop)),
                count.eq(Mux(row_end, 1, count + 1)),
                last.eq(count == row.chunks),
                flush.eq(row_end & crosses),
                held.data.eq(Mux(fills, bytes_[8 * bus :], Mux(row_end, 0, self.beat.payload.data))),
                held.strobe.eq(Mux(fills, strobe[bus:], Mux(row_end, 0, self.beat.payload.strobe))),
            ]
        with m.If(flush & self.beat.ready):
            m.d.sync += [flush.eq(0), held.eq(0)]
        probes(
            self, flush=flush, held=held, inside=inside, count=count, place=place, next_fills=next_fills, last=last,
            take=take,
        )  # fmt: skip
        return m


class ScratchpadReader(wiring.Component):
    """Read blocks of pieces from scratchpad out, in chunks of at most a bus word.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    job : In(stream)        Blocks to read, see `ScratchpadAddressGenerator`.
    chunk : Out(stream)     Their chunks, in order.
    out : Out(ReadPort)     The scratchpad.
    moves : Out(1)          A chunk is taken in this cycle.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        self.chunk_bytes = min(cfg.bus_bytes, cfg.piece_bytes)
        self._step_shift = exact_log2(cfg.piece_bytes // self.chunk_bytes)
        self._walk = scratchpads(cfg)["out"].piece_bits, max(1, self._step_shift), data.StructLayout({})
        super().__init__({
            "job": In(stream.Signature(job_layout(*self._walk))),
            "chunk": Out(stream.Signature(8 * self.chunk_bytes)),
            "out": Out(read_port(scratchpads(cfg)["out"])),
            "moves": Out(1),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.walker = walker = ScratchpadAddressGenerator(*self._walk)
        wiring.connect(m, wiring.flipped(self.job), walker.job)
        step = walker.step.payload
        piece_shift = exact_log2(self._cfg.out_pieces)

        # The scratchpad holds its data until the next read, so that a stall needs no register but `full`.
        full = Signal()
        selected = Signal(max(1, piece_shift + self._step_shift))
        chunk_bits = 8 * self.chunk_bytes
        chunks = data.View(data.ArrayLayout(chunk_bits, len(self.out.data) // chunk_bits), self.out.data)
        free = ~full | self.chunk.ready
        m.d.comb += [
            self.out.en.eq(walker.step.valid & free),
            self.out.addr.eq(step.element >> piece_shift),
            walker.step.ready.eq(self.out.ready & free),
            self.chunk.valid.eq(full),
            self.chunk.payload.eq(chunks[selected]),
            self.moves.eq(full & self.chunk.ready),
        ]
        with m.If(free):
            m.d.sync += full.eq(walker.step.valid & self.out.ready)
            m.d.sync += selected.eq((step.element[:piece_shift] << self._step_shift) | step.step)
        probes(self, walker=walker, selected=selected)
        return m


class Store(wiring.Component):
    """Copy blocks of pieces from scratchpad out to DRAM, as `store` in `sim/functional/reference.py` defines it.

    An instruction is done when the response to its last burst has come. Data of later instructions is sent meanwhile.

    Parameters
    ----------
    cfg : Config
    outstanding : int               Largest number of bursts under way at once.

    Members
    -------
    Those of `unit_members`, and:
    out : Out(ReadPort)             The scratchpad.
    axi : Out(Axi4Write)            The write channels.
    dma_base, dma_size : In         Address at which DRAM begins, a multiple of 4096, and how many bytes may be written.
    write_beat : Out(1)             A beat is sent in this cycle (counter `write_beats`).
    write_answer : Out(1)           A response to a burst arrives in this cycle.
    """

    def __init__(self, cfg: Config, outstanding: int = MAX_OUTSTANDING_BURSTS) -> None:
        self._cfg, self._outstanding = cfg, outstanding
        super().__init__({
            **unit_members(cfg, Opcode.STORE),
            "out": Out(read_port(scratchpads(cfg)["out"])),
            "axi": Out(Axi4Write(cfg.bus_bytes)),
            "dma_base": In(ADDR_BITS),
            "dma_size": In(OFFSET_BITS),
            "write_beat": Out(1),
            "write_answer": Out(1),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        cfg = self._cfg

        # After an error, all parts but the engine, which must complete its bursts, are reset.
        failed = Signal()
        stop = Signal()
        rows, reader = DramAddressGenerator(exact_log2(cfg.piece_bytes)), ScratchpadReader(cfg)
        packer = BeatPacker(cfg.bus_bytes, reader.chunk_bytes, rows.bytes_bits - exact_log2(reader.chunk_bytes))
        jobs = RegisteredFifo(reader.job.payload.shape(), MAX_IN_FLIGHT)
        positions = RegisteredFifo(packer.row.payload.shape(), 2 * self._outstanding)
        # Queues that cut combinational paths: between `rows` and the engine, the reader and the packer.
        requests, chunks = (
            RegisteredFifo(row_layout(rows.bytes_bits), REQUEST_QUEUE_DEPTH),
            RegisteredFifo(reader.chunk.payload.shape(), SKID_DEPTH),
        )
        waiting = RegisteredFifo(data.StructLayout({"index": INDEX_BITS, "post": 4}), MAX_UNANSWERED)
        parts = {
            "rows": rows, "jobs": jobs, "reader": reader, "positions": positions, "packer": packer, "waiting": waiting,
            "requests": requests, "chunks": chunks,
        }  # fmt: skip
        for name, part in parts.items():
            m.submodules[name] = ResetInserter(stop)(part)
        m.submodules.engine = engine = WriteEngine(cfg.bus_bytes, rows.bytes_bits, self._outstanding)
        m.d.comb += stop.eq(self.halt | failed)
        with m.If(self.halt):
            m.d.sync += failed.eq(0)
        with m.Elif(self.error.valid):
            m.d.sync += failed.eq(1)

        self._accept(m, rows, jobs, waiting, reader, stop)
        wiring.connect(m, jobs.o, reader.job)
        self._request_rows(m, rows, requests, positions, packer, stop)
        wiring.connect(m, requests.o, engine.row)
        wiring.connect(m, positions.o, packer.row)
        wiring.connect(m, reader.chunk, chunks.i)
        wiring.connect(m, chunks.o, packer.chunk)
        wiring.connect(m, packer.beat, engine.beat)
        wiring.connect(m, engine.axi, wiring.flipped(self.axi))
        wiring.connect(m, reader.out, wiring.flipped(self.out))
        m.d.comb += [
            engine.dma_base.eq(self.dma_base),
            engine.dma_size.eq(self.dma_size),
            engine.halt.eq(stop),
        ]
        self._report_completion(m, engine, waiting, stop)
        m.d.comb += [
            self.write_beat.eq(self.axi.wvalid & self.axi.wready),
            self.write_answer.eq(self.axi.bvalid & self.axi.bready),
            self.active.eq(reader.moves & ~stop),
            self.stalled.eq(waiting.o.valid & ~reader.moves & ~stop),
            self.idle.eq(~waiting.o.valid & engine.idle),
        ]
        probes(self, **parts, engine=engine, stop=stop)
        return m

    def _accept(
        self,
        m: Module,
        rows: DramAddressGenerator,
        jobs: RegisteredFifo,
        waiting: RegisteredFifo,
        reader: ScratchpadReader,
        stop: Signal,
    ) -> None:
        """Accept an instruction: pass its block to `rows`, which generates DRAM addresses, and its job to the reader.

        jobs: the queue of the reader's jobs. waiting: the queue of instructions that await responses to their writes.
        """
        f = self.instr.payload.fields
        accept = Signal()
        block, job = rows.block.payload, jobs.i.payload
        m.d.comb += [
            self.instr.ready.eq(rows.block.ready & jobs.i.ready & waiting.i.ready & ~stop),
            accept.eq(self.instr.valid & self.instr.ready),
            rows.block.valid.eq(accept),
            block.addr.eq(f.dram_addr),
            block.y_step.eq(f.dram_y),
            block.z_step.eq(f.dram_z),
            block.x_size.eq(f.x_size),
            block.y_size.eq(f.y_size),
            block.z_size.eq(f.z_size),
            block.shift.eq(exact_log2(self._cfg.piece_bytes)),
            jobs.i.valid.eq(accept),
            job.base.eq(f.sram_base),
            job.x_step.eq(f.sram_x),
            job.y_step.eq(f.sram_y),
            job.z_step.eq(f.sram_z),
            job.x_end.eq(f.x_size - 1),
            job.y_end.eq(f.y_size - 1),
            job.z_end.eq(f.z_size - 1),
            job.step_end.eq(self._cfg.piece_bytes // reader.chunk_bytes - 1),
            waiting.i.valid.eq(accept),
            waiting.i.payload.index.eq(self.instr.payload.index),
            waiting.i.payload.post.eq(f.post),
        ]
        probes(self, block=block)

    def _request_rows(
        self,
        m: Module,
        rows: DramAddressGenerator,
        requests: RegisteredFifo,
        positions: RegisteredFifo,
        packer: BeatPacker,
        stop: Signal,
    ) -> None:
        """Pass each row to the write engine (`requests`), and its position in bus words to the packer (`positions`)."""
        row, chunk_shift = rows.row.payload, exact_log2(packer.chunk_bytes)
        m.d.comb += [
            requests.i.valid.eq(rows.row.valid & positions.i.ready & ~stop),
            *(requests.i.payload[name].eq(row[name]) for name, _ in requests.i.payload.shape()),
            positions.i.valid.eq(rows.row.valid & requests.i.ready & ~stop),
            rows.row.ready.eq(positions.i.ready & requests.i.ready),  # without `stop`, which resets `rows`
            positions.i.payload.first.eq(row.offset),
            positions.i.payload.fills.eq(fills_word(self._cfg.bus_bytes, packer.chunk_bytes, row.offset)),
            positions.i.payload.chunks.eq((row.bytes >> chunk_shift) - 1),
            positions.i.payload.single.eq((row.bytes >> chunk_shift) == 1),
        ]
        probes(self, chunk_shift=chunk_shift)

    def _report_completion(self, m: Module, engine: WriteEngine, waiting: RegisteredFifo, stop: Signal) -> None:
        """Report the oldest instruction as done, or its error, when the engine reports its final row or an error."""
        answer = engine.answer
        fails = answer.payload.error != Error.NONE
        m.d.comb += [
            self.done.valid.eq(answer.valid & ~fails & ~stop),
            self.done.payload.post.eq(waiting.o.payload.post),
            self.done.payload.index.eq(waiting.o.payload.index),
            self.error.valid.eq(answer.valid & fails & ~stop),
            self.error.payload.code.eq(answer.payload.error),
            self.error.payload.index.eq(waiting.o.payload.index),
            waiting.o.ready.eq(self.done.valid),
        ]
