"""The Configs that tests of hardware and simulators share, so that each simulator is built once."""

from __future__ import annotations

from typing import Any

from celosia.hw.spec.config import Config

SMALL: dict[str, Any] = dict(
    inp_depth=64, wgt_depth=32, acc_depth=64, vin_depth=64, out_depth=64, par_depth=16, queue_depth=4
)
ROOM: dict[str, Any] = dict(inp_depth=256, wgt_depth=256, acc_depth=256, vin_depth=256, out_depth=128, par_depth=32)
"""Depths of scratchpads for Configs on which tests run whole layers."""
CONFIGS = {
    "4x4": Config(block_in=4, block_out=4, bus_bytes=8, packed=False, sums=True, **SMALL),
    "8x8-bus16": Config(block_in=8, block_out=8, bus_bytes=16, **SMALL),
    "8x8-bus4-tokens2": Config(
        block_in=8, block_out=8, bus_bytes=4, alu=False, int32=False, **(SMALL | {"token_bits": 2, "queue_depth": 2})
    ),
    "batch2": Config(batch=2, block_in=4, block_out=4, bus_bytes=8, alu=False, sums=True, **SMALL),
    "4x8": Config(block_in=4, block_out=8, bus_bytes=8, **SMALL),
    "8x4": Config(block_in=8, block_out=4, bus_bytes=8, **SMALL),
    "taps3": Config(block_in=4, block_out=4, taps=3, tap_depth=32, forward=True, residual_cycles=2, **SMALL),
    "8x4-batch2-taps5": Config(
        batch=2, block_in=8, block_out=4, taps=5, tap_depth=16, forward=True, residual_cycles=4, **SMALL
    ),
    "8x8-forward": Config(block_in=8, block_out=8, bus_bytes=16, forward=True, alu=False, int32=False, **SMALL),
    "4x4-ports2": Config(block_in=4, block_out=4, bus_bytes=8, ports=2, **SMALL),
    "2x8x4-bus16-ports2": Config(batch=2, block_in=8, block_out=4, bus_bytes=16, ports=2, **SMALL),
    "4x4-softmax2": Config(
        block_in=4,
        block_out=4,
        taps=3,
        tap_depth=32,
        forward=True,
        residual_cycles=2,
        softmax=2,
        norm=2,
        **(SMALL | ROOM),
    ),
    "4x8-softmax2": Config(
        block_in=4, block_out=8, bus_bytes=16, ports=2, alu=False, int32=False, softmax=2, norm=8, **SMALL
    ),
    "8x8-bus4-weights4": Config(
        block_in=8,
        block_out=8,
        bus_bytes=4,
        ports=2,
        weight_bits=4,
        alu=False,
        int32=False,
        trace_depth=48,
        **(SMALL | {"token_bits": 2, "queue_depth": 2}),
    ),
    "4x8-ports2-weights2": Config(block_in=4, block_out=8, bus_bytes=4, ports=2, weight_bits=2, int32=False, **SMALL),
    "8x8-bus4-spread": Config(block_in=8, block_out=8, bus_bytes=4, ports=2, **(SMALL | ROOM)),
    "taps3-ports2": Config(
        block_in=4, block_out=4, ports=2, taps=3, tap_depth=32, forward=True, residual_cycles=2, **SMALL
    ),
    "8x8-taps3-ports2": Config(
        block_in=8, block_out=8, ports=2, taps=3, tap_depth=16, forward=True, residual_cycles=2, **SMALL
    ),
}
VARIED = ["4x4", "8x4-batch2-taps5", "4x4-softmax2", "8x8-bus4-weights4", "taps3-ports2"]
"""Configs that together have each part of the hardware in several variants; `make test` simulates these and presets."""
COVERING = {
    "4x4": CONFIGS["4x4"],
    "8x4-batch2-taps5": CONFIGS["8x4-batch2-taps5"],
    "8x8-softmax4-weights4": Config(
        block_in=8, block_out=8, bus_bytes=4, ports=2, weight_bits=4, lut_count=1, taps=2, tap_depth=8, forward=True,
        residual_cycles=2, softmax=4, norm=2, alu=False, int32=False, trace_depth=48,
        **(SMALL | {"token_bits": 2, "queue_depth": 2}),
    ),
    "4x16-weights4": Config(
        block_in=4, block_out=16, bus_bytes=4, ports=2, weight_bits=4, alu=False, int32=False, trace_depth=48,
        **(SMALL | {"token_bits": 2, "queue_depth": 2}),
    ),
}  # fmt: skip
"""Configs for tests of one component: for each optional part, one Config has it and another one lacks it."""
COVERING_PAIR = ["8x4-batch2-taps5", "8x8-softmax4-weights4"]
"""Two of them that together have all optional parts; `make test` builds a component for these, others are thorough."""
