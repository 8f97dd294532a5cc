"""Plant a fault into a source by a fragment of it, independently of the names of local variables.

A fragment matches text word for word. If there is no such text, because variables were renamed, a local variable in the
fragment stands for any local name, and the same one for the same name. Other names must match exactly: those that the
module binds or imports, builtins, names behind a dot, and names of arguments.
"""

from __future__ import annotations

import ast
import builtins
import io
import keyword
import tokenize
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from tokenize import TokenInfo
from typing import NamedTuple

LAYOUT = (
    tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER,
    tokenize.ENCODING,
)  # fmt: skip


class Word(NamedTuple):
    """A token: its text, its position in the source, and whether it is the name of a local variable."""

    text: str
    start: int
    stop: int
    is_local: bool


def planted(source: str, old: str, new: str, near: str = "") -> str:
    """Return `source` with its only fragment `old` replaced by `new`. Raise ValueError unless there is exactly one.

    near: another fragment in the same function, if `old` alone fits several places, or lacks variables of `new`.

    >>> planted("def f(m, level):\\n    m.add(level, level + 1)", "add(count, count + 1)", "add(count, count)")
    'def f(m, level):\\n    m.add(level, level)'
    """
    places = list(matches(source, old, near))
    if len(places) != 1:
        raise ValueError(f"{old!r} stands {len(places)} times in the source, not once")
    start, stop, names = places[0]
    return source[:start] + with_names(new, names, _globals(source)) + source[stop:]


def matches(source: str, old: str, near: str = "") -> Iterator[tuple[int, int, dict[str, str]]]:
    """Yield start and end of each match of fragment `old` in `source`, and the names of its local variables there."""
    kept = _globals(source)
    there, wanted, context = words(source, kept), words(old, kept), words(near, kept)
    functions = _functions(source)
    anchors = list(_found(there, context, {})) if near else [(0, 0, dict[str, str]())]
    for low, _, known in anchors:
        for start, stop, names in _found(there, wanted, known):
            if not near or functions(start) == functions(low):
                yield start, stop, names


def _found(
    there: Sequence[Word], wanted: Sequence[Word], known: dict[str, str]
) -> Iterator[tuple[int, int, dict[str, str]]]:
    """Yield each match of the words `wanted` in `there`. known: names of some local variables."""
    for at in range(len(there) - len(wanted) + 1):
        part = there[at : at + len(wanted)]
        names = _same(part, wanted, known)
        if names is not None:
            yield part[0].start, part[-1].stop, names


def _functions(source: str) -> Callable[[int], int]:
    """Return a function from a position in `source` to the number of its outermost function or method."""
    tree = ast.parse(source)
    outer = [node for top in tree.body for node in (top.body if isinstance(top, ast.ClassDef) else [top])]
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    begins = [starts[node.lineno - 1] for node in outer]
    return lambda place: bisect_right(begins, place)


def with_names(fragment: str, names: dict[str, str], kept: frozenset[str] | None = None) -> str:
    """Return `fragment` with other names of local variables. kept: names to leave (None: names of a module)."""
    for word in reversed(words(fragment, kept)):
        if word.is_local:
            fragment = fragment[: word.start] + names.get(word.text, word.text) + fragment[word.stop :]
    return fragment


@cache
def words(source: str, kept: frozenset[str] | None = None) -> Sequence[Word]:
    """Return the tokens of `source`, perhaps a fragment, without layout and comments. kept: as for `with_names`."""
    kept = _globals(source) if kept is None else kept
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    tokens = [token for token in _tokens(source) if token.type not in LAYOUT]
    found, depth = [], 0
    for number, token in enumerate(tokens):
        start, stop = (starts[line - 1] + column for line, column in (token.start, token.end))
        is_local = token.type == tokenize.NAME and _is_local(tokens, number, kept, depth > 0)
        found.append(Word(token.string, start, stop, is_local))
        depth += (token.string in ("(", "[", "{")) - (token.string in (")", "]", "}"))
    return found


def _tokens(source: str) -> Iterator[TokenInfo]:
    """Yield the tokens up to the place where brackets or indentation of a fragment do not fit."""
    try:
        yield from tokenize.generate_tokens(io.StringIO(source).readline)
    except (tokenize.TokenError, IndentationError):
        return


def _is_local(tokens: Sequence[TokenInfo], number: int, kept: frozenset[str], in_brackets: bool) -> bool:
    """Return whether a token is the name of a local variable: no keyword, attribute, argument name or global."""
    name = tokens[number].string
    before = tokens[number - 1].string if number else ""
    if keyword.iskeyword(name) or name in kept or before == ".":
        return False
    after = tokens[number + 1].string if number + 1 < len(tokens) else ""
    return not (in_brackets and after == "=" and before in ("(", ","))


@cache
def _globals(source: str) -> frozenset[str]:
    """Return the names that the module binds, those of builtins, and `self`."""
    found = {"self", *dir(builtins)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
    for statement in ast.parse(source).body:
        found.update(node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and _at_top(statement, node))
    return frozenset(found)


def _at_top(statement: ast.stmt, node: ast.Name) -> bool:
    """Return whether a statement of the module itself binds a name."""
    return isinstance(statement, ast.Assign | ast.AnnAssign | ast.For) and isinstance(node.ctx, ast.Store)


def _same(part: Sequence[Word], wanted: Sequence[Word], known: dict[str, str]) -> dict[str, str] | None:
    """Return the names that the local variables of `wanted` have in `part`, if nothing else differs."""
    names = dict(known)
    for mine, other in zip(wanted, part, strict=True):
        if mine.text == other.text and not other.is_local:
            continue  # a fragment may begin behind a dot or within brackets
        if mine.is_local != other.is_local or (not mine.is_local and mine.text != other.text):
            return None
        if mine.is_local and names.setdefault(mine.text, other.text) != other.text:
            return None
    return names if len(set(names.values())) == len(names) else None
