"""@cl.op: a function that launches kernels as the implementation of an operator in ONNX models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.custom import CUSTOM, CustomOp
from celosia.compiler.graph.select.forms import NotOffloadable
from celosia.compiler.graph.select.placement import Placement, Reads
from celosia.compiler.graph.values import attributes_of, constant, shape
from celosia.compiler.language.accelerator import lowered
from celosia.compiler.language.jit import launching
from celosia.compiler.language.language_errors import LanguageError
from celosia.compiler.language.tile import ArrayArgument
from celosia.compiler.program.host.hostops.host_registry import host
from celosia.compiler.program.host.op import HostOp

Values = NDArray[Any]


def op(domain: str, name: str, shape: Callable[..., Any]) -> Callable[[Any], Any]:
    """Register a function of an operator's inputs, outputs and attributes (by name), which launches kernels.

    shape: function of equal inputs (whose values may be undefined) and attributes that returns (shape, dtype) of each
    output; a single one needs no list. Once the function is defined, `celosia.compile` accepts models with the
    operator. It becomes a layer of the accelerator where it launches one kernel for it, on matrices; else the CPU runs
    it.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        known = _Operator(function, shape)
        CUSTOM[domain, name] = CustomOp(known.shapes, known.compute, known.place)
        host(name, domain=domain)(known.on_host)
        return function

    return add


class _Operator:
    """A registered operator: shape inference, interpretation, execution on the CPU, and offloading."""

    def __init__(self, function: Callable[..., Any], shape: Callable[..., Any]) -> None:
        self.function, self.shape = function, shape

    def shapes(self, inputs: Sequence[Values], attributes: Mapping[str, Any]) -> list[tuple[tuple[int, ...], str]]:
        found = self.shape(*inputs, **attributes)
        return [found] if isinstance(found, tuple) else list(found)

    def _run(self, inputs: Sequence[Values], attributes: Mapping[str, Any]) -> list[Values]:
        outputs = [np.zeros(dims, dtype) for dims, dtype in self.shapes(inputs, attributes)]
        self.function(*inputs, *outputs, **attributes)
        return outputs

    def compute(self, inputs: Sequence[Values], attributes: Mapping[str, Any]) -> list[Values]:
        """Interpret the operator: its meaning."""
        with launching("interpret"):
            return self._run([np.ascontiguousarray(each) for each in inputs], attributes)

    def on_host(self, node: HostOp, *inputs: Values) -> tuple[Values, ...]:
        with launching("cpu"):
            return tuple(self._run([np.ascontiguousarray(each) for each in inputs], node.attrs))

    def place(self, p: Placement, node: ir.Node) -> None:
        """Offload the operator as layers. Raises NotOffloadable where the accelerator cannot compute it."""
        inputs = [self._input(value) for value in node.inputs]
        with launching("capture") as launches, _reasons():
            outputs = self._run(inputs, attributes_of(node))
        if len(launches) != 1:
            raise NotOffloadable(f"it launches {len(launches)} kernels; the accelerator takes an operator of one")
        (launch,) = launches
        if launch.kernel.target != "accelerator":
            raise NotOffloadable(
                f'its kernel {launch.kernel.name} has the target {launch.kernel.target!r}; give it "accelerator"'
            )
        with _reasons():
            traced, given = launch.kernel.trace(launch.grid, launch.values)
        arrays: dict[ArrayArgument, Values] = {array: launch.arrays[number] for array, number in given.items()}
        varying = [each for value, each in zip(node.inputs, inputs) if constant(value) is None]
        changing = {array for array, values in arrays.items() if any(each is values for each in varying)}
        with _reasons():
            kernel = lowered(p.cfg, node.name or launch.kernel.name, traced, launch.kernel.at, changing)
        reads: Reads = {}
        for array in kernel.acts:
            number = next((n for n, each in enumerate(inputs) if each is arrays[array]), None)
            form = kernel.form(array)
            if number is not None:
                kernel.acts[array] = p.read(node.inputs[number], form, reads)
            elif array is kernel.y and arrays[array] is outputs[0]:
                kernel.acts[array] = p.new_activation(node.outputs[0], form)
            else:
                raise NotOffloadable(
                    f"{array.name} of its kernel is no input or output of the operator; pass it as one"
                )
        for array in changing.intersection(kernel.constants):
            raise NotOffloadable(f"{array.name} of its kernel varies; the accelerator takes it as a constant")
        with _reasons():
            layers = kernel.layers(arrays)
        if any(layer.y.storage is not kernel.acts[kernel.y].storage for layer in layers):
            raise NotOffloadable(
                "its heads would run one by one; an operator that is attention is one layer of whole groups"
            )
        (first, *others), y, form = layers, kernel.acts[kernel.y], kernel.form(kernel.y)
        if others or first.is_block:
            p.add_parts(node, layers, reads, y, form)
        else:
            p.add_layer(node, replace(first, y=y), reads, form)

    def _input(self, value: ir.Value | None) -> Values:
        """Return an array of the input's shape, with its values where it is constant. Raises NotOffloadable."""
        fixed = constant(value)
        if fixed is not None:
            return np.ascontiguousarray(fixed)
        dims = None if value is None else shape(value)
        if dims is None or value is None or value.dtype is None:
            raise NotOffloadable("an input is left out, or its shape is not known; give it one that is fixed")
        return np.zeros(dims, value.dtype.numpy())


@contextmanager
def _reasons() -> Iterator[None]:
    """Convert LanguageError to NotOffloadable, so that the CPU runs the operator, with the reason."""
    try:
        yield
    except LanguageError as error:
        raise NotOffloadable(str(error)) from None
