"""Manifest of a bitstream, and the header of a .bit file: a board checks both before it loads the bitstream.

Standard library only, as boards read it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celosia.hw.spec.config import Config, ConfigError
from celosia.plain import Sentence, from_json


class ManifestError(Sentence, ValueError):
    """Damaged bitstream or manifest, or one for another board; the message names the file and the reason."""


@dataclass(frozen=True)
class Manifest:
    """Content of the JSON file beside a bitstream, which says what the bitstream was made from.

    board : name of the board.
    part : Vivado's full name of the FPGA.
    config, config_digest : fields of the accelerator's Config, and their digest.
    hardware_digest : digest of the Config, the hardware's sources and the version of Amaranth.
    clock_mhz : the accelerator's clock in MHz.
    address : physical address of the accelerator's registers.
    celosia, tool : versions of Celosia and of Vivado.
    slack_ns : time in ns by which the slowest path meets the clock.
    bit, hwh : SHA-256 of the bitstream and of its hardware handoff file, in hexadecimal.
    """

    board: str
    part: str
    config: dict[str, Any]
    config_digest: str
    hardware_digest: str
    clock_mhz: int
    address: int
    celosia: str
    tool: str
    slack_ns: str
    bit: str
    hwh: str

    def to_json(self) -> str:
        """Return the text of the JSON file, which `load` reads."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @property
    def identity(self) -> int:
        """Value of register `identity` in this hardware."""
        return int(self.config_digest[:8], 16)

    @staticmethod
    def load(path: str | Path) -> Manifest:
        """Read a manifest. ManifestError if the file cannot be read, or its content is damaged."""
        try:
            fields = from_json(Path(path).read_text(encoding="utf-8"))
            manifest = Manifest(**fields)
        except OSError as error:
            raise ManifestError(f"cannot read the manifest {path}: {error.strerror}") from None
        except (ValueError, TypeError, RecursionError) as error:
            raise ManifestError(f"{path} is not the manifest of a bitstream: {error}") from None
        for field in dataclasses.fields(Manifest):
            value = getattr(manifest, field.name)
            expected_type = {"config": dict, "clock_mhz": int, "address": int}.get(field.name, str)
            if not isinstance(value, expected_type):
                raise ManifestError(f"{path} is damaged: {field.name} is {value!r}")
        try:
            digest = Config.from_dict(manifest.config).digest
        except (ConfigError, TypeError) as error:
            raise ManifestError(f"{path} is damaged: {error}") from None
        if digest != manifest.config_digest:
            raise ManifestError(f"{path} is damaged: config_digest is {manifest.config_digest!r}, not {digest!r}")
        return manifest

    def check_files(self, bit: Path) -> None:
        """Raise ManifestError unless bitstream `bit` and the .hwh file beside it have this manifest's checksums."""
        for path, expected in ((bit, self.bit), (bit.with_suffix(".hwh"), self.hwh)):
            try:
                checksum = hashlib.sha256(path.read_bytes()).hexdigest()
            except OSError as error:
                raise ManifestError(f"cannot read {path}: {error.strerror}") from None
            if checksum != expected:
                raise ManifestError(f"{path} is damaged or from another build: its checksum is not the manifest's")


@dataclass(frozen=True)
class BitHeader:
    """Header of a .bit file.

    design : name of the top module.
    part : device and package as Vivado writes them here, such as "7z020clg400".
    date, time : when Vivado wrote the file.
    offset, length : position and size in bytes of the configuration data.
    """

    design: str
    part: str
    date: str
    time: str
    offset: int
    length: int

    @staticmethod
    def read(path: str | Path) -> BitHeader:
        """Read the header. ManifestError for a file that is no bitstream, or is cut off.

        Format: a field of nine fixed bytes, the number 1, then fields a to e. Each of these has a letter, a length (two
        bytes, four for e) and a content: a the design, b the part, c the date, d the time, e the data.
        """
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise ManifestError(f"cannot read {path}: {error.strerror}") from None
        texts, position = [], 13
        if data[:2] != b"\x00\x09" or data[11:13] != b"\x00\x01":
            raise ManifestError(f"{path} is not a bitstream of Vivado")
        try:
            for key in b"abcd":
                letter, size = struct.unpack_from(">BH", data, position)
                if letter != key:
                    raise ManifestError(f"{path} is damaged: field {chr(key)} of its header is missing")
                texts.append(data[position + 3 : position + 3 + size].rstrip(b"\0").decode("ascii"))
                position += 3 + size
            letter, length = struct.unpack_from(">BI", data, position)
        except (struct.error, UnicodeDecodeError):
            raise ManifestError(f"{path} is damaged: its header is cut off") from None
        if letter != ord("e") or position + 5 + length != len(data):
            raise ManifestError(f"{path} is damaged: it holds {len(data)} bytes, its header says otherwise")
        design, part, date, time = texts
        return BitHeader(design.split(";")[0], part, date, time, position + 5, length)

    def is_for(self, part: str) -> bool:
        """Return whether the bitstream is for `part`, such as "xc7z020clg400-1", in any speed grade."""
        return _without_prefix(self.part).startswith(_without_prefix(re.sub(r"-\d[a-z]*(-[a-z])?$", "", part.lower())))


def _without_prefix(part: str) -> str:
    """Return the name of a part in lower case, without "xc" and dashes, so that names of both spellings compare.

    A .bit file spells a Zynq-7000 "7z020clg400", but an UltraScale+ "xczu3eg-sbva484-1-i".
    """
    return part.lower().removeprefix("xc").replace("-", "")
