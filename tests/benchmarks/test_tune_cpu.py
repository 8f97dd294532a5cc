"""The benchmark of tuned kernels compares each convolution once, and reports failures."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from benchmarks import tune_cpu

from celosia.compiler.tune.device_pool import Fleet
from celosia.driver.workstation.oracle import open_session


def test_each_convolution_of_a_network_is_there_once() -> None:
    convolutions = list(tune_cpu.convolutions("detector"))
    assert len({case.name for case in convolutions}) == len(convolutions) > 10
    kinds = {case.model.graph.node[0].op_type for case in convolutions}
    assert kinds == {"Conv", "ConvTranspose"}
    for case in convolutions[:3]:
        assert open_session(case.model, threads=1).run(None, case.feed)[0].size


def test_a_kernel_is_tuned_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_cpu, "records_path", lambda: tmp_path / "records.jsonl")
    size = tune_cpu.TuningSize(3, 3, False)
    with Fleet.local(1, 120.0) as fleet:
        chosen = list(tune_cpu.cases(("gelu",)))
        rows = list(tune_cpu.kernel_rows(chosen, size, fleet, lambda text: None, "command"))
    assert [row.key for row in rows] == ["tune/cpu/gelu", "tune/cpu/kernels"]
    assert 0 < rows[0].details["ratio"] < 100
    assert rows[0].details["error"] < 1e-4
    assert (tmp_path / "records.jsonl").exists()


def test_a_kernel_that_fails_is_a_row() -> None:
    case = next(tune_cpu.cases(("gelu",)))
    broken = tune_cpu.TimedKernel("broken", onnx.ModelProto(), case.feed, 0.0)
    with Fleet.local(1, 120.0) as fleet:
        rows = list(tune_cpu.kernel_rows([broken], tune_cpu.CI, fleet, lambda text: None, "command"))
    assert rows[0].measured.startswith("failed: ")
    assert rows[0].met is False
    assert rows[1].met is False
