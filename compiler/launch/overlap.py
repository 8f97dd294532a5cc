"""Overlap layers that need different units, by emitting the tiles of some between those of others.

    conv tile 0, conv tile 1, pool tile 0, conv tile 2, pool tile 1, ...

GEMM is idle during a pooling, an elementwise layer, a norm or a softmax, and while a convolution waits for memory.
Other convolutions leave the vector unit and memory idle. `OverlapGroups` divides the layers of a launch into hosts and
guests: it decides which layers may overlap. `TileInterleaver` emits the tiles of a group: it decides how they mix.
order.py decides which layers are neighbours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from celosia.compiler.layer import Layer, Storage
from celosia.compiler.tensorize.space import CompletionOrder
from celosia.compiler.tensorize.tiles import PipelineTile
from celosia.compiler.vthread.pipeline import Stream
from celosia.hw.spec.config import Config

# Units ------------------------------------------------------------------------------------------------------------


def is_elementwise(layer: Layer) -> bool:
    """Return whether the layer is a pooling, a map or a multiplication."""
    return (bool(layer.reduce) and not layer.sums_on_gemm) or layer.multiply is not None or layer.is_map


def is_for_vector(cfg: Config, layer: Layer) -> bool:
    """Return whether GEMM has nothing to do for the layer, and its tiles may be emitted between those of others."""
    return is_elementwise(layer) or layer.is_depthwise(cfg)


def keeps_gemm_busy(cfg: Config, layer: Layer) -> bool:
    """Return whether GEMM works for most of the layer, as for images; products with one row wait for weights."""
    return layer.uses_gemm(cfg) and layer.y.height * layer.y.width > 1


def takes_acc(cfg: Config, layer: Layer) -> bool:
    """Return whether a guest needs entries of acc, for sums or for an operand A."""
    if layer.norm is not None:
        return False
    return layer.multiply is not None or layer.epilogue.residual is not None or keeps_gemm_busy(cfg, layer)


# Dependences ------------------------------------------------------------------------------------------------------


def depends(cfg: Config, layer: Layer, producer: Layer) -> bool:
    """Return whether `layer` reads pieces that `producer` writes."""
    return any(act.overlaps(cfg, producer.y) for act in layer.inputs())


def producers(cfg: Config, layers: Sequence[Layer]) -> list[set[int]]:
    """Return, for each layer, the numbers of the earlier layers that write its inputs."""
    writers: dict[Storage, list[int]] = {}
    result: list[set[int]] = []
    for number, layer in enumerate(layers):
        earlier = {n for act in layer.inputs() for n in writers.get(act.storage, ())}
        result.append({n for n in earlier if depends(cfg, layer, layers[n])})
        writers.setdefault(layer.y.storage, []).append(number)
    return result


def shares_storage(layer: Layer, producer: Layer) -> bool:
    """Return whether `layer` reads from the storage that `producer` writes to, perhaps other parts of it."""
    return any(act.storage is producer.y.storage for act in layer.inputs())


def follows(producer: Layer, layer: Layer) -> bool:
    """Return whether x of `layer` is y of `producer`, and its tiles may be emitted between those of `producer`.

    The producer must be a convolution or, before a norm, a block of a convolution and maps.
    """
    if layer.x != producer.y or layer.x.height * layer.x.width == 1:
        return False
    if layer.norm is not None and producer.is_block and producer.layers[-1].is_map:
        producer = producer.layers[0]
    return producer.gemm is not None and (is_elementwise(layer) or layer.norm is not None)


def reads_rows_of(producer: Layer, layer: Layer) -> bool:
    """Return whether `layer` reads images of which `producer` writes some channels, in the same layout and once.

    It can then read rows as soon as they are complete, while `producer` computes others.
    """
    if layer.sums_on_gemm:
        return False  # its tiles read images in parts of pixels and groups
    x, y = layer.x, producer.y
    same_layout = x.storage is y.storage and x.strided_view is y.strided_view is None
    reads_once = sum(act.storage is y.storage for act in layer.inputs()) == 1
    return (
        same_layout and reads_once and x.height > 1 and (x.images, x.height, x.width) == (y.images, y.height, y.width)
    )


# Groups -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OverlapGroup:
    """Numbers of consecutive layers whose tiles are emitted together: those of guests between those of hosts.

    wait: the host is one convolution, and a tile of a guest is emitted once its inputs are complete. Otherwise the
    hosts are softmaxes, and the guest is the convolution after them, which needs none of them.
    """

    hosts: tuple[int, ...]
    guests: tuple[int, ...] = ()
    wait: bool = True

    @property
    def leader(self) -> int:
        """The convolution of the group, or its only layer."""
        return self.hosts[0] if self.wait else self.guests[0]


class OverlapGroups:
    """The groups of a launch, in the order of its layers.

    overlapped: names of layers that are guests because order.py moved them behind a host, not because they read it.
    """

    def __init__(self, cfg: Config, layers: Sequence[Layer], overlapped: Collection[str]) -> None:
        self.layers, self.overlapped = layers, overlapped
        self.groups: list[OverlapGroup] = []
        self.host_of: dict[int, int] = {}
        """Waiting guest -> the convolution that it overlaps with."""
        for number in range(len(layers)):
            if number in self.host_of:
                continue
            guests = tuple(_waiting_guests(cfg, layers, number, overlapped))
            softmaxes = () if guests else softmaxes_before(layers, number)
            if softmaxes:
                self.groups[-len(softmaxes) :] = [OverlapGroup(softmaxes, (number,), wait=False)]
            else:
                self.groups.append(OverlapGroup((number,), guests))
                self.host_of |= dict.fromkeys(guests, number)
        self.waiting = {group.leader: group.guests for group in self.groups if group.wait and group.guests}
        """Convolution -> its guests that wait for their inputs."""

    def readers_of(self, number: int) -> list[Layer]:
        """Return the guests of a layer that read its output."""
        return [self.layers[guest] for guest in self.waiting.get(number, ()) if self.reads_its_host(guest)]

    def reads_its_host(self, number: int) -> bool:
        """Return whether a layer is a guest whose x is in the storage that its host writes."""
        host = self.host_of.get(number)
        return host is not None and self.layers[host].y.storage is self.layers[number].x.storage

    def completion_order(self, number: int) -> CompletionOrder:
        """Return the parts of a layer's output that its guests need complete first.

        These are rows, or whole pixels (columns) for a norm of images of one row; any parts without a reading guest.
        """
        readers = self.readers_of(number)
        if readers:
            by_columns = readers[0].norm is not None and self.layers[number].y.height == 1
            return CompletionOrder.COLUMNS if by_columns else CompletionOrder.ROWS
        waits_for_rows = self.reads_its_host(number) and self.layers[number].name in self.overlapped
        return CompletionOrder.ROWS if waits_for_rows else CompletionOrder.ANY


def _waiting_guests(cfg: Config, layers: Sequence[Layer], number: int, overlapped: Collection[str]) -> Iterator[int]:
    """Yield the guests of layer `number`: one that reads it next, and those that order.py moved behind it."""
    host = layers[number]
    has_gemm_work = keeps_gemm_busy(cfg, host)
    for guest in range(number + 1, len(layers)):
        layer = layers[guest]
        may_overlap = has_gemm_work and (not shares_storage(layer, host) or reads_rows_of(host, layer))
        is_next = guest == number + 1 and follows(host, layer)
        if not (layer.name in overlapped and may_overlap) and not is_next:
            return
        yield guest


def softmaxes_before(layers: Sequence[Layer], number: int) -> tuple[int, ...]:
    """Return the softmaxes directly before a convolution that needs none of them.

    They leave GEMM idle, and the convolution has work for it.
    """
    layer, first = layers[number], number
    if layer.gemm is None:
        return ()
    while first and layers[first - 1].softmax is not None and not shares_storage(layer, layers[first - 1]):
        first -= 1
    return tuple(range(first, number))


# Tiles ------------------------------------------------------------------------------------------------------------


@dataclass
class PlannedLayer:
    """A layer of a launch, with its tiles in order.

    number: of the layer in the launch. ahead: tiles that may load before the oldest has computed. needs, done: for each
    tile, how many rows of x must be complete before it, and how many rows of y are complete after it. Rows are counted
    through all images; images of one row count channel groups or columns. Both are empty unless this layer reads its
    host, or a guest reads this layer. keeps_sums: whether sums stay in acc from tile to tile. at_once: whether the
    remaining tiles are emitted before the next layer's loads.
    """

    number: int
    layer: Layer
    tiles: list[PipelineTile]
    ahead: int
    needs: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    keeps_sums: bool = False
    at_once: bool = False

    def start(self, stream: Stream, tile: PipelineTile) -> None:
        """Emit one of the layer's tiles: its loads now, the rest in its turn."""
        stream.start(self.number, self.layer.y.storage, tile.load, self.ahead)


ACC_GUEST_LAG = 1
"""Tiles of the host that compute between the one that completes rows and a guest that reads these through acc.

With fewer, GEMM would wait until the rows are stored and loaded.
"""
HOST_TILES_AHEAD = 2
"""Tiles of a host that load before the oldest has computed, if all of its guests take acc.

With more, acc is full, and each tile gets its entries from the vector unit only when GEMM needs them. Guests that take
no acc occupy the vector unit for long, and then GEMM needs acc to work ahead.
"""


def emit_group(stream: Stream, hosts: Sequence[PlannedLayer], guests: Sequence[PlannedLayer], wait: bool) -> None:
    """Emit the tiles of an `OverlapGroup`. wait: see there."""
    if wait:
        TileInterleaver(stream, hosts[0], guests).run()
    else:
        _spread_evenly(stream, hosts, guests[0])


def _spread_evenly(stream: Stream, hosts: Sequence[PlannedLayer], guest: PlannedLayer) -> None:
    """Emit the tiles of all hosts, and evenly between them those of a guest that waits for none of them."""
    tiles = [(host, tile) for host in hosts for tile in host.tiles]
    emitted = 0
    for count, (host, tile) in enumerate(tiles, 1):
        host.start(stream, tile)
        due = len(guest.tiles) * count // len(tiles)
        for guest_tile in guest.tiles[emitted:due]:
            guest.start(stream, guest_tile)
        emitted = due


class GuestTiles:
    """The tiles of a guest that have not been emitted.

    work: of each tile, the larger of pieces read (times taps of a pooling's window) and written. reads: storages of its
    operands. lag: tiles of the host after the one that completed rows, before the guest may read these. waits: whether
    all tiles wait for the end of the host.
    """

    def __init__(self, planned: PlannedLayer, host: PlannedLayer) -> None:
        self.planned, self.host, self.emitted = planned, host, 0
        kernel = planned.layer.window.kernel if planned.layer.reduce else (1, 1)
        self.work = [
            max(kernel[0] * kernel[1] * _moved_pieces(tile, False), _moved_pieces(tile, True)) for tile in planned.tiles
        ]
        self.y, self.host_y = planned.layer.y.storage, host.layer.y.storage
        self.reads = {act.storage for act in planned.layer.inputs()}
        needs_acc = planned.keeps_sums or any(map(_tile_takes_acc, planned.tiles))
        self.lag = ACC_GUEST_LAG if needs_acc else 0
        # Tiles of the other layer must not take entries of acc that hold sums from one tile to the next.
        self.waits = planned.keeps_sums or (host.keeps_sums and not planned.needs and needs_acc)

    @property
    def remaining(self) -> list[PipelineTile]:
        """The tiles that have not been emitted."""
        return self.planned.tiles[self.emitted :]

    def is_ready(self, stream: Stream, done: int) -> bool:
        """Return whether the next tile may be emitted; done: rows of the host's output that are complete."""
        if self.waits or self.emitted == len(self.planned.tiles):
            return False
        needs = self.planned.needs
        if any(stream.will_write(storage, self.host.number if needs else -1) for storage in self.reads):
            return False
        return not needs or needs[self.emitted] <= done

    @property
    def next_work(self) -> int:
        """The work of the next tile."""
        return self.work[self.emitted]

    def emit_next(self, stream: Stream) -> None:
        """Emit the next tile, whose operands are complete."""
        planned, tile = self.planned, self.planned.tiles[self.emitted]
        stream.settled = self.host_y if planned.needs else None
        stream.follow(planned.number, planned.layer.y.storage, tile.load)
        stream.settled = None
        self.emitted += 1


class TileInterleaver:
    """Emits the tiles of a host, and evenly between them those of its guests that are ready; then the guests' rest.

    Guests get the share of their total work that corresponds to the share of the host's tiles emitted so far.
    """

    def __init__(self, stream: Stream, host: PlannedLayer, guests: Sequence[PlannedLayer]) -> None:
        self.stream, self.host = stream, host
        self.guests = [GuestTiles(guest, host) for guest in guests]
        self.work_done = 0

    def run(self) -> None:
        """Emit all tiles of the group."""
        total, tiles, begun = sum(sum(guest.work) for guest in self.guests), len(self.host.tiles), 0
        for count, tile in enumerate(self.host.tiles):
            self.host.start(self.stream, tile)
            computed = max(0, count + 1 - len(self.stream.waiting))
            if begun or (computed and self._next_ready(computed) is not None):
                begun = begun or count
                self._emit_share(computed, total * (count - begun + 1) // (tiles - begun))
        if any(guest.planned.at_once for guest in self.guests):
            self._follow_last_tiles()
        for guest in self.guests:
            for tile in guest.remaining:
                guest.planned.start(self.stream, tile)

    def _next_ready(self, computed: int) -> GuestTiles | None:
        """Return a guest whose next tile may be emitted after `computed` tiles of the host have; None without one."""
        incomplete = set[Storage]()
        for guest in self.guests:
            if guest.reads.isdisjoint(incomplete) and guest.is_ready(
                self.stream, self._complete_rows(computed - guest.lag)
            ):
                return guest
            if guest.remaining:
                incomplete.add(guest.y)
        return None

    def _complete_rows(self, computed: int) -> int:
        """Return the rows of the host's output that its first `computed` tiles complete."""
        return self.host.done[computed - 1] if computed > 0 and self.host.done else 0

    def _emit_share(self, computed: int, share: int) -> None:
        """Emit tiles that are ready, until the guests have done `share` of their work."""
        while (guest := self._next_ready(computed)) is not None and self.work_done + guest.next_work <= share:
            self.work_done += guest.next_work
            guest.emit_next(self.stream)

    def _follow_last_tiles(self) -> None:
        """Emit guests' tiles as their inputs become complete, while the host's last tiles, which have loaded,
        compute."""
        while any(guest.remaining for guest in self.guests):
            guest = self._next_ready(max(0, len(self.host.tiles) - len(self.stream.waiting)))
            if guest is not None:
                guest.emit_next(self.stream)
            elif not self.stream.advance():
                break


def _moved_pieces(tile: PipelineTile, loads: bool) -> int:
    """Return the pieces that a tile loads, or that it stores."""
    return sum(move.moved_pieces(tile.env) for move in tile.moves(loads=loads))


def _tile_takes_acc(tile: PipelineTile) -> bool:
    """Return whether a tile loads into acc."""
    return tile.node is not None and any(fill.scope == "acc" for fill in tile.node.fills)


GROUPS, ROWS, COLUMNS = 1, 2, 3
"""Axes of an activation's tensor [images, groups, rows, columns, ...]."""


def rows_needed(tile: PipelineTile, axis: int = ROWS) -> int:
    """Return the end of the rows of x that a tile loads, counted through all images; `axis` may count other parts."""
    last = 0
    for move in tile.moves(loads=True):
        if move.tensor.name == "x":
            (image, _), (_, end) = move.span(0, tile.env), move.span(axis, tile.env)
            last = max(last, image * move.tensor.shape[axis] + end)
    return last


def rows_done(tiles: list[PipelineTile], held: bool, axis: int = ROWS) -> list[int]:
    """Return, for each tile, how many rows of y are complete, counted through all images, once it has stored.

    axis: other parts than rows may be counted. held: sums stay in scratchpads from tile to tile, so that no guest may
    come between; all rows count as complete at the end.
    """
    rows = next(move.tensor.shape[axis] for tile in tiles for move in tile.moves(loads=False))
    images = next(move.tensor.shape[0] for tile in tiles for move in tile.moves(loads=False))
    if held:
        return [0] * (len(tiles) - 1) + [images * rows]
    stores_of_tiles = [list(_stored_rows(tile, rows, axis)) for tile in tiles]
    missing_pieces = np.zeros(images * rows, np.int64)
    for first, end, pieces in chain(*stores_of_tiles):
        missing_pieces[first:end] += pieces
    done, complete = [], 0
    for stores in stores_of_tiles:
        for first, end, pieces in stores:
            missing_pieces[first:end] -= pieces
        while complete < len(missing_pieces) and not missing_pieces[complete]:
            complete += 1
        done.append(complete)
    return done


def _stored_rows(tile: PipelineTile, rows: int, axis: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first row, end of rows, pieces of each) of each store of a tile; rows are counted through all images."""
    for move in tile.moves(loads=False):
        (image, _), (first, end) = move.span(0, tile.env), move.span(axis, tile.env)
        if pieces := move.moved_pieces(tile.env):
            yield image * rows + first, image * rows + end, pieces // (end - first)
