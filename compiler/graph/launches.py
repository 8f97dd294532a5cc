"""The order of the program: CPU operators and launches of the accelerator, as few launches as the graph allows."""

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
    """Layers of one launch; the tensors that the host packs before it and takes after it."""

    choices: list[LayerAssignment] = field(default_factory=list)
    taken: list[ir.Value] = field(default_factory=list)


Step = ir.Node | LaunchPlan
"""A CPU operator (views included, where the host needs them), or a launch."""


class Scheduler:
    """Runs every CPU operator that can run, then every layer that can run, and so on."""

    def __init__(self, cfg: Config, graph: ir.Graph, selection: Partition) -> None:
        self.cfg, self.graph, self.selection = cfg, graph, selection
        self.steps: list[Step] = []
        self.host: set[ir.Value] = set(graph.inputs)
        self.writers: dict[Storage, list[LayerAssignment]] = {}
        for choice in selection.choices:
            self.writers.setdefault(choice.layer.y.storage, []).append(choice)
        self.launched: dict[int, LaunchPlan] = {}
        """The launch of each choice that is in one, by the choice's id."""

    def run(self) -> list[Step]:
        """The steps in order. ModelError where a value is never computed."""
        cpu = [node for node in self.graph if node in self.selection.cpu]
        layers = list(self.selection.choices)
        while cpu or layers:
            before = len(cpu) + len(layers)
            cpu = self._run_cpu(cpu)
            layers = self._launch(layers)
            if len(cpu) + len(layers) == before:
                node = cpu[0] if cpu else layers[0].nodes[0]
                label = f"{node.op_type} ({node.name or node.outputs[0].name})"
                raise ModelError(f"{label} waits for a value that nothing computes before it")
        for value in self.graph.outputs:
            self._bring(value)
        return self.steps

    def _run_cpu(self, nodes: list[ir.Node]) -> list[ir.Node]:
        waiting = []
        for node in nodes:
            values = [value for value in operands(node) if constant(value) is None]
            if not all(self._reachable(value) for value in values):
                waiting.append(node)
                continue
            for value in values:
                self._bring(value)
            self.steps.append(node)
            self.host.update(node.outputs)
        return waiting

    def _launch(self, layers: list[LayerAssignment]) -> list[LayerAssignment]:
        plan, waiting = LaunchPlan(), []
        for choice in layers:
            if self._ready(choice, plan):
                plan.choices.append(choice)
            else:
                waiting.append(choice)
        if plan.choices:
            for choice in plan.choices:
                for value, _ in choice.reads.values():
                    self._bring(value)
            self.steps.append(plan)
            self.launched |= {id(choice): plan for choice in plan.choices}
        return waiting

    def _makers(self, act: Activation) -> list[LayerAssignment]:
        """The layers that write channels of `act`."""
        return [c for c in self.writers.get(act.storage, []) if c.layer.y.overlaps(self.cfg, act)]

    def _ready(self, choice: LayerAssignment, plan: LaunchPlan) -> bool:
        inside = {id(other) for other in plan.choices}
        if not all(self._reachable(value) for value, _ in choice.reads.values()):
            return False
        held = [act for act in choice.layer.inputs() if act.storage not in choice.reads]
        return all(id(maker) in self.launched or id(maker) in inside for act in held for maker in self._makers(act))

    # Tensors on the host ---------------------------------------------------------------------------------------

    def _reachable(self, value: ir.Value) -> bool:
        """Whether the host has `value` or can take it from finished launches."""
        if value in self.host or constant(value) is not None or self._is_complete(value):
            return True
        producer = value.producer()
        if producer is None or producer not in self.selection.views:
            return False
        return all(self._reachable(operand) for operand in operands(producer))

    def _is_complete(self, value: ir.Value) -> bool:
        """Whether layers write `value` where the host takes it from, and all of them are in launches."""
        act = self.selection.written.get(value)
        return (
            act is not None
            and act.strided_view is None
            and all(id(maker) in self.launched for maker in self._makers(act))
        )

    def _bring(self, value: ir.Value) -> None:
        """Add what makes `value` available on the host."""
        if value in self.host or constant(value) is not None:
            return
        if self._is_complete(value):
            makers = {id(self.launched[id(maker)]) for maker in self._makers(self.selection.written[value])}
            plans = [step for step in self.steps if isinstance(step, LaunchPlan) and id(step) in makers]
            plans[-1].taken.append(value)
        else:
            producer = value.producer()
            assert producer in self.selection.views
            for operand in operands(producer):
                self._bring(operand)
            self.steps.append(producer)
            self.host.update(producer.outputs)
        self.host.add(value)


def schedule(cfg: Config, graph: ir.Graph, selection: Partition) -> list[Step]:
    """The steps of `graph` in order. ModelError where a value is never computed."""
    return Scheduler(cfg, graph, selection).run()


def layers_of(
    steps: list[Step], selection: Partition
) -> tuple[list[list[Layer]], list[set[Storage]], list[set[Storage]]]:
    """The layers of each launch, and the storages that the host fills before it and takes after it."""
    plans = [step for step in steps if isinstance(step, LaunchPlan)]
    launches = [[choice.layer for choice in plan.choices] for plan in plans]
    written = [{storage for choice in plan.choices for storage in choice.reads} for plan in plans]
    read = [{selection.written[value].storage for value in plan.taken} for plan in plans]
    return launches, written, read
