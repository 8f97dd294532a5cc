"""Accelerators whose array runs at twice the clock have the bytes and cycles of those with one clock."""

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
    """Return the accelerator as for an FPGA with such DSP blocks, with both clocks."""
    text = verilog(cfg, simulation=True, blocks=Blocks(dsp))
    assert "fast_clk" in text and (not fault[0] or text.count(fault[0]) == 1)
    return rtl_device(cfg, source=text.replace(*fault) + dsp_blocks.model(dsp))


def ended(program: TestProgram, device: RtlDevice) -> tuple[bytes, Counters]:
    """Run a program, and return the content of memory and the counters."""
    device.allocate(len(program.image))
    device.write(0, program.loaded())
    counters = device.run(program.instr_addr, len(program.instructions), 1_000_000)
    return device.read(0, len(program.image)).tobytes(), counters


def differ(cfg: Config, pumped_device: RtlDevice, programs: int) -> bool:
    """Return True if a program leaves other bytes, or takes other cycles, than with one clock."""
    expected = RtlDevice(replace(cfg, pump=1), quiet=True)  # other tests need this simulator, too
    for seed in range(programs):
        program = random_program(cfg, seed, count=30, align=1 if seed % 2 else None)
        for device in (expected, pumped_device):
            device.use(random_stalls(seed) if seed % 4 < 2 else ZYNQ_HP)
        if ended(program, expected) != ended(program, pumped_device):
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
    faulty = pumped(cfg, Dsp.e1, ("= turn ^ seen", "= ~(turn ^ seen)"))
    with suppress(DeviceError):
        assert differ(cfg, faulty, programs=20)
