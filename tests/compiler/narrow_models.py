"""Compare random models with weights of 2, 4 and 8 bits with onnxruntime. A seed determines each model.

The tests run some models of each kind. docs/low_precision.md quotes more of them, which are run by

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
    """Return the least value of an integer type, and one more than the largest."""
    bits = int(kind[-1])
    return (-(1 << bits - 1), 1 << bits - 1) if kind[0] == "i" else (0, 1 << bits)


@dataclass
class Sketch:
    """A model in the making: nodes, constants, inputs by name, and the arrays for them.

    wide: integers of few bits are written as int8, because onnxruntime has integer operators for bytes only.
    """

    seed: int
    wide: bool = False
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    feed: dict[str, Array] = field(default_factory=dict)
    shapes: dict[str, list[int | str]] = field(default_factory=dict)
    opset: int = 21

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def choose(self, *choices: Any) -> Any:
        """Return one of the choices at random."""
        return choices[int(self.rng.integers(len(choices)))]

    def int(self, low: int, high: int) -> int:
        """Draw an integer from `low` to `high`, both included."""
        return int(self.rng.integers(low, high + 1))

    def node(self, op: str, *inputs: str, domain: str = "", **attrs: Any) -> str:
        """Append a node without a name and return the name of its output."""
        out = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [out], domain=domain, **attrs))
        return out

    def constant(self, array: Array) -> str:
        """Add a constant and return its name."""
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def narrow(self, array: Array, kind: str) -> str:
        """Add a constant of 2 or 4 bits and return its name."""
        name, number = f"c{len(self.constants)}", TensorProto.INT8 if self.wide else TYPES[kind]
        self.opset = max(self.opset, OPSETS[int(kind[-1])])
        self.constants.append(helper.make_tensor(name, number, array.shape, array.flatten().tolist()))
        return name

    def input(self, shape: tuple[int, ...], open_batch: bool) -> str:
        """Add an input of normally distributed floats. open_batch: the model leaves the size of the first axis open."""
        name = f"x{len(self.feed)}"
        self.feed[name] = self.rng.normal(0, 2, shape).astype(F32)
        self.shapes[name] = [*("n" for _ in shape[:1] if open_batch), *shape[open_batch:]]
        return name

    def model(self, output: str) -> onnx.ModelProto:
        """Return the model with this output."""
        graph = helper.make_graph(
            self.nodes, "narrow",
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in self.shapes.items()],
            [onnx.ValueInfoProto(name=output)], self.constants,
        )  # fmt: skip
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=12)


# QDQ: weights by tensor or by channel -------------------------------------------------------------------------------


def weights(s: Sketch, kind: str, shape: tuple[int, ...], axis: int | None) -> tuple[str, Array]:
    """Append a DequantizeLinear of random integers; return its name and its scales.

    axis: there is a scale for each index of this axis; None: one scale for all.
    """
    low, high = limits(kind)
    dims = () if axis is None else (shape[axis],)
    scale = s.rng.uniform(0.01, 0.1, dims).astype(F32)
    values = s.rng.integers(low, high, shape)
    zeros = s.rng.integers(low, high, dims if s.choose(0, 1) else ()) * np.ones(dims, np.int64)
    inputs = [s.narrow(values, kind), s.constant(scale)]
    if s.choose(0, 1):
        inputs.append(s.narrow(zeros, kind))
    attrs = {} if axis is None else {"axis": axis - s.choose(0, len(shape))}
    return s.node("DequantizeLinear", *inputs, **attrs), scale


def product(s: Sketch, *ops: str) -> tuple[str, type]:
    """Append one of `ops` on a quantised tensor and weights of few bits; return its name and the activations' type."""
    kind, op, activations = s.choose(*TYPES), s.choose(*ops), s.choose(np.int8, np.uint8)
    step = s.constant(F32(s.rng.uniform(0.02, 0.1))), s.constant(activations(s.int(0, 40)))
    n, batch = s.int(1, 9), s.int(1, 3)
    if op == "Conv":
        group, inputs_per_group = s.choose(1, 1, 2, 3), s.int(1, 5)
        n *= group
        kernel = [s.int(1, 3) for _ in range(s.choose(1, 2, 2))]
        x_shape, w_shape = (
            (batch, group * inputs_per_group, *(s.int(3, 7) for _ in kernel)),
            (n, inputs_per_group, *kernel),
        )
        axis, attrs = 0, {"group": group, "strides": [s.int(1, 2) for _ in kernel]}
    else:
        inner, transposed, batch = s.int(1, 40), op == "Gemm" and s.choose(0, 1), s.int(16, 20)
        x_shape = (batch, 3, inner) if op == "MatMul" and s.choose(0, 1) else (batch, inner)
        w_shape, axis, attrs = ((n, inner), 0, {"transB": 1}) if transposed else ((inner, n), 1, {})
    x = s.input(x_shape, s.choose(False, True))
    w, scale = weights(s, kind, w_shape, s.choose(None, axis))
    inputs = [s.node("DequantizeLinear", s.node("QuantizeLinear", x, *step), *step), w]
    if op != "MatMul" and s.choose(0, 1):
        x_scale = numpy_helper.to_array(s.constants[0])
        inputs.append(s.node("DequantizeLinear", s.constant(s.rng.integers(-500, 500, n).astype(np.int32)),
                             s.constant((x_scale * scale * np.ones(n, F32)).astype(F32)), axis=0))  # fmt: skip
    return s.node(op, *inputs, **attrs), activations


def qdq(s: Sketch) -> onnx.ModelProto:
    """Return a Conv, MatMul or Gemm between quantised tensors, some with a Relu."""
    y, activations = product(s, "Conv", "MatMul", "Gemm")
    y = s.node("Relu", y) if s.choose(0, 1) else y
    scale_and_zero = s.constant(F32(s.rng.uniform(0.02, 0.3))), s.constant(activations(s.int(0, 40)))
    return s.model(s.node("DequantizeLinear", s.node("QuantizeLinear", y, *scale_and_zero), *scale_and_zero))


def to_floats(s: Sketch) -> onnx.ModelProto:
    """Return a MatMul or Gemm of a quantised tensor; the result stays float."""
    return s.model(product(s, "MatMul", "Gemm")[0])


# Blocks -------------------------------------------------------------------------------------------------------------


def blocks(s: Sketch) -> onnx.ModelProto:
    """Return a Conv, MatMul or Gemm of floats or quantised values, with weights in blocks along any axis.

    The last block may be shorter than the others.
    """
    kind, op, n = s.choose(*TYPES), s.choose("Conv", "MatMul", "Gemm"), s.int(1, 9)
    if op == "Conv":
        x_shape, w_shape = (s.int(1, 2), s.int(1, 9), 5, 6), (n, 0, s.int(1, 3), s.int(1, 3))
        w_shape = (n, x_shape[1], *w_shape[2:])
    else:
        inner = s.int(1, 100)
        n = 4 * n if kind[-1] == "2" else n  # onnxruntime 1.31 reads 2 bits of other numbers of columns wrongly
        x_shape, w_shape = (s.int(32, 40), inner), (inner, n)
    axis, (low, high) = s.int(0, len(w_shape) - 1), limits(kind)
    size = s.int(1, w_shape[axis]) if s.choose(0, 1) else s.choose(16, 32, 64)
    dims = [-(-length // size) if place == axis else length for place, length in enumerate(w_shape)]
    inputs = [
        s.narrow(s.rng.integers(low, high, w_shape), kind),
        s.constant(s.rng.uniform(0.01, 0.1, dims).astype(F32)),
    ]
    if s.choose(0, 1):
        inputs.append(s.narrow(s.rng.integers(low, high, dims), kind))
    x = s.input(x_shape, s.choose(False, True))
    if (
        s.choose(0, 1) and kind[-1] == "4"
    ):  # with bytes and 2 bits, onnxruntime 1.31 fuses operators that it then refuses
        step = s.constant(F32(0.05)), s.constant(np.uint8(120))
        x = s.node("DequantizeLinear", s.node("QuantizeLinear", x, *step), *step)
    w = s.node("DequantizeLinear", *inputs, axis=axis - s.choose(0, len(w_shape)), block_size=size)
    return s.model(s.node(op, x, w))


# Operators of onnxruntime ---------------------------------------------------------------------------------------------


def packed(values: Array, bits: int) -> Array:
    """Pack integers of `bits` bits along the last axis into bytes, the low bits first."""
    count = 8 // bits
    padded = np.pad(values, [*[(0, 0)] * (values.ndim - 1), (0, -values.shape[-1] % count)])
    parts = padded.reshape(*padded.shape[:-1], -1, count)
    return np.bitwise_or.reduce(parts << np.arange(count) * bits, axis=-1).astype(np.uint8)


def n_bits(s: Sketch) -> onnx.ModelProto:
    """Return a MatMulNBits at accuracy_level 0 or 4."""
    bits, size, n = s.choose(2, 4, 8), s.choose(16, 32, 64, 128), s.int(1, 33)
    inner = s.int(1, 3 * size)
    count = -(-inner // size)
    x = s.input(s.choose((s.int(32, 40), inner), (2, 17, inner)), s.choose(False, True))
    inputs = [x, s.constant(packed(s.rng.integers(0, 1 << bits, (n, count, size)), bits)),
              s.constant(s.rng.uniform(0.01, 0.1, (n, count)).astype(F32))]  # fmt: skip
    if s.choose(0, 1):
        inputs.append(s.constant(packed(s.rng.integers(0, 1 << bits, (n, count)), bits)))
    attrs = {"K": inner, "N": n, "bits": bits, "block_size": size, "accuracy_level": s.choose(0, 4)}
    return s.model(s.node("MatMulNBits", *inputs, domain="com.microsoft", **attrs))


CHECKED = 10
"""Let the compiler check every tenth model if many are drawn."""
SIZES_EACH = 5
"""How many consecutive models of `sums` have the same sizes."""


def sums(s: Sketch) -> onnx.ModelProto:
    """Return a MatMulNBits at accuracy_level 4, perhaps with a bias, for which onnxruntime multiplies bytes.

    Consecutive models have the same sizes, and so the same kernels.
    """
    sizes = Sketch(s.seed // SIZES_EACH)
    bits, n = sizes.choose(2, 4, 8), sizes.int(1, 70)
    size = sizes.choose(*BYTES_OF_BLOCKS[bits])
    inner = sizes.int(1, 3 * size)
    count = -(-inner // size)
    x = s.input(sizes.choose((1, inner), (sizes.int(2, 20), inner), (2, 3, inner)), False)
    inputs = [x, s.constant(packed(s.rng.integers(0, 1 << bits, (n, count, size)), bits)),
              s.constant(s.rng.uniform(0.01, 0.1, (n, count)).astype(F32)),
              s.constant(packed(s.rng.integers(0, 1 << bits, (n, count)), bits)) if s.choose(0, 1) else "",
              "", s.constant(s.rng.normal(size=n).astype(F32)) if s.choose(0, 1) else ""]  # fmt: skip
    while not inputs[-1]:
        inputs.pop()
    attrs = {"K": inner, "N": n, "bits": bits, "block_size": size, "accuracy_level": 4}
    return s.model(s.node("MatMulNBits", *inputs, domain="com.microsoft", **attrs))


def gather(s: Sketch) -> onnx.ModelProto:
    """Return a GatherBlockQuantized of packed bytes, whose indices are an input."""
    bits, size, rows = s.choose(2, 4, 8), s.choose(16, 32, 64), s.int(1, 7)
    width = 4 * s.int(1, 40)
    count = -(-width // size)
    inputs = [s.constant(packed(s.rng.integers(0, 1 << bits, (rows, width)), bits)), "",
              s.constant(s.rng.uniform(0.01, 0.1, (rows, count)).astype(F32))]  # fmt: skip
    if s.choose(0, 1):
        inputs.append(s.constant(packed(s.rng.integers(0, 1 << bits, (rows, count)), bits)))
    x = s.input((s.int(1, 4),), s.choose(False, True))
    s.feed[x] = s.rng.integers(-rows, rows, s.feed[x].shape).astype(F32)
    inputs[1] = s.node("Cast", x, to=TensorProto.INT64)
    return s.model(s.node("GatherBlockQuantized", *inputs, domain="com.microsoft", bits=bits, block_size=size))


KINDS: dict[str, Callable[[Sketch], onnx.ModelProto]] = {
    "qdq": qdq, "to_floats": to_floats, "blocks": blocks, "n_bits": n_bits, "gather": gather,
    "sums": sums,
}  # fmt: skip
IN_BYTES = ("qdq", "to_floats")
"""Kinds whose reference is onnxruntime with the same integers as bytes."""
EXACT = ("qdq", "gather")
"""Kinds whose results have onnxruntime's bits."""
CLOSE = 2e-6
"""The largest difference of other kinds as a part of the root mean square; float32 sums are in another order."""
CLOSE_N_BITS = 4e-6
"""Tolerance for MatMulNBits at level 4, whose bytes Celosia multiplies as floats (docs/numerics.md)."""


def bound(kind: str) -> float:
    """Return the largest allowed difference of a kind from onnxruntime, as a part of the root mean square."""
    return 0 if kind in EXACT else CLOSE_N_BITS if kind == "n_bits" else CLOSE


# Comparison -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The comparison of one model with onnxruntime.

    elements: compared elements. different: elements that differ. apart: the largest difference as a part of the root
    mean square. from_floats: elements that differ from onnxruntime's product of floats. accelerated: the accelerator
    has a layer.
    """

    elements: int
    different: int
    apart: float
    from_floats: int
    accelerated: bool


def by_onnxruntime(model: onnx.ModelProto, feed: dict[str, Array]) -> Array:
    """Return onnxruntime's output of `model`."""
    session = opened(model, int8=True, qdq_matmulnbits_accuracy_level="4")
    (y,) = session.run(None, feed)
    return np.asarray(y)


def apart(a: Array, b: Array) -> float:
    """Return the largest difference of a and b as a part of the root mean square of b."""
    return float(np.abs(a.astype(np.float64) - b).max() / np.sqrt((b.astype(np.float64) ** 2).mean() + 1e-30))


def config_for(kind: str, seed: int, name: str) -> Config:
    """Return the preset `name`; for sums one of three presets with hardware for them, perhaps with packed weights."""
    if kind != "sums":
        return PRESETS[name]
    return replace(PRESETS[("tiny", "pynq", "zcu104")[seed // SIZES_EACH % 3]], sums=True, weight_bits=(8, 4)[seed % 2])


def outcome(kind: str, seed: int, config: str = "tiny", check: bool = True) -> Outcome:
    """Compile model number `seed` of a kind, run it, and compare it with onnxruntime.

    check: whether `celosia.compile` checks the program, for which it compiles kernels of the model's operators.
    """
    drawn, twin = Sketch(seed), Sketch(seed, wide=kind in IN_BYTES)
    model, reference = KINDS[kind](drawn), KINDS[kind](twin)
    expected = by_onnxruntime(reference, twin.feed)
    shapes = {name: array.shape for name, array in drawn.feed.items()}
    program = celosia.compile(model, config_for(kind, seed, config), shapes=shapes, check=check)
    (output,) = Runtime(program).run(drawn.feed).outputs.values()
    assert output.dtype == expected.dtype and output.shape == expected.shape
    floats = by_onnxruntime(model, drawn.feed) if kind in IN_BYTES and floats_run(drawn) else expected
    layers = any(row["place"] == "accelerator" for row in program.placements)
    return Outcome(
        expected.size, int((output != expected).sum()), apart(output, expected), int((output != floats).sum()), layers
    )


def floats_run(s: Sketch) -> bool:
    """Return whether onnxruntime 1.31 runs the model unchanged: it fuses integer operators of 2 bits and then refuses
    them."""
    return s.opset == OPSETS[4]


def main() -> None:
    """Print the differences of each kind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1000, help="models of each kind")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS), help="by default all")
    args = parser.parse_args()
    for kind in args.kinds:
        total: Counter[str] = Counter()
        largest = 0.0
        for seed in range(args.seed, args.seed + args.count):
            comparison = outcome(kind, seed, check=seed % CHECKED == 0)
            largest = max(largest, comparison.apart)
            total.update(
                elements=comparison.elements,
                different=comparison.different,
                floats=comparison.from_floats,
                layers=comparison.accelerated,
            )
        print(f"{kind:9} {args.count} models, {total['elements']:,} elements: {total['different']:,} differ, at most "
              f"{largest:.1e} of the root mean square; {total['floats']:,} differ from products of floats; "
              f"{total['layers']:,} on the accelerator", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
