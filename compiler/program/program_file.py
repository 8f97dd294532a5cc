"""File format of a compiled program, and how arrays, host operators and dataclasses become bytes, and back.

The file is a zip archive: `manifest.json`, which holds everything but bulk data and the SHA-256 of every other entry;
`image.bin`, the constant part of the accelerator's DRAM; `constants/N.npy`; `kernels/N.loops`, from which kernels are
compiled where they run, and their constants `kernels/N.M.npy`; `loops/N.txt`, of the accelerator's layers, for people.
A Program for a board has `kernels.so`, too: machine code, which may do anything with the rights of its user.

Its parts, in order: Program, with methods that write and read the file; limits of size and the reading of parts;
serialisation as .npy and JSON, which can be read with numpy alone (driver/remote sends arrays in the same way).
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import itertools
import json
import types
import typing
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program.check_program import check
from celosia.compiler.program.dtypes import numpy_dtype
from celosia.compiler.program.host.kernel import CompiledKernel, aligned_empty
from celosia.compiler.program.host.op import Body, HostError, HostOp, check_size
from celosia.compiler.program.model import (
    ROUNDINGS,
    BodySteps,
    Contents,
    CpuStep,
    HostStep,
    LaunchStep,
    ProgramError,
    Step,
    TensorInfo,
    with_inner_steps,
)
from celosia.compiler.program.safe_files import reading, replacing
from celosia.hw.spec.config import Config
from celosia.plain import from_json, require_few_values

Array = NDArray[Any]
FORMAT = "celosia-program"
"""Value of "format" in the manifest."""
VERSION = 12
"""Version of the file format; other versions are refused."""


class Program(Contents):
    """A compiled model: made by `celosia.compile`, run by `celosia.Runtime` on a Device with the same Config.

    Attributes:
        name: Name of the model.
        config: Config of the accelerator.
        inputs: Names, element types and shapes of the inputs. A size of -1 is known only at run time.
        outputs: Names, element types and shapes of the outputs.
        launches: Steps that the accelerator runs, each with its layers.
        placements: For each operator, a dictionary with the keys name, op, place and reason: where it runs, and why.
        batched: Names of inputs whose first axis counts any number of samples. All outputs count samples, too. Each
            output depends on its own samples alone.
        batch: Number of samples that are computed at once; 0 where the shapes of the Program are fixed.
        macs_total: Number of multiplications of the complete model.
        macs_accelerator: Number of multiplications of all launches.
        schedules: One sentence on the schedules that records or a search have chosen.
        compile_seconds: Seconds of the compilation; 0 for a Program from a file.
        dram_size: Bytes of DRAM that launches use.
        rounding: "onnxruntime", "correct" or "bytes", as `celosia.compile` takes it.
        kept: Tensors inside the model that a run returns, too.

    Examples:
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
        """Write the Program to a file, atomically.

        Args:
            path: File to write; one that exists is replaced.

        Raises:
            OutputError: The file cannot be written.
        """
        with replacing(path) as temporary, temporary.open("wb") as file:
            self._write(file)

    def to_bytes(self) -> bytes:
        """Return the bytes that `save` writes; equal for equal Programs."""
        buffer = io.BytesIO()
        self._write(buffer)
        return buffer.getvalue()

    def _write(self, file: IO[bytes]) -> None:
        """Write the archive: the manifest with checksums, then the bulk data."""
        blobs = self._blobs()
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in blobs.items()}
        text = json.dumps(self._manifest() | {"sha256": digests}, indent=1).encode()
        head = {"manifest.json": text, "manifest.sha256": hashlib.sha256(text).hexdigest().encode()}
        with zipfile.ZipFile(file, "w") as archive:
            for name, data in {**head, **blobs}.items():  # each entry of 1980, the date that zipfile takes for none
                archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED, compresslevel=1)

    def _blobs(self) -> dict[str, bytes]:
        """Return the bulk data by file name in the archive."""
        blobs = {"image.bin": self.image.tobytes()}
        for index, array in enumerate(self.constants.values()):
            blobs[f"constants/{index}.npy"] = array_bytes(array)
        for index, loops in enumerate(self.loops):
            blobs[f"loops/{index}.txt"] = str(loops).encode()
        for index, kernel in enumerate(self.kernels):
            blobs[f"kernels/{index}.loops"] = kernel.loops.encode()
            for part, table in enumerate(kernel.tables):
                blobs[f"kernels/{index}.{part}.npy"] = array_bytes(table)
        if self.library:
            blobs["kernels.so"] = self.library
        for index, launch in enumerate(self.launches):
            blobs[f"launches/{index}.layers"] = launch.layer_of.astype("<i4").tobytes()
        for index, step in enumerate(step for step in with_inner_steps(self.steps) if isinstance(step, HostStep)):
            blobs[f"host/{index}.json"] = op_bytes(step.op)
        return blobs

    def _manifest(self) -> dict[str, Any]:
        """Return everything but bulk data as plain data for JSON."""
        steps = [_step_fields(step) for step in self.steps]
        return {
            "format": FORMAT, "version": VERSION, "name": self.name, "config": self.config.to_dict(),
            "config_digest": self.config.digest, "inputs": [dataclasses.asdict(t) for t in self.inputs],
            "outputs": [dataclasses.asdict(t) for t in self.outputs],
            "kept": [dataclasses.asdict(t) for t in self.kept],
            "tensors": [dataclasses.asdict(t) for t in self.tensors.values()], "steps": steps,
            "constants": list(self.constants), "loops": len(self.loops),
            "kernels": [_kernel_fields(kernel) for kernel in self.kernels],
            "image_address": self.image_address,
            "dram_size": self.dram_size, "arena_lower_bound": self.arena_lower_bound,
            "macs_total": self.macs_total,
            "placements": self.placements,
            "passes": [dataclasses.asdict(info) for info in self.passes], "arena": dataclasses.asdict(self.arena),
            "schedules": self.schedules, "derivation": self.derivation, "machine": self.machine,
            "batched": list(self.batched), "rounding": self.rounding,
        }  # fmt: skip

    @staticmethod
    def load(path: str | Path, trust: bool = False, digest: str | None = None) -> Program:
        """Read a Program from a file that `save` has written.

        Checksums detect accidents, not forgery. Kernels are loops, which are checked and compiled on this machine.

        Args:
            path: File to read.
            trust: True compiles kernels unchecked, and loads the machine code of a Program for a board.
            digest: SHA-256 that the file must have, in hexadecimal. It implies `trust`. None: any file is read.

        Returns:
            The Program; equal to the one that was saved, except for `compile_seconds`.

        Raises:
            ProgramError: The file is no Program, is damaged, or has another version of the format.
        """
        with (
            reading(path, ProgramError, "is not a Celosia Program, or a damaged one"),
            zipfile.ZipFile(path if digest is None else io.BytesIO(_read_with_digest(Path(path), digest))) as archive,
        ):
            if "manifest.json" not in archive.namelist():
                raise ProgramError(f"{path} is not a Celosia Program: it has no manifest")
            program = _read_archive(Path(path), archive)
            program.trusted = trust or digest is not None
            return program

    @staticmethod
    def is_program(path: str | Path) -> bool:
        """Return whether the file at `path` looks like a Program, perhaps a damaged one, rather than an ONNX file."""
        with open(path, "rb") as file:
            try:
                return file.read(4) == b"PK\3\4" or zipfile.is_zipfile(file)
            except zipfile.BadZipFile:  # is_zipfile raises it for some damaged archives
                return True


_KINDS = {CpuStep: "cpu", HostStep: "host", LaunchStep: "launch"}
"""Type of a step -> its name in the manifest."""
MAX_MANIFEST_BYTES = 1 << 26
"""Limit of the size of the manifest, in which a layer takes some 2,000 bytes."""
MAX_LOOPS_BYTES = 1 << 22
"""Limit of the size of the text of a kernel's loops, whose syntax tree takes many times as much memory."""
MAX_PART_BYTES = 1 << 32
"""Limit of the size of any other part of a Program after decompression."""
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Compression methods that zipfile can decompress piece by piece."""
CHUNK_BYTES = 1 << 20
"""Bytes that are decompressed at once."""


def _max_bytes(name: str) -> int:
    """Return the limit of the size of the part of this name, in bytes."""
    if name.endswith(".loops"):
        return MAX_LOOPS_BYTES
    return MAX_MANIFEST_BYTES if name.startswith("manifest.") else MAX_PART_BYTES


def _read_part(path: Path, archive: zipfile.ZipFile, name: str) -> bytes:
    """Read and decompress a part piece by piece, as the archive may lie about its size. Raises ProgramError."""
    if name not in archive.NameToInfo:
        raise ProgramError(f"{path} is damaged: part {name} is missing")
    info = archive.getinfo(name)
    if info.file_size > _max_bytes(name):
        raise ProgramError(f"{path}: part {name} is larger than {_max_bytes(name)} bytes")
    if info.compress_type not in METHODS:
        raise ProgramError(f"{path} is damaged: part {name} is compressed in a way that no Program is")
    data = bytearray()
    with reading(path, ProgramError, f"is damaged: part {name}"), archive.open(info) as part:
        while piece := part.read(CHUNK_BYTES):
            data += piece
    return bytes(data)


def _read_archive(path: Path, archive: zipfile.ZipFile) -> Program:
    """Read the manifest and all parts, verify their checksums, and assemble the Program. Raises ProgramError."""
    text = _read_part(path, archive, "manifest.json")
    if hashlib.sha256(text).hexdigest().encode() != _read_part(path, archive, "manifest.sha256"):
        raise ProgramError(f"{path} is damaged: the checksum of its manifest differs")
    with reading(path, ProgramError, "is damaged"):
        manifest = from_json(text)
        if manifest.get("format") != FORMAT:
            raise ProgramError(f"{path} is not a Celosia Program")
        if manifest.get("version") != VERSION:
            raise ProgramError(f"{path} has format version {manifest.get('version')}; this Celosia reads {VERSION}")
        names = from_plain(dict[str, str], manifest["sha256"])
        size = sum(archive.getinfo(name).file_size for name in names if name in archive.NameToInfo)
        try:
            check_size(size, f"what is in {path}")
        except HostError as error:
            raise ProgramError(str(error)) from None
        blobs = {}
        for name, digest in names.items():
            blobs[name] = _read_part(path, archive, name)
            if hashlib.sha256(blobs[name]).hexdigest() != digest:
                raise ProgramError(f"{path} is damaged: the checksum of part {name} differs")
        return _assemble(manifest, blobs)


def _read_with_digest(path: Path, digest: str) -> bytes:
    """Read a file. Raises ProgramError where its SHA-256 is not `digest`, in hexadecimal."""
    data = path.read_bytes()
    actual = hashlib.sha256(data).hexdigest()
    if actual != digest.strip().lower():
        raise ProgramError(f"{path} has the SHA-256 {actual}, not {digest}: it is not the file that was meant")
    return data


def _kernel_fields(kernel: CompiledKernel) -> dict[str, Any]:
    """Return the fields of a kernel that the manifest holds: all but code and bulk data."""
    left_out = ("code", "host", "loops", "tables")
    fields = {field.name: getattr(kernel, field.name) for field in dataclasses.fields(kernel)}
    return {name: value for name, value in fields.items() if name not in left_out} | {"tables": len(kernel.tables)}


def _read_kernel(index: int, fields: Any, blobs: dict[str, bytes]) -> CompiledKernel:
    """Build a kernel from its fields in the manifest, its loops and its tables."""
    tables = tuple(
        load_array(blobs[f"kernels/{index}.{part}.npy"]) for part in range(from_plain(int, fields.pop("tables")))
    )
    loops = blobs[f"kernels/{index}.loops"].decode()
    kernel: CompiledKernel = from_plain(CompiledKernel, fields, "kernel", code=b"", host="", loops=loops, tables=tables)
    return kernel


def _plain(value: Any) -> Any:
    """Convert dataclasses to dictionaries, in tuples too."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def _step_fields(step: Step) -> dict[str, Any]:
    """Return the fields of a step that the manifest holds: all but bulk data, with the steps of its subgraphs."""
    names = [field.name for field in dataclasses.fields(step) if field.name not in ("layer_of", "op", "bodies")]
    fields = {"kind": _KINDS[type(step)], **{name: _plain(getattr(step, name)) for name in names}}
    if isinstance(step, HostStep) and step.bodies:
        fields["bodies"] = [
            {
                "attribute": body.attribute, "inputs": body.inputs, "outputs": body.outputs,
                "steps": [_step_fields(inner_step) for inner_step in body.steps], "types": body.types,
            }
            for body in step.bodies
        ]  # fmt: skip
    return fields


def _read_steps(rows: Any, bulk: dict[type, Iterator[Any]], kinds: tuple[type, ...]) -> list[Any]:
    """Build steps of these `kinds` from their fields in the manifest, and of the bulk data of each kind in order."""
    steps = []
    for fields in rows:
        kind = {name: kind for kind, name in _KINDS.items() if kind in kinds}[fields.pop("kind")]
        more: dict[str, Any] = {}
        if kind is HostStep:
            inner_rows = [(body, body.pop("steps")) for body in fields.pop("bodies", ())]
            more["bodies"] = tuple(
                from_plain(BodySteps, body, steps=tuple(_read_steps(inner, bulk, (CpuStep, HostStep))))
                for body, inner in inner_rows
            )
            more["op"] = next(bulk[kind])
        elif kind is LaunchStep:
            more["layer_of"] = next(bulk[kind])
        steps.append(from_plain(kind, fields, **more))
    return steps


_FIELDS = (
    "name", "inputs", "outputs", "kept", "image_address", "dram_size", "arena_lower_bound", "macs_total", "placements",
    "passes", "schedules", "arena", "machine", "batched",
)  # fmt: skip
"""Fields of a Program that the manifest holds unchanged."""


def _assemble(manifest: dict[str, Any], blobs: dict[str, bytes]) -> Program:
    """Build the Program from the manifest and the other parts by name, and check it.

    Raises ValueError, KeyError, TypeError or ProgramError for impossible contents.
    """
    config = Config.from_dict(manifest["config"])
    if config.digest != manifest["config_digest"]:
        raise ValueError("the digest of its Config differs")
    bulk: dict[type, Iterator[Any]] = {
        HostStep: (load_op(blobs[f"host/{index}.json"]) for index in itertools.count()),
        LaunchStep: (
            np.frombuffer(blobs[f"launches/{index}.layers"], "<i4").astype(np.int32) for index in itertools.count()
        ),
    }
    steps: list[Step] = _read_steps(manifest["steps"], bulk, tuple(_KINDS))
    names, kernels = from_plain(list[str], manifest["constants"]), from_plain(list[object], manifest["kernels"])
    loops = [blobs[f"loops/{index}.txt"].decode() for index in range(from_plain(int, manifest["loops"]))]
    tensors = from_plain(list[TensorInfo], manifest["tensors"])
    program: Program = from_plain(
        Program, {name: manifest[name] for name in _FIELDS}, config=config, steps=steps,
        derivation=from_plain(str, manifest.get("derivation", "")),  # which files without one may lack
        rounding=from_plain(str, manifest.get("rounding", ROUNDINGS[0])),  # which older files do not say
        tensors={tensor.name: tensor for tensor in tensors},
        constants={name: load_array(blobs[f"constants/{index}.npy"]) for index, name in enumerate(names)},
        kernels=[_read_kernel(index, fields, blobs) for index, fields in enumerate(kernels)],
        image=np.frombuffer(blobs["image.bin"], np.uint8), loops=loops, library=blobs.get("kernels.so", b""),
    )  # fmt: skip
    if program.rounding not in ROUNDINGS:
        raise ValueError("it rounds in a way that nobody knows")
    check(program)
    return program


# Arrays, host operators and dataclasses as bytes and as JSON --------------------------------------------------------


KIND_KEY = "<kind>"
"""Key in JSON objects that names their Python type; no attribute has it."""


def array_bytes(array: Array) -> bytes:
    """Serialise an array as .npy, or as JSON where numpy lacks its element type or it holds strings.

    >>> load_array(array_bytes(np.array(["a", "b"], object))).tolist()
    ['a', 'b']
    """
    if array.dtype.isbuiltin != 2 and array.dtype.kind != "O":
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        return buffer.getvalue()
    values = (
        [str(element) for element in array.reshape(-1)]
        if array.dtype.kind == "O"
        else base64.b64encode(array.tobytes()).decode()
    )
    return json.dumps({"dtype": array.dtype.name, "shape": array.shape, "values": values}).encode()


def load_array(data: bytes) -> Array:
    """Read an array that `array_bytes` wrote. Raises ValueError for other data."""
    if data.startswith(b"\x93NUMPY"):
        loaded: Array = np.load(io.BytesIO(data), allow_pickle=False)
        array = aligned_empty(loaded.dtype, loaded.shape)
        array[...] = loaded
        return array
    saved = from_json(data)
    dtype, values = numpy_dtype(saved["dtype"]), saved["values"]
    flat = np.array(values, object) if dtype.kind == "O" else np.frombuffer(base64.b64decode(values), dtype)
    return flat.reshape(saved["shape"])


def op_bytes(op: HostOp) -> bytes:
    """Serialise an operator with its subgraphs."""
    return json.dumps(op, default=_encode).encode()


def load_op(data: bytes) -> HostOp:
    """Read an operator that `op_bytes` wrote. Raises ValueError, TypeError or KeyError for other data."""
    require_few_values(data)
    op = json.loads(data, object_hook=_decode)
    if not isinstance(op, HostOp):
        raise ValueError("not an operator")
    return op


def _encode(value: Any) -> dict[str, Any]:
    """Convert operators, subgraphs, bytes and arrays to JSON objects that name their type under KIND_KEY."""
    if isinstance(value, HostOp | Body):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {KIND_KEY: type(value).__name__, **fields}
    if isinstance(value, bytes):
        return {KIND_KEY: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray):
        return {KIND_KEY: "array", "base64": base64.b64encode(array_bytes(value)).decode()}
    raise TypeError(f"{type(value).__name__} cannot be saved in a Program")


def _decode(fields: dict[str, Any]) -> Any:
    """Convert JSON objects that name a type under KIND_KEY back; other objects stay as they are."""
    kind = fields.get(KIND_KEY)
    if kind in ("bytes", "array"):
        data = base64.b64decode(fields["base64"])
        return data if kind == "bytes" else load_array(data)
    if kind not in ("HostOp", "Body"):
        return fields
    del fields[KIND_KEY]
    plain: dict[str, Any] = {name: tuple(field) if isinstance(field, list) else field for name, field in fields.items()}
    if kind == "HostOp":
        return HostOp(**plain)
    if "types" in fields:
        plain["types"] = from_plain(_field_types(Body)["types"], fields["types"], "types")
    return Body(**plain)


def from_plain(kind: Any, value: Any, name_of_value: str = "value", **more: Any) -> Any:
    """Convert plain data of JSON to the type `kind`, checking that it fits.

    kind: a dataclass, tuple, list, dict, str, number, bool, or a union of these. name_of_value: for errors. more:
    fields of the dataclass that the JSON does not hold. Raises ValueError where `value` does not fit.

    >>> from_plain(tuple[int, ...], [1, 2])
    (1, 2)
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = _field_types(typing.cast(Any, kind))
        _require_type(value, dict, name_of_value)
        fields = {name: from_plain(hints.get(name, types.NoneType), element, name) for name, element in value.items()}
        return typing.cast(Any, kind)(**fields, **more)
    if origin is types.UnionType and types.NoneType not in inner:
        return _require_type(value, inner, name_of_value)
    if origin is types.UnionType:
        return None if value is None else from_plain(inner[0], value, name_of_value)
    if origin is dict:
        return {
            name: from_plain(inner[1], element, name_of_value)
            for name, element in _require_type(value, dict, name_of_value).items()
        }
    if origin is list:
        return [from_plain(inner[0], element, name_of_value) for element in _require_type(value, list, name_of_value)]
    if origin is tuple:
        _require_type(value, list, name_of_value)
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        if len(kinds) != len(value):
            raise ValueError(f"{name_of_value} has {len(value)} entries")
        return tuple(from_plain(element, part, name_of_value) for element, part in zip(kinds, value))
    return (
        float(_require_type(value, int | float, name_of_value))
        if kind is float
        else _require_type(value, kind, name_of_value)
    )


@cache
def _field_types(kind: Any) -> dict[str, Any]:
    """Return the type of each field of a dataclass; cached, because Python evaluates the annotations at each call."""
    return typing.get_type_hints(kind)


def _require_type(value: Any, kind: Any, name_of_value: str) -> Any:
    """Return `value`; raise ValueError where it is not of the type `kind`. A bool does not count as an int."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name_of_value} is {str(value)[:50]!r}")
    return value
