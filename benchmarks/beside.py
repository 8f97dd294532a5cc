"""Rows of `beside`: cycles by the timing model with layers of the vector unit behind convolutions, over beside them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import celosia
from benchmarks.gain import cycles
from benchmarks.rows import Request, Row, judged, skipped
from benchmarks.superoptimise import MADE, made
from benchmarks.workloads import WORKLOADS, Missing

NETWORKS = ("inception_v3", "inception", "squeezenet1_1", "u_net", "nasnet_cells")
OVERLAP = "beside"
"""The part of the compiler that is left out."""


def rows(asked: Request) -> Iterator[Row]:
    """A row for each of NETWORKS, or of those that were chosen."""
    config, memory = asked.preset, asked.memory
    for name in asked.models or NETWORKS:
        command = f"python -m benchmarks beside --models {name} --config {config} --memory {memory.name}"
        what = f"{name} on {config}: cycles by the timing model, without layers beside convolutions, over with them"
        asked.say(f"{name}: compiling with layers beside convolutions and without")
        with tempfile.TemporaryDirectory() as place:
            try:
                path = made(name, Path(place)) if name in MADE else WORKLOADS[name].path(asked.folder)
            except Missing as reason:
                yield skipped(f"beside/{name}", what, command, reason)
                continue
            before, after = (celosia.compile(path, config, check=False, without=out) for out in (OVERLAP, ()))
        slow, fast = cycles(before, memory), cycles(after, memory)
        products = 100 * after.macs_accelerator / after.config.macs_per_cycle / fast
        details = {"ratio": slow / fast, "before": slow, "after": fast, "products": products, "config": config}
        yield judged(f"beside/{name}", what, command, details, "ratio >= 1")
