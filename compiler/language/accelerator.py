"""A traced kernel as a layer of the accelerator.

What the machine does is one thing: sums of products of blocks, a pass of the vector unit, and blocks of y. This module
reads that off the trace: offsets are computed for all programs and iterations, and compared. What is found is a `layer`
like those of a model, whose tile is that of a program; scratchpads, tokens and loads ahead are the compiler's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.image import Image, LayerErrors, build
from celosia.compiler.language.bounds import Unknown, values
from celosia.compiler.language.meaning import parameters
from celosia.compiler.language.tile import Array, LanguageError, Loop, Program, Scope, Store, Tile, fail
from celosia.compiler.layer import (
    Activation,
    Conv,
    Epilogue,
    Layer,
    Map,
    Requantise,
    Residual,
    Untileable,
    Window,
    inputs,
)
from celosia.compiler.tensorize import pack
from celosia.compiler.tensorize.define import define
from celosia.compiler.tensorize.plan import Planner
from celosia.compiler.tensorize.space import CUT, Decisions, Problem, estimate, parts, point, why_not
from celosia.compiler.vthread.verify import Run, verify_provenance
from celosia.hw.config import Config
from celosia.sim.timing import predict

Block = tuple[tuple[NDArray[Any], ...], tuple[int, ...]]
"""Where a block begins, for all programs and iterations, and its shape."""
TIMEOUT = 1 << 40
ON_CPU = '; target="cpu" runs it'


@dataclass
class Recognised:
    """What a kernel computes. x, w, par, table, residual: arrays it was called with, where it has them.

    kernel: for each position of the window, the indices of w beside those of outputs and inputs. axes: which dimension
    of w counts outputs, and which inputs. tile: the block of y that a program writes.
    """

    y: Array
    tile: tuple[int, ...]
    x: Array
    w: Array | None = None
    par: Array | None = None
    table: Array | None = None
    residual: Array | None = None
    window: Window = field(default_factory=lambda: Window((1, 1)))
    taps: list[list[tuple[int, ...]]] = field(default_factory=list)
    axes: tuple[int, int] = (0, 1)
    pad: int = 0
    more: dict[str, Any] = field(default_factory=dict)
    rescale: dict[str, Any] = field(default_factory=dict)


def recognise(program: Program) -> Recognised:
    """LanguageError, which names the rule, for what the accelerator cannot do."""
    return _Reader(program).read()


class _Reader:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.loops = list(_loops(program.top))
        found = [each for scope in (program.top, *self.loops) for each in scope.body if isinstance(each, Store)]
        if not found:
            raise LanguageError("the kernel stores nothing; cl.store writes what it computes")
        if len(found) > 1:
            fail(
                f"the accelerator writes one array in a kernel, and this is one store of {len(found)}{ON_CPU}",
                found[1].at,
            )
        for loop in self.loops:
            if loop.bound is not None:
                fail(f"a loop of the accelerator runs as often in all programs{ON_CPU}", loop.at)
        (self.store,) = found
        if all(each is not self.store for each in program.top.body):
            fail(
                f"the accelerator stores a block when its sum is complete, and this store is inside a loop{ON_CPU}",
                self.store.at,
            )
        if self.store.block is None:
            fail(
                "the accelerator stores blocks: write cl.store(y, offsets, value), without pointers and masks",
                self.store.at,
            )
        if self.store.value.dtype != "int8":
            fail(
                f"the accelerator stores int8, and this is {self.store.value}; cl.requantise makes int8 of int32",
                self.store.at,
            )

    def read(self) -> Recognised:
        self.target = self._block(self.store.block, self.store.at)
        self._once()
        y = self.store.array
        found = Recognised(y, self.target[1], y)
        value = _regrouped(self.store.value)
        if value.op == "residual":
            other = self._activation(value.args[1], "what a residual_add adds")
            found.residual, found.rescale = other, value.more
            value = _regrouped(value.args[0])
        if value.op == "lookup":
            found.table = self._whole(value.args[1], "a table")
            value = _regrouped(value.args[0])
        if value.op == "requantise":
            found.par, found.more = self._parameters(value.args[1]), value.more
            self._sum(value.args[0], found)
        elif value.op == "load":
            found.x = self._activation(value, "an elementwise kernel")
        else:
            what = value.more.get("name", value.op)
            fail(
                f"the vector unit requantises a sum of cl.dot, looks up and adds a residual, in this order, and no "
                f"{what}{ON_CPU}", value.at
            )  # fmt: skip
        read = [each for each in (found.x, found.w, found.residual, found.table, found.par) if each is not None]
        if found.y in read:
            fail(f"{y.name} is read and written; the accelerator needs another array for its output", self.store.at)
        return found

    # Blocks -------------------------------------------------------------------------------------------------------

    def _block(self, block: Any, at: str) -> Block:
        try:
            return tuple(values(self.program, start) for start in block[0]), block[1]
        except Unknown:
            fail("the offsets of a block depend on data; the accelerator needs those of programs and loops", at)

    def _load(self, tile: Tile, what: str) -> Tile:
        load = _viewed(tile)
        if load.op != "load" or load.more["block"] is None:
            fail(
                f"{what} is a block, cl.load(array, offsets, shape), on the accelerator, and this is no such load",
                load.at,
            )
        return load

    def _once(self) -> None:
        """Each element of y is written by one program."""
        starts, dims = self.target
        shape, y = np.broadcast_shapes(*(start.shape for start in starts)), self.store.array
        wanted = [range(0, size, step) for size, step in zip(y.shape, dims)]
        found = {
            tuple(map(int, p)) for p in zip(*(np.broadcast_to(s, _all(shape, self.program)).ravel() for s in starts))
        }
        programs = int(np.prod(self.program.grid))
        if found != set(product(*wanted)) or programs != len(found):
            fail(
                f"the {programs} programs write blocks of {list(dims)}, and {y.name} {list(y.shape)} has "
                f"{int(np.prod([len(each) for each in wanted]))}; each block is to be written by one program",
                self.store.at,
            )

    def _activation(self, tile: Tile, what: str) -> Array:
        """An array of the shape of y that is read where y is written."""
        load = self._load(tile, what)
        starts, dims = self._block(load.more["block"], load.at)
        array: Array = load.more["array"]
        same = all(_equal(a, b) for a, b in zip(starts, self.target[0]))
        same = same and _order(tile, load) == list(range(load.size))
        if array.shape != self.store.array.shape or dims != self.target[1] or not same or array.dtype != "int8":
            fail(f"{what} is int8, read where {self.store.array.name} is written, on the accelerator", load.at)
        return array

    def _whole(self, tile: Tile, what: str) -> Array:
        load = self._load(tile, what)
        starts, dims = self._block(load.more["block"], load.at)
        array: Array = load.more["array"]
        if dims != array.shape or any(start.any() for start in starts):
            fail(f"{what} is a whole array on the accelerator", load.at)
        return array

    def _parameters(self, tile: Tile) -> Array:
        load = self._load(tile, "the parameters of requantise")
        starts, dims = self._block(load.more["block"], load.at)
        array: Array = load.more["array"]
        (start, own), columns = (starts[-1], self.target[0][-1]), self.store.array.shape[-1]
        if array.shape != (columns,) or dims != self.target[1][-1:] or not self._of_columns(tile, load, start, own):
            fail(
                f"the parameters of requantise are one for each column of {self.store.array.name}, and {array.name} "
                f"{list(array.shape)} is read elsewhere", load.at
            )  # fmt: skip
        return array

    def _of_columns(self, tile: Tile, load: Tile, start: NDArray[Any], own: NDArray[Any]) -> bool:
        """Whether `tile` has the same row of `load`, which begins where the columns of y do, in all of its rows."""
        return _equal(start, own) and _order(tile, load) == list(range(load.size)) * (tile.size // load.size)

    # Sums ---------------------------------------------------------------------------------------------------------

    def _sum(self, acc: Tile, found: Recognised) -> None:
        terms = list(self._terms(acc))
        if not terms:
            fail(f"the accelerator requantises a sum of cl.dot{ON_CPU}", acc.at)
        rows = [self._term(dot, found) for dot in terms]
        self._window([row for each in rows for row in each], found, terms[0].at)

    def _terms(self, tile: Tile, end: Tile | None = None) -> Iterator[Tile]:
        """The dots that `tile` is the sum of, beside `end`."""
        tile = _regrouped(tile)
        if tile is end:
            return
        if tile.op == "dot":
            yield tile
            if len(tile.args) == 3:
                yield from self._terms(tile.args[2], end)
        elif tile.op == "result":
            first, place, last = next(row[:3] for loop in self.loops for row in loop.carried if row[3] is tile)
            if not _ends_at(last, place):
                fail(f"the accelerator adds up cl.dot, and what this loop carries is another sum{ON_CPU}", last.at)
            yield from self._terms(last, place)
            yield from self._terms(first, end)
        elif tile.op == "binary" and tile.more["name"] == "add":
            yield from self._terms(tile.args[0], end)
            yield from self._terms(tile.args[1], end)
        elif (zero := _viewed(tile)).op != "const" or zero.more["number"] != 0:
            fail(f"the accelerator adds up cl.dot from zero, and no {tile.more.get('name', tile.op)}{ON_CPU}", tile.at)

    def _term(self, dot: Tile, found: Recognised) -> list[tuple[tuple[int, ...], int, int, tuple[int, ...], int]]:
        """For each iteration: (rows of x from those of y, channel, how many, place in the window of w, its channel)."""
        a, b = (self._load(side, "a side of cl.dot") for side in dot.args[:2])
        if a.dtype != "int8":
            fail(f"gemm multiplies int8, and this is {a}{ON_CPU}", dot.at)
        x, w = a.more["array"], b.more["array"]
        if found.w is not None and (x is not found.x or w is not found.w):
            fail(
                f"the accelerator sums products of one array by one of weights, not {x.name} by {w.name}{ON_CPU}",
                dot.at,
            )
        found.x, found.w = x, w
        (xs, xdims), (ws, wdims) = self._block(a.more["block"], a.at), self._block(b.more["block"], b.at)
        depth, columns = dot.args[1].shape
        rank = len(self.target[1])
        order = _order(dot.args[0], a)
        if len(xdims) != rank or xdims[:-1] != self.target[1][:-1] or order != list(range(int(np.prod(xdims)))):
            fail(
                f"the rows of a product are those of its output, channels last; {x.name} is read as {list(xdims)} for "
                f"{list(self.target[1])} of {self.store.array.name}", dot.at
            )  # fmt: skip
        numbers = np.array(_order(dot.args[1], b)).reshape(depth, columns)
        sizes = [int(np.prod(wdims[d + 1 :])) for d in range(len(wdims))]
        along = [next((d for d, s in enumerate(sizes) if s == step and wdims[d] == size), None) for step, size in (
            (int(numbers[0, -1] - numbers[0, 0]) // max(columns - 1, 1), columns),
            (int(numbers[-1, 0] - numbers[0, 0]) // max(depth - 1, 1), depth),
        )]  # fmt: skip
        out, into = along
        if (
            out is None
            or into is None
            or out == into
            or int(np.prod(wdims)) != depth * columns
            or columns == 1
            or depth == 1
        ):
            fail(f"weights are a block of outputs by inputs, and {w.name} is read as {list(wdims)}", dot.at)
        found.axes = (out, into)
        if self._pad(a) != found.pad and found.taps:
            fail(f"`other` of {x.name} is one number on the accelerator", a.at)
        found.pad, found.taps = self._pad(a), [[()]]
        if self._pad(b) != 0:
            fail(f"weights beyond the last are 0, and `other` of {w.name} is not", b.at)
        return self._iterations(xs, ws, depth, out, into, dot.at)

    def _iterations(
        self, xs: Sequence[NDArray[Any]], ws: Sequence[NDArray[Any]], depth: int, out: int, into: int, at: str
    ) -> list[tuple[tuple[int, ...], int, int, tuple[int, ...], int]]:
        ys = self.target[0]
        rank = max(each.ndim for each in (*xs, *ws, *ys))
        wide = [[s.reshape(*s.shape, *(1,) * (rank - s.ndim)) for s in each] for each in (xs, ws, ys)]
        xs, ws = wide[0], wide[1]
        ys = tuple(wide[2])
        moved = [x - y for x, y in zip(xs[:-1], ys[:-1])]
        rest = [w for d, w in enumerate(ws) if d not in (out, into)]
        same = (*moved, xs[-1], ws[into], *rest, ws[out] - ys[-1])
        shape = np.broadcast_shapes(*(each.shape for each in same))
        fixed = []
        for each in same:
            first = np.broadcast_to(each[:1, :1, :1], (1, 1, 1, *shape[3:]))
            if not np.array_equal(np.broadcast_to(each, shape), np.broadcast_to(first, shape)):
                fail(
                    "programs read different blocks than those that belong to what they write: rows move with the rows "
                    f"of {self.store.array.name}, outputs of the weights with its columns, one for one{ON_CPU}", at
                )  # fmt: skip
            fixed.append(first.ravel())
        if fixed[-1].any():
            fail(f"the outputs of the weights are not the columns of {self.store.array.name}", at)
        n = len(moved)
        return [
            (tuple(map(int, row[:n])), int(row[n]), depth, tuple(map(int, row[n + 2 : -1])), int(row[n + 1]))
            for row in zip(*fixed)
        ]

    def _pad(self, load: Tile) -> int:
        other = _viewed(load.args[2]) if len(load.args) > 2 else None
        if other is not None and other.op != "const":
            fail("`other` is a number on the accelerator", load.at)
        return 0 if other is None else int(other.more["number"])

    def _window(
        self, rows: list[tuple[tuple[int, ...], int, int, tuple[int, ...], int]], found: Recognised, at: str
    ) -> None:
        assert found.w is not None
        x, y, w = found.x, found.y, found.w
        channels, depth = x.shape[-1], rows[0][2]
        places: dict[tuple[int, ...], tuple[int, ...]] = {}
        seen: dict[tuple[int, ...], list[int]] = {}
        for moved, channel, _, tap, other in rows:
            if channel != other or places.setdefault(moved, tap) != tap:
                fail(
                    f"channel {channel} of {x.name} meets channel {other} of {w.name}; they go together one for one", at
                )
            seen.setdefault(moved, []).append(channel)
        wanted = list(range(0, channels, depth))
        if any(sorted(each) != wanted for each in seen.values()) or w.shape[found.axes[1]] != channels:
            fail(
                f"the sum over channels is from 0 to {channels} in steps of {depth}, each once, and over as many of "
                f"{w.name}; here it is not", at
            )  # fmt: skip
        if w.shape[found.axes[0]] != y.shape[-1]:
            fail(f"{w.name} has {w.shape[found.axes[0]]} outputs and {y.name} {y.shape[-1]} columns", at)
        spatial = (*(0,) * (2 - min(2, len(y.shape) - 1)),) if len(y.shape) == 2 else ()
        moves = sorted((*spatial, *moved[-2:]) if len(moved) > 1 else (0, moved[0]) for moved in places)
        if len(y.shape) == 2 and any(moved != (0,) for moved in places):
            fail("the rows of a matrix product are those of its output", at)
        if any(any(moved[:-2]) for moved in places):
            fail("a window is within one image", at)
        sides = [sorted({move[d] for move in moves}) for d in (0, 1)]
        steps = [_even(side) for side in sides]
        if list(product(*sides)) != moves or 0 in steps:
            fail("the places of a window are rows by columns, in even steps", at)
        if len(y.shape) == 2:
            found.window = Window((1, 1))
        else:
            high = [size - 1 + side[-1] - (had - 1) for size, side, had in zip(y.shape[-3:-1], sides, x.shape[-3:-1])]
            pads = (-sides[0][0], -sides[1][0], high[0], high[1])
            if min(pads) < 0:
                fail("a window begins at the first row and column of what it reads, and ends at the last", at)
            found.window = Window((len(sides[0]), len(sides[1])), (1, 1), (steps[0], steps[1]), pads)
        by_move = {((0, 0) if len(y.shape) == 2 else moved[-2:]): tap for moved, tap in places.items()}
        found.taps = [[by_move[r, c] for c in sides[1]] for r in sides[0]]


def _equal(a: NDArray[Any], b: NDArray[Any]) -> bool:
    x, y = np.broadcast_arrays(a, b)
    return np.array_equal(x, y)


def _even(side: list[int]) -> int:
    """The step from each to the next; 0 where it changes."""
    steps = {b - a for a, b in pairwise(side)} or {1}
    return steps.pop() if len(steps) == 1 else 0


def _all(shape: tuple[int, ...], program: Program) -> tuple[int, ...]:
    return np.broadcast_shapes(shape, (*program.grid, *(1,) * (3 - len(program.grid))))


def _loops(scope: Scope) -> Iterator[Loop]:
    for each in scope.body:
        if isinstance(each, Loop):
            yield each
            yield from _loops(each)


def _regrouped(tile: Tile) -> Tile:
    """What `tile` is with the same elements in the same order."""
    while tile.op == "reshape" or (tile.op == "phi" and "same" in tile.more):
        tile = tile.more["same"] if tile.op == "phi" else tile.args[0]
    return tile


def _viewed(tile: Tile) -> Tile:
    """What `tile` is a view of."""
    while tile.op in ("reshape", "broadcast", "trans") or (tile.op == "phi" and "same" in tile.more):
        tile = tile.more["same"] if tile.op == "phi" else tile.args[0]
    return tile


def _order(tile: Tile, load: Tile) -> list[int]:
    """The elements of `load`, by number, in the order in which the view `tile` has them."""
    steps = []
    while tile is not load:
        steps.append(tile)
        tile = tile.more["same"] if tile.op == "phi" else tile.args[0]
    found = np.arange(load.size).reshape(load.shape)
    for step in reversed(steps):
        if step.op == "trans":
            found = found.transpose(step.more["axes"])
        elif step.op == "reshape":
            found = found.reshape(step.shape)
        elif step.op == "broadcast":
            found = np.broadcast_to(found, step.shape)
    return [int(n) for n in found.ravel()]


def _ends_at(tile: Tile, place: Tile) -> bool:
    """Whether a sum begins with `place`."""
    tile = _regrouped(tile)
    while tile is not place:
        if tile.op == "dot" and len(tile.args) == 3:
            tile = _regrouped(tile.args[2])
        elif tile.op == "binary" and tile.more["name"] == "add":
            return any(_ends_at(arg, place) for arg in tile.args)
        else:
            return tile.op == "result"
    return True


# Layers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fixed:
    decisions: list[Decisions]

    def of(self, layer: str, problems: Sequence[Any]) -> list[Decisions]:
        return self.decisions


def dims_of(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """(images, channels, height, width) of an array [rows, channels], or [images, height, width, channels]."""
    if len(shape) == 2:
        return shape[0], shape[1], 1, 1
    images = shape[0] if len(shape) == 4 else 1
    return images, shape[-1], shape[-3], shape[-2]


class Lowered:
    """The layer of a kernel on a Config, for the arrays of a call."""

    def __init__(self, cfg: Config, name: str, program: Program, at: str) -> None:
        self.cfg, self.name, self.at = cfg, name, at
        self.found = recognise(program)
        for each in (self.found.x, self.found.y):
            if not 2 <= len(each.shape) <= 4:
                fail(f"the accelerator has matrices and images; {each.name} has {len(each.shape)} dimensions", at)
        self.acts = {
            array: Activation.alone(cfg, array.name, *dims_of(array.shape))
            for array in (self.found.x, self.found.y, self.found.residual) if array is not None
        }  # fmt: skip
        self.planner: Planner | None = None

    def layer(self, arrays: dict[Array, NDArray[Any]]) -> Layer:
        f = self.found
        clip = f.more.get("clip", (-128, 127))
        table = None if f.table is None else arrays[f.table].copy()
        residual = None
        if f.residual is not None:
            r = f.rescale
            scales = r["scale_v"], r["scale_b"], r["scale_c"], r["shift"]
            residual = Residual(self.acts[f.residual], *scales, *r["clip"])
        x, y = self.acts[f.x], self.acts[f.y]
        if f.w is None or f.par is None:
            return Map(self.name, x, y, Epilogue((-128, 127), table, residual))
        out, into = f.axes
        others = [d for d in range(len(f.w.shape)) if d not in f.axes]
        moved = arrays[f.w].transpose(out, into, *others)
        whole = slice(None), slice(None)
        weights: Any = np.stack([np.stack([moved[whole + tap] for tap in row], -1) for row in f.taps], -2)
        bias, multiplier, shift = parameters(arrays[f.par])
        zero_point = int(f.more["zero_point"])
        requantise = Requantise(bias, multiplier.astype(np.uint32), shift.astype(np.uint8), zero_point)
        epilogue = Epilogue(clip, table, residual)
        return Conv(self.name, x, y, np.ascontiguousarray(weights), requantise, f.window, 1, f.pad, epilogue)

    def decide(self, layer: Layer) -> list[Decisions]:
        """The tile of a program; loop order and pieces of the sum by the compiler's estimate."""
        return [self._decide(d.problem) for d in define(self.cfg, layer)]  # type: ignore[arg-type]

    def _decide(self, p: Problem) -> Decisions:
        cfg, tile = self.cfg, self.found.tile
        if tile[-1] % cfg.block_out and tile[-1] < self.found.y.shape[-1]:
            self._refuse(f"columns of a block come in multiples of block_out, {cfg.block_out}, and not {tile[-1]}")
        n = min(-(-tile[-1] // cfg.block_out), p.out_blocks)
        if len(tile) == 2:
            if tile[0] % cfg.batch and tile[0] < self.found.y.shape[0]:
                self._refuse(f"rows of a block come in multiples of the batch, {cfg.batch}, and not {tile[0]}")
            y, x = 1, min(-(-tile[0] // cfg.batch), p.columns)
        else:
            y, x = min(tile[-3], p.rows), min(tile[-2], p.columns)
        reasons: list[str] = []
        points: list[tuple[float, int, Decisions]] = []
        for order in ("weights", "input", "split", "pieces") if p.in_blocks else ("rows",):
            for k in parts(p.in_blocks)[1:] if order in CUT else [max(p.in_blocks, 1)]:
                d = point(cfg, p, n, y, x, k, order)
                reason = why_not(cfg, p, d)
                if reason is None:
                    points.append((estimate(cfg, p, d) if p.in_blocks else 0.0, len(points), d))
                else:
                    reasons.append(reason)
        if not points:
            self._refuse(f"a block of {list(tile)} does not fit: {reasons[-1]}; take smaller blocks")
        return min(points)[2]

    def _refuse(self, sentence: str) -> NoReturn:
        fail(f"{self.name} on {self.cfg.name}: {sentence}", self.at)

    def image(self, layer: Layer) -> Image:
        if self.planner is None:
            self.planner = Planner(self.cfg, _Fixed(self.decide(layer)))
        return image_of(self.cfg, layer, self.planner, self._refuse)


def image_of(cfg: Config, layer: Layer, planner: Planner, refuse: Any) -> Image:
    given, made = {act.storage for act in inputs(layer)}, {layer.y.storage}
    try:
        image = build(cfg, [[layer]], [given], [made], planner)
    except (LayerErrors, Untileable) as error:
        refuse(f"it does not fit: {error}")
    (launch,) = image.launches
    run = Run(image.code(launch), [layer], launch.layer_of, given, made)
    verify_provenance(cfg, [run], image.addresses, image.constants_address, image.constants, image.size)
    return image


def cycles(cfg: Config, image: Image) -> int:
    """By the timing model."""
    (launch,) = image.launches
    return predict(cfg, image.code(launch).tobytes(), address=launch.address).cycles


class AcceleratorVariant:
    """A kernel for one set of types and shapes, with the image for the last weights that it was given."""

    def __init__(self, kernel: Any, program: Program, given: dict[Array, int]) -> None:
        self.kernel, self.cfg = kernel, kernel.machine
        self.lowered = Lowered(self.cfg, kernel.name, program, kernel.at)
        self.given = given
        self.constants: list[NDArray[Any]] = []
        self.image: Image | None = None
        self.layer: Layer | None = None

    def prepare(self, arrays: list[Any]) -> Image:
        """The program, for these weights."""
        f = self.lowered.found
        fixed = [arrays[self.given[a]] for a in (f.w, f.par, f.table) if a is not None]
        if self.image is None or not all(map(np.array_equal, fixed, self.constants)):
            self.layer = self.lowered.layer({a: arrays[n] for a, n in self.given.items()})
            self.image = self.lowered.image(self.layer)
            self.constants = [each.copy() for each in fixed]
        return self.image

    def cycles(self, arrays: list[Any]) -> int:
        """By the timing model."""
        return cycles(self.cfg, self.prepare(arrays))

    def __call__(self, arrays: list[Any], device: Any) -> dict[str, Any]:
        image, cfg = self.prepare(arrays), self.cfg
        (launch,) = image.launches
        machine = self.kernel.device(device)
        started = time.perf_counter()
        machine.allocate(image.size)
        machine.write(image.constants_address, image.constants)
        for array, act in self.lowered.acts.items():
            if array is not self.lowered.found.y:
                values_ = np.asarray(arrays[self.given[array]]).reshape(_images(array.shape))
                packed = pack.activation(
                    cfg, values_ if len(array.shape) == 2 else values_.transpose(0, 3, 1, 2), act.storage_groups
                )
                machine.write(image.addresses[act.storage], packed)
        counters = machine.run(launch.address, launch.count, TIMEOUT)
        y = self.lowered.found.y
        act = self.lowered.acts[y]
        data = machine.read(image.addresses[act.storage], act.size(cfg))
        result = pack.unpack_activation(cfg, data, act.dims, act.storage_groups)
        out = arrays[self.given[y]]
        out[...] = (result if len(y.shape) == 2 else result.transpose(0, 2, 3, 1)).reshape(out.shape)
        return {
            "target": "accelerator", "device": device if isinstance(device, str) else type(device).__name__,
            "config": cfg.name, "cycles": counters.cycles, "instructions": launch.count,
            "seconds": time.perf_counter() - started, "counters": counters.values,
        }  # fmt: skip


def _images(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape, 1, 1) if len(shape) == 2 else shape if len(shape) == 4 else (1, *shape)
