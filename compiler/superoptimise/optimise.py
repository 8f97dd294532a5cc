"""An ONNX model to one that computes the same bytes in fewer cycles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importing.dimensions import Shapes
from celosia.compiler.graph.importing.importer import load, read
from celosia.compiler.options import Oracle, Source
from celosia.compiler.superoptimise.budget import BudgetError
from celosia.compiler.superoptimise.changes import changes
from celosia.compiler.superoptimise.derivation import noted
from celosia.compiler.superoptimise.equal import difference
from celosia.compiler.superoptimise.float_forms import FloatReader
from celosia.compiler.superoptimise.forms import READER
from celosia.compiler.superoptimise.graph import BytesGraph
from celosia.compiler.superoptimise.kept import KeptSearches
from celosia.compiler.superoptimise.matching import matches
from celosia.compiler.superoptimise.neighbourhood import NOISE, Neighbourhoods
from celosia.compiler.superoptimise.price import INFEASIBLE, Price, Pricing
from celosia.compiler.superoptimise.proofs import RuleError, changes_values, proof_of, require_proved
from celosia.compiler.superoptimise.real_forms import RealReader
from celosia.compiler.superoptimise.rounding import Apart, apart, bound_of
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.rules import FLOATS, REALS, RULES
from celosia.compiler.superoptimise.search import PriceOf, Searching, Told
from celosia.compiler.superoptimise.state import Derived, Found, SearchState
from celosia.compiler.superoptimise.stored import generated_rules
from celosia.compiler.superoptimise.writing import CONSTANTS_APART, OnnxWriter, Unwritable
from celosia.compiler.tune.records import Records

OLDEST = 13
"""Opset: QuantizeLinear by channels, Slice with its places as inputs."""
RETIMED = 5
"""Best models that are tuned where Pricing can."""
LARGEST = (1 << 31) - (1 << 20)
"""Bytes of a file of ONNX, less what a few nodes more may take."""


@dataclass(frozen=True)
class Optimised:
    """model: the best that was found, or the original. steps: how it came to be. refused: what was better and not the
    same, in sentences."""

    model: onnx.ModelProto
    steps: tuple[Derived, ...]
    before: Price
    after: Price
    state: SearchState
    refused: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)
    """Operators before and after, as changes.py lists them."""
    apart: Apart | None = None
    """Distance between the outputs of the two models, with fast-math."""
    matched: dict[str, int] = field(default_factory=dict)
    """Places of the original where each rule of the caller's fits."""

    @property
    def report(self) -> dict[str, Any]:
        """Plain data: cycles and host cycles before and after, and each step with its rule and gain; nanoseconds of
        the CPU where they are measured. For each rule of the caller's how often it fits, and what it saves. Of
        fast-math also which steps change values, and how far outputs are apart."""
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
            "ended": self.state.ended, "bests": [list(each) for each in self.state.bests],
            "tuned": self.state.tuned, "refused": list(self.refused), "left_out": self.state.left_out,
            "steps": rows, "rules": self._own_rules(),
            "changes": self.changes, **({"fast_math": self.apart.plain} if self.apart else {}),
        }  # fmt: skip

    def _own_rules(self) -> list[dict[str, Any]]:
        """For each rule of the caller's: places where it fits, those weighed, the most that one saves by estimate, and
        steps that it is."""
        found = []
        for name, places in self.matched.items():
            gains, taken = self.state.gains.get(name, []), sum(step.rule == name for step in self.steps)
            saves = max(gains, default=None)
            found.append({"rule": name, "matched": places, "weighed": len(gains), "saves": saves, "taken": taken})
        return found


def step_changes_values(step: Derived) -> bool:
    """Whether its rule, or one that tidied up behind it, holds in real numbers alone."""
    return any(map(changes_values, (step.rule, *step.tidied)))


def graph_of(model: onnx.ModelProto, floats: bool = False, reals: bool = False) -> BytesGraph:
    """The algebra of a model whose sizes are known. floats: with operators of floats; reals: with those of fast-math.
    ModelError."""
    shaped = load(model)
    values = [*shaped.graph.inputs, *(out for node in shaped.graph for out in node.outputs)]
    shapes, dtypes = {}, {}
    for value in values:
        if value.name and value.shape is not None and all(isinstance(size, int) for size in value.shape):
            shapes[value.name] = tuple(int(size) for size in value.shape)  # type: ignore[arg-type]
        if value.name and value.dtype is not None and value.dtype.name not in ("STRING", "UNDEFINED"):
            dtypes[value.name] = value.dtype.numpy().name
    return (RealReader if reals else FloatReader if floats else READER)(model, shapes, dtypes).read()


def with_shapes(source: Source, shapes: Shapes | None) -> onnx.ModelProto:
    """A copy of the model in which inputs have these sizes. ModelError for an input that there is not, and for a model
    that cannot be written."""
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
    """ModelError for a model that is too old or too large, or whose constants a caller may replace."""
    opset = next((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), OLDEST)
    if opset < OLDEST:
        raise ModelError(
            f"the model is of opset {opset}, and what is written here needs {OLDEST}: convert it first with "
            "onnx.version_converter"
        )
    inputs = {value.name for value in model.graph.input} if model.ir_version >= CONSTANTS_APART else set()
    if both := [each.name for each in model.graph.initializer if each.name in inputs]:
        raise ModelError(
            f"{len(both)} constants of the model, as {both[0]!r}, are inputs, too, so that who runs it may replace "
            "them, which no rewritten model can follow: take them from graph.input first"
        )
    if model.ByteSize() >= LARGEST:
        raise ModelError(f"the model has {model.ByteSize():,} bytes, more than one ONNX file holds ({LARGEST:,})")


def optimise(
    source: Source, pricing: Pricing, budget: float, oracle: Oracle, shapes: Shapes | None = None, *,
    own: Sequence[RewriteRule] = (), rules: Sequence[RewriteRule] | None = None, told: Told = lambda state: None,
    way: str = "queue", floats: bool = False, records: Records | None = None, config: str = "",
    fast_math: bool = False,
) -> Optimised:  # fmt: skip
    """The model that costs least by `pricing` of those that the rules make of `source` in `budget` seconds.

    way: of search.WAYS. own: rules of the caller's, which are proved now. oracle: runs the original and the best one,
    and others where that is not the same. rules: by default RULES and the generated ones. floats: those of floats, too.
    fast_math: and those of rules.REALS, which hold where floats are real numbers: outputs may then differ as
    rounding.py says, and no further. Ctrl-C ends the search and keeps what it has. records: where what is found is
    kept, and from which the search goes on. config: what `pricing` is of, there.
    BudgetError, ModelError, RuleError, and ValueError for a model that the oracle does not run.
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

    near = Neighbourhoods(original, pricing)
    searching = Searching((*rules, *own), price_function(original, graph, pricing), near.gain, budget, told, way)
    searching.begin, searching.helpers = near.begin, pricing.helpers
    kept = None
    if records is not None:
        kept = KeptSearches.of(records, config, graph, way, (*rules, *own))
        searching.known, searching.known_whole = kept.steps(), kept.has_ended(budget)
    state = searching.run(graph)
    found: Sequence[Found] = searching.found
    if pricing.tuned is not None and state.ended != "interrupted":
        found = _retimed(found, original, pricing.tuned, state)
    best, model, refused, distance = _checked(found, original, oracle, pricing, fast_math)
    if kept is not None and state.ended != "known":
        kept.add(best, state, budget)
    made = Optimised(
        model, best.steps, searching.found[0].price, best.price, state, tuple(refused), changes(graph, best.graph),
        distance, {rule.name: sum(1 for _ in matches(rule, graph)) for rule in own},
    )  # fmt: skip
    if made.steps:
        noted(model, made.report)
    return made


def price_function(original: onnx.ModelProto, graph: BytesGraph, pricing: Pricing) -> PriceOf:
    """A function that prices graphs; it must be asked first about `graph`, that of the original."""
    before: list[Price] = []

    def price_of(each: BytesGraph) -> Price:
        if each is graph:
            before.append(pricing.whole(original))
            return before[0]
        try:
            model = OnnxWriter(each, original).write()
            if pricing.anew is None:
                return pricing.whole(model)
            return before[0].less(pricing.anew(original, model))  # what is measured later is not what was measured then
        except (Unwritable, ModelError):
            return INFEASIBLE

    return price_of


def _retimed(
    found: Sequence[Found], original: onnx.ModelProto, tuned: Callable[[onnx.ModelProto], float], state: SearchState
) -> Sequence[Found]:
    """The original, and of the best those that take less than it when schedules are searched for, too, the best last.

    Ctrl-C leaves them as they are."""
    best = found[1:][-RETIMED:]
    if not best:
        return found
    try:
        state.tuned = [tuned(original), *(tuned(OnnxWriter(each.graph, original).write()) for each in best)]
    except KeyboardInterrupt:
        state.ended = "interrupted"
        return found
    first, *costs = [cycles + each.price.host for cycles, each in zip(state.tuned, (found[0], *best))]
    order = sorted(range(len(best)), key=lambda number: (-costs[number], number))
    return [found[0], *(best[number] for number in order if costs[number] < first)]


def _checked(
    found: Sequence[Found], original: onnx.ModelProto, oracle: Oracle, pricing: Pricing, fast_math: bool
) -> tuple[Found, onnx.ModelProto, list[str], Apart | None]:
    """The best graph that gives the same bytes, or numbers as near as fast-math allows; sentences about those that do
    not; and how near they are."""
    refused: list[str] = []
    for each in reversed(found[1:]):
        model = OnnxWriter(each.graph, original).write()
        near = apart(original, model, bound_of(found[0].graph, each.graph), oracle) if fast_math else None
        least = NOISE * found[0].price.total if any(map(step_changes_values, each.steps)) else 0
        why = near.why if near else difference(original, model, oracle)
        if not why and (pricing.anew is None or pricing.anew(original, model) > least):
            return each, model, refused, near
        time = f"more than {1 - NOISE:.0%} of its time, for which no values are changed" if least else "no less time"
        why = why or f"timed anew beside the original, the model takes {time}"
        step = each.steps[-1]
        refused.append(f"the step {step.rule!r} at {', '.join(step.where)} is refused: {why}")
    return found[0], original, refused, Apart() if fast_math else None
