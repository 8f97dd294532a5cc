"""Insert LOADs of the codebooks by which packed weights are expanded."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.vthread.pipeline import StreamInstruction
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Buffer, Opcode, element_bytes
from celosia.hw.spec.packing import CODEBOOK_ENTRIES


def load_codebooks(
    cfg: Config, instructions: list[StreamInstruction], books: Mapping[int, NDArray[np.uint8]]
) -> list[StreamInstruction]:  # fmt: skip
    """Insert a LOAD of codebooks in front of each LOAD of packed weights that needs others than those loaded before.

    Both come through one port, in order, so that no token is needed. books: codebooks by their address, in front of the
    weights that need them.
    """
    starts, result, loaded = sorted(books), [], np.zeros(0, np.uint8)
    for instruction in instructions:
        if instruction.opcode == Opcode.LOAD and instruction.fields.get("expand"):
            start = starts[bisect(starts, instruction.fields["dram_addr"]) - 1]
            needed = books[start]
            different = np.flatnonzero(needed[: len(loaded)] != loaded[: len(needed)])
            first = int(different[0]) if len(different) else min(len(loaded), len(needed))
            if first < len(needed):
                result.append(_load(cfg, start, first, len(needed), instruction.layer))
                loaded = np.concatenate([needed, loaded[len(needed) :]])
        result.append(instruction)
    return result


def _load(cfg: Config, start: int, first: int, end: int, layer: int) -> StreamInstruction:
    """LOAD the codebooks at `start` from the one that holds byte `first` up to byte `end`."""
    size = element_bytes(cfg, Buffer.BOOK)
    entry = first // (size * CODEBOOK_ENTRIES) * CODEBOOK_ENTRIES
    fields = {
        "buffer": int(Buffer.BOOK), "dram_addr": start + entry * size, "x_size": end // size - entry, "y_size": 1,
        "z_size": 1, "sram_base": entry, "sram_x": 1,
    }  # fmt: skip
    return StreamInstruction(Opcode.LOAD, fields, layer)
