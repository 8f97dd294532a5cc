"""The rules, a file for each kind, as data: terms, conditions, and what a proof needs to know."""

from __future__ import annotations

from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.rules.borders import BORDERS
from celosia.compiler.superoptimise.rules.convolutions import CONVOLUTIONS
from celosia.compiler.superoptimise.rules.floats import FLOATS
from celosia.compiler.superoptimise.rules.merging import MERGING
from celosia.compiler.superoptimise.rules.moving import MOVING
from celosia.compiler.superoptimise.rules.parts import PARTS
from celosia.compiler.superoptimise.rules.pixels import PIXELS
from celosia.compiler.superoptimise.rules.reals import REALS
from celosia.compiler.superoptimise.rules.sharing import SHARING
from celosia.compiler.superoptimise.rules.windows import WINDOWS

GROUPS: dict[str, tuple[RewriteRule, ...]] = {
    "merging": MERGING, "convolutions": CONVOLUTIONS, "sharing": SHARING, "moving": MOVING, "parts": PARTS,
    "borders": BORDERS, "pixels": PIXELS, "windows": WINDOWS,
}  # fmt: skip
RULES = tuple(rule for group in GROUPS.values() for rule in group)
"""Rules of integers and of movement. FLOATS are beside them, for models whose floats the CPU computes, and REALS, for
those whose floats may be rounded elsewhere."""
__all__ = ["FLOATS", "GROUPS", "REALS", "RULES", "WINDOWS"]
