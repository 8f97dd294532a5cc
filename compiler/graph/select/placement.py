"""Layers with the nodes that they cover, and where the tensors lie that they read and write."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.operands import joins_parts
from celosia.compiler.graph.select.forms import ActivationLayout, NotOffloadable, natural_form
from celosia.compiler.graph.values import attribute, constant, operands
from celosia.compiler.layer import Activation, Layer, Storage, padded_groups
from celosia.hw.spec.config import Config

CACHE = "cache"
"""Key in the meta of a cache input, and of its first rows; the value is the input."""
Reads = dict[Storage, tuple[ir.Value, ActivationLayout]]
"""For each storage that the host fills: the tensor that it holds and its form."""


@dataclass
class LayerAssignment:
    """A layer with the graph's nodes that it covers, and the tensors it reads and writes."""

    layer: Layer
    nodes: list[ir.Node]
    reads: Reads
    value: ir.Value
    """The tensor written."""
    note: str = ""
    alone: float = 0
    together: float = 0
    """For a block: cycles of its layers one by one, and as a block; see LayerInfo."""


@dataclass
class Partition:
    """The result: layers, the CPU's nodes with reasons, aliases (views) and where concatenations put their parts."""

    choices: list[LayerAssignment] = field(default_factory=list)
    cpu: dict[ir.Node, str] = field(default_factory=dict)
    views: dict[ir.Node, str] = field(default_factory=dict)
    forms: dict[ir.Value, ActivationLayout] = field(default_factory=dict)
    """Layout of each tensor that the accelerator holds."""
    written: dict[ir.Value, Activation] = field(default_factory=dict)
    """Where each tensor lies that layers write; views of it lie there, too, and are not listed."""


def out_of_reach(graph: ir.Graph, selection: Partition) -> set[ir.Value]:
    """Find tensors that the host needs and cannot read where layers write them: it reads whole images only."""
    packed = [value for choice in selection.choices for value, _ in choice.reads.values()]
    waiting = [*graph.outputs, *packed, *(value for node in selection.cpu for value in operands(node))]
    found: set[ir.Value] = set()
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
            found.add(value)
    return found


def cache_of(value: ir.Value) -> ir.Value | None:
    """The input whose first rows `value` has, and perhaps others behind them, where it is one of `compile`'s caches."""
    producer, rank = value.producer(), len(value.shape or ())
    if producer is not None and joins_parts(producer):
        first, along_rows = producer.inputs[0], rank > 1 and attribute(producer, "axis") in (rank - 2, -2)
        return cache_of(first) if along_rows and first is not None else None
    held: ir.Value | None = value.meta.get(CACHE)
    return held


class Placement:
    """State of the placement so far; `selection` is the result."""

    def __init__(self, cfg: Config, unmoved: Collection[ir.Value] = (), unpadded: Collection[ir.Node] = ()) -> None:
        """unmoved, unpadded: see `Constraints`."""
        self.cfg, self.unmoved, self.unpadded = cfg, unmoved, unpadded
        self.selection = Partition()
        self.gaps: dict[ir.Value, NDArray[np.int64]] = {}
        """Concatenations with channels that mean nothing between their parts: where each channel of the tensor is."""
        self.made: dict[ir.Value, LayerAssignment] = {}
        self.alias: dict[ir.Value, ir.Value] = {}
        """Views, and the tensor that each is a view of."""
        self.assembled: dict[ir.Value, list[LayerAssignment]] = {}
        """Tensors of which several layers write a part each."""
        self.filled: set[ir.Value] = set()
        """Tensors whose channels beyond the last hold what their form calls `pad`, though layers write them."""
        self.parts: set[ir.Value] = set()
        """Parts of other tensors, in whose storages they lie."""
        self.given: dict[tuple[ir.Value, ActivationLayout], Activation] = {}
        """What the host fills."""
        self.inside: dict[Storage, Activation] = {}
        """Storages that lie inside another, and which part of it they are."""
        self.fixed: set[Storage] = set()
        """Storages that are read as images of other rows and columns, and cannot be part of another."""
        self.rows: set[ir.Value] | None = None
        """Tensors whose readers want rows, once somebody has asked."""

    def source(self, value: ir.Value) -> ir.Value:
        """The tensor that `value` is, or is a view of."""
        return self.alias.get(value, value)

    def held(self, value: ir.Value) -> ActivationLayout | None:
        """The form in which the accelerator holds `value`, if it does."""
        return self.selection.forms.get(value)

    def read(self, value: ir.Value | None, form: ActivationLayout, reads: Reads, constants: bool = False) -> Activation:
        """The activation of `value` in `form`: the accelerator's own, or one that the host fills. NotOffloadable for a
        constant, but where `constants`."""
        if value is None or (constant(value) is not None and not constants):
            raise NotOffloadable("an operand is a constant; the accelerator takes constants as weights only")
        if self.held(value) == form:
            return self.selection.written[self.source(value)]
        if (value, form) not in self.given:
            self.given[value, form] = self.activation(value, form)
        reads[self.given[value, form].storage] = (value, form)
        return self.given[value, form]

    def owned(self, value: ir.Value | None) -> bool:
        """Whether layers write `value` into a storage that is its own, so that it can be moved."""
        if value is None or value in self.unmoved or value in self.parts:
            return False
        act = self.selection.written.get(value)
        return act is not None and self.whole(act) and act.storage not in (*self.inside, *self.fixed)

    def whole(self, act: Activation) -> bool:
        """Whether `act` is all of its storage."""
        return act.group_offset == 0 and act.strided_view is None and act.storage.groups == padded_groups(
            self.cfg, act.channels
        )  # fmt: skip

    def assemble(
        self, node: ir.Node, layers: list[Layer], reads: Reads, y: Activation, form: ActivationLayout, note: str = ""
    ) -> None:
        """Place `layers`, each of which writes a part of `y`, the output of `node`; `add` places a single layer."""
        value = node.outputs[0]
        self.assembled[value] = [LayerAssignment(layer, [node], reads, value, note) for layer in layers]
        self.selection.choices += self.assembled[value]
        self.selection.forms[value], self.selection.written[value] = form, y

    def add(self, node: ir.Node, layer: Layer, reads: Reads, form: ActivationLayout, note: str = "") -> None:
        """Place `layer`, which covers `node` and writes its output in `form`."""
        choice = LayerAssignment(layer, [node], reads, node.outputs[0], note)
        self.selection.choices.append(choice)
        self.writes(choice, node.outputs[0], form)

    def writes(self, choice: LayerAssignment, value: ir.Value, form: ActivationLayout) -> None:
        """Note that `choice` writes `value`."""
        choice.value = value
        self.made[value] = choice
        self.selection.forms[value] = form
        self.selection.written[value] = choice.layer.y

    def no_longer_writes(self, choice: LayerAssignment) -> None:
        """Forget where the output of `choice` was stored."""
        del self.made[choice.value], self.selection.forms[choice.value], self.selection.written[choice.value]

    def activation(self, value: ir.Value, form: ActivationLayout) -> Activation:
        """`value` in a storage of its own."""
        return Activation.alone(self.cfg, value.name or "", *form.dims, lasting=cache_of(value) is not None)

    def common_form(self, *values: ir.Value) -> ActivationLayout:
        """The form in which the accelerator holds one of `values`, or the first one's natural form."""
        for value in values:
            form = self.held(value)
            if form is not None:
                return form
        try:
            return natural_form(values[0])
        except NotOffloadable:
            return natural_form(values[0], rows=True)
