"""Packed weights on their way to wgt: `hw/packing.py` says how they lie in DRAM, `sim/packing.py` what they mean."""

from __future__ import annotations

from amaranth import Array, Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from celosia.hw.config import Config
from celosia.hw.layout import ERROR_BITS, WritePort, write_port
from celosia.hw.packing import FACTORS, packing
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
    factors : Out           of `rest`, less one. An error of factors is one of the weights behind them.
    """

    def __init__(self, cfg: Config) -> None:
        self._packing = packing(cfg)
        unit = stream.Signature(unit_layout(cfg.bus_bytes))
        bits = FACTOR_BITS * self._packing.unit_factors
        super().__init__({"unit": In(unit), "packed": In(1), "rest": Out(unit), "factors": Out(bits)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        ahead, behind = self._packing.units
        begins, failed = Signal(init=1), Signal(ERROR_BITS)  # factors come next; the error of some
        word, number = Signal(range(max(2, ahead))), Signal(range(max(2, behind)))
        words = [Reg(len(self.unit.payload.data), name=f"factors{i}") for i in range(ahead)]
        takes, error = self.packed & begins, self.unit.payload.error
        own = max(1, self._packing.run // (2 * self._packing.unit))  # units that have the same factors
        last = self._packing.groups // self._packing.unit_factors * own
        m.d.comb += [
            self.rest.valid.eq(self.unit.valid & ~takes),
            self.rest.payload.data.eq(self.unit.payload.data),
            self.rest.payload.error.eq(Mux(error == Error.NONE, failed, error)),
            self.unit.ready.eq(takes | self.rest.ready),
            self.factors.eq(Cat(words).word_select((number % last) >> exact_log2(own), len(self.factors))),
        ]
        with m.If(self.unit.valid & takes):
            m.d.sync += [word.eq(Mux(word == ahead - 1, 0, word + 1)), begins.eq(word != ahead - 1)]
            m.d.sync += [held.eq(Mux(word == i, self.unit.payload.data, held)) for i, held in enumerate(words)]
            m.d.sync += failed.eq(Mux(failed == Error.NONE, error, failed))
        with m.Elif(self.rest.valid & self.rest.ready & self.packed):
            m.d.sync += [number.eq(Mux(number == behind - 1, 0, number + 1)), begins.eq(number == behind - 1)]
        return m


class WeightExpander(wiring.Component):
    """Writes a unit to wgt, a cycle later: as it is, or expanded to two.

    Members
    -------
    write : In(WritePort)   of wgt, with one unit of data; where it is to `expand`, the mask has two bits.
    expand : In(1)          whether its data are weights of four bits.
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
        write, wgt, lanes = self.write, self.wgt, 2 * self._packing.unit
        word = write.data[: self._grain]
        tables = [_multiples(m, self.expand, self.factors.word_select(i, FACTOR_BITS), i)
                  for i in range(self._packing.unit_factors)]  # fmt: skip
        plain = Signal.like(word)
        m.d.comb += [plain.eq(Mux(self.expand, 0, word)), write.ready.eq(1)]
        result = Reg(8 * lanes)
        bytes_ = [
            _product(tables[lane * len(tables) // lanes], word.word_select(lane, 4), plain.word_select(lane % (lanes // 2), 8))
            for lane in range(lanes)
        ]
        for port, value in ((wgt.addr, write.addr), (wgt.mask, write.mask)):
            held = Reg(len(port))
            m.d.sync += held.eq(value)
            m.d.comb += port.eq(held)
        enable = Signal()
        m.d.sync += [enable.eq(write.en), result.eq(Cat(bytes_))]
        m.d.comb += [wgt.en.eq(enable), wgt.data.eq(result.replicate(len(wgt.data) // len(result)))]
        return m


def _multiples(m: Module, expand: Value, factor: Value, number: int) -> dict[int, Signal]:
    """k, 2 k, 3 k, -k and -2 k of `factor`, k - 1; 0 where nothing is to be expanded. Looked up: four bits are few."""
    found = {}
    for times in (1, 2, 3, -1, -2):
        found[times] = Signal(8, name=f"times{number}_{'minus' * (times < 0)}{abs(times)}")
        values = Array(Const(times * (k + 1) & 255, 8) for k in range(FACTORS))
        m.d.comb += found[times].eq(Mux(expand, values[factor], 0))
    return found


def _product(times: dict[int, Signal], weight: Value, plain: Value) -> Value:
    """A byte: `plain`, or, where that is 0, `weight` times k. The upper two bits of the weight, less two, are
    multiplied by 4 k: with the sign of the weight they count -8, 0 and 4."""
    low = Mux(weight[1], Mux(weight[0], times[3], times[2]), Mux(weight[0], times[1], 0))
    high = Mux(weight[3], Mux(weight[2], times[-1], times[-2]), Mux(weight[2], times[1], 0))
    low = low | plain
    return Cat(low[:2], (low[2:] + high[:6])[:6])
