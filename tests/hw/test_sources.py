"""The digest of the hardware's sources depends on their function, not on their style."""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator
from pathlib import Path

import pytest

import celosia.hw
from celosia.hw import sources
from celosia.hw.sources import normal_form

HARDWARE = Path(celosia.hw.__path__[0])
NAMES = sorted(name for name, _ in sources.hardware_files(HARDWARE))
FILES = [HARDWARE / name for name in NAMES]


def local_names(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the local variables of a function, except parameters and variables that inner scopes use."""
    inner = {name for scope in table.get_children() for name in scope.get_identifiers()}
    for symbol in table.get_symbols():
        is_other = symbol.is_parameter() or symbol.is_imported() or symbol.is_namespace()
        if symbol.is_local() and not is_other and symbol.get_name() not in inner:
            yield symbol.get_name()


def functions(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    """Yield the functions in `table`, at any depth."""
    for child in table.get_children():
        if child.get_type() == "function":
            yield child
        yield from functions(child)


class Rewritten(ast.NodeTransformer):
    """Rename local variables, replace docstrings, and drop annotations of functions."""

    def __init__(self, source: str) -> None:
        nodes = [*ast.walk(ast.parse(source))]
        self.kept = {node.arg for node in nodes if isinstance(node, ast.arg)}
        self.kept |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}  # names of functions count
        tables = functions(symtable.symtable(source, "source", "exec"))
        self.tables = {(table.get_name(), table.get_lineno()): table for table in tables}
        self.renamed: set[str] = set()
        self.any = False

    def visit_Name(self, node: ast.Name) -> ast.AST:
        name = f"{node.id}_renamed" if node.id in self.renamed else node.id
        return ast.copy_location(ast.Name(name, node.ctx), node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        node.name = f"{node.name}_renamed" if node.name in self.renamed else node.name
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outer = self.renamed
        lines = [
            node.lineno,
            *(decorator.lineno for decorator in node.decorator_list),
        ]  # Python's versions differ in the line of a decorated function
        table = next(self.tables[node.name, line] for line in lines if (node.name, line) in self.tables)
        new_names = {*local_names(table)} - self.kept
        self.any |= bool(new_names)
        self.renamed = outer | new_names
        body = node.body[1:] if sources._is_comment(node.body[0]) else node.body
        node.body = [ast.Expr(ast.Constant("Another docstring.")), *map(self.visit, body)]
        self.renamed = outer
        node.returns = None
        for argument in (*node.args.args, *node.args.kwonlyargs):
            argument.annotation = None
        return node


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_names_of_local_variables_and_comments_do_not_count(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    rewriting = Rewritten(source)
    rewritten = ast.unparse(ast.fix_missing_locations(rewriting.visit(ast.parse(source))))  # without comments
    assert normal_form(rewritten) == normal_form(source)
    assert rewriting.any == (normal_form(rewritten, keep_names=True) != normal_form(source, keep_names=True))
    assert normal_form(source + "\n# A comment.\n") == normal_form(source)


class WithoutAnnotations(ast.NodeTransformer):
    """Drop the annotations, which the digest ignores."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(node.arg)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        return node.value


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_any_number_and_any_operator_counts(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    expected = normal_form(source)
    places = [
        node for node in ast.walk(WithoutAnnotations().visit(ast.parse(source)))
        if (isinstance(node, ast.Constant) and type(node.value) is int) or isinstance(node, ast.BinOp | ast.Compare)
    ]  # fmt: skip
    for place in places[:: max(len(places) // 5, 1)]:
        module = ast.parse(source)
        for node in ast.walk(module):
            if getattr(node, "lineno", 0) == place.lineno and ast.dump(node) == ast.dump(place):
                match node:
                    case ast.Constant():
                        node.value += 1
                    case ast.BinOp():
                        node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
                    case ast.Compare():
                        node.ops[0] = ast.Lt() if isinstance(node.ops[0], ast.Gt) else ast.Gt()
        assert normal_form(ast.unparse(module)) != expected, ast.unparse(place)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("def f(a):\n    b = a\n    return b.c", "def f(a):\n    b = a\n    return b.b"),  # names of attributes
        ("def f(a):\n    b = g(c=a)\n    return b", "def f(a):\n    b = g(b=a)\n    return b"),  # names of arguments
        ("def f(a):\n    b = 1\n    c = a\n    return b", "def f(a):\n    b = 1\n    c = a\n    return c"),
        ("def f(a):\n    b = 1\n    b = a\n    return b", "def f(a):\n    b = 1\n    c = a\n    return b"),
        ("def f(a):\n    return a", "def f(b):\n    return b"),  # callers may name parameters
        ("c = 1\ndef f():\n    return c", "d = 1\ndef f():\n    return d"),  # other modules may read module variables
        ("def f(a):\n    global c\n    c = a", "def f(a):\n    global d\n    d = a"),
        ("class A:\n    a: In(1)", "class A:\n    a: In(2)"),
        ("class A:\n    a: In(1)", "class A:\n    b: In(1)"),
        ("def f():\n    import a\n    return a.b", "def f():\n    import c\n    return c.b"),
        ("f('text')", "f('other')"),
        ("x = 1", "x = True"),
    ],
)
def test_what_others_see_counts(one: str, other: str) -> None:
    assert normal_form(one) != normal_form(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "def f(a):\n    def g(c):\n        return b + c\n    b = a",
            "def f(a):\n    def h(c):\n        return d + c\n    d = a",
        ),
        ("def f(a):\n    return [b.a for b in a]", "def f(a):\n    return [c.a for c in a]"),
        ("def f(a):\n    with a as b:\n        g(b)", "def f(a):\n    with a as c:\n        g(c)"),
        (
            "def f(a):\n    try:\n        g()\n    except E as b:\n        g(b)",
            "def f(a):\n    try: g()\n    except E as c: g(c)",
        ),
        ("x: int = 1", "x: str = 1"),
        ("", "'Text.'"),
        ("class A:\n    'Text.'\n    def f(self): pass", "class A:\n    def f(self) -> int: pass"),
        (
            "def f(a):\n    b = a",
            "from celosia.hw.lib.probes import probes\ndef f(a):\n    c = a\n    probes(f, level=c)",
        ),
    ],
)
def test_what_nobody_sees_does_not(one: str, other: str) -> None:
    assert normal_form(one) == normal_form(other)
