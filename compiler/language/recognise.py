"""Recognise what a traced kernel computes for the accelerator: a sum of products or a maximum, and what follows it.

Offsets are computed for all programs and iterations, and compared. LanguageError, which names the rule, for what the
accelerator cannot do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.language.attention import (
    AttentionKernel,
    HeadsKernel,
    is_attention,
    is_of_heads,
    read_attention,
    read_heads,
)
from celosia.compiler.language.blocks import ON_CPU, BlockReader, Values, equal
from celosia.compiler.language.errors import fail
from celosia.compiler.language.rows import SoftmaxKernel
from celosia.compiler.language.tile import ArrayArgument, KernelRun, Tile
from celosia.compiler.language.views import in_order, order, regrouped, viewed
from celosia.compiler.layer import Window

Move = tuple[int, ...]
"""How far what is read is from what is written, for each dimension but the channels."""
EPILOGUE = ("requantise", "lookup", "residual")


@dataclass
class Recognised:
    """Computation of a kernel. x, w, par, table, residual: arrays it was called with, where it has them.

    tile: the block of y that a program writes. taps: for each position of the window, the indices of w beside those of
    outputs and inputs. axes: which dimension of w counts outputs, and which inputs. w_at: the
    line that loads it. pool: whether it is the maximum.
    """

    y: ArrayArgument
    tile: tuple[int, ...]
    x: ArrayArgument
    w: ArrayArgument | None = None
    par: ArrayArgument | None = None
    table: ArrayArgument | None = None
    residual: ArrayArgument | None = None
    window: Window = field(default_factory=lambda: Window((1, 1)))
    strides: tuple[int, int] | None = None
    taps: list[list[tuple[int, ...]]] = field(default_factory=list)
    axes: tuple[int, int] = (0, 1)
    pad: int = 0
    pool: bool = False
    w_at: str = ""
    more: dict[str, Any] = field(default_factory=dict)
    rescale: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Fold:
    """Reduction on the accelerator: the operation, of what, from what number on, and both in words."""

    name: str
    leaf: str
    zero: int
    says: str
    first: str


SUM = Fold("add", "dot", 0, "adds up cl.dot", "zero")
MAXIMUM = Fold("max", "load", -128, "takes the maximum of loads", "-128")


def recognise(
    program: KernelRun, varying: Collection[ArrayArgument] = ()
) -> Recognised | SoftmaxKernel | AttentionKernel | HeadsKernel:
    """LanguageError, which names the rule, for what the accelerator cannot do. varying: arrays that are no constants,
    those that are `quantised` beside them."""
    reader = _Reader(program)
    value = regrouped(reader.store.value)
    if value.op == "cast":
        return SoftmaxKernel.read(reader, value)
    if is_attention(value):
        return read_attention(reader, value)
    return read_heads(reader, value) if is_of_heads(reader, value, varying) else reader.read()


class _Reader(BlockReader):
    def read(self) -> Recognised:
        y = self.y
        found = Recognised(y, self.shape, y)
        behind, value = self.behind(regrouped(self.store.value))
        if behind.residual is not None:
            found.residual, found.rescale = self.activation(behind.residual, "what a residual_add adds"), behind.rescale
        if behind.table is not None:
            found.table = self.whole(behind.table, "a table")
        if value.op == "requantise":
            found.par, found.more = self.parameters(value.args[1]), value.more
            self._sum(value.args[0], found)
        elif value.op == "load":
            found.x = self.activation(value, "an elementwise kernel")
        elif value.op == "result" or (
            value.more.get("name") == "max" and all(regrouped(arg).op not in EPILOGUE for arg in value.args)
        ):
            self._maximum(value, found)
        else:
            what = value.more.get("name", value.op)
            fail(
                "the vector unit requantises a sum of cl.dot or takes the cl.maximum of a window, looks up and adds a "
                f"residual, in this order, and no {what}{ON_CPU}", value.at
            )  # fmt: skip
        if y in (found.x, found.w, found.residual, found.table, found.par):
            self.refuse(f"{y.name} is read and written; the accelerator needs another array for its output")
        return found

    # Windows ------------------------------------------------------------------------------------------------------

    def _sum(self, acc: Tile, found: Recognised) -> None:
        terms = list(self._terms(acc, SUM))
        if not terms:
            fail(f"the accelerator requantises a sum of cl.dot{ON_CPU}", acc.at)
        rows = [row for dot in terms for row in self._product(dot, found)]
        self._window(self._channels(rows, found, terms[0].at), found, terms[0].at)

    def _maximum(self, value: Tile, found: Recognised) -> None:
        places: dict[Move, tuple[int, ...]] = {}
        for tile in self._terms(value, MAXIMUM):
            load, starts, dims = self.load(tile, "what a window has the maximum of", moving=True)
            array, y, at = load.more["array"], self.y, load.at
            if found.x not in (y, array) or array.dtype != "int8" or dims != self.shape:
                fail(f"a window has the maximum of blocks {list(self.shape)} of one array of int8", at)
            if array.shape[-1] != y.shape[-1] or len(y.shape) < 3:
                fail(f"a window is of images, and has as many channels as {y.name}; {array.name} has not", at)
            found.x = array
            for row in self._by_iteration([*self._moved(load, starts, found), starts[-1] - self.starts[-1]], at):
                if row[-1]:
                    fail(f"the channels of {array.name} are not those of {y.name}", at)
                places[row[:-1]] = ()
        self._window(places, found, value.at)
        found.pool = True

    def _terms(self, tile: Tile, kind: Fold, end: Tile | None = None) -> Iterator[Tile]:
        """What `tile` is the sum or the maximum of, beside `end`."""
        tile = regrouped(tile)
        if tile is end:
            return
        if tile.op == kind.leaf:
            yield tile
            if tile.op == "dot" and len(tile.args) == 3:
                yield from self._terms(tile.args[2], kind, end)
        elif tile.op == "result":
            first, place, last = next(row[:3] for loop in self.loops for row in loop.carried if row[3] is tile)
            if not _ends_at(last, place, kind):
                fail(f"the accelerator {kind.says}, and what this loop carries is another sum{ON_CPU}", last.at)
            yield from self._terms(last, kind, place)
            yield from self._terms(first, kind, end)
        elif tile.op == "binary" and tile.more["name"] == kind.name:
            yield from self._terms(tile.args[0], kind, end)
            yield from self._terms(tile.args[1], kind, end)
        elif (zero := viewed(tile)).op != "const" or zero.more["number"] != kind.zero:
            what = f"not from {zero.more['number']}" if zero.op == "const" else f"no {tile.more.get('name', tile.op)}"
            fail(f"the accelerator {kind.says} from {kind.first}, and {what}{ON_CPU}", tile.at)

    def _product(self, dot: Tile, found: Recognised) -> list[tuple[Move, int, int, tuple[int, ...], int]]:
        """For each iteration: (rows of x from those of y, channel, how many, place in the window of w, its channel)."""
        a, xs, xdims = self.load(dot.args[0], "a side of cl.dot", moving=True)
        b, ws, wdims = self.load(dot.args[1], "the other side of cl.dot")
        if a.dtype != "int8":
            fail(f"gemm multiplies int8, and this is {a}{ON_CPU}", dot.at)
        x, w, y = a.more["array"], b.more["array"], self.y
        if found.w is not None and (x is not found.x or w is not found.w):
            what = f"the accelerator sums products of one array by one of weights, not {x.name} by {w.name}"
            fail(what + ON_CPU, dot.at)
        found.x, found.w, found.w_at = x, w, b.at
        if len(xdims) != len(self.shape) or xdims[:-1] != self.shape[:-1] or not in_order(dot.args[0], a):
            fail(
                f"the rows of a product are those of its output, channels last; {x.name} is read as {list(xdims)} for "
                f"{list(self.shape)} of {y.name}", dot.at
            )  # fmt: skip
        found.axes = out, into = self._axes(dot, b, wdims)
        if self.other(b) != w.zero_point:
            fail(f"weights beyond the last are {w.zero_point}, and `other` of {w.name} is not", b.at)
        rest = [each for d, each in enumerate(ws) if d not in (out, into)]
        moved = self._moved(a, xs, found)
        n = len(moved)
        rows = self._by_iteration([*moved, xs[-1], ws[into], *rest, ws[out] - self.starts[-1]], dot.at)
        if any(row[-1] for row in rows):
            fail(f"the outputs of the weights are not the columns of {y.name}", dot.at)
        return [(row[:n], row[n], dot.args[1].shape[0], row[n + 2 : -1], row[n + 1]) for row in rows]

    def _axes(self, dot: Tile, b: Tile, dims: tuple[int, ...]) -> tuple[int, int]:
        """Find which dimension of the weights counts outputs, and which inputs."""
        depth, columns = dot.args[1].shape
        numbers = order(dot.args[1], b)
        steps = [int(np.prod(dims[d + 1 :])) for d in range(len(dims))]

        def along(line: NDArray[Any]) -> int | None:
            """The dimension of the block in which the elements `line`, all that it has, follow each other."""
            step = int(line[-1] - line[0]) // max(len(line) - 1, 1)
            return next((d for d, size in enumerate(dims) if (size, steps[d]) == (len(line), step)), None)

        out, into = along(numbers[0]), along(numbers[:, 0])
        if out is None or into is None or out == into or b.size != depth * columns:
            fail(
                f"weights are a block of outputs by inputs, and {b.more['array'].name} is read as {list(dims)}", dot.at
            )
        return out, into

    def _moved(self, load: Tile, starts: Values, found: Recognised) -> list[NDArray[Any]]:
        """How far what a block of x has is from what is written, for each dimension but the channels."""
        name, steps = load.more["array"].name, load.more["block"][2]
        strides = steps[-3:-1] if len(steps) > 2 else (1, 1)
        if steps != ((1,) * len(steps))[:-3] + (*strides, 1)[-len(steps) :]:
            fail(
                f"rows and columns of images alone have steps on the accelerator, and {name} is read in {list(steps)}",
                load.at,
            )
        if found.strides is not None and (found.strides, found.pad) != (strides, self.other(load)):
            fail(f"`other` and `steps` of {name} are the same in a whole window on the accelerator", load.at)
        found.strides, found.pad = strides, self.other(load)
        return [x - step * y for x, y, step in zip(starts[:-1], self.starts[:-1], steps)]

    def _by_iteration(self, sides: Sequence[NDArray[Any]], at: str) -> list[tuple[int, ...]]:
        """What `sides` are in each iteration, in all programs."""
        shape = np.broadcast_shapes(*(each.shape for each in sides))
        found = []
        for each in sides:
            first = np.broadcast_to(each[:1, :1, :1], (1, 1, 1, *shape[3:]))
            if not equal(each, first):
                fail(
                    "programs read different blocks than those that belong to what they write: rows move with the rows "
                    f"of {self.y.name}, outputs of the weights with its columns, one for one{ON_CPU}", at
                )  # fmt: skip
            found.append(map(int, first.ravel()))
        return list(zip(*found))

    def _channels(
        self, rows: list[tuple[Move, int, int, tuple[int, ...], int]], found: Recognised, at: str
    ) -> dict[Move, tuple[int, ...]]:
        """The place of w for each move of x, where all channels are added up at each."""
        assert found.w is not None
        x, w, y, depth = found.x, found.w, found.y, rows[0][2]
        places: dict[Move, tuple[int, ...]] = {}
        seen: dict[Move, list[int]] = {}
        for moved, channel, _, tap, other in rows:
            if channel != other or places.setdefault(moved, tap) != tap:
                fail(
                    f"channel {channel} of {x.name} meets channel {other} of {w.name}; they go together one for one", at
                )
            seen.setdefault(moved, []).append(channel)
        wanted = list(range(0, x.shape[-1], depth))
        if any(sorted(each) != wanted for each in seen.values()) or w.shape[found.axes[1]] != x.shape[-1]:
            fail(
                f"the sum over channels is from 0 to {x.shape[-1]} in steps of {depth}, each once, and over as many of "
                f"{w.name}; here it is not", at
            )  # fmt: skip
        if w.shape[found.axes[0]] != y.shape[-1]:
            fail(f"{w.name} has {w.shape[found.axes[0]]} outputs and {y.name} {y.shape[-1]} columns", at)
        return places

    def _window(self, places: dict[Move, tuple[int, ...]], found: Recognised, at: str) -> None:
        """The window that has these places."""
        x, y = found.x, found.y
        if len(y.shape) == 2:
            if list(places) != [(0,)] or x.shape[0] != y.shape[0]:
                fail("the rows of a matrix product are those of its output", at)
            found.taps = [list(places.values())]
            return
        if any(any(moved[:-2]) for moved in places) or x.shape[:-3] != y.shape[:-3]:
            fail("a window is within one image", at)
        moves = {moved[-2:]: tap for moved, tap in places.items()}
        sides = [sorted({move[d] for move in moves}) for d in (0, 1)]
        steps = [_even(side) for side in sides]
        if list(product(*sides)) != sorted(moves) or 0 in steps:
            fail("the places of a window are rows by columns, in even steps", at)
        assert found.strides is not None
        low = [-side[0] for side in sides]
        high = [
            (made - 1) * stride + side[-1] - (had - 1)
            for made, stride, side, had in zip(y.shape[-3:-1], found.strides, sides, x.shape[-3:-1])
        ]
        if min(low) < 0 or any(beyond <= -stride for beyond, stride in zip(high, found.strides)):
            fail("a window begins at the first row and column of what it reads, and ends at the last", at)
        pads = (low[0], low[1], max(high[0], 0), max(high[1], 0))
        found.window = Window((len(sides[0]), len(sides[1])), found.strides, (steps[0], steps[1]), pads)
        found.taps = [[moves[r, c] for c in sides[1]] for r in sides[0]]


def _even(side: list[int]) -> int:
    """The step from each to the next; 0 where it changes."""
    steps = {b - a for a, b in pairwise(side)} or {1}
    return steps.pop() if len(steps) == 1 else 0


def _ends_at(tile: Tile, place: Tile, kind: Fold) -> bool:
    """Whether a sum, or a maximum, begins with `place`."""
    tile = regrouped(tile)
    while tile is not place:
        if tile.op == "dot" and len(tile.args) == 3:
            tile = regrouped(tile.args[2])
        elif tile.op == "binary" and tile.more["name"] == kind.name:
            return any(_ends_at(arg, place, kind) for arg in tile.args)
        else:
            return tile.op == "result"
    return True
