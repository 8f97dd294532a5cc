"""Samples of a model's inputs: a folder of arrays or images, an .npz archive, or arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.files import reading
from celosia.compiler.program import InputError
from celosia.driver.arrays import read_array

Array = NDArray[Any]
Sample = dict[str, Array]
IMAGES = frozenset((".png", ".jpg", ".jpeg", ".bmp"))


class CalibrationError(InputError):
    """Samples that the model does not take; one sentence that names the file or array, and what is expected."""


@dataclass(frozen=True)
class Input:
    """An input of the model: None in `shape` is a size that the samples decide."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('?' if n is None else str(n) for n in self.shape)}]"


@dataclass(frozen=True)
class Pixels:
    """How an image becomes an input: (pixel / 255 - mean) / std, one number for all channels or one for each."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)


Reader = Callable[[Sequence[Input]], Sample]
"""Reads one sample of the inputs; CalibrationError where it does not fit them."""


@dataclass(frozen=True)
class Samples:
    """Samples, each read when it is its turn. `inputs` are the model's, of the sizes that the samples have."""

    inputs: tuple[Input, ...]
    readers: tuple[Reader, ...]

    def __len__(self) -> int:
        return len(self.readers)

    def __iter__(self) -> Iterator[Sample]:
        """Every array of the exact type and shape. CalibrationError."""
        return (reader(self.inputs) for reader in self.readers)

    def pick(self, numbers: Iterable[int]) -> Samples:
        return Samples(self.inputs, tuple(self.readers[k] for k in numbers))


def open_samples(
    source: str | Path | Mapping[str, Array], inputs: Sequence[Input], limit: int | None = None,
    pixels: Pixels = Pixels(),
) -> Samples:  # fmt: skip
    """The samples in `source`: at most `limit`, spread evenly over all.

    A folder holds one sample in each .npy file (for models of one input), .npz file (arrays by input name) or image
    (float32 [1, 1 or 3, height, width] inputs; resized). An .npz file, or a mapping, holds arrays by input name whose
    first axis counts samples. A sample may leave out the batch axis of an input whose batch is 1. Raises
    CalibrationError.
    """
    if isinstance(source, Mapping):
        readers = _rows("the calibration arrays", source, inputs)
    elif Path(source).is_dir():
        readers = _folder(Path(source), pixels)
    elif not Path(source).exists():
        raise CalibrationError(f"there is no calibration folder or file {source}")
    else:
        readers = _rows(str(source), _archive(Path(source)), inputs)
    if limit is not None and limit < len(readers):
        readers = [readers[int(k)] for k in np.linspace(0, len(readers) - 1, limit).round()]
    first = readers[0](inputs)  # which decides the sizes that the model leaves open
    fixed = tuple(Input(each.name, each.dtype, first[each.name].shape) for each in inputs)
    return Samples(fixed, tuple(readers))


def _rows(where: str, arrays: Mapping[str, Array], inputs: Sequence[Input]) -> list[Reader]:
    _check_names(where, arrays, inputs)
    counts = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(counts.values())) > 1:
        raise CalibrationError(f"{where}: the first axis counts samples, and its sizes differ: {counts}")
    count = next(iter(counts.values()))
    if not count:
        raise CalibrationError(f"{where} holds no samples; the first axis of each array counts them")

    def row(k: int, inputs: Sequence[Input]) -> Sample:
        return {each.name: _fitted(arrays[each.name][k], each, f"{where}: {each.name}[{k}]") for each in inputs}

    return [partial(row, k) for k in range(count)]


def _folder(folder: Path, pixels: Pixels) -> list[Reader]:
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in {".npy", ".npz", *IMAGES})
    if not files:
        raise CalibrationError(f"the folder {folder} holds no samples; put .npy, .npz or image files there")
    return [partial(_file, path, pixels) for path in files]


def _file(path: Path, pixels: Pixels, inputs: Sequence[Input]) -> Sample:
    """The sample in one file."""
    if path.suffix.lower() == ".npz":
        arrays = _archive(path)
        _check_names(str(path), arrays, inputs)
    elif len(inputs) != 1:
        names = ", ".join(repr(each.name) for each in inputs)
        raise CalibrationError(f"{path} holds one array, the model has the inputs {names}; give .npz files")
    elif path.suffix.lower() == ".npy":
        arrays = {inputs[0].name: read_array(path)}
    else:
        arrays = {inputs[0].name: _image(path, inputs[0], pixels)}
    return {each.name: _fitted(arrays[each.name], each, f"{path}: {each.name!r}") for each in inputs}


def _archive(path: Path) -> dict[str, Array]:
    if path.suffix.lower() == ".npy":
        raise CalibrationError(f"{path} is a single array; give an .npz of arrays by input name, or a folder")
    with (
        reading(path, CalibrationError, "is not an .npz file of numbers", "; write one with numpy.savez"),
        np.load(path, allow_pickle=False) as archive,
    ):
        return {name: archive[name] for name in archive.files}


def _check_names(where: str, arrays: Mapping[str, Array], inputs: Sequence[Input]) -> None:
    held = ", ".join(map(repr, arrays)) or "nothing"
    for each in inputs:
        if each.name not in arrays:
            raise CalibrationError(f"{where} has no array {each.name!r} ({each}); it holds {held}")
    for name in arrays:
        if name not in {each.name for each in inputs}:
            raise CalibrationError(f"{where} has an array {name!r}, but the model has no such input")


def _fitted(array: Array, wanted: Input, where: str) -> Array:
    """`array` with the batch axis that it may lack. CalibrationError where it does not fit, or is not finite."""
    if array.dtype != wanted.dtype:
        raise CalibrationError(f"{where} is {array.dtype}, the model takes {wanted.dtype}; convert it with astype")
    shape = wanted.shape
    if array.ndim == len(shape) - 1 and shape[0] in (1, None):
        array = array[None]
    if array.ndim != len(shape) or any(w not in (None, n) for n, w in zip(array.shape, shape)):
        raise CalibrationError(f"{where} is {array.dtype}{list(array.shape)}, the model takes {wanted}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise CalibrationError(f"{where} holds NaN or infinite values, of which no range can be taken")
    return np.ascontiguousarray(array)


def _image(path: Path, wanted: Input, pixels: Pixels) -> Array:
    """float32 [1, channels, height, width] of an image of any size."""
    try:
        from PIL import Image
    except ImportError:
        raise CalibrationError(
            f"to read {path.name}, pillow is needed: pip install 'celosia[quantize]', or give .npy files"
        ) from None
    shape = wanted.shape
    if len(shape) != 4 or wanted.dtype != np.float32 or shape[1] not in (1, 3) or None in shape[2:]:
        raise CalibrationError(
            f"{path.name} is an image, and the input {wanted.name!r} is {wanted}, not float32[1, 1 or 3, height, "
            "width]; give .npy files"
        )
    for name, values in (("mean", pixels.mean), ("std", pixels.std)):
        if len(values) not in (1, shape[1]):
            raise CalibrationError(f"{len(values)} numbers as {name} for an image of {shape[1]} channels")
    channels, height, width = (int(n or 0) for n in shape[1:])
    try:
        with Image.open(path) as image:
            small = image.convert("RGB" if channels == 3 else "L").resize((width, height))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise CalibrationError(f"cannot read the image {path}: {error}") from None
    array = np.asarray(small, np.float32).reshape(height, width, channels) / np.float32(255)
    scaled = (array - np.array(pixels.mean, np.float32)) / np.array(pixels.std, np.float32)
    return np.asarray(scaled.transpose(2, 0, 1)[None], np.float32)
