"""The committed decoder: its metadata, inputs and outputs, its knowledge of the text, and its training script."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import typer
from typer.testing import CliRunner

from celosia.driver.workstation.oracle import open_session
from celosia.models import gpt_path, train_gpt

ort = pytest.importorskip("onnxruntime")


def test_the_file_says_what_its_tokens_are() -> None:
    assert gpt_path().stat().st_size < 1_200_000
    model = onnx.load(gpt_path())
    onnx.checker.check_model(model, full_check=True)
    properties = {entry.key: entry.value for entry in model.metadata_props}
    vocabulary = json.loads(properties["vocabulary"])
    assert len(set(vocabulary)) == len(vocabulary) <= 97 and {len(token) for token in vocabulary} == {1}
    assert set(vocabulary) <= {"\n", *map(chr, range(ord(" "), ord("~") + 1))}
    floats, int8 = (float(properties[f"held_out_perplexity_{kind}"]) for kind in ("float", "int8"))
    assert int8 < 1.01 * floats < 5


def test_inputs_and_outputs_are_those_of_the_contract() -> None:
    graph = onnx.load(gpt_path()).graph
    shapes = {value.name: (value.type.tensor_type.elem_type, [d.dim_param or d.dim_value for d in
              value.type.tensor_type.shape.dim]) for value in (*graph.input, *graph.output)}  # fmt: skip
    integers, floats = onnx.TensorProto.INT64, onnx.TensorProto.FLOAT
    expected = {"input_ids": (integers, [1, "steps"]), "attention_mask": (integers, [1, "total"]),
                "position_ids": (integers, [1, "steps"]), "logits": (floats, [1, "steps", 94])}  # fmt: skip
    expected |= {name: (floats, [1, 4, "past", 32]) for name in train_gpt.PAST}
    expected |= {name: (floats, [1, 4, "total", 32]) for name in train_gpt.PRESENT}
    assert shapes == expected


def test_it_goes_on_with_a_word() -> None:
    """After "the argum" comes "ent": each step continues with the caches of the one before."""
    model = open_session(gpt_path(), threads=1)
    vocabulary = json.loads(model.get_modelmeta().custom_metadata_map["vocabulary"])
    text = "a new argum"
    ids = np.array([[vocabulary.index(character) for character in text]])
    caches = {name: np.zeros((1, 4, 0, 32), np.float32) for name in train_gpt.PAST}
    for _ in range(3):
        past = caches[train_gpt.PAST[0]].shape[2]
        places = np.arange(past, past + ids.shape[1])[None]
        mask = np.ones((1, places.size + past), np.int64)
        logits, *new_caches = model.run(
            ["logits", *train_gpt.PRESENT],
            {"input_ids": ids, "attention_mask": mask, "position_ids": places, **caches},
        )
        caches, ids = dict(zip(train_gpt.PAST, new_caches)), logits[:, -1:].argmax(-1)
        text += vocabulary[ids[0, 0]]
    assert text == "a new argument"


# Training -------------------------------------------------------------------------------------------------------


def test_the_text_is_ascii_and_its_last_tenth_is_held_out() -> None:
    text = train_gpt.read_topics()
    assert set(text) <= {"\n", *map(chr, range(ord(" "), ord("~") + 1))}
    tokens, held_out, vocabulary = train_gpt.read_tokens()
    assert "".join(vocabulary[token] for token in (*tokens, *held_out)) == text
    assert len(held_out) == len(text) // 10


def test_windows() -> None:
    assert train_gpt.windows(np.arange(7), 3).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_missing_torch_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    command = typer.Typer()
    command.command()(train_gpt.main)
    result = CliRunner().invoke(command, ["--out", str(tmp_path)])
    assert result.exit_code == 1 and "torch is not installed: pip install 'celosia[train]'" in result.output


def test_export(tmp_path: Path) -> None:
    """The export compares itself with PyTorch for several numbers of steps and earlier tokens."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    train_gpt.export(train_gpt.gpt(94).eval(), tmp_path / "float.onnx")
    operators = {node.op_type for node in onnx.load(tmp_path / "float.onnx").graph.node}
    assert {"Gemm", "MatMul", "LayerNormalization", "Softmax", "Erf"} <= operators
    assert onnx.load(gpt_path()).graph.input == onnx.load(tmp_path / "float.onnx").graph.input
