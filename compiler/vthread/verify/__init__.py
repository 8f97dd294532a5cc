"""Prove that compiled instructions do what their layers mean, whatever the timing, without running them on data.

The proof starts from the encoded words: accesses, pairs of tokens and possible orders of units are derived here anew,
so that a mistake in lowering or in `tokens.py` is not repeated here.

decode       which places an instruction touches; rules of a single instruction (addresses of scratchpads and DRAM,
             where a STORE may write)
order        tokens (a missing one, one too many), progress, and order between units, with the words of their errors:
             afterwards a stream means what its program order says
provenance   what the stream stores, in program order, as random scalars
meaning      what the layers must store, as the same scalars
diagnosis    the words of the error for a store that differs (decode and order word their own)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.layer import Storage
from celosia.compiler.vthread.verify.decode import Rule, VerifyError, decode
from celosia.compiler.vthread.verify.diagnosis import explain
from celosia.compiler.vthread.verify.order import Report, check_stream
from celosia.compiler.vthread.verify.provenance import Meaning, Provenance, ProvenanceError, Run, WrongStore
from celosia.hw.spec.config import Config


def verify(cfg: Config, code: NDArray[np.uint8], dram_size: int, writable: tuple[int, int]) -> Report:
    """Check one launch against every `Rule`. Raises VerifyError for the first one that is broken.

    code: [count, instruction_bytes] uint8. Addresses lie in [0, dram_size), those of stores in [writable[0],
    writable[1]). An entry of several pieces counts as written once one of them is: lanes that no channel uses stay
    empty, and their weights are zero.
    """
    return check_stream(cfg, decode(cfg, code), dram_size, writable)


def verify_provenance(
    cfg: Config,
    runs: Sequence[Run],
    addresses: Mapping[Storage, int],
    constants_address: int,
    constants: NDArray[np.uint8],
    dram_size: int | None = None,
) -> list[Report]:
    """Check consecutive launches against every `Rule` and every `Meaning`. Raises VerifyError and ProvenanceError.

    addresses: DRAM address of each storage of activations, all below constants_address. constants: the bytes from there
    on, instructions among them. dram_size: by default the end of the constants.
    """
    size = constants_address + len(constants) if dram_size is None else dram_size
    state = Provenance(cfg, addresses, constants_address, constants, [layer for run in runs for layer in run.layers])
    reports = []
    for number, run in enumerate(runs):
        stream = decode(cfg, run.code)
        reports.append(check_stream(cfg, stream, size, (0, constants_address)))
        try:
            state.check(number, run, stream)
        except WrongStore as wrong:
            raise explain(state, number, run, stream, wrong) from None
    return reports


__all__ = [
    "Meaning", "ProvenanceError", "Report", "Rule", "Run", "VerifyError", "verify", "verify_provenance"
]  # fmt: skip
