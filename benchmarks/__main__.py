"""python -m benchmarks [SECTION ...] [--models NAME,...], a section being one of SECTIONS.

Prints a table, updates bench/results.json, and records what the docs quote (figures.py). Without a name: everything but
`language`, `timed`, `gain`, `transformers`, `packed`, `names`, `explore`, `tune`, `hardware`, `simspeed`,
`compile_time`, `differential`, `quantisers`, `superoptimise`, `four_bits`, `bits`, `export`, `streams`, `beside`,
`timing`, `mutants` and `paper` (long), and `demo`, which sets up a fresh clone; `figures` measures nothing.
Exit code 1 where a promise was measured and not kept, 2 where a page quotes what is no figure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import (
    bits,
    compile_time,
    cpu,
    decoders,
    encoders,
    explore,
    export,
    figures,
    four_bits,
    gain,
    hardware,
    language,
    names,
    quantisers,
    simspeed,
    streams,
    trained,
    tune,
    tune_cpu,
)
from benchmarks.arm import PROCESSORS
from benchmarks.branches import BRANCHES, LINEAR
from benchmarks.figures import FIGURES
from benchmarks.kernels import KERNELS
from benchmarks.partly import PARTLY
from benchmarks.published import PUBLISHED, WHOLE
from benchmarks.rows import PRESETS, ROOT, VERDICT, Bench, Row, describe
from benchmarks.workloads import FOLDER_VARIABLE, MADE, WORKLOADS, models_folder
from celosia.hw.boards.boards import MEMORY_MODELS
from celosia.hw.boards.memory import ZYNQ_HP

SECTIONS = (
    "exactness", "models", "cycles", "onchip", "walltime", "eval", "compile", "build", "cpu", "language", "timed",
    "gain", "transformers", "packed", "names", "explore", "tune", "tune_cpu", "hardware", "simspeed", "compile_time",
    "differential", "quantisers", "superoptimise", "four_bits", "bits", "export", "streams", "beside", "timing",
    "mutants", "paper", "demo",
    "figures",
)  # fmt: skip
DEFAULT_SECTIONS = SECTIONS[: SECTIONS.index("cpu") + 1]
KNOWN_MODELS = tuple(
    dict.fromkeys(
        (
            *WORKLOADS,
            *BRANCHES,
            *LINEAR,
            *PUBLISHED,
            *PARTLY,
            *WHOLE,
            *cpu.MODELS,
            *cpu.NETWORKS,
            *encoders.ENCODERS,
            *encoders.ATTENTIONS,
            *decoders.DECODERS,
            *trained.TRAINED,
            "fc_1000x512",
            "fc_1000x512_2",
            "fc_1000x512_1",
            "llama_10m_nbits",
            *four_bits.WHAT,
            bits.HERE,
            *PROCESSORS,
            *export.MODELS,
            *quantisers.PACKAGES,
            *quantisers.NETWORKS,
            "half",
        )
    )
)


def cpu_rows(options: argparse.Namespace, folder: Path | None, say: Callable[[str], None]) -> Iterator[Row]:
    """Kernels where not only models are asked for, and models where not only kernels are."""
    kernels, models = _split(options.kernels), _split(options.models)
    if kernels or not models:
        yield from cpu.kernel_rows(kernels, options.seconds, say)
    if models or not kernels:
        yield from cpu.model_rows(folder, models, options.seconds, say)
        yield from cpu.network_rows(MADE, models, options.seconds, say)


def paper_rows(folder: Path | None, short: bool, charts: tuple[str, ...], say: Callable[[str], None]) -> Iterable[Row]:
    """Those of all charts of the papers' page, or of some, or of its short form."""
    from benchmarks import paper  # with Bokeh

    for name in charts:
        if name not in paper.CHARTS:
            raise SystemExit(f"python -m benchmarks: there is no chart {name!r}; take {', '.join(paper.CHARTS)}")
    return paper.rows(folder, short, say, names=charts or tuple(paper.CHARTS))


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options in `arguments`; ends the process with a sentence where a name is none."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--models", default="", help=f"only these, with commas between: {', '.join(KNOWN_MODELS)}")
    parser.add_argument("--kernels", default="", help=f"of cpu and tune_cpu, only these: {', '.join(KERNELS)}")
    parser.add_argument("--models-dir", type=Path, help=f"folder with the models (default: ${FOLDER_VARIABLE})")
    parser.add_argument("--config", help="preset or file (default: pynq; of timed: each of four, of tune: all)")
    parser.add_argument(
        "--device", choices=("rtl", "timed", "functional"),
        help="of exactness and models (default: rtl), of onchip (default: timed), of superoptimise and transformers",
    )  # fmt: skip
    parser.add_argument("--memory", default=ZYNQ_HP.name, choices=tuple(MEMORY_MODELS), help="of the RTL and timed")
    parser.add_argument(
        "--seconds",
        type=float,
        default=cpu.SECONDS,
        help="for each kernel or model of cpu (default: 1), each search of superoptimise (default: 60)",
    )
    parser.add_argument("--images", type=int, help="inputs for each model of `models`")
    parser.add_argument(
        "--count",
        type=int,
        help=f"models of names (default: {names.MODELS}) and differential (default: {hardware.RANDOM_MODELS}), "
        f"Configs of timing (default: {hardware.TIMING_CONFIGS}), mutants of mutants (default: {hardware.MUTANTS})",
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="of differential, timing and mutants: another one draws other cases"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="of differential: processes")
    parser.add_argument("--out", type=Path, default=Path("findings"), help="of differential: where findings go")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="of differential, mutants: keep verdicts here, and go on"
    )
    parser.add_argument(
        "--base",
        metavar="COMMIT",
        help="of simspeed and compile_time: what to compare with (default: plain Verilog, nothing)",
    )
    parser.add_argument("--full", action="store_true", help="of tune, tune_cpu, explore: all of it, hours")
    parser.add_argument("--short", action="store_true", help="of paper: smaller networks, minutes")
    parser.add_argument("--charts", default="", help="of paper, only these, with commas between: names of its pictures")
    parser.add_argument(
        "--only",
        choices=tuple(dict.fromkeys((*tune.PARTS, *explore.PARTS, *hardware.ROWS, "ablation", "floats", "pool"))),
        help="of tune, explore, hardware or superoptimise: this part alone",
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "bench" / "results.json", help="default: bench/results.json"
    )
    parser.add_argument(
        "--measured", action="append", default=[], metavar="NAME[=VALUE]", help="of figures: what no benchmark measures"
    )
    parser.add_argument("--dry", action="store_true", help="leave docs/ as it is: record no figures")
    parser.add_argument("--quiet", action="store_true", help="no progress line")
    options = parser.parse_args(arguments)
    for name, known in (
        *((section, SECTIONS) for section in options.sections),
        *((model, KNOWN_MODELS) for model in _split(options.models)),
        *((kernel, KERNELS) for kernel in _split(options.kernels)),
    ):
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
    """For a terminal: a row of `rows` each."""
    result = Table("what", "target", "measured", "", "command")
    for row in rows:
        result.add_row(row.what, row.target, row.measured, VERDICT[row.met], row.command, end_section=True)
    return result


def main(arguments: list[str]) -> int:
    """Measures what `arguments` ask for. Returns the exit code."""
    options = parse(arguments)
    figures.look(FIGURES)
    rows = measure(options)
    try:
        recorded = [] if options.dry else figures.record(rows, FIGURES, options.measured)
    except ValueError as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 2
    out = Console(width=None if sys.stdout.isatty() else 200)
    for each in cpu.tables(rows):
        out.print(each)
    if others := [row for row in rows if not row.key.startswith(("cpu/kernel/", "cpu/model/"))]:
        out.print(table(others))
    if rows:
        out.print(f"{options.output}", highlight=False)
    if recorded:
        out.print(f"{figures.ROOT / 'docs' / 'figures.json'}: {', '.join(recorded)}", highlight=False)
    return 1 if any(row.met is False for row in rows) else 0


def measure(options: argparse.Namespace) -> list[Row]:
    """The rows of the sections in `options`, each saved and told as soon as it is there."""
    console = Console(stderr=True, quiet=options.quiet)
    config = options.config or "pynq"
    rows: list[Row] = []
    with console.status("") as status:
        sections = section_rows(options, lambda text: status.update(text))
        for section in options.sections or DEFAULT_SECTIONS:
            for row in sections[section]():
                rows.append(row)
                save(options.output, [row], describe(row.details.get("config", config)))
                console.print(f"{VERDICT[row.met] or 'skipped':7} {row.what}: {row.measured}", highlight=False)
    return rows


def superoptimised(
    options: argparse.Namespace, folder: Path | None, config: str, say: Callable[[str], None]
) -> Iterable[Row]:
    """The rows of `superoptimise`, or of a part of it."""
    from benchmarks import superoptimise  # with onnxruntime's quantiser

    models = _split(options.models)
    budget = superoptimise.RTL_BUDGET if options.device == "rtl" else superoptimise.BUDGET
    seconds = options.seconds if options.seconds != cpu.SECONDS else budget
    if options.only == "floats":
        return superoptimise.floats(folder, models, seconds, say)
    if options.only == "pool":
        return superoptimise.pool(models, config, seconds, say)
    if options.device == "rtl":
        return superoptimise.on_rtl(models, config, seconds, say)
    if options.only == "ablation":
        return superoptimise.ablation(config, seconds, say)
    return superoptimise.rows(folder, models, config, seconds, say)


def fuzz_options(options: argparse.Namespace) -> list[str]:
    """What `python -m fuzz` is told by `differential`."""
    resume = ["--resume", str(options.resume.absolute())] if options.resume else []
    return ["--jobs", str(options.jobs), "--out", str(options.out), *resume]


def section_rows(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Callable[[], Iterable[Row]]]:
    """What measures each of SECTIONS."""
    folder, config = models_folder(options.models_dir), options.config or "pynq"
    kernels, models, full, only = _split(options.kernels), _split(options.models), options.full, options.only
    memory = MEMORY_MODELS[options.memory]
    bench = Bench(folder, config, options.device, models, options.images, say, memory)

    def transformer_rows() -> Iterable[Row]:
        from benchmarks import one_layer, transformers  # with onnxruntime's quantiser

        if options.device == "rtl":
            return one_layer.rows(models, options.config, memory, say)
        return transformers.rows(models, options.config, memory, say)

    def packed_rows() -> Iterable[Row]:
        from benchmarks import packed_weights  # with onnxruntime's quantiser

        return packed_weights.rows(models, options.config, memory, say)

    def beside_rows() -> Iterable[Row]:
        from benchmarks import beside  # with onnxruntime's quantiser

        return beside.rows(folder, models, config, memory, say)

    def simulation() -> Iterable[Row]:
        chosen = models or ("resnet18",)
        return chain.from_iterable(simspeed.rows(folder, name, config, options.base, say) for name in chosen)

    return {
        **{name: getattr(bench, name) for name in SECTIONS if hasattr(bench, name)},
        "cpu": lambda: cpu_rows(options, folder, say),
        "language": lambda: language.rows(options.device, config, options.seconds, say),
        "timed": lambda: bench.timed((options.config,) if options.config else PRESETS),
        "gain": lambda: gain.rows(folder, bench.chosen, options.config, memory, say),
        "transformers": transformer_rows,
        "packed": packed_rows,
        "names": lambda: names.rows(say, options.count or names.MODELS),
        "explore": lambda: explore.rows(folder, full, say, only),
        "tune": lambda: tune.rows(folder, full, say, only, options.config),
        "tune_cpu": lambda: tune_cpu.rows(kernels, models, full, folder, say),
        "hardware": lambda: hardware.rows(say, only),
        "simspeed": simulation,
        "compile_time": lambda: compile_time.rows(folder, models, config, options.base, say),
        "differential": lambda: hardware.differential(
            options.count or hardware.RANDOM_MODELS, options.seed, fuzz_options(options), say
        ),
        "quantisers": lambda: quantisers.rows(
            [name for name in models if name in quantisers.PACKAGES],
            [name for name in models if name in quantisers.NETWORKS],
            config,
            say,
        ),
        "superoptimise": lambda: superoptimised(options, folder, config, say),
        "four_bits": lambda: four_bits.rows(models, say),
        "bits": lambda: bits.rows(models, options.seconds, say),
        "export": lambda: export.rows(folder, models, config, say),
        "streams": lambda: streams.rows(folder, models, config, say),
        "beside": beside_rows,
        "timing": lambda: hardware.timing(say, options.count or hardware.TIMING_CONFIGS, options.seed),
        "mutants": lambda: hardware.mutants(options.count or hardware.MUTANTS, options.seed, options.resume, say),
        "paper": lambda: paper_rows(folder, options.short, _split(options.charts), say),
        "figures": lambda: (),
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
