"""python -m benchmarks [exactness models cycles walltime compile build demo] [--models NAME,...]

Prints a table and updates bench/results.json. Without a name: everything but `demo`, which sets up a fresh clone.
Exit code 1 where a promise was measured and not kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.rows import ROOT, Bench, Row, describe
from benchmarks.workloads import FOLDER_VARIABLE, WORKLOADS, models_folder

SECTIONS = ("exactness", "models", "cycles", "walltime", "compile", "build", "demo")
VERDICT = {True: "[green]met[/]", False: "[red]missed[/]", None: ""}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--models", default="", help=f"only these, with commas between: {', '.join(WORKLOADS)}")
    parser.add_argument("--models-dir", type=Path, help=f"folder with the models (default: ${FOLDER_VARIABLE})")
    parser.add_argument("--config", default="pynq", help="preset or file (default: %(default)s)")
    parser.add_argument("--device", default="rtl", choices=("rtl", "functional"), help="of exactness and models")
    parser.add_argument("--images", type=int, help="inputs for each model of `models`")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "bench" / "results.json", help="default: bench/results.json"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress line")
    options = parser.parse_args(arguments)
    for name, known in (*((s, SECTIONS) for s in options.sections), *((m, WORKLOADS) for m in _split(options.models))):
        if name not in known:
            parser.error(f"there is no {name!r}; take {', '.join(known)}")
    return options


def _split(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


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
    result = Table("what", "target", "measured", "", "command")
    for row in rows:
        result.add_row(row.what, row.target, row.measured, VERDICT[row.met], row.command, end_section=True)
    return result


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    console = Console(stderr=True, quiet=options.quiet)
    rows: list[Row] = []
    with console.status("") as status:
        bench = Bench(
            models_folder(options.models_dir), options.config, options.device, _split(options.models), options.images,
            lambda text: status.update(text),
        )  # fmt: skip
        for section in options.sections or SECTIONS[:-1]:
            for row in getattr(bench, section)():
                rows.append(row)
                save(options.output, [row], describe(options.config))
                console.print(f"{VERDICT[row.met] or 'skipped':7} {row.what}: {row.measured}", highlight=False)
    out = Console(width=None if sys.stdout.isatty() else 200)
    out.print(table(rows))
    out.print(f"{options.output}", highlight=False)
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
