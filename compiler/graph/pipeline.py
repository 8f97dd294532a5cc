"""Every rewrite of a model before its operators are placed, in the order in which they run.

1. FILE_PASSES rewrite the ONNX file, before shapes are inferred.
2. IMPORT_PASSES repeat what onnxruntime's own optimiser does to quantised and float16 operators. They decide the
   bytes: the self-check compares the compiled model with what they leave, `celosia compare` with onnxruntime.
3. PASSES, `for_hardware` and ROUNDED keep the bytes, and the self-check says which of them did not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from celosia.compiler.graph.block_sums import replace_by_block_sums
from celosia.compiler.graph.channel_moves import (
    flatten_in_order,
    gather_channels,
    join_gathers,
    multiply_in_order,
    name_shuffles,
    order_channels,
)
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importing.body_types import type_bodies
from celosia.compiler.graph.importing.inlining import expand_gradients, inline_branches, inline_functions
from celosia.compiler.graph.onnxruntime_rules.float16 import compute_in_float32
from celosia.compiler.graph.onnxruntime_rules.low_precision import round_activations, widen
from celosia.compiler.graph.onnxruntime_rules.propagation import fuse_qdq_pairs, note_idle_readers
from celosia.compiler.graph.onnxruntime_rules.weights_and_biases import quantise_weights, rescale_biases
from celosia.compiler.graph.packed_projections import name_repeats, separate_projections
from celosia.compiler.graph.padded_heads import pad_heads
from celosia.compiler.graph.passes import FilePass, GraphPass, Pipeline, body_models, node_count
from celosia.compiler.graph.quantized.between import round_between
from celosia.compiler.graph.quantized.integerise import Integerise
from celosia.compiler.graph.quantized.rounded import round_averages, round_sums
from celosia.compiler.graph.quantized.tables import compose_tables
from celosia.compiler.graph.quantized.written_norms import write_norms
from celosia.compiler.graph.row_products import multiply_by_ones
from celosia.compiler.graph.rows import hoist_tables, keep_samples, merge_rows
from celosia.compiler.graph.select.matrices import can_multiply_activations
from celosia.compiler.graph.shapes import infer_shapes
from celosia.compiler.graph.simplify.blocked_layout import use_blocked_layout
from celosia.compiler.graph.simplify.convolutions import convolve_transposed, fold_batchnorm
from celosia.compiler.graph.simplify.fold import fold, fold_imported
from celosia.compiler.graph.simplify.redundant import (
    merge_equal,
    merge_quantisations,
    remove_dead,
    remove_wires,
    simplify,
)
from celosia.compiler.graph.transposed_values import transpose_attention_values
from celosia.compiler.graph.values import subgraphs
from celosia.compiler.program.model import ROUNDINGS
from celosia.compiler.switches import PARTS
from celosia.hw.spec.config import Config, did_you_mean


def _lift_constants(model: ir.Model) -> None:
    """Turn Constant operators into initializers, which is the only form of constants that passes know."""
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)


def _inline_branches(model: ir.Model) -> None:
    """Infer types in bodies of operators, then inline the branches of Ifs with a constant condition."""
    type_bodies(model)
    inline_branches(model)


def _settle_bodies(model: ir.Model) -> None:
    """Infer the shapes in bodies, fold, and inline Ifs whose condition has become constant, until nothing changes."""
    count = -1
    while any(map(subgraphs, model.graph)) and count != (count := node_count(model)):
        type_bodies(model)
        for target in (model, *body_models(model)):
            fold(target)
        inline_branches(model)


def _remove_unused(model: ir.Model) -> None:
    """Remove unused operators, after noting what they read: onnxruntime still counts them as readers."""
    note_idle_readers(model.graph)
    common.RemoveUnusedNodesPass()(model)


FILE_PASSES = (
    FilePass("gradients", "a Gradient becomes the operators of the derivatives", expand_gradients),
    FilePass("functions", "calls of functions become the functions' operators", inline_functions),
)
"""Rewrites of the file. None can be left out: the compiler has no code for the operators that they expand."""

IMPORT_PASSES = Pipeline(
    GraphPass("constants", "Constant operators become constants of the graph", _lift_constants, inside=False),
    GraphPass("branches", "an If of a constant becomes the branch that is taken", _inline_branches, inside=False),
    GraphPass("unused", "operators whose results nothing reads go", _remove_unused, inside=False),
    GraphPass("equal-quantisations", "equal QuantizeLinear become one", merge_quantisations, inside=False),
    GraphPass(
        "block-activations", "activations of MatMulNBits are rounded to bytes by blocks", round_activations,
        inside=False,
    ),
    GraphPass("double-pairs", "two QDQ pairs in a row become one", fuse_qdq_pairs, inside=False),
    GraphPass("bias-scales", "biases get the scale of their products", rescale_biases, inside=False),
    GraphPass("narrow", "integers of fewer than 8 bits become bytes", widen, inside=False),
    GraphPass(
        "float16-biases", "float16 biases between quantised tensors become integers",
        partial(quantise_weights, kind=np.float16), inside=False,
    ),
    GraphPass("float16", "float16 operators are computed in float32", compute_in_float32, inside=False),
    GraphPass(
        "float-weights", "float weights between quantised tensors become integers", quantise_weights, inside=False
    ),
)  # fmt: skip
"""Rewrites of an imported graph that repeat onnxruntime's, so that its bytes are the same."""

WRITTEN_NORMS = GraphPass("written-norms", "single operators that normalise rows become one", write_norms, inside=False)
"""A rewrite of the import with rounding = "correct" or "bytes"."""
BETWEEN = GraphPass(
    "bytes-between", "float tensors between quantised ones are rounded to bytes", round_between, inside=False
)
"""The last rewrite of the import with rounding = "bytes"."""


def import_passes_of(left_out: Collection[str], rounding: str) -> Pipeline:
    """Return IMPORT_PASSES, then WRITTEN_NORMS and BETWEEN, without those left out or not for `rounding`."""
    rounding_passes = {"correct": (WRITTEN_NORMS,), "bytes": (BETWEEN, WRITTEN_NORMS)}
    return Pipeline(*IMPORT_PASSES, *rounding_passes.get(rounding, ())).without(left_out)


def _to_integers(model: ir.Model, correctly: bool = False) -> None:
    """Replace QDQ patterns by integer operators. correctly: also those that round where onnxruntime's floats do not."""
    Integerise(model, correctly).run()


PASSES = Pipeline(
    GraphPass("shapes", "shapes come from the operators' expressions or are compared", infer_shapes, inside=False),
    GraphPass(
        "bodies",
        "shapes in bodies of operators are inferred; an If of a constant becomes a branch",
        _settle_bodies,
        inside=False,
    ),
    GraphPass("fold", "operators on constants are computed, and the shapes that depend on them", fold_imported),
    GraphPass("wires", "Identity, Dropout and Cast to the same type go", remove_wires),
    GraphPass("integer", "QDQ patterns become integer operators", _to_integers),
    GraphPass("tables", "functions of one 8-bit tensor become tables", compose_tables),
    GraphPass(
        "fold-quantised", "constants that QDQ patterns did not take are computed", partial(fold, keep=frozenset())
    ),
    GraphPass("identities", "operators that change nothing go, two that make one become one", simplify),
    GraphPass("batch-norm", "scales and offsets of channels move into weights", fold_batchnorm),
    GraphPass("shuffles", "permutations of channels by Reshape and Transpose become a Gather", name_shuffles),
    GraphPass("flattened", "products read images in the order in which they lie", flatten_in_order),
    GraphPass("channels", "channels are chosen and ordered in the weights of the convolution before", order_channels),
    GraphPass("phases", "transposed convolutions of floats become convolutions", convolve_transposed),
    GraphPass("common", "operators that compute the same are computed once", merge_equal),
    GraphPass(
        "layout",
        "float convolutions, and what is between them, work on blocks of channels",
        use_blocked_layout,
    ),
    GraphPass("fold-again", "what has become constant is computed", partial(fold, keep=frozenset())),
    GraphPass("dead", "what nothing reads is removed", remove_dead),
)
"""Rewrites of the graph before operators are placed, in order; they keep the bytes."""
NEEDED = ("constants", "branches", "unused", "shapes", "bodies", "fold", "integer", "dead")
"""Names of passes that cannot be left out, because others rely on them."""
KEEP_AFTER = "integer"
"""Name of the pass behind which inner tensors that a user keeps become outputs, so that later passes leave them."""


BY_CONFIG = (
    "row-products",
    "projections",
    "repeats",
    "samples",
    "rows",
    "hoisted-tables",
    "heads",
    "gathers",
    "joined-gathers",
    "ordered-weights",
    "turn",
    "block-sums",
)
"""Names of the passes of `for_hardware`."""


def for_hardware(cfg: Config, accelerator: bool = True) -> Iterator[GraphPass]:
    """Yield the passes that depend on the Config. accelerator: whether anything may run on it."""
    if accelerator:
        by_ones = "means of rows, and numbers for rows, become products by ones"
        yield GraphPass("row-products", by_ones, multiply_by_ones, inside=False)
    if accelerator and can_multiply_activations(cfg):
        yield GraphPass(
            "projections",
            "tensors that take columns of a product get products of their own",
            separate_projections,
            inside=False,
        )
        yield GraphPass(
            "repeats", "keys and values that heads share are repeated in one way", name_repeats, inside=False
        )
        yield GraphPass(
            "samples", "products read the rows of samples that attention needs apart", keep_samples, inside=False
        )
        yield GraphPass("rows", "rows of several axes become those of matrices", merge_rows, inside=False)
        yield GraphPass(
            "hoisted-tables", "tables move before reshapes, to the products before these", hoist_tables, inside=False
        )
        yield GraphPass(
            "heads", "heads that are no whole channel groups are padded", partial(pad_heads, cfg=cfg), inside=False
        )
    if accelerator:
        gather, join = partial(gather_channels, cfg=cfg), partial(join_gathers, cfg=cfg)
        multiply = partial(multiply_in_order, cfg=cfg)
        yield GraphPass("gathers", "parts that are no whole channel groups become Gathers", gather, inside=False)
        yield GraphPass("joined-gathers", "Gathers of channels become one, and move on", join, inside=False)
        yield GraphPass("ordered-weights", "convolutions order channels in their weights", multiply, inside=False)
    if cfg.softmax:
        transpose = partial(transpose_attention_values, cfg=cfg)
        yield GraphPass("turn", "values of attention are turned by a product", transpose, inside=False)
    if cfg.sums:
        sum_in_blocks = partial(replace_by_block_sums, cfg=cfg)
        yield GraphPass(
            "block-sums", "products by weights of few bits are sums of integers by blocks", sum_in_blocks, inside=False
        )


ROUNDED = (
    GraphPass("sums", "sums of bytes that floats alone would round are rounded correctly", round_sums),
    GraphPass("averages", "averages of bytes that floats alone would round are rounded correctly", round_averages),
)
"""Passes behind all others with rounding = "correct" or "bytes"."""


def require_known(left_out: Collection[str]) -> None:
    """Raise ModelError for a name that is no pass or part of the compiler, or of a pass that cannot be left out."""
    known = [graph_pass.name for graph_pass in (*IMPORT_PASSES, *PASSES) if graph_pass.name not in NEEDED]
    known += [WRITTEN_NORMS.name, BETWEEN.name, *BY_CONFIG, *PARTS]
    for name in left_out:
        if name not in known:
            raise ModelError(
                f"nothing is compiled without {name!r}{did_you_mean(name, known)}; take {', '.join(known)}"
            )


def passes_of(left_out: Collection[str], rounding: str) -> Pipeline:
    """Return PASSES without those left out, then ROUNDED unless `rounding` is "onnxruntime".

    Raises ModelError for a name that `require_known` refuses, and for an unknown rounding.
    """
    require_known(left_out)
    if rounding not in ROUNDINGS:
        close = did_you_mean(rounding, ROUNDINGS)
        raise ModelError(f"rounding is {rounding!r}{close}; take {' or '.join(ROUNDINGS)}")
    correctly = partial(_to_integers, correctly=rounding != ROUNDINGS[0])
    passes = (
        replace(graph_pass, run=correctly) if graph_pass.run is _to_integers else graph_pass for graph_pass in PASSES
    )
    rounding_passes = ROUNDED if rounding != ROUNDINGS[0] else ()
    return Pipeline(*Pipeline(*passes).without(left_out), *rounding_passes)


def rewrites_of(
    cfg: Config, left_out: Collection[str], rounding: str, keep: Callable[[ir.Model], None] | None = None,
    accelerator: bool = True,
) -> Pipeline:  # fmt: skip
    """Return all passes of a compilation after the import.

    accelerator: whether anything may run on it. keep: makes outputs of the inner tensors that a user keeps, behind the
    pass KEEP_AFTER; None without any.
    """
    by_config = (graph_pass for graph_pass in for_hardware(cfg, accelerator) if graph_pass.name not in left_out)
    passes = [*passes_of(left_out, rounding), *by_config]
    if keep is not None:
        position = next(position for position, graph_pass in enumerate(passes) if graph_pass.name == KEEP_AFTER)
        passes.insert(position + 1, GraphPass("keep", "tensors to keep become outputs", keep, inside=False))
    return Pipeline(*passes)
