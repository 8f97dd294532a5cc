"""Cache the operators of torch.onnx and torch.export, which take longer to list than a small model to export."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest


@contextmanager
def one_registry() -> Iterator[None]:
    """Let all exports share one list of operators; torch makes it anew for each. PyTorch must be installed."""
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
