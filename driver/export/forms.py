"""Express a tensor's layout in device memory as one affine map of its elements, for the C runtime.

`AffineForm` has the fields of `celosia_form` in runtime/celosia.h, with which C packs and unpacks tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from celosia.compiler.program import Pack, TensorInfo, Unpack
from celosia.compiler.program.model import MATRICES, FormInfo, matrix_counts, matrix_sizes
from celosia.hw.spec.config import Config

Pair = tuple[int, int]
TOP_BIT = 0x80
"""Mask whose exclusive or converts uint8 to int8 codes and back."""


@dataclass(frozen=True)
class AffineForm:
    """The fields of `celosia_form`, in its order.

    batch, group: of the Config; groups: of channels in device memory. first: the first of them that an output reads.
    images, channels, height, width: of the packed tensor. taps, tap_columns: taps of a window that become channels, and
    how many of them are in a row of the window. step, dilation, before: stride, dilation and padding of windows, (rows,
    columns). bounds: height and width of the tensor on the host, outside of which elements are `pad`. apart: elements
    from one to the next along image, channel, row and column. flip, invert: masks for exclusive or of a byte.
    """

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
        """Return the C initialiser of this form."""
        fields = (getattr(self, name) for name in self.__dataclass_fields__)
        return "{" + ", ".join(_c_initialiser(field) for field in fields) + "}"


def _c_initialiser(value: int | tuple[int, ...]) -> str:
    """Return the C initialiser of an integer, or of an array of integers."""
    return str(value) if isinstance(value, int) else "{" + ", ".join(map(str, value)) + "}"


def form_of(cfg: Config, move: Pack | Unpack, info: TensorInfo) -> AffineForm:
    """Return the form of a tensor that a launch takes from the host (Pack), or returns (Unpack). info: the host's
    tensor."""
    form, is_unpack = move.form, isinstance(move, Unpack)
    first = move.offset if isinstance(move, Unpack) else 0
    images, channels, height, width = form.dims
    flip = TOP_BIT if info.dtype == "uint8" else 0
    pad, invert = form.pad & 0xFF, 0xFF if form.inverted and not is_unpack else 0
    if form.fold in MATRICES:
        map_fields = _matrix_fields(form, info.shape)
    elif form.fold and not is_unpack:
        map_fields = _window_fields(form, info.shape)
    else:
        map_fields = _fields_without_fold(form)
    return AffineForm(
        cfg.batch, cfg.group, move.groups, first, images, channels, height, width, *map_fields, flip, pad, invert
    )


_MapFields = tuple[int, int, Pair, Pair, Pair, Pair, tuple[int, int, int, int]]
"""Fields of AffineForm from `taps` to `apart`."""


def _fields_without_fold(form: FormInfo) -> _MapFields:
    """Return the map of a tensor without a fold: its channels are the host's channels."""
    _, channels, height, width = form.dims
    pixels = height * width
    return 1, 1, (1, 1), (1, 1), (0, 0), (height, width), (channels * pixels, pixels, width, 1)


def _window_fields(form: FormInfo, shape: tuple[int, ...]) -> _MapFields:
    """Return the map of im2col: channels are taps of a window around each pixel. A 3D tensor is an image of one row."""
    _, channels, height, width = shape if len(shape) == 4 else (*shape[:2], 1, shape[2])
    is_2d = form.fold == "xy"
    kernel = form.kernel[0] if is_2d else 1, form.kernel[1]
    step = form.strides[0] if is_2d else 1, form.strides[1]
    before = form.pads[0] if is_2d else 0, form.pads[1]
    apart = channels * height * width, height * width, width, 1
    return kernel[0] * kernel[1], kernel[1], step, form.dilations, before, (height, width), apart


def _matrix_fields(form: FormInfo, shape: tuple[int, ...]) -> _MapFields:
    """Return the map of stacked matrices: their columns are channels, their rows are pixels of one image row.

    Each matrix is a tap, so that all matrices of the stack lie in channels.
    """
    count, columns, rows = matrix_counts(form.fold, shape)
    sizes = matrix_sizes(shape)
    strides = np.cumprod((1, *sizes[:0:-1]))[::-1]  # in elements, along each axis of the tensor
    order = MATRICES[form.fold]
    matrix, column, row = (int(strides[order.index(axis)]) for axis in range(3))
    return form.dims[1] // count, 1, (1, 1), (1, 1), (0, 0), (columns, rows), (0, matrix, column, row)
