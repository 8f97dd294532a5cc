"""Vendor primitives that the RTL instantiates by name instead of leaving them to inference. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Dsp(Enum):
    """DSP block types of the supported FPGA families; the value is the name of the vendor's primitive."""

    e1 = "DSP48E1"
    e2 = "DSP48E2"
    mult18 = "MULT18X18D"


@dataclass(frozen=True)
class Blocks:
    """Amaranth platform that tells `elaborate` which vendor primitives the target FPGA has.

    With any other platform, or with None, a product is a `*` between registers. Simulators and proofs read that form,
    and synthesis tools may infer DSP blocks from it.

    Fields
    ------
    dsp : the DSP block that multiplies.
    """

    dsp: Dsp
