"""The rules, a file for each kind, as data: terms, conditions, and what a proof needs to know."""

from __future__ import annotations

from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.rules.convolutions import CONVOLUTIONS
from celosia.compiler.superoptimise.rules.merging import MERGING
from celosia.compiler.superoptimise.rules.moving import MOVING
from celosia.compiler.superoptimise.rules.parts import PARTS
from celosia.compiler.superoptimise.rules.sharing import SHARING

RULES: tuple[RewriteRule, ...] = (*MERGING, *CONVOLUTIONS, *SHARING, *MOVING, *PARTS)
"""All of them."""
