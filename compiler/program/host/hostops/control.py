"""Control flow, constants, random numbers, and values that are no tensors.

Its parts, in order: If, Loop and Scan, which run their subgraphs; constants; random numbers; sequences (Python lists)
and optionals (None where empty).
"""

from __future__ import annotations

import numpy as np

from celosia.compiler.program.host.op import (
    Array,
    HostOp,
    RunnableBodies,
    RunnableBody,
    Value,
    check_size,
    host,
    int_list,
    numpy_type,
)


@host("If")
def if_(op: HostOp, condition: Array, *, bodies: RunnableBodies) -> tuple[Value, ...]:
    """Run one of two subgraphs, by the condition, and return its outputs."""
    return tuple(bodies["then_branch" if condition.reshape(-1)[0] else "else_branch"].run([]))


@host("Loop")
def loop(
    op: HostOp, trips: Array | None = None, condition: Array | None = None, *state: Value, bodies: RunnableBodies
) -> tuple[Value, ...]:
    """Run a subgraph until a number of trips or a condition ends it.

    Returns the state that it carries from iteration to iteration, then its other outputs, stacked over iterations.
    """
    body = bodies["body"]
    carried = list(state)
    count = None if trips is None else int(trips.reshape(-1)[0])
    continues = condition is None or bool(condition.reshape(-1)[0])
    rows: list[list[Array]] = [[] for _ in body.types[1 + len(state) :]]
    i = stacked_bytes = 0
    while continues and (count is None or i < count):
        out = body.run([np.array(i, np.int64), np.array(continues), *carried])
        continues = bool(np.reshape(out[0], -1)[0])
        carried = out[1 : 1 + len(state)]
        for row, value in zip(rows, out[1 + len(state) :]):
            row.append(value)
            stacked_bytes += value.nbytes
        check_size(stacked_bytes, f"{op.label}: its scan outputs after {i + 1} steps")
        i += 1
    first = 1 + len(state)
    return (*carried, *(np.stack(row) if row else body.nothing(first + k) for k, row in enumerate(rows)))


@host("Scan")
def scan(op: HostOp, *inputs: Value, bodies: RunnableBodies) -> tuple[Value, ...]:
    """Run a subgraph over slices of the inputs; return the last states and the stacked outputs."""
    if op.opset < 9:
        return _scan_batches(op, bodies["body"], *inputs)
    return _scan(
        op, inputs, bodies["body"], op.attr("scan_input_directions"), op.attr("scan_input_axes"),
        op.attr("scan_output_directions"), op.attr("scan_output_axes"),
    )  # fmt: skip


def _scan_batches(op: HostOp, body: RunnableBody, lengths: Array | None, *inputs: Array) -> tuple[Value, ...]:
    """Run Scan of opset 8, whose inputs have a batch dimension in front: a scan for each sample."""
    if lengths is not None:
        raise op.fail("lengths of sequences are not supported in opset 8")
    results = [
        _scan(op, [value[b] for value in inputs], body, op.attr("directions"), None, None, None)
        for b in range(inputs[0].shape[0])
    ]
    return tuple(np.stack(values) for values in zip(*results))


def _scan(
    op: HostOp, inputs: tuple[Value, ...] | list[Value], body: RunnableBody, backward: list[int] | None,
    axes: list[int] | None, out_backward: list[int] | None, out_axes: list[int] | None,
) -> tuple[Value, ...]:  # fmt: skip
    """Run one scan over slices of its inputs; return the last states and the stacked outputs.

    inputs: states, then the inputs that are sliced. backward: for each of the latter, whether it runs from the end.
    axes: along which each is sliced. out_backward, out_axes: the same for outputs. None stands for forward and axis 0.
    """
    count = int(op.attrs["num_scan_inputs"])
    states = len(inputs) - count
    state, scanned = list(inputs[:states]), list(inputs[states:])
    scanned = [np.moveaxis(value, axis, 0) for value, axis in zip(scanned, axes or [0] * count)]
    scanned = [value[::-1] if back else value for value, back in zip(scanned, backward or [0] * count)]
    if len({len(value) for value in scanned}) > 1:
        raise op.fail(f"inputs of {[len(value) for value in scanned]} steps")
    rows: list[list[Array]] = [[] for _ in body.types[states:]]
    for i in range(len(scanned[0])):
        out = body.run([*state, *(np.asarray(value[i], order="C") for value in scanned)])
        state = out[:states]
        for row, value in zip(rows, out[states:]):
            row.append(value)
    results = []
    for k, row in enumerate(rows):
        value = np.stack(row[::-1] if out_backward and out_backward[k] else row) if row else body.nothing(states + k)
        results.append(np.moveaxis(value, 0, out_axes[k]) if out_axes else value)
    return (*state, *results)


@host("Constant")
def constant(op: HostOp) -> Value:
    """Return the value in the attributes."""
    for name, kind in (
        ("value", None), ("sparse_value", None), ("value_float", np.float32), ("value_floats", np.float32),
        ("value_int", np.int64), ("value_ints", np.int64), ("value_string", object), ("value_strings", object),
    ):  # fmt: skip
        if name in op.attrs:
            return op.attrs[name] if kind is None else np.array(op.attrs[name], kind)
    raise op.fail("it has no value")


@host("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", random=True)
def random(op: HostOp, like: Array | None = None) -> Array:
    """Draw an array of normal or uniform random numbers; like: input whose shape it takes."""
    kind = np.dtype(np.float32) if like is None else like.dtype
    kind = numpy_type(op.attrs["dtype"]) if "dtype" in op.attrs else kind
    rng = _generator(op)
    shape = tuple(op.attrs["shape"]) if like is None else like.shape
    if "Normal" in op.op:
        return rng.normal(op.attr("mean", 0.0), op.attr("scale", 1.0), shape).astype(kind)
    return rng.uniform(op.attr("low", 0.0), op.attr("high", 1.0), shape).astype(kind)


@host("Bernoulli", random=True)
def bernoulli(op: HostOp, x: Array) -> Array:
    """Draw 1 with the probability in `x`, else 0."""
    kind = numpy_type(op.attrs["dtype"]) if "dtype" in op.attrs else x.dtype
    return np.asarray(_generator(op).uniform(size=x.shape) < x).astype(kind)


@host("Multinomial", random=True)
def multinomial(op: HostOp, x: Array) -> Array:
    """Draw classes for each row of `x` [batch, classes], which holds logarithms of probabilities."""
    chances = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    sums = np.cumsum(chances / chances.sum(axis=1, keepdims=True), axis=1)
    draws = _generator(op).uniform(size=(x.shape[0], op.attr("sample_size", 1)))
    picked = (draws[:, :, None] >= sums[:, None, :]).sum(axis=2)
    return np.asarray(np.minimum(picked, x.shape[1] - 1)).astype(numpy_type(op.attr("dtype", 6)))


@host("Dropout", random=True)
def dropout(op: HostOp, x: Array, ratio: Array | None = None, training: Array | None = None) -> tuple[Array, Array]:
    """Drop elements in training and scale the others. Returns the result and the mask.

    Before opset 12, which has no training mode, onnxruntime's mask is 0 everywhere, in opset 7 with the type of `x`.
    """
    if op.opset < 12:
        return x, np.zeros(x.shape, bool if op.opset >= 10 else x.dtype)
    share = 0.5 if ratio is None else float(ratio.reshape(-1)[0])
    if training is None or not training.reshape(-1)[0] or share == 0:
        return x, np.ones(x.shape, bool)
    mask = _generator(op).uniform(size=x.shape) >= share
    return np.asarray(x * mask / (1 - share)).astype(x.dtype), mask


def _generator(op: HostOp) -> np.random.RandomState:
    """Create a generator from the attribute `seed`, or with a random seed."""
    seed = op.attr("seed")
    if seed is None:
        return np.random.RandomState()
    return np.random.RandomState(int(seed) if seed == int(seed) >= 0 else int(np.float32(seed).view(np.uint32)))


@host("SequenceEmpty")
def empty(op: HostOp) -> list[Value]:
    """Create an empty sequence."""
    return []


@host("SequenceConstruct")
def construct(op: HostOp, *values: Value) -> list[Value]:
    """Create a sequence of the inputs."""
    return list(values)


def _position(op: HostOp, values: list[Value], index: Array | None, end: int) -> int:
    """Convert an index, negative from the end, to a position. Raises HostError where it is out of range."""
    position = end if index is None else int(index.reshape(-1)[0])
    if not -len(values) <= position <= end:
        raise op.fail(f"position {position} of a sequence of {len(values)}")
    return position + len(values) if position < 0 else position


@host("SequenceInsert")
def insert(op: HostOp, values: list[Value], value: Value, index: Array | None = None) -> list[Value]:
    """Insert `value` at `index`, by default at the end. Raises HostError where it is out of range."""
    position = _position(op, values, index, len(values))
    return [*values[:position], value, *values[position:]]


@host("SequenceErase")
def erase(op: HostOp, values: list[Value], index: Array | None = None) -> list[Value]:
    """Remove the element at `index`, by default the last. Raises HostError where it is out of range."""
    position = _position(op, values, index, len(values) - 1)
    return values[:position] + values[position + 1 :]


@host("SequenceAt")
def at(op: HostOp, values: list[Value], index: Array) -> Value:
    """Return the element at `index`. Raises HostError where it is out of range."""
    return values[_position(op, values, index, len(values) - 1)]


@host("SequenceLength")
def length(op: HostOp, values: list[Value]) -> Array:
    """Return the number of elements, as int64 []."""
    return np.array(len(values), np.int64)


@host("SplitToSequence")
def split(op: HostOp, x: Array, sizes: Array | None = None) -> list[Value]:
    """Split `x` along an axis into parts of these sizes, of one size, or of 1.

    Raises HostError where sizes do not add up.
    """
    axis = op.attr("axis", 0)
    total = x.shape[axis]
    if sizes is None:
        parts = np.split(x, total, axis) if total else []
        return parts if op.attr("keepdims", 1) else [part.squeeze(axis) for part in parts]
    if sizes.ndim == 0:
        step = int(sizes)
        return np.split(x, range(step, total, step), axis)
    if sum(int_list(sizes)) != total:
        raise op.fail(f"sizes {int_list(sizes)} of an axis of {total}")
    return np.split(x, np.cumsum(sizes)[:-1], axis)


@host("ConcatFromSequence")
def concat(op: HostOp, values: list[Value]) -> Array:
    """Concatenate all elements along an axis, or stack them along a new one."""
    join = np.stack if op.attr("new_axis", 0) else np.concatenate
    return np.asarray(join(values, axis=op.attrs["axis"]))


@host("Optional")
def optional(op: HostOp, value: Value = None) -> Value:
    """Create an optional of the value, or an empty one."""
    return value


@host("OptionalHasElement")
def has_element(op: HostOp, value: Value = None) -> Array:
    """Return whether the optional is not empty, as bool []."""
    return np.array(value is not None)


@host("OptionalGetElement")
def get_element(op: HostOp, value: Value) -> Value:
    """Return the value of an optional. Raises HostError where it is empty."""
    if value is None:
        raise op.fail("the optional is empty")
    return value
