"""Prove that any one byte of any one row arrives at its place, between beats of the bus and chunks of scratchpads.

Rows have four kinds in turn, each with its place, its length and, if chunks differ, their size. The byte has its value
only in rows of one kind, so the proof notices a byte of another row in its place.
"""

from __future__ import annotations

from functools import partial

from amaranth import Cat, Mux, Signal, Value

from celosia.hw.dae_pipeline.aligner import Aligner, chunk_position, chunk_stop
from celosia.hw.dae_pipeline.store import BeatPacker
from proofs.declare import Mutant, prove
from proofs.harness import Harness, implies

KINDS, LENGTH_BITS = 4, 4


class Rows:
    """Facts about rows by kind, and about the byte. position: from the beginning of its row's first bus word."""

    def __init__(self, h: Harness, bus_bytes: int, shift: int | None) -> None:
        self._h, self._bus, self.word_bits = h, bus_bytes, bus_bytes.bit_length() - 1
        self._first, self._chunks = self._constants(bus_bytes, "first"), self._constants(1 << LENGTH_BITS, "chunks")
        self._shift = self._constants(self.word_bits + 1, "shift")
        for chunks, size in zip(self._chunks, self._shift):
            h.assume(chunks != 0)
            h.assume(size == shift if shift is not None else size <= self.word_bits)
        self.kind, self.value = h.constant(range(KINDS), "kind"), h.constant(8, "value")
        self.position = h.constant(range(bus_bytes << LENGTH_BITS + 1), "position")

    def _constants(self, end: int, name: str) -> list[Signal]:
        return [self._h.constant(range(end), f"{name}{i}") for i in range(KINDS)]

    def first(self, kind: Value) -> Value:
        """Return the position of a row's first byte."""
        return Cat(self._first).word_select(kind, len(self._first[0]))

    def chunks(self, kind: Value) -> Value:
        return Cat(self._chunks).word_select(kind, len(self._chunks[0]))

    def shift(self, kind: Value) -> Value:
        """Return log2 of the bytes of a chunk."""
        return Cat(self._shift).word_select(kind, len(self._shift[0]))

    def end(self, kind: Value) -> Value:
        """Return the position of a row's last byte."""
        return (self.first(kind) + (self.chunks(kind) << self.shift(kind)) - 1)[: len(self.position)]

    def last_word(self, kind: Value) -> Value:
        return self.end(kind) >> self.word_bits

    def in_word(self, kind: Value, number: Value, data: Value, below: Value | int) -> Value:
        """Return whether the byte has its value in a word of a row, if it is among the word's first `below` bytes."""
        place = self.position[: self.word_bits]
        here = (kind == self.kind) & (number == self.position >> self.word_bits) & (place < below)
        return implies(here, data.word_select(place, 8) == self.value)

    def in_chunk(self, kind: Value, at: Value, data: Value) -> Value:
        """Return whether the byte has its value in the chunk that begins at position `at`, if it is in it."""
        place = (self.position - at)[: self.word_bits]
        here = (kind == self.kind) & (self.position >= at) & (self.position < at + (1 << self.shift(kind)))
        return implies(here, data.word_select(place, 8) == self.value)


class Walk:
    """The position of a stream: `kind` of its row and `at` in it, in the stream's own steps."""

    def __init__(self, h: Harness, name: str, bits: int) -> None:
        self._h = h
        self.kind, self.at = Signal(range(KINDS), name=f"{name}_kind"), Signal(bits, name=f"{name}_at")

    def moves(self, steps: Value, last: Value, following: Value) -> None:
        with self._h.m.If(steps):
            self._h.m.d.sync += [self.at.eq(Mux(last, 0, following)), self.kind.eq(self.kind + last)]


def aligner(bus_bytes: int) -> Harness:
    """Each byte of a beat is in its chunk; beats are without errors."""
    h = Harness()
    dut = Aligner(bus_bytes)
    inside = h.add(dut)
    rows = Rows(h, bus_bytes, None)
    beats, chunks = Walk(h, "beat", LENGTH_BITS + 1), Walk(h, "chunk", LENGTH_BITS + 4)
    h.trusts(dut.row, "row")
    h.trusts(dut.beat, "beat")
    row, beat = dut.row.payload, dut.beat.payload

    def facts(first: Value) -> Value:
        return chunk_position(bus_bytes, first, chunk_stop(bus_bytes, first, row.shift), row.last)

    # Inputs.
    kind, end = chunks.kind, rows.end(chunks.kind)
    offered = (row.shift == rows.shift(kind)) & (row.last == end[: rows.word_bits])
    h.assume(offered & (Value.cast(row.chunk) == facts(rows.first(kind))))
    h.assume((beat.error == 0) & (beat.last == (beats.at == rows.last_word(beats.kind))))
    h.assume(implies(dut.beat.valid, rows.in_word(beats.kind, beats.at, beat.data, bus_bytes)))

    # Outputs: `at` counts chunks' bytes from the row's first one.
    takes, enters = dut.chunk.valid & dut.chunk.ready, dut.beat.valid & dut.beat.ready
    position = Signal(LENGTH_BITS + 5, name="unit_position")
    h.m.d.comb += position.eq(rows.first(kind) + chunks.at)
    after = chunks.at + (1 << row.shift)
    ends = after == rows.chunks(kind) << row.shift
    held_kind, held_number = Signal(range(KINDS), name="held_kind"), Signal.like(beats.at, name="held_number")
    with h.m.If(enters):
        h.m.d.sync += [held_kind.eq(beats.kind), held_number.eq(beats.at)]
    chunks.moves(takes, ends, after)
    beats.moves(enters, beat.last, beats.at + 1)
    h.ensure(implies(dut.chunk.valid, rows.in_chunk(kind, position, dut.chunk.payload.data)), "byte_in_its_chunk")
    h.ensure(implies(takes, dut.row.ready == ends), "row_ends_with_its_last_unit")

    # Invariants that make the proof inductive.
    holds, held = inside["holds"], inside["held"]
    following = Value.cast(inside["following"]) == facts(position[: rows.word_bits])
    h.ensure(inside["inside"] == (chunks.at != 0), "inside")
    h.ensure(implies(chunks.at != 0, following & dut.row.valid), "following")
    within = (chunks.at < rows.chunks(kind) << rows.shift(kind)) & (chunks.at & ((1 << rows.shift(kind)) - 1) == 0)
    h.ensure(within, "within")
    h.ensure(beats.at <= rows.last_word(beats.kind), "beats_within")
    oldest_kind, oldest = Mux(holds, held_kind, beats.kind), Mux(holds, held_number, beats.at)
    h.ensure((oldest_kind == kind) & (oldest == position >> rows.word_bits), "oldest_beat")
    h.ensure(implies(holds, held.last == (held_number == rows.last_word(held_kind))), "held_last")
    follows = Mux(held.last, (beats.kind == (held_kind + 1)[:2]) & (beats.at == 0), beats.at == held_number + 1)
    h.ensure(implies(holds, follows & (held.last | (beats.kind == held_kind))), "beats_follow")
    h.ensure(implies(holds, rows.in_word(held_kind, held_number, held.data, bus_bytes) & (held.error == 0)), "held")
    return h


def packer(bus_bytes: int, chunk_bytes: int) -> Harness:
    """Each byte of a chunk is in its beat, and enabled there."""
    h = Harness()
    dut = BeatPacker(bus_bytes, chunk_bytes, LENGTH_BITS)
    inside = h.add(dut)
    rows = Rows(h, bus_bytes, chunk_bytes.bit_length() - 1)
    beats, chunks = Walk(h, "beat", LENGTH_BITS + 1), Walk(h, "chunk", LENGTH_BITS)
    h.trusts(dut.row, "row")
    h.trusts(dut.chunk, "chunk")
    row, beat, kind = dut.row.payload, dut.beat.payload, chunks.kind
    count = rows.chunks(kind)
    h.assume((row.first == rows.first(kind)) & (row.chunks == count - 1) & (row.single == (count == 1)))
    h.assume(row.fills == (rows.first(kind) + chunk_bytes >= bus_bytes))
    position = Signal(LENGTH_BITS + 5, name="unit_position")
    h.m.d.comb += position.eq(rows.first(kind) + chunks.at * chunk_bytes)
    h.assume(implies(dut.chunk.valid, rows.in_chunk(kind, position, dut.chunk.payload)))

    takes, sends = dut.chunk.valid & dut.chunk.ready, dut.beat.valid & dut.beat.ready
    ends = chunks.at == count - 1
    chunks.moves(takes, ends, chunks.at + 1)
    beats.moves(sends, beats.at == rows.last_word(beats.kind), beats.at + 1)
    end = rows.end(beats.kind)
    place = rows.position[: rows.word_bits]
    mine = (beats.kind == rows.kind) & (beats.at == rows.position >> rows.word_bits)
    of_row = mine & (rows.position >= rows.first(beats.kind)) & (rows.position <= end)
    right = (beat.data.word_select(place, 8) == rows.value) & beat.strobe.bit_select(place, 1)
    h.ensure(implies(dut.beat.valid & of_row, right), "byte_in_its_beat")
    h.ensure(implies(takes, dut.row.ready == ends), "row_ends_with_its_last_unit")

    # Invariants that make the proof inductive.
    flush, held = inside["flush"], inside["held"]
    low = Mux(flush, (end + 1)[: rows.word_bits], Mux(chunks.at == 0, 0, position[: rows.word_bits]))
    h.ensure(inside["inside"] == (chunks.at != 0), "inside")
    h.ensure(chunks.at < count, "within")
    h.ensure(inside["count"] == chunks.at + 1, "count")
    h.ensure(implies(chunks.at != 0, inside["place"] == position[: rows.word_bits]), "place")
    fills = position[: rows.word_bits] + chunk_bytes >= bus_bytes
    h.ensure(implies(chunks.at != 0, inside["next_fills"] == fills), "fills")
    h.ensure(implies(chunks.at != 0, inside["last"] == ends), "last")
    h.ensure(implies(chunks.at != 0, dut.row.valid), "row_stays")
    h.ensure(implies(flush, (chunks.at == 0) & (beats.kind == (kind - 1)[:2])), "flush")
    h.ensure(implies(flush, (beats.at == rows.last_word(beats.kind)) & (low != 0)), "flush_is_the_last")
    word = Mux(chunks.at == 0, 0, position >> rows.word_bits)
    h.ensure(implies(~flush, (beats.kind == kind) & (beats.at == word)), "beat")
    began = Mux(beats.at == 0, rows.first(beats.kind), 0)
    for i in range(bus_bytes):
        taken = (i >= began) & (i < low)
        h.ensure(held.strobe[i] == taken, f"strobe{i}")
        h.ensure(implies(i >= low, held.data.word_select(i, 8) == 0), f"rest{i}")
    here = mine & (place >= began) & (place < low)
    h.ensure(implies(here, held.data.word_select(place, 8) == rows.value), "held")
    return h


LOAD, STORE = "dae_pipeline/aligner.py", "dae_pipeline/store.py"
prove(
    "a byte of a beat goes to its chunk",
    Mutant(
        LOAD, "Cat(held.data, beat.data) >> (present.first << 3)", "Cat(held.data, held.data) >> (present.first << 3)"
    ),
    Mutant(LOAD, "holds.eq(self.beat.valid & ~(take & row_end & crosses))", "holds.eq(self.beat.valid)"),
    Mutant(LOAD, "(stop - 1)[:word_bits] == last", "stop[:word_bits] == last"),
    depth=1,
)(partial(aligner, 8))
for chunk_bytes in (4, 8):
    prove(
        f"a byte of a chunk of {chunk_bytes} bytes goes to its beat",
        Mutant(STORE, "Mux(fills, bytes_[8 * bus :], ", "Mux(fills, 0, "),
        Mutant(STORE, "flush.eq(row_end & crosses)", "flush.eq(row_end & fills)"),
        depth=1,
        tested=chunk_bytes == 8,
    )(partial(packer, 8, chunk_bytes))
