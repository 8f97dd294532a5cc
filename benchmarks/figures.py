"""Figures that README and docs quote: docs/figures.json, docs/figures.md that lists them, and what the other pages say.

    python -m benchmarks figures                          # counts what can be counted, writes every quoted figure anew
    python -m benchmarks figures --measure                # make figures: measures those that are not current
    python -m benchmarks figures --current                # lists those that are not current; then exit code 1
    python -m benchmarks figures --measured NAME[=VALUE]  # a table was copied to its page, or a number is given by hand

A page quotes a figure by a link, `[7.21 M cycles](docs/figures.md#resnet18-cycles)`: the first number of its words is
the figure, with as many digits as stand there. Where it misses its target, the words end with `: missed`.
A figure is current while no folder that it depends on has changed since it was measured; docs/figures.md lists the
changes. Benchmarks record what they have measured; figures.toml declares the figures and their rows. A table that a
benchmark prints is a figure without a value, which one link in the sentence above the table quotes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celosia.hw.sources import normal_form

if TYPE_CHECKING:
    from benchmarks.rows import Row

ROOT = Path(__file__).parents[1]
COUNTED = "python -m benchmarks figures"
QUOTE = re.compile(r"\[(?P<words>[^\[\]]+)\](?P<link>\((?:docs/|\.\./docs/)?figures\.md#(?P<name>[\w-]+)\))")
NUMBER = re.compile(r"(?P<digits>\d[\d,]*(?:\.\d+)?)(?P<scale> million| M\b)?")
SCALES = {None: 1, " million": 1e6, " M": 1e6}
UNKNOWN = "unknown"
MISSED = ": missed"
Entry = dict[str, Any]
"""Of a figure in the file: value (None: a table), unit, command; unless it is counted: commit, processor, and `of`, a
digest of each folder."""


@dataclass(frozen=True)
class Figure:
    """A number that pages may quote, as figures.toml declares it.

    of: the folders (or files) that decide it. command: of the rows with the keys `rows`, `*` being any word. value: the
    place of the number in their details, as "cold.seconds"; with "sum" or "max" in front it is of several rows.
    factor: times which it is taken. count: what counts it, one of COUNTERS, instead of these. least, most: what is
    asked of it. Without value and count the figure is a table of a page, quoted by words without a number.
    """

    name: str
    what: str
    unit: str = ""
    of: tuple[str, ...] = ()
    command: str = COUNTED
    rows: tuple[str, ...] = ()
    value: str = ""
    factor: float = 1
    count: str = ""
    least: float | None = None
    most: float | None = None

    def of_rows(self, details: Sequence[Mapping[str, Any]]) -> float | None:
        """The number that the details of the figure's rows have; None where one of them has none."""
        first, _, rest = self.value.partition(" ")
        reduce = REDUCTIONS.get(first)
        numbers = [_at(each, (rest if reduce else self.value).split(".")) for each in details]
        if None in numbers:
            return None
        number: float = reduce(numbers) if reduce else numbers[0]
        return number if self.factor == 1 else self.factor * number


REDUCTIONS: dict[str, Any] = {"sum": sum, "max": max}
Catalogue = Mapping[str, Sequence[Figure]]
"""Figures by the heading under which docs/figures.md has them."""


def _at(details: Mapping[str, Any], path: Sequence[str]) -> Any:
    return details.get(path[0]) if len(path) == 1 else _at(details[path[0]], path[1:])


def declared(text: str) -> Catalogue:
    """The figures of figures.toml."""
    table = tomllib.loads(text)
    return {
        heading: [_declared(name, entry, table["folders"]) for name, entry in entries.items()]
        for heading, entries in table["figures"].items()
    }


def _declared(name: str, entry: dict[str, Any], folders: Mapping[str, list[str]]) -> Figure:
    of = entry.pop("of", [])
    return Figure(
        name, of=tuple(folders[of] if isinstance(of, str) else of), rows=tuple(entry.pop("rows", ())), **entry
    )


_TEXT = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
FIGURES = declared(_TEXT)
MINUTES: Mapping[str, int] = tomllib.loads(_TEXT)["minutes"]
"""About how long commands take."""


def read(root: Path = ROOT) -> dict[str, Entry]:
    """The figures by name."""
    found: dict[str, Entry] = json.loads((root / "docs" / "figures.json").read_text(encoding="utf-8"))
    return found


# Counts of code -----------------------------------------------------------------------------------------------------


@cache
def _node_tests() -> int:
    code = "import onnx.backend.test.loader as loader; print(len(loader.load_model_tests(kind='node')))"
    command = [sys.executable, "-W", "ignore", "-c", code]  # a new process, since tests leave some of them out
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _node_tests_passed() -> int:
    lines = (ROOT / "tests" / "compiler" / "onnx_nodes_failing.txt").read_text(encoding="utf-8").splitlines()
    return _node_tests() - sum(bool(line) and not line.startswith("#") for line in lines)


def _kernels() -> int:
    from benchmarks.kernels import KERNELS as kernels

    return len(kernels)


def _multipliers() -> int:
    from celosia.bitstreams.area import shipped_model
    from celosia.hw.spec.config import PRESETS as presets

    return shipped_model().estimate(presets["pynq"]).dsp


def _export_lines() -> int:
    from celosia.driver.export.c_project import RUNTIME

    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in RUNTIME.iterdir())


COUNTERS: dict[str, Callable[[], int]] = {
    "node_tests": _node_tests, "node_tests_passed": _node_tests_passed, "kernels": _kernels, "pynq_dsp": _multipliers,
    "export_lines": _export_lines,
}  # fmt: skip

# What was measured ---------------------------------------------------------------------------------------------------


@cache
def digest(path: Path) -> str:
    """Hash a file, or all files in a folder with their names, as they were when this process first asked: 12 digits.

    Docstrings, comments and layout of Python do not count, since no figure depends on them.
    """
    found = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and "__pycache__" not in file.parts:
            data = file.read_bytes()
            if file.suffix == ".py":
                data = normal_form(data, keep_names=True).encode()
            found.update(f"\n{file.relative_to(path.parent).as_posix()}\n".encode() + data)
    return found.hexdigest()[:12]


def look(catalogue: Catalogue, root: Path = ROOT) -> None:
    """Take the digests of all folders, which hold for this process, whatever is edited while it measures."""
    for figure in chain(*catalogue.values()):
        for name in figure.of:
            digest(root / name)


def commit(folders: Sequence[str], root: Path = ROOT) -> str:
    """The last commit that changed `folders`, with a + where they are not as it has them; UNKNOWN without git."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        last = git("log", "-1", "--format=%h", "--abbrev=7", "--", *folders)
        return last + ("+" if git("status", "--porcelain", "--", *folders) else "")
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN


def processor() -> str:
    """The name of this machine's processor, and how many of its cores there are."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown'}, {os.cpu_count()} cores"


def changed(figure: Figure, entry: Entry, root: Path = ROOT) -> list[str]:
    """The folders that are not as they were when the figure was measured."""
    return [name for name in figure.of if digest(root / name) != entry["of"].get(name)]


def entry_of(figure: Figure, value: float | None, command: str, root: Path = ROOT) -> Entry:
    """Make the entry of a figure that was measured now."""
    rounded = float(f"{value:.6g}") if isinstance(value, float) else value
    measured = {"commit": commit(figure.of, root), "processor": processor()}
    return {
        "value": rounded, "unit": figure.unit, "command": command, **measured,
        "of": {name: digest(root / name) for name in figure.of},
    }  # fmt: skip


def measured(figure: Figure, rows: Sequence[Row]) -> tuple[float, str] | None:
    """(value, command) where `rows` have all that the figure is of, measured as it is to be; else None."""
    command = re.compile(re.escape(figure.command).replace(r"\*", r"\S+"))
    own = {row.key: row for row in rows if row.key in figure.rows and command.fullmatch(row.command) and row.details}
    if not figure.value or not figure.rows or len(own) < len(figure.rows):
        return None
    value = figure.of_rows([own[key].details for key in figure.rows])
    if value is None:
        return None
    return value, shown(figure) if len(figure.rows) > 1 else own[figure.rows[0]].command


def shown(figure: Figure) -> str:
    """The command of a figure, for all rows at once."""
    return re.sub(r" (--\w+ )?\*", "", figure.command)


def record(rows: Sequence[Row], catalogue: Catalogue, given: Sequence[str] = (), root: Path = ROOT) -> list[str]:
    """Write what `rows` say of figures into the file, what is counted too, and the pages anew.

    given: NAME=VALUE, or NAME of a table. Returns the names of what was measured. ValueError names what is not there.
    """
    known, names = read(root), []
    entries: dict[str, Entry] = {}
    values = dict(_given(text, catalogue) for text in given)
    for figure in chain(*catalogue.values()):
        found = (values[figure.name], shown(figure)) if figure.name in values else measured(figure, rows)
        if found is not None:
            names.append(figure.name)
            entries[figure.name] = entry_of(figure, *found, root)
        elif figure.count:
            entries[figure.name] = {"value": COUNTERS[figure.count](), "unit": figure.unit, "command": COUNTED}
        elif figure.name in known:
            entries[figure.name] = known[figure.name]
    lines = ",\n".join(f' "{name}": {json.dumps(entry, ensure_ascii=False)}' for name, entry in entries.items())
    (root / "docs" / "figures.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    for path in (root / "docs" / "figures.md", *pages(root)):
        path.write_text(as_it_should_be(path, catalogue, root), encoding="utf-8")
    return names


def _given(text: str, catalogue: Catalogue) -> tuple[str, float | None]:
    name, _, number = text.partition("=")
    figure = next((figure for figure in chain(*catalogue.values()) if figure.name == name), None)
    if figure is None or figure.count:
        raise ValueError(f"no figure {name!r} is measured; docs/figures.md lists those that are")
    if bool(number) != bool(figure.value):
        raise ValueError(f"{name} is {'a table: leave out' if number else 'a number: add'} =VALUE")
    return name, (float(number) if "." in number else int(number)) if number else None


# Measure again -------------------------------------------------------------------------------------------------------


def outdated(catalogue: Catalogue, root: Path = ROOT) -> dict[Figure, str]:
    """The measured figures that are not current, each with the reason."""
    entries, reasons = read(root), {}
    for figure in filter(lambda figure: figure.value, chain(*catalogue.values())):
        entry = entries.get(figure.name)
        if entry is None:
            reasons[figure] = "never measured"
        elif since := changed(figure, entry, root):
            reasons[figure] = f"measured at {entry['commit']}; since then {', '.join(since)} changed"
    return reasons


def say(text: str) -> None:
    """Print a line at once, among the lines of the commands that run."""
    print(text, file=sys.stderr, flush=True)


def _run(line: str) -> int:
    command = [sys.executable, *line.split()[1:]]  # each is `python -m benchmarks ...`
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode


def measure(catalogue: Catalogue, run: Callable[[str], int] = _run, root: Path = ROOT) -> int:
    """Run the commands of the figures that are not current, the cheapest first. Returns the exit code.

    Each command records its own figures when it ends, so the next call continues where this one was stopped.
    """
    due = sorted({shown(figure): None for figure in outdated(catalogue, root)}, key=lambda line: MINUTES.get(line, 1))
    say(f"{len(due)} commands, about {sum(MINUTES.get(line, 1) for line in due)} minutes")
    endings = dict.fromkeys(due, "not run")
    for number, line in enumerate(due, 1):
        say(f"{number} of {len(due)}: {line}")
        begun, started = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        try:
            code = run(line)
        except KeyboardInterrupt:
            break
        digest.cache_clear()
        endings[line] = "; ".join((f"exit code {code}", *_gaps(catalogue, line, started, root)))
        say(f"{time.monotonic() - begun:.0f} s, {endings[line]}")
    left = outdated(catalogue, root)
    for line in dict.fromkeys(map(shown, left)):
        names = ", ".join(figure.name for figure in left if shown(figure) == line)
        say(f"not measured: {names}\n  {line}: {endings.get(line, 'a folder changed meanwhile')}")
    return 1 if left else 0


def _gaps(catalogue: Catalogue, line: str, started: str, root: Path) -> set[str]:
    """Why rows of a command that has begun at `started` have no number, as its benchmark says."""
    path = root / "bench" / "results.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    keys = {key for figure in chain(*catalogue.values()) if shown(figure) == line for key in figure.rows}
    texts = {row["measured"] for row in rows if row["key"] in keys and row["time"] >= started}
    return {text for text in texts if text.startswith(("skipped", "failed"))}


# Pages ---------------------------------------------------------------------------------------------------------------


def pages(root: Path = ROOT) -> Iterator[Path]:
    """Those that may quote figures."""
    for path in (root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))):
        if path.exists() and path.name != "figures.md":
            yield path


def as_it_should_be(path: Path, catalogue: Catalogue, root: Path = ROOT) -> str:
    """The text of a page with the figures of the file. ValueError names what it quotes and is not there."""
    entries, known = read(root), {figure.name: figure for figure in chain(*catalogue.values())}
    if path.name == "figures.md":
        return listing(catalogue, entries, root)

    def quote(m: re.Match[str]) -> str:
        name = m["name"]
        if name not in known or name not in entries:
            raise ValueError(f"{path.name}: there is no figure {name!r}; docs/figures.md lists them")
        figure, entry = known[name], entries[name]
        end = "" if kept(figure, entry["value"]) else MISSED
        return f"[{worded(m['words'], entry['value'], end)}]{m['link']}"

    return QUOTE.sub(quote, path.read_text(encoding="utf-8"))


def worded(words: str, value: float | None, end: str = "") -> str:
    """`words` with this value in the place of their first number, and this ending.

    >>> worded("7.3 M cycles", 7_213_945), worded("98.31% of 256: missed", 98.0)
    ('7.2 M cycles', '98.00% of 256')
    """
    words = words.removesuffix(MISSED)
    if value is None:
        return words + end
    m = NUMBER.search(words)
    if m is None:
        raise ValueError(f"{words!r} quotes a figure and has no number")
    decimals = len(m["digits"].partition(".")[2])
    number = f"{value / SCALES[m['scale']]:,.{decimals}f}{m['scale'] or ''}"
    return f"{words[: m.start()]}{number}{words[m.end() :]}{end}"


HEAD = """# Figures

Written by `python -m benchmarks figures` from [figures.json](figures.json); do not edit. Benchmarks record here what
they measure: the value, the command, the processor, and the last commit that changed what was measured (with a + for
uncommitted changes). The other pages quote these figures by name, and a test compares the quotes with this list. The
last column says which folders have changed since a figure was measured. `make figures` measures these figures again,
but not the tables of other pages.

Unless a row says otherwise, cycles are those of the preset `pynq` (16×16, 64-bit bus) on the memory model `zynq-hp`.
`CELOSIA_MODELS` names the folder of models that the benchmarks do not generate themselves."""


def listing(catalogue: Catalogue, entries: dict[str, Entry], root: Path = ROOT) -> str:
    """docs/figures.md: a table for each heading."""
    lines = [HEAD]
    for heading, figures in catalogue.items():
        lines += ["", f"## {heading}", "", "| what | asked | measured | by | at |", "|---|---|---|---|---|"]
        for figure in figures:
            if figure.name in entries:
                entry, anchor = entries[figure.name], f'<a id="{figure.name}"></a>'
                cells = f"{anchor}{figure.what}", _asked(figure), _value(figure, entry), f"`{entry['command']}`"
                lines.append(f"| {' | '.join((*cells, _when(figure, entry, root)))} |")
    return "\n".join(lines) + "\n"


def _asked(figure: Figure) -> str:
    bounds = [f"{sign} {bound:,}" for sign, bound in (("≥", figure.least), ("≤", figure.most)) if bound is not None]
    return ", ".join(bounds)


def kept(figure: Figure, value: float | None) -> bool:
    """Whether it is what is asked of the figure."""
    if value is None:
        return True
    return (figure.least is None or value >= figure.least) and (figure.most is None or value <= figure.most)


def _value(figure: Figure, entry: Entry) -> str:
    value = entry["value"]
    if value is None:
        return "a table"
    text = f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
    unit = figure.unit if figure.unit in ("", "%") else f" {figure.unit}"
    return f"{text}{unit}" + ("" if kept(figure, value) else MISSED)


def _when(figure: Figure, entry: Entry, root: Path) -> str:
    if figure.count:
        return "counted"
    since = changed(figure, entry, root)
    text = f"{entry['commit']}, {entry['processor']}"
    return text + (f"; since then {', '.join(since)} changed" if since else "")
