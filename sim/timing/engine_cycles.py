"""Cycles that softmax and norm take in their engines."""

from __future__ import annotations

from typing import Any

from celosia.hw.spec.config import Config
from celosia.hw.spec.pipeline import (
    DIVIDE_STAGES,
    MIN_NORM_ROW_CYCLES,
    ROOT_BITS,
    SHARE_STAGES,
    norm_parts,
    softmax_parts,
    softmax_span,
    tile_rows,
)

ACCEPT_TO_READ = 2
"""A softmax is accepted -> its first read of vin."""
READ_TO_DONE = SHARE_STAGES + DIVIDE_STAGES + 2
"""The last read of vin by a softmax -> it is done."""
_TO_MOMENTS, _FROM_MOMENTS = 6, MIN_NORM_ROW_CYCLES + ROOT_BITS + 25
"""Registers of a norm between a part of an entry and the row's sums, without the levels of the tree of adders; and
between these sums and the factors that are kept of the row."""


def softmax_beats(cfg: Config, entries: Any) -> Any:
    """Count the beats in which softmax reads a row of `entries` entries; a number, or an array of them."""
    return -(-entries // softmax_span(cfg))


def softmax_tail_cycles(cfg: Config, rows: Any, entries: Any) -> Any:
    """Count the cycles of a softmax from the first sum to its end, for `rows` rows of `entries` entries each.

    They are one beat for each row of the first tile but the last one, the sums of all tiles, and the quotients of the
    last tile.
    """
    tile, groups = tile_rows(cfg), softmax_beats(cfg, entries)
    others = (rows - 1) // tile
    beats = tile - 1 + (others + 1) * tile * groups + (rows - tile * others) * groups
    return beats * softmax_parts(cfg) + READ_TO_DONE


def softmax_cycles(cfg: Config, rows: Any, entries: Any) -> Any:
    """Count the cycles from the start of a VECTOR with softmax to its end, if no other one is under way.

    rows, entries: `rows` rows of `entries` entries each; numbers, or arrays of them. The search for the largest bytes
    of the first tile takes a cycle for each read.

    >>> softmax_cycles(Config(softmax=4), rows=16, entries=4), softmax_cycles(Config(softmax=4), rows=160, entries=4)
    (661, 2965)
    """
    many = rows > tile_rows(cfg)
    first = rows * (1 - many) + tile_rows(cfg) * many
    return ACCEPT_TO_READ + first * softmax_beats(cfg, entries) + softmax_tail_cycles(cfg, rows, entries)


def norm_cycles(cfg: Config, rows: Any, groups: Any) -> Any:
    """Count the cycles from the start of a VECTOR with norm to its first step.

    rows, groups: `rows` rows of `groups` entries each; numbers, or arrays of them.

    >>> norm_cycles(Config(norm=8), rows=64, groups=24), norm_cycles(Config(norm=8), rows=1, groups=1)
    (3164, 94)
    """
    entries = groups * norm_parts(cfg)
    short = entries < MIN_NORM_ROW_CYCLES
    each = entries * (1 - short) + MIN_NORM_ROW_CYCLES * short
    return (rows - 1) * each + entries + _TO_MOMENTS + cfg.norm.bit_length() - 1 + _FROM_MOMENTS
