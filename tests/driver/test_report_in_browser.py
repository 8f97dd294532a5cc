"""Pages in a real browser print nothing to the console and draw all figures, on any screen, light or dark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from browser import CHROMIUM, Browser, browser
from driver_models import convolution, floats
from report_models import HOSTILE, compiled, hostile
from small_models import Builder
from thorough import some

import celosia
from celosia.compiler.program import Program
from celosia.driver.pages.run_figures import COLOURS
from celosia.driver.run import explain
from celosia.hw.spec.config import PRESETS, Config

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")

LATENCY = COLOURS["latency"]
PHONE = {"width": 390, "height": 800}
SCREEN = {"width": 1280, "height": 800}


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def program() -> Program:
    return compiled(PRESETS["tiny"])


@pytest.fixture(scope="module")
def page(program: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the page of the Program."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    celosia.report(program).save(path)
    return path


@pytest.fixture(scope="module")
def report(program: Program) -> dict[str, Any]:
    inputs = {each.name: np.zeros(each.shape, each.dtype) for each in program.inputs}
    return celosia.Runtime(program, "timed").run(inputs).report


def colours(tab: Browser, folder: Path, figure: str) -> dict[tuple[int, ...], float]:
    """Return the share of each colour in a figure's screenshot."""
    script = f"""(() => {{ const box = document.getElementById({figure!r}).getBoundingClientRect();
        return {{x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height}} }})()"""
    path = tab.picture(folder / f"{figure}.png", clip=tab.run(script))
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    # One number for a pixel, which sorts much faster than rows of three.
    values, counts = np.unique(pixels @ np.array([1 << 16, 1 << 8, 1]), return_counts=True)
    return {
        tuple(value.to_bytes(3, "big")): count / len(pixels) for value, count in zip(values.tolist(), counts.tolist())
    }


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour.removeprefix("#")))


def check(tab: Browser, folder: Path, figures: int) -> None:
    """Assert that the open page is quiet, fits the window, draws each figure, and is readable."""
    assert tab.messages == []
    assert (
        tab.run("window.hacked") is None and tab.run("document.querySelectorAll('main img, main script').length") == 0
    )
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    ids = tab.run("[...document.querySelectorAll('.figure')].map(each => each.id)")
    assert len(ids) == figures
    paper, ink = (rgb(tab.run(f"getComputedStyle(document.documentElement).getPropertyValue('{name}').trim()"))
                  for name in ("--card", "--ink"))  # fmt: skip
    assert abs(np.mean(paper) - np.mean(ink)) > 150
    for figure in ids:
        shares = colours(tab, folder, figure)
        assert 0.2 < shares.get(paper, 0) < 0.995, (figure, shares.get(paper, 0))
        data = {name: share for name, share in shares.items() if max(name) - min(name) > 60 or name == rgb(LATENCY)}
        assert 0.001 < sum(data.values()) < 0.75, figure


@pytest.mark.parametrize("screen", some([SCREEN, PHONE | {"dark": True}], [PHONE | {"dark": True}]), ids=str)
def test_figures_are_drawn(tab: Browser, page: Path, tmp_path: Path, screen: dict[str, Any]) -> None:
    tab.open(page, **screen)
    check(tab, tmp_path, figures=4)
    shown = colours(tab, tmp_path, "figure1")
    assert shown.get(rgb(COLOURS["gemm"]), 0) > 0.01  # bars in the colour of what bounds layers


def test_what_a_page_does(tab: Browser, program: Program, page: Path, tmp_path: Path) -> None:
    """Colours follow the system's theme, and the timeline follows the chosen layer, whose loops are shown."""
    tab.open(page, **SCREEN)
    time = "Bokeh.documents.map(doc => doc.get_model_by_name('time')).find(Boolean)"
    whole = tab.run(f"[{time}.start, {time}.end]")
    choose(tab, "1")
    first, last = tab.run(f"[{time}.start, {time}.end]")
    assert whole[0] <= first < last <= whole[1] and last - first < whole[1] - whole[0]
    assert "# " in tab.run("document.getElementById('loops').textContent")
    bars = [bar for bar in drawn_bars(program) if first <= bar[2] and bar[2] + bar[3] <= last]
    told = re.findall(
        r"unit: (\w+) instruction: (\d+) .*?from cycle: ([\d,]+) for: ([\d,]+) cycles", hovered(tab, "figure3")
    )
    assert told and all((unit, *(int(n.replace(",", "")) for n in rest)) in bars for unit, *rest in told), told
    choose(tab, "")
    assert tab.run(f"[{time}.start, {time}.end]") == whole
    assert tab.run("document.getElementById('loops').textContent") == ""
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    tab.run("new Promise(done => setTimeout(done, 300))")
    check(tab, tmp_path, figures=4)


def drawn_bars(program: Program) -> list[tuple[str, int, int, int]]:
    """Return unit, number, first cycle and cycles of each instruction, without overlaps on a unit."""
    (run,) = explain.predict_counters(program)
    end, bars = dict[str, int](), []
    for event in sorted(run.events, key=lambda event: event.index):
        first = max(event.start, end.get(event.unit, 0))
        end[event.unit] = event.end
        bars.append((event.unit, event.index, first, event.end - first))
    return bars


def wheel(tab: Browser, figure: str, turns: int) -> None:
    """Turn the wheel above the middle of a figure."""
    tab.run(f"document.getElementById({figure!r}).scrollIntoView()")
    box = tab.run(f"document.getElementById({figure!r}).getBoundingClientRect().toJSON()")
    place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + 90}
    for _ in range(turns):
        tab.call("Input.dispatchMouseEvent", type="mouseWheel", deltaX=0, deltaY=-120, **place)
    tab.run("new Promise(done => setTimeout(done, 200))")


def test_the_wheel_zooms_the_timeline_and_the_legend_chooses_layers(
    tab: Browser, program: Program, page: Path, tmp_path: Path
) -> None:
    tab.open(page, **SCREEN)
    time = "Bokeh.documents.map(doc => doc.get_model_by_name('time')).find(Boolean)"
    span = f"{time}.end - {time}.start"
    whole, drawn = tab.run(span), colours(tab, tmp_path, "figure3")
    wheel(tab, "figure3", turns=3)
    assert 0 < tab.run(span) < 0.9 * whole
    layers = [layer.name for launch in program.launches for layer in launch.layers]
    assert tab.run("[...document.querySelectorAll('.layers button')].map(each => each.textContent)") == layers
    colours_told = tab.run("[...document.querySelectorAll('.layers i')].map(each => each.style.backgroundColor)")
    told = [tuple(int(part) for part in re.findall(r"\d+", each)) for each in colours_told]
    assert all(drawn.get(each, 0) > 0.0005 for each in told) and len(told) == len(layers)
    tab.run("document.querySelectorAll('.layers button')[1].click()")
    assert tab.run("document.getElementById('layer').value") == "1"
    tab.run("document.querySelectorAll('.layers button')[1].click()")
    assert tab.run("document.getElementById('layer').value") == "" and tab.run(span) == whole


def choose(tab: Browser, layer: str) -> None:
    tab.run(f"document.getElementById('layer').value = {layer!r}")
    tab.run("document.getElementById('layer').dispatchEvent(new Event('change'))")


def hovered(tab: Browser, figure: str, enough: Callable[[str], bool] = lambda text: False) -> str:
    """Return the text of tooltips while the pointer passes over a figure, until `enough` is true."""
    tab.run(f"document.getElementById({figure!r}).scrollIntoView()")
    box = tab.run(f"document.getElementById({figure!r}).getBoundingClientRect().toJSON()")
    words = """(() => { const found = []; const walk = root => { for (const each of root.querySelectorAll('*')) {
        if (each.localName.includes('tooltip') || each.className?.includes?.('bk-Tooltip'))
            found.push(each.shadowRoot?.textContent ?? each.textContent);
        if (each.shadowRoot) walk(each.shadowRoot) } }; walk(document); return found.join('\\n') })()"""
    text = ""
    for y in np.linspace(box["y"] + 40, min(box["y"] + box["height"], 790) - 50, 12):
        for x in (box["x"] + 120, box["x"] + 200, box["x"] + 400):
            tab.move(x, float(y))
        tab.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        text += tab.run(words)
        if enough(text):
            break
    return text


def test_hostile_names_are_words(tab: Browser, program: Program, tmp_path: Path) -> None:
    celosia.report(hostile(program)).save(tmp_path / "page.html")
    tab.open(tmp_path / "page.html")
    check(tab, tmp_path, figures=4)

    def shows_one(said: str) -> bool:
        return any(name[:20] in said for name in HOSTILE if name)

    for figure in "figure1", "figure3", "figure4":
        said = hovered(tab, figure, shows_one)
        assert shows_one(said), (figure, said)
    choose(tab, "0")
    assert tab.run("window.hacked") is None and tab.messages == []


def test_hundreds_of_layers(tab: Browser, report: dict[str, Any], tmp_path: Path) -> None:
    rows = [{**row, "name": f"{row['name']}/{number}"} for number in range(75) for row in report["layers"]]
    (tmp_path / "report.json").write_text(json.dumps({**report, "layers": rows}))
    assert len(rows) >= 300
    celosia.report(tmp_path / "report.json").save(tmp_path / "page.html")
    tab.open(tmp_path / "page.html", **PHONE)
    check(tab, tmp_path, figures=3)


def few(layers: int) -> Program:
    b = Builder("qdq", np.int8, seed=2)
    b.output(b.conv(b.input([1, 4, 6, 6]), 8, (3, 3)))
    program = celosia.compile(b.model() if layers else floats(), "tiny", check=False)
    assert sum(len(launch.layers) for launch in program.launches) == layers
    return program


@pytest.mark.parametrize("layers", [0, 1])
def test_few_layers(tab: Browser, tmp_path: Path, layers: int) -> None:
    celosia.report(few(layers)).save(tmp_path / "page.html")
    tab.open(tmp_path / "page.html", **SCREEN)
    check(tab, tmp_path, figures=4 * layers)


def test_faults_are_found(tab: Browser, page: Path, tmp_path: Path) -> None:
    """The check finds an error on the console, injected code, network use, a wide page, and an empty figure."""
    plain, drawn = celosia.report(few(0)).html(), page.read_text(encoding="utf-8")
    for text, fault in (
        (plain, "<script>console.error('wrong')</script>"), (plain, "<script>missing()</script>"),
        (plain, "<script>window.hacked=1</script>"), (plain, "<script>fetch('http://127.0.0.1:9/')</script>"),
        (plain, "<div style='width:3000px'>wide</div>"), (drawn, "<style>.figure > * { visibility: hidden }</style>"),
    ):  # fmt: skip
        (tmp_path / "page.html").write_text(text.replace("</header>", f"{fault}</header>"), encoding="utf-8")
        tab.open(tmp_path / "page.html")
        with pytest.raises(AssertionError):
            check(tab, tmp_path, figures=4 * (text is drawn))


@pytest.mark.parametrize("screen", some([SCREEN, PHONE | {"dark": True}], [PHONE | {"dark": True}]), ids=str)
def test_the_front_of_an_exploration(tab: Browser, tmp_path: Path, screen: dict[str, Any]) -> None:
    pytest.importorskip("moocore")
    space = {
        "block_in": [4, 8],
        "block_out": [4, 8],
        "taps": 0,
        "bus_bytes": 8,
        "batch": 1,
        "packed": True,
        "forward": False,
        "pump": 1,
    }
    onnx.save(convolution(), tmp_path / "model.onnx")
    celosia.explore(tmp_path / "model.onnx", space=space, points=4, folder=tmp_path / "out")
    tab.open(tmp_path / "out" / "report.html", **screen)
    check(tab, tmp_path, figures=4)
    assert tab.run("document.querySelectorAll('td').length") > 10
    bars = tab.run("[...document.querySelectorAll('td.bar i')].map(each => each.getBoundingClientRect().width)")
    assert len(bars) >= 8 and len(bars) % 4 == 0 and max(bars) > 20


def tooltips(tab: Browser, folder: Path, figure: str, colour: str) -> list[tuple[float, str]]:
    """Return widths and words of the tooltips at pixels of this colour in a figure."""
    tab.run(f"document.getElementById({figure!r}).scrollIntoView()")
    pixels = np.asarray(Image.open(tab.picture(folder / "seen.png")).convert("RGB"))
    top = tab.run(f"document.getElementById({figure!r}).getBoundingClientRect().top")
    y, x = np.nonzero((np.abs(pixels.astype(int) - rgb(colour)).max(axis=2) < 60) & (np.ptp(pixels, axis=2) > 60))
    inside = y > top + 20
    shown = """(() => { const found = []; const walk = root => { for (const each of root.querySelectorAll('*')) {
        if (each.className?.includes?.('bk-Tooltip') && each.getBoundingClientRect().width)
            found.push([each.getBoundingClientRect().width, each.shadowRoot.textContent]);
        if (each.shadowRoot) walk(each.shadowRoot) } }; walk(document); return found })()"""
    tips = []
    for n in np.linspace(0, inside.sum() - 1, 24).astype(int):
        tab.move(float(x[inside][n]), float(y[inside][n]))
        tab.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        tips += [(width, words) for width, words in tab.run(shown)]
    return tips


HOW = "no wider bus_bytes", "<img src=x onerror=window.hacked=1> " + "long " * 300


@pytest.mark.parametrize("how", some(HOW, HOW[1:]))
def test_what_a_config_is_fits_the_screen(tab: Browser, tmp_path: Path, how: str) -> None:
    """Tooltips of a Config with many fields, and of one from a malicious file, fit the screen."""
    fields = {name: 1024 for name in Config().to_dict() if name != "name"}
    points = [
        {"digest": f"{n:06d}", "set": {**fields, "taps": n},
         "objectives": {"cycles": 51909.6 / (n + 1), "area": 59.36 - n},
         "shares": {"lut": 0.9, "ff": 0.3, "dsp": 0.9, "ram": 0.2}, "front": True, "how": how, "at": n}
        for n in range(3)
    ]  # fmt: skip
    report = {
        "models": {"m": "0"}, "board": "pynq-z2", "memory": "pynq-z2", "objectives": {"cycles": "", "area": ""},
        "take": "", "front": [], "searched": [*fields], "points": points, "path": [[0, 0.0], [3, 0.5]],
        "state": {"space": 10**11, "seconds": 1.0},
    }  # fmt: skip
    (tmp_path / "front.json").write_text(json.dumps(report))
    celosia.report(tmp_path / "front.json").save(tmp_path / "page.html")
    tab.open(tmp_path / "page.html", **SCREEN)
    assert "e+" not in tab.run("document.body.innerText")
    shown = tooltips(tab, tmp_path, "figure1", COLOURS["store"])
    assert shown and max(width for width, _ in shown) < 450, shown
    words = " ".join(words for _, words in shown)
    assert "LUT 90%, flip-flops 30%, DSP 90%, block RAM 20%" in words and how[:20] in words
    assert tab.run("window.hacked") is None
    shown = tooltips(tab, tmp_path, "figure3", COLOURS["gemm"])
    assert shown and max(width for width, _ in shown) < 450
