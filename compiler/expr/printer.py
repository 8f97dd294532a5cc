"""Expressions and loops as text, which `parser.parse` reads back."""

from __future__ import annotations

import re
from collections.abc import Iterator

from celosia.compiler.expr.bounds import statements
from celosia.compiler.expr.functions import RESULTS
from celosia.compiler.expr.loops import (
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
from celosia.compiler.expr.nodes import (
    INDEX,
    Binary,
    Call,
    Cast,
    Const,
    Expr,
    Load,
    Reduce,
    Scan,
    Select,
    Tensor,
    Var,
    text,
)
from celosia.compiler.expr.walk import walk

SYMBOLS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "and": "&", "or": "|", "xor": "^",
    "shl": "<<", "shr": ">>", "pow": "**", "lt": "<", "le": "<=", "eq": "==", "ne": "!=",
}  # fmt: skip
LITERALS = ("True", "False", "inf", "nan")
DTYPE = re.compile(r"u?int\d+|b?float\w+|bool")
TABLE_LIMIT = 64  # elements of a constant that are written out
ELIDED = " = ..."  # in the place of more of them

Names = dict[Var | Tensor, str]


def call_type(name: str, args: tuple[Expr, ...]) -> str:
    """The type of a function's result where nothing else is said."""
    return RESULTS.get(name, args[0].dtype if args else INDEX)


@text.register(Expr)
def show(e: Expr, names: Names | None = None) -> str:
    """One expression, fully parenthesised."""
    named = names or {}

    def go(e: Expr) -> str:
        match e:
            case Const(value, dtype):
                return str(value) if dtype in (INDEX, "float32", "bool") else f"{dtype}({value})"
            case Var(name=name):
                return named.get(e, name)
            case Load(tensor, index):
                return f"{named.get(tensor, tensor.name)}[{', '.join(map(go, index))}]"
            case Binary(op, a, b):
                return f"({go(a)} {SYMBOLS[op]} {go(b)})" if op in SYMBOLS else f"{op}({go(a)}, {go(b)})"
            case Call(name, args, dtype):
                suffix = "" if dtype == call_type(name, args) else f".{dtype}"
                return f"{name}{suffix}({', '.join(map(go, args))})"
            case Cast(Const(value, source), dtype):
                return f"{dtype}({source}({value}))"
            case Cast(value, dtype):
                return f"{dtype}({go(value)})"
            case Select(cond, a, b):
                return f"select({go(cond)}, {go(a)}, {go(b)})"
            case Reduce(kind, value, axes):
                text = go(value)
                which = ", ".join(named.get(axis, axis.name) for axis in axes)
                return f"{kind}[{which}]{text if text.startswith('(') else f'({text})'}"
            case Scan(axis, states, _, updates):
                steps = ", ".join(f"{s.name} <- {show(u.body or Const(0, INDEX))}" for s, u in zip(states, updates))
                return f"scan[{axis.name}]({steps})"
        raise TypeError(f"unknown expression {type(e).__name__}")

    return go(e)


class _Writer:
    """Lines of statements. Names are made unique within their scope, by a number where two are alike."""

    def __init__(self) -> None:
        self.names: Names = {}

    def name(self, what: Var | Tensor, used: frozenset[str]) -> frozenset[str]:
        """Give `what` a name that is not `used`. Returns what is used then."""
        base = re.sub(r"[^\w.]", "_", what.name) or "_"
        if base[0].isdigit() or base.split(".")[0] in LITERALS:
            base = f"_{base}"
        name, number = base, 0
        while name in used:
            number += 1
            name = f"{base}_{number}"
        self.names[what] = name
        return used | {name}

    def show(self, e: Expr) -> str:
        return show(e, self.names)

    def tensor(self, t: Tensor) -> str:
        return f"{self.names.get(t, t.name)}: {t.dtype}[{', '.join(map(str, t.shape))}]"

    def target(self, tensor: Tensor, index: tuple[Expr, ...]) -> str:
        return f"{self.names.get(tensor, tensor.name)}[{', '.join(map(self.show, index))}]"

    def argument(self, a: Expr | Tensor | int) -> str:
        return self.show(a) if isinstance(a, Expr) else self.names.get(a, a.name) if isinstance(a, Tensor) else str(a)

    def lines(self, s: Stmt, indent: str, used: frozenset[str]) -> Iterator[str]:
        deeper = indent + "  "
        match s:
            case For(var, extent, body, kind):
                used = self.name(var, used)
                yield f"{indent}{'for' if kind == 'serial' else kind} {self.names[var]} in {extent}:"
                yield from self.inside(body, deeper, used)
            case Store(tensor, index, value):
                yield f"{indent}{self.target(tensor, index)} = {self.show(value)}"
            case Update(kind, tensor, index, value):
                yield f"{indent}{self.target(tensor, index)} {kind}= {self.show(value)}"
            case Let(var, value, body):
                text = self.show(value)
                used = self.name(var, used)
                yield f"{indent}{self.names[var]} = {text}"
                yield from self.inside(body, indent, used)
            case If(cond, body, orelse):
                yield f"{indent}if {self.show(cond)}:"
                yield from self.inside(body, deeper, used)
                if orelse is not None:
                    yield f"{indent}else:"
                    yield from self.inside(orelse, deeper, used)
            case Alloc(tensor, body, scope, kept):
                used = self.name(tensor, used)
                yield f"{indent}{'kept ' if kept else ''}{scope} {self.tensor(tensor)}"
                yield from self.inside(body, indent, used)
            case Block(body):
                for stmt in body:
                    yield from self.lines(stmt, indent, used)
                    used |= {self.names[what] for what in _open(stmt)}
            case Intrinsic(name, args):
                yield f"{indent}{name}({', '.join(map(self.argument, args))})"
            case _:
                raise TypeError(f"unknown statement {type(s).__name__}")

    def inside(self, s: Stmt, indent: str, used: frozenset[str]) -> Iterator[str]:
        empty = True
        for line in self.lines(s, indent, used):
            yield line
            empty = False
        if empty:
            yield f"{indent}pass"

    def function(self, f: Function) -> Iterator[str]:
        used: frozenset[str] = frozenset()
        for tensor in (*f.inputs, *f.outputs):
            used = self.name(tensor, used)
        name = re.sub(r"[^\w.]", "_", f.name) or "_"
        for var in f.scalars:
            used = self.name(var, used)
        given = [*map(self.tensor, f.inputs), *(f"{self.names[var]}: {var.dtype}" for var in f.scalars)]
        yield f"{name}({', '.join(given)}) -> ({', '.join(map(self.tensor, f.outputs))}):"
        found = (n for s in statements(f.body) for e in exprs(s) for n in walk(e))
        for t in dict.fromkeys(n.tensor for n in found if isinstance(n, Load) and n.tensor.value is not None):
            used = self.name(t, used)
            assert t.value is not None
            values = " = " + " ".join(str(v) for v in t.value.reshape(-1).tolist())
            yield f"  constant {self.tensor(t)}{values if t.size <= TABLE_LIMIT else ELIDED}"
        yield from self.inside(f.body, "  ", used)


def _open(s: Stmt) -> Iterator[Var | Tensor]:
    """What `s` defines that its text leaves defined for the lines after it, as it has no indentation of its own."""
    match s:
        case Alloc(tensor, body):
            yield tensor
            yield from _open(body)
        case Let(var, _, body):
            yield var
            yield from _open(body)
        case Block(body):
            for stmt in body:
                yield from _open(stmt)


@text.register(Stmt)
def show_stmt(s: Stmt) -> str:
    """A statement, a line for each part."""
    return "\n".join(_Writer().lines(s, "", frozenset()))


@text.register(Function)
def show_function(f: Function) -> str:
    """A function with its parameters."""
    return "\n".join(_Writer().function(f))
