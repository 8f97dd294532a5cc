"""Prove that an instruction that writes vin during a softmax never writes an entry that the softmax has still to read.

One property is about the issue stage: such an instruction writes entry by entry behind the finished rows, and waits for
these only. The other one is about the softmax engine: its reports of finished rows are right, and it divides rows in
that order.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.asserts import AnySeq
from amaranth.lib import data
from amaranth.lib.wiring import Out

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import VECTOR_LOOPS, ASource, BSource, Destination
from celosia.hw.spec.pipeline import FILL_TURN, OVERLAP_EQUAL_FIELDS
from celosia.hw.spec.scratchpads import scratchpads
from celosia.hw.vector_unit.issue import IssueStage
from celosia.hw.vector_unit.softmax.engine import SoftmaxEngine
from celosia.hw.vector_unit.softmax.sum_addresses import SumAddressGenerator
from celosia.hw.vector_unit.softmax_tracker import SoftmaxProgress
from proofs.declare import Mutant, prove
from proofs.handshakes import SMALL
from proofs.harness import Harness, implies

CONFIG = replace(SMALL, forward=True, softmax=1, int32=False)
MOST = scratchpads(CONFIG)["vin"].depth - 1
"""The last entry of vin."""
SIZE, PLACE = 6, 9
"""Bits of a number of rows or entries, and of a place behind as many entries, for comparisons of products."""
WIDE = 26
"""Number of bits in which no sum of two extents, a base and the written entries wraps."""


class Rows:
    """The rows of the softmax that was accepted last, whose fields are read when it starts.

    in_line: their entries are contiguous. owed: the engine has not come to them yet. front: the start of the first
    unfinished row; before the engine comes to these rows, one of the softmax before.
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
        """Return `front` after this cycle."""
        return self.front + Mux(over, self.entries, 0)


class Beside:
    """The issue stage, with facts about an instruction that runs during a softmax.

    engine: state of the softmax engine. rows: those of the last softmax. single: no other softmax runs. lie: single,
    and the rows' entries are contiguous and inside vin. busy: the loops run, of an instruction that is `beside` rows
    and writes vin, `place` next. output: it writes in this cycle.
    """

    def __init__(self) -> None:
        self.h, self.dut = Harness(), IssueStage(CONFIG)
        h, dut, self.inside = self.h, self.dut, self.h.add(self.dut)
        fields, loops = dut.instr.payload.fields, self.inside["loops"]
        self.engine = SimpleNamespace(
            start=dut.starts_softmax, busy=dut.softmax_under_way, halt=dut.halt,
            **{name: getattr(dut.softmax, name) for name in SoftmaxProgress().members},
        )  # fmt: skip
        self.rows = Rows(h, self.engine, fields)
        self.single = dut.softmax_under_way & ~self.inside["softmaxes.count"][1]
        self.lie = self.single & dut.softmax.walked & self.rows.in_line

        self.loops, self.busy = loops, self.inside["loops.busy"]
        self.to_vin = dut.now.to[Destination.VIN]
        self.beside = dut.softmax_under_way & self.busy & self.to_vin
        self.output = dut.fire & dut.step.last
        written, base = Signal(WIDE, name="written"), Signal(WIDE, name="dst_base")
        with h.m.If(loops.instr.ready):
            h.m.d.sync += [written.eq(0), base.eq(fields.dst_base)]
        with h.m.Elif(self.output):
            h.m.d.sync += written.eq(written + 1)
        self.place = base + written

        self.one_by_one = (fields.extent_n == 1) & (fields.extent_y == 1) & (fields.dst_x == 1)
        self.reads = (fields.a_source == ASource.VIN) | (fields.b_source == BSource.VIN)


def behind() -> Harness:
    """During a softmax, an entry of vin is written only if its row is finished.

    The engine is free, except for the facts that `rows_are_over` proves.
    """
    it = Beside()
    h, dut, rows, loops = it.h, it.dut, it.rows, it.loops
    surroundings(it)
    # The loops' addresses: such an instruction writes its entries in order, without gaps.
    comes = loops.instr.valid & loops.instr.ready & dut.softmax_under_way
    comes &= dut.instr.payload.fields.destination == Destination.VIN
    h.ensure(implies(comes, it.one_by_one), "entry_behind_entry")
    h.ensure(implies(comes, it.lie), "rows_one_behind_another")
    h.ensure(implies(comes, ~it.reads), "reads_nothing_of_vin")
    h.ensure(implies(it.beside & dut.fire, it.place < rows.front), "behind_the_rows_that_are_over")
    # The instruction beside softmax waits only for softmax's rows and for gemm.
    free = ~dut.softmax_under_way | (rows.after(dut.softmax.over) > it.place + it.output)
    waits_for_gemm = dut.claimed.any() | loops.instr.ready
    goes_on = h.register(it.busy & free & ~waits_for_gemm, "goes_on")
    h.ensure(implies(goes_on, it.inside["slots"].slot), "waits_for_nothing_else")
    registers(it)
    return h


def registers(it: Beside) -> None:
    """Invariants of registers that make the proof inductive."""
    h, dut, rows, inside, fields = it.h, it.dut, it.rows, it.inside, it.dut.instr.payload.fields
    names = "base", "consecutive", "in_front", "overwrites", "released", "gap"
    base, consecutive, in_front, overwrites, released, gap = (inside[f"softmaxes.war_hazard.{n}"] for n in names)
    follows, under_way = inside["softmaxes.war_hazard"].follows, dut.softmax_under_way
    h.ensure(under_way == inside["softmaxes.count"].any(), "under_way")
    h.ensure(inside["softmaxes.count"] <= 2, "two_softmaxes")
    h.ensure(implies(rows.owed, under_way), "owed")
    h.ensure(implies(under_way, rows.entries != 0), "entries")
    h.ensure(inside["under_way"] <= 2, "two")
    h.ensure(inside["retire.late"] + it.busy <= inside["under_way"], "late")
    h.ensure(implies(under_way, base == rows.base), "base")
    h.ensure(implies(under_way, consecutive == rows.in_line), "consecutive")
    counted = (rows.front - rows.base)[: len(released)]
    h.ensure(implies(under_way & ~rows.owed, released == counted), "released")
    offered = dut.instr.valid & it.one_by_one & ~it.reads & (fields.destination == Destination.VIN)
    offered &= (fields.dst_base <= rows.base) & (in_front == rows.base - fields.dst_base)
    h.ensure(implies(follows, offered), "follows")
    h.ensure(implies(follows & under_way, it.lie), "follows_rows")
    h.ensure(implies(it.beside, overwrites & it.lie & ~rows.owed), "overwrites")
    h.ensure(implies(it.beside, (it.place <= rows.front) & (gap == rows.front - it.place)), "gap")
    h.ensure(implies(it.beside & inside["slots"].slot, gap != 0), "slot")
    h.ensure(implies(it.busy & ~it.to_vin, ~overwrites), "overwrites_vin_alone")


def surroundings(it: Beside) -> None:
    """Instructions stay until taken and have sizes that fetch has checked; one that ends has no steps left."""
    h, dut, rows, inside = it.h, it.dut, it.rows, it.inside
    h.trusts(dut.instr, "instr")
    for name in VECTOR_LOOPS:
        h.assume(dut.instr.payload.fields[f"extent_{name}"] != 0)
    h.assume(implies(dut.ends, inside["under_way"] > inside["retire.late"] + it.busy))
    for fact in promises(h, it.engine, rows, it.single).values():
        h.assume(fact)


def promises(h: Harness, engine: Any, rows: Rows, single: Value) -> dict[str, Value]:
    """Return the facts about the engine that `rows_are_over` proves and `behind` assumes. single: one softmax runs."""
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
    """The engine keeps the promises that `behind` assumes; those about places are for rows with contiguous entries.

    Sizes are products: rows have up to 7 entries, and there are up to 31 rows; 16 entries of vin hold fewer.
    """
    h = Harness()
    dut = SoftmaxEngine(cfg)
    with patch("celosia.hw.vector_unit.softmax.engine.SumAddressGenerator", AnySums):
        inside = h.add(dut)
    fields = dut.fields
    h.assume(_small(fields.extent_n, fields.extent_x))
    taken, before = inside["fields"], h.register(fields, "fields_before")
    h.assume(implies(dut.start, ~dut.busy | (dut.room & (before == Value.cast(fields)))))  # as Issue starts them
    rows = Rows(h, dut, fields)
    under_way = Signal(2, name="under_way")
    h.m.d.sync += under_way.eq((under_way + dut.start - dut.finish) & (~dut.halt).replicate(2))
    single = under_way == 1
    find, divide = (Walked(h, inside, name, rows, dut) for name in ("find", "divide"))

    # The largest elements of the last softmax are found before its last quotient is written.
    h.assume(implies(dut.finish & single, inside["find"].idle))

    h.ensure(dut.busy == under_way.any(), "busy")
    for name, fact in promises(h, dut, rows, single).items():
        h.ensure(fact, name)
    reads = dut.vin.en & ~(inside["beat"] == FILL_TURN)
    place = (rows.front + divide.index)[: len(dut.vin.addr)]
    behind_front = (dut.vin.addr == place) & (divide.index < rows.entries)
    h.ensure(implies(dut.walked & single & rows.in_line & reads, behind_front), "reads_no_row_that_is_over")

    # Invariants for the induction: each one under way is owed, divided, or all in the stages behind that.
    steps = inside["steps"]
    last = [step.valid & step.payload.end for step in steps[1:]]
    for number, step in enumerate(steps):
        h.ensure(implies(step.payload.end, step.payload.whole), f"whole{number}")
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


class AnySums(SumAddressGenerator):
    """Report complete sums at any time, so that a row is divided within a few cycles."""

    def elaborate(self, platform: object) -> Module:
        m = Module()
        for name, member in self.signature.members.items():
            if member.flow is Out:
                m.d.comb += getattr(self, name).eq(AnySeq(len(getattr(self, name))))
        return m


class Walked:
    """The progress of a walk by row through its current softmax.

    came: it has come to a softmax, with `rows` rows from `base` on, of which `done` are finished. index: current entry.
    """

    def __init__(self, h: Harness, inside: Any, name: str, rows: Rows, dut: SoftmaxEngine) -> None:
        walk = inside[name]
        self.due, self.waits = inside.of(walk, "due"), inside.of(walk, "waits")
        self.came, self.owed = Signal(name=f"{name}_came"), walk.accepted | self.waits
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
        """Prove that the registers of the walk follow from its progress."""
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


TRACKER = "vector_unit/war_hazard.py"
BLOCKS = "Mux(self.loads, self.follows, overwrites & self.under_way & none)"
prove(
    "entries are written behind the rows of a softmax, and wait for nothing else",
    Mutant(TRACKER, BLOCKS, "Mux(self.loads, self.follows, 0)"),
    Mutant(TRACKER, BLOCKS, "Mux(self.loads, 0, overwrites & self.under_way & none)"),
    Mutant(TRACKER, BLOCKS, "Mux(self.loads, self.follows, overwrites & none)"),
    Mutant(TRACKER, "((gap == 1) & self.writes)", "0"),
    Mutant(TRACKER, "0, released + more)", "0, released + more + more)"),
    Mutant(TRACKER, "Mux(self.comes, 0, released + more)", "released + more"),
    Mutant(TRACKER, "self.waits & self.walked & consecutive", "self.waits & consecutive"),
    Mutant(TRACKER, "self.waits & self.walked & consecutive", "self.waits & self.walked"),
    Mutant(TRACKER, " & (fields.dst_base <= base)", ""),
    Mutant(TRACKER, "(fields.extent_n == 1) & (fields.extent_y == 1)", "(fields.extent_y == 1)"),
    depth=1,
    reach=14,
)(behind)

ADDRESSES, ENGINE = "vector_unit/softmax/addresses.py", "vector_unit/softmax/engine.py"
PAIRS = replace(CONFIG, taps=2, tap_depth=4, softmax=2)
for name, cfg, mutants in (
    ("by entry", CONFIG, ()),
    ("by pairs", PAIRS, (Mutant(ADDRESSES, "(follows & target[-1]) | within)", "(follows & target[-1]))"),)),
):
    prove(
        f"a softmax reads no row that it tells to be over, nor beyond the end of vin, {name}",
        Mutant(ADDRESSES, "(follows & target[-1])", "0"),
        *mutants,
        Mutant(ENGINE, "find.idle & ~find.wrapped", "~find.wrapped"),
        Mutant(ENGINE, "self.over.eq(divide.on & divide.last)", "self.over.eq(divide.on)"),
        Mutant(
            ENGINE,
            "self.comes.eq(divide.comes)",
            "self.comes.eq(find.comes)",
            near="find.idle & ~find.wrapped",
        ),
        depth=1,
        reach=16,
    )(partial(rows_are_over, cfg))
