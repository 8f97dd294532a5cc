"""The loop IR: statements over tensors, what a schedule produces and what renderers consume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from celosia.compiler.expr.nodes import Expr, Tensor, Var, text
from celosia.compiler.expr.walk import loaded, rewrite

# How the iterations of a loop run. Renderers raise on a kind they do not know, so kinds can be added (vthread, ...).
# Iterations of an ordered loop read what earlier ones wrote.
KINDS = ("serial", "ordered", "unrolled", "vectorized", "parallel", "vthread", "pipelined")

# Where tensors are kept: memory of the caller, registers or stack, and the scratchpads of the accelerator.
SCRATCHPADS = ("inp", "wgt", "acc", "vin", "out", "par", "lut", "tap", "exp", "row")
SCOPES = ("workspace", "local", *SCRATCHPADS)


class Stmt:
    def __str__(self) -> str:
        return text(self)


@dataclass(frozen=True, eq=False)
class For(Stmt):
    """body for var in range(extent); extent is at least 1."""

    var: Var
    extent: int
    body: Stmt
    kind: str = "serial"


@dataclass(frozen=True, eq=False)
class Store(Stmt):
    """tensor[index] = value; a single index is the row-major element number, as in Load."""

    tensor: Tensor
    index: tuple[Expr, ...]
    value: Expr


@dataclass(frozen=True, eq=False)
class Update(Stmt):
    """tensor[index] = kind(tensor[index], value): one step of a reduction. Order: see nodes.Reduce."""

    kind: str
    tensor: Tensor
    index: tuple[Expr, ...]
    value: Expr


@dataclass(frozen=True, eq=False)
class Let(Stmt):
    var: Var
    value: Expr
    body: Stmt


@dataclass(frozen=True, eq=False)
class If(Stmt):
    cond: Expr
    body: Stmt
    orelse: Stmt | None = None


@dataclass(frozen=True, eq=False)
class Alloc(Stmt):
    """Room for `tensor` within `body`, in one of SCOPES. kept: what lies there may be found again, see Stage.keep."""

    tensor: Tensor
    body: Stmt
    scope: str = "workspace"
    kept: bool = False


@dataclass(frozen=True, eq=False)
class Block(Stmt):
    body: tuple[Stmt, ...]


@dataclass(frozen=True, eq=False)
class Intrinsic(Stmt):
    """An instruction of some target, by name: what tensorize puts in place of the loops it matched.

    A Load among `args` stands for the tile that begins at its element. `declared` says what it means.
    """

    name: str
    args: tuple[Expr | Tensor | int, ...]
    declared: Declared | None = None


class Declared(Protocol):
    """Declaration of an intrinsic: see tensorize.intrinsics, which declares those of the accelerator."""

    @property
    def name(self) -> str:
        """As text names it."""

    @property
    def reduces(self) -> bool:
        """Whether it does one step of a reduction, whose loops lie around it."""
        ...

    @property
    def size(self) -> int:
        """How many elements it writes."""
        ...

    def match(self, nest: For, first: Expr, scope: Callable[[Tensor], str]) -> Intrinsic:
        """The intrinsic in the place of `nest`, whose reduction begins where `first` holds. ValueError with the reason
        where `nest` means another thing; scope gives the memory of a tensor, "dram" for that of the caller.
        """
        ...

    def meaning(self, args: tuple[Expr | Tensor | int, ...]) -> Stmt:
        """The loops that the intrinsic stands for."""
        ...

    def broken(self, args: tuple[Expr | Tensor | int, ...], scope: Callable[[Tensor], str]) -> str | None:
        """What is wrong with these arguments, or None."""
        ...


def expand(stmt: Stmt) -> Stmt:
    """`stmt` with the loops that its intrinsics stand for, none overlapped. TypeError where one is not declared."""
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
    """A kernel: reads `inputs`, writes every element of `outputs`.

    in_place: (output, input) numbers of tensors in the same memory; see cpu.schedule.inplace. scalars: numbers that
    it is given.
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
        """Replace intrinsics by their loops: what the interpreter and a CPU run."""
        return replace(self, body=expand(self.body))


def children(stmt: Stmt) -> tuple[Stmt, ...]:
    """The statements directly inside `stmt`."""
    match stmt:
        case For(body=body) | Let(body=body) | Alloc(body=body):
            return (body,)
        case If(body=body, orelse=orelse):
            return (body,) if orelse is None else (body, orelse)
        case Block(body=body):
            return body
    return ()


def exprs(stmt: Stmt) -> tuple[Expr, ...]:
    """The expressions of this statement itself, not of those inside it."""
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


Target = Callable[[Tensor, tuple[Expr, ...]], tuple[Tensor, tuple[Expr, ...]]]


def map_accesses(
    stmt: Stmt, change: Callable[[Expr], Expr | None], target: Target = lambda t, i: (t, i), of: Tensor | None = None
) -> Stmt:
    """A copy of `stmt` with every expression rewritten by `change` (see walk.rewrite), what is written by `target`.

    of: a tensor; expressions that do not read it stay as they are.
    """

    def ex(e: Expr) -> Expr:
        return rewrite(e, change) if of is None or of in loaded(e) else e

    return _mapped(stmt, ex, target)


def _mapped(s: Stmt, ex: Callable[[Expr], Expr], target: Target) -> Stmt:
    match s:
        case For(var, extent, body, kind):
            return For(var, extent, _mapped(body, ex, target), kind)
        case Store(tensor, index, value):
            return Store(*target(tensor, tuple(map(ex, index))), ex(value))
        case Update(kind, tensor, index, value):
            return Update(kind, *target(tensor, tuple(map(ex, index))), ex(value))
        case Let(var, value, body):
            return Let(var, ex(value), _mapped(body, ex, target))
        case If(cond, body, orelse):
            other = None if orelse is None else _mapped(orelse, ex, target)
            return If(ex(cond), _mapped(body, ex, target), other)
        case Alloc(body=body):
            return replace(s, body=_mapped(body, ex, target))
        case Block(body):
            return Block(tuple(_mapped(inner, ex, target) for inner in body))
        case Intrinsic(name, args, declared):
            return Intrinsic(name, tuple(ex(a) if isinstance(a, Expr) else a for a in args), declared)
    raise TypeError(f"unknown statement {type(s).__name__}")


def block(*stmts: Stmt) -> Stmt:
    """The statements one after the other, without needless nesting."""
    flat = [s for stmt in stmts for s in sequence(stmt)]
    return flat[0] if len(flat) == 1 else Block(tuple(flat))


def sequence(stmt: Stmt) -> tuple[Stmt, ...]:
    """The statements that `stmt` does one after the other."""
    return stmt.body if isinstance(stmt, Block) else (stmt,)
