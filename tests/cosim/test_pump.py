"""Accelerators whose array has a clock of twice the rate: the bytes and the cycles of those with one clock."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import dsp_blocks
import pytest
from configs import CONFIGS
from programs import TestProgram, random_program
from simulators import rtl_device
from thorough import some

from celosia.hw.spec.blocks import Blocks, Dsp
from celosia.hw.spec.config import Config
from celosia.hw.verilog import verilog
from celosia.sim.device import Counters, DeviceError
from celosia.sim.rtl.rtlsim import ZYNQ_HP, RtlDevice, random_stalls

pytestmark = pytest.mark.rtl


def pumped(cfg: Config, dsp: Dsp, fault: tuple[str, str] = ("", "")) -> RtlDevice:
    """The accelerator as it is for a device with such blocks, both clocks running."""
    text = verilog(cfg, simulation=True, blocks=Blocks(dsp))
    assert "fast_clk" in text and (not fault[0] or text.count(fault[0]) == 1)
    return rtl_device(cfg, source=text.replace(*fault) + dsp_blocks.model(dsp))


def ended(program: TestProgram, device: RtlDevice) -> tuple[bytes, Counters]:
    """What memory holds after a program, and the counters."""
    device.allocate(len(program.image))
    device.write(0, program.loaded())
    counters = device.run(program.instr_addr, len(program.instructions), 1_000_000)
    return device.read(0, len(program.image)).tobytes(), counters


def differ(cfg: Config, found: RtlDevice, programs: int) -> bool:
    """Whether programs leave other bytes, or take other cycles, than on the accelerator with one clock."""
    expected = RtlDevice(replace(cfg, pump=1), quiet=True)  # which other tests have built, too
    for seed in range(programs):
        program = random_program(cfg, seed, count=30, align=1 if seed % 2 else None)
        for device in (expected, found):
            device.use(random_stalls(seed) if seed % 4 < 2 else ZYNQ_HP)
        if ended(program, expected) != ended(program, found):
            return True
    return False


PUMPED = [("8x4-batch2-taps5", Dsp.e2), ("4x4", Dsp.e1), ("taps3", Dsp.e1)]


@pytest.mark.parametrize(("name", "dsp"), some(PUMPED, PUMPED[1:2]))
def test_same_bytes_in_as_many_cycles(name: str, dsp: Dsp) -> None:
    cfg = replace(CONFIGS[name], pump=2)
    assert not differ(cfg, pumped(cfg, dsp), programs=8)


@pytest.mark.thorough  # tests/bitstreams/test_dsp_blocks.py plants the same fault in a pair of multipliers
def test_the_other_half_of_a_cycle_is_noticed() -> None:
    cfg = replace(CONFIGS["4x4"], pump=2)
    found = pumped(cfg, Dsp.e1, ("= turn ^ seen", "= ~(turn ^ seen)"))
    with suppress(DeviceError):
        assert differ(cfg, found, programs=20)
