"""Damaged or forged files of Celosia let each command end with a sentence, or continue."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from changed import change
from driver_models import UNBLOCKED, quantised
from thorough import some, tries
from typer.testing import CliRunner

import celosia
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.program import InputError, ProgramError
from celosia.compiler.tune.records import Records, RecordsError, encode_line
from celosia.driver.cli import app
from celosia.driver.cli.errors import _error_classes_by_exit_code
from celosia.driver.explore.configs import ConfigSpace, SpaceError
from celosia.hw.boards.boards import find_board
from celosia.hw.spec.config import Config, ConfigError
from celosia.plain import Sentence, Sentences, from_json

DEEP = "[" * 100_000 + "]" * 100_000
NUMBER = "1" + "0" * 400
HALF = '"\\ud800"'
WORST = {"deep": DEEP, "10^400": NUMBER, "half a character": HALF}


def call(*line: object) -> tuple[int, str]:
    """Run a command line; return exit code and output."""
    result = CliRunner().invoke(app, [str(word) for word in line])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def is_refused(*line: object) -> str:
    code, said = call(*line)
    error = [row for row in said.splitlines() if row.startswith("celosia: error: ")]
    assert code == 1 and len(error) == 1 and len(error[0]) < 1000 and "fault of celosia" not in said, (
        code,
        said[:2000],
    )
    return error[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "model.onnx"
    onnx.save(quantised(), path)
    return path


@pytest.mark.parametrize("what", WORST)
def test_values_that_nothing_takes(what: str) -> None:
    for text in (WORST[what], f'{{"a": [{WORST[what]}]}}'):
        with pytest.raises(ValueError, match=r"deep|401 digits|half a character"):
            from_json(text)


def test_values_that_are_plain() -> None:
    value = {"a": [1, -2.5, None, True, "ä€😀"], "b": {"c": 2**64}}
    assert from_json(json.dumps(value)) == from_json(json.dumps(value, ensure_ascii=False).encode()) == value
    assert from_json("[" * 99 + "]" * 99)


@pytest.mark.parametrize("what", WORST)
def test_a_config(what: str, tmp_path: Path, model: Path) -> None:
    for field in ("batch", "name"):
        (tmp_path / "config.json").write_text(f'{{"{field}": {WORST[what]}}}')
        assert "config.json" in is_refused("compile", model, "--config", tmp_path / "config.json", "-o", tmp_path / "p")


@pytest.mark.parametrize(
    "line", [
        "name = 1979-05-27", "batch = 1979-05-27T07:32:00Z", "name = [1]", f"batch = {NUMBER}", f"batch = {'1' * 9000}",
        f"batch = 0x{'f' * 9000}", f"packed = 0b1{'0' * 30000}", f"batch = {'[' * 9000}", f"{'a.' * 9000}b = 1",
        f"packed = [[0x{'f' * 9000}]]",
    ], ids=lambda line: line[:16],
)  # fmt: skip
def test_a_config_in_toml(line: str, tmp_path: Path, model: Path) -> None:
    (tmp_path / "config.toml").write_text(line)
    said = is_refused("compile", model, "--config", tmp_path / "config.toml", "-o", tmp_path / "program")
    assert "int_max_str_digits" not in said and len(said) < 1000
    with pytest.raises(ConfigError):
        Config.load(tmp_path / "config.toml")
    with pytest.raises(SpaceError):
        ConfigSpace.of(find_board("pynq-z2"), tmp_path / "config.toml")


def test_a_number_that_no_message_holds() -> None:
    for field in ("batch", "packed", "taps"):
        with pytest.raises(ConfigError, match="number of more than 40 digits"):
            Config(**{field: 1 << 40000})


@pytest.mark.parametrize("what", WORST)
def test_decisions_reports_and_fronts(what: str, tmp_path: Path, model: Path) -> None:
    path = tmp_path / "file.json"
    for text in (WORST[what], f'{{"searched": {WORST[what]}}}', f'{{"config": {WORST[what]}}}'):
        path.write_text(text)
        is_refused("report", path, "-o", tmp_path / "page.html")
        is_refused("compile", model, "--decisions", path, "-o", tmp_path / "program")
    path.write_text(f'{{"config": {WORST[what]}}}')
    (tmp_path / "a.bit").write_bytes(b"")
    (tmp_path / "a.json").write_text(f'{{"config": {WORST[what]}}}')
    (tmp_path / "a.manifest.json").write_text(f'{{"config": {WORST[what]}}}')
    is_refused("flash", tmp_path / "a.bit", "--board", "pynq-z2")


@pytest.mark.parametrize("what", WORST)
def test_records(what: str, tmp_path: Path) -> None:
    """An invalid line of a records file is left out and counted as damaged."""
    row = {"workload": "w", "config": "c", "schedule": [{"n": 1}], "measurer": "m", "status": "ok", "cycles": 5,
           "detail": "", "seconds": 1.0}  # fmt: skip
    good, path = encode_line(row), tmp_path / "records.jsonl"
    for name in row:
        text = json.dumps(row | {name: "HERE"}, sort_keys=True, separators=(",", ":")).replace('"HERE"', WORST[what])
        bad = f'{text[:-1]},"crc":{zlib.crc32(text.encode())}}}\n'.encode()
        path.write_bytes(good + bad)
        assert Records.load(path).damaged == 1
        path.write_bytes(bad)
        with pytest.raises(RecordsError, match="holds no records"):
            Records.load(path)


# A Program ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "model.celosia"
    celosia.compile(model, "tiny").save(path)
    return path


def forged(
    program: Path, target: Path, change: Callable[[dict[str, Any], dict[str, bytes]], Any], last: str = ""
) -> Path:
    """Write the Program with a changed manifest and parts, and valid checksums. last: replaces "HERE"."""
    with zipfile.ZipFile(program) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(parts.pop("manifest.json"))
    del parts["manifest.sha256"]
    change(manifest, parts)
    manifest["sha256"] = {name: hashlib.sha256(data).hexdigest() for name, data in parts.items()}
    text = json.dumps(manifest).replace('"HERE"', last).encode()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("manifest.json", text)
        archive.writestr("manifest.sha256", hashlib.sha256(text).hexdigest())
        for name, data in parts.items():
            archive.writestr(name, data)
    return target


SHOWN = (("inspect",), ("inspect", "--layers"), ("inspect", "--disassemble"), ("report", "-o"), ("run", "--random"))


def shown(path: Path, tmp_path: Path) -> list[tuple[int, str]]:
    """Run each command that takes a Program; return exit codes and outputs."""
    lines = [(words[0], path, *words[1:], *((tmp_path / "page.html",) if "-o" in words else ())) for words in SHOWN]
    return [call(*line) for line in lines]


@pytest.mark.parametrize("what", WORST)
@pytest.mark.parametrize("field", ["name", "placements", "macs_total", "schedules", "machine", "dram_size", "config"])
def test_a_manifest(what: str, field: str, program: Path, tmp_path: Path) -> None:
    path = forged(program, tmp_path / "forged", lambda manifest, _: manifest.update({field: "HERE"}), WORST[what])
    assert "forged" in is_refused("inspect", path)
    is_refused("run", path, "--random")


def test_placements_without_a_place(program: Path, tmp_path: Path) -> None:
    for row in ({}, {"name": "a", "op": "b"}, {"name": "a", "op": "b", "place": "moon", "reason": ""}):
        path = forged(program, tmp_path / "forged", lambda manifest, _, row=row: manifest.update(placements=[row]))
        assert "placement" in is_refused("inspect", path)


@pytest.mark.parametrize("seed", some(range(8), range(3)))
def test_bits_set_in_an_image(seed: int, program: Path, tmp_path: Path) -> None:
    """Illegal instructions in an image let each command print an error or the rest."""
    rng = random.Random(seed)

    def change(manifest: dict[str, Any], parts: dict[str, bytes]) -> None:
        image = np.frombuffer(parts["image.bin"], np.uint8).copy()
        launch = next(step for step in manifest["steps"] if step["kind"] == "launch")
        start = launch["address"] - manifest["image_address"]
        for _ in range(rng.choice((1, 1, 5, 100))):
            image[rng.randrange(start, len(image))] |= 1 << rng.randrange(8)
        if seed == 0:
            image[start:] = 0xFF
        parts["image.bin"] = image.tobytes()

    for code, said in shown(forged(program, tmp_path / "forged", change), tmp_path):
        assert code in (0, 1, 3) and "fault of celosia" not in said, (code, said[-1500:])


def test_memory_is_bounded_in_total(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several sizes, each of which would fit, are refused if they do not fit together."""
    most = 1 << 22
    monkeypatch.setattr("celosia.compiler.program.host.op.memory_bytes", lambda: most)
    assert call("run", program, "--random", "-q")[0] == 0

    def parts(manifest: dict[str, Any], blobs: dict[str, bytes]) -> None:
        blobs.update({f"more/{number}": bytes(most // 8) for number in range(9)})

    def inputs(manifest: dict[str, Any], blobs: dict[str, bytes]) -> None:
        manifest["inputs"] += [
            {"name": f"x{n}", "dtype": "int8", "shape": [most // 9], "kind": "tensor"} for n in range(9)
        ]

    def dram(manifest: dict[str, Any], blobs: dict[str, bytes]) -> None:
        manifest["dram_size"] = most

    for claim, words in ((parts, "what is in "), (inputs, "what is made up for 10 inputs"), (dram, "a run of Program")):
        said = is_refused("run", forged(program, tmp_path / "forged", claim), "--random")
        assert words in said and "more than this machine's memory" in said
    with pytest.raises(ProgramError, match="a run of Program"):
        celosia.Runtime(celosia.Program.load(forged(program, tmp_path / "forged", inputs)))


PEAK = """
import re, sys
from celosia.compiler.program import Program, ProgramError

def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])

before = peak()
for path in sys.argv[1:]:
    try:
        Program.load(path)
    except ProgramError as error:
        print(error)
print(peak() - before)
"""


def _small_files(folder: Path, program: Path) -> Iterator[tuple[str, Path]]:
    """Yield (words of the refusal, path) of Programs below 1 MB that unpack to much more."""

    def packed(words: str, text: bytes, method: int = zipfile.ZIP_DEFLATED) -> tuple[str, Path]:
        path = folder / words.replace(" ", "_")
        with zipfile.ZipFile(path, "w", method) as archive:
            archive.writestr("manifest.json", text)
            archive.writestr("manifest.sha256", hashlib.sha256(text).hexdigest())
        return words, path

    yield packed("is larger than", b"[" + b"[],[],{},{},{},{}," * (1 << 22) + b"0]")
    yield packed("more than 2000000 values", b"[" + b"[],{}," * 3_000_000 + b"0]")
    yield packed("compressed in a way", bytes(1 << 26), zipfile.ZIP_BZIP2)
    words, path = packed("Bad CRC-32", bytes(1 << 28))
    data = path.read_bytes()
    path.write_bytes(data.replace((1 << 28).to_bytes(4, "little"), (1000).to_bytes(4, "little")))
    yield words, path

    def operator(manifest: dict[str, Any], parts: dict[str, bytes]) -> None:
        manifest["steps"].insert(0, {"kind": "host", "inputs": [], "outputs": [], "nodes": [], "scratch": False})
        parts["host/0.json"] = b"[" + b"[],{}," * 3_000_000 + b"0]"

    with zipfile.ZipFile(forged(program, folder / "stored", operator)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    path = folder / "operator"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    yield "more than 2000000 values", path


def test_small_files_that_unpack_to_much_take_little_memory(program: Path, tmp_path: Path) -> None:
    words, paths = zip(*_small_files(tmp_path, program))
    assert max(path.stat().st_size for path in paths) < 1 << 20
    done = subprocess.run([sys.executable, "-c", PEAK, *paths], capture_output=True, text=True)
    *said, kilobytes = done.stdout.splitlines()
    assert [word for word, line in zip(words, said, strict=True) if word not in line] == [], done.stdout + done.stderr
    assert 0 < int(kilobytes) < 200_000


# Anything anywhere ------------------------------------------------------------------------------------------------


def is_sentence_or_fine(seed: int, code: int, said: str) -> None:
    assert code in (0, 1, 3) and "fault of celosia" not in said and "Traceback" not in said, (seed, code, said[-1500:])


def test_manifests_changed_at_random(program: Path, tmp_path: Path) -> None:
    for seed in range(tries(20)):
        rng = random.Random(seed)
        path = forged(program, tmp_path / "forged", lambda manifest, _, rng=rng: change(manifest, rng))
        for line in (("inspect", path, "--layers"), ("inspect", path), ("run", path, "--random", "-q")):
            is_sentence_or_fine(seed, *call(*line))


def test_reports_changed_at_random(program: Path, tmp_path: Path) -> None:
    pytest.importorskip("bokeh")
    call("run", program, "--random", "--device", "timed", "--report", tmp_path / "report.json", "-q")
    sound = json.loads((tmp_path / "report.json").read_text())
    for seed in range(tries(20)):
        report = json.loads(json.dumps(sound))
        change(report, random.Random(seed))
        (tmp_path / "changed.json").write_text(json.dumps(report))
        is_sentence_or_fine(seed, *call("report", tmp_path / "changed.json", "-o", tmp_path / "page.html"))


def test_an_exploration_changed_at_random(model: Path, tmp_path: Path) -> None:
    """A randomly changed exploration folder can be continued and drawn, or is refused."""
    pytest.importorskip("moocore")
    fields = {"block_in": [4, 8], "block_out": [4], "bus_bytes": [4], "inp_depth": [512], "wgt_depth": [64, 256],
              "taps": [0], "forward": [False], "batch": [1]}  # fmt: skip
    (tmp_path / "space.toml").write_text("".join(f"{name} = {json.dumps(v)}\n" for name, v in fields.items()))
    folder = tmp_path / "out"
    line = ("explore", model, "--space", tmp_path / "space.toml", "--jobs", "1", "--points", "1", "-o", folder, "-q")
    code, said = call(*line)
    assert code == 0, said
    sound = {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}
    for what in WORST.values():
        (folder / "explore.json").write_text(what)
        assert "explore.json" in is_refused(*line)
        (folder / "explore.json").write_text(sound["explore.json"])
    rows = [json.loads(row) for row in sound["points.jsonl"].splitlines()]
    for row in rows:
        del row["crc"]
    for seed in range(tries(3)):
        rng, changed = random.Random(seed), json.loads(json.dumps(rows))
        for row in changed:
            for _ in range(rng.choice((0, 1, 1, 2))):
                change(row, rng)
        (folder / "points.jsonl").write_bytes(b"".join(map(encode_line, changed)))
        is_sentence_or_fine(seed, *call(*line))
    front = json.loads(sound["front.json"])
    for seed in range(tries(6)):
        changed = json.loads(json.dumps(front))
        change(changed, random.Random(seed))
        (folder / "changed.json").write_text(json.dumps(changed))
        is_sentence_or_fine(seed, *call("report", folder / "changed.json", "-o", tmp_path / "page.html"))


# Names --------------------------------------------------------------------------------------------------------------

EVIL = "\x1b]0;owned\x07\x9b31m\u202e[bold]red[/bold][link=http://x]\n\r\u2028end"


def evil_model() -> onnx.ModelProto:
    """Return a model in which all names hold control sequences of terminals and markup of Rich."""
    model = quantised()
    names: dict[str, str] = {"": ""}

    def evil(name: str) -> str:
        return names.setdefault(name, f"{name}{EVIL}{len(names)}")

    for node in model.graph.node:
        node.name = evil(node.name or node.output[0])
        for tensors in (node.input, node.output):
            tensors[:] = [evil(name) for name in tensors]
    for value in (*model.graph.initializer, *model.graph.input, *model.graph.output, *model.graph.value_info):
        value.name = evil(value.name)
    model.graph.name, model.producer_name, model.doc_string = EVIL, EVIL, EVIL
    return model


def is_harmless(text: str, what: object = "") -> None:
    found = {char for char in text if not char.isprintable() and char != "\n"}
    assert not found, (what, found)
    assert "\nend" not in text and ("owned" not in text or "[bold]" in "".join(text.split())), what


def test_errors_of_the_api_are_bounded_and_escaped(tmp_path: Path) -> None:
    """All errors that the command prints as a sentence are short and printable."""
    hostile = "\x1b]0;owned\x07\u202e\r\n" * 1000
    kinds = [kind for classes in _error_classes_by_exit_code().values() for kind in classes]
    for kind in kinds:
        if issubclass(kind, Sentence | Sentences):
            message = str(kind(hostile))
            assert len(message) < 1100 and all(char.isprintable() or char == "\n" for char in message), kind
            assert issubclass(kind, Sentences) or message.isprintable(), kind
    assert [kind for kind in kinds if not issubclass(kind, Sentence | Sentences | ImportError)] == []
    model = quantised()
    model.graph.node[0].op_type = hostile
    with pytest.raises(ModelError) as unknown:
        celosia.compile(model, "tiny")
    with pytest.raises(InputError) as missing:
        celosia.Runtime(celosia.compile(quantised(), "tiny")).run({hostile: np.zeros(1)})
    for caught in (unknown, missing):
        assert str(caught.value).isprintable() and len(str(caught.value)) < 1100
        assert "owned" in str(caught.value)


def test_no_name_reaches_a_terminal_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No name of a model, file or Config reaches a terminal unescaped, nor does quoted text in an error."""
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / EVIL.replace("/", "|")
    pictures = folder / f"{folder.name}s"
    pictures.mkdir(parents=True)
    picture = pictures / f"{folder.name}.png"
    image.new("L", (20, 12)).save(picture, "png")
    monkeypatch.setattr("celosia.driver.cli.exploring._run_exploration", lambda *given: ({}, True))
    model, program, report = folder / "model.onnx", folder / "model.celosia", folder / "report.json"
    onnx.save(evil_model(), model)
    config = folder / "tiny.toml"
    config.write_text(UNBLOCKED.to_toml() + f"name = {json.dumps(EVIL)}\n")
    page, missing = tmp_path / "page.html", folder / "missing"
    with_config = ("--config", config)
    lines: tuple[tuple[object, ...], ...] = (
        ("compile", model, *with_config, "-o", program), ("inspect", program), ("inspect", program, "--layers"),
        ("inspect", program, "--operators"), ("inspect", program, "--disassemble"), ("inspect", program, "--buffers"),
        ("inspect", program, "--passes"), ("inspect", model, *with_config),
        ("inspect", program, "--layer", "x"), ("run", program, "--random", "--device", "timed", "--layers"),
        ("run", program, "--random", "--report", report, "--device", "timed"), ("run", program), ("run", missing),
        ("run", program, "-i", f"{EVIL}=x"), ("run", program, "-i", missing),
        ("compare", model, "--random", *with_config),
        ("tune", model, *with_config, "--trials", "1", "--jobs", "1", "--records", folder / "records"),
        ("report", program, "-o", page), ("report", report, "-o", page), ("report", missing, "-o", page),
        ("compile", model, "--config", missing, "-o", program), ("compile", model, "--keep", EVIL, "-o", program),
        ("inspect", model, "--pass", EVIL), ("compile", model, *with_config, "-o", missing / "x"),
        ("quantize", model, "--calibration", missing, "-o", folder / "q.onnx"), ("configs", config),
        ("eval", model, "--data", missing), ("deploy", program, "--host", "-oX"), ("run", program, "-i", picture),
        ("eval", program, "--data", folder), ("run", program, missing), ("run", f"--{EVIL}"), (EVIL,),
        ("sweep", model, *with_config, "--set", "taps=0", "--html", page), ("explore", model, "-o", missing, "-q"),
        ("boards", config), ("verilog", *with_config, "-o", missing / "x"), ("flash", missing, "--board", config),
    )  # fmt: skip
    for line in lines:
        code, said = call(*line)
        assert code in (0, 1, 2, 3, 4, 7, 130), (line, code, said[-1000:])
        is_harmless(said.replace("│", ""), line)
    assert report.exists() and page.exists()


def test_the_check_finds_what_is_not_harmless() -> None:
    for text in ("\x1b[1m", "a\x9b", "\u202eabc", "x\nend of a name", "owned red"):
        with pytest.raises(AssertionError):
            is_harmless(text)
