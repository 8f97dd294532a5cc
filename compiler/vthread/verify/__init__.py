"""Proves of an instruction stream, without running it, that whatever the timing it does what its program order says.

The proof starts from the words alone: what an instruction touches, which token pairs with which and in which orders
units may run is worked out here anew, so that a mistake in lowering or in `tokens.py` has no accomplice.

decode.py: words, fields and the rules of a single instruction. order.py: tokens, progress, and order between units.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.vthread.verify.decode import Rule, VerifyError, decode
from celosia.compiler.vthread.verify.order import Report, check_stream
from celosia.hw.config import Config


def verify(cfg: Config, code: NDArray[np.uint8], dram_size: int, writable: tuple[int, int]) -> Report:
    """Check one launch against every `Rule`. Raises VerifyError for the first that is broken.

    code: [count, instruction_bytes] uint8. Addresses lie in [0, dram_size), those of stores in [writable[0],
    writable[1]). An entry of several pieces counts as written once one of them is: lanes that no channel uses stay
    empty, and their weights are zero.
    """
    return check_stream(cfg, decode(cfg, code), dram_size, writable)


__all__ = ["Report", "Rule", "VerifyError", "verify"]
