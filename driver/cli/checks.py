"""`celosia compare` and `eval`: right or wrong, and how fast."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from celosia.driver.cli.errors import DIFFERS, Debug, Quiet, command
from celosia.driver.cli.options import (
    ConfigOption,
    DeviceName,
    Inputs,
    MaybeConfig,
    Mean,
    Memory,
    Model,
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


class Oracle(StrEnum):
    """What `--against` takes."""

    onnxruntime = "onnxruntime"


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
        values = read_inputs(model, inputs, random, pixels_of(mean, std, quiet))
        from celosia.driver.compare import compare as compare_tensors

        if device == DeviceName.rtl:
            options |= {"quiet": quiet}
        found = compare_tensors(
            model, values, float_model=float_model, config=config, device=device.value, check=not no_check,
            progress=stages, **options,
        )  # fmt: skip
    _finish(found, report)
    if not quiet:
        from celosia.driver.show import compare as show
        from celosia.driver.show.table import console

        out = console()
        for each in show.comparison(found, every):
            out.print(each)
    if found["different"]:
        raise typer.Exit(DIFFERS)


@command
def eval_(
    model: Model,
    data: Annotated[
        Path,
        typer.Option(
            metavar="DIR|NPZ",
            help="A folder of .npy, .npz or image files, one for each sample, or of such folders, one for each class; "
            "or an .npz of arrays by input name whose first axis counts samples, perhaps with an array labels.",
        ),
    ],
    labels: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Classes of the samples: .npy, .npz, or text, a line LABEL or FILE LABEL each."
        ),
    ] = None,
    device: Simulator = DeviceName.functional,
    config: MaybeConfig = None,
    memory: Memory = None,
    against: Annotated[
        Oracle | None, typer.Option(help="Run the same samples there, too, and count outputs that differ.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Use no more, spread over all, by default all.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Devices at a time; by default one a processor on rtl."),
    ] = None,
    mean: Mean = None,
    std: Std = None,
    report: Report = None,
    no_check: NoCheck = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure accuracy and speed of a model on a data set.

    Ends with exit code 7 where an output differs from onnxruntime's.

    \b
    Examples:
      celosia eval model_int8.onnx --data photos/ --mean 0.5 --std 0.5 --against onnxruntime
      celosia eval model_int8.onnx --data test.npz --labels labels.txt
      celosia eval model.celosia --data test.npz --samples 20 --device rtl
    """
    options = memory_options(memory, device.value)
    with progress_stages(quiet) as stages:
        check_source(model)
        check_destinations([model, data], report)
        from celosia.driver.evaluate import evaluate

        if device == DeviceName.rtl:
            options |= {"quiet": quiet}
        found = evaluate(
            model, data, labels, config=config, device=device.value, against=against is not None, samples=samples,
            pixels=pixels_of(mean, std, quiet), workers=workers, check=not no_check, progress=stages,
            count=stages.count, **options,
        )  # fmt: skip
    _finish(found, report)
    if not quiet:
        from celosia.driver.show import compare as show
        from celosia.driver.show.table import console

        out = console()
        for each in show.evaluation(found):
            out.print(each)
    if found["against"] is not None and found["against"]["differ"]:
        raise typer.Exit(DIFFERS)


def _finish(found: dict[str, Any], report: Path | None) -> None:
    if report is not None:
        from celosia.compiler.program.files import write_text

        write_text(report, json.dumps(found, indent=1) + "\n")
