"""Rows of `transformers`: encoders, attention alone, decoders; quantised by onnxruntime, timed, and against it.

With `--device rtl` (`layer_rows`) one layer of each on the RTL simulator, beside the timing model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import celosia
from benchmarks import decoders
from benchmarks.decoders import DECODERS, DecoderNetwork
from benchmarks.encoders import APART, ATTENTIONS, ENCODERS, LANES, NORM, Encoder, quantised, sample
from benchmarks.rows import Request, Row, cost, judged
from benchmarks.trained import TRAINED, norms
from celosia.compiler.program import Program
from celosia.driver.generate.decoder import Session
from celosia.driver.quantize.quantize import quantize
from celosia.driver.workstation.oracle import open_session
from celosia.hw.boards.memory import MemoryModel
from celosia.hw.spec.config import Config

TOKENS, PROMPT = 128, 112
"""Of a decoder's sequence, and of its prompt."""
RATIOS = {"minilm_64": 1.10, "minilm_128": 1.10, "deit_tiny": 1.12}
"""Cycles over products / products a cycle, at most."""
ROUNDED_RATIOS = RATIOS | {"minilm_64": 1.08, "minilm_128": 1.08}
"""Upper bounds of the same ratio with norms on the accelerator."""
LAUNCHES = {"minilm_64": 13, "minilm_128": 13, "deit_tiny": 26}
"""At most, with softmax on the accelerator."""
MAX_LANES = 8
"""Of a softmax beside which attention alone is bound by its products, up to 512 tokens."""


def rows(asked: Request) -> Iterator[Row]:
    """Rows of the section, by the device."""
    return layer_rows(asked) if asked.device == "rtl" else timed_rows(asked)


def timed_rows(asked: Request) -> Iterator[Row]:
    """A row for each network, or those that were chosen: encoders with symmetric int8 activations, with uint8 ones,
    with softmax on the accelerator, and with norms there, too, that are rounded correctly."""
    cfg, memory, say = Config.load(asked.preset), asked.memory, asked.say
    for name in asked.models or (*ENCODERS, *ATTENTIONS, *DECODERS, *TRAINED):
        say(f"{name}: quantising, compiling, running")
        if name in TRAINED:
            yield from TRAINED[name](cfg, memory, say)
        elif name in DECODERS:
            for lanes in (0, LANES):
                yield _step(name, replace(cfg, softmax=lanes), memory)
            if DECODERS[name].rotary:
                yield _step(name, cfg, memory, rotary=True)
            yield _rounded_step(name, replace(cfg, softmax=LANES, norm=NORM), memory)
        elif name in ATTENTIONS:
            for lanes in (0, LANES, MAX_LANES):
                yield _attention(name, replace(cfg, softmax=lanes), memory)
        else:
            for kind, each in (("int8", cfg), ("uint8", cfg), ("int8", replace(cfg, softmax=LANES))):
                yield _encoder(name, kind, each, memory)
            yield _rounded(name, replace(cfg, softmax=LANES, norm=NORM), memory)


def _command(name: str, cfg: Config, memory: MemoryModel, device: str = "") -> str:
    return f"python -m benchmarks transformers{device} --models {name} --config {cfg.name} --memory {memory.name}"


def _what(name: str, cfg: Config) -> str:
    on = f" with softmax = {cfg.softmax}" * (cfg.softmax > 0) + f", norm = {cfg.norm}" * (cfg.norm > 0)
    return f"{name} on {cfg.name}{on}, timed: ratio of cycles to products / {cfg.macs_per_cycle}"


def _compared(encoder: Encoder, signed: bool, cfg: Config, memory: MemoryModel) -> tuple[Program, dict[str, Any]]:
    """The program of an encoder, and what it costs beside onnxruntime's values."""
    feed = {"x": sample(encoder.shape, 9)}
    with tempfile.TemporaryDirectory() as folder:
        path = quantised(encoder.model(), encoder.shape, Path(folder), signed)
        program = celosia.compile(path, config=cfg)
        (expected,) = open_session(path, int8=True).run(None, feed)
    result = celosia.Runtime(program, "timed", memory=memory).run(feed)
    return program, cost(program, result) | {"different": int(np.sum(result.outputs["y"] != expected))}


def _encoder(name: str, kind: str, cfg: Config, memory: MemoryModel) -> Row:
    _, details = _compared(ENCODERS[name], kind == "int8", cfg, memory)
    asked = f"ratio <= {RATIOS[name]}, share >= 0.999, different <= 0"
    asked += f", launches <= {LAUNCHES[name]}" if cfg.softmax else ""
    key = f"transformers/{name}/{kind}" + "/softmax" * (cfg.softmax > 0)
    return judged(key, f"{kind}: {_what(name, cfg)}", _command(name, cfg, memory), details, asked)


def _rounded(name: str, cfg: Config, memory: MemoryModel) -> Row:
    """With norms on the accelerator; each of them is compared with onnxruntime's on the same bytes, for what follows
    from a byte that is another has other bytes."""
    encoder = ENCODERS[name]
    feed = {"x": sample(encoder.shape, 9)}
    with tempfile.TemporaryDirectory() as folder:
        path = quantised(encoder.model(), encoder.shape, Path(folder), signed=True)
        program = celosia.compile(path, config=cfg, rounding="correct")
        details = norms(path, feed, cfg)
    details = cost(program, celosia.Runtime(program, "timed", memory=memory).run(feed)) | details
    asked = f"ratio <= {ROUNDED_RATIOS[name]}, share >= 0.999, launches <= 1, share_apart <= {APART:g}, different <= 0"
    key = f"transformers/{name}/int8/rounded"
    return judged(key, f"int8, rounded: {_what(name, cfg)}", _command(name, cfg, memory), details, asked)


def _attention(name: str, cfg: Config, memory: MemoryModel) -> Row:
    """Q and K and V to the heads' results, and nothing else: what scores and softmax cost."""
    attention = ATTENTIONS[name]
    program, details = _compared(attention, True, cfg, memory)
    stored = sum(layer.bytes_stored for launch in program.launches for layer in launch.layers)
    # What is stored beside the result; without softmax the host puts the probabilities there.
    scores = stored - attention.tokens * attention.channels + (not cfg.softmax) * attention.heads * attention.tokens**2
    key = f"transformers/{name}/int8" + f"/softmax{cfg.softmax}" * (cfg.softmax > 0)
    what = f"{_what(name, cfg)}; bytes of scores and probabilities in DRAM"
    asked = "ratio <= 1.25, scores <= 0, different <= 0"
    return judged(key, what, _command(name, cfg, memory), {**details, "scores": scores}, asked)


# Steps of decoders ---------------------------------------------------------------------------------------------------


def _step(name: str, cfg: Config, memory: MemoryModel, rotary: bool = False) -> Row:
    """Steps of a decoder behind a prompt, against onnxruntime with a cache that grows; attention in bytes where the
    accelerator has a softmax. rotary: rotary positions in bytes."""
    network = DECODERS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = decoders.quantised(network, Path(folder), past=TOKENS - 1, attention=cfg.softmax > 0, rotary=rotary)
        details = _steps(path, network, cfg, memory)
    key = f"transformers/{name}/step" + "/softmax" * (cfg.softmax > 0) + "/rotary" * rotary
    what = f"steps at {PROMPT} to {TOKENS} tokens: {_what(name, cfg)}; shares of the bus"
    asked = f"bus >= 0.95, share >= 0.999, launches <= {3 * network.layers}, different <= 0"
    return judged(key, what, _command(name, cfg, memory), details, asked)


def _rounded_step(name: str, cfg: Config, memory: MemoryModel) -> Row:
    """Measure steps with everything in bytes, by `celosia.quantize`, norms rounded correctly; of TOKENS at once each
    norm is compared with onnxruntime's on the same bytes. different: of logits."""
    network = DECODERS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = _all_in_bytes(network, cfg, Path(folder))
        details = _steps(path, network, cfg, memory, rounding="correct")
        beside = norms(path, network.feed(TOKENS, 1, seed=9, valid=0), cfg)
    details |= {**beside, "tensors_different": beside["different"], "different": details["different"]}
    what = f"steps at {PROMPT} to {TOKENS} tokens, rounded: {_what(name, cfg)}; shares of the bus"
    asked = f"bus >= 0.95, share >= 0.999, launches <= 1, share_apart <= {APART:g}, tensors_different <= 0"
    return judged(f"transformers/{name}/step/rounded", what, _command(name, cfg, memory), details, asked)


def _all_in_bytes(network: DecoderNetwork, cfg: Config, folder: Path) -> Path:
    path, samples = folder / "int8.onnx", np.random.default_rng(0).integers(0, network.vocabulary, (8, TOKENS // 2))
    onnx.save(network.model(), folder / "float.onnx")
    quantize(folder / "float.onnx", {"input_ids": samples}, path, operators="all", config=cfg)
    return path


def _steps(
    path: Path, network: DecoderNetwork, cfg: Config, memory: MemoryModel, rounding: str = "onnxruntime"
) -> dict[str, Any]:
    """Details of steps behind a prompt, with the likeliest tokens. least: of the bus, by what is needed once."""
    run, logits = generated(path, "timed", cfg, rounding, {"memory": memory})
    expected = growing(path, network, run.tokens)
    usage = run.usage.report()
    steps = usage["steps"]
    return {
        "cycles": round(usage["cycles_per_token"]), "share": usage["share"], "launches": usage["launches"],
        "bus": usage["bandwidth"],
        "least": steps["runs"] * network.bytes_of_a_step(TOKENS) / (steps["cycles"] * cfg.bus_bytes),
        "different": int(np.sum(logits != expected[PROMPT - 1 :])), "config": cfg.name,
    }  # fmt: skip


def generated(
    path: Path, device: str, cfg: Config, rounding: str, options: dict[str, Any], prompt: int = PROMPT,
    until: int = TOKENS,
) -> tuple[Session, Any]:  # fmt: skip
    """A session on `device`, of a random prompt and the likeliest tokens behind it, `until` there are so many, with
    room for TOKENS; and logits [1 + until - prompt, vocabulary], from those behind the prompt on."""
    with celosia.Decoder(path, device, config=cfg, length=TOKENS, rounding=rounding, options=options) as decoder:
        run = decoder.session()
        logits = [run.feed(np.random.default_rng(1).integers(0, decoder.known, prompt).tolist())]
        while run.length < until:
            logits.append(run.feed([int(np.argmax(logits[-1]))]))
    return run, np.array(logits)


def growing(path: Path, network: DecoderNetwork, tokens: list[int]) -> Any:
    """onnxruntime's logits [tokens, vocabulary], a token at a time."""
    run, logits = open_session(path, int8=True), []
    caches = {name: array[:, :, :0] for name, array in network.feed(1, 1, 0).items() if name.startswith("past")}
    names = [each.name for each in run.get_outputs()]
    for place, token in enumerate(tokens):
        whole = {
            "input_ids": np.array([[token]]), "attention_mask": np.ones((1, place + 1), np.int64),
            "position_ids": np.array([[place]]),
        }  # fmt: skip
        outputs = dict(zip(names, run.run(names, whole | caches)))
        logits.append(outputs.pop("logits")[0, 0])
        caches = {name.replace("present", "past_key_values"): array for name, array in outputs.items()}
    return np.array(logits)


# One layer on the RTL ------------------------------------------------------------------------------------------------

ROUNDINGS = {"softmax": "onnxruntime", "rounded": "correct"}
"""Values of the option `rounding`, by the end of a row's key. With "correct" the accelerator also computes norms."""
SHORT_PROMPT, UNTIL = 16, 18
"""Tokens of a prompt, and of all. The cache has room for TOKENS, so that a step is as long as any."""
MOST_OFF = 1
"""Percent that the timing model's cycles may be off."""


def layer_rows(asked: Request) -> Iterator[Row]:
    """Two rows for each network, or those that were chosen, by ROUNDINGS; one of attention alone, which has no norm."""
    cfg, memory = replace(Config.load(asked.preset), softmax=LANES, norm=NORM), asked.memory
    for name in asked.models or (*ENCODERS, "attention_64", *DECODERS):
        for kind, rounding in ROUNDINGS.items():
            if name in ATTENTIONS and kind == "rounded":
                continue
            asked.say(f"{name}, {kind}: quantising, compiling, running on the RTL")
            with tempfile.TemporaryDirectory() as folder:
                if name in DECODERS:
                    details = _step_on_rtl(replace(DECODERS[name], layers=1), cfg, rounding, memory, Path(folder))
                else:
                    encoder = ATTENTIONS[name] if name in ATTENTIONS else replace(ENCODERS[name], layers=1)
                    details = _layer_on_rtl(encoder, cfg, rounding, memory, Path(folder))
            details["off"] = 100 * abs(details["timed"] / details["rtl"] - 1)
            beside = "the functional simulator's" if kind == "rounded" else "onnxruntime's"
            what = f"one layer of {name}, {kind}, with softmax = {LANES}, norm = {NORM}: cycles; values not {beside}"
            command = _command(name, cfg, memory, " --device rtl")
            bounds = f"off <= {MOST_OFF}, different <= 0"
            yield judged(f"transformers/{name}/rtl/{kind}", what, command, {**details, "config": cfg.name}, bounds)


def _layer_on_rtl(encoder: Encoder, cfg: Config, rounding: str, memory: MemoryModel, folder: Path) -> dict[str, Any]:
    """Details of a layer of an encoder, or of attention alone."""
    feed = {"x": sample(encoder.shape, 9)}
    path = quantised(encoder.model(), encoder.shape, folder, signed=True)
    program = celosia.compile(path, config=cfg, rounding=rounding)
    if rounding == "correct":
        expected = celosia.Runtime(program).run(feed).outputs["y"]
    else:
        (expected,) = open_session(path, int8=True).run(None, feed)
    rtl, timed = (celosia.Runtime(program, device, memory=memory).run(feed) for device in ("rtl", "timed"))
    return {
        "rtl": rtl.report["cycles"], "timed": timed.report["cycles"], "launches": len(program.launches),
        "values": expected.size, "different": int(np.sum(rtl.outputs["y"] != expected)),
    }  # fmt: skip


def _step_on_rtl(
    network: DecoderNetwork, cfg: Config, rounding: str, memory: MemoryModel, folder: Path
) -> dict[str, Any]:
    """Details of steps of a decoder behind a prompt, which counts for the values, not for the cycles."""
    if rounding == "correct":
        path = _all_in_bytes(network, cfg, folder)
    else:
        path = decoders.quantised(network, folder, past=TOKENS - 1, attention=True)
    (rtl, logits), (timed, _) = (
        generated(path, device, cfg, rounding, {"memory": memory}, SHORT_PROMPT, UNTIL) for device in ("rtl", "timed")
    )
    if rounding == "correct":
        _, expected = generated(path, "functional", cfg, rounding, {}, SHORT_PROMPT, UNTIL)
    else:
        expected = growing(path, network, rtl.tokens)[SHORT_PROMPT - 1 :]
    return {
        "rtl": rtl.usage.steps.cycles, "timed": timed.usage.steps.cycles, "launches": rtl.usage.launches,
        "values": expected.size, "different": int(np.sum(logits != expected)),
    }  # fmt: skip
