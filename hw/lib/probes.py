"""Names for signals inside a component, which proofs and tests read whatever the code calls them."""

from __future__ import annotations

from typing import Any


def probes(component: Any, **signals: Any) -> None:
    """Declare signals, memories and submodules inside `component` that proofs read, under the names given here.

    A proof reads them as `inside["name"]`. The names stay when variables of the code are renamed. Declarations are no
    part of the hardware: they do not change its digest (`sources.py`).
    """
    vars(component).setdefault("probes", {}).update(signals)
