"""Derivation of a graph, and progress of a search."""

from __future__ import annotations

from dataclasses import dataclass, field

from celosia.compiler.superoptimise.graph import BytesGraph
from celosia.compiler.superoptimise.price import Price


@dataclass(frozen=True)
class Derived:
    """A step: a rule, what it was applied to, the rules that tidied up behind it, and what the model costs then.

    marks: what it was applied to, as BytesGraph.numbers has it. gain: by estimate."""

    rule: str
    says: str
    where: tuple[str, ...]
    tidied: tuple[str, ...]
    price: Price
    marks: tuple[str, ...] = ()
    gain: float = 0.0


@dataclass(frozen=True)
class KnownStep:
    """A step of an earlier search: the rule, and marks and gain as a Derived has them."""

    rule: str
    marks: tuple[str, ...]
    gain: float


@dataclass(frozen=True)
class Found:
    """A graph, what it costs, and how it came to be. gain: of the last step, by estimate."""

    graph: BytesGraph
    price: Price
    steps: tuple[Derived, ...] = ()
    gain: float = 0.0


@dataclass
class SearchState:
    """Progress of a search. ended: "nothing left", "budget", "known" or "interrupted". bests: seconds after which
    there was a new best, and what it costs; first the original.
    """

    original: Price
    best: Price
    seconds: float = 0.0
    priced: int = 0
    weighed: int = 0
    """Steps of which it is known what they save, by estimate."""
    seen: int = 0
    waiting: int = 0
    ended: str = ""
    bests: list[tuple[float, float]] = field(default_factory=list)
    gains: dict[str, list[float]] = field(default_factory=dict)
    """Estimated savings of each rule, one for each place where it was weighed."""
    tuned: list[float] = field(default_factory=list)
    """Cycles of the original and of the last bests with tuned schedules, where these were searched for."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Faults of devices that weigh no more steps, by name."""
