"""Loads of the codebooks by which packed weights are expanded."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.vthread.pipeline import StreamInstruction
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Buffer, Opcode, element_bytes
from celosia.hw.spec.packing import CODEBOOK_ENTRIES


def load_books(
    cfg: Config, instructions: list[StreamInstruction], books: Mapping[int, NDArray[np.uint8]]
) -> list[StreamInstruction]:  # fmt: skip
    """`instructions`, with a load of codebooks in front of each load of packed weights that needs other ones. Both come
    through one port, in their order, so that no token is needed.

    books: those in front of weights, by the address of the first one.
    """
    starts, found, there = sorted(books), [], np.zeros(0, np.uint8)
    for each in instructions:
        if each.opcode == Opcode.LOAD and each.fields.get("expand"):
            start = starts[bisect(starts, each.fields["dram_addr"]) - 1]
            wanted = books[start]
            same = np.flatnonzero(wanted[: len(there)] != there[: len(wanted)])
            first = int(same[0]) if len(same) else min(len(there), len(wanted))
            if first < len(wanted):
                found.append(_load(cfg, start, first, len(wanted), each.layer))
                there = np.concatenate([wanted, there[len(wanted) :]])
        found.append(each)
    return found


def _load(cfg: Config, start: int, first: int, end: int, layer: int) -> StreamInstruction:
    """Bytes from `first` on, and those in front of it in its codebook."""
    size = element_bytes(cfg, Buffer.BOOK)
    entry = first // (size * CODEBOOK_ENTRIES) * CODEBOOK_ENTRIES
    fields = {
        "buffer": int(Buffer.BOOK), "dram_addr": start + entry * size, "x_size": end // size - entry, "y_size": 1,
        "z_size": 1, "sram_base": entry, "sram_x": 1,
    }  # fmt: skip
    return StreamInstruction(Opcode.LOAD, fields, layer)
