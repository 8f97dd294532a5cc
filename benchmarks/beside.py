"""Rows of `beside`: cycles by the timing model with layers of the vector unit behind convolutions, over beside them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import celosia
from benchmarks.gain import cycles
from benchmarks.rows import Row
from benchmarks.superoptimise import MADE, made
from benchmarks.workloads import WORKLOADS, Missing
from celosia.hw.boards.memory import MemoryModel

NETWORKS = ("inception_v3", "inception", "squeezenet1_1", "u_net", "nasnet_cells")
OVERLAP = "beside"
"""The part of the compiler that is left out."""


def rows(
    folder: Path | None, models: tuple[str, ...], config: str, memory: MemoryModel, say: Callable[[str], None]
) -> Iterator[Row]:
    """A row for each of NETWORKS, or of `models`."""
    for name in models or NETWORKS:
        command = f"python -m benchmarks beside --models {name} --config {config} --memory {memory.name}"
        what = f"{name} on {config}: cycles by the timing model, without layers beside convolutions, over with them"
        head = f"beside/{name}", what, "≥ 1"
        say(f"{name}: compiling with layers beside convolutions and without")
        with tempfile.TemporaryDirectory() as place:
            try:
                path = made(name, Path(place)) if name in MADE else WORKLOADS[name].path(folder)
            except Missing as reason:
                yield Row(*head, f"skipped: {reason}", None, command)
                continue
            before, after = (celosia.compile(path, config, check=False, without=out) for out in (OVERLAP, ()))
        slow, fast = cycles(before, memory), cycles(after, memory)
        share = after.macs_accelerator / after.config.macs_per_cycle / fast
        details = {"config": config, "before": slow, "after": fast, "ratio": slow / fast, "products": 100 * share}
        text = f"{slow / fast:.3f} ({slow:,} to {fast:,}, of which products are {share:.1%})"
        yield Row(*head, text, fast <= slow, command, details)
