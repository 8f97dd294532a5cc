"""List the documented differences from onnxruntime's bytes, each with its reason; docs/numerics.md shows the list."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exclusion:
    """A quantised tensor that operator `maker` made in onnxruntime's optimised graph may differ by `steps`.

    ties: the difference is allowed only if rounding of floats alone moves the quantised value across a tie, as
    `judge.Neighbourhood` measures it.
    """

    name: str
    maker: str
    steps: int
    ties: bool
    reason: str


EXCLUSIONS: tuple[Exclusion, ...] = (
    Exclusion(
        "floats between DequantizeLinear and QuantizeLinear", "QuantizeLinear", 1, True,
        "onnxruntime has no integer operator and computes float32 in an order of its own (means, ConvTranspose, "
        "products before a Relu that the quantised range does not make superfluous, Atan, "
        "16-bit tensors); a value that lies nearer to a tie than this rounding error may be rounded up or down",
    ),
)  # fmt: skip


def table() -> str:
    """Return EXCLUSIONS as a table in Markdown."""
    lines = ["| what | steps | why |", "|---|---|---|"]
    for exclusion in EXCLUSIONS:
        condition = ", next to ties" if exclusion.ties else ""
        lines.append(f"| {exclusion.name} | {exclusion.steps}{condition} | {exclusion.reason} |")
    return "\n".join(lines)


def excuse(maker: str, steps: int, tie: bool) -> Exclusion | None:
    """Return the exclusion that allows such a difference, or None."""
    for exclusion in EXCLUSIONS:
        if exclusion.maker == maker and 0 < steps <= exclusion.steps and (tie or not exclusion.ties):
            return exclusion
    return None
