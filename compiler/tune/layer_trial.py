"""Trial of a layer: compile it under given decisions, run it, and compare its output with the reference.

    result = measure(LayerJob(cfg, pickled(layer), decisions, CostSource("timed"), limit=0))

The layer runs twice in a row, the second time with other constants and, where shapes allow it, on its own output. So
the cycles include the overlap of the end of a layer with the loads of the next one, as in a network. A schedule with
wrong output has no cycles.

The reference, `reference_output`, computes layers in numpy, without tiles, scratchpads and instructions.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.launch.image import Image, LayerErrors, build
from celosia.compiler.layer import (
    Activation,
    Epilogue,
    Gemm,
    Int8,
    Layer,
    Requantise,
    Softmax,
    Storage,
    TilingError,
    Window,
)
from celosia.compiler.numerics import RescaleAdd, requantize, rescale_add
from celosia.compiler.program.model import unpack_activation
from celosia.compiler.tensorize.plan import FixedSchedule, Planner
from celosia.compiler.tensorize.space import Tiling
from celosia.hw.boards.memory import IDEAL, ZYNQ_HP
from celosia.hw.spec.config import Config
from celosia.sim.device import Device, DeviceError, TimeLimitError
from celosia.sim.devices import SSH_PREFIX, WITH_CYCLES
from celosia.sim.functional.fsim import FunctionalDevice
from celosia.sim.functional.norm import normalise_rows
from celosia.sim.timing import predict

Bytes = NDArray[np.uint8]
VERSION = 6
"""Version of measurements. A change of the timing model, of generated streams or of this file raises it, and records of
other versions are no longer exact."""
OpenDevice = Callable[[Config, "CostSource"], Device]
"""Function that opens the Device of a board."""
COPIES = 2
"""Number of times that a trial runs the layer in a row."""
MAX_CACHED_LAYERS = 8
"""Limit of the layers whose reference output a process caches."""
MAX_CYCLES = 1 << 32
"""Cycles at which a run without a limit is given up."""


class Status(StrEnum):
    """Outcome of a trial. Only OK has a cost; CENSORED: it was given up at a limit that its cycles exceed."""

    OK = "ok"
    CENSORED = "censored"
    WRONG = "wrong output"
    REFUSED = "refused"
    FAILED = "device failed"
    HUNG = "no answer in time"
    LOST = "connection lost"
    CRASHED = "process died"


DEVICE_FAILURES = (Status.FAILED, Status.HUNG, Status.CRASHED, Status.LOST)
"""Outcomes that indicate a faulty device rather than a bad schedule."""


@dataclass(frozen=True)
class CostSource:
    """Source of the cycles of a trial: the timing model or the RTL with a memory model, or a board.

    device: "timed", "rtl", or ssh://USER@BOARD. memory: name of the memory model; with a board, the timing model uses
    it to predict complete networks.
    """

    device: str = "timed"
    memory: str = ZYNQ_HP.name

    def __post_init__(self) -> None:
        if self.device not in WITH_CYCLES and not self.board:
            raise ValueError(f"no trial can run on {self.device!r}; take {', '.join(WITH_CYCLES)} or ssh://USER@BOARD")

    @property
    def board(self) -> bool:
        """Whether it is a board over ssh."""
        return self.device.startswith(SSH_PREFIX)

    @property
    def bounds(self) -> str:
        """Name of the memory model for lower bounds: at least as fast as the memory of a trial."""
        return IDEAL.name if self.board else self.memory

    @property
    def version(self) -> str:
        """Name of the measurer in records, with VERSION."""
        return f"{self.device} {VERSION}" if self.board else f"{self.device} {VERSION}, {self.memory}"


TIMED = CostSource()
"""The timing model with the default memory."""


def other_version(requested: int) -> str:
    """Return the error message for a job of a process whose VERSION is another, `requested`."""
    return f"version {VERSION} of what is measured is here, {requested} was asked for; install the same Celosia"


@dataclass(frozen=True)
class LayerJob:
    """A trial of a layer that a device runs.

    layer: as `pickled` returns it. decisions: one Tiling for each of its workloads. judge: what the cycles come from.
    limit: cycles at which the run is given up and reported as CENSORED; 0: none.
    """

    cfg: Config
    layer: bytes
    decisions: tuple[Tiling, ...]
    judge: CostSource = TIMED
    limit: int = 0
    version: int = VERSION
    """Version of the requesting process."""

    @property
    def group(self) -> str:
        """Digest of the Config: a device that has run a job of this group has its simulator loaded."""
        return self.cfg.digest

    def run(self) -> TrialResult:
        """Run the trial in this process."""
        return measure(self)


@dataclass(frozen=True)
class TrialResult:
    """Result of a trial.

    cycles: of the layer twice in a row where `status` is OK, the limit where it is CENSORED. detail: the reason of a
    failure, for people. seconds: duration of the trial.
    """

    status: Status
    cycles: int = 0
    detail: str = ""
    seconds: float = 0.0

    @property
    def cost(self) -> float | None:
        """Cycles of a successful trial, else None."""
        return float(self.cycles) if self.status == Status.OK else None


def pickled(layer: Layer) -> bytes:
    """Serialise `layer` for a LayerJob."""
    return pickle.dumps(layer)


def measure(job: LayerJob, board: OpenDevice | None = None) -> TrialResult:
    """Run a trial: compile, run and compare; a failure of the layer, its decisions or the device becomes a Status.

    board: opens the Device of a board; its errors other than DeviceError are raised.
    """
    started = time.perf_counter()
    try:
        result = _run_trial(job, board)
    except (LayerErrors, TilingError) as error:
        result = TrialResult(Status.REFUSED, detail=str(error))
    except TimeLimitError:
        result = TrialResult(Status.CENSORED, job.limit)
    except DeviceError as error:
        result = TrialResult(Status.FAILED, detail=str(error))
    return replace(result, seconds=time.perf_counter() - started)


def _run_trial(job: LayerJob, board: OpenDevice | None) -> TrialResult:
    """Run a trial. Raises the errors that `measure` converts."""
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
        device = _rtl_device(job.cfg, job.judge.memory) if board is None else board(job.cfg, job.judge)
        case.fill(device, image)
        cycles = device.run(launch.address, launch.count, job.limit or MAX_CYCLES).cycles or 0
        if 0 < job.limit < cycles:  # a board stops only at a limit of seconds
            return TrialResult(Status.CENSORED, job.limit)
    wrong = case.difference(device, image)
    return TrialResult(Status.WRONG, detail=wrong) if wrong else TrialResult(Status.OK, cycles)


@lru_cache(maxsize=1)
def _rtl_device(cfg: Config, memory: str) -> Device:
    """Return the RTL simulator of a Config; a process caches one."""
    from celosia.sim.rtl.rtlsim import RtlDevice  # imported late: it builds a simulator

    return RtlDevice(cfg, memory, quiet=True)


@lru_cache(maxsize=MAX_CACHED_LAYERS)
def _case(cfg: Config, layer: bytes) -> LayerCase:
    """Return the LayerCase of a pickled layer; a process caches some, with their expected outputs."""
    return LayerCase(cfg, pickle.loads(layer))


class LayerCase:
    """A layer twice in a row, random bytes for its inputs, and its expected outputs."""

    def __init__(self, cfg: Config, layer: Layer) -> None:
        self.cfg, self.layers = cfg, run_twice(layer)
        self.output_storages = {copy.y.storage for copy in self.layers}
        read = (act.storage for copy in self.layers for act in copy.inputs())
        self.input_storages = list(dict.fromkeys(storage for storage in read if storage not in self.output_storages))

    def cycles(self, decisions: Sequence[Tiling], memory: str = ZYNQ_HP.name) -> int:
        """Return the cycles of the timing model without running the layer. Raises LayerErrors, TilingError."""
        image = self.image(decisions)
        (launch,) = image.launches
        return predict(self.cfg, image.code(launch).tobytes(), memory, launch.address).cycles

    def fits(self, decisions: Sequence[Tiling]) -> bool:
        """Return whether the layer can be compiled under `decisions`."""
        try:
            self.image(decisions)
        except (LayerErrors, TilingError):
            return False
        return True

    @cached_property
    def bytes(self) -> dict[Storage, Bytes]:
        """Random bytes of each input storage."""
        rng = np.random.default_rng(0)
        sizes = {act.storage: act.size(self.cfg) for copy in self.layers for act in copy.inputs()}
        return {storage: _random(rng, sizes[storage]) for storage in self.input_storages}

    @cached_property
    def expected(self) -> dict[Activation, Int8]:
        """Expected value of each output, by `reference_output`."""
        values: dict[Activation, Int8] = {}
        for layer in self.layers:
            for act in layer.inputs():
                if act not in values:
                    values[act] = _values(self.cfg, self.bytes[act.storage], act)
            values[layer.y] = reference_output(layer, values)
        return {layer.y: values[layer.y] for layer in self.layers}

    def image(self, decisions: Sequence[Tiling]) -> Image:
        """Compile the layers under `decisions`. Raises TilingError, LayerErrors."""
        planner = Planner(self.cfg, FixedSchedule(list(decisions)))
        return build(self.cfg, [list(self.layers)], [set(self.input_storages)], [self.output_storages], planner)

    def fill(self, device: Device, image: Image) -> None:
        """Write instructions, constants and inputs into the memory of `device`."""
        device.allocate(image.size)
        device.write(0, np.zeros(image.constants_address, np.uint8))
        device.write(image.constants_address, image.constants)
        for storage, data in self.bytes.items():
            device.write(image.addresses[storage], data)

    def difference(self, device: Device, image: Image) -> str:
        """Describe how the outputs in `device` differ from the expected ones; "" where they are equal."""
        for run, (act, expected) in enumerate(self.expected.items()):
            actual = _values(self.cfg, device.read(image.addresses[act.storage], act.size(self.cfg)), act)
            wrong = np.argwhere(actual != expected)
            if len(wrong):
                first = tuple(wrong[0])
                return (
                    f"{len(wrong)} of {actual.size} bytes of run {run} are wrong, the first at image, channel, row, "
                    f"column {', '.join(map(str, first))}: expected {expected[first]}, found {actual[first]}"
                )
        return ""


def _random(rng: np.random.Generator, size: int) -> Bytes:
    """Return random bytes: one half of the complete range, the other half small, so that their sums do not saturate."""
    data = rng.integers(-128, 128, size).astype(np.int8)
    data[size // 2 :] >>= 3
    return data.view(np.uint8)


def _values(cfg: Config, memory: Bytes, act: Activation) -> Int8:
    """Return activation `act` as [images, channels, rows, columns]; memory: bytes from the start of its storage on."""
    shape = act.images, act.channels, act.pixels.rows, act.pixels.columns
    array = unpack_activation(cfg, memory, shape, act.storage_groups, act.group_offset)
    return np.ascontiguousarray(array[:, :, *act.cut(cfg)[1:]])


# The layer twice in a row --------------------------------------------------------------------------------------


def run_twice(layer: Layer) -> tuple[Layer, ...]:
    """Return `layer` on storages of its own, and a copy with other constants.

    Two of them show how the layer overlaps with a neighbour. Other constants must be loaded again, as in a network. The
    copy reads the output of the first layer, where that has the shape of its input.
    """
    first = _on_own_storages(layer, {})
    x, y = first.x, first.y
    is_chained = x.storage.groups == y.storage.groups and replace(x, storage=y.storage) == y
    return first, _on_own_storages(_with_rotated_constants(first), {x.storage: y.storage} if is_chained else {})


def _on_own_storages(layer: Layer, storages: dict[Storage, Storage]) -> Layer:
    """Return the layer with its activations moved: storages maps old ones to new ones; missing ones are created."""

    def move(act: Activation) -> Activation:
        if act.storage not in storages:
            storages[act.storage] = Storage(act.storage.name, act.storage.groups)
        return replace(act, storage=storages[act.storage])

    return layer.map_activations(move)


def _with_rotated_constants(layer: Layer) -> Layer:
    """Return `layer` with other constants: each output channel has those of the one before it."""
    if layer.is_block:
        return Layer.block(tuple(_with_rotated_constants(inner) for inner in layer.layers), layer.cuts)
    gemm, softmax, r = layer.gemm, layer.softmax, layer.requantise
    if gemm is not None:
        gemm = replace(gemm, weights=_rotate_channels(gemm.weights))
    if softmax is not None:
        softmax = replace(softmax, powers=_rotate_channels(softmax.powers))
    if r is not None:
        r = Requantise(_rotate_channels(r.bias), np.roll(r.multiplier, 1), np.roll(r.shift, 1), r.zero_point)
    return replace(layer, gemm=gemm, softmax=softmax, requantise=r)


def _rotate_channels(values: NDArray[Any]) -> NDArray[Any]:
    """Rotate `values` by one along the first axis, the channels; where that changes nothing, replace them by 0 or 1."""
    rotated = np.roll(values, 1, 0)
    if rotated.size and np.array_equal(rotated, values):
        rotated[...] = 0 if rotated.flat[0] else 1
    return rotated


# Reference -----------------------------------------------------------------------------------------------------

Sums = NDArray[np.float64]
"""Integers below 2^53, which float64 adds exactly, and fast by BLAS."""


def reference_output(layer: Layer, values: Mapping[Activation, Int8]) -> Int8:
    """Compute the output of `layer`, [images, channels, height, width] int8.

    values: the activations that it reads, in the same layout.
    """
    if layer.is_block:
        activations = dict(values)
        for block_layer in layer.layers:
            activations[block_layer.y] = reference_output(block_layer, activations)
        return activations[layer.y]
    x, epilogue = values[layer.x], layer.epilogue
    if layer.softmax is not None:
        heads = [_softmax(head, layer.softmax, epilogue) for head in np.split(x, layer.heads, axis=1)]
        return _apply_epilogue(np.concatenate(heads, axis=1), epilogue, values)
    sums = _sums(layer, values)
    if layer.gemm is not None and layer.gemm.sum_bytes:
        integers = sums.astype(np.int64)
        return np.concatenate([(integers >> 8 * byte).astype(np.int8) for byte in range(layer.gemm.sum_bytes)], axis=1)
    if layer.requantise is None:
        return _apply_epilogue(np.clip(sums, *epilogue.clip).astype(np.int8), epilogue, values)
    heads = [_requantise(head, layer.requantise, epilogue) for head in np.split(sums, layer.heads, axis=1)]
    return _apply_epilogue(np.concatenate(heads, axis=1), epilogue, values)


def _sums(layer: Layer, values: Mapping[Activation, Int8]) -> NDArray[Any]:
    """Compute the integers that the vector unit then requantises or clips, of the shape of the output."""
    x = values[layer.x]
    if layer.gemm is not None:
        return _convolution(x, layer, layer.gemm)
    if layer.reduce:
        windows = _window_view(x, layer.window, layer.pad_value)
        return np.asarray(windows.max(axis=(4, 5)) if layer.reduce == "max" else windows.sum(axis=(4, 5), dtype=float))
    if (product := layer.product) is not None:
        rows, columns = (values[act].reshape(layer.heads, -1, act.width) for act in (layer.x, product.w))
        weights = (columns + float(product.w_offset)).transpose(0, 2, 1)[:, : layer.y.channels // layer.heads]
        sums = weights @ (rows + float(product.x_offset))
        return sums.reshape(1, -1, 1, sums.shape[-1])
    if (multiply := layer.multiply) is not None:
        return (x.astype(np.int64) + multiply.x_offset) * (values[multiply.b].astype(np.int64) + multiply.b_offset)
    if (norm := layer.norm) is not None:
        rows, count = np.moveaxis(x, 1, -1), layer.row_length
        v = normalise_rows(rows.reshape(-1, count), count, norm.offset, norm.centre, norm.epsilon)
        return np.moveaxis(v.reshape(rows.shape), -1, 1)
    return x


def _softmax(x: Int8, softmax: Softmax, epilogue: Epilogue) -> Int8:
    """Compute the softmax of x along the channels, as numerics.qlinear_softmax does."""
    powers, scaled_powers = np.split(softmax.powers, 2)
    indices = 255 + x.astype(np.int64) - x.max(axis=1, keepdims=True)
    total = np.zeros_like(powers[indices[:, 0]])
    for channel in range(x.shape[1]):
        total = total + powers[indices[:, channel]]
    steps = np.rint(scaled_powers[indices] / total[:, None]) + softmax.zero_point
    result: Int8 = np.clip(steps, *epilogue.clip).astype(np.int8)
    return result


def _apply_epilogue(result: Int8, epilogue: Epilogue, values: Mapping[Activation, Int8]) -> Int8:
    """Apply the lookup table and the residual add to clipped results. values: contain the residual operand."""
    if epilogue.table is not None:
        result = epilogue.table[result.astype(np.int64) + 128]
    if (r := epilogue.residual) is not None:
        parameters = RescaleAdd(r.scale_v, r.scale_b, r.scale_c, r.shift, r.lo, r.hi)
        result = rescale_add(result.astype(np.int64), values[r.operand], parameters).astype(np.int8)
    return result


def _window_view(x: Int8, w: Window, pad_value: int) -> Int8:
    """View x as windows: [images, channels, rows, columns, kernel rows, kernel columns]."""
    top, left, bottom, right = w.pads
    x = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=pad_value)
    view = np.lib.stride_tricks.sliding_window_view(x, (w.reach(0), w.reach(1)), axis=(2, 3))
    return view[:, :, :: w.strides[0], :: w.strides[1], :: w.dilations[0], :: w.dilations[1]]


def _convolution(x: Int8, layer: Layer, gemm: Gemm) -> Sums:
    """Return the sums of a convolution: for each kernel position, one matrix product for each group of channels."""
    windows = _window_view(x, layer.window, layer.pad_value)
    images, _, height, width = windows.shape[:4]
    outputs, depth, *kernel = gemm.weights.shape
    total = np.zeros((gemm.groups, outputs // gemm.groups, images * height * width))
    for position in np.ndindex(*kernel):
        values = windows[..., *position].astype(np.float64).reshape(images, gemm.groups, depth, height * width)
        inputs = values.transpose(1, 2, 0, 3).reshape(gemm.groups, depth, -1)
        weights = gemm.weights[..., *position].astype(np.float64).reshape(gemm.groups, -1, depth)
        total += weights @ inputs
    return total.reshape(outputs, images, height, width).swapaxes(0, 1)


def _requantise(total: NDArray[np.generic], r: Requantise, epilogue: Epilogue) -> Int8:
    """Requantise sums [images, channels, height, width] with a multiplier for each channel."""
    bias, multiplier, shift = (parameter[None, :, None, None] for parameter in (r.bias, r.multiplier, r.shift))
    return requantize(total.astype(np.int64), bias, multiplier, shift, r.zero_point, *epilogue.clip)
