"""Draw the case of a seed; the seed determines everything random in it."""

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
"""The space of the small Configs that are drawn in place of a preset."""


def draw_case(seed: int) -> Case:
    """Draw the case of a seed. Raise OracleError if onnxruntime, or its quantiser, refuses the model."""
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
    """Draw other inputs for a network, with the shapes of its inputs."""
    return {name: draw.floats(value.shape, float(value.std()) + 0.1) for name, value in net.inputs.items()}


def config(draw: Draw) -> Config:
    """Draw a preset other than `huge`, or a small Config."""
    if draw.chance(0.4):
        return PRESETS[draw.choice([name for name in PRESETS if name != "huge"])]
    sampled = SMALL.sample(draw.arrays)
    assert sampled is not None
    return sampled
