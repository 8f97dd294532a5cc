"""Engine that computes the factors of a norm's rows before the norm's first step is issued, and keeps them."""

from __future__ import annotations

from amaranth import Cat, Elaboratable, Module, Mux, ResetInserter, Signal
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from celosia.hw.lib.layout import read_port
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.pipeline import MAX_NORM_ROWS, norm_parts
from celosia.hw.spec.scratchpads import scratchpads
from celosia.hw.vector_unit.masks import ones  # ones(n): a mask of the lowest n bits
from celosia.hw.vector_unit.norm.addresses import WALKED, NormAddressGenerator, norm_fields
from celosia.hw.vector_unit.norm.factors import NormFactors, row_layout
from celosia.hw.vector_unit.norm.moments import NormMoments
from celosia.hw.vector_unit.norm.root import InverseRoot
from celosia.hw.vector_unit.norm.variance import NormVariance

_KEPT = ("imm", "a_offset", "centre", "scale_c")
"""Fields of a VECTOR with `norm` that the engine needs besides WALKED: number of unused values in a row's last entry,
offset, whether the mean is subtracted, epsilon."""


class NormEngine(wiring.Component):
    """Compute for each row of a norm its sums, its variance, the inverse root of that, and the factors of its lanes.

    These four steps are pipelined: each works on a row while the previous step works on the next row. All rows together
    take `norm_cycles` (`sim/timing/engine_cycles.py`).

    Parameters
    ----------
    cfg : Config

    Members
    -------
    fields : In                 Fields of a VECTOR with `norm`.
    start : In(1)               Pulse: the VECTOR starts; only while not `busy`.
    vin : Out(ReadPort)         Must be ready. While `busy`, no other reader may use the port.
    busy : Out(1)               The factors of some rows are not computed yet.
    ends : Out(1)               `busy` ends with this cycle.
    takes : In(1)               A step of the VECTOR is issued; the loop over rows is its innermost one.
    number : Out                Number of the row of that step.
    wanted : In, row : Out(row_layout)      row: the factors of row number `wanted`.
    halt : In(1)                Drops everything.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        number = exact_log2(MAX_NORM_ROWS)
        super().__init__({
            "fields": In(norm_fields(cfg, *WALKED, *_KEPT)), "start": In(1),
            "vin": Out(read_port(scratchpads(cfg)["vin"])), "busy": Out(1), "ends": Out(1), "takes": In(1),
            "number": Out(number), "wanted": In(number), "row": Out(row_layout), "halt": In(1),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.walk, m.submodules.moments = walk, moments = (
            NormAddressGenerator(self._cfg),
            NormMoments(self._cfg.norm),
        )
        m.submodules.variance, m.submodules.root = variance, root = NormVariance(), InverseRoot()
        m.submodules.factors = factors = NormFactors()
        # `start` comes late in its cycle, so that all but `busy` begins in the next cycle, with `accepted`.
        fields = Reg(self.fields.shape())
        accepted = Signal()
        m.d.sync += accepted.eq(self.start)
        with m.If(~self.busy):
            m.d.sync += fields.eq(self.fields)
        m.d.comb += [
            walk.start.eq(accepted), *(walk.fields[name].eq(fields[name]) for name in WALKED),
            self.vin.en.eq(walk.read), self.vin.addr.eq(walk.addr),
        ]  # fmt: skip
        self._connect_moments(m, fields, walk, moments)
        m.d.comb += [
            variance.take.eq(moments.done), variance.sum.eq(Mux(fields.centre, moments.sum, 0)),
            variance.squares.eq(moments.squares), variance.epsilon.eq(fields.scale_c),
            root.take.eq(variance.done), root.word.eq(variance.word),
            factors.take.eq(root.done), factors.root.eq(root.root), factors.offset.eq(fields.a_offset),
        ]  # fmt: skip
        for name in ("mean", "rest", "places"):
            value = getattr(variance, name)
            held = Reg(value.shape(), name=name)
            with m.If(variance.done):
                m.d.sync += held.eq(value)
            m.d.comb += getattr(factors, name).eq(held)
        self._count_values(m, fields, accepted, variance, factors)
        self._keep_factors(m, fields, accepted, factors)
        return ResetInserter(self.halt)(m)

    def _connect_moments(
        self, m: Module, fields: data.View[data.StructLayout], walk: NormAddressGenerator, moments: NormMoments
    ) -> None:
        """Pass the parts that `walk` generates to `moments`, two cycles later, after the read of vin.

        Values behind the end of a row, in its last entry, do not count.
        """
        valid = Signal(name="part_valid")
        lanes = self._cfg.norm
        imm = fields.imm[: exact_log2(self._cfg.block_out)]
        inside = Cat(1, ones(~imm))
        number = Reg(len(walk.number), name="part_number")
        parts = data.View(data.ArrayLayout(moments.values.shape(), norm_parts(self._cfg)), self.vin.data)
        inside_of_part = data.View(data.ArrayLayout(lanes, norm_parts(self._cfg)), inside)
        ends = Reg()
        marks = Reg(2)
        m.d.sync += [
            valid.eq(walk.active), number.eq(walk.number), ends.eq(walk.ends), marks.eq(Cat(walk.first, walk.last)),
            moments.valid.eq(valid), Cat(moments.first, moments.last).eq(marks),
            moments.values.eq(parts[number]),
            moments.counted.eq(inside_of_part[number] | (~ends).replicate(lanes)),
        ]  # fmt: skip
        m.d.comb += moments.offset.eq(fields.a_offset)

    def _count_values(
        self,
        m: Module,
        fields: data.View[data.StructLayout],
        accepted: Signal,
        variance: NormVariance,
        factors: NormFactors,
    ) -> None:
        """Compute the number of values in a row for `variance`, and the same number normalised for `factors`.

        It is normalised by shifting it up until its highest bit is 1, so that factors have all of their bits.
        accepted: the VECTOR has started in the cycle before.
        """
        count = Reg(len(variance.count))
        high = Reg(len(factors.count))
        spare = Reg(len(factors.spare))
        all_lanes = Signal(len(count))
        m.d.comb += [
            all_lanes.eq((fields.extent_n << exact_log2(self._cfg.block_out)) - fields.imm),
            variance.count.eq(count), factors.count.eq(high), factors.spare.eq(spare),
        ]  # fmt: skip
        with m.If(accepted):
            m.d.sync += [count.eq(all_lanes), high.eq(all_lanes), spare.eq(0)]
        with m.Elif(~high[-1]):
            m.d.sync += [high.eq(high << 1), spare.eq(spare + 1)]

    def _keep_factors(
        self, m: Module, fields: data.View[data.StructLayout], accepted: Signal, factors: NormFactors
    ) -> None:
        """Keep the factors of all rows in a memory for the items, and drive `busy`, `ends` and `number`."""
        m.submodules.rows = rows = Memory(shape=row_layout, depth=MAX_NORM_ROWS, init=[])
        put = rows.write_port()
        get = rows.read_port(domain="comb")
        last = Reg(len(self.number), name="last_number")
        at = Signal(len(self.number))
        m.d.comb += [
            put.en.eq(factors.done), put.addr.eq(at), put.data.eq(factors.row), get.addr.eq(self.wanted),
            self.row.eq(get.data), self.ends.eq(factors.done & (at == last)),
        ]  # fmt: skip
        with m.If(self.start):
            m.d.sync += self.busy.eq(1)
        with m.Elif(self.ends):
            m.d.sync += self.busy.eq(0)
        with m.If(accepted):
            m.d.sync += [at.eq(0), self.number.eq(0), last.eq(fields.extent_x - 1)]
        with m.Elif(factors.done):
            m.d.sync += at.eq(at + 1)
        with m.If(self.takes):
            m.d.sync += self.number.eq(Mux(self.number == last, 0, self.number + 1))
