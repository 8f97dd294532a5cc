"""Operators that move elements: views, Transpose, Concat, Slice, Pad, Gather and others."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from celosia.compiler import expr as T
from celosia.compiler.expr import INDEX, Expr, Tensor, select, wrap
from celosia.compiler.ops.registry import ONNX_TYPES, Array, Node, Shape, at, op, reshaped
from celosia.compiler.program.host.shape_rules import broadcast, slice_positions
from celosia.compiler.program.op_spec import Kind, Moves


def view_shape(node: Node) -> Shape:
    """Return the output shape of a view operator: Reshape, Flatten, Squeeze, Unsqueeze; others keep the input's shape.

    Raises Unsupported where the attributes or constants do not fit the input.
    """
    x = node.input(0)
    rank = len(x.shape)
    match node.op:
        case "Reshape":
            new_shape = node.ints("shape")
            if new_shape is None:
                raise node.fail("shape is missing")
            if not node.attrs.get("allowzero", 0):
                new_shape = [x.shape[d] if v == 0 and d < rank else v for d, v in enumerate(new_shape)]
            if new_shape.count(-1) == 1:
                known_size = prod(v for v in new_shape if v != -1)
                new_shape[new_shape.index(-1)] = x.size // known_size if known_size else 0
            if prod(new_shape) != x.size or min(new_shape, default=0) < 0:
                raise node.fail(f"{list(x.shape)} cannot be reshaped to {new_shape}")
            return tuple(new_shape)
        case "Flatten":
            axis = int(node.attrs.get("axis", 1))
            axis = axis + rank if axis < 0 else axis
            return prod(x.shape[:axis]), prod(x.shape[axis:])
        case "Squeeze":
            axes = node.ints("axes")
            drop = {a % rank for a in axes} if axes else {d for d, n in enumerate(x.shape) if n == 1}
            if any(x.shape[d] != 1 for d in drop):
                raise node.fail(f"axes {sorted(drop)} of {list(x.shape)} are not all 1")
            return tuple(n for d, n in enumerate(x.shape) if d not in drop)
        case "Unsqueeze":
            axes = node.ints("axes")
            if axes is None:
                raise node.fail("axes are missing")
            total = rank + len(axes)
            new_axes = {a % total for a in axes}
            old_sizes = iter(x.shape)
            return tuple(1 if d in new_axes else next(old_sizes) for d in range(total))
    return x.shape


@op("Reshape", kind=Kind.INJECTIVE, moves=Moves.ALL, view=True, operands="data shape:shape")
@op("Squeeze", kind=Kind.INJECTIVE, moves=Moves.ALL, view=True, operands="data axes:shape?")
@op("Unsqueeze", kind=Kind.INJECTIVE, moves=Moves.ALL, view=True, operands="data axes:shape")
@op("Flatten", kind=Kind.INJECTIVE, moves=Moves.ALL, view=True, operands="input")
def reshape(node: Node) -> Tensor:
    """Build Reshape, Squeeze, Unsqueeze or Flatten."""
    return reshaped(node.input(0), view_shape(node), node.op.lower())


@op("Transpose", kind=Kind.INJECTIVE, moves=Moves.ALL, operands="data")
def transpose(node: Node) -> Tensor:
    """Build Transpose. Raises Unsupported where `perm` is no permutation of the axes."""
    x = node.input(0)
    perm = [int(p) for p in node.attrs.get("perm", range(len(x.shape))[::-1])]
    if sorted(perm) != list(range(len(x.shape))):
        raise node.fail(f"perm {perm} for {len(x.shape)} dimensions")
    inverse = np.argsort(perm)
    return T.compute(tuple(x.shape[p] for p in perm), lambda *i: x[tuple(i[d] for d in inverse)], "transpose")


@op("Concat", kind=Kind.COMPLEX, moves=Moves.JOIN, operands="(inputs)*")
def concat(node: Node) -> Tensor:
    """Build Concat along an axis."""
    tensors = [node.input(i) for i in range(len(node.inputs))]
    axis = node.axis(0, len(tensors[0].shape))
    return concatenate(node, tensors, axis, [lambda x: x] * len(tensors))


def concatenate(node: Node, tensors: list[Tensor], axis: int, maps: list[Callable[[Expr], Expr]]) -> Tensor:
    """Concatenate `tensors` along `axis`. maps: for each tensor, a function of its elements, such as requantisation.

    Raises Unsupported where other axes differ.
    """
    first = tensors[0]
    for t in tensors:
        if [n for d, n in enumerate(t.shape) if d != axis] != [n for d, n in enumerate(first.shape) if d != axis]:
            raise node.fail(f"shapes {[list(t.shape) for t in tensors]} differ beside axis {axis}")
    parts = [(t, m) for t, m in zip(tensors, maps) if t.shape[axis]] or [(first, maps[0])]
    shape = list(first.shape)
    shape[axis] = sum(t.shape[axis] for t in tensors)

    def body(*index: Expr) -> Expr:
        """Return the element of the tensor in whose part the index lies; the last tensor is the default."""
        start = shape[axis]
        value: Expr | None = None
        for tensor, fn in reversed(parts):
            start -= tensor.shape[axis]
            element = fn(tensor[(*index[:axis], index[axis] - start, *index[axis + 1 :])])
            value = element if value is None else select(index[axis] < start + tensor.shape[axis], element, value)
        assert value is not None
        return value

    return T.compute(tuple(shape), body, node.op.lower())


@op(
    "Slice", kind=Kind.INJECTIVE, moves=Moves.SOME,
    operands="data starts:shape ends:shape axes:shape? steps:shape?",
)  # fmt: skip
def slice_(node: Node) -> Tensor:
    """Build Slice with constant bounds and steps. Raises Unsupported for others, or for a missing axis."""
    x = node.input(0)
    starts, ends = node.ints("starts"), node.ints("ends")
    if starts is None or ends is None:
        raise node.fail("starts and ends are missing")
    axes = node.ints("axes") or list(range(len(starts)))
    steps = node.ints("steps") or [1] * len(starts)
    ranges = [range(n) for n in x.shape]
    for start, end, axis, step in zip(starts, ends, axes, steps):
        if not -len(ranges) <= axis < len(ranges):
            raise node.fail(f"axis {axis} of {len(ranges)} dimensions")
        try:
            ranges[axis] = slice_positions(x.shape[axis], start, end, step)
        except ValueError as e:
            raise node.fail(str(e)) from e
    return T.compute(
        tuple(len(r) for r in ranges),
        lambda *index: x[tuple(i * r.step + r.start for i, r in zip(index, ranges))],
        "slice",
    )


@op("Split", kind=Kind.OPAQUE, moves=Moves.SOME, operands="input split:shape?")
def split(node: Node) -> list[Tensor]:
    """Build Split into constant sizes, or equal parts. Raises Unsupported where sizes do not add up."""
    x = node.input(0)
    axis = node.axis(0, len(x.shape))
    sizes = node.ints("split")
    if sizes is None:
        count = int(node.attrs.get("num_outputs", node.outputs))
        chunk = -(-x.shape[axis] // count)
        sizes = [max(0, min(chunk, x.shape[axis] - k * chunk)) for k in range(count)]
    if sum(sizes) != x.shape[axis]:
        raise node.fail(f"sizes {sizes} of an axis of {x.shape[axis]}")
    out, start = [], 0
    for number, size in enumerate(sizes):
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])

        def body(*index: Expr, start: int = start) -> Expr:
            return x[(*index[:axis], index[axis] + start, *index[axis + 1 :])]

        out.append(T.compute(shape, body, f"split{number}"))
        start += size
    return out


def padded(x: Tensor, before: Shape, after: Shape, value: Expr, change: Callable[[Expr], Expr] | None = None) -> Tensor:
    """Pad x with `value`, `before` and `after` elements on each axis; elements of x go through `change` first.

    A negative number of elements cuts them off.
    """
    if not any(before) and not any(after) and change is None:
        return x
    shape = tuple(b + n + a for b, n, a in zip(before, x.shape, after))

    def body(*index: Expr) -> Expr:
        is_inside: Expr | None = None
        for i, b, a, n in zip(index, before, after, x.shape):
            for is_needed, test in ((b > 0, i >= b), (a > 0, i < b + n)):
                if is_needed:
                    is_inside = test if is_inside is None else is_inside & test
        element = x[tuple(i - b for i, b in zip(index, before))]
        element = element if change is None else change(element)
        return element if is_inside is None else select(is_inside, element, value)

    return T.compute(shape, body, "pad")


@op(
    "Pad", kind=Kind.INJECTIVE, moves=Moves.FILL, operands="data pads:shape constant_value? axes:shape?",
)  # fmt: skip
def pad(node: Node) -> Tensor:
    """Build Pad by a value, edge, reflection or wrapping; negative pads cut. Raises Unsupported without constants."""
    x = node.input(0)
    rank = len(x.shape)
    pads, axes = node.ints("pads"), node.ints("axes") if node.has("axes") else None
    if pads is None:
        raise node.fail("pads are missing")
    before, after = [0] * rank, [0] * rank
    padded_axes = [a % rank for a in axes] if axes is not None else list(range(rank))
    for k, d in enumerate(padded_axes):
        before[d], after[d] = pads[k], pads[k + len(padded_axes)]
    mode = node.attrs.get("mode", "constant")
    if mode == "constant":
        value = wrap(node.attrs["value"], x.dtype) if "value" in node.attrs else node.scalar("constant_value", x.dtype)
        return padded(x, tuple(before), tuple(after), value)
    cut = tuple(slice(max(0, -b), n - max(0, -a)) for b, a, n in zip(before, after, x.shape))
    if any(b < 0 for b in before + after):  # negative pads cut
        starts = [c.start for c in cut]
        uncut = x
        x = T.compute(
            tuple(c.stop - c.start for c in cut), lambda *i: uncut[tuple(k + s for k, s in zip(i, starts))], "cut"
        )
        before, after = [max(0, b) for b in before], [max(0, a) for a in after]

    def source(i: Expr, b: int, n: int) -> Expr:
        """Return the index in an axis of `n` elements that padded index `i` reads, with `b` elements before it."""
        k = i - b
        if mode == "edge":
            return T.clip(k, 0, n - 1)
        if mode == "wrap":
            return k % n
        if n == 1:
            return wrap(0, INDEX)
        k = T.binary("mod", k, 2 * (n - 1))  # reflect
        return T.minimum(T.minimum(k, wrap(2 * (n - 1), INDEX) - k), wrap(n - 1, INDEX))

    if mode not in ("edge", "wrap", "reflect"):
        raise node.fail(f"mode {mode}")
    shape = tuple(b + n + a for b, n, a in zip(before, x.shape, after))
    return T.compute(
        shape,
        lambda *index: x[tuple(i if not b and not a else source(i, b, n)
                               for i, b, a, n in zip(index, before, after, x.shape))],
        "pad",
    )  # fmt: skip


def wrap_index(index: Expr, n: int) -> Expr:
    """Clamp an index that is read at run time to an axis of n elements; negative ones count from the end."""
    index = index.astype(INDEX)
    return T.clip(select(index < 0, index + n, index), 0, max(n - 1, 0))


@op("Gather", kind=Kind.INJECTIVE, moves=Moves.SOME, operands="data indices")
def gather(node: Node) -> Tensor:
    """Build Gather: slices along an axis; indices out of range are undefined."""
    x, indices = node.input(0), node.input(1)
    axis, count = node.axis(0, len(x.shape)), len(indices.shape)
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])

    def body(*index: Expr) -> Expr:
        position = wrap_index(indices[index[axis : axis + count]], x.shape[axis])
        return x[(*index[:axis], position, *index[axis + count :])]

    return T.compute(shape, body, "gather")


@op("GatherElements", kind=Kind.COMPLEX, moves=Moves.SOME, operands="data indices")
def gather_elements(node: Node) -> Tensor:
    """Build GatherElements: for each index one element along an axis, at its place on the other axes."""
    x, indices = node.input(0), node.input(1)
    axis = node.axis(0, len(x.shape))

    def body(*index: Expr) -> Expr:
        return x[(*index[:axis], wrap_index(indices[index], x.shape[axis]), *index[axis + 1 :])]

    return T.compute(indices.shape, body, "gather_elements")


@op("GatherND", kind=Kind.COMPLEX, moves=Moves.SOME, operands="data indices")
def gather_nd(node: Node) -> Tensor:
    """Build GatherND: each row of indices selects a slice of x; the first `batch_dims` axes correspond."""
    x, indices = node.input(0), node.input(1)
    batch, depth = int(node.attrs.get("batch_dims", 0)), indices.shape[-1]
    lead = indices.shape[:-1]

    def body(*index: Expr) -> Expr:
        head = index[: len(lead)]
        positions = [wrap_index(indices[(*head, k)], x.shape[batch + k]) for k in range(depth)]
        return x[(*index[:batch], *positions, *index[len(lead) :])]

    return T.compute((*lead, *x.shape[batch + depth :]), body, "gather_nd")


@op("Expand", kind=Kind.INJECTIVE, moves=Moves.SOME, operands="input shape:shape")
def expand(node: Node) -> Tensor:
    """Build Expand: broadcast to a constant shape. Raises Unsupported where it is no constant, or does not fit."""
    x = node.input(0)
    try:
        shape = broadcast(x.shape, tuple(int(v) for v in node.constant("shape")))
    except ValueError as e:
        raise node.fail(str(e)) from e
    return T.compute(shape, lambda *i: at(x, i), "expand")


@op("Tile", kind=Kind.INJECTIVE, moves=Moves.SOME, operands="input repeats:shape")
def tile(node: Node) -> Tensor:
    """Build Tile: repetition along each axis, by constant numbers of times."""
    x, repeats = node.input(0), [int(v) for v in node.constant("repeats")]
    shape = tuple(n * r for n, r in zip(x.shape, repeats))
    return T.compute(shape, lambda *i: x[tuple(k if r == 1 else k % n for k, n, r in zip(i, x.shape, repeats))], "tile")


@op("DepthToSpace", kind=Kind.COMPLEX, moves=Moves.SOME, operands="input")
def depth_to_space(node: Node) -> Tensor:
    """Build DepthToSpace: channels to blocks of pixels. Raises Unsupported where they do not divide."""
    x, b = node.input(0), int(node.attrs["blocksize"])
    n, c, h, w = x.shape
    if b < 1 or c % (b * b):
        raise node.fail(f"blocks of {b} x {b} do not divide {c} channels")
    c //= b * b
    crd = node.attrs.get("mode", "DCR") == "CRD"

    def body(ni: Expr, ci: Expr, y: Expr, xi: Expr) -> Expr:
        dy, dx = y % b, xi % b
        channel = ci * (b * b) + dy * b + dx if crd else (dy * b + dx) * c + ci
        return x[ni, channel, y // b, xi // b]

    return T.compute((n, c, h * b, w * b), body, "depth_to_space")


@op("SpaceToDepth", kind=Kind.COMPLEX, moves=Moves.SOME, operands="input")
def space_to_depth(node: Node) -> Tensor:
    """Build SpaceToDepth: blocks of pixels to channels. Raises Unsupported where they do not divide."""
    x, b = node.input(0), int(node.attrs["blocksize"])
    n, c, h, w = x.shape
    if b < 1 or h % b or w % b:
        raise node.fail(f"blocks of {b} x {b} do not divide {h} x {w} elements")
    crd = node.attrs.get("mode", "DCR") == "CRD"

    def body(ni: Expr, ci: Expr, y: Expr, xi: Expr) -> Expr:
        block, channel = (ci % (b * b), ci // (b * b)) if crd else (ci // c, ci % c)
        return x[ni, channel, y * b + block // b, xi * b + block % b]

    return T.compute((n, c * b * b, h // b, w // b), body, "space_to_depth")


@op("Trilu", kind=Kind.COMPLEX, operands="input k?")
def trilu(node: Node) -> Tensor:
    """Build Trilu: the triangle above or below a diagonal of the last two axes, 0 elsewhere."""
    x, k = node.input(0), node.scalar("k", INDEX)
    upper = node.attrs.get("upper", 1)

    def body(*i: Expr) -> Expr:
        is_inside = i[-1] - i[-2] >= k if upper else i[-1] - i[-2] <= k
        return select(is_inside, x[i], 0)

    return T.compute(x.shape, body, "trilu")


@op("OneHot", kind=Kind.OPAQUE, operands="indices depth:shape values")
def one_hot(node: Node) -> Tensor:
    """Build OneHot: a new axis of `depth` elements, the second of `values` at the index, the first elsewhere.

    Raises Unsupported unless `values` has two elements.
    """
    indices, values = node.input("indices"), node.input("values")
    depth = int(node.constant("depth").reshape(()))
    if values.size != 2:
        raise node.fail(f"its values are {values.size} numbers, not 2")
    rank = len(indices.shape) + 1
    axis = node.axis(-1, rank)
    shape = (*indices.shape[:axis], depth, *indices.shape[axis:])

    def body(*i: Expr) -> Expr:
        k = indices[(*i[:axis], *i[axis + 1 :])].astype(INDEX)
        return select(T.equal(select(k < 0, k + depth, k), i[axis]), values.flat(1), values.flat(0))

    return T.compute(shape, body, "one_hot")


# Values known when the model is compiled


@op("Shape", "Size", kind=Kind.OPAQUE, operands="data")
def shape_of(node: Node) -> Tensor:
    """Build Shape (or a slice of it) or Size, as an int64 constant."""
    x = node.input(0)
    start, end = int(node.attrs.get("start", 0)), node.attrs.get("end")
    dims = x.shape[start : None if end is None else int(end)]
    return copy_constant(np.array(x.size if node.op == "Size" else dims, np.int64), node.op.lower())


@op("ConstantOfShape", kind=Kind.OPAQUE, operands="input:shape")
def constant_of_shape(node: Node) -> Tensor:
    """Build ConstantOfShape: one value in a constant shape."""
    value = np.asarray(node.attrs.get("value", np.zeros(1, np.float32))).reshape(-1)
    shape = tuple(int(v) for v in node.constant("input"))
    return T.compute(shape, lambda *i: wrap(value[0], value.dtype.name), "filled")


@op("Range", kind=Kind.OPAQUE, operands="start:shape limit:shape delta:shape")
def range_(node: Node) -> Tensor:
    """Build Range of constants. Raises Unsupported for a step of 0, and for bfloat16, which kernels lack."""
    start, limit, delta = (node.constant(name) for name in ("start", "limit", "delta"))
    if start.dtype.name == "bfloat16":
        raise node.fail("of bfloat16")
    if not np.all(delta):
        raise node.fail("delta is 0")
    count = max(0, int(np.ceil((limit - start) / delta).reshape(())))
    first, step = (wrap(v.reshape(-1)[0], start.dtype.name) for v in (start, delta))
    return T.compute((count,), lambda i: first + i.astype(start.dtype.name) * step, "range")


@op("EyeLike", kind=Kind.OPAQUE, operands="input")
def eye_like(node: Node) -> Tensor:
    """Build EyeLike: 1 on a diagonal. Raises Unsupported unless there are two axes."""
    x, k = node.input(0), int(node.attrs.get("k", 0))
    if len(x.shape) != 2:
        raise node.fail(f"its input has {len(x.shape)} dimensions, not 2")
    dtype = ONNX_TYPES.get(int(node.attrs["dtype"]), "") if "dtype" in node.attrs else x.dtype
    if not dtype:
        raise node.fail(f"there is no element type {node.attrs['dtype']}")
    return T.compute(x.shape, lambda i, j: select(T.equal(j - i, k), wrap(1, dtype), wrap(0, dtype)), "eye")


def copy_constant(array: Array, name: str) -> Tensor:
    """Return a tensor computed as a copy of `array`: outputs of builders must be computed, not constants."""
    table = T.constant(array, f"{name}_table")
    return T.compute(array.shape, lambda *i: table[i], name)


@op("ReverseSequence", kind=Kind.COMPLEX, moves=Moves.JOIN, operands="input sequence_lens")
def reverse_sequence(node: Node) -> Tensor:
    """Build ReverseSequence: each sequence of a batch reversed up to its length."""
    x, lengths = node.input(0), node.input(1)
    time, batch = int(node.attrs.get("time_axis", 0)), int(node.attrs.get("batch_axis", 1))

    def body(*i: Expr) -> Expr:
        length = lengths[i[batch]]
        at_ = T.clip(select(i[time] < length, length - 1 - i[time], i[time]), 0, x.shape[time] - 1)
        return x[tuple(at_ if d == time else k for d, k in enumerate(i))]

    return T.compute(x.shape, body, "reverse_sequence")
