"""Open devices by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from celosia.hw.spec.config import did_you_mean
from celosia.sim.devices import DEVICES, open_simulator

if TYPE_CHECKING:
    from celosia.hw.spec.config import Config
    from celosia.sim.device import Device

Devices: TypeAlias = "str | Device | Sequence[Device]"
"""One device by name or as a Device, or several: names separated by commas, or a list of Devices."""


def open_device(name: str, config: Config, **options: Any) -> Device:
    """Open the device called "functional", "timed", "rtl" or "board"; `options` are those of its class.

    ValueError for another name.
    """
    require_device(name)
    if name == "board":
        from celosia.driver.board.board_device import open_pynq_device

        return open_pynq_device(config, **options)
    return open_simulator(name, config, **options)


def devices_of(device: Devices) -> list[str | Device]:
    """Return one or several devices as a list of names and Devices. ValueError for an empty list.

    >>> devices_of("functional, timed")
    ['functional', 'timed']
    """
    devices: list[str | Device]
    if isinstance(device, str):
        devices = [name.strip() for name in device.split(",")]
    else:
        devices = list(device) if isinstance(device, Sequence) else [device]
    if not devices:
        raise ValueError("there is no device in an empty list of them")
    return devices


def require_device(name: str) -> None:
    """Raise ValueError where there is no device of that name."""
    if name not in DEVICES:
        suggestion = did_you_mean(name, DEVICES)
        raise ValueError(f"there is no device {name!r}{suggestion}; take {', '.join(DEVICES[:-1])} or {DEVICES[-1]}")
