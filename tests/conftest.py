"""Options of all tests."""

from __future__ import annotations

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--waves", action="store_true", help="record the signals of RTL tests and print where they are")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore:.*created but never used")  # Amaranth, after an expected error
    if config.getoption("--waves"):
        os.environ["CELOSIA_WAVES"] = "1"
