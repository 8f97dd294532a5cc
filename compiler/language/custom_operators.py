"""@cl.op: a function that launches kernels as the implementation of an operator in ONNX models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.operands import CUSTOM, CustomOp
from celosia.compiler.graph.select.placement import NotOffloadable, Placement, Reads
from celosia.compiler.graph.values import attributes_of, constant, shape
from celosia.compiler.language.accelerator import lower_to_layers
from celosia.compiler.language.jit import redirect_launches
from celosia.compiler.language.tile import ArrayArgument, LanguageError
from celosia.compiler.program.host.op import HostOp, host

Values = NDArray[Any]
"""Elements of an input or output of an operator."""


def op(domain: str, name: str, shape: Callable[..., Any]) -> Callable[[Any], Any]:
    """Decorate a function of arrays that launches kernels as the implementation of the ONNX operator `domain.name`.

    The function gets the operator's inputs, its outputs, and its attributes by name. shape: function of the inputs
    (arrays whose values may be undefined) and attributes that returns (shape, dtype) of each output; a single one needs
    no list. Once the function is defined, `celosia.compile` accepts models with the operator. It becomes a layer of the
    accelerator where it launches one kernel for the accelerator, on matrices; else the CPU runs it.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        """Add the operator to the compiler's table and to the host runtime."""
        operator = _Operator(function, shape)
        CUSTOM[domain, name] = CustomOp(operator.infer_shapes, operator.interpret, operator.place)
        host(name, domain=domain)(operator.run_on_cpu)
        return function

    return register


class _Operator:
    """A registered operator: shape inference, interpretation, execution on the CPU, and offloading.

    function, shape: see `op`.
    """

    def __init__(self, function: Callable[..., Any], shape: Callable[..., Any]) -> None:
        self.function, self.shape = function, shape

    def infer_shapes(
        self, inputs: Sequence[Values], attributes: Mapping[str, Any]
    ) -> list[tuple[tuple[int, ...], str]]:  # fmt: skip
        """Return (shape, dtype) of each output."""
        shapes = self.shape(*inputs, **attributes)
        return [shapes] if isinstance(shapes, tuple) else list(shapes)

    def _call(self, inputs: Sequence[Values], attributes: Mapping[str, Any]) -> list[Values]:
        """Call the function on new output arrays, and return these. The context says how its kernels run."""
        outputs = [np.zeros(dims, dtype) for dims, dtype in self.infer_shapes(inputs, attributes)]
        self.function(*inputs, *outputs, **attributes)
        return outputs

    def interpret(self, inputs: Sequence[Values], attributes: Mapping[str, Any]) -> list[Values]:
        """Compute the outputs in numpy, as the reference for the accelerator and the CPU."""
        with redirect_launches("interpret"):
            return self._call([np.ascontiguousarray(values) for values in inputs], attributes)

    def run_on_cpu(self, node: HostOp, *inputs: Values) -> tuple[Values, ...]:
        """Compute the outputs with kernels that are compiled for the CPU, whatever their own target is."""
        with redirect_launches("cpu"):
            return tuple(self._call([np.ascontiguousarray(values) for values in inputs], node.attrs))

    def place(self, p: Placement, node: ir.Node) -> None:
        """Offload the operator `node` as layers. Raises NotOffloadable where the accelerator cannot compute it.

        The function is called on arrays that stand for the node's inputs, to record its kernel, which must read and
        write these arrays themselves.
        """
        inputs = [self._placeholder(value) for value in node.inputs]
        with redirect_launches("capture") as launches, _raising_not_offloadable():
            outputs = self._call(inputs, attributes_of(node))
        if len(launches) != 1:
            raise NotOffloadable(f"it launches {len(launches)} kernels; the accelerator takes an operator of one")
        (launch,) = launches
        if launch.kernel.target != "accelerator":
            raise NotOffloadable(
                f'its kernel {launch.kernel.name} has the target {launch.kernel.target!r}; give it "accelerator"'
            )
        with _raising_not_offloadable():
            run, positions = launch.kernel.trace(launch.grid, launch.values)
        arrays: dict[ArrayArgument, Values] = {array: launch.arrays[number] for array, number in positions.items()}
        varying_inputs = [values for value, values in zip(node.inputs, inputs) if constant(value) is None]
        varying = {array for array, values in arrays.items() if any(values is other for other in varying_inputs)}
        with _raising_not_offloadable():
            kernel = lower_to_layers(p.cfg, node.name or launch.kernel.name, run, launch.kernel.at, varying)
        reads: Reads = {}
        for array in kernel.acts:
            number = next((n for n, values in enumerate(inputs) if values is arrays[array]), None)
            form = kernel.form(array)
            if number is not None:
                kernel.acts[array] = p.read(node.inputs[number], form, reads)
            elif array is kernel.y and arrays[array] is outputs[0]:
                kernel.acts[array] = p.new_activation(node.outputs[0], form)
            else:
                raise NotOffloadable(
                    f"{array.name} of its kernel is no input or output of the operator; pass it as one"
                )
        for array in varying.intersection(kernel.constants):
            raise NotOffloadable(f"{array.name} of its kernel varies; the accelerator takes it as a constant")
        with _raising_not_offloadable():
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

    def _placeholder(self, value: ir.Value | None) -> Values:
        """Return an array that stands for an input: its values where it is constant, else zeros of its shape.

        Raises NotOffloadable where the shape is not known.
        """
        constant_values = constant(value)
        if constant_values is not None:
            return np.ascontiguousarray(constant_values)
        dims = None if value is None else shape(value)
        if dims is None or value is None or value.dtype is None:
            raise NotOffloadable("an input is left out, or its shape is not known; give it one that is fixed")
        return np.zeros(dims, value.dtype.numpy())


@contextmanager
def _raising_not_offloadable() -> Iterator[None]:
    """Convert LanguageError to NotOffloadable, so that the CPU runs the operator, with the reason."""
    try:
        yield
    except LanguageError as error:
        raise NotOffloadable(str(error)) from None
