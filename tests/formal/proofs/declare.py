"""What a property is, and the list of all."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Method(Enum):
    INDUCTION = "k-induction"
    """Holds for ever: in the first `depth` cycles, and in each cycle that follows `depth` cycles in which it held."""
    BOUNDED = "bounded"
    """Holds in the first `depth` cycles."""
    NETLIST = "netlist"
    """Follows from the paths through the gates; there is nothing to solve."""


@dataclass(frozen=True)
class Mutant:
    """A planted fault: `old`, which stands once in `file` below hw/, becomes `new`, as `plant.planted` says."""

    file: str
    old: str
    new: str
    near: str = ""

    def __str__(self) -> str:
        return f"{self.file.split('/')[-1]}: {self.old} → {self.new}"


@dataclass(frozen=True)
class Property:
    """`build` gives a `Harness`; with NETLIST it gives the offending paths, one sentence each.

    depth: k of the induction or the bound. reach: cycles in which the mutants must be found.
    script: commands for Yosys between reading and preparing the design.
    cases: where one question is too hard, several easier ones that together are the same: `build` is given one of them.
    sample: the cases that the tests try, which leave out a property of which there are none; `make prove` tries all.
    planted: the case with which mutants are tried.
    tested: the tests try it, too; else `make prove` alone does.
    """

    name: str
    build: Callable[..., Any]
    method: Method
    depth: int
    reach: int
    mutants: tuple[Mutant, ...]
    script: tuple[str, ...] = ()
    cases: tuple[int, ...] = ()
    sample: tuple[int, ...] = ()
    planted: int | None = None
    tested: bool = True


PROPERTIES: dict[str, Property] = {}


def prove(
    name: str,
    *mutants: Mutant,
    depth: int = 2,
    method: Method = Method.INDUCTION,
    reach: int = 0,
    script: tuple[str, ...] = (),
    cases: Sequence[int] = (),
    sample: Sequence[int] = (),
    planted: int | None = None,
    tested: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declares the decorated function as a property. `reach` 0: as deep as `depth`, but at least 12."""

    def declare(build: Callable[..., Any]) -> Callable[..., Any]:
        if name in PROPERTIES:
            raise ValueError(f"there are two properties {name!r}")
        if not mutants:
            raise ValueError(f"property {name!r} has no mutant")
        PROPERTIES[name] = Property(
            name, build, method, depth, reach or max(depth, 12), mutants, script, tuple(cases), tuple(sample), planted,
            tested,
        )  # fmt: skip
        return build

    return declare


def all_properties() -> dict[str, Property]:
    """Every property, in the order of the table."""
    modules = (
        "semaphores addresses fifos order stages hazards scratchpads accumulators bytes bursts handshakes writes "
        "copies ends expand decoder requantiser softmax war_hazard norm pump runs"
    )
    for module in modules.split():
        importlib.import_module(f"proofs.{module}")
    return PROPERTIES
