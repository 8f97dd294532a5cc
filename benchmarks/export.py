"""Rows of `export`: models as C on every target, beside `celosia run`, and what the runtime is."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import celosia
from benchmarks.rows import Request, Row, different, judged, skipped
from benchmarks.workloads import WORKLOADS, Missing
from celosia.compiler.options import Options
from celosia.driver.choices import EXPORT_TARGETS
from celosia.driver.export import emulate
from celosia.driver.export.bridge import Bridge, FunctionalRegisters, RtlRegisters, empty_outputs
from celosia.driver.export.c_project import RUNTIME, Exported, export
from celosia.driver.export.objects import count_code_bytes, undefined_symbols
from celosia.driver.export.targets import ExportTarget, find_export_target
from celosia.hw.spec.config import Config

COMMAND = "python -m benchmarks export"
RUNS = 2
"""Of each program: its memory is that of the run before."""
RTL = "tiny"
"""The Config of the row on the RTL."""
MAX_LINES, MAX_BYTES = 1000, 32 << 10
ALLOCATORS = frozenset(("malloc", "calloc", "realloc", "free", "aligned_alloc"))
MODELS = {
    "demo": "the demo ResNet-8",
    "mobilenet_v2": "MobileNetV2",
    "cpu_steps": "two launches with floats on the CPU between them",
}


def cpu_steps() -> onnx.ModelProto:
    """A convolution, a gate in floats whose factors are an input, and a convolution; it returns bytes and indices."""
    rng = np.random.default_rng(3)
    scale, zero = numpy_helper.from_array(np.float32(0.04), "scale"), numpy_helper.from_array(np.int8(3), "zero")
    constants, nodes = [scale, zero], []

    def node(op: str, inputs: list[str], out: str, **attrs: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [out], name=f"{out}_node", **attrs))
        return out

    def quantised(real: str, out: str) -> str:
        return node("QuantizeLinear", [real, "scale", "zero"], out)

    def conv(x: str, shape: tuple[int, ...], out: str) -> str:
        weights, steps = rng.integers(-127, 128, shape).astype(np.int8), np.float32(0.01)
        arrays = ((f"{out}_w", weights), (f"{out}_s", steps), (f"{out}_z", np.int8(0)))
        constants.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in arrays)
        real = node("DequantizeLinear", [x, "scale", "zero"], f"{out}_x")
        weight = node("DequantizeLinear", [name for name, _ in arrays], f"{out}_real")
        return node("Conv", [real, weight], f"{out}_conv", pads=[shape[2] // 2] * 4)

    first = quantised(conv(quantised("image", "bytes"), (32, 3, 3, 3), "first"), "q_first")
    real = node("DequantizeLinear", [first, "scale", "zero"], "real")
    gated = node("Mul", [node("Mul", [real, "gain"], "scaled"), node("Sigmoid", ["scaled"], "open")], "gated")
    node("ArgMax", [gated], "best", axis=1)
    quantised(conv(quantised(gated, "q_gated"), (16, 32, 1, 1), "second"), "y")
    sizes = (("image", TensorProto.FLOAT, [1, 3, 32, 32]), ("gain", TensorProto.FLOAT, [32, 1, 1]),
             ("y", TensorProto.INT8, [1, 16, 32, 32]), ("best", TensorProto.INT64, [1, 1, 32, 32]))  # fmt: skip
    values = [helper.make_tensor_value_info(*each) for each in sizes]
    graph = helper.make_graph(nodes, "cpu_steps", values[:2], values[2:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def rows(asked: Request) -> Iterator[Row]:
    """Bytes of each model on each target, or of those that were chosen; those of the RTL; the runtime's size."""
    chosen, folder, config, say = asked.models, asked.folder, asked.preset, asked.say
    for name in chosen or MODELS:
        for target in EXPORT_TARGETS:
            say(f"{name} for {target}")
            yield _row(name, find_export_target(target), config, folder, "functional")
    if not chosen or "demo" in chosen:
        say("the demo on the RTL")
        yield _row("demo", find_export_target("x86_64"), RTL, folder, "rtl")
    for target in EXPORT_TARGETS:
        say(f"the runtime for {target}")
        yield _runtime(find_export_target(target))


def _source(name: str, folder: Path | None) -> Path | onnx.ModelProto:
    return cpu_steps() if name == "cpu_steps" else WORKLOADS[name].path(folder)


def _row(name: str, target: ExportTarget, config: str, folder: Path | None, device: str) -> Row:
    key, what = f"export/{name}/{target.name}/{device}", f"{MODELS[name]}, C for {target.name}, {device}"
    command = f"{COMMAND} --models {name}"
    try:
        source = _source(name, folder)
        if lack := emulate.missing_tools(target):
            raise Missing(lack)
    except Missing as reason:
        return skipped(key, what, command, reason)
    made = export(source, target.name, Options(config=config, check=False), name)
    with tempfile.TemporaryDirectory(prefix="celosia") as temporary:
        details = _compared(made, source, config, device, Path(temporary))
    calls = set().union(*(undefined_symbols(data) for file, data in made.files.items() if file.endswith(".o")))
    details |= {"allocators": len(calls & ALLOCATORS), "kernels": len(made.model.program.kernels)}
    return judged(key, what, command, details, "different <= 0, allocators <= 0")


def _compared(made: Exported, source: Path | onnx.ModelProto, config: str, device: str, folder: Path) -> dict[str, Any]:
    """Bytes that differ from `celosia run` on this machine, with its own kernels; both on simulators."""
    cfg = Config.load(config)
    program = celosia.compile(source, config, check=False)
    command = emulate.build_bridge_program([made], folder)
    begun = time.perf_counter()
    bridge = Bridge(command, RtlRegisters(cfg) if device == "rtl" else FunctionalRegisters(cfg))
    opened, accesses = time.perf_counter() - begun, bridge.accesses
    rng, wrong, count = np.random.default_rng(1), 0, 0
    try:
        with celosia.Runtime(program, "functional") as runtime:
            for _ in range(RUNS):
                inputs = {each.name: rng.normal(size=each.shape).astype(each.dtype) for each in program.inputs}
                wanted = runtime.run(inputs).outputs
                arrays = empty_outputs(wanted)
                code = bridge.run([*inputs.values()], arrays)
                count += sum(each.nbytes for each in arrays)
                wrong += count if code else sum(map(different, arrays, wanted.values()))
        bridge.close()
    finally:
        bridge.kill()  # an emulator does not end with its input
    return {
        "different": wrong, "bytes": count, "open_seconds": opened, "config": config,
        "memory": made.model.memory_map.memory_bytes, "device_bytes": made.model.device_bytes(),
        "open_accesses": accesses, "copied": made.model.image_bytes(),
    }  # fmt: skip


def _runtime(target: ExportTarget) -> Row:
    """Lines and bytes of the runtime, with the devices that the target has."""
    key, what = (
        f"export/runtime/{target.name}",
        f"the runtime, {target.name}: lines, bytes of code, calls of allocators",
    )
    if lack := emulate.missing_tools(target):
        return skipped(key, what, COMMAND, lack)
    with tempfile.TemporaryDirectory(prefix="celosia") as temporary:
        objects = emulate.runtime_objects(target, Path(temporary))
    details = {
        "lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in RUNTIME.iterdir()),
        "bytes": sum(map(count_code_bytes, objects)),
        "allocators": len(set().union(*map(undefined_symbols, objects)) & ALLOCATORS),
    }
    return judged(key, what, COMMAND, details, f"lines <= {MAX_LINES}, bytes <= {MAX_BYTES}, allocators <= 0")
