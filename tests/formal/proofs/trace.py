"""Print the end of a counterexample as text."""

from __future__ import annotations

from pathlib import Path

from vcd.reader import TokenKind, tokenize

STEPS = 4
"""Number of cycles that are printed."""


def last_steps(path: Path) -> str:
    """Return the harness' signals in the last cycles of a trace, one line each, with the oldest cycle first."""
    if not path.exists():
        return ""
    names: dict[str, str] = {}
    values: dict[str, str] = {}
    steps: list[dict[str, str]] = []
    depth = 0
    with path.open("rb") as file:
        for token in tokenize(file):
            if token.kind is TokenKind.SCOPE:
                depth += 1
            elif token.kind is TokenKind.UPSCOPE:
                depth -= 1
            elif token.kind is TokenKind.VAR and depth == 1 and token.data.reference.isidentifier():
                names[token.data.id_code] = token.data.reference
            elif token.kind is TokenKind.CHANGE_TIME and values:
                steps.append(dict(values))
            elif token.kind in (TokenKind.CHANGE_SCALAR, TokenKind.CHANGE_VECTOR) and token.data.id_code in names:
                value = token.data.value
                values[names[token.data.id_code]] = f"{value:x}" if isinstance(value, int) else str(value)
    cycles = steps[::2][-STEPS:]  # the clock changes twice a cycle
    shown = sorted(name for name in values if not name.startswith(("clk", "smt_", "assumed")))
    return "\n".join(f"    {name:28} " + "  ".join(f"{cycle.get(name, '-'):>12}" for cycle in cycles) for name in shown)
