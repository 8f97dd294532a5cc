"""Kinds of cases: each is a function of a machine and a seed that returns how the case ended.

A case that ends in a way it must not raises Failure; every other exception is a failure, too.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from first_difference import first_difference
from numpy.typing import NDArray
from programs import TestProgram, random_program

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import UNIT_OF, Opcode, formats, instruction_bytes, opcode_of
from celosia.hw.spec.regs import ERROR_TEXT
from celosia.sim.device import Device, DeviceError
from celosia.sim.functional.fsim import FunctionalDevice
from celosia.sim.rtl.rtlsim import IDEAL, ZYNQ_HP, MemoryModel, RtlDevice, random_stalls

GUARD = 0xA5
"""What memory behind the DMA limit holds before a run, and after it."""
WATCHDOG = 3000
COVERED = 10
"""Fields are counted in one legal program of so many: decoding takes as long as running a fifth of the program."""
TIME_LIMIT = 30_000
"""Cycles for programs of garbage, ten times the watchdog's: what is still running then has made progress."""


class Failure(AssertionError):
    """A case ended in a way that is not allowed. cause: the same text for failures that have one cause."""

    def __init__(self, why: str, cause: str = "") -> None:
        super().__init__(why)
        self.cause = cause


def random_memory(rng: random.Random) -> MemoryModel:
    """One of the fixed memory models, or one that stalls at random."""
    stall = rng.choice((0.0, 0.1, 0.3, 0.6))
    return rng.choice((ZYNQ_HP, IDEAL, random_stalls(rng.getrandbits(32), stall, rng.choice((0, 5, 60, 300)))))


@dataclass
class Coverage:
    """Values of instruction fields that programs have used, in up to 16 ranges each, and states of units."""

    fields: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    states: NDArray[np.uint64] = field(default_factory=lambda: np.zeros((4,) * 4, np.uint64))

    def note(self, cfg: Config, words: list[int]) -> None:
        for word in words:
            opcode = opcode_of(word)
            if opcode is None:
                continue
            for each, value in formats(cfg)[opcode].decode(word).items():
                self.fields[opcode.name, each, value_class(value)] += 1

    def merge(self, other: Coverage) -> None:
        self.fields.update(other.fields)
        self.states = self.states + other.states

    def reached(self) -> dict[str, tuple[int, int]]:
        """By instruction: (value classes that were used, value classes that legal programs can use) of all fields."""
        result = {}
        for opcode in formats(EVERYTHING):
            possible = reachable(opcode)
            result[opcode.name] = (
                len({(name, c) for op, name, c in self.fields if op == opcode.name} & possible),
                len(possible),
            )
        return result

    def pairs(self) -> NDArray[np.uint64]:
        """Cycles in each pair of states of each pair of units: axes unit, unit, state, state."""
        units = self.states.ndim
        result = np.zeros((units, units, 4, 4), np.uint64)
        for a in range(units):
            for b in range(a + 1, units):
                others = tuple(u for u in range(units) if u not in (a, b))
                result[a, b] = self.states.sum(axis=others)
        return result


def value_class(value: int) -> int:
    """0, 1, then one class for each power of two up to 8 and one above; negative values in classes of their own."""
    size = min(abs(value).bit_length(), 5)
    return -size if value < 0 else size


def value_classes(width: int, signed: bool) -> set[int]:
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if signed else (0, (1 << width) - 1)
    return {value_class(v) for v in (low, high, *(s << k for k in range(6) for s in (1, -1)), 0) if low <= v <= high}


EVERYTHING = Config(taps=3, forward=True)
"""Has all fields."""


def reachable(opcode: Opcode) -> set[tuple[str, int]]:
    """Fields of an instruction with the classes of their values. Out of reach are other opcodes, loops and sizes of
    nothing, a unit's tokens for itself, and STOREs to where instructions lie."""
    possible = set()
    for each in formats(EVERYTHING)[opcode].fields:
        classes = value_classes(each.width, each.signed)
        if each.name == "opcode":
            classes = {value_class(opcode)}
        elif each.name in ("wait", "post"):
            classes = {value_class(mask) for mask in range(16) if not mask >> UNIT_OF[opcode] & 1}
        elif each.name.startswith("extent_") or each.name.endswith("_size"):
            classes -= {0}
        elif each.name == "dram_addr" and opcode == Opcode.STORE:
            classes = {value_class(4096)}
        possible |= {(each.name, c) for c in classes}
    return possible


class Machine:
    """One Config with its two devices, and the last case that was tried."""

    def __init__(self, cfg: Config, device: Device | None = None) -> None:
        self.cfg = cfg
        self.coverage = Coverage()
        self._device = device

    @cached_property
    def device(self) -> Any:
        return self._device or RtlDevice(self.cfg, quiet=True, watchdog_cycles=WATCHDOG)

    def finish(self) -> Coverage:
        """The coverage so far."""
        if "device" in self.__dict__ and isinstance(self.device, RtlDevice):
            self.coverage.states = self.device.states()
        return self.coverage

    def use(self, memory: MemoryModel) -> None:
        if isinstance(self.device, RtlDevice):
            self.device.use(memory)


# Legal programs ---------------------------------------------------------------------------------------------------


def legal(machine: Machine, seed: int) -> str:
    """A random legal program leaves the same bytes in all of memory on both devices."""
    rng = random.Random(f"legal {seed}")
    program = case_program(machine.cfg, rng)
    if seed % COVERED == 0:
        machine.coverage.note(machine.cfg, program.words())
    machine.use(random_memory(rng))
    loaded = program.loaded()
    expected = program.run(FunctionalDevice(machine.cfg), loaded=loaded)
    found = program.run(machine.device, loaded=loaded)
    if not np.array_equal(expected, found):
        difference = first_difference(
            FunctionalDevice(machine.cfg), machine.device, loaded, 0, len(program.instructions)
        )
        raise Failure(str(difference))
    return "same bytes"


def case_program(cfg: Config, rng: random.Random) -> TestProgram:
    return random_program(
        cfg, rng.getrandbits(48), count=rng.choice((5, 20, 30, 30, 60)), align=rng.choice((None, 1)),
        wrap=rng.choice((0.0, 0.05, 0.3)), rich=rng.random() < 0.5,
    )  # fmt: skip


# Garbage ----------------------------------------------------------------------------------------------------------


def noise(program: TestProgram, image: NDArray[np.uint8], rng: random.Random) -> int:
    """Random bytes in place of some or all instructions."""
    size, count = instruction_bytes(program.cfg), len(program.instructions)
    first = rng.choice((0, rng.randrange(count)))
    image[first * size : count * size] = np.frombuffer(rng.randbytes((count - first) * size), np.uint8)
    return count


def random_fields(program: TestProgram, image: NDArray[np.uint8], rng: random.Random) -> int:
    """Instructions of existing opcodes, every field random: small values, large ones, all bits set."""
    count = rng.randint(1, len(program.instructions))
    size = instruction_bytes(program.cfg)
    for i in range(count):
        fmt = formats(program.cfg)[rng.choice(list(Opcode))]
        word = 0
        for each in fmt.fields:
            bits = rng.choice((0, 1, 1, 2, 3, each.width)) if rng.random() < 0.9 else each.width
            word |= (rng.getrandbits(min(bits, each.width)) if bits else 0) << fmt.offsets[each.name]
        word = word & ~0b111 | fmt.opcode
        image[i * size : (i + 1) * size] = np.frombuffer(word.to_bytes(size, "little"), np.uint8)
    return count


def flipped(program: TestProgram, image: NDArray[np.uint8], rng: random.Random) -> int:
    """One bit of a legal program turned over."""
    bit = rng.randrange(8 * len(program.instructions) * instruction_bytes(program.cfg))
    image[bit // 8] ^= 1 << bit % 8
    return len(program.instructions)


def truncated(program: TestProgram, image: NDArray[np.uint8], rng: random.Random) -> int:
    """Instructions missing at the end: never run, or zeros or data in their place."""
    kept, count = rng.randrange(len(program.instructions)), len(program.instructions)
    if rng.random() < 0.5:
        return kept
    size = instruction_bytes(program.cfg)
    image[kept * size + rng.randrange(size) : count * size] = rng.choice((0, 0xFF))
    return rng.choice((count, len(image) // size, 1 << 24))


def untouched(program: TestProgram, image: NDArray[np.uint8], rng: random.Random) -> int:
    """A legal program: the fault is the memory's."""
    return len(program.instructions)


DAMAGE: tuple[Callable[[TestProgram, NDArray[np.uint8], random.Random], int], ...] = (
    noise, random_fields, flipped, truncated, untouched,
)  # fmt: skip


def garbage(machine: Machine, seed: int) -> str:
    """Whatever is run ends with a status and a message, within the time limit, and writes nothing outside its limits.

    Afterwards a legal program still leaves the right bytes, without a reset from outside where memory works.
    """
    rng = random.Random(f"garbage {seed}")
    cfg = machine.cfg
    program = case_program(cfg, rng)
    image = program.loaded()
    damage = rng.choice(DAMAGE)
    count = damage(program, image, rng)
    memory = _faulty_memory(rng, len(image), always=damage is untouched)
    limit = rng.choice((TIME_LIMIT,) * 4 + (rng.randrange(1, 2000),))  # the host's, who then ends the run
    ending = _run(machine, image, memory, _address(rng, cfg, len(image)), count, limit)
    _recovers(machine, rng)
    return f"{damage.__name__}: {ending}"


def _address(rng: random.Random, cfg: Config, size: int) -> int:
    """Nearly always where the program is."""
    step = instruction_bytes(cfg)
    return rng.choice((0,) * 18 + (rng.randrange(size) // step * step, (1 << 32) - step))


def _faulty_memory(rng: random.Random, size: int, always: bool) -> MemoryModel:
    kind = rng.choice(("error", "freeze") if always else ("", "", "", "error", "freeze"))
    base = random_stalls(rng.getrandbits(32), rng.choice((0.0, 0.3)), 60)
    values = {name: getattr(base, name) for name in base.__dataclass_fields__}
    if kind == "error":
        start = rng.randrange(size)
        values |= dict(error_start=start, error_end=start + rng.choice((1, 64, 4096, size)))
    elif kind == "freeze":
        values |= dict(
            freeze_after=rng.choice((rng.randrange(2000), rng.randrange(100))),
            freeze_cycles=rng.choice((None, rng.randrange(4 * WATCHDOG))),
        )
    return MemoryModel(**values)


def _run(machine: Machine, image: NDArray[np.uint8], memory: MemoryModel, address: int, count: int, limit: int) -> str:
    """How the run ended. Failure where it did not end by itself, or wrote behind the limit."""
    device = machine.device
    device.allocate(len(image))
    machine.use(memory)
    device.write(0, image)
    rtl = isinstance(device, RtlDevice)
    if rtl:
        device.beyond_limit[:] = GUARD
    try:
        device.run(address, count, limit)
        ending = "done"
    except DeviceError as error:
        ending = _allowed(str(error))
    if rtl and (device.beyond_limit != GUARD).any():
        raise Failure("memory behind the DMA limit was written")
    return ending


def _allowed(message: str) -> str:
    """The kind of an error's message. Failure where it is no error that a program or a memory may cause."""
    if message.startswith("no end within"):
        return "still making progress at the time limit"
    found = re.match(r"instruction \d+: ([^;:]*)", message)
    if found is None or found[1] not in ERROR_TEXT.values():
        raise Failure(message)
    return found[1]


def _recovers(machine: Machine, rng: random.Random) -> None:
    program = random_program(machine.cfg, rng.getrandbits(48), count=5)
    machine.use(ZYNQ_HP)
    expected = program.run(FunctionalDevice(machine.cfg))
    try:
        found = program.run(machine.device)
    except DeviceError as error:
        raise Failure(f"a legal program after it: {error}") from None
    if not np.array_equal(expected, found):
        raise Failure("a legal program after it leaves other bytes")
