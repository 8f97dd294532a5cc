"""Packed weights on their way to wgt: `hw/packing.py` says how they lie in DRAM, `sim/packing.py` what they mean."""

from __future__ import annotations

from amaranth import Array, Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from celosia.hw.config import Config
from celosia.hw.layout import ERROR_BITS, WritePort, write_port
from celosia.hw.packing import FACTORS, QUOTIENTS, packing
from celosia.hw.pipeline import EXPAND_STAGES
from celosia.hw.regs import Error
from celosia.hw.scratchpads import scratchpads
from celosia.hw.signals import Reg

FACTOR_BITS = exact_log2(FACTORS)


def unit_layout(bus_bytes: int) -> data.StructLayout:
    """What comes of the bus in a cycle."""
    return data.StructLayout({"data": 8 * bus_bytes, "error": ERROR_BITS})


class PackFactors(wiring.Component):
    """Takes the factors in front of each pack out of the units, and gives each unit of weights those of its own.

    Members
    -------
    unit : In(stream)       all that comes.
    packed : In(1)          whether what comes next is of a pack; else it passes as it is.
    rest : Out(stream)      without the units of factors.
    factors : Out           of `rest`, less one. What comes with an error passes, so that it is told.
    """

    def __init__(self, cfg: Config) -> None:
        self._packing = packing(cfg)
        unit = stream.Signature(unit_layout(cfg.bus_bytes))
        bits = FACTOR_BITS * self._packing.unit_factors
        super().__init__({"unit": In(unit), "packed": In(1), "rest": Out(unit), "factors": Out(bits)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        ahead, behind = self._packing.units
        begins = Signal(init=1)  # factors come next
        word, number = Signal(range(max(2, ahead))), Signal(range(max(2, behind)))
        words = [Reg(len(self.unit.payload.data), name=f"factors{i}") for i in range(ahead)]
        takes = self.packed & begins & (self.unit.payload.error == Error.NONE)
        own = max(
            1, self._packing.run // (self._packing.times * self._packing.unit)
        )  # units that have the same factors
        last = self._packing.groups // self._packing.unit_factors * own
        m.d.comb += [
            self.rest.valid.eq(self.unit.valid & ~takes),
            self.rest.payload.eq(self.unit.payload),
            self.unit.ready.eq(takes | self.rest.ready),
            self.factors.eq(Cat(words).word_select((number % last) >> exact_log2(own), len(self.factors))),
        ]
        with m.If(self.unit.valid & takes):
            m.d.sync += [word.eq(Mux(word == ahead - 1, 0, word + 1)), begins.eq(word != ahead - 1)]
            m.d.sync += [held.eq(Mux(word == i, self.unit.payload.data, held)) for i, held in enumerate(words)]
        with m.Elif(self.rest.valid & self.rest.ready & self.packed):
            m.d.sync += [number.eq(Mux(number == behind - 1, 0, number + 1)), begins.eq(number == behind - 1)]
        return m


class WeightExpander(wiring.Component):
    """Writes a unit to wgt, three cycles later: as it is, or expanded to several.

    Members
    -------
    write : In(WritePort)   of wgt, with one unit of data; where it is to `expand`, the mask has a bit for each.
    expand : In(1)          whether its data are packed weights.
    factors : In            theirs, less one.
    wgt : Out(WritePort)
    """

    def __init__(self, cfg: Config) -> None:
        pad = scratchpads(cfg)["wgt"]
        self._packing, self._grain = packing(cfg), pad.grain
        super().__init__({
            "write": In(WritePort(pad.address_bits, pad.width, pad.grain)),
            "expand": In(1),
            "factors": In(FACTOR_BITS * self._packing.unit_factors),
            "wgt": Out(write_port(pad)),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        write, wgt, lanes, data_ = (
            self.write,
            self.wgt,
            self._packing.times * self._packing.unit,
            self.write.data[: self._grain],
        )
        for stage in range(EXPAND_STAGES):
            enable, addr, mask = Signal(name=f"enable{stage}"), Reg(len(wgt.addr)), Reg(len(wgt.mask))
            m.d.sync += [enable.eq(write.en), addr.eq(write.addr), mask.eq(write.mask)]
            write = WritePort(len(addr), len(wgt.data), self._grain).create()
            m.d.comb += [write.en.eq(enable), write.addr.eq(addr), write.mask.eq(mask)]
        bits = self._packing.bits
        # First what a product is made of: what is not expanded and multiples of 0, or nothing and those of a factor.
        tables = [_multiples(m, bits, self.expand, self.factors.word_select(i, FACTOR_BITS), i)
                  for i in range(self._packing.unit_factors)]  # fmt: skip
        word, plain, bytes_ = Reg(self._grain), Reg(self._grain), []
        m.d.sync += [word.eq(data_), plain.eq(Mux(self.expand, 0, data_))]
        for lane in range(lanes):
            times, byte = tables[lane * len(tables) // lanes], plain.word_select(lane % self._packing.unit, 8)
            bytes_.append(_product(m, times, word.word_select(lane, bits), byte))
        result = Reg(8 * lanes)
        m.d.sync += result.eq(Cat(bytes_))
        m.d.comb += [
            self.write.ready.eq(1), wgt.en.eq(write.en), wgt.addr.eq(write.addr), wgt.mask.eq(write.mask),
            wgt.data.eq(result.replicate(len(wgt.data) // len(result))),
        ]  # fmt: skip
        return m


def _multiples(m: Module, bits: int, expand: Value, factor: Value, number: int) -> list[Signal]:
    """What QUOTIENTS count times k of `factor`, k - 1, a cycle later; of four bits 0, k, 2 k and 3 k, and 0, k, -2 k
    and -k a cycle after that. All are 0 where nothing is to be expanded. They are looked up: four bits are few."""
    found = []
    for place, times in enumerate((0, 1, 2, 3, 0, 1, -2, -1) if bits == 4 else QUOTIENTS[bits]):
        value = Reg(8, name=f"times{number}_{place}")
        values = Array(Const(times * (k + 1) & 255, 8) for k in range(FACTORS))
        m.d.sync += value.eq(Mux(expand, values[factor], 0))
        if place >= 4:
            held = Reg(8, name=f"held{number}_{place}")
            m.d.sync += held.eq(value)
            value = held
        found.append(value)
    return found


def _product(m: Module, times: list[Signal], weight: Value, plain: Value) -> Value:
    """A byte: `plain`, or, where that is 0, `weight` times k. Of four bits first the lower two times k, then, four
    times as much, the upper two: with the sign of the weight they count 0, 1, -2 and -1."""
    low, upper = Reg(8), Reg(2)
    if len(weight) < 4:
        m.d.sync += low.eq(Array(times)[weight] | plain)
        return low
    m.d.sync += [low.eq(Array(times[:4])[weight[:2]] | plain), upper.eq(weight[2:])]
    return Cat(low[:2], (low[2:] + Array(times[4:])[upper][:6])[:6])
