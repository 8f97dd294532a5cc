"""Weights that LOAD reads through both ports give the same bytes in half the time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from configs import CONFIGS
from small_models import Builder

from celosia.compiler.launch import image
from celosia.compiler.program import LaunchStep, Program
from celosia.compiler.vthread.encode import disassemble
from celosia.driver.run.explain import launch_code
from celosia.driver.runtime import Runtime
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import instruction_bytes
from celosia.sim.functional.fsim import FunctionalDevice
from celosia.sim.rtl.rtlsim import ZYNQ_HP, RtlDevice
from celosia.sim.timing import predict

pytest.importorskip("onnxruntime")

from agreement import check, feed_of

CFG = CONFIGS["8x8-bus4-spread"]
ROWS, COLUMNS = 512, 256


def network() -> Builder:
    """Return a model with a convolution, whose input is larger than its weights, and a matrix product of one row."""
    b = Builder("qdq", np.int8, 5)
    y = b.conv(b.input([1, 8, 8, 8]), 8, (3, 3), pads=(1, 1, 1, 1))
    b.output(b.matmul(b.reshape(y, (1, ROWS)), COLUMNS))
    return b


def product_cycles(program: Program, device: RtlDevice) -> int:
    """Return the cycles of the last layer, from the start of its first instruction to the end of its last one."""
    (launch,) = (step for step in program.steps if isinstance(step, LaunchStep))
    runtime = Runtime(program, device)
    runtime.run(feed_of(network().model()))
    (counters,) = runtime.run(feed_of(network().model())).counters
    layer_events = [event for event in counters.events if launch.layer_of[event.index] == len(launch.layers) - 1]
    return max(event.end for event in layer_events) - min(event.start for event in layer_events)


def spread(program: Program) -> list[bool]:
    """Return a list with True for each LOAD of weights that is spread."""
    (launch,) = (step for step in program.steps if isinstance(step, LaunchStep))
    words = np.frombuffer(launch_code(program, launch), np.uint8).reshape(-1, instruction_bytes(program.config))
    lines = disassemble(program.config, [int.from_bytes(word.tobytes(), "little") for word in words])
    return ["spread" in line for line in lines if "WGT" in line]


@pytest.mark.rtl
@pytest.mark.thorough  # one more simulator; the hardware's own tests have both ports
def test_a_matrix_product_takes_both_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    device = RtlDevice(CFG, ZYNQ_HP, quiet=True)
    program = check(network(), device)
    spread_loads = spread(program)
    assert spread_loads[-1] and not spread_loads[0] and spread_loads == sorted(spread_loads)
    fast = product_cycles(program, device)
    assert (
        fast <= ROWS * COLUMNS / (2 * CFG.bus_bytes) / 0.87
    )  # with bursts of eight beats, and the latency at both ends
    monkeypatch.setattr(image, "spread_weights", lambda cfg, instructions: None)
    program = check(network(), device)
    assert not any(spread(program))
    assert product_cycles(program, device) > 1.8 * fast


@pytest.mark.parametrize("cfg", [CFG, replace(CFG, batch=2), replace(CFG, block_in=16, forward=True)])
def test_bytes_are_the_same(cfg: Config) -> None:
    assert any(spread(check(network(), FunctionalDevice(cfg, checking=True))))


def test_no_config_without_two_ports_has_it() -> None:
    program = check(network(), FunctionalDevice(replace(CFG, ports=1)))
    assert not any(spread(program)) and predict(CFG, b"").cycles == 0
