"""ONNX operators in numpy: those that are no loops over elements."""

from celosia.compiler.program.host.hostops import (  # they fill the table
    control,
    images,
    learning,
    recurrent,
    scatter,
    sequences,
    shapes,
    signal,
    text,
    types,
    vision,
)
from celosia.compiler.program.host.hostops.registry import HOST, Array, host, numpy_type
from celosia.compiler.program.host.hostops.sized import sized_function, sized_names
from celosia.compiler.program.op_spec import operators_with

FIRST = operators_with("first")
"""Operators that run here even though there are kernels for them."""
RANDOM = operators_with("random")
"""Operators that return something else each time."""

__all__ = [
    "FIRST", "HOST", "RANDOM", "Array", "control", "host", "images", "learning", "numpy_type", "recurrent", "scatter",
    "sequences", "shapes", "signal", "sized_function", "sized_names", "text", "types", "vision",
]  # fmt: skip
