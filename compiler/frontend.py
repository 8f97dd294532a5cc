"""Import a model and run the passes over its graph: the stages of `compile` before operators are placed.

`prepare` is the entry. DebugOutputs makes outputs of the inner tensors that a caller wants to keep. `_require_memory`
refuses a model that this machine cannot hold, before any long work.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod

import onnx_ir as ir

from celosia.compiler.graph.cost import total_macs
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importer import check_parameters, specialise
from celosia.compiler.graph.importing.dimensions import Shapes
from celosia.compiler.graph.importing.validation import MAX_RANK
from celosia.compiler.graph.passes import Pipeline
from celosia.compiler.graph.pipeline import require_known, rewrites_of
from celosia.compiler.graph.select.placement import CACHE
from celosia.compiler.graph.shapes import Disagreement
from celosia.compiler.graph.values import constant, dtype_name, is_op, shape
from celosia.compiler.options import Options, Source
from celosia.compiler.program import PassInfo
from celosia.compiler.program.dtypes import itemsize
from celosia.compiler.program.host.op import HostError, check_size
from celosia.compiler.selfcheck.imported_model import Original
from celosia.hw.spec.config import Config, did_you_mean


@dataclass(frozen=True)
class PreparedModel:
    """A graph after all passes.

    batched: inputs whose first axis counts samples. outputs: number of the model's own outputs, which come first; the
    tensors of `keep` follow. macs: multiplications of the model's own operators. infos: what each pass did. original:
    the graph as imported, with which the self-check compares; None without a check. pipeline: the passes after the
    import. declared: whether the shapes that the model declares for its inner tensors were used.
    """

    cfg: Config
    graph: ir.Model
    batched: tuple[str, ...]
    outputs: int
    macs: int
    infos: list[PassInfo]
    original: Original | None
    pipeline: Pipeline
    declared: bool


def prepare(source: Source, options: Options) -> PreparedModel:
    """Import a model and run all passes.

    If the model declares wrong shapes for inner tensors, all these are ignored, with a warning.
    Raises ModelError for a model, ConfigError for a Config.
    """
    try:
        return _prepare(source, options, True)
    except Disagreement as error:
        prepared = _prepare(source, options, False)
        warnings.warn(f"the model declares wrong shapes, which are left out: {error}", stacklevel=2)
        return prepared


def _prepare(source: Source, options: Options, declared: bool) -> PreparedModel:
    """Import a model and run all passes. declared: whether shapes that it declares for inner tensors are used.

    Raises Disagreement if one of these is wrong; `prepare` then does without them.
    """
    cfg = Config.load(options.config)
    require_known(options.left_out)
    originals: list[Original] = []
    macs: list[int] = []

    def observe(name: str, model: ir.Model) -> None:
        """Record the imported graph and its MACs, and pass each graph on to `watch`."""
        if name == "import" and options.check:
            originals.append(Original(model))
        if name == "fold":  # shapes are known
            macs.append(total_macs(model.graph))
        if options.watch is not None:
            options.watch(name, model)

    options.say("reading the model")
    specialised = specialise(
        source, options.shapes, cfg.batch, declared, options.left_out, options.watch, options.rounding
    )
    model = specialised.graph
    _require_memory(model)
    options.say("graph passes")
    kept = DebugOutputs(model, options.keep)
    _mark_caches(model, options.caches)
    keep = kept.expose if options.keep else None
    pipeline = rewrites_of(cfg, options.left_out, options.rounding, keep, options.accelerator)
    infos = pipeline.run(model, observe)
    check_parameters(model)
    _require_memory(model)
    return PreparedModel(
        cfg, model, specialised.batched, kept.outputs, sum(macs), [*specialised.passes, *infos],
        originals[0] if originals else None, pipeline, declared,
    )  # fmt: skip


def import_again(source: Source, options: Options, prepared: PreparedModel) -> ir.Model:
    """Import the model once more, as `prepare` did, but run no passes; the self-check repeats these one by one."""
    cfg = prepared.cfg
    return specialise(
        source, options.shapes, cfg.batch, prepared.declared, options.left_out, rounding=options.rounding
    ).graph


def _mark_caches(model: ir.Model, names: Sequence[str]) -> None:
    """Mark the inputs `names` as caches, which the accelerator's memory keeps from run to run.

    Raises ModelError for a name of no input.
    """
    inputs = {value.name: value for value in model.graph.inputs}
    for name in names:
        if name not in inputs:
            raise ModelError(f"cache {name!r} is no input{did_you_mean(name, filter(None, inputs))}")
        inputs[name].meta[CACHE] = inputs[name]


@contextmanager
def naming_shapes(shapes: Shapes | None) -> Iterator[None]:
    """Add the shapes that the caller gave to the message of every ModelError raised inside the context."""
    try:
        yield
    except ModelError as error:
        if not shapes:
            raise
        text = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ModelError(f"{error} (with the shapes given: {text})") from None


class DebugOutputs:
    """Inner tensors of a model that become outputs of its graph, for debugging.

    They become outputs after QDQ patterns have become integer operators, so that no layer, block or kernel fuses them
    away. Tensors inside a QDQ pattern, such as the float sums of a quantised convolution, do not exist.

    wanted: names of tensors, or "all" for those that the model names and the graph still has. Raises ModelError for a
    name that no operator of `model` makes.

    known: names of all results in the model. outputs: number of the model's own outputs. neighbours: see `_neighbours`.
    """

    def __init__(self, model: ir.Model, wanted: str | Sequence[str]) -> None:
        self.all = wanted == "all"
        self.names = [wanted] if isinstance(wanted, str) else list(wanted)
        self.known = {out.name for node in model.graph for out in node.outputs if out.name}
        self.integers_of = {
            node.outputs[0].name: _first_input_name(node) for node in model.graph if is_op(node, "DequantizeLinear")
        }
        """Name of a dequantised tensor -> name of the integer tensor that it is made of."""
        self.neighbours = _neighbours(model.graph)
        self.outputs = len(model.graph.outputs)
        for name in () if self.all else self.names:
            if name not in self.known:
                close = get_close_matches(name, self.known, 3)
                hint = f"; is it {' or '.join(map(repr, close))}" if close else ""
                raise ModelError(f"no operator of the model makes a tensor {name!r} to keep{hint}")

    def expose(self, model: ir.Model) -> None:
        """Make the tensors outputs of `model`'s graph. Raises ModelError where a pass has removed one."""
        graph = model.graph
        remaining = {out.name: out for node in graph for out in node.outputs if out.name in self.known}
        chosen = [value for value in remaining.values() if _can_be_kept(value)]
        if not self.all:
            for name in self.names:
                if name not in remaining:
                    raise ModelError(
                        f"tensor {name!r} is computed nowhere, {self._explain_missing(name, {*remaining})}"
                    )
            chosen = [remaining[name] for name in self.names if not remaining[name].is_graph_output()]
        graph.outputs.extend(dict.fromkeys(chosen))

    def _explain_missing(self, name: str, remaining: set[str]) -> str:
        """Say why tensor `name` is gone, and which remaining tensor is the nearest to keep instead.

        remaining: names of the tensors that remain.
        """
        if (integers := self.integers_of.get(name)) in remaining:
            return f"for integers stand for it; keep {integers!r}, of which it is the DequantizeLinear"
        waiting, seen = [name], {name}
        while waiting:
            for result in self.neighbours.get(waiting.pop(0), ()):
                if result in remaining:
                    return f"for an integer operator makes its quantised form; keep {result!r}"
                if result not in seen:
                    seen.add(result)
                    waiting.append(result)
        return "for nothing that the model returns needs it"


def _neighbours(graph: ir.Graph) -> dict[str, list[str]]:
    """Return {tensor: tensors that are computed from it}, by name, to suggest one in place of a tensor that is gone."""
    results_of: dict[str, list[str]] = {}
    for node in graph:
        for value in node.inputs:
            if value is not None and value.name:
                results_of.setdefault(value.name, []).extend(out.name for out in node.outputs if out.name)
    return results_of


def _first_input_name(node: ir.Node) -> str | None:
    """Return the name of a node's first input; None if it has none."""
    return node.inputs[0].name if node.inputs and node.inputs[0] is not None else None


def _can_be_kept(value: ir.Value) -> bool:
    """Return whether a tensor can become an output: it has a type and a static shape, and depends on an input."""
    has_type = isinstance(value.type, ir.TensorType) and value.dtype not in (None, ir.DataType.UNDEFINED)
    node = value.producer()
    varies = node is not None and any(constant(operand) is None for operand in node.inputs if operand is not None)
    return has_type and varies and shape(value) is not None and not value.is_graph_output()


def _require_memory(model: ir.Model) -> None:
    """Raise ModelError where one tensor alone is larger than this machine's memory, or has more axes than MAX_RANK."""
    graph = model.graph
    for value in (*graph.inputs, *(out for node in graph for out in node.outputs)):
        dims, node = shape(value), value.producer()
        if value.shape is not None and len(value.shape) > MAX_RANK:
            raise ModelError(
                f"tensor {value.name!r} has {len(value.shape)} dimensions, and no more than {MAX_RANK} can be; "
                "reshape it"
            )
        if dims is not None and value.dtype not in (None, ir.DataType.UNDEFINED):
            label = "" if node is None else f"{node.op_type} ({node.name or value.name})"
            description = f"{label}: output {value.name!r}" if label else f"input {value.name!r}"
            try:
                check_size(prod(dims) * itemsize(dtype_name(value)), f"{description} {list(dims)}")
            except HostError as error:
                raise ModelError(str(error)) from None
