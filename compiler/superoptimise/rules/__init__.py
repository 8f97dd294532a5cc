"""The rules that are written by hand, as data: terms before and after, conditions, and hints for the proof.

products    convolutions and products: merged, split, and computed by cheaper ones; functions that write terms
movement    byte functions, Slice, Concat, Transpose, Reshape and MaxPool change places, go, or are shared
windows     MaxPool by rows and columns; averages as depthwise convolutions
floats      of floats on the CPU: rules that keep every sum as it is, and fast-math's, which hold in real numbers
"""

from __future__ import annotations

from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.rules.floats import FLOATS, REALS
from celosia.compiler.superoptimise.rules.movement import MOVING, PARTS, SHARING
from celosia.compiler.superoptimise.rules.products import BORDERS, CONVOLUTIONS, MERGING, PIXELS
from celosia.compiler.superoptimise.rules.windows import WINDOWS

GROUPS: dict[str, tuple[RewriteRule, ...]] = {
    "merging": MERGING, "convolutions": CONVOLUTIONS, "sharing": SHARING, "moving": MOVING, "parts": PARTS,
    "borders": BORDERS, "pixels": PIXELS, "windows": WINDOWS,
}  # fmt: skip
"""Rules of integers and of movement by their kind."""
RULES = tuple(rule for group in GROUPS.values() for rule in group)
"""All rules of integers and of movement. FLOATS come in addition for models whose floats the CPU computes, and REALS
for those that may be rounded differently.
"""
__all__ = ["FLOATS", "GROUPS", "REALS", "RULES", "WINDOWS"]
