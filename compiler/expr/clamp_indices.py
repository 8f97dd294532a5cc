"""Clamp the indices of a kernel from an untrusted file, so that no access leaves its tensor.

  b[i] = a[t[i]]      ->      b[i] = a[max(min(t[i], 9), 0)]          a has 10 elements, and t may hold anything

Loops of the compiler read outside of a tensor only where a selection drops the value, so clamping changes no result.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from celosia.compiler.expr.affine import flatten, interval, linear
from celosia.compiler.expr.loops import Alloc, For, Function, Intrinsic, Stmt, children, map_accesses
from celosia.compiler.expr.nodes import INDEX, Const, Expr, Load, Tensor, maximum, minimum, wrap
from celosia.compiler.expr.regions import statements
from celosia.compiler.expr.verify import IRError, verify
from celosia.compiler.expr.walk import walk

MAX_INDEX = 1 << 62
"""Limit of index magnitudes; sums below it do not overflow int64."""
MAX_ITERATIONS = 1 << 40
"""Limit of the iterations of all loops together, which take a quarter of an hour or more."""
MAX_LANES = 1024
"""Limit of the lanes of a vectorised loop."""
MAX_STATEMENTS = 1 << 18
"""Limit of the statements after unrolling, which bounds the time and memory of LLVM."""
MAX_BYTES = 1 << 36
"""Limit of the bytes of tensors inside a function."""


def clamp_accesses(function: Function) -> Function:
    """Clamp every index of `function` that is not proved to be inside its tensor.

    The result has the fixed name "guarded", because compiled code is cached by name. Raises IRError where the function
    breaks a rule of the verifier or exceeds a limit above.
    """
    verify(function)
    _check_in_place(function)
    _check_limits(function)

    def clamp_load(e: Expr) -> Expr | None:
        if not isinstance(e, Load) or _is_inside(e.tensor, e.index):
            return None
        if not e.tensor.size:
            return wrap(0, e.dtype)
        return Load(e.tensor, _clamped_index(e.tensor, e.index))

    def clamp_write(tensor: Tensor, index: tuple[Expr, ...]) -> tuple[Tensor, tuple[Expr, ...]]:
        if not tensor.size:
            raise IRError("an empty tensor is not written", tensor.name)
        return (tensor, index) if _is_inside(tensor, index) else (tensor, _clamped_index(tensor, index))

    return verify(replace(function, name="guarded", body=map_accesses(function.body, clamp_load, clamp_write)))


def _is_inside(tensor: Tensor, index: tuple[Expr, ...]) -> bool:
    """Return whether the element number is proved to be inside, and no intermediate value of it can overflow."""
    element = flatten(tensor.shape, index)
    span = interval(element)
    if span is None or span[0] < 0 or span[1] >= tensor.size:
        return False
    terms = [(interval(Const(1, INDEX) if atom is None else atom), k) for atom, k in linear(element).items()]
    if sum(abs(k) * _max_magnitude(bounds) for bounds, k in terms) >= MAX_INDEX:
        return False
    return all(_max_magnitude(bounds) < MAX_INDEX for node in walk(element) if (bounds := interval(node)) is not None)


def _max_magnitude(bounds: tuple[int, int] | None) -> int:
    """Return the largest absolute value within `bounds`, or MAX_INDEX where they are not known."""
    return MAX_INDEX if bounds is None else max(map(abs, bounds))


def _clamped_index(tensor: Tensor, index: tuple[Expr, ...]) -> tuple[Expr]:
    """Return an index as an element number that is clamped to the tensor."""
    return (maximum(minimum(flatten(tensor.shape, index), tensor.size - 1), 0),)


def _check_in_place(function: Function) -> None:
    """Raise IRError where an input shares the memory of an output of another size."""
    outputs, inputs = dict(enumerate(function.outputs)), dict(enumerate(function.inputs))
    for output_position, input_position in function.in_place:
        is_valid = (
            output_position in outputs
            and input_position in inputs
            and outputs.pop(output_position).nbytes == inputs.pop(input_position).nbytes
        )
        if not is_valid:
            raise IRError(
                "an input in the memory of an output is as large as it", f"({output_position}, {input_position})"
            )


def _check_limits(function: Function) -> None:
    """Raise IRError for instructions of an accelerator, too wide vectors, or a size above the limits."""
    inside = list(statements(function.body))
    for s in inside:
        if isinstance(s, Intrinsic):
            raise IRError("a CPU has no such instruction", s.name)
        if isinstance(s, For) and s.kind == "vectorized" and s.extent > MAX_LANES:
            raise IRError("a vector has not so many lanes", s)
    if iterations(function.body) > MAX_ITERATIONS:
        raise IRError(f"there are at most {MAX_ITERATIONS} iterations", function.name)
    if _statement_count(function.body) > MAX_STATEMENTS:
        raise IRError(f"there are at most {MAX_STATEMENTS} statements", function.name)
    tensors = (*function.inputs, *function.outputs, *(s.tensor for s in inside if isinstance(s, Alloc)))
    if any(prod(tensor.shape) > MAX_BYTES for tensor in tensors) or _allocated_bytes(function.body) > MAX_BYTES:
        raise IRError(f"tensors have at most {MAX_BYTES} bytes", function.name)


def iterations(s: Stmt) -> int:
    """Count the iterations of the innermost statements inside `s`."""
    times = s.extent if isinstance(s, For) else 1
    return times * max(1, sum(map(iterations, children(s))))


def _unroll_factor(s: Stmt) -> int:
    """Return how many copies of the body of `s` unrolling makes."""
    return s.extent if isinstance(s, For) and s.kind == "unrolled" else 1


def _statement_count(s: Stmt) -> int:
    """Count the statements of `s` after unrolling."""
    return 1 + _unroll_factor(s) * sum(map(_statement_count, children(s)))


def _allocated_bytes(s: Stmt) -> int:
    """Count the bytes that `s` allocates after unrolling."""
    return (s.tensor.nbytes if isinstance(s, Alloc) else 0) + _unroll_factor(s) * sum(
        map(_allocated_bytes, children(s))
    )
