"""Registry of the operators that run in numpy."""

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
Function = Callable[..., Any]
"""(op, *inputs) -> output, or a tuple of outputs. Inputs left out are None. With subgraphs also run= (control.Run)."""

HOST: dict[tuple[str, str], Function] = {}
"""(domain, operator) -> function."""


KNOWN_DOMAINS = (*DOMAINS, "ai.onnx.ml", "ai.onnx.preview.training")
"""Domains of the operators that have a row in program/op_spec.py; rows are kept by name alone."""


def host(*names: str, domain: str = "", **facts: Any) -> Callable[[Function], Function]:
    """Return a decorator that registers a function, and enters `facts` in the rows of its operators
    (program/op_spec.py).
    """

    def register(function: Function) -> Function:
        for name in names:
            if (domain, name) in HOST:
                raise TypeError(f"{name}: defined twice, by {HOST[domain, name].__name__} and {function.__name__}")
            HOST[domain, name] = function
            if domain in KNOWN_DOMAINS:  # an operator of a user's may share a name with one of ONNX
                state(name, domain=domain, **facts)
        return function

    return register


def numpy_type(onnx_type: int) -> np.dtype[Any]:
    """Return the numpy type of an ONNX type; strings are objects."""
    return numpy_dtype(ONNX_TYPES[onnx_type])


def int_list(value: Any) -> list[int]:
    """Convert an attribute or array to a list of integers."""
    return [int(v) for v in np.asarray(value).reshape(-1)]
