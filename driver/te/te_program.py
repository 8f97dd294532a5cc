"""Compile schedules for the CPU or an accelerator, and call the result with arrays, which determine open sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.cpu.llvm import compile_function
from celosia.compiler.expr.loops import Function
from celosia.compiler.expr.lower import lower as lower_loops
from celosia.compiler.expr.nodes import Var, topological
from celosia.compiler.expr.verify import clamp_accesses
from celosia.compiler.tensorize.render import AcceleratorKernel, render
from celosia.compiler.vthread.interleave import interleave
from celosia.driver.run.open_device import open_device
from celosia.driver.te import kernels
from celosia.driver.te.nodes import TensorExpr, bind_sizes, evaluate_size
from celosia.driver.te.schedule import TensorSchedule
from celosia.driver.te.te_accelerator import DeclaredIntrinsic, Environment, accelerator
from celosia.hw.spec.config import Config
from celosia.sim.device import Counters

Array = NDArray[Any]
Target = str | Config | Environment
"""Target of `build`: a name, a Config or an Environment."""


def build(
    s: TensorSchedule, args: Sequence[TensorExpr | Var], target: Target = "cpu", device: str = "functional",
    name: str = "kernel",
) -> BuiltKernel:  # fmt: skip
    """Build a function to call with arrays (and numbers, for variables) in the order of `args`; it fills in the
    outputs.

    target: "cpu" or "llvm" for this processor, or the accelerator of a Config. device: that runs it on an accelerator,
    by name. name: of the function in print. ValueError for an impossible schedule: at once, or, with open sizes, when
    the function is called.
    """
    kernel = BuiltKernel(s, args, _accelerator_of_target(target), device, name)
    if s.has_fixed_sizes:
        kernel.compiled({})
    return kernel


def _accelerator_of_target(target: Target) -> Environment | None:
    """Return the accelerator that a target stands for; None for this processor."""
    if isinstance(target, Environment):
        return target
    return None if isinstance(target, str) and target.split(" ")[0] in ("cpu", "llvm") else accelerator(target)


def lower(
    s: TensorSchedule, args: Sequence[TensorExpr | Var], sizes: Mapping[Var, int] | None = None,
    simple_mode: bool = True,
) -> Function:  # fmt: skip
    """Return the loops of a schedule, to print them. sizes: values of variables. simple_mode: ignored, for TVM's
    sake."""
    return _lower_to_loops(s, args, dict(sizes or {}), None)


def _lower_to_loops(
    s: TensorSchedule, args: Sequence[TensorExpr | Var], sizes: Mapping[Var, int], environment: Environment | None
) -> Function:  # fmt: skip
    """Lower a schedule to loops for these sizes. environment: None for this processor."""
    copies = bind_sizes(s.outputs, sizes)
    declared = {
        name: intrinsic.for_accelerator(environment.cfg)
        if environment and isinstance(intrinsic, DeclaredIntrinsic)
        else intrinsic
        for name, intrinsic in s.declared.items()
    }
    loops = s.replay_for([copies[output] for output in s.outputs], declared)
    inputs = [arg.node for arg in args if isinstance(arg, TensorExpr) and arg.node not in s.outputs]
    return lower_loops(loops, [copies[node] for node in inputs if node in copies])


class BuiltKernel:
    """A function of arrays, compiled for each combination of sizes at the first call with it.

    counters: of the latest run on an accelerator; None before, and on the CPU.
    """

    def __init__(
        self, s: TensorSchedule, args: Sequence[TensorExpr | Var], environment: Environment | None, device: str,
        name: str = "kernel",
    ) -> None:  # fmt: skip
        nodes = [arg.node for arg in args if isinstance(arg, TensorExpr)]
        if missing := [output.name for output in s.outputs if output not in nodes]:
            raise ValueError(f"{missing[0]} is computed, but not among the arguments")
        self.s, self.args, self.environment, self.device, self.name = s, tuple(args), environment, device, name
        self._read = {node for node in topological(s.outputs) if node.body is None}
        self.counters: Counters | None = None
        self._compiled: dict[tuple[tuple[Var, int], ...], Any] = {}

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.args))})"

    def compiled(self, sizes: Mapping[Var, int]) -> Any:
        """Return the code for these sizes, compiled at the first request: a CompiledKernel or an AcceleratorKernel."""
        key = tuple(sizes.items())
        if key not in self._compiled:
            function = _lower_to_loops(self.s, self.args, sizes, self.environment)
            if self.environment is not None:
                self._compiled[key] = render(self.environment.cfg, function)
            else:
                self._compiled[key] = compile_function(clamp_accesses(interleave(function).expanded()))
        return self._compiled[key]

    def __call__(self, *arguments: Array | int) -> None:
        """Compute the outputs into their arrays. ValueError for arrays of other shapes or types."""
        if len(arguments) != len(self.args):
            raise ValueError(f"{len(arguments)} arguments given, {len(self.args)} expected")
        sizes = _sizes_of_arguments(self.args, arguments)
        arrays = {
            arg.node: _check_array(arg, array, sizes)
            for arg, array in zip(self.args, arguments)
            if isinstance(arg, TensorExpr)
        }
        code = self.compiled(sizes)
        outputs = self.s.outputs
        inputs = [np.ascontiguousarray(array) for node, array in arrays.items() if node in self._read]
        if isinstance(code, AcceleratorKernel):
            results, self.counters = kernels.run(code, open_device(self.device, code.cfg), *inputs)
        else:
            results = code(*inputs)
        for output, result in zip(outputs, results):
            np.copyto(arrays[output], result)


def _sizes_of_arguments(args: Sequence[TensorExpr | Var], arrays: Sequence[Array | int]) -> dict[Var, int]:
    """Return the values of variables: numbers that are arguments, and dimensions of arrays."""
    sizes: dict[Var, int] = {}
    for arg, value in zip(args, arrays):
        if isinstance(arg, Var):
            sizes.setdefault(arg, int(value))
        elif isinstance(value, np.ndarray) and value.ndim == len(arg.shape):
            for size, extent in zip(arg.shape, value.shape):
                if isinstance(size, Var):
                    sizes.setdefault(size, extent)
    return sizes


def _check_array(arg: TensorExpr, array: Any, sizes: Mapping[Var, int]) -> Array:
    """Return the array for a tensor argument; ValueError where its type or shape differs."""
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{arg.name} is an array, not {type(array).__name__}")
    shape = tuple(evaluate_size(size, sizes) for size in arg.shape) if array.ndim == len(arg.shape) else None
    if shape is not None and any(extent < 0 for extent in shape):
        raise ValueError(f"{arg.name} would have the shape {list(shape)}")
    if array.shape != shape or array.dtype.name != arg.dtype:
        expected = f"({', '.join(map(str, arg.shape))})" if shape is None else shape
        raise ValueError(f"{arg.name}: {array.dtype.name}{array.shape} given, {arg.dtype}{expected} expected")
    return array
