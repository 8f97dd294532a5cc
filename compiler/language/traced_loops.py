"""cl.range: a loop whose body is traced once.

The loop carries Python's own local variables. When it begins, each local variable of the kernel that holds a tile gets
a placeholder; variables that hold another tile after the body are what the next iteration starts with.
"""

from __future__ import annotations

import builtins
import ctypes
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from celosia.compiler.language.language_errors import fail
from celosia.compiler.language.language_errors import where as here
from celosia.compiler.language.scalar_bounds import UnknownScalar, span
from celosia.compiler.language.tile import KernelRun, Pointer, Tile, TracedLoop, as_tile, make, program


def range(start: Any, stop: Any = None, step: int = 1, **hints: Any) -> Iterator[Tile]:
    """Loop over start, start + step, ... below stop.

    Variables that a kernel changes in it are tiles of one shape and type.
    """
    if stop is None:
        start, stop = 0, start
    if isinstance(step, Tile) or not isinstance(step, int) or step < 1:
        fail("the step of cl.range is a positive constexpr")
    running = program()
    if running.is_interpreting:
        first, end = (int(as_tile(bound, "int64").value) for bound in (start, stop))
        for number in builtins.range(first, end, step):
            yield make("index", (), (), "int64", number=number)
        return
    first_tile, stop_tile = as_tile(start, "int64").to("int64"), as_tile(stop, "int64").to("int64")
    steps, known = _iteration_count(running, first_tile, stop_tile, step)
    if steps == 0:
        return
    frame = sys._getframe(1)
    loop = TracedLoop(running.scope, here(), steps, first_tile, step, None if known else stop_tile)
    before = {name: value for name, value in frame.f_locals.items() if _is_carriable(value)}
    others = {name: _snapshot(value) for name, value in frame.f_locals.items() if name not in before}
    running.scope = loop
    inside = {name: _placeholder(value) for name, value in before.items()}
    _assign(frame, inside)
    index = make("index", (), (), "int64", loop=loop)
    yield first_tile + index * step
    if running.scope is not loop:
        fail("a loop inside this one was left with `break` or `return`; mask what is not to happen", loop.at)
    after = {}
    for name, value in before.items():
        after[name] = _carry(loop, name, value, inside[name], frame.f_locals.get(name))
    for name, print_ in others.items():
        now = frame.f_locals.get(name)
        if print_ is not None and name in frame.f_locals and _snapshot(now) != print_:
            fail(
                f"{name} is {print_[1]} before the loop and {_snapshot(now, True)[1]} after its body, which is "  # type: ignore[index]
                "traced once; make it a tile, as cl.full((), 0, cl.int32), take cl.static_range, or another name",
                loop.at,
            )
    loop.closed = True
    assert loop.parent is not None
    running.scope = loop.parent
    running.scope.body.append(loop)
    _assign(frame, after)


def _is_carriable(value: Any) -> bool:
    tile = value.offsets if isinstance(value, Pointer) else value
    return isinstance(tile, Tile) and not (tile.scope is not None and tile.scope.closed)


def _tile(value: Any) -> Tile:
    return value.offsets if isinstance(value, Pointer) else value


def _snapshot(value: Any, always: bool = False) -> tuple[Any, str] | None:
    """Return what is compared of a value that a loop does not carry; None for values that may change."""
    if isinstance(value, (bool, int, float)):
        return value, repr(value)
    if isinstance(value, (list, dict, set)):
        return tuple(map(id, value.values() if isinstance(value, dict) else value)), f"a {type(value).__name__}"
    return (id(value), str(value) if isinstance(value, Tile) else type(value).__name__) if always else None


def _placeholder(value: Any) -> Any:
    tile = _tile(value)
    placeholder = make("phi", (), tile.shape, tile.dtype, first=tile)
    return Pointer(value.array, placeholder) if isinstance(value, Pointer) else placeholder


def _carry(loop: TracedLoop, name: str, before: Any, inside: Any, after_body: Any) -> Any:
    """Return the value of a variable after the loop, and record how the loop changes it. Raises LanguageError."""
    if after_body is inside or after_body is None:
        _tile(inside).more["same"] = _tile(before)
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
        if not any(arg is placeholder for each in loop.body if isinstance(each, Tile) for arg in each.args):
            placeholder.more["same"] = first
            return after_body  # another use of the name, of which no iteration reads what the one before has left
        description = last if last is not None else f"{after_body!r}"
        fail(
            f"{name} is {placeholder} before the loop and {description} after its body; make both of one "
            "shape and type",
            loop.at,
        )
    step = _induction_step(loop, placeholder, last)
    if step is not None:
        placeholder.more["induction"] = (first, step, loop)
    if "fixed" in placeholder.more:
        fail(
            f"{name} says how often a loop runs inside of this one, and cannot change from iteration to iteration",
            loop.at,
        )
    result = Tile("result", (), placeholder.shape, placeholder.dtype, {}, loop.at, loop.parent)
    loop.carried.append((first, placeholder, last, result))
    return Pointer(before.array, result) if isinstance(before, Pointer) else result


def _induction_step(loop: TracedLoop, placeholder: Tile, last: Tile) -> Tile | None:
    """Return by how much each iteration increases `placeholder`, where all do so equally; else None."""
    if last.op != "binary" or last.more["name"] != "add" or all(arg is not placeholder for arg in last.args):
        return None
    if placeholder.dtype != "int64":
        return None
    step = last.args[1] if last.args[0] is placeholder else last.args[0]
    source = step
    while source.op in ("broadcast", "cast", "reshape"):
        source = source.args[0]
    return step if source.op == "const" or (step.scope is not loop and step is not placeholder) else None


def _assign(frame: FrameType, values: dict[str, Any]) -> None:
    """Assign to local variables of a running function."""
    frame.f_locals.update(values)
    if sys.version_info < (3, 13):  # there f_locals is a copy
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def _iteration_count(running: KernelRun, first: Tile, stop: Tile, step: int) -> tuple[int, bool]:
    """Return (the largest number of iterations, whether it is always reached)."""
    try:
        (low, high), (least, most) = span(running, first), span(running, stop)
    except UnknownScalar:
        fail("the bounds of cl.range depend on data; take the largest that they can be, and a mask")
    steps = builtins.max(-(-(most - low) // step), 0)
    return steps, low == high and least == most
