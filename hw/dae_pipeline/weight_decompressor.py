"""Decompress packed weights on their way to wgt (`hw/spec/packing.py`, `sim/functional/unpacking.py`)."""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from celosia.hw.lib.layout import ERROR_BITS, WritePort, write_port
from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.packing import CODEBOOKS, NIBBLE_BITS, packing
from celosia.hw.spec.pipeline import EXPAND_STAGES
from celosia.hw.spec.regs import Error
from celosia.hw.spec.scratchpads import scratchpads

CHOICE_BITS = exact_log2(CODEBOOKS)
"""Bits of the number of a codebook."""


def chunk_layout(bus_bytes: int) -> data.StructLayout:
    """Return the layout of a chunk from the aligner: the bytes of one step of an element, at most a bus word."""
    return data.StructLayout({"data": 8 * bus_bytes, "error": ERROR_BITS})


def choices_layout(groups: int) -> data.ArrayLayout:
    """Return the layout of the codebook numbers for a chunk, one for each of its `groups` codebook blocks."""
    return data.ArrayLayout(CHOICE_BITS, groups)


class PackHeaderParser(wiring.Component):
    """Remove the head of each pack from the chunks, and output the codebook numbers for each chunk of weights.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    chunk : In(stream)      All chunks.
    packed : In(1)          The next chunk belongs to a pack; other chunks pass unchanged.
    rest : Out(stream)      The chunks without those of heads. A chunk with an error passes, so that it is reported.
    choices : Out           The codebook number of each codebook block in the chunk that `rest` offers.
    """

    def __init__(self, cfg: Config) -> None:
        self._packing = packing(cfg)
        chunk = stream.Signature(chunk_layout(cfg.bus_bytes))
        choices = choices_layout(self._packing.chunk_blocks)
        super().__init__({"chunk": In(chunk), "packed": In(1), "rest": Out(chunk), "choices": Out(choices)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        head_chunks, weight_chunks = self._packing.chunk_counts
        begins = Signal(init=1)  # a head comes next
        word = Signal(range(max(2, head_chunks)))
        number = Signal(range(max(2, weight_chunks)))
        words = [Reg(len(self.chunk.payload.data), name=f"head{i}") for i in range(head_chunks)]
        takes = self.packed & begins & (self.chunk.payload.error == Error.NONE)
        chunks_of_block = max(
            1, self._packing.run // (self._packing.expansion * self._packing.chunk_bytes)
        )  # consecutive chunks with the same codebooks
        last = self._packing.blocks // self._packing.chunk_blocks * chunks_of_block
        choices = self.choices.shape()
        heads = data.View(
            data.ArrayLayout(choices, head_chunks * len(self.chunk.payload.data) // choices.size), Cat(words)
        )
        m.d.comb += [
            self.rest.valid.eq(self.chunk.valid & ~takes),
            self.rest.payload.eq(self.chunk.payload),
            self.chunk.ready.eq(takes | self.rest.ready),
            self.choices.eq(heads[(number % last) >> exact_log2(chunks_of_block)]),
        ]
        with m.If(self.chunk.valid & takes):
            m.d.sync += [word.eq(Mux(word == head_chunks - 1, 0, word + 1)), begins.eq(word != head_chunks - 1)]
            m.d.sync += [held.eq(Mux(word == i, self.chunk.payload.data, held)) for i, held in enumerate(words)]
        with m.Elif(self.rest.valid & self.rest.ready & self.packed):
            m.d.sync += [
                number.eq(Mux(number == weight_chunks - 1, 0, number + 1)),
                begins.eq(number == weight_chunks - 1),
            ]
        probes(self, begins=begins, word=word, number=number, words=words)
        return m


class WeightDecompressor(wiring.Component):
    """Write chunks to wgt, EXPAND_STAGES cycles later: unchanged, or with each nibble looked up in its codebook.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    write : In(WritePort)   A chunk for wgt. With `expand`, the mask has a bit for each grain that the chunk becomes.
    expand : In(1)          The data of `write` are packed weights.
    choices : In            The codebook numbers of their codebook blocks.
    book : In(WritePort)    Writes entries of codebooks, for later look-ups; never in the same cycle as `write`.
    wgt : Out(WritePort)    To the scratchpad.
    """

    def __init__(self, cfg: Config) -> None:
        pads = scratchpads(cfg)
        pad = pads["wgt"]
        self._packing, self._grain, self._book = packing(cfg), pad.grain, pads["book"]
        super().__init__({
            "write": In(WritePort(pad.address_bits, pad.width, pad.grain)),
            "expand": In(1),
            "choices": In(choices_layout(self._packing.chunk_blocks)),
            "book": In(write_port(self._book)),
            "wgt": Out(write_port(pad)),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        write, wgt, data_ = self.write, self.wgt, self.write.data[: self._grain]
        for stage in range(EXPAND_STAGES):
            enable = Signal(name=f"enable{stage}")
            addr = Reg(len(wgt.addr), name=f"addr{stage}")
            mask = Reg(len(wgt.mask), name=f"mask{stage}")
            m.d.sync += [enable.eq(write.en), addr.eq(write.addr), mask.eq(write.mask)]
            write = WritePort(len(addr), len(wgt.data), self._grain).create(path=(f"write{stage}",))
            m.d.comb += [write.en.eq(enable), write.addr.eq(addr), write.mask.eq(mask)]
        # Three stages: addresses of the codebooks, or plain data; data from the codebooks, or plain data; the result.
        expand = Reg()
        expanded = Reg()
        plain = Reg(self._grain)
        passed = Reg(self._grain)
        m.d.sync += [expand.eq(self.expand), expanded.eq(expand), plain.eq(data_), passed.eq(plain)]
        nibbles = len(data_) // NIBBLE_BITS
        packed = data.View(data.ArrayLayout(NIBBLE_BITS, nibbles), data_)
        blocks_of_chunk = self._packing.chunk_blocks
        decoded = self._look_up(
            m, [Cat(packed[i], self.choices[i * blocks_of_chunk // nibbles]) for i in range(nibbles)]
        )
        result = Reg(len(decoded))
        m.d.sync += result.eq(Mux(expanded, decoded, passed.replicate(len(decoded) // len(passed))))
        m.d.comb += [
            self.write.ready.eq(1), wgt.en.eq(write.en), wgt.addr.eq(write.addr), wgt.mask.eq(write.mask),
            wgt.data.eq(result.replicate(len(wgt.data) // len(result))),
        ]  # fmt: skip
        return m

    def _look_up(self, m: Module, entries: list[Cat]) -> Cat:
        """Look up `entries` (a codebook number above a nibble) in the codebooks. Returns the words, two cycles later.

        Each block RAM looks up two entries, one of them through the port that also writes it. That needs no third port,
        since codebooks are never written in the cycle of a look-up.
        """
        fills = Signal()
        word = Reg(len(self.book.data))
        size = self._book.address_bits
        m.d.comb += self.book.ready.eq(1)
        m.d.sync += [fills.eq(self.book.en & self.book.mask[0]), word.eq(self.book.data)]
        attrs = {"ram_style": "block", "no_rw_check": 1}  # data read at an address that is being written is not used
        memories = [Memory(shape=len(word), depth=self._book.depth, init=[], attrs=attrs) for _ in entries[::2]]
        places = [Reg(size, name=f"place{number}") for number in range(len(entries))]
        words = []
        for number, (place, entry) in enumerate(zip(places, entries)):
            memory, shares_write_port = memories[number // 2], number % 2 == 0
            m.d.sync += place.eq(Mux(self.book.en, self.book.addr, entry) if shares_write_port else entry)
            if shares_write_port:
                m.submodules[f"book{number // 2}"] = memory
                ram_write = memory.write_port()
                m.d.comb += [ram_write.en.eq(fills), ram_write.addr.eq(place), ram_write.data.eq(word)]
            ram_read = memory.read_port()
            m.d.comb += [ram_read.en.eq(1), ram_read.addr.eq(place)]
            words.append(ram_read.data)
        probes(self, fills=fills, places=places, word=word, memories=memories)
        return Cat(words)
