"""Digest of the hardware's sources, by which a driver recognises the bitstream or simulator that matches it.

The digest depends on the behaviour of the sources only. It ignores comments, docstrings, annotations of functions, the
layout of lines, names of local variables, and names that are declared for proofs. So a corrected comment rebuilds no
simulator, and the driver does not refuse a flashed board for it.
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

NOT_HASHED = (
    "boards/", "lib/probes.py", "manifest.py", "sources.py", "spec/config_doc.py", "spec/isa_doc.py",
)  # fmt: skip
"""Files and folders of hw/ that the Verilog does not depend on."""
DIGEST_FILE = "sources.txt"
"""File that holds the digest on a board, which has no sources."""
_IGNORED_FIELDS = ("ctx", "kind", "type_comment", "type_ignores", "type_params")
"""Fields of syntax trees that are redundant, and that some versions of Python lack."""
_VARIABLE_FIELDS = {
    ("Name", "id"), ("FunctionDef", "name"), ("AsyncFunctionDef", "name"), ("ClassDef", "name"),
    ("ExceptHandler", "name"), ("MatchAs", "name"), ("MatchStar", "name"), ("alias", "asname"),
}  # fmt: skip
"""Fields of syntax trees that hold the name of a variable: type of the node, and name of the field."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_FUNCTIONS, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
"""Syntax that opens a scope for variables."""


def hardware_files(folder: Traversable, within: str = "") -> Iterator[tuple[str, bytes]]:
    """Yield the path and the content of each hardware source in `folder` and its subfolders.

    within: prefix of the paths, which are relative to hw/.
    """
    for path in folder.iterdir():
        name = f"{within}{path.name}/" if path.is_dir() else within + path.name
        if name in NOT_HASHED:
            continue
        if path.is_dir():
            yield from hardware_files(path, name)
        elif name.endswith(".py"):
            yield name, path.read_bytes()


def normal_form(source: str | bytes, keep_names: bool = False) -> str:
    """Return the syntax tree of a module as text, without anything that its behaviour does not depend on.

    keep_names: keep the names of local variables, which are also names of signals in the Verilog; else number them.

    >>> a = normal_form("def f(x):\\n    y = x + 1  # one more\\n    return y")
    >>> b = normal_form('def f(x: int) -> int:\\n    "Add one."\\n    more = (x + 1)\\n    return more')
    >>> a == b, a == normal_form("def f(x):\\n    y = x + 2\\n    return y")
    (True, False)
    """
    module = ast.parse(source)
    if keep_names:
        return "".join(_serialise(module, None, set()))
    fixed_names = {name for statement in module.body for name in _bound_names(statement, nested=False)}
    return "".join(_serialise(module, {}, fixed_names))


def _bound_names(node: ast.AST, nested: bool = True) -> Iterator[str]:
    """Yield the names that `node` binds. nested: with those that functions and classes inside it bind."""
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.alias(name=name, asname=other):
            yield (other or name).split(".")[0]
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name
    if nested or not isinstance(node, (*_SCOPES, ast.ClassDef)):
        for child in ast.iter_child_nodes(node):
            yield from _bound_names(child, nested)


def _numbered_locals(scope: ast.AST, fixed_names: set[str]) -> dict[str, str]:
    """Return new names, "%0" and so on, for the variables of a scope and its nested scopes, in the order of binding.

    Parameters keep their names, as callers may use them, and so do the names `fixed_names`, which the module binds.
    """
    fixed_names = fixed_names | {node.arg for node in ast.walk(scope) if isinstance(node, ast.arg)}  # a set of its own
    for node in ast.walk(scope):
        if isinstance(node, ast.Global | ast.Nonlocal):
            fixed_names |= {*node.names}
        elif isinstance(node, ast.alias) and node.asname is None:
            fixed_names.add(node.name.split(".")[0])
    names = dict.fromkeys(name for child in ast.iter_child_nodes(scope) for name in _bound_names(child))
    return {name: f"%{number}" for number, name in enumerate(name for name in names if name not in fixed_names)}


def _serialise(
    value: Any, names: dict[str, str] | None, fixed_names: set[str], in_class: bool = False
) -> Iterator[str]:
    """Yield the text of `value`, a part of a syntax tree, in fragments.

    names: new name of each local variable; {} outside functions; None: variables keep their names.
    fixed_names: names that are never replaced.
    in_class: `value` belongs to the body of a class, whose annotations declare ports and fields and therefore count.
    """
    if isinstance(value, list):
        yield "["
        for part in value:
            yield from _serialise(part, names, fixed_names, in_class)
        yield "]"
    elif not isinstance(value, ast.AST):
        yield f"{value!r};"
    elif isinstance(value, ast.Constant):
        yield f"{type(value.value).__name__} {value.value!r};"
    else:
        outer_names = names
        if isinstance(value, _SCOPES) and names == {}:
            names = _numbered_locals(value, fixed_names)
        ignored: tuple[str, ...] = _IGNORED_FIELDS
        if isinstance(value, (*_FUNCTIONS, ast.arg)):
            ignored += "annotation", "returns"
        elif isinstance(value, ast.AnnAssign) and value.value is not None and not in_class:
            ignored += ("annotation",)
        yield f"{type(value).__name__}("
        for field, part in ast.iter_fields(value):
            if isinstance(part, list):
                part = [element for element in part if not _is_comment(element)]
            if field not in ignored and part not in (None, []):
                yield f"{field}="
                if outer_names and (type(value).__name__, field) in _VARIABLE_FIELDS:
                    part = outer_names.get(part, part)
                yield from _serialise(part, names, fixed_names, isinstance(value, ast.ClassDef))
        yield ")"


def _is_comment(part: Any) -> bool:
    """Return whether a part of a syntax tree is a docstring, or declares names for proofs (`lib/probes.py`)."""
    match part:
        case ast.Expr(value=ast.Constant(value=str()) | ast.Call(func=ast.Name(id="probes"))):
            return True
        case ast.ImportFrom(module="celosia.hw.lib.probes"):
            return True
    return False


@cache
def sources_digest() -> str:
    """Return the digest of the hardware's sources, 32 hexadecimal digits; on a board, that of the file DIGEST_FILE."""
    folder = resources.files("celosia.hw")
    if (folder / DIGEST_FILE).is_file():
        return (folder / DIGEST_FILE).read_text(encoding="ascii")
    digest = hashlib.sha256()
    for name, data in sorted(hardware_files(folder)):
        digest.update(f"\n{name}\n{normal_form(data)}".encode())
    return digest.hexdigest()[:32]


def sources_identity() -> int:
    """Return the first 32 bits of `sources_digest`, the value of register `sources` in matching hardware."""
    return int(sources_digest()[:8], 16)
