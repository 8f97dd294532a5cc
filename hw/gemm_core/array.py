"""The array of multiply-accumulate cells.

Where the Config says `packed`, two products with a common factor share one multiplication, as in Xilinx' white paper
WP486, so that a DSP48E1 with its 25 x 18 bits counts twice:

    (a * 2^17 + b + 128) * c  =  a*c * 2^17  +  b*c + 128*c        a, b, c: int8

b + 128 is b with its top bit flipped and has no sign, so the left factor is a concatenation that fits 25 bits. Products
are added in pairs, with 2^16 - 128*(c0 + c1) on top: then the lower 17 bits are b0*c0 + b1*c1 + 2^16, which is never
negative and below 2^17, and the bits above them a0*c0 + a1*c1. The pairs' 2^16 are taken off at the end.
"""

from __future__ import annotations

from amaranth import Cat, ClockSignal, Const, Instance, Module, Mux, Signal, Value, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.config import Config
from celosia.hw.scratchpads import scratchpads

SPACING = 17
"""Bits between two products in one multiplication: a sum of two products of int8 takes them all."""

MODEL = "celosia_array_model"
"""Name of the module that computes on the platform `Modelled`."""


class Modelled:
    """A platform that has a module for what the array computes, from the operands to the sums: a simulator that runs
    long (sim/array_model.py).
    """


class Array(wiring.Component):
    """Multiplies [batch, block_in] int8 by [block_out, block_in] int8 transposed, each cycle, and sums over the cycles.

    Inputs, products, every level of the adder trees and the running sums are registers. Each stage moves only with
    valid data in it.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    valid : In(1)      `inp` and `wgt` hold operands.
    first : In(1)      They begin a new sum.
    inp : In           An entry of scratchpad inp, [block_in/group][batch][group] int8.
    wgt : In           An entry of wgt, [block_out][block_in] int8.
    total : Out        The sum up to the operands of `latency` cycles ago, laid out as an entry of acc:
                       [block_out/group][batch][group] int32, wrapping.
    """

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.tree_stages = cfg.block_in.bit_length() - 1
        pads = scratchpads(cfg)
        super().__init__({
            "valid": In(1),
            "first": In(1),
            "inp": In(pads["inp"].width),
            "wgt": In(pads["wgt"].width),
            "total": Out(pads["acc"].width),
        })  # fmt: skip

    @property
    def latency(self) -> int:
        """Cycles from operands to the sum that includes them."""
        return self.tree_stages + 3

    def elaborate(self, platform: object) -> Module:
        m = Module()
        cfg = self.cfg
        # Bit i: of stage i. The stages are inputs, products, tree (several); then come the sums.
        valid, first = Signal(self.latency - 1), Signal(self.latency - 1)
        m.d.sync += [valid.eq((valid << 1) | self.valid), first.eq((first << 1) | self.first)]

        if isinstance(platform, Modelled):
            m.submodules.model = Instance(
                MODEL, p_STAGES=len(valid), i_clk=ClockSignal(), i_enter=self.valid, i_inp=self.inp, i_wgt=self.wgt,
                i_leave=valid[-1], i_first=first[-1], o_total=self.total,
            )  # fmt: skip
            return m

        inp, wgt = Signal(self.inp.shape(), reset_less=True), Signal(self.wgt.shape(), reset_less=True)
        with m.If(self.valid):
            m.d.sync += [inp.eq(self.inp), wgt.eq(self.wgt)]

        group = cfg.group
        for b in range(cfg.batch):
            row = [
                inp.word_select((i // group * cfg.batch + b) * group + i % group, 8).as_signed()
                for i in range(cfg.block_in)
            ]
            offsets = self._offsets(m, valid, row, f"{b}") if cfg.packed else []
            for o in range(0, cfg.block_out, 2):
                low, high = (wgt.word_select(output, 8 * cfg.block_in) for output in (o, o + 1))
                if cfg.packed:
                    pairs = self._packed_pairs(m, valid, row, low, high, offsets, f"{b}_{o}")
                    even = self._tree(m, valid, [pair[:SPACING] for pair in pairs], f"{b}_{o}")
                    even = Cat(even[:-1], ~even[-1]).as_signed()  # the offsets of all pairs are the top bit's worth
                    odd = self._tree(m, valid, [pair[SPACING:].as_signed() for pair in pairs], f"{b}_{o + 1}")
                else:
                    even = self._tree(m, valid, self._pairs(m, valid, row, low, f"{b}_{o}"), f"{b}_{o}")
                    odd = self._tree(m, valid, self._pairs(m, valid, row, high, f"{b}_{o + 1}"), f"{b}_{o + 1}")
                for output, term in ((o, even), (o + 1, odd)):
                    lane = (output // group * cfg.batch + b) * group + output % group
                    total = Signal(signed(32), name=f"total_{b}_{output}", reset_less=True)
                    m.d.comb += self.total.word_select(lane, 32).eq(total)
                    with m.If(valid[-1]):
                        m.d.sync += total.eq(Mux(first[-1], 0, total) + term)
        return m

    def _offsets(self, m: Module, valid: Signal, row: list[Value], name: str) -> list[Signal]:
        """What is added to each pair of packed products."""
        offsets = []
        with m.If(valid[0]):
            for i in range(0, len(row), 2):
                offset = Signal(SPACING, name=f"offset_{name}_{i}", reset_less=True)
                m.d.sync += offset.eq((1 << (SPACING - 1)) - ((row[i] + row[i + 1]) << 7))
                offsets.append(offset)
        return offsets

    def _pairs(self, m: Module, valid: Signal, row: list[Value], weights: Value, name: str) -> list[Value]:
        """Sums of two products each: of `row` with the weights of an output."""
        products, pairs = [], []
        with m.If(valid[0]):
            for i, factor in enumerate(row):
                product = Signal(signed(16), name=f"product_{name}_{i}", reset_less=True)
                m.d.sync += product.eq(factor * weights.word_select(i, 8).as_signed())
                products.append(product)
        with m.If(valid[1]):
            for i in range(0, len(products), 2):
                pair = Signal(signed(17), name=f"pair_{name}_{i}", reset_less=True)
                m.d.sync += pair.eq(products[i] + products[i + 1])
                pairs.append(pair)
        return pairs

    def _packed_pairs(
        self, m: Module, valid: Signal, row: list[Value], low: Value, high: Value, offsets: list[Signal], name: str
    ) -> list[Signal]:
        """Sums of two packed products each, with their offset: of `row` with the weights of two outputs."""
        products = []
        with m.If(valid[0]):
            for i, factor in enumerate(row):
                a, b = high.word_select(i, 8), low.word_select(i, 8)
                weights = Cat(b[:7], ~b[7], Const(0, SPACING - 8), a).as_signed()
                product = Signal(signed(len(weights) + 8), name=f"product_{name}_{i}", reset_less=True)
                m.d.sync += product.eq(weights * factor)
                products.append(product)
        pairs = []
        with m.If(valid[1]):
            for i, offset in enumerate(offsets):
                pair = Signal(signed(2 * SPACING), name=f"pair_{name}_{i}", reset_less=True)
                m.d.sync += pair.eq(products[2 * i] + offset + products[2 * i + 1])
                pairs.append(pair)
        return pairs

    def _tree(self, m: Module, valid: Signal, terms: list[Value], name: str) -> Value:
        """The sum of `terms`, one level a stage."""
        for stage in range(2, 1 + self.tree_stages):
            sums = [terms[i] + terms[i + 1] for i in range(0, len(terms), 2)]
            terms = [
                Signal(term.shape(), name=f"sum{stage}_{name}_{i}", reset_less=True) for i, term in enumerate(sums)
            ]
            with m.If(valid[stage]):
                m.d.sync += [register.eq(term) for register, term in zip(terms, sums)]
        return terms[0]
