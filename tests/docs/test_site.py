"""The site of docs/ builds without a warning, and has every page, command and public name with all parameters."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import griffe
import pytest

import celosia
from celosia.driver.cli import cli_doc

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MODULES = ("language", "models", "te")
CONSTRUCTED = ("CelosiaQuantizer", "Decoder", "Runtime")
"""Classes whose constructor a user calls with arguments that the docstring explains."""
READ_ONLY = ("Program", "Result")
"""Classes whose objects a user receives, and whose attributes the docstring explains."""
FUNCTIONS = sorted({*celosia.__all__} - {*MODULES, *CONSTRUCTED, *READ_ONLY, "Config"})
METHODS = (
    "Runtime.run", "Runtime.run_each", "Runtime.run_batch", "Program.save", "Program.load", "Decoder.session",
    "Config.load",
)  # fmt: skip


def public_names(module: str) -> list[str]:
    """Return the names of functions and classes that a module of celosia shows to users."""
    members = vars(importlib.import_module(f"celosia.{module}"))
    return [name for name in dir(getattr(celosia, module)) if name[0] != "_" and callable(members.get(name))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    return folder


def test_each_page_is_in_the_navigation(site: Path) -> None:
    menu = (site / "index.html").read_text(encoding="utf-8")
    pages = [page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md")]
    missing = [str(page) for page in pages if f'href="{page}"' not in menu]
    assert not missing, "add these pages to `nav` of mkdocs.yml"


def test_each_public_name_is_in_the_api_reference(site: Path) -> None:
    ids = set(re.findall(r'id="([\w.]+)"', (site / "api.html").read_text(encoding="utf-8")))
    names = {f"celosia.{name}" for name in celosia.__all__} - {f"celosia.{name}" for name in MODULES}
    names |= {f"celosia.{module}.{name}" for module in ("te", "language") for name in public_names(module)}
    assert not names - ids


def test_the_search_index_comes_with_the_site(site: Path) -> None:
    """The search index is a script, which a browser loads from a folder without a server, too."""
    assert "superoptimiser" in (site / "search" / "search_index.js").read_text(encoding="utf-8")


def test_the_page_of_commands_is_current() -> None:
    assert (DOCS / "cli.md").read_text(encoding="utf-8") == cli_doc.page(), "python -m celosia.driver.cli.cli_doc"


# Docstrings ------------------------------------------------------------------------------------------------------


def load_public(name: str) -> Any:
    """Return a public function, class or method of celosia. Skip the test if it needs PyTorch, which is missing."""
    if name in ("from_torch", "CelosiaQuantizer"):
        pytest.importorskip("torch")
        pytest.importorskip("torchao")
    value: Any = celosia
    for part in name.split("."):
        value = getattr(value, part)
    return value


def documented_names(value: object, kind: griffe.DocstringSectionKind) -> list[str]:
    """Return the names of the entries in a section of a docstring, in order; for Raises, the exceptions."""
    sections = griffe.Docstring(inspect.getdoc(value) or "").parse("google", warnings=False)
    is_raises = kind is griffe.DocstringSectionKind.raises
    return [
        str(entry.annotation) if is_raises else entry.name
        for section in sections if section.kind is kind for entry in section.value
    ]  # fmt: skip


def parameter_names(value: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters of a signature without `self`, as a Google docstring writes them."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(value).parameters.values()
    return [f"{stars.get(p.kind, '')}{p.name}" for p in parameters if p.name != "self"]


def docstring_faults(value: Callable[..., Any], needs_raises: bool = True) -> Sequence[str]:
    """Return a sentence for each difference between the docstring of a function, or class, and its signature."""
    expected, documented = parameter_names(value), documented_names(value, griffe.DocstringSectionKind.parameters)
    faults = [f"Args lacks {name}" for name in expected if name not in documented]
    faults += [f"Args has {name}, which is no parameter" for name in documented if name not in expected]
    if not faults and documented != expected:
        faults.append("Args has another order than the signature")
    if needs_raises and not documented_names(value, griffe.DocstringSectionKind.raises):
        faults.append("Raises is empty")
    return faults


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_parameter_and_error_of_a_function_has_an_entry(name: str) -> None:
    assert not docstring_faults(load_public(name))


@pytest.mark.parametrize("name", [*CONSTRUCTED, *METHODS, "Session.feed", "Session.generate"])
def test_each_parameter_of_a_class_or_method_has_an_entry(name: str) -> None:
    if name.startswith("Session."):
        session = importlib.import_module("celosia.driver.generate.decoder").Session
        assert not docstring_faults(getattr(session, name.removeprefix("Session.")))
    else:
        assert not docstring_faults(load_public(name), needs_raises=name not in ("CelosiaQuantizer", "Decoder.session"))


@pytest.mark.parametrize("name", READ_ONLY)
def test_each_documented_attribute_exists(name: str) -> None:
    value = load_public(name)
    fields = {*dir(value), *value.__dataclass_fields__}
    documented = documented_names(value, griffe.DocstringSectionKind.attributes)
    assert len(documented) > 5 and not {*documented} - fields
    public = {field for field in vars(value).get("__annotations__", {}) if field[0] != "_"}
    assert not public - {*documented}


def test_a_wrong_docstring_is_detected() -> None:
    def function(model: str, config: str = "pynq", **options: object) -> None:
        """Do nothing.

        Args:
            model: A model.
            device: A device.
            **options: Other arguments.
        """

    assert docstring_faults(function) == [
        "Args lacks config", "Args has device, which is no parameter", "Raises is empty",
    ]  # fmt: skip

    def reordered(model: str, config: str) -> None:
        """Do nothing.

        Args:
            config: A Config.
            model: A model.

        Raises:
            ValueError: Always.
        """

    assert docstring_faults(reordered) == ["Args has another order than the signature"]
