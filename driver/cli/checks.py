"""`celosia compare` and `eval`: check a model's outputs, accuracy and speed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from celosia.driver.cli import common
from celosia.driver.cli import options as opt
from celosia.driver.cli.errors import DIFFERS, WRONG_INPUT, command
from celosia.sim.devices import DEVICES, SSH_PREFIX

QuantisedModel = Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="The int8 model.")]
FloatModel = Annotated[
    Path | None,
    typer.Option("--float", metavar="FLOAT.onnx", help="The model before quantisation; shows its error."),
]
Every = Annotated[bool, typer.Option("--all", help="Print all tensors, not only those that differ or lose most.")]
Data = Annotated[Path, typer.Option(metavar="DIR|NPZ", help=opt.SAMPLES)]
Labels = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Class numbers of the samples: .npy, .npz, or a text with a line for each, LABEL or FILE LABEL.",
    ),
]
Against = Annotated[
    str | None,
    opt.one_of(names=("onnxruntime",), help="Also run the samples under onnxruntime, and count outputs that differ."),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Number of devices that run at a time. Default: one; for rtl, one for each processor.",
    ),
]


@command
def compare(
    model: QuantisedModel,
    inputs: opt.Inputs = None,
    random: opt.Random = False,
    float_model: FloatModel = None,
    device: opt.Simulator = "functional",
    config: opt.ConfigOption = "pynq",
    memory: opt.Memory = None,
    mean: opt.Mean = None,
    std: opt.Std = None,
    every: Every = False,
    shape: opt.ShapeOption = None,
    set_: opt.SetOption = None,
    rounding: opt.Rounding = None,
    report: opt.Report = None,
    no_check: opt.NoCheck = False,
    quiet: opt.Quiet = False,
) -> None:
    """Compare every tensor of a model with onnxruntime's, and with the float model's.

    The compiled model returns all of its tensors, so that none stays on chip. onnxruntime runs with
    session.qdqisint8allowed=1, that is in integers. The SQNR of a tensor is the power of the float model's tensor,
    divided by the power of the error. A tensor's loss is the lowest SQNR of its operands less its own.

    The exit code is 7 if a tensor differs. With --rounding correct, two kinds of tensors do not count: normalisations,
    sums, averages and products that differ by one step, and tensors that are computed from them. With --rounding bytes,
    no tensor counts; the table shows their distances.

    \b
    Examples:
      celosia compare model_int8.onnx --input image=image.npy
      celosia compare model_int8.onnx --random --float model.onnx --all
      celosia compare detector_int8.onnx --random --shape image=1,3,320,320
      celosia compare model_int8.onnx --input photo.jpg --device rtl --report report.json
    """
    options = _simulator_options(memory, device, quiet)
    with common.progress_stages(quiet) as stages:
        common.check_source(model)
        common.check_destinations([model], report)
        if float_model is not None:
            common.check_source(float_model)
        shapes, input_values = common.parse_shapes(shape), common.parse_set(set_)
        pixels = common.image_conversion(mean, std, quiet)
        values = common.read_inputs(model, inputs, random, pixels, shapes, input_values)
        from celosia.driver.accuracy.compare import compare as compare_tensors

        comparison = compare_tensors(
            model, values, float_model=float_model, config=config, device=device, check=not no_check, progress=stages,
            shapes=shapes, set=input_values, **common.rounding_option(rounding), **options,
        )  # fmt: skip
    common.write_json(report, comparison)
    if not quiet:
        from celosia.driver.show import compare_summary as show

        common.show(show.comparison(comparison, every))
    if comparison["different"]:
        raise typer.Exit(DIFFERS)


Sharing = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="|".join((*DEVICES, SSH_PREFIX + "USER@BOARD")),
        help="Device that runs the samples. Several devices, with commas between them, share the samples.",
    ),
]


@command
def eval_(
    model: opt.Model,
    data: Data,
    labels: Labels = None,
    device: Sharing = "functional",
    config: opt.MaybeConfig = None,
    memory: opt.Memory = None,
    against: Against = None,
    samples: opt.Samples = None,
    workers: Workers = None,
    mean: opt.Mean = None,
    std: opt.Std = None,
    report: opt.Report = None,
    no_check: opt.NoCheck = False,
    quiet: opt.Quiet = False,
) -> None:
    """Measure accuracy and speed of a model on a data set.

    Samples that fail are left out, and the exit code is then 1. It is 7 if an output differs from onnxruntime's.

    \b
    Examples:
      celosia eval model_int8.onnx --data photos/ --mean 0.5 --std 0.5 --against onnxruntime
      celosia eval model_int8.onnx --data test.npz --labels labels.txt
      celosia eval model.celosia --data test.npz --samples 20 --device rtl
      celosia eval model_int8.onnx --data test.npz --device ssh://root@pynq,ssh://root@second
    """
    devices = [name.strip() for name in device.split(",")]
    for name in devices:
        if name not in DEVICES and not name.startswith(SSH_PREFIX):
            common.raise_unknown_device(name, DEVICES)
    (options, *other_options) = (_simulator_options(memory, name, quiet) for name in devices)
    if any(other != options for other in other_options):
        raise typer.BadParameter("--device: rtl and --memory are for simulators of one kind; run them one by one")
    with common.progress_stages(quiet) as stages:
        common.check_source(model)
        common.check_destinations([model, data], report)
        from celosia.driver.accuracy.evaluate import evaluate

        evaluation = evaluate(
            model, data, labels, config=config, device=device, against=against is not None, samples=samples,
            pixels=common.image_conversion(mean, std, quiet), workers=workers, check=not no_check, progress=stages,
            count=stages.count, **options,
        )  # fmt: skip
    common.write_json(report, evaluation)
    if not quiet:
        from celosia.driver.show import compare_summary as show

        common.show(show.evaluation(evaluation))
    if evaluation["failed"]:
        raise typer.Exit(WRONG_INPUT)
    if evaluation["against"] is not None and evaluation["against"]["differ"]:
        raise typer.Exit(DIFFERS)


def _simulator_options(memory: str | None, device: str, quiet: bool) -> dict[str, Any]:
    """Return the options of a device as arguments: its memory, and whether the RTL simulator's build is quiet."""
    return common.parse_memory(memory, device) | ({"quiet": quiet} if device == "rtl" else {})
