"""Constants in external files are memory-mapped and checked; only the parts that are read take memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from thorough import paired

import celosia
from celosia.compiler.graph import external_data
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.external_data import ALWAYS_READ_BYTES
from celosia.compiler.ops.registry import is_mapped
from celosia.driver.runtime import Runtime

Array = NDArray[Any]
RNG = np.random.default_rng(5)
MEGABYTE = 1 << 20
TYPES = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int64): TensorProto.INT64, np.dtype(np.int8): 3}


def outside(
    name: str, dims: tuple[int, ...], location: str, dtype: Any = np.float32, **where: object
) -> onnx.TensorProto:  # fmt: skip
    """Return a constant that lies in a file."""
    tensor = TensorProto(name=name, data_type=TYPES[np.dtype(dtype)], dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **where}.items():
        tensor.external_data.append(onnx.StringStringEntryProto(key=key, value=str(value)))
    return tensor


def save(path: Path, text: str, *constants: onnx.TensorProto) -> Path:
    graph = onnx.parser.parse_graph(text)
    graph.initializer.extend(constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


@pytest.fixture
def mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory-map the files of models of any size."""
    monkeypatch.setattr(external_data, "MIN_MAPPED_BYTES", 0)


@pytest.mark.parametrize("open_size, limit", paired(["4", "n"], [0, external_data.MIN_MAPPED_BYTES]))
def test_as_if_it_were_one_file(
    tmp_path: Path, open_size: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """External constants work like inner ones: large, small, unaligned, or used as a shape.

    The model is compiled again for other sizes.
    """
    monkeypatch.setattr(external_data, "MIN_MAPPED_BYTES", limit)
    w, b, shape = RNG.standard_normal((300, 100), np.float32), RNG.standard_normal(100, np.float32), [-1, 50]
    data = {"w": w, "b": b, "s": np.array(shape, np.int64)}
    constants, parts, at = [], [b"odd"], 3
    for name, array in data.items():
        constants.append(
            outside(name, array.shape, "data/all.bin", array.dtype, offset=at, length=array.nbytes)
        )  # fmt: skip
        parts.append(array.tobytes())
        at += array.nbytes
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "all.bin").write_bytes(b"".join(parts))
    text = f"""g (float[{open_size}, 300] x) => (float[a, b] y) {{
        p = MatMul(x, w)  t = Transpose(w)  q = MatMul(w, t)  r = ReduceSum <keepdims = 0> (q)
        u = Add(p, b)  v = Add(u, r)  y = Reshape(v, s)
    }}"""
    runtime = Runtime(save(tmp_path / "model.onnx", text, *constants))
    for rows in (4,) if open_size == "4" else (4, 20, 4):
        x = RNG.standard_normal((rows, 300), np.float32)
        expected = (x @ w + b + (w @ w.T).sum(dtype=np.float64)).reshape(shape)
        np.testing.assert_allclose(runtime.run({"x": x}).outputs["y"], expected, rtol=2e-5)
        constants_held = runtime.program_for({"x": x}).constants.values()
        large = [array for array in constants_held if array.nbytes > ALWAYS_READ_BYTES]
        assert any(map(is_mapped, large)) == (limit == 0)
        assert all(map(is_mapped, large)) or limit  # none is copied


def test_a_model_that_is_read_needs_its_files_no_more(tmp_path: Path) -> None:
    w = RNG.standard_normal((300, 100), np.float32)
    (tmp_path / "w.bin").write_bytes(w.tobytes())
    text = "g (float[n, 300] x) => (float[n, 100] y) { y = MatMul(x, w) }"
    runtime = Runtime(save(tmp_path / "model.onnx", text, outside("w", w.shape, "w.bin")))
    (tmp_path / "w.bin").unlink()
    for rows in (2, 5):
        x = RNG.standard_normal((rows, 300), np.float32)
        np.testing.assert_allclose(runtime.run({"x": x}).outputs["y"], x @ w, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("mapping")
def test_a_saved_program_needs_no_other_file(tmp_path: Path) -> None:
    w = RNG.integers(-9, 9, (300, 100)).astype(np.float32)
    (tmp_path / "w.bin").write_bytes(w.tobytes())
    path = save(
        tmp_path / "model.onnx", "g (float[2, 300] x) => (float[2, 100] y) { y = MatMul(x, w) }",
        outside("w", w.shape, "w.bin"),
    )  # fmt: skip
    celosia.compile(path, accelerator=False).save(tmp_path / "saved.celosia")
    (tmp_path / "w.bin").unlink()
    x = RNG.integers(-9, 9, (2, 300)).astype(np.float32)
    with Runtime(tmp_path / "saved.celosia") as runtime:
        np.testing.assert_array_equal(runtime.run({"x": x}).outputs["y"], x @ w)


SIZE = ALWAYS_READ_BYTES // 4 + 8
"""Elements of a large constant."""


def refused(folder: Path, words: str, location: str, **where: object) -> None:
    text = f"g (float[{SIZE}] x) => (float[{SIZE}] y) {{ y = Add(x, w) }}"
    path = save(folder / "model.onnx", text, outside("w", (SIZE,), location, **where))
    with pytest.raises(ModelError, match=words) as info:
        celosia.compile(path, accelerator=False)
    assert "\n" not in str(info.value) and "'w'" in str(info.value)
    with pytest.raises(ModelError, match=r"'w'.*another file"):
        celosia.compile(onnx.load(path, load_external_data=False), accelerator=False)


@pytest.mark.usefixtures("mapping")
@pytest.mark.parametrize(
    "location, words",
    [
        ("missing.bin", "there is no file 'missing.bin'"), ("../outside.bin", "outside of the model's folder"),
        ("/etc/hostname", "outside of the model's folder"), ("link.bin", "outside of the model's folder"),
        ("away/outside.bin", "outside of the model's folder"), ("hard.bin", "hard link"), ("", "there is no file"),
        (".", "there is no file"), ("pipe", "there is no file 'pipe'"), ("a\0b", "null"),
        ("../model2/w.bin", "outside of the model's folder"),
    ],
)  # fmt: skip
def test_files_stay_in_the_models_folder(tmp_path: Path, location: str, words: str) -> None:
    folder = tmp_path / "model"
    for each in (folder, tmp_path / "model2"):
        each.mkdir()
        (each / "w.bin").write_bytes(bytes(4 * SIZE))
    (tmp_path / "outside.bin").write_bytes(bytes(4 * SIZE))
    (folder / "link.bin").symlink_to(tmp_path / "outside.bin")
    (folder / "hard.bin").hardlink_to(tmp_path / "outside.bin")
    (folder / "away").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    refused(folder, words, location)


@pytest.mark.usefixtures("mapping")
@pytest.mark.parametrize(
    "where",
    [
        {"offset": -4}, {"offset": 4}, {"offset": 1 << 70}, {"offset": "many"}, {"length": 4 * SIZE - 4},
        {"length": 1 << 50}, {"length": -1}, {"offset": 4 * SIZE},
    ],
)  # fmt: skip
def test_what_lies_beyond_the_file_is_refused(tmp_path: Path, where: dict[str, object]) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(4 * SIZE))
    refused(tmp_path, "cannot be read", "w.bin", **where)


# Memory ------------------------------------------------------------------------------------------------------------

ROWS, WIDTH = 620_000, 1024
TABLE_BYTES = ROWS * WIDTH * 4
SCRIPT = """
import sys
import numpy as np
import celosia
from celosia.driver.runtime import Runtime

def peak():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))

path, ids, how = sys.argv[1], np.array(eval(sys.argv[2])), sys.argv[3]
if how == "warm":
    path = path.replace("model.onnx", "small.onnx")
runtime = Runtime(path)
y = runtime.run({"ids": ids % 7 if how == "warm" else ids}).outputs["y"]
if how == "touch":
    y = y + runtime.program_for({"ids": ids}).constants["table"][:80_000:4, 0].sum()
np.save(sys.argv[4], y)
print(peak())
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], Array]:
    """Return a model with a sparse file of more than 2 GB, rows of its table to read, and its output.

    Skip the test if the file system has no sparse files.
    """
    folder = tmp_path_factory.mktemp("large")
    w, ids = RNG.standard_normal((WIDTH, 64), np.float32), [3, ROWS - 1, ROWS // 2]
    rows = RNG.standard_normal((3, WIDTH), np.float32)
    with (folder / "model.bin").open("wb") as file:
        file.truncate(TABLE_BYTES)
        for row, values in zip(ids, rows):
            file.seek(row * WIDTH * 4)
            file.write(values.tobytes())
        file.seek(TABLE_BYTES)
        file.write(w.tobytes())
    if (folder / "model.bin").stat().st_blocks * 512 > 100 * MEGABYTE:
        pytest.skip("this file system has no sparse files")
    text = """g (int64[3] ids) => (float[3, 64] y) { r = Gather(table, ids)  h = Relu(r)  y = MatMul(h, w) }"""
    save(
        folder / "model.onnx", text, outside("table", (ROWS, WIDTH), "model.bin"),
        outside("unused", (ROWS, WIDTH), "model.bin"), outside("w", w.shape, "model.bin", offset=TABLE_BYTES),
    )  # fmt: skip
    save(
        folder / "small.onnx",
        text,
        numpy_helper.from_array(rows.repeat(3, 0), "table"),
        numpy_helper.from_array(w, "w"),
    )
    return folder / "model.onnx", ids, np.maximum(rows, 0) @ w


def peak(large: tuple[Path, list[int], Array], how: str) -> tuple[int, Array]:
    """Compile and run the model in a process; return its peak memory in bytes, and the output."""
    path, ids, _ = large
    output_path = path.with_name(f"{how}.npy")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), str(ids), how, str(output_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout), np.load(output_path)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured by way of /proc")
def test_two_gigabytes_are_mapped(large: tuple[Path, list[int], Array]) -> None:
    assert TABLE_BYTES > 2 << 30
    without, _ = peak(large, "warm")  # a table of a few rows
    taken, y = peak(large, "map")
    np.testing.assert_allclose(y, large[2], rtol=1e-4, atol=1e-4)
    assert taken - without < 64 * MEGABYTE


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured by way of /proc")
def test_pages_that_are_read_are_counted(large: tuple[Path, list[int], Array]) -> None:
    without, _ = peak(large, "warm")
    touched, _ = peak(large, "touch")  # the first 312 MB of the table
    assert touched - without > 256 * MEGABYTE
