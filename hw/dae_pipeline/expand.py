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


def unit_layout(bus_bytes: int) -> data.StructLayout:
    """What comes of the bus in a cycle."""
    return data.StructLayout({"data": 8 * bus_bytes, "error": ERROR_BITS})


class PackHeaderParser(wiring.Component):
    """Takes the head of each pack out of the units, and gives each unit of weights the codebooks of its groups.

    Members
    -------
    unit : In(stream)       all that comes.
    packed : In(1)          whether what comes next is of a pack; else it passes as it is.
    rest : Out(stream)      without the units of heads.
    choices : Out           of `rest`, the number of each group's codebook. What comes with an error passes, so that it
                            is told.
    """

    def __init__(self, cfg: Config) -> None:
        self._packing = packing(cfg)
        unit = stream.Signature(unit_layout(cfg.bus_bytes))
        bits = CHOICE_BITS * self._packing.chunk_blocks
        super().__init__({"unit": In(unit), "packed": In(1), "rest": Out(unit), "choices": Out(bits)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        ahead, behind = self._packing.chunk_counts
        begins = Signal(init=1)  # a head comes next
        word = Signal(range(max(2, ahead)))
        number = Signal(range(max(2, behind)))
        words = [Reg(len(self.unit.payload.data), name=f"head{i}") for i in range(ahead)]
        takes = self.packed & begins & (self.unit.payload.error == Error.NONE)
        own = max(1, self._packing.run // (self._packing.expansion * self._packing.chunk_bytes))  # chunks of a block
        last = self._packing.blocks // self._packing.chunk_blocks * own
        m.d.comb += [
            self.rest.valid.eq(self.unit.valid & ~takes),
            self.rest.payload.eq(self.unit.payload),
            self.unit.ready.eq(takes | self.rest.ready),
            self.choices.eq(Cat(words).word_select((number % last) >> exact_log2(own), len(self.choices))),
        ]
        with m.If(self.unit.valid & takes):
            m.d.sync += [word.eq(Mux(word == ahead - 1, 0, word + 1)), begins.eq(word != ahead - 1)]
            m.d.sync += [held.eq(Mux(word == i, self.unit.payload.data, held)) for i, held in enumerate(words)]
        with m.Elif(self.rest.valid & self.rest.ready & self.packed):
            m.d.sync += [number.eq(Mux(number == behind - 1, 0, number + 1)), begins.eq(number == behind - 1)]
        probes(self, begins=begins, word=word, number=number, words=words)
        return m


class WeightDecompressor(wiring.Component):
    """Writes a unit to wgt, three cycles later: as it is, or what its halves of bytes stand for in their codebooks.

    Members
    -------
    write : In(WritePort)   of wgt, with one unit of data; where it is to `expand`, the mask has a bit for each that it
                            becomes.
    expand : In(1)          whether its data are packed weights.
    choices : In            their groups' codebooks.
    book : In(WritePort)    of codebooks: what comes later, through `write`, finds it; not at the same time as `write`.
    wgt : Out(WritePort)
    """

    def __init__(self, cfg: Config) -> None:
        pads = scratchpads(cfg)
        pad = pads["wgt"]
        self._packing, self._grain, self._book = packing(cfg), pad.grain, pads["book"]
        super().__init__({
            "write": In(WritePort(pad.address_bits, pad.width, pad.grain)),
            "expand": In(1),
            "choices": In(CHOICE_BITS * self._packing.chunk_blocks),
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
        # What is looked up, or written; what is found, beside what passes as it is; one of the two.
        expand = Reg()
        expanded = Reg()
        plain = Reg(self._grain)
        passed = Reg(self._grain)
        m.d.sync += [expand.eq(self.expand), expanded.eq(expand), plain.eq(data_), passed.eq(plain)]
        nibbles = len(data_) // NIBBLE_BITS
        each = len(self.choices) // CHOICE_BITS
        found = self._look_up(m, [
            Cat(data_.word_select(i, NIBBLE_BITS), self.choices.word_select(i * each // nibbles, CHOICE_BITS))
            for i in range(nibbles)
        ])  # fmt: skip
        result = Reg(len(found))
        m.d.sync += result.eq(Mux(expanded, found, passed.replicate(len(found) // len(passed))))
        m.d.comb += [
            self.write.ready.eq(1), wgt.en.eq(write.en), wgt.addr.eq(write.addr), wgt.mask.eq(write.mask),
            wgt.data.eq(result.replicate(len(wgt.data) // len(result))),
        ]  # fmt: skip
        return m

    def _look_up(self, m: Module, entries: list[Cat]) -> Cat:
        """What these entries of book hold, two cycles later. Each block RAM looks up two of them, one through the port
        that writes it."""
        fills = Signal()
        word = Reg(len(self.book.data))
        size = self._book.address_bits
        m.d.comb += self.book.ready.eq(1)
        m.d.sync += [fills.eq(self.book.en & self.book.mask[0]), word.eq(self.book.data)]
        attrs = {"ram_style": "block", "no_rw_check": 1}  # what is read of a place while it is written does not count
        memories = [Memory(shape=len(word), depth=self._book.depth, init=[], attrs=attrs) for _ in entries[::2]]
        places = [Reg(size, name=f"place{number}") for number in range(len(entries))]
        found = []
        for number, (place, entry) in enumerate(zip(places, entries)):
            memory, first = memories[number // 2], number % 2 == 0
            m.d.sync += place.eq(Mux(self.book.en, self.book.addr, entry) if first else entry)
            if first:
                m.submodules[f"book{number // 2}"] = memory
                to = memory.write_port()
                m.d.comb += [to.en.eq(fills), to.addr.eq(place), to.data.eq(word)]
            of = memory.read_port()
            m.d.comb += [of.en.eq(1), of.addr.eq(place)]
            found.append(of.data)
        probes(self, fills=fills, places=places, word=word, memories=memories)
        return Cat(found)
