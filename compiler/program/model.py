"""Contents of a compiled program: tensors, steps, kernels, and the accelerator's memory image.

Its parts, in order: tensors and the forms in which layers hold them; how activations are packed into the accelerator's
DRAM; steps, layers and what reports know of them; all contents together (Contents); the HTML tables by which notebooks
show them, made with the standard library only, because notebooks run on boards, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.compiler.program.host.op import HostOp
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import instruction_bytes
from celosia.plain import Sentence, printable

Bytes = NDArray[Any]
"""int8 or uint8."""


class ProgramError(Sentence, ValueError):
    """A file that is not a valid Program; the message names the part."""


class InputError(Sentence, ValueError):
    """An input that the Program does not accept; the message names it and says what is expected."""


@dataclass(frozen=True)
class TensorInfo:
    """Name, element type and shape of a tensor; a size of -1 is known only at run time.

    kind: "tensor", "sequence" or "optional".
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str = "tensor"


@dataclass(frozen=True)
class ArenaPlan:
    """Memory plan of the tensors that CPU steps pass to each other, in one arena.

    offsets: byte offset of each tensor's buffer. size: bytes of the arena. lower_bound: bytes that every plan needs,
    the largest sum of the buffers that are live at one step.
    """

    offsets: dict[Any, int] = field(default_factory=dict)
    size: int = 0
    lower_bound: int = 0


@dataclass(frozen=True)
class PassInfo:
    """A pass over the graph that has run: its name, description, and the number of operators before and after it."""

    name: str
    doc: str
    before: int
    after: int


@dataclass(frozen=True)
class FormInfo:
    """The layout in which the host arranges a tensor for the accelerator (compiler.graph.select.ActivationLayout).

    dims: [images, channels, height, width] on the accelerator. fold: what is moved into channels: "" nothing, "x" or
    "xy" windows (im2col along the width, or along both axes), a key of MATRICES matrices. kernel, strides, dilations,
    pads: of these windows. pad: the byte of the padding. inverted: whether bytes are complemented.
    """

    dims: tuple[int, int, int, int]
    fold: str = ""
    kernel: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    dilations: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    pad: int = 0
    inverted: bool = False

    def arrange(self, array: Bytes) -> Bytes:
        """Arrange a tensor as [images, channels, height, width] of the accelerator, with the fold applied."""
        if not self.fold:
            return array.reshape(self.dims)
        if self.fold in MATRICES:
            return self._arrange_matrices(array)
        if array.ndim == 3:  # a sequence is an image of one row
            array = array[:, :, None]
        rows, columns = self.pads[0::2], self.pads[1::2]
        if self.fold == "x":
            rows = (0, 0)
        padded = np.pad(array, ((0, 0), (0, 0), rows, columns), constant_values=self.pad)
        taps = (self.kernel[0] if self.fold == "xy" else 1, self.kernel[1])
        steps = (self.strides[0] if self.fold == "xy" else 1, self.strides[1])
        extent = ((taps[0] - 1) * self.dilations[0] + 1, (taps[1] - 1) * self.dilations[1] + 1)
        view = np.lib.stride_tricks.sliding_window_view(padded, extent, axis=(2, 3))
        view = view[:, :, :: steps[0], :: steps[1], :: self.dilations[0], :: self.dilations[1]]
        images, channels, height, width = view.shape[:4]
        tiles: Bytes = view.transpose(0, 1, 4, 5, 2, 3)
        return tiles.reshape(images, channels * taps[0] * taps[1], height, width)

    def _arrange_matrices(self, array: Bytes) -> Bytes:
        """Arrange matrices one after the other along channels; their rows become the pixels of an image of one row."""
        order, sizes = np.argsort(MATRICES[self.fold]), matrix_sizes(array.shape)
        matrices = array.reshape(sizes).transpose(order)
        padded = np.full((len(matrices), self.dims[1] // len(matrices), self.dims[3]), self.pad, array.dtype)
        padded[:, : matrices.shape[1], : matrices.shape[2]] = matrices
        return (~padded if self.inverted else padded).reshape(self.dims)

    def restore(self, values: Bytes, shape: tuple[int, ...]) -> Bytes:
        """Return the tensor of `shape` from its arranged elements: the inverse of `arrange`, except for windows."""
        if self.fold not in MATRICES:
            return values.reshape(shape)
        count, columns, rows = matrix_counts(self.fold, shape)
        matrices = values.reshape(count, -1, self.dims[3])[:, :columns, :rows]
        return np.ascontiguousarray(matrices.transpose(MATRICES[self.fold])).reshape(shape)


MATRICES = {"rows": (0, 2, 1), "columns": (0, 1, 2), "heads": (2, 0, 1)}
"""Fold -> permutation between a tensor's last three axes and [matrix, channel, pixel]."""
BY_ROWS = "rows", "columns"
"""Folds whose rows the host can arrange one by one, as a key-value cache needs."""


def matrix_sizes(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Merge all axes before the last two into one, which counts matrices.

    >>> matrix_sizes((1, 12, 64, 32)), matrix_sizes((32,))
    ((12, 64, 32), (1, 1, 32))
    """
    rows, columns = (1, 1, *shape)[-2:]
    return prod(shape[:-2]), rows, columns


def matrix_counts(fold: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the number of matrices in a tensor of this shape, and the columns and rows of each.

    >>> matrix_counts("rows", (1, 12, 64, 32)), matrix_counts("heads", (1, 64, 12, 32))
    ((12, 32, 64), (12, 32, 64))
    """
    sizes, order = matrix_sizes(shape), MATRICES[fold]
    count, columns, rows = (sizes[order.index(axis)] for axis in range(3))
    return count, columns, rows


@dataclass(frozen=True)
class Pack:
    """A copy of a tensor from the host into DRAM, before a launch.

    value: name of the tensor. form: how it is arranged. address: of its storage in DRAM, which has `groups` channel
    groups. cache: name of the key-value cache input with whose rows the tensor begins, where DRAM keeps these rows from
    run to run; "" for none.
    """

    value: str
    form: FormInfo
    address: int
    groups: int
    cache: str = ""


@dataclass(frozen=True)
class Unpack:
    """A copy of a tensor from DRAM to the host, after a launch.

    value: name of the tensor. form: how it is arranged. address: of its storage in DRAM, which has `groups` channel
    groups; the tensor begins at group `offset`.
    """

    value: str
    form: FormInfo
    address: int
    groups: int
    offset: int


def pack_activation(cfg: Config, values: NDArray[np.int8], groups: int) -> NDArray[np.uint8]:
    """Pack [images, channels, height, width] int8 as [images/batch][groups][height][width][batch][group] bytes.

    groups: channel groups of the storage, of cfg.group channels each. Missing images and channels become zeros.
    """
    images, channels, height, width = values.shape
    batches = -(-images // cfg.batch)
    if cfg.batch == 1 and channels == groups * cfg.group:
        padded = values
    else:
        padded = np.zeros((batches * cfg.batch, groups * cfg.group, height, width), np.int8)
        padded[:images, :channels] = values
    tiles = padded.reshape(batches, cfg.batch, groups, cfg.group, height, width).transpose(0, 2, 4, 5, 1, 3)
    return np.ascontiguousarray(tiles).view(np.uint8).reshape(-1)


def unpack_activation(
    cfg: Config, data: NDArray[np.uint8], shape: tuple[int, int, int, int], groups: int, offset: int = 0
) -> NDArray[np.int8]:
    """Unpack an activation [images, channels, height, width] int8, the inverse of `pack_activation`.

    data: bytes of a storage of `groups` channel groups. shape: of the activation, which begins `offset` groups into it.
    """
    images, channels, height, width = shape
    batches = -(-images // cfg.batch)
    tiles = data.view(np.int8).reshape(batches, groups, height, width, cfg.batch, cfg.group)
    used = tiles[:, offset : offset - (-channels // cfg.group)]
    values = used.transpose(0, 4, 1, 5, 2, 3).reshape(batches * cfg.batch, -1, height, width)
    return np.ascontiguousarray(values[:images, :channels])


@dataclass(frozen=True)
class NodeInfo:
    """An operator of the graph that runs on the CPU: name of the node, operator, and why it is not offloaded."""

    name: str
    op: str
    reason: str


@dataclass(frozen=True)
class CpuStep:
    """A step that runs a compiled kernel, or, without one, returns a view of its first input.

    nodes: the operators that it computes. inputs, outputs: names of tensors. kernel: number in Contents.kernels.
    """

    nodes: tuple[NodeInfo, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kernel: int | None = None
    saved_bytes: int = 0
    """Bytes that fusion saves: not written and read again between operators."""


@dataclass(frozen=True)
class BodySteps:
    """A subgraph of If, Loop or Scan, as steps of the Program.

    Its steps share tensors, kernels, constants and the arena with all other steps; names are unique. attribute: the
    operator's attribute that holds the subgraph. inputs, outputs: names of its tensors. types: element type and shape
    of its outputs; unknown sizes are 0.
    """

    attribute: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    steps: tuple[CpuStep | HostStep, ...]
    types: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class HostStep:
    """A step that runs one operator in the host runtime (host/execute.py)."""

    nodes: tuple[NodeInfo, ...]
    inputs: tuple[str, ...]
    """Tensors that the operator and its subgraphs read."""
    outputs: tuple[str, ...]
    op: HostOp = field(repr=False)
    """The operator; its subgraphs are in `bodies`, not among its attributes."""
    bodies: tuple[BodySteps, ...] = ()


@dataclass(frozen=True)
class PartInfo:
    """The schedule of a layer, or of a part of it.

    workload: its description. decisions: values by name. loops: number of its loop nest in Contents.loops.
    """

    workload: str
    decisions: dict[str, int | str]
    loops: int


@dataclass(frozen=True)
class LayerInfo:
    """A layer, or a block of layers, of a launch.

    name: of the layer. op: its kind, such as "Conv". nodes: names of its nodes in the model. macs: its multiplications.
    bytes_loaded, bytes_stored: its traffic with DRAM. note: a remark for people. bytes_kept: intermediates of a block
    that stay on chip. cycles_together: predicted cycles of the block; cycles_apart: of its layers one by one, 0 where
    one does not fit the scratchpads alone. what: kind, kernel, channels and fused operators, for people.
    """

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
    """A step that runs an instruction stream on the accelerator.

    address: of the first instruction in DRAM. count: of instructions. layer_of: for each instruction the number of its
    layer in `layers`. pack, unpack: copies of tensors into DRAM before it, and out of DRAM after it.
    """

    address: int
    count: int
    layers: tuple[LayerInfo, ...]
    layer_of: NDArray[np.int32]
    pack: tuple[Pack, ...]
    unpack: tuple[Unpack, ...]


Step = CpuStep | HostStep | LaunchStep


def with_inner_steps(steps: Iterable[Step]) -> Iterator[Step]:
    """Yield all steps, those of subgraphs, at any depth, before the step that runs them."""
    for step in steps:
        for body in step.bodies if isinstance(step, HostStep) else ():
            yield from with_inner_steps(body.steps)
        yield step


ROUNDINGS = ("onnxruntime", "correct", "bytes")
"""Rounding of normalisations, sums and products: like onnxruntime's floats; correctly, by integer arithmetic that is
equal on CPU and accelerator; or correctly, and float tensors between quantised ones to bytes."""


@dataclass(repr=False)
class Contents:
    """The fields of a Program; `program_file.Program` adds saving and loading.

    name: of the model. config: of the accelerator. inputs, outputs: of the model. tensors: those that steps pass on, by
    name. steps: in the order in which they run. constants: arrays by name. kernels: of CpuSteps. image: constants and
    instructions in DRAM from `image_address` on. dram_size: bytes of DRAM that launches use.
    """

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
    """Bytes of DRAM for activations that no plan can go below."""
    macs_total: int = 0
    """Multiplications of the complete model, wherever they run."""
    placements: list[dict[str, str]] = field(default_factory=list)
    """For each operator: name, op, place ("accelerator", "cpu", "free"), reason."""
    compile_seconds: float = 0.0
    """0 for a Program from a file, because equal Programs are equal files."""
    passes: list[PassInfo] = field(default_factory=list)
    schedules: str = ""
    """One sentence on the schedules that records or a search have chosen."""
    derivation: str = ""
    """The rewrites of the superoptimiser, as superoptimise/derivation.py writes them; "" without one."""
    arena: ArenaPlan = field(default_factory=ArenaPlan)
    """Memory plan of the tensors that CPU steps pass to each other."""
    machine: str = ""
    """`platform.machine()` where the kernels run; "" for processors like the one that compiled them."""
    loops: list[Any] = field(default_factory=list, repr=False)
    """Loop nests of layers with the traces of their schedules, for people; text where read from a file."""
    rounding: str = ROUNDINGS[0]
    """One of ROUNDINGS."""
    kept: tuple[TensorInfo, ...] = ()
    """Tensors inside the model that a run returns, too."""
    library: bytes = field(default=b"", repr=False)
    """The kernels for another machine as one shared object; they then have no code of their own."""
    trusted: bool = True
    """Whether it was compiled here or loaded with trust; only then `library` is loaded."""

    batched: tuple[str, ...] = ()
    """Inputs whose first axis counts samples, of which there may be any number: all outputs count them, too, and each
    depends on its own samples alone. `batch` of them are computed at once."""

    @property
    def batch(self) -> int:
        """Number of samples that are computed at once; 0 where the shapes of the Program are fixed."""
        return next((tensor.shape[0] for tensor in self.inputs if tensor.name in self.batched), 0)

    def info(self, name: str) -> TensorInfo:
        """Return name, type and shape of a tensor that steps read, which may be a constant."""
        if name in self.tensors:
            return self.tensors[name]
        return TensorInfo(name, self.constants[name].dtype.name, self.constants[name].shape)

    def shape_text(self, tensor: TensorInfo) -> str:
        """Return element type and shape for people: `n` for samples, `?` for a size known at run time."""
        counts = tensor.name in self.batched or (bool(self.batched) and tensor in self.outputs)
        first = ["n"] if counts else []
        sizes = [*first, *("?" if size == -1 else str(size) for size in tensor.shape[len(first) :])]
        return f"{tensor.dtype}[{', '.join(sizes)}]"

    def __repr__(self) -> str:
        """Describe the Program in one line: inputs, outputs, layers, and the share of the accelerator."""
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
        """Return a table of layers, for notebooks."""
        rows = [
            (layer.name, layer.what, layer.macs, layer.bytes_loaded, layer.bytes_stored)
            for launch in self.launches for layer in launch.layers
        ]  # fmt: skip
        head = ["layer", "what", "MACs", "bytes loaded", "bytes stored"]
        return f"<p>{escape(repr(self))}</p>" + (html_table(head, rows) if rows else "")

    @property
    def launches(self) -> list[LaunchStep]:
        """The steps that run on the accelerator."""
        return [step for step in self.steps if isinstance(step, LaunchStep)]

    @property
    def macs_accelerator(self) -> int:
        """Number of multiplications of all launches."""
        return sum(layer.macs for launch in self.launches for layer in launch.layers)

    def instructions(self, launch: LaunchStep) -> list[int]:
        """Return the instruction words of `launch`."""
        size = instruction_bytes(self.config)
        start = launch.address - self.image_address
        data = self.image[start : start + launch.count * size].tobytes()
        return [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]


def html_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an HTML table; numbers are aligned to the right, and None is a dash.

    >>> html_table(["name", "cycles"], [["a<b", 1200]])[-71:]
    '<tr><td>a&lt;b</td><td style="text-align:right">1,200</td></tr></table>'
    """
    first = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table>{f'<tr>{first}</tr>' if head else ''}{body}</table>"


def _cell(value: object) -> str:
    """Format a cell: a dash for None, right-aligned numbers, percent for floats, escaped text."""
    if value is None:
        return "<td>-</td>"
    if isinstance(value, int | float) and not isinstance(value, bool):
        text = f"{value:,}" if isinstance(value, int) else f"{value:.1%}"
        return f'<td style="text-align:right">{text}</td>'
    return f"<td>{escape(str(value))}</td>"
