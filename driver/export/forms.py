"""Layout of a tensor in the accelerator's memory, as one affine map of its elements: `celosia_form` of
runtime/celosia.h."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from celosia.compiler.program import Pack, TensorInfo, Unpack
from celosia.compiler.program.model import MATRICES, FormInfo, matrix_counts, matrix_sizes
from celosia.hw.spec.config import Config

Pair = tuple[int, int]
TOP_BIT = 0x80
"""Mask that converts uint8 to int8 and back."""


@dataclass(frozen=True)
class AffineForm:
    """The fields of `celosia_form`, in order."""

    batch: int
    group: int
    groups: int
    first: int
    images: int
    channels: int
    height: int
    width: int
    taps: int
    tap_columns: int
    step: Pair
    dilation: Pair
    before: Pair
    bounds: Pair
    apart: tuple[int, int, int, int]
    flip: int
    pad: int
    invert: int

    def c(self) -> str:
        """C initialiser."""
        fields = (getattr(self, name) for name in self.__dataclass_fields__)
        return "{" + ", ".join(_c_initialiser(field) for field in fields) + "}"


def _c_initialiser(value: int | tuple[int, ...]) -> str:
    return str(value) if isinstance(value, int) else "{" + ", ".join(map(str, value)) + "}"


def form_of(cfg: Config, move: Pack | Unpack, info: TensorInfo) -> AffineForm:
    """Return the form of a tensor that a launch takes from the host, or gives back; `info` is its tensor."""
    form, unpacked = move.form, isinstance(move, Unpack)
    first = move.offset if isinstance(move, Unpack) else 0
    images, channels, height, width = form.dims
    flip = TOP_BIT if info.dtype == "uint8" else 0
    pad, invert = form.pad & 0xFF, 0xFF if form.inverted and not unpacked else 0
    if form.fold in MATRICES:
        moved = _matrix_form(form, info.shape)
    elif form.fold and not unpacked:
        moved = _window_form(form, info.shape)
    else:
        moved = _plain_form(form)
    return AffineForm(
        cfg.batch, cfg.group, move.groups, first, images, channels, height, width, *moved, flip, pad, invert
    )


_Moved = tuple[int, int, Pair, Pair, Pair, Pair, tuple[int, int, int, int]]


def _plain_form(form: FormInfo) -> _Moved:
    _, channels, height, width = form.dims
    pixels = height * width
    return 1, 1, (1, 1), (1, 1), (0, 0), (height, width), (channels * pixels, pixels, width, 1)


def _window_form(form: FormInfo, shape: tuple[int, ...]) -> _Moved:
    """Form of taps: channels are taps of a window of each pixel; a sequence is an image of one row."""
    _, channels, height, width = shape if len(shape) == 4 else (*shape[:2], 1, shape[2])
    both = form.fold == "xy"
    kernel = form.kernel[0] if both else 1, form.kernel[1]
    step = form.strides[0] if both else 1, form.strides[1]
    before = form.pads[0] if both else 0, form.pads[1]
    apart = channels * height * width, height * width, width, 1
    return kernel[0] * kernel[1], kernel[1], step, form.dilations, before, (height, width), apart


def _matrix_form(form: FormInfo, shape: tuple[int, ...]) -> _Moved:
    """Channels are columns of matrices, whose rows are pixels of one row: a matrix is an axis whose taps these are."""
    count, columns, rows = matrix_counts(form.fold, shape)
    sizes = matrix_sizes(shape)
    inside = np.cumprod((1, *sizes[:0:-1]))[::-1]  # elements from one to the next along each axis of the tensor
    order = MATRICES[form.fold]
    matrix, column, row = (int(inside[order.index(axis)]) for axis in range(3))
    return form.dims[1] // count, 1, (1, 1), (1, 1), (0, 0), (columns, rows), (0, matrix, column, row)
