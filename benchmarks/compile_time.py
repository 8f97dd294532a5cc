"""Rows of `compile_time`: processor time of the compiler over the layers of a chain, and for networks over another
commit's, by turns, each in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.rows import ROOT, Row
from benchmarks.simspeed import tree
from benchmarks.workloads import WORKLOADS, Missing

ROUNDS = 3
CHAINS = {8: ((50, 100, 200, 500), 30), 56: ((50, 200, 1000), 60)}
"""By rows and columns of the images: how many layers, and the most seconds for the last of them."""
CHANNELS = 16
GROWTH = 1.2
"""Times by which a layer may take longer in the longest chain than in the shortest."""
NETWORKS = {"resnet18": 0.5, "mobilenet_v2": 0.4}
"""The most of the base's time."""

# Runs in the tree of either commit: prints seconds of processor time.
WORKER = """
import json, sys, time
import celosia
model, config, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
started = time.process_time()
celosia.compile(model, config, **options)
print(time.process_time() - started)
"""


def chain(layers: int, size: int, channels: int = CHANNELS) -> onnx.ModelProto:
    """So many 3x3 convolutions, one after the other, on size x size images."""
    rng = np.random.default_rng(layers)
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []

    def constant(name: str, value: object) -> str:
        constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def dequantised(name: str, scale: str, zero: str) -> str:
        nodes.append(helper.make_node("DequantizeLinear", [name, scale, zero], [f"{name}_float"]))
        return f"{name}_float"

    step, zero = constant("step", np.float32(0.05)), constant("zero", np.int8(0))
    fine, sums = constant("fine", np.float32(0.01)), constant("sums", np.float32(0.0005))
    none = constant("none", np.int32(0))
    nodes.append(helper.make_node("QuantizeLinear", ["x", step, zero], ["q0"]))
    for number in range(layers):
        weights = constant(f"w{number}", rng.integers(-127, 128, (channels, channels, 3, 3), np.int8))
        bias = constant(f"b{number}", rng.integers(-1000, 1000, channels, np.int32))
        read = [dequantised(f"q{number}", step, zero), dequantised(weights, fine, zero), dequantised(bias, sums, none)]
        y = f"y{number}"
        nodes.append(helper.make_node("Conv", read, [y], y, kernel_shape=[3, 3], pads=[1] * 4))
        nodes.append(helper.make_node("QuantizeLinear", [y, step, zero], [f"q{number + 1}"]))
    y = dequantised(f"q{layers}", step, zero)
    inputs, outputs = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, channels, size, size])] for name in ("x", y)
    )
    graph = helper.make_graph(nodes, f"chain{layers}", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def seconds(files: Path, model: Path, config: str, **options: object) -> float:
    """Processor time of the compiler in the tree `files`. Python keeps what it has compiled of the sources, as it does
    for a user, whatever this process was told: what comes first in a tree pays for that."""
    environment = os.environ | {"PYTHONPATH": str(files / "src")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    arguments = [sys.executable, "-c", WORKER, str(model), config, json.dumps(options)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return float(done.stdout.split()[-1])


def rows(
    folder: Path | None, models: Sequence[str], config: str, base: str | None, say: Callable[[str], None]
) -> Iterator[Row]:
    """models: networks alone, those of NETWORKS by default and the chains. base: a commit to compare networks with."""
    for name in models or NETWORKS:
        try:
            yield _network(folder, name, config, base, say)
        except Missing as reason:
            say(str(reason))
    for size in () if models else CHAINS:
        yield _chains(size, config, say)


def _network(folder: Path | None, name: str, config: str, base: str | None, say: Callable[[str], None]) -> Row:
    model = WORKLOADS[name].path(folder)
    times: dict[str, list[float]] = {}
    with tree(base) as files:
        # With the records that come with Celosia, as `compile` does by default, and where they know nothing.
        sides = {"here": (ROOT, "shipped"), "here, no records": (ROOT, "none")}
        if base:
            sides |= {"base": (files, "shipped"), "base, no records": (files, "none")}
        for number in range(ROUNDS):
            for side, (where, records) in sides.items():
                say(f"compiling {name}, {side}, round {number + 1} of {ROUNDS}")
                times.setdefault(side, []).append(seconds(where, model, config, records=records))
    here, plain = median(times["here"]), median(times["here, no records"])
    measured = f"{here:.2f} s of processor time, {plain:.2f} s without records"
    ratio, limit = None, NETWORKS.get(name, 1.0)
    if base:
        ratio, other = (
            median(here / before for here, before in zip(times[f"here{how}"], times[f"base{how}"], strict=True))
            for how in ("", ", no records")
        )
        measured += f"; {ratio:.2f} and {other:.2f} of {base}'s"
    command = f"python -m benchmarks compile_time --models {name}" + (f" --base {base}" if base else "")
    return Row(
        f"compile_time/{name}/{config}", f"compiling {name} for {config}",
        f"at most {limit} of the base's time" if base else "", measured,
        None if ratio is None else ratio <= limit, command, {"config": config, "seconds": times},
    )  # fmt: skip


def _chains(size: int, config: str, say: Callable[[str], None]) -> Row:
    counts, limit = CHAINS[size]
    times: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as kept:
        for layers in counts:
            say(f"compiling a chain of {layers} layers of {size}x{size}")
            path = Path(kept) / f"chain{layers}.onnx"
            onnx.save(chain(layers, size), path)
            times[layers] = seconds(ROOT, path, config)
    growth = times[counts[-1]] / counts[-1] / (times[counts[0]] / counts[0])
    measured = ", ".join(f"{layers}: {taken:.1f} s" for layers, taken in times.items())
    return Row(
        f"compile_time/chain{size}/{config}",
        f"compiling chains of 3x3 convolutions of {CHANNELS} channels, {size}x{size}, for {config}",
        f"at most {limit} s for {counts[-1]}, a layer at most {GROWTH} times what one of {counts[0]} takes",
        f"{measured} of processor time; {growth:.2f} times for each layer",
        times[counts[-1]] <= limit and growth <= GROWTH, "python -m benchmarks compile_time",
        {"config": config, "seconds": {str(layers): taken for layers, taken in times.items()}},
    )  # fmt: skip
