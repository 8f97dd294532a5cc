"""Celosia: compile int8 ONNX models for a tensor accelerator described in Python, and run them on its RTL.

>>> import celosia
>>> program = celosia.compile(celosia.models.demo_model_path(), config="tiny")
>>> [tensor.name for tensor in program.outputs]
['logits']
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from celosia import language, models, te

    __version__: str
    from celosia.compiler.program import Program
    from celosia.driver.accuracy.compare import compare
    from celosia.driver.accuracy.evaluate import evaluate
    from celosia.driver.cut import cut
    from celosia.driver.explore.explore import explore
    from celosia.driver.explore.sweep import sweep
    from celosia.driver.export import export
    from celosia.driver.generate.decoder import Decoder
    from celosia.driver.pages.report_page import report
    from celosia.driver.quantize.quantize import quantize
    from celosia.driver.remote.deploy import deploy
    from celosia.driver.run.run_result import Result
    from celosia.driver.runtime import Runtime
    from celosia.driver.torch.export import from_torch
    from celosia.driver.torch.quantizer import CelosiaQuantizer
    from celosia.driver.tune.cpu import tune_cpu, tune_kernel
    from celosia.driver.tune.optimise import compile, optimise
    from celosia.driver.tune.tune import tune
    from celosia.hw.spec.config import Config
    from celosia.hw.verilog import verilog

__all__ = [
    "CelosiaQuantizer", "Config", "Decoder", "Program", "Result", "Runtime", "compare", "compile", "cut", "deploy",
    "evaluate", "explore", "export", "from_torch", "language", "models", "optimise", "quantize", "report", "sweep",
    "te", "tune", "tune_cpu", "tune_kernel", "verilog",
]  # fmt: skip

_SUBMODULES = {"language": "celosia.language", "models": "celosia.models", "te": "celosia.te"}
"""Modules that are attributes of the package, loaded at first use."""
_DEFINING_MODULE = {
    "CelosiaQuantizer": "celosia.driver.torch.quantizer",
    "Config": "celosia.hw.spec.config",
    "Decoder": "celosia.driver.generate.decoder",
    "Program": "celosia.compiler.program",
    "Result": "celosia.driver.run.run_result",
    "Runtime": "celosia.driver.runtime",
    "compare": "celosia.driver.accuracy.compare",
    "compile": "celosia.driver.tune.optimise",
    "evaluate": "celosia.driver.accuracy.evaluate",
    "verilog": "celosia.hw.verilog",
    "sweep": "celosia.driver.explore.sweep",
    "optimise": "celosia.driver.tune.optimise",
    "export": "celosia.driver.export",
    "deploy": "celosia.driver.remote.deploy",
    "cut": "celosia.driver.cut",
    "explore": "celosia.driver.explore.explore",
    "from_torch": "celosia.driver.torch.export",
    "quantize": "celosia.driver.quantize.quantize",
    "report": "celosia.driver.pages.report_page",
    "tune": "celosia.driver.tune.tune",
    "tune_cpu": "celosia.driver.tune.cpu",
    "tune_kernel": "celosia.driver.tune.cpu",
}
"""Module that defines each public function or class, loaded at first use."""


def __dir__() -> list[str]:
    """List the public names of the package, loaded or not."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Load a public name at its first use, so that a board never needs the libraries of the compiler."""
    if name in _SUBMODULES:
        return _import(_SUBMODULES[name])
    if name == "__version__":
        return _version()
    if name in _DEFINING_MODULE:
        value = getattr(_import(_DEFINING_MODULE[name]), name)
        return _with_notebook_output(_with_argument_hints(value)) if inspect.isfunction(value) else value
    raise AttributeError(f"module 'celosia' has no attribute {name!r}")


@functools.cache
def _with_argument_hints(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that its TypeError for an unknown argument suggests the most similar known one."""
    known = inspect.signature(function).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values())

    def refuse(name: str) -> NoReturn:
        """Raise TypeError for argument `name`."""
        from celosia.hw.spec.config import did_you_mean

        hint = did_you_mean(name, known)
        raise TypeError(
            f"{function.__name__}() takes no argument {name!r}{hint}; it takes {', '.join(known)}"
        ) from None

    @functools.wraps(function)
    def wrapper(*positional: Any, **named: Any) -> Any:
        """Call `function`; replace the TypeError for an unknown argument."""
        unknown = [name for name in named if name not in known]
        if unknown and not takes_any:
            refuse(unknown[0])
        try:
            return function(*positional, **named)
        except TypeError as error:  # raised by a function to which `function` has passed its options
            for name in unknown:
                if f"unexpected keyword argument '{name}'" in str(error):
                    refuse(name)
            raise

    return wrapper


def _with_notebook_output(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` in a notebook so that it shows its progress, and its result as HTML; elsewhere return it."""
    ipython = sys.modules.get("IPython")
    if ipython is None or getattr(ipython.get_ipython(), "kernel", None) is None:
        return function
    from celosia.driver import notebook

    notebook.register()
    wrapper: Callable[..., Any] = notebook.show_progress_in_cell(function)
    return wrapper


def _import(module: str) -> ModuleType:
    """Import a module with Python's garbage collector switched off, which saves time.

    Objects that a module creates live on; freezing moves them to the oldest generation, which is seldom searched.
    """
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
    """Return the version of the installed package; "unknown" if its files were only copied, as to a board."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("celosia")
    except PackageNotFoundError:
        return "unknown"
