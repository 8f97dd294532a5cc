"""How constants lie in DRAM: weights, taps and parameters in the order in which the accelerator reads them."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from celosia.compiler.layer import Gemm, Requantise, Window
from celosia.compiler.tensorize.codebooks import code_groups, codebook_entries
from celosia.hw.spec.config import Config
from celosia.hw.spec.packing import NIBBLE_BITS, packing
from celosia.hw.spec.scratchpads import PAR_FIELDS, scratchpads

ALIGN = 64
"""Bytes; the address of each blob of constants is a multiple of it."""
Bytes = NDArray[np.uint8]


def blocks(channels: int, block: int) -> int:
    """Return how many blocks of `block` channels hold `channels`; the last may not be full."""
    return -(-channels // block)


def input_ranges(cfg: Config, gemm: Gemm) -> list[tuple[int, int]]:
    """Return for each output block the input blocks [first, last) that it reads; all of them unless there are
    groups."""
    out_channels, group_in = gemm.weights.shape[:2]
    group_out = out_channels // gemm.groups
    ranges = []
    for n in range(blocks(out_channels, cfg.block_out)):
        first = n * cfg.block_out // group_out
        last = (min((n + 1) * cfg.block_out, out_channels) - 1) // group_out
        ranges.append((first * group_in // cfg.block_in, blocks((last + 1) * group_in, cfg.block_in)))
    return ranges


class WeightRun(NamedTuple):
    """A run of `blocks` output blocks from `first` on whose input blocks advance evenly, so that one loop expresses
    them.

    Each `share` output blocks read the same `inputs` input blocks: the first ones from block `input` on, the next ones
    `step` blocks further. weights: the number of (output block, input block) pairs before the run, which is where its
    weights begin.
    """

    first: int
    blocks: int
    input: int
    inputs: int
    step: int
    share: int
    weights: int


def weight_runs(cfg: Config, gemm: Gemm) -> list[WeightRun]:
    """Cut the output blocks of `gemm` into runs, wherever their input blocks do not advance evenly.

    Without groups it is one run; each run becomes a computation of its own (lowering.py).
    """
    ranges = input_ranges(cfg, gemm)
    result: list[WeightRun] = []
    n = before = 0
    while n < len(ranges):
        start, stop = ranges[n]
        share = next((i for i, other in enumerate(ranges[n:]) if other != ranges[n]), len(ranges) - n)
        step = max(ranges[n + share][0] - start, 0) if n + share < len(ranges) else 0
        count = share
        while n + count < len(ranges) and step:
            advance = count // share * step
            if ranges[n + count] != (start + advance, stop + advance):
                break
            count += 1
        result.append(WeightRun(n, count, start, stop - start, step if count > share else 0, share, before))
        before += count * (stop - start)
        n += count
    return result


def arrange_weights(cfg: Config, gemm: Gemm) -> Bytes:
    """Arrange weights as entries [block_out][block_in], in order [output block][input block it reads][row][column].

    Channels that a group does not read, and channels beyond the last, have weights of zero.
    """
    out_channels, group_in, height, width = gemm.weights.shape
    if gemm.groups == 1:
        n, k = blocks(out_channels, cfg.block_out), blocks(group_in, cfg.block_in)
        padded = np.zeros((n * cfg.block_out, k * cfg.block_in, height, width), np.int8)
        padded[:out_channels, :group_in] = gemm.weights
        tiles = padded.reshape(n, cfg.block_out, k, cfg.block_in, height, width).transpose(0, 2, 4, 5, 1, 3)
        return np.ascontiguousarray(tiles).view(np.uint8).reshape(-1)
    group_out = out_channels // gemm.groups
    parts = []
    for n, (first, last) in enumerate(input_ranges(cfg, gemm)):
        dense = np.zeros((cfg.block_out, (last - first) * cfg.block_in, height, width), np.int8)
        for row, channel in enumerate(range(n * cfg.block_out, min((n + 1) * cfg.block_out, out_channels))):
            start = channel // group_out * group_in - first * cfg.block_in
            dense[row, start : start + group_in] = gemm.weights[channel]
        tiles = dense.reshape(cfg.block_out, last - first, cfg.block_in, height, width).transpose(1, 3, 4, 0, 2)
        parts.append(np.ascontiguousarray(tiles).view(np.uint8).reshape(-1))
    return np.concatenate(parts)


class StoredWeights(NamedTuple):
    """Weights as they lie in DRAM. book_bytes: size of the codebooks in front of packed weights; 0 if not packed."""

    data: Bytes
    book_bytes: int = 0

    @property
    def packed(self) -> bool:
        """Whether they are packed, so that LOAD expands them."""
        return self.book_bytes > 0

    @property
    def first(self) -> int:
        """Offset in bytes of the weights behind the codebooks, a multiple of ALIGN."""
        return -(-self.book_bytes // ALIGN) * ALIGN


def stored_weights(cfg: Config, gemm: Gemm) -> StoredWeights:
    """Arrange the weights of `gemm` for DRAM, packed if that is possible.

    It is if `cfg` has weights of few bits, the weights that each output block reads are whole packs, and CODEBOOKS
    codebooks hold the values of all codebook blocks.
    """
    entries = arrange_weights(cfg, gemm)
    places = gemm.weights.shape[2] * gemm.weights.shape[3]
    if cfg.weight_bits == 8 or any(run.inputs * places % packing(cfg).entries for run in weight_runs(cfg, gemm)):
        return StoredWeights(entries)
    return pack_weights(cfg, entries) or StoredWeights(entries)


def pack_weights(cfg: Config, weights: Bytes) -> StoredWeights | None:
    """Pack entries of wgt as codebooks and packs (`hw/spec/packing.py`); None if there are not enough codebooks.

    weights: the bytes of the entries, whole packs.
    """
    p = packing(cfg)
    groups = weights.reshape(-1, p.entries, p.blocks, p.run).swapaxes(1, 2).reshape(-1, p.entries * p.run)
    code = code_groups(groups, p.bits)
    if code is None:
        return None
    book = codebook_entries(code.books, p.bits).ravel()
    stored = StoredWeights(np.zeros(0, np.uint8), len(book))
    data = np.zeros(stored.first + len(weights) // p.weights * p.pack_bytes, np.uint8)
    data[: len(book)] = book
    packs = data[stored.first :].reshape(-1, p.pack_bytes)
    packs[:, : p.blocks // 2] = _pack_numbers(code.choices.reshape(-1, p.blocks), NIBBLE_BITS)
    numbers = code.numbers.reshape(-1, p.blocks, p.entries, p.run).swapaxes(1, 2)
    packs[:, p.head_bytes :] = _pack_numbers(numbers.reshape(len(packs), -1), p.bits)
    return stored._replace(data=data)


def _pack_numbers(numbers: Bytes, bits: int) -> Bytes:
    """Pack numbers of `bits` bits, [..., 8 / bits * bytes], into bytes, the first number in a byte's lowest bits."""
    parts = numbers.reshape(*numbers.shape[:-1], -1, 8 // bits) << np.arange(0, 8, bits).astype(np.uint8)
    return np.bitwise_or.reduce(parts, axis=-1)  # type: ignore[no-any-return]


def tap_steps(cfg: Config, window: Window) -> tuple[int, int]:
    """Return the steps in which the vector unit reads a row of a depthwise kernel, and the columns between two steps.

    One step adds `cfg.taps` neighbouring columns, or a single one if the kernel is dilated.
    """
    width = window.kernel[1]
    return (-(-width // cfg.taps), cfg.taps) if window.dilations[1] == 1 else (width, window.dilations[1])


def arrange_taps(cfg: Config, weights: NDArray[np.int8], window: Window) -> Bytes:
    """Arrange the weights of a depthwise convolution as entries of tap, [block][kernel row][step], filled with
    zeros."""
    channels, _, height, width = weights.shape
    steps, _ = tap_steps(cfg, window)
    used = cfg.taps if window.dilations[1] == 1 else 1
    padded = np.zeros((blocks(channels, cfg.block_out) * cfg.block_out, height, steps * used), np.int8)
    padded[:channels, :, :width] = weights[:, 0]
    entry = scratchpads(cfg)["tap"].shape
    entries = np.zeros((len(padded) // cfg.block_out, height, steps, *entry), np.int8)
    entries[:, :, :, :used] = padded.reshape(-1, cfg.block_out, height, steps, used).transpose(0, 2, 3, 4, 1)
    return entries.view(np.uint8).reshape(-1)


def arrange_parameters(cfg: Config, requantise: Requantise) -> Bytes:
    """Arrange bias, multiplier and shift of each channel as entries of par (`PAR_FIELDS`), filled with zeros."""
    channels = len(requantise.bias)
    entries = np.zeros(blocks(channels, cfg.block_out) * cfg.block_out, np.uint64)
    entries[:channels] = pack_parameters(requantise.bias, requantise.multiplier, requantise.shift)
    return entries.view(np.uint8)


def pack_parameters(bias: ArrayLike, multiplier: ArrayLike, shift: ArrayLike) -> NDArray[np.uint64]:
    """Return the 64-bit number that par holds for each channel.

    >>> [int(part) for (part,) in unpack_parameters(pack_parameters([-5], [1 << 23], [30]))]
    [-5, 8388608, 30]
    """
    values = np.asarray(bias, np.int32).view(np.uint32), multiplier, shift
    parts = zip(PAR_FIELDS.values(), values, strict=True)
    return reduce(np.bitwise_or, (np.asarray(v).astype(np.uint64) << np.uint64(part.offset) for part, v in parts))


def unpack_parameters(entries: NDArray[np.uint64]) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Return bias, multiplier and shift of 64-bit numbers of par; the reverse of `pack_parameters`."""
    bias, multiplier, shift = (part.of(entries) for part in PAR_FIELDS.values())
    return bias.astype(np.uint32).view(np.int32), multiplier.astype(np.int64), shift.astype(np.int64)
