"""The order in which a softmax adds up the powers of a tile's rows."""

from __future__ import annotations

from amaranth import Cat, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from celosia.hw.config import Config
from celosia.hw.isa import EXTENT_BITS
from celosia.hw.pipeline import SUMS
from celosia.hw.signals import Reg
from celosia.hw.vector_unit.softmax.steps import BUFFERS


class SoftmaxSums(wiring.Component):
    """One element after the other of SUMS rows in turn, from the parts that are kept of them.

    Members
    -------
    set : In(1), last_key : In      Takes the number of a row's last element.
    start : In(1)                   Begins in the next cycle.
    look : Out(1)                   An element is looked up: of this place, this byte.
    place, byte : Out
    slot : Out                      Which of the sums it belongs to.
    first : Out(1)                  It is the row's first.
    done : Out(1)                   It is the last one of all.
    """

    def __init__(self, cfg: Config) -> None:
        self._byte_bits = exact_log2(cfg.softmax)
        slot, key = exact_log2(SUMS), EXTENT_BITS + exact_log2(cfg.block_out)
        super().__init__({
            "set": In(1), "last_key": In(key), "start": In(1), "look": Out(1), "place": Out(slot + exact_log2(BUFFERS)),
            "byte": Out(self._byte_bits), "slot": Out(slot), "first": Out(1), "done": Out(1),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        key, last_key, is_last = Signal(len(self.last_key)), Reg(len(self.last_key)), Reg()
        slot = Signal(len(self.slot))
        buffer = (key >> self._byte_bits)[: exact_log2(BUFFERS)]
        m.d.comb += [
            self.place.eq(Cat(slot, buffer)), self.byte.eq(key[: self._byte_bits]), self.slot.eq(slot),
            self.first.eq(key == 0), self.done.eq(self.look & is_last & slot.all()),
        ]  # fmt: skip
        m.d.sync += is_last.eq(key == last_key)  # known since the sum before
        with m.If(self.set):
            m.d.sync += last_key.eq(self.last_key)
        with m.If(self.look):
            m.d.sync += [slot.eq(slot + 1), key.eq(key + slot.all())]
        with m.If(self.start):
            m.d.sync += self.look.eq(1)
        with m.If(self.done):
            m.d.sync += [self.look.eq(0), key.eq(0)]
        return m
