"""Float rules change no bit; rules that would are refused, and only faster models are kept."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import onnx
import pytest
from benchmarks.branches import Branchy

from celosia.compiler.superoptimise import proofs
from celosia.compiler.superoptimise.compare_outputs import compare_on_random_inputs
from celosia.compiler.superoptimise.graph import BytesGraph
from celosia.compiler.superoptimise.matching import matches, rewrite
from celosia.compiler.superoptimise.optimise import Optimised, graph_of, optimise
from celosia.compiler.superoptimise.price import Price, Pricing
from celosia.compiler.superoptimise.rule import Leaf, OpenSize, RewriteRule, Term, apply
from celosia.compiler.superoptimise.rules import FLOATS, RULES
from celosia.compiler.superoptimise.rules.floats import convolved
from celosia.compiler.superoptimise.rules.products import KERNEL, C, concat_of, slice_of
from celosia.compiler.superoptimise.writing import AlgebraWriter
from celosia.driver.tune.optimise import optimise as driver
from celosia.driver.workstation.oracle import open_model

pytest.importorskip("onnxruntime")


def branches(outputs: tuple[int, ...], kernel: int = 1, size: int = 9, relu: bool = True, inputs: int = 33) -> Branchy:
    m = Branchy((1, inputs, size, size))
    m.made = [m.conv("x", inputs, each, kernel, pad=0, relu=relu) for each in outputs]  # type: ignore[attr-defined]
    return m


def model_of(m: Branchy) -> onnx.ModelProto:
    return m.model(*m.made)  # type: ignore[attr-defined]


def rewritings(graph: BytesGraph) -> Iterator[tuple[str, BytesGraph]]:
    for rule in FLOATS:
        for match in matches(rule, graph):
            yield rule.name, rewrite(graph, match)


@pytest.mark.parametrize(
    ("outputs", "kernel", "relu"), [((32, 24), 1, True), ((64, 2), 3, False), ((96, 240), 1, False)]
)
def test_onnxruntime_gives_the_same_bits(outputs: tuple[int, ...], kernel: int, relu: bool) -> None:
    """onnxruntime gives the same bits with its blocked channels and without them, as for 33 channels."""
    for inputs in (32, 33):
        model = model_of(branches(outputs, kernel, relu=relu, inputs=inputs))
        names = []
        for name, graph in rewritings(graph_of(model, floats=True)):
            assert not compare_on_random_inputs(model, AlgebraWriter(graph, model).write(), open_model), name
            names.append(name.split(" in ")[0].split(" with ")[0].split(",")[0])
        assert Counter(names)["merge float convolutions"] and Counter(names)["split a float convolution"]


def test_products_of_one_input_are_one_with_the_same_bits() -> None:
    m = Branchy((3, 200))
    model = m.model(m.linear("x", 200, 129), m.linear("x", 200, 40))
    ((name, graph),) = rewritings(graph_of(model, floats=True))
    assert name == "merge float products of rank 2"
    assert not compare_on_random_inputs(model, AlgebraWriter(graph, model).write(), open_model)


def test_what_onnxruntime_adds_up_in_another_order_is_left_alone() -> None:
    """Rules do not apply to convolutions that onnxruntime sums in another order, such as to one channel or of one
    pixel.

    The oracle finds the difference if a rule applies to them.
    """
    for model in (model_of(branches((1, 12), relu=False)), model_of(branches((16, 8), 9))):
        assert not list(rewritings(graph_of(model, floats=True)))
    model = model_of(branches((1, 12), relu=False))
    freely = for_one_output(next(rule for rule in FLOATS if rule.name == "merge float convolutions, biased"))
    graph = graph_of(model, floats=True)
    (match,) = matches(freely, graph)
    assert compare_on_random_inputs(model, AlgebraWriter(rewrite(graph, match), model).write(), open_model)


def for_one_output(rule: RewriteRule) -> RewriteRule:
    """Return `rule` without its condition that there are several outputs."""
    one, two = (Leaf(leaf.name, (OpenSize(leaf.shape[0].name), *leaf.shape[1:]), True)  # type: ignore[union-attr]
                for leaf in rule.leaves[1:2] + [leaf for leaf in rule.leaves if leaf.name == "w2"][:1])  # fmt: skip
    b1, b2 = (Leaf(f"b{i}", (w.shape[0],), True) for i, w in ((1, one), (2, two)))
    both = convolved([concat_of(0, one, two), concat_of(0, b1, b2)])
    o1, o2 = one.shape[0], two.shape[0]
    return replace(
        rule, before=(convolved([one, b1]), convolved([two, b2])),
        after=(slice_of(both, 1, 0, o1), slice_of(both, 1, o1, o1 + o2)),
    )  # fmt: skip


def test_the_proofs_are_of_these_rules() -> None:
    proofs.require_proved(FLOATS)
    known = json.loads(proofs.FILE.read_text(encoding="utf-8"))["rules"]
    pytest.importorskip("z3")
    for rule in FLOATS:
        if known[rule.name]["questions"] <= 72 and rule.name.startswith("merge") and "function" not in rule.name:
            row = proofs.row_of(rule)
            assert row["digest"] == known[rule.name]["digest"] and row["cases"] == known[rule.name]["cases"]


def _wrong() -> Iterator[tuple[str, Term, Term]]:
    """Yield (name, left side, right side) of wrong rules. All but the first hold for integers."""
    o, k, j = OpenSize("o", 2), OpenSize("k"), OpenSize("j")
    w, v = (Leaf(name, (o, C, *KERNEL), True) for name in "wv")
    both = convolved([concat_of(0, w, v)])
    yield "halves exchanged", convolved([w]), slice_of(both, 1, o, o + o)
    rows = OpenSize("rows")
    x, y = Leaf("x", (rows, k)), Leaf("y", (rows, j))
    a, b = Leaf("a", (k, o), True), Leaf("b", (j, o), True)
    joined = apply("float_multiply", concat_of(1, x, y), concat_of(0, a, b))
    yield "terms in another order", joined, apply("float_multiply", concat_of(1, y, x), concat_of(0, b, a))
    zeros = apply("spread", Leaf("zero", (), True), shape=(j, o))
    yield (
        "terms of zeros",
        apply("float_multiply", x, a),
        apply("float_multiply", concat_of(1, x, y), concat_of(0, a, zeros)),
    )
    image, n, h = Leaf("x", (OpenSize("n"), C, OpenSize("h"), OpenSize("w"))), OpenSize("n"), OpenSize("h")
    attributes = {"strides": (1, 1), "dilations": (1, 1), "group": 1}
    padded = apply("pad", image, Leaf("zero", (), True), pads=(0, 0, 1, 1, 0, 0, 1, 1))
    yield (
        "zeros around an image as terms", apply("float_convolve", padded, w, pads=(0, 0, 0, 0), **attributes),
        apply("float_convolve", image, w, pads=(1, 1, 1, 1), **attributes),
    )  # fmt: skip
    square = Leaf("w", (o, C, h, h), True)
    transposed = apply("transpose", square, perm=(0, 1, 3, 2))
    image_of_squares = Leaf("x", (n, C, h, h))
    yield (
        "rows as columns", apply("float_convolve", image_of_squares, square, pads=(0, 0, 0, 0), **attributes),
        apply("float_convolve", apply("transpose", image_of_squares, perm=(0, 1, 3, 2)), transposed,
              pads=(0, 0, 0, 0), **attributes),
    )  # fmt: skip


@pytest.mark.parametrize(("name", "before", "after"), list(_wrong()))
def test_what_orders_a_sum_anew_is_refused(name: str, before: Term, after: Term) -> None:
    """Rules that change the order of a sum are refused. All but the first hold for integers."""
    pytest.importorskip("z3")
    with pytest.raises(proofs.RuleError, match="is not proved"):
        proofs.require_proved([], [RewriteRule(name, name, (before,), (after,))])


def convolutions(model: onnx.ModelProto) -> Price:
    return Price(0, 1e6 * sum(node.op_type == "Conv" for node in model.graph.node), True)


def searched(*saved: float) -> Optimised:
    """Optimise a model of branches.

    saved: the savings that successive measurements of the whole model report; the last one repeats.
    """
    model, left = model_of(branches((24, 24, 40))), list(saved)

    def anew(before: onnx.ModelProto, after: onnx.ModelProto) -> float:
        if convolutions(before) == convolutions(model):
            return left.pop(0) if len(left) > 1 else left[0]
        return convolutions(before).total - convolutions(after).total

    return optimise(
        model, Pricing(convolutions, convolutions, anew), 20, open_model, rules=RULES, way="greedy", floats=True
    )


def test_what_takes_no_less_time_when_it_is_timed_anew_is_refused() -> None:
    kept, refused = searched(1e6), searched(1e6, 0)
    assert kept.steps and kept.after == Price(0, 2e6, True) and not kept.refused and kept.report["measured"]
    assert not refused.steps and refused.after == refused.before
    assert refused.refused and all("takes no less time" in each for each in refused.refused)


def test_a_model_of_floats_is_never_slower_on_the_cpu() -> None:
    model = model_of(branches((24, 24, 24), size=17, inputs=64))
    found = driver(model, budget=2, search="greedy", accelerator=False)
    assert found.before.measured and 0 < found.after.total <= found.before.total
    assert not compare_on_random_inputs(model, found.model, open_model)
