"""Steps, kernels and constants of a Program, with names and addresses in place of graph objects."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.cpu.function import CpuFunction
from celosia.compiler.cpu.parse import parse
from celosia.compiler.cpu.schedule.operator_fusion import fuse_nodes, saved_traffic
from celosia.compiler.expr import placeholder
from celosia.compiler.expr.unique_names import unused_name
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.launches import LaunchPlan
from celosia.compiler.graph.levels import levels_of
from celosia.compiler.graph.names import value_names
from celosia.compiler.graph.select import ActivationLayout, Partition
from celosia.compiler.graph.select.placement import Reads, cache_of
from celosia.compiler.graph.values import captured, constant, dtype_name, shape
from celosia.compiler.launch.describe import describe
from celosia.compiler.launch.image import Image
from celosia.compiler.launch.memory_plan import plan_arena
from celosia.compiler.ops import OPS, VIEWS, Unsupported, build, op_spec
from celosia.compiler.ops.bit_serial import LEVELS
from celosia.compiler.ops.node import CpuNode, InputType, is_mapped
from celosia.compiler.ops.types import TYPES
from celosia.compiler.program import (
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
from celosia.compiler.program.host.op import DOMAINS, HostError, HostOp, bodies, check_size
from celosia.compiler.program.model import BY_ROWS
from celosia.compiler.switches import is_on
from celosia.compiler.tensorize.block_space import Group
from celosia.compiler.tensorize.plan import LayerPart
from celosia.hw.spec.config import Config


def assemble(model: ir.Model, cfg: Config, partition: Partition, steps: list[Any], image: Image) -> Program:
    """Make the Program of a graph whose layers are placed, ordered and have their instructions.

    The graph does not change.

    Raises ModelError for an operator that cannot be compiled for the CPU, or is not known.
    """
    try:
        return _Assembler(model, cfg, partition, steps, image).run()
    except HostError as error:
        raise ModelError(str(error)) from None


class _Assembler:
    """State of `assemble`: tensors, constants and kernels of the Program so far."""

    def __init__(self, model: ir.Model, cfg: Config, selection: Partition, steps: list[Any], image: Image) -> None:
        self.model, self.cfg, self.selection, self.plan, self.image = model, cfg, selection, steps, image
        self.reasons = dict(selection.cpu)  # why operators are on the CPU
        self.types: dict[ir.Value, tuple[tuple[int, ...], ir.DataType]] = {}
        """Shape and element type of tensors that kernels make, which the graph may lack."""
        self.opset = model.graph.opset_imports.get("", 21)
        self.opsets = dict(model.graph.opset_imports)
        self.views = {node for node in plan_nodes(steps) if _is_view(node)}
        self.tensors: dict[str, TensorInfo] = {}
        self.constants: dict[str, NDArray[Any]] = {}
        self.kernels: list[CompiledKernel] = []
        self.finished: set[ir.Node] = set()  # operators whose steps are made
        self.viewing: set[ir.Node] = set()  # those among them that are steps without a kernel
        self.names = value_names(model.graph)  # of all tensors, also of those made here
        self.dims: dict[ir.Value, str] = {}  # the constant with the shape of each view
        self.loops: dict[int, int] = {}  # number of each layer's loops, by id
        self.printed: list[Any] = []  # those loops
        self.owned: set[str] = set()  # tensors in the arena, if they are not returned
        plans = [step for step in steps if isinstance(step, LaunchPlan)]
        given = [value for plan in plans for choice in plan.choices for value, _ in choice.reads.values()]
        self.launched = set(given)  # what launches read, in the shape that it has had until here

    def run(self) -> Program:
        """The Program."""
        graph = self.model.graph
        launches = iter(self.image.launches)
        steps: list[Step] = []
        waiting: list[ir.Node] = []  # operators since the last step of another kind, for kernels
        for step in self.plan:
            if isinstance(step, ir.Node) and self._compiles(step):
                waiting.append(step)
                continue
            steps += self._kernels(waiting)
            waiting = []
            steps.append(self._launch(step, next(launches)) if isinstance(step, LaunchPlan) else self._host(step))
            self.finished.update(plan_nodes([step]))
            self.finished.update(node for choice in getattr(step, "choices", ()) for node in choice.nodes)
        steps += self._kernels(waiting)
        outputs = tuple(self._border(value) for value in graph.outputs)
        for value in graph.outputs:
            fixed = constant(value)
            if fixed is not None:
                self.constants[value.name or ""] = fixed
        program = Program(
            "", self.cfg, tuple(self._border(value) for value in graph.inputs), outputs, self.tensors, steps,
            {name: array if is_mapped(array) else align(array) for name, array in self.constants.items()},
            self.kernels, self.image.constants, self.image.constants_address, self.image.size,
            self.image.arena_lower_bound, 0, self._placements(),
        )  # fmt: skip
        program.loops = self.printed
        program.arena = plan_arena(steps, self.kernels, self.tensors, [output.name for output in outputs])
        return program

    def _tensor(self, value: ir.Value) -> TensorInfo:
        """Add a tensor to those of the Program. ModelError where its shape or element type is not known."""
        name = value.name or ""
        dims, dtype = self._shape(value), self._dtype(value)
        if dims is None or dtype is None:
            raise ModelError(f"the shape of tensor {name!r} cannot be inferred; export the model with fixed shapes")
        if dtype == ir.DataType.UNDEFINED:
            raise ModelError(f"tensor {name!r} has no element type; export the model with types")
        self.tensors[name] = TensorInfo(name, dtype.numpy().name, dims)
        return self.tensors[name]

    def _shape(self, value: ir.Value) -> tuple[int, ...] | None:
        """Return the static shape of a tensor, as its kernel makes it or the graph has it; None where it is open."""
        return self.types[value][0] if value in self.types else shape(value)

    def _dtype(self, value: ir.Value) -> ir.DataType | None:
        """Return the element type of a tensor, as its kernel makes it or the graph has it."""
        return self.types[value][1] if value in self.types else value.dtype

    def _is_plain(self, value: ir.Value) -> bool:
        """Return whether kernels can read a tensor: its shape is known, and its element type is one of theirs."""
        return value in self.types or _is_plain(value)

    def _border(self, value: ir.Value) -> TensorInfo:
        """Describe an input or output of the model, which may be a sequence, or have a shape known at run time only."""
        kind, inner = "tensor", value.type
        while isinstance(inner, (ir.SequenceType, ir.OptionalType)):
            kind = "sequence" if isinstance(inner, ir.SequenceType) else "optional"
            inner = inner.elem_type
        if kind == "tensor" and self._shape(value) is not None:
            return self._tensor(value)
        dims = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in value.shape or ())
        return TensorInfo(value.name or "", dtype_name(value), dims, kind)

    # The CPU ---------------------------------------------------------------------------------------------------

    def _info(self, node: ir.Node) -> NodeInfo:
        name = node.name or f"{node.op_type}:{node.outputs[0].name}"
        return NodeInfo(name, node.op_type, self.reasons.get(node, "the host needs this view"))

    def _keep(self, value: ir.Value | None) -> str:
        """The name of an input, whose value goes into the Program where it is constant."""
        if value is None:
            return ""
        fixed = constant(value)
        if fixed is not None:
            self.constants[value.name or ""] = fixed
        elif self._shape(value) is not None and (value in self.types or isinstance(value.type, ir.TensorType)):
            self._tensor(value)
        return value.name or ""

    def _host(self, node: ir.Node) -> HostStep:
        """A step for an operator that is no loop nest, or whose shapes are known only at run time."""
        info = self._info(node)
        op = parse(ir.serde.serialize_node(node), self.opsets)
        self._check_known(op, info)
        inputs = tuple(self._keep(value) for value in (*node.inputs, *captured(node)))
        for out in node.outputs:
            if out.name:
                self._keep(out)
        return HostStep((info,), inputs, tuple(op.outputs), op)

    def _check_known(self, op: HostOp, info: NodeInfo) -> None:
        """ModelError where an operator, or one inside its subgraphs, is not supported on the host."""
        known = (op.domain, op.op) in HOST or (op.domain in DOMAINS and op.op in OPS)
        if not known:
            where = f" of domain {op.domain!r}" if op.domain else ""
            inside = "" if op.op == info.op else f" inside {info.op} ({info.name})"
            raise ModelError(f"operator {op.op}{where} ({op.name or info.name}){inside} is not supported")
        for body in bodies(op):
            for inner in body.ops:
                self._check_known(inner, info)

    def _compiles(self, node: ir.Node) -> bool:
        """Whether `node` becomes part of a kernel now. ModelError where it can become nothing."""
        if node.domain not in DOMAINS or node.op_type not in OPS:
            return False
        for number, value in enumerate(node.inputs):
            if value is None:
                continue
            if not self._is_plain(value) or (number in op_spec(node.op_type).shape_inputs and constant(value) is None):
                if node in self.views:  # it is not built here; its declared type does not count
                    self._give_type_of_input(node)
                return node in self.views
        types = [None if value is None else self._type(value) for value in node.inputs]
        tensors = [None if each is None else placeholder(each.shape, each.dtype, "x") for each in types]
        values = [None if each is None else each.value for each in types]
        attrs = parse(ir.serde.serialize_node(node), self.opsets).attrs
        try:
            built = build(
                node.op_type, attrs, tensors, values, outputs=len(node.outputs), opset=self.opset, name=node.name or ""
            )
        except Unsupported as error:
            if ("", node.op_type) in HOST and (node.op_type == "Dropout" or node.op_type not in VIEWS):
                return False
            where = f"{node.op_type} ({self._info(node).name})"
            raise ModelError(f"operator {where} cannot be compiled for the CPU: {error}") from None
        for value, tensor in zip(node.outputs, built):
            if value in self.launched and shape(value) != tensor.shape:
                raise ModelError(
                    f"operator {node.op_type} ({self._info(node).name}) makes {list(tensor.shape)}, and "
                    f"{list(shape(value) or ())} by its attributes"
                )
            self.types[value] = tensor.shape, ir.DataType.from_numpy(np.dtype(tensor.dtype))
            check_size(tensor.nbytes, f"output {value.name!r} of {node.op_type} ({self._info(node).name})")
        return True

    def _give_type_of_input(self, view: ir.Node) -> None:
        """Give the output of a view the element type of its input."""
        x, y = view.inputs[0], view.outputs[0]
        assert x is not None
        dims, dtype = self._shape(y), self._dtype(x)
        if dims is not None and dtype is not None:
            self.types[y] = dims, dtype

    def _type(self, value: ir.Value) -> InputType:
        """The shape and element type of a value, with its content where it is constant."""
        fixed = constant(value)
        if fixed is not None:
            return InputType.of(fixed)
        info = self._tensor(value)
        return InputType(info.shape, info.dtype)

    def _kernels(self, nodes: list[ir.Node]) -> list[CpuStep]:
        """Steps for operators that run one after the other: one for each group that shares a kernel."""
        inside = set(nodes)
        producer_of = {value.name: node for node in nodes for value in node.outputs if value.name}
        needed = {
            value.name or "" for node in nodes for value in node.outputs
            if value.is_graph_output() or any(use.node not in inside for use in value.uses())
        }  # fmt: skip
        steps = []
        apart = [self._cpu_node(node) for node in nodes]
        for members in fuse_nodes(apart, sorted(needed)) if is_on("fusion") else [[each] for each in apart]:
            steps.append(self._step(members, [producer_of[next(filter(None, member.outputs))] for member in members]))
        return steps

    def _cpu_node(self, node: ir.Node) -> CpuNode:
        """Describe a node for the CPU compiler: operator, names of inputs and outputs, attributes."""
        outputs = tuple((out.name or "") if out.uses() or out.is_graph_output() else "" for out in node.outputs)
        if not any(outputs):
            outputs = tuple(out.name or "" for out in node.outputs)
        inputs = tuple("" if value is None else value.name or "" for value in node.inputs)
        if node in self.views:
            return CpuNode("Reshape", (inputs[0], self._dims_name(node.outputs[0])), outputs[:1], {}, node.name or "")
        attrs = parse(ir.serde.serialize_node(node), self.opsets).attrs
        factors = [(number, node.inputs[number]) for number in op_spec(node.op_type).factors]
        if any(
            constant(value) is None and levels_of(value) for _, value in factors
        ):  # large weights are looked at last
            attrs |= {LEVELS: {number: levels_of(value) for number, value in factors}}
        return CpuNode(node.op_type, inputs, outputs, attrs, node.name or "")

    def _step(self, members: list[CpuNode], nodes: list[ir.Node]) -> CpuStep:
        """Compile operators that share a kernel, and make the step that runs it."""
        infos = tuple(self._info(node) for node in nodes)
        outputs = tuple(name for name in members[-1].outputs if name)
        for out in nodes[-1].outputs:
            if out.name in outputs:
                self._tensor(out)
        self.finished.update(nodes)
        if all(node in self.views for node in nodes):
            self.viewing.update(nodes)
            return CpuStep(infos, (self._keep(nodes[0].inputs[0]),), outputs)
        inner = {name for member in members for name in member.outputs}
        values = {value.name or "": value for node in nodes for value in node.inputs if value is not None}
        types = {name: self._type(value) for name, value in values.items() if name not in inner}
        for node in nodes:
            if node in self.views:
                dims = np.array(self._shape(node.outputs[0]), np.int64)
                types[self._dims_name(node.outputs[0])] = InputType.of(dims)
        dead = frozenset(name for name in types if name in values and self._is_dead(values[name]))
        if any(out.is_graph_output() for out in nodes[-1].outputs):
            dead = frozenset()  # what is returned lies in an array of its own
        try:
            kernel, names, rearranged = CpuFunction(tuple(members), types, outputs, self.opset).compile(
                dead, self.names
            )
        except Unsupported as error:
            where = f"{infos[-1].op} ({infos[-1].name})"
            raise ModelError(f"operator {where} cannot be compiled for the CPU: {error}") from None
        if "popcount4(" in kernel.loops:
            self._say_bits(nodes)
            infos = tuple(self._info(node) for node in nodes)
        self.constants |= rearranged
        for name in names:
            if name not in rearranged:
                self._keep(values[name])
        self.kernels.append(kernel)
        self.owned.update(outputs)
        sizes = {out.name or "": self._bytes(out) for node in nodes for out in node.outputs}
        views = {node.outputs[0].name or "" for node in nodes if node in self.views}
        return CpuStep(infos, names, outputs, len(self.kernels) - 1, saved_traffic(members, sizes, views))

    def _bytes(self, value: ir.Value) -> int:
        dtype = self.types[value][1].numpy().name if value in self.types else dtype_name(value)
        return prod(self._shape(value) or ()) * itemsize(dtype)

    def _say_bits(self, nodes: list[ir.Node]) -> None:
        """Add to the reasons of operators whose kernel multiplies bit by bit that it does."""
        for node in nodes:
            if numbers := op_spec(node.op_type).factors:
                levels = [levels_of(node.inputs[number]) for number in numbers]
                bits = " and ".join(str(operand.bits) for operand in levels if operand is not None)
                self.reasons[node] += f"; its operands have {bits} bits: products are `and` and popcount"

    def _dims_name(self, value: ir.Value) -> str:
        """The name of the constant that holds the shape of a view."""
        if value not in self.dims:
            self.dims[value] = unused_name(f"{value.name}.shape", self.names)
        return self.dims[value]

    def _is_dead(self, value: ir.Value) -> bool:
        """Whether `value` lies in the arena and none of the steps to come needs what is in its memory."""
        while (producer := value.producer()) is not None and producer in self.viewing:
            value = producer.inputs[0]  # type: ignore[assignment]
        return value.name in self.owned and not self._is_needed(value)

    def _is_needed(self, value: ir.Value) -> bool:
        """Whether a value, or a view of it, is an output or has a reader that has not run."""
        users = [use.node for use in value.uses()]
        return (
            value.is_graph_output()
            or any(node not in self.finished for node in users)
            or any(self._is_needed(node.outputs[0]) for node in users if node in self.viewing)
        )

    # The accelerator -------------------------------------------------------------------------------------------

    def _launch(self, plan: LaunchPlan, launch: Any) -> LaunchStep:
        """Make the step that packs inputs, runs a launch, and unpacks outputs."""
        packs, unpacks = [], []
        given = {storage: source for choice in plan.choices for storage, source in choice.reads.items()}
        for storage, (value, form) in given.items():
            cache = cache_of(value) if storage.lasting and form.fold in BY_ROWS else None
            whose = "" if cache is None else cache.name or ""
            packs.append(Pack(self._keep(value), form.info, self.image.addresses[storage], storage.groups, whose))
        for value in plan.taken:
            info = self._tensor(value)
            self.owned.add(info.name)
            act, form = self.selection.written[value], self.selection.forms[value]
            address = self.image.addresses[act.storage]
            unpacks.append(Unpack(info.name, form.info, address, act.storage_groups, act.group_offset))
        layers = tuple(
            LayerInfo(
                choice.layer.name, choice.layer.kind, tuple(node.name or "" for node in choice.nodes),
                choice.layer.macs, loaded, stored, choice.note,
                tuple(info for part in parts for info in self._parts(part)),
                choice.layer.intermediate_bytes(self.cfg), round(choice.separate_cycles),
                round(choice.block_cycles),
                describe(choice.layer, _folded(choice.reads)) + ", packed weights" * _packed(parts),
            )
            for choice, loaded, stored, parts in zip(
                plan.choices, launch.bytes_loaded, launch.bytes_stored, launch.parts, strict=True
            )
        )  # fmt: skip
        return LaunchStep(launch.address, launch.count, layers, launch.layer_of, tuple(packs), tuple(unpacks))

    def _parts(self, part: LayerPart) -> list[PartInfo]:
        """Describe the parts of a layer: workload, tiling, and the number of the printed loops."""
        number = self.loops.setdefault(id(part.loops), len(self.loops))
        if number == len(self.printed):
            self.printed.append(part.loops)
        return [PartInfo(workload.text, tiling.to_json(), number) for workload, tiling in part.tilings]

    def _placements(self) -> list[dict[str, str]]:
        """List where each operator of the graph runs, and why."""
        placed = {node: choice for choice in self.selection.choices for node in choice.nodes}
        rows = []
        for node in self.model.graph:
            row = {"name": node.name or f"{node.op_type}:{node.outputs[0].name}", "op": node.op_type}
            if node in placed:
                layer = placed[node].layer
                how = f"layer {layer.name}" if placed[node].nodes[0] is node else f"joined to layer {layer.name}"
                note = f"; {placed[node].note}" if placed[node].note else ""
                rows.append(row | {"place": "accelerator", "reason": how + note})
            elif node in self.selection.views:
                rows.append(row | {"place": "free", "reason": self.selection.views[node]})
            else:
                rows.append(row | {"place": "cpu", "reason": self.reasons[node]})
        return rows


def _packed(parts: list[LayerPart]) -> bool:
    """Whether some of a layer's weights lie packed in DRAM."""
    asked = [workload for part in parts for workload, _ in part.tilings]
    layers = [each for workload in asked for each in (workload.layers if isinstance(workload, Group) else (workload,))]
    return any(layer.packed for layer in layers)


def plan_nodes(steps: list[Any]) -> list[ir.Node]:
    """The operators on the CPU."""
    return [step for step in steps if isinstance(step, ir.Node)]


def _is_plain(value: ir.Value) -> bool:
    """Whether kernels can read `value`: a tensor of known shape, and of an element type of theirs."""
    known = isinstance(value.type, ir.TensorType) and value.dtype not in (None, ir.DataType.UNDEFINED)
    return known and shape(value) is not None and value.dtype.numpy().name in TYPES  # type: ignore[union-attr]


def _is_view(node: ir.Node) -> bool:
    """Whether the output of `node` is its input under another shape."""
    if node.domain not in DOMAINS or node.op_type not in VIEWS or node.inputs[0] is None:
        return False
    used = [out for out in node.outputs if out.uses() or out.is_graph_output()]
    if used != list(node.outputs[:1]) or (node.op_type == "Dropout" and len(node.inputs) > 2):
        return False
    x, y = node.inputs[0], node.outputs[0]
    return _is_plain(x) and _is_plain(y) and prod(shape(x) or ()) == prod(shape(y) or ())


def _folded(reads: Reads) -> ActivationLayout | None:
    """Find the layout in which the host folds a window of the layer's input into channels; None where it does not."""
    return next((form for _, form in reads.values() if form.window is not None), None)
