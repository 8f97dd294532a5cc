"""Import a model and run the passes over its graph: the stages of `compile` before operators are placed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import onnx_ir as ir

from celosia.compiler.graph.cost import total_macs
from celosia.compiler.graph.debug_outputs import DebugOutputs
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importer import check_parameters
from celosia.compiler.graph.importing.dimensions import Shapes
from celosia.compiler.graph.importing.limits import require_memory
from celosia.compiler.graph.passes import Pipeline
from celosia.compiler.graph.pipeline import require_known, rewrites_of
from celosia.compiler.graph.select.placement import CACHE
from celosia.compiler.graph.shapes import Disagreement
from celosia.compiler.graph.specialise import specialise
from celosia.compiler.options import Options, Source
from celosia.compiler.program import PassInfo
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
    specialised = specialise(source, options.shapes, cfg.batch, declared, options.left_out, options.watch)
    model = specialised.graph
    require_memory(model)
    options.say("graph passes")
    kept = DebugOutputs(model, options.keep)
    _mark_caches(model, options.caches)
    keep = kept.expose if options.keep else None
    pipeline = rewrites_of(cfg, options.left_out, options.rounding, keep)
    infos = pipeline.run(model, observe)
    check_parameters(model)
    require_memory(model)
    return PreparedModel(
        cfg, model, specialised.batched, kept.outputs, sum(macs), [*specialised.passes, *infos],
        originals[0] if originals else None, pipeline, declared,
    )  # fmt: skip


def import_again(source: Source, options: Options, prepared: PreparedModel) -> ir.Model:
    """Import the model once more, as `prepare` did, but run no passes; the self-check repeats these one by one."""
    return specialise(source, options.shapes, prepared.cfg.batch, prepared.declared, options.left_out).graph


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
