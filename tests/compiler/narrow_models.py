"""Random models with weights of 2, 4 and 8 bits, beside onnxruntime, by a seed each.

The tests run some of each kind; many more, with what docs/low_precision.md says of them, are

    python -m tests.compiler.narrow_models --count 1000
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import celosia
from celosia.compiler.ops.contrib import BYTES_OF_BLOCKS
from celosia.driver.runtime import Runtime
from celosia.hw.spec.config import PRESETS, Config

from ..oracle import opened

Array = NDArray[Any]
TYPES = {"int2": TensorProto.INT2, "uint2": TensorProto.UINT2, "int4": TensorProto.INT4, "uint4": TensorProto.UINT4}
OPSETS = {2: 25, 4: 21}
F32 = np.float32


def limits(kind: str) -> tuple[int, int]:
    """The least value of an integer type, and one more than the largest."""
    bits = int(kind[-1])
    return (-(1 << bits - 1), 1 << bits - 1) if kind[0] == "i" else (0, 1 << bits)


@dataclass
class Sketch:
    """A model that is being drawn: nodes, constants, inputs by name, and what to feed it. wide: integers of few bits,
    signed or not, are written as int8, for an onnxruntime that has no integer operators of others."""

    seed: int
    wide: bool = False
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    feed: dict[str, Array] = field(default_factory=dict)
    shapes: dict[str, list[int | str]] = field(default_factory=dict)
    opset: int = 21

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def of(self, *choices: Any) -> Any:
        """One of them."""
        return choices[int(self.rng.integers(len(choices)))]

    def int(self, low: int, high: int) -> int:
        """Both ends included."""
        return int(self.rng.integers(low, high + 1))

    def node(self, op: str, *inputs: str, domain: str = "", **attrs: Any) -> str:
        """A node without a name; the name of its output."""
        out = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [out], domain=domain, **attrs))
        return out

    def constant(self, array: Array) -> str:
        """Its name."""
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def narrow(self, array: Array, kind: str) -> str:
        """A constant of few bits."""
        name, number = f"c{len(self.constants)}", TensorProto.INT8 if self.wide else TYPES[kind]
        self.opset = max(self.opset, OPSETS[int(kind[-1])])
        self.constants.append(helper.make_tensor(name, number, array.shape, array.flatten().tolist()))
        return name

    def input(self, shape: tuple[int, ...], open_batch: bool) -> str:
        """Normal floats; open_batch: the model does not say how many there are along the first axis."""
        name = f"x{len(self.feed)}"
        self.feed[name] = self.rng.normal(0, 2, shape).astype(F32)
        self.shapes[name] = [*("n" for _ in shape[:1] if open_batch), *shape[open_batch:]]
        return name

    def model(self, output: str) -> onnx.ModelProto:
        """The whole."""
        graph = helper.make_graph(
            self.nodes, "narrow",
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in self.shapes.items()],
            [onnx.ValueInfoProto(name=output)], self.constants,
        )  # fmt: skip
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=12)


# QDQ: weights by tensor or by channel -------------------------------------------------------------------------------


def weights(s: Sketch, kind: str, shape: tuple[int, ...], axis: int | None) -> tuple[str, Array]:
    """DequantizeLinear of random integers, and its scales: one, or one for each place along `axis`."""
    low, high = limits(kind)
    dims = () if axis is None else (shape[axis],)
    scale = s.rng.uniform(0.01, 0.1, dims).astype(F32)
    values = s.rng.integers(low, high, shape)
    zeros = s.rng.integers(low, high, dims if s.of(0, 1) else ()) * np.ones(dims, np.int64)
    inputs = [s.narrow(values, kind), s.constant(scale)]
    if s.of(0, 1):
        inputs.append(s.narrow(zeros, kind))
    attrs = {} if axis is None else {"axis": axis - s.of(0, len(shape))}
    return s.node("DequantizeLinear", *inputs, **attrs), scale


def product(s: Sketch, *ops: str) -> tuple[str, type]:
    """One of `ops` of a quantised tensor and weights of few bits, some with a bias; and the type of the former."""
    kind, op, activations = s.of(*TYPES), s.of(*ops), s.of(np.int8, np.uint8)
    step = s.constant(F32(s.rng.uniform(0.02, 0.1))), s.constant(activations(s.int(0, 40)))
    n, batch = s.int(1, 9), s.int(1, 3)
    if op == "Conv":
        group, each = s.of(1, 1, 2, 3), s.int(1, 5)
        n *= group
        kernel = [s.int(1, 3) for _ in range(s.of(1, 2, 2))]
        x_shape, w_shape = (batch, group * each, *(s.int(3, 7) for _ in kernel)), (n, each, *kernel)
        axis, attrs = 0, {"group": group, "strides": [s.int(1, 2) for _ in kernel]}
    else:
        inner, turned, batch = s.int(1, 40), op == "Gemm" and s.of(0, 1), s.int(16, 20)
        x_shape = (batch, 3, inner) if op == "MatMul" and s.of(0, 1) else (batch, inner)
        w_shape, axis, attrs = ((n, inner), 0, {"transB": 1}) if turned else ((inner, n), 1, {})
    x = s.input(x_shape, s.of(False, True))
    w, scale = weights(s, kind, w_shape, s.of(None, axis))
    inputs = [s.node("DequantizeLinear", s.node("QuantizeLinear", x, *step), *step), w]
    if op != "MatMul" and s.of(0, 1):
        x_scale = numpy_helper.to_array(s.constants[0])
        inputs.append(s.node("DequantizeLinear", s.constant(s.rng.integers(-500, 500, n).astype(np.int32)),
                             s.constant((x_scale * scale * np.ones(n, F32)).astype(F32)), axis=0))  # fmt: skip
    return s.node(op, *inputs, **attrs), activations


def qdq(s: Sketch) -> onnx.ModelProto:
    """A Conv, MatMul or Gemm between quantised tensors, some with a Relu."""
    y, activations = product(s, "Conv", "MatMul", "Gemm")
    y = s.node("Relu", y) if s.of(0, 1) else y
    to = s.constant(F32(s.rng.uniform(0.02, 0.3))), s.constant(activations(s.int(0, 40)))
    return s.model(s.node("DequantizeLinear", s.node("QuantizeLinear", y, *to), *to))


def to_floats(s: Sketch) -> onnx.ModelProto:
    """A MatMul or Gemm of a quantised tensor whose result stays float."""
    return s.model(product(s, "MatMul", "Gemm")[0])


# Blocks -------------------------------------------------------------------------------------------------------------


def blocks(s: Sketch) -> onnx.ModelProto:
    """A Conv, MatMul or Gemm by weights in blocks along any axis, the last of which may be cut off; of floats, or of
    what was quantised."""
    kind, op, n = s.of(*TYPES), s.of("Conv", "MatMul", "Gemm"), s.int(1, 9)
    if op == "Conv":
        x_shape, w_shape = (s.int(1, 2), s.int(1, 9), 5, 6), (n, 0, s.int(1, 3), s.int(1, 3))
        w_shape = (n, x_shape[1], *w_shape[2:])
    else:
        inner = s.int(1, 100)
        n = 4 * n if kind[-1] == "2" else n  # onnxruntime 1.31 reads 2 bits of other numbers of columns wrongly
        x_shape, w_shape = (s.int(32, 40), inner), (inner, n)
    axis, (low, high) = s.int(0, len(w_shape) - 1), limits(kind)
    size = s.int(1, w_shape[axis]) if s.of(0, 1) else s.of(16, 32, 64)
    dims = [-(-length // size) if place == axis else length for place, length in enumerate(w_shape)]
    inputs = [
        s.narrow(s.rng.integers(low, high, w_shape), kind),
        s.constant(s.rng.uniform(0.01, 0.1, dims).astype(F32)),
    ]
    if s.of(0, 1):
        inputs.append(s.narrow(s.rng.integers(low, high, dims), kind))
    x = s.input(x_shape, s.of(False, True))
    if s.of(0, 1) and kind[-1] == "4":  # of bytes and 2 bits onnxruntime 1.31 makes operators that it then refuses
        step = s.constant(F32(0.05)), s.constant(np.uint8(120))
        x = s.node("DequantizeLinear", s.node("QuantizeLinear", x, *step), *step)
    w = s.node("DequantizeLinear", *inputs, axis=axis - s.of(0, len(w_shape)), block_size=size)
    return s.model(s.node(op, x, w))


# Operators of onnxruntime ---------------------------------------------------------------------------------------------


def packed(values: Array, bits: int) -> Array:
    """Numbers of `bits` bits along the last axis, the low bits first."""
    count = 8 // bits
    padded = np.pad(values, [*[(0, 0)] * (values.ndim - 1), (0, -values.shape[-1] % count)])
    parts = padded.reshape(*padded.shape[:-1], -1, count)
    return np.bitwise_or.reduce(parts << np.arange(count) * bits, axis=-1).astype(np.uint8)


def n_bits(s: Sketch) -> onnx.ModelProto:
    """MatMulNBits at accuracy_level 0 or 4."""
    bits, size, n = s.of(2, 4, 8), s.of(16, 32, 64, 128), s.int(1, 33)
    inner = s.int(1, 3 * size)
    count = -(-inner // size)
    x = s.input(s.of((s.int(32, 40), inner), (2, 17, inner)), s.of(False, True))
    inputs = [x, s.constant(packed(s.rng.integers(0, 1 << bits, (n, count, size)), bits)),
              s.constant(s.rng.uniform(0.01, 0.1, (n, count)).astype(F32))]  # fmt: skip
    if s.of(0, 1):
        inputs.append(s.constant(packed(s.rng.integers(0, 1 << bits, (n, count)), bits)))
    attrs = {"K": inner, "N": n, "bits": bits, "block_size": size, "accuracy_level": s.of(0, 4)}
    return s.model(s.node("MatMulNBits", *inputs, domain="com.microsoft", **attrs))


CHECKED = 10
"""Of so many models one is checked by the compiler, too, where many are drawn."""
SIZES_EACH = 5
"""Models of sums with the same sizes."""


def sums(s: Sketch) -> onnx.ModelProto:
    """MatMulNBits at accuracy_level 4, in blocks of which onnxruntime multiplies bytes, perhaps with a bias. Several
    have the same sizes, and so the same kernels."""
    of = Sketch(s.seed // SIZES_EACH)
    bits, n = of.of(2, 4, 8), of.int(1, 70)
    size = of.of(*BYTES_OF_BLOCKS[bits])
    inner = of.int(1, 3 * size)
    count = -(-inner // size)
    x = s.input(of.of((1, inner), (of.int(2, 20), inner), (2, 3, inner)), False)
    inputs = [x, s.constant(packed(s.rng.integers(0, 1 << bits, (n, count, size)), bits)),
              s.constant(s.rng.uniform(0.01, 0.1, (n, count)).astype(F32)),
              s.constant(packed(s.rng.integers(0, 1 << bits, (n, count)), bits)) if s.of(0, 1) else "",
              "", s.constant(s.rng.normal(size=n).astype(F32)) if s.of(0, 1) else ""]  # fmt: skip
    while not inputs[-1]:
        inputs.pop()
    attrs = {"K": inner, "N": n, "bits": bits, "block_size": size, "accuracy_level": 4}
    return s.model(s.node("MatMulNBits", *inputs, domain="com.microsoft", **attrs))


def gather(s: Sketch) -> onnx.ModelProto:
    """GatherBlockQuantized of packed bytes, which the input chooses from."""
    bits, size, rows = s.of(2, 4, 8), s.of(16, 32, 64), s.int(1, 7)
    width = 4 * s.int(1, 40)
    count = -(-width // size)
    inputs = [s.constant(packed(s.rng.integers(0, 1 << bits, (rows, width)), bits)), "",
              s.constant(s.rng.uniform(0.01, 0.1, (rows, count)).astype(F32))]  # fmt: skip
    if s.of(0, 1):
        inputs.append(s.constant(packed(s.rng.integers(0, 1 << bits, (rows, count)), bits)))
    x = s.input((s.int(1, 4),), s.of(False, True))
    s.feed[x] = s.rng.integers(-rows, rows, s.feed[x].shape).astype(F32)
    inputs[1] = s.node("Cast", x, to=TensorProto.INT64)
    return s.model(s.node("GatherBlockQuantized", *inputs, domain="com.microsoft", bits=bits, block_size=size))


KINDS: dict[str, Callable[[Sketch], onnx.ModelProto]] = {
    "qdq": qdq, "to_floats": to_floats, "blocks": blocks, "n_bits": n_bits, "gather": gather,
    "sums": sums,
}  # fmt: skip
IN_BYTES = ("qdq", "to_floats")
"""Kinds of which the reference is onnxruntime with the same integers in bytes."""
EXACT = ("qdq", "gather")
"""Kinds whose results are the same bits."""
CLOSE = 2e-6
"""Of the root mean square: what others may be apart, by the order of float32 sums."""
CLOSE_N_BITS = 4e-6
"""The same of MatMulNBits at level 4, whose bytes we multiply as floats (docs/numerics.md)."""


def bound(kind: str) -> float:
    """How far from onnxruntime's the results of a kind may be, as a part of their root mean square."""
    return 0 if kind in EXACT else CLOSE_N_BITS if kind == "n_bits" else CLOSE


# Comparison -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Of one model: elements, those that differ from onnxruntime's, by how much of the root mean square at most, and
    those that differ from what onnxruntime makes of the floats; whether the accelerator has a layer of it."""

    elements: int
    different: int
    apart: float
    from_floats: int
    accelerated: bool


def by_onnxruntime(model: onnx.ModelProto, feed: dict[str, Array]) -> Array:
    session = opened(model, int8=True, qdq_matmulnbits_accuracy_level="4")
    (y,) = session.run(None, feed)
    return np.asarray(y)


def apart(a: Array, b: Array) -> float:
    """The largest difference, as a part of the root mean square of b, which is not nothing."""
    return float(np.abs(a.astype(np.float64) - b).max() / np.sqrt((b.astype(np.float64) ** 2).mean() + 1e-30))


def config_for(kind: str, seed: int, name: str) -> Config:
    """The preset `name`, but for sums one of several with the hardware for these, perhaps beside packed weights."""
    if kind != "sums":
        return PRESETS[name]
    return replace(PRESETS[("tiny", "pynq", "zcu104")[seed // SIZES_EACH % 3]], sums=True, weight_bits=(8, 4)[seed % 2])


def outcome(kind: str, seed: int, config: str = "tiny", check: bool = True) -> Outcome:
    """Model number `seed` of a kind. check: of `celosia.compile`, which compiles kernels of the model's own operators
    for that."""
    drawn, twin = Sketch(seed), Sketch(seed, wide=kind in IN_BYTES)
    model, reference = KINDS[kind](drawn), KINDS[kind](twin)
    wanted = by_onnxruntime(reference, twin.feed)
    shapes = {name: array.shape for name, array in drawn.feed.items()}
    program = celosia.compile(model, config_for(kind, seed, config), shapes=shapes, check=check)
    (found,) = Runtime(program).run(drawn.feed).outputs.values()
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    floats = by_onnxruntime(model, drawn.feed) if kind in IN_BYTES and floats_run(drawn) else wanted
    layers = any(row["place"] == "accelerator" for row in program.placements)
    return Outcome(
        wanted.size, int((found != wanted).sum()), apart(found, wanted), int((found != floats).sum()), layers
    )


def floats_run(s: Sketch) -> bool:
    """Whether onnxruntime 1.31 runs the model as it is: it refuses integer operators of 2 bits, which it makes."""
    return s.opset == OPSETS[4]


def main() -> None:
    """Counts of each kind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1000, help="models of each kind")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS), help="by default all")
    args = parser.parse_args()
    for kind in args.kinds:
        total: Counter[str] = Counter()
        largest = 0.0
        for seed in range(args.seed, args.seed + args.count):
            one = outcome(kind, seed, check=seed % CHECKED == 0)
            largest = max(largest, one.apart)
            total.update(elements=one.elements, different=one.different, floats=one.from_floats, layers=one.accelerated)
        print(f"{kind:9} {args.count} models, {total['elements']:,} elements: {total['different']:,} differ, at most "
              f"{largest:.1e} of the root mean square; {total['floats']:,} differ from products of floats; "
              f"{total['layers']:,} on the accelerator", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
