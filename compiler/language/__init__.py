"""The tile language: kernels in Python, for the accelerator and for the CPU (docs/language.md).

In the order in which a kernel passes the files:

jit                   which arguments a kernel takes, and when it is compiled anew
tuning                which constexprs `autotune` chooses, and how they are measured
tile                  what a tile, a pointer, a store and a traced loop are, and how large; in which type and shape
                      operands meet
ops                   which functions kernels call, and which arguments they accept
dots                  the same for dot, requantise, lookup and residual_add
traced_loops          `cl.range`: its arguments (start, stop, step), and what it carries from iteration to iteration
interpreter           what each operation computes (numpy); CELOSIA_INTERPRET runs kernels so
scalar_bounds         which values a scalar has over all programs and iterations
tile_views            which element of its source each element of a reshape, broadcast or transposition is
cpu                   which loops a kernel becomes on the CPU, and which tiles lie in memory
loop_vectors          which of these loops become vectors
block_reader          which block of which array a program on the accelerator reads or writes
recognise             which kernel the accelerator can run: a sum of products, a maximum, or one of the next two
softmax_of_rows       which kernel is a softmax of rows
attention_kernels     which kernel is attention, or a product of two activations by heads
accelerator           which layer a sum, maximum or product becomes; how a kernel runs on a device
head_layers           which layers a softmax, attention or a product by heads becomes
lowered_kernel        how layers become a verified image (the base class of the last two)
custom_operators      which operators of ONNX models a function with kernels implements
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
