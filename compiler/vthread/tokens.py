"""Insert tokens: turn dependences between units into wait and post bits.

An instruction must wait for the latest instruction of every other unit that needs.py returns for it. It takes a token
from that unit only if it does not already know, directly or through others, that this instruction has ended. The
program order satisfies every dependence and never has more tokens under way than a semaphore holds, so that nothing can
deadlock.
"""

from __future__ import annotations

from celosia.compiler.vthread.needs import NEVER, UNIT_NUMBER, UNITS, Needs, find_needs
from celosia.compiler.vthread.pipeline import StreamInstruction
from celosia.hw.spec.config import Config


def insert_tokens(
    cfg: Config, instructions: list[StreamInstruction], tracked_bytes: int, needs: list[Needs] | None = None
) -> None:
    """Set `wait` and `post` of each instruction, in place.

    tracked_bytes: DRAM from there on is never written. needs: those of the instructions, if they are known.
    """
    known = [[NEVER] * len(UNITS) for _ in UNITS]  # known[v][u]: last instruction of u that v knows to have ended
    at_start: list[list[int]] = []  # at_start[i]: what unit of instruction i knew when it started
    tokens: dict[tuple[int, int], list[tuple[int, int]]] = {
        (u, v): [] for u in UNITS for v in UNITS
    }  # (giver, taker) -> pairs of instructions (that posts, that waits)
    capacity = (1 << cfg.token_bits) - 1

    for index, needed in enumerate(find_needs(cfg, instructions, tracked_bytes) if needs is None else needs):
        instruction = instructions[index]
        unit = UNIT_NUMBER[instruction.opcode]
        known_here, wait = known[unit], 0
        # The latest first: its token may imply the others.
        behind = [other for other in UNITS if other != unit and needed[other] > known_here[other]]
        for other in sorted(behind, key=needed.__getitem__, reverse=True):
            if needed[other] > known[unit][other]:
                producer, pairs = needed[other], tokens[other, unit]
                if len(pairs) >= capacity and pairs[-capacity][1] > producer:
                    # The semaphore is full. The token before is taken later than `producer`, which can post it instead.
                    earlier, taker = pairs.pop()
                    instructions[earlier].fields["post"] ^= 1 << unit
                else:
                    wait, taker = wait | 1 << other, index
                pairs.append((producer, taker))
                fields = instructions[producer].fields
                fields["post"] = fields.get("post", 0) | 1 << unit
                known[unit][other] = producer
                known[unit] = list(map(max, known[unit], at_start[producer]))
        instruction.fields["wait"] = wait
        known[unit][unit] = index
        at_start.append(list(known[unit]))
