"""Networks made here: known shapes, random weights, quantised by onnxruntime.

    python -m benchmarks.networks FOLDER [NAME ...]     # write NAME.onnx, or all, for `celosia run`

Weights are int8 by channel and symmetric, activations int8 with a zero point, as QuantizeLinear and DequantizeLinear
pairs; ranges come from the calibration with random inputs. For cycle counts and for comparing bytes: nothing here was
trained.
"""

from __future__ import annotations

import hashlib
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from celosia.driver.quantize.quantize import quantize

Array = NDArray[Any]
OPSET, IR_VERSION = 18, 10
CALIBRATION = 4
"""Random inputs from which the ranges of activations come."""
SPREAD = 2.0
"""Standard deviation of what goes into an activation function: ReLU6 cuts some of it at both ends, and not all."""
BIAS = 0.5
"""Standard deviation of biases."""


class NetBuilder:
    """A float network in the making: [1, channels, rows, columns], one operator after the other.

    Weights are scaled by the mean square of what they multiply, as it is where sums are normally distributed, so that
    no layer's activations die or explode.
    """

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name, self.rng = name, np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]))
        self.shape = shape
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.power: dict[str, float] = {"input": 1.0}
        """Mean square of each value."""
        self.channels = {"input": shape[1]}

    def conv(
        self, x: str, channels: int, kernel: tuple[int, int] = (1, 1), stride: int = 1,
        pads: tuple[int, int, int, int] | None = None, depthwise: bool = False, top: float | None = 6.0,
    ) -> str:  # fmt: skip
        """A convolution, then ReLU up to `top` (None: no activation function). pads: those that keep the size."""
        inputs = 1 if depthwise else self.channels[x]
        if pads is None:
            pads = (kernel[0] // 2, kernel[1] // 2, kernel[0] // 2, kernel[1] // 2)
        y = f"conv{len(self.nodes)}"
        deviation = SPREAD / math.sqrt(inputs * math.prod(kernel) * self.power[x])
        gains = self.rng.uniform(0.7, 1.3, (channels, 1, 1, 1))  # a scale of its own for each channel
        weights = self.rng.normal(0, deviation, (channels, inputs, *kernel)) * gains
        arguments = [x, self._constant(f"{y}_w", weights), self._constant(f"{y}_b", self.rng.normal(0, BIAS, channels))]
        self._node(
            "Conv", arguments, y, kernel_shape=kernel, strides=(stride, stride), pads=pads,
            group=channels if depthwise else 1,
        )  # fmt: skip
        self.channels[y], self.power[y] = channels, SPREAD**2 + BIAS**2
        if top is None:
            return y
        bounds = [self._constant(f"{y}_{end}", np.float32(value)) for end, value in (("low", 0), ("high", top))]
        self._node("Clip", [y, *bounds], f"{y}_relu")
        sample = np.clip(self.rng.normal(0, math.sqrt(self.power[y]), 4096), 0, top)
        self.channels[f"{y}_relu"], self.power[f"{y}_relu"] = channels, float((sample**2).mean())
        return f"{y}_relu"

    def silu(self, x: str) -> str:
        """x times its sigmoid, as exporters write it."""
        y = f"silu{len(self.nodes)}"
        self._node("Sigmoid", [x], f"{y}_gate")
        self._node("Mul", [x, f"{y}_gate"], y)
        sample = self.rng.normal(0, math.sqrt(self.power[x]), 4096)
        self.channels[y], self.power[y] = self.channels[x], float(((sample / (1 + np.exp(-sample))) ** 2).mean())
        return y

    def conv_silu(self, x: str, channels: int, kernel: int = 1, stride: int = 1) -> str:
        """A convolution with SiLU behind it."""
        return self.silu(self.conv(x, channels, (kernel, kernel), stride, top=None))

    def split(self, x: str, parts: int) -> list[str]:
        """Equal parts of the channels."""
        size, ys = self.channels[x] // parts, [f"split{len(self.nodes)}_{part}" for part in range(parts)]
        sizes = self._integers(f"{ys[0]}_sizes", [size] * parts)
        self.nodes.append(helper.make_node("Split", [x, sizes], ys, name=ys[0], axis=1))
        for y in ys:
            self.channels[y], self.power[y] = size, self.power[x]
        return ys

    def concat(self, *xs: str) -> str:
        """Along channels."""
        y = f"concat{len(self.nodes)}"
        self._node("Concat", xs, y, axis=1)
        self.channels[y] = sum(self.channels[x] for x in xs)
        self.power[y] = sum(self.power[x] * self.channels[x] for x in xs) / self.channels[y]
        return y

    def c2f(self, x: str, channels: int, count: int, shortcut: bool) -> str:
        """YOLOv8's block: half of the channels go on, and the results of `count` bottlenecks on the other half."""
        parts = self.split(self.conv_silu(x, channels), 2)
        for _ in range(count):
            y = self.conv_silu(self.conv_silu(parts[-1], channels // 2, 3), channels // 2, 3)
            parts.append(self.add(parts[-1], y) if shortcut else y)
        return self.conv_silu(self.concat(*parts), channels)

    def sppf(self, x: str, channels: int) -> str:
        """Three max poolings of 5 x 5 one after the other, side by side with what they pool."""
        parts = [self.conv_silu(x, channels // 2)]
        for _ in range(3):
            y = f"pool{len(self.nodes)}"
            self._node("MaxPool", [parts[-1]], y, kernel_shape=[5, 5], strides=[1, 1], pads=[2, 2, 2, 2])
            self.channels[y], self.power[y] = self.channels[parts[-1]], self.power[parts[-1]]
            parts.append(y)
        return self.conv_silu(self.concat(*parts), channels)

    def upsample(self, x: str) -> str:
        """Nearest neighbours, twice as many rows and columns."""
        y = f"up{len(self.nodes)}"
        scales = self._constant(f"{y}_scales", np.array([1, 1, 2, 2]))
        attributes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        self._node("Resize", [x, "", scales], y, **attributes)
        self.channels[y], self.power[y] = self.channels[x], self.power[x]
        return y

    def detect(self, levels: list[tuple[str, int]], classes: int, bins: int, inner: int) -> onnx.ModelProto:
        """Decoupled heads on levels (value, pixels): boxes as expectations over `bins`, and probabilities of classes.
        The model, whose output is [1, 4 + classes, pixels of all levels]."""
        rows = []
        for x, pixels in levels:
            box = self.conv_silu(self.conv_silu(x, inner, 3), inner, 3)
            label = self.conv_silu(self.conv_silu(x, inner, 3), inner, 3)
            both = self.concat(self.conv(box, 4 * bins, top=None), self.conv(label, classes, top=None))
            shape = self._integers(f"{both}_shape", [1, 4 * bins + classes, pixels])
            self._node("Reshape", [both, shape], f"{both}_rows")
            rows.append(f"{both}_rows")
        total = sum(pixels for _, pixels in levels)
        self._node("Concat", rows, "heads", axis=2)
        sizes = self._integers("head_sizes", [4 * bins, classes])
        self.nodes.append(helper.make_node("Split", ["heads", sizes], ["boxes", "labels"], name="parts", axis=1))
        self._node("Reshape", ["boxes", self._integers("bins_shape", [1, 4, bins, total])], "bins")
        self._node("Transpose", ["bins"], "bins_last", perm=[0, 2, 1, 3])
        self._node("Softmax", ["bins_last"], "likely", axis=1)
        weights = self._constant("places", np.arange(bins, dtype=np.float32).reshape(1, bins, 1, 1))
        self._node("Conv", ["likely", weights], "expected", kernel_shape=[1, 1])
        self._node("Reshape", ["expected", self._integers("sides_shape", [1, 4, total])], "sides")
        self._node("Sigmoid", ["labels"], "probabilities")
        self._node("Concat", ["sides", "probabilities"], "detections", axis=1)
        return self.ending({"detections": [1, 4 + classes, total]})

    def add(self, a: str, b: str) -> str:
        """The sum of two tensors of one shape."""
        y = f"add{len(self.nodes)}"
        self._node("Add", [a, b], y)
        self.channels[y], self.power[y] = self.channels[a], self.power[a] + self.power[b]
        return y

    def basic_block(self, x: str, channels: int, stride: int) -> str:
        """ResNet's: two convolutions of 3x3, and the input, or a convolution of 1x1 of it, added before the ReLU."""
        y = self.conv(self.conv(x, channels, (3, 3), stride), channels, (3, 3), top=None)
        own = x if stride == 1 and channels == self.channels[x] else self.conv(x, channels, (1, 1), stride, top=None)
        both = self.add(y, own)
        y = f"relu{len(self.nodes)}"
        self._node("Relu", [both], y)
        self.channels[y], self.power[y] = channels, self.power[both] / 2
        return y

    def max_pool(self, x: str, size: int, stride: int) -> str:
        """The largest of `size` x `size`, padded by half of that."""
        y, pads = f"pool{len(self.nodes)}", [size // 2] * 4
        self._node("MaxPool", [x], y, kernel_shape=[size, size], strides=[stride, stride], pads=pads)
        self.channels[y], self.power[y] = self.channels[x], self.power[x]
        return y

    def separable(self, x: str, channels: int, stride: int = 1) -> str:
        """Depthwise 3x3, then 1x1."""
        return self.conv(self.conv(x, self.channels[x], (3, 3), stride, depthwise=True), channels)

    def doubled(self, x: str) -> str:
        """Twice the rows and columns, by a transposed convolution of 2x2 with stride 2."""
        y, channels = f"up{len(self.nodes)}", self.channels[x]
        weights = self.rng.normal(0, SPREAD / math.sqrt(channels * self.power[x]), (channels, channels, 2, 2))
        arguments = [x, self._constant(f"{y}_w", weights), self._constant(f"{y}_b", self.rng.normal(0, BIAS, channels))]
        self._node("ConvTranspose", arguments, y, kernel_shape=(2, 2), strides=(2, 2))
        self.channels[y], self.power[y] = channels, SPREAD**2 + BIAS**2
        return y

    def inverted_residual(self, x: str, channels: int, expand: int, kernel: int, stride: int) -> str:
        """A block of MobileNetV2 and its successors: 1x1 to `expand` times the channels, depthwise, 1x1 without an
        activation function, and the input added where it has the output's shape."""
        wide = self.channels[x] * expand
        y = self.conv(x, wide) if expand > 1 else x
        y = self.conv(y, wide, (kernel, kernel), stride, depthwise=True)
        y = self.conv(y, channels, top=None)
        return self.add(x, y) if stride == 1 and channels == self.channels[x] else y

    def classify(self, x: str, classes: int) -> onnx.ModelProto:
        """Average over all pixels, and one matrix product to `classes` logits: the model."""
        self._node("GlobalAveragePool", [x], "pooled")
        self._node("Flatten", ["pooled"], "features")
        weights = self.rng.normal(0, 1 / math.sqrt(self.channels[x]), (classes, self.channels[x]))
        arguments = ["features", self._constant("fc_w", weights), self._constant("fc_b", np.zeros(classes))]
        self._node("Gemm", arguments, "logits", transB=1)
        return self.ending({"logits": [1, classes]})

    def ending(self, outputs: dict[str, list[int]]) -> onnx.ModelProto:
        """The model with these outputs, by name with their shapes."""
        graph = helper.make_graph(
            self.nodes, self.name,
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, self.shape)],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
            self.constants,
        )  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)

    def _integers(self, name: str, values: list[int]) -> str:
        self.constants.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def _node(self, op: str, inputs: Sequence[str], output: str, **attributes: object) -> None:
        self.nodes.append(helper.make_node(op, list(inputs), [output], name=output, **attributes))

    def _constant(self, name: str, value: Any) -> str:
        self.constants.append(numpy_helper.from_array(np.asarray(value, np.float32), name))
        return name


def mobilenet_v2(size: int) -> onnx.ModelProto:
    """MobileNetV2 1.0 (Sandler et al., CVPR 2018, table 2) on size x size pixels, 1,000 classes."""
    net = NetBuilder(f"mobilenet_v2_{size}", (1, 3, size, size))
    x = net.conv("input", 32, (3, 3), 2)
    for expand, channels, count, stride in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    ):  # fmt: skip
        for number in range(count):
            x = net.inverted_residual(x, channels, expand, 3, 1 if number else stride)
    return net.classify(net.conv(x, 1280), 1000)


def resnet18(size: int) -> onnx.ModelProto:
    """ResNet-18 (He et al., CVPR 2016, table 1) on size x size pixels, 1,000 classes."""
    net = NetBuilder(f"resnet18_{size}", (1, 3, size, size))
    x = net.max_pool(net.conv("input", 64, (7, 7), 2), 3, 2)
    for channels in (64, 128, 256, 512):
        for number in range(2):
            x = net.basic_block(x, channels, 2 if channels > 64 and not number else 1)
    return net.classify(x, 1000)


def lite() -> onnx.ModelProto:
    """Inverted residuals with 3x3 and 5x5 depthwise convolutions, ReLU6 and no squeeze-excite on 224 x 224 pixels:
    the shapes of EfficientNet-Lite0 (Liu, 2020, after Tan and Le, ICML 2019)."""
    net = NetBuilder("lite", (1, 3, 224, 224))
    x = net.conv("input", 32, (3, 3), 2)
    for expand, kernel, channels, count, stride in (
        (1, 3, 16, 1, 1), (6, 3, 24, 2, 2), (6, 5, 40, 2, 2), (6, 3, 80, 3, 2), (6, 5, 112, 3, 1), (6, 5, 192, 4, 2),
        (6, 3, 320, 1, 1),
    ):  # fmt: skip
        for number in range(count):
            x = net.inverted_residual(x, channels, expand, kernel, 1 if number else stride)
    return net.classify(net.conv(x, 1280), 1000)


def ds_cnn() -> onnx.ModelProto:
    """The keyword spotter of MLPerf Tiny (Banbury et al., 2021): DS-CNN on 49 frames of 10 coefficients, 12 words."""
    net = NetBuilder("ds_cnn", (1, 1, 49, 10))
    x = net.conv("input", 64, (10, 4), 2, (4, 1, 5, 1))
    for _ in range(4):
        x = net.conv(net.conv(x, 64, (3, 3), depthwise=True), 64)
    return net.classify(x, 12)


def depthwise() -> onnx.ModelProto:
    """A depthwise 3x3 convolution alone, of 112 x 112 pixels and 96 channels."""
    net = NetBuilder("depthwise", (1, 96, 112, 112))
    return net.ending({net.conv("input", 96, (3, 3), depthwise=True): [1, 96, 112, 112]})


def detector() -> onnx.ModelProto:
    """A face detector of 320 x 320 pixels: separable convolutions down to 1/32, a feature pyramid whose upper levels
    come down by transposed convolutions, and for each cell of three levels a score, a box and five points, as in
    RetinaFace (Deng et al., CVPR 2020) and in lighter ones after it."""
    net = NetBuilder("detector", (1, 3, 320, 320))
    x = net.separable(net.conv("input", 16, (3, 3), 2), 32, 2)
    levels: list[str] = []
    for channels in (64, 64, 64):
        x = net.separable(net.separable(x, channels, 2), channels)
        levels.append(x)
    outputs: dict[str, list[int]] = {}
    above = ""
    for x, size in zip(reversed(levels), (10, 20, 40)):
        above = net.separable(net.add(x, net.doubled(above)) if above else x, 64)
        for values in (1, 4, 10):
            outputs[net.conv(net.separable(above, 64), values, top=None)] = [1, values, size, size]
    return net.ending(outputs)


def yolo(size: int, classes: int = 80) -> onnx.ModelProto:
    """The smallest YOLOv8 detector (Jocher et al., 2023) on size x size pixels: C2f blocks, SPPF, a feature pyramid up
    and down, decoupled heads with distributions over 16 places."""
    net = NetBuilder(f"yolo_{size}", (1, 3, size, size))
    x = net.conv_silu(net.conv_silu("input", 16, 3, 2), 32, 3, 2)
    x = net.c2f(x, 32, 1, True)
    level8 = net.c2f(net.conv_silu(x, 64, 3, 2), 64, 2, True)
    level16 = net.c2f(net.conv_silu(level8, 128, 3, 2), 128, 2, True)
    level32 = net.sppf(net.c2f(net.conv_silu(level16, 256, 3, 2), 256, 1, True), 256)
    up16 = net.c2f(net.concat(net.upsample(level32), level16), 128, 1, False)
    p8 = net.c2f(net.concat(net.upsample(up16), level8), 64, 1, False)
    p16 = net.c2f(net.concat(net.conv_silu(p8, 64, 3, 2), up16), 128, 1, False)
    p32 = net.c2f(net.concat(net.conv_silu(p16, 128, 3, 2), level32), 256, 1, False)
    levels = [(p, (size // step) ** 2) for p, step in ((p8, 8), (p16, 16), (p32, 32))]
    return net.detect(levels, classes, 16, max(64, min(classes, 100)))


NETWORKS: dict[str, Callable[[], onnx.ModelProto]] = {
    "mobilenet_v2_160": lambda: mobilenet_v2(160),
    "mobilenet_v2_224": lambda: mobilenet_v2(224),
    "resnet18_224": lambda: resnet18(224),
    "ds_cnn": ds_cnn,
    "lite": lite,
    "depthwise": depthwise,
    "detector": detector,
    "yolo_256": lambda: yolo(256),
}


def write(name: str, path: Path, floats: bool = False) -> None:
    """Write the network of that name to `path`; floats: as it is before it is quantised."""
    model = NETWORKS[name]()
    if floats:
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(model, path)
        return
    (value,) = model.graph.input
    shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    inputs = np.random.default_rng(0).standard_normal((CALIBRATION, *shape[1:])).astype(np.float32)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "float.onnx"
        onnx.save(model, source)
        quantize(source, {value.name: inputs}, path)


def cached(name: str, folder: Path, floats: bool = False) -> Path:
    """The network of that name in `folder`, made where it is not there as this module makes it now."""
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    path = folder / f"{name}-{'float-' if floats else ''}{digest}.onnx"
    if not path.exists():
        write(name, path, floats)
    return path


def main(arguments: list[str]) -> int:
    """Writes networks to the folder that the first argument names. Returns the exit code."""
    if not arguments or not set(arguments[1:]) <= set(NETWORKS):
        print(f"usage: python -m benchmarks.networks FOLDER [NAME ...], of {', '.join(NETWORKS)}", file=sys.stderr)
        return 2
    for name in arguments[1:] or NETWORKS:
        write(name, Path(arguments[0]) / f"{name}.onnx")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
