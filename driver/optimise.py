"""An ONNX model to one of fewer cycles on an accelerator, with the same bytes under onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import onnx

from celosia.compiler.compile import compile as compiled
from celosia.compiler.compile import pricing
from celosia.compiler.graph.dimensions import Shapes
from celosia.compiler.options import Options, Run, Source, taking
from celosia.compiler.program import Program
from celosia.compiler.superoptimise.optimise import Optimised
from celosia.compiler.superoptimise.optimise import optimise as optimised
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.search import SearchState
from celosia.driver.choices import SUPEROPTIMISERS
from celosia.driver.oracle import MissingLibrary, opened, require
from celosia.hw.config import Config


def optimise(
    source: str | Path | onnx.ModelProto, config: str | Path | Config = "pynq", *, budget: float = 60.0,
    shapes: Shapes | None = None, rules: Sequence[RewriteRule] = (), search: str = SUPEROPTIMISERS[0],
    progress: Callable[[str], None] = lambda stage: None, told: Callable[[SearchState], None] = lambda state: None,
    accelerator: bool = True,
) -> Optimised:  # fmt: skip
    """Rewrite a model by rules that are proved, until no rewritten one takes fewer cycles or `budget` seconds are over.

    accelerator: False for a model that runs on this processor alone; then rules of floats are taken, too, and what
    counts is the time of its kernels, on one thread.

    shapes: of inputs whose sizes are open, which the optimised model has then. rules: beside Celosia's own; they are
    proved now, which needs z3. search: of choices.SUPEROPTIMISERS. queue goes on with what is a little dearer than
    the best, too, greedy takes the best next step, milp many steps at once, which an integer program chooses, egraph
    the cheapest of all that is known to make each tensor. Ctrl-C ends the search and keeps the best so far.
    `Optimised.model` is the original where nothing better was found; what is better gives the bytes of the original
    under onnxruntime, for random inputs.

    Raises BudgetError, ModelError, ConfigError, RuleError, OracleError for a model that onnxruntime does not run, and
    MissingLibrary where onnxruntime, or scipy for milp and egraph, is not installed.
    """
    require()
    if search in ("milp", "egraph"):
        _require_scipy(search)
    cfg = Config.load(config)
    progress("reading the model")

    def oracle(model: onnx.ModelProto) -> Run:
        progress("comparing with the original under onnxruntime")
        return opened(model)

    costs = pricing(source, cfg, accelerator)
    return optimised(source, costs, budget, oracle, shapes, own=rules, told=told, way=search, floats=not accelerator)


def _require_scipy(search: str) -> None:
    try:
        import scipy.optimize  # noqa: F401
    except ImportError:
        raise MissingLibrary(f"to search by {search}, scipy is needed: pip install 'celosia[superoptimise]'") from None


@taking(Options)
def compile(source: Source, options: Options) -> Program:
    """`celosia.compiler.compile.compile`, whose text it has, with onnxruntime as the oracle of `optimise`."""
    if options.optimise is not None and options.oracle is None:
        require()
        options = replace(options, oracle=opened)
    return compiled(source, **vars(options))


compile.__doc__ = compiled.__doc__
