"""Cost of a model on a Config without a Program: in closed form, or with its instructions on the timing model.

The graph after its passes, which every Config shares, is made once in a process. Neither kernels of the CPU nor the
verifier run, for only cycles and bytes are asked for.
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
from celosia.compiler.graph.importing.specialise import specialise
from celosia.compiler.graph.passes import Pipeline
from celosia.compiler.graph.pipeline import PASSES, for_hardware
from celosia.compiler.launch.blocks import estimated_cycles
from celosia.compiler.layer import TilingError
from celosia.compiler.lowering import lower, place
from celosia.compiler.tensorize.lowering import lower_layer
from celosia.compiler.tensorize.plan import Planner
from celosia.compiler.tensorize.schedule_policy import workloads
from celosia.compiler.tensorize.space import Workload
from celosia.compiler.tune.cycle_bounds import network_bound
from celosia.compiler.tune.layer_trial import CostSource, Status, TrialResult
from celosia.compiler.tune.network import TuningDecisions
from celosia.compiler.tune.records import Records
from celosia.compiler.tune.shipped import shipped
from celosia.hw.boards.boards import memory_model
from celosia.hw.boards.memory import MemoryModel
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Unit
from celosia.sim.timing import predict

UNITS = tuple(unit.name.lower() for unit in Unit)


@dataclass(frozen=True)
class ExploredModel:
    """A model that is explored. digest: of its file."""

    name: str
    path: str
    digest: str

    @staticmethod
    def of(path: str | Path) -> ExploredModel:
        """Describe a model. ModelError where there is no such file."""
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from None
        return ExploredModel(Path(path).stem, str(Path(path).resolve()), hashlib.sha256(data).hexdigest()[:32])


@dataclass(frozen=True)
class Cost:
    """Cost of a model on a Config, for `images` at once.

    cycles: of all launches; in closed form an estimate. bound: cycles that it is not below, 0 where nobody looked.
    busy: cycles of work of each of UNITS. moved: bytes from and to DRAM. macs: multiplications of the model. on_cpu:
    operators that the accelerator does not take.
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
        """Unit that works for most of the cycles, at least three quarters of them; else latency."""
        unit = max(self.busy, key=self.busy.__getitem__)
        return unit if self.busy[unit] >= 0.75 * self.cycles else "latency"


def _load_graph(subject: ExploredModel, cfg: Config) -> tuple[ir.Model, int]:
    """Return the graph after its passes, and images in a run. Raises ModelError."""
    return _prepare(subject, cfg.batch, cfg if list(for_hardware(cfg)) else None)


@lru_cache(maxsize=8)
def _prepare(subject: ExploredModel, batch: int, cfg: Config | None) -> tuple[ir.Model, int]:
    """Import a model and run its passes. cfg: None for all Configs that no pass depends on."""
    specialised = specialise(subject.path, None, batch)
    Pipeline(*PASSES, *(for_hardware(cfg) if cfg else ())).run(specialised.graph)
    return specialised.graph, batch if specialised.batched else 1


def cpu_operators(subject: ExploredModel, cfg: Config, products: bool = False) -> int:
    """List the operators that stay on the CPU, without looking at tiles; or sum the products of those that do not.
    ModelError."""
    selection = place(_load_graph(subject, cfg)[0], cfg)
    return sum(choice.layer.macs for choice in selection.choices) if products else len(selection.cpu)


def explain_nothing_on_accelerator(subject: ExploredModel) -> str:
    """Explain why no Config can be judged by a model: nothing of it runs on the accelerator."""
    return f"nothing of {subject.name} runs on the accelerator; make an int8 model of it with `celosia quantize`"


def estimate_cycles(subject: ExploredModel, cfg: Config, memory: MemoryModel | str) -> Cost:
    """Layer by layer, by the compiler's estimate of the schedules that it takes: milliseconds. Blocks are not formed.

    TilingError where a layer does not fit the scratchpads; ModelError.
    """
    graph, images = _load_graph(subject, cfg)
    selection = place(graph, cfg)
    seconds_of: dict[Workload, float] = {}
    requests, total, moved, vector = [], 0.0, 0, 0
    for choice in selection.choices:
        candidates = [workload for computation in lower_layer(cfg, choice.layer) for workload in workloads(computation)]
        layer_workloads = [candidate for candidate in candidates if isinstance(candidate, Workload)]
        for work in layer_workloads:
            if work not in seconds_of:
                seconds_of[work] = estimated_cycles(cfg, work)
            total += seconds_of[work]
            vector += work.out_blocks * work.rows * work.columns * work.images * max(1, work.sums)
        requests.append((choice.layer, layer_workloads))
        moved += choice.layer.x.size(cfg) + choice.layer.y.size(cfg)
        moved += 0 if choice.layer.gemm is None else choice.layer.gemm.weights.size
    gemm = sum(workload.steps for _, layer_workloads in requests for workload in layer_workloads)
    busy = {"gemm": gemm, "vector": vector, "load": moved // cfg.bus_bytes, "store": 0}
    bound = int(network_bound(cfg, requests, memory_model(memory)))
    macs = sum(choice.layer.macs for choice in selection.choices)
    return Cost(images, max(bound, round(total)), bound, busy, moved, macs, len(selection.cpu))


def measure_cycles(subject: ExploredModel, cfg: Config, memory: MemoryModel | str) -> Cost:
    """Compile the model, and run its instructions on the timing model. ModelError."""
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
    """Cycles with the schedules that come with Celosia for this Config, as `compile` uses them; None without any."""
    if not shipped(cfg).trials:
        return None
    graph, _ = _load_graph(subject, cfg)

    lowered = lower(cfg, graph, Planner(cfg), schedules=TuningDecisions(records=Records()))
    return lowered.network.cycles(lowered.image, CostSource("timed", memory))


RUNGS = {"closed": estimate_cycles, "timed": measure_cycles}


@dataclass(frozen=True)
class Ask:
    """Job of a Fleet: cost of a model on a Config at a rung of RUNGS. Its TrialResult holds the Cost as JSON."""

    subject: ExploredModel
    cfg: Config
    rung: str
    memory: MemoryModel | str

    @property
    def group(self) -> str:
        """Key of jobs that share the loaded graph: the model."""
        return self.subject.digest

    def run(self) -> TrialResult:
        """Measure the Job in this process; the Status says what went wrong."""
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
    """Return `cfg` without what cycles do not depend on: `packed` and `pump`."""
    return replace(cfg, packed=True, pump=1)


def parse_cost(result: TrialResult) -> Cost:
    """Return the Cost in the answer of an Ask; for a TrialResult that is OK."""
    fields: dict[str, Any] = json.loads(result.detail)
    return Cost(**fields)
