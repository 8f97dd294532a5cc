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
    """The interface; each of its methods without a body is the business of a class. ThreadsError for an impossible
    number of threads."""

    def __init__(self, device: Devices, threads: int | None) -> None:
        self.threads = default_threads() if threads is None else check_thread_count(threads)
        self._devices = devices_of(device)
        self._where = ", ".join(
            device if isinstance(device, str) else type(device).__name__ for device in self._devices
        )
        self._busy = Lock()  # the arena, and the device, hold the tensors of one run

    @property
    def names(self) -> list[str]:
        """Names of the inputs, in their order."""
        raise NotImplementedError

    def program_for(self, inputs: Mapping[str, Array]) -> Program:
        """Program for inputs of these shapes; of a model, it is compiled now where it was not yet."""
        raise NotImplementedError

    def open(self) -> None:
        """Open the device now, if the program has launches: the first time, the RTL simulator is built here."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the device; `with Runtime(...) as runtime` does so at its end."""
        raise NotImplementedError

    def check(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Check the inputs and convert them for the program. InputError where a name, type or shape is wrong."""
        raise NotImplementedError

    def run(self, inputs: Mapping[str, Array], keep: Callable[[str], bool] | None = None, trace: bool = True) -> Result:
        """Run once.

        inputs: one array for each input, of its exact type and shape. keep: tensors inside the graph whose values are
        returned as outputs, too, where the host sees them. trace: note the time of each instruction, from which the
        report knows the cycles of each layer. Raises InputError and DeviceError.

        `Result.tensors` has the outputs and, where the Program was compiled with `keep`, tensors inside it.

        The report is plain data: cycles, utilization (macs_accelerator / cycles / MACs per cycle) and all times of
        units are None on devices without a clock; what it says of layers is in driver/run/explain.py.
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
        """Run, and return the output, or all of them where there are several; arrays in the order of the program's
        inputs.

        InputError where there are not as many, or one has another shape or type.

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

        in_flight: samples at a time on each accelerator, so that the CPU's steps of one run beside launches of another;
        each has tensors and device memory of its own, fewer where there is no memory for as many. As many again are
        read ahead; samples must stay what they are until their results are there. 1: one after the other, each read
        when its result is asked for, in this thread. Several devices take the next sample each when they are free.
        trace: as of `run`.

        `next` of what is returned raises what goes wrong with a sample, naming it, and goes on behind it (Results).

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
        """Run `samples`, and yield the futures; an invalid sample is an error of its run. lost: as of Results."""
        raise NotImplementedError

    def _name_inputs(self, sample: Sample) -> Mapping[str, Array]:
        """Return inputs by name. InputError where it is unclear which one an array is."""
        if isinstance(sample, Mapping):
            return sample
        if isinstance(sample, Exception):
            raise sample
        if len(self.names) != 1:
            raise InputError(f"there are {len(self.names)} inputs; give each sample as a dictionary by their names")
        return {self.names[0]: sample}
