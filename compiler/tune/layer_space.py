"""The search space of a layer: its points, with estimates, features for the cost model, and lower bounds.

`layer_space` combines the points that `tensorize` enumerates for each workload of the layer.

A lower bound holds for any schedule of a layer; with it a search can prove that it is done. Each unit needs a minimum:
gemm its steps, the vector unit its entries, each memory port the beats of its data. Where a loop walks several times
over more data than a scratchpad holds, all but the part that the scratchpad can hold is loaded again each time. Nothing
is computed before the first tile has arrived, and nothing ends before the last bytes are stored.
tests/compiler/test_tune.py compares the bounds with the timing model on every point of many spaces.

In arguments, p is a workload.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from celosia.compiler.layer import Activation, Layer, Window
from celosia.compiler.tensorize import block_space
from celosia.compiler.tensorize.block_space import Group
from celosia.compiler.tensorize.lowering import lower_layer
from celosia.compiler.tensorize.plan import workload_text, workloads
from celosia.compiler.tensorize.roofline import LOAD_LATENCY, MEMORY, STORE_LATENCY, terms
from celosia.compiler.tensorize.space import CUT_ORDERS, ORDERS, Tiling, Workload, candidates
from celosia.compiler.tune.layer_trial import COPIES, LayerCase
from celosia.compiler.tune.search import Floats, Space
from celosia.hw.boards.boards import memory_model
from celosia.hw.boards.memory import ZYNQ_HP, MemoryModel
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import instruction_bytes
from celosia.hw.spec.scratchpads import depths, scratchpads

Point = tuple[Tiling, ...]
"""Tiling for each workload of a layer, in order."""
MAX_POINTS = 20_000
"""Limit of the points of a layer."""


def layer_space(cfg: Config, layer: Layer, usual: Point, memory: MemoryModel | str = ZYNQ_HP) -> Space[Point]:
    """Build the search space of `layer`: combinations of the best points of its workloads. Raises TilingError.

    usual: the compiler's own decisions, which are always a point. memory: memory model for the bounds.
    """
    computations = lower_layer(cfg, layer)
    layer_workloads = [workload for computation in computations for workload in workloads(computation)]
    candidate_rows = [
        _candidates(cfg, workload, usual_decisions)
        for workload, usual_decisions in zip(layer_workloads, usual, strict=True)
    ]
    limit = int(MAX_POINTS ** (1 / len(candidate_rows)))  # of points for each workload
    best_rows = [sorted(combination, key=lambda row: row.cycles)[:limit] for combination in candidate_rows]
    for rows, all_rows, usual_decisions in zip(best_rows, candidate_rows, usual):
        if all(row.decisions != usual_decisions for row in rows):
            rows.append(next(row for row in all_rows if row.decisions == usual_decisions))
    combinations = list(itertools.product(*best_rows))
    points = [tuple(row.decisions for row in combination) for combination in combinations]
    return Space(
        workload_text(computations),
        points,
        _knobs,
        np.array([COPIES * sum(row.cycles for row in combination) for combination in combinations]),
        lower_bounds(cfg, layer_workloads, points, COPIES, memory),
        np.array([np.sum([row.features for row in combination], axis=0) for combination in combinations]),
        LayerCase(cfg, layer).fits if len(layer_workloads) > 1 else None,  # whether the tiles of groups fit together
    )


def _knobs(point: Point) -> dict[str, int | str]:
    """Return the decisions of a point by name; with several workloads, names end in the number of the workload."""
    if len(point) == 1:
        return {name: getattr(point[0], name) for name in ("n", "y", "x", "k", "order")}
    return {
        f"{name}{index}": value for index, decisions in enumerate(point) for name, value in _knobs((decisions,)).items()
    }  # fmt: skip


@dataclass(frozen=True)
class _Candidate:
    """A point of one workload: its decisions, estimated cycles, and features for the cost model (FEATURES)."""

    decisions: Tiling
    cycles: float
    features: Floats = field(compare=False)


def _candidates(cfg: Config, p: Workload | Group, usual: Tiling) -> list[_Candidate]:
    """Enumerate the points of workload p with their estimates; the decisions `usual` are the first, measured first."""
    enumerated = block_space.candidates(cfg, p) if isinstance(p, Group) else candidates(cfg, p)
    points = list(dict.fromkeys((usual, *enumerated)))
    if isinstance(p, Workload) and p.in_blocks:
        columns = terms(cfg, p, [(d.n, d.y, d.x, d.k, d.order) for d in points])
        costs = [dict(zip(columns, row)) for row in zip(*columns.values())]
    else:
        group = p if isinstance(p, Group) else Group((p,))
        costs = [{"cycles": block_space.estimate_group(cfg, group, d)} for d in points]
    last = p.last if isinstance(p, Group) else p
    return [_Candidate(d, float(cost["cycles"]), _features(cfg, last, d, cost)) for d, cost in zip(points, costs)]


FEATURES = (
    *("cycles", "gemm", "beats", "store", "exposed", "ends", "tiles"), *("n", "y", "x", "k"), *ORDERS,
    *("steps", "out_blocks", "in_blocks", "rows", "columns", "taps", "stride", "residual", "waste"),
    *("macs", "bus", "inp", "wgt", "acc", "out", "ports"),
)  # fmt: skip
"""Names of features of a point: terms of the estimate, tile sizes, loop order, the workload, and the Config.

Their values are logarithms of sizes, and 0 or 1 for orders.
"""


def _features(cfg: Config, p: Workload, d: Tiling, cost: Mapping[str, float]) -> Floats:
    """Return the features of decisions d for workload p, see FEATURES. cost: terms of the estimate by name."""
    computed = -(-p.out_blocks // d.n) * d.n * -(-p.rows // d.y) * d.y * -(-p.columns // d.x) * d.x
    sizes = [cost.get(name, 0.0) for name in FEATURES[:7]]
    sizes += [d.n, d.y, d.x, d.k]
    orders = [float(d.order == order) for order in ORDERS]
    of_workload = [p.steps, p.out_blocks, p.in_blocks, p.rows, p.columns, p.places, max(p.window.strides), p.residual]
    of_workload += [computed - p.out_blocks * p.rows * p.columns]  # waste at the edges of tiles
    of_config = [
        cfg.macs_per_cycle, cfg.bus_bytes, *(depths(cfg)[name] for name in ("inp", "wgt", "acc", "out")), cfg.ports
    ]  # fmt: skip
    logs = np.log1p(np.array([*sizes, *of_workload, *of_config], np.float64))
    return np.concatenate([logs[:11], orders, logs[11:]])


# Lower bounds --------------------------------------------------------------------------------------------------


def lower_bounds(
    cfg: Config, workloads: Sequence[Workload | Group], points: Sequence[tuple[Tiling, ...]], copies: int,
    memory: MemoryModel | str,
) -> Floats:  # fmt: skip
    """Return a lower bound of the cycles of a layer, run `copies` times in a row, for each of `points`: [points].

    workloads: those of the layer; several, or a Group, have one bound for all points. memory: its memory model.
    """
    memory_ = memory_model(memory)
    first, *others = workloads
    if not others and isinstance(first, Workload) and first.in_blocks and not first.grouped:
        return _product_bounds(cfg, first, [d for (d,) in points], copies, memory_)
    layers = [
        layer for workload in workloads for layer in (workload.layers if isinstance(workload, Group) else (workload,))
    ]
    weights = sum(_weight_bytes(cfg, layer) for layer in layers if not layer.grouped)
    gemm, vector = (
        sum(layer.steps for layer in layers if not layer.grouped),
        sum(_output_entries(problem) for problem in workloads),
    )
    written = sum(
        _output_entries(problem, cfg) for problem in workloads if not (isinstance(problem, Group) and problem.following)
    )
    unit_cycles = max(gemm, vector, _beats(cfg, memory_, weights), written * cfg.lanes / cfg.bus_bytes)
    return np.full(len(points), float(copies * unit_cycles + _end_latency(memory_)))


def network_bound(cfg: Config, layers: Sequence[tuple[Layer, Sequence[Workload]]], memory: MemoryModel) -> float:
    """Return a lower bound of the cycles of `layers`, run in order, whatever their blocks and tiles.

    layers: each with its workloads. A block does not compute pixels that no window of its last layer reads.
    """
    all_workloads = [workload for _, workloads in layers for workload in workloads]
    shares = _shares_read([layer for layer, _ in layers]) if cfg.forward else [1.0] * len(layers)
    gemm = sum(s * p.steps for s, (_, layer_workloads) in zip(shares, layers) for p in layer_workloads if not p.grouped)
    vector = sum(s * _output_entries(p) for s, (_, layer_workloads) in zip(shares, layers) for p in layer_workloads)
    weights: dict[Hashable, float] = {}
    for layer, layer_workloads in layers:
        if layer.gemm is not None:  # weights that layers share may be loaded once; their first bytes identify them
            size = sum(_weight_bytes(cfg, p) for p in layer_workloads if not p.grouped)
            key = layer.gemm.weights.shape, layer.gemm.weights.reshape(-1)[:64].tobytes()
            weights[key] = max(size, weights.get(key, 0))
    stored = 0.0 if cfg.forward else sum(_output_entries(problem, cfg) for problem in all_workloads)
    moved = [_beats(cfg, memory, size) for size in (sum(weights.values()), stored * cfg.lanes)]
    return float(max(gemm, vector, *moved) + _end_latency(memory))


def _shares_read(layers: Sequence[Layer]) -> list[float]:
    """Return the share of the pixels of each layer's output that later layers read.

    It is 1 where anything but a window reads the output.
    """
    sizes: dict[Activation, tuple[int, int]] = {}
    for layer in reversed(layers):
        y = layer.y
        readers = [reader for reader in layers if any(act.storage is y.storage for act in reader.inputs())]
        windows = [(reader.window, reader.y) for reader in readers if (reader.gemm or reader.reduce) and reader.x == y]
        sizes[y] = y.height, y.width
        if readers and len(windows) == len(readers):
            rows = max(_positions_read(window, 0, sizes[to][0], to.height) for window, to in windows)
            columns = max(_positions_read(window, 1, sizes[to][1], to.width) for window, to in windows)
            sizes[y] = rows, columns
    return [sizes[reader.y][0] * sizes[reader.y][1] / (reader.y.height * reader.y.width) for reader in layers]


def _product_bounds(cfg: Config, p: Workload, points: Sequence[Tiling], copies: int, memory: MemoryModel) -> Floats:
    """Return a lower bound of the cycles of a convolution or a matrix product for each point; see `lower_bounds`."""
    n, y, x, k = (np.array([getattr(d, name) for d in points]) for name in ("n", "y", "x", "k"))
    order = np.array([d.order for d in points])
    is_split, weights_outside = np.isin(order, CUT_ORDERS), np.isin(order, ["weights", "pieces"])
    n_tiles, spatial = -(-p.out_blocks // n), -(-p.rows // y) * -(-p.columns // x) * p.images
    blocks = p.in_blocks - 1 + 1 / cfg.inp_pieces  # the last one may have channels for one piece only
    capacity = depths(cfg)  # entries of each scratchpad
    input_bytes = scratchpads(cfg)["inp"].entry_bytes

    def reloaded(size: Floats, passes: Floats, depth: int) -> Floats:
        """Return the entries that are loaded when a loop walks `passes` times over `size` of them."""
        return size + (passes - 1) * np.maximum(0, size - depth)

    pixels_read = (
        _positions_read(p.window, 0, p.rows, p.rows) * _positions_read(p.window, 1, p.columns, p.columns) * p.images
    )
    inp = reloaded(np.full(len(points), pixels_read * blocks), np.where(weights_outside, n_tiles, 1), capacity["inp"])
    all_weights = float(p.weight_entries(p.out_blocks, p.in_blocks))
    wgt = np.where(
        order == "weights", all_weights, reloaded(np.full(len(points), all_weights), spatial, capacity["wgt"])
    )  # fmt: skip
    tile = p.weight_entries(n, p.in_blocks) * 1.0
    wgt = np.where(order == "pieces", p.out_blocks // n * reloaded(tile, spatial, capacity["wgt"]), wgt)
    tiles = n_tiles * spatial
    fetched = (tiles * -(-p.in_blocks // k) + 2 * tiles) * instruction_bytes(cfg)  # GEMM; VECTOR, STORE
    residual = _output_entries(p, cfg) * cfg.lanes if p.residual else 0
    first_port = inp * input_bytes + fetched + residual
    read = _beats(cfg, memory, _bytes_of_busier_port(cfg, p, first_port, wgt * p.weight_bytes(cfg)))
    write = _beats(cfg, memory, _output_entries(p, cfg) * cfg.lanes)

    rows = np.array([_positions_read(p.window, 0, int(size), p.rows) for size in y])
    columns = np.array([_positions_read(p.window, 1, int(size), p.columns) for size in x])
    tile_inputs = np.minimum(k, blocks) * rows * columns * input_bytes
    tile_weights = p.weight_entries(n, np.where(is_split, k, p.in_blocks)) * p.weight_bytes(cfg)
    first_tile = _bytes_of_busier_port(cfg, p, tile_inputs, tile_weights) // cfg.bus_bytes
    compute = first_tile + copies * max(p.steps, _output_entries(p))
    return np.asarray(np.maximum(np.maximum(compute, copies * read), copies * write) + _end_latency(memory), np.float64)


def _weight_bytes(cfg: Config, p: Workload) -> float:
    """Return the bytes of the weights of a workload that one port has to load."""
    return float(p.weight_entries(p.out_blocks, p.in_blocks) * p.weight_bytes(cfg) / (1 + _is_spread(cfg, p)))


def _is_spread(cfg: Config, p: Workload) -> bool:
    """Return whether the weights of a workload are spread weights, of which each port loads one half."""
    return scratchpads(cfg)["wgt"].spread and not p.packed


def _bytes_of_busier_port(cfg: Config, p: Workload, first_port: Floats, weights: Floats) -> Floats:
    """Return a lower bound of the bytes that the busier port loads.

    first_port: bytes that only the first port loads. weights: bytes of weights, which the last port loads, or both.
    """
    if cfg.ports == 1:
        return first_port + weights
    return np.maximum(first_port, (first_port + weights) / 2 if _is_spread(cfg, p) else weights)


def _positions_read(w: Window, axis: int, count: int, window_count: int) -> int:
    """Return how many rows (axis 0) or columns (axis 1) of the image the first `count` windows along it read.

    window_count: number of all windows along the axis.
    """
    before, after = w.pads[axis], w.pads[axis + 2]
    size = (window_count - 1) * w.strides[axis] + w.reach(axis) - before - after
    steps = range(0, w.reach(axis), w.dilations[axis])
    return len(
        {position for i in range(count) for j in steps if 0 <= (position := i * w.strides[axis] + j - before) < size}
    )


def _output_entries(p: Workload | Group, cfg: Config | None = None) -> float:
    """Return the entries that the vector unit computes; with `cfg`, a lower bound of the entries that are stored."""
    last = p.last if isinstance(p, Group) else p
    blocks = last.out_blocks if cfg is None else last.out_blocks - 1 + 1 / cfg.out_pieces
    return blocks * last.rows * last.columns * last.images


def _beats(cfg: Config, memory: MemoryModel, size: Floats | float) -> Floats:
    """Return the cycles in which a port moves `size` bytes, with the refreshes of the memory in between."""
    beats: Floats = np.floor_divide(size, cfg.bus_bytes, dtype=np.float64)
    if not memory.refresh_period:
        return beats
    refreshes = np.maximum(0, beats // (memory.refresh_period - memory.refresh_cycles) - 1)
    return np.asarray(beats + refreshes * memory.refresh_cycles)


def _end_latency(memory: MemoryModel) -> int:
    """Return the cycles of latency of the first LOAD and of the last STORE, which nothing can hide."""
    modelled = MEMORY.read_latency + MEMORY.write_latency  # the part of LOAD_LATENCY and STORE_LATENCY by memory
    return LOAD_LATENCY + STORE_LATENCY - modelled + memory.read_latency + memory.write_latency
