"""From ONNX operators to one kernel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from celosia.compiler.cpu.llvm import compile_function
from celosia.compiler.cpu.schedule import arranged, choosing
from celosia.compiler.cpu.schedule.inplace import overwritable
from celosia.compiler.expr import Expr, Function, Load, Tensor, compute, placeholder
from celosia.compiler.expr.names import unused_name
from celosia.compiler.expr.transform import loads, topological
from celosia.compiler.expr.walk import rewrite
from celosia.compiler.ops import Unsupported, build
from celosia.compiler.ops.node import CpuNode, InputType, input_type, is_mapped
from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.compiler.target import compiling_for

Array = NDArray[Any]
ALWAYS_FOLDED_BYTES = 4096
"""Bytes of a tensor that is worth computing at compile time whatever it is computed from."""


@dataclass(frozen=True)
class CpuFunction:
    """Several operators compiled into one kernel. Elements stay in registers along chains such as
    DequantizeLinear -> Erf -> QuantizeLinear.

    nodes: in an order in which each reads what came before. inputs: types of everything that no node produces;
    those that the kernel reads, in this order, are its parameters (`parameters`). outputs: names to return.
    """

    nodes: tuple[CpuNode, ...]
    inputs: Mapping[str, InputType]
    outputs: tuple[str, ...]
    opset: int = 21

    def lower(self) -> tuple[Function, tuple[str, ...]]:
        """(loop IR, names of its parameters). Raises ops.Unsupported."""
        parameters, outputs = self._expressions()
        return _lowered(outputs, parameters)

    def compile(
        self, dead: frozenset[str] = frozenset(), taken: set[str] | None = None
    ) -> tuple[CompiledKernel, tuple[str, ...], dict[str, Array]]:
        """(kernel, names of its parameters in order, those of them that were computed here because they depend on
        constants alone, such as packed weights).

        dead: inputs that nobody needs afterwards, so that outputs may be written over them. taken: names that these
        constants must not have; theirs are added.
        """
        taken = set() if taken is None else taken
        parameters, outputs = self._expressions()
        values = {tensor: self.inputs[name].value for tensor, name in parameters.items()}
        constants = {t: value for t, value in values.items() if value is not None and not is_mapped(value)}
        outputs, found = _computed(outputs, constants)
        made = {tensor: unused_name(f"{self.outputs[0]}.{tensor.name}", taken) for tensor in found}
        function, names = _lowered(outputs, {**parameters, **made}, {*constants, *made})
        over = overwritable(function, frozenset(t for t, name in zip(function.inputs, names) if name in dead))
        kernel = _compiled(replace(function, in_place=over), "/".join(node.op for node in self.nodes))
        return kernel, names, {made[t]: value for t, value in found.items()}

    def _expressions(self) -> tuple[dict[Tensor, str], list[Tensor]]:
        """(names of the placeholders, the outputs)."""
        tensors: dict[str, Tensor] = {}
        parameters: dict[Tensor, str] = {}
        for number, (name, type_) in enumerate(self.inputs.items()):
            tensors[name] = placeholder(type_.shape, type_.dtype, f"x{number}")
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
        return parameters, _distinct([tensors[name] for name in self.outputs])


def _lowered(
    outputs: Sequence[Tensor], parameters: Mapping[Tensor, str], constants: Iterable[Tensor] = ()
) -> tuple[Function, tuple[str, ...]]:  # fmt: skip
    function = arranged(outputs, list(parameters), constants)
    return function, tuple(parameters[t] for t in function.inputs)


def _computed(
    outputs: Sequence[Tensor], constants: Mapping[Tensor, Array]
) -> tuple[list[Tensor], dict[Tensor, Array]]:  # fmt: skip
    """(outputs that read a placeholder for each tensor that `constants` determine, the values of those placeholders).

    What is far larger than the constants themselves, as dequantised weights are, is computed when the kernel runs.
    """
    new: dict[Tensor, Tensor] = {}
    bytes_read: dict[Tensor, int] = {t: array.nbytes for t, array in constants.items()}
    wanted: dict[Tensor, Tensor] = {}  # tensor -> the placeholder in its place
    order = topological(outputs)
    for tensor in order:
        if tensor.body is not None and all(load.tensor in bytes_read for load in loads(tensor.body)):
            read = {load.tensor for load in loads(tensor.body)}
            bytes_read[tensor] = sum(bytes_read[t] for t in read)

    def change(node: Expr) -> Expr | None:
        if not isinstance(node, Load):
            return None
        source = node.tensor
        if (
            source.body is None
            or source not in bytes_read
            or source.nbytes > 2 * bytes_read[source] + ALWAYS_FOLDED_BYTES
        ):
            return Load(new.get(source, source), node.index)
        if source not in wanted:
            wanted[source] = placeholder(source.shape, source.dtype, source.name)
        return Load(wanted[source], node.index)

    for tensor in order:
        if tensor.body is not None and tensor not in bytes_read:
            new[tensor] = replace(tensor, body=rewrite(tensor.body, change))
    if not wanted:
        return list(outputs), {}
    kernel_outputs = _distinct(list(wanted))
    with compiling_for(None), choosing(None):  # it runs here, now and once
        function, _ = _lowered(kernel_outputs, dict.fromkeys(constants, ""))
        values = _compiled(function, "constants")(*(constants[t] for t in function.inputs))
    return [new.get(t, t) for t in outputs], dict(zip(wanted.values(), values))


def compile_expressions(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], constants: Mapping[Tensor, Array]
) -> tuple[CompiledKernel, list[Array]]:
    """(a kernel for the target of what is no operator, which takes those of `inputs` that are read and then what else
    it needs; the arrays of the latter, made of `constants`). Unsupported where a type has no such operation."""
    outputs, found = _computed(outputs, constants)
    values = {**constants, **found}
    made = arranged(outputs, [*inputs, *values], values)
    assert made.inputs[: len(inputs)] == tuple(inputs), "an input that nothing reads"
    return _compiled(made, outputs[0].name), [values[tensor] for tensor in made.inputs[len(inputs) :]]


def _distinct(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs that are inputs, or the same twice, are copied."""
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
    """A kernel for one operator, to be called with all inputs that are not None, in order.

    inputs: for each, an InputType, a (shape, dtype) pair, an array (a constant), or None where it is left out.

    >>> import numpy as np
    >>> kernel = compile_op("Relu", {}, [((3,), "float32")])
    >>> kernel(np.array([-1, 0, 2], np.float32))[0].tolist()
    [0.0, 0.0, 2.0]
    """
    types = {f"i{k}": input_type(v) for k, v in enumerate(inputs) if v is not None}
    names = tuple(f"i{k}" if v is not None else "" for k, v in enumerate(inputs))
    results = tuple(f"o{k}" for k in range(outputs))
    function, used = CpuFunction((CpuNode(op, names, results, attrs, name),), types, results, opset).lower()
    if len(used) < len(types):  # an input whose values went into the code, such as a shape: kept as a parameter
        extra = [placeholder(types[n].shape, types[n].dtype, n) for n in types if n not in used]
        by_name = dict(zip(used, function.inputs)) | {t.name: t for t in extra}
        function = Function(function.name, tuple(by_name[n] for n in types), function.outputs, function.body)
    return _compiled(function, op)


def _compiled(function: Function, what: str) -> CompiledKernel:
    """Its machine code. Unsupported where a type has no such operation."""
    try:
        return compile_function(function)
    except (TypeError, ValueError) as error:
        raise Unsupported(f"{what}: {error}") from error


def run(kernel: CompiledKernel, *arrays: Array) -> list[Array]:
    """The kernel's outputs for these inputs."""
    return kernel(*arrays)
