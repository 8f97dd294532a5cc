"""Move operators from the accelerator to the CPU: those that the caller names, and launches slower than CPU kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from celosia.compiler.graph.cost import BYTES_A_CYCLE, bytes_of, host_cycles
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.launches import LaunchPlan
from celosia.compiler.graph.select import Partition
from celosia.compiler.launch.image import Image
from celosia.compiler.tune.layer_trial import TIMED
from celosia.hw.spec.config import Config, did_you_mean
from celosia.sim.timing import predict

CPU, ACCELERATOR, COST = "cpu", "accelerator", "cost"
"""Places that a user can ask for; COST: wherever an operator takes less time."""
ALL = "*"
"""Stands for the names of all operators that have no place of their own."""
LAUNCH_CYCLES = 2_000
"""Cycles of the host for each launch, roughly: registers that it writes and reads, 20 us at 100 MHz."""


@dataclass(frozen=True)
class LaunchCost:
    """Estimated cycles of a launch (transfers included) and of its operators `nodes` as CPU kernels instead."""

    nodes: tuple[ir.Node, ...]
    accelerator: int
    cpu: int

    @property
    def reason(self) -> str:
        """Both costs in words, as the reason of a placement."""
        return f"{self.cpu:,} cycles on the CPU, roughly, and {self.accelerator:,} on the accelerator with transfers"

    def __str__(self) -> str:
        first, last = (node.name or node.op_type for node in (self.nodes[0], self.nodes[-1]))
        return f"{first}{f' to {last}' if len(self.nodes) > 1 else ''}: {self.reason}"


@dataclass(frozen=True)
class PlacementRequest:
    """The placement of operators that a caller asks for.

    places: name of an operator -> CPU or ACCELERATOR; for ALL also COST. accelerator: False puts every operator on the
    CPU. Raises ModelError for another place.
    """

    places: Mapping[str, str] = field(default_factory=dict)
    accelerator: bool = True

    def __post_init__(self) -> None:
        for name, place in self.places.items():
            sides = (CPU, ACCELERATOR, COST) if name == ALL else (CPU, ACCELERATOR)
            if place not in sides:
                raise ModelError(f"{name!r} cannot be placed on {place!r}; take {' or '.join(sides)}")

    def refused(self, graph: ir.Graph) -> dict[ir.Node, str]:
        """Return the operators that stay on the CPU, with the reason. Raises ModelError for a name of no operator."""
        names = {node.name or "" for node in graph}
        for name in self.places:
            if name not in names and name != ALL:
                raise ModelError(
                    f"there is no operator {name!r} to place{did_you_mean(name, names)}; `celosia inspect --operators` "
                    "has their names, which passes over the graph may have changed"
                )
        if not self.accelerator:
            return dict.fromkeys(graph, "compiled for the CPU alone")
        return {node: "placed on the CPU" for node in graph if self._place_of(node) == CPU}

    def _place_of(self, node: ir.Node) -> str | None:
        """Return the place asked for `node`, by its name or by ALL; None if there is none."""
        return self.places.get(node.name or "", self.places.get(ALL))

    def require(self, graph: ir.Graph, partition: Partition) -> None:
        """Raise ModelError if an operator is not in the place that was asked for by its name."""
        for node in graph:
            place = self.places.get(node.name or "")
            if place == ACCELERATOR and node in partition.cpu:
                raise ModelError(
                    f"operator {node.name!r} ({node.op_type}) cannot be on the accelerator: {partition.cpu[node]}"
                )
            if place == CPU and node not in partition.cpu:
                raise ModelError(
                    f"operator {node.name!r} ({node.op_type}) cannot be placed: it changes no bytes, and is wherever "
                    "its operand is"
                )

    def launch_costs(self, cfg: Config, launches: Sequence[LaunchPlan], image: Image) -> list[LaunchCost]:
        """Return the cost of each launch on the accelerator and on the CPU if COST is asked for; else [].

        A launch costs its cycles by the timing model, its transfers and LAUNCH_CYCLES; the CPU what `host_cycles` says.
        """
        if self.places.get(ALL) != COST:
            return []
        costs = []
        for plan, launch in zip(launches, image.launches, strict=True):
            nodes = tuple(node for choice in plan.choices for node in choice.nodes)
            cycles = predict(cfg, image.code(launch).tobytes(), TIMED.memory, launch.address).cycles
            cycles += LAUNCH_CYCLES + round(2 * _transferred_bytes(plan) / BYTES_A_CYCLE)
            costs.append(LaunchCost(nodes, cycles, round(sum(host_cycles(node, nodes) for node in nodes))))
        return costs

    def refused_by_cost(self, costs: Sequence[LaunchCost]) -> dict[ir.Node, str]:
        """Return the operators of launches that take less time on the CPU, with the reason.

        A launch with an operator that the caller put on the accelerator stays there.
        """
        return {
            node: f"weighed: {cost.reason}"
            for cost in costs
            if cost.cpu < cost.accelerator
            and not any(self.places.get(node.name or "") == ACCELERATOR for node in cost.nodes)
            for node in cost.nodes
        }


def _transferred_bytes(plan: LaunchPlan) -> int:
    """Return the bytes that the host packs for a launch and unpacks after it."""
    packed = {value for choice in plan.choices for value, _ in choice.reads.values()}
    return sum(map(bytes_of, (*packed, *plan.unpacked)))
