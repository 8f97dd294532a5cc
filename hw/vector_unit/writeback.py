"""Queue in which results for acc wait while GEMM uses the write port, so that the pipeline need not stall."""

from __future__ import annotations

from amaranth import Module, Signal, signed
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.layout import write_port
from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.pipeline import WRITEBACK_DEPTH
from celosia.hw.spec.scratchpads import scratchpads


class WritebackQueue(wiring.Component):
    """Write entries to acc in order, in cycles in which GEMM does not use the port of their bank.

    The queue holds WRITEBACK_DEPTH entries. The words of an entry may come many cycles before its address; words and
    addresses come in the same order.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    put : In(1), data : In(array)   The words of the next entry come.
    arrive : In(1), addr : In       The address of the next entry comes.
    end : In(1)                     With `arrive`: the entry is its instruction's last one.
    claims : In(2)                  The banks whose write ports GEMM uses in the next cycle.
    write : Out(WritePort)          Must be ready unless claimed. `en` and `addr` are registers, as LOAD's `ready`
                                    depends on them in the same cycle.
    last : Out(1)                   The last entry of its instruction is written.
    clear : In(1)                   Empties the queue.
    """

    def __init__(self, cfg: Config) -> None:
        port = write_port(scratchpads(cfg)["acc"])
        super().__init__({
            "put": In(1), "data": In(data.ArrayLayout(signed(32), cfg.lanes)), "arrive": In(1), "end": In(1),
            "addr": In(scratchpads(cfg)["acc"].address_bits), "claims": In(2), "write": Out(port), "last": Out(1),
            "clear": In(1),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.entries = entries = Memory(shape=self.data.shape().size, depth=WRITEBACK_DEPTH, init=[])
        m.submodules.places = places = Memory(shape=len(self.addr) + 1, depth=WRITEBACK_DEPTH, init=[])
        put, arrived, goes, written = (
            Signal(range(WRITEBACK_DEPTH), name=n) for n in ("at_put", "at_arrived", "goes", "at")
        )
        waiting = Signal(range(WRITEBACK_DEPTH + 1))
        to = entries.write_port()
        of = entries.read_port(domain="comb")
        to_place = places.write_port()
        of_place = places.read_port(domain="comb")
        m.d.comb += [
            to.en.eq(self.put), to.addr.eq(put), to.data.eq(self.data), of.addr.eq(written),
            to_place.en.eq(self.arrive), to_place.addr.eq(arrived), to_place.data[0].eq(self.end),
            to_place.data[1:].eq(self.addr), of_place.addr.eq(goes),
        ]  # fmt: skip

        next_one = Signal()
        place = Reg(len(of_place.data))
        m.d.comb += next_one.eq((waiting != 0) & ~self.claims.bit_select(of_place.data[-1], 1))
        m.d.sync += [self.write.en.eq(next_one & ~self.clear), place.eq(of_place.data), written.eq(goes)]
        for pointer, moves in ((put, self.put), (arrived, self.arrive), (goes, next_one)):
            with m.If(moves):
                m.d.sync += pointer.eq(pointer + 1)
        m.d.sync += waiting.eq(waiting + self.arrive - next_one)
        m.d.comb += [
            self.write.addr.eq(place[1:]),
            self.write.data.eq(of.data),
            self.write.mask.eq(-1),
            self.last.eq(self.write.en & place[0]),
        ]
        with m.If(self.clear):
            m.d.sync += [number.eq(0) for number in (put, arrived, goes, written, waiting)]
        probes(
            self, written=written, goes=goes, waiting=waiting, arrived=arrived, put=put, places=places, entries=entries
        )
        return m
