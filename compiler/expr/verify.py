"""Verifier of loop nests: for each kind of node a table of rules, each a sentence with the test that finds it broken.

A broken function is a mistake of the compiler, so tests verify after each transformation; files from outside are
verified too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from celosia.compiler.expr.affine import flatten, interval, linear
from celosia.compiler.expr.loops import (
    KINDS,
    SCOPES,
    Alloc,
    Block,
    For,
    Function,
    If,
    Intrinsic,
    Let,
    Stmt,
    Store,
    Update,
    exprs,
)
from celosia.compiler.expr.math_functions import ARITY, OF_BYTES, OF_INT64, OF_PAIRS, RESULTS
from celosia.compiler.expr.nodes import (
    ARITHMETIC,
    COMPARISONS,
    INDEX,
    Axis,
    Binary,
    Call,
    Cast,
    Const,
    Expr,
    Load,
    Reduce,
    Select,
    Tensor,
    Var,
)
from celosia.compiler.program.dtypes import itemsize


class IRError(ValueError):
    """A function that breaks `rule`; the message says at which node."""

    def __init__(self, rule: str, node: object) -> None:
        super().__init__(f"{rule}: {str(node).splitlines()[0]}")
        self.rule = rule


@dataclass
class Context:
    """Facts that hold at a statement, on which rules depend.

    variables: those that are visible. scopes: memory of each visible tensor. constant: tensors that must not be
    written. guarded: whether a condition decides if the statement runs. lanes: the variable of the vectorised loop
    around, None outside of one. seen: tensors that were allocated anywhere before.
    """

    variables: frozenset[Var]
    scopes: dict[Tensor, str]
    constant: frozenset[Tensor]
    guarded: bool = False
    lanes: Var | None = None
    seen: set[Any] = field(default_factory=set)

    def scope(self, tensor: Tensor) -> str:
        """Return the memory of `tensor`, "dram" where it lies in the workspace."""
        scope = self.scopes.get(tensor, "dram")
        return "dram" if scope == "workspace" else scope


Rules = dict[str, Callable[[Any, Context], Any]]
"""Rule as a sentence -> test whether a node breaks it, in a Context."""


def _has_rank(tensor: Tensor, index: tuple[Expr, ...]) -> bool:
    """Return whether an index has one part for each dimension, or is an element number."""
    return len(index) == len(tensor.shape) or len(index) == 1


def _leaves_tensor(tensor: Tensor, index: tuple[Expr, ...], c: Context) -> bool:
    """Return whether an unguarded access provably leaves its tensor."""
    if c.guarded or not _has_rank(tensor, index):
        return False
    pairs = (
        zip(index, tensor.shape) if len(index) == len(tensor.shape) else [(flatten(tensor.shape, index), tensor.size)]
    )
    for i, size in pairs:
        if all(atom is None or isinstance(atom, Axis) for atom in linear(i)):
            bounds = interval(i)
            if bounds is not None and (bounds[0] < 0 or bounds[1] >= size):
                return True
    return False


_ACCESS_RULES: Rules = {
    "a tensor is an input, an output, a constant, or allocated around": lambda n, c: (
        n.tensor not in c.scopes and n.tensor.value is None
    ),
    "there is one index for each dimension, or one element number": lambda n, c: not _has_rank(n.tensor, n.index),
    "an index is an int64": lambda n, c: any(i.dtype != INDEX for i in n.index),
    "an index stays inside its tensor": lambda n, c: _leaves_tensor(n.tensor, n.index, c),
}
_WRITE_RULES: Rules = {
    **_ACCESS_RULES,
    "inputs and constants are not written": lambda s, c: s.tensor in c.constant or s.tensor.value is not None,
    "what is written has the type of the tensor": lambda s, c: s.value.dtype != s.tensor.dtype,
}
EXPR_RULES: dict[type[Expr], Rules] = {
    Const: {},
    Var: {"a variable is bound by a loop or a definition around": lambda e, c: e not in c.variables},
    Load: _ACCESS_RULES,
    Binary: {
        "the operation exists": lambda e, c: e.op not in ARITHMETIC and e.op not in COMPARISONS,
        "both sides of an operation have one type": lambda e, c: e.a.dtype != e.b.dtype,
    },
    Call: {
        "the function exists": lambda e, c: e.name not in ARITY,
        "a function has its arguments": lambda e, c: len(e.args) != ARITY[e.name],
        "arguments of a function have one type": lambda e, c: len({arg.dtype for arg in e.args}) != 1,
        "dot4 and popcount4 take four bytes": lambda e, c: e.name in OF_BYTES and e.args[0].dtype != "uint32",
        "pairs take two bytes": lambda e, c: e.name in OF_PAIRS and e.args[0].dtype != "uint16",
        "leading_zeros and inverse_root take an int64": lambda e, c: e.name in OF_INT64 and e.args[0].dtype != "int64",
        "a function's result has its type": lambda e, c: not _has_type(e),
    },
    Cast: {},
    Select: {
        "a condition is a bool": lambda e, c: e.cond.dtype != "bool",
        "both arms of a selection have one type": lambda e, c: e.a.dtype != e.b.dtype,
    },
    Reduce: {"reductions have become loops": lambda e, c: True},
}
STMT_RULES: dict[type[Stmt], Rules] = {
    For: {
        "a loop runs at least once": lambda s, c: s.extent < 1,
        "a loop's variable has its extent": lambda s, c: isinstance(s.var, Axis) and s.var.extent != s.extent,
        "the kind of a loop exists": lambda s, c: s.kind not in KINDS,
        "a variable is bound once": lambda s, c: s.var in c.variables,
        "a vectorized loop contains no other": lambda s, c: s.kind == "vectorized" and c.lanes is not None,
    },
    Store: _WRITE_RULES,
    Update: {**_WRITE_RULES, "the reduction exists": lambda s, c: s.kind not in Reduce.COMBINE},
    Let: {
        "a variable is bound once": lambda s, c: s.var in c.variables,
        "a variable has the type of its value": lambda s, c: s.var.dtype != s.value.dtype,
    },
    If: {"a condition is a bool": lambda s, c: s.cond.dtype != "bool"},
    Alloc: {
        "the memory exists": lambda s, c: s.scope not in SCOPES,
        "a tensor is allocated once": lambda s, c: s.tensor in c.seen,
    },
    Block: {},
    Intrinsic: {"an intrinsic has the arguments that it declares": lambda s, c: _intrinsic_error(s, c)},
}


def _has_type(e: Call) -> bool:
    """Return whether the declared type of a call is the one that its function returns."""
    if e.name == "bitcast":
        return itemsize(e.dtype) == itemsize(e.args[0].dtype)
    return e.dtype == RESULTS.get(e.name, e.args[0].dtype)


def _intrinsic_error(s: Intrinsic, c: Context) -> str | None:
    """Return why the declaration of an intrinsic does not allow its arguments, or None."""
    return None if s.declared is None else s.declared.argument_error(s.args, c.scope)


def verify(function: Function) -> Function:
    """Return `function` unchanged; IRError for the first rule that it breaks."""
    scopes = {t: "workspace" for t in (*function.inputs, *function.outputs)}
    _verify_statement(function.body, Context(frozenset(function.scalars), scopes, frozenset(function.inputs)))
    return function


def _check(node: Any, rules: Rules, c: Context) -> None:
    """Raise IRError for the first of `rules` that `node` breaks."""
    for rule, broken in rules.items():
        if error := broken(node, c):
            raise IRError(rule, f"{node} ({error})" if isinstance(error, str) else node)


def _verify_statement(s: Stmt, c: Context) -> None:
    """Verify a statement, its expressions and the statements inside it."""
    if type(s) not in STMT_RULES:
        raise IRError("the kind of statement exists", type(s).__name__)
    _check(s, STMT_RULES[type(s)], c)
    done: set[tuple[int, bool]] = set()
    expression_context = replace(c, guarded=True) if isinstance(s, Intrinsic) else c  # it may check its own bounds
    for e in exprs(s):
        if isinstance(s, Intrinsic) and isinstance(e, Reduce):  # a window, whose loops are the intrinsic's
            window_context = replace(expression_context, variables=c.variables | set(e.axes))
            _verify_expression(e.value, window_context, done)
        else:
            _verify_expression(e, expression_context, done)
    for part, context in _parts_with_context(s, c):
        _verify_statement(part, context)


def _parts_with_context(s: Stmt, c: Context) -> Iterator[tuple[Stmt, Context]]:
    """Yield the statements inside `s`, each with the facts that hold there."""
    match s:
        case For(var, _, body, kind):
            lanes = var if kind == "vectorized" else c.lanes
            yield body, replace(c, variables=c.variables | {var}, lanes=lanes)
        case Let(var, _, body):
            yield body, replace(c, variables=c.variables | {var})
        case If(_, body, orelse):
            for part in (body,) if orelse is None else (body, orelse):
                yield part, replace(c, guarded=True)
        case Alloc(tensor, body, scope):
            c.seen.add(tensor)
            yield body, replace(c, scopes={**c.scopes, tensor: scope})
        case Block(body):
            for part in body:
                yield part, c


def _verify_expression(e: Expr, c: Context, done: set[tuple[int, bool]]) -> None:
    """Verify an expression and its operands.

    done: (id, guarded) of nodes that were checked; the arms of a selection are guarded by its condition.
    """
    if (id(e), c.guarded) in done:
        return
    done.add((id(e), c.guarded))
    kind = Var if isinstance(e, Var) else type(e)
    if kind not in EXPR_RULES:
        raise IRError("the kind of expression exists", kind.__name__)
    _check(e, EXPR_RULES[kind], c)
    for child in e.children():
        is_arm = isinstance(e, Select) and child is not e.cond
        _verify_expression(child, replace(c, guarded=True) if is_arm else c, done)


__all__ = ["EXPR_RULES", "STMT_RULES", "IRError", "verify"]
