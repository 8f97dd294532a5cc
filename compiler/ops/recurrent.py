"""Recurrent layers RNN, GRU, LSTM: products of the complete sequence at once, then a scan over its steps.

All directions take a step together: their number is an axis of every state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from celosia.compiler import expr as T
from celosia.compiler.expr import Expr, Tensor, call, select, wrap
from celosia.compiler.ops.elementwise import UNARY
from celosia.compiler.ops.integer import Zero, matrix_product
from celosia.compiler.ops.products import product
from celosia.compiler.ops.quantized import quantize, range_of_bytes
from celosia.compiler.ops.registry import Node, op, reshaped
from celosia.compiler.program.host.recurrent_activations import Activation, activations
from celosia.compiler.program.op_spec import Kind

States = tuple[Tensor, ...]
NAMES = {name.lower(): name for name in UNARY}


def activated(node: Node, x: Expr, function: Activation) -> Expr:
    """Return x through an activation function. Raises Unsupported for an unknown one."""
    name, numbers = function
    match name:
        case "affine":
            return x * numbers[0] + numbers[1]
        case "scaledtanh":
            return call("tanh", x * numbers[1]) * numbers[0]
        case "sigmoid" | "relu" | "leakyrelu" | "thresholdedrelu" | "hardsigmoid" | "elu" | "softsign" | "softplus":
            return UNARY[NAMES[name]](x, dict(zip(("alpha", "beta"), numbers)))
        case "tanh":
            return call("tanh", x)
    raise node.fail(f"there is no activation {name!r}")


def turned(x: Tensor, perm: Sequence[int]) -> Tensor:
    """Return numpy.transpose(x, perm)."""
    return T.compute(
        tuple(x.shape[d] for d in perm), lambda *i: x[tuple(i[perm.index(d)] for d in range(len(i)))], "turned"
    )


RECURRENT = "x w:weights r:weights b:bias? sequence_lens? initial_h?"
OF_LSTM = f"{RECURRENT} initial_c? p:weights?"


class _Layer:
    """Weights, sequence and states of a recurrent layer: D directions, G gates, I inputs, H state elements, B
    sequences.

    Weights of the input [D, G * H, I] and of the state [D, G * H, H], biases of both [D, 2 * G * H], lengths [B],
    states [D, B, H]. Step t of the backward direction takes element `length - 1 - t` of its sequence, as in
    onnxruntime.
    """

    inputs_first = False
    """Whether weights are stored transposed: [D, I, G * H] and [D, H, G * H]."""

    def __init__(self, node: Node, gates: int, functions: Sequence[str]) -> None:
        """Read the inputs that all layers have, and multiply the sequence. Raises Unsupported for wrong shapes."""
        self.node = node
        x, w, self.r = node.input("x"), node.input("w"), node.input("r")
        self.x, self.w = x, w
        self.by_batch = bool(node.attrs.get("layout", 0))
        rows, columns, inputs = x.shape
        self.steps, self.batch = (columns, rows) if self.by_batch else (rows, columns)
        self.directions, self.hidden = w.shape[0], self.r.shape[1 if self.inputs_first else 2]
        self.way = node.attrs.get("direction", "forward")
        if self.directions != 1 + (self.way == "bidirectional") or self.way not in (
            "forward",
            "reverse",
            "bidirectional",
        ):
            raise node.fail(f"weights of {self.directions} directions where the direction is {self.way}")
        self.bias = node.optional("b")
        self.lengths = node.optional("sequence_lens")
        size, state = gates * self.hidden, (self.directions, self.batch, self.hidden)
        self.state = state
        matrices = [(inputs, size), (self.hidden, size)]
        for tensor, shape in (
            *((t, (self.directions, *(m if self.inputs_first else m[::-1]))) for t, m in zip((w, self.r), matrices)),
            (self.bias, (self.directions, 2 * size)), (self.lengths, (self.batch,)),
        ):  # fmt: skip
            if tensor is not None and (tensor.shape != shape or not tensor.size):
                raise node.fail(f"{list(tensor.shape)} is given where {list(shape)} is meant, of one element at least")
        if not x.size:
            raise node.fail(f"an input of shape {list(x.shape)} has no elements")
        self.functions = activations(node.attrs, functions, self.directions)
        self.given = self.of_inputs(reshaped(x, (rows * columns, inputs)))
        """[D, sequences and steps as in x, G * H]."""

    def of_inputs(self, flat: Tensor) -> Tensor:
        """Return the products of all elements of all sequences [., I] and their weights, biased."""
        return product(flat, self.w, transpose_b=True, finish=lambda acc, i: self._biased(acc, i[0], i[2], 0))

    def _biased(self, value: Expr, d: Expr, n: Expr, first: int) -> Expr:
        return value if self.bias is None else value + self.bias[d, n + first]

    def initial(self, operand: str) -> Tensor:
        """Return the state that input `number` gives, or zeros. Raises Unsupported for another shape."""
        if not self.node.has(operand):
            return T.compute(self.state, lambda *i: 0.0, "zeros", self.given.dtype)
        given = self.node.input(operand)
        if len(given.shape) == 3 and self.by_batch:
            given = turned(given, (1, 0, 2))
        if given.shape != self.state:
            raise self.node.fail(f"a state of {list(given.shape)} is given where {list(self.state)} is meant")
        return given

    def recurrent(self, state: Tensor, first: int, count: int) -> Tensor:
        """Return the products of `state` and the weights of `count` gates from `first` on, biased: [D, B, count *
        H].
        """
        start, size = first * self.hidden, count * self.hidden
        weights = T.compute((self.directions, self.hidden, size), lambda d, k, n: self.r[d, n + start, k], "weights")

        def finish(acc: Expr, i: tuple[Expr, ...]) -> Expr:
            return self._biased(acc, i[0], i[2], self.r.shape[1] + start)

        return product(state, weights, finish=finish, fixed_b=True)

    def of_state(self, t: Expr, state: Tensor) -> Tensor:
        """Return the products of the state before step t and the weights of all gates: [D, B, G * H]."""
        return self.recurrent(state, 0, self.r.shape[1] // self.hidden)

    def time(self, t: Expr, d: Expr, b: Expr) -> Expr:
        """Return the element of sequence b that step t of direction d takes, which is also the inverse.

        Where the sequence has no step t, it is any element.
        """
        last = wrap(self.steps - 1, T.INDEX)
        if self.lengths is None:
            back = last - t
        else:
            back = T.minimum(T.maximum(self.lengths[b].astype(T.INDEX) - 1 - t, 0), last)
        return t if self.way == "forward" else back if self.way == "reverse" else select(d < 1, t, back)

    def gate(self, number: int, t: Expr, d: Expr, b: Expr, j: Expr) -> Expr:
        """Return the contribution of the input to gate `number` at step t."""
        time = self.time(t, d, b)
        row = b * self.steps + time if self.by_batch else time * self.batch + b
        return self.given[d, row, j + number * self.hidden]

    def late_bias(self, x: Expr, d: Expr, n: Expr) -> Expr:
        """Return x with the biases of weight row n that the products lack: none, except when quantised."""
        return x

    def apply(self, number: int, d: Expr, x: Expr, within: bool = True) -> Expr:
        """Apply activation function `number` of direction d; x is first clipped by the attribute `clip`, if within."""
        if within and (limit := self.node.attrs.get("clip")):
            x = T.clip(x, -limit, limit)
        first, *others = (activated(self.node, x, functions[number]) for functions in self.functions)
        if not others or self.functions[0][number] == self.functions[1][number]:
            return first
        return select(d < 1, first, others[0])

    def alive(self, t: Expr, b: Expr, new: Expr, old: Expr) -> Expr:
        """Return `new` where the sequence has step t, else `old`."""
        return new if self.lengths is None else select(t < self.lengths[b].astype(T.INDEX), new, old)

    def outputs(self, initial: Sequence[Tensor], step: Callable[[Expr, States], Sequence[Tensor]]) -> list[Tensor]:
        """Scan `step` from the initial states; return the first state after each step, then all last states.

        Beyond a sequence's end the states of steps are 0.
        """
        states = T.scan(self.steps, initial, step, "states")

        def after(t: Expr, d: Expr, b: Expr, j: Expr) -> Expr:
            value = states[0, self.time(t, d, b) + 1, d, b, j]
            return self.alive(t, b, value, wrap(0, value.dtype))

        every = T.compute((self.steps, *self.state), after, "states_after")
        last = [self._last(states, number) for number in range(len(initial))]
        if self.by_batch:
            every, last = turned(every, (2, 0, 1, 3)), [turned(each, (1, 0, 2)) for each in last]
        return [every, *last][: self.node.outputs]

    def _last(self, states: Tensor, number: int) -> Tensor:
        """Return the last state `number`; 0 for an empty sequence, as in onnxruntime."""

        def element(d: Expr, b: Expr, j: Expr) -> Expr:
            value = states[number, self.steps, d, b, j]
            return value if self.lengths is None else select(self.lengths[b] <= 0, wrap(0, value.dtype), value)

        return T.compute(self.state, element, "last")


@op("RNN", kind=Kind.COMPLEX, wide=True, heavy=True, operands=RECURRENT)
def rnn(node: Node) -> list[Tensor]:
    """Build RNN: the states after each step [steps, directions, batch, hidden], and the last."""
    layer = _Layer(node, 1, ["Tanh"])

    def step(t: Expr, states: States) -> list[Tensor]:
        old, given = states[0], layer.recurrent(states[0], 0, 1)

        def new(d: Expr, b: Expr, j: Expr) -> Expr:
            value = layer.apply(0, d, layer.gate(0, t, d, b, j) + given[d, b, j])
            return layer.alive(t, b, value, old[d, b, j])

        return [T.compute(layer.state, new, "h")]

    return layer.outputs([layer.initial("initial_h")], step)


@op("GRU", kind=Kind.COMPLEX, wide=True, heavy=True, operands=RECURRENT)
def gru(node: Node) -> list[Tensor]:
    """Build GRU: gates update, reset and the new state; linear_before_reset: reset applies after the product."""
    layer, after = _Layer(node, 3, ["Sigmoid", "Tanh"]), bool(node.attrs.get("linear_before_reset", 0))
    hidden = layer.hidden

    def step(t: Expr, states: States) -> list[Tensor]:
        """Return the state after step t."""
        old, own = states[0], layer.recurrent(states[0], 0, 3 if after else 2)

        def gate(number: int, d: Expr, b: Expr, j: Expr) -> Expr:
            value = layer.gate(number, t, d, b, j) + own[d, b, j + number * hidden]
            return layer.apply(0, d, value)

        if not after:
            reset = T.compute(layer.state, lambda d, b, j: gate(1, d, b, j) * old[d, b, j], "reset")
            product_of_reset = layer.recurrent(reset, 2, 1)

        def new(d: Expr, b: Expr, j: Expr) -> Expr:
            inner = gate(1, d, b, j) * own[d, b, j + 2 * hidden] if after else product_of_reset[d, b, j]
            z = gate(0, d, b, j)
            value = (wrap(1, z.dtype) - z) * layer.apply(1, d, layer.gate(2, t, d, b, j) + inner) + z * old[d, b, j]
            return layer.alive(t, b, value, old[d, b, j])

        return [T.compute(layer.state, new, "h")]

    return layer.outputs([layer.initial("initial_h")], step)


class _DynamicLayer(_Layer):
    """An LSTM layer of DynamicQuantizeLSTM, whose weights are bytes with scales and zero points.

    Weights [D, I, G * H] and [D, H, G * H]; scales and zero points (inputs 8 to 11) of a direction or of each of its
    columns. Inputs are quantised by their range, states by theirs at each step. Rounding is that of onnxruntime on one
    thread: a range is that of a direction over all sequences, inputs beyond the longest sequence and states behind the
    end of one are zeros, and biases are added last, as one sum.
    """

    inputs_first = True

    def of_inputs(self, flat: Tensor) -> Tensor:
        """Quantise and multiply the sequences; elements beyond the longest one count as 0 in the range."""
        x, lengths = self.x, self.lengths
        seen = x
        if lengths is not None:
            b = T.reduce_axis(self.batch, "b")
            longest = T.compute((), lambda: T.max(lengths[b], b), "longest")
            along = 1 if self.by_batch else 0

            def element(*i: Expr) -> Expr:
                return select(i[along] < longest[()].astype(T.INDEX), x[i], wrap(0, x.dtype))

            seen = T.compute(x.shape, element, "seen")
        whole = reshaped(seen, (1, *flat.shape))
        return self._product(whole, reshaped(flat, whole.shape), self.w, "w")

    def of_state(self, t: Expr, state: Tensor) -> Tensor:
        """Quantise and multiply the states before step t; those of ended sequences count as 0."""
        lengths = self.lengths
        if lengths is not None:
            old = state

            def element(d: Expr, b: Expr, j: Expr) -> Expr:
                return select(t <= lengths[b].astype(T.INDEX), old[d, b, j], wrap(0, old.dtype))

            state = T.compute(old.shape, element, "seen")
        return self._product(state, state, self.r, "r")

    def _product(self, seen: Tensor, x: Tensor, w: Tensor, name: str) -> Tensor:
        """Return x [D or 1, ., K], quantised by the range of `seen`, times w [D, K, N], scaled to float32.

        first: the input with the scales of w; its zero points follow.
        """
        scales, zeros, inner = self.node.input(f"{name}_scale"), self._zeros(f"{name}_zero_point", w), x.shape[2]
        scale, zero = range_of_bytes(seen, (1, 2))
        quantised = T.compute(x.shape, lambda d, m, k: quantize(x[d, m, k], scale[d], zero[d], "uint8"), "quantised")
        k = T.reduce_axis(inner, "k")
        columns = T.compute(
            (self.directions, w.shape[2]), lambda d, n: T.sum(_signed(w[d, k, n]).astype("int32"), k), "columns"
        )
        r = T.reduce_axis(inner, "r")
        rows = T.compute(x.shape[:2], lambda d, m: T.sum(quantised[d, m, r].astype("int32"), r), "rows")
        by_column = scales.shape == columns.shape
        if not by_column and scales.shape != (self.directions,):
            raise self.node.fail(f"scales of {list(scales.shape)}; give {[self.directions]} or {list(columns.shape)}")

        def finish(acc: Expr, i: tuple[Expr, ...]) -> Expr:
            d, m, n = i
            own = wrap(0, T.INDEX) if x.shape[0] == 1 else d
            z = zero[own].astype("int32")
            acc = acc - z * columns[d, n]
            if zeros is not None:
                acc = acc - zeros[d] * (rows[own, m] - z * inner)
            return acc.astype("float32") * (scale[own] * (scales[d, n] if by_column else scales[d]))

        nothing = Zero(lambda n: wrap(0, "int32"), none=True)
        return matrix_product(quantised, w, wrap(0, "int32"), nothing, finish)

    def _zeros(self, operand: str, w: Tensor) -> Tensor | None:
        """Return the int8 zero point of each direction, None for 0; onnxruntime has one for all columns."""
        tensor, value = self.node.input(operand), self.node.value(operand)
        if tensor.shape[:1] != (self.directions,) or tensor.dtype != w.dtype:
            raise self.node.fail(
                f"zero points are {tensor.dtype}{list(tensor.shape)}; give {w.dtype} for {self.directions} directions"
            )
        if value is not None:
            if (value.reshape(self.directions, -1) != value.reshape(self.directions, -1)[:, :1]).any():
                raise self.node.fail("zero points of a direction differ; let them be one for all columns")
            if w.dtype == "int8" and not np.any(value):
                return None
        return T.compute(
            (self.directions,),
            lambda d: _signed(tensor.flat(d * (tensor.size // self.directions))).astype("int32"), "zeros",
        )  # fmt: skip

    def late_bias(self, x: Expr, d: Expr, n: Expr) -> Expr:
        return x if self.bias is None else x + (self.bias[d, n] + self.bias[d, n + self.r.shape[2]])


def _signed(byte: Expr) -> Expr:
    return byte.astype("int8") ^ -128 if byte.dtype == "uint8" else byte


@op("LSTM", kind=Kind.COMPLEX, wide=True, heavy=True, operands=OF_LSTM)
@op(
    "DynamicQuantizeLSTM", kind=Kind.COMPLEX, wide=True, heavy=True, domain="com.microsoft", variant_of="LSTM",
    operands=f"{OF_LSTM} w_scale w_zero_point r_scale r_zero_point",
)  # fmt: skip
def lstm(node: Node) -> list[Tensor]:
    """Build LSTM or DynamicQuantizeLSTM (com.microsoft): gates input, output, forget and the new cell, in this order.

    `clip` bounds the arguments of gates, and, as in onnxruntime, not the new cell.
    """
    kind = _Layer if node.op == "LSTM" else _DynamicLayer
    layer, coupled = kind(node, 4, ["Sigmoid", "Tanh", "Tanh"]), bool(node.attrs.get("input_forget", 0))
    hidden, peepholes = layer.hidden, node.optional("p")
    if peepholes is not None and peepholes.shape != (layer.directions, 3 * hidden):
        raise node.fail(f"peepholes of {list(peepholes.shape)}")

    def step(t: Expr, states: States) -> list[Tensor]:
        """Return the state and the cell after step t."""
        old, cell = states
        own = layer.of_state(t, old)

        def gate(number: int, cells: Tensor | None, d: Expr, b: Expr, j: Expr) -> Expr:
            value = layer.gate(number, t, d, b, j) + own[d, b, j + number * hidden]
            if peepholes is not None and cells is not None:
                value = value + peepholes[d, j + number * hidden] * cells[d, b, j]
            value = layer.late_bias(value, d, j + number * hidden)
            return layer.apply(0 if cells is not None else 1, d, value)

        def cell_after(d: Expr, b: Expr, j: Expr) -> Expr:
            enter = gate(0, cell, d, b, j)
            forget = wrap(1, enter.dtype) - enter if coupled else gate(2, cell, d, b, j)
            value = forget * cell[d, b, j] + enter * gate(3, None, d, b, j)
            return layer.alive(t, b, value, cell[d, b, j])

        new_cell = T.compute(layer.state, cell_after, "c")

        def new(d: Expr, b: Expr, j: Expr) -> Expr:
            value = gate(1, new_cell, d, b, j) * layer.apply(2, d, new_cell[d, b, j], within=False)
            return layer.alive(t, b, value, old[d, b, j])

        return [T.compute(layer.state, new, "h"), new_cell]

    return layer.outputs([layer.initial("initial_h"), layer.initial("initial_c")], step)
