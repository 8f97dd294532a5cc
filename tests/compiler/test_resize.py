"""Resize and Upsample with random attributes, sizes and scales give onnxruntime's results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, shape_inference
from oracle import opened
from thorough import some

import celosia
from celosia.compiler.cpu.kernels import compile_op
from celosia.compiler.program import LaunchStep
from celosia.driver.runtime import Runtime

from .test_cpu import onnxruntime_op

WHERE = {
    "half_pixel": range(11, 22), "pytorch_half_pixel": range(11, 22), "tf_half_pixel_for_nn": range(11, 13),
    "half_pixel_symmetric": range(19, 22), "asymmetric": range(11, 22), "align_corners": range(11, 22),
    "tf_crop_and_resize": range(11, 22),
}  # fmt: skip
"""Ways to coordinates, and the versions that have them."""
NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


class Random:
    """A random Resize that onnxruntime runs."""

    def __init__(self, rng: np.random.Generator, mode: str, dtype: str):
        self.rng, self.mode, self.dtype = rng, mode, dtype
        self.opset, self.op = int(rng.choice([9, 10, 11, 13, 18, 19, 21])), "Resize"
        self.antialias = mode != "nearest" and (self.opset >= 18 and bool(rng.integers(2)))
        if mode == "cubic" and dtype != "float32":
            self.opset, self.antialias = 19, True
        if self.opset == 9:
            self.op = "Upsample"
        last = 17 if mode == "nearest" or self.antialias else 9
        self.shape, self.axes = self.layout(last)
        info = np.iinfo(dtype) if dtype != "float32" else None
        x = rng.integers(info.min, info.max + 1, self.shape) if info else rng.standard_normal(self.shape)
        self.attrs: dict[str, Any] = {"mode": mode}
        self.inputs: list[Any] = [x.astype(dtype)]
        if self.opset <= 10:
            self.inputs.append(self.scales(least=1 if self.opset == 9 else 0.2))
        else:
            self.attributes()
        self.constants = tuple(k for k, v in enumerate(self.inputs) if k and v is not None)

    def layout(self, last: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Draw a shape, and the axes that are resized."""
        ranks = {"nearest": (1, 2, 3, 4, 4, 5, 6), "linear": (2, 3, 4, 4, 5), "cubic": (2, 4, 4)}[self.mode]
        rank = int(self.rng.choice(ranks))
        if rank == 4 and self.mode != "nearest":
            axes = ((2, 3), (1, 2))[int(self.rng.integers(2))]
        elif rank in (4, 5) and self.mode != "nearest":
            axes = tuple(range(2, rank))
        else:
            axes = tuple(range(rank))
        shape = [int(n) for n in self.rng.integers(1, 4, rank)]
        for axis in axes:
            shape[axis] = int(self.rng.integers(1, last if len(axes) < 3 else 6))
        return tuple(shape), axes

    def scales(self, least: float = 0.2, axes: tuple[int, ...] | None = None) -> np.ndarray:
        made = np.ones(len(self.shape), np.float32)
        for axis in self.axes:
            nice = self.rng.integers(1, 13) / self.rng.integers(1, 7)
            made[axis] = max(least, self.rng.choice([nice, nice, self.rng.uniform(0.2, 4), 1]))
        return made if axes is None else made[list(axes)]

    def attributes(self) -> None:
        rng, attrs = self.rng, self.attrs
        known = [mode for mode, versions in WHERE.items() if self.opset in versions]
        if self.axes == (1, 2) and len(self.shape) == 4 and (self.antialias or self.mode == "cubic"):
            known.remove("tf_crop_and_resize")  # onnxruntime extrapolates as if channels were first
        if rng.random() < 0.9:
            attrs["coordinate_transformation_mode"] = str(rng.choice(known))
        where = attrs.get("coordinate_transformation_mode")
        if self.mode == "nearest" and rng.random() < 0.8:
            attrs["nearest_mode"] = str(rng.choice(NEAREST))
        if self.mode == "cubic" and rng.random() < 0.5:
            attrs["cubic_coeff_a"] = float(rng.choice([-0.5, -0.75, -1.0]))
        if self.antialias:
            attrs["antialias"] = 1
        if (self.mode == "cubic" or self.antialias) and rng.random() < 0.4:
            attrs["exclude_outside"] = 1
        axes = None
        if self.opset >= 18 and rng.random() < 0.4:
            axes = tuple(int(a) for a in rng.permutation(self.axes))
            attrs["axes"] = list(axes)
        roi: Any = np.zeros(0, np.float32) if self.opset < 13 else None
        if where == "tf_crop_and_resize":
            some = rng.uniform(-0.2, 1.2, (2, len(self.shape if axes is None else axes)))
            roi = np.sort(some, 0).reshape(-1).astype(np.float32)
            attrs["extrapolation_value"] = float(rng.choice([0, 7, -3.5]) if self.dtype != "uint8" else 11.5)
        if rng.integers(2):
            self.inputs += [roi, self.scales(axes=axes)]
            return
        sizes = [int(n) for n in self.shape]
        for axis in self.axes:
            sizes[axis] = int(rng.integers(1, 4 * sizes[axis] + 2))
        if self.opset >= 18 and rng.random() < 0.4 and (axes or self.mode == "nearest"):
            attrs["keep_aspect_ratio_policy"] = str(rng.choice(["not_larger", "not_smaller"]))
        none = np.zeros(0, np.float32) if self.opset < 13 else None
        self.inputs += [roi, none, np.array(sizes if axes is None else [sizes[a] for a in axes], np.int64)]

    def wrong(self) -> str:
        """Return how the result differs from onnxruntime's; "" if it does not, "refused" if onnxruntime refuses the
        model."""
        try:
            expected = onnxruntime_op(self.op, self.attrs, self.inputs, 1, self.opset, self.constants)[0]
        except Exception as error:
            return f"refused: {error}"
        types = [None if v is None else v if k else (v.shape, v.dtype.name) for k, v in enumerate(self.inputs)]
        kernel = compile_op(self.op, self.attrs, types, opset=self.opset)
        actual = kernel(*(v for v in self.inputs if v is not None))[0]
        if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
            return f"{actual.shape} {actual.dtype}, not {expected.shape} {expected.dtype}"
        exact = self.dtype != "float32" or self.mode == "nearest"
        same = actual == expected if exact else np.isclose(actual, expected, rtol=1e-5, atol=1e-5)
        return "" if same.all() else f"{(~same).sum()} of {same.size}: {actual[~same][:4]}, not {expected[~same][:4]}"

    def __str__(self) -> str:
        rest = [None if v is None else v.tolist() for v in self.inputs[1:]]
        return f"{self.op} {self.opset} {self.dtype} {list(self.shape)} {self.attrs} {rest}"


def sweep(mode: str, dtype: str, count: int, seed: int = 0) -> tuple[int, list[str]]:
    """Return how many cases were compared, and a description of each difference."""
    rng, compared, wrong = np.random.default_rng(seed), 0, []
    for _ in range(count):
        case = Random(rng, mode, dtype)
        why = case.wrong()
        compared += not why.startswith("refused")
        if why and not why.startswith("refused"):
            wrong.append(f"{case}: {why}")
    return compared, wrong


@pytest.mark.parametrize("mode, dtype", [
    ("nearest", "int8"), ("linear", "float32"), ("linear", "uint8"), ("linear", "int8"), ("cubic", "float32"),
    ("cubic", "uint8"), ("linear", "int32"),
])  # fmt: skip
@pytest.mark.parametrize("count", some([6, 60], [6]))
def test_random_uses(mode: str, dtype: str, count: int) -> None:
    compared, wrong = sweep(mode, dtype, count)
    assert compared >= count * 2 // 3 and wrong == []


def test_what_lies_nearly_half_way() -> None:
    """Coordinates close to a tie round as in float32: element 16 has 16 / f32(32 / 15), the float32 below 7.5."""
    x, sizes = np.arange(15, dtype=np.int8), np.array([32])
    for nearest, element in (("round_prefer_ceil", 8), ("round_prefer_floor", 7)):
        attrs = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": nearest}
        expected = onnxruntime_op("Resize", attrs, [x, None, None, sizes], 1, 13, (3,))[0]
        assert expected[16] == element
        kernel = compile_op("Resize", attrs, [((15,), "int8"), None, None, sizes], opset=13)
        np.testing.assert_array_equal(kernel(x, sizes)[0], expected)


def test_coordinates_are_float32() -> None:
    """Coordinates are computed in float32: with a scale of f32(1/3), (o + 0.5) / scale is exactly 1.5 for o = 0."""
    x, scales = np.arange(9, dtype=np.int8), np.float32([1 / 3])
    attrs = {"coordinate_transformation_mode": "half_pixel", "nearest_mode": "floor"}
    expected = onnxruntime_op("Resize", attrs, [x, None, scales], 1, 13, (2,))[0]
    assert expected.tolist() == [1, 4, 7]
    kernel = compile_op("Resize", attrs, [((9,), "int8"), None, scales], opset=13)
    np.testing.assert_array_equal(kernel(x, scales)[0], expected)


@pytest.mark.parametrize("where, nearest, scale", [
    ("half_pixel", "floor", 1 / 3), ("align_corners", "round_prefer_floor", 0.6),
    ("asymmetric", "round_prefer_ceil", 1.5),
])  # fmt: skip
def test_on_the_accelerator(where: str, nearest: str, scale: float) -> None:
    """A Resize between two convolutions is correct at sizes that the scales do not divide."""
    rng = np.random.default_rng(0)
    constants = {
        "s": np.float32(0.1), "z": np.int8(0), "w": rng.integers(-5, 6, (16, 16, 1, 1)).astype(np.int8),
        "scales": np.float32([1, 1, scale, scale]),
    }  # fmt: skip
    nodes = [
        helper.make_node("QLinearConv", ["x", "s", "z", "w", "s", "z", "s", "z"], ["c"]),
        helper.make_node("Resize", ["c", "", "scales"], ["r"], mode="nearest", nearest_mode=nearest,
                         coordinate_transformation_mode=where),
        helper.make_node("QLinearConv", ["r", "s", "z", "w", "s", "z", "s", "z"], ["y"]),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.INT8, [1, 16, 9, 10])],
        [helper.make_tensor_value_info("y", TensorProto.INT8, None)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    program = celosia.compile(shape_inference.infer_shapes(model), "tiny")
    assert [type(step) for step in program.steps] == [LaunchStep]
    feed = {"x": rng.integers(-128, 128, (1, 16, 9, 10)).astype(np.int8)}
    session = opened(model)
    np.testing.assert_array_equal(Runtime(program).run(feed).outputs["y"], session.run(None, feed)[0])
