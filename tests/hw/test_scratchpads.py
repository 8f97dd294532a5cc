"""Check that the description of the scratchpads is the only one, and agrees with instruction set and simulators."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from celosia.hw.spec.config import PRESETS, Config
from celosia.hw.spec.isa import Buffer, Destination, buffers, is_supported, load_channels
from celosia.hw.spec.scratchpads import PAR_FIELDS, depths, scratchpads, total_bytes
from celosia.sim.functional.reference import State

ROOT = Path(__file__).parents[2]
DEPTHS = {"inp_depth", "wgt_depth", "acc_depth", "vin_depth", "out_depth", "par_depth", "tap_depth", "lut_count"}
DEPTH_NAME = re.compile("_depth|_count")
"""Pattern of a text without which `second_homes` yields nothing."""
HOME = "hw/spec/scratchpads.py"
CONFIGS = [
    *PRESETS.values(),
    Config(batch=2, block_in=8, block_out=4, lut_count=1, taps=5, forward=True, ports=2),
    Config(block_in=4, block_out=8, int32=False),
]


def second_homes(text: str) -> Iterator[str]:
    """Yield the places where a source reads a scratchpad's depth from a field of the Config."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(attr=name) if name in DEPTHS:
                yield f"line {node.lineno}: .{name}"
            case ast.Call(func=ast.Name("getattr"), args=[_, ast.Constant(name), *_]) if name in DEPTHS:
                yield f"line {node.lineno}: getattr of {name}"
            case ast.Call(func=ast.Name("getattr"), args=[_, ast.JoinedStr(values), *_]):
                ends = [part.value for part in values if isinstance(part, ast.Constant)]
                if ends and str(ends[-1]).endswith(("_depth", "_count")):
                    yield f"line {node.lineno}: getattr of ..._depth"


def test_the_depth_of_a_scratchpad_has_one_home() -> None:
    homes_by_file = {
        name: homes
        for folder in ("hw", "sim", "compiler", "driver", "bitstreams", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if DEPTH_NAME.search(text := path.read_text(encoding="utf-8"))
        and (homes := [*second_homes(text)])
        and (name := path.relative_to(ROOT).as_posix()) != HOME
    }
    assert not homes_by_file, f"take it from {HOME}: {homes_by_file}"
    assert len([*second_homes((ROOT / HOME).read_text(encoding="utf-8"))]) == len(DEPTHS)


@pytest.mark.parametrize(
    "planted",
    [
        "size = cfg.inp_depth * cfg.inp_pieces",
        "pads = {'tap': config.tap_depth if config.taps else 1}",
        "depth = getattr(cfg, f'{name}_depth')",
        "tables = getattr(cfg, 'lut_count')",
    ],
)
def test_a_planted_second_home_is_found(planted: str) -> None:
    assert [*second_homes(f"def f(cfg, config, name):\n    {planted}\n")]


def test_those_of_a_known_config() -> None:
    pads = scratchpads(replace(PRESETS["pynq"], ports=2))
    assert {name: (pad.depth, pad.width, pad.grain, pad.banks) for name, pad in pads.items()} == {
        "inp": (4096, 128, 64, 1), "wgt": (1024, 2048, 64, 1), "acc": (2048, 512, 32, 2), "vin": (2048, 128, 64, 4),
        "out": (1024, 128, 128, 1), "par": (64, 1024, 64, 1), "lut": (2, 2048, 64, 1), "tap": (512, 384, 64, 1),
    }  # fmt: skip
    assert total_bytes(PRESETS["pynq"]) == 1024 * (64 + 256 + 128 + 32 + 16 + 8 + 24) + 512


@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda cfg: cfg.name)
def test_they_agree_with_the_instruction_set(cfg: Config) -> None:
    pads = scratchpads(cfg)
    assert [b.name.lower() for b in buffers(cfg)] == sorted(
        (name for name, pad in pads.items() if "load" in pad.writers), key=lambda name: Buffer[name.upper()]
    )
    destinations = {d.name.lower() for d in Destination if is_supported(cfg, d)}
    assert {name for name, pad in pads.items() if "vector" in pad.writers} == destinations
    assert [name for name, pad in pads.items() if "store" in pad.readers] == ["out"]
    near = {b for b in load_channels(cfg)[0] if not pads[b.name.lower()].on_second_port}
    assert near == {Buffer.INP, Buffer.ACC, Buffer.VIN} and ("tap" in pads) == (cfg.taps > 0)


@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda cfg: cfg.name)
def test_sizes_agree(cfg: Config) -> None:
    state = State(cfg)
    for name, pad in scratchpads(cfg).items():
        assert depths(cfg)[name] == pad.depth == len(getattr(state, name)) == pad.bank_depth * pad.banks
        assert 1 << pad.address_bits == max(2, pad.depth) and pad.width % pad.grain == 0
        assert pad.pieces * pad.piece_bytes == getattr(state, name)[0].nbytes >= pad.width // 8
    parts = scratchpads(cfg)["inp"].part_address_bits(8 * cfg.lanes)
    assert 1 << parts == cfg.inp_depth * max(1, cfg.block_in // cfg.block_out)


def test_the_parts_of_par_are_apart() -> None:
    masks = [((1 << part.width) - 1) << part.offset for part in PAR_FIELDS.values()]
    assert sum(masks) == np.bitwise_or.reduce(masks) < 1 << 64
