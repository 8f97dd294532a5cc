"""Random attention and random decoders on random Configs give onnxruntime's bytes."""

from __future__ import annotations

import pytest
from thorough import some

import celosia
from celosia.compiler import numerics
from celosia.driver.export.targets import find_export_target

from .attention_models import decoder_outcome, drawn, outcome


@pytest.mark.parametrize("seeds", some([range(1000, 1003), range(1003, 1020)], [range(1000, 1003)]), ids=len)
def test_random_attention(seeds: range) -> None:
    """Random attention has onnxruntime's bytes as a block and head by head."""
    outcomes = [outcome(seed) for seed in seeds]
    assert not any(result.different for result in outcomes)
    assert {"Block", "Softmax", "ActivationProduct"} <= {op for result in outcomes for op in result.ops}


def test_the_comparison_sees_other_powers(monkeypatch: pytest.MonkeyPatch) -> None:
    right = numerics.softmax_powers
    monkeypatch.setattr(numerics, "softmax_powers", lambda count, sx, sy: right(count, 1.5 * sx, sy))
    assert any(outcome(seed, check=False).different for seed in range(1000, 1003))


def test_the_check_runs_here_whatever_it_is_for() -> None:
    """The self-check of a Program for another processor runs on this one, also for softmax."""
    s, model, cfg = drawn(1000)
    shapes, target = {name: x.shape for name, x in s.feed.items()}, find_export_target("x86_64").target
    program = celosia.compile(model, cfg, target=target, shapes=shapes)
    assert any("softmax" in layer.what for launch in program.launches for layer in launch.layers)


def test_a_random_decoder() -> None:
    result = decoder_outcome(1)
    assert not result.different and "Softmax" in result.ops


@pytest.mark.thorough
def test_many() -> None:
    assert not [seed for seed in range(3000, 3150) if outcome(seed).different]
    assert not [seed for seed in range(100, 140) if decoder_outcome(seed).different]
