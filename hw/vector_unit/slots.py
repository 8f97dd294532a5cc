"""Decide in which cycles a step may enter the pipeline of the vector unit."""

from __future__ import annotations

from amaranth import Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.probes import probes
from celosia.hw.spec.config import Config
from celosia.hw.spec.pipeline import WRITEBACK_DEPTH


class SlotScheduler(wiring.Component):
    """Decide a cycle ahead whether a step may be issued, so that its item meets no structural hazard.

    The item must not read a bank of acc in the cycle in which GEMM reads it, must not reach stage `add` while an item
    with a residual is there, and must find room in the queue to acc. The decision is a register, as many depend on it.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    reads_acc : In(1), bank : In(1)     The next step reads acc, in this bank.
    claimed : In(2)             Banks of acc that GEMM reads in the cycle in which the next step would read.
    blocked : In(1)             The next step is forbidden for another reason.
    output : In(1)              A step that completes an entry is issued.
    adds : In(1)                A residual is added to that entry.
    to_acc : In(1)              That entry is written to acc.
    lands : In(1)               An entry is written to acc in this cycle.
    halt : In(1)                All items are dropped.
    slot : Out(1)               A step may be issued in this cycle.
    bubble : Out(1)             No step may be issued, as an earlier item with a residual takes several cycles.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        super().__init__({
            "reads_acc": In(1), "bank": In(1), "claimed": In(2), "blocked": In(1), "output": In(1), "adds": In(1),
            "to_acc": In(1), "lands": In(1), "halt": In(1), "slot": Out(1, init=1), "bubble": Out(1),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        cfg = self._cfg
        bubbles = Signal(range(cfg.residual_cycles))
        queued = Signal(range(WRITEBACK_DEPTH + 1))
        blocked: Value = (self.reads_acc & self.claimed.bit_select(self.bank, 1)) | self.blocked
        if cfg.residual_cycles > 1:
            bubbles_left = Mux(self.output & self.adds, cfg.residual_cycles - 1, bubbles - bubbles.any())
            m.d.sync += bubbles.eq(Mux(self.halt, 0, bubbles_left))
            blocked |= bubbles_left[: len(bubbles)].any()
        if cfg.int32:
            queued_next = queued + (self.output & self.to_acc)
            m.d.sync += queued.eq(Mux(self.halt, 0, queued_next - self.lands))
            blocked |= queued_next == WRITEBACK_DEPTH
        m.d.sync += self.slot.eq(self.halt | ~blocked)
        m.d.comb += self.bubble.eq(bubbles.any())
        probes(self, bubbles=bubbles, queued=queued)
        return m
