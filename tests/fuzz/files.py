"""Damaged Program files must be refused with a ProgramError, or run as if undamaged."""

from __future__ import annotations

import hashlib
import io
import json
import random
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from changed import change
from numpy.typing import NDArray

import celosia
from celosia.compiler.program import InputError, Program, ProgramError
from celosia.compiler.program.host.op import HostError
from celosia.driver.runtime import Runtime
from celosia.sim.device import DeviceError
from fuzz.cases import Failure, Machine

REFUSED = (ProgramError, InputError, DeviceError, HostError)
MOST_BYTES = 1 << 26
"""No file of these tests needs more memory than this for its program, in bytes."""


@cache
def intact() -> tuple[bytes, dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Return a Program file with launches, kernels and host steps, its inputs and its outputs."""
    from fuzz.model import mixed

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "intact.celosia"
        celosia.compile(mixed(), "tiny").save(path)
        program = Program.load(path)
        bits = np.random.default_rng(0)
        inputs = {t.name: bits.standard_normal(t.shape).astype(t.dtype) for t in program.inputs}
        return path.read_bytes(), inputs, Runtime(program, "functional").run(inputs).outputs


# Damage: bytes -> bytes


def overwritten(data: bytes, rng: random.Random) -> bytes:
    """Change some bytes: single bits, or a run of bytes."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 10))):
        at = rng.randrange(len(result))
        if rng.random() < 0.5:
            result[at] ^= 1 << rng.randrange(8)
        else:
            run = min(rng.choice((1, 4, 64, 1000)), len(result) - at)
            result[at : at + run] = rng.choice((bytes(run), b"\xff" * run, rng.randbytes(run)))
    return bytes(result)


def cut(data: bytes, rng: random.Random) -> bytes:
    """Remove the end, the beginning or a part in between."""
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return rng.choice((data[:a], data[a:], data[:a] + data[b:]))


def grown(data: bytes, rng: random.Random) -> bytes:
    """Insert random bytes, or repeat a part."""
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:a] + rng.choice((rng.randbytes(rng.randint(1, 100)), data[a:b], data)) + data[a:]


def other_parts(data: bytes, rng: random.Random) -> bytes:
    """Return a valid archive whose parts are exchanged, missing, empty, changed, or shortened."""
    parts = _parts(data)
    names = list(parts)
    one, two = rng.choice(names), rng.choice(names)
    match rng.randrange(5):
        case 0:
            parts[one], parts[two] = parts[two], parts[one]
        case 1:
            del parts[one]
        case 2:
            parts[one] = b""
        case 3:
            parts[one] = overwritten(parts[one] or b"\0", rng)
        case 4:
            parts[one] = parts[one][: rng.randrange(len(parts[one]) + 1)]
    return _archive(parts)


BYTES = (overwritten, cut, grown, other_parts)


def damaged(machine: Machine, seed: int) -> str:
    """Damage the bytes of a file; it must be refused, or give the same outputs."""
    rng = random.Random(f"file {seed}")
    data, inputs, expected = intact()
    damage = rng.choice(BYTES)
    try:
        outputs = _run(damage(data, rng), inputs)
    except REFUSED as error:
        _one_sentence(error)
        return f"{damage.__name__}: refused"
    for name, array in expected.items():
        if not np.array_equal(outputs[name], array, equal_nan=True):
            raise Failure(f"{damage.__name__}: loaded, and output {name} differs")
    return f"{damage.__name__}: runs as before"


def forged(machine: Machine, seed: int) -> str:
    """Change the manifest or data of a file and fix the checksums; the file must be refused, or run.

    Kernels stay as they are, because changed loops may take hours. tests/compiler/test_guard.py changes small ones.
    """
    rng = random.Random(f"forged {seed}")
    data, inputs, _ = intact()
    parts = _parts(data)
    manifest = json.loads(parts["manifest.json"])
    if rng.random() < 0.3:
        name = rng.choice([name for name in parts if not name.startswith(("manifest", "kernels"))])
        parts[name] = rng.choice((overwritten, overwritten, cut, grown))(parts[name], rng)
        manifest["sha256"][name] = hashlib.sha256(parts[name]).hexdigest()
    else:
        for _ in range(rng.choice((1, 1, 2, 4))):
            change(manifest, rng)
    text = json.dumps(manifest).encode()
    parts["manifest.json"], parts["manifest.sha256"] = text, hashlib.sha256(text).hexdigest().encode()
    try:
        _run(_archive(parts), inputs)
    except REFUSED as error:
        _one_sentence(error)
        return "forged: refused"
    return "forged: runs"


def _run(data: bytes, inputs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    with tempfile.NamedTemporaryFile(suffix=".celosia") as file:
        file.write(data)
        file.flush()
        with Runtime(Program.load(file.name), "functional") as runtime:
            return runtime.run(inputs).outputs


def _one_sentence(error: Exception) -> None:
    text = str(error)
    if not text or "\n" in text or len(text) > 1000:
        raise Failure(f"the message is no sentence: {text[:200]!r}")


def _parts(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _archive(parts: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return file.getvalue()
