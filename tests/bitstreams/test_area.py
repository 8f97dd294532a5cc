"""Resources without Yosys: those that were counted, exactly or within what is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks import area as fitting

from celosia.bitstreams import area
from celosia.hw.config import PRESETS, Config

KNOWN: dict[str, Any] = json.loads(area.MEASURED.read_text())
ROWS: list[dict[str, Any]] = KNOWN["measured"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: Config.from_dict(row["set"]).digest[:8])
def test_what_was_counted(row: dict[str, Any]) -> None:
    """DSP blocks and block RAM as Yosys counted them; LUTs and flip-flops no further off than a model that did not know
    this one was."""
    found = area.estimate(Config.from_dict(row["set"]))
    assert (found.dsp, found.ram) == (row["dsp"], row["ram"])
    lut, ff, _ = area.error()
    if found.lut is found.ff is None:  # which one Config alone has something of, say the width of the bus
        assert None in fitting.errors(ROWS, "lut")
        return
    assert found.lut == pytest.approx(row["lut"], rel=lut) and found.ff == pytest.approx(row["ff"], rel=ff)


def test_the_file_is_what_the_script_makes_of_its_rows() -> None:
    assert fitting.fitted(ROWS) == KNOWN
    off = [abs(each) for each in fitting.errors(ROWS, "lut") if each is not None]
    assert KNOWN["error"]["lut"] == pytest.approx(max(off), abs=1e-3) and len(off) >= 10


def test_a_wrong_count_shows_in_the_error() -> None:
    """What the error is made of: each Config by the model of the others."""
    wrong = [dict(row) for row in ROWS]
    wrong[0]["lut"] *= 3
    assert fitting.fitted(wrong)["error"]["lut"] > KNOWN["error"]["lut"] + 0.1


def test_more_of_anything_is_no_less() -> None:
    base = area.estimate(PRESETS["tiny"])
    for name, value in (("residual_cycles", 1), ("ports", 2), ("taps", 4), ("block_in", 8), ("inp_depth", 8192)):
        more = area.estimate(replace(PRESETS["tiny"], **{name: value}))
        assert more.lut is not None and base.lut is not None and more.lut >= base.lut
        assert more.dsp >= base.dsp and more.ram >= base.ram
    assert min(value for name in ("lut", "ff") for value in KNOWN[name].values()) >= 0


@pytest.mark.parametrize("change", [{"batch": 2}, {"packed": False}, {"block_out": 32}, {"bus_bytes": 64}, {"taps": 9}])
def test_nothing_is_said_of_what_was_never_synthesised(change: dict[str, Any]) -> None:
    found = area.estimate(replace(PRESETS["pynq"], forward=False, **change))
    assert found.lut is found.ff is None and found.dsp > 0 and found.ram > 0


def test_memories_are_those_of_the_hardware() -> None:
    """Every memory of the design that has more entries than LUTs take, or is a scratchpad, by its declaration."""
    import re

    from celosia.hw.verilog import verilog

    more = replace(PRESETS["tiny"], taps=0, ports=2, bus_bytes=16, lut_count=8, par_depth=128)
    for cfg in (PRESETS["tiny"], more):
        declared = re.findall(r"^ *(?:\(\*.*\*\) *)?reg \[(\d+):0\] \w+ *\[(\d+):0\];", verilog(cfg), re.M)
        found, said = [(int(depth) + 1, int(bits) + 1) for bits, depth in declared], [*area.memories(cfg)]
        large, meant = ([each[:2] for each in both if each[0] > area.LUT_RAM_DEPTH] for both in (found, said))
        assert sorted(large) == sorted(meant)


def test_block_ram_of_another_family() -> None:
    """`ultra96` on its xczu3eg, as docs/bitstreams.md has it."""
    assert area.block_rams(PRESETS["ultra96"]) == 109


def test_the_file_is_installed() -> None:
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    assert '"bitstreams/*.json"' in text
