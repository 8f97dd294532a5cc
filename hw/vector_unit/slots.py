"""The cycles in which a step may enter the pipeline."""

from __future__ import annotations

from amaranth import Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.probes import probes
from celosia.hw.spec.config import Config
from celosia.hw.spec.pipeline import WRITEBACK_DEPTH


class SlotScheduler(wiring.Component):
    """Decide a cycle ahead whether a step may be issued, so that nothing stands in the way of its item.

    The item must not read acc when GEMM reads the same bank, must not meet the parts of a residual in front of it, and
    must find room in the queue to acc. The answer is a register, for it leads to many.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    reads_acc : In(1), bank : In(1)     The next step reads acc, in this bank.
    claimed : In(2)             Banks of acc that GEMM reads in the cycle in which the next step would.
    blocked : In(1)             Something else forbids the next step.
    output : In(1)              A step is issued that completes an entry,
    adds : In(1)                to which a residual is added;
    to_acc : In(1)              which goes to acc.
    lands : In(1)               An entry is written to acc.
    halt : In(1)                All items are dropped.
    slot : Out(1)               A step may be issued in this cycle.
    bubble : Out(1)             None may, because a residual takes several cycles.
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
            left = Mux(self.output & self.adds, cfg.residual_cycles - 1, bubbles - bubbles.any())
            m.d.sync += bubbles.eq(Mux(self.halt, 0, left))
            blocked |= left[: len(bubbles)].any()
        if cfg.int32:
            with_this = queued + (self.output & self.to_acc)
            m.d.sync += queued.eq(Mux(self.halt, 0, with_this - self.lands))
            blocked |= with_this == WRITEBACK_DEPTH
        m.d.sync += self.slot.eq(self.halt | ~blocked)
        m.d.comb += self.bubble.eq(bubbles.any())
        probes(self, bubbles=bubbles, queued=queued)
        return m
