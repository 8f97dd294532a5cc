"""Rows of `packed`: weights that are factors times few bits, packed against as they are, of the same model and bus."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import celosia
from benchmarks import decoders
from benchmarks.decoders import DECODERS
from benchmarks.rows import Request, Row, judged
from benchmarks.transformers import PROMPT, TOKENS, generated, growing
from celosia.compiler.tensorize.pack import codebooks_of_multiples
from celosia.driver.workstation.oracle import open_session
from celosia.hw.boards.memory import MemoryModel
from celosia.hw.spec.config import Config
from celosia.hw.spec.packing import CODEBOOK_BLOCK, CODEBOOKS

Array = NDArray[Any]
OUTPUTS, INPUTS = 1000, 512
PRODUCT = f"fc_{OUTPUTS}x{INPUTS}"
NBITS = "llama_10m_nbits"
NETWORKS = (PRODUCT, "gpt_10m", f"{PRODUCT}_2", f"{PRODUCT}_1", NBITS)
"""A product of one row on the RTL; a decoder's step, timed; the product with weights of 2 bits and of 1; a decoder of
MatMulNBits, timed, whose sums leave the accelerator as they are."""
STEPS = 8
"""Of a decoder of MatMulNBits, behind its prompt."""
MOST = {4: 0.53, 2: 0.30, 1: None}
"""By bits, of the cycles that the same weights take as they are."""
BUS = 0.93
"""Of what the bus carries, at least."""


def rows(asked: Request) -> Iterator[Row]:
    """A row for each of NETWORKS, or those that were chosen."""
    for name in asked.models or NETWORKS:
        asked.say(f"{name}: compiling, running")
        measure = _sums if name == NBITS else _step if name in DECODERS else _product
        yield measure(name, Config.load(asked.preset), asked.memory)


def few_bits(weights: Array, bits: int) -> Array:
    """int8 [inputs, outputs] near `weights`: of each 32 inputs of an output a factor times numbers of so few bits. None
    is -128, which is no weight that onnxruntime's quantiser makes."""
    numbers = np.sort(codebooks_of_multiples(bits)[-1].view(np.int8))
    inputs, outputs = weights.shape
    groups = np.zeros((-(-inputs // CODEBOOK_BLOCK) * CODEBOOK_BLOCK, outputs), np.int16)
    groups[:inputs] = weights
    groups = groups.reshape(-1, CODEBOOK_BLOCK, outputs)
    factors = np.clip(np.ceil(np.abs(groups).max(axis=1, keepdims=True) / numbers[-1]), 1, CODEBOOKS)
    nearest = np.abs(groups[..., None] / factors[..., None] - numbers).argmin(axis=-1)
    made: Array = np.maximum(numbers[nearest], np.where(factors * numbers[0] > -128, numbers[0], numbers[1])) * factors
    near: Array = made.reshape(-1, outputs)[:inputs].astype(np.int8)
    return near


def _product(name: str, cfg: Config, memory: MemoryModel) -> Row:
    """Measure a product with a row of int8, on the RTL."""
    random = np.random.default_rng(1)
    few = int(name.removeprefix(PRODUCT).lstrip("_") or 4)
    weights = few_bits(random.integers(-128, 128, (INPUTS, OUTPUTS)), few)
    scalars = {"xs": np.float32(0.02), "xz": np.int8(3), "ws": np.float32(0.01), "wz": np.int8(0),
               "ys": np.float32(0.2), "yz": np.int8(-4)}  # fmt: skip
    graph = helper.make_graph(
        [helper.make_node("QLinearMatMul", ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz"], ["y"])], name,
        [helper.make_tensor_value_info("x", TensorProto.INT8, [1, INPUTS])],
        [helper.make_tensor_value_info("y", TensorProto.INT8, [1, OUTPUTS])],
        [numpy_helper.from_array(np.asarray(value), key) for key, value in {**scalars, "w": weights}.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    feed = {"x": random.integers(-128, 128, (1, INPUTS)).astype(np.int8)}
    (expected,) = open_session(model, int8=True).run(None, feed)
    found, wrong = [], 0
    for bits in (8, few):
        own = replace(cfg, weight_bits=bits)
        result = celosia.Runtime(celosia.compile(model, config=own), "rtl", memory=memory).run(feed)
        wrong += int(np.sum(result.outputs["y"] != expected))
        found.append((result.report["cycles"], result.counters[0].values["read_beats"]))
    (plain, _), (packed, beats) = found
    return _row(name, few, cfg, memory, "RTL", plain, packed, beats / packed, wrong)


def _step(name: str, cfg: Config, memory: MemoryModel) -> Row:
    """Measure a decoder behind a prompt, its products' weights near those that onnxruntime's quantiser makes; timed."""
    network, usages, wrong = DECODERS[name], [], 0
    with tempfile.TemporaryDirectory() as folder:
        path = decoders.quantised(network, Path(folder), past=TOKENS - 1)
        _to_four_bits(path)
        for bits in (8, 4):
            run, logits = generated(path, "timed", replace(cfg, weight_bits=bits), "onnxruntime", {"memory": memory})
            usages.append(run.usage.report())
            wrong += int(np.sum(logits != growing(path, network, run.tokens)[PROMPT - 1 :]))
    plain, packed = (round(usage["cycles_per_token"]) for usage in usages)
    return _row(name, 4, cfg, memory, "timed, a step", plain, packed, usages[1]["bandwidth"], wrong)


def _sums(name: str, cfg: Config, memory: MemoryModel) -> Row:
    """Steps of a decoder of MatMulNBits, with packed weights, over those of the same one in int8. apart: the largest
    difference of a logit over their root mean square."""
    network, usages, until = DECODERS[name.removesuffix("_nbits")], [], PROMPT + STEPS
    with tempfile.TemporaryDirectory() as folder:
        whole = decoders.quantised(network, Path(folder), past=TOKENS - 1)
        path = decoders.in_blocks(network, Path(folder))
        for model, own in ((whole, cfg), (path, replace(cfg, sums=True, weight_bits=4))):
            run, logits = generated(model, "timed", own, "onnxruntime", {"memory": memory}, PROMPT, until)
            usages.append(run.usage.report())
        expected = growing(path, network, run.tokens)[PROMPT - 1 :]
    plain, packed = (round(usage["cycles_per_token"]) for usage in usages)
    details = {
        "plain": plain, "packed": packed, "ratio": packed / plain, "bus": usages[1]["bandwidth"],
        "share": usages[1]["share"],
        "apart": float(np.abs(logits - expected).max() / np.sqrt((expected**2).mean())),
    }  # fmt: skip
    what = f"{name}, on {cfg.name} with sums and weight_bits = 4, timed, a step: cycles over int8's"
    return judged(f"packed/{name}", what, _command(name, cfg, memory), details, f"ratio <= {MOST[4]}")


def _to_four_bits(path: Path) -> None:
    """The int8 weights of products, in the model's file."""
    model = onnx.load(path)
    producers = {node.output[0]: node for node in model.graph.node}
    products = [node for node in model.graph.node if node.op_type in ("MatMul", "Gemm")]
    sources = [producers[node.input[1]].input[0] for node in products if node.input[1] in producers]
    for tensor in model.graph.initializer:
        if tensor.name in sources and tensor.data_type == TensorProto.INT8:
            tensor.CopyFrom(numpy_helper.from_array(few_bits(numpy_helper.to_array(tensor), 4), tensor.name))
    onnx.save(model, path)


def _command(name: str, cfg: Config, memory: MemoryModel) -> str:
    return f"python -m benchmarks packed --models {name} --config {cfg.name} --memory {memory.name}"


def _row(
    name: str, bits: int, cfg: Config, memory: MemoryModel, how: str, plain: int, packed: int, bus: float, wrong: int
) -> Row:  # fmt: skip
    details = {"plain": plain, "packed": packed, "ratio": packed / plain, "bus": bus, "different": wrong}
    asked = f"different <= 0, ratio <= {MOST[bits]}, bus >= {BUS}" if MOST[bits] else "different <= 0"
    what = f"{name}, on {cfg.name}, {how}: cycles with weight_bits = {bits} over those with 8"
    command = _command(name, cfg, memory)
    return judged(f"packed/{name}", what, command, {**details, "config": cfg.name}, asked)
