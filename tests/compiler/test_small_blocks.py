"""Squeeze-and-excitation blocks, which begin with a multiplication or have layers of one pixel, are exact."""

from __future__ import annotations

import numpy as np
import pytest
from agreement import CONFIGS, check
from small_models import Builder

import celosia
from celosia.sim.functional.fsim import FunctionalDevice


def squeezed(b: Builder) -> None:
    x = b.conv(b.input([1, 8, 12, 12]), 32, (1, 1))
    b.output(b.conv(b.squeeze_excite(x, 8), 16, (1, 1)))


@pytest.mark.parametrize("name", [name for name, cfg in CONFIGS.items() if cfg.forward][:4])
@pytest.mark.parametrize("kind", [np.int8, np.uint8])
def test_squeeze_and_excitation_in_blocks(name: str, kind: type) -> None:
    b = Builder("qdq", kind, 1, True, 17)
    squeezed(b)
    check(b, FunctionalDevice(CONFIGS[name]))


def test_a_block_begins_with_the_multiplication() -> None:
    b = Builder("qdq", np.int8, 1, True, 17)
    squeezed(b)
    layers = celosia.compile(b.model(), "pynq").launches[0].layers
    assert any(layer.what.startswith("multiply") and "conv" in layer.what for layer in layers)
    assert any(layer.what.count("product") == 2 for layer in layers)
