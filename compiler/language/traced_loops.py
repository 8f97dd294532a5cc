"""cl.range: a loop whose body is traced once.

The loop carries Python's own local variables. When it begins, each local variable of the kernel that holds a tile gets
a placeholder. A variable that holds another tile after the body is carried: the next iteration starts with that tile.

How often a loop runs follows from the values of its bounds. Values of scalars are computed in numpy, for all programs
and all iterations of the loops around them (`scalar_values`); block_reader.py and cpu.py use them, too.
"""

from __future__ import annotations

import builtins
import ctypes
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.expr.interpret import BINARY
from celosia.compiler.language.tile import (
    KernelRun,
    Pointer,
    Scope,
    Tile,
    TracedLoop,
    as_tile,
    current_run,
    fail,
    kernel_line,
    make_tile,
)


def range(start: Any, stop: Any = None, step: int = 1, **hints: Any) -> Iterator[Tile]:
    """Loop over start, start + step, ... below stop.

    Variables that the body changes must stay tiles of one shape and type. Traced, the loop yields once, a tile for the
    index; interpreted, it yields in every iteration.
    """
    if stop is None:
        start, stop = 0, start
    if isinstance(step, Tile) or not isinstance(step, int) or step < 1:
        fail("the step of cl.range is a positive constexpr")
    run = current_run()
    if run.is_interpreting:
        first, end = (int(as_tile(bound, "int64").value) for bound in (start, stop))
        for number in builtins.range(first, end, step):
            yield make_tile("index", (), (), "int64", number=number)
        return
    first_tile, stop_tile = as_tile(start, "int64").to("int64"), as_tile(stop, "int64").to("int64")
    steps, is_exact = _iteration_count(run, first_tile, stop_tile, step)
    if steps == 0:
        return
    frame = sys._getframe(1)
    loop = TracedLoop(run.scope, kernel_line(), steps, first_tile, step, None if is_exact else stop_tile)
    before = {name: value for name, value in frame.f_locals.items() if _is_carriable(value)}
    others = {name: _snapshot(value) for name, value in frame.f_locals.items() if name not in before}
    run.scope = loop
    inside = {name: _placeholder(value) for name, value in before.items()}
    _assign(frame, inside)
    index = make_tile("index", (), (), "int64", loop=loop)
    yield first_tile + index * step
    if run.scope is not loop:
        fail("a loop inside this one was left with `break` or `return`; mask what is not to happen", loop.at)
    after = {}
    for name, value in before.items():
        after[name] = _carry(loop, name, value, inside[name], frame.f_locals.get(name))
    for name, snapshot in others.items():
        now = frame.f_locals.get(name)
        if snapshot is not None and name in frame.f_locals and _snapshot(now) != snapshot:
            fail(
                f"{name} is {snapshot[1]} before the loop and {_snapshot(now, True)[1]} after its body, which is "  # type: ignore[index]
                "traced once; make it a tile, as cl.full((), 0, cl.int32), take cl.static_range, or another name",
                loop.at,
            )
    loop.closed = True
    assert loop.parent is not None
    run.scope = loop.parent
    run.scope.body.append(loop)
    _assign(frame, after)


def _is_carriable(value: Any) -> bool:
    """Return whether a loop can carry a variable with this value: a tile or pointer that may still be used."""
    tile = _tile(value)
    return isinstance(tile, Tile) and not (tile.scope is not None and tile.scope.closed)


def _tile(value: Any) -> Any:
    """Return the tile of a carried value: the offsets of a pointer, else the value itself."""
    return value.offsets if isinstance(value, Pointer) else value


def _snapshot(value: Any, always: bool = False) -> tuple[Any, str] | None:
    """Return (key, description) of a Python value, to notice that the body of a loop changes it.

    The body is traced once, so such a change would be lost. None means that the value may change; always: return a key
    for such values, too.
    """
    if isinstance(value, (bool, int, float)):
        return value, repr(value)
    if isinstance(value, (list, dict, set)):
        return tuple(map(id, value.values() if isinstance(value, dict) else value)), f"a {type(value).__name__}"
    return (id(value), str(value) if isinstance(value, Tile) else type(value).__name__) if always else None


def _placeholder(value: Any) -> Any:
    """Make the tile, or the pointer, that stands in the body for a variable whose value before the loop is `value`.

    Attributes of the tile: "first": the value before the loop. "same": the tile that the variable equals in every
    iteration, if the body does not change it. "induction": (first value, step, loop) of a variable to which each
    iteration adds the same step. "fixed": set where a loop inside runs as often as the variable says, so that the body
    must not change it (`scalar_values`).
    """
    tile = _tile(value)
    placeholder = make_tile("phi", (), tile.shape, tile.dtype, first=tile)
    return Pointer(value.array, placeholder) if isinstance(value, Pointer) else placeholder


def _carry(loop: TracedLoop, name: str, before: Any, inside: Any, after_body: Any) -> Any:
    """Record how the loop changes the variable `name`, and return its value after the loop. Raises LanguageError.

    before, inside, after_body: its value before the loop, its placeholder, and its value after the traced body.
    after_body is None where the body deleted the variable.
    """
    if after_body is inside or after_body is None:
        _tile(inside).attributes["same"] = _tile(before)
        return before
    first, placeholder = _tile(before), _tile(inside)
    is_compatible = isinstance(after_body, (Tile, Pointer)) and isinstance(after_body, Pointer) == isinstance(
        before, Pointer
    )
    last = _tile(after_body) if is_compatible else None
    if isinstance(after_body, Pointer) and isinstance(before, Pointer) and after_body.array is not before.array:
        fail(
            f"{name} points into {before.array.name} before the loop and into {after_body.array.name} after its body",
            loop.at,
        )
    if last is None or last.shape != placeholder.shape or last.dtype != placeholder.dtype:
        if not any(arg is placeholder for tile in loop.body if isinstance(tile, Tile) for arg in tile.args):
            placeholder.attributes["same"] = first
            return after_body  # the name is used anew: no iteration reads the value that the one before left
        description = last if last is not None else f"{after_body!r}"
        fail(
            f"{name} is {placeholder} before the loop and {description} after its body; make both of one "
            "shape and type",
            loop.at,
        )
    step = _induction_step(loop, placeholder, last)
    if step is not None:
        placeholder.attributes["induction"] = (first, step, loop)
    if "fixed" in placeholder.attributes:
        fail(
            f"{name} says how often a loop runs inside of this one, and cannot change from iteration to iteration",
            loop.at,
        )
    result = Tile("result", (), placeholder.shape, placeholder.dtype, {}, loop.at, loop.parent)
    loop.carried.append((first, placeholder, last, result))
    return Pointer(before.array, result) if isinstance(before, Pointer) else result


def _induction_step(loop: TracedLoop, placeholder: Tile, last: Tile) -> Tile | None:
    """Return the tile that each iteration adds to the int64 `placeholder`, if it is the same in all; else None.

    The CPU computes such a variable, as a moving offset, from the number of the iteration.
    """
    if last.op != "binary" or last.attributes["name"] != "add" or all(arg is not placeholder for arg in last.args):
        return None
    if placeholder.dtype != "int64":
        return None
    step = last.args[1] if last.args[0] is placeholder else last.args[0]
    source = step
    while source.op in ("broadcast", "cast", "reshape"):
        source = source.args[0]
    return step if source.op == "const" or (step.scope is not loop and step is not placeholder) else None


def _assign(frame: FrameType, values: dict[str, Any]) -> None:
    """Assign `values` to the local variables of a running function: the kernel, whose loop changes them."""
    frame.f_locals.update(values)
    if sys.version_info < (3, 13):  # there f_locals is a copy
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def _iteration_count(run: KernelRun, first: Tile, stop: Tile, step: int) -> tuple[int, bool]:
    """Return (the largest number of iterations, whether all programs do as many). Raises LanguageError."""
    try:
        starts, stops = scalar_values(run, first), scalar_values(run, stop)
    except UnknownScalar:
        fail("the bounds of cl.range depend on data; take the largest that they can be, and a mask")
    low, high = int(starts.min()), int(stops.max())
    is_exact = bool((starts == low).all() and (stops == high).all())
    return builtins.max(-(-(high - low) // step), 0), is_exact


# Values of scalars ------------------------------------------------------------------------------------------------


MAX_COMBINATIONS = 1 << 22
"""Limit of the combinations of programs and iterations that are computed."""


class UnknownScalar(ValueError):
    """A scalar that depends on data, or on too many combinations."""


def scalar_values(run: KernelRun, tile: Tile) -> NDArray[Any]:
    """Return the values of a scalar in all programs and iterations.

    The result has an axis for each of the three grid axes, and one for each loop around, the outermost first. An axis
    has size 1 where the scalar does not depend on it. Raises UnknownScalar.
    """
    attributes = tile.attributes
    match tile.op:
        case "const":
            return np.full((1, 1, 1), attributes["number"], tile.dtype)
        case "program_id":
            return _numbers_along(run.grid[attributes["axis"]], attributes["axis"])
        case "index":
            return _numbers_along(attributes["loop"].steps, 3 + _loop_depth(attributes["loop"]))
        case "phi" if "same" in attributes:
            return scalar_values(run, attributes["same"])
        case "phi" if "first" in attributes:
            attributes["fixed"] = True  # traced_loops.range refuses a loop that changes it after all
            return scalar_values(run, attributes["first"])
        case "cast" | "broadcast" | "reshape" if not tile.shape:
            return scalar_values(run, tile.args[0]).astype(tile.dtype)
        case "binary" | "where" if not tile.shape:
            args = [scalar_values(run, arg) for arg in tile.args]
            rank = max(arg.ndim for arg in args)
            args = [arg.reshape(*arg.shape, *(1,) * (rank - arg.ndim)) for arg in args]
            if np.prod(np.broadcast_shapes(*(arg.shape for arg in args))) > MAX_COMBINATIONS:
                raise UnknownScalar(tile.at)
            with np.errstate(all="ignore"):
                return BINARY[attributes["name"]](*args) if tile.op == "binary" else np.where(*args)
    raise UnknownScalar(tile.at)


def _numbers_along(size: int, axis: int) -> NDArray[Any]:
    """Return 0, 1, ..., size - 1 along `axis` of an array with at least three axes, whose others have size 1."""
    return np.arange(size).reshape((1,) * axis + (size,) + (1,) * max(0, 2 - axis))


def _loop_depth(loop: Scope) -> int:
    """Count the loops around `loop`."""
    depth, scope = 0, loop.parent
    while isinstance(scope, TracedLoop):
        depth, scope = depth + 1, scope.parent
    return depth
