"""Resources of an FPGA that a Config takes, counted by Yosys or by the model in bitstreams/area, and whether it
fits."""

from __future__ import annotations

from dataclasses import dataclass

from celosia.bitstreams import area, synthesis
from celosia.bitstreams.synthesis import RESOURCES
from celosia.hw.boards.fpga import Device
from celosia.hw.spec.config import Config


@dataclass(frozen=True)
class Resources:
    """Resources of a Config.

    lut, ff, dsp: LUTs, flip-flops and DSP blocks. ram: blocks of 36 kbit. counted: by Yosys, not by the model.
    extrapolated: the model was fitted to no similar Config.
    """

    lut: int
    ff: int
    dsp: int
    ram: float
    counted: bool
    extrapolated: bool

    @staticmethod
    def of(cfg: Config, device: Device, model: area.AreaModel | None = None) -> Resources:
        """Return Yosys' count if it is in the cache, else the estimate of `model` (default: fitted to the shipped
        counts)."""
        if (usage := synthesis.cached_usage(cfg, device)) is not None:
            return Resources(usage.lut, usage.ff, usage.dsp, usage.ram, True, False)
        used = (model or area.shipped_model()).estimate(cfg)
        return Resources(used.lut, used.ff, used.dsp, used.ram, False, used.extrapolated)

    def shares(self, device: Device) -> dict[str, float]:
        """Return the share of each of the device's resources, by name."""
        return {name: getattr(self, name) / getattr(device, name) for name in RESOURCES}

    def explain_misfit(self, device: Device, left: float) -> str | None:
        """Explain why these do not fit on `device` if the share `left` of each resource must stay free.

        None where they fit.
        """
        shares = self.shares(device)
        name = max(shares, key=shares.__getitem__)
        if shares[name] > 1 - left:
            return f"it takes {shares[name]:.0%} of the {name} of {device.name}, where {1 - left:.0%} are to be had"
        return None
