"""Cycles that earlier compilations predicted, kept in the cache folder.

Most of the time of a compilation goes into the timing model, which predicts chains of layers to compare blocks and
orders of layers. Such a chain takes the same cycles in each compilation, and in all models that have it. A file holds
the cycles of one Config as the present sources predict them: other sources or another Config have another file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

from celosia.cache import cache_folder, is_own, make_folder, mark_used
from celosia.compiler.layer import Storage
from celosia.compiler.switches import is_on
from celosia.compiler.tensorize.computation import LayerComputation
from celosia.hw.spec.config import Config

VARIABLE = "CELOSIA_REMEMBER"
"""Environment variable; with the value 0, nothing is read from the file and nothing is written to it."""
KIND = "cycles"
"""Subfolder of the cache."""
SOURCES = (
    "compiler", "compiler/expr", "compiler/launch", "compiler/tensorize", "compiler/vthread", "hw/boards", "hw/spec",
    "sim/functional", "sim/timing",
)  # fmt: skip
"""Folders whose sources determine the instructions of a chain of layers and their cycles."""
MAX_BYTES = 4_000_000
"""Size from which a file is begun anew: about 80,000 predictions."""
KEY_DIGITS = 32
"""Digits of the SHA-256 of a key."""


@cache
def _source_digest() -> str:
    """Return a digest of the sources on which predictions depend."""
    root = Path(__file__).parents[2]
    text = b"".join(path.read_bytes() for folder in SOURCES for path in sorted((root / folder).glob("*.py")))
    return hashlib.sha256(text).hexdigest()


def remembered_cycles(cfg: Config) -> RememberedCycles | None:
    """Return the predictions of earlier compilations; None if the user does not want them."""
    return None if os.environ.get(VARIABLE) == "0" else RememberedCycles(cfg)


def constant_pattern(computations: Iterable[LayerComputation]) -> tuple[object, ...]:
    """Return what a prediction depends on of the constants of a chain: which are equal, and their codebooks.

    Equal constants lie once in memory, and are not loaded again while they are in a scratchpad.
    """
    numbers: dict[bytes, int] = {}
    pattern: list[object] = []
    for computation in computations:
        for place in computation.places.values():
            if isinstance(place.home, Storage):
                continue
            pattern.append(numbers.setdefault(place.home.tobytes(), len(numbers)))
            if place.book_bytes:
                pattern.append(place.home[: place.book_bytes].tobytes())
    return tuple(pattern)


class RememberedCycles:
    """Predicted cycles by key, read from a file of the cache and appended to it.

    A file that cannot be read or written is as an empty one.
    """

    def __init__(self, cfg: Config) -> None:
        name = f"{_source_digest()} {cfg.digest} {is_on('memory')}"
        self.path = cache_folder() / KIND / f"{hashlib.sha256(name.encode()).hexdigest()}.txt"
        self._known: dict[str, float] = {}
        self._new: dict[str, float] = {}
        self._size = 0
        if is_own(self.path):
            with suppress(OSError):
                self._read()

    def _read(self) -> None:
        """Read the file; leave out damaged lines, and a last one without an end, which was not written completely."""
        text = self.path.read_bytes()
        self._size = len(text)
        for line in text.decode("ascii", "replace").split("\n")[:-1]:
            key, _, number = line.partition(" ")
            with suppress(ValueError):
                cycles = float(number)
                if len(key) == KEY_DIGITS and cycles >= 0:  # inf: a chain that does not fit
                    self._known[key] = cycles

    def recall(self, predict: Callable[[], float], *parts: object) -> float:
        """Return the cycles under the key `parts`; predict and remember them if they are not known.

        The `repr` of `parts` must hold all that the prediction depends on, besides Config and sources.
        """
        key = hashlib.sha256(repr(parts).encode()).hexdigest()[:KEY_DIGITS]
        if key not in self._known:
            self._known[key] = self._new[key] = predict()
        return self._known[key]

    def save(self) -> None:
        """Append the new predictions to the file."""
        if not self._new:
            return
        text = "".join(f"{key} {cycles!r}\n" for key, cycles in self._new.items())
        with suppress(OSError):
            make_folder(self.path.parent)
            with self.path.open("a" if self._size < MAX_BYTES else "w", encoding="ascii") as file:
                file.write(text)
            self.path.chmod(0o600)
            mark_used(self.path)
        self._new = {}
