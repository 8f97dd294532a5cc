"""The rules that are written by hand, as data: terms before and after, conditions, and hints for the proof.

merging             convolutions and products of one input become one; also the functions that write terms for all files
convolutions        kernels of two sizes merged; padding, channels and groups into weights; strides into channels
sharing             results that are computed twice are computed once; constants of sums are added up
moving              byte functions, Slice, Concat, Transpose, Reshape and MaxPool change places
parts               Slices of Slices and of Concats
borders, pixels     part of a convolution is computed by a cheaper one, the rest apart
windows             MaxPool by rows and columns; averages as depthwise convolutions
floats              of floats on the CPU: rules that keep every sum as it is
reals               fast-math: rules that hold in real numbers
"""

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
"""Rules of integers and of movement, by the file that has them."""
RULES = tuple(rule for group in GROUPS.values() for rule in group)
"""All rules of integers and of movement. FLOATS come in addition for models whose floats the CPU computes, and REALS
for those that may be rounded differently.
"""
__all__ = ["FLOATS", "GROUPS", "REALS", "RULES", "WINDOWS"]
