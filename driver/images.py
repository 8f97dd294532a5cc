"""Images as inputs of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program import InputError

SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp"))


@dataclass(frozen=True)
class Pixels:
    """How an image becomes an input: (pixel / 255 - mean) / std, one number for all channels or one for each."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)


IN_UNITS = Pixels()
"""Pixels in 0..1."""


def is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def read_image(path: Path, name: str, dtype: str, shape: Sequence[int | None], pixels: Pixels) -> NDArray[np.float32]:
    """float32 [1, channels, height, width] of an image of any size, for the input `name`: `dtype` and `shape`, where
    None or -1 is a size left open. InputError where it is no image, or the input takes none.
    """
    try:
        from PIL import Image
    except ImportError:
        raise InputError(
            f"to read {path.name}, pillow is needed: pip install 'celosia[quantize]', or give .npy files"
        ) from None
    takes = len(shape) == 4 and dtype == "float32" and shape[1] in (1, 3)
    if not takes or any(size in (None, -1) for size in shape[2:]):
        sizes = ", ".join("?" if size in (None, -1) else str(size) for size in shape)
        raise InputError(
            f"{path.name} is an image, and the input {name!r} is {dtype}[{sizes}], not float32[1, 1 or 3, height, "
            "width]; give .npy files"
        )
    channels, height, width = (int(size or 0) for size in shape[1:])
    for which, values in (("mean", pixels.mean), ("std", pixels.std)):
        if len(values) not in (1, channels):
            raise InputError(f"{len(values)} numbers as {which} for an image of {channels} channels")
    try:
        with Image.open(path) as image:
            small = image.convert("RGB" if channels == 3 else "L").resize((width, height))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"cannot read the image {path}: {error}") from None
    array: NDArray[Any] = np.asarray(small, np.float32).reshape(height, width, channels) / np.float32(255)
    scaled = (array - np.array(pixels.mean, np.float32)) / np.array(pixels.std, np.float32)
    return np.asarray(scaled.transpose(2, 0, 1)[None], np.float32)
