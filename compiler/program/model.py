"""Contents of a compiled program: tensors, steps, kernels, and the accelerator's memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.compiler.program.host.op import HostOp
from celosia.compiler.program.html import table
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import instruction_bytes
from celosia.plain import Sentence, printable

Bytes = NDArray[Any]
"""int8 or uint8."""


class ProgramError(Sentence, ValueError):
    """A file that is not an undamaged Program; the message names the part."""


class InputError(Sentence, ValueError):
    """An input that the Program does not take; the message names it and says what is expected."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor; -1 in its shape is a size known only at run time. kind: "tensor", "sequence" or "optional"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str = "tensor"


@dataclass(frozen=True)
class ArenaPlan:
    """Offset of each buffer, the bytes of the whole arena, and the largest sum of buffers alive at one step."""

    offsets: dict[Any, int] = field(default_factory=dict)
    size: int = 0
    lower_bound: int = 0


@dataclass(frozen=True)
class PassInfo:
    """A pass over the graph, and the number of operators before and after it."""

    name: str
    doc: str
    before: int
    after: int


@dataclass(frozen=True)
class FormInfo:
    """Layout in which the host arranges a tensor for the accelerator: compiler.graph.select.ActivationLayout."""

    dims: tuple[int, int, int, int]
    fold: str = ""
    kernel: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    dilations: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    pad: int = 0
    inverted: bool = False

    def arrange(self, array: Bytes) -> Bytes:
        """The tensor, of any shape with as many values, as [images, channels, height, width] with the fold applied."""
        if not self.fold:
            return array.reshape(self.dims)
        if self.fold in MATRICES:
            return self._columns(array)
        if array.ndim == 3:  # a sequence is an image of one row
            array = array[:, :, None]
        rows, columns = self.pads[0::2], self.pads[1::2]
        if self.fold == "x":
            rows = (0, 0)
        padded = np.pad(array, ((0, 0), (0, 0), rows, columns), constant_values=self.pad)
        taps = (self.kernel[0] if self.fold == "xy" else 1, self.kernel[1])
        steps = (self.strides[0] if self.fold == "xy" else 1, self.strides[1])
        reach = ((taps[0] - 1) * self.dilations[0] + 1, (taps[1] - 1) * self.dilations[1] + 1)
        view = np.lib.stride_tricks.sliding_window_view(padded, reach, axis=(2, 3))
        view = view[:, :, :: steps[0], :: steps[1], :: self.dilations[0], :: self.dilations[1]]
        images, channels, height, width = view.shape[:4]
        tiles: Bytes = view.transpose(0, 1, 4, 5, 2, 3)
        return tiles.reshape(images, channels * taps[0] * taps[1], height, width)

    def _columns(self, array: Bytes) -> Bytes:
        """Matrices, one after the other along channels: their rows are the pixels of a row of the image."""
        order, sizes = np.argsort(MATRICES[self.fold]), matrix_sizes(array.shape)
        matrices = array.reshape(sizes).transpose(order)
        made = np.full((len(matrices), self.dims[1] // len(matrices), self.dims[3]), self.pad, array.dtype)
        made[:, : matrices.shape[1], : matrices.shape[2]] = matrices
        return (~made if self.inverted else made).reshape(self.dims)

    def restore(self, values: Bytes, shape: tuple[int, ...]) -> Bytes:
        """The tensor of this shape whose elements are `values` [images, channels, height, width]; of no window."""
        if self.fold not in MATRICES:
            return values.reshape(shape)
        count, columns, rows = matrix_counts(self.fold, shape)
        matrices = values.reshape(count, -1, self.dims[3])[:, :columns, :rows]
        return np.ascontiguousarray(matrices.transpose(MATRICES[self.fold])).reshape(shape)


MATRICES = {"rows": (0, 2, 1), "columns": (0, 1, 2), "heads": (2, 0, 1)}
"""Folds in which a tensor is matrices, in the order of [matrix, channel, pixel] in which its last axes are."""
BY_ROWS = "rows", "columns"
"""Those of which the host can arrange some rows alone."""


def matrix_sizes(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The tensor's shape as that of a tensor of three axes: all before the last two are one.

    >>> matrix_sizes((1, 12, 64, 32)), matrix_sizes((32,))
    ((12, 64, 32), (1, 1, 32))
    """
    rows, columns = (1, 1, *shape)[-2:]
    return prod(shape[:-2]), rows, columns


def matrix_counts(fold: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """How many matrices a tensor of this shape is, and the columns and rows of each.

    >>> matrix_counts("rows", (1, 12, 64, 32)), matrix_counts("heads", (1, 64, 12, 32))
    ((12, 32, 64), (12, 32, 64))
    """
    sizes, order = matrix_sizes(shape), MATRICES[fold]
    count, columns, rows = (sizes[order.index(axis)] for axis in range(3))
    return count, columns, rows


@dataclass(frozen=True)
class Pack:
    """Put tensor `value` into DRAM at `address`, in a storage of `groups` channel groups. cache: the input whose rows
    it has first, where the memory keeps them from run to run."""

    value: str
    form: FormInfo
    address: int
    groups: int
    cache: str = ""


@dataclass(frozen=True)
class Unpack:
    """Take tensor `value` from the storage at `address`, `offset` channel groups into its `groups`."""

    value: str
    form: FormInfo
    address: int
    groups: int
    offset: int


@dataclass(frozen=True)
class NodeInfo:
    """An operator of the graph on the CPU, and why it is there."""

    name: str
    op: str
    reason: str


@dataclass(frozen=True)
class CpuStep:
    """Operators on the CPU in one kernel, with its number; a view of the first input where there is none."""

    nodes: tuple[NodeInfo, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kernel: int | None = None
    saved_bytes: int = 0
    """What the kernel does not write and read again, as kernels of one operator each would."""


@dataclass(frozen=True)
class HostStep:
    """One operator that the host runtime executes."""

    nodes: tuple[NodeInfo, ...]
    inputs: tuple[str, ...]
    """What the operator and its subgraphs read."""
    outputs: tuple[str, ...]
    op: HostOp = field(repr=False)


@dataclass(frozen=True)
class PartInfo:
    """Schedule of a layer, or of a part of it: the workload in a line, decisions by name, and which of the
    Program's `loops` it runs."""

    workload: str
    decisions: dict[str, int | str]
    loops: int


@dataclass(frozen=True)
class LayerInfo:
    """A layer, or a block of layers. what: kind, kernel, channels and what is fused, for people. bytes_kept: of a
    block's intermediates, which stay on chip; cycles_together: of a block behind the layer before it, by the timing
    model; cycles_apart: of its layers one by one, 0 where one of them does not fit the scratchpads alone."""

    name: str
    op: str
    nodes: tuple[str, ...]
    macs: int
    bytes_loaded: int
    bytes_stored: int
    note: str = ""
    parts: tuple[PartInfo, ...] = ()
    bytes_kept: int = 0
    cycles_apart: int = 0
    cycles_together: int = 0
    what: str = ""

    def __repr__(self) -> str:
        moved = f"{self.bytes_loaded:,} bytes loaded, {self.bytes_stored:,} stored"
        return printable(f"<Layer {self.name!r}: {self.what}; {self.macs:,} MACs, {moved}>")


@dataclass(frozen=True)
class LaunchStep:
    """One run of the accelerator. layer_of[i]: number in `layers` of instruction i."""

    address: int
    count: int
    layers: tuple[LayerInfo, ...]
    layer_of: NDArray[np.int32]
    pack: tuple[Pack, ...]
    unpack: tuple[Unpack, ...]


Step = CpuStep | HostStep | LaunchStep
ROUNDINGS = ("onnxruntime", "correct")
"""How results of normalisations are rounded: as onnxruntime's floats are, or those of the real numbers, correctly, as
integers are computed on CPU and accelerator alike."""


@dataclass(repr=False)
class Contents:
    """Contents of a Program; `file.Program` adds how it is saved."""

    name: str
    config: Config
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    tensors: dict[str, TensorInfo]
    steps: list[Step]
    constants: dict[str, NDArray[Any]]
    kernels: list[CompiledKernel]
    image: NDArray[np.uint8]
    image_address: int
    dram_size: int
    arena_lower_bound: int = 0
    macs_total: int = 0
    placements: list[dict[str, str]] = field(default_factory=list)
    """For each operator: name, op, place ("accelerator", "cpu", "free"), reason."""
    compile_seconds: float = 0.0
    """0 for one from a file: equal Programs are equal files."""
    passes: list[PassInfo] = field(default_factory=list)
    schedules: str = ""
    """What records or a search have decided of the layers' schedules, in a sentence."""
    derivation: str = ""
    """How a search has made the model that was compiled, as superoptimise/derivation.py writes it; "" without one."""
    arena: ArenaPlan = field(default_factory=ArenaPlan)
    """Where the tensors that steps hand to each other lie in the memory of the CPU."""
    machine: str = ""
    """What `platform.machine()` says where the kernels run; "" for processors like the one that compiled them."""
    loops: list[Any] = field(default_factory=list, repr=False)
    """What layers run, each as what prints as loops and the trace of their schedule; text where read from a file."""
    rounding: str = ROUNDINGS[0]
    """One of ROUNDINGS."""
    kept: tuple[TensorInfo, ...] = ()
    """Tensors inside the model that a run returns, too."""
    library: bytes = field(default=b"", repr=False)
    """The kernels for another machine as one shared object; they then have no code of their own."""
    trusted: bool = True
    """Whether it was made here, or its user vouches for the file that it comes from: only then `library` is loaded."""

    batched: tuple[str, ...] = ()
    """Inputs whose first axis counts samples, of which there may be any number: all outputs count them, too, and each
    depends on its own samples alone. `batch` of them are computed at once."""

    @property
    def batch(self) -> int:
        """Samples that are computed at once; 0 where the Program has shapes of its own only."""
        return next((tensor.shape[0] for tensor in self.inputs if tensor.name in self.batched), 0)

    def info(self, name: str) -> TensorInfo:
        """Describe a tensor that steps read, which may be a constant."""
        if name in self.tensors:
            return self.tensors[name]
        return TensorInfo(name, self.constants[name].dtype.name, self.constants[name].shape)

    def shape_text(self, tensor: TensorInfo) -> str:
        """Element type and shape of an input or output, for people: `n` samples, `?` for a size of any number."""
        counts = tensor.name in self.batched or (bool(self.batched) and tensor in self.outputs)
        first = ["n"] if counts else []
        sizes = [*first, *("?" if size == -1 else str(size) for size in tensor.shape[len(first) :])]
        return f"{tensor.dtype}[{', '.join(sizes)}]"

    def __repr__(self) -> str:
        groups = self.inputs, self.outputs
        tensors = (", ".join(f"{tensor.name} {self.shape_text(tensor)}" for tensor in group) for group in groups)
        share = f", {self.macs_accelerator / self.macs_total:.1%} of the MACs" if self.macs_total else ""
        layers = sum(len(launch.layers) for launch in self.launches)
        others = sum(len(step.nodes) for step in self.steps if not isinstance(step, LaunchStep))
        return printable(
            f"<Program {self.name!r} for {self.config.name}: {' -> '.join(tensors)}; {layers} layers in "
            f"{len(self.launches)} launches{share}, {others} operators on the CPU>"
        )

    def _repr_html_(self) -> str:
        """Layers, for notebooks."""
        rows = [
            (layer.name, layer.what, layer.macs, layer.bytes_loaded, layer.bytes_stored)
            for launch in self.launches for layer in launch.layers
        ]  # fmt: skip
        head = ["layer", "what", "MACs", "bytes loaded", "bytes stored"]
        return f"<p>{escape(repr(self))}</p>" + (table(head, rows) if rows else "")

    @property
    def launches(self) -> list[LaunchStep]:
        """The steps that run on the accelerator."""
        return [step for step in self.steps if isinstance(step, LaunchStep)]

    @property
    def macs_accelerator(self) -> int:
        """Multiplications of all launches."""
        return sum(layer.macs for launch in self.launches for layer in launch.layers)

    def instructions(self, launch: LaunchStep) -> list[int]:
        """The instruction words of `launch`."""
        size = instruction_bytes(self.config)
        start = launch.address - self.image_address
        data = self.image[start : start + launch.count * size].tobytes()
        return [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]
