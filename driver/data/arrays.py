"""Arrays from and to a user's files: `--input NAME=FILE`, `--random`, and the .npz of the outputs."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program import InputError, TensorInfo
from celosia.compiler.program.dtypes import itemsize, numpy_dtype
from celosia.compiler.program.host.op import HostError, check_size
from celosia.compiler.program.safe_files import reading, replacing
from celosia.driver.data.images import IN_UNITS, Pixels, is_image, read_image
from celosia.driver.run.prepare import fit_to_tensor

Array = NDArray[Any]
RANDOM_INTEGER_END = 2
"""Random integers wider than 8 bits are less than this: models use most such inputs as indices or lengths."""


def read_inputs(
    texts: Sequence[str], inputs: Sequence[TensorInfo], random: bool = False, pixels: Pixels = IN_UNITS,
    labels: Mapping[tuple[str, int], str] = {},
) -> dict[str, Array]:  # fmt: skip
    """Read the arrays of `--input` options, each of the type and shape that `inputs` declare. InputError.

    An option is NAME=FILE, or FILE where there is one input only or FILE is an .npz of arrays by input name. FILE is a
    .npy, an .npz (of the array NAME, or of a single one), or an image. random: draw random values for inputs without an
    option. pixels: conversion of images. labels: ONNX's symbolic dimension by (input, axis). An open size of a random
    input is that of the given array with the same label; else an open first axis is 1.
    """
    _require_memory([tensor for tensor in inputs if random and tensor.kind == "tensor"])
    arrays: dict[str, Array] = {}
    for text in texts:
        for name, array in _read_option(text, inputs, pixels).items():
            if name in arrays:
                raise InputError(f"input {name!r} is given twice")
            arrays[name] = array
    for tensor in inputs:
        if tensor.name in arrays:
            if tensor.kind != "tensor":
                raise InputError(f"input {tensor.name!r} is a {tensor.kind} of tensors; give it from Python")
            arrays[tensor.name] = fit_to_tensor(tensor, arrays[tensor.name], shape_text(tensor))
        elif random:
            arrays[tensor.name] = random_array(_fix_open_sizes(tensor, arrays, labels), len(arrays))
        else:
            raise InputError(
                f"input {tensor.name!r} is missing; it is {shape_text(tensor)}; give it with --input, or --random"
            )
    return arrays


def _fix_open_sizes(
    tensor: TensorInfo, arrays: Mapping[str, Array], labels: Mapping[tuple[str, int], str]
) -> TensorInfo:
    """Return `tensor` with its open sizes (-1) fixed, where `labels` equal those of `arrays`; an open batch is 1."""
    if tensor.kind != "tensor":
        return tensor
    size_of_label = {
        label: arrays[name].shape[axis] for (name, axis), label in labels.items()
        if name in arrays and axis < arrays[name].ndim
    }  # fmt: skip
    sizes = (
        size_of_label.get(labels.get((tensor.name, axis), ""), 1 if axis == 0 else size) if size < 0 else size
        for axis, size in enumerate(tensor.shape)
    )
    return replace(tensor, shape=tuple(sizes))


def _require_memory(inputs: Sequence[TensorInfo]) -> None:
    """Raise InputError where arrays for all `inputs` take more memory than this machine has."""
    try:
        for tensor in inputs:
            check_size(_byte_count(tensor), f"input {tensor.name!r}, {shape_text(tensor)},")
        check_size(sum(map(_byte_count, inputs)), f"what is made up for {len(inputs)} inputs")
    except HostError as error:
        raise InputError(str(error)) from None


def _byte_count(tensor: TensorInfo) -> int:
    """Return the bytes that drawing a random tensor takes at most: elements are float64 at first."""
    return prod(max(size, 1) for size in tensor.shape) * max(itemsize(tensor.dtype), 8)


def shape_text(tensor: TensorInfo) -> str:
    """Describe element type and shape for people: `?` for an open size."""
    return f"{tensor.dtype}[{', '.join('?' if size == -1 else str(size) for size in tensor.shape)}]"


def _read_option(text: str, inputs: Sequence[TensorInfo], pixels: Pixels) -> dict[str, Array]:
    """Read the arrays of one `--input` option, by input name."""
    tensor_of_name = {tensor.name: tensor for tensor in inputs}
    name, path = _split_option(text, list(tensor_of_name))
    if not path.exists():
        raise InputError(f"--input {text}: there is no file {path}")
    if name is None:
        return _read_input_archive(path, tensor_of_name)
    if path.suffix.lower() == ".npz":
        return {name: _read_named_array(path, name)}
    if is_image(path):
        tensor = tensor_of_name[name]
        return {name: read_image(path, name, tensor.dtype, tensor.shape, pixels)}
    return {name: read_array(path)}


def _split_option(text: str, names: list[str]) -> tuple[str | None, Path]:
    """Split an option into input name and file; the name is None for an .npz archive of several inputs.

    names: of the model's inputs, which may hold equals signs, too. InputError.
    """
    for name in sorted(names, key=len, reverse=True):
        if text.startswith(f"{name}="):
            return name, Path(text[len(name) + 1 :])
    listed = ", ".join(map(repr, names)) or "none"
    if "=" in text and not Path(text).exists():
        raise InputError(f"there is no input {text.partition('=')[0]!r}; the inputs are {listed}")
    if Path(text).suffix.lower() == ".npz":
        return None, Path(text)
    if len(names) != 1:
        raise InputError(f"--input {text} names no input; write NAME={text}, where NAME is one of {listed}")
    return names[0], Path(text)


def _read_input_archive(path: Path, tensor_of_name: Mapping[str, TensorInfo]) -> dict[str, Array]:
    """Read an .npz archive of inputs. InputError for unknown names."""
    arrays = read_archive(path)
    if len(arrays) == len(tensor_of_name) == 1:
        return dict(zip(tensor_of_name, arrays.values()))
    for name in arrays:
        if name not in tensor_of_name:
            listed = ", ".join(map(repr, tensor_of_name)) or "none"
            raise InputError(f"{path} has an array {name!r}, and there is no such input; the inputs are {listed}")
    return arrays


def _read_named_array(path: Path, name: str) -> Array:
    """Read the array `name` of an .npz file, or its only array. InputError where there is neither."""
    arrays = read_archive(path)
    if name not in arrays and len(arrays) != 1:
        held = ", ".join(map(repr, arrays)) or "nothing"
        raise InputError(f"{path} has no array {name!r}; it holds {held}")
    return arrays.get(name, next(iter(arrays.values())))


def read_array(path: Path) -> Array:
    """Read the array in a .npy file. InputError where it is not one."""
    with reading(path, InputError, "is not a .npy file of numbers", "; write one with numpy.save"):
        array = np.load(path, allow_pickle=False)
    if not isinstance(array, np.ndarray):
        array.close()
        raise InputError(f"{path} is an .npz archive; give one .npy file for each input, or call it .npz")
    return array


def read_archive(path: Path, error: type[Exception] = InputError) -> dict[str, Array]:
    """Read the arrays in an .npz file by name. Raises `error` where it is not one."""
    with (
        reading(path, error, "is not an .npz file of numbers", "; write one with numpy.savez"),
        np.load(path, allow_pickle=False) as archive,
    ):
        return {name: archive[name] for name in archive.files}


def random_array(tensor: TensorInfo, seed: int = 0) -> Array:
    """Draw a random input, equal for equal `seed`: floats in 0..1, 8-bit integers of the full range, other integers 0
    or 1.

    InputError for open sizes, and for types that it cannot draw.

    >>> random_array(TensorInfo("x", "float32", (1, 2)))
    array([[0.6369617 , 0.26978672]], dtype=float32)
    """
    if tensor.kind != "tensor" or min(tensor.shape, default=0) < 0 or tensor.dtype == "object":
        sizes = ",".join("N" if size < 0 else str(size) for size in tensor.shape)
        way = f"--shape {tensor.name}={sizes} with a number for each N, or with --input" if "N" in sizes else "--input"
        raise InputError(f"input {tensor.name!r}, {shape_text(tensor)}, cannot be made up; give it with {way}")
    rng, kind = np.random.default_rng(seed), numpy_dtype(tensor.dtype)
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        low, high = (limits.min, limits.max + 1) if kind.itemsize == 1 else (0, RANDOM_INTEGER_END)
        return rng.integers(low, high, tensor.shape, kind)
    return (rng.random(tensor.shape) if kind.kind != "b" else rng.random(tensor.shape) < 0.5).astype(kind)


def write_outputs(path: str | Path, arrays: Mapping[str, Array]) -> None:
    """Write `arrays` to an .npz file by name. numpy.savez would reject some names ("file"). OutputError."""
    with replacing(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
