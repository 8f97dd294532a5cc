"""Print expressions and loops as text, which `parser.parse` reads back. A Program stores its CPU kernels so."""

from __future__ import annotations

import re
from collections.abc import Iterator

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
from celosia.compiler.expr.math_functions import RESULTS
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
from celosia.compiler.expr.regions import statements
from celosia.compiler.expr.walk import walk

SYMBOLS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "and": "&", "or": "|", "xor": "^",
    "shl": "<<", "shr": ">>", "pow": "**", "lt": "<", "le": "<=", "eq": "==", "ne": "!=",
}  # fmt: skip
"""Operation of Binary -> its symbol in text; other operations are printed as calls."""
LITERALS = ("True", "False", "inf", "nan")
"""Words of text that cannot be names."""
DTYPE = re.compile(r"u?int\d+|b?float\w+|bool")
"""Pattern of element types."""
TABLE_LIMIT = 64
"""Number of elements up to which the values of a constant are printed."""
ELIDED_VALUES = " = ..."
"""Text in the place of the values of a larger constant."""

Names = dict[Var | Tensor, str]
"""Printed name of each variable and tensor."""


def call_type(name: str, args: tuple[Expr, ...]) -> str:
    """Return the result type that a call has unless the text states another."""
    return RESULTS.get(name, args[0].dtype if args else INDEX)


@text.register(Expr)
def show(e: Expr, names: Names | None = None) -> str:
    """Print one expression, fully parenthesised. names: printed names of variables and tensors, where not their own."""
    named = names or {}

    def render(e: Expr) -> str:
        """Render one node; recurses into its operands."""
        match e:
            case Const(value, dtype):
                return str(value) if dtype in (INDEX, "float32", "bool") else f"{dtype}({value})"
            case Var(name=name):
                return named.get(e, name)
            case Load(tensor, index):
                return f"{named.get(tensor, tensor.name)}[{', '.join(map(render, index))}]"
            case Binary(op, a, b):
                return (
                    f"({render(a)} {SYMBOLS[op]} {render(b)})" if op in SYMBOLS else f"{op}({render(a)}, {render(b)})"
                )
            case Call(name, args, dtype):
                suffix = "" if dtype == call_type(name, args) else f".{dtype}"
                return f"{name}{suffix}({', '.join(map(render, args))})"
            case Cast(Const(value, source), dtype):
                return f"{dtype}({source}({value}))"
            case Cast(value, dtype):
                return f"{dtype}({render(value)})"
            case Select(cond, a, b):
                return f"select({render(cond)}, {render(a)}, {render(b)})"
            case Reduce(kind, value, axes):
                text = render(value)
                which = ", ".join(named.get(axis, axis.name) for axis in axes)
                return f"{kind}[{which}]{text if text.startswith('(') else f'({text})'}"
            case Scan(axis, states, _, updates):
                steps = ", ".join(f"{s.name} <- {show(u.body or Const(0, INDEX))}" for s, u in zip(states, updates))
                return f"scan[{axis.name}]({steps})"
        raise TypeError(f"unknown expression {type(e).__name__}")

    return render(e)


class _Writer:
    """Prints statements as lines. A number is appended to a name that is visible already."""

    def __init__(self) -> None:
        self.names: Names = {}

    def assign_name(self, definition: Var | Tensor, used: frozenset[str]) -> frozenset[str]:
        """Give `definition` a name that is not in `used`, and return `used` with it."""
        base = re.sub(r"[^\w.]", "_", definition.name) or "_"
        if base[0].isdigit() or base.split(".")[0] in LITERALS:
            base = f"_{base}"
        name, suffix = base, 0
        while name in used:
            suffix += 1
            name = f"{base}_{suffix}"
        self.names[definition] = name
        return used | {name}

    def show(self, e: Expr) -> str:
        return show(e, self.names)

    def tensor(self, t: Tensor) -> str:
        """Print the declaration of a tensor: name, element type and shape."""
        return f"{self.names.get(t, t.name)}: {t.dtype}[{', '.join(map(str, t.shape))}]"

    def element(self, tensor: Tensor, index: tuple[Expr, ...]) -> str:
        """Print the element that a statement writes."""
        return f"{self.names.get(tensor, tensor.name)}[{', '.join(map(self.show, index))}]"

    def argument(self, a: Expr | Tensor | int) -> str:
        """Print an argument of an intrinsic."""
        return self.show(a) if isinstance(a, Expr) else self.names.get(a, a.name) if isinstance(a, Tensor) else str(a)

    def statement_lines(self, s: Stmt, indent: str, used: frozenset[str]) -> Iterator[str]:
        """Yield the lines of a statement. used: the names that are visible there."""
        deeper = indent + "  "
        match s:
            case For(var, extent, body, kind):
                used = self.assign_name(var, used)
                yield f"{indent}{'for' if kind == 'serial' else kind} {self.names[var]} in {extent}:"
                yield from self.body_lines(body, deeper, used)
            case Store(tensor, index, value):
                yield f"{indent}{self.element(tensor, index)} = {self.show(value)}"
            case Update(kind, tensor, index, value):
                yield f"{indent}{self.element(tensor, index)} {kind}= {self.show(value)}"
            case Let(var, value, body):
                text = self.show(value)
                used = self.assign_name(var, used)
                yield f"{indent}{self.names[var]} = {text}"
                yield from self.body_lines(body, indent, used)
            case If(cond, body, orelse):
                yield f"{indent}if {self.show(cond)}:"
                yield from self.body_lines(body, deeper, used)
                if orelse is not None:
                    yield f"{indent}else:"
                    yield from self.body_lines(orelse, deeper, used)
            case Alloc(tensor, body, scope, kept):
                used = self.assign_name(tensor, used)
                yield f"{indent}{'kept ' if kept else ''}{scope} {self.tensor(tensor)}"
                yield from self.body_lines(body, indent, used)
            case Block(body):
                for stmt in body:
                    yield from self.statement_lines(stmt, indent, used)
                    used |= {self.names[definition] for definition in _still_visible(stmt)}
            case Intrinsic(name, args):
                yield f"{indent}{name}({', '.join(map(self.argument, args))})"
            case _:
                raise TypeError(f"unknown statement {type(s).__name__}")

    def body_lines(self, s: Stmt, indent: str, used: frozenset[str]) -> Iterator[str]:
        """Yield the lines of a body, "pass" where it is empty."""
        empty = True
        for line in self.statement_lines(s, indent, used):
            yield line
            empty = False
        if empty:
            yield f"{indent}pass"

    def function(self, f: Function) -> Iterator[str]:
        """Yield the header, the constants and the body of a function."""
        used: frozenset[str] = frozenset()
        for tensor in (*f.inputs, *f.outputs):
            used = self.assign_name(tensor, used)
        name = re.sub(r"[^\w.]", "_", f.name) or "_"
        for var in f.scalars:
            used = self.assign_name(var, used)
        parameters = [*map(self.tensor, f.inputs), *(f"{self.names[var]}: {var.dtype}" for var in f.scalars)]
        yield f"{name}({', '.join(parameters)}) -> ({', '.join(map(self.tensor, f.outputs))}):"
        nodes = (n for s in statements(f.body) for e in exprs(s) for n in walk(e))
        for t in dict.fromkeys(n.tensor for n in nodes if isinstance(n, Load) and n.tensor.value is not None):
            used = self.assign_name(t, used)
            assert t.value is not None
            values = " = " + " ".join(str(v) for v in t.value.reshape(-1).tolist())
            yield f"  constant {self.tensor(t)}{values if t.size <= TABLE_LIMIT else ELIDED_VALUES}"
        yield from self.body_lines(f.body, "  ", used)


def _still_visible(s: Stmt) -> Iterator[Var | Tensor]:
    """Yield the definitions of `s` that stay visible on the lines after it, as Alloc and Let add no indentation."""
    match s:
        case Alloc(tensor, body):
            yield tensor
            yield from _still_visible(body)
        case Let(var, _, body):
            yield var
            yield from _still_visible(body)
        case Block(body):
            for stmt in body:
                yield from _still_visible(stmt)


@text.register(Stmt)
def show_stmt(s: Stmt) -> str:
    """Print a statement."""
    return "\n".join(_Writer().statement_lines(s, "", frozenset()))


@text.register(Function)
def show_function(f: Function) -> str:
    """Print a function: its parameters, constants and body."""
    return "\n".join(_Writer().function(f))
