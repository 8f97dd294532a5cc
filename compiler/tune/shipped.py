"""Records that come with Celosia: schedules of networks that were tuned for the presets, for whoever has layers like
theirs. `python -m benchmarks.shipped` makes them.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from celosia.compiler.tune.records import Records
from celosia.hw.spec.config import PRESETS, Config

FOLDER = Path(__file__).parent / "presets"
SHIPPED, NONE = "shipped", "none"
"""What `compile` takes for the name of a file of records: those that come with Celosia, and none at all."""


@lru_cache
def shipped(cfg: Config) -> Records:
    """Those for `cfg`; empty where it is no preset that was tuned."""
    for preset in PRESETS.values():
        path = FOLDER / f"{preset.name}.jsonl"
        if preset.digest == cfg.digest and path.exists():
            return Records.load(path)
    return Records()


def asked_for(records: str | Path | None) -> Records | None:
    """What `compile` was given, to be joined with those that come with Celosia; None where it shall take none.
    RecordsError."""
    if records is None or str(records) == NONE:
        return None
    return Records() if str(records) == SHIPPED else Records.load(records)
