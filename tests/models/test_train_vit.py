"""The vision transformer that is trained on Fashion-MNIST, on random images: what it is, and that all of it is int8."""

from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from celosia.models import preprocess, train_vit


def test_missing_data_says_what_to_install(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(train_vit.main)
    result = CliRunner().invoke(app, ["--data", str(tmp_path)])
    assert result.exit_code == 1 and "apt-get install dataset-fashion-mnist" in result.output


def test_train_export_and_quantise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript", reason="torch.onnx needs it: `make torch` installs it")
    assert sum(each.numel() for each in train_vit.vit().parameters()) == 106_378
    monkeypatch.setattr(train_vit, "LAYERS", 1)  # the layers are equal, and each takes as long as the rest
    images = np.random.default_rng(0).integers(0, 256, (8, 28, 28), np.uint8)
    network = train_vit.train(images, np.arange(8, dtype=np.uint8), 1, batch=4)
    train_vit.export(network, tmp_path / "float.onnx")
    report = train_vit.quantised(tmp_path / "float.onnx", tmp_path / "int8.onnx", images)
    assert report["accelerator"]["macs_accelerator"] == report["accelerator"]["macs_total"] > 0
    with torch.no_grad():
        labels = network(torch.from_numpy(preprocess(images))).argmax(1).numpy()
    assert train_vit.accuracy(tmp_path / "float.onnx", images, labels) == 1
