"""Board: the facts about an FPGA board that compiler, simulators, bitstreams and driver share, and their checks."""

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
from celosia.plain import Sentence, abbreviate


class BoardError(Sentence, ValueError):
    """Unknown board or impossible value of a board; the message names the field, the value and what is possible."""


@dataclass(frozen=True)
class Processor:
    """Processor system of a family of FPGAs (AMD UG585, UG1085), beside which the accelerator runs.

    part : regular expression for names of the family's parts; its first group is the device.
    synth : the Yosys command that synthesises for the family.
    machine : the result of `platform.machine()` on the processor.
    address : physical address of the accelerator's registers, on port GP0 (Zynq-7000) or HPM0 (UltraScale+).
    bus_bits : width in bits of its widest port from the FPGA to memory.
    """

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
"""Supported processor systems by name."""
LIGHT_STATES = ("busy", "error", "idle")
"""Status outputs of the accelerator that drive lights. A board with fewer lights shows the first ones."""
NUMBER_LIMITS = {
    "clock_mhz": (10, 500), "device.lut": (1, 10**8), "device.ff": (1, 10**8), "device.dsp": (1, 10**6),
    "device.ram": (1, 10**6), "dram.bits": (16, 128), "dram.megatransfers": (250, 20_000),
    "dram.refresh_every_ns": (1000, 10**6), "dram.refresh_ns": (1, 10**5),
}  # fmt: skip
"""Smallest and largest value of each number of a Board; "device.lut" is field `lut` of its device."""
_TEXTS = {
    "name": (r"[\w.-]{1,60}", "letters, digits, points and dashes, at most 60"),
    "board_files": (r"[\w.-]{0,60}", "the name in Vivado's board part, as pynq-z2 in tul.com.tw:pynq-z2:part0:1.0"),
    "light_standard": (r"[A-Z][A-Z0-9_]{0,30}|", "an I/O standard of Vivado, as LVCMOS33"),
}
"""Pattern of each text of a Board, and the pattern in words. It keeps special characters of Tcl out of the project."""
_PIN = r"[A-Z]{1,2}\d{1,2}"
"""Pattern of the name of a package pin."""


@dataclass(frozen=True)
class Board:
    """One FPGA board; docs/boards.md says where to find each value in a vendor's documents.

    name : name on the command line and in the names of bitstreams.
    part : the FPGA by Vivado's full name.
    device : resources of the FPGA.
    config : the accelerator's Config if the user names none.
    clock_mhz : target clock of the accelerator in MHz.
    dram : the memory behind the processor's ports.
    board_files : Vivado's name of the board; "": Vivado does not know it.
    lights : pins of up to three lights that are on when driven high, in the order of LIGHT_STATES.
    light_standard : I/O standard of these pins.

    BoardError for an impossible value.
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
                raise BoardError(f"{name} cannot be {abbreviate(value)}; it is {words}")
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
        """Yield name and value of every number that has limits."""
        for name in NUMBER_LIMITS:
            part, _, field = name.rpartition(".")
            yield name, getattr(getattr(self, part) if part else self, field)

    def _check_lights(self) -> None:
        """Raise BoardError for an impossible or repeated pin, too many pins, or pins without an I/O standard."""
        for pin in self.lights:
            if not isinstance(pin, str) or re.fullmatch(_PIN, pin, re.ASCII) is None or self.lights.count(pin) > 1:
                raise BoardError(
                    f"lights cannot have {abbreviate(pin)}; it takes different pins of the package, as R14"
                )
        if len(self.lights) > len(LIGHT_STATES):
            raise BoardError(f"lights cannot be {len(self.lights)} pins; it takes up to {len(LIGHT_STATES)}")
        if self.lights and not self.light_standard:
            raise BoardError("light_standard is missing, without which lights have no voltage; give one, as LVCMOS33")

    @property
    def processor(self) -> str:
        """Name of the processor system, a key of PROCESSORS."""
        return _processor_and_device(self.part)[0]

    @property
    def memory(self) -> MemoryModel:
        """Memory model of its DRAM at the accelerator's clock, for the simulators."""
        return self.dram.memory_model(self.name, self.clock_mhz)

    @property
    def address(self) -> int:
        """Physical address of the accelerator's registers."""
        return PROCESSORS[self.processor].address

    @property
    def bus_bits(self) -> int:
        """Width in bits of its widest port from the FPGA to memory."""
        return PROCESSORS[self.processor].bus_bits

    @property
    def machine(self) -> str:
        """Result of `platform.machine()` on its processor."""
        return PROCESSORS[self.processor].machine

    def pins(self) -> dict[str, str]:
        """Return the pin of each state's light; a state without a light is left out."""
        return dict(zip(LIGHT_STATES, self.lights))

    @property
    def digest(self) -> str:
        """Fingerprint of all fields, without the name of its Config: 8 hexadecimal digits.

        `celosia explore` recognises by it whether its records were measured for the same board of a user's own.
        """
        text = json.dumps(dataclasses.asdict(self) | {"config": self.config.digest}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def to_toml(self) -> str:
        """Return the TOML text that `board_file.read_board` reads, with which a user begins a board of their own.

        It has no name: the file's name is the board's.
        """
        top_fields = {"part": self.part, "clock_mhz": self.clock_mhz, "board_files": self.board_files}
        top_fields |= {"lights": list(self.lights), "light_standard": self.light_standard}
        preset = PRESETS.get(self.config.name)
        if preset == self.config:
            top_fields["config"] = preset.name
        text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in top_fields.items() if value not in ("", []))
        device = {name: value for name, value in vars(self.device).items() if name not in ("name", "synth")}
        tables = {"device": device} if self.device != FPGAS.get(self.device.name) else {}
        tables["dram"] = vars(self.dram)
        for title, table in tables.items():
            text += f"\n[{title}]\n" + "".join(f"{name} = {value}\n" for name, value in table.items())
        return text + ("" if preset == self.config else f"\n[config]\n{self.config.to_toml()}")


def device_of(part: str) -> str:
    """Return the device of a part, its name without package and speed grade.

    BoardError if Celosia supports no board with the family.

    >>> device_of("xc7z020clg400-1"), device_of("xczu3eg-sbva484-1-i"), device_of("xck26-sfvc784-2LV-c")
    ('xc7z020', 'xczu3eg', 'xck26')
    """
    return _processor_and_device(part)[1]


def synth_command_of(part: str) -> str:
    """Return the Yosys command that synthesises for a part. Raises BoardError as `device_of` does."""
    return PROCESSORS[_processor_and_device(part)[0]].synth


def _processor_and_device(part: str) -> tuple[str, str]:
    """Return the key of PROCESSORS and the device of a part. Raises BoardError for a name of no supported family."""
    if isinstance(part, str):
        for name, processor in PROCESSORS.items():
            if match := re.fullmatch(processor.part, part, re.ASCII):
                return name, match[1]
    raise BoardError(
        f"part cannot be {abbreviate(part)}; it is a Zynq-7000, Zynq UltraScale+ or Kria K24 or K26 by the whole name "
        "that Vivado has for it, as xc7z020clg400-1 or xczu3eg-sbva484-1-i"
    )


def _check_number(name: str, value: object) -> None:
    """Raise BoardError unless `value` is an integer within NUMBER_LIMITS of `name`."""
    low, high = NUMBER_LIMITS[name]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BoardError(f"{name} cannot be {abbreviate(value)}; it is a whole number from {low:,} to {high:,}")
