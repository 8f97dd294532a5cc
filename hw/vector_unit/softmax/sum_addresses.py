"""Addresses of the elements whose powers a softmax adds up."""

from __future__ import annotations

from amaranth import Cat, Const, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import EXTENT_BITS
from celosia.hw.spec.pipeline import SOFTMAX_SUMS, softmax_parts, softmax_span
from celosia.hw.vector_unit.softmax.addresses import BUFFERS, TILES


class SumAddressGenerator(wiring.Component):
    """Generate the addresses of the elements that every lane adds up: each byte of SOFTMAX_SUMS rows in turn.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    last_key : In                   Number of a row's last element; constant while sums are under way.
    start : In(1)                   The sums of a tile begin in the next cycle; those of the previous tile are complete.
    look : Out(1)                   An element is looked up; the other outputs describe it.
    place, byte : Out               Address of its part in the lanes' buffers, and number of its byte there.
    tile, slot : Out                Number of its tile modulo TILES, and of its sum in the lane.
    first, last : Out(1)            It is the first or the last element of a row that is looked up.
    nothing : Out(1)                It lies behind the row's last element, and does not count.
    done : Out(1)                   It is the last element of the tile.
    """

    def __init__(self, cfg: Config) -> None:
        self._byte_bits, self._entry_bits = exact_log2(cfg.softmax), exact_log2(softmax_span(cfg) * cfg.block_out)
        slot, key = exact_log2(SOFTMAX_SUMS), EXTENT_BITS + exact_log2(cfg.block_out)
        place = slot + exact_log2(softmax_parts(cfg)) + exact_log2(BUFFERS)
        super().__init__({
            "last_key": In(key), "start": In(1), "look": Out(1), "place": Out(place),
            "byte": Out(self._byte_bits), "tile": Out(exact_log2(TILES)), "slot": Out(slot), "first": Out(1),
            "last": Out(1), "nothing": Out(1), "done": Out(1),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        key = Signal(len(self.last_key))
        over = Signal()
        buffer = Signal()
        turn = Signal()
        inside, others = key[: self._entry_bits], self.last_key[self._entry_bits :]
        m.d.comb += [
            turn.eq(self.look & self.slot.all()), self.first.eq(key == 0), self.nothing.eq(over),
            self.place.eq(Cat(self.slot, inside[self._byte_bits :], buffer)), self.byte.eq(key[: self._byte_bits]),
            self.done.eq(turn & self.last),
        ]  # fmt: skip
        with m.If(self.look):
            m.d.sync += self.slot.eq(self.slot + 1)
        with m.If(turn):
            m.d.sync += [
                key.eq(key + 1), buffer.eq(buffer ^ inside.all()), over.eq(over | (key == self.last_key)),
                self.last.eq(key == Cat(Const(-2, len(inside)), others)),  # the next one is
            ]  # fmt: skip
        with m.If(self.done):
            m.d.sync += [self.look.eq(0), self.last.eq(0), over.eq(0), key.eq(0), self.tile.eq(self.tile + 1)]
        with m.If(self.start):
            m.d.sync += self.look.eq(1)
        return m
