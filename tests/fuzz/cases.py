"""Kinds of cases: functions of a machine and a seed that return a text that says how the case ended.

A case that ends in a forbidden way raises Failure. Any other exception counts as a failure, too.
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
"""Value of each byte behind the DMA limit, before a run and after it."""
WATCHDOG = 3000
COVERED = 10
"""Coverage counts the fields of every COVERED-th legal program; decoding takes a fifth of the time of a run."""
TIME_LIMIT = 30_000
"""Time limit of garbage programs, in cycles: ten times the watchdog's, so a program that reaches it makes progress."""


class Failure(AssertionError):
    """A case ended in a way that is not allowed. cause: a text that is equal for failures with the same cause."""

    def __init__(self, why: str, cause: str = "") -> None:
        super().__init__(why)
        self.cause = cause


def random_memory(rng: random.Random) -> MemoryModel:
    """Draw one of the fixed memory models, or one that stalls at random."""
    stall = rng.choice((0.0, 0.1, 0.3, 0.6))
    return rng.choice((ZYNQ_HP, IDEAL, random_stalls(rng.getrandbits(32), stall, rng.choice((0, 5, 60, 300)))))


@dataclass
class Coverage:
    """Counts of the values of instruction fields, in up to 16 ranges each, and of the states of units."""

    fields: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    states: NDArray[np.uint64] = field(default_factory=lambda: np.zeros((4,) * 4, np.uint64))

    def note(self, cfg: Config, words: list[int]) -> None:
        for word in words:
            opcode = opcode_of(word)
            if opcode is None:
                continue
            for name, value in formats(cfg)[opcode].decode(word).items():
                self.fields[opcode.name, name, value_class(value)] += 1

    def merge(self, other: Coverage) -> None:
        self.fields.update(other.fields)
        self.states = self.states + other.states

    def reached(self) -> dict[str, tuple[int, int]]:
        """Return, by instruction, the number of value classes that were used and that legal programs can use."""
        result = {}
        for opcode in formats(EVERYTHING):
            possible = reachable(opcode)
            result[opcode.name] = (
                len({(name, c) for op, name, c in self.fields if op == opcode.name} & possible),
                len(possible),
            )
        return result

    def pairs(self) -> NDArray[np.uint64]:
        """Return the cycles in each pair of states of each pair of units, with axes [unit, unit, state, state]."""
        units = self.states.ndim
        result = np.zeros((units, units, 4, 4), np.uint64)
        for a in range(units):
            for b in range(a + 1, units):
                others = tuple(u for u in range(units) if u not in (a, b))
                result[a, b] = self.states.sum(axis=others)
        return result


def value_class(value: int) -> int:
    """Return the class of a value: 0 for 0, 1 for 1, then one for each power of two up to 8, and one for larger values.

    Negative values have the negative classes.
    """
    size = min(abs(value).bit_length(), 5)
    return -size if value < 0 else size


def value_classes(width: int, signed: bool) -> set[int]:
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if signed else (0, (1 << width) - 1)
    return {value_class(v) for v in (low, high, *(s << k for k in range(6) for s in (1, -1)), 0) if low <= v <= high}


EVERYTHING = Config(taps=3, forward=True)
"""A Config whose instructions have all fields."""


def reachable(opcode: Opcode) -> set[tuple[str, int]]:
    """Return the pairs (field, value class) of an instruction that legal programs can have.

    Legal programs never have another opcode, empty loops, sizes of 0, tokens of a unit for itself, or a STORE over
    instructions.
    """
    possible = set()
    for form_field in formats(EVERYTHING)[opcode].fields:
        classes = value_classes(form_field.width, form_field.signed)
        if form_field.name == "opcode":
            classes = {value_class(opcode)}
        elif form_field.name in ("wait", "post"):
            classes = {value_class(mask) for mask in range(16) if not mask >> UNIT_OF[opcode] & 1}
        elif form_field.name.startswith("extent_") or form_field.name.endswith("_size"):
            classes -= {0}
        elif form_field.name == "dram_addr" and opcode == Opcode.STORE:
            classes = {value_class(4096)}
        possible |= {(form_field.name, value_range) for value_range in classes}
    return possible


class Machine:
    """One Config with its two devices, and the coverage of the cases so far."""

    def __init__(self, cfg: Config, device: Device | None = None) -> None:
        self.cfg = cfg
        self.coverage = Coverage()
        self._device = device

    @cached_property
    def device(self) -> Any:
        return self._device or RtlDevice(self.cfg, quiet=True, watchdog_cycles=WATCHDOG)

    def finish(self) -> Coverage:
        """Return the coverage so far."""
        if "device" in self.__dict__ and isinstance(self.device, RtlDevice):
            self.coverage.states = self.device.states()
        return self.coverage

    def use(self, memory: MemoryModel) -> None:
        if isinstance(self.device, RtlDevice):
            self.device.use(memory)


# Legal programs ---------------------------------------------------------------------------------------------------


def legal(machine: Machine, seed: int) -> str:
    """Run a random legal program; it must leave the same bytes in all of memory on both devices."""
    rng = random.Random(f"legal {seed}")
    program = case_program(machine.cfg, rng)
    if seed % COVERED == 0:
        machine.coverage.note(machine.cfg, program.words())
    machine.use(random_memory(rng))
    loaded = program.loaded()
    expected = program.run(FunctionalDevice(machine.cfg), loaded=loaded)
    actual = program.run(machine.device, loaded=loaded)
    if not np.array_equal(expected, actual):
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
    """Replace some or all instructions by random bytes. Return the number of instructions to run."""
    size, count = instruction_bytes(program.cfg), len(program.instructions)
    first = rng.choice((0, rng.randrange(count)))
    image[first * size : count * size] = np.frombuffer(rng.randbytes((count - first) * size), np.uint8)
    return count


def random_fields(program: TestProgram, image: NDArray[np.uint8], rng: random.Random) -> int:
    """Replace instructions by others with valid opcodes and random fields: small, large, or all bits set."""
    count = rng.randint(1, len(program.instructions))
    size = instruction_bytes(program.cfg)
    for i in range(count):
        fmt = formats(program.cfg)[rng.choice(list(Opcode))]
        word = 0
        for form_field in fmt.fields:
            bits = rng.choice((0, 1, 1, 2, 3, form_field.width)) if rng.random() < 0.9 else form_field.width
            word |= (rng.getrandbits(min(bits, form_field.width)) if bits else 0) << fmt.offsets[form_field.name]
        word = word & ~0b111 | fmt.opcode
        image[i * size : (i + 1) * size] = np.frombuffer(word.to_bytes(size, "little"), np.uint8)
    return count


def flipped(program: TestProgram, image: NDArray[np.uint8], rng: random.Random) -> int:
    """Invert one bit of a legal program."""
    bit = rng.randrange(8 * len(program.instructions) * instruction_bytes(program.cfg))
    image[bit // 8] ^= 1 << bit % 8
    return len(program.instructions)


def truncated(program: TestProgram, image: NDArray[np.uint8], rng: random.Random) -> int:
    """Drop instructions at the end: run fewer, or run zeros, ones or data in their place."""
    kept, count = rng.randrange(len(program.instructions)), len(program.instructions)
    if rng.random() < 0.5:
        return kept
    size = instruction_bytes(program.cfg)
    image[kept * size + rng.randrange(size) : count * size] = rng.choice((0, 0xFF))
    return rng.choice((count, len(image) // size, 1 << 24))


def untouched(program: TestProgram, image: NDArray[np.uint8], rng: random.Random) -> int:
    """Leave the program legal; the memory has the fault."""
    return len(program.instructions)


DAMAGE: tuple[Callable[[TestProgram, NDArray[np.uint8], random.Random], int], ...] = (
    noise, random_fields, flipped, truncated, untouched,
)  # fmt: skip


def garbage(machine: Machine, seed: int) -> str:
    """Run a damaged program, which must end with a status and a message, within the time limit.

    It must write nothing behind the DMA limit. Afterwards a legal program must leave the right bytes. If memory works,
    no reset from outside is needed for that.
    """
    rng = random.Random(f"garbage {seed}")
    cfg = machine.cfg
    program = case_program(cfg, rng)
    image = program.loaded()
    damage = rng.choice(DAMAGE)
    count = damage(program, image, rng)
    memory = _faulty_memory(rng, len(image), always=damage is untouched)
    limit = rng.choice((TIME_LIMIT,) * 4 + (rng.randrange(1, 2000),))  # after a short limit the host ends the run
    ending = _run(machine, image, memory, _address(rng, cfg, len(image)), count, limit)
    _recovers(machine, rng)
    return f"{damage.__name__}: {ending}"


def _address(rng: random.Random, cfg: Config, size: int) -> int:
    """Draw the address of the first instruction: nearly always that of the program."""
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
    """Run the program and return how it ended. Raise Failure if it did not end, or wrote behind the DMA limit."""
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
    """Return the kind of an error from its message. Raise Failure if programs and memories cannot cause this error."""
    if message.startswith("no end within"):
        return "still making progress at the time limit"
    matched = re.match(r"instruction \d+: ([^;:]*)", message)
    if matched is None or matched[1] not in ERROR_TEXT.values():
        raise Failure(message)
    return matched[1]


def _recovers(machine: Machine, rng: random.Random) -> None:
    program = random_program(machine.cfg, rng.getrandbits(48), count=5)
    machine.use(ZYNQ_HP)
    expected = program.run(FunctionalDevice(machine.cfg))
    try:
        actual = program.run(machine.device)
    except DeviceError as error:
        raise Failure(f"a legal program after it: {error}") from None
    if not np.array_equal(expected, actual):
        raise Failure("a legal program after it leaves other bytes")
