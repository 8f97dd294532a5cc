"""Optimise an ONNX model: search for one that computes the same bytes in fewer cycles, and compare the result's
outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importer import import_static, read
from celosia.compiler.graph.importing.dimensions import Shapes
from celosia.compiler.options import Oracle, Source
from celosia.compiler.superoptimise.compare_outputs import (
    OutputDistance,
    bound_of,
    compare_on_random_inputs,
    measure_distance,
)
from celosia.compiler.superoptimise.derivation import changes, store_derivation
from celosia.compiler.superoptimise.graph import BytesGraph
from celosia.compiler.superoptimise.matching import matches
from celosia.compiler.superoptimise.operators.definition import Unwritable
from celosia.compiler.superoptimise.price import INFEASIBLE, NOISE, Neighbourhoods, Price, Pricing
from celosia.compiler.superoptimise.proofs import RuleError, changes_values, generated_rules, proof_of, require_proved
from celosia.compiler.superoptimise.reading import AlgebraReader
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.rules import FLOATS, REALS, RULES
from celosia.compiler.superoptimise.search import (
    BudgetError,
    DerivationStep,
    DerivedGraph,
    PriceOf,
    ReportState,
    RuleSearch,
    SearchRecords,
    SearchState,
)
from celosia.compiler.superoptimise.writing import IR_WITHOUT_CONSTANT_INPUTS, AlgebraWriter
from celosia.compiler.tune.records import Records

MIN_OPSET = 13
"""The oldest opset that is taken: it has QuantizeLinear by channels, and Slice with its positions as inputs."""
MAX_TUNED_MODELS = 5
"""Limit of the best models whose schedules are tuned, where Pricing tunes."""
MAX_MODEL_BYTES = (1 << 31) - (1 << 20)
"""Limit of the bytes of one ONNX file, less what some more nodes may take."""


@dataclass(frozen=True)
class Optimised:
    """Result of a search.

    model: the best one found, or the original. steps: the derivation of the model. before, after: prices. state: the
    search at its end. refused: a sentence for each better graph whose model did not agree with the original.
    """

    model: onnx.ModelProto
    steps: tuple[DerivationStep, ...]
    before: Price
    after: Price
    state: SearchState
    refused: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)
    """Operators before and after, as graph_difference.changes lists them."""
    apart: OutputDistance | None = None
    """Distance between the outputs of both models; None without fast-math."""
    matched: dict[str, int] = field(default_factory=dict)
    """Number of places in the original where each of the caller's rules fits."""

    @property
    def report(self) -> dict[str, Any]:
        """The result as plain data: prices before and after, each step with its rule, proof and gain, and how often
        each of the caller's rules fits and what it saves. With fast-math also which steps change values, and how far
        outputs are apart.
        """
        rows, last = [], self.before
        for step in self.steps:
            rows.append(
                {"rule": step.rule, "says": step.says, "where": list(step.where), "tidied": list(step.tidied),
                 "proof": proof_of(step.rule), "cycles": step.price.cycles, "host": step.price.host,
                 "gain": last.total - step.price.total,
                 **({"changes_values": step_changes_values(step)} if self.apart else {})}
            )  # fmt: skip
            last = step.price
        return {
            "measured": self.before.measured, "cycles_before": self.before.cycles, "cycles": self.after.cycles,
            "host_before": self.before.host, "host": self.after.host,
            "priced": self.state.priced, "weighed": self.state.weighed, "seconds": self.state.seconds,
            "ended": self.state.ended, "bests": [list(best) for best in self.state.bests],
            "tuned": self.state.tuned, "refused": list(self.refused), "left_out": self.state.excluded_devices,
            "steps": rows, "rules": self._own_rules(),
            "changes": self.changes, **({"fast_math": self.apart.as_data} if self.apart else {}),
        }  # fmt: skip

    def _own_rules(self) -> list[dict[str, Any]]:
        """List, for each of the caller's rules: places where it fits, number of estimates of its saving, the largest
        estimate, and steps that apply it.
        """
        rows = []
        for name, places in self.matched.items():
            gains, taken = self.state.gains.get(name, []), sum(step.rule == name for step in self.steps)
            saves = max(gains, default=None)
            rows.append({"rule": name, "matched": places, "weighed": len(gains), "saves": saves, "taken": taken})
        return rows


def step_changes_values(step: DerivationStep) -> bool:
    """Return whether the step's rule, or one that tidied up after it, holds in real numbers only."""
    return any(map(changes_values, (step.rule, *step.tidied)))


def graph_of(model: onnx.ModelProto, floats: bool = False, reals: bool = False) -> BytesGraph:
    """Read a model whose sizes are known into the algebra. Raises ModelError. floats: with operators on floats. reals:
    with those of fast-math, too.
    """
    shaped = import_static(model)
    values = [*shaped.graph.inputs, *(out for node in shaped.graph for out in node.outputs)]
    shapes, dtypes = {}, {}
    for value in values:
        if value.name and value.shape is not None and all(isinstance(size, int) for size in value.shape):
            shapes[value.name] = tuple(int(size) for size in value.shape)  # type: ignore[arg-type]
        if value.name and value.dtype is not None and value.dtype.name not in ("STRING", "UNDEFINED"):
            dtypes[value.name] = value.dtype.numpy().name
    return AlgebraReader(model, shapes, dtypes, floats, reals).read()


def with_shapes(source: Source, shapes: Shapes | None) -> onnx.ModelProto:
    """Copy a model, with these sizes of its inputs where they are open. ModelError for an unknown input, and for a
    model that cannot be rewritten.
    """
    model = onnx.ModelProto()
    model.CopyFrom(source if isinstance(source, onnx.ModelProto) else read(Path(source)))
    inputs = {value.name: value for value in model.graph.input}
    for name, shape in (shapes or {}).items():
        if name not in inputs:
            raise ModelError(f"{name!r} is no input of the model; its inputs are {', '.join(map(repr, inputs))}")
        dims = inputs[name].type.tensor_type.shape.dim
        if len(dims) != len(shape):
            raise ModelError(f"input {name!r} has {len(dims)} dimensions, the shape given has {len(shape)}")
        for dim, size in zip(dims, shape):
            if size is not None and size >= 0:
                dim.dim_value = size
    if shapes:
        model.graph.ClearField("value_info")
    _require_writable(model)
    return model


def _require_writable(model: onnx.ModelProto) -> None:
    """Raise ModelError for a model that is too old or too large, or whose constants callers may replace."""
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), MIN_OPSET)
    if opset < MIN_OPSET:
        raise ModelError(
            f"the model is of opset {opset}, and what is written here needs {MIN_OPSET}: convert it first with "
            "onnx.version_converter"
        )
    inputs = {value.name for value in model.graph.input} if model.ir_version >= IR_WITHOUT_CONSTANT_INPUTS else set()
    if replaceable := [constant.name for constant in model.graph.initializer if constant.name in inputs]:
        raise ModelError(
            f"{len(replaceable)} constants of the model, as {replaceable[0]!r}, are inputs, too, so that who "
            "runs it may replace them, which no rewritten model can follow: take them from graph.input first"
        )
    if model.ByteSize() >= MAX_MODEL_BYTES:
        raise ModelError(
            f"the model has {model.ByteSize():,} bytes, more than one ONNX file holds ({MAX_MODEL_BYTES:,})"
        )


def optimise(
    source: Source, pricing: Pricing, budget: float, oracle: Oracle, shapes: Shapes | None = None, *,
    own: Sequence[RewriteRule] = (), rules: Sequence[RewriteRule] | None = None, told: ReportState = lambda state: None,
    way: str = "queue", floats: bool = False, records: Records | None = None, config: str = "",
    fast_math: bool = False,
) -> Optimised:  # fmt: skip
    """Return the model of lowest price that the rules make of `source` within `budget` seconds.

    pricing: how models are priced. oracle: runs the original and the best model, whose outputs must agree; where they
    do not, the next best follows. shapes: sizes of inputs. own: the caller's rules, which are proved now. rules: by
    default RULES and the generated ones. told: called with the SearchState during the search. way: the strategy, a key
    of search.STRATEGIES. floats: use the rules of floats, too. fast_math: use rules.REALS, too, which hold in real
    numbers: outputs may then differ as far as compare_outputs.py allows. records: where results of searches are kept,
    and from which the search begins. config: digest of the Config, or name of the processor, on which prices depend.

    Ctrl-C ends the search, and the best model so far is returned. Raises BudgetError, ModelError, RuleError, and
    ValueError for a model that the oracle cannot run.
    """
    if budget <= 0:
        raise BudgetError(f"in {budget:g} s nothing can be found; give more, as 60s")
    if fast_math and not floats:
        raise RuleError("fast-math is of floats that the CPU alone computes: leave the accelerator out, or fast-math")
    rules = (*RULES, *generated_rules()) if rules is None else rules
    rules = (*(REALS if fast_math else ()), *(FLOATS if floats else ()), *rules)
    require_proved(rules, own, fast_math)
    original = with_shapes(source, shapes)
    graph = graph_of(original, floats, fast_math)

    neighbourhoods = Neighbourhoods(original, pricing)
    price_of = price_function(original, graph, pricing)
    search = RuleSearch((*rules, *own), price_of, neighbourhoods.gain, budget, told, way)
    search.begin_weighing, search.helpers = neighbourhoods.begin_weighing, pricing.helpers
    earlier = None
    if records is not None:
        earlier = SearchRecords.of(records, config, graph, way, (*rules, *own))
        search.known_steps, search.is_known_complete = earlier.steps(), earlier.has_ended(budget)
    state = search.run(graph)
    best_graphs: Sequence[DerivedGraph] = search.best_graphs
    if pricing.tuned is not None and state.ended != "interrupted":
        best_graphs = _choose_by_tuned_cycles(best_graphs, original, pricing.tuned, state)
    best, model, refused, distance = _best_that_agrees(best_graphs, original, oracle, pricing, fast_math)
    if earlier is not None and state.ended != "known":
        earlier.add(best, state, budget)
    optimised = Optimised(
        model, best.steps, search.best_graphs[0].price, best.price, state, tuple(refused),
        changes(graph, best.graph), distance, {rule.name: sum(1 for _ in matches(rule, graph)) for rule in own},
    )  # fmt: skip
    if optimised.steps:
        store_derivation(model, optimised.report)
    return optimised


def price_function(original: onnx.ModelProto, graph: BytesGraph, pricing: Pricing) -> PriceOf:
    """Return a function that prices graphs, INFEASIBLE for one that cannot be written or compiled. It must be asked
    about `graph`, the original's, first: where prices are measured, others are the original's price less a gain.
    """
    original_price: list[Price] = []

    def price_of(candidate: BytesGraph) -> Price:
        """Return the price of a graph."""
        if candidate is graph:
            original_price.append(pricing.whole(original))
            return original_price[0]
        try:
            model = AlgebraWriter(candidate, original).write()
            if pricing.measured_gain is None:
                return pricing.whole(model)
            return original_price[0].reduced_by(pricing.measured_gain(original, model))  # times drift: compare both now
        except (Unwritable, ModelError):
            return INFEASIBLE

    return price_of


def _choose_by_tuned_cycles(
    best_graphs: Sequence[DerivedGraph],
    original: onnx.ModelProto,
    tuned: Callable[[onnx.ModelProto], float],
    state: SearchState,
) -> Sequence[DerivedGraph]:
    """Tune the schedules of the original and of the last best graphs. Returns the original, then those that are cheaper
    so, the best last. Ctrl-C returns all of them unchanged.
    """
    last_bests = best_graphs[1:][-MAX_TUNED_MODELS:]
    if not last_bests:
        return best_graphs
    try:
        models = (AlgebraWriter(candidate.graph, original).write() for candidate in last_bests)
        state.tuned = [tuned(original), *map(tuned, models)]
    except KeyboardInterrupt:
        state.ended = "interrupted"
        return best_graphs
    candidates = (best_graphs[0], *last_bests)
    original_cost, *costs = [cycles + candidate.price.host for cycles, candidate in zip(state.tuned, candidates)]
    order = sorted(range(len(last_bests)), key=lambda number: (-costs[number], number))
    return [best_graphs[0], *(last_bests[number] for number in order if costs[number] < original_cost)]


def _best_that_agrees(
    best_graphs: Sequence[DerivedGraph], original: onnx.ModelProto, oracle: Oracle, pricing: Pricing, fast_math: bool
) -> tuple[DerivedGraph, onnx.ModelProto, list[str], OutputDistance | None]:
    """Return the best graph whose model gives the same bytes as the original, or numbers as near as fast-math allows;
    its model, a sentence for each better graph that does not, and the distance of outputs. Measured models must also be
    faster when timed once more.
    """
    refused: list[str] = []
    start = best_graphs[0]
    for candidate in reversed(best_graphs[1:]):
        model = AlgebraWriter(candidate.graph, original).write()
        distance = (
            measure_distance(original, model, bound_of(start.graph, candidate.graph), oracle) if fast_math else None
        )
        least = NOISE * start.price.total if any(map(step_changes_values, candidate.steps)) else 0
        why = distance.why if distance else compare_on_random_inputs(original, model, oracle)
        if not why and (pricing.measured_gain is None or pricing.measured_gain(original, model) > least):
            return candidate, model, refused, distance
        time = f"more than {1 - NOISE:.0%} of its time, for which no values are changed" if least else "no less time"
        why = why or f"timed anew beside the original, the model takes {time}"
        step = candidate.steps[-1]
        refused.append(f"the step {step.rule!r} at {', '.join(step.where)} is refused: {why}")
    return start, original, refused, OutputDistance() if fast_math else None
