"""The table of the operators that run in numpy (HOST), the decorator that fills it, and conversions that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program.dtypes import ONNX_TYPES, numpy_dtype
from celosia.compiler.program.host.op import DOMAINS
from celosia.compiler.program.op_spec import state

Array = NDArray[Any]
Value = Any
"""An array, a list of values (a sequence), or None (an empty optional)."""
Function = Callable[..., Any]
"""Function of (op, *inputs) that returns an output or a tuple of outputs.

For an operator with subgraphs it also takes run=, a function that runs one (control.Run).
"""

HOST: dict[tuple[str, str], Function] = {}
"""(domain, operator) -> function."""
KNOWN_DOMAINS = (*DOMAINS, "ai.onnx.ml", "ai.onnx.preview.training")
"""Domains whose operators have rows in program/op_spec.py, which are found by the operator's name alone."""


def host(*names: str, domain: str = "", **facts: Any) -> Callable[[Function], Function]:
    """Return a decorator that registers a numpy function for the operators `names` of a domain.

    facts: fields of their OpSpec, which it fills in. The decorator raises TypeError where an operator has a function.
    """

    def register(function: Function) -> Function:
        for name in names:
            if (domain, name) in HOST:
                raise TypeError(f"{name}: defined twice, by {HOST[domain, name].__name__} and {function.__name__}")
            HOST[domain, name] = function
            if domain in KNOWN_DOMAINS:  # a user's operator in a domain of its own may share a name with one of ONNX
                state(name, domain=domain, **facts)
        return function

    return register


def numpy_type(onnx_type: int) -> np.dtype[Any]:
    """Return the numpy type of an ONNX type; strings are objects."""
    return numpy_dtype(ONNX_TYPES[onnx_type])


def int_list(value: Any) -> list[int]:
    """Convert an attribute or array to a list of integers."""
    return [int(v) for v in np.asarray(value).reshape(-1)]
