"""Run a Program step by step: inputs as numpy arrays to outputs, with counters and times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program import (
    BodySteps,
    CpuStep,
    HostStep,
    InputError,
    LaunchStep,
    Pack,
    Program,
    ProgramError,
    Step,
    Unpack,
)
from celosia.compiler.program.dtypes import numpy_dtype
from celosia.compiler.program.host.execute import execute
from celosia.compiler.program.host.kernel import new_output
from celosia.compiler.program.host.op import HostOp, RunnableBody
from celosia.compiler.program.host.thread_team import Stamps
from celosia.compiler.program.model import unpack_activation
from celosia.driver.run.interface import RuntimeBase
from celosia.driver.run.open_device import Devices, open_device, require_device
from celosia.driver.run.prepare import (
    arena_views,
    as_contiguous,
    fit_to_tensor,
    require_memory,
    to_stored_bytes,
    with_kernels,
)
from celosia.driver.run.resident import Changed, ResidentBuffers
from celosia.driver.run.run_report import build_report
from celosia.driver.run.run_result import Result, Tensors, Times
from celosia.driver.run.segment import Segment
from celosia.driver.run.stream import Futures, ResourceLocks, Sample, SampleStream
from celosia.sim.device import Counters, Device, DeviceError, SharedDevice

Array = NDArray[Any]
CYCLES_PER_INSTRUCTION = 200_000
"""Limit of a launch's cycles for each of its instructions, far above what any instruction takes."""


class ProgramRuntime(RuntimeBase):
    """Runtime of `program` on `device`, by name or any Device of the same Config; see celosia.Runtime.

    A device by name is opened when the first launch needs it; a program without launches never opens one. Of several
    devices, `others` holds a runtime of each further one; streams of samples use them all.
    Raises ThreadsError, and ProgramError where the CPU's part was compiled for another processor, or is machine code
    from a file that is not trusted (Program.load).
    """

    def __init__(
        self, program: Program, device: Devices = "functional", threads: int | None = None, **options: Any
    ) -> None:
        super().__init__(device, threads)
        self.program = program = with_kernels(program)
        self._launches = bool(program.launches)
        # Declared inputs by name.
        self._inputs_by_name = {tensor.name: tensor for tensor in program.inputs}
        # (name, dtype, shape) of the inputs that are tensors, for a fast check of each run.
        self._tensor_types = [
            (tensor.name, numpy_dtype(tensor.dtype), tensor.shape)
            for tensor in program.inputs if tensor.kind == "tensor"
        ]  # fmt: skip
        require_memory(program, self.threads)
        # Tensors in the memory that kernels share, which later steps and runs overwrite.
        self._arena = arena_views(program)
        # Tensors that each run computes into a new array, so that they are returned without a copy.
        self._unshared_names = {
            name for step in program.steps for name in _written_tensors(step) if _is_unshared(step, name, self._arena)
        }
        self._bodies: dict[int, Sequence[tuple[BodySteps, list[Step | Segment]]]] = {}
        """Subgraphs of steps, by the id of the step: each with its steps, successive kernels merged into Segments."""
        # Arrays with the same address in every run: constants and, after _group_steps, outputs of kernels in the arena.
        self._fixed_arrays = {name: as_contiguous(array) for name, array in program.constants.items()}
        size = max((kernel.workspace_for(self.threads) for kernel in program.kernels), default=0)
        self._workspace = np.empty(size + 64, np.uint8)
        self._steps = self._group_steps(program.steps)
        # (name, whether it needs no copy) of each returned tensor.
        self._returned = [
            (tensor.name, tensor.name in self._unshared_names) for tensor in (*program.outputs, *program.kept)
        ]
        self._outputs = [tensor.name for tensor in program.outputs]
        inner_bodies = [body for bodies in self._bodies.values() for body in bodies]
        actions = [*self._steps, *(step for _, steps in inner_bodies for step in steps)]
        host_reads = {name for step in actions if not isinstance(step, Segment) for name in _tensors_read(step)}
        host_reads |= {name for body, _ in inner_bodies for name in body.outputs}
        host_reads |= {name for name, _ in self._returned}
        # The fixed arrays that steps outside of segments read, or that are returned: the first values of a run.
        self._fixed_host_arrays = {name: array for name, array in self._fixed_arrays.items() if name in host_reads}
        self._device: Device | None = None
        self._resident = ResidentBuffers(program.config)
        self._name, self._options = "", options
        self.build_seconds = 0.0
        self.locks = ResourceLocks()
        own_device, *other_devices = self._devices
        if isinstance(own_device, str):
            self._name, self._open = own_device, self._opener(own_device)
        else:
            self.attach(own_device)
        self.others = [type(self)(program, device, self.threads, **options) for device in other_devices]
        for other in self.others:
            other.locks = ResourceLocks(self.locks.cpu)

    @property
    def names(self) -> list[str]:
        return list(self._inputs_by_name)

    def program_for(self, inputs: Mapping[str, Array]) -> Program:
        return self.program

    def attach(self, device: Device) -> None:
        """Use `device`, and write the Program's constants to its memory, also after another program has used it.

        DeviceError where the device has another Config.
        """
        if device.config.digest != self.program.config.digest:
            raise DeviceError(
                f"the program was compiled for Config {self.program.config.name} ({self.program.config.digest[:8]}), "
                f"the device has {device.config.name} ({device.config.digest[:8]}); compile it again with --config"
            )
        self._device, self._resident = device, ResidentBuffers(self.program.config)
        device.allocate(self.program.dram_size)
        device.write(self.program.image_address, self.program.image)

    def open(self) -> None:
        if self._device is None and self._launches:
            started = time.perf_counter()
            self.attach(self._open())
            self.build_seconds = time.perf_counter() - started
        for other in self.others:
            other.open()

    def _opener(self, name: str) -> Callable[[], Device]:
        """Return the function that opens the device of that name. ValueError where there is none."""
        require_device(name)
        return partial(open_device, name, self.program.config, **self._options)

    def __repr__(self) -> str:
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        program = self.program
        groups = program.inputs, program.outputs
        tensors = (", ".join(f"{tensor.name} {program.shape_text(tensor)}" for tensor in group) for group in groups)
        description = f"on {self._where}, Config {program.config.name}"
        return f"<Runtime of {program.name!r} {description}: {' -> '.join(tensors)}; {threads}>"

    def close(self) -> None:
        if self._device is not None:
            self._device.close()
        for other in self.others:
            other.close()

    def where(self) -> str:
        """Return the name of the device, for messages."""
        return f"device {self._name or type(self._device).__name__}"

    def shared(self) -> bool:
        """Return whether other runtimes may use the accelerator at the same time."""
        return isinstance(self._device, SharedDevice)

    def clone_shared(self) -> ProgramRuntime | None:
        """Return another runtime of the same accelerator, with tensors and device memory of its own.

        Runs of both may overlap; they take turns on the CPU and on the device. None without a device or memory for it.
        """
        if not isinstance(self._device, SharedDevice):
            return None
        with suppress(RuntimeError), ExitStack() as cleanup:  # no second process, or no memory
            device = cleanup.enter_context(closing(self._device.clone_shared()))
            clone = type(self)(self.program, device, self.threads)
            clone._name, clone.build_seconds, clone.locks = self._name, self.build_seconds, self.locks
            cleanup.pop_all()
            return clone
        return None

    def abandon(self, whether: bool) -> None:
        """Set whether the device's current run is abandoned: its result is not needed, so it may end with an error."""
        self._resident = ResidentBuffers(self.program.config)  # the next run may follow one of another lane
        if isinstance(self._device, SharedDevice):
            self._device.abandoned = whether

    def _futures(self, samples: Iterable[Sample], in_flight: int, trace: bool, lost: list[str]) -> Futures:
        """Yield a Future for each sample, for `run_each`: at most `in_flight` samples run at a time, on all devices.

        lost: gets a sentence for each device that failed and is left out.
        """
        self.open()
        runtimes = [self, *self.others] if self._launches else [self]
        yield from SampleStream(runtimes, in_flight, self._name_inputs, trace, lost).futures(samples)

    def run_batch(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if self.program.batched:
            return self.run(inputs, trace=False).outputs
        runs = {
            name: self._runs_of_batch(name, array) for name, array in inputs.items() if name in self._inputs_by_name
        }
        if not runs or len(set(runs.values())) > 1:
            runs_text = " and ".join(f"{count} for {name!r}" for name, count in runs.items())
            raise InputError(f"inputs need batches of one size, and have those of {runs_text or 'no'} runs")
        parts = {name: np.split(np.asarray(array), runs.get(name, 1)) for name, array in inputs.items()}
        samples = ({name: part[number] for name, part in parts.items()} for number in range(next(iter(runs.values()))))
        with closing(self.run_each(samples, trace=False)) as stream:
            results = [result.outputs for result in stream]
        return {name: np.concatenate([outputs[name] for outputs in results]) for name in results[0]}

    def _runs_of_batch(self, name: str, array: Array) -> int:
        """Return the number of runs that a batch takes. InputError where it is no multiple of the input's size."""
        shape, size = np.shape(array), (*self._inputs_by_name[name].shape, 0)[0]
        if not shape or size < 1 or shape[0] % size or not shape[0]:
            raise InputError(f"input {name!r} must be a batch of a multiple of {size}, not of shape {list(shape)}")
        return int(shape[0]) // size

    def run(self, inputs: Mapping[str, Array], keep: Callable[[str], bool] | None = None, trace: bool = True) -> Result:
        checked = self.check(inputs)
        with self._busy:
            if self.program.batched and self._sample_count(checked) != self.program.batch:
                return self._run_in_parts(checked, keep, trace)
            return self._execute_steps(checked, keep, trace)

    def run_on(self, inputs: Mapping[str, Array], changed: Changed | None) -> Result:
        """Run as `run` does, and write only the changed rows of caches (see `compile`) to the accelerator's memory.

        changed: by name of an input, the rows that differ from the run before; None where all may differ.
        """
        checked = self.check(inputs)
        with self._busy:
            return self._execute_steps(checked, None, False, changed)

    def _sample_count(self, checked: Mapping[str, Array]) -> int:
        """Return the number of samples in the inputs of a Program that takes a batch of any size."""
        return len(checked[self.program.batched[0]])

    def _run_in_parts(self, checked: dict[str, Array], keep: Callable[[str], bool] | None, trace: bool) -> Result:
        """Run a batch of any size in parts of as many samples as the Program takes at once.

        The last part is padded with copies of the last sample, or with zeros; their results are dropped.
        """
        batch, batched, samples = self.program.batch, self.program.batched, self._sample_count(checked)
        if keep is not None or self.program.kept:
            raise InputError(
                f"tensors inside the graph can be kept for {batch} samples at once, not for {samples}; give as many"
            )
        parts = []
        if not samples:
            padding = {name: np.zeros((1, *checked[name].shape[1:]), checked[name].dtype) for name in batched}
            checked = checked | padding
        for start in range(0, max(samples, 1), batch):
            numbers = np.minimum(np.arange(start, start + batch), max(samples, 1) - 1)
            sample_inputs = {name: array[numbers] if name in batched else array for name, array in checked.items()}
            parts.append(self._execute_steps(sample_inputs, None, trace))
        outputs = {
            tensor.name: np.concatenate([part.outputs[tensor.name] for part in parts])[:samples]
            for tensor in self.program.outputs
        }
        counters = [counters_of for part in parts for counters_of in part.counters]

        def times() -> Times:
            """Return the seconds of each phase, summed over the parts, and of each step of each part."""
            seconds = parts[0].seconds | {key: sum(part.seconds[key] for part in parts) for key in ("run", "cpu")}
            return seconds, [step_time for part in parts for step_time in part.step_seconds]

        return self._assemble_result(outputs, outputs, counters, times, len(parts))

    def _execute_steps(
        self, checked: dict[str, Array], keep: Callable[[str], bool] | None, trace: bool, changed: Changed | None = None
    ) -> Result:
        """Execute the steps of the Program in order, and return the outputs.

        keep: whether to return also the tensor of a name. Steps then run one by one, not as Segments. changed: see
        `run_on`.
        """
        if self._launches:
            if self._device is None:
                self.open()
            self._resident.begin(changed)
        started = time.perf_counter()
        values: dict[str, Array] = {**(self._fixed_host_arrays if keep is None else self._fixed_arrays), **checked}
        counters: list[Counters] = []
        available = {} if keep is None else {**self.program.constants, **checked}
        kept_tensors: dict[str, Array] = {
            name: value for name, value in available.items() if keep is not None and keep(name)
        }
        stamps: list[Stamps | float] = []
        for step in self._steps if keep is None else self.program.steps:
            if isinstance(step, Segment):
                with self.locks.cpu:
                    stamps.append(step.run(values))
                continue
            if isinstance(step, LaunchStep):
                before = time.perf_counter()
                counters.append(self._execute_launch(step, values, trace))
            else:
                with self.locks.cpu:
                    before = time.perf_counter()
                    self._execute_cpu_step(step, values)
            stamps.append(time.perf_counter() - before)
            if keep is not None:  # now, before the memory is used again
                kept_tensors |= {name: _copy_if_array(values[name]) for name in _written_tensors(step) if keep(name)}
        if self._launches:
            self._resident.end([pack for launch in self.program.launches for pack in launch.pack])
        returned = {
            name: values[name] if new_output else _copy_if_array(values[name]) for name, new_output in self._returned
        }
        outputs = {name: returned[name] for name in self._outputs} if self.program.kept else returned
        if kept_tensors:
            outputs = outputs | {name: value for name, value in kept_tensors.items() if name not in outputs}
        run_seconds = time.perf_counter() - started

        def times() -> Times:
            """Return the seconds of each phase, and of each step."""
            spent: list[float] = []
            for stamp in stamps:
                spent += stamp.seconds() if isinstance(stamp, Stamps) else [stamp]
            seconds = {"compile": self.program.compile_seconds, "build": self.build_seconds, "run": run_seconds}
            steps = zip(self.program.steps, spent)
            seconds["cpu"] = sum(step_time for step, step_time in steps if not isinstance(step, LaunchStep))
            return seconds, spent

        return self._assemble_result(outputs, returned, counters, times)

    def _assemble_result(
        self, outputs: dict[str, Array], tensors: dict[str, Array], counters: list[Counters],
        times: Callable[[], Times], parts: int = 1,
    ) -> Result:  # fmt: skip
        """Assemble the Result of a run of `parts` parts; its report is built when it is first read."""

        def report() -> dict[str, Any]:
            """Build the report of this run."""
            name, memory = self._name or self._where, None if self._device is None else self._device.memory_model
            return build_report(self.program, counters, times()[0], name, memory, parts)

        return Result(outputs, counters, report, Tensors(tensors), times, self.program, self.drawn)

    @staticmethod
    def drawn(result: Result) -> str:
        """Return the figures of a run in HTML, for notebooks; "" without them. `celosia.Runtime` overrides this."""
        return ""

    def check(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        # Fast path: arrays that have the right type and shape already.
        checked = {}
        for name, dtype, shape in self._tensor_types:
            if name not in inputs:
                break
            value = inputs[name]
            if type(value) is np.ndarray and value.dtype == dtype and value.shape == shape and value.flags.c_contiguous:
                checked[name] = value
        if len(checked) == len(self._inputs_by_name) == len(inputs):
            return checked  # the checks below would take longer than a small model
        declared = self._inputs_by_name
        for name in inputs:
            if name not in declared:
                names = ", ".join(map(repr, declared)) or "none"
                raise InputError(f"there is no input {name!r}; the inputs are {names}")
        for name, tensor in declared.items():
            if name not in inputs:
                raise InputError(f"input {name!r} is missing; it is {self.program.shape_text(tensor)}")
            if name in checked:
                continue
            value = inputs[name]
            if tensor.kind != "tensor":
                checked[name] = value
                continue
            batched = name in self.program.batched
            checked[name] = fit_to_tensor(tensor, value, self.program.shape_text(tensor), batched)
        samples = {name: len(checked[name]) for name in self.program.batched}
        if len(set(samples.values())) > 1:
            counted = " and ".join(f"{count} for {name!r}" for name, count in samples.items())
            raise InputError(f"inputs have different numbers of samples: {counted}; give as many of each")
        return checked

    def _group_steps(self, steps: Sequence[Step]) -> list[Step | Segment]:
        """Return the steps in order, with successive kernels merged into Segments, also those of subgraphs.

        Adds to `_fixed_arrays` the outputs of kernels that lie in the arena.
        """
        actions: list[Step | Segment] = []
        waiting: list[CpuStep] = []
        for step in steps:
            if isinstance(step, HostStep) and step.bodies:
                self._bodies[id(step)] = [(body, self._group_steps(body.steps)) for body in step.bodies]
            if isinstance(step, CpuStep):
                are_fixed = all(name in self._fixed_arrays for name in step.inputs)
                if step.kernel is not None or are_fixed:
                    self._fixed_arrays.update((name, self._arena[name]) for name in step.outputs if name in self._arena)
                if step.kernel is not None and self._is_in_place(step):
                    waiting.append(step)
                    continue
            actions += [*self._make_segment(waiting), step]
            waiting = []
        return [*actions, *self._make_segment(waiting)]

    def _is_in_place(self, step: CpuStep) -> bool:
        """Return whether each input that the kernel overwrites with an output has the output's address in every run.

        Only then can the kernel be in a Segment, which copies nothing.
        """
        assert step.kernel is not None
        inputs = [name for name in step.inputs if name]
        pairs = [
            (inputs[number], step.outputs[output]) for output, number in self.program.kernels[step.kernel].in_place
        ]
        arrays = [[self._fixed_arrays.get(name) for name in pair] for pair in pairs]
        return all(a is not None and b is not None and a.ctypes.data == b.ctypes.data for a, b in arrays)

    def _make_segment(self, steps: list[CpuStep]) -> list[Segment]:
        """Return a list with the Segment of successive kernels; an empty list without steps."""
        if not steps:
            return []
        checked = {
            name: (dtype, shape) for name, dtype, shape in self._tensor_types if name not in self.program.batched
        }
        return [Segment(self.program, steps, self._fixed_arrays, checked, self._workspace, self.threads)]

    def _execute_cpu_step(self, step: CpuStep | HostStep, values: dict[str, Array]) -> None:
        """Execute a step on the CPU: a host function, a reshape or a kernel. Add its outputs to `values`."""
        arena = self._arena
        if isinstance(step, HostStep):  # its outputs may be views of its inputs, which later runs must not overwrite
            read = step.op.inputs if step.bodies else step.inputs  # a subgraph returns nothing that is in the arena
            copies = {name: values[name].copy() for name in read if name in arena}
            compiled = {
                body.attribute: RunnableBody(partial(self._run_body, body, actions, values), body.types)
                for body, actions in self._bodies.get(id(step), ())
            }
            results = dict(
                zip(step.outputs, execute(step.op, {**values, **copies} if copies else values, compiled=compiled))
            )
            for name, value in results.items():
                self._require_declared(step.op, name, value)
            values.update(results)
            return
        if step.kernel is None:  # a reshape
            output = step.outputs[0]
            values[output] = values[step.inputs[0]].reshape(self.program.tensors[output].shape)
            return
        kernel = self.program.kernels[step.kernel]
        outputs = [
            arena[name] if name in arena else new_output(numpy_dtype(dtype), shape)
            for name, (dtype, shape) in zip(step.outputs, kernel.outputs)
        ]
        kernel.run([values[name] for name in step.inputs if name], outputs, self.threads)
        values.update(zip(step.outputs, outputs))

    def _run_body(
        self, body: BodySteps, actions: Sequence[Step | Segment], values: dict[str, Array], inputs: Sequence[Any]
    ) -> list[Any]:
        """Run the steps of a subgraph, whose tensors are added to `values`, and return its outputs."""
        values.update(zip(body.inputs, inputs))
        for action in actions:
            if isinstance(action, Segment):
                action.run(values)
            elif not isinstance(action, LaunchStep):  # the accelerator runs none of a subgraph
                self._execute_cpu_step(action, values)
        return [values[name] for name in body.outputs]

    def _require_declared(self, op: HostOp, name: str, value: Any) -> None:
        """Raise HostError where an output lacks the shape and type that the model declares, as later kernels expect."""
        info = self.program.tensors.get(name)
        if info is None or not isinstance(value, np.ndarray):
            return
        if value.shape != info.shape or value.dtype.name != info.dtype:
            raise op.fail(
                f"output {name!r} is {value.dtype}{list(value.shape)}, not {info.dtype}{list(info.shape)} as the model "
                "declares it"
            )

    def _execute_launch(self, step: LaunchStep, values: dict[str, Array], trace: bool) -> Counters:
        """Execute a launch: write its inputs to the device, run the accelerator, and add its outputs to `values`."""
        device = self._device
        assert device is not None
        for pack in step.pack:
            try:
                for address, data in self._pack_input(pack, values[pack.value]):
                    device.write(address, data)
            except ValueError as error:
                raise ProgramError(f"the program is damaged: tensor {pack.value!r}: {error}") from None
        with self.locks.device:
            counters = device.run(step.address, step.count, CYCLES_PER_INSTRUCTION * (step.count + 1), trace=trace)
        for unpack in step.unpack:
            try:
                values[unpack.value] = self._unpack_output(device, unpack)
            except ValueError as error:
                raise ProgramError(f"the program is damaged: tensor {unpack.value!r}: {error}") from None
        return counters

    def _pack_input(self, pack: Pack, array: Array) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield the addresses and the bytes to write to the device for an input of a launch."""
        cache_rows = self._inputs_by_name[pack.cache].shape[-2] if pack.cache else 0
        return self._resident.writes(pack, to_stored_bytes(array), cache_rows)

    def _unpack_output(self, device: Device, unpack: Unpack) -> Array:
        """Read an output of a launch from the device, and convert it to the host's layout and codes."""
        cfg, info = self.program.config, self.program.tensors[unpack.value]
        images, _, height, width = unpack.form.dims
        size = -(-images // cfg.batch) * unpack.groups * height * width * cfg.piece_bytes
        data = device.read(unpack.address, size)
        values = unpack_activation(cfg, data, unpack.form.dims, unpack.groups, unpack.offset)
        array = unpack.form.restore(values, info.shape)
        array = array if info.dtype == "int8" else (array.view(np.uint8) ^ 0x80)
        if unpack.value in self._arena:
            self._arena[unpack.value][...] = array
            return self._arena[unpack.value]
        return array


def _tensors_read(step: Step) -> tuple[str, ...]:
    """Return the names of the tensors that the host reads for a step."""
    if isinstance(step, LaunchStep):
        return tuple(pack.value for pack in step.pack)
    return step.inputs


def _written_tensors(step: Step) -> tuple[str, ...]:
    """Return the names of the tensors that a step leaves on the host."""
    return tuple(unpack.value for unpack in step.unpack) if isinstance(step, LaunchStep) else step.outputs


def _is_unshared(step: Step, name: str, arena: Mapping[str, Array]) -> bool:
    """Return whether a run computes the tensor into a new array, to which nothing else refers."""
    return name not in arena and (
        isinstance(step, LaunchStep) or (isinstance(step, CpuStep) and step.kernel is not None)
    )


def _copy_if_array(value: Any) -> Any:
    """Return a copy of an array; other values, such as lists, as they are."""
    return value.copy() if isinstance(value, np.ndarray) else value
