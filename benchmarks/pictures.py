"""python -m benchmarks.pictures [MODEL.onnx|front.json] [--config NAME] [--output FOLDER]

Writes the pictures of README and docs as PNGs, of `celosia report` by headless Chromium. Of a model, by default
MobileNetV2 of $CELOSIA_MODELS, or of a front that `celosia explore` has found.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import celosia
from benchmarks.rows import ROOT
from benchmarks.workloads import FOLDER_VARIABLE, models_folder
from celosia.driver.pages.page import Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PICTURES = {"Roofline": "roofline.png", "Timeline": "timeline.png"}
"""Title of a section, and the name of its picture."""
FRONT = {"The front": "front.png"}
WIDTH, HEIGHT = 1000, 2400
"""Pixels of the browser's window, which is higher than any section."""


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
    is_front = model.suffix == ".json"
    page = celosia.report(model if is_front else celosia.compile(model, options.config, check=False))
    for title, name in (FRONT if is_front else PICTURES).items():
        size = draw(page, title, options.output / name)
        print(f"{options.output / name}: {size / 1e3:.0f} kB")
    return 0


def draw(page: Page, title: str, path: Path) -> int:
    """Write the section of a page with this title as a PNG of 256 colours. Returns the bytes of the file."""
    from PIL import Image, ImageChops

    assert CHROMIUM is not None
    sections = [section for section in page.sections if section.title == title]
    html = (
        Page(title, "", (), sections, page.data).html().replace("</head>", "<style>header{display:none}</style></head>")
    )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        source, picture = Path(place) / "page.html", Path(place) / "page.png"
        source.write_text(html, encoding="utf-8")
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"]
        options += [f"--user-data-dir={place}/profile", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}"]
        options += ["--virtual-time-budget=30000", source.as_uri()]  # milliseconds until all is drawn
        subprocess.run([CHROMIUM, *options], check=True, capture_output=True)
        whole = Image.open(picture).convert("RGB")
    blank = Image.new("RGB", whole.size, whole.getpixel((0, HEIGHT - 1)))
    whole.crop(ImageChops.difference(whole, blank).getbbox()).quantize(256).save(path, optimize=True)
    return path.stat().st_size


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
