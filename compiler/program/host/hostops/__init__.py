"""ONNX operators in numpy: control flow, sequences, strings, and other operators that are no loops over elements.

A function takes (op, *inputs) and returns an output, or a tuple of outputs; an optional input that is left out is None.

host_registry    which numpy function computes an operator: the table HOST and the decorator `host`
sized            operators on tensors of any size, so that no kernel is compiled for each size
control          If, Loop, Scan, constants, random numbers
shape_ops        shapes and views
scatter          selection, scattering, sorting
sequences        sequences and optionals
value_types      casts, and quantisation to element types that kernels lack
recurrent_ops    RNN, GRU, LSTM where no kernel can compute them
vision           sampling, boxes, pooling with indices, deformable convolution
signal           Fourier transforms, mel filters
text             strings, n-grams
images           decoding of image files
learning         optimisers, batch normalisation in training, trees
"""

from celosia.compiler.program.host.hostops import (  # they fill the table
    control,
    images,
    learning,
    recurrent_ops,
    scatter,
    sequences,
    shape_ops,
    signal,
    text,
    value_types,
    vision,
)
from celosia.compiler.program.host.hostops.host_registry import HOST, Array, host, numpy_type
from celosia.compiler.program.host.hostops.sized import sized_function, sized_names
from celosia.compiler.program.op_spec import operators_with

FIRST = operators_with("first")
"""Operators that run in numpy even though a kernel exists: compiling it would take longer than they take to run."""
RANDOM = operators_with("random")
"""Operators whose results differ each time."""

__all__ = [
    "FIRST", "HOST", "RANDOM", "Array", "control", "host", "images", "learning", "numpy_type", "recurrent_ops",
    "scatter", "sequences", "shape_ops", "signal", "sized_function", "sized_names", "text", "value_types", "vision",
]  # fmt: skip
