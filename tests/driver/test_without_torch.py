"""Celosia works without PyTorch."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

HIDE = "import sys; sys.modules[{package!r}] = None; import celosia, celosia.driver.runtime; "


@pytest.mark.parametrize("package", ["torch", "torchao", "onnxscript"])
@pytest.mark.parametrize("name", ["from_torch", "CelosiaQuantizer"])
def test_what_needs_it_says_how_to_install_it(package: str, name: str) -> None:
    if package != "torch" and find_spec("torch") is None:
        pytest.skip("PyTorch is not installed: `make torch` installs it, then this runs")
    code = HIDE.format(package=package) + f"celosia.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    expected = f"ImportError: to take models from PyTorch, {package} is needed: pip install 'celosia[torch]'"
    assert done.stderr.splitlines()[-1] == expected


def test_nothing_else_needs_it() -> None:
    code = HIDE.format(package="torch") + "celosia.compile(celosia.models.demo_model_path(), 'tiny', check=False)"
    subprocess.run([sys.executable, "-c", code], check=True)
