"""A digest of the hardware's sources: equal in a bitstream and in the driver that is to use it.

The digest covers what the sources do, and not how they are written. Comments, docstrings, annotations of functions, the
layout of lines, the names of local variables and those that proofs use do not count: a corrected comment rebuilds no
simulator, and no flashed board is refused for it.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable  # novm: boards may have an older Python, and do not check types

NO_HARDWARE = (
    "boards/", "lib/probes.py", "manifest.py", "sources.py", "spec/config_doc.py", "spec/isa_doc.py",
)  # fmt: skip
"""Files and folders that the Verilog does not depend on."""
KEPT = "sources.txt"
"""Holds the digest where the sources are not, as on a board."""
_SILENT = ("ctx", "kind", "type_comment", "type_ignores", "type_params")
"""Fields of syntax trees that say nothing more, and that some versions of Python lack."""
_NAMES = {
    ("Name", "id"), ("FunctionDef", "name"), ("AsyncFunctionDef", "name"), ("ClassDef", "name"),
    ("ExceptHandler", "name"), ("MatchAs", "name"), ("MatchStar", "name"), ("alias", "asname"),
}  # fmt: skip
"""Fields that hold the name of a variable."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_FUNCTIONS, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
"""Syntax that opens a scope for variables."""


def hardware_files(folder: Traversable, within: str = "") -> Iterator[tuple[str, bytes]]:
    """Names and contents of the hardware's sources in `folder` and the folders in it."""
    for path in folder.iterdir():
        name = f"{within}{path.name}/" if path.is_dir() else within + path.name
        if name in NO_HARDWARE:
            continue
        if path.is_dir():
            yield from hardware_files(path, name)
        elif name.endswith(".py"):
            yield name, path.read_bytes()


def normal_form(source: str | bytes, keep_names: bool = False) -> str:
    """The syntax tree of a module as text, without what its behaviour does not depend on.

    keep_names: local variables keep their names, which are those of signals in the Verilog.

    >>> a = normal_form("def f(x):\\n    y = x + 1  # one more\\n    return y")
    >>> b = normal_form('def f(x: int) -> int:\\n    "Add one."\\n    more = (x + 1)\\n    return more')
    >>> a == b, a == normal_form("def f(x):\\n    y = x + 2\\n    return y")
    (True, False)
    """
    module = ast.parse(source)
    if keep_names:
        return "".join(_written(module, None, set()))
    kept = {name for statement in module.body for name in _bound(statement, inside=False)}
    return "".join(_written(module, {}, kept))


def _bound(node: ast.AST, inside: bool = True) -> Iterator[str]:
    """Names that `node` binds; inside: in the functions and classes within it, too."""
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.alias(name=name, asname=other):
            yield (other or name).split(".")[0]
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name
    if inside or not isinstance(node, (*_SCOPES, ast.ClassDef)):
        for child in ast.iter_child_nodes(node):
            yield from _bound(child, inside)


def _locals(scope: ast.AST, kept: set[str]) -> dict[str, str]:
    """Numbers for the variables of a scope and of those inside it, in the order in which they are bound.

    Parameters keep their names, as callers may use them, and so do names that the module binds.
    """
    kept = kept | {node.arg for node in ast.walk(scope) if isinstance(node, ast.arg)}  # a set of its own
    for node in ast.walk(scope):
        if isinstance(node, ast.Global | ast.Nonlocal):
            kept |= {*node.names}
        elif isinstance(node, ast.alias) and node.asname is None:
            kept.add(node.name.split(".")[0])
    names = dict.fromkeys(name for child in ast.iter_child_nodes(scope) for name in _bound(child))
    return {name: f"%{number}" for number, name in enumerate(name for name in names if name not in kept)}


def _written(value: Any, names: dict[str, str] | None, kept: set[str], in_class: bool = False) -> Iterator[str]:
    """`value`, a part of a syntax tree, as text.

    names: what local variables are called, {} outside functions, None where they keep their names. kept: names that are
    not replaced. in_class: annotations declare ports and fields.
    """
    if isinstance(value, list):
        yield "["
        for part in value:
            if not _is_comment(part):
                yield from _written(part, names, kept, in_class)
        yield "]"
    elif not isinstance(value, ast.AST):
        yield f"{value!r};"
    elif isinstance(value, ast.Constant):
        yield f"{type(value.value).__name__} {value.value!r};"
    else:
        around = names
        if isinstance(value, _SCOPES) and names == {}:
            names = _locals(value, kept)
        silent: tuple[str, ...] = _SILENT
        if isinstance(value, (*_FUNCTIONS, ast.arg)):
            silent += "annotation", "returns"
        elif isinstance(value, ast.AnnAssign) and value.value is not None and not in_class:
            silent += ("annotation",)
        yield f"{type(value).__name__}("
        for field, part in ast.iter_fields(value):
            if field not in silent and part not in (None, []):
                yield f"{field}="
                if around and (type(value).__name__, field) in _NAMES:
                    part = around.get(part, part)
                yield from _written(part, names, kept, isinstance(value, ast.ClassDef))
        yield ")"


def _is_comment(part: Any) -> bool:
    """Whether a statement is a docstring, or declares names for proofs (`probes.py`)."""
    match part:
        case ast.Expr(value=ast.Constant(value=str()) | ast.Call(func=ast.Name(id="probes"))):
            return True
        case ast.ImportFrom(module="celosia.hw.lib.probes"):
            return True
    return False


@cache
def sources_digest() -> str:
    """32 hexadecimal digits that differ where a file of the hardware behaves differently."""
    folder = resources.files("celosia.hw")
    if (folder / KEPT).is_file():
        return (folder / KEPT).read_text(encoding="ascii")
    digest = hashlib.sha256()
    for name, data in sorted(hardware_files(folder)):
        digest.update(f"\n{name}\n{normal_form(data)}".encode())
    return digest.hexdigest()[:32]


def sources_identity() -> int:
    """The first 32 bits of the digest, held in register `sources`."""
    return int(sources_digest()[:8], 16)
