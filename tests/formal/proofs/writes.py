"""Prove of STORE, from its rows to AXI, that it writes only bytes of the row, which lies within the limits.

Rows and data are free: the parts of STORE that list rows and read the scratchpad are cut out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from amaranth import Array, Cat, Const, Mux, Signal, Value
from amaranth.lib import data

from celosia.hw.dae_pipeline.dma import OFFSET_BITS
from celosia.hw.dae_pipeline.store import Store
from celosia.hw.lib.axi import ADDR_BITS
from celosia.hw.spec.config import Config
from proofs.bursts import LIMITS, limits
from proofs.declare import Mutant, prove
from proofs.fifos import List, place
from proofs.handshakes import OTHER, SMALL
from proofs.harness import Harness, implies

CUT = ("cutpoint t:top.dut.rows t:top.dut.reader",)
OUTSTANDING = 2
"""Number of bursts under way in this proof; fifos.py proves that longer queues are lists, too."""
PLACES = 2 * OUTSTANDING
"""Number of rows that STORE holds."""
LISTS, QUEUES = 1, 2
"""Numbers of the parts of the proof."""
CONFIGS = {"small": SMALL, "other": OTHER, "whole words": replace(SMALL, block_in=8, block_out=8)}
"""Configs with chunks of half a bus word, and of a whole one."""


class Model:
    """STORE with a list of its rows, from entry to last beat, and a list of its bursts, from AW to last beat.

    given: number of beats of the oldest row that went to W. word: place of the next beat in DRAM, in words of the bus.
    off: True once everything has stopped.
    """

    def __init__(self, cfg: Config, part: int | None) -> None:
        self.h = h = Harness(part)
        self.dut = dut = Store(cfg, OUTSTANDING)
        self.inside = inside = h.add(dut, LIMITS)
        limits(h, dut.dma_base, dut.dma_size)
        h.assume(dut.halt | ~h.register(dut.halt, "halted"))  # it stays until the next run
        self.bus, self.chunk = cfg.bus_bytes, inside["chunk_shift"]
        self.word_bits = self.bus.bit_length() - 1
        offset, size = inside["rows.row"].payload.offset, inside["rows.row"].payload.bytes
        h.assume((size != 0) & (size[: self.chunk] == 0))  # proved of `Rows`, of elements that are
        h.ensure((1 << inside["block"].shift) == cfg.piece_bytes, "whole_pieces")

        word = Signal(OFFSET_BITS - self.word_bits)
        self.row_layout = data.StructLayout(
            {"offset": OFFSET_BITS, "end": len(size) + 1, "chunks": len(size) - self.chunk}
        )
        burst_layout = data.StructLayout({"addr": ADDR_BITS, "len": 4, "word": len(word), "row_end": 1})
        self.rows = rows = List(h.m, "row", self.row_layout, PLACES + 1)
        self.bursts = bursts = List(h.m, "burst", burst_layout, OUTSTANDING)
        self.oldest, self.word, self.given = rows.items[0], word, Signal(len(word), name="given")
        beat, enters, lengths = inside["packer.beat"], inside["positions"].i, inside["engine.lengths"]
        self.takes = beat.valid & beat.ready
        ends = self.takes & (word == self.last_word(self.oldest))
        row = Cat(offset, (offset + size - 1)[: len(size) + 1], (size >> self.chunk) - 1)
        rows.moves(enters.valid & enters.ready, row, ends)
        split = inside["engine.splitter.split"].payload
        burst = Cat(split.burst.addr, split.burst.len, inside["engine.splitter.word"], split.row_end)
        bursts.moves(lengths.i.valid & lengths.i.ready, burst, lengths.o.valid & lengths.o.ready)
        self.off = Signal()
        h.m.d.comb += word.eq(self.first_word(self.oldest) + self.given)
        h.m.d.sync += self.off.eq(self.off | inside["stop"])
        with h.m.If(self.takes):
            h.m.d.sync += self.given.eq(Mux(ends, 0, self.given + 1))

    def first_word(self, row: Value) -> Value:
        return row.offset >> self.word_bits

    def last_word(self, row: Value) -> Value:
        return row.end >> self.word_bits

    def refused(self, row: Value) -> Value:
        return row.end >= self.dut.dma_size

    def row(self, number: Value) -> data.View:
        return data.View(self.row_layout, Array([Value.cast(row) for row in self.rows.items])[number])

    def covers(self, row: Value) -> Value:
        """Return a mask of the bytes of `word` that belong to a row."""
        bits = self.word_bits
        from_first = [(self.word != self.first_word(row)) | (i >= row.offset[:bits]) for i in range(self.bus)]
        to_last = [(self.word != self.last_word(row)) | (i <= row.end[:bits]) for i in range(self.bus)]
        return Cat(from_first) & Cat(to_last)

    def fills(self, at: Value) -> Value:
        """Return whether a chunk from `at` on reaches the end of its word."""
        return at[: self.word_bits] + (1 << self.chunk) >= self.bus

    def writes_its_own(self) -> None:
        """The beat in W's register writes only permitted bytes, at the address that its burst gives it."""
        h, dut, axi, inside = self.h, self.dut, self.dut.axi, self.inside
        # `here` counts words from the base, as `word` did when the beat was taken.
        may, address, here = Signal(self.bus), Signal(ADDR_BITS), Signal.like(self.word)
        at = self.bursts.items[0].addr + (inside["engine.count"] << self.word_bits)
        with h.m.If(inside["engine.w_load"]):
            h.m.d.sync += [may.eq(Mux(self.takes, self.covers(self.oldest), 0)), address.eq(at), here.eq(self.word)]
        below = Cat(Cat(Const(i, self.word_bits), here) < dut.dma_size for i in range(self.bus))
        placed = address == dut.dma_base + (here << self.word_bits)
        h.ensure(implies(axi.wvalid, (axi.wstrb & ~may) == 0), "bytes_of_the_row")
        h.ensure(implies(axi.wvalid & axi.wstrb.any(), placed & ((may & ~below) == 0)), "in_limits")
        h.ensure(implies(self.off, inside["stop"]), "stays_off")

    # Invariants for the induction, until all stop.

    def _always(self, condition: Value, name: str, part: int = 0) -> None:
        self.h.ensure(self.off | condition, name, part)

    def bursts_follow(self) -> None:
        """Bursts follow each other through the rows; the splitter holds the rest of the last row, or has dropped it."""
        rows, bursts, inside = self.rows, self.bursts, self.inside
        self._always((bursts.count <= OUTSTANDING) & (rows.count <= PLACES + 1), "counts", LISTS)
        for i, row in enumerate(rows.items):
            end = row.offset + ((row.chunks + 1) << self.chunk)
            self._always(implies(rows.count > i, (row.end + 1 == end) & ~row.chunks.all()), f"row{i}_end", LISTS)
        # The row that the next burst belongs to, and where in it that begins.
        number: Value = Const(0)
        following: Value = (self.word - inside["engine.count"])[: len(self.word)]
        for i, burst in enumerate(bursts.items):
            there, row = bursts.count > i, self.row(number)
            last, end = burst.word + burst.len, self.last_word(row)
            follows = (burst.word == following) & (rows.count > number) & ~self.refused(row)
            placed = burst.addr == self.dut.dma_base + (burst.word << self.word_bits)
            self._always(implies(there, follows), f"burst{i}_follows", LISTS)
            self._always(implies(there, placed), f"burst{i}_address", LISTS)
            self._always(implies(there, Mux(burst.row_end, last == end, last < end)), f"burst{i}_end", LISTS)
            new_number, new_following = Signal(4, name=f"number{i}"), Signal.like(self.word, name=f"following{i}")
            after = Mux(burst.row_end, self.first_word(self.row(number + 1)), last + 1)
            self.h.m.d.comb += [
                new_number.eq(number + (there & burst.row_end)),
                new_following.eq(Mux(there, after, following)),
            ]
            number, following = new_number, new_following
        word, valid, stuck, refused, left = (
            inside[f"engine.splitter.{name}"] for name in ("word", "valid", "stuck", "refused", "left")
        )
        row = self.row(number)
        end = self.last_word(row)
        self._always(~(valid & stuck), "one_row", LISTS)
        self._rows_wait(number + (valid | stuck))
        self._always(Mux(valid, refused == self.refused(row), ~stuck | self.refused(row)), "refused", LISTS)
        within = valid & ~refused
        self._always(implies((bursts.count == 0) & ~within, self.given == 0), "nothing_given", LISTS)
        for i, burst in enumerate(bursts.items):
            self._always(implies(bursts.count == i + 1, burst.row_end | within), f"burst{i}_newest", LISTS)
        rest = (word == following) & (left == end - word) & (word <= end)
        self._always(implies(within, rest), "rest")
        length, ends = inside["engine.splitter.length"], inside["engine.splitter.ends"]
        self._always(implies(within, (length <= left) & (ends == (length == left))), "length")

    def _rows_wait(self, number: Value) -> None:
        """The rows from `number` on wait for the splitter."""
        depth = 2
        count, whole, content = self._queue("requests", depth)
        self._always(whole, "requests", QUEUES)
        self._always(self.rows.count == number + count, "no_other_row", LISTS)
        for i in range(depth):
            row = self.row(number + i)
            wanted = Cat(row.offset, Const(0, self.chunk), row.chunks + 1)
            self._always(implies(count > i, (content(i) ^ wanted)[:-1] == 0), f"requests{i}", QUEUES)

    def _queue(self, name: str, depth: int) -> tuple[Value, Value, Callable[[int], Value]]:
        """Return a RegisteredFifo's count, whether its state is consistent, and a function to its i-th element."""
        level, consume, produce, holds, head = (
            self.inside[f"{name}.{part}"] for part in ("level", "consume", "produce", "holds", "head")
        )
        inner = depth - 1
        whole = (level <= inner) & (holds | (level == 0)) & (produce == place(consume, level, inner))

        def content(i: int) -> Value:
            return self.inside.memory(f"{name}.ring", place(consume, i - 1, inner)) if i else Value.cast(head)

        return level + holds, whole & (consume < inner) & (produce < inner), content

    def queues_hold(self) -> None:
        """The queues hold the lengths of the bursts and the positions of the rows."""
        inside, bursts, count = self.inside, self.bursts, self.inside["engine.count"]
        queue = "engine.lengths.queue"
        level, consume, produce = (inside[f"{queue}.{name}"] for name in ("level", "consume", "produce"))
        self._always((level == bursts.count) & (produce == place(consume, level, OUTSTANDING)), "lengths", QUEUES)
        for i, item in enumerate(bursts.items):
            content = inside.memory(f"{queue}.storage", place(consume, i, OUTSTANDING))
            self._always(implies(bursts.count > i, content == item.len), f"length{i}", QUEUES)
        burst = bursts.items[0]
        sent = (count <= burst.len) & (self.word == burst.word + count)
        self._always(Mux(bursts.count == 0, count == 0, sent), "count", QUEUES)

        count, whole, content = self._queue("positions", PLACES)
        flush = inside["packer.flush"]
        self._always((count + flush == self.rows.count) & whole, "positions", QUEUES)
        for i, (now, following) in enumerate(zip(self.rows.items, self.rows.items[1:])):
            row = data.View(self.row_layout, Mux(flush, following, now))
            wanted = Cat(row.offset[: self.word_bits], self.fills(row.offset), row.chunks, row.chunks == 0)
            self._always(implies(count > i, content(i) == wanted), f"place{i}", QUEUES)

    def packer_is_right(self) -> None:
        """The packer has taken the oldest row's bytes before `at` in the next word, and holds those of that word."""
        begun, flush, at, count, held, is_last, fills = (
            self.inside[f"packer.{name}"]
            for name in ("inside", "flush", "place", "count", "held", "last", "next_fills")
        )
        chunks = (count - 1)[: len(count)]
        oldest, covered, exists = self.oldest, self.covers(self.oldest), self.rows.count != 0
        before = Cat(i < at for i in range(self.bus))
        taken = oldest.offset[: self.word_bits] + (chunks << self.chunk)
        self._always(implies(begun, exists & ~flush & (chunks != 0) & (chunks <= oldest.chunks)), "begun")
        self._always(implies(begun, is_last == (chunks == oldest.chunks)), "last_chunk")
        self._always(implies(begun, fills == self.fills(at)), "fills")
        self._always(implies(begun, (self.given << self.word_bits) + at == taken), "taken")
        self._always(implies(begun, held.strobe == covered & before), "held")
        self._always(implies(~begun, chunks == 0), "chunks")
        self._always(implies(~begun & ~flush, (self.given == 0) & (held.strobe == 0)), "idle")
        last = (self.word == self.last_word(oldest)) & (held.strobe == covered)
        self._always(implies(flush, exists & last), "flush")


def store(cfg: Config, part: int | None = None) -> Harness:
    model = Model(cfg, part)
    model.writes_its_own()
    model.bursts_follow()
    model.queues_hold()
    model.packer_is_right()
    return model.h


STORE, DMA = "dae_pipeline/store.py", "dae_pipeline/dma.py"
MUTANTS = (
    Mutant(
        DMA,
        "row.offset + row.bytes > self.dma_size",
        "(row.offset + row.bytes) >> word_bits > self.dma_size >> word_bits",
        near="self.dma_base + (word << word_bits)",
    ),
    Mutant(DMA, "strobe.eq(Mux(self.halt, 0, self.beat.payload.strobe))", "strobe.eq(self.beat.payload.strobe)"),
    Mutant(
        STORE,
        "((1 << self.chunk_bytes) - 1) << first",
        "((1 << self.chunk_bytes) - 1) << place",
        near="first = Mux(inside, place, row.first)",
    ),
)
KEEPS = Mutant(STORE, "strobe[bus:], Mux(row_end, 0,", "strobe[bus:], Mux(0, 0,")
"""Only chunks of less than a word end within one."""
for name, cfg in CONFIGS.items():
    prove(
        f"STORE writes no byte outside its rows and the limits, Config {name}",
        *MUTANTS,
        *((KEEPS,) if name != "whole words" else ()),
        depth=1,
        script=CUT,
        cases=range(3),
        sample=(0,) if name == "small" else (),
    )(partial(store, cfg))
