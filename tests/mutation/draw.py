"""Enumerate random faults in the sources of the hardware, and draw some of them."""

from __future__ import annotations

import ast
import difflib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

SWAPS: dict[type[ast.AST], tuple[str, tuple[str, ...]]] = {
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Lt: ("<", ("<=", ">")),
    ast.LtE: ("<=", ("<", ">=")),
    ast.Gt: (">", (">=", "<")),
    ast.GtE: (">=", (">", "<=")),
    ast.Add: ("+", ("-",)),
    ast.Sub: ("-", ("+",)),
    ast.BitAnd: ("&", ("|",)),
    ast.BitOr: ("|", ("&",)),
    ast.BitXor: ("^", ("|", "&")),
    ast.LShift: ("<<", (">>",)),
    ast.RShift: (">>", ("<<",)),
}
"""For each operator's node: its text, and the texts that replace it."""
COMMUTATIVE = (ast.Add, ast.Mult, ast.BitAnd, ast.BitOr, ast.BitXor)
CONDITIONS = ("If", "Elif")
REGISTERS = ("Signal", "Reg")


@dataclass(frozen=True)
class Mutant:
    """A fault: in `file` (below hw/), the bytes `start` to `stop`, whose text is `old`, become `new`."""

    file: str
    function: str
    line: int
    kind: str
    start: int
    stop: int
    old: str
    new: str

    def apply(self, source: str) -> str:
        """Return the file's source with the fault. Raise ValueError if the source does not hold `old` there."""
        raw = source.encode()
        if raw[self.start : self.stop].decode() != self.old:
            raise ValueError(f"{self.file}:{self.line} does not hold {self.old!r}")
        return (raw[: self.start] + self.new.encode() + raw[self.stop :]).decode()

    def diff(self, source: str) -> str:
        """Return the lines that the mutant changes, as a unified diff without context."""
        before, after = source.splitlines(), self.apply(source).splitlines()
        lines = list(difflib.unified_diff(before, after, lineterm="", n=0))[3:]
        return "\n".join(line[0] + " " + line[1:].strip() for line in lines if not line.startswith("@@"))

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.kind}"


class _Sites(ast.NodeVisitor):
    """Collect the mutants of one file."""

    IGNORED_CALLS: ClassVar = frozenset({"ValueError", "TypeError", "ConfigError", "print", "Case"})

    def __init__(self, file: str, source: str) -> None:
        self.file, self.raw = file, source.encode()
        lines = source.encode().split(b"\n")
        self.starts = [0]
        for line in lines:
            self.starts.append(self.starts[-1] + len(line) + 1)
        self.names: list[str] = []
        self.mutants: list[Mutant] = []

    # Text ------------------------------------------------------------------------------------------------------

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.AST) -> str:
        start, stop = self._span(node)
        return self.raw[start:stop].decode()

    def _replace(self, kind: str, node: ast.expr | ast.stmt, new: str, start: int = -1, stop: int = -1) -> None:
        if start < 0:
            start, stop = self._span(node)
        old = self.raw[start:stop].decode()
        line = node.lineno
        self.mutants.append(Mutant(self.file, ".".join(self.names), line, kind, start, stop, old, new))

    def _operator(self, kind: str, left: ast.expr, right: ast.expr, operator: ast.AST) -> None:
        """Add mutants that replace the operator between two expressions."""
        text, others = SWAPS[type(operator)]
        start, stop = self._span(left)[1], self._span(right)[0]
        gap = self.raw[start:stop].decode()
        if gap.count(text) == 1 and "#" not in gap:
            for other in others:
                self._replace(kind, left, gap.replace(text, other), start, stop)

    def _swap(self, kind: str, first: ast.expr, second: ast.expr) -> None:
        """Add a mutant that exchanges two expressions; the text around them stays."""
        (a, b), (c, d) = self._span(first), self._span(second)
        one, between, two = self.raw[a:b].decode(), self.raw[b:c].decode(), self.raw[c:d].decode()
        if one != two:
            self._replace(kind, first, two + between + one, a, d)

    # Code without faults ----------------------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._inside(node)

    def _inside(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        self.names.append(node.name)
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef) or not isinstance(node, ast.ClassDef):
                self.visit(statement)
        self.names.pop()

    def visit_Module(self, node: ast.Module) -> None:
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                self.visit(statement)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Skip error messages: they are no hardware."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Skip assertions: they hold in the hardware as it is."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip names of signals."""

    def visit_arguments(self, node: ast.arguments) -> None:
        """Skip defaults and annotations."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    # Faults ----------------------------------------------------------------------------------------------------

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
            self._operator("comparison", node.left, node.comparators[0], node.ops[0])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in SWAPS:
            self._operator("operator", node.left, node.right, node.op)
        if not isinstance(node.op, COMMUTATIVE):
            self._swap("swapped operands", node.left, node.right)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Invert | ast.Not):
            self._replace("dropped negation", node, self._text(node.operand))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            self._replace("off by one", node, str(node.value + 1))
            self._replace("off by one", node, str(node.value - 1))

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in self.IGNORED_CALLS or ast.unparse(node.func) == "super().__init__":
            return  # messages; ports, whose widths both sides must share
        if name in CONDITIONS and node.args:
            self._replace("stuck condition", node.args[0], "1")
            self._replace("stuck condition", node.args[0], "0")
        if name == "Mux" and len(node.args) == 3:
            self._swap("swapped operands", node.args[1], node.args[2])
            self._replace("stuck condition", node, self._text(node.args[1]))
            self._replace("stuck condition", node, self._text(node.args[2]))
        if name == "Cat" and len(node.args) == 2 and not any(isinstance(arg, ast.Starred) for arg in node.args):
            self._swap("swapped operands", *node.args)
        if name in REGISTERS:
            self._reset(node, name)
        self.generic_visit(node)

    def _reset(self, node: ast.Call, name: str) -> None:
        """Add a mutant without the reset of a register."""
        if name != "Signal" or any(keyword.arg is None for keyword in node.keywords):
            return
        if not any(keyword.arg in ("reset_less", "init") for keyword in node.keywords):
            text = self._text(node)
            comma = ", " if node.args or node.keywords else ""
            self._replace("dropped reset", node, f"{text[:-1].rstrip().rstrip(',')}{comma}reset_less=True)")

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in ("name", "reset_less", "src_loc_at"):
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if _is_domain(node.target):
            values = node.value.elts if isinstance(node.value, ast.List) else [node.value]
            for value in values:
                if not isinstance(value, ast.Starred):
                    self._replace("dropped assignment", value, "[]")
        elif type(node.op) in SWAPS:
            text, others = SWAPS[type(node.op)]
            start, stop = self._span(node.target)[1], self._span(node.value)[0]
            gap = self.raw[start:stop].decode()
            for other in others:
                self._replace("operator", node, gap.replace(f"{text}=", f"{other}="), start, stop)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if ast.unparse(node.targets[0]) == "m.next":
            self._replace("dropped assignment", node, "pass")
        self.generic_visit(node)


def _is_domain(node: ast.expr) -> bool:
    """Return True for `m.d.sync` or another domain of a module."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "d"


def is_hardware(source: str) -> bool:
    """Return True if a file describes hardware: it imports Amaranth, and uses Module."""
    return "from amaranth import" in source and "Module" in source


def mutants(file: str, source: str) -> list[Mutant]:
    """Return all mutants of one file."""
    sites = _Sites(file, source)
    sites.visit(ast.parse(source))
    return list(dict.fromkeys(sites.mutants))


@cache
def everything(hardware: Path) -> tuple[Mutant, ...]:
    """Return all mutants of the hardware's files in folder `hardware`."""
    found: list[Mutant] = []
    for path in sorted(hardware.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if is_hardware(source) and path.name != "verilog.py":
            found += mutants(path.relative_to(hardware).as_posix(), source)
    return tuple(found)


def draw(hardware: Path, seed: int) -> Iterator[Mutant]:
    """Yield all mutants in an order that `seed` determines, at most one for the same bytes of a file."""
    candidates = list(everything(hardware))
    random.Random(f"mutants {seed}").shuffle(candidates)
    used_places: set[tuple[str, int, int]] = set()
    for mutant in candidates:
        place = (mutant.file, mutant.start, mutant.stop)
        if place not in used_places:
            used_places.add(place)
            yield mutant
