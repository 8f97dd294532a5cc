"""Prove that scratchpads with several users or banks equal one memory, and that LOAD writes each step once."""

from __future__ import annotations

from functools import partial

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, wiring

from celosia.hw.dae_pipeline.scratchpad import Scratchpad, WindowScratchpad, WriteArbiter
from celosia.hw.dae_pipeline.scratchpad_writer import ScratchpadWriter
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import buffers
from celosia.hw.spec.regs import Error
from proofs.declare import Mutant, prove
from proofs.handshakes import CONFIGS
from proofs.harness import Harness, implies

DEPTH, WIDTH = 16, 8


class Shared(wiring.Component):
    """A scratchpad that VECTOR and LOAD write."""

    def __init__(self, grain: int, parts: int) -> None:
        bits = (DEPTH - 1).bit_length()
        self.arbiter, self.pad = WriteArbiter(bits, WIDTH, grain, parts), Scratchpad(DEPTH, WIDTH, grain)
        members = {name: self.arbiter.signature.members[name] for name in ("vector", "load")}
        super().__init__({**members, "read": self.pad.signature.members["read"]})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.arbiter, m.submodules.pad = self.arbiter, self.pad
        wiring.connect(m, self.arbiter.write, self.pad.write)
        for name, inner in (("vector", self.arbiter), ("load", self.arbiter), ("read", self.pad)):
            wiring.connect(m, wiring.flipped(getattr(self, name)), getattr(inner, name))
        return m


class Model:
    """The expected content of any one entry; its writes are observed at the ports."""

    def __init__(self, h: Harness) -> None:
        self._h = h
        self.entry, self.word = h.constant(range(DEPTH), "entry"), Signal(WIDTH, name="word")

    def written(self, taken: Value, entry: Value, mask: Value, data: Value) -> None:
        """Record a write. mask: one bit for each part of `data`."""
        size = len(data) // len(mask)
        for i, bit in enumerate(mask):
            with self._h.m.If(taken & (entry == self.entry) & bit):
                self._h.m.d.sync += self.word.word_select(i, size).eq(data.word_select(i, size))


def shared(grain: int, parts: int) -> Harness:
    """VECTOR never waits, LOAD waits only for VECTOR, and memory holds exactly the accepted writes a cycle later."""
    h = Harness()
    dut = Shared(grain, parts)
    inside = h.add(dut)
    model = Model(h)
    vector, load, low = dut.vector, dut.load, (parts - 1).bit_length()
    part = WIDTH // parts
    mask, data = (Signal(parts, name="part_mask"), Signal(WIDTH, name="part_data"))
    number = vector.addr[:low]
    h.m.d.comb += [mask.eq(vector.mask << number), data.eq(vector.data << (number * part))]
    takes_vector, takes_load = vector.en & vector.ready, load.en & load.ready
    model.written(takes_vector, vector.addr[low:], mask, data)
    model.written(takes_load, load.addr, load.mask, load.data)
    h.ensure(vector.ready, "vector_never_waits")
    h.ensure(implies(load.en, load.ready == ~vector.en), "load_waits_for_vector_alone")
    h.ensure(inside.memory("pad.memory", model.entry) == model.word, "content")
    return h


def window(size: int, grain: int) -> Harness:
    """A read returns the entries of memory, from the beginning again behind the last one."""
    h = Harness()
    dut = WindowScratchpad(DEPTH, WIDTH, grain, size)
    inside = h.add(dut)
    model = Model(h)
    write, read, bits = dut.write, dut.read, (size - 1).bit_length()
    model.written(write.en & write.ready, write.addr, write.mask, write.data)
    for number in range(1 << bits):
        here = model.entry[:bits] == number
        content = inside.memory(f"banks.{number}.memory", model.entry[bits:])
        h.ensure(implies(here, content == model.word), f"content{number}")
    asked, first, word = Signal(name="asked"), Signal.like(read.addr, name="asked_first"), Signal(WIDTH, name="seen")
    with h.m.If(read.en & read.ready):
        h.m.d.sync += [asked.eq(1), first.eq(read.addr), word.eq(model.word)]
    for place in range(size):
        it_is = asked & ((first + place)[: len(first)] == model.entry)
        h.ensure(implies(it_is, read.data.word_select(place, WIDTH) == word), f"gives{place}")
    h.ensure(implies(asked, inside["first"] == first[:bits]), "first")
    return h


def writer(cfg: Config) -> Harness:
    """LOAD keeps an offer to a port until it is taken, and each step that it makes is taken once."""
    h = Harness()
    dut = ScratchpadWriter(cfg, buffers(cfg))
    inside = h.add(dut)
    h.assume(inside["out"].buffer <= buffers(cfg)[-1])  # proved of fetch
    taken = []
    for buffer in buffers(cfg):
        port = getattr(dut, buffer.name.lower())
        offer = Cat(port.addr, port.mask, port.data)
        h.ensure(h.kept(port.en, port.ready, offer, f"{buffer.name}_offer"), f"{buffer.name}_kept")
        taken.append(port.en & port.ready)
    waiting = Signal(2)
    queue, failed = inside["write_queue"], inside["failed"]
    leaves = Mux(queue.o.valid & failed, 1, sum(taken[1:], taken[0]))
    h.m.d.sync += waiting.eq(waiting + inside["moves"] - leaves)
    h.ensure(inside["write_queue.holds"] + inside["write_queue.level"] == waiting, "each_once")
    for name, word in (("holds", inside["write_queue.head"]), ("level", inside["write_queue.of"].data)):
        held = data.View(queue.o.payload.shape(), word)
        one = (held.enable != 0) & ((held.enable & (held.enable - 1)) == 0)
        port_or_error = Mux(held.error == Error.NONE, one, held.enable == 0)
        h.ensure(implies(inside[f"write_queue.{name}"], port_or_error), f"one_port_{name}")
    return h


FILE, LOAD = "dae_pipeline/scratchpad.py", "dae_pipeline/scratchpad_writer.py"
for grain, parts in ((4, 1), (2, 2)):
    prove(
        f"VECTOR and LOAD at a scratchpad equal one memory, {parts} part{'s' * (parts > 1)} of an entry",
        Mutant(FILE, "load.ready.eq(~vector.en)", "load.ready.eq(1)"),
        Mutant(
            FILE,
            "write.addr.eq(Mux(vector.en, ",
            "write.addr.eq(Mux(vector.en & ~load.en, ",
            near="part = vector.addr[:low_bits] m.d.comb += [vector.ready.eq(1), load.ready.eq(~vector.en)",
        ),
        Mutant(
            FILE,
            "write.en.eq(vector.en | load.en)",
            "write.en.eq(vector.en ^ load.en)",
            near="part = vector.addr[:low_bits] m.d.comb += [vector.ready.eq(1), load.ready.eq(~vector.en)",
        ),
        depth=1,
    )(partial(shared, grain, parts))
for size in (2, 3, 5):
    prove(
        f"windows of {size} entries equal one memory",
        Mutant(FILE, " + (number < read.addr[:low_bits])", ""),
        Mutant(FILE, "bank.write.addr.eq(write.addr[low_bits:])", "bank.write.addr.eq(write.addr)"),
        depth=1,
    )(partial(window, size, 4))
for name, cfg in CONFIGS.items():
    prove(
        f"LOAD writes each step once, Config {name}",
        Mutant(LOAD, "write_queue.o.ready.eq(taken.any() | failed)", "write_queue.o.ready.eq(1)"),
        Mutant(LOAD, "(out.outside | chunks.valid) & write_queue.i.ready)", "(out.outside | chunks.valid))"),
    )(partial(writer, cfg))
