"""What proofs and tests may read inside a component, under names that stay when the code is rewritten."""

from __future__ import annotations

from typing import Any


def probes(component: Any, **signals: Any) -> None:
    """Declare signals, memories and submodules inside `component` that proofs read, under the names given here.

    A proof reads them as `inside["name"]`. The names stay when variables of the code are renamed. Declarations are no
    part of the hardware: they do not change its digest (`sources.py`).
    """
    vars(component).setdefault("probes", {}).update(signals)
