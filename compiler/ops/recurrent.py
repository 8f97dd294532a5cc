"""Recurrent layers RNN, GRU, LSTM: products of the complete sequence at once, then a scan over its steps.

The directions of a layer take a step together: they are the first axis of every state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from celosia.compiler import expr as T
from celosia.compiler.expr import Expr, Tensor, call, select, wrap
from celosia.compiler.ops.elementwise import UNARY
from celosia.compiler.ops.integer import ZeroPoint, matrix_product
from celosia.compiler.ops.products import product
from celosia.compiler.ops.quantized import dynamic_quantisation, quantize
from celosia.compiler.ops.registry import Node, op, reshaped
from celosia.compiler.program.host.hostops.recurrent_ops import Activation, activations, are_projected
from celosia.compiler.program.op_spec import Kind

States = tuple[Tensor, ...]
"""States of a layer before a step, [directions, batch, hidden] each: h, and for LSTM the cell c."""
UNARY_NAMES = {name.lower(): name for name in UNARY}
"""Lower-case name of an activation function -> operator of UNARY."""


def _activate(node: Node, x: Expr, function: Activation) -> Expr:
    """Apply an activation function to x. Raises Unsupported for an unknown one."""
    name, numbers = function
    match name:
        case "affine":
            return x * numbers[0] + numbers[1]
        case "scaledtanh":
            return call("tanh", x * numbers[1]) * numbers[0]
        case "sigmoid" | "relu" | "leakyrelu" | "thresholdedrelu" | "hardsigmoid" | "elu" | "softsign" | "softplus":
            return UNARY[UNARY_NAMES[name]](x, dict(zip(("alpha", "beta"), numbers)))
        case "tanh":
            return call("tanh", x)
    raise node.fail(f"there is no activation {name!r}")


def _transpose_axes(x: Tensor, perm: Sequence[int]) -> Tensor:
    """Return numpy.transpose(x, perm), as an expression."""
    return T.compute(
        tuple(x.shape[d] for d in perm), lambda *i: x[tuple(i[perm.index(d)] for d in range(len(i)))], "turned"
    )


COMMON_OPERANDS = "x w:weights r:weights b:bias? sequence_lens? initial_h?"
"""Operands of RNN and GRU, with which those of LSTM begin."""
LSTM_OPERANDS = f"{COMMON_OPERANDS} initial_c? p:weights?"
"""Operands of LSTM; p: peepholes."""


class _Layer:
    """A recurrent layer of D directions, G gates, I inputs and H state elements, over B sequences.

    x: the sequences, [steps, B, I], or [B, steps, I] where `by_batch` is set. w, r: weights of the input [D, G * H, I]
    and of the state [D, G * H, H]. bias: of both, [D, 2 * G * H]. lengths: of sequences, [B]. state: shape of a state,
    [D, B, H]. functions: activation functions of each direction. input_gates: products of all inputs with w.

    Step t of the backward direction takes element `length - 1 - t` of its sequence, as in onnxruntime.
    """

    inputs_first = False
    """Whether weights are stored transposed: [D, I, G * H] and [D, H, G * H]."""

    def __init__(self, node: Node, gates: int, functions: Sequence[str]) -> None:
        """Read the operands that all layers have, and multiply all inputs by their weights.

        gates: number of gates. functions: default activation functions of a direction. Raises Unsupported for wrong
        shapes.
        """
        self.node = node
        x, w, self.r = node.input("x"), node.input("w"), node.input("r")
        self.x, self.w = x, w
        self.by_batch = bool(node.attrs.get("layout", 0))
        rows, columns, inputs = x.shape
        self.steps, self.batch = (columns, rows) if self.by_batch else (rows, columns)
        self.directions, self.hidden = w.shape[0], self.r.shape[1 if self.inputs_first else 2]
        self.direction = node.attrs.get("direction", "forward")
        if self.directions != 1 + (self.direction == "bidirectional") or self.direction not in (
            "forward",
            "reverse",
            "bidirectional",
        ):
            raise node.fail(f"weights of {self.directions} directions where the direction is {self.direction}")
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
        self.input_gates = self.multiply_inputs(reshaped(x, (rows * columns, inputs)))
        """[D, steps * B in the order of x, G * H]."""

    def multiply_inputs(self, flat: Tensor) -> Tensor:
        """Return the products of all inputs, flat [steps * B, I], with their weights, plus the bias: [D, ., G * H].

        Finite inputs that are gates already (`projected_weights`) are not multiplied.
        """
        if are_projected(self.node.value("w")):
            size = self.w.shape[1]

            def gate(d: Expr, m: Expr, n: Expr) -> Expr:
                return self._add_bias(flat[m, d * size + n], d, n, 0)

            return T.compute((self.directions, flat.shape[0], size), gate, "gates")
        return product(flat, self.w, transpose_b=True, finish=lambda acc, i: self._add_bias(acc, i[0], i[2], 0))

    def _add_bias(self, value: Expr, d: Expr, n: Expr, first: int) -> Expr:
        """Return `value` plus the bias n of direction d, counted from bias `first` on."""
        return value if self.bias is None else value + self.bias[d, n + first]

    def initial_state(self, operand: str) -> Tensor:
        """Return the state before the first step, or zeros where `operand` is left out.

        Raises Unsupported for another shape.
        """
        if not self.node.has(operand):
            return T.compute(self.state, lambda *i: 0.0, "zeros", self.input_gates.dtype)
        state = self.node.input(operand)
        if len(state.shape) == 3 and self.by_batch:
            state = _transpose_axes(state, (1, 0, 2))
        if state.shape != self.state:
            raise self.node.fail(f"a state of {list(state.shape)} is given where {list(self.state)} is meant")
        return state

    def multiply_state_gates(self, state: Tensor, first: int, count: int) -> Tensor:
        """Return the products of `state` with the weights of `count` gates from gate `first` on, plus their bias.

        Shape: [D, B, count * H].
        """
        start, size = first * self.hidden, count * self.hidden
        weights = T.compute((self.directions, self.hidden, size), lambda d, k, n: self.r[d, n + start, k], "weights")

        def finish(acc: Expr, i: tuple[Expr, ...]) -> Expr:
            return self._add_bias(acc, i[0], i[2], self.r.shape[1] + start)

        return product(state, weights, finish=finish, fixed_b=True)

    def multiply_state(self, t: Expr, state: Tensor) -> Tensor:
        """Return the products of the state before step t with the weights of all gates: [D, B, G * H]."""
        return self.multiply_state_gates(state, 0, self.r.shape[1] // self.hidden)

    def sequence_index(self, t: Expr, d: Expr, b: Expr) -> Expr:
        """Return the number of the element of sequence b that step t of direction d takes.

        The function is its own inverse. Beyond the end of the sequence it returns any element.
        """
        last = wrap(self.steps - 1, T.INDEX)
        if self.lengths is None:
            backward = last - t
        else:
            backward = T.minimum(T.maximum(self.lengths[b].astype(T.INDEX) - 1 - t, 0), last)
        if self.direction == "bidirectional":
            return select(d < 1, t, backward)
        return t if self.direction == "forward" else backward

    def input_gate(self, number: int, t: Expr, d: Expr, b: Expr, j: Expr) -> Expr:
        """Return the contribution of the input to element j of gate `number` at step t of direction d, sequence b."""
        position = self.sequence_index(t, d, b)
        row = b * self.steps + position if self.by_batch else position * self.batch + b
        return self.input_gates[d, row, j + number * self.hidden]

    def add_late_bias(self, x: Expr, d: Expr, n: Expr) -> Expr:
        """Add to x the biases of weight row n that the products leave out: none, except in _DynamicLayer."""
        return x

    def activate(self, number: int, d: Expr, x: Expr, clips: bool = True) -> Expr:
        """Apply activation function `number` of direction d to x.

        clips: x is first limited to the range of the attribute `clip`, if there is one.
        """
        if clips and (limit := self.node.attrs.get("clip")):
            x = T.clip(x, -limit, limit)
        first, *others = (_activate(self.node, x, functions[number]) for functions in self.functions)
        if not others or self.functions[0][number] == self.functions[1][number]:
            return first
        return select(d < 1, first, others[0])

    def keep_if_ended(self, t: Expr, b: Expr, new_state: Expr, old_state: Expr) -> Expr:
        """Return `new_state` where sequence b has step t, else `old_state`: an ended sequence keeps its state."""
        return new_state if self.lengths is None else select(t < self.lengths[b].astype(T.INDEX), new_state, old_state)

    def scan_outputs(self, initial: Sequence[Tensor], step: Callable[[Expr, States], Sequence[Tensor]]) -> list[Tensor]:
        """Scan `step` from the initial states; return the node's outputs: h after each step, then all last states.

        step: function of (t, states) that returns the states after step t. Beyond the end of a sequence, h is 0.
        """
        states = T.scan(self.steps, initial, step, "states")

        def state_after(t: Expr, d: Expr, b: Expr, j: Expr) -> Expr:
            value = states[0, self.sequence_index(t, d, b) + 1, d, b, j]
            return self.keep_if_ended(t, b, value, wrap(0, value.dtype))

        all_states = T.compute((self.steps, *self.state), state_after, "states_after")
        last = [self._last_state(states, number) for number in range(len(initial))]
        if self.by_batch:
            all_states = _transpose_axes(all_states, (2, 0, 1, 3))
            last = [_transpose_axes(state, (1, 0, 2)) for state in last]
        return [all_states, *last][: self.node.outputs]

    def _last_state(self, states: Tensor, number: int) -> Tensor:
        """Return state `number` after the last step; 0 for an empty sequence, as in onnxruntime."""

        def element(d: Expr, b: Expr, j: Expr) -> Expr:
            value = states[number, self.steps, d, b, j]
            return value if self.lengths is None else select(self.lengths[b] <= 0, wrap(0, value.dtype), value)

        return T.compute(self.state, element, "last")


@op("RNN", kind=Kind.COMPLEX, rounded_once=True, needs_kernel=True, operands=COMMON_OPERANDS)
def rnn(node: Node) -> list[Tensor]:
    """Build RNN: the states after each step [steps, directions, batch, hidden], and the last."""
    layer = _Layer(node, 1, ["Tanh"])

    def step(t: Expr, states: States) -> list[Tensor]:
        """Return the state after step t."""
        old, from_state = states[0], layer.multiply_state_gates(states[0], 0, 1)

        def new(d: Expr, b: Expr, j: Expr) -> Expr:
            value = layer.activate(0, d, layer.input_gate(0, t, d, b, j) + from_state[d, b, j])
            return layer.keep_if_ended(t, b, value, old[d, b, j])

        return [T.compute(layer.state, new, "h")]

    return layer.scan_outputs([layer.initial_state("initial_h")], step)


@op("GRU", kind=Kind.COMPLEX, rounded_once=True, needs_kernel=True, operands=COMMON_OPERANDS)
def gru(node: Node) -> list[Tensor]:
    """Build GRU: gates update, reset and the new state.

    With the attribute linear_before_reset, the reset gate multiplies the product of the state, else the state.
    """
    layer, resets_product = _Layer(node, 3, ["Sigmoid", "Tanh"]), bool(node.attrs.get("linear_before_reset", 0))
    hidden = layer.hidden

    def step(t: Expr, states: States) -> list[Tensor]:
        """Return the state after step t."""
        old, from_state = states[0], layer.multiply_state_gates(states[0], 0, 3 if resets_product else 2)

        def gate(number: int, d: Expr, b: Expr, j: Expr) -> Expr:
            value = layer.input_gate(number, t, d, b, j) + from_state[d, b, j + number * hidden]
            return layer.activate(0, d, value)

        if not resets_product:
            reset = T.compute(layer.state, lambda d, b, j: gate(1, d, b, j) * old[d, b, j], "reset")
            product_of_reset = layer.multiply_state_gates(reset, 2, 1)

        def new(d: Expr, b: Expr, j: Expr) -> Expr:
            """Return element j of the state of direction d, sequence b."""
            reset_part = (
                gate(1, d, b, j) * from_state[d, b, j + 2 * hidden] if resets_product else product_of_reset[d, b, j]
            )
            z = gate(0, d, b, j)
            value = (wrap(1, z.dtype) - z) * layer.activate(
                1, d, layer.input_gate(2, t, d, b, j) + reset_part
            ) + z * old[d, b, j]
            return layer.keep_if_ended(t, b, value, old[d, b, j])

        return [T.compute(layer.state, new, "h")]

    return layer.scan_outputs([layer.initial_state("initial_h")], step)


class _DynamicLayer(_Layer):
    """A layer of DynamicQuantizeLSTM, whose weights are bytes with scales and zero points.

    Weights are [D, I, G * H] and [D, H, G * H]; scales and zero points (inputs 8 to 11) belong to a direction, or to
    each of its columns. Inputs are quantised by their range, states by their range at each step. Rounding is that of
    onnxruntime on one thread: a range is that of a direction over all sequences. Inputs beyond the longest sequence,
    and states of ended sequences, count as zeros. Biases are added last, as one sum.
    """

    inputs_first = True

    def multiply_inputs(self, flat: Tensor) -> Tensor:
        """Quantise the inputs and multiply them by w; elements beyond the longest sequence count as 0 in the range."""
        x, lengths = self.x, self.lengths
        in_range = x
        if lengths is not None:
            b = T.reduce_axis(self.batch, "b")
            longest = T.compute((), lambda: T.max(lengths[b], b), "longest")
            step_axis = 1 if self.by_batch else 0

            def element(*i: Expr) -> Expr:
                return select(i[step_axis] < longest[()].astype(T.INDEX), x[i], wrap(0, x.dtype))

            in_range = T.compute(x.shape, element, "seen")
        flat_in_range = reshaped(in_range, (1, *flat.shape))
        return self._product(flat_in_range, reshaped(flat, flat_in_range.shape), self.w, "w")

    def multiply_state(self, t: Expr, state: Tensor) -> Tensor:
        """Quantise the states before step t and multiply them by r; those of ended sequences count as 0."""
        lengths = self.lengths
        if lengths is not None:
            old = state

            def element(d: Expr, b: Expr, j: Expr) -> Expr:
                return select(t <= lengths[b].astype(T.INDEX), old[d, b, j], wrap(0, old.dtype))

            state = T.compute(old.shape, element, "seen")
        return self._product(state, state, self.r, "r")

    def _product(self, in_range: Tensor, x: Tensor, w: Tensor, name: str) -> Tensor:
        """Return x [D or 1, ., K], quantised by the range of `in_range`, times w [D, K, N], scaled to float32.

        name: "w" or "r", as in the names of the operands that are the scales and zero points of w. Raises Unsupported
        for scales of another shape.
        """
        scales, zeros, inner = self.node.input(f"{name}_scale"), self._zero_points(f"{name}_zero_point", w), x.shape[2]
        scale, zero = dynamic_quantisation(in_range, (1, 2))
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
            """Subtract the products of zero points from a sum, and scale it to float32."""
            d, m, n = i
            x_direction = wrap(0, T.INDEX) if x.shape[0] == 1 else d
            z = zero[x_direction].astype("int32")
            acc = acc - z * columns[d, n]
            if zeros is not None:
                acc = acc - zeros[d] * (rows[x_direction, m] - z * inner)
            return acc.astype("float32") * (scale[x_direction] * (scales[d, n] if by_column else scales[d]))

        no_zero_point = ZeroPoint(lambda n: wrap(0, "int32"), is_zero=True)
        return matrix_product(quantised, w, wrap(0, "int32"), no_zero_point, finish)

    def _zero_points(self, operand: str, w: Tensor) -> Tensor | None:
        """Return the zero point of w for each direction, shifted to int8, as int32; None where all are 0.

        onnxruntime has one for all columns of a direction. Raises Unsupported where they differ.
        """
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

    def add_late_bias(self, x: Expr, d: Expr, n: Expr) -> Expr:
        return x if self.bias is None else x + (self.bias[d, n] + self.bias[d, n + self.r.shape[2]])


def _signed(byte: Expr) -> Expr:
    """Return a byte as int8; a uint8 is shifted by 128."""
    return byte.astype("int8") ^ -128 if byte.dtype == "uint8" else byte


@op("LSTM", kind=Kind.COMPLEX, rounded_once=True, needs_kernel=True, operands=LSTM_OPERANDS)
@op(
    "DynamicQuantizeLSTM", kind=Kind.COMPLEX, rounded_once=True, needs_kernel=True, domain="com.microsoft",
    variant_of="LSTM",
    operands=f"{LSTM_OPERANDS} w_scale w_zero_point r_scale r_zero_point",
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
        from_state = layer.multiply_state(t, old)

        def gate(number: int, cells: Tensor | None, d: Expr, b: Expr, j: Expr) -> Expr:
            """Return gate `number`; cells: those that its peephole looks at, None for the new cell, which has none."""
            value = layer.input_gate(number, t, d, b, j) + from_state[d, b, j + number * hidden]
            if peepholes is not None and cells is not None:
                value = value + peepholes[d, j + number * hidden] * cells[d, b, j]
            value = layer.add_late_bias(value, d, j + number * hidden)
            return layer.activate(0 if cells is not None else 1, d, value)

        def cell_after(d: Expr, b: Expr, j: Expr) -> Expr:
            enter = gate(0, cell, d, b, j)
            forget = wrap(1, enter.dtype) - enter if coupled else gate(2, cell, d, b, j)
            value = forget * cell[d, b, j] + enter * gate(3, None, d, b, j)
            return layer.keep_if_ended(t, b, value, cell[d, b, j])

        new_cell = T.compute(layer.state, cell_after, "c")

        def new(d: Expr, b: Expr, j: Expr) -> Expr:
            value = gate(1, new_cell, d, b, j) * layer.activate(2, d, new_cell[d, b, j], clips=False)
            return layer.keep_if_ended(t, b, value, old[d, b, j])

        return [T.compute(layer.state, new, "h"), new_cell]

    return layer.scan_outputs([layer.initial_state("initial_h"), layer.initial_state("initial_c")], step)
