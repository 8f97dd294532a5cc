"""Assemble a Program: its steps, kernels and constants, with names and addresses in place of graph objects.

The functions at the end put a layer into a few words, for reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.cpu.kernels import CpuFunction, fuse_nodes, saved_traffic
from celosia.compiler.cpu.parse import parse
from celosia.compiler.expr import placeholder
from celosia.compiler.expr.nodes import unused_name
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importing.body_types import declared_shape
from celosia.compiler.graph.launches import LaunchPlan
from celosia.compiler.graph.levels import levels_of
from celosia.compiler.graph.select import ActivationLayout, Partition
from celosia.compiler.graph.select.placement import Reads, cache_of
from celosia.compiler.graph.values import captured, constant, dtype_name, shape, subgraphs, value_names
from celosia.compiler.launch.image import Image
from celosia.compiler.launch.memory_plan import plan_arena
from celosia.compiler.layer import Epilogue, Gemm, Layer, Window
from celosia.compiler.ops import OPS, VIEWS, Unsupported, build, op_spec
from celosia.compiler.ops.bit_serial import LEVELS
from celosia.compiler.ops.registry import TYPES, CpuNode, InputType, is_mapped
from celosia.compiler.program import (
    BodySteps,
    CpuStep,
    HostStep,
    LaunchStep,
    LayerInfo,
    NodeInfo,
    Pack,
    PartInfo,
    Program,
    Step,
    TensorInfo,
    Unpack,
)
from celosia.compiler.program.dtypes import itemsize
from celosia.compiler.program.host.hostops import HOST
from celosia.compiler.program.host.kernel import CompiledKernel, align
from celosia.compiler.program.host.op import DOMAINS, Body, HostError, HostOp, bodies, check_size
from celosia.compiler.program.model import BY_ROWS
from celosia.compiler.switches import is_on
from celosia.compiler.tensorize.block_space import Group
from celosia.compiler.tensorize.plan import LayerPart
from celosia.hw.spec.config import Config


def assemble(model: ir.Model, cfg: Config, partition: Partition, steps: list[Any], image: Image) -> Program:
    """Make the Program of a graph whose layers are placed, ordered, and lowered to the instructions in `image`.

    steps: CPU operators and LaunchPlans, in order. The graph does not change. Raises ModelError for an operator that is
    unknown or cannot be compiled for the CPU.
    """
    try:
        return _Assembler(model, cfg, partition, steps, image).run()
    except HostError as error:
        raise ModelError(str(error)) from None


class _Assembler:
    """State of `assemble`: tensors, constants and kernels of the Program so far."""

    def __init__(self, model: ir.Model, cfg: Config, selection: Partition, steps: list[Any], image: Image) -> None:
        self.model, self.cfg, self.selection, self.plan, self.image = model, cfg, selection, steps, image
        self.reasons = dict(selection.cpu)  # why each operator is on the CPU
        self.types: dict[ir.Value, tuple[tuple[int, ...], ir.DataType]] = {}
        """Shape and element type of the results of kernels, which the graph may lack."""
        self.opset = model.graph.opset_imports.get("", 21)
        self.opsets = dict(model.graph.opset_imports)
        self.views = {node for node in self._cpu_nodes() if _is_view(node)}
        self.tensors: dict[str, TensorInfo] = {}
        self.constants: dict[str, NDArray[Any]] = {}
        self.kernels: list[CompiledKernel] = []
        self.finished: set[ir.Node] = set()  # operators whose steps have been assembled
        self.finished_views: set[ir.Node] = set()  # operators among them that are steps without a kernel
        self.names = value_names(model.graph)  # names in use, also of tensors that are added here
        self.shape_names: dict[ir.Value, str] = {}  # result of a view -> name of the constant with its shape
        self.loops: dict[int, int] = {}  # id of a layer's loops -> their number
        self.printed: list[Any] = []  # those loops, in the order of their numbers
        self.owned: set[str] = set()  # tensors in the arena, unless they are returned
        self.launches = iter(image.launches)
        plans = [step for step in steps if isinstance(step, LaunchPlan)]
        # Values that launches read; their shapes have decided the layers and must not change any more.
        self.launched = {value for plan in plans for choice in plan.choices for value, _ in choice.reads.values()}

    def run(self) -> Program:
        """Assemble the Program."""
        graph = self.model.graph
        steps = self._steps(self.plan)
        outputs = tuple(self._describe_border(value) for value in graph.outputs)
        for value in graph.outputs:
            array = constant(value)
            if array is not None:
                self.constants[value.name or ""] = array
        program = Program(
            "", self.cfg, tuple(self._describe_border(value) for value in graph.inputs), outputs, self.tensors, steps,
            {name: array if is_mapped(array) else align(array) for name, array in self.constants.items()},
            self.kernels, self.image.constants, self.image.constants_address, self.image.size,
            self.image.arena_lower_bound, 0, self._placements(),
        )  # fmt: skip
        program.loops = self.printed
        program.arena = plan_arena(steps, self.kernels, self.tensors, [output.name for output in outputs])
        return program

    def _cpu_nodes(self) -> Iterator[ir.Node]:
        """Yield all operators on the CPU, those of subgraphs included; note why the latter are there."""
        for node in cpu_operators(self.plan):
            for body in subgraphs(node):
                for inner_node in body.all_nodes():
                    self.reasons[inner_node] = f"it is in a subgraph of {self._node_info(node).name}"
                    yield inner_node
            yield node

    def _steps(self, plan: Sequence[Any]) -> list[Step]:
        """Assemble steps in order; consecutive CPU operators are compiled together."""
        steps: list[Step] = []
        pending: list[ir.Node] = []  # operators since the last step of another kind, for kernels
        for step in plan:
            if isinstance(step, ir.Node) and self._is_compiled(step):
                pending.append(step)
                continue
            steps += self._kernel_steps(pending)
            pending = []
            steps.append(
                self._launch_step(step, next(self.launches)) if isinstance(step, LaunchPlan) else self._host_step(step)
            )
            self.finished.update(cpu_operators([step]))
            self.finished.update(node for choice in getattr(step, "choices", ()) for node in choice.nodes)
        return steps + self._kernel_steps(pending)

    def _add_tensor(self, value: ir.Value) -> TensorInfo:
        """Add a tensor to those of the Program. Raises ModelError if its shape or element type is not known."""
        name = value.name or ""
        dims, dtype = self._shape(value), self._dtype(value)
        if dims is None or dtype is None:
            raise ModelError(f"the shape of tensor {name!r} cannot be inferred; export the model with fixed shapes")
        if dtype == ir.DataType.UNDEFINED:
            raise ModelError(f"tensor {name!r} has no element type; export the model with types")
        self.tensors[name] = TensorInfo(name, dtype.numpy().name, dims)
        return self.tensors[name]

    def _shape(self, value: ir.Value) -> tuple[int, ...] | None:
        """Return the static shape of a tensor, from its kernel or the graph; None if it is open."""
        return self.types[value][0] if value in self.types else shape(value)

    def _dtype(self, value: ir.Value) -> ir.DataType | None:
        """Return the element type of a tensor, from its kernel or the graph."""
        return self.types[value][1] if value in self.types else value.dtype

    def _is_kernel_tensor(self, value: ir.Value) -> bool:
        """Return whether kernels can read a tensor: its shape and an element type of theirs are known."""
        return value in self.types or _is_kernel_tensor(value)

    def _describe_border(self, value: ir.Value) -> TensorInfo:
        """Describe an input or output of the model, which may be a sequence, or have a shape known at run time only."""
        kind, tensor_type = "tensor", value.type
        while isinstance(tensor_type, (ir.SequenceType, ir.OptionalType)):
            kind = "sequence" if isinstance(tensor_type, ir.SequenceType) else "optional"
            tensor_type = tensor_type.elem_type
        if kind == "tensor" and self._shape(value) is not None:
            return self._add_tensor(value)
        dims = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in value.shape or ())
        return TensorInfo(value.name or "", dtype_name(value), dims, kind)

    # The CPU ----------------------------------------------------------------------------------------------------------

    def _node_info(self, node: ir.Node) -> NodeInfo:
        """Describe an operator on the CPU: name, operator, and why it is there."""
        name = node.name or f"{node.op_type}:{node.outputs[0].name}"
        return NodeInfo(name, node.op_type, self.reasons.get(node, "the host needs this view"))

    def _add_value(self, value: ir.Value | None) -> str:
        """Add an input of a step to the Program's constants or tensors, and return its name; "" for none."""
        if value is None:
            return ""
        array = constant(value)
        if array is not None:
            self.constants[value.name or ""] = array
        elif self._shape(value) is not None and (value in self.types or isinstance(value.type, ir.TensorType)):
            self._add_tensor(value)
        return value.name or ""

    def _host_step(self, node: ir.Node) -> HostStep:
        """Make the step of an operator that runs in numpy.

        Such an operator is no loop nest, or its shapes are known at run time only.
        """
        info = self._node_info(node)
        op = parse(ir.serde.serialize_node(node), self.opsets)
        self._check_known(op, info)
        body_steps = tuple(
            self._body_steps(name, attr.as_graph())
            for name, attr in node.attributes.items() if attr.type == ir.AttributeType.GRAPH
        )  # fmt: skip
        inputs = tuple(self._add_value(value) for value in (*node.inputs, *captured(node)))
        for out in node.outputs:
            if out.name:
                self._add_value(out)
        if body_steps:
            op = replace(
                op, attrs={name: value for name, value in op.attrs.items() if not isinstance(value, Body)}, key=b""
            )
        return HostStep((info,), inputs, tuple(op.outputs), op, body_steps)

    def _body_steps(self, attribute: str, body: ir.Graph) -> BodySteps:
        """Assemble the steps of a subgraph."""
        for value in (*body.inputs, *body.outputs):
            self._add_value(value)
        steps = tuple(step for step in self._steps(list(body)) if not isinstance(step, LaunchStep))
        inputs, outputs = (tuple(value.name or "" for value in values) for values in (body.inputs, body.outputs))
        return BodySteps(attribute, inputs, outputs, steps, tuple(self._result_type(value) for value in body.outputs))

    def _result_type(self, value: ir.Value) -> tuple[str, tuple[int, ...]]:
        """Return element type and shape of a result of a subgraph, 0 for sizes that are not known."""
        dtype, dims = self._dtype(value), self._shape(value)
        name = "float32" if dtype in (None, ir.DataType.UNDEFINED) else dtype.numpy().name
        sizes = (declared_shape(value) or ()) if dims is None else dims
        return name, tuple(size if isinstance(size, int) and size >= 0 else 0 for size in sizes)

    def _check_known(self, op: HostOp, info: NodeInfo) -> None:
        """Raise ModelError if an operator, or one in its subgraphs, is not supported on the host."""
        is_known = (op.domain, op.op) in HOST or (op.domain in DOMAINS and op.op in OPS)
        if not is_known:
            where = f" of domain {op.domain!r}" if op.domain else ""
            inside = "" if op.op == info.op else f" inside {info.op} ({info.name})"
            raise ModelError(f"operator {op.op}{where} ({op.name or info.name}){inside} is not supported")
        for body in bodies(op):
            for inner_op in body.ops:
                self._check_known(inner_op, info)

    def _is_compiled(self, node: ir.Node) -> bool:
        """Return whether `node` becomes part of a kernel; if so, note the types of its results.

        Raises ModelError if it can run neither as a kernel nor on the host.
        """
        if node.domain not in DOMAINS or node.op_type not in OPS:
            return False
        for number, value in enumerate(node.inputs):
            if value is None:
                continue
            if not self._is_kernel_tensor(value) or (
                number in op_spec(node.op_type).shape_inputs and constant(value) is None
            ):
                if node in self.views:  # not built here, so its type comes from its input, not from its declaration
                    self._take_type_of_input(node)
                return node in self.views
        types = [None if value is None else self._input_type(value) for value in node.inputs]
        tensors = [
            None if input_type is None else placeholder(input_type.shape, input_type.dtype, "x") for input_type in types
        ]
        values = [None if input_type is None else input_type.value for input_type in types]
        attrs = parse(ir.serde.serialize_node(node), self.opsets).attrs
        try:
            results = build(
                node.op_type, attrs, tensors, values, outputs=len(node.outputs), opset=self.opset, name=node.name or ""
            )
        except Unsupported as error:
            if ("", node.op_type) in HOST and (node.op_type == "Dropout" or node.op_type not in VIEWS):
                return False
            if node.graph is not self.model.graph:  # a branch that never runs, perhaps
                return False
            where = f"{node.op_type} ({self._node_info(node).name})"
            raise ModelError(f"operator {where} cannot be compiled for the CPU: {error}") from None
        for value, tensor in zip(node.outputs, results):
            if value in self.launched and shape(value) != tensor.shape:
                raise ModelError(
                    f"operator {node.op_type} ({self._node_info(node).name}) makes {list(tensor.shape)}, and "
                    f"{list(shape(value) or ())} by its attributes"
                )
            self.types[value] = tensor.shape, ir.DataType.from_numpy(np.dtype(tensor.dtype))
            check_size(tensor.nbytes, f"output {value.name!r} of {node.op_type} ({self._node_info(node).name})")
        return True

    def _take_type_of_input(self, view: ir.Node) -> None:
        """Note the element type of a view's input for its output: that of a kernel may differ from the declared one."""
        x, y = view.inputs[0], view.outputs[0]
        assert x is not None
        dims, dtype = self._shape(y), self._dtype(x)
        if dims is not None and dtype is not None:
            self.types[y] = dims, dtype

    def _input_type(self, value: ir.Value) -> InputType:
        """Return the type of an operand of a CPU kernel; for a constant with its content, as builders may need it.

        Any other operand becomes a tensor of the Program. Raises ModelError if its type is not known.
        """
        array = constant(value)
        if array is not None:
            return InputType.of(array)
        info = self._add_tensor(value)
        return InputType(info.shape, info.dtype)

    def _kernel_steps(self, nodes: list[ir.Node]) -> list[CpuStep]:
        """Return the steps of consecutive operators: one for each group that is fused into a kernel."""
        node_set = set(nodes)
        producer_of = {value.name: node for node in nodes for value in node.outputs if value.name}
        needed = {
            value.name or "" for node in nodes for value in node.outputs
            if value.is_graph_output() or any(use.node not in node_set for use in value.uses())
        }  # fmt: skip
        steps = []
        cpu_nodes = [self._cpu_node(node) for node in nodes]
        for members in (
            fuse_nodes(cpu_nodes, sorted(needed)) if is_on("fusion") else [[cpu_node] for cpu_node in cpu_nodes]
        ):
            steps.append(
                self._compile_step(members, [producer_of[next(filter(None, member.outputs))] for member in members])
            )
        return steps

    def _cpu_node(self, node: ir.Node) -> CpuNode:
        """Describe a node for the CPU compiler: operator, names of inputs and outputs, attributes."""
        outputs = tuple((out.name or "") if out.uses() or out.is_graph_output() else "" for out in node.outputs)
        if not any(outputs):
            outputs = tuple(out.name or "" for out in node.outputs)
        inputs = tuple("" if value is None else value.name or "" for value in node.inputs)
        if node in self.views:
            return CpuNode(
                "Reshape", (inputs[0], self._shape_constant_name(node.outputs[0])), outputs[:1], {}, node.name or ""
            )
        attrs = parse(ir.serde.serialize_node(node), self.opsets).attrs
        factors = [(number, node.inputs[number]) for number in op_spec(node.op_type).factors]
        if any(constant(value) is None and levels_of(value) for _, value in factors):  # large weights are scanned last
            attrs |= {LEVELS: {number: levels_of(value) for number, value in factors}}
        return CpuNode(node.op_type, inputs, outputs, attrs, node.name or "")

    def _compile_step(self, members: list[CpuNode], nodes: list[ir.Node]) -> CpuStep:
        """Compile operators that share a kernel, and return the step that runs it; views alone need no kernel."""
        infos = tuple(self._node_info(node) for node in nodes)
        outputs = tuple(name for name in members[-1].outputs if name)
        for out in nodes[-1].outputs:
            if out.name in outputs:
                self._add_tensor(out)
        self.finished.update(nodes)
        if all(node in self.views for node in nodes):
            self.finished_views.update(nodes)
            return CpuStep(infos, (self._add_value(nodes[0].inputs[0]),), outputs)
        inner_names = {name for member in members for name in member.outputs}
        values = {value.name or "": value for node in nodes for value in node.inputs if value is not None}
        input_types = {name: self._input_type(value) for name, value in values.items() if name not in inner_names}
        for node in nodes:
            if node in self.views:
                dims = np.array(self._shape(node.outputs[0]), np.int64)
                input_types[self._shape_constant_name(node.outputs[0])] = InputType.of(dims)
        overwritable = frozenset(
            name for name in input_types if name in values and self._may_be_overwritten(values[name], nodes[-1].graph)
        )
        if any(out.is_graph_output() for out in nodes[-1].outputs):
            overwritable = frozenset()  # a returned result lies in an array of its own, over no input
        try:
            kernel, names, rearranged = CpuFunction(tuple(members), input_types, outputs, self.opset).compile(
                overwritable, self.names
            )
        except Unsupported as error:
            where = f"{infos[-1].op} ({infos[-1].name})"
            raise ModelError(f"operator {where} cannot be compiled for the CPU: {error}") from None
        if "popcount4(" in kernel.loops:
            self._note_bit_products(nodes)
            infos = tuple(self._node_info(node) for node in nodes)
        self.constants |= rearranged
        for name in names:
            if name not in rearranged:
                self._add_value(values[name])
        self.kernels.append(kernel)
        self.owned.update(outputs)
        sizes = {out.name or "": self._size_in_bytes(out) for node in nodes for out in node.outputs}
        views = {node.outputs[0].name or "" for node in nodes if node in self.views}
        return CpuStep(infos, names, outputs, len(self.kernels) - 1, saved_traffic(members, sizes, views))

    def _size_in_bytes(self, value: ir.Value) -> int:
        """Return the bytes of a tensor, to count the traffic that fusion saves."""
        dtype = self.types[value][1].numpy().name if value in self.types else dtype_name(value)
        return prod(self._shape(value) or ()) * itemsize(dtype)

    def _note_bit_products(self, nodes: list[ir.Node]) -> None:
        """Add to the reasons of operators, which users read, that their kernel multiplies bit by bit."""
        for node in nodes:
            if numbers := op_spec(node.op_type).factors:
                levels = [levels_of(node.inputs[number]) for number in numbers]
                bits = " and ".join(str(operand.bits) for operand in levels if operand is not None)
                self.reasons[node] += f"; its operands have {bits} bits: products are `and` and popcount"

    def _shape_constant_name(self, value: ir.Value) -> str:
        """Return the name of the constant that holds the shape of a view."""
        if value not in self.shape_names:
            self.shape_names[value] = unused_name(f"{value.name}.shape", self.names)
        return self.shape_names[value]

    def _may_be_overwritten(self, value: ir.Value, graph: ir.Graph | ir.Function | None) -> bool:
        """Return whether an operator of `graph` may overwrite `value`.

        It must lie in the arena and be of the same graph, and no later step may read its memory, also through views.
        """
        while (producer := value.producer()) is not None and producer in self.finished_views:
            value = producer.inputs[0]  # type: ignore[assignment]
        is_outer = producer is None or producer.graph is not graph  # the next iteration of a body reads it again
        return value.name in self.owned and not is_outer and not self._is_needed(value)

    def _is_needed(self, value: ir.Value) -> bool:
        """Return whether a value, or a view of it, is an output or has a reader that has not run."""
        users = [use.node for use in value.uses()]
        return (
            value.is_graph_output()
            or any(node not in self.finished for node in users)
            or any(self._is_needed(node.outputs[0]) for node in users if node in self.finished_views)
        )

    # The accelerator --------------------------------------------------------------------------------------------------

    def _launch_step(self, plan: LaunchPlan, launch: Any) -> LaunchStep:
        """Make the step that packs inputs, runs a launch, and unpacks outputs."""
        packs, unpacks = [], []
        sources = {storage: source for choice in plan.choices for storage, source in choice.reads.items()}
        for storage, (value, form) in sources.items():
            cache = cache_of(value) if storage.lasting and form.fold in BY_ROWS else None
            cache_name = "" if cache is None else cache.name or ""
            packs.append(
                Pack(self._add_value(value), form.info, self.image.addresses[storage], storage.groups, cache_name)
            )
        for value in plan.unpacked:
            info = self._add_tensor(value)
            self.owned.add(info.name)
            act, form = self.selection.written[value], self.selection.forms[value]
            address = self.image.addresses[act.storage]
            unpacks.append(Unpack(info.name, form.info, address, act.storage_groups, act.group_offset))
        layers = tuple(
            LayerInfo(
                choice.layer.name, choice.layer.kind, tuple(node.name or "" for node in choice.nodes),
                choice.layer.macs, loaded, stored, choice.note,
                tuple(info for part in parts for info in self._describe_parts(part)),
                choice.layer.intermediate_bytes(self.cfg), round(choice.separate_cycles),
                round(choice.block_cycles),
                _describe(choice.layer, _folded_layout(choice.reads)) + ", packed weights" * _has_packed_weights(parts),
            )
            for choice, loaded, stored, parts in zip(
                plan.choices, launch.bytes_loaded, launch.bytes_stored, launch.parts, strict=True
            )
        )  # fmt: skip
        return LaunchStep(launch.address, launch.count, layers, launch.layer_of, tuple(packs), tuple(unpacks))

    def _describe_parts(self, part: LayerPart) -> list[PartInfo]:
        """Describe a part of a layer for reports: workload, tiling, and the number of its printed loops."""
        number = self.loops.setdefault(id(part.loops), len(self.loops))
        if number == len(self.printed):
            self.printed.append(part.loops)
        return [PartInfo(workload.text, tiling.to_json(), number) for workload, tiling in part.tilings]

    def _placements(self) -> list[dict[str, str]]:
        """Return where each operator of the graph runs, and why, for `celosia inspect`: name, op, place and reason."""
        choice_of = {node: choice for choice in self.selection.choices for node in choice.nodes}
        rows = []
        for node in self.model.graph:
            row = {"name": node.name or f"{node.op_type}:{node.outputs[0].name}", "op": node.op_type}
            if node in choice_of:
                layer = choice_of[node].layer
                role = f"layer {layer.name}" if choice_of[node].nodes[0] is node else f"joined to layer {layer.name}"
                note = f"; {choice_of[node].note}" if choice_of[node].note else ""
                rows.append(row | {"place": "accelerator", "reason": role + note})
            elif node in self.selection.views:
                rows.append(row | {"place": "free", "reason": self.selection.views[node]})
            else:
                rows.append(row | {"place": "cpu", "reason": self.reasons[node]})
        return rows


def _has_packed_weights(parts: list[LayerPart]) -> bool:
    """Return whether some of a layer's weights are packed in device memory, which its description says."""
    workloads = [workload for part in parts for workload, _ in part.tilings]
    layers = [
        layer for workload in workloads for layer in (workload.layers if isinstance(workload, Group) else (workload,))
    ]
    return any(layer.packed for layer in layers)


def cpu_operators(steps: list[Any]) -> list[ir.Node]:
    """Return the steps that are operators on the CPU."""
    return [step for step in steps if isinstance(step, ir.Node)]


def _is_kernel_tensor(value: ir.Value) -> bool:
    """Return whether kernels can read `value`: a tensor of known shape, and of an element type of theirs."""
    has_type = isinstance(value.type, ir.TensorType) and value.dtype not in (None, ir.DataType.UNDEFINED)
    return has_type and shape(value) is not None and value.dtype.numpy().name in TYPES  # type: ignore[union-attr]


def _is_view(node: ir.Node) -> bool:
    """Return whether the output of `node` is its input under another shape."""
    if node.domain not in DOMAINS or node.op_type not in VIEWS or node.inputs[0] is None:
        return False
    used = [out for out in node.outputs if out.uses() or out.is_graph_output()]
    if used != list(node.outputs[:1]) or (node.op_type == "Dropout" and len(node.inputs) > 2):
        return False
    x, y = node.inputs[0], node.outputs[0]
    return _is_kernel_tensor(x) and _is_kernel_tensor(y) and prod(shape(x) or ()) == prod(shape(y) or ())


def _folded_layout(reads: Reads) -> ActivationLayout | None:
    """Return the layout in which the host folds a window of the layer's input into channels; None if it does not.

    `describe` names the window that is folded.
    """
    return next((form for _, form in reads.values() if form.window is not None), None)


# Words about a layer ----------------------------------------------------------------------------------------------


def _describe(layer: Layer, form: ActivationLayout | None = None) -> str:
    """Describe a layer: kind, kernel, stride, channels, groups, and fused operations.

    form: layout in which the host arranges the layer's input, if it folds part of the window into channels.
    """
    if layer.is_block:
        return " > ".join(_describe(member, form if member is layer.layers[0] else None) for member in layer.layers)
    return " + ".join([_operation(layer, form), *_fused_operations(layer.epilogue)])


def _operation(layer: Layer, form: ActivationLayout | None) -> str:
    """Describe the first operation of a layer."""
    heads = f"{layer.heads} × " if layer.heads > 1 else ""
    if layer.gemm is not None:
        return _convolution(layer, layer.gemm, form)
    if layer.product is not None and layer.product.transposes:
        return f"matrix turned {layer.y.channels}x{layer.y.width}"
    if layer.product is not None:
        return f"{heads}product of two activations {layer.row_length}→{layer.y.channels // layer.heads}"
    if layer.reduce:
        return f"{layer.reduce} pool {_window(layer.window)}, {layer.x.channels} channels"
    if layer.softmax is not None:
        return f"{heads}softmax of {layer.row_length}"
    if layer.norm is not None:
        return f"{'layer' if layer.norm.centre else 'RMS'} norm of {layer.row_length}"
    if layer.multiply is not None:
        same_dims = layer.multiply.b.dims == layer.x.dims
        return f"multiply, {layer.x.channels} channels" + ("" if same_dims else " by one value each")
    return f"elementwise, {layer.x.channels} channels"


def _convolution(layer: Layer, gemm: Gemm, form: ActivationLayout | None) -> str:
    """Describe a product with constant weights, as a matrix product or a convolution."""
    window, channels = layer.window, layer.x.channels
    folded = form is not None and form.fold and form.window is not None
    if folded:
        assert form is not None and form.window is not None
        window = form.window
        channels //= window.kernel[1] * (window.kernel[0] if form.fold == "xy" else 1)
    sizes = f"{channels}→{layer.y.channels}"
    if window.pointwise and (layer.x.height, layer.x.width) == (1, 1):
        return f"product {sizes}"
    kind = f"conv {_window(window)}"
    if gemm.groups > 1 and gemm.groups == channels:
        kind, sizes = f"depthwise {kind}", str(channels) if layer.y.channels == channels else sizes
    elif gemm.groups > 1:
        kind = f"{kind}, {gemm.groups} groups"
    return f"{kind}, {sizes}" + (", folded by the host" if folded else "")


def _window(window: Window) -> str:
    """Return the kernel of a window as text, with strides and dilations that are not 1."""
    text = "x".join(map(str, window.kernel))
    if window.strides != (1, 1):
        text += f" stride {'x'.join(map(str, dict.fromkeys(window.strides)))}"
    if window.dilations != (1, 1):
        text += f" dilation {'x'.join(map(str, dict.fromkeys(window.dilations)))}"
    return text


def _fused_operations(epilogue: Epilogue) -> list[str]:
    """Return the names of the operations in an epilogue."""
    parts = []
    if epilogue.clip != (-128, 127):
        parts.append("clip")
    if epilogue.table is not None:
        parts.append("table")
    if epilogue.residual is not None:
        parts.append("add")
    return parts
