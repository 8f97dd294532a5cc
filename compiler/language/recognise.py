"""Recognise what a traced kernel computes for the accelerator: a sum of products or a maximum, with an epilogue.

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

from celosia.compiler.language.attention_kernels import (
    AttentionKernel,
    AttentionReader,
    HeadsKernel,
    SoftmaxKernel,
    is_attention,
    is_product_of_heads,
)
from celosia.compiler.language.block_reader import (
    ON_CPU,
    BlockReader,
    Values,
    before_reshapes,
    element_order,
    is_equal,
    is_in_order,
    source_of_view,
)
from celosia.compiler.language.tile import ArrayArgument, KernelRun, Tile, fail
from celosia.compiler.layer import Window

Displacement = tuple[int, ...]
"""Distance of a read position from the written one, for each dimension except channels."""
EPILOGUE = ("requantise", "lookup", "residual")
"""Operations of tiles that follow a sum or maximum on the accelerator."""


@dataclass
class RecognisedLayer:
    """A kernel that is one layer: a sum of products, a maximum or an element-wise function, with an epilogue.

    y, x, w, par, table, residual: arrays of the call: output, input, weights, requantisation parameters, lookup table,
    addend. Those that the kernel lacks are None. tile: the block of y that a program writes. window, strides, pad: of
    the convolution or pooling. taps: for each row and column of the window, the remaining indices of w. axes: the
    dimensions of w that count outputs and inputs. pool: whether the kernel is a maximum. w_at: the line that loads w.
    attributes: zero point and clip of the requantise. rescale: scales, shift and clip of the residual_add.
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
    attributes: dict[str, Any] = field(default_factory=dict)
    rescale: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ReductionPattern:
    """A reduction that the accelerator can do.

    name: operation of a "binary" tile that combines two terms. leaf: operation of a term. initial_value: of the
    reduction. description, initial_text: both in words, for errors.
    """

    name: str
    leaf: str
    initial_value: int
    description: str
    initial_text: str


@dataclass(frozen=True)
class ProductTerm:
    """One cl.dot in one iteration of the loops, as a part of a convolution or matrix product.

    displacement: of the block of x from the block of y. channel: the first channel of x that is read; depth: how many.
    tap: remaining indices of w: the position in its window. w_channel: the first input channel of w that is read.
    """

    displacement: Displacement
    channel: int
    depth: int
    tap: tuple[int, ...]
    w_channel: int


SUM = ReductionPattern("add", "dot", 0, "adds up cl.dot", "zero")
MAXIMUM = ReductionPattern("max", "load", -128, "takes the maximum of loads", "-128")
"""The two reductions over a window and channels that the accelerator has: convolution and pooling."""


def recognise(
    run: KernelRun, varying: Collection[ArrayArgument] = ()
) -> RecognisedLayer | SoftmaxKernel | AttentionKernel | HeadsKernel:
    """Recognise which layer of the accelerator a kernel computes. Raises LanguageError, which names the broken rule.

    varying: arrays whose values change from run to run, besides those that are `quantised`; others may become constants
    of the layer.
    """
    reader = _Reader(run)
    value = before_reshapes(reader.store.value)
    if value.op == "cast":
        return SoftmaxKernel.read(reader, value)
    if is_attention(value):
        return AttentionReader(reader).read_attention(value)
    if is_product_of_heads(reader, value, varying):
        return AttentionReader(reader).read_product(value)
    return reader.read()


class _Reader(BlockReader):
    """Reads the sum of products or the maximum that makes a block of y."""

    def read(self) -> RecognisedLayer:
        """Recognise the kernel from its store upwards: residual, table, requantise, then the reduction."""
        y = self.y
        kernel = RecognisedLayer(y, self.shape, y)
        epilogue, value = self.split_epilogue(before_reshapes(self.store.value))
        if epilogue.residual is not None:
            kernel.residual = self.activation(epilogue.residual, "what a residual_add adds")
            kernel.rescale = epilogue.rescale
        if epilogue.table is not None:
            kernel.table = self.complete_array(epilogue.table, "a table")
        if value.op == "requantise":
            kernel.par, kernel.attributes = self.parameters(value.args[1]), value.attributes
            self._read_sum(value.args[0], kernel)
        elif value.op == "load":
            kernel.x = self.activation(value, "an elementwise kernel")
        elif value.op == "result" or (
            value.attributes.get("name") == "max" and all(before_reshapes(arg).op not in EPILOGUE for arg in value.args)
        ):
            self._read_maximum(value, kernel)
        else:
            operation = value.attributes.get("name", value.op)
            fail(
                "the vector unit requantises a sum of cl.dot or takes the cl.maximum of a window, looks up and adds a "
                f"residual, in this order, and no {operation}{ON_CPU}", value.at
            )  # fmt: skip
        if y in (kernel.x, kernel.w, kernel.residual, kernel.table, kernel.par):
            self.refuse(f"{y.name} is read and written; the accelerator needs another array for its output")
        return kernel

    # Windows ------------------------------------------------------------------------------------------------------

    def _read_sum(self, acc: Tile, kernel: RecognisedLayer) -> None:
        """Recognise `acc` as a sum of products over channels and the positions of a window, and complete `kernel`."""
        terms = list(self._reduction_terms(acc, SUM))
        if not terms:
            fail(f"the accelerator requantises a sum of cl.dot{ON_CPU}", acc.at)
        products = [product for dot in terms for product in self._product_terms(dot, kernel)]
        self._derive_window(self._match_channels(products, kernel, terms[0].at), kernel, terms[0].at)

    def _read_maximum(self, value: Tile, kernel: RecognisedLayer) -> None:
        """Recognise `value` as the maximum of a window of one array of images, and complete `kernel`."""
        window_positions: dict[Displacement, tuple[int, ...]] = {}
        for tile in self._reduction_terms(value, MAXIMUM):
            load, starts, dims = self.load(tile, "what a window has the maximum of", moving=True)
            array, y, at = load.attributes["array"], self.y, load.at
            if kernel.x not in (y, array) or array.dtype != "int8" or dims != self.shape:
                fail(f"a window has the maximum of blocks {list(self.shape)} of one array of int8", at)
            if array.shape[-1] != y.shape[-1] or len(y.shape) < 3:
                fail(f"a window is of images, and has as many channels as {y.name}; {array.name} has not", at)
            kernel.x = array
            distances = [*self._displacements(load, starts, kernel), starts[-1] - self.starts[-1]]
            for *displacement, channel_distance in self._values_by_iteration(distances, at):
                if channel_distance:
                    fail(f"the channels of {array.name} are not those of {y.name}", at)
                window_positions[tuple(displacement)] = ()
        self._derive_window(window_positions, kernel, value.at)
        kernel.pool = True

    def _reduction_terms(self, tile: Tile, kind: ReductionPattern, end: Tile | None = None) -> Iterator[Tile]:
        """Yield the products or loads that are reduced to `tile`.

        end: the placeholder with which an iteration starts, at which the terms of that iteration end. Raises
        LanguageError for a term that is neither of the kind's operation nor its initial value.
        """
        tile = before_reshapes(tile)
        if tile is end:
            return
        if tile.op == kind.leaf:
            yield tile
            if tile.op == "dot" and len(tile.args) == 3:
                yield from self._reduction_terms(tile.args[2], kind, end)
        elif tile.op == "result":
            first, placeholder, last = next(row[:3] for loop in self.loops for row in loop.carried if row[3] is tile)
            if not _starts_with(last, placeholder, kind):
                fail(f"the accelerator {kind.description}, and what this loop carries is another sum{ON_CPU}", last.at)
            yield from self._reduction_terms(last, kind, placeholder)
            yield from self._reduction_terms(first, kind, end)
        elif tile.op == "binary" and tile.attributes["name"] == kind.name:
            yield from self._reduction_terms(tile.args[0], kind, end)
            yield from self._reduction_terms(tile.args[1], kind, end)
        elif (zero := source_of_view(tile)).op != "const" or zero.attributes["number"] != kind.initial_value:
            operation = tile.attributes.get("name", tile.op)
            actual = f"not from {zero.attributes['number']}" if zero.op == "const" else f"no {operation}"
            fail(f"the accelerator {kind.description} from {kind.initial_text}, and {actual}{ON_CPU}", tile.at)

    def _product_terms(self, dot: Tile, kernel: RecognisedLayer) -> list[ProductTerm]:
        """Return the blocks that a cl.dot multiplies, for each iteration, and set x, w and axes of `kernel`.

        Raises LanguageError for operands that no convolution or matrix product has.
        """
        a, xs, xdims = self.load(dot.args[0], "a side of cl.dot", moving=True)
        b, ws, wdims = self.load(dot.args[1], "the other side of cl.dot")
        if a.dtype != "int8":
            fail(f"gemm multiplies int8, and this is {a}{ON_CPU}", dot.at)
        x, w, y = a.attributes["array"], b.attributes["array"], self.y
        if kernel.w is not None and (x is not kernel.x or w is not kernel.w):
            message = f"the accelerator sums products of one array by one of weights, not {x.name} by {w.name}"
            fail(message + ON_CPU, dot.at)
        kernel.x, kernel.w, kernel.w_at = x, w, b.at
        if len(xdims) != len(self.shape) or xdims[:-1] != self.shape[:-1] or not is_in_order(dot.args[0], a):
            fail(
                f"the rows of a product are those of its output, channels last; {x.name} is read as {list(xdims)} for "
                f"{list(self.shape)} of {y.name}", dot.at
            )  # fmt: skip
        kernel.axes = out, into = self._weight_axes(dot, b, wdims)
        if self.padding_value(b) != w.zero_point:
            fail(f"weights beyond the last are {w.zero_point}, and `other` of {w.name} is not", b.at)
        tap_starts = [start for d, start in enumerate(ws) if d not in (out, into)]
        displacements = self._displacements(a, xs, kernel)
        n = len(displacements)
        rows = self._values_by_iteration(
            [*displacements, xs[-1], ws[into], *tap_starts, ws[out] - self.starts[-1]], dot.at
        )
        if any(row[-1] for row in rows):
            fail(f"the outputs of the weights are not the columns of {y.name}", dot.at)
        depth, _ = dot.args[1].shape
        terms = []
        for row in rows:
            channel, w_channel, *tap = row[n:-1]
            terms.append(ProductTerm(row[:n], channel, depth, tuple(tap), w_channel))
        return terms

    def _weight_axes(self, dot: Tile, b: Tile, dims: tuple[int, ...]) -> tuple[int, int]:
        """Return the dimensions of the weights that count outputs and inputs. Raises LanguageError.

        b: the load of the weights. dims: the sizes of its block.
        """
        depth, columns = dot.args[1].shape
        element_numbers = element_order(dot.args[1], b)
        steps = [int(np.prod(dims[d + 1 :])) for d in range(len(dims))]

        def dimension_along(line: NDArray[Any]) -> int | None:
            """Return the dimension of the block along which the elements `line` follow each other."""
            step = int(line[-1] - line[0]) // max(len(line) - 1, 1)
            return next((d for d, size in enumerate(dims) if (size, steps[d]) == (len(line), step)), None)

        output_axis, input_axis = dimension_along(element_numbers[0]), dimension_along(element_numbers[:, 0])
        if output_axis is None or input_axis is None or output_axis == input_axis or b.size != depth * columns:
            fail(
                f"weights are a block of outputs by inputs, and {b.attributes['array'].name} is read as {list(dims)}",
                dot.at,
            )
        return output_axis, input_axis

    def _displacements(self, load: Tile, starts: Values, kernel: RecognisedLayer) -> list[NDArray[Any]]:
        """Return the displacement of a block of x from the written one, for each dimension except channels.

        Sets strides and pad of `kernel`, which must be the same for all positions of the window.
        """
        name, steps = load.attributes["array"].name, load.attributes["block"][2]
        strides = steps[-3:-1] if len(steps) > 2 else (1, 1)
        if steps != ((1,) * len(steps))[:-3] + (*strides, 1)[-len(steps) :]:
            fail(
                f"rows and columns of images alone have steps on the accelerator, and {name} is read in {list(steps)}",
                load.at,
            )
        if kernel.strides is not None and (kernel.strides, kernel.pad) != (strides, self.padding_value(load)):
            fail(f"`other` and `steps` of {name} are the same in a whole window on the accelerator", load.at)
        kernel.strides, kernel.pad = strides, self.padding_value(load)
        return [x - step * y for x, y, step in zip(starts[:-1], self.starts[:-1], steps)]

    def _values_by_iteration(self, quantities: Sequence[NDArray[Any]], at: str) -> list[tuple[int, ...]]:
        """Return, for each iteration of the loops, the value of each quantity.

        Raises LanguageError where programs differ: a block is then not read relative to the written one.
        """
        shape = np.broadcast_shapes(*(quantity.shape for quantity in quantities))
        columns = []
        for quantity in quantities:
            first = np.broadcast_to(quantity[:1, :1, :1], (1, 1, 1, *shape[3:]))
            if not is_equal(quantity, first):
                fail(
                    "programs read different blocks than those that belong to what they write: rows move with the rows "
                    f"of {self.y.name}, outputs of the weights with its columns, one for one{ON_CPU}", at
                )  # fmt: skip
            columns.append(map(int, first.ravel()))
        return list(zip(*columns))

    def _match_channels(
        self, terms: list[ProductTerm], kernel: RecognisedLayer, at: str
    ) -> dict[Displacement, tuple[int, ...]]:
        """Return the index of w for each displacement. Raises LanguageError unless all channels are added up there."""
        assert kernel.w is not None
        x, w, y, depth = kernel.x, kernel.w, kernel.y, terms[0].depth
        taps: dict[Displacement, tuple[int, ...]] = {}
        channels_at: dict[Displacement, list[int]] = {}
        for term in terms:
            if term.channel != term.w_channel or taps.setdefault(term.displacement, term.tap) != term.tap:
                fail(
                    f"channel {term.channel} of {x.name} meets channel {term.w_channel} of {w.name}; they go together "
                    "one for one", at
                )  # fmt: skip
            channels_at.setdefault(term.displacement, []).append(term.channel)
        expected = list(range(0, x.shape[-1], depth))
        if (
            any(sorted(channels_seen) != expected for channels_seen in channels_at.values())
            or w.shape[kernel.axes[1]] != x.shape[-1]
        ):
            fail(
                f"the sum over channels is from 0 to {x.shape[-1]} in steps of {depth}, each once, and over as many of "
                f"{w.name}; here it is not", at
            )  # fmt: skip
        if w.shape[kernel.axes[0]] != y.shape[-1]:
            fail(f"{w.name} has {w.shape[kernel.axes[0]]} outputs and {y.name} {y.shape[-1]} columns", at)
        return taps

    def _derive_window(self, taps: dict[Displacement, tuple[int, ...]], kernel: RecognisedLayer, at: str) -> None:
        """Derive sizes, strides, dilations and pads of the window from the displacements. Raises LanguageError.

        taps: index of w for each displacement; () for a maximum.
        """
        x, y = kernel.x, kernel.y
        if len(y.shape) == 2:
            if list(taps) != [(0,)] or x.shape[0] != y.shape[0]:
                fail("the rows of a matrix product are those of its output", at)
            kernel.taps = [list(taps.values())]
            return
        if any(any(displacement[:-2]) for displacement in taps) or x.shape[:-3] != y.shape[:-3]:
            fail("a window is within one image", at)
        moves = {displacement[-2:]: tap for displacement, tap in taps.items()}
        sides = [sorted({move[d] for move in moves}) for d in (0, 1)]
        steps = [_even_step(side) for side in sides]
        if list(product(*sides)) != sorted(moves) or 0 in steps:
            fail("the places of a window are rows by columns, in even steps", at)
        assert kernel.strides is not None
        low = [-side[0] for side in sides]
        high = [
            (output_size - 1) * stride + side[-1] - (input_size - 1)
            for output_size, stride, side, input_size in zip(y.shape[-3:-1], kernel.strides, sides, x.shape[-3:-1])
        ]
        if min(low) < 0 or any(beyond <= -stride for beyond, stride in zip(high, kernel.strides)):
            fail("a window begins at the first row and column of what it reads, and ends at the last", at)
        pads = (low[0], low[1], max(high[0], 0), max(high[1], 0))
        kernel.window = Window((len(sides[0]), len(sides[1])), kernel.strides, (steps[0], steps[1]), pads)
        kernel.taps = [[moves[r, c] for c in sides[1]] for r in sides[0]]


def _even_step(side: list[int]) -> int:
    """Return the constant step of a sequence; 0 where it changes."""
    steps = {b - a for a, b in pairwise(side)} or {1}
    return steps.pop() if len(steps) == 1 else 0


def _starts_with(tile: Tile, initial: Tile, kind: ReductionPattern) -> bool:
    """Return whether the reduction `tile` continues the carried tile `initial`, so that iterations share one result."""
    tile = before_reshapes(tile)
    while tile is not initial:
        if tile.op == "dot" and len(tile.args) == 3:
            tile = before_reshapes(tile.args[2])
        elif tile.op == "binary" and tile.attributes["name"] == kind.name:
            return any(_starts_with(arg, initial, kind) for arg in tile.args)
        else:
            return tile.op == "result"
    return True
