"""Malicious models and inputs give one sentence that names the operator, before they take memory or time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from driver_models import quantised
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from thorough import some

import celosia
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.pricing import price
from celosia.compiler.program.host.op import HostError
from celosia.driver.cut import cut
from celosia.driver.runtime import Runtime
from celosia.hw.spec.config import Config

Array = NDArray[Any]
HUGE = 2**40
FLOATS = np.ones(3, np.float32)
ONE = np.ones(1, np.float32)
SQUARE = np.ones((1, 1, 2, 2), np.float32)


def model(text: str, opset: int = 21, **constants: Any) -> onnx.ModelProto:
    """Return the model of a graph in text form."""
    graph = onnx.parser.parse_graph(text)
    graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items())
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def refuse_to_compile(proto: onnx.ModelProto, words: str) -> None:
    started = time.process_time()
    with pytest.raises(ModelError, match=words) as info:
        celosia.compile(proto, "tiny")
    assert "\n" not in str(info.value) and len(str(info.value)) < 1000
    assert time.process_time() - started < 20


LARGE_CONSTANTS = {
    "ConstantOfShape": "g () => (float[N] y) { y = ConstantOfShape(s) }",
    "Expand": "g () => (float[N] y) { y = Expand(one, s) }",
    "Tile": "g () => (float[N] y) { t = Tile(one, s) y = Neg(t) }",
    "Pad": "g () => (float[N] y) { z = Sub(s, s) p = Concat<axis=0>(z, s) y = Pad(one, p) }",
    "Range": "g () => (int64[N] y) { z = Sub(n, n) e = Div(n, n) y = Range(z, n, e) }",
    "OneHot": "g () => (float[N, M] y) { v = Concat<axis=0>(one, one) y = OneHot(s, s, v) }",
    "Resize": 'g () => (float[1, 1, N, M] y) { z = Concat<axis=0>(u, u, s, s) y = Resize<mode="nearest">(sq, , , z) }',
    "Gather": "g () => (float[N] y) { z = Sub(s, s) i = Expand(z, s) y = Gather(one, i) }",
    "RandomNormal": "g () => (float[N] y) { y = RandomNormal<shape=[1099511627776, 1099511627776]>() }",
    "Add": "g (float[1048576, 1] a, float[1, 1048576] b) => (float[N, M] y) { y = Add(a, b) }",
}  # fmt: skip


@pytest.mark.parametrize("op", LARGE_CONSTANTS)
def test_giants_are_not_folded(op: str) -> None:
    values = {"s": np.array([HUGE]), "n": np.array(HUGE), "u": np.array([1]), "one": ONE, "sq": SQUARE}
    text = LARGE_CONSTANTS[op]
    refuse_to_compile(model(text, **values), "Expand" if op == "Gather" else op)


def test_shapes_that_onnx_would_write_down() -> None:
    """onnx's inference is not called for shapes whose elements it would store, here 2**40 of them."""
    text = "g () => (float[1] y) { c = ConstantOfShape(s) k = Constant<value_ints=[0]>() y = Gather(c, k) }"
    refuse_to_compile(model(text, s=np.array([HUGE])), "memory")


LARGE_AT_RUN_TIME = {
    "ConstantOfShape": ("g (int64[2] s) => (float[N, M] y) { y = ConstantOfShape(s) }", {"s": np.array([HUGE, HUGE])}),
    "Expand": ("g (float[1] x, int64[1] s) => (float[N] y) { y = Expand(x, s) }", {"x": ONE, "s": np.array([HUGE])}),
    "Tile": ("g (float[3] x, int64[1] s) => (float[N] y) { y = Tile(x, s) }", {"x": FLOATS, "s": np.array([HUGE])}),
    "Pad": ("g (float[3] x, int64[2] s) => (float[N] y) { y = Pad(x, s) }", {"x": FLOATS, "s": np.array([HUGE] * 2)}),
    "Range": (
        "g (float b) => (float[N] y) { z = Sub(b, b) e = Div(b, b) y = Range(z, b, e) }", {"b": np.float32(1e30)}
    ),
    "Range ": ("g (float b) => (float[N] y) { y = Range(b, b, b) }", {"b": np.float32("nan")}),
    "Resize": (
        'g (float[1, 1, 2, 2] x, float[4] s) => (float[1, 1, N, M] y) { y = Resize<mode="linear">(x, , s) }',
        {"x": SQUARE, "s": np.array([1, 1, 1e9, 1e9], np.float32)},
    ),
    "DFT": ("g (float[1, 4, 1] x, int64 n) => (float[N, M, K] y) { y = DFT(x, n) }",
            {"x": np.ones((1, 4, 1), np.float32), "n": np.array(HUGE)}),
    "TopK": ("g (float[3] x, int64[1] k) => (float[N] y, int64[N] z) { y, z = TopK(x, k) }",
             {"x": FLOATS, "k": np.array([HUGE])}),
    "Tile ": ("g (float[3] x, int64[1] s) => (float[N] y) { y = Tile(x, s) }", {"x": FLOATS, "s": np.array([-1])}),
    "Pad ": ("g (float[3] x, int64[2] s) => (float[N] y) { y = Pad(x, s) }", {"x": FLOATS, "s": np.array([-9, 0])}),
    "Reshape": ("g (float[3] x, int64[2] s) => (float[N, M] y) { y = Reshape(x, s) }",
                {"x": FLOATS, "s": np.array([2, -1])}),
    "Slice": ("g (float[3] x, int64[1] p) => (float[N] y) { y = Slice(x, p, p, p, p) }",
              {"x": FLOATS, "p": np.array([0])}),
    "SequenceAt": ("g (float[3] x, int64 p) => (float[N] y) { s = SequenceConstruct(x, x) y = SequenceAt(s, p) }",
                   {"x": FLOATS, "p": np.array(7)}),
    "SplitToSequence": ("g (float[3] x, int64 p) => (seq(float) y) { y = SplitToSequence(x, p) }",
                        {"x": FLOATS, "p": np.array(0)}),
    "ScatterND": ("g (float[3] x, int64[1, 1] i) => (float[3] y) { y = ScatterND(x, i, x) }",
                  {"x": FLOATS, "i": np.array([[HUGE]])}),
}  # fmt: skip


@pytest.mark.parametrize("case", LARGE_AT_RUN_TIME)
def test_impossible_shapes_at_run_time(case: str) -> None:
    text, inputs = LARGE_AT_RUN_TIME[case]
    program = celosia.compile(model(text), "tiny")
    with pytest.raises(HostError, match=rf"^{case.strip()} \([\w:]+\)") as info:
        Runtime(program).run(inputs)
    assert "\n" not in str(info.value)


def test_attributes_that_say_another_shape_than_the_weights() -> None:
    """A kernel_shape that differs from the weights is refused. onnx's inference believes the attribute, the kernel
    the weights."""
    proto = quantised(form="qoperator")
    first = next(node for node in proto.graph.node if node.op_type == "QLinearConv")
    next(attr for attr in first.attribute if attr.name == "kernel_shape").ints[:] = [3, 1]
    refuse_to_compile(proto, r"QLinearConv \(.*\) has windows with \[8, 8\] outputs, of which onnx infers \[8, 10\]")


@pytest.mark.parametrize("blocksize", [2**40, 4, 0, -2])
@pytest.mark.parametrize("op", ["SpaceToDepth", "DepthToSpace"])
def test_blocks_that_divide_nothing(op: str, blocksize: int) -> None:
    text = f"g (float[2, 2, 6, 6] x) => (float[N, M, K, L] y) {{ y = {op}<blocksize = {blocksize}>(x) }}"
    refuse_to_compile(model(text), "locksize|do not divide")


def test_an_element_type_that_there_is_not() -> None:
    text = "g (int8[3, 4] x) => (double[3, 4] y) { y = EyeLike<dtype = -2147483648>(x) }"
    refuse_to_compile(model(text), "EyeLike.*no element type -2147483648")


# Constants ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[HUGE]),
        TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2**62, 4]),
        TensorProto(name="w", data_type=TensorProto.INT4, dims=[HUGE], raw_data=b"1"),
        TensorProto(name="w", data_type=TensorProto.STRING, dims=[HUGE]),
        TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[-1]),
        TensorProto(name="w", data_type=99, dims=[1], raw_data=b"1234"),
        TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1] * 100, raw_data=b"1234"),
    ],
    ids=["no data", "overflow", "int4", "strings", "negative", "type", "rank"],
)
@pytest.mark.parametrize("place", ["initializer", "attribute", "subgraph"])
def test_data_that_does_not_fit_its_shape(tensor: TensorProto, place: str) -> None:
    proto = model("g (float[1] x) => (float[1] y) { y = Neg(x) }")
    if place == "initializer":
        proto.graph.initializer.append(tensor)
    else:
        node = helper.make_node("Constant", [], ["w"], name="w", value=tensor)
        body = helper.make_graph([node], "body", [], [helper.make_tensor_value_info("w", TensorProto.FLOAT, [1])])
        condition = numpy_helper.from_array(np.array(True), "c")
        proto.graph.initializer.append(condition)
        outside = helper.make_node("If", ["c"], ["z"], name="w", then_branch=body, else_branch=body)
        proto.graph.node.append(node if place == "attribute" else outside)
    refuse_to_compile(proto, "w")


def test_sparse_constants() -> None:
    values = numpy_helper.from_array(ONE, "w")
    sparse = onnx.SparseTensorProto(dims=[3], values=values, indices=numpy_helper.from_array(np.array([1]), "i"))
    proto = model("g (float[3] x) => (float[3] y) { y = Add(x, w) }")
    proto.graph.sparse_initializer.append(sparse)
    outputs = Runtime(celosia.compile(proto, "tiny")).run({"x": FLOATS}).outputs
    assert outputs["y"].tolist() == [1, 2, 1]
    proto.graph.sparse_initializer[0].dims[0] = HUGE
    refuse_to_compile(proto, "'w'.*memory")


@pytest.mark.parametrize("location", ["missing.bin", "../outside.bin", "/etc/hostname", "link.bin", "", "a\0b", "."])
def test_external_data_stays_in_the_models_folder(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "outside.bin").write_bytes(bytes(16))
    (folder / "link.bin").symlink_to(tmp_path / "outside.bin")
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    tensor.external_data.append(onnx.StringStringEntryProto(key="location", value=location))
    proto = model("g (float[1] x) => (float[1] y) { y = Add(x, w) }")
    proto.graph.initializer.append(tensor)
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError) as info:
        celosia.compile(folder / "model.onnx", "tiny")
    assert "\n" not in str(info.value)
    refuse_to_compile(proto, "'w' is in another file")


def test_lengths_of_external_data(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(4))
    for key, value in (("length", "99999999999999"), ("offset", "-4"), ("offset", "999"), ("length", "many")):
        tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
        for each in (("location", "w.bin"), (key, value)):
            tensor.external_data.append(onnx.StringStringEntryProto(key=each[0], value=each[1]))
        proto = model("g (float[1] x) => (float[1] y) { y = Add(x, w) }")
        proto.graph.initializer.append(tensor)
        (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
        with pytest.raises(ModelError) as info:
            celosia.compile(tmp_path / "model.onnx", "tiny")
        assert "\n" not in str(info.value)


@pytest.mark.parametrize("place", ["initializer", "attribute", "subgraph"])
def test_external_data_without_a_length(tmp_path: Path, place: str) -> None:
    """Only the bytes of the constant are read from an external file, which here has no end."""
    with (tmp_path / "w.bin").open("wb") as file:
        file.write(np.float32(5).tobytes())
        file.truncate(HUGE)
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="w.bin")
    if place == "initializer":
        proto = model("g (float[1] x) => (float[1] y) { y = Add(x, w) }")
        proto.graph.initializer.append(tensor)
    else:
        node = helper.make_node("Constant", [], ["w"], value=tensor)
        proto = model("g (float[1] x) => (float[1] y) { y = Add(x, w) }")
        proto.graph.node.insert(0, node)
    if place == "subgraph":
        inner = helper.make_graph(list(proto.graph.node), "inner", [], [proto.graph.output[0]])
        branch = helper.make_node("If", ["yes"], ["y"], then_branch=inner, else_branch=inner)
        value = numpy_helper.from_array(np.array(True), "yes")
        inputs, outputs = list(proto.graph.input), list(proto.graph.output)
        proto.graph.CopyFrom(helper.make_graph([branch], "g", inputs, outputs, [value]))
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    program = celosia.compile(tmp_path / "model.onnx", "tiny")
    assert Runtime(program).run({"x": np.ones(1, np.float32)}).outputs["y"].tolist() == [6]
    tensor.external_data.add(key="length", value=str(HUGE))
    proto = model("g (float[1] x) => (float[1] y) { y = Add(x, w) }")
    proto.graph.initializer.append(tensor)
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match=rf"'w'.*4 bytes.*{HUGE}"):
        celosia.compile(tmp_path / "model.onnx", "tiny")


# Structure ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("g (float[3] x) => (float[3] y) { a = Add(x, y) y = Neg(a) }", "sorted.*'y'"),
        ("g (float[3] x) => (float[3] y) { y = Neg(x) y = Abs(x) }", "'y'"),
        ("g (float[3] x, float[3] x) => (float[3] y) { y = Neg(x) }", "'x'"),
        ("g (float[3] x) => (float[3] y) { y = Nothing(x) }", "Nothing"),
        ("g (float[3] x) => (float[3] y) { y = nowhere.Neg(x) }", "nowhere"),
        ("g (float[3] x) => (float[3] y) { y = Neg(z) }", "'z'"),
        ("g (float[3] x) => (float[3] y) { z = Neg(x) }", "'y'"),
        ("g (float[3] x) => (float[3] y) { y = Softmax<axis=9223372036854775807>(x) }", "'axis' of Softmax"),
        ("g (float[3] x) => (float[3] y) { y = LayerNormalization<axis=1073741824>(x, x) }", "'axis' of Layer"),
        ("g (float[3] x, int64[1, 1] i) => (float[1] y) { y = GatherND<batch_dims=-20>(x, i) }", "'batch_dims' of Ga"),
        ("g (float[3] x) => (float[3, 3] y) { y = EyeLike(x) }", "EyeLike.*2"),
        ("g (float[8] x) => (float[4] y, float[4] z) { y, z = Split<num_outputs=1>(x) }", "Split .y. has 2 outputs"),
        ("g (float[1, 2, 5, 5] x, float[8, 2, 3, 3] w, float[3] b) => (float[1, 8, 3, 3] y) { y = Conv(x, w, b) }",
         "0 to 7 would be read of 3"),
        ("g (float[4, 5] x, float[5, 7] w, float[3] b) => (float[4, 7] y) { y = Gemm(x, w, b) }", "Gemm"),
        ("g (float[1, 4, 5] x, float[3] s) => (float[1, 4, 5] y) { y = InstanceNormalization(x, s, s) }", "read of 3"),
        ("g (float[3, 4] x, int64[3, 9] i) => (float[3, 9] y) { y = GatherElements<axis=0>(x, i) }", "read of 4"),
        ("g (int64[2] i, int64 d, float[1] v) => (float[2, 4] y) { d4 = Constant<value_int=4>() y = OneHot(i, d4, v) }",
         "OneHot.*1 numbers"),
        ("g (float[1, 4, 2, 2] x) => (float[N, M, K, L] y) { y = DepthToSpace<blocksize=0>(x) }", "DepthToSpace"),
        ("g (float[1, 4, 2, 2] x) => (float[N, M, K, L] y) { y = SpaceToDepth<blocksize=-1>(x) }", "SpaceToDepth"),
        ("g (float[1, 4, 2, 2] x, float[4] w) => (float[1, 4, 2, 2] y) "
         "{ y = GroupNormalization<num_groups=-1>(x, w, w) }", "GroupNormalization"),
        ("g (uint8[3] x) => (uint8[3] y) { y = Exp(x) }", "Exp"),
        ("g (float[3] x) => (bool[3] y) { y = And(x, x) }", "And"),
    ],
)  # fmt: skip
def test_structure(text: str, words: str) -> None:
    refuse_to_compile(model(text), words)


def test_long_lists_make_short_sentences() -> None:
    pads = ", ".join(["1"] * 100_000)
    proto = model(
        f"g (float[1, 1, 8, 8] x) => (float[N] y) {{ y = AveragePool<kernel_shape=[3, 3], pads=[{pads}]>(x) }}"
    )
    refuse_to_compile(proto, "AveragePool")


def test_graphs_in_graphs(tmp_path: Path) -> None:
    """Subgraphs up to protobuf's depth of about 30 run or are refused; deeper ones cannot be read."""
    node = helper.make_node("Identity", ["x"], ["y"], name="inside")
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    for depth in range(25):
        body = helper.make_graph([node], f"body{depth}", [], [output])
        other = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "other", [], [output])
        node = helper.make_node("If", ["c"], ["y"], name=f"if{depth}", then_branch=body, else_branch=other)
    proto = model("g (float[1] x, bool c) => (float[1] y) { z = Neg(x) }")
    proto.graph.node.append(node)
    inputs = {"x": ONE, "c": np.array(True)}
    assert Runtime(celosia.compile(proto, "tiny")).run(inputs).outputs["y"].tolist() == [1]
    nested = b""
    for _ in range(5000):  # graph { node { attribute { g { node { ...
        nested = b"\x32" + _length(nested) + nested
    with pytest.raises(ModelError):
        celosia.compile(_file(tmp_path, b"\x3a" + _length(nested) + nested), "tiny")


def _length(content: bytes) -> bytes:
    """Return a length in protobuf's encoding."""
    size, out = len(content), b""
    while size >= 128:
        out, size = out + bytes([size % 128 + 128]), size // 128
    return out + bytes([size])


def _file(folder: Path, content: bytes) -> Path:
    (folder / "model.onnx").write_bytes(content)
    return folder / "model.onnx"


def test_functions_that_call_themselves() -> None:
    text = """<ir_version: 10, opset_import: ["": 21, "own": 1]>
        g (float[1] x) => (float[1] y) { y = own.f(x) }
        <opset_import: ["": 21, "own": 1], domain: "own"> f (a) => (b) { c = own.f(a) b = Neg(c) }"""
    refuse_to_compile(onnx.parser.parse_model(text), "f")


def test_text_that_is_none() -> None:
    proto = model("g (float[1, 1, 3, 3] x) => (float[1, 1, 3, 3] y) { y = MaxPool<kernel_shape=[1, 1]>(x) }")
    proto.graph.node[0].attribute.append(
        onnx.AttributeProto(name="auto_pad", type=onnx.AttributeProto.STRING, s=b"\xff")
    )
    refuse_to_compile(proto, "'auto_pad' of MaxPool .y. is no text")
    content = model("g (float[1] x) => (float[1] y) { y = Neg(x) }").SerializeToString()
    with pytest.raises(ModelError):
        celosia.compile(onnx.ModelProto.FromString(content.replace(b"Neg", b"\xff\xfe\xfd")), "tiny")


def test_names_with_nul(tmp_path: Path) -> None:
    proto = model("g (string[1] x) => (string[1] y) { y = Identity(x) }")
    proto.graph.node[0].name = "a\0b/../c"
    proto.graph.input[0].name = proto.graph.node[0].input[0] = "in\0put"
    celosia.compile(proto, "tiny").save(tmp_path / "program")
    inputs = {"in\0put": np.array(["te\0xt"], object)}
    assert Runtime(celosia.Program.load(tmp_path / "program")).run(inputs).outputs["y"].tolist() == ["te\0xt"]


def test_what_a_model_declares_is_not_believed() -> None:
    """The declared shape of a value is not used if its operator computes another one."""
    proto = model("g (float[2, 3, 4] x) => (float[2, 12] y) { a = Flatten<axis=0>(x) y = Neg(a) }")
    proto.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, [2, 12]))
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    outputs = Runtime(celosia.compile(proto, "tiny")).run({"x": x}).outputs
    np.testing.assert_array_equal(outputs["y"], -x.reshape(1, 24))
    late = model("g (float[6] x, int64[2] s) => (float[2, 3] y) { a = Reshape(x, s) y = Neg(a) }")
    late.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, [2, 3]))
    runtime = Runtime(celosia.compile(late, "tiny"))
    six = np.arange(6, dtype=np.float32)
    assert runtime.run({"x": six, "s": np.array([2, 3])}).outputs["y"].shape == (2, 3)


def test_the_declared_type_of_a_view(tmp_path: Path) -> None:
    """The type of a view, which has no kernel, comes from its operand and not from the declaration."""
    text = "g (int8[2, 3] x, int8[2, 3] r) => (bool[2, 3] y) { y = Dropout(x, r) }"
    refuse_to_compile(model(text), r"data of Dropout \(y\) is of int8; it takes bfloat16 or double or float or float16")
    late = model("g (float[2, 3] x, int64[2] s) => (bfloat16[3, 2] y) { y = Reshape(x, s) }")
    celosia.compile(late, "tiny").save(tmp_path / "program")
    feed = {"x": np.ones((2, 3), np.float32), "s": np.array([3, 2])}
    assert Runtime(celosia.Program.load(tmp_path / "program")).run(feed).outputs["y"].dtype == np.float32


def test_outputs_that_are_left_out(tmp_path: Path) -> None:
    """Trailing outputs with empty names are left out."""
    proto = model("g (float[6] x) => (float[N] y) { y, i, j, c = Unique(x) }")
    proto.graph.node[0].output[1:] = ["", "", ""]
    celosia.compile(proto, "tiny").save(tmp_path / "program")
    x = np.float32([3, 1, 1, 2, 3, 1])
    outputs = Runtime(celosia.Program.load(tmp_path / "program")).run({"x": x}).outputs
    assert outputs["y"].tolist() == [1, 2, 3]


def test_an_output_that_is_an_input() -> None:
    """An output that is an input has the input's shape, not the declared one."""
    proto = model("g (float[2, 3] x) => (float[2, 3] y) { y = Neg(x) }")
    proto.graph.output.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 12, 4]))
    outputs = Runtime(celosia.compile(proto, "tiny")).run({"x": np.ones((2, 3), np.float32)}).outputs
    assert outputs["x"].shape == (2, 3)


def test_an_old_models_constant_says_what_it_is() -> None:
    """The shape of a constant counts, not that of the input with the same name."""
    proto = model("g (float[2] x, float[1] w) => (float[2] y) { y = Add(x, w) }", w=np.array([1, 2], np.float32))
    outputs = Runtime(celosia.compile(proto, "tiny")).run({"x": np.zeros(2, np.float32)}).outputs
    assert outputs["y"].tolist() == [1, 2]


# Quantisation ---------------------------------------------------------------------------------------------------


SCALES = [0.0, float("inf"), 1e-45, -1.0, float("nan"), 3e38]


SCALED = [*product(SCALES, ["qdq", "qoperator"])]


@pytest.mark.parametrize(("scale", "form"), some(SCALED, [(0.0, "qdq"), (float("inf"), "qoperator")]))
def test_scales(scale: float, form: str, recwarn: pytest.WarningsRecorder) -> None:
    """Extreme scales give a result or a sentence, for one scale and for all."""
    from driver_models import quantised

    proto = quantised(form=form)
    scales = [n for n, tensor in enumerate(proto.graph.initializer) if tensor.name.startswith("scale")]
    for numbers in (*([each] for each in scales), scales):
        changed = onnx.ModelProto()
        changed.CopyFrom(proto)
        for tensor in (changed.graph.initializer[number] for number in numbers):
            array = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(np.full_like(array, scale), tensor.name))
        try:
            runtime = Runtime(celosia.compile(changed, "tiny"))
            runtime.run({"input_1": np.ones((1, 3, 8, 8), np.float32)})
        except (ModelError, HostError) as error:
            assert "\n" not in str(error)
    assert not [str(warning.message) for warning in recwarn if not issubclass(warning.category, ResourceWarning)]


@pytest.mark.parametrize("scale", [0.0, -0.05, float("inf"), float("nan")])
@pytest.mark.parametrize(
    "operator",
    ["MatMul(a, b)", "Add(a, b)", "GlobalAveragePool(a)", "ReduceMean(a, axes)", "LayerNormalization(a, ones)"],
)
def test_scales_of_other_operators(operator: str, scale: float, recwarn: pytest.WarningsRecorder) -> None:
    """Extreme scales of operands and results give onnxruntime's bytes, if it computes any, in both roundings."""
    ort = pytest.importorskip("onnxruntime")
    x, y = np.random.default_rng(0).integers(-128, 128, (2, 1, 8, 8, 8)).astype(np.int8)
    constants = {"zero": np.int8(0), "axes": np.array([2, 3]), "ones": np.ones(8, np.float32)}
    for number in (0, 1):
        steps = {f"s{k}": np.float32(scale if k == number else 0.05) for k in (0, 1)}
        proto = model(
            f"""g (int8[1, 8, 8, 8] x, int8[1, 8, 8, 8] y) => (int8[1, 8, n, m] r) {{
                a = DequantizeLinear(x, s0, zero) b = DequantizeLinear(y, s0, zero)
                c = {operator} r = QuantizeLinear(c, s1, zero) }}""",
            **constants, **steps,
        )  # fmt: skip
        options = ort.SessionOptions()
        options.add_session_config_entry("session.qdqisint8allowed", "1")
        session = ort.InferenceSession(proto.SerializeToString(), options)
        try:
            (wanted,) = session.run(None, {"x": x, "y": y})
        except Exception:  # QLinearGlobalAveragePool takes scales above 0 only
            wanted = None
        for rounding in ("onnxruntime", "correct"):
            program = celosia.compile(proto, Config(norm=4), rounding=rounding, check=False)
            found = Runtime(program, "functional").run({"x": x, "y": y}).outputs["r"]
            np.testing.assert_array_equal(found, found if wanted is None else wanted, err_msg=f"{rounding}, {steps}")
    assert not [str(warning.message) for warning in recwarn if "celosia" in warning.filename]


def test_a_convolution_without_channels() -> None:
    proto = model(
        """g (int8[1, 2, 4, 4] x) => (int8[1, n, 4, 4] y) {
            a = DequantizeLinear(x, step, zero) w = DequantizeLinear(none, step, zero)
            b = Conv(a, w) y = QuantizeLinear(b, step, zero) }""",
        step=np.float32(0.05), zero=np.int8(0), none=np.zeros((0, 2, 1, 1), np.int8),
    )  # fmt: skip
    y = Runtime(celosia.compile(proto, "tiny")).run({"x": np.zeros((1, 2, 4, 4), np.int8)}).outputs["y"]
    assert y.shape == (1, 0, 4, 4)


@pytest.mark.parametrize("bounds", ["none, one", "one, none", "none, none"])
def test_bounds_that_are_no_number_bound_nothing(bounds: str) -> None:
    ort = pytest.importorskip("onnxruntime")
    proto = model(
        f"""g (int8[1, 256] x) => (int8[1, 256] y) {{
            a = DequantizeLinear(x, step, zero) b = Clip(a, {bounds}) y = QuantizeLinear(b, step, zero) }}""",
        step=np.float32(0.05), zero=np.int8(3), one=np.float32(1), none=np.float32(np.nan),
    )  # fmt: skip
    x = np.arange(-128, 128).astype(np.int8)[None]
    (wanted,) = ort.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    found = Runtime(celosia.compile(proto, "tiny")).run({"x": x}).outputs["y"]
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("what", ["dilations", "strides"])
@pytest.mark.parametrize("value", [0, -1])
def test_windows_that_stand_still(what: str, value: int, tmp_path: Path) -> None:
    """Strides and dilations of 0 or less are refused or stay on the CPU; a compiled Program can be loaded."""
    from driver_models import quantised

    proto = quantised(form="qoperator")
    convolution = next(node for node in proto.graph.node if node.op_type == "QLinearConv")
    others = [attribute for attribute in convolution.attribute if attribute.name != what]
    del convolution.attribute[:]
    convolution.attribute.extend([*others, helper.make_attribute(what, [value, 1])])
    try:
        program = celosia.compile(proto, "tiny")
    except ModelError as error:
        assert "\n" not in str(error)
        return
    assert convolution.name not in {layer.name for launch in program.launches for layer in launch.layers}
    program.save(tmp_path / "program")
    celosia.Program.load(tmp_path / "program")


def test_a_zero_point_that_is_no_integer() -> None:
    from driver_models import quantised

    proto = quantised(form="qoperator")
    convolution = next(node for node in proto.graph.node if node.op_type == "QLinearConv")
    (zero,) = (each for each in proto.graph.initializer if each.name == convolution.input[7])
    zero.CopyFrom(helper.make_tensor(zero.name, TensorProto.FLOAT8E5M2, [], [0.0]))
    refuse_to_compile(proto, r"y_zero_point of QLinearConv .* is of float8e5m2; it takes int8 or uint8")


def test_a_bias_of_another_length() -> None:
    from driver_models import quantised

    for form in ("qdq", "qoperator"):
        proto = quantised(form=form)
        for tensor in proto.graph.initializer:
            if tensor.name.startswith("bias"):
                array = numpy_helper.to_array(tensor)
                tensor.CopyFrom(numpy_helper.from_array(np.resize(array, array.size - 3), tensor.name))
        refuse_to_compile(proto, "Conv")


# Loops ----------------------------------------------------------------------------------------------------------

ENDLESS = """g (float[1] x) => (float[1] y) {
    y = Loop (trips, yes, x) <body = b (int64 i, bool c, float[1] a) => (bool c2, float[1] a2)
        { c2 = Identity(c) a2 = Add(a, a) }> }"""
FILLING = """g (float[1] x) => (float[N, M] y) {
    y = Loop (trips, yes) <body = b (int64 i, bool c) => (bool c2, float[M] a)
        { c2 = Identity(c) a = ConstantOfShape(size) }> }"""


def test_ctrl_c_ends_a_loop(tmp_path: Path) -> None:
    onnx.save(model(ENDLESS, trips=np.array(2**60), yes=np.array(True)), tmp_path / "model.onnx")
    np.save(tmp_path / "x.npy", ONE)
    command = [sys.executable, "-m", "celosia.driver.cli", "run", "model.onnx", "--input", "x.npy"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stderr=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stderr is not None
            while "running" not in (line := process.stderr.readline()):
                assert line, "it ended"
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=60)[1].strip().endswith("interrupted")
            assert process.returncode == 130
        finally:
            process.kill()


def test_a_loop_that_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from celosia.compiler.program.host import op as host_op

    monkeypatch.setattr(host_op, "memory_bytes", lambda: 1 << 24)
    proto = model(FILLING, trips=np.array(2**60), yes=np.array(True), size=np.array([1 << 18]))
    with pytest.raises(HostError, match=r"Loop:y.*17 steps"):
        Runtime(celosia.compile(proto, "tiny")).run({"x": ONE})


def test_the_memory_is_the_process_own() -> None:
    """A memory limit of the process counts, as in a container or a batch system."""
    code = "import resource; from celosia.compiler.program.host.op import memory_bytes; "
    code += "resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31)); print(memory_bytes())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ), check=True
    )
    assert int(done.stdout) == 2**31


def test_where_nan_is() -> None:
    """ArgMax returns the position of a NaN, never one outside of the axis."""
    x = np.array([[1, np.nan, 3], [4, 2, 1]], np.float32)
    for op, want in (("ArgMax", [1, 0]), ("ArgMin", [1, 2])):
        proto = model(f"g (float[2, 3] x) => (int64[2] y) {{ y = {op}<axis=1, keepdims=0>(x) }}")
        assert Runtime(celosia.compile(proto, "tiny")).run({"x": x}).outputs["y"].tolist() == want


@pytest.mark.parametrize("operator", ["Conv<group = 0>(x, w)", "GroupNormalization<num_groups = 0>(x, v, v)"])
def test_groups_that_there_are_not(operator: str) -> None:
    constants = {"w": np.ones((3, 3, 1, 1), np.float32), "v": FLOATS}
    refuse_to_compile(
        model(f"g (float[1, 3, 4, 4] x) => (float[N, C, H, W] y) {{ y = {operator} }}", **constants), "is 0"
    )


@pytest.mark.parametrize("equation", ["ij->i", "i,j->ij", "ij,->k("])
def test_equations_of_other_tensors(equation: str) -> None:
    proto = model(f'g (float[3] x) => (float[N] y) {{ y = Einsum<equation = "{equation}">(x) }}')
    with pytest.raises((ModelError, HostError), match="Einsum"):
        Runtime(celosia.compile(proto, "tiny")).run({"x": FLOATS})


def test_broken_models_are_not_cut(tmp_path: Path) -> None:
    """`cut` refuses broken models with a ModelError."""
    wrong = model("g (float[1, 3, 4, 4] x) => (float[1, 3, 1, 1] y) { y = Conv<kernel_shape = [4, 4]>(x, w) }",
                  w=np.ones((3, 3, 1, 1), np.float32))  # fmt: skip
    short = model("g (float[3] x) => (float[3] y) { y = Add(x, w) }", w=FLOATS)
    short.graph.initializer[0].raw_data = b"123"
    twice = model("g (float[3] x) => (float[3] y) { y = Neg(x) y = Abs(x) }")
    for number, proto in enumerate((wrong, short, twice)):
        path = tmp_path / f"{number}.onnx"
        path.write_bytes(proto.SerializeToString())
        with pytest.raises(ModelError):
            cut(path)


def test_texts_have_no_price() -> None:
    text = model("g (string[3] x) => (string[3] y) { y = Identity(x) }")
    assert price(text).cycles == 0
