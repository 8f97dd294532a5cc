"""Rehearse a deployment on a board that is simulated on this machine, with the code that deploys to a real one.

The board is a folder with a home, and a Python that has numpy and a package `pynq` (driver/remote/simulated.py). Each
command runs in a process of its own there, as over ssh, with a login shell; only ssh itself is left out.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from celosia.compiler.compile import compile as compile_model
from celosia.compiler.graph.importing.dimensions import Shapes
from celosia.compiler.program import Program
from celosia.compiler.target import Target, target_for
from celosia.driver.board.flash import check_bitstream
from celosia.driver.remote import deploy
from celosia.driver.remote.runner import pack_runner
from celosia.driver.remote.simulated import RTL_LIBRARY_VARIABLE
from celosia.driver.remote.ssh import Connection
from celosia.driver.run.run_result import Result
from celosia.driver.runtime import Runtime
from celosia.hw.boards.board import Board
from celosia.hw.manifest import Manifest
from celosia.hw.spec.config import Config
from celosia.sim.device import DeviceError

PYTHON = """#!/bin/sh
# Python as on a board: numpy and what is in {site}, nothing else of this machine.
PYTHONPATH={site} exec {python} -S "$@"
"""
"""The simulated board's command python3."""
PYNQ = """\
__version__ = "(simulated)"
try:
    from celosia.driver.remote.simulated import MMIO, Clocks, Overlay, allocate
except ImportError:  # a process that asks for the board's state has no runner
    pass
"""
"""The simulated board's package pynq."""
CMA_BYTES = 128 << 20
"""Bytes of contiguous memory that PYNQ's images reserve."""


class SimulatedBoard(Connection):
    """A simulated board in `folder`, whose FPGA is the Verilated RTL `library`, or the functional simulator."""

    def __init__(self, name: str, folder: Path, library: Path | None) -> None:
        super().__init__(name, [name], ())
        self.home, binaries, site = folder / "home", folder / "bin", folder / "site"
        for subfolder in (self.home, binaries, site):
            subfolder.mkdir()
        installed = Path(np.__file__).parent
        for path in (installed, installed.parent / "numpy.libs"):
            if path.exists():
                (site / path.name).symlink_to(path)
        (site / "pynq.py").write_text(PYNQ, encoding="utf-8")
        (self.home / "fpga.state").write_text("unknown", encoding="utf-8")
        python = binaries / "python3"
        python.write_text(
            PYTHON.format(site=shlex.quote(str(site)), python=shlex.quote(sys.executable)), encoding="utf-8"
        )
        python.chmod(0o755)
        search = f"{shlex.quote(str(binaries))}:/usr/bin:/bin"
        (self.home / ".profile").write_text(f"PATH={search}\necho Welcome to the board\n", encoding="utf-8")
        self._environment = {"HOME": str(self.home), "PATH": "/usr/bin:/bin", RTL_LIBRARY_VARIABLE: str(library or "")}

    def _process_arguments(self, command: str) -> list[str]:
        """Return the command line of a process that runs `command` on the board: a shell in its home, not ssh."""
        settings = (f"{name}={value}" for name, value in self._environment.items())
        return ["env", "-i", f"--chdir={self.home}", *settings, "sh", "-c", command]


def host_processor() -> Target:
    """Return the compiler's target for this machine, which is also the simulated board's. DeviceError without one."""
    target = target_for(platform.machine())
    if target is None:
        raise DeviceError(f"a board cannot be simulated on a {platform.machine()}; rehearse on x86_64 or aarch64")
    return target


def write_bitstream(folder: Path, board: Board, config: Config) -> Path:
    """Write a .bit file for `board` in Vivado's format, with .hwh and manifest, that only a simulated FPGA can load."""
    head = bytes.fromhex("00090ff00ff00ff00ff0000001")
    for key, text in zip(b"abcd", ("rehearsal", board.part, "1980/01/01", "00:00:00")):
        data = text.encode() + b"\0"
        head += struct.pack(">BH", key, len(data)) + data
    data = json.dumps(config.to_dict()).encode()
    path = folder / f"{board.name}-{config.name}.bit"
    path.write_bytes(head + struct.pack(">BI", ord("e"), len(data)) + data)
    path.with_suffix(".hwh").write_text("<rehearsal/>", encoding="utf-8")
    bit, hwh = (hashlib.sha256(path.with_suffix(end).read_bytes()).hexdigest() for end in (".bit", ".hwh"))
    manifest = Manifest(
        board.name, board.part, config.to_dict(), config.digest, "", board.clock_mhz, board.address, "", "rehearsal",
        "0", bit, hwh,
    )  # fmt: skip
    path.with_suffix(".json").write_text(manifest.to_json(), encoding="utf-8")
    return path


@dataclass(frozen=True)
class RehearsalStep:
    """One step of a rehearsal.

    seconds: how long it took. said: its result in a few words. needs: what a real board needs for this step.
    """

    name: str
    seconds: float
    said: str
    needs: str


@dataclass
class Rehearsal:
    """Result of a rehearsal.

    board_option: the board as commands name it, a name or a file.
    different: names of outputs that differ from those of a run on this machine's simulator. result: of the run on the
    board; None before it.
    """

    board: Board
    board_option: str
    steps: list[RehearsalStep] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    result: Result | None = None

    @contextmanager
    def step(self, name: str, needs: str, stages: Callable[[str], object]) -> Iterator[Callable[[str], None]]:
        """Time the work in this context as a step. It is given a function for a few words on its result.

        needs: what a real board needs for this step. stages: called with the step's name.
        """
        stages(name)
        started = time.perf_counter()
        words: list[str] = []
        yield words.append
        self.steps.append(RehearsalStep(name, time.perf_counter() - started, "; ".join(words), needs))


def rehearse(
    model: Path, board: Board, inputs: Mapping[str, Any], config: Config | None = None, device: str = "functional",
    shapes: Shapes | None = None, stages: Callable[[str], object] = lambda name: None,
    board_option: str | None = None,
) -> Rehearsal:  # fmt: skip
    """Compile, deploy, flash and run `model` on a simulated `board`, and compare its outputs with those of a run here.

    device: what takes the place of the FPGA, "functional" or "rtl". board_option: the board as commands name it, by
    default by its name. Raises the errors of a deployment.
    """
    config = board.config if config is None else config
    rehearsal = Rehearsal(board, board.name if board_option is None else board_option)
    with TemporaryDirectory(prefix="celosia") as name:
        folder = Path(name)
        library = None
        if device == "rtl":
            from celosia.sim.rtl.build import build_library

            with rehearsal.step("simulator", "nothing: the FPGA takes its place", stages) as say:
                library = build_library(config)
                say(f"the RTL of {config.name}")
        command = f"celosia compile {model.name} -o FILE --target {rehearsal.board_option}"
        with rehearsal.step("compile", command, stages) as say:
            program = compile_model(model, config, target=host_processor(), shapes=shapes)
            say(f"{len(program.launches)} launches, {program.dram_size:,} bytes of the board's memory")
        with rehearsal.step(
            "connect", "PYNQ 3.0, root's ssh key, and the name of the board for USER@BOARD", stages
        ) as say:
            connection = SimulatedBoard(board.name, folder, library)
            remote = deploy.Remote(connection)
            files = pack_runner(), deploy.pack_program(program)
            facts = remote.status(*files)
            say(f"{facts.machine}, Python {'.'.join(map(str, facts.python))}, numpy {facts.numpy}, pynq {facts.pynq}")
        with rehearsal.step("deploy", f"{sum(len(file.data) for file in files):,} bytes of its disk", stages) as say:
            deploy.require_board(facts, program, "board", board.name)
            say(f"{remote.install(facts, *files):,} bytes sent")
        with rehearsal.step("flash", "a bitstream: celosia bitstream project, and build with Vivado", stages) as say:
            bit = write_bitstream(folder, board, config)
            clock = deploy.flash(remote, bit, check_bitstream(bit, board.name, board.part))
            say(f"{config.name} ({config.identity:08x}) at {clock:g} MHz")
        memory = f"{program.dram_size:,} of some {CMA_BYTES:,} bytes of contiguous memory"
        with rehearsal.step("run", memory, stages) as say:
            rehearsal.result = deploy.run(remote, program, inputs, base=board.address)
            say(_describe_cycles(rehearsal.result))
        with rehearsal.step("compare", "the same inputs, and --output", stages) as say:
            sent_program = folder / files[1].name
            sent_program.write_bytes(files[1].data)
            rehearsal.different = _different_outputs(Program.load(sent_program, trust=True), inputs, rehearsal.result)
            say(
                f"{len(program.outputs)} outputs as here"
                if not rehearsal.different
                else "outputs differ from those here"
            )
    return rehearsal


def _describe_cycles(result: Result) -> str:
    """Return a few words on the cycles of a run."""
    cycles = result.report["cycles"]
    return f"{cycles:,} cycles" if cycles else "the functional simulator counts no cycles"


def _different_outputs(program: Program, inputs: Mapping[str, Any], result: Result) -> list[str]:
    """Return the names of outputs that differ from those of a run on this machine's simulator."""
    with Runtime(program) as runtime:
        expected = runtime.run(inputs).outputs
    return [name for name, value in expected.items() if not _is_equal(value, result.outputs[name])]


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two outputs have equal types, shapes and bytes; sequences are compared entry by entry."""
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if one is None or other is None:
        return one is other
    one, other = np.asarray(one), np.asarray(other)
    return bool(one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes())
