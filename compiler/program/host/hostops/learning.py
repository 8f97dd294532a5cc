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
    tensors_with_states = []
    for x, gradient, velocity in _tensors_with_states(inputs, 3):
        gradient = op.attrs["norm_coefficient"] * x + gradient
        velocity = op.attrs["alpha"] * velocity + (op.attrs["beta"] if int(step) > 0 else 1) * gradient
        if op.attrs["mode"] == "nesterov":
            x = x - rate * (gradient + op.attrs["alpha"] * velocity)
        else:
            x = x - rate * velocity
        tensors_with_states.append((x, velocity))
    return _outputs_by_kind(tensors_with_states)


@host("Adagrad", domain=TRAINING_DOMAIN)
def adagrad(op: HostOp, rate: Array, step: Array, *inputs: Array) -> tuple[Array, ...]:
    """Take a step of Adagrad. Returns the new tensors, then their sums of squared gradients."""
    rate = rate / (1 + step * op.attr("decay_factor", 0.0))
    tensors_with_states = []
    for x, gradient, squares in _tensors_with_states(inputs, 3):
        gradient = op.attr("norm_coefficient", 0.0) * x + gradient
        squares = squares + gradient * gradient
        tensors_with_states.append((x - rate * gradient / (np.sqrt(squares) + op.attr("epsilon", 1e-6)), squares))
    return _outputs_by_kind(tensors_with_states)


@host("Adam", domain=TRAINING_DOMAIN)
def adam(op: HostOp, rate: Array, step: Array, *inputs: Array) -> tuple[Array, ...]:
    """Take a step of Adam. Returns the new tensors, then both of their momenta."""
    a, b = op.attr("alpha", 0.9), op.attr("beta", 0.999)
    t = int(step)
    if t > 0:
        rate = rate * np.sqrt(1 - b**t) / (1 - a**t)
    tensors_with_states = []
    for x, gradient, velocity, squares in _tensors_with_states(inputs, 4):
        gradient = op.attr("norm_coefficient", 0.0) * x + gradient
        velocity = a * velocity + (1 - a) * gradient
        squares = b * squares + (1 - b) * gradient * gradient
        x = (1 - op.attr("norm_coefficient_post", 0.0)) * (
            x - rate * velocity / (np.sqrt(squares) + op.attr("epsilon", 1e-6))
        )
        tensors_with_states.append((x, velocity, squares))
    return _outputs_by_kind(tensors_with_states)


def _outputs_by_kind(tensors_with_states: Sequence[tuple[Array, ...]]) -> tuple[Array, ...]:
    """Return the outputs of an optimiser: all new tensors, then their states kind by kind, as float32."""
    return tuple(value.astype(np.float32) for kind in zip(*tensors_with_states) for value in kind)


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
