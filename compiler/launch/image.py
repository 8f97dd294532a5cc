"""Layers to one image of the accelerator's DRAM: activations, constants, and the instructions of each launch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.expr.nodes import Tensor
from celosia.compiler.launch.memory import Lifetime, plan
from celosia.compiler.layer import Block, Conv, Layer, Map, Multiply, Norm, Pool, Softmax, Storage, Untileable, inputs
from celosia.compiler.tensorize.constants import Constants
from celosia.compiler.tensorize.instruction import RenderError
from celosia.compiler.tensorize.plan import LayerPart, Planner
from celosia.compiler.tensorize.space import CUT, First
from celosia.compiler.tensorize.tiles import PipelineTile, PlacedPlan
from celosia.compiler.vthread.books import load_books
from celosia.compiler.vthread.emit import encode
from celosia.compiler.vthread.need import by_need
from celosia.compiler.vthread.pipeline import Stream, Stuck
from celosia.compiler.vthread.spread import spread_weights
from celosia.compiler.vthread.tokens import insert_tokens
from celosia.hw.config import Config
from celosia.hw.isa import Opcode
from celosia.sim.touches import complete, rows


class LayerErrors(Exception):
    """Layers that cannot be lowered: the reason by (launch, layer), both numbers."""

    def __init__(self, reasons: dict[tuple[int, int], str]) -> None:
        super().__init__("; ".join(reasons.values()))
        self.reasons = reasons


@dataclass(frozen=True)
class Launch:
    """One run of the accelerator: `count` instructions at DRAM offset `address`; the layer of each."""

    address: int
    count: int
    instruction_bytes: int
    layer_of: NDArray[np.int32]
    bytes_loaded: list[int]
    bytes_stored: list[int]
    parts: list[list[LayerPart]]
    """Of each layer."""


@dataclass(frozen=True)
class Image:
    """What lies in DRAM: [activations][constants][instructions].

    `addresses` gives the offset of each storage of activations; `constants` (weights, parameters, tables, then the
    instructions of all launches) begin at `constants_address`; `size` is the whole.
    """

    addresses: dict[Storage, int]
    constants_address: int
    constants: NDArray[np.uint8]
    launches: list[Launch]
    size: int
    arena_lower_bound: int

    def code(self, launch: Launch) -> NDArray[np.uint8]:
        """The instructions of `launch`, [count, bytes of one]."""
        start = launch.address - self.constants_address
        rest = self.constants[start:]
        return rest[: launch.count * launch.instruction_bytes].reshape(launch.count, -1)


def lifetimes(
    cfg: Config, launches: list[list[Layer]], written: list[set[Storage]], read: list[set[Storage]]
) -> list[Lifetime]:
    """When each storage is in use, in steps of one layer.

    written[i], read[i]: storages that the host fills before launch i, and takes after it.
    """
    sizes: dict[Storage, int] = {}
    first: dict[Storage, int] = {}
    last: dict[Storage, int] = {}

    def use(storage: Storage, step: int) -> None:
        first[storage] = min(first.get(storage, step), step)
        last[storage] = max(last.get(storage, step), step)

    step = 0
    for layers, into, out_of in zip(launches, written, read, strict=True):
        start = step
        for index, layer in enumerate(layers):
            for act in (*inputs(layer), layer.y):
                sizes[act.storage] = act.size(cfg)
                use(act.storage, step)
                if index and follows(layers[index - 1], layer):
                    use(act.storage, step - 1)
                use(act.storage, step - len(softmaxes_before(layers, index)))
            step += 1
        for storage in into:
            use(storage, start)
        for storage in out_of:
            use(storage, step)
        step += 1
    for storage in sizes:
        if storage.lasting:
            first[storage], last[storage] = 0, step
    return [Lifetime(storage, size, first[storage], last[storage]) for storage, size in sizes.items()]


def follows(producer: Layer, layer: Layer) -> bool:
    """Whether the tiles of `layer` are emitted between those of `producer`.

    A pooling, an elementwise layer or a norm has nothing for gemm to do, and the convolution whose output it reads has
    little for vector: tile by tile, they run at the same time.
    """
    if layer.x != producer.y or layer.x.height * layer.x.width == 1:
        return False
    if isinstance(layer, Norm) and isinstance(producer, Block) and isinstance(producer.layers[-1], Map):
        producer = producer.layers[0]
    return isinstance(producer, Conv) and isinstance(layer, Pool | Map | Multiply | Norm)


def softmaxes_before(layers: list[Layer], number: int) -> list[int]:
    """The softmaxes directly before a convolution between whose tiles its own are emitted: it needs none of them, and
    has gemm for what they leave idle."""
    layer, first = layers[number], number
    if not isinstance(layer, Conv):
        return []
    read = {act.storage for act in inputs(layer)}
    while first and isinstance(layers[first - 1], Softmax) and layers[first - 1].y.storage not in read:
        first -= 1
    return list(range(first, number))


def is_followed(layers: list[Layer], number: int) -> bool:
    """Whether the tiles of the next layer of a launch are emitted between those of this one."""
    return 0 <= number < len(layers) - 1 and follows(layers[number], layers[number + 1])


def first_of(layers: list[Layer], number: int) -> First:
    """What of a layer's output is to be complete before the rest, for the tiles of the next layer: whole pixels for a
    norm, of images of one row."""
    if not is_followed(layers, number):
        return First.ANY
    by_columns = isinstance(layers[number + 1], Norm) and layers[number].y.height == 1
    return First.COLUMNS if by_columns else First.ROWS


@dataclass
class _Layer:
    """A layer of a launch, with its tiles in order.

    needs, done: for each tile, rows of x that must be there before it and rows of y that are complete after it, counted
    through all images, or channel groups or columns where images have one row; only where this layer follows another,
    or another follows it.
    """

    number: int
    layer: Layer
    tiles: list[PipelineTile]
    ahead: int
    needs: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)


class _Emitter:
    """Emits the layers of one launch into a stream."""

    def __init__(
        self, cfg: Config, layers: list[Layer], planner: Planner, constants: Constants, addresses: dict[Storage, int],
        cold: bool,
    ) -> None:  # fmt: skip
        self.cfg, self.layers, self.planner = cfg, layers, planner
        self.parts: list[list[LayerPart]] = [[] for _ in layers]
        self.constants, self.addresses, self.cold = constants, addresses, cold
        self.books: dict[int, NDArray[np.uint8]] = {}
        """Codebooks in front of packed weights, by their address."""
        self.stream = Stream(cfg)
        self.refused: dict[int, str] = {}
        self.settled = False
        """Whether the rows that the tile reads are known to be there, though other rows are not."""

    def run(self) -> Stream:
        planned = [self._planned(number, layer) for number, layer in enumerate(self.layers)]
        if not self.refused:
            number = 0
            try:
                for each in planned:
                    assert each is not None
                    number = each.number
                    self._emit(each, planned)
                self.stream.finish()
            except (RenderError, Untileable) as error:
                self.refused[error.layer if isinstance(error, Stuck) else number] = str(error)
        return self.stream

    def _follows(self, number: int) -> bool:
        return is_followed(self.layers, number - 1)

    def _planned(self, number: int, layer: Layer) -> _Layer | None:
        """None, and an entry in `refused`, for a layer that does not fit."""
        followed = self._follows(number + 1)
        try:
            first = first_of(self.layers, number)
            parts = self.parts[number] = self.planner.layer(layer, first, self._is_cold(number))
            bound = [self._bound(part, layer) for part in parts]
            tiles = [tile for each in bound for tile in each.tiles()]
            planned = _Layer(number, layer, tiles, max(part.decisions.ahead for part in parts))
            if followed:
                beside = isinstance(self.layers[number + 1], Norm)  # which leaves acc alone
                held = not beside and any(part.decisions.order in CUT for part in parts)
                planned.done = rows_done(tiles, held, self._counted(number))
            if self._follows(number):
                planned.needs = [rows_needed(tile, self._counted(number - 1)) for tile in tiles]
            for tile in tiles:
                tile.check()
        except Untileable as error:
            self.refused[number] = str(error)
            return None
        return planned

    def _is_cold(self, number: int) -> bool:
        """Whether gemm waits for the layer's first loads: nothing comes before, or what hardly leaves room for them."""
        return self.cold and (number == 0 or not isinstance(self.layers[number - 1], Conv | Block))

    def _counted(self, number: int) -> int:
        """The axis along which the output of a layer becomes complete for the next one: rows, columns, or channel
        groups."""
        if first_of(self.layers, number) is First.COLUMNS:
            return COLUMNS
        by_groups = self.layers[number].y.height == len(self.parts[number]) == self.cfg.out_pieces == 1
        return GROUPS if by_groups else ROWS

    def _bound(self, part: LayerPart, layer: Layer) -> PlacedPlan:
        """The part's loops, on the addresses of `layer`."""
        definition, loops = part.definition, part.loops
        own = dict(zip((t.name for t in loops.plan.tensors), loops.plan.tensors))
        addresses: dict[Tensor, int] = {}
        homes: dict[Tensor, Storage] = {}
        for tensor, place in definition.places.items():
            if tensor.name not in own:
                continue
            if isinstance(place.home, Storage):
                base = self.addresses[place.home]
                homes[own[tensor.name]] = place.home
            else:
                base = self.constants.place(place.home)
                if place.book_bytes:
                    self.books[base] = place.home[: place.book_bytes]
            addresses[own[tensor.name]] = base + place.offset

        def before_load(tensor: Tensor) -> None:
            if tensor in homes and not self.settled:
                self.stream.settle(homes[tensor])

        changing = frozenset(homes)
        return PlacedPlan(loops.plan, self.stream, addresses, definition.scalars, changing, before_load)

    def _emit(self, each: _Layer, planned: list[_Layer | None]) -> None:
        """Emit one layer, and that which follows it between its tiles."""
        if self._follows(each.number) or self._is_beside(each.number):
            return
        if softmaxes := self._softmaxes(each.number):
            self._emit_between([planned[n] for n in softmaxes], each)
            return
        next_ = planned[each.number + 1] if self._follows(each.number + 1) else None
        following = next_.tiles if next_ is not None else []
        stream, emitted = self.stream, 0
        for count, tile in enumerate(each.tiles, 1):
            stream.start(each.number, each.layer.y.storage, tile.load, each.ahead)
            if next_ is None:
                continue
            computed = count - len(stream.waiting)
            done = each.done[computed - 1] if computed > 0 else 0
            share = len(following) * computed // len(each.tiles)
            self.settled = True
            while emitted < share and next_.needs[emitted] <= done:
                stream.follow(next_.number, next_.layer.y.storage, following[emitted].load)
                emitted += 1
            self.settled = False
        if next_ is not None and isinstance(next_.layer, Norm):
            emitted = self._follow_the_last(each, next_, emitted)
        for tile in following[emitted:]:
            assert next_ is not None
            stream.start(next_.number, next_.layer.y.storage, tile.load, next_.ahead)

    def _follow_the_last(self, each: _Layer, next_: _Layer, emitted: int) -> int:
        """Emit tiles of `next_` while the last tiles of `each`, which have loaded, compute: as soon as what they need
        is there. Returns how many are."""
        self.settled = True
        while emitted < len(next_.tiles):
            computed = len(each.tiles) - len(self.stream.waiting)
            if next_.needs[emitted] <= (each.done[computed - 1] if computed > 0 else 0):
                self.stream.follow(next_.number, next_.layer.y.storage, next_.tiles[emitted].load)
                emitted += 1
            elif not self.stream.advance():
                break
        self.settled = False
        return emitted

    def _softmaxes(self, number: int) -> list[int]:
        """Those between whose tiles those of layer `number` are emitted; they leave acc as it is."""
        return [] if is_followed(self.layers, number) else softmaxes_before(self.layers, number)

    def _is_beside(self, number: int) -> bool:
        """Whether a later layer emits this softmax's tiles between its own."""
        if not isinstance(self.layers[number], Softmax):
            return False
        after = next((n for n in range(number, len(self.layers)) if not isinstance(self.layers[n], Softmax)), None)
        return after is not None and number in self._softmaxes(after)

    def _emit_between(self, softmaxes: list[_Layer | None], each: _Layer) -> None:
        """The tiles of all softmaxes, and evenly between them those of `each`."""
        tiles = [(layer, tile) for layer in softmaxes if layer is not None for tile in layer.tiles]
        emitted = 0
        for count, (layer, tile) in enumerate(tiles, 1):
            self.stream.start(layer.number, layer.layer.y.storage, tile.load, layer.ahead)
            share = len(each.tiles) * count // len(tiles)
            for own in each.tiles[emitted:share]:
                self.stream.start(each.number, each.layer.y.storage, own.load, each.ahead)
            emitted = share


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
    whole = 0
    stored = np.zeros(images * rows + 1, np.int64)
    boxes = []
    for tile in tiles:
        box = []
        for move in tile.moves(loads=False):
            (image, _), (first, end) = move.span(0, tile.env), move.span(axis, tile.env)
            pieces = move.moved_pieces(tile.env)
            if pieces:
                box.append((image * rows + first, image * rows + end, pieces // (end - first)))
        boxes.append(box)
    for box in boxes:
        for first, end, pieces in box:
            stored[first:end] += pieces
    full = stored[:-1].copy()
    stored[:] = 0
    done = []
    for box in boxes:
        for first, end, pieces in box:
            stored[first:end] += pieces
        while whole < len(full) and stored[whole] == full[whole]:
            whole += 1
        done.append(whole)
    return done


def build(
    cfg: Config, launches: list[list[Layer]], written: list[set[Storage]], read: list[set[Storage]],
    planner: Planner | None = None, cold: bool = True,
) -> Image:  # fmt: skip
    """Plan memory, lower every layer, insert tokens, encode. LayerErrors with all that cannot be lowered.

    cold: gemm waits for the first loads of a launch; not where the launch stands for a part of one.
    """
    arena = plan(lifetimes(cfg, launches, written, read), alignment=max(64, cfg.bus_bytes))
    base = -(-arena.size // 4096) * 4096
    constants = Constants(base)
    planner = planner or Planner(cfg)
    emitters = [_Emitter(cfg, layers, planner, constants, arena.offsets, cold) for layers in launches]
    streams = [emitter.run() for emitter in emitters]
    refused = {(n, layer): why for n, emitter in enumerate(emitters) for layer, why in emitter.refused.items()}
    if refused:
        raise LayerErrors(refused)
    for emitter, stream in zip(emitters, streams, strict=True):
        stream.instructions = load_books(cfg, by_need(cfg, stream.instructions), emitter.books)
        spread_weights(cfg, stream.instructions)
        insert_tokens(cfg, stream.instructions, base)
    parts, address = [constants.data()], base + constants.size
    placed = []
    for emitter, stream in zip(emitters, streams, strict=True):
        code = encode(cfg, stream.instructions)
        layer_of = np.array([i.layer for i in stream.instructions], np.int32)
        traffic = _traffic(cfg, stream, len(emitter.layers))
        placed.append(Launch(address, len(code), code.shape[1], layer_of, *traffic, emitter.parts))
        parts.append(code.reshape(-1))
        address += code.size
    return Image(arena.offsets, base, np.concatenate(parts), placed, address, arena.lower_bound)


def _traffic(cfg: Config, stream: Stream, layers: int) -> tuple[list[int], list[int]]:
    """Bytes that each layer loads and stores."""
    loaded, stored = [0] * layers, [0] * layers
    for i in stream.instructions:
        if i.opcode in (Opcode.LOAD, Opcode.STORE):
            moved = rows(cfg, i.opcode, complete(cfg, i.opcode, i.fields))
            assert moved is not None
            (stored if moved.write else loaded)[i.layer] += moved.z * moved.y * moved.row
    return loaded, stored
