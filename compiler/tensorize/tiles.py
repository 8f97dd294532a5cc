"""Tiles: run the loops of a compiled layer, give tensors entries of scratchpads, and emit instructions into a stream.

render.py compiles a function to a `TilePlan`. A PlacedPlan runs it at compile time: each iteration of a pipelined loop
is a tile. Tensors in scratchpads, around and inside of tiles, get their entries from the rings of vthread/pipeline.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from typing import Any

from celosia.compiler.expr.interpret import evaluate
from celosia.compiler.expr.loops import If
from celosia.compiler.expr.nodes import Tensor, Var
from celosia.compiler.tensorize.instruction import ComputeInstruction, Env, MoveInstruction, RenderError
from celosia.compiler.vthread.pipeline import Load, Phase, Ring, Stream
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode

# Loops, compiled ----------------------------------------------------------------------------------------------


@dataclass
class SerialLoop:
    """A loop outside of tiles, which is run at compile time."""

    var: Var
    extent: int
    body: list[Node]


@dataclass
class Branch:
    """A condition outside of tiles, which is evaluated at compile time."""

    statement: If
    body: list[Node]
    orelse: list[Node]


@dataclass
class Region:
    """Entries of scratchpad `scope` that hold `tensor` while `body` runs. kept: whether later readers may reuse
    them."""

    tensor: Tensor
    scope: str
    entries: int
    kept: bool
    body: list[Node]


@dataclass
class Fill:
    """Entries of scratchpad `scope` for `tensor` inside a tile, with the LOADs that fill them.

    loads: none for a tensor that the tile computes. kept: whether a later tile that loads the same may reuse them.
    late: whether to load when the first phase of the tile starts, not when the tile is loaded.
    """

    tensor: Tensor
    scope: str
    entries: int
    kept: bool
    loads: list[MoveInstruction]
    late: bool = False


@dataclass
class Pipelined:
    """A loop whose iterations are tiles: each first loads its `fills`, and later runs its `computes`.

    computes: GEMMs, VECTORs and STOREs in order. outer: tensors that lie in scratchpads around the tiles. depths:
    entries of each scratchpad.
    """

    var: Var
    extent: int
    fills: list[Fill]
    computes: list[ComputeInstruction | MoveInstruction]
    outer: list[Tensor]
    depths: Mapping[str, int]

    @cached_property
    def phases(self) -> list[list[ComputeInstruction | MoveInstruction]]:
        """The computes, cut wherever GEMM waits for the vector unit or the vector unit for GEMM.

        Phases of two virtual threads alternate. Instructions after the last GEMM belong to its phase.
        """
        runs = [list(nodes) for _, nodes in groupby(self.computes, lambda node: node.opcode == Opcode.GEMM)]
        if self.attends:
            return [before + behind for before, behind in zip(runs[::2], runs[1::2], strict=True)]
        last = [node for nodes in runs[-2:] for node in nodes]
        return [*runs[:-2], last] if len(runs) > 1 and runs[-1][0].opcode != Opcode.GEMM else runs

    @cached_property
    def handed_on(self) -> dict[Tensor, int]:
        """Results that a tile of a block hands on to a later layer in the same tile -> number of places for them.

        Tiles use the places in turn. One place is enough if its writer also reads it, since a unit works in order.
        """
        results = {fill.tensor for fill in self.fills if not fill.loads and fill.scope != "out"}
        if not any(fill.scope in ("inp", "vin") for fill in self.fills if fill.tensor in results):
            return {}
        units = {tensor: {n.opcode for n in self.computes if tensor in n.scratchpads} for tensor in results}
        places = {tensor: min(len(opcodes), 2) for tensor, opcodes in units.items()}
        return places if not self.attends else places | dict(self._attention_sum_places(results))

    def _attention_sum_places(self, results: set[Tensor]) -> Iterator[tuple[Tensor, int]]:
        """Yield the number of places of each sum of attention in acc: a second one if there is room, the last sum
        first.

        A sum is read in the phase that makes it; with two places its products need not wait for the tile before.
        """
        sums = [fill for fill in self.fills if fill.tensor in results and fill.scope == "acc"]
        room = self.depths["acc"] - sum(fill.entries for fill in sums)
        ends = [max(n for n, node in enumerate(self.computes) if fill.tensor in node.scratchpads) for fill in sums]
        for _, fill in sorted(zip(ends, sums), key=lambda pair: -pair[0]):
            has_second = fill.entries <= room
            room -= fill.entries * has_second
            yield fill.tensor, 1 + has_second

    @property
    def attends(self) -> bool:
        """Whether a tile is attention: a softmax of sums of GEMM.

        Its softmax keeps the vector unit busy while GEMM computes the scores of the next tile, so that scores need no
        second place.
        """
        has_softmax = any(isinstance(node, ComputeInstruction) and node.rule.alone for node in self.computes)
        return has_softmax and any(node.opcode == Opcode.GEMM for node in self.computes)

    @property
    def stored(self) -> set[Tensor]:
        """Tensors in DRAM that tiles write."""
        return {node.tensor for node in self.computes if isinstance(node, MoveInstruction)}


Node = SerialLoop | Branch | Region | Pipelined | ComputeInstruction | MoveInstruction
"""A part of a TilePlan."""


@dataclass
class TilePlan:
    """A function compiled to nodes without addresses. tensors: those in DRAM -> whether the function only reads
    them."""

    cfg: Config
    nodes: list[Node]
    tensors: dict[Tensor, bool]

    def bind(
        self, stream: Stream, addresses: Mapping[Any, int], scalars: Mapping[str, Any] | None = None
    ) -> PlacedPlan:
        """Return the plan bound to the DRAM addresses of its tensors, to values of its scalars, and to a stream."""
        return PlacedPlan(self, stream, addresses, scalars or {})


# Tiles, run ---------------------------------------------------------------------------------------------------


@dataclass
class PipelineTile:
    """One iteration of a pipelined loop, or an instruction outside of them, whose node is None.

    env: values of the loop variables. load: emits the LOADs, and returns the phases, which emit the rest.
    """

    env: Env
    load: Load
    node: Pipelined | None

    def check(self) -> None:
        """Raise TilingError if a LOAD or STORE of the tile does not fit an instruction."""
        for move in (*self.moves(True), *self.moves(False)):
            move.check(self.env)

    def moves(self, loads: bool) -> Iterator[MoveInstruction]:
        """Yield the LOADs of the tile if `loads`, else its STOREs."""
        if self.node is not None and loads:
            yield from (load for fill in self.node.fills for load in fill.loads)
        elif self.node is not None:
            yield from (node for node in self.node.computes if isinstance(node, MoveInstruction))


@dataclass
class _HeldRegion:
    """A region around tiles in a scratchpad. first: its first entry; None until the first of the tiles has loaded."""

    scope: str
    entries: int
    first: int | None = None


@dataclass
class _Resident:
    """A tensor in inp or vin that some tiles write and later ones read, as a whole image between groups of a block.

    It has a place from the first tile's compute to the last one's. place: first entry and end. claimed: whether the
    ring is claimed for the plan. closed: whether all tiles that use it were generated. users: tiles that use it and
    have not computed. pending_writes: by number of a tile that has not computed, the entries that it will write.
    """

    tensor: Tensor
    ring: Ring
    entries: int
    place: tuple[int, int] | None = None
    claimed: bool = False
    closed: bool = False
    users: int = 0
    pending_writes: dict[int, set[int]] = field(default_factory=dict)

    def claim(self, owner: object) -> None:
        """Claim the ring for `owner`. Raises RenderError if others hold entries that they never release."""
        if not self.claimed and not self.ring.claim(owner):
            raise RenderError(f"{self.tensor.name} needs a scratchpad that others do not give back")
        self.claimed = True

    def take_place(self) -> bool:
        """Take a place if the tensor has none and there is room. Returns whether it has one."""
        self.place = self.place or self.ring.place(self.entries)
        return self.place is not None

    def is_written(self, entries: set[int]) -> bool:
        """Whether these entries are complete: no tile that has still to compute will write them."""
        return all(entries.isdisjoint(others) for others in self.pending_writes.values())

    def finish(self, users: int = 0) -> None:
        """Subtract tiles that have computed from the users; after the last one, release the place."""
        self.users -= users
        if self.closed and not self.users and self.place is not None:
            self.ring.release(self.place)


Slot = int | _HeldRegion | _Resident
"""First entry of a tensor in its scratchpad, or a region that gets one when tiles load or compute."""


@dataclass
class PlacedPlan:
    """A TilePlan bound to addresses, whose tiles emit instructions into `stream`.

    changing: tensors whose content changes between runs of the plan, as activations do; what was loaded of them is not
    reused by other plans. before_load: called before each LOAD with the tensor that it reads.

    State: used: entries taken in each scratchpad by instructions outside of tiles. depth: the most phases of a tile;
    readers of its results must come after them. reserved: places of results handed on, (scratchpad, first entry, end,
    number of places) by name and size, while tiles that use them have not computed. begun: tiles with such results so
    far. under_way: by name of a result, the tiles that hand it on and have not computed. awaited: tiles so far that
    wait for residents. version: key of loads of changing tensors. constants: fields of instructions, by id of the node.
    """

    plan: TilePlan
    stream: Stream
    addresses: Mapping[Any, int]
    scalars: Mapping[str, Any]
    changing: frozenset[Tensor] = frozenset()
    before_load: Callable[[Tensor], None] = lambda tensor: None

    def __post_init__(self) -> None:
        self.used: dict[str, int] = {}
        self.depth = max(_phase_counts(self.plan.nodes), default=1)
        self.reserved: dict[tuple[str, int], tuple[str, int, int, int]] = {}
        self.begun = 0
        self.under_way: Counter[str] = Counter()
        self.awaited = 0
        self.version = object()
        self.constants: dict[int, dict[str, int]] = {}

    def tiles(self) -> Iterator[PipelineTile]:
        """Yield all iterations of pipelined loops in order; an instruction outside of them is a tile of its own."""
        for node in self.plan.nodes:
            yield from self._run(node, {}, {})

    def _run(self, node: Node, env: Env, slots: dict[Tensor, Slot]) -> Iterator[PipelineTile]:
        """Yield the tiles of a node. env: values of the loops around it. slots: places of the tensors around it."""
        match node:
            case SerialLoop(var, extent, body):
                for i in range(extent):
                    for child in body:
                        yield from self._run(child, env | {var: i}, slots)
            case Branch(If(cond=cond), body, orelse):
                for child in body if evaluate(cond, env) else orelse:
                    yield from self._run(child, env, slots)
            case Region(body=body):
                yield from self._region(node, env, slots)
            case Pipelined(var, extent):
                for i in range(extent):
                    tile_env = env | {var: i}
                    for tensor in node.outer:
                        slot = slots[tensor]
                        if isinstance(slot, _Resident):
                            slot.users += 1
                    yield PipelineTile(tile_env, lambda tile_env=tile_env: self._load_tile(node, tile_env, slots), node)  # type: ignore[misc]
            case ComputeInstruction() | MoveInstruction():
                if any(not isinstance(slot, int) for slot in slots.values()):
                    raise RenderError("an instruction lies beside a pipelined loop that uses the same scratchpad")
                first = {tensor: slot for tensor, slot in slots.items() if isinstance(slot, int)}
                yield PipelineTile(env, lambda: [lambda: self._emit(node, env, first)], None)

    def _region(self, node: Region, env: Env, slots: dict[Tensor, Slot]) -> Iterator[PipelineTile]:
        """Yield the tiles of a region's body, with a place for its tensor."""
        first = self.used.get(node.scope, 0)
        slot: Slot = first
        if _has_tiles(node.body):
            is_resident = node.scope in ("inp", "vin")
            ring = self.stream.rings[node.scope]
            slot = _Resident(node.tensor, ring, node.entries) if is_resident else _HeldRegion(node.scope, node.entries)
        else:
            self.used[node.scope] = first + node.entries
        for child in node.body:
            yield from self._run(child, env, slots | {node.tensor: slot})
        self.used[node.scope] = first
        if isinstance(slot, _Resident):
            slot.closed = True
            slot.finish()

    def _constants(self, node: ComputeInstruction | MoveInstruction) -> dict[str, int]:
        """Return the fields of an instruction that no loop changes, computed once."""
        if id(node) not in self.constants:
            self.constants[id(node)] = node.constants(self.scalars)
        return self.constants[id(node)]

    def _emit(self, node: ComputeInstruction | MoveInstruction, env: Env, slots: Mapping[Tensor, int]) -> None:
        """Emit the instruction `node` for the values `env` of the loops. slots: first entries of its tensors."""
        constants = self._constants(node)
        if isinstance(node, ComputeInstruction):
            for instruction_fields in node.instructions(env, slots, constants):
                self.stream.add(node.opcode, instruction_fields)
            return
        if node.loads:
            self.before_load(node.tensor)
        fields = node.fields(env, slots[node.on_chip], self.addresses[node.tensor], constants)
        if fields is not None:
            self.stream.add(node.opcode, fields)

    def _load_tile(self, node: Pipelined, env: Env, around: Mapping[Tensor, Slot]) -> list[Phase | None]:
        """Load a tile: take entries in the scratchpads, and emit LOADs of what is not there yet.

        around: places of tensors around the loop. Returns the phases of the tile; None is a phase that emits nothing.
        """
        stream = self.stream
        residents = [region for tensor in node.outer if isinstance(region := around[tensor], _Resident)]
        for resident in residents:
            resident.claim(self)
        slots = self._place_handed_on(node)
        outs, late_loads = [fill for fill in node.fills if fill.scope == "out"], list[Callable[[], None]]()
        for tensor in node.outer:
            region = around[tensor]
            if isinstance(region, _Resident):
                continue
            assert isinstance(region, _HeldRegion)
            if region.first is None:
                region.first = self._take_entries(region.scope, region.entries, tensor)
            else:
                stream.hold(stream.rings[region.scope], region.first, region.entries)
            slots[tensor] = region.first
        for fill in node.fills:
            if fill.scope != "out" and fill.tensor not in slots:
                slots[fill.tensor] = self._fill_entries(fill, env, late_loads)
        number = self._wait_for_inputs(node, env, residents, slots) if residents else 0

        def run_last_phase() -> None:
            """Take entries of out, emit the last phase, and release what the tile held."""
            first = stream.rings["out"].take(sum(fill.entries for fill in outs)) if outs else 0
            for fill in outs:  # one behind the other, in entries taken together
                slots[fill.tensor] = first
                first += fill.entries
            emit(node.phases[-1])
            self._release_handed_on(node)
            for resident in residents:
                resident.pending_writes.pop(number, None)
                resident.finish(1)

        def emit(nodes: list[ComputeInstruction | MoveInstruction]) -> None:
            """Emit the late loads, if they are still to come, and these instructions."""
            while late_loads:
                late_loads.pop(0)()
            for instruction in nodes:
                self._emit(instruction, env, slots)

        phases: list[Phase | None] = [partial(emit, nodes) for nodes in node.phases[:-1]]
        # A reader of a tile with several phases runs after these, and after the first phases of the next tile.
        before = [None] * self.depth if not phases and self.depth > 1 else []
        return [*before, *phases, run_last_phase]

    def _wait_for_inputs(self, node: Pipelined, env: Env, residents: list[_Resident], slots: dict[Tensor, int]) -> int:
        """Let the tile compute only when all `residents` have places and those that it reads are complete.

        Adds their first entries to `slots` then. Returns the number of the tile, under which its writes are pending.
        """
        number, self.awaited = self.awaited, self.awaited + 1
        reads: list[tuple[_Resident, set[int]]] = []
        for resident in residents:
            tensor, touched = resident.tensor, {True: set[int](), False: set[int]()}
            for compute in node.computes:
                if isinstance(compute, ComputeInstruction) and tensor in compute.scratchpads:
                    for written, entries in touched.items():
                        entries |= compute.touched_entries(
                            env, tensor, self._constants(compute), written, self.plan.cfg.taps
                        )
            reads.append((resident, touched[False]))
            if touched[True]:
                resident.pending_writes[number] = touched[True]

        def is_ready() -> bool:
            """Return whether all residents have places and the entries that the tile reads are complete."""
            if not all(resident.is_written(entries) and resident.take_place() for resident, entries in reads):
                return False
            slots.update((resident.tensor, resident.place[0]) for resident in residents if resident.place is not None)
            return True

        self.stream.compute_when(is_ready)
        return number

    def _place_handed_on(self, node: Pipelined) -> dict[Tensor, int]:
        """Return the first entries of the results that a tile hands on. The first tile reserves places; tiles take
        turns."""
        if not node.handed_on:
            return {}
        number, self.begun = self.begun, self.begun + 1
        self.under_way.update(tensor.name for tensor in node.handed_on)
        slots: dict[Tensor, int] = {}
        for fill in node.fills:
            if fill.tensor in node.handed_on:
                _, first, end, places = self._reserve(fill, node.handed_on[fill.tensor])
                slots[fill.tensor] = first + number % places * ((end - first) // places)
        return slots

    def _reserve(self, fill: Fill, places: int) -> tuple[str, int, int, int]:
        """Reserve places for a result that is handed on, or return those of a larger tile of the same loops.

        Raises RenderError if there is no room.
        """
        name = fill.tensor.name
        for (other, size), reservation in self.reserved.items():
            if other == name and size >= fill.entries:
                return reservation
        place = self.stream.rings[fill.scope].reserve(places * fill.entries, self)
        if place is None:
            raise RenderError(f"{name} needs {places * fill.entries} entries of {fill.scope} in a row")
        self.reserved[name, fill.entries] = fill.scope, place[0], place[1], places
        return self.reserved[name, fill.entries]

    def _release_handed_on(self, node: Pipelined) -> None:
        """Record that a tile has computed; after the last one, release the places of the results handed on."""
        self.under_way.subtract(tensor.name for tensor in node.handed_on)
        for key in [key for key in self.reserved if not self.under_way[key[0]]]:
            scope, first, end, _ = self.reserved.pop(key)
            self.stream.rings[scope].release((first, end))

    def _fill_entries(self, fill: Fill, env: Env, late_loads: list[Callable[[], None]]) -> int:
        """Take entries for a tensor and load them, unless an earlier tile's entries with the same content remain.

        Late loads are appended to `late_loads`, for the first phase. Returns the first entry.
        """
        ring, stream = self.stream.rings[fill.scope], self.stream
        fields = [load.fields(env, 0, self.addresses[load.tensor], self._constants(load)) or {} for load in fill.loads]
        key = None
        if fill.kept and fields:
            is_constant = not any(load.tensor in self.changing for load in fill.loads)
            key = (None if is_constant else self.version, fill.entries, *(tuple(f.values()) for f in fields))
            slot = stream.find(ring, key)
            if slot is not None:
                return slot
        first = self._take_entries(fill.scope, fill.entries, fill.tensor, key)
        for load, f in zip(fill.loads, fields):
            self.before_load(load.tensor)
            if fill.late:
                late_loads.append(partial(stream.add, load.opcode, load.at_entry(f, first)))
            else:
                stream.add(load.opcode, load.at_entry(f, first))
        return first

    def _take_entries(self, scope: str, entries: int, tensor: Tensor, key: Hashable = None) -> int:
        """Take new entries for `tensor`. Raises RenderError if the entries that the same tile holds leave no room."""
        ring = self.stream.rings[scope]
        first = self.stream.take(ring, entries, key)
        if first + entries > ring.end or any(a < first + entries and first < b for a, b in ring.pins[:-1]):
            raise RenderError(f"{tensor.name} needs {entries} entries of {scope} in a row, beside what its tile holds")
        return first


def _phase_counts(nodes: list[Node]) -> Iterator[int]:
    """Yield the number of phases of the tiles of each pipelined loop, for `PlacedPlan.depth`."""
    for node in nodes:
        if isinstance(node, Pipelined):
            yield len(node.phases)
        elif isinstance(node, SerialLoop | Region | Branch):
            yield from _phase_counts(node.body)


def _has_tiles(nodes: list[Node]) -> bool:
    """Whether one of `nodes` is a pipelined loop or contains one: a region around tiles gets its place as they run."""
    return any(
        isinstance(node, Pipelined) or (isinstance(node, SerialLoop | Region | Branch) and _has_tiles(node.body))
        for node in nodes
    )
