"""Confirm the points of a front: count their cells by Yosys, or run the models on the simulated RTL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from celosia.bitstreams import timing
from celosia.bitstreams.cells import PART
from celosia.bitstreams.synthesis import measure_usage
from celosia.compiler.compile import compile
from celosia.driver.choices import WAYS
from celosia.driver.data.arrays import read_inputs
from celosia.driver.explore.explorer import Explorer
from celosia.driver.explore.ladder import Ladder
from celosia.driver.explore.model_cost import ExploredModel
from celosia.driver.explore.records import RUNGS, Point
from celosia.driver.explore.resource_use import Resources
from celosia.driver.runtime import Runtime
from celosia.hw.spec.config import Config

Say = Callable[[str], None]
"""Progress callback: called with a sentence."""


def confirm_front(explorer: Explorer, ways: Sequence[str], say: Say, is_over: Callable[[], bool]) -> None:
    """Confirm points of the front until all are confirmed, or the time `is_over`.

    A confirmed point may leave the front, and others take its place, which are confirmed, too. ways: of WAYS. say:
    called with the name of each stage.
    """
    for way in (name for name in WAYS if name in ways):
        while not is_over():
            unconfirmed = [point for point in explorer.front if not _is_confirmed(point, way)]
            if not unconfirmed:
                break
            point = unconfirmed[0]
            say(f"{way} of {point.cfg.digest[:6]}, {len(unconfirmed)} of the front to do")
            confirmed = _CONFIRM[way](explorer.ladder, point, say)
            explorer.ladder.points.add(confirmed)
            explorer.ladder.refit()
            explorer.refresh_measured()


def _is_confirmed(point: Point, way: str) -> bool:
    """Whether Yosys has counted this point, or the RTL has run its models."""
    return point.rtl is not None if way == "rtl" else bool(point.area["counted"]) and point.rung != "timed"


def _confirm_by_yosys(ladder: Ladder, point: Point, say: Say) -> Point:
    """Return the point with its area as Yosys counts it, and a clock estimate where the device's delays are known.

    SynthesisError.
    """
    device = ladder.board.device
    measure_usage(point.cfg, device, say)
    mhz = timing.estimate(point.cfg, say=say).mhz if device.name == PART else None
    area = asdict(Resources.of(point.cfg, device))
    return replace(point, rung=_higher_rung(point, "yosys"), area=area, clock_mhz=mhz, at=ladder.clock())


def _confirm_on_rtl(ladder: Ladder, point: Point, say: Say) -> Point:
    """Return the point with the cycles of each model on the RTL."""
    cycles = {
        subject.name: measure_rtl_cycles(ladder.model_on(point, subject), point.cfg, ladder.memory)
        for subject in ladder.subjects
    }
    return replace(point, rung=_higher_rung(point, "rtl"), rtl=cycles, at=ladder.clock())


def measure_rtl_cycles(subject: ExploredModel, cfg: Config, memory: str) -> int:
    """Measure the cycles of a run with random inputs on the RTL, compiled as `model_cost.measure_cycles` does."""
    program = compile(subject.path, cfg, check=False, records="none")
    inputs = read_inputs([], program.inputs, random=True)
    with Runtime(program, "rtl", memory=memory) as runtime:
        return int(runtime.run(inputs).report["cycles"])


def _higher_rung(point: Point, rung: str) -> str:
    """Return the higher one of the point's rung and `rung`: Yosys may confirm a point after the RTL has."""
    return max(point.rung, rung, key=RUNGS.index)


_CONFIRM: dict[str, Callable[[Ladder, Point, Say], Point]] = dict(
    zip(WAYS, (_confirm_by_yosys, _confirm_on_rtl), strict=True)
)
"""Functions that confirm a point, by way of WAYS."""
