"""The area model gives the counts of Yosys exactly or within its stated error, without running Yosys."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks import area as fitting

from celosia.bitstreams import area, memories
from celosia.bitstreams.area import AreaModel, AreaSample
from celosia.hw.spec.config import PRESETS

ROWS = area.shipped_model().rows
OFF = area.shipped_model().errors


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.cfg.digest[:8])
def test_what_was_counted(row: AreaSample) -> None:
    """DSP blocks and block RAM are those that Yosys counted; LUTs and flip-flops are within the leave-one-out error."""
    estimated, error = area.shipped_model().estimate(row.cfg), area.shipped_model().error
    assert abs(estimated.dsp - row.dsp) <= 0.03 * row.dsp and abs(estimated.ram - row.ram) <= 0.03 * row.ram
    if OFF[ROWS.index(row)] is not None:
        for name in area.FITTED_RESOURCES:
            assert area.shipped_model().predict(row.cfg, name) == pytest.approx(getattr(row, name), rel=error[name])


def test_a_wrong_count_shows_in_the_error() -> None:
    """The error is that of each Config by a model of the others, so a wrong count increases it."""
    number = next(n for n, off in enumerate(OFF) if off is not None)
    wrong = [replace(row, lut=3 * row.lut) if n == number else row for n, row in enumerate(ROWS)]
    assert AreaModel(wrong).error["lut"] > area.shipped_model().error["lut"] + 0.1
    assert len([off for off in OFF if off is not None]) >= 10


def test_rows_are_written_as_they_are_read() -> None:
    assert [AreaSample.from_json(json.loads(json.dumps(row.to_json()))) for row in ROWS] == list(ROWS)


def test_costs_are_found() -> None:
    """The model recovers the costs from rows that follow a rule."""
    generator = random.Random(1)
    known = {name: generator.uniform(10, 100) for name in area.features(PRESETS["tiny"])}
    rows = []
    for _ in range(20):
        cfg = fitting.drawn(generator)
        lut = area.declared_area(cfg)["lut"] + sum(known[name] * value for name, value in area.features(cfg).items())
        rows.append(AreaSample(cfg, lut, lut, 0, 0))  # type: ignore[arg-type]
    assert AreaModel(rows).costs["lut"] == pytest.approx(known, abs=0.2)
    assert all(abs(off["lut"]) < 1e-3 for off in AreaModel(rows).errors if off is not None)


def test_more_of_anything_is_no_less() -> None:
    base = area.shipped_model().estimate(PRESETS["tiny"])
    for name, value in (
        ("residual_cycles", 1), ("ports", 2), ("taps", 4), ("block_in", 8), ("inp_depth", 8192), ("bus_bytes", 16),
        ("batch", 2), ("queue_depth", 32), ("acc_depth", 1024),
    ):  # fmt: skip
        more = area.shipped_model().estimate(replace(PRESETS["tiny"], **{name: value}))
        assert more.lut >= base.lut and more.ff >= base.ff and more.dsp >= base.dsp and more.ram >= base.ram
    assert min(value for name in ("lut", "ff") for value in area.shipped_model().costs[name].values()) >= 0


@pytest.mark.parametrize("change", [{"trace_depth": 64}, {"block_out": 32}, {"bus_bytes": 64}, {"taps": 9}])
def test_what_is_beyond_all_that_was_synthesised_is_marked(change: dict[str, Any]) -> None:
    within = replace(PRESETS["pynq"], forward=False, alu=True, int32=True)
    estimated = area.shipped_model().estimate(replace(within, **change))
    assert estimated.extrapolated and estimated.lut > 0 and estimated.ff > 0
    assert not area.shipped_model().estimate(within).extrapolated


@pytest.mark.parametrize(
    ("memory", "blocks", "luts"),
    [
        ((16, 8, 8), 0, 8), ((32, 128, 128), 0, 88), ((64, 64, 8), 0, 96), ((64, 128, 128), 0, 172),
        ((63, 263, 263), 0, 352), ((128, 8, 8), 0, 24), ((128, 16, 8), 0, 48), ((128, 40, 8), 0, 120),
        ((127, 37, 37), 0, 104), ((127, 69, 69), 1, 0), ((127, 133, 133), 2, 0), ((127, 299, 299), 4.5, 0),
        ((128, 32, 8), 0.5, 0), ((128, 48, 16), 1, 0), ((256, 8, 8), 0, 48), ((256, 16, 16), 0.5, 0),
        ((512, 8, 8), 0.5, 0), ((2048, 16, 8), 1, 0), ((2048, 64, 32), 4, 0), ((1024, 256, 32), 8, 0),
        ((4096, 128, 128), 15, 0), ((8192, 32, 32), 8, 0), ((16384, 16, 16), 8, 0),
    ],
)  # fmt: skip
def test_memories_as_yosys_maps_them(memory: tuple[int, int, int], blocks: float, luts: int) -> None:
    """Memories of (depth, bits, grain) take the resources that Yosys' synthesis counts for each.

    The counts are those of `synth_xilinx -family xc7 -run prepare:map_ffram` in version 0.70.
    """
    memory_model = memories.Memory(*memory)
    assert memory_model.blocks == blocks and (blocks or memory_model.luts == luts)


def test_memories_are_those_of_the_hardware() -> None:
    """Every large memory of the design is in the model, with the size of its declaration."""
    import re

    from celosia.hw.verilog import verilog

    more = replace(
        PRESETS["tiny"], taps=0, ports=2, bus_bytes=16, lut_count=8, par_depth=128, queue_depth=64, vin_depth=32
    )
    for cfg in (PRESETS["tiny"], more):
        declared = re.findall(r"^ *(?:\(\*.*\*\) *)?reg \[(\d+):0\] \w+ *\[(\d+):0\];", verilog(cfg), re.M)
        in_verilog, in_model = [(int(depth) + 1, int(bits) + 1) for bits, depth in declared], [*memories.memories(cfg)]
        for depth, bits in (memory[:2] for memory in in_model):
            assert (depth, bits) in in_verilog
            in_verilog.remove((depth, bits))
        assert all(
            depth == 1 or (depth <= 32 and bits < 320) for depth, bits in in_verilog
        )  # what is the same for all, or nearly so


def test_block_ram_of_another_family() -> None:
    """`ultra96` on its xczu3eg, as docs/bitstreams.md has it."""
    assert memories.block_rams(PRESETS["ultra96"]) == 109


def test_the_file_is_installed() -> None:
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    assert '"bitstreams/*.json"' in text
