"""Where bytes may differ from onnxruntime's: documented steps, each with its reason. docs/numerics.md lists them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exclusion:
    """A quantised tensor that operator `maker` made in onnxruntime's optimised graph may differ by `steps`.

    ties: only where rounding of floats alone, as `judge.Neighbourhood` measures it, moves what is quantised across a
    tie.
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
        "16-bit tensors); what lies within that rounding of a tie goes either way",
    ),
)  # fmt: skip


def table() -> str:
    """EXCLUSIONS in Markdown."""
    lines = ["| what | steps | why |", "|---|---|---|"]
    for each in EXCLUSIONS:
        where = ", next to ties" if each.ties else ""
        lines.append(f"| {each.name} | {each.steps}{where} | {each.reason} |")
    return "\n".join(lines)


def excuse(maker: str, steps: int, tie: bool) -> Exclusion | None:
    """The exclusion that allows such a difference."""
    for each in EXCLUSIONS:
        if each.maker == maker and 0 < steps <= each.steps and (tie or not each.ties):
            return each
    return None
