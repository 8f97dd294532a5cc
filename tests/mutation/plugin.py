"""Pytest plugin of the campaign: run only the tests whose components contain the statement of a mutant.

The planted source calls `probe.reached` in front of that statement (campaign.py). The plugin skips a test that
elaborates its component without this call. It writes the outcome of each test and the digest of its Verilog to the
JSON file MUTANTS_RECORD. With MUTANTS_ONLY_VERILOG it simulates nothing, and MUTANTS_TESTS names the tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mutation import probe

ELSEWHERE = "its component does not contain the mutant"


def digest(text: str) -> str:
    """Return a short digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def identity(make: Any, sim: str) -> str:
    """Return a key that is equal for components with the same class and arguments."""
    if isinstance(make, partial):
        return f"{sim} {make.func.__module__} {make.func.__qualname__} {make.args!r} {make.keywords!r}"
    return f"{sim} {id(make)}"


class ElsewhereError(Exception):
    """The component was elaborated, and the statement of the mutant has not run."""


class Plugin:
    """Wrap the functions of `bench` by which each test of a component gets its Verilog and runs."""

    def __init__(self) -> None:
        self.record: dict[str, dict[str, Any]] = {}
        self.verilog: dict[str, str | None] = {}
        """Verilog of each component; None if the component does not contain the mutant."""
        self.only_verilog = "MUTANTS_ONLY_VERILOG" in os.environ
        names = os.environ.get("MUTANTS_TESTS")
        self.wanted: list[str] | None = json.loads(names) if names else None

    def entry(self, test: str) -> dict[str, Any]:
        return self.record.setdefault(test, {"verilog": []})

    def install(self) -> None:
        import bench

        from celosia.hw import verilog

        rtlil_convert = verilog.rtlil.convert

        def convert(*arguments: Any, **options: Any) -> str:
            text = str(rtlil_convert(*arguments, **options))
            if not self.only_verilog and not probe.was_reached():
                raise ElsewhereError  # before Yosys, which takes as long again
            return text

        verilog.rtlil = SimpleNamespace(**{**vars(verilog.rtlil), "convert": convert})  # type: ignore[assignment]
        make_verilog = bench._verilog
        shutil.rmtree(bench.BUILD / "verilog", ignore_errors=True)  # cached Verilog would not run the statement

        def reached_verilog(make: Any, sim: str) -> str:
            key, entry = identity(make, sim), self.entry(bench.running_test())
            if key not in self.verilog:
                probe.forget()
                try:
                    self.verilog[key] = make_verilog(make, sim)
                except ElsewhereError:
                    self.verilog[key] = None
                except Exception as error:
                    entry["unbuilt"] = f"{type(error).__name__}: {error}"[:300]
                    raise
            text = self.verilog[key]
            if text is None:
                pytest.skip(ELSEWHERE)
            entry["verilog"].append(digest(text))
            return text

        build = bench._build

        def built(text: str, waves: bool) -> Path:
            try:
                return Path(build(text, waves))
            except RuntimeError as error:  # from Verilator or the compiler
                self.entry(bench.running_test())["unbuilt"] = str(error)[:300]
                raise

        bench._build = built

        def without_simulation(make: Any, test_file: str, **options: Any) -> None:
            reached_verilog(make, options.get("sim") or "verilator")

        bench._verilog = reached_verilog
        if self.only_verilog:
            bench.run = without_simulation

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.install()
        if self.wanted is not None:
            items[:] = [item for item in items if item.nodeid in self.wanted]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed:
            entry = self.entry(report.nodeid)
            entry["outcome"] = report.outcome
            if report.failed:
                entry["message"] = str(report.longrepr)[-600:]
        Path(os.environ["MUTANTS_RECORD"]).write_text(json.dumps(self.record), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin in a pytest process that the campaign starts."""
    sys.path.append(str(Path("tests") / "hw"))
    config.pluginmanager.register(Plugin(), "mutants")
