"""STORE from its rows to AXI: no byte is written but those of the row, which lies inside the limits to the byte.

Rows and data come from anywhere: the parts of STORE that list rows and read the scratchpad are cut out.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from amaranth import Array, Cat, Const, Mux, Signal, Value
from amaranth.lib import data

from celosia.hw.axi import ADDR_BITS
from celosia.hw.config import Config
from celosia.hw.dae_pipeline.dma import OFFSET_BITS
from celosia.hw.dae_pipeline.store import Store
from proofs.bursts import LIMITS, limits
from proofs.declare import Mutant, prove
from proofs.fifos import List, place
from proofs.handshakes import OTHER, SMALL
from proofs.harness import Harness, implies

CUT = ("cutpoint t:top.dut.rows t:top.dut.reader",)
OUTSTANDING = 2
"""Bursts under way, here; that queues of more are lists is proved of the queues."""
LISTS, QUEUES = 1, 2
"""Parts."""
CONFIGS = {"small": SMALL, "other": OTHER, "whole words": replace(SMALL, block_in=8, block_out=8)}
"""Units of half a bus word, and of a whole one."""


def store(cfg: Config, part: int | None = None) -> Harness:
    """Follows all rows between their entry and their last beat, and all bursts between AW and theirs."""
    h = Harness(part)
    m = h.m
    dut = Store(cfg, OUTSTANDING)
    inside = h.add(dut, LIMITS)
    limits(h, dut.dma_base, dut.dma_size)
    h.assume(dut.halt | ~h.register(dut.halt, "halted"))  # it stays until the next run
    bus, unit, axi = cfg.bus_bytes, inside["unit_shift"], dut.axi
    word_bits = bus.bit_length() - 1
    entering, split, lengths = inside["rows.row"], inside["engine.splitter.split"], inside["engine.lengths"]
    size = entering.payload.bytes
    h.assume((size != 0) & (size[:unit] == 0))  # proved of `Rows`, of elements that are
    block = inside["block"]
    h.ensure((1 << block.shift) == cfg.piece_bytes, "whole_pieces")

    # The two lists. `given`: beats of the oldest row that have gone to W.
    row_layout = data.StructLayout({"offset": OFFSET_BITS, "end": len(size) + 1, "units": len(size) - unit})
    burst_layout = data.StructLayout({"addr": ADDR_BITS, "len": 4, "word": OFFSET_BITS - word_bits, "row_end": 1})
    places = 2 * OUTSTANDING
    rows, bursts = List(m, "row", row_layout, places + 1), List(m, "burst", burst_layout, OUTSTANDING)

    def first_word(row: Value) -> Value:
        return row.offset >> word_bits

    def last_word(row: Value) -> Value:
        return row.end >> word_bits

    def refused(row: Value) -> Value:
        return row.end >= dut.dma_size

    def covers(row: Value, word: Value) -> Value:
        """Which bytes of a word belong to a row."""
        from_first = [(word != first_word(row)) | (i >= row.offset[:word_bits]) for i in range(bus)]
        to_last = [(word != last_word(row)) | (i <= row.end[:word_bits]) for i in range(bus)]
        return Cat(from_first) & Cat(to_last)

    oldest, burst = rows.items[0], bursts.items[0]
    given, word = Signal(OFFSET_BITS - word_bits), Signal(OFFSET_BITS - word_bits)
    m.d.comb += word.eq(first_word(oldest) + given)
    beat, stop = inside["packer.beat"], inside["stop"]
    takes = beat.valid & beat.ready
    enters = inside["engine.row"].valid & inside["engine.row"].ready
    row_ends, burst_ends = takes & (word == last_word(oldest)), lengths.o.valid & lengths.o.ready
    offset = entering.payload.offset
    rows.moves(enters, Cat(offset, (offset + size - 1)[: len(size) + 1], (size >> unit) - 1), row_ends)
    splitter_word = inside["engine.splitter.word"]
    pushed = Cat(split.payload.burst.addr, split.payload.burst.len, splitter_word, split.payload.row_end)
    bursts.moves(lengths.i.valid & lengths.i.ready, pushed, burst_ends)
    with m.If(takes):
        m.d.sync += given.eq(Mux(row_ends, 0, given + 1))

    # What the beat in W's register may write, and where its burst puts it: `here` counts words from the base.
    loads, count = inside["engine.w_load"], inside["engine.count"]
    may, address, here = Signal(bus), Signal(ADDR_BITS), Signal.like(word)
    with m.If(loads):
        m.d.sync += [may.eq(Mux(takes, covers(oldest, word), 0)), address.eq(burst.addr + (count << word_bits))]
        m.d.sync += here.eq(word)
    below = Cat(Cat(Const(i, word_bits), here) < dut.dma_size for i in range(bus))
    writes = axi.wvalid & axi.wstrb.any()
    h.ensure(implies(axi.wvalid, (axi.wstrb & ~may) == 0), "bytes_of_the_row")
    h.ensure(implies(writes, (address == dut.dma_base + (here << word_bits)) & ((may & ~below) == 0)), "in_limits")

    # What makes it inductive, until all stop.
    off = Signal()
    m.d.sync += off.eq(off | stop)
    h.ensure(implies(off, stop), "stays_off")

    def always(condition: Value, name: str, part: int = 0) -> None:
        h.ensure(off | condition, name, part)

    # Bursts follow each other through the rows, and after the last one comes what the splitter holds.
    always((bursts.count <= OUTSTANDING) & (rows.count <= places + 1), "counts", LISTS)
    number, following = Const(0), (word - count)[: len(word)]
    for i, item in enumerate(bursts.items):
        there = bursts.count > i
        row = data.View(row_layout, Array([Value.cast(r) for r in rows.items])[number])
        last = item.word + item.len
        always(
            implies(there, (item.word == following) & (rows.count > number) & ~refused(row)), f"burst{i}_follows", LISTS
        )
        always(implies(there, item.addr == dut.dma_base + (item.word << word_bits)), f"burst{i}_address", LISTS)
        always(implies(there, Mux(item.row_end, last == last_word(row), last < last_word(row))), f"burst{i}_end", LISTS)
        after = data.View(row_layout, Array([Value.cast(r) for r in rows.items])[number + 1])
        number_after, following_after = Signal(4, name=f"number{i}"), Signal.like(word, name=f"following{i}")
        m.d.comb += [
            number_after.eq(Mux(there, number + item.row_end, number)),
            following_after.eq(Mux(there, Mux(item.row_end, first_word(after), last + 1), following)),
        ]
        number, following = number_after, following_after
    # The splitter holds what is left of the last row, or has dropped it.
    part = inside["engine.splitter"]
    valid, stuck, flag, left = (inside.of(part, name) for name in ("valid", "stuck", "refused", "left"))
    row = data.View(row_layout, Array([Value.cast(r) for r in rows.items])[number])
    always(implies(valid | stuck, (rows.count == number + 1) & ~(valid & stuck)), "last_row", LISTS)
    always(implies(~(valid | stuck), rows.count == number), "no_row_left", LISTS)
    always(implies(valid, flag == refused(row)) & implies(stuck, refused(row)), "refused", LISTS)
    rest = (splitter_word == following) & (left == last_word(row) - splitter_word) & (splitter_word <= last_word(row))
    always(implies(valid & ~flag, rest), "rest")
    always(implies((bursts.count == 0) & ~(valid & ~flag), given == 0), "nothing_given", LISTS)
    # The queues of lengths and of rows.
    level, consume = inside["engine.lengths.queue.level"], inside["engine.lengths.queue.consume"]
    ring = place(consume, level, OUTSTANDING)
    always((level == bursts.count) & (inside["engine.lengths.queue.produce"] == ring), "lengths", QUEUES)
    for i, item in enumerate(bursts.items):
        content = inside.memory("engine.lengths.queue.storage", place(consume, i, OUTSTANDING))
        always(implies(bursts.count > i, content == item.len), f"length{i}", QUEUES)
    always(Mux(bursts.count == 0, count == 0, (count <= burst.len) & (word == burst.word + count)), "count", QUEUES)
    flush, level, consume = inside["packer.flush"], inside["places.queue.level"], inside["places.queue.consume"]
    ring = place(consume, level, places)
    always((level + flush == rows.count) & (inside["places.queue.produce"] == ring), "places", QUEUES)
    for i in range(places):
        row = data.View(row_layout, Mux(flush, rows.items[i + 1], rows.items[i]))
        content = inside.memory("places.queue.storage", place(consume, i, places))
        wanted = Cat(row.offset[:word_bits], row.units)
        always(implies(level > i, content == wanted), f"place{i}", QUEUES)
    for i, row in enumerate(rows.items):
        always(implies(rows.count > i, row.end + 1 == row.offset + ((row.units + 1) << unit)), f"row{i}_end", LISTS)
    # The packer: `begun` within the oldest row, all of whose bytes before `at` it has taken.
    begun, at, units, held = (inside[f"packer.{name}"] for name in ("inside", "place", "count", "held"))
    taken = oldest.offset[:word_bits] + (units << unit)
    before = Cat(i < at for i in range(bus))
    always(implies(begun, (rows.count != 0) & ~flush & (units != 0) & (units <= oldest.units)), "begun")
    always(implies(begun, (given << word_bits) + at == taken), "taken")
    always(implies(begun, held.strobe == covers(oldest, word) & before), "held")
    always(implies(~begun, units == 0), "units")
    always(implies(~begun & ~flush, (given == 0) & (held.strobe == 0)), "idle")
    always(
        implies(flush, (rows.count != 0) & (word == last_word(oldest)) & (held.strobe == covers(oldest, word))), "flush"
    )
    return h


STORE, DMA = "dae_pipeline/store.py", "dae_pipeline/dma.py"
for name, cfg in CONFIGS.items():
    prove(
        f"STORE writes no byte outside its rows and the limits, Config {name}",
        Mutant(
            DMA,
            "row.offset + row.bytes > self.dma_size",
            "(row.offset + row.bytes) >> word_bits > self.dma_size >> word_bits",
        ),
        Mutant(
            DMA, "axi.wstrb.eq(Mux(self.halt, 0, self.beat.payload.strobe))", "axi.wstrb.eq(self.beat.payload.strobe)"
        ),
        Mutant(STORE, "strobe[bus:], Mux(row_end, 0,", "strobe[bus:], Mux(0, 0,"),
        Mutant(STORE, "((1 << self._unit_bytes) - 1) << first", "((1 << self._unit_bytes) - 1) << place"),
        depth=1,
        script=CUT,
        cases=range(3),
        sample=range(3) if name == "small" else (),
    )(partial(store, cfg))
