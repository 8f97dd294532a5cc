"""Relu and Clip of which nothing is left in the bytes behind them: onnxruntime takes them away.

    y8 = QuantizeLinear(Relu(x), sy, zy)        ->      y8 = QuantizeLinear(x, sy, zy)

where zy is the least byte. Which operators it then makes operators of bytes is asked here, before they go.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from celosia.compiler.graph.propagation import is_passed_on, only_reader, quantiser
from celosia.compiler.graph.qdq import Quantised, quantised
from celosia.compiler.graph.values import attribute, constant, is_op


def past_bounds(node: ir.Node) -> ir.Node:
    """The last of Relu and Clip behind `node` where QuantizeLinear makes them superfluous, else `node`."""
    chain = [node]
    while is_passed_on(chain[-1]) and (user := only_reader(chain[-1])) is not None and is_op(user, "Relu", "Clip"):
        chain.append(user)
    y = bytes_behind(chain[-1])
    return chain[-1] if y is not None and all(is_superfluous(each, y) for each in chain[1:]) else node


def bytes_behind(node: ir.Node) -> Quantised | None:
    """Return the quantised result of `node`, if a QuantizeLinear makes bytes of it."""
    quantise = quantiser(node)
    return quantised(quantise.inputs[0]) if quantise is not None and quantise.inputs[0] is not None else None


def is_superfluous(bound: ir.Node, y: Quantised) -> bool:
    """Whether all that `y` can be lies between the bounds of a Relu or Clip."""
    info, scale, zero = np.iinfo(y.dtype), y.scale.item(), y.zero.item()
    if is_op(bound, "Relu"):
        return bool(zero == info.min)
    ends = [attribute(bound, "min", -np.inf), attribute(bound, "max", np.inf)]
    for place, value in enumerate(bound.inputs[1:]):
        if value is not None:
            end = constant(value)
            ends[place] = np.nan if end is None or end.size != 1 else end.item()
    return bool(ends[0] <= (info.min - zero) * scale and (info.max - zero) * scale <= ends[1])
