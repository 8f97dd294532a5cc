"""python -m benchmarks [SECTION ...] [--models NAME,...], a section being one of SECTIONS.

Prints a table, updates bench/results.json, and records what the docs quote (figures.py). Without a name:
DEFAULT_SECTIONS, which leaves out those that take long, and `demo`, which sets up a fresh clone; `figures` measures
nothing.
Exit code 1 where a promise was measured and not kept, 2 where a page quotes what is no figure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import figures
from benchmarks.figures import FIGURES
from benchmarks.kernels import KERNELS
from benchmarks.models import Bench
from benchmarks.rows import ROOT, VERDICT, Request, Row, describe
from benchmarks.workloads import FOLDER_VARIABLE, models_folder
from celosia.hw.boards.boards import MEMORY_MODELS
from celosia.hw.boards.memory import ZYNQ_HP

MEASURED_BY = {
    **{name: "models" for name in ("exactness", "models", "cycles", "onchip", "walltime", "eval", "compile", "build")},
    "cpu": "cpu.rows", "language": "language.rows", "timed": "models", "gain": "gain.rows",
    "transformers": "transformers.rows", "family": "family.rows",
    "packed": "packed_weights.rows", "names": "names.rows",
    "explore": "explore.rows", "tune": "tune.rows", "tune_cpu": "tune_cpu.rows", "hardware": "hardware.rows",
    "simspeed": "simspeed.rows", "compile_time": "compile_time.rows", "differential": "hardware.differential",
    "quantisers": "quantisers.rows", "superoptimise": "superoptimise.rows", "four_bits": "four_bits.rows",
    "bits": "bits.rows", "export": "export.rows", "streams": "streams.rows", "beside": "beside.rows",
    "boundary": "boundary.rows", "timing": "hardware.timing", "mutants": "hardware.mutants", "wild": "wild.rows",
    "paper": "paper.rows", "demo": "models", "figures": "",
}  # fmt: skip
"""The module and function of each section; "models" for the methods of models.Bench, which share Programs."""
PARTS = (
    "regret", "judged", "model", "network", "fleet", "front", "best", "vta", "budget", "proofs", "fuzz", "resources",
    "ecp5", "ablation", "floats", "pool", "generate",
)  # fmt: skip
"""Parts of tune, explore, hardware and superoptimise."""
SECTIONS = tuple(MEASURED_BY)
DEFAULT_SECTIONS = SECTIONS[: SECTIONS.index("cpu") + 1]


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options in `arguments`; ends the process with a sentence where a name is none."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--models", default="", type=_split, help="only these, with commas between")
    parser.add_argument("--kernels", default="", type=_split, help=f"of cpu and tune_cpu: {', '.join(KERNELS)}")
    parser.add_argument("--models-dir", type=Path, help=f"folder with the models (default: ${FOLDER_VARIABLE})")
    parser.add_argument("--config", help="preset or file (default: pynq; of timed: each of four, of tune: all)")
    parser.add_argument(
        "--device", choices=("rtl", "timed", "functional"),
        help="of exactness and models (default: rtl), of onchip (default: timed), of superoptimise and transformers",
    )  # fmt: skip
    parser.add_argument("--memory", default=ZYNQ_HP.name, choices=tuple(MEMORY_MODELS), help="of the RTL and timed")
    parser.add_argument(
        "--seconds", type=float,
        help="for each kernel or model of cpu (default: 1), each search of superoptimise (default: 60)",
    )  # fmt: skip
    parser.add_argument("--images", type=int, help="inputs for each model of `models`")
    parser.add_argument(
        "--count", type=int,
        help="models of names (default: 2000) and differential (default: 5000), Configs of timing (default: 40), "
        "mutants of mutants (default: 300)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, help="of differential, timing, mutants: other cases")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="of differential: processes")
    parser.add_argument("--out", type=Path, default=Path("findings"), help="of differential: where findings go")
    parser.add_argument("--resume", type=Path, help="of differential, mutants: keep verdicts in this file, and go on")
    parser.add_argument("--base", metavar="COMMIT", help="of simspeed and compile_time: what to compare with")
    parser.add_argument("--full", action="store_true", help="of tune, tune_cpu, explore: all of it, hours")
    parser.add_argument("--short", action="store_true", help="of paper: smaller networks, minutes")
    parser.add_argument("--charts", default="", type=_split, help="of paper, only these: names of its pictures")
    parser.add_argument("--only", choices=PARTS, help="of tune, explore, hardware or superoptimise: this part alone")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results.json")
    parser.add_argument(
        "--measured", action="append", default=[], metavar="NAME[=VALUE]", help="of figures: what no benchmark measures"
    )
    parser.add_argument("--measure", action="store_true", help="of figures: measure those that are not current")
    parser.add_argument("--current", action="store_true", help="of figures: list those that are not current")
    parser.add_argument("--dry", action="store_true", help="leave docs/ as it is: record no figures")
    parser.add_argument("--quiet", action="store_true", help="no progress line")
    options = parser.parse_args(arguments)
    for names, known in ((options.sections, SECTIONS), (options.kernels, KERNELS)):
        for name in names:
            if name not in known:
                parser.error(f"there is no {name!r}; take {', '.join(known)}")
    if (options.measure or options.current) and options.sections != ["figures"]:
        parser.error("--measure and --current belong to figures")
    return options


def _split(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def request_of(options: argparse.Namespace, say: Callable[[str], None]) -> Request:
    """Make the request of these options."""
    given = {name: value for name, value in vars(options).items() if name in Request.__dataclass_fields__}
    given |= {"memory": MEMORY_MODELS[options.memory], "folder": models_folder(options.models_dir)}
    return Request(say, **given)


def measured_by(section: str, bench: Bench) -> Iterable[Row]:
    """The rows of a section, as they are measured."""
    module, _, function = MEASURED_BY[section].partition(".")
    if not function:
        rows: Iterable[Row] = getattr(bench, section)() if module else ()
        return rows
    rows = getattr(import_module(f"benchmarks.{module}"), function)(bench.asked)
    return rows


def measure(options: argparse.Namespace) -> list[Row]:
    """The rows of the sections in `options`, each saved and told as soon as it is there."""
    console = Console(stderr=True, quiet=options.quiet)
    rows: list[Row] = []
    with console.status("") as status:
        bench = Bench(request_of(options, lambda text: status.update(text)))
        for section in options.sections or DEFAULT_SECTIONS:
            before = len(rows)
            try:
                for row in measured_by(section, bench):
                    rows.append(row)
                    save(options.output, [row], describe(row.details.get("config", bench.config)))
                    console.print(f"{VERDICT[row.met] or 'skipped':7} {row.what}: {row.measured}", highlight=False)
            except KeyError as error:
                if error.args[0] not in options.models:
                    raise
            if options.models and len(rows) == before:
                raise SystemExit(f"python -m benchmarks: {section} measures none of {', '.join(options.models)}")
    return rows


def save(path: Path, rows: list[Row], about: dict[str, Any]) -> None:
    """Write `rows` over those of the same key in `path`; others stay."""
    try:
        known = {row["key"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}
    except (OSError, ValueError, KeyError):
        known = {}
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    known |= {row.key: dataclasses.asdict(row) | about | {"time": now} for row in rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"rows": list(known.values())}, indent=1), encoding="utf-8")
    os.replace(fresh, path)


def table(rows: list[Row]) -> Table:
    """For a terminal: a row of `rows` each."""
    result = Table("what", "target", "measured", "", "command")
    for row in rows:
        result.add_row(row.what, row.target, row.measured, VERDICT[row.met], row.command, end_section=True)
    return result


def main(arguments: list[str]) -> int:
    """Measures what `arguments` ask for. Returns the exit code."""
    options = parse(arguments)
    if options.current:
        left = figures.outdated(FIGURES)
        for figure, reason in left.items():
            print(f"{figure.name}: {reason}", file=sys.stderr)
        return 1 if left else 0
    if options.measure:
        return figures.measure(FIGURES)
    figures.look(FIGURES)
    rows = measure(options)
    try:
        recorded = [] if options.dry else figures.record(rows, FIGURES, options.measured)
    except ValueError as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 2
    out = Console(width=None if sys.stdout.isatty() else 200)
    if rows:
        out.print(table(rows))
        out.print(f"{options.output}", highlight=False)
    if recorded:
        out.print(f"{figures.ROOT / 'docs' / 'figures.json'}: {', '.join(recorded)}", highlight=False)
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
