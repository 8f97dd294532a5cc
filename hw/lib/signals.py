"""Kinds of signals that many parts have."""

from __future__ import annotations

from functools import partial

from amaranth import Signal

Reg = partial(Signal, reset_less=True)
"""A register of data, without a reset: it means nothing before another signal says that it is valid."""
