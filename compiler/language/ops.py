"""Functions of the language that kernels call: each checks types and shapes and makes a tile (tile.py).

`hints` of a function are keyword arguments of Triton that have no effect here.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.language.interpreter import store as store_now
from celosia.compiler.language.tile import (
    VIEWS,
    ArrayArgument,
    Pointer,
    Tile,
    TracedLoop,
    TracedStore,
    as_tile,
    binary,
    broadcast,
    broadcast_all,
    check_alive,
    current_run,
    dtype_name,
    fail,
    is_broadcastable,
    kernel_line,
    make_tile,
    origin,
    scopes,
    shape_of,
    to_common_type,
    upstream,
)
from celosia.compiler.numerics.requantiser import scale_to_multiplier
from celosia.compiler.numerics.tables import softmax_powers
from celosia.compiler.tensorize.pack import pack_parameters
from celosia.hw.spec.scratchpads import EXP_ENTRIES

int1, int8, int16, int32, int64 = "bool", "int8", "int16", "int32", "int64"
uint8, uint16, uint32, uint64 = "uint8", "uint16", "uint32", "uint64"
float16, float32, float64 = "float16", "float32", "float64"
Block = tuple[tuple[Tile, ...], tuple[int, ...], tuple[int, ...]]
"""Offsets, sizes and steps of a block, for each dimension."""


if TYPE_CHECKING:
    constexpr = Any
else:

    class constexpr:
        """Annotation of parameters whose values are part of the compiled code, such as the shape of a block.

        Called, it returns its argument, as Triton's does.
        """

        def __new__(cls, value: Any) -> Any:
            return value


def cdiv(a: Any, b: Any) -> Any:
    """Return a / b rounded up.

    >>> cdiv(10, 4)
    3
    """
    return (a + b - 1) // b


def program_id(axis: int) -> Tile:
    """Return the index of this program along `axis` (0, 1 or 2) of the grid, int64."""
    if axis not in (0, 1, 2):
        fail(f"a grid has the axes 0, 1 and 2, and no {axis!r}")
    if axis >= len(current_run().grid):
        return as_tile(0, "int64")
    return make_tile("program_id", (), (), "int64", axis=axis)


def num_programs(axis: int) -> int:
    """Return the number of programs along `axis`."""
    grid = current_run().grid
    return grid[axis] if axis < len(grid) else 1


def arange(start: int, stop: int) -> Tile:
    """Make the tile start, start + 1, ..., stop - 1 of int64, from two constexprs."""
    if isinstance(start, Tile) or isinstance(stop, Tile) or not start < stop:
        fail("cl.arange(start, stop) takes two constexprs, start below stop; add what is computed: start + cl.arange")
    return make_tile("arange", (), shape_of(stop - start), "int64", start=int(start))


def full(shape: Any, value: Any, dtype: Any) -> Tile:
    """Make a tile of equal values."""
    name = dtype_name(dtype)
    scalar = value.to(name) if isinstance(value, Tile) else as_tile(value, name)
    return broadcast(scalar, shape_of(shape) if shape != () else ())


def zeros(shape: Any, dtype: Any) -> Tile:
    """Make a tile of zeros."""
    return full(shape, 0, dtype)


def zeros_like(tile: Tile) -> Tile:
    """Make zeros of the shape and type of `tile`."""
    return full(tile.shape, 0, tile.dtype)


# Memory -----------------------------------------------------------------------------------------------------------


def load(
    source: ArrayArgument | Pointer, offsets: Any = None, shape: Any = None, *, mask: Any = None, other: Any = None,
    steps: Any = None, **hints: Any,
) -> Tile:  # fmt: skip
    """Load values: load(pointer, mask=, other=), as in Triton, or load(array, offsets, shape, other=), a block.

    A block begins at `offsets`, an index for each dimension; outside of the array it is `other`, by default 0. In each
    dimension it has every element, or every `steps`-th one. Where a mask does not hold, nothing is read, and the value
    is `other`, by default 0.
    """
    if offsets is not None and shape is None:
        mask, offsets = offsets, None  # load(pointer, mask)
    pointer, block, mask = _resolve_pointer("cl.load", source, offsets, shape, steps, mask)
    args = [pointer.offsets]
    if mask is not None:
        fill = as_tile(0 if other is None else other, None if isinstance(other, Tile) else pointer.dtype)
        if fill.dtype != pointer.dtype:
            fail(f"`other` is {fill.dtype}, and {pointer.array.name} holds {pointer.dtype}; cast it")
        args += [mask, broadcast(fill, pointer.shape)]
    elif other is not None:
        fail("`other` is for loads with a mask, and this one has none")
    return make_tile("load", args, pointer.shape, pointer.dtype, array=pointer.array, block=block)


def store(target: ArrayArgument | Pointer, *values: Any, mask: Any = None, steps: Any = None, **hints: Any) -> None:
    """Store values: store(pointer, value, mask=), as in Triton, or store(array, offsets, value), a block.

    A block is that of `load`. Nothing is written outside of the array, or where the mask does not hold.
    """
    args = list(values)
    if len(args) == 2 and not isinstance(args[0], (tuple, list)):
        mask = args.pop()  # store(pointer, value, mask)
    if not args:
        fail("cl.store(pointer, value) or cl.store(array, offsets, value)")
    value = as_tile(args[-1], target.dtype if not isinstance(args[-1], Tile) else None)
    offsets = args[0] if len(args) == 2 else None
    pointer, block, mask = _resolve_pointer("cl.store", target, offsets, value.shape, steps, mask)
    if value.dtype != pointer.dtype:
        fail(f"{pointer.array.name} holds {pointer.dtype} and the value is {value}; cast it with .to(...)")
    value = _broadcast_to_pointer("cl.store", value, pointer)
    check_alive(value)
    statement = TracedStore(pointer.array, pointer.offsets, value, mask, kernel_line(), block)
    run = current_run()
    if run.is_interpreting:
        store_now(statement)
    else:
        run.scope.body.append(statement)


def _broadcast_mask(function: str, mask: Any, pointer: Pointer) -> Tile:
    """Return a mask in the shape of the pointers. Raises LanguageError, naming `function`, where it is not bool."""
    mask = as_tile(mask)
    if mask.dtype != "bool":
        fail(f"the mask of {function} is {mask}, not bool; compare, as in offsets < n")
    return _broadcast_to_pointer(f"the mask of {function}", mask, pointer)


def _broadcast_to_pointer(name: str, tile: Tile, pointer: Pointer) -> Tile:
    """Broadcast a tile to the shape of the pointers. Raises LanguageError, naming the tile `name`."""
    if not is_broadcastable(tile.shape, pointer.shape):
        fail(f"{name} has the shape {list(tile.shape)}, its pointers {list(pointer.shape)}; they must fit")
    return broadcast(tile, pointer.shape)


def _resolve_pointer(
    function: str, source: Any, offsets: Any, shape: Any, steps: Any, mask: Any
) -> tuple[Pointer, Block | None, Tile | None]:
    """Convert the arguments of a load or store to (pointers, block, mask).

    function: the name for errors. The block is None for pointers, and for a block with a mask of the user's, since the
    accelerator moves complete blocks. The mask of a block is true only inside the array; None means that everything is
    accessed.
    """
    if offsets is None:
        if steps is not None:
            fail(f"`steps` are those of a block, and {function} was given pointers; add offsets that move as you like")
        if isinstance(source, ArrayArgument):
            if len(source.shape) > 1 and source.size > 1:
                fail(
                    f"{source.name} is a whole array of {list(source.shape)}; give {function} offsets and a shape, "
                    "or add offsets to make pointers"
                )
            source = source + 0
        if not isinstance(source, Pointer):
            fail(f"{function} takes a pointer, as x + offsets, and not {source}")
        return source, None, None if mask is None else _broadcast_mask(function, mask, source)
    if not isinstance(source, ArrayArgument):
        fail(
            f"a block is a part of an array, and {function} was given {type(source).__name__.lower()}s; "
            "leave offsets out"
        )
    starts, dims = tuple(offsets), shape_of(shape) if shape != () else ()
    if not len(starts) == len(dims) == len(source.shape):
        fail(
            f"{source.name} has {len(source.shape)} dimensions; a block of it has as many offsets and sizes, and not "
            f"{len(starts)} and {len(dims)}"
        )
    strides_of_block = (1,) * len(dims) if steps is None else shape_of(steps)
    if len(strides_of_block) != len(dims):
        fail(f"a block of {source.name} has {len(dims)} steps, and these are {len(strides_of_block)}")
    total, inside = as_tile(0, "int64"), None
    tiles = tuple(as_tile(start, "int64") for start in starts)
    for d, (start, size, step) in enumerate(zip(tiles, dims, strides_of_block)):
        if not start.dtype.startswith(("int", "uint")) or start.shape:
            fail(f"the offsets of a block are integers, and number {d} is {start}")
        index = (start.to("int64") + (arange(0, size) * step if step > 1 else arange(0, size))).reshape(
            *(size if e == d else 1 for e in builtins.range(len(dims)))
        )
        total = total + index * source.strides[d]
        test = (index >= 0) & (index < source.shape[d])
        inside = test if inside is None else inside & test
    pointer = Pointer(source, broadcast(total, dims))
    if mask is None:
        return (
            pointer,
            (tiles, dims, strides_of_block),
            None if inside is None else _broadcast_mask(function, inside, pointer),
        )
    return pointer, None, _broadcast_mask(function, mask if inside is None else inside & mask, pointer)


# Arithmetic -------------------------------------------------------------------------------------------------------


def _make_float_function(name: str, intrinsic: str = "") -> Callable[[Any], Tile]:
    """Make the function cl.`name` of floats. intrinsic: its name in expressions, where that differs."""

    def call(x: Any) -> Tile:
        x = as_tile(x)
        if not x.dtype.startswith("float"):
            fail(f"cl.{name} is for floats, and this is {x}; cast it, as in x.to(cl.float32)")
        return make_tile("unary", (x,), x.shape, x.dtype, name=intrinsic or name)

    call.__name__, call.__doc__ = name, f"Compute {name} of each element of a tile of floats."
    return call


exp = _make_float_function("exp")
"""Return the exponential of each element of a tile of floats."""
log = _make_float_function("log")
"""Return the natural logarithm of each element of a tile of floats."""
sqrt = _make_float_function("sqrt")
"""Return the square root of each element of a tile of floats."""
tanh = _make_float_function("tanh")
"""Return the hyperbolic tangent of each element of a tile of floats."""
erf = _make_float_function("erf")
"""Return the error function of each element of a tile of floats."""
sin = _make_float_function("sin")
"""Return the sine of each element of a tile of floats."""
cos = _make_float_function("cos")
"""Return the cosine of each element of a tile of floats."""
floor = _make_float_function("floor")
"""Return the largest integer that is not greater of each element of a tile of floats."""
ceil = _make_float_function("ceil")
"""Return the least integer that is not less of each element of a tile of floats."""
rint = _make_float_function("rint", "round_even")
rint.__doc__ = "Round each element of a tile of floats to the nearest integer, ties to even."


def div_rn(a: Any, b: Any) -> Tile:
    """Divide floats, rounded to nearest; `/` may multiply by the reciprocal of a divisor that dividends share."""
    x, y = to_common_type("cl.div_rn", a, b)
    if not x.dtype.startswith("float"):
        fail(f"cl.div_rn is for floats, and this is {x}; cast it, as in x.to(cl.float32)")
    return make_tile("binary", (x, y), x.shape, x.dtype, name="div", nearest=True)


def rsqrt(x: Any) -> Tile:
    """Compute 1 / sqrt(x) of floats."""
    return binary("div", 1.0, sqrt(x))


def sigmoid(x: Any) -> Tile:
    """Compute 1 / (1 + exp(-x)) of floats."""
    return binary("div", 1.0, 1.0 + exp(-as_tile(x)))


def abs(x: Any) -> Any:
    """Compute the absolute value of a tile, element by element, or of a number."""
    if not isinstance(x, Tile):
        return builtins.abs(x)
    return make_tile("unary", (x,), x.shape, x.dtype, name="abs")


def maximum(a: Any, b: Any) -> Tile:
    """Take the larger of each two elements; NaN where one is."""
    return binary("max", a, b)


def minimum(a: Any, b: Any) -> Tile:
    """Take the smaller of each two elements; NaN where one is."""
    return binary("min", a, b)


def _tile_aware(name: str) -> Callable[..., Any]:
    """Make a replacement for Python's `min` or `max` that also takes tiles."""

    def call(*args: Any, **options: Any) -> Any:
        if any(isinstance(arg, Tile) for arg in args):
            return reduce(lambda a, b: binary(name, a, b), args)
        return getattr(builtins, name)(*args, **options)

    return call


IN_KERNELS = {"min": _tile_aware("min"), "max": _tile_aware("max")}
"""Replacements of Python's functions of these names in kernels."""


def _make_reduction(name: str) -> Callable[..., Tile]:
    """Make the function cl.`name` (sum, max or min) that reduces a tile over an axis."""

    def call(x: Tile, axis: int | None = None, ordered: bool = False, **hints: Any) -> Tile:
        x = as_tile(x)
        if axis is None:
            x, axis = x.reshape(x.size), 0
        if not isinstance(axis, int) or not -len(x.shape) <= axis < len(x.shape):
            fail(f"{x} has no axis {axis!r} to take the {name} over")
        axis %= len(x.shape)
        dtype = x.dtype
        if name == "sum" and dtype in ("bool", "int8", "int16", "uint8", "uint16"):
            dtype = "uint32" if dtype[0] == "u" else "int32"
        kind = "ordered_sum" if ordered and name == "sum" else name
        return make_tile("reduce", (x,), x.shape[:axis] + x.shape[axis + 1 :], dtype, name=kind, axis=axis)

    call.__name__ = name
    call.__doc__ = (
        f"Take the {name} over an axis (None: over all). Small integers are summed as int32. Floats are summed one "
        "after the other, from the first one on, where `ordered`, else in the fastest order."
    )
    return call


sum = _make_reduction("sum")
"""Return the sum of a tile over an axis (None: over all)."""
max = _make_reduction("max")
"""Return the maximum of a tile over an axis (None: over all)."""
min = _make_reduction("min")
"""Return the minimum of a tile over an axis (None: over all)."""


def where(condition: Any, a: Any, b: Any) -> Tile:
    """Select a where the condition holds, else b."""
    condition = as_tile(condition)
    if condition.dtype != "bool":
        fail(f"the condition of cl.where is {condition}, not bool; compare, as in x > 0")
    x, y = to_common_type("cl.where", a, b)
    condition, x, y = broadcast_all("cl.where", condition, x, y)
    return make_tile("where", (condition, x, y), x.shape, x.dtype)


def cast(x: Tile, dtype: Any) -> Tile:
    """Convert like `x.to(dtype)`."""
    return as_tile(x).to(dtype)


def reshape(x: Tile, *shape: Any) -> Tile:
    """Reshape like `x.reshape(shape)`: the same number of elements, in order."""
    return x.reshape(*shape)


def broadcast_to(x: Tile, *shape: Any) -> Tile:
    """Broadcast `x` along axes of size 1. Raises LanguageError where sizes differ otherwise."""
    dims = shape_of(shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)
    if not is_broadcastable(x.shape, dims):
        fail(f"{x} cannot be broadcast to {list(dims)}; sizes must be equal or 1")
    return broadcast(x, dims)


def expand_dims(x: Tile, axis: int) -> Tile:
    """Insert an axis of size 1 before `axis`."""
    axis %= len(x.shape) + 1
    return x.reshape(*x.shape[:axis], 1, *x.shape[axis:])


def trans(x: Tile, *axes: int) -> Tile:
    """Permute the axes of x, by default reversed."""
    order = tuple(axes) or tuple(builtins.range(len(x.shape)))[::-1]
    if sorted(order) != list(builtins.range(len(x.shape))):
        fail(f"{list(order)} is no order of the {len(x.shape)} axes of {x}")
    return make_tile("trans", (x,), tuple(x.shape[a] for a in order), x.dtype, axes=order)


# Products, and the operations behind them -------------------------------------------------------------------------


def parameters(bias: Any, scale: Any) -> NDArray[np.uint64]:
    """Pack what `requantise` needs for each column, [columns]: bias (int32) and scale (float32, not negative)."""
    return pack_parameters(bias, *scale_to_multiplier(scale))


def powers(count: int, scale: float) -> NDArray[np.float32]:
    """Tabulate exp(scale · (index - 255)) for index 0 to 255, float32[256]: the powers of QLinearSoftmax.

    They are scaled so that the sum of `count` of them is a finite float32. scale: of the int8 input.
    """
    if not (count >= 1 and 0 < scale < np.inf):
        fail(f"cl.powers takes a positive count and a positive scale, and not {count!r} and {scale!r}")
    return np.asarray(softmax_powers(count, scale, 1.0)[: EXP_ENTRIES // 2])


def dot(a: Tile, b: Tile, acc: Tile | None = None, **hints: Any) -> Tile:
    """Multiply a [M, K] by b [K, N] and add acc [M, N].

    int8 is computed in int32, float16 in float32, other types in themselves. Zero points of `quantised` arrays are
    subtracted first.
    """
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        fail(f"cl.dot multiplies [M, K] by [K, N], not {list(a.shape)} by {list(b.shape)}; b.T turns a tile")
    if a.dtype != b.dtype:
        fail(f"cl.dot of {a} and {b}: cast one, so that both have one type")
    if a.dtype not in ("int8", "int32", "float16", "float32", "float64"):
        fail(f"cl.dot has no products of {a.dtype}; take int8, int32, float16, float32 or float64")
    dtype = {"int8": "int32", "float16": "float32"}.get(a.dtype, a.dtype)
    shape = (a.shape[0], b.shape[1])
    zeros = (zero_point_of(a), zero_point_of(b)) if a.dtype == "int8" else (0, 0)
    if acc is None:
        return make_tile("dot", (a, b), shape, dtype, zeros=zeros)
    if acc.shape != shape or acc.dtype != dtype:
        fail(f"cl.dot of {a} and {b} is {dtype}{list(shape)}, and it is to be added to {acc}")
    return make_tile("dot", (a, b, acc), shape, dtype, zeros=zeros)


def zero_point_of(side: Tile) -> int:
    """Return the zero point of the array of which `side`, an operand of `dot`, is a block; 0 for a computed operand.

    Raises LanguageError for an operand that is computed from an array with a zero point, as its own is not known.
    """
    tile = origin(side, *VIEWS)
    while tile.op == "phi":
        tile = origin(tile.attributes["first"], *VIEWS)
    if tile.op == "load":
        return int(tile.attributes["array"].zero_point)
    for source in upstream([tile], _int8_sources):
        if source.op == "load" and (zero := source.attributes["array"].zero_point):
            name = source.attributes["array"].name
            fail(
                f"this side of cl.dot is computed of {name}, whose zero point is {zero}, and that of the result is not "
                f"known; subtract it where {name} is loaded: x.to(cl.int32) - {name}.zero_point"
            )
    return 0


def _int8_sources(tile: Tile) -> Iterator[Tile]:
    """Yield the int8 tiles from which `tile` is computed, through the variables of loops, too, to find the arrays
    whose zero points the result may have.
    """
    sources = tile.args
    if tile.op == "phi":
        sources = (tile.attributes["first"],)
    elif tile.op == "result":
        loops = (scope for scope in scopes(current_run().top) if isinstance(scope, TracedLoop))
        sources = next((first, last) for loop in loops for first, _, last, after in loop.carried if after is tile)
    return (source for source in sources if source.dtype == "int8")


def requantise(acc: Tile, parameters: Tile, zero_point: int = 0, clip: tuple[int, int] = (-128, 127)) -> Tile:
    """Convert int32 to int8: clip(round((acc + bias) * scale) + zero_point), with a float32 product, ties to even.

    parameters: uint64, bias, multiplier and shift of each column, as `parameters` packs them.
    """
    if acc.dtype != "int32":
        fail(f"cl.requantise takes int32, and this is {acc}")
    if parameters.dtype != "uint64":
        fail(f"the parameters of cl.requantise are uint64, as cl.parameters packs them, and these are {parameters}")
    low, high = _byte_range(clip)
    if not isinstance(zero_point, int) or not -128 <= zero_point <= 127:
        fail(f"a zero point of int8 is between -128 and 127, and not {zero_point!r}")
    acc, parameters = broadcast_all("cl.requantise", acc, parameters)
    return make_tile("requantise", (acc, parameters), acc.shape, "int8", zero_point=zero_point, clip=(low, high))


def _byte_range(clip: tuple[int, int]) -> tuple[int, int]:
    """Return `clip`, the limits of a result; LanguageError where it is no range of int8."""
    low, high = clip
    if not -128 <= low <= high <= 127:
        fail(f"a range of int8 is between -128 and 127, and not {clip}")
    return low, high


def lookup(x: Tile, table: Tile) -> Tile:
    """Look up table[x + 128] of int8 x in a table [256] of int8."""
    if x.dtype != "int8":
        fail(f"cl.lookup takes int8, and this is {x}")
    if table.shape != (256,) or table.dtype != "int8":
        fail(f"a table of cl.lookup is int8[256], and this is {table}")
    return make_tile("lookup", (x, table), x.shape, "int8")


def residual_add(
    v: Tile, b: Tile, scale_v: int, scale_b: int, scale_c: int, shift: int, clip: tuple[int, int] = (-128, 127)
) -> Tile:
    """Add two int8: clip(round((v * scale_v + b * scale_b + scale_c) / 2^shift)), ties to even."""
    if v.dtype != "int8" or b.dtype != "int8":
        fail(f"cl.residual_add takes two int8, and these are {v} and {b}")
    v, b = broadcast_all("cl.residual_add", v, b)
    for name, number, bits in (("scale_v", scale_v, 32), ("scale_b", scale_b, 32), ("scale_c", scale_c, 48)):
        if not isinstance(number, int) or not -(1 << bits - 1) <= number < 1 << bits - 1:
            fail(f"{name} of cl.residual_add is an integer of {bits} bits, and not {number!r}")
    if not isinstance(shift, int) or not 0 <= shift < 48:
        fail(f"the shift of cl.residual_add is between 0 and 47, and not {shift!r}")
    more = {"scale_v": scale_v, "scale_b": scale_b, "scale_c": scale_c, "shift": shift, "clip": _byte_range(clip)}
    return make_tile("residual", (v, b), v.shape, "int8", **more)


# Statements that Triton kernels contain ---------------------------------------------------------------------------


def static_assert(condition: bool, message: str = "") -> None:
    """Raise LanguageError with `message` where a condition on constexprs does not hold."""
    if not condition:
        fail(message or "a cl.static_assert does not hold")


def assume(condition: Any) -> None:
    """Do nothing: an assumption of a Triton kernel, which this compiler does not need."""


def static_range(*bounds: int, **hints: Any) -> Iterator[int]:
    """Iterate like Python's range: the body is unrolled."""
    if any(isinstance(bound, Tile) for bound in bounds):
        fail("cl.static_range takes constexprs; cl.range takes what is computed")
    return iter(builtins.range(*bounds))


__all__ = [
    "abs", "arange", "assume", "broadcast_to", "cast", "cdiv", "ceil", "constexpr", "cos", "div_rn", "dot", "erf",
    "exp", "expand_dims", "float16", "float32", "float64", "floor", "full", "int1", "int8", "int16", "int32", "int64",
    "load", "log", "lookup", "max", "maximum", "min", "minimum", "num_programs", "parameters", "powers", "program_id",
    "requantise", "reshape", "residual_add", "rint", "rsqrt", "sigmoid", "sin", "sqrt", "static_assert", "static_range",
    "store", "sum", "tanh", "trans", "uint8", "uint16", "uint32", "uint64", "where", "zeros", "zeros_like",
]  # fmt: skip
