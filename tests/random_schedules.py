"""Compare random schedules of random tensor expressions with numpy, on the interpreter and on LLVM.

A case has up to four stages over placeholders, random primitives of a schedule, and inputs. Its seed determines it.
A schedule may refuse a primitive with a ScheduleError. Run 10,000 cases of a new seed on all cores:

    PYTHONPATH=tests .venv/bin/python -m random_schedules --count 10000 --seed 12345
"""

from __future__ import annotations

import itertools
import os
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from celosia import te
from celosia.compiler import expr as T
from celosia.compiler.cpu.llvm import compile_function
from celosia.compiler.expr.nodes import loads
from celosia.compiler.expr.schedule import TAILS, ReplayError, ScheduleError
from celosia.compiler.expr.verify import clamp_accesses
from celosia.compiler.tensorize.intrinsic import TileMismatch
from celosia.compiler.vthread.interleave import interleave

Array = NDArray[Any]
REFUSALS = (ScheduleError, TileMismatch, ReplayError)
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FLOATS = ("float16", "float32", "float64")
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17)
POINTS = 300
"""Maximum number of iterations of a stage; the interpreter takes about 20 us for each."""
PLACES = ("workspace", "local", "local", "inp", "acc")


# Expressions by numpy ----------------------------------------------------------------------------------------------


def evaluate(tensor: T.Tensor, arrays: dict[T.Tensor, Array], whole: bool) -> Array:
    """Compute all elements of `tensor` at once with numpy; `arrays` holds the tensors that it reads.

    whole: floats hold whole numbers; raise Inexact if a sum of them depends on its order.
    """
    assert tensor.body is not None
    axes = [*tensor.axes, *dict.fromkeys(a for n in nodes(tensor.body) if isinstance(n, T.Reduce) for a in n.axes)]
    grids = {}
    for place, axis in enumerate(axes):
        shape = [1] * len(axes)
        shape[place] = axis.extent
        grids[axis] = np.arange(axis.extent).reshape(shape)
    with np.errstate(all="ignore"):
        value = np.asarray(_value(tensor.body, grids, axes, arrays, whole))
    whole = np.broadcast_to(value, [*tensor.shape, *(1 for _ in axes[len(tensor.shape) :])])
    return whole.reshape(tensor.shape).copy()


def nodes(e: T.Expr) -> Iterator[T.Expr]:
    """Yield `e` and all expressions inside it."""
    yield e
    for child in e.children():
        yield from nodes(child)


def _value(e: T.Expr, grids: dict[Any, Array], axes: list[T.Axis], arrays: dict[T.Tensor, Array], whole: bool) -> Array:
    def value(child: T.Expr) -> Array:
        return _value(child, grids, axes, arrays, whole)

    match e:
        case T.Const(number, dtype):
            return np.asarray(number, dtype)
        case T.Axis():
            return grids[e]
        case T.Load(tensor, index):
            array = arrays[tensor] if tensor.value is None else tensor.value
            if not array.size:
                return np.zeros((), array.dtype)
            return np.asarray(array[tuple(np.clip(value(i), 0, n - 1) for i, n in zip(index, array.shape))])
        case T.Binary(op, a, b):
            return _binary(op, value(a), value(b))
        case T.Cast(inner, dtype):
            return _cast(value(inner), dtype)
        case T.Select(cond, a, b):
            return np.where(value(cond), value(a), value(b))
        case T.Call(name, args):
            return np.asarray(FUNCTIONS[name](*map(value, args)))
        case T.Reduce(kind, inner, reduce_axes):
            shape = [axis.extent if axis in grids else 1 for axis in axes]
            terms = value(inner)
            positions = [axes.index(axis) for axis in reduce_axes]
            terms = np.broadcast_to(terms, [n if d in positions else m for d, (n, m) in enumerate(
                zip(shape, np.broadcast_shapes(terms.shape, [1] * len(axes))))])  # fmt: skip
            return _reduced(kind, terms, positions, whole)
    raise TypeError(type(e).__name__)


def _binary(op: str, x: Array, y: Array) -> Array:
    is_integer = x.dtype.kind in "iu"
    if op in ("div", "floordiv", "mod") and is_integer:
        x, y = np.broadcast_arrays(x, y)
        safe = np.where(y == 0, np.ones_like(y), y)
        if op == "mod":
            return np.where(y == 0, np.zeros_like(y), np.mod(x, safe))
        quotient = np.floor_divide(x, safe)
        if op == "div":
            inexact = quotient * safe != x
            quotient = quotient + (inexact & ((x < 0) != (safe < 0))).astype(x.dtype)
        return np.where(y == 0, np.zeros_like(y), quotient)
    return np.asarray(BINARY[op](x, y))


BINARY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "shl": np.left_shift, "shr": np.right_shift,
    "lt": np.less, "le": np.less_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exp": np.exp, "tanh": np.tanh, "abs": np.abs, "floor": np.floor, "sqrt": np.sqrt,
    "isnan": np.isnan, "popcount": lambda x: np.bitwise_count(x.view(f"u{x.itemsize}")).astype(x.dtype),
}  # fmt: skip


def _cast(value: Array, dtype: str) -> Array:
    target = np.dtype(dtype)
    if value.dtype.kind != "f" or target.kind not in "iu":
        return value.astype(target)
    limits = np.iinfo(target)
    wide = np.trunc(np.where(np.isnan(value), 0, value).astype(np.float64))
    inside = np.clip(wide, float(limits.min), np.nextafter(float(limits.max) + 1, 0))
    return np.where(wide >= float(limits.max), target.type(limits.max), inside.astype(target))


class Inexact(Exception):
    """A sum of large integers in floats depends on its order, so there is no exact result to compare with."""


def _require_exact(terms: Array, places: list[int]) -> None:
    """Raise Inexact if a sum of `terms` may round in some order: they are not whole numbers, or are too large."""
    largest_sum = np.sum(np.abs(terms), axis=tuple(places), dtype=np.float64, initial=0)
    if not np.all(largest_sum <= 1 / np.finfo(terms.dtype).eps) or np.any(terms != np.trunc(terms)):
        raise Inexact


def _reduced(kind: str, terms: Array, places: list[int], whole: bool) -> Array:
    """Reduce `terms` over the axes in `places`.

    whole: terms are whole numbers, so that sums do not depend on the order.
    """
    dtype = terms.dtype
    start: Any = {"sum": 0, "ordered_sum": 0, "prod": 1}.get(kind)
    if start is None:
        limits = {"f": lambda: (-np.inf, np.inf), "b": lambda: (False, True)}
        low, high = limits.get(dtype.kind, lambda: (np.iinfo(dtype).min, np.iinfo(dtype).max))()
        start = low if kind == "max" else high
    if kind == "ordered_sum":
        rest = [d for d in range(terms.ndim) if d not in places]
        steps = np.moveaxis(terms, places, range(len(places)))
        total = np.zeros([terms.shape[d] for d in rest], dtype)
        for point in itertools.product(*(range(terms.shape[d]) for d in places)):
            total = total + steps[point]
        return np.expand_dims(total, tuple(sorted(places)))
    if kind == "sum" and dtype.kind == "f" and whole:
        _require_exact(terms, places)
    function: Any = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[kind]
    options = {"dtype": dtype} if kind in ("sum", "prod") else {}
    return np.asarray(function.reduce(terms, axis=tuple(places), keepdims=True, initial=dtype.type(start), **options))


# Random expressions ------------------------------------------------------------------------------------------------


@dataclass
class Program:
    """The inputs and stages of a case.

    style: "exact" for small whole numbers, whose sums are exact in any order; "ordered" for floats that are added in
    one order only; "loose" for functions and floats that are added in any order.
    """

    inputs: list[te.TensorExpr]
    constants: list[T.Tensor]
    stages: list[te.TensorExpr]
    style: str

    @property
    def outputs(self) -> list[te.TensorExpr]:
        """Return the stages that no later stage reads."""
        read = {load.tensor for stage in self.stages for load in loads(stage.node.body)}  # type: ignore[arg-type]
        return [stage for stage in self.stages if stage.node not in read]


class Writer:
    """Draw a random Program."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.style = self.one(("exact", "exact", "ordered", "loose"))
        self.names = itertools.count()
        self.tensors: list[T.Tensor] = []

    def one(self, options: Sequence[Any]) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def shape(self, rank: int) -> tuple[int, ...]:
        sizes = [self.one(SIZES) for _ in range(rank)]
        while prod(sizes) > POINTS // 4:
            at = int(np.argmax(sizes))
            sizes[at] //= 2
        if sizes and self.chance(0.01):
            sizes[0] = 0
        return tuple(sizes)

    def dtype(self) -> str:
        if self.style == "exact":
            return str(self.one((*INTEGERS, "int32", "int8", *FLOATS, "float32", "float32", "float32", "bool")))
        return str(self.one((*FLOATS, "float32", "float32")))

    def array(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Draw the elements of an input."""
        if dtype == "bool":
            return self.rng.random(shape) < 0.5
        if dtype in INTEGERS and self.chance(0.4):
            limits = np.iinfo(dtype)
            return self.rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
        if self.style == "exact":
            return self.rng.integers(0 if dtype.startswith("u") else -4, 5, shape).astype(dtype)
        values = self.rng.standard_normal(shape).astype(dtype)
        if self.style == "ordered" and self.chance(0.3) and values.size:
            for special in (np.nan, np.inf, -np.inf, -0.0):
                values.reshape(-1)[self.rng.integers(values.size)] = special
        return values

    def program(self) -> Program:
        """Draw the inputs, constants and stages of a Program."""
        inputs = [
            te.placeholder(self.shape(self.one((1, 2, 2, 3))), self.dtype(), f"x{k}") for k in range(self.one((1, 2)))
        ]
        constants = []
        if self.chance(0.15):
            dtype = self.dtype()
            constants.append(T.constant(self.array(self.shape(2), dtype), "table"))
        self.tensors = [*(placeholder.node for placeholder in inputs), *constants]
        stages = []
        if self.chance(0.15):
            inputs, product = self.product()
            stages.append(product)
            self.tensors = [*(placeholder.node for placeholder in inputs), *constants, product.node]
        for number in range(len(stages), self.one((1, 1, 2, 2, 3, 4))):
            stages.append(self.stage(f"s{number}"))
            self.tensors.append(stages[-1].node)
        return Program(inputs, constants, stages, self.style)

    def product(self) -> tuple[list[te.TensorExpr], te.TensorExpr]:
        """Draw the product of two matrices, which an intrinsic can compute in tiles."""
        m, n, k = (self.one((2, 4, 6, 8)) for _ in range(3))
        k = min(k, max(POINTS // (m * n), 1))
        dtype = self.dtype().replace("bool", "int32").replace("float16", "float32")
        a, b = te.placeholder((m, k), dtype, "x0"), te.placeholder((k, n), dtype, "x1")
        r = te.reduce_axis((0, k), "k")
        kind = self.one(("sum", "ordered_sum", "max", "min")) if self.style == "exact" else "ordered_sum"
        return [a, b], te.compute((m, n), lambda i, j: T.Reduce(kind, a[i, r] * b[r, j], (r,)), "s0")

    def stage(self, name: str) -> te.TensorExpr:
        """Draw a stage that reads some of the tensors so far."""
        last = self.tensors[-1]
        shape = last.shape if self.chance(0.5) else self.shape(self.one((0, 1, 2, 2, 2, 3)))
        reduces: list[T.Axis] = []
        if self.chance(0.65):
            room = POINTS // max(prod(shape), 1)
            for _ in range(self.one((1, 1, 2))):
                extent = min(self.one(SIZES), max(room, 1))
                extent = 0 if self.chance(0.01) else extent
                room //= max(extent, 1)
                reduces.append(te.reduce_axis((0, extent), f"k{next(self.names)}"))
        self.first = last
        return te.compute(shape, lambda *axes: self.body(axes, reduces, self.dtype()), name)

    def body(self, axes: tuple[T.Axis, ...], reduces: list[T.Axis], dtype: str) -> T.Expr:
        if not reduces:
            return self.value(axes, dtype, 3)
        if dtype == "bool":
            return T.Reduce(self.one(("max", "min")), self.value((*axes, *reduces), dtype, 2), tuple(reduces))
        kinds = {
            "exact": ("sum", "sum", "sum", "ordered_sum", "max", "min", "prod"),
            "ordered": ("ordered_sum", "ordered_sum", "max", "min"),
            "loose": ("sum", "sum", "max", "min"),
        }[self.style]
        kind = self.one(kinds)
        if kind == "prod" and dtype in FLOATS:
            kind = "max"  # the product of many numbers is not exact
        groups = [reduces] if len(reduces) == 1 or self.chance(0.6) else [[axis] for axis in reduces]
        combined: T.Expr | None = None
        for group in groups:
            if dtype == "float16" and kind == "sum":
                value = self.value((*axes, *group), dtype, 2).astype("float32")
                reduction: T.Expr = T.sum(value, tuple(group)).astype("float16")
            else:
                reduction = T.Reduce(kind, self.value((*axes, *group), dtype, 2), tuple(group))
            combined = reduction if combined is None else self.binary(combined, reduction)
            kind = self.one(("max", "min"))
        assert combined is not None
        return self.binary(combined, self.value(axes, dtype, 1)) if self.chance(0.4) else combined

    def binary(self, a: T.Expr, b: T.Expr) -> T.Expr:
        dtype = a.dtype
        ops = ["add", "sub", "mul", "min", "max", "add", "mul"]
        if dtype in INTEGERS:
            ops += ["and", "or", "xor", "shl", "shr", "div", "floordiv", "mod"]
        op = self.one(ops)
        if op == "mul" and self.style == "exact" and dtype in FLOATS and self.chance(0.5):
            op = "max"  # products of products do not stay exact for long
        return T.binary(op, a, b)

    def value(self, axes: Sequence[T.Axis], dtype: str, depth: int) -> T.Expr:
        choice = self.rng.random()
        if dtype == "bool":
            return self.condition(axes, self.one(("int8", "uint32", "float32")), max(depth - 1, 0))
        if depth == 0 or choice < 0.3:
            return self.leaf(axes, dtype)
        if choice < 0.7:
            return self.binary(self.value(axes, dtype, depth - 1), self.value(axes, dtype, depth - 1))
        if choice < 0.8:
            cond = self.condition(axes, dtype, depth - 1)
            return T.select(cond, self.value(axes, dtype, depth - 1), self.value(axes, dtype, depth - 1))
        if choice < 0.88 and self.style == "exact":
            other = self.dtype()
            if other in ("int64", "uint64", "int32", "uint32") and dtype == "float16":
                return self.leaf(axes, dtype)
            return self.value(axes, other, depth - 1).astype(dtype)
        value = self.value(axes, dtype, depth - 1)
        if dtype in INTEGERS:
            return T.call("popcount", value) if self.chance(0.3) else T.maximum(value, 2)
        if self.style != "loose":
            return T.call(self.one(("abs", "floor")), value)
        return T.call(self.one(("exp", "tanh", "abs")), T.minimum(T.maximum(value, -3.0), 3.0))

    def condition(self, axes: Sequence[T.Axis], dtype: str, depth: int) -> T.Expr:
        """Draw a comparison of axes with numbers, or of values if these are exact."""
        if axes and (self.style == "loose" or self.chance(0.6)):
            axis = self.one(axes)
            return T.binary(self.one(("lt", "le", "eq", "ne")), axis, self.one((0, 1, 2, axis.extent - 1)))
        op = self.one(("lt", "le", "eq", "ne"))
        if self.style == "loose":
            return T.binary("lt", T.wrap(0, T.INDEX), T.wrap(1, T.INDEX))
        comparison = T.binary(op, self.leaf(axes, dtype), self.value(axes, dtype, depth))
        if self.chance(0.3):
            comparison = T.binary(self.one(("and", "or")), comparison, self.condition(axes, dtype, 0))
        return comparison

    def leaf(self, axes: Sequence[T.Axis], dtype: str) -> T.Expr:
        if self.chance(0.12):
            return T.wrap(self.one((0, 1, 2, 3)), dtype)
        if axes and self.style == "exact" and self.chance(0.08):
            return self.one(axes).astype(dtype)
        tensor = self.one((self.first, self.first, *self.tensors))
        if not tensor.size:
            return T.wrap(1, dtype)
        read = self.load(tensor, axes)
        if dtype == "float16" and tensor.dtype in ("int64", "uint64", "int32", "uint32"):
            read = read.astype("int8")  # numpy rounds larger integers twice
        if self.style != "exact" and tensor.dtype == "float64" and dtype == "float16":
            read = read.astype("float32")
        return read.astype(dtype)

    def load(self, tensor: T.Tensor, axes: Sequence[T.Axis]) -> T.Expr:
        """Draw a read of `tensor`: inside it, or outside of it where a selection drops the value."""
        index: list[T.Expr] = []
        tests: list[T.Expr] = []
        rest = list(axes)
        for size in tensor.shape:
            candidates = (
                [axis for axis in rest if axis.extent == size] or [a for a in axes if a.extent <= size] or list(axes)
            )
            if not candidates:
                index.append(T.wrap(int(self.rng.integers(size)), T.INDEX))
                continue
            axis = self.one(candidates)
            if axis in rest:
                rest.remove(axis)
            index.append(self.position(axis, axes, size, tests))
        read = tensor[tuple(index)]
        for test in tests:
            read = T.select(test, read, T.wrap(self.one((0, 1, 7)), tensor.dtype))
        return read

    def position(self, axis: T.Axis, axes: Sequence[T.Axis], size: int, tests: list[T.Expr]) -> T.Expr:
        """Draw an index of a dimension; append to `tests` the conditions under which the index is valid."""
        room = size - axis.extent
        if room < 0 or self.chance(0.1):
            other = self.one(axes)
            return self.one((axis % size, T.minimum(axis, size - 1), (axis * 3 + other) % size, axis // 2 % size))
        match int(self.rng.integers(0, 9)):
            case 0 if axis.extent:
                return axis.extent - 1 - axis
            case 1:
                return axis + int(self.rng.integers(0, room + 1))
            case 2 if axis.extent and 2 * axis.extent - 1 <= size:
                return axis * 2
            case 3:
                other = self.one(axes)
                if axis.extent + other.extent - 1 <= size and other is not axis:
                    return axis + other
            case 4:
                before = self.one((1, 2))
                tests.append((axis >= before) & (axis < size + before))
                return axis - before
        return axis


# Random schedules --------------------------------------------------------------------------------------------------


def tile_of(body: T.Expr, extents: Sequence[int], name: str) -> Any:
    """Return an intrinsic that computes `body` in tiles of these extents: a copy or a sum of products.

    Raise TileMismatch for another body.
    """
    dtype = body.dtype
    if isinstance(body, T.Load):
        a = te.placeholder(extents, dtype, "a")
        tile = te.compute(extents, lambda *i: a[i], "tile")
    elif isinstance(body, T.Reduce) and len(extents) == 3:
        rows, columns, steps = extents
        a, b = te.placeholder((rows, steps), dtype, "a"), te.placeholder((steps, columns), dtype, "b")
        k = te.reduce_axis((0, steps), "k")
        tile = te.compute((rows, columns), lambda i, j: T.Reduce(body.kind, a[i, k] * b[k, j], (k,)), "tile")
    else:
        raise TileMismatch("neither a copy nor a sum of products")
    return te.decl_tensor_intrin(tile.op, lambda x, y: te.hardware_intrin(name, *x, *y))


class Arranger:
    """Apply random primitives to a schedule."""

    def __init__(self, rng: np.random.Generator, schedule: T.Schedule, refused: Counter[str]) -> None:
        self.rng, self.s, self.refused = rng, schedule, refused
        self.intrinsics: dict[str, Any] = {}

    def one(self, options: Sequence[Any]) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def arrange(self) -> None:
        """Apply up to 11 random primitives, and vectorise some stages."""
        for _ in range(int(self.rng.integers(1, 12))):
            self.attempt(self.primitive)
        for tensor in list(self.s.stages):
            if self.rng.random() < 0.6:
                self.attempt(lambda tensor=tensor: self.vectorize(self.s[tensor]))  # type: ignore[misc]

    def attempt(self, step: Callable[[], None]) -> None:
        try:
            step()
        except REFUSALS as error:
            self.refused[str(error)] += 1

    def vectorize(self, stage: T.Stage) -> None:
        data = [axis for axis in stage.order if not axis.reduce]
        if data and data[-1].extent <= 32:
            stage.vectorize(data[-1])

    def primitive(self) -> None:
        """Apply one random primitive to a random stage."""
        s, one = self.s, self.one
        stage = s[one(list(s.stages))]
        name = one((
            "split", "split", "split", "split", "tile", "fuse", "reorder", "reorder", "unroll", "parallel", "vectorize",
            "lanes", "inline", "at", "at", "at", "root", "cache_read", "cache_write", "scope", "vthread", "pipeline",
            "keep", "tail", "tensorize",
        ))  # fmt: skip
        if name == "inline":
            return stage.compute_inline() if stage.tensor not in s.outputs else None
        if name == "root":
            return stage.compute_root()
        if name == "scope":
            return stage.set_scope(one(PLACES))
        if name == "tail":
            return stage.set_tail(one(TAILS))
        if name == "keep":
            return stage.keep()
        if name == "at":
            readers = [t for t in s.stages if any(load.tensor is stage.tensor for load in loads(s[t].body))]
            if readers and s[readers[0]].order:
                consumer = s[one(readers)] if self.rng.random() < 0.9 else s[one(list(s.stages))]
                if consumer.order:
                    stage.compute_at(consumer, one(consumer.order))
            return None
        if name == "cache_read":
            sources = list(dict.fromkeys(load.tensor for load in loads(stage.body)))
            return s.cache_read(one(sources), one(PLACES), stage.tensor) and None if sources else None
        if name == "cache_write":
            return s.cache_write(stage.tensor, one(PLACES)) and None
        if not stage.order:
            return None
        axis = one(stage.order)
        match name:
            case "split":
                stage.split(axis, one((1, 2, 3, 4, 5, 8)), one((None, *TAILS)))
            case "tile" if len(stage.order) > 1:
                x = one(stage.order)
                if x is not axis:
                    stage.tile(axis, x, one((2, 3, 4)), one((2, 4, 8)))
            case "fuse" if len(stage.order) > 1:
                at = int(self.rng.integers(len(stage.order) - 1))
                stage.fuse(*stage.order[at : at + 2])
            case "reorder":
                chosen = [a for a in stage.order if self.rng.random() < 0.8]
                stage.reorder(*(chosen[k] for k in self.rng.permutation(len(chosen))))
            case "unroll":
                stage.unroll(axis)
            case "parallel":
                stage.parallel(one([a for a in stage.order if not a.reduce] or [axis]))
            case "vthread":
                stage.vthread(axis)
            case "pipeline":
                stage.pipeline(axis)
            case "vectorize":
                stage.vectorize(axis)
            case "lanes":
                stage.accumulate_lanes(stage.order[-1], one(((4,), (8, 4), (16, 4), (3,), (2,))))
            case "tensorize":
                self.tensorize(stage)
        return None

    def tensorize(self, stage: T.Stage) -> None:
        """Tensorize `stage`, in most cases after a split of each loop by one of its divisors."""
        loops = list(stage.order)
        at = max(len(loops) - 3, 0) if isinstance(stage.body, T.Reduce) else int(self.rng.integers(len(loops)))
        if self.rng.random() < 0.8:
            tiles = [stage.split(loop, self.one([d for d in range(1, 9) if loop.extent % d == 0])) for loop in loops]
            loops = [*(outer for outer, _ in tiles), *(inner for _, inner in tiles)]
            stage.reorder(*loops)
            at += len(tiles)
        intrinsic = tile_of(stage.body, [loop.extent for loop in loops[at:]], f"tile{len(self.intrinsics)}")
        self.intrinsics[intrinsic.name] = intrinsic
        stage.tensorize(loops[at], intrinsic)


# Cases ---------------------------------------------------------------------------------------------------------------


class Wrong(AssertionError):
    """A schedule changes a result. The message holds everything needed to reproduce that."""


@dataclass
class Case:
    """The seed of a case, and the schedule and function as far as they exist, for error messages."""

    seed: int
    schedule: T.Schedule | None = None
    function: T.Function | None = None

    def __str__(self) -> str:
        return f"case {self.seed}\n{self.schedule and self.schedule.trace}\n{self.function or ''}"


def run(seed: int, refused: Counter[str] | None = None) -> bool:
    """Return True if the schedule of this seed was computed, False if it was refused.

    Raise Wrong if a result is wrong or the compiler fails.
    """
    case = Case(seed)
    try:
        return _run(case, Counter() if refused is None else refused)
    except Exception as error:
        raise Wrong(f"{case}\n{type(error).__name__}: {error}") from error


def _run(case: Case, refused: Counter[str]) -> bool:
    rng = np.random.default_rng(case.seed)
    writer = Writer(rng)
    program = writer.program()
    outputs = program.outputs
    schedule = case.schedule = T.create_schedule([tensor.node for tensor in outputs])
    inputs = [tensor for tensor in program.inputs if tensor.node in schedule.tensors]
    arrays = {tensor.node: writer.array(tensor.node.shape, tensor.dtype) for tensor in inputs}
    values = list(arrays.values())
    for stage in program.stages:
        try:
            arrays[stage.node] = evaluate(stage.node, arrays, whole=program.style == "exact")
        except Inexact:
            return False
    expected = [arrays[tensor.node] for tensor in outputs]
    arranger = Arranger(rng, schedule, refused)
    arranger.arrange()
    try:
        function = case.function = T.lower(schedule, [tensor.node for tensor in inputs])
        T.verify(function)
    except REFUSALS as error:
        refused[str(error)] += 1
        return False
    if rng.random() < 0.5:
        _compare("interpreter", T.interpret(function, *values), expected, program.style)
    interleaved = interleave(function)
    loops = interleaved.expanded()
    if rng.random() < 0.2:
        _compare("virtual threads", T.interpret(interleaved, *values), expected, program.style)
    if rng.random() < 0.2:
        loops = clamp_accesses(loops)
    try:
        kernel = compile_function(loops, keep=False)
    except REFUSALS as error:
        refused[str(error)] += 1
        return False
    _compare("LLVM", kernel(*values), expected, program.style)
    if kernel.phases:
        _compare("LLVM on two threads", kernel(*values, threads=2), expected, program.style)
    if not program.constants and rng.random() < 0.15:
        by_te = _through_te(schedule, inputs, outputs, arranger.intrinsics, values)
        if by_te is not None:
            _compare("te", by_te, expected, program.style)
    return True


def _through_te(
    schedule: T.Schedule,
    inputs: list[te.TensorExpr],
    outputs: list[te.TensorExpr],
    intrinsics: Any,
    values: list[Array],
) -> list[Array] | None:
    """Build the same schedule through the module te, which finds loops by their names, and return the outputs.

    Return None if two loops of a stage have the same name.
    """
    plain = te.create_schedule(outputs)
    plain.declared |= intrinsics
    try:
        schedule.trace.replay(plain.loops, intrinsics)
        kernel = te.build(plain, [*inputs, *outputs])
    except REFUSALS as error:
        if "is more than one of" in str(error):
            return None
        raise
    results = [np.full(output.node.shape, 77, output.dtype) for output in outputs]
    kernel(*values, *results)
    return results


def _compare(device: str, outputs: list[Array], expected: list[Array], style: str) -> None:
    for number, (output, want) in enumerate(zip(outputs, expected, strict=True)):
        if style != "loose":
            same = np.array_equal(output, want, equal_nan=want.dtype.kind == "f")
        else:
            size = float(np.max(np.abs(want[np.isfinite(want)]), initial=1.0))
            bound = {"float16": 2e-2, "float32": 1e-4, "float64": 1e-4}[want.dtype.name] * size
            same = bool(np.allclose(output, want, rtol=0, atol=bound, equal_nan=True))
        if not same:
            raise Wrong(f"{device}: output {number} is\n{output}\nnot\n{want}")


def run_many(seeds: Sequence[int]) -> tuple[int, list[str]]:
    """Return the number of schedules that were computed, and the messages of the failures."""
    computed, failures = 0, []
    for seed in seeds:
        try:
            computed += run(seed)
        except Wrong as error:
            failures.append(str(error))
    return computed, failures


MAX_FAILURES = 50
"""The number of failures after which a campaign ends."""


def case_seeds(seed: int) -> Iterator[int]:
    """Yield the seeds of the cases of a campaign."""
    return itertools.count(seed << 32)


def main(
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Schedules that are computed.")] = 10_000,
    seed: Annotated[int | None, typer.Option(min=0, help="Of all cases; a fresh one where it is left out.")] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1)] = os.cpu_count() or 1,
) -> None:
    """Compute COUNT random schedules; exit code 1 where one is wrong or fails."""
    seed = secrets.randbelow(1 << 24) if seed is None else seed
    print(f"seed {seed}", flush=True)
    cases, done, failed = case_seeds(seed), 0, 0
    with ProcessPoolExecutor(jobs) as pool:
        while done < count and failed < MAX_FAILURES:
            size = min(50, -(-(count - done) // jobs))
            chunks = [list(itertools.islice(cases, size)) for _ in range(jobs * 4)]
            for computed, failures in pool.map(run_many, chunks):
                done += computed
                failed += len(failures)
                for text in failures:
                    print(text, end="\n\n", flush=True)
                print(f"{done} computed, {failed} wrong or failed", file=sys.stderr, flush=True)
    print(f"seed {seed}: {done} schedules computed, {failed} wrong or failed")
    raise typer.Exit(bool(failed))


if __name__ == "__main__":
    typer.run(main)
