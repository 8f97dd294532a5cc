"""All layers that the accelerator refuses are found at once, each with its reason; the other layers stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from small_models import Builder

pytest.importorskip("onnxruntime")

from agreement import CONFIGS, check

from celosia.compiler.launch.image import Image
from celosia.compiler.layer import Layer
from celosia.compiler.tune import network
from celosia.hw.spec.config import Config
from celosia.sim.functional.fsim import FunctionalDevice

LARGE = (31, 31)
"""A kernel size whose window fits no scratchpad of the Config "tight"."""
SIZE = 37
"""Rows and columns of an image that no number of equal parts fits scratchpad inp of that Config: 37 is prime."""
FITS_NOT = ("no tile of", "do not fit")


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the number of layers of each build."""
    original = network.build
    counts: list[int] = []

    def build(cfg: Config, launches: list[list[Layer]], *rest: Any) -> Image:
        counts.append(sum(map(len, launches)))
        built: Image = original(cfg, launches, *rest)
        return built

    monkeypatch.setattr(network, "build", build)
    return counts


def convolutions(b: Builder, refused: int) -> None:
    x = b.input([1, 6, 31, 31])
    for _ in range(refused):
        x = b.conv(x, 6, (3, 3), pads=(1, 1, 1, 1))
        b.output(b.conv(b.conv(x, 3, LARGE), 8, (1, 1)))
    b.output(b.conv(x, 4, (1, 1)))


def of_all_kinds(b: Builder, refused: int) -> None:
    """Add convolutions, depthwise convolutions, poolings, and a matrix product."""
    x = b.conv(b.input([1, 6, SIZE, SIZE]), 6, (1, 1))
    kinds = [
        lambda: b.conv(x, 3, LARGE), lambda: b.max_pool(x, LARGE, (1, 1), (0, 0, 0, 0)), lambda: b.global_average(x),
        lambda: b.matmul(b.flatten(x), 5), lambda: b.conv(x, 6, LARGE, group=6),
    ]  # fmt: skip
    for number in range(refused):
        b.output(kinds[number % len(kinds)]())
    b.output(b.conv(x, 4, (3, 3)))


@pytest.mark.parametrize("refused", [0, 1, 5])
@pytest.mark.parametrize("make", [convolutions, of_all_kinds])
def test_all_refusals_are_found_in_one_build(
    builds: list[int], make: Callable[[Builder, int], None], refused: int
) -> None:
    b = Builder("qoperator", np.int8, seed=2)
    b.node_names = "none"
    make(b, refused)
    program = check(b, FunctionalDevice(CONFIGS["tight"]))
    assert len(builds) == (2 if refused else 1)
    layers = sum(len(launch.layers) for launch in program.launches)
    assert builds[0] - layers == refused and builds[-1] == layers
    reasons = [row["reason"] for row in program.placements if any(text in row["reason"] for text in FITS_NOT)]
    assert len(reasons) == refused
    assert all(row["place"] == "cpu" for row in program.placements if row["reason"] in reasons)


def test_reasons_are_those_of_their_nodes(builds: list[int]) -> None:
    b = Builder("qoperator", np.int8, seed=2)
    x = b.conv(b.input([1, 6, SIZE, SIZE]), 6, (1, 1))
    large = [b.conv(x, 3, LARGE), b.conv(x, 3, (29, 31)), b.global_average(x)]
    for y in large:
        b.output(y)
    rows = {row["name"]: row for row in check(b, FunctionalDevice(CONFIGS["tight"])).placements}
    first, second, third = (rows[f"{y.name}_node"]["reason"] for y in large)
    assert "31x31 kernel" in first and "29x31 kernel" in second and "output pixel" in third
    assert len(builds) == 2
