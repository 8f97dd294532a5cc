"""Compare the requantiser with `sim.reference.requantise`: random operands, near-ties, every shift, large sums."""

from __future__ import annotations

from functools import partial
from typing import Any

import bench
import cocotb
import numpy as np
import pytest
from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from numpy.typing import NDArray

from celosia.hw.spec.pipeline import REQUANTISE_STAGES
from celosia.hw.vector_unit.requantise import RESULT_BITS, Requantise
from celosia.sim.functional.reference import requantise

LANES = 8
Int64 = NDArray[np.int64]


class Lanes(wiring.Component):
    """LANES requantisers side by side, so that one cycle of the simulation tests several operands."""

    def __init__(self) -> None:
        super().__init__({
            "enable": In(REQUANTISE_STAGES), "bypass": In(1), "v": In(32 * LANES), "param": In(64 * LANES),
            "result": Out(16 * LANES),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        for i in range(LANES):
            m.submodules[f"lane{i}"] = lane = Requantise()
            m.d.comb += [
                lane.enable.eq(self.enable),
                lane.bypass.eq(self.bypass),
                lane.v.eq(self.v.word_select(i, 32).as_signed()),
                lane.param.eq(self.param.word_select(i, 64)),
                self.result.word_select(i, 16).as_signed().eq(lane.result),
            ]
        return m


@pytest.mark.rtl
def test_requantise() -> None:
    bench.run(partial(Lanes), __file__)


@pytest.mark.parametrize("case", ["near_ties", "exact_ties", "large", "small_multipliers"])
def test_operands_find_a_plainly_rounded_product(case: str) -> None:
    """The operands detect a planted fault: a requantiser that rounds the exact product."""
    values = operands(case, np.random.default_rng(1), 20_000)
    v, bias, multiplier, shift = values
    total = (v + bias).astype(np.int32).astype(np.longdouble)
    plain = np.clip(np.rint(total * multiplier / np.exp2(shift.astype(np.longdouble))), -256, 256)
    assert (plain != expected(case, values)).sum() > 100


def parameters(bias: Int64, multiplier: Int64, shift: Int64) -> NDArray[np.uint64]:
    """Return entries of par, with random values in the two unused bits."""
    bits = bias.astype(np.int32).view(np.uint32).astype(np.uint64)
    bits |= multiplier.astype(np.uint64) << np.uint64(32) | shift.astype(np.uint64) << np.uint64(56)
    return bits | (bias.astype(np.uint64) & np.uint64(3)) << np.uint64(62)


def _normalised(rng: np.random.Generator, count: int) -> Int64:
    return np.where(rng.random(count) < 0.02, 0, rng.integers(1 << 23, 1 << 24, count))


def operands(case: str, rng: np.random.Generator, count: int) -> tuple[Int64, Int64, Int64, Int64]:
    """Draw v, bias, multiplier and shift; v may wrap around, because only v + bias matters."""
    multiplier = _normalised(rng, count)
    quotient = rng.integers(-300, 301, count)
    bias = rng.integers(-(1 << 31), 1 << 31, count)
    if case in ("random", "bypass"):
        total = rng.integers(-(1 << 31), 1 << 31, count) >> rng.integers(0, 32, count)
        shift = rng.integers(0, 64, count)
    elif case == "near_ties":  # sums next to a tie, for each shift that has ties
        shift = rng.integers(15, 55, count)
        total = _solve(quotient, multiplier, shift) + rng.integers(-1, 2, count)
    elif case == "exact_ties":  # multipliers with many zeros hit ties, and miss them by a float32's rounding
        multiplier = (1 << 23) + (rng.integers(0, 2, count) << rng.integers(0, 23, count)) + rng.integers(0, 2, count)
        shift = rng.integers(20, 55, count)
        total = _solve(quotient, multiplier, shift)
    elif case == "large":  # accumulators of more than 24 bits next to a tie, and the ends of int32
        shift = rng.integers(46, 55, count)
        total = _solve(quotient, multiplier, shift) + rng.integers(-300, 301, count)
        total = np.where(rng.random(count) < 0.05, rng.integers(-3, 4, count) - (1 << 31), total)
        total = np.where(rng.random(count) < 0.05, (1 << 24 + rng.integers(0, 8, count)) - 1, total)
    else:
        multiplier = rng.integers(0, 1 << 24, count) >> rng.integers(0, 24, count)
        shift = rng.integers(0, 64, count)
        total = np.where(rng.random(count) < 0.5, _solve(quotient, multiplier, shift), total_bits(rng, count))
    return (total if case == "bypass" else total - bias), bias, multiplier, shift


def total_bits(rng: np.random.Generator, count: int) -> Int64:
    return rng.integers(-(1 << 31), 1 << 31, count) >> rng.integers(0, 32, count)


def _solve(quotient: Int64, multiplier: Int64, shift: Int64) -> Int64:
    """Return the integer nearest to the sum whose result is `quotient` and a half."""
    exact = (quotient + 0.5) * np.exp2(shift) / np.maximum(multiplier, 1)
    return np.rint(np.clip(exact, -(2.0**31), 2.0**31 - 1)).astype(np.int64)


def expected(case: str, values: tuple[Int64, ...]) -> Int64:
    v, bias, multiplier, shift = values
    wrapped = v.astype(np.int32)
    full = (
        wrapped.astype(np.int64) if case == "bypass" else requantise(wrapped, bias.astype(np.int32), multiplier, shift)
    )
    return np.clip(full, -256, 256)


def words(values: NDArray[Any]) -> list[int]:
    """Pack the lanes into one integer for each cycle."""
    return bench.pack(values.reshape(-1, LANES))


@cocotb.test()
@cocotb.parametrize(case=["random", "near_ties", "exact_ties", "large", "small_multipliers", "bypass"])
async def equals_reference(dut: Any, case: str) -> None:
    cycles, rng = bench.tries(8000), bench.generator()
    values = operands(case, rng, cycles * LANES)
    v, param = words(values[0].astype(np.int32)), words(parameters(*values[1:]))
    await bench.start(dut)
    dut.enable.value = (1 << REQUANTISE_STAGES) - 1
    dut.bypass.value = int(case == "bypass")
    results = []
    for cycle in range(cycles + REQUANTISE_STAGES):
        if cycle < cycles:
            dut.v.value, dut.param.value = v[cycle], param[cycle]
        await bench.fall(dut)
        results.append(bench.value(dut.result))
        await bench.rise(dut)
    got = bench.unpack(results[REQUANTISE_STAGES:], np.zeros((cycles, LANES), np.int16)).reshape(-1)
    wanted = expected(case, values)
    different = np.flatnonzero(got != wanted)
    if different.size:
        i = different[0]
        raise AssertionError(
            f"{different.size} differ, first: {[int(value[i]) for value in values]} gives {got[i]}, not {wanted[i]}"
        )
    assert RESULT_BITS <= 16 and np.unique(wanted).size > 400


@cocotb.test()
async def keeps_what_is_not_enabled(dut: Any) -> None:
    """Values pass through the stages one at a time, while only the stage that needs it is enabled."""
    rng = bench.generator()
    values = operands("random", rng, LANES)
    await bench.start(dut)
    dut.v.value, dut.param.value = words(values[0].astype(np.int32))[0], words(parameters(*values[1:]))[0]
    for stage in range(REQUANTISE_STAGES):
        dut.enable.value = 1 << stage
        await bench.rise(dut)
        dut.enable.value = 0
        dut.v.value, dut.param.value = 0, 0
        await bench.cycles(dut, int(rng.integers(0, 3)))
    await bench.fall(dut)
    results = bench.unpack([bench.value(dut.result)], np.zeros((1, LANES), np.int16))[0]
    assert (results == expected("random", values)).all()
