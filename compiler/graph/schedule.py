"""The order of the program: CPU operators and launches of the accelerator, as few launches as the graph allows."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from celosia.compiler.graph.importer import ModelError
from celosia.compiler.graph.select import Choice, Selection
from celosia.compiler.graph.values import captured, constant
from celosia.compiler.tensorize.layer import inputs


@dataclass
class LaunchPlan:
    """Layers of one launch; the tensors that the host packs before it and takes after it."""

    choices: list[Choice] = field(default_factory=list)
    taken: list[ir.Value] = field(default_factory=list)


Step = ir.Node | LaunchPlan
"""A CPU operator (views included, where the host needs them), or a launch."""


class Scheduler:
    """Runs every CPU operator that can run, then every layer that can run, and so on."""

    def __init__(self, graph: ir.Graph, selection: Selection) -> None:
        self.graph, self.selection = graph, selection
        self.steps: list[Step] = []
        self.host: set[str] = {value.name or "" for value in graph.inputs}
        self.written: dict[str, list[Choice]] = {}
        for choice in selection.choices:
            self.written.setdefault(choice.layer.y.storage, []).append(choice)
        self.done: list[Choice] = []
        self.on_device: set[str] = set()

    def run(self) -> list[Step]:
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
            values = [value for value in _operands(node) if constant(value) is None]
            if not all(self._reachable(value) for value in values):
                waiting.append(node)
                continue
            for value in values:
                self._bring(value)
            self.steps.append(node)
            self.host.update(out.name or "" for out in node.outputs)
        return waiting

    def _launch(self, layers: list[Choice]) -> list[Choice]:
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
            self.done += plan.choices
            self.on_device |= {name for choice in plan.choices for name in self._finished(choice)}
        return waiting

    def _finished(self, choice: Choice) -> list[str]:
        """Names of tensors that are complete on the accelerator now that `choice` has run."""
        names = [choice.layer.y.name]
        storage = choice.layer.y.storage
        if all(other in self.done for other in self.written[storage]):
            names.append(storage)
        return names

    def _ready(self, choice: Choice, plan: LaunchPlan) -> bool:
        for act in inputs(choice.layer):
            if act.name in choice.reads:
                if not self._reachable(choice.reads[act.name][0]):
                    return False
                continue
            writers = self.written.get(act.storage, [])
            own = [writer for writer in writers if writer.layer.y.name == act.name] or writers
            if not all(writer in self.done or writer in plan.choices for writer in own):
                return False
        return True

    # Tensors on the host ---------------------------------------------------------------------------------------

    def _reachable(self, value: ir.Value) -> bool:
        """Whether the host has `value` or can take it from finished launches."""
        name = value.name or ""
        if name in self.host or constant(value) is not None or name in self.on_device:
            return True
        producer = value.producer()
        if producer is None or producer not in self.selection.views or producer.inputs[0] is None:
            return False
        return self._reachable(producer.inputs[0])

    def _bring(self, value: ir.Value) -> None:
        """Add what makes `value` available on the host."""
        name = value.name or ""
        if name in self.host or constant(value) is not None:
            return
        if name in self.on_device:
            launch = next(
                step for step in reversed(self.steps)
                if isinstance(step, LaunchPlan)
                and any(name in (choice.layer.y.name, choice.layer.y.storage) for choice in step.choices)
            )  # fmt: skip
            launch.taken.append(value)
        else:
            producer = value.producer()
            assert producer is not None and producer.inputs[0] is not None
            self._bring(producer.inputs[0])
            self.steps.append(producer)
        self.host.add(name)


def _operands(node: ir.Node) -> list[ir.Value]:
    """Inputs of `node`, and what its subgraphs read from around them."""
    return [value for value in (*node.inputs, *captured(node)) if value is not None]


def schedule(graph: ir.Graph, selection: Selection) -> list[Step]:
    return Scheduler(graph, selection).run()
