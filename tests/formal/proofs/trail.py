"""What goes from acc to vin beside a softmax never comes to an entry that this has still to read.

Two claims. Of how instructions enter the vector unit: such an instruction writes behind the rows that are over, entry
by entry, and waits no longer than for these. Of the engine: what it tells of its rows is so, and it divides them in
that order.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from amaranth import Cat, Const, Module, Mux, Signal, Value
from amaranth.asserts import AnySeq
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.layout import claim_layout, unit_members
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import VECTOR_LOOPS, ASource, BSource, Destination, Opcode
from celosia.hw.spec.pipeline import FILL_TURN, OVERLAP_EQUAL_FIELDS
from celosia.hw.spec.scratchpads import scratchpads
from celosia.hw.vector_unit.issue import IssueStage
from celosia.hw.vector_unit.softmax.engine import SoftmaxEngine
from celosia.hw.vector_unit.softmax.sums import ExpAccumulator
from proofs.declare import Mutant, prove
from proofs.handshakes import SMALL
from proofs.harness import Harness, implies

CONFIG = replace(SMALL, forward=True, softmax=1, int32=False)
MOST = scratchpads(CONFIG)["vin"].depth - 1
"""The last entry of vin."""
SIZE, PLACE = 6, 9
"""Bits of a number of rows or of entries, and of a place behind as many, where products are compared."""
WIDE = 26
"""Bits in which no sum of rows wraps: two extents, a base and what a trail has written."""


class Entrance(wiring.Component):
    """Instructions on their way into a vector unit; ends: one with steps has ended, rows_finish: a softmax has."""

    def __init__(self, cfg: Config) -> None:
        self.issue = IssueStage(cfg, len(Destination))
        members = unit_members(cfg, Opcode.VECTOR)
        super().__init__(members | {"claims": In(claim_layout), "ends": In(1), "rows_finish": In(1)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        finish = Signal()
        self.issue.steps(m, self, finish, self.rows_finish)
        self.issue.advance(m, self, Const(0))
        m.d.comb += finish.eq(self.issue.tells(m, self.ends, self.halt))
        return m


class Rows:
    """Those of the softmax that was accepted last, which says where they are when it starts.

    in_line: their entries lie one behind another. owed: the engine has still to come to them. front: where the first
    row begins that is not over; before they come, one of the softmax in front of them.
    """

    def __init__(self, h: Harness, engine: Any, fields: Any) -> None:
        names = "a_base", "a_n", "a_x", "extent_n", "extent_x"
        self.fields = {name: Signal.like(fields[name], name=f"rows_{name}") for name in names}
        self.owed, self.front = Signal(name="owed"), Signal(WIDE, name="front")
        with h.m.If(engine.start):
            h.m.d.sync += [held.eq(fields[name]) for name, held in self.fields.items()]
        self.base, step, line, self.entries, self.count = self.fields.values()
        self.in_line = (step == 1) & (line == self.entries)
        h.m.d.sync += self.owed.eq((self.owed & ~engine.comes | engine.start) & ~engine.halt)
        with h.m.If(engine.comes):
            h.m.d.sync += self.front.eq(self.base)
        with h.m.Elif(engine.over):
            h.m.d.sync += self.front.eq(self.front + self.entries)

    def after(self, over: Value) -> Value:
        """`front` behind this cycle."""
        return self.front + Mux(over, self.entries, 0)


class Beside:
    """The entrance, and what is said of an instruction that goes beside a softmax.

    engine: what it tells. rows: of the last softmax; single: it is under way alone; lie: and its entries
    one behind another, all within vin. busy: loops run, of an
    instruction that is `beside` rows and writes vin, `place` next; output: it does now.
    """

    def __init__(self) -> None:
        self.h, self.dut = Harness(), Entrance(CONFIG)
        h, inside, self.issue = self.h, self.h.add(self.dut), self.dut.issue
        assert self.issue.trail is not None
        self.trail, issue, fields = self.issue.trail, self.issue, self.dut.instr.payload.fields
        self.engine = SimpleNamespace(
            start=issue.rows, busy=issue.alone, finish=self.dut.rows_finish, halt=self.dut.halt, room=issue.room,
            **{name: getattr(self.trail, name) for name in ("walked", "over", "entries", "comes")},
        )  # fmt: skip
        for name in ("room", "walked", "over", "entries", "comes"):
            told = getattr(self.engine, name)
            h.m.d.comb += told.eq(h.any(told.shape(), f"any_{name}"))
        self.rows = Rows(h, self.engine, fields)
        self.single = issue.alone & ~issue.rows_under_way[1]
        self.lie = self.single & self.trail.walked & self.rows.in_line

        loops, self.busy = issue.loops, inside.of(issue.loops, "busy")
        self.to_vin = issue.now.to[Destination.VIN]
        self.beside = issue.alone & self.busy & self.to_vin
        self.output = issue.takes & loops.step.payload.last
        written, base = Signal(WIDE, name="written"), Signal(WIDE, name="dst_base")
        with h.m.If(loops.instr.ready):
            h.m.d.sync += [written.eq(0), base.eq(fields.dst_base)]
        with h.m.Elif(self.output):
            h.m.d.sync += written.eq(written + 1)
        self.place = base + written

        self.one_by_one = (fields.extent_n == 1) & (fields.extent_y == 1) & (fields.dst_x == 1)
        self.reads = (fields.a_source == ASource.VIN) | (fields.b_source == BSource.VIN)


def behind() -> Harness:
    """An entry of vin is written beside a softmax only where a row is over. The engine is anything that tells what
    `rows_are_over` proves of it."""
    it = Beside()
    h, issue, rows, loops = it.h, it.issue, it.rows, it.issue.loops
    surroundings(it)
    # By the addresses of the loops, an instruction like this one writes entry behind entry.
    comes = loops.instr.valid & loops.instr.ready & issue.alone
    comes &= it.dut.instr.payload.fields.destination == Destination.VIN
    h.ensure(implies(comes, it.one_by_one), "entry_behind_entry")
    h.ensure(implies(comes, it.lie), "rows_one_behind_another")
    h.ensure(implies(comes, ~it.reads), "reads_nothing_of_vin")
    h.ensure(implies(it.beside & issue.takes, it.place < rows.front), "behind_the_rows_that_are_over")
    # It waits for them, and for gemm, alone.
    free = ~issue.alone | (rows.after(it.trail.over) > it.place + it.output)
    waits_for_gemm = it.dut.claims.read.any() | loops.instr.ready
    goes_on = h.register(it.busy & free & ~waits_for_gemm, "goes_on")
    h.ensure(implies(goes_on, issue.slot), "waits_for_nothing_else")
    counts(it)
    return h


def counts(it: Beside) -> None:
    """What makes it inductive: what the trail's registers are."""
    h, issue, rows, trail, fields = it.h, it.issue, it.rows, it.trail, it.dut.instr.payload.fields
    h.ensure(issue.alone == issue.rows_under_way.any(), "alone")
    h.ensure(issue.rows_under_way <= 2, "two_softmaxes")
    h.ensure(implies(rows.owed, issue.alone), "owed")
    h.ensure(implies(issue.alone, rows.entries != 0), "entries")
    h.ensure(issue.under_way <= 2, "two")
    h.ensure(issue.late + it.busy <= issue.under_way, "late")
    h.ensure(implies(issue.alone, trail._base == rows.base), "base")
    h.ensure(implies(issue.alone, trail._in_line == rows.in_line), "in_line")
    counted = (rows.front - rows.base)[: len(trail._free)]
    h.ensure(implies(issue.alone & ~rows.owed, trail._free == counted), "free")
    offered = it.dut.instr.valid & it.one_by_one & ~it.reads & (fields.destination == Destination.VIN)
    offered &= (fields.dst_base <= rows.base) & (trail._in_front == rows.base - fields.dst_base)
    h.ensure(implies(trail.follows, offered), "follows")
    h.ensure(implies(trail.follows & issue.alone, it.lie), "follows_rows")
    h.ensure(implies(it.beside, trail.trails & it.lie & ~rows.owed), "trails")
    h.ensure(implies(it.beside, (it.place <= rows.front) & (trail._gap == rows.front - it.place)), "gap")
    h.ensure(implies(it.beside & issue.slot, trail._gap != 0), "slot")
    h.ensure(implies(it.busy & ~it.to_vin, ~trail.trails), "trails_to_vin_alone")


def surroundings(it: Beside) -> None:
    """Instructions stay until taken and have the sizes that fetch has checked; one that ends has no steps left."""
    h, issue, rows = it.h, it.issue, it.rows
    h.trusts(it.dut.instr, "instr")
    for name in VECTOR_LOOPS:
        h.assume(it.dut.instr.payload.fields[f"extent_{name}"] != 0)
    h.assume(implies(it.dut.ends, issue.under_way > issue.late + it.busy))
    for fact in promises(h, it.engine, rows, it.single).values():
        h.assume(fact)


def promises(h: Harness, engine: Any, rows: Rows, single: Value) -> dict[str, Value]:
    """Of the engine, which is proved by `rows_are_over`, and used by `behind`. single: one softmax is under way."""
    stays = h.register(engine.walked & engine.busy & ~engine.start & ~engine.halt, "stays_walked")
    within = (rows.base <= rows.front) & (rows.after(engine.over) <= MOST + 1)
    return {
        "room": implies(engine.room, single & ~rows.owed),
        "finish": implies(engine.finish, engine.busy & ~engine.start & ~(single & rows.owed)),
        "entries": implies(engine.busy, engine.entries == rows.entries),
        "comes": implies(engine.comes, rows.owed),
        "walked_when_they_have_come": implies(engine.walked & single, ~rows.owed),
        "stays_walked": implies(stays, engine.walked),
        "rows_within_vin": implies(engine.walked & single & rows.in_line, within),
    }


def _small(entries: Value, rows: Value) -> Value:
    return (entries != 0) & (entries < 8) & (rows != 0) & (rows < 32)


def _alike(fields: Any) -> Value:
    return Cat(fields[name] for name in OVERLAP_EQUAL_FIELDS)


def rows_are_over(cfg: Config) -> Harness:
    """What `behind` assumes of the engine, of rows whose entries lie one behind another where it is about places.

    Sizes are products: rows have up to 7 entries, and there are up to 31; 16 entries of vin hold fewer.
    """
    h = Harness()
    dut = SoftmaxEngine(cfg)
    with patch("celosia.hw.vector_unit.softmax.engine.ExpAccumulator", AnySums):
        inside = h.add(dut)
    fields = dut.fields
    h.assume(_small(fields.extent_n, fields.extent_x))
    taken, before = inside["_taken"], h.register(fields, "fields_before")
    h.assume(implies(dut.start, ~dut.busy | (dut.room & (before == Value.cast(fields)))))  # as Issue starts them
    rows = Rows(h, dut, fields)
    under_way = Signal(2, name="under_way")
    h.m.d.sync += under_way.eq((under_way + dut.start - dut.finish) & (~dut.halt).replicate(2))
    single = under_way == 1
    find, divide = (Walked(h, inside, name, rows, dut) for name in ("find", "divide"))

    # Of the last one the largest elements have been found before its last quotient is written.
    h.assume(implies(dut.finish & single, inside["find"].through))

    h.ensure(dut.busy == under_way.any(), "busy")
    for name, fact in promises(h, dut, rows, single).items():
        h.ensure(fact, name)
    reads = dut.vin.en & ~(inside["beat"] == FILL_TURN)
    place = (rows.front + divide.index)[: len(dut.vin.addr)]
    behind_front = (dut.vin.addr == place) & (divide.index < rows.entries)
    h.ensure(implies(dut.walked & single & rows.in_line & reads, behind_front), "reads_no_row_that_is_over")

    # What makes it inductive: each one under way is owed, divided, or all in the stages behind that.
    marks, divides = inside["marks"], inside["divides"]
    last = [valid & step.end for step, valid in list(zip(marks, divides))[1:]]
    for number, step in enumerate(marks):
        h.ensure(implies(step.end, step.whole), f"whole{number}")
    h.ensure(under_way == rows.owed + divide.due + sum(last, dut.finish), "under_way")
    h.ensure(under_way <= 2, "two")
    h.ensure(inside["second"] == under_way[1], "second")
    h.ensure(rows.owed == divide.owed, "owed")
    h.ensure(implies(dut.busy, _small(rows.entries, rows.count)), "small")
    held, was_offered = _alike(taken), _alike(data.View(fields.shape(), before))
    was_held = h.register(held, "was_held")
    h.ensure(implies(dut.busy, inside["alike"] == (was_held == was_offered)), "alike")
    h.ensure(implies(dut.busy & ~rows.owed, held == was_held), "held")
    for name in OVERLAP_EQUAL_FIELDS[:3]:
        h.ensure(implies(dut.busy, taken[name] == rows.fields[name]), f"taken_{name}")
    for name, walk in (("find", find), ("divide", divide)):
        own = (taken.a_base == rows.base) & (taken.extent_x == rows.count)
        h.ensure(implies(walk.owed, own & dut.busy), f"{name}_owed")
        h.ensure(implies(walk.due, dut.busy), f"{name}_due")
        last_one = walk.came & (walk.base == rows.base) & (walk.rows == rows.count)
        h.ensure(implies(dut.busy & ~walk.owed, last_one), f"{name}_came_to_the_last_one")
    h.ensure(implies(dut.busy & (divide.due | ~divide.owed), rows.front == divide.line), "front")
    return h


class AnySums(ExpAccumulator):
    """Tells that sums are complete when it likes: so a row is divided within a few cycles."""

    def elaborate(self, platform: object) -> Module:
        m = Module()
        for name, member in self.signature.members.items():
            if member.flow is Out:
                m.d.comb += getattr(self, name).eq(AnySeq(len(getattr(self, name))))
        return m


class Walked:
    """What a walk by row has done of the softmax that it has come to.

    came: to one, of `rows` rows from `base` on, of which it has `done` so many; index: of the entry at which it is.
    """

    def __init__(self, h: Harness, inside: Any, name: str, rows: Rows, dut: SoftmaxEngine) -> None:
        walk = inside[name]
        self.due, self.waits = inside.of(walk, "due"), inside.of(walk, "waits")
        self.came, self.owed = Signal(name=f"{name}_came"), walk.took | self.waits
        self.base, self.rows = Signal.like(rows.base, name=f"{name}_base"), Signal(SIZE, name=f"{name}_rows")
        self.done, self.index = Signal(SIZE, name=f"{name}_done"), Signal(SIZE, name=f"{name}_index")
        with h.m.If(walk.comes):
            h.m.d.sync += [
                self.came.eq(1), self.base.eq(rows.base), self.rows.eq(rows.count), self.done.eq(0), self.index.eq(0),
            ]  # fmt: skip
        with h.m.Elif(walk.on & walk.last):
            h.m.d.sync += [self.done.eq(self.done + 1), self.index.eq(0)]
        with h.m.Elif(walk.on):
            h.m.d.sync += self.index.eq(self.index + inside.of(walk, "_span"))
        with h.m.If(dut.halt):
            h.m.d.sync += self.came.eq(0)
        self.line, self.end = (Signal(PLACE, name=f"{name}_{end}") for end in ("line", "end"))
        entries = rows.entries[:SIZE]
        h.m.d.comb += [self.line.eq(self.base + self.done * entries), self.end.eq(self.base + self.rows * entries)]
        self._inductive(h, inside, walk, name, rows)

    def _inductive(self, h: Harness, inside: Any, walk: Any, name: str, rows: Rows) -> None:
        """What the registers of the walk are, of what it has done."""
        of, bits, span = (lambda register: inside.of(walk, register)), len(walk.addr), inside.of(walk, "_span")
        left, others = of("left"), of("others")
        row, tiles = walk.row[: of("_in_tile")], others[of("_in_tile") :]
        facts = {
            "came": self.came,
            "within": (self.index < rows.entries) & (self.done < self.rows),
            "left": left == (rows.entries - self.index + span - 1) // span,
            "steps": self.index % span == 0,
            "first": walk.first == (self.index == 0),
            "last": walk.last == (left == 1),
            "rows": others + self.done + 1 == self.rows + row,
            "more": walk.more == tiles.any(),
        }
        in_line = {
            "line": of("line") == self.line[:bits],
            "addr": walk.addr == (self.line + self.index)[:bits],
            "wrapped": walk.wrapped == (self.line + self.index > MOST),
        }
        for fact, holds in facts.items():
            h.ensure(implies(self.due, holds), f"{name}_{fact}")
        for fact, holds in in_line.items():
            h.ensure(implies(self.due & rows.in_line, holds), f"{name}_{fact}")
        h.ensure(implies(~self.due, row == 0), f"{name}_no_row")
        h.ensure(implies(self.came, (self.rows != 0) & (self.rows < 32)), f"{name}_small")
        through = self.came & ~self.due & ~self.owed
        h.ensure(implies(through, (self.done == self.rows) & (self.index == 0)), f"{name}_through")
        h.ensure(implies(through & rows.in_line, walk.wrapped == (self.end > MOST + 1)), f"{name}_wrapped_at_last")
        h.ensure(implies(walk.active, self.due), f"{name}_active")
        h.ensure(implies(self.waits, self.due), f"{name}_waits")


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

WALK, ENGINE = "vector_unit/softmax/walk.py", "vector_unit/softmax/engine.py"
PAIRS = replace(CONFIG, taps=2, tap_depth=4, softmax=2)
for name, cfg, mutants in (
    ("by entry", CONFIG, ()),
    ("by pairs", PAIRS, (Mutant(WALK, "(follows & target[-1]) | within)", "(follows & target[-1]))"),)),
):
    prove(
        f"a softmax reads no row that it tells to be over, nor beyond the end of vin, {name}",
        Mutant(WALK, "(follows & target[-1])", "0"),
        *mutants,
        Mutant(ENGINE, "find.through & ~find.wrapped", "~find.wrapped"),
        Mutant(ENGINE, "self.over.eq(divide.on & divide.last)", "self.over.eq(divide.on)"),
        Mutant(
            ENGINE,
            "self.comes.eq(divide.comes)",
            "self.comes.eq(find.comes)",
            near="find.begin.eq(begin | ~(found | finds))",
        ),
        depth=1,
        reach=16,
    )(partial(rows_are_over, cfg))
