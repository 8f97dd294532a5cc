"""Compare random attention on random Configs, and random decoders, with onnxruntime. A seed determines each model.

The tests run some of them; more are run by

python -m tests.compiler.attention_models --count 200 [--kind decoder]
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import pytest
from benchmarks.decoders import DecoderNetwork, quantised
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import celosia
from celosia.compiler.launch import blocks
from celosia.compiler.layer import Layer
from celosia.driver.generate.cached_attention import decompose_cached_attention
from celosia.driver.generate.roles import find_roles
from celosia.driver.generate.stepping import rewrite_to_return_new_rows
from celosia.driver.runtime import Runtime
from celosia.hw.spec.config import Config, ConfigError

from ..oracle import opened

Array = NDArray[Any]
F32 = np.float32
DEPTHS = ("inp_depth", "wgt_depth", "acc_depth", "vin_depth", "out_depth")


def drawn_config(rng: np.random.Generator, plain: bool) -> Config:
    """Draw a legal Config. plain: with softmax, square blocks and forwarding, which attention as a block requires."""
    while True:
        block = int(rng.choice([4, 4, 8, 8, 16]))
        fields: dict[str, Any] = {name: 1 << int(rng.integers(5, 11)) for name in DEPTHS}
        fields |= {
            "block_in": block, "block_out": block * (1 if plain else int(rng.choice([1, 1, 2]))),
            "bus_bytes": int(rng.choice([4, 8, 16, 32])),
            "softmax": int(rng.choice([1, 2, 4, 8] if plain else [0, 1, 2, 4, 8])),
            "forward": plain or bool(rng.random() < 0.7), "batch": 1 if plain else int(rng.choice([1, 1, 1, 2])),
            "taps": int(rng.choice([0, 3])), "ports": int(rng.choice([1, 2])), "lut_count": int(rng.choice([1, 2, 4])),
            "residual_cycles": int(rng.choice([1, 2, 4])), "par_depth": int(rng.choice([4, 8, 32])),
            "queue_depth": int(rng.choice([2, 4, 16])), "token_bits": int(rng.choice([2, 3, 8])), "alu": False,
            "weight_bits": int(rng.choice([8, 8, 4, 2])), "sums": bool(rng.random() < 0.2), "int32": False,
        }  # fmt: skip
        try:
            return Config(**fields)
        except ConfigError:
            continue


@dataclass
class Sketch:
    """A model in the making, quantised between all operators.

    names: names of the nodes: "own", "none" or "same". open_dims: by axis, the names of sizes that the model leaves
    open.
    """

    rng: np.random.Generator
    signed: bool
    symmetric: bool
    names: str
    open_dims: dict[int, str]
    plain: bool
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    feed: dict[str, Array] = field(default_factory=dict)
    shapes: dict[str, list[int | str]] = field(default_factory=dict)

    def choose(self, *choices: Any) -> Any:
        """Return one of the choices at random."""
        return choices[int(self.rng.integers(len(choices)))]

    def node(self, op: str, *inputs: str, **attrs: Any) -> str:
        """Append a node and return the name of its output."""
        out = f"t{len(self.nodes)}"
        name = {"own": f"{op}_{len(self.nodes)}", "none": "", "same": "node"}[self.names]
        self.nodes.append(helper.make_node(op, inputs, [out], name=name, **attrs))
        return out

    def constant(self, array: Any) -> str:
        """Add a constant and return its name."""
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def quantised(self, x: str, step: float, zero: int | None = None) -> str:
        """Append a quantisation of x to bytes and back to floats; return the name of the floats.

        zero: the zero point as uint8; by default random, or 128 if the sketch is symmetric.
        """
        kind = np.int8 if self.signed else np.uint8
        middle = 128 if self.symmetric else int(self.rng.integers(60, 190))
        at = (middle if zero is None else zero) - (128 if self.signed else 0)
        scale_and_zero = self.constant(F32(step)), self.constant(kind(at))
        return self.node("DequantizeLinear", self.node("QuantizeLinear", x, *scale_and_zero), *scale_and_zero)

    def again(self, x: str, like: str) -> str:
        """Append a quantisation of x with the scale and zero point of `like`."""
        (dequantiser,) = (node for node in self.nodes if node.output[0] == like)
        return self.node(
            "DequantizeLinear", self.node("QuantizeLinear", x, *dequantiser.input[1:]), *dequantiser.input[1:]
        )

    def input(self, *shape: int) -> str:
        """Add an input of normally distributed floats and return its name."""
        name = f"x{len(self.feed)}"
        self.feed[name] = self.rng.normal(0, 1, shape).astype(F32)
        self.shapes[name] = [self.open_dims.get(axis, size) for axis, size in enumerate(shape)]
        return name

    def model(self, output: str) -> onnx.ModelProto:
        """Return the model with this output."""
        inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in self.shapes.items()]
        graph = helper.make_graph(self.nodes, "", inputs, [onnx.ValueInfoProto(name=output)], self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@dataclass(frozen=True)
class Sizes:
    """Sizes of one attention.

    batch: sequences. shared: heads that have keys of their own. inner: channels of a key of one head. values: channels
    of a value of one head.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    shared: int
    inner: int
    values: int


def drawn_sizes(rng: np.random.Generator, cfg: Config, plain: bool) -> Sizes:
    """Draw sizes. plain: channels and keys fill whole channel groups; otherwise any numbers are drawn."""

    def size(most: int) -> int:
        return (
            cfg.group * int(rng.integers(1, most + 1))
            if plain or rng.random() < 0.5
            else int(rng.integers(1, 4 * cfg.group))
        )

    heads, inner, queries = int(rng.integers(1, 5)), size(2), int(rng.integers(1, 40))
    keys = queries if rng.random() < 0.3 and not plain else size(5)
    shared = (
        int(rng.choice([count for count in range(1, heads + 1) if heads % count == 0]))
        if rng.random() < 0.3 and not plain
        else heads
    )
    return Sizes(1 if plain else int(rng.choice([1, 1, 2])), queries, keys, heads, shared, inner,
                 inner if rng.random() < 0.6 else size(2))  # fmt: skip


def attention(s: Sketch, z: Sizes) -> str:
    """Append softmax(Q · Kᵀ) · V, written as one of several exporters writes it; return the name of the result.

    Queries, keys and values are inputs, or products of one input.
    """
    flat, projected = s.choose(False, False, True), s.choose(False, False, True)
    x = s.quantised(s.input(z.batch, z.keys, 8), 3 / 128) if projected else ""

    def heads(rows: int, count: int, size: int, perm: tuple[int, ...]) -> str:
        """Return heads [batch, count, rows, size], permuted by `perm`, of a tensor [batch, rows, count * size]."""
        if projected and rows == z.keys:
            w = s.quantised(s.constant(s.rng.normal(0, 0.3, (8, count * size)).astype(F32)), 0.01, 128)
            full = s.quantised(s.node("MatMul", x, w), 3 / 128)
        else:
            full = s.quantised(s.input(z.batch, rows, count * size), s.choose(3, 2, 4) / 128)
        parts = s.node("Reshape", full, s.constant(np.array([z.batch, rows, count, size])))
        if count < z.heads:
            repeats = z.heads // count
            parts = s.node("Unsqueeze", s.node("Transpose", parts, perm=(0, 2, 1, 3)), s.constant(np.array([2])))
            parts = s.node("Expand", parts, s.constant(np.array([z.batch, count, repeats, rows, size])))
            parts = s.node("Reshape", parts, s.constant(np.array([z.batch, z.heads, rows, size])))
            parts = s.again(parts, full)  # onnxruntime multiplies what it repeats in floats otherwise
            return parts if perm == (0, 2, 1, 3) else s.node("Transpose", parts, perm=(0, 1, 3, 2))
        if perm == (0, 2, 3, 1) and s.choose(0, 1):
            return s.node("Transpose", s.node("Transpose", parts, perm=(0, 2, 1, 3)), perm=(0, 1, 3, 2))
        return s.node("Transpose", parts, perm=perm)

    def folded(value: str, rows: int, columns: int) -> str:
        """Merge sequences and heads to one axis if the model writes them so."""
        return s.node("Reshape", value, s.constant(np.array([z.batch * z.heads, rows, columns]))) if flat else value

    q = folded(heads(z.queries, z.heads, z.inner, (0, 2, 1, 3)), z.queries, z.inner)
    k = folded(heads(z.keys, z.shared, z.inner, (0, 2, 3, 1)), z.inner, z.keys)
    reach = 0.6 * z.inner**0.5
    scores = s.quantised(s.node("MatMul", q, k), 3 * reach / 128)
    match s.choose("none", "div", "mul"):
        case "div":
            reach /= z.inner**0.5
            scores = s.quantised(s.node("Div", scores, s.constant(F32(z.inner**0.5))), 3 * reach / 128)
        case "mul":
            factor = s.quantised(s.constant(F32(0.5)), 0.5 / 127, 128)
            scores, reach = s.quantised(s.node("Mul", scores, factor), 2 * reach / 128), reach / 2
    if (kind := "none" if s.plain else s.choose("none", "row", "matrix", "causal")) != "none":
        hidden = s.rng.random((1, 1, 1 if kind == "row" else z.queries, z.keys)) < 0.3
        if kind == "causal":
            hidden = np.triu(np.ones((z.queries, z.keys), bool), 1)[None, None]
        mask = np.where(hidden, -10, 0).astype(F32)[(0,) if flat else ()]
        scores = s.quantised(s.node("Add", scores, s.quantised(s.constant(mask), 10 / 127, 128)), 6 * reach / 128)
    least = 0 if s.choose(0, 0, 1, 1, 1) else int(s.rng.integers(0, 255))
    shares = s.quantised(
        s.node("Softmax", scores, axis=s.choose(-1, 2 if flat else 3)),
        s.choose(1 / 255, 1 / 256, 1 / 100),
        128 if s.plain else least,
    )
    v = folded(heads(z.keys, z.shared, z.values, (0, 2, 1, 3)), z.keys, z.values)
    mixed = s.quantised(s.node("MatMul", shares, v), s.choose(1, 2) / 128)
    if flat:
        mixed = s.node("Reshape", mixed, s.constant(np.array([z.batch, z.heads, z.queries, z.values])))
    if s.choose(0, 1, 1):
        mixed = s.node("Transpose", mixed, perm=(0, 2, 1, 3))
        mixed = s.node("Reshape", mixed, s.constant(np.array([z.batch, z.queries, z.heads * z.values])))
    return mixed


@contextmanager
def blocks_wherever_they_fit(wanted: bool) -> Iterator[None]:
    """Let attention become a block even if the timing model finds that slower. wanted: False changes nothing."""
    original = blocks._ChainPartitioner.cycles_once

    def once(self: blocks._ChainPartitioner, layers: list[Layer]) -> float:
        cycles = original(self, layers)
        return min(cycles, 0) if layers and layers[-1].is_block and np.isfinite(cycles) else cycles

    with pytest.MonkeyPatch.context() as patch:
        if wanted:
            patch.setattr(blocks._ChainPartitioner, "cycles_once", once)
        yield


@dataclass(frozen=True)
class Outcome:
    """The comparison of one model with onnxruntime.

    bytes: compared elements. different: elements that differ. ops: operators of the layers on the accelerator.
    """

    bytes: int
    different: int
    ops: tuple[str, ...]
    cfg: Config


def drawn(seed: int) -> tuple[Sketch, onnx.ModelProto, Config]:
    """Return model number `seed` and its Config."""
    rng = np.random.default_rng(seed)
    plain = bool(rng.random() < 0.6)
    cfg = drawn_config(rng, plain)
    z = drawn_sizes(rng, cfg, plain)
    signed = plain or bool(rng.random() < 0.5)
    open_dims = {0: "batch"} if rng.random() < 0.2 else {}
    s = Sketch(
        rng, signed, signed or bool(rng.random() < 0.3), str(rng.choice(["own", "none", "same"])), open_dims, plain
    )
    return s, s.model(attention(s, z)), cfg


def outcome(seed: int, check: bool = True) -> Outcome:
    """Compile model number `seed`, run it on the functional simulator, and compare it with onnxruntime.

    check: whether `celosia.compile` checks the program.
    """
    s, model, cfg = drawn(seed)
    nameless = onnx.ModelProto.FromString(model.SerializeToString())
    for node in nameless.graph.node:
        node.name = ""  # onnxruntime refuses equal names
    (expected,) = opened(nameless, int8=True).run(None, s.feed)
    with blocks_wherever_they_fit(seed % 4 > 0):
        shapes = {name: array.shape for name, array in s.feed.items()}
        program = celosia.compile(model, cfg, shapes=shapes, check=check)
    (output,) = Runtime(program, "functional").run(s.feed).outputs.values()
    assert (output.dtype, output.shape) == (expected.dtype, expected.shape)
    ops = tuple(layer.op for launch in program.launches for layer in launch.layers)
    return Outcome(expected.size, int((output != expected).sum()), ops, cfg)


def decoder_outcome(seed: int) -> Outcome:
    """Compile decoder number `seed`, run it, and compare it with onnxruntime.

    Its cache holds bytes, some tokens are masked, and its attention is in bytes, in floats or one operator.
    """
    rng = np.random.default_rng(seed)
    cfg, rotary, groups = drawn_config(rng, rng.random() < 0.8), bool(rng.random() < 0.5), int(rng.integers(1, 3))
    inner = 2 * int(rng.integers(1, 2 * cfg.group + 1)) if rng.random() < 0.5 else cfg.group * int(rng.choice([2, 4]))
    network = DecoderNetwork(
        heads=groups * int(rng.integers(1, 4)), groups=groups, inner=inner, wide=16, layers=1, vocabulary=16, most=80,
        rotary=rotary, seed=seed,
    )  # fmt: skip
    new, past, in_bytes = int(rng.choice([1, 1, 2, 5])), int(rng.integers(1, 40)), bool(rng.random() < 0.7)
    network = replace(network, fused=not in_bytes and inner % 16 == 0)
    with TemporaryDirectory() as folder:
        proto = decompose_cached_attention(onnx.load(quantised(network, Path(folder), past=20, attention=in_bytes)))
    step = rewrite_to_return_new_rows(proto, find_roles(proto))
    feed = network.feed(new, past, seed, past + new)
    for name, dtype in step.dtypes.items():
        if dtype == "int8":
            feed[name] = rng.integers(-128, 128, feed[name].shape).astype(np.int8)
    feed["attention_mask"][0, int(rng.integers(0, past + 1)) : past] = 0
    with blocks_wherever_they_fit(seed % 2 > 0):
        program = celosia.compile(
            step.proto, cfg, shapes={name: array.shape for name, array in feed.items()}, caches=list(step.dtypes)
        )
    names = [tensor.name for tensor in program.outputs]
    outputs, size, different = Runtime(program, "functional").run(feed).outputs, 0, 0
    for name, expected in zip(names, opened(step.proto, int8=True).run(names, feed)):
        assert (outputs[name].dtype, outputs[name].shape) == (expected.dtype, expected.shape)
        size, different = size + expected.size, different + int((outputs[name] != expected).sum())
    return Outcome(size, different, tuple(layer.op for launch in program.launches for layer in launch.layers), cfg)


KINDS = {"attention": outcome, "decoder": decoder_outcome}


def main() -> None:
    """Print how many elements differ."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=200, help="models")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--kind", choices=KINDS, default="attention")
    args = parser.parse_args()
    ops, total = Counter[str](), 0
    for seed in range(args.seed, args.seed + args.count):
        try:
            result = KINDS[args.kind](seed)
        except Exception as error:
            print(f"seed {seed}: {type(error).__name__}: {error}"[:600], flush=True)
            continue
        total += result.bytes
        ops.update(set(result.ops) or {"nothing"})
        if result.different:
            print(
                f"seed {seed}: {result.different} of {result.bytes} differ; {set(result.ops)}; {result.cfg}",
                flush=True,
            )
    print(f"{args.count} models, {total:,} elements; models with {dict(ops)}")


if __name__ == "__main__":
    main()
