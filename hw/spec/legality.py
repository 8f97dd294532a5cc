"""Rules that make an instruction illegal, each a sentence for the user and a test of the instruction's fields.

The RTL's decoder raises ILLEGAL_INSTRUCTION if a test holds; simulators and the verifier refuse with the sentence.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from operator import or_
from typing import Any

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import (
    GEMM_LOOPS,
    REQUIRED_SWITCH,
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
    is_supported,
    opcode_of,
)
from celosia.hw.spec.packing import packing
from celosia.hw.spec.pipeline import MAX_NORM_ELEMENTS, MAX_NORM_OFFSET, MAX_NORM_ROWS, softmax_span
from celosia.hw.spec.scratchpads import scratchpads


def why_illegal(cfg: Config, word: int) -> str | None:
    """Return the sentence of the first rule that instruction `word` breaks, or None for a legal instruction."""
    opcode = opcode_of(word)
    if opcode is None:
        return f"opcode {word & 0b111} does not exist"
    values = formats(cfg)[opcode].decode(word)
    for rule, breaks_rule in rules(cfg)[opcode].items():
        if breaks_rule(values):
            return f"{opcode.name}: {rule}"
    return None


RuleTest = Callable[[Any], Any]
"""Test of an instruction's fields, a mapping from name to value: true if they break the rule.

A test uses only `[]`, comparisons, `&` and `|`. These mean the same for integers, numpy arrays and the signals of a
decoder, so that one expression serves simulators and RTL.
"""


def _has_token_with_own_unit(unit: Unit) -> RuleTest:
    """Return a test whether an instruction of `unit` takes tokens from its own unit, or gives tokens to it."""
    return lambda f: ((f["wait"] | f["post"]) & (1 << unit)) != 0


def _is_one_of(name: str, values: Sequence[int]) -> RuleTest:
    """Return a test whether field `name` has one of `values`."""
    return lambda f: reduce(or_, (f[name] == value for value in values))


def _has_zero(*names: str) -> RuleTest:
    """Return a test whether any of the fields `names` is 0."""
    return lambda f: reduce(or_, (f[name] == 0 for name in names))


_SIZES = ("x_size", "y_size", "z_size")
"""Fields of LOAD and STORE that must not be 0."""


@cache
def rules(cfg: Config) -> dict[Opcode, dict[str, RuleTest]]:
    """Return the rules of `cfg`: by opcode, the test of each rule by the sentence that tells what is wrong."""
    return {opcode: _RULES[opcode] | _config_rules(cfg).get(opcode, {}) for opcode in Opcode}


def _config_rules(cfg: Config) -> dict[Opcode, dict[str, RuleTest]]:
    """Return the rules that depend on which scratchpads and operations the hardware of `cfg` has."""
    buffer_numbers = 1 << next(field.width for field in formats(cfg)[Opcode.LOAD].fields if field.name == "buffer")
    missing_buffers = [buffer for buffer in range(buffer_numbers) if buffer not in buffers(cfg)]
    load: dict[str, RuleTest] = (
        {"the buffer does not exist": _is_one_of("buffer", missing_buffers)} if missing_buffers else {}
    )
    if not cfg.int32:
        load["int32 for ACC needs a Config with int32 = true"] = lambda f: (
            (f["buffer"] == Buffer.ACC) & (f["widen"] == 0)
        )
    if scratchpads(cfg)["wgt"].spread:
        load["only a LOAD of WGT can be spread"] = lambda f: (f["spread"] == 1) & (f["buffer"] != Buffer.WGT)
    if cfg.weight_bits < 8:
        load |= _expansion_rules(cfg)
    vector: dict[str, RuleTest] = {"the Config has no taps": lambda f: f["taps"] > int(cfg.taps > 0)}
    for kind, field in ((ReduceOp, "reduce_op"), (BinaryOp, "binary_op"), (Destination, "destination")):
        for required_field in dict.fromkeys(REQUIRED_SWITCH[kind].values()):
            unsupported = [
                value
                for value, required_by_value in REQUIRED_SWITCH[kind].items()
                if required_by_value == required_field and not is_supported(cfg, value)
            ]
            if unsupported:
                names = ", ".join(value.name for value in unsupported)
                vector[f"{field} {names} needs a Config with {required_field} = true"] = _is_one_of(field, unsupported)
    if cfg.softmax:
        vector |= _SOFTMAX
        vector["softmax leaves out imm values, fewer than an entry has"] = _if_set("softmax", _leaves_out_too_many(cfg))
        if softmax_span(cfg) > 1:
            vector["softmax reads pairs of neighbouring entries, a_n = 1"] = _if_set("softmax", lambda f: f["a_n"] != 1)
    if cfg.norm:
        vector |= _NORM
        vector["norm leaves out imm values, fewer than an entry has"] = _if_set("norm", _leaves_out_too_many(cfg))
        vector[f"rows of norm have at most {MAX_NORM_ELEMENTS:,} values"] = _if_set(
            "norm", lambda f: f["extent_n"] > MAX_NORM_ELEMENTS // cfg.block_out
        )
    if cfg.softmax and cfg.norm:
        vector["softmax excludes norm"] = _if_set("softmax", lambda f: f["norm"] == 1)
    return {Opcode.LOAD: load, Opcode.VECTOR: vector}


def _expansion_rules(cfg: Config) -> dict[str, RuleTest]:
    """Return the rules for a LOAD that expands packed weights."""
    load: dict[str, RuleTest] = {
        "only a LOAD of WGT can expand": lambda f: (f["expand"] == 1) & (f["buffer"] != Buffer.WGT),
    }
    if scratchpads(cfg)["wgt"].spread:
        load["a LOAD that is spread cannot expand"] = lambda f: (f["expand"] == 1) & (f["spread"] == 1)
    if (pieces := packing(cfg).pieces) > 1:
        load[f"x_size of a LOAD that expands must count whole packs of {pieces} elements"] = lambda f: (
            (f["expand"] == 1) & ((f["x_size"] & (pieces - 1)) != 0)
        )
    return load


def _if_set(field: str, *tests: RuleTest) -> RuleTest:
    """Return a test whether bit `field` is set and any of `tests` holds."""
    return lambda f: (f[field] == 1) & reduce(or_, (test(f) for test in tests))


def _leaves_out_too_many(cfg: Config) -> RuleTest:
    """Return a test whether imm, the number of unused values in a row's last entry, is negative or a whole entry."""
    return lambda f: (f["imm"] < 0) | (f["imm"] >= cfg.block_out)


def _has_other_operand(f: Any) -> Any:
    """Test whether VECTOR has an operand besides A from VIN, or an operation that combines it with one."""
    other = (f["a_source"] != ASource.VIN) | (f["b_source"] != BSource.IMM)
    return other | (f["binary_op"] != BinaryOp.NONE) | (f["taps"] == 1)


def _loops_beyond_n_and_x(f: Any) -> Any:
    """Test whether VECTOR iterates over anything but loops n (the entries of a row) and x (the rows)."""
    return (f["extent_y"] != 1) | (f["extent_r"] != 1) | (f["extent_s"] != 1)


_SOFTMAX: dict[str, RuleTest] = {
    "softmax reads VIN, without another operand": _if_set("softmax", _has_other_operand),
    "softmax writes OUT or INP, without requantise, lookup or rescale_add": _if_set(
        "softmax",
        lambda f: (f["destination"] == Destination.ACC) | (f["destination"] == Destination.VIN),
        lambda f: (f["requantise"] == 1) | (f["lookup"] == 1) | (f["rescale_add"] == 1),
    ),
    "softmax iterates over n and x only": _if_set("softmax", _loops_beyond_n_and_x),
}
"""Rules for VECTOR with softmax, in Configs that have it."""

_NORM: dict[str, RuleTest] = {
    "norm reads VIN, without another operand": _if_set("norm", _has_other_operand),
    f"norm iterates over n and x only, over at most {MAX_NORM_ROWS} rows x": _if_set(
        "norm", _loops_beyond_n_and_x, lambda f: f["extent_x"] > MAX_NORM_ROWS
    ),
    f"norm takes an a_offset from {-MAX_NORM_OFFSET} to {MAX_NORM_OFFSET}": _if_set(
        "norm", lambda f: (f["a_offset"] < -MAX_NORM_OFFSET) | (f["a_offset"] > MAX_NORM_OFFSET)
    ),
    "norm takes no negative scale_c": _if_set("norm", lambda f: f["scale_c"] < 0),
}
"""Rules for VECTOR with norm, in Configs that have it."""


_RULES: dict[Opcode, dict[str, RuleTest]] = {
    Opcode.LOAD: {
        "waits for or posts to itself": _has_token_with_own_unit(Unit.LOAD),
        "a size is 0": _has_zero(*_SIZES),
        "only ACC can widen": lambda f: (f["widen"] == 1) & (f["buffer"] != Buffer.ACC),
    },
    Opcode.GEMM: {
        "waits for or posts to itself": _has_token_with_own_unit(Unit.GEMM),
        "an extent is 0": _has_zero(*(f"extent_{loop}" for loop in GEMM_LOOPS)),
    },
    Opcode.VECTOR: {
        "waits for or posts to itself": _has_token_with_own_unit(Unit.VECTOR),
        "an extent is 0": _has_zero(*(f"extent_{loop}" for loop in VECTOR_LOOPS)),
        "the reduction does not exist": lambda f: f["reduce_op"] > max(ReduceOp),
        "the binary operation does not exist": lambda f: f["binary_op"] > max(BinaryOp),
        "taps read A from VIN": lambda f: (f["taps"] == 1) & (f["a_source"] != ASource.VIN),
        "A and B are both VIN": lambda f: (f["a_source"] == ASource.VIN) & (f["b_source"] == BSource.VIN),
        "rescale_add needs B from VIN and no binary operation": lambda f: (
            (f["rescale_add"] == 1) & ((f["b_source"] != BSource.VIN) | (f["binary_op"] != BinaryOp.NONE))
        ),
    },
    Opcode.STORE: {
        "waits for or posts to itself": _has_token_with_own_unit(Unit.STORE),
        "a size is 0": _has_zero(*_SIZES),
    },
}
"""Rules that hold for every Config."""
