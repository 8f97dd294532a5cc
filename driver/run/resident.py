"""Cached rows that stay in the accelerator's memory from run to run, and the rows that are written anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program import Pack
from celosia.compiler.program.activation_packing import pack_activation
from celosia.compiler.program.model import matrix_sizes
from celosia.hw.spec.config import Config

Bytes = NDArray[np.uint8]
Changed = Mapping[str, range]
"""By cache: rows that differ from the run before; all others are equal."""


class ResidentBuffers:
    """Packs of a Program that lie in the memory of a device as the run before has left them."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._held: set[tuple[int, str]] = set()
        self._kept = self._held
        self._changed: Changed | None = None

    def begin(self, changed: Changed | None) -> None:
        """Begin a run: until it ends, the contents of the buffers count as unknown. changed: None for all rows."""
        self._changed = changed
        if changed is None:
            self._held = set()
        self._kept, self._held = self._held, set()

    def end(self, packs: list[Pack]) -> None:
        """End a run that succeeded: the caches of `packs` now lie in the buffers."""
        self._held = {(pack.address, pack.cache) for pack in packs if pack.cache}

    def writes(self, pack: Pack, array: NDArray[np.int8], past: int) -> Iterator[tuple[int, Bytes]]:
        """Addresses and bytes to write for `array`, [..., rows, columns] as the accelerator stores its bytes. past: how
        many rows are the cache's; those behind them are new in every run."""
        rows = (self._changed or {}).get(pack.cache)
        if rows is None or (pack.address, pack.cache) not in self._kept:
            yield pack.address, pack_activation(self.config, pack.form.arrange(array), pack.groups)
            return
        held = array.shape[-2]
        for span in (range(rows.start, min(rows.stop, held)), range(past, held)):
            if span:
                yield from addresses_of_rows(self.config, pack, array, span)


def addresses_of_rows(cfg: Config, pack: Pack, array: NDArray[np.int8], rows: range) -> Iterator[tuple[int, Bytes]]:
    """Addresses and bytes of what holds these rows of `array` [..., rows, columns], which is packed by rows or columns.

    By rows, each channel group has them one after the other; by columns, they are channels of some groups of each
    matrix, which are written whole.
    """
    count, group = matrix_sizes(array.shape)[0], cfg.group
    channels, pixels = pack.form.dims[1], pack.form.dims[3]
    if pack.form.fold == "rows":
        dims = 1, channels, 1, len(rows)
        first, groups, apart = rows.start, 1, pixels
    else:
        start, end = rows.start // group * group, min(-(-rows.stop // group) * group, channels // count)
        rows = range(start, min(end, array.shape[-2]))
        dims = 1, count * (end - start), 1, pixels
        first, groups, apart = start // group * pixels, (end - start) // group, channels // count // group * pixels
    part = replace(pack.form, dims=dims).arrange(np.ascontiguousarray(array[..., rows.start : rows.stop, :]))
    packed = pack_activation(cfg, part, dims[1] // group).reshape(-1, groups * dims[3] * cfg.piece_bytes)
    for number, data in enumerate(packed):
        yield pack.address + (number * apart + first) * cfg.piece_bytes, data
