"""The passes over the graph of a model, before its operators are placed."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial

import onnx_ir as ir

from celosia.compiler.graph.averages import round_averages
from celosia.compiler.graph.batchnorm import fold_batchnorm
from celosia.compiler.graph.block_sums import sum_blocks
from celosia.compiler.graph.channels import order_channels
from celosia.compiler.graph.cse import merge_equal
from celosia.compiler.graph.dead import remove_dead
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.fold import fold, fold_imported
from celosia.compiler.graph.identities import remove_wires, simplify
from celosia.compiler.graph.layout import layout
from celosia.compiler.graph.passes import GraphPass, Pipeline
from celosia.compiler.graph.quantized import Integerise
from celosia.compiler.graph.shapes import infer_shapes
from celosia.compiler.graph.sums import round_sums
from celosia.compiler.graph.tables import compose_tables
from celosia.compiler.graph.transposed import convolve_transposed
from celosia.compiler.graph.transposed_values import transpose_attention_values
from celosia.compiler.program.model import ROUNDINGS
from celosia.compiler.switches import PARTS
from celosia.hw.spec.config import Config, did_you_mean


def _to_integers(model: ir.Model, norms: bool = False) -> None:
    Integerise(model, norms).run()


PASSES = Pipeline(
    GraphPass("shapes", "shapes come from the operators' expressions or are compared", infer_shapes, inside=False),
    GraphPass("fold", "operators on constants are computed, and the shapes that depend on them", fold_imported),
    GraphPass("wires", "Identity, Dropout and Cast to the same type go", remove_wires),
    GraphPass("integer", "QDQ patterns become integer operators", _to_integers),
    GraphPass("tables", "functions of one 8-bit tensor become tables", compose_tables),
    GraphPass(
        "fold-quantised", "constants that QDQ patterns did not take are computed", partial(fold, keep=frozenset())
    ),
    GraphPass("identities", "operators that change nothing go, two that make one become one", simplify),
    GraphPass("batch-norm", "scales and offsets of channels move into weights", fold_batchnorm),
    GraphPass("channels", "channels are chosen and ordered in the weights of the convolution before", order_channels),
    GraphPass("phases", "transposed convolutions of floats become convolutions", convolve_transposed),
    GraphPass("common", "operators that compute the same are computed once", merge_equal),
    GraphPass(
        "layout", "float convolutions, and what is between them, work on blocks of channels", layout, inside=False
    ),
    GraphPass("fold-again", "what has become constant is computed", partial(fold, keep=frozenset())),
    GraphPass("dead", "what nothing reads is removed", remove_dead),
)
"""What happens to the graph before operators are placed, in order."""
NEEDED = ("shapes", "fold", "integer", "dead")
"""Passes that the others rely on."""


def for_hardware(cfg: Config) -> Iterator[GraphPass]:
    """Passes that prepare for what not every Config has."""
    if cfg.softmax:
        turn = partial(transpose_attention_values, cfg=cfg)
        yield GraphPass("turn", "values of attention are turned by a product", turn, inside=False)
    if cfg.sums:
        add = partial(sum_blocks, cfg=cfg)
        yield GraphPass(
            "block-sums", "products by weights of few bits are sums of integers by blocks", add, inside=False
        )


ROUNDED = (
    GraphPass("sums", "sums of bytes that floats alone would round are rounded correctly", round_sums),
    GraphPass("averages", "averages of bytes that floats alone would round are rounded correctly", round_averages),
)
"""With rounding = "correct", behind all others."""


def passes_of(left_out: Collection[str], rounding: str) -> Pipeline:
    """PASSES that are not left out, and ROUNDED where `rounding` asks for them. ModelError where a name is none, or one
    that nothing does without."""
    known = [each.name for each in PASSES if each.name not in NEEDED] + list(PARTS)
    for name in left_out:
        if name not in known:
            raise ModelError(
                f"nothing is compiled without {name!r}{did_you_mean(name, known)}; take {', '.join(known)}"
            )
    if rounding not in ROUNDINGS:
        close = did_you_mean(rounding, ROUNDINGS)
        raise ModelError(f"rounding is {rounding!r}{close}; take {' or '.join(ROUNDINGS)}")
    correctly = partial(_to_integers, norms=rounding == "correct")
    passes = (replace(each, run=correctly) if each.run is _to_integers else each for each in PASSES)
    behind = ROUNDED if rounding == "correct" else ()
    return Pipeline(*Pipeline(*passes).without(left_out), *behind)
