"""A user's code, which `make types` checks: what is public has types, and a wrong one is found. Nobody runs it."""

from __future__ import annotations

from typing import assert_type

import numpy as np

import celosia


def use() -> None:
    program: celosia.Program = celosia.compile("model.onnx", config=celosia.Config(block_in=8))
    with celosia.Runtime(program, device="timed") as runtime:
        result: celosia.Result = runtime.run({"image": np.zeros(1)})
        cycles: int = result.report["cycles"]
        runtime(np.zeros(1))
        for each in runtime.run_each([np.zeros(1)]):
            print(each.outputs["logits"].shape, cycles)
    assert_type(program.launches[0].layers[0].what, str)
    wrong: celosia.Runtime = program.launches[0]  # type: ignore[assignment]  # the planted fault: an idle one is an error
    print(wrong)
