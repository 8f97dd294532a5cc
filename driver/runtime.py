"""Running a Program: numpy in, numpy out, and a report of where the time went."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.cpu.runtime.compiler import links_kernels
from celosia.compiler.cpu.runtime.host import execute
from celosia.compiler.cpu.runtime.kernel import Kernel, fresh, host, load_library
from celosia.compiler.cpu.runtime.op import HostError, HostOp, bodies, check_size
from celosia.compiler.cpu.runtime.team import Stamps
from celosia.compiler.cpu.runtime.threads import default_threads, thread_count
from celosia.compiler.dtypes import itemsize, numpy_dtype
from celosia.compiler.files import reading
from celosia.compiler.program import (
    CpuStep,
    HostStep,
    InputError,
    LaunchStep,
    Pack,
    Program,
    ProgramError,
    Step,
    TensorInfo,
    Unpack,
)
from celosia.compiler.tensorize.pack import activation, unpack_activation
from celosia.driver.devices import open_device, require_device, require_tools
from celosia.driver.explain import layer_rows
from celosia.driver.result import Result, Tensors, Times
from celosia.driver.segment import Segment
from celosia.hw.config import Config
from celosia.sim.device import Counters, Device, DeviceError

if TYPE_CHECKING:
    from onnx import ModelProto

    from celosia.driver.specialise import Specialised

Array = NDArray[Any]
CYCLES_PER_INSTRUCTION = 200_000
"""The bound on a launch's cycles, for each instruction: far above what any instruction takes."""


class Runtime:
    """Runs `program` on `device`: "functional", "timed", "rtl", "board", or any Device of the same Config.

    >>> import celosia, numpy as np
    >>> program = celosia.compile(celosia.models.demo_model_path(), "tiny")
    >>> with celosia.Runtime(program, "timed") as runtime:
    ...     result = runtime.run({"image": np.zeros((1, 1, 32, 32), np.float32)})
    >>> result.outputs["logits"].shape, result.report["layers"][0]["bound"]
    ((1, 10), 'gemm')

    program: a Program, or an ONNX model (a ModelProto), or the path of either. A model is compiled for `config` and for
    the shapes of the inputs, when they come for the first time; the Programs of the last 16 shapes are kept.
    compiling: other arguments of `celosia.compile`, as {"check": False}, or {"shapes": {"image": (8, 3, 224, 224)}} to
    compute eight samples at once.

    A device by name is opened when the first launch needs it; a program without launches never opens one.
    threads: how many the CPU's part may use at once; left out, the environment variable CELOSIA_THREADS says so, else
    there is one for each processor, at most 8. Results do not depend on it. Raises ThreadsError for an impossible
    number, and ProgramError where the CPU's part was compiled for another processor, or is machine code from a file
    that is not trusted (Program.load).
    """

    def __init__(
        self, program: Program | str | Path | ModelProto, device: str | Device = "functional",
        threads: int | None = None, *, config: str | Path | Config = "pynq",
        compiling: Mapping[str, Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.threads = default_threads() if threads is None else thread_count(threads)
        self._where = device if isinstance(device, str) else type(device).__name__
        self._specialised: Specialised[Runtime] | None = None
        self._latest: Runtime | None = None
        self._busy = Lock()  # the arena, and the device, hold the tensors of one run
        if isinstance(program, (str, Path)) and Path(program).is_file() and Program.is_program(program):
            program = Program.load(program)
        if not isinstance(program, Program):
            self._specialise(program, device, config, compiling or {}, options)
            return
        self.program = program = _with_kernels(program)
        self._launches = bool(program.launches)
        self._known = {tensor.name: tensor for tensor in program.inputs}
        self._kinds = {
            name: (numpy_dtype(tensor.dtype), tensor.shape) for name, tensor in self._known.items()
            if tensor.kind == "tensor"
        }  # fmt: skip
        _require_memory(program, self.threads)
        self._arena = _views(program)
        self._fresh = {name for step in program.steps for name in _made(step) if _is_fresh(step, name, self._arena)}
        self._fixed = {name: _in_order(array) for name, array in program.constants.items()}
        self._steps = self._actions()
        self._returned = [(tensor.name, tensor.name in self._fresh) for tensor in (*program.outputs, *program.kept)]
        wanted = {name for step in self._steps if not isinstance(step, Segment) for name in _read(step)}
        wanted |= {name for name, _ in self._returned}
        self._seen = {name: array for name, array in self._fixed.items() if name in wanted}
        self._device: Device | None = None
        self._name, self._options = "", options
        self.build_seconds = 0.0
        if isinstance(device, str):
            require_device(device)
            self._name = device
        else:
            self._attach(device)

    def _specialise(
        self, model: str | Path | ModelProto, device: str | Device, config: str | Path | Config,
        compiling: Mapping[str, Any], options: dict[str, Any],
    ) -> None:  # fmt: skip
        """Become the Runtime of a model: one Runtime for each Program of it."""
        from celosia.driver.specialise import Specialised  # with the compiler, which a board has not

        if isinstance(device, str):
            require_tools(device, model)
        else:
            config = device.config
        self._specialised = Specialised(
            model, {"config": config, **compiling}, lambda program: Runtime(program, device, self.threads, **options)
        )

    def _for(self, runtime: Runtime) -> Runtime:
        """`runtime`, whose Program lies in the memory of the device, where all have the same one."""
        if runtime is not self._latest and not runtime._name and runtime._device is not None:
            runtime._attach(runtime._device)
        self._latest = runtime
        return runtime

    def program_for(self, inputs: Mapping[str, Array]) -> Program:
        """The Program that runs inputs of these shapes; of a model, it is compiled now where it was not yet."""
        return self.program if self._specialised is None else self._specialised.runtime(inputs).program

    def _attach(self, device: Device) -> None:
        if device.config.digest != self.program.config.digest:
            raise DeviceError(
                f"the program was compiled for Config {self.program.config.name} ({self.program.config.digest[:8]}), "
                f"the device has {device.config.name} ({device.config.digest[:8]}); compile it again with --config"
            )
        self._device = device
        device.allocate(self.program.dram_size)
        device.write(self.program.image_address, self.program.image)

    def open(self) -> None:
        """Open the device now, if the program has launches: the first time, the RTL simulator is built here."""
        if self._specialised is None and self._device is None and self._launches:
            started = time.perf_counter()
            self._attach(open_device(self._name, self.program.config, **self._options))
            self.build_seconds = time.perf_counter() - started

    def __repr__(self) -> str:
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        if self._specialised is not None:
            name, config = self._specialised.model.name, self._specialised.compiling["config"]
            known = f"compiled for {self._specialised.ready} shapes so far, {threads}"
            return (
                f"<Runtime of the model {name!r} on {self._where}, Config {getattr(config, 'name', config)}: {known}>"
            )
        program = self.program
        groups = program.inputs, program.outputs
        tensors = (", ".join(f"{tensor.name} {program.shape_text(tensor)}" for tensor in group) for group in groups)
        where = f"on {self._where}, Config {program.config.name}"
        return f"<Runtime of {program.name!r} {where}: {' -> '.join(tensors)}; {threads}>"

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the device; `with Runtime(...) as runtime` does so at its end."""
        if self._specialised is not None:
            self._specialised.close()
        elif self._device is not None:
            self._device.close()

    def __call__(self, *arrays: Array) -> Array | tuple[Array, ...]:
        """The output of a run, or all of them where there are several; arrays in the order of the program's inputs.

        InputError where there are not as many, or one has another shape or type.

        >>> import celosia, numpy as np
        >>> with celosia.Runtime(celosia.compile(celosia.models.demo_model_path(), "tiny")) as runtime:
        ...     runtime(np.zeros((1, 1, 32, 32), np.float32)).shape
        (1, 10)
        """
        names = self._names
        if len(arrays) != len(names):
            raise InputError(f"there are {len(names)} inputs, {', '.join(names) or 'none'}, and {len(arrays)} arrays")
        made = tuple(self.run(dict(zip(names, arrays)), trace=False).outputs.values())
        return made[0] if len(made) == 1 else made

    @property
    def _names(self) -> list[str]:
        """Of the inputs, in their order."""
        return list(self._known) if self._specialised is None else self._specialised.model.inputs

    def run_each(self, samples: Iterable[Mapping[str, Array] | Array]) -> Iterator[Result]:
        """Run once for each of `samples`, when the result is asked for: inputs by name, or the array of the only input.

        >>> import celosia
        >>> images, labels, classes = celosia.models.demo_images()
        >>> runtime = celosia.Runtime(celosia.compile(celosia.models.demo_model_path(), "tiny"))
        >>> [classes[result.outputs["logits"].argmax()] for result in runtime.run_each(images[:2, None])]
        ['Ankle boot', 'Pullover']
        """
        names = self._names
        for sample in samples:
            if not isinstance(sample, Mapping):
                if len(names) != 1:
                    raise InputError(f"there are {len(names)} inputs; give each sample as a dictionary by their names")
                sample = {names[0]: sample}
            yield self.run(sample)

    def run_batch(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs of a batch of any size, joined along their first axis.

        inputs: arrays whose first axis counts samples; each run takes as many as the Program's inputs have there. Where
        that size is open, `run` does the same. InputError where it does not divide the batch, or inputs have batches of
        different sizes.

        >>> import celosia
        >>> images, labels, classes = celosia.models.demo_images()
        >>> runtime = celosia.Runtime(celosia.compile(celosia.models.demo_model_path(), "tiny"))
        >>> runtime.run_batch({"image": images[:5]})["logits"].shape
        (5, 10)
        """
        if self._specialised is not None or self.program.batched:
            return self.run(inputs, trace=False).outputs
        runs = {name: self._runs(name, array) for name, array in inputs.items() if name in self._known}
        if not runs or len(set(runs.values())) > 1:
            told = " and ".join(f"{count} for {name!r}" for name, count in runs.items())
            raise InputError(f"inputs need batches of one size, and have those of {told or 'no'} runs")
        parts = {name: np.split(np.asarray(array), runs.get(name, 1)) for name, array in inputs.items()}
        results = [
            self.run({name: part[number] for name, part in parts.items()}, trace=False).outputs
            for number in range(next(iter(runs.values())))
        ]
        return {name: np.concatenate([outputs[name] for outputs in results]) for name in results[0]}

    def _runs(self, name: str, array: Array) -> int:
        """Runs that a batch takes."""
        shape, size = np.shape(array), (*self._known[name].shape, 0)[0]
        if not shape or size < 1 or shape[0] % size or not shape[0]:
            raise InputError(f"input {name!r} must be a batch of a multiple of {size}, not of shape {list(shape)}")
        return int(shape[0]) // size

    def run(self, inputs: Mapping[str, Array], keep: Callable[[str], bool] | None = None, trace: bool = True) -> Result:
        """Run once.

        inputs: one array for each input, of its exact type and shape. keep: tensors inside the graph whose values are
        returned as outputs, too, where the host sees them. trace: note the time of each instruction, from which the
        report knows the cycles of each layer. Raises InputError and DeviceError.

        `Result.tensors` has the outputs and, where the Program was compiled with `keep`, tensors inside it.

        The report is plain data: cycles, utilization (macs_accelerator / cycles / MACs per cycle) and all times of
        units are None on devices without a clock; what it says of layers is in driver/explain.py.
        """
        if self._specialised is not None:
            with self._busy:
                return self._for(self._specialised.runtime(inputs)).run(inputs, keep, trace)
        checked = self.check(inputs)
        with self._busy:
            if self.program.batched and self._samples(checked) != self.program.batch:
                return self._in_parts(checked, keep, trace)
            return self._run(checked, keep, trace)

    def _samples(self, checked: Mapping[str, Array]) -> int:
        return len(checked[self.program.batched[0]])

    def _in_parts(self, checked: dict[str, Array], keep: Callable[[str], bool] | None, trace: bool) -> Result:
        """Run a batch of any size: as many samples as the Program takes at once, and again.

        What the last part lacks is a sample of it again, or zeros where there is none, of which nothing is returned.
        """
        batch, batched, samples = self.program.batch, self.program.batched, self._samples(checked)
        if keep is not None or self.program.kept:
            raise InputError(
                f"tensors inside the graph can be kept for {batch} samples at once, not for {samples}; give as many"
            )
        parts = []
        if not samples:
            made = {name: np.zeros((1, *checked[name].shape[1:]), checked[name].dtype) for name in batched}
            checked = checked | made
        for start in range(0, max(samples, 1), batch):
            places = np.minimum(np.arange(start, start + batch), max(samples, 1) - 1)
            own = {name: array[places] if name in batched else array for name, array in checked.items()}
            parts.append(self._run(own, None, trace))
        outputs = {
            tensor.name: np.concatenate([part.outputs[tensor.name] for part in parts])[:samples]
            for tensor in self.program.outputs
        }
        counters = [each for part in parts for each in part.counters]

        def times() -> Times:
            seconds = parts[0].seconds | {what: sum(part.seconds[what] for part in parts) for what in ("run", "cpu")}
            return seconds, [each for part in parts for each in part.step_seconds]

        return Result(outputs, counters, self._reporting(counters, times, len(parts)), Tensors(outputs), times,
                      self.program)  # fmt: skip

    def _run(self, checked: dict[str, Array], keep: Callable[[str], bool] | None, trace: bool) -> Result:
        if self._device is None and self._launches:
            self.open()
        started = time.perf_counter()
        values: dict[str, Array] = {**(self._seen if keep is None else self._fixed), **checked}
        counters: list[Counters] = []
        given = {} if keep is None else {**self.program.constants, **checked}
        kept: dict[str, Array] = {name: value for name, value in given.items() if keep is not None and keep(name)}
        stamps: list[Stamps | float] = []
        for step in self._steps if keep is None else self.program.steps:
            if isinstance(step, Segment):
                stamps.append(step.run(values))
                continue
            before = time.perf_counter()
            if isinstance(step, LaunchStep):
                counters.append(self._launch(step, values, trace))
            else:
                self._cpu(step, values)
            stamps.append(time.perf_counter() - before)
            if keep is not None:  # now, before the memory is used again
                kept |= {name: _own(values[name]) for name in _made(step) if keep(name)}
        returned = {name: values[name] if fresh else _own(values[name]) for name, fresh in self._returned}
        outputs = {tensor.name: returned[tensor.name] for tensor in self.program.outputs}
        if kept:
            outputs |= {name: value for name, value in kept.items() if name not in outputs}
        run_seconds = time.perf_counter() - started

        def times() -> Times:
            spent = [each for some in stamps for each in (some.seconds() if isinstance(some, Stamps) else [some])]
            seconds = {"compile": self.program.compile_seconds, "build": self.build_seconds, "run": run_seconds}
            steps = zip(self.program.steps, spent)
            seconds["cpu"] = sum(each for step, each in steps if not isinstance(step, LaunchStep))
            return seconds, spent

        return Result(outputs, counters, self._reporting(counters, times), Tensors(returned), times, self.program)

    def _reporting(
        self, counters: list[Counters], times: Callable[[], Times], parts: int = 1
    ) -> Callable[[], dict[str, Any]]:
        return lambda: self._report(counters, times()[0], parts)

    def check(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """The inputs as the program takes them. InputError where a name, type or shape is wrong."""
        if self._specialised is not None:
            return self._specialised.runtime(inputs).check(inputs)
        known = self._known
        for name in inputs:
            if name not in known:
                raise InputError(f"there is no input {name!r}; the inputs are {', '.join(map(repr, known)) or 'none'}")
        checked = {}
        for name, tensor in known.items():
            if name not in inputs:
                raise InputError(f"input {name!r} is missing; it is {self.program.shape_text(tensor)}")
            given = inputs[name]
            if (
                type(given) is np.ndarray
                and given.flags.c_contiguous
                and (given.dtype, given.shape) == self._kinds.get(name)
            ):
                checked[name] = given
                continue
            if tensor.kind != "tensor":
                checked[name] = given
                continue
            batched = name in self.program.batched
            checked[name] = fitted(tensor, given, self.program.shape_text(tensor), batched)
        samples = {name: len(checked[name]) for name in self.program.batched}
        if len(set(samples.values())) > 1:
            counted = " and ".join(f"{count} for {name!r}" for name, count in samples.items())
            raise InputError(f"inputs have different numbers of samples: {counted}; give as many of each")
        return checked

    def _actions(self) -> list[Step | Segment]:
        """The steps in order, kernels that follow each other being one action. Adds to `_fixed` what lies in the same
        place in every run: constants, and what kernels leave in the arena.
        """
        size = max((kernel.workspace_for(self.threads) for kernel in self.program.kernels), default=0)
        self._workspace = np.empty(size + 64, np.uint8)
        actions: list[Step | Segment] = []
        waiting: list[CpuStep] = []
        for step in self.program.steps:
            if isinstance(step, CpuStep):
                known = all(name in self._fixed for name in step.inputs)
                if step.kernel is not None or known:
                    self._fixed.update((name, self._arena[name]) for name in step.outputs if name in self._arena)
                if step.kernel is not None and self._in_place(step):
                    waiting.append(step)
                    continue
            actions += [*self._segment(waiting), step]
            waiting = []
        return [*actions, *self._segment(waiting)]

    def _in_place(self, step: CpuStep) -> bool:
        """Whether each input that the kernel reads from the memory of an output lies there in every run."""
        assert step.kernel is not None
        inputs = [name for name in step.inputs if name]
        pairs = [(inputs[number], step.outputs[out]) for out, number in self.program.kernels[step.kernel].in_place]
        places = [[self._fixed.get(name) for name in pair] for pair in pairs]
        return all(a is not None and b is not None and a.ctypes.data == b.ctypes.data for a, b in places)

    def _segment(self, steps: list[CpuStep]) -> list[Segment]:
        if not steps:
            return []
        return [Segment(self.program, steps, self._fixed, self._workspace, self.threads)]

    def _cpu(self, step: CpuStep | HostStep, values: dict[str, Array]) -> None:
        arena = self._arena
        if isinstance(step, HostStep):  # its outputs may be its inputs, or parts of them
            copies = {name: values[name].copy() for name in step.inputs if name in arena}
            made = dict(zip(step.outputs, execute(step.op, {**values, **copies} if copies else values)))
            for name, value in made.items():
                self._require_declared(step.op, name, value)
            values.update(made)
            return
        if step.kernel is None:
            output = step.outputs[0]
            values[output] = values[step.inputs[0]].reshape(self.program.tensors[output].shape)
            return
        kernel = self.program.kernels[step.kernel]
        outputs = [
            arena[name] if name in arena else fresh(numpy_dtype(dtype), shape)
            for name, (dtype, shape) in zip(step.outputs, kernel.outputs)
        ]
        kernel.run([values[name] for name in step.inputs if name], outputs, self.threads)
        values.update(zip(step.outputs, outputs))

    def _require_declared(self, op: HostOp, name: str, value: Any) -> None:
        """HostError where an output is not of the shape and type that the model declares and kernels were made for."""
        info = self.program.tensors.get(name)
        if info is None or not isinstance(value, np.ndarray):
            return
        if value.shape != info.shape or value.dtype.name != info.dtype:
            raise op.fail(
                f"output {name!r} is {value.dtype}{list(value.shape)}, not {info.dtype}{list(info.shape)} as the model "
                "declares it"
            )

    def _launch(self, step: LaunchStep, values: dict[str, Array], trace: bool) -> Counters:
        device = self._device
        assert device is not None
        for pack in step.pack:
            try:
                device.write(pack.address, self._packed(pack, values[pack.value]))
            except ValueError as error:
                raise ProgramError(f"the program is damaged: tensor {pack.value!r}: {error}") from None
        counters = device.run(step.address, step.count, CYCLES_PER_INSTRUCTION * (step.count + 1), trace=trace)
        for unpack in step.unpack:
            try:
                values[unpack.value] = self._unpacked(device, unpack)
            except ValueError as error:
                raise ProgramError(f"the program is damaged: tensor {unpack.value!r}: {error}") from None
        return counters

    def _packed(self, pack: Pack, array: Array) -> NDArray[np.uint8]:
        return activation(self.program.config, pack.form.arrange(_stored(array)), pack.groups)

    def _unpacked(self, device: Device, unpack: Unpack) -> Array:
        cfg, info = self.program.config, self.program.tensors[unpack.value]
        images, _, height, width = unpack.dims
        size = -(-images // cfg.batch) * unpack.groups * height * width * cfg.piece_bytes
        data = device.read(unpack.address, size)
        array = unpack_activation(cfg, data, unpack.dims, unpack.groups, unpack.offset).reshape(info.shape)
        array = array if info.dtype == "int8" else (array.view(np.uint8) ^ 0x80)
        if unpack.value in self._arena:
            self._arena[unpack.value][...] = array
            return self._arena[unpack.value]
        return array

    # Report ----------------------------------------------------------------------------------------------------

    def _report(self, counters: list[Counters], seconds: dict[str, float], parts: int = 1) -> dict[str, Any]:
        """parts: how many times the Program ran, each time with counters for all its launches."""
        program = self.program
        timed = [c for c in counters if c.cycles is not None]
        cycles = sum(c.cycles or 0 for c in timed) if timed else None
        units: dict[str, dict[str, int | None]] = {}
        for unit in ("load", "gemm", "vector", "store"):
            units[unit] = {
                what: sum(c.values[f"{unit}_{what}"] for c in timed) if timed else None
                for what in ("busy", "wait_token", "wait_memory")
            }
        return {
            "model": program.name,
            "device": self._name or type(self._device).__name__,
            "cycles": cycles,
            "memory_model": self._device.memory_model if self._device is not None and timed else None,
            "config": program.config.to_dict(),
            "macs_total": parts * program.macs_total,
            "macs_accelerator": parts * program.macs_accelerator,
            "utilization": _ratio(parts * program.macs_accelerator, cycles, program),
            "launches": len(counters),
            "cpu_nodes": [
                {"name": node.name, "op": node.op, "reason": node.reason}
                for step in program.steps if not isinstance(step, LaunchStep) for node in step.nodes
            ],
            "saved_traffic": sum(step.saved_bytes for step in program.steps if isinstance(step, CpuStep)),
            "arena": {"bytes": program.arena.size, "lower_bound": program.arena.lower_bound},
            "layers": layer_rows(program, counters),
            "units": units,
            "seconds": seconds,
        }  # fmt: skip


def fitted(tensor: TensorInfo, given: Any, what: str, batched: bool = False) -> Array:
    """`given` as an array in order, of this machine's byte order. InputError where it is not what `tensor` says.

    what: its type and shape, for people. batched: its first axis counts any number of samples.
    """
    array = np.asarray(given)
    wanted = (-1, *tensor.shape[1:]) if batched else tensor.shape
    same = array.ndim == len(wanted) and all(w in (n, -1) for n, w in zip(array.shape, wanted))
    if array.dtype.name != tensor.dtype or not same:
        raise InputError(f"input {tensor.name!r} must be {what}, not {array.dtype}{list(array.shape)}")
    return np.asarray(array, array.dtype.newbyteorder("="), order="C")


def _with_kernels(program: Program) -> Program:
    """The Program with kernels that run here: compiled of their loops, or those of its shared object where it is
    trusted. ProgramError."""
    if not program.machine:
        if all(kernel.code and kernel.host == host() for kernel in program.kernels):
            return program
        return replace(program, kernels=_compiled(program))
    if platform.machine() != program.machine:
        raise ProgramError(
            f"the program was compiled for {program.machine} processors, and this one is {platform.machine()}; run it "
            "on its board (--device ssh://USER@BOARD), or here with --rebuild-kernels, which compiles its kernels again"
        )
    if program.kernels and not program.trusted:
        raise ProgramError(
            "the program has machine code, which may do anything with your rights; where you know who made it, give "
            "--trust, or --digest with its SHA-256 (Program.load takes trust and digest); --rebuild-kernels compiles "
            "its kernels here, of loops that are checked"
        )
    if program.kernels:
        try:
            library = load_library(program.library)
            for kernel in program.kernels:
                kernel.bind(library)
        except (OSError, AttributeError) as error:
            raise ProgramError(f"the program's kernels cannot be loaded: {error}") from None
    return program


def _require_memory(program: Program, threads: int) -> None:
    """ProgramError where what a run takes in any case is more than this machine has."""
    workspace = max((kernel.workspace_for(threads) for kernel in program.kernels), default=0)
    constants = sum(array.nbytes for array in program.constants.values())
    tensors = (*program.inputs, *program.outputs, *program.kept)
    given = sum(prod(t.shape) * itemsize(t.dtype) for t in tensors if t.kind == "tensor" and -1 not in t.shape)
    try:
        dram = program.dram_size if program.launches else 0
        check_size(program.arena.size + constants + workspace + given + dram, f"a run of Program {program.name!r}")
    except HostError as error:
        raise ProgramError(str(error)) from None


def _compiled(program: Program) -> list[Kernel]:
    llvm = links_kernels()
    if llvm is None:
        raise ProgramError(
            "the program's kernels are compiled where they run, and here is no LLVM: install llvmlite, or compile the "
            "model with --target for this machine"
        )
    made = []
    for number, kernel in enumerate(program.kernels):
        with reading(f"kernel {number}", ProgramError, "of the program cannot be compiled of its loops"):
            made.append(llvm.from_loops(kernel, program.trusted))
    return made


def _views(program: Program) -> dict[str, Array]:
    """The tensors of the arena, as arrays in its memory."""
    memory = np.empty(program.arena.size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    found = {}
    for name, offset in program.arena.offsets.items():
        info = program.tensors[name]
        found[name] = np.ndarray(info.shape, numpy_dtype(info.dtype), memory.data, start + offset)
    return found


def _read(step: Step) -> tuple[str, ...]:
    """Names of the tensors that the host reads for the step."""
    if isinstance(step, LaunchStep):
        return tuple(pack.value for pack in step.pack)
    captured = (name for body in bodies(step.op) for name in body.captured) if isinstance(step, HostStep) else ()
    return *step.inputs, *captured


def _made(step: Step) -> tuple[str, ...]:
    """Names of the tensors that the host has after the step."""
    return tuple(unpack.value for unpack in step.unpack) if isinstance(step, LaunchStep) else step.outputs


def _is_fresh(step: Step, name: str, arena: Mapping[str, Array]) -> bool:
    """Whether a run puts the tensor into an array that nothing else knows."""
    return name not in arena and (
        isinstance(step, LaunchStep) or (isinstance(step, CpuStep) and step.kernel is not None)
    )


def _in_order(value: Any) -> Any:
    return np.asarray(value, order="C") if isinstance(value, np.ndarray) else value


def _own(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _stored(array: Array) -> NDArray[np.int8]:
    """Bytes as the accelerator stores them: uint8 with its top bit flipped."""
    return (array ^ 0x80).view(np.int8) if array.dtype == np.uint8 else array


def _ratio(macs: int, cycles: int | None, program: Program) -> float | None:
    return macs / cycles / program.config.macs_per_cycle if cycles else None
