"""Interface of runtimes: a Program on a device, or a model with a Program for each shape of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import Any, TypeVar

from numpy.typing import NDArray

from celosia.compiler.program import InputError, Program
from celosia.compiler.program.host.thread_team import check_thread_count, default_threads
from celosia.driver.run.open_device import Devices, devices_of
from celosia.driver.run.run_result import Result
from celosia.driver.run.stream import LANES, MAX_LANES, Futures, Results, Sample

Array = NDArray[Any]
R = TypeVar("R", bound="RuntimeBase")


class RuntimeBase:
    """Base class of runtimes. Its abstract methods raise NotImplementedError.

    device: one or several devices, see `Devices`. threads: of the CPU's kernels; None for the default. ThreadsError for
    an impossible number of threads.
    """

    def __init__(self, device: Devices, threads: int | None) -> None:
        self.threads = default_threads() if threads is None else check_thread_count(threads)
        self._devices = devices_of(device)
        self._where = ", ".join(
            device if isinstance(device, str) else type(device).__name__ for device in self._devices
        )
        self._busy = Lock()  # held during a run: arena and device memory hold the tensors of one run only

    @property
    def names(self) -> list[str]:
        """Names of the inputs, in their order."""
        raise NotImplementedError

    def program_for(self, inputs: Mapping[str, Array]) -> Program:
        """Return the Program for inputs of these shapes. The runtime of a model compiles it now if it has not yet."""
        raise NotImplementedError

    def open(self) -> None:
        """Open the device now, if the program has launches. This builds the RTL simulator if it is not in the cache."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the device, as `with Runtime(...) as runtime` does at its end."""
        raise NotImplementedError

    def check(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the inputs as the program takes them. InputError where a name, type or shape is wrong."""
        raise NotImplementedError

    def run(self, inputs: Mapping[str, Array], keep: Callable[[str], bool] | None = None, trace: bool = True) -> Result:
        """Run once.

        inputs: one array for each input, of its exact type and shape. keep: tensors inside the graph whose values are
        returned as outputs, too, if they are in the host's memory at some time. trace: record the time of each
        instruction, which the report needs for the cycles of each layer. Raises InputError and DeviceError.

        `Result.tensors` has the outputs and, where the Program was compiled with `keep`, tensors inside it.

        The report is plain data: cycles, utilization (macs_accelerator / cycles / MACs per cycle) and all times of
        units are None on devices without a clock; driver/run/explain.py makes its rows for layers.
        """
        raise NotImplementedError

    def run_batch(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run a batch of any size, and return the outputs joined along their first axis.

        inputs: arrays whose first axis counts samples; each run takes as many as the Program's inputs have there. Where
        that size is open, `run` does the same. InputError where it does not divide the batch, or inputs have batches of
        different sizes.

        >>> import celosia
        >>> images, labels, classes = celosia.models.demo_images()
        >>> runtime = celosia.Runtime(celosia.compile(celosia.models.demo_model_path(), "tiny"))
        >>> runtime.run_batch({"image": images[:5]})["logits"].shape
        (5, 10)
        """
        raise NotImplementedError

    def __enter__(self: R) -> R:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, *arrays: Array) -> Array | tuple[Array, ...]:
        """Run once with `arrays`, in the order of the program's inputs. Return the output, or a tuple of several.

        InputError for another number of arrays than inputs, and for a wrong shape or type.

        >>> import celosia, numpy as np
        >>> with celosia.Runtime(celosia.compile(celosia.models.demo_model_path(), "tiny")) as runtime:
        ...     runtime(np.zeros((1, 1, 32, 32), np.float32)).shape
        (1, 10)
        """
        names = self.names
        if len(arrays) != len(names):
            raise InputError(f"there are {len(names)} inputs, {', '.join(names) or 'none'}, and {len(arrays)} arrays")
        outputs = tuple(self.run(dict(zip(names, arrays)), trace=False).outputs.values())
        return outputs[0] if len(outputs) == 1 else outputs

    def run_each(self, samples: Iterable[Sample], in_flight: int = LANES, trace: bool = True) -> Results:
        """Run once for each of `samples`, in order: inputs by name, or the array of the only input.

        in_flight: samples at a time on each accelerator, so that CPU steps of one overlap launches of another. Each has
        tensors and device memory of its own; they are fewer where memory is short. As many again are read ahead, and
        must not change until their results are returned. 1: one sample after the other, in this thread, each read when
        its result is requested. Each of several devices takes the next sample when it is free. trace: see `run`.

        `next` of the returned iterator raises the error of a sample, with its number, and the call after it goes on
        with the next sample (see Results).

        >>> import celosia
        >>> images, labels, classes = celosia.models.demo_images()
        >>> runtime = celosia.Runtime(celosia.compile(celosia.models.demo_model_path(), "tiny"))
        >>> [classes[result.outputs["logits"].argmax()] for result in runtime.run_each(images[:2, None])]
        ['Ankle boot', 'Pullover']
        """
        if in_flight not in range(1, MAX_LANES + 1):
            raise InputError(f"in_flight must be a whole number from 1 to {MAX_LANES}, not {in_flight}")
        lost: list[str] = []
        return Results(self._futures(samples, in_flight, trace, lost), lost)

    def _futures(self, samples: Iterable[Sample], in_flight: int, trace: bool, lost: list[str]) -> Futures:
        """Run `samples` and yield their futures, in order. An invalid sample makes its own future fail.

        lost: filled with a sentence for each accelerator that fails, see Results.
        """
        raise NotImplementedError

    def _name_inputs(self, sample: Sample) -> Mapping[str, Array]:
        """Return a sample as inputs by name. InputError for an array where there are several inputs."""
        if isinstance(sample, Mapping):
            return sample
        if isinstance(sample, Exception):
            raise sample
        if len(self.names) != 1:
            raise InputError(f"there are {len(self.names)} inputs; give each sample as a dictionary by their names")
        return {self.names[0]: sample}
