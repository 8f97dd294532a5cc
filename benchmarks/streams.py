"""Rows of `streams`: images a second of a stream over one after the other, and of two accelerators over one.

The accelerator is a device that takes the time of a board: its cycles, by the timing model, at the clock of the memory
model, in which it waits as a driver does. Its results come from the functional simulator, once for each image. What the
CPU does is real, in one thread, so that the waiting one finds a core.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import celosia
from benchmarks.rows import Request, Row, Say, judged, skipped
from benchmarks.workloads import WORKLOADS, Missing
from celosia.compiler.program import Program
from celosia.driver.cut import Relay, cut
from celosia.driver.run.explain import predict_counters
from celosia.driver.run.stream import LANES
from celosia.driver.runtime import Runtime
from celosia.hw.boards.boards import clock_of_report
from celosia.hw.boards.memory import ZYNQ_HP, MemoryModel
from celosia.hw.spec.config import Config
from celosia.sim.device import Counters
from celosia.sim.timing.timed import TimedDevice

Array = NDArray[Any]
Inputs = Sequence[Mapping[str, Array]]
IMAGES, TURNS = 80, 3
"""Of a round; rounds of each side."""
DIFFERENT = 2
"""Images that differ from each other."""
SIDE, CHANNELS, LAYERS, NARROW = 56, 64, 4, 16
"""Of the model with half its time on the CPU: its images, convolutions of int8, and channels of those of floats."""
FLOATS, TRIES, BALANCE = 8, 4, 0.06
"""Float layers at first, how often their number is changed, and how far both sides may be apart."""
SHARED, CUT = "resnet18", "resnet50"
TARGETS = {"half": 1.7, "two": 1.95, "cut": 1.8}


class WaitingDevice(TimedDevice):
    """Takes the time of a board for each run, and gives the bytes of the functional simulator.

    What a run does to memory is simulated once, and remembered by what the host has written there; its clones
    remember the same.
    """

    def __init__(self, config: Config, memory: MemoryModel | str = ZYNQ_HP) -> None:
        super().__init__(config, memory)
        self.seconds_a_cycle = 1e-6 / clock_of_report(self.memory_model)
        self._remembered: dict[tuple[int, bytes], tuple[Counters, int, NDArray[np.uint8]]] = {}

    def allocate(self, size: int) -> None:
        super().allocate(size)
        self._written: dict[int, bytes] = {}

    def write(self, addr: int, data: NDArray[Any]) -> None:
        super().write(addr, data)
        self._written[addr] = hashlib.blake2b(np.ascontiguousarray(data).data).digest()

    def run(self, instr_addr: int, count: int, timeout_cycles: int = 0, trace: bool = False) -> Counters:
        """As Device; never with events."""
        started = time.perf_counter()
        key = instr_addr, b"".join(each for _, each in sorted(self._written.items()))
        if key not in self._remembered:
            before = self.dram.copy()
            counters = super().run(instr_addr, count, timeout_cycles)
            changed = np.flatnonzero(before != self.dram)
            first, end = (changed[0], changed[-1] + 1) if len(changed) else (0, 0)
            self._remembered[key] = counters, first, self.dram[first:end].copy()
        counters, first, data = self._remembered[key]
        self.dram[first : first + len(data)] = data
        time.sleep(max(0.0, started + (counters.cycles or 0) * self.seconds_a_cycle - time.perf_counter()))
        return counters


def rows(asked: Request) -> Iterator[Row]:
    """A row for a model with half its time on the CPU, and for two accelerators in place of one: each with all of a
    network, or with a part of it."""
    folder, models, config, say = asked.folder, asked.models, asked.preset, asked.say
    command = f"python -m benchmarks streams{f' --config {config}' if config != 'pynq' else ''}"
    if not models or "half" in models:
        yield _half(config, command, say)
    if not models or SHARED in models:
        yield _two(folder, config, command, say)
    if not models or CUT in models:
        yield _cut(folder, config, command, say)


def _half(config: str, command: str, say: Say) -> Row:
    say("looking for as much work for the CPU as for the accelerator")
    program, inputs, share = _balanced(config)
    with Runtime(program, WaitingDevice(program.config), threads=1) as runtime:
        sides = {"serial": lambda: _speed(runtime, inputs, 1), "stream": lambda: _speed(runtime, inputs, LANES)}
        speeds = _by_turns(sides, say)
    what = f"a model with half its time on the CPU, {config}: images a second as a stream over one after the other"
    details = {"ratio": speeds["stream"] / speeds["serial"], **speeds, "share": share, "config": config}
    return judged("streams/half", what, command, details, f"ratio >= {TARGETS['half']}")


def _cut(folder: Path | None, config: str, command: str, say: Say) -> Row:
    what = f"{CUT}, {config}: images a second of two accelerators with a part of it each over one with all of it"
    say(f"cutting {CUT}")
    try:
        path = WORKLOADS[CUT].path(folder)
    except Missing as reason:
        return skipped(f"streams/cut/{CUT}", what, command, reason)
    models: tuple[Path | onnx.ModelProto, ...] = path, *cut(path, 2, config)
    programs = [celosia.compile(each, config, check=False) for each in models]
    cycles = [sum(each.cycles or 0 for each in predict_counters(program)) for program in programs]
    inputs = images(programs[0])
    whole, *parts = (WaitingDevice(program.config) for program in programs)
    with Runtime(programs[0], whole, threads=1) as one, Relay(programs[1:], parts, threads=1) as two:
        speeds = _by_turns({"one": lambda: _speed(one, inputs, LANES), "two": lambda: _speed(two, inputs, LANES)}, say)
    details = {
        "ratio": speeds["two"] / speeds["one"], **speeds, "ratio_of_cycles": cycles[0] / max(cycles[1:]),
        "cycles": cycles, "config": config,
    }  # fmt: skip
    return judged(f"streams/cut/{CUT}", what, command, details, f"ratio >= {TARGETS['cut']}")


def _two(folder: Path | None, config: str, command: str, say: Say) -> Row:
    what = f"{SHARED}, {config}: images a second of two accelerators over one"
    say(f"compiling {SHARED}")
    try:
        program = celosia.compile(WORKLOADS[SHARED].path(folder), config, check=False)
    except Missing as reason:
        return skipped(f"streams/two/{SHARED}", what, command, reason)
    inputs, first = images(program), WaitingDevice(program.config)
    with Runtime(program, first, threads=1) as one, Runtime(program, [first.clone_shared(), _another(first)], 1) as two:
        speeds = _by_turns({"one": lambda: _speed(one, inputs, LANES), "two": lambda: _speed(two, inputs, LANES)}, say)
    details = {"ratio": speeds["two"] / speeds["one"], **speeds, "config": config}
    return judged(f"streams/two/{SHARED}", what, command, details, f"ratio >= {TARGETS['two']}")


def _another(device: WaitingDevice) -> WaitingDevice:
    """A second accelerator, which knows the results of the first one."""
    made = WaitingDevice(device.config)
    made._remembered = device._remembered
    return made


def _by_turns(sides: Mapping[str, Callable[[], float]], say: Say) -> dict[str, float]:
    """The most images a second of each side, for others may use the processor meanwhile; the first round, in which
    results are simulated, does not count."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(TURNS + 1):
        for name, speed in sides.items():
            say(f"{name}, round {turn}")
            measured = speed()
            found[name] += [measured] if turn else []
    return {name: max(each) for name, each in found.items()}


def _speed(runtime: Runtime | Relay, inputs: Inputs, in_flight: int) -> float:
    """Images a second."""
    samples: Iterable[Mapping[str, Array]] = (inputs[number % len(inputs)] for number in range(IMAGES))
    started = time.perf_counter()
    for _ in runtime.run_each(samples, in_flight, trace=False):
        pass
    return IMAGES / (time.perf_counter() - started)


def images(program: Program) -> Inputs:
    """DIFFERENT random inputs."""
    rng = np.random.default_rng(0)
    return [
        {each.name: rng.standard_normal(each.shape).astype(np.float32) for each in program.inputs}
        for _ in range(DIFFERENT)
    ]


# A model with half its time on the CPU ---------------------------------------------------------------------------


def _balanced(config: str) -> tuple[Program, Inputs, float]:
    """The model whose float layers take the CPU as long as the others take the accelerator, inputs, and the CPU's share
    of an image's time."""
    count = FLOATS
    for _ in range(TRIES):
        program, cpu, device = _times(config, count)
        if abs(cpu - device) < BALANCE * device:
            break
        count = max(1, count + round((device - cpu) / cpu * count))
    return program, images(program), cpu / (cpu + device)


def _times(config: str, floats: int) -> tuple[Program, float, float]:
    """The Program of a model with so many float layers, and seconds of an image on the CPU and on the accelerator: of
    the processor, which others may use meanwhile, and by the clock."""
    program = celosia.compile(model(floats), config, check=False)
    device = WaitingDevice(program.config)
    with Runtime(program, device, threads=1) as runtime:
        (sample, *_) = images(program)
        spent = []
        for _ in range(8):
            started = time.thread_time()
            result = runtime.run(sample, trace=False)
            spent.append(time.thread_time() - started)
    return program, min(spent), sum(each.cycles or 0 for each in result.counters) * device.seconds_a_cycle


def model(floats: int) -> onnx.ModelProto:
    """LAYERS int8 convolutions in QDQ form, then `floats` float ones: `x` [1, CHANNELS, SIDE, SIDE] to `y` of that."""
    rng = np.random.default_rng(1)
    nodes, constants = [], []

    def add(op: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, list(inputs), [output], name=f"{op} {output}", **attributes))
        return output

    def constant(name: str, value: Any) -> str:
        constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    steps = constant("step", np.float32(0.03)), constant("zero", np.int8(0))
    x = add("DequantizeLinear", [add("QuantizeLinear", ["x", *steps], "q"), *steps], "real")
    for number in range(LAYERS):
        w = constant(f"w{number}", rng.integers(-40, 41, (CHANNELS, CHANNELS, 3, 3), np.int8))
        w = add("DequantizeLinear", [w, constant(f"step{number}", np.float32(0.002)), "zero"], f"real w{number}")
        x = add("Conv", [x, w], f"c{number}", pads=[1] * 4)
        x = add("DequantizeLinear", [add("QuantizeLinear", [x, *steps], f"q{number}"), *steps], f"r{number}")
    for number in range(floats):
        shape = NARROW, NARROW if number else CHANNELS, 3, 3
        w = constant(f"f{number}", rng.standard_normal(shape).astype(np.float32) / 10)
        x = add("Relu", [add("Conv", [x, w], f"d{number}", pads=[1] * 4)], f"e{number}")
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, CHANNELS, SIDE, SIDE])]
    made = [helper.make_tensor_value_info(x, TensorProto.FLOAT, [1, NARROW, SIDE, SIDE])]
    graph = helper.make_graph(nodes, "half", ends, made, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
