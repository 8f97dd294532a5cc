"""Options of all tests, and the rule that CI skips nothing."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import settings

from celosia.cache import tool_environment

OPTIONAL = ("iverilog",)
"""Tools that may be missing in CI: Icarus Verilog is a second simulator of what Verilator simulates, too."""
PROCESSOR = "this processor has no"
"""Text in the reason of a skip because the processor lacks instructions; machines of CI differ."""

sys.path.append(str(Path(__file__).parent))  # `import thorough`, from every folder
gc.set_threshold(50_000)  # collections after 700 objects take a twelfth of the time of tests
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs and their children ignore Ctrl-C
EXAMPLES = float(
    os.environ.get("CELOSIA_EXAMPLES", "0.3")
)  # as in thorough.py; tests copy this file without thorough.py
settings.register_profile(
    "celosia", deadline=None, max_examples=round(50 * EXAMPLES)
)  # no deadline: machines may be busy
settings.load_profile("celosia")

REMEMBERING = ("benchmarks", "docs", "driver", "models")
"""Folders of tests that replace nothing on which predicted cycles depend."""

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--waves", action="store_true", help="record the signals of RTL tests and print where they are")
    parser.addoption("--sim", choices=("verilator", "icarus"), help="simulator of the cocotb tests")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.update(tool_environment())  # tests call tools, too, and HOME may be read-only
    os.environ.setdefault(
        "CELOSIA_PGO", "0"
    )  # tests run many simulators briefly, so a second compilation with profiles would take longer than it saves
    os.environ.setdefault(
        "CELOSIA_REMEMBER", "0"
    )  # tests replace parts of the compiler, so cached results would be wrong
    config.addinivalue_line("filterwarnings", "ignore:.*created but never used")  # Amaranth, after an expected error
    if config.getoption("--waves"):
        os.environ["CELOSIA_WAVES"] = "1"
    if config.getoption("--sim"):
        os.environ["CELOSIA_SIM"] = config.getoption("--sim")


@pytest.fixture(scope="module", autouse=True)
def remember_cycles(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the compiler remember predicted cycles in REMEMBERING, whose tests compile the same models often.

    Predictions of other sources are other entries of the cache.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.path.relative_to(Path(__file__).parent).parts[0] in REMEMBERING:
            patch.setenv("CELOSIA_REMEMBER", "1")
        yield


def _no_skip(report: Report) -> Report:
    """Report a skipped test as failed if CI=true, because CI must have all tools."""
    if os.environ.get("CI") == "true" and report.skipped and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if PROCESSOR not in reason and not any(f"'{name}'" in reason for name in OPTIONAL):
            report.outcome = "failed"
            report.longrepr = f"nothing is skipped in CI. {reason}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the seconds of tests and fixtures by folder, if --durations is set."""
    if config.getoption("durations") is None:
        return
    seconds: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                parts = report.nodeid.split("/")
                seconds["/".join(parts[: min(len(parts) - 1, 2)])] += report.duration
    terminalreporter.section("seconds by folder")
    for folder, total in sorted(seconds.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{total:8.1f} {folder}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _no_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _no_skip((yield))
