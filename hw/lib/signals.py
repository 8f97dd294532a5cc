"""Kinds of signals that many parts of the hardware have."""

from __future__ import annotations

from functools import partial

from amaranth import Signal

Reg = partial(Signal, reset_less=True)
"""A data register without a reset, which saves routing: its value counts only when a `valid` signal says so."""
