"""Which operators run on the accelerator, and as what layers.

Every integer operator is tried; what stays on the CPU does so with a reason. Operators that only change the shape are
free where the accelerator's layout stays the same. A table or a residual addition joins the layer that produces its
operand, and parts of a concatenation are written where they belong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler import numerics
from celosia.compiler.graph.values import attribute, constant, is_op, shape
from celosia.compiler.tensorize import pack
from celosia.compiler.tensorize.layer import (
    Activation,
    Conv,
    Epilogue,
    Layer,
    Map,
    Multiply,
    Pool,
    Requantise,
    Residual,
    Storage,
    Untileable,
    Window,
    inputs,
)
from celosia.compiler.tensorize.space import Problem, choose, estimate
from celosia.hw.config import Config

VIEWS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity")
INTEGER_OPS = (
    "QLinearConv", "QGemm", "QLinearMatMul", "QLinearAdd", "QLinearMul", "QLinearGlobalAveragePool",
    "QLinearAveragePool", "QLinearMean", "QLinearConcat", "MaxPool", "Table",
)  # fmt: skip


class OnCpu(Exception):
    """An operator that stays on the CPU; the message is the reason."""


@dataclass(frozen=True)
class Form:
    """How a tensor of the graph is an activation: its logical [images, channels, height, width].

    fold: "" for the tensor itself; "xy" or "x" where each pixel holds the window (or the row of the window) that a
    convolution reads there, made by the host, so that a first layer of few channels fills the blocks.
    """

    dims: tuple[int, int, int, int]
    fold: str = ""
    window: Window | None = None
    pad: int = 0


Reads = dict[Storage, tuple[ir.Value, Form]]
"""For each storage that the host fills: the tensor that it holds and its form."""


@dataclass
class Choice:
    """A layer with the graph's nodes that it covers, and the tensors it reads and writes."""

    layer: Layer
    nodes: list[ir.Node]
    reads: Reads
    value: ir.Value
    """The tensor written."""
    note: str = ""


@dataclass
class Selection:
    """The result: layers, the CPU's nodes with reasons, aliases (views) and where concatenations put their parts."""

    choices: list[Choice] = field(default_factory=list)
    cpu: dict[ir.Node, str] = field(default_factory=dict)
    views: dict[ir.Node, str] = field(default_factory=dict)
    forms: dict[ir.Value, Form] = field(default_factory=dict)
    """Form of each tensor that the accelerator holds."""
    written: dict[ir.Value, Activation] = field(default_factory=dict)
    """Where each tensor lies that layers write; views of it lie there, too, and are not listed."""


def natural_form(value: ir.Value, rows: bool = False) -> Form:
    """Images and channels of a tensor: NCHW, or rows x columns for matrices and where `rows`. OnCpu if unknown."""
    dims = shape(value)
    if dims is None:
        raise OnCpu(f"the shape of {value.name!r} is not static")
    if 0 in dims:
        raise OnCpu(f"{value.name!r} is empty")
    if len(dims) == 4 and not rows:
        return Form((dims[0], dims[1], dims[2], dims[3]))
    if len(dims) == 3 and not rows:
        return Form((dims[0], dims[1], 1, dims[2]))
    if len(dims) >= 1 and (rows or len(dims) == 2):
        return Form((math.prod(dims[:-1]), dims[-1], 1, 1))
    raise OnCpu(f"{value.name!r} has {len(dims)} dimensions")


class Selector:
    """Walks the graph once; `selection` is the result."""

    def __init__(self, model: ir.Model, cfg: Config, refused: dict[ir.Node, str]) -> None:
        """refused: nodes that must stay on the CPU, with the reason (no tiling fits)."""
        self.graph, self.cfg, self.refused = model.graph, cfg, refused
        self.selection = Selection()
        self.made: dict[ir.Value, Choice] = {}
        self.alias: dict[ir.Value, ir.Value] = {}
        """Views, and the tensor that each is a view of."""
        self.given: dict[tuple[ir.Value, Form], Activation] = {}
        """What the host fills."""
        self.inside: dict[Storage, tuple[Storage, int]] = {}
        """Storages that lie inside another, from a group of it on."""

    def run(self) -> Selection:
        for node in self.graph:
            try:
                self._place(node)
            except OnCpu as reason:
                self.selection.cpu[node] = str(reason)
        self._place_parts()
        return self.selection

    def _place(self, node: ir.Node) -> None:
        if is_op(node, *VIEWS) and self._view(node):
            return
        if not is_op(node, *INTEGER_OPS):
            raise OnCpu(
                "float, or not an operator of the accelerator" if node.op_type not in VIEWS else "a view on the host"
            )
        if node in self.refused:
            raise OnCpu(self.refused[node])
        x = node.inputs[2] if node.op_type == "QLinearConcat" else node.inputs[0]
        if x is None or not {x.dtype, node.outputs[0].dtype} <= {ir.DataType.INT8, ir.DataType.UINT8}:
            raise OnCpu("not an 8-bit operator")
        if len(node.outputs) > 1 and any(list(out.uses()) or out.is_graph_output() for out in node.outputs[1:]):
            raise OnCpu("its indices output is used")
        _BUILDERS[node.op_type](self, node)

    # Activations -----------------------------------------------------------------------------------------------

    def _source(self, value: ir.Value) -> ir.Value:
        """The tensor that `value` is, or is a view of."""
        return self.alias.get(value, value)

    def _written(self, value: ir.Value) -> Form | None:
        """The form in which the accelerator holds `value`, if it does."""
        return self.selection.forms.get(value)

    def _read(self, value: ir.Value | None, form: Form, reads: Reads) -> Activation:
        """The activation of `value` in `form`: the accelerator's own, or one that the host fills."""
        if value is None or constant(value) is not None:
            raise OnCpu("an operand is a constant")
        if self._written(value) == form:
            return self.selection.written[self._source(value)]
        if (value, form) not in self.given:
            self.given[value, form] = self._activation(value, form)
        reads[self.given[value, form].storage] = (value, form)
        return self.given[value, form]

    def _add(self, node: ir.Node, layer: Layer, reads: Reads, form: Form, note: str = "") -> None:
        choice = Choice(layer, [node], reads, node.outputs[0], note)
        self.selection.choices.append(choice)
        self._writes(choice, node.outputs[0], form)

    def _writes(self, choice: Choice, value: ir.Value, form: Form) -> None:
        """Note that `choice` writes `value`."""
        choice.value = value
        self.made[value] = choice
        self.selection.forms[value] = form
        self.selection.written[value] = choice.layer.y

    def _no_longer_writes(self, choice: Choice) -> None:
        """Note that the tensor which `choice` has written is nowhere any more."""
        del self.made[choice.value], self.selection.forms[choice.value], self.selection.written[choice.value]

    def _activation(self, value: ir.Value, form: Form) -> Activation:
        """`value` in a storage of its own."""
        return Activation.alone(self.cfg, value.name or "", *form.dims)

    def _view(self, node: ir.Node) -> bool:
        """Whether the output of `node` is the same activation as its input."""
        x, y = node.inputs[0], node.outputs[0]
        if x is None or y.is_graph_output():
            return False
        held = self._written(x)
        if held is None:
            return False
        try:
            form = natural_form(y)
        except OnCpu:
            form = natural_form(y, rows=True)
        if held != form:
            if self._folds_into_gemm(node):
                self.selection.views[node] = "part of the matrix multiplications that read it"
                return True
            return False
        self.alias[y] = self._source(x)
        self.selection.forms[y] = form
        self.selection.views[node] = "free: the same bytes"
        return True

    def _folds_into_gemm(self, node: ir.Node) -> bool:
        """Flatten of an image whose every user is a matrix multiplication: it becomes a convolution of all pixels."""
        users = [use.node for use in node.outputs[0].uses()]
        return _flattens(node) and bool(users) and all(
            is_op(user, "QGemm", "QLinearMatMul") and user.inputs[0] is node.outputs[0] and _fixed_matrix(user)
            for user in users
        )  # fmt: skip

    # One builder for each operator -----------------------------------------------------------------------------

    def _conv(self, node: ir.Node) -> None:
        value, weight_value = node.inputs[0], node.inputs[3]
        assert value is not None
        form = natural_form(value)
        weights = constant(weight_value)
        if weights is None:
            raise OnCpu("its weights are not constant")
        if weights.ndim == 3 and len(value.shape or ()) == 3:
            weights = weights[:, :, None, :]
        if weights.ndim != 4:
            raise OnCpu(f"a convolution of {weights.ndim - 2} dimensions")
        weights = _symmetric(weights, constant(node.inputs[5]))
        groups = attribute(node, "group", 1)
        if groups < 1 or groups * weights.shape[1] != form.dims[1] or weights.shape[0] % groups:
            raise OnCpu(f"{groups} groups do not divide its channels")
        window = _window(node, form, weights.shape[2:])
        bias = constant(node.inputs[8]) if len(node.inputs) > 8 else None
        scales = [_array(node.inputs[i]) for i in (1, 4, 6)]
        zero_x, zero_y = _stored_zero(node.inputs[2]), _stored_zero(node.inputs[7])
        requantise = _requantise(scales, zero_x, zero_y, weights, bias)
        y_form = natural_form(node.outputs[0])
        _check_extent(form, y_form, window)
        reads: Reads = {}
        if self._written(value) is None and groups == 1:
            form, weights, window = self._fold(form, weights, window, zero_x, y_form)
        x = self._read(value, form, reads)
        layer = Conv(
            node.name or "", x, self._activation(node.outputs[0], y_form), weights, requantise, window, groups, zero_x
        )
        self._add(node, layer, reads, y_form)

    def _fold(
        self, form: Form, weights: NDArray[np.int8], window: Window, pad: int, y: Form
    ) -> tuple[Form, NDArray[np.int8], Window]:
        """The best way for the host to arrange the input of a first layer: as it is, rows or whole windows folded."""
        out, channels, height, width = weights.shape
        options = [(form, weights, window)]
        if width > 1:
            folded = Form((form.dims[0], channels * width, form.dims[2], y.dims[3]), "x", window, pad)
            options.append((
                folded, np.ascontiguousarray(weights.transpose(0, 1, 3, 2)).reshape(out, channels * width, height, 1),
                Window(
                    (height, 1), (window.strides[0], 1), (window.dilations[0], 1),
                    (window.pads[0], 0, window.pads[2], 0),
                ),
            ))  # fmt: skip
        if height * width > 1:
            folded = Form((form.dims[0], channels * height * width, *y.dims[2:]), "xy", window, pad)
            options.append((folded, weights.reshape(out, -1, 1, 1), Window((1, 1))))

        def cycles(option: tuple[Form, NDArray[np.int8], Window]) -> float:
            blocks = (pack.blocks(out, self.cfg.block_out), pack.blocks(option[1].shape[1], self.cfg.block_in))
            images = -(-form.dims[0] // self.cfg.batch)
            problem = Problem(option[2], images, *y.dims[2:], *blocks, False)
            try:
                return estimate(self.cfg, problem, choose(self.cfg, problem))
            except Untileable:
                return math.inf

        return min(options, key=cycles)

    def _gemm(self, node: ir.Node) -> None:
        matmul = node.op_type == "QLinearMatMul"
        value = node.inputs[0]
        assert value is not None
        if not _fixed_matrix(node):
            raise OnCpu("both operands vary; the accelerator multiplies by constant matrices")
        matrix = _array(node.inputs[3])
        zero_w = constant(node.inputs[5])
        if not matmul and attribute(node, "transB", 0):
            matrix = matrix.T
        if not matmul and (attribute(node, "transA", 0) or attribute(node, "alpha", 1.0) != 1.0):
            raise OnCpu("transA or alpha")
        bias = constant(node.inputs[6]) if not matmul and node.inputs[6] is not None else None
        y_scale, y_zero = (6, 7) if matmul else (7, 8)
        if len(node.inputs) <= y_zero or node.inputs[y_scale] is None:
            raise OnCpu("its output is float")
        weights = np.ascontiguousarray(_symmetric(matrix, zero_w).T)[:, :, None, None]
        scales = [_array(node.inputs[i]) for i in (1, 4, y_scale)]
        zero_x = _stored_zero(node.inputs[2])
        requantise = _requantise(scales, zero_x, _stored_zero(node.inputs[y_zero]), weights, bias)
        y_form = natural_form(node.outputs[0], rows=True)
        reads: Reads = {}
        producer, window = value.producer(), Window((1, 1))
        flat = producer.inputs[0] if producer in self.selection.views and _flattens(producer) else None
        if flat is not None and self._written(value) is None and self._written(flat) is not None:
            form = natural_form(flat)
            window = Window((form.dims[2], form.dims[3]))
            x = self._read(flat, form, reads)
            weights = np.ascontiguousarray(weights.reshape(-1, *form.dims[1:]))
        else:
            x = self._read(value, natural_form(value, rows=True), reads)
        layer = Conv(node.name or "", x, self._activation(node.outputs[0], y_form), weights, requantise, window)
        self._add(node, layer, reads, y_form)

    def _add_two(self, node: ir.Node) -> None:
        a, b, y = node.inputs[0], node.inputs[3], node.outputs[0]
        assert a is not None and b is not None
        if shape(a) != shape(b) or shape(a) != shape(y):
            raise OnCpu(f"it broadcasts {shape(a)} with {shape(b)}")
        sa, za, sb, zb, sy, zy = (_scalar(node.inputs[i]) for i in (1, 2, 4, 5, 6, 7))
        fit = numerics.fit_rescale_add(sa, za, sb, zb, sy, zy, y.dtype.numpy())  # type: ignore[union-attr]
        if fit is None:
            raise OnCpu("no integers give onnxruntime's sum on all pairs of bytes")
        form = self._common_form(a, b)
        reads: Reads = {}
        x, other = self._read(a, form, reads), self._read(b, form, reads)
        residual = Residual(other, fit.ma, fit.mb, fit.c, fit.shift)
        layer = Map(node.name or "", x, self._activation(y, form), Epilogue(residual=residual))
        if not self._join_residual(node, layer, reads, form):
            self._add(node, layer, reads, form)

    def _common_form(self, *values: ir.Value) -> Form:
        for value in values:
            held = self._written(value)
            if held is not None:
                return held
        try:
            return natural_form(values[0])
        except OnCpu:
            return natural_form(values[0], rows=True)

    def _join_residual(self, node: ir.Node, layer: Map, reads: Reads, form: Form) -> bool:
        """Make the addition the epilogue of the convolution that produces its later operand, if that is possible."""
        residual = layer.epilogue.residual
        assert residual is not None
        order = {choice.value: place for place, choice in enumerate(self.selection.choices)}
        a, b = node.inputs[0], node.inputs[3]
        assert a is not None and b is not None
        sides = [(a, b, residual.operand, False), (b, a, layer.x, True)]
        sides.sort(key=lambda side: -order.get(side[0], -1))
        for value, added, other, swapped in sides:
            choice = self.made.get(value)
            if choice is None or not self._joins(choice, value) or not isinstance(choice.layer, Conv):
                continue
            if order.get(self._source(added), -1) >= order[choice.value] or added is value:
                continue
            scales = (residual.scale_b, residual.scale_v) if swapped else (residual.scale_v, residual.scale_b)
            joined = replace(residual, operand=other, scale_v=scales[0], scale_b=scales[1])
            self._extend(choice, node, replace(choice.layer.epilogue, residual=joined), reads, form)
            return True
        return False

    def _joins(self, choice: Choice, value: ir.Value | None) -> bool:
        """Whether an operator on `value` alone can become part of the layer that makes it."""
        return (
            value is not None and choice.value is value and len(list(value.uses())) == 1
            and not value.is_graph_output() and choice.layer.epilogue.residual is None
        )  # fmt: skip

    def _extend(self, choice: Choice, node: ir.Node, epilogue: Epilogue, reads: Reads, form: Form) -> None:
        """Let `choice` end in `epilogue` and write the output of `node`."""
        self._no_longer_writes(choice)
        y = self._activation(node.outputs[0], Form(choice.layer.y.dims))
        choice.layer = replace(choice.layer, epilogue=epilogue, y=y)
        choice.nodes.append(node)
        choice.reads.update(reads)
        self._writes(choice, node.outputs[0], form)

    def _table(self, node: ir.Node) -> None:
        value = node.inputs[0]
        assert value is not None
        table = _array(node.inputs[1]).astype(np.int8)
        form = self._common_form(value)
        choice = self.made.get(value)
        if choice is not None and self._joins(choice, value) and choice.layer.epilogue.table is None:
            self._extend(choice, node, replace(choice.layer.epilogue, table=table), {}, form)
            return
        reads: Reads = {}
        x = self._read(value, form, reads)
        self._add(
            node, Map(node.name or "", x, self._activation(node.outputs[0], form), Epilogue(table=table)), reads, form
        )

    def _product(self, node: ir.Node) -> None:
        a, b, y = node.inputs[0], node.inputs[3], node.outputs[0]
        assert a is not None and b is not None
        sa, za, sb, zb, sy, zy = (_scalar(node.inputs[i]) for i in (1, 2, 4, 5, 6, 7))
        fit = numerics.mul_scale(sa, za, sb, zb, sy, zy, y.dtype.numpy())  # type: ignore[union-attr]
        if fit is None:
            raise OnCpu("no integers give onnxruntime's product on all pairs of bytes")
        zeros = [_stored_zero(node.inputs[2]), _stored_zero(node.inputs[5])]
        if shape(a) != shape(y):
            a, b, zeros = b, a, zeros[::-1]
        if shape(a) != shape(y) or not (shape(b) == shape(y) or _one_pixel(b, y)):
            raise OnCpu(f"it broadcasts {shape(node.inputs[0])} with {shape(node.inputs[3])}")  # type: ignore[arg-type]
        form = self._common_form(a)
        b_form = form if shape(b) == shape(y) else natural_form(b)
        reads: Reads = {}
        x, other = self._read(a, form, reads), self._read(b, b_form, reads)
        requantise = _uniform(form.dims[1], fit.bias, fit.multiplier, fit.shift, fit.zero_point)
        layer = Multiply(node.name or "", x, other, self._activation(y, form), -zeros[0], -zeros[1], requantise)
        self._add(node, layer, reads, form)

    def _average(self, node: ir.Node) -> None:
        value, y = node.inputs[0], node.outputs[0]
        assert value is not None
        form, y_form = natural_form(value), natural_form(y)
        if attribute(node, "channels_last", 0):
            raise OnCpu("channels last")
        scale_x, scale_y = _scalar(node.inputs[1]), _scalar(node.inputs[3])
        note = ""
        if node.op_type == "QLinearAveragePool":
            window = _window(node, form, attribute(node, "kernel_shape"))
            if any(window.pads) or attribute(node, "ceil_mode", 0):
                raise OnCpu("an average over a padded window")
            note = "onnxruntime averages in float; a tie can differ by one step"
        else:
            window = Window((form.dims[2], form.dims[3]))
            if node.op_type == "QLinearMean":
                note = "onnxruntime averages in float; a tie can differ by one step"
        count = window.kernel[0] * window.kernel[1]
        factor = numerics.mean_scale if node.op_type == "QLinearMean" else numerics.global_average_scale
        multiplier, shift = numerics.fold_scale(factor(scale_x, scale_y, count))
        zero_x, zero_y = _stored_zero(node.inputs[2]), _stored_zero(node.inputs[4])
        requantise = _uniform(form.dims[1], -zero_x * count, int(multiplier), int(shift), zero_y)
        reads: Reads = {}
        x = self._read(value, form, reads)
        self._add(node, Pool(node.name or "", x, self._activation(y, y_form), window, requantise), reads, y_form, note)

    def _max_pool(self, node: ir.Node) -> None:
        value, y = node.inputs[0], node.outputs[0]
        assert value is not None
        form, y_form = natural_form(value), natural_form(y)
        window = _window(node, form, attribute(node, "kernel_shape"))
        reads: Reads = {}
        x = self._read(value, form, reads)
        self._add(node, Pool(node.name or "", x, self._activation(y, y_form), window), reads, y_form)

    def _concat(self, node: ir.Node) -> None:
        y = node.outputs[0]
        rank = len(y.shape or ())
        axis = attribute(node, "axis", 1) % max(rank, 1)
        if axis != 1 or rank not in (2, 4):
            raise OnCpu(f"a concatenation along axis {axis}")
        y_form = natural_form(y)
        sy, zy = _scalar(node.inputs[0]), _scalar(node.inputs[1])
        operands = [node.inputs[i : i + 3] for i in range(2, len(node.inputs), 3)]
        forms = [natural_form(operand[0]) for operand in operands]  # type: ignore[arg-type]
        if any(constant(operand[0]) is not None for operand in operands):
            raise OnCpu("a part is a constant")
        if any(form.dims[1] % self.cfg.group for form in forms[:-1]):
            raise OnCpu(f"a part does not end on a group of {self.cfg.group} channels")
        tables = []
        for operand in operands:
            sx, zx = _scalar(operand[1]), _scalar(operand[2])
            kind = y.dtype.numpy()  # type: ignore[union-attr]
            same = (sx, zx) == (sy, zy)
            tables.append(None if same else numerics.unary_table("Identity", {}, sx, zx, sy, zy, kind))
        whole, offset = self._activation(y, y_form), 0
        for number, (operand, form, table) in enumerate(zip(operands, forms, tables)):
            value = operand[0]
            assert value is not None
            choice = self.made.get(value)
            mine = choice is not None and choice.value is value and choice.layer.y.storage not in self.inside
            if mine and choice is not None and table is None:
                choice.nodes.append(node)
            elif mine and choice is not None and self._joins(choice, value) and choice.layer.epilogue.table is None:
                self._extend_part(choice, node, replace(choice.layer.epilogue, table=table))
            else:
                reads: Reads = {}
                x = self._read(value, form, reads)
                copy = Map(f"{node.name}.{number}", x, self._activation(y, form), Epilogue(table=table))
                choice = Choice(copy, [node], reads, y)
                self.selection.choices.append(choice)
            self.inside[choice.layer.y.storage] = (whole.storage, offset)
            offset += form.dims[1] // self.cfg.group
        self.selection.forms[y], self.selection.written[y] = y_form, whole

    def _extend_part(self, choice: Choice, node: ir.Node, epilogue: Epilogue) -> None:
        """Let `choice` end in `epilogue` and write a part of the concatenation `node`."""
        self._no_longer_writes(choice)
        y = self._activation(node.outputs[0], Form(choice.layer.y.dims))
        choice.layer = replace(choice.layer, epilogue=epilogue, y=y)
        choice.value = node.outputs[0]
        choice.nodes.append(node)

    def _place_parts(self) -> None:
        """Give every activation inside a concatenation its place, nested ones too."""

        def placed(act: Activation) -> Activation:
            while act.storage in self.inside:
                outer, start = self.inside[act.storage]
                act = replace(act, storage=outer, group_offset=act.group_offset + start)
            return act

        for choice in self.selection.choices:
            layer = choice.layer
            layer = replace(layer, x=placed(layer.x), y=placed(layer.y))
            if isinstance(layer, Multiply):
                layer = replace(layer, b=placed(layer.b))
            residual = layer.epilogue.residual
            if residual is not None:
                moved = replace(residual, operand=placed(residual.operand))
                layer = replace(layer, epilogue=replace(layer.epilogue, residual=moved))
            choice.layer = layer
        for value, act in self.selection.written.items():
            self.selection.written[value] = placed(act)


# Reading parameters off nodes -----------------------------------------------------------------------------------


def _array(value: ir.Value | None) -> NDArray[Any]:
    array = constant(value)
    if array is None:
        raise OnCpu("a scale, zero point or weight is not constant")
    return array


def _scalar(value: ir.Value | None) -> Any:
    array = _array(value)
    if array.size != 1:
        raise OnCpu("a scale per channel where one is expected")
    return array.item()


def _stored_zero(value: ir.Value | None) -> int:
    """Zero point as the accelerator stores bytes: uint8 has its top bit flipped."""
    if value is None:
        raise OnCpu("a zero point is missing")
    array = _array(value)
    return int(_scalar(value)) - (128 if array.dtype == np.uint8 else 0)


def _symmetric(weights: NDArray[Any], zero: NDArray[Any] | None) -> NDArray[np.int8]:
    """Weights with a zero point of 0."""
    shift = 128 if weights.dtype == np.uint8 else 0
    if zero is not None and np.any(zero.astype(np.int32) != shift):
        raise OnCpu("weights with a zero point")
    if zero is None and shift:
        raise OnCpu("weights with a zero point")
    return (weights.astype(np.int16) - shift).astype(np.int8)


def _requantise(
    scales: list[NDArray[Any]], zero_x: int, zero_y: int, weights: NDArray[np.int8], bias: NDArray[Any] | None
) -> Requantise:
    """Per-channel requantisation of a convolution; the input's zero point goes into the bias."""
    out = weights.shape[0]
    if any(array.size not in (1, out) for array in (*scales, *([] if bias is None else [bias]))):
        raise OnCpu(f"scales or a bias that do not fit its {out} channels")
    scale = np.broadcast_to(numerics.conv_scale(*scales).reshape(-1), (out,))
    if not np.all(np.isfinite(scale)) or np.any(scale < 0):
        raise OnCpu("a scale that is negative or not finite")
    multiplier, shift = numerics.fold_scale(scale)
    total = -zero_x * weights.reshape(out, -1).astype(np.int64).sum(axis=1)
    if bias is not None:
        total = total + np.broadcast_to(bias.reshape(-1), (out,)).astype(np.int64)
    return Requantise(total.astype(np.int32), multiplier, shift, zero_y)


def _uniform(channels: int, bias: int, multiplier: int, shift: int, zero_point: int) -> Requantise:
    return Requantise(
        np.full(channels, bias, np.int32), np.full(channels, multiplier, np.uint32), np.full(channels, shift, np.uint8),
        zero_point,
    )  # fmt: skip


_WINDOW_LISTS = {"strides": 1, "dilations": 1, "pads": 2}
"""Attributes of a window, with how many numbers they have for each dimension."""


def _window(node: ir.Node, form: Form, kernel: Any) -> Window:
    """Geometry of a node on `form`, with automatic padding resolved as ONNX defines it."""
    two = 2 if len(node.inputs[0].shape or ()) == 4 else 1  # type: ignore[union-attr]

    def pair(name: str) -> tuple[int, int]:
        given = attribute(node, name) or [1] * two
        return (1, given[0]) if len(given) == 1 else (given[0], given[1])

    lengths = [len(attribute(node, name) or [0] * two * times) for name, times in _WINDOW_LISTS.items()]
    if len(kernel) not in (two, 2) or lengths != [two * times for times in _WINDOW_LISTS.values()]:
        raise OnCpu("its window has not the dimensions of its input")
    taps = tuple(kernel) if len(kernel) == 2 else (1, kernel[0])
    window = Window((taps[0], taps[1]), pair("strides"), pair("dilations"))
    if min(*window.strides, *window.dilations) < 1:
        raise OnCpu("its strides or dilations are not positive")
    pads = attribute(node, "pads") or [0] * 2 * two
    if two == 1:
        pads = [0, pads[0], 0, pads[1]]
    auto = attribute(node, "auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        begin, end = [], []
        for axis, size in enumerate(form.dims[2:]):
            total = max(0, (-(-size // window.strides[axis]) - 1) * window.strides[axis] + window.reach(axis) - size)
            small, large = total // 2, total - total // 2
            begin.append(small if auto == "SAME_UPPER" else large)
            end.append(large if auto == "SAME_UPPER" else small)
        pads = begin + end
    elif auto == "VALID":
        pads = [0, 0, 0, 0]
    if min(pads) < 0:
        raise OnCpu("negative padding")
    return replace(window, pads=(pads[0], pads[1], pads[2], pads[3]))


def _check_extent(x: Form, y: Form, window: Window) -> None:
    """The output must be as large as the window says; anything else is a broken model."""
    for axis in range(2):
        size = x.dims[2 + axis] + window.pads[axis] + window.pads[axis + 2] - window.reach(axis)
        if size < 0 or size // window.strides[axis] + 1 != y.dims[2 + axis]:
            raise OnCpu("its output shape does not follow from its window")


def _flattens(node: ir.Node) -> bool:
    """Whether `node` turns [images, ...] into [images, rest] of an image tensor."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None:
        return False
    before, after = shape(x), shape(y)
    return before is not None and after is not None and len(before) == 4 and len(after) == 2 and before[0] == after[0]


def _fixed_matrix(node: ir.Node) -> bool:
    matrix = constant(node.inputs[3])
    return matrix is not None and matrix.ndim == 2


def _one_pixel(b: ir.Value, y: ir.Value) -> bool:
    """Whether `b` holds one value for each image and channel of `y`."""
    inner, outer = shape(b), shape(y)
    return (
        inner is not None and outer is not None and len(inner) == len(outer) == 4
        and inner[:2] == outer[:2] and inner[2:] == (1, 1)
    )  # fmt: skip


_BUILDERS: dict[str, Callable[[Selector, ir.Node], None]] = {
    "QLinearConv": Selector._conv,
    "QGemm": Selector._gemm,
    "QLinearMatMul": Selector._gemm,
    "QLinearAdd": Selector._add_two,
    "QLinearMul": Selector._product,
    "QLinearGlobalAveragePool": Selector._average,
    "QLinearAveragePool": Selector._average,
    "QLinearMean": Selector._average,
    "QLinearConcat": Selector._concat,
    "MaxPool": Selector._max_pool,
    "Table": Selector._table,
}


def select(model: ir.Model, cfg: Config, refused: dict[ir.Node, str] | None = None) -> Selection:
    """Place every node of `model`."""
    return Selector(model, cfg, refused or {}).run()


__all__ = ["Choice", "Form", "OnCpu", "Selection", "inputs", "natural_form", "select"]
