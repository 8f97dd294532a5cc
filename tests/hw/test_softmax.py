"""Compare the softmax engine with onnxruntime's arithmetic, and its adder and divider with float32."""

from __future__ import annotations

from functools import partial
from typing import Any

import bench
import cocotb
import numpy as np
import pytest
from amaranth import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from numpy.typing import NDArray
from thorough import some, tries

from celosia.compiler.numerics.tables import qlinear_softmax, softmax_powers
from celosia.hw.spec.config import Config
from celosia.hw.spec.pipeline import DIVIDE_STAGES, SOFTMAX_OFFER_CYCLES, SOFTMAX_SUMS, softmax_span, tile_rows
from celosia.hw.vector_unit.softmax.adder import PairAdder, pair_of
from celosia.hw.vector_unit.softmax.addresses import fields_layout
from celosia.hw.vector_unit.softmax.divider import TO_DIVISION, PairDivider
from celosia.hw.vector_unit.softmax.engine import SoftmaxEngine
from celosia.sim.functional.softmax import add_pairs, pairs_of, softmax_rows
from celosia.sim.timing.compute import SoftmaxTiming
from celosia.sim.timing.engine_cycles import softmax_cycles
from celosia.sim.timing.work import NEVER

f32, u32 = np.float32, np.uint32
Float32, Words = NDArray[np.float32], NDArray[np.uint32]
LANES = 8


class Adders(wiring.Component):
    """LANES adders side by side, so that one cycle of the simulation tests several additions."""

    def __init__(self) -> None:
        super().__init__({
            "first": In(LANES), "nothing": In(LANES), "addend": In(32 * LANES), "total": Out(32 * LANES),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        for i in range(LANES):
            m.submodules[f"adder{i}"] = adder = PairAdder()
            m.d.comb += [
                adder.first.eq(self.first[i]), adder.nothing.eq(self.nothing[i]),
                adder.addend.eq(pair_of(self.addend.word_select(i, 32))),
                self.total.word_select(i, 32).eq(adder.total),
            ]  # fmt: skip
        return m


class Dividers(wiring.Component):
    """LANES dividers side by side, each with its own divisor, which arrives with the share."""

    def __init__(self) -> None:
        super().__init__({
            "take": In(1), "share": In(32 * LANES), "divisor": In(32 * LANES), "beyond": In(LANES),
            "result": Out(8 * LANES),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        for i in range(LANES):
            m.submodules[f"divider{i}"] = divider = PairDivider()
            divisor = Signal.like(divider.share)
            delayed = [divisor.m]
            for stage in range(TO_DIVISION + len(divider.divisors) - 1):
                delayed.append(Signal(len(divisor.m), name=f"divisor{stage}"))
                m.d.sync += delayed[-1].eq(delayed[-2])
            m.d.comb += [
                divider.take.eq(self.take), divider.share.eq(pair_of(self.share.word_select(i, 32))),
                divisor.eq(pair_of(self.divisor.word_select(i, 32))), divider.e.eq(divisor.e),
                divider.beyond.eq(self.beyond[i]), divider.zero_point.eq(-128), divider.low.eq(-128),
                divider.high.eq(127), self.result.word_select(i, 8).eq(divider.result),
                *(port.eq(stage) for port, stage in zip(divider.divisors, delayed[TO_DIVISION:], strict=True)),
            ]  # fmt: skip
        return m


def config(block_in: int, block_out: int, lanes: int, **others: Any) -> Config:
    return Config(
        block_in=block_in, block_out=block_out, softmax=lanes, vin_depth=256, out_depth=256, acc_depth=256, **others
    )


CONFIGS = {
    "1 of 4": config(8, 4, 1),
    "4 of 8": config(4, 8, 4, taps=3, tap_depth=16),
    "1 of 16": config(16, 16, 1),
    "4 of 16": config(16, 16, 4),
    "8 of 16": config(16, 16, 8, taps=3, tap_depth=16),
}
VARIED = ["1 of 4", "4 of 8"]
"""Names of the Configs that `make test` simulates."""


@pytest.mark.rtl
@pytest.mark.parametrize("name", some(CONFIGS, VARIED))
def test_rows(name: str) -> None:
    cfg = CONFIGS[name]
    halts = ["halt_drops_everything"] if name in ("1 of 4", "4 of 8") else []
    only = ["equals_reference", "alike_overlap", *halts]
    bench.run(partial(SoftmaxEngine, cfg), __file__, cfg=cfg, only=only)


@pytest.mark.rtl
def test_adder() -> None:
    bench.run(partial(Adders), __file__, only=["adds_as_float32"])


@pytest.mark.rtl
def test_divider() -> None:
    bench.run(partial(Dividers), __file__, only=["divides_as_float32"])


def test_operands_find_a_plainly_rounded_quotient() -> None:
    """The operands of `test_divider` detect a divider that rounds the exact quotient instead of float32's."""
    share, divisor = quotients("near_ties", np.random.default_rng(1), 20_000)
    plain = np.rint(share.astype(np.longdouble) / divisor.astype(np.longdouble))
    assert (plain != np.rint(share / divisor)).sum() > 100


@pytest.mark.parametrize("count", [2, 3, 64, 197])
def test_reference_is_onnxruntimes(count: int) -> None:
    rng = np.random.default_rng(count)
    for _ in range(20):
        sx, sy, zero, x = random_rows(rng, 50, count)
        powers, shares = tables(count, sx, sy)
        expected = qlinear_softmax(x, sx, sy, zero)
        np.testing.assert_array_equal(softmax_rows(x, powers, shares, zero, -128, 127), expected)


def test_reference_adds_as_float32() -> None:
    """The reference adds floats that no table holds as float32 does, for any distance of exponents, with denormals."""
    rng = np.random.default_rng(1)
    a = some_floats(rng, rng.integers(0, 253, 100_000))
    b = some_floats(rng, np.clip((a.view(u32) >> 23) + rng.integers(-27, 28, len(a)), 0, 253))
    for actual, expected in zip(add_pairs(pairs_of(a.view(u32)), pairs_of(b.view(u32))), pairs_of((a + b).view(u32))):
        np.testing.assert_array_equal(actual, expected)


# Operands -------------------------------------------------------------------------------------------------


def some_floats(rng: np.random.Generator, exponents: NDArray[np.int64]) -> Float32:
    """Draw positive floats with these exponent fields; half of the mantissas have long runs of ones or zeros."""
    bits, kind = rng.integers(0, 1 << 23, len(exponents)), rng.integers(0, 4, len(exponents))
    cut = rng.integers(0, 24, len(exponents))
    bits = np.where(kind == 1, bits >> cut << cut, np.where(kind == 2, (1 << 23) - 1 - (bits >> cut), bits))
    return (exponents << 23 | bits).astype(u32).view(f32)


def quotients(case: str, rng: np.random.Generator, count: int) -> tuple[Float32, Float32]:
    """Draw shares and divisors: with any quotient in the relevant range, or with one next to an integer and a half."""
    exponents = rng.integers(30, 240, count)
    divisor = some_floats(rng, exponents)
    if case == "random":
        return some_floats(rng, np.clip(exponents + rng.integers(-4, 12, count), 0, 254)), divisor
    near_ties = divisor.astype(np.float64) * (rng.integers(0, 256, count) + 0.5)
    return (near_ties.astype(f32).view(u32) + rng.integers(-3, 4, count)).astype(u32).view(f32), divisor


def random_rows(rng: np.random.Generator, rows: int, count: int) -> tuple[float, float, int, NDArray[np.int8]]:
    """Draw scales sx and sy, a zero point, and x [rows, count] of a QLinearSoftmax."""
    sx, sy = 10 ** rng.uniform(-3, 0), float(rng.choice([1 / 256, 1 / 255, 1 / 127, 0.01]))
    x = rng.normal(0, 10 ** rng.uniform(0, 2), (rows, count)).clip(-128, 127).astype(np.int8)
    return float(f32(sx)), sy, -128 if sy == 1 / 256 else int(rng.integers(-128, 128)), x


def tables(count: int, sx: float, sy: float) -> tuple[Words, Words]:
    powers, shares = np.split(softmax_powers(count, sx, sy).view(u32), 2)
    return powers, shares


# Inside the simulation ------------------------------------------------------------------------------------


def words(values: Any) -> int:
    """Pack the lanes into one number."""
    return int.from_bytes(np.ascontiguousarray(values).tobytes(), "little")


def bits(values: NDArray[np.bool_]) -> int:
    return sum(int(value) << i for i, value in enumerate(values))


@cocotb.test()
async def adds_as_float32(dut: Any) -> None:
    """In each cycle, each adder adds to one of SOFTMAX_SUMS sums, restarts it, or leaves it as it is."""
    rng, steps = bench.generator(), tries(2400)
    await bench.start(dut)
    sums = [np.zeros(LANES, f32) for _ in range(SOFTMAX_SUMS)]
    for step in range(steps):
        total = sums[step % SOFTMAX_SUMS]
        first = (rng.random(LANES) < 0.2) | (total > 1e37) | (step < SOFTMAX_SUMS)
        nothing = ~first & (rng.random(LANES) < 0.1)
        field = (total.view(u32) >> 23).astype(np.int64)
        addend = some_floats(rng, np.clip(np.where(first, rng.integers(0, 250, LANES), field)
                                          + rng.integers(-27, 4, LANES), 0, 250))  # fmt: skip
        dut.first.value, dut.nothing.value = bits(first), bits(nothing)
        dut.addend.value = words(addend.view(u32))
        await bench.fall(dut)
        if step >= SOFTMAX_SUMS:
            m, e = pairs_of(total.view(u32))
            actual, expected = bench.value(dut.total), words((m | e << 24).astype(u32))
            assert actual == expected, f"step {step}: {actual:x}, not {expected:x}"
        await bench.rise(dut)
        sums[step % SOFTMAX_SUMS] = np.where(first, addend, np.where(nothing, total, total + addend)).astype(f32)


@cocotb.test()
@cocotb.parametrize(case=["random", "near_ties"])
async def divides_as_float32(dut: Any, case: str) -> None:
    """The dividers take a quotient in each cycle."""
    rng, cycles = bench.generator(), tries(6400)
    share, divisor = (operands.reshape(-1, LANES) for operands in quotients(case, rng, cycles * LANES))
    beyond = rng.random((cycles, LANES)) < 0.02
    with np.errstate(over="ignore"):
        expected = np.where(beyond, 0, np.minimum(np.rint(share / divisor), 255)) - 128
    await bench.start(dut)
    dut.take.value = 1
    results = []
    for cycle in range(cycles + DIVIDE_STAGES):
        if cycle < cycles:
            dut.share.value, dut.divisor.value = words(share[cycle]), words(divisor[cycle])
            dut.beyond.value = bits(beyond[cycle])
        await bench.fall(dut)
        results.append(bench.value(dut.result))
        await bench.rise(dut)
    quotients_found = bench.unpack(results[DIVIDE_STAGES:], np.zeros((cycles, LANES), np.int8))
    different = np.argwhere(quotients_found != expected)
    if different.size:
        i = tuple(different[0])
        raise AssertionError(f"{len(different)} differ, first: {share[i]} / {divisor[i]} gives {quotients_found[i]}")
    assert np.unique(expected).size == 256


class Machine:
    """The softmax engine, with a memory for vin, and a record of its writes."""

    def __init__(self, dut: Any, cfg: Config) -> None:
        self.dut, self.cfg, self.rng = dut, cfg, bench.generator()
        self.vin = self.rng.integers(-128, 128, (cfg.vin_depth, cfg.block_out)).astype(np.int8)
        self.fields, self.layout = {}, fields_layout(cfg)

    async def start(self) -> None:
        await bench.start(self.dut, timeout=2_000_000)
        lanes = {"window": softmax_span(self.cfg), "width": 8 * self.cfg.block_out}
        cocotb.start_soon(bench.memory(self.dut, bench.pack(self.vin), ["vin"], [], **lanes))

    async def load(self, powers: Words, shares: Words) -> None:
        dut = self.dut
        dut.exp__en.value, dut.exp__mask.value = 1, 1
        for address, word in enumerate(np.concatenate([powers, shares]).tolist()):
            dut.exp__addr.value, dut.exp__data.value = address, word
            await bench.rise(dut)
        dut.exp__en.value = 0

    def begin(self, rows: int, groups: int, left_out: int) -> None:
        values = {"extent_n": groups, "extent_x": rows, "imm": left_out}
        strides = ("a_base", "a_n", "a_x", "dst_base", "dst_n", "dst_x")
        self.offer(self.paired({name: int(self.rng.integers(0, 256)) for name in strides}) | values)
        self.dut.start.value = 1

    def paired(self, strides: dict[str, int]) -> dict[str, int]:
        """Return the strides, but with a_n = 1 if the engine reads entries in pairs, which must be neighbours."""
        return strides | {"a_n": 1} if softmax_span(self.cfg) > 1 else strides

    def writes(self) -> bool:
        """Return True if the engine writes a result in this cycle."""
        spare = softmax_span(self.cfg) > 1 and bool(bench.value(self.dut.spare))
        return bool(bench.value(self.dut.write)) and not spare

    def offer(self, fields: dict[str, int]) -> None:
        self.fields = fields
        self.dut.fields.value = sum(fields[name] << self.layout[name].offset for name, _ in self.layout)

    def x(self) -> NDArray[np.int8]:
        """Return the rows that the engine reads, as [rows, count]."""
        f, (n, x) = self.fields, np.ogrid[: self.fields["extent_n"], : self.fields["extent_x"]]
        entries = self.vin[(f["a_base"] + n * f["a_n"] + x * f["a_x"]) % len(self.vin)]
        rows = np.swapaxes(entries, 0, 1).reshape(f["extent_x"], -1)
        return rows[:, : rows.shape[1] - f["imm"]]

    def places(self) -> list[int]:
        """Return the addresses of the results, in their order."""
        f, wrap = self.fields, 1 << self.layout["dst_base"].width
        return [
            (f["dst_base"] + n * f["dst_n"] + x * f["dst_x"]) % wrap
            for x in range(f["extent_x"]) for n in range(f["extent_n"])
        ]  # fmt: skip

    async def series(self, series: list[dict[str, int]], waits: list[int]) -> tuple[list[Any], list[tuple[int, int]]]:
        """Run similar instructions, and start each as soon as the engine permits.

        Instruction i is offered waits[i] cycles behind the start of the one before. Returns a list of (offered,
        started, done) in cycles, one per instruction, and a list of (address, data), one per write.
        """
        dut, offered_cycles, cycle = self.dut, 0, 0
        offers, starts, ends, written = [waits[0]], [], [], []
        while len(ends) < len(series):
            dut.start.value = 0
            offered = len(starts) < len(series) and cycle >= offers[-1]
            random_fields = {name: int(self.rng.integers(0, 2)) for name, _ in self.layout}
            self.offer(series[len(starts)] if offered else random_fields)
            under_way = len(starts) - len(ends)
            await bench.fall(dut)
            assert bool(bench.value(dut.busy)) == (under_way > 0)
            if self.writes():
                written.append((bench.value(dut.addr), bench.value(dut.data)))
            if offered and (
                not under_way or (under_way == 1 and offered_cycles >= SOFTMAX_OFFER_CYCLES and dut.room.value)
            ):
                dut.start.value = 1
                starts.append(cycle)
                offers.append(cycle + 1 + waits[len(starts) % len(waits)])
                offered_cycles = 0
            else:
                offered_cycles = offered_cycles + 1 if offered and under_way == 1 else 0
            if dut.finish.value:
                ends.append(cycle + 1)
            await bench.rise(dut)
            cycle += 1
        return list(zip(offers, starts, ends)), written

    async def run(self, rows: int, groups: int, left_out: int, limits: tuple[int, int, int]) -> NDArray[np.int8]:
        """Run a softmax and return its results [rows, lanes]; check addresses, and the cycles of `softmax_cycles`."""
        dut, cfg = self.dut, self.cfg
        self.begin(rows, groups, left_out)
        dut.zero_point.value, dut.low.value, dut.high.value = limits
        cycles, addresses, entries = 1, [], []
        while True:
            await bench.fall(dut)
            if self.writes():
                addresses.append(bench.value(dut.addr))
                entries.append(bench.value(dut.data))
            ends = bool(bench.value(dut.finish))
            await bench.rise(dut)
            dut.start.value = 0
            if ends:
                break
            cycles += 1
        assert cycles == softmax_cycles(cfg, rows, groups), cycles
        assert addresses == self.places()
        return bench.unpack(entries, np.zeros((rows * groups, cfg.block_out), np.int8)).reshape(rows, -1)


async def check(machine: Machine, garbage: bool) -> None:
    """Compare a random softmax with the reference. garbage: powers are random bits."""
    cfg, rng = machine.cfg, machine.rng
    rows, groups = int(rng.integers(1, 25 * cfg.softmax)), int(rng.integers(1, 5))
    left_out = int(rng.integers(0, cfg.block_out - (groups == 1)))
    count = groups * cfg.block_out - left_out
    sx, sy, zero, _ = random_rows(rng, 1, count)
    limits = (zero, *sorted(rng.integers(-128, 128, 2).tolist())) if rng.random() < 0.3 else (zero, -128, 127)
    powers, shares = tables(count, sx, sy)
    if garbage:
        powers = rng.integers(0, 1 << 32, 256, u32)
        shares = powers + (rng.integers(0, 12, 256) << 23).astype(u32) if rng.random() < 0.5 else powers[::-1]
    await machine.load(powers, shares)
    results = await machine.run(rows, groups, left_out, limits)
    expected = softmax_rows(machine.x(), powers, shares, *limits)
    if not garbage:
        assert (expected == np.clip(qlinear_softmax(machine.x(), sx, sy, zero), *limits[1:])).all()
    different = np.argwhere(results[:, :count] != expected)
    assert not len(different), (rows, groups, left_out, different)
    assert (results[:, count:] == np.clip(*limits)).all()


@cocotb.test()
async def equals_reference(dut: Any) -> None:
    machine = Machine(dut, bench.config())
    await machine.start()
    for number in range(tries(24)):
        await check(machine, garbage=number % 3 == 2)


@cocotb.test()
async def alike_overlap(dut: Any) -> None:
    """Similar softmaxes overlap: they start and end when the timing model says, with the results of a serial run."""
    cfg = bench.config()
    machine = Machine(dut, cfg)
    await machine.start()
    rng, limits, powers, shares = machine.rng, (-128, -128, 127), *tables(8, 0.05, 1 / 256)
    await machine.load(powers, shares)
    dut.zero_point.value, dut.low.value, dut.high.value = limits
    overlap, tile = 0, tile_rows(cfg)
    for number in range(4):
        fields = machine.paired({name: int(rng.integers(0, 256)) for name in ("a_n", "a_x", "dst_n", "dst_x")})
        fields |= {"extent_n": int(rng.integers(1, 4)), "imm": int(rng.integers(0, cfg.block_out))}
        sizes = [rng.integers(1, tile), tile, 2 * tile, rng.integers(tile, 5 * tile)]
        series = [
            fields | {"extent_x": int(rng.choice(sizes))} | {n: int(rng.integers(256)) for n in ("a_base", "dst_base")}
            for _ in range(6)
        ]  # fmt: skip
        max_wait = (0, 40, 400, 10 * tile)[number]
        times, written = await machine.series(series, rng.integers(0, max_wait + 1, len(series)).tolist())
        model, last = SoftmaxTiming(cfg), 0
        for (offer, start, end), fields_of_one in zip(times, series, strict=True):
            overlapping = model.overlap_start(offer) if last else NEVER
            start_expected = overlapping if overlapping < NEVER else max(offer, last)
            overlap += overlapping < NEVER
            last = model.run(start_expected, fields_of_one["extent_x"], fields_of_one["extent_n"], overlapping < NEVER)
            assert (start, end) == (start_expected, last)
        for fields_of_one in series:
            machine.fields = fields_of_one
            entries = [written.pop(0) for _ in machine.places()]
            assert [place for place, _ in entries] == machine.places()
            results = bench.unpack([word for _, word in entries], np.zeros((len(entries), cfg.block_out), np.int8))
            expected = softmax_rows(machine.x(), powers, shares, *limits)
            assert (results.reshape(fields_of_one["extent_x"], -1)[:, : expected.shape[1]] == expected).all()
    assert overlap >= 8


@cocotb.test()
async def halt_drops_everything(dut: Any) -> None:
    """After a halt at any time, the engine writes nothing more, and the next softmax is right."""
    machine = Machine(dut, bench.config())
    await machine.start()
    for _ in range(tries(12)):
        machine.begin(int(machine.rng.integers(1, 40)), int(machine.rng.integers(1, 4)), 0)
        await bench.rise(dut)
        dut.start.value = 0
        await bench.cycles(dut, int(machine.rng.integers(1, 400)))
        dut.halt.value = 1
        await bench.rise(dut)
        dut.halt.value = 0
        for _ in range(60):
            await bench.fall(dut)
            assert not dut.busy.value and not dut.write.value and not dut.finish.value
            await bench.rise(dut)
        await check(machine, garbage=False)
