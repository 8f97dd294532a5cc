"""Build models with open sizes from known operators and random weights; products and convolutions are in int8.

python tests/driver/dynamic_models.py FOLDER [NAME ...]     # write NAME.onnx, or all, for `celosia run`

classifier  image [n, 3, 16, 16]: any number of samples
encoder     mel [1, 40, length]: two convolutions and two transformer blocks, as Whisper's encoder
detector    image [1, 3, height, width]: boxes and scores by convolutions, then NonMaxSuppression
decoder     tokens [1, steps] and caches of keys and values [1, 4, past, 16]: two transformer blocks, as in GPT-2

`feed(NAME, sizes)` returns random inputs; SHAPES has five sizes for each model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array = NDArray[Any]
OPSET, IR_VERSION = 18, 10
STEP = 1 / 32
"""Quantisation step of int8 activations, which are of the order of 1."""


class DynamicNet:
    """A model in the making; methods take and return names of float tensors. quantised: False leaves all in float."""

    def __init__(self, name: str, seed: int, quantised: bool) -> None:
        self.name, self.rng, self.quantised = name, np.random.default_rng(seed), quantised
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.int8: set[str] = set()
        """Names of tensors that come from a DequantizeLinear."""
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, shape: list[int | str], kind: int = TensorProto.FLOAT) -> str:
        """Add an input; names in `shape` are open sizes."""
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, value: str, name: str, shape: list[int | str], kind: int = TensorProto.FLOAT) -> None:
        """Make tensor `value` the output `name`."""
        self.nodes.append(helper.make_node("Identity", [value], [name]))
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def constant(self, array: Any, dtype: Any = np.float32) -> str:
        """Add a constant of `dtype` and return its name."""
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def ints(self, *values: int) -> str:
        """Add a constant of int64, [values], and return its name."""
        return self.constant(values, np.int64)

    def normal(self, *shape: int, deviation: float = 1.0) -> str:
        """Add normally distributed weights of this shape and return their name."""
        return self.constant(self.rng.normal(0, deviation, shape))

    def node(self, op: str, *inputs: str, outputs: int = 1, domain: str = "", **attrs: Any) -> Any:
        """Append an operator. Returns the name of its output, or a list of names if it has several."""
        names = [f"v{len(self.nodes)}_{k}" for k in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, domain=domain, **attrs))
        return names[0] if outputs == 1 else names

    def model(self) -> onnx.ModelProto:
        """Return the checked model."""
        graph = helper.make_graph(self.nodes, self.name, self.inputs, self.outputs, self.constants)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        onnx.checker.check_model(model)
        return model

    # Layers ----------------------------------------------------------------------------------------------------

    def rounded(self, x: str, zero: int = 0) -> str:
        """Quantise `x` to int8 and back. A tensor that comes from a DequantizeLinear is returned unchanged."""
        if x in self.int8 or not self.quantised:
            return x
        scale_and_zero = [self.constant(STEP), self.constant(zero, np.int8)]
        y = str(self.node("DequantizeLinear", self.node("QuantizeLinear", x, *scale_and_zero), *scale_and_zero))
        self.int8.add(y)
        return y

    def weights(self, *shape: int, terms: int) -> str:
        """Add int8 weights. Sums of `terms` products with activations of the order of 1 are of that order, too."""
        values, scale = self.rng.integers(-127, 128, shape), 1 / (73 * np.sqrt(terms))
        if not self.quantised:
            return self.constant(values * scale)
        scale_and_zero = [self.constant(scale), self.constant(0, np.int8)]
        return str(self.node("DequantizeLinear", self.constant(values, np.int8), *scale_and_zero))

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        """Append a matrix product in int8, [..., inputs] to [..., outputs]."""
        w = self.weights(inputs, outputs, terms=inputs)
        return self.rounded(self.node("MatMul", self.rounded(x), w))

    def conv(self, x: str, inputs: int, outputs: int, stride: int = 1, rank: int = 2, relu: bool = True) -> str:
        """Append a convolution of 3 (x 3) in int8, then ReLU if `relu`."""
        w = self.weights(outputs, inputs, *[3] * rank, terms=inputs * 3**rank)
        y = self.node("Conv", self.rounded(x), w, pads=[1] * 2 * rank, strides=[stride] * rank)
        return self.rounded(self.node("Relu", y), -128) if relu else self.rounded(y)

    def norm(self, x: str, size: int) -> str:
        """Append a LayerNormalization along the last axis of `x` [..., size]."""
        return str(self.node("LayerNormalization", x, self.normal(size), self.normal(size, deviation=0.1), axis=-1))

    def gelu(self, x: str) -> str:
        """Append GELU as the operators that exporters write for it."""
        half = self.node("Mul", x, self.constant(0.5))
        erf = self.node("Erf", self.node("Mul", x, self.constant(np.sqrt(0.5))))
        return str(self.node("Mul", half, self.node("Add", erf, self.constant(1.0))))

    def heads(self, x: str, heads: int, size: int) -> str:
        """Split [1, length, heads * size] to [1, heads, length, size]."""
        cut = self.node("Reshape", x, self.ints(0, 0, heads, size))
        return str(self.node("Transpose", cut, perm=[0, 2, 1, 3]))

    def attend(self, q: str, k: str, v: str, size: int, mask: str = "") -> str:
        """Append softmax(q · kᵀ / √size) · v and merge the heads. mask: a bool tensor, False for hidden steps."""
        scores = self.node("MatMul", q, self.node("Transpose", k, perm=[0, 1, 3, 2]))
        scores = self.node("Mul", scores, self.constant(size**-0.5))
        weights = self.node(
            "Softmax", self.node("Where", mask, scores, self.constant(-1e9)) if mask else scores, axis=-1
        )
        mixed = self.node("Transpose", self.node("MatMul", weights, v), perm=[0, 2, 1, 3])
        return str(self.node("Reshape", mixed, self.ints(0, 0, -1)))

    def mlp(self, x: str, size: int) -> str:
        """Append `x` [..., size] plus two products with GELU between them, as in a transformer."""
        inner = self.linear(self.norm(x, size), size, 2 * size)
        return str(self.node("Add", x, self.linear(self.gelu(inner), 2 * size, size)))


def classifier(quantised: bool = True) -> onnx.ModelProto:
    """Return a model from image [n, 3, 16, 16] to chances [n, 10]."""
    net = DynamicNet("classifier", 1, quantised)
    x = net.conv(net.conv(net.input("image", ["n", 3, 16, 16]), 3, 16), 16, 32, stride=2)
    x = net.rounded(net.node("GlobalAveragePool", x))
    count = net.node("Gather", net.node("Shape", x), net.ints(0))
    x = net.node("Reshape", x, net.node("Concat", count, net.ints(-1), axis=0))
    net.output(net.node("Softmax", net.linear(x, 32, 10), axis=-1), "chances", ["n", 10])
    return net.model()


def encoder(quantised: bool = True) -> onnx.ModelProto:
    """Return a model from mel [1, 40, length] to states [1, length/2, 64]; it has positions for 100 states."""
    net, size, heads = DynamicNet("encoder", 2, quantised), 64, 4
    x = net.gelu(net.conv(net.input("mel", [1, 40, "length"]), 40, size, rank=1, relu=False))
    x = net.gelu(net.conv(x, size, size, stride=2, rank=1, relu=False))
    x = net.node("Transpose", x, perm=[0, 2, 1])
    steps = net.node("Gather", net.node("Shape", x), net.ints(1))
    x = net.node("Add", x, net.node("Slice", net.normal(100, size), net.ints(0), steps, net.ints(0)))
    for _ in range(2):
        y = net.norm(x, size)
        q, k, v = (net.heads(net.linear(y, size, size), heads, size // heads) for _ in range(3))
        x = net.node("Add", x, net.linear(net.attend(q, k, v, size // heads), size, size))
        x = net.mlp(x, size)
    net.output(net.norm(x, size), "states", [1, "steps", size])
    return net.model()


def detector(quantised: bool = True) -> onnx.ModelProto:
    """Return a model from image [1, 3, height, width] to boxes [found, 4], scores [found] and classes [found].

    There are three classes.
    """
    net, classes = DynamicNet("detector", 3, quantised), 3
    x = net.conv(net.input("image", [1, 3, "height", "width"]), 3, 16, stride=2)
    x = net.conv(x, 16, 32, stride=2)
    sides = net.node("Sigmoid", net.node("Flatten", net.conv(x, 32, 4, relu=False), axis=2))
    scores = net.node("Reshape", net.conv(x, 32, classes, relu=False), net.ints(1, classes, -1))
    area = net.node("Shape", x)
    rows, columns = (net.node("Gather", area, net.constant(axis, np.int64)) for axis in (2, 3))
    cells = net.node("Range", net.constant(0, np.int64), net.node("Mul", rows, columns), net.constant(1, np.int64))
    y, x = (
        net.node("Unsqueeze", net.node("Cast", net.node(op, cells, columns), to=TensorProto.FLOAT), net.ints(0))
        for op in ("Div", "Mod")
    )
    centres = net.node("Concat", y, x, axis=0)
    span = net.node("Mul", net.node("Reshape", sides, net.ints(2, 2, -1)), net.constant(1.5))
    above, below = net.node("Split", span, outputs=2, axis=0, num_outputs=2)
    low = net.node("Sub", centres, net.node("Squeeze", above, net.ints(0)))
    high = net.node("Add", centres, net.node("Squeeze", below, net.ints(0)))
    boxes = net.node("Transpose", net.node("Concat", low, high, axis=0), perm=[1, 0])
    most, overlap, least = net.ints(20), net.constant(0.4), net.constant(0.4)
    chosen = net.node("NonMaxSuppression", net.node("Unsqueeze", boxes, net.ints(0)), scores, most, overlap, least)
    kind, place = (
        net.node("Gather", chosen, net.constant(column, np.int64), axis=1) for column in (1, 2)
    )  # fmt: skip
    pairs = net.node("Slice", chosen, net.ints(1), net.ints(3), net.ints(1))
    chosen_scores = net.node("GatherND", net.node("Squeeze", scores, net.ints(0)), pairs)
    size = net.node("Cast", net.node("Concat", as_list(net, rows), as_list(net, columns), axis=0), to=TensorProto.FLOAT)
    scaled = net.node("Div", net.node("Gather", boxes, place), net.node("Concat", size, size, axis=0))
    net.output(net.node("Clip", scaled, net.constant(0.0), net.constant(1.0)), "boxes", ["found", 4])
    net.output(chosen_scores, "scores", ["found"])
    net.output(kind, "classes", ["found"], TensorProto.INT64)
    return net.model()


def as_list(net: DynamicNet, scalar: str) -> str:
    """Append an Unsqueeze of a scalar to [1], for Concat."""
    return str(net.node("Unsqueeze", scalar, net.ints(0)))


def decoder(quantised: bool = True) -> onnx.ModelProto:
    """Return a decoder with a cache, of two blocks.

    It maps tokens [1, steps] and, for each block, keys and values [1, 4, past, 16] to logits [1, steps, 100] and caches
    of past + steps. The first run has an empty cache, the others one token.
    """
    net, size, heads, layers = DynamicNet("decoder", 4, quantised), 64, 4, 2
    tokens = net.input("tokens", [1, "steps"], TensorProto.INT64)
    caches = [net.input(f"{what}{layer}", [1, heads, "past", size // heads]) for layer in range(layers)
              for what in ("keys", "values")]  # fmt: skip
    zero, one, two = (net.constant(axis, np.int64) for axis in range(3))
    past = net.node("Gather", net.node("Shape", caches[0]), two)
    total = net.node("Add", past, net.node("Gather", net.node("Shape", tokens), one))
    positions = net.node("Range", past, total, one)
    mask = net.node(
        "GreaterOrEqual", net.node("Unsqueeze", positions, net.ints(1)), net.node("Range", zero, total, one)
    )
    x = net.node("Gather", net.normal(100, size), tokens)
    x = net.node("Add", x, net.node("Gather", net.normal(256, size), positions))
    for layer in range(layers):
        y = net.norm(x, size)
        q, k, v = (net.heads(net.linear(y, size, size), heads, size // heads) for _ in range(3))
        k, v = (net.node("Concat", old, new, axis=2) for old, new in zip(caches[2 * layer : 2 * layer + 2], (k, v)))
        for name, value in (("keys", k), ("values", v)):
            net.output(value, f"new_{name}{layer}", [1, heads, "total", size // heads])
        x = net.node("Add", x, net.linear(net.attend(q, k, v, size // heads, mask), size, size))
        x = net.mlp(x, size)
    net.output(net.linear(net.norm(x, size), size, 100), "logits", [1, "steps", 100])
    return net.model()


MODELS: dict[str, Callable[..., onnx.ModelProto]] = {
    "classifier": classifier, "encoder": encoder, "detector": detector, "decoder": decoder,
}  # fmt: skip
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "classifier": [(1,), (2,), (3,), (7,), (16,)],
    "encoder": [(20,), (64,), (65,), (100,), (160,)],
    "detector": [(32, 32), (32, 48), (40, 40), (64, 32), (64, 64)],
    "decoder": [(5, 0), (1, 5), (1, 6), (1, 100), (3, 7)],
}
"""Five values of the open sizes of each model: n; length; height and width; steps and past."""


def feed(name: str, sizes: tuple[int, ...], seed: int = 0) -> dict[str, Array]:
    """Return random inputs of a model with these open sizes."""
    rng = np.random.default_rng(seed)
    if name == "decoder":
        steps, past = sizes
        caches = {f"{what}{layer}": rng.standard_normal((1, 4, past, 16)).astype(np.float32)
                  for layer in range(2) for what in ("keys", "values")}  # fmt: skip
        return {"tokens": rng.integers(0, 100, (1, steps)), **caches}
    shapes = {"classifier": (*sizes, 3, 16, 16), "encoder": (1, 40, *sizes), "detector": (1, 3, *sizes)}
    return {"mel" if name == "encoder" else "image": rng.standard_normal(shapes[name]).astype(np.float32)}


def main() -> None:
    """Write models to the folder that the first argument names."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or MODELS:
        onnx.save(MODELS[name](), folder / f"{name}.onnx")
        print(folder / f"{name}.onnx")


if __name__ == "__main__":
    main()
