"""Scales of ONNX that have given multipliers.

onnxruntime computes f32(f32(sx * sw) / sy) for each channel. A rule says which multipliers a product has; here are the
scales of weights, and the one scale of its result, of which these are made, bit by bit. What a scale of a result means
to those who read it is theirs, so that any will do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.numerics import conv_scale
from celosia.compiler.ops import op_spec
from celosia.compiler.superoptimise.graph import Written

Floats = NDArray[np.float32]
NEIGHBOURS = 6
"""Floats to each side of the quotient that are tried."""


def weights_of(m: Floats, sx: float, sy: float) -> Floats | None:
    """[channels] scales of weights with conv_scale(sx, scales, sy) == m; None where there are none.

    >>> weights_of(np.array([0.5, 0.1], np.float32), 0.25, 0.125).tolist()
    [0.25, 0.05000000074505806]
    """
    with np.errstate(all="ignore"):
        guess = (m.astype(np.float64) * np.float32(sy) / np.float32(sx)).astype(np.float32)
        if not np.all(np.isfinite(guess)) or np.any(guess < np.finfo(np.float32).tiny):
            return None
        steps = np.arange(-NEIGHBOURS, NEIGHBOURS + 1)
        near = (guess.view(np.int32)[:, None] + steps[np.argsort(np.abs(steps), kind="stable")]).astype(np.int32)
        tried = near.view(np.float32)
        right = conv_scale(sx, tried, sy) == m[:, None]
    if not np.all(right.any(1)):
        return None
    return np.asarray(tried[np.arange(len(m)), right.argmax(1)])


def realised(m: Floats, notes: Sequence[Written]) -> Written | None:
    """Find scales for a product with the multipliers `m`, written like those of `notes`; None where there are none.

    Scales that one of them has are kept. Where none has them all, those of x and y become powers of two: what they are
    multiplied with is exact then, so that every multiplier has a scale of weights.
    """
    kinds = {(op_spec(note.operator).windows, note.qdq) for note in notes}
    if len(kinds) != 1:
        return None
    biased = any(note.biased for note in notes)
    operator = next((note.operator for note in notes if note.biased), notes[0].operator)
    rounded = [replace(note, x=_power(note.x), y=_power(note.y)) for note in notes[:1]]
    for like in (*notes, *rounded):
        own = _kept(m, [note for note in notes if (note.x, note.y) == (like.x, like.y)])
        known = np.isfinite(own)
        others = weights_of(m[~known], like.x, like.y)
        if others is None:
            continue
        own[~known] = others
        return replace(like, operator=operator, biased=biased, w=tuple(float(each) for each in own))
    return None


def _power(scale: float) -> float:
    """The power of two next to `scale`."""
    return float(2.0 ** round(math.log2(scale)))


def _kept(m: Floats, notes: Sequence[Written]) -> Floats:
    """[channels] the scales of `notes` that have these multipliers; NaN where none has."""
    found = np.full(m.shape, np.nan, np.float32)
    for note in notes:
        scales = np.array(note.w, np.float32)
        products = conv_scale(note.x, scales, note.y)
        places = {float(product): scale for product, scale in zip(products, scales)}
        for place, each in enumerate(m):
            if np.isnan(found[place]) and float(each) in places:
                found[place] = places[float(each)]
    return found
