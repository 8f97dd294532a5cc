"""The package's classifiers for the index are right."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1] / "pyproject.toml"

if not PROJECT.exists():
    pytest.skip("could not find 'pyproject.toml', which the package does not have", allow_module_level=True)


def test_classifiers_are_of_the_versions_and_the_license_that_the_package_has() -> None:
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    given = project.get("classifiers", [])
    topics = {each.split(" :: ")[0] for each in given}
    assert topics >= {"Development Status", "Intended Audience", "Operating System", "Programming Language", "Topic"}
    assert len(given) == len(set(given)) and given == sorted(given)
    lowest = project["requires-python"].removeprefix(">=")
    versions = [each.split(" :: ")[2] for each in given if each.startswith("Programming Language :: Python :: 3.")]
    assert min(versions, key=lambda version: tuple(map(int, version.split(".")))) == lowest
    assert not any(each.startswith("License") for each in given)  # an expression is given, which excludes them
    assert ("Typing :: Typed" in given) == (PROJECT.parent / "src" / "celosia" / "py.typed").exists()
