"""Find codebooks that hold the values of all groups of a layer's weights, so that the weights can be packed.

A group is a codebook block (glossary): weights that share a codebook. A set of byte values is a bit mask of 32 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from celosia.hw.spec.packing import CODEBOOK_ENTRIES, CODEBOOKS, NIBBLE_BITS
from celosia.sim.functional.unpacking import unpack_numbers

Bytes = NDArray[np.uint8]
CHUNK = 1 << 14
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
        fits = np.stack([~(masks & ~mask).any(axis=1) for mask in _codebook_sets(books)])  # [codebooks, sets]
        if fits.any(axis=0).all():
            choices = fits.argmax(axis=0)[set_of_group].astype(np.uint8)
            books = books[: int(choices.max()) + 1]
            return CodedGroups(books, choices, _positions(books)[choices[:, None], groups])
    return None


def multiples(bits: int) -> Bytes:
    """Return codebooks [CODEBOOKS, 2^bits] of the two's complement numbers of `bits` bits, times CODEBOOKS down to 1.

    One bit stands for 1 and -1.


    >>> multiples(2)[-2:].view(np.int8).tolist()
    [[0, 2, -4, -2], [0, 1, -2, -1]]
    """
    half = 1 << (bits - 1)
    values = np.array([*range(half), *range(-half, 0)] if bits > 1 else [1, -1])
    return (values * np.arange(CODEBOOKS, 0, -1)[:, None]).astype(np.uint8)


def _candidate_codebooks(masks: Bytes, bits: int) -> Iterator[Bytes]:
    """Generate sets of codebooks to try: multiples, then those merged from the value sets `masks` of the groups."""
    yield multiples(bits)
    merged = _merge_sets(masks, 1 << bits)
    if merged is not None:
        yield merged


def codebook_entries(books: Bytes, bits: int) -> Bytes:
    """Arrange codebooks as entries of scratchpad book: [CODEBOOK_ENTRIES * codebooks, weights of half a byte]."""
    numbers = unpack_numbers(np.arange(CODEBOOK_ENTRIES, dtype=np.uint8)[:, None], bits)[:, : NIBBLE_BITS // bits]
    return books[:, numbers].reshape(-1, numbers.shape[1])


def _value_sets(groups: Bytes, max_size: int) -> Bytes | None:
    """Return the set of values of each group, [groups, 32] with a bit for each value; None if one has over
    `max_size`."""
    sets = []
    for first in range(0, len(groups), CHUNK):
        part = groups[first : first + CHUNK]
        has = np.zeros((len(part), 256), np.bool_)
        has[np.arange(len(part))[:, None], part] = True
        if has.sum(axis=1).max() > max_size:
            return None
        sets.append(np.packbits(has, axis=1))
    return np.concatenate(sets)


def _codebook_sets(books: Bytes) -> Bytes:
    """Return the set of values of each codebook, [codebooks, 32], as `_value_sets` does for groups."""
    has = np.zeros((len(books), 256), np.bool_)
    has[np.arange(len(books))[:, None], books] = True
    return np.packbits(has, axis=1)


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
