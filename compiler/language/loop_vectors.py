"""Vectorise the innermost loops of a kernel on the CPU.

    for i in 100: y[i] = x[i] * 2        for i.o in 1: vectorized i.i in 64: y[i.o * 64 + i.i] = ...
                                   ->    vectorized i in 32: ...   for i in 4: ...

A sum over the loop has as many partial sums as there are lanes. Loops with conditions, or with lanes that are not
contiguous, are left scalar.

`cpu.schedule` schedules one tensor at a time, but here a loop has several statements and is split where masks begin.
With each statement scheduled by itself, and loops merged afterwards, softmax took 7% longer (of rows of 100 43%), layer
normalisation 9% (31%), and the maximum of blocks of 1,000 bytes 2.8 times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from celosia.compiler.cpu.schedule.kernel_schedules import Knobs, schedule_stage
from celosia.compiler.expr import Alloc, Axis, Expr, For, If, Let, Load, Select, Stmt, Store, Tensor, Update
from celosia.compiler.expr.affine import Linear, flatten, is_in_bounds, linear, stride_along, structure
from celosia.compiler.expr.loops import Block, block, map_accesses, sequence
from celosia.compiler.expr.lower import lower, reduction_identity
from celosia.compiler.expr.nodes import Const, Var, substitute, walk
from celosia.compiler.expr.schedule import create_schedule
from celosia.compiler.program.dtypes import itemsize
from celosia.compiler.target import target

VECTORS_IN_FLIGHT = 4
"""Vectors that a loop processes at once: an addition's latency in additions."""

TAIL_DIVISORS = (2, 4)
"""Divisors of the vector width for the rest of a loop; the last few elements are scalar."""
Write = Store | Update


def vectorise(stmt: Stmt) -> Stmt:
    """Vectorise the innermost loops of `stmt`, where that keeps its meaning.

    Neighbouring loops that add to the same sums are vectorised together; transpositions are tiled.
    """
    match stmt:
        case For(Axis() as i, _, For(Axis() as j, _, Store() as body, "serial"), "serial") if _is_transposition(
            j, body
        ):
            return _tile_transposition((i, j), body)
        case For() if _is_vectorisable(stmt):
            return _vectorise_loops([stmt])
        case For(var, extent, body, kind) if kind not in ("vectorized", "unrolled"):
            vector_body = vectorise(body)
            return For(var, extent, vector_body, kind) if sequence(vector_body) else vector_body
        case Block(body):
            done: list[Stmt] = []
            for _, run in groupby(body, key=lambda part: tuple(_shared_sums(part)) or part):
                first, *more = run
                done.append(_vectorise_loops([first, *more]) if more else vectorise(first))
            return block(*done)
        case Alloc() | Let():
            return replace(stmt, body=vectorise(stmt.body))
        case If(cond, body, orelse):
            return If(cond, vectorise(body), None if orelse is None else vectorise(orelse))
        case Update() if _adds_nothing(stmt):
            return block()
    return stmt


def _is_vectorisable(stmt: Stmt) -> bool:
    """Return whether iterations of the loop can be lanes."""
    if not isinstance(stmt, For) or not isinstance(stmt.var, Axis) or stmt.kind != "serial" or stmt.extent == 1:
        return False
    body = _flat_body(stmt)
    return bool(body) and all(_can_be_lanes(stmt.var, write) for write in body) and _are_independent(body)


def _flat_body(loop: Stmt) -> tuple[Write, ...]:
    """Return the statements in the body of a loop that has nothing but writes; () for other loops."""
    body_statements = sequence(loop.body) if isinstance(loop, For) else ()
    writes = tuple(write for write in body_statements if isinstance(write, Store | Update))
    return tuple(write for write in writes if not _adds_nothing(write)) if len(writes) == len(body_statements) else ()


def _adds_nothing(write: Write) -> bool:
    """Return whether an update has no effect, because it adds the identity, as under a mask that is always false."""
    if isinstance(write, Store) or not isinstance(write.value, Const):
        return False
    return write.value.value == reduction_identity(write.kind, write.tensor.dtype).value


def _is_transposition(var: Axis, body: Store) -> bool:
    """Return whether `body` transposes: along `var` it writes contiguous elements, and reads elements further apart.

    Tensors with a definition are products, which have a schedule already.
    """
    steps = [stride_along(load.tensor, load.index, var) for load in walk(body.value) if isinstance(load, Load)]
    if body.tensor.body is not None or None in steps or {*steps} <= {0, 1}:
        return False
    return stride_along(body.tensor, body.index, var) == 1


def _tile_transposition(axes: tuple[Axis, Axis], body: Store) -> Stmt:
    """Return the loops of a transposition in square tiles, as `cpu.schedule` makes them. axes: the two loops."""
    transposed = Tensor("turned", tuple(axis.extent for axis in axes), body.tensor.dtype, axes, body.value)
    scheduled = create_schedule(transposed)
    schedule_stage(scheduled[transposed], Knobs(tail="peel"))

    def redirect(_: Tensor, index: tuple[Expr, ...]) -> tuple[Tensor, tuple[Expr, ...]]:
        values: dict[Var, Expr] = dict(zip(axes, index))
        return body.tensor, tuple(substitute(i, values) for i in body.index)

    return map_accesses(lower(scheduled).body, lambda _: None, redirect)


def _shared_sums(stmt: Stmt) -> dict[Hashable, Update]:
    """Return the updates by which all iterations of a vectorisable loop add to one element, by `_element_key`."""
    updates = [write for write in _flat_body(stmt) if isinstance(write, Update)] if _is_vectorisable(stmt) else []
    return {_element_key(write): write for write in updates if stride_along(write.tensor, write.index, stmt.var) == 0}  # type: ignore[attr-defined]


def _element_key(write: Write) -> Hashable:
    """Return a key that is equal for writes of the same element."""
    return write.tensor, *map(structure, write.index)


class VectorSpan(NamedTuple):
    """A part of a loop: `times` iterations of `registers` vectors of `lanes`, from iteration `first` on."""

    first: int
    times: int
    registers: int
    lanes: int


def _vector_spans(loop: For) -> Iterator[VectorSpan]:
    """Split the iterations of a loop into spans: several vectors at once, single ones, narrower ones, and scalars."""
    lanes = target().vector_bytes // max(
        itemsize(dtype) for write in _flat_body(loop) for dtype in _element_types(write)
    )
    widths = (VECTORS_IN_FLIGHT, lanes), (1, lanes), *((1, lanes // divisor) for divisor in TAIL_DIVISORS)
    start = 0
    for registers, width in (*((r, w) for r, w in widths if w > 1), (1, 1)):
        count = (loop.extent - start) // (registers * width)
        if count:
            yield VectorSpan(start, count, registers, width)
            start += count * registers * width


def _vectorise_loops(loops: Sequence[Stmt]) -> Stmt:
    """Vectorise consecutive loops with the same sums, if any, which then share partial sums."""
    spans = [(loop, span) for loop in loops if isinstance(loop, For) for span in _vector_spans(loop)]
    lanes = max(span.lanes for _, span in spans)
    size = lanes * max(span.registers for _, span in spans)
    sums = _shared_sums(loops[0]) if lanes > 1 else {}
    partial_sums = {element: Tensor("part", (size,), total.tensor.dtype) for element, total in sums.items()}
    code = block(*(_vectorise_span(loop, span, partial_sums) for loop, span in spans))
    for element, total in sums.items():
        code = _combine_partial_sums(total, partial_sums[element], code, lanes)
    return code


def _vectorise_span(loop: For, span: VectorSpan, partial_sums: dict[Hashable, Tensor]) -> Stmt:
    """Return the loop over one span. Each lane adds to its own element of `partial_sums` instead of the sum."""
    body, step = _flat_body(loop), span.registers * span.lanes
    assert isinstance(loop.var, Axis)
    if step == 1:
        rest = Axis(loop.var.name, extent=span.times)
        return For(rest, span.times, block(*(_at_iteration(write, loop.var, rest + span.first) for write in body)))
    outer = Axis(f"{loop.var.name}.o", extent=span.times)

    def write_lane(lane: Expr, write: Write) -> Stmt:
        """Return the copy of `write` for the iteration that is element `lane` of the vectors."""
        moved = _at_iteration(write, loop.var, outer * step + lane + span.first)
        sums = partial_sums.get(_element_key(write))
        if sums is None:
            return moved
        assert isinstance(moved, Update)
        return Update(moved.kind, sums, (lane,), moved.value)

    vectors = _unrolled_vectors(step, span.lanes, lambda lane: block(*(write_lane(lane, write) for write in body)))
    return For(outer, span.times, vectors)


def _unrolled_vectors(size: int, lanes: int, make: Callable[[Expr], Stmt]) -> Stmt:
    """Return unrolled vectorised loops over `size` elements, whose body is make(number of the element)."""
    vector, lane = Axis("v", extent=size // lanes), Axis("l", extent=lanes)
    return For(vector, size // lanes, For(lane, lanes, make(vector * lanes + lane), "vectorized"), "unrolled")


def _combine_partial_sums(total: Update, partial: Tensor, code: Stmt, lanes: int) -> Stmt:
    """Initialise `partial` before `code`, which adds to its elements, and reduce these into `total` after it."""
    kind, zero = total.kind, reduction_identity(total.kind, partial.dtype)
    (size,) = partial.shape

    def add_half(half: int) -> Callable[[Expr], Stmt]:
        return lambda at: Update(kind, partial, (at,), Load(partial, (at + half,)))

    done = [_unrolled_vectors(size, lanes, lambda at: Store(partial, (at,), zero)), code]
    for half in (size >> n for n in range(1, (size // lanes).bit_length())):
        done.append(_unrolled_vectors(half, lanes, add_half(half)))
    lane = Axis("l", extent=lanes)
    done.append(For(lane, lanes, Update(kind, total.tensor, total.index, Load(partial, (lane,))), "vectorized"))
    return Alloc(partial, block(*done), "local")


def _can_be_lanes(var: Axis, write: Write) -> bool:
    """Return whether iterations write contiguous elements, or all add to one."""
    step = stride_along(write.tensor, write.index, var)
    sums = isinstance(write, Update) and write.kind != "ordered_sum"
    return _has_contiguous_reads(var, write.value) and (step == 1 or (step == 0 and sums))


def _are_independent(body: tuple[Write, ...]) -> bool:
    """Return whether a vectorised loop may run its statements one after the other for all lanes.

    All accesses of a tensor that the body writes must be to the same element.
    """
    if len(body) == 1:
        return True
    touched: dict[Tensor, list[Linear]] = {}
    for write in body:
        touched.setdefault(write.tensor, []).append(linear(flatten(write.tensor.shape, write.index)))
    reads = (node for write in body for node in walk(write.value) if isinstance(node, Load))
    for node in reads:
        if node.tensor in touched:
            touched[node.tensor].append(linear(flatten(node.tensor.shape, node.index)))
    return all(access == accesses[0] for accesses in touched.values() for access in accesses)


def _element_types(body: Write) -> set[str]:
    """Return the element types of all tensors that a statement accesses; the widest decides the number of lanes."""
    return {body.tensor.dtype} | {node.tensor.dtype for node in walk(body.value) if isinstance(node, Load)}


def _at_iteration(body: Stmt, var: Var, iteration: Expr) -> Stmt:
    """Copy `body` with the loop variable `var` replaced by `iteration`."""
    return map_accesses(
        body,
        lambda e: iteration if e is var else None,
        lambda t, i: (t, tuple(substitute(x, {var: iteration}) for x in i)),
    )


def _has_contiguous_reads(var: Axis, value: Expr) -> bool:
    """Return whether all reads are contiguous along `var` or of one element, and reads under a mask contiguous."""
    for node in walk(value):
        if isinstance(node, Load) and stride_along(node.tensor, node.index, var) not in (0, 1):
            return False
        if isinstance(node, Select):
            for arm in (node.a, node.b):
                for load in walk(arm):
                    if (
                        isinstance(load, Load)
                        and not is_in_bounds(load)
                        and stride_along(load.tensor, load.index, var) != 1
                    ):
                        return False
    return True
