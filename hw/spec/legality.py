"""Rules of illegal instructions, declared once: the RTL's decoder raises its error on these rules, simulators and
verifier refuse with their sentences. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from operator import or_
from typing import Any

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import (
    GEMM_LOOPS,
    NEEDS,
    VECTOR_LOOPS,
    ASource,
    BinaryOp,
    BSource,
    Buffer,
    Destination,
    Opcode,
    ReduceOp,
    Unit,
    buffers,
    formats,
    has,
    opcode_of,
)
from celosia.hw.spec.packing import packing
from celosia.hw.spec.pipeline import NORM_LANES, NORM_OFFSET, NORM_ROWS, softmax_span
from celosia.hw.spec.scratchpads import scratchpads


def why_illegal(cfg: Config, word: int) -> str | None:
    """The rule that `word` breaks, or None for a legal instruction. The RTL raises its error on the same rules."""
    opcode = opcode_of(word)
    if opcode is None:
        return f"opcode {word & 0b111} does not exist"
    values = formats(cfg)[opcode].decode(word)
    for rule, broken in rules(cfg)[opcode].items():
        if broken(values):
            return f"{opcode.name}: {rule}"
    return None


Broken = Callable[[Any], Any]
"""Takes fields by name, gives whether they break a rule. Uses only `[]`, comparisons, `&` and `|`, which mean the same
for integers as for the signals of a decoder, so that one expression serves simulators and RTL."""


def _own_bit(unit: Unit) -> Broken:
    return lambda f: ((f["wait"] | f["post"]) & (1 << unit)) != 0


def _one_of(name: str, values: Sequence[int]) -> Broken:
    return lambda f: reduce(or_, (f[name] == value for value in values))


def _zero(*names: str) -> Broken:
    return lambda f: reduce(or_, (f[name] == 0 for name in names))


_SIZES = ("x_size", "y_size", "z_size")


@cache
def rules(cfg: Config) -> dict[Opcode, dict[str, Broken]]:
    """Rules that make an instruction illegal: by opcode, the sentence for the user and the test."""
    return {opcode: _RULES[opcode] | _limits(cfg).get(opcode, {}) for opcode in Opcode}


def _limits(cfg: Config) -> dict[Opcode, dict[str, Broken]]:
    """Rules about what not every Config has."""
    numbers = 1 << next(field.width for field in formats(cfg)[Opcode.LOAD].fields if field.name == "buffer")
    has_not = [buffer for buffer in range(numbers) if buffer not in buffers(cfg)]
    load: dict[str, Broken] = {"the buffer does not exist": _one_of("buffer", has_not)} if has_not else {}
    if not cfg.int32:
        load["int32 for ACC needs a Config with int32 = true"] = lambda f: (
            (f["buffer"] == Buffer.ACC) & (f["widen"] == 0)
        )
    if scratchpads(cfg)["wgt"].spread:
        load["only WGT is spread"] = lambda f: (f["spread"] == 1) & (f["buffer"] != Buffer.WGT)
    if cfg.weight_bits < 8:
        load |= _expansion(cfg)
    vector: dict[str, Broken] = {"the Config has no taps": lambda f: f["taps"] > int(cfg.taps > 0)}
    for kind, field in ((ReduceOp, "reduce_op"), (BinaryOp, "binary_op"), (Destination, "destination")):
        for need in dict.fromkeys(NEEDS[kind].values()):
            lacking = [value for value, needed in NEEDS[kind].items() if needed == need and not has(cfg, value)]
            if lacking:
                names = ", ".join(value.name for value in lacking)
                vector[f"{field} {names} needs a Config with {need} = true"] = _one_of(field, lacking)
    if cfg.softmax:
        vector |= _SOFTMAX
        vector["softmax leaves out imm lanes, less than there are"] = _with("softmax", _left_out(cfg))
        if softmax_span(cfg) > 1:
            vector["softmax reads pairs of entries side by side, a_n = 1"] = _with("softmax", lambda f: f["a_n"] != 1)
    if cfg.norm:
        vector |= _NORM
        vector["norm leaves out imm lanes, less than there are"] = _with("norm", _left_out(cfg))
        vector[f"rows of norm have at most {NORM_LANES:,} lanes"] = _with(
            "norm", lambda f: f["extent_n"] > NORM_LANES // cfg.block_out
        )
    if cfg.softmax and cfg.norm:
        vector["softmax is no norm"] = _with("softmax", lambda f: f["norm"] == 1)
    return {Opcode.LOAD: load, Opcode.VECTOR: vector}


def _expansion(cfg: Config) -> dict[str, Broken]:
    rules: dict[str, Broken] = {
        "only WGT is expanded": lambda f: (f["expand"] == 1) & (f["buffer"] != Buffer.WGT),
    }
    if scratchpads(cfg)["wgt"].spread:
        rules["what is spread is not expanded"] = lambda f: (f["expand"] == 1) & (f["spread"] == 1)
    if (entries := packing(cfg).entries) > 1:
        rules[f"packs of {entries} elements are expanded whole"] = lambda f: (
            (f["expand"] == 1) & ((f["x_size"] & (entries - 1)) != 0)
        )
    return rules


def _with(field: str, *checks: Broken) -> Broken:
    return lambda f: (f[field] == 1) & reduce(or_, (other(f) for other in checks))


def _left_out(cfg: Config) -> Broken:
    return lambda f: (f["imm"] < 0) | (f["imm"] >= cfg.block_out)


def _of_vin_alone(f: Any) -> Any:
    other = (f["a_source"] != ASource.VIN) | (f["b_source"] != BSource.IMM)
    return other | (f["binary_op"] != BinaryOp.NONE) | (f["taps"] == 1)


def _not_along_x(f: Any) -> Any:
    return (f["extent_y"] != 1) | (f["extent_r"] != 1) | (f["extent_s"] != 1)


_SOFTMAX: dict[str, Broken] = {
    "softmax is of VIN alone": _with("softmax", _of_vin_alone),
    "softmax goes to OUT or INP as it is": _with(
        "softmax",
        lambda f: (f["destination"] == Destination.ACC) | (f["destination"] == Destination.VIN),
        lambda f: (f["requantise"] == 1) | (f["lookup"] == 1) | (f["rescale_add"] == 1),
    ),
    "softmax has rows along x": _with("softmax", _not_along_x),
}

_NORM: dict[str, Broken] = {
    "norm is of VIN alone": _with("norm", _of_vin_alone),
    f"norm has rows along x, at most {NORM_ROWS}": _with("norm", _not_along_x, lambda f: f["extent_x"] > NORM_ROWS),
    f"norm adds an a_offset of {-NORM_OFFSET} to {NORM_OFFSET}": _with(
        "norm", lambda f: (f["a_offset"] < -NORM_OFFSET) | (f["a_offset"] > NORM_OFFSET)
    ),
    "norm adds no negative scale_c": _with("norm", lambda f: f["scale_c"] < 0),
}


_RULES: dict[Opcode, dict[str, Broken]] = {
    Opcode.LOAD: {
        "waits for or posts to itself": _own_bit(Unit.LOAD),
        "a size is 0": _zero(*_SIZES),
        "only ACC can widen": lambda f: (f["widen"] == 1) & (f["buffer"] != Buffer.ACC),
    },
    Opcode.GEMM: {
        "waits for or posts to itself": _own_bit(Unit.GEMM),
        "an extent is 0": _zero(*(f"extent_{loop}" for loop in GEMM_LOOPS)),
    },
    Opcode.VECTOR: {
        "waits for or posts to itself": _own_bit(Unit.VECTOR),
        "an extent is 0": _zero(*(f"extent_{loop}" for loop in VECTOR_LOOPS)),
        "the reduction does not exist": lambda f: f["reduce_op"] > max(ReduceOp),
        "the binary operation does not exist": lambda f: f["binary_op"] > max(BinaryOp),
        "taps are of VIN": lambda f: (f["taps"] == 1) & (f["a_source"] != ASource.VIN),
        "A and B are both VIN": lambda f: (f["a_source"] == ASource.VIN) & (f["b_source"] == BSource.VIN),
        "rescale_add needs B from VIN and no binary operation": lambda f: (
            (f["rescale_add"] == 1) & ((f["b_source"] != BSource.VIN) | (f["binary_op"] != BinaryOp.NONE))
        ),
    },
    Opcode.STORE: {
        "waits for or posts to itself": _own_bit(Unit.STORE),
        "a size is 0": _zero(*_SIZES),
    },
}
