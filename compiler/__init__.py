"""The compiler: ONNX in, Program out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType


class _Later:
    """Finds modules as Python does, and lets them wait until something in them is used."""

    # onnx-ir imports both for sums of symbolic sizes, which no pass computes: they take a third of all imports' time.
    names = ("sympy", "onnx_ir._symbolic_shapes")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in self.names else None
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


sys.meta_path.insert(0, _Later())
