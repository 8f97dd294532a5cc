"""Devices by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celosia.hw.config import did_you_mean
from celosia.sim.devices import SIMULATORS, open_simulator

if TYPE_CHECKING:
    from celosia.hw.config import Config
    from celosia.sim.device import Device

DEVICES = (*SIMULATORS, "board")
"""Devices that can be opened by name."""


def open_device(name: str, config: Config, **options: Any) -> Device:
    """The device called "functional", "timed", "rtl" or "board"; `options` are those of its class. ValueError."""
    require_device(name)
    if name == "board":
        from celosia.driver.board.device import pynq_device

        return pynq_device(config, **options)
    return open_simulator(name, config, **options)


def require_device(name: str) -> None:
    """ValueError where there is no device of that name."""
    if name not in DEVICES:
        near = did_you_mean(name, DEVICES)
        raise ValueError(f"there is no device {name!r}{near}; take {', '.join(DEVICES[:-1])} or {DEVICES[-1]}")
