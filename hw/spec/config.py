"""Config: the parameters of the accelerator that a user chooses, their limits, and the presets.

Every other size of the hardware is derived from a Config, here or in the other files of this folder.
"""

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

from celosia.plain import Sentence, abbreviate, from_json, from_toml


class ConfigError(Sentence, ValueError):
    """A Config that cannot be built; the message names the field, its value and what is possible."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'X'?)" for the entry of `known` most similar to `name`, or "" if none is similar.

    Error messages append the text to "there is no ...".

    >>> did_you_mean("PYNK", ["tiny", "pynq"]), did_you_mean("nexys", ["pynq"])
    (" (did you mean 'pynq'?)", '')
    """
    matches = difflib.get_close_matches(name.lower(), list(known), 1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def _is_power_of_two(value: int) -> bool:
    """Return whether a single bit of `value` is set."""
    return value > 0 and value & (value - 1) == 0


def _parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text; ConfigError on a Python that has no TOML parser."""
    if sys.version_info >= (3, 11):  # noqa: UP036 - the runner on a board keeps to 3.10
        return from_toml(text)
    raise ConfigError("reading TOML needs Python 3.11; give a .json file")


class _Limits(NamedTuple):
    """Values that an integer field may hold.

    low, high : the smallest and the largest value.
    is_power_of_two : only powers of two are allowed.
    """

    low: int
    high: int
    is_power_of_two: bool = True


@dataclass(frozen=True)
class FieldSpec:
    """Declaration of one Config field, kept as metadata of the dataclass field.

    meaning : one phrase for docs/configs.md and `celosia configs`.
    cost : the FPGA resources that the field takes, and the benefit.
    limits : allowed values of an integer field; None for a field that is true or false.
    is_later_addition : the field was added after the first Programs were saved. Its default value is left out of
        `Config.digest`, so that the digests in those Programs remain valid.
    """

    meaning: str
    cost: str
    limits: _Limits | None = None
    is_later_addition: bool = False


def _integer_field(
    default: int, low: int, high: int, meaning: str, cost: str, *, powers: bool = True, later: bool = False
) -> Any:
    """Declare an integer field of Config. powers: only powers of two. later: see `FieldSpec.is_later_addition`."""
    return dataclasses.field(
        default=default, metadata={"spec": FieldSpec(meaning, cost, _Limits(low, high, powers), later)}
    )


def _bool_field(default: bool, meaning: str, cost: str, *, later: bool = False) -> Any:
    """Declare a field of Config that is true or false. later: see `FieldSpec.is_later_addition`."""
    return dataclasses.field(default=default, metadata={"spec": FieldSpec(meaning, cost, None, later)})


@cache
def field_specs() -> dict[str, FieldSpec]:
    """Return the declaration of each Config field except `name`, by field name, in declaration order."""
    return {field.name: field.metadata["spec"] for field in dataclasses.fields(Config) if field.metadata}


_MAX_PIECES_PER_ENTRY = 8
"""Largest ratio of block_in to block_out, or of block_out to block_in."""


def describe_limits(field: str) -> str:
    """Describe the values that Config field `field` may hold, in words.

    >>> describe_limits("bus_bytes"), describe_limits("taps"), describe_limits("packed")
    ('4 to 128, a power of two', '0 to 16', 'true or false')
    """
    limits = field_specs()[field].limits
    if limits is None:
        return "true or false"
    low, high, powers = limits
    return f"{low:,} to {high:,}" + (", a power of two" if powers else "")


def field_values(field: str) -> Sequence[int]:
    """Return every value that Config field `field` may hold, in ascending order. `field` is any field but `name`.

    >>> list(field_values("bus_bytes")), list(field_values("packed"))
    ([4, 8, 16, 32, 64, 128], [False, True])
    """
    limits = field_specs()[field].limits
    if limits is None:
        return (False, True)
    low, high, powers = limits
    return [1 << n for n in range(low.bit_length() - 1, high.bit_length())] if powers else range(low, high + 1)


def check_field(field: str, value: object) -> None:
    """Raise ConfigError if `value` has the wrong type or lies outside the limits of Config field `field`."""
    if field == "name":
        if not isinstance(value, str):
            raise ConfigError(f"name must be a text, not {str(value)[:60]!r}")
    elif (limits := field_specs()[field].limits) is None:
        if not isinstance(value, bool):
            raise ConfigError(f"{field} must be true or false, not {abbreviate(value)}")
    elif not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{field} must be a whole number, not {abbreviate(value)}")
    else:
        low, high, powers = limits
        if powers and not _is_power_of_two(value):
            raise ConfigError(f"{field} must be a power of two, not {abbreviate(value)}")
        if not low <= value <= high:
            raise ConfigError(f"{field} must be between {low} and {high}, not {abbreviate(value)}")


def _check_combinations(cfg: Config) -> None:
    """Raise ConfigError if two fields exclude each other although each value alone is allowed."""
    if max(cfg.block_in, cfg.block_out) // cfg.group > _MAX_PIECES_PER_ENTRY:
        raise ConfigError(
            f"block_in and block_out may differ at most by a factor of {_MAX_PIECES_PER_ENTRY}, not "
            f"{cfg.block_in} and {cfg.block_out}"
        )
    if cfg.forward and cfg.block_in < cfg.block_out:
        raise ConfigError(
            f"forward needs entries of inp no smaller than those of out: block_in {cfg.block_in} is less than "
            f"block_out {cfg.block_out}"
        )
    if cfg.residual_cycles > cfg.lanes:
        raise ConfigError(f"residual_cycles must be at most the {cfg.lanes} lanes, not {cfg.residual_cycles}")
    max_softmax = cfg.block_out // (2 if cfg.taps > 1 else 4)
    if cfg.softmax and (cfg.batch > 1 or cfg.softmax > max_softmax or not _is_power_of_two(cfg.softmax)):
        # Three readers of vin share its port in turns of block_out / softmax cycles. With taps = 2 and more, vin has
        # banks, and each reader reads two entries at once.
        raise ConfigError(
            f"softmax needs batch = 1, not {cfg.batch}, and 0 or a power of two up to block_out / 4, with taps = 2 and "
            f"more block_out / 2, {max_softmax}, not {cfg.softmax}"
        )
    if cfg.norm and (cfg.batch > 1 or cfg.norm > cfg.block_out or not _is_power_of_two(cfg.norm)):
        raise ConfigError(
            f"norm needs batch = 1, not {cfg.batch}, and 0 or a power of two up to block_out, {cfg.block_out}, not "
            f"{cfg.norm}"
        )
    if cfg.group * cfg.weight_bits < 4:
        raise ConfigError(
            f"weight_bits = {cfg.weight_bits} needs block_in and block_out of {4 // cfg.weight_bits} at least, not "
            f"{cfg.block_in} and {cfg.block_out}"
        )
    beats = 8 // cfg.weight_bits
    piece_bytes = cfg.group * cfg.block_out
    if beats > 1 and piece_bytes < beats * cfg.bus_bytes:
        raise ConfigError(
            f"weight_bits = {cfg.weight_bits} needs pieces of wgt of {beats} beats, {beats} * bus_bytes = "
            f"{beats * cfg.bus_bytes}, not of min(block_in, block_out) * block_out = {piece_bytes} bytes"
        )


@dataclass(frozen=True)
class Config:
    """Parameters of one accelerator; docs/configs.md lists them with defaults, limits and costs.

    In each cycle, the gemm unit multiplies int8 inputs [batch, block_in] by int8 weights [block_out, block_in],
    transposed. It adds the products to int32 sums [batch, block_out]. That is a step of gemm.

    A Config is immutable and hashable. Its fields are the keyword arguments of the constructor.

    Raises:
        ConfigError: A value, or a combination of values, cannot be built.

    Examples:
        >>> Config(block_in=8, block_out=8, bus_bytes=16).macs_per_cycle
        64
        >>> Config.load("pynq").inp_depth
        4096
    """

    batch: int = _integer_field(
        1,
        1,
        16,
        "images that GEMM multiplies in a cycle",
        "arrays, vector lanes and bytes of inp, acc, vin and out grow with it; it pays if that many images run at"
        " the same time",
    )
    block_in: int = _integer_field(
        16,
        2,
        128,
        "input channels that GEMM multiplies in a cycle",
        "multipliers and entries of inp and wgt grow with it; layers with fewer channels leave rows of the array idle",
    )
    block_out: int = _integer_field(
        16,
        2,
        128,
        "output channels that GEMM multiplies in a cycle",
        "multipliers, vector lanes, and entries of wgt, acc, vin, out and par grow with it",
    )
    bus_bytes: int = _integer_field(
        8,
        4,
        128,
        "width of the AXI4 data bus",
        "aligners and queues of load, store and fetch grow with it; a board's memory port has 8 bytes on a "
        "Zynq-7000 and 16 on an UltraScale+; a wider bus is for simulation",
    )
    inp_depth: int = _integer_field(
        4096,
        16,
        1 << 20,
        "entries of inp: activations for gemm",
        "costs block RAM; with too few entries, activations are loaded more than once",
    )
    wgt_depth: int = _integer_field(
        1024,
        8,
        1 << 20,
        "entries of wgt: weights",
        "costs block RAM, more for each entry than other scratchpads; with too few entries, weights are loaded "
        "more than once",
    )
    acc_depth: int = _integer_field(
        2048,
        16,
        1 << 20,
        "entries of acc: int32 sums, in two banks",
        "costs block RAM; limits the size of the tile of outputs",
    )
    vin_depth: int = _integer_field(
        2048,
        16,
        1 << 20,
        "entries of vin: the vector unit's operands",
        "costs block RAM; limits the size of residuals and depthwise tiles",
    )
    out_depth: int = _integer_field(
        1024,
        16,
        1 << 20,
        "entries of out: results to be stored",
        "costs block RAM; limits the size of the tile of outputs",
    )
    par_depth: int = _integer_field(
        64,
        4,
        1 << 12,
        "entries of par: bias, multiplier and shift of channels",
        "costs LUTs or block RAM, 64 bits for each channel of an entry",
    )
    lut_count: int = _integer_field(
        2,
        1,
        16,
        "tables of 256 bytes",
        "costs LUTs or block RAM in each lane of the vector unit",
    )
    queue_depth: int = _integer_field(
        16,
        2,
        256,
        "instructions waiting in front of each unit",
        "costs LUTs, in which each place holds a whole instruction",
    )
    token_bits: int = _integer_field(
        8,
        2,
        16,
        "width of each semaphore between two units",
        "costs a few LUTs",
        powers=False,
    )
    packed: bool = _bool_field(
        True,
        "GEMM computes two products by one multiplication of 25 x 8 bits",
        "halves the DSP blocks of the array on Xilinx devices; use false for others",
    )
    taps: int = _integer_field(
        0,
        0,
        16,
        "entries of vin that the vector unit multiplies by weights and adds in a cycle; 0: none",
        "costs multipliers in each lane, half of them in LUTs; with taps, depthwise convolutions run in the "
        "vector unit, not in GEMM",
        powers=False,
    )
    tap_depth: int = _integer_field(
        512,
        4,
        1 << 12,
        "entries of tap: weights for taps",
        "costs block RAM if `taps` is not 0",
    )
    forward: bool = _bool_field(
        False,
        "the vector unit also writes inp and vin",
        "costs 285 LUTs on `pynq`; intermediate results of a block of layers stay on chip",
    )
    residual_cycles: int = _integer_field(
        1,
        1,
        4,
        "cycles that an entry with a residual takes",
        "2 saves 3,366 LUTs and 16 DSP blocks on `pynq`, and halves the rate of residual additions",
    )
    ports: int = _integer_field(
        1,
        1,
        2,
        "read ports to memory; the second is for weights and parameters",
        "2 costs a second channel of LOAD and a memory port of the board; it pays if activations and weights are "
        "loaded at once",
    )
    trace_depth: int = _integer_field(
        0,
        0,
        1 << 16,
        "starts and ends of instructions that the event trace of a run keeps; 0: no trace",
        "costs two block RAMs for 1,024 events; `celosia run --trace` writes the timeline of a board",
        powers=False,
        later=True,
    )
    alu: bool = _bool_field(
        True,
        "the vector unit has ADD, MAX, MIN and SHR, and reductions by MIN",
        "`alu` and `int32` together cost 250 LUTs a lane, 1,018 on `tiny`; for kernels written by hand: no "
        "compiled Program uses them",
        later=True,
    )
    int32: bool = _bool_field(
        True,
        "the vector unit also writes acc, and LOAD can bring int32 to acc, not only int8",
        "costs LUTs, see `alu`; for kernels written by hand: no compiled Program uses it",
        later=True,
    )
    pump: int = _integer_field(
        1,
        1,
        2,
        "products that a DSP block of the array makes in a cycle; 2: the array's clock has twice the rate",
        "2 halves the DSP blocks of the array and adds flip-flops on Xilinx devices; no effect on others",
        later=True,
    )
    softmax: int = _integer_field(
        0,
        0,
        16,
        "elements of a softmax that the vector unit adds up, and divides, in a cycle; up to block_out / 4, with "
        "taps = 2 and more up to block_out / 2; 0: none",
        "each element costs a float adder and a divider, 775 LUTs, and a block RAM; 4 cost 4,196 LUTs on `pynq`; "
        "with block_out / 2, GEMM and not the softmax engine limits the speed of attention; with 0, softmax runs "
        "on the CPU",
        powers=False,
        later=True,
    )
    weight_bits: int = _integer_field(
        8,
        1,
        8,
        "4, 2 or 1: LOAD expands weights of so many bits to int8 on their way to wgt, each 32 weights by one of 16 "
        "codebooks; 8: no expansion",
        "costs half a block RAM for each byte of the bus, and LUTs: 290 on `pynq` with 4; weights of 4, 2 or 1 "
        "bits take 33/64, 17/64 or 9/64 of the DRAM and of the bus traffic of int8",
        later=True,
    )
    sums: bool = _bool_field(
        False,
        "the vector unit has BYTE, which stores int32 sums unscaled, a byte at a time",
        "costs 10 LUTs a lane, 160 on `pynq`; with it, MatMulNBits at accuracy_level 4 runs on the accelerator, "
        "and the CPU multiplies its sums by the scales in floats",
        later=True,
    )
    norm: int = _integer_field(
        0,
        0,
        128,
        "elements of a LayerNorm or RMSNorm that the vector unit squares and adds up in a cycle, up to block_out; 0: "
        "none",
        "costs squarers, adders, a square root, and 67 LUTs in each lane of the vector unit; 8 cost 3,945 LUTs "
        "and no DSP block on `pynq`; the sums of a row take `block_out / norm` cycles an entry, and at least 32 "
        "cycles; with 0, norms run on the CPU",
        powers=False,
        later=True,
    )
    name: str = dataclasses.field(default="custom", compare=False)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_field(field.name, getattr(self, field.name))
        _check_combinations(self)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash of all fields but the name, equal in every process.

        Cached, because every lookup in a cache that is keyed by Config asks for the hash.
        """
        return hash(tuple(value for value in dataclasses.astuple(self) if isinstance(value, int)))

    # Sizes of the entries of scratchpads (scratchpads.py) ---------------------------------------------------

    @cached_property
    def group(self) -> int:
        """Channels that are contiguous in DRAM: the layout of activations is [N/batch][C/group][H][W][batch][group]."""
        return min(self.block_in, self.block_out)

    @cached_property
    def piece_bytes(self) -> int:
        """Bytes of one piece, int8[batch][group]: the smallest block that LOAD and STORE move."""
        return self.batch * self.group

    @cached_property
    def inp_pieces(self) -> int:
        """Pieces in one entry of inp, int8[block_in/group][batch][group]."""
        return self.block_in // self.group

    @cached_property
    def out_pieces(self) -> int:
        """Pieces in one entry of acc, vin or out, [block_out/group][batch][group]."""
        return self.block_out // self.group

    @cached_property
    def lanes(self) -> int:
        """Lanes of the vector unit, batch * block_out: one for each int32 of an entry of acc."""
        return self.batch * self.block_out

    @property
    def macs_per_cycle(self) -> int:
        """Multiply-accumulate operations on int8 that the gemm unit does in a cycle."""
        return self.batch * self.block_in * self.block_out

    # Identity ---------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return all fields with the name, in the form that `from_dict` takes."""
        return dataclasses.asdict(self)

    @cached_property
    def digest(self) -> str:
        """Fingerprint of all fields but the name, 32 hexadecimal digits; Programs and bitstreams carry it."""
        fields = {key: value for key, value in self.to_dict().items() if key != "name"}
        for name in (name for name, spec in field_specs().items() if spec.is_later_addition):
            if fields[name] == getattr(Config, name):
                del fields[name]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def identity(self) -> int:
        """The first 32 bits of `digest`, which the register `identity` of the hardware holds."""
        return int(self.digest[:8], 16)

    def to_toml(self) -> str:
        """Return the text of a TOML file that `load` reads, with all fields but the name."""
        fields = {name: str(value).lower() for name, value in self.to_dict().items() if name != "name"}
        return "".join(f"{name} = {value}\n" for name, value in fields.items())

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> Config:
        """Build a Config from field values; missing fields take their defaults. ConfigError for an unknown field."""
        if not isinstance(fields, dict):
            raise ConfigError(f"a Config is a table of fields, not {str(fields)[:60]!r}")
        known = {field.name for field in dataclasses.fields(Config)}
        for key in fields:
            if key not in known:
                hint = did_you_mean(key, known)
                raise ConfigError(f"unknown Config field {key!r}{hint}; known are {', '.join(sorted(known))}")
        return Config(**fields)

    @staticmethod
    def load(source: str | Path | Config) -> Config:
        """Return the Config that `source` names.

        Args:
            source: Name of a preset, path of a .toml or .json file, or a Config. A file that sets no name gives the
                Config the file's name.

        Returns:
            The Config; `source` itself if it is one.

        Raises:
            ConfigError: There is no such preset or file, or the file is invalid.
        """
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
            fields = _parse_toml(content) if path.suffix == ".toml" else from_json(content)
        except OSError as error:
            raise ConfigError(f"cannot read Config file {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"Config file {path} is not valid {path.suffix[1:].upper()}: {error}") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"Config file {path} must hold a table of fields, not {type(fields).__name__}")
        fields.setdefault("name", path.stem)
        return Config.from_dict(fields)


_LEAN: dict[str, Any] = {"alu": False, "int32": False}
"""Fields of every preset: leave out the operations that no compiled model uses."""
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
