"""Count the toggles of a waveform that is written by hand."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from benchmarks.toggles import Toggles, WaveError, toggles

Name = tuple[str, ...]
HEAD = """$timescale 1ps $end
$scope module top $end
 $var wire 1 c clk $end
 $var wire 1 b busy $end
 $scope module unit $end
  $var wire 1 c clk $end
  $var wire 4 # sum [3:0] $end
  $var wire 8 m memory[0] [7:0] $end
  $var wire 9 w wide [8:0] $end
 $upscope $end
 $scope module other $end
  $var wire 4 # also [3:0] $end
 $upscope $end
$upscope $end
$enddefinitions $end
"""
CLOCK, BUSY = ("top", "clk"), ("top", "busy")


def counted(changes: str, **more: object) -> dict[str, Toggles]:
    def works(values: Mapping[Name, int]) -> bool:
        return values[BUSY] == 1

    def part_of(name: Name) -> str | None:
        return name[1] if len(name) > 2 else None

    return toggles((HEAD + changes).splitlines(), part_of, CLOCK, {"unit": works}, [BUSY], **more)  # type: ignore[arg-type]


def test_a_cycle_ends_before_the_edge_of_the_next() -> None:
    """The bits of a cycle, and its `busy`, are those before the next edge, in any order within a time."""
    toggles_by_part = counted(
        "#0\n0c\n0b\nb0000 #\nb000000000 w\n"
        "#1\n1c\nb1111 #\n"  # first edge: four bits
        "#2\n0c\n1b\n"  # ... of a cycle in which the unit works
        "#3\nb1110 #\n1c\n"  # second: one bit
        "#4\n0c\n0b\n"
        "#5\nb000000011 w\n1c\n#6\n0c\n"  # a cycle that does not end: it does not count
    )
    unit = toggles_by_part["unit"]
    assert (unit.bits, unit.working_cycles, unit.waiting_cycles) == (13, 1, 1)
    assert (unit.working, unit.waiting) == (4, 1) and unit.rate(True) == pytest.approx(4 / 13)
    assert "other" not in toggles_by_part or toggles_by_part["other"].bits == 0  # a net with two names counts once


def test_cycles_that_do_not_count() -> None:
    edges = "".join(
        f"#{2 * n}\n1c\nb{n % 2 * 15:04b} #\n#{2 * n + 1}\n0c\n{'1' if n > 4 else '0'}b\n" for n in range(9)
    )
    unit = counted("0c\n" + edges, counts=lambda values: values[BUSY] == 1)["unit"]
    assert unit.working_cycles == 3 and unit.waiting_cycles == 0 and unit.working == 12


def test_undefined_bits_and_no_cycles() -> None:
    unit = counted("#0\n0c\nbxxxx #\n#1\n1c\nb0x11 #\n#2\n0c\n#3\n1c\n")["unit"]
    assert unit.waiting == 2 and Toggles().rate(True) == 0


def test_what_is_no_waveform() -> None:
    with pytest.raises(WaveError, match="definitions do not end"):
        toggles(["$scope module top $end"], lambda name: "a", CLOCK, {})
    with pytest.raises(WaveError, match=r"no signal top\.nothing"):
        toggles(HEAD.splitlines(), lambda name: "a", CLOCK, {}, [("top", "nothing")])
