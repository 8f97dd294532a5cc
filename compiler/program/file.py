"""The file of a compiled program.

It is a zip archive: `manifest.json`, which holds everything but bulk data and the SHA-256 of every other entry;
`image.bin`, the constant part of the accelerator's DRAM; `constants/N.npy`; `kernels/N.loops`, from which kernels are
compiled where they run, and their constants `kernels/N.M.npy`; `loops/N.txt`, of the accelerator's layers, for people.
A Program for a board has `kernels.so`, too: machine code, which may do anything with the rights of its user.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from celosia.compiler.program.check import check
from celosia.compiler.program.files import reading, replacing
from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.compiler.program.host.op import HostError, check_size
from celosia.compiler.program.model import (
    ROUNDINGS,
    Contents,
    CpuStep,
    HostStep,
    LaunchStep,
    ProgramError,
    Step,
    TensorInfo,
)
from celosia.compiler.program.saved import array_bytes, load_array, load_op, make, op_bytes
from celosia.hw.spec.config import Config
from celosia.plain import from_json

FORMAT = "celosia-program"
VERSION = 11


class Program(Contents):
    """A compiled model, which `celosia.compile` makes; `celosia.Runtime` runs it on a Device with the same Config.

    inputs, outputs: their names, element types and shapes. launches: what the accelerator runs, with their layers.
    placements: where each operator runs, and why.

    >>> import celosia, tempfile
    >>> program = celosia.compile(celosia.models.demo_model_path(), "tiny")
    >>> program
    <Program 'resnet8_fashion_int8' for tiny: image float32[1, 1, 32, 32] -> logits float32[1, 10]; 11 layers in 1 \
launches, 100.0% of the MACs, 2 operators on the CPU>
    >>> program.launches[0].layers[1].what
    'conv 3x3, 16→16'
    >>> path = Path(tempfile.mkdtemp()) / "demo.celosia"
    >>> program.save(path)
    >>> celosia.Program.load(path).outputs[0].shape
    (1, 10)
    """

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
        for number, loops in enumerate(self.loops):
            blobs[f"loops/{number}.txt"] = str(loops).encode()
        for number, kernel in enumerate(self.kernels):
            blobs[f"kernels/{number}.loops"] = kernel.loops.encode()
            for part, table in enumerate(kernel.tables):
                blobs[f"kernels/{number}.{part}.npy"] = array_bytes(table)
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
            "kept": [dataclasses.asdict(t) for t in self.kept],
            "tensors": [dataclasses.asdict(t) for t in self.tensors.values()], "steps": steps,
            "constants": list(self.constants), "loops": len(self.loops),
            "kernels": [_without_code(kernel) for kernel in self.kernels],
            "image_address": self.image_address,
            "dram_size": self.dram_size, "arena_lower_bound": self.arena_lower_bound,
            "macs_total": self.macs_total,
            "placements": self.placements,
            "passes": [dataclasses.asdict(each) for each in self.passes], "arena": dataclasses.asdict(self.arena),
            "schedules": self.schedules, "derivation": self.derivation, "machine": self.machine,
            "batched": list(self.batched), "rounding": self.rounding,
        }  # fmt: skip

    @staticmethod
    def load(path: str | Path, trust: bool = False, digest: str | None = None) -> Program:
        """The Program in `path`. ProgramError where it is not one, is damaged, or of another version.

        Its checksums find accidents, and no forgery. Its kernels are loops, which are checked and compiled where they
        run. trust: run them as they are written, and load the machine code of a Program for a board. digest: the
        SHA-256 that the file must have, in hexadecimal, which is trust in what it holds. ProgramError where it differs.
        """
        with (
            reading(path, ProgramError, "is not a Celosia Program, or a damaged one"),
            zipfile.ZipFile(path if digest is None else io.BytesIO(_vouched(Path(path), digest))) as archive,
        ):
            if "manifest.json" not in archive.namelist():
                raise ProgramError(f"{path} is not a Celosia Program: it has no manifest")
            program = _read(Path(path), archive)
            program.trusted = trust or digest is not None
            return program

    @staticmethod
    def is_program(path: str | Path) -> bool:
        """Whether the file at `path` looks like a Program, perhaps a damaged one, rather than an ONNX file."""
        with open(path, "rb") as file:
            try:
                return file.read(4) == b"PK\3\4" or zipfile.is_zipfile(file)
            except zipfile.BadZipFile:  # which is_zipfile finds at the end of some
                return True


_KINDS = {CpuStep: "cpu", HostStep: "host", LaunchStep: "launch"}
MANIFEST_BYTES = 1 << 26
"""Size of the largest manifest: a layer takes some 2,000 bytes of it."""
LOOPS_BYTES = 1 << 22
"""Size of the longest text of a kernel's loops, whose syntax tree takes many times as much memory."""
MAX_PART_BYTES = 1 << 32
"""No part of a Program may unpack to more than this."""
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Methods of compression, which zipfile can undo piece by piece."""
CHUNK_BYTES = 1 << 20


def _limit(name: str) -> int:
    if name.endswith(".loops"):
        return LOOPS_BYTES
    return MANIFEST_BYTES if name.startswith("manifest.") else MAX_PART_BYTES


def _part(path: Path, archive: zipfile.ZipFile, name: str) -> bytes:
    """A part, unpacked piece by piece: what the archive says of its size may be wrong. ProgramError."""
    if name not in archive.NameToInfo:
        raise ProgramError(f"{path} is damaged: part {name} is missing")
    info = archive.getinfo(name)
    if info.file_size > _limit(name):
        raise ProgramError(f"{path}: part {name} is larger than {_limit(name)} bytes")
    if info.compress_type not in METHODS:
        raise ProgramError(f"{path} is damaged: part {name} is compressed in a way that no Program is")
    data = bytearray()
    with reading(path, ProgramError, f"is damaged: part {name}"), archive.open(info) as part:
        while piece := part.read(CHUNK_BYTES):
            data += piece
    return bytes(data)


def _read(path: Path, archive: zipfile.ZipFile) -> Program:
    text = _part(path, archive, "manifest.json")
    if hashlib.sha256(text).hexdigest().encode() != _part(path, archive, "manifest.sha256"):
        raise ProgramError(f"{path} is damaged: the checksum of its manifest differs")
    with reading(path, ProgramError, "is damaged"):
        manifest = from_json(text)
        if manifest.get("format") != FORMAT:
            raise ProgramError(f"{path} is not a Celosia Program")
        if manifest.get("version") != VERSION:
            raise ProgramError(f"{path} has format version {manifest.get('version')}; this Celosia reads {VERSION}")
        names = make(dict[str, str], manifest["sha256"])
        size = sum(archive.getinfo(name).file_size for name in names if name in archive.NameToInfo)
        try:
            check_size(size, f"what is in {path}")
        except HostError as error:
            raise ProgramError(str(error)) from None
        blobs = {}
        for name, digest in names.items():
            blobs[name] = _part(path, archive, name)
            if hashlib.sha256(blobs[name]).hexdigest() != digest:
                raise ProgramError(f"{path} is damaged: the checksum of part {name} differs")
        return _assemble(manifest, blobs)


def _vouched(path: Path, digest: str) -> bytes:
    """What is in the file, which has this SHA-256."""
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != digest.strip().lower():
        raise ProgramError(f"{path} has the SHA-256 {found}, not {digest}: it is not the file that was meant")
    return data


def _without_code(kernel: CompiledKernel) -> dict[str, Any]:
    """What the manifest says of a kernel."""
    left_out = ("code", "host", "loops", "tables")
    fields = {field.name: getattr(kernel, field.name) for field in dataclasses.fields(kernel)}
    return {name: value for name, value in fields.items() if name not in left_out} | {"tables": len(kernel.tables)}


def _kernel(number: int, fields: Any, blobs: dict[str, bytes]) -> CompiledKernel:
    tables = tuple(load_array(blobs[f"kernels/{number}.{part}.npy"]) for part in range(make(int, fields.pop("tables"))))
    loops = blobs[f"kernels/{number}.loops"].decode()
    made: CompiledKernel = make(CompiledKernel, fields, "kernel", code=b"", host="", loops=loops, tables=tables)
    return made


def _plain(value: Any) -> Any:
    """Dataclasses as dictionaries."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


_FIELDS = (
    "name", "inputs", "outputs", "kept", "image_address", "dram_size", "arena_lower_bound", "macs_total", "placements",
    "passes", "schedules", "arena", "machine", "batched",
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
    names, kernels = make(list[str], manifest["constants"]), make(list[object], manifest["kernels"])
    loops = [blobs[f"loops/{number}.txt"].decode() for number in range(make(int, manifest["loops"]))]
    tensors = make(list[TensorInfo], manifest["tensors"])
    program: Program = make(
        Program, {name: manifest[name] for name in _FIELDS}, config=config, steps=steps,
        derivation=make(str, manifest.get("derivation", "")),  # which files without one may lack
        rounding=make(str, manifest.get("rounding", ROUNDINGS[0])),  # which older files do not say
        tensors={tensor.name: tensor for tensor in tensors},
        constants={name: load_array(blobs[f"constants/{number}.npy"]) for number, name in enumerate(names)},
        kernels=[_kernel(number, fields, blobs) for number, fields in enumerate(kernels)],
        image=np.frombuffer(blobs["image.bin"], np.uint8), loops=loops, library=blobs.get("kernels.so", b""),
    )  # fmt: skip
    if program.rounding not in ROUNDINGS:
        raise ValueError("it rounds in a way that nobody knows")
    check(program)
    return program
