"""Tests of the draw of mutants, of their verdicts, and of the reasons for survivors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from celosia import hw
from mutation.__main__ import diff, reasons, summary
from mutation.campaign import (
    EQUIVALENT,
    KILLED,
    PROBE,
    SURVIVED,
    UNBUILT,
    UNDECIDED,
    Base,
    Campaign,
    Stage,
    Tree,
    Verdict,
    Worker,
    nearest_tests,
    probed,
)
from mutation.draw import Mutant, draw, everything, mutants

HARDWARE = Path(hw.__file__).parent
SOURCE = '''"""A file."""
from amaranth import Module

WIDTH = 3

class Part:
    def __init__(self):
        super().__init__({"o": Out(4)})

    def elaborate(self, platform: int | None = 2):
        m = Module()
        count, wide = Signal(5, init=1), Signal()
        m.d.sync += [count.eq(count + 1), wide.eq(~wide & (count <= 9))]
        with m.If(wide):
            m.d.comb += self.o.eq(Mux(wide, count >> 1, "é"))
            m.next = "IDLE"
        if count.width > 7:
            raise ValueError(f"{count + 1} > 2")
        return m
'''


def changes(source: str = SOURCE) -> dict[str, list[tuple[str, str]]]:
    """Return the (old, new) texts of each kind of mutant of `source`."""
    changes_by_kind: dict[str, list[tuple[str, str]]] = {}
    for mutant in mutants("a.py", source):
        changes_by_kind.setdefault(mutant.kind, []).append((mutant.old.strip(), mutant.new.strip()))
    return changes_by_kind


def test_each_kind_of_fault_is_drawn() -> None:
    drawn = changes()
    assert drawn["comparison"] == [("<=", "<"), ("<=", ">="), (">", ">="), (">", "<")]
    assert drawn["operator"] == [("+", "-"), ("& (", "| ("), (">>", "<<")]
    assert drawn["dropped negation"] == [("~wide", "wide")]
    assert drawn["dropped assignment"] == [
        ("count.eq(count + 1)", "[]"), ("wide.eq(~wide & (count <= 9))", "[]"),
        ('self.o.eq(Mux(wide, count >> 1, "é"))', "[]"), ('m.next = "IDLE"', "pass"),
    ]  # fmt: skip
    assert drawn["dropped reset"] == [("Signal()", "Signal(reset_less=True)")]
    assert ("wide", "1") in drawn["stuck condition"] and ("wide", "0") in drawn["stuck condition"]
    assert ('count >> 1, "é"', '"é", count >> 1') in drawn["swapped operands"]
    assert ("count >> 1", "1 >> count") in drawn["swapped operands"]


def test_no_fault_where_there_is_no_logic() -> None:
    """No mutant changes ports, defaults, annotations, messages or constants of modules."""
    literals = {old for pairs in changes().values() for old, _ in pairs}
    assert {"5", "1", "9", "7"} <= literals
    assert not {"4", "2", "3"} & literals


def test_every_mutant_of_the_hardware_is_python() -> None:
    every = everything(HARDWARE)
    assert len(every) > 5000
    assert {"comparison", "operator", "off by one", "dropped reset"} < {mutant.kind for mutant in every}
    for mutant in every[::40]:
        source = (HARDWARE / mutant.file).read_text(encoding="utf-8")
        compile(mutant.apply(source), mutant.file, "exec")
        signs = "".join(line[0] for line in mutant.diff(source).splitlines())
        assert re.fullmatch(r"-{1,4}\+{1,4}", signs), mutant  # one expression, which may have several lines


def test_a_draw_repeats_itself() -> None:
    first = [mutant for mutant, _ in zip(draw(HARDWARE, 3), range(20))]
    assert first == [mutant for mutant, _ in zip(draw(HARDWARE, 3), range(20))]
    assert first != [mutant for mutant, _ in zip(draw(HARDWARE, 4), range(20))]


def test_a_mutant_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a\.py:1 does not hold 'x'"):
        Mutant("a.py", "f", 1, "operator", 0, 1, "x", "y").apply("z")


def test_the_nearest_tests_come_first() -> None:
    assert nearest_tests("control.py")[0] == "tests/hw/test_control.py"
    assert nearest_tests("vector_unit/norm/root.py")[0] == "tests/hw/test_norm.py"
    assert "tests/hw/test_top.py" not in nearest_tests("control.py")
    assert "tests/hw/test_top.py" in nearest_tests("control.py", whole=True)


def test_a_planted_statement_tells_that_it_runs() -> None:
    for mutant in mutants("a.py", SOURCE):
        lines = probed(mutant, SOURCE).splitlines(keepends=True)
        compile("".join(lines), "a.py", "exec")
        probes = [line for line in lines if PROBE in line]
        lines.remove(*probes)
        assert "".join(lines) == mutant.apply(SOURCE)
    inner = next(mutant for mutant in mutants("a.py", SOURCE) if "Mux" in mutant.old)
    lines = probed(inner, SOURCE).splitlines()
    assert lines.index(f"            {PROBE}") == inner.line - 1


def test_every_probe_fits_into_the_hardware() -> None:
    for mutant in everything(HARDWARE)[::40]:
        compile(probed(mutant, (HARDWARE / mutant.file).read_text(encoding="utf-8")), mutant.file, "exec")


def staged(monkeypatch: pytest.MonkeyPatch, unit: Callable[[Mutant], Stage], tmp_path: Path) -> Campaign:
    """Return a campaign without trees: `unit` replaces its unit tests, and no other check kills a mutant."""
    monkeypatch.setattr(Tree, "__init__", lambda self, folder: setattr(self, "reached", tmp_path / "reached"))
    monkeypatch.setattr(Tree, "plant", lambda self, mutant: None)
    monkeypatch.setattr(Tree, "restore", lambda self, mutant, base: None)

    def units(self: Worker, mutant: Mutant) -> Stage:
        self.passed["file", "test"] = ["digest"]
        self.tree.reached.touch()
        return unit(mutant)

    monkeypatch.setattr(Worker, "_unit", units)
    monkeypatch.setattr(Base, "verilog", lambda self, file, name: ["digest"])
    for stage in ("_whole", "_proofs", "_fuzz"):
        monkeypatch.setattr(Worker, stage, lambda self, mutant: UNDECIDED)
    return Campaign(tmp_path, tmp_path / "verdicts.jsonl", lambda text: None)


def test_a_mutant_that_no_test_elaborates_survives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A mutant that no check elaborates counts as a survivor, not as equivalent."""
    run = staged(monkeypatch, lambda mutant: UNDECIDED, tmp_path)
    monkeypatch.setattr(Worker, "_unit", lambda self, mutant: UNDECIDED)
    ((_, verdict),) = run.verdicts(1, seed=1)
    assert verdict.outcome == SURVIVED and verdict.note == "no check elaborates it"


def test_a_campaign_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried: list[Mutant] = []

    def unit(mutant: Mutant) -> Stage:
        tried.append(mutant)
        kind = len(tried) % 4
        if kind < 2:
            return Verdict((KILLED, UNBUILT)[kind], "unit", "test"), True, ""
        return None, kind == 2, ""

    run = staged(monkeypatch, unit, tmp_path)
    verdicts = list(run.verdicts(4, seed=1))
    outcomes = [verdict.outcome for _, verdict in verdicts]
    assert outcomes == [UNBUILT, SURVIVED, EQUIVALENT, KILLED] * 2
    assert list(staged(monkeypatch, unit, tmp_path).verdicts(4, seed=1)) == verdicts
    assert len(tried) == 8
    # New tests may kill a survivor, so it is tried again. A killed mutant stays killed.
    again = staged(monkeypatch, unit, tmp_path)
    again.checks = "others"
    assert [verdict.outcome for _, verdict in again.verdicts(4, seed=1)].count(KILLED) >= 2
    assert len(tried) == 12, "two survivors, and two that are drawn where these were killed"


def test_survivors_are_listed_with_their_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = (mutant for mutant, _ in zip(draw(HARDWARE, 5), range(3)))
    monkeypatch.setattr("mutation.__main__.reasons", lambda: {(one.file, diff(one)): "speed alone"})
    report = summary([(one, Verdict(SURVIVED)), (two, Verdict(SURVIVED)), (three, Verdict(KILLED, "proof", "name"))])
    assert (report["mutants"], report["killed"], report["percent"], report["by"]) == (3, 1, 33.3, {"proof": 1})
    assert [survivor["reason"] for survivor in report["survivors"]] == ["speed alone", ""]


def test_every_reason_is_of_a_mutant() -> None:
    """Each reason belongs to lines that the hardware still has; a survivor whose lines changed must be tried again."""
    drawn = {(mutant.file, mutant.kind): [] for mutant in everything(HARDWARE)}  # type: ignore[var-annotated]
    for file, text in reasons():
        removed = [line[2:] for line in text.splitlines() if line.startswith("- ")]
        assert any(name == file for name, _ in drawn), file
        lines = [line.strip() for line in (HARDWARE / file).read_text(encoding="utf-8").splitlines()]
        assert removed and all(line in lines for line in removed), text
