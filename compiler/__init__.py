"""The compiler: an ONNX model in, a Program out. `compile.py` calls the stages.

compile          the stages of a compilation, one after the other, with the self-check of the result (selfcheck/) and
                 the refusal of Programs that a board cannot run; options: its arguments; switches: parts to
                 leave out (passes: by their names in graph/pipeline)
frontend         imports the model and runs the passes over its graph (graph/); which inner tensors a Program returns
                 for debugging; which models need more memory than this machine has; of which flaws of a model it warns
lowering         tries to lower the graph until it fits: which operators become layers, launches and instructions;
                 which stay on the CPU because the user wants it or a launch would be slower (cycles that a launch
                 costs the host: here; cycles of an operator on the CPU: graph/cost)
layer            types: what the accelerator executes (Layer, Activation, ...), and views of parts of images
target           the processor that CPU kernels are compiled for: its vectors, caches and features, in LLVM's names;
                 which of its instructions add up products of bytes
pricing          what a model costs, for the search of equal models (superoptimise/)
graph/ launch/ tensorize/ vthread/ ops/ cpu/ expr/ program/ selfcheck/ numerics/ tune/ superoptimise/ language/
                 the stages themselves; each has a map in its `__init__.py`
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType


class _LazyFinder:
    """Import finder that loads some modules only when an attribute of them is first used."""

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


# onnx-ir imports both for sums of symbolic sizes, which no pass computes; they take a third of the time of all imports.
sys.meta_path.insert(0, _LazyFinder("sympy", "onnx_ir._symbolic_shapes"))
