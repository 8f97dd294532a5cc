"""Build small quantised models operator by operator, in both ONNX forms, and random models for hypothesis.

b = Builder("qdq", np.int8, seed=1)
x = b.input([1, 6, 8, 8])
b.output(b.conv(x, 10, (3, 3), pads=(1, 1, 1, 1)))
b.model()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import onnx
from hypothesis import assume
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

MS = "com.microsoft"
T = TypeVar("T")
HOSTILE = (
    ".shape", "_zero", "_table", "_weights", "_bias", "_int32", ".0", "@xy", "@1x4x4x4", "_quantised_", ":", "",
    "_unclamped", ".blocked", "_1",
)  # fmt: skip
"""Endings that the compiler might append to names."""


@dataclass(frozen=True)
class Tensor:
    """An 8-bit tensor of the model: real = (value - zero) * scale.

    float_inside: onnxruntime computes it, or a tensor that it depends on, in float.
    """

    name: str
    shape: tuple[int, ...]
    scale: float
    zero: int
    float_inside: bool = False


class Builder:
    """A quantised model that grows operator by operator.

    form: "qdq" or "qoperator". dtype: type of all activations. symmetric: every zero point is the middle of the range.
    """

    def __init__(
        self, form: str, dtype: Any = np.int8, seed: int = 0, symmetric: bool = False, opset: int = 17
    ) -> None:
        self.qdq, self.dtype, self.symmetric, self.opset = form == "qdq", np.dtype(dtype), symmetric, opset
        self.rng = np.random.default_rng(seed)
        self.one_sided = False
        """True if no weight is negative, so that sums grow large."""
        self.rounding = "onnxruntime"
        """The option `rounding` of `celosia.compile`."""
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, NDArray[Any]] = {}
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.steps: dict[str, float] = {}
        """The quantisation step of each output, as a float."""
        self.inexact: set[str] = set()
        """Names of outputs that depend on an operator that onnxruntime computes in float."""
        self.count = 0
        self.node_names = "own"
        """Names of nodes: "own", "none", "same", or "hostile" (names that the compiler might generate itself)."""
        self.hostile_tensors = False
        """True if tensors have names that the compiler might generate itself."""
        self.last = "val"
        self.given_names: set[str] = set()
        self.shared = False
        """True to share parts, as in models that exporters have cleaned up.

        Equal constants are one initializer, convolutions of equal shape share weights, and readers of a tensor share
        its DequantizeLinear.
        """
        self.kept: dict[Any, Any] = {}
        """The shared parts by their keys, see `once`."""

    # Pieces ----------------------------------------------------------------------------------------------------

    def name(self, stem: str) -> str:
        self.count += 1
        if not self.hostile_tensors:
            return f"{stem}_{self.count}"
        name = f"val_{self.count}" if self.count % 3 else f"{self.last}{HOSTILE[self.count % len(HOSTILE)]}"
        while name in self.given_names:
            name += "_1"
        self.given_names.add(name)
        self.last = name if len(name) < 40 else "val"
        return name

    def node_name(self, out: str) -> str:
        if self.node_names == "hostile":
            return f"{self.last}{HOSTILE[self.count % len(HOSTILE)]}"
        return {"own": f"{out}_node", "none": "", "same": "node"}[self.node_names]

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """Return `make()`; if `shared`, call it only once for each `key`."""
        if not self.shared:
            return make()
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]  # type: ignore[no-any-return]

    def constant(self, stem: str, array: Any, dtype: Any = None) -> str:
        value = np.asarray(array, dtype)

        def make() -> str:
            name = self.name(stem)
            self.constants[name] = value
            return name

        return self.once((value.dtype.str, value.shape, value.tobytes()), make)

    def node(self, op: str, inputs: Sequence[str], domain: str = "", **attrs: Any) -> str:
        out = self.name(op.lower())
        self.nodes.append(helper.make_node(op, list(inputs), [out], name=self.node_name(out), domain=domain, **attrs))
        return out

    def meaning(self, scale: float, zero: int) -> list[str]:
        """Add a scale and a zero point of the activations' type, and return their names."""
        return [self.constant("scale", scale, np.float32), self.constant("zero", zero, self.dtype)]

    def zero(self) -> int:
        info = np.iinfo(self.dtype)
        return int(info.min + 128 if self.symmetric else self.rng.integers(info.min, info.max + 1))

    def real(self, x: Tensor) -> str:
        """Add a DequantizeLinear of `x`, and return the name of the float tensor."""
        return self.dequantised(x.name, self.meaning(x.scale, x.zero))

    def dequantised(self, name: str, meaning: Sequence[str], **attrs: int) -> str:
        inputs = [name, *meaning]
        return self.once((*inputs, *attrs.items()), lambda: self.node("DequantizeLinear", inputs, **attrs))

    def quantise(
        self, value: str, shape: Sequence[int], scale: float, zero: int | None = None, float_inside: bool = False
    ) -> Tensor:
        scale, zero = float(np.float32(scale)), self.zero() if zero is None else zero
        name = self.node("QuantizeLinear", [value, *self.meaning(scale, zero)])
        return Tensor(name, tuple(shape), scale, zero, float_inside)

    def tensor(
        self, op: str, inputs: Sequence[str], shape: Sequence[int], scale: float, zero: int, float_inside: bool = False,
        domain: str = MS, **attrs: Any,
    ) -> Tensor:  # fmt: skip
        """Add an integer operator, and return its result."""
        return Tensor(
            self.node(op, inputs, domain, **attrs), tuple(shape), float(np.float32(scale)), zero, float_inside
        )

    def operand(self, x: Tensor) -> list[str]:
        return [x.name, *self.meaning(x.scale, x.zero)]

    # The model -------------------------------------------------------------------------------------------------

    def input(self, shape: Sequence[int], scale: float = 0.05) -> Tensor:
        name = self.name("input")
        self.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)))
        return self.quantise(name, shape, scale)

    def output(self, x: Tensor, real: bool = False) -> None:
        """Make `x` an output of the model: its bytes, or floats if `real`."""
        kind = TensorProto.FLOAT if real else helper.np_dtype_to_tensor_dtype(self.dtype)
        name = self.real(x) if real else x.name
        self.outputs.append(helper.make_tensor_value_info(name, kind, list(x.shape)))
        self.steps[name] = x.scale
        if x.float_inside:
            self.inexact.add(name)

    def return_input(self) -> None:
        """Make the model's first input an output."""
        self.outputs.append(self.inputs[0])
        self.steps[self.inputs[0].name] = 1

    def model(self) -> onnx.ModelProto:
        constants = [numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        graph = helper.make_graph(self.nodes, "small", self.inputs, self.outputs, constants)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid(MS, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
        onnx.checker.check_model(model)
        return model

    # Operators -------------------------------------------------------------------------------------------------

    def weights(
        self, shape: Sequence[int], channels: int, per_channel: bool, axis: int
    ) -> tuple[str, NDArray[Any], list[str]]:
        """Add int8 weights. Return their name, their scales, and the names of scale and zero point.

        With uint8 activations the weights have 7 bits, because onnxruntime's U8S8 kernels saturate on some processors.
        """
        return self.once(("weights", *shape, per_channel, axis), lambda: self._weights(shape, channels, per_channel))

    def _weights(
        self, shape: Sequence[int], channels: int, per_channel: bool
    ) -> tuple[str, NDArray[Any], list[str]]:  # fmt: skip
        limit = 128 if self.dtype == np.int8 else 64
        values = self.rng.integers(0 if self.one_sided else -limit, limit, shape).astype(np.int8)
        scale = self.rng.uniform(0.002, 0.02, channels if per_channel else ()).astype(np.float32)
        zero = np.zeros(scale.shape, np.int8)
        return self.constant("weights", values), scale, [self.constant("scale", scale), self.constant("zero", zero)]

    def _spread(self, x: Tensor, w_scale: NDArray[Any], terms: int) -> float:
        """Return a scale with which the sums of `terms` products cover the bytes."""
        if self.one_sided:
            return float(x.scale * np.mean(w_scale) * 64 * 64 * terms / 100)
        return float(x.scale * np.mean(w_scale) * 74 * math.sqrt(terms) * self.rng.uniform(1, 3))

    def conv(
        self, x: Tensor, out: int, kernel: tuple[int, ...], strides: tuple[int, ...] = (1, 1),
        pads: tuple[int, ...] = (0, 0, 0, 0), dilations: tuple[int, ...] = (1, 1), group: int = 1,
        per_channel: bool = True, bias: bool = True, activation: str = "", auto_pad: str = "",
    ) -> Tensor:  # fmt: skip
        """Add a convolution.

        auto_pad: "SAME_UPPER" or "SAME_LOWER" instead of pads. activation, for QDQ only: "Relu" or "Clip" before
        quantisation, which then implies it; "kept" for a Relu between two QDQ pairs; "clamp" for a Clip that
        quantisation does not imply, with which onnxruntime computes in float.
        """
        images, channels, *size = x.shape
        w, w_scale, w_meaning = self.weights((out, channels // group, *kernel), out, per_channel, 0)
        rank = len(kernel)
        attrs: dict[str, Any] = dict(
            kernel_shape=list(kernel), strides=list(strides[:rank]), dilations=list(dilations[:rank]), group=group
        )
        if auto_pad:
            attrs["auto_pad"] = auto_pad
            shape = (images, out, *(-(-size[a] // strides[a]) for a in range(rank)))
        else:
            attrs["pads"] = list(pads[: 2 * rank])
            reaches = [(kernel[a] - 1) * dilations[a] + 1 for a in range(rank)]
            around = [size[a] + pads[a] + pads[a + rank] - reaches[a] for a in range(rank)]
            shape = (images, out, *(around[a] // strides[a] + 1 for a in range(rank)))
        scale = self._spread(x, w_scale, channels // group * math.prod(kernel))
        b = self.constant("bias", self.rng.integers(-5000, 5000, out), np.int32) if bias else ""
        if not self.qdq:
            zero = self.zero()
            inputs = [*self.operand(x), w, *w_meaning, *self.meaning(scale, zero), *([b] if bias else [])]
            return self.tensor("QLinearConv", inputs, shape, scale, zero, x.float_inside, domain="", **attrs)
        axis = dict(axis=0) if per_channel else {}
        inputs = [self.real(x), self.dequantised(w, w_meaning, **axis)]
        if bias:
            inputs.append(self._real_bias(b, np.float32(x.scale) * w_scale, axis))
        y = self.node("Conv", inputs, **attrs)
        zero = int(np.iinfo(self.dtype).min) if activation in ("Relu", "Clip") else None
        if activation == "Relu":
            y = self.node("Relu", [y])
        elif activation in ("Clip", "clamp"):
            limits = (0.0, 256 * scale) if activation == "Clip" else (-30.5 * scale, 60 * scale)
            y = self.node("Clip", [y, *(self.constant("limit", limit, np.float32) for limit in limits)])
        result = self.quantise(y, shape, scale, zero, x.float_inside or activation == "clamp")
        return self.unary(result, "Relu") if activation == "kept" else result

    def conv_transpose(
        self, x: Tensor, out: int, kernel: tuple[int, int], strides: tuple[int, int] = (1, 1),
        pads: tuple[int, int, int, int] = (0, 0, 0, 0), more: tuple[int, int] = (0, 0),
        dilations: tuple[int, int] = (1, 1), group: int = 1, per_channel: bool = True,
    ) -> Tensor:  # fmt: skip
        """Add a transposed convolution, for which onnxruntime has only float operators. more: output_padding."""
        channels, per_channel = x.shape[1], per_channel and group == 1
        w, w_scale, w_meaning = self.weights((channels, out // group, *kernel), out, per_channel, 1)
        bias = self.constant("bias", self.rng.integers(-5000, 5000, out), np.int32)
        reaches = [(kernel[a] - 1) * dilations[a] + 1 for a in (0, 1)]
        size = [(x.shape[2 + a] - 1) * strides[a] + reaches[a] + more[a] - pads[a] - pads[a + 2] for a in (0, 1)]
        weights = self.dequantised(w, w_meaning, **(dict(axis=1) if per_channel else {}))
        real_bias = self._real_bias(bias, np.float32(x.scale) * w_scale, dict(axis=0) if per_channel else {})
        y = self.node(
            "ConvTranspose", [self.real(x), weights, real_bias], strides=list(strides), pads=list(pads),
            output_padding=list(more), dilations=list(dilations), group=group,
        )  # fmt: skip
        terms = max(1, channels // group * math.prod(kernel) // math.prod(strides))
        return self.quantise(y, (x.shape[0], out, *size), self._spread(x, w_scale, terms), float_inside=True)

    def _real_bias(self, bias: str, scale: NDArray[np.float32], axis: dict[str, int]) -> str:
        zero = self.constant("zero", np.zeros(scale.shape, np.int32))
        return self.node("DequantizeLinear", [bias, self.constant("scale", scale), zero], **axis)

    def matmul(self, x: Tensor, out: int, op: str = "Gemm", per_channel: bool = True, trans_b: int = 1) -> Tensor:
        """Multiply `x` [..., K] by constant weights, as "Gemm" (with bias) or "MatMul"."""
        inner = x.shape[-1]
        trans_b = trans_b if op == "Gemm" else 0
        shape = (out, inner) if trans_b else (inner, out)
        # onnxruntime's QGemm takes scales per channel only for [K, N] weights
        per_channel = per_channel and not trans_b
        w, w_scale, w_meaning = self.weights(shape, out, per_channel, 1)
        scale, y_shape = self._spread(x, w_scale, inner), (*x.shape[:-1], out)
        bias = self.constant("bias", self.rng.integers(-5000, 5000, out), np.int32) if op == "Gemm" else ""
        if not self.qdq:
            zero = self.zero()
            inputs = [*self.operand(x), w, *w_meaning]
            if op == "MatMul":
                inputs += self.meaning(scale, zero)
                return self.tensor("QLinearMatMul", inputs, y_shape, scale, zero, x.float_inside, domain="")
            inputs += [bias, *self.meaning(scale, zero)]
            return self.tensor("QGemm", inputs, y_shape, scale, zero, x.float_inside, transB=trans_b)
        axis = dict(axis=1) if per_channel else {}
        inputs = [self.real(x), self.dequantised(w, w_meaning, **axis)]
        if op == "MatMul":
            return self.quantise(self.node("MatMul", inputs), y_shape, scale, float_inside=x.float_inside)
        inputs.append(self._real_bias(bias, np.float32(x.scale) * w_scale, dict(axis=0) if per_channel else {}))
        return self.quantise(self.node("Gemm", inputs, transB=trans_b), y_shape, scale, float_inside=x.float_inside)

    def binary(self, op: str, a: Tensor, b: Tensor) -> Tensor:
        """Add "Add" or "Mul"."""
        if op == "Add":
            scale = (a.scale + b.scale) * self.rng.uniform(0.4, 1)
        else:
            scale = a.scale * b.scale * 128 * self.rng.uniform(0.3, 1)
        shape = np.broadcast_shapes(a.shape, b.shape)
        inexact = a.float_inside or b.float_inside
        if self.qdq:
            return self.quantise(self.node(op, [self.real(a), self.real(b)]), shape, scale, float_inside=inexact)
        zero = self.zero()
        inputs = [*self.operand(a), *self.operand(b), *self.meaning(scale, zero)]
        return self.tensor(f"QLinear{op}", inputs, shape, scale, zero, inexact)

    def max_pool(
        self, x: Tensor, kernel: tuple[int, int], strides: tuple[int, int], pads: tuple[int, int, int, int],
        ceil_mode: int = 0,
    ) -> Tensor:  # fmt: skip
        size = []
        for a in (0, 1):
            reach = x.shape[2 + a] + pads[a] + pads[a + 2] - kernel[a]
            size.append((-(-reach // strides[a]) if ceil_mode else reach // strides[a]) + 1)
        attrs: dict[str, Any] = dict(
            kernel_shape=list(kernel), strides=list(strides), pads=list(pads), ceil_mode=ceil_mode
        )
        shape = (*x.shape[:2], *size)
        if self.qdq:
            y = self.node("MaxPool", [self.real(x)], **attrs)
            return self.quantise(y, shape, x.scale, x.zero, x.float_inside)
        return self.tensor("MaxPool", [x.name], shape, x.scale, x.zero, x.float_inside, domain="", **attrs)

    def average_pool(
        self, x: Tensor, kernel: tuple[int, int], strides: tuple[int, int], pads: tuple[int, int, int, int],
        count_include_pad: int = 0,
    ) -> Tensor:  # fmt: skip
        """Add an average pooling, which onnxruntime computes in float, even as QLinearAveragePool."""
        scale, rounded = x.scale * self.rng.choice([1, self.rng.uniform(0.4, 1)]), self.rounding == "correct"
        size = ((x.shape[2 + a] + pads[a] + pads[a + 2] - kernel[a]) // strides[a] + 1 for a in (0, 1))
        attrs: dict[str, Any] = dict(kernel_shape=list(kernel), strides=list(strides), pads=list(pads))
        attrs["count_include_pad"] = count_include_pad
        return self._pool("AveragePool", x, (*x.shape[:2], *size), scale, x.float_inside or rounded, attrs)

    def global_average(self, x: Tensor) -> Tensor:
        scale = x.scale * self.rng.uniform(0.1, 1)
        return self._pool("GlobalAveragePool", x, (*x.shape[:2], 1, 1), scale, x.float_inside, {})

    def _pool(
        self, op: str, x: Tensor, shape: Sequence[int], scale: float, inexact: bool, attrs: dict[str, Any]
    ) -> Tensor:
        if self.qdq:
            return self.quantise(self.node(op, [self.real(x)], **attrs), shape, scale, float_inside=inexact)
        zero = self.zero()
        inputs = [*self.operand(x), *self.meaning(scale, zero)]
        return self.tensor(f"QLinear{op}", inputs, shape, scale, zero, inexact, **attrs)

    def concat(self, parts: Sequence[Tensor], equal: bool, axis: int = 1) -> Tensor:
        """Add a concatenation. equal: the result has the scale and zero point of the first part."""
        first = parts[0]
        shape = (*first.shape[:axis], sum(part.shape[axis] for part in parts), *first.shape[axis + 1 :])
        scale = first.scale if equal else max(part.scale for part in parts)
        zero = first.zero if equal else self.zero()
        inexact = any(part.float_inside for part in parts)
        if self.qdq:
            y = self.node("Concat", [self.real(part) for part in parts], axis=axis)
            return self.quantise(y, shape, scale, zero, inexact)
        inputs = [*self.meaning(scale, zero), *(name for part in parts for name in self.operand(part))]
        return self.tensor("QLinearConcat", inputs, shape, scale, zero, inexact, axis=axis)

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        target = self.constant("shape", list(shape), np.int64)
        if self.qdq:
            return self.quantise(self.node("Reshape", [self.real(x), target]), shape, x.scale, x.zero, x.float_inside)
        return Tensor(self.node("Reshape", [x.name, target]), tuple(shape), x.scale, x.zero, x.float_inside)

    def move(
        self, op: str, x: Tensor, shapes: Sequence[Sequence[int]], arguments: Sequence[Any] = (), **attrs: Any
    ) -> list[Tensor]:
        """Add an operator that only moves elements of `x`, and return its outputs, of `shapes`.

        arguments: its further inputs, as constants.
        """
        names = ["" if value is None else self.constant("argument", value) for value in arguments]
        outs = [self.name(op.lower()) for _ in shapes]
        inputs = [self.real(x) if self.qdq else x.name, *names]
        self.nodes.append(helper.make_node(op, inputs, outs, name=self.node_name(outs[0]), **attrs))
        if self.qdq:
            return [
                self.quantise(out, shape, x.scale, x.zero, x.float_inside)
                for out, shape in zip(outs, shapes, strict=True)
            ]
        return [replace(x, name=out, shape=tuple(shape)) for out, shape in zip(outs, shapes, strict=True)]

    def split(self, x: Tensor, sizes: Sequence[int], axis: int = 1) -> list[Tensor]:
        shapes = [(*x.shape[:axis], size, *x.shape[axis + 1 :]) for size in sizes]
        return self.move("Split", x, shapes, [np.array(sizes, np.int64)], axis=axis)

    def slice(self, x: Tensor, axis: int, start: int, end: int, step: int = 1) -> Tensor:
        size = len(range(x.shape[axis])[start:end:step])
        numbers = [np.array([number], np.int64) for number in (start, end, axis, step)]
        return self.move("Slice", x, [(*x.shape[:axis], size, *x.shape[axis + 1 :])], numbers)[0]

    def nearest(self, x: Tensor, scale: tuple[float, float], **attrs: Any) -> Tensor:
        """Resize rows and columns to the nearest element."""
        shape = (*x.shape[:2], math.floor(x.shape[2] * scale[0]), math.floor(x.shape[3] * scale[1]))
        scales = np.array([1, 1, *scale], np.float32)
        return self.move("Resize", x, [shape], [None, scales], mode="nearest", **attrs)[0]

    def pad(self, x: Tensor, before: Sequence[int], after: Sequence[int], mode: str = "constant") -> Tensor:
        """Pad all four axes; with zeros, if `mode` is "constant"."""
        shape = [b + size + a for b, size, a in zip(before, x.shape, after, strict=True)]
        arguments: list[Any] = [np.array([*before, *after], np.int64)]
        if mode == "constant":
            arguments.append(np.float32(0) if self.qdq else np.array(x.zero, self.dtype))
        return self.move("Pad", x, [shape], arguments, mode=mode)[0]

    def depth_to_space(self, x: Tensor, b: int, mode: str = "DCR") -> Tensor:
        n, c, h, w = x.shape
        return self.move("DepthToSpace", x, [(n, c // (b * b), h * b, w * b)], blocksize=b, mode=mode)[0]

    def space_to_depth(self, x: Tensor, b: int) -> Tensor:
        n, c, h, w = x.shape
        return self.move("SpaceToDepth", x, [(n, c * b * b, h // b, w // b)], blocksize=b)[0]

    def flatten(self, x: Tensor) -> Tensor:
        shape = (x.shape[0], math.prod(x.shape[1:]))
        if self.qdq:
            return self.quantise(self.node("Flatten", [self.real(x)]), shape, x.scale, x.zero, x.float_inside)
        return Tensor(self.node("Flatten", [x.name]), shape, x.scale, x.zero, x.float_inside)

    def unary(self, x: Tensor, op: str, **attrs: Any) -> Tensor:
        """Apply a function to each element. onnxruntime has integer operators only for Sigmoid and LeakyRelu."""
        top = {"Sigmoid": 1.0, "HardSigmoid": 1.0, "Tanh": 1.0}.get(op, x.scale * 128)
        scale = top / self.rng.uniform(120, 260)
        if op in ("Sigmoid", "LeakyRelu") and not self.qdq:
            zero = self.zero()
            inputs = [*self.operand(x), *self.meaning(scale, zero)]
            return self.tensor(f"QLinear{op}", inputs, x.shape, scale, zero, x.float_inside, **attrs)
        return self.quantise(self.node(op, [self.real(x)], **attrs), x.shape, scale, float_inside=x.float_inside)

    def hard_swish(self, x: Tensor) -> Tensor:
        return self.binary("Mul", self.unary(x, "HardSigmoid", alpha=1 / 6, beta=0.5), x)

    def again(self, x: Tensor) -> Tensor:
        """Repeat the last node, whose output is `x`, with another output."""
        node = self.nodes[-1]
        assert list(node.output) == [x.name]
        name = self.name("again")
        self.nodes.append(onnx.NodeProto())
        self.nodes[-1].CopyFrom(node)
        self.nodes[-1].output[:] = [name]
        self.nodes[-1].name = self.node_name(name)
        return replace(x, name=name)

    def transposed(self, x: Tensor) -> Tensor:
        """Transpose the rows and columns of the bytes, which the CPU does."""
        shape = (*x.shape[:2], x.shape[3], x.shape[2])
        return replace(x, name=self.node("Transpose", [x.name], perm=[0, 1, 3, 2]), shape=shape)

    def maximum(self, real: str, axes: list[int]) -> str:
        if self.opset < 18:
            return self.node("ReduceMax", [real], axes=axes)
        return self.node("ReduceMax", [real, self.constant("axes", axes, np.int64)])

    def below_maximum(self, x: Tensor) -> Tensor:
        """Subtract the largest element of each image: a float expression that reads `x` twice."""
        real = self.real(x)
        below = self.node("Sub", [real, self.maximum(real, [1, 2, 3])])
        return self.quantise(below, x.shape, x.scale * 1.5, float_inside=x.float_inside)

    def negated_or_positive(self, x: Tensor) -> Tensor:
        """Return -x if the largest element of `x` is positive, else |x|, by an If.

        Both bodies use the same names, which other tensors, and tensors that the compiler makes, may have, too.
        """
        real = self.real(x)
        top = self.node("Squeeze", [self.maximum(real, [0, 1, 2, 3])])
        positive = self.node("Greater", [top, self.constant("none", 0, np.float32)])
        inner = [self.last + ending for ending in HOSTILE if ending and self.last + ending not in self.given_names][:2]
        bodies = {}
        for branch, op in (("then_branch", "Neg"), ("else_branch", "Abs")):
            nodes = [helper.make_node(op, [real], inner[:1]), helper.make_node("Identity", inner[:1], inner[1:])]
            output = helper.make_tensor_value_info(inner[1], TensorProto.FLOAT, list(x.shape))
            bodies[branch] = helper.make_graph(nodes, branch, [], [output])
        y = self.node("If", [positive], **bodies)
        return self.quantise(y, x.shape, x.scale, float_inside=x.float_inside)

    def squeeze_excite(self, x: Tensor, inner: int) -> Tensor:
        y = self.conv(self.global_average(x), inner, (1, 1), activation="Relu" if self.qdq else "")
        y = self.unary(self.conv(y, x.shape[1], (1, 1)), "HardSigmoid", alpha=0.2, beta=0.5)
        return self.binary("Mul", x, y)


# Networks ------------------------------------------------------------------------------------------------------


def twins(b: Builder) -> None:
    """Add two convolutions of the same geometry, one behind the other."""
    x = b.conv(b.input([1, 8, 8, 8]), 16, (1, 1))
    x = b.conv(x, 16, (3, 3), pads=(1, 1, 1, 1))
    b.output(b.conv(x, 16, (3, 3), pads=(1, 1, 1, 1)))


def detector(b: Builder) -> None:
    """Add a network in the shape of a face detector, with 77 integer operators.

    It has a stem, depthwise separable blocks with residuals, and boxes and scores at two sizes.
    """
    x = b.conv(b.input([1, 3, 64, 64]), 12, (5, 5), (2, 2), (1, 1, 2, 2))
    heads = []
    for blocks, channels in ((6, 12), (7, 24), (6, 32)):
        x = _separable_halved(b, x, channels)
        for _ in range(blocks):
            x = b.binary("Add", _separable(b, x, x.shape[1], (1, 1)), x)
        heads.append(x)
    for x in heads[1:]:
        for out in (2, 12):
            b.output(b.reshape(b.conv(x, out, (1, 1)), (1, out * x.shape[2] * x.shape[3])), real=True)


def _separable(b: Builder, x: Tensor, out: int, strides: tuple[int, int]) -> Tensor:
    y = b.conv(x, x.shape[1], (3, 3), strides, (1, 1, 1, 1), group=x.shape[1])
    return b.conv(y, out, (1, 1))


def _separable_halved(b: Builder, x: Tensor, out: int) -> Tensor:
    y = _separable(b, x, out, (2, 2))
    return b.binary("Add", y, b.conv(b.max_pool(x, (2, 2), (2, 2), (0, 0, 0, 0)), out, (1, 1)))


# Random models -------------------------------------------------------------------------------------------------

UNARY = ("Sigmoid", "Tanh", "LeakyRelu", "HardSigmoid", "Relu")
OPERATORS = ("conv", "conv", "depthwise", "grouped", "max_pool", "residual", "sum", "concat", "unary", "hard_swish",
             "squeeze_excite", "reshape", "twins", "again", "fan", "transposed", "below_maximum", "if", "split",
             "slice", "nearest", "pad", "depth", "beside",
)  # fmt: skip
LAST = ("", "flatten_gemm", "global_gemm", "global_average", "average_pool", "matmul")


@st.composite
def models(draw: st.DrawFn) -> Builder:
    """Draw a chain of up to six operators, some with branches, and perhaps a classifier."""
    number = lambda low, high: draw(st.integers(low, high))  # noqa: E731
    b = Builder(
        draw(st.sampled_from(["qdq", "qoperator"])), draw(st.sampled_from([np.int8, np.uint8])), number(0, 2**16),
        draw(st.booleans()), draw(st.sampled_from([13, 17, 19])),
    )  # fmt: skip
    b.node_names = draw(st.sampled_from(["own", "none", "same", "hostile"]))
    b.hostile_tensors, b.shared = draw(st.booleans()), draw(st.booleans())
    x = b.input([number(1, 3), number(1, 18), number(1, 10), number(1, 10)])
    for op in draw(st.lists(st.sampled_from(OPERATORS), max_size=6)):
        x = _random(draw, b, op, x)
        if number(0, 5) == 0 and x.name not in b.steps:
            b.output(x)
    if number(0, 9) == 0:
        b.return_input()
    last = draw(st.sampled_from(LAST))
    if last == "average_pool":
        kernel, strides, pads = _window(draw, x)
        x = b.average_pool(x, kernel, strides, pads, number(0, 1))
    elif last == "global_average":
        x = b.global_average(x)
    elif last == "matmul":
        x = b.matmul(x, number(1, 12), "MatMul", draw(st.booleans()))
    elif last:
        x = b.flatten(b.global_average(x) if last == "global_gemm" else x)
        x = b.matmul(x, number(1, 12), draw(st.sampled_from(["Gemm", "MatMul"])), draw(st.booleans()), number(0, 1))
    elif not b.nodes[1:]:
        x = b.conv(x, 4, (1, 1))
    b.output(x, draw(st.booleans()) or x.name in b.steps)
    return b


def _window(draw: st.DrawFn, x: Tensor) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int, int, int]]:
    """Kernel, strides and pads of a pooling window inside `x`; pads are smaller than the kernel."""
    kernel = tuple(draw(st.integers(1, min(3, size))) for size in x.shape[2:])
    strides = tuple(draw(st.integers(1, 3)) for _ in kernel)
    pads = tuple(draw(st.integers(0, k - 1)) for k in kernel * 2)
    return kernel, strides, pads  # type: ignore[return-value]


def _random(draw: st.DrawFn, b: Builder, op: str, x: Tensor) -> Tensor:
    channels = x.shape[1]
    if op in ("conv", "depthwise", "grouped"):
        return _random_conv(draw, b, op, x)
    if op == "max_pool":
        kernel, strides, pads = _window(draw, x)
        y = b.max_pool(x, kernel, strides, pads, ceil_mode=draw(st.integers(0, 1)))
        # onnx and onnxruntime disagree about windows that lie in the padding altogether
        assume(all((y.shape[a] - 1) * strides[a - 2] < x.shape[a] + pads[a - 2] for a in (2, 3)))
        return y
    if op == "twins":
        first = b.conv(x, channels, (3, 3), pads=(1, 1, 1, 1))
        return b.conv(first, channels, (3, 3), pads=(1, 1, 1, 1), activation=_activation(draw))
    if op == "again":
        y = b.conv(x, draw(st.integers(1, 9)), (1, 1), activation=_activation(draw))
        return b.binary("Add", y, b.again(y))
    if op == "fan":
        return b.concat([b.max_pool(x, (1, 1), (1, 1), (0, 0, 0, 0)), *(b.conv(x, 4, (1, 1)) for _ in range(3))], False)
    if op == "transposed":
        return b.transposed(x)
    if op in ("split", "slice", "nearest", "pad", "depth", "beside"):
        return _random_move(draw, b, op, x)
    if op == "below_maximum":
        return b.below_maximum(x)
    if op == "if":
        return b.negated_or_positive(x)
    if op == "residual":
        y = b.conv(x, channels, (3, 3), pads=(1, 1, 1, 1), activation=_activation(draw))
        return b.binary("Add", *draw(st.permutations([x, y])))
    if op == "sum":
        y = b.max_pool(x, (3, 3), (1, 1), (1, 1, 1, 1)) if min(x.shape[2:]) > 1 else b.unary(x, "Relu")
        return b.binary(draw(st.sampled_from(["Add", "Mul"])), *draw(st.permutations([x, y])))
    if op == "concat":
        parts = [x, *(b.conv(x, draw(st.integers(1, 9)), (1, 1)) for _ in range(draw(st.integers(1, 2))))]
        return b.concat(draw(st.permutations(parts)), draw(st.booleans()))
    if op == "unary":
        return b.unary(x, draw(st.sampled_from(UNARY)))
    if op == "hard_swish":
        return b.hard_swish(x)
    if op == "squeeze_excite":
        return b.squeeze_excite(x, draw(st.integers(1, 6)))
    images, _, rows, columns = x.shape
    return b.reshape(
        x, draw(st.sampled_from([(images, channels, 1, rows * columns), (images, channels * rows, 1, columns)]))
    )


def _random_move(draw: st.DrawFn, b: Builder, op: str, x: Tensor) -> Tensor:
    """Add an operator that moves bytes, and perhaps an operator on its results."""
    number = lambda low, high: draw(st.integers(low, high))  # noqa: E731
    axis = number(1, 3)
    size = x.shape[axis]
    if op == "split":
        first = number(1, size)
        parts = b.split(x, [first, size - first], axis) if first < size else [x]
        return b.concat([*draw(st.permutations(parts)), b.conv(parts[0], parts[0].shape[1], (1, 1))], False, axis)
    if op == "slice":
        start = number(0, size - 1)
        return b.slice(x, axis, start, number(start + 1, size), number(1, 3))
    if op == "nearest":
        scales = draw(st.sampled_from([(2.0, 2.0), (1.0, 3.0), (1.5, 2.0), (2.0, 1.0)]))
        if any(size * scale % 1 for size, scale in zip(x.shape[2:], scales, strict=True)):
            scales = (1.0, 2.0)
        return b.nearest(x, scales, coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    if op == "pad":
        mode = draw(st.sampled_from(["constant", "edge"]))
        return b.pad(x, [0, 0, number(0, 2), number(0, 2)], [0, 0, number(0, 2), number(0, 2)], mode)
    if op == "depth":
        y = b.conv(x, 4 * number(1, 8), (1, 1))
        return b.depth_to_space(y, 2, draw(st.sampled_from(["DCR", "CRD"])))
    y = b.conv(x, x.shape[1], (1, 1))
    return b.concat(draw(st.permutations([x, y])), draw(st.booleans()), axis)


def _activation(draw: st.DrawFn) -> str:
    return draw(st.sampled_from(["", "Relu", "Clip", "kept", "clamp"]))


def _random_conv(draw: st.DrawFn, b: Builder, op: str, x: Tensor) -> Tensor:
    number = lambda low, high: draw(st.integers(low, high))  # noqa: E731
    channels = x.shape[1]
    out, group = number(1, 18), 1
    if op == "depthwise":
        out = group = channels
    elif op == "grouped":
        group = draw(st.sampled_from([g for g in range(1, channels + 1) if channels % g == 0]))
        out = group * number(1, 3)
    kernel, dilations, pads = [], [], []
    for size in x.shape[2:]:
        taps, spread = number(1, 4), number(1, 2)
        reach = (taps - 1) * spread + 1
        before, after = number(0, reach - 1), number(0, reach - 1)
        if size + before + after < reach:
            before = reach - 1
        kernel.append(taps), dilations.append(spread), pads.append((before, after))  # type: ignore[func-returns-value]
    return b.conv(
        x, out, (kernel[0], kernel[1]), (number(1, 3), number(1, 3)), (pads[0][0], pads[1][0], pads[0][1], pads[1][1]),
        (dilations[0], dilations[1]), group, draw(st.booleans()), draw(st.booleans()), _activation(draw),
    )  # fmt: skip
