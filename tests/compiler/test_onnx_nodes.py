"""ONNX's own backend tests, as a ratchet: what passes once must go on passing."""

from __future__ import annotations

import onnx
import pytest
from thorough import some

from .onnx_nodes import RANDOM, cases, known_failing, run, run_all

PARTS = 6


@pytest.mark.skipif(onnx.__version__ != "1.23.2", reason="the list of failing tests is that of onnx 1.23.2")
@pytest.mark.parametrize("part", some(range(PARTS), [0]))
def test_node_tests(part: int) -> None:
    assert len(cases("node")) == 1884
    names = [*cases("node")][part::PARTS]  # those of an operator stand one behind another
    failing, known = run_all("node", names), known_failing().keys() & set(names)
    broken = {name: why for name, why in failing.items() if name not in known}
    assert not broken, f"{len(broken)} tests of ONNX newly fail: {broken}"
    repaired = [name for name in known if name not in failing and not RANDOM.match(name)]
    assert not repaired, f"remove from onnx_nodes_failing.txt what passes now: {repaired}"


def test_the_list_has_a_reason_for_each() -> None:
    known = known_failing()
    assert set(known) <= set(cases("node")) and all(known.values())
    assert len(known) <= 24  # at least 1860 of 1884 pass


def test_simple_models() -> None:
    assert run_all("simple", cases("simple")) == {}


REAL = [*cases("real")]
QUICK = ["test_squeezenet"]


@pytest.mark.parametrize("name", some(REAL, QUICK))
def test_real_models(name: str) -> None:
    assert run(cases("real")[name]) == ""
