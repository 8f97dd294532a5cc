"""Celosia: compile int8 ONNX models for a tensor accelerator described in Python, and run them on its RTL.

>>> import celosia
>>> program = celosia.compile(celosia.models.demo_model_path(), config="tiny")
>>> [tensor.name for tensor in program.outputs]
['logits']
"""

from __future__ import annotations

import gc
import importlib
import sys
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celosia import language, models, te

    __version__: str
    from celosia.compiler.program import Program
    from celosia.driver.compare import compare
    from celosia.driver.evaluate import evaluate
    from celosia.driver.explore.explore import explore
    from celosia.driver.generate.decoder import Decoder
    from celosia.driver.optimise import compile
    from celosia.driver.pages.report import report
    from celosia.driver.quantize import quantize
    from celosia.driver.run.result import Result
    from celosia.driver.runtime import Runtime
    from celosia.driver.torch.export import from_torch
    from celosia.driver.torch.quantizer import CelosiaQuantizer
    from celosia.driver.tune import tune
    from celosia.driver.tune_cpu import tune_cpu, tune_kernel
    from celosia.hw.config import Config

__all__ = [
    "CelosiaQuantizer", "Config", "Decoder", "Program", "Result", "Runtime", "compare", "compile", "evaluate",
    "explore", "from_torch", "language", "models", "quantize", "report", "te", "tune", "tune_cpu", "tune_kernel",
]  # fmt: skip

_MODULES = {"language": "celosia.language", "models": "celosia.models", "te": "celosia.te"}
_PLACES = {
    "CelosiaQuantizer": "celosia.driver.torch.quantizer",
    "Config": "celosia.hw.config",
    "Decoder": "celosia.driver.generate.decoder",
    "Program": "celosia.compiler.program",
    "Result": "celosia.driver.run.result",
    "Runtime": "celosia.driver.runtime",
    "compare": "celosia.driver.compare",
    "compile": "celosia.driver.optimise",
    "evaluate": "celosia.driver.evaluate",
    "explore": "celosia.driver.explore.explore",
    "from_torch": "celosia.driver.torch.export",
    "quantize": "celosia.driver.quantize",
    "report": "celosia.driver.pages.report",
    "tune": "celosia.driver.tune",
    "tune_cpu": "celosia.driver.tune_cpu",
    "tune_kernel": "celosia.driver.tune_cpu",
}


def __dir__() -> list[str]:
    """What the package offers, loaded or not."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Load a part of the package when it is first used, so that a board never needs the compiler's libraries."""
    if name in _MODULES:
        return _imported(_MODULES[name])
    if name == "__version__":
        return _version()
    if name in _PLACES:
        part = getattr(_imported(_PLACES[name]), name)
        return _in_notebook(part) if isinstance(part, FunctionType) else part
    raise AttributeError(f"module 'celosia' has no attribute {name!r}")


def _in_notebook(function: FunctionType) -> Any:
    """A function of the package, which in a notebook shows how far it is, and its result as HTML."""
    ipython = sys.modules.get("IPython")
    if ipython is None or getattr(ipython.get_ipython(), "kernel", None) is None:
        return function
    from celosia.driver import notebook

    notebook.register()
    return notebook.with_progress(function)


def _imported(module: str) -> ModuleType:
    """Import without searches for garbage: what modules make lives on, and goes to what is seldom looked through."""
    if not gc.isenabled() or gc.get_freeze_count():
        return importlib.import_module(module)
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        gc.freeze()
        gc.unfreeze()
        gc.enable()


def _version() -> str:
    """As it was installed; "unknown" of files that were only copied, as to a board."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("celosia")
    except PackageNotFoundError:
        return "unknown"
