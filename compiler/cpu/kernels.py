"""Kernels of the CPU: operator fusion, compilation of a group of ONNX operators, and kernels that run time needs.

In order: which nodes share a kernel (`fuse_nodes`), how a group becomes machine code (CpuFunction, `compile_op`), and
the kernels that are compiled when a Program runs (`run_kernel`), for shapes that are known only then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.cpu.llvm import compile_function
from celosia.compiler.cpu.schedule import kernel_loops, using_schedules
from celosia.compiler.cpu.schedule.output_reuse import in_place_pairs
from celosia.compiler.expr import Expr, Function, Load, Tensor, compute, placeholder
from celosia.compiler.expr.nodes import loads, rewrite, topological, unused_name
from celosia.compiler.ops import OPS, Unsupported, build, op_spec, operators_with
from celosia.compiler.ops.registry import TYPES, CpuNode, InputType, input_type, is_mapped
from celosia.compiler.program.dtypes import itemsize
from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.compiler.program.host.op import DOMAINS, HostOp, Value, check_size
from celosia.compiler.program.op_spec import Kind, Moves
from celosia.compiler.target import compiling_for

Array = NDArray[Any]
ALWAYS_FOLDED_BYTES = 4096
"""Limit of a tensor that is computed at compile time even where it is larger than its inputs."""


JOINS = (
    ((Kind.INJECTIVE,), (Kind.INJECTIVE,)),
    ((Kind.REDUCTION, Kind.COMPLEX), (Kind.INJECTIVE,)),
    ((Kind.INJECTIVE,), (Kind.REDUCTION, Kind.COMPLEX)),
)
"""Fusion rules in the order in which they are tried: (kinds of the producer, kinds of its only reader).

By this order an injective operator joins its producer rather than its consumer. The merged group has the kind that is
not injective."""


def fuse_nodes(nodes: Sequence[CpuNode], outputs: Sequence[str]) -> list[list[CpuNode]]:
    """Split `nodes` (in topological order) into groups, each a kernel; the groups are in topological order, too.

    h = Conv(x, w)
    k = Relu(h)                        one kernel: h and k stay in registers,
    y = Add(k, b)            ->        y alone is written

    A group has at most one operator that is not injective, and only its last node has outputs that other groups read.
    outputs: names needed afterwards.
    """
    group_of = list(range(len(nodes)))  # node -> its group, named by the last node of that group
    kinds = [op_spec(node.op).kind for node in nodes]  # by group
    readers: dict[str, list[int]] = {}
    for position, node in enumerate(nodes):
        for name in node.inputs:
            readers.setdefault(name, []).append(position)

    def only_reader(last: int) -> int | None:
        """Return the only group that reads the outputs of the group `last`, or None."""
        users = {group_of[user] for name in nodes[last].outputs if name for user in readers.get(name, ())}
        return users.pop() if len(users) == 1 and not set(nodes[last].outputs) & set(outputs) else None

    for producer_kinds, reader_kinds in JOINS:
        for last in reversed(range(len(nodes))):
            if group_of[last] != last or kinds[last] not in producer_kinds:
                continue
            if (user := only_reader(last)) is not None and kinds[user] in reader_kinds:
                kinds[user] = kinds[last] if kinds[user] is Kind.INJECTIVE else kinds[user]
                group_of[:] = [user if group == last else group for group in group_of]
    groups = [last for last in range(len(nodes)) if group_of[last] == last]
    return [[node for node, group in zip(nodes, group_of) if group == last] for last in groups]


def saved_traffic(members: Sequence[CpuNode], sizes: Mapping[str, int], views: Collection[str]) -> int:
    """Return the bytes that a fused group neither writes nor reads again, compared with one kernel per operator.

    members: nodes of the group, in order. sizes: bytes of every output of a member. views: outputs that cost nothing
    without fusion, as only the shape changes.
    """
    inside = [name for member in members[:-1] for name in member.outputs if name]
    readers = [name for member in members if not set(member.outputs) & set(views) for name in member.inputs]
    return sum(sizes[name] * ((name not in views) + readers.count(name)) for name in inside)


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


ELEMENT_MOVERS = operators_with("moves", Moves.ALL, Moves.SOME, Moves.JOIN)
"""Operators that only move elements, so that they run for any element type on element numbers."""


def has_kernel(op: HostOp) -> bool:
    """Return whether `op` is defined as a tensor expression."""
    return op.domain in DOMAINS and op.op in OPS


def run_kernel(op: HostOp, args: list[Value]) -> list[Value]:
    """Compute the outputs of `op` with a compiled kernel. Raises Unsupported where no kernel can compute them."""
    if any(isinstance(arg, list) for arg in args):
        raise Unsupported(f"{op.op}: a sequence")
    has_other_type = any(arg is not None and arg.dtype.name not in TYPES for arg in args)
    if has_other_type and op.op in ELEMENT_MOVERS:
        return _run_on_positions(op, args)
    return cached_kernel(op, args)(*(arg for arg in args if arg is not None))


def _run_on_positions(op: HostOp, args: list[Value]) -> list[Value]:
    """Run an operator that moves elements of types that kernels lack, such as strings.

    A kernel moves the numbers of the elements; then the elements with these numbers are gathered.
    """
    positions: list[Value] = []
    start = 0
    element_arrays: list[Array] = []
    for arg in args:
        if arg is None or arg.dtype.name in TYPES:
            positions.append(arg)
            continue
        positions.append(np.arange(start, start + arg.size, dtype=np.int64).reshape(arg.shape))
        element_arrays.append(arg.reshape(-1))
        start += arg.size
    elements = np.concatenate(element_arrays)
    return [elements[moved] for moved in run_kernel(op, positions)]


_kernels: dict[Any, CompiledKernel] = {}
"""Kernels that were compiled in this process, by operator, types, and values of shape inputs."""
MAX_KERNELS = 4096
"""Limit of the cached kernels; beyond it all are dropped."""


def cached_kernel(op: HostOp, args: Sequence[Array | None]) -> CompiledKernel:
    """Return a kernel of `op` for the shapes and types of `args`, compiled the first time. Raises Unsupported.

    The values of inputs that determine shapes are part of the kernel.
    """
    shape_inputs = op_spec(op.op).shape_inputs
    types = tuple(None if a is None else (a.shape, a.dtype.name) for a in args)
    values = tuple(a.tobytes() if a is not None and i in shape_inputs else None for i, a in enumerate(args))
    key = (op.op, op.domain, op.opset, op.key, op.wanted, types, values)
    if key not in _kernels:
        if len(_kernels) >= MAX_KERNELS:
            _kernels.clear()
        inputs = [
            None if a is None else InputType(a.shape, a.dtype.name, a if i in shape_inputs else None)
            for i, a in enumerate(args)
        ]
        with compiling_for(None):  # for this processor, even where the Program is for another
            compiled = compile_op(op.op, op.attrs, inputs, outputs=op.wanted, opset=op.opset, name=op.name)
        for dtype, shape in compiled.outputs:
            check_size(prod(shape) * itemsize(dtype), f"{op.label}: the output {list(shape)}")
        _kernels[key] = compiled
    return _kernels[key]
