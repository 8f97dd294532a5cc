"""Interleave the tiles of some layers with those of a convolution, as soon as their inputs are complete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from celosia.compiler.layer import Layer, Storage
from celosia.compiler.tensorize.tiles import PipelineTile
from celosia.compiler.vthread.pipeline import Stream


@dataclass
class PlannedLayer:
    """A layer of a launch, with its tiles in order.

    needs, done: for each tile, rows of x that must be there before it and rows of y that are complete after it, counted
    through all images, or channel groups or columns where images have one row; only where this layer follows another,
    or another follows it. cut: whether sums stay in acc from tile to tile. at_once: whether its tiles that follow come
    before the next layer's loads.
    """

    number: int
    layer: Layer
    tiles: list[PipelineTile]
    ahead: int
    needs: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    cut: bool = False
    at_once: bool = False

    def start(self, stream: Stream, tile: PipelineTile) -> None:
        """Emit one of its tiles when its turn comes."""
        stream.start(self.number, self.layer.y.storage, tile.load, self.ahead)


LAG = 1
"""Tiles of a host that compute between what completes rows and what reads these through acc: else gemm would wait for
them to be stored and loaded."""
AHEAD = 2
"""Tiles of a host that load before the oldest has computed, where all of its companions take acc: with more of them acc
is full, and each gets its entries from the vector unit just when gemm needs them. Companions that take none keep the
vector unit for long, and gemm needs acc to work ahead."""


class OverlappedLayer:
    """A layer whose tiles are emitted between those of others. work: of each tile, in some unit. lag: tiles of the host
    for which it leaves rows that are complete."""

    def __init__(self, planned: PlannedLayer, host: PlannedLayer) -> None:
        self.planned, self.host, self.emitted = planned, host, 0
        kernel = planned.layer.window.kernel if planned.layer.reduce else (1, 1)
        self.work = [max(kernel[0] * kernel[1] * _moved(tile, False), _moved(tile, True)) for tile in planned.tiles]
        self.y, self.host_y = planned.layer.y.storage, host.layer.y.storage
        self.reads = {act.storage for act in planned.layer.inputs()}
        acc = planned.cut or any(map(_takes_acc, planned.tiles))
        self.lag = LAG if acc else 0
        # What either layer's tiles hold in acc from one to the next must not be taken.
        self.waits = planned.cut or (host.cut and not planned.needs and acc)

    @property
    def left(self) -> list[PipelineTile]:
        """Its tiles that have not been emitted."""
        return self.planned.tiles[self.emitted :]

    def is_ready(self, stream: Stream, done: int) -> bool:
        """Whether its next tile may come; done: rows of what the host makes that are complete."""
        if self.waits or self.emitted == len(self.planned.tiles):
            return False
        needs = self.planned.needs
        if any(stream.will_write(storage, self.host.number if needs else -1) for storage in self.reads):
            return False
        return not needs or needs[self.emitted] <= done

    @property
    def next_work(self) -> int:
        """Work of its next tile."""
        return self.work[self.emitted]

    def follow(self, stream: Stream) -> None:
        """Emit its next tile, whose operands are there."""
        planned, tile = self.planned, self.planned.tiles[self.emitted]
        stream.settled = self.host_y if planned.needs else None
        stream.follow(planned.number, planned.layer.y.storage, tile.load)
        stream.settled = None
        self.emitted += 1


class TileInterleaver:
    """Emit the tiles of a layer with those of its companions evenly between them, as soon as these are ready; then the
    rest of the companions' tiles."""

    def __init__(self, stream: Stream, host: PlannedLayer, companions: Sequence[PlannedLayer]) -> None:
        self.stream, self.host = stream, host
        self.companions = [OverlappedLayer(each, host) for each in companions]
        self.done = 0

    def run(self) -> None:
        """All of it."""
        total, tiles, begun = sum(sum(each.work) for each in self.companions), len(self.host.tiles), 0
        for count, tile in enumerate(self.host.tiles):
            self.host.start(self.stream, tile)
            computed = max(0, count + 1 - len(self.stream.waiting))
            if begun or (computed and self._next(computed) is not None):
                begun = begun or count
                self._follow(computed, total * (count - begun + 1) // (tiles - begun))
        if any(each.planned.at_once for each in self.companions):
            self._follow_the_last()
        for each in self.companions:
            for tile in each.left:
                each.planned.start(self.stream, tile)

    def _next(self, computed: int) -> OverlappedLayer | None:
        """One whose next tile may come, once so many of the host's tiles have computed."""
        unmade = set[Storage]()
        for each in self.companions:
            if each.reads.isdisjoint(unmade) and each.is_ready(self.stream, self._rows(computed - each.lag)):
                return each
            if each.left:
                unmade.add(each.y)
        return None

    def _rows(self, computed: int) -> int:
        """Rows of what the host makes that so many of its tiles complete."""
        return self.host.done[computed - 1] if computed > 0 and self.host.done else 0

    def _follow(self, computed: int, share: int) -> None:
        """Emit what is ready, up to this share of all work."""
        while (found := self._next(computed)) is not None and self.done + found.next_work <= share:
            self.done += found.next_work
            found.follow(self.stream)

    def _follow_the_last(self) -> None:
        """Emit tiles once what they need is there, while the last ones of the host, which have loaded, compute."""
        while any(each.left for each in self.companions):
            found = self._next(max(0, len(self.host.tiles) - len(self.stream.waiting)))
            if found is not None:
                found.follow(self.stream)
            elif not self.stream.advance():
                break


def _moved(tile: PipelineTile, loads: bool) -> int:
    """Pieces that it loads, or that it stores."""
    return sum(move.moved_pieces(tile.env) for move in tile.moves(loads=loads))


def _takes_acc(tile: PipelineTile) -> bool:
    return tile.node is not None and any(fill.scope == "acc" for fill in tile.node.fills)


GROUPS, ROWS, COLUMNS = 1, 2, 3
"""Axes of an activation's tensor."""


def rows_needed(tile: PipelineTile, axis: int = ROWS) -> int:
    """Rows of x, or what `axis` counts, counted through all images, up to the last that the tile loads."""
    last = 0
    for move in tile.moves(loads=True):
        if move.tensor.name == "x":
            (image, _), (_, end) = move.span(0, tile.env), move.span(axis, tile.env)
            last = max(last, image * move.tensor.shape[axis] + end)
    return last


def rows_done(tiles: list[PipelineTile], held: bool, axis: int = ROWS) -> list[int]:
    """For each tile, how many rows of y, or of what `axis` counts, are complete in all images once it has stored.

    held: sums stay in scratchpads from tile to tile, so that nothing may come between; all is done at the end.
    """
    rows = next(move.tensor.shape[axis] for tile in tiles for move in tile.moves(loads=False))
    images = next(move.tensor.shape[0] for tile in tiles for move in tile.moves(loads=False))
    if held:
        return [0] * (len(tiles) - 1) + [images * rows]
    boxes = [list(_stores(tile, rows, axis)) for tile in tiles]
    left = np.zeros(images * rows, np.int64)
    for first, end, pieces in chain(*boxes):
        left[first:end] += pieces
    done, whole = [], 0
    for box in boxes:
        for first, end, pieces in box:
            left[first:end] -= pieces
        while whole < len(left) and not left[whole]:
            whole += 1
        done.append(whole)
    return done


def _stores(tile: PipelineTile, rows: int, axis: int) -> Iterator[tuple[int, int, int]]:
    """The first of the rows that it stores, counted through images of `rows`, the end of them, and pieces of each."""
    for move in tile.moves(loads=False):
        (image, _), (first, end) = move.span(0, tile.env), move.span(axis, tile.env)
        if pieces := move.moved_pieces(tile.env):
            yield image * rows + first, image * rows + end, pieces // (end - first)
