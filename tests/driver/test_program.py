"""A saved Program loads again; damaged and foreign files do not."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import struct
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thorough import some, tries
from typer.testing import CliRunner

import celosia
from celosia.compiler.cpu.llvm import compile_loops as llvm_compile
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.program import InputError, Program, ProgramError
from celosia.compiler.program.safe_files import OutputError
from celosia.compiler.target import TARGETS, Target
from celosia.driver.cli import app
from celosia.driver.data.arrays import read_array
from celosia.driver.data.calibration import open_samples
from celosia.sim.rtl.build import find_compiler


@pytest.fixture(scope="module")
def saved(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "program"
    celosia.compile(models / "quantised.onnx", "tiny").save(path)
    return path


@pytest.fixture(scope="module")
def x(models: Path) -> dict[str, np.ndarray]:
    return {"input_1": np.load(models / "x.npy")}


def parts(program: Program) -> tuple[object, dict[str, bytes]]:
    return program._manifest(), program._blobs()


def entries(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rewrite(path: Path, contents: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
    return path


def test_saved_and_loaded_it_is_the_same(saved: Path, models: Path, x: dict[str, np.ndarray]) -> None:
    compiled, loaded = celosia.compile(models / "quantised.onnx", "tiny"), Program.load(saved)
    assert compiled._manifest() == loaded._manifest() and compiled.to_bytes() == saved.read_bytes()
    assert compiled._blobs() == loaded._blobs()
    assert Program.is_program(saved) and not Program.is_program(models / "quantised.onnx")
    first = celosia.Runtime(compiled).run(x).outputs
    second = celosia.Runtime(loaded).run(x).outputs
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("target", some(["", "ultra96"], ["ultra96"]))
def test_equal_programs_of_equal_inputs(models: Path, tmp_path: Path, target: str) -> None:
    """Equal inputs give equal files, whatever the order of sets and the state of the cache."""
    target = target if find_spec("ziglang") else ""
    script = "import sys, celosia; celosia.compile(sys.argv[1], 'tiny', target=sys.argv[3] or None).save(sys.argv[2])"
    contents = set()
    for seed in ("1", "2"):
        path, environment = tmp_path / seed, os.environ | {"PYTHONHASHSEED": seed}
        environment["CELOSIA_CACHE"] = str(tmp_path / f"cache{seed}")
        command = [sys.executable, "-c", script, models / "quantised.onnx", path, target]
        subprocess.run(command, env=environment, check=True)
        contents.add(path.read_bytes())
    assert len(contents) == 1


@pytest.mark.parametrize("kind", ["manifest.json", "image.bin", "constants/", "kernels/", "launches/"])
def test_each_kind_of_part_is_protected(saved: Path, tmp_path: Path, kind: str) -> None:
    contents = entries(saved)
    names = [name for name in contents if name.startswith(kind)]
    assert names
    for name in names:
        data = contents[name]
        for place in {0, len(data) // 2, len(data) - 1}:
            flipped = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
            with pytest.raises(ProgramError, match=r"checksum of (its manifest|part )"):
                Program.load(rewrite(tmp_path / "flipped", {**contents, name: flipped}))
        left = {other: data for other, data in contents.items() if other != name}
        with pytest.raises(ProgramError, match="manifest" if name == "manifest.json" else name):
            Program.load(rewrite(tmp_path / "left", left))


@settings(max_examples=tries(120), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_flipped_byte_changes_a_program(saved: Path, tmp_path: Path, data: st.DataObject) -> None:
    """A flipped byte anywhere in the file gives an error, or has no meaning."""
    content = bytearray(saved.read_bytes())
    region = data.draw(st.sampled_from([(0, 200), (0, len(content)), (len(content) - 1500, len(content))]))
    place = data.draw(st.integers(region[0], region[1] - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "flipped"
    path.write_bytes(content)
    try:
        loaded = Program.load(path)
    except ProgramError as error:
        assert str(path) in str(error)
    else:
        assert parts(loaded) == parts(Program.load(saved))


@settings(max_examples=tries(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_part_of_a_program_is_one(saved: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = saved.read_bytes()
    path = tmp_path / "cut"
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(ProgramError, match="not a Celosia Program"):
        Program.load(path)


def _with_manifest(saved: Path, path: Path, **changes: object) -> Path:
    contents = entries(saved)
    manifest = {**json.loads(contents["manifest.json"]), **changes}
    text = json.dumps(manifest).encode()
    digest = hashlib.sha256(text).hexdigest().encode()
    return rewrite(path, {**contents, "manifest.json": text, "manifest.sha256": digest})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "other"}, "is not a Celosia Program"),
        ({"version": 99}, "has format version 99; this Celosia reads 12"),
        ({"config": {"block_in": 12}}, "block_in must be a power of two"),
        ({"steps": [{"kind": "cpu"}]}, "is damaged"),
        ({"kernels": 99}, "is damaged"),
        ({"sha256": {}}, "is damaged"),
    ],
)
def test_a_foreign_manifest(saved: Path, tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        Program.load(_with_manifest(saved, tmp_path / "foreign", **changes))


def test_what_is_not_a_program(tmp_path: Path, models: Path) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, x=np.zeros(3))
    (tmp_path / "array.npz").write_bytes(buffer.getvalue())
    with pytest.raises(ProgramError, match="it has no manifest"):
        Program.load(tmp_path / "array.npz")
    with pytest.raises(ProgramError, match=r"nothing: No such file"):
        Program.load(tmp_path / "nothing")
    with pytest.raises(ProgramError, match=r"cannot read .*: Is a directory"):
        Program.load(tmp_path)
    with pytest.raises(ProgramError, match="not a Celosia Program"):
        Program.load(models / "quantised.onnx")


def _member(data: bytes, **fields: bytes) -> bytes:
    """Return an archive of one part with changed fields in its entry of the central directory."""
    at = data.rindex(b"PK\1\2")
    places = {"version": 6, "flags": 8, "method": 10, "offset": 42, "name": 46}
    for field, value in fields.items():
        start = at + places[field]
        data = data[:start] + value + data[start + len(value) :]
    return data


DAMAGE = {
    "a name that is no UTF-8": {"flags": b"\0\x08", "name": b"\xff"},
    "a version of the format to come": {"version": b"\xff\0"},
    "an unknown method of compression": {"method": b"\x63\0"},
    "encryption": {"flags": b"\1\0"},
    "a part that lies elsewhere": {"offset": b"\xff\xff\xff\x7f"},
}


@pytest.mark.parametrize("what", DAMAGE)
def test_archives_that_zipfile_finds_no_one_error_for(what: str, tmp_path: Path) -> None:
    """Damaged archives of Programs, arrays and samples are refused in one sentence that names the file."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("manifest.json", "{}")
    path = tmp_path / "file.npz"
    path.write_bytes(_member(buffer.getvalue(), **DAMAGE[what]))
    assert Program.is_program(path)
    with pytest.raises(ProgramError, match=r"^\S+file\.npz is (damaged|not )[^\n]+$"):
        Program.load(path)
    with pytest.raises(InputError, match=r"^\S+file.npz is [^\n]+$"):
        read_array(path)
    with pytest.raises(InputError, match=r"^\S+file.npz [^\n]+$"):
        open_samples(path, [])


def test_an_archive_on_many_disks(tmp_path: Path) -> None:
    """An archive for which `zipfile.is_zipfile` raises an error is refused."""
    buffer = io.BytesIO()
    zipfile.ZipFile(buffer, "w").close()
    path = tmp_path / "disks"
    path.write_bytes(b"XX" + struct.pack("<4sLQL", b"PK\6\7", 0, 0, 2) + buffer.getvalue())
    assert Program.is_program(path)
    with pytest.raises(ProgramError, match=r"Celosia Program.*multiple disks"):
        Program.load(path)


HEADERS = {
    "a bracket that is not closed": "{'descr': '<f4', 'fortran_order': False, 'shape': (2, }",
    "a size that cannot be": "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999,), }",
    "odd indents": "{'descr':\n  '<f4'\n }\n  x\n y",
    "brackets without end": "(" * 3000,
    "a type that is none": "{'descr': 3, 'fortran_order': False, 'shape': (2,), }",
}


@pytest.mark.parametrize("what", HEADERS)
def test_arrays_that_numpy_finds_no_one_error_for(what: str, saved: Path, tmp_path: Path) -> None:
    """Damaged arrays are refused, also within a Program with valid checksums."""
    text = HEADERS[what].encode()
    data = b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text
    (tmp_path / "x.npy").write_bytes(data)
    with pytest.raises(InputError, match=r"^\S+x\.npy is not a \.npy file[^\n]+$"):
        read_array(tmp_path / "x.npy")
    contents, name = entries(saved), "constants/0.npy"
    digests = json.loads(contents["manifest.json"])["sha256"] | {name: hashlib.sha256(data).hexdigest()}
    forged = _with_manifest(rewrite(tmp_path / "changed", contents | {name: data}), tmp_path / "forged", sha256=digests)
    with pytest.raises(ProgramError, match=r"^\S+forged is damaged: [^\n]+$"):
        Program.load(forged)


def test_saving_writes_all_or_nothing(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program.load(saved)
    with pytest.raises(OutputError, match="there is no folder"):
        program.save(tmp_path / "no" / "program")
    (tmp_path / "program").write_text("an older one")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(zipfile.ZipFile, "writestr", full)
        with pytest.raises(OutputError, match=r"cannot write .*No space left"):
            program.save(tmp_path / "program")
    assert [path.name for path in tmp_path.iterdir()] == ["program"]
    assert (tmp_path / "program").read_text() == "an older one"
    program.save(tmp_path / "program")
    assert parts(Program.load(tmp_path / "program")) == parts(program)


def test_a_program_of_constants_only(tmp_path: Path) -> None:
    """A model whose output depends on no input has nothing to run."""
    value = onnx.numpy_helper.from_array(np.arange(3, dtype=np.float32), "y")
    info = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [3])
    graph = onnx.helper.make_graph([], "constant", [], [info], [value])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    celosia.compile(model, "tiny").save(tmp_path / "p")
    assert celosia.Runtime(Program.load(tmp_path / "p")).run({}).outputs["y"].tolist() == [0, 1, 2]


def test_a_program_for_a_board(models: Path, tmp_path: Path) -> None:
    """A Program for a board holds its kernels in one shared object, and does not run elsewhere."""
    pytest.importorskip("ziglang")
    celosia.compile(models / "quantised.onnx", "tiny", target="pynq-z1").save(tmp_path / "program")
    program = Program.load(tmp_path / "program")
    assert program.machine == "armv7l" and program.library.startswith(b"\x7fELF") and program.kernels
    assert not any(kernel.code for kernel in program.kernels)
    with pytest.raises(ProgramError, match=r"armv7l.*--device ssh://USER@BOARD"):
        celosia.Runtime(program)


def test_a_program_with_a_shared_object(
    models: Path, monkeypatch: pytest.MonkeyPatch, x: dict[str, np.ndarray]
) -> None:
    """A Program with a shared object for this machine's processor runs here."""
    pytest.importorskip("ziglang")
    here = Target(
        16, 16, frozenset(("sse2",)), platform.machine(), f"{platform.machine()}-unknown-linux-gnu", "x86-64",
        ("-target", f"{platform.machine()}-linux-gnu.2.28"),
    )  # fmt: skip
    monkeypatch.setitem(TARGETS, "here", here)
    program = celosia.compile(models / "quantised.onnx", "tiny", target="here")
    expected = celosia.Runtime(celosia.compile(models / "quantised.onnx", "tiny")).run(x).outputs
    for name, array in celosia.Runtime(program).run(x).outputs.items():
        assert np.array_equal(array, expected[name]), name
    program.library = program.library[:100]
    with pytest.raises(ProgramError, match="kernels cannot be loaded"):
        celosia.Runtime(program)


def test_machine_code_of_a_file_runs_only_where_its_user_says_so(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, x: dict[str, np.ndarray]
) -> None:
    """Machine code of a file runs only if the user trusts it, even with valid checksums.

    The forged shared object acts as soon as it is loaded.
    """
    path, mark, source = tmp_path / "forged", tmp_path / "mark", tmp_path / "code.cpp"
    program = celosia.compile(models / "quantised.onnx", "tiny")
    expected = celosia.Runtime(program).run(x).outputs
    source.write_text(
        f'extern "C" int system(const char *); __attribute__((constructor)) void go() {{ system("touch {mark}"); }}'
    )
    subprocess.run([find_compiler(), "-shared", "-fPIC", "-o", "code.so", source.name], cwd=tmp_path, check=True)
    program.machine, program.library = platform.machine(), (tmp_path / "code.so").read_bytes()
    program.save(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(ProgramError, match=r"machine code.*--rebuild-kernels"):
        celosia.Runtime(Program.load(path))
    with pytest.raises(ProgramError, match=rf"SHA-256 {digest}.*0000"):
        Program.load(path, digest="0000")
    assert not mark.exists()
    line = ["run", str(path), "--random", "-o", str(tmp_path / "y.npz")]
    for more, code, words in (
        ([], 1, "--rebuild-kernels"),
        (["--digest", "0000"], 1, "not the file that was meant"),
        (["--rebuild-kernels"], 0, ""),
    ):
        done = CliRunner().invoke(app, [*line, *more])
        assert done.exit_code == code and words in done.output, done.output
    assert not mark.exists()
    rebuilt = Program.load(path)
    rebuilt.machine = ""
    assert all(np.array_equal(expected[name], found) for name, found in celosia.Runtime(rebuilt).run(x).outputs.items())
    for vouched in ({"trust": True}, {"digest": digest.upper()}):
        with pytest.raises(ProgramError, match="kernels cannot be loaded"):  # after it has done its work
            celosia.Runtime(Program.load(path, **vouched))  # type: ignore[arg-type]
        assert mark.exists()
        mark.unlink()


def test_a_program_of_this_machine_holds_no_machine_code(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, x: dict[str, np.ndarray]
) -> None:
    """A Program for this machine holds loops, which are compiled or found in the cache when it is loaded."""
    program = Program.load(saved)
    assert not program.library and not any(kernel.code for kernel in program.kernels)
    expected = celosia.Runtime(program).run(x).outputs
    count = len(list((tmp_path / "cache" / "kernels").glob("*")))
    monkeypatch.setenv("CELOSIA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(llvm_compile, "_kernels", {})
    assert not count
    found = celosia.Runtime(program).run(x).outputs
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    monkeypatch.setattr(llvm_compile, "_kernels", {})
    monkeypatch.setattr(llvm_compile, "_compile", None)  # which is not needed any more
    celosia.Runtime(Program.load(saved)).run(x)


def test_forged_loops_are_refused_or_harmless(saved: Path, tmp_path: Path) -> None:
    contents, name = entries(saved), "kernels/0.loops"
    text = contents[name].decode()
    for old, new, words in (
        ("= ", "= system", "kernel 0 of the program cannot be compiled of its loops"),
        ("] = ", "] = 1 + 1 = ", "kernel 0 of the program cannot be compiled of its loops"),
        (text, "", "a function begins with"),
    ):
        assert old in text
        data = text.replace(old, new).encode()
        digests = json.loads(contents["manifest.json"])["sha256"] | {name: hashlib.sha256(data).hexdigest()}
        rewrite(tmp_path / "changed", contents | {name: data})
        forged = _with_manifest(tmp_path / "changed", tmp_path / "forged", sha256=digests)
        with pytest.raises(ProgramError, match=words):
            celosia.Runtime(Program.load(forged))


def test_what_a_board_cannot_run() -> None:
    """A model with shapes known at run time is refused for a board, which has no compiler."""
    value = onnx.helper.make_tensor_value_info
    nodes = [onnx.helper.make_node("NonZero", ["x"], ["n"]), onnx.helper.make_node("BitwiseNot", ["n"], ["y"], "minus")]
    graph = onnx.helper.make_graph(
        nodes, "g", [value("x", onnx.TensorProto.FLOAT, [3])], [value("y", onnx.TensorProto.INT64, [1, "n"])]
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    with pytest.raises(ModelError, match=r"BitwiseNot \(minus\).*run time"):
        celosia.compile(model, "tiny", target="ultra96")
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["x"], ["y"])], "g",
        *([value(name, onnx.TensorProto.BFLOAT16, [3])] for name in "xy"),
    )  # fmt: skip
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    with pytest.raises(ModelError, match=r"'[xy]'.*bfloat16.*board"):
        celosia.compile(model, "tiny", target="ultra96")
