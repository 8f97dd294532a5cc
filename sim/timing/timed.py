"""A Device with the bytes of the functional simulator and the cycles of the timing model."""

from __future__ import annotations

from celosia.hw.boards.boards import memory_model
from celosia.hw.boards.memory import ZYNQ_HP, MemoryModel
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import instruction_bytes
from celosia.sim.device import Counters, TimeLimitError
from celosia.sim.functional.fsim import FunctionalDevice
from celosia.sim.timing import Timing, check_memory, predict

REMEMBERED = 8
"""Number of launches whose predicted time is kept, since it does not depend on data."""


class TimedDevice(FunctionalDevice):
    """Device that executes programs as `FunctionalDevice` does, with the cycles, counters and events of `predict`.

    memory: the model behind the cycles, or its name. ValueError for one that the timing model does not know.
    """

    def __init__(self, config: Config, memory: MemoryModel | str = ZYNQ_HP) -> None:
        super().__init__(config)
        self._memory = memory_model(memory)
        check_memory(self._memory)
        self.memory_model = str(self._memory)
        self._timings: dict[tuple[int, bytes], Timing] = {}

    def run(self, instr_addr: int, count: int, timeout_cycles: int = 0, trace: bool = False) -> Counters:
        """Execute `count` instructions at `instr_addr`, and return the predicted counters.

        DeviceError where one fails, none can proceed, or all take over `timeout_cycles` (0 for no limit).
        """
        code = self.read(instr_addr, count * instruction_bytes(self.config)).tobytes()  # before a store can change it
        super().run(instr_addr, count, timeout_cycles)
        timing = self._predict_once(instr_addr, code)
        if 0 < timeout_cycles < timing.cycles:
            raise TimeLimitError(f"no end within {timeout_cycles} cycles: the program takes {timing.cycles}")
        return timing.counters(trace)

    def _predict_once(self, address: int, code: bytes) -> Timing:
        """Predict the timing of a program, or return that of an earlier run of it."""
        timing = self._timings.get((address, code))
        if timing is None:
            while len(self._timings) >= REMEMBERED:
                self._timings.pop(next(iter(self._timings)))
            timing = self._timings[address, code] = predict(self.config, code, self._memory, address)
        return timing
