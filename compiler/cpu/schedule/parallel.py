"""Run loops of a kernel on several threads. Only the order in which elements are computed depends on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from celosia.compiler.expr.affine import depends
from celosia.compiler.expr.bounds import statements
from celosia.compiler.expr.loops import Alloc, Block, For, Function, Stmt, Store, Update, block, exprs
from celosia.compiler.expr.nodes import Axis, Call, Load, Reduce, Tensor
from celosia.compiler.expr.transform import COSTLY
from celosia.compiler.expr.walk import walk

WORTH = 1 << 18
"""Work of a loop nest that pays for a barrier, and for data that comes from another core: a few us; see `_work`."""
ENOUGH = 8
"""Iterations that share well among a few threads."""


@dataclass(frozen=True)
class Phase:
    """Code that runs after the phases before it. loop: the one whose iterations threads share; None to run once.

    private: tensors that no other phase touches, of which each thread has its own.
    """

    body: Stmt
    loop: For | None
    private: tuple[Tensor, ...]


def phases(function: Function) -> tuple[list[Tensor], list[Phase]]:
    """(tensors that several phases touch, the phases); a single one where nothing is worth several threads."""
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
    homes = {tensor: [k for k, each in enumerate(touched) if tensor in each] for tensor in temporaries}
    made = [
        Phase(stmt, loop, tuple(tensor for tensor, home in homes.items() if home == [k]))
        for k, (stmt, loop) in enumerate(groups)
    ]
    return [tensor for tensor, home in homes.items() if len(home) > 1], made


def _shared_loop(nest: Stmt, own: set[Tensor]) -> For | None:
    """The loop of `nest` whose iterations threads share. own: temporaries of this nest alone."""
    chain = list(_chain(nest))
    marked = [loop for loop in chain if loop.kind == "parallel"]
    if not marked and _work(nest) < WORTH:
        return None
    free = [loop for loop in marked or chain if loop.extent > 1 and _independent(loop, own)]
    return next((loop for loop in free if loop.extent >= ENOUGH), free[0] if free else None)


def _chain(nest: Stmt) -> Iterator[For]:
    """The outer loops, each around nothing but the next."""
    while isinstance(nest, For) and nest.kind in ("serial", "parallel"):
        yield nest
        nest = nest.body


def _independent(loop: For, own: set[Tensor]) -> bool:
    """Whether iterations write different elements. What a nest has of its own carries nothing from one to the next:
    there is nothing outside the loop to begin it with.
    """
    if not isinstance(loop.var, Axis) or loop.var.reduce:
        return False
    inside = list(statements(loop.body))
    own = own | {s.tensor for s in inside if isinstance(s, Alloc)}
    written = [s for s in inside if isinstance(s, Store | Update) and s.tensor not in own]
    return all(any(depends(i, loop.var) for i in s.index) for s in written)


def _touched(stmt: Stmt) -> set[Tensor]:
    found = {s.tensor for s in statements(stmt) if isinstance(s, Store | Update)}
    return found | {n.tensor for s in statements(stmt) for e in exprs(s) for n in walk(e) if isinstance(n, Load)}


def _work(stmt: Stmt) -> int:
    """Operations on single elements, functions such as exp counted as 16."""
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
