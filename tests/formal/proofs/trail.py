"""What goes from acc to vin beside a softmax never comes to an entry that this has still to read.

Two claims. Of how instructions enter the vector unit: such an instruction writes behind the rows that are over, entry by
entry, and waits no longer than for these. Of the engine: what it tells of its rows is so, and it reads nothing in front
of the row that it divides.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from amaranth import Module, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In

from celosia.hw.config import Config
from celosia.hw.isa import ASource, BSource, Destination, Opcode
from celosia.hw.layout import claim_layout, unit_members
from celosia.hw.scratchpads import scratchpads
from celosia.hw.vector_unit.issue import Issue
from proofs.declare import Mutant, prove
from proofs.handshakes import SMALL
from proofs.harness import Harness, implies

CONFIG = replace(SMALL, forward=True, softmax=1, int32=False)
WIDE = 26
"""Bits in which no sum of rows wraps: two extents, a base and what a trail has written."""


class Entrance(wiring.Component):
    """Instructions on their way into a vector unit; ends: one with steps has ended, rows_finish: a softmax has."""

    def __init__(self, cfg: Config) -> None:
        self.issue = Issue(cfg, len(Destination))
        members = unit_members(cfg, Opcode.VECTOR)
        super().__init__(members | {"claims": In(claim_layout), "ends": In(1), "rows_finish": In(1)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        finish = Signal()
        self.issue.steps(m, self, finish, self.rows_finish)
        self.issue.advance(m, self, self.rows_finish)
        m.d.comb += finish.eq(self.issue.tells(m, self.ends, self.halt))
        return m


class Rows:
    """Those of the softmax that was accepted last, which says where they are when it `starts`.

    in_line: their entries lie one behind another. owed: the engine has still to come to them. front: where the first
    row begins that is not over; before they come, one of the softmax in front of them.
    """

    def __init__(self, h: Harness, starts: Value, fields: Any, comes: Value, over: Value, halt: Value) -> None:
        self.base, self.entries = Signal.like(fields.a_base, name="base"), Signal.like(fields.extent_n, name="entries")
        self.in_line, self.owed, self.front = Signal(), Signal(), Signal(WIDE, name="front")
        with h.m.If(starts):
            h.m.d.sync += [
                self.base.eq(fields.a_base), self.entries.eq(fields.extent_n),
                self.in_line.eq((fields.a_n == 1) & (fields.a_x == fields.extent_n)),
            ]  # fmt: skip
        h.m.d.sync += self.owed.eq((self.owed & ~comes | starts) & ~halt)
        with h.m.If(comes):
            h.m.d.sync += self.front.eq(self.base)
        with h.m.Elif(over):
            h.m.d.sync += self.front.eq(self.front + self.entries)


def behind() -> Harness:
    """An entry of vin is written beside a softmax only where a row is over. The engine is anything that tells what
    `rows_are_over` proves of it."""
    h = Harness()
    dut = Entrance(CONFIG)
    inside, issue, trail = h.add(dut), dut.issue, dut.issue.trail
    assert trail is not None
    told = {name: h.any(getattr(trail, name).shape(), name) for name in ("walked", "over", "entries", "comes")}
    room = h.any(1, "room")
    h.m.d.comb += [issue.room.eq(room), *(getattr(trail, name).eq(value) for name, value in told.items())]
    fields, loops, step, now = dut.instr.payload.fields, issue.loops, issue.loops.step, issue.now
    busy, accept = inside.of(loops, "busy"), loops.instr.valid & loops.instr.ready
    rows = Rows(h, issue.rows, fields, told["comes"], told["over"], dut.halt)
    single = issue.alone & ~issue.rows_under_way[1]
    after = Signal(WIDE + 1, name="front_after")
    h.m.d.comb += after.eq(rows.front + (rows.entries & told["over"].replicate(len(rows.entries))))

    # Surroundings: instructions stay until taken, unless there is a halt, and have what fetch has checked.
    h.trusts(dut.instr, "instr")
    for name in ("n", "y", "x", "r", "s"):
        h.assume(fields[f"extent_{name}"] != 0)
    # One that ends has no steps left; so far as many are late.
    h.assume(implies(dut.ends, issue.under_way > issue.late + busy))
    engine_tells(h, told, rows, after, single, issue, dut)

    to_vin = now.to[Destination.VIN]
    written, base = Signal(WIDE, name="written"), Signal(WIDE, name="dst_base")
    output = issue.takes & step.payload.last
    with h.m.If(loops.instr.ready):
        h.m.d.sync += [written.eq(0), base.eq(fields.dst_base)]
    with h.m.Elif(output):
        h.m.d.sync += written.eq(written + 1)
    place = base + written
    beside = issue.alone & busy & to_vin

    # What is claimed. By the addresses of the loops, an instruction like this one writes entry behind entry.
    comes_beside = accept & issue.alone & (fields.destination == Destination.VIN)
    one_by_one = (fields.extent_n == 1) & (fields.extent_y == 1) & (fields.dst_x == 1)
    h.ensure(implies(comes_beside, one_by_one), "entry_behind_entry")
    h.ensure(implies(comes_beside, single & told["walked"] & rows.in_line), "rows_one_behind_another")
    reads = (fields.a_source == ASource.VIN) | (fields.b_source == BSource.VIN)
    h.ensure(implies(comes_beside, ~reads), "reads_nothing_of_vin")
    h.ensure(implies(beside & issue.takes, place < rows.front), "behind_the_rows_that_are_over")
    # It waits for them, and for gemm, alone.
    free = ~issue.alone | (after > place + output)
    waits_for_gemm = dut.claims.read.any() | loops.instr.ready
    h.ensure(implies(h.register(busy & free & ~waits_for_gemm, "goes_on"), issue.slot), "waits_for_nothing_else")

    # What makes it inductive.
    h.ensure(issue.alone == issue.rows_under_way.any(), "alone")
    h.ensure(issue.rows_under_way <= 2, "two_softmaxes")
    h.ensure(implies(rows.owed, issue.alone), "owed")
    h.ensure(implies(issue.alone, rows.entries != 0), "entries")
    h.ensure(issue.under_way <= 2, "two")
    h.ensure(issue.late + busy <= issue.under_way, "late")
    h.ensure(implies(issue.alone, trail._base == rows.base), "base")
    h.ensure(implies(issue.alone, trail._in_line == rows.in_line), "in_line")
    bits = len(trail._free)
    counted = (rows.front - rows.base)[:bits]
    h.ensure(implies(issue.alone & ~rows.owed, trail._free == counted), "free")
    offered = dut.instr.valid & one_by_one & ~reads & (fields.destination == Destination.VIN)
    offered &= (fields.dst_base <= rows.base) & (trail._in_front == rows.base - fields.dst_base)
    h.ensure(implies(trail.follows, offered), "follows")
    h.ensure(implies(trail.follows & issue.alone, single & told["walked"] & rows.in_line), "follows_rows")
    h.ensure(implies(beside, trail.trails & single & told["walked"] & rows.in_line & ~rows.owed), "trails")
    h.ensure(implies(beside, (place <= rows.front) & (trail._gap == rows.front - place)), "gap")
    h.ensure(implies(beside & issue.slot, trail._gap != 0), "slot")
    h.ensure(implies(busy & ~to_vin, ~trail.trails), "trails_to_vin_alone")
    return h


def engine_tells(h: Harness, told: Any, rows: Rows, after: Value, single: Value, issue: Issue, dut: Entrance) -> None:
    """What is assumed of the engine."""
    starts, depth = issue.rows, scratchpads(CONFIG)["vin"].depth
    h.assume(implies(issue.room, single & ~rows.owed))
    h.assume(implies(dut.rows_finish, issue.alone & ~starts & ~(single & rows.owed)))
    h.assume(implies(issue.alone, told["entries"] == rows.entries))
    h.assume(implies(told["comes"], rows.owed))
    h.assume(implies(told["walked"] & single, ~rows.owed))
    h.assume(implies(told["walked"] & single & rows.in_line, (rows.base <= rows.front) & (after <= depth)))
    stays = h.register(told["walked"] & issue.alone & ~starts & ~dut.halt, "stays_walked")
    h.assume(implies(stays, told["walked"]))


TRAIL = "vector_unit/trail.py"
WAITS = "Mux(next_one, self.follows, self.trails & alone & none)"
prove(
    "entries are written behind the rows of a softmax, and wait for nothing else",
    Mutant(TRAIL, WAITS, "Mux(next_one, self.follows, 0)"),
    Mutant(TRAIL, WAITS, "Mux(next_one, 0, self.trails & alone & none)"),
    Mutant(TRAIL, WAITS, "Mux(next_one, self.follows, self.trails & none)"),
    Mutant(TRAIL, "((self._gap == 1) & output)", "0"),
    Mutant(TRAIL, "self._free + more)", "self._free + more + more)"),
    Mutant(TRAIL, "Mux(self.comes, 0, self._free + more)", "self._free + more"),
    Mutant(TRAIL, "single & self.walked & self._in_line", "single & self._in_line"),
    Mutant(TRAIL, "single & self.walked & self._in_line", "single & self.walked"),
    Mutant(TRAIL, " & (f.dst_base <= base)", ""),
    Mutant(TRAIL, "(f.extent_n == 1) & (f.extent_y == 1)", "(f.extent_y == 1)"),
    depth=1,
    reach=14,
)(behind)
