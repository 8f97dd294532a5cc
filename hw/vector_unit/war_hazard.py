"""Write-after-read hazards: writes to vin must not overwrite rows that a softmax still has to read."""

from __future__ import annotations

from amaranth import Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.layout import instruction_layout
from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import EXTENT_BITS, ASource, BSource, Destination, Opcode
from celosia.hw.spec.scratchpads import scratchpads


class WarHazardTracker(wiring.Component):
    """Let an instruction overwrite the rows of a softmax in place, each row when the softmax has finished reading it.

    Such an instruction reads acc and writes consecutive entries of vin, from the softmax's first entry or an earlier
    one on. The softmax's rows must be consecutive entries, too. The instruction may start while one softmax is under
    way that has searched all of its rows for their largest bytes. A step then stalls while the entry that it writes
    belongs to a row that the softmax has not read for the last time.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    fields : In                     Fields of the instruction that is offered, valid or not.
    starts : In(1)                  That instruction is a softmax, and starts.
    waits : In(1)                   That instruction waits, and exactly one softmax is under way.
    loads : In(1), accept : In(1)   loads: the loops can accept an instruction. accept: they do.
    writes : In(1)                  A step that writes an entry is issued.
    under_way : In(1)               A softmax is under way.
    walked, over, entries, comes : In       See `SoftmaxProgress`.
    halt : In(1)                    No instruction starts.
    follows : Out(1)                The instruction offered in the cycle before may start in spite of the softmax.
    blocks : Out(1)                 No step may be issued in the next cycle.
    """

    def __init__(self, cfg: Config) -> None:
        self._address_bits = scratchpads(cfg)["vin"].address_bits
        super().__init__({
            "fields": In(instruction_layout(cfg, Opcode.VECTOR)["fields"].shape),
            "starts": In(1), "waits": In(1), "loads": In(1), "accept": In(1), "writes": In(1), "under_way": In(1),
            "walked": In(1), "over": In(1), "entries": In(EXTENT_BITS), "comes": In(1), "halt": In(1),
            "follows": Out(1), "blocks": Out(1),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        fields, bits = self.fields, self._address_bits
        # First entry of the softmax, and whether its entries are consecutive.
        base = Reg(bits)
        consecutive = Reg()
        with m.If(self.starts):
            rows_consecutive = (fields.a_n == 1) & (fields.a_x == fields.extent_n)
            m.d.sync += [base.eq(fields.a_base), consecutive.eq(rows_consecutive)]

        # Number of entries from the first one of the instruction offered to the first one of the softmax.
        in_front = Reg(bits + 1)
        acc_to_vin = (fields.destination == Destination.VIN) & (fields.a_source == ASource.ACC)
        acc_to_vin &= fields.b_source != BSource.VIN
        one_by_one = (fields.extent_n == 1) & (fields.extent_y == 1) & (fields.dst_x == 1) & (fields.dst_base <= base)
        rows_known = self.waits & self.walked & consecutive
        m.d.sync += [
            self.follows.eq(rows_known & acc_to_vin & one_by_one & ~self.halt),
            in_front.eq(base - fields.dst_base[:bits]),
        ]

        # released: entries of the softmax that have been read for the last time. overwrites: the instruction whose
        # loops run started during the softmax. gap: entries that it may write before the softmax reads more.
        overwrites = Signal()
        released = Signal(bits + 1)
        next_released = Signal(bits + 1)
        gap = Signal(bits + 1)
        newly_released = Mux(self.over, self.entries, 0)
        m.d.comb += next_released.eq(Mux(self.comes, 0, released + newly_released))
        m.d.sync += released.eq(next_released)
        with m.If(self.loads):
            m.d.sync += [overwrites.eq(self.accept & self.follows), gap.eq(in_front + next_released)]
        with m.Else():
            m.d.sync += gap.eq(gap + newly_released - self.writes)

        # No step is issued in the first cycle of an instruction, in which its gap is computed.
        none_left = ~self.over & ((gap == 0) | ((gap == 1) & self.writes))
        m.d.comb += self.blocks.eq(Mux(self.loads, self.follows, overwrites & self.under_way & none_left))
        probes(
            self, base=base, consecutive=consecutive, in_front=in_front, overwrites=overwrites, released=released,
            gap=gap,
        )  # fmt: skip
        return m
