"""Check the tokens, progress and order of an instruction stream.

Each semaphore has one unit that gives tokens and one that takes them, both in program order, so the k-th token given is
the k-th taken. Which instructions can ever start does not depend on timing: if one execution ends, all do. Vector
clocks along that execution then tell of any two instructions whether tokens order them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, prod
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.vthread.verify.decode import (
    Decoded,
    Dims,
    Pattern,
    Rule,
    VerifyError,
    check_fields,
    make_pattern,
    sizes,
)
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode, Unit


@dataclass(frozen=True)
class Report:
    """Figures of a verified stream.

    instructions: number of each unit. tokens: number given. entries: for each scratchpad, the end of the entries that
    are used. dram_read, dram_written: bytes that LOADs and STOREs move.
    """

    instructions: dict[Unit, int]
    tokens: int
    entries: dict[str, int]
    dram_read: int
    dram_written: int


def check_stream(cfg: Config, stream: list[Decoded], dram_size: int, writable: tuple[int, int]) -> Report:
    """Check every `Rule` but WORD. Raises VerifyError for the first one that is broken. See `verify`."""
    checked = set[int]()
    for instruction in stream:
        check_fields(cfg, instruction, dram_size, writable, id(instruction.touches) in checked)
        checked.add(id(instruction.touches))
    pairs, in_order = _pair_tokens(cfg, stream)
    order = range(len(stream)) if in_order else _execute(cfg, stream)
    _check_order(cfg, stream, order, pairs, dram_size, writable)
    return _count_usage(cfg, stream)


# Tokens ---------------------------------------------------------------------------------------------------


def _pair_tokens(cfg: Config, stream: list[Decoded]) -> tuple[dict[tuple[int, Unit], int], bool]:
    """Check BALANCE, and pair each token that is taken with the instruction that gives it. Raises VerifyError.

    Returns ((instruction, unit that it takes a token from) -> instruction that gives the token, whether the machine can
    start all instructions in program order). It can if each token is given before it is taken, and taken before its
    semaphore would overflow.
    """
    room, in_order = (1 << cfg.token_bits) - 1, True
    pairs = {}
    masks = [(i.unit, i.fields["wait"], i.fields["post"]) for i in stream]
    units, waiting, posting = np.array(masks, np.int64).reshape(-1, 3).T
    for source in Unit:
        for target in Unit:
            posts = np.flatnonzero((units == source) & (posting >> target & 1))
            waits = np.flatnonzero((units == target) & (waiting >> source & 1))
            if len(posts) > len(waits):
                what = f"({source.name}) gives {target.name} a token that is never taken"
                raise VerifyError(Rule.BALANCE, int(posts[len(waits)]), what)
            if len(waits) > len(posts):
                what = f"({target.name}) awaits a token that {source.name} never gives"
                raise VerifyError(Rule.BALANCE, int(waits[len(posts)]), what)
            in_order &= bool((posts < waits).all() and (posts[room:] > waits[:-room]).all())
            pairs.update({(wait, source): post for post, wait in zip(posts.tolist(), waits.tolist(), strict=True)})
    return pairs, in_order


_UNITS = [tuple(unit for unit in Unit if mask >> unit & 1) for mask in range(1 << len(Unit))]
"""The units in each value of a wait or post mask."""


def _execute(cfg: Config, stream: list[Decoded]) -> list[int]:
    """Check PROGRESS: return an order in which the machine can start the instructions. Raises VerifyError.

    Of the instructions that can start, the first in the program always does.

    A queue in front of each unit is filled in program order and stops the fetch when it is full; an instruction starts
    when its tokens are there and a semaphore has room for each token that it will give.
    """
    room = (1 << cfg.token_bits) - 1
    tokens = {(source, target): 0 for source in Unit for target in Unit}  # given and not yet taken
    queues: dict[Unit, deque[Decoded]] = {unit: deque() for unit in Unit}
    order: list[int] = []
    fetched, by_index = 0, attrgetter("index")

    def missing(i: Decoded) -> str | None:
        """Return what instruction `i` waits for, as words; None if it can start."""
        for other in _UNITS[i.fields["wait"]]:
            if not tokens[other, i.unit]:
                return f"a token from {other.name}"
        for other in _UNITS[i.fields["post"]]:
            if tokens[i.unit, other] == room:
                return f"room for a token to {other.name}, of which it holds {room}"
        return None

    while len(order) < len(stream):
        while fetched < len(stream) and len(queues[stream[fetched].unit]) < cfg.queue_depth:
            queues[stream[fetched].unit].append(stream[fetched])
            fetched += 1
        heads = sorted((queue[0] for queue in queues.values() if queue), key=by_index)
        ready = next((i for i in heads if missing(i) is None), None)
        if ready is None:
            fetch = f" while the fetch is held up at {fetched}" if fetched < len(stream) else ""
            raise VerifyError(Rule.PROGRESS, heads[0].index, f"{heads[0].name} never gets {missing(heads[0])}{fetch}")
        queues[ready.unit].popleft()
        for other in _UNITS[ready.fields["wait"]]:
            tokens[other, ready.unit] -= 1
        for other in _UNITS[ready.fields["post"]]:
            tokens[ready.unit, other] += 1
        order.append(ready.index)
    return order


# Order between units --------------------------------------------------------------------------------------


class _Log:
    """For each place of one memory, the last instruction of `unit` that read it, or the last that wrote it, plus 1.

    latest: the largest number in `places`.
    """

    def __init__(self, unit: Unit, write: bool, size: int) -> None:
        self.unit, self.write = unit, write
        self.places = np.zeros(size, np.int32)
        self.latest = 0


class _Memory:
    """Reads and writes of one memory so far, and the places that have been written.

    size: number of places. pieces: places of an entry. unit: what messages call an entry. logs: by unit and whether
    they are of writes; only those that exist. written: of each place. full: all places before this one are written.
    rivals: for reads (False) or writes (True) of a unit, the logs that these must come after, those of writes first.
    """

    def __init__(self, name: str, size: int, pieces: int = 1, unit: str = "entry") -> None:
        self.name, self.size, self.pieces, self.unit = name, size, pieces, unit
        self.logs: dict[tuple[Unit, bool], _Log] = {}
        self.written = np.zeros(size, np.bool_)
        self.full = 0
        self.rivals: dict[tuple[Unit, bool], list[_Log]] = {key: [] for key in product(Unit, (False, True))}

    def _new_log(self, unit: Unit, write: bool) -> _Log:
        """Create the log of a unit's reads or writes, and add it to the rivals of other units."""
        self.logs[unit, write] = _Log(unit, write, self.size)
        ordered = sorted(self.logs.values(), key=lambda log: not log.write)
        for accessing_unit, writes in self.rivals:
            rivals = [log for log in ordered if log.unit != accessing_unit and (log.write or writes)]
            self.rivals[accessing_unit, writes] = rivals
        return self.logs[unit, write]

    def check_order(self, i: Decoded, places: Pattern, write: bool, ended: list[int]) -> None:
        """Check ORDER for one access of instruction `i`, and log it. Raises VerifyError.

        ended: by unit, the last instruction that is known to have ended before `i` starts, plus 1.
        """
        key = i.unit, write
        for rival in self.rivals[key]:
            # A later instruction that ran before is as wrong as one without order.
            allowed = min(ended[rival.unit], i.index)
            if rival.latest <= allowed:
                continue
            touched = places.view(rival.places)
            if np.maximum.reduce(touched, axis=None) > allowed:
                self._raise_out_of_order(i, write, int(self._first_place(places, touched > allowed)), rival)
        log = self.logs.get(key) or self._new_log(*key)
        places.view(log.places)[...] = number = i.index + 1
        if number > log.latest:
            log.latest = number

    def check_written(self, i: Decoded, places: Pattern) -> None:
        """Check WRITTEN: all places that `i` reads have been written. Raises VerifyError."""
        if places.end <= self.full:
            return
        written = places.view(self.written)
        if not written.all():
            place = self._first_place(places, ~written) // self.pieces
            raise VerifyError(
                Rule.WRITTEN, i.index, f"{i.name} reads {self.name} {self.unit} {place}, which nothing wrote"
            )

    def mark_written(self, places: Pattern) -> None:
        """Mark places as written, and with them all pieces of their entries (see `verify`)."""
        if places.end <= self.full:
            return
        places.view(self.written)[...] = True
        if not places.dims and places.base <= self.full:
            self.full = places.end
        if self.pieces > 1:
            entries = self.written.reshape(-1, self.pieces)
            entries[entries.any(axis=1)] = True

    def _raise_out_of_order(self, i: Decoded, write: bool, place: int, rival: _Log) -> None:
        """Raise VerifyError for an access that does not wait for that of a rival."""
        other = int(rival.places[place]) - 1
        verb, other_verb = ("writes" if is_write else "reads" for is_write in (write, rival.write))
        what = f"{i.name} {verb} {self.name} {self.unit} {place // self.pieces}, which instruction {other}"
        order = "must wait for it" if other > i.index else "may not have ended"
        raise VerifyError(Rule.ORDER, i.index, f"{what} ({rival.unit.name}) {other_verb} and {order}")

    def _first_place(self, places: Pattern, where: NDArray[np.bool_]) -> int:
        """Return the first place of a pattern at which `where`, an array in the shape of its view, is True."""
        return int(places.view(np.arange(places.end))[where][0])


def _check_order(
    cfg: Config,
    stream: list[Decoded],
    order: Sequence[int],
    pairs: dict[tuple[int, Unit], int],
    dram_size: int,
    writable: tuple[int, int],
) -> None:
    """Check ORDER and WRITTEN, in the order of execution. Raises VerifyError.

    Constants in DRAM need no log, since WRITABLE holds and nothing writes them.
    """
    memories = {name: _Memory(name, entries * pieces, pieces) for name, (entries, pieces) in sizes(cfg).items()}
    moves = [i for i in stream if i.dram and i.fields["dram_addr"] < writable[1] and _dram_end(i) > writable[0]]
    shapes = {i.shape: i.dram for i in moves}
    steps = [step for dims in shapes.values() for step in _row_divisors(dims)]
    granule = gcd(*(i.fields["dram_addr"] for i in moves), *steps)
    blocks = {shape: _dram_pattern(dims, granule) for shape, dims in shapes.items()}
    dram = _Memory("DRAM", dram_size // max(granule, 1) + 1, unit=f"{granule}-byte block")
    tracked = {i.index for i in moves}

    ended = {unit: [0] * len(Unit) for unit in Unit}  # of each unit, what it knows to have ended
    known: list[list[int]] = [[]] * len(stream)  # what is known when an instruction has ended
    for index in order:
        i = stream[index]
        clock = ended[i.unit]
        for source in _UNITS[i.fields["wait"]]:
            clock = ended[i.unit] = list(map(max, clock, known[pairs[index, source]]))
        known[index] = clock.copy()
        known[index][i.unit] = index + 1
        for memory, _, places, write in i.touches:
            if not write:
                memories[memory].check_written(i, places)
            memories[memory].check_order(i, places, write, clock)
        for memory, _, places, write in i.touches:
            if write:
                memories[memory].mark_written(places)
        if index in tracked:
            places = blocks[i.shape].shifted(i.fields["dram_addr"] // granule)
            dram.check_order(i, places, i.opcode == Opcode.STORE, clock)


def _dram_pattern(dims: Dims, granule: int) -> Pattern:
    """Return the pattern of rows of bytes that begin at 0, in granules."""
    (z, z_stride), (y, y_stride), (row, _) = dims
    return make_pattern(0, ((z, z_stride // granule), (y, y_stride // granule)), row // granule)


def _dram_end(i: Decoded) -> int:
    """Return the end of the bytes that a LOAD or STORE moves in DRAM."""
    return i.fields["dram_addr"] + i.shape.dram_reach + 1


def _row_divisors(dims: Dims) -> Iterable[int]:
    """Return numbers of bytes. A divisor of these and of the address divides the begin and the end of each row."""
    (z, z_stride), (y, y_stride), (row, _) = dims
    return row, z_stride if z > 1 else 0, y_stride if y > 1 else 0


def _count_usage(cfg: Config, stream: list[Decoded]) -> Report:
    """Return the figures of a stream: instructions of each unit, tokens, entries used, bytes loaded and stored."""
    counts, pads = Counter(i.unit for i in stream), sizes(cfg)
    ends = dict.fromkeys(pads, 0)
    for i in stream:
        for memory, _, places, _ in i.touches:
            if places.end > ends[memory]:
                ends[memory] = places.end
    entries = {memory: -(-end // pads[memory][1]) for memory, end in ends.items()}
    moved = dict.fromkeys(Opcode, 0)
    for (opcode, dram), count in Counter((i.opcode, i.dram) for i in stream if i.dram).items():
        moved[opcode] += count * prod(extent for extent, _ in dram)
    return Report(
        {unit: counts[unit] for unit in Unit}, sum(i.fields["post"].bit_count() for i in stream), entries,
        moved[Opcode.LOAD], moved[Opcode.STORE],
    )  # fmt: skip
