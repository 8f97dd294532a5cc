"""A Device that executes instructions with numpy: bytes equal to the RTL's, and no cycles."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Unit, instruction_bytes
from celosia.hw.spec.legality import why_illegal
from celosia.hw.spec.regs import ERROR_TEXT, Error
from celosia.sim.device import Counters, DeviceError, TimeLimitError
from celosia.sim.functional import vectorised
from celosia.sim.functional.checking import Checker
from celosia.sim.functional.decode import Instruction, decode
from celosia.sim.functional.reference import State

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

DECODED_LIMIT = 1 << 22
"""Bytes of instructions whose decoded form a device keeps, since programs run again and again."""


@cache
def _blas_controller() -> ThreadpoolController | None:
    """Return the controller of BLAS's threads; None if threadpoolctl is missing, as on a board."""
    try:
        from threadpoolctl import ThreadpoolController
    except ModuleNotFoundError:
        return None
    return ThreadpoolController()


def one_blas_thread() -> AbstractContextManager[Any]:
    """Return a context in which BLAS uses one thread: on a busy machine, two threads wait for each other."""
    blas = _blas_controller()
    return blas.limit(limits=1, user_api="blas") if blas else nullcontext()


class Memory:
    """DRAM of a simulated device: one array of bytes, from the DMA base on."""

    def __init__(self) -> None:
        self.dram = np.zeros(0, np.uint8)

    def allocate(self, size: int) -> None:
        """Replace memory by `size` bytes of zeros. ValueError for a negative size."""
        if size < 0:
            raise ValueError(f"cannot allocate {size} bytes")
        self.dram = np.zeros(size, np.uint8)

    def write(self, addr: int, data: NDArray[np.generic]) -> None:
        """Copy the bytes of `data` to `addr`. ValueError where they do not fit."""
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self._check_range(addr, len(flat))
        self.dram[addr : addr + len(flat)] = flat

    def read(self, addr: int, size: int) -> NDArray[np.uint8]:
        """Return a copy of `size` bytes from `addr` on. ValueError if they are not allocated."""
        self._check_range(addr, size)
        return self.dram[addr : addr + size].copy()

    def _check_range(self, addr: int, size: int) -> None:
        """Raise ValueError unless the bytes are allocated."""
        if addr < 0 or size < 0 or addr + size > len(self.dram):
            raise ValueError(f"bytes {addr} to {addr + size - 1} are not in the {len(self.dram)} bytes allocated")


class FunctionalDevice(Memory):
    """Device that executes programs by the meaning of the instructions; `run` returns no cycle counts and no events.

    Of the units whose next instruction has its tokens, the one with the earliest instruction goes first. A program that
    would hang on the machine ends in a DeviceError.

    checking: also raise CheckError where the program reads scratchpad entries that it did not write in this run, leaves
    a buffer, or accesses what another unit writes without a token between them. About ten times slower. Scratchpads
    then begin with random bytes from `seed`.
    """

    memory_model: str | None = None
    abandoned = False

    def __init__(self, config: Config, checking: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.checking = checking
        self.state = State(config)
        if checking:
            self.state.randomise(np.random.default_rng(seed))
        self._decoded: dict[bytes, list[Instruction | None]] = {}

    def close(self) -> None:
        """Nothing to release."""

    def clone_shared(self) -> FunctionalDevice:
        """Return a device that shares the scratchpads and has a memory of its own; see sim.device.SharedDevice."""
        clone = copy(self)
        clone.allocate(0)
        return clone

    def run(self, instr_addr: int, count: int, timeout_cycles: int = 0, trace: bool = False) -> Counters:
        """Execute `count` instructions at `instr_addr`. DeviceError where one fails or none can proceed.

        There are no cycles here, but an instruction that alone has more steps than `timeout_cycles` (0 for no limit) is
        refused as one that does not end in time. trace: part of the protocol, without effect here.
        """
        # The products are small: while other processes run, BLAS threads wait far longer than they work.
        with one_blas_thread():
            return self._run(instr_addr, count, timeout_cycles)

    def _run(self, instr_addr: int, count: int, timeout_cycles: int) -> Counters:
        """Execute instructions unit by unit as tokens allow. DeviceError where none can proceed."""
        size = instruction_bytes(self.config)
        code = self.read(instr_addr, count * size)
        program = self._decode(code.reshape(count, size))
        checker = Checker(self.config, len(self.dram)) if self.checking else None
        tokens = [[0] * len(Unit) for _ in Unit]  # tokens[from][to]
        max_tokens = (1 << self.config.token_bits) - 1

        def execute_step(number: int, instruction: Instruction) -> None:
            """Execute an instruction that can start: take its tokens, and post its own."""
            unit, opcode, _, _, waits, posts, least_cycles = instruction
            if 0 < timeout_cycles < least_cycles:
                description = f"instruction {number} ({opcode.name}) has {int(least_cycles)} steps"
                raise TimeLimitError(f"no end within {timeout_cycles} cycles: {description}")
            if checker is not None:
                checker.execute(number, unit, opcode, instruction.fields)
            self.execute(instruction, number)
            for other in waits:
                tokens[other][unit] -= 1
            for other in posts:
                tokens[unit][other] += 1

        fetched = 0
        if None not in program:  # fast path: while each instruction can start at once, queues stay empty
            for instruction in program:
                if instruction is None or not _can_start(instruction, tokens, max_tokens):
                    break
                execute_step(fetched, instruction)
                fetched += 1
        queues: list[deque[int]] = [deque() for _ in Unit]
        depth = self.config.queue_depth
        while True:
            # Fetch stops at the first instruction whose queue is full, as the hardware does.
            while fetched < count:
                instruction = program[fetched]
                if instruction is None:
                    word = int.from_bytes(code[fetched * size : (fetched + 1) * size].tobytes(), "little")
                    reason = why_illegal(self.config, word)
                    raise DeviceError(f"instruction {fetched}: {ERROR_TEXT[Error.ILLEGAL_INSTRUCTION]}: {reason}")
                queue = queues[instruction.unit]
                if len(queue) >= depth:
                    break
                queue.append(fetched)
                fetched += 1
            for ready in sorted([queue[0] for queue in queues if queue]):
                instruction = program[ready]
                if instruction is not None and _can_start(instruction, tokens, max_tokens):
                    break
            else:
                break
            assert instruction is not None
            queues[instruction.unit].popleft()
            execute_step(ready, instruction)
        if fetched < count or any(queues):
            raise DeviceError(
                "no unit can proceed: " + _describe_waits(queues, program, tokens, max_tokens, fetched, count)
            )
        return Counters()

    def _decode(self, code: NDArray[np.uint8]) -> list[Instruction | None]:
        """Decode `code` [count, bytes of an instruction], or return what an earlier run of the same code decoded.

        None stands for an illegal instruction.
        """
        key = code.tobytes()
        if key not in self._decoded:
            if sum(map(len, self._decoded)) + len(key) > DECODED_LIMIT:
                self._decoded.clear()
            self._decoded[key] = decode(self.config, code)
        return self._decoded[key]

    def execute(self, instruction: Instruction, number: int = 0) -> None:
        """Execute one instruction without looking at its tokens. DeviceError where it leaves memory.

        number: its number in the program, for the message.
        """
        try:
            vectorised.execute(self.state, self.dram, instruction.opcode, instruction.fields)
        except IndexError as error:
            raise DeviceError(f"instruction {number}: {ERROR_TEXT[Error.ADDRESS]}: {error}") from None
        except MemoryError:
            raise DeviceError(f"instruction {number}: it has more steps than this machine has memory for") from None


def _can_start(instruction: Instruction, tokens: list[list[int]], max_tokens: int) -> bool:
    """Return whether the tokens that an instruction waits for are there, and there is room for those that it posts.

    tokens: tokens that wait between two units, [from][to].
    """
    unit, _, _, _, waits, posts, _ = instruction
    for other in waits:
        if not tokens[other][unit]:
            return False
    return all(tokens[unit][other] < max_tokens for other in posts)


def _describe_waits(
    queues: list[deque[int]],
    program: list[Instruction | None],
    tokens: list[list[int]],
    max_tokens: int,
    fetched: int,
    count: int,
) -> str:
    """Describe, for an error, the tokens that each unit's next instruction waits for."""
    parts = []
    for unit in Unit:
        if not queues[unit]:
            parts.append(f"{unit.name} has nothing to do")
            continue
        number = queues[unit][0]
        instruction = program[number]
        assert instruction is not None  # a fetched instruction is legal
        missing = [f"a token from {o.name}" for o in instruction.waits if not tokens[o][unit]]
        full = [f"room for a token to {o.name}" for o in instruction.posts if tokens[unit][o] >= max_tokens]
        parts.append(f"{unit.name} waits at instruction {number} for {' and '.join(missing + full)}")
    return "; ".join(parts) + f"; {fetched} of {count} instructions fetched"
