"""Traversal and rewriting of expressions, which share sub-expressions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from celosia.compiler.expr.nodes import Expr, Load, Tensor, Var


def walk(expr: Expr) -> Iterator[Expr]:
    """Yield every node of `expr`, a shared one once."""
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
    """Return the tensors that `expr` reads. Nodes never change, so each caches its own set."""
    if not (children := expr.children()):
        return frozenset((expr.tensor,)) if isinstance(expr, Load) else frozenset()
    tensors: frozenset[Tensor] | None = expr.__dict__.get("_loaded")
    if tensors is None:
        tensors = frozenset().union(*map(loaded, children))
        if isinstance(expr, Load):
            tensors |= {expr.tensor}
        expr.__dict__["_loaded"] = tensors
    return tensors


def rewrite(expr: Expr, change: Callable[[Expr], Expr | None]) -> Expr:
    """Rebuild `expr` bottom-up: `change` gets each node over rewritten operands, and returns its replacement or None.

    Nodes in which nothing changes are kept, and shared sub-expressions stay shared.
    """
    if not expr.children():
        return expr if (new := change(expr)) is None else new
    return _rewrite_shared(expr, change, {})


def _rewrite_shared(node: Expr, change: Callable[[Expr], Expr | None], done: dict[int, Expr]) -> Expr:
    """Rewrite a node and its operands. done: results for nodes that were visited before, by their ids."""
    if (result := done.get(id(node))) is None:
        result = node
        if before := node.children():
            after = tuple([_rewrite_shared(child, change, done) for child in before])
            for x, y in zip(before, after):
                if x is not y:
                    result = node.rebuild(after)
                    break
        replacement = change(result)
        done[id(node)] = result = result if replacement is None else replacement
    return result


def substitute(expr: Expr, values: dict[Var, Expr]) -> Expr:
    """Replace variables of `expr` by expressions, all at once."""
    return rewrite(expr, lambda node: values.get(node) if isinstance(node, Var) else None) if values else expr
