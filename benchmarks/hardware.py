"""Rows of `make bench-hw`: what the hardware takes of each device, and how fast it is. Extend `ROWS`."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.rows import Row
from celosia.bitstreams.boards import BOARDS
from celosia.bitstreams.devices import DEVICES
from celosia.bitstreams.ecp5 import Design, build
from celosia.bitstreams.synthesis import LABELS, usage
from celosia.hw.config import PRESETS

Say = Callable[[str], None]
MARGIN = {"pynq": 10.0}
"""Percent of each resource that a preset leaves free on its board's device."""
FMAX = {4: 100.0, 8: 90.0}
"""MHz on the ECP5, by the size of the array."""
COMMAND = "python -m benchmarks hardware"


def _measured(row: Row, measure: Callable[[Row], Row]) -> Row:
    try:
        return measure(row)
    except Exception as error:
        return dataclasses.replace(row, measured=f"failed: {type(error).__name__}: {error}", met=False)


def resources(say: Say) -> Iterator[Row]:
    """Each board's preset, and `tiny`, on its device. `huge` is for simulation only."""
    devices = {board.platform.device: board.preset for board in BOARDS.values()}
    for name, preset in devices.items():
        for config in (preset, "tiny"):
            margin = MARGIN.get(config, 0.0) if config == preset else 0.0
            target = f"at least {margin:g}% of each left" if margin else "fits"
            say(f"synthesis of {config} for {name}")

            def measure(row: Row, config: str = config, name: str = name, margin: float = margin) -> Row:
                used = usage(PRESETS[config], DEVICES[name], lambda step: say(f"synthesis of {config}, {name}: {step}"))
                left = used.left(DEVICES[name])
                text = ", ".join(f"{getattr(used, r):,g} {label} ({left[r]:.1f}% left)" for r, label in LABELS.items())
                met = all(percent >= margin for percent in left.values())
                text += f"; {used.seconds:.0f} s"
                return dataclasses.replace(row, measured=text, met=met, details=dataclasses.asdict(used))

            head = Row(f"hardware/{name}/{config}", f"{config} on {name}", target, "", None, COMMAND)
            yield _measured(head, measure)


def ecp5(say: Say) -> Iterator[Row]:
    """The gemm unit with its scratchpads, and the whole accelerator, placed and routed."""
    for design in Design:
        for size, target in FMAX.items():
            tiny = PRESETS["tiny"]
            cfg = dataclasses.replace(tiny, block_in=size, block_out=size, name=f"{size}x{size}")

            def measure(row: Row, cfg=cfg, design: Design = design, target: float = target) -> Row:  # type: ignore[no-untyped-def]
                with tempfile.TemporaryDirectory() as folder:
                    result = build(cfg, design, Path(folder), 1.1 * target, say)
                text = f"{result.fmax_mhz} MHz; {', '.join(f'{n} {cell}' for cell, n in result.used.items())}"
                text += f"; {sum(result.seconds.values()):.0f} s"
                met = result.fmax_mhz >= target
                return dataclasses.replace(row, measured=text, met=met, details=dataclasses.asdict(result))

            key, what = f"hardware/ecp5/{design.value}/{cfg.name}", f"{design.value} {cfg.name} on ECP5-85F"
            yield _measured(Row(key, what, f"at least {target:g} MHz", "", None, COMMAND), measure)


ROWS: list[Callable[[Say], Iterator[Row]]] = [resources, ecp5]


def rows(say: Say) -> Iterator[Row]:
    for each in ROWS:
        yield from each(say)
