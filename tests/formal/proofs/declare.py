"""Declare a property of the hardware, and list all properties."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Method(Enum):
    INDUCTION = "k-induction"
    """The property holds forever: in the first `depth` cycles, and in each cycle after `depth` in which it held."""
    BOUNDED = "bounded"
    """The property holds in the first `depth` cycles."""
    NETLIST = "netlist"
    """The property follows from the paths through the gates; no solver is needed."""


@dataclass(frozen=True)
class Mutant:
    """A planted fault: in `file` below hw/, `old`, which must occur once, becomes `new`, as in `plant.planted`."""

    file: str
    old: str
    new: str
    near: str = ""

    def __str__(self) -> str:
        return f"{self.file.split('/')[-1]}: {self.old} → {self.new}"


@dataclass(frozen=True)
class Property:
    """A property of the hardware, with the mutants that it must find.

    build: returns a `Harness`, or with NETLIST the offending paths, one sentence each.
    depth: k of the induction, or the bound. reach: number of cycles in which it must find the mutants.
    script: commands for Yosys between reading and preparing the design.
    cases: several easier questions that together equal one that is too hard; `build` gets the number of one.
    sample: the cases that the tests try; without any, they leave the property out. `make prove` tries all cases.
    planted: the case in which mutants are tried.
    tested: True if the tests try it, False if only `make prove` does.
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
    """Declare the decorated function as a property. reach: 0 for `depth`, but at least 12."""

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
    """Return every property, in the order of the table."""
    modules = (
        "semaphores addresses fifos order stages hazards scratchpads accumulators bytes bursts handshakes writes "
        "copies ends expand decoder requantiser softmax war_hazard norm pump runs"
    )
    for module in modules.split():
        importlib.import_module(f"proofs.{module}")
    return PROPERTIES
