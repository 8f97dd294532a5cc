"""Prove that each queue equals a list: it loses, duplicates, changes and reorders nothing."""

from __future__ import annotations

from functools import partial

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.hdl import ShapeLike

from celosia.hw.dae_pipeline.fifo import RegisteredFifo, StreamFifo
from celosia.hw.spec.config import Config
from celosia.hw.spec.pipeline import WRITEBACK_DEPTH
from celosia.hw.vector_unit.delay_queue import DelayQueue
from celosia.hw.vector_unit.writeback import WritebackQueue
from proofs.declare import Mutant, prove
from proofs.harness import Harness, implies

WIDTH = 3
"""Bits of a payload. Control logic does not read it, so its width does not matter."""


class Tracked:
    """Follow any one element from its entry until it leaves. What holds for any element holds for all.

    count: number of elements inside. ahead: number of elements that leave before the followed one. After it has left,
    another one may be followed.
    """

    def __init__(self, h: Harness, push: Value, pop: Value, value: Value, depth: int) -> None:
        m: Module = h.m
        self.count, self.ahead = Signal(range(depth + 2), name="count"), Signal(range(depth + 2), name="ahead")
        self.inside, self.value = Signal(name="tracks"), Signal(len(value), name="tracked")
        m.d.sync += self.count.eq(self.count + push - pop)
        with m.If(~self.inside & push & h.any(1, "choose")):
            m.d.sync += [self.inside.eq(1), self.value.eq(value), self.ahead.eq(self.count - pop)]
        with m.Elif(self.inside & pop):
            m.d.sync += [self.inside.eq(self.ahead != 0), self.ahead.eq(self.ahead - 1)]
        h.ensure(self.count <= depth, "never_too_many")
        h.ensure(implies(self.inside, self.ahead < self.count), "tracked_is_inside")


class List:
    """The expected content of a queue: `items`, the oldest first, of which `count` are valid."""

    def __init__(self, m: Module, name: str, shape: ShapeLike, depth: int) -> None:
        self._m, self._depth = m, depth
        self.count = Signal(range(depth + 2), name=f"{name}_count")
        self.items = [Signal(shape, name=f"{name}{i}") for i in range(depth)]

    def moves(self, push: Value, value: Value, pop: Value) -> None:
        self._m.d.sync += self.count.eq(self.count + push - pop)
        for i, (item, following) in enumerate(zip(self.items, [*self.items[1:], self.items[-1]])):
            with self._m.If(push & (self.count - pop == i)):
                self._m.d.sync += item.eq(value)
            with self._m.Elif(pop):
                self._m.d.sync += item.eq(following)


def place(start: Value, steps: Value, depth: int) -> Value:
    """Return the entry of a ring that is `steps`, at most `depth`, behind `start`."""
    return Mux(start + steps >= depth, start + steps - depth, start + steps)


def queue(h: Harness, dut: StreamFifo | RegisteredFifo, depth: int) -> Tracked:
    """Prove the contract of any queue."""
    h.streams(dut)
    push, pop = dut.i.valid & dut.i.ready, dut.o.valid & dut.o.ready
    tracked = Tracked(h, push, pop, dut.i.payload, depth)
    h.ensure(dut.o.valid == (tracked.count != 0), "offers_what_it_has")
    h.ensure(dut.i.ready == (tracked.count != depth), "takes_until_full")
    h.ensure(implies(tracked.inside & (tracked.ahead == 0), dut.o.payload == tracked.value), "gives_what_it_got")
    return tracked


def fifo(depth: int) -> Harness:
    """A StreamFifo with an asynchronous memory is a list."""
    h = Harness()
    dut = StreamFifo(WIDTH, depth)
    inside = h.add(dut)
    tracked = queue(h, dut, depth)
    # Invariants for the induction: where the elements lie.
    produce, consume = inside["queue.produce"], inside["queue.consume"]
    h.ensure(inside["queue.level"] == tracked.count, "level")
    h.ensure((produce < depth) & (consume < depth), "pointers")
    h.ensure(produce == place(consume, tracked.count, depth), "distance")
    content = inside.memory("queue.storage", place(consume, tracked.ahead, depth))
    h.ensure(implies(tracked.inside, content == tracked.value), "content")
    return h


def head_fifo(depth: int) -> Harness:
    """A RegisteredFifo is a list: its oldest element is in a register, the others are in the memory."""
    h = Harness()
    dut = RegisteredFifo(WIDTH, depth)
    inside = h.add(dut)
    tracked = queue(h, dut, depth)
    produce, consume, stored = inside["produce"], inside["consume"], tracked.count - dut.o.valid
    h.ensure(inside["level"] == stored, "level")
    h.ensure((produce < depth - 1) & (consume < depth - 1), "pointers")
    h.ensure(produce == place(consume, stored, depth - 1), "distance")
    content = inside.memory("ring", place(consume, tracked.ahead - 1, depth - 1))
    h.ensure(implies(tracked.inside & (tracked.ahead != 0), content == tracked.value), "content")
    return h


def block_fifo(depth: int) -> Harness:
    """A StreamFifo in block RAM is a list: its oldest element is in the output register of the memory."""
    h = Harness()
    dut = StreamFifo(WIDTH, depth, block_ram=True)
    inside = h.add(dut)
    h.streams(dut)
    push, pop = dut.i.valid & dut.i.ready, dut.o.valid & dut.o.ready
    tracked = Tracked(h, push, pop, dut.i.payload, depth)
    old = h.register((tracked.count + push - pop != 0) & (tracked.count - pop != 0), "is_old")
    h.ensure(implies(dut.o.valid, tracked.count != 0), "offers_only_what_it_has")
    h.ensure(implies(old, dut.o.valid), "offers_within_a_cycle")
    h.ensure(dut.i.ready == (tracked.count < depth), "takes_until_full")
    h.ensure(implies(tracked.inside & (tracked.ahead == 0) & dut.o.valid, dut.o.payload == tracked.value), "gives")
    # The memory holds all elements except the one in the output register.
    produce, consume, register = inside["queue.produce"], inside["queue.consume"], dut.o.valid
    inner = depth - 1
    stored = tracked.count - register
    h.ensure(inside["queue.inner_level"] == stored, "level")
    h.ensure((produce < inner) & (consume < inner) & (stored <= inner), "pointers")
    h.ensure(produce == place(consume, stored, inner), "distance")
    h.ensure(register | (stored <= 1), "register_first")
    content = inside.memory("queue.storage", place(consume, tracked.ahead - register, inner))
    h.ensure(implies(tracked.inside & ~(register & (tracked.ahead == 0)), content == tracked.value), "content")
    return h


def delay_queue() -> Harness:
    """The queue in which values skip stages of the vector unit is a list."""
    h = Harness()
    dut = DelayQueue(WIDTH, 15)
    inside = h.add(dut)
    tracked = Tracked(h, dut.push, dut.pop, dut.i, 15)
    h.assume(~dut.clear)
    h.assume(implies(dut.push, tracked.count < 15))
    h.assume(implies(dut.pop, tracked.count != 0))
    ready = tracked.inside & h.register(tracked.inside, "was_inside")  # the register has had a cycle to take it
    h.ensure(implies(ready & (tracked.ahead == 0), dut.o == tracked.value), "gives_what_it_got")
    head, tail = inside["head"], inside["tail"]
    h.ensure((tail + tracked.count)[:4] == head, "distance")
    content = inside.memory("ring", (tail + tracked.ahead)[:4])
    h.ensure(implies(tracked.inside, content == tracked.value), "content")
    return h


def writeback(cfg: Config) -> Harness:
    """The queue to acc writes the n-th value to the n-th place, never through a claimed port.

    `last` marks the last value of each instruction.
    """
    h = Harness()
    dut = WritebackQueue(cfg)
    inside = h.add(dut)
    h.assume(~dut.clear)
    values = Tracked(h, dut.put, dut.write.en, Value.cast(dut.data), WRITEBACK_DEPTH)
    places = Tracked(h, dut.arrive, dut.write.en, Cat(dut.end, dut.addr), WRITEBACK_DEPTH)
    # Assumed of VECTOR, and proved there: a value comes no later than its place, and there is room for both.
    h.assume(implies(dut.put, values.count < WRITEBACK_DEPTH))
    h.assume(implies(dut.arrive, (places.count < WRITEBACK_DEPTH) & (places.count < values.count + dut.put)))
    h.ensure(implies(dut.write.en & values.inside & (values.ahead == 0), dut.write.data == values.value), "value")
    given = Cat(dut.last, dut.write.addr)
    h.ensure(implies(dut.write.en & places.inside & (places.ahead == 0), given == places.value), "place")
    for bank in range(2):
        claimed = h.register(dut.claims[bank], f"claimed{bank}")
        h.ensure(implies(dut.write.en & (dut.write.addr[-1] == bank), ~claimed), f"leaves_{bank}_to_gemm")
    h.ensure(implies(dut.write.en, dut.write.mask.all()), "whole")

    at, goes, bits = inside["written"], inside["goes"], len(inside["goes"])
    h.ensure(places.count <= values.count, "values_first")
    h.ensure(places.count == inside["waiting"] + dut.write.en, "count")
    h.ensure((at + dut.write.en)[:bits] == goes, "next")
    for name, list_ in (("arrived", places), ("put", values)):
        h.ensure((at + list_.count)[:bits] == inside[name], name)
    for name, list_ in (("places", places), ("entries", values)):
        content = inside.memory(name, (at + list_.ahead)[:bits])
        h.ensure(implies(list_.inside, content == list_.value), f"{name}_hold")
    return h


FILE = "dae_pipeline/fifo.py"
LOSES = Mutant(FILE, "queue.r_en.eq(self.o.ready)", "queue.r_en.eq(self.o.ready | self.i.valid)")
LATE = Mutant(FILE, "queue.w_en.eq(self.i.valid)", "queue.w_en.eq(self.i.valid & ~self.o.ready)")
for depth in (2, 8, 16):
    prove(f"queue of {depth} equals a list", *((LOSES, LATE) if depth == 2 else (LOSES,)), depth=1)(
        partial(fifo, depth)
    )
OVERTAKES = Mutant(FILE, "self.i.ready & ~(free & (level == 0))", "self.i.ready & ~free")
TWICE = Mutant(FILE, "self.i.ready & ~(free & (level == 0))", "self.i.ready")
STUCK = Mutant(FILE, "free.eq(~holds | self.o.ready)", "free.eq(~holds)")
for depth in (2, 8, 16):
    prove(f"queue of {depth} with a head equals a list", TWICE, *((STUCK,) if depth == 2 else (OVERTAKES,)), depth=1)(
        partial(head_fifo, depth)
    )
for depth in (4, 128):
    prove(f"block RAM queue of {depth} equals a list", LOSES, depth=1)(partial(block_fifo, depth))
prove(
    "delay queue of the vector unit equals a list",
    Mutant("vector_unit/delay_queue.py", "tail + self.pop", "tail + (self.pop & ~self.push)"),
    depth=1,
)(delay_queue)
WRITEBACK = "vector_unit/writeback.py"
prove(
    "the queue of the vector unit to acc equals a list",
    Mutant(WRITEBACK, "written.eq(goes)", "written.eq(goes + 1)"),
    Mutant(WRITEBACK, "~self.claims.bit_select(of_place.data[-1], 1)", "~self.claims[0]"),
    Mutant(WRITEBACK, "(waiting != 0) & ", ""),
    depth=1,
)(partial(writeback, Config(block_in=2, block_out=2, acc_depth=16)))
