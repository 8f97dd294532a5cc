"""Loops that cannot leave their tensors, whoever wrote them: what is compiled of a file that nobody vouches for.

    b[i] = a[t[i]]      ->      b[i] = a[max(min(t[i], 9), 0)]          a has 10 elements, and t may hold anything

Loops of the compiler read outside of a tensor only where a selection drops what is read, so this changes no result.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from celosia.compiler.expr.affine import flatten, interval, linear
from celosia.compiler.expr.bounds import statements
from celosia.compiler.expr.loops import Alloc, For, Function, Intrinsic, Stmt, children, map_accesses
from celosia.compiler.expr.nodes import INDEX, Const, Expr, Load, Tensor, maximum, minimum, wrap
from celosia.compiler.expr.verify import IRError, verify
from celosia.compiler.expr.walk import walk

MOST_INDEX = 1 << 62
"""Sums of indices below it do not overflow."""
MOST_ITERATIONS = 1 << 40
"""Most iterations of all loops together: a quarter of an hour, or more."""
MOST_LANES = 1024
MOST_CODE = 1 << 18
"""Statements, with loops written out."""
MOST_BYTES = 1 << 36
"""Most bytes of the tensors inside a function."""


def guarded(function: Function) -> Function:
    """`function` with every index inside its tensor. IRError where it breaks a rule, or is larger than the limits.

    What is certainly inside stays as it is. It has a name of its own, for code is found by names.
    """
    verify(function)
    _in_place(function)
    _limits(function)

    def read(e: Expr) -> Expr | None:
        if not isinstance(e, Load) or _is_inside(e.tensor, e.index):
            return None
        if not e.tensor.size:
            return wrap(0, e.dtype)
        return Load(e.tensor, _kept_inside(e.tensor, e.index))

    def write(tensor: Tensor, index: tuple[Expr, ...]) -> tuple[Tensor, tuple[Expr, ...]]:
        if not tensor.size:
            raise IRError("an empty tensor is not written", tensor.name)
        return (tensor, index) if _is_inside(tensor, index) else (tensor, _kept_inside(tensor, index))

    return verify(replace(function, name="guarded", body=map_accesses(function.body, read, write)))


def _is_inside(tensor: Tensor, index: tuple[Expr, ...]) -> bool:
    """Whether an element number certainly is, and no step of computing it overflows."""
    number = flatten(tensor.shape, index)
    found = interval(number)
    if found is None or found[0] < 0 or found[1] >= tensor.size:
        return False
    terms = [(interval(Const(1, INDEX) if atom is None else atom), k) for atom, k in linear(number).items()]
    if sum(abs(k) * _most(reach) for reach, k in terms) >= MOST_INDEX:
        return False
    return all(_most(reach) < MOST_INDEX for node in walk(number) if (reach := interval(node)) is not None)


def _most(reach: tuple[int, int] | None) -> int:
    return MOST_INDEX if reach is None else max(map(abs, reach))


def _kept_inside(tensor: Tensor, index: tuple[Expr, ...]) -> tuple[Expr]:
    return (maximum(minimum(flatten(tensor.shape, index), tensor.size - 1), 0),)


def _in_place(function: Function) -> None:
    """An input that lies in the memory of an output is as large."""
    outputs, inputs = dict(enumerate(function.outputs)), dict(enumerate(function.inputs))
    for out, number in function.in_place:
        sound = out in outputs and number in inputs and outputs.pop(out).nbytes == inputs.pop(number).nbytes
        if not sound:
            raise IRError("an input in the memory of an output is as large as it", f"({out}, {number})")


def _limits(function: Function) -> None:
    inside = list(statements(function.body))
    for s in inside:
        if isinstance(s, Intrinsic):
            raise IRError("a CPU has no such instruction", s.name)
        if isinstance(s, For) and s.kind == "vectorized" and s.extent > MOST_LANES:
            raise IRError("a vector has not so many lanes", s)
    if iterations(function.body) > MOST_ITERATIONS:
        raise IRError(f"there are at most {MOST_ITERATIONS} iterations", function.name)
    if _written(function.body) > MOST_CODE:
        raise IRError(f"there are at most {MOST_CODE} statements", function.name)
    tensors = (*function.inputs, *function.outputs, *(s.tensor for s in inside if isinstance(s, Alloc)))
    if any(prod(tensor.shape) > MOST_BYTES for tensor in tensors) or _bytes(function.body) > MOST_BYTES:
        raise IRError(f"tensors have at most {MOST_BYTES} bytes", function.name)


def iterations(s: Stmt) -> int:
    """Count the iterations of the innermost statements inside `s`."""
    times = s.extent if isinstance(s, For) else 1
    return times * max(1, sum(map(iterations, children(s))))


def _times(s: Stmt) -> int:
    """How often the body of `s` is written out."""
    return s.extent if isinstance(s, For) and s.kind == "unrolled" else 1


def _written(s: Stmt) -> int:
    """Statements that `s` becomes."""
    return 1 + _times(s) * sum(map(_written, children(s)))


def _bytes(s: Stmt) -> int:
    """What `s` allocates."""
    return (s.tensor.nbytes if isinstance(s, Alloc) else 0) + _times(s) * sum(map(_bytes, children(s)))
