"""Parse JSON and TOML files from untrusted sources to plain values of bounded size."""

from __future__ import annotations

import json
from typing import Any

DEEPEST = 100
"""Lists and objects inside each other: what goes through a value may call itself for each."""
MOST_DIGITS = 40
"""Most digits of a whole number: more fit neither a float nor a message."""
MOST_VALUES = 2_000_000
"""Values of one JSON text. Python takes up to 250 bytes for one of three characters: this bounds a text to 500 MB."""
TOO_DEEP = "its lists and tables are too deep inside each other"


def from_json(text: str | bytes) -> Any:
    """Parse a JSON text. ValueError where it is none, nests too deep, holds too many values, has a number that is too
    large, or text with halves of characters, which no file and no terminal takes.

    >>> from_json('{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    """
    require_few_values(text)
    try:
        value = json.loads(text, parse_int=_whole)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    _check(value)
    return value


def require_few_values(text: str | bytes) -> None:
    """Raise ValueError where a JSON text may hold more than MOST_VALUES values, before any memory is taken for them."""
    marks = ",[{"
    count = sum(map(text.count, marks)) if isinstance(text, str) else sum(map(text.count, marks.encode()))
    if count > MOST_VALUES:
        raise ValueError(f"it holds more than {MOST_VALUES} values")


def from_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text, which may hold dates, too. ValueError as `from_json`. Needs Python 3.11.

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
        raise ValueError("a number has thousands of digits") from None  # which Python does not read
    _check(table)
    return table


def brief(value: object) -> str:
    """Shorten a value for a message.

    >>> brief("cat"), brief(10**5000), len(brief("cat" * 100))
    ("'cat'", 'a number of more than 40 digits', 63)
    """
    if isinstance(value, int) and _too_large(value):
        return f"a number of more than {MOST_DIGITS} digits"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


_SHOWN = 60
"""Characters of a value in a message."""


def _too_large(number: int) -> bool:
    return bool(abs(number) >= 10**MOST_DIGITS)


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _check(value: Any) -> None:
    """Check depth, size and values, level by level."""
    level = [value]
    for _ in range(DEEPEST):
        below: list[Any] = []
        for nested in level:
            if isinstance(nested, dict):
                below += (*nested.keys(), *nested.values())
            elif isinstance(nested, list):
                below += nested
            elif isinstance(nested, str) and not nested.isascii():
                try:
                    nested.encode()
                except UnicodeEncodeError:
                    raise ValueError(f"{nested[:40]!a} has half a character") from None
            elif isinstance(nested, int) and _too_large(nested):
                raise ValueError(f"a number has more than {MOST_DIGITS} digits")
        if not below:
            return
        level = below
    raise ValueError(TOO_DEEP)


def printable(text: str) -> str:
    r"""Write a name as one line that is safe on any terminal: escapes for control characters, marks that turn the
    direction of text around, ends of lines and halves of characters.

    >>> printable("bold\x1b[1m\n") == "bold\\x1b[1m\\n", printable("größe ✓")
    (True, 'größe ✓')
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def lines(text: str) -> str:
    """Apply `printable` to each line of a text."""
    return "\n".join(map(printable, text.split("\n")))


LONGEST = 1000
"""Characters of an error: a model, a file or a board may hold names of any length, which errors quote."""


def shortened(text: str) -> str:
    """Shorten a long `text` in its middle."""
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} ... {text[-half:]}"


class Sentence(Exception):
    r"""An error whose message is one line of bounded length, safe on any terminal.

    >>> str(Sentence("no input 'a\x1b[1m'")), len(str(Sentence("x" * 10**6)))
    ("no input 'a\\x1b[1m'", 1005)
    """

    def __str__(self) -> str:
        return shortened(printable(super().__str__()))


class Sentences(Exception):
    """An error as `Sentence`, of several lines: the output of a tool."""

    def __str__(self) -> str:
        return shortened(lines(super().__str__()))
