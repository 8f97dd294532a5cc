"""An ONNX model to one of fewer cycles on an accelerator, with the same bytes under onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import onnx

from celosia.compiler.compile import price
from celosia.compiler.graph.dimensions import Shapes
from celosia.compiler.superoptimise.budget import BudgetError
from celosia.compiler.superoptimise.equal import SAMPLES, differing, inputs_of
from celosia.compiler.superoptimise.optimise import Optimised
from celosia.compiler.superoptimise.optimise import optimise as optimised
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.search import SearchState
from celosia.driver import oracle
from celosia.hw.config import Config


def optimise(
    source: str | Path | onnx.ModelProto, config: str | Path | Config = "pynq", *, budget: float = 60.0,
    shapes: Shapes | None = None, rules: Sequence[RewriteRule] = (), greedy: bool = False,
    progress: Callable[[str], None] = lambda stage: None, told: Callable[[SearchState], None] = lambda state: None,
) -> Optimised:  # fmt: skip
    """Rewrite a model by rules that are proved, until no rewritten one takes fewer cycles or `budget` seconds are over.

    shapes: of inputs whose sizes are open, which the optimised model has then. rules: beside Celosia's own; they are
    proved now, which needs z3. greedy: always the best next step, and never one that is dearer at first. Ctrl-C ends
    the search and keeps the best so far. `Optimised.model` is the original where nothing better was found; what is
    better gives the bytes of the original under onnxruntime, for random inputs.

    Raises ModelError, ConfigError, RuleError, and MissingLibrary where onnxruntime is not installed.
    """
    if budget <= 0:
        raise BudgetError(f"in {budget:g} s nothing can be found; give more, as 60s")
    oracle.require()
    cfg = Config.load(config)
    progress("reading the model")

    def differs(original: onnx.ModelProto, other: onnx.ModelProto) -> str:
        progress("comparing with the original under onnxruntime")
        return difference(original, other)

    return optimised(
        source, lambda model: price(model, cfg), budget, differs, shapes=shapes, own=rules, told=told, greedy=greedy
    )


def difference(original: onnx.ModelProto, other: onnx.ModelProto) -> str:
    """How the outputs of two models differ for SAMPLES random inputs, in a sentence; "" where no byte does.
    OracleError where onnxruntime does not run the original."""
    first = oracle.session(original)
    try:
        second = oracle.session(other)
    except oracle.OracleError as error:
        return str(error)
    for seed in range(SAMPLES):
        feed = inputs_of(original, seed)
        if why := differing(oracle.run(first, feed), oracle.run(second, feed)):
            return why
    return ""
