"""Products of two activations: attention as onnxruntime computes it, on the accelerator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.encoders import Encoder, quantised, sample

import celosia

from ..oracle import opened

ENCODERS = {
    "of a whole block": (Encoder(16, 2, 16, 48), "pynq", True),
    "unsigned": (Encoder(32, 2, 16, 32, layers=2), "pynq", False),
    "ragged, nameless": (Encoder(21, 3, 16, 40, named=False), "pynq", False),
    "one token": (Encoder(1, 2, 16, 32, turned=True), "pynq", True),
    "one head": (Encoder(17, 1, 32, 16, turned=True), "pynq", False),
    "a mask, no bias": (Encoder(18, 2, 16, 32, masked=True, bias=False), "pynq", True),
    "small blocks": (Encoder(6, 3, 4, 10, turned=True), "tiny", False),
    "heads that are no whole groups": (Encoder(9, 2, 6, 20), "tiny", False),
}


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("qdq", [True, False], ids=["qdq", "qoperator"])
def test_encoders_are_onnxruntimes(name: str, qdq: bool, tmp_path: Path) -> None:
    encoder, config, signed = ENCODERS[name]
    path = quantised(encoder.model(), encoder.shape, tmp_path, signed, qdq)
    program = celosia.compile(path, config=config)
    x = sample(encoder.shape, 7)
    (expected,) = opened(path, int8=True).run(None, {"x": x})
    result = celosia.Runtime(program, "functional").run({"x": x})
    np.testing.assert_array_equal(result.outputs["y"], expected)
    program.save(tmp_path / "encoder.celosia")
    again = celosia.Runtime(celosia.Program.load(tmp_path / "encoder.celosia"), "functional").run({"x": x})
    np.testing.assert_array_equal(again.outputs["y"], expected)
