"""Software pipelining: when each tile loads and computes, and which entries of scratchpads it gets from their rings.

A tile, one iteration of a pipelined loop, has two parts: its loads and the rest. The loads of the next tiles are
emitted before the compute of this one, as many as have room: every scratchpad is a ring; a tile takes the entries after
those of the tile before, and holds them until it has computed. So LOAD works ahead across tiles and layers, and an
instruction that waits there for another unit does not leave GEMM idle.

    load A        load A
    compute A     load B
    load B    ->  compute A
    compute B     compute B

A tile whose layers hand results to each other on chip computes in several phases. The first phase of the next tile is
emitted before the second phase of this one, so that GEMM has work while the vector unit computes what it needs next.

(Virtual threads, which alternate iterations with entries fixed beforehand, are something else: interleave.py.)

Passes over the LOADs of a complete stream follow: they insert codebooks, reorder the first LOADs, and spread weights
over both ports. `tokens.py` then finds which instructions must wait for which, from the addresses that they access.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby, takewhile

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.layer import TilingError
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Buffer, Opcode, element_bytes, instruction_bytes, load_channels
from celosia.hw.spec.packing import CODEBOOK_ENTRIES
from celosia.hw.spec.scratchpads import depths, scratchpads
from celosia.sim.functional.access import Range, complete_fields, ranges

AHEAD = 8
"""Default number of tiles that may load before the oldest of them computes. With 0 a tile loads only when all tiles
before it have computed, and nothing hides the time of its loads."""

Phase = Callable[[], None]
"""Emits the instructions of one phase of a tile."""
Load = Callable[[], Sequence[Phase | None]]
"""Emits the loads of a tile, and returns the phases that emit the rest; None for a phase without instructions."""


@dataclass
class StreamInstruction:
    """One instruction before encoding.

    layer: number of the layer it belongs to. waits_for_compute: whether it waits for all earlier instructions of GEMM
    and VECTOR, even if it touches nothing of theirs.
    """

    opcode: Opcode
    fields: dict[str, int]
    layer: int = 0
    waits_for_compute: bool = False


class Ring:
    """Ring allocator of a scratchpad of `depth` entries, which remembers what each range holds.

    make_room: lets the oldest tile compute, so that it releases its pins; returns False if there is none. head: where
    the next entries are taken. live: key of loaded content -> its range. pins: ranges that tiles still need. reserved:
    ranges at the end of the scratchpad that no tile can take. owner, claims: who holds reservations or claims, and how
    many.
    """

    def __init__(self, depth: int, make_room: Callable[[], bool] = lambda: False) -> None:
        self.depth = depth
        self.make_room = make_room
        self.head = 0
        self.live: dict[Hashable, tuple[int, int]] = {}
        self.pins: list[tuple[int, int]] = []
        self.reserved: list[tuple[int, int]] = []
        self.owner: object = None
        self.claims = 0

    @property
    def end(self) -> int:
        """End of the entries that tiles can take: the first reserved entry."""
        return min((first for first, _ in self.reserved), default=self.depth) if self.reserved else self.depth

    def claim(self, owner: object) -> bool:
        """Let no other owner reserve entries until `release`, since these would split the ring.

        Returns False if another owner holds claims that it never releases.
        """
        while self.claims and self.owner is not owner:
            if not self.make_room():
                return False
        self.owner, self.claims = owner, self.claims + 1
        return True

    def reserve(self, size: int, owner: object) -> tuple[int, int] | None:
        """Claim the ring and reserve `size` entries at its end until `release`: (first, end). None if there is no
        room."""
        if not self.claim(owner):
            return None
        while (span := self.place(size)) is None:
            if not self.make_room():
                return None
        return span

    def place(self, size: int) -> tuple[int, int] | None:
        """Reserve `size` entries for the owner of a claim: (first, end). None while tiles hold entries there."""
        span = next((span for span in self._gaps(size) if not any(span[0] < b for _, b in self.pins)), None)
        if span is not None:
            self.reserved.append(span)
            self.live = {key: (a, b) for key, (a, b) in self.live.items() if b <= self.end}
            self.head = self.head if self.head < self.end else 0
        return span

    def _gaps(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield free ranges of `size` entries between and below reserved ones, the last one first."""
        end = self.depth
        for first, last in sorted(self.reserved, reverse=True):
            if end - size >= last:
                yield end - size, end
            end = first
        if end >= size:
            yield end - size, end

    def release(self, span: tuple[int, int]) -> None:
        """Release a reserved range and its claim."""
        self.reserved.remove(span)
        self.claims -= 1

    def find(self, key: Hashable) -> int | None:
        """Return the first entry of the content `key` if the scratchpad still holds it, else None."""
        span = self.live.get(key)
        return None if span is None else span[0]

    def size(self, key: Hashable) -> int:
        """Return the number of entries of the content `key`, which the scratchpad holds."""
        first, end = self.live[key]
        return end - first

    def _choose_first(self, size: int) -> int:
        """Return the first of the next `size` entries: a multiple of `size` if there is room.

        So as many tiles of that size fit as possible, whatever sizes were taken before.
        """
        aligned, end = -(-self.head // size) * size, self.end
        if aligned + size <= end:
            return aligned
        return self.head if self.head + size <= end else 0

    def _is_free(self, first: int, size: int) -> bool:
        """Whether no tile needs these entries, and all lie before the reserved ones."""
        return first + size <= self.end and not any(a < first + size and first < b for a, b in self.pins)

    def take(self, size: int, key: Hashable = None) -> int:
        """Take `size` entries, make room for them if necessary, and forget what they held. Returns the first.

        Where no tile can make room, they are the first gap between pinned ranges. key: of their new content, for
        `find`.
        """
        assert 0 < size <= self.depth, (size, self.depth)
        while not self._is_free(first := self._choose_first(size), size):
            if not self.make_room():
                gaps = (end for end in (0, *(end for _, end in self.pins)) if self._is_free(end, size))
                first = next(gaps, first)
                break
        end = first + size
        self.head = end if end < self.end else 0
        for old in [k for k, (a, b) in self.live.items() if a < end and first < b]:
            del self.live[old]
        if key is not None:
            self.live[key] = (first, end)
        return first


@dataclass
class _Tile:
    """A tile that has loaded and has not finished computing.

    layer: number of its layer. writes: the storage that it will write. ready: whether its first phase may be emitted
    now. phases: those that are still to be emitted. pins: entries that it holds.
    """

    layer: int
    writes: object
    ready: Callable[[], bool] = lambda: True
    phases: deque[Phase | None] = field(default_factory=deque)
    pins: list[tuple[Ring, tuple[int, int]]] = field(default_factory=list)


class ScheduleDeadlock(TilingError):
    """Raised if a tile that has loaded waits for entries that are never released. layer: number of its layer."""

    def __init__(self, layer: int) -> None:
        super().__init__("a block's results find no room beside what its tiles have loaded")
        self.layer = layer


class Stream:
    """The instruction stream under construction: instructions in program order, rings, and tiles that have not
    computed.

    layer: number of the layer whose instructions are emitted. waiting: tiles that have loaded and compute in their
    order. following: tiles of guests, which overtake the waiting ones. running: tiles between their phases, the latest
    first; those of one list advance together. loading: the tile whose loads are being emitted. waits_for_compute:
    whether the next instruction is marked so. settled: a storage of which the parts that are read next are known to be
    complete, though others are not.
    """

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.instructions: list[StreamInstruction] = []
        self.layer = 0
        self.waiting: deque[_Tile] = deque()
        self.following: deque[_Tile] = deque()
        self.running: deque[list[_Tile]] = deque()
        self.loading: _Tile | None = None
        self.waits_for_compute = False
        self.settled: object = None
        self.rings = {scope: Ring(depth, self.make_room) for scope, depth in depths(cfg).items()}

    def add(self, opcode: Opcode, fields: dict[str, int]) -> None:
        """Append an instruction of the current layer."""
        self.instructions.append(StreamInstruction(opcode, fields, self.layer, self.waits_for_compute))
        self.waits_for_compute = False

    def hold(self, ring: Ring, first: int, size: int) -> int:
        """Pin entries of `ring` until the tile that is loading has computed. Returns `first`."""
        assert self.loading is not None
        ring.pins.append((first, first + size))
        self.loading.pins.append((ring, ring.pins[-1]))
        return first

    def take(self, ring: Ring, size: int, key: Hashable = None) -> int:
        """Take new entries of `ring` for the tile that is loading, and pin them. Returns the first."""
        return self.hold(ring, ring.take(size, key), size)

    def find(self, ring: Ring, key: Hashable) -> int | None:
        """Return the first entry of the content `key` and pin it for the tile that is loading; None if it is not
        there."""
        first = ring.find(key)
        return None if first is None else self.hold(ring, first, ring.size(key))

    def compute_when(self, ready: Callable[[], bool]) -> None:
        """Let the tile that is loading compute only once `ready()` is true."""
        assert self.loading is not None
        self.loading.ready = ready

    # Tiles ---------------------------------------------------------------------------------------------------

    def start(self, layer: int, writes: object, load: Load, ahead: int = AHEAD) -> None:
        """Emit the loads of a tile of `layer` now, and let it compute when it is the oldest of more than `ahead` tiles.

        writes: the storage that it will write.
        """
        self.waits_for_compute = not ahead
        self.waiting.append(self._load_tile(layer, writes, load))
        self.waits_for_compute = False
        while len(self.waiting) > ahead or (not ahead and self.running):
            self.advance()

    def follow(self, layer: int, writes: object, load: Load) -> None:
        """Emit the loads of a guest's tile, which computes before the waiting ones: when the next guest tile has
        loaded."""
        tile = self._load_tile(layer, writes, load)
        self._overtake()
        self.following.append(tile)

    def advance(self) -> bool:
        """Emit one phase of the oldest waiting tile and of all tiles that are between phases. Returns False if there is
        none.

        Raises ScheduleDeadlock if the oldest tile is never ready.
        """
        if not self.waiting and not self.running:
            return False
        starting: list[_Tile] = []
        while self.waiting and (not starting or self.waiting[0].phases[0] is None) and self.waiting[0].ready():
            starting.append(self.waiting.popleft())
        if not starting and not self.running:
            raise ScheduleDeadlock(self.waiting[0].layer)
        if starting:
            self.running.appendleft(starting)
        for tiles in self.running:
            for tile in tiles:
                self._run_phase(tile)
        self.running = deque(
            unfinished for tiles in self.running if (unfinished := [tile for tile in tiles if tile.phases])
        )
        return True

    def make_room(self) -> bool:
        """Let some tile compute, so that it releases its entries. Returns False if there is none."""
        return self._overtake() or self.advance()

    def settle(self, storage: object) -> None:
        """Let tiles compute until none is left that writes `storage`, unless it is the one that is `settled`."""
        while any(tile.writes is storage for tile in self.following):
            self._overtake()
        while storage is not self.settled and self.will_write(storage):
            self.advance()

    def will_write(self, storage: object, but: int = -1) -> bool:
        """Whether a tile that has not computed will write `storage`; tiles of layer `but` do not count."""
        tiles = (tile for tiles in (self.waiting, *self.running) for tile in tiles)
        return any(tile.writes is storage and tile.layer != but for tile in tiles)

    def finish(self) -> None:
        """Let all tiles that have loaded compute."""
        while self.make_room():
            pass

    def _overtake(self) -> bool:
        """Emit all phases of the oldest guest tile, before the waiting tiles. Returns False if there is none."""
        if not self.following:
            return False
        tile = self.following.popleft()
        while tile.phases:
            self._run_phase(tile)
        return True

    def _load_tile(self, layer: int, writes: object, load: Load) -> _Tile:
        """Emit the loads of a tile, and return the tile with its phases."""
        tile = _Tile(layer, writes)
        self.loading, self.layer = tile, layer
        tile.phases.extend(load())
        self.loading = None
        return tile

    def _run_phase(self, tile: _Tile) -> None:
        """Emit the next phase of `tile`. Before its last phase it releases its entries."""
        loading, layer = self.loading, self.layer
        phase = tile.phases.popleft()
        if not tile.phases:
            for ring, pin in tile.pins:
                ring.pins.remove(pin)
        self.loading, self.layer = None, tile.layer
        if phase is not None:
            phase()
        self.loading, self.layer = loading, layer


# Passes over the LOADs of a complete stream -----------------------------------------------------------------------


def load_codebooks(
    cfg: Config, instructions: list[StreamInstruction], books: Mapping[int, NDArray[np.uint8]]
) -> list[StreamInstruction]:  # fmt: skip
    """Insert a LOAD of codebooks before each LOAD of packed weights whose codebooks are not in scratchpad book.

    Both go through one port, in order, so that no token is needed. books: address -> codebooks; the weights that need
    them lie behind them.
    """
    starts, result, loaded = sorted(books), [], np.zeros(0, np.uint8)
    for instruction in instructions:
        if instruction.opcode == Opcode.LOAD and instruction.fields.get("expand"):
            start = starts[bisect(starts, instruction.fields["dram_addr"]) - 1]
            needed = books[start]
            different = np.flatnonzero(needed[: len(loaded)] != loaded[: len(needed)])
            first = int(different[0]) if len(different) else min(len(loaded), len(needed))
            if first < len(needed):
                result.append(_codebook_load(cfg, start, first, len(needed), instruction.layer))
                loaded = np.concatenate([needed, loaded[len(needed) :]])
        result.append(instruction)
    return result


def _codebook_load(cfg: Config, start: int, first: int, end: int, layer: int) -> StreamInstruction:
    """Return the LOAD of the codebooks at address `start`, from the one that holds byte `first` up to byte `end`."""
    size = element_bytes(cfg, Buffer.BOOK)
    entry = first // (size * CODEBOOK_ENTRIES) * CODEBOOK_ENTRIES
    fields = {
        "buffer": int(Buffer.BOOK), "dram_addr": start + entry * size, "x_size": end // size - entry, "y_size": 1,
        "z_size": 1, "sram_base": entry, "sram_x": 1,
    }  # fmt: skip
    return StreamInstruction(Opcode.LOAD, fields, layer)


def reorder_first_loads(cfg: Config, instructions: list[StreamInstruction]) -> list[StreamInstruction]:
    """Sort the LOADs at the begin of a stream by the first instructions that read their data, so that these start
    early."""
    first = list(takewhile(lambda instruction: instruction.opcode == Opcode.LOAD, instructions))
    rest = instructions[len(first) :]
    loaded = {id(load): _accessed_ranges(cfg, load)[0] for load in first}
    if any(_have_overlap(a, b) for a, b in combinations(loaded.values(), 2)):
        return instructions
    needed: dict[int, int] = {}
    for number, instruction in enumerate(rest):
        if len(needed) == len(loaded):
            break
        read = _accessed_ranges(cfg, instruction) if instruction.opcode != Opcode.LOAD else []
        for key, access in loaded.items():
            if any(_have_overlap(access, other) for other in read):
                needed.setdefault(key, number)
    return [*sorted(first, key=lambda load: needed.get(id(load), len(rest))), *rest]


def _accessed_ranges(cfg: Config, instruction: StreamInstruction) -> list[Range]:
    """Return the ranges of scratchpad entries that an instruction reads or writes."""
    return ranges(cfg, instruction.opcode, complete_fields(cfg, instruction.opcode, instruction.fields))


def _have_overlap(a: Range, b: Range) -> bool:
    """Whether two ranges have entries of one scratchpad in common."""
    return a.memory == b.memory and a.first < b.end and b.first < a.end


def spread_weights(cfg: Config, instructions: list[StreamInstruction]) -> None:
    """Mark the weight LOADs of some layers as spread, so that half of each entry goes through the first port.

    These layers would wait for the second port otherwise, as matrix products with one image do: half of their weights
    is more than all bytes that go through the first port. Weights are marked in place.
    """
    if not scratchpads(cfg)["wgt"].spread:
        return
    second = load_channels(cfg)[1]
    for _, layer in groupby(sorted(instructions, key=lambda i: i.layer), key=lambda i: i.layer):
        layer_instructions = list(layer)
        first_bytes, second_bytes, weights = len(layer_instructions) * instruction_bytes(cfg), 0, []
        for instruction in layer_instructions:
            if instruction.opcode == Opcode.LOAD:
                size = _loaded_bytes(cfg, instruction.fields)
                if instruction.fields["buffer"] not in second:
                    first_bytes += size
                    continue
                second_bytes += size
                if instruction.fields["buffer"] == Buffer.WGT and not instruction.fields.get("expand"):
                    weights.append((instruction, size))
        if first_bytes + sum(size for _, size in weights) / 2 < second_bytes:
            for instruction, _ in weights:
                instruction.fields = instruction.fields | {"spread": 1}


def _loaded_bytes(cfg: Config, fields: dict[str, int]) -> int:
    """Return the bytes that a LOAD with these fields reads."""
    size = element_bytes(cfg, Buffer(fields["buffer"]), bool(fields.get("widen")), bool(fields.get("expand")))
    return fields["x_size"] * fields.get("y_size", 1) * fields.get("z_size", 1) * size
