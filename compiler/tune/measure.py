"""One trial: a layer under given decisions, compiled, run and compared with what it means.

    result = measure(LayerJob(cfg, packed(layer), decisions, CostSource("timed"), limit=0))

The layer runs twice in a row, the second time with other constants and, where shapes allow it, on what it has made
before: what it shares with its neighbours in a network, the end of one layer and the loads of the next, counts. Nothing
that compiles to wrong bytes has cycles.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.launch.image import Image, LayerErrors, build
from celosia.compiler.layer import (
    Activation,
    ActivationProduct,
    Block,
    Conv,
    Int8,
    Layer,
    Multiply,
    Norm,
    Part,
    Pool,
    Requantise,
    Softmax,
    Storage,
    TilingError,
    inputs,
    moved,
)
from celosia.compiler.program.activation_packing import unpack_activation
from celosia.compiler.tensorize.decide import FixedSchedule
from celosia.compiler.tensorize.plan import Planner
from celosia.compiler.tensorize.space import Decisions
from celosia.compiler.tune.reference import meaning
from celosia.hw.boards.memory import IDEAL, ZYNQ_HP
from celosia.hw.spec.config import Config
from celosia.sim.device import Device, DeviceError, TimeLimit
from celosia.sim.devices import SSH_PREFIX, WITH_CYCLES
from celosia.sim.functional.fsim import FunctionalDevice
from celosia.sim.timing import predict

Bytes = NDArray[np.uint8]
VERSION = 5
"""Version of what is measured: a change of the timing model, of the stream that decisions make or of this file raises
it, and records of other versions are no longer exact."""
Opened = Callable[[Config, "CostSource"], Device]
COPIES = 2
"""Times that the layer runs in a row."""
REMEMBERED = 8
"""Layers whose meaning a process remembers."""
MOST_CYCLES = 1 << 32


class Status(StrEnum):
    """End of a trial. Only OK has cycles, and CENSORED a number that they exceed."""

    OK = "ok"
    CENSORED = "censored"
    WRONG = "wrong output"
    REFUSED = "refused"
    FAILED = "device failed"
    HUNG = "no answer in time"
    LOST = "connection lost"
    CRASHED = "process died"


OF_THE_DEVICE = (Status.FAILED, Status.HUNG, Status.CRASHED, Status.LOST)
"""Failures that say something about who measures."""


@dataclass(frozen=True)
class CostSource:
    """Source of cycle counts: the timing model or the RTL, with the memory of that name behind it, or a board, as
    ssh://USER@BOARD; whole networks are judged by the timing model with that memory then, too."""

    device: str = "timed"
    memory: str = ZYNQ_HP.name

    def __post_init__(self) -> None:
        if self.device not in WITH_CYCLES and not self.board:
            raise ValueError(f"no trial can run on {self.device!r}; take {', '.join(WITH_CYCLES)} or ssh://USER@BOARD")

    @property
    def board(self) -> bool:
        """Whether it is one over ssh."""
        return self.device.startswith(SSH_PREFIX)

    @property
    def bounds(self) -> str:
        """The memory that no trial's is faster than."""
        return IDEAL.name if self.board else self.memory

    @property
    def version(self) -> str:
        """What a record says of who measured it."""
        return f"{self.device} {VERSION}" if self.board else f"{self.device} {VERSION}, {self.memory}"


TIMED = CostSource()


def other_version(asked: int) -> str:
    """What is wrong with a job of another VERSION."""
    return f"version {VERSION} of what is measured is here, {asked} was asked for; install the same Celosia"


@dataclass(frozen=True)
class LayerJob:
    """A trial. layer: as `packed`. decisions: for each problem of it. limit: cycles of a run at which it is given up
    (0: none), and reported as CENSORED."""

    cfg: Config
    layer: bytes
    decisions: tuple[Decisions, ...]
    judge: CostSource = TIMED
    limit: int = 0
    version: int = VERSION
    """Version of who asks."""

    @property
    def alike(self) -> str:
        """The Config, whose simulator is loaded."""
        return self.cfg.digest

    def run(self) -> TrialResult:
        return measure(self)


@dataclass(frozen=True)
class TrialResult:
    """Result of a trial. cycles: of the layer twice in a row where `status` is OK, the limit where it is CENSORED."""

    status: Status
    cycles: int = 0
    detail: str = ""
    seconds: float = 0.0

    @property
    def cost(self) -> float | None:
        """Cycles of a trial that came to its end."""
        return float(self.cycles) if self.status == Status.OK else None


def packed(layer: Layer) -> bytes:
    """`layer` for a LayerJob."""
    return pickle.dumps(layer)


def measure(job: LayerJob, board: Opened | None = None) -> TrialResult:
    """Compile, run and compare. Raises nothing that the layer, its decisions or the device are the reason of.

    board: gives the Device of a board, whose errors are the caller's affair but for DeviceError.
    """
    started = time.perf_counter()
    try:
        found = _measured(job, board)
    except (LayerErrors, TilingError) as error:
        found = TrialResult(Status.REFUSED, detail=str(error))
    except TimeLimit:
        found = TrialResult(Status.CENSORED, job.limit)
    except DeviceError as error:
        found = TrialResult(Status.FAILED, detail=str(error))
    return replace(found, seconds=time.perf_counter() - started)


def _measured(job: LayerJob, board: Opened | None) -> TrialResult:
    if job.version != VERSION:
        return TrialResult(Status.FAILED, detail=other_version(job.version))
    if job.judge.board and board is None:
        return TrialResult(Status.FAILED, detail=f"this process has no connection to {job.judge.device}")
    case = _case(job.cfg, job.layer)
    image = case.image(job.decisions)
    (launch,) = image.launches
    device: Device
    if job.judge.device == "timed":
        cycles = predict(job.cfg, image.code(launch).tobytes(), job.judge.memory, launch.address).cycles
        if 0 < job.limit < cycles:
            return TrialResult(Status.CENSORED, job.limit)
        device = FunctionalDevice(job.cfg)
        case.fill(device, image)
        device.run(launch.address, launch.count)
    else:
        device = _rtl(job.cfg, job.judge.memory) if board is None else board(job.cfg, job.judge)
        case.fill(device, image)
        cycles = device.run(launch.address, launch.count, job.limit or MOST_CYCLES).cycles or 0
        if 0 < job.limit < cycles:  # a board's limit is one of seconds
            return TrialResult(Status.CENSORED, job.limit)
    wrong = case.difference(device, image)
    return TrialResult(Status.WRONG, detail=wrong) if wrong else TrialResult(Status.OK, cycles)


@lru_cache(maxsize=1)
def _rtl(cfg: Config, memory: str) -> Device:
    from celosia.sim.rtl.rtlsim import RtlDevice  # builds a simulator; the timing model needs none

    return RtlDevice(cfg, memory, quiet=True)


@lru_cache(maxsize=REMEMBERED)
def _case(cfg: Config, layer: bytes) -> LayerCase:
    return LayerCase(cfg, pickle.loads(layer))


class LayerCase:
    """A layer several times in a row, random bytes for what it reads, and what it must make of them."""

    def __init__(self, cfg: Config, layer: Layer) -> None:
        self.cfg, self.layers = cfg, in_a_row(layer)
        self.made = {each.y.storage for each in self.layers}
        read = (act.storage for each in self.layers for act in inputs(each))
        self.given = list(dict.fromkeys(storage for storage in read if storage not in self.made))

    def cycles(self, decisions: Sequence[Decisions], memory: str = ZYNQ_HP.name) -> int:
        """By the timing model, nothing compared. LayerErrors, TilingError."""
        image = self.image(decisions)
        (launch,) = image.launches
        return predict(self.cfg, image.code(launch).tobytes(), memory, launch.address).cycles

    def fits(self, decisions: Sequence[Decisions]) -> bool:
        """Whether the layer can be compiled so."""
        try:
            self.image(decisions)
        except (LayerErrors, TilingError):
            return False
        return True

    @cached_property
    def bytes(self) -> dict[Storage, Bytes]:
        """Bytes of each storage that is given."""
        rng = np.random.default_rng(0)
        sizes = {act.storage: act.size(self.cfg) for each in self.layers for act in inputs(each)}
        return {storage: _random(rng, sizes[storage]) for storage in self.given}

    @cached_property
    def expected(self) -> dict[Activation, Int8]:
        """Each output."""
        values: dict[Activation, Int8] = {}
        for layer in self.layers:
            for act in inputs(layer):
                if act not in values:
                    values[act] = _values(self.cfg, self.bytes[act.storage], act)
            values[layer.y] = meaning(layer, values)
        return {layer.y: values[layer.y] for layer in self.layers}

    def image(self, decisions: Sequence[Decisions]) -> Image:
        """The layers under `decisions`, ready to run. TilingError, LayerErrors."""
        planner = Planner(self.cfg, FixedSchedule(list(decisions)))
        return build(self.cfg, [list(self.layers)], [set(self.given)], [self.made], planner)

    def fill(self, device: Device, image: Image) -> None:
        """Give `device` the program and its inputs."""
        device.allocate(image.size)
        device.write(0, np.zeros(image.constants_address, np.uint8))
        device.write(image.constants_address, image.constants)
        for storage, data in self.bytes.items():
            device.write(image.addresses[storage], data)

    def difference(self, device: Device, image: Image) -> str:
        """What `device` holds of the outputs and should not; "" where all is right."""
        for number, (act, expected) in enumerate(self.expected.items()):
            found = _values(self.cfg, device.read(image.addresses[act.storage], act.size(self.cfg)), act)
            wrong = np.argwhere(found != expected)
            if len(wrong):
                first = tuple(wrong[0])
                return (
                    f"{len(wrong)} of {found.size} bytes of run {number} are wrong, the first at image, channel, row, "
                    f"column {', '.join(map(str, first))}: expected {expected[first]}, found {found[first]}"
                )
        return ""


def _random(rng: np.random.Generator, size: int) -> Bytes:
    """Bytes of the whole range in one half, small ones in the other, whose sums do not leave the output's range."""
    data = rng.integers(-128, 128, size).astype(np.int8)
    data[size // 2 :] >>= 3
    return data.view(np.uint8)


def _values(cfg: Config, memory: Bytes, act: Activation) -> Int8:
    """`act`, [images, channels, rows, columns], from memory that begins with its storage."""
    whole = act.images, act.channels, act.pixels.rows, act.pixels.columns
    array = unpack_activation(cfg, memory, whole, act.storage_groups, act.group_offset)
    return np.ascontiguousarray(array[:, :, *act.cut(cfg)[1:]])


def in_a_row(layer: Layer) -> tuple[Layer, ...]:
    """`layer`, on storages of its own, and once more with other constants, so that none stay on chip between the two,
    on what it has made before where that has the shape of what it reads."""
    first = _alone(layer, {})
    x, y = first.x, first.y
    same = x.storage.groups == y.storage.groups and replace(x, storage=y.storage) == y
    return first, _alone(_turned(first), {x.storage: y.storage} if same else {})


def _alone(layer: Layer, places: dict[Storage, Storage]) -> Layer:
    def placed(act: Activation) -> Activation:
        if act.storage not in places:
            places[act.storage] = Storage(act.storage.name, act.storage.groups)
        return replace(act, storage=places[act.storage])

    return moved(layer, placed)


def _turned(layer: Layer) -> Layer:
    """`layer` with other constants: those of each output channel at the next one."""
    if isinstance(layer, Block):
        parts = [_turned(each) for each in layer.layers]
        return replace(layer, layers=tuple(part for part in parts if isinstance(part, Part)))
    if isinstance(layer, Conv):
        layer = replace(layer, weights=_rolled(layer.weights))
    if isinstance(layer, Conv | Pool | Multiply | ActivationProduct | Norm) and (r := layer.requantise) is not None:
        turned = Requantise(_rolled(r.bias), np.roll(r.multiplier, 1), np.roll(r.shift, 1), r.zero_point)
        layer = replace(layer, requantise=turned)
    return replace(layer, powers=_rolled(layer.powers)) if isinstance(layer, Softmax) else layer


def _rolled(values: NDArray[Any]) -> NDArray[Any]:
    """`values` by one channel further; where channels are all alike, or there is one, with another value for all."""
    found = np.roll(values, 1, 0)
    if found.size and np.array_equal(found, values):
        found[...] = 0 if found.flat[0] else 1
    return found
