"""A process reuses its lowered loops in later compilations, and they equal newly lowered ones."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from small_models import Builder, models, twins
from thorough import some, tries

import celosia
from celosia.compiler.layer import Window
from celosia.compiler.tensorize import plan
from celosia.compiler.tensorize.computation import LayerComputation
from celosia.compiler.tensorize.lowering import lower_layer
from celosia.compiler.tensorize.plan import Planner, ScheduledLoops
from celosia.compiler.tensorize.space import Tiling, candidates
from celosia.hw.spec.config import Config

from . import layers
from .layers import CONFIGS, Network

SMALL = CONFIGS["4x4-tight"]
ALIKE = [SMALL, replace(SMALL, forward=True), replace(SMALL, acc_depth=32), replace(SMALL, taps=2)]
"""Configs that differ in one field from the first."""
PADDED = Window((3, 3), pads=(1, 1, 1, 1))
Known = OrderedDict[Hashable, ScheduledLoops]


class Plain(layers.Builder):
    """Builds layers without tables and residuals."""

    def _number(self, low: int, high: int) -> int:
        return high

    def _flag(self) -> bool:
        return False

    def _name(self) -> str:
        return "layer"


class Careless(Known):
    """A cache that ignores part `left_out` of its keys: a planted fault."""

    left_out = 0

    def pop(self, key: Any, default: Any = None) -> Any:
        return super().pop(self._part(key), default)

    def __setitem__(self, key: Any, value: ScheduledLoops) -> None:
        super().__setitem__(self._part(key), value)

    def _part(self, key: Any) -> Hashable:
        return (*key[: self.left_out], *key[self.left_out + 1 :])


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> Known:
    """Replace this process's cache of loops by an empty one."""
    empty: Known = OrderedDict()
    monkeypatch.setattr(plan, "_loops_cache", empty)
    return empty


def asked() -> Iterator[tuple[Planner, LayerComputation, Tiling]]:
    """Yield layers on the Configs of ALIKE, each with its first tilings.

    There are layers of the same kind with the same number of pixels.
    """
    for cfg in ALIKE:
        b = Plain(Network(cfg), lambda strategy: 0, np.random.default_rng(0))
        for size, window in ((5, Window((1, 1))), (5, PADDED), (7, Window((3, 3)))):
            x = b.host_input(1, 24, size, size)
            b.conv(x, window, 24)
        for layer in b.net.layers:
            for d in lower_layer(cfg, layer):
                yield from ((Planner(cfg), d, decisions) for decisions in islice(candidates(cfg, d.workload), 2))


def text(loops: ScheduledLoops) -> str:
    """Return the loops, their instructions and their Config as text."""
    return f"{loops}\n{loops.plan.nodes}\n{loops.plan.cfg}"


def mixed() -> int:
    """Return how many cached loops differ from newly lowered ones."""
    return sum(text(p.loops(d, c)) != text(plan._lower_loops(p.cfg, d, c)) for p, d, c in asked())


def test_loops_are_those_that_are_made_anew() -> None:
    for _ in range(2):
        assert mixed() == 0


@pytest.mark.parametrize("left_out", some(range(3), [0]))
def test_a_key_without_one_of_its_parts_is_noticed(left_out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    careless = Careless()
    careless.left_out = left_out
    monkeypatch.setattr(plan, "_loops_cache", careless)
    assert mixed()


def test_what_was_asked_for_last_is_kept(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "REMEMBERED", 2)
    (planner, a, first), (_, b, second), (_, c, third) = islice(asked(), 3)
    result = planner.loops(a, first)
    other = planner.loops(b, second)
    assert planner.loops(a, first) is result
    planner.loops(c, third)
    assert len(known) == 2
    assert planner.loops(a, first) is result and planner.loops(b, second) is not other


# Programs --------------------------------------------------------------------------------------------------------


def compiled(model: onnx.ModelProto, cfg: Config, path: Path) -> bytes:
    """Return the bytes of the Program's file."""
    celosia.compile(model, cfg, check=False).save(path)
    return path.read_bytes()


@settings(max_examples=tries(3), suppress_health_check=list(HealthCheck))
@given(b=models())
def test_programs_do_not_depend_on_what_was_compiled_before(b: Builder, known: Known, tmp_path: Path) -> None:
    model, path = b.model(), tmp_path / "program"
    together = [compiled(model, cfg, path) for cfg in [*ALIKE, *ALIKE]]
    for cfg, *output in zip(ALIKE, together, together[len(ALIKE) :]):
        known.clear()
        assert [compiled(model, cfg, path)] * 2 == output


def test_the_program_is_that_of_another_process(known: Known, tmp_path: Path) -> None:
    b = Builder("qdq")
    twins(b)
    onnx.save(b.model(), tmp_path / "model.onnx")
    for cfg in ("pynq", "tiny", "tiny"):
        result = compiled(b.model(), Config.load(cfg), tmp_path / "here")
    assert known
    script = "import celosia, sys; celosia.compile(sys.argv[1], 'tiny', check=False).save(sys.argv[2])"
    subprocess.run([sys.executable, "-c", script, tmp_path / "model.onnx", tmp_path / "there"], check=True)
    assert (tmp_path / "there").read_bytes() == result
