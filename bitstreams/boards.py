"""The pins of the boards: Amaranth platforms where amaranth-boards has none, and how the accelerator sits on each.

Pins: PYNQ-Z1 reference manual (Digilent; the Arty Z7-20, of which it is a sibling, has the same), master XDC of the
PYNQ-Z2 (TUL), Ultra96-V2 hardware user's guide (Avnet), ZCU104 user guide UG1267 (AMD).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from amaranth.build import Attrs, Clock, Connector, DiffPairs, Pins, Resource
from amaranth.vendor import XilinxPlatform
from amaranth_boards.arty_z7 import ArtyZ720Platform
from amaranth_boards.resources import ButtonResources, LEDResources, RGBLEDResource, SwitchResources

from celosia.sim import boards

LVCMOS33, LVCMOS18 = Attrs(IOSTANDARD="LVCMOS33"), Attrs(IOSTANDARD="LVCMOS18")


class PynqZ1Platform(ArtyZ720Platform):  # type: ignore[misc]
    """PYNQ-Z1 (Digilent)."""


class PynqZ2Platform(XilinxPlatform):  # type: ignore[misc]
    """PYNQ-Z2 (TUL). Pmod and Arduino connectors are those of the Arty Z7-20."""

    device, package, speed = "xc7z020", "clg400", "1"
    default_clk = "clk125"
    resources = [
        Resource("clk125", 0, Pins("H16", dir="i"), Clock(125e6), LVCMOS33),
        *SwitchResources(pins="M20 M19", attrs=LVCMOS33),
        *ButtonResources(pins="D19 D20 L20 L19", attrs=LVCMOS33),
        *LEDResources(pins="R14 P14 N16 M14", attrs=LVCMOS33),
        RGBLEDResource(0, r="N15", g="G17", b="L15", attrs=LVCMOS33),
        RGBLEDResource(1, r="M15", g="L14", b="G14", attrs=LVCMOS33),
    ]
    connectors = [each for each in ArtyZ720Platform.connectors if each.name in ("pmod", "ck_io")]


class Ultra96V2Platform(XilinxPlatform):  # type: ignore[misc]
    """Ultra96-V2 (Avnet). The logic has the two lights of the radio, and no clock but that of the processors."""

    device, package, speed = "xczu3eg", "sbva484", "1-i"
    resources = [*LEDResources(pins="A9 B9", attrs=LVCMOS18)]
    connectors: list[Connector] = []


class Zcu104Platform(XilinxPlatform):  # type: ignore[misc]
    """ZCU104 (AMD)."""

    device, package, speed = "xczu7ev", "ffvc1156", "2-e"
    default_clk = "clk125"
    resources = [
        Resource("clk125", 0, DiffPairs("F23", "E23", dir="i"), Clock(125e6), Attrs(IOSTANDARD="LVDS")),
        *LEDResources(pins="D5 D6 A5 B5", attrs=LVCMOS33),
        *ButtonResources(pins="B4 C4 B3 C3", attrs=LVCMOS33),
        *SwitchResources(pins="E4 D4 F5 F4", attrs=LVCMOS33),
    ]
    connectors: list[Connector] = []


STATES = ("busy", "error", "idle")
"""Outputs of the accelerator for lights, in the order in which a board that has fewer shows them."""


PLATFORMS = {
    "pynq-z1": PynqZ1Platform, "pynq-z2": PynqZ2Platform, "ultra96": Ultra96V2Platform, "zcu104": Zcu104Platform
}  # fmt: skip


@dataclass(frozen=True)
class Board(boards.Board):
    """A board with its Amaranth platform."""

    platform: Any

    @property
    def part(self) -> str:
        """The full name of the device: Vivado's."""
        p = self.platform
        return f"{p.device}{'-' if self.processor == 'zynqmp' else ''}{p.package}-{p.speed}"

    def lights(self) -> dict[str, tuple[str, str]]:
        """Pin and I/O standard of the light that shows each state; states for which there is no light are left out."""
        pins = [
            (resource.ios[0].names[0], str(resource.attrs["IOSTANDARD"]))
            for resource in self.platform.resources if resource.name == "led"
        ]  # fmt: skip
        return dict(zip(STATES, pins))


BOARDS = {name: Board(**vars(board), platform=PLATFORMS[name]) for name, board in boards.BOARDS.items()}
