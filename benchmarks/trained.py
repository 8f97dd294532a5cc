"""Rows of `transformers` whose models are trained, those of models/: what bytes cost in perplexity and accuracy."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

import celosia
from benchmarks.encoders import APART, LANES, NORM
from benchmarks.four_bits import IMAGES, accuracy, floats, of_held_out
from benchmarks.rows import Row, cost, judged, skipped
from celosia.driver.accuracy.compare import compare
from celosia.driver.quantize.quantize import quantize
from celosia.driver.workstation.oracle import open_session
from celosia.hw.boards.memory import MemoryModel
from celosia.hw.spec.config import Config
from celosia.models import demo_images, gpt_path, preprocess, vit_path
from celosia.models.train_gpt import CALIBRATION_WINDOWS, read_tokens, windows
from celosia.models.train_resnet8 import CALIBRATION_IMAGES, read_dataset

Array = NDArray[Any]
Say = Callable[[str], None]
MOST_PERPLEXITY, MOST_POINTS = 3, 0.5
"""Percent of perplexity, and points of accuracy, that bytes may cost."""
CHANNELS, LARGER = 4, 50
"""Of each norm so many channels are made so much larger, and the weights that read them as much smaller."""
COMPARED = 20
"""Images whose logits are compared with onnxruntime's."""
MOST_LAUNCHES, MOST_RATIO = 26, 1.12
"""Of the vision transformer with norms on the CPU; and cycles over products / products a cycle."""


# The demo GPT -------------------------------------------------------------------------------------------------------


def gpt_in_bytes(cfg: Config, memory: MemoryModel, say: Say) -> Iterator[Row]:
    """The demo GPT's perplexity of what was held out, by what `quantize` makes bytes of. Its float model is the int8
    one without roundings of activations: see four_bits.py."""
    kinds = {kind: (kind, None) for kind in ("products", "attention", "all")}
    details = _perplexities("gpt_topics", floats(gpt_path()), kinds, say)
    details["percent_more"] = 100 * (details["all"] / details["float"] - 1)
    what, command = "the demo GPT in bytes: perplexity", "python -m benchmarks transformers --models gpt_topics"
    yield judged("transformers/gpt_topics", what, command, details, f"percent_more <= {MOST_PERPLEXITY}")


def gpt_smoothed(cfg: Config, memory: MemoryModel, say: Say) -> Iterator[Row]:
    """Perplexities where a few channels of norms are larger, as in large language models, and of the demo as it is;
    with and without `--smooth auto`."""
    kinds = {"products": ("products", None), "products-smooth": ("products", "auto"), "all": ("all", None),
             "all-smooth": ("all", "auto")}  # fmt: skip
    for name, model in (("gpt_outliers", with_outliers(floats(gpt_path()))), ("gpt_plain", floats(gpt_path()))):
        details = _perplexities(name, model, kinds, say)
        smooth = max(details["products-smooth"], details["all-smooth"])
        details["percent_more"] = 100 * (smooth / details["float"] - 1)
        larger = f" with {CHANNELS} channels of norms {LARGER} times larger" if name == "gpt_outliers" else ""
        what = f"the demo GPT{larger}, in bytes, smoothed: perplexity"
        command = "python -m benchmarks transformers --models gpt_outliers"
        yield judged(f"transformers/{name}", what, command, details, f"percent_more <= {MOST_PERPLEXITY}")


def _perplexities(
    name: str, model: onnx.ModelProto, kinds: Mapping[str, tuple[str, str | None]], say: Say
) -> dict[str, float]:
    """Perplexity of the float model, and for each of `kinds`: what is quantised, and how it is smoothed."""
    tokens, held_out, _ = read_tokens()
    windows_of = windows(tokens)
    chosen = windows_of[np.linspace(0, len(windows_of) - 1, CALIBRATION_WINDOWS).astype(int)]
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        onnx.save(model, source)
        found = {"float": of_held_out(source, windows(held_out))}
        for kind, (operators, smooth) in kinds.items():
            say(f"{name}, {kind}: quantising, measuring")
            quantize(source, {"input_ids": chosen}, made, operators=operators, smooth=smooth)
            found[kind] = of_held_out(made, windows(held_out))
    return found


def with_outliers(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model`, which is changed: it computes the same, but random channels of its norms are LARGER."""
    constants, random = {tensor.name: tensor for tensor in model.graph.initializer}, np.random.default_rng(0)
    for norm in [node for node in model.graph.node if node.op_type == "LayerNormalization"]:
        readers = [node for node in model.graph.node if norm.output[0] in node.input]
        size = constants[norm.input[1]].dims[0]
        larger = np.where(np.isin(np.arange(size), random.choice(size, CHANNELS, replace=False)), LARGER, 1)
        scaled = {name: larger for name in norm.input[1:]}
        for node in readers:
            turned = any(attr.name == "transB" and attr.i for attr in node.attribute)
            scaled[node.input[1]] = 1 / larger if turned else 1 / larger[:, None]
        for name, by in scaled.items():
            array = (numpy_helper.to_array(constants[name]) * by).astype(np.float32)
            constants[name].CopyFrom(numpy_helper.from_array(array, name))
    return model


# The vision transformer ---------------------------------------------------------------------------------------------


def vit(cfg: Config, memory: MemoryModel, say: Say) -> Iterator[Row]:
    """Its accuracy as floats and as bytes, under onnxruntime; then what the accelerator takes for an image."""
    key, what = "transformers/vit_fashion", "the vision transformer: percent of images, and points that bytes cost"
    command = f"python -m benchmarks transformers --models vit_fashion --config {cfg.name} --memory {memory.name}"
    if not IMAGES.is_dir():
        yield skipped(key, what, command, f"{IMAGES} is missing: apt-get install dataset-fashion-mnist")
        return
    (train, _), (test, labels) = (read_dataset(IMAGES, part) for part in ("train", "t10k"))
    with tempfile.TemporaryDirectory() as folder:
        path, images = Path(folder) / "int8.onnx", preprocess(test)
        say("vit_fashion: quantising")
        quantize(vit_path(), {"image": preprocess(train[:CALIBRATION_IMAGES])}, path)
        say(f"vit_fashion: {len(images):,} images")
        right = {kind: 100 * accuracy(file, images, labels) for kind, file in (("float", vit_path()), ("int8", path))}
        points = right["float"] - right["int8"]
        yield judged(key, what, command, {**right, "points": points}, f"points <= {MOST_POINTS}")
        yield _vit_row(path, replace(cfg, softmax=LANES), memory, command, say)
        yield _vit_row(path, replace(cfg, softmax=LANES, norm=NORM), memory, command, say)


def _vit_row(path: Path, cfg: Config, memory: MemoryModel, command: str, say: Say) -> Row:
    """Measure an image; logits of COMPARED ones against onnxruntime's. With norms on the accelerator, these against
    onnxruntime's on the same bytes, of one image."""
    rounding, kind = ("correct", "rounded") if cfg.norm else ("onnxruntime", "softmax")
    say(f"vit_fashion, {kind}: compiling, running")
    images = demo_images()[0][:COMPARED, None]
    program, on = celosia.compile(path, config=cfg, rounding=rounding), open_session(path, int8=True)
    with celosia.Runtime(program, "timed", memory=memory) as runtime:
        results = [runtime.run({"image": image}) for image in images]
    pairs = [(each.outputs["logits"], on.run(None, {"image": x})[0]) for each, x in zip(results, images)]
    details = cost(program, results[0]) | {
        "different": sum(int(np.sum(a != b)) for a, b in pairs),
        "same_class": sum(int(a.argmax() == b.argmax()) for a, b in pairs),
    }
    asked = f"ratio <= {MOST_RATIO}, share >= 0.999, "
    if cfg.norm:
        beside = norms(path, {"image": images[0]}, cfg)
        details |= {**beside, "tensors_different": beside["different"], "different": details["different"]}
        asked += f"launches <= 1, share_apart <= {APART:g}, tensors_different <= 0"
    else:
        asked += f"launches <= {MOST_LAUNCHES}, different <= 0"
    what = f"the vision transformer, int8, an image, with softmax = {cfg.softmax}, norm = {cfg.norm}, timed: ratio of "
    what += f"cycles to products / {cfg.macs_per_cycle}; logits of {COMPARED} images"
    return judged(f"transformers/vit_fashion/{kind}", what, command, details, asked)


def norms(path: Path, feed: dict[str, Any], cfg: Config) -> dict[str, Any]:
    """Values of norms a step beside onnxruntime's on the same bytes, and other tensors that differ."""
    found = compare(path, feed, config=cfg, rounding="correct", check=False)
    apart, values = found["rounded"]["apart"], found["rounded"]["values"]
    return {"apart": apart, "values": values, "share_apart": apart / values, "different": found["different"]}


TRAINED = {"gpt_topics": gpt_in_bytes, "gpt_outliers": gpt_smoothed, "vit_fashion": vit}
