"""Training steps of optimisers, and batch normalisation in training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from celosia.compiler.program.host.op import Array, HostOp, host

TRAINING_DOMAIN = "ai.onnx.preview.training"
"""Domain of optimisers."""


def _tensors_with_states(inputs: tuple[Array, ...], kinds: int) -> list[tuple[Array, ...]]:
    """Return for each optimised tensor the tuple of itself, its gradient and its states.

    inputs: all tensors, then all gradients, then all states of each kind. kinds: the number of these groups.
    """
    count = len(inputs) // kinds
    return [inputs[i::count] for i in range(count)]


@host("Momentum", domain=TRAINING_DOMAIN)
def momentum(op: HostOp, rate: Array, step: Array, *inputs: Array) -> tuple[Array, ...]:
    """Take a step of SGD with momentum. Returns the new tensors, then their momenta."""
    new = []
    for x, gradient, v in _tensors_with_states(inputs, 3):
        gradient = op.attrs["norm_coefficient"] * x + gradient
        v = op.attrs["alpha"] * v + (op.attrs["beta"] if int(step) > 0 else 1) * gradient
        if op.attrs["mode"] == "nesterov":
            x = x - rate * (gradient + op.attrs["alpha"] * v)
        else:
            x = x - rate * v
        new.append((x, v))
    return _sorted_by_kind(new)


@host("Adagrad", domain=TRAINING_DOMAIN)
def adagrad(op: HostOp, rate: Array, step: Array, *inputs: Array) -> tuple[Array, ...]:
    """Take a step of Adagrad. Returns the new tensors, then their sums of squared gradients."""
    rate = rate / (1 + step * op.attr("decay_factor", 0.0))
    new = []
    for x, gradient, h in _tensors_with_states(inputs, 3):
        gradient = op.attr("norm_coefficient", 0.0) * x + gradient
        h = h + gradient * gradient
        new.append((x - rate * gradient / (np.sqrt(h) + op.attr("epsilon", 1e-6)), h))
    return _sorted_by_kind(new)


@host("Adam", domain=TRAINING_DOMAIN)
def adam(op: HostOp, rate: Array, step: Array, *inputs: Array) -> tuple[Array, ...]:
    """Take a step of Adam. Returns the new tensors, then both of their momenta."""
    a, b = op.attr("alpha", 0.9), op.attr("beta", 0.999)
    t = int(step)
    if t > 0:
        rate = rate * np.sqrt(1 - b**t) / (1 - a**t)
    new = []
    for x, gradient, v, h in _tensors_with_states(inputs, 4):
        gradient = op.attr("norm_coefficient", 0.0) * x + gradient
        v = a * v + (1 - a) * gradient
        h = b * h + (1 - b) * gradient * gradient
        x = (1 - op.attr("norm_coefficient_post", 0.0)) * (x - rate * v / (np.sqrt(h) + op.attr("epsilon", 1e-6)))
        new.append((x, v, h))
    return _sorted_by_kind(new)


def _sorted_by_kind(new: Sequence[tuple[Array, ...]]) -> tuple[Array, ...]:
    """Return the outputs of an optimiser: all new tensors, then their states kind by kind, as float32."""
    return tuple(value.astype(np.float32) for kind in zip(*new) for value in kind)


@host("BatchNormalization")
def batch_normalisation(
    op: HostOp, x: Array, scale: Array, shift: Array, mean: Array, variance: Array
) -> tuple[Array, ...]:
    """Normalise by the statistics of the batch in training, and return running statistics.

    Before opset 14, five outputs ask for training mode; the last two are the mean and the inverse deviation of the
    batch, as in onnxruntime.
    """
    if not (op.attr("training_mode", 0) if op.opset >= 14 else op.wanted == 5):
        raise op.fail("it cannot be compiled for these inputs")
    axes = (0, *range(2, x.ndim))
    shape = (1, -1, *[1] * (x.ndim - 2))
    batch_mean, batch_variance, keep = x.mean(axis=axes), x.var(axis=axes), op.attr("momentum", 0.9)
    deviation = np.sqrt(batch_variance + op.attr("epsilon", 1e-5))
    y = (x - batch_mean.reshape(shape)) / deviation.reshape(shape)
    y = y * scale.reshape(shape) + shift.reshape(shape)
    running = (mean * keep + batch_mean * (1 - keep), variance * keep + batch_variance * (1 - keep))
    saved = (batch_mean, 1 / deviation)[: max(op.wanted - 3, 0)]
    return y.astype(x.dtype), *(value.astype(mean.dtype) for value in (*running, *saved))
