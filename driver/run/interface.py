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

        Args:
            inputs: One array for each input by name, of its exact element type and shape.
            keep: Function of a tensor's name: whether the value of that tensor inside the graph is returned as an
                output, too. This works for tensors that are in the host's memory at some time. None: outputs only.
            trace: Record the time of each instruction, which the report needs for the cycles of each layer.

        Returns:
            The Result: outputs, counters and the report. `Result.tensors` has the outputs, and tensors inside a Program
                that was compiled with `keep`.

        Raises:
            InputError: An input is missing or unknown, or its element type or shape is wrong.
            DeviceError: The run ended in an error status, or did not end in time.
        """
        raise NotImplementedError

    def run_batch(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run a batch of any size, and join the outputs along their first axis.

        Args:
            inputs: Arrays by name whose first axis counts samples. Each run takes as many samples as the Program's
                inputs have there. Where that size is open, `run` does the same.

        Returns:
            The outputs by name, with as many samples as the inputs.

        Raises:
            InputError: The Program's number of samples does not divide the batch, or inputs have batches of different
                sizes.
            DeviceError: A run ended in an error status, or did not end in time.

        Examples:
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
        """Run once for each sample, in order.

        `next` of the returned iterator raises the error of a sample, with its number. The call after it goes on with
        the next sample (see Results).

        Args:
            samples: Inputs by name for each sample, or the array of the only input.
            in_flight: Number of samples at a time on each accelerator, 1 to 64. CPU steps of one sample overlap
                launches of another. Each sample has tensors and device memory of its own; they are fewer where memory
                is short. As many samples again are read ahead, and must not change until their results are returned. 1
                runs one sample after the other, in this thread; each is read when its result is requested. Each of
                several devices takes the next sample when it is free.
            trace: Record the time of each instruction, which the report needs for the cycles of each layer.

        Returns:
            An iterator of Results, one for each sample. Its `lost` has a sentence for each accelerator that was left
                out after an error.

        Raises:
            InputError: `in_flight` is outside its limits. From `next`: a sample does not fit the Program.
            DeviceError: From `next`: a run ended in an error status, or did not end in time.

        Examples:
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
