"""Rows of `compile_time`: processor time of the compiler over the layers of a chain, and for networks over another
commit's, by turns, each in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.rows import ROOT, Request, Row, Say, judged
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


def seconds(files: Path, model: Path, config: str, again: bool = False, **options: object) -> float:
    """Processor time of the compiler in the tree `files`. again: whether it may use cycles that earlier compilations
    predicted. Python keeps what it has compiled of the sources, as it does
    for a user, whatever this process was told: what comes first in a tree pays for that."""
    environment = os.environ | {"PYTHONPATH": str(files / "src"), "CELOSIA_REMEMBER": "1" if again else "0"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    arguments = [sys.executable, "-c", WORKER, str(model), config, json.dumps(options)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return float(done.stdout.split()[-1])


def rows(asked: Request) -> Iterator[Row]:
    """A row for each of NETWORKS, compared with the base where there is one, and for the chains; or of `models`."""
    for name in asked.models or NETWORKS:
        try:
            yield _network(name, asked)
        except Missing as reason:
            asked.say(str(reason))
    for size in () if asked.models else CHAINS:
        yield _chains(size, asked.preset, asked.say)


def _network(name: str, asked: Request) -> Row:
    config, base, say = asked.preset, asked.base, asked.say
    model = WORKLOADS[name].path(asked.folder)
    times: dict[str, list[float]] = {}
    with tree(base) as files:
        # With the records that come with Celosia, as `compile` does by default, and where they know nothing.
        sides = {"here": (ROOT, "shipped", False), "here, no records": (ROOT, "none", False)}
        sides["here, again"] = ROOT, "shipped", True
        if base:
            sides |= {"base": (files, "shipped", False), "base, no records": (files, "none", False)}
        seconds(ROOT, model, config, again=True)  # so that each round of "here, again" is a later compilation
        for number in range(ROUNDS):
            for side, (where, records, again) in sides.items():
                say(f"compiling {name}, {side}, round {number + 1} of {ROUNDS}")
                times.setdefault(side, []).append(seconds(where, model, config, again, records=records))
    details: dict[str, Any] = {"here": median(times["here"]), "no_records": median(times["here, no records"])}
    details["again"] = median(times["here, again"])
    bounds = ""
    if base:
        for how, against, label in (
            ("here", "base", "ratio"), ("here, no records", "base, no records", "ratio_no_records"),
            ("here, again", "base", "ratio_again"),
        ):  # fmt: skip
            pairs = zip(times[how], times[against], strict=True)
            details[label] = median(here / before for here, before in pairs)
        bounds = f"ratio <= {NETWORKS.get(name, 1.0)}"
    command = f"python -m benchmarks compile_time --models {name}" + (f" --base {base}" if base else "")
    what = f"compiling {name} for {config}: processor seconds" + (f", ratios to {base}'s" if base else "")
    details |= {"config": config, "seconds": times}
    return judged(f"compile_time/{name}/{config}", what, command, details, bounds)


def _chains(size: int, config: str, say: Say) -> Row:
    counts, limit = CHAINS[size]
    times: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as kept:
        for layers in counts:
            say(f"compiling a chain of {layers} layers of {size}x{size}")
            path = Path(kept) / f"chain{layers}.onnx"
            onnx.save(chain(layers, size), path)
            times[layers] = seconds(ROOT, path, config)
    details = {
        "longest": times[counts[-1]], "growth": times[counts[-1]] / counts[-1] / (times[counts[0]] / counts[0]),
        "config": config, "seconds": {str(layers): taken for layers, taken in times.items()},
    }  # fmt: skip
    what = f"compiling {counts[-1]} 3x3 convolutions of {CHANNELS} channels, {size}x{size}, for {config}: processor "
    what += f"seconds, and those of a layer over one of {counts[0]}"
    command, asked = "python -m benchmarks compile_time", f"longest <= {limit}, growth <= {GROWTH}"
    return judged(f"compile_time/chain{size}/{config}", what, command, details, asked)
