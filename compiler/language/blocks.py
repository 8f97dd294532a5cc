"""Blocks of a traced kernel, whose offsets are computed for all programs and iterations, and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.language.bounds import UnknownScalar, values
from celosia.compiler.language.errors import LanguageError, fail
from celosia.compiler.language.tile import ArrayArgument, KernelRun, Tile, TracedLoop, scopes, stores
from celosia.compiler.language.views import in_order, order, regrouped, viewed

Values = tuple[NDArray[Any], ...]
"""Values of each offset: an axis for each of three of the grid, and one for each loop."""
ON_CPU = '; target="cpu" runs it'


def equal(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Whether the two are the same once broadcast."""
    x, y = np.broadcast_arrays(a, b)
    return np.array_equal(x, y)


@dataclass(frozen=True)
class Followed:
    """Operations of the vector unit behind a requantise, or to a load: a table, then a residual."""

    table: Tile | None
    residual: Tile | None
    rescale: dict[str, Any]


class BlockReader:
    """Reader of a kernel that stores one block of int8, of the shape `shape`, at `starts`. LanguageError for another
    one."""

    def __init__(self, program: KernelRun) -> None:
        self.program = program
        self.loops = [scope for scope in scopes(program.top) if isinstance(scope, TracedLoop)]
        found = stores(program.top)
        if not found:
            raise LanguageError("the kernel stores nothing; cl.store writes what it computes")
        if len(found) > 1:
            what = f"the accelerator writes one array in a kernel, and this is one store of {len(found)}"
            fail(what + ON_CPU, found[1].at)
        for loop in self.loops:
            if loop.bound is not None:
                fail(f"a loop of the accelerator runs as often in all programs{ON_CPU}", loop.at)
        (self.store,) = found
        if all(each is not self.store for each in program.top.body):
            self.refuse(
                f"the accelerator stores a block when its sum is complete, and this store is inside a loop{ON_CPU}"
            )
        if self.store.block is None:
            self.refuse("the accelerator stores blocks: write cl.store(y, offsets, value), without pointers and masks")
        if self.store.value.dtype != "int8":
            made = f"the accelerator stores int8, and this is {self.store.value}; cl.requantise makes int8 of int32"
            self.refuse(made)
        starts, self.shape, steps = self.store.block
        self.starts, self.y = self.values(starts, self.store.at), self.store.array
        if set(steps) != {1}:
            what = f"the accelerator writes every element of a block, and this has the steps {list(steps)}"
            self.refuse(what + ON_CPU)
        self._once()

    def refuse(self, sentence: str) -> NoReturn:
        """LanguageError, at the line of the store."""
        fail(sentence, self.store.at)

    def behind(self, value: Tile) -> tuple[Followed, Tile]:
        """What follows, and what it follows."""
        table, residual, rescale = None, None, {}
        if value.op == "residual":
            rescale, (value, residual) = value.more, value.args
            value = regrouped(value)
        if value.op == "lookup":
            value, table = value.args
        return Followed(table, residual, rescale), regrouped(value)

    def values(self, starts: Sequence[Tile], at: str) -> Values:
        """Offsets of a block, in all programs and iterations. LanguageError, at `at`, where they depend on data."""
        try:
            found = [values(self.program, start) for start in starts]
        except UnknownScalar:
            fail("the offsets of a block depend on data; the accelerator needs those of programs and loops", at)
        return tuple(each.reshape(*each.shape, *(1,) * (3 + len(self.loops) - each.ndim)) for each in found)

    def load(self, tile: Tile, what: str, moving: bool = False) -> tuple[Tile, Values, tuple[int, ...]]:
        """(the load that `tile` is a view of, where its block begins for all programs and iterations, its shape)."""
        load = viewed(tile)
        if load.op != "load" or load.more["block"] is None:
            fail(
                f"{what} is a block, cl.load(array, offsets, shape), on the accelerator, and this is no such load",
                load.at,
            )
        starts, dims, steps = load.more["block"]
        if set(steps) != {1} and not moving:
            fail(f"{what} has every element of its block on the accelerator, and not the steps {list(steps)}", load.at)
        return load, self.values(starts, load.at), dims

    def _once(self) -> None:
        """Each element of y is written by one program."""
        y, grid = self.store.array, (*self.program.grid, 1, 1)[:3]
        of_programs = np.broadcast_arrays(np.empty((*grid, *(1,) * len(self.loops))), *self.starts)[1:]
        found = {tuple(map(int, place)) for place in zip(*(each.ravel() for each in of_programs))}
        wanted = set(product(*(range(0, size, step) for size, step in zip(y.shape, self.shape))))
        programs = int(np.prod(grid))
        if found != wanted or programs != len(found):
            self.refuse(
                f"the {programs} programs write blocks of {list(self.shape)}, and {y.name} {list(y.shape)} has "
                f"{len(wanted)}; each block is to be written by one program"
            )

    def activation(self, tile: Tile, what: str) -> ArrayArgument:
        """An array of the shape of y that is read where y is written."""
        load, starts, dims = self.load(tile, what)
        array: ArrayArgument = load.more["array"]
        same = all(map(equal, starts, self.starts)) and in_order(tile, load)
        if array.shape != self.store.array.shape or dims != self.shape or not same or array.dtype != "int8":
            fail(f"{what} is int8, read where {self.store.array.name} is written, on the accelerator", load.at)
        return array

    def whole(self, tile: Tile, what: str) -> ArrayArgument:
        """An array that is read as a whole by every program. LanguageError, naming it `what`, for another tile."""
        load, starts, dims = self.load(tile, what)
        array: ArrayArgument = load.more["array"]
        if dims != array.shape or any(start.any() for start in starts):
            fail(f"{what} is a whole array on the accelerator", load.at)
        return array

    def parameters(self, tile: Tile) -> ArrayArgument:
        """One for each column of y, in all of its rows."""
        load, starts, dims = self.load(tile, "the parameters of requantise")
        array, y = load.more["array"], self.store.array
        same = np.array_equal(order(tile, load).ravel(), np.tile(np.arange(load.size), tile.size // load.size))
        if array.shape != y.shape[-1:] or dims != self.shape[-1:] or not same or not equal(starts[-1], self.starts[-1]):
            fail(
                f"the parameters of requantise are one for each column of {y.name}, and {array.name} "
                f"{list(array.shape)} is read elsewhere", load.at
            )  # fmt: skip
        assert isinstance(array, ArrayArgument)
        return array

    def other(self, load: Tile) -> int:
        """What the block has outside of its array. LanguageError where that is no number."""
        other = viewed(load.args[2]) if len(load.args) > 2 else None
        if other is not None and other.op != "const":
            fail("`other` is a number on the accelerator", load.at)
        return 0 if other is None else int(other.more["number"])
