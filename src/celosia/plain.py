"""Read JSON and TOML files from untrusted sources safely, and print untrusted text on a terminal safely.

Values are bounded in depth, number and size, so that the rest of the program need not check them again.
"""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 100
"""Largest depth of nested lists and objects, so that a recursive function can traverse a value."""
MAX_DIGITS = 40
"""Largest number of digits of an integer."""
MAX_VALUES = 2_000_000
"""Largest number of values in a JSON text. A value of three characters can take 250 bytes in Python: 500 MB at most."""
TOO_DEEP = "its lists and tables are too deep inside each other"
"""Error message for a value deeper than MAX_DEPTH."""


def from_json(text: str | bytes) -> Any:
    """Parse a JSON text.

    ValueError if it is not JSON, is nested too deeply, holds too many values or too large numbers, or holds a text with
    half a character (a lone surrogate), which can be neither written nor printed.

    >>> from_json('{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    """
    require_few_values(text)
    try:
        value = json.loads(text, parse_int=_parse_integer)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    _check(value)
    return value


def require_few_values(text: str | bytes) -> None:
    """Raise ValueError if a JSON text may hold more than MAX_VALUES values, before it is parsed."""
    marks = ",[{"
    count = sum(map(text.count, marks)) if isinstance(text, str) else sum(map(text.count, marks.encode()))
    if count > MAX_VALUES:
        raise ValueError(f"it holds more than {MAX_VALUES} values")


def from_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text; the table may hold dates. ValueError as `from_json`. Needs Python 3.11.

    >>> from_toml("a = [1, 2.5]")
    {'a': [1, 2.5]}
    """
    import tomllib

    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except ValueError as error:
        if isinstance(error, tomllib.TOMLDecodeError):
            raise
        raise ValueError("a number has thousands of digits") from None  # Python refuses to convert it
    _check(table)
    return table


def abbreviate(value: object) -> str:
    """Return the `repr` of a value for a message, cut after 60 characters.

    >>> abbreviate("cat"), abbreviate(10**5000), len(abbreviate("cat" * 100))
    ("'cat'", 'a number of more than 40 digits', 63)
    """
    if isinstance(value, int) and _is_too_large(value):
        return f"a number of more than {MAX_DIGITS} digits"
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[:_MAX_VALUE_LENGTH]}..."


_MAX_VALUE_LENGTH = 60
"""Characters of a value in a message; a longer one is cut."""


def _is_too_large(number: int) -> bool:
    return bool(abs(number) >= 10**MAX_DIGITS)


def _parse_integer(digits: str) -> int:
    """Convert the digits of a JSON integer. ValueError for too many."""
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _check(value: Any) -> None:
    """Raise ValueError for a value of `from_json` or `from_toml` that is out of bounds.

    The loop visits the value level by level, as recursion could exceed Python's limit.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += (*item.keys(), *item.values())
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str) and not item.isascii():
                try:
                    item.encode()
                except UnicodeEncodeError:
                    raise ValueError(f"{item[:40]!a} has half a character") from None
            elif isinstance(item, int) and _is_too_large(item):
                raise ValueError(f"a number has more than {MAX_DIGITS} digits")
        if not below:
            return
        level = below
    raise ValueError(TOO_DEEP)


def printable(text: str) -> str:
    """Return a text as one line of printable characters, which a terminal shows and does not interpret.

    Control characters, ends of lines, marks that reverse the direction of text, and halves of characters become
    escapes.

    >>> printable("bold\\x1b[1m\\n") == "bold\\\\x1b[1m\\\\n", printable("größe ✓")
    (True, 'größe ✓')
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def printable_lines(text: str) -> str:
    """Apply `printable` to each line of a text."""
    return "\n".join(map(printable, text.split("\n")))


MAX_MESSAGE_LENGTH = 1000
"""Largest length of an error message, in characters. Errors quote names, which a file can make as long as it likes."""


def shorten(text: str) -> str:
    """Return `text`, without its middle if it is longer than MAX_MESSAGE_LENGTH."""
    half = MAX_MESSAGE_LENGTH // 2
    return text if len(text) <= MAX_MESSAGE_LENGTH else f"{text[:half]} ... {text[-half:]}"


class Sentence(Exception):
    """Base class of errors whose message is one line of bounded length and printable characters.

    >>> str(Sentence("no input 'a\\x1b[1m'")), len(str(Sentence("x" * 10**6)))
    ("no input 'a\\\\x1b[1m'", 1005)
    """

    def __str__(self) -> str:
        return shorten(printable(super().__str__()))


class Sentences(Exception):
    """Base class of errors as `Sentence`, but with several lines, for the output of a tool."""

    def __str__(self) -> str:
        return shorten(printable_lines(super().__str__()))
