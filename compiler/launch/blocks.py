"""Choose the layers that run as blocks: chains in which each layer is the only reader of the one before it.

A block keeps its intermediates in scratchpads. Two layers stay apart if the second cannot read from a scratchpad
(`_only_reader`, `_can_be_followed`), or if a block takes more cycles (`_ChainPartitioner`).

Chains are cut where that takes the fewest cycles: dynamic programming over estimates of layers and blocks finds the
best few cuts, and the timing model chooses among them.

Time is linear in the number of layers: a chain is searched in windows of CHAIN_WINDOW layers, cycles are cached by
layers and tilings, and where the tiling of one group changes, only the groups around it are timed.

Attention is found by itself (`_find_attentions`). Per head it is a product, a softmax and a product:

    product 0 .. n → scores → softmax 0 .. n → probabilities → product 0 .. n     ➔     one layer of n + 1 heads

The heads must lie side by side and have the same scales, and no other layer may read scores and probabilities.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf, isfinite
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from celosia.compiler.graph.select import LayerAssignment, Partition
from celosia.compiler.launch.order import (
    cached_cycles,
    chain_name,
    min_gemm_cycles,
    order_around_softmaxes,
    time_layers,
    timed_cycles,
)
from celosia.compiler.launch.overlap import is_elementwise, shares_storage
from celosia.compiler.layer import Activation, Layer, Storage, TilingError, group_names, padded_groups
from celosia.compiler.switches import is_on
from celosia.compiler.tensorize import block_space, pack
from celosia.compiler.tensorize.block_space import BlockWorkload
from celosia.compiler.tensorize.plan import Planner, SchedulePolicy
from celosia.compiler.tensorize.roofline import choose, estimate
from celosia.compiler.tensorize.space import Tiling, Workload
from celosia.hw.spec.config import Config

MAX_BLOCK_LAYERS = 5
"""Layers of the longest block, if its layers exchange tiles."""
CHAIN_WINDOW = 6 * MAX_BLOCK_LAYERS
"""Layers of a chain that are searched together, and so layers of the longest block that keeps whole images."""
KEPT_CUTS = 2
"""Best ways to cut a chain that dynamic programming keeps at each layer."""
MIN_REFINED_SHARE = 0.2
"""Share of a network's multiplications above which the timing model chooses the tiles of a block."""
NEIGHBOUR_GROUPS = 2
"""Groups of a block on either side of one whose tile is chosen that are timed with it."""
MAX_READERS = 6
"""Layers behind a block among which those are that read its output from memory, and are timed with it."""
MAX_COST_RATIO = 1.1
"""Estimated cycles of a cut over those of the best one, up to which it is timed."""
GEMM_BOUND_RATIO = 1.005
"""Cycles of a chain over those of its products, up to which no other cut is timed: little can be won."""


def form_blocks(
    cfg: Config, selection: Partition, planner: Planner, apart: Collection[ir.Node] = (),
    decided: Collection[str] = (),
) -> SchedulePolicy:  # fmt: skip
    """Replace chains of layers in `selection` by blocks; return the policy with the tilings that this decided.

    apart: operators whose layers join no block. decided: names of layers and blocks whose schedule the user has
    decided.
    """
    if not cfg.forward or not is_on("blocks"):
        return planner.policy
    partitioner = _ChainPartitioner(cfg, planner, frozenset(decided), [choice.layer for choice in selection.choices])
    blocks: list[tuple[Sequence[LayerAssignment], LayerAssignment]] = []
    for chain in _find_chains(cfg, selection, frozenset(apart)):
        for first in range(0, len(chain), CHAIN_WINDOW):
            segments = [
                segment for segment in partitioner.cut(chain[first : first + CHAIN_WINDOW]) if len(segment.choices) > 1
            ]
            blocks += [
                (segment.choices, partitioner.with_cycles(segment, _fuse_choices(selection, segment)))
                for segment in segments
            ]
    _replace_choices(selection, blocks)
    _replace_choices(selection, list(_fuse_maps(cfg, selection, partitioner, frozenset(apart))))
    _replace_choices(selection, list(_fuse_attention(cfg, selection, partitioner, frozenset(apart))))
    return partitioner.policy


def _replace_choices(selection: Partition, blocks: Sequence[tuple[Sequence[LayerAssignment], LayerAssignment]]) -> None:
    """Replace choices in `selection` by the blocks that they become: the last choice of each, the others go."""
    block_of = {id(choices[-1]): block for choices, block in blocks}
    replaced = {id(choice) for choices, _ in blocks for choice in choices[:-1]}
    remaining = [choice for choice in selection.choices if id(choice) not in replaced]
    selection.choices[:] = [block_of.get(id(choice), choice) for choice in remaining]


def _fuse_maps(
    cfg: Config, selection: Partition, partitioner: _ChainPartitioner, apart: frozenset[ir.Node]
) -> Iterator[tuple[Sequence[LayerAssignment], LayerAssignment]]:
    """Yield (choices, block) for convolutions with the maps behind them, if the block takes fewer cycles.

    Each map must be the only reader of the output before it.
    """
    readers = _storage_users(selection.choices)
    for choice in selection.choices:
        originals, chain = [choice], [choice]
        while (
            _reads_all_inputs(cfg, choice.layer)
            and (reader := _only_reader(cfg, originals[-1], readers, apart)) is not None
        ):
            layer = rewrite_to_follow(reader.layer, originals[-1].layer.y)
            if layer is None:
                break
            originals.append(reader)
            chain.append(replace(reader, layer=layer))
        while len(chain) > 1 and len(parts := partitioner.if_faster(_Segment(tuple(chain)))) > 1:
            originals, chain = originals[:-1], chain[:-1]
        if len(chain) > 1:
            yield originals, partitioner.with_cycles(parts[0], _fuse_choices(selection, parts[0]))


def _reads_all_inputs(cfg: Config, layer: Layer) -> bool:
    """Return whether the layer is a convolution whose output blocks each read all input blocks."""
    gemm = layer.gemm
    return gemm is not None and gemm.groups == 1 and len(pack.weight_runs(cfg, gemm)) == 1


def rewrite_to_follow(layer: Layer, y: Activation) -> Layer | None:
    """Rewrite a map so that it follows the producer of `y` tile by tile, and reads `y` as x or as operand B.

    B is read through vin. Returns None if the layer is no such map.
    """
    if not layer.is_map:
        return None
    epilogue, residual = layer.epilogue, layer.epilogue.residual
    if residual is None:
        return layer
    operand = residual.operand
    if operand.dims != layer.x.dims:  # one operand is a row that all rows share
        return None
    if operand == y:
        return layer
    if epilogue.table is not None or epilogue.clip != (-128, 127):
        return None
    swapped = replace(residual, operand=y, scale_v=residual.scale_b, scale_b=residual.scale_v)
    return replace(layer, x=operand, epilogue=replace(epilogue, residual=swapped))


def _find_chains(cfg: Config, selection: Partition, apart: frozenset[ir.Node]) -> Iterator[list[LayerAssignment]]:
    """Yield the longest chains of at least two layers in which each is the only reader of the one before it."""
    choices, readers = selection.choices, _storage_users(selection.choices)
    following: dict[int, LayerAssignment] = {}
    for producer in choices:
        reader = _only_reader(cfg, producer, readers, apart) if _can_be_followed(cfg, producer.layer) else None
        if reader is not None and _can_join_block(cfg, reader.layer) and reader.layer.x == producer.layer.y:
            following[id(producer)] = reader
    followers = {id(choice) for choice in following.values()}
    for choice in choices:
        if id(choice) in followers or id(choice) not in following:
            continue
        chain = [choice]
        while id(chain[-1]) in following:
            chain.append(following[id(chain[-1])])
        yield chain


def _storage_users(choices: Iterable[LayerAssignment]) -> dict[Storage, tuple[int, list[LayerAssignment]]]:
    """Return {storage: (number of choices that write it, choices that read it)}."""
    users: dict[Storage, tuple[int, list[LayerAssignment]]] = {}
    for choice in choices:
        count, readers = users.get(choice.layer.y.storage, (0, []))
        users[choice.layer.y.storage] = count + 1, readers
    for choice in choices:
        for storage in {act.storage for act in choice.layer.inputs()}:
            users.setdefault(storage, (0, []))[1].append(choice)
    return users


def _only_reader(
    cfg: Config,
    producer: LayerAssignment,
    readers: Mapping[Storage, tuple[int, list[LayerAssignment]]],
    apart: frozenset[ir.Node],
) -> LayerAssignment | None:
    """Return the only reader of the output of `producer`, if it reads all of it once and `producer` alone writes it."""
    y = producer.layer.y
    writers, storage_readers = readers[y.storage]
    if producer.value.is_graph_output() or y.group_offset or y.storage_groups != padded_groups(cfg, y.channels):
        return None
    if writers != 1 or len(storage_readers) != 1 or not apart.isdisjoint((*producer.nodes, *storage_readers[0].nodes)):
        return None
    (reader,) = storage_readers
    reads = [act for act in reader.layer.inputs() if act.storage is y.storage]
    reads_it_once = len(reads) == 1 and reads[0] == y
    return reader if reads_it_once and all(use.node in reader.nodes for use in producer.value.uses()) else None


def _can_be_followed(cfg: Config, layer: Layer) -> bool:
    """Return whether the next layer of a block may read the output of `layer` from a scratchpad."""
    return (_can_join_block(cfg, layer) or _can_begin_block(layer)) and layer.epilogue.residual is None


def _can_begin_block(layer: Layer) -> bool:
    """Return whether `layer` can be the first of a block, though it reads two operands: a multiplication of images."""
    return layer.multiply is not None and layer.x.height * layer.x.width > 1


def _can_join_block(cfg: Config, layer: Layer) -> bool:
    """Return whether `layer` can be in a block: a pooling, or a convolution of images without partial groups.

    Its channels are all of one group, or each is a group of its own.
    """
    if (layer.gemm is None and not layer.reduce) or (layer.x.height * layer.x.width == 1 and layer.x.images > 1):
        return False
    if layer.reduce:
        return layer.epilogue.residual is None and not layer.sums_on_gemm
    if not layer.macs:
        return False  # an average pooling, which costs nothing as a guest of another convolution
    return layer.is_depthwise(cfg) or _reads_all_inputs(cfg, layer)


@dataclass(frozen=True)
class _Segment:
    """A segment of a chain: choices that run as one layer. cuts: see Layer.block."""

    choices: tuple[LayerAssignment, ...]
    cuts: tuple[int, ...] = ()

    @cached_property
    def layer(self) -> Layer:
        """The layer that the segment runs as: its only one, or a block."""
        layers = tuple(choice.layer for choice in self.choices)
        return layers[0] if len(layers) == 1 else Layer.block(layers, self.cuts)

    def then(self, other: _Segment) -> _Segment:
        """Join two segments; the whole images between them lie in a scratchpad."""
        length = len(self.choices)
        return _Segment(self.choices + other.choices, (*self.cuts, length, *(length + cut for cut in other.cuts)))

    def groups(self, first: int, end: int) -> _Segment:
        """Return the segment of the groups from `first` up to, not including, `end`."""
        bounds = [0, *self.cuts, len(self.choices)][first : end + 1]
        return _Segment(self.choices[bounds[0] : bounds[-1]], tuple(bound - bounds[0] for bound in bounds[1:-1]))


class _ChainPartitioner:
    """Cuts chains into the segments that take the fewest cycles together.

    Estimates of layers and blocks tell which cuts are worth timing. The timing model decides among these, and takes
    blocks apart that take more cycles than their layers behind the layer before.

    decided: names of layers and blocks that the user has decided. groups: names of the layers in these. macs: of the
    network. producers: the layer that writes each storage. estimated: cached estimates by `geometry`.
    """

    def __init__(self, cfg: Config, planner: Planner, decided: frozenset[str], layers: Sequence[Layer]) -> None:
        """layers: all layers of the network, in order."""
        self.cfg, self.planner, self.decided = cfg, planner, decided
        self.macs = sum(layer.macs for layer in layers)
        self.layers, self.producers = list(layers), {layer.y.storage: layer for layer in layers}
        self.policy = planner.policy
        """The policy with the tilings that the search of blocks has decided so far."""
        self.groups = {group for name in decided for group in group_names(name)}
        self.estimated: dict[Hashable, float | None] = {}

    def cut(self, chain: list[LayerAssignment]) -> list[_Segment]:
        """Cut a chain into segments: dynamic programming over estimates proposes cuts, the timing model chooses.

        cuts_up_to[n]: the best (estimated cycles, starts of segments) for the first n layers.
        """
        cuts_up_to: list[list[tuple[float, tuple[int, ...]]]] = [[(0.0, ())]]
        for end in range(1, len(chain) + 1):
            costed = []
            for start in range(max(0, end - MAX_BLOCK_LAYERS), end):
                layer = _Segment(tuple(chain[start:end])).layer
                cost = -1e12 if layer.name in self.groups else self._estimate(layer)
                if cost is not None:
                    costed += [(cost_before + cost, (*cuts, start)) for cost_before, cuts in cuts_up_to[start]]
            cuts_up_to.append(sorted(costed)[:KEPT_CUTS])
        best = cuts_up_to[-1][0][0]
        promising = [cuts for cost, cuts in cuts_up_to[-1] if cost <= max(best, MAX_COST_RATIO * best)]
        candidates = [[_Segment(tuple(chain[a:b])) for a, b in pairwise((*cuts, len(chain)))] for cuts in promising]
        segments = self._join_resident(self._fastest_cut(candidates))
        return [final for segment in segments for final in self.if_faster(segment)]

    def _fastest_cut(self, cuts: list[list[_Segment]]) -> list[_Segment]:
        """Return the fastest of several cuts by the timing model.

        The first in which GEMM hardly ever waits is taken without timing the rest.
        """
        if len(cuts) == 1:
            return cuts[0]
        if behind := self._memory_bound_readers(cuts[0][-1]):
            return min(cuts, key=lambda segments: self.cycles_once([*(s.layer for s in segments), *behind]))
        least_cycles = 2 * min_gemm_cycles(
            self.planner, [choice.layer for segment in cuts[0] for choice in segment.choices]
        )
        cycles: list[float] = []
        for segments in cuts:
            cycles.append(self._cycles(segments))
            if cycles[-1] <= GEMM_BOUND_RATIO * least_cycles:
                return segments
        return cuts[cycles.index(min(cycles))]

    def _join_resident(self, segments: list[_Segment]) -> list[_Segment]:
        """Join neighbouring segments whose images between them fit a scratchpad, if the chain takes fewer cycles so."""
        merged = segments[:1]
        for segment in segments[1:]:
            joined = merged[-1].then(segment)
            if self._user_allows(merged[-1], joined) and self._estimate(joined.layer) is not None:
                merged[-1] = joined
            else:
                merged.append(segment)
        if len(merged) == len(segments):
            return segments
        if any(segment.layer.name in self.decided for segment in merged):
            return merged
        for segment in merged:
            if segment.layer.macs > MIN_REFINED_SHARE * self.macs:
                self._refine(segment)
        return min(merged, segments, key=self._cycles)

    def _refine(self, segment: _Segment) -> None:
        """Choose the tilings of a segment's groups one after the other by the timing model.

        Unlike the estimate, it knows what neighbouring groups wait for. Images that fit a scratchpad are small, so that
        this takes little time.
        """
        workload = self.planner.computations(segment.layer)[0].workload
        if not segment.cuts or not isinstance(workload, BlockWorkload) or workload in self.policy.searched:
            return
        groups = list(block_space.choose(self.cfg, workload).groups)
        for number, group in enumerate(workload.groups):
            best = self._cycles_around(segment, groups, number)
            for point in block_space.best_by_piece(self.cfg, group):
                others = [*groups[:number], point, *groups[number + 1 :]]
                if (cycles := self._cycles_around(segment, others, number)) < best:
                    best, groups = cycles, others
        self.policy = self._policy_with(workload, groups)

    def _cycles_around(self, segment: _Segment, groups: Sequence[Tiling], number: int) -> float:
        """Return the cycles of group `number` of `segment` and its neighbours under the tilings `groups`.

        Without its own neighbour, a group at the edge of this range is another workload, and is tiled by the estimate.
        """
        first, end = max(0, number - NEIGHBOUR_GROUPS), min(len(groups), number + NEIGHBOUR_GROUPS + 1)
        neighbours = segment.groups(first, end)
        segment_workload, range_workload = (
            self.planner.computations(either.layer)[0].workload for either in (segment, neighbours)
        )
        assert isinstance(segment_workload, BlockWorkload) and isinstance(range_workload, BlockWorkload)
        try:
            fallbacks = block_space.choose(self.cfg, range_workload).groups
        except TilingError:
            return inf
        rows = zip(range_workload.groups, segment_workload.groups[first:end], groups[first:end], fallbacks, strict=True)
        tilings = [
            tiling if cut_workload == whole_workload else fallback
            for cut_workload, whole_workload, tiling, fallback in rows
        ]
        return self._cycles([neighbours], self._policy_with(range_workload, tilings))

    def _policy_with(self, workload: BlockWorkload, groups: Sequence[Tiling]) -> SchedulePolicy:
        """Return the policy with these tilings for the groups of a block."""
        return replace(self.policy, searched={**self.policy.searched, workload: Tiling.of_groups(groups)})

    def _user_allows(self, segment: _Segment, joined: _Segment) -> bool:
        """Return whether the user's decisions allow joining `segment` with others to `joined`."""
        name = joined.layer.name
        is_decided_so = any(group_names(other)[: len(group_names(name))] == group_names(name) for other in self.decided)
        return is_decided_so or segment.layer.name not in self.decided

    def with_cycles(self, segment: _Segment, block: LayerAssignment) -> LayerAssignment:
        """Note in `block` its cycles and those of its layers one by one; 0 if a layer alone does not fit."""
        return _note_cycles(block, *self._together_and_apart(segment))

    def if_faster(self, segment: _Segment) -> list[_Segment]:
        """Return the segment, or its choices one by one if these take fewer cycles by the timing model.

        Estimates of blocks, by which chains are cut, may be far off.
        """
        decided = segment.layer.name in self.decided or not self.groups.isdisjoint(group_names(segment.layer.name))
        if len(segment.choices) == 1 or decided:
            return [segment]
        together, apart = self._together_and_apart(segment)
        return [segment] if together <= apart else [_Segment((choice,)) for choice in segment.choices]

    def _together_and_apart(self, segment: _Segment) -> tuple[float, float]:
        """Return the cycles of a segment as a block, and those of its choices one by one.

        Both are timed behind the layer that makes their input, as in the network: only their first loads overlap with
        it. A shortcut, a layer that makes the operand of a residual from the same input, runs before the block, or
        between its layers, where they are apart.
        """
        producer = self.producers.get(segment.choices[0].layer.x.storage)
        before = [] if producer is None else [producer]
        cycles_before = self.cycles_once(before) if before else 0
        layers, behind = [choice.layer for choice in segment.choices], self._memory_bound_readers(segment)
        shortcuts = [self._shortcut(layer, layers) for layer in layers]
        apart = [layer for pair in zip(shortcuts, layers) for layer in pair if layer is not None]
        together = [*(layer for layer in shortcuts if layer is not None), segment.layer]
        return (
            self.cycles_once([*before, *together, *behind]) - cycles_before,
            self.cycles_once([*before, *apart, *behind]) - cycles_before,
        )

    def _shortcut(self, layer: Layer, segment: Sequence[Layer]) -> Layer | None:
        """Return the layer outside of `segment` that makes the operand of a residual from the segment's input."""
        residual = layer.epilogue.residual
        producer = None if residual is None else self.producers.get(residual.operand.storage)
        is_shortcut = producer is not None and producer.x == segment[0].x and all(producer.y != s.y for s in segment)
        return producer if is_shortcut else None

    def _memory_bound_readers(self, segment: _Segment) -> list[Layer]:
        """Return the layers behind a segment up to the last elementwise one that reads its output.

        They wait for loads, and those run while the segment computes if it leaves the load port idle.
        """
        last = segment.choices[-1].layer
        number = next(n for n, layer in enumerate(self.layers) if layer.y == last.y)
        near = self.layers[number + 1 : number + 1 + MAX_READERS]
        readers = [n for n, layer in enumerate(near, 1) if is_elementwise(layer) and shares_storage(layer, last)]
        return near[: readers[-1]] if readers else []

    def _estimate(self, layer: Layer) -> float | None:
        """Return the estimated cycles of `layer`, cached; None for a block that fits no tiling."""
        try:
            key = geometry(self.planner, layer)
        except TilingError:
            return self._estimate_anew(layer)
        if key not in self.estimated:
            self.estimated[key] = self._estimate_anew(layer)
        return self.estimated[key]

    def _estimate_anew(self, layer: Layer) -> float | None:
        """Return the estimated cycles of `layer`, uncached; None for a block that fits no tiling."""
        try:
            workloads = [computation.workload for computation in self.planner.computations(layer)]
            return sum(estimated_cycles(self.cfg, workload) for workload in workloads)
        except TilingError:
            return None if layer.is_block else 1e12  # lowering reports a single layer that does not fit

    def _cycles(self, segments: Sequence[_Segment], policy: SchedulePolicy | None = None) -> float:
        """Return the cycles of a chain cut into `segments` by the timing model, cached.

        The chain runs twice in a row, so that its overlap with the layers behind it counts.
        """
        planner = self.planner.with_policy(policy or self.policy)
        layers = [segment.layer for segment in segments]
        name = chain_name(planner, layers)
        return cached_cycles(
            planner, name, layers,
            lambda: time_layers(self.cfg, planner, [*layers, *_repeat_layers(layers, planner)]),
        )  # fmt: skip

    def cycles_once(self, layers: Sequence[Layer]) -> float:
        """Return the cycles of `layers` one after the other by the timing model; inf if one does not fit."""
        return timed_cycles(self.cfg, self.planner.with_policy(self.policy), layers)


def _repeat_layers(layers: Sequence[Layer], planner: Planner) -> list[Layer]:
    """Return copies of the layers in other storages, to run behind the originals.

    They read the originals' output if it has the shape of their input.
    """
    x, y = layers[0].x, layers[-1].y
    is_repeatable = x.storage.groups == y.storage.groups and replace(x, storage=y.storage) == y
    storage_of = {x.storage: y.storage} if is_repeatable else {}

    def move(act: Activation) -> Activation:
        """Return `act` in the storage of the copy."""
        if act.storage not in storage_of:
            storage_of[act.storage] = Storage(act.storage.name, act.storage.groups)
        return replace(act, storage=storage_of[act.storage])

    return [planner.share_computations(layer.map_activations(move), layer, storage_of) for layer in layers]


def _note_cycles(block: LayerAssignment, together: float, alone: float) -> LayerAssignment:
    """Set the cycles of a block and of its layers alone, for reports; 0 stands for layers that do not fit."""
    block.block_cycles, block.separate_cycles = (cycles if isfinite(cycles) else 0 for cycles in (together, alone))
    return block


def geometry(planner: Planner, layer: Layer) -> Hashable:
    """Return a key that is equal for layers, or blocks of layers, with the same loops, without lowering a block.

    The loops of a block depend on its cuts and on the loops of its layers alone. Raises TilingError if the accelerator
    cannot compute one of these alone.
    """
    layers = layer.layers if layer.is_block else (layer,)
    return tuple(tuple(d.digest for d in planner.computations(part)) for part in layers), layer.cuts


def estimated_cycles(cfg: Config, workload: Workload | BlockWorkload) -> float:
    """Return the estimated cycles under the tiling that the estimate prefers. Raises TilingError if none fits."""
    if isinstance(workload, Workload) and workload.in_blocks:
        return estimate(cfg, workload, choose(cfg, workload))
    block = workload if isinstance(workload, BlockWorkload) else BlockWorkload((workload,))
    return block_space.estimate(cfg, block, block_space.choose(cfg, block))


def _fuse_choices(selection: Partition, segment: _Segment) -> LayerAssignment:
    """Fuse the choices of a segment into one, and forget where the outputs inside it were stored."""
    *inner_choices, last = segment.choices
    for choice in inner_choices:
        for locations in (selection.forms, selection.written):
            del locations[choice.value]
    notes = "; ".join(choice.note for choice in segment.choices if choice.note)
    reads = {storage: source for choice in segment.choices for storage, source in choice.reads.items()}
    nodes = [node for choice in segment.choices for node in choice.nodes]
    return LayerAssignment(segment.layer, nodes, reads, last.value, notes)


# Attention --------------------------------------------------------------------------------------------------------


def _fuse_attention(
    cfg: Config, selection: Partition, partitioner: _ChainPartitioner, apart: frozenset[ir.Node]
) -> Iterator[tuple[Sequence[LayerAssignment], LayerAssignment]]:
    """Yield (choices, block) for attention whose heads take fewer cycles as a block.

    Both are timed with the layers before them.
    """
    for attention in _find_attentions(cfg, selection, apart):
        block, before = _Segment(attention.stages), [choice.layer for choice in attention.before]
        cycles_before = partitioner.cycles_once(before) if before else 0
        together = partitioner.cycles_once([*before, block.layer]) - cycles_before
        alone = partitioner.cycles_once(attention.one_by_one) - cycles_before
        is_decided = not partitioner.decided.isdisjoint(choice.layer.name for choice in attention.heads)
        if block.layer.name in partitioner.decided or (together < alone and not is_decided):
            yield attention.heads, _note_cycles(_fuse_choices(selection, block), together, alone)


class _Attention(NamedTuple):
    """Layers of attention, and the same as one block.

    heads: the choices of all heads, as in the selection. stages: product, softmax and product, each for all heads.
    before: choices that make the inputs of attention, and the inputs of these. one_by_one: the layers of `before` and
    `heads` in the order of a launch.
    """

    heads: list[LayerAssignment]
    stages: tuple[LayerAssignment, LayerAssignment, LayerAssignment]
    before: list[LayerAssignment]
    one_by_one: list[Layer]


def _find_attentions(cfg: Config, selection: Partition, apart: Collection[ir.Node]) -> Iterator[_Attention]:
    """Yield each attention in `selection` that has no operator in `apart`."""
    choices = selection.choices
    softmax_outputs = dict.fromkeys(choice.value for choice in choices if choice.layer.softmax is not None)
    for value in softmax_outputs:
        softmaxes = [choice for choice in choices if choice.value is value]
        scores, probabilities = softmaxes[0].layer.x.storage, softmaxes[0].layer.y.storage
        score_products = [choice for choice in choices if choice.layer.y.storage is scores]
        value_products = [
            choice for choice in choices if probabilities in (act.storage for act in choice.layer.inputs())
        ]
        score_readers = [choice for choice in choices if scores in (act.storage for act in choice.layer.inputs())]
        heads = [*score_products, *softmaxes, *value_products]
        nodes = {node for choice in heads for node in choice.nodes}
        if [*map(id, score_readers)] != [*map(id, softmaxes)] or not nodes.isdisjoint(apart):
            continue
        if not len(score_products) == len(softmaxes) == len(value_products):
            continue
        stage_pairs = zip((score_products, softmaxes), (softmaxes, value_products))
        if any(a.layer.y != b.layer.x for before, later_stage in stage_pairs for a, b in zip(before, later_stage)):
            continue
        stages = [
            _merge_heads(cfg, choices_of_heads) for choices_of_heads in (score_products, softmaxes, value_products)
        ]
        if (
            all(_is_read_only_by(choice.value, nodes, selection) for choice in (score_products[0], softmaxes[0]))
            and None not in stages
        ):
            score_stage, softmax_stage, value_stage = (stage for stage in stages if stage is not None)
            before = _layers_before(choices, heads)
            layers = [choice.layer for choice in (*before, *heads)]
            order = order_around_softmaxes(cfg, layers)
            yield _Attention(
                heads, (score_stage, softmax_stage, value_stage), before, [layers[number] for number in order]
            )


def _is_read_only_by(value: ir.Value, nodes: Collection[ir.Node], selection: Partition) -> bool:
    """Return whether only `nodes` read `value` and its views."""
    if value.is_graph_output():
        return False
    others = [use.node for use in value.uses() if use.node not in nodes]
    return all(n in selection.views and all(_is_read_only_by(y, nodes, selection) for y in n.outputs) for n in others)


def _merge_heads(cfg: Config, choices: Sequence[LayerAssignment]) -> LayerAssignment | None:
    """Merge equal layers of all heads into one; return None if their constants or places differ."""
    layers = [choice.layer for choice in choices]
    first = layers[0]
    if (first.product is None and first.softmax is None) or first.heads > 1:
        return None
    if any(layer.kind != first.kind or _scaling(layer) != _scaling(first) for layer in layers):
        return None
    x, y = (_join_channels(cfg, acts) for acts in ([layer.x for layer in layers], [layer.y for layer in layers]))
    products = [layer.product for layer in layers if layer.product is not None]
    product, w = first.product, _join_channels(cfg, [product.w for product in products]) if products else None
    if x is None or y is None or (products and w is None):
        return None
    if product is not None and w is not None:
        product = replace(product, w=w)
    name = first.name if len(layers) == 1 else choices[0].nodes[0].name or ""
    reads = {storage: source for choice in choices for storage, source in choice.reads.items()}
    return replace(
        choices[0], layer=replace(first, name=name, heads=len(layers), x=x, y=y, product=product), reads=reads
    )


def _join_channels(cfg: Config, acts: Sequence[Activation]) -> Activation | None:
    """Join activations whose channels follow each other in one storage; return None if they do not."""
    first = acts[0]
    for number, act in enumerate(acts):
        if act != replace(first, group_offset=first.group_offset + number * first.groups(cfg)):
            return None
    if first.channels % cfg.group:
        return None
    return replace(first, channels=first.channels * len(acts))


def _scaling(layer: Layer) -> tuple[object, ...]:
    """Return the constants of a product or softmax, which must be equal for all heads."""
    epilogue, softmax, product, requantise = layer.epilogue, layer.softmax, layer.product, layer.requantise
    constants: list[object] = [epilogue.clip, epilogue.residual]
    constants.append(None if epilogue.table is None else epilogue.table.tobytes())
    if softmax is not None:
        constants += [softmax.powers.tobytes(), softmax.zero_point]
    if product is not None:
        constants += [product.x_offset, product.w_offset]
    if requantise is not None:
        constants += [
            *(np.asarray(array).tobytes() for array in (requantise.bias, requantise.multiplier, requantise.shift)),
            requantise.zero_point,
        ]
    return tuple(constants)


def _layers_before(choices: Sequence[LayerAssignment], heads: Sequence[LayerAssignment]) -> list[LayerAssignment]:
    """Return the choices that make the inputs of `heads`, and those that make the inputs of these, in order."""
    head_ids = {id(choice) for choice in heads}
    before: dict[int, LayerAssignment] = {}
    for _ in range(2):
        inputs = {act.storage for choice in (*heads, *before.values()) for act in choice.layer.inputs()}
        before = {id(c): c for c in choices if c.layer.y.storage in inputs and id(c) not in head_ids}
    return [choice for choice in choices if id(choice) in before]
