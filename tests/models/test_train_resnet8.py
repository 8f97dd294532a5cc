"""The training script: its readers and its messages; with PyTorch also the exported and quantised graph."""

import gzip
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import typer
from typer.testing import CliRunner, Result

from celosia.models import train_resnet8


def write_idx(path: Path, array: np.ndarray, kind: int = 8) -> None:
    header = bytes([0, 0, kind, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    path.write_bytes(gzip.compress(header + array.tobytes()))


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(train_resnet8.main)
    return CliRunner().invoke(app, arguments)


def test_read_idx(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    write_idx(tmp_path / "a.gz", array)
    np.testing.assert_array_equal(train_resnet8.read_idx(tmp_path / "a.gz"), array)


def test_read_idx_rejects_other_element_types(tmp_path: Path) -> None:
    write_idx(tmp_path / "floats.gz", np.zeros(4, np.uint8), kind=13)
    with pytest.raises(ValueError, match=r"IDX.*00000d01"):
        train_resnet8.read_idx(tmp_path / "floats.gz")


def test_missing_data_says_what_to_install(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run("--data", str(tmp_path))
    assert result.exit_code == 1
    assert "apt-get install dataset-fashion-mnist" in result.output


def test_missing_torch_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in "train", "t10k":
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", np.zeros((1, 28, 28), np.uint8))
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", np.zeros(1, np.uint8))
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run("--data", str(tmp_path))
    assert result.exit_code == 1
    assert "torch is not installed: pip install 'celosia[train]'" in result.output


def test_export_and_quantise(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    network = train_resnet8.resnet8()
    network(torch.rand(8, 1, 32, 32))  # gives the batch normalisations something to fold
    train_resnet8.export(network.eval(), tmp_path / "float.onnx")  # compares with PyTorch
    operators = Counter(node.op_type for node in onnx.load(tmp_path / "float.onnx").graph.node)
    assert operators == {"Conv": 9, "Relu": 7, "Add": 3, "GlobalAveragePool": 1, "Flatten": 1, "Gemm": 1}

    images = np.random.default_rng(0).integers(0, 256, (4, 28, 28), np.uint8)
    train_resnet8.quantise(tmp_path / "float.onnx", tmp_path / "int8.onnx", images)
    assert 0 <= train_resnet8.accuracy(tmp_path / "int8.onnx", images, np.zeros(4, np.uint8)) <= 1
