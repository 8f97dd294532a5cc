"""ONNX's own backend tests, as a ratchet: what passes once must go on passing."""

from __future__ import annotations

from collections.abc import Collection

import onnx
import pytest
from thorough import some

from .onnx_nodes import RANDOM, SLOW, cases, known_failing, run, run_all, sample, slow_cases

PARTS = 6
versioned = pytest.mark.skipif(onnx.__version__ != "1.23.2", reason="the list of failing tests is that of onnx 1.23.2")


def require_as_listed(failing: dict[str, str], names: Collection[str]) -> None:
    """Raise AssertionError unless those of `names` fail that are listed."""
    known = known_failing().keys() & set(names)
    broken = {name: why for name, why in failing.items() if name not in known}
    assert not broken, f"{len(broken)} tests of ONNX newly fail: {broken}"
    repaired = [name for name in known if name not in failing and not RANDOM.match(name)]
    assert not repaired, f"remove from onnx_nodes_failing.txt what passes now: {repaired}"


@versioned
def test_a_node_test_of_each_operator() -> None:
    names = sample()
    assert len(cases("node")) == 1881 and len(names) > 190
    require_as_listed({name: why for name in names if (why := run(cases("node")[name]))}, names)


@versioned
@pytest.mark.thorough
@pytest.mark.parametrize("part", range(PARTS))
def test_node_tests(part: int) -> None:
    names = [*cases("node")][part::PARTS]  # those of an operator stand one behind another
    require_as_listed(run_all("node", names), names)


@versioned
@pytest.mark.thorough
def test_node_tests_with_slow_expected_values() -> None:
    assert len(slow_cases()) == len(SLOW)
    require_as_listed({name: why for name, case in slow_cases().items() if (why := run(case))}, slow_cases())


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
