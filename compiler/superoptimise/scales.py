"""Find scales of ONNX whose multipliers are given ones, bit by bit.

onnxruntime computes the multiplier of each channel as f32(f32(sx * sw) / sy). A rule says which multipliers a product
has; here the scales of its weights are found, and the scale of its result. Readers of the result use scales of their
own, so that any scale of the result will do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.numerics import conv_scale
from celosia.compiler.ops import op_spec
from celosia.compiler.superoptimise.graph import OriginalForm

Floats = NDArray[np.float32]
NEIGHBOURS = 6
"""Number of floats on each side of the quotient that are tried as scales."""


def weights_of(m: Floats, sx: float, sy: float) -> Floats | None:
    """Find [channels] scales of weights with conv_scale(sx, scales, sy) == m; None where a channel has none.

    >>> weights_of(np.array([0.5, 0.1], np.float32), 0.25, 0.125).tolist()
    [0.25, 0.05000000074505806]
    """
    with np.errstate(all="ignore"):
        guess = (m.astype(np.float64) * np.float32(sy) / np.float32(sx)).astype(np.float32)
        if not np.all(np.isfinite(guess)) or np.any(guess < np.finfo(np.float32).tiny):
            return None
        steps = np.arange(-NEIGHBOURS, NEIGHBOURS + 1)
        neighbours = (guess.view(np.int32)[:, None] + steps[np.argsort(np.abs(steps), kind="stable")]).astype(np.int32)
        candidates = neighbours.view(np.float32)
        is_exact = conv_scale(sx, candidates, sy) == m[:, None]
    if not np.all(is_exact.any(1)):
        return None
    return np.asarray(candidates[np.arange(len(m)), is_exact.argmax(1)])


def realised(m: Floats, notes: Sequence[OriginalForm]) -> OriginalForm | None:
    """Find scales for a product with the multipliers `m`, written like those of `notes`; None where there are none.

    Scales of a note that give the multipliers are kept. Where no note has scales of x and y for all channels, these
    become powers of two: multiplying by them is exact, so that every multiplier has a scale of weights.
    """
    kinds = {(op_spec(note.operator).windows, note.qdq) for note in notes}
    if len(kinds) != 1:
        return None
    biased = any(note.biased for note in notes)
    operator = next((note.operator for note in notes if note.biased), notes[0].operator)
    rounded = [replace(note, x=_nearest_power_of_two(note.x), y=_nearest_power_of_two(note.y)) for note in notes[:1]]
    for form in (*notes, *rounded):
        scales = _scales_with_multipliers(m, [note for note in notes if (note.x, note.y) == (form.x, form.y)])
        is_known = np.isfinite(scales)
        others = weights_of(m[~is_known], form.x, form.y)
        if others is None:
            continue
        scales[~is_known] = others
        return replace(form, operator=operator, biased=biased, w=tuple(float(scale) for scale in scales))
    return None


def _nearest_power_of_two(scale: float) -> float:
    """Return the power of two whose logarithm is nearest to that of `scale`."""
    return float(2.0 ** round(math.log2(scale)))


def _scales_with_multipliers(m: Floats, notes: Sequence[OriginalForm]) -> Floats:
    """Return [channels] the scales of weights in `notes` that have the multipliers `m`; NaN where none has."""
    result = np.full(m.shape, np.nan, np.float32)
    for note in notes:
        scales = np.array(note.w, np.float32)
        multipliers = conv_scale(note.x, scales, note.y)
        scale_of = {float(multiplier): scale for multiplier, scale in zip(multipliers, scales)}
        for channel, multiplier in enumerate(m):
            if np.isnan(result[channel]) and float(multiplier) in scale_of:
                result[channel] = scale_of[float(multiplier)]
    return result
