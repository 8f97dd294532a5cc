"""Cycles that no schedule of a layer can be below, whatever else it does: with them a search can say that it is done.

Each unit does its part: gemm its steps, the vector unit its entries, each port of memory the beats of what must come
or go. What must come is more than every byte once, where a loop walks over more than a scratchpad holds: it comes again
each time, but for what the scratchpad can have kept. Nothing is computed before the first tile is there, and nothing
ends before the last bytes are in memory. tests/tune compares this with the timing model on every point of many spaces.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.layer import Activation, Layer, Window
from celosia.compiler.tensorize.block_space import Group
from celosia.compiler.tensorize.roofline import LOAD_LATENCY, MEMORY, STORE_LATENCY
from celosia.compiler.tensorize.space import CUT, Tiling, Workload
from celosia.hw.boards.boards import memory_model
from celosia.hw.boards.memory import MemoryModel
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import instruction_bytes
from celosia.hw.spec.scratchpads import depths, scratchpads

Floats = NDArray[np.float64]


def _bytes(cfg: Config, name: str) -> int:
    """Bytes of an entry of a scratchpad."""
    return scratchpads(cfg)[name].entry_bytes


def _weight_bytes(cfg: Config, p: Workload) -> float:
    """Bytes of the weights of a layer, those that one port brings."""
    return p.out_blocks * p.in_blocks * p.places * p.weight_bytes(cfg) / (1 + _is_spread(cfg, p))


def _is_spread(cfg: Config, p: Workload) -> bool:
    """Whether both ports may bring halves of weights."""
    return scratchpads(cfg)["wgt"].spread and not p.packed


def _through_ports(cfg: Config, p: Workload, near: Floats, far: Floats) -> Floats:
    """Bytes that come through the busier port at least: `near` through the first one, weights, `far`, through the last
    one or both."""
    if cfg.ports == 1:
        return near + far
    return np.maximum(near, (near + far) / 2 if _is_spread(cfg, p) else far)


def lower_bounds(
    cfg: Config, asked: Sequence[Workload | Group], points: Sequence[tuple[Tiling, ...]], copies: int,
    memory: MemoryModel | str,
) -> Floats:  # fmt: skip
    """Lower bounds of the cycles of the layer of these workloads, `copies` times in a row on `memory`, for each of
    `points`."""
    behind = memory_model(memory)
    first, *others = asked
    if not others and isinstance(first, Workload) and first.in_blocks and not first.grouped:
        return _of_products(cfg, first, [d for (d,) in points], copies, behind)
    layers = [layer for each in asked for layer in (each.layers if isinstance(each, Group) else (each,))]
    weights = sum(_weight_bytes(cfg, layer) for layer in layers if not layer.grouped)
    gemm, vector = sum(layer.steps for layer in layers if not layer.grouped), sum(_entries(each) for each in asked)
    written = sum(_entries(each, cfg) for each in asked if not (isinstance(each, Group) and each.following))
    busiest = max(gemm, vector, _beats(cfg, behind, weights), written * cfg.lanes / cfg.bus_bytes)
    return np.full(len(points), float(copies * busiest + _ends(behind)))


def network_bound(cfg: Config, layers: Sequence[tuple[Layer, Sequence[Workload]]], memory: MemoryModel) -> float:
    """Cycles that these layers, in order, are not below together, in whatever blocks and tiles: each unit does its
    part of what must be computed. A block leaves out what no window of its last layer reads."""
    asked = [workload for _, workloads in layers for workload in workloads]
    shares = _read([layer for layer, _ in layers]) if cfg.forward else [1.0] * len(layers)
    gemm = sum(s * p.steps for s, (_, own) in zip(shares, layers) for p in own if not p.grouped)
    vector = sum(s * _entries(p) for s, (_, own) in zip(shares, layers) for p in own)
    weights: dict[Hashable, float] = {}
    for layer, own in layers:
        if layer.gemm is not None:  # what two layers share may stay; few bytes tell weights apart well enough
            size = sum(_weight_bytes(cfg, p) for p in own if not p.grouped)
            key = layer.gemm.weights.shape, layer.gemm.weights.reshape(-1)[:64].tobytes()
            weights[key] = max(size, weights.get(key, 0))
    stored = 0.0 if cfg.forward else sum(_entries(each, cfg) for each in asked)
    moved = [_beats(cfg, memory, size) for size in (sum(weights.values()), stored * cfg.lanes)]
    return float(max(gemm, vector, *moved) + _ends(memory))


def _read(layers: Sequence[Layer]) -> list[float]:
    """The share of each layer's pixels that windows of the layers behind it read; 1 where something else reads it."""
    sizes: dict[Activation, tuple[int, int]] = {}
    for layer in reversed(layers):
        y = layer.y
        readers = [each for each in layers if any(act.storage is y.storage for act in each.inputs())]
        windows = [(each.window, each.y) for each in readers if (each.gemm or each.reduce) and each.x == y]
        sizes[y] = y.height, y.width
        if readers and len(windows) == len(readers):
            rows = max(_touched(window, 0, sizes[to][0], to.height) for window, to in windows)
            columns = max(_touched(window, 1, sizes[to][1], to.width) for window, to in windows)
            sizes[y] = rows, columns
    return [sizes[each.y][0] * sizes[each.y][1] / (each.y.height * each.y.width) for each in layers]


def _of_products(cfg: Config, p: Workload, points: Sequence[Tiling], copies: int, memory: MemoryModel) -> Floats:
    """For a convolution or a matrix product."""
    n, y, x, k = (np.array([getattr(d, name) for d in points]) for name in ("n", "y", "x", "k"))
    order = np.array([d.order for d in points])
    cut, weights_outside = np.isin(order, CUT), np.isin(order, ["weights", "pieces"])
    n_tiles, spatial = -(-p.out_blocks // n), -(-p.rows // y) * -(-p.columns // x) * p.images
    blocks = p.in_blocks - 1 + 1 / cfg.inp_pieces  # the last one may have channels for one piece only
    room = depths(cfg)

    def again(size: Floats, times: Floats, depth: int) -> Floats:
        """Entries that come when a loop walks `times` over `size` of them."""
        return size + (times - 1) * np.maximum(0, size - depth)

    seen = _touched(p.window, 0, p.rows, p.rows) * _touched(p.window, 1, p.columns, p.columns) * p.images
    inp = again(np.full(len(points), seen * blocks), np.where(weights_outside, n_tiles, 1), room["inp"])
    every = float(p.out_blocks * p.in_blocks * p.places)
    wgt = np.where(
        order == "weights", every, again(np.full(len(points), every), spatial, room["wgt"])
    )  # fmt: skip
    tile = n * p.in_blocks * p.places * 1.0
    wgt = np.where(order == "pieces", p.out_blocks // n * again(tile, spatial, room["wgt"]), wgt)
    tiles = n_tiles * spatial
    fetched = (tiles * -(-p.in_blocks // k) + 2 * tiles) * instruction_bytes(cfg)  # GEMM; VECTOR, STORE
    near = inp * _bytes(cfg, "inp") + fetched + (_entries(p, cfg) * cfg.lanes if p.residual else 0)
    far = wgt * p.weight_bytes(cfg)
    read = _beats(cfg, memory, _through_ports(cfg, p, near, far))
    write = _beats(cfg, memory, _entries(p, cfg) * cfg.lanes)

    rows = np.array([_touched(p.window, 0, int(each), p.rows) for each in y])
    columns = np.array([_touched(p.window, 1, int(each), p.columns) for each in x])
    tile_near = np.minimum(k, blocks) * rows * columns * _bytes(cfg, "inp")
    tile_far = n * np.where(cut, k, p.in_blocks) * p.places * p.weight_bytes(cfg)
    first = _through_ports(cfg, p, tile_near, tile_far) // cfg.bus_bytes
    compute = first + copies * max(p.steps, _entries(p))
    return np.asarray(np.maximum(np.maximum(compute, copies * read), copies * write) + _ends(memory), np.float64)


def _touched(w: Window, axis: int, count: int, all_: int) -> int:
    """Different rows or columns of the image, surely in it, that the first `count` of `all_` windows read."""
    before, after = w.pads[axis], w.pads[axis + 2]
    size = (all_ - 1) * w.strides[axis] + w.reach(axis) - before - after
    steps = range(0, w.reach(axis), w.dilations[axis])
    return len({at for i in range(count) for j in steps if 0 <= (at := i * w.strides[axis] + j - before) < size})


def _entries(p: Workload | Group, cfg: Config | None = None) -> float:
    """Entries that the vector unit makes of the output; with `cfg`, as many as go to memory at least."""
    last = p.last if isinstance(p, Group) else p
    blocks = last.out_blocks if cfg is None else last.out_blocks - 1 + 1 / cfg.out_pieces
    return blocks * last.rows * last.columns * last.images


def _beats(cfg: Config, memory: MemoryModel, size: Floats | float) -> Floats:
    """Cycles that a port takes for so many bytes, with the refreshes between them."""
    beats: Floats = np.floor_divide(size, cfg.bus_bytes, dtype=np.float64)
    if not memory.refresh_period:
        return beats
    refreshes = np.maximum(0, beats // (memory.refresh_period - memory.refresh_cycles) - 1)
    return np.asarray(beats + refreshes * memory.refresh_cycles)


def _ends(memory: MemoryModel) -> int:
    """Latency of the first LOAD and of the last STORE."""
    usual = MEMORY.read_latency + MEMORY.write_latency
    return LOAD_LATENCY + STORE_LATENCY - usual + memory.read_latency + memory.write_latency
