"""The activation functions of recurrent layers, as their attributes name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Activation = tuple[str, tuple[float, ...]]
"""Name in small letters, and the parameters of PARAMETERS."""

PARAMETERS: dict[str, tuple[float, ...]] = {
    "affine": (1.0, 0.0), "elu": (1.0,), "hardsigmoid": (0.2, 0.5), "leakyrelu": (0.01,), "scaledtanh": (1.0, 1.0),
    "thresholdedrelu": (1.0,),
}  # fmt: skip
"""alpha, or alpha and beta, where nothing is said."""


def activations(attrs: Mapping[str, Any], default: Sequence[str], directions: int) -> list[list[Activation]]:
    """The functions of each direction; ONNX lists parameters in the order of the functions that have them.

    >>> activations({"activations": ["Relu", "Affine"], "activation_alpha": [2.0]}, ["Tanh", "Tanh"], 1)
    [[('relu', ()), ('affine', (2.0, 0.0))]]
    """
    given = [list(attrs.get(f"activation_{which}") or []) for which in ("alpha", "beta")]
    made: list[Activation] = []
    for name in attrs.get("activations") or [*default] * directions:
        standard = PARAMETERS.get(name.lower(), ())
        made.append((name.lower(), tuple(own.pop(0) if own else value for value, own in zip(standard, given))))
    count = len(default)
    return [made[d * count : (d + 1) * count] for d in range(directions)]
