"""The imported model computed operator by operator, before any rewriting: the reference of check_rewriting.

Large models consist of convolutions, products and a few operators between them. These have fast numpy implementations
here; the host runtime computes all others. A tensor is identified by its value number rather than its name: tensors
that equal operators compute from equal tensors have one number.

A rewriting may round a QuantizeLinear to the other side, as an integer operator rounds once where the model's floats
round several times. So a QuantizeLinear gives two results, with the quotient moved down and up by ROUNDING_MARGIN of a
step and by the precision that float32 loses; the compiled model's result must lie between them. Other operators are
computed for both. Where a sum has elements of either, its two results are no bounds, but show the effect of one element
(`bounds_distance`).

Its parts, in order: the model (Original); quantisers; fast implementations; the tolerance: how far a compiled model's
tensor may lie from the bounds. It computes tensors of floats anew with results that are moved at random, to see how far
rounding alone moves them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.cpu.parse import parse
from celosia.compiler.graph.operands import quantisation_names
from celosia.compiler.graph.values import captured, constant, shape
from celosia.compiler.numerics.requantiser import average_error
from celosia.compiler.ops import Unsupported, op_spec
from celosia.compiler.ops.products import SlidingWindow
from celosia.compiler.ops.registry import Node, is_mapped
from celosia.compiler.program.dtypes import is_float
from celosia.compiler.program.host.execute import execute
from celosia.compiler.program.host.hostops import RANDOM
from celosia.compiler.program.host.hostops.value_types import quantised_type
from celosia.compiler.program.host.op import HostError, HostOp
from celosia.compiler.program.op_spec import find_operand

Array = NDArray[Any]
Bounds = tuple[Any, Any]
"""Least and greatest value of each element of a tensor; one object twice where it is exact."""
ROUNDING_MARGIN = 0.004
"""Part of a quantisation step that another order of roundings may change."""
MAX_VAGUE_SHARE = 8
"""A quantised tensor is not compared where its bounds differ by more than 1 / MAX_VAGUE_SHARE of its range."""
SUM_ROUNDING = 4e-6
"""Rounding error of a float32 sum, relative to the largest element."""
SCALE_RANGE = 2.0**-100, 2.0**100
"""Range of scales in which floats and integers agree; beyond it floats vanish or overflow."""
MAX_NUMBERED_ELEMENTS = 64
"""Limit of the elements of constants that are compared by value; larger ones are compared by identity."""


class NotComputable(Exception):
    """Raised for a tensor that cannot be computed here: it is random, its weights are not loaded, or its operator
    refuses.
    """


class Original:
    """The tensors of the imported model by value number, which is equal for equal computations. makers, constants,
    inputs: where the tensor with a number comes from. The model is copied.
    """

    def __init__(self, model: ir.Model) -> None:
        """Number the values of the graph: inputs by name, constants by content, and outputs by operator and
        operands.
        """
        self.graph = model.clone().graph
        self.opsets = dict(self.graph.opset_imports)
        self.number: dict[str, int] = {"": -1}
        """Value number of each tensor by name; -1 for an input that is left out."""
        self.makers: dict[int, ir.Node] = {}
        self.constants: dict[int, ir.Value] = {}
        self.inputs: dict[int, ir.Value] = {}
        known: dict[Any, int] = {}

        def assign_number(value: ir.Value, key: Any) -> int:
            """Return the number of `value`: that of earlier values with the same key, or a new one."""
            return self.number.setdefault(value.name or "", known.setdefault(key, len(known)))

        for value in self.graph.inputs:
            self.inputs[assign_number(value, value.name)] = value
        for value in self.graph.initializers.values():
            self.constants[assign_number(value, _constant_key(value))] = value
        for node in self.graph:
            read = tuple(self.number[name] for name in _names_read(node) if name in self.number)
            attributes = tuple(sorted((name, repr(attr.value)) for name, attr in node.attributes.items()))
            distinct = node if node.op_type in RANDOM or captured(node) else None
            for output, out in enumerate(node.outputs):
                if out.name:
                    key = (node.domain, node.op_type, read, attributes, output, len(node.outputs), distinct)
                    self.makers.setdefault(assign_number(out, key), node)

    def stops(self, tensor: int, candidates: Container[int], of_shapes: bool = True) -> set[int]:
        """Return the nearest of `candidates`, and the inputs, from which `tensor` is computed. of_shapes: also those of
        which only the shape is read.
        """
        reached: set[int] = set()
        waiting, seen = [tensor], {tensor}
        while waiting:
            current = waiting.pop()
            if not of_shapes and current in self.makers and self.makers[current].op_type in ("Shape", "Size"):
                continue
            for operand in self._operands(current):
                if operand in candidates or operand in self.inputs:
                    reached.add(operand)
                elif operand not in seen and operand not in self.constants:
                    seen.add(operand)
                    waiting.append(operand)
        return reached

    def compute(
        self, tensor: int, known: dict[int, Bounds], slack: float = 0, shake: np.random.Generator | None = None
    ) -> Bounds:  # fmt: skip
        """Compute the bounds of `tensor` from those in `known`. Raises NotComputable.

        Adds to `known` what `quantised` and `is_vague` look at: operands and results of QuantizeLinear in between.
        Other tensors in between are dropped after their last use: together they may be many times the model's size.

        slack: added to ROUNDING_MARGIN, in steps. shake: if given, each float result is moved at random by what its
        operator may have rounded, for `difference_beyond_rounding`, which compares several such computations.
        """
        uses, kept = self._uses_in_between(tensor, known), {tensor, *known}
        waiting, done = [tensor], set[int]()
        while waiting:  # a model may be deeper than Python's stack
            current = waiting[-1]
            if current not in known and current in self.constants:
                array = self._constant(current)
                known[current] = array, array
            if current in known or current in done:
                waiting.pop()
                continue
            if missing := [operand for operand in self._operands(current) if operand not in known]:
                waiting += missing
                continue
            self._compute_operator(current, known, slack)
            if shake is not None:
                known[current] = self._with_random_rounding(current, known, shake)
            waiting.pop()
            done.add(current)
            operands = self._operands(current)
            uses.subtract(operands)
            if self.makers[current].op_type == "QuantizeLinear":
                kept |= {current, *operands}
            unused = {operand for operand in operands if not uses[operand]} - kept
            done |= unused
            for operand in unused:
                known.pop(operand, None)
        return known[tensor]

    def _uses_in_between(self, tensor: int, known: Container[int]) -> Counter[int]:
        """Count how often operators that `compute` runs for `tensor` read each tensor."""
        uses: Counter[int] = Counter()
        waiting, seen = [tensor], {tensor}
        while waiting:
            current = waiting.pop()
            if current in known or current in self.constants:
                continue
            operands = self._operands(current)
            uses.update(operands)
            waiting += set(operands) - seen
            seen.update(operands)
        return uses

    def _with_random_rounding(self, tensor: int, known: Mapping[int, Bounds], rng: np.random.Generator) -> Bounds:
        """Move each float of both bounds up or down at random, by at most what the operator may have rounded."""
        node = self.makers[tensor]
        inner_rounding = INNER_ROUNDING.get(node.op_type)
        low, high = (
            perturb(
                bound, rng, None if inner_rounding is None else inner_rounding(known[self._operands(tensor)[0]][side])
            )
            for side, bound in enumerate(known[tensor])
        )
        return low, high

    def is_vague(self, known: Mapping[int, Bounds]) -> bool:
        """Return whether the bounds of a quantised tensor are so wide that nothing follows for later ones. That happens
        behind many 16-bit tensors with several possible values: products of bounds are no bounds.
        """
        for tensor, (low, high) in known.items():
            node = self.makers.get(tensor)
            if node is not None and node.op_type == "QuantizeLinear" and low is not high and low.dtype.kind in "iu":
                limits, apart = np.iinfo(low.dtype), np.subtract(high, low, dtype=np.int64)
                if MAX_VAGUE_SHARE * int(np.max(np.abs(apart), initial=0)) > limits.max - limits.min:
                    return True
        return False

    def quantised(self, known: Mapping[int, Bounds]) -> Iterator[tuple[Array, Array]]:
        """Yield (operand, scale) of each QuantizeLinear that makes one of `known`, for both bounds."""
        for tensor in known:
            node = self.makers.get(tensor)
            if node is not None and node.op_type == "QuantizeLinear":
                x, scale = (known.get(self.number[name]) for name in list(_names_read(node))[:2])
                if x is not None and scale is not None:
                    yield from zip(x, scale)

    def _constant(self, tensor: int) -> Array:
        """Return the content of a constant. NotComputable where it stays in a file."""
        array = constant(self.constants[tensor])
        if array is None or is_mapped(array):
            raise NotComputable
        return array

    def _operands(self, tensor: int) -> list[int]:
        """Return the numbers of the tensors that the maker of `tensor` reads. NotComputable where nothing makes it."""
        if tensor not in self.makers:
            raise NotComputable
        return [self.number[name] for name in _names_read(self.makers[tensor]) if name]

    def _compute_operator(self, tensor: int, known: dict[int, Bounds], slack: float) -> None:
        """Compute the operator that makes `tensor`, for both bounds, and add its outputs to `known`. Raises
        NotComputable.
        """
        node = self.makers[tensor]
        if node.op_type in RANDOM:
            raise NotComputable
        op = parse(ir.serde.serialize_node(node), self.opsets)
        names = [name for name in _names_read(node) if name]
        sides = [{name: known[self.number[name]][side] for name in names} for side in (0, 1)]
        one_sided = all(sides[0][name] is sides[1][name] for name in names)
        scales = [np.asarray(array, np.float64) for array in _scales_of(op, sides[0])]
        if not all(np.all((array >= SCALE_RANGE[0]) & (array <= SCALE_RANGE[1])) for array in scales):
            raise NotComputable
        if op.op == "QuantizeLinear" and (scale := _quantiser_scale(op, sides[0])) is not None:
            x, y = (values[op.inputs[0]] for values in sides)
            margin = slack + (0.0 if x is y else bounds_distance(x, y) / float(np.min(scale)))
            low, high = (_quantise_bound(op, values, scale, side, margin) for values, side in zip(sides, (-1, 1)))
            known[tensor] = low, high
            return
        low_side = run_operator(op, sides[0])
        if op.op == "QLinearAveragePool" and one_sided:
            known[tensor] = _average_bounds(op, sides[0], low_side[0])
            return
        high_side = low_side if one_sided else run_operator(op, sides[1])
        for out, low, high in zip(node.outputs, low_side, high_side):
            if out.name:
                declared = shape(out)
                if declared is not None and isinstance(low, np.ndarray) and low.shape != declared:
                    raise NotComputable  # onnxruntime runs such models only where it computes in integers
                is_mixed = rounds_once(op) and not one_sided
                known[self.number[out.name]] = _widen(low, high) if is_mixed else (low, high)


INNER_ROUNDING: dict[str, Callable[[Array], Any]] = {
    "Sigmoid": lambda x: 0.25, **dict.fromkeys(("Celu", "Elu", "HardSigmoid", "Selu"), lambda x: 0.5),
    **dict.fromkeys(("BiasGelu", "FastGelu", "Gelu", "HardSwish", "QuickGelu", "Swish"), lambda x: np.abs(x) / 4),
}  # fmt: skip
"""Functions in which onnxruntime adds numbers near 1: the rounding error of that, in units in the last place at 1, as a
function of the operand. Small results have an absolute error of this size.
"""


def perturb(array: Any, rng: np.random.Generator, units_at_one: Any = None) -> Any:
    """Move each float of `array` up or down at random, by one unit in the last place or, if that is more, by
    `units_at_one` units in the last place at 1. Arrays without floats are returned unchanged.

    Several computations with moved results show how far rounding alone moves a tensor (`difference_beyond_rounding`).
    """
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
        return array
    with np.errstate(all="ignore"):
        sign = np.where(rng.random(array.shape) < 0.5, -1, 1).astype(array.dtype)
        moved: Array = np.nextafter(array, sign * np.inf)
        if units_at_one is None:
            return moved
        step = np.asarray(units_at_one * np.finfo(array.dtype).eps, array.dtype)
        return np.where(np.abs(moved - array) < step, array + sign * step, moved)


def _widen(low: Array, high: Array) -> Bounds:
    """Widen the two results of an operator that sums and rounds to bounds, as elements may mix both sides."""
    if low.dtype.kind == "f":
        return low, high
    limits, a, b = np.iinfo(low.dtype), low.astype(np.int64), high.astype(np.int64)
    margin = max(1, int(np.max(np.abs(b - a), initial=0)))
    bounds = np.minimum(a, b) - margin, np.maximum(a, b) + margin
    return tuple(np.clip(bound, limits.min, limits.max).astype(low.dtype) for bound in bounds)


def _names_read(node: ir.Node) -> Iterator[str]:
    """Yield the names that `node` and its subgraphs read, "" where an input is left out."""
    for value in (*node.inputs, *captured(node)):
        yield "" if value is None else value.name or ""


def _constant_key(value: ir.Value) -> Any:
    """Return a key that is equal for constants that surely have equal content: the content of small ones, the name of
    large ones.
    """
    if value.const_value is not None and prod(value.const_value.shape.numpy()) <= MAX_NUMBERED_ELEMENTS:
        array = constant(value)
        if array is not None and array.dtype.kind not in "OSU":
            return array.dtype.str, array.shape, array.tobytes()
    return value.name


def run_operator(op: HostOp, values: Mapping[str, Any]) -> list[Any]:
    """Compute the outputs of `op` from the values of its operands by name. Raises NotComputable."""
    args = [values[name] if name else None for name in op.inputs]
    quick = QUICK.get(op.op) if op.domain in ("", "ai.onnx") else None
    try:
        with np.errstate(all="ignore"):
            if quick is not None and len(op.outputs) == 1 and all(x is None or x.dtype == np.float32 for x in args):
                return [quick(op, *args)]
            return execute(op, values)
    except (HostError, Unsupported, MemoryError):
        raise NotComputable from None


def rounds_once(op: HostOp) -> bool:
    """Return whether an operator computes with quantised operands and quantises its result."""
    spec = op_spec(op.op)
    return spec.scale_input is not None and any(operand.quantised_operand for operand in spec.operands)


def bounds_distance(low: Array, high: Array) -> float:
    """Return how far a tensor may lie from both of its results: twice the largest difference between them."""
    with np.errstate(all="ignore"):
        apart = np.abs(np.subtract(high, low, dtype=np.complex128 if low.dtype.kind == "c" else np.float64))
    return 2 * float(np.max(apart, initial=0.0, where=np.isfinite(apart)))


# Quantising ------------------------------------------------------------------------------------------------------


def _quantiser_scale(op: HostOp, values: Mapping[str, Any]) -> Array | None:
    """Return the scale of a QuantizeLinear from float32 to 8 or 16 bits, shaped to broadcast; None for another one."""
    x, scale = values[op.inputs[0]], _scales_of(op, values)[0]
    if x.dtype != np.float32 or scale.dtype != np.float32 or scale.ndim > 1:
        return None
    if quantised_type(op, _zero_point(op, values)).name not in ("int8", "uint8", "int16", "uint16"):
        return None
    return _broadcast_along_axis(op, scale, x.ndim)


def _scales_of(op: HostOp, values: Mapping[str, Any]) -> list[Array]:
    """Return the scales of an operator that quantises or computes with quantised tensors."""
    if op.op in ("QuantizeLinear", "DequantizeLinear"):
        scale, _ = quantisation_names(op.op)
        return [values[find_operand(op.op, op.inputs, scale) or ""]]
    arrays = [values[name] for name in op.inputs if name] if rounds_once(op) else []
    return [array for array in arrays if array.dtype.kind == "f"]


def _zero_point(op: HostOp, values: Mapping[str, Any]) -> Array | None:
    """Return the zero point of a QuantizeLinear or DequantizeLinear; None where it has none."""
    name = find_operand(op.op, op.inputs, quantisation_names(op.op)[1])
    return values[name] if name else None


def _broadcast_along_axis(op: HostOp, array: Array, rank: int) -> Array:
    """Reshape a parameter of a QuantizeLinear to broadcast along its axis."""
    if array.size == 1:
        return array.reshape(())
    quantised_axis = op.attr("axis", 1) % rank
    return array.reshape([-1 if axis == quantised_axis else 1 for axis in range(rank)])


def _quantise_bound(op: HostOp, values: Mapping[str, Any], scale: Array, side: int, slack: float) -> Array:
    """Quantise to the least (side -1) or the greatest (1) value that rounding may give. slack: steps added to
    ROUNDING_MARGIN.
    """
    x, zero = values[op.inputs[0]], _zero_point(op, values)
    kind = quantised_type(op, _zero_point(op, values))
    limits = np.iinfo(kind)
    with np.errstate(all="ignore"):
        top = max(abs(float(x.max(initial=0.0))), abs(float(x.min(initial=0.0))))
        has_nan = np.isnan(top)  # a NaN may become any byte
        largest = float(np.nanmax(np.abs(x), initial=0.0)) if has_nan else top
        lost = SUM_ROUNDING * largest / float(np.min(scale))
        moved = np.asarray(x / scale)  # a scalar stays an array
        moved += np.float32(side * (ROUNDING_MARGIN + slack + min(lost, 0.5) + 0.5))
        (np.ceil if side < 0 else np.floor)(moved, out=moved)
        if zero is not None and zero.any():
            moved += _broadcast_along_axis(op, zero, x.ndim).astype(np.float32)
        if has_nan:
            np.nan_to_num(moved, copy=False, nan=side * np.inf)
        result: Array = np.clip(moved, limits.min, limits.max, out=moved).astype(kind)
    return result


def _average_bounds(op: HostOp, values: Mapping[str, Any], y: Array) -> Bounds:
    """Bound a quantised average `y`: where the mean is within rounding of a tie, the other side is allowed, too."""
    names = [find_operand(op.op, op.inputs, f"{name}_{kind}") for name in "xy" for kind in ("scale", "zero_point")]
    sx, zx, sy, zy = (float(values[name].reshape(())) if name else 0.0 for name in names)
    channels_last = bool(op.attr("channels_last", 0))
    x: Array = np.moveaxis(values[op.inputs[0]], -1, 1) if channels_last else values[op.inputs[0]]
    window = _sliding_window(op, x, op.attrs["kernel_shape"])
    image, total = window.pad(np.subtract(x, zx, dtype=np.float64), 0.0, 2), np.zeros((*x.shape[:2], *window.out))
    for tap in np.ndindex(*window.kernel):
        total += _pixels_at_tap(window, image, tap)
    counts: Array = np.maximum(prod(np.ix_(*(window.divisors(axis) for axis in range(len(window.out))))), 1)
    steps = total * (sx / sy) / counts
    below = np.floor(steps)
    is_tie = np.abs(steps - below - 0.5) <= average_error(sx / sy, 255, int(counts.max(initial=1)))
    if channels_last:
        below, is_tie = (np.moveaxis(array, 1, -1) for array in (below, is_tie))
    limits = np.iinfo(y.dtype)
    low, high = (np.clip(below + zy + side, limits.min, limits.max).astype(y.dtype) for side in (0, 1))
    return np.where(is_tie, low, y), np.where(is_tie, high, y)


# Fast implementations of what large models consist of ------------------------------------------------------------


def _sliding_window(op: HostOp, x: Array, kernel: Iterable[int]) -> SlidingWindow:
    """Return the geometry of the windows of `op` on x [images, channels, ...]."""
    return SlidingWindow.of(Node(op.op, op.attrs, (), ()), x.shape[2:], tuple(kernel))


def _pixels_at_tap(window: SlidingWindow, x: Array, tap: tuple[int, ...]) -> Array:
    """Return the element at `tap` of each window of a padded image: [images, channels, *out]."""
    first = [k * d for k, d in zip(tap, window.dilation)]
    slices = [slice(start, start + (o - 1) * s + 1, s) for start, s, o in zip(first, window.stride, window.out)]
    return x[(slice(None), slice(None), *slices)]


def _compute_conv(op: HostOp, x: Array, w: Array, bias: Array | None = None) -> Array:
    """Compute a float convolution: depthwise as sums over taps, else by im2col."""
    groups, (outputs, inner, *taps) = op.attr("group", 1), w.shape
    window = _sliding_window(op, x, taps)
    padded = window.pad(x, 0.0, 2)
    y: Array
    if inner == 1 and outputs == groups == x.shape[1]:
        y = np.zeros((len(x), outputs, *window.out), np.float32)
        for tap in np.ndindex(*taps):
            y += _pixels_at_tap(window, padded, tap) * w[(slice(None), 0, *tap)].reshape(-1, *[1] * len(taps))
    else:
        columns = np.empty((len(x), x.shape[1], *taps, *window.out), np.float32)
        for tap in np.ndindex(*taps):
            columns[(slice(None), slice(None), *tap)] = _pixels_at_tap(window, padded, tap)
        rows = columns.reshape(len(x), groups, inner * prod(taps), prod(window.out))
        y = np.matmul(w.reshape(groups, outputs // groups, inner * prod(taps)), rows).reshape(
            len(x), outputs, *window.out
        )
    return y if bias is None else y + bias.reshape(-1, *[1] * len(taps))


def _compute_max_pool(op: HostOp, x: Array) -> Array:
    """Compute a float MaxPool; windows that see only padding give the least float."""
    kernel = op.attrs["kernel_shape"]
    window = _sliding_window(op, x, kernel)
    padded = window.pad(x, -np.inf, 2)
    taps = np.ndindex(*kernel)
    y: Array = _pixels_at_tap(window, padded, next(taps)).copy()
    for tap in taps:
        np.maximum(y, _pixels_at_tap(window, padded, tap), out=y)
    inside = window.pad(np.ones_like(x[:1, :1], bool), False, 2)
    is_empty = ~np.logical_or.reduce([_pixels_at_tap(window, inside, tap) for tap in np.ndindex(*kernel)])
    return np.where(is_empty, np.finfo(np.float32).min, y)


def _compute_gemm(op: HostOp, a: Array, b: Array, c: Array | None = None) -> Array:
    """Compute a Gemm."""
    a, b = a.T if op.attr("transA", 0) else a, b.T if op.attr("transB", 0) else b
    y: Array = np.float32(op.attr("alpha", 1.0)) * (a @ b)
    return y if c is None else y + np.float32(op.attr("beta", 1.0)) * c


def _compute_batch_norm(op: HostOp, x: Array, scale: Array, bias: Array, mean: Array, var: Array) -> Array:
    """Compute BatchNormalization with one factor and one addend for each channel, as onnxruntime does."""
    factor = scale / np.sqrt(var + np.float32(op.attr("epsilon", 1e-5)))
    addend = bias - mean * factor
    factor, addend = (array.reshape(-1, *[1] * (x.ndim - 2)) for array in (factor, addend))
    y: Array = x * factor + addend
    return y


QUICK: dict[str, Callable[..., Array]] = {
    "Conv": _compute_conv, "MaxPool": _compute_max_pool, "Gemm": _compute_gemm,
    "BatchNormalization": _compute_batch_norm,
    "GlobalAveragePool": lambda op, x: x.mean(tuple(range(2, x.ndim)), keepdims=True, dtype=np.float32),
}  # fmt: skip
"""Fast implementations of operators on float32 tensors with one output."""


# Tolerance -------------------------------------------------------------------------------------------------------


RELATIVE, ABSOLUTE = 1e-4, 2e-5
"""How much another order of a sum may change a float: relative to the element, and to the largest element of the
tensor.
"""
ROUNDINGS = 8
"""Number of roundings of 16-bit floats, one per operator, that may lie between two compared tensors."""


def difference_from_bounds(actual: Any, low: Any, high: Any, margin: float | Array = 0.0) -> str:
    """Describe how the tensor `actual` lies outside of the bounds; "" where it does not.

    low, high: the bounds; one object for both where the tensor is exact. They may be lists, for sequences, or None, for
    an empty optional. margin: added tolerance of floats, for each element or for all.
    """
    if isinstance(low, list):
        if not isinstance(actual, list) or len(actual) != len(low):
            return "another sequence"
        return next(filter(None, map(difference_from_bounds, actual, low, high)), "")
    if low is None or actual is None:
        return "" if low is actual else "one is an empty optional"
    actual, low, high = np.asarray(actual), np.asarray(low), np.asarray(high)
    if (actual.dtype, actual.shape) != (low.dtype, low.shape):
        return f"it is {actual.dtype}{list(actual.shape)}, and {low.dtype}{list(low.shape)} in the model"
    if actual is low or not actual.size:
        return ""
    if low.dtype.kind == "O":
        wrong = actual != low
    elif is_float(low.dtype):
        wrong = _is_too_far(actual, low, high, margin)
    else:
        least, most = np.minimum(low, high), np.maximum(low, high)
        wrong = (actual < least) | (actual > most)
    if not wrong.any():
        return ""
    positions = np.argwhere(wrong)
    first = tuple(int(index) for index in positions[0])
    return (
        f"{len(positions)} of {actual.size} values, the first at {list(first)}: expected {low.item(first)}, found "
        f"{actual.item(first)}"
    )


def _is_too_far(actual: Array, low: Array, high: Array, margin: float | Array) -> Array:
    """Return, for each element, whether a float is further from [low, high] than another order of sums and the margin
    explain.
    """
    wide = np.complex128 if actual.dtype.kind == "c" else np.float64
    a, b = actual.astype(wide), low.astype(wide)
    sizes = np.where(np.isfinite(b), np.abs(b), 0.0)
    with np.errstate(all="ignore"):
        allowed = margin + _rounding_loss(actual.dtype, sizes) + (0.0 if low is high else bounds_distance(low, high))
        is_far: Array = ~((np.abs(a - b) <= allowed) | (a == b) | (np.isnan(a) & np.isnan(b)))
    return is_far


def _rounding_loss(kind: np.dtype[Any], sizes: Array) -> Array:
    """Bound what rounding may change in elements of these sizes: ROUNDINGS roundings of 16-bit floats, or one of a
    byte.
    """
    eps = float(ml_dtypes.finfo(kind).eps)
    if kind.itemsize == 1:
        return eps * np.maximum(sizes, float(ml_dtypes.finfo(kind).smallest_subnormal))
    coarse = ROUNDINGS * eps if eps > np.finfo(np.float32).eps else 0.0
    lost: Array = (RELATIVE + coarse) * sizes + (ABSOLUTE + coarse) * np.max(sizes, initial=0.0)
    return lost


ROUNDING_DRAWS, SAFETY_FACTOR = 3, 16
"""Number of random perturbations that estimate the effect of rounding, and the factor by which the largest effect is
multiplied.
"""
SIGN_DRAWS = 32
"""Number of perturbations that tell whether rounding decides that a result is finite, such as the root of a
difference.
"""


def difference_beyond_rounding(
    original: Original, tensor: int, inputs: Mapping[int, Any], bounds: Bounds, actual: Array
) -> str:
    """Describe how `actual` lies outside of float `bounds` further than rounding explains; "" where it does not.

    inputs: values of the tensors from which both models compute it, by value number. The imported model is computed
    again with perturbed results; where these are too close, inputs are perturbed, too, as for a sum that cancels. Then
    each element may move as far as it did, and rounding may decide whether it is finite, or which infinity it is.
    """
    plain = bounds[0]
    perturbed = _perturbed_results(original, tensor, inputs, plain, ROUNDING_DRAWS)
    movement: Any = max((np.max(_distance(result, plain), initial=0.0) for result in perturbed), default=0.0)
    if not difference_from_bounds(actual, *bounds, SAFETY_FACTOR * float(movement)):
        return ""
    movement = np.zeros(plain.shape)
    is_finite, is_open = np.isfinite(plain), np.zeros(plain.shape, bool)
    for result in _perturbed_results(original, tensor, inputs, plain, SIGN_DRAWS, perturb_inputs=True):
        movement = np.maximum(movement, _distance(result, plain))
        is_finite |= np.isfinite(result)
        is_open |= _number_class(result) != _number_class(plain)
    undefined = is_open & (_number_class(actual) != _number_class(plain)) & (is_finite | ~np.isfinite(actual))
    return difference_from_bounds(np.where(undefined, plain, actual), *bounds, SAFETY_FACTOR * movement)


def _number_class(array: Array) -> NDArray[np.int8]:
    """Classify floats: 0 for finite ones, 1 and -1 for infinite ones, 2 for NaN."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isnan(array), 2, np.isinf(array) * np.sign(array)).astype(np.int8)


def _perturbed_results(
    original: Original, tensor: int, inputs: Mapping[int, Any], plain: Array, count: int, perturb_inputs: bool = False
) -> Iterator[Array]:
    """Yield `tensor` computed `count` times, with each result of an operator moved at random by one unit in the last
    place.

    (CESTAC: Vignes 1993.) plain: the unperturbed result. perturb_inputs: whether `inputs` are moved, too.
    """
    for seed in range(count):
        rng = np.random.default_rng(seed)
        known = {number: (perturb(value, rng) if perturb_inputs else value,) * 2 for number, value in inputs.items()}
        result, _ = original.compute(tensor, known, shake=rng)
        if np.shape(result) == plain.shape:
            yield result


def _distance(result: Array, plain: Array) -> Array:
    """Return the distance of each element of `result` from `plain`; 0 where it is no finite number, as whether an
    element is finite is compared apart.
    """
    with np.errstate(all="ignore"):
        distance = np.abs(result.astype(np.float64) - plain)
    return np.where(np.isfinite(distance), distance, 0.0)
