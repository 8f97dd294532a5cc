"""Prove that `done` comes once for each instruction of LOAD's channels, in program order, as soon as it may."""

from __future__ import annotations

from functools import partial

from amaranth import Cat, Mux, Signal, Value

from celosia.hw.dae_pipeline.retire_queue import RetireQueue
from proofs.declare import Mutant, prove
from proofs.fifos import Tracked, place
from proofs.harness import Harness, implies

FILE = "dae_pipeline/retire_queue.py"
CHANNELS = 2


def in_order(depth: int) -> Harness:
    """`done` reports any followed instruction with its own payload, in the right cycle.

    That is the cycle in which all instructions before it are reported and each of its channels has ended it.
    """
    h = Harness()
    dut = RetireQueue(CHANNELS, depth)
    inside = h.add(dut)
    h.trusts(dut.handed, "handed")
    push, pop, to = dut.handed.valid & dut.handed.ready, dut.done.valid, dut.handed.payload.channels
    tracked = Tracked(h, push, pop, Value.cast(dut.handed.payload), depth)
    of_channels, payload = tracked.value[:CHANNELS], tracked.value[CHANNELS:]
    # Count the instructions that each channel has yet to end: it ends only instructions that it got.
    given = [push & to[number] for number in range(CHANNELS)]
    work = [Signal(range(depth + 2), name=f"work{number}") for number in range(CHANNELS)]
    for number, count in enumerate(work):
        h.m.d.sync += count.eq(count + given[number] - dut.ended[number])
        h.assume(implies(dut.ended[number], count != 0))
    # For each channel, the number of ends up to that of the followed instruction.
    to_come = [Signal(range(depth + 2), name=f"to_come{number}") for number in range(CHANNELS)]
    for number, left in enumerate(to_come):
        with h.m.If(push & ~tracked.inside):
            h.m.d.sync += left.eq(Mux(to[number], work[number] - dut.ended[number] + 1, 0))
        with h.m.Elif(dut.ended[number] & (left != 0)):
            h.m.d.sync += left.eq(left - 1)
    ended = Cat(left <= dut.ended[number] for number, left in enumerate(to_come)).all()
    oldest = tracked.inside & (tracked.ahead == 0)
    h.ensure(implies(oldest, dut.done.valid == ended), "told_when_it_has_ended")
    h.ensure(implies(oldest, Value.cast(dut.done.payload) == payload), "told_with_its_payload")
    h.ensure(implies(dut.done.valid, tracked.count != 0), "told_once")
    h.ensure(dut.empty == (tracked.count == 0), "empty")
    h.ensure(dut.handed.ready == (tracked.count != depth), "takes_until_full")
    # Invariants for the induction: the queue is a list, and holds those instructions of each channel that are not
    # ended or not reported.
    produce, consume = inside["order.queue.produce"], inside["order.queue.consume"]
    h.ensure(inside["order.queue.level"] == tracked.count, "level")
    h.ensure((produce < depth) & (consume < depth), "pointers")
    h.ensure(produce == place(consume, tracked.count, depth), "distance")
    entries = [inside.memory("order.queue.storage", place(consume, i, depth)) for i in range(depth)]
    for number, count in enumerate(inside["counts"]):
        mine = [(tracked.count > i) & entry[number] for i, entry in enumerate(entries)]
        h.ensure(work[number] + count == sum(mine[1:], mine[0]), f"counted{number}")
        before = [(tracked.ahead > i) & entry[number] for i, entry in enumerate(entries)]
        behind = sum(before[1:], before[0]) + 1  # of its channel, with itself
        left = Mux(of_channels[number] & (count < behind), behind - count, 0)
        h.ensure(implies(tracked.inside, to_come[number] == left), f"to_come{number}")
    for i, entry in enumerate(entries):
        h.ensure(implies(tracked.inside & (tracked.ahead == i), entry == tracked.value), f"content{i}")
    return h


for depth, mutants in {
    4: (
        Mutant(FILE, "pulse | (count != 0)", "count != 0"),
        Mutant(FILE, "down = told & oldest.channels[channel]", "down = told"),
        Mutant(FILE, "with m.If(pulse != down):", "with m.If(pulse | down):"),
        Mutant(FILE, "(has_ended | ~oldest.channels).all()", "(has_ended & oldest.channels).any()"),
    ),
    16: (Mutant(FILE, "down = told & oldest.channels[channel]", "down = told"),),
}.items():
    prove(f"ends of two channels are reported in order, {depth} at most", *mutants, depth=1, tested=depth == 4)(
        partial(in_order, depth)
    )
