"""The compiler: ONNX in, Program out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType


class _Later:
    """Finds some modules as Python does, once, and lets them wait until something in them is used."""

    def __init__(self, *names: str) -> None:
        self._names = set(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        self._names.remove(fullname)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


# onnx-ir imports both for sums of symbolic sizes, which no pass computes: they take a third of all imports' time.
sys.meta_path.insert(0, _Later("sympy", "onnx_ir._symbolic_shapes"))
