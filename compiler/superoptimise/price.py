"""Price of a model: cycles of its launches by the timing model, and an estimate of what is left to the CPU; of
one for the CPU alone, what its kernels take there (measured.py)."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from math import inf, prod
from typing import NamedTuple, Protocol

import onnx
import onnx_ir as ir

from celosia.compiler.cpu.ops import traits
from celosia.compiler.graph.cost import total_macs
from celosia.compiler.graph.select import Partition
from celosia.compiler.graph.values import constant, operands, shape
from celosia.compiler.launch.image import Image
from celosia.compiler.program.traits import Moves
from celosia.compiler.tune.layer_trial import TIMED
from celosia.compiler.tune.network import Network

BYTES_A_CYCLE, MACS_A_CYCLE = 4, 4
"""Speed of a processor beside the accelerator, in the accelerator's cycles: what it moves, and what it multiplies."""
STEP_CYCLES = 200
"""Cycles of an operator on the CPU, beside that."""


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


def host_cycles(node: ir.Node, cpu: Container[ir.Node]) -> float:
    """Cost of an operator on the CPU, in the accelerator's cycles, roughly. cpu: operators that are there.

    Each operand is read once and each result written once. What takes parts of a tensor reads no more than these,
    and is a part of the kernels that read it, where these are the CPU's."""
    moved = sum(map(bytes_of, node.outputs))
    if traits(node.op_type).moves is Moves.SOME:
        readers = [use.node for out in node.outputs for use in out.uses()]
        if readers and all(reader in cpu for reader in readers) and not any(o.is_graph_output() for o in node.outputs):
            return 0
        return STEP_CYCLES + 2 * moved / BYTES_A_CYCLE
    moved += sum(bytes_of(value) for value in operands(node) if constant(value) is None)
    macs = total_macs([node])  # type: ignore[arg-type]
    return STEP_CYCLES + moved / BYTES_A_CYCLE + macs / MACS_A_CYCLE


def bytes_of(value: ir.Value) -> int:
    """Bytes of a tensor; 0 where its shape is not known, and of strings."""
    sizes, kind = shape(value), value.dtype
    if sizes is None or kind is None or kind in (ir.DataType.STRING, ir.DataType.UNDEFINED):
        return 0
    return int(prod(sizes) * kind.itemsize)
