"""RNN, GRU and LSTM in numpy, where no kernel can compute them; and the activation functions of all recurrent layers.

One matrix product serves the inputs of all steps; then the steps follow one by one. x: inputs [steps, batch, inputs].
w, r: weights of inputs and of states. b: biases of both. h, c: initial states and cells. p: peepholes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from celosia.compiler.program.host.float32_math import logistic
from celosia.compiler.program.host.op import Array, HostOp, host

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


def projected_weights(directions: int, size: int, dtype: Any = np.float32) -> Array:
    """Return weights w of a layer whose inputs are its gates already: [directions, size, directions * size].

    Inputs d * size to (d + 1) * size are the gates of direction d. size: of all gates of a direction. ONNX has no
    recurrent layer without weights of the input; `celosia quantize --recurrent` writes these.
    """
    identity = np.eye(directions * size, dtype=dtype)
    return identity.reshape(directions, size, directions * size)


def are_projected(w: Array | None) -> bool:
    """Return whether w is `projected_weights`, so that nothing needs to be multiplied. None: it is no constant."""
    if w is None or w.ndim != 3 or w.shape[0] * w.shape[1] != w.shape[2]:
        return False
    return np.array_equal(w, projected_weights(w.shape[0], w.shape[1], w.dtype))


Function = Callable[[Array], Array]


def _activation_function(op: HostOp, activation: Activation) -> Function:
    """Return the activation as a numpy function. Raises HostError for an unknown one."""
    match activation:
        case "sigmoid", _:
            return logistic
        case "tanh", _:
            return np.tanh
        case "relu", _:
            return lambda x: np.maximum(x, 0)
        case "affine", (alpha, beta):
            return lambda x: alpha * x + beta
        case "leakyrelu", (alpha,):
            return lambda x: np.where(x < 0, alpha * x, x)
        case "thresholdedrelu", (alpha,):
            return lambda x: np.where(x > alpha, x, 0)
        case "scaledtanh", (alpha, beta):
            return lambda x: alpha * np.tanh(beta * x)
        case "hardsigmoid", (alpha, beta):
            return lambda x: np.clip(alpha * x + beta, 0, 1)
        case "elu", (alpha,):
            return lambda x: np.where(x < 0, alpha * (np.exp(x) - 1), x)
        case "softsign", _:
            return lambda x: x / (1 + np.abs(x))
        case "softplus", _:
            return lambda x: np.log1p(np.exp(x))
    raise op.fail(f"there is no activation {activation[0]!r}")


def _run_steps(
    op: HostOp, gates: int, default: list[str], x: Array, w: Array, r: Array, b: Array | None, lengths: Array | None,
    initial: list[Array | None], step: Callable[..., tuple[Array, ...]], extra: Callable[[int], tuple[object, ...]],
) -> tuple[Array, ...]:  # fmt: skip
    """Run all directions and steps of a recurrent layer; return the first state of all steps, and all last states.

    gates: number of gates. default: activation functions where no attribute names others. lengths: of the sequences.
    initial: states before the first step, None for zeros. step: function of (contribution of the inputs to all gates,
    states, weights and biases of states, activation functions, *extra(direction)) that returns the new states.
    """
    if op.attr("layout", 0):
        x = x.swapaxes(0, 1)
        initial = [None if s is None else s.swapaxes(0, 1) for s in initial]
    time, batch, _ = x.shape
    directions, hidden = w.shape[0], r.shape[2]
    backward = op.attr("direction", "forward")
    clip = op.attr("clip")
    limit: Function = (lambda v: np.clip(v, -clip, clip)) if clip else (lambda v: v)
    out = np.zeros((time, directions, batch, hidden), x.dtype)
    last: list[list[Array]] = [[] for _ in initial]
    for d, direction_activations in enumerate(activations(op.attrs, default, directions)):
        functions = [_activation_function(op, activation) for activation in direction_activations]
        bias = np.zeros(2 * gates * hidden, x.dtype) if b is None else b[d]
        wb, rb = bias[: gates * hidden], bias[gates * hidden :]
        states = [np.zeros((batch, hidden), x.dtype) if s is None else s[d] for s in initial]
        all_gates = x @ w[d].T + wb
        limited = [lambda v, f=f: f(limit(v)) for f in functions[:2]] + functions[2:]  # not the LSTM's h
        back = backward == "reverse" or d == 1
        for t in reversed(range(time)) if back else range(time):
            new = step(all_gates[t], states, r[d], rb, limited, *extra(d))
            if lengths is not None:
                alive = (t < lengths)[:, None]
                out[t, d] = np.where(alive, new[0], 0)
                states = [np.where(alive, n, s) for n, s in zip(new, states)]
            else:
                out[t, d] = new[0]
                states = list(new)
        for final_states, state in zip(last, states):
            final_states.append(state if lengths is None else np.where(lengths[:, None] > 0, state, 0))
    finals = [np.stack(final_states).astype(x.dtype) for final_states in last]
    if op.attr("layout", 0):
        return out.transpose(2, 0, 1, 3), *(final.swapaxes(0, 1) for final in finals)
    return out, *finals


@host("RNN")
def rnn(
    op: HostOp, x: Array, w: Array, r: Array, b: Array | None = None, lengths: Array | None = None,
    h: Array | None = None,
) -> tuple[Array, ...]:  # fmt: skip
    """Compute a simple recurrent layer: all states [times, directions, batch, hidden], and the last ones."""

    def step(gates: Array, states: list[Array], r: Array, rb: Array, f: list[Function]) -> tuple[Array, ...]:
        return (f[0](gates + states[0] @ r.T + rb),)

    return _run_steps(op, 1, ["Tanh"], x, w, r, b, lengths, [h], step, lambda d: ())


@host("GRU")
def gru(
    op: HostOp, x: Array, w: Array, r: Array, b: Array | None = None, lengths: Array | None = None,
    h: Array | None = None,
) -> tuple[Array, ...]:  # fmt: skip
    """Compute a GRU: all states [times, directions, batch, hidden], and the last ones."""
    after = op.attr("linear_before_reset", 0)

    def step(gates: Array, states: list[Array], r: Array, rb: Array, f: list[Function]) -> tuple[Array, ...]:
        """Return the next state: update gate z, reset gate, then the new state."""
        old = states[0]
        zx, rx, hx = np.split(gates, 3, axis=-1)
        (rz, rr, rh), (bz, br, bh) = np.split(r, 3), np.split(rb, 3)
        z = f[0](zx + old @ rz.T + bz)
        reset = f[0](rx + old @ rr.T + br)
        inner = reset * (old @ rh.T + bh) if after else (reset * old) @ rh.T + bh
        return ((1 - z) * f[1](hx + inner) + z * old,)

    return _run_steps(op, 3, ["Sigmoid", "Tanh"], x, w, r, b, lengths, [h], step, lambda d: ())


@host("LSTM")
def lstm(
    op: HostOp, x: Array, w: Array, r: Array, b: Array | None = None, lengths: Array | None = None,
    h: Array | None = None, c: Array | None = None, p: Array | None = None,
) -> tuple[Array, ...]:  # fmt: skip
    """Compute an LSTM: all states [times, directions, batch, hidden], the last ones, and the last cells."""
    coupled = op.attr("input_forget", 0)

    def step(
        gates: Array, states: list[Array], r: Array, rb: Array, f: list[Function], peep: Array
    ) -> tuple[Array, ...]:
        """Return the next state and cell: gates input, output, forget, then the new cell."""
        old, cell = states
        i, o, forget, new = np.split(gates + old @ r.T + rb, 4, axis=-1)
        pi, po, pf = np.split(peep, 3)
        i = f[0](i + pi * cell)
        forget = 1 - i if coupled else f[0](forget + pf * cell)
        cell = forget * cell + i * f[1](new)
        o = f[0](o + po * cell)
        return o * f[2](cell), cell

    def peepholes(d: int) -> tuple[object, ...]:
        return (np.zeros(3 * r.shape[2], x.dtype) if p is None else p[d],)

    return _run_steps(op, 4, ["Sigmoid", "Tanh", "Tanh"], x, w, r, b, lengths, [h, c], step, peepholes)
