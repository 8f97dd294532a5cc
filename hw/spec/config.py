"""Config: the user's choices for the hardware. All other sizes are derived from it, here or in `isa.py`."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from celosia.plain import Sentence, brief, from_json, from_toml


class ConfigError(Sentence, ValueError):
    """A Config that cannot be built; the message names the field, its value and what is possible."""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the end of "there is no ...": a suggestion, perhaps.

    >>> did_you_mean("PYNK", ["tiny", "pynq"]), did_you_mean("nexys", ["pynq"])
    (" (did you mean 'pynq'?)", '')
    """
    suggestion = difflib.get_close_matches(name.lower(), list(names), 1)
    return f" (did you mean {suggestion[0]!r}?)" if suggestion else ""


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):  # noqa: UP036 - the runner on a board keeps to 3.10
        return from_toml(text)
    raise ConfigError("reading TOML needs Python 3.11; give a .json file")


class _Limits(NamedTuple):
    """Limits of a number, and its documentation."""

    low: int
    high: int
    powers: bool = True
    """Powers of two only."""


@dataclass(frozen=True)
class FieldSpec:
    """Declaration of a field of a Config.

    what: its meaning. cost: what it takes of an FPGA, and what it brings. limits: of a number; None: true or false.
    later: Programs and records are older than the field, so that its default does not count in a digest.
    """

    what: str
    cost: str
    limits: _Limits | None = None
    later: bool = False


def _number(
    default: int, low: int, high: int, description: str, cost: str, *, powers: bool = True, later: bool = False
) -> Any:
    return dataclasses.field(
        default=default, metadata={"spec": FieldSpec(description, cost, _Limits(low, high, powers), later)}
    )


def _switch(default: bool, description: str, cost: str, *, later: bool = False) -> Any:
    return dataclasses.field(default=default, metadata={"spec": FieldSpec(description, cost, None, later)})


@cache
def field_specs() -> dict[str, FieldSpec]:
    """The declaration of each field but the name, in the order of the fields."""
    return {field.name: field.metadata["spec"] for field in dataclasses.fields(Config) if field.metadata}


_MOST_PIECES = 8
"""Largest ratio between block_in and block_out."""


def limits(field: str) -> str:
    """Values that a field may hold, in words.

    >>> limits("bus_bytes"), limits("taps"), limits("packed")
    ('4 to 128, a power of two', '0 to 16', 'true or false')
    """
    numbers = field_specs()[field].limits
    if numbers is None:
        return "true or false"
    low, high, powers = numbers
    return f"{low:,} to {high:,}" + (", a power of two" if powers else "")


def field_values(field: str) -> Sequence[int]:
    """List all values that a field of numbers or of true and false may hold, in ascending order.

    >>> list(field_values("bus_bytes")), list(field_values("packed"))
    ([4, 8, 16, 32, 64, 128], [False, True])
    """
    numbers = field_specs()[field].limits
    if numbers is None:
        return (False, True)
    low, high, powers = numbers
    return [1 << n for n in range(low.bit_length() - 1, high.bit_length())] if powers else range(low, high + 1)


def check_field(field: str, value: object) -> None:
    """Raise ConfigError where no Config can have this value of a field."""
    if field == "name":
        if not isinstance(value, str):
            raise ConfigError(f"name must be a text, not {str(value)[:60]!r}")
    elif (numbers := field_specs()[field].limits) is None:
        if not isinstance(value, bool):
            raise ConfigError(f"{field} must be true or false, not {brief(value)}")
    elif not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{field} must be a whole number, not {brief(value)}")
    else:
        low, high, powers = numbers
        if powers and not _is_power_of_two(value):
            raise ConfigError(f"{field} must be a power of two, not {brief(value)}")
        if not low <= value <= high:
            raise ConfigError(f"{field} must be between {low} and {high}, not {brief(value)}")


def _check_together(cfg: Config) -> None:
    """Raise ConfigError where possible fields exclude each other."""
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
    largest = cfg.block_out // (2 if cfg.taps > 1 else 4)
    if cfg.softmax and (cfg.batch > 1 or cfg.softmax > largest or not _is_power_of_two(cfg.softmax)):
        # Three readers of vin take turns, in block_out / softmax cycles; with taps each reads two entries at once.
        raise ConfigError(
            f"softmax needs batch = 1, not {cfg.batch}, and 0 or a power of two up to block_out / 4, with taps = 2 and "
            f"more block_out / 2, {largest}, not {cfg.softmax}"
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
    """Parameters of one accelerator, as docs/configs.md prints them.

    >>> Config(block_in=8, block_out=8, bus_bytes=16).macs_per_cycle
    64
    >>> Config.load("pynq").inp_depth
    4096

    A gemm step multiplies [batch, block_in] by [block_out, block_in] transposed. Each field declares its meaning, its
    cost and its limits.
    """

    batch: int = _number(
        1,
        1,
        16,
        "images in a step of gemm",
        "as many arrays, vector lanes and bytes of inp, acc, vin and out: it pays with as many images at once",
    )
    block_in: int = _number(
        16,
        2,
        128,
        "input channels in a step of gemm",
        "multipliers; entries of inp and wgt grow with it; layers of fewer channels leave rows of the array idle",
    )
    block_out: int = _number(
        16,
        2,
        128,
        "output channels in a step of gemm",
        "multipliers and vector lanes; entries of wgt, acc, vin, out and par grow with it",
    )
    bus_bytes: int = _number(
        8,
        4,
        128,
        "width of the AXI4 data bus",
        "aligners and queues of load, store and fetch; no board's port moves more than its memory: 8 on a "
        "Zynq-7000, 16 on an UltraScale+",
    )
    inp_depth: int = _number(
        4096,
        16,
        1 << 20,
        "entries of inp: activations for gemm",
        "block RAM; too few, and activations are loaded again",
    )
    wgt_depth: int = _number(
        1024,
        8,
        1 << 20,
        "entries of wgt: weights",
        "block RAM, the widest entries; too few, and weights are loaded again",
    )
    acc_depth: int = _number(
        2048,
        16,
        1 << 20,
        "entries of acc: int32 sums, in two banks",
        "block RAM; bounds the tile of outputs",
    )
    vin_depth: int = _number(
        2048,
        16,
        1 << 20,
        "entries of vin: the vector unit's operands",
        "block RAM; bounds residuals and depthwise tiles",
    )
    out_depth: int = _number(
        1024,
        16,
        1 << 20,
        "entries of out: results to be stored",
        "block RAM; bounds the tile of outputs",
    )
    par_depth: int = _number(
        64,
        4,
        1 << 12,
        "entries of par: bias, multiplier and shift of channels",
        "LUTs or block RAM, 64 bits a channel",
    )
    lut_count: int = _number(
        2,
        1,
        16,
        "tables of 256 bytes",
        "LUTs or block RAM in each lane",
    )
    queue_depth: int = _number(
        16,
        2,
        256,
        "instructions waiting in front of each unit",
        "LUTs: the bits of an instruction each",
    )
    token_bits: int = _number(
        8,
        2,
        16,
        "width of each semaphore between two units",
        "a few LUTs",
        powers=False,
    )
    packed: bool = _switch(
        True,
        "two products share a multiplication of 25 x 8 bits",
        "half of the array's DSP blocks on devices of Xilinx; false for others",
    )
    taps: int = _number(
        0,
        0,
        16,
        "entries of vin that the vector unit multiplies and adds in a cycle; 0: none",
        "multipliers in each lane, half of them in LUTs; depthwise convolutions run beside gemm, not in it",
        powers=False,
    )
    tap_depth: int = _number(
        512,
        4,
        1 << 12,
        "entries of the scratchpad of their weights",
        "block RAM, only with taps",
    )
    forward: bool = _switch(
        False,
        "the vector unit writes inp and vin, too",
        "285 LUTs of `pynq`; layers of a block keep their intermediates on chip",
    )
    residual_cycles: int = _number(
        1,
        1,
        4,
        "cycles that an entry with a residual takes",
        "saves hardware: 2 is 3,366 LUTs and 16 DSP blocks less of `pynq`, and half the rate of residual additions",
    )
    ports: int = _number(
        1,
        1,
        2,
        "read ports to memory; the second is for weights and parameters",
        "a lane of LOAD, and a port of the board; pays where activations and weights are wanted at once",
    )
    trace_depth: int = _number(
        0,
        0,
        1 << 16,
        "starts and ends of instructions that are kept of a run; 0: none",
        "block RAM, two blocks for 1,024 events; `celosia run --trace` writes the timeline of a board",
        powers=False,
        later=True,
    )
    alu: bool = _switch(
        True,
        "the vector unit has ADD, MAX, MIN and SHR, and reductions by MIN",
        "with `int32` 250 LUTs a lane (1,018 of `tiny`); for kernels written by hand: no compiled program uses them",
        later=True,
    )
    int32: bool = _switch(
        True,
        "the vector unit writes acc, too, and LOAD brings int32 there, not int8 alone",
        "with `alu`, as above; likewise",
        later=True,
    )
    pump: int = _number(
        1,
        1,
        2,
        "products that a DSP block makes in a cycle, in a clock of twice the rate",
        "2: half of the array's DSP blocks, for flip-flops, on devices of Xilinx; others take no notice",
        later=True,
    )
    softmax: int = _number(
        0,
        0,
        16,
        "elements of a softmax that the vector unit adds up, and divides, in a cycle, up to block_out / 4, with "
        "taps = 2 and more block_out / 2; 0: none",
        "each an adder of floats and a divider, 775 LUTs, and a block RAM: 4 are 4,196 LUTs of `pynq`; with half of"
        " block_out attention alone is bound by its products; without, softmax runs on the CPU",
        powers=False,
        later=True,
    )
    weight_bits: int = _number(
        8,
        1,
        8,
        "4, 2 or 1: LOAD expands weights of so many bits on their way to wgt, by one of 16 codebooks for each 32 of"
        " them; 8: it does not",
        "half a block RAM for each byte of the bus, and LUTs, 290 of `pynq` with 4; layers whose weights are such "
        "take 33/64, 17/64 or 9/64 of the bus and of DRAM",
        later=True,
    )
    sums: bool = _switch(
        False,
        "the vector unit has BYTE: int32 sums leave it as they are, a byte at a time",
        "10 LUTs a lane, 160 of `pynq`; MatMulNBits at accuracy_level 4 runs on the accelerator, its float epilogue"
        " on the CPU",
        later=True,
    )
    norm: int = _number(
        0,
        0,
        128,
        "lanes of a LayerNorm or RMSNorm that the vector unit squares and adds up in a cycle, up to block_out; 0: none",
        "squares, sums and a root beside the vector unit's lanes, and 67 LUTs in each of these: 8 are 3,945 LUTs of"
        " `pynq` and no DSP block; a row takes `block_out / norm` cycles an entry, 32 at least, before its results;"
        " without, norms run on the CPU",
        powers=False,
        later=True,
    )
    name: str = dataclasses.field(default="custom", compare=False)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_field(field.name, getattr(self, field.name))
        _check_together(self)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash of its numbers, equal in every process. Caches by Config ask for it at each look-up."""
        return hash(tuple(value for value in dataclasses.astuple(self) if isinstance(value, int)))

    # Layout of the entries of scratchpads (scratchpads.py) ------------------------------------------

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
        for name in (name for name, spec in field_specs().items() if spec.later):
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
        names = {field.name for field in dataclasses.fields(Config)}
        for key in fields:
            if key not in names:
                suggestion = did_you_mean(key, names)
                raise ConfigError(f"unknown Config field {key!r}{suggestion}; known are {', '.join(sorted(names))}")
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
