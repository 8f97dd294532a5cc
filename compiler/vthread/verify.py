"""Proves of an instruction stream, without running it, that whatever the timing it does what its program order says.

The proof starts from the words alone: what an instruction touches, which token pairs with which and in which orders
units may run is worked out here anew, so that a mistake in lowering or in `tokens.py` has no accomplice.

A semaphore has one unit that gives and one that takes, both in their own order, so its k-th token given is the k-th
taken, and which instructions can ever start does not depend on timing: one execution that ends proves that all do.
Vector clocks along that execution then say of each two instructions whether tokens put them in order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from math import gcd, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from celosia.hw.config import Config
from celosia.hw.isa import (
    GEMM_LOOPS,
    OUTER_LOOPS,
    UNIT_OF,
    VECTOR_LOOPS,
    ASource,
    BSource,
    Buffer,
    Destination,
    Opcode,
    Unit,
    formats,
    instruction_bytes,
    opcode_of,
    why_illegal,
)

Fields = dict[str, int]
Dims = tuple[tuple[int, int], ...]
"""(extent, stride) of each loop over an address."""


class Rule(StrEnum):
    """What holds for every stream that passes."""

    WORD = "every word is a legal instruction"
    RANGE = "every scratchpad address lies inside its buffer"
    LIMIT = "every DRAM address lies inside the limits"
    WRITABLE = "a store writes activations only"
    PADDING = "only inp, vin and acc are padded"
    ONCE = "no instruction writes a place twice"
    OWN_RESULT = "no vector instruction reads an accumulator that it wrote itself"
    BALANCE = "every token given is taken, and every token awaited is given"
    PROGRESS = "no instruction waits forever"
    ORDER = "tokens keep the program order wherever two units touch the same place and one writes"
    WRITTEN = "every scratchpad entry is written before it is read"


class VerifyError(ValueError):
    """A broken `rule`, at instruction `index`; the message is one sentence with both."""

    def __init__(self, rule: Rule, index: int, what: str) -> None:
        super().__init__(f"instruction {index} {what}, but {rule}")
        self.rule, self.index = rule, index


@dataclass(frozen=True)
class Report:
    """Figures of a verified stream.

    instructions: how many each unit has. tokens: how many are given. entries: for each scratchpad the end of what is
    used, in entries. dram_read, dram_written: bytes that loads and stores move.
    """

    instructions: dict[Unit, int]
    tokens: int
    entries: dict[str, int]
    dram_read: int
    dram_written: int


def verify(cfg: Config, code: NDArray[np.uint8], dram_size: int, writable: tuple[int, int]) -> Report:
    """Check one launch against every `Rule`. Raises VerifyError for the first that is broken.

    code: [count, instruction_bytes] uint8. Addresses lie in [0, dram_size), those of stores in [writable[0],
    writable[1]). An entry of several pieces counts as written once one of them is: lanes that no channel uses stay
    empty, and their weights are zero.
    """
    size = instruction_bytes(cfg)
    if code.ndim != 2 or code.shape[1] != size or code.dtype != np.uint8:
        raise ValueError(f"code must be [count, {size}] uint8, not {list(code.shape)} {code.dtype}")
    stream = [_decode(cfg, index, row.tobytes()) for index, row in enumerate(code)]
    for instruction in stream:
        _check_fields(cfg, instruction, dram_size, writable)
    pairs = _pair_tokens(stream)
    order = _execute(cfg, stream)
    _check_order(cfg, stream, order, pairs, dram_size, writable)
    return _report(cfg, stream)


# What an instruction touches ------------------------------------------------------------------------------


class Pattern(NamedTuple):
    """The places base + i + sum of index * stride, for i < run and each index below its extent; all are below `end`."""

    base: int
    run: int
    dims: Dims
    end: int

    def of(self, array: NDArray[Any]) -> NDArray[Any]:
        """A view of the one-dimensional `array` that holds each of the places at least once, and no others."""
        if not self.dims:
            return array[self.base : self.end]
        assert self.end <= len(array) and array.flags.c_contiguous
        size = array.itemsize
        shape = (*(extent for extent, _ in self.dims), self.run)
        strides = (*(size * stride for _, stride in self.dims), size)
        return np.ndarray(shape, array.dtype, array, self.base * size, strides)


def pattern(base: int, dims: Iterable[tuple[int, int]], width: int = 1) -> Pattern:
    """The places base + i + sum of index * stride, i < width: consecutive ones as a run, the other loops as they are.

    >>> pattern(5, [(3, 4), (4, 1)])
    Pattern(base=5, run=12, dims=(), end=17)
    >>> pattern(5, [(3, 8), (2, 4), (2, 1)])
    Pattern(base=5, run=2, dims=((6, 4),), end=27)
    """
    run, rest = width, list[tuple[int, int]]()
    for stride, extent in sorted((stride, extent) for extent, stride in dims if extent > 1 and stride):
        if stride <= run:  # and nothing is in `rest`, whose strides are smaller than this one
            run += (extent - 1) * stride
        elif rest and stride == prod(rest[-1]):
            rest[-1] = (rest[-1][0] * extent, rest[-1][1])
        else:
            rest.append((extent, stride))
    end = base + run + sum((extent - 1) * stride for extent, stride in rest)
    return Pattern(base, run, tuple(reversed(rest)), end)


class Touch(NamedTuple):
    """An access to `memory` through the fields of `operand`. Places of inp, acc, vin and out are pieces."""

    memory: str
    operand: str
    places: Pattern
    write: bool


@dataclass(slots=True)
class Decoded:
    index: int
    opcode: Opcode
    unit: Unit
    fields: Fields
    touches: list[Touch]
    dram: Dims
    """Rows of bytes that a LOAD reads or a STORE writes: (planes, stride), (rows, stride), (bytes, 1)."""

    @property
    def name(self) -> str:
        return f"({self.unit.name})"


def _decode(cfg: Config, index: int, data: bytes) -> Decoded:
    """WORD: the opcode exists, its rules hold, and no bit is set beyond its fields."""
    word = int.from_bytes(data, "little")
    reason, opcode = why_illegal(cfg, word), opcode_of(word)
    if reason is not None or opcode is None:
        raise VerifyError(Rule.WORD, index, f"is illegal ({reason})")
    form = formats(cfg)[opcode]
    if word >> form.width:
        raise VerifyError(Rule.WORD, index, f"({opcode.name}) has bits beyond its {form.width}")
    f = form.decode(word)
    return Decoded(index, opcode, UNIT_OF[opcode], f, _touches(cfg, opcode, f), _rows(cfg, opcode, f))


@cache
def _sizes(cfg: Config) -> dict[str, tuple[int, int]]:
    """(entries, pieces of an entry) of each scratchpad."""
    return {
        "inp": (cfg.inp_depth, cfg.inp_pieces), "wgt": (cfg.wgt_depth, 1), "acc": (cfg.acc_depth, cfg.out_pieces),
        "vin": (cfg.vin_depth, cfg.out_pieces), "out": (cfg.out_depth, cfg.out_pieces),
        "par": (cfg.par_depth, 1), "lut": (cfg.lut_count, 1),
    }  # fmt: skip


def _touches(cfg: Config, opcode: Opcode, f: Fields) -> list[Touch]:
    """What of the scratchpads an instruction touches, reads first."""

    def entries(memory: str, operand: str, loops: tuple[str, ...], write: bool = False, pieces: int = 1) -> Touch:
        dims = ((f[f"extent_{loop}"], f[f"{operand}_{loop}"] * pieces) for loop in loops)
        return Touch(memory, operand, pattern(f[f"{operand}_base"] * pieces, dims, pieces), write)

    out = cfg.out_pieces
    if opcode in (Opcode.LOAD, Opcode.STORE):
        height = f["y_size"] + f.get("pad_top", 0) + f.get("pad_bottom", 0)
        width = f["x_size"] + f.get("pad_left", 0) + f.get("pad_right", 0)
        places = pattern(f["sram_base"], ((f["z_size"], f["sram_z"]), (height, f["sram_y"]), (width, f["sram_x"])))
        if opcode == Opcode.STORE:
            return [Touch("out", "sram", places, False)]
        return [Touch(Buffer(f["buffer"]).name.lower(), "sram", places, True)]
    if opcode == Opcode.GEMM:
        acc = entries("acc", "acc", OUTER_LOOPS, True, out)
        return [
            entries("inp", "inp", GEMM_LOOPS, pieces=cfg.inp_pieces),
            entries("wgt", "wgt", GEMM_LOOPS),
            *([acc._replace(write=False)] if f["accumulate"] else []),
            acc,
        ]
    touches = [entries("acc" if f["a_source"] == ASource.ACC else "vin", "a", VECTOR_LOOPS, pieces=out)]
    if f["b_source"] == BSource.VIN:
        touches.append(entries("vin", "b", OUTER_LOOPS, pieces=out))
    if f["requantise"]:
        touches.append(entries("par", "par", OUTER_LOOPS))
    if f["lookup"]:
        touches.append(Touch("lut", "table", pattern(f["table"], ()), False))
    destination = "acc" if f["destination"] == Destination.ACC else "out"
    return [*touches, entries(destination, "dst", OUTER_LOOPS, True, out)]


def _rows(cfg: Config, opcode: Opcode, f: Fields) -> Dims:
    if opcode not in (Opcode.LOAD, Opcode.STORE):
        return ()
    element = cfg.piece_bytes
    if opcode == Opcode.LOAD and f["buffer"] == Buffer.WGT:
        element = cfg.block_out * cfg.block_in
    elif opcode == Opcode.LOAD and f["buffer"] == Buffer.PAR:
        element = 8 * cfg.block_out
    elif opcode == Opcode.LOAD and f["buffer"] == Buffer.LUT:
        element = 256
    elif opcode == Opcode.LOAD and f["buffer"] == Buffer.ACC and not f["widen"]:
        element = 4 * cfg.piece_bytes
    return (f["z_size"], f["dram_z"]), (f["y_size"], f["dram_y"]), (f["x_size"] * element, 1)


def _reach(dims: Dims) -> int:
    """Distance from the first to the last place of `dims`."""
    return sum((extent - 1) * stride for extent, stride in dims)


def _repeats(dims: Dims) -> bool:
    """True where two index tuples of `dims` meet in one place."""
    span = 1
    for stride, extent in sorted((stride, extent) for extent, stride in dims if extent > 1):
        if stride < span:
            break
        span += (extent - 1) * stride
    else:
        return False  # each loop steps over all that the loops inside it reach
    places = np.zeros(1, np.int64)
    for extent, stride in dims:
        places = (places[:, None] + np.arange(extent) * stride).ravel()
    return len(np.unique(places)) < len(places)


# Rules of a single instruction ----------------------------------------------------------------------------


def _check_fields(cfg: Config, i: Decoded, dram_size: int, writable: tuple[int, int]) -> None:
    """RANGE, LIMIT, WRITABLE, PADDING, ONCE, OWN_RESULT."""
    f, sizes = i.fields, _sizes(cfg)
    for memory, operand, places, _ in i.touches:
        entries, pieces = sizes[memory]
        if places.end > entries * pieces:
            what = f"reaches {memory} entry {(places.end - 1) // pieces} of {entries} with {operand}"
            raise VerifyError(Rule.RANGE, i.index, f"{i.name} {what}")
    if i.dram:
        first, end = f["dram_addr"], f["dram_addr"] + _reach(i.dram) + 1
        if end > dram_size:
            raise VerifyError(Rule.LIMIT, i.index, f"{i.name} reaches byte {end - 1} of {dram_size} in DRAM")
        if i.opcode == Opcode.STORE and not writable[0] <= first <= end <= writable[1]:
            what = f"writes bytes {first} to {end - 1} of DRAM, outside {writable[0]} to {writable[1] - 1}"
            raise VerifyError(Rule.WRITABLE, i.index, f"{i.name} {what}")
    padded = i.opcode == Opcode.LOAD and any(f[f"pad_{side}"] for side in ("top", "bottom", "left", "right"))
    if padded and f["buffer"] not in (Buffer.INP, Buffer.VIN, Buffer.ACC):
        raise VerifyError(Rule.PADDING, i.index, f"{i.name} pads {Buffer(f['buffer']).name.lower()}")
    if _repeats(_written(i)):
        raise VerifyError(Rule.ONCE, i.index, f"{i.name} writes a place more than once")
    if i.opcode == Opcode.VECTOR and f["a_source"] == ASource.ACC and f["destination"] == Destination.ACC:
        _check_own_result(i)


def _written(i: Decoded) -> Dims:
    """The loops over what an instruction writes; none where writing a place again has a meaning (accumulation)."""
    f = i.fields
    if i.opcode == Opcode.STORE:
        return i.dram
    if i.opcode == Opcode.LOAD:
        height = f["pad_top"] + f["y_size"] + f["pad_bottom"]
        width = f["pad_left"] + f["x_size"] + f["pad_right"]
        return (f["z_size"], f["sram_z"]), (height, f["sram_y"]), (width, f["sram_x"])
    if i.opcode == Opcode.GEMM and f["accumulate"]:
        return ()
    operand = "acc" if i.opcode == Opcode.GEMM else "dst"
    return tuple((f[f"extent_{loop}"], f[f"{operand}_{loop}"]) for loop in OUTER_LOOPS)


def _check_own_result(i: Decoded) -> None:
    f = i.fields

    def entries(operand: str, loops: tuple[str, ...]) -> NDArray[np.int64]:
        total = np.full(1, f[f"{operand}_base"], np.int64)
        for loop in loops:
            total = (total[:, None] + np.arange(f[f"extent_{loop}"]) * f[f"{operand}_{loop}"]).ravel()
        return total

    written = entries("dst", OUTER_LOOPS)
    read = entries("a", VECTOR_LOOPS)
    steps = np.arange(len(written))
    when = np.full(max(written.max(), read.max()) + 1, len(written))  # the step that writes each entry
    when[written] = steps
    if (when[read].reshape(len(written), -1) < steps[:, None]).any():
        raise VerifyError(Rule.OWN_RESULT, i.index, f"{i.name} reads an entry of acc that an earlier step of it wrote")


# Tokens ---------------------------------------------------------------------------------------------------


def _pair_tokens(stream: list[Decoded]) -> dict[tuple[int, Unit], int]:
    """BALANCE. For each instruction and unit that it takes a token from, the instruction that gives this token."""
    pairs = {}
    for source in Unit:
        for target in Unit:
            posts = [i.index for i in stream if i.unit == source and i.fields["post"] >> target & 1]
            waits = [i.index for i in stream if i.unit == target and i.fields["wait"] >> source & 1]
            if len(posts) > len(waits):
                what = f"({source.name}) gives {target.name} a token that is never taken"
                raise VerifyError(Rule.BALANCE, posts[len(waits)], what)
            if len(waits) > len(posts):
                what = f"({target.name}) awaits a token that {source.name} never gives"
                raise VerifyError(Rule.BALANCE, waits[len(posts)], what)
            pairs.update({(wait, source): post for post, wait in zip(posts, waits, strict=True)})
    return pairs


def _execute(cfg: Config, stream: list[Decoded]) -> list[int]:
    """PROGRESS. An order in which the machine can start the instructions: always the first in the program that can.

    A queue in front of each unit is filled in program order and stops the fetch when it is full; an instruction starts
    when its tokens are there and a semaphore has room for each token that it will give.
    """
    room = (1 << cfg.token_bits) - 1
    tokens = {(source, target): 0 for source in Unit for target in Unit}  # given and not yet taken
    queues: dict[Unit, deque[Decoded]] = {unit: deque() for unit in Unit}
    waits = {mask: tuple(unit for unit in Unit if mask >> unit & 1) for mask in range(1 << len(Unit))}
    order: list[int] = []
    fetched = 0

    def missing(i: Decoded) -> str | None:
        for other in waits[i.fields["wait"]]:
            if not tokens[other, i.unit]:
                return f"a token from {other.name}"
        for other in waits[i.fields["post"]]:
            if tokens[i.unit, other] == room:
                return f"room for a token to {other.name}, of which it holds {room}"
        return None

    while len(order) < len(stream):
        while fetched < len(stream) and len(queues[stream[fetched].unit]) < cfg.queue_depth:
            queues[stream[fetched].unit].append(stream[fetched])
            fetched += 1
        heads = sorted((queue[0] for queue in queues.values() if queue), key=lambda i: i.index)
        ready = next((i for i in heads if missing(i) is None), None)
        if ready is None:
            fetch = f" while the fetch is held up at {fetched}" if fetched < len(stream) else ""
            raise VerifyError(Rule.PROGRESS, heads[0].index, f"{heads[0].name} never gets {missing(heads[0])}{fetch}")
        queues[ready.unit].popleft()
        for other in waits[ready.fields["wait"]]:
            tokens[other, ready.unit] -= 1
        for other in waits[ready.fields["post"]]:
            tokens[ready.unit, other] += 1
        order.append(ready.index)
    return order


# Order between units --------------------------------------------------------------------------------------

_READERS = {
    "inp": (Unit.GEMM,), "wgt": (Unit.GEMM,), "acc": (Unit.GEMM, Unit.VECTOR), "vin": (Unit.VECTOR,),
    "out": (Unit.STORE,), "par": (Unit.VECTOR,), "lut": (Unit.VECTOR,), "DRAM": (Unit.LOAD,),
}  # fmt: skip
_WRITERS = {
    "inp": (Unit.LOAD,), "wgt": (Unit.LOAD,), "acc": (Unit.LOAD, Unit.GEMM, Unit.VECTOR), "vin": (Unit.LOAD,),
    "out": (Unit.VECTOR,), "par": (Unit.LOAD,), "lut": (Unit.LOAD,), "DRAM": (Unit.STORE,),
}  # fmt: skip


class _Memory:
    """For each place of one memory the last instruction of each unit that read and that wrote it, plus 1."""

    def __init__(self, name: str, size: int, pieces: int = 1, unit: str = "entry") -> None:
        self.name, self.pieces, self.unit = name, pieces, unit
        self.reads = {unit: np.zeros(size, np.int32) for unit in _READERS[name]}
        self.writes = {unit: np.zeros(size, np.int32) for unit in _WRITERS[name]}
        self.written = np.zeros(size, np.bool_)

    def touch(self, i: Decoded, places: Pattern, write: bool, ended: list[int]) -> None:
        """ORDER. ended: by unit, the last instruction that has ended before `i` begins, plus 1."""
        for verb, log in (("writes", self.writes), ("reads", self.reads)):
            if verb == "reads" and not write:
                continue
            for rival, last in log.items():
                if rival == i.unit:
                    continue
                # Against the program order is as bad as without order.
                allowed = min(ended[rival], i.index)
                found = places.of(last)
                if found.max() > allowed:
                    place = int(self._first(places, found > allowed))
                    self._out_of_order(i, "writes" if write else "reads", place, rival, verb, int(last[place]) - 1)
        places.of((self.writes if write else self.reads)[i.unit])[...] = i.index + 1

    def check_written(self, i: Decoded, places: Pattern) -> None:
        """WRITTEN."""
        found = places.of(self.written)
        if not found.all():
            place = self._first(places, ~found) // self.pieces
            raise VerifyError(
                Rule.WRITTEN, i.index, f"{i.name} reads {self.name} {self.unit} {place}, which nothing wrote"
            )

    def mark_written(self, places: Pattern) -> None:
        places.of(self.written)[...] = True
        if self.pieces > 1:
            entries = self.written.reshape(-1, self.pieces)
            entries[entries.any(axis=1)] = True

    def _out_of_order(self, i: Decoded, verb: str, place: int, rival: Unit, other_verb: str, other: int) -> None:
        what = f"{i.name} {verb} {self.name} {self.unit} {place // self.pieces}, which instruction {other}"
        order = "must wait for it" if other > i.index else "may not have ended"
        raise VerifyError(Rule.ORDER, i.index, f"{what} ({rival.name}) {other_verb} and {order}")

    def _first(self, places: Pattern, where: NDArray[np.bool_]) -> int:
        return int(places.of(np.arange(places.end))[where][0])


def _check_order(
    cfg: Config,
    stream: list[Decoded],
    order: list[int],
    pairs: dict[tuple[int, Unit], int],
    dram_size: int,
    writable: tuple[int, int],
) -> None:
    """ORDER and WRITTEN. Constants need no log: WRITABLE holds, so nobody writes them."""
    memories = {name: _Memory(name, entries * pieces, pieces) for name, (entries, pieces) in _sizes(cfg).items()}
    moves = [i for i in stream if i.dram and i.fields["dram_addr"] < writable[1] and _end(i) > writable[0]]
    granule = gcd(*(g for i in moves for g in _granules(i)))
    dram = _Memory("DRAM", dram_size // max(granule, 1) + 1, unit=f"{granule}-byte block")
    tracked = {i.index for i in moves}

    ended = {unit: [0] * len(Unit) for unit in Unit}  # of each unit, what it knows to have ended
    known: list[list[int]] = [[]] * len(stream)  # what is known when an instruction has ended
    for index in order:
        i = stream[index]
        clock = ended[i.unit]
        for source in Unit:
            if i.fields["wait"] >> source & 1:
                clock = ended[i.unit] = [max(pair) for pair in zip(clock, known[pairs[index, source]], strict=True)]
        known[index] = list(clock)
        known[index][i.unit] = index + 1
        for memory, _, places, write in i.touches:
            if not write:
                memories[memory].check_written(i, places)
            memories[memory].touch(i, places, write, clock)
        for memory, _, places, write in i.touches:
            if write:
                memories[memory].mark_written(places)
        if index in tracked:
            (z, z_stride), (y, y_stride), (row, _) = i.dram
            dims = ((z, z_stride // granule), (y, y_stride // granule))
            places = pattern(i.fields["dram_addr"] // granule, dims, row // granule)
            dram.touch(i, places, i.opcode == Opcode.STORE, clock)


def _end(i: Decoded) -> int:
    return i.fields["dram_addr"] + _reach(i.dram) + 1


def _granules(i: Decoded) -> Iterable[int]:
    """Numbers whose common divisor divides the beginning and the end of each row of `i`."""
    (z, z_stride), (y, y_stride), (row, _) = i.dram
    return i.fields["dram_addr"], row, z_stride if z > 1 else 0, y_stride if y > 1 else 0


def _report(cfg: Config, stream: list[Decoded]) -> Report:
    counts, sizes = Counter(i.unit for i in stream), _sizes(cfg)
    entries = dict.fromkeys(sizes, 0)
    moved = dict.fromkeys(Opcode, 0)
    for i in stream:
        moved[i.opcode] += prod(extent for extent, _ in i.dram) if i.dram else 0
        for memory, _, places, _ in i.touches:
            entries[memory] = max(entries[memory], -(-places.end // sizes[memory][1]))
    return Report(
        {unit: counts[unit] for unit in Unit}, sum(i.fields["post"].bit_count() for i in stream), entries,
        moved[Opcode.LOAD], moved[Opcode.STORE],
    )  # fmt: skip
