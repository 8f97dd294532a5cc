"""Timing model: when each instruction of an encoded stream starts and ends, without its arithmetic.

    timing = predict(cfg, code)         # code: the words of a launch, as they lie in DRAM
    timing.cycles, timing.start, timing.end

The model does not look at data. Each instruction is timed once, and copies are trains of bursts in closed form, so
that the model's own run time does not depend on how many bytes move. The files, in the order of the data:

demand          what each instruction asks for by its fields (such as those of packed or spread weights): steps, rows,
                bursts, beats, ports, banks
engine_cycles   how many cycles the softmax and norm engines take (when a softmax starts and overlaps: compute)
machine         the order in which instructions of all units are timed: queues, tokens; the counters; how often the run
                is computed again for ports that share DRAM
work            types that the models of the units share: an instruction with its demand, regular cycles, steps
fetch_timing    when instructions arrive and enter the queues
copies          when a LOAD or STORE starts and ends, by its demand; the stages that expand packed weights
compute         when a GEMM or VECTOR starts and ends, which instructions of VECTOR overlap
ports           which of two units gets a port of a scratchpad or a bank of acc in a cycle
memory_timing   when the bursts of a port move their beats: latency, refresh, shared bandwidth (numbers of each board's
                memory: hw/boards/boards.py; of the generic models zynq-hp and ideal: hw/boards/memory.py)
latency         the cycles between two events of the RTL that registers in between cost, the same for all instructions
                (what depends on the instruction, and pauses between instructions of a unit: copies, compute)
timed           the device: bytes of the functional simulator, cycles of this model

Cycles count from the write of `control` that starts the run, as those of the RTL's events do.
"""

from celosia.sim.timing.machine import Timing, predict
from celosia.sim.timing.memory_timing import check_memory

__all__ = ["Timing", "check_memory", "predict"]
