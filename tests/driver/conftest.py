"""Write small models to files, and let the tests `import driver_models` and `import small_models`."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

sys.path += [str(Path(__file__).parents[2] / folder) for folder in ("", "tests", "tests/driver", "tests/cosim")]

from driver_models import dynamic, floats, quantised


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
def one_registry() -> Iterator[None]:
    """Cache the operators of torch.onnx and torch.export for all tests.

    Both build their registry again for each export, which takes longer than the export of a small model.
    """
    if "torch" not in sys.modules:
        yield
        return
    try:
        from torch._export import utils
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        make, materialise = cache(ONNXRegistry.from_torchlib), cache(utils._materialize_cpp_cia_ops)
    except (ImportError, AttributeError):  # these private names may disappear
        yield
        return

    def copied(*args: Any, **named: Any) -> Any:
        registry = copy.copy(make(*args, **named))
        registry.functions = {target: list(functions) for target, functions in registry.functions.items()}
        return registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "_materialize_cpp_cia_ops", materialise)
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(copied))
        yield
