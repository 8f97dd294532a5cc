"""The instruction set has one source, and everything that is derived from it agrees."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from enum import IntEnum
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import tries

from celosia.hw.spec.config import PRESETS, Config
from celosia.hw.spec.isa import (
    REQUIRED_SWITCH,
    BinaryOp,
    Buffer,
    Destination,
    Field,
    Format,
    Opcode,
    ReduceOp,
    encode,
    formats,
    instruction_bytes,
    opcode_of,
)
from celosia.hw.spec.isa_doc import REQUIREMENTS, isa_markdown
from celosia.hw.spec.legality import rules, why_illegal
from celosia.hw.spec.regs import COUNTERS, ERROR_TEXT, REGISTERS, Error

ROOT = Path(__file__).parents[2]
CONFIGS = {
    **PRESETS,
    "batch": Config(batch=2, block_in=8, block_out=4, bus_bytes=16, lut_count=1),
    "deep": Config(block_in=4, block_out=8, acc_depth=1 << 20, vin_depth=1 << 19, lut_count=16),
    "taps alone": Config(block_in=4, block_out=8, taps=5),
    "forward alone": Config(block_in=8, block_out=4, forward=True),
    "all": Config(taps=3, forward=True, sums=True),
    "without alu": Config(taps=3, forward=True, alu=False, sums=True),
    "without int32": Config(taps=3, forward=True, int32=False, sums=True),
}
CASES = [pytest.param(cfg, opcode, id=f"{name}-{opcode.name}") for name, cfg in CONFIGS.items() for opcode in Opcode]


def field_values(fmt: Format) -> st.SearchStrategy[dict[str, int]]:
    def of(field: Field) -> st.SearchStrategy[int]:
        half = 1 << field.width - 1
        return st.integers(-half, half - 1) if field.signed else st.integers(0, 2 * half - 1)

    return st.fixed_dictionaries({field.name: of(field) for field in fmt.fields if field.name != "opcode"})


@pytest.mark.parametrize("cfg, opcode", CASES)
@settings(max_examples=tries(12))  # of each of many forms
@given(data=st.data())
def test_decode_inverts_encode(cfg: Config, opcode: Opcode, data: st.DataObject) -> None:
    fmt = formats(cfg)[opcode]
    values = data.draw(field_values(fmt))
    word = encode(cfg, opcode, **values)
    assert fmt.decode(word) == {"opcode": opcode, **values}
    assert opcode_of(word) == opcode
    assert word < 1 << 8 * instruction_bytes(cfg)


@pytest.mark.parametrize("cfg, opcode", CASES)
@settings(max_examples=tries(12))
@given(data=st.data())
def test_amaranth_sees_the_same_bits(cfg: Config, opcode: Opcode, data: st.DataObject) -> None:
    layout = pytest.importorskip("celosia.hw.lib.layout")
    fmt = formats(cfg)[opcode]
    values = data.draw(field_values(fmt))
    constant = layout.layout(fmt).const({"opcode": int(opcode), **values})
    assert constant.as_value().value % (1 << fmt.width) == fmt.encode(**values)


@pytest.mark.parametrize("cfg, opcode", CASES)
def test_one_past_a_field_raises(cfg: Config, opcode: Opcode) -> None:
    fmt = formats(cfg)[opcode]
    for field in fmt.fields:
        low, high = (-(1 << field.width - 1), (1 << field.width - 1) - 1) if field.signed else (0, 2**field.width - 1)
        for value in (low - 1, high + 1):
            message = f"{opcode.name}.{field.name} must be between {low} and {high}, not {value}"
            with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
                fmt.encode(**{field.name: value})


def test_unknown_field_raises() -> None:
    with pytest.raises(ValueError, match=r"^GEMM has no field stride$"):
        encode(PRESETS["tiny"], Opcode.GEMM, stride=1)


def test_too_wide_a_format_raises() -> None:
    fields = (Field("opcode", 3, ""), Field("address", 30, ""))
    assert Format(Opcode.LOAD, "", fields, limit_bits=33).width == 33
    with pytest.raises(ValueError, match=r"^LOAD needs 33 bits, an instruction has 32$"):
        Format(Opcode.LOAD, "", fields, limit_bits=32)


def test_a_field_declared_twice_raises() -> None:
    with pytest.raises(ValueError, match=r"^STORE declares a field twice$"):
        Format(Opcode.STORE, "", (Field("x", 1, ""), Field("x", 2, "")))


def unnamed(field: str, kind: type[IntEnum]) -> list[dict[str, int]]:
    """Values of a field of VECTOR that no member of `kind` has."""
    (width,) = {each.width for each in formats(CONFIGS["all"])[Opcode.VECTOR].fields if each.name == field}
    return [{field: value} for value in range(1 << width) if value not in list(kind)]


def needing(kind: type[IntEnum], need: str) -> list[IntEnum]:
    """Members of `kind` that a Config has where its field `need` is true."""
    return [op for op, field in REQUIRED_SWITCH[kind].items() if field == need]


def lacking_word(field: str, kind: type[IntEnum], need: str) -> tuple[Opcode, str]:
    """The rule about members of `kind` in a Config without `need`."""
    names = ", ".join(op.name for op in needing(kind, need))
    return Opcode.VECTOR, f"{field} {names} needs a Config with {need} = true"


# For each rule, field values that break it and no other.
_GEMM = {f"extent_{loop}": 1 for loop in "nyxkrs"}
_VECTOR = {f"extent_{loop}": 1 for loop in "nyxrs"} | {"destination": Destination.OUT}
_SIZES = {"x_size": 1, "y_size": 1, "z_size": 1}
LEGAL: dict[Opcode, dict[str, int]] = {
    Opcode.LOAD: _SIZES,
    Opcode.GEMM: _GEMM,
    Opcode.VECTOR: _VECTOR,
    Opcode.STORE: _SIZES,
}
BREAKING: dict[tuple[Opcode, str], list[dict[str, int]]] = {
    (Opcode.LOAD, "waits for or posts to itself"): [{"wait": 1}, {"post": 15}],
    (Opcode.LOAD, "a size is 0"): [{"x_size": 0}, {"y_size": 0}, {"z_size": 0}],
    (Opcode.LOAD, "the buffer does not exist"): [{"buffer": 7}],
    (Opcode.LOAD, "only ACC can widen"): [{"widen": 1, "buffer": buffer} for buffer in (0, 1, 3, 4, 5)],
    (Opcode.GEMM, "waits for or posts to itself"): [{"wait": 2}, {"post": 6}],
    (Opcode.GEMM, "an extent is 0"): [{f"extent_{loop}": 0} for loop in "nyxkrs"],
    (Opcode.VECTOR, "waits for or posts to itself"): [{"wait": 4}, {"post": 7}],
    (Opcode.VECTOR, "an extent is 0"): [{f"extent_{loop}": 0} for loop in "nyxrs"],
    (Opcode.VECTOR, "the reduction does not exist"): unnamed("reduce_op", ReduceOp),
    (Opcode.VECTOR, "the binary operation does not exist"): unnamed("binary_op", BinaryOp),
    (Opcode.VECTOR, "taps read A from VIN"): [{"taps": 1}],
    (Opcode.VECTOR, "A and B are both VIN"): [{"a_source": 1, "b_source": 1}],
    (Opcode.VECTOR, "rescale_add needs B from VIN and no binary operation"): [
        {"rescale_add": 1},
        {"rescale_add": 1, "b_source": 1, "binary_op": 1},
    ],
    (Opcode.STORE, "waits for or posts to itself"): [{"wait": 8}, {"post": 9}],
    (Opcode.STORE, "a size is 0"): [{"x_size": 0}, {"y_size": 0}, {"z_size": 0}],
}


ALL = CONFIGS["all"]
"""A Config that has everything; words for what others lack are in `LACKING`."""
LACKING: dict[tuple[Opcode, str], dict[str, list[dict[str, int]]]] = {
    (Opcode.LOAD, "the buffer does not exist"): {"deep": [{"buffer": 6}], "forward alone": [{"buffer": 6}]},
    (Opcode.LOAD, "int32 for ACC needs a Config with int32 = true"): {
        name: [{"buffer": Buffer.ACC, "widen": 0}] for name in ("without int32", "pynq")
    },
    (Opcode.VECTOR, "destination ACC needs a Config with int32 = true"): {
        name: [{"destination": Destination.ACC}] for name in ("without int32", "pynq")
    },
    lacking_word("reduce_op", ReduceOp, "alu"): {
        name: [{"reduce_op": op} for op in needing(ReduceOp, "alu")] for name in ("without alu", "pynq")
    },
    lacking_word("binary_op", BinaryOp, "alu"): {
        name: [{"binary_op": op} for op in needing(BinaryOp, "alu")] for name in ("without alu", "pynq")
    },
    lacking_word("binary_op", BinaryOp, "sums"): {
        name: [{"binary_op": op} for op in needing(BinaryOp, "sums")]
        for name in ("deep", "taps alone", "forward alone", "pynq")
    },
    (Opcode.VECTOR, "destination INP, VIN needs a Config with forward = true"): {
        "deep": [{"destination": 2}, {"destination": 3}],
        "taps alone": [{"destination": 2}, {"destination": 3}],
    },
    (Opcode.VECTOR, "the Config has no taps"): {
        "deep": [{"taps": 1, "a_source": 1}],
        "forward alone": [{"taps": 1, "a_source": 1}],
    },
}
"""Of rules that depend on the Config, by Config."""


def breaks(cfg: Config, opcode: Opcode, rule: str, cases: list[dict[str, int]]) -> None:
    for case in cases:
        assert why_illegal(cfg, encode(cfg, opcode, **{**LEGAL[opcode], **case})) == f"{opcode.name}: {rule}"


@pytest.mark.parametrize("name", ["all", "deep", "without alu", "without int32", "pynq"])
def test_rules(name: str) -> None:
    cfg = CONFIGS[name]
    declared = {(opcode, rule) for opcode in Opcode for rule in rules(cfg)[opcode]}
    met = {rule for rule, lacking in LACKING.items() if "needs a Config" in rule[1] and name not in lacking}
    assert declared == {*BREAKING, *LACKING} - met
    for opcode, values in LEGAL.items():
        assert why_illegal(cfg, encode(cfg, opcode, **values)) is None
    for (opcode, rule), cases in BREAKING.items():
        breaks(cfg, opcode, rule, cases)
    for word in (0, 5, 7):
        assert why_illegal(cfg, word) == f"opcode {word} does not exist"


@pytest.mark.parametrize("opcode, rule", LACKING)
def test_rules_of_what_a_config_has(opcode: Opcode, rule: str) -> None:
    for name, cases in LACKING[opcode, rule].items():
        breaks(CONFIGS[name], opcode, rule, cases)
        for case in cases:
            assert why_illegal(ALL, encode(ALL, opcode, **{**LEGAL[opcode], **case})) is None


def test_registers() -> None:
    offsets = [register.offset for register in REGISTERS.values()]
    assert offsets == list(range(0, 4 * len(offsets), 4))
    assert len(COUNTERS) == 15 and "cycles" in COUNTERS
    assert set(ERROR_TEXT) == set(Error) - {Error.NONE}


def test_document_is_what_the_declarations_print() -> None:
    text = (ROOT / "docs" / "isa.md").read_text(encoding="utf-8")
    assert text == isa_markdown(), "print it again: python -m celosia.hw.spec.isa_doc > docs/isa.md"
    for fmt in formats(PRESETS["pynq"]).values():
        for field in fmt.fields:
            assert f"| `{field.name}` |" in text


def test_each_requirement_of_the_document_is_that_of_a_rule() -> None:
    declared = [rule for of_opcode in rules(PRESETS["pynq"]).values() for rule in of_opcode]
    for condition in REQUIREMENTS:
        assert any(condition in rule for rule in declared), f"no rule says {condition!r}"


WITHOUT_AMARANTH = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "amaranth":
            raise ImportError("amaranth is absent")
sys.meta_path.insert(0, Absent())
import celosia.{name}
"""


@pytest.mark.parametrize(
    "name",
    [
        "hw.spec.isa",
        "hw.spec.regs",
        "hw.spec.isa_doc",
        "hw.spec.config_doc",
        "hw.boards.boards",
        "cache",
        "driver",
        "compiler",
        "sim.functional.reference",
    ],
)
def test_imports_without_amaranth(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_AMARANTH.format(name=name)], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr


def test_absence_is_noticed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_AMARANTH.format(name="hw.lib.layout")], capture_output=True, text=True
    )
    assert done.returncode != 0 and "amaranth is absent" in done.stderr


# What each folder may import of the others, beside what any may. `driver.cli` is the command and may use everything.
ALLOWED = {
    "hw": set(),
    "sim": {"hw"},
    "compiler": {"hw", "sim"},
    "bitstreams": {"hw", "sim"},
    "driver": {"hw", "sim", "compiler", "bitstreams"},
}


def imported_folders(text: str) -> set[str]:
    return set(re.findall(r"^\s*(?:from|import) celosia\.(\w+)", text, re.MULTILINE))


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_point_one_way(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        wrong = (
            imported_folders(path.read_text(encoding="utf-8"))
            - ALLOWED[folder]
            - {folder, "cache", "garbage", "long_running", "plain", "terminal", "tools"}
        )
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_an_import_is_seen() -> None:
    assert imported_folders("import celosia.sim\n    from celosia.hw.spec.isa import x\n") == {"sim", "hw"}


def test_standard_library_only() -> None:
    for path in (path for room in ("spec", "boards") for path in (ROOT / "hw" / room).glob("*.py")):
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        modules = {name.split(".")[0] for name in names}
        assert modules <= set(sys.stdlib_module_names) | {"celosia", "__future__"}, path.name
