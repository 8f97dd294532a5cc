"""Order CPU operators and launches of the accelerator, with as few launches as the graph allows."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.select import LayerAssignment, Partition
from celosia.compiler.graph.values import constant, operands
from celosia.compiler.layer import Activation, Layer, Storage
from celosia.hw.spec.config import Config


@dataclass
class LaunchPlan:
    """One launch.

    choices: its layers, in order. unpacked: tensors that the host unpacks from device memory after it.
    """

    choices: list[LayerAssignment] = field(default_factory=list)
    unpacked: list[ir.Value] = field(default_factory=list)


GraphStep = ir.Node | LaunchPlan
"""A CPU operator, or a view that the host needs, or a launch."""


class Scheduler:
    """List scheduling: run every CPU operator that is ready, then launch every layer that is ready, and repeat.

    steps: the order so far. host: values that the host has. writers: the layers that write each storage.
    """

    def __init__(self, cfg: Config, graph: ir.Graph, partition: Partition) -> None:
        self.cfg, self.graph, self.partition = cfg, graph, partition
        self.steps: list[GraphStep] = []
        self.host: set[ir.Value] = set(graph.inputs)
        self.writers: dict[Storage, list[LayerAssignment]] = {}
        for choice in partition.choices:
            self.writers.setdefault(choice.layer.y.storage, []).append(choice)
        self.launched: dict[int, LaunchPlan] = {}
        """The launch of each layer that is in one, by the id of its assignment."""

    def run(self) -> list[GraphStep]:
        """Return the steps in order. Raises ModelError where a value is never computed."""
        cpu = [node for node in self.graph if node in self.partition.cpu]
        layers = list(self.partition.choices)
        while cpu or layers:
            before = len(cpu) + len(layers)
            cpu = self._add_cpu_operators(cpu)
            layers = self._add_launch(layers)
            if len(cpu) + len(layers) == before:
                node = cpu[0] if cpu else layers[0].nodes[0]
                label = f"{node.op_type} ({node.name or node.outputs[0].name})"
                raise ModelError(f"{label} waits for a value that nothing computes before it")
        for value in self.graph.outputs:
            self._make_available(value)
        return self.steps

    def _add_cpu_operators(self, nodes: list[ir.Node]) -> list[ir.Node]:
        """Append the steps of CPU operators whose operands the host can have; return those that must wait."""
        waiting = []
        for node in nodes:
            values = [value for value in operands(node) if constant(value) is None]
            if not all(self._is_reachable(value) for value in values):
                waiting.append(node)
                continue
            for value in values:
                self._make_available(value)
            self.steps.append(node)
            self.host.update(node.outputs)
        return waiting

    def _add_launch(self, layers: list[LayerAssignment]) -> list[LayerAssignment]:
        """Append one launch of all layers that are ready, if any; return the layers that must wait."""
        plan, waiting = LaunchPlan(), []
        for choice in layers:
            if self._is_ready(choice, plan):
                plan.choices.append(choice)
            else:
                waiting.append(choice)
        if plan.choices:
            for choice in plan.choices:
                for value, _ in choice.reads.values():
                    self._make_available(value)
            self.steps.append(plan)
            self.launched |= {id(choice): plan for choice in plan.choices}
        return waiting

    def _writers_of(self, act: Activation) -> list[LayerAssignment]:
        """Return the layers that write channels of `act`."""
        return [c for c in self.writers.get(act.storage, []) if c.layer.y.overlaps(self.cfg, act)]

    def _is_ready(self, choice: LayerAssignment, plan: LaunchPlan) -> bool:
        """Return whether a layer can join the launch `plan`.

        Its operands must be available to the host, or be written by layers in earlier launches or in `plan`.
        """
        in_plan = {id(other) for other in plan.choices}
        if not all(self._is_reachable(value) for value, _ in choice.reads.values()):
            return False
        device_operands = [act for act in choice.layer.inputs() if act.storage not in choice.reads]
        return all(
            id(writer) in self.launched or id(writer) in in_plan
            for act in device_operands
            for writer in self._writers_of(act)
        )

    # Tensors on the host ---------------------------------------------------------------------------------------

    def _is_reachable(self, value: ir.Value) -> bool:
        """Return whether the host has `value`, or can get it from finished launches or by views of such values."""
        if value in self.host or constant(value) is not None or self._is_complete(value):
            return True
        producer = value.producer()
        if producer is None or producer not in self.partition.views:
            return False
        return all(self._is_reachable(operand) for operand in operands(producer))

    def _is_complete(self, value: ir.Value) -> bool:
        """Return whether layers write `value` in a form that the host can unpack, and all of them are in launches."""
        act = self.partition.written.get(value)
        return (
            act is not None
            and act.strided_view is None
            and all(id(writer) in self.launched for writer in self._writers_of(act))
        )

    def _make_available(self, value: ir.Value) -> None:
        """Make `value` available on the host: unpack it after the launch that completes it, or append steps of
        views."""
        if value in self.host or constant(value) is not None:
            return
        if self._is_complete(value):
            launches = {id(self.launched[id(writer)]) for writer in self._writers_of(self.partition.written[value])}
            plans = [step for step in self.steps if isinstance(step, LaunchPlan) and id(step) in launches]
            plans[-1].unpacked.append(value)
        else:
            producer = value.producer()
            assert producer in self.partition.views
            for operand in operands(producer):
                self._make_available(operand)
            self.steps.append(producer)
            self.host.update(producer.outputs)
        self.host.add(value)


def schedule(cfg: Config, graph: ir.Graph, partition: Partition) -> list[GraphStep]:
    """Return the steps of `graph` in order. Raises ModelError where a value is never computed."""
    return Scheduler(cfg, graph, partition).run()


def layers_and_storages(
    steps: list[GraphStep], partition: Partition
) -> tuple[list[list[Layer]], list[set[Storage]], list[set[Storage]]]:
    """Return (layers, storages that the host packs before, storages that it unpacks after) for all launches."""
    plans = [step for step in steps if isinstance(step, LaunchPlan)]
    launches = [[choice.layer for choice in plan.choices] for plan in plans]
    written = [{storage for choice in plan.choices for storage in choice.reads} for plan in plans]
    read = [{partition.written[value].storage for value in plan.unpacked} for plan in plans]
    return launches, written, read
