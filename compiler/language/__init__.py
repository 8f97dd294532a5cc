"""The tile language: kernels in Python, for the accelerator and for the CPU (docs/language.md).

In the order in which a kernel passes the files:

jit                   which arguments a kernel takes, and when it is compiled anew
tuning                which constexprs `autotune` chooses, and how they are measured
tile                  what a tile, a pointer, a store and a traced loop are, and how large; in which type and shape
                      operands meet; which line of a kernel an error names
ops                   which functions kernels call, and which arguments they accept
traced_loops          `cl.range`: its arguments (start, stop, step), and what it carries from iteration to iteration;
                      which values a scalar has over all programs and iterations
interpreter           what each operation computes (numpy); CELOSIA_INTERPRET runs kernels so
cpu                   which loops a kernel becomes on the CPU, and which tiles lie in memory
loop_vectors          which of these loops become vectors
block_reader          which block of which array a program on the accelerator reads or writes, and which element of it
                      each element of a reshape, broadcast or transposition is
recognise             which kernel the accelerator can run: a sum of products, a maximum, or one of the next file
attention_kernels     which kernel is attention, a product of two activations by heads, or a softmax of rows
accelerator           which layers a recognised kernel becomes, with which tiles; how it becomes a verified image; how
                      it runs on a device
custom_operators      which operators of ONNX models a function with kernels implements
"""

# ruff: noqa: F401, F403
from celosia.compiler.language.custom_operators import op
from celosia.compiler.language.jit import Kernel, jit, quantised
from celosia.compiler.language.ops import *
from celosia.compiler.language.ops import broadcast_to as broadcast
from celosia.compiler.language.tile import LanguageError, Tile
from celosia.compiler.language.traced_loops import range
from celosia.compiler.language.tuning import Config, autotune
