"""Report pages draw what plain models predict, refuse files that are no reports, and stay small."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver_models import shifted
from report_models import compiled, hostile
from typer.testing import CliRunner

import celosia
from celosia.compiler.program import LaunchStep, Program
from celosia.driver.cli import app
from celosia.driver.pages import run_figures as figures
from celosia.driver.pages import run_page as run
from celosia.driver.pages.activity import Activity, Occupancy, activity
from celosia.driver.pages.graph import nodes
from celosia.driver.pages.names import ReportError
from celosia.driver.run import explain
from celosia.driver.show import program_summary as program_tables
from celosia.hw.spec.config import PRESETS, Config
from celosia.hw.spec.isa import Unit, instruction_bytes
from celosia.hw.spec.scratchpads import scratchpads
from celosia.sim.device import Counters
from celosia.sim.functional.checking import Accesses, Checker
from celosia.sim.functional.decode import decode

SMALL = Config(block_in=8, block_out=4, inp_depth=256, wgt_depth=64, acc_depth=128, vin_depth=128, out_depth=64)
CONFIGS = [PRESETS["tiny"], SMALL, dataclasses.replace(PRESETS["tiny"], ports=2, taps=3, forward=True)]
MAIN = "What limits it", "Cycles by layer", "Roofline", "Timeline", "Where the bytes go", "What runs where"


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda cfg: f"{cfg.block_in}x{cfg.block_out}-{cfg.ports}")
def traced(request: pytest.FixtureRequest) -> tuple[Program, list[Counters], Activity]:
    program = compiled(request.param)
    counters = explain.predict_counters(program)
    found = activity(program, counters)
    assert found is not None
    return program, counters, found


def instructions(program: Program, launch: LaunchStep) -> list[Any]:
    code = np.frombuffer(explain.launch_code(program, launch), np.uint8)
    return decode(program.config, code.reshape(-1, instruction_bytes(program.config)))


# Activity ---------------------------------------------------------------------------------------------------


class Log(Accesses):
    """Records all accesses and checks none."""

    def __init__(self, like: Accesses) -> None:
        super().__init__(like.name, like.reads.shape[1], like.unit, like.must_be_written)
        self.log: list[tuple[int, bool, list[int]]] = []

    def check_read(self, index: Any, unit: Unit, number: int, clock: list[int]) -> None:
        self.log.append((number, False, index.tolist()))

    def check_write(self, index: Any, unit: Unit, number: int, clock: list[int]) -> None:
        self.log.append((number, True, index.tolist()))


def held(log: Log, start: Sequence[int], end: Sequence[int]) -> list[tuple[int, int]]:
    """Return the intervals in which each place holds a value that is still read."""
    intervals, since, until = [], dict[int, int](), dict[int, int]()
    for number, written, places in log.log:
        read = {place for other, is_write, own in log.log if other == number and not is_write for place in own}
        for place in places:
            if not written:
                until[place] = max(until.get(place, 0), end[number])
            elif log.name != "acc" or place not in read:  # GEMM adds to what it reads
                intervals.append((since.get(place, 0), until.get(place, 0)))
                since[place] = until[place] = start[number]
    intervals += [(since[place], until[place]) for place in since]
    return [(a, b) for a, b in intervals if b > a]


def launches(program: Program, counters: list[Counters]) -> Iterator[tuple[int, list[Any], list[int], list[int]]]:
    """Yield for each launch its first cycle, its instructions, and the cycles of their starts and ends."""
    now = 0
    for launch, measured in zip(program.launches, counters):
        events = sorted(measured.events, key=lambda event: event.index)
        yield (
            now, instructions(program, launch), [now + event.start for event in events],
            [now + event.end for event in events],
        )  # fmt: skip
        now += measured.cycles or 0


def test_scratchpads_hold_what_is_still_to_be_read(traced: tuple[Program, list[Counters], Activity]) -> None:
    program, counters, found = traced
    intervals: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for _, code, start, end in launches(program, counters):
        checker = Checker(program.config, program.dram_size)
        logs = {name: Log(each) for name, each in checker.buffers.items()}
        checker.buffers, checker.dram = {**logs}, Log(checker.dram)
        for number, each in enumerate(code):
            checker._check_accesses(number, each.unit, each.opcode, each.fields, [0] * len(Unit))
        for name in found.scratchpads:
            intervals[name] += held(logs[name], start, end)
    times = np.random.default_rng(0).integers(0, found.launches[-1], 300)
    for name, occupied in found.scratchpads.items():
        size = logs[name].reads.shape[1]
        for time in times.tolist():
            expected = sum(a <= time < b for a, b in intervals[name]) / size
            number = np.searchsorted(occupied.time, time, "right") - 1
            assert (occupied.share[number] if number >= 0 else 0) == pytest.approx(expected), (name, time)
        assert len(occupied.time) == 0 or occupied.share[-1] == 0
    assert sum(len(each.time) > 0 for each in found.scratchpads.values()) >= 5


def test_waits_end_with_the_token_that_comes_last(traced: tuple[Program, list[Counters], Activity]) -> None:
    program, counters, found = traced
    expected = set()
    for now, code, start, end in launches(program, counters):
        tokens: dict[tuple[Unit, Unit], deque[int]] = defaultdict(deque)
        for number, each in enumerate(code):
            for other in each.posts:
                tokens[each.unit, other].append(end[number])
        before = dict.fromkeys(Unit, now)
        for number, each in enumerate(code):
            came = [(tokens[other, each.unit].popleft(), other) for other in each.waits]
            latest = max((time for time, _ in came), default=-1)
            if latest > before[each.unit]:
                assert start[number] >= latest
                expected |= {(each.unit, other, before[each.unit], latest) for time, other in came if time == latest}
            before[each.unit] = max(before[each.unit], end[number])
    waits = set(zip(*(getattr(found.waits, name).tolist() for name in ("unit", "of", "since", "until"))))
    assert waits and waits <= expected
    assert {(unit, since) for unit, _, since, _ in expected} == {(unit, since) for unit, _, since, _ in waits}


@pytest.mark.parametrize("limit", [10, 100, 10_000])
def test_bars_hold_every_instruction_once(traced: tuple[Program, list[Counters], Activity], limit: int) -> None:
    program, counters, whole = traced
    found = activity(program, counters, limit)
    assert found is not None and found.instructions == sum(launch.count for launch in program.launches)
    bars = found.bars
    assert bars.count.sum() == found.instructions
    changes = sum(np.count_nonzero(np.diff(whole.bars.layer[whole.bars.unit == unit])) + 1 for unit in Unit)
    assert len(bars.unit) <= max(limit, changes) and (len(bars.unit) < found.instructions) == (
        limit < found.instructions
    )
    for unit in Unit:
        rows = np.flatnonzero(bars.unit == unit)
        assert (bars.drawn[rows][1:] >= bars.end[rows][:-1]).all() and (bars.end[rows] >= bars.drawn[rows]).all()
        covered = sum((bars.end - bars.drawn)[rows].tolist())
        own = whole.bars.unit == unit
        assert covered >= (whole.bars.end - whole.bars.drawn)[own].sum()
    assert (found.waits.until - found.waits.since > found.gap).all() and len(found.waits.unit) <= limit


def test_all_scratchpads_have_a_colour_and_are_explained() -> None:
    names = scratchpads(dataclasses.replace(PRESETS["tiny"], taps=3, softmax=1, weight_bits=4))
    assert {"tap", "exp", "book"} < set(names)
    assert set(names) == set(figures._SCRATCHPAD) == set(program_tables._SCRATCHPADS)


def test_a_curve_of_fewer_steps_keeps_its_peaks() -> None:
    share = np.random.default_rng(1).random(1000)
    share[617] = 2
    times, thin = figures.thin_out(Occupancy(8, np.arange(1000), share), 50)
    assert len(times) == 50 and thin.max() == 2 and (np.diff(times) > 0).all()
    assert (thin >= share[times]).all()


def test_without_times_there_is_no_activity(traced: tuple[Program, list[Counters], Activity]) -> None:
    program, counters, _ = traced
    assert activity(program, []) is None
    assert activity(program, [Counters()]) is None
    assert activity(program, [dataclasses.replace(counters[0], events=[])]) is None


# Graph ------------------------------------------------------------------------------------------------------


def test_layers_read_what_made_their_operands() -> None:
    program = celosia.compile(celosia.models.demo_model_path(), "tiny", check=False)
    found = nodes(program, explain.estimate(program))
    reads = {node.name: [found[number].name for number in node.reads] for node in found if node.place != "border"}
    assert reads == {
        "image_QuantizeLinear": ["image"], "stem": ["image_QuantizeLinear"], "block1.first": ["stem"],
        "block1.second": ["stem", "block1.first"], "block2.first": ["block1.second"],
        "block2.shortcut": ["block1.second"], "block2.second": ["block2.first", "block2.shortcut"],
        "block3.first": ["block2.second"], "block3.shortcut": ["block2.second"],
        "block3.second": ["block3.first", "block3.shortcut"], "pool": ["block3.second"], "logits": ["pool"],
        "logits_DequantizeLinear": ["logits"],
    }  # fmt: skip
    assert [node.place for node in found].count("border") == 2 and found[-1].reads == (len(found) - 2,)


def test_a_constant_that_a_launch_reads_is_no_node() -> None:
    program = celosia.compile(shifted(), "tiny", check=False)
    assert not {pack.value for pack in program.launches[0].pack} <= {*program.tensors}
    found = nodes(program, explain.estimate(program))
    reads = [[found[number].place for number in node.reads] for node in found if node.place == "accelerator"]
    assert reads == [["cpu", "cpu"], ["cpu", "cpu"]], found


@pytest.mark.parametrize("names", ["none", "same"])
def test_names_do_not_matter_to_the_graph(names: str) -> None:
    own, other = (nodes(program, explain.estimate(program)) for program in (compiled(SMALL), compiled(SMALL, names)))
    assert [(node.place, node.what, node.reads) for node in own] == [(n.place, n.what, n.reads) for n in other]


# Pages ------------------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """Parses a page into titles and texts. Fails if an element does not end."""

    VOID = "meta", "link"

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.titles: list[str] = []
        self.texts: dict[str, str] = defaultdict(str)
        self.scripts = 0
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not any(name.startswith("on") for name, _ in attrs)
        self.scripts += tag == "script"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts[self.open[-1]] += f"{data}\n"
            if self.open[-1] == "h2":
                self.titles.append(data)


@pytest.fixture(scope="module")
def program() -> Program:
    return compiled(SMALL)


def test_a_page_has_every_figure_and_needs_no_network(program: Program, tmp_path: Path) -> None:
    page = celosia.report(program)
    page.save(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert text == page.html() and len(text) < 2_000_000
    read = Reader(text)
    assert tuple(read.titles) == MAIN
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", text.split("<script>")[0])
    assert "default-src 'none'" in text
    cycles = explain.estimate(program)["cycles"]
    assert f"{cycles:,}" in read.texts["b"] and "by the timing model" in read.texts["p"]
    frame = page._repr_html_()
    assert frame.startswith("<iframe") and "<script" not in frame and len(frame) < 50_000
    assert f"{cycles:,}" in frame and all(title in frame for title in MAIN) and "page.interactive()" in frame
    whole = page.interactive()._repr_html_()
    assert whole.startswith('<iframe sandbox="allow-scripts"') and len(whole) > len(text)


def test_the_page_of_a_run_has_its_cycles(program: Program) -> None:
    inputs = {each.name: np.zeros(each.shape, each.dtype) for each in program.inputs}
    slow = celosia.Runtime(program, "timed", memory="pynq-z2").run(inputs)
    read = Reader(celosia.report(slow).html())
    assert f"{slow.report['cycles']:,}" in read.texts["b"] and "memory pynq-z2" in read.texts["p"]
    assert slow.report["cycles"] != explain.estimate(program)["cycles"]
    cell = slow._repr_html_()
    assert "<iframe" in cell and f"{slow.report['cycles']:,}" in cell and len(cell) < 50_000
    assert all(layer["name"] in cell for layer in slow.report["layers"])
    without = celosia.Runtime(program).run(inputs)
    read = Reader(celosia.report(without).html())
    assert read.titles == ["Where the bytes go", "What runs where"] and "without cycles" in read.texts["p"]
    assert "<iframe" not in without._repr_html_()
    with pytest.raises(ReportError, match="does not know its Program"):
        celosia.report(dataclasses.replace(without, program=None))


def test_many_instructions_are_drawn_as_runs_and_the_page_says_so(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "activity", lambda program, counters: activity(program, counters, limit=20))
    words = Reader(celosia.report(program).html()).texts["p"]
    assert re.search(r"They are drawn as \d+ runs of instructions of one layer: (pauses|none)", words)


def test_names_are_text(program: Program) -> None:
    page = celosia.report(hostile(program)).html()
    read = Reader(page)
    assert read.scripts == 4 and "hacked" in read.texts["h1"]
    assert "(no name)" in read.texts["b"] and len(page) < 2_000_000
    before, after = page.index("<h1>"), page.index('<script type="application/json"')
    assert "<img" not in page[before:after] and "x" * 300 not in page[before:after]


# Reports and the command ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(program: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the Program and the report of a run."""
    folder = tmp_path_factory.mktemp("pages")
    program.save(folder / "p.celosia")
    inputs = {each.name: np.zeros(each.shape, each.dtype) for each in program.inputs}
    report = celosia.Runtime(program, "timed").run(inputs).report
    (folder / "report.json").write_text(json.dumps(report))
    return folder


def command(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    return result.exit_code, result.output


def test_the_command_writes_pages_of_programs_and_reports(saved: Path, tmp_path: Path) -> None:
    for source in ("p.celosia", "report.json"):
        code, said = command("report", saved / source, "-o", tmp_path / "page.html")
        assert code == 0 and "no network" in said, said
        titles = Reader((tmp_path / "page.html").read_text()).titles
        assert titles == [title for title in MAIN if title != "Timeline" or source == "p.celosia"]
    code, said = command(
        "run", saved / "p.celosia", "--random", "--device", "timed", "--html", tmp_path / "run.html", "-q"
    )
    assert code == 0 and tuple(Reader((tmp_path / "run.html").read_text()).titles) == MAIN, said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: "no JSON", "is no report of a run: Expecting value"),
        (lambda r: [r], "it is no object"),
        (lambda r: {**r, "layers": None}, "has a wrong 'layers'"),
        (lambda r: {key: value for key, value in r.items() if key != "cycles"}, "has no 'cycles'"),
        (lambda r: {**r, "cycles": -1}, "has an impossible 'cycles': -1"),
        (lambda r: {**r, "layers": [{**r["layers"][0], "macs": "many"}]}, "a layer has a wrong 'macs': 'many'"),
        (lambda r: {**r, "layers": [{**r["layers"][0], "utilization": float("nan")}]}, "an impossible 'utilization'"),
        (lambda r: {**r, "config": {"block_in": 12}}, "its config is none: block_in"),
        (lambda r: {**r, "cpu_nodes": [{}]}, "an operator has no 'name'"),
    ],
)
def test_files_that_are_no_reports(saved: Path, tmp_path: Path, change: Any, words: str) -> None:
    wrong = change(json.loads((saved / "report.json").read_text()))
    (tmp_path / "r.json").write_text(wrong if isinstance(wrong, str) else json.dumps(wrong))
    code, said = command("report", tmp_path / "r.json", "-o", tmp_path / "page.html")
    assert code == 1 and words in said and "write it again with `celosia run --report`" in said, said
    assert said.count("\n") == 1 and "Traceback" not in said and not (tmp_path / "page.html").exists()


def test_other_errors_are_one_sentence(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.html"
    for arguments, code, words in (
        ((tmp_path / "missing.celosia", "-o", page), 1, "there is no model at"),
        ((saved / "p.celosia", "-o", tmp_path / "no" / "page.html"), 1, "there is no folder"),
        ((saved / "p.celosia", "-o", saved / "p.celosia"), 1, "give another name"),
        ((saved / "p.celosia", "--memory", "tape", "-o", page), 2, "there is no memory model 'tape'"),
        ((saved / "report.json", "--memory", "ideal", "-o", page), 2, "is for a model or Program"),
    ):
        found, said = command("report", *arguments)
        assert found == code and words in re.sub(r"[\s│]+", " ", said), said
    monkeypatch.setitem(sys.modules, "bokeh", None)
    for arguments in (("report", saved / "p.celosia", "-o", page),
                      ("run", saved / "p.celosia", "--random", "--html", page)):  # fmt: skip
        code, said = command(*arguments)
        assert code == 4 and "pip install celosia[report]" in said and not page.exists(), said
