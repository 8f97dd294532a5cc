"""python -m benchmarks.wild_worker PART NAME: measure one part of a model of wild.toml, and print a line of JSON."""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

import celosia
from benchmarks.cpu import compare, error
from benchmarks.quantisers import RELATIVE
from benchmarks.rows import different
from benchmarks.wild import WildModel, models
from benchmarks.wild_architectures import build, example
from celosia.driver.runtime import Runtime
from celosia.driver.workstation.oracle import open_session

Array = NDArray[Any]
SAMPLES = 4
"""Inputs on which a quantiser measures ranges."""
SECONDS = 2.0
"""Time in which both sides run by turns."""
CONFIG = "pynq"


def shapes(model: WildModel) -> dict[str, list[int]]:
    """Return the shape of each input of the model."""
    return {name: list(value.shape) for name, value in next(model.feeds(1)).items()}


def compile_cost(model: WildModel) -> dict[str, Any]:
    """Compile for the accelerator and the CPU: processor seconds, and peak megabytes above those of a tiny model."""
    path, sizes = model.local(), shapes(model)
    tiny = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) {y = Add(x, x)}'
    )
    celosia.compile(tiny)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    celosia.compile(path, shapes=sizes)
    seconds = time.process_time() - began
    megabytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"seconds": round(seconds, 2), "megabytes": round(megabytes), "file": round(path.stat().st_size / 1e6, 2)}


def float_speed(model: WildModel) -> dict[str, Any]:
    """Compare results and speed on one thread with onnxruntime's."""
    proto, feed = onnx.load(model.local()), next(model.feeds(1))
    measured = compare(with_shapes(proto, feed), feed, SECONDS)
    return {"ratio": measured.ratio, "distance": measured.error, "milliseconds": measured.ours * 1e3}


def with_shapes(proto: onnx.ModelProto, feed: dict[str, Array]) -> onnx.ModelProto:
    """Write the shapes of the feed into the inputs of a model; constants, which files of IR 3 list there, go."""
    constants = {constant.name for constant in proto.graph.initializer}
    inputs = [value for value in proto.graph.input if value.name not in constants]
    del proto.graph.input[:]
    proto.graph.input.extend(inputs)
    proto.ir_version = max(proto.ir_version, 4)
    for value in proto.graph.input:
        if value.name in feed:
            tensor = value.type.tensor_type
            tensor.ClearField("shape")
            tensor.shape.SetInParent()  # a scalar, too, has a shape
            for size in feed[value.name].shape:
                tensor.shape.dim.add().dim_value = size
    return proto


def as_is(model: WildModel) -> dict[str, Any]:
    """Measure a model that its package has quantised."""
    return on_accelerator(model.local(), model)


def by_celosia(model: WildModel) -> dict[str, Any]:
    """Quantise with `celosia quantize`, and measure."""
    with tempfile.TemporaryDirectory() as folder:
        samples = list(model.feeds(SAMPLES, seed=1))
        arrays = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
        celosia.quantize(model.local(), arrays, Path(folder) / "int8.onnx")
        return on_accelerator(Path(folder) / "int8.onnx", model)


def by_onnxruntime(form: str) -> Callable[[WildModel], dict[str, Any]]:
    """Return a function that quantises with onnxruntime in this form, "QDQ" or "QOperator", and measures."""

    def quantise_and_measure(model: WildModel) -> dict[str, Any]:
        from onnxruntime import quantization as q

        class Reader(q.CalibrationDataReader):  # type: ignore[misc]
            def __init__(self) -> None:
                self.feeds = model.feeds(SAMPLES, seed=1)

            def get_next(self) -> dict[str, Array] | None:
                return next(self.feeds, None)

        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            proto = with_shapes(onnx.load(model.local()), next(model.feeds(1)))
            opset = next(entry.version for entry in proto.opset_import if not entry.domain)
            onnx.save(proto, folder / "float.onnx")
            q.shape_inference.quant_pre_process(
                folder / "float.onnx", folder / "prepared.onnx", skip_symbolic_shape=True
            )
            q.quantize_static(
                folder / "prepared.onnx", folder / "int8.onnx", Reader(), quant_format=q.QuantFormat[form],
                activation_type=q.QuantType.QInt8, weight_type=q.QuantType.QInt8,
                per_channel=form == "QDQ" and opset >= 13,
            )  # fmt: skip
            return on_accelerator(folder / "int8.onnx", model)

    return quantise_and_measure


def by_pt2e(model: WildModel) -> dict[str, Any]:
    """Quantise an architecture with PT2E and CelosiaQuantizer, export it, and measure."""
    import torch
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    from celosia.driver.torch.export import to_onnx

    image = example()
    prepared = prepare_pt2e(
        torch.export.export(build(model.package, model.path), (image,)).module(), celosia.CelosiaQuantizer()
    )
    with torch.no_grad():
        for feed in model.feeds(SAMPLES, seed=1):
            prepared(torch.from_numpy(feed["image"]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "int8.onnx"
        onnx.save(to_onnx(convert_pt2e(prepared), (image,), input_names=["image"]), path)
        return on_accelerator(path, model)


def on_accelerator(path: Path, model: WildModel) -> dict[str, Any]:
    """Compare bytes with onnxruntime's, and count launches, cycles, and what stays on the CPU.

    over_bound: cycles over the longer of two times: that of all products on the array, and that in which the vector
    unit is busy. different: bytes of outputs that differ; floats may be 1e-5 of the largest apart.
    """
    feed = next(model.feeds(1))
    session = open_session(path, threads=1)
    expected = dict(zip([output.name for output in session.get_outputs()], session.run(None, feed), strict=True))
    program = celosia.compile(path, CONFIG, shapes=shapes(model))
    with Runtime(program, "timed") as runtime:
        result = runtime.run(feed)
    report, cfg = result.report, program.config
    wrong = sum(
        different(result.outputs[name], value)
        for name, value in expected.items()
        if value.dtype.kind != "f" or error(result.outputs[name], value) > RELATIVE
    )
    reasons = Counter(f"{node['op']}: {node['reason']}" for node in report["cpu_nodes"])
    cycles, vector = report["cycles"] or 0, report["units"]["vector"]["busy"] if report["units"] else 0
    loaded = sum(row["bytes_loaded"] for row in report["layers"])
    least = max(report["macs_accelerator"] / cfg.macs_per_cycle, vector) if cycles else 0
    return {
        "different": wrong, "launches": len(program.launches), "cycles": cycles, "bytes_loaded": loaded,
        "share": report["macs_accelerator"] / report["macs_total"] if report["macs_total"] else 0.0,
        "over_bound": cycles / least if least else 0.0, "cpu": dict(reasons.most_common(20)),
    }  # fmt: skip


MEASURED_BY: dict[str, Callable[[WildModel], dict[str, Any]]] = {
    "float": float_speed, "compile": compile_cost, "as_is": as_is, "celosia": by_celosia,
    "qdq": by_onnxruntime("QDQ"), "qoperator": by_onnxruntime("QOperator"), "pt2e": by_pt2e,
}  # fmt: skip

if __name__ == "__main__":
    print(json.dumps(MEASURED_BY[sys.argv[1]](models()[sys.argv[2]])))
