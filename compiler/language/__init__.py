"""The tile language: kernels in Python, for the accelerator and for the CPU (docs/language.md)."""

# ruff: noqa: F401, F403
from celosia.compiler.language.errors import LanguageError
from celosia.compiler.language.jit import Kernel, jit, quantised
from celosia.compiler.language.loops import range
from celosia.compiler.language.operators import op
from celosia.compiler.language.ops import *
from celosia.compiler.language.ops import broadcast_to as broadcast
from celosia.compiler.language.tile import Tile
from celosia.compiler.language.tuning import Config, autotune
