"""Lower the graph to layers and code. If a layer has no tiling, put it on the CPU and start over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from celosia.compiler.graph.launches import LaunchPlan, Step, layers_of, schedule
from celosia.compiler.graph.select import Partition, select
from celosia.compiler.launch.blocks import form_blocks
from celosia.compiler.launch.image import Image, LayerErrors, build
from celosia.compiler.launch.order import order_layers
from celosia.compiler.layer import Layer, Storage
from celosia.compiler.tensorize.plan import Planner
from celosia.hw.spec.config import Config

LaunchLayers = tuple[list[list[Layer]], list[set[Storage]], list[set[Storage]]]
"""Layers of each launch, and the storages that the host fills before it and takes after it."""


@dataclass(frozen=True)
class Lowered:
    """A model after placement and code generation: the partition, the steps in order, and the accelerator's image.

    planner: with the policy that decided the layers' tilings.
    """

    selection: Partition
    steps: list[Step]
    plan: LaunchLayers
    planner: Planner
    image: Image


def lower(
    cfg: Config, model: ir.Model, planner: Planner, refused: Mapping[ir.Node, str] = {},
    decided: Collection[str] = (), say: Callable[[str], None] = lambda stage: None,
    made: Callable[[LaunchLayers, Planner], Image] | None = None,
) -> Lowered:  # fmt: skip
    """Place the operators of `model`, after graph.pipeline.PASSES, and lower them. The graph stays as it is.

    refused: operators that stay on the CPU, with the reason; what fits no tiling joins them. decided: names of layers
    and blocks that are to be as they are. made: makes the image of the layers; by default
    `build`.
    """
    on_cpu = dict(refused)
    apart: set[ir.Node] = set()
    while True:
        selection = select(model, cfg, on_cpu)
        say("blocks of layers")
        found = planner.with_policy(form_blocks(cfg, selection, planner, apart, decided))
        steps = schedule(cfg, model.graph, selection)
        found = _in_order(cfg, steps, found)
        say("tiling and instructions")
        try:
            plan = layers_of(steps, selection)
            image = build(cfg, *plan, found) if made is None else made(plan, found)
            return Lowered(selection, steps, plan, found, image)
        except LayerErrors as errors:
            plans = [step for step in steps if isinstance(step, LaunchPlan)]
            for (number, layer), reason in errors.reasons.items():
                choice = plans[number].choices[layer]
                if choice.layer.is_block and not apart.issuperset(choice.nodes):
                    apart.update(choice.nodes)
                else:
                    on_cpu |= dict.fromkeys(choice.nodes, reason)


def _in_order(cfg: Config, steps: list[Step], planner: Planner) -> Planner:
    """Order the layers of each launch so that they overlap; returns the planner that knows which do so."""
    overlapped = set[str]()
    for step in steps:
        if isinstance(step, LaunchPlan):
            order, names = order_layers(cfg, planner, [choice.layer for choice in step.choices])
            step.choices = [step.choices[number] for number in order]
            overlapped |= names
    if not overlapped:
        return planner
    return planner.with_policy(replace(planner.policy, overlapped=frozenset(overlapped)))
