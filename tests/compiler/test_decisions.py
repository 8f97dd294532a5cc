"""Tilings are written to a file and read back; changed ones take effect, and illegal ones are refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.gain import cycles

import celosia
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.program import Program
from celosia.compiler.tensorize.plan import DecisionsError, collect_tilings
from celosia.driver.runtime import Runtime
from celosia.hw.boards.memory import ZYNQ_HP
from celosia.models import demo_images, demo_model_path
from celosia.sim.functional.fsim import FunctionalDevice

MODEL = demo_model_path()
Json = dict[str, Any]


@pytest.fixture(scope="module")
def program() -> Program:
    return celosia.compile(MODEL, "tiny", check=False)


def logits(program: Program) -> np.ndarray:
    name = program.inputs[0].name
    return Runtime(program, FunctionalDevice(program.config)).run({name: demo_images()[0][:1]}).outputs["logits"]


def test_decisions_and_loops_survive_the_file(program: Program, tmp_path: Path) -> None:
    program.save(tmp_path / "demo.celosia")
    loaded = Program.load(tmp_path / "demo.celosia")
    assert collect_tilings(loaded) == collect_tilings(program)
    assert loaded.loops == [str(loops) for loops in program.loops]
    assert loaded.to_bytes() == program.to_bytes()


def test_the_same_decisions_make_the_same_program(program: Program, tmp_path: Path) -> None:
    (tmp_path / "decisions.json").write_text(json.dumps(collect_tilings(program)))
    again = celosia.compile(MODEL, "tiny", check=False, decisions=tmp_path / "decisions.json")
    assert again.image.tobytes() == program.image.tobytes()


def test_other_decisions_make_another_program_of_the_same_result(program: Program) -> None:
    decisions = collect_tilings(program)
    changed = {"block1.first": dict(n=2, y=3, x=5, order="input", ahead=3), "block2.second": dict(k=3, order="split")}
    for row in decisions["layers"]:
        row["parts"][0].update(changed.get(row["layer"], {}))
    other = celosia.compile(MODEL, "tiny", decisions=decisions)  # checked, too
    assert other.image.tobytes() != program.image.tobytes()
    np.testing.assert_array_equal(logits(other), logits(program))


def test_without_look_ahead_every_tile_waits_for_the_one_before(program: Program) -> None:
    decisions = collect_tilings(program)
    for row in decisions["layers"]:
        row["parts"][0]["ahead"] = 0
    other = celosia.compile(MODEL, "tiny", decisions=decisions)  # checked, too
    np.testing.assert_array_equal(logits(other), logits(program))
    assert cycles(other, ZYNQ_HP) > 1.1 * cycles(program, ZYNQ_HP)


@pytest.mark.parametrize("part", ("fusion", "memory"))
def test_what_is_left_out_changes_no_bytes(program: Program, part: str) -> None:
    other = celosia.compile(MODEL, "tiny", without=part)  # checked, too
    np.testing.assert_array_equal(logits(other), logits(program))
    assert (other.image_address > program.image_address) == (part == "memory")


def test_what_cannot_be_left_out_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'fushion'.*'fusion'.*wires"):
        celosia.compile(MODEL, "tiny", without=["fushion"])
    with pytest.raises(ModelError, match="without 'integer'"):
        celosia.compile(MODEL, "tiny", without="integer")


def test_layers_that_are_left_out_are_decided_by_the_compiler(program: Program) -> None:
    decisions = collect_tilings(program)
    del decisions["layers"][2:]
    again = celosia.compile(MODEL, "tiny", check=False, decisions=decisions)
    assert again.image.tobytes() == program.image.tobytes()


def first(decisions: Json) -> Json:
    part: Json = decisions["layers"][0]["parts"][0]
    return part


WRONG: list[tuple[Callable[[Json], object], str]] = [
    (lambda d: d.update(format="x"), "these are no decisions of format"),
    (lambda d: d.update(version=0), "decisions of version 0"),
    (lambda d: d.update(config_digest="x"), "made for another Config, which was called 'tiny'"),
    (lambda d: d.update(layers={}), "hold a list"),
    (lambda d: d["layers"].append(7), "a layer's decisions are"),
    (lambda d: d["layers"].append(d["layers"][0]), "layer 'stem' is decided twice"),
    (lambda d: d["layers"][0].update(layer="nope"), "'nope', which is no layer of this model on the accelerator"),
    (lambda d: d["layers"][0]["parts"].append(first(d)), "layer 'stem' has 1 parts, decisions are given for 2"),
    (lambda d: first(d).update(workload="x"), "its decisions are for `x`"),
    (lambda d: first(d).update(n=99), "n must be between 1 and 4, not 99"),
    (lambda d: first(d).update(y=30), "a tile takes 960 entries of out, where 128 are to be had"),
    (lambda d: first(d).update(order="sideways"), "the decision order cannot be 'sideways'"),
    (lambda d: first(d).update(ahead=True), "the decision ahead cannot be True"),
    (lambda d: first(d).update(threads=2), "there is no decision 'threads'"),
    (lambda d: first(d).pop("k"), "the decision 'k' is missing"),
]


@pytest.mark.parametrize(("spoil", "message"), WRONG, ids=[message for _, message in WRONG])
def test_decisions_that_do_not_fit_are_refused(program: Program, spoil: Callable[[Json], object], message: str) -> None:
    decisions = copy.deepcopy(collect_tilings(program))
    spoil(decisions)
    with pytest.raises(DecisionsError) as error:
        celosia.compile(MODEL, "tiny", check=False, decisions=decisions)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "[]", "{", "\0", '"celosia-decisions"'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "decisions.json").write_text(content)
    with pytest.raises(DecisionsError):
        celosia.compile(MODEL, "tiny", decisions=tmp_path / "decisions.json")
