"""Rows of `transformers --device rtl`: one layer of each network on the RTL simulator, beside the timing model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import celosia
from benchmarks import decoders
from benchmarks.decoders import DECODERS, DecoderNetwork
from benchmarks.encoders import ATTENTIONS, ENCODERS, LANES, NORM, Encoder, quantised, sample
from benchmarks.rows import Row
from benchmarks.transformers import TOKENS, generated, growing
from celosia.driver.host.oracle import session
from celosia.driver.quantize.quantize import quantize
from celosia.hw.boards.memory import MemoryModel
from celosia.hw.spec.config import Config

ROUNDINGS = {"softmax": "onnxruntime", "rounded": "correct"}
"""What runs beside products on the accelerator, by the end of a row's key: softmax; norms, too."""
PROMPT, UNTIL = 16, 18
"""Tokens of a prompt, and of all. The cache has room for TOKENS, so that a step is as long as any."""
MOST_ERROR = 0.01
"""Of the timing model's cycles."""


def rows(models: tuple[str, ...], config: str | None, memory: MemoryModel, say: Callable[[str], None]) -> Iterator[Row]:
    """Two rows for each network, or those of `models`, by ROUNDINGS; one of attention alone, which has no norm."""
    cfg = replace(Config.load(config or "pynq"), softmax=LANES, norm=NORM)
    for name in models or (*ENCODERS, "attention_64", *DECODERS):
        for kind, rounding in ROUNDINGS.items():
            if name in ATTENTIONS and kind == "rounded":
                continue
            say(f"{name}, {kind}: quantising, compiling, running on the RTL")
            with tempfile.TemporaryDirectory() as folder:
                if name in DECODERS:
                    found = _step(replace(DECODERS[name], layers=1), cfg, rounding, memory, Path(folder))
                else:
                    encoder = ATTENTIONS[name] if name in ATTENTIONS else replace(ENCODERS[name], layers=1)
                    found = _layer(encoder, cfg, rounding, memory, Path(folder))
            yield _row(name, kind, cfg, memory, found)


def _layer(encoder: Encoder, cfg: Config, rounding: str, memory: MemoryModel, folder: Path) -> dict[str, Any]:
    """Details of a layer of an encoder, or of attention alone."""
    x = {"x": sample(encoder.shape, 9)}
    path = quantised(encoder.model(), encoder.shape, folder, signed=True)
    program = celosia.compile(path, config=cfg, rounding=rounding)
    if rounding == "correct":
        expected = celosia.Runtime(program).run(x).outputs["y"]
    else:
        (expected,) = session(path, int8=True).run(None, x)
    rtl, timed = (celosia.Runtime(program, device, memory=memory).run(x) for device in ("rtl", "timed"))
    return {
        "rtl": rtl.report["cycles"], "timed": timed.report["cycles"], "launches": len(program.launches),
        "values": expected.size, "different": int(np.sum(rtl.outputs["y"] != expected)),
    }  # fmt: skip


def _step(network: DecoderNetwork, cfg: Config, rounding: str, memory: MemoryModel, folder: Path) -> dict[str, Any]:
    """Details of steps of a decoder behind a prompt, which counts for the values, not for the cycles."""
    if rounding == "correct":
        path, samples = folder / "int8.onnx", np.random.default_rng(0).integers(0, network.vocabulary, (8, TOKENS // 2))
        onnx.save(network.model(), folder / "float.onnx")
        quantize(folder / "float.onnx", {"input_ids": samples}, path, operators="all", config=cfg)
    else:
        path = decoders.quantised(network, folder, past=TOKENS - 1, attention=True)
    (rtl, made), (timed, _) = (
        generated(path, device, cfg, rounding, {"memory": memory}, PROMPT, UNTIL) for device in ("rtl", "timed")
    )
    if rounding == "correct":
        _, expected = generated(path, "functional", cfg, rounding, {}, PROMPT, UNTIL)
    else:
        expected = growing(path, network, rtl.tokens)[PROMPT - 1 :]
    return {
        "rtl": rtl.usage.steps.cycles, "timed": timed.usage.steps.cycles, "launches": rtl.usage.launches,
        "values": expected.size, "different": int(np.sum(made != expected)),
    }  # fmt: skip


def _row(name: str, kind: str, cfg: Config, memory: MemoryModel, found: dict[str, Any]) -> Row:
    error = found["timed"] / found["rtl"] - 1
    part = "attention" if name in ATTENTIONS else f"{UNTIL - PROMPT} steps" if name in DECODERS else "a layer"
    beside = "those of the functional simulator" if kind == "rounded" else "onnxruntime's"
    return Row(
        f"transformers/{name}/rtl/{kind}",
        f"{name}, one layer, {kind}, on {cfg.name} with softmax = {cfg.softmax}, norm = {cfg.norm}: cycles of {part}, "
        f"and values that are not {beside}",
        f"timing model within {MOST_ERROR:.0%}; 0 differ",
        f"RTL {found['rtl']:,}, model {found['timed']:,} ({error:+.2%}); {found['different']} of {found['values']:,} "
        f"differ; launches: {found['launches']}",
        abs(error) <= MOST_ERROR and not found["different"],
        f"python -m benchmarks transformers --device rtl --models {name} --config {cfg.name} --memory {memory.name}",
        {**found, "error": error, "config": cfg.name, "softmax": cfg.softmax, "norm": cfg.norm},
    )  # fmt: skip
