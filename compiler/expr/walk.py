"""Walk and rewrite expressions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from celosia.compiler.expr.nodes import Expr, Load, Tensor, Var


def walk(expr: Expr) -> Iterator[Expr]:
    """Every node of `expr`, each shared one once."""
    seen: set[int] = set()
    stack = [expr]
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            if children := node.children():
                stack.extend(children[::-1])


def loaded(expr: Expr) -> frozenset[Tensor]:
    """The tensors that `expr` reads. Nodes never change, so each remembers its own."""
    if not (children := expr.children()):
        return frozenset((expr.tensor,)) if isinstance(expr, Load) else frozenset()
    found: frozenset[Tensor] | None = expr.__dict__.get("_loaded")
    if found is None:
        found = frozenset().union(*map(loaded, children))
        if isinstance(expr, Load):
            found |= {expr.tensor}
        expr.__dict__["_loaded"] = found
    return found


def rewrite(expr: Expr, change: Callable[[Expr], Expr | None]) -> Expr:
    """Bottom-up copy of `expr`; where `change` returns a node, that node stands instead. Sharing is kept."""
    if not expr.children():
        return expr if (new := change(expr)) is None else new
    return _rewritten(expr, change, {})


def _rewritten(node: Expr, change: Callable[[Expr], Expr | None], done: dict[int, Expr]) -> Expr:
    """done: nodes that were seen before, by their ids."""
    if (new := done.get(id(node))) is None:
        new = node
        if before := node.children():
            after = tuple([_rewritten(child, change, done) for child in before])
            for x, y in zip(before, after):
                if x is not y:
                    new = node.rebuild(after)
                    break
        replaced = change(new)
        done[id(node)] = new = new if replaced is None else replaced
    return new


def substitute(expr: Expr, values: dict[Var, Expr]) -> Expr:
    """`expr` with variables replaced (all at once)."""
    return rewrite(expr, lambda node: values.get(node) if isinstance(node, Var) else None) if values else expr
