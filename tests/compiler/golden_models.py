"""Small quantised models for the golden hashes, one for each way in which the compiler lowers operators.

Weights come from a fixed formula, not from a random generator: no version of numpy changes a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import celosia

F32 = np.float32
STEP = 0.05
"""Scale of activations for which a model asks for no other scale."""


@dataclass
class Builder:
    """A model in the making. Each activation is followed by a QuantizeLinear and DequantizeLinear pair.

    unsigned: activations are uint8, not int8.
    """

    unsigned: bool = False
    opset: int = 21
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)

    def input(self, *shape: int | str, quantised: bool = True) -> str:
        """Add a float input and return its name, after the pair if `quantised`."""
        name = f"x{len(self.inputs)}"
        self.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        return self.quantise(name) if quantised else name

    def node(self, op: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: object) -> str:
        """Append a node and return the name of its first output. Output number k > 0 has the same name with `_k`
        appended."""
        name = f"{op}{len(self.nodes)}"
        names = [name, *(f"{name}_{number}" for number in range(1, outputs))]
        self.nodes.append(helper.make_node(op, inputs, names, name=f"n_{name}", domain=domain, **attributes))
        return name

    def constant(self, value: object) -> str:
        """Add a constant and return its name."""
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def numbers(self, *shape: int, low: int = -100, high: int = 100) -> NDArray[np.int64]:
        """Return pseudo-random integers in [low, high); each call returns others."""
        index = np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(7919 * (len(self.constants) + 1))
        mixed = (index * np.uint64(2654435761)) & np.uint64(0xFFFFFFFF)
        mixed = ((mixed ^ (mixed >> np.uint64(15))) * np.uint64(2246822519)) & np.uint64(0xFFFFFFFF)
        return (low + (mixed >> np.uint64(9)).astype(np.int64) % (high - low)).reshape(shape)

    def quantise(self, x: str, step: float = STEP, zero: int = 3) -> str:
        """Append another quantisation of x and return the name of the dequantised result."""
        kind = np.uint8 if self.unsigned else np.int8
        pair = self.constant(F32(step)), self.constant(kind(zero + 128 * self.unsigned))
        return self.node("DequantizeLinear", self.node("QuantizeLinear", x, *pair), *pair)

    def weights(self, *shape: int, axis: int | None = 0, bits: int = 8) -> str:
        """Add constant weights with a scale for each index of `axis`; return the name of their dequantised value."""
        bound = (1 << bits - 1) - 1
        values = self.numbers(*shape, low=-bound, high=bound + 1)
        count = () if axis is None else (shape[axis],)
        scales = (self.numbers(*count, low=20, high=40) / 1000 / bound).astype(F32)
        if bits < 8:
            name = f"c{len(self.constants)}"
            self.constants.append(
                helper.make_tensor(name, {2: TensorProto.INT2, 4: TensorProto.INT4}[bits], shape, values.reshape(-1))
            )
        else:
            name = self.constant(values.astype(np.int8))
        return self.node("DequantizeLinear", name, self.constant(scales), **({} if axis is None else {"axis": axis}))

    def conv(
        self, x: str, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, group: int = 1, dilation: int = 1,
        bias: bool = True, after: str = "", step: float = STEP, bits: int = 8,
    ) -> str:  # fmt: skip
        """Append a convolution that divides the size by its stride.

        after: an activation function; onnxruntime fuses Relu into the convolution.
        """
        arguments = [x, self.weights(outputs, inputs // group, kernel, kernel, bits=bits)]
        if bias:
            values = self.numbers(outputs, low=-900, high=900).astype(np.int32)
            scale = self.nodes[-1].input[1]
            (array,) = (numpy_helper.to_array(tensor) for tensor in self.constants if tensor.name == scale)
            scales = self.constant((array * F32(STEP)).astype(F32))
            arguments.append(self.node("DequantizeLinear", self.constant(values), scales, axis=0))
        pads = [dilation * (kernel - 1) // 2] * 4
        y = self.node(
            "Conv", *arguments, kernel_shape=[kernel] * 2, strides=[stride] * 2, dilations=[dilation] * 2, pads=pads,
            group=group,
        )  # fmt: skip
        if after != "Relu":
            y = self.quantise(y)
        return self.quantise(self.node(after, y), step) if after else y

    def product(self, x: str, rows: int, columns: int, bits: int = 8, step: float = STEP) -> str:
        """Append a matrix product by constant weights."""
        return self.quantise(self.node("MatMul", x, self.weights(rows, columns, axis=1, bits=bits)), step)

    def add(self, a: str, b: str) -> str:
        """Append the sum of two tensors."""
        return self.quantise(self.node("Add", a, b), 0.08)

    def model(self, *outputs: str) -> onnx.ModelProto:
        """Return the model with these outputs."""
        graph = helper.make_graph(
            self.nodes, "golden", self.inputs, [onnx.ValueInfoProto(name=name) for name in outputs], self.constants
        )
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {"resnet8": lambda: onnx.load(celosia.models.demo_model_path())}
"""Functions that build the models, by name."""
CORRECT = "norms", "correct averages"
"""Names of the models that are compiled with rounding="correct"."""


def _model(build: Callable[[Builder], str | tuple[str, ...]]) -> Callable[[Builder], str | tuple[str, ...]]:
    """Register the model that `build` draws under its name, with signed activations.

    Four models are registered a second time, with unsigned activations.
    """

    def make(unsigned: bool = False) -> onnx.ModelProto:
        b = Builder(unsigned)
        outputs = build(b)
        return b.model(*((outputs,) if isinstance(outputs, str) else outputs))

    name = build.__name__.strip("_").replace("_", " ")
    MODELS[name] = make
    if name in ("convolutions", "residual", "pooling", "attention"):
        MODELS[f"{name} unsigned"] = lambda: make(True)
    return build


# Convolutions -------------------------------------------------------------------------------------------------


@_model
def _convolutions(b: Builder) -> str:
    x = b.conv(b.input(1, 3, 14, 14), 3, 10, kernel=5, stride=2, after="Relu")
    return b.conv(b.conv(x, 10, 21), 21, 9, kernel=1, bias=False)


@_model
def _batch_and_dilation(b: Builder) -> str:
    return b.conv(b.conv(b.input(3, 8, 7, 5), 8, 8, dilation=2), 8, 12, stride=2)


@_model
def _several_tiles(b: Builder) -> str:
    """Two layers that fit no scratchpad as a whole."""
    return b.conv(b.conv(b.input(1, 24, 20, 20), 24, 48, after="Relu"), 48, 40, stride=2)


@_model
def _depthwise(b: Builder) -> str:
    x = b.conv(b.input(1, 12, 9, 9), 12, 12, group=12, after="Relu")
    return b.conv(x, 12, 12, kernel=5, stride=2, group=12)


@_model
def _inverted_residual(b: Builder) -> str:
    x = b.input(1, 8, 8, 8)
    wide = b.conv(b.conv(x, 8, 32, kernel=1, after="Relu"), 32, 32, group=32, after="Relu")
    return b.add(x, b.conv(wide, 32, 8, kernel=1))


@_model
def _grouped(b: Builder) -> str:
    return b.conv(b.input(1, 12, 6, 6), 12, 24, group=3)


@_model
def _residual(b: Builder) -> str:
    x = b.conv(b.input(1, 6, 8, 8), 6, 16, after="Relu")
    y = b.quantise(b.node("Relu", b.add(x, b.conv(x, 16, 16))), 0.08)
    return b.add(b.conv(y, 16, 16, stride=2), b.conv(y, 16, 16, kernel=1, stride=2))


@_model
def _transposed(b: Builder) -> str:
    x = b.input(1, 8, 5, 5)
    y = b.node("ConvTranspose", x, b.weights(8, 6, 4, 4, axis=None), strides=[2, 2], pads=[1, 1, 1, 1])
    return b.quantise(y)


@_model
def _sequence(b: Builder) -> str:
    y = b.node("Conv", b.input(1, 6, 40), b.weights(10, 6, 5), strides=[2], pads=[2, 2])
    return b.quantise(b.node("Relu", y))


@_model
def _integer_operators(b: Builder) -> str:
    """Operators in QLinear form, as older exporters write them."""
    b.inputs.append(helper.make_tensor_value_info("bytes", TensorProto.INT8, (1, 8, 6, 6)))
    scale, zero = b.constant(F32(0.04)), b.constant(np.int8(5))
    w, w_zero = b.constant(b.numbers(8, 8, 3, 3).astype(np.int8)), b.constant(np.int8(0))
    w_scale, bias = b.constant(F32(0.002)), b.constant(b.numbers(8, low=-900, high=900).astype(np.int32))
    y = b.node("QLinearConv", "bytes", scale, zero, w, w_scale, w_zero, scale, zero, bias, pads=[1] * 4)
    total = b.node("QLinearAdd", y, scale, zero, "bytes", scale, zero, scale, zero, domain="com.microsoft")
    return b.node("QLinearSigmoid", total, scale, zero, scale, zero, domain="com.microsoft")


# Windows, movement, branches ----------------------------------------------------------------------------------


@_model
def _pooling(b: Builder) -> str:
    x = b.conv(b.input(1, 4, 12, 12), 4, 8, after="Relu")
    x = b.node("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    x = b.quantise(b.node("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2]))
    return b.product(b.quantise(b.node("Flatten", b.node("GlobalAveragePool", x))), 8, 10)


@_model
def _correct_averages(b: Builder) -> str:
    x = b.node("AveragePool", b.input(1, 8, 9, 9), kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    return b.quantise(b.node("GlobalAveragePool", b.quantise(x)))


@_model
def _maps_on_the_pixels(b: Builder) -> str:
    """Activation functions as tables, and a product by a gate of one pixel."""
    x = b.conv(b.input(1, 8, 6, 6), 8, 8)
    for op in ("Sigmoid", "HardSwish", "LeakyRelu"):
        x = b.conv(x, 8, 8, kernel=1, after=op)
    gate = b.conv(b.quantise(b.node("GlobalAveragePool", x)), 8, 8, kernel=1, after="HardSigmoid", step=1 / 256)
    return b.quantise(b.node("Mul", x, gate))


@_model
def _branches(b: Builder) -> str:
    """Parts of the channels, some of them convolved, concatenated again."""
    x = b.conv(b.input(1, 8, 8, 8), 8, 24, kernel=1, after="Relu")
    left = b.node("Split", x, b.constant(np.array([8, 16])), outputs=2, axis=1)
    y = b.conv(left, 8, 8, after="Relu")
    z = b.add(left, b.conv(y, 8, 8))
    return b.conv(b.quantise(b.node("Concat", f"{left}_1", y, z, axis=1)), 32, 12, kernel=1)


@_model
def _pyramid(b: Builder) -> str:
    x = b.conv(b.input(1, 8, 8, 8), 8, 8)
    y = b.conv(x, 8, 8, stride=2)
    scales = b.constant(np.array([1, 1, 2, 2], F32))
    up = b.node(
        "Resize", y, "", scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"
    )
    return b.conv(b.quantise(b.node("Concat", up, x, axis=1)), 16, 8)


@_model
def _pooled_pyramid(b: Builder) -> str:
    x = b.conv(b.input(1, 8, 8, 8), 8, 8, kernel=1, after="Relu")
    pools = [x]
    for _ in range(2):
        pools.append(b.node("MaxPool", pools[-1], kernel_shape=[5, 5], pads=[2] * 4))
    return b.conv(b.quantise(b.node("Concat", *pools, axis=1)), 24, 10, kernel=1)


@_model
def _shuffled_channels(b: Builder) -> str:
    x = b.conv(b.input(1, 8, 6, 6), 8, 16, group=2, kernel=1)
    y = b.node("Transpose", b.node("Reshape", x, b.constant(np.array([1, 2, 8, 6, 6]))), perm=[0, 2, 1, 3, 4])
    return b.conv(b.node("Reshape", y, b.constant(np.array([1, 16, 6, 6]))), 16, 16, group=16)


@_model
def _space_to_depth(b: Builder) -> str:
    x = b.conv(b.node("SpaceToDepth", b.input(1, 3, 12, 12), blocksize=2), 12, 16)
    return b.node("DepthToSpace", b.conv(x, 16, 8), blocksize=2)


# Matrix products and rows -------------------------------------------------------------------------------------


@_model
def _perceptron(b: Builder) -> str:
    x = b.product(b.input(20, 33), 33, 40)
    return b.product(b.quantise(b.node("Relu", x)), 40, 10)


@_model
def _general_product(b: Builder) -> str:
    bias = b.constant((b.numbers(11) / 50).astype(F32))
    return b.quantise(b.node("Gemm", b.input(5, 24), b.weights(11, 24), bias, transB=1))


@_model
def _four_bits(b: Builder) -> str:
    return b.product(b.conv(b.input(1, 16, 4, 8), 16, 16, bits=4), 8, 24, bits=4)


@_model
def _two_bits(b: Builder) -> str:
    b.opset = 25
    return b.product(b.input(17, 32), 32, 24, bits=2)


def _attend(b: Builder, tokens: int, inner: int) -> str:
    """Append an encoder's attention with two heads of `inner` channels."""
    x, wide = b.input(1, tokens, 2 * inner), 2 * inner

    def heads(*perm: int) -> str:
        parts = b.node("Reshape", b.product(x, wide, wide), b.constant(np.array([1, tokens, 2, inner])))
        return b.node("Transpose", parts, perm=perm)

    scores = b.quantise(b.node("MatMul", heads(0, 2, 1, 3), heads(0, 2, 3, 1)))
    scores = b.quantise(b.node("Div", scores, b.constant(F32(inner**0.5))))
    shares = b.quantise(b.node("Softmax", scores, axis=-1), 1 / 256, zero=-128)
    mixed = b.node("Transpose", b.quantise(b.node("MatMul", shares, heads(0, 2, 1, 3))), perm=[0, 2, 1, 3])
    return b.add(x, b.product(b.node("Reshape", mixed, b.constant(np.array([1, tokens, wide]))), wide, wide))


@_model
def _attention(b: Builder) -> str:
    return _attend(b, 16, 16)


@_model
def _ragged_attention(b: Builder) -> str:
    return _attend(b, 7, 6)


@_model
def _softmax(b: Builder) -> str:
    return b.quantise(b.node("Softmax", b.product(b.input(1, 6, 16), 16, 21), axis=-1), 1 / 256, zero=-128)


def _normalised(b: Builder, x: str, size: int) -> str:
    """Append a LayerNormalization of rows of `size` elements."""
    scale = (b.numbers(size, low=20) / 60).astype(F32)
    bias = (b.numbers(size) / 60).astype(F32)
    return b.quantise(b.node("LayerNormalization", x, b.constant(scale), b.constant(bias), axis=-1, epsilon=1e-5))


@_model
def _norms(b: Builder) -> str:
    x = _normalised(b, b.input(1, 7, 20), 20)
    return _normalised(b, b.add(x, b.product(x, 20, 20)), 20)


@_model
def _product_of_activations(b: Builder) -> str:
    return b.quantise(b.node("MatMul", b.input(1, 2, 8, 12), b.input(1, 2, 12, 9)), 0.4)


# Operators on the CPU -----------------------------------------------------------------------------------------


@_model
def _float_islands(b: Builder) -> str:
    """Float operators between quantised ones."""
    x = b.conv(b.input(1, 4, 6, 6), 4, 8)
    x = b.node("Sqrt", b.node("Abs", b.node("Add", x, b.constant(F32(0.25)))))
    x = b.node("Sub", x, b.node("ReduceMean", x, b.constant(np.array([2, 3])), keepdims=1))
    return b.conv(b.quantise(x), 8, 4)


@_model
def _floats(b: Builder) -> str:
    x = b.input(1, 4, 10, 10, quantised=False)
    w, v = ((b.numbers(*shape) / 300).astype(F32) for shape in ((8, 4, 3, 3), (8, 6)))
    x = b.node("Relu", b.node("Conv", x, b.constant(w), pads=[1] * 4))
    x = b.node("Flatten", b.node("GlobalAveragePool", x))
    return b.node("Softmax", b.node("Gelu", b.node("MatMul", x, b.constant(v))))


@_model
def _float_norms(b: Builder) -> str:
    x = b.input(2, 6, 16, quantised=False)
    for op, numbers in (("LayerNormalization", 2), ("InstanceNormalization", 2)):
        size = 16 if op[0] == "L" else 6
        x = b.node(op, x, *(b.constant((b.numbers(size) / 90).astype(F32)) for _ in range(numbers)))
    return b.node("ReduceMax", b.node("CumSum", x, b.constant(np.int64(2))), b.constant(np.array([1])))


@_model
def _dynamic_quantisation(b: Builder) -> str:
    x = b.input(4, 24, quantised=False)
    y = b.node("DynamicQuantizeLinear", x, outputs=3)
    w, zero = b.constant(b.numbers(24, 12).astype(np.int8)), b.constant(np.int8(0))
    total = b.node("Cast", b.node("MatMulInteger", y, w, f"{y}_2", zero), to=TensorProto.FLOAT)
    return b.node("Mul", total, b.node("Mul", f"{y}_1", b.constant(F32(0.01))))


@_model
def _movement(b: Builder) -> tuple[str, ...]:
    """Operators that move elements, some of them on the host."""
    x = b.input(2, 5, 6, quantised=False)
    y = b.node("Gather", x, b.constant(np.array([3, 0, 4])), axis=1)
    z = b.node("Pad", y, b.constant(np.array([0, 1, 0, 0, 0, 2])), mode="reflect")
    top = b.node("TopK", z, b.constant(np.array([2])), outputs=2, axis=-1)
    return b.node("Tile", top, b.constant(np.array([1, 2, 1]))), f"{top}_1", b.node("NonZero", y)
