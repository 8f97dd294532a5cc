"""Loops whose bodies are intrinsics to the accelerator's instructions.

The innermost loops around an intrinsic become loops of its instruction, as many as it has, base and strides taken from
the affine indices; the loops around those are run here, and emit instructions, as is every loop marked `unroll`.

    for y in 8:                                  GEMM  extent_x=8 extent_k=4  acc_x=1  inp_x=4 inp_k=1  wgt_k=1
      for k in 4:                            ->
        gemm(acc[y, 0], inp[y, k, 0], wgt[k, 0, 0], (k == 0))

What an instruction has in common in all iterations is worked out once (instruction.py). The iterations of a pipelined
loop become tiles, whose loads go ahead of their compute (vthread.pipeline); elsewhere, tensors in a scratchpad lie
there from their allocation to its end. Which instruction must wait for which is found by vthread.tokens, and proved by
vthread.verify.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.expr.bounds import statements
from celosia.compiler.expr.interpret import evaluate
from celosia.compiler.expr.loops import Alloc, Block, For, Function, If, Intrinsic, Let, Stmt
from celosia.compiler.expr.nodes import Tensor, Var
from celosia.compiler.expr.verify import verify as verify_loops
from celosia.compiler.tensorize.instruction import Compute, Env, Move, Refused, RenderError, make
from celosia.compiler.tensorize.intrinsic import TensorIntrinsic
from celosia.compiler.tensorize.intrinsics import tile_shape
from celosia.compiler.vthread.disassemble import listing
from celosia.compiler.vthread.emit import encode
from celosia.compiler.vthread.interleave import interleave
from celosia.compiler.vthread.need import by_need
from celosia.compiler.vthread.pipeline import Load, Phase, Ring, Stream, depths
from celosia.compiler.vthread.tokens import insert_tokens
from celosia.compiler.vthread.verify import verify
from celosia.hw.config import Config
from celosia.hw.isa import Opcode

PAGE = 4096
ALIGN = 64


@dataclass(frozen=True)
class AcceleratorKernel:
    """Instructions for one function, and where its arrays lie in DRAM: [written][read only][instructions].

    addresses: byte offset of each input and output; constants: what else has to be there, by address.
    """

    name: str
    cfg: Config
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    addresses: Mapping[Tensor, int]
    constants: Mapping[int, NDArray[Any]]
    code: NDArray[np.uint8]
    code_address: int
    size: int

    def listing(self) -> str:
        """The instructions as text, one a line."""
        return "\n".join(listing(self.cfg, (int.from_bytes(row.tobytes(), "little") for row in self.code)))


def render(cfg: Config, function: Function) -> AcceleratorKernel:
    """The instructions that compute `function`, verified. RenderError where it holds what is no instruction.

    Arrays in DRAM are row-major, as the function declares them.
    """
    function = verify_loops(interleave(function))
    body = function.body
    written = list(function.outputs)
    while isinstance(body, Alloc) and body.scope == "workspace":
        written.append(body.tensor)
        body = body.body
    addresses: dict[Tensor, int] = {}
    end = 0
    plan = compile_loops(cfg, body)
    for tensor in written:
        addresses[tensor], end = end, _aligned(end + tensor.nbytes, ALIGN)
    writable = end = _aligned(end, PAGE)
    for tensor in (*function.inputs, *(t for t in plan.tensors if t.value is not None)):
        if tensor not in addresses:
            addresses[tensor], end = end, _aligned(end + tensor.nbytes, ALIGN)
    if lost := [t.name for t in plan.tensors if t not in addresses]:
        raise RenderError(f"{lost[0]} is not in DRAM")
    stream = Stream(cfg)
    bound = plan.bind(stream, addresses)
    for tile in bound.tiles():
        if tile.node is None:  # an instruction outside of pipelined loops, with places of its own
            stream.finish()
            for phase in tile.load():
                assert phase is not None
                phase()
            for ring in stream.rings.values():
                ring.live.clear()  # it may have overwritten what was kept
            continue
        loaded = {move.tensor for move in tile.moves(loads=True)}
        for node in {id(waiting.writes): waiting.writes for waiting in stream.waiting}.values():
            if isinstance(node, Pipelined) and node.stored & loaded:
                stream.settle(node)
        stream.start(0, tile.node, tile.load)
    stream.finish()
    stream.instructions = by_need(cfg, stream.instructions)
    insert_tokens(cfg, stream.instructions, writable)
    code = encode(cfg, stream.instructions)
    constants = {a: t.value for t, a in addresses.items() if t.value is not None}
    kernel = AcceleratorKernel(
        function.name, cfg, function.inputs, function.outputs, addresses, constants, code, end, end + code.size
    )
    verify(cfg, code, kernel.size, (0, writable))
    return kernel


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


# Loops, compiled ----------------------------------------------------------------------------------------------


@dataclass
class Loop:
    """Run here, one iteration after the other."""

    var: Var
    extent: int
    body: list[Node]


@dataclass
class Branch:
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
    """Inside a tile: entries for `tensor`, and what loads them (nothing where they are computed)."""

    tensor: Tensor
    scope: str
    entries: int
    kept: bool
    loads: list[Move]


@dataclass
class Pipelined:
    """A loop whose iterations are tiles: first `fills`, later `computes`."""

    var: Var
    extent: int
    fills: list[Fill]
    computes: list[Compute | Move]
    outer: list[Tensor]
    """What lies in scratchpads from before the tile."""

    @cached_property
    def phases(self) -> list[list[Compute | Move]]:
        """`computes`, cut wherever a unit waits for the other: gemm for the vector unit, or the other way round. What
        follows the last gemm goes with it."""
        found = [list(nodes) for _, nodes in groupby(self.computes, lambda node: node.opcode == Opcode.GEMM)]
        last = [node for nodes in found[-2:] for node in nodes]
        return [*found[:-2], last] if len(found) > 1 and found[-1][0].opcode != Opcode.GEMM else found

    @cached_property
    def handed(self) -> dict[Tensor, int]:
        """What is computed for later instructions of the tile, where one of them is of another layer: how many places
        it takes in turns. One is enough where its writer also reads it, since a unit works in order."""
        made = {fill.tensor for fill in self.fills if not fill.loads and fill.scope != "out"}
        if not any(fill.scope in ("inp", "vin") for fill in self.fills if fill.tensor in made):
            return {}
        units = {tensor: {n.opcode for n in self.computes if tensor in n.scratchpads} for tensor in made}
        return {tensor: min(len(of), 2) for tensor, of in units.items()}

    @property
    def stored(self) -> set[Tensor]:
        """What it writes in DRAM."""
        return {node.tensor for node in self.computes if isinstance(node, Move)}


Node = Loop | Branch | Region | Pipelined | Compute | Move


class _Compiler:
    """Loops to nodes."""

    def __init__(self, cfg: Config, places: Mapping[Tensor, tuple[int, ...]]) -> None:
        self.cfg, self.places = cfg, places
        self.depths = depths(cfg)
        self.tensors: dict[Tensor, bool] = {}
        """In DRAM, and whether nothing here writes them."""
        self.scopes: dict[Tensor, str] = {}
        self.used: dict[str, int] = {}
        """Entries of each scratchpad that lie around."""

    def nodes(self, s: Stmt, fixed: Env) -> list[Node]:
        match s:
            case Block(body):
                return [node for each in body for node in self.nodes(each, fixed)]
            case Alloc():
                return [self._region(s, fixed)]
            case Let(var, value, body):
                return self.nodes(body, fixed | {var: int(evaluate(value, fixed))})
            case If(body=body, orelse=orelse) if not isinstance(_inner(body), Intrinsic):
                other = [] if orelse is None else self.nodes(orelse, fixed)
                return [Branch(s, self.nodes(body, fixed), other)]
            case For(kind="pipelined"):
                return [self._pipelined(s, fixed)]
            case For() | Intrinsic() | If():
                loops, tests, leaf = _nest(s)
                if isinstance(leaf, Intrinsic):
                    return self._leaves(loops, tests, leaf, fixed)
                assert isinstance(s, For)
                if s.kind not in ("serial", "unrolled"):
                    raise RenderError(f"the accelerator cannot run the {s.kind} loop {s.var.name}")
                return [Loop(s.var, s.extent, self.nodes(s.body, fixed))]
        raise RenderError(f"no instruction does `{s}`; tensorize it")

    def _region(self, s: Alloc, fixed: Env) -> Region:
        tensor, scope = s.tensor, s.scope
        if scope not in self.depths:
            raise RenderError(f"{tensor.name} is in {scope} memory inside loops, which the accelerator has not")
        self.scopes[tensor] = scope
        entries = -(-tensor.size // prod(tile_shape(self.cfg, scope)))
        resident = _resident(scope, s.body)
        before, depth = 0 if resident else self.used.get(scope, 0), self.depths[scope]
        if before + entries > depth:
            raise RenderError(f"{tensor.name} needs {entries} entries of {scope}, which has {depth}, {before} in use")
        if resident:  # its place comes and goes with the tiles that use it
            return Region(tensor, scope, entries, s.kept, self.nodes(s.body, fixed))
        self.used[scope] = before + entries
        region = Region(tensor, scope, entries, s.kept, self.nodes(s.body, fixed))
        self.used[scope] = before
        return region

    def _leaves(self, loops: list[For], tests: list[If], leaf: Intrinsic, fixed: Env) -> list[Node]:
        """One instruction for all of `loops` if that is possible, else those of the loops inside the outermost."""
        if not isinstance(leaf.declared, TensorIntrinsic):
            raise RenderError(f"{leaf.name} is no intrinsic of the accelerator")
        reason = "its loop is unrolled"
        if all(loop.kind == "serial" for loop in loops):
            try:
                made = make(self.cfg, loops, [test.cond for test in tests], leaf, fixed, self.scopes, self.places)
                if isinstance(made, Move):
                    self.tensors[made.tensor] = made.loads and self.tensors.get(made.tensor, True)
                return [made]
            except Refused as refused:
                reason = str(refused)
        if not loops:
            raise RenderError(f"{leaf}: {reason}")
        outer, *inner = loops
        if outer.kind not in ("serial", "unrolled"):
            raise RenderError(f"the accelerator cannot run the {outer.kind} loop {outer.var.name}")
        return [n for i in range(outer.extent) for n in self._leaves(inner, tests, leaf, fixed | {outer.var: i})]

    def _pipelined(self, s: For, fixed: Env) -> Pipelined:
        fills: list[Fill] = []
        computes: list[Compute | Move] = []
        self._tile(self.nodes(s.body, fixed), fills, computes, s.var)
        for scope, depth in self.depths.items():
            entries = sum(fill.entries for fill in fills if fill.scope == scope)  # at least: see `handed`
            if entries > depth:
                name = s.var.name
                raise RenderError(
                    f"an iteration of the pipelined loop {name} needs {entries} of {depth} {scope} entries"
                )
        inside = {fill.tensor for fill in fills}
        used = {tensor: None for compute in computes for tensor in compute.scratchpads}
        return Pipelined(s.var, s.extent, fills, computes, [tensor for tensor in used if tensor not in inside])

    def _tile(self, nodes: list[Node], fills: list[Fill], computes: list[Compute | Move], var: Var) -> None:
        for node in nodes:
            if isinstance(node, Region):
                fills.append(Fill(node.tensor, node.scope, node.entries, node.kept, []))
                self._tile(node.body, fills, computes, var)
            elif isinstance(node, Loop | Branch | Pipelined):
                raise RenderError(f"the pipelined loop {var.name} holds loops that are no instruction")
            elif isinstance(node, Move) and node.loads:
                target = next((fill for fill in fills if fill.tensor is node.near), None)
                if target is None:
                    raise RenderError(f"{node.near.name} is loaded in the pipelined loop {var.name}, but lies outside")
                if target.kept and not self.tensors[node.tensor]:
                    raise RenderError(f"{node.near.name} is kept, but {node.tensor.name}, of which it is, changes")
                target.loads.append(node)
            else:
                computes.append(node)


@dataclass
class Plan:
    """A function, compiled. tensors: what of it lies in DRAM, and whether it is only read."""

    cfg: Config
    nodes: list[Node]
    tensors: dict[Tensor, bool]

    def bind(self, stream: Stream, addresses: Mapping[Any, int], scalars: Mapping[str, Any] | None = None) -> Bound:
        """This function on arrays that begin at `addresses` (by tensor), for these values of its scalars."""
        return Bound(self, stream, addresses, scalars or {})


def compile_loops(cfg: Config, body: Stmt, places: Mapping[Tensor, tuple[int, ...]] | None = None) -> Plan:
    """`body` as instructions whose addresses are open. RenderError where it holds what is no instruction.

    places: bytes from one index to the next, for tensors in DRAM that are not row-major.
    """
    compiler = _Compiler(cfg, places or {})
    nodes = compiler.nodes(body, {})
    return Plan(cfg, nodes, compiler.tensors)


def _resident(scope: str, s: Stmt) -> bool:
    """Whether a tensor of `scope` that lies around `s` is made by tiles and read by other tiles."""
    return scope in ("inp", "vin") and any(isinstance(each, For) and each.kind == "pipelined" for each in statements(s))


def _inner(s: Stmt) -> Stmt:
    return _nest(s)[2]


def _nest(s: Stmt) -> tuple[list[For], list[If], Stmt]:
    """The loops and conditions around the first statement that is something else."""
    loops: list[For] = []
    tests: list[If] = []
    while (isinstance(s, For) and s.kind != "pipelined") or (isinstance(s, If) and s.orelse is None):
        if isinstance(s, For):
            loops.append(s)
        else:
            tests.append(s)
        s = s.body
    return loops, tests, s


# Tiles, run ---------------------------------------------------------------------------------------------------


@dataclass
class Tile:
    """One iteration of a pipelined loop; node: None for what lies outside of them. load: emits its loads, and returns
    what emits the rest.
    """

    env: Env
    load: Load
    node: Pipelined | None

    def check(self) -> None:
        """Untileable where a LOAD or STORE of it cannot be said."""
        for move in (*self.moves(True), *self.moves(False)):
            move.check(self.env)

    def moves(self, loads: bool) -> Iterator[Move]:
        """Its LOADs, or its STOREs."""
        if self.node is not None and loads:
            yield from (load for fill in self.node.fills for load in fill.loads)
        elif self.node is not None:
            yield from (node for node in self.node.computes if isinstance(node, Move))


@dataclass
class _Held:
    """A region around tiles: its first entry, once the first of them has loaded."""

    scope: str
    entries: int
    first: int | None = None


@dataclass
class _Resident:
    """What some tiles make in inp or vin and later ones read: it has a place from the first tile's compute to the last.

    making: what each tile that has not computed will write, by its number.
    """

    tensor: Tensor
    ring: Ring
    entries: int
    place: tuple[int, int] | None = None
    claimed: bool = False
    closed: bool = False
    """Whether all its tiles are known."""
    users: int = 0
    making: dict[int, set[int]] = field(default_factory=dict)

    def claim(self, owner: object) -> None:
        if not self.claimed and not self.ring.claim(owner):
            raise RenderError(f"{self.tensor.name} needs a scratchpad that others do not give back")
        self.claimed = True

    def placed(self) -> bool:
        """Whether it has a place, now or since before."""
        self.place = self.place or self.ring.place(self.entries)
        return self.place is not None

    def made(self, entries: set[int]) -> bool:
        return all(entries.isdisjoint(others) for others in self.making.values())

    def end(self, users: int = 0) -> None:
        """So many tiles less use it."""
        self.users -= users
        if self.closed and not self.users and self.place is not None:
            self.ring.release(self.place)


Slot = int | _Held | _Resident
"""Where a tensor begins in its scratchpad, or will."""


@dataclass
class Bound:
    """A Plan with addresses; its tiles emit into `stream`."""

    plan: Plan
    stream: Stream
    addresses: Mapping[Any, int]
    scalars: Mapping[str, Any]
    changing: frozenset[Tensor] = frozenset()
    """Tensors that others write before or after, as layers write activations."""
    before_load: Callable[[Tensor], None] = lambda tensor: None
    """Called before each LOAD with the tensor that it reads."""

    def __post_init__(self) -> None:
        self.used: dict[str, int] = {}
        self.depth = max(_depths(self.plan.nodes), default=1)
        """Phases of the tile with the most; after it comes what reads its results."""
        self.handed: dict[tuple[str, int], tuple[str, int, int]] = {}
        """Scratchpad, first entry and end of what tiles hand on, by its name and size, while tiles are on their way."""
        self.begun = 0
        self.under_way: Counter[str] = Counter()
        """Tiles that hand on a tensor and have not ended, by its name."""
        self.awaited = 0
        self.version = object()  # what is loaded of changing tensors is there for these tiles only
        self.constants: dict[int, dict[str, int]] = {}

    def tiles(self) -> Iterator[Tile]:
        """All iterations of pipelined loops in order; what lies outside of them is a tile of its own."""
        for node in self.plan.nodes:
            yield from self._run(node, {}, {})

    def _run(self, node: Node, env: Env, slots: dict[Tensor, Slot]) -> Iterator[Tile]:
        match node:
            case Loop(var, extent, body):
                for i in range(extent):
                    for each in body:
                        yield from self._run(each, env | {var: i}, slots)
            case Branch(If(cond=cond), body, orelse):
                for each in body if evaluate(cond, env) else orelse:
                    yield from self._run(each, env, slots)
            case Region(body=body):
                yield from self._region(node, env, slots)
            case Pipelined(var, extent):
                for i in range(extent):
                    here = env | {var: i}
                    for tensor in node.outer:
                        slot = slots[tensor]
                        if isinstance(slot, _Resident):
                            slot.users += 1
                    yield Tile(here, lambda here=here: self._load(node, here, slots), node)  # type: ignore[misc]
            case Compute() | Move():
                if any(not isinstance(slot, int) for slot in slots.values()):
                    raise RenderError("an instruction lies beside a pipelined loop that uses the same scratchpad")
                first = {tensor: slot for tensor, slot in slots.items() if isinstance(slot, int)}
                yield Tile(env, lambda: [lambda: self._emit(node, env, first)], None)

    def _region(self, node: Region, env: Env, slots: dict[Tensor, Slot]) -> Iterator[Tile]:
        first = self.used.get(node.scope, 0)
        slot: Slot = first
        if _has_tiles(node.body):
            resident = node.scope in ("inp", "vin")
            ring = self.stream.rings[node.scope]
            slot = _Resident(node.tensor, ring, node.entries) if resident else _Held(node.scope, node.entries)
        else:
            self.used[node.scope] = first + node.entries
        for each in node.body:
            yield from self._run(each, env, slots | {node.tensor: slot})
        self.used[node.scope] = first
        if isinstance(slot, _Resident):
            slot.closed = True
            slot.end()

    def _constants(self, node: Compute | Move) -> dict[str, int]:
        if id(node) not in self.constants:
            self.constants[id(node)] = node.constants(self.scalars)
        return self.constants[id(node)]

    def _emit(self, node: Compute | Move, env: Env, slots: Mapping[Tensor, int]) -> None:
        constants = self._constants(node)
        if isinstance(node, Compute):
            for each in node.instructions(env, slots, constants):
                self.stream.add(node.opcode, each)
            return
        if node.loads:
            self.before_load(node.tensor)
        fields = node.fields(env, slots[node.near], self.addresses[node.tensor], constants)
        if fields is not None:
            self.stream.add(node.opcode, fields)

    def _load(self, node: Pipelined, env: Env, around: Mapping[Tensor, Slot]) -> list[Phase | None]:
        """Take places in the scratchpads, load what is not there."""
        stream = self.stream
        residents = [held for tensor in node.outer if isinstance(held := around[tensor], _Resident)]
        for resident in residents:
            resident.claim(self)
        slots = self._handed(node)
        late: list[Fill] = []
        for tensor in node.outer:
            held = around[tensor]
            if isinstance(held, _Resident):
                continue
            assert isinstance(held, _Held)
            ring = stream.rings[held.scope]
            if held.first is None:
                held.first = self._take(held.scope, held.entries, tensor)
            else:
                stream.hold(ring, held.first, held.entries)
            slots[tensor] = held.first
        for fill in node.fills:
            if fill.scope == "out":
                late.append(fill)
            elif fill.tensor not in slots:
                slots[fill.tensor] = self._fill(fill, env)
        number = self._await(node, env, residents, slots) if residents else 0

        def last() -> None:
            entries = sum(fill.entries for fill in late)
            first = stream.rings["out"].take(entries) if late else 0  # in a row, so that none lies over another
            for fill in late:
                slots[fill.tensor] = first
                first += fill.entries
            emit(node.phases[-1])
            self._ended(node)
            for resident in residents:
                resident.making.pop(number, None)
                resident.end(1)

        def emit(nodes: list[Compute | Move]) -> None:
            for each in nodes:
                self._emit(each, env, slots)

        phases: list[Phase | None] = [partial(emit, nodes) for nodes in node.phases[:-1]]
        # What reads the results of several phases comes after them, and after the first ones of the next tile.
        before = [None] * self.depth if not phases and self.depth > 1 else []
        return [*before, *phases, last]

    def _await(self, node: Pipelined, env: Env, residents: list[_Resident], slots: dict[Tensor, int]) -> int:
        """Let a tile compute only once what it reads of `residents` is made, and all have places: its number."""
        number, self.awaited = self.awaited, self.awaited + 1
        reads: list[tuple[_Resident, set[int]]] = []
        for resident in residents:
            tensor, found = resident.tensor, {True: set[int](), False: set[int]()}
            for each in node.computes:
                if isinstance(each, Compute) and tensor in each.scratchpads:
                    for written, entries in found.items():
                        entries |= each.touched(env, tensor, self._constants(each), written, self.plan.cfg.taps)
            reads.append((resident, found[False]))
            if found[True]:
                resident.making[number] = found[True]

        def ready() -> bool:
            if not all(resident.made(entries) and resident.placed() for resident, entries in reads):
                return False
            slots.update((resident.tensor, resident.place[0]) for resident in residents if resident.place is not None)
            return True

        self.stream.when(ready)
        return number

    def _handed(self, node: Pipelined) -> dict[Tensor, int]:
        """Places of what is handed on within a tile, in turns; taken with the first tile on its way."""
        if not node.handed:
            return {}
        number, self.begun = self.begun, self.begun + 1
        self.under_way.update(tensor.name for tensor in node.handed)
        slots: dict[Tensor, int] = {}
        for fill in node.fills:
            if fill.tensor in node.handed:
                places = node.handed[fill.tensor]
                _, first, end = self._held(fill, places)
                slots[fill.tensor] = first + number % places * ((end - first) // places)
        return slots

    def _held(self, fill: Fill, places: int) -> tuple[str, int, int]:
        """Places for what `fill` hands on; those of a larger tile of the same loops will do."""
        name = fill.tensor.name
        for (other, size), known in self.handed.items():
            if other == name and size >= fill.entries:
                return known
        place = self.stream.rings[fill.scope].reserve(places * fill.entries, self)
        if place is None:
            raise RenderError(f"{name} needs {places * fill.entries} entries of {fill.scope} in a row")
        self.handed[name, fill.entries] = fill.scope, place[0], place[1]
        return self.handed[name, fill.entries]

    def _ended(self, node: Pipelined) -> None:
        """A tile of `node` has computed; with the last one on its way go the places of what was handed on."""
        self.under_way.subtract(tensor.name for tensor in node.handed)
        for key in [key for key in self.handed if not self.under_way[key[0]]]:
            scope, first, end = self.handed.pop(key)
            self.stream.rings[scope].release((first, end))

    def _fill(self, fill: Fill, env: Env) -> int:
        """First entry of what `fill` brings, loaded unless it is kept there."""
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
            stream.add(load.opcode, load.moved(f, first))
        return first

    def _take(self, scope: str, entries: int, tensor: Tensor, key: Hashable = None) -> int:
        """Fresh entries for `tensor`. RenderError where what the same tile holds already is in the way."""
        ring = self.stream.rings[scope]
        first = self.stream.take(ring, entries, key)
        if first + entries > ring.end or any(a < first + entries and first < b for a, b in ring.pins[:-1]):
            raise RenderError(f"{tensor.name} needs {entries} entries of {scope} in a row, beside what its tile holds")
        return first


def _depths(nodes: list[Node]) -> Iterator[int]:
    """How many phases the tiles of each pipelined loop have."""
    for node in nodes:
        if isinstance(node, Pipelined):
            yield len(node.phases)
        elif isinstance(node, Loop | Region | Branch):
            yield from _depths(node.body)


def _has_tiles(nodes: list[Node]) -> bool:
    return any(
        isinstance(node, Pipelined) or (isinstance(node, Loop | Region | Branch) and _has_tiles(node.body))
        for node in nodes
    )
