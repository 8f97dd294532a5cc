"""The array of multiply-accumulate cells: pairs of products (pair.py), adder trees, and running sums."""

from __future__ import annotations

from collections.abc import Sequence

from amaranth import Cat, ClockSignal, Instance, Module, Mux, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.gemm_core.pair import FACTORS_BITS, SPACING, Pair, packed_weights
from celosia.hw.gemm_core.pump import DoublePumpedClock, pumps
from celosia.hw.lib.layout import array_layout
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.pipeline import PAIR_STAGES, array_stages
from celosia.hw.spec.scratchpads import scratchpads

MODEL = "celosia_array_model"
"""Name of the Verilog module that replaces the array's arithmetic on platform `SimulationPlatform`."""


class SimulationPlatform:
    """Amaranth platform on which module MODEL computes the array's sums, in C++ for speed (sim/rtl/array_model.py)."""


class Array(wiring.Component):
    """Multiply int8 [batch, block_in] by int8 [block_out, block_in] transposed in each cycle, and sum over cycles.

    Inputs, products, every level of the adder trees and the running sums are registers. The registers of a stage are
    enabled only for valid data.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    valid : In(1)      `inp` and `wgt` hold operands.
    first : In(1)      The operands begin a new sum; else they are added to the present one.
    inp : In(int8[block_in/group][batch][group])        An entry of scratchpad inp.
    wgt : In(int8[block_in/group][block_out][group])    An entry of wgt.
    total : Out(int32[block_out/group][batch][group])   The sum up to the operands of `latency` cycles ago, wrapping: an
                                                        entry of acc.
    """

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        pads = scratchpads(cfg)
        super().__init__({
            "valid": In(1),
            "first": In(1),
            "inp": In(array_layout(signed(8), pads["inp"].shape)),
            "wgt": In(array_layout(signed(8), pads["wgt"].shape)),
            "total": Out(array_layout(signed(32), pads["acc"].shape)),
        })  # fmt: skip

    @property
    def latency(self) -> int:
        """Cycles from operands to the sum that includes them."""
        return array_stages(self.cfg)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        # Bit i belongs to stage i. The stages are those of the pairs, those of the tree, and at last that of the sums.
        valid = Signal(self.latency - 1)
        first = Signal(self.latency - 1)
        m.d.sync += [valid.eq((valid << 1) | self.valid), first.eq((first << 1) | self.first)]

        if isinstance(platform, SimulationPlatform):
            m.submodules.model = Instance(
                MODEL, p_STAGES=len(valid), i_clk=ClockSignal(), i_enter=self.valid, i_inp=self.inp, i_wgt=self.wgt,
                i_leave=valid[-1], i_first=first[-1], o_total=self.total,
            )  # fmt: skip
            return m

        cfg, group = self.cfg, self.cfg.group
        self._pump = DoublePumpedClock() if pumps(platform, cfg.pump) is not None else None
        if self._pump is not None:
            m.submodules.pump = self._pump
            m.d.comb += self._pump.moves.eq(valid)
        for b in range(cfg.batch):
            row = [self.inp[i // group][b][i % group] for i in range(cfg.block_in)]
            for output, term in enumerate(self._build_products(m, valid, row, f"{b}")):
                total = Reg(signed(32), name=f"total_{b}_{output}")
                m.d.comb += self.total[output // group][b][output % group].eq(total)
                with m.If(valid[-1]):
                    m.d.sync += total.eq(Mux(first[-1], 0, total) + term)
        return m

    def _build_products(self, m: Module, valid: Signal, row: list[Value], name: str) -> list[Value]:
        """Build the products of one batch row with all weights. Returns, for each output, their sum in this step.

        valid: a bit for each stage. row: int8[block_in]. name: suffix of the names of signals. With `packed`, one
        multiplication makes the products of two neighbouring outputs.
        """
        cfg = self.cfg
        inputs = [divmod(i, cfg.group) for i in range(cfg.block_in)]
        weights = [[self.wgt[piece][o][lane] for piece, lane in inputs] for o in range(cfg.block_out)]
        if not cfg.packed:
            return [
                self._build_tree(
                    m, valid, self._build_pairs(m, valid, row, weights_of_output, [], f"{name}_{o}"), f"{name}_{o}"
                )
                for o, weights_of_output in enumerate(weights)
            ]
        terms: list[Value] = []
        factors = self._add_factors(m, row, name)
        for o in range(0, cfg.block_out, 2):
            packed_pairs = [packed_weights(high, low) for low, high in zip(weights[o], weights[o + 1])]
            pairs = self._build_pairs(m, valid, row, packed_pairs, factors, f"{name}_{o}")
            even = self._build_tree(m, valid, [pair[:SPACING] for pair in pairs], f"{name}_{o}")
            terms.append(Cat(even[:-1], ~even[-1]).as_signed())  # inverted, the top bit subtracts the 2^16 of all pairs
            terms.append(self._build_tree(m, valid, [pair[SPACING:].as_signed() for pair in pairs], f"{name}_{o + 1}"))
        return terms

    def _add_factors(self, m: Module, row: list[Value], name: str) -> list[Value]:
        """Return the sum of each two neighbouring inputs of `row`, a cycle later: port `factors` of packed pairs."""
        inp = Reg(data.ArrayLayout(signed(8), len(row)), name=f"inp_{name}")
        with m.If(self.valid):
            m.d.sync += inp.eq(Cat(row))
        inputs = [inp[i] for i in range(len(row))]
        return [(low + high)[:FACTORS_BITS].as_signed() for low, high in zip(inputs[::2], inputs[1::2])]

    def _build_pairs(
        self, m: Module, valid: Signal, row: list[Value], weights: list[Value], factors: list[Value], name: str
    ) -> list[Value]:
        """Build a `Pair` for each two neighbours of `row` and their weights. Returns the pairs' sums.

        factors: for packed pairs, see `_add_factors`; else empty.
        """
        sums = []
        for i in range(0, len(row), 2):
            m.submodules[f"pair_{name}_{i}"] = pair = Pair(self.cfg.packed, self.cfg.pump)
            m.d.comb += [
                pair.moves.eq(Cat(self.valid, valid)),
                pair.weights0.eq(weights[i]), pair.factor0.eq(row[i]),
                pair.weights1.eq(weights[i + 1]), pair.factor1.eq(row[i + 1]),
            ]  # fmt: skip
            if factors:
                m.d.comb += pair.factors.eq(factors[i // 2])
            if self._pump is not None:
                m.d.comb += [pair.halves.eq(self._pump.halves), pair.late.eq(self._pump.late)]
            sums.append(pair.sum)
        return sums

    def _build_tree(self, m: Module, valid: Signal, terms: Sequence[Value], name: str) -> Value:
        """Build an adder tree with a register behind each level. Returns the sum of `terms`."""
        stage = PAIR_STAGES
        while len(terms) > 1:
            sums = [a + b for a, b in zip(terms[::2], terms[1::2])]
            terms = [Reg(term.shape(), name=f"sum{stage}_{name}_{i}") for i, term in enumerate(sums)]
            with m.If(valid[stage - 1]):
                m.d.sync += [register.eq(term) for register, term in zip(terms, sums)]
            stage += 1
        return terms[0]
