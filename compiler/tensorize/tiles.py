"""Tiles: the iterations of pipelined loops, with their places in scratchpads, as instructions in a stream.

render.py compiles a function to a `TilePlan`. It is run here: loops one iteration after the other, and tensors in
scratchpads, around and inside of tiles, get their entries from the rings of vthread.pipeline.
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
    """A loop that is run at compile time, one iteration after the other."""

    var: Var
    extent: int
    body: list[Node]


@dataclass
class Branch:
    """A condition that is evaluated at compile time."""

    statement: If
    body: list[Node]
    orelse: list[Node]


@dataclass
class Region:
    """Entries of a scratchpad for `tensor`, while `body` runs."""

    tensor: Tensor
    scope: str
    entries: int
    kept: bool
    body: list[Node]


@dataclass
class Fill:
    """Entries for `tensor` inside a tile, with the LOADs that fill them, if any. late: whether to load when the first
    phase begins, not with the tile."""

    tensor: Tensor
    scope: str
    entries: int
    kept: bool
    loads: list[MoveInstruction]
    late: bool = False


@dataclass
class Pipelined:
    """A loop whose iterations are tiles: each first loads its `fills`, and later runs its `computes`."""

    var: Var
    extent: int
    fills: list[Fill]
    computes: list[ComputeInstruction | MoveInstruction]
    outer: list[Tensor]
    """Tensors that lie in scratchpads around the tiles."""
    depths: Mapping[str, int]
    """Entries of the scratchpads."""

    @cached_property
    def phases(self) -> list[list[ComputeInstruction | MoveInstruction]]:
        """The computes, cut wherever GEMM waits for the vector unit or the other way round. Instructions behind the
        last GEMM belong to its phase."""
        runs = [list(nodes) for _, nodes in groupby(self.computes, lambda node: node.opcode == Opcode.GEMM)]
        if self.attends:
            return [before + behind for before, behind in zip(runs[::2], runs[1::2], strict=True)]
        last = [node for nodes in runs[-2:] for node in nodes]
        return [*runs[:-2], last] if len(runs) > 1 and runs[-1][0].opcode != Opcode.GEMM else runs

    @cached_property
    def handed(self) -> dict[Tensor, int]:
        """Results that tiles of a block hand on to a later layer inside the tile, each with the count of places that it
        takes in turns. One place is enough where its writer also reads it, since a unit works in order."""
        results = {fill.tensor for fill in self.fills if not fill.loads and fill.scope != "out"}
        if not any(fill.scope in ("inp", "vin") for fill in self.fills if fill.tensor in results):
            return {}
        units = {tensor: {n.opcode for n in self.computes if tensor in n.scratchpads} for tensor in results}
        places = {tensor: min(len(opcodes), 2) for tensor, opcodes in units.items()}
        return places if not self.attends else places | dict(self._sum_places(results))

    def _sum_places(self, results: set[Tensor]) -> Iterator[tuple[Tensor, int]]:
        """For attention, places of sums in acc, which are read in the phase that makes them: one, and a second where
        there is room, first for the last phase. Then its products need not wait for the tile before."""
        sums = [fill for fill in self.fills if fill.tensor in results and fill.scope == "acc"]
        room = self.depths["acc"] - sum(fill.entries for fill in sums)
        ends = [max(n for n, node in enumerate(self.computes) if fill.tensor in node.scratchpads) for fill in sums]
        for _, fill in sorted(zip(ends, sums), key=lambda pair: -pair[0]):
            second = fill.entries <= room
            room -= fill.entries * second
            yield fill.tensor, 1 + second

    @property
    def attends(self) -> bool:
        """Whether a tile is attention: a softmax of sums of GEMM. The softmax takes the vector unit as long as GEMM
        takes for the next tile's scores, so that these need no second place."""
        softmax = any(isinstance(node, ComputeInstruction) and node.rule.alone for node in self.computes)
        return softmax and any(node.opcode == Opcode.GEMM for node in self.computes)

    @property
    def stored(self) -> set[Tensor]:
        """Tensors in DRAM that tiles write."""
        return {node.tensor for node in self.computes if isinstance(node, MoveInstruction)}


Node = SerialLoop | Branch | Region | Pipelined | ComputeInstruction | MoveInstruction


@dataclass
class TilePlan:
    """A compiled function. tensors: those in DRAM, and whether the function only reads them."""

    cfg: Config
    nodes: list[Node]
    tensors: dict[Tensor, bool]

    def bind(
        self, stream: Stream, addresses: Mapping[Any, int], scalars: Mapping[str, Any] | None = None
    ) -> PlacedPlan:
        """Bind the function to arrays that begin at `addresses` (by tensor), and to values of its scalars."""
        return PlacedPlan(self, stream, addresses, scalars or {})


# Tiles, run ---------------------------------------------------------------------------------------------------


@dataclass
class PipelineTile:
    """One iteration of a pipelined loop, or an instruction outside of them, whose node is None.

    load: emits the loads, and returns the phases that emit the rest.
    """

    env: Env
    load: Load
    node: Pipelined | None

    def check(self) -> None:
        """Raise TilingError where a LOAD or STORE of the tile does not fit an instruction."""
        for move in (*self.moves(True), *self.moves(False)):
            move.check(self.env)

    def moves(self, loads: bool) -> Iterator[MoveInstruction]:
        """The LOADs of the tile, or its STOREs."""
        if self.node is not None and loads:
            yield from (load for fill in self.node.fills for load in fill.loads)
        elif self.node is not None:
            yield from (node for node in self.node.computes if isinstance(node, MoveInstruction))


@dataclass
class _Held:
    """A region around tiles, with its first entry once the first of them has loaded."""

    scope: str
    entries: int
    first: int | None = None


@dataclass
class _Resident:
    """A tensor in inp or vin that some tiles make and later ones read. It has a place from the first tile's compute to
    the last one's.

    making: entries that each tile will write which has not computed, by the tile's number.
    """

    tensor: Tensor
    ring: Ring
    entries: int
    place: tuple[int, int] | None = None
    claimed: bool = False
    closed: bool = False
    """Whether all tiles that use it have been generated."""
    users: int = 0
    making: dict[int, set[int]] = field(default_factory=dict)

    def claim(self, owner: object) -> None:
        """Claim the ring for `owner`. RenderError where others never release it."""
        if not self.claimed and not self.ring.claim(owner):
            raise RenderError(f"{self.tensor.name} needs a scratchpad that others do not give back")
        self.claimed = True

    def placed(self) -> bool:
        """Whether the tensor has a place; takes one if there is room."""
        self.place = self.place or self.ring.place(self.entries)
        return self.place is not None

    def made(self, entries: set[int]) -> bool:
        """Whether no pending tile will write these entries."""
        return all(entries.isdisjoint(others) for others in self.making.values())

    def end(self, users: int = 0) -> None:
        """Count off tiles that used the tensor; behind the last one its place is released."""
        self.users -= users
        if self.closed and not self.users and self.place is not None:
            self.ring.release(self.place)


Slot = int | _Held | _Resident
"""First entry of a tensor in its scratchpad, or the region that will have one."""


@dataclass
class PlacedPlan:
    """A TilePlan with addresses, whose tiles emit into `stream`."""

    plan: TilePlan
    stream: Stream
    addresses: Mapping[Any, int]
    scalars: Mapping[str, Any]
    changing: frozenset[Tensor] = frozenset()
    """Tensors whose content changes, as that of activations does."""
    before_load: Callable[[Tensor], None] = lambda tensor: None
    """Called before each LOAD with the tensor that it reads."""

    def __post_init__(self) -> None:
        self.used: dict[str, int] = {}
        self.depth = max(_depths(self.plan.nodes), default=1)
        """Most phases of a tile; readers of its results come after them."""
        self.handed: dict[tuple[str, int], tuple[str, int, int, int]] = {}
        """Scratchpad, first entry, end and count of places of results handed on, by name and size, while tiles that use
        them have not computed."""
        self.begun = 0
        self.under_way: Counter[str] = Counter()
        """Tiles that hand on a tensor and have not computed, by its name."""
        self.awaited = 0
        self.version = object()  # what is loaded of changing tensors is there for these tiles only
        self.constants: dict[int, dict[str, int]] = {}

    def tiles(self) -> Iterator[PipelineTile]:
        """Generate all iterations of pipelined loops in order; an instruction outside of them is a tile of its own."""
        for node in self.plan.nodes:
            yield from self._run(node, {}, {})

    def _run(self, node: Node, env: Env, slots: dict[Tensor, Slot]) -> Iterator[PipelineTile]:
        """Generate the tiles of a node. env: values of the loops around; slots: places of tensors around."""
        match node:
            case SerialLoop(var, extent, body):
                for i in range(extent):
                    for inner in body:
                        yield from self._run(inner, env | {var: i}, slots)
            case Branch(If(cond=cond), body, orelse):
                for inner in body if evaluate(cond, env) else orelse:
                    yield from self._run(inner, env, slots)
            case Region(body=body):
                yield from self._region(node, env, slots)
            case Pipelined(var, extent):
                for i in range(extent):
                    here = env | {var: i}
                    for tensor in node.outer:
                        slot = slots[tensor]
                        if isinstance(slot, _Resident):
                            slot.users += 1
                    yield PipelineTile(here, lambda here=here: self._load(node, here, slots), node)  # type: ignore[misc]
            case ComputeInstruction() | MoveInstruction():
                if any(not isinstance(slot, int) for slot in slots.values()):
                    raise RenderError("an instruction lies beside a pipelined loop that uses the same scratchpad")
                first = {tensor: slot for tensor, slot in slots.items() if isinstance(slot, int)}
                yield PipelineTile(env, lambda: [lambda: self._emit(node, env, first)], None)

    def _region(self, node: Region, env: Env, slots: dict[Tensor, Slot]) -> Iterator[PipelineTile]:
        """Generate the tiles of a region's body, with a place for its tensor."""
        first = self.used.get(node.scope, 0)
        slot: Slot = first
        if _has_tiles(node.body):
            resident = node.scope in ("inp", "vin")
            ring = self.stream.rings[node.scope]
            slot = _Resident(node.tensor, ring, node.entries) if resident else _Held(node.scope, node.entries)
        else:
            self.used[node.scope] = first + node.entries
        for inner in node.body:
            yield from self._run(inner, env, slots | {node.tensor: slot})
        self.used[node.scope] = first
        if isinstance(slot, _Resident):
            slot.closed = True
            slot.end()

    def _constants(self, node: ComputeInstruction | MoveInstruction) -> dict[str, int]:
        """The fields of an instruction that no loop changes, remembered."""
        if id(node) not in self.constants:
            self.constants[id(node)] = node.constants(self.scalars)
        return self.constants[id(node)]

    def _emit(self, node: ComputeInstruction | MoveInstruction, env: Env, slots: Mapping[Tensor, int]) -> None:
        """Emit an instruction for values of the loops, with its tensors at these entries."""
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

    def _load(self, node: Pipelined, env: Env, around: Mapping[Tensor, Slot]) -> list[Phase | None]:
        """Load a tile: take places in the scratchpads, and emit LOADs of what is not there. Returns its phases."""
        stream = self.stream
        residents = [region for tensor in node.outer if isinstance(region := around[tensor], _Resident)]
        for resident in residents:
            resident.claim(self)
        slots = self._handed(node)
        outs, awaited = [fill for fill in node.fills if fill.scope == "out"], list[Callable[[], None]]()
        for tensor in node.outer:
            region = around[tensor]
            if isinstance(region, _Resident):
                continue
            assert isinstance(region, _Held)
            if region.first is None:
                region.first = self._take(region.scope, region.entries, tensor)
            else:
                stream.hold(stream.rings[region.scope], region.first, region.entries)
            slots[tensor] = region.first
        for fill in node.fills:
            if fill.scope != "out" and fill.tensor not in slots:
                slots[fill.tensor] = self._fill(fill, env, awaited)
        number = self._await(node, env, residents, slots) if residents else 0

        def last() -> None:
            first = stream.rings["out"].take(sum(fill.entries for fill in outs)) if outs else 0
            for fill in outs:  # in a row, so that none lies over another
                slots[fill.tensor] = first
                first += fill.entries
            emit(node.phases[-1])
            self._release_handed(node)
            for resident in residents:
                resident.making.pop(number, None)
                resident.end(1)

        def emit(nodes: list[ComputeInstruction | MoveInstruction]) -> None:
            while awaited:
                awaited.pop(0)()
            for instruction in nodes:
                self._emit(instruction, env, slots)

        phases: list[Phase | None] = [partial(emit, nodes) for nodes in node.phases[:-1]]
        # A reader of results of several phases comes after them, and after the first phases of the next tile.
        before = [None] * self.depth if not phases and self.depth > 1 else []
        return [*before, *phases, last]

    def _await(self, node: Pipelined, env: Env, residents: list[_Resident], slots: dict[Tensor, int]) -> int:
        """Let a tile compute only once its inputs among `residents` are complete, and all have places. Returns the
        tile's number."""
        number, self.awaited = self.awaited, self.awaited + 1
        reads: list[tuple[_Resident, set[int]]] = []
        for resident in residents:
            tensor, touched = resident.tensor, {True: set[int](), False: set[int]()}
            for compute in node.computes:
                if isinstance(compute, ComputeInstruction) and tensor in compute.scratchpads:
                    for written, entries in touched.items():
                        entries |= compute.touched(env, tensor, self._constants(compute), written, self.plan.cfg.taps)
            reads.append((resident, touched[False]))
            if touched[True]:
                resident.making[number] = touched[True]

        def ready() -> bool:
            if not all(resident.made(entries) and resident.placed() for resident, entries in reads):
                return False
            slots.update((resident.tensor, resident.place[0]) for resident in residents if resident.place is not None)
            return True

        self.stream.when(ready)
        return number

    def _handed(self, node: Pipelined) -> dict[Tensor, int]:
        """Give a tile its places of results handed on, in turns. The first tile reserves them."""
        if not node.handed:
            return {}
        number, self.begun = self.begun, self.begun + 1
        self.under_way.update(tensor.name for tensor in node.handed)
        slots: dict[Tensor, int] = {}
        for fill in node.fills:
            if fill.tensor in node.handed:
                _, first, end, places = self._reserve(fill, node.handed[fill.tensor])
                slots[fill.tensor] = first + number % places * ((end - first) // places)
        return slots

    def _reserve(self, fill: Fill, places: int) -> tuple[str, int, int, int]:
        """Reserve places for a result that is handed on, or share those of a larger tile of the same loops. RenderError
        where there is no room."""
        name = fill.tensor.name
        for (other, size), known in self.handed.items():
            if other == name and size >= fill.entries:
                return known
        place = self.stream.rings[fill.scope].reserve(places * fill.entries, self)
        if place is None:
            raise RenderError(f"{name} needs {places * fill.entries} entries of {fill.scope} in a row")
        self.handed[name, fill.entries] = fill.scope, place[0], place[1], places
        return self.handed[name, fill.entries]

    def _release_handed(self, node: Pipelined) -> None:
        """Count off a tile that has computed; behind the last one the places of results handed on are released."""
        self.under_way.subtract(tensor.name for tensor in node.handed)
        for key in [key for key in self.handed if not self.under_way[key[0]]]:
            scope, first, end, _ = self.handed.pop(key)
            self.stream.rings[scope].release((first, end))

    def _fill(self, fill: Fill, env: Env, awaited: list[Callable[[], None]]) -> int:
        """Take entries for a tensor, and load them unless they are kept from before; late ones in the first phase.
        Returns the first entry."""
        ring, stream = self.stream.rings[fill.scope], self.stream
        fields = [load.fields(env, 0, self.addresses[load.tensor], self._constants(load)) or {} for load in fill.loads]
        key = None
        if fill.kept and fields:
            constant = not any(load.tensor in self.changing for load in fill.loads)
            key = (None if constant else self.version, fill.entries, *(tuple(f.values()) for f in fields))
            slot = stream.find(ring, key)
            if slot is not None:
                return slot
        first = self._take(fill.scope, fill.entries, fill.tensor, key)
        for load, f in zip(fill.loads, fields):
            self.before_load(load.tensor)
            if fill.late:
                awaited.append(partial(stream.add, load.opcode, load.moved(f, first)))
            else:
                stream.add(load.opcode, load.moved(f, first))
        return first

    def _take(self, scope: str, entries: int, tensor: Tensor, key: Hashable = None) -> int:
        """Take fresh entries for `tensor`. RenderError where entries that the same tile holds leave no room."""
        ring = self.stream.rings[scope]
        first = self.stream.take(ring, entries, key)
        if first + entries > ring.end or any(a < first + entries and first < b for a, b in ring.pins[:-1]):
            raise RenderError(f"{tensor.name} needs {entries} entries of {scope} in a row, beside what its tile holds")
        return first


def _depths(nodes: list[Node]) -> Iterator[int]:
    """For each pipelined loop, count the phases of its tiles."""
    for node in nodes:
        if isinstance(node, Pipelined):
            yield len(node.phases)
        elif isinstance(node, SerialLoop | Region | Branch):
            yield from _depths(node.body)


def _has_tiles(nodes: list[Node]) -> bool:
    """Whether some node is a pipelined loop, or holds one."""
    return any(
        isinstance(node, Pipelined) or (isinstance(node, SerialLoop | Region | Branch) and _has_tiles(node.body))
        for node in nodes
    )
