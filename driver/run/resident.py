"""Cached inputs that stay in the accelerator's memory from run to run: decide which of their bytes to write again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program import Pack
from celosia.compiler.program.model import matrix_sizes, pack_activation
from celosia.hw.spec.config import Config

Bytes = NDArray[np.uint8]
Changed = Mapping[str, range]
"""By name of a cache: its rows that differ from the run before; all others are equal."""


class ResidentBuffers:
    """The caches of a Program that lie in the memory of a device as the run before left them.

    Call `begin` before a run, `writes` for each input of its launches, and `end` after it.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._after_run: set[tuple[int, str]] = set()  # (address, cache) that the last run left; empty during a run
        self._before_run = self._after_run  # those that the current run found
        self._changed: Changed | None = None

    def begin(self, changed: Changed | None) -> None:
        """Begin a run. If it fails, the contents of all buffers count as unknown afterwards.

        changed: the rows that differ from the run before; None where all may differ.
        """
        self._changed = changed
        self._before_run = set() if changed is None else self._after_run
        self._after_run = set()

    def end(self, packs: list[Pack]) -> None:
        """End a run that succeeded: the caches of `packs` lie in the buffers now."""
        self._after_run = {(pack.address, pack.cache) for pack in packs if pack.cache}

    def writes(self, pack: Pack, array: NDArray[np.int8], cache_rows: int) -> Iterator[tuple[int, Bytes]]:
        """Yield the addresses and the bytes to write for an input of a launch.

        array: [..., rows, columns], in the accelerator's codes. cache_rows: its first rows, which come from the cache;
        those behind them are new in every run.
        """
        rows = (self._changed or {}).get(pack.cache)
        if rows is None or (pack.address, pack.cache) not in self._before_run:
            yield pack.address, pack_activation(self.config, pack.form.arrange(array), pack.groups)
            return
        row_count = array.shape[-2]
        for span in (range(rows.start, min(rows.stop, row_count)), range(cache_rows, row_count)):
            if span:
                yield from addresses_of_rows(self.config, pack, array, span)


def addresses_of_rows(cfg: Config, pack: Pack, array: NDArray[np.int8], rows: range) -> Iterator[tuple[int, Bytes]]:
    """Yield the addresses and the bytes of the pieces that hold some rows of `array` [..., rows, columns].

    An array packed by rows has them as consecutive pieces of each channel group. In one packed by columns, they are
    channels of some groups of each matrix; these groups are written as a whole.
    """
    count, group = matrix_sizes(array.shape)[0], cfg.group
    channels, pixels = pack.form.dims[1], pack.form.dims[3]
    if pack.form.fold == "rows":
        dims = 1, channels, 1, len(rows)
        first, groups, stride = rows.start, 1, pixels
    else:
        start, end = rows.start // group * group, min(-(-rows.stop // group) * group, channels // count)
        rows = range(start, min(end, array.shape[-2]))
        dims = 1, count * (end - start), 1, pixels
        first, groups, stride = start // group * pixels, (end - start) // group, channels // count // group * pixels
    part = replace(pack.form, dims=dims).arrange(np.ascontiguousarray(array[..., rows.start : rows.stop, :]))
    packed = pack_activation(cfg, part, dims[1] // group).reshape(-1, groups * dims[3] * cfg.piece_bytes)
    for number, data in enumerate(packed):
        yield pack.address + (number * stride + first) * cfg.piece_bytes, data
