"""Samples with labels, to measure accuracy, from a folder, an .npz file, or arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program import InputError
from celosia.compiler.program.safe_files import reading
from celosia.driver.data.arrays import read_archive, read_array
from celosia.driver.data.calibration import (
    LABELS,
    CalibrationError,
    Input,
    Samples,
    list_labelled_files,
    make_array_readers,
    make_file_readers,
    pick_samples,
)
from celosia.driver.data.images import IN_UNITS, Pixels

Array = NDArray[Any]


@dataclass(frozen=True)
class Dataset:
    """Samples, and labels: the class number of each sample, or None where there are none."""

    samples: Samples
    labels: NDArray[np.int64] | None


def open_dataset(
    source: str | Path | Mapping[str, Array], inputs: Sequence[Input], labels: str | Path | Array | None = None,
    limit: int | None = None, pixels: Pixels = IN_UNITS,
) -> Dataset:  # fmt: skip
    """Open the samples in `source`, at most `limit`, spread evenly over all, and their labels.

    source: as `calibration.open_samples` takes it; an .npz file or mapping may hold an array "labels", too, and a
    folder has labels where it has a folder for each class (`list_labelled_files`). labels: one number for each sample,
    as an array, a .npy or .npz file, or a text with a line for each: LABEL in the order of the samples, or FILE LABEL.
    Raises CalibrationError, InputError.
    """
    if not isinstance(source, Mapping) and not Path(source).exists():
        raise InputError(f"there is no folder or file {source} with samples")
    file_names: list[str] = []
    labels_given: Array | None = None
    if not isinstance(source, Mapping) and Path(source).is_dir():
        files, labels_given = list_labelled_files(Path(source))
        file_names, readers = (
            [file.name for file in files],
            make_file_readers(files, replace(pixels, folder=Path(source))),
        )
        count, samples = len(files), pick_samples(readers, inputs, limit)
    else:
        arrays = dict(source if isinstance(source, Mapping) else read_archive(Path(source), CalibrationError))
        if LABELS in arrays and LABELS not in {tensor.name for tensor in inputs}:
            labels_given = arrays.pop(LABELS)
        readers = make_array_readers("the arrays" if isinstance(source, Mapping) else str(source), arrays, inputs)
        count, samples = len(readers), pick_samples(readers, inputs, limit)
    if labels is not None:
        labels_given = labels if isinstance(labels, np.ndarray) else _read_labels(Path(labels), file_names)
    if labels_given is None:
        return Dataset(samples, None)
    numbers = np.asarray(labels_given)
    if numbers.size != count or numbers.dtype.kind not in "iu":
        raise InputError(f"labels are {numbers.dtype}{list(numbers.shape)}; {count} samples need as many whole numbers")
    chosen = np.linspace(0, count - 1, len(samples)).round().astype(int)
    return Dataset(samples, numbers.reshape(-1)[chosen].astype(np.int64))


def _read_labels(path: Path, names: Sequence[str]) -> Array:
    """Read the labels in a file: .npy, .npz, or text (see `open_dataset`). InputError.

    names: of the samples' files in order, to which text lines FILE LABEL refer; empty where samples have no files.
    """
    if not path.exists():
        raise InputError(f"there is no file {path} with labels")
    if path.suffix.lower() == ".npz":
        arrays = read_archive(path)
        if LABELS not in arrays and len(arrays) != 1:
            raise InputError(f"{path} has no array {LABELS!r}; it holds {', '.join(map(repr, arrays)) or 'nothing'}")
        return arrays.get(LABELS, next(iter(arrays.values())))
    if path.suffix.lower() == ".npy":
        return read_array(path)
    with reading(path, InputError, "is no text of labels"):
        lines = path.read_text(encoding="utf-8").splitlines()
    rows = [line.replace(",", " ").split() for line in lines if line.strip(" ,")]
    for number, row in enumerate(rows):
        if not row[-1].isdecimal() or len(row) > 2:
            raise InputError(f"{path}, line {number + 1}: {' '.join(row)!r} is not LABEL or FILE LABEL")
    if all(len(row) == 1 for row in rows):
        return np.array([int(row[0]) for row in rows], np.int64)
    label_of = {Path(row[0]).name: int(row[1]) for row in rows if len(row) == 2}
    for name in names:
        if name not in label_of:
            raise InputError(f"{path} has no label of {name}")
    return np.array([label_of[name] for name in names], np.int64)
