"""Draw operators of several steps: norms, and recurrent operators."""

from __future__ import annotations

from typing import Any

import numpy as np

from fuzz.models.net import MS, Net, OracleError
from fuzz.models.operators.operands import (
    any_axis,
    any_image,
    any_shape,
    either,
    operand,
    random_subset,
)


def normalisation(net: Net) -> list[str]:
    """Add a norm of images: batch, instance, group, Lp, local response, or mean and variance."""
    draw, (front, size) = net.draw, any_image(net.draw)
    channels = front[1]
    x = operand(net, (*front, *size))
    numbers = [either(net, draw.floats((channels,)), constant=0.8) for _ in range(3)]
    epsilon = random_subset(draw, epsilon=draw.choice((1e-5, 1e-2)))
    match draw.choice(("batch", "instance", "group", "lp", "lrn", "mvn")):
        case "batch":
            variance = either(net, np.abs(draw.floats((channels,))) + np.float32(0.1), constant=0.8)
            return [net.add("BatchNormalization", x, *numbers, variance, **epsilon)]
        case "instance":
            return [net.add("InstanceNormalization", x, *numbers[:2], **epsilon)]
        case "group":
            groups = draw.choice([g for g in range(1, channels + 1) if channels % g == 0])
            if net.opset < 21:
                numbers = [net.floats((groups,)) for _ in range(2)]
            return [net.add("GroupNormalization", x, *numbers[:2], num_groups=groups, **epsilon)]
        case "lp":
            return [
                net.add(
                    "LpNormalization",
                    x,
                    **random_subset(draw, axis=any_axis(draw, 2 + len(size)), p=draw.randint(1, 2)),
                )
            ]
        case "lrn":
            attrs = random_subset(
                draw, alpha=draw.choice((1e-4, 0.3)), beta=draw.choice((0.75, 0.5)), bias=draw.choice((1.0, 2.0))
            )
            return [net.add("LRN", x, size=draw.choice((1, 3, 5)), **attrs)]
    axes = sorted(draw.sample(range(2 + len(size)), draw.randint(1, 2 + len(size))))
    if all((*front, *size)[axis] == 1 for axis in axes):
        raise OracleError(
            "of one element, whose variance onnxruntime takes for the difference of two squares, perhaps NaN"
        )
    return [net.add("MeanVarianceNormalization", x, **random_subset(draw, axes=axes))]


def layer_norm(net: Net) -> list[str]:
    """Add LayerNormalization or one of onnxruntime's variants."""
    draw = net.draw
    shape = any_shape(draw, 2, 4, 9)
    axis = any_axis(draw, len(shape))
    dims = shape[axis % len(shape) :]
    epsilon = random_subset(draw, epsilon=draw.choice((1e-5, 1e-2)))
    x, scale, bias = operand(net, shape), either(net, draw.floats(dims)), either(net, draw.floats(dims))
    match draw.choice(("plain", "plain", "simplified", "skip", "skip simplified")):
        case "plain":
            inputs = [scale, bias] if draw.chance(0.7) else [scale]
            return net.add_all("LayerNormalization", x, *inputs, outputs=draw.choice((1, 1, 3)), axis=axis, **epsilon)
        case "simplified":
            return [net.add("SimplifiedLayerNormalization", x, scale, axis=axis, **epsilon)]
        case kind:
            three = draw.shape(3, 7)
            x, skip = operand(net, three), operand(net, three)
            scale, *more = (either(net, draw.floats(three[-1:])) for _ in range(3))
            if kind == "skip":
                names = more[: draw.randint(0, 2)]
                return [net.add("SkipLayerNormalization", x, skip, scale, *names, domain=MS, **epsilon)]
            return [net.add("SkipSimplifiedLayerNormalization", x, skip, scale, *more[:1], domain=MS, **epsilon)]


def recurrent(net: Net) -> list[str]:
    """Add LSTM, GRU or RNN, in one or both directions."""
    draw, op = net.draw, net.draw.choice(("LSTM", "GRU", "RNN"))
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    steps, batch, inner, hidden = draw.shape(4, 5)
    direction = draw.choice(("forward", "reverse", "bidirectional"))
    ways = 2 if direction == "bidirectional" else 1
    attrs: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
    if draw.chance(0.2):
        attrs["clip"] = 0.7
    if op == "GRU":
        attrs |= random_subset(draw, linear_before_reset=draw.randint(0, 1))
    if op == "LSTM" and draw.chance(0.2):
        attrs["input_forget"] = 1
    if draw.chance(0.2):
        activations = {"LSTM": ["HardSigmoid", "Softsign", "Tanh"], "GRU": ["Sigmoid", "Relu"], "RNN": ["Relu"]}[op]
        attrs["activations"] = activations * ways

    def parameter(*shape: int) -> str:
        return either(net, draw.floats(shape, 0.5), constant=0.8)

    inputs = [
        operand(net, (steps, batch, inner)),
        parameter(ways, gates * hidden, inner),
        parameter(ways, gates * hidden, hidden),
    ]
    rest = [parameter(ways, 2 * gates * hidden), either(net, draw.arrays.integers(1, steps + 1, batch), np.int32),
            parameter(ways, batch, hidden)]  # fmt: skip
    if op == "LSTM":
        rest += [parameter(ways, batch, hidden), parameter(ways, 3 * hidden)]
    rest = [name if draw.chance(0.6) else "" for name in rest]
    return net.add_all(op, *inputs, *rest, outputs=3 if op == "LSTM" else 2, **attrs)
