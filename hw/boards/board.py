"""A board on which the accelerator runs: what the compiler, simulators, bitstreams and drivers know of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from celosia.hw.boards.fpga import FPGAS, ULTRASCALE, ZYNQ_7000, Device
from celosia.hw.boards.memory import Dram, MemoryModel
from celosia.hw.spec.config import PRESETS, Config
from celosia.plain import Sentence, brief


class BoardError(Sentence, ValueError):
    """A board that there is not or that cannot be; the message names the field, its value and what is possible."""


@dataclass(frozen=True)
class Processor:
    """Processor of a family of FPGAs. part: pattern of its parts' names, with the device in the first group. synth: the
    Yosys command for it. machine: what `platform.machine()` says there. address: of the accelerator's registers, as the
    processor sees them: on GP0 of a Zynq-7000, on HPM0 of an UltraScale+. bus_bits: of its widest port to memory
    (UG585, UG1085)."""

    part: str
    synth: str
    machine: str
    address: int
    bus_bits: int


PROCESSORS = {
    "zynq": Processor(r"(x[acq]7z\d{3}s?)[a-z]+\d+-\d\w*", ZYNQ_7000, "armv7l", 0x43C0_0000, 64),
    "zynqmp": Processor(
        r"(x[acq]zu\d+t?[a-z]{2}|xck2[46])-[a-z]+\d+-\d\w*(?:-\w)?", ULTRASCALE, "aarch64", 0xA000_0000, 128
    ),
}
STATES = ("busy", "error", "idle")
"""Outputs of the accelerator for lights, in the order in which a board that has fewer shows them."""
LIMITS = {
    "clock_mhz": (10, 500), "device.lut": (1, 10**8), "device.ff": (1, 10**8), "device.dsp": (1, 10**6),
    "device.ram": (1, 10**6), "dram.bits": (16, 128), "dram.megatransfers": (250, 20_000),
    "dram.refresh_every_ns": (1000, 10**6), "dram.refresh_ns": (1, 10**5),
}  # fmt: skip
"""Limits of each number, both inclusive."""
_TEXTS = {
    "name": (r"[\w.-]{1,60}", "letters, digits, points and dashes, at most 60"),
    "board_files": (r"[\w.-]{0,60}", "the name in Vivado's board part, as pynq-z2 in tul.com.tw:pynq-z2:part0:1.0"),
    "light_standard": (r"[A-Z][A-Z0-9_]{0,30}|", "an I/O standard of Vivado, as LVCMOS33"),
}
"""Pattern of each text, and the same in words. Vivado's Tcl reads these texts."""
_PIN = r"[A-Z]{1,2}\d{1,2}"


@dataclass(frozen=True)
class Board:
    """A board with its part, Config, clock and DRAM. BoardError for an impossible one; docs/boards.md says where a
    vendor's documents have each field.

    name: of its bitstreams' files, and for people. part: the FPGA, as Vivado calls it. device: what that holds.
    config: the accelerator where none is named. clock_mhz: wanted of it. dram: behind the processors' ports.
    board_files: the name by which Vivado knows the board; "": it does not. lights: pins of lights that are on when
    driven high, for STATES in their order, none to three. light_standard: their I/O standard.
    """

    name: str
    part: str
    device: Device
    config: Config
    clock_mhz: int
    dram: Dram
    board_files: str = ""
    lights: tuple[str, ...] = ()
    light_standard: str = ""

    def __post_init__(self) -> None:
        for name, (pattern, words) in _TEXTS.items():
            value = getattr(self, name)
            if not isinstance(value, str) or re.fullmatch(pattern, value, re.ASCII) is None:
                raise BoardError(f"{name} cannot be {brief(value)}; it is {words}")
        if self.device.name != device_of(self.part):
            raise BoardError(f"device {self.device.name} is not that of part {self.part}, {device_of(self.part)}")
        for name, number in self._numbers():
            _check_number(name, number)
        if self.dram.bits % 8:
            raise BoardError(f"dram.bits cannot be {self.dram.bits}; it is a multiple of 8, as 16, 32 or 64")
        if 2 * self.dram.refresh_ns > self.dram.refresh_every_ns:
            raise BoardError(
                f"dram.refresh_ns cannot be {self.dram.refresh_ns}; it is at most half of refresh_every_ns, "
                f"{self.dram.refresh_every_ns}"
            )
        self._check_lights()

    def _numbers(self) -> Iterator[tuple[str, object]]:
        for name in LIMITS:
            part, _, field = name.rpartition(".")
            yield name, getattr(getattr(self, part) if part else self, field)

    def _check_lights(self) -> None:
        for pin in self.lights:
            if not isinstance(pin, str) or re.fullmatch(_PIN, pin, re.ASCII) is None or self.lights.count(pin) > 1:
                raise BoardError(f"lights cannot have {brief(pin)}; it takes different pins of the package, as R14")
        if len(self.lights) > len(STATES):
            raise BoardError(f"lights cannot be {len(self.lights)} pins; it takes up to {len(STATES)}")
        if self.lights and not self.light_standard:
            raise BoardError("light_standard is missing, without which lights have no voltage; give one, as LVCMOS33")

    @property
    def processor(self) -> str:
        """Processor, one of PROCESSORS."""
        return _known(self.part)[0]

    @property
    def memory(self) -> MemoryModel:
        """Memory model of its DRAM at the accelerator's clock."""
        return self.dram.behind(self.name, self.clock_mhz)

    @property
    def address(self) -> int:
        """Address of the accelerator's registers."""
        return PROCESSORS[self.processor].address

    @property
    def bus_bits(self) -> int:
        """Width in bits of its processor's widest port to memory."""
        return PROCESSORS[self.processor].bus_bits

    @property
    def machine(self) -> str:
        """Result of `platform.machine()` on the board."""
        return PROCESSORS[self.processor].machine

    def pins(self) -> dict[str, str]:
        """The pin of the light that shows each state; states for which there is no light are left out."""
        return dict(zip(STATES, self.lights))

    @property
    def digest(self) -> str:
        """8 hexadecimal digits that differ where anything of it does, but the name of its Config."""
        text = json.dumps(dataclasses.asdict(self) | {"config": self.config.digest}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def to_toml(self) -> str:
        """The board as a file that `board_file.read` takes, but for its name, which is the file's."""
        plain = {"part": self.part, "clock_mhz": self.clock_mhz, "board_files": self.board_files}
        plain |= {"lights": list(self.lights), "light_standard": self.light_standard}
        preset = PRESETS.get(self.config.name)
        if preset == self.config:
            plain["config"] = preset.name
        text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in plain.items() if value not in ("", []))
        device = {name: value for name, value in vars(self.device).items() if name not in ("name", "synth")}
        tables = {"device": device} if self.device != FPGAS.get(self.device.name) else {}
        tables["dram"] = vars(self.dram)
        for title, table in tables.items():
            text += f"\n[{title}]\n" + "".join(f"{name} = {value}\n" for name, value in table.items())
        return text + ("" if preset == self.config else f"\n[config]\n{self.config.to_toml()}")


def device_of(part: str) -> str:
    """The device of a part. BoardError where Celosia has no project for its family.

    >>> device_of("xc7z020clg400-1"), device_of("xczu3eg-sbva484-1-i"), device_of("xck26-sfvc784-2LV-c")
    ('xc7z020', 'xczu3eg', 'xck26')
    """
    return _known(part)[1]


def synth_of(part: str) -> str:
    """The Yosys command that maps to a part. BoardError as `device_of`."""
    return PROCESSORS[_known(part)[0]].synth


def _known(part: str) -> tuple[str, str]:
    """Look up (processor, device) of a part."""
    if isinstance(part, str):
        for name, processor in PROCESSORS.items():
            if match := re.fullmatch(processor.part, part, re.ASCII):
                return name, match[1]
    raise BoardError(
        f"part cannot be {brief(part)}; it is a Zynq-7000, Zynq UltraScale+ or Kria K24 or K26 by the whole name that "
        "Vivado has for it, as xc7z020clg400-1 or xczu3eg-sbva484-1-i"
    )


def _check_number(name: str, value: object) -> None:
    low, high = LIMITS[name]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BoardError(f"{name} cannot be {brief(value)}; it is a whole number from {low:,} to {high:,}")
