"""The names of all devices, and simulators by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celosia.hw.spec.config import Config
    from celosia.sim.device import Device

WITH_CYCLES = ("timed", "rtl")
"""Devices that know the time of each instruction, on a memory model that can be chosen."""
SIMULATORS = ("functional", *WITH_CYCLES)
"""Devices that need no board."""
DEVICES = (*SIMULATORS, "board")
"""Devices that can be opened by name; a board over ssh has an address instead, as SSH_PREFIX says."""
SSH_PREFIX = "ssh://"
"""The name of a board over ssh begins with it."""


def open_simulator(name: str, config: Config, **options: Any) -> Device:
    """Open the Device called "functional", "timed" or "rtl"; `options` are those of its class. ValueError for another
    name.

    >>> from celosia.hw.spec.config import Config
    >>> open_simulator("timed", Config.load("tiny")).memory_model.split()[0]
    'zynq-hp'
    """
    if name == "functional":
        from celosia.sim.functional.fsim import FunctionalDevice

        return FunctionalDevice(config)
    if name == "timed":
        from celosia.sim.timing.timed import TimedDevice

        return TimedDevice(config, **options)
    if name == "rtl":
        from celosia.sim.rtl.rtlsim import RtlDevice

        return RtlDevice(config, **options)
    raise ValueError(f"there is no simulator {name!r}; take {', '.join(SIMULATORS[:-1])} or {SIMULATORS[-1]}")
