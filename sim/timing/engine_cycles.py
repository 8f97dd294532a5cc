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
"""Cycles from accepting a softmax to its first read of vin."""
READ_TO_DONE = SHARE_STAGES + DIVIDE_STAGES + 2
"""Cycles from the last read of vin by a softmax to its end."""
_READ_TO_SUMS, _SUMS_TO_FACTORS = 6, MIN_NORM_ROW_CYCLES + ROOT_BITS + 25
"""Cycles of a norm from the last read of a row to its sums, without the levels of the tree of adders; and from these
sums to the row's factors."""


def softmax_beats(cfg: Config, entries: Any) -> Any:
    """Count the beats (reads of vin) in which softmax reads a row once.

    entries: entries of the row; a number, or an array of them.
    """
    return -(-entries // softmax_span(cfg))


def softmax_tail_cycles(cfg: Config, rows: Any, entries: Any) -> Any:
    """Count the cycles of a softmax from the first sum to its end, for `rows` rows of `entries` entries each.

    They are one beat for each row of the first tile but the last one, the sums of all tiles, and the quotients of the
    last tile.
    """
    tile, row_beats = tile_rows(cfg), softmax_beats(cfg, entries)
    full_tiles = (rows - 1) // tile  # tiles before the last one
    beats = tile - 1 + (full_tiles + 1) * tile * row_beats + (rows - tile * full_tiles) * row_beats
    return beats * softmax_parts(cfg) + READ_TO_DONE


def softmax_cycles(cfg: Config, rows: Any, entries: Any) -> Any:
    """Count the cycles from the start of a VECTOR with softmax to its end, if no other one is under way.

    rows, entries: `rows` rows of `entries` entries each; numbers, or arrays of them. The search for the largest bytes
    of the first tile takes a cycle for each read.

    >>> softmax_cycles(Config(softmax=4), rows=16, entries=4), softmax_cycles(Config(softmax=4), rows=160, entries=4)
    (661, 2965)
    """
    has_several_tiles = rows > tile_rows(cfg)  # plain arithmetic, for numbers and arrays alike
    first_tile = rows * (1 - has_several_tiles) + tile_rows(cfg) * has_several_tiles
    return ACCEPT_TO_READ + first_tile * softmax_beats(cfg, entries) + softmax_tail_cycles(cfg, rows, entries)


def norm_cycles(cfg: Config, rows: Any, groups: Any) -> Any:
    """Count the cycles from the start of a VECTOR with norm to its first step.

    rows, groups: `rows` rows of `groups` entries each; numbers, or arrays of them.

    >>> norm_cycles(Config(norm=8), rows=64, groups=24), norm_cycles(Config(norm=8), rows=1, groups=1)
    (3164, 94)
    """
    entries = groups * norm_parts(cfg)
    is_short = entries < MIN_NORM_ROW_CYCLES
    row_cycles = entries * (1 - is_short) + MIN_NORM_ROW_CYCLES * is_short
    return (rows - 1) * row_cycles + entries + _READ_TO_SUMS + cfg.norm.bit_length() - 1 + _SUMS_TO_FACTORS
