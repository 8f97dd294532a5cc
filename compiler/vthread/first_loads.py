"""Sort the first LOADs of a launch by when their data are needed.

Tiles load one after the other, each all that it needs. Later that does no harm: the next tiles' loads are far ahead.
At the begin everything waits for the first tile, whose last layers' weights need not come before the second one's input
(MobileNetV2 takes 0.01% less time so, a keyword spotter 5%; sorting later LOADs as well costs 0.4%, as one that waits
for room then holds up others).
"""

from __future__ import annotations

from itertools import combinations, takewhile

from celosia.compiler.vthread.pipeline import StreamInstruction
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode
from celosia.sim.functional.access import Range, complete_fields, ranges


def reorder_first_loads(cfg: Config, instructions: list[StreamInstruction]) -> list[StreamInstruction]:
    """Sort the LOADs before all other instructions by the first readers of their data."""
    first = list(takewhile(lambda instruction: instruction.opcode == Opcode.LOAD, instructions))
    rest = instructions[len(first) :]
    loaded = {id(load): _ranges(cfg, load)[0] for load in first}
    if any(_overlap(a, b) for a, b in combinations(loaded.values(), 2)):
        return instructions
    needed: dict[int, int] = {}
    for number, instruction in enumerate(rest):
        if len(needed) == len(loaded):
            break
        read = _ranges(cfg, instruction) if instruction.opcode != Opcode.LOAD else []
        for key, access in loaded.items():
            if any(_overlap(access, other) for other in read):
                needed.setdefault(key, number)
    return [*sorted(first, key=lambda load: needed.get(id(load), len(rest))), *rest]


def _ranges(cfg: Config, instruction: StreamInstruction) -> list[Range]:
    return ranges(cfg, instruction.opcode, complete_fields(cfg, instruction.opcode, instruction.fields))


def _overlap(a: Range, b: Range) -> bool:
    return a.memory == b.memory and a.first < b.end and b.first < a.end
