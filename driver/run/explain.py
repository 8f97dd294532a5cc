"""Explain a layer's cycles: what each unit did in them, what bounds the layer, and what would make it faster.

A layer's row is an interval of time, from the end of the layers before it to its own end, so that cycles add up to
those of the run. All work of a unit in that interval counts for the layer, even loads for the next one. An
instruction's work is spread evenly over the time in which it had its unit to itself, so that no share exceeds 100%. A
layer's utilisation is that of the array; the vector unit can multiply as well (taps), which its own share shows.
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
"""Names of the units in reports."""
BOUND = 0.75
"""Share of a layer's cycles from which on a busy unit bounds the layer; without such a unit, latency does."""
FULL = 0.85
"""Share of the multipliers that do useful work from which on only more multipliers help."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class _Work:
    """Work that the instructions of a launch ask for.

    unit, busy: the unit of each instruction, and its cycles of work. products: the MACs of the model that each GEMM
    computes; a layer's MACs are spread over its instructions by how many each could compute. peak: of each layer, see
    `_LayerTime`.
    """

    unit: NDArray[np.int64]
    busy: Floats
    products: Floats
    peak: NDArray[np.int64]


def layer_rows(program: Program, counters: Sequence[Counters]) -> list[dict[str, Any]]:
    """Return the rows of a report, one for each layer.

    counters: those of each launch, again for each part of a batch. cycles, utilization, bound, units and advice are
    None where the times of instructions are not known.
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

    memory: the memory behind the accelerator; ValueError for one that the timing model does not know. ProgramError
    where the Program, which may come from a file, has invalid instructions, or some that wait for each other for ever.
    """
    memory = memory_model(memory)
    with report_invalid_instructions(program):
        return [
            predict(program.config, launch_code(program, launch), memory, launch.address).counters(trace=True)
            for launch in program.launches
        ]


@contextmanager
def report_invalid_instructions(program: Program) -> Iterator[None]:
    """Convert errors of the timing model in the block to ProgramError: the Program's instructions are invalid."""
    try:
        yield
    except (ValueError, DeviceError) as error:
        raise ProgramError(f"the instructions of Program {program.name!r} are damaged: {error}") from None


def estimate(
    program: Program, memory: MemoryModel | str = ZYNQ_HP, counters: Sequence[Counters] | None = None
) -> dict[str, Any]:
    """Return the report of a predicted run: cycles, utilization and layers of the timing model.

    memory, ValueError, ProgramError: see `predict_counters`. counters: its result, if it is known already.
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
    """Advice that several layers have in common.

    bound: what limits them. advice: one line. layers: their number. longest: name of the longest of them. share: their
    share of the cycles of all layers with advice.
    """

    bound: str
    advice: str
    layers: int
    longest: str
    share: float


def advise_by_cycles(report: dict[str, Any]) -> list[Advice]:
    """Return the advice for the layers of a report, that for most cycles first; empty where there are no cycles."""
    rows = [row for row in report["layers"] if row["advice"] and row["cycles"]]
    rows_by_advice: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        rows_by_advice.setdefault((row["bound"], row["advice"]), []).append(row)
    total = sum(row["cycles"] for row in rows)
    advice_list = [
        Advice(bound, advice, len(matching_rows), max(matching_rows, key=lambda row: row["cycles"])["name"],
               sum(row["cycles"] for row in matching_rows) / total)
        for (bound, advice), matching_rows in rows_by_advice.items()
    ]  # fmt: skip
    return sorted(advice_list, key=lambda advice: -advice.share)


def launch_code(program: Program, launch: LaunchStep) -> bytes:
    """Return the bytes of a launch's instructions."""
    start = launch.address - program.image_address
    return program.image[start : start + launch.count * instruction_bytes(program.config)].tobytes()


# Time -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LayerTime:
    """Cycles of the units in the interval of a layer, busy and stalled.

    cycles: its length. busy, held: for each unit, cycles with work, and cycles in which an instruction was under way
    without work. products: MACs of the model that the array computed in it. own: for each unit, cycles of work that the
    layer's own instructions ask for, whenever they run. filled: share of the array's products in these instructions
    that are the model's, not padding. peak: MACs a cycle of the array, the vector unit's taps or both, whichever the
    layer uses.
    """

    cycles: int
    busy: Floats
    held: Floats
    products: float
    own: Floats
    filled: float
    peak: int

    def __add__(self, other: _LayerTime) -> _LayerTime:
        return _LayerTime(
            self.cycles + other.cycles, self.busy + other.busy, self.held + other.held,
            self.products + other.products, self.own + other.own, self.filled,
            self.peak,
        )  # fmt: skip


def _layer_times(program: Program, launch: LaunchStep, runs: Sequence[Counters]) -> list[_LayerTime]:
    """Return the time of each layer, added up over runs of the launch."""
    work = _instruction_work(program, launch)
    times = [_layer_times_of_run(program.config, launch, work, run) for run in runs]
    return [sum(rest, first) for first, *rest in zip(*times)]


def _instruction_work(program: Program, launch: LaunchStep) -> _Work:
    """Return the work of each instruction of a launch."""
    cfg, work_demand = program.config, demand(program.config, launch_code(program, launch))
    residual_cycles = (cfg.residual_cycles - 1) * work_demand.outputs * work_demand.residual
    gemm, taps = work_demand.unit == Unit.GEMM, _uses_taps(program, launch)
    speed = np.where(gemm, cfg.macs_per_cycle, taps * cfg.taps * cfg.lanes)
    possible = work_demand.steps * speed
    peak = np.zeros((2, len(launch.layers)), np.int64)
    np.maximum.at(peak, (gemm.astype(int), launch.layer_of), speed)
    total = np.bincount(launch.layer_of, possible, len(launch.layers))
    share = np.array([layer.macs for layer in launch.layers]) / np.maximum(total, 1)
    return _Work(
        work_demand.unit,
        (work_demand.steps + residual_cycles).astype(float),
        gemm * possible * share[launch.layer_of],
        peak.sum(0),
    )


def _uses_taps(program: Program, launch: LaunchStep) -> NDArray[np.bool_]:
    """Return a mask of the instructions of a launch that are VECTORs with taps, which multiply."""
    shift = formats(program.config)[Opcode.VECTOR].offsets["taps"]
    words = program.instructions(launch)
    return np.array([opcode_of(word) == Opcode.VECTOR and bool(word >> shift & 1) for word in words], bool)


def _layer_times_of_run(cfg: Config, launch: LaunchStep, work: _Work, run: Counters) -> list[_LayerTime]:
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
        last_end = np.maximum.accumulate(np.concatenate([[0], end[rows]]))[:-1]
        spread = _Spread(np.maximum(start[rows], last_end), end[rows], edges)
        finished = np.minimum(work.busy[instructions], spread.length)
        busy[:, unit] = spread.add_up(finished)
        held[:, unit] = spread.add_up(spread.length - finished)
        products += spread.add_up(work.products[instructions] * finished / np.maximum(work.busy[instructions], 1))
        own_work[:, unit] = np.bincount(launch.layer_of, work.busy * (work.unit == unit), count)
    model = np.bincount(launch.layer_of, work.products, count)
    filled = model / np.maximum(own_work[:, Unit.GEMM] * cfg.macs_per_cycle, 1)
    cycles = np.diff(edges).astype(int).tolist()
    columns = cycles, busy, held, products.tolist(), own_work, filled.tolist(), work.peak.tolist()
    return [_LayerTime(*column) for column in zip(*columns)]


class _Spread:
    """Consecutive intervals, over which amounts are spread evenly and then added up between `edges`.

    since, until: beginning and end of each interval, in cycles. edges: ends of the layers, in cycles, from 0 on.
    """

    def __init__(self, since: Floats, until: Floats, edges: Floats) -> None:
        self._since, self._until, self._edges = since, np.maximum(since, until), edges
        self.length = self._until - since

    def add_up(self, amounts: Floats) -> Floats:
        """Return the sum of all amounts between each two neighbouring edges.

        amounts: one for each interval. An interval without length counts where it ends.
        """
        total = np.zeros(len(self._edges) - 1)
        first = np.searchsorted(self._edges, self._since, "right") - 1
        last = np.minimum(np.searchsorted(self._edges, self._until, "left") - 1, len(total) - 1)
        lies_between_two = first >= last
        np.add.at(total, last[lies_between_two], amounts[lies_between_two])
        for i in np.flatnonzero(~lies_between_two):
            places = np.arange(first[i], last[i] + 1)
            low = np.maximum(self._edges[places], self._since[i])
            high = np.minimum(self._edges[places + 1], self._until[i])
            total[places] += amounts[i] * (high - low) / (self._until[i] - self._since[i])
        return total


# Rows -------------------------------------------------------------------------------------------------------


def _layer_row(cfg: Config, layer: LayerInfo, time: _LayerTime | None, parts: int) -> dict[str, Any]:
    """Return the report's row of a layer. time: None where it is not known. parts: how many times the Program ran."""
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


def _limiting_unit(time: _LayerTime) -> str | None:
    """Return the unit that worked for at least BOUND of the cycles, the busiest; "latency" where none did.

    LOAD and STORE also count as working while they wait for memory. None for a layer without cycles.
    """
    if not time.cycles:
        return None
    shares = time.busy / time.cycles
    for unit in (Unit.LOAD, Unit.STORE):  # they move nothing while they wait for memory
        shares[unit] += time.held[unit] / time.cycles
    best = int(np.argmax(np.where(shares >= shares.max() - 0.02, time.busy + 1, 0)))
    return UNITS[best] if shares[best] >= BOUND else "latency"


def _layer_advice(cfg: Config, layer: LayerInfo, time: _LayerTime, bound: str | None) -> str | None:
    """Return one line of advice how to make a layer with this bound faster; None without a bound."""
    if bound == "gemm" and time.filled >= FULL:
        return (
            f"near the speed of the {cfg.macs_per_cycle} multipliers: a larger block_in or block_out, if the layer has "
            f"more than {cfg.block_in} input or {cfg.block_out} output channels; a larger batch for several images"
        )
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
