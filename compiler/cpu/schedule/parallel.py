"""Multi-threading of a kernel: which loops share their iterations among threads. Results do not depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from celosia.compiler.expr.affine import depends_on
from celosia.compiler.expr.loops import Alloc, Block, For, Function, Stmt, Store, Update, block, exprs
from celosia.compiler.expr.nodes import Axis, Call, Load, Reduce, Tensor
from celosia.compiler.expr.regions import statements
from celosia.compiler.expr.transform import COSTLY
from celosia.compiler.expr.walk import walk

MIN_PARALLEL_WORK = 1 << 18
"""Least work (operations, see `_work`) of a loop nest that threads share: a barrier and data from another core take a
few microseconds."""
MIN_SHARED_ITERATIONS = 8
"""Least iterations of a loop that threads share, so that they divide evenly; loops with fewer are a second choice."""


@dataclass(frozen=True)
class Phase:
    """Code between two barriers.

    loop: the loop of `body` whose iterations threads share; None where one thread runs all of it. private: temporaries
    that no other phase touches, of which each thread has its own copy.
    """

    body: Stmt
    loop: For | None
    private: tuple[Tensor, ...]


def split_phases(function: Function) -> tuple[list[Tensor], list[Phase]]:
    """Split a function into phases. Returns (tensors that several phases touch, the phases).

    It is a single phase without a loop where nothing is worth several threads.
    """
    body, temporaries = function.body, []
    while isinstance(body, Alloc):
        temporaries.append(body.tensor)
        body = body.body
    nests = body.body if isinstance(body, Block) else (body,)
    users = {tensor: sum(tensor in _touched(nest) for nest in nests) for tensor in temporaries}
    groups: list[tuple[Stmt, For | None]] = []
    for nest in nests:
        loop = _shared_loop(nest, {tensor for tensor, count in users.items() if count == 1})
        if loop is None and groups and groups[-1][1] is None:
            groups[-1] = block(groups[-1][0], nest), None
        else:
            groups.append((nest, loop))
    if all(loop is None for _, loop in groups):
        return [], [Phase(function.body, None, ())]
    touched = [_touched(stmt) for stmt, _ in groups]
    phases_of = {tensor: [k for k, tensors in enumerate(touched) if tensor in tensors] for tensor in temporaries}
    phases = [
        Phase(stmt, loop, tuple(tensor for tensor, users_of in phases_of.items() if users_of == [k]))
        for k, (stmt, loop) in enumerate(groups)
    ]
    return [tensor for tensor, users_of in phases_of.items() if len(users_of) > 1], phases


def _shared_loop(nest: Stmt, private: set[Tensor]) -> For | None:
    """Return the loop of `nest` whose iterations threads share, or None. private: temporaries of this nest alone."""
    chain = list(_outer_loops(nest))
    marked = [loop for loop in chain if loop.kind == "parallel"]
    if not marked and _work(nest) < MIN_PARALLEL_WORK:
        return None
    shareable = [loop for loop in marked or chain if loop.extent > 1 and _is_independent(loop, private)]
    first = shareable[0] if shareable else None
    return next((loop for loop in shareable if loop.extent >= MIN_SHARED_ITERATIONS), first)


def _outer_loops(nest: Stmt) -> Iterator[For]:
    """Yield the outer loops of a nest whose body is nothing but the next loop, and the innermost of them."""
    while isinstance(nest, For) and nest.kind in ("serial", "parallel"):
        yield nest
        nest = nest.body


def _is_independent(loop: For, private: set[Tensor]) -> bool:
    """Return whether iterations write different elements, so that threads can share them.

    Private buffers carry nothing from one iteration to the next: nothing outside the loop initialises them.
    """
    if not isinstance(loop.var, Axis) or loop.var.reduce:
        return False
    inside = list(statements(loop.body))
    private = private | {s.tensor for s in inside if isinstance(s, Alloc)}
    written = [s for s in inside if isinstance(s, Store | Update) and s.tensor not in private]
    return all(any(depends_on(i, loop.var) for i in s.index) for s in written)


def _touched(stmt: Stmt) -> set[Tensor]:
    """Return the tensors that a statement reads or writes."""
    written = {s.tensor for s in statements(stmt) if isinstance(s, Store | Update)}
    return written | {n.tensor for s in statements(stmt) for e in exprs(s) for n in walk(e) if isinstance(n, Load)}


def _work(stmt: Stmt) -> int:
    """Count the operations on single elements that a statement executes; functions such as exp count as 16."""
    match stmt:
        case For(extent=extent, body=body):
            return extent * _work(body)
        case Block(body):
            return sum(map(_work, body))
        case Alloc(body=body):
            return _work(body)
        case Store(value=value) | Update(value=value):
            nodes = [node for node in walk(value) if not isinstance(node, Reduce)]
            return 1 + len(nodes) + 15 * sum(isinstance(n, Call) and n.name in COSTLY for n in nodes)
    return sum(map(_work, [s for s in statements(stmt) if s is not stmt and isinstance(s, Store | Update)]))
