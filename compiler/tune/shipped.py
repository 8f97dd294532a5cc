"""Tuning records that come with Celosia for the presets; `python -m benchmarks.shipped` writes them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from celosia.compiler.tune.records import Records
from celosia.hw.spec.config import PRESETS, Config

FOLDER = Path(__file__).parent / "presets"
"""Folder with a file of records for each preset."""
SHIPPED, NONE = "shipped", "none"
"""Names that `compile` accepts instead of a file of records: those that come with Celosia, or none."""


@lru_cache
def shipped(cfg: Config) -> Records:
    """Load the records that come with Celosia for `cfg`; empty where it is no preset with records."""
    for preset in PRESETS.values():
        path = FOLDER / f"{preset.name}.jsonl"
        if preset.digest == cfg.digest and path.exists():
            return Records.load(path)
    return Records()


def load_requested(records: str | Path | None) -> Records | None:
    """Load the records that the option `records` of `compile` names. Raises RecordsError.

    They are added to those that come with Celosia, so SHIPPED gives empty ones. None: no records are to be used.
    """
    if records is None or str(records) == NONE:
        return None
    return Records() if str(records) == SHIPPED else Records.load(records)
