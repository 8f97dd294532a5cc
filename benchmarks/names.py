"""Models without names, with equal ones, and with those that the compiler might give, against onnxruntime."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.rows import ROOT, Request, Row

WORKER = ROOT / "tests" / "cosim" / "many_models.py"
SEEDS = 8
MODELS = 2000
PROCESSES = 2
NETWORKS = {
    "detector": "a face detector's shape, 77 operators without names, with equal and with hostile ones",
    "twins": "two equal convolutions behind each other, without names, with equal and with hostile ones",
}


def rows(asked: Request) -> Iterator[Row]:
    """One row for random models, one for each of NETWORKS."""
    models = asked.count or MODELS
    asked.say(f"{models} random models, compiling and running each for all Configs")
    each = -(-models // SEEDS)
    with ThreadPoolExecutor(PROCESSES) as pool:
        work = [["--seeds", str(seed), "--models", str(each)] for seed in range(1, SEEDS + 1)]
        counts = list(pool.map(_run, work))
    what = "random quantised models without names, with equal and with hostile ones"
    yield _row("random", what, counts, models)
    for name, what in NETWORKS.items():
        asked.say(what)
        yield _row(name, what, [_run(["--network", name])], models)


def _run(arguments: list[str]) -> dict[str, Any]:
    done = subprocess.run([sys.executable, str(WORKER), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{WORKER.name} failed: {done.stderr.strip().splitlines()[-1:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _row(name: str, what: str, counts: list[dict[str, Any]], models: int) -> Row:
    total = {key: sum(count[key] for count in counts) for key in counts[0] if key not in ("steps", "failures")}
    failures = [text for count in counts for text in count["failures"]]
    steps = max(count["steps"] for count in counts)
    measured = f"{total['different']:,} of {total['bytes']:,} bytes differ; {total['models']:,} models, "
    measured += f"{total['programs']:,} programs, {total['launches']:,} launches"
    if total["float_outputs"]:
        measured += (
            f"; {total['float_outputs']:,} outputs that onnxruntime computes in float: at most {steps:.3g} steps"
        )
    measured += f"; {len(failures)} failed" if failures else ""
    command = "python -m benchmarks names" + (f" --count {models}" if models != MODELS else "")
    details = total | {"steps": steps, "failures": failures}
    return Row(f"names/{name}", what, "0 bytes differ", measured, not failures, command, details)
