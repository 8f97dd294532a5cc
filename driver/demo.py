"""The demo: a ResNet-8 classifies pictures of clothes on the accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from celosia import models
from celosia.compiler.compile import compile as compile_model
from celosia.driver.runtime import Runtime
from celosia.driver.show import run_summary as show
from celosia.driver.show.progress import Stages
from celosia.driver.show.text_table import console, percent
from celosia.driver.workstation import oracle
from celosia.driver.workstation.tools import require_tools

ROWS = 12
"""Height of a picture in the terminal, in lines of two pixels each."""


def run(count: int, device: str, config: str, stages: Stages, **options: Any) -> None:
    """Classify the first `count` test images, and print labels, cycles, layers and the comparison with onnxruntime.

    options: those of the device.
    """
    path = models.demo_model_path()
    require_tools(device, path)
    program = compile_model(path, config, progress=stages)
    images, labels, classes = models.demo_images()
    if device == "rtl":
        options |= {"progress": stages.cycles, "quiet": stages.quiet}
    logits, reports = [], []
    with Runtime(program, device, **options) as runtime:
        with stages.paused():
            runtime.open()
        for number in range(count):
            stages(f"image {number + 1} of {count}", line=False)
            result = runtime.run({program.inputs[0].name: images[number : number + 1]})
            logits.append(result.outputs[program.outputs[0].name])
            reports.append(result.report)
            if not stages.quiet:
                with stages.paused():
                    _print_image(
                        images[number, 0], classes[int(np.argmax(logits[-1]))], classes[labels[number]], result.report
                    )
        stages("comparing with onnxruntime", line=False)
        comparison = _compare_with_onnxruntime(str(path), images[:count], np.concatenate(logits))
    if not stages.quiet:
        correct = sum(int(np.argmax(row)) == label for row, label in zip(logits, labels))
        with stages.paused():
            _print_summary(reports, correct, comparison)


def _print_summary(reports: list[dict[str, Any]], correct: int, comparison: str) -> None:
    """Print the layers of the last run, accuracy, cycles and the comparison with onnxruntime.

    reports: of all runs. correct: number of images classified correctly. comparison: a sentence.
    """
    output, last, count = console(), reports[-1], len(reports)
    output.print()
    output.print(show.layers(last, every=True))
    output.print()
    output.print(f"{correct} of {count} right.")
    if last["cycles"] is not None:
        cycles = sum(report["cycles"] for report in reports)
        share = sum(report["cycles"] * report["utilization"] for report in reports) / cycles
        output.print(f"{cycles:,} cycles in total, {cycles // count:,} an image, memory model {last['memory_model']}.")
        output.print(f"Utilisation {percent(share)} of the multipliers.")
    output.print(comparison)


def _print_image(image: NDArray[np.float32], predicted: str, true: str, report: dict[str, Any]) -> None:
    """Print an image, if there is a terminal, and below it its prediction, its label and the cycles of its run."""
    output = console()
    cycles = f"{report['seconds']['run']:.2f} s"
    if report["cycles"] is not None:
        cycles = f"{report['cycles']:,} cycles (memory {report['memory_model']})"
    verdict = Text.assemble(
        (f"{predicted:<12}", "bold green" if predicted == true else "bold red"), f" true {true:<12} {cycles}"
    )
    if not output.is_terminal:
        output.print(verdict)
        return
    output.print(Group(_draw_image(image), Padding(verdict, (0, 0, 1, 0))))


def _draw_image(image: NDArray[np.float32]) -> Text:
    """Return the image as coloured half blocks: two pixels, one above the other, in each character."""
    pixels = np.linspace(2, 29, 2 * ROWS).round().astype(int)  # rows and columns that are shown, without the border
    small = (image[np.ix_(pixels, pixels)] * 255).astype(int)
    text = Text()
    for upper, lower in zip(small[0::2], small[1::2]):
        for above, below in zip(upper, lower):
            text.append("▀", f"rgb({above},{above},{above}) on rgb({below},{below},{below})")
        text.append("\n")
    text.rstrip()
    return text


def _compare_with_onnxruntime(path: str, images: NDArray[np.float32], logits: NDArray[np.float32]) -> str:
    """Return a sentence that compares the outputs with onnxruntime's, byte by byte."""
    try:
        session = oracle.open_session(Path(path))
    except oracle.MissingLibrary:
        return "onnxruntime is not installed, so nothing is compared with it; pip install onnxruntime"
    name = session.get_inputs()[0].name
    expected = np.concatenate([session.run(None, {name: image[None]})[0] for image in images])
    different = int(np.count_nonzero(expected.view(np.uint8) != logits.view(np.uint8)))
    return f"Output bytes that differ from onnxruntime {oracle.version()}: {different} of {expected.nbytes:,}."
