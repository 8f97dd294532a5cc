"""Read images as inputs of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program import InputError

SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp"))
"""Suffixes of image files."""


@dataclass(frozen=True)
class Pixels:
    """How an image becomes an input: (pixel / 255 - mean) / std.

    mean, std: one number for all channels, or one for each. report_change: called with a sentence for each image that
    is resized or converted. folder: sentences name an image by its path from here; None for its file name only.
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    report_change: Callable[[str], None] = lambda sentence: None
    folder: Path | None = None

    def name_of(self, path: Path) -> str:
        """Return the name of an image in sentences: its path from `folder`, which may have a folder for each class."""
        return path.name if self.folder is None else str(path.relative_to(self.folder))


IN_UNITS = Pixels()
"""Default conversion: pixels become 0..1."""


def is_image(path: Path) -> bool:
    """Whether a file is an image, by its suffix."""
    return path.suffix.lower() in SUFFIXES


def read_image(path: Path, name: str, dtype: str, shape: Sequence[int | None], pixels: Pixels) -> NDArray[np.float32]:
    """Read an image of any size as float32 [1, channels, height, width], resized for the input `name`.

    dtype, shape: of the input; None or -1 is an open size. InputError where the file is no image, or the input is not
    float32 [N, 1 or 3, height, width].
    """
    try:
        from PIL import Image
    except ImportError:
        raise InputError(
            f"to read {path.name}, pillow is needed: pip install 'celosia[quantize]', or give .npy files"
        ) from None
    is_image_input = len(shape) == 4 and dtype == "float32" and shape[1] in (1, 3)
    if not is_image_input or any(size in (None, -1) for size in shape[2:]):
        sizes = ", ".join("?" if size in (None, -1) else str(size) for size in shape)
        raise InputError(
            f"{path.name} is an image, and the input {name!r} is {dtype}[{sizes}], not float32[1, 1 or 3, height, "
            "width]; give .npy files"
        )
    channels, height, width = (int(size or 0) for size in shape[1:])
    for option, values in (("mean", pixels.mean), ("std", pixels.std)):
        if len(values) not in (1, channels):
            raise InputError(f"{len(values)} numbers as {option} for an image of {channels} channels")
    try:
        with Image.open(path) as image:
            if changes := _describe_changes(pixels.name_of(path), image.mode, image.size, channels, (width, height)):
                pixels.report_change(changes)
            small = image.convert("RGB" if channels == 3 else "L").resize((width, height))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"cannot read the image {path}: {error}") from None
    array: NDArray[Any] = np.asarray(small, np.float32).reshape(height, width, channels) / np.float32(255)
    scaled = (array - np.array(pixels.mean, np.float32)) / np.array(pixels.std, np.float32)
    return np.asarray(scaled.transpose(2, 0, 1)[None], np.float32)


GREY_MODES = ("1", "L", "LA", "I", "I;16", "F")
"""Pillow's image modes without colours."""


def _describe_changes(name: str, mode: str, size: tuple[int, int], channels: int, wanted_size: tuple[int, int]) -> str:
    """Describe how an image is changed to fit the input; "" for one that fits.

    >>> _describe_changes("cat.jpg", "RGB", (640, 480), 1, (28, 28))
    'cat.jpg is resized to 28x28 from 640x480, which changes its proportions, and converted to grey'
    >>> _describe_changes("cat.jpg", "RGB", (32, 32), 3, (32, 32))
    ''
    """
    changes = []
    if size != wanted_size:
        text = f"resized to {wanted_size[0]}x{wanted_size[1]} from {size[0]}x{size[1]}"
        changes.append(
            f"{text}, which changes its proportions," if size[0] * wanted_size[1] != size[1] * wanted_size[0] else text
        )
    if channels == 1 and mode not in GREY_MODES:
        changes.append("converted to grey")
    if channels == 3 and mode in GREY_MODES:
        changes.append("grey, given as three equal channels")
    if not changes:
        return ""
    return f"{name} is {' and '.join(changes)}".removesuffix(",")
