"""What a Config takes of a device, and whether it fits: as Yosys has counted it, or by the model of bitstreams/area."""

from __future__ import annotations

from dataclasses import dataclass

from celosia.bitstreams import synthesis
from celosia.bitstreams.area import estimate
from celosia.bitstreams.devices import Device
from celosia.bitstreams.synthesis import RESOURCES
from celosia.hw.config import Config


@dataclass(frozen=True)
class Resources:
    """lut, ff: None where the model does not know such a Config. ram: blocks of 36 kbit. counted: by Yosys."""

    lut: int | None
    ff: int | None
    dsp: int
    ram: float
    counted: bool

    @staticmethod
    def of(cfg: Config, device: Device) -> Resources:
        known = synthesis.known_usage(cfg, device)
        used = estimate(cfg) if known is None else known
        return Resources(used.lut, used.ff, used.dsp, used.ram, known is not None)

    def shares(self, device: Device) -> dict[str, float] | None:
        """What each is of the device's; None where one is not known."""
        found: dict[str, float] = {}
        for name in RESOURCES:
            if (value := getattr(self, name)) is None:
                return None
            found[name] = value / getattr(device, name)
        return found

    def why_not(self, device: Device, left: float) -> str | None:
        """Why it is not on `device` with the share `left` of everything to spare, or None."""
        shares = self.shares(device)
        if shares is None:
            return "the resource model knows no Config like it"
        name = max(shares, key=shares.__getitem__)
        if shares[name] > 1 - left:
            return f"it takes {shares[name]:.0%} of the {name} of {device.name}, where {1 - left:.0%} are to be had"
        return None
