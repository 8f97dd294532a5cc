"""Retire the instructions of the vector unit in program order."""

from __future__ import annotations

from amaranth import Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.layout import Pulse, done_layout
from celosia.hw.lib.probes import probes


class RetireStage(wiring.Component):
    """Report instructions as done, in program order.

    Instructions with steps end in program order. Those that overlap with an earlier softmax may end before it. They
    retire when no softmax is under way.

    Parameters
    ----------
    softmax : whether the Config has softmax. If not, the members with `softmax` in their names are unused.

    Members
    -------
    ends : In(1)                    An instruction with steps ends, the oldest one that has not ended.
    ended : In(done_layout)         Payload of `done` for that instruction; used only if none waits to retire.
    oldest : In(done_layout)        The same for the oldest instruction with steps that has not retired.
    softmax_ends : In(1)            The oldest softmax ends, and retires.
    softmax : In(done_layout)       Payload of `done` for that softmax.
    softmax_under_way : In(1)       A softmax is under way.
    halt : In(1)                    Drops all instructions.
    retires : Out(1)                The oldest instruction with steps retires.
    done : Out(Pulse)               An instruction has retired in the cycle before.
    """

    def __init__(self, softmax: bool) -> None:
        self._has_softmax = softmax
        super().__init__({
            "ends": In(1), "ended": In(done_layout), "oldest": In(done_layout), "softmax_ends": In(1),
            "softmax": In(done_layout), "softmax_under_way": In(1), "halt": In(1), "retires": Out(1),
            "done": Out(Pulse(done_layout)),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        late = Signal(2)  # instructions that have ended and wait for a softmax
        retires: Value = self.ends
        instruction = {name: self.ended[name] for name, _ in done_layout}
        reports: Value = self.retires
        if self._has_softmax:
            retires = ~self.softmax_under_way & (self.ends | late.any())
            m.d.sync += late.eq(Mux(self.halt, 0, late + self.ends - self.retires))
            for name, ended in instruction.items():
                with_steps = Mux(late.any(), self.oldest[name], ended)
                instruction[name] = Mux(self.softmax_under_way, self.softmax[name], with_steps)
            reports = self.retires | self.softmax_ends
        m.d.comb += self.retires.eq(retires)
        m.d.sync += self.done.valid.eq(reports & ~self.halt)
        with m.If(reports):
            m.d.sync += [self.done.payload[name].eq(value) for name, value in instruction.items()]
        probes(self, late=late)
        return m
