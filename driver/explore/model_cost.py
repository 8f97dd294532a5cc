"""Cost of a model on a Config without a Program: in closed form, or with its instructions on the timing model.

The graph after its passes is the same for all Configs, so it is computed once in a process. Neither CPU kernels are
compiled nor does the verifier run: only cycles and bytes count.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import onnx_ir as ir

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importer import specialise
from celosia.compiler.graph.passes import Pipeline
from celosia.compiler.graph.pipeline import PASSES, for_hardware
from celosia.compiler.launch.blocks import estimated_cycles
from celosia.compiler.layer import TilingError
from celosia.compiler.lowering import lower, place
from celosia.compiler.tensorize.lowering import lower_layer
from celosia.compiler.tensorize.plan import Planner, workloads
from celosia.compiler.tensorize.space import Workload
from celosia.compiler.tune.layer_space import network_bound
from celosia.compiler.tune.layer_trial import CostSource, Status, TrialResult
from celosia.compiler.tune.network import TuningDecisions
from celosia.compiler.tune.records import Records, shipped
from celosia.hw.boards.boards import memory_model
from celosia.hw.boards.memory import MemoryModel
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Unit
from celosia.sim.timing import predict

UNITS = tuple(unit.name.lower() for unit in Unit)
"""Names of the units: load, gemm, vector, store."""
LIMITING_SHARE = 0.75
"""A unit limits a model if it is busy for at least this share of the cycles."""


@dataclass(frozen=True)
class ExploredModel:
    """A model that is explored. name: its file name without suffix. path: absolute. digest: of the file's bytes."""

    name: str
    path: str
    digest: str

    @staticmethod
    def of(path: str | Path) -> ExploredModel:
        """Return the model in a file. ModelError where there is no such file."""
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from None
        return ExploredModel(Path(path).stem, str(Path(path).resolve()), hashlib.sha256(data).hexdigest()[:32])


@dataclass(frozen=True)
class Cost:
    """Cost of one run of a model on a Config.

    images: images of a run. cycles: of all launches; in closed form an estimate. bound: a lower bound of cycles, 0
    where it was not computed. busy: cycles in which a unit works, by name of UNITS. moved: bytes from and to DRAM.
    macs: multiplications on the accelerator. on_cpu: number of operators that stay on the CPU.
    """

    images: int
    cycles: int
    bound: int
    busy: dict[str, int]
    moved: int
    macs: int
    on_cpu: int

    @property
    def limit(self) -> str:
        """The busiest unit if it limits the model (LIMITING_SHARE), else "latency"."""
        unit = max(self.busy, key=self.busy.__getitem__)
        return unit if self.busy[unit] >= LIMITING_SHARE * self.cycles else "latency"


def _load_graph(subject: ExploredModel, cfg: Config) -> tuple[ir.Model, int]:
    """Return the graph after the passes for `cfg`, and the images of a run. ModelError.

    Configs that need no passes of their own share a cached graph.
    """
    return _import_graph(subject, cfg.batch, cfg if list(for_hardware(cfg)) else None)


@lru_cache(maxsize=8)
def _import_graph(subject: ExploredModel, batch: int, cfg: Config | None) -> tuple[ir.Model, int]:
    """Import a model for `batch` images and run its passes. cfg: None where no pass depends on the Config."""
    specialised = specialise(subject.path, None, batch)
    Pipeline(*PASSES, *(for_hardware(cfg) if cfg else ())).run(specialised.graph)
    return specialised.graph, batch if specialised.batched else 1


def count_cpu_operators(subject: ExploredModel, cfg: Config) -> int:
    """Count the operators that stay on the CPU, without looking for tilings. ModelError.

    With the board's own Config, that is how many may stay there with others (`Ladder.on_cpu`).
    """
    return len(place(_load_graph(subject, cfg)[0], cfg).cpu)


def count_accelerated_macs(subject: ExploredModel, cfg: Config) -> int:
    """Count the multiplications that run on the accelerator, without looking for tilings. ModelError.

    An exploration refuses a model that has none.
    """
    return sum(choice.layer.macs for choice in place(_load_graph(subject, cfg)[0], cfg).choices)


def explain_nothing_on_accelerator(subject: ExploredModel) -> str:
    """Return the error message for a model of which nothing runs on the accelerator."""
    return f"nothing of {subject.name} runs on the accelerator; make an int8 model of it with `celosia quantize`"


def estimate_cycles(subject: ExploredModel, cfg: Config, memory: MemoryModel | str) -> Cost:
    """Estimate the Cost in closed form, layer by layer, by the compiler's cost model. Takes milliseconds.

    Blocks are not formed: each tensor between layers counts as moved to and from DRAM.

    TilingError where a layer does not fit the scratchpads; ModelError.
    """
    graph, images = _load_graph(subject, cfg)
    selection = place(graph, cfg)
    cycles_of: dict[Workload, float] = {}
    workloads_of_layers, total, moved, vector = [], 0.0, 0, 0
    for choice in selection.choices:
        candidates = [workload for computation in lower_layer(cfg, choice.layer) for workload in workloads(computation)]
        layer_workloads = [candidate for candidate in candidates if isinstance(candidate, Workload)]
        for workload in layer_workloads:
            if workload not in cycles_of:
                cycles_of[workload] = estimated_cycles(cfg, workload)
            total += cycles_of[workload]
            # VECTOR takes `sums` steps for each entry of the result if it adds up windows, else one step.
            vector += workload.out_blocks * workload.rows * workload.columns * workload.images * max(1, workload.sums)
        workloads_of_layers.append((choice.layer, layer_workloads))
        moved += choice.layer.x.size(cfg) + choice.layer.y.size(cfg)
        moved += 0 if choice.layer.gemm is None else choice.layer.gemm.weights.size
    gemm = sum(workload.steps for _, layer_workloads in workloads_of_layers for workload in layer_workloads)
    # All traffic counts as LOAD's: loads and stores are not told apart here.
    busy = {"gemm": gemm, "vector": vector, "load": moved // cfg.bus_bytes, "store": 0}
    bound = int(network_bound(cfg, workloads_of_layers, memory_model(memory)))
    macs = sum(choice.layer.macs for choice in selection.choices)
    return Cost(images, max(bound, round(total)), bound, busy, moved, macs, len(selection.cpu))


def measure_cycles(subject: ExploredModel, cfg: Config, memory: MemoryModel | str) -> Cost:
    """Compile the model, and run its instructions on the timing model. Takes seconds. ModelError, TilingError."""
    graph, images = _load_graph(subject, cfg)
    lowered = lower(cfg, graph, Planner(cfg))
    image, values, moved = lowered.image, Counter[str](), 0
    for launch in image.launches:
        code = image.code(launch)
        values.update(predict(cfg, code.tobytes(), memory, launch.address).values)
        moved += sum(launch.bytes_loaded) + sum(launch.bytes_stored) + code.size
    busy = {unit: values[f"{unit}_busy"] for unit in UNITS}
    # LOAD and STORE work while they wait for memory
    busy |= {unit: busy[unit] + values[f"{unit}_wait_memory"] for unit in ("load", "store")}
    macs = sum(choice.layer.macs for choice in lowered.partition.choices)
    return Cost(images, values["cycles"], 0, busy, moved, macs, len(lowered.partition.cpu))


def cycles_with_records(subject: ExploredModel, cfg: Config, memory: str) -> int | None:
    """Return the cycles with the records that come with Celosia for this Config; None if there are none."""
    if not shipped(cfg).trials:
        return None
    graph, _ = _load_graph(subject, cfg)
    lowered = lower(cfg, graph, Planner(cfg), schedules=TuningDecisions(records=Records()))
    return lowered.network.cycles(lowered.image, CostSource("timed", memory))


RUNGS = {"closed": estimate_cycles, "timed": measure_cycles}
"""Functions that compute a Cost, by name of the rung (`ladder.py`)."""


@dataclass(frozen=True)
class CostJob:
    """A job for a Fleet: compute the Cost of a model on a Config at a rung of RUNGS. Its TrialResult has it as JSON."""

    subject: ExploredModel
    cfg: Config
    rung: str
    memory: MemoryModel | str

    @property
    def group(self) -> str:
        """Key of the model: jobs of one key run in one process if possible, as they share its graph."""
        return self.subject.digest

    def run(self) -> TrialResult:
        """Compute the Cost in this process; the Status of the TrialResult says what went wrong."""
        try:
            if ExploredModel.of(self.subject.path).digest != self.subject.digest:
                return TrialResult(Status.FAILED, detail=f"{self.subject.path} is another file here; give all the same")
            cost = RUNGS[self.rung](self.subject, self.cfg, self.memory)
        except TilingError as error:
            return TrialResult(Status.REFUSED, detail=str(error))
        except ModelError as error:
            return TrialResult(Status.FAILED, detail=str(error))
        return TrialResult(Status.OK, max(1, cost.cycles), json.dumps(asdict(cost)))


def config_for_cycles(cfg: Config) -> Config:
    """Return `cfg` with fixed `packed` and `pump`, on which cycles do not depend: such Configs share measurements."""
    return replace(cfg, packed=True, pump=1)


def parse_cost(result: TrialResult) -> Cost:
    """Return the Cost in the result of a CostJob. The result must be OK."""
    fields: dict[str, Any] = json.loads(result.detail)
    return Cost(**fields)
