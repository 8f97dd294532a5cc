"""The space that an exploration searches: values of each Config field, and rules that leave some combinations out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from celosia.hw.boards.board import Board
from celosia.hw.spec.config import Config, ConfigError, check_field, did_you_mean
from celosia.plain import Sentence, abbreviate, from_toml

Values = Mapping[str, Sequence[int | bool]]
"""Values to try, by name of a Config field."""
MAX_DRAWS = 1000
"""Random draws after which a space counts as having no possible Config."""


class SpaceError(Sentence, ValueError):
    """An impossible space. The message names the field, the value and the choices."""


def _powers(low: int, high: int) -> tuple[int, ...]:
    """Return the powers of two from `low` to `high`, both included."""
    return tuple(1 << n for n in range(low.bit_length() - 1, high.bit_length()))


DEFAULT: dict[str, tuple[int | bool, ...]] = {
    "block_in": _powers(4, 64), "block_out": _powers(4, 64), "batch": _powers(1, 4), "bus_bytes": _powers(4, 16),
    "ports": (1, 2), "inp_depth": _powers(256, 16384), "wgt_depth": _powers(64, 8192), "acc_depth": _powers(128, 8192),
    "vin_depth": _powers(128, 8192), "out_depth": _powers(128, 4096), "par_depth": _powers(16, 256),
    "lut_count": (1, 2, 4), "queue_depth": _powers(4, 32), "packed": (True, False), "taps": (0, 1, 2, 3, 5, 7),
    "tap_depth": _powers(32, 1024), "forward": (False, True), "residual_cycles": (1, 2, 4),
    "pump": (1, 2),
}  # fmt: skip
"""The default space: values of each field. Fields that are missing here keep the board's value."""


@dataclass(frozen=True)
class ConfigSpace:
    """All possible Configs whose fields have one of these values; other fields have those of `base`.

    >>> space = ConfigSpace({"block_in": (8, 16), "block_out": (8, 16), "forward": (False, True)}, Config())
    >>> len(space), sum(1 for _ in space)    # forward needs block_in >= block_out
    (8, 7)
    """

    values: dict[str, tuple[int | bool, ...]]
    base: Config = field(default_factory=lambda: Config(packed=True))

    def __post_init__(self) -> None:
        known_fields = {field.name for field in dataclasses.fields(Config)} - {"name"}
        for name, values in self.values.items():
            if name not in known_fields:
                suggestion = did_you_mean(name, known_fields)
                raise SpaceError(
                    f"unknown Config field {name!r}{suggestion}; known are {', '.join(sorted(known_fields))}"
                )
            if not values:
                raise SpaceError(f"{name} has no values; give at least one, or leave it out")
            try:
                for value in values:
                    check_field(name, value)
            except ConfigError as error:
                raise SpaceError(f"the space has a value that no Config can have: {error}") from None

    @staticmethod
    def of(board: Board, source: str | Path | Values | None = None) -> ConfigSpace:
        """Return the default space on `board`, with the values of a TOML file or mapping in place of the default ones.

        source: for each field one value or a list of values. SpaceError.
        """
        widest = board.bus_bits // 8
        defaults = DEFAULT | {"bus_bytes": tuple(width for width in DEFAULT["bus_bytes"] if width <= widest)}
        choices = _read_toml(source) if isinstance(source, (str, Path)) else dict(source or {})
        narrowed = {name: tuple(dict.fromkeys(_parse_values(name, value))) for name, value in choices.items()}
        if wide := [value for value in narrowed.get("bus_bytes", ()) if isinstance(value, int) and value > widest]:
            raise SpaceError(f"bus_bytes {wide[0]} is wider than a port of {board.name}; take at most {widest}")
        return ConfigSpace(defaults | narrowed, board.config)

    def __len__(self) -> int:
        """Return the number of combinations before rules leave some out."""
        return prod(len(values) for values in self.values.values())

    def __iter__(self) -> Iterator[Config]:
        """Yield each Config once, in order."""
        seen = set()
        for values in product(*self.values.values()):
            cfg = self.config(dict(zip(self.values, values)))
            if cfg is not None and cfg not in seen:
                seen.add(cfg)
                yield cfg

    def config(self, fields: Mapping[str, int | bool]) -> Config | None:
        """Return the Config with these fields; None where it is impossible.

        A field that it does not use has its first value, so that equal hardware is one Config: without taps
        `tap_depth`.
        """
        fields = dict(fields)
        if fields.get("taps", self.base.taps) == 0 and "tap_depth" in self.values:
            fields["tap_depth"] = self.values["tap_depth"][0]
        try:
            return dataclasses.replace(self.base, **fields, name="custom")  # type: ignore[arg-type]
        except ConfigError:
            return None

    def __contains__(self, cfg: Config) -> bool:
        return self.config({name: getattr(cfg, name) for name in self.values}) == cfg and all(
            getattr(cfg, name) in values for name, values in self.values.items()
        )

    @cached_property
    def searched(self) -> tuple[str, ...]:
        """Fields of more than one value: those that a search can change."""
        return tuple(name for name, values in self.values.items() if len(values) > 1)

    def sample(self, rng: np.random.Generator) -> Config | None:
        """Draw a random Config, with which searches begin and leave local optima.

        None after MAX_DRAWS draws of impossible ones.
        """
        for _ in range(MAX_DRAWS):
            drawn = {name: values[rng.integers(len(values))] for name, values in self.values.items()}
            if (cfg := self.config(drawn)) is not None:
                return cfg
        return None

    def move(self, cfg: Config, steps: Mapping[str, int]) -> Config | None:
        """Return `cfg` with fields moved up or down their sorted values.

        steps: number of values to move by, by field; negative: down. None beyond the last value, or where the Config is
        impossible or the same.
        """
        fields = {name: getattr(cfg, name) for name in self.values}
        for name, step in steps.items():
            values = sorted(self.values[name])
            index = values.index(fields[name]) + step
            if not 0 <= index < len(values):
                return None
            fields[name] = values[index]
        config = self.config(fields)
        return None if config == cfg else config

    def neighbours(self, cfg: Config) -> Iterator[tuple[str, int, Config]]:
        """Yield each Config one step of one field away, for the moves of searches: field, step (1 or -1), Config."""
        for name in self.searched:
            for step in (1, -1):
                if (neighbour := self.move(cfg, {name: step})) is not None:
                    yield name, step, neighbour

    def nearest(self, cfg: Config) -> Config | None:
        """Return the Config of the space whose values are nearest to those of `cfg`; None where that is impossible.

        A search begins with the one nearest to the board's preset.
        """
        fields = {
            name: min(values, key=lambda value: abs(value - getattr(cfg, name))) for name, values in self.values.items()
        }
        return self.config(fields)


def _parse_values(name: str, value: Any) -> Sequence[int | bool]:
    """Return the values of a field as a sequence: `value` is one, or a list of them. SpaceError for other types."""
    values = value if isinstance(value, (list, tuple)) else (value,)
    for entry in values:
        if not isinstance(entry, int):
            raise SpaceError(f"{name} cannot be {abbreviate(entry)}: it takes whole numbers, or true and false")
    return values


def _read_toml(path: str | Path) -> dict[str, Any]:
    """Read a space from a TOML file. SpaceError where it is missing or invalid."""
    try:
        return from_toml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SpaceError(f"cannot read the space {path}: {error.strerror}") from None
    except ValueError as error:
        raise SpaceError(f"the space {path} is not valid TOML: {error}") from None
