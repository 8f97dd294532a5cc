"""Rows of `simspeed`: the RTL simulator beside that of another commit, or of the plain Verilog, by turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.rows import ROOT, Request, Row, Say, judged, skipped
from benchmarks.workloads import WORKLOADS, Missing

ROUNDS = 3
TARGET, BUILD_TARGET = 0.5, 1.0
"""Of the base's time for a run, and for the first build."""

# Runs in the tree of either commit: prints the times of building, or those of a run with its cycles and a digest of its
# outputs.
WORKER = """
import hashlib, json, os, sys, time
import celosia
from celosia.hw.spec.config import Config
from celosia.sim.rtl.rtlsim import RtlDevice
what, model, config, plain, feed = sys.argv[1:]
started = os.times()
cfg, options = Config.load(config), {}
if plain == "plain":
    from celosia.hw.verilog import verilog
    options["source"] = verilog(cfg, simulation=True)
device = RtlDevice(cfg, quiet=True, **options)
built = os.times()
found = {"seconds": built.elapsed - started.elapsed, "processor_seconds": sum(built[:4]) - sum(started[:4])}
if what == "run":
    import numpy as np
    try:
        program = celosia.compile(model, config, check=False)
    except TypeError:  # a commit from before there was a check
        program = celosia.compile(model, config)
    runtime = celosia.Runtime(program, device)
    arrays = dict(np.load(feed))
    seconds, processor = time.perf_counter(), time.process_time()
    result = runtime.run(arrays)
    found = {
        "seconds": time.perf_counter() - seconds, "processor_seconds": time.process_time() - processor,
        "cycles": result.report["cycles"],
        "outputs": hashlib.sha256(b"".join(array.tobytes() for array in result.outputs.values())).hexdigest(),
    }
print(json.dumps(found))
"""


@contextmanager
def tree(commit: str | None) -> Iterator[Path]:
    """The files of `commit` in a temporary folder, or those here."""
    if commit is None:
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "base"
        clone = ["clone", "--quiet", "--no-checkout", str(ROOT), str(files)]
        for command in (clone, ["-C", str(files), "checkout", "--quiet", commit]):
            done = subprocess.run(["git", *command], capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"there is no commit {commit}: {done.stderr.strip().splitlines()[-1]}")
        yield files


def _worker(files: Path, cache: Path, *arguments: str) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": str(files / "src"), "CELOSIA_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", WORKER, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows(asked: Request) -> Iterator[Row]:
    """Two rows for each network: beside the base, or without one beside the simulator of plain Verilog."""
    for name in asked.models or ("resnet18",):
        yield from _rows(name, asked.preset, asked.base, asked.folder, asked.say)


def _rows(name: str, config: str, base: str | None, folder: Path | None, say: Say) -> Iterator[Row]:
    command = f"python -m benchmarks simspeed --models {name}" + (f" --base {base}" if base else "")
    key, against = f"simspeed/{name}/{config}", base or "plain Verilog"
    what = f"{name} on the RTL simulator of {config}, time over {against}'s; how many bytes and cycles there are"
    try:
        model = WORKLOADS[name].path(folder)
    except Missing as reason:
        yield skipped(key, what, command, reason)
        return
    arrays: dict[str, Any] = dict(WORKLOADS[name].inputs(model, 1).feeds[0])
    with tree(base) as files, tempfile.TemporaryDirectory() as cache:
        feed = Path(cache) / "feed.npz"
        np.savez(feed, **arrays)
        sides = {
            "base": (files, Path(cache) / "base", str(model), config, "" if base else "plain", str(feed)),
            "here": (ROOT, Path(cache) / "here", str(model), config, "", str(feed)),
        }
        built = {}
        for side, (where, kept, *rest) in sides.items():
            say(f"building the simulator of {config}, {side}")
            built[side] = _worker(where, kept, "build", *rest)["processor_seconds"]
        building = f"first build of the RTL simulator of {config} over {against}'s: processor seconds"
        details = {"ratio": built["here"] / built["base"], **built}
        yield judged(f"simspeed/build/{config}", building, command, details, f"ratio <= {BUILD_TARGET}")
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for number in range(ROUNDS):
            for side, (where, kept, *rest) in sides.items():
                say(f"{name} on {config}, {side}, round {number + 1} of {ROUNDS}")
                runs[side].append(_worker(where, kept, "run", *rest))
    answers = {(run["cycles"], run["outputs"]) for side in runs.values() for run in side}
    times = {side: [run["processor_seconds"] for run in each] for side, each in runs.items()}
    details = {
        "ratio": median(here / before for here, before in zip(times["here"], times["base"], strict=True)),
        "seconds": median(times["here"]), "seconds_of_base": median(times["base"]), "answers": len(answers),
        "cycles": runs["here"][0]["cycles"], **runs,
    }  # fmt: skip
    yield judged(key, what, command, details, f"ratio <= {TARGET}, answers <= 1")
