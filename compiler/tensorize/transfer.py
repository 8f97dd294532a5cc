"""Transfers: merge the dimensions of a block, so that one LOAD or STORE moves it in long rows of DRAM."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.layer import Storage, TilingError
from celosia.hw.spec.isa import PAD_BITS, X_BITS, YZ_BITS

X_MAX, YZ_MAX, PAD_MAX = (1 << X_BITS) - 1, (1 << YZ_BITS) - 1, (1 << PAD_BITS) - 1
"""Largest values of an instruction's fields: pieces of a row, rows or planes, and padding on one side."""


@dataclass(frozen=True)
class Dim:
    """One dimension of a block: number of steps, bytes of a step in DRAM, pieces of a step in the scratchpad."""

    count: int
    dram: int
    sram: int


@dataclass(frozen=True)
class DramPlace:
    """The place of a tensor in DRAM: `offset` bytes after the begin of `home`, a storage of activations or constants.

    strides: bytes from one index to the next in each dimension; 0 for values within an entry of packed weights.
    book_bytes: size of the codebooks at the begin of `home` that expand packed weights; 0 for other tensors.
    """

    home: Storage | NDArray[np.uint8]
    offset: int
    strides: tuple[int, ...]
    book_bytes: int = 0


def coalesce(dims: list[Dim], piece: int) -> list[Dim]:
    """Merge dimensions into [x, y, z], the three that an instruction has, which visit the same pieces; x is contiguous.

    piece: bytes of a piece. Raises TilingError if more than three are left, or one is too long for its field.
    """
    dims = [dim for dim in dims if dim.count > 1]
    dims.sort(key=lambda dim: (dim.dram == 0, dim.dram))
    merged: list[Dim] = []
    for dim in dims:
        last = merged[-1] if merged else None
        if (
            last is not None
            and dim.dram == last.count * last.dram
            and dim.sram == last.count * last.sram
            and last.count * dim.count <= (X_MAX if last.dram == piece else YZ_MAX)
        ):
            merged[-1] = Dim(last.count * dim.count, last.dram, last.sram)
        else:
            merged.append(dim)
    if not merged or merged[0].dram != piece:
        merged.insert(0, Dim(1, piece, 1))
    merged += [Dim(1, 0, 0)] * (3 - len(merged))
    if len(merged) > 3 or merged[0].count > X_MAX or max(dim.count for dim in merged[1:]) > YZ_MAX:
        raise TilingError(f"a block of {'x'.join(str(d.count) for d in merged)} pieces is not one transfer")
    return merged
