"""Loops as text: the printer of expressions and loops, then the parser, its inverse.

A Program stores its CPU kernels as text, and parses it to compile them on another machine.

>>> function = parse('''
... twice(a: float32[4]) -> (b: float32[4]):
...   for i in 4:
...     b[i] = (a[i] * 2.0)
... ''')
>>> print(function.outputs[0].shape)
(4,)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.expr.loops import (
    SCOPES,
    Alloc,
    Block,
    Declared,
    For,
    Function,
    If,
    Intrinsic,
    Let,
    Stmt,
    Store,
    Update,
    exprs,
    statements,
)
from celosia.compiler.expr.math_functions import RESULTS
from celosia.compiler.expr.nodes import (
    INDEX,
    Axis,
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
    is_float,
    text,
    unused_name,
    walk,
)
from celosia.compiler.program.dtypes import numpy_dtype

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
        self.names[definition] = name = unused_name(base, set(used))
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


class ParseError(ValueError):
    """A text that is not a valid function; the message begins with the number of the line."""


OPERATIONS = {symbol: op for op, symbol in SYMBOLS.items()}
"""Symbol in text -> operation of Binary."""
_TOKEN = re.compile(
    r"\s*(?:(?P<number>-inf\b|inf\b|nan\b|-?\d+(?:\.\d*)?(?:e[+-]?\d+)?)|(?P<name>[A-Za-z_][\w.]*)"
    r"|(?P<mark>//|<<|>>|\*\*|<=|==|!=|[-+*/%&|^<>=()\[\],:]))"
)
"""A token of an expression: number, name or mark."""
_TENSOR = r"(?P<name>[\w.]+): (?P<dtype>\w+)\[(?P<shape>[\d, ]*)\]"
"""Declaration of a tensor, such as `a: float32[4, 8]`."""
_PLAIN = re.sub(r"\?P<\w+>", "?:", _TENSOR)
"""Pattern of a declaration without names of groups, since a pattern may contain each name only once."""
_HEAD = re.compile(r"(?P<function>[\w.]+)\((?P<inputs>.*)\) -> \((?P<outputs>.*)\):")
_LOOP = re.compile(
    r"(?P<kind>for|ordered|unrolled|vectorized|parallel|vthread|pipelined) (?P<name>[\w.]+) in (?P<extent>\d+):"
)
_ALLOC = re.compile(rf"(?P<kept>kept )?(?P<scope>{'|'.join(SCOPES)}) {_TENSOR}")
_CONSTANT = re.compile(rf"constant {_TENSOR} = (?P<values>.*)")

Scope = dict[str, Var | Tensor]
"""Variable or tensor that each visible name refers to."""


def parse(
    text: str,
    intrinsics: Mapping[str, Declared] | None = None,
    constants: Mapping[str, NDArray[Any]] | None = None,
) -> Function:
    """Parse the text of a function; printing the result gives the same text again.

    intrinsics: declarations by name. constants: values, by name, of tables that are too long to be written out. Raises
    ParseError.
    """
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    return _Parser(lines, intrinsics or {}, constants or {}).function()


class _Parser:
    """Recursive-descent parser of the lines of one function.

    lines: (line number, text) of the lines that are not empty. at: position of the current line in `lines`.
    """

    def __init__(
        self, lines: list[tuple[int, str]], intrinsics: Mapping[str, Declared], constants: Mapping[str, NDArray[Any]]
    ) -> None:
        self.lines, self.intrinsics, self.constants = lines, intrinsics, constants
        self.at = 0

    def error(self, reason: str) -> ParseError:
        """Build a ParseError that names the current line."""
        line = self.lines[min(self.at, len(self.lines) - 1)][0] if self.lines else 1
        return ParseError(f"line {line}: {reason}")

    # Statements ---------------------------------------------------------------------------------------------------

    def peek(self) -> tuple[int, str] | None:
        """Return (indentation, text) of the current line; None at the end."""
        if self.at == len(self.lines):
            return None
        line = self.lines[self.at][1].rstrip()
        return len(line) - len(line.lstrip()), line.lstrip()

    def function(self) -> Function:
        """Parse the header, the constants and the body of a function."""
        line = self.peek()
        head = _HEAD.fullmatch(line[1]) if line else None
        if line is None or head is None:
            raise self.error("a function begins with `name(inputs) -> (outputs):`")
        self.at += 1
        inputs, outputs = self.tensors(head["inputs"]), self.tensors(head["outputs"])
        scope: Scope = {t.name: t for t in (*inputs, *outputs)}
        while (line := self.peek()) and (constant := _CONSTANT.fullmatch(line[1])):
            scope[constant["name"]] = self.constant(constant)
            self.at += 1
        body = self.block(self.indent(), scope)
        if self.peek() is not None:
            raise self.error("nothing follows a function")
        return Function(head["function"], inputs, outputs, body)

    def tensors(self, text: str) -> tuple[Tensor, ...]:
        """Parse a list of tensor declarations such as `a: float32[4, 8], b: int8[3]`."""
        if text and not re.fullmatch(rf"{_PLAIN}(, {_PLAIN})*", text):
            raise self.error(f"`{text}` are not tensors")
        return tuple(self.tensor(m) for m in re.finditer(_TENSOR, text))

    def tensor(self, m: re.Match[str], value: NDArray[Any] | None = None) -> Tensor:
        """Build the tensor of a matched declaration."""
        if not DTYPE.fullmatch(m["dtype"]):
            raise self.error(f"{m['dtype']} is not an element type")
        return Tensor(m["name"], tuple(int(n) for n in m["shape"].split(",") if n.strip()), m["dtype"], value=value)

    def constant(self, m: re.Match[str]) -> Tensor:
        """Parse a constant table, whose values are written out or come from `constants`."""
        plain = self.tensor(m)
        if m["values"] == "...":
            if m["name"] not in self.constants:
                raise self.error(f"the values of constant {m['name']} are missing")
            values = self.constants[m["name"]]
            if values.shape != plain.shape or values.dtype.name != plain.dtype:
                raise self.error(f"the values of constant {m['name']} are {values.dtype}{list(values.shape)}")
        else:
            words = [{"True": 1, "False": 0}.get(v, v) for v in m["values"].split()]
            convert = float if is_float(plain.dtype) else int
            values = np.array([convert(v) for v in words]).astype(numpy_dtype(plain.dtype)).reshape(plain.shape)
        return self.tensor(m, values)

    def indent(self) -> int:
        """Return the indentation of the current line; 0 at the end."""
        line = self.peek()
        return line[0] if line else 0

    def block(self, indent: int, scope: Scope) -> Stmt:
        """Parse consecutive statements that are indented by `indent`."""
        body: list[Stmt] = []
        while (line := self.peek()) is not None and line[0] >= indent:
            if line[0] > indent:
                raise self.error("unexpected indentation")
            text = line[1]
            if text == "pass":
                self.at += 1
            elif m := _ALLOC.fullmatch(text):
                tensor = self.tensor(m)
                self.at += 1
                inner = self.block(indent, {**scope, tensor.name: tensor})
                body.append(Alloc(tensor, inner, m["scope"], bool(m["kept"])))
            elif m := re.fullmatch(r"(?P<name>[A-Za-z_][\w.]*) = (?P<value>.*)", text):
                value = self.expression(m["value"], scope)
                var = Var(m["name"], value.dtype)
                self.at += 1
                body.append(Let(var, value, self.block(indent, {**scope, var.name: var})))
            else:
                body.append(self.statement(indent, text, scope))
        return body[0] if len(body) == 1 else Block(tuple(body))

    def indented_body(self, indent: int, scope: Scope) -> Stmt:
        """Parse the indented body of a loop or a condition."""
        deeper = self.indent()
        if deeper <= indent or self.peek() is None:
            raise self.error("an indented block is missing")
        return self.block(deeper, scope)

    def statement(self, indent: int, text: str, scope: Scope) -> Stmt:
        """Parse one statement other than an allocation or a definition. scope: what each name refers to."""
        if m := _LOOP.fullmatch(text):
            axis = Axis(m["name"], extent=int(m["extent"]))
            self.at += 1
            body = self.indented_body(indent, {**scope, axis.name: axis})
            return For(axis, axis.extent, body, "serial" if m["kind"] == "for" else m["kind"])
        if m := re.fullmatch(r"if (.*):", text):
            cond = self.expression(m[1], scope)
            self.at += 1
            then = self.indented_body(indent, scope)
            if self.peek() != (indent, "else:"):
                return If(cond, then)
            self.at += 1
            return If(cond, then, self.indented_body(indent, scope))
        reader = _Expression(text, scope, self)
        name = reader.take("name")
        if reader.next() == "(":
            args = reader.arguments("(", ")", tensors=True)
            reader.end()
            self.at += 1
            return Intrinsic(name, args, self.intrinsics.get(name))
        tensor = reader.tensor(name)
        index = tuple(reader.expressions("[", "]"))
        kind = reader.take("name") if reader.next() != "=" else None
        if kind is not None and kind not in Reduce.COMBINE:
            raise self.error(f"there is no reduction {kind}")
        reader.expect("=")
        value = reader.value()
        reader.end()
        self.at += 1
        return Store(tensor, index, value) if kind is None else Update(kind, tensor, index, value)

    def expression(self, text: str, scope: Scope) -> Expr:
        """Parse `text` as one expression."""
        reader = _Expression(text, scope, self)
        value = reader.value()
        reader.end()
        return value


class _Expression:
    """Recursive-descent parser of the expression on one line.

    tokens: (kind, text), where kind is "number", "name" or "mark". at: position of the current token.
    """

    def __init__(self, text: str, scope: Scope, parser: _Parser) -> None:
        """Split `text` into tokens (kind, text); ParseError where it contains anything else."""
        self.scope, self.parser, self.at = scope, parser, 0
        self.tokens: list[tuple[str, str]] = []
        position = 0
        while position < len(text):
            m = _TOKEN.match(text, position)
            if m is None or m.lastgroup is None:
                raise parser.error(f"`{text[position:]}` is not understood")
            self.tokens.append((m.lastgroup, m[m.lastgroup]))
            position = m.end()

    def next(self, ahead: int = 0) -> str:
        """Return the token `ahead` of the current one without consuming it, "" at the end of the line."""
        return self.tokens[self.at + ahead][1] if self.at + ahead < len(self.tokens) else ""

    def take(self, kind: str) -> str:
        """Consume a token of this kind; ParseError where the next is another."""
        if self.at == len(self.tokens) or self.tokens[self.at][0] != kind:
            raise self.parser.error(f"a {kind} is expected, not `{self.next()}`")
        self.at += 1
        return self.tokens[self.at - 1][1]

    def expect(self, mark: str) -> None:
        """Consume this punctuation mark; ParseError where the next token is another."""
        if self.next() != mark:
            raise self.parser.error(f"`{mark}` is expected, not `{self.next()}`")
        self.at += 1

    def end(self) -> None:
        """Raise ParseError unless all tokens are consumed."""
        if self.at < len(self.tokens):
            raise self.parser.error(f"`{self.next()}` is not expected")

    def tensor(self, name: str) -> Tensor:
        """Return the visible tensor of this name; ParseError where there is none."""
        tensor = self.scope.get(name)
        if not isinstance(tensor, Tensor):
            raise self.parser.error(f"there is no tensor {name}")
        return tensor

    def arguments(self, first: str, last: str, tensors: bool = False) -> tuple[Expr | Tensor | int, ...]:
        """Parse a comma-separated list between two brackets. tensors: names of tensors are allowed."""
        self.expect(first)
        values: list[Expr | Tensor | int] = []
        while self.next() != last:
            if values:
                self.expect(",")
            name = self.scope.get(self.next())
            if tensors and isinstance(name, Tensor) and self.next(1) != "[":
                self.at += 1
                values.append(name)
            else:
                values.append(self.value())
        self.expect(last)
        return tuple(values)

    def expressions(self, first: str, last: str) -> tuple[Expr, ...]:
        """Parse a comma-separated list of expressions between two brackets."""
        return tuple(a for a in self.arguments(first, last) if isinstance(a, Expr))

    def literal(self, dtype: str | None = None) -> Const:
        """Parse a number or truth value; without `dtype` it is an index where it has no point, else float32."""
        text = self.next()
        self.at += 1
        if text in ("True", "False"):
            return Const(text == "True", dtype or "bool")
        if dtype is None:
            dtype = INDEX if re.fullmatch(r"-?\d+", text) else "float32"
        try:
            return Const(float(text) if is_float(dtype) else int(text), dtype)
        except ValueError:
            raise self.parser.error(f"{text} is not a value of type {dtype}") from None

    def is_literal(self) -> bool:
        """Return whether the current token is a number or truth value."""
        return self.at < len(self.tokens) and (self.tokens[self.at][0] == "number" or self.next() in ("True", "False"))

    def value(self) -> Expr:
        """Parse one expression: a literal, a parenthesised operation, a load, a variable or a call."""
        if self.is_literal():
            return self.literal()
        if self.next() == "(":
            self.expect("(")
            a = self.value()
            symbol = self.next()
            if symbol not in OPERATIONS:
                raise self.parser.error(f"`{symbol}` is not an operation")
            self.at += 1
            b = self.value()
            self.expect(")")
            return Binary(OPERATIONS[symbol], a, b)
        name = self.take("name")
        if self.next() == "[":
            tensor = self.tensor(name)
            return Load(tensor, self.expressions("[", "]"))
        if self.next() != "(":
            var = self.scope.get(name)
            if not isinstance(var, Var):
                raise self.parser.error(f"there is no variable {name}")
            return var
        if DTYPE.fullmatch(name):
            return self.conversion(name)
        args = self.expressions("(", ")")
        if name in ("min", "max") and len(args) == 2:
            return Binary(name, *args)
        if name == "select" and len(args) == 3:
            return Select(*args)
        function, _, dtype = name.partition(".")
        return Call(function, args, dtype or call_type(function, args))

    def conversion(self, dtype: str) -> Expr:
        """Parse the rest of `dtype(value)`: a typed literal or a Cast."""
        self.expect("(")
        value: Expr
        if self.is_literal():
            value = self.literal(dtype)
        else:
            value = Cast(self.value(), dtype)
        self.expect(")")
        return value
