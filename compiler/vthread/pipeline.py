"""Software pipelining: the instruction stream under construction, and the rings that give tiles their places.

Every tile, one iteration of a pipelined loop, has two halves, its loads and the rest. The loads of the next tiles are
put in front of the compute of this one, as many as have room: every scratchpad is a ring, a tile takes the entries
after those of the tile before, and keeps them until it has computed. So LOAD works ahead across tiles and layers, and
an instruction that waits there for another unit does not leave GEMM without work.

    load A        load A
    compute A     load B
    load B    ->  compute A
    compute B     compute B

A tile whose layers hand results to each other on chip computes in several phases: the first phase of the next tile goes
in front of the second one of this, so that gemm has something to do while the vector unit makes what it needs next.

(Virtual threads, which run iterations in alternation with places fixed beforehand, are another thing: interleave.py.)

`tokens.py` finds which instructions must wait for which, from the addresses alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from celosia.compiler.layer import TilingError
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode
from celosia.hw.spec.scratchpads import depths

AHEAD = 8
"""Default of the tiles whose loads may lie before the compute of the oldest of them. With 0 a tile loads once all tiles
before it have computed, and nothing hides the time of its loads."""

Phase = Callable[[], None]
Load = Callable[[], Sequence[Phase | None]]
"""Emits the loads of a tile, and returns the phases that emit the rest; None for a phase without instructions."""


@dataclass
class StreamInstruction:
    """One instruction before encoding. layer: number of the layer it belongs to. alone: whether it waits for all
    earlier instructions of GEMM and the vector unit."""

    opcode: Opcode
    fields: dict[str, int]
    layer: int = 0
    alone: bool = False


class Ring:
    """Ring allocator of a scratchpad of `depth` entries, which remembers the tile in each range.

    pins: ranges that tiles still need. make_room: lets the oldest tile compute, so that its pins go; False where there
    is none. reserved: ranges behind the end of the ring.
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
        """End of the entries that tiles can take."""
        return min((first for first, _ in self.reserved), default=self.depth) if self.reserved else self.depth

    def claim(self, owner: object) -> bool:
        """Let no other owner reserve entries until `release`, which would split the ring. False where another owner
        never releases its own."""
        while self.claims and self.owner is not owner:
            if not self.make_room():
                return False
        self.owner, self.claims = owner, self.claims + 1
        return True

    def reserve(self, size: int, owner: object) -> tuple[int, int] | None:
        """Reserve `size` entries as far back as possible until `release`: (first, end). None where there is no room."""
        if not self.claim(owner):
            return None
        while (span := self.place(size)) is None:
            if not self.make_room():
                return None
        return span

    def place(self, size: int) -> tuple[int, int] | None:
        """Reserve `size` entries for the owner of the ring: (first, end). None while tiles hold too many."""
        span = next((span for span in self._gaps(size) if not any(span[0] < b for _, b in self.pins)), None)
        if span is not None:
            self.reserved.append(span)
            self.live = {key: (a, b) for key, (a, b) in self.live.items() if b <= self.end}
            self.head = self.head if self.head < self.end else 0
        return span

    def _gaps(self, size: int) -> Iterator[tuple[int, int]]:
        """Generate ranges of `size` entries between and below reserved ones, from the end of the scratchpad on."""
        end = self.depth
        for first, last in sorted(self.reserved, reverse=True):
            if end - size >= last:
                yield end - size, end
            end = first
        if end >= size:
            yield end - size, end

    def release(self, span: tuple[int, int]) -> None:
        """Release a reserved range."""
        self.reserved.remove(span)
        self.claims -= 1

    def find(self, key: Hashable) -> int | None:
        """First entry of the tile `key` if it is still there."""
        span = self.live.get(key)
        return None if span is None else span[0]

    def size(self, key: Hashable) -> int:
        """Entries of the tile `key`, which is there."""
        first, end = self.live[key]
        return end - first

    def _next(self, size: int) -> int:
        """Choose the first of the next `size` entries: a multiple of `size` if there is room, so that as many tiles of
        that size fit as possible, whatever lay there before."""
        aligned, end = -(-self.head // size) * size, self.end
        if aligned + size <= end:
            return aligned
        return self.head if self.head + size <= end else 0

    def _free(self, first: int, size: int) -> bool:
        return first + size <= self.end and not any(a < first + size and first < b for a, b in self.pins)

    def take(self, size: int, key: Hashable = None) -> int:
        """Take `size` fresh entries, and forget the tiles that lay there. Returns the first."""
        assert 0 < size <= self.depth, (size, self.depth)
        while not self._free(first := self._next(size), size):
            if not self.make_room():
                gaps = (end for end in (0, *(end for _, end in self.pins)) if self._free(end, size))
                first = next(gaps, first)
                break
        end = first + size
        self.head = end if end < self.end else 0
        for old in [k for k, (a, b) in self.live.items() if a < end and first < b]:
            del self.live[old]
        if key is not None:
            self.live[key] = (first, end)
        return first


def _always() -> bool:
    return True


@dataclass
class _Tile:
    """A tile that has loaded. writes: the storage that it will write."""

    layer: int
    writes: object
    ready: Callable[[], bool] = _always
    """Whether the first phase may come behind the instructions emitted so far."""
    phases: deque[Phase | None] = field(default_factory=deque)
    pins: list[tuple[Ring, tuple[int, int]]] = field(default_factory=list)


class ScheduleDeadlock(TilingError):
    """A tile that has loaded waits for entries that are never released. layer: number of its layer."""

    def __init__(self, layer: int) -> None:
        super().__init__("a block's results find no room beside what its tiles have loaded")
        self.layer = layer


class Stream:
    """Instructions in program order, the rings of the scratchpads, and the tiles that have loaded, not computed.

    waiting: tiles that compute in their order. following: tiles of guests, which overtake the waiting ones.
    """

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.instructions: list[StreamInstruction] = []
        self.layer = 0
        self.waiting: deque[_Tile] = deque()
        self.following: deque[_Tile] = deque()
        self.running: deque[list[_Tile]] = deque()
        """Tiles between their phases, the latest first; those of a list advance together."""
        self.loading: _Tile | None = None
        self.alone = False
        """Whether the next instruction is `alone`."""
        self.settled: object = None
        """A storage whose parts that are read next are known to be complete, though others are not."""
        self.rings = {scope: Ring(depth, self.make_room) for scope, depth in depths(cfg).items()}

    def add(self, opcode: Opcode, fields: dict[str, int]) -> None:
        """Append an instruction of the current layer."""
        self.instructions.append(StreamInstruction(opcode, fields, self.layer, self.alone))
        self.alone = False

    def hold(self, ring: Ring, first: int, size: int) -> int:
        """Keep entries of `ring` until the tile that is loading has computed. Returns `first`."""
        assert self.loading is not None
        ring.pins.append((first, first + size))
        self.loading.pins.append((ring, ring.pins[-1]))
        return first

    def take(self, ring: Ring, size: int, key: Hashable = None) -> int:
        """Take fresh entries of `ring` for the tile that is loading. Returns the first."""
        return self.hold(ring, ring.take(size, key), size)

    def find(self, ring: Ring, key: Hashable) -> int | None:
        """First entry of a tile that is there already, kept for the tile that is loading."""
        first = ring.find(key)
        return None if first is None else self.hold(ring, first, ring.size(key))

    def when(self, ready: Callable[[], bool]) -> None:
        """Let the tile that is loading compute only once `ready`."""
        assert self.loading is not None
        self.loading.ready = ready

    # Tiles ---------------------------------------------------------------------------------------------------

    def start(self, layer: int, writes: object, load: Load, ahead: int = AHEAD) -> None:
        """Start a tile of `layer`, which writes storage `writes`: its loads now, the rest when its turn comes."""
        self.alone = not ahead
        self.waiting.append(self._load(layer, writes, load))
        self.alone = False
        while len(self.waiting) > ahead or (not ahead and self.running):
            self.advance()

    def follow(self, layer: int, writes: object, load: Load) -> None:
        """Start a tile that overtakes the waiting ones: it computes once the next following tile has loaded."""
        tile = self._load(layer, writes, load)
        self._overtake()
        self.following.append(tile)

    def advance(self) -> bool:
        """Let the oldest waiting tile begin to compute, and all that have begun go on. False where there is none."""
        if not self.waiting and not self.running:
            return False
        begun: list[_Tile] = []
        while self.waiting and (not begun or self.waiting[0].phases[0] is None) and self.waiting[0].ready():
            begun.append(self.waiting.popleft())
        if not begun and not self.running:
            raise ScheduleDeadlock(self.waiting[0].layer)
        if begun:
            self.running.appendleft(begun)
        for tiles in self.running:
            for tile in tiles:
                self._phase(tile)
        self.running = deque(left for tiles in self.running if (left := [tile for tile in tiles if tile.phases]))
        return True

    def make_room(self) -> bool:
        """Let any tile compute. False where there is none."""
        return self._overtake() or self.advance()

    def settle(self, storage: object) -> None:
        """Let tiles compute until none is left that writes `storage`, but for the one that is `settled`."""
        while any(tile.writes is storage for tile in self.following):
            self._overtake()
        while storage is not self.settled and self.will_write(storage):
            self.advance()

    def will_write(self, storage: object, but: int = -1) -> bool:
        """Whether a pending tile of a layer other than `but` will write `storage`."""
        tiles = (tile for tiles in (self.waiting, *self.running) for tile in tiles)
        return any(tile.writes is storage and tile.layer != but for tile in tiles)

    def finish(self) -> None:
        """Let all tiles compute that have loaded."""
        while self.make_room():
            pass

    def _overtake(self) -> bool:
        """Let the oldest following tile compute. False where there is none."""
        if not self.following:
            return False
        tile = self.following.popleft()
        while tile.phases:
            self._phase(tile)
        return True

    def _load(self, layer: int, writes: object, load: Load) -> _Tile:
        """Emit the loads of a tile."""
        tile = _Tile(layer, writes)
        self.loading, self.layer = tile, layer
        tile.phases.extend(load())
        self.loading = None
        return tile

    def _phase(self, tile: _Tile) -> None:
        """Run the next phase of `tile`. Before the last one it gives back its entries."""
        loading, layer = self.loading, self.layer
        phase = tile.phases.popleft()
        if not tile.phases:
            for ring, pin in tile.pins:
                ring.pins.remove(pin)
        self.loading, self.layer = None, tile.layer
        if phase is not None:
            phase()
        self.loading, self.layer = loading, layer
