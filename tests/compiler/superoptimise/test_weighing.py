"""Processes of this machine and remote devices price the steps; useless devices do no harm."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from quantised_models import Quantised

from celosia.compiler.pricing import price
from celosia.compiler.superoptimise.compare_outputs import compare_on_random_inputs
from celosia.compiler.superoptimise.price import INFEASIBLE, UNMEASURED, Price
from celosia.compiler.superoptimise.search import BudgetError
from celosia.compiler.tune.device_pool import Fleet, InProcess, Job
from celosia.compiler.tune.layer_trial import VERSION, Status, TrialResult
from celosia.driver.tune.optimise import optimise
from celosia.driver.tune.weighing import PartJob, parse_price
from celosia.driver.workstation.oracle import open_model
from celosia.hw.spec.config import PRESETS

pytest.importorskip("onnxruntime")


def branchy() -> onnx.ModelProto:
    """Return branches of three kinds, to which several rules apply."""
    m = Quantised((1, 64, 8, 8))
    heads = [m.conv("x", 64, 8, 0.05, kernel) for kernel in (1, 1, 3, 3)]
    pooled = m.byte_operator("MaxPool", ["x"], kernel_shape=[3, 3], strides=[1, 1], pads=[1] * 4)
    return m.model(*heads, m.conv(pooled, 64, 16, 0.06))


class Named(InProcess):
    """This process as a device of another name.

    answer: what it returns in place of its result. seconds: how long it waits before.
    """

    def __init__(self, name: str, answer: TrialResult | None = None, seconds: float = 0) -> None:
        self.name, self.answer, self.seconds, self.asked = name, answer, seconds, 0

    def measure(self, job: Job, deadline: float) -> TrialResult:
        self.asked += 1
        time.sleep(min(self.seconds, deadline))
        return job.run() if self.answer is None else self.answer


def said(detail: str) -> TrialResult:
    return TrialResult(Status.OK, 1, detail)


@pytest.fixture(scope="module")
def alone() -> Any:
    return optimise(branchy(), budget=60)


def test_a_pool_finds_what_the_search_without_it_finds(alone: Any) -> None:
    devices = [Named("one"), Named("two")]
    with Fleet(devices) as fleet:
        found = optimise(branchy(), budget=60, fleet=fleet)
        fleet.run([PartJob(b"", PRESETS["tiny"])], lambda number, result: None)  # it is free again
    assert found.steps and found.after.total == alone.after.total and found.before == alone.before
    assert alone.state.weighed > 3 < found.state.weighed
    # On a busy machine one device may take most of the work, so the shares are not compared.
    assert all(device.asked for device in devices) and sum(device.asked for device in devices) > 6
    assert not found.state.excluded_devices
    assert not compare_on_random_inputs(branchy(), found.model, open_model)


NONSENSE = {
    "no JSON": said("cheap"), "no object": said("[1]"), "no number": said('{"cycles": "few", "host": 1}'),
    "no finite number": said('{"cycles": NaN, "host": 1}'), "less than nothing": said('{"cycles": -5, "host": 1}'),
    "died": TrialResult(Status.CRASHED, detail="it died"), "late": TrialResult(Status.HUNG, detail="late"),
}  # fmt: skip


def test_an_answer_that_is_none_is_no_price() -> None:
    for kind, result in NONSENSE.items():
        assert parse_price(result) is UNMEASURED, kind
    assert parse_price(TrialResult(Status.REFUSED)) is INFEASIBLE and parse_price(
        said('{"cycles": 7, "host": 2}')
    ) == Price(7, 2)


@pytest.mark.parametrize("kind", ["no JSON", "died"])
def test_devices_of_no_use_cost_no_more_than_their_steps(kind: str, alone: Any) -> None:
    """Steps without a valid answer are left out, and so is a device that fails three times in a row.

    This process continues.
    """
    with Fleet([Named("bad", NONSENSE[kind])]) as fleet:
        optimised = optimise(branchy(), budget=60, fleet=fleet)
    assert optimised.after.total <= optimised.before.total and not compare_on_random_inputs(
        branchy(), optimised.model, open_model
    )
    assert optimised.state.excluded_devices == ({} if kind == "no JSON" else {"bad": "process died: it died"})
    assert optimised.report["left_out"] == optimised.state.excluded_devices
    assert kind == "no JSON" or optimised.steps


def test_a_device_that_hangs_stops_no_search(alone: Any) -> None:
    late = Named("late", NONSENSE["late"], seconds=60)
    with Fleet([late, Named("good")], deadline=1) as fleet:
        found = optimise(branchy(), budget=60, fleet=fleet)
    assert late.asked and found.steps and found.state.ended == "nothing left"
    assert found.after.total < found.before.total


def test_a_price_that_is_a_lie_is_believed_by_nobody_in_the_end() -> None:
    """Wrong prices of parts do no harm, since this process prices the whole model."""
    rng = np.random.default_rng(0)

    class Liar(Named):
        def measure(self, job: Job, deadline: float) -> TrialResult:
            return said(f'{{"cycles": {rng.integers(1, 10_000)}, "host": 0}}')

    with Fleet([Liar("liar")]) as fleet:
        optimised = optimise(branchy(), budget=4, fleet=fleet)
    assert not compare_on_random_inputs(branchy(), optimised.model, open_model) and not optimised.refused
    assert optimised.after == price(optimised.model, "pynq") and optimised.after.total <= optimised.before.total


def test_another_version_is_refused() -> None:
    result = PartJob(branchy().SerializeToString(), PRESETS["pynq"], VERSION + 1).run()
    assert result.status == Status.FAILED and "was asked for; install the same Celosia" in result.detail


def test_times_of_this_processor_are_measured_here() -> None:
    with pytest.raises(BudgetError, match=r"one process.*jobs and pool"):
        optimise(branchy(), accelerator=False, jobs=2)


def children() -> set[int]:
    """Return the ids of living child processes."""
    pids = set[int]()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended since
            pids.update(map(int, (task / "children").read_text().split()))
    return pids


@pytest.mark.skipif(not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="no list of children here")
def test_ctrl_c_keeps_the_best_and_leaves_no_process() -> None:
    before, during = children(), set[int]()

    def interrupt(state: Any) -> None:
        during.update(children())
        if state.best.total < state.original.total and not state.ended:
            raise KeyboardInterrupt

    found = optimise(branchy(), budget=60, jobs=2, told=interrupt)
    assert found.state.ended == "interrupted" and found.steps and not found.state.excluded_devices
    assert len(during - before) == 2 and children() == before
    assert not compare_on_random_inputs(branchy(), found.model, open_model)
