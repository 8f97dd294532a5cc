"""Streams give the bytes and order of single runs; tests of what overlaps and of early ends."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from threading import Event
from typing import Any

import numpy as np
import pytest
from accelerator import Accelerator
from driver_models import floats
from small_models import Builder

import celosia
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.program import InputError, LaunchStep, Program
from celosia.driver.board.board_device import BoardDevice
from celosia.hw.spec.config import Config
from celosia.sim.device import Counters, DeviceError, SharedDevice
from celosia.sim.functional.fsim import FunctionalDevice

PATIENCE = 10
"""Seconds after which a test fails; nothing waits as long where it holds."""
TINY = Config.load("tiny")


Arrays = list[dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def program() -> Program:
    """Return a Program with a launch, a CPU operator, and a launch that reads data of the first from the device."""
    b = Builder("qdq", np.int8, seed=3)
    first = b.conv(b.input([1, 4, 6, 6]), 4, (3, 3), pads=(1, 1, 1, 1))
    on_cpu = b.quantise(b.node("Softmax", [b.real(first)], axis=1), first.shape, 1 / 256)
    b.output(b.binary("Add", b.conv(on_cpu, 4, (1, 1)), first), real=True)
    made = celosia.compile(b.model(), TINY)
    _, second = made.launches
    assert {pack.value for pack in second.pack} < {name for step in made.steps for name in _made(step)}
    return made


def _made(step: object) -> tuple[str, ...]:
    return tuple(each.value for each in step.unpack) if isinstance(step, LaunchStep) else step.outputs  # type: ignore[attr-defined]


@pytest.fixture
def samples(program: Program) -> Arrays:
    rng = np.random.default_rng(0)
    (tensor,) = program.inputs
    return [{tensor.name: rng.normal(size=tensor.shape).astype(np.float32)} for _ in range(7)]


def lanes() -> set[threading.Thread]:
    """Return the threads of streams."""
    return {thread for thread in threading.enumerate() if thread.name == "celosia-lane"}


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = lanes()
    yield
    assert lanes() <= before


def one_by_one(program: Program, samples: Arrays) -> list[bytes]:
    runtime = celosia.Runtime(program)
    return [each.tobytes() for sample in samples for each in runtime.run(sample).outputs.values()]


def bytes_of(results: object) -> list[bytes]:
    return [each.tobytes() for result in results for each in result.outputs.values()]  # type: ignore[attr-defined]


# What a stream gives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "device", ["functional", "timed", pytest.param("rtl", marks=pytest.mark.rtl), "functional, timed"]
)
@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_a_stream_gives_the_bytes_of_one_after_the_other(
    program: Program, samples: Arrays, device: str, in_flight: int
) -> None:
    with celosia.Runtime(program, device) as runtime:
        results = list(runtime.run_each(iter(samples), in_flight))
        assert bytes_of(results) == one_by_one(program, samples)
        assert {each.report["device"] for each in results} <= set(device.split(", "))
        if device in ("timed", "rtl"):
            alone = [run.cycles for run in runtime.run(samples[0]).counters]
            assert all([run.cycles for run in each.counters] == alone for each in results)
        batch = {name: np.concatenate([each[name] for each in samples]) for name in samples[0]}
        (joined,) = runtime.run_batch(batch).values()
        assert joined.tobytes() == b"".join(one_by_one(program, samples))


def test_a_model_whose_shapes_change(samples: Arrays) -> None:
    """A stream may change shapes; each Program has the device to itself while its samples are in flight."""
    b = Builder("qdq", np.int8, seed=3)
    b.output(b.conv(b.input([1, 4, 6, 6]), 4, (3, 3), pads=(1, 1, 1, 1)), real=True)
    model = b.model()
    for axis, label in ((2, "h"), (3, "w")):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = label
        model.graph.output[0].type.tensor_type.shape.dim[axis].dim_param = label
    name = model.graph.input[0].name
    arrays = [array for sample in samples for array in sample.values()]
    taken = [arrays[0], arrays[1], arrays[2][..., :4], np.zeros(3, np.float32), arrays[3], arrays[4]]
    alone = celosia.Runtime(model, config=TINY)
    stream = celosia.Runtime(model, FunctionalDevice(TINY)).run_each(taken)
    assert bytes_of(next(stream) for _ in range(3)) == bytes_of(alone.run({name: each}) for each in taken[:3])
    with pytest.raises(ModelError, match="sample 3: "):
        next(stream)
    assert bytes_of(stream) == bytes_of(alone.run({name: each}) for each in taken[4:])


def test_a_program_without_launches_and_wrong_numbers() -> None:
    runtime = celosia.Runtime(celosia.compile(floats(), TINY), "functional,functional")
    sample = {name: np.ones((2, 3), np.float32) for name in ("a", "b")}
    assert len(list(runtime.run_each([sample] * 3))) == 3
    with pytest.raises(InputError, match=r"sample 0.*2 inputs"):
        next(runtime.run_each([sample["a"]]))
    wrong: Any
    for wrong in (0, -1, 2.5, 1_000_000):
        with pytest.raises(InputError, match=rf"in_flight.*1 to 64.*{wrong}"):
            runtime.run_each([], in_flight=wrong)
    with pytest.raises(ValueError, match=r"'funtional'.*'functional'"):
        celosia.Runtime(runtime.program, "functional,funtional")
    with pytest.raises(ValueError, match="empty list"):
        celosia.Runtime(runtime.program, [])


# What is done at once --------------------------------------------------------------------------------------------


class Meeting(FunctionalDevice):
    """A device whose first run ends when the memory of another lane is written. Runs in sequence would wait for
    ever."""

    met = Event()
    waited: list[bool] = []

    def write(self, addr: int, data: np.ndarray) -> None:
        super().write(addr, data)
        if self.running.locked():
            self.met.set()

    running = threading.Lock()

    def run(self, instr_addr: int, count: int, timeout_cycles: int = 0, trace: bool = False) -> Counters:
        assert self.running.acquire(blocking=False), "two runs of one accelerator at once"
        try:
            self.waited.append(self.met.wait(PATIENCE))
            return super().run(instr_addr, count, timeout_cycles, trace)
        finally:
            self.running.release()


def test_one_sample_is_written_while_another_one_runs(program: Program, samples: Arrays) -> None:
    runtime = celosia.Runtime(program, Meeting(TINY))
    assert bytes_of(runtime.run_each(samples)) == one_by_one(program, samples)
    assert len(Meeting.waited) == 2 * len(samples) and all(Meeting.waited)


def test_a_board_with_two_buffers(program: Program, samples: Arrays) -> None:
    """A board with memory for two samples overlaps them; another one runs them in sequence.

    The registers know one base address for each sample in flight. The first run ends when the memory is known.
    """
    for buffers, bases in ((2, 2), (1, 1)):
        memory = Pages(buffers)
        known = lambda seconds, memory=memory: memory.refused.wait(PATIENCE)  # noqa: E731
        device = BoardDevice(TINY, Accelerator(TINY), memory, interrupt=known, now=lambda: 0.0)
        assert isinstance(device, SharedDevice)
        runtime = celosia.Runtime(program, device)
        used = {result.counters[0].cycles for result in runtime.run_each(samples)}
        assert len(used) == bases and memory.free == buffers - 1 and memory.refused.is_set()
        runtime.close()
        assert memory.free == buffers


class Pages:
    """A board's memory with a limited number of buffers."""

    def __init__(self, count: int) -> None:
        self.free, self.refused = count, Event()

    def allocate(self, size: int) -> _Buffer:
        if not self.free:
            self.refused.set()
            raise MemoryError("none left")
        self.free -= 1
        return _Buffer(self, size)


class _Buffer:
    def __init__(self, pages: Pages, size: int) -> None:
        self.pages, self.data, self.physical_address = pages, np.zeros(size, np.uint8), pages.free << 20

    def flush(self, start: int, size: int) -> None: ...
    def invalidate(self, start: int, size: int) -> None: ...
    def free(self) -> None:
        self.pages.free += 1


# What goes wrong -------------------------------------------------------------------------------------------------


class Failing(FunctionalDevice):
    """A device whose runs fail after the first `since` runs."""

    runs = 0
    since = 0

    def run(self, instr_addr: int, count: int, timeout_cycles: int = 0, trace: bool = False) -> Counters:
        self.runs += 1
        if self.runs > self.since:
            raise DeviceError("no answer")
        return super().run(instr_addr, count, timeout_cycles, trace)


def told(results: Iterator[object]) -> list[str]:
    """Return the error of each sample, or ""."""
    errors = []
    while True:
        try:
            next(results)
            errors.append("")
        except StopIteration:
            return errors
        except (InputError, DeviceError) as error:
            errors.append(str(error))


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_wrong_sample_is_told_and_the_others_run(program: Program, samples: Arrays, in_flight: int) -> None:
    (name,) = samples[0]
    wrong = [*samples[:2], {name: np.zeros(3, np.float32)}, *samples[2:4], {"b": samples[0][name]}]
    found = told(celosia.Runtime(program).run_each(wrong, in_flight))
    assert [bool(each) for each in found] == [False, False, True, False, False, True]
    assert found[2].startswith(f"sample 2: input {name!r} must be") and found[5].startswith("sample 5: there is no")


def test_a_device_that_fails_is_left_out(program: Program, samples: Arrays) -> None:
    failing = Failing(TINY)
    results = celosia.Runtime(program, [failing, FunctionalDevice(TINY)]).run_each(samples)
    assert bytes_of(results) == one_by_one(program, samples)
    assert results.lost == ["device Failing is left out, for another one ran what failed there: no answer"]


def test_where_all_devices_fail_each_sample_is_told(program: Program, samples: Arrays) -> None:
    for devices in (Failing(TINY), [Failing(TINY), Failing(TINY)]):
        results = celosia.Runtime(program, devices).run_each(samples)
        assert told(results) == [f"sample {number}: no answer" for number in range(len(samples))]
        assert not results.lost


def test_samples_that_end_in_an_error(program: Program, samples: Arrays) -> None:
    def broken() -> Iterator[dict[str, np.ndarray]]:
        yield from samples[:2]
        raise OSError(5, "cannot be read")

    results = celosia.Runtime(program).run_each(broken())
    assert bytes_of(next(results) for _ in range(2)) == one_by_one(program, samples[:2])
    with pytest.raises(OSError, match="cannot be read"):
        next(results)
    assert list(results) == []


class Interrupting(FunctionalDevice):
    """A device whose run lasts until it is abandoned, and which sends Ctrl-C once."""

    pressed = threading.Lock()

    def run(self, instr_addr: int, count: int, timeout_cycles: int = 0, trace: bool = False) -> Counters:
        if self.pressed.acquire(blocking=False):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        pause, end = Event(), time.monotonic() + PATIENCE
        while not self.abandoned and time.monotonic() < end:
            pause.wait(0.001)
        raise DeviceError("abandoned")


def test_an_interrupt_ends_it(program: Program, samples: Arrays) -> None:
    device, before = Interrupting(TINY), lanes()
    results = celosia.Runtime(program, device).run_each(samples)
    with pytest.raises(KeyboardInterrupt):
        next(results)
    assert lanes() <= before and not device.abandoned and list(results) == []


def test_a_stream_that_is_left_ends(program: Program, samples: Arrays) -> None:
    runtime = celosia.Runtime(program)
    for result in (results := runtime.run_each(samples)):
        assert result.outputs
        break
    results.close()
    results.close()
    assert list(results) == []
    next(runtime.run_each(samples))  # and nobody has it any more
    assert bytes_of([runtime.run(samples[0])]) == one_by_one(program, samples[:1])


@pytest.mark.rtl
def test_a_long_run_of_the_rtl_is_abandoned(program: Program, samples: Arrays) -> None:
    from celosia.sim.rtl.rtlsim import RtlDevice

    device = RtlDevice(TINY, quiet=True)
    runtime = celosia.Runtime(program, device)
    device.abandoned = True
    with pytest.raises(DeviceError, match="nobody waits for the run"):
        runtime.run(samples[0])
    device.abandoned = False
    assert bytes_of([runtime.run(samples[0])]) == one_by_one(program, samples[:1])
