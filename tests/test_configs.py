"""tests/configs.py: its Configs together have each part that a Config can have, and leave each one out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import pytest
from configs import CONFIGS, COVERING, COVERING_PAIR, VARIED

from celosia.hw.spec.config import Config
from celosia.hw.spec.scratchpads import scratchpads

DEPTHS = {field.name for field in fields(Config) if field.name.endswith("_depth")} - {"trace_depth"}
ELSEWHERE = {"name", "pump"}
"""Fields that vary elsewhere: `pump` in tests/cosim/test_pump.py."""
SITUATIONS: dict[str, Callable[[Config], object]] = {
    "batch of several": lambda cfg: cfg.batch > 1,
    "more inputs than outputs": lambda cfg: cfg.block_in > cfg.block_out,
    "more outputs than inputs": lambda cfg: cfg.block_in < cfg.block_out,
    "square": lambda cfg: cfg.block_in == cfg.block_out,
    "two ports": lambda cfg: cfg.ports == 2,
    "depthwise taps": lambda cfg: cfg.taps,
    "softmax": lambda cfg: cfg.softmax,
    "norm": lambda cfg: cfg.norm,
    "both ports load weights": lambda cfg: scratchpads(cfg)["wgt"].spread,
    "packed weights": lambda cfg: cfg.weight_bits < 8,
    "event trace": lambda cfg: cfg.trace_depth,
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_covering_configs_have_it_and_leave_it_out(situation: str) -> None:
    assert {bool(SITUATIONS[situation](cfg)) for cfg in COVERING.values()} == {False, True}


@pytest.mark.parametrize("situation", [name for name in SITUATIONS if name != "more outputs than inputs"])
def test_the_covering_pair_has_it(situation: str) -> None:
    assert any(SITUATIONS[situation](COVERING[name]) for name in COVERING_PAIR)


def test_covering_configs_differ_in_each_field() -> None:
    """A new field of Config fails here until a covering Config sets it."""
    same = {f.name for f in fields(Config) if len({getattr(cfg, f.name) for cfg in COVERING.values()}) == 1}
    assert same <= DEPTHS | ELSEWHERE


def test_simulated_accelerators_differ_where_any_do() -> None:
    for field in fields(Config):
        if field.name != "name" and len({getattr(cfg, field.name) for cfg in CONFIGS.values()}) > 1:
            assert len({getattr(CONFIGS[name], field.name) for name in VARIED}) > 1, field.name
