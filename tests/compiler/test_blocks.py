"""The verifier knows what blocks mean, whose layers hand each other their results on chip; and it finds planted faults."""

from __future__ import annotations

import numpy as np
import pytest

from .blocks import CONFIGS, HandWritten, Shape

SHAPES = {
    "residual": Shape(),
    "stride": Shape(stride=2, height=7),
    "5x5": Shape(kernel=5, tile_rows=2),
    "equal weights": Shape(2, 2, equal=True),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_block_by_hand_is_right_and_passes(name: str, shape: str) -> None:
    hand = HandWritten(CONFIGS[name], SHAPES[shape])
    np.testing.assert_array_equal(hand.run(checking=True), hand.expected())
    hand.verify()
