"""Build simulators of the RTL for tests; skip the test if a tool is missing."""

from __future__ import annotations

from typing import Any

import pytest

from celosia.hw.spec.config import Config
from celosia.sim.rtl import build
from celosia.sim.rtl.build import BuildError
from celosia.sim.rtl.rtlsim import RtlDevice


def require_tools() -> None:
    """Skip the test without a C++ compiler or Verilator."""
    try:
        build.require_tools()
    except BuildError as error:
        pytest.skip(str(error))


def rtl_device(config: Config, **options: Any) -> RtlDevice:
    """Return a simulator of `config`. options: those of RtlDevice."""
    require_tools()
    return RtlDevice(config, quiet=True, **options)
