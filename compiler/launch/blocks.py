"""Choose the layers that run as blocks: chains in which each layer alone reads what the one before it makes.

A block's intermediates stay in scratchpads. Chains are cut where that takes the fewest cycles: dynamic programming over
the estimates of layers and blocks finds the best few ways, the timing model takes one of them.

Time is linear in layers: a chain is looked at in pieces of AT_ONCE layers, what has been timed is remembered by layers
and decisions, and where one decision of a block changes, only the groups around it are timed.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf, isfinite

import onnx_ir as ir

from celosia.compiler.graph.select import LayerAssignment, Partition
from celosia.compiler.launch import chains
from celosia.compiler.launch.attentions import attentions
from celosia.compiler.layer import Activation, Layer, Storage, TilingError, group_names, padded_groups
from celosia.compiler.switches import is_on
from celosia.compiler.tensorize import block_space, pack
from celosia.compiler.tensorize.block_space import BlockWorkload
from celosia.compiler.tensorize.decide import SchedulePolicy
from celosia.compiler.tensorize.plan import Planner
from celosia.compiler.tensorize.roofline import choose, estimate
from celosia.compiler.tensorize.space import Tiling, Workload
from celosia.hw.spec.config import Config

LONGEST = 5
"""Layers of a block."""
AT_ONCE = 6 * LONGEST
"""Layers of a chain that are looked at together, and so those of a block whose images stay on chip."""
KEPT = 2
"""Ways to cut a chain that are kept."""
REFINED = 0.2
"""Share of a network's multiplications from which on a block's tiles are chosen by the timing model."""
AROUND = 2
"""Groups of a block before and after one whose tile is chosen that are timed with it."""
WORTH_A_LOOK = 1.1
"""How many times the cycles of the best way another one may take, by the estimates, to be timed."""

BUSY = 1.005
"""How many times the cycles of its products a chain may take for no other way to cut it to be looked at."""


def form_blocks(
    cfg: Config, selection: Partition, planner: Planner, apart: Collection[ir.Node] = (),
    decided: Collection[str] = (),
) -> SchedulePolicy:  # fmt: skip
    """Put chains of `selection` together as blocks; what decides layers then.

    apart: operators whose layers are in no block. decided: names of layers and blocks that are to be as they are.
    """
    if not cfg.forward or not is_on("blocks"):
        return planner.decider
    cutter = _Cutter(cfg, planner, frozenset(decided), [choice.layer for choice in selection.choices])
    blocks: list[tuple[Sequence[LayerAssignment], LayerAssignment]] = []
    for chain in _chains(cfg, selection, frozenset(apart)):
        for first in range(0, len(chain), AT_ONCE):
            parts = [part for part in cutter.cut(chain[first : first + AT_ONCE]) if len(part.choices) > 1]
            blocks += [(part.choices, cutter.noted(part, _joined(selection, part))) for part in parts]
    _put(selection, blocks)
    _put(selection, list(_with_maps(cfg, selection, cutter, frozenset(apart))))
    _put(selection, list(_of_attention(cfg, selection, cutter, frozenset(apart))))
    return cutter.decider


def _put(selection: Partition, blocks: Sequence[tuple[Sequence[LayerAssignment], LayerAssignment]]) -> None:
    """Put blocks into `selection`, in the places of the last of the choices that each is made of."""
    place = {id(choices[-1]): block for choices, block in blocks}
    inside = {id(choice) for choices, _ in blocks for choice in choices[:-1]}
    selection.choices[:] = [place.get(id(choice), choice) for choice in selection.choices if id(choice) not in inside]


def _with_maps(
    cfg: Config, selection: Partition, cutter: _Cutter, apart: frozenset[ir.Node]
) -> Iterator[tuple[Sequence[LayerAssignment], LayerAssignment]]:
    """Convolutions, with maps behind them which alone read what they make, where that takes fewer cycles as a block."""
    readers = _readers(selection.choices)
    for choice in selection.choices:
        found, chain = [choice], [choice]
        while _is_product(cfg, choice.layer) and (reader := _read_by(cfg, found[-1], readers, apart)) is not None:
            layer = behind(reader.layer, found[-1].layer.y)
            if layer is None:
                break
            found.append(reader)
            chain.append(replace(reader, layer=layer))
        while len(chain) > 1 and len(parts := cutter.kept(_Part(tuple(chain)))) > 1:
            found, chain = found[:-1], chain[:-1]
        if len(chain) > 1:
            yield found, cutter.noted(parts[0], _joined(selection, parts[0]))


def _of_attention(
    cfg: Config, selection: Partition, cutter: _Cutter, apart: frozenset[ir.Node]
) -> Iterator[tuple[Sequence[LayerAssignment], LayerAssignment]]:
    """Heads whose products and softmaxes take fewer cycles as a block, beside what comes before them."""
    for found in attentions(cfg, selection, apart):
        part, before = _Part(found.stages), [choice.layer for choice in found.before]
        start = cutter.once(before) if before else 0
        together, alone = cutter.once([*before, part.layer]) - start, cutter.once(found.one_by_one) - start
        fixed = not cutter.decided.isdisjoint(choice.layer.name for choice in found.heads)
        if part.layer.name in cutter.decided or (together < alone and not fixed):
            yield found.heads, _with_cycles(_joined(selection, part), together, alone)


def _is_product(cfg: Config, layer: Layer) -> bool:
    """A convolution whose output blocks read all input blocks."""
    gemm = layer.gemm
    return gemm is not None and gemm.groups == 1 and len(pack.runs(cfg, gemm)) == 1


def behind(layer: Layer, y: Activation) -> Layer | None:
    """`layer` as one that follows what makes `y` in each tile: a map of it, or one with it, through vin, as B."""
    if not layer.is_map:
        return None
    epilogue, residual = layer.epilogue, layer.epilogue.residual
    if residual is None:
        return layer
    operand = residual.operand
    if operand.dims != layer.x.dims:  # one of them is a row for all
        return None
    if operand == y:
        return layer
    if epilogue.table is not None or epilogue.clip != (-128, 127):
        return None
    turned = replace(residual, operand=y, scale_v=residual.scale_b, scale_b=residual.scale_v)
    return replace(layer, x=operand, epilogue=replace(epilogue, residual=turned))


def _chains(cfg: Config, selection: Partition, apart: frozenset[ir.Node]) -> Iterator[list[LayerAssignment]]:
    """The longest chains of at least two layers."""
    choices, readers = selection.choices, _readers(selection.choices)
    following: dict[int, LayerAssignment] = {}
    for before in choices:
        reader = _read_by(cfg, before, readers, apart) if _can_hand_on(cfg, before.layer) else None
        if reader is not None and _fits(cfg, reader.layer) and reader.layer.x == before.layer.y:
            following[id(before)] = reader
    later = {id(choice) for choice in following.values()}
    for choice in choices:
        if id(choice) in later or id(choice) not in following:
            continue
        chain = [choice]
        while id(chain[-1]) in following:
            chain.append(following[id(chain[-1])])
        yield chain


def _readers(choices: Iterable[LayerAssignment]) -> dict[Storage, tuple[int, list[LayerAssignment]]]:
    """By storage, how many write it, and those that read it."""
    found: dict[Storage, tuple[int, list[LayerAssignment]]] = {}
    for choice in choices:
        count, readers = found.get(choice.layer.y.storage, (0, []))
        found[choice.layer.y.storage] = count + 1, readers
    for choice in choices:
        for storage in {act.storage for act in choice.layer.inputs()}:
            found.setdefault(storage, (0, []))[1].append(choice)
    return found


def _read_by(
    cfg: Config,
    before: LayerAssignment,
    readers: Mapping[Storage, tuple[int, list[LayerAssignment]]],
    apart: frozenset[ir.Node],
) -> LayerAssignment | None:
    """The choice that alone reads what `before` alone makes, all of it, once."""
    y = before.layer.y
    makers, found = readers[y.storage]
    if before.value.is_graph_output() or y.group_offset or y.storage_groups != padded_groups(cfg, y.channels):
        return None
    if makers != 1 or len(found) != 1 or not apart.isdisjoint((*before.nodes, *found[0].nodes)):
        return None
    read = [act for act in found[0].layer.inputs() if act.storage is y.storage]
    nodes = found[0].nodes
    once = len(read) == 1 and read[0] == y
    return found[0] if once and all(use.node in nodes for use in before.value.uses()) else None


def _can_hand_on(cfg: Config, layer: Layer) -> bool:
    """Whether the next layer of a block may read what `layer` makes."""
    return _fits(cfg, layer) and layer.epilogue.residual is None


def _fits(cfg: Config, layer: Layer) -> bool:
    """Whether `layer` can be in a block: a pooling, or a convolution of all channels or of each alone, of images."""
    if (layer.gemm is None and not layer.reduce) or layer.x.height * layer.x.width == 1:
        return False
    if layer.reduce:
        return layer.epilogue.residual is None
    if not layer.macs:
        return False  # an average, which costs nothing where it runs beside another convolution
    return layer.is_depthwise(cfg) or _is_product(cfg, layer)


@dataclass(frozen=True)
class _Part:
    """Choices that run as one layer; cuts: see Layer.block."""

    choices: tuple[LayerAssignment, ...]
    cuts: tuple[int, ...] = ()

    @cached_property
    def layer(self) -> Layer:
        layers = tuple(choice.layer for choice in self.choices)
        return layers[0] if len(layers) == 1 else Layer.block(layers, self.cuts)

    def then(self, other: _Part) -> _Part:
        """Both, with what lies between them whole in a scratchpad."""
        here = len(self.choices)
        return _Part(self.choices + other.choices, (*self.cuts, here, *(here + cut for cut in other.cuts)))

    def groups(self, first: int, end: int) -> _Part:
        """Those groups of it."""
        bounds = [0, *self.cuts, len(self.choices)][first : end + 1]
        return _Part(self.choices[bounds[0] : bounds[-1]], tuple(bound - bounds[0] for bound in bounds[1:-1]))


class _Cutter:
    """Finds the parts of a chain that take the fewest cycles together.

    The estimates of layers and blocks say which ways to cut are worth a look; the timing model decides among those, and
    leaves apart what takes longer as a block behind the layer before it.
    """

    def __init__(self, cfg: Config, planner: Planner, decided: frozenset[str], layers: Sequence[Layer]) -> None:
        """layers: of the network, in their order."""
        self.cfg, self.planner, self.decided = cfg, planner, decided
        self.macs = sum(layer.macs for layer in layers)
        self.makers = {layer.y.storage: layer for layer in layers}
        self.decider = planner.decider
        """With what was found of blocks so far."""
        self.groups = {group for name in decided for group in group_names(name)}
        self.estimated: dict[Hashable, float | None] = {}

    def cut(self, chain: list[LayerAssignment]) -> list[_Part]:
        ways: list[list[tuple[float, tuple[int, ...]]]] = [[(0.0, ())]]
        for end in range(1, len(chain) + 1):
            found = []
            for start in range(max(0, end - LONGEST), end):
                layer = _Part(tuple(chain[start:end])).layer
                cost = -1e12 if layer.name in self.groups else self._estimate(layer)
                if cost is not None:
                    found += [(before + cost, (*cuts, start)) for before, cuts in ways[start]]
            ways.append(sorted(found)[:KEPT])
        best = ways[-1][0][0]
        near = [cuts for cost, cuts in ways[-1] if cost <= max(best, WORTH_A_LOOK * best)]
        parts = [[_Part(tuple(chain[a:b])) for a, b in pairwise((*cuts, len(chain)))] for cuts in near]
        return [each for part in self._resident(self._fastest(parts)) for each in self.kept(part)]

    def _fastest(self, ways: list[list[_Part]]) -> list[_Part]:
        """The first of `ways` in which gemm hardly ever waits, behind which no other is timed, or else the fastest."""
        if len(ways) == 1:
            return ways[0]
        least = 2 * chains.least(self.planner, [choice.layer for part in ways[0] for choice in part.choices])
        cycles: list[float] = []
        for parts in ways:
            cycles.append(self._cycles(parts))
            if cycles[-1] <= BUSY * least:
                return parts
        return ways[cycles.index(min(cycles))]

    def _resident(self, parts: list[_Part]) -> list[_Part]:
        """`parts`, or some of them in one where images that fit a scratchpad as a whole are between them."""
        found = parts[:1]
        for part in parts[1:]:
            joined = found[-1].then(part)
            if self._may_join(found[-1], joined) and self._estimate(joined.layer) is not None:
                found[-1] = joined
            else:
                found.append(part)
        if len(found) == len(parts):
            return parts
        if any(part.layer.name in self.decided for part in found):
            return found
        for part in found:
            if part.layer.macs > REFINED * self.macs:
                self._refine(part)
        return min(found, parts, key=self._cycles)

    def _refine(self, part: _Part) -> None:
        """Choose tiles of groups by the timing model, which knows what adjacent groups wait for: one after the other.
        Whole images that fit a scratchpad are small, so that this takes no time."""
        workload = self.planner.definitions(part.layer)[0].workload
        if not part.cuts or not isinstance(workload, BlockWorkload) or workload in self.decider.searched:
            return
        groups = list(block_space.choose(self.cfg, workload).groups)
        for number, group in enumerate(workload.groups):
            best = self._around(part, groups, number)
            for point in block_space.best_by_piece(self.cfg, group):
                others = [*groups[:number], point, *groups[number + 1 :]]
                if (cycles := self._around(part, others, number)) < best:
                    best, groups = cycles, others
        self.decider = self._with(workload, groups)

    def _around(self, part: _Part, groups: Sequence[Tiling], number: int) -> float:
        """Cycles of a group of `part` with those beside it under these decisions for its groups; what is so no longer
        beside another group is tiled by the estimate."""
        first, end = max(0, number - AROUND), min(len(groups), number + AROUND + 1)
        near = part.groups(first, end)
        asked, workload = (self.planner.definitions(each.layer)[0].workload for each in (part, near))
        assert isinstance(asked, BlockWorkload) and isinstance(workload, BlockWorkload)
        try:
            usual = block_space.choose(self.cfg, workload).groups
        except TilingError:
            return inf
        pairs = zip(workload.groups, asked.groups[first:end], groups[first:end], usual, strict=True)
        return self._cycles([near], self._with(workload, [d if own == whole else u for own, whole, d, u in pairs]))

    def _with(self, workload: BlockWorkload, groups: Sequence[Tiling]) -> SchedulePolicy:
        """What decides layers, with these decisions for the groups of a block."""
        return replace(self.decider, searched={**self.decider.searched, workload: Tiling.of_groups(groups)})

    def _may_join(self, part: _Part, joined: _Part) -> bool:
        """Whether what a user has decided allows for it."""
        name = joined.layer.name
        wanted = any(group_names(each)[: len(group_names(name))] == group_names(name) for each in self.decided)
        return wanted or part.layer.name not in self.decided

    def noted(self, part: _Part, block: LayerAssignment) -> LayerAssignment:
        """`block`, with what it takes, and what its layers take one by one; 0 where one of them alone cannot be."""
        return _with_cycles(block, *self._both(part))

    def kept(self, part: _Part) -> list[_Part]:
        """`part`, or its choices one by one where they take fewer cycles: estimates of blocks may be far off."""
        decided = part.layer.name in self.decided or not self.groups.isdisjoint(group_names(part.layer.name))
        if len(part.choices) == 1 or decided:
            return [part]
        together, apart = self._both(part)
        return [part] if together <= apart else [_Part((choice,)) for choice in part.choices]

    def _both(self, part: _Part) -> tuple[float, float]:
        """Cycles that `part` takes, and its choices one by one, each behind the layer that makes what they read: as in
        the network, where only the first of its loads go beside what is computed before."""
        maker = self.makers.get(part.choices[0].layer.x.storage)
        before = [] if maker is None else [maker]
        start = self.once(before) if before else 0
        layers = [choice.layer for choice in part.choices]
        return self.once([*before, part.layer]) - start, self.once([*before, *layers]) - start

    def _estimate(self, layer: Layer) -> float | None:
        """Estimated cycles of `layer`; None for a block that cannot be."""
        try:
            definitions = self.planner.definitions(layer)
            key = tuple(definition.signature for definition in definitions)
            if key not in self.estimated:
                self.estimated[key] = sum(estimated(self.cfg, definition.workload) for definition in definitions)
            return self.estimated[key]
        except TilingError:
            return None if layer.is_block else 1e12  # a layer alone says so itself

    def _cycles(self, parts: Sequence[_Part], decider: SchedulePolicy | None = None) -> float:
        """Cycles of a chain that is cut into `parts`, by the timing model: twice in a row, so that what the next layers
        overlap with counts."""
        planner = self.planner.with_policy(decider or self.decider)
        layers = [part.layer for part in parts]
        name = chains.chain_name(chains.decided(layers, planner))
        if name not in planner.timed:
            planner.timed[name] = chains.time(self.cfg, planner, [*layers, *_again(layers, planner)])
        return planner.timed[name]

    def once(self, layers: Sequence[Layer]) -> float:
        """Cycles of `layers`, one after the other, by the timing model; inf where one does not fit."""
        return chains.once(self.cfg, self.planner.with_policy(self.decider), layers)


def _again(layers: Sequence[Layer], planner: Planner) -> list[Layer]:
    """Repeat the layers, on what they have made where it has the shape of what they read."""
    x, y = layers[0].x, layers[-1].y
    same = x.storage.groups == y.storage.groups and replace(x, storage=y.storage) == y
    others = {x.storage: y.storage} if same else {}

    def placed(act: Activation) -> Activation:
        if act.storage not in others:
            others[act.storage] = Storage(act.storage.name, act.storage.groups)
        return replace(act, storage=others[act.storage])

    return [planner.known(layer.map_activations(placed), layer, others) for layer in layers]


def _with_cycles(block: LayerAssignment, together: float, alone: float) -> LayerAssignment:
    block.together, block.alone = (cycles if isfinite(cycles) else 0 for cycles in (together, alone))
    return block


def estimated(cfg: Config, workload: Workload | BlockWorkload) -> float:
    """Cycles under the decisions that the estimate takes. TilingError where there are none."""
    if isinstance(workload, Workload) and workload.in_blocks:
        return estimate(cfg, workload, choose(cfg, workload))
    block = workload if isinstance(workload, BlockWorkload) else BlockWorkload((workload,))
    return block_space.estimate(cfg, block, block_space.choose(cfg, block))


def _joined(selection: Partition, part: _Part) -> LayerAssignment:
    """A part of a chain as one choice."""
    *before, last = part.choices
    for choice in before:
        for known in (selection.forms, selection.written):
            del known[choice.value]
    notes = "; ".join(choice.note for choice in part.choices if choice.note)
    reads = {storage: source for choice in part.choices for storage, source in choice.reads.items()}
    nodes = [node for choice in part.choices for node in choice.nodes]
    return LayerAssignment(part.layer, nodes, reads, last.value, notes)
