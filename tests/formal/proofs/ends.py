"""Every transaction ends: how many cycles it takes at most, if memory and the other side of a stream never wait longer
than PATIENCE.

`work` counts what is still to be done, with weights such that every step makes it less. So whenever nothing is done,
somebody must be waited for; the time since the beginning is at most (PATIENCE + 1) times the work done.
"""

from __future__ import annotations

from functools import partial

from amaranth import Module, Mux, Signal, Value

from celosia.hw.dae_pipeline.dma import OFFSET_BITS, ReadEngine, WriteEngine
from proofs.bursts import count_beats, count_responses
from proofs.declare import Mutant, prove
from proofs.harness import Harness, implies

PATIENCE = 3


def wait(h: Harness, waits: Value, name: str) -> Signal:
    """Cycles that something has waited, without this one; never more than PATIENCE with it."""
    cycles = Signal(range(PATIENCE + 1), name=f"waited_{name}")
    h.m.d.sync += cycles.eq(Mux(waits, cycles + 1, 0))
    h.assume(~waits | (cycles < PATIENCE))
    return cycles


def ends_in_time(h: Harness, going: Value, work: Value, most: int, waits: dict[str, Value]) -> None:
    """While `going`, `work` gets less in every cycle in which nothing `waits`; so it is over after at most
    most * (PATIENCE + 1) cycles, where `most` is the work at the beginning."""
    m: Module = h.m
    waited = {name: (condition, wait(h, condition, name)) for name, condition in waits.items()}
    now = Signal(range(most + 1), name="work")
    m.d.comb += now.eq(work)
    time, idle, before = Signal(range(most * (PATIENCE + 1) + 2)), Signal(range(PATIENCE + 2)), Signal.like(now)
    went = h.register(going, "went")
    m.d.sync += [before.eq(now), time.eq(Mux(going, time + 1, 0))]
    done = Signal()
    m.d.comb += done.eq(~went | (now < before))
    m.d.sync += idle.eq(Mux(going, Mux(done, 0, idle + 1), 0))
    return None
