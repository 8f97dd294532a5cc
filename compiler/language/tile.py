"""Tiles, and the kernel run that is traced or interpreted; their classes refer to each other, so one file has them.

A kernel is an ordinary Python function. When it is traced its tiles are nodes of a graph, in scopes (the kernel itself
and its loops) that keep the order of their creation; when it is interpreted each node has its value at once, from
`interpreter.py`. Types, shapes and errors are the same in both, for both make nodes here.

An error names the line of the kernel that caused it (`fail`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.expr.nodes import COMPARISONS
from celosia.compiler.program.dtypes import numpy_dtype
from celosia.plain import Sentences

FOLDER = str(Path(__file__).parent)
"""Folder of the language's own code, whose lines errors do not name."""
MAX_ELEMENTS = 1 << 20
"""Limit of the elements of a tile."""
DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
)  # fmt: skip
"""Element types of tiles."""
BITS = ("and", "or", "xor", "shl", "shr")
"""Operations on bits, which floats do not have; the first three take bools, too."""
NUMPY_EQUIVALENTS = {
    "absolute": "abs", "exp": "exp", "log": "log", "sqrt": "sqrt", "tanh": "tanh", "sin": "sin", "cos": "cos",
    "floor": "floor", "ceil": "ceil", "maximum": "maximum", "minimum": "minimum", "sum": "sum", "amax": "max",
    "max": "max", "amin": "min", "min": "min", "where": "where", "dot": "dot", "matmul": "dot", "transpose": "trans",
    "reshape": "reshape", "zeros_like": "zeros_like", "broadcast_to": "broadcast", "expand_dims": "expand_dims",
}  # fmt: skip
"""Function of numpy -> its counterpart in the language, for errors."""
OPERATORS = {
    "add": "add", "subtract": "sub", "multiply": "mul", "true_divide": "div", "divide": "div",
    "floor_divide": "floordiv", "remainder": "mod", "less": "lt", "less_equal": "le", "equal": "eq", "not_equal": "ne",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor",
}  # fmt: skip
"""Ufunc that numpy calls for an operator with a numpy scalar on the left -> operation."""


class LanguageError(Sentences, ValueError):
    """A kernel that the language or the target cannot run; the message begins with file and line of the kernel."""


def kernel_line() -> str:
    """Return "file:line" of the kernel that is running: the innermost frame outside of this folder."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(FOLDER):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def fail(sentence: str, at: str | None = None) -> NoReturn:
    """Raise LanguageError at the line of the kernel that is running, or `at`."""
    raise LanguageError(f"{at or kernel_line()}: {sentence}")


class _RejectsNumpy:
    """Base class whose instances raise LanguageError when numpy's functions are called on them."""

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **options: Any) -> Tile:
        """Compute operators with a numpy scalar on the left; raise LanguageError for all other ufuncs."""
        name = ufunc.__name__
        if method == "__call__" and not options and isinstance(args[0], np.generic):
            if name in OPERATORS:
                return binary(OPERATORS[name], *args)
            if name in ("greater", "greater_equal"):
                return binary("lt" if name == "greater" else "le", *args[::-1])
        _fail_numpy(name, self)

    def __array_function__(self, function: Any, *args: Any) -> NoReturn:
        _fail_numpy(function.__name__, self)

    def __array__(self, *args: Any, **options: Any) -> NoReturn:
        _fail_numpy("array", self)


def _fail_numpy(name: str, value: Any) -> NoReturn:
    """Raise LanguageError for numpy's function `name` on a tile, pointer or array; name its counterpart, if any."""
    advice = (
        f"write cl.{NUMPY_EQUIVALENTS[name]}"
        if name in NUMPY_EQUIVALENTS
        else "the language's functions are those in docs/language.md"
    )
    description = "a tile" if isinstance(value, Tile) else "an array of the caller's, of which cl.load makes a tile"
    fail(f"np.{name} computes arrays of numpy's, and this is {description}; {advice}")


@dataclass(eq=False)
class ArrayArgument(_RejectsNumpy):
    """An array that a kernel was called with; as a pointer, it points to its first element.

    name: of the parameter. quantised: whether the caller passed `quantised(array, zero_point)`. data: the caller's
    array, which the interpreter reads and writes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    zero_point: int = 0
    quantised: bool = False
    data: NDArray[Any] | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements from one index to the next, for each dimension."""
        return tuple(int(np.prod(self.shape[d + 1 :], dtype=np.int64)) for d in range(len(self.shape)))

    def stride(self, dimension: int) -> int:
        """Return the elements from one index to the next along `dimension`."""
        return self.strides[dimension]

    def __add__(self, offsets: Tile | int) -> Pointer:
        return Pointer(self, as_tile(0, "int64")) + offsets

    __radd__ = __add__


@dataclass(frozen=True, eq=False)
class Pointer(_RejectsNumpy):
    """Pointers into an array: a tile of element numbers."""

    array: ArrayArgument
    offsets: Tile

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tile of pointers."""
        return self.offsets.shape

    @property
    def dtype(self) -> str:
        """Type of the elements that it points to."""
        return self.array.dtype

    def __add__(self, offsets: Tile | int) -> Pointer:
        """Move the pointers by offsets. Raises LanguageError for anything but integers."""
        if isinstance(offsets, (Pointer, ArrayArgument)):
            fail("two pointers cannot be added; add offsets, which are integers")
        tile = as_tile(offsets, "int64")
        if not tile.dtype.startswith(("int", "uint")):
            fail(f"offsets are integers, not {tile}")
        return Pointer(self.array, self.offsets + tile.to("int64"))

    __radd__ = __add__

    def __sub__(self, offsets: Tile | int) -> Pointer:
        return self + binary("sub", 0, as_tile(offsets, "int64"))

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.array, self.offsets[index])

    def __bool__(self) -> bool:
        fail("a pointer has no truth value")


class Scope:
    """The kernel or a loop in it: tiles, stores and loops in the order in which they were made.

    parent: the scope around, None for the kernel. at: file and line of a loop. closed: whether the loop has ended, so
    that its tiles cannot be used any more.
    """

    def __init__(self, parent: Scope | None = None, at: str = "") -> None:
        self.parent, self.at = parent, at
        self.body: list[Tile | TracedStore | TracedLoop] = []
        self.closed = False


class TracedLoop(Scope):
    """A loop whose body was traced once.

    carried: for each variable that iterations change, (initial tile, placeholder in the body, tile after the body, tile
    after the loop). steps: limit of the iterations. start, step: the index is start + iteration * step. bound: the
    index at which the loop ends, None where it always runs `steps` times.
    """

    def __init__(self, parent: Scope, at: str, steps: int, start: Tile, step: int, bound: Tile | None) -> None:
        super().__init__(parent, at)
        self.steps, self.start, self.step, self.bound = steps, start, step, bound
        self.carried: list[tuple[Tile, Tile, Tile, Tile]] = []


@dataclass(eq=False)
class TracedStore:
    """A store: array[offsets] = value where mask holds. block: offsets, sizes and steps of a block (ops.Block)."""

    array: ArrayArgument
    offsets: Tile
    value: Tile
    mask: Tile | None
    at: str
    block: tuple[tuple[Tile, ...], tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def args(self) -> tuple[Tile, ...]:
        """Tiles that it reads: offsets, value, and the mask if there is one."""
        return (self.offsets, self.value) if self.mask is None else (self.offsets, self.value, self.mask)


def scopes(scope: Scope) -> Iterator[Scope]:
    """Yield `scope` and the loops inside it."""
    yield scope
    for statement in scope.body:
        if isinstance(statement, TracedLoop):
            yield from scopes(statement)


def stores(top: Scope) -> list[TracedStore]:
    """Return all stores of a kernel, those in loops included, in order."""
    return [statement for scope in scopes(top) for statement in scope.body if isinstance(statement, TracedStore)]


class KernelRun:
    """One run through a kernel function: traced for all programs, or interpreted for one.

    ids: numbers of the interpreted program along the axes of the grid, None while tracing. value_of: the interpreter's
    function that computes a tile, None while tracing. top: the scope of the kernel. scope: the one in which the next
    tile is made.
    """

    def __init__(
        self, grid: tuple[int, ...], ids: tuple[int, ...] | None = None, value_of: Callable[..., Any] | None = None
    ) -> None:  # fmt: skip
        self.grid, self.ids, self.value_of = grid, ids, value_of
        self.scope = self.top = Scope()

    @property
    def is_interpreting(self) -> bool:
        """Whether values are computed, not only traced."""
        return self.ids is not None

    def __enter__(self) -> KernelRun:
        _local.run = self
        return self

    def __exit__(self, *error: object) -> None:
        _local.run = None


_local = threading.local()
"""The KernelRun of this thread: `run`, None outside of kernels."""


def current_run() -> KernelRun:
    """Return the running KernelRun. Raises LanguageError outside of kernels."""
    run: KernelRun | None = getattr(_local, "run", None)
    if run is None:
        fail("this is for kernels; call it inside a function with @cl.jit")
    return run


def is_in_kernel() -> bool:
    """Return whether a kernel is running."""
    return getattr(_local, "run", None) is not None


def _operator(name: str) -> Callable[[Any, Any], Tile]:
    """Make the method of Tile for a binary operator."""
    return lambda a, b: binary(name, a, b)


def _reflected_operator(name: str) -> Callable[[Any, Any], Tile]:
    """Make the method of Tile for a binary operator whose right operand is the tile."""
    return lambda a, b: binary(name, b, a)


@dataclass(eq=False)
class Tile(_RejectsNumpy):
    """Values of type `dtype` and a known shape, made by the operation `op` from `args`. A scalar has the shape ().

    attributes: arguments of the operation that are not tiles, by name. at: file and line of the kernel that made it.
    scope: the kernel or loop that made it. value: its elements while a kernel is interpreted, else None.
    """

    op: str
    args: tuple[Tile, ...]
    shape: tuple[int, ...]
    dtype: str
    attributes: dict[str, Any] = field(default_factory=dict)
    at: str = ""
    scope: Scope | None = None
    value: Any = None

    def __format__(self, spec: str) -> str:
        """Return type and shape, for messages."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    def __str__(self) -> str:
        """Return the value while a kernel is interpreted, else type and shape."""
        return f"{self}" if self.value is None else str(self.value)

    __repr__ = __str__

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def T(self) -> Tile:
        """The tile with reversed axes."""
        return make_tile("trans", (self,), self.shape[::-1], self.dtype, axes=tuple(range(len(self.shape)))[::-1])

    def to(self, dtype: Any) -> Tile:
        """Convert the values to `dtype`: floats to integers towards zero, saturating."""
        name = dtype_name(dtype)
        if name == self.dtype:
            return self
        return make_tile("cast", (self,), self.shape, name)

    def reshape(self, *shape: Any) -> Tile:
        """Reshape the elements in row-major order."""
        dims = shape_of(shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)
        if int(np.prod(dims, dtype=np.int64)) != self.size:
            fail(f"{self} has {self.size} elements and cannot be reshaped to {list(dims)}")
        return make_tile("reshape", (self,), dims, self.dtype)

    def __getitem__(self, index: Any) -> Tile:
        """Insert dimensions of size 1, as in [:, None]."""
        index = index if isinstance(index, tuple) else (index,)
        if any(not (i is None or i == slice(None)) for i in index) or index.count(slice(None)) > len(self.shape):
            fail("a tile is indexed with `:` and None alone; load what you need as a tile of its own")
        rest = iter(self.shape)
        dims = tuple(1 if i is None else next(rest) for i in index)
        return self.reshape(dims + tuple(rest))

    def __add__(self, other: Any) -> Any:
        return other + self if isinstance(other, (Pointer, ArrayArgument)) else binary("add", self, other)

    __radd__ = _reflected_operator("add")
    __sub__, __rsub__ = _operator("sub"), _reflected_operator("sub")
    __mul__, __rmul__ = _operator("mul"), _reflected_operator("mul")
    __truediv__, __rtruediv__ = _operator("div"), _reflected_operator("div")
    __floordiv__, __rfloordiv__ = _operator("floordiv"), _reflected_operator("floordiv")
    __mod__, __rmod__ = _operator("mod"), _reflected_operator("mod")
    __and__, __rand__ = _operator("and"), _reflected_operator("and")
    __or__, __ror__ = _operator("or"), _reflected_operator("or")
    __xor__, __lshift__, __rshift__ = _operator("xor"), _operator("shl"), _operator("shr")
    __lt__, __gt__ = _operator("lt"), _reflected_operator("lt")
    __le__, __ge__ = _operator("le"), _reflected_operator("le")
    __eq__, __ne__ = _operator("eq"), _operator("ne")  # type: ignore[assignment]

    def __neg__(self) -> Tile:
        return self * -1 if self.dtype.startswith("float") else binary("sub", 0, self)

    def __invert__(self) -> Tile:
        return binary("xor", self, True if self.dtype == "bool" else -1)

    def __bool__(self) -> bool:
        fail(
            "a tile has no truth value while a kernel is traced; write cl.where(condition, a, b) in the place of "
            "`if`, `and` and `or`, a mask for loads and stores, and cl.range in the place of `while`"
        )

    def __iter__(self) -> Any:
        fail("a tile cannot be iterated over; cl.range and cl.static_range make loops")

    def __index__(self) -> int:
        fail("a tile is no Python number while a kernel is traced; shapes and cl.static_range take constexprs")

    __int__ = __float__ = __index__
    __hash__ = object.__hash__


VIEWS = ("reshape", "broadcast", "trans")
"""Operations that only arrange or repeat elements."""


def origin(tile: Tile, *views: str) -> Tile:
    """Return the tile behind `tile` once the operations `views`, and loops that do not change it, are removed."""
    while tile.op in views or "same" in tile.attributes:
        tile = tile.attributes["same"] if "same" in tile.attributes else tile.args[0]
    return tile


def upstream(
    roots: Iterable[Tile], before: Callable[[Tile], Iterable[Tile]] = lambda tile: tile.args
) -> Iterator[Tile]:
    """Yield `roots` and all tiles from which they are computed, each once.

    before: returns the tiles to visit from a tile, by default its arguments.
    """
    stack, seen = list(roots), set()
    while stack:
        tile = stack.pop()
        if tile not in seen:
            seen.add(tile)
            yield tile
            stack += before(tile)


def dtype_name(dtype: Any) -> str:
    """Return numpy's name of an element type. Raises LanguageError where the language lacks it."""
    try:
        name = numpy_dtype(dtype).name if isinstance(dtype, str) else np.dtype(dtype).name
    except (TypeError, ValueError, AttributeError):
        name = str(dtype)
    if name not in DTYPES:
        fail(f"there is no element type {dtype!r} in the language; take one of {', '.join(DTYPES)}")
    return name


def shape_of(dims: Any) -> tuple[int, ...]:
    """Check and return a shape of constexprs. Raises LanguageError."""
    dims = tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)
    for size in dims:
        if isinstance(size, Tile):
            fail("a shape is made of constexprs, and this size is computed in the kernel")
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            fail(f"a size of a shape is a positive integer, not {size!r}")
    total = int(np.prod(dims, dtype=np.int64))
    if total > MAX_ELEMENTS:
        fail(f"a tile of {list(map(int, dims))} has {total} elements, more than {MAX_ELEMENTS}; take smaller blocks")
    return tuple(map(int, dims))


def make_tile(op: str, args: Sequence[Tile], shape: tuple[int, ...], dtype: str, **attributes: Any) -> Tile:
    """Make the tile that `op` computes from `args`: append it to the trace, or compute its value at once.

    attributes: arguments of the operation that are not tiles. Raises LanguageError for a tile of a loop that has ended.
    """
    run = current_run()
    for arg in args:
        check_alive(arg)
    tile = Tile(op, tuple(args), shape, dtype, attributes, kernel_line(), run.scope)
    if run.value_of is not None:
        tile.value = run.value_of(tile, run)
    else:
        run.scope.body.append(tile)
    return tile


def check_alive(tile: Tile) -> None:
    """Raise LanguageError where the loop that made the tile has ended."""
    if tile.scope is not None and tile.scope.closed:
        fail(
            f"a tile of line {tile.at.rsplit(':', 1)[1]} was made inside a loop and is used after it; give its name a "
            "tile of the same shape and type before the loop, which then carries it"
        )


def as_tile(value: Any, dtype: str | None = None) -> Tile:
    """Convert a Python number to a scalar of `dtype`, by default int32, float32 or bool; tiles are unchanged."""
    if isinstance(value, Tile):
        return value
    if isinstance(value, (ArrayArgument, Pointer)):
        fail(f"{'an array' if isinstance(value, ArrayArgument) else 'a pointer'} is no tile; cl.load reads one from it")
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        fail("an array of numpy's is no tile; make it an argument of the kernel, and cl.load reads a tile from it")
    if not isinstance(value, (bool, int, float)):
        fail(f"{value!r} is no tile and no number")
    natural = "bool" if isinstance(value, bool) else "float32" if isinstance(value, float) else "int32"
    name = dtype or natural
    if name[0] in "iu" and not isinstance(value, bool):
        limits = np.iinfo(name)
        if isinstance(value, float) or not limits.min <= value <= limits.max:
            if dtype is None:
                name = "int64"
            else:
                fail(f"{value} is no {name}; cast the tile beside it, or write another number")
    return make_tile("const", (), (), name, number=value)


def to_common_type(op: str, a: Any, b: Any) -> tuple[Tile, Tile]:
    """Convert the operands of `op` to tiles of one type and shape; no type becomes narrower."""
    dtype = _common_type(op, a, b)
    x, y = (side.to(dtype) if isinstance(side, Tile) else as_tile(side, dtype) for side in (a, b))
    return broadcast_all(op, x, y)  # type: ignore[return-value]


def broadcast_all(op: str, *tiles: Tile) -> tuple[Tile, ...]:
    """Broadcast the tiles to one shape. Raises LanguageError, naming `op`, where they do not fit."""
    try:
        shape = np.broadcast_shapes(*(tile.shape for tile in tiles))
    except ValueError:
        shapes = " and ".join(str(list(tile.shape)) for tile in tiles)
        fail(f"the shapes {shapes} of {op} do not fit; sizes must be equal or 1, x[:, None] adds a dimension")
    return tuple(broadcast(tile, shape) for tile in tiles)


def is_broadcastable(shape: tuple[int, ...], into: tuple[int, ...]) -> bool:
    """Return whether `shape` can be broadcast to `into`."""
    return len(shape) <= len(into) and all(a in (1, b) for a, b in zip(shape[::-1], into[::-1]))


def broadcast(tile: Tile, shape: tuple[int, ...]) -> Tile:
    """Broadcast a tile to `shape`, which must fit."""
    return tile if tile.shape == shape else make_tile("broadcast", (tile,), shape, tile.dtype)


def _common_type(op: str, a: Any, b: Any) -> str:
    """Return the type in which `op` computes operands a and b, tiles or Python numbers.

    A number takes the type of the tile where that can hold it. Raises LanguageError for signed with unsigned integers.
    """
    for side in (a, b):
        if isinstance(side, (ArrayArgument, Pointer)):
            as_tile(side)
    if not (isinstance(a, Tile) and isinstance(b, Tile)):
        tile, number = (a, b) if isinstance(a, Tile) else (b, a)
        if not isinstance(tile, Tile):
            return as_tile(number).dtype
        if isinstance(number, float) and not tile.dtype.startswith("float"):
            return "float32"
        if tile.dtype == "bool" and not isinstance(number, bool):
            return "int32"
        return tile.dtype
    if a.dtype == b.dtype:
        return a.dtype
    kinds = a.dtype.rstrip("0123456789"), b.dtype.rstrip("0123456789")
    if "float" in kinds:
        floats = [dtype for dtype in (a.dtype, b.dtype) if dtype.startswith("float")]
        return max(floats, key=lambda name: int(name[5:]))
    if set(kinds) == {"int", "uint"}:
        fail(f"{op} of {a} and {b}: one is signed, the other is not; cast one with .to(...)")
    if "bool" in kinds:
        return b.dtype if kinds[0] == "bool" else a.dtype
    return max(a.dtype, b.dtype, key=lambda name: np.dtype(name).itemsize)


def binary(op: str, a: Any, b: Any) -> Tile:
    """Make the tile a op b of two tiles, or a tile and a number, in their common type and shape.

    op: a name such as "add" or "lt". Division converts integers to float32; arithmetic converts bools to int32.
    """
    x, y = to_common_type(op, a, b)
    if op == "div" and not x.dtype.startswith("float"):
        x, y = x.to("float32"), y.to("float32")
    if op in BITS and x.dtype.startswith("float"):
        fail(f"{op} is for integers and bools, not {x}")
    if x.dtype == "bool" and op not in (*BITS[:3], *COMPARISONS):
        x, y = x.to("int32"), y.to("int32")
    return make_tile("binary", (x, y), x.shape, "bool" if op in COMPARISONS else x.dtype, name=op)
