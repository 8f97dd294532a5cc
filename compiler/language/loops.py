"""cl.range: a loop whose body is traced once.

Python's own names are what the loop carries. When the loop begins, each local variable of the kernel that holds a tile
gets a stand-in; when the body is done, those that hold another tile are what the next iteration begins with.
"""

from __future__ import annotations

import builtins
import ctypes
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from celosia.compiler.language.bounds import UnknownScalar, span
from celosia.compiler.language.errors import fail
from celosia.compiler.language.errors import where as here
from celosia.compiler.language.tile import KernelRun, Pointer, Tile, TracedLoop, as_tile, make, program


def range(start: Any, stop: Any = None, step: int = 1, **hints: Any) -> Iterator[Tile]:
    """start, start + step, ... below stop. What a kernel changes in it are tiles, which keep shape and type."""
    if stop is None:
        start, stop = 0, start
    if isinstance(step, Tile) or not isinstance(step, int) or step < 1:
        fail("the step of cl.range is a positive constexpr")
    running = program()
    if running.interpreting:
        first, end = (int(as_tile(bound, "int64").value) for bound in (start, stop))
        for number in builtins.range(first, end, step):
            yield make("index", (), (), "int64", number=number)
        return
    first_tile, stop_tile = as_tile(start, "int64").to("int64"), as_tile(stop, "int64").to("int64")
    steps, known = _steps(running, first_tile, stop_tile, step)
    if steps == 0:
        return
    frame = sys._getframe(1)
    loop = TracedLoop(running.scope, here(), steps, first_tile, step, None if known else stop_tile)
    before = {name: value for name, value in frame.f_locals.items() if _usable(value)}
    others = {name: _fingerprint(value) for name, value in frame.f_locals.items() if name not in before}
    running.scope = loop
    inside = {name: _stand_in(value) for name, value in before.items()}
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
        if print_ is not None and name in frame.f_locals and _fingerprint(now) != print_:
            fail(
                f"{name} is {print_[1]} before the loop and {_fingerprint(now, True)[1]} after its body, which is "  # type: ignore[index]
                "traced once; make it a tile, as cl.full((), 0, cl.int32), take cl.static_range, or another name",
                loop.at,
            )
    loop.closed = True
    assert loop.parent is not None
    running.scope = loop.parent
    running.scope.body.append(loop)
    _assign(frame, after)


def _usable(value: Any) -> bool:
    tile = value.offsets if isinstance(value, Pointer) else value
    return isinstance(tile, Tile) and not (tile.scope is not None and tile.scope.closed)


def _tile(value: Any) -> Tile:
    return value.offsets if isinstance(value, Pointer) else value


def _fingerprint(value: Any, always: bool = False) -> tuple[Any, str] | None:
    """What is compared of a value that a loop does not carry; None for what may change."""
    if isinstance(value, (bool, int, float)):
        return value, repr(value)
    if isinstance(value, (list, dict, set)):
        return tuple(map(id, value.values() if isinstance(value, dict) else value)), f"a {type(value).__name__}"
    return (id(value), str(value) if isinstance(value, Tile) else type(value).__name__) if always else None


def _stand_in(value: Any) -> Any:
    tile = _tile(value)
    place = make("phi", (), tile.shape, tile.dtype, first=tile)
    return Pointer(value.array, place) if isinstance(value, Pointer) else place


def _carry(loop: TracedLoop, name: str, before: Any, inside: Any, now: Any) -> Any:
    """What the name holds after the loop."""
    if now is inside or now is None:
        _tile(inside).more["same"] = _tile(before)
        return before
    first, place = _tile(before), _tile(inside)
    fits = isinstance(now, (Tile, Pointer)) and isinstance(now, Pointer) == isinstance(before, Pointer)
    last = _tile(now) if fits else None
    if isinstance(now, Pointer) and isinstance(before, Pointer) and now.array is not before.array:
        fail(
            f"{name} points into {before.array.name} before the loop and into {now.array.name} after its body", loop.at
        )
    if last is None or last.shape != place.shape or last.dtype != place.dtype:
        if not any(arg is place for each in loop.body if isinstance(each, Tile) for arg in each.args):
            place.more["same"] = first
            return now  # another use of the name, of which no iteration reads what the one before has left
        found = last if last is not None else f"{now!r}"
        fail(f"{name} is {place} before the loop and {found} after its body; make both of one shape and type", loop.at)
    step = _step(loop, place, last)
    if step is not None:
        place.more["induction"] = (first, step, loop)
    if "fixed" in place.more:
        fail(
            f"{name} says how often a loop runs inside of this one, and cannot change from iteration to iteration",
            loop.at,
        )
    result = Tile("result", (), place.shape, place.dtype, {}, loop.at, loop.parent)
    loop.carried.append((first, place, last, result))
    return Pointer(before.array, result) if isinstance(before, Pointer) else result


def _step(loop: TracedLoop, place: Tile, last: Tile) -> Tile | None:
    """By how much each iteration moves `place`, where that is the same for all: a number, or what was there before."""
    if last.op != "binary" or last.more["name"] != "add" or all(arg is not place for arg in last.args):
        return None
    if place.dtype != "int64":
        return None
    step = last.args[1] if last.args[0] is place else last.args[0]
    source = step
    while source.op in ("broadcast", "cast", "reshape"):
        source = source.args[0]
    return step if source.op == "const" or (step.scope is not loop and step is not place) else None


def _assign(frame: FrameType, values: dict[str, Any]) -> None:
    """Give local variables of a running function other values."""
    frame.f_locals.update(values)
    if sys.version_info < (3, 13):  # there f_locals is a copy
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def _steps(running: KernelRun, first: Tile, stop: Tile, step: int) -> tuple[int, bool]:
    """(how often the loop runs at most, whether it is always as often)."""
    try:
        (low, high), (least, most) = span(running, first), span(running, stop)
    except UnknownScalar:
        fail("the bounds of cl.range depend on data; take the largest that they can be, and a mask")
    steps = builtins.max(-(-(most - low) // step), 0)
    return steps, low == high and least == most
