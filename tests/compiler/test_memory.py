"""The memory plan gives no two live buffers the same bytes."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import tries

from celosia.compiler.launch.memory_plan import Lifetime, plan_memory

spans = st.tuples(st.integers(1, 5000), st.integers(0, 12), st.integers(0, 5))


@settings(max_examples=tries(200), deadline=None)
@given(st.lists(spans, max_size=20), st.sampled_from([1, 16, 64]))
def test_live_buffers_do_not_overlap(drawn: list[tuple[int, int, int]], alignment: int) -> None:
    buffers = [Lifetime(f"b{i}", size, first, first + more) for i, (size, first, more) in enumerate(drawn)]
    result = plan_memory(buffers, alignment)
    assert set(result.offsets) == {b.buffer for b in buffers}
    assert all(offset % alignment == 0 for offset in result.offsets.values())
    steps = range(20)
    assert result.lower_bound == max(sum(b.size for b in buffers if b.first <= t <= b.last) for t in steps)
    assert result.lower_bound <= result.size <= sum(b.size + alignment for b in buffers)
    for t in steps:
        end = 0
        for b in sorted((b for b in buffers if b.first <= t <= b.last), key=lambda b: result.offsets[b.buffer]):
            assert result.offsets[b.buffer] >= end
            end = result.offsets[b.buffer] + b.size
        assert end <= result.size


def test_memory_is_used_again() -> None:
    chain = [Lifetime(f"t{i}", 100 * 64, i, i + 1) for i in range(10)]
    result = plan_memory(chain)
    assert result.size == result.lower_bound == 200 * 64


def test_nothing_needs_nothing() -> None:
    assert plan_memory([]) == plan_memory([], 1)
    assert (plan_memory([]).size, plan_memory([]).lower_bound) == (0, 0)


def random_graph(seed: int) -> list[Lifetime]:
    """Draw tensors with lives as in a model: the next step reads most of them, some are read much later."""
    rng = random.Random(seed)
    count = rng.randint(5, 80)
    sizes = [rng.choice([64 * rng.randint(1, 4000), 64 << rng.randint(0, 12)]) for _ in range(count)]
    return [Lifetime(f"t{i}", sizes[i], i, i + 1 + min(int(rng.expovariate(0.5)), count)) for i in range(count)]


def test_arenas_are_close_to_the_lower_bound() -> None:
    plans = [plan_memory(random_graph(seed)) for seed in range(100)]
    ratios = [plan.size / plan.lower_bound for plan in plans]
    assert max(ratios) <= 1.10 and sum(ratios) / len(ratios) <= 1.005
