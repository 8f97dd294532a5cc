"""The state of the placement: the layers so far, the nodes that they cover, and in which form each tensor lies where.

A form (ActivationLayout) is the layout in which the accelerator holds a tensor of the graph. An operator that cannot be
placed raises NotOffloadable. An attempt to lower the graph ends in a Partition, or leaves Constraints for the next one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.operands import joins_parts
from celosia.compiler.graph.values import attribute, constant, operands, shape
from celosia.compiler.layer import Activation, Layer, Storage, Window, padded_groups
from celosia.compiler.program.model import FormInfo
from celosia.hw.spec.config import Config

# Reasons of several operators.
HOST_INPUT = "the host has its input; quantise the operator that makes it, so that the accelerator has it"
OTHER_ROWS = "its rows are not in the last two axes as the accelerator holds them; reshape its input to [rows, columns]"
NO_WAY = "no setting changes that, only another operator in its place"
"""Advice at the end of a reason where nothing helps."""


class NotOffloadable(Exception):
    """Raised for an operator that must stay on the CPU. The message is the reason, `;`, and advice or NO_WAY."""


# Forms ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ActivationLayout:
    """The form of a tensor: how its elements lie as an activation of the accelerator.

    dims: [images, channels, height, width] of the activation.
    fold: "" for the tensor as it is. "xy" or "x": im2col by the host; each pixel holds in its channels the window (or
        one row of the window) that a convolution reads there, so that a first layer of few channels fills whole blocks.
        A key of program.model.MATRICES: the tensor is matrices, side by side in the channels; rows of a matrix are
        pixels of an image of one row, its columns are channels.
    window: the convolution's, for "xy" and "x".
    pad: the byte that the host puts where the tensor has no elements.
    inverted: whether the host complements all bits.
    """

    dims: tuple[int, int, int, int]
    fold: str = ""
    window: Window | None = None
    pad: int = 0
    inverted: bool = False

    @property
    def info(self) -> FormInfo:
        """The form as the Program holds it, for the host that arranges the tensor."""
        w = self.window or Window((1, 1))
        return FormInfo(self.dims, self.fold, w.kernel, w.strides, w.dilations, w.pads, self.pad, self.inverted)


def shape_of(value: ir.Value) -> tuple[int, ...]:
    """Return the shape of `value`. Raises NotOffloadable if it is unknown or the tensor has no elements."""
    dims = shape(value)
    if dims is None:
        raise NotOffloadable(f"the shape of {value.name!r} is not static; give the sizes of the inputs with `--shape`")
    if 0 in dims:
        raise NotOffloadable(f"{value.name!r} is empty; leave the operator out of the model")
    return dims


def natural_form(value: ir.Value, rows: bool = False) -> ActivationLayout:
    """Return the form of a tensor without fold.

    Four axes are [images, channels, height, width]; three are [images, channels, width]. A matrix, or any tensor where
    `rows` is set, has its last axis as channels and all others as images of one pixel. Raises NotOffloadable if the
    shape is unknown or has another number of axes.
    """
    dims = shape_of(value)
    if len(dims) == 4 and not rows:
        return ActivationLayout((dims[0], dims[1], dims[2], dims[3]))
    if len(dims) == 3 and not rows:
        return ActivationLayout((dims[0], dims[1], 1, dims[2]))
    if len(dims) >= 1 and (rows or len(dims) == 2):
        return ActivationLayout((math.prod(dims[:-1]), dims[-1], 1, 1))
    raise NotOffloadable(f"{value.name!r} has {len(dims)} dimensions; reshape it to one with two to four")


# Layers and the tensors that they read and write ----------------------------------------------------------------------


CACHE = "cache"
"""Key in the `meta` of a value: the input of `compile(caches=...)` that the value is, or whose first rows it holds."""
Reads = dict[Storage, tuple[ir.Value, ActivationLayout]]
"""Storage that the host fills before the layer runs -> the tensor and the form in which the host arranges it."""


@dataclass
class LayerAssignment:
    """A layer with the graph's nodes that it covers, and the tensors that it reads and writes.

    reads: what the host fills for it. value: the tensor written. note: a remark for reports, such as on exactness.
    separate_cycles, block_cycles: of a block, the cycles of its layers one by one, and as a block (LayerInfo); else 0.
    """

    layer: Layer
    nodes: list[ir.Node]
    reads: Reads
    value: ir.Value
    note: str = ""
    separate_cycles: float = 0
    block_cycles: float = 0


def part_name(node: ir.Node, number: int, count: int) -> str:
    """Return the name of layer `number` of the `count` layers of `node`."""
    return node.name or "" if count == 1 else f"{node.name}.{number}"


def can_fuse_reader(choice: LayerAssignment, value: ir.Value | None) -> bool:
    """Whether the only reader of `value` can be fused into the layer of `choice`, which makes it.

    A layer with a residual, a softmax or a normalisation takes nothing more.
    """
    return (
        value is not None and choice.value is value and len(list(value.uses())) == 1
        and not value.is_graph_output() and choice.layer.epilogue.residual is None
        and not choice.layer.works_on_rows
    )  # fmt: skip


def cache_of(value: ir.Value) -> ir.Value | None:
    """Return the cache input (`compile(caches=...)`) whose first rows `value` holds, perhaps with more rows appended.

    None if `value` has nothing to do with a cache.
    """
    producer, rank = value.producer(), len(value.shape or ())
    if producer is not None and joins_parts(producer):
        first, along_rows = producer.inputs[0], rank > 1 and attribute(producer, "axis") in (rank - 2, -2)
        return cache_of(first) if along_rows and first is not None else None
    cache: ir.Value | None = value.meta.get(CACHE)
    return cache


@dataclass
class Partition:
    """The result of the placement.

    choices: layers in the order in which they run. cpu: operators on the CPU, with the reason. views: nodes that take
    no step, with a remark for reports. forms: layout of each tensor that the accelerator holds. written: where each
    tensor lies that layers write. A view of such a tensor lies there, too; it is listed only if it has other dimensions
    or is a part.
    """

    choices: list[LayerAssignment] = field(default_factory=list)
    cpu: dict[ir.Node, str] = field(default_factory=dict)
    views: dict[ir.Node, str] = field(default_factory=dict)
    forms: dict[ir.Value, ActivationLayout] = field(default_factory=dict)
    written: dict[ir.Value, Activation] = field(default_factory=dict)


def unreachable_tensors(graph: ir.Graph, selection: Partition) -> set[ir.Value]:
    """Return the tensors that the host needs but cannot read where layers write them.

    The host needs outputs of the graph, operands of CPU operators, and tensors that it arranges for layers. It reads
    whole images only, not the strided pixels of a part of another tensor.
    """
    packed = [value for choice in selection.choices for value, _ in choice.reads.values()]
    waiting = [*graph.outputs, *packed, *(value for node in selection.cpu for value in operands(node))]
    unreachable: set[ir.Value] = set()
    seen: set[ir.Value] = set()
    while waiting:
        value = waiting.pop()
        act, producer = selection.written.get(value), value.producer()
        if value in seen or (act is not None and act.strided_view is None):
            continue
        seen.add(value)
        if producer is not None and producer in selection.views:
            waiting += operands(producer)
        elif act is not None:
            unreachable.add(value)
    return unreachable


@dataclass(frozen=True)
class Constraints:
    """Requirements of the next attempt to lower a graph.

    on_cpu: operators that stay on the CPU, with the reason. unblocked: operators whose layers join no block. unmoved:
    tensors that keep storages of their own, because the host reads them and cannot read part of a concatenation.
    unpadded: concatenations without padding between their parts, because a CPU operator reads them. compared: sentences
    for the user on launches whose cycles were compared with the CPU's.
    """

    on_cpu: Mapping[ir.Node, str] = field(default_factory=dict)
    unblocked: frozenset[ir.Node] = frozenset()
    unmoved: frozenset[ir.Value] = frozenset()
    unpadded: frozenset[ir.Node] = frozenset()
    compared: tuple[str, ...] = ()

    def refuse(
        self, on_cpu: Mapping[ir.Node, str], unblocked: Collection[ir.Node] = (), compared: Collection[str] = ()
    ) -> Constraints:
        """Add operators to `on_cpu` and `unblocked`.

        `unmoved` and `unpadded` start empty, since they depend on the placement, which is new.
        """
        return Constraints(
            {**self.on_cpu, **on_cpu}, self.unblocked | frozenset(unblocked),
            compared=tuple(dict.fromkeys((*self.compared, *compared))),
        )  # fmt: skip

    def separate(self, unmoved: Collection[ir.Value], unpadded: Collection[ir.Node]) -> Constraints:
        """Add tensors to `unmoved` and concatenations to `unpadded`."""
        return replace(self, unmoved=self.unmoved | frozenset(unmoved), unpadded=self.unpadded | frozenset(unpadded))


UNCONSTRAINED = Constraints()
"""Constraints of the first attempt."""


class Placement:
    """State while nodes are placed one after the other; `selection` becomes the result.

    channel_positions: concatenations with padding channels between their parts -> the channel at which each of the
        tensor's own channels lies.
    producers: tensor -> the layer that writes it, where one layer does.
    part_producers: tensor -> the layers that write a part of it each.
    viewed: view -> the tensor whose bytes it shows.
    padded_outputs: tensors that layers write with the byte `pad` of their form in channels beyond the last.
    parts: tensors that are parts of other tensors, in whose storages they lie.
    host_activations: tensor and form -> the activation that the host fills.
    enclosing: storage that has become a part of another -> which part (see `resolve_regions`).
    reshaped: storages that are also read as images of other sizes, and so cannot become a part of another.
    read_as_rows: tensors whose readers want rows as pixels; None until `elementwise` needs to know.
    between_views: tensors without a form, between a stored tensor and its views -> that tensor, and the places of their
        elements in it (views.py).
    """

    def __init__(self, cfg: Config, unmoved: Collection[ir.Value] = (), unpadded: Collection[ir.Node] = ()) -> None:
        """unmoved, unpadded: see `Constraints`."""
        self.cfg, self.unmoved, self.unpadded = cfg, unmoved, unpadded
        self.selection = Partition()
        self.channel_positions: dict[ir.Value, NDArray[np.int64]] = {}
        self.producers: dict[ir.Value, LayerAssignment] = {}
        self.part_producers: dict[ir.Value, list[LayerAssignment]] = {}
        self.viewed: dict[ir.Value, ir.Value] = {}
        self.padded_outputs: set[ir.Value] = set()
        self.parts: set[ir.Value] = set()
        self.host_activations: dict[tuple[ir.Value, ActivationLayout], Activation] = {}
        self.enclosing: dict[Storage, Activation] = {}
        self.reshaped: set[Storage] = set()
        self.read_as_rows: set[ir.Value] | None = None
        self.between_views: dict[ir.Value, tuple[ir.Value, NDArray[np.int64]]] = {}

    def viewed_tensor(self, value: ir.Value) -> ir.Value:
        """Return the tensor that `value` is a view of, or `value` itself."""
        return self.viewed.get(value, value)

    def held_form(self, value: ir.Value) -> ActivationLayout | None:
        """Return the form in which the accelerator's memory holds `value`; None if only the host has it so far."""
        return self.selection.forms.get(value)

    def read(self, value: ir.Value | None, form: ActivationLayout, reads: Reads, constants: bool = False) -> Activation:
        """Return the activation from which a layer reads `value` in `form`.

        It is what another layer has written, if that has this form; else one that the host fills, added to `reads`.
        constants: whether `value` may be a constant. Raises NotOffloadable for a constant otherwise.
        """
        if value is None or (constant(value) is not None and not constants):
            raise NotOffloadable("an operand is a constant; the accelerator takes constants as weights only")
        if self.held_form(value) == form:
            return self.selection.written[self.viewed_tensor(value)]
        if (value, form) not in self.host_activations:
            self.host_activations[value, form] = self.new_activation(value, form)
        reads[self.host_activations[value, form].storage] = (value, form)
        return self.host_activations[value, form]

    def has_own_storage(self, value: ir.Value | None) -> bool:
        """Whether layers write `value` into a storage of its own, which can still become a part of another."""
        if value is None or value in self.unmoved or value in self.parts:
            return False
        act = self.selection.written.get(value)
        if act is None or act.storage in self.enclosing or act.storage in self.reshaped:
            return False
        is_whole_storage = act.storage.groups == padded_groups(self.cfg, act.channels)
        return act.group_offset == 0 and act.strided_view is None and is_whole_storage

    def add_parts(
        self, node: ir.Node, layers: list[Layer], reads: Reads, y: Activation, form: ActivationLayout, note: str = ""
    ) -> None:
        """Place several layers, each of which writes a part of `y`, the output of `node`."""
        value = node.outputs[0]
        self.part_producers[value] = [LayerAssignment(layer, [node], reads, value, note) for layer in layers]
        self.selection.choices += self.part_producers[value]
        self.selection.forms[value], self.selection.written[value] = form, y

    def add_layer(self, node: ir.Node, layer: Layer, reads: Reads, form: ActivationLayout, note: str = "") -> None:
        """Place the one layer that covers `node` and writes its output in `form`."""
        choice = LayerAssignment(layer, [node], reads, node.outputs[0], note)
        self.selection.choices.append(choice)
        self.record_output(choice, node.outputs[0], form)

    def record_output(self, choice: LayerAssignment, value: ir.Value, form: ActivationLayout) -> None:
        """Record that the layer of `choice` writes `value` in `form`."""
        choice.value = value
        self.producers[value] = choice
        self.selection.forms[value] = form
        self.selection.written[value] = choice.layer.y

    def forget_output(self, choice: LayerAssignment) -> None:
        """Undo `record_output`, since the layer will write another tensor: the output of a node fused into it."""
        del self.producers[choice.value], self.selection.forms[choice.value], self.selection.written[choice.value]

    def new_activation(self, value: ir.Value, form: ActivationLayout) -> Activation:
        """Create an activation for `value` in a new storage of its own; a cache's storage is lasting."""
        return Activation.alone(self.cfg, value.name or "", *form.dims, lasting=cache_of(value) is not None)

    def common_form(self, *values: ir.Value) -> ActivationLayout:
        """Return the form in which the accelerator holds one of `values`, or else the natural form of the first."""
        for value in values:
            form = self.held_form(value)
            if form is not None:
                return form
        try:
            return natural_form(values[0])
        except NotOffloadable:
            return natural_form(values[0], rows=True)
