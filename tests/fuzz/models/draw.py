"""The case of a seed, from which everything random about it comes."""

from __future__ import annotations

from celosia.driver.explore.configs import ConfigSpace
from celosia.hw.spec.config import PRESETS, Config
from fuzz.models.case import Case
from fuzz.models.habits import habits
from fuzz.models.net import Array, Draw, Net
from fuzz.models.networks import network
from fuzz.models.operators.table import operator
from fuzz.models.quantised import FORMS, quantised

KINDS = ("qdq", "qdq", "qdq", "qoperator", "dynamic", "float", "operator", "operator", "operator")
OPSETS = tuple(range(13, 22))
RUNS = 2
SMALL = ConfigSpace(
    {
        "block_in": (2, 4, 8, 16), "block_out": (2, 4, 8, 16), "batch": (1, 1, 2, 4), "bus_bytes": (4, 8, 16),
        "ports": (1, 2), "inp_depth": (64, 256), "wgt_depth": (32, 128), "acc_depth": (64, 256),
        "vin_depth": (64, 256), "out_depth": (32, 128), "par_depth": (8, 32), "lut_count": (1, 2, 4),
        "packed": (False, True), "taps": (0, 1, 3, 5), "tap_depth": (8, 32), "forward": (False, True),
        "residual_cycles": (1, 2, 4), "pump": (1, 2), "softmax": (0, 0, 2, 4), "weight_bits": (1, 2, 4, 8, 8),
    },
    Config(),
)  # fmt: skip
"""Of which a Config is drawn where it is not a preset."""


def draw_case(seed: int) -> Case:
    """The case of a seed. OracleError where onnxruntime, or its quantiser, refuses what was drawn."""
    campaign, number = divmod(seed, 1_000_000)
    draw = Draw(f"{campaign} {number}")
    kind, opset = draw.choice(KINDS), draw.choice(OPSETS)
    net = operator(draw, opset) if kind == "operator" else network(draw, opset)
    runs = 1 if kind == "operator" else RUNS
    model, feeds = net.model(), [net.inputs, *(_like(draw, net) for _ in range(runs - 1))]
    if kind in FORMS:
        samples = [_like(draw, net) for _ in range(2)]
        model = quantised(draw, model, [feeds[0], *samples], kind)
    feeds = habits(draw, model, feeds, kind != "operator")
    return Case(kind, model, tuple(feeds), config(draw), draw.chance(0.85))


def _like(draw: Draw, net: Net) -> dict[str, Array]:
    """Other inputs for a network."""
    return {name: draw.floats(value.shape, float(value.std()) + 0.1) for name, value in net.inputs.items()}


def config(draw: Draw) -> Config:
    """A preset but `huge`, or a small Config at random."""
    if draw.chance(0.4):
        return PRESETS[draw.choice([name for name in PRESETS if name != "huge"])]
    found = SMALL.sample(draw.arrays)
    assert found is not None
    return found
