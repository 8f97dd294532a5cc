"""Encoders of transformers, quantised by onnxruntime as its users do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Floats = NDArray[np.float32]
LANES = 4
"""Of softmax on the accelerator."""
NORM, APART = 8, 1e-5
"""Lanes of norms, where rounding is "correct": one launch then; and values of norms that are a step beside
onnxruntime's, at most."""


@dataclass
class Encoder:
    """Layers of attention and two products, in floats, of `batch` sequences. named: whether operators have names.
    turned: keys are transposed in two steps. masked: a row is added to the scores. bias: products have one.
    alone: the input is Q, K and V, and what the heads make of it comes out."""

    tokens: int
    heads: int
    inner: int
    wide: int
    layers: int = 1
    named: bool = True
    turned: bool = False
    masked: bool = False
    bias: bool = True
    batch: int = 1
    alone: bool = False
    seed: int = 0
    nodes: list[onnx.NodeProto] = field(default_factory=list, init=False)
    constants: list[onnx.TensorProto] = field(default_factory=list, init=False)

    @property
    def channels(self) -> int:
        """Channels of all heads."""
        return self.heads * self.inner

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of input and output, [batch, tokens, channels] float32."""
        return self.batch, self.tokens, self.channels

    def model(self) -> onnx.ModelProto:
        """The ONNX model, with random weights: x to y."""
        self.random, self.nodes, self.constants = np.random.default_rng(self.seed), [], []
        x = self._attention("x") if self.alone else "x"
        for _ in range(0 if self.alone else self.layers):
            x = self._norm(self._op("Add", x, self._attention(x)))
            hidden = self._op("Relu", self._linear(x, self.channels, self.wide))
            x = self._norm(self._op("Add", x, self._linear(hidden, self.wide, self.channels)))
        self.nodes.append(helper.make_node("Identity", [x], ["y"]))
        given, made = (helper.make_tensor_value_info(name, TensorProto.FLOAT, self.shape) for name in "xy")
        graph = helper.make_graph(self.nodes, "encoder", [given], [made], self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def _op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        y = f"t{len(self.nodes)}"
        name = f"{kind}_{len(self.nodes)}" if self.named else ""
        self.nodes.append(helper.make_node(kind, list(inputs), [y], name=name, **attributes))
        return y

    def _constant(self, values: Any, dtype: Any = np.float32) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def _linear(self, x: str, inputs: int, outputs: int) -> str:
        y = self._op("MatMul", x, self._constant(self.random.normal(size=(inputs, outputs)) / np.sqrt(inputs)))
        return self._op("Add", y, self._constant(self.random.normal(size=outputs) * 0.1)) if self.bias else y

    def _norm(self, x: str) -> str:
        scale = self._constant(1 + 0.2 * self.random.normal(size=self.channels))
        return self._op("LayerNormalization", x, scale, self._constant(np.zeros(self.channels)), axis=-1)

    def _split(self, x: str, perm: tuple[int, ...]) -> str:
        heads = self._constant([self.batch, self.tokens, self.heads, self.inner], np.int64)
        return self._op("Transpose", self._op("Reshape", x, heads), perm=perm)

    def _attention(self, x: str) -> str:
        own = (x if self.alone else self._linear(x, self.channels, self.channels) for _ in range(3))
        queries, keys, values = own
        if self.turned:
            keys = self._op("Transpose", self._split(keys, (0, 2, 1, 3)), perm=(0, 1, 3, 2))
        else:
            keys = self._split(keys, (0, 2, 3, 1))
        scores = self._op("MatMul", self._split(queries, (0, 2, 1, 3)), keys)
        scores = self._op("Div", scores, self._constant(np.sqrt(self.inner)))
        if self.masked:
            mask = np.where(self.random.random(self.tokens) < 0.3, -10.0, 0.0)
            scores = self._op("Add", scores, self._constant(mask.reshape(1, 1, 1, -1)))
        mixed = self._op("MatMul", self._op("Softmax", scores, axis=-1), self._split(values, (0, 2, 1, 3)))
        joined = self._op("Transpose", mixed, perm=(0, 2, 1, 3))
        joined = self._op("Reshape", joined, self._constant(self.shape, np.int64))
        return joined if self.alone else self._linear(joined, self.channels, self.channels)


ENCODERS = {
    "minilm_64": Encoder(tokens=64, heads=12, inner=32, wide=1536, layers=6),
    "minilm_128": Encoder(tokens=128, heads=12, inner=32, wide=1536, layers=6),
    "deit_tiny": Encoder(tokens=197, heads=3, inner=64, wide=768, layers=12),
}
"""MiniLM-L6's dimensions, and the layers of DeiT-tiny at 224 pixels; random weights."""

ATTENTIONS = {
    f"attention_{tokens}": Encoder(tokens=tokens, heads=12, inner=32, wide=0, alone=True)
    for tokens in (64, 128, 512, 1024)
}  # fmt: skip
"""That of MiniLM's heads alone."""


def quantised(model: onnx.ModelProto, shape: tuple[int, ...], folder: Path, signed: bool, qdq: bool = True) -> Path:
    """The file of `model` after onnxruntime's static quantisation, with its defaults but for the type of activations,
    which is symmetric where it is `signed`."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Samples(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left: Iterator[dict[str, Floats]] = iter([{"x": sample(shape, seed)} for seed in range(3)])

        def get_next(self) -> dict[str, Floats] | None:
            return next(self.left, None)

    onnx.save(model, folder / "float.onnx")
    quantize_static(
        folder / "float.onnx", folder / "quantised.onnx", Samples(), weight_type=QuantType.QInt8,
        quant_format=QuantFormat.QDQ if qdq else QuantFormat.QOperator,
        activation_type=QuantType.QInt8 if signed else QuantType.QUInt8, extra_options={"ActivationSymmetric": signed},
    )  # fmt: skip
    return folder / "quantised.onnx"


def sample(shape: tuple[int, ...], seed: int) -> Floats:
    """Random floats."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
