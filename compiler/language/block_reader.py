"""Blocks that a traced kernel reads and writes: their offsets are computed for all programs and iterations.

A block reaches its use through views (reshape, broadcast, transposition). The functions at the end say which element of
the source each element of a view is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.language.tile import (
    VIEWS,
    ArrayArgument,
    KernelRun,
    LanguageError,
    Tile,
    TracedLoop,
    fail,
    origin,
    scopes,
    stores,
)
from celosia.compiler.language.traced_loops import UnknownScalar, scalar_values

Values = tuple[NDArray[Any], ...]
"""Values of each offset of a block, with an axis for each of three grid axes and one for each loop."""
ON_CPU = '; target="cpu" runs it'
"""End of an error that holds on the accelerator alone."""


def is_equal(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Return whether two arrays are equal after broadcasting."""
    x, y = np.broadcast_arrays(a, b)
    return np.array_equal(x, y)


@dataclass(frozen=True)
class TableAndResidual:
    """Operations of the vector unit behind a requantise or a load: a table, then a residual.

    table: the tile that `lookup` reads. residual: the tile that `residual_add` adds. Both are None where the kernel has
    no such operation. rescale: the scales, shift and clip of the residual_add.
    """

    table: Tile | None
    residual: Tile | None
    rescale: dict[str, Any]


class BlockReader:
    """Follows a traced kernel from its only store back to the blocks that it loads.

    y: the array that is written. shape: sizes of the block that a program writes. starts: its offsets. loops: all loops
    of the kernel. Methods raise LanguageError for kernels that the accelerator cannot run.
    """

    def __init__(self, run: KernelRun) -> None:
        """Find the only store of the kernel, and check that the accelerator can write it."""
        self.run = run
        self.loops = [scope for scope in scopes(run.top) if isinstance(scope, TracedLoop)]
        all_stores = stores(run.top)
        if not all_stores:
            raise LanguageError("the kernel stores nothing; cl.store writes what it computes")
        if len(all_stores) > 1:
            message = f"the accelerator writes one array in a kernel, and this is one store of {len(all_stores)}"
            fail(message + ON_CPU, all_stores[1].at)
        for loop in self.loops:
            if loop.bound is not None:
                fail(f"a loop of the accelerator runs as often in all programs{ON_CPU}", loop.at)
        (self.store,) = all_stores
        if all(statement is not self.store for statement in run.top.body):
            self.refuse(
                f"the accelerator stores a block when its sum is complete, and this store is inside a loop{ON_CPU}"
            )
        if self.store.block is None:
            self.refuse("the accelerator stores blocks: write cl.store(y, offsets, value), without pointers and masks")
        if self.store.value.dtype != "int8":
            message = f"the accelerator stores int8, and this is {self.store.value}; cl.requantise makes int8 of int32"
            self.refuse(message)
        starts, self.shape, steps = self.store.block
        self.starts, self.y = self.offset_values(starts, self.store.at), self.store.array
        if set(steps) != {1}:
            message = f"the accelerator writes every element of a block, and this has the steps {list(steps)}"
            self.refuse(message + ON_CPU)
        self._require_one_writer()

    def refuse(self, sentence: str) -> NoReturn:
        """Raise LanguageError at the line of the store."""
        fail(sentence, self.store.at)

    def split_epilogue(self, value: Tile) -> tuple[TableAndResidual, Tile]:
        """Split `value` into the lookup and residual_add at its end, and the tile to which they are applied."""
        table, residual, rescale = None, None, {}
        if value.op == "residual":
            rescale, (value, residual) = value.attributes, value.args
            value = before_reshapes(value)
        if value.op == "lookup":
            value, table = value.args
        return TableAndResidual(table, residual, rescale), before_reshapes(value)

    def offset_values(self, starts: Sequence[Tile], at: str) -> Values:
        """Return the offsets of a block in all programs and iterations.

        at: file and line of the load or store. Raises LanguageError where the offsets depend on data.
        """
        try:
            offsets = [scalar_values(self.run, start) for start in starts]
        except UnknownScalar:
            fail("the offsets of a block depend on data; the accelerator needs those of programs and loops", at)
        return tuple(offset.reshape(*offset.shape, *(1,) * (3 + len(self.loops) - offset.ndim)) for offset in offsets)

    def load(self, tile: Tile, role: str, moving: bool = False) -> tuple[Tile, Values, tuple[int, ...]]:
        """Return (the load that `tile` is a view of, the starts of its blocks, their shape). Raises LanguageError.

        role: names the block in errors. moving: steps other than 1 are allowed.
        """
        load = source_of_view(tile)
        if load.op != "load" or load.attributes["block"] is None:
            fail(
                f"{role} is a block, cl.load(array, offsets, shape), on the accelerator, and this is no such load",
                load.at,
            )
        starts, dims, steps = load.attributes["block"]
        if set(steps) != {1} and not moving:
            fail(f"{role} has every element of its block on the accelerator, and not the steps {list(steps)}", load.at)
        return load, self.offset_values(starts, load.at), dims

    def _require_one_writer(self) -> None:
        """Raise LanguageError unless each element of y is written by exactly one program."""
        y, grid = self.store.array, (*self.run.grid, 1, 1)[:3]
        starts = np.broadcast_arrays(np.empty((*grid, *(1,) * len(self.loops))), *self.starts)[1:]
        written = {tuple(map(int, offset)) for offset in zip(*(start.ravel() for start in starts))}
        expected = set(product(*(range(0, size, step) for size, step in zip(y.shape, self.shape))))
        programs = int(np.prod(grid))
        if written != expected or programs != len(written):
            self.refuse(
                f"the {programs} programs write blocks of {list(self.shape)}, and {y.name} {list(y.shape)} has "
                f"{len(expected)}; each block is to be written by one program"
            )

    def activation(self, tile: Tile, role: str) -> ArrayArgument:
        """Return the int8 array of which `tile` is the block at the position that the program writes in y.

        The array must have the shape of y. Raises LanguageError, naming the array `role`.
        """
        load, starts, dims = self.load(tile, role)
        array: ArrayArgument = load.attributes["array"]
        is_same = all(map(is_equal, starts, self.starts)) and is_in_order(tile, load)
        if array.shape != self.store.array.shape or dims != self.shape or not is_same or array.dtype != "int8":
            fail(f"{role} is int8, read where {self.store.array.name} is written, on the accelerator", load.at)
        return array

    def complete_array(self, tile: Tile, role: str) -> ArrayArgument:
        """Return an array that every program reads completely. Raises LanguageError, naming it `role`."""
        load, starts, dims = self.load(tile, role)
        array: ArrayArgument = load.attributes["array"]
        if dims != array.shape or any(start.any() for start in starts):
            fail(f"{role} is a whole array on the accelerator", load.at)
        return array

    def parameters(self, tile: Tile) -> ArrayArgument:
        """Return the array with the parameters of a requantise, one for each column of y. Raises LanguageError."""
        load, starts, dims = self.load(tile, "the parameters of requantise")
        array, y = load.attributes["array"], self.store.array
        is_repeated = np.array_equal(
            element_order(tile, load).ravel(), np.tile(np.arange(load.size), tile.size // load.size)
        )
        if (
            array.shape != y.shape[-1:]
            or dims != self.shape[-1:]
            or not is_repeated
            or not is_equal(starts[-1], self.starts[-1])
        ):
            fail(
                f"the parameters of requantise are one for each column of {y.name}, and {array.name} "
                f"{list(array.shape)} is read elsewhere", load.at
            )  # fmt: skip
        assert isinstance(array, ArrayArgument)
        return array

    def padding_value(self, load: Tile) -> int:
        """Return the value `other` of a load, which its elements outside of the array have; 0 by default.

        Raises LanguageError where it is not a constant.
        """
        other = source_of_view(load.args[2]) if len(load.args) > 2 else None
        if other is not None and other.op != "const":
            fail("`other` is a number on the accelerator", load.at)
        return 0 if other is None else int(other.attributes["number"])


# Views of tiles ---------------------------------------------------------------------------------------------------


def before_reshapes(tile: Tile) -> Tile:
    """Return the tile of which `tile` is a reshape, or a reshape of a reshape; it has the same elements in order."""
    return origin(tile, "reshape")


def source_of_view(tile: Tile) -> Tile:
    """Return the tile that `tile` is a view of."""
    return origin(tile, *VIEWS)


def apply_view(elements: NDArray[np.int64], view: Tile) -> NDArray[np.int64]:
    """Arrange `elements` as the operation of `view` arranges the elements of its argument.

    Applied to element numbers, it says which element of the source each element of the view is.
    """
    match view.op:
        case "trans":
            return elements.transpose(view.attributes["axes"])
        case "reshape":
            return elements.reshape(view.shape)
        case "broadcast":
            return np.broadcast_to(elements, view.shape)
    return elements


def element_order(tile: Tile, source: Tile) -> NDArray[np.int64]:
    """Return which element of `source` each element of its view `tile` is: numbers in the shape of `tile`."""
    views = []
    while tile is not source:
        views.append(tile)
        tile = tile.attributes["same"] if "same" in tile.attributes else tile.args[0]
    elements = np.arange(source.size).reshape(source.shape)
    for view in reversed(views):
        elements = apply_view(elements, view)
    return elements


def is_in_order(tile: Tile, source: Tile) -> bool:
    """Return whether the view `tile` has each element of `source` once, in order."""
    return is_identity_order(element_order(tile, source))


def is_identity_order(elements: NDArray[np.int64]) -> bool:
    """Return whether `elements` are all numbers from 0 on, in order."""
    return np.array_equal(elements.ravel(), np.arange(elements.size))
