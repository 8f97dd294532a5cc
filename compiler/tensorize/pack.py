"""How constants lie in DRAM: weights, taps and parameters in the order in which the accelerator reads them.

In order: the blocks of channels that each output block reads; weights, packed where that is possible; the codebooks of
packed weights; taps of depthwise convolutions; parameters of the requantiser.

Codebooks hold the values of all groups of a layer's weights. A group is a codebook block (glossary): weights that share
a codebook. A set of byte values is a bit mask of 32 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from celosia.compiler.layer import Gemm, Requantise, Window
from celosia.hw.spec.config import Config
from celosia.hw.spec.packing import CODEBOOK_ENTRIES, CODEBOOKS, NIBBLE_BITS, packing
from celosia.hw.spec.scratchpads import PAR_FIELDS, scratchpads
from celosia.sim.functional.unpacking import unpack_numbers

Bytes = NDArray[np.uint8]
ALIGN = 64
"""Bytes; the address of each blob of constants is a multiple of it."""


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


# Weights -------------------------------------------------------------------------------------------------------


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
    if cfg.weight_bits == 8 or any(
        run.inputs * places * cfg.inp_pieces % packing(cfg).pieces for run in weight_runs(cfg, gemm)
    ):
        return StoredWeights(entries)
    return pack_weights(cfg, entries) or StoredWeights(entries)


def arrange_weights(cfg: Config, gemm: Gemm) -> Bytes:
    """Arrange weights as entries of wgt, in order [output block][input block it reads][row][column].

    Channels that a group does not read, and channels beyond the last, have weights of zero.
    """
    out_channels, group_in, height, width = gemm.weights.shape
    if gemm.groups == 1:
        n, k = blocks(out_channels, cfg.block_out), blocks(group_in, cfg.block_in)
        padded = np.zeros((n * cfg.block_out, k * cfg.block_in, height, width), np.int8)
        padded[:out_channels, :group_in] = gemm.weights
        shape = n, cfg.block_out, k, cfg.inp_pieces, cfg.group, height, width
        tiles = padded.reshape(shape).transpose(0, 2, 5, 6, 3, 1, 4)
        return np.ascontiguousarray(tiles).view(np.uint8).reshape(-1)
    group_out = out_channels // gemm.groups
    parts = []
    for n, (first, last) in enumerate(input_ranges(cfg, gemm)):
        dense = np.zeros((cfg.block_out, (last - first) * cfg.block_in, height, width), np.int8)
        for row, channel in enumerate(range(n * cfg.block_out, min((n + 1) * cfg.block_out, out_channels))):
            start = channel // group_out * group_in - first * cfg.block_in
            dense[row, start : start + group_in] = gemm.weights[channel]
        tiles = dense.reshape(cfg.block_out, last - first, cfg.inp_pieces, cfg.group, height, width).transpose(
            1, 4, 5, 2, 0, 3
        )
        parts.append(np.ascontiguousarray(tiles).view(np.uint8).reshape(-1))
    return np.concatenate(parts)


def pack_weights(cfg: Config, weights: Bytes) -> StoredWeights | None:
    """Pack entries of wgt as codebooks and packs (`hw/spec/packing.py`); None if there are not enough codebooks.

    weights: the bytes of the entries, whole packs.
    """
    p = packing(cfg)
    groups = weights.reshape(-1, p.pieces, p.blocks, p.run).swapaxes(1, 2).reshape(-1, p.pieces * p.run)
    code = code_groups(groups, p.bits)
    if code is None:
        return None
    book = codebook_entries(code.books, p.bits).ravel()
    stored = StoredWeights(np.zeros(0, np.uint8), len(book))
    data = np.zeros(stored.first + len(weights) // p.weights * p.pack_bytes, np.uint8)
    data[: len(book)] = book
    packs = data[stored.first :].reshape(-1, p.pack_bytes)
    packs[:, : p.blocks // 2] = _pack_numbers(code.choices.reshape(-1, p.blocks), NIBBLE_BITS)
    numbers = code.numbers.reshape(-1, p.blocks, p.pieces, p.run).swapaxes(1, 2)
    packs[:, p.head_bytes :] = _pack_numbers(numbers.reshape(len(packs), -1), p.bits)
    return stored._replace(data=data)


def _pack_numbers(numbers: Bytes, bits: int) -> Bytes:
    """Pack numbers of `bits` bits, [..., 8 / bits * bytes], into bytes, the first number in a byte's lowest bits."""
    parts = numbers.reshape(*numbers.shape[:-1], -1, 8 // bits) << np.arange(0, 8, bits).astype(np.uint8)
    return np.bitwise_or.reduce(parts, axis=-1)  # type: ignore[no-any-return]


# Codebooks -----------------------------------------------------------------------------------------------------

GROUPS_AT_ONCE = 1 << 14
"""Groups that `_value_sets` processes at once, to bound its memory."""


class CodedGroups(NamedTuple):
    """Groups of weights, each weight as its number in the group's codebook.

    books: [codebooks, 2^bits], bytes of int8. choices: [groups], the codebook of each. numbers: [groups, weights], the
    position of each weight in its codebook.
    """

    books: Bytes
    choices: Bytes
    numbers: Bytes


def code_groups(groups: Bytes, bits: int) -> CodedGroups | None:
    """Code groups [groups, weights], bytes of int8, by codebooks of 2^bits values.

    Returns None if CODEBOOKS codebooks are not enough. Codebooks of multiples are tried first, since many layers can
    share them; then codebooks merged from the groups.
    """
    sets = _value_sets(groups, 1 << bits)
    if sets is None:
        return None
    distinct, set_of_group = np.unique(sets.view("V32").ravel(), return_inverse=True)
    masks = distinct.view(np.uint8).reshape(-1, 32)
    for books in _candidate_codebooks(masks, bits):
        book_masks = np.packbits(_occurring_values(books), axis=1)
        fits = np.stack([~(masks & ~mask).any(axis=1) for mask in book_masks])  # [codebooks, sets]
        if fits.any(axis=0).all():
            choices = fits.argmax(axis=0)[set_of_group].astype(np.uint8)
            books = books[: int(choices.max()) + 1]
            return CodedGroups(books, choices, _positions(books)[choices[:, None], groups])
    return None


def _candidate_codebooks(masks: Bytes, bits: int) -> Iterator[Bytes]:
    """Generate sets of codebooks to try: multiples, then those merged from the value sets `masks` of the groups."""
    yield codebooks_of_multiples(bits)
    merged = _merge_sets(masks, 1 << bits)
    if merged is not None:
        yield merged


def codebooks_of_multiples(bits: int) -> Bytes:
    """Return codebooks [CODEBOOKS, 2^bits] of the two's complement numbers of `bits` bits, times CODEBOOKS down to 1.

    One bit stands for 1 and -1.

    >>> codebooks_of_multiples(2)[-2:].view(np.int8).tolist()
    [[0, 2, -4, -2], [0, 1, -2, -1]]
    """
    half = 1 << (bits - 1)
    values = np.array([*range(half), *range(-half, 0)] if bits > 1 else [1, -1])
    return (values * np.arange(CODEBOOKS, 0, -1)[:, None]).astype(np.uint8)


def _value_sets(groups: Bytes, max_size: int) -> Bytes | None:
    """Return the set of values of each group, [groups, 32] with a bit for each value; None if one has over
    `max_size`."""
    sets = []
    for first in range(0, len(groups), GROUPS_AT_ONCE):
        occurs = _occurring_values(groups[first : first + GROUPS_AT_ONCE])
        if occurs.sum(axis=1).max() > max_size:
            return None
        sets.append(np.packbits(occurs, axis=1))
    return np.concatenate(sets)


def _occurring_values(rows: Bytes) -> NDArray[np.bool_]:
    """Return whether each byte value occurs in each row, [rows, 256]."""
    occurs = np.zeros((len(rows), 256), np.bool_)
    occurs[np.arange(len(rows))[:, None], rows] = True
    return occurs


def _positions(books: Bytes) -> Bytes:
    """Return the position of each byte value in each codebook, [codebooks, 256]."""
    positions = np.zeros((len(books), 256), np.uint8)
    positions[np.arange(len(books))[:, None], books] = np.arange(books.shape[1])
    return positions


def _merge_sets(masks: Bytes, max_size: int) -> Bytes | None:
    """Merge sets greedily into codebooks of at most `max_size` values; None if CODEBOOKS are not enough.

    Each codebook begins with the largest remaining set and takes in the sets that share most values with it, while
    there is room.
    """
    remaining, books = masks[np.argsort(-_set_sizes(masks), kind="stable")], np.zeros((0, max_size), np.uint8)
    while len(remaining):
        if len(books) == CODEBOOKS:
            return None
        book = remaining[0]
        while len(remaining):
            remaining = remaining[(remaining & ~book).any(axis=1)]
            fitting = remaining[_set_sizes(remaining | book) <= max_size]
            if not len(fitting):
                break
            book = book | fitting[_set_sizes(fitting & book).argmax()]
        values = np.flatnonzero(np.unpackbits(book)).astype(np.uint8)
        books = np.vstack([books, np.pad(values, (0, max_size - len(values)), mode="edge")])
    return books


def _set_sizes(masks: Bytes) -> NDArray[np.intp]:
    """Return the number of values in each set."""
    return np.bitwise_count(masks).sum(axis=1, dtype=np.intp)  # type: ignore[no-any-return]


def codebook_entries(books: Bytes, bits: int) -> Bytes:
    """Arrange codebooks as entries of scratchpad book: [CODEBOOK_ENTRIES * codebooks, weights of half a byte]."""
    numbers = unpack_numbers(np.arange(CODEBOOK_ENTRIES, dtype=np.uint8)[:, None], bits)[:, : NIBBLE_BITS // bits]
    return books[:, numbers].reshape(-1, numbers.shape[1])


# Taps and parameters -------------------------------------------------------------------------------------------


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
