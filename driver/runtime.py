"""celosia.Runtime: run Programs, and models that are compiled when the shapes of their inputs are known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

import celosia.compiler.cpu  # noqa: F401  # provides what links kernels
from celosia.compiler.program import Program
from celosia.driver.run.interface import RuntimeBase
from celosia.driver.run.open_device import Devices
from celosia.driver.run.program_runtime import ProgramRuntime
from celosia.driver.run.run_result import Result
from celosia.driver.run.stream import Futures, Sample, failed_future
from celosia.driver.workstation.tools import require_tools
from celosia.hw.spec.config import Config
from celosia.sim.device import Device
from celosia.sim.devices import SSH_PREFIX

if TYPE_CHECKING:
    from onnx import ModelProto

Array = NDArray[Any]


class Runtime(RuntimeBase):
    """Run a Program, or a model that is compiled when the shapes of its inputs are known, on one or several devices.

    A device by name is opened when the first launch needs it; a Program without launches never opens one. Use the
    Runtime in a `with` statement, which closes the device. Call it with arrays to get the outputs alone.

    Args:
        program: A Program, an ONNX model (a ModelProto), or the path of either. A model is compiled for `config` and
            for the shapes of the inputs when these first occur. The Programs of the last 16 shapes are kept.
        device: "functional", "timed", "rtl", "board", "ssh://USER@BOARD", or any Device of the same Config. Several
            devices, as "board,rtl" or in a list, share the samples of `run_each` and `run_batch`. The first device does
            everything else.
        threads: Number of threads that the CPU's part may use at once. None: the environment variable CELOSIA_THREADS,
            or one for each processor, at most 8. Results do not depend on it.
        config: Accelerator for which a model is compiled, as `celosia.compile` takes it. A Program, or a Device that is
            passed, has its own.
        compiling: Other arguments of `celosia.compile` for a model, as `{"check": False}`.
            `{"shapes": {"image": (8, 3, 224, 224)}}` computes eight samples at once. None: the defaults of
            `celosia.compile`.
        **options: Keyword arguments for the devices that are opened by name, such as `memory` for "timed".

    Raises:
        ThreadsError: The number of threads is impossible.
        ProgramError: The file is no valid Program, or the CPU's part was compiled for another processor. Also where
            that part is machine code from a file that is not trusted (`Program.load`).
        ValueError: There is no device of that name, or the list of devices is empty.
        ModelError: The model cannot be read.
        DeviceError: A Device that is passed has another Config than the Program.

    Examples:
        >>> import celosia, numpy as np
        >>> program = celosia.compile(celosia.models.demo_model_path(), "tiny")
        >>> with celosia.Runtime(program, "timed") as runtime:
        ...     result = runtime.run({"image": np.zeros((1, 1, 32, 32), np.float32)})
        >>> result.outputs["logits"].shape, result.report["layers"][0]["bound"]
        ((1, 10), 'gemm')
    """

    program: Program
    """Program that runs; for a model, see `program_for`."""
    build_seconds: float
    """Seconds of building the device, when it was opened."""

    def __new__(
        cls, program: Program | str | Path | ModelProto, device: Devices = "functional",
        threads: int | None = None, *, config: str | Path | Config = "pynq",
        compiling: Mapping[str, Any] | None = None, **options: Any,
    ) -> Runtime:  # fmt: skip
        is_program = isinstance(program, Program) or (
            isinstance(program, (str, Path)) and Path(program).is_file() and Program.is_program(program)
        )
        return super().__new__(_OfProgram if is_program else _OfModel)


class _OfProgram(ProgramRuntime, Runtime):
    """Runtime of one Program, with devices over ssh and figures for notebooks, which boards do not need."""

    def __init__(
        self, program: Program | str | Path, device: Devices = "functional", threads: int | None = None, *,
        config: object = None, compiling: object = None, **options: Any,
    ) -> None:  # fmt: skip
        program = program if isinstance(program, Program) else Program.load(program)
        ProgramRuntime.__init__(self, program, device, threads, **options)

    def _opener(self, name: str) -> Callable[[], Device]:
        """Return the function that opens the device of that name, also on a board over ssh. ValueError for others."""
        if not name.startswith(SSH_PREFIX):
            return super()._opener(name)
        from celosia.driver.remote.remote_device import open_remote

        return partial(open_remote, name, self.program.config, **self._options)

    @staticmethod
    def drawn(result: Result) -> str:
        """Return the figures of `celosia.report` as HTML, for notebooks; "" without cycles or without Bokeh."""
        from celosia.driver.pages.page import require_bokeh
        from celosia.driver.pages.report_page import report
        from celosia.driver.workstation.oracle import MissingLibrary

        if not result.report["cycles"]:
            return ""
        try:
            require_bokeh()
        except MissingLibrary:
            return ""
        return report(result)._repr_html_()


class _OfModel(Runtime):
    """Runtime of a model: it opens a runtime for each Program that it compiles for new shapes."""

    def __init__(
        self, model: str | Path | ModelProto, device: Devices = "functional", threads: int | None = None, *,
        config: str | Path | Config = "pynq", compiling: Mapping[str, Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        from celosia.driver.workstation.specialise import Specialised  # with the compiler, which a board has not

        super().__init__(device, threads)
        for name_or_device in self._devices:
            if isinstance(name_or_device, str):
                require_tools(name_or_device, model)
            else:
                config = name_or_device.config
        self._latest = None
        self._specialised: Specialised[_OfProgram] = Specialised(
            model, {"config": config, **(compiling or {})},
            lambda program: _OfProgram(program, device, self.threads, **options),
        )  # fmt: skip

    _latest: _OfProgram | None

    def _attach_device(self, runtime: _OfProgram) -> _OfProgram:
        """Return `runtime`, after writing its Program to the devices' memory if another Program ran there last.

        This concerns Devices that the caller passed, which all runtimes share; those given by name are opened for each.
        """
        if runtime is not self._latest:
            for clone, device in zip((runtime, *runtime.others), self._devices):
                if not isinstance(device, str):
                    clone.attach(device)
        self._latest = runtime
        return runtime

    @property
    def names(self) -> list[str]:
        return self._specialised.model.inputs

    def program_for(self, inputs: Mapping[str, Array]) -> Program:
        return self._specialised.runtime(inputs).program

    def _futures(self, samples: Iterable[Sample], in_flight: int, trace: bool, lost: list[str]) -> Futures:
        """Implement `RuntimeBase._futures` for samples of several shapes: neighbours of one Program are its stream.

        Samples of another Program begin when all before have ended.
        """

        def runtime_of(sample: Sample) -> _OfProgram | Exception:
            """Return the runtime for a sample, or the error that there is none."""
            try:
                return self._specialised.runtime(self._name_inputs(sample))
            except Exception as error:
                return error

        for runtime, group in groupby(samples, runtime_of):
            if isinstance(runtime, Exception):
                for _ in group:
                    yield failed_future(runtime)
            else:
                yield from self._attach_device(runtime)._futures(group, in_flight, trace, lost)

    def open(self) -> None:
        """Do nothing: each Program opens a device when it first runs."""

    def close(self) -> None:
        self._specialised.close()

    def check(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self._specialised.runtime(inputs).check(inputs)

    def run(self, inputs: Mapping[str, Array], keep: Callable[[str], bool] | None = None, trace: bool = True) -> Result:
        with self._busy:
            return self._attach_device(self._specialised.runtime(inputs)).run(inputs, keep, trace)

    def run_batch(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self.run(inputs, trace=False).outputs

    def __repr__(self) -> str:
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        config, ready = self._specialised.compiling["config"], self._specialised.ready
        return (
            f"<Runtime of the model {self._specialised.model.name!r} on {self._where}, Config "
            f"{getattr(config, 'name', config)}: compiled for {ready} shapes so far, {threads}>"
        )
