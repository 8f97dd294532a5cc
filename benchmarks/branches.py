"""Networks with branches, as float models with random weights: what the superoptimiser is measured on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Shape = tuple[int, ...]


@dataclass
class Branchy:
    """A model in the making, of the input x. shape: of x, float32."""

    shape: Shape
    seed: int = 0
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.shapes: dict[str, Shape] = {"x": self.shape}

    def op(self, kind: str, *inputs: str, **given: Any) -> str:
        """A node; its result."""
        name = f"t{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(kind, list(inputs), [name], name=f"{kind.lower()}{len(self.nodes)}", **given)
        )
        return name

    def constant(self, values: Any, dtype: Any = np.float32) -> str:
        """A constant."""
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def conv(
        self, x: str, inputs: int, outputs: int, kernel: int | tuple[int, int] = 1, stride: int = 1, group: int = 1,
        relu: bool = True, pad: int | None = None, dilation: int = 1,
    ) -> str:  # fmt: skip
        """A convolution with a bias, and Relu behind it; padded by half of its kernel."""
        sizes = (kernel, kernel) if isinstance(kernel, int) else kernel
        fan = inputs // group * sizes[0] * sizes[1]
        w = self.random.normal(size=(outputs, inputs // group, *sizes)) / np.sqrt(fan)
        b = self.random.normal(size=outputs) * 0.1
        pads = [size // 2 if pad is None else pad for size in sizes] * 2
        y = self.op("Conv", x, self.constant(w), self.constant(b), pads=pads, strides=[stride] * 2, group=group,
                    dilations=[dilation] * 2)  # fmt: skip
        return self.op("Relu", y) if relu else y

    def pool(self, x: str, kernel: int = 3, stride: int = 1, kind: str = "MaxPool", pad: int | None = None) -> str:
        """MaxPool or another, padded by half of an odd kernel. Averages count the padding, as PyTorch's do."""
        pad = (kernel // 2) * (kernel % 2) if pad is None else pad
        counted = {} if kind == "MaxPool" else {"count_include_pad": 1}
        return self.op(kind, x, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4, **counted)

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        """A product with a constant."""
        return self.op("MatMul", x, self.constant(self.random.normal(size=(inputs, outputs)) / np.sqrt(inputs)))

    def model(self, *outputs: str) -> onnx.ModelProto:
        """The model that returns these."""
        given = helper.make_tensor_value_info("x", TensorProto.FLOAT, self.shape)
        made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "branches", [given], made, self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return onnx.shape_inference.infer_shapes(model)


def four_branches() -> onnx.ModelProto:
    """Four 1x1 convolutions 64 -> 8 of one input, returned side by side."""
    m = Branchy((1, 64, 16, 16))
    return m.model(*(m.conv("x", 64, 8) for _ in range(4)))


def inception() -> onnx.ModelProto:
    """A block of four branches behind a convolution: 1x1; 1x1, 3x3; 1x1, 5x5; MaxPool, 1x1."""
    m = Branchy((1, 64, 28, 28))
    x = m.conv("x", 64, 192)
    one = m.conv(x, 192, 64)
    three = m.conv(m.conv(x, 192, 96), 96, 128, 3)
    five = m.conv(m.conv(x, 192, 16), 16, 32, 5)
    pooled = m.conv(m.pool(x), 192, 32)
    return m.model(m.conv(m.op("Concat", one, three, five, pooled, axis=1), 256, 64))


def inception_narrow() -> onnx.ModelProto:
    """A block of Inception v3's kind on few pixels, whose branches begin with small convolutions."""
    m = Branchy((1, 128, 17, 17))
    x = m.conv("x", 128, 128)
    one = m.conv(x, 128, 48)
    two = m.conv(m.conv(x, 128, 24), 24, 48, 3)
    three = m.conv(m.conv(m.conv(x, 128, 24), 24, 32, 3), 32, 48, 3)
    pooled = m.conv(m.pool(x), 128, 16)
    return m.model(m.conv(m.op("Concat", one, two, three, pooled, axis=1), 160, 64))


def u_net() -> onnx.ModelProto:
    """Two levels down and up, with both heads of a segmenter."""
    m = Branchy((1, 16, 32, 32))
    a = m.conv(m.conv("x", 16, 16, 3), 16, 16, 3)
    b = m.conv(m.conv(m.pool(a, 2, 2), 16, 32, 3), 32, 32, 3)
    c = m.conv(m.conv(m.pool(b, 2, 2), 32, 64, 3), 64, 64, 3)

    def up(t: str) -> str:
        return m.op(
            "Resize", t, "", m.constant([1, 1, 2, 2]), mode="nearest", nearest_mode="floor",
            coordinate_transformation_mode="asymmetric",
        )  # fmt: skip

    d = m.conv(m.op("Concat", up(c), b, axis=1), 96, 32, 3)
    e = m.conv(m.op("Concat", up(d), a, axis=1), 48, 16, 3)
    return m.model(m.conv(e, 16, 4, relu=False), m.conv(e, 16, 2, relu=False), m.conv(e, 16, 1, relu=False))


def resnext() -> onnx.ModelProto:
    """Two blocks of ResNeXt's kind: 1x1, 3x3 in groups of four channels, 1x1, and the sum."""
    m = Branchy((1, 128, 14, 14))
    x = m.conv("x", 128, 128)
    for _ in range(2):
        y = m.conv(m.conv(m.conv(x, 128, 64), 64, 64, 3, group=16), 64, 128, relu=False)
        x = m.op("Relu", m.op("Add", x, y))
    return m.model(x)


def split_attention() -> onnx.ModelProto:
    """Attention's separate products Q, K and V of one input, four heads of 32."""
    m = Branchy((1, 64, 128))
    x = m.linear("x", 128, 128)
    return m.model(*(m.linear(x, 128, 128) for _ in range(3)))


def detector() -> onnx.ModelProto:
    """Heads of a detector at two scales: classes, boxes and centres by 3x3 convolutions of one map each."""
    m = Branchy((1, 32, 20, 20))
    x = m.conv("x", 32, 64, 3)
    heads = []
    for _ in range(2):
        heads += [m.conv(x, 64, outputs, 3, relu=False) for outputs in (20, 4, 1)]
        x = m.conv(x, 64, 64, 3, stride=2)
    return m.model(*heads)


def super_resolution() -> onnx.ModelProto:
    """Five convolutions and DepthToSpace."""
    m = Branchy((1, 3, 32, 32))
    x = m.conv(m.conv(m.conv("x", 3, 32, 5), 32, 32, 3), 32, 12, 3, relu=False)
    return m.model(m.op("DepthToSpace", x, blocksize=2, mode="CRD"))


def separable_cell() -> onnx.ModelProto:
    """A cell of NASNet's kind: two inputs of 1x1 convolutions, depthwise branches, sums in pairs, put together."""
    m = Branchy((1, 64, 14, 14))
    x = m.conv("x", 64, 64)
    a, b = m.conv(x, 64, 32), m.conv(x, 64, 32)

    def deep(t: str, kernel: int) -> str:
        return m.conv(m.conv(t, 32, 32, kernel, group=32), 32, 32, relu=False)

    sums = [m.op("Add", deep(a, 3), deep(b, 5)), m.op("Add", deep(a, 5), m.pool(b)), m.op("Add", deep(b, 3), a)]
    return m.model(m.conv(m.op("Concat", *sums, axis=1), 96, 64))


def training_form() -> onnx.ModelProto:
    """Three blocks of RepVGG's kind as they are trained: 3x3, 1x1 and their input, each normalised, added up."""
    m, x = Branchy((1, 64, 28, 28)), "x"

    def normalised(t: str) -> str:
        rows = [m.constant(m.random.uniform(0.5, 1.5, 64)) for _ in range(4)]
        return m.op("BatchNormalization", t, *rows)

    for _ in range(3):
        both = [normalised(m.conv(x, 64, 64, kernel, relu=False)) for kernel in (3, 1)]
        x = m.op("Relu", m.op("Add", m.op("Add", *both), normalised(x)))
    return m.model(x)


def convolutions_in_pairs() -> onnx.ModelProto:
    """A super-resolution whose convolutions come in pairs without a function between: 5x5 and 1x1, 3x3 and 1x1."""
    m = Branchy((1, 3, 64, 64))
    x = m.conv(m.conv("x", 3, 64, 5, relu=False), 64, 16)
    x = m.conv(m.conv(x, 16, 32, 3, relu=False), 32, 12, relu=False)
    return m.model(m.op("DepthToSpace", x, blocksize=2, mode="CRD"))


LINEAR: dict[str, Callable[[], onnx.ModelProto]] = {
    "training_form": training_form,
    "convolutions_in_pairs": convolutions_in_pairs,
}
"""Networks of which fast-math may make fewer operators; their outputs are no other functions of real numbers then."""
BRANCHES: dict[str, Callable[[], onnx.ModelProto]] = {
    "four_branches": four_branches,
    "inception": inception,
    "inception_narrow": inception_narrow,
    "u_net": u_net,
    "resnext": resnext,
    "split_attention": split_attention,
    "detector": detector,
    "super_resolution": super_resolution,
    "separable_cell": separable_cell,
}


def with_shared_scales(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model`, changed: the parts of each Concat have the scale of its result, as PyTorch's quantisers have it."""
    makers = {name: node for node in model.graph.node for name in node.output}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    for node in reversed(model.graph.node):  # those inside of others behind these
        if node.op_type == "Concat" and readers[node.output[0]][0].op_type == "QuantizeLinear":
            scale = readers[node.output[0]][0].input[1:]
            for part in (makers[name] for name in node.input):
                for each in (makers[part.input[0]], *readers[part.input[0]]):
                    each.input[1:] = scale
    _with_their_biases(model, makers)
    return model


def _with_their_biases(model: onnx.ModelProto, makers: dict[str, onnx.NodeProto]) -> None:
    """Biases in the steps of the products that they are added to: of what is read with another scale now, too."""
    arrays = {each.name: each for each in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type != "Conv" or any(makers[name].op_type != "DequantizeLinear" for name in node.input):
            continue
        x, w, b = (makers[name].input for name in node.input)
        sx, sw, sb, values = (numpy_helper.to_array(arrays[name]) for name in (x[1], w[1], b[1], b[0]))
        steps = np.asarray(sx * sw, np.float32)
        if not np.array_equal(steps, sb):
            moved = np.round(values * (sb.astype(np.float64) / steps)).astype(np.int32)
            arrays[b[0]].CopyFrom(numpy_helper.from_array(moved, b[0]))
            arrays[b[1]].CopyFrom(numpy_helper.from_array(steps, b[1]))
