"""Compare the norm engine with its integer arithmetic, and that arithmetic with the real numbers."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from math import isqrt
from typing import Any

import bench
import cocotb
import numpy as np
import pytest
from numpy.typing import NDArray
from thorough import some, tries

from celosia.hw.spec.config import Config
from celosia.hw.spec.pipeline import EPSILON_SHIFT, MAX_NORM_ELEMENTS, MAX_NORM_ROWS, NORM_FRACTION, ROOT_BITS
from celosia.hw.vector_unit.norm.engine import NormEngine
from celosia.hw.vector_unit.norm.factors import row_layout
from celosia.sim.functional.norm import factors, inverse_root, normalise_rows
from celosia.sim.functional.reference import requantise
from celosia.sim.timing.engine_cycles import norm_cycles

Int8 = NDArray[np.int8]


def config(block_out: int, lanes: int) -> Config:
    return Config(block_in=block_out, block_out=block_out, norm=lanes, vin_depth=4096)


CONFIGS = {"1 of 4": config(4, 1), "4 of 4": config(4, 4), "2 of 8": config(8, 2), "8 of 16": config(16, 8)}


@pytest.mark.rtl
@pytest.mark.parametrize("name", some(CONFIGS, ["2 of 8"]))
def test_rows(name: str) -> None:
    cfg = CONFIGS[name]
    bench.run(partial(NormEngine, cfg), __file__, cfg=cfg)


def random_row(rng: np.random.Generator, count: int) -> Int8:
    """Draw a row of random deviation: all byte values, a few, two, all equal but one, or all equal."""
    middle = int(rng.integers(-128, 128))
    kinds = (
        lambda: rng.integers(-128, 128, count),
        lambda: rng.normal(middle, 10 ** rng.uniform(-1, 1.7), count),
        lambda: rng.choice([-128, 127], count),
        lambda: np.where(np.arange(count) == rng.integers(count), rng.integers(-128, 128), middle),
        lambda: np.full(count, middle),
    )
    return np.clip(kinds[int(rng.integers(len(kinds)))](), -128, 127).astype(np.int8)


def random_epsilon(rng: np.random.Generator, count: int) -> int:
    """Draw an epsilon, often 0, of any magnitude at which results are still precise."""
    return int(rng.integers(2)) * min(int(2 ** rng.uniform(0, 47.9)) // 2, count**2 << 37)


def furthest(normalise: Any) -> float:
    """Return the largest error of `normalise` against the real numbers, as a share of the proven bound."""
    rng, worst = np.random.default_rng(1), 0.0
    for number in range(600):
        count = int(rng.choice([2, 3, 16, 100, 384, 768, MAX_NORM_ELEMENTS]))
        row, centre, epsilon = random_row(rng, count), bool(number % 2), random_epsilon(rng, count)
        offset = 0 if centre else int(rng.integers(-128, 129))
        normalised = normalise(row[None], count, offset, centre, epsilon)[0].tolist()
        u = row.astype(np.int64) + offset
        total = int(u.sum()) if centre else 0
        variance = (count * int((u * u).sum()) - total**2 << EPSILON_SHIFT) + epsilon
        if not variance:
            assert not any(normalised)
            continue
        deviation = isqrt(variance << 160 - EPSILON_SHIFT)  # with 80 bits behind the point
        for place in rng.integers(0, count, 4).tolist():
            z = Fraction(count * int(u[place]) - total << 80, deviation)
            error = abs(Fraction(normalised[place], 1 << NORM_FRACTION) - z)
            worst = max(worst, float(error / (Fraction(152, 100) * abs(z) + Fraction(126, 100)) * (1 << 24)))
    return worst


def test_reference_is_near_the_real_numbers() -> None:
    assert furthest(normalise_rows) < 1


@pytest.mark.parametrize("centre", [True, False])
def test_results_are_rounded_as_real_numbers_are(centre: bool) -> None:
    """Results are rounded as the real numbers are, except for the few near a tie as `functional/norm.py` describes."""
    rng, wrong, places = np.random.default_rng(1), 0, 0
    for count in rng.choice([64, 384, 768], 40).tolist():
        x = np.clip(np.rint(rng.normal(rng.uniform(-20, 20), rng.uniform(1, 40), (16, count))), -128, 127)
        gamma, beta = rng.uniform(10, 100, count), rng.uniform(-40, 40, count)
        epsilon, offset = random_epsilon(rng, count), 0 if centre else int(rng.integers(-128, 129))
        v = normalise_rows(x.astype(np.int8), count, offset, centre, epsilon)
        mantissa, exponent = np.frexp(gamma)
        bias = np.rint(beta / gamma * (1 << NORM_FRACTION)).astype(np.int32)
        rounded = requantise(v, bias, np.rint(mantissa * (1 << 24)).astype(np.int64), 24 + NORM_FRACTION - exponent)
        u = (x + offset).astype(np.longdouble)
        total = u.sum(axis=1, keepdims=True) * centre
        variance = (
            count * (u * u).sum(axis=1, keepdims=True) - total * total + np.longdouble(epsilon) / 2**EPSILON_SHIFT
        )
        y = gamma * (count * u - total) / np.sqrt(variance)
        bound = (1.52 * np.abs(y) + 1.76 * gamma + 3.01 * np.abs(y + beta)) / (1 << 24)
        differs = (rounded != np.rint(y + beta)) & (np.abs(y + beta) < 255)
        assert (np.abs(np.abs(y + beta - np.floor(y + beta)) - 0.5)[differs] < bound[differs]).all()
        wrong, places = wrong + int(differs.sum()), places + differs.size
    assert wrong < 1e-5 * places


def test_a_factor_that_is_cut_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted error of 1 in a factor exceeds the bound."""

    def cut(*operands: Any) -> Any:
        factor, shift, less = factors(*operands)
        return factor - 1, shift, less

    monkeypatch.setattr("celosia.sim.functional.norm.factors", cut)
    assert furthest(normalise_rows) > 1


def test_inverse_root_is_cut_off() -> None:
    """The inverse root is rounded down, even if it is nearly an integer, where a double is wrong."""
    rng = np.random.default_rng(1)
    near_integers = (1 << 82) // rng.integers(1 << 25, 1 << 26, 3000).astype(object) ** 2
    words = np.concatenate([near_integers + d for d in (-1, 0, 1)] + [rng.integers(1 << 30, 1 << 32, 1000)])
    words = np.array([word for word in words if 1 << 30 <= word < 1 << 32], np.int64)
    expected = [min(isqrt((1 << 82) // word), (1 << ROOT_BITS) - 1) for word in words.tolist()]
    np.testing.assert_array_equal(inverse_root(words), expected)


# Inside the simulation ------------------------------------------------------------------------------------


class Machine:
    """The norm engine with a memory for vin, which holds rows one behind the other."""

    def __init__(self, dut: Any, cfg: Config) -> None:
        self.dut, self.cfg, self.rng = dut, cfg, bench.generator()
        self.vin = np.zeros((cfg.vin_depth, cfg.block_out), np.int8)
        self.words = bench.pack(self.vin)
        self.layout = NormEngine(cfg).fields.shape()

    async def start(self) -> None:
        await bench.start(self.dut, timeout=1_000_000)
        cocotb.start_soon(bench.memory(self.dut, self.words, ["vin"], []))

    def draw(self, rows: int, groups: int) -> dict[str, int]:
        """Draw rows, write them to vin, and return the fields of a norm over them."""
        rng, cfg = self.rng, self.cfg
        left_out = int(rng.integers(0, cfg.block_out))
        for row in range(rows):
            flat = random_row(rng, groups * cfg.block_out)
            self.vin[row * groups : (row + 1) * groups] = flat.reshape(groups, -1)
        self.words[:] = bench.pack(self.vin)
        return {
            "extent_n": groups, "extent_x": rows, "a_base": 0, "a_n": 1, "a_x": groups, "imm": left_out,
            "a_offset": int(rng.choice([0, -128, 128, rng.integers(-128, 129)])), "centre": int(rng.integers(2)),
            "scale_c": random_epsilon(rng, groups * cfg.block_out - left_out),
        }  # fmt: skip

    def offer(self, fields: dict[str, int]) -> None:
        bits = (((fields[name] & (1 << field.width) - 1) << field.offset) for name, field in self.layout)
        self.dut.fields.value = sum(bits)

    def expected_words(self, f: dict[str, int]) -> list[int]:
        """Return the word that the engine must store for each row."""
        rows, count = f["extent_x"], f["extent_n"] * self.cfg.block_out - f["imm"]
        u = self.vin[: rows * f["extent_n"]].reshape(rows, -1)[:, :count].astype(np.int64) + f["a_offset"]
        total = u.sum(axis=1) * f["centre"]
        mean = (2 * total + count) // (2 * count)
        variance = (count * (u * u).sum(axis=1) - total**2 << EPSILON_SHIFT) + f["scale_c"]
        row_words = []
        for row_mean, factor, shift, less in zip(mean, *factors(count, variance, total - count * mean), strict=True):
            values = {
                "offset": f["a_offset"] - row_mean << (shift & 1), "twice": shift & 1, "pairs": shift >> 1,
                "factor": factor, "rest": 64 - less,
            }  # fmt: skip
            row_words.append(sum((int(values[n]) & (1 << field.width) - 1) << field.offset for n, field in row_layout))
        return row_words

    async def run(self, rows: int, groups: int) -> None:
        """Run a norm; it must end in the cycle that `norm_cycles` predicts, with the right word for each row."""
        dut, fields = self.dut, self.draw(rows, groups)
        self.offer(fields)
        dut.start.value = 1
        cycles, ends = 0, False
        while not ends:
            await bench.rise(dut)
            dut.start.value = 0
            self.offer(dict.fromkeys(fields, 1))  # the fields are valid in the first cycle only
            await bench.fall(dut)
            cycles, ends = cycles + 1, bool(bench.value(dut.ends))
            assert dut.busy.value
        assert cycles == norm_cycles(self.cfg, rows, groups), cycles
        await bench.rise(dut)
        await bench.fall(dut)
        assert not dut.busy.value
        for number, expected in enumerate(self.expected_words(fields)):
            dut.wanted.value = number
            await bench.rise(dut)
            assert bench.value(dut.row) == expected, (number, fields, f"{bench.value(dut.row):x}, not {expected:x}")


@cocotb.test()
async def finds_of_each_row(dut: Any) -> None:
    cfg = bench.config()
    machine = Machine(dut, cfg)
    await machine.start()
    max_groups = MAX_NORM_ELEMENTS // cfg.block_out
    for rows, groups in [
        (1, 1),
        (MAX_NORM_ROWS, 1),
        (3, max_groups),
        *((int(machine.rng.integers(1, 9)), 5) for _ in range(tries(20))),
    ]:
        await machine.run(rows, min(groups, int(machine.rng.integers(1, max_groups + 1)) if groups == 5 else groups))


@cocotb.test()
async def halt_drops_everything(dut: Any) -> None:
    machine = Machine(dut, bench.config())
    await machine.start()
    for _ in range(tries(8)):
        machine.offer(machine.draw(12, 3))
        dut.start.value = 1
        await bench.rise(dut)
        dut.start.value = 0
        await bench.cycles(dut, int(machine.rng.integers(1, 300)))
        dut.halt.value = 1
        await bench.rise(dut)
        dut.halt.value = 0
        await bench.fall(dut)
        assert not dut.busy.value and not dut.ends.value
        await bench.cycles(dut, int(machine.rng.integers(1, 3)))
        await machine.run(4, 2)
