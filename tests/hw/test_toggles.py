"""Check the counter of toggles with the waveform of a binary counter, whose toggles are known."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import bench
import cocotb
import pytest
from amaranth import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from cocotb.triggers import ClockCycles

pytestmark = pytest.mark.rtl
CYCLES, BITS = 256, 8


class Counter(wiring.Component):
    """Count while `enable` is 1, and output the number."""

    def __init__(self) -> None:
        super().__init__({"enable": In(1), "o": Out(BITS)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        number = Signal(BITS)
        with m.If(self.enable):
            m.d.sync += number.eq(number + 1)
        m.d.comb += self.o.eq(number)
        return m


@cocotb.test()
async def counts_up(dut: bench.Dut) -> None:
    await bench.start(dut)
    await bench.rise(dut)
    dut.enable.value = 1
    await ClockCycles(dut.clk, CYCLES)
    dut.enable.value = 0
    await ClockCycles(dut.clk, CYCLES)


@pytest.mark.parametrize("sim", ["verilator"])
def test_a_counter_toggles_as_often_as_it_must(sim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running binary counter of n bits toggles 2 (2**n - 1) / 2**n bits a cycle on average; a stopped one, none."""
    from benchmarks.toggles import toggles  # the simulation, which reads this file too, has no such package

    monkeypatch.setenv("CELOSIA_WAVES", "1")
    bench.run(partial(Counter), __file__, only=["counts_up"], sim=sim)
    _, wave = bench.WAVES.pop()
    enable = ("$rootio", "enable")

    def works(values: Mapping[tuple[str, ...], int]) -> bool:
        return values[enable] == 1

    with wave.open() as lines:
        counted = toggles(
            lines, lambda name: "counter" if name[-1] == "number" else None, ("$rootio", "clk"), {"counter": works},
            [enable],
        )["counter"]  # fmt: skip
    assert counted.bits == BITS and counted.working_cycles == CYCLES and counted.waiting_cycles >= CYCLES - 2
    # The toggles of the last step appear in the first cycle in which the counter stands.
    assert counted.working + counted.waiting == 2 * (2**BITS - 1) and counted.waiting <= BITS
