"""Segments: consecutive kernels of a Program that run as one call, without Python in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program import CpuStep, Program, ProgramError
from celosia.compiler.program.dtypes import numpy_dtype
from celosia.compiler.program.host.kernel import address_of, new_output
from celosia.compiler.program.host.thread_team import CallList, Stamps, team

Array = NDArray[Any]
Kind = tuple[np.dtype[Any], tuple[int, ...]]
"""Type and shape of an array."""


class Segment:
    """Kernels of a Program that run one after the other in one call.

    The addresses of tensors that lie elsewhere in each run are put into the call's arguments. Such a tensor is known to
    have the right type and shape, or it is checked in each run, or it is an output that gets new memory.
    """

    def __init__(
        self, program: Program, steps: Sequence[CpuStep], fixed: Mapping[str, Array], checked: Mapping[str, Kind],
        workspace: Array, threads: int,
    ) -> None:  # fmt: skip
        """Build the call of successive `steps`, which all have kernels.

        fixed: tensors with the same address in every run. checked: types and shapes of the inputs that `check` has
        verified, and made contiguous. workspace: temporary memory of all kernels.
        """
        kernels = [program.kernels[step.kernel] for step in steps if step.kernel is not None]
        tensors = [[*filter(None, step.inputs), *step.outputs] for step in steps]
        address = -(-workspace.ctypes.data // 64) * 64
        calls = [kernel.call([fixed.get(name) for name in names], address) for kernel, names in zip(kernels, tensors)]
        self._keep_alive = fixed, workspace  # the calls have their addresses
        self.calls = CallList(calls, team(kernels[0].library), threads)
        kinds: dict[str, Kind] = {}
        positions: dict[str, list[int]] = {}
        for kernel, names, start in zip(kernels, tensors, self.calls.starts):
            for position, (name, (dtype, shape)) in enumerate(zip(names, (*kernel.inputs, *kernel.outputs)), start):
                if name not in fixed:
                    kinds[name] = numpy_dtype(dtype), tuple(shape)
                    positions.setdefault(name, []).append(position)
        outputs = {name for step in steps for name in step.outputs}
        inputs = [name for name in positions if name not in outputs]
        known = {name for name in inputs if checked.get(name) == kinds[name]}
        # Each with its positions among the arguments.
        self._known_inputs = [(name, positions[name]) for name in inputs if name in known]
        self._inputs_to_check = [(name, *kinds[name], positions[name]) for name in inputs if name not in known]
        self._new_outputs = [(name, *kinds[name], positions[name]) for name in positions if name in outputs]

    def run(self, values: dict[str, Array]) -> Stamps:
        """Run the kernels on tensors of `values` (by name), and add their outputs to it, each in new memory.

        ProgramError where an input has another type or shape than the kernel.
        """
        arguments = self.calls.arguments
        for name, positions in self._known_inputs:
            address = address_of(values[name])
            for position in positions:
                arguments[position] = address
        copies = []  # alive until the kernels have run
        for name, dtype, shape, positions in self._inputs_to_check:
            array = values[name]
            if array.dtype != dtype or array.shape != shape:
                raise ProgramError(
                    f"the program is damaged: {name!r} is {array.dtype}{list(array.shape)}, not {dtype}{list(shape)}"
                )
            if not array.flags.c_contiguous:
                array = np.ascontiguousarray(array)
            copies.append(array)
            for position in positions:
                arguments[position] = address_of(array)
        for name, dtype, shape, positions in self._new_outputs:
            values[name] = array = new_output(dtype, shape)
            address = address_of(array)
            for position in positions:
                arguments[position] = address
        return self.calls.run()
