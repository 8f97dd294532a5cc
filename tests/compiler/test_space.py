"""Each point of the tiling space compiles, no point outside does, and one function estimates its cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from thorough import tries

from celosia.compiler.expr import verify
from celosia.compiler.layer import TilingError, Window
from celosia.compiler.tensorize import roofline
from celosia.compiler.tensorize.computation import LayerComputation
from celosia.compiler.tensorize.lowering import lower_layer
from celosia.compiler.tensorize.plan import Planner
from celosia.compiler.tensorize.roofline import choose, estimate, rank_tilings
from celosia.compiler.tensorize.space import (
    CUT_ORDERS,
    ORDERS,
    CompletionOrder,
    Tiling,
    Workload,
    candidates,
    why_not,
)
from celosia.hw.spec.config import Config

from .layers import CONFIGS, Builder, builders, sample_tilings, windows
from .test_loops import fits, small


def bounded(examples: int) -> settings:
    return settings(max_examples=tries(examples), deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    number = lambda low, high: draw(st.integers(low, high))  # noqa: E731
    window, products = draw(windows()), draw(st.booleans())
    grouped = products and draw(st.booleans())
    step, scratchpad = (
        (number(1, 3) if grouped else 0, "inp") if products else (1, draw(st.sampled_from(["vin", "acc"])))
    )
    return Workload(
        window, number(1, 3), number(1, 40), number(1, 40), number(1, 20), number(1, 20) if products else 0,
        draw(st.booleans()), step, share=number(1, 3) if grouped else 1, scratchpad=scratchpad,
    )  # fmt: skip


CFG = st.sampled_from(list(CONFIGS.values()))


def test_the_reason_names_what_is_too_small() -> None:
    """The reason names the scratchpad that is too small. Three output blocks read the same input, and par holds
    four."""
    shared = Workload(Window((1, 1)), 1, 1, 2, out_blocks=5, in_blocks=1, residual=False, step=1, share=3)
    with pytest.raises(TilingError, match=r"and par_depth 4$"):
        choose(replace(CONFIGS["batch2"], par_depth=4), shared)


@bounded(60)
@given(CFG, workloads(), st.data())
def test_candidates_are_the_space(cfg: Config, p: Workload, data: st.DataObject) -> None:
    points = list(candidates(cfg, p))
    assert all(why_not(cfg, p, point) is None for point in points)
    sizes = [(d.n, d.y, d.x, d.k, d.order) for d in points]
    assert len(set(sizes)) == len(sizes)
    if not points:
        with pytest.raises((TilingError, ValueError)):
            choose(cfg, p)
        return
    for point in sample_tilings(cfg, p, 5, np.random.default_rng(0)):
        assert point in points
    for point in data.draw(st.lists(st.sampled_from(points), max_size=3)):
        for outside in beside(p, point):
            why = why_not(cfg, p, outside)
            if why is not None:
                assert "\n" not in why and outside not in points
    assert choose(cfg, p) in points and rank_tilings(cfg, p)[0] == choose(cfg, p)


def beside(p: Workload, d: Tiling) -> Iterator[Tiling]:
    """Yield the points next to `d`."""
    for name in ("n", "y", "x", "k"):
        for step in (-1, 1):
            yield replace(d, **{name: getattr(d, name) + step})
    for order in ORDERS:
        yield replace(d, order=order)


@bounded(80)
@given(CFG, workloads(), st.data())
def test_points_just_outside_say_why(cfg: Config, p: Workload, data: st.DataObject) -> None:
    points = list(candidates(cfg, p))
    assume(points)
    d = data.draw(st.sampled_from(points))
    limits = {"n": p.out_blocks, "y": p.rows, "x": p.columns, "k": max(p.in_blocks, 1)}
    for name, most in limits.items():
        for value in (0, -1, most + 1):
            why = why_not(cfg, p, replace(d, **{name: value}))
            assert why == f"{name} must be between 1 and {most}, not {value}"
    for name, value in (("ahead", -1), ("part", 0)):
        assert why_not(cfg, p, replace(d, **{name: value})) == "ahead must be at least 0, and part at least 1"
    assert why_not(cfg, p, replace(d, ahead=0)) is None
    wrong = "rows" if p.in_blocks else data.draw(st.sampled_from(["weights", "input", "split", "pieces", "columns"]))
    why = why_not(cfg, p, replace(d, order=wrong))
    assert why is not None and why.startswith("order must be one of ") and why.endswith(f"not {wrong}")
    if p.in_blocks > 1 and d.order not in CUT_ORDERS:
        assert why_not(cfg, p, replace(d, k=d.k - 1)) == f"k must be {p.in_blocks} where the order is {d.order}"
    if p.grouped and p.in_blocks:
        assert why_not(cfg, p, replace(d, order="split")) == "the reduction of a grouped convolution is not split"
    whole = replace(d, n=p.out_blocks, y=p.rows, x=p.columns)
    why = why_not(cfg, p, whole)
    if p.out_blocks * p.rows * p.columns > cfg.out_depth // 2:
        assert why is not None and why.startswith("a tile takes ") and why.endswith(" are to be had"), why


@bounded(30)
@given(builders(), windows(3), st.sampled_from(["conv", "depthwise", "pool", "add", "multiply"]), st.data())
def test_every_point_compiles_and_none_beside(b: Builder, window: Window, kind: str, data: st.DataObject) -> None:
    """All points that why_not accepts compile, also those that `candidates` does not list."""
    x = small(b, data, size=9)
    same = (x.images, x.channels, x.height, x.width)
    assume(fits(window, x))
    if kind in ("conv", "depthwise"):
        b.conv(x, window, x.channels if kind == "depthwise" else data.draw(st.integers(1, 30)),
               x.channels if kind == "depthwise" else 1)  # fmt: skip
    elif kind == "pool":
        b.pool(x, window, data.draw(st.booleans()))
    elif kind == "add":
        b.map(x, b.host_input(*same))
    else:
        b.multiply(x, b.host_input(*same))
    layer, planner = b.net.layers[0], Planner(b.cfg)
    try:
        computations: list[LayerComputation] = lower_layer(b.cfg, layer)
    except TilingError:
        assume(False)
    found = [list(candidates(b.cfg, d.workload)) for d in computations]
    assume(all(found))
    for d, points in zip(computations, found):
        point = data.draw(st.sampled_from(points))
        for chosen in (point, data.draw(st.sampled_from(list(beside(d.workload, point))))):
            if why := why_not(b.cfg, d.workload, chosen):
                assert chosen is not point and "\n" not in why
                continue
            try:
                verify(planner.loops(d, chosen).function)
            except TilingError as refused:
                assert str(refused).startswith(REFUSALS), refused


REFUSALS = ("padding above or below a strided", "a tile that lies in the padding alone", "a padded block has at most")


# Estimates --------------------------------------------------------------------------------------------------------


@bounded(25)
@given(CFG, workloads())
def test_the_estimate_of_one_is_that_of_many(cfg: Config, p: Workload) -> None:
    assume(p.in_blocks)
    points = list(candidates(cfg, p))
    assume(points)
    many = roofline.terms(cfg, p, [(d.n, d.y, d.x, d.k, d.order) for d in points])["cycles"]
    np.testing.assert_array_equal(many, [estimate(cfg, p, d) for d in points])
    assert (many > 0).all()
    best = rank_tilings(cfg, p, count=len(points))
    assert set(best) == set(points)
    costs = [estimate(cfg, p, d) for d in best]
    assert costs == sorted(costs) and costs[0] == many.min()
    rows = choose(cfg, p, CompletionOrder.ROWS)
    assert rows in points and (rows == best[0] or estimate(cfg, p, rows) <= roofline.ROWS_FIRST_COST * costs[0])


# Text -------------------------------------------------------------------------------------------------------------

DECISIONS = st.builds(
    Tiling, *[st.integers(0, 1 << 12)] * 4, st.sampled_from(ORDERS), st.integers(0, 99), st.integers(0, 1 << 12)
)


@given(DECISIONS)
def test_decisions_go_to_json_and_back(d: Tiling) -> None:
    assert Tiling.from_json(json.loads(json.dumps(d.to_json()))) == d


GOOD: dict[str, Any] = Tiling(1, 2, 3, 4, "input").to_json()


@pytest.mark.parametrize("fields,words", [
    ({**GOOD, "z": 1}, "there is no decision 'z'; there are n, y, x, k, order, ahead, part"),
    ({name: GOOD[name] for name in GOOD if name != "ahead"}, "the decision 'ahead' is missing"),
    ({}, "the decision 'n' is missing"),
    ({**GOOD, "order": "columns"}, "the decision order cannot be 'columns'"),
    ({**GOOD, "order": ["rows"]}, r"the decision order cannot be \['rows'\]"),
    ({**GOOD, "order": None}, "the decision order cannot be None"),
    ({**GOOD, "n": -1}, "the decision n cannot be -1"),
    ({**GOOD, "n": 1.0}, "the decision n cannot be 1.0"),
    ({**GOOD, "n": True}, "the decision n cannot be True"),
    ({**GOOD, "part": "4"}, "the decision part cannot be '4'"),
    ({**GOOD, "k": {}}, "the decision k cannot be {}"),
])  # fmt: skip
def test_what_are_no_decisions_says_so(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Tiling.from_json(fields)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(ORDERS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*GOOD, "z"]), inner),
)


@settings(max_examples=tries(80), deadline=None)
@given(st.dictionaries(st.sampled_from([*GOOD, "z"]), JSON))
def test_garbage_is_no_decision(changes: dict[str, Any]) -> None:
    try:
        d = Tiling.from_json({**GOOD, **changes})
    except ValueError as error:
        assert "decision" in str(error)
        return
    assert d.to_json() == {**GOOD, **changes}


@pytest.mark.parametrize("rows", [None, 3, ["n"], True])
def test_what_are_not_even_fields_says_so(rows: Any) -> None:
    with pytest.raises(ValueError, match="decision"):
        Tiling.from_json(rows)
