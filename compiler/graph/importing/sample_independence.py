"""Prove, operator by operator, that a model computes each sample of a batch alone.

A tensor holds samples where its first axis counts them, and its part number i depends only on sample number i of the
inputs. A tensor is common where it depends on no sample. The rule of an operator in RULES says when its result holds
samples, whatever their number. An operator without a rule, or that breaks its rule, ends the proof with a reason.

    x: samples [N, 8]    y = MatMul(x, w)                y: samples, each row of a product is made of one row of x
                         z = Softmax(y, axis=0)          no: "Softmax (z): axis 0 counts samples"

`why_samples_mix` is the proof; the sizes that it follows, a node as its rule sees it, and the rules come behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import prod
from typing import Any

import onnx_ir as ir

from celosia.compiler.cpu.parse import parse
from celosia.compiler.graph.operands import joins_parts
from celosia.compiler.graph.values import captured, constant, shape
from celosia.compiler.ops import operators_with
from celosia.compiler.ops.reductions import REDUCTIONS
from celosia.compiler.program.host.op import DOMAINS, bodies
from celosia.compiler.program.host.shape_rules import slice_positions
from celosia.compiler.program.op_spec import Kind, OpSpec, find_operand, op_spec, quantised_forms


def why_samples_mix(model: ir.Model, inputs: Collection[str]) -> str:
    """Return why samples of `inputs`, counted by first axes, may depend on each other; "" if they are proved not to."""
    graph = model.graph
    samples = {value for value in graph.inputs if value.name in inputs}
    sizes: dict[ir.Value, Sizes] = {}
    for value in graph.initializers.values():
        _add_constant(value, sizes)
    opset = graph.opset_imports.get("", 21)
    for node in graph:
        name = f"{node.op_type} ({node.name or node.outputs[0].name})"
        read = [value for value in node.inputs if value is not None]
        if node.op_type == "CastLike":  # only the type of its second input counts
            read = read[:1]
        for value in read:
            _add_constant(value, sizes)
        computed_sizes = _sizes_computed_by(node, samples, sizes)
        if computed_sizes is not None:
            sizes[node.outputs[0]] = computed_sizes
            continue
        reads_count = any(COUNT in sizes.get(value, ()) for value in read)
        if not reads_count and not samples.intersection([*read, *captured(node)]):
            continue
        op = parse(ir.serde.serialize_node(node), dict(graph.opset_imports))
        if any(bodies(op)):
            return f"{name} has subgraphs"
        if node.op_type not in RULES or node.domain not in DOMAINS:
            return f"{name} may mix samples"
        if reads_count and node.op_type not in TAKES_COUNT:
            return f"{name} computes with the number of samples"
        try:
            RULES[node.op_type](RuledNode(node, op.attrs, opset, samples, sizes))
        except BatchDependence as reason:
            return f"{name} may mix samples: {reason}"
        samples.update(node.outputs)
    for value in graph.outputs:
        if value not in samples:
            return f"output {value.name!r} does not count samples"
    return ""


def _add_constant(value: ir.Value, sizes: dict[ir.Value, Sizes]) -> None:
    """Add a constant list of integers to `sizes`, since it may be a list of sizes or axes."""
    if value in sizes or value.const_value is None or value.const_value.size > 64:
        return
    array = constant(value)
    if array is not None and array.dtype.kind in "iu" and array.ndim <= 1:
        sizes[value] = [int(number) for number in array.reshape(-1)]


def _sizes_computed_by(node: ir.Node, samples: set[ir.Value], sizes: dict[ir.Value, Sizes]) -> Sizes | None:
    """Return the list of sizes that `node` computes, as far as it is known; None if it computes none.

    Lists without COUNT and without unknown elements give None, too, since folding makes them constants. The sizes say
    whether a Reshape, Expand or Slice keeps the samples apart.
    """
    first = node.inputs[0] if node.inputs else None
    if node.op_type == "Shape" and first is not None:
        if first.shape is None:
            return None
        start, end = (node.attributes.get(name) for name in ("start", "end"))
        dims: Sizes = [size if isinstance(size, int) else None for size in first.shape]
        dims[:1] = [COUNT] if first in samples else dims[:1]
        return dims[start.as_int() if start else 0 : end.as_int() if end else None]
    lists = [sizes.get(value) if value is not None else None for value in node.inputs]
    if not lists or any(sizes_of_operand is None for sizes_of_operand in lists) or not _is_list(node.outputs[0]):
        return None
    operand_sizes: list[Sizes] = [sizes_of_operand or [] for sizes_of_operand in lists]
    if not any(COUNT in sizes_of_operand or None in sizes_of_operand for sizes_of_operand in operand_sizes):
        return None
    if node.op_type in ("Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape"):  # of one axis, or none
        return operand_sizes[0]
    if joins_parts(node):
        return [size for sizes_of_operand in operand_sizes for size in sizes_of_operand]
    data, *others = operand_sizes
    if node.op_type == "Gather" and all(isinstance(i, int) and -len(data) <= i < len(data) for i in others[0]):
        return [data[i] for i in others[0]]
    if node.op_type == "Slice" and all(isinstance(i, int) for sizes_of_operand in others for i in sizes_of_operand):
        starts, ends, steps = (find_operand("Slice", operand_sizes, name) for name in ("starts", "ends", "steps"))
        positions = slice_positions(len(data), starts[0], ends[0], steps[0] if steps else 1) if starts and ends else ()
        return [data[position] for position in positions] if starts and ends else None
    return None


def _is_list(value: ir.Value) -> bool:
    """Return whether a tensor is known to have one axis, or none."""
    return value.shape is not None and len(value.shape) <= 1


COUNT = "N"
"""The number of samples, as an element of the list of sizes that Shape and operators on its result compute."""
TAKES_COUNT: set[str] = set()
"""Operators that may read the number of samples, as the size of their result's first axis."""
Sizes = list[Any]
"""Elements of a list of sizes: numbers, COUNT, and None for a number that is known at run time only."""


class BatchDependence(Exception):
    """Samples depend on each other, or may; the message is the reason."""


@dataclass
class RuledNode:
    """An operator as its rule sees it.

    op: the node. attrs: its attributes. opset: of ONNX's domain. samples: values that hold samples, so far. sizes:
    lists of sizes that are known, so far.
    """

    op: ir.Node
    attrs: dict[str, Any]
    opset: int
    samples: set[ir.Value]
    sizes: dict[ir.Value, Sizes]

    @property
    def spec(self) -> OpSpec:
        """The OpSpec of the operator."""
        return op_spec(self.op.op_type)

    def number(self, operand: str | int) -> int:
        """Return the number of an input, which may be given by its name."""
        return operand if isinstance(operand, int) else self.spec.number(operand)

    def input(self, operand: str | int) -> ir.Value | None:
        """Return the value of an input, by number or name; None where it is left out."""
        number = self.number(operand)
        return self.op.inputs[number] if number < len(self.op.inputs) else None

    def holds(self, number: int) -> bool:
        """Return whether an input holds samples."""
        return self.input(number) in self.samples

    def rank(self, number: int) -> int:
        """Return the number of axes of an input. Raises BatchDependence where it is not known."""
        return rank_of(self.input(number))

    def axis(self, default: int | None, number: int = 0) -> int:
        """Return the attribute `axis`, counted from the front of input `number`. Raises BatchDependence without one."""
        axis, rank = self.attrs.get("axis", default), self.rank(number)
        if axis is None:
            raise BatchDependence("it has no axis")
        return int(axis) + rank if axis < 0 else int(axis)

    def list_of(self, operand: str | int) -> Sizes:
        """Return the list of sizes that an input holds. Raises BatchDependence where it is known at run time only."""
        value = self.input(operand)
        known = self.sizes.get(value) if value is not None else None
        if known is None or (None in known and self.op.op_type not in TAKES_COUNT):
            raise BatchDependence(f"its input {self.number(operand)} is known at run time only")
        return known

    def axes(self) -> list[int] | None:
        """Return the axes that the operator has as an attribute or an operand, counted from the front; None without."""
        if "axes" in self.attrs:
            axes = self.attrs["axes"]
        elif self.input("axes") is not None:
            axes = self.list_of("axes")
        else:
            return None
        rank = self.rank(0)
        return [int(axis) + rank if axis < 0 else int(axis) for axis in axes]

    def require_samples_only_in(self, *numbers: int) -> None:
        """Raise BatchDependence where other inputs than these hold samples."""
        for number in range(len(self.op.inputs)):
            if number not in numbers and self.holds(number):
                raise BatchDependence(f"its input {number} depends on samples")


def rank_of(value: ir.Value | None) -> int:
    """Return the number of axes of a tensor. Raises BatchDependence where it is not known."""
    if value is None or value.shape is None:
        raise BatchDependence(f"the shape of {value.name if value is not None else 'an input'!r} is not known")
    return len(value.shape)


Rule = Callable[[RuledNode], None]
"""Return if the operator's outputs hold samples where its inputs do; raise BatchDependence where they may not."""
RULES: dict[str, Rule] = {}
"""Operator -> its rule."""


def rule(*names: str, takes_count: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for operators and for their quantised forms in models; it replaces a more general earlier rule.

    takes_count: whether the operators may read the number of samples.
    """
    forms = [
        form for form in quantised_forms(*names) if op_spec(form).domain != "celosia"
    ]  # celosia's own forms are in no imported model

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys((*names, *forms), function))
        TAKES_COUNT.update(names if takes_count else ())
        return function

    return register


@rule(*(operators_with("kind", Kind.INJECTIVE) - operators_with("moves")), "Identity", "Where", "BiasGelu", "FastGelu")
def check_elementwise(node: RuledNode) -> None:
    """Require that operands with samples have the result's rank, and others one part for all samples."""
    rank = max(rank_of(value) for value in node.op.inputs if value is not None)
    for value in node.op.inputs:
        if value is None:
            continue
        if value in node.samples:
            if rank_of(value) != rank:
                raise BatchDependence(f"{value.name!r} has fewer axes than the result")
        elif rank_of(value) == rank:
            dims = shape(value)
            if dims is None or (dims and dims[0] != 1):
                raise BatchDependence(f"{value.name!r} has a part for each sample")


@rule("QuantizeLinear", "DequantizeLinear")
def check_scales(node: RuledNode) -> None:
    """Require that scales lie neither along the samples nor by blocks."""
    node.require_samples_only_in(0)
    if rank_of(node.op.inputs[1]) > 0 and node.axis(1) == 0:
        raise BatchDependence("its scales are along the axis that counts samples")
    if node.attrs.get("block_size"):
        raise BatchDependence("its scales are by blocks")


@rule(
    *operators_with("windows"), "BatchNormalization", "DepthToSpace", "GlobalAveragePool", "GlobalLpPool",
    "GlobalMaxPool", "GroupNormalization", "InstanceNormalization", "LRN", "SpaceToDepth",
)  # fmt: skip
def check_images(node: RuledNode) -> None:
    """Accept operators that compute each image alone, unless they are in training or return indices into the batch."""
    node.require_samples_only_in(0)
    if node.op.op_type == "BatchNormalization" and (node.attrs.get("training_mode") or len(node.op.outputs) > 1):
        raise BatchDependence("it is in training")
    if node.spec.windows and len(node.op.outputs) > 1:
        raise BatchDependence("its indices count through all samples")


@rule("MatMul", "MatMulInteger")
def check_matmul(node: RuledNode) -> None:
    """Require a product of separate rows or matrices whose scales are not by rows."""
    a, b = node.spec.data_inputs
    node.require_samples_only_in(a, b)
    require_separate_rows(node, a, b)
    left_name = node.spec.operands[a].name
    for operand in node.spec.operands:
        value = node.input(operand.name) if operand.quantises and operand.quantised_operand in ("", left_name) else None
        if value is not None and shape(value) not in ((), (1,)):
            raise BatchDependence("its scales are by rows")


def require_separate_rows(node: RuledNode, a: int, b: int) -> None:
    """Require that samples are rows of the left matrix, or matrices of a stack, in front on both sides.

    a, b: numbers of the left and the right operand.
    """
    left, right = node.rank(a), node.rank(b)
    if node.holds(b) and (left != right or right < 3):
        raise BatchDependence("its right operand depends on samples")
    if node.holds(a) and (left < 2 or right > left):
        raise BatchDependence("its operands have different numbers of axes")
    other = node.input(a if node.holds(b) else b)
    if other not in node.samples and other is not None and rank_of(other) == max(left, right) > 2:
        dims = shape(other)
        if dims is None or dims[0] != 1:
            raise BatchDependence("one operand has a matrix for each sample")


@rule("Gemm")
def check_gemm(node: RuledNode) -> None:
    """Require that the left matrix is not transposed, and that the bias has no row for each sample."""
    node.require_samples_only_in(0)
    if node.attrs.get("transA"):
        raise BatchDependence("the left matrix is transposed")
    bias = node.input("c")
    if bias is not None and rank_of(bias) == 2 and (shape(bias) or (0,))[0] != 1:
        raise BatchDependence("its offset has a row for each sample")


@rule("Softmax", "LogSoftmax", "Hardmax")
def check_softmax(node: RuledNode) -> None:
    """Require another axis than that of the samples."""
    node.require_samples_only_in(0)
    if node.axis(-1 if node.opset >= 13 else 1) == 0:
        raise BatchDependence("axis 0 counts samples")


@rule("LayerNormalization", "RMSNormalization", "LpNormalization", "RoundBlocks", "SimplifiedLayerNormalization")
def check_normalisation(node: RuledNode) -> None:
    """Require another axis than that of the samples, and scales that all samples share."""
    node.require_samples_only_in(0)
    if node.axis(-1) == 0 or len(node.op.outputs) > 1:
        raise BatchDependence("axis 0 counts samples")
    for number in range(1, len(node.op.inputs)):
        if node.input(number) is not None and node.rank(number) == node.rank(0):
            raise BatchDependence("its scales have a part for each sample")


@rule("ArgMax", "ArgMin", "CumSum", "TopK")
def check_axis_operator(node: RuledNode) -> None:
    """Require another axis than that of the samples."""
    node.require_samples_only_in(0)
    if node.op.op_type == "CumSum":
        axis = node.list_of(1)[0]
        axis = axis + node.rank(0) if axis < 0 else axis
    else:
        axis = node.axis(-1 if node.op.op_type == "TopK" else 0)
    if axis == 0:
        raise BatchDependence("axis 0 counts samples")


@rule(*REDUCTIONS, "ReduceLogSumExp")
def check_reduction(node: RuledNode) -> None:
    """Require that the reduced axes are named and are not that of the samples."""
    node.require_samples_only_in(0)
    axes = node.axes()
    if not axes:
        raise BatchDependence("it reduces all axes")
    if 0 in axes:
        raise BatchDependence("axis 0 counts samples")


@rule("Transpose")
def check_transpose(node: RuledNode) -> None:
    """Require that the axis of the samples stays in front, alone."""
    if (node.attrs.get("perm") or [-1])[0] != 0:
        raise BatchDependence("it moves the axis that counts samples")


@rule("Flatten")
def check_flatten(node: RuledNode) -> None:
    """Require that the axis of the samples stays in front, alone."""
    if node.axis(1) != 1:
        raise BatchDependence("it joins samples")


@rule("Squeeze")
def check_squeeze(node: RuledNode) -> None:
    """Require that the axis of the samples stays in front, alone."""
    axes = node.axes()
    if not axes or 0 in axes:
        raise BatchDependence("it may remove the axis that counts samples")


@rule("Unsqueeze")
def check_unsqueeze(node: RuledNode) -> None:
    """Require that the axis of the samples stays in front, alone."""
    axes = node.attrs["axes"] if "axes" in node.attrs else node.list_of(1)
    rank = node.rank(0) + len(axes)
    if 0 in [axis + rank if axis < 0 else axis for axis in axes]:
        raise BatchDependence("it puts an axis in front of the one that counts samples")


@rule("Reshape", takes_count=True)
def check_reshape(node: RuledNode) -> None:
    """Require that the first axis still counts samples, and that each sample keeps its elements."""
    node.require_samples_only_in(0)
    dims, value = list(node.attrs.get("shape") or node.list_of(1)), node.input(0)
    old_dims = None if value is None else shape(value)
    if not node.holds(0) or not dims or COUNT in dims[1:]:
        raise BatchDependence("it joins samples")
    keeps_count = dims[0] == COUNT or (dims[0] == 0 and not node.attrs.get("allowzero"))
    if not keeps_count and dims[0] != -1:
        raise BatchDependence(f"its first axis has the size {dims[0]} for any number of samples")
    if keeps_count and (-1 in dims or None in dims or old_dims is None):
        return  # the other sizes only arrange the elements of one sample
    if old_dims is None or None in dims:
        raise BatchDependence("the size of a sample is not known")
    rest = [old_dims[axis] if size == 0 and axis < len(old_dims) else size for axis, size in enumerate(dims)][1:]
    if prod(rest) != prod(old_dims[1:]):
        raise BatchDependence("it joins or cuts samples")


@rule("Expand", takes_count=True)
def check_expand(node: RuledNode) -> None:
    """Require a result with as many samples in front as the operand, or copies of a common operand for all samples."""
    dims = node.list_of(1)
    if len(dims) < node.rank(0) or (len(dims) > node.rank(0) and node.holds(0)) or COUNT in dims[1:]:
        raise BatchDependence("its result has other axes")
    if None in dims[:1] or dims[0] not in (COUNT, 1) or (dims[0] == 1 and not node.holds(0)):
        raise BatchDependence(f"its first axis has the size {dims[0]} for any number of samples")
    old_dims = None if node.input(0) is None else shape(node.input(0))  # type: ignore[arg-type]
    if not node.holds(0) and len(dims) == node.rank(0) and (old_dims is None or old_dims[0] != 1):
        raise BatchDependence("its operand has a part for each sample")


@rule("ConstantOfShape", takes_count=True)
def check_constant_of_shape(node: RuledNode) -> None:
    """Require that the first axis counts samples, and that no other size depends on their number."""
    dims = node.list_of(0)
    if dims[0] != COUNT or COUNT in dims[1:]:
        raise BatchDependence("it computes with the number of samples")


@rule("Dropout")
def check_dropout(node: RuledNode) -> None:
    """Require that the operator is not in training, where random numbers depend on the whole batch."""
    node.require_samples_only_in(0)
    if node.input("training_mode") is not None:
        raise BatchDependence("it may be in training")


@rule("Concat")
def check_concat(node: RuledNode) -> None:
    """Require tensors that all hold samples, joined along another axis."""
    parts = node.spec.data_among(len(node.op.inputs))
    if not all(node.holds(number) for number in parts):
        raise BatchDependence("some of its operands hold no samples")
    if node.axis(None, parts[0]) == 0:
        raise BatchDependence("axis 0 counts samples")


@rule("Split")
def check_split(node: RuledNode) -> None:
    """Require another axis than that of the samples."""
    node.require_samples_only_in(0)
    if node.axis(0) == 0:
        raise BatchDependence("axis 0 counts samples")


@rule("Slice")
def check_slice(node: RuledNode) -> None:
    """Require other axes than that of the samples."""
    node.require_samples_only_in(0)
    axes = node.axes()
    if axes is None or 0 in axes:
        raise BatchDependence("it may take some samples only")


@rule("Pad")
def check_pad(node: RuledNode) -> None:
    """Require that no samples are added."""
    node.require_samples_only_in(0)
    if node.input("axes") is not None:
        raise BatchDependence("its axes are an input")
    pads = node.attrs.get("pads") or node.list_of(1)
    if pads[0] or pads[len(pads) // 2]:
        raise BatchDependence("it adds samples")


@rule("Gather")
def check_gather(node: RuledNode) -> None:
    """Require another axis of samples, or rows of a common table for samples of indices."""
    axis = node.axis(0)
    if node.holds(0) == node.holds(1):
        raise BatchDependence("which samples it takes depends on samples")
    if (axis == 0) == node.holds(0):
        raise BatchDependence("axis 0 counts samples" if node.holds(0) else "samples are not in front of its result")


@rule("Tile")
def check_tile(node: RuledNode) -> None:
    """Require that samples are not repeated."""
    node.require_samples_only_in(0)
    if node.list_of(1)[0] != 1:
        raise BatchDependence("it repeats samples")


@rule("Upsample")
@rule("Resize", takes_count=True)
def check_resize(node: RuledNode) -> None:
    """Require that the axis of the samples keeps its size."""
    node.require_samples_only_in(0)
    if not node.holds(0):
        raise BatchDependence("it computes with the number of samples")
    if node.attrs.get("axes"):
        if any(COUNT in node.sizes.get(value, ()) for value in node.op.inputs if value is not None):
            raise BatchDependence("it computes with the number of samples")
        axes = [axis + node.rank(0) if axis < 0 else axis for axis in node.attrs["axes"]]
        if 0 in axes:
            raise BatchDependence("axis 0 counts samples")
        return
    scales = node.input(1 if node.op.op_type == "Resize" and node.opset < 11 else "scales")
    if scales is not None and scales.const_value is not None and scales.const_value.size:
        if float((constant(scales)).reshape(-1)[0]) != 1:  # type: ignore[union-attr]
            raise BatchDependence("it resizes the axis that counts samples")
    elif node.list_of("sizes")[0] != COUNT or COUNT in node.list_of("sizes")[1:]:
        raise BatchDependence("it resizes the axis that counts samples")
