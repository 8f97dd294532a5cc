"""Prove the token semaphores in front of the units."""

from __future__ import annotations

from functools import partial

from amaranth import Signal

from celosia.hw.dae_pipeline.tokens import Semaphore
from proofs.declare import Mutant, prove
from proofs.harness import Harness, implies

FILE = "dae_pipeline/tokens.py"


def semaphore(bits: int) -> Harness:
    """A semaphore holds exactly the tokens that were put and not taken, and promises no more than fit."""
    h = Harness()
    dut = Semaphore(bits)
    inside = h.add(dut)
    limit = (1 << bits) - 1
    promised, tokens = Signal(bits + 2), Signal(bits + 2)
    h.m.d.sync += [promised.eq(promised + dut.reserve - dut.release), tokens.eq(tokens + dut.release - dut.acquire)]
    h.assume(implies(dut.reserve, dut.has_room))
    h.assume(implies(dut.release, promised != 0))
    h.assume(implies(dut.acquire, dut.has_token))
    h.ensure(dut.has_token == (tokens != 0), "has_token")
    h.ensure(dut.has_room == (promised + tokens < limit), "has_room")
    h.ensure(promised + tokens <= limit, "never_too_many")
    h.ensure(inside["tokens"] == tokens, "counts_tokens")
    h.ensure(inside["room"] == limit - promised - tokens, "counts_room")
    return h


LOSES = Mutant(FILE, "Mux(up == down, count, Mux(up, more, less))", "Mux(up, more, Mux(down, less, count))")
FULL = Mutant(FILE, "some, up | (count != 1)", "some, up | (count != 0)")
for bits, mutants in {2: (LOSES, FULL), 8: (LOSES,), 16: (LOSES,)}.items():
    prove(f"semaphore of {bits} bits is a counter", *mutants, depth=1)(partial(semaphore, bits))
