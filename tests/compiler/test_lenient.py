"""Models that onnxruntime accepts and the ONNX checker refuses run, with onnxruntime's outputs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from oracle import opened

import celosia
from celosia.compiler.graph.errors import ModelError
from celosia.driver.runtime import Runtime

CHAIN = "g (float[2, 3] x) => (float[2, 3] y) { a = Neg(x) b = Add(a, x) c = Exp(a) y = Mul(c, x) }"
GELU = "g (float[2, 3] x) => (float[2, 3] y) { y = com.microsoft.Gelu(x) }"
INNER_GELU = """g (float[2, 3] x) => (float[2, 3] y) { y = If(t)
    <then_branch = p () => (float[2, 3] z) { q = com.microsoft.Gelu(x) z = Neg(q) },
     else_branch = n () => (float[2, 3] w) { w = Abs(x) }> }"""
BIASED = "g (float[2, 3] x) => (float[2, 3] y) { y = Add(x, w) }"
FUNCTION = """<ir_version: 9, opset_import: ["": 17, "own": 1]> g (float[2, 3] x) => (float[2, 3] y) { y = own.f(x) }
    <domain: "own", opset_import: ["": 17]> f (p) => (q) { r = Neg(p) q = Abs(r) }"""


def graph(text: str, **constants: Any) -> ModelProto:
    """Return a model that imports only opset 17."""
    proto = onnx.parser.parse_graph(text)
    proto.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items())
    return helper.make_model(proto, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def importing(model: ModelProto, domain: str, version: int = 1) -> ModelProto:
    model.opset_import.append(helper.make_opsetid(domain, version))
    return model


def output_without_shape() -> ModelProto:
    model = importing(graph(GELU), "com.microsoft")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


def output_without_type() -> ModelProto:
    model = graph(CHAIN)
    model.graph.output[0].ClearField("type")
    return model


def output_without_type_behind_microsoft() -> ModelProto:
    model = importing(graph(GELU), "com.microsoft")
    model.graph.output[0].ClearField("type")
    return model


def constant_input_without_shape() -> ModelProto:
    model = graph(BIASED, w=np.ones(3, np.float32))
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, None))
    return model


def no_import(text: str) -> Callable[[], ModelProto]:
    return lambda: graph(text)


def no_import_of_onnx() -> ModelProto:
    model = importing(graph(GELU.replace("y = ", "a = ").replace("(x) }", "(x) y = Softmax(a) }")), "com.microsoft")
    del model.opset_import[0]
    return model


def nodes_of_ai_onnx() -> ModelProto:
    model = graph(CHAIN)
    for node in model.graph.node:
        node.domain = "ai.onnx"
    return model


def ir_version(version: int) -> Callable[[], ModelProto]:
    def make() -> ModelProto:
        model = graph(BIASED, w=np.ones(3, np.float32))
        model.ir_version = version
        return model

    return make


def constants_of_one_name() -> ModelProto:
    model = graph(BIASED, w=np.ones(3, np.float32))
    model.graph.initializer.append(numpy_helper.from_array(np.full(3, 2, np.float32), "w"))
    return model


def nameless_constants() -> ModelProto:
    model = graph(CHAIN)
    model.graph.initializer.extend([numpy_helper.from_array(np.ones(3, np.float32))] * 2)
    return model


def unsorted() -> ModelProto:
    model = graph(CHAIN)
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def unsorted_around_a_subgraph() -> ModelProto:
    """A subgraph reads the output of a later node."""
    model = graph(INNER_GELU.replace("Abs(x)", "Abs(later)"), t=np.array(False))
    model.graph.node.append(helper.make_node("Neg", ["x"], ["later"]))
    return importing(model, "com.microsoft")


def metadata_given_twice() -> ModelProto:
    model = graph(CHAIN)
    for text in ("a", "b"):
        model.metadata_props.add(key="framework", value=text)
    return model


def no_name_of_the_graph() -> ModelProto:
    model = graph(CHAIN)
    model.graph.ClearField("name")
    return model


def comments_in_latin_1() -> ModelProto:
    model = graph(CHAIN)
    model.producer_name = model.doc_string = model.graph.doc_string = "??"
    model.graph.node[0].name = model.graph.node[0].doc_string = "??"
    return ModelProto.FromString(model.SerializeToString().replace(b"??", b"\xe4\xff"))


def function_of_another_version() -> ModelProto:
    return onnx.parser.parse_model(FUNCTION.replace('opset_import: ["": 17]>', 'opset_import: ["": 13]>'))


def function_that_alone_imports() -> ModelProto:
    text = FUNCTION.replace('opset_import: ["": 17]>', 'opset_import: ["": 17, "com.microsoft": 1]>')
    return onnx.parser.parse_model(text.replace("Neg(p)", "com.microsoft.Gelu(p)"))


def function_for_a_known_operator(domain: str, op: str) -> Callable[[], ModelProto]:
    """A model defines a function with the name of one of onnxruntime's operators; onnxruntime runs its operator."""

    def make() -> ModelProto:
        model = importing(onnx.parser.parse_model(FUNCTION), "com.microsoft")
        model.functions[0].domain = model.graph.node[0].domain = domain
        model.functions[0].name = model.graph.node[0].op_type = op
        return model

    return make


def aspect_ratio_of_axes_from_behind() -> ModelProto:
    """A Resize that keeps the aspect ratio has negative axes only; onnxruntime resizes none of them."""
    text = """g (float[2, 3] x) => (float[2, 6] y) {
        y = Resize <mode = "nearest", axes = [-1], keep_aspect_ratio_policy = "not_larger"> (x, , , sizes) }"""
    model = graph(text, sizes=np.array([6]))
    model.opset_import[0].version = 19
    return model


def aspect_ratio_of_some_axes_from_behind() -> ModelProto:
    """A Resize has a negative axis among others; onnxruntime neither resizes it nor counts its ratio."""
    text = """g (float[2, 3] x) => (float[a, b] y) {
        y = Resize <mode = "nearest", axes = [-1, 0], keep_aspect_ratio_policy = "not_larger"> (x, , , sizes) }"""
    model = graph(text, sizes=np.array([4, 5]))
    model.opset_import[0].version = 19
    return model


def with_an_empty_region(model: ModelProto) -> ModelProto:
    """Give a Resize an empty region, as exporters for version 11 write it."""
    model.graph.node[0].input[1] = "region"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(0, np.float32), "region"))
    return model


CASES: dict[str, Callable[[], ModelProto]] = {
    "an output without a shape": output_without_shape,
    "an output without a type": output_without_type,
    "an output without a type behind com.microsoft": output_without_type_behind_microsoft,
    "an input without a shape that is a constant": constant_input_without_shape,
    "no import of com.microsoft": no_import(GELU),
    "no import of com.microsoft, which a subgraph uses": lambda: graph(INNER_GELU, t=np.array(True)),
    "no import of ONNX": no_import_of_onnx,
    "nodes of ai.onnx": nodes_of_ai_onnx,
    "two versions of ONNX": lambda: importing(graph(CHAIN), "", 13),
    "two versions of ONNX under both names": lambda: importing(graph(CHAIN), "ai.onnx", 13),
    "ir version 0": ir_version(0),
    "ir version 1": ir_version(1),
    "constants that are no inputs in ir version 3": ir_version(3),
    "two constants of one name": constants_of_one_name,
    "constants without a name": nameless_constants,
    "nodes in reverse": unsorted,
    "nodes out of order around a subgraph": unsorted_around_a_subgraph,
    "metadata given twice": metadata_given_twice,
    "no name of the graph": no_name_of_the_graph,
    "an aspect ratio of axes counted from behind": aspect_ratio_of_axes_from_behind,
    "an aspect ratio of some axes counted from behind": aspect_ratio_of_some_axes_from_behind,
    "the same with an empty region": lambda: with_an_empty_region(aspect_ratio_of_some_axes_from_behind()),
    "no axis to resize, and an empty region": lambda: with_an_empty_region(aspect_ratio_of_axes_from_behind()),
    "comments that are no UTF-8": comments_in_latin_1,
    "a function of another version": function_of_another_version,
    "a function that imports what the model does not": function_that_alone_imports,
    "a function for an operator of ONNX": function_for_a_known_operator("", "Exp"),
    "a function for an operator of com.microsoft": function_for_a_known_operator("com.microsoft", "Gelu"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_onnxruntime_takes(case: str) -> None:
    model = CASES[case]()
    before = model.SerializeToString()
    session = opened(before)
    feed = {"x": np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)}
    expected = dict(zip([output.name for output in session.get_outputs()], session.run(None, feed)))
    outputs = Runtime(celosia.compile(model, "tiny")).run(feed).outputs
    assert list(outputs) == list(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(outputs[name], array, rtol=1e-5, atol=1e-6)
    assert model.SerializeToString() == before


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("opset", [7, 9, 13])
def test_five_outputs_train_before_opset_14(opset: int, shared: bool) -> None:
    """A BatchNormalization with training outputs normalises by its batch and is not folded into a convolution.

    shared: the training outputs are outputs of the model, too.
    """
    rng = np.random.default_rng(opset)
    constants = {
        "w": rng.normal(size=(3, 2, 3, 3)), "scale": rng.normal(size=3), "offset": rng.normal(size=3),
        "mean": rng.normal(size=3), "variance": rng.uniform(0.5, 2, 3),
    }  # fmt: skip
    more = ", float[3] m, float[3] v, float[3] sm, float[3] sv" if shared else ""
    text = f"""g (float[2, 2, 6, 6] x) => (float[2, 3, 4, 4] y{more}) {{ h = Conv(x, w)
        y, m, v, sm, sv = BatchNormalization<momentum: float = 0.8>(h, scale, offset, mean, variance) }}"""
    model = graph(text, **{name: np.float32(value) for name, value in constants.items()})
    model.opset_import[0].version = opset
    feed = {"x": rng.normal(size=(2, 2, 6, 6)).astype(np.float32)}
    wanted = opened(model.SerializeToString()).run(None, feed)
    outputs = Runtime(celosia.compile(model, "tiny")).run(feed).outputs
    for array, expected in zip(outputs.values(), wanted, strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_element_is_a_scalar(shape: tuple[int, ...]) -> None:
    model = graph("g (float[2, 3] x, float k) => (float[2, 3] y) { y = Mul(x, k) }")
    feed = {"x": np.ones((2, 3), np.float32), "k": np.full(shape, 3, np.float32)}
    expected = opened(model.SerializeToString()).run(None, feed)
    assert np.array_equal(Runtime(celosia.compile(model, "tiny")).run(feed).outputs["y"], expected[0].reshape(2, 3))


def open_input() -> ModelProto:
    model = graph(CHAIN)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    return model


REFUSED: dict[str, tuple[Callable[[], ModelProto], str]] = {
    "a circle": (lambda: graph(CHAIN.replace("Neg(x)", "Neg(b)")), "sorted"),
    "no version at all": (lambda: ModelProto(graph=graph(CHAIN).graph), "ir_version"),
    "no import of an unknown domain": (lambda: graph(GELU.replace("com.microsoft", "nowhere")), "'nowhere'"),
    "an input without a shape": (open_input, "input 'x' has no shape"),
}


# What exporters declare of shapes ---------------------------------------------------------------------------------


def convolution(*names: int | str) -> ModelProto:
    """Return a convolution of images [1, 2, 6, 5], whose sizes except the channels are declared as `names`."""
    model = graph("g (float[1, 2, 6, 5] x) => (float y) { c = Conv(x, w) y = Relu(c) }", w=np.ones((2, 2, 3, 3), "f4"))
    dims = model.graph.input[0].type.tensor_type.shape.dim
    for dim, name in zip((dims[0], *dims[2:]), names):
        dim.Clear()
        setattr(dim, "dim_value" if isinstance(name, int) else "dim_param", name)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


def declaring(model: ModelProto, name: str, *dims: int, kind: int = TensorProto.FLOAT) -> ModelProto:
    """Return `model` with a declared shape of an inner tensor."""
    model.graph.value_info.append(helper.make_tensor_value_info(name, kind, dims))
    return model


def branches(condition: bool | None, declared: list[int]) -> ModelProto:
    """Return an If whose branches declare another shape than they compute. condition: None for an input."""
    inner = []
    for name in ("then", "else"):
        out = helper.make_tensor_value_info(name, TensorProto.BOOL, declared)
        node = helper.make_node("Cast", ["x"], [name], to=TensorProto.BOOL)
        inner.append(helper.make_graph([node], name, [], [out]))
    model = graph("g (float[1, 2, 6, 5] x, bool b) => (bool[1, 2, 6, 5] y) { y = Identity(b) }")
    del model.graph.node[:]
    model.graph.node.append(helper.make_node("If", ["b"], ["y"], then_branch=inner[0], else_branch=inner[1]))
    if condition is not None:
        del model.graph.input[1]
        model.graph.initializer.append(numpy_helper.from_array(np.array(condition), "b"))
    return model


def loop(state: list[int] | None, scanned: list[int] | None = None) -> ModelProto:
    """Return a Loop whose body declares wrong shapes of its state and of its scan output."""
    body = onnx.parser.parse_graph("b (int64 i, bool go, float s) => (bool on, float t, float u) "
                                   "{ on = Identity(go) t = Add(s, x) u = Neg(t) }")  # fmt: skip
    for value, dims in zip((body.input[2], body.output[1], body.output[2]), (state, state, scanned)):
        value.CopyFrom(helper.make_tensor_value_info(value.name, TensorProto.FLOAT, dims))
    model = graph(
        "g (float[1, 2, 6, 5] x) => (float y, float z) { y = Neg(x) z = Neg(x) }", n=np.array(2), c=np.array(True)
    )
    del model.graph.node[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    model.graph.node.append(helper.make_node("Loop", ["n", "c", "x"], ["y", "z"], body=body))
    return model


NONZERO = "g (float[1, 2, 6, 5] x) => (float y) { p = Relu(x) n = NonZero(p) c = Cast<to = 1>(n) y = Neg(c) }"
DECLARED: dict[str, tuple[Callable[[], ModelProto], bool]] = {
    "sizes of -1": (lambda: convolution(-1, -1, -1), False),
    "sizes of -7": (lambda: convolution(-7, 6, 5), False),
    "sizes that are question marks": (lambda: convolution("?", "?", "?"), False),
    "sizes called None": (lambda: convolution("None", "None", "None"), False),
    "a wrong size inside": (lambda: declaring(convolution(), "c", 1, 2, 9, 9), False),
    "a wrong rank inside": (lambda: declaring(convolution(), "c", 3), False),
    "a constant of another rank": (lambda: declaring(convolution(), "w", 3), False),
    "an input of another rank": (lambda: declaring(convolution(), "x", 3), False),
    "a tensor twice": (lambda: declaring(declaring(convolution(), "c", 1, 2, 4, 3), "c", 1, 2, 5, 5), False),
    "a tensor that there is not": (lambda: declaring(convolution(), "nowhere", 3), False),
    "branches of an If": (lambda: branches(None, []), True),
    "branches of an If that is decided": (lambda: branches(True, []), True),
    "branches of an If with a wrong size": (lambda: branches(False, [1, 2, 6, 9]), True),
    "the state of a Loop": (lambda: loop([]), False),
    "what a Loop gathers": (lambda: loop([1, 2, 6, 5], [7]), False),
    "places of what is not zero": (lambda: declaring(graph(NONZERO), "n", 4, 60, kind=TensorProto.INT64), False),
}
"""Models, and whether onnxruntime's and our reading differ so much that there is a warning."""


@pytest.mark.parametrize("case", DECLARED)
@pytest.mark.filterwarnings("default")
def test_what_a_model_declares_wrongly(case: str, recwarn: pytest.WarningsRecorder) -> None:
    make, warns = DECLARED[case]
    model = make()
    feed = {"x": np.random.default_rng(0).standard_normal((1, 2, 6, 5)).astype(np.float32), "b": np.array(True)}
    feed = {value.name: feed[value.name] for value in model.graph.input}
    wanted = opened(model).run(None, feed)
    outputs = Runtime(model, config="tiny").run(feed).outputs
    for expected, array in zip(wanted, outputs.values(), strict=True):
        assert array.shape == expected.shape and array.dtype == expected.dtype
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6)
    messages = [str(each.message) for each in recwarn if "the model declares wrong shapes" in str(each.message)]
    assert bool(messages) == warns


@pytest.mark.parametrize("case", REFUSED)
def test_what_stays_refused(case: str) -> None:
    make, words = REFUSED[case]
    with pytest.raises(ModelError, match=re.escape(words)) as info:
        celosia.compile(make(), "tiny")
    assert "\n" not in str(info.value)
