"""Models with more than loops run: control flow, sequences, strings, shapes known at run time; impossible ones fail."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import celosia
from celosia.compiler.compile import ModelError
from celosia.compiler.cpu.operators_doc import OF_QUANTISERS, is_supported, operators_markdown
from celosia.compiler.program import CpuStep, HostStep, InputError, Program
from celosia.compiler.program.host.op import HostError
from celosia.driver.runtime import Runtime

Dims = Sequence[int | str]


def value(name: str, dims: Dims, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, dims)


def model(
    nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto],
    opset: int = 20, functions: list[onnx.FunctionProto] | None = None, **constants: Any,
) -> onnx.ModelProto:  # fmt: skip
    initial = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initial)
    return helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=functions or [])


def through_file(proto: onnx.ModelProto, folder: Path) -> Program:
    celosia.compile(proto).save(folder / "program")
    return Program.load(folder / "program")


def test_branches_read_what_is_around_them(tmp_path: Path) -> None:
    branches = {
        f"{which}_branch": helper.make_graph(
            [helper.make_node(op, ["x", "k"], [f"{which}_y"])], which, [], [value(f"{which}_y", [3])]
        )
        for which, op in (("then", "Add"), ("else", "Mul"))
    }
    nodes = [
        helper.make_node("Exp", ["a"], ["x"]),
        helper.make_node("If", ["c"], ["b"], **branches),
        helper.make_node("Neg", ["b"], ["y"]),
    ]
    proto = model(
        nodes, [value("a", [3]), value("c", [], TensorProto.BOOL)], [value("y", [3])], k=np.float32([1, 2, 3])
    )
    runtime = Runtime(through_file(proto, tmp_path))
    a, k = np.float32([-1, 0, 0.5]), np.float32([1, 2, 3])
    for c, expected in ((True, -(np.exp(a) + k)), (False, -(np.exp(a) * k))):
        np.testing.assert_allclose(runtime.run({"a": a, "c": np.array(c)}).outputs["y"], expected, rtol=1e-6)


def test_a_chain_is_one_kernel() -> None:
    nodes = [helper.make_node(op, [a], [b]) for op, a, b in (("Exp", "x", "p"), ("Neg", "p", "q"), ("Sqrt", "q", "y"))]
    program = celosia.compile(model(nodes, [value("x", [64])], [value("y", [64])]))
    assert [[node.op for node in step.nodes] for step in program.steps if isinstance(step, CpuStep)] == [
        ["Exp", "Neg", "Sqrt"]
    ]
    assert len(program.kernels) == 1


def test_shape_computations_fold_away() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Slice", ["s", "zero", "one"], ["first"]),
        helper.make_node("Concat", ["first", "rest"], ["dims"], axis=0),
        helper.make_node("Reshape", ["x", "dims"], ["r"]),
        helper.make_node("Relu", ["r"], ["y"]),
    ]
    proto = model(nodes, [value("x", [2, 3, 4])], [value("y", [2, "n"])], zero=[0], one=[1], rest=[-1])
    program = celosia.compile(proto)
    assert not any(isinstance(step, HostStep) for step in program.steps)
    assert program.outputs[0].shape == (2, 12)


def test_shapes_known_at_run_time(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("NonZero", ["x"], ["places"]),
        helper.make_node("Transpose", ["places"], ["rows"]),
        helper.make_node("GatherND", ["x", "rows"], ["kept"]),
        helper.make_node("Softmax", ["kept"], ["y"], axis=0),
    ]
    program = through_file(model(nodes, [value("x", [2, 4])], [value("y", ["n"])]), tmp_path)
    assert program.outputs[0].shape == (-1,)
    runtime = Runtime(program)
    for x in (np.float32([[0, 1, 0, 2], [3, 0, 0, 0]]), np.float32([[1, 1, 1, 1], [1, 1, 1, 2]])):
        kept = x[x != 0]
        np.testing.assert_allclose(runtime.run({"x": x}).outputs["y"], np.exp(kept) / np.exp(kept).sum(), rtol=1e-5)


def test_sequences_and_strings(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("SequenceConstruct", ["a", "b"], ["s"]),
        helper.make_node("SequenceAt", ["s", "one"], ["t"]),
        helper.make_node("StringConcat", ["t", "end"], ["y"]),
    ]
    texts = [value(name, [2], TensorProto.STRING) for name in ("a", "b", "y")]
    proto = model(nodes, texts[:2], texts[2:], one=np.int64(1), end=np.array(["!", "?"], object))
    a, b = np.array(["x", "y"], object), np.array(["u", "ü"], object)
    assert Runtime(through_file(proto, tmp_path)).run({"a": a, "b": b}).outputs["y"].tolist() == ["u!", "ü?"]


def test_types_that_numpy_has_not(tmp_path: Path) -> None:
    k = np.array([1.5, -2], ml_dtypes.bfloat16)
    kind = TensorProto.BFLOAT16
    proto = model([helper.make_node("Mul", ["x", "k"], ["y"])], [value("x", [2], kind)], [value("y", [2], kind)], k=k)
    result = Runtime(through_file(proto, tmp_path)).run({"x": np.array([2, 3], ml_dtypes.bfloat16)}).outputs["y"]
    assert result.dtype == ml_dtypes.bfloat16 and result.tolist() == [3, -6]


def test_functions_of_the_model() -> None:
    body = [helper.make_node("Mul", ["a", "a"], ["s"]), helper.make_node("Add", ["s", "a"], ["r"])]
    function = helper.make_function("own", "F", ["a"], ["r"], body, [helper.make_opsetid("", 20)])
    nodes = [helper.make_node("F", ["x"], ["y"], domain="own"), helper.make_node("F", ["y"], ["z"], domain="own")]
    program = celosia.compile(model(nodes, [value("x", [2])], [value("z", [2])], functions=[function]))
    assert Runtime(program).run({"x": np.float32([1, 2])}).outputs["z"].tolist() == [6, 42]


def test_seeded_random_numbers_are_repeated() -> None:
    nodes = [helper.make_node("RandomNormal", [], ["y"], shape=[4], seed=3.0)]
    runtime = Runtime(celosia.compile(model(nodes, [], [value("y", [4])])))
    assert np.array_equal(runtime.run({}).outputs["y"], runtime.run({}).outputs["y"])


X = [value("x", [2])]
HUGE = [1 << 20, 1 << 20]
ONE = np.ones((1, 1), np.float32)


@pytest.mark.parametrize(
    ("proto", "words"),
    [
        (model([helper.make_node("Foo", ["x"], ["y"], name="foo", domain="own")], X, [value("y", [2])]),
         r"Foo of domain 'own' \(foo\) is not supported"),
        (model([helper.make_node("Foo", ["x"], ["y"], name="foo")], X, [value("y", [2])]), r"Foo.*foo"),
        (model([helper.make_node("ConstantOfShape", ["s"], ["y"], name="big")], [], [value("y", ["a", "b"])], s=HUGE),
         r"ConstantOfShape \(big\): output 'y' .* memory"),
        (model([helper.make_node("Expand", ["x", "s"], ["y"], name="big")], [value("x", [1])],
               [value("y", ["a", "b"])], s=HUGE), r"Expand \(big\): output 'y' .* memory"),
        (model([helper.make_node("Relu", ["x"], ["y"])], [value("x", HUGE)], [value("y", HUGE)]),
         r"input 'x' .* memory"),
        (model([helper.make_node("Add", ["x", "b"], ["a"], name="n"), helper.make_node("Relu", ["a"], ["b"])], X,
               [value("b", [2])]), r"'b'.*name: n"),
        (model([helper.make_node("Reshape", ["x", "s"], ["y"], name="r")], X, [value("y", ["a"])], s=[3]),
         r"Reshape \(r\).*\[2\].*\[3\]"),
        (model([helper.make_node("MatMul", ["w", "x"], ["y"])], [value("x", ["n"])], [value("y", [1])], w=ONE),
         r"input 'x' has a dynamic dimension 0 \(n\), whose size is not given; give numbers for --shape x=n "),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(proto: onnx.ModelProto, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        celosia.compile(proto)


@pytest.mark.parametrize(
    ("op", "dims", "words"),
    [("Reshape", [3], r"Reshape \(n\): .*\[2\]"), ("Expand", [1 << 40, 2], r"Expand \(n\).* memory")],
)
def test_impossible_shapes_at_run_time(op: str, dims: list[int], words: str) -> None:
    nodes = [helper.make_node(op, ["x", "s"], ["y"], name="n")]
    shape = value("s", [len(dims)], TensorProto.INT64)
    runtime = Runtime(celosia.compile(model(nodes, [*X, shape], [value("y", [f"d{i}" for i in range(len(dims))])])))
    x = np.zeros(2, np.float32)
    with pytest.raises(HostError, match=words):
        runtime.run({"x": x, "s": np.array(dims, np.int64)})
    with pytest.raises(InputError, match="'s' is missing"):
        runtime.run({"x": x})


def test_the_page_of_operators_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "operators.md"
    assert page.read_text(encoding="utf-8") == operators_markdown(), (
        "print it again: python -m celosia.compiler.cpu.operators_doc > docs/operators.md"
    )


def test_operators_that_quantisers_write_run_or_stand_under_not_yet() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operators.md").read_text(encoding="utf-8")
    missing = set(re.split(r"[,\s]+", page.split("## Not yet")[1].replace(".\n", " ")))
    for operators in OF_QUANTISERS.values():
        for name in operators:
            assert is_supported(name) != (name in missing), name
            if "." not in name or name.startswith("com.microsoft."):
                assert is_supported(name), f"onnxruntime runs {name}"


def test_pooling_of_regions() -> None:
    x = np.arange(32, dtype=np.float32).reshape(1, 2, 4, 4)
    proto = model(
        [helper.make_node("MaxRoiPool", ["x", "r"], ["y"], pooled_shape=[2, 2]),
         helper.make_node("GlobalLpPool", ["x"], ["z"], p=1)],
        [value("x", x.shape), value("r", [1, 5])], [value("y", [1, 2, 2, 2]), value("z", [1, 2, 1, 1])],
    )  # fmt: skip
    outputs = Runtime(celosia.compile(proto)).run({"x": x, "r": np.float32([[0, 0, 0, 3, 3]])}).outputs
    assert outputs["y"].tolist() == [[[[5, 7], [13, 15]], [[21, 23], [29, 31]]]]
    assert outputs["z"].reshape(-1).tolist() == [x[0, 0].sum(), x[0, 1].sum()]
