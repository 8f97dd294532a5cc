"""Samples of a model's inputs, read from a folder of arrays or images, an .npz archive, or arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program import InputError
from celosia.driver.data.arrays import read_archive, read_array
from celosia.driver.data.images import IN_UNITS, SUFFIXES, Pixels, read_image

Array = NDArray[Any]
Sample = dict[str, Array]
"""The arrays of one run of the model, by input name."""
LABELS = "labels"
"""Name of the array with labels in an .npz file of samples, if no input has that name."""


class CalibrationError(InputError):
    """Samples do not fit the model. The message names the file or array, and what is expected."""


@dataclass(frozen=True)
class Input:
    """An input of the model. None in `shape` is an open size, which the samples determine."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('?' if n is None else str(n) for n in self.shape)}]"


Reader = Callable[[Sequence[Input]], Sample]
"""Reads one sample of the inputs; CalibrationError where it does not fit them."""
Completion = Callable[[str, Mapping[str, Array], Sequence[Input]], dict[str, Array]]
"""Adds arrays of inputs that samples may leave out. Arguments: the source's name for errors, arrays of samples by
input name, the model's inputs. Returns all arrays."""


@dataclass(frozen=True)
class Samples:
    """Sequence of samples, each read from its file when it is needed.

    inputs: the model's inputs, with the sizes of the samples. readers: one for each sample.
    """

    inputs: tuple[Input, ...]
    readers: tuple[Reader, ...]

    def __len__(self) -> int:
        return len(self.readers)

    def __iter__(self) -> Iterator[Sample]:
        """Yield the samples, every array of the exact type and shape. CalibrationError."""
        return (reader(self.inputs) for reader in self.readers)

    def read_or_errors(self) -> Iterator[Sample | InputError]:
        """Yield the samples, with an error in the place of each one that cannot be read."""
        for reader in self.readers:
            try:
                sample: Sample | InputError = reader(self.inputs)
            except InputError as error:
                sample = error
            yield sample

    def pick(self, numbers: Iterable[int]) -> Samples:
        """Pick the samples with these numbers, in their order."""
        return Samples(self.inputs, tuple(self.readers[k] for k in numbers))


def open_samples(
    source: str | Path | Mapping[str, Array], inputs: Sequence[Input], limit: int | None = None,
    pixels: Pixels = IN_UNITS, completed: Completion | None = None,
) -> Samples:  # fmt: skip
    """Open the samples in `source`: at most `limit`, spread evenly over all.

    completed: adds the arrays of inputs that samples may leave out; None where they leave out none.

    A folder holds one sample in each .npy file (for models of one input), .npz file (arrays by input name) or image
    (float32 [1, 1 or 3, height, width] inputs; resized), or has a folder of such files for each class. An .npz file,
    or a mapping, holds arrays by input name whose first axis counts samples. A sample may leave out the batch axis of
    an input whose batch is 1. Raises CalibrationError.
    """
    add_missing = completed or (lambda source, arrays, inputs: dict(arrays))
    if isinstance(source, Mapping):
        name_in_errors = "the calibration arrays"
        readers = make_array_readers(name_in_errors, add_missing(name_in_errors, source, inputs), inputs)
    elif Path(source).is_dir():
        readers = make_file_readers(list_labelled_files(Path(source))[0], replace(pixels, folder=Path(source)))
    elif not Path(source).exists():
        raise CalibrationError(f"there is no calibration folder or file {source}")
    else:
        arrays = _read_archive(Path(source))
        if LABELS not in {tensor.name for tensor in inputs}:
            arrays.pop(LABELS, None)  # labels of a test set
        readers = make_array_readers(str(source), add_missing(str(source), arrays, inputs), inputs)
    return pick_samples(readers, inputs, limit)


def pick_samples(readers: list[Reader], inputs: Sequence[Input], limit: int | None) -> Samples:
    """Pick at most `limit` samples, spread evenly; the first decides the sizes that the model leaves open."""
    if limit is not None and limit < len(readers):
        readers = [readers[int(k)] for k in np.linspace(0, len(readers) - 1, limit).round()]
    first = readers[0](inputs)
    fixed = tuple(Input(tensor.name, tensor.dtype, first[tensor.name].shape) for tensor in inputs)
    return Samples(fixed, tuple(readers))


def make_array_readers(source: str, arrays: Mapping[str, Array], inputs: Sequence[Input]) -> list[Reader]:
    """Return a reader for each sample along the first axis of `arrays` (by input name).

    source: name of the arrays in errors. CalibrationError.
    """
    _check_names(source, arrays, inputs)
    counts = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(counts.values())) > 1:
        raise CalibrationError(f"{source}: the first axis counts samples, and its sizes differ: {counts}")
    count = next(iter(counts.values()))
    if not count:
        raise CalibrationError(f"{source} holds no samples; the first axis of each array counts them")

    def read_row(k: int, inputs: Sequence[Input]) -> Sample:
        """Return sample `k`."""
        return {
            tensor.name: _fit_to_tensor(arrays[tensor.name][k], tensor, f"{source}: {tensor.name}[{k}]")
            for tensor in inputs
        }

    return [partial(read_row, k) for k in range(count)]


def list_labelled_files(folder: Path) -> tuple[list[Path], Array | None]:
    """List the sample files of a folder, and their classes where it has a folder for each class.

    Classes count from 0 in the order of the folders' names, or are the names where all of them are numbers.
    CalibrationError where there are no files.
    """
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    if not classes:
        return list_sample_files(folder), None
    if all(path.name.isdecimal() for path in classes):
        classes.sort(key=lambda path: int(path.name))
        numbers = [int(path.name) for path in classes]
    else:
        numbers = list(range(len(classes)))
    files = [list_sample_files(path) for path in classes]
    return list(chain.from_iterable(files)), np.repeat(numbers, [len(group) for group in files])


def list_sample_files(folder: Path) -> list[Path]:
    """List the sample files of a folder, in the order of their names. CalibrationError where there are none."""
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in {".npy", ".npz", *SUFFIXES})
    if not files:
        raise CalibrationError(f"the folder {folder} holds no samples; put .npy, .npz or image files there")
    return files


def make_file_readers(files: Sequence[Path], pixels: Pixels) -> list[Reader]:
    """Return a reader for each file, which holds one sample. pixels: conversion of images."""
    return [partial(_read_file_sample, path, pixels) for path in files]


def _read_file_sample(path: Path, pixels: Pixels, inputs: Sequence[Input]) -> Sample:
    """Read the sample in one file: an .npz of arrays by input name, or the only input as .npy or image.

    CalibrationError where it does not fit `inputs`.
    """
    if path.suffix.lower() == ".npz":
        arrays = _read_archive(path)
        _check_names(str(path), arrays, inputs)
    elif len(inputs) != 1:
        names = ", ".join(repr(tensor.name) for tensor in inputs)
        raise CalibrationError(f"{path} holds one array, the model has the inputs {names}; give .npz files")
    elif path.suffix.lower() == ".npy":
        arrays = {inputs[0].name: read_array(path)}
    else:
        arrays = {inputs[0].name: _read_image_sample(path, inputs[0], pixels)}
    return {tensor.name: _fit_to_tensor(arrays[tensor.name], tensor, f"{path}: {tensor.name!r}") for tensor in inputs}


def _read_archive(path: Path) -> dict[str, Array]:
    """Read an .npz file by input name. CalibrationError, with a hint for a .npy file."""
    if path.suffix.lower() == ".npy":
        raise CalibrationError(f"{path} is a single array; give an .npz of arrays by input name, or a folder")
    return read_archive(path, CalibrationError)


def _check_names(source: str, arrays: Mapping[str, Array], inputs: Sequence[Input]) -> None:
    """Raise CalibrationError unless `arrays` holds one array for each input, and no others."""
    held = ", ".join(map(repr, arrays)) or "nothing"
    for tensor in inputs:
        if tensor.name not in arrays:
            raise CalibrationError(f"{source} has no array {tensor.name!r} ({tensor}); it holds {held}")
    for name in arrays:
        if name not in {tensor.name for tensor in inputs}:
            raise CalibrationError(f"{source} has an array {name!r}, but the model has no such input")


def _fit_to_tensor(array: Array, tensor: Input, source: str) -> Array:
    """Return `array` with the batch axis that it may lack. CalibrationError where it does not fit, or is not finite."""
    if array.dtype != tensor.dtype:
        raise CalibrationError(f"{source} is {array.dtype}, the model takes {tensor.dtype}; convert it with astype")
    shape = tensor.shape
    if array.ndim == len(shape) - 1 and shape[0] in (1, None):
        array = array[None]
    if array.ndim != len(shape) or any(w not in (None, n) for n, w in zip(array.shape, shape)):
        raise CalibrationError(f"{source} is {array.dtype}{list(array.shape)}, the model takes {tensor}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise CalibrationError(f"{source} holds NaN or infinite values, of which no range can be taken")
    return np.ascontiguousarray(array)


def _read_image_sample(path: Path, tensor: Input, pixels: Pixels) -> Array:
    """Read an image for `tensor`. CalibrationError in place of `read_image`'s InputError."""
    try:
        return read_image(path, tensor.name, tensor.dtype.name, tensor.shape, pixels)
    except InputError as error:
        raise CalibrationError(str(error)) from None
