"""Rows of `transformers`: encoders by onnxruntime's default quantisation, timed, against onnxruntime."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import celosia
from benchmarks.encoders import ENCODERS, quantised, sample
from benchmarks.rows import Row
from celosia.driver.oracle import session
from celosia.hw.config import Config
from celosia.sim.memory import MemoryModel

TARGETS = {"minilm_64": 1.10, "minilm_128": 1.10, "deit_tiny": 1.12}
"""Cycles over products / products a cycle, at most."""


def rows(models: tuple[str, ...], config: str | None, memory: MemoryModel, say: Callable[[str], None]) -> Iterator[Row]:
    """A row for each encoder, or those of `models`, with symmetric int8 activations and with uint8 ones."""
    cfg = Config.load(config or "pynq")
    for name in models or tuple(ENCODERS):
        for kind in ("int8", "uint8"):
            yield _row(name, kind, cfg, memory, say)


def _row(name: str, kind: str, cfg: Config, memory: MemoryModel, say: Callable[[str], None]) -> Row:
    encoder = ENCODERS[name]
    say(f"{name}, {kind}: quantising, compiling, running")
    x = sample(encoder.shape, 9)
    with tempfile.TemporaryDirectory() as folder:
        path = quantised(encoder.model(), encoder.shape, Path(folder), kind == "int8")
        program = celosia.compile(path, config=cfg)
        (expected,) = session(path, int8=True).run(None, {"x": x})
    result = celosia.Runtime(program, "timed", memory=memory).run({"x": x})
    report, wrong = result.report, int(np.sum(result.outputs["y"] != expected))
    share = report["macs_accelerator"] / report["macs_total"]
    ratio = report["cycles"] * cfg.macs_per_cycle / report["macs_total"]
    launches = len(program.launches)
    text = (
        f"{ratio:.3f} of the bound ({report['cycles']:,} cycles), {share:.2%} of the products, {launches} launches, "
        f"{wrong} values differ"
    )
    details = {
        "cycles": report["cycles"], "ratio": ratio, "share": share, "launches": launches, "different": wrong,
        "config": cfg.name,
    }  # fmt: skip
    what = f"{name}, {kind}, on {cfg.name}, timed: cycles over products / {cfg.macs_per_cycle}"
    command = f"python -m benchmarks transformers --models {name} --config {cfg.name} --memory {memory.name}"
    target, kept = TARGETS[name], not wrong and share >= 0.999 and ratio <= TARGETS[name]
    return Row(f"transformers/{name}/{kind}", what, f"≤ {target}, ≥ 99.9%, 0 differ", text, kept, command, details)
