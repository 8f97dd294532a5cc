"""Codebooks in which all groups of a layer's weights find their values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from celosia.hw.spec.packing import CODEBOOK_ENTRIES, CODEBOOKS, NIBBLE_BITS
from celosia.sim.functional.unpacking import unpack_numbers

Bytes = NDArray[np.uint8]
CHUNK = 1 << 14
"""Groups that are looked at together."""


class Coded(NamedTuple):
    """Groups of weights as numbers into codebooks.

    books: [codebooks, 2^bits], bytes of int8. choices: [groups], the codebook of each. numbers: [groups, weights], the
    position of each weight in its codebook.
    """

    books: Bytes
    choices: Bytes
    numbers: Bytes


def coded(groups: Bytes, bits: int) -> Coded | None:
    """Code groups [groups, weights], bytes of int8, by codebooks of 2^bits values; None where CODEBOOKS of them are not
    enough. Codebooks of multiples are tried first, as many layers can share them; then those merged from the groups."""
    sets = _sets(groups, 1 << bits)
    if sets is None:
        return None
    distinct, which = np.unique(sets.view("V32").ravel(), return_inverse=True)
    masks = distinct.view(np.uint8).reshape(-1, 32)
    for books in _tried(masks, bits):
        inside = np.stack([~(masks & ~mask).any(axis=1) for mask in _masks(books)])
        if inside.any(axis=0).all():
            choices = inside.argmax(axis=0)[which].astype(np.uint8)
            books = books[: int(choices.max()) + 1]
            return Coded(books, choices, _positions(books)[choices[:, None], groups])
    return None


def multiples(bits: int) -> Bytes:
    """[CODEBOOKS, 2^bits]: the numbers of so many bits, of two's complement, times CODEBOOKS to 1; of one bit 1 and -1.

    >>> multiples(2)[-2:].view(np.int8).tolist()
    [[0, 2, -4, -2], [0, 1, -2, -1]]
    """
    half = 1 << (bits - 1)
    values = np.array([*range(half), *range(-half, 0)] if bits > 1 else [1, -1])
    return (values * np.arange(CODEBOOKS, 0, -1)[:, None]).astype(np.uint8)


def _tried(masks: Bytes, bits: int) -> Iterator[Bytes]:
    """Generate sets of codebooks to try: multiples, then those merged from the groups."""
    yield multiples(bits)
    merged = _merged(masks, 1 << bits)
    if merged is not None:
        yield merged


def entries(books: Bytes, bits: int) -> Bytes:
    """Arrange codebooks as entries of scratchpad book: [CODEBOOK_ENTRIES * codebooks, weights of half a byte]."""
    inside = unpack_numbers(np.arange(CODEBOOK_ENTRIES, dtype=np.uint8)[:, None], bits)[:, : NIBBLE_BITS // bits]
    return books[:, inside].reshape(-1, inside.shape[1])


def _sets(groups: Bytes, most: int) -> Bytes | None:
    """[groups, 32]: the values of each group, a bit each; None where one has more than `most`."""
    sets = []
    for first in range(0, len(groups), CHUNK):
        part = groups[first : first + CHUNK]
        has = np.zeros((len(part), 256), np.bool_)
        has[np.arange(len(part))[:, None], part] = True
        if has.sum(axis=1).max() > most:
            return None
        sets.append(np.packbits(has, axis=1))
    return np.concatenate(sets)


def _masks(books: Bytes) -> Bytes:
    """The sets of codebooks, as `_sets` has them."""
    has = np.zeros((len(books), 256), np.bool_)
    has[np.arange(len(books))[:, None], books] = True
    return np.packbits(has, axis=1)


def _positions(books: Bytes) -> Bytes:
    """The position of each value in each codebook, [codebooks, 256]."""
    positions = np.zeros((len(books), 256), np.uint8)
    positions[np.arange(len(books))[:, None], books] = np.arange(books.shape[1])
    return positions


def _merged(masks: Bytes, most: int) -> Bytes | None:
    """Merge sets greedily into codebooks of at most `most` values; None where CODEBOOKS are not enough.

    Each codebook begins with the largest set that is left, and takes in the sets that share most values with it, as
    long as there is room.
    """
    left, books = masks[np.argsort(-_count(masks), kind="stable")], np.zeros((0, most), np.uint8)
    while len(left):
        if len(books) == CODEBOOKS:
            return None
        book = left[0]
        while len(left):
            left = left[(left & ~book).any(axis=1)]
            fitting = left[_count(left | book) <= most]
            if not len(fitting):
                break
            book = book | fitting[_count(fitting & book).argmax()]
        values = np.flatnonzero(np.unpackbits(book)).astype(np.uint8)
        books = np.vstack([books, np.pad(values, (0, most - len(values)), mode="edge")])
    return books


def _count(masks: Bytes) -> NDArray[np.intp]:
    """Values of sets."""
    return np.bitwise_count(masks).sum(axis=1, dtype=np.intp)  # type: ignore[no-any-return]
