"""Attention as exporters write it: packed projections, heads of any width, masks, samples, tables of positions.

onnxruntime's bytes are the oracle. What moves elements must be free: neither the host nor a launch of its own does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from benchmarks.encoders import quantised, sample
from configs import CONFIGS
from onnx import TensorProto, helper, numpy_helper
from thorough import paired

import celosia
from celosia.compiler.graph.packed_projections import separate_projections
from celosia.compiler.graph.rows import hoist_tables
from celosia.compiler.graph.values import constant
from celosia.hw.spec.config import PRESETS, Config

from ..oracle import opened

ACCELERATORS = {
    "tiny": PRESETS["tiny"],
    "pynq": PRESETS["pynq"],
    "pynq, softmax": replace(PRESETS["pynq"], name="", softmax=8),
    "pynq, softmax and norm": replace(PRESETS["pynq"], name="", softmax=8, norm=8),
    "4x4-softmax2": CONFIGS["4x4-softmax2"],
}


@dataclass
class Network:
    """An ONNX model that is being written, with random weights."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Add an operator, and return the names of its outputs."""
        names = [f"t{len(self.nodes)}_{number}" for number in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, name=f"{kind}_{len(self.nodes)}", **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, values: Any, dtype: Any = np.float32) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def shaped(self, x: str, *dims: int) -> str:
        return str(self.op("Reshape", x, self.constant(dims, np.int64)))

    def transposed(self, x: str, *perm: int) -> str:
        return str(self.op("Transpose", x, perm=perm))

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        product = self.op("MatMul", x, self.constant(self.random.normal(size=(inputs, outputs)) / np.sqrt(inputs)))
        return str(self.op("Add", product, self.constant(self.random.normal(size=outputs) * 0.1)))

    def cut(self, x: str, first: int, end: int, axis: int) -> str:
        bounds = (self.constant([number], np.int64) for number in (first, end, axis))
        return str(self.op("Slice", x, *bounds))

    def model(self, y: str, shape: tuple[int, ...]) -> onnx.ModelProto:
        """Return the model x -> y."""
        self.nodes.append(helper.make_node("Identity", [y], ["y"]))
        x, result = (helper.make_tensor_value_info("x", TensorProto.FLOAT, shape), onnx.ValueInfoProto(name="y"))
        graph = helper.make_graph(self.nodes, "attention", [x], [result], self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@dataclass(frozen=True)
class Sizes:
    """Sizes of an attention: samples, tokens, heads, and columns of each head."""

    samples: int
    tokens: int
    heads: int
    inner: int

    @property
    def wide(self) -> int:
        return self.heads * self.inner

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.samples, self.tokens, self.wide


Split = Callable[[Network, str, Sizes], tuple[str, str, str]]
"""Makes queries, keys and values [samples, heads, tokens, inner] of x."""


def _heads(n: Network, x: str, s: Sizes) -> str:
    return n.transposed(n.shaped(x, s.samples, s.tokens, s.heads, s.inner), 0, 2, 1, 3)


def _separate(n: Network, x: str, s: Sizes) -> tuple[str, str, str]:
    q, k, v = (_heads(n, n.linear(x, s.wide, s.wide), s) for _ in range(3))
    return q, k, v


def _split(n: Network, x: str, s: Sizes) -> tuple[str, str, str]:
    parts = n.op("Split", n.linear(x, s.wide, 3 * s.wide), outputs=3, axis=-1)
    q, k, v = (_heads(n, part, s) for part in parts)
    return q, k, v


def _slices(n: Network, x: str, s: Sizes) -> tuple[str, str, str]:
    packed = n.linear(x, s.wide, 3 * s.wide)
    q, k, v = (_heads(n, n.cut(packed, number * s.wide, (number + 1) * s.wide, 2), s) for number in range(3))
    return q, k, v


def _gathered(n: Network, x: str, s: Sizes) -> tuple[str, str, str]:
    packed = n.shaped(n.linear(x, s.wide, 3 * s.wide), s.samples, s.tokens, 3, s.heads, s.inner)
    packed = n.transposed(packed, 2, 0, 3, 1, 4)
    q, k, v = (n.op("Gather", packed, n.constant(number, np.int64), axis=0) for number in range(3))
    return q, k, v


def _inside_heads(n: Network, x: str, s: Sizes) -> tuple[str, str, str]:
    packed = n.shaped(n.linear(x, s.wide, 3 * s.wide), s.samples, s.tokens, s.heads, 3 * s.inner)
    q, k, v = n.op("Split", n.transposed(packed, 0, 2, 1, 3), outputs=3, axis=-1)
    return q, k, v


def _tokens_first(n: Network, x: str, s: Sizes) -> tuple[str, str, str]:
    """As torch.nn.MultiheadAttention does: tokens before samples, heads beside samples."""
    packed = n.linear(n.transposed(x, 1, 0, 2), s.wide, 3 * s.wide)
    parts = []
    for number in range(3):
        part = n.cut(packed, number * s.wide, (number + 1) * s.wide, 2)
        joined = n.transposed(n.shaped(part, s.tokens, s.samples * s.heads, s.inner), 1, 0, 2)
        parts.append(n.shaped(joined, s.samples, s.heads, s.tokens, s.inner))
    return parts[0], parts[1], parts[2]


SPLITS: dict[str, Split] = {
    "separate": _separate, "split": _split, "slices": _slices, "gathered": _gathered, "inside heads": _inside_heads,
    "tokens first": _tokens_first,
}  # fmt: skip
SIZES = {
    "whole groups": Sizes(1, 16, 2, 16), "ragged tokens": Sizes(1, 9, 2, 16), "odd heads": Sizes(1, 12, 3, 5),
    "two samples": Sizes(2, 10, 2, 16),
}  # fmt: skip


def _attention(n: Network, x: str, s: Sizes, split: Split, mask: str = "") -> str:
    """Attention behind a table of positions, with its projection behind it."""
    x = n.op("Add", x, n.constant(n.random.normal(size=(s.tokens, s.wide))))
    q, k, v = split(n, x, s)
    scores = n.op("Mul", n.op("MatMul", q, n.transposed(k, 0, 1, 3, 2)), n.constant(s.inner**-0.5))
    if mask:
        future = np.triu(np.ones((s.tokens, s.tokens), np.bool_), 1)[None, None]
        if mask == "where":
            scores = n.op("Where", n.constant(future, np.bool_), n.constant(-20.0), scores)
        else:
            scores = n.op("Add", scores, n.constant(np.where(future, -20.0, 0.0)))
    mixed = n.transposed(n.op("MatMul", n.op("Softmax", scores, axis=-1), v), 0, 2, 1, 3)
    return n.linear(n.shaped(mixed, *s.shape), s.wide, s.wide)


def _compare(path: Path, shape: tuple[int, ...], cfg: Config, **options: Any) -> celosia.Program:
    """Compile with its self-check, compare with onnxruntime, and return the Program."""
    program = celosia.compile(path, cfg, **options)
    x = sample(shape, 7)
    (expected,) = opened(path, int8=True).run(None, {"x": x})
    np.testing.assert_array_equal(celosia.Runtime(program, "functional").run({"x": x}).outputs["y"], expected)
    return program


def _arranged_by_host(program: celosia.Program) -> list[str]:
    """Operators that move elements on the CPU, or the whole of a launch."""
    moves = ("Transpose", "Slice", "Split", "Gather", "Concat")
    return [row["name"] for row in program.placements if row["op"] in moves and row["place"] == "cpu"]


@pytest.mark.parametrize(("split", "sizes"), paired(SPLITS, SIZES))
@pytest.mark.parametrize("accelerator", ["tiny", "pynq, softmax", "4x4-softmax2"])
def test_projections(split: str, sizes: str, accelerator: str, tmp_path: Path) -> None:
    network, s = Network(), SIZES[sizes]
    y = _attention(network, "x", s, SPLITS[split])
    path = quantised(network.model(y, s.shape), s.shape, tmp_path, signed=True)
    program = _compare(path, s.shape, ACCELERATORS[accelerator])
    products = [row for row in program.placements if row["op"] == "QLinearMatMul" or row["op"] == "QGemm"]
    assert all(row["place"] == "accelerator" for row in products)
    if accelerator == "pynq, softmax" and not (split == "tokens first" and s.samples > 1):
        assert len(program.launches) == 1
        assert not [name for name in _arranged_by_host(program) if split != "tokens first"]


@pytest.mark.parametrize("mask", ["where", "add"])
@pytest.mark.parametrize("signed", [True, False])
def test_masks(mask: str, signed: bool, tmp_path: Path) -> None:
    network, s = Network(), Sizes(1, 13, 2, 16)
    y = _attention(network, "x", s, _split, mask)
    path = quantised(network.model(y, s.shape), s.shape, tmp_path, signed=signed)
    program = _compare(path, s.shape, ACCELERATORS["pynq, softmax"])
    assert len(program.launches) == 1


@pytest.mark.parametrize("accelerator", ["tiny", "pynq, softmax and norm", "4x4-softmax2"])
@pytest.mark.parametrize("extra", [1, 3])
def test_images_as_tokens(extra: int, accelerator: str, tmp_path: Path) -> None:
    """Patches become tokens behind a class token; a table is added; the class token is classified."""
    n, image, dim = Network(), (1, 3, 12, 12), 20
    weights = n.constant(n.random.normal(size=(dim, 3, 4, 4)) / 7)
    patches = n.op("Conv", "x", weights, n.constant(n.random.normal(size=dim) / 9), strides=[4, 4])
    tokens = n.transposed(n.shaped(patches, 1, dim, 9), 0, 2, 1)
    tokens = n.op("Concat", n.constant(n.random.normal(size=(1, extra, dim))), tokens, axis=1)
    tokens = n.op("Add", tokens, n.constant(n.random.normal(size=(1, 9 + extra, dim))))
    tokens = n.linear(n.op("Mul", tokens, n.constant(n.random.uniform(0.5, 1.5, dim))), dim, dim)
    y = n.linear(n.op("Gather", tokens, n.constant(0, np.int64), axis=1), dim, 10)
    path = quantised(n.model(y, image), image, tmp_path, signed=True)
    program = _compare(path, image, ACCELERATORS[accelerator])
    assert len(program.launches) == 1
    assert not _arranged_by_host(program)


@pytest.mark.parametrize("accelerator", ["tiny", "pynq, softmax and norm"])
def test_channels_last(accelerator: str, tmp_path: Path) -> None:
    """The pixels of images as rows, as ConvNeXt has them."""
    n, image, dim = Network(), (1, 20, 6, 5), 20
    weights = n.constant(n.random.normal(size=(dim, 1, 3, 3)) / 3)
    x = n.op("Conv", "x", weights, group=dim, pads=[1] * 4)
    y = n.op("Sigmoid", n.linear(n.transposed(x, 0, 2, 3, 1), dim, 32))
    y = n.op("Mul", n.linear(y, 32, dim), n.constant(n.random.uniform(0.5, 1, dim)))
    y = n.op("Add", x, n.transposed(y, 0, 3, 1, 2))
    path = quantised(n.model(y, image), image, tmp_path, signed=True)
    program = _compare(path, image, ACCELERATORS[accelerator])
    assert len(program.launches) == 1
    assert not _arranged_by_host(program)


def test_means_of_rows_round_correctly_if_asked(tmp_path: Path) -> None:
    n, s = Network(), (1, 12, 32)
    y = n.linear(n.op("ReduceMean", n.linear("x", 32, 32), axes=[1], keepdims=0), 32, 10)
    path = quantised(n.model(y, s), s, tmp_path, signed=True)
    _compare(path, s, ACCELERATORS["pynq"])
    program = celosia.compile(path, ACCELERATORS["pynq"], rounding="correct")
    assert len(program.launches) == 1


def test_a_launch_without_products_is_weighed(tmp_path: Path) -> None:
    """A sum of two tensors between operators of the CPU takes less time there than the start of a launch."""
    n, s = Network(), (1, 6, 16)
    x = n.op("Add", "x", n.constant(n.random.normal(size=(6, 16))))
    y = n.linear(n.op("CumSum", n.op("Mul", x, x), n.constant(1, np.int64)), 16, 16)
    path = quantised(n.model(y, s), s, tmp_path, signed=True)
    program = _compare(path, s, ACCELERATORS["pynq"])
    assert len(program.launches) == 1
    (reason,) = (row["reason"] for row in program.placements if row["op"] == "QLinearAdd" and "Add_0" in row["name"])
    assert "weighed" in reason


# Passes -----------------------------------------------------------------------------------------------------------


PACKED = """
<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1, "celosia" : 1]>
g (int8[1, 3, 4] x) => (int8[2, 3, 2] a, int8[2, 2, 3] b)
<float s = {0.1}, int8 z = {0}, int8[4, 8] w = {WEIGHTS}, int8[8] ws_zero = {0, 0, 0, 0, 0, 0, 0, 0},
 float[8] ws = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8}, int64[4] heads = {3, 2, 2, 2}, int64[1] one = {0}>
{ p = QLinearMatMul(x, s, z, w, ws, ws_zero, s, z)
  r = Reshape(p, heads)
  t = Transpose<perm = [2, 1, 0, 3]>(r)
  k, v = Split<axis = 0>(t)
  a = Squeeze(k, one)
  u = Squeeze(v, one)
  b = Transpose<perm = [0, 2, 1]>(u) }
"""


def test_a_part_takes_the_weights_and_scales_of_its_columns() -> None:
    """Keys and values are inside of heads here; their columns follow from the operators."""
    proto = onnx.parser.parse_model(PACKED.replace("WEIGHTS", ", ".join(map(str, range(32)))))
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    separate_projections(model)
    products = [node for node in model.graph if node.op_type == "QLinearMatMul"]
    weights = [constant(node.inputs[3]) for node in products]
    whole = np.arange(32).reshape(4, 8)
    np.testing.assert_array_equal(weights[0], whole[:, [0, 1, 4, 5]])
    np.testing.assert_array_equal(weights[1], whole[:, [2, 3, 6, 7]])
    np.testing.assert_allclose(constant(products[1].inputs[4]), [0.3, 0.4, 0.7, 0.8], rtol=1e-6)


HOISTED = """
<ir_version: 8, opset_import: ["" : 17, "celosia" : 1]>
g (int8[1, 3, 4] x, int8[256] table) => (int8[2, 3, 2] y)
<float s = {0.1}, int8 z = {0}, int8[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16},
 int64[3] heads = {3, 2, 2}>
{ p = QLinearMatMul(x, s, z, w, s, z, s, z)
  r = Reshape(p, heads)
  t = Transpose<perm = [1, 0, 2]>(r)
  y = celosia.Table(t, table) }
"""


def test_tables_move_to_the_product_before_reshapes() -> None:
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(HOISTED)))
    hoist_tables(model)
    assert [node.op_type for node in model.graph] == ["QLinearMatMul", "Table", "Reshape", "Transpose"]
    assert model.graph.outputs[0].name == "y"
