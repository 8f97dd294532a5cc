"""Decoders of transformers with their caches, as optimum exports them, and quantised by onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array = NDArray[Any]
HIDDEN, HIDDEN_IN_BYTES = -1e4, -32.0
"""What is added to the scores of tokens that are not seen: the second where masked scores are bytes, whose steps it
sets. It is enough for powers of e that add nothing to a sum of float32."""


@dataclass
class DecoderNetwork:
    """A decoder in floats, with random weights: layers of attention and two products (GELU), or three (SwiGLU).

    rotary: positions turn queries and keys, else a table of `most` is added to the tokens. groups: heads of keys and
    values. hidden: see HIDDEN. fused: attention, its cache, mask and rotary positions are one operator, as
    onnxruntime-genai writes them, of at most `most` places; where they turn, positions are no input. Inputs: input_ids,
    position_ids [1, steps], attention_mask [1, total] int64,
    past_key_values.N.key and .value float32 [1, groups, past, inner]; outputs: logits float32 [1, steps, vocabulary],
    present.N.key and .value.
    """

    heads: int
    inner: int
    wide: int
    layers: int
    vocabulary: int
    most: int
    groups: int = 0
    rotary: bool = False
    seed: int = 0
    hidden: float = HIDDEN
    fused: bool = False
    nodes: list[onnx.NodeProto] = field(default_factory=list, init=False)
    constants: list[onnx.TensorProto] = field(default_factory=list, init=False)
    gated: set[str] = field(default_factory=set, init=False)
    """Names of the products of SwiGLU."""
    attending: set[str] = field(default_factory=set, init=False)
    """Names of products and sums in attention: of scales and masks."""
    turning: set[str] = field(default_factory=set, init=False)
    """Those of rotary positions."""
    stream: set[str] = field(default_factory=set, init=False)
    """Names of the sums of the residual stream."""
    known: list[onnx.ValueInfoProto] = field(default_factory=list, init=False)

    @property
    def norm(self) -> str:
        """The operator that normalises."""
        return "SimplifiedLayerNormalization" if self.rotary else "LayerNormalization"

    @property
    def counted(self) -> tuple[str, ...]:
        """Names of the inputs that have something for each token."""
        names = ("input_ids", "attention_mask", "position_ids")
        return names[:2] if self.fused and self.rotary else names

    @property
    def channels(self) -> int:
        """Channels of all heads."""
        return self.heads * self.inner

    def bytes_of_a_step(self, tokens: int) -> int:
        """Weights of all products and caches of so many tokens, in bytes of int8: what a step has to load."""
        across = self.groups * self.inner
        products = (2 * self.channels + 2 * across + (3 if self.rotary else 2) * self.wide) * self.channels
        return self.layers * (products + 2 * tokens * across) + self.channels * self.vocabulary

    def __post_init__(self) -> None:
        self.groups = self.groups or self.heads

    def model(self) -> onnx.ModelProto:
        """The ONNX model."""
        self.random, self.nodes, self.constants, self.known = np.random.default_rng(self.seed), [], [], []
        x = self._op("Gather", self._normal(self.vocabulary, self.channels), "input_ids")
        if not self.rotary:
            x = self._sum(x, self._op("Gather", self._normal(self.most, self.channels), "position_ids"))
        attention = self._fused() if self.fused else self._plain()
        for layer in range(self.layers):
            x = self._sum(x, attention(self._norm(x), layer))
            x = self._sum(x, self._products(self._norm(x)))
        logits = self._linear(self._norm(x), self.channels, self.vocabulary)
        self.nodes.append(helper.make_node("Identity", [logits], ["logits"]))
        graph = helper.make_graph(self.nodes, "decoder", *self._interface(), self.constants, value_info=self.known)
        opsets = [helper.make_opsetid("", 17), *[helper.make_opsetid("com.microsoft", 1)] * self.fused]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)

    def _interface(self) -> tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]:
        def tensor(name: str, *shape: int | str, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(name, kind, shape)

        whole = [(name, "total" if name == "attention_mask" else "steps")
                 for name in self.counted]  # fmt: skip
        inputs = [tensor(name, 1, size, kind=TensorProto.INT64) for name, size in whole]
        outputs = [tensor("logits", 1, "steps", self.vocabulary)]
        for layer, kind in caches(self.layers):
            inputs.append(tensor(f"past_key_values.{layer}.{kind}", 1, self.groups, "past", self.inner))
            outputs.append(tensor(f"present.{layer}.{kind}", 1, self.groups, "total", self.inner))
        return inputs, outputs

    def feed(self, steps: int, past: int, seed: int, valid: int | None = None) -> dict[str, Array]:
        """Random inputs; only the first `valid` tokens of the cache are seen."""
        random, valid = np.random.default_rng(seed), past if valid is None else valid
        seen = np.r_[np.arange(past) < valid, np.ones(steps, bool)]
        made = {
            "input_ids": random.integers(0, self.vocabulary, (1, steps)), "attention_mask": seen[None].astype(np.int64),
            "position_ids": valid + np.arange(steps)[None],
        }  # fmt: skip
        made = {name: made[name] for name in self.counted}
        for layer, kind in caches(self.layers):
            cache = random.normal(size=(1, self.groups, past, self.inner)).astype(np.float32)
            made[f"past_key_values.{layer}.{kind}"] = cache
        return made

    # Operators --------------------------------------------------------------------------------------------------

    def _op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        y = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [y], name=f"{kind}_{len(self.nodes)}", **attributes))
        return y

    def _constant(self, values: Any, dtype: Any = np.float32) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def _ints(self, *values: int) -> str:
        return self._constant(values, np.int64)

    def _normal(self, *shape: int) -> str:
        return self._constant(self.random.normal(size=shape))

    def _linear(self, x: str, inputs: int, outputs: int) -> str:
        return self._op("MatMul", x, self._constant(self.random.normal(size=(inputs, outputs)) / np.sqrt(inputs)))

    def _sum(self, x: str, y: str) -> str:
        both = self._op("Add", x, y)
        self.stream.add(self.nodes[-1].name)
        return both

    def _norm(self, x: str) -> str:
        scale = self._constant(1 + 0.2 * self.random.normal(size=self.channels))
        if not self.rotary:
            return self._op(self.norm, x, scale, self._constant(np.zeros(self.channels)), axis=-1)
        y = self._op(self.norm, x, scale, axis=-1, epsilon=1e-6)
        self.known.append(helper.make_tensor_value_info(y, TensorProto.FLOAT, [1, "steps", self.channels]))
        return y

    def _size(self, x: str, axis: int) -> str:
        return self._op("Gather", self._op("Shape", x), self._constant(axis, np.int64))

    def _mask(self) -> str:
        """[1, 1, steps, total]: 0 where a token is seen."""
        steps, total = self._size("input_ids", 1), self._size("attention_mask", 1)
        zero, one = self._constant(0, np.int64), self._constant(1, np.int64)
        places = self._op("Range", zero, total, one)
        own = self._op("Range", self._op("Sub", total, steps), total, one)
        before = self._op("GreaterOrEqual", self._op("Unsqueeze", own, self._ints(1)), places)
        valid = self._op("Unsqueeze", self._op("Cast", "attention_mask", to=TensorProto.BOOL), self._ints(1, 2))
        seen = self._op("And", valid, before)
        return self._op("Where", seen, self._constant(0.0), self._constant(self.hidden))

    def _turns(self) -> tuple[str, str]:
        """Cosine and sine of each position's angles, [1, 1, steps, inner]."""
        steps = 10_000.0 ** -(np.arange(0, self.inner, 2) / self.inner)
        places = self._op("Unsqueeze", self._op("Cast", "position_ids", to=TensorProto.FLOAT), self._ints(1, 3))
        angles = self._op("Mul", places, self._constant(np.tile(steps, 2)))
        return self._op("Cos", angles), self._op("Sin", angles)

    def _rotated(self, x: str, turns: tuple[str, str]) -> str:
        half = self.inner // 2
        low, high = (self._op("Slice", x, self._ints(a), self._ints(b), self._ints(3))
                     for a, b in ((0, half), (half, self.inner)))  # fmt: skip
        turned = self._op("Concat", self._op("Neg", high), low, axis=3)
        both = self._op("Add", self._op("Mul", x, turns[0]), self._op("Mul", turned, turns[1]))
        self.turning.update(node.name for node in self.nodes[-3:])
        return both

    def _split(self, x: str, heads: int) -> str:
        return self._op("Transpose", self._op("Reshape", x, self._ints(1, -1, heads, self.inner)), perm=(0, 2, 1, 3))

    def _plain(self) -> Callable[[str, int], str]:
        turns, mask = self._turns() if self.rotary else (), self._mask()
        return lambda x, layer: self._attention(x, mask, turns, layer)

    def _fused(self) -> Callable[[str, int], str]:
        """Attention of rows and the number of their layer, as one operator."""
        last = self._op("Sub", self._op("ReduceSum", "attention_mask", self._ints(1)), self._ints(1))
        shared = [self._op("Cast", x, to=TensorProto.INT32) for x in (last, self._size("attention_mask", 1))]
        if self.rotary:
            angles = np.arange(self.most)[:, None] * 10_000.0 ** -(np.arange(0, self.inner, 2) / self.inner)
            shared += [self._constant(np.cos(angles)), self._constant(np.sin(angles))]

        def attention(x: str, layer: int) -> str:
            sides = [self._linear(x, self.channels, heads * self.inner)
                     for heads in (self.heads, self.groups, self.groups)]  # fmt: skip
            past, present = ([f"{name}.{layer}.{kind}" for kind in ("key", "value")]
                             for name in ("past_key_values", "present"))  # fmt: skip
            y = self._op(
                "GroupQueryAttention", *sides, *past, *shared, domain="com.microsoft", num_heads=self.heads,
                kv_num_heads=self.groups, do_rotary=int(self.rotary),
            )  # fmt: skip
            self.nodes[-1].output.extend(present)
            self.known.append(helper.make_tensor_value_info(y, TensorProto.FLOAT, [1, "steps", self.channels]))
            return self._linear(y, self.channels, self.channels)

        return attention

    def _attention(self, x: str, mask: str, turns: tuple[str, ...], layer: int) -> str:
        own = {}
        queries = self._split(self._linear(x, self.channels, self.channels), self.heads)
        for kind in ("key", "value"):
            own[kind] = self._split(self._linear(x, self.channels, self.groups * self.inner), self.groups)
        if self.rotary:
            queries, own["key"] = self._rotated(queries, turns), self._rotated(own["key"], turns)  # type: ignore[arg-type]
        held = {}
        for kind, new in own.items():
            held[kind] = self._op("Concat", f"past_key_values.{layer}.{kind}", new, axis=2)
            self.nodes.append(helper.make_node("Identity", [held[kind]], [f"present.{layer}.{kind}"]))
        keys, values = (self._repeated(held[kind]) for kind in ("key", "value"))
        scores = self._op("MatMul", queries, self._op("Transpose", keys, perm=(0, 1, 3, 2)))
        scores = self._op("Add", self._op("Mul", scores, self._constant(self.inner**-0.5)), mask)
        self.attending.update(node.name for node in self.nodes[-2:])
        mixed = self._op("MatMul", self._op("Softmax", scores, axis=-1), values)
        joined = self._op("Reshape", self._op("Transpose", mixed, perm=(0, 2, 1, 3)), self._ints(1, -1, self.channels))
        return self._linear(joined, self.channels, self.channels)

    def _repeated(self, x: str) -> str:
        """Each head of [1, groups, total, inner] for all its queries."""
        if self.groups == self.heads:
            return x
        often = self._ints(1, 1, self.heads // self.groups, 1, 1)
        several = self._op("Expand", self._op("Unsqueeze", x, self._ints(2)), often)
        return self._op("Reshape", several, self._ints(1, self.heads, -1, self.inner))

    def _products(self, x: str) -> str:
        up = self._linear(x, self.channels, self.wide)
        if self.rotary:
            gate = self._linear(x, self.channels, self.wide)
            hidden = self._op("Mul", self._op("Mul", gate, self._op("Sigmoid", gate)), up)
            self.gated.update(node.name for node in self.nodes[-2:])
        else:
            both = self._op("Add", self._op("Erf", self._op("Mul", up, self._constant(0.5**0.5))), self._constant(1))
            hidden = self._op("Mul", self._op("Mul", up, both), self._constant(0.5))
        return self._linear(hidden, self.wide, self.channels)


def caches(layers: int) -> Iterator[tuple[int, str]]:
    """Layer and kind of each cache."""
    return ((layer, kind) for layer in range(layers) for kind in ("key", "value"))


DECODERS = {
    "gpt_10m": DecoderNetwork(heads=6, inner=64, wide=1536, layers=6, vocabulary=96, most=256),
    "llama_10m": DecoderNetwork(
        heads=6, groups=2, inner=64, wide=1024, layers=6, vocabulary=96, most=256, rotary=True, seed=1
    ),
}
"""A GPT of 10.6 million parameters, and one with normalised squares, rotary positions, grouped queries and SwiGLU."""


def quantised(
    decoder: DecoderNetwork, folder: Path, steps: int = 1, past: int = 127, attention: bool = False,
    norms: bool = False, rotary: bool = False,
) -> Path:  # fmt: skip
    """The file of the model after onnxruntime's static quantisation of its products, those of SwiGLU included;
    activations symmetric. rotary: of rotary positions, too. attention: of all that is in attention: these, masks,
    softmax. norms: of all that and the residual stream, so that all is in bytes between the embeddings and the logits.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class DecoderSamples(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            valid = past // 2 if attention else past  # which steps scores need to tell who is hidden
            self.left = iter([decoder.feed(steps, past, seed, valid) for seed in range(3)])

        def get_next(self) -> dict[str, Array] | None:
            return next(self.left, None)

    if attention:
        decoder = replace(decoder, hidden=HIDDEN_IN_BYTES)
    model = decoder.model()
    onnx.save(model, folder / "float.onnx")
    kinds, taken = ["MatMul", "Sigmoid", "Mul"], decoder.gated
    if rotary or attention:
        kinds, taken = [*kinds, "Add"], taken | decoder.turning
    if attention:
        kinds, taken = [*kinds, "Softmax"], taken | decoder.attending
    if norms:
        kinds, taken = [*kinds, decoder.norm], taken | decoder.stream
    quantize_static(
        folder / "float.onnx", folder / "quantised.onnx", DecoderSamples(), weight_type=QuantType.QInt8,
        activation_type=QuantType.QInt8, op_types_to_quantize=kinds, per_channel=True,
        nodes_to_exclude=[n.name for n in model.graph.node if n.op_type in ("Mul", "Add") and n.name not in taken],
        extra_options={"ActivationSymmetric": True},
    )  # fmt: skip
    return folder / "quantised.onnx"


BLOCK = 32
"""Activations that share a scale in MatMulNBits, as genai's models for CPUs have them."""


def in_blocks(decoder: DecoderNetwork, folder: Path) -> Path:
    """The file of the model with its products by constants as MatMulNBits of 4 bits, accuracy_level 4."""
    model = decoder.model()
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in constants:
            weights = numpy_helper.to_array(constants[node.input[1]]).T.astype(np.float32)
            rows, inner = weights.shape
            blocks = weights.reshape(rows, inner // BLOCK, BLOCK)
            scales = np.abs(blocks).max(axis=-1) / 7
            numbers = np.clip(np.rint(blocks / scales[..., None]) + 8, 0, 15).astype(np.uint8)
            made = {f"{node.name}_q": numbers[..., ::2] | numbers[..., 1::2] << 4, f"{node.name}_s": scales}
            model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in made.items())
            attrs = {"K": inner, "N": rows, "bits": 4, "block_size": BLOCK, "accuracy_level": 4}
            inputs = [node.input[0], *made]
            node.CopyFrom(helper.make_node(
                "MatMulNBits", inputs, node.output, node.name, domain="com.microsoft", **attrs
            ))  # fmt: skip
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, folder / "blocks.onnx")
    return folder / "blocks.onnx"
