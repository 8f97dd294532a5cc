"""Run each kind of case briefly, and check that each kind finds planted faults."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import fields
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from configs import CONFIGS, ROOM
from programs import random_config
from thorough import some, tries

from celosia.compiler.program import Program, ProgramError
from celosia.hw.spec.config import Config, field_values
from celosia.hw.spec.isa import instruction_bytes
from celosia.hw.spec.legality import why_illegal
from celosia.hw.spec.scratchpads import scratchpads
from celosia.sim.device import Counters, DeviceError
from celosia.sim.functional.fsim import FunctionalDevice
from celosia.sim.rtl.build import BuildError, find_compiler, verilator_root
from celosia.sim.rtl.rtlsim import RtlDevice
from fuzz import files
from fuzz import run as fuzz_run
from fuzz.cases import Coverage, Failure, Machine, case_program, garbage, legal
from fuzz.harness import Journal, Workers
from fuzz.run import Chunk, Results, chunk, chunks


@cache
def rtl() -> RtlDevice:
    try:
        find_compiler(), verilator_root()
    except BuildError as error:
        pytest.skip(str(error))
    return RtlDevice(CONFIGS["4x4"], quiet=True)


ON_RTL = [*product(["legal", "garbage"], ["4x4", "8x8-bus4-weights4", "8x4-batch2-taps5", "taps3-ports2"])]


@pytest.mark.rtl
@pytest.mark.parametrize(("kind", "name"), some(ON_RTL, [*ON_RTL[1:3], ON_RTL[4], ON_RTL[7]]))
def test_hardware(kind: str, name: str) -> None:
    rtl()
    results = chunk(kind, CONFIGS[name], range(100))
    assert not results.failures
    assert results.cases == 100
    assert (results.coverage.pairs() > 0).sum() > 60


def test_damaged_files() -> None:
    results = chunk("damaged", CONFIGS["4x4"], range(tries(200)))
    assert not results.failures
    assert results.endings["overwritten: refused"] and results.endings["cut: refused"]


def test_forged_files() -> None:
    results = chunk("forged", CONFIGS["4x4"], range(tries(300)))
    assert not results.failures
    assert results.endings["forged: refused"] and results.endings["forged: runs"]


def test_programs_use_what_fields_can_hold() -> None:
    """Programs use 90% of the value ranges that legal programs can use; this needs no simulation."""
    covered = Coverage()
    for number in range(12):
        machine = Machine(random_config(1000 + number))
        for seed in range(25):
            covered.note(machine.cfg, case_program(machine.cfg, random.Random(seed)).words())
    for opcode, (used, possible) in covered.reached().items():
        assert used >= 0.9 * possible, opcode


WIDEST = [
    Config(batch=4, block_in=64, block_out=64, bus_bytes=4, queue_depth=2, **ROOM),
    Config(batch=16, block_in=128, block_out=128, bus_bytes=128, taps=16, forward=True, **ROOM),
    Config(block_in=128, block_out=128, weight_bits=2, norm=128, softmax=16, taps=3, ports=2, forward=True, **ROOM),
    Config(block_in=4, block_out=4, softmax=1, forward=True, **dict.fromkeys(ROOM, 16)),
    Config(block_in=2, block_out=2, wgt_depth=1 << 20),
]
"""Configs with entries, shapes and depths at the limits, beyond those of `random_config`."""


@pytest.mark.parametrize("cfg", [*WIDEST, *map(random_config, range(tries(40)))], ids=lambda cfg: cfg.name)
def test_programs_are_legal_on_every_config(cfg: Config) -> None:
    for seed in range(6):
        for word in case_program(cfg, random.Random(seed)).words():
            assert why_illegal(cfg, word) is None


def test_random_configs_hold_every_value_that_can_be_simulated() -> None:
    drawn = [random_config(number) for number in range(600)]
    for field in fields(Config):
        if field.name in ("name", "trace_depth"):
            continue
        values = {getattr(cfg, field.name) for cfg in drawn}
        affordable = {"block_in": 32, "block_out": 16, "norm": 4, "softmax": 2}
        limit = 128 if field.name.endswith("_depth") else affordable.get(field.name, 1 << 20)
        skipped = {3} if field.name in ("norm", "softmax") else set()  # 3 is not a power of two
        assert values >= {value for value in field_values(field.name) if value <= limit} - skipped, field.name
    assert any(cfg.block_out == 64 for cfg in drawn) and any(scratchpads(cfg)["wgt"].spread for cfg in drawn)


def test_configs_of_a_run_are_wide_and_narrow() -> None:
    drawn = [random_config(number) for number in range(12)]
    assert {cfg.batch for cfg in drawn} == {1, 2, 4, 8, 16} and {cfg.bus_bytes for cfg in drawn} >= {4, 8, 16, 32, 64}
    assert any(cfg.bus_bytes > instruction_bytes(cfg) for cfg in drawn)


def test_cases_repeat() -> None:
    assert random_config(3) == random_config(3) != random_config(4)
    work = list(chunks("legal", 230, 2, [random_config(0), random_config(1)]))
    assert [seed for _, _, seeds in work for seed in seeds] == list(range(2_000_000, 2_000_230))
    assert {cfg.name for _, cfg, _ in work} == {"random-0", "random-1"}


@pytest.mark.rtl
def test_cases_depend_on_their_seed_only() -> None:
    machine = Machine(CONFIGS["4x4"], rtl())
    assert [garbage(machine, seed) for seed in range(20)] == [garbage(machine, seed) for seed in range(20)]


# Processes that die, and continued runs

CASES = Chunk("forged", CONFIGS["4x4"], range(40))


def test_a_process_that_dies_or_hangs_is_replaced() -> None:
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("dies", partial(os._exit, 3)),
        ("lives", partial(int, 7)), ("hangs", partial(pow, 3, 10**9)), ("lives again", partial(int, 8)),
    ]  # fmt: skip
    with Workers(1) as workers:
        answers = dict(workers.run(calls, seconds=3))
    assert answers["lives"] == 7 and answers["lives again"] == 8
    assert answers["dies"] == "its process ended with 3" and answers["hangs"] == "no answer in 3 s"


class DeadWorkers(Workers):
    """Processes that die at each call."""

    def run(self, calls: Any, seconds: float) -> Any:
        return ((key, "its process ended with 3") for key, _ in calls)


def test_a_process_that_dies_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_run, "Workers", DeadWorkers)
    results = fuzz_run.run([CASES], 1)
    assert results.failures == ["forged cases 0 to 39 on custom: its process ended with 3"] and results.cases == 40


def _none_may_run(*arguments: object) -> Workers:
    raise AssertionError("a chunk that was done has run again")


def test_a_run_goes_on_where_another_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs.jsonl"
    results = chunk(*CASES)
    results.coverage.note(CASES.cfg, case_program(CASES.cfg, random.Random(1)).words())
    results.coverage.states[1, 2, 3, 0] = 2**40
    Journal(path).note(str(CASES), results.plain())
    with path.open("a") as file:
        file.write('{"key": "forged')  # the process ended here
    Journal(path).note("another", Results(cases=1).plain())
    journal = Journal(path)
    assert len(journal.done) == 2
    monkeypatch.setattr(fuzz_run, "Workers", _none_may_run)
    again = fuzz_run.run([CASES], 1, journal=journal)
    assert (again.cases, again.endings, again.failures) == (40, results.endings, [])
    assert again.coverage.fields == results.coverage.fields
    assert np.array_equal(again.coverage.states, results.coverage.states)


def test_chunks_of_other_sources_or_cases_have_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    others = (
        CASES._replace(kind="damaged"), CASES._replace(cfg=CONFIGS["8x8-bus16"]), CASES._replace(seeds=range(50)),
        CASES._replace(seeds=range(40, 80)),
    )  # fmt: skip
    key = str(CASES)
    assert len({key, *map(str, others)}) == 5
    monkeypatch.setattr(fuzz_run, "hardware_digest", lambda cfg: "other hardware")
    fuzz_run.sources.cache_clear()
    assert str(CASES) != key
    fuzz_run.sources.cache_clear()


class FailingWorkers(Workers):
    """Processes in which a case fails."""

    def run(self, calls: Any, seconds: float) -> Any:
        return ((key, Results(cases=40, failures=["forged case 3 on 4x4: it differs"])) for key, _ in calls)


def test_chunks_that_failed_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs.jsonl"
    monkeypatch.setattr(fuzz_run, "Workers", FailingWorkers)
    assert fuzz_run.run([CASES], 1, journal=Journal(path)).failures
    assert not Journal(path).done


def test_a_long_run_has_large_chunks() -> None:
    work = list(chunks("legal", 1_000_000, 1, [random_config(0), random_config(1)]))
    assert len(work) == fuzz_run.MOST_CHUNKS and sum(len(item.seeds) for item in work) == 1_000_000


# Planted faults


class Broken(FunctionalDevice):
    """A device that calls `after` at the end of each run, to change memory or to raise an error."""

    def __init__(self, after: Callable[[Broken], None]) -> None:
        super().__init__(CONFIGS["4x4"])
        self.after = after

    def run(self, instr_addr: int, count: int, timeout_cycles: int, trace: bool = False) -> Counters:
        counters = super().run(instr_addr, count, timeout_cycles, trace)
        self.after(self)
        return counters


def _flip(device: Broken) -> None:
    device.dram[-1] ^= 1


def _odd_words(device: Broken) -> None:
    raise DeviceError("AXI write: wvalid withdrawn")


def test_a_different_byte_is_found() -> None:
    with pytest.raises(Failure, match="DRAM byte"):
        legal(Machine(CONFIGS["4x4"], Broken(_flip)), 1)


@pytest.mark.parametrize("after", [_flip, _odd_words])
def test_a_device_that_does_not_recover_is_found(after: Callable[[Broken], None]) -> None:
    with pytest.raises(Failure):
        garbage(Machine(CONFIGS["4x4"], Broken(after)), 1)


@pytest.mark.rtl
def test_a_write_behind_the_limit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    device = rtl()
    run = device.run

    def beyond(instr_addr: int, count: int, timeout_cycles: int, trace: bool = False) -> Counters:
        device.beyond_limit[100] = 0
        return run(instr_addr, count, timeout_cycles, trace)

    monkeypatch.setattr(device, "run", beyond)
    with pytest.raises(Failure, match="behind the DMA limit"):
        garbage(Machine(CONFIGS["4x4"], device), 3)


@pytest.mark.rtl
def test_states_of_units_are_counted() -> None:
    """Every cycle of a run counts for one combination of states."""
    device = rtl()
    before = device.states()
    legal(Machine(CONFIGS["4x4"], device), 5)
    counted = device.states() - before
    assert counted.shape == (4, 4, 4, 4)
    assert 0 < counted[1].sum() < counted.sum()  # load was busy, and not always


def test_a_file_that_gives_other_outputs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Program.load

    def careless(path: str) -> Program:
        program = load(path)
        for array in program.constants.values():
            if array.dtype == np.float32:
                array[...] = 0
        return program

    files.intact()
    monkeypatch.setattr(files, "BYTES", (lambda data, rng: data,))
    monkeypatch.setattr(files.Program, "load", careless)
    with pytest.raises(Failure, match="differs"):
        files.damaged(Machine(CONFIGS["4x4"]), 1)


def test_a_message_that_is_no_sentence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wordy(ProgramError):
        def __str__(self) -> str:
            return "two\nlines"

    def wordy(path: str) -> Program:
        raise Wordy("two lines")

    files.intact()
    monkeypatch.setattr(files.Program, "load", wordy)
    with pytest.raises(Failure, match="no sentence"):
        files.damaged(Machine(CONFIGS["4x4"]), 1)
