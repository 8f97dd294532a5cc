"""python -m benchmarks.pictures [MODEL.onnx|front.json] [--config NAME] [--output FOLDER]

Writes the pictures of README and docs as PNGs, of `celosia report` by headless Chromium, and prints how large the page
is and how long it takes to open. Of a model, by default MobileNetV2 of $CELOSIA_MODELS, or of a front that
`celosia explore` has found.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from pathlib import Path

import celosia
from benchmarks import figures
from benchmarks.browser import CHROMIUM, Browser, browser
from benchmarks.figures import FIGURES
from benchmarks.rows import ROOT, Row
from benchmarks.workloads import FOLDER_VARIABLE, models_folder

PICTURES = {"Roofline": "roofline.png", "Timeline": "timeline.png"}
"""Title of a section, and the name of its picture."""
FRONT = {"The front": "front.png"}
WIDTH, HEIGHT = 1000, 800


def main(arguments: list[str]) -> int:
    """Draws the pictures of the documentation. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--config", default="pynq")
    parser.add_argument("--output", type=Path, default=ROOT / "docs")
    options = parser.parse_args(arguments)
    folder = models_folder(None)
    model = options.model or (folder / "mobilenet_v2_qdq_s8.onnx" if folder is not None else None)
    if model is None:
        parser.error(f"give a model, or set {FOLDER_VARIABLE}")
    if CHROMIUM is None:
        parser.error("Chromium is needed: apt-get install chromium")
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place, browser() as tab:
        page, found = Path(place) / "page.html", model.suffix == ".json"
        celosia.report(model if found else celosia.compile(model, options.config, check=False)).save(page)
        seconds = min(tab.open(page, WIDTH, HEIGHT) for _ in range(3))
        megabytes = page.stat().st_size / 1e6
        text = f"{megabytes:.1f} MB, open after {seconds:.1f} s (best of 3)"
        print(f"{model.name}: {text}")
        command, details = f"python -m benchmarks.pictures {model.name}", {"megabytes": megabytes, "seconds": seconds}
        row = Row(f"pictures/{model.stem}", "page of celosia report", "", text, None, command, details)
        figures.record([row], FIGURES)
        for title, name in (FRONT if found else PICTURES).items():
            size = write(tab, title, options.output / name)
            print(f"{options.output / name}: {size / 1e3:.0f} kB")
    return 0


def write(tab: Browser, title: str, path: Path) -> int:
    """Write a section of the page that is open as a PNG of 256 colours; its bytes."""
    from PIL import Image

    find = f"[...document.querySelectorAll('section')].find(each => each.querySelector('h2').textContent === {title!r})"
    tab.run(f"{find}.scrollIntoView()")  # what is out of sight is drawn less exactly
    box = tab.run(
        f"""(() => {{ const found = {find}.getBoundingClientRect();
            return [found.left, found.top + scrollY, found.right, found.bottom + scrollY].map(Math.round) }})()"""
    )
    whole = Image.open(io.BytesIO(tab.picture(path, whole=True).read_bytes())).convert("RGB")
    whole.crop(box).quantize(256).save(path, optimize=True)
    return path.stat().st_size


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
