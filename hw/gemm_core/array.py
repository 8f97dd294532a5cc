"""The array of multiply-accumulate cells."""

from __future__ import annotations

from amaranth import Module, Mux, Signal, Value, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.config import Config
from celosia.hw.layout import widths


class Array(wiring.Component):
    """Multiplies [batch, block_in] int8 by [block_out, block_in] int8 transposed, each cycle, and sums over the cycles.

    Inputs, products, every second level of the adder trees and the running sums are registers. Each stage moves only
    with valid data in it.

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
        self.tree_stages = cfg.block_in.bit_length() // 2  # two of the log2(block_in) levels each
        super().__init__({
            "valid": In(1),
            "first": In(1),
            "inp": In(widths(cfg)["inp"]),
            "wgt": In(widths(cfg)["wgt"]),
            "total": Out(widths(cfg)["acc"]),
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

        inp, wgt = Signal(self.inp.shape(), reset_less=True), Signal(self.wgt.shape(), reset_less=True)
        with m.If(self.valid):
            m.d.sync += [inp.eq(self.inp), wgt.eq(self.wgt)]

        group = cfg.group
        for b in range(cfg.batch):
            row = [inp.word_select((i // group * cfg.batch + b) * group + i % group, 8) for i in range(cfg.block_in)]
            for o in range(cfg.block_out):
                terms: list[Value] = []
                with m.If(valid[0]):
                    for i in range(cfg.block_in):
                        product = Signal(signed(16), name=f"product_{b}_{o}_{i}", reset_less=True)
                        weight = wgt.word_select(o * cfg.block_in + i, 8)
                        m.d.sync += product.eq(row[i].as_signed() * weight.as_signed())
                        terms.append(product)
                for stage in range(1, 1 + self.tree_stages):
                    with m.If(valid[stage]):
                        terms = [terms[i] + terms[i + 1] for i in range(0, len(terms), 2)]
                        if len(terms) > 1:
                            terms = [terms[i] + terms[i + 1] for i in range(0, len(terms), 2)]
                        sums = [
                            Signal(term.shape(), name=f"sum{stage}_{b}_{o}_{i}", reset_less=True)
                            for i, term in enumerate(terms)
                        ]
                        m.d.sync += [total.eq(term) for total, term in zip(sums, terms)]
                        terms = sums
                lane = (o // group * cfg.batch + b) * group + o % group
                total = Signal(signed(32), name=f"total_{b}_{o}", reset_less=True)
                m.d.comb += self.total.word_select(lane, 32).eq(total)
                with m.If(valid[-1]):
                    m.d.sync += total.eq(Mux(first[-1], 0, total) + terms[0])
        return m
