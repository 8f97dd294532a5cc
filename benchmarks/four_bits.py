"""Rows of `four_bits`: the demo models with weights of 4, 2 and 1 bits beside those of 8 and floats, by onnxruntime.

The float models are the int8 demos without their roundings, so nothing is trained: weights are what their int8 stands
for, which is nearer to the trained ones than any 4 bits are.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from benchmarks.rows import Request, Row, judged, skipped
from benchmarks.workloads import Missing
from celosia import models
from celosia.driver.quantize.decoders import MASK, POSITIONS, TOKENS, perplexity
from celosia.driver.quantize.quantize import quantize
from celosia.driver.workstation.oracle import open_session
from celosia.models.train_gpt import CALIBRATION_WINDOWS, HEAD_SIZE, HEADS, PAST, read_tokens, windows
from celosia.models.train_resnet8 import CALIBRATION_IMAGES, read_dataset

Array = NDArray[Any]
IMAGES = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's dataset-fashion-mnist lies."""
MOST_POINTS, MOST_PERPLEXITY = 0.5, 3
"""That 4 bits may cost: percentage points of accuracy, and percent of perplexity."""
BITS = 8, 4, 2, 1
"""Bits of weights to measure; only 4 bits have a bound."""
WHAT = {
    "resnet8": ("ResNet-8: accuracy by bits of weights, and points that 4 bits cost", MOST_POINTS),
    "gpt": ("the demo GPT: perplexity by bits of weights, and percent that 4 bits add", MOST_PERPLEXITY),
}


def floats(quantised: Path) -> onnx.ModelProto:
    """A QDQ model without QuantizeLinear: activations are not rounded, and what is constant is what it stands for.

    Where bytes hold nothing below 0, a Relu takes the place of the pair: the quantiser left such a one out.
    """
    model = onnx.load(quantised)
    graph, arrays = model.graph, {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    before = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "QuantizeLinear"}
    stands_for: dict[str, str] = {}
    for node in [node for node in graph.node if node.op_type == "DequantizeLinear"]:
        integers, scale, zero = (arrays.get(name) for name in node.input)
        if integers is None and zero is not None and zero.min() == np.iinfo(zero.dtype).min:
            node.op_type, node.input[:] = "Relu", [before[node.input[0]]]
            del node.attribute[:]
            continue
        if integers is None:
            stands_for[node.output[0]] = before[node.input[0]]
            continue
        axis = next((attr.i for attr in node.attribute if attr.name == "axis"), 1)
        across = [-1 if place == axis % max(integers.ndim, 1) else 1 for place in range(integers.ndim)]
        scale, zero = (each.reshape(across) if each.size > 1 else each.reshape(()) for each in (scale, zero))  # type: ignore[union-attr]
        real = (integers.astype(np.float32) - zero.astype(np.float32)) * scale
        graph.initializer.append(numpy_helper.from_array(real.astype(np.float32), node.output[0]))
    kept = [node for node in graph.node if node.op_type not in ("QuantizeLinear", "DequantizeLinear")]
    outputs = {value.name for value in graph.output}
    for node in kept:
        node.input[:] = [_first(stands_for, name) for name in node.input]
    returned = {_first(stands_for, name): name for name in outputs if name in stands_for}
    for node in kept:
        node.output[:] = [returned.get(name, name) for name in node.output]
        node.input[:] = [returned.get(name, name) for name in node.input]
    del graph.node[:], graph.value_info[:]
    graph.node.extend(kept)
    used = {name for node in kept for name in node.input}
    initializers = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(initializers)
    return model


def _first(stands_for: Mapping[str, str], name: str) -> str:
    while name in stands_for:
        name = stands_for[name]
    return name


def accuracy(model: Path | onnx.ModelProto, images: Array, labels: Array) -> float:
    """Share of images [N, 1, 32, 32] whose largest logit is their label's."""
    found = open_session(model)
    return float(np.mean([found.run(None, {"image": x[None]})[0].argmax() for x in images] == labels))


def of_held_out(model: Path | onnx.ModelProto, tokens: Array) -> float:
    """Perplexity of windows [count, steps] of tokens, all but the first of each."""
    steps = tokens.shape[1]
    caches = {name: np.zeros((1, HEADS, 0, HEAD_SIZE), np.float32) for name in PAST}
    fixed = {MASK: np.ones((1, steps), np.int64), POSITIONS: np.arange(steps)[None], **caches}
    samples = [{TOKENS: row[None], **fixed} for row in tokens]
    found = open_session(model)
    made = perplexity((found.run(["logits"], sample)[0] for sample in samples), samples)
    assert made is not None
    return made


def _resnet8(folder: Path, bits: tuple[int, ...]) -> dict[str, float]:
    if not IMAGES.is_dir():
        raise Missing(f"{IMAGES} is missing: apt-get install dataset-fashion-mnist")
    (train, _), (test, labels) = (read_dataset(IMAGES, part) for part in ("train", "t10k"))
    source = folder / "float.onnx"
    onnx.save(floats(models.demo_model_path()), source)
    images = models.preprocess(test)
    found = {"float": accuracy(source, images, labels)}
    for each in bits:
        made = folder / f"{each}.onnx"
        quantize(source, {"image": models.preprocess(train[:CALIBRATION_IMAGES])}, made, weights=each)
        found[str(each)] = accuracy(made, images, labels)
    return found


def _gpt(folder: Path, bits: tuple[int, ...]) -> dict[str, float]:
    tokens, held_out, _ = read_tokens()
    source, rows = folder / "float.onnx", windows(tokens)
    onnx.save(floats(models.gpt_path()), source)
    found = {"float": of_held_out(source, windows(held_out))}
    chosen = rows[np.linspace(0, len(rows) - 1, CALIBRATION_WINDOWS).astype(int)]
    for each in bits:
        made = folder / f"{each}.onnx"
        quantize(source, {TOKENS: chosen}, made, weights=each)
        found[str(each)] = of_held_out(made, windows(held_out))
    return found


def rows(asked: Request) -> Iterator[Row]:
    """A row for each of WHAT, or those that were chosen. cost: that weights of 4 bits have."""
    for name in asked.models or WHAT:
        (what, most), measure = WHAT[name], {"resnet8": _resnet8, "gpt": _gpt}[name]
        key, command = f"four_bits/{name}", f"python -m benchmarks four_bits --models {name}"
        asked.say(f"{name}: weights of {', '.join(map(str, BITS))} bits")
        try:
            with tempfile.TemporaryDirectory() as folder:
                found = measure(Path(folder), BITS)
        except Missing as reason:
            yield skipped(key, what, command, reason)
            continue
        points, percent = 100 * (found["float"] - found["4"]), 100 * (found["4"] / found["float"] - 1)
        details = {"cost": points if name == "resnet8" else percent, **found}
        yield judged(key, what, command, details, f"cost <= {most}")
