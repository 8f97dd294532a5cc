"""Builds of simulators report progress, leave nothing after SIGTERM, and replace the oldest cache entries."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from configs import CONFIGS
from small_models import Builder
from thorough import some
from typer.testing import CliRunner

from celosia import cache
from celosia.driver import cli
from celosia.driver.show import progress
from celosia.hw.spec.config import Config
from celosia.hw.verilog import TOP, hardware_digest, verilog
from celosia.long_running import TERMINATED, end_on_sigterm, every_minute
from celosia.sim.rtl import build

CFG = CONFIGS["4x4"]
COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo slow 99.0 && exit
echo $$ >> "$0.pids"
exec sleep 600
"""
BUILD = """
import sys
import tempfile
from celosia.hw.spec.config import Config
from celosia.sim.rtl.build import build_library
build_library(Config.load(sys.argv[1]))
"""


@pytest.mark.rtl
@pytest.mark.parametrize("how", some(["script", "command"], ["command"]))
def test_sigterm_ends_the_compilers_and_leaves_nothing_half_built(how: str, tmp_path: Path) -> None:
    verilog(CFG, simulation=True)
    (tmp_path / "mine.toml").write_text(CFG.to_toml())
    (tmp_path / "verilog").symlink_to(cache.cache_folder() / "verilog")
    slow = tmp_path / "slow"
    slow.write_text(COMPILER)
    slow.chmod(0o755)
    started = tmp_path / "slow.pids"
    line = ["-c", BUILD, tmp_path / "mine.toml"]
    if how == "command":
        b = Builder("qdq", np.int8, seed=1)
        b.output(b.conv(b.input([1, 3, 8, 8]), 8, (1, 1)))
        onnx.save(b.model(), tmp_path / "model.onnx")
        line = ["-m", "celosia.driver.cli", "run", tmp_path / "model.onnx", "--random", "--device", "rtl"]
        line += ["--config", tmp_path / "mine.toml", "--no-check"]
    environment = os.environ | {"CELOSIA_CACHE": str(tmp_path), "CXX": str(slow)}
    with subprocess.Popen(
        [sys.executable, *map(str, line)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            until = time.monotonic() + 120
            while not started.exists() and process.poll() is None and time.monotonic() < until:
                time.sleep(0.1)
            time.sleep(0.3)
            assert any(tmp_path.glob("rtlsim/*/build.*"))
            process.send_signal(signal.SIGTERM)
            _, output = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == TERMINATED == 143, output
    assert output.count("Building the simulator of") == 1 and "Traceback" not in output
    pids = [int(pid) for pid in started.read_text().split()]
    assert pids and not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not any(tmp_path.glob("rtlsim/*/build.*")) and not any(tmp_path.glob("rtlsim/*/*.so"))


LEAST = f"module {TOP}(input clk, output reg q); always @(posedge clk) q <= ~q; endmodule\n"
"""A design that Verilator compiles quickly; it never runs."""
RECORDER = """#!/bin/sh
[ "$1" = --version ] && echo recorder 99.0 && exit
echo "$*" >> "$0.log"
while [ "$1" != -o ]; do shift; done
echo > "$2"
"""


HOLDS = """
import sys
import tempfile
from pathlib import Path
from celosia.cache import file_lock
with file_lock(Path(sys.argv[1])):
    print("holds", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["leaves", "is killed"])
def test_a_lock_is_waited_for_and_no_longer_than_its_holder_lives(end: str, tmp_path: Path) -> None:
    path, events = tmp_path / "lock", list[str]()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin and holder.stdout and holder.stdout.readline() == "holds\n"

        def waits() -> None:
            events.append("waits" if holder.poll() is None else "is late")
            holder.kill() if end == "is killed" else holder.stdin.close()  # type: ignore[union-attr]

        with cache.file_lock(path, waits):
            events.append("has it")
    with cache.file_lock(path, lambda: events.append("waits again")):
        assert events == ["waits", "has it"]


@pytest.mark.rtl
def test_verilators_runtime_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, log = tmp_path / "compiler", tmp_path / "compiler.log"
    compiler.write_text(RECORDER)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("CELOSIA_CACHE", str(tmp_path / "cache"))
    for number in range(2):
        build.build_library(CFG, quiet=True, source=f"{LEAST}// {number}\n")
    commands = log.read_text()
    assert commands.count("runtime.cpp") == 1 and commands.count("seldom.cpp") == commands.count("-shared") == 2
    (runtime,) = (entry for entry in cache.cached_files() if entry.kind == "verilator")
    assert [str(runtime.path) in line for line in commands.splitlines() if "-shared" in line] == [True, True]


def test_other_handlers_of_sigterm_stay() -> None:
    def own(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, own)
    try:
        end_on_sigterm()
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_long_work_says_that_it_goes_on() -> None:
    reports: list[float] = []
    with every_minute(lambda: reports.append(time.monotonic()), seconds=0.05):
        time.sleep(0.28)
    assert 2 <= len(reports) <= 5
    time.sleep(0.1)
    assert len(reports) <= 5  # reports end with the block
    with every_minute(lambda: reports.append(0), seconds=60):
        pass
    assert 0 not in reports


def test_a_stage_off_a_terminal_is_told_once_and_then_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert progress.LINE_SECONDS == 60
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.1)
    with progress.Stages() as stages:
        stages("thinking")
        time.sleep(0.35)
        with stages.paused():  # something else reports
            time.sleep(0.15)
    output_lines = capsys.readouterr().err.splitlines()
    assert output_lines[0] == "thinking ..." and 1 <= len(output_lines) - 1 <= 4
    assert all(line.startswith("thinking: ") and line.endswith("so far") for line in output_lines[1:])
    with progress.Stages(quiet=True) as stages:
        stages("silent")
        time.sleep(0.15)
    assert capsys.readouterr().err == ""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache of four entries of 1,000 bytes, used in the order of their names."""
    monkeypatch.setenv("CELOSIA_CACHE", str(tmp_path))
    files = ["kernels/a.kernel", "rtlsim/b/simulator.so", "verilog/c.v", "rtlsim/d/simulator.so", "synthesis/e.json"]
    for number, name in enumerate(files):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1000))
        os.utime(path, (1e9 + number, 1e9 + number))
    return tmp_path


def names(entries: list[cache.CachedFile]) -> list[str]:
    return [entry.path.name for entry in entries]


def test_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated files, and those of tools, go to the user's folder among the temporary files."""
    (tmp_path / "home").write_text("no folder can be made here, not even by root")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("CELOSIA_CACHE", "XDG_CACHE_HOME", "YOWASP_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / f"celosia-{os.getuid()}"
    with cache.writable_cache() as written:
        assert written == folder and folder.stat().st_mode & 0o077 == 0
    environment = cache.tool_environment()
    assert environment["XDG_CACHE_HOME"] == environment["YOWASP_CACHE_DIR"] == str(folder / "tools")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / ".cache" / "celosia" and cache.tool_environment() == dict(os.environ)


def test_what_was_used_least_recently_goes_first(folder: Path) -> None:
    assert names(cache.cached_files()) == ["a.kernel", "b", "c.v", "d"]
    assert cache.shrink(4000) == []
    cache.mark_used(folder / "kernels/a.kernel")
    assert names(cache.shrink(2500)) == ["b", "c.v"]
    assert not (folder / "rtlsim/b").exists() and (folder / "kernels/a.kernel").exists()
    assert names(cache.shrink(0, keep=folder / "rtlsim/d")) == ["a.kernel"]
    assert names(cache.shrink(0)) == ["d"]
    assert (folder / "synthesis/e.json").exists()  # it took hours and needs little space


def test_the_limit_comes_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.shrink() == []
    monkeypatch.setenv("CELOSIA_CACHE_LIMIT", "1.5KB")
    assert len(cache.shrink()) == 3
    monkeypatch.setenv("CELOSIA_CACHE_LIMIT", "much")
    with pytest.raises(ValueError, match=r"'much'.*500MB or 2GB"):
        cache.shrink()


def test_the_command_shows_and_clears(folder: Path) -> None:
    shown = CliRunner().invoke(cli.app, ["cache"])
    assert shown.exit_code == 0 and "simulators of the RTL" in shown.stdout and "4.0 kB" in shown.stdout
    assert "1 removed" in CliRunner().invoke(cli.app, ["cache", "--limit", "3KB"]).stdout
    assert "3 removed" in CliRunner().invoke(cli.app, ["cache", "--clear"]).stdout
    wrong = CliRunner().invoke(cli.app, ["cache", "--limit", "much"])
    assert wrong.exit_code == 2 and "'much' is no size" in wrong.output


def hand_over(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give `path` to another user."""
    if os.getuid() == 0:
        os.chown(path, 12345, -1)
    else:
        other = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: other)


@pytest.mark.parametrize("kind", ["rtlsim/x/simulator.so", "verilog/x.v", "kernels/x.kernel", "verilator/x.o"])
@pytest.mark.parametrize("place", ["the file", "its folder", "the cache"])
def test_what_another_user_could_write_is_refused(
    kind: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    monkeypatch.setenv("CELOSIA_CACHE", str(folder))
    path = folder / kind
    cache.make_folder(path.parent)
    path.write_bytes(b"")
    cache.require_own(path)
    changed = {"the file": path, "its folder": path.parent, "the cache": folder}[place]
    mode = changed.stat().st_mode
    for more in (0o002, 0o020):
        changed.chmod(mode | more)
        if more == 0o002 or not cache._is_private(changed.stat().st_gid):
            with pytest.raises(cache.CacheError, match=r"other users.*chmod go-w .*CELOSIA_CACHE"):
                cache.require_own(path)
        changed.chmod(mode)
    hand_over(changed, monkeypatch)
    with pytest.raises(cache.CacheError, match=r"user \d+.*remove .*CELOSIA_CACHE"):
        cache.require_own(path)
    assert not cache.is_own(path)


def test_nothing_of_another_user_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulator or its Verilog from another user is refused, and a kernel is compiled again."""
    from celosia.compiler.cpu.llvm import compile_loops as kernels

    monkeypatch.setenv("CELOSIA_CACHE", str(tmp_path / "cache"))
    path = build.library_path(CFG)
    cache.make_folder(path.parent)
    path.write_bytes(b"code")
    path.with_name(build.CHECKSUM).write_text(build._file_digest(path))
    assert build.build_library(CFG) == path
    text = cache.cache_folder() / "verilog" / f"{hardware_digest(CFG)}.v"
    cache.make_folder(text.parent)
    text.write_text("module celosia_top; endmodule")
    kernel = cache.cache_folder() / "kernels" / "x.kernel"
    cache.make_folder(kernel.parent)
    compiled = kernels.CompiledKernel("f", (), (), 0, b"code", "host")
    kernel.write_bytes(compiled.to_bytes())
    assert kernels._read_cache(kernel) == compiled
    for file in (path, text, kernel):
        hand_over(file, monkeypatch)
    assert kernels._read_cache(kernel) is None
    for ask in (lambda: build.build_library(CFG), lambda: verilog(CFG)):
        with pytest.raises(cache.CacheError, match="belongs to user"):
            ask()


@pytest.mark.rtl
def test_a_new_simulator_takes_the_place_of_old_ones(tmp_path: Path) -> None:
    """A new simulator replaces old ones in the cache. It is built in another process, because loaded libraries stay."""
    (tmp_path / "mine.toml").write_text(CFG.to_toml())
    verilog(CFG, simulation=True)
    (cached_verilog,) = cache.cache_folder().glob(
        f"verilog/{hardware_digest(CFG)}-simulation.v"
    )  # use the Verilog that exists already
    (tmp_path / "verilog").mkdir()
    shutil.copy2(cached_verilog, tmp_path / "verilog")
    recorder = tmp_path / "recorder"
    recorder.write_text(RECORDER)
    recorder.chmod(0o755)
    old = tmp_path / "rtlsim" / "old" / "simulator.so"
    old.parent.mkdir(parents=True)
    old.write_bytes(bytes(10_000_000))
    environment = os.environ | {"CELOSIA_CACHE": str(tmp_path), "CELOSIA_CACHE_LIMIT": "8MB", "CXX": str(recorder)}
    subprocess.run([sys.executable, "-c", BUILD, tmp_path / "mine.toml"], env=environment, check=True, timeout=300)
    assert not old.exists() and len(list(tmp_path.glob("rtlsim/*/simulator.so"))) == 1


@pytest.mark.rtl
@pytest.mark.parametrize("damage", ["cut", "a flipped bit", "no checksum"])
def test_a_damaged_simulator_is_built_again(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged simulator is built again; a shortened one would end the process with SIGBUS."""
    intact = build.build_library(CFG)
    monkeypatch.setenv("CELOSIA_CACHE", str(tmp_path))
    path = build.library_path(CFG)
    shutil.copytree(intact.parent, path.parent)
    builds: list[Config] = []

    def again(cfg: Config, path: Path, quiet: bool, source: str | None) -> None:
        builds.append(cfg)
        for name in (path.name, build.CHECKSUM):
            shutil.copy(intact.parent / name, path.parent / name)

    monkeypatch.setattr(build, "_build", again)
    assert build.build_library(CFG) == path and not builds
    data = bytearray(path.read_bytes())
    match damage:
        case "cut":
            path.write_bytes(data[:-5000])
        case "a flipped bit":
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        case _:
            path.with_name(build.CHECKSUM).unlink()
    assert build.build_library(CFG) == path and builds == [CFG]
    assert build.build_library(CFG) == path and builds == [CFG]


@pytest.mark.parametrize("elsewhere", some([False, True], [False]))
def test_a_cache_that_cannot_be_written(elsewhere: bool, tmp_path: Path) -> None:
    """The error names the folder and the way out, and nothing is installed for it."""
    (tmp_path / "home").write_text("no folder")
    (tmp_path / "mine.toml").write_text(CFG.to_toml())
    environment = os.environ | {"HOME": str(tmp_path / "home"), "CELOSIA_CACHE": str(tmp_path / "home" / "cache")}
    environment.pop("XDG_CACHE_HOME", None)
    command = [sys.executable, "-m", "celosia.driver.cli", "verilog", "--config", tmp_path / "mine.toml", "-o"]
    process = subprocess.run([*command, tmp_path / "a.v"], env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 1 and "pip" not in process.stderr and "Traceback" not in process.stderr
    assert f"the folder {tmp_path}/home/cache, where" in process.stderr and "set CELOSIA_CACHE" in process.stderr
    if not elsewhere:  # the rest takes as long as the compilation of Yosys
        return
    environment["CELOSIA_CACHE"] = str(tmp_path / "cache")  # then Yosys stores its files there, too
    process = subprocess.run([*command, tmp_path / "a.v"], env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "cache" / "tools").is_dir() and (tmp_path / "a.v").stat().st_size > 1000
