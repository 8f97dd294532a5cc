"""Draw random quantised blocks with branches, for tests of the order of layers.

Blocks are C2f, CSP, ELAN, DenseNet, HRNet, BiFPN, Inception, residual and pyramid pooling, one after the other, with
QuantizeLinear and DequantizeLinear pairs. Channel counts are seldom multiples of a Config's block. Parts are sliced
off at any channel, added, pooled, resized and concatenated again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET, IR_VERSION = 18, 10
MAX_CHANNELS = 72
"""The most channels that one block passes to the next."""


@dataclass(frozen=True)
class Value:
    """A quantised tensor [1, channels, rows, columns], with its scale and zero point."""

    name: str
    channels: int
    rows: int
    columns: int
    scale: float
    zero: int


class Blocks:
    """A quantised network in the making; the operator methods append nodes and return their output.

    shared: all tensors have one scale, so that a Slice or Concat only moves bytes. unsigned: activations are uint8.
    unit: channel counts that a block chooses are multiples of it.
    """

    def __init__(self, seed: int, shared: bool | None = None, unsigned: bool | None = None) -> None:
        """Start a network with one input. Options that are None are drawn."""
        self.rng = np.random.default_rng(seed)
        self.unsigned = bool(self.rng.integers(2)) if unsigned is None else unsigned
        self.shared = bool(self.rng.integers(2)) if shared is None else shared
        self.unit = int(self.rng.choice([1, 4, 16]))
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        rows, columns = (int(size) for size in self.rng.integers(4, 15, 2))
        self.inputs = [self._value("x", self.integer(1, 24), rows, columns)]

    def integer(self, low: int, high: int) -> int:
        """Draw an integer from `low` to `high`, both included."""
        return int(self.rng.integers(low, high + 1))

    def width(self, most: int = 40) -> int:
        """Draw a number of channels, at most `most` if the unit allows."""
        return self.unit * self.integer(1, max(1, most // self.unit))

    def likely(self, share: float) -> bool:
        """Return True with the probability `share`."""
        return bool(self.rng.random() < share)

    def other_input(self, like: Value, channels: int = 0) -> Value:
        """Add an input to the network, of the size of `like`."""
        name = f"input{len(self.inputs)}"
        self.inputs.append(self._value(name, channels or self.width(), like.rows, like.columns))
        return self.inputs[-1]

    # Operators ---------------------------------------------------------------------------------------------------

    def conv(self, x: Value, channels: int = 0, kernel: int = 0, stride: int = 1, depthwise: bool = False) -> Value:
        """Add a convolution that divides the size by its stride, perhaps with bias and ReLU."""
        channels = x.channels if depthwise else channels or self.width()
        kernel = kernel or (3 if depthwise else (1, 3)[self.integer(0, 1)])
        name, inputs = f"conv{len(self.nodes)}", 1 if depthwise else x.channels
        per_channel = (channels,) if self.likely(0.5) else ()
        bound = 64 if self.unsigned else 127  # onnxruntime's sums of uint8 and int8 saturate at 16 bits with AVX2
        scales = (self.rng.uniform(0.9, 2.7, per_channel) / bound / math.sqrt(inputs * kernel**2)).astype(np.float32)
        weights = self.rng.integers(-bound, bound + 1, (channels, inputs, kernel, kernel)).astype(np.int8)
        arguments = [self._real(x), self._dequantized(f"{name}_w", weights, scales)]
        if self.likely(0.5):
            steps = np.broadcast_to(scales * np.float32(x.scale), per_channel)
            arguments.append(self._dequantized(f"{name}_b", self._biases(channels), steps))
        rows, columns = ((size - 1) // stride + 1 for size in (x.rows, x.columns))
        window = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [kernel // 2] * 4}
        self._node("Conv", arguments, name, **window, group=x.channels if depthwise else 1)
        real = name
        if self.likely(0.4):
            real = self._node("Relu", [name], f"{name}_relu")
        return self._quantized(real, replace(x, channels=channels, rows=rows, columns=columns))

    def parts(self, x: Value, count: int = 2) -> list[Value]:
        """Slice the channels of x into `count` parts at random places; fewer if x has too few channels."""
        inner = range(self.unit, x.channels, self.unit)
        cuts = sorted(self.rng.choice(inner, min(count - 1, len(inner)), replace=False).tolist()) if len(inner) else []
        bounds = [0, *cuts, x.channels]
        return [self.slice(x, first, end) for first, end in pairwise(bounds)]

    def slice(self, x: Value, first: int, end: int) -> Value:
        """Add a Slice of channels `first` to `end` of x."""
        name = f"slice{len(self.nodes)}"
        bounds = [self._constant(f"{name}_{key}", np.array([n])) for key, n in zip("fea", (first, end, 1), strict=True)]
        real = self._node("Slice", [self._real(x), *bounds], name)
        return self._quantized(real, replace(x, channels=end - first), same=True)

    def concat(self, *xs: Value) -> Value:
        """Add a Concat along channels."""
        name = f"concat{len(self.nodes)}"
        real = self._node("Concat", [self._real(x) for x in xs], name, axis=1)
        return self._quantized(real, replace(xs[0], channels=sum(x.channels for x in xs)))

    def add(self, a: Value, b: Value) -> Value:
        """Add the sum of two tensors of the same shape."""
        return self._quantized(self._node("Add", [self._real(a), self._real(b)], f"add{len(self.nodes)}"), a)

    def pool(self, x: Value, kernel: int, stride: int = 1) -> Value:
        """Add a MaxPool."""
        rows, columns = ((size - 1) // stride + 1 for size in (x.rows, x.columns))
        window = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [kernel // 2] * 4}
        real = self._node("MaxPool", [self._real(x)], f"pool{len(self.nodes)}", **window)
        return self._quantized(real, replace(x, rows=rows, columns=columns), same=True)

    def average(self, x: Value) -> Value:
        """Add an AveragePool of windows of 3 x 3. Elements outside of the image do not count."""
        window = {"kernel_shape": [3, 3], "strides": [1, 1], "pads": [1] * 4}
        return self._quantized(self._node("AveragePool", [self._real(x)], f"mean{len(self.nodes)}", **window), x)

    def resized(self, x: Value, rows: int, columns: int) -> Value:
        """Add a Resize to nearest neighbours, to a multiple of the size."""
        name = f"up{len(self.nodes)}"
        sizes = self._constant(f"{name}_sizes", np.array([1, x.channels, rows, columns]))
        modes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        real = self._node("Resize", [self._real(x), "", "", sizes], name, **modes)
        return self._quantized(real, replace(x, rows=rows, columns=columns), same=True)

    # Blocks ------------------------------------------------------------------------------------------------------

    def c2f(self, x: Value) -> Value:
        """Add YOLOv8's C2f: bottlenecks on the last part of the channels, and all their results concatenated."""
        parts = self.parts(self.conv(x))
        if self.likely(0.3):
            parts[0] = self.other_input(parts[1 % len(parts)])
        for _ in range(self.integer(1, 3)):
            y = self.conv(self.conv(parts[-1], kernel=3), parts[-1].channels, 3)
            parts.append(self.add(parts[-1], y) if self.likely(0.7) else y)
        return self.conv(self.concat(*parts))

    def csp(self, x: Value) -> Value:
        """Add two convolutions of x, one of them with residual blocks after it, concatenated."""
        y, other = self.conv(x), self.conv(x, kernel=1)
        for _ in range(self.integer(1, 2)):
            y = self.add(y, self.conv(self.conv(y, kernel=1), y.channels, 3))
        return self.conv(self.concat(*((y, other) if self.likely(0.5) else (other, y))))

    def elan(self, x: Value) -> Value:
        """Add a chain of convolutions whose results are all concatenated."""
        parts = [self.conv(x, kernel=1), self.conv(x, kernel=1)]
        for _ in range(self.integer(2, 4)):
            parts.append(self.conv(parts[-1], kernel=3))
        return self.conv(self.concat(*parts), kernel=1)

    def dense(self, x: Value) -> Value:
        """Add convolutions, each of which reads the results of all before it."""
        for _ in range(self.integer(2, 3)):
            y = self.conv(self.conv(x, kernel=1), self.width(16), 3)
            x = self.concat(x, y)
        return x

    def hrnet(self, x: Value) -> Value:
        """Add branches of two resolutions that exchange their results, and concatenate them."""
        high, low = self.conv(x, kernel=3), self.conv(x, kernel=3, stride=2)
        for _ in range(self.integer(1, 2)):
            high, low = self.conv(high, kernel=3), self.conv(low, kernel=3)
            up = self._to(self.conv(low, high.channels, 1), high)
            down = self.conv(high, low.channels, 3, stride=2)
            high, low = self.add(high, up), self.add(low, down)
        return self.concat(high, self._to(low, high))

    def bifpn(self, x: Value) -> Value:
        """Add three resolutions that are fused from the coarsest to the finest and back."""
        width = self.width(28)
        levels = [self.conv(x, width, 1)]
        for _ in range(2):
            levels.append(self.pool(levels[-1], 3, 2) if self.likely(0.5) else self.conv(levels[-1], width, 3, 2))
        fine = [levels[2]]
        for level in (levels[1], levels[0]):
            fine.append(self._separable(self.add(level, self._to(fine[-1], level))))
        y = fine[2]
        for level, between in ((levels[1], fine[1]), (levels[2], None)):
            down = self.pool(y, 3, 2)
            both = self.add(level, between) if between is not None else level
            y = self._separable(self.add(both, down))
        return self.concat(fine[2], self._to(y, fine[2])) if self.likely(0.7) else fine[2]

    def inception(self, x: Value) -> Value:
        """Add branches of several depths and a pooling, concatenated."""
        branches = [self.conv(x, kernel=1), self.conv(self.conv(x, kernel=1), kernel=3)]
        if self.likely(0.6):
            branches.append(self.conv(self.conv(self.conv(x, kernel=1), kernel=3), kernel=3))
        branches.append(self.conv(self.average(x) if self.likely(0.3) else self.pool(x, 3), kernel=1))
        if self.likely(0.3):
            branches.append(self.pool(x, 3))
        return self.concat(*(branches[n] for n in self.rng.permutation(len(branches))))

    def residual(self, x: Value) -> Value:
        """Add a residual block, inverted or plain."""
        y = self.conv(self.conv(x), x.channels, 3) if self.likely(0.5) else self._separable(x)
        return self.add(x, y)

    def sppf(self, x: Value) -> Value:
        """Add poolings in a chain, concatenated with their input."""
        parts = [self.conv(x, kernel=1)]
        for _ in range(self.integer(2, 3)):
            parts.append(self.pool(parts[-1], 5 if self.likely(0.5) else 3))
        return self.conv(self.concat(*parts), kernel=1)

    def shuffled(self, x: Value) -> Value:
        """Add parts on separate paths: sliced again, added to parts of the same shape, concatenated in order."""
        parts = self.parts(self.conv(x), self.integer(2, 4))
        for _ in range(self.integer(2, 5)):
            n = self.integer(0, len(parts) - 1)
            alike = [other for other in parts if other.channels == parts[n].channels and other is not parts[n]]
            ways = [
                lambda p: self.conv(p), lambda p: self.pool(p, 3), lambda p: self.conv(p, depthwise=True),
                lambda p: self.add(p, self.conv(p, p.channels)), lambda p: self.slice(p, 0, -(-p.channels // 2)),
                lambda p, alike=alike: self.add(p, alike[0]) if alike else self.conv(p, kernel=1),
            ]  # fmt: skip
            parts[n : n + self.integer(0, 1)] = [ways[self.integer(0, len(ways) - 1)](parts[n])]
        return self.concat(*parts)

    def _separable(self, x: Value) -> Value:
        """Add a depthwise convolution and a 1 x 1 one."""
        return self.conv(self.conv(x, depthwise=True), x.channels, 1)

    def _to(self, x: Value, like: Value) -> Value:
        """Resize x to the rows and columns of `like`: to the next multiple of its own size, then cut off."""
        up = self.resized(x, -(-like.rows // x.rows) * x.rows, -(-like.columns // x.columns) * x.columns)
        if (up.rows, up.columns) == (like.rows, like.columns):
            return up
        name = f"cut{len(self.nodes)}"
        bounds = [
            self._constant(f"{name}_{key}", np.array(n))
            for key, n in zip("fea", ([0, 0], [like.rows, like.columns], [2, 3]), strict=True)
        ]
        real = self._node("Slice", [self._real(up), *bounds], name)
        return self._quantized(real, replace(up, rows=like.rows, columns=like.columns), same=True)

    # Nodes -------------------------------------------------------------------------------------------------------

    def _biases(self, channels: int) -> NDArray[np.int32]:
        return self.rng.integers(-5000, 5000, channels).astype(np.int32)

    def _value(self, name: str, channels: int, rows: int, columns: int) -> Value:
        """Return a quantised tensor with a scale and zero point, which become constants."""
        scale = 0.05 if self.shared else float(np.float32(self.rng.uniform(0.02, 0.1)))
        zero = self.integer(100, 140) if self.unsigned else self.integer(-20, 20)
        if self.shared:
            zero = 128 if self.unsigned else 3
        value = Value(name, channels, rows, columns, scale, zero)
        dtype = np.uint8 if self.unsigned else np.int8
        self._constant(f"{name}_s", np.float32(scale))
        self._constant(f"{name}_z", dtype(zero))
        return value

    def _quantized(self, real: str, like: Value, same: bool = False) -> Value:
        """Quantise `real`. same: the values are those of `like`, and so are scale and zero point."""
        name = f"{real}_q"
        value = self._value(name, like.channels, like.rows, like.columns)
        if same:
            self.constants[-2:] = []
            value = replace(value, scale=like.scale, zero=like.zero)
            self._constant(f"{name}_s", np.float32(like.scale))
            self._constant(f"{name}_z", np.dtype(np.uint8 if self.unsigned else np.int8).type(like.zero))
        self.nodes.append(helper.make_node("QuantizeLinear", [real, f"{name}_s", f"{name}_z"], [name], name=name))
        return value

    def _real(self, x: Value) -> str:
        """Return the name of x as floats, from a DequantizeLinear of its own."""
        return self._node("DequantizeLinear", [x.name, f"{x.name}_s", f"{x.name}_z"], f"{x.name}_{len(self.nodes)}")

    def _dequantized(self, name: str, array: NDArray[np.int8] | NDArray[np.int32], scale: NDArray[np.float32]) -> str:
        """Return the name of a dequantised constant."""
        arguments = [self._constant(f"{name}_q", array), self._constant(f"{name}_s", scale)]
        return self._node("DequantizeLinear", arguments, name, axis=0)

    def _node(self, op: str, inputs: list[str], output: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def _constant(self, name: str, value: object) -> str:
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def ending(self, *outputs: Value) -> onnx.ModelProto:
        """Return the model with these outputs."""
        dtype = TensorProto.UINT8 if self.unsigned else TensorProto.INT8

        def info(v: Value) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(v.name, dtype, [1, v.channels, v.rows, v.columns])

        graph = helper.make_graph(
            self.nodes, "blocks", [info(x) for x in self.inputs], [info(y) for y in outputs], self.constants
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)


KINDS = ("c2f", "csp", "elan", "dense", "hrnet", "bifpn", "inception", "residual", "sppf", "shuffled")


def random_blocks(seed: int) -> tuple[onnx.ModelProto, list[str]]:
    """Return a model of one or two blocks, and the kinds of these blocks.

    An inner value may be an output, too.
    """
    net = Blocks(seed)
    y, kinds, values = net.inputs[0], list[str](), list[Value]()
    for _ in range(1 if net.likely(0.7) else 2):
        kind = KINDS[net.integer(0, len(KINDS) - 1)]
        kinds.append(kind)
        y = getattr(net, kind)(y)
        values.append(y)
        if y.channels > MAX_CHANNELS:
            y = net.conv(y, kernel=1)
            values.append(y)
    if net.likely(0.5):
        y = net.conv(y)
        values.append(y)
    extra = [values[net.integer(0, len(values) - 2)]] if len(values) > 1 and net.likely(0.3) else []
    return net.ending(y, *extra), kinds
