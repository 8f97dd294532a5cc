"""Broken models give a ModelError that names the broken part, never another exception."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from driver_models import floats, quantised
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thorough import tries

import celosia
from celosia.compiler.graph.errors import ModelError

MODELS = [
    quantised().SerializeToString(),
    quantised(form="qoperator").SerializeToString(),
    floats().SerializeToString(),
]


@settings(max_examples=tries(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_surprises(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(data.draw(st.sampled_from(MODELS)))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            content[place] ^= 1 << data.draw(st.integers(0, 7))
        else:
            del content[place : place + data.draw(st.integers(1, 3))]
    path = tmp_path / "damaged.onnx"
    path.write_bytes(content)
    try:
        celosia.compile(path, "tiny")
    except ModelError as error:
        assert "\n" not in str(error)


def _short_constant(model: onnx.ModelProto) -> None:
    weights = next(tensor for tensor in model.graph.initializer if tensor.name.startswith("weights"))
    weights.raw_data = weights.raw_data[:-1]


def _no_groups(model: onnx.ModelProto) -> None:
    node = next(node for node in model.graph.node if node.op_type == "QLinearConv")
    del node.attribute[:]
    node.attribute.append(onnx.helper.make_attribute("group", 0))


def _one_stride(model: onnx.ModelProto) -> None:
    node = next(node for node in model.graph.node if node.op_type == "QLinearConv")
    for attr in node.attribute:
        if attr.name in ("pads", "strides"):
            attr.ints[:] = [1]


def _missing_file(model: onnx.ModelProto) -> None:
    weights = next(tensor for tensor in model.graph.initializer if tensor.name.startswith("weights"))
    weights.ClearField("raw_data")
    weights.data_location = onnx.TensorProto.EXTERNAL
    weights.external_data.append(onnx.StringStringEntryProto(key="location", value="weights.bin"))


def _no_type(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = 0


def _no_shape(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.ClearField("shape")


def _negative(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = -3


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_short_constant, r"weights"),
        (_no_groups, r"(?i)group"),
        (_one_stride, r"strides"),
        (_missing_file, r"weights"),
        (_no_type, r"input_1"),
        (_no_shape, r"shape"),
        (_negative, r"input_1"),
    ],
)
def test_the_part_is_named(tmp_path: Path, damage: Callable[[onnx.ModelProto], None], words: str) -> None:
    model = quantised(form="qoperator")
    damage(model)
    path = tmp_path / "broken.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=words) as info:
        celosia.compile(path, "tiny")
    assert "\n" not in str(info.value)
