"""`match_tensors` finds the float model's tensor for each quantised tensor, even without equal names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from numpy.typing import NDArray
from small_models import Builder, detector, models
from thorough import some, tries

pytest.importorskip("onnxruntime")

from agreement import feed_of

from celosia.compiler.graph.errors import ModelError
from celosia.driver.accuracy.compare import compare
from celosia.driver.accuracy.matching import Flow, Matching, match_tensors
from celosia.driver.workstation import oracle

Array = NDArray[Any]


def in_floats(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return `model` without its QDQ pairs of activations."""
    floats = onnx.ModelProto()
    floats.CopyFrom(model)
    constants = {c.name for c in floats.graph.initializer}
    pairs = [n for n in floats.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    for node in (n for n in pairs if n.input[0] not in constants):
        node.op_type = "Identity"
        del node.input[1:], node.attribute[:]
    for value in floats.graph.output:
        value.ClearField("type")
    del floats.graph.value_info[:]
    return floats


def renamed(model: onnx.ModelProto, prefix: str = "t") -> tuple[onnx.ModelProto, dict[str, str]]:
    """Return `model` with other names for all tensors, and the new name of each old one."""
    copy, names = onnx.ModelProto(), {"": ""}
    copy.CopyFrom(model)
    for node in copy.graph.node:
        for places in (node.input, node.output):
            places[:] = [names.setdefault(name, f"{prefix}{len(names)}") for name in places]
    for value in (*copy.graph.input, *copy.graph.output, *copy.graph.initializer):
        value.name = names.setdefault(value.name, f"{prefix}{len(names)}")
    del copy.graph.value_info[:]
    return copy, names


def matched(model: onnx.ModelProto, floats: onnx.ModelProto, feed: dict[str, Array], folder: Path) -> Matching:
    quantised, exact = Flow(model), Flow(floats)
    tensors = dict(
        oracle.run_session(oracle.open_session(oracle.expose_tensors(in_floats(model)), "DISABLE_ALL"), feed)
    )
    values = {quantised.source(name): array for name, array in tensors.items() if array.dtype.kind == "f"}
    float_inputs = dict(zip(exact.inputs, feed.values()))
    return match_tensors(
        quantised,
        exact,
        values,
        oracle.run_session(oracle.open_session(oracle.expose_tensors(floats), "DISABLE_ALL"), float_inputs)
        | float_inputs,
    )


# Each tensor is matched by its place in the graph alone, with the tensor that has its new name.
# Hypothesis derives the seed of a derandomized test from its text, so its docstring stays as it is.
@settings(
    max_examples=tries(25), deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(b=models().filter(lambda b: b.qdq and not any(node.op_type == "If" for node in b.nodes)))
def test_all_of_a_model_with_other_names(tmp_path: Path, b: Builder) -> None:
    """Every tensor, by its place in the graph alone; the truth is who got which name."""
    model = b.model()
    floats, names = renamed(in_floats(model))
    quantised, exact = Flow(model), Flow(floats)
    found = matched(model, floats, feed_of(model), tmp_path)
    assert set(found.counterparts) == {*quantised.inputs, *quantised.maker} and not found.unmatched
    for own, (other, how) in found.counterparts.items():
        assert how != "name" and other == exact.source(names[own])


def test_equal_branches_are_told_apart_by_their_values(tmp_path: Path) -> None:
    """Values distinguish four convolutions of equal shape on one tensor, which the float model has in another order."""
    b = Builder("qdq", np.int8, seed=3)
    x = b.conv(b.input([1, 4, 9, 9]), 8, (1, 1))
    for _ in range(4):
        b.output(b.conv(x, 8, (3, 3)), real=True)
    model = b.model()
    shuffled = in_floats(model)
    convs = [node for node in shuffled.graph.node if node.op_type == "Conv"]
    weights = [list(node.input[1:]) + list(node.output) for node in convs[1:]]
    for node, name_or_operands in zip(convs[1:], reversed(weights)):
        node.input[1:], node.output[:] = name_or_operands[:-1], name_or_operands[-1:]
    floats, names = renamed(_sorted(shuffled))
    matching = matched(model, floats, feed_of(model), tmp_path)
    assert all(
        counterpart == Flow(floats).source(names[name_or_operands])
        for name_or_operands, (counterpart, _) in matching.counterparts.items()
    )
    assert sum(method == "structure" for _, method in matching.counterparts.values()) == 5


def _sorted(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return `model` with its nodes in topological order."""
    waiting, known = list(model.graph.node), {v.name for v in (*model.graph.input, *model.graph.initializer)} | {""}
    del model.graph.node[:]
    while waiting:
        node = next(node for node in waiting if set(node.input) <= known)
        waiting.remove(node)
        model.graph.node.append(node)
        known |= {*node.output}
    return model


def test_what_quantisation_absorbs(tmp_path: Path) -> None:
    """A convolution matches the Relu behind it in the float model, which the int8 model implies by clipping."""
    b = Builder("qdq", np.int8, seed=4)
    x = b.conv(b.input([1, 4, 8, 8]), 8, (3, 3))
    b.output(b.conv(x, 8, (1, 1)), real=True)
    model = b.model()
    floats, _ = renamed(in_floats(model))
    first, second = (node for node in floats.graph.node if node.op_type == "Conv")
    relu = onnx.helper.make_node("Relu", ["before"], [first.output[0]])
    floats.graph.node.insert(list(floats.graph.node).index(first) + 1, relu)
    first.output[0] = "before"
    matching = matched(model, floats, feed_of(model), tmp_path)
    convs = [node.output[0] for node in model.graph.node if node.op_type == "Conv"]
    assert [matching.counterparts[name] for name in convs] == [
        (relu.output[0], "structure"), (second.output[0], "structure")
    ]  # fmt: skip
    assert not matching.unmatched


def test_what_has_no_counterpart_is_listed(tmp_path: Path) -> None:
    b = Builder("qdq", np.int8, seed=4)
    x = b.conv(b.input([1, 4, 8, 8]), 8, (3, 3))
    b.output(b.conv(x, 8, (1, 1)), real=True)
    model = b.model()
    floats, _ = renamed(in_floats(model))
    first = next(node for node in floats.graph.node if node.op_type == "Conv")
    floats.graph.node.insert(0, onnx.helper.make_node("Neg", [first.input[0]], ["negative"]))
    first.input[0] = "negative"  # all later tensors differ
    onnx.save(model, tmp_path / "int8.onnx")
    onnx.save(floats, tmp_path / "float.onnx")
    report = compare(
        tmp_path / "int8.onnx", feed_of(model), config="tiny", check=False, float_model=tmp_path / "float.onnx"
    )
    rows = [row for row in report["tensors"] if row["op"] == "Conv"]
    assert {row["matched"] for row in rows} == {"order"} and all(row["sqnr_db"] < 6 for row in rows)
    assert report["unmatched"]["float"] == ["negative"]


@pytest.mark.parametrize("form", some(["qdq", "qoperator"], ["qoperator"]))
def test_a_detector_against_a_float_model_with_other_names(tmp_path: Path, form: str) -> None:
    """`compare` reports the same figures with equal and with other names, also for integer operators."""
    models_by_form = {}
    for item in ("qdq", form):
        b = Builder(item, np.int8, seed=6)
        detector(b)
        models_by_form[item] = b.model()
    model, plain = models_by_form[form], in_floats(models_by_form["qdq"])
    other, _ = renamed(plain)
    onnx.save(model, tmp_path / "int8.onnx")
    reports = []
    for number, floats in enumerate((plain, other) if form == "qdq" else (other,)):
        onnx.save(floats, tmp_path / f"{number}.onnx")
        reports.append(compare(
            tmp_path / "int8.onnx", feed_of(model), config="tiny", check=False, float_model=tmp_path / f"{number}.onnx"
        ))  # fmt: skip
    figures = [[row["sqnr_db"] for row in report["tensors"]] for report in reports]
    assert all(named == figures[0] for named in figures)
    unnamed = figures[-1]
    assert sum(item is not None for item in unnamed) > 60
    assert all(row["matched"] in ("structure", "order", None) for row in reports[-1]["tensors"])


def test_a_float_model_with_other_inputs_is_refused(tmp_path: Path) -> None:
    b = Builder("qdq", np.int8, seed=4)
    b.output(b.conv(b.input([1, 4, 8, 8]), 8, (3, 3)), real=True)
    model = b.model()
    floats, _ = renamed(in_floats(model))
    floats.graph.input.append(onnx.helper.make_tensor_value_info("mask", onnx.TensorProto.FLOAT, [1]))
    for name, model_to_save in (("int8", model), ("float", floats)):
        onnx.save(model_to_save, tmp_path / f"{name}.onnx")
    with pytest.raises(ModelError, match=r"the float model takes .*, mask, the int8 model input_1; give one with"):
        compare(tmp_path / "int8.onnx", feed_of(model), config="tiny", float_model=tmp_path / "float.onnx")
