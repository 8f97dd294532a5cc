"""Steps of a derivation, the graphs that they lead to, and the progress of a search."""

from __future__ import annotations

from dataclasses import dataclass, field

from celosia.compiler.superoptimise.graph import BytesGraph
from celosia.compiler.superoptimise.price import Price


@dataclass(frozen=True)
class DerivationStep:
    """One step of a derivation: a rule applied in one place.

    rule, says: its name and law. where: tensors that it replaced. tidied: rules that simplified the graph afterwards.
    price: of the model after the step. value_numbers: of the tensors in `where` (BytesGraph.value_numbers), by which a
    later search finds the place again. gain: estimated saving, in cycles or nanoseconds.
    """

    rule: str
    says: str
    where: tuple[str, ...]
    tidied: tuple[str, ...]
    price: Price
    value_numbers: tuple[str, ...] = ()
    gain: float = 0.0


@dataclass(frozen=True)
class KnownStep:
    """A step that an earlier search recorded: the rule, with value_numbers and gain as in a DerivationStep."""

    rule: str
    value_numbers: tuple[str, ...]
    gain: float


@dataclass(frozen=True)
class DerivedGraph:
    """A graph, its price (estimated or exact), and the steps that lead to it. gain: estimated saving of the last
    step.
    """

    graph: BytesGraph
    price: Price
    steps: tuple[DerivationStep, ...] = ()
    gain: float = 0.0


@dataclass
class SearchState:
    """Progress of a search, for reports.

    original, best: prices. seconds: since the start. priced: graphs whose exact price is known. seen: different graphs.
    waiting: graphs in the queue. ended: "" while it runs, then "nothing left", "budget", "known" or "interrupted".
    bests: (seconds, price) of each new best, the original first.
    """

    original: Price
    best: Price
    seconds: float = 0.0
    priced: int = 0
    weighed: int = 0
    """Steps whose saving is estimated."""
    seen: int = 0
    waiting: int = 0
    ended: str = ""
    bests: list[tuple[float, float]] = field(default_factory=list)
    gains: dict[str, list[float]] = field(default_factory=dict)
    """Estimated savings of each rule, one for each place where it was weighed."""
    tuned: list[float] = field(default_factory=list)
    """Cycles with tuned schedules of the original and of the last bests, where Pricing tunes."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Why devices weigh no more steps, by device name."""
