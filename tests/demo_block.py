"""Cut the first residual block out of the demo model, for tests that need a model of one's own that is quick."""

from __future__ import annotations

from pathlib import Path

import onnx.utils

from celosia.models import demo_model_path


def save_demo_block(folder: Path) -> Path:
    """Write the first residual block of the demo model to `folder` and return the file.

    It maps `image`, as the demo model has it, to [1, 16, 32, 32]. Shipped records make it faster on `pynq`.
    """
    path = folder / "demo_block.onnx"
    onnx.utils.extract_model(str(demo_model_path()), str(path), ["image"], ["block1.out_DequantizeLinear_Output"])
    return path
