"""Rows of `make bench-hw`: proofs, fuzzing, what the hardware takes of each device, and how fast it is. And the rows of
`timing`: how close the timing model is to the RTL."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.rows import ROOT, Request, Row, Say
from celosia.bitstreams.designs import Design
from celosia.bitstreams.ecp5 import build
from celosia.bitstreams.synthesis import LABELS, measure_usage
from celosia.hw.boards.boards import BOARDS
from celosia.hw.boards.fpga import FPGAS
from celosia.hw.spec.config import PRESETS, Config

MARGIN = {"pynq": dict.fromkeys(LABELS, 10.0), "wide": dict.fromkeys(LABELS, 5.0) | {"lut": 10.0}}
"""Percent of each resource that a preset leaves free on the device that it is for."""
COMMAND = "python -m benchmarks hardware"
FUZZ_VARIABLE = "CELOSIA_FUZZ"
"""Names the number of cases of each kind."""


def _measured(row: Row, measure: Callable[[Row], Row]) -> Row:
    try:
        return measure(row)
    except Exception as error:
        return dataclasses.replace(row, measured=f"failed: {type(error).__name__}: {error}", met=False)


def resources(say: Say) -> Iterator[Row]:
    """Each board's preset, `wide` beside `pynq`, and `tiny`, on its device. `huge` is for simulation only."""
    devices = {board.device.name: board.config.name for board in BOARDS.values()}
    for name, preset in devices.items():
        for config in (preset, *(["wide"] if preset == "pynq" else []), "tiny"):
            margin = MARGIN.get(config, {})
            least = ", ".join(f"{margin[r]:g}% {label}" for r, label in LABELS.items() if r in margin)
            target = f"at least {least} left" if margin else "fits"
            say(f"synthesis of {config} for {name}")

            def measure(row: Row, config: str = config, name: str = name, margin: dict[str, float] = margin) -> Row:
                used = measure_usage(
                    PRESETS[config], FPGAS[name], lambda step: say(f"synthesis of {config}, {name}: {step}")
                )
                left = used.free_percent(FPGAS[name])
                text = ", ".join(f"{getattr(used, r):,g} {label} ({left[r]:.1f}% left)" for r, label in LABELS.items())
                met = all(percent >= margin.get(r, 0.0) for r, percent in left.items())
                text += f"; {used.seconds:.0f} s"
                return dataclasses.replace(row, measured=text, met=met, details=dataclasses.asdict(used))

            head = Row(f"hardware/{name}/{config}", f"{config} on {name}", target, "", None, COMMAND)
            yield _measured(head, measure)


def ecp5(say: Say) -> Iterator[Row]:
    """The gemm unit with its scratchpads, for which there are targets, and the whole accelerator, placed and routed."""
    for design, size, target in ((Design.gemm, 4, 100.0), (Design.gemm, 8, 90.0), (Design.accelerator, 4, None)):
        cfg = dataclasses.replace(PRESETS["tiny"], block_in=size, block_out=size, name=f"{size}x{size}")

        def measure(row: Row, cfg: Config = cfg, design: Design = design, target: float | None = target) -> Row:
            with tempfile.TemporaryDirectory() as folder:
                result = build(cfg, design, Path(folder), 1.05 * (target or 100), say, seeds=2 if target else 1)
            text = f"{result.fmax_mhz} MHz; {', '.join(f'{n} {cell}' for cell, n in result.used.items())}"
            text += f"; {sum(result.seconds.values()):.0f} s"
            met = result.fmax_mhz >= target if target else None
            return dataclasses.replace(row, measured=text, met=met, details=dataclasses.asdict(result))

        key, what = f"hardware/ecp5/{design.value}/{cfg.name}", f"{design.value} {cfg.name} on ECP5-85F"
        yield _measured(Row(key, what, f"at least {target:g} MHz" if target else "", "", None, COMMAND), measure)


def _report(say: Say, what: str, folders: str, *arguments: str) -> dict[str, Any]:
    """Run `python -m MODULE ... --json FILE` and read the file; its output goes to `say`, line by line."""
    paths = os.pathsep.join(str(ROOT / "tests" / folder) for folder in folders.split(","))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "report.json"
        command = [sys.executable, "-m", *arguments, "--json", str(output)]
        with subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            last = ""
            for line in process.stdout:
                last = line.strip() or last
                say(f"{what}: {last[:60]}")
        if not output.exists():
            raise RuntimeError(f"{' '.join(arguments)} ended with {process.returncode}: {last}")
        report: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return report


def proofs(say: Say) -> Iterator[Row]:
    """make prove: all properties, each with its mutants."""

    def measure(row: Row) -> Row:
        found = _report(say, "proofs", "formal", "proofs", "--jobs", str(os.cpu_count() or 1))
        text = (
            f"{found['proved']} of {found['properties']} proved, {found['caught']} of {found['mutants']} mutants caught"
        )
        met = found["proved"] == found["properties"] and found["caught"] == found["mutants"]
        text += f"; {found['seconds']:.0f} s of processor time"
        return dataclasses.replace(row, measured=text, met=met, details=found)

    command = f"{COMMAND} --only proofs"
    yield _measured(Row("hardware/proofs", "proofs", "all, and all mutants caught", "", None, command), measure)


def fuzz(say: Say) -> Iterator[Row]:
    """make fuzz: as many cases of each kind as FUZZ_VARIABLE says."""
    count = os.environ.get(FUZZ_VARIABLE, "2000")

    def measure(row: Row) -> Row:
        found = _report(say, "fuzz", ".,cosim", "fuzz", "--count", count)
        text = "; ".join(
            f"{kind}: {each['failures']} of {each['cases']} failed in {each['seconds']:.0f} s"
            for kind, each in found.items()
        )
        met = not any(each["failures"] for each in found.values())
        return dataclasses.replace(row, measured=text, met=met, details=found)

    yield _measured(Row("hardware/fuzz", "fuzzing", "0 failures", "", None, f"make fuzz N={count}"), measure)


RANDOM_MODELS = 5000
"""Models of `differential`."""


def differential(asked: Request) -> Iterator[Row]:
    """Random models beside onnxruntime, by the fuzzer."""
    count, seed = asked.count or RANDOM_MODELS, asked.seed
    options = ["--jobs", str(asked.jobs), "--out", str(asked.out.absolute())]
    options += ["--resume", str(asked.resume.absolute())] if asked.resume else []

    def measure(row: Row) -> Row:
        arguments = ("fuzz", "--kind", "model", "--count", str(count), "--seed", str(seed), *options)
        report = _report(asked.say, "models", ".,cosim", *arguments)["model"]
        endings = report["endings"]
        counted = report["cases"] - endings.get("onnxruntime refuses", 0)
        text = "; ".join((f"{counted} models, seed {seed}", *(f"{many} {how}" for how, many in endings.items())))
        text += f"; {report['failures']} wrong; {report['seconds']:.0f} s"
        details = {"counted": counted, "wrong": report["failures"], "endings": endings}
        return dataclasses.replace(row, measured=text, met=not report["failures"], details=details)

    command = f"python -m benchmarks differential --seed {seed} --count {count}"
    what = "random models and operators, quantised in all formats, beside onnxruntime"
    yield _measured(Row("differential", what, "none wrong, refused or crashed", "", None, command), measure)


MUTANTS = 300
"""Random mutants of a campaign."""


def mutants(asked: Request) -> Iterator[Row]:
    """make mutants: the share of random faults in hw/ that unit tests, proofs and random programs find."""
    count, seed = asked.count or MUTANTS, asked.seed
    options = ["--count", str(count), "--seed", str(seed)]
    options += ["--resume", str(asked.resume.absolute())] if asked.resume else []

    def measure(row: Row) -> Row:
        found = _report(asked.say, "mutants", ".,formal,cosim", "mutation", *options)
        kinds = ", ".join(f"{number} by {kind}" for kind, number in found["by"].items())
        text = f"{found['killed']} of {found['mutants']} killed ({found['percent']}%; {kinds})"
        open_ = sum(not survivor["reason"] for survivor in found["survivors"])
        text += f"; {len(found['survivors'])} survivors, {open_} without a reason; {found['seconds']} s"
        return dataclasses.replace(row, measured=text, met=found["percent"] >= 95 and not open_, details=found)

    command = f"make mutants N={count} SEED={seed}"
    yield _measured(Row("hardware/mutants", "random mutants of hw/", "95% killed", "", None, command), measure)


TIMING_CONFIGS, TIMING_PROGRAMS = 40, 25
"""Random Configs of `timing`, each a simulator, and programs on each."""


def timing(asked: Request) -> Iterator[Row]:
    """The share of random programs on random Configs for which the timing model's cycles are close to the RTL's."""
    configs, seed = asked.count or TIMING_CONFIGS, asked.seed

    def measure(row: Row) -> Row:
        options = ("--configs", str(configs), "--programs", str(TIMING_PROGRAMS), "--seed", str(seed))
        found = _report(asked.say, "timing", ".", "timing_accuracy", *options)
        text = f"{found['within']:.2%} of {found['programs']:,} programs on {found['configs']} Configs; "
        text += f"worst {found['worst']}"
        return dataclasses.replace(row, measured=text, met=found["within"] >= 0.99, details=found)

    command = f"python -m benchmarks timing --count {configs} --seed {seed}"
    head = Row("timing/random", "timing model on random Configs", "99% of programs within 3%", "", None, command)
    yield _measured(head, measure)


ROWS: dict[str, Callable[[Say], Iterator[Row]]] = {
    "proofs": proofs, "fuzz": fuzz, "resources": resources, "ecp5": ecp5,
}  # fmt: skip


def rows(asked: Request) -> Iterator[Row]:
    """All of ROWS, or one of them, as they are measured."""
    for name in ROWS if asked.only is None else (asked.only,):
        yield from ROWS[name](asked.say)
