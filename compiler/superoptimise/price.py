"""Price of a model: cycles of its launches by the timing model, and an estimate of what is left to the CPU; of
one for the CPU alone, what its kernels take there (measured.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple, Protocol

import onnx

from celosia.compiler.graph.cpu_cost import host_cycles
from celosia.compiler.graph.select import Partition
from celosia.compiler.launch.image import Image
from celosia.compiler.tune.measure import TIMED
from celosia.compiler.tune.network import Network


@dataclass(frozen=True)
class Price:
    """cycles: of all launches. host: of operators on the CPU, in the same cycles, roughly; where it is measured,
    nanoseconds of this processor."""

    cycles: float
    host: float
    measured: bool = False

    @property
    def total(self) -> float:
        """What a search compares."""
        return self.cycles + self.host

    def less(self, gain: float) -> Price:
        """After a step that saves so much, wherever it does."""
        if self.measured:
            return replace(self, host=self.host - gain)
        return replace(self, cycles=self.cycles - gain)

    def __str__(self) -> str:
        return f"{self.host / 1e6:,.3f} ms" if self.measured else f"{self.cycles:,.0f} cycles"


PriceModel = Callable[[onnx.ModelProto], Price]


class Awaited(Protocol):
    """A price that others find out."""

    def ready(self) -> bool:
        """Whether it is there, or nobody is left who could find it."""
        ...

    def price(self) -> Price | None:
        """What it is; UNMEASURED where whoever looked for it gave no answer, None where nobody did. Of one that is
        ready."""
        ...


class Pricing(NamedTuple):
    """whole: of a model. part: of a part of one, where less will do. anew: what the second of two models, or of two
    parts, saves when both are measured anew, by turns; None where nothing is measured. tuned: of a model whose
    schedules are searched for first; None where they shall not be. elsewhere: begins to price a part somewhere else, as
    `part` does here, while this process goes on; None where nobody else does. helpers: how many do."""

    whole: PriceModel
    part: PriceModel
    anew: Callable[[onnx.ModelProto, onnx.ModelProto], float] | None = None
    tuned: Callable[[onnx.ModelProto], float] | None = None
    elsewhere: Callable[[onnx.ModelProto], Awaited] | None = None
    helpers: int = 0


INFEASIBLE, UNMEASURED = Price(inf, inf), Price(inf, inf)
"""Prices of a model that does not compile, and of one of which nobody knows whether it does."""


def price_of(network: Network, image: Image, selection: Partition) -> Price:
    """Price of a model whose operators are placed by `selection`. image: of the network's launches."""
    cycles = network.cycles(image, TIMED) if network.launches else 0
    return Price(cycles, sum(host_cycles(node, selection.cpu) for node in selection.cpu))
