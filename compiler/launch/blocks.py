"""Choose the layers that run as blocks: chains in which each layer alone reads what the one before it makes.

Layers stay apart for two reasons: the second cannot read from a scratchpad (`_read_by`, `_can_hand_on`), or a block
takes more cycles (`_ChainPartitioner`).

A block's intermediates stay in scratchpads. Chains are cut where that takes the fewest cycles: dynamic programming over
the estimates of layers and blocks finds the best few ways, the timing model takes one of them.

Time is linear in layers: a chain is looked at in pieces of AT_ONCE layers, what has been timed is remembered by layers
and tilings, and where the tiling of one group changes, only the groups around it are timed.
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
from celosia.compiler.launch.attentions import find_attentions
from celosia.compiler.layer import Activation, Layer, Storage, TilingError, group_names, padded_groups
from celosia.compiler.switches import is_on
from celosia.compiler.tensorize import block_space, pack
from celosia.compiler.tensorize.block_space import BlockWorkload
from celosia.compiler.tensorize.plan import Planner
from celosia.compiler.tensorize.roofline import choose, estimate
from celosia.compiler.tensorize.schedule_policy import SchedulePolicy
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
    """Replace chains of layers in `selection` by blocks, and return the policy that decides the layers' tilings then.

    apart: operators whose layers are in no block. decided: names of layers and blocks that the user has decided.
    """
    if not cfg.forward or not is_on("blocks"):
        return planner.policy
    partitioner = _ChainPartitioner(cfg, planner, frozenset(decided), [choice.layer for choice in selection.choices])
    blocks: list[tuple[Sequence[LayerAssignment], LayerAssignment]] = []
    for chain in _chains(cfg, selection, frozenset(apart)):
        for first in range(0, len(chain), AT_ONCE):
            parts = [part for part in partitioner.cut(chain[first : first + AT_ONCE]) if len(part.choices) > 1]
            blocks += [(part.choices, partitioner.with_cycles(part, _fused_choice(selection, part))) for part in parts]
    _replace_choices(selection, blocks)
    _replace_choices(selection, list(_fuse_maps(cfg, selection, partitioner, frozenset(apart))))
    _replace_choices(selection, list(_fuse_attention(cfg, selection, partitioner, frozenset(apart))))
    return partitioner.policy


def _replace_choices(selection: Partition, blocks: Sequence[tuple[Sequence[LayerAssignment], LayerAssignment]]) -> None:
    """Replace choices in `selection` by the blocks that they become: the last choice of each by the block."""
    block_of = {id(choices[-1]): block for choices, block in blocks}
    inside = {id(choice) for choices, _ in blocks for choice in choices[:-1]}
    kept = [choice for choice in selection.choices if id(choice) not in inside]
    selection.choices[:] = [block_of.get(id(choice), choice) for choice in kept]


def _fuse_maps(
    cfg: Config, selection: Partition, partitioner: _ChainPartitioner, apart: frozenset[ir.Node]
) -> Iterator[tuple[Sequence[LayerAssignment], LayerAssignment]]:
    """Fuse convolutions with the maps behind them, each the only reader of the output before it, where the block takes
    fewer cycles."""
    readers = _readers(selection.choices)
    for choice in selection.choices:
        originals, chain = [choice], [choice]
        while (
            _reads_all_inputs(cfg, choice.layer)
            and (reader := _read_by(cfg, originals[-1], readers, apart)) is not None
        ):
            layer = behind(reader.layer, originals[-1].layer.y)
            if layer is None:
                break
            originals.append(reader)
            chain.append(replace(reader, layer=layer))
        while len(chain) > 1 and len(parts := partitioner.if_faster(_Segment(tuple(chain)))) > 1:
            originals, chain = originals[:-1], chain[:-1]
        if len(chain) > 1:
            yield originals, partitioner.with_cycles(parts[0], _fused_choice(selection, parts[0]))


def _fuse_attention(
    cfg: Config, selection: Partition, partitioner: _ChainPartitioner, apart: frozenset[ir.Node]
) -> Iterator[tuple[Sequence[LayerAssignment], LayerAssignment]]:
    """Fuse the heads of attention where the block takes fewer cycles, the layers before it included."""
    for attention in find_attentions(cfg, selection, apart):
        block, before = _Segment(attention.stages), [choice.layer for choice in attention.before]
        start = partitioner.once(before) if before else 0
        together = partitioner.once([*before, block.layer]) - start
        alone = partitioner.once(attention.one_by_one) - start
        fixed = not partitioner.decided.isdisjoint(choice.layer.name for choice in attention.heads)
        if block.layer.name in partitioner.decided or (together < alone and not fixed):
            yield attention.heads, _note_cycles(_fused_choice(selection, block), together, alone)


def _reads_all_inputs(cfg: Config, layer: Layer) -> bool:
    """Whether the layer is a convolution whose output blocks read all input blocks."""
    gemm = layer.gemm
    return gemm is not None and gemm.groups == 1 and len(pack.weight_runs(cfg, gemm)) == 1


def behind(layer: Layer, y: Activation) -> Layer | None:
    """Rewrite a map so that it follows the producer of `y` in each tile, and reads it as x or, through vin, as operand
    B. None where the layer is no such map."""
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
    swapped = replace(residual, operand=y, scale_v=residual.scale_b, scale_b=residual.scale_v)
    return replace(layer, x=operand, epilogue=replace(epilogue, residual=swapped))


def _chains(cfg: Config, selection: Partition, apart: frozenset[ir.Node]) -> Iterator[list[LayerAssignment]]:
    """Find the longest chains of at least two layers, each of which alone reads what the one before it makes."""
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
    """For each storage, count the choices that write it, and list those that read it."""
    users: dict[Storage, tuple[int, list[LayerAssignment]]] = {}
    for choice in choices:
        count, readers = users.get(choice.layer.y.storage, (0, []))
        users[choice.layer.y.storage] = count + 1, readers
    for choice in choices:
        for storage in {act.storage for act in choice.layer.inputs()}:
            users.setdefault(storage, (0, []))[1].append(choice)
    return users


def _read_by(
    cfg: Config,
    before: LayerAssignment,
    readers: Mapping[Storage, tuple[int, list[LayerAssignment]]],
    apart: frozenset[ir.Node],
) -> LayerAssignment | None:
    """The only reader of the output of `before`, if it reads all of it once and `before` is its only writer."""
    y = before.layer.y
    writers, own_readers = readers[y.storage]
    if before.value.is_graph_output() or y.group_offset or y.storage_groups != padded_groups(cfg, y.channels):
        return None
    if writers != 1 or len(own_readers) != 1 or not apart.isdisjoint((*before.nodes, *own_readers[0].nodes)):
        return None
    (reader,) = own_readers
    read = [act for act in reader.layer.inputs() if act.storage is y.storage]
    once = len(read) == 1 and read[0] == y
    return reader if once and all(use.node in reader.nodes for use in before.value.uses()) else None


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
    return layer.is_depthwise(cfg) or _reads_all_inputs(cfg, layer)


@dataclass(frozen=True)
class _Segment:
    """A segment of a chain: choices that run as one layer. cuts: see Layer.block."""

    choices: tuple[LayerAssignment, ...]
    cuts: tuple[int, ...] = ()

    @cached_property
    def layer(self) -> Layer:
        layers = tuple(choice.layer for choice in self.choices)
        return layers[0] if len(layers) == 1 else Layer.block(layers, self.cuts)

    def then(self, other: _Segment) -> _Segment:
        """Join two segments; the activation between them lies in a scratchpad, whole images of it."""
        here = len(self.choices)
        return _Segment(self.choices + other.choices, (*self.cuts, here, *(here + cut for cut in other.cuts)))

    def groups(self, first: int, end: int) -> _Segment:
        """The segment of the groups from `first` up to `end`."""
        bounds = [0, *self.cuts, len(self.choices)][first : end + 1]
        return _Segment(self.choices[bounds[0] : bounds[-1]], tuple(bound - bounds[0] for bound in bounds[1:-1]))


class _ChainPartitioner:
    """Cut chains into the segments that take the fewest cycles together.

    The estimates of layers and blocks tell which cuts are worth timing; the timing model decides among those, and
    leaves layers apart that take longer as a block behind the layer before it.
    """

    def __init__(self, cfg: Config, planner: Planner, decided: frozenset[str], layers: Sequence[Layer]) -> None:
        """layers: of the network, in their order."""
        self.cfg, self.planner, self.decided = cfg, planner, decided
        self.macs = sum(layer.macs for layer in layers)
        self.producers = {layer.y.storage: layer for layer in layers}
        self.policy = planner.policy
        """The policy with the tilings that the search of blocks has decided so far."""
        self.groups = {group for name in decided for group in group_names(name)}
        self.estimated: dict[Hashable, float | None] = {}

    def cut(self, chain: list[LayerAssignment]) -> list[_Segment]:
        """Cut a chain by dynamic programming over estimates, then by the timing model."""
        ways: list[list[tuple[float, tuple[int, ...]]]] = [[(0.0, ())]]
        for end in range(1, len(chain) + 1):
            costed = []
            for start in range(max(0, end - LONGEST), end):
                layer = _Segment(tuple(chain[start:end])).layer
                cost = -1e12 if layer.name in self.groups else self._estimate(layer)
                if cost is not None:
                    costed += [(before + cost, (*cuts, start)) for before, cuts in ways[start]]
            ways.append(sorted(costed)[:KEPT])
        best = ways[-1][0][0]
        promising = [cuts for cost, cuts in ways[-1] if cost <= max(best, WORTH_A_LOOK * best)]
        parts = [[_Segment(tuple(chain[a:b])) for a, b in pairwise((*cuts, len(chain)))] for cuts in promising]
        joined = self._join_resident(self._fastest_cut(parts))
        return [segment for part in joined for segment in self.if_faster(part)]

    def _fastest_cut(self, ways: list[list[_Segment]]) -> list[_Segment]:
        """The first of `ways` in which GEMM hardly ever waits, so that no other is timed, or else the fastest."""
        if len(ways) == 1:
            return ways[0]
        least = 2 * chains.min_gemm_cycles(self.planner, [choice.layer for part in ways[0] for choice in part.choices])
        cycles: list[float] = []
        for parts in ways:
            cycles.append(self._cycles(parts))
            if cycles[-1] <= BUSY * least:
                return parts
        return ways[cycles.index(min(cycles))]

    def _join_resident(self, parts: list[_Segment]) -> list[_Segment]:
        """Join segments where the images between them fit a scratchpad, if the chain takes fewer cycles so."""
        merged = parts[:1]
        for part in parts[1:]:
            joined = merged[-1].then(part)
            if self._user_allows(merged[-1], joined) and self._estimate(joined.layer) is not None:
                merged[-1] = joined
            else:
                merged.append(part)
        if len(merged) == len(parts):
            return parts
        if any(part.layer.name in self.decided for part in merged):
            return merged
        for part in merged:
            if part.layer.macs > REFINED * self.macs:
                self._refine(part)
        return min(merged, parts, key=self._cycles)

    def _refine(self, part: _Segment) -> None:
        """Choose the tilings of a segment's groups, one after the other, by the timing model, which knows what adjacent
        groups wait for. Images that fit a scratchpad are small, so this takes little time."""
        workload = self.planner.computations(part.layer)[0].workload
        if not part.cuts or not isinstance(workload, BlockWorkload) or workload in self.policy.searched:
            return
        groups = list(block_space.choose(self.cfg, workload).groups)
        for number, group in enumerate(workload.groups):
            best = self._around(part, groups, number)
            for point in block_space.best_by_piece(self.cfg, group):
                others = [*groups[:number], point, *groups[number + 1 :]]
                if (cycles := self._around(part, others, number)) < best:
                    best, groups = cycles, others
        self.policy = self._policy_with(workload, groups)

    def _around(self, part: _Segment, groups: Sequence[Tiling], number: int) -> float:
        """Cycles of group `number` of `part` and its neighbours under the tilings `groups`. A group at the edge, whose
        workload is another one without its neighbour, is tiled by the estimate."""
        first, end = max(0, number - AROUND), min(len(groups), number + AROUND + 1)
        neighbours = part.groups(first, end)
        whole, workload = (self.planner.computations(segment.layer)[0].workload for segment in (part, neighbours))
        assert isinstance(whole, BlockWorkload) and isinstance(workload, BlockWorkload)
        try:
            usual = block_space.choose(self.cfg, workload).groups
        except TilingError:
            return inf
        rows = zip(workload.groups, whole.groups[first:end], groups[first:end], usual, strict=True)
        tilings = [tiling if own == inside else fallback for own, inside, tiling, fallback in rows]
        return self._cycles([neighbours], self._policy_with(workload, tilings))

    def _policy_with(self, workload: BlockWorkload, groups: Sequence[Tiling]) -> SchedulePolicy:
        """The policy with these tilings for the groups of a block."""
        return replace(self.policy, searched={**self.policy.searched, workload: Tiling.of_groups(groups)})

    def _user_allows(self, part: _Segment, joined: _Segment) -> bool:
        """Whether the user's decisions allow to join a segment `part` to others as `joined`."""
        name = joined.layer.name
        wanted = any(group_names(other)[: len(group_names(name))] == group_names(name) for other in self.decided)
        return wanted or part.layer.name not in self.decided

    def with_cycles(self, part: _Segment, block: LayerAssignment) -> LayerAssignment:
        """Note in `block` its cycles, and those of its layers one by one; 0 where a layer alone does not fit."""
        return _note_cycles(block, *self._together_and_apart(part))

    def if_faster(self, part: _Segment) -> list[_Segment]:
        """The segment, or its choices one by one where these take fewer cycles: estimates of blocks may be far off."""
        decided = part.layer.name in self.decided or not self.groups.isdisjoint(group_names(part.layer.name))
        if len(part.choices) == 1 or decided:
            return [part]
        together, apart = self._together_and_apart(part)
        return [part] if together <= apart else [_Segment((choice,)) for choice in part.choices]

    def _together_and_apart(self, part: _Segment) -> tuple[float, float]:
        """Cycles of a segment as a block, and of its choices one by one.

        Both are timed behind the layer that makes their input: as in the network, where only their first loads overlap
        with it.
        """
        producer = self.producers.get(part.choices[0].layer.x.storage)
        before = [] if producer is None else [producer]
        start = self.once(before) if before else 0
        layers = [choice.layer for choice in part.choices]
        return self.once([*before, part.layer]) - start, self.once([*before, *layers]) - start

    def _estimate(self, layer: Layer) -> float | None:
        """Estimated cycles of `layer`; None for a block that cannot be."""
        try:
            computations = self.planner.computations(layer)
            key = tuple(computation.signature for computation in computations)
            if key not in self.estimated:
                self.estimated[key] = sum(estimated(self.cfg, computation.workload) for computation in computations)
            return self.estimated[key]
        except TilingError:
            return None if layer.is_block else 1e12  # a layer alone says so itself

    def _cycles(self, parts: Sequence[_Segment], policy: SchedulePolicy | None = None) -> float:
        """Cycles of a chain cut into `parts`, by the timing model: twice in a row, so that its overlap with the next
        layers counts."""
        planner = self.planner.with_policy(policy or self.policy)
        layers = [part.layer for part in parts]
        name = chains.chain_name(chains.decided(layers, planner))
        if name not in planner.timed:
            planner.timed[name] = chains.time_layers(self.cfg, planner, [*layers, *_again(layers, planner)])
        return planner.timed[name]

    def once(self, layers: Sequence[Layer]) -> float:
        """Cycles of `layers`, one after the other, by the timing model; inf where one does not fit."""
        return chains.timed_cycles(self.cfg, self.planner.with_policy(self.policy), layers)


def _again(layers: Sequence[Layer], planner: Planner) -> list[Layer]:
    """Repeat the layers in other storages, on their own output where it has the shape of their input."""
    x, y = layers[0].x, layers[-1].y
    same = x.storage.groups == y.storage.groups and replace(x, storage=y.storage) == y
    others = {x.storage: y.storage} if same else {}

    def placed(act: Activation) -> Activation:
        if act.storage not in others:
            others[act.storage] = Storage(act.storage.name, act.storage.groups)
        return replace(act, storage=others[act.storage])

    return [planner.share_computations(layer.map_activations(placed), layer, others) for layer in layers]


def _note_cycles(block: LayerAssignment, together: float, alone: float) -> LayerAssignment:
    block.block_cycles, block.separate_cycles = (cycles if isfinite(cycles) else 0 for cycles in (together, alone))
    return block


def estimated(cfg: Config, workload: Workload | BlockWorkload) -> float:
    """Estimated cycles under the best tiling by the estimate. TilingError where there is none."""
    if isinstance(workload, Workload) and workload.in_blocks:
        return estimate(cfg, workload, choose(cfg, workload))
    block = workload if isinstance(workload, BlockWorkload) else BlockWorkload((workload,))
    return block_space.estimate(cfg, block, block_space.choose(cfg, block))


def _fused_choice(selection: Partition, part: _Segment) -> LayerAssignment:
    """Fuse the choices of a segment into one, and forget where the outputs inside it were stored."""
    *before, last = part.choices
    for choice in before:
        for known in (selection.forms, selection.written):
            del known[choice.value]
    notes = "; ".join(choice.note for choice in part.choices if choice.note)
    reads = {storage: source for choice in part.choices for storage, source in choice.reads.items()}
    nodes = [node for choice in part.choices for node in choice.nodes]
    return LayerAssignment(part.layer, nodes, reads, last.value, notes)
