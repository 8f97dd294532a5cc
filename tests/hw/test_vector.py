"""Compare the vector unit with `sim.reference.vector`: random programs, random stalls, and its cycles."""

from __future__ import annotations

import random
import sys
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import bench
import cocotb
import numpy as np
import pytest

from celosia.compiler.numerics.tables import softmax_powers
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import (
    VECTOR_LOOPS,
    ASource,
    BinaryOp,
    BSource,
    Destination,
    Opcode,
    ReduceOp,
    formats,
    instruction_bytes,
    is_supported,
)
from celosia.hw.spec.legality import why_illegal
from celosia.hw.spec.pipeline import claim_lead, softmax_span, vector_stages
from celosia.hw.spec.scratchpads import scratchpads
from celosia.hw.vector_unit.vector import Vector
from celosia.sim.functional.reference import State, destination, vector
from celosia.sim.timing import compute as timing
from celosia.sim.timing.demand import demand
from celosia.sim.timing.engine_cycles import softmax_cycles
from celosia.sim.timing.ports import Acc
from celosia.sim.timing.work import Work

sys.path.append(str(Path(__file__).parents[1]))
from configs import COVERING, COVERING_PAIR
from programs import choices, reads_own_result
from thorough import some, tries

_DEPTHS = {
    "inp_depth": 16, "wgt_depth": 8, "acc_depth": 512, "vin_depth": 64, "out_depth": 32, "par_depth": 8,
}  # fmt: skip
CONFIGS = {name: replace(cfg, **_DEPTHS) for name, cfg in COVERING.items()} | {
    "4x4-softmax2": replace(COVERING[COVERING_PAIR[1]], block_in=4, block_out=4, softmax=2, **_DEPTHS),
    "batch2": Config(batch=2, block_in=4, block_out=4, bus_bytes=4, lut_count=4, **_DEPTHS),
    "8x4_batch2": Config(batch=2, block_in=8, block_out=4, **{**_DEPTHS, "out_depth": 128}),
    "4x4_taps3": Config(
        block_in=4, block_out=4, taps=3, tap_depth=16, forward=True, residual_cycles=2, alu=False, int32=False,
        **_DEPTHS,
    ),
    "4x8_taps1": Config(block_in=4, block_out=8, taps=1, tap_depth=8, residual_cycles=2, int32=False, **_DEPTHS),
    "8x8_forward": Config(block_in=8, block_out=8, lut_count=1, forward=True, norm=8, **_DEPTHS),
}  # fmt: skip
ALL = ["random_program", "halt_drops_everything"]
ROWS = ["alone", "alike", "norms"]
"""Names of the cocotb tests that need a VECTOR with softmax and norm."""


def run(name: str, only: list[str], seed: int = 1) -> None:
    cfg = CONFIGS[name]
    bench.run(partial(Vector, cfg), __file__, cfg=cfg, seed=seed, only=only)


@pytest.mark.rtl
@pytest.mark.parametrize("name", some(CONFIGS, [COVERING_PAIR[0], "4x4-softmax2"]))
def test_vector(name: str) -> None:
    run(name, ALL + (ROWS if CONFIGS[name].softmax else ["is_active"]) + ["every_feature"] * ((1, name) in FEATURES))


FEATURES = [(seed, name) for seed in (1, 2) for name in ("8x4-batch2-taps5", "4x4", "4x4_taps3", "8x8_forward")]


@pytest.mark.rtl
@pytest.mark.thorough  # with seed 1, `test_vector` does it in its simulation of the same Config
@pytest.mark.parametrize(("seed", "name"), FEATURES[4:])
def test_every_feature_on_its_own(seed: int, name: str) -> None:
    run(name, ["every_feature"], seed=seed)


# Random states and instructions ---------------------------------------------------------------------------


def random_state(cfg: Config, rng: np.random.Generator) -> State:
    """Draw accumulators of all magnitudes, and parameters with which many results do not saturate."""
    state = State(cfg)
    for array in (state.inp, state.vin, state.out, state.lut, state.tap):
        array[:] = rng.integers(-128, 128, array.shape)
    if cfg.softmax:
        state.exp[:, 0] = softmax_powers(8, 0.05, 1 / 256)
    state.acc[:] = rng.integers(-(1 << 31), 1 << 31, state.acc.shape) >> rng.integers(0, 32, state.acc.shape)
    shape = state.par.shape
    bias = rng.integers(-(1 << 31), 1 << 31, shape) >> rng.integers(0, 32, shape)
    fields = [(bias & 0xFFFFFFFF, 0), (rng.integers(1 << 23, 1 << 24, shape), 32), (rng.integers(20, 55, shape), 56)]
    for value, position in fields:
        state.par |= value.astype(np.uint64) << np.uint64(position)
    return state


def some_bits(rng: np.random.Generator, width: int) -> int:
    """Draw a signed number of up to `width` bits, of any magnitude."""
    return int(rng.integers(-(1 << width - 1), 1 << width - 1)) >> int(rng.integers(0, width))


ATTEMPTS = 2000


def random_instruction(cfg: Config, rng: np.random.Generator, **chosen: int) -> int:
    """Draw a legal VECTOR that does not read its own results. chosen: fixed fields."""
    fmt = formats(cfg)[Opcode.VECTOR]
    bits = {field.name: field.width for field in fmt.fields}
    for has_rows, name, rows in ((cfg.softmax, "softmax", _softmax), (cfg.norm, "norm", _norm)):
        if has_rows:
            chosen = rows(cfg, rng) if not chosen and rng.random() < 0.3 else {name: 0} | chosen
    for _ in range(ATTEMPTS):
        values = {}
        for field in fmt.fields:
            low = -(1 << field.width - 1) if field.signed else 0
            values[field.name] = int(rng.integers(low, low + (1 << field.width)))
        values |= {f"extent_{loop}": int(rng.integers(1, 4)) for loop in VECTOR_LOOPS}
        values |= {name: some_bits(rng, bits[name]) for name in ("imm", "scale_v", "scale_b")}
        values["scale_c"] = some_bits(rng, 48)
        if rng.random() < 0.5:  # a residual as the compiler makes it
            values["scale_shift"] = int(rng.integers(20, 32))
            for name in ("scale_v", "scale_b"):
                values[name] = int(rng.integers(-(1 << 31), 1 << 31)) >> int(rng.integers(31 - 24, 16))
            values["scale_c"] = some_bits(rng, values["scale_shift"] + 8)
        if rng.random() < 0.7:
            values |= {"clip_lo": -128, "clip_hi": 127, "add_lo": -128, "add_hi": 127}
        if rng.random() < 0.5:
            values |= {"rescale_add": 0}
        elif rng.random() < 0.8:
            values |= {"binary_op": BinaryOp.NONE, "a_source": ASource.ACC, "b_source": BSource.VIN, "taps": 0}
        values |= {"opcode": Opcode.VECTOR, "wait": 0, "post": values["post"] & ~(1 << 2)} | chosen
        word = fmt.encode(**values)
        if why_illegal(cfg, word) is None and not reads_own_result(cfg, values):
            return word
    why = why_illegal(cfg, word) or "it reads what it has written"
    raise AssertionError(f"none of {ATTEMPTS} random VECTORs with {chosen} is legal; the last one: {why}")


def _softmax(cfg: Config, rng: np.random.Generator) -> dict[str, int]:
    """Draw the fields of a softmax."""
    target = rng.choice([option for option in (Destination.OUT, Destination.INP) if is_supported(cfg, option)])
    return {
        "softmax": 1, "a_source": ASource.VIN, "b_source": BSource.IMM, "binary_op": BinaryOp.NONE, "taps": 0,
        "destination": int(target), "requantise": 0, "lookup": 0, "rescale_add": 0, "extent_y": 1, "extent_r": 1,
        "extent_s": 1, "extent_x": int(rng.integers(1, 20)), "imm": int(rng.integers(0, cfg.block_out)),
        **({"a_n": 1} if softmax_span(cfg) > 1 else {}),
    }  # fmt: skip


def _norm(cfg: Config, rng: np.random.Generator) -> dict[str, int]:
    """Draw the fields of a norm."""
    return {
        "norm": 1, "a_source": ASource.VIN, "b_source": BSource.IMM, "binary_op": BinaryOp.NONE, "taps": 0,
        "rescale_add": 0, "extent_y": 1, "extent_r": 1, "extent_s": 1, "extent_x": int(rng.integers(1, 12)),
        "imm": int(rng.integers(0, cfg.block_out)), "a_offset": int(rng.integers(-128, 129)),
        "scale_c": int(2 ** rng.uniform(0, 47)),
    }  # fmt: skip


def test_what_is_never_legal_is_told() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(AssertionError, match=r"none of 2000 random VECTORs .* the binary operation does not exist"):
        random_instruction(CONFIGS["4x4"], rng, binary_op=max(BinaryOp) + 1, rescale_add=0)


# Inside the simulation ------------------------------------------------------------------------------------


async def claim(dut: Any, cfg: Config, share: float) -> None:
    """Imitate GEMM: claim each port of acc in a share of the cycles, and check that VECTOR leaves claimed banks alone.

    A read is claimed as early as VECTOR requires, a write one cycle before.
    """
    leads = {"acc_read": claim_lead(cfg)} | ({"acc_write": 1} if cfg.int32 else {})
    claimed = {name: deque([0] * lead) for name, lead in leads.items()}  # banks, in the cycles that come
    while True:
        for banks in claimed.values():
            banks.append(sum((random.random() < share) << bank for bank in range(2)))
        dut.claims.value = sum(banks[-1] << 2 * number for number, banks in enumerate(claimed.values()))
        await bench.fall(dut)
        for name, banks in claimed.items():
            taken = banks.popleft()
            if getattr(dut, f"{name}__en").value:
                bank = bench.value(getattr(dut, f"{name}__addr")) // (cfg.acc_depth // 2)
                assert not taken >> bank & 1, f"{name} uses bank {bank}, which GEMM has claimed"
        await bench.rise(dut)


class Machine:
    """The vector unit with memories of a State; `run` executes a program on both and compares them."""

    def __init__(self, dut: Any, cfg: Config, state: State, pause: float) -> None:
        self.dut, self.cfg, self.state, self.pause = dut, cfg, state, pause
        self.words = {to: bench.pack(destination(state, to)) for to in Destination}
        self.done: list[int] = []

    async def start(self) -> None:
        dut, pause = self.dut, self.pause
        await bench.start(dut, timeout=200_000)
        entry, taps = 8 * self.cfg.lanes, max(1, self.cfg.taps)
        to_vin, to_inp = (["vin_write"], ["inp_write"]) if self.cfg.forward else ([], [])

        def memory(words: list[int], reads: list[str], writes: list[str], **how: int) -> None:
            cocotb.start_soon(bench.memory(dut, words, reads, writes, **how))

        cocotb.start_soon(claim(dut, self.cfg, pause))
        memory(self.words[Destination.ACC], ["acc_read"], ["acc_write"] if self.cfg.int32 else [], grain=32)
        memory(self.words[Destination.VIN], ["vin"], to_vin, grain=entry, window=taps, width=entry)
        memory(self.words[Destination.INP], [], to_inp, grain=entry)
        memory(self.words[Destination.OUT], [], ["out"], grain=entry)
        memory(bench.pack(self.state.par), ["par"], [])
        if self.cfg.taps:
            memory(bench.pack(self.state.tap[:, : self.cfg.taps]), ["tap"], [])
        cocotb.start_soon(bench.pulses_get(dut, "done", self.done))
        await self.load_tables()
        if self.cfg.softmax:
            dut.exp__en.value = dut.exp__mask.value = 1
            for address, word in enumerate(bench.pack(self.state.exp)):
                dut.exp__addr.value, dut.exp__data.value = address, word
                await bench.rise(dut)
            dut.exp__en.value = 0

    async def load_tables(self) -> None:
        """Write each table grain by grain, but the last table at once."""
        dut, grain = self.dut, scratchpads(self.cfg)["lut"].grain
        rows = 2048 // grain
        for table, word in enumerate(bench.pack(self.state.lut)):
            at_once = table == self.cfg.lut_count - 1
            for row in [None] if at_once else range(rows):
                dut.lut__en.value, dut.lut__addr.value = 1, table
                dut.lut__mask.value = (1 << rows) - 1 if row is None else 1 << row
                dut.lut__data.value = word
                while True:
                    await bench.fall(dut)
                    taken = bool(bench.value(dut.lut__ready))
                    await bench.rise(dut)
                    if taken:
                        break
        dut.lut__en.value = 0

    async def run(self, program: list[int], pause: float = 0.0) -> None:
        fmt = formats(self.cfg)[Opcode.VECTOR]
        first = len(self.done)
        payloads = [index | word << bench.INDEX_BITS for index, word in enumerate(program)]
        await bench.stream_put(self.dut, "instr", payloads, pause=pause)
        while len(self.done) < first + len(program):
            await bench.rise(self.dut)
        expected = [fmt.decode(word)["post"] | index << 4 for index, word in enumerate(program)]
        assert self.done[first:] == expected, "wrong index or post mask, or out of order"
        for word in program:
            vector(self.state, fmt.decode(word))
        self.compare(program)

    def compare(self, program: list[int]) -> None:
        fmt = formats(self.cfg)[Opcode.VECTOR]
        for to, words in self.words.items():
            name, expected = to.name.lower(), destination(self.state, to)
            actual = bench.unpack(words, expected)
            if not np.array_equal(actual, expected):
                index = tuple(int(i) for i in np.argwhere(actual != expected)[0])
                raise AssertionError(
                    f"{name}{list(index)} is {actual[index]}, not {expected[index]}"
                    f" after {[fmt.decode(word) for word in program[-3:]]}"
                )


@cocotb.test()
@cocotb.parametrize(pause=[0.0, 0.4])
async def random_program(dut: Any, pause: float) -> None:
    cfg, rng = bench.config(), bench.generator()
    machine = Machine(dut, cfg, random_state(cfg, rng), pause)
    await machine.start()
    for _ in range(tries(25)):
        await machine.run([random_instruction(cfg, rng) for _ in range(rng.integers(1, 6))], pause)


@cocotb.test()
async def every_feature(dut: Any) -> None:
    cfg, rng = bench.config(), bench.generator()
    machine = Machine(dut, cfg, random_state(cfg, rng), 0.1)
    await machine.start()
    plain = {
        "requantise": 0, "lookup": 0, "rescale_add": 0, "taps": 0, "binary_op": BinaryOp.NONE,
        "reduce_op": ReduceOp.ADD,
    }  # fmt: skip
    variants: list[dict[str, int]] = [
        *({"binary_op": op, "b_source": source} for op in choices(cfg, BinaryOp) for source in BSource),
        *({"reduce_op": op} for op in choices(cfg, ReduceOp)),
        {"requantise": 1}, {"lookup": 1}, {"requantise": 1, "lookup": 1}, {},
        *({"rescale_add": 1, "a_source": ASource.ACC, "b_source": BSource.VIN, "requantise": q, "lookup": lookup}
          for q in (0, 1) for lookup in (0, 1)),
    ]  # fmt: skip
    if cfg.taps:
        variants += [{"taps": 1, "a_source": ASource.VIN, "requantise": q} for q in (0, 1)]
    destinations = choices(cfg, Destination)
    for number, variant in enumerate(variants):
        for to in destinations if bench.THOROUGH else [destinations[number % len(destinations)]]:
            chosen = {**plain, "destination": to, **variant}
            for source in ASource:
                if source == ASource.VIN and chosen.get("b_source") == BSource.VIN:
                    continue
                await machine.run([random_instruction(cfg, rng, **{"a_source": source, **chosen})])
    machine.words[Destination.OUT][5] ^= 1 << 8  # the planted fault
    with pytest.raises(AssertionError, match=r"out\[5, 0, 0, 1\] is"):
        machine.compare([])


EXTENT_Y, EXTENT_X = 9, 11
"""Rows and columns of the measured passes. A cycle lost per row would exceed the latency of all stages."""


@cocotb.test()
async def is_active(dut: Any) -> None:
    """A long pass of two instructions takes one entry a cycle, and as many cycles as the Config says for a residual.

    The last write comes as many cycles later as there are stages, for any source of A and any destination.
    """
    cfg, rng = bench.config(), bench.generator()
    machine = Machine(dut, cfg, random_state(cfg, rng), 0.0)
    await machine.start()
    sizes = {"extent_n": 2, "extent_y": EXTENT_Y, "extent_x": EXTENT_X, "extent_r": 1, "extent_s": 1}
    passes = [
        {"a_source": ASource.ACC, "rescale_add": 0},
        {"a_source": ASource.ACC, "b_source": BSource.VIN, "rescale_add": 1, "binary_op": BinaryOp.NONE},
    ]
    if cfg.taps:
        passes.append({"a_source": ASource.VIN, "taps": 1, "rescale_add": 0})
    destinations = [to for to in (Destination.OUT, Destination.INP) if is_supported(cfg, to)]
    for number, stages_used in enumerate(passes):
        for to in destinations if bench.THOROUGH else [destinations[number % len(destinations)]]:
            await measure(dut, machine, {**sizes, "taps": 0, "destination": to, **stages_used})


async def measure(dut: Any, machine: Machine, chosen: dict[str, int]) -> None:
    cfg, rng = machine.cfg, bench.generator()
    program = [random_instruction(cfg, rng, requantise=1, lookup=1, **chosen) for _ in range(2)]
    counts = {"active": 0, "cycles": 0}
    task = cocotb.start_soon(machine.run(program))
    while not task.done():
        await bench.fall(dut)
        counts["active"] += bench.value(dut.active)
        counts["cycles"] += int(not dut.idle.value)
        await bench.rise(dut)
    await task
    work = 2 * 2 * EXTENT_Y * EXTENT_X * (cfg.residual_cycles if chosen["rescale_add"] else 1)
    assert counts["active"] == work
    assert work <= counts["cycles"] <= work + vector_stages(cfg)["write"] + 4, counts


@cocotb.test()
async def halt_drops_everything(dut: Any) -> None:
    """After a halt in the middle of a program, the unit is idle, and the next program is right."""
    cfg, rng = bench.config(), bench.generator()
    machine = Machine(dut, cfg, random_state(cfg, rng), 0.3)
    await machine.start()
    for _ in range(tries(20)):
        sender = cocotb.start_soon(bench.stream_put(dut, "instr", [
            random_instruction(cfg, rng) << bench.INDEX_BITS for _ in range(4)
        ]))  # fmt: skip
        await bench.cycles(dut, int(rng.integers(1, 60)))
        dut.halt.value = 1
        sender.cancel()
        dut.instr__valid.value = 0
        await bench.cycles(dut, 2)
        await bench.fall(dut)
        assert dut.idle.value and not dut.done__valid.value and not dut.instr__ready.value
        await bench.rise(dut)
        dut.halt.value = 0
        for to, words in machine.words.items():
            array = destination(machine.state, to)
            array[:] = bench.unpack(words, array)
        await machine.run([random_instruction(cfg, rng) for _ in range(2)])


async def observe(dut: Any, run: Any) -> tuple[list[int], list[int], list[int]]:
    """Return the cycles in which each instruction is first offered, accepted, and done, while `run` goes on."""
    offers, starts, ends = [], [], []
    task, cycle = cocotb.start_soon(run), 0
    while not task.done():
        await bench.fall(dut)
        if dut.done__valid.value:
            ends.append(cycle)
        if dut.instr__valid.value:
            if len(offers) == len(starts):
                offers.append(cycle)
            if dut.instr__ready.value:
                starts.append(cycle)
        cycle += 1
        await bench.rise(dut)
    await task
    return offers, starts, ends


@cocotb.test()
async def alone(dut: Any) -> None:
    """A softmax starts when the instructions before it are done, takes `softmax_cycles`, and delays those behind it."""
    cfg, rng = bench.config(), bench.generator()
    machine = Machine(dut, cfg, random_state(cfg, rng), 0.0)
    await machine.start()
    fmt = formats(cfg)[Opcode.VECTOR]
    for _ in range(tries(10)):
        fields = _softmax(cfg, rng)
        program = [random_instruction(cfg, rng, extent_x=4), random_instruction(cfg, rng, **fields)]
        program.append(random_instruction(cfg, rng, a_source=ASource.ACC, destination=fields["destination"]))
        (_, starts, ends) = await observe(dut, machine.run(program))
        assert all(start >= end for start, end in zip(starts[1:], ends))
        duration = ends[1] - starts[1]
        f = fmt.decode(program[1])
        assert duration == softmax_cycles(cfg, f["extent_x"], f["extent_n"])


def alike_softmaxes(cfg: Config, rng: np.random.Generator, count: int) -> list[int]:
    """Draw softmaxes with their own rows and addresses, sometimes with other instructions or fields between them."""
    fmt = formats(cfg)[Opcode.VECTOR]
    fields = fmt.decode(random_instruction(cfg, rng, **_softmax(cfg, rng), extent_n=int(rng.integers(1, 4))))
    program = []
    for _ in range(count):
        if rng.random() < 0.2:
            names = ["a_x", "dst_n", "dst_x", "zero_point", "clip_lo", "clip_hi", "imm", "extent_n"]
            fields[str(rng.choice(names))] = int(rng.integers(1, 4))
        fields["extent_x"] = int(rng.choice([rng.integers(1, 9), rng.integers(1, 60), 8, 16]))
        fields |= {name: int(rng.integers(0, 16)) for name in ("a_base", "dst_base")}
        fields["post"] = int(rng.integers(0, 4))
        program.append(fmt.encode(**fields))
        assert why_illegal(cfg, program[-1]) is None
        if rng.random() < 0.3:  # these may run along with a softmax that writes INP
            fixed = {"a_source": ASource.ACC, "destination": Destination.OUT, "softmax": 0, "norm": 0}
            program += [random_instruction(cfg, rng, **fixed) for _ in range(rng.integers(1, 4))]
    return program


def predicted(cfg: Config, program: list[int], offers: list[int]) -> list[tuple[int, int]]:
    """Return (start, end) of each instruction by the timing model, given the cycles in which they are offered."""
    code = b"".join(word.to_bytes(instruction_bytes(cfg), "little") for word in program)
    columns = [getattr(demand(cfg, code), name).tolist() for name in Work._fields[1:]]
    unit = timing.Vector(cfg, Acc())
    return [unit.run(offer, work)[:2] for offer, work in zip(offers, map(Work, range(len(program)), *columns))]


@cocotb.test()
async def norms(dut: Any) -> None:
    """Norms between other instructions start and end when the timing model says: one cycle behind `done`."""
    cfg, rng = bench.config(), bench.generator()
    machine = Machine(dut, cfg, random_state(cfg, rng), 0.0)
    await machine.start()
    for _ in range(tries(8)):
        chosen = [_norm(cfg, rng) if rng.random() < 0.6 else {"softmax": 0} for _ in range(6)]
        program = [random_instruction(cfg, rng, **fields) for fields in chosen]
        offers, starts, ends = await observe(dut, machine.run(program))
        assert [(start, end + 1) for start, end in zip(starts, ends, strict=True)] == predicted(cfg, program, offers)


@cocotb.test()
@cocotb.parametrize(pause=[0.0, 0.98])
async def alike(dut: Any, pause: float) -> None:
    """Similar softmaxes overlap, with the results of a serial run and the timing model's cycles."""
    cfg, rng = bench.config(), bench.generator()
    machine = Machine(dut, cfg, random_state(cfg, rng), 0.0)
    await machine.start()
    overlap, rounds = 0, tries(7)
    for _ in range(rounds):
        program = alike_softmaxes(cfg, rng, 8)
        offers, starts, ends = await observe(dut, machine.run(program, pause))
        assert [(start, end + 1) for start, end in zip(starts, ends, strict=True)] == predicted(cfg, program, offers)
        overlap += sum(start < end for start, end in zip(starts[1:], ends))
    assert overlap > 2 * rounds
