"""Consecutive kernels of a Program, run as one."""

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


class Segment:
    """Kernels of a Program that run one after the other, without Python in between."""

    def __init__(
        self, program: Program, steps: Sequence[CpuStep], fixed: Mapping[str, Array], checked: Mapping[str, Kind],
        workspace: Array, threads: int,
    ) -> None:  # fmt: skip
        """fixed: tensors that lie in the same place in every run. checked: what others are for certain when they come,
        and contiguous. workspace: of all kernels."""
        kernels = [program.kernels[step.kernel] for step in steps if step.kernel is not None]
        tensors = [[*filter(None, step.inputs), *step.outputs] for step in steps]
        address = -(-workspace.ctypes.data // 64) * 64
        calls = [kernel.call([fixed.get(name) for name in names], address) for kernel, names in zip(kernels, tensors)]
        self.held = fixed, workspace
        self.calls = CallList(calls, team(kernels[0].library), threads)
        kinds: dict[str, Kind] = {}
        places: dict[str, list[int]] = {}
        for kernel, names, start in zip(kernels, tensors, self.calls.starts):
            for place, (name, (dtype, shape)) in enumerate(zip(names, (*kernel.inputs, *kernel.outputs)), start):
                if name not in fixed:
                    kinds[name] = numpy_dtype(dtype), tuple(shape)
                    places.setdefault(name, []).append(place)
        internal = {name for step in steps for name in step.outputs}
        external = [name for name in places if name not in internal]
        fixed_shape = {name for name in external if checked.get(name) == kinds[name]}
        self.checked = [(name, places[name]) for name in external if name in fixed_shape]
        self.given = [(name, *kinds[name], places[name]) for name in external if name not in fixed_shape]
        self.made = [(name, *kinds[name], places[name]) for name in places if name in internal]

    def run(self, values: dict[str, Array]) -> Stamps:
        """Run the kernels. Adds new tensors to `values`, which no other run shares."""
        arguments = self.calls.arguments
        for name, places in self.checked:
            address = address_of(values[name])
            for place in places:
                arguments[place] = address
        held = []
        for name, dtype, shape, places in self.given:
            array = values[name]
            if array.dtype != dtype or array.shape != shape:
                raise ProgramError(
                    f"the program is damaged: {name!r} is {array.dtype}{list(array.shape)}, not {dtype}{list(shape)}"
                )
            if not array.flags.c_contiguous:
                array = np.ascontiguousarray(array)
            held.append(array)
            for place in places:
                arguments[place] = address_of(array)
        for name, dtype, shape, places in self.made:
            values[name] = array = new_output(dtype, shape)
            address = address_of(array)
            for place in places:
                arguments[place] = address
        return self.calls.run()
