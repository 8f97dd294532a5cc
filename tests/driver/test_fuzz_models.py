"""Run mutated models for a bounded time; `fuzz_models.py` runs them for any time.

test_bad_models.py holds its findings as fixed cases.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fuzz_models import KINDS, Worker, difference, finding
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mutations import mutated, seeds
from thorough import tries


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[Worker, Worker]]:
    with Worker() as worker, Worker("onnxruntime") as oracle:
        yield worker, oracle


@pytest.mark.thorough
def test_no_mutated_model_surprises(workers: tuple[Worker, Worker]) -> None:
    """A mutated model runs or is refused in one sentence: no crash, no hang, no other error."""
    end = time.monotonic() + 60
    few = [name for name in seeds() if not name.startswith("test_")]
    found: list[dict[str, Any]] = []
    names = st.one_of(st.sampled_from(sorted(seeds())), st.sampled_from(few))

    # The same cases every time, so that a change is judged by its own faults; fuzz_models.py looks for new ones.
    @settings(
        max_examples=tries(400), derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
    )
    @given(name=names, kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3), seed=st.integers(0, 2**32 - 1))
    def one(name: str, kinds: list[str], seed: int) -> None:
        if time.monotonic() > end and not found:  # what was found is run again to be reported
            return
        answer = workers[0].run(*mutated(name, kinds, seed))
        if finding(answer):
            found.append(answer)
        assert not finding(answer), f"{finding(answer)}\n{answer.get('trace', '')}"

    one()


def test_what_runs_agrees_with_onnxruntime(workers: tuple[Worker, Worker]) -> None:
    """ONNX's node tests with other inputs and attributes agree with onnxruntime if both run them."""
    worker, oracle = workers
    compared = 0
    for number, name in enumerate(sorted(seeds())[::90]):
        content, inputs = mutated(name, ["change_dims"], number)
        answer = worker.run(content, inputs)
        assert not finding(answer)
        if answer["status"] == "ran":
            assert not difference(content, answer, oracle)
            compared += 1
    assert compared > 3


def _answer(content: bytes, inputs: dict[str, Any]) -> dict[str, Any]:
    with Worker("planted") as worker:
        return worker.run(content, inputs)


@pytest.mark.parametrize(("fault", "status"), [("crash", "crash"), ("loop", "slow"), ("error", "fault")])
def test_faults_are_seen(fault: str, status: str) -> None:
    """The fuzzer finds planted faults: a segmentation fault, an endless loop, an error of an unknown class."""
    answer = _answer(fault.encode(), {})
    assert answer["status"] == status and finding(answer)


def test_differences_are_seen(workers: tuple[Worker, Worker]) -> None:
    content, inputs = mutated("floats", [], 0)
    answer = workers[0].run(content, inputs)
    assert answer["status"] == "ran" and not difference(content, answer, workers[1])
    answer["outputs"]["a/sum"] = answer["outputs"]["a/sum"] + np.float32(0.1)
    assert "a/sum" in difference(content, answer, workers[1])
