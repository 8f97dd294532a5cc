"""The kernels whose speed is measured: each a small model, mostly of one operator, with its inputs."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array = NDArray[Any]


@dataclass(frozen=True)
class TimedKernel:
    """tolerance: largest difference from onnxruntime, relative to its largest value; 0 for results that are exact."""

    name: str
    model: onnx.ModelProto
    feed: dict[str, Array]
    tolerance: float


class _Writer:
    """Writes one model. Arrays given as inputs are fed at each run, those given as constants are initialisers."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.feed: dict[str, Array] = {}

    def floats(self, *shape: int) -> Array:
        return self.rng.standard_normal(shape, np.float32)

    def bytes(self, *shape: int, dtype: type = np.int8) -> Array:
        info = np.iinfo(dtype)
        return self.rng.integers(info.min, info.max, shape, dtype, endpoint=True)

    def input(self, array: Array) -> str:
        name = f"x{len(self.feed)}"
        self.feed[name] = array
        return name

    def constant(self, value: Any, dtype: Any = None) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def node(self, op: str, *inputs: str, more: tuple[str, ...] = (), **attributes: Any) -> str:
        """The name of its first output; `more` are those of others."""
        self.nodes.append(helper.make_node(op, inputs, [f"t{len(self.nodes)}", *more], **attributes))
        return str(self.nodes[-1].output[0])

    def model(self) -> onnx.ModelProto:
        """Its outputs are those of the last node."""
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in self.feed.items()
        ]
        outputs = [onnx.ValueInfoProto(name=name) for name in self.nodes[-1].output]
        graph = helper.make_graph(self.nodes, "kernel", inputs, outputs, self.constants)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return onnx.shape_inference.infer_shapes(made, strict_mode=True)


def cases(chosen: tuple[str, ...] = ()) -> Iterator[TimedKernel]:
    """All kernels, or those `chosen`, in the order of KERNELS."""
    for name, (tolerance, write) in KERNELS.items():
        if not chosen or name in chosen:
            w = _Writer()
            write(w)
            yield TimedKernel(name, w.model(), w.feed, tolerance)


FLOAT = 1e-4


def _matmul(*a: int, b: tuple[int, ...], fed: bool = False) -> Any:
    """A product with a constant, or with an array that is fed."""

    def write(w: _Writer) -> str:
        x, y = w.input(w.floats(*a)), w.floats(*b)
        return w.node("MatMul", x, w.input(y) if fed else w.constant(y))

    return FLOAT, write


def _conv(channels: int, size: int, out: int, kernel: int, group: int = 1, **attributes: Any) -> Any:
    def write(w: _Writer) -> str:
        weights, bias = w.floats(out, channels // group, kernel, kernel), w.floats(out)
        x = w.input(w.floats(1, channels, size, size))
        pads = [kernel // 2] * 4
        return w.node("Conv", x, w.constant(weights), w.constant(bias), pads=pads, group=group, **attributes)

    return FLOAT, write


def _transposed(channels: int, size: int, kernel: int, **attributes: Any) -> Any:
    def write(w: _Writer) -> str:
        weights, bias = w.floats(channels, channels, kernel, kernel), w.floats(channels)
        x = w.input(w.floats(1, channels, size, size))
        return w.node("ConvTranspose", x, w.constant(weights), w.constant(bias), **attributes)

    return FLOAT, write


def _op(op: str, *shapes: Sequence[int], tolerance: float = FLOAT, dtype: str = "float32", **attributes: Any) -> Any:
    """One operator on normal random arrays."""

    def write(w: _Writer) -> str:
        return w.node(op, *(w.input(w.floats(*shape).astype(dtype)) for shape in shapes), **attributes)

    return tolerance, write


def _with(op: str, shape: tuple[int, ...], *constants: Any, tolerance: float = FLOAT, **attributes: Any) -> Any:
    """One operator on a normal random array and constants; "" for an optional input left out."""

    def write(w: _Writer) -> str:
        rest = ["" if isinstance(value, str) else w.constant(value) for value in constants]
        return w.node(op, w.input(w.floats(*shape)), *rest, **attributes)

    return tolerance, write


def _gelu(w: _Writer) -> str:
    """As PyTorch exports it."""
    x = w.input(w.floats(128, 3072))
    half = w.node("Mul", x, w.constant(0.5, np.float32))
    erf = w.node("Erf", w.node("Div", x, w.constant(np.sqrt(2), np.float32)))
    return w.node("Mul", half, w.node("Add", erf, w.constant(1, np.float32)))


def _layernorm(rows: int, columns: int) -> Any:
    def write(w: _Writer) -> str:
        x, scale, bias = w.floats(rows, columns), w.floats(columns), w.floats(columns)
        return w.node("LayerNormalization", w.input(x), w.constant(scale), w.constant(bias))

    return FLOAT, write


def _gather(w: _Writer) -> str:
    return w.node("Gather", w.constant(w.floats(8192, 384)), w.input(w.rng.integers(0, 8192, (1, 512))))


def _where(w: _Writer) -> str:
    x, y = w.floats(1, 64, 56, 56), w.floats(1, 64, 56, 56)
    return w.node("Where", w.input(x > 0), w.input(x), w.input(y))


def _top(w: _Writer) -> str:
    return w.node("TopK", w.input(w.floats(64, 1000)), w.constant([5], np.int64), more=("places",))


def _quantised_conv(channels: int, size: int, out: int, kernel: int, group: int = 1, dtype: type = np.int8) -> Any:
    def write(w: _Writer) -> str:
        x = w.bytes(1, channels, size, size, dtype=dtype)
        weights = w.bytes(out, channels // group, kernel, kernel)
        scales = w.rng.uniform(0.005, 0.01, out)
        bias = w.rng.integers(-5000, 5000, out)
        return w.node(
            "QLinearConv", w.input(x), w.constant(0.02, np.float32), w.constant(3, dtype), w.constant(weights),
            w.constant(scales, np.float32), w.constant(np.zeros(out), np.int8), w.constant(0.7, np.float32),
            w.constant(5, dtype), w.constant(bias, np.int32), pads=[kernel // 2] * 4, group=group,
        )  # fmt: skip

    return 0.0, write


def _quantised_matmul(rows: int, depth: int, columns: int) -> Any:
    def write(w: _Writer) -> str:
        return w.node(
            "QLinearMatMul", w.input(w.bytes(rows, depth)), w.constant(0.02, np.float32), w.constant(3, np.int8),
            w.constant(w.bytes(depth, columns)), w.constant(0.005, np.float32), w.constant(0, np.int8),
            w.constant(0.5, np.float32), w.constant(-5, np.int8),
        )  # fmt: skip

    return 0.0, write


def _matmul_integer(rows: int, depth: int, columns: int) -> Any:
    def write(w: _Writer) -> str:
        x, y = w.bytes(rows, depth, dtype=np.uint8), w.bytes(depth, columns)
        return w.node("MatMulInteger", w.input(x), w.constant(y))

    return 0.0, write


def _dequantize(w: _Writer) -> str:
    x = w.input(w.bytes(1, 64, 56, 56))
    return w.node("DequantizeLinear", x, w.constant(0.02, np.float32), w.constant(3, np.int8))


def _recurrent(op: str, gates: int, hidden: int, batch: int = 1, directions: int = 1, **attributes: Any) -> Any:
    """64 steps; weights as PyTorch begins with."""

    def write(w: _Writer) -> str:
        bound = hidden**-0.5
        shapes = ((gates * hidden, hidden), (gates * hidden, hidden), (2 * gates * hidden,))
        weights = [w.rng.uniform(-bound, bound, (directions, *shape)).astype(np.float32) for shape in shapes]
        x = w.input(w.floats(64, batch, hidden))
        return w.node(op, x, *map(w.constant, weights), hidden_size=hidden, more=("last",), **attributes)

    return FLOAT, write


IMAGE = (1, 64, 56, 56)
"""A feature map of 800 kB."""

TYPICAL: dict[str, Any] = {
    "gemm_64": _matmul(64, 64, b=(64, 64)),
    "gemm_384x384x1536": _matmul(384, 384, b=(384, 1536)),
    "gemm_1024": _matmul(1024, 1024, b=(1024, 1024)),
    "gemv_1024": _matmul(1, 1024, b=(1024, 1024)),
    "matmul_batched": _matmul(12, 128, 64, b=(12, 64, 128), fed=True),
    "conv_1x1": _conv(64, 56, 64, 1),
    "conv_3x3": _conv(64, 56, 64, 3),
    "conv_3x3_stride2": _conv(64, 56, 128, 3, strides=[2, 2]),
    "conv_7x7_first": _conv(3, 224, 64, 7, strides=[2, 2]),
    "conv_3x3_small_image": _conv(512, 7, 512, 3),
    "conv_depthwise": _conv(144, 56, 144, 3, group=144),
    "conv_depthwise_5x5": _conv(240, 28, 240, 5, group=240),
    "conv_transpose_2x2": _transposed(64, 20, 2, strides=[2, 2]),
    "conv_transpose_4x4": _transposed(64, 20, 4, strides=[2, 2], pads=[1, 1, 1, 1]),
    "max_pool": _op("MaxPool", (1, 64, 112, 112), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    "average_pool": _op("AveragePool", IMAGE, kernel_shape=[3, 3], strides=[1, 1], pads=[1, 1, 1, 1]),
    "global_average_pool": _op("GlobalAveragePool", (1, 512, 14, 14)),
    "softmax_narrow": _op("Softmax", (12, 128, 128), axis=-1),
    "softmax_wide": _op("Softmax", (16, 8192), axis=-1),
    "layer_norm": _layernorm(128, 768),
    "gelu": (FLOAT, _gelu),
    "sigmoid": _op("Sigmoid", IMAGE),
    "tanh": _op("Tanh", IMAGE),
    "exp": _op("Exp", IMAGE),
    "reduce_mean_last": _op("ReduceMean", (128, 768), axes=[-1]),
    "reduce_max_last": _op("ReduceMax", (128, 768), axes=[-1], tolerance=0.0),
    "reduce_sum_first": _with("ReduceSum", (768, 512), np.array([0]), keepdims=0),
    "reduce_max_first": _op("ReduceMax", (768, 512), axes=[0], tolerance=0.0),
    "transpose_2d": _op("Transpose", (768, 1024), perm=[1, 0], tolerance=0.0),
    "transpose_nchw_nhwc": _op("Transpose", IMAGE, perm=[0, 2, 3, 1], tolerance=0.0),
    "transpose_0213": _op("Transpose", (1, 128, 12, 64), perm=[0, 2, 1, 3], tolerance=0.0),
    "resize_nearest": _with(
        "Resize", (1, 64, 28, 28), "", np.array([1, 1, 2, 2], np.float32), mode="nearest", nearest_mode="floor",
        coordinate_transformation_mode="asymmetric", tolerance=0.0,
    ),
    "resize_bilinear": _with(
        "Resize", (1, 64, 28, 28), "", np.array([1, 1, 2, 2], np.float32), mode="linear",
        coordinate_transformation_mode="half_pixel",
    ),
    "gather_rows": (0.0, _gather),
    "concat_channels": _op("Concat", (1, 64, 28, 28), (1, 64, 28, 28), axis=1, tolerance=0.0),
    "slice": _with("Slice", IMAGE, np.array([4, 4]), np.array([52, 52]), np.array([2, 3]), tolerance=0.0),
    "pad": _with("Pad", IMAGE, np.array([0, 0, 1, 1, 0, 0, 1, 1]), tolerance=0.0),
    "add": _op("Add", IMAGE, IMAGE),
    "add_bias": _op("Add", (128, 3072), (3072,)),
    "add_channels": _op("Add", IMAGE, (64, 1, 1)),
    "where": (0.0, _where),
    "cast_float_int": _op("Cast", IMAGE, to=TensorProto.INT32, tolerance=0.0),
    "cast_float_half": _op("Cast", IMAGE, to=TensorProto.FLOAT16, tolerance=0.0),
    "cumsum": _with("CumSum", (128, 768), np.array(1)),
    "argmax": _op("ArgMax", (128, 1000), axis=-1, tolerance=0.0),
    "topk": (0.0, _top),
    "quantised_conv_1x1": _quantised_conv(64, 56, 64, 1),
    "quantised_conv_3x3": _quantised_conv(64, 28, 64, 3),
    "quantised_conv_depthwise": _quantised_conv(144, 56, 144, 3, group=144),
    "quantised_conv_uint8": _quantised_conv(64, 28, 64, 3, dtype=np.uint8),
    "quantised_matmul": _quantised_matmul(128, 384, 1536),
    "matmul_integer": _matmul_integer(128, 384, 1536),
    "quantize": _with("QuantizeLinear", IMAGE, np.float32(0.02), np.int8(3), tolerance=0.0),
    "dequantize": (FLOAT, _dequantize),
    "lstm_128": _recurrent("LSTM", 4, 128),
    "lstm_128_both_ways": _recurrent("LSTM", 4, 128, directions=2, direction="bidirectional"),
    "lstm_256_batch_8": _recurrent("LSTM", 4, 256, batch=8),
    "gru_128": _recurrent("GRU", 3, 128, linear_before_reset=1),
    "gru_128_both_ways": _recurrent("GRU", 3, 128, directions=2, direction="bidirectional"),
    "half_add": _op("Add", IMAGE, IMAGE, dtype="float16", tolerance=1e-3),
    "half_mul": _op("Mul", IMAGE, IMAGE, dtype="float16", tolerance=1e-3),
}  # fmt: skip
"""Of each kind."""


SIZES = tomllib.loads(Path(__file__).with_name("kernel_sizes.toml").read_text(encoding="utf-8"))


def _sized() -> Iterator[tuple[str, Any]]:
    """Kernels of every row of kernel_sizes.toml."""

    def named(kind: str, *numbers: Any) -> str:
        return "_".join([kind.lower(), *("x".join(map(str, each)) if isinstance(each, list) else str(each)
                                         for each in numbers)])  # fmt: skip

    for channels, size, out, kernel, stride, group in SIZES["convolutions"]:
        name = named("conv", channels, size, out, kernel, stride, group)
        yield name, _conv(channels, size, out, kernel, group, strides=[stride] * 2)
    for channels, size, out, kernel, group, dtype in SIZES["quantised"]:
        name = named("quantised_conv", channels, size, out, kernel, group, dtype)
        yield name, _quantised_conv(channels, size, out, kernel, group, np.dtype(dtype).type)
    for rows, depth, columns in SIZES["products"]:
        yield named("gemm", [rows, depth, columns]), _matmul(rows, depth, b=(depth, columns))
    for sizes in SIZES["bytes"]:
        yield named("quantised_matmul", sizes), _quantised_matmul(*sizes)
        yield named("matmul_integer", sizes), _matmul_integer(*sizes)
    for heads, rows, depth, columns in SIZES["batched"]:
        name = named("matmul_fed", [heads, rows, depth, columns])
        yield name, _matmul(heads, rows, depth, b=(heads, depth, columns), fed=True)
    for shape in SIZES["softmax"]:
        yield named("softmax", shape), _op("Softmax", shape, axis=-1)
    for shape in SIZES["normalised"]:
        yield named("layer_norm", shape), _layernorm(*shape)
    for op, shapes in SIZES["elementwise"]:
        yield named(op, *shapes), _op(op, *shapes)
    for op, channels, size, kernel, stride in SIZES["pools"]:
        shape = [1, channels, size, size]
        yield named(op, shape, kernel, stride), _op(op, shape, kernel_shape=[kernel] * 2, strides=[stride] * 2)
    for channels, size in SIZES["means"]:
        yield named("mean", channels, size), _op("GlobalAveragePool", (1, channels, size, size))
    for shape, order in SIZES["transposed"]:
        yield named("transpose", shape, order), _op("Transpose", shape, perm=order, tolerance=0.0)


KERNELS: dict[str, Any] = {**TYPICAL, **dict(_sized())}
"""Name -> (tolerance, what writes the model): all that are timed."""
