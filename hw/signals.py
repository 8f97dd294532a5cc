"""Signals of a kind that many parts have, and those that proofs read."""

from __future__ import annotations

from functools import partial
from typing import Any

from amaranth import Signal

Reg = partial(Signal, reset_less=True)
"""A register of data, without a reset: it means nothing before another signal says that it is valid."""


def probes(component: Any, **signals: Any) -> None:
    """Declare signals, memories and submodules inside `component` that proofs read, under the names given here.

    A proof reads them as `inside["name"]`. The names stay when variables of the code are renamed.
    """
    vars(component).setdefault("probes", {}).update(signals)
