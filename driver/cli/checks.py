"""`celosia compare` and `eval`: right or wrong, and how fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from celosia.driver.cli.errors import DIFFERS, Debug, Quiet, command
from celosia.driver.cli.options import (
    ConfigOption,
    DeviceName,
    Inputs,
    Mean,
    Memory,
    NoCheck,
    Random,
    Simulator,
    Std,
    check_destinations,
    check_source,
    memory_options,
    pixels_of,
    progress_stages,
    read_inputs,
)

Report = Annotated[Path | None, typer.Option(metavar="REPORT.json", help="Write the report.")]


@command
def compare(
    model: Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="The int8 model.")],
    inputs: Inputs = None,
    random: Random = False,
    float_model: Annotated[
        Path | None,
        typer.Option("--float", metavar="FLOAT.onnx", help="The model before it was quantised: shows what that cost."),
    ] = None,
    device: Simulator = DeviceName.functional,
    config: ConfigOption = "pynq",
    memory: Memory = None,
    mean: Mean = None,
    std: Std = None,
    every: Annotated[
        bool, typer.Option("--all", help="Print every tensor, not those only that differ or lose most.")
    ] = False,
    report: Report = None,
    no_check: NoCheck = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Compare every tensor of a model with onnxruntime's, and with the float model's.

    The model is compiled so that each tensor which exists as one is returned; none stays on chip. onnxruntime runs with
    session.qdqisint8allowed=1, that is in integers. A tensor's SQNR is the power of the float model's tensor over that
    of the error; what is lost is lost against the worst operand. Ends with exit code 7 where a tensor differs.

    \b
    Examples:
      celosia compare model_int8.onnx --input image=image.npy
      celosia compare model_int8.onnx --random --float model.onnx --all
      celosia compare model_int8.onnx --input photo.jpg --device rtl --report report.json
    """
    options = memory_options(memory, device.value)
    with progress_stages(quiet) as stages:
        check_source(model)
        check_destinations([model], report)
        if float_model is not None:
            check_source(float_model)
        values = read_inputs(model, inputs, random, pixels_of(mean, std))
        from celosia.driver.compare import compare as compare_tensors

        options |= _progress(device, stages)
        found = compare_tensors(
            model, values, float_model=float_model, config=config, device=device.value, check=not no_check, progress=stages,
            **options,
        )  # fmt: skip
    _finish(found, report)
    if not quiet:
        from celosia.driver import show

        out = show.console()
        for each in show.comparison(found, every):
            out.print(each)
    if found["different"]:
        raise typer.Exit(DIFFERS)


def _progress(device: str, stages: Any) -> dict[str, Any]:
    return {"progress": stages.cycles, "quiet": stages.quiet} if device == "rtl" else {}


def _finish(found: dict[str, Any], report: Path | None) -> None:
    if report is not None:
        from celosia.compiler.files import write_text

        write_text(report, json.dumps(found, indent=1) + "\n")
