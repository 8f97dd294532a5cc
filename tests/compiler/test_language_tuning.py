"""cl.autotune measures by the timing model, a device or the clock, and never measures what the records hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.language import linear

import celosia.language as cl
from celosia.compiler.language import tuning
from celosia.compiler.tune.records import Records, RecordsError
from celosia.hw.spec.config import Config
from celosia.sim.device import Counters
from celosia.sim.timing.timed import TimedDevice

RNG = np.random.default_rng(0)
SIZES = [cl.Config(BM=m, BN=n) for m in (4, 8, 16) for n in (4, 16)]
M, N, K = 40, 20, 32


def arguments() -> tuple[Any, ...]:
    x, w, y = (RNG.integers(-128, 128, shape).astype(np.int8) for shape in ((M, K), (N, K), (M, N)))
    par = cl.parameters(RNG.integers(-1000, 1000, N), RNG.random(N) / 100)
    return cl.quantised(x, 3), w, par, cl.quantised(y, -5), M, N, K


def grid(meta: dict[str, int]) -> tuple[int, int]:
    return cl.cdiv(M, meta["BM"]), cl.cdiv(N, meta["BN"])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the name of each measuring function is appended when it is called."""
    names: list[str] = []
    for name in ("_predict_cycles", "_measure_cycles", "_measure_picoseconds"):
        before = getattr(tuning._Search, name)

        def noted(*args: Any, before: Any = before, name: str = name) -> Any:
            names.append(name)
            return before(*args)

        monkeypatch.setattr(tuning._Search, name, noted)
    return names


class Turned(TimedDevice):
    """A device that reverses the timing model's ranking."""

    runs = 0

    @property  # type: ignore[override]
    def memory_model(self) -> str | None:
        return "turned round"

    @memory_model.setter
    def memory_model(self, name: str | None) -> None: ...

    def run(self, *args: Any, **options: Any) -> Counters:
        self.runs += 1
        counters = super().run(*args, **options)
        assert counters.cycles is not None
        return replace(counters, cycles=1_000_000 - counters.cycles)


def predicted() -> list[int]:
    """Return the cycles of each size, as reports of runs state them."""
    kernel, args = cl.jit(linear, config="tiny"), arguments()
    return [kernel[grid](*args, **size.values, device="timed").report["cycles"] for size in SIZES]


def test_the_timing_model_chooses_once(tmp_path: Path, asked: list[str]) -> None:
    path, cycles = tmp_path / "records.jsonl", predicted()
    for again in (False, True):
        kernel = cl.autotune(SIZES, ("M", "N", "K"), records=path)(cl.jit(linear, config="tiny"))
        for _ in range(2):
            assert kernel[grid](*arguments()).report["config"] == SIZES[cycles.index(min(cycles))].values
        assert asked == ["_predict_cycles"] * len(SIZES), again
    assert len(Records.load(path).trials) == len(SIZES)


def test_a_device_has_the_last_word_over_the_best_few(tmp_path: Path, asked: list[str]) -> None:
    path, cycles = tmp_path / "records.jsonl", predicted()
    first = sorted(range(len(SIZES)), key=lambda number: cycles[number])[: tuning.FINALISTS]
    for again in (False, True):
        device = Turned(Config.load("tiny"))
        kernel = cl.autotune(SIZES, ("M", "N", "K"), records=path)(cl.jit(linear, config="tiny"))
        launched = kernel[grid](*arguments(), device=device)
        worst = max(cycles[number] for number in first)
        assert cycles[[size.values for size in SIZES].index(launched.report["config"])] == worst
        assert device.runs == (1 if again else 1 + tuning.FINALISTS)
    assert asked.count("_measure_cycles") == tuning.FINALISTS and asked.count("_predict_cycles") == len(SIZES)


def twice(x, y, n, B: cl.constexpr):  # type: ignore[no-untyped-def]
    at = cl.program_id(0) * B + cl.arange(0, B)
    cl.store(y + at, cl.load(x + at, mask=at < n) * 2, mask=at < n)


def thrice(x, y, n, B: cl.constexpr):  # type: ignore[no-untyped-def]
    at = cl.program_id(0) * B + cl.arange(0, B)
    cl.store(y + at, cl.load(x + at, mask=at < n) * 3, mask=at < n)


def test_the_clock_is_asked_again_for_other_sizes_and_another_text(tmp_path: Path, asked: list[str]) -> None:
    path, sizes = tmp_path / "records.jsonl", [cl.Config(B=8), cl.Config(B=64)]
    thrice.__name__ = "twice"
    for function, n, expected in ((twice, 100, 2), (twice, 100, 2), (twice, 90, 4), (thrice, 90, 6), (thrice, 90, 6)):
        kernel = cl.autotune(sizes, ("n",), records=path)(cl.jit(function, target="cpu", threads=1))
        x, y = np.arange(100, dtype=np.float32), np.zeros(100, np.float32)
        kernel[lambda meta: (cl.cdiv(100, meta["B"]),)](x, y, n)
        assert asked == ["_measure_picoseconds"] * expected
        assert len(Records.load(path).trials) == 2 * expected  # alone, and by turns
        assert np.array_equal(y[:n], x[:n] * (2 if function is twice else 3)) and not y[n:].any()


def test_what_cannot_run_is_known_too(tmp_path: Path, asked: list[str]) -> None:
    path = tmp_path / "records.jsonl"
    for _ in range(2):
        kernel = cl.autotune([cl.Config(BM=4, BN=3)], records=path)(cl.jit(linear, config="tiny"))
        with pytest.raises(cl.LanguageError, match=r"linear on tiny.*columns of a block"):
            kernel[grid](*arguments())
    assert asked == ["_predict_cycles"]
    path.write_text("{}\n")
    with pytest.raises(RecordsError, match="holds no records"):
        cl.autotune(SIZES, records=path)(cl.jit(linear, config="tiny"))[grid](*arguments())


@pytest.mark.rtl
def test_the_rtl_chooses(tmp_path: Path) -> None:
    kernel, args = cl.jit(linear, config="tiny"), arguments()
    cycles = [kernel[grid](*args, **size.values, device="rtl").report["cycles"] for size in SIZES[: tuning.FINALISTS]]
    tuned = cl.autotune(SIZES[: tuning.FINALISTS], records=tmp_path / "records.jsonl")(kernel)
    report = tuned[grid](*args, device="rtl").report
    assert report["cycles"] == min(cycles) and report["config"] == SIZES[cycles.index(min(cycles))].values
