"""Schedule in which the three address generators of the softmax engine read vin, and begin tiles."""

from __future__ import annotations

from amaranth import Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from celosia.hw.lib.probes import probes
from celosia.hw.spec.config import Config
from celosia.hw.spec.pipeline import DIVIDE_TURN, FILL_TURN, FIND_TURN, softmax_parts


class TurnSignature(wiring.Signature):
    """The signals between one address generator and the scheduler.

    Members
    -------
    active : In(1)      The generator has a step.
    ends : In(1)        The step is the last one of its tile.
    on : Out(1)         The step ends with this cycle.
    begin : Out(1)      The generator's next tile, if there is one, begins in the next cycle.
    """

    def __init__(self) -> None:
        super().__init__({"active": In(1), "ends": In(1), "on": Out(1), "begin": Out(1)})


class ReadScheduler(wiring.Component):
    """Share the read port of vin among three address generators, each with a cycle of its own in every round.

    While a tile is added up (`fill`), the largest bytes of the next tile are searched (`find`). Nothing else can be
    done before those of the first tile are known, so `find` then reads in every cycle.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    find, fill, divide : Out(TurnSignature)     The three address generators, see `SoftmaxEngine`.
    summed : In(1)      The sums of a tile are complete.
    busy : In(1)        A softmax is under way.
    beat : Out          Number of the cycle within its round.
    """

    def __init__(self, cfg: Config) -> None:
        self._parts = softmax_parts(cfg)
        turn = Out(TurnSignature())
        super().__init__({
            "find": turn, "fill": turn, "divide": turn, "summed": In(1), "busy": In(1),
            "beat": Out(exact_log2(self._parts)),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        find, fill, divide, beat = self.find, self.fill, self.divide, self.beat
        first_tile = Signal()  # the largest bytes of the first tile are being searched
        ready = Signal()  # the largest bytes of the next tile are known
        begin = Signal()
        finds = find.on & find.ends
        filled = (beat == self._parts - 1) & (fill.ends | ~fill.active)
        m.d.comb += [
            find.on.eq(find.active & (beat == FIND_TURN)),
            fill.on.eq(fill.active & (beat == self._parts - 1)),
            divide.on.eq(divide.active & (beat == DIVIDE_TURN - 1)),
            begin.eq(Mux(first_tile, finds, ready & filled)),
            find.begin.eq(begin | ~(ready | finds)),
            fill.begin.eq(begin),
            divide.begin.eq(self.summed),
        ]
        m.d.sync += [
            beat.eq(Mux(first_tile, Mux(begin, FILL_TURN, FIND_TURN), beat + 1)),
            ready.eq((ready | finds) & ~begin),
        ]
        with m.If(~self.busy):
            m.d.sync += first_tile.eq(1)
        with m.Elif(begin):
            m.d.sync += first_tile.eq(0)
        probes(self, first_tile=first_tile, ready=ready)
        return m
