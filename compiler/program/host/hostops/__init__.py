"""ONNX operators in numpy: control flow, sequences, strings, and other operators that are no loops over elements.

A function takes (op, *inputs) and returns an output, or a tuple of outputs; an optional input that is left out is None.

sized            operators that kernels compute, too: those on shapes, which always run in numpy, and those on tensors
                 of any size, so that no kernel is compiled for each size
control          If, Loop, Scan, constants, random numbers, sequences and optionals
scatter          selection, scattering, sorting, linear algebra
value_types      casts, and quantisation to element types that kernels lack
recurrent_ops    RNN, GRU, LSTM where no kernel can compute them; which activation functions recurrent layers apply
vision           sampling, boxes, pooling with indices, deformable convolution
preprocessing    decoding of image files, Fourier transforms and mel filters, strings and labels
learning         optimisers, batch normalisation in training
tabular          operators of ai.onnx.ml on rows of features: scaling, encoding, linear models, trees
"""

from celosia.compiler.program.host.hostops import (  # they fill the table
    control,
    learning,
    preprocessing,
    recurrent_ops,
    scatter,
    tabular,
    value_types,
    vision,
)
from celosia.compiler.program.host.hostops.sized import sized_function, sized_names
from celosia.compiler.program.host.op import HOST
from celosia.compiler.program.op_spec import operators_with

NUMPY_FIRST = operators_with("prefers_numpy")
"""Operators that run in numpy even though a kernel exists: compiling it would take longer than they take to run."""
RANDOM = operators_with("random")
"""Operators whose results differ each time."""

__all__ = [
    "HOST",
    "NUMPY_FIRST",
    "RANDOM",
    "control",
    "learning",
    "preprocessing",
    "recurrent_ops",
    "scatter",
    "sized_function",
    "sized_names",
    "tabular",
    "value_types",
    "vision",
]  # fmt: skip
