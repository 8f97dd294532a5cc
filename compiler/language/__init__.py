"""The tile language: kernels in Python, for the accelerator and for the CPU (docs/language.md).

jit, tuning           when a kernel is compiled, and which constexprs it uses
tile, ops, dots       what a tile is, and which functions make tiles of tiles
traced_loops          what a loop carries from iteration to iteration
interpreter           what each operation means (numpy)
scalar_bounds         which values a scalar has over all programs and iterations
tile_views            which element of a source each element of a view is
cpu, cpu_products     which loops a kernel becomes on the CPU
vectors               which of these loops become vectors
block_reader          which block of which array a program reads or writes
recognise, rows, attention_kernels    which layer a kernel is on the accelerator
accelerator, heads, lowered           which layers and instructions that gives
custom_operators      which operators of ONNX models a kernel implements
language_errors       which line of a kernel an error names
"""

# ruff: noqa: F401, F403
from celosia.compiler.language.custom_operators import op
from celosia.compiler.language.jit import Kernel, jit, quantised
from celosia.compiler.language.language_errors import LanguageError
from celosia.compiler.language.ops import *
from celosia.compiler.language.ops import broadcast_to as broadcast
from celosia.compiler.language.tile import Tile
from celosia.compiler.language.traced_loops import range
from celosia.compiler.language.tuning import Config, autotune
