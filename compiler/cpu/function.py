"""Compile a group of ONNX operators to one kernel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from celosia.compiler.cpu.llvm import compile_function
from celosia.compiler.cpu.schedule import kernel_loops, using_schedules
from celosia.compiler.cpu.schedule.output_reuse import in_place_pairs
from celosia.compiler.expr import Expr, Function, Load, Tensor, compute, placeholder
from celosia.compiler.expr.transform import loads, topological
from celosia.compiler.expr.unique_names import unused_name
from celosia.compiler.expr.walk import rewrite
from celosia.compiler.ops import Unsupported, build
from celosia.compiler.ops.registry import CpuNode, InputType, input_type, is_mapped
from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.compiler.target import compiling_for

Array = NDArray[Any]
ALWAYS_FOLDED_BYTES = 4096
"""Limit of a tensor that is computed at compile time even where it is larger than its inputs."""


@dataclass(frozen=True)
class CpuFunction:
    """Several operators that are compiled into one kernel.

    nodes: in topological order. inputs: types of all tensors that no node produces, by name; those that the kernel
    reads, in this order, are its parameters. outputs: names of the tensors to return.
    """

    nodes: tuple[CpuNode, ...]
    inputs: Mapping[str, InputType]
    outputs: tuple[str, ...]
    opset: int = 21

    def lower(self) -> tuple[Function, tuple[str, ...]]:
        """Return the loop IR and the names of its parameters. Raises ops.Unsupported."""
        parameters, outputs = self._build_expressions()
        return _schedule_and_lower(outputs, parameters)

    def compile(
        self, dead: frozenset[str] = frozenset(), used_names: set[str] | None = None
    ) -> tuple[CompiledKernel, tuple[str, ...], dict[str, Array]]:
        """Compile to machine code. Returns the kernel, the names of its parameters, and the constants computed here.

        Constants computed here, such as packed weights, are parameters of the kernel, too. dead: names of inputs that
        nothing reads afterwards, so that outputs may overwrite them. used_names: names that the constants must not
        have; theirs are added.
        """
        used_names = set() if used_names is None else used_names
        parameters, outputs = self._build_expressions()
        values = {tensor: self.inputs[name].value for tensor, name in parameters.items()}
        constants = {t: value for t, value in values.items() if value is not None and not is_mapped(value)}
        outputs, folded = _fold_constants(outputs, constants)
        folded_names = {tensor: unused_name(f"{self.outputs[0]}.{tensor.name}", used_names) for tensor in folded}
        function, names = _schedule_and_lower(outputs, {**parameters, **folded_names}, {*constants, *folded_names})
        in_place = in_place_pairs(function, frozenset(t for t, name in zip(function.inputs, names) if name in dead))
        kernel = _compile(replace(function, in_place=in_place), "/".join(node.op for node in self.nodes))
        return kernel, names, {folded_names[t]: value for t, value in folded.items()}

    def _build_expressions(self) -> tuple[dict[Tensor, str], list[Tensor]]:
        """Build the tensor expressions of the nodes. Returns (placeholder of each input -> its name, outputs)."""
        tensors: dict[str, Tensor] = {}
        parameters: dict[Tensor, str] = {}
        for position, (name, type_) in enumerate(self.inputs.items()):
            tensors[name] = placeholder(type_.shape, type_.dtype, f"x{position}")
            parameters[tensors[name]] = name
        for node in self.nodes:
            for name in node.inputs:
                if name and name not in tensors:
                    raise ValueError(f"{node.op} {node.name!r} reads {name!r}, which nothing before it produces")
            values = [self.inputs[n].value if n in self.inputs else None for n in node.inputs]
            built = build(
                node.op, dict(node.attrs), [tensors[n] if n else None for n in node.inputs], values,
                outputs=len(node.outputs), opset=self.opset, name=node.name,
            )  # fmt: skip
            tensors.update((n, t) for n, t in zip(node.outputs, built) if n)
        return parameters, _copy_aliases([tensors[name] for name in self.outputs])


def _schedule_and_lower(
    outputs: Sequence[Tensor], parameters: Mapping[Tensor, str], constants: Iterable[Tensor] = ()
) -> tuple[Function, tuple[str, ...]]:  # fmt: skip
    """Return the scheduled loops and the names of their parameters. parameters: names of placeholders."""
    function = kernel_loops(outputs, list(parameters), constants)
    return function, tuple(parameters[t] for t in function.inputs)


def _fold_constants(
    outputs: Sequence[Tensor], constants: Mapping[Tensor, Array]
) -> tuple[list[Tensor], dict[Tensor, Array]]:  # fmt: skip
    """Compute the tensors that depend on `constants` alone, now instead of at each run.

    Returns (outputs over placeholders for these tensors, values of the placeholders). A tensor that is far larger
    than the constants it depends on, such as dequantised weights, is computed when the kernel runs.
    """
    new: dict[Tensor, Tensor] = {}  # tensor -> its copy over placeholders
    # Constant tensor -> bytes of the constants from which it is computed.
    bytes_read: dict[Tensor, int] = {t: array.nbytes for t, array in constants.items()}
    folded: dict[Tensor, Tensor] = {}  # tensor -> the placeholder in its place
    order = topological(outputs)
    for tensor in order:
        if tensor.body is not None and all(load.tensor in bytes_read for load in loads(tensor.body)):
            read = {load.tensor for load in loads(tensor.body)}
            bytes_read[tensor] = sum(bytes_read[t] for t in read)

    def redirect_load(node: Expr) -> Expr | None:
        """Redirect a load of a constant tensor to its placeholder, which is created the first time."""
        if not isinstance(node, Load):
            return None
        source = node.tensor
        if (
            source.body is None
            or source not in bytes_read
            or source.nbytes > 2 * bytes_read[source] + ALWAYS_FOLDED_BYTES
        ):
            return Load(new.get(source, source), node.index)
        if source not in folded:
            folded[source] = placeholder(source.shape, source.dtype, source.name)
        return Load(folded[source], node.index)

    for tensor in order:
        if tensor.body is not None and tensor not in bytes_read:
            new[tensor] = replace(tensor, body=rewrite(tensor.body, redirect_load))
    if not folded:
        return list(outputs), {}
    kernel_outputs = _copy_aliases(list(folded))
    with compiling_for(None), using_schedules(None):  # runs once, on this processor
        function, _ = _schedule_and_lower(kernel_outputs, dict.fromkeys(constants, ""))
        values = _compile(function, "constants")(*(constants[t] for t in function.inputs))
    return [new.get(t, t) for t in outputs], dict(zip(folded.values(), values))


def compile_expressions(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], constants: Mapping[Tensor, Array]
) -> tuple[CompiledKernel, list[Array]]:
    """Compile tensor expressions that are no ONNX operators, for the target.

    Returns (kernel, values of its constants); the kernel's parameters are `inputs`, then these constants. constants:
    values of further placeholders. Raises Unsupported where a type has no such operation.
    """
    outputs, folded = _fold_constants(outputs, constants)
    values = {**constants, **folded}
    loops = kernel_loops(outputs, [*inputs, *values], values)
    assert loops.inputs[: len(inputs)] == tuple(inputs), "an input that nothing reads"
    return _compile(loops, outputs[0].name), [values[tensor] for tensor in loops.inputs[len(inputs) :]]


def _copy_aliases(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Copy outputs that are inputs or appear twice, as a kernel writes each output to memory of its own."""
    seen: set[Tensor] = set()
    result = []
    for tensor in outputs:
        if tensor.body is None or tensor in seen:
            tensor = compute(tensor.shape, lambda *i, t=tensor: t[i], f"{tensor.name}_copy")
        seen.add(tensor)
        result.append(tensor)
    return result


def compile_op(
    op: str, attrs: Mapping[str, Any], inputs: Sequence[Any], *, outputs: int = 1, opset: int = 21, name: str = ""
) -> CompiledKernel:
    """Compile one operator to a kernel, which is called with all inputs that are not None, in order.

    inputs: for each, an InputType, a (shape, dtype) pair, an array (a constant), or None for an omitted input.

    >>> import numpy as np
    >>> kernel = compile_op("Relu", {}, [((3,), "float32")])
    >>> kernel(np.array([-1, 0, 2], np.float32))[0].tolist()
    [0.0, 0.0, 2.0]
    """
    types = {f"i{k}": input_type(v) for k, v in enumerate(inputs) if v is not None}
    names = tuple(f"i{k}" if v is not None else "" for k, v in enumerate(inputs))
    results = tuple(f"o{k}" for k in range(outputs))
    function, used = CpuFunction((CpuNode(op, names, results, attrs, name),), types, results, opset).lower()
    if len(used) < len(types):  # an input whose values are part of the code, such as a shape, stays a parameter
        extra = [placeholder(types[n].shape, types[n].dtype, n) for n in types if n not in used]
        by_name = dict(zip(used, function.inputs)) | {t.name: t for t in extra}
        function = Function(function.name, tuple(by_name[n] for n in types), function.outputs, function.body)
    return _compile(function, op)


def _compile(function: Function, label: str) -> CompiledKernel:
    """Compile a function to machine code. Raises Unsupported where a type has no such operation."""
    try:
        return compile_function(function)
    except (TypeError, ValueError) as error:
        raise Unsupported(f"{label}: {error}") from error


def run(kernel: CompiledKernel, *arrays: Array) -> list[Array]:
    """Run the kernel on these inputs and return its outputs."""
    return kernel(*arrays)
