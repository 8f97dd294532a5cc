"""Compute float16 operators in float32 where onnxruntime has no float16 kernel.

    y = Exp(x)            x32 = Cast(x)  y32 = Exp(x32)
    z = Sigmoid(y)   ->   z32 = Sigmoid(y32)
    z: float16            z = Cast(z32)

onnxruntime's CPU kernels compute few operators in float16, most of which move elements. It surrounds the others with
Casts, and then removes a Cast to float16 whose result is cast back. A chain of such operators is therefore computed in
float32 and rounded once. A float16 operator whose neighbours are all cast is computed in float32, too. These roundings
decide on which side of a tie a QuantizeLinear rounds, so the import repeats them.
"""

from __future__ import annotations

import onnx_ir as ir

from celosia.compiler.graph.onnxruntime_rules.propagation import MOVING
from celosia.compiler.graph.operands import spec_of
from celosia.compiler.graph.simplify.redundant import remove_wires
from celosia.compiler.graph.values import attribute, attributes, constant, is_folded, is_op, only_use, subgraphs

HALF, SINGLE = ir.DataType.FLOAT16, ir.DataType.FLOAT
"""Element types float16 and float32."""
EIGHT_BITS = (ir.DataType.INT8, ir.DataType.UINT8)
"""Element types of bytes."""

KERNELS = frozenset((
    "Attention", "BitCast", "Cast", "CastLike", "Clip", "Compress", "Concat", "ConcatFromSequence", "DequantizeLinear",
    "Dropout", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "IsInf", "IsNaN",
    "LayerNormalization", "Max", "Min", "Mod", "Optional", "OptionalGetElement", "OptionalHasElement",
    "QuantizeLinear", "RMSNormalization", "Reshape", "ReverseSequence", "RotaryEmbedding", "Round", "Scatter",
    "ScatterElements", "ScatterND", "SequenceAt", "SequenceConstruct", "SequenceErase", "SequenceInsert", "Shape",
    "Shrink", "Sign", "SimplifiedLayerNormalization", "Slice", "Split", "SplitToSequence", "Squeeze", "TensorScatter",
    "Transpose", "Unsqueeze",
))  # fmt: skip
"""Operators of ONNX that onnxruntime 1.31 computes in float16 on x86-64."""
MICROSOFT_KERNELS = frozenset((
    "ExpandDims", "GatherBlockQuantized", "GatherND", "GroupQueryAttention", "Inverse", "MatMulNBits",
    "RotaryEmbedding", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
))  # fmt: skip
"""Operators of com.microsoft that onnxruntime computes in float16."""
SINCE = {"Clip": 12, "Max": 12, "Min": 12}
"""Operator -> the first opset with a float16 kernel, if not every opset has one."""
UNTIL = {"Dropout": 12}
"""Operator -> the first opset without a float16 kernel any more."""
BITS = {
    ir.DataType.BOOL: 8, ir.DataType.INT8: 8, ir.DataType.UINT8: 8, ir.DataType.INT16: 16, ir.DataType.UINT16: 16,
    ir.DataType.BFLOAT16: 16, HALF: 16, ir.DataType.INT32: 32, ir.DataType.UINT32: 32, SINGLE: 32,
    ir.DataType.INT64: 64, ir.DataType.UINT64: 64, ir.DataType.DOUBLE: 64,
}  # fmt: skip
"""Element type -> bits of an element."""


def compute_in_float32(model: ir.Model) -> None:
    """Let operators without a float16 kernel read and make float32, in bodies of operators too."""
    graphs = [model.graph, *model.graph.subgraphs()]
    if not any(
        value.dtype == HALF for graph in graphs for node in graph for value in (*node.inputs, *node.outputs) if value
    ):
        return
    version = model.opset_imports.get("", 1)
    remove_wires(model)
    for graph in graphs:
        _GraphWidening(graph, version).run()


class _GraphWidening:
    """The widening of one graph.

    widened_nodes: operators that become float32. inserted_casts: the Casts around them. wide_values: float16 value ->
    its Cast to float32.
    """

    def __init__(self, graph: ir.Graph | ir.GraphView | ir.Function, version: int) -> None:
        assert isinstance(graph, ir.Graph)
        self.graph, self.version = graph, version
        self.widened_nodes = {node for node in graph if self._lacks_kernel(node)}
        self.inserted_casts = set[ir.Node]()
        self.wide_values: dict[ir.Value, ir.Value] = {}

    def run(self) -> None:
        """Repeat onnxruntime's steps: place DequantizeLinears, choose operators, surround with Casts, remove Casts."""
        self._duplicate_dequantisers()
        self._move_dequantisers()
        for node in self.graph:
            if node not in self.widened_nodes and self._is_isolated(node):
                self.widened_nodes.add(node)
        folded = {node for node in self.graph if is_op(node, "Cast") and self._is_folded(node.outputs[0])}
        for node in [node for node in self.graph if node in self.widened_nodes]:
            self._widen(node)
        for node in [node for node in self.graph if is_op(node, "Cast") and node not in folded]:
            self._remove_casts(node)

    def _duplicate_dequantisers(self) -> None:
        """Give each operator that reads a DequantizeLinear one of its own, as onnxruntime does."""
        for node in [node for node in self.graph if is_op(node, "DequantizeLinear") and _is_half(node.outputs[0])]:
            value = node.outputs[0]
            uses = list(value.uses())
            local_uses = [use for use in uses if use.node.graph is self.graph]
            keeps_first = len(local_uses) == len(uses) and not value.is_graph_output()
            for number, use in enumerate(local_uses[1:] if keeps_first else local_uses):
                out = ir.Value(name=f"{value.name}_{number}", shape=value.shape, type=value.type)
                copy = ir.Node(node.domain, node.op_type, node.inputs, node.attributes.values(), outputs=[out])
                self.graph.insert_after(node, copy)
                use.node.replace_input_with(use.idx, out)

    def _move_dequantisers(self) -> None:
        """Move DequantizeLinears of one scale behind operators that move elements, as onnxruntime does."""
        waiting = [node for node in self.graph if is_op(node, "DequantizeLinear") and _is_half(node.outputs[0])]
        while waiting:
            node = waiting.pop()
            mover = only_use(node.outputs[0])
            if mover is None or not self._may_move(node, mover):
                continue
            integers, value = node.inputs[0], mover.outputs[0]
            moved = ir.Node(mover.domain, mover.op_type, [integers, *mover.inputs[1:]], mover.attributes.values())
            out = moved.outputs[0]
            out.name, out.shape, out.type = f"{value.name}_{integers.name}", value.shape, integers.type  # type: ignore[union-attr]
            self.graph.insert_before(mover, moved)
            for number, use in enumerate(list(value.uses())):
                result = ir.Value(name=f"{value.name}_{number}", shape=value.shape, type=value.type)
                dequantise = ir.Node(
                    node.domain, node.op_type, [out, *node.inputs[1:]], node.attributes.values(), outputs=[result]
                )
                self.graph.insert_after(moved, dequantise)
                use.node.replace_input_with(use.idx, result)
                waiting.append(dequantise)
            self.graph.remove([mover, node], safe=True)

    def _may_move(self, node: ir.Node, mover: ir.Node) -> bool:
        """Return whether the DequantizeLinear `node` changes places with the operator `mover` that reads it."""
        scale, value = constant(node.inputs[1]), mover.outputs[0]
        if not is_op(mover, *MOVING) or mover.inputs[0] is not node.outputs[0] or len(mover.outputs) > 1:
            return False
        if scale is None or scale.size != 1 or not scale > 0 or node.inputs[0] is None or is_folded(node.inputs[0]):
            return False
        if value.is_graph_output() or any(use.node.graph is not self.graph for use in value.uses()):
            return False
        return bool(mover.op_type != "MaxPool" or (self.version >= 12 and node.inputs[0].dtype in EIGHT_BITS))

    def _lacks_kernel(self, node: ir.Node) -> bool:
        """Return whether `node` reads float16 and onnxruntime has no float16 kernel for it."""
        if subgraphs(node) or not any(map(_is_half, node.inputs)):
            return False
        if node.domain == "com.microsoft":
            return node.op_type not in MICROSOFT_KERNELS
        if node.domain == "celosia":
            return node.op_type == "RoundBlocks"
        if node.domain not in ("", "ai.onnx"):
            return False
        first, end = SINCE.get(node.op_type, 0), UNTIL.get(node.op_type, self.version + 1)
        return node.op_type not in KERNELS or not first <= self.version < end

    def _is_isolated(self, node: ir.Node) -> bool:
        """Return whether `node` computes in float16 but all its float16 neighbours become float32."""
        if subgraphs(node) or any(value.is_graph_output() for value in node.outputs):
            return False
        inputs = [value for value in node.inputs if value is not None]
        if node.domain == "celosia" or not any(map(_is_half, inputs)) or all(map(self._is_folded, inputs)):
            return False
        if all(value.producer() is None or self._is_folded(value) for value in inputs):
            return False
        examined = (
            inputs[:1] if spec_of(node).repeated else inputs
        )  # of variadic inputs, onnxruntime examines the first
        producers = [value.producer() for value in examined if _is_half(value) and not self._is_folded(value)]
        half_outputs = [value for value in node.outputs if _is_half(value)]
        readers = [use.node for value in half_outputs for use in value.uses()]
        return bool(half_outputs) and all(other in self.widened_nodes for other in (*filter(None, producers), *readers))

    def _is_folded(self, value: ir.Value) -> bool:
        """Return whether onnxruntime replaces `value` by a constant before it looks for kernels."""
        if value.const_value is not None:
            return True
        node = value.producer()
        if node is None or node.graph is not self.graph or node in self.widened_nodes or subgraphs(node):
            return False
        if is_op(node, "DequantizeLinear") or not node.inputs:
            return False
        return all(value is None or self._is_folded(value) for value in node.inputs)

    def _widen(self, node: ir.Node) -> None:
        """Let `node` read and make float32, between Casts; its float16 results keep their names behind the Casts."""
        for number, value in enumerate(node.inputs):
            if value is not None and _is_half(value):
                if value not in self.wide_values:
                    self.wide_values[value] = self._insert_cast(value, SINGLE, before=node)
                node.replace_input_with(number, self.wide_values[value])
        if attribute(node, "dtype", 0) == HALF.value:
            node.attributes["dtype"] = ir.AttrInt64("dtype", SINGLE.value)
        for value in node.outputs:
            if not _is_half(value):
                continue
            name, was_returned = value.name, value.is_graph_output()
            value.type, value.name = ir.TensorType(SINGLE), f"{name}_float32"
            narrow = self._insert_cast(value, HALF, after=node)
            narrow.name = name
            cast = narrow.producer()
            for use in [use for use in value.uses() if use.node is not cast]:
                use.node.replace_input_with(use.idx, narrow)
            for place, output in enumerate(self.graph.outputs if was_returned else ()):
                if output is value:
                    self.graph.outputs[place] = narrow

    def _insert_cast(
        self, value: ir.Value, kind: ir.DataType, before: ir.Node | None = None, after: ir.Node | None = None
    ) -> ir.Value:
        """Insert a Cast of `value` to `kind` before or after a node, and return its output."""
        out = ir.Value(name=f"{value.name}_{kind.name.lower()}", shape=value.shape, type=ir.TensorType(kind))
        node = ir.Node("", "Cast", [value], attributes(to=kind.value), outputs=[out])
        if before is not None:
            self.graph.insert_before(before, node)
        elif after is not None:
            self.graph.insert_after(after, node)
        self.inserted_casts.add(node)
        return out

    def _remove_casts(self, node: ir.Node) -> None:
        """Remove the Casts behind the Cast `node` that undo it, and `node` if nothing else reads it.

        The rules are onnxruntime's: a Cast that the model itself holds loses its rounding if inserted ones follow.
        """
        source, value = node.inputs[0], node.outputs[0]
        readers = [use.node for use in value.uses()]
        casts = [reader for reader in readers if is_op(reader, "Cast") and reader.graph is self.graph]
        if source is None or node.graph is None or self.inserted_casts.isdisjoint((node, *casts)):
            return
        is_lossy = self._is_lossy(source, value, node)
        if is_lossy and any(self._is_lossy(cast.outputs[0], value, cast) for cast in casts):
            return
        for cast in casts:
            out = cast.outputs[0]
            if out.dtype == source.dtype and not out.is_graph_output():
                ir.convenience.replace_all_uses_with(out, source)
                self.graph.remove(cast, safe=True)
            elif len(casts) == len(readers) and not value.is_graph_output():
                cast.replace_input_with(0, source)
        if not value.uses() and not value.is_graph_output():
            self.graph.remove(node, safe=True)

    def _is_lossy(self, source: ir.Value, target: ir.Value, node: ir.Node) -> bool:
        """Return whether a Cast of `source` to the type of `target` may change a value; inserted Casts do not count."""
        source_type, target_type = source.dtype, target.dtype
        if source_type not in BITS or target_type not in BITS or source_type is None or target_type is None:
            return True
        from_float, to_float = source_type.is_floating_point(), target_type.is_floating_point()
        unsigned = (
            source_type.is_integer() and not source_type.is_signed(),
            target_type.is_integer() and not target_type.is_signed(),
        )
        if unsigned[1] and not unsigned[0] and source_type != ir.DataType.BOOL:
            return True
        if from_float and not to_float:
            return True
        if (unsigned[0] and not unsigned[1] and not to_float) or (source_type.is_integer() and to_float):
            return BITS[target_type] <= BITS[source_type]
        if {source_type, target_type} == {HALF, ir.DataType.BFLOAT16}:
            return True
        return BITS[source_type] > BITS[target_type] and node not in self.inserted_casts


def _is_half(value: ir.Value | None) -> bool:
    """Return whether `value` is a float16 tensor."""
    return value is not None and isinstance(value.type, ir.TensorType) and value.dtype == HALF
