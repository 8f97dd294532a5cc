"""Which layers run as blocks: chains in which each layer alone reads what the one before it makes.

A block's intermediates stay in scratchpads. Chains are cut where that costs the fewest cycles, by dynamic programming
over the estimates of single layers and of blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx_ir as ir

from celosia.compiler.graph.select import Choice, Selection
from celosia.compiler.layer import Block, Conv, Layer, Untileable, inputs, padded_groups
from celosia.compiler.tensorize import block_space, pack
from celosia.compiler.tensorize.block_space import BlockProblem
from celosia.compiler.tensorize.define import define, depthwise
from celosia.compiler.tensorize.space import Problem, choose, estimate
from celosia.hw.config import Config

LONGEST = 5
"""Layers of a block."""


def form_blocks(
    cfg: Config, selection: Selection, apart: Collection[ir.Node] = (), decided: Collection[str] = ()
) -> None:
    """Put chains of `selection` together as blocks.

    apart: operators whose layers are in no block. decided: names of layers and blocks that are to be as they are.
    """
    if not cfg.forward:
        return
    for chain in list(_chains(cfg, selection, frozenset(apart))):
        for part in _cut(cfg, chain, frozenset(decided)):
            if len(part) > 1:
                _join(selection, part)


def _chains(cfg: Config, selection: Selection, apart: frozenset[ir.Node]) -> Iterator[list[Choice]]:
    """The longest chains of at least two layers."""
    choices = selection.choices
    following: dict[int, Choice] = {}
    for before in choices:
        reader = _only_reader(cfg, before, choices)
        if reader is not None and apart.isdisjoint((*before.nodes, *reader.nodes)):
            following[id(before)] = reader
    later = {id(choice) for choice in following.values()}
    for choice in choices:
        if id(choice) in later or id(choice) not in following:
            continue
        chain = [choice]
        while id(chain[-1]) in following:
            chain.append(following[id(chain[-1])])
        yield chain


def _only_reader(cfg: Config, before: Choice, choices: list[Choice]) -> Choice | None:
    """The choice that alone reads what `before` makes, where both can be in a block."""
    layer = before.layer
    y = layer.y
    if not _fits(cfg, layer) or layer.epilogue.residual is not None:
        return None
    if before.value.is_graph_output() or y.group_offset or y.storage_groups != padded_groups(cfg, y.channels):
        return None
    if any(other.layer.y.storage is y.storage for other in choices if other is not before):
        return None
    readers = [other for other in choices if any(act.storage is y.storage for act in inputs(other.layer))]
    if len(readers) != 1 or not _fits(cfg, readers[0].layer) or readers[0].layer.x != y:
        return None
    residual = readers[0].layer.epilogue.residual
    if residual is not None and residual.operand.storage is y.storage:
        return None
    nodes = readers[0].nodes
    return readers[0] if all(use.node in nodes for use in before.value.uses()) else None


def _fits(cfg: Config, layer: Layer) -> bool:
    """Whether `layer` can be in a block: a convolution of images, of all channels or of each alone."""
    if not isinstance(layer, Conv) or layer.x.height * layer.x.width == 1:
        return False
    return depthwise(cfg, layer) or layer.groups == 1 and len(pack.runs(cfg, layer)) == 1


def _cut(cfg: Config, chain: list[Choice], decided: frozenset[str]) -> list[list[Choice]]:
    """The parts of `chain` that cost least together."""
    best: list[tuple[float, list[list[Choice]]]] = [(0.0, [])]
    for end in range(1, len(chain) + 1):
        options = []
        for start in range(max(0, end - LONGEST), end):
            part = chain[start:end]
            cost = _cost(cfg, [choice.layer for choice in part], decided)
            if cost is not None:
                options.append((best[start][0] + cost, [*best[start][1], part]))
        best.append(min(options, key=lambda option: option[0]))
    return best[-1][1]


def _cost(cfg: Config, layers: list[Layer], decided: frozenset[str]) -> float | None:
    """Cycles of `layers` as one; None where that cannot be."""
    layer = layers[0] if len(layers) == 1 else Block(tuple(each for each in layers if isinstance(each, Conv)))
    if layer.name in decided:
        return -1e12
    try:
        return sum(_cycles(cfg, definition.problem) for definition in define(cfg, layer))
    except Untileable:
        return 1e12 if len(layers) == 1 else None  # alone, it says so itself


def _cycles(cfg: Config, problem: Problem | BlockProblem) -> float:
    if isinstance(problem, Problem) and problem.in_blocks:
        return estimate(cfg, problem, choose(cfg, problem))
    block = problem if isinstance(problem, BlockProblem) else BlockProblem((problem,))
    return block_space.estimate(cfg, block, block_space.choose(cfg, block))


def _join(selection: Selection, part: list[Choice]) -> None:
    """Put a part of a chain together as one choice, in the place of the last."""
    for choice in part[:-1]:
        for known in (selection.forms, selection.written):
            del known[choice.value]  # type: ignore[attr-defined]
    layers = tuple(choice.layer for choice in part if isinstance(choice.layer, Conv))
    notes = "; ".join(choice.note for choice in part if choice.note)
    reads = {storage: source for choice in part for storage, source in choice.reads.items()}
    nodes = [node for choice in part for node in choice.nodes]
    block = Choice(Block(layers), nodes, reads, part[-1].value, notes)
    selection.choices[selection.choices.index(part[-1])] = block
    inside = {id(choice) for choice in part}
    selection.choices[:] = [choice for choice in selection.choices if id(choice) not in inside]
