"""Activation functions of recurrent layers (LSTM, GRU, RNN), read from their attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Activation = tuple[str, tuple[float, ...]]
"""Lower-case name of a function, and its parameters."""

DEFAULT_PARAMETERS: dict[str, tuple[float, ...]] = {
    "affine": (1.0, 0.0), "elu": (1.0,), "hardsigmoid": (0.2, 0.5), "leakyrelu": (0.01,), "scaledtanh": (1.0, 1.0),
    "thresholdedrelu": (1.0,),
}  # fmt: skip
"""Function -> its default parameters: alpha, or alpha and beta. Functions without parameters are not listed."""


def activations(attrs: Mapping[str, Any], default: Sequence[str], directions: int) -> list[list[Activation]]:
    """Read the activation functions of each direction from a recurrent layer's attributes.

    default: names of the functions of one direction where the attribute `activations` is missing. ONNX lists alphas and
    betas in the order of the functions that have them.

    >>> activations({"activations": ["Relu", "Affine"], "activation_alpha": [2.0]}, ["Tanh", "Tanh"], 1)
    [[('relu', ()), ('affine', (2.0, 0.0))]]
    """
    remaining = [list(attrs.get(f"activation_{which}") or []) for which in ("alpha", "beta")]
    functions: list[Activation] = []
    for name in attrs.get("activations") or [*default] * directions:
        standard = DEFAULT_PARAMETERS.get(name.lower(), ())
        functions.append(
            (name.lower(), tuple(values.pop(0) if values else value for value, values in zip(standard, remaining)))
        )
    count = len(default)
    return [functions[d * count : (d + 1) * count] for d in range(directions)]
