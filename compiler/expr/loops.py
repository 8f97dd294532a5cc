"""The loop IR: statements over tensors. Schedules produce it, renderers (LLVM, accelerator) consume it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from celosia.compiler.expr.nodes import Expr, Tensor, Var, loaded, rewrite, text

KINDS = ("serial", "ordered", "unrolled", "vectorized", "parallel", "vthread", "pipelined")
"""How the iterations of a loop run. Iterations of an ordered loop read what earlier ones wrote. A renderer raises an
error for a kind that it does not know."""

SCRATCHPADS = ("inp", "wgt", "acc", "vin", "out", "par", "lut", "tap", "exp", "row")
"""Scratchpads of the accelerator, as memories of tensors."""
SCOPES = ("workspace", "local", *SCRATCHPADS)
"""Memories of tensors: the caller's workspace, registers or the stack, and scratchpads."""
MAX_LOCAL_BYTES = 4096
"""Limit of a temporary of one iteration that lies on the stack ("local"); larger ones lie in the workspace."""


class Stmt:
    """A statement of the loop IR. Statements are frozen and compared by identity."""

    def __str__(self) -> str:
        return text(self)


@dataclass(frozen=True, eq=False)
class For(Stmt):
    """Loop: body for var in range(extent); extent is at least 1. kind: one of KINDS."""

    var: Var
    extent: int
    body: Stmt
    kind: str = "serial"


@dataclass(frozen=True, eq=False)
class Store(Stmt):
    """Assignment tensor[index] = value; a single index is the row-major element number, as in Load."""

    tensor: Tensor
    index: tuple[Expr, ...]
    value: Expr


@dataclass(frozen=True, eq=False)
class Update(Stmt):
    """One step of a reduction: tensor[index] = kind(tensor[index], value).

    kind: one of Reduce.COMBINE; nodes.Reduce says in which order steps may run.
    """

    kind: str
    tensor: Tensor
    index: tuple[Expr, ...]
    value: Expr


@dataclass(frozen=True, eq=False)
class Let(Stmt):
    """Definition of a scalar variable that is visible in `body`."""

    var: Var
    value: Expr
    body: Stmt


@dataclass(frozen=True, eq=False)
class If(Stmt):
    """Conditional statement; `orelse` runs where `cond` is false."""

    cond: Expr
    body: Stmt
    orelse: Stmt | None = None


@dataclass(frozen=True, eq=False)
class Alloc(Stmt):
    """Allocation of `tensor` in one of SCOPES for the time of `body`.

    kept: its contents may outlive the iteration, so that a later one can skip the same load (see Stage.keep).
    """

    tensor: Tensor
    body: Stmt
    scope: str = "workspace"
    kept: bool = False


@dataclass(frozen=True, eq=False)
class Block(Stmt):
    """Statements that run one after the other."""

    body: tuple[Stmt, ...]


@dataclass(frozen=True, eq=False)
class Intrinsic(Stmt):
    """An instruction of some target, by name, which tensorize puts in place of the loops that it matched.

    A Load among `args` stands for the tile that begins at its element. `declared` defines its meaning.
    """

    name: str
    args: tuple[Expr | Tensor | int, ...]
    declared: Declared | None = None


class Declared(Protocol):
    """Interface of an intrinsic's declaration; tensorize.intrinsics has those of the accelerator."""

    @property
    def name(self) -> str:
        """Name of the instruction in printed loops."""

    @property
    def reduces(self) -> bool:
        """Whether the instruction does one step of a reduction, whose loops lie around it."""
        ...

    @property
    def size(self) -> int:
        """Number of elements that the instruction writes."""
        ...

    def match(self, nest: For, first: Expr, scope: Callable[[Tensor], str]) -> Intrinsic:
        """Return the intrinsic that replaces `nest`; ValueError with the reason where `nest` computes something else.

        first: the condition under which the reduction begins. scope: gives the memory of a tensor, "dram" for that of
        the caller.
        """
        ...

    def meaning(self, args: tuple[Expr | Tensor | int, ...]) -> Stmt:
        """Return the loops that the intrinsic stands for."""
        ...

    def argument_error(self, args: tuple[Expr | Tensor | int, ...], scope: Callable[[Tensor], str]) -> str | None:
        """Return why these arguments are illegal, or None."""
        ...


def expand(stmt: Stmt) -> Stmt:
    """Replace intrinsics by the loops that they stand for, and pipelined loops by serial ones.

    Raises TypeError where an intrinsic is not declared.
    """
    match stmt:
        case For(var, extent, body, kind):
            return For(var, extent, expand(body), "serial" if kind == "pipelined" else kind)
        case Let(var, value, body):
            return Let(var, value, expand(body))
        case If(cond, body, orelse):
            return If(cond, expand(body), None if orelse is None else expand(orelse))
        case Alloc(body=body):
            return replace(stmt, body=expand(body))
        case Block(body):
            return Block(tuple(expand(inner) for inner in body))
        case Intrinsic(name, args, declared):
            if declared is None:
                raise TypeError(f"the intrinsic {name} is not declared")
            return declared.meaning(args)
    return stmt


@dataclass(frozen=True, eq=False)
class Function:
    """A kernel: a loop nest that reads `inputs` and writes every element of `outputs`.

    in_place: pairs (position of an output, position of an input) that share memory; cpu.schedule.output_reuse finds
    them. scalars: parameters that are numbers.
    """

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    body: Stmt
    in_place: tuple[tuple[int, int], ...] = ()
    scalars: tuple[Var, ...] = ()

    def __str__(self) -> str:
        return text(self)

    def expanded(self) -> Function:
        """Replace intrinsics by their loops, for the interpreter and for a CPU."""
        return replace(self, body=expand(self.body))


def children(stmt: Stmt) -> tuple[Stmt, ...]:
    """Return the statements directly inside `stmt`."""
    match stmt:
        case For(body=body) | Let(body=body) | Alloc(body=body):
            return (body,)
        case If(body=body, orelse=orelse):
            return (body,) if orelse is None else (body, orelse)
        case Block(body=body):
            return body
    return ()


def statements(stmt: Stmt) -> Iterator[Stmt]:
    """Yield `stmt` and every statement inside it, in program order."""
    stack = [stmt]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(reversed(children(current)))


def exprs(stmt: Stmt) -> tuple[Expr, ...]:
    """Return the expressions of this statement itself, without those of statements inside it."""
    match stmt:
        case Store(_, index, value) | Update(_, _, index, value):
            return *index, value
        case Let(value=value):
            return (value,)
        case If(cond=cond):
            return (cond,)
        case Intrinsic(args=args):
            return tuple(a for a in args if isinstance(a, Expr))
    return ()


def tensors_written(stmt: Stmt) -> set[Tensor]:
    """Return the tensors that a statement, or one inside it, writes."""
    return {s.tensor for s in statements(stmt) if isinstance(s, Store | Update)}


def tensors_read(stmt: Stmt) -> set[Tensor]:
    """Return the tensors that a statement, or one inside it, reads."""
    return {tensor for s in statements(stmt) for e in exprs(s) for tensor in loaded(e)}


Target = Callable[[Tensor, tuple[Expr, ...]], tuple[Tensor, tuple[Expr, ...]]]
"""Function of a written (tensor, index) that returns the (tensor, index) to write instead."""


def map_accesses(
    stmt: Stmt, change: Callable[[Expr], Expr | None], target: Target = lambda t, i: (t, i), only: Tensor | None = None
) -> Stmt:
    """Copy `stmt` with every expression rewritten by `change` and every written element redirected by `target`.

    change: as in nodes.rewrite. only: a tensor; expressions that do not read it stay as they are, which saves time.
    """
    return _map_statement(stmt, partial(rewrite, change=change, only=only), target)


def _map_statement(s: Stmt, rewrite_expr: Callable[[Expr], Expr], target: Target) -> Stmt:
    """Copy a statement with `rewrite_expr` applied to its expressions and `target` to the elements that it writes."""
    match s:
        case For(var, extent, body, kind):
            return For(var, extent, _map_statement(body, rewrite_expr, target), kind)
        case Store(tensor, index, value):
            return Store(*target(tensor, tuple(map(rewrite_expr, index))), rewrite_expr(value))
        case Update(kind, tensor, index, value):
            return Update(kind, *target(tensor, tuple(map(rewrite_expr, index))), rewrite_expr(value))
        case Let(var, value, body):
            return Let(var, rewrite_expr(value), _map_statement(body, rewrite_expr, target))
        case If(cond, body, orelse):
            other = None if orelse is None else _map_statement(orelse, rewrite_expr, target)
            return If(rewrite_expr(cond), _map_statement(body, rewrite_expr, target), other)
        case Alloc(body=body):
            return replace(s, body=_map_statement(body, rewrite_expr, target))
        case Block(body):
            return Block(tuple(_map_statement(inner, rewrite_expr, target) for inner in body))
        case Intrinsic(name, args, declared):
            return Intrinsic(name, tuple(rewrite_expr(a) if isinstance(a, Expr) else a for a in args), declared)
    raise TypeError(f"unknown statement {type(s).__name__}")


def block(*stmts: Stmt) -> Stmt:
    """Return the statements in sequence, without nested or single-element Blocks."""
    flat = [s for stmt in stmts for s in sequence(stmt)]
    return flat[0] if len(flat) == 1 else Block(tuple(flat))


def sequence(stmt: Stmt) -> tuple[Stmt, ...]:
    """Return the statements that `stmt` runs one after the other."""
    return stmt.body if isinstance(stmt, Block) else (stmt,)
