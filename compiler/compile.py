"""The whole compiler on one screen: an ONNX model to a Program."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler import cpu
from celosia.compiler.graph.cost import total_macs
from celosia.compiler.graph.importer import ModelError, load
from celosia.compiler.graph.quantized import Integerise
from celosia.compiler.graph.schedule import LaunchPlan, schedule
from celosia.compiler.graph.select import Form, Selection, select
from celosia.compiler.graph.tables import compose_tables
from celosia.compiler.graph.values import attribute, constant, shape
from celosia.compiler.image import Image, LayerError, build
from celosia.compiler.program import (
    CpuStep,
    FormInfo,
    LaunchStep,
    LayerInfo,
    Pack,
    Program,
    Step,
    TensorInfo,
    Unpack,
)
from celosia.compiler.tensorize.layer import Window, inputs
from celosia.compiler.vthread.verify import verify
from celosia.hw.config import Config

Progress = Callable[[str], None]


def compile(
    source: str | Path | onnx.ModelProto, config: str | Path | Config = "pynq", progress: Progress | None = None
) -> Program:
    """Compile a model for the accelerator `config` (a preset's name, a TOML or JSON file, or a Config).

    progress: called with the name of each stage. Raises ModelError for a model, ConfigError for a Config.
    """
    started = time.perf_counter()
    say = progress or (lambda stage: None)
    cfg = Config.load(config)
    say("reading the model")
    model = load(source)
    say("integer operators")
    Integerise(model).run()
    compose_tables(model)
    say("placing operators")
    refused: dict[str, str] = {}
    while True:
        selection = select(model, cfg, refused)
        steps = schedule(model.graph, selection)
        say("tiling and instructions")
        try:
            image = _build(cfg, steps)
            break
        except LayerError as error:
            nodes = next(c.nodes for c in selection.choices if c.layer.name == error.layer)
            refused |= {node.name or "": str(error) for node in nodes}
    say("verifying instructions")
    for launch in image.launches:
        verify(cfg, image.code(launch), image.size, (0, image.constants_address))
    say("kernels for the CPU")
    program = _Assembler(model, cfg, selection, steps, image).run()
    program.name = "model" if isinstance(source, onnx.ModelProto) else Path(source).stem
    program.compile_seconds = time.perf_counter() - started
    return program


def _build(cfg: Config, steps: list[Any]) -> Image:
    plans = [step for step in steps if isinstance(step, LaunchPlan)]
    launches = [[choice.layer for choice in plan.choices] for plan in plans]
    written = []
    read = []
    for plan in plans:
        storages = {act.name: act.storage for choice in plan.choices for act in inputs(choice.layer)}
        written.append({storages[name] for choice in plan.choices for name in choice.reads})
        taken = {value.name for value in plan.taken}
        read.append({
            choice.layer.y.storage for choice in plan.choices
            if choice.layer.y.name in taken or choice.layer.y.storage in taken
        })  # fmt: skip
    return build(cfg, launches, written, read)


class _Assembler:
    """Steps with names and addresses in place of graph objects."""

    def __init__(self, model: ir.Model, cfg: Config, selection: Selection, steps: list[Any], image: Image) -> None:
        self.model, self.cfg, self.selection, self.plan, self.image = model, cfg, selection, steps, image
        self.opset = model.graph.opset_imports.get("", 21)
        self.tensors: dict[str, TensorInfo] = {}
        self.constants: dict[str, NDArray[Any]] = {}
        self.kernels: list[cpu.Kernel] = []

    def run(self) -> Program:
        graph = self.model.graph
        launches = iter(self.image.launches)
        steps: list[Step] = []
        for step in self.plan:
            steps.append(self._launch(step, next(launches)) if isinstance(step, LaunchPlan) else self._cpu(step))
        outputs = tuple(self._tensor(value) for value in graph.outputs)
        for value in graph.outputs:
            fixed = constant(value)
            if fixed is not None:
                self.constants[value.name or ""] = fixed
        return Program(
            "", self.cfg, tuple(self._tensor(value) for value in graph.inputs), outputs, self.tensors, steps,
            self.constants, self.kernels, self.image.constants, self.image.constants_address, self.image.size,
            self.image.arena_lower_bound, total_macs(graph), self._placements(),
        )  # fmt: skip

    def _tensor(self, value: ir.Value) -> TensorInfo:
        name = value.name or ""
        dims = shape(value)
        if dims is None or value.dtype is None:
            raise ModelError(f"the shape of tensor {name!r} cannot be inferred; export the model with fixed shapes")
        if value.dtype == ir.DataType.UNDEFINED:
            raise ModelError(f"tensor {name!r} has no element type; export the model with types")
        self.tensors[name] = TensorInfo(name, value.dtype.numpy().name, dims)
        return self.tensors[name]

    # The CPU ---------------------------------------------------------------------------------------------------

    def _cpu(self, node: ir.Node) -> CpuStep:
        names = tuple("" if value is None else value.name or "" for value in node.inputs)
        outputs = tuple(out.name or "" for out in node.outputs)
        reason = self.selection.cpu.get(node, "the host needs this view")
        name = node.name or f"{node.op_type}:{outputs[0]}"
        for out in node.outputs:
            self._tensor(out)
        for value in node.inputs:
            if value is not None and constant(value) is None:
                self._tensor(value)
        if node.op_type in cpu.VIEWS and len(list(filter(None, outputs))) == 1:
            return CpuStep(name, node.op_type, names[:1], outputs, reason)
        for value in node.inputs:
            fixed = constant(value)
            if fixed is not None:
                self.constants[value.name or ""] = fixed  # type: ignore[union-attr]
        attrs = {key: attribute(node, key) for key in node.attributes}
        try:
            kernel = self._kernel(node, attrs)
        except cpu.Unsupported as error:
            raise ModelError(f"operator {node.op_type} ({name}) cannot be compiled for the CPU: {error}") from None
        self.kernels.append(kernel)
        simple = {key: value for key, value in attrs.items() if isinstance(value, (int, float, str, list))}
        return CpuStep(name, node.op_type, names, outputs, reason, len(self.kernels) - 1, simple, self.opset)

    def _kernel(self, node: ir.Node, attrs: dict[str, Any]) -> cpu.Kernel:
        types: list[Any] = []
        for value in node.inputs:
            fixed = constant(value)
            if value is None:
                types.append(None)
            elif fixed is not None:
                types.append(fixed)
            else:
                info = self._tensor(value)
                types.append((info.shape, info.dtype))
        count = len(node.outputs)
        return cpu.compile_op(node.op_type, attrs, types, outputs=count, opset=self.opset, name=node.name or "")

    # The accelerator -------------------------------------------------------------------------------------------

    def _launch(self, plan: LaunchPlan, launch: Any) -> LaunchStep:
        packs, unpacks = [], []
        places = {act.name: act for c in plan.choices for act in (*inputs(c.layer), c.layer.y)}
        seen: set[str] = set()
        for choice in plan.choices:
            for name, (value, form) in choice.reads.items():
                if name in seen:
                    continue
                seen.add(name)
                act = places[name]
                self._tensor(value)
                packs.append(
                    Pack(value.name or "", _form_info(form), self.image.addresses[act.storage], act.storage_groups)
                )
        for value in plan.taken:
            info = self._tensor(value)
            act = places.get(info.name) or next(a for a in places.values() if a.storage == info.name)
            form = self.selection.forms[info.name]
            offset = act.group_offset if act.name == info.name else 0
            unpacks.append(Unpack(info.name, form.dims, self.image.addresses[act.storage], act.storage_groups, offset))
        layers = tuple(
            LayerInfo(
                choice.layer.name, type(choice.layer).__name__, tuple(node.name or "" for node in choice.nodes),
                choice.layer.macs, loaded, stored, choice.note,
            )
            for choice, loaded, stored in zip(plan.choices, launch.bytes_loaded, launch.bytes_stored, strict=True)
        )  # fmt: skip
        return LaunchStep(launch.address, launch.count, layers, launch.layer_of, tuple(packs), tuple(unpacks))

    def _placements(self) -> list[dict[str, str]]:
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
                rows.append(row | {"place": "cpu", "reason": self.selection.cpu[node]})
        return rows


def _form_info(form: Form) -> FormInfo:
    w = form.window or Window((1, 1))
    return FormInfo(form.dims, form.fold, w.kernel, w.strides, w.dilations, w.pads, form.pad)


def form_of(info: FormInfo) -> Form:
    """The Form that `info` describes."""
    return Form(info.dims, info.fold, Window(info.kernel, info.strides, info.dilations, info.pads), info.pad)


__all__ = ["ModelError", "compile", "form_of"]
