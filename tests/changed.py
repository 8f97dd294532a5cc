"""Change one random value in JSON data."""

from __future__ import annotations

import random
from typing import Any


def change(value: Any, rng: random.Random) -> None:
    """Change one value somewhere inside a tree of dictionaries and lists."""
    while True:
        keys = [k for k in (value if isinstance(value, dict) else range(len(value))) if k != "sha256"]
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(value[key], dict | list) and value[key] and rng.random() < 0.9:
            value = value[key]
            continue
        if rng.random() < 0.1:
            del value[key]
        else:
            value[key] = _other(value[key], rng)
        return


def _other(value: Any, rng: random.Random) -> Any:
    if isinstance(value, int) and rng.random() < 0.7:
        return rng.choice((0, 1, -1, value + 1, value - 1, 2 * value, 1 << 20, 1 << 31, 1 << 62, 1 << 70, -value))
    if isinstance(value, str) and rng.random() < 0.7:
        return rng.choice(("", "x", value + "x", value[:-1], "float64", "int8", "../x", "\0", "x" * 300))
    return rng.choice((None, True, 0, -1, 1.5, float("nan"), "x", [], {}, [1 << 40], [-1], {"a": 1}, value))
