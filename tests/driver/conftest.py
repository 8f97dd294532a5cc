"""Write small models to files, and let the tests `import driver_models` and `import small_models`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import onnx
import pytest

sys.path += [str(Path(__file__).parents[2] / folder) for folder in ("", "tests", "tests/driver", "tests/cosim")]

from driver_models import dynamic, floats, quantised
from torch_registry import one_registry


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with models and their inputs.

    It holds quantised.onnx, floats.onnx, dynamic.onnx, x.npy (for the first), a.npy and b.npy (for the second).
    """
    folder = tmp_path_factory.mktemp("models")
    rng = np.random.default_rng(0)
    onnx.save(quantised(), folder / "quantised.onnx")
    onnx.save(floats(), folder / "floats.onnx")
    onnx.save(dynamic(), folder / "dynamic.onnx")
    np.save(folder / "x.npy", rng.normal(size=(1, 3, 8, 8)).astype(np.float32))
    np.save(folder / "a.npy", rng.normal(size=(2, 3)).astype(np.float32))
    np.save(folder / "b.npy", rng.normal(size=(2, 3)).astype(np.float32))
    return folder


@pytest.fixture(scope="session", autouse=True)
def one_list_of_operators() -> Iterator[None]:
    """Share one list of torch's operators among all exports, if a test has imported torch."""
    with one_registry() if "torch" in sys.modules else nullcontext():
        yield
