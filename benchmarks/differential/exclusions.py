"""Where results may differ from onnxruntime's: documented steps, each with its reason. docs/numerics.md lists them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Exclusion:
    """Stretches with one of `operators` may differ by at most `steps` of the quantised tensor that ends them."""

    name: str
    operators: frozenset[str]
    steps: int
    reason: str


EXCLUSIONS: tuple[Exclusion, ...] = ()


def find(operators: Collection[str], steps: int) -> Exclusion | None:
    """The exclusion that allows a difference of `steps` in a stretch of `operators`."""
    return next((each for each in EXCLUSIONS if steps <= each.steps and not each.operators.isdisjoint(operators)), None)
