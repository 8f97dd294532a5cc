"""The rules, a file for each kind, as data: terms, conditions, and what a proof needs to know."""

from __future__ import annotations

from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.rules.merging import MERGING
from celosia.compiler.superoptimise.rules.parts import PARTS

RULES: tuple[RewriteRule, ...] = (*MERGING, *PARTS)
"""All of them."""
