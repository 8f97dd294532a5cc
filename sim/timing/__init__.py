"""Timing model: when each instruction of an encoded stream starts and ends, without its arithmetic.

    timing = predict(cfg, code)         # code: the words of a launch, as they lie in DRAM
    timing.cycles, timing.start, timing.end

The model does not look at data. `demand.py` computes what each instruction asks for (steps, rows, bursts, beats).
`machine.py` and the models of the units compute how the order of instructions, queues, tokens and the memory delay it.
They take one instruction after the other. Copies are trains of bursts in closed form, so that the model's own run time
does not depend on how much they move.

Cycles count from the write of `control` that starts the run, as those of the RTL's events do.
"""

from celosia.sim.timing.machine import Timing, predict
from celosia.sim.timing.memory_timing import check_memory

__all__ = ["Timing", "check_memory", "predict"]
