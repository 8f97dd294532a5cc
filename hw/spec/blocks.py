"""Blocks of FPGAs that the hardware asks for by name. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Dsp(Enum):
    """A block that multiplies, by the name of its vendor's primitive."""

    e1 = "DSP48E1"
    e2 = "DSP48E2"
    mult18 = "MULT18X18D"


@dataclass(frozen=True)
class Blocks:
    """A platform with blocks of these names, for `hw.verilog.convert` and `elaborate`. For any other platform, and for
    none, products are a `*` between registers: what simulators and proofs see, and tools may infer blocks from."""

    dsp: Dsp
