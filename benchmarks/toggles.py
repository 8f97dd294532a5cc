"""How many bits toggle: a waveform (VCD, as Verilator and Icarus write it) read as a stream, cycle by cycle."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

MOST_BITS = 4096
"""Of a signal; what is wider is a memory, not a signal."""


class WaveError(ValueError):
    """A file that is no waveform, or has no such signal; one sentence."""


@dataclass
class Toggles:
    """Toggles of one part of a design. bits: of its signals. working, waiting: toggles of all of them in cycles of
    either kind, of which there were so many."""

    bits: int = 0
    working: int = 0
    waiting: int = 0
    working_cycles: int = 0
    waiting_cycles: int = 0

    def rate(self, working: bool) -> float:
        """Toggles of one bit in a cycle; 0 where there was no such cycle."""
        toggles, cycles = (
            (self.working, self.working_cycles) if working else (self.waiting, self.waiting_cycles)
        )  # fmt: skip
        return toggles / cycles / self.bits if cycles and self.bits else 0.0


@dataclass
class _Design:
    """The signals of a waveform by their codes. parts, bits: of each. named: codes by scopes and name."""

    parts: dict[str, str] = field(default_factory=dict)
    bits: dict[str, int] = field(default_factory=dict)
    named: dict[tuple[str, ...], str] = field(default_factory=dict)


def toggles(
    lines: Iterable[str], part_of: Callable[[tuple[str, ...]], str | None], clock: tuple[str, ...],
    works: Mapping[str, Callable[[Mapping[tuple[str, ...], int]], bool]], watched: Iterable[tuple[str, ...]] = (),
    counts: Callable[[Mapping[tuple[str, ...], int]], bool] = lambda values: True,
) -> dict[str, Toggles]:  # fmt: skip
    """Toggles of each part between rising edges of `clock`.

    A signal is its scopes and its name, `("top", "gemm", "sum")`; several names of one net count once, for the part of
    the first that is of any. part_of: the part of a signal, None for those that do not count; `clock` never does.
    works: of a part, whether it works in a cycle, by the values of the signals that are `watched`; a part without is
    always working. counts: whether a cycle counts at all. What is undefined toggles when it becomes defined. WaveError.
    """
    stream = iter(lines)
    design = _declared(stream, part_of)
    watched = tuple(watched)
    for name in (clock, *watched):
        if name not in design.named:
            raise WaveError(f"the waveform has no signal {'.'.join(name)}")
    edge = design.named[clock]
    design.parts.pop(edge, None)
    found = {part: Toggles() for part in design.parts.values()}
    for code, part in design.parts.items():
        found[part].bits += design.bits[code]
    values: dict[str, int] = {}
    now = dict.fromkeys(found, 0)
    started = False
    for batch in _changes(stream):
        if batch.get(edge) == 1 and not values.get(edge):
            seen = {name: values.get(design.named[name], 0) for name in watched}  # as they are until this edge
            if started and counts(seen):
                _add(found, now, works, seen)
            started, now = True, dict.fromkeys(found, 0)
        for code, value in batch.items():
            if code in design.parts and code in values:
                now[design.parts[code]] += (values[code] ^ value).bit_count()
            values[code] = value
    return found


def _add(
    found: dict[str, Toggles], now: Mapping[str, int],
    works: Mapping[str, Callable[[Mapping[tuple[str, ...], int]], bool]], seen: Mapping[tuple[str, ...], int],
) -> None:  # fmt: skip
    """A cycle, which is over."""
    for part, toggled in found.items():
        if part not in works or works[part](seen):
            toggled.working += now[part]
            toggled.working_cycles += 1
        else:
            toggled.waiting += now[part]
            toggled.waiting_cycles += 1


def _declared(lines: Iterator[str], part_of: Callable[[tuple[str, ...]], str | None]) -> _Design:
    design, scopes = _Design(), list[str]()
    for line in lines:
        words = line.split()
        if not words:
            continue
        if words[0] == "$scope" and len(words) > 2:
            scopes.append(words[2])
        elif words[0] == "$upscope" and scopes:
            scopes.pop()
        elif words[0] == "$var" and len(words) > 4:
            _, _, bits, code, name, *_ = words
            if int(bits) > MOST_BITS or re.search(r"\[\d+\]|\(\d+\)", name):
                continue  # a word of a memory
            path = (*scopes, name.partition("[")[0])
            design.named.setdefault(path, code)
            part = part_of(path)
            if part is not None and code not in design.parts:
                design.parts[code], design.bits[code] = part, int(bits)
        elif words[0] == "$enddefinitions":
            return design
    raise WaveError("it is no waveform: its definitions do not end")


def _changes(lines: Iterator[str]) -> Iterator[dict[str, int]]:
    """Yield the values that change at one time, by code; an undefined value is 0."""
    batch: dict[str, int] = {}
    for line in lines:
        first = line[:1]
        if first == "#" and batch:
            yield batch
            batch = {}
        elif first and first in "01xXzZ":
            batch[line[1:].strip()] = int(first == "1")
        elif first in ("b", "B"):
            digits, _, code = line[1:].strip().partition(" ")
            batch[code.strip()] = int(digits.translate(_DEFINED), 2)
    if batch:
        yield batch


_DEFINED = str.maketrans("xXzZ", "0000")
