"""The compiled program, and its file.

A file is a zip archive: `manifest.json`, which holds everything but bulk data and the SHA-256 of every other entry;
`image.bin`, the constant part of the accelerator's DRAM; `constants/N.npy`; `kernels/N.bin`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.cpu.runtime.kernel import Kernel
from celosia.compiler.cpu.runtime.op import HostOp
from celosia.compiler.files import reading, replacing
from celosia.compiler.memory import Plan
from celosia.compiler.saved import array_bytes, load_array, load_op, make, op_bytes
from celosia.hw.config import Config

FORMAT = "celosia-program"
VERSION = 5


class ProgramError(ValueError):
    """A file that is not an undamaged Program; the message names the part."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor; -1 in its shape is a size known only at run time. kind: "tensor", "sequence" or "optional"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str = "tensor"


@dataclass(frozen=True)
class PassInfo:
    """A pass over the graph, and the number of operators before and after it."""

    name: str
    doc: str
    before: int
    after: int


@dataclass(frozen=True)
class FormInfo:
    """How the host arranges a tensor for the accelerator: compiler.graph.select.Form."""

    dims: tuple[int, int, int, int]
    fold: str = ""
    kernel: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    dilations: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    pad: int = 0

    def arrange(self, array: NDArray[np.int8]) -> NDArray[np.int8]:
        """The tensor, of any shape with as many values, as [images, channels, height, width] with the fold applied."""
        if not self.fold:
            return array.reshape(self.dims)
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
        tiles: NDArray[np.int8] = view.transpose(0, 1, 4, 5, 2, 3)
        return tiles.reshape(images, channels * taps[0] * taps[1], height, width)


@dataclass(frozen=True)
class Pack:
    """Put tensor `value` into DRAM at `address`, in a storage of `groups` channel groups."""

    value: str
    form: FormInfo
    address: int
    groups: int


@dataclass(frozen=True)
class Unpack:
    """Take tensor `value` from the storage at `address`, `offset` channel groups into its `groups`."""

    value: str
    dims: tuple[int, int, int, int]
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
class LayerInfo:
    name: str
    op: str
    nodes: tuple[str, ...]
    macs: int
    bytes_loaded: int
    bytes_stored: int
    note: str = ""


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


@dataclass
class Program:
    """A compiled model; `celosia.Runtime` runs it on a Device with the same Config."""

    name: str
    config: Config
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    tensors: dict[str, TensorInfo]
    steps: list[Step]
    constants: dict[str, NDArray[Any]]
    kernels: list[Kernel]
    image: NDArray[np.uint8]
    image_address: int
    dram_size: int
    arena_lower_bound: int = 0
    macs_total: int = 0
    placements: list[dict[str, str]] = field(default_factory=list)
    """For each operator: name, op, place ("accelerator", "cpu", "free"), reason."""
    compile_seconds: float = 0.0
    passes: list[PassInfo] = field(default_factory=list)
    arena: Plan = field(default_factory=Plan)
    """Where the tensors that steps hand to each other lie in the memory of the CPU."""
    machine: str = ""
    """What `platform.machine()` says where the kernels run; "" for processors like the one that compiled them."""
    library: bytes = field(default=b"", repr=False)
    """The kernels for another machine as one shared object; they then have no code of their own."""

    @property
    def launches(self) -> list[LaunchStep]:
        return [step for step in self.steps if isinstance(step, LaunchStep)]

    @property
    def macs_accelerator(self) -> int:
        return sum(layer.macs for launch in self.launches for layer in launch.layers)

    def instructions(self, launch: LaunchStep) -> list[int]:
        """The instruction words of `launch`."""
        from celosia.hw.isa import instruction_bytes

        size = instruction_bytes(self.config)
        start = launch.address - self.image_address
        data = self.image[start : start + launch.count * size].tobytes()
        return [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]

    # The file --------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the Program to `path`, or nothing where that fails. OutputError."""
        with replacing(path) as temporary, temporary.open("wb") as file:
            self._write(file)

    def to_bytes(self) -> bytes:
        """What `save` writes; equal for equal Programs."""
        buffer = io.BytesIO()
        self._write(buffer)
        return buffer.getvalue()

    def _write(self, file: IO[bytes]) -> None:
        blobs = self._blobs()
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in blobs.items()}
        text = json.dumps(self._manifest() | {"sha256": digests}, indent=1).encode()
        head = {"manifest.json": text, "manifest.sha256": hashlib.sha256(text).hexdigest().encode()}
        with zipfile.ZipFile(file, "w") as archive:
            for name, data in {**head, **blobs}.items():  # each entry of 1980, the date that zipfile takes for none
                archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED, compresslevel=1)

    def _blobs(self) -> dict[str, bytes]:
        blobs = {"image.bin": self.image.tobytes()}
        for number, array in enumerate(self.constants.values()):
            blobs[f"constants/{number}.npy"] = array_bytes(array)
        for number, kernel in enumerate(self.kernels):
            blobs[f"kernels/{number}.bin"] = kernel.to_bytes()
        if self.library:
            blobs["kernels.so"] = self.library
        for number, launch in enumerate(self.launches):
            blobs[f"launches/{number}.layers"] = launch.layer_of.astype("<i4").tobytes()
        for number, step in enumerate(step for step in self.steps if isinstance(step, HostStep)):
            blobs[f"host/{number}.json"] = op_bytes(step.op)
        return blobs

    def _manifest(self) -> dict[str, Any]:
        steps = []
        for step in self.steps:
            names = [field.name for field in dataclasses.fields(step) if field.name not in ("layer_of", "op")]
            steps.append({"kind": _KINDS[type(step)], **{name: _plain(getattr(step, name)) for name in names}})
        return {
            "format": FORMAT, "version": VERSION, "name": self.name, "config": self.config.to_dict(),
            "config_digest": self.config.digest, "inputs": [dataclasses.asdict(t) for t in self.inputs],
            "outputs": [dataclasses.asdict(t) for t in self.outputs],
            "tensors": [dataclasses.asdict(t) for t in self.tensors.values()], "steps": steps,
            "constants": list(self.constants), "kernels": len(self.kernels), "image_address": self.image_address,
            "dram_size": self.dram_size, "arena_lower_bound": self.arena_lower_bound,
            "macs_total": self.macs_total,
            "placements": self.placements, "compile_seconds": self.compile_seconds,
            "passes": [dataclasses.asdict(each) for each in self.passes], "arena": dataclasses.asdict(self.arena),
            "machine": self.machine,
        }  # fmt: skip

    @staticmethod
    def load(path: str | Path) -> Program:
        """The Program in `path`. ProgramError where it is not one, is damaged, or of another version."""
        with (
            reading(path, ProgramError, "is not a Celosia Program, or a damaged one"),
            zipfile.ZipFile(path) as archive,
        ):
            if "manifest.json" not in archive.namelist():
                raise ProgramError(f"{path} is not a Celosia Program: it has no manifest")
            return _read(Path(path), archive)

    @staticmethod
    def is_program(path: str | Path) -> bool:
        """Whether the file at `path` looks like a Program, perhaps a damaged one, rather than an ONNX file."""
        with open(path, "rb") as file:
            try:
                return file.read(4) == b"PK\3\4" or zipfile.is_zipfile(file)
            except zipfile.BadZipFile:  # which is_zipfile finds at the end of some
                return True


_KINDS = {CpuStep: "cpu", HostStep: "host", LaunchStep: "launch"}
MAX_PART_BYTES = 1 << 32
"""No part of a Program may unpack to more than this."""


def _part(path: Path, archive: zipfile.ZipFile, name: str) -> bytes:
    if name not in archive.NameToInfo:
        raise ProgramError(f"{path} is damaged: part {name} is missing")
    if archive.getinfo(name).file_size > MAX_PART_BYTES:
        raise ProgramError(f"{path}: part {name} is larger than {MAX_PART_BYTES} bytes")
    with reading(path, ProgramError, f"is damaged: part {name}"):
        return archive.read(name)


def _read(path: Path, archive: zipfile.ZipFile) -> Program:
    text = _part(path, archive, "manifest.json")
    if hashlib.sha256(text).hexdigest().encode() != _part(path, archive, "manifest.sha256"):
        raise ProgramError(f"{path} is damaged: the checksum of its manifest differs")
    with reading(path, ProgramError, "is damaged"):
        manifest = json.loads(text)
        if manifest.get("format") != FORMAT:
            raise ProgramError(f"{path} is not a Celosia Program")
        if manifest.get("version") != VERSION:
            raise ProgramError(f"{path} has format version {manifest.get('version')}; this Celosia reads {VERSION}")
        blobs = {}
        for name, digest in manifest["sha256"].items():
            blobs[name] = _part(path, archive, name)
            if hashlib.sha256(blobs[name]).hexdigest() != digest:
                raise ProgramError(f"{path} is damaged: the checksum of part {name} differs")
        return _assemble(manifest, blobs)


def _plain(value: Any) -> Any:
    """Dataclasses as dictionaries."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


_FIELDS = (
    "name", "inputs", "outputs", "image_address", "dram_size", "arena_lower_bound", "macs_total", "placements",
    "compile_seconds", "passes", "arena", "machine",
)  # fmt: skip
"""Fields of a Program that the manifest holds as they are."""


def _assemble(manifest: dict[str, Any], blobs: dict[str, bytes]) -> Program:
    config = Config.from_dict(manifest["config"])
    if config.digest != manifest["config_digest"]:
        raise ValueError("the digest of its Config differs")
    steps: list[Step] = []
    for fields in manifest["steps"]:
        kind = {name: kind for kind, name in _KINDS.items()}[fields.pop("kind")]
        number = sum(isinstance(step, kind) for step in steps)
        bulk: dict[str, Any] = {}
        if kind is HostStep:
            bulk["op"] = load_op(blobs[f"host/{number}.json"])
        elif kind is LaunchStep:
            bulk["layer_of"] = np.frombuffer(blobs[f"launches/{number}.layers"], "<i4").astype(np.int32)
        steps.append(make(kind, fields, **bulk))
    names, kernels = make(list[str], manifest["constants"]), make(int, manifest["kernels"])
    tensors = make(list[TensorInfo], manifest["tensors"])
    program: Program = make(
        Program, {name: manifest[name] for name in _FIELDS}, config=config, steps=steps,
        tensors={tensor.name: tensor for tensor in tensors},
        constants={name: load_array(blobs[f"constants/{number}.npy"]) for number, name in enumerate(names)},
        kernels=[Kernel.from_bytes(blobs[f"kernels/{number}.bin"]) for number in range(kernels)],
        image=np.frombuffer(blobs["image.bin"], np.uint8), library=blobs.get("kernels.so", b""),
    )  # fmt: skip
    from celosia.compiler.check import check

    check(program)
    return program
