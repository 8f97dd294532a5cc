"""Read a user's own board from a TOML file; docs/boards.md has an example."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from celosia.hw.boards.board import LIGHT_STATES, Board, BoardError, device_of, synth_command_of
from celosia.hw.boards.fpga import FPGAS, Device
from celosia.hw.boards.memory import Dram
from celosia.hw.spec.config import Config, ConfigError, did_you_mean
from celosia.plain import abbreviate, from_toml

PAGE = "docs/boards.md says where to find it"
"""Hint at the end of errors about missing values."""


def read_board(path: Path) -> Board:
    """Read a board from a TOML file; its name is field `name`, else the file's. Raises BoardError for any mistake."""
    try:
        fields = from_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BoardError(f"cannot read board file {path}: {error.strerror}; give the path of a .toml file") from None
    except ValueError as error:
        raise BoardError(f"board file {path} is not valid TOML: {error}; docs/boards.md has an example") from None
    try:
        return _board_from_fields(path, fields)
    except BoardError as error:
        raise BoardError(f"board file {path}: {error}") from None


def _fields_of_platform(name: object) -> dict[str, Any]:
    """Return part and lights of a platform of amaranth-boards, as fields of a board file.

    name: a module of that package and the class in it, as "arty_z7.ArtyZ720Platform". Raises BoardError for others.
    """
    from importlib import import_module

    match = re.fullmatch(r"([a-z][a-z0-9_]*)\.([A-Z]\w*)", name) if isinstance(name, str) else None
    try:
        platform: Any = getattr(import_module(f"amaranth_boards.{match[1]}"), match[2]) if match else None
        part = platform.device, platform.package, platform.speed
    except (ImportError, AttributeError):
        raise BoardError(
            f"platform cannot be {abbreviate(name)}; it is a module of amaranth-boards and a class in it for a Zynq, "
            "as arty_z7.ArtyZ720Platform"
        ) from None
    leds = [resource for resource in platform.resources if resource.name == "led"][: len(LIGHT_STATES)]
    lights: dict[str, Any] = {"lights": [led.ios[0].names[0] for led in leds]}
    if leds:
        lights["light_standard"] = str(leds[0].attrs["IOSTANDARD"])
    separator = "" if str(part[0]).startswith("xc7z") else "-"
    return {"part": f"{part[0]}{separator}{part[1]}-{part[2]}", **lights}


def _board_from_fields(path: Path, fields: dict[str, Any]) -> Board:
    """Build a Board from the fields of file `path`. Raises BoardError for a missing, unknown or impossible field."""
    if "platform" in fields:
        fields = _fields_of_platform(fields["platform"]) | {name: fields[name] for name in fields if name != "platform"}
    known = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(Board)}
    _check_names("", fields, known | {"name": False, "device": False})
    fields = {"name": path.stem, **fields}
    fields["device"] = _device(fields["part"], fields.get("device"))
    fields["dram"] = Dram(**_table("dram", fields["dram"], [field.name for field in dataclasses.fields(Dram)]))
    fields["config"] = _config(path.parent, fields["config"], fields["name"])
    lights = fields.get("lights", [])
    if not isinstance(lights, list):
        raise BoardError(f'lights cannot be {abbreviate(lights)}; it is a list of pins, as ["R14", "P14"]')
    return Board(**fields | {"lights": tuple(lights)})


def _device(part: str, table: object) -> Device:
    """Return the FPGA of `part`. table: resources from table [device] of the file; None: those in FPGAS."""
    name = device_of(part)
    if table is not None:
        resources = [field.name for field in dataclasses.fields(Device) if field.name not in ("name", "synth")]
        return Device(name, synth_command_of(part), **_table("device", table, resources))
    if name not in FPGAS:
        raise BoardError(f"[device] is missing: Celosia does not know what a {name} holds; {PAGE}")
    return FPGAS[name]


def _config(folder: Path, value: object, name: object) -> Config:
    """Return the Config of a board file's field `config`.

    value: the name of a preset, the path of a file relative to `folder`, or a table of fields, which makes a Config
    called `name`.
    """
    try:
        if isinstance(value, dict):
            return Config.from_dict({"name": name, **value})
        if not isinstance(value, str):
            raise BoardError(f"config cannot be {abbreviate(value)}; it is the name of a preset, a file, or a table")
        return Config.load(folder / value if value.endswith((".toml", ".json")) else value)
    except ConfigError as error:
        raise BoardError(f"config: {error}") from None


def _table(title: str, value: object, names: list[str]) -> dict[str, Any]:
    """Return `value` if it is a table with just the fields `names`; else raise BoardError. title: name for errors."""
    if not isinstance(value, dict):
        raise BoardError(f"{title} cannot be {abbreviate(value)}; it is a table, [{title}], of {', '.join(names)}")
    _check_names(f"{title}.", value, dict.fromkeys(names, True))
    return value


def _check_names(prefix: str, fields: Mapping[str, object], known: Mapping[str, bool]) -> None:
    """Raise BoardError for an unknown or missing field.

    prefix: text before the names in errors, as "dram.". known: possible fields, and whether each is required.
    """
    for name in fields:
        if name not in known:
            hint = did_you_mean(name, known)
            raise BoardError(f"there is no field {f'{prefix}{name}'[:60]!r}{hint}; known are {', '.join(known)}")
    for name, is_required in known.items():
        if is_required and name not in fields:
            raise BoardError(f"{prefix}{name} is missing; {PAGE}")
