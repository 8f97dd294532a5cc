"""GridSample and RoiAlign with random attributes and places, many of them ties, give onnxruntime's results."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper, shape_inference
from oracle import opened

import celosia
from celosia.driver.runtime import Runtime


def differs(op: str, attrs: dict[str, Any], inputs: list[np.ndarray], opset: int) -> str:
    """Return how the result differs from onnxruntime's, or ""."""
    names = [f"i{k}" for k in range(len(inputs))]
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], **attrs)], "g",
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
         for n, v in zip(names, inputs)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    model, feed = shape_inference.infer_shapes(model), dict(zip(names, inputs))
    session = opened(model)
    wanted = session.run(None, feed)[0]
    found = Runtime(celosia.compile(model, "tiny")).run(feed).outputs["y"]
    same = np.isclose(found, wanted, rtol=1e-4, atol=1e-4)
    return "" if same.all() else f"{attrs}: {(~same).sum()} of {same.size}, {found[~same][:3]}, not {wanted[~same][:3]}"


def places(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw numbers between -2.5 and 2.5, half of them multiples of 1/8."""
    some = rng.uniform(-2.5, 2.5, shape) if rng.integers(2) else rng.integers(-20, 21, shape) / 8
    return some.astype(np.float32)


def test_grid_sample() -> None:
    rng, wrong = np.random.default_rng(0), []
    for _ in range(60):
        rank, opset = int(rng.choice([2, 2, 3])), int(rng.choice([16, 20]))
        opset = 20 if rank == 3 else opset
        modes = ["nearest", "bilinear", "bicubic"] if opset == 16 else ["nearest", "linear", "cubic"][: 5 - rank]
        attrs = dict(
            mode=str(rng.choice([*modes, modes[0]])), align_corners=int(rng.integers(2)),
            padding_mode=str(rng.choice(["zeros", "border", "reflection"])),
        )  # fmt: skip
        sizes, out = (tuple(int(n) for n in rng.integers(1, 8, rank)) for _ in range(2))
        x = rng.standard_normal((2, 2, *sizes)).astype(np.float32)
        wrong.append(differs("GridSample", attrs, [x, places(rng, (2, *out, rank))], opset))
    assert not any(wrong), [why for why in wrong if why]


def test_roi_align() -> None:
    rng, wrong = np.random.default_rng(0), []
    for _ in range(60):
        attrs = dict(mode=str(rng.choice(["avg", "max"])), sampling_ratio=int(rng.choice([0, 0, 1, 2])),
                     output_height=int(rng.integers(1, 6)), output_width=int(rng.integers(1, 6)),
                     spatial_scale=float(rng.choice([1.0, 0.5, 1 / 3, 0.1])))  # fmt: skip
        opset = int(rng.choice([10, 16]))
        if opset == 16:
            attrs["coordinate_transformation_mode"] = str(rng.choice(["half_pixel", "output_half_pixel"]))
        x = rng.standard_normal((2, 2, *rng.integers(1, 13, 2))).astype(np.float32)
        reach, part = 1.2 * max(x.shape[2:]) / attrs["spatial_scale"], int(rng.choice([1, 2, 10]))
        corners = np.round(np.sort(rng.uniform(-1, reach, (8, 2, 2)), axis=1) * part) / part
        boxes = corners.reshape(8, 4).astype(np.float32)
        wrong.append(differs("RoiAlign", attrs, [x, boxes, rng.integers(0, 2, 8)], opset))
    assert not any(wrong), [why for why in wrong if why]
