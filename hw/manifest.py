"""Manifest of a bitstream, and the header of the .bit file. Standard library only, for the board."""

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
    """A bitstream or manifest that is damaged, or not for this board; the message names the file and the reason."""


@dataclass(frozen=True)
class Manifest:
    """The JSON file beside a bitstream.

    part: the full name of the device. config, config_digest: of the accelerator; hardware_digest: also of its sources.
    clock_mhz: of the accelerator; slack_ns: by how much it was met. address: of the registers. tool, celosia: versions.
    bit, hwh: SHA-256 of the two files, in hexadecimal.
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
        """Write the manifest as JSON, which `from_json` reads."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @property
    def identity(self) -> int:
        """Value of the identity register of this hardware."""
        return int(self.config_digest[:8], 16)

    @staticmethod
    def load(path: str | Path) -> Manifest:
        """Raises ManifestError."""
        try:
            fields = from_json(Path(path).read_text(encoding="utf-8"))
            manifest = Manifest(**fields)
        except OSError as error:
            raise ManifestError(f"cannot read the manifest {path}: {error.strerror}") from None
        except (ValueError, TypeError, RecursionError) as error:
            raise ManifestError(f"{path} is not the manifest of a bitstream: {error}") from None
        for field in dataclasses.fields(Manifest):
            value = getattr(manifest, field.name)
            kind = {"config": dict, "clock_mhz": int, "address": int}.get(field.name, str)
            if not isinstance(value, kind):
                raise ManifestError(f"{path} is damaged: {field.name} is {value!r}")
        try:
            digest = Config.from_dict(manifest.config).digest
        except (ConfigError, TypeError) as error:
            raise ManifestError(f"{path} is damaged: {error}") from None
        if digest != manifest.config_digest:
            raise ManifestError(f"{path} is damaged: config_digest is {manifest.config_digest!r}, not {digest!r}")
        return manifest

    def check_files(self, bit: Path) -> None:
        """Raise ManifestError where the bitstream, or the hardware handoff beside it, differs from the manifest."""
        for path, expected in ((bit, self.bit), (bit.with_suffix(".hwh"), self.hwh)):
            try:
                actual = hashlib.sha256(path.read_bytes()).hexdigest()
            except OSError as error:
                raise ManifestError(f"cannot read {path}: {error.strerror}") from None
            if actual != expected:
                raise ManifestError(f"{path} is damaged or from another build: its checksum is not the manifest's")


@dataclass(frozen=True)
class BitHeader:
    """The header of a .bit file. part: device and package as Vivado writes them, such as "7z020clg400"."""

    design: str
    part: str
    date: str
    time: str
    offset: int
    length: int

    @staticmethod
    def read(path: str | Path) -> BitHeader:
        """Read the header. ManifestError for a file that is no bitstream, or is cut off.

        The format: a field of nine fixed bytes, the number 1, then fields keyed a to e: a letter, a length (two bytes,
        four for e), and what it says (a: design, b: part, c: date, d: time, e: the data).
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
                kind, size = struct.unpack_from(">BH", data, position)
                if kind != key:
                    raise ManifestError(f"{path} is damaged: field {chr(key)} of its header is missing")
                texts.append(data[position + 3 : position + 3 + size].rstrip(b"\0").decode("ascii"))
                position += 3 + size
            kind, length = struct.unpack_from(">BI", data, position)
        except (struct.error, UnicodeDecodeError):
            raise ManifestError(f"{path} is damaged: its header is cut off") from None
        if kind != ord("e") or position + 5 + length != len(data):
            raise ManifestError(f"{path} is damaged: it holds {len(data)} bytes, its header says otherwise")
        design, part, date, time = texts
        return BitHeader(design.split(";")[0], part, date, time, position + 5, length)

    def is_for(self, part: str) -> bool:
        """Whether the bitstream fits a device with the full name `part`, as "xc7z020clg400-1"; speed grades do not
        matter."""
        return _plain(self.part).startswith(_plain(re.sub(r"-\d[a-z]*(-[a-z])?$", "", part.lower())))


def _plain(part: str) -> str:
    """Family, size and package: Vivado writes "7z020clg400" for some families and "xczu3eg-sbva484-1-i" for others."""
    return part.lower().removeprefix("xc").replace("-", "")
