"""Expressions and loops as text."""

from __future__ import annotations

from collections.abc import Iterator

from celosia.compiler.expr.loops import Alloc, Block, For, Function, If, Intrinsic, Let, Stmt, Store, Update
from celosia.compiler.expr.nodes import INDEX, Binary, Call, Cast, Const, Expr, Load, Reduce, Select, Tensor, Var

SYMBOLS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "and": "&", "or": "|", "xor": "^",
    "shl": "<<", "shr": ">>", "pow": "**", "lt": "<", "le": "<=", "eq": "==", "ne": "!=",
}  # fmt: skip


def show(e: Expr) -> str:
    """One expression, fully parenthesised."""
    match e:
        case Const(value, dtype):
            return str(value) if dtype in (INDEX, "float32", "bool") else f"{dtype}({value})"
        case Var(name=name):
            return name
        case Load(tensor, index):
            return f"{tensor.name}[{', '.join(map(show, index))}]"
        case Binary(op, a, b):
            return f"({show(a)} {SYMBOLS[op]} {show(b)})" if op in SYMBOLS else f"{op}({show(a)}, {show(b)})"
        case Call(name, args):
            return f"{name}({', '.join(map(show, args))})"
        case Cast(value, dtype):
            return f"{dtype}({show(value)})"
        case Select(cond, a, b):
            return f"select({show(cond)}, {show(a)}, {show(b)})"
        case Reduce(kind, value, axes):
            text = show(value)
            names = ", ".join(axis.name for axis in axes)
            return f"{kind}[{names}]{text if text.startswith('(') else f'({text})'}"
    raise TypeError(f"unknown expression {type(e).__name__}")


def _tensor(t: Tensor) -> str:
    return f"{t.name}: {t.dtype}[{', '.join(map(str, t.shape))}]"


def _target(tensor: Tensor, index: tuple[Expr, ...]) -> str:
    return f"{tensor.name}[{', '.join(map(show, index))}]"


def _lines(s: Stmt, indent: str) -> Iterator[str]:
    deeper = indent + "  "
    match s:
        case For(var, extent, body, kind):
            yield f"{indent}{'for' if kind == 'serial' else kind} {var.name} in {extent}:"
            yield from _lines(body, deeper)
        case Store(tensor, index, value):
            yield f"{indent}{_target(tensor, index)} = {show(value)}"
        case Update(kind, tensor, index, value):
            yield f"{indent}{_target(tensor, index)} {kind}= {show(value)}"
        case Let(var, value, body):
            yield f"{indent}{var.name} = {show(value)}"
            yield from _lines(body, indent)
        case If(cond, body, orelse):
            yield f"{indent}if {show(cond)}:"
            yield from _lines(body, deeper)
            if orelse is not None:
                yield f"{indent}else:"
                yield from _lines(orelse, deeper)
        case Alloc(tensor, body, scope):
            yield f"{indent}{scope} {_tensor(tensor)}"
            yield from _lines(body, indent)
        case Block(body):
            for stmt in body:
                yield from _lines(stmt, indent)
        case Intrinsic(name, args):
            yield f"{indent}{name}({', '.join(a.name if isinstance(a, Tensor) else str(a) for a in args)})"
        case _:
            raise TypeError(f"unknown statement {type(s).__name__}")


def show_stmt(s: Stmt) -> str:
    return "\n".join(_lines(s, ""))


def show_function(f: Function) -> str:
    head = f"{f.name}({', '.join(map(_tensor, f.inputs))}) -> ({', '.join(map(_tensor, f.outputs))}):"
    return "\n".join([head, *_lines(f.body, "  ")])
