"""Lower a graph to layers, instructions and CPU operators, with several attempts if necessary.

Each attempt places operators (`select`), forms blocks, orders launches, overlaps layers with convolutions, chooses
tilings and generates instructions. An attempt that fails returns Constraints, which say what to do differently, and
`retry` tries again under them. Which operators stay on the CPU because the caller wants it, or because their launch
would be slower, is decided by a PlacementRequest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from typing import TypeVar

import onnx_ir as ir

from celosia.compiler.frontend import PreparedModel
from celosia.compiler.graph.cost import BYTES_A_CYCLE, bytes_of, host_cycles, total_macs
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.launches import GraphStep, LaunchPlan, layers_and_storages, schedule
from celosia.compiler.graph.operands import custom
from celosia.compiler.graph.select import Partition, select
from celosia.compiler.graph.select.placement import UNCONSTRAINED, Constraints
from celosia.compiler.launch.blocks import form_blocks
from celosia.compiler.launch.image import Image, LayerErrors
from celosia.compiler.launch.order import order_layers, timed_cycles
from celosia.compiler.layer import Layer
from celosia.compiler.options import Options
from celosia.compiler.tensorize.plan import Planner, ScheduleFile
from celosia.compiler.tensorize.remembered_cycles import remembered_cycles
from celosia.compiler.tune.layer_trial import TIMED
from celosia.compiler.tune.network import Network, TuningDecisions, known_chains
from celosia.compiler.tune.records import Records, shipped
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

    def require_places(self, graph: ir.Graph, partition: Partition) -> None:
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
        """Return the cost of launches on the accelerator and on the CPU: of all if COST is asked for.

        Otherwise only those count that have neither products nor operators of the user's own, if the model has
        products: a sum or copy between operators of the CPU may take less time there than the start of a launch. A
        launch costs its cycles by the timing model, its transfers and LAUNCH_CYCLES; the CPU what `host_cycles` says.
        """
        weighs_all = self.places.get(ALL) == COST
        graph = next((node.graph for plan in launches for choice in plan.choices for node in choice.nodes), None)
        has_macs = isinstance(graph, ir.Graph) and total_macs(graph) > 0
        multiplies = [
            any(choice.layer.macs or any(custom(node) is not None for node in choice.nodes) for choice in plan.choices)
            for plan in launches
        ]
        costs = []
        for plan, launch, has_products in zip(launches, image.launches, multiplies, strict=True):
            if not weighs_all and (has_products or not (has_macs or any(multiplies))):
                continue
            nodes = tuple(node for choice in plan.choices for node in choice.nodes)
            cycles = predict(cfg, image.code(launch).tobytes(), TIMED.memory, launch.address).cycles
            cycles += LAUNCH_CYCLES + round(2 * _transferred_bytes(plan) / BYTES_A_CYCLE)
            costs.append(LaunchCost(nodes, cycles, round(sum(host_cycles(node, nodes) for node in nodes))))
        return costs

    def engine_costs(self, cfg: Config, launches: Sequence[LaunchPlan], planner: Planner) -> list[LaunchCost]:
        """Return the cost of each softmax and normalisation in its engine, and on the CPU, which splits the launch.

        All layers of an operator are timed as one launch, since they overlap. The CPU also costs the transfers of
        operand and result, and the start of a second launch.
        """
        layers: dict[tuple[ir.Node, ...], list[Layer]] = {}
        for choice in (choice for plan in launches for choice in plan.choices):
            if choice.layer.works_on_rows:
                layers.setdefault(tuple(choice.nodes), []).append(choice.layer)
        costs = []
        for nodes, own_layers in layers.items():
            cycles = timed_cycles(cfg, planner, own_layers)
            if isfinite(cycles):
                moved = sum(
                    bytes_of(value) for value in (nodes[0].inputs[0], nodes[-1].outputs[0]) if value is not None
                )
                cpu = LAUNCH_CYCLES + 2 * moved / BYTES_A_CYCLE + sum(host_cycles(node, nodes) for node in nodes)
                costs.append(LaunchCost(nodes, round(cycles), round(cpu)))
        return costs

    def refused_by_cost(self, costs: Sequence[LaunchCost]) -> dict[ir.Node, str]:
        """Return the operators of launches that take less time on the CPU, with the reason.

        A launch with an operator that the caller put on the accelerator stays there.
        """
        return {
            node: f"weighed: {cost.reason}"
            for cost in costs
            if cost.cpu < cost.accelerator and not any(self._place_of(node) == ACCELERATOR for node in cost.nodes)
            for node in cost.nodes
        }


def _transferred_bytes(plan: LaunchPlan) -> int:
    """Return the bytes that the host packs for a launch and unpacks after it."""
    packed = {value for choice in plan.choices for value, _ in choice.reads.values()}
    return sum(map(bytes_of, (*packed, *plan.unpacked)))


Result = TypeVar("Result")
ANYWHERE, COMPILER_DECIDES = PlacementRequest(), TuningDecisions()
"""Defaults of `lower`: the user asks for no placement; no tuning decides tilings."""


@dataclass(frozen=True)
class Lowered:
    """A lowered graph.

    partition: where each operator runs. steps: CPU operators and launches in order. network: the layers of all
    launches, with the planner that schedules them. image: the DRAM image of the accelerator's part. notes:
    sentences on tilings that records decided, and on launches that were compared with the CPU.
    """

    partition: Partition
    steps: list[GraphStep]
    network: Network
    image: Image
    notes: str

    @property
    def launches(self) -> list[LaunchPlan]:
        """The launches among the steps."""
        return [step for step in self.steps if isinstance(step, LaunchPlan)]


def retry(attempt: Callable[[Constraints], Result | Constraints], constraints: Constraints = UNCONSTRAINED) -> Result:
    """Repeat `attempt` under the constraints that it returns, until it returns a result.

    It ends, since each attempt adds constraints on operators or tensors, and the graph does not change.
    """
    result = attempt(constraints)
    while isinstance(result, Constraints):
        result = attempt(result)
    return result


def place(model: ir.Model, cfg: Config) -> Partition:
    """Choose the operators that run on the accelerator; whether their layers have a tiling is not considered."""
    return retry(partial(select, model, cfg))


def lower(
    cfg: Config, model: ir.Model, planner: Planner, *, request: PlacementRequest = ANYWHERE,
    decided: Collection[str] = (), schedules: TuningDecisions = COMPILER_DECIDES,
    say: Callable[[str], None] = lambda stage: None,
) -> Lowered:  # fmt: skip
    """Lower `model`, which passes have prepared (graph/pipeline.py). The graph does not change.

    An operator whose layer has no tiling goes to the CPU. request: placement that the caller asks for. decided: names
    of layers and blocks that must be formed, since a file of tilings names them. schedules: tilings from tuning. say:
    called with the name of each stage.

    Raises ModelError if `request` cannot be met.
    """
    attempt = partial(_try_to_lower, cfg, model, planner, request, frozenset(decided), schedules, say)
    lowered = retry(attempt, Constraints(request.refused(model.graph)))
    request.require_places(model.graph, lowered.partition)
    return lowered


def _try_to_lower(
    cfg: Config, model: ir.Model, planner: Planner, request: PlacementRequest, decided: frozenset[str],
    schedules: TuningDecisions, say: Callable[[str], None], constraints: Constraints,
) -> Lowered | Constraints:  # fmt: skip
    """Lower the graph once under `constraints`. Returns further constraints if that fails."""
    partition = select(model, cfg, constraints)
    if isinstance(partition, Constraints):
        return partition
    say("blocks of layers")
    planner = planner.with_policy(form_blocks(cfg, partition, planner, constraints.unblocked, decided))
    planner.forget_others(choice.layer for choice in partition.choices)
    steps = schedule(cfg, model.graph, partition)
    launches = [step for step in steps if isinstance(step, LaunchPlan)]
    planner = _order_launches(cfg, launches, planner)
    say("tiling and instructions")
    network = Network(cfg, *layers_and_storages(steps, partition), planner)
    try:
        image, sentence = schedules.build(network)
    except LayerErrors as errors:
        return _constraints_from(errors, launches, constraints)
    if sentence:
        say(sentence)
    costs = request.launch_costs(cfg, launches, image)
    compared = list(dict.fromkeys((*constraints.compared, *map(str, costs))))
    slower = request.refused_by_cost(costs) or request.refused_by_cost(request.engine_costs(cfg, launches, planner))
    if slower:
        return constraints.refuse(slower, compared=compared)
    return Lowered(partition, steps, network, image, "; ".join(filter(None, (sentence, *compared))))


def _order_launches(cfg: Config, launches: list[LaunchPlan], planner: Planner) -> Planner:
    """Order the layers of each launch, in place, so that they overlap. Returns a planner that knows which overlap."""
    overlapped = set[str]()
    for launch in launches:
        order, names = order_layers(cfg, planner, [choice.layer for choice in launch.choices])
        launch.choices = [launch.choices[number] for number in order]
        overlapped |= names
    return planner.with_policy(replace(planner.policy, overlapped=frozenset(overlapped))) if overlapped else planner


def _constraints_from(errors: LayerErrors, launches: list[LaunchPlan], constraints: Constraints) -> Constraints:
    """Return constraints for layers without a tiling: blocks are taken apart, operators of other layers go to the
    CPU."""
    refused: dict[ir.Node, str] = {}
    unblocked: set[ir.Node] = set()
    for (number, layer), reason in errors.reasons.items():
        choice = launches[number].choices[layer]
        if choice.layer.is_block and not constraints.unblocked.issuperset(choice.nodes):
            unblocked.update(choice.nodes)
        else:
            refused |= dict.fromkeys(choice.nodes, reason)
    return constraints.refuse(refused, unblocked)


def planner_for(prepared: PreparedModel, options: Options, records: Records | None) -> Planner:
    """Return the planner of layers under the options of `compile`.

    It uses the caller's file of tilings. Without one it knows the cycles of chains of layers that records hold, and
    those that earlier compilations predicted. Raises DecisionsError for a file that is none.
    """
    file = None if options.decisions is None else ScheduleFile.load(options.decisions, prepared.cfg)
    planner = Planner(prepared.cfg, file)
    if records is not None and file is None:
        planner.timed |= known_chains(prepared.cfg, shipped(prepared.cfg))
    if file is None:
        planner.remembered = remembered_cycles(prepared.cfg)
    return planner


def lower_prepared(
    prepared: PreparedModel, planner: Planner, options: Options, records: Records | None = None
) -> Lowered:
    """Lower a prepared model under the options of `compile`. records: decide tilings that `tuned` does not."""
    options.say("placing operators")
    file = planner.policy.given
    lowered = lower(
        prepared.cfg, prepared.graph, planner, request=PlacementRequest(options.place, options.accelerator),
        decided=file.layers if isinstance(file, ScheduleFile) else (),
        schedules=TuningDecisions(options.tuned, records), say=options.say,
    )  # fmt: skip
    if isinstance(file, ScheduleFile):
        file.require_all_used()
    if planner.remembered is not None:
        planner.remembered.save()
    return lowered
