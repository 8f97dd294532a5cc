"""By which operators samples stay apart: a rule for each, which raises BatchDependence if they do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import onnx_ir as ir

from celosia.compiler.graph.values import constant, shape
from celosia.compiler.ops import operators_with
from celosia.compiler.ops.reductions import REDUCTIONS
from celosia.compiler.program.op_spec import Kind, OpSpec, op_spec, quantised_forms

COUNT = "N"
"""The number of samples, as an element of what Shape gives and operators on it compute."""
TAKES_COUNT: set[str] = set()
"""Operators that may read the number of samples: as the size of their result's first axis."""
Sizes = list[Any]
"""Elements of a list of sizes: numbers, COUNT, and None for what is known at run time only."""


class BatchDependence(Exception):
    """Samples that are not independent, or cannot be shown to be; the reason."""


@dataclass
class RuledNode:
    """An operator as its rule sees it."""

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
        """The number of an input, by its name, too."""
        return operand if isinstance(operand, int) else self.spec.number(operand)

    def input(self, operand: str | int) -> ir.Value | None:
        """None where it is left out."""
        number = self.number(operand)
        return self.op.inputs[number] if number < len(self.op.inputs) else None

    def holds(self, number: int) -> bool:
        """Whether an input holds samples."""
        return self.input(number) in self.samples

    @property
    def held(self) -> list[ir.Value]:
        """The inputs that hold samples."""
        return [value for value in self.op.inputs if value in self.samples and value is not None]

    def rank(self, number: int) -> int:
        """BatchDependence where it is not known."""
        value = self.input(number)
        return rank_of(value)

    def axis(self, default: int | None, number: int = 0) -> int:
        """The attribute `axis`, counted from the front of input `number`."""
        axis, rank = self.attrs.get("axis", default), self.rank(number)
        if axis is None:
            raise BatchDependence("it has no axis")
        return int(axis) + rank if axis < 0 else int(axis)

    def list_of(self, operand: str | int) -> Sizes:
        """Return what is known of a list of sizes."""
        value = self.input(operand)
        known = self.sizes.get(value) if value is not None else None
        if known is None or (None in known and self.op.op_type not in TAKES_COUNT):
            raise BatchDependence(f"its input {self.number(operand)} is known at run time only")
        return known

    def axes(self) -> list[int] | None:
        """The axes of an operator that has them as an attribute or an operand, counted from the front."""
        if "axes" in self.attrs:
            axes = self.attrs["axes"]
        elif self.input("axes") is not None:
            axes = self.list_of("axes")
        else:
            return None
        rank = self.rank(0)
        return [int(axis) + rank if axis < 0 else int(axis) for axis in axes]

    def only(self, *numbers: int) -> None:
        """BatchDependence where other inputs than these hold samples."""
        for number in range(len(self.op.inputs)):
            if number not in numbers and self.holds(number):
                raise BatchDependence(f"its input {number} depends on samples")


def rank_of(value: ir.Value | None) -> int:
    """Axes of a tensor. BatchDependence where that is not known."""
    if value is None or value.shape is None:
        raise BatchDependence(f"the shape of {value.name if value is not None else 'an input'!r} is not known")
    return len(value.shape)


def rank_or(value: ir.Value, otherwise: int) -> int:
    """Axes of a tensor, `otherwise` where that is not known."""
    return otherwise if value.shape is None else len(value.shape)


Rule = Callable[[RuledNode], None]
"""Nothing, where the operator's outputs hold samples if its inputs do; BatchDependence where they may not."""
RULES: dict[str, Rule] = {}


def rule(*names: str, takes_count: bool = False) -> Callable[[Rule], Rule]:
    """Add a rule of operators and of their quantised forms in models, in the place of a more general one before."""
    forms = [form for form in quantised_forms(*names) if op_spec(form).domain != "celosia"]  # ours are in no model

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys((*names, *forms), function))
        TAKES_COUNT.update(names if takes_count else ())
        return function

    return add


@rule(*(operators_with("kind", Kind.INJECTIVE) - operators_with("moves")), "Identity", "Where", "BiasGelu", "FastGelu")
def elementwise(node: RuledNode) -> None:
    """Every operand that has as many axes as the result has samples in front, or one place for all of them."""
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
def scaled(node: RuledNode) -> None:
    """Scales are not along samples, nor by blocks."""
    node.only(0)
    if rank_of(node.op.inputs[1]) > 0 and node.axis(1) == 0:
        raise BatchDependence("its scales are along the axis that counts samples")
    if node.attrs.get("block_size"):
        raise BatchDependence("its scales are by blocks")


@rule(
    *operators_with("windows"), "BatchNormalization", "DepthToSpace", "GlobalAveragePool", "GlobalLpPool",
    "GlobalMaxPool", "GroupNormalization", "InstanceNormalization", "LRN", "SpaceToDepth",
)  # fmt: skip
def image_by_image(node: RuledNode) -> None:
    """Whatever looks at one image at a time."""
    node.only(0)
    if node.op.op_type == "BatchNormalization" and (node.attrs.get("training_mode") or len(node.op.outputs) > 1):
        raise BatchDependence("it is in training")
    if node.spec.windows and len(node.op.outputs) > 1:
        raise BatchDependence("its indices count through all samples")


@rule("MatMul", "MatMulInteger")
def matmul(node: RuledNode) -> None:
    """Scales are not by rows."""
    a, b = node.spec.data
    node.only(a, b)
    product(node, a, b)
    left = node.spec.operands[a].name
    for operand in node.spec.operands:
        value = node.input(operand.name) if operand.quantises and operand.of in ("", left) else None
        if value is not None and shape(value) not in ((), (1,)):
            raise BatchDependence("its scales are by rows")


def product(node: RuledNode, a: int, b: int) -> None:
    """Rows of the left matrix, or stacks of matrices, in front of which samples are counted on both sides."""
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
def gemm(node: RuledNode) -> None:
    """The left matrix is not transposed, and no offset has rows of its own."""
    node.only(0)
    if node.attrs.get("transA"):
        raise BatchDependence("the left matrix is transposed")
    offset = node.input("c")
    if offset is not None and rank_of(offset) == 2 and (shape(offset) or (0,))[0] != 1:
        raise BatchDependence("its offset has a row for each sample")


@rule("Softmax", "LogSoftmax", "Hardmax")
def softmax(node: RuledNode) -> None:
    """Along another axis."""
    node.only(0)
    if node.axis(-1 if node.opset >= 13 else 1) == 0:
        raise BatchDependence("axis 0 counts samples")


@rule("LayerNormalization", "RMSNormalization", "LpNormalization", "RoundBlocks", "SimplifiedLayerNormalization")
def normalised(node: RuledNode) -> None:
    """Along another axis, with scales for all samples."""
    node.only(0)
    if node.axis(-1) == 0 or len(node.op.outputs) > 1:
        raise BatchDependence("axis 0 counts samples")
    for number in range(1, len(node.op.inputs)):
        if node.input(number) is not None and node.rank(number) == node.rank(0):
            raise BatchDependence("its scales have a part for each sample")


@rule("ArgMax", "ArgMin", "CumSum", "TopK")
def along_an_axis(node: RuledNode) -> None:
    """Along another axis."""
    node.only(0)
    if node.op.op_type == "CumSum":
        axis = node.list_of(1)[0]
        axis = axis + node.rank(0) if axis < 0 else axis
    else:
        axis = node.axis(-1 if node.op.op_type == "TopK" else 0)
    if axis == 0:
        raise BatchDependence("axis 0 counts samples")


@rule(*REDUCTIONS, "ReduceLogSumExp")
def reduced(node: RuledNode) -> None:
    """Over other axes."""
    node.only(0)
    axes = node.axes()
    if not axes:
        raise BatchDependence("it reduces all axes")
    if 0 in axes:
        raise BatchDependence("axis 0 counts samples")


@rule("Transpose")
def transposed(node: RuledNode) -> None:
    """The first axis stays."""
    if (node.attrs.get("perm") or [-1])[0] != 0:
        raise BatchDependence("it moves the axis that counts samples")


@rule("Flatten")
def flattened(node: RuledNode) -> None:
    """The first axis stays."""
    if node.axis(1) != 1:
        raise BatchDependence("it joins samples")


@rule("Squeeze")
def squeezed(node: RuledNode) -> None:
    """The first axis stays."""
    axes = node.axes()
    if not axes or 0 in axes:
        raise BatchDependence("it may remove the axis that counts samples")


@rule("Unsqueeze")
def unsqueezed(node: RuledNode) -> None:
    """The first axis stays."""
    axes = node.attrs["axes"] if "axes" in node.attrs else node.list_of(1)
    rank = node.rank(0) + len(axes)
    if 0 in [axis + rank if axis < 0 else axis for axis in axes]:
        raise BatchDependence("it puts an axis in front of the one that counts samples")


@rule("Reshape", takes_count=True)
def reshaped(node: RuledNode) -> None:
    """The first axis still counts samples."""
    node.only(0)
    dims, value = list(node.attrs.get("shape") or node.list_of(1)), node.input(0)
    known = None if value is None else shape(value)
    if not node.holds(0) or not dims or COUNT in dims[1:]:
        raise BatchDependence("it joins samples")
    counts = dims[0] == COUNT or (dims[0] == 0 and not node.attrs.get("allowzero"))
    if not counts and dims[0] != -1:
        raise BatchDependence(f"its first axis has the size {dims[0]} for any number of samples")
    if counts and (-1 in dims or None in dims or known is None):
        return  # the rest of a sample, whatever its size
    if known is None or None in dims:
        raise BatchDependence("the size of a sample is not known")
    rest = [known[axis] if size == 0 and axis < len(known) else size for axis, size in enumerate(dims)][1:]
    if prod(rest) != prod(known[1:]):
        raise BatchDependence("it joins or cuts samples")


@rule("Expand", takes_count=True)
def expanded(node: RuledNode) -> None:
    """To a list of sizes with as many samples in front."""
    dims = node.list_of(1)
    if len(dims) < node.rank(0) or (len(dims) > node.rank(0) and node.holds(0)) or COUNT in dims[1:]:
        raise BatchDependence("its result has other axes")
    if None in dims[:1] or dims[0] not in (COUNT, 1) or (dims[0] == 1 and not node.holds(0)):
        raise BatchDependence(f"its first axis has the size {dims[0]} for any number of samples")
    known = None if node.input(0) is None else shape(node.input(0))  # type: ignore[arg-type]
    if not node.holds(0) and len(dims) == node.rank(0) and (known is None or known[0] != 1):
        raise BatchDependence("its operand has a part for each sample")


@rule("ConstantOfShape", takes_count=True)
def filled(node: RuledNode) -> None:
    """The first axis counts samples, and nothing else depends on their number."""
    dims = node.list_of(0)
    if dims[0] != COUNT or COUNT in dims[1:]:
        raise BatchDependence("it computes with the number of samples")


@rule("Dropout")
def dropped(node: RuledNode) -> None:
    """Not in training."""
    node.only(0)
    if node.input("training_mode") is not None:
        raise BatchDependence("it may be in training")


@rule("Concat")
def joined(node: RuledNode) -> None:
    """Along another axis, of tensors that all hold samples."""
    parts = node.spec.data_among(len(node.op.inputs))
    if not all(node.holds(number) for number in parts):
        raise BatchDependence("some of its operands hold no samples")
    if node.axis(None, parts[0]) == 0:
        raise BatchDependence("axis 0 counts samples")


@rule("Split")
def split(node: RuledNode) -> None:
    """Along another axis."""
    node.only(0)
    if node.axis(0) == 0:
        raise BatchDependence("axis 0 counts samples")


@rule("Slice")
def sliced(node: RuledNode) -> None:
    """Along other axes."""
    node.only(0)
    axes = node.axes()
    if axes is None or 0 in axes:
        raise BatchDependence("it may take some samples only")


@rule("Pad")
def padded(node: RuledNode) -> None:
    """Along other axes."""
    node.only(0)
    if node.input("axes") is not None:
        raise BatchDependence("its axes are an input")
    pads = node.attrs.get("pads") or node.list_of(1)
    if pads[0] or pads[len(pads) // 2]:
        raise BatchDependence("it adds samples")


@rule("Gather")
def gathered(node: RuledNode) -> None:
    """Along another axis of samples, or rows of a constant for samples of indices."""
    axis = node.axis(0)
    if node.holds(0) == node.holds(1):
        raise BatchDependence("which samples it takes depends on samples")
    if (axis == 0) == node.holds(0):
        raise BatchDependence("axis 0 counts samples" if node.holds(0) else "samples are not in front of its result")


@rule("Tile")
def tiled(node: RuledNode) -> None:
    """Along other axes."""
    node.only(0)
    if node.list_of(1)[0] != 1:
        raise BatchDependence("it repeats samples")


@rule("Upsample")
@rule("Resize", takes_count=True)
def resized(node: RuledNode) -> None:
    """Require that Resize leaves the axis of the samples as it is."""
    node.only(0)
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
