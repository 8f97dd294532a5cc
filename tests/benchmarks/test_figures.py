"""Numbers in README and docs are figures of docs/figures.json."""

from __future__ import annotations

import dataclasses
import doctest
import json
import re
import subprocess
from itertools import chain
from pathlib import Path

import onnx
import pytest
from benchmarks import figures
from benchmarks.__main__ import main, parse
from benchmarks.figures import COUNTERS, FIGURES, MINUTES, QUOTE, Figure, as_it_should_be, changed, pages, read, worded
from benchmarks.rows import Row

record = figures.record  # the fixture of these tests replaces it later
ALL = {figure.name: figure for figure in chain(*FIGURES.values())}
AGAIN = "write it again: python -m benchmarks figures"

# The pages of this repository ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["docs/figures.md", *(str(path.relative_to(figures.ROOT)) for path in pages())])
def test_pages_say_what_the_figures_say(page: str) -> None:
    path = figures.ROOT / page
    now, then = as_it_should_be(path, FIGURES), path.read_text(encoding="utf-8")
    stale = [f"{old!r}: {new!r}" for old, new in zip(then.splitlines(), now.splitlines()) if old != new]
    assert now == then, f"{AGAIN}\n" + "\n".join(stale)


def test_the_file_has_the_figures_that_there_are() -> None:
    assert len(ALL) == sum(map(len, FIGURES.values()))
    assert set(read()) <= set(ALL)
    moved = {name for figure in ALL.values() for name in figure.of if not (figures.ROOT / name).exists()}
    assert not moved, "figures.toml names folders that are not there"
    for name, entry in read().items():
        keys = {"value", "unit", "command"} | (set() if ALL[name].count else {"commit", "processor", "of"})
        assert set(entry) == keys and entry["unit"] == ALL[name].unit
        assert set(entry.get("of", ())) == set(ALL[name].of)


@pytest.mark.skipif(onnx.__version__ != "1.23.2", reason="the operator tests that are counted are those of onnx 1.23.2")
@pytest.mark.parametrize("name", [name for name, figure in ALL.items() if figure.count])
def test_what_is_counted_is_so_many(name: str) -> None:
    assert read()[name]["value"] == COUNTERS[ALL[name].count](), AGAIN


def test_the_page_of_proofs_is_what_was_measured() -> None:
    text = (figures.ROOT / "docs" / "proved.md").read_text(encoding="utf-8")
    proved, caught = (read()[f"formal-{figure}"]["value"] for figure in ("proved", "caught"))
    assert text.count("\n| ") - 1 == proved, "record it again: python -m benchmarks hardware"
    assert f"{proved} of {proved} properties proved, {caught} of {caught} mutants caught" in text


def unquoted(readme: str, results: str) -> list[str]:
    """Return measured numbers without a link to a figure, of README's first screen and of the table of results."""
    screen = re.sub(r"```.*?```|`[^`]*`", "", QUOTE.sub("", readme[: readme.index("## Try it")]), flags=re.DOTALL)
    numbers = re.findall(r"\d[\d.,]*(?: million| M| seconds| s\b|%| ×|× )[^\n]{0,20}", screen)
    table = re.findall(r"^\|.*\|$", results.partition("## More")[0], re.MULTILINE)
    measured = [row.split("|")[3] for row in table[2:]]
    assert len(measured) > 8
    return numbers + [cell for cell in measured if re.search(r"\d", QUOTE.sub("", cell))]


def test_what_readme_promises_is_a_figure() -> None:
    readme, results = ((figures.ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/results.md"))
    assert unquoted(readme, results) == ["7.7 million without the first l"]  # VTA's, as its authors have it
    quote = next(m[0] for m in QUOTE.finditer(results))
    assert len(unquoted(readme, results.replace(quote, "12"))) == 2
    assert len(unquoted(readme.replace("## Try it", "41% of it\n\n## Try it"), results)) == 2


def test_every_figure_is_quoted() -> None:
    quoted = {m["name"] for path in pages() for m in QUOTE.finditer(path.read_text(encoding="utf-8"))}
    assert not {*ALL} - quoted, "figures that no page quotes"


def test_commands_of_figures_can_be_run_again() -> None:
    commands = {figures.shown(figure) for figure in ALL.values() if figure.value}
    assert set(MINUTES) <= commands, "minutes of a command that measures no figure"
    for command in commands:
        words = command.split()
        assert words[:3] == ["python", "-m", "benchmarks"] and len(parse(words[3:]).sections) == 1


def test_release_needs_current_figures() -> None:
    makefile = (figures.ROOT / "Makefile").read_text(encoding="utf-8")
    assert "python -m benchmarks figures --current" in makefile.partition("\nrelease:")[2].partition("\n\n")[0]


def test_places_of_numbers_in_details() -> None:
    rows = [{"a": {"n": 2.0}, "b, c": 1.0}, {"a": {"n": 3.0}}]
    for value, number in (("a.n", 2), ("sum a.n", 5), ("max a.n", 3), ("sum b, c", None)):
        assert Figure("one", "one", value=value).of_rows(rows) == number
    assert Figure("one", "one", value="b, c").of_rows(rows[:1]) == 1
    assert Figure("one", "one", value="a.n", factor=100).of_rows(rows) == 200


# Planted -------------------------------------------------------------------------------------------------------------

SPEED = Figure("speed", "how fast", "cycles", ("hw", "sim"), "bench * --on", ("a", "b"), "sum n")
ONE = Figure("one", "one", "s", ("sim",), "bench one", ("one",), "n", most=3)
TABLE = Figure("table", "a table", "", ("hw",), "make table")
CATALOGUE = {"Things": (SPEED, ONE, TABLE, Figure("files", "files", count="files"))}
README = """It takes [1.00 M cycles](docs/figures.md#speed) and
[2 s](docs/figures.md#one), for [1 files](docs/figures.md#files), [as measured](docs/figures.md#table).
"""


def rows(n: int = 1_234_567, on: str = "--on") -> list[Row]:
    speed_rows = [Row(key, "", "", "", True, f"bench {key} {on}", {"n": n if key == "a" else 0}) for key in "ab"]
    return [*speed_rows, Row("one", "", "", "", True, "bench one", {"n": 2.5})]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(COUNTERS, "files", lambda: 7)
    for name, text in (("docs/figures.json", "{}"), ("hw/a.py", "a"), ("sim/b.py", "b"), ("README.md", README)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "docs" / "page.md").write_text("[1,000 cycles](figures.md#speed)\n")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -q -m a"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    assert record(rows(), CATALOGUE, ["table"], tmp_path) == ["speed", "one", "table"]
    return tmp_path


def later(root: Path, file: str = "hw/a.py") -> None:
    """Change a file that figures depend on."""
    figures.digest.cache_clear()
    (root / file).write_text("changed")


def test_docstrings_and_comments_make_no_figure_old(tmp_path: Path) -> None:
    file = tmp_path / "a.py"

    def digest(source: str) -> str:
        file.write_text(source)
        figures.digest.cache_clear()
        return figures.digest(tmp_path)

    before = digest("def f(x):\n    return x + 1\n")
    assert digest('def f(x: int) -> int:\n    """Add one."""\n    return x + 1  # one\n') == before
    assert digest("def f(x):\n    return x + 2\n") != before


def test_a_benchmark_writes_the_file_and_the_pages(root: Path) -> None:
    entry = read(root)["speed"]
    assert entry["value"] == 1_234_567 and entry["unit"] == "cycles" and entry["command"] == "bench --on"
    assert (
        re.fullmatch("[0-9a-f]{7,}", entry["commit"])
        and "cores" in entry["processor"]
        and set(entry["of"]) == {"hw", "sim"}
    )
    text = (root / "README.md").read_text()
    assert "[1.23 M cycles](docs/figures.md#speed)" in text and "[2 s](docs/figures.md#one)" in text  # 2.5, to even
    assert "[7 files]" in text and "[as measured]" in text
    assert (root / "docs" / "page.md").read_text() == "[1,234,567 cycles](figures.md#speed)\n"
    assert '<a id="one"></a>one | ≤ 3 | 2.5 s | `bench one` |' in (root / "docs" / "figures.md").read_text()


def test_a_planted_stale_figure_is_found(root: Path) -> None:
    path = root / "README.md"
    right = path.read_text()
    assert as_it_should_be(path, CATALOGUE, root) == right
    path.write_text(right.replace("1.23 M", "1.22 M"))
    assert as_it_should_be(path, CATALOGUE, root) == right != path.read_text()
    record([], CATALOGUE, (), root)
    assert path.read_text() == right


def test_the_list_says_what_has_changed_since_a_figure_was_measured(root: Path) -> None:
    later(root)
    at = read(root)["speed"]["commit"]
    for page, is_current in (("README.md", True), ("docs/page.md", True), ("docs/figures.md", False)):
        assert (as_it_should_be(root / page, CATALOGUE, root) == (root / page).read_text()) == is_current
    assert changed(SPEED, read(root)["speed"], root) == ["hw"] and not changed(ONE, read(root)["one"], root)
    assert record([], CATALOGUE, (), root) == []
    text = (root / "README.md").read_text()
    assert "[1.23 M cycles](docs/figures.md#speed)" in text and "[as measured]" in text
    assert "[2 s](docs/figures.md#one)" in text
    assert f"{at}, {figures.processor()}; since then hw changed" in (root / "docs" / "figures.md").read_text()
    record([], CATALOGUE, (), root)
    assert (root / "README.md").read_text() == text
    record(rows(2_000_000), CATALOGUE, (), root)  # measured again, but not yet committed
    assert "[2.00 M cycles](docs/figures.md#speed)" in (root / "README.md").read_text()
    assert read(root)["speed"]["commit"] == f"{at}+"


def test_a_file_that_is_new_or_moved_is_a_change(root: Path) -> None:
    entry, new = read(root)["one"], root / "sim" / "new.py"
    for change, changed_folders in (
        (lambda: new.write_text(""), ["sim"]),
        (new.unlink, []),
        (lambda: (root / "sim" / "b.py").rename(new), ["sim"]),
    ):
        figures.digest.cache_clear()
        change()
        assert changed(ONE, entry, root) == changed_folders


def test_only_what_was_measured_as_it_is_to_be_is_recorded(root: Path) -> None:
    other = dataclasses.replace(rows()[2], command="bench one --config tiny")
    failed = dataclasses.replace(rows()[2], details={})
    assert record([*rows(on="--off")[:2], other], CATALOGUE, (), root) == []
    assert record([rows()[0], failed], CATALOGUE, (), root) == []
    assert record([rows()[2]], CATALOGUE, (), root) == ["one"]


def test_a_figure_that_is_not_there_is_an_error(root: Path) -> None:
    (root / "docs" / "page.md").write_text("[3](figures.md#sped)")
    with pytest.raises(ValueError, match=r"page\.md: there is no figure 'sped'"):
        as_it_should_be(root / "docs" / "page.md", CATALOGUE, root)
    (root / "docs" / "page.md").write_text("[fast](figures.md#speed)")
    with pytest.raises(ValueError, match="'fast' quotes a figure and has no number"):
        as_it_should_be(root / "docs" / "page.md", CATALOGUE, root)


@pytest.mark.parametrize(
    "given, words",
    [
        ("sped=1", "no figure 'sped'"),
        ("files=8", "no figure 'files' is measured"),
        ("one", "one is a number"),
        ("table=1", "a table"),
    ],
)
def test_what_is_given_by_hand_must_be_a_figure(root: Path, given: str, words: str) -> None:
    before = (root / "docs" / "figures.json").read_text()
    with pytest.raises(ValueError, match=words):
        record([], CATALOGUE, [given], root)
    assert (root / "docs" / "figures.json").read_text() == before
    assert record([], CATALOGUE, ["one=3.25"], root) == ["one"] and read(root)["one"]["value"] == 3.25


def test_what_misses_says_so(root: Path) -> None:
    record([], CATALOGUE, ["one=3.25"], root)
    assert "3.25 s: missed" in (root / "docs" / "figures.md").read_text()
    assert "[3 s: missed](docs/figures.md#one)" in (root / "README.md").read_text()
    later(root, "sim/b.py")
    record([], CATALOGUE, (), root)
    assert "[3 s: missed](docs/figures.md#one)" in (root / "README.md").read_text()
    record(rows(), CATALOGUE, (), root)
    assert "[2 s](docs/figures.md#one)" in (root / "README.md").read_text()


def test_only_figures_that_are_not_current_are_measured_again(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[str] = []

    def run(line: str) -> int:
        ran.append(line)
        if line == "bench one":
            record(rows(), CATALOGUE, (), root)
            return 0
        (root / "bench").mkdir(exist_ok=True)
        row = {"key": "a", "measured": "skipped: no folder with models", "time": "9999"}
        (root / "bench" / "results.json").write_text(json.dumps({"rows": [row]}))
        return 1

    assert figures.measure(CATALOGUE, run, root) == 0 and not ran
    later(root, "sim/b.py")
    assert {figure.name for figure in figures.outdated(CATALOGUE, root)} == {"speed", "one"}
    record([rows()[2]], CATALOGUE, (), root)  # the table is never due
    assert figures.measure(CATALOGUE, run, root) == 1 and ran == ["bench --on"]
    messages = capsys.readouterr().err
    assert "1 of 1: bench --on" in messages
    assert "not measured: speed\n  bench --on: exit code 1; skipped: no folder with models" in messages


def test_an_interrupt_loses_only_the_command_that_runs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    later(root, "sim/b.py")
    figures.digest.cache_clear()

    def run(line: str) -> int:
        if line == "bench one":
            raise KeyboardInterrupt
        record(rows()[:2], CATALOGUE, (), root)
        return 0

    assert figures.measure(CATALOGUE, run, root) == 1
    assert [figure.name for figure in figures.outdated(CATALOGUE, root)] == ["one"]
    assert "not measured: one\n  bench one: not run" in capsys.readouterr().err


def test_figures_that_are_not_current_end_with_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for left, code in (({ONE: "since then sim changed"}, 1), ({}, 0)):
        monkeypatch.setattr(figures, "outdated", lambda catalogue, left=left: left)
        assert main(["figures", "--current"]) == code
        assert capsys.readouterr().err == ("one: since then sim changed\n" if left else "")
    with pytest.raises(SystemExit):
        main(["cycles", "--current"])


def test_words_keep_their_form() -> None:
    assert not doctest.testmod(figures).failed
    assert worded("98.3% of it", 97.66) == "97.7% of it"
    assert (
        worded("1,874", 1_900) == "1,900"
        and worded("about 7.21 million cycles", 1_500_000) == "about 1.50 million cycles"
    )
    assert worded("2 s: missed", 3) == "3 s"
