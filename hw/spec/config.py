"""What a user picks of the hardware. Every other size is derived from it, here or in `isa.py`."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from celosia.plain import Sentence, brief, from_json, from_toml


class ConfigError(Sentence, ValueError):
    """A Config that cannot be built; the message names the field, its value and what is possible."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """For the end of "there is no ...": the name that is meant, perhaps.

    >>> did_you_mean("PYNK", ["tiny", "pynq"]), did_you_mean("nexys", ["pynq"])
    (" (did you mean 'pynq'?)", '')
    """
    near = difflib.get_close_matches(name.lower(), list(known), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):  # noqa: UP036 - the runner on a board keeps to 3.10
        return from_toml(text)
    raise ConfigError("reading TOML needs Python 3.11; give a .json file")


class _Limits(NamedTuple):
    """What a number may be."""

    low: int
    high: int
    powers: bool = True
    """Powers of two only."""


_LIMITS = {
    "batch": _Limits(1, 16),
    "block_in": _Limits(2, 128),
    "block_out": _Limits(2, 128),
    "bus_bytes": _Limits(4, 128),
    "inp_depth": _Limits(16, 1 << 20),
    "wgt_depth": _Limits(8, 1 << 20),
    "acc_depth": _Limits(16, 1 << 20),
    "vin_depth": _Limits(16, 1 << 20),
    "out_depth": _Limits(16, 1 << 20),
    "par_depth": _Limits(4, 1 << 12),
    "lut_count": _Limits(1, 16),
    "queue_depth": _Limits(2, 256),
    "token_bits": _Limits(2, 16, powers=False),
    "taps": _Limits(0, 16, powers=False),
    "tap_depth": _Limits(4, 1 << 12),
    "residual_cycles": _Limits(1, 4),
    "ports": _Limits(1, 2),
    "pump": _Limits(1, 2),
    "softmax": _Limits(0, 16, powers=False),
    "norm": _Limits(0, 128, powers=False),
    "weight_bits": _Limits(1, 8),
    "trace_depth": _Limits(0, 1 << 16, powers=False),
}
"""Of each field of numbers; the others are true or false, and the name."""
_LATER = ("trace_depth", "alu", "int32", "pump", "softmax", "weight_bits", "sums", "norm")
"""Fields that Programs and records are older than: as they are by default they do not count in a digest."""
_MOST_PIECES = 8
"""Of the larger one of block_in and block_out."""


def limits(field: str) -> str:
    """What a field may hold, in words.

    >>> limits("bus_bytes"), limits("taps"), limits("packed")
    ('4 to 128, a power of two', '0 to 16', 'true or false')
    """
    if field not in _LIMITS:
        return "true or false"
    low, high, powers = _LIMITS[field]
    return f"{low:,} to {high:,}" + (", a power of two" if powers else "")


def field_values(field: str) -> Sequence[int]:
    """List all values that a field of numbers or of true and false may hold, in ascending order.

    >>> list(field_values("bus_bytes")), list(field_values("packed"))
    ([4, 8, 16, 32, 64, 128], [False, True])
    """
    if field not in _LIMITS:
        return (False, True)
    low, high, powers = _LIMITS[field]
    return [1 << n for n in range(low.bit_length() - 1, high.bit_length())] if powers else range(low, high + 1)


def check_field(field: str, value: object) -> None:
    """ConfigError where no Config can have this value of a field."""
    if field == "name":
        if not isinstance(value, str):
            raise ConfigError(f"name must be a text, not {str(value)[:60]!r}")
    elif field not in _LIMITS:
        if not isinstance(value, bool):
            raise ConfigError(f"{field} must be true or false, not {brief(value)}")
    elif not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{field} must be a whole number, not {brief(value)}")
    else:
        low, high, powers = _LIMITS[field]
        if powers and not _is_power_of_two(value):
            raise ConfigError(f"{field} must be a power of two, not {brief(value)}")
        if not low <= value <= high:
            raise ConfigError(f"{field} must be between {low} and {high}, not {brief(value)}")


def _check_together(cfg: Config) -> None:
    """ConfigError where fields that are possible alone do not go together."""
    if max(cfg.block_in, cfg.block_out) // cfg.group > _MOST_PIECES:
        raise ConfigError(
            f"block_in and block_out may differ at most by a factor of {_MOST_PIECES}, not {cfg.block_in} and "
            f"{cfg.block_out}"
        )
    if cfg.forward and cfg.block_in < cfg.block_out:
        raise ConfigError(
            f"forward needs entries of inp no smaller than those of out: block_in {cfg.block_in} is less than "
            f"block_out {cfg.block_out}"
        )
    if cfg.residual_cycles > cfg.lanes:
        raise ConfigError(f"residual_cycles must be at most the {cfg.lanes} lanes, not {cfg.residual_cycles}")
    most = cfg.block_out // (2 if cfg.taps > 1 else 4)
    if cfg.softmax and (cfg.batch > 1 or cfg.softmax > most or not _is_power_of_two(cfg.softmax)):
        # Three readers of vin take turns, in block_out / softmax cycles; with taps each reads two entries at once.
        raise ConfigError(
            f"softmax needs batch = 1, not {cfg.batch}, and 0 or a power of two up to block_out / 4, with taps = 2 and "
            f"more block_out / 2, {most}, not {cfg.softmax}"
        )
    if cfg.norm and (cfg.batch > 1 or cfg.norm > cfg.block_out or not _is_power_of_two(cfg.norm)):
        raise ConfigError(
            f"norm needs batch = 1, not {cfg.batch}, and 0 or a power of two up to block_out, {cfg.block_out}, not "
            f"{cfg.norm}"
        )
    if cfg.block_in * cfg.weight_bits < 4:
        raise ConfigError(
            f"weight_bits = {cfg.weight_bits} needs block_in = {4 // cfg.weight_bits} at least, not {cfg.block_in}"
        )
    beats = 8 // cfg.weight_bits
    if beats > 1 and cfg.block_in * cfg.block_out < beats * cfg.bus_bytes:
        raise ConfigError(
            f"weight_bits = {cfg.weight_bits} needs entries of wgt of {beats} beats, {beats} * bus_bytes = "
            f"{beats * cfg.bus_bytes}, not of block_in * block_out = {cfg.block_in * cfg.block_out} bytes"
        )


@dataclass(frozen=True)
class Config:
    """Parameters of one accelerator; docs/configs.md says what each costs.

    >>> Config(block_in=8, block_out=8, bus_bytes=16).macs_per_cycle
    64
    >>> Config.load("pynq").inp_depth
    4096

    batch, block_in, block_out: a gemm step multiplies [batch, block_in] by [block_out, block_in] transposed.
    bus_bytes: width of the AXI4 data bus.
    inp_depth, wgt_depth, acc_depth, vin_depth, out_depth, par_depth: entries of the scratchpads.
    lut_count: tables of 256 entries. queue_depth: instructions waiting in front of each unit.
    token_bits: width of each semaphore between two units.
    packed: two products share a multiplication of 25 x 8 bits, for DSP blocks that take it, as Xilinx' do.
    taps: entries of vin that the vector unit multiplies and adds in a cycle, for depthwise convolutions beside gemm;
    0: none. tap_depth: entries of the scratchpad of their weights.
    forward: the vector unit writes inp and vin as well, so that the next layer of a block finds its input there.
    residual_cycles: cycles that an entry with a residual takes, on as much less hardware.
    ports: read ports to memory. With two, weights and parameters do not wait behind activations.
    trace_depth: starts and ends of instructions that the hardware keeps of a run, for the timeline of a board; 0: none.
    alu: the vector unit adds, compares and shifts (ADD, MAX, MIN, SHR), and reduces by MIN, beside what models need.
    int32: it writes acc, too, and LOAD brings int32 there, not int8 alone. No compiled model needs either of the two.
    pump: 2: each DSP block of the array works at twice the clock, in place of two, where FPGAs have blocks for it.
    softmax: elements of a softmax that the vector unit adds up, and divides, in a cycle; 0: it has none. More than
    block_out / 4 of them read vin in pairs of entries, through the port that taps = 2 and more have.
    weight_bits: 4, 2, 1: LOAD expands packed weights of so many bits to wgt, by codebooks; 8: it does not.
    sums: the vector unit gives sums as they are, a byte at a time (BYTE), for results that the CPU scales in floats.
    norm: lanes of a LayerNorm or RMSNorm of which the vector unit adds up sums and squares in a cycle; 0: it has none.
    """

    batch: int = 1
    block_in: int = 16
    block_out: int = 16
    bus_bytes: int = 8
    inp_depth: int = 4096
    wgt_depth: int = 1024
    acc_depth: int = 2048
    vin_depth: int = 2048
    out_depth: int = 1024
    par_depth: int = 64
    lut_count: int = 2
    queue_depth: int = 16
    token_bits: int = 8
    packed: bool = True
    taps: int = 0
    tap_depth: int = 512
    forward: bool = False
    residual_cycles: int = 1
    ports: int = 1
    trace_depth: int = 0
    alu: bool = True
    int32: bool = True
    pump: int = 1
    softmax: int = 0
    weight_bits: int = 8
    sums: bool = False
    norm: int = 0
    name: str = dataclasses.field(default="custom", compare=False)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_field(field.name, getattr(self, field.name))
        _check_together(self)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Of its numbers, the same in every process. It is asked for at each look into what is remembered by Config."""
        return hash(tuple(value for value in dataclasses.astuple(self) if isinstance(value, int)))

    # Of which the entries of scratchpads are made (scratchpads.py) ------------------------------------------

    @cached_property
    def group(self) -> int:
        """Channels that lie together in DRAM: activations are [N/batch][C/group][H][W][batch][group]."""
        return min(self.block_in, self.block_out)

    @cached_property
    def piece_bytes(self) -> int:
        """Bytes of one [batch][group] piece, the smallest thing that load and store move."""
        return self.batch * self.group

    @cached_property
    def inp_pieces(self) -> int:
        """Pieces in an entry of inp, [block_in/group][batch][group] int8."""
        return self.block_in // self.group

    @cached_property
    def out_pieces(self) -> int:
        """Pieces in an entry of acc, vin and out, [block_out/group][batch][group]."""
        return self.block_out // self.group

    @cached_property
    def lanes(self) -> int:
        """Lanes of the vector unit: one for each int32 of an accumulator entry."""
        return self.batch * self.block_out

    @property
    def macs_per_cycle(self) -> int:
        """Multiplications of int8 that gemm adds up in a cycle."""
        return self.batch * self.block_in * self.block_out

    # Identity ---------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """All fields, as `from_dict` takes them."""
        return dataclasses.asdict(self)

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits that differ where any parameter differs; the name does not count."""
        fields = {key: value for key, value in self.to_dict().items() if key != "name"}
        for name in _LATER:
            if fields[name] == getattr(Config, name):
                del fields[name]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def identity(self) -> int:
        """The first 32 bits of `digest`, held in the identity register."""
        return int(self.digest[:8], 16)

    def to_toml(self) -> str:
        """The Config as a file that `load` reads, with all of its fields."""
        fields = {name: str(value).lower() for name, value in self.to_dict().items() if name != "name"}
        return "".join(f"{name} = {value}\n" for name, value in fields.items())

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> Config:
        """The Config with these fields, the others as they are by default. Raises ConfigError."""
        if not isinstance(fields, dict):
            raise ConfigError(f"a Config is a table of fields, not {str(fields)[:60]!r}")
        known = {field.name for field in dataclasses.fields(Config)}
        for key in fields:
            if key not in known:
                near = did_you_mean(key, known)
                raise ConfigError(f"unknown Config field {key!r}{near}; known are {', '.join(sorted(known))}")
        return Config(**fields)

    @staticmethod
    def load(source: str | Path | Config) -> Config:
        """A Config from a preset's name, a TOML or JSON file, or a Config itself. Raises ConfigError."""
        if isinstance(source, Config):
            return source
        text = str(source)
        if text in PRESETS:
            return PRESETS[text]
        path = Path(text)
        if path.suffix not in (".toml", ".json"):
            raise ConfigError(
                f"no preset is called {text!r}{did_you_mean(text, PRESETS)}; take one of {', '.join(PRESETS)}, or a "
                ".toml or .json file"
            )
        try:
            content = path.read_text(encoding="utf-8")
            fields = _toml(content) if path.suffix == ".toml" else from_json(content)
        except OSError as error:
            raise ConfigError(f"cannot read Config file {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"Config file {path} is not valid {path.suffix[1:].upper()}: {error}") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"Config file {path} must hold a table of fields, not {type(fields).__name__}")
        fields.setdefault("name", path.stem)
        return Config.from_dict(fields)


_LEAN: dict[str, Any] = {"alu": False, "int32": False}
"""Without what no compiled model needs."""
PRESETS = {
    config.name: config
    for config in (
        Config(
            name="tiny", block_in=4, block_out=4, bus_bytes=8,
            inp_depth=1024, wgt_depth=256, acc_depth=512, vin_depth=512, out_depth=256, par_depth=32,
            taps=3, tap_depth=64, forward=True, residual_cycles=2, **_LEAN,
        ),
        Config(name="pynq", taps=3, forward=True, residual_cycles=2, **_LEAN),
        Config(
            name="wide", block_in=32, block_out=16, inp_depth=2048, wgt_depth=512, ports=2, pump=2,
            taps=3, forward=True, residual_cycles=2, **_LEAN,
        ),
        Config(
            name="ultra96", block_in=32, block_out=16, bus_bytes=16,
            inp_depth=2048, wgt_depth=256, acc_depth=1024, vin_depth=1024, out_depth=512, par_depth=32,
            taps=3, forward=True, residual_cycles=2, **_LEAN,
        ),
        Config(
            name="zcu104", block_in=32, block_out=32, bus_bytes=16,
            inp_depth=4096, wgt_depth=512, acc_depth=2048, vin_depth=2048, out_depth=1024, par_depth=64,
            taps=3, forward=True, residual_cycles=2, **_LEAN,
        ),
        Config(
            name="huge", block_in=64, block_out=64, bus_bytes=64,
            inp_depth=4096, wgt_depth=1024, acc_depth=2048, vin_depth=2048, out_depth=1024, par_depth=64,
            taps=3, forward=True, **_LEAN,
        ),
    )
}  # fmt: skip
