"""Move operators from the accelerator to the CPU: those that the caller names, and launches slower than CPU kernels."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.launches import LaunchPlan
from celosia.compiler.graph.select import Partition
from celosia.compiler.launch.lowering import Lowered
from celosia.compiler.superoptimise.price import BYTES_A_CYCLE, bytes_of, host_cycles
from celosia.compiler.tune.layer_trial import TIMED
from celosia.hw.spec.config import Config, did_you_mean
from celosia.sim.timing import predict

CPU, ACCELERATOR, COST = "cpu", "accelerator", "cost"
ALL = "*"
"""In place of an operator's name: all that nobody has placed."""
LAUNCH_CYCLES = 2_000
"""Cycles of the host around a launch, roughly: registers that it writes and reads, 20 us at 100 MHz."""


@dataclass
class PlacementRequest:
    """Placement that a caller asks for: by operators' names, CPU or ACCELERATOR; for ALL also COST.

    weighed: sentences on launches, once `slower_on_accelerator` has looked at them.
    """

    place: Mapping[str, str]
    weighed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, where in self.place.items():
            sides = (CPU, ACCELERATOR, COST) if name == ALL else (CPU, ACCELERATOR)
            if where not in sides:
                raise ModelError(f"{name!r} cannot be placed on {where!r}; take {' or '.join(sides)}")

    def refused(self, graph: ir.Graph) -> dict[ir.Node, str]:
        """Operators that stay on the CPU, with the reason. ModelError where there is none of a name."""
        names = {node.name or "" for node in graph}
        for name in self.place:
            if name not in names and name != ALL:
                raise ModelError(
                    f"there is no operator {name!r} to place{did_you_mean(name, names)}; `celosia inspect --operators` "
                    "has their names, which passes over the graph may have changed"
                )
        return {node: "placed on the CPU" for node in graph if self._where(node) == CPU}

    def _where(self, node: ir.Node) -> str | None:
        return self.place.get(node.name or "", self.place.get(ALL))

    def require(self, graph: ir.Graph, selection: Partition) -> None:
        """ModelError where an operator is not where it was placed by its name."""
        for node in graph:
            where = self.place.get(node.name or "")
            if where == ACCELERATOR and node in selection.cpu:
                raise ModelError(
                    f"operator {node.name!r} ({node.op_type}) cannot be on the accelerator: {selection.cpu[node]}"
                )
            if where == CPU and node not in selection.cpu:
                raise ModelError(
                    f"operator {node.name!r} ({node.op_type}) cannot be placed: it changes no bytes, and is wherever "
                    "its operand is"
                )

    def slower_on_accelerator(self, cfg: Config, lowered: Lowered) -> dict[ir.Node, str]:
        """Operators of launches that the CPU would be done with sooner, with the reason; none unless COST is asked for.

        A launch takes its cycles by the timing model, its transfers and LAUNCH_CYCLES; the CPU what `host_cycles` says.
        """
        found: dict[ir.Node, str] = {}
        if self.place.get(ALL) != COST:
            return found
        plans = [step for step in lowered.steps if isinstance(step, LaunchPlan)]
        for plan, launch in zip(plans, lowered.image.launches):
            nodes = [node for choice in plan.choices for node in choice.nodes]
            there = predict(cfg, lowered.image.code(launch).tobytes(), TIMED.memory, launch.address).cycles
            there += LAUNCH_CYCLES + round(2 * _moved(plan) / BYTES_A_CYCLE)
            here = round(sum(host_cycles(node, nodes) for node in nodes))
            text = f"{here:,} cycles on the CPU, roughly, and {there:,} on the accelerator with transfers"
            names = [node.name or node.op_type for node in nodes]
            self.weighed[names[0]] = f"{names[0]}{f' to {names[-1]}' if len(names) > 1 else ''}: {text}"
            if here < there and not _pinned(nodes, self.place):
                found |= dict.fromkeys(nodes, f"weighed: {text}")
        return found


def _pinned(nodes: Collection[ir.Node], place: Mapping[str, str]) -> bool:
    return any(place.get(node.name or "") == ACCELERATOR for node in nodes)


def _moved(plan: LaunchPlan) -> int:
    """Bytes that the host packs and takes."""
    given = {value for choice in plan.choices for value, _ in choice.reads.values()}
    return sum(map(bytes_of, (*given, *plan.taken)))
