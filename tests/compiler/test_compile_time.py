"""The compiler's work grows with layers, not with their square: calls of Python functions are counted, not seconds."""

from __future__ import annotations

import cProfile
from functools import partial
from pstats import Stats

import pytest

import celosia
from benchmarks.compile_time import chain
from celosia.compiler import blocks
from celosia.hw.config import Config

PIECE = 10
"""Layers that are looked at together here, so that few layers show what many do."""
RESIDENT, STREAMED = 8, 56
"""Rows and columns of images that stay on chip, and of ones that do not."""


def calls(layers: int, size: int, config: str = "pynq") -> int:
    model = chain(layers, size)
    profile = cProfile.Profile()
    profile.enable()
    celosia.compile(model, config)
    profile.disable()
    found = Stats(profile).total_calls  # type: ignore[attr-defined]
    assert isinstance(found, int)
    return found


def growth(size: int) -> float:
    """What so many layers more cost where there are many, over what they cost where there are few."""
    calls(2 * PIECE, size)  # once: what is remembered for good
    few, more, most = (calls(pieces * PIECE, size) for pieces in (2, 4, 6))
    return (most - more) / (more - few)


@pytest.mark.parametrize("size", [RESIDENT, STREAMED])
def test_work_grows_with_layers(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "AT_ONCE", PIECE)
    assert growth(size) < 1.1


def test_more_than_linear_work_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where chains are looked at as a whole, blocks are defined once for each layer that joins them."""
    monkeypatch.setattr(blocks, "AT_ONCE", 1000)
    assert growth(RESIDENT) > 1.1


def timed_layers(layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Layers, and those of blocks, that are lowered to be timed."""
    count = 0
    build = blocks.build

    def counted(cfg: Config, launches: list[list[blocks.Layer]], *rest: object) -> blocks.Image:
        nonlocal count
        for layer in launches[0]:
            count += len(layer.layers) if isinstance(layer, blocks.Block) else 1
        return build(cfg, launches, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(blocks, "build", counted)
        celosia.compile(chain(layers, RESIDENT), "pynq", check=False)
    return count


def test_choosing_the_tiles_of_a_block_times_what_is_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = partial(timed_layers, monkeypatch=monkeypatch)
    assert timed(24) < 2.2 * timed(12)
    monkeypatch.setattr(blocks, "AROUND", 1000)
    assert timed(24) > 3 * timed(12)  # the whole block each time
