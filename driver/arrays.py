"""Arrays that a user gives and takes: `--input NAME=FILE.npy`, and the .npz of the outputs."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.files import reading, replacing
from celosia.compiler.program import InputError, TensorInfo

Array = NDArray[Any]


def check_files(given: Sequence[str]) -> None:
    """InputError where an `--input` names no file, whatever its name part; before a model is compiled."""
    for text in given:
        if not any(Path(file).exists() for file in (text, *_splits(text))):
            file = text.partition("=")[2] or text
            raise InputError(f"--input {text}: there is no file {file}")


def read_inputs(given: Sequence[str], inputs: Sequence[TensorInfo]) -> dict[str, Array]:
    """The arrays of `--input` options: NAME=FILE.npy, or FILE.npy where there is one input only. InputError."""
    return read_named(given, [tensor.name for tensor in inputs])


def read_named(given: Sequence[str], names: list[str]) -> dict[str, Array]:
    """As `read_inputs`, for inputs of these names."""
    arrays: dict[str, Array] = {}
    for text in given:
        name, file = _split(text, names)
        if name in arrays:
            raise InputError(f"input {name!r} is given twice")
        arrays[name] = read_array(Path(file))
    return arrays


def _splits(text: str) -> list[str]:
    return [text[place + 1 :] for place, letter in enumerate(text) if letter == "="]


def _split(text: str, names: list[str]) -> tuple[str, str]:
    """Name and file of one option; names may hold equals signs, too."""
    for name in sorted(names, key=len, reverse=True):
        if text.startswith(f"{name}="):
            return name, text[len(name) + 1 :]
    listed = ", ".join(map(repr, names)) or "none"
    if "=" in text and not Path(text).exists():
        raise InputError(f"there is no input {text.partition('=')[0]!r}; the inputs are {listed}")
    if len(names) != 1:
        raise InputError(f"--input {text} names no input; write NAME={text}, where NAME is one of {listed}")
    return names[0], text


def read_array(path: Path) -> Array:
    """The array in a .npy file. InputError where it is not one."""
    with reading(path, InputError, "is not a .npy file of numbers", "; write one with numpy.save"):
        array = np.load(path, allow_pickle=False)
    if not isinstance(array, np.ndarray):
        array.close()
        raise InputError(f"{path} is an .npz archive; give one .npy file for each input")
    return array


def write_outputs(path: str | Path, arrays: Mapping[str, Array]) -> None:
    """Write `arrays` to an .npz file, under whatever names. OutputError."""
    with replacing(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
