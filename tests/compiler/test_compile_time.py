"""The compiler's work grows linearly with the number of layers, measured in calls of Python functions."""

from __future__ import annotations

import cProfile
from pstats import Stats

import pytest
from benchmarks.compile_time import chain
from thorough import some

import celosia
from celosia.compiler.launch import blocks, order
from celosia.compiler.launch.image import Image
from celosia.hw.spec.config import Config

PIECE = 2
"""Layers that are looked at together here, so that few layers show what many do."""
RESIDENT, STREAMED = 6, 40
"""Rows and columns of images that stay on chip, and of ones that do not."""


def calls(layers: int, size: int) -> int:
    model = chain(layers, size)
    profile = cProfile.Profile()
    profile.enable()
    celosia.compile(model, "pynq")
    profile.disable()
    result = Stats(profile).total_calls  # type: ignore[attr-defined]
    assert isinstance(result, int)
    return result


def growth(size: int, least: int, more: int, most: int) -> float:
    """Return the cost of `most - more` layers divided by that of `more - few` layers."""
    calls(least, size)  # fill the caches that stay for the whole process
    counts = [calls(layers, size) for layers in (least, more, most)]
    return (counts[2] - counts[1]) / (counts[1] - counts[0])


@pytest.mark.parametrize("pieces", some([[4, 5, 6], [6, 8, 10]], [[4, 5, 6]]), ids=str)
@pytest.mark.parametrize("size", [RESIDENT, STREAMED])
def test_work_grows_with_layers(size: int, pieces: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is linear for at least four pieces, in none of which timing chooses the tiles."""
    monkeypatch.setattr(blocks, "CHAIN_WINDOW", PIECE)
    assert growth(size, *(count * PIECE for count in pieces)) < 1.1


@pytest.mark.thorough
def test_work_that_grows_with_their_square_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test finds quadratic work if all of a block is timed for each of its groups."""
    monkeypatch.setattr(blocks, "CHAIN_WINDOW", 1000)
    monkeypatch.setattr(blocks, "NEIGHBOUR_GROUPS", 1000)
    assert growth(4, 4, 8, 12) > 1.1


def timed_layers(layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many layers are lowered to be timed; those of a block count one by one."""
    count = 0
    build = order.build

    def counted(cfg: Config, launches: list[list[blocks.Layer]], *rest: object, **more: bool) -> Image:
        nonlocal count
        for layer in launches[0]:
            count += len(layer.layers) or 1
        return build(cfg, launches, *rest, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(order, "build", counted)
        celosia.compile(chain(layers, 8), "pynq", check=False)
    return count


def test_choosing_the_tiles_of_a_block_times_what_is_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timed_growth(monkeypatch) < 1.4 * 1.2


@pytest.mark.thorough
def test_a_search_that_times_whole_blocks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "NEIGHBOUR_GROUPS", 1000)
    assert timed_growth(monkeypatch) > 1.4 * 1.2


def timed_growth(monkeypatch: pytest.MonkeyPatch) -> float:
    """Return how many times as many layers are timed for 1.4 times as many layers of a network."""
    return timed_layers(14, monkeypatch) / timed_layers(10, monkeypatch)
