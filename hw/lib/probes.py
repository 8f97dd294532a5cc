"""Declare names for signals inside a component, by which proofs and tests read them."""

from __future__ import annotations

from typing import Any


def probes(component: Any, **signals: Any) -> None:
    """Declare signals, memories and submodules inside `component` for proofs, by the names of the arguments.

    A proof reads them as `inside["name"]`, so that a local variable of the code may be renamed without a change of the
    proof. Declarations do not change the hardware, nor its digest (`sources.py`).
    """
    vars(component).setdefault("probes", {}).update(signals)
