"""What a Config takes of a device, and whether it fits: as Yosys has counted it, or by the model of bitstreams/area."""

from __future__ import annotations

from dataclasses import dataclass

from celosia.bitstreams import area, synthesis
from celosia.bitstreams.synthesis import RESOURCES
from celosia.hw.boards.fpga import Device
from celosia.hw.spec.config import Config


@dataclass(frozen=True)
class Resources:
    """ram: blocks of 36 kbit. counted: by Yosys. extrapolated: the model was measured on nothing like it."""

    lut: int
    ff: int
    dsp: int
    ram: float
    counted: bool
    extrapolated: bool

    @staticmethod
    def of(cfg: Config, device: Device, model: area.AreaModel | None = None) -> Resources:
        """model: by default that of the Configs which are shipped."""
        if (known := synthesis.cached_usage(cfg, device)) is not None:
            return Resources(known.lut, known.ff, known.dsp, known.ram, True, False)
        used = (model or area.shipped_model()).estimate(cfg)
        return Resources(used.lut, used.ff, used.dsp, used.ram, False, used.extrapolated)

    def shares(self, device: Device) -> dict[str, float]:
        """What each is of the device's."""
        return {name: getattr(self, name) / getattr(device, name) for name in RESOURCES}

    def why_not(self, device: Device, left: float) -> str | None:
        """Why it is not on `device` with the share `left` of everything to spare, or None."""
        shares = self.shares(device)
        name = max(shares, key=shares.__getitem__)
        if shares[name] > 1 - left:
            return f"it takes {shares[name]:.0%} of the {name} of {device.name}, where {1 - left:.0%} are to be had"
        return None
