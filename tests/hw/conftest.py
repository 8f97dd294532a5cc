"""Let tests of the hardware `import bench`, in pytest and in its simulations."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    waves = getattr(sys.modules.get("bench"), "WAVES", [])
    if waves:
        terminalreporter.section("waveforms: open them with `surfer FILE` or `gtkwave FILE`")
        for test, path in waves:
            terminalreporter.line(f"{test}: {path}")
