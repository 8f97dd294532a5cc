"""Explain a layer's cycles: what each unit did in them, what bounds the layer, and what would make it faster.

A layer's row is a stretch of time, from the end of the layers before it to its own end, so that cycles add up to those
of the run. All work of a unit in that stretch counts for the layer, even loads for the next one. An instruction's work
is spread evenly over the time in which it had its unit to itself, so that no share passes 100%. A layer's utilisation
is that of the array; the vector unit multiplies beside it (taps), which its own share shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program import LaunchStep, LayerInfo, Program, ProgramError
from celosia.hw.boards.boards import memory_model
from celosia.hw.boards.memory import ZYNQ_HP, MemoryModel
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode, Unit, formats, instruction_bytes, opcode_of
from celosia.sim.device import Counters, DeviceError
from celosia.sim.timing import predict
from celosia.sim.timing.demand import demand

UNITS = tuple(unit.name.lower() for unit in Unit)
BOUND = 0.75
"""A unit bounds a layer that it works for at least this share of its cycles; where none does, it is latency."""
FULL = 0.85
"""Share of the multipliers' speed from which on there is little to gain but by more of them."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class _Work:
    """Work that instructions ask for. busy: cycles of work of each. products: those of their layer's MACs that a GEMM
    computes; a layer's MACs are spread over its instructions by what each could multiply. peak: of each layer, see
    `_Time`."""

    unit: NDArray[np.int64]
    busy: Floats
    products: Floats
    peak: NDArray[np.int64]


def layer_rows(program: Program, counters: Sequence[Counters]) -> list[dict[str, Any]]:
    """Rows of the report, one for each layer. counters: of each launch, again for each part of a batch.

    cycles, utilization, bound, units and advice are None on a device that does not tell each instruction's time.
    """
    rows = []
    count = len(program.launches)
    for number, launch in enumerate(program.launches):
        runs = counters[number::count]
        timed = bool(runs) and all(run.cycles is not None and run.events and not run.lost for run in runs)
        times = _layer_times(program, launch, runs) if timed else [None] * len(launch.layers)
        for layer, time in zip(launch.layers, times):
            rows.append(_layer_row(program.config, layer, time, len(runs)))
    return rows


def predict_counters(program: Program, memory: MemoryModel | str = ZYNQ_HP) -> list[Counters]:
    """Predict the counters of each launch, with the time of each instruction, by the timing model.

    memory: behind the accelerator; ValueError for one that the model does not know. ProgramError where instructions of
    the Program, which may come from a file, are none, or wait for each other for ever.
    """
    memory = memory_model(memory)
    with report_invalid_instructions(program):
        return [
            predict(program.config, launch_code(program, launch), memory, launch.address).counters(trace=True)
            for launch in program.launches
        ]


@contextmanager
def report_invalid_instructions(program: Program) -> Iterator[None]:
    """Raise ProgramError where the code inside finds that instructions of the Program are invalid."""
    try:
        yield
    except (ValueError, DeviceError) as error:
        raise ProgramError(f"the instructions of Program {program.name!r} are damaged: {error}") from None


def estimate(
    program: Program, memory: MemoryModel | str = ZYNQ_HP, counters: Sequence[Counters] | None = None
) -> dict[str, Any]:
    """Return the report of a predicted run: cycles, utilization and layers of the timing model.

    memory, and ValueError: as of `predict_counters`, whose `counters` they are.
    """
    memory = memory_model(memory)
    counters = predict_counters(program, memory) if counters is None else counters
    cycles = sum(entry.cycles or 0 for entry in counters)
    peak = cycles * program.config.macs_per_cycle
    return {
        "model": program.name, "config": program.config.to_dict(), "memory_model": str(memory),
        "clock_mhz": memory.clock_mhz, "rounding": program.rounding,
        "cycles": cycles, "utilization": program.macs_accelerator / peak if peak else None,
        "macs_total": program.macs_total, "macs_accelerator": program.macs_accelerator,
        "launches": len(counters), "layers": layer_rows(program, counters),
    }  # fmt: skip


@dataclass(frozen=True)
class Advice:
    """Advice for layers with one common bound. share: of the cycles of all layers. longest: name of the longest
    layer."""

    bound: str
    advice: str
    layers: int
    longest: str
    share: float


def advise_by_cycles(report: dict[str, Any]) -> list[Advice]:
    """Advice on the layers of a report, that for most cycles first; none where there are no cycles."""
    rows = [row for row in report["layers"] if row["advice"] and row["cycles"]]
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault((row["bound"], row["advice"]), []).append(row)
    total = sum(row["cycles"] for row in rows)
    advice_list = [
        Advice(bound, advice, len(layers_of), max(layers_of, key=lambda row: row["cycles"])["name"],
               sum(row["cycles"] for row in layers_of) / total)
        for (bound, advice), layers_of in kinds.items()
    ]  # fmt: skip
    return sorted(advice_list, key=lambda advice: -advice.share)


def launch_code(program: Program, launch: LaunchStep) -> bytes:
    """Return the bytes of a launch's instructions."""
    start = launch.address - program.image_address
    return program.image[start : start + launch.count * instruction_bytes(program.config)].tobytes()


# Time -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Time:
    """A layer's cycles: for each unit those with work, and those under way without; the array's multiplications in
    them. own, filled: cycles of work that the layer's own instructions ask of each unit, whenever they run, and the
    share of the array's products in them that are the model's, and no padding. peak: multiplications a cycle of what it
    multiplies with, the array or the vector unit's taps, or both."""

    cycles: int
    busy: Floats
    held: Floats
    products: float
    own: Floats
    filled: float
    peak: int

    def __add__(self, other: _Time) -> _Time:
        return _Time(
            self.cycles + other.cycles, self.busy + other.busy, self.held + other.held,
            self.products + other.products, self.own + other.own, self.filled,
            self.peak,
        )  # fmt: skip


def _layer_times(program: Program, launch: LaunchStep, runs: Sequence[Counters]) -> list[_Time]:
    """Time of each layer, added up over runs of the launch."""
    work = _instruction_work(program, launch)
    times = [_layer_times_of_run(program.config, launch, work, run) for run in runs]
    return [sum(rest, first) for first, *rest in zip(*times)]


def _instruction_work(program: Program, launch: LaunchStep) -> _Work:
    """Work of each instruction of a launch."""
    cfg, work_demand = program.config, demand(program.config, launch_code(program, launch))
    held = (cfg.residual_cycles - 1) * work_demand.outputs * work_demand.residual
    gemm, taps = work_demand.unit == Unit.GEMM, _uses_taps(program, launch)
    speed = np.where(gemm, cfg.macs_per_cycle, taps * cfg.taps * cfg.lanes)
    possible = work_demand.steps * speed
    peak = np.zeros((2, len(launch.layers)), np.int64)
    np.maximum.at(peak, (gemm.astype(int), launch.layer_of), speed)
    total = np.bincount(launch.layer_of, possible, len(launch.layers))
    share = np.array([layer.macs for layer in launch.layers]) / np.maximum(total, 1)
    return _Work(
        work_demand.unit,
        (work_demand.steps + held).astype(float),
        gemm * possible * share[launch.layer_of],
        peak.sum(0),
    )


def _uses_taps(program: Program, launch: LaunchStep) -> NDArray[np.bool_]:
    shift = formats(program.config)[Opcode.VECTOR].offsets["taps"]
    words = program.instructions(launch)
    return np.array([opcode_of(word) == Opcode.VECTOR and bool(word >> shift & 1) for word in words], bool)


def _layer_times_of_run(cfg: Config, launch: LaunchStep, work: _Work, run: Counters) -> list[_Time]:
    """Return the time of each layer of a launch in one run, from the run's events."""
    count = len(launch.layers)
    index = np.array([event.index for event in run.events])
    start = np.array([event.start for event in run.events], float)
    end = np.array([event.end for event in run.events], float)
    ends = np.zeros(count)
    np.maximum.at(ends, launch.layer_of[index], end)
    edges = np.concatenate([[0], np.maximum.accumulate(ends)])
    busy, held, own_work = (np.zeros((count, len(UNITS))) for _ in range(3))
    products = np.zeros(count)
    for unit in Unit:
        rows = np.flatnonzero(work.unit[index] == unit)
        rows = rows[np.argsort(end[rows], kind="stable")]
        instructions = index[rows]
        before = np.maximum.accumulate(np.concatenate([[0], end[rows]]))[:-1]
        spread = _Spread(np.maximum(start[rows], before), end[rows], edges)
        finished = np.minimum(work.busy[instructions], spread.length)
        busy[:, unit] = spread.of(finished)
        held[:, unit] = spread.of(spread.length - finished)
        products += spread.of(work.products[instructions] * finished / np.maximum(work.busy[instructions], 1))
        own_work[:, unit] = np.bincount(launch.layer_of, work.busy * (work.unit == unit), count)
    model = np.bincount(launch.layer_of, work.products, count)
    filled = model / np.maximum(own_work[:, Unit.GEMM] * cfg.macs_per_cycle, 1)
    cycles = np.diff(edges).astype(int).tolist()
    columns = cycles, busy, held, products.tolist(), own_work, filled.tolist(), work.peak.tolist()
    return [_Time(*column) for column in zip(*columns)]


class _Spread:
    """Amounts of consecutive intervals, spread evenly over each and summed up between `edges`."""

    def __init__(self, since: Floats, until: Floats, edges: Floats) -> None:
        self._since, self._until, self._edges = since, np.maximum(since, until), edges
        self.length = self._until - since

    def of(self, amounts: Floats) -> Floats:
        """Share of all amounts between each two edges; an interval without length counts where it ends."""
        total = np.zeros(len(self._edges) - 1)
        first = np.searchsorted(self._edges, self._since, "right") - 1
        last = np.minimum(np.searchsorted(self._edges, self._until, "left") - 1, len(total) - 1)
        within = first >= last
        np.add.at(total, last[within], amounts[within])
        for i in np.flatnonzero(~within):
            places = np.arange(first[i], last[i] + 1)
            low = np.maximum(self._edges[places], self._since[i])
            high = np.minimum(self._edges[places + 1], self._until[i])
            total[places] += amounts[i] * (high - low) / (self._until[i] - self._since[i])
        return total


# Rows -------------------------------------------------------------------------------------------------------


def _layer_row(cfg: Config, layer: LayerInfo, time: _Time | None, parts: int) -> dict[str, Any]:
    """Row of the report for a layer."""
    row: dict[str, Any] = {
        "name": layer.name, "op": layer.op, "what": layer.what, "macs": parts * layer.macs, "cycles": None,
        "peak": None, "utilization": None, "bound": None, "units": None, "advice": None,
        "bytes_loaded": parts * layer.bytes_loaded, "bytes_stored": parts * layer.bytes_stored, "note": layer.note,
        "bytes_kept": layer.bytes_kept, "cycles_apart": layer.cycles_apart, "cycles_together": layer.cycles_together,
    }  # fmt: skip
    if time is None:
        return row
    row["cycles"] = time.cycles
    row["peak"] = time.peak
    row["utilization"] = time.products / (time.cycles * cfg.macs_per_cycle) if time.cycles else None
    row["units"] = {
        name: {"busy": round(time.busy[unit]), "held": round(time.held[unit]),
               "idle": max(0, time.cycles - round(time.busy[unit]) - round(time.held[unit]))}
        for unit, name in enumerate(UNITS)
    }  # fmt: skip
    row["bound"] = _limiting_unit(time)
    row["advice"] = _layer_advice(cfg, layer, time, row["bound"])
    return row


def _limiting_unit(time: _Time) -> str | None:
    """Unit that worked for most of the cycles; "latency" where none did."""
    if not time.cycles:
        return None
    shares = time.busy / time.cycles
    for unit in (Unit.LOAD, Unit.STORE):  # they move nothing while they wait for memory
        shares[unit] += time.held[unit] / time.cycles
    best = int(np.argmax(np.where(shares >= shares.max() - 0.02, time.busy + 1, 0)))
    return UNITS[best] if shares[best] >= BOUND else "latency"


def _layer_advice(cfg: Config, layer: LayerInfo, time: _Time, bound: str | None) -> str | None:
    """Advise in one line how to make the layer faster."""
    if bound == "gemm" and time.filled >= FULL:
        return f"near the speed of the {cfg.macs_per_cycle} multipliers: a larger block_in or block_out"
    if bound == "gemm":
        array = f"{cfg.block_in} x {cfg.block_out}"
        return (
            f"its channels fill {time.filled:.0%} of the {array} array: other blocks, or channels in multiples of them"
        )
    if bound == "vector" and layer.macs and not time.own[Unit.GEMM]:
        return f"multiplied in the vector unit, {cfg.taps * cfg.lanes} at once: more taps, or a larger block_out"
    if bound == "vector" and "softmax of" in layer.what:
        return f"{cfg.softmax} elements of a row a cycle: a larger softmax"
    if bound == "vector" and " norm of" in layer.what:
        return f"{cfg.norm} elements of a row are added up in a cycle: a larger norm, up to block_out"
    if bound == "vector":
        faster = "residual_cycles = 1, or " if "+ add" in layer.what and cfg.residual_cycles > 1 else ""
        return f"one entry of {cfg.lanes} values a cycle: {faster}a larger block_out or batch"
    if bound == "load" and time.held[Unit.LOAD] > time.busy[Unit.LOAD]:
        return "load waits for memory most of its time: longer rows, or a memory with less latency"
    if bound == "load":
        ports = "ports = 2, " if cfg.ports == 1 else ""
        return (
            f"{cfg.bus_bytes} bytes a cycle arrive: a wider bus_bytes, {ports}or deeper inp and wgt to load less often"
        )
    if bound == "store":
        return f"{cfg.bus_bytes} bytes a cycle leave: a wider bus_bytes, or blocks of layers (forward = true)"
    if bound == "latency":
        busiest = UNITS[int(np.argmax(time.busy))]
        return f"units wait for each other, {busiest} works most: `celosia tune` looks for a faster schedule"
    return None
