"""The machine's clock without its arithmetic: when each instruction of an encoded stream starts and ends.

    timing = predict(cfg, code)         # code: the words of a launch, as they lie in DRAM
    timing.cycles, timing.start, timing.end

Nothing here looks at data. What an instruction asks for (steps, rows, bursts, beats) comes from `demand.py`. What the
order of instructions, queues, tokens and the memory make of it is computed here, one instruction after the other,
each unit keeping what it still needs to know of the ones before. Copies are trains of bursts in closed form, so that
the time this takes does not depend on how much they move.

Cycles count from the write of `control` that starts the run, as those of the RTL's events do.
"""

from celosia.sim.timing.machine import Timing, predict
from celosia.sim.timing.memory_timing import check_memory

__all__ = ["Timing", "check_memory", "predict"]
