"""Rows of `transformers`: encoders, attention alone, decoders; quantised by onnxruntime, timed, and against it."""

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
from benchmarks.decoders import DECODERS
from benchmarks.encoders import APART, ATTENTIONS, ENCODERS, LANES, NORM, quantised, sample
from benchmarks.rows import Row
from benchmarks.trained import TRAINED
from celosia.driver.accuracy.compare import compare
from celosia.driver.generate.decoder import Session
from celosia.driver.host.oracle import session
from celosia.driver.quantize.quantize import quantize
from celosia.hw.boards.memory import MemoryModel
from celosia.hw.spec.config import Config

TOKENS, PROMPT = 128, 112
"""Of a decoder's sequence, and of its prompt."""
TARGETS = {"minilm_64": 1.10, "minilm_128": 1.10, "deit_tiny": 1.12}
"""Cycles over products / products a cycle, at most."""
LAUNCHES = {"minilm_64": 13, "minilm_128": 13, "deit_tiny": 26}
"""At most, with softmax on the accelerator."""
MAX_LANES = 8
"""Of a softmax beside which attention alone is bound by its products, up to 512 tokens."""
ROUNDED = {"minilm_64": 1.08, "minilm_128": 1.08, "deit_tiny": 1.12}
"""Cycles over products / products a cycle, at most, in one launch."""


def rows(models: tuple[str, ...], config: str | None, memory: MemoryModel, say: Callable[[str], None]) -> Iterator[Row]:
    """A row for each network, or those of `models`: encoders with symmetric int8 activations, with uint8 ones, with
    softmax on the accelerator, and with norms there, too, that are rounded correctly."""
    cfg = Config.load(config or "pynq")
    for name in models or (*ENCODERS, *ATTENTIONS, *DECODERS, *TRAINED):
        if name in TRAINED:
            yield from TRAINED[name](cfg, memory, say)
        elif name in DECODERS:
            for lanes in (0, LANES):
                yield _step(name, replace(cfg, softmax=lanes), memory, say)
            if DECODERS[name].rotary:
                yield _step(name, cfg, memory, say, rotary=True)
            yield _rounded_step(name, replace(cfg, softmax=LANES, norm=NORM), memory, say)
        elif name in ATTENTIONS:
            for lanes in (0, LANES, MAX_LANES):
                yield _attention(name, replace(cfg, softmax=lanes), memory, say)
        else:
            for kind, each in (("int8", cfg), ("uint8", cfg), ("int8", replace(cfg, softmax=LANES))):
                yield _row(name, kind, each, memory, say)
            yield _rounded(name, replace(cfg, softmax=LANES, norm=NORM), memory, say)


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
        "config": cfg.name, "softmax": cfg.softmax,
    }  # fmt: skip
    on = _on(cfg)
    what = f"{name}, {kind}, on {on}, timed: cycles over products / {cfg.macs_per_cycle}"
    command = f"python -m benchmarks transformers --models {name} --config {cfg.name} --memory {memory.name}"
    target, kept = TARGETS[name], not wrong and share >= 0.999 and ratio <= TARGETS[name]
    asked, key = f"≤ {target}, ≥ 99.9%, 0 differ", f"transformers/{name}/{kind}"
    if cfg.softmax:
        asked, kept = f"{asked}, ≤ {LAUNCHES[name]} launches", kept and launches <= LAUNCHES[name]
    return Row(key + "/softmax" * (cfg.softmax > 0), what, asked, text, kept, command, details)


def _rounded(name: str, cfg: Config, memory: MemoryModel, say: Callable[[str], None]) -> Row:
    """With norms on the accelerator; each of them is compared with onnxruntime's on the same bytes, for what follows
    from a byte that is another has other bytes."""
    encoder = ENCODERS[name]
    say(f"{name}, rounded correctly: quantising, compiling, running")
    x = {"x": sample(encoder.shape, 9)}
    with tempfile.TemporaryDirectory() as folder:
        path = quantised(encoder.model(), encoder.shape, Path(folder), signed=True)
        program = celosia.compile(path, config=cfg, rounding="correct")
        found = compare(path, x, config=cfg, rounding="correct", check=False)
    report, rounded = celosia.Runtime(program, "timed", memory=memory).run(x).report, found["rounded"]
    share = report["macs_accelerator"] / report["macs_total"]
    ratio = report["cycles"] * cfg.macs_per_cycle / report["macs_total"]
    launches, apart = len(program.launches), rounded["apart"] / rounded["values"]
    details = {
        "cycles": report["cycles"], "ratio": ratio, "share": share, "launches": launches, "apart": rounded["apart"],
        "different": found["different"], "config": cfg.name, "softmax": cfg.softmax, "norm": cfg.norm,
    }  # fmt: skip
    return Row(
        f"transformers/{name}/int8/rounded",
        f"{name}, int8, on {_on(cfg)} and norm = {cfg.norm}, timed: cycles over products / {cfg.macs_per_cycle}",
        f"≤ {ROUNDED[name]}, ≥ 99.9%, 1 launch, ≤ {APART:g} of values of norms a step apart, no other tensor differs",
        f"{ratio:.3f} of the bound ({report['cycles']:,} cycles), {share:.2%} of the products, launches: {launches}, "
        f"{rounded['apart']} of {rounded['values']:,} values apart, {found['different']} other tensors differ",
        ratio <= ROUNDED[name] and share >= 0.999 and launches == 1 and apart <= APART and not found["different"],
        f"python -m benchmarks transformers --models {name} --config {cfg.name} --memory {memory.name}", details,
    )  # fmt: skip


def _on(cfg: Config) -> str:
    return f"{cfg.name} with softmax = {cfg.softmax}" if cfg.softmax else cfg.name


def _attention(name: str, cfg: Config, memory: MemoryModel, say: Callable[[str], None]) -> Row:
    """Q and K and V to the heads' results, and nothing else: what scores and softmax cost."""
    attention = ATTENTIONS[name]
    say(f"{name}: quantising, compiling, running")
    x = sample(attention.shape, 9)
    with tempfile.TemporaryDirectory() as folder:
        path = quantised(attention.model(), attention.shape, Path(folder), signed=True)
        program = celosia.compile(path, config=cfg)
        (expected,) = session(path, int8=True).run(None, {"x": x})
    result = celosia.Runtime(program, "timed", memory=memory).run({"x": x})
    report, wrong = result.report, int(np.sum(result.outputs["y"] != expected))
    ratio = report["cycles"] * cfg.macs_per_cycle / report["macs_total"]
    stored = sum(layer.bytes_stored for launch in program.launches for layer in launch.layers)
    # What is stored beside the result; without softmax the host puts the probabilities there.
    scores = stored - attention.tokens * attention.channels + (not cfg.softmax) * attention.heads * attention.tokens**2
    details = {
        "cycles": report["cycles"], "ratio": ratio, "scores": scores, "different": wrong, "config": cfg.name,
        "softmax": cfg.softmax,
    }  # fmt: skip
    return Row(
        f"transformers/{name}/int8" + f"/softmax{cfg.softmax}" * (cfg.softmax > 0),
        f"{name}, on {_on(cfg)}, timed: cycles over products / {cfg.macs_per_cycle}",
        "≤ 1.25, no bytes of scores and probabilities in DRAM, 0 differ",
        f"{ratio:.3f} ({report['cycles']:,} cycles), {scores:,} bytes of them, {wrong} values differ",
        not wrong and not scores and ratio <= 1.25,
        f"python -m benchmarks transformers --models {name} --config {cfg.name} --memory {memory.name}", details,
    )  # fmt: skip


def _step(name: str, cfg: Config, memory: MemoryModel, say: Callable[[str], None], rotary: bool = False) -> Row:
    """Steps of a decoder behind a prompt, against onnxruntime with a cache that grows; attention in bytes where the
    accelerator has a softmax. rotary: rotary positions in bytes."""
    network = DECODERS[name]
    say(f"{name}: quantising, compiling, running")
    with tempfile.TemporaryDirectory() as folder:
        path = decoders.quantised(network, Path(folder), past=TOKENS - 1, attention=cfg.softmax > 0, rotary=rotary)
        details, text = _steps(path, network, cfg, memory)
    kept = not details["different"] and details["share"] >= 0.999 and details["bus"] >= 0.95
    kept &= details["launches"] <= 3 * network.layers
    command = f"python -m benchmarks transformers --models {name} --config {cfg.name} --memory {memory.name}"
    what = f"{name}, a step at {PROMPT} to {TOKENS} tokens, on {_on(cfg)}, timed: bytes loaded over the bus"
    key = f"transformers/{name}/step" + "/softmax" * (cfg.softmax > 0) + "/rotary" * rotary
    return Row(key, what, "≥ 95%, ≥ 99.9%, ≤ 3 a layer, 0 differ", text, kept, command, details)


def _rounded_step(name: str, cfg: Config, memory: MemoryModel, say: Callable[[str], None]) -> Row:
    """The same with everything in bytes, by `celosia.quantize`, norms rounded correctly; of TOKENS at once each norm is
    compared with onnxruntime's on the same bytes."""
    network = DECODERS[name]
    say(f"{name}, rounded correctly: quantising, compiling, running")
    with tempfile.TemporaryDirectory() as folder:
        source, path = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        onnx.save(network.model(), source)
        samples = np.random.default_rng(0).integers(0, network.vocabulary, (8, TOKENS // 2))
        quantize(source, {"input_ids": samples}, path, operators="all", config=cfg)
        details, text = _steps(path, network, cfg, memory, rounding="correct")
        found = compare(path, network.feed(TOKENS, 1, seed=9, valid=0), config=cfg, rounding="correct", check=False)
    rounded = found["rounded"]
    details |= {"apart": rounded["apart"], "values": rounded["values"], "norm": cfg.norm}
    kept = details["launches"] <= 1 and details["share"] >= 0.999 and details["bus"] >= 0.95
    kept &= rounded["apart"] <= APART * rounded["values"] and not found["different"]
    return Row(
        f"transformers/{name}/step/rounded",
        f"{name}, a step at {PROMPT} to {TOKENS} tokens, on {_on(cfg)} and norm = {cfg.norm}, timed: bytes loaded over "
        "the bus",
        f"≥ 95%, ≥ 99.9%, 1 launch, ≤ {APART:g} of values of norms a step apart, no other tensor differs",
        f"{text}; of {TOKENS} tokens {rounded['apart']} of {rounded['values']:,} values of norms apart, "
        f"{found['different']} other tensors differ",
        kept, f"python -m benchmarks transformers --models {name} --config {cfg.name} --memory {memory.name}", details,
    )  # fmt: skip


def _steps(
    path: Path, network: decoders.DecoderNetwork, cfg: Config, memory: MemoryModel, rounding: str = "onnxruntime"
) -> tuple[dict[str, Any], str]:
    """Details of a row, and its text: of steps behind a prompt, with the likeliest tokens."""
    run, found = generated(path, "timed", cfg, rounding, {"memory": memory})
    expected = growing(path, network, run.tokens)
    usage, wrong = run.usage.report(), int(np.sum(found != expected[PROMPT - 1 :]))
    steps, share, bus = usage["steps"], usage["share"], usage["bandwidth"]
    least = steps["runs"] * network.bytes_of_a_step(TOKENS) / (steps["cycles"] * cfg.bus_bytes)
    details = {
        "cycles": round(usage["cycles_per_token"]), "share": share, "launches": usage["launches"], "bus": bus,
        "least": least, "different": wrong, "config": cfg.name, "softmax": cfg.softmax,
    }  # fmt: skip
    return details, (
        f"{bus:.1%} of the bus, {least:.1%} by what is needed once ({details['cycles']:,} cycles a token), "
        f"{share:.2%} of the products, {usage['launches']} launches, {wrong} of {expected[PROMPT - 1 :].size:,} logits "
        "differ"
    )


def generated(
    path: Path, device: str, cfg: Config, rounding: str, options: dict[str, Any], prompt: int = PROMPT,
    until: int = TOKENS,
) -> tuple[Session, Any]:  # fmt: skip
    """A session on `device`, of a random prompt and the likeliest tokens behind it, `until` there are so many, with
    room for TOKENS; and logits [1 + until - prompt, vocabulary], from those behind the prompt on."""
    with celosia.Decoder(path, device, config=cfg, length=TOKENS, rounding=rounding, options=options) as decoder:
        run = decoder.session()
        found = [run.feed(np.random.default_rng(1).integers(0, decoder.known, prompt).tolist())]
        while run.length < until:
            found.append(run.feed([int(np.argmax(found[-1]))]))
    return run, np.array(found)


def growing(path: Path, network: decoders.DecoderNetwork, tokens: list[int]) -> Any:
    """onnxruntime's logits [tokens, vocabulary], a token at a time."""
    run, made = session(path, int8=True), []
    given = {name: array[:, :, :0] for name, array in network.feed(1, 1, 0).items() if name.startswith("past")}
    for place, token in enumerate(tokens):
        whole = {
            "input_ids": np.array([[token]]), "attention_mask": np.ones((1, place + 1), np.int64),
            "position_ids": np.array([[place]]),
        }  # fmt: skip
        names = [each.name for each in run.get_outputs()]
        found = dict(zip(names, run.run(names, whole | given)))
        made.append(found["logits"][0, 0])
        given = {name.replace("present", "past_key_values"): array for name, array in found.items() if name != "logits"}
    return np.array(made)
