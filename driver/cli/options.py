"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from celosia.hw.boards.boards import BOARDS
from celosia.sim.devices import SIMULATORS


def one_of(*flags: str, names: Collection[str], help: str) -> Any:
    """Declare an option that takes one of `names`."""

    def require_known(name: str) -> str:
        """Return `name` if it is one of `names`. BadParameter else."""
        if name not in names:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(map(repr, names))}.")
        return name

    return typer.Option(*flags, parser=require_known, metavar=f"<{'|'.join(names)}>", help=help)


_BOARDS = ", ".join(BOARDS)
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Simulator = Annotated[
    str, one_of("--device", names=SIMULATORS, help="Simulator: numpy, numpy with the timing model, or the RTL.")
]
OnnxModel = Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="The model: int8 operators, or QDQ nodes.")]
Model = Annotated[
    Path, typer.Argument(metavar="MODEL.onnx|PROGRAM", help="An ONNX model, or a Program from `celosia compile`.")
]
ConfigOption = Annotated[
    str,
    typer.Option(
        "--config",
        metavar="NAME|FILE",
        help="The accelerator: a preset such as tiny or pynq, or a .toml or .json file.",
    ),
]
MaybeConfig = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="NAME|FILE",
        help="The accelerator. Default: pynq for a model, and that of a Program.",
    ),
]
Board = Annotated[str, typer.Option("--board", metavar="NAME|FILE", help=f"The board: {_BOARDS}, or a .toml file.")]
BoardConfig = Annotated[
    str | None, typer.Option("--config", metavar="NAME|FILE", help="The accelerator. Default: that of the board.")
]
Place = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NODE=cpu|NODE=accelerator|cost",
        help="Run the operator NODE on the CPU or on the accelerator; may be repeated. cost: run each launch on the "
        "CPU if the estimate for the CPU is lower. By default only launches without products, softmax and "
        "normalisations are compared.",
    ),
]
NoCheck = Annotated[
    bool,
    typer.Option(
        "--no-check", help="Skip the self-check, which compares compiled layers with the model on random inputs."
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="Memory model for cycles: zynq-hp, ideal, a board such as pynq-z2, or a board's .toml file.",
    ),
]
Keep = Annotated[
    list[str] | None,
    typer.Option(metavar="TENSOR|all", help="Also return this inner tensor of the model, or all; may be repeated."),
]
Without = Annotated[
    list[str] | None,
    typer.Option(metavar="PASS", help="Leave out this pass of the compiler, to measure its effect; may be repeated."),
]
TakenDecisions = Annotated[
    Path | None,
    typer.Option(metavar="FILE.json", help="Use these schedules of layers, a file from `inspect --decisions`."),
]
KnownRecords = Annotated[
    str,
    typer.Option(
        metavar="FILE|none",
        help="File from `tune`, whose schedules are used besides those that come with Celosia. none: use no measured "
        "schedules.",
    ),
]
Rounding = Annotated[
    str | None,
    typer.Option(
        metavar="onnxruntime|correct|bytes",
        help="How normalisations, sums, averages and products are rounded. onnxruntime: as onnxruntime's floats are. "
        "correct: the exact result is rounded. bytes: as correct, and float tensors between quantised ones become "
        "bytes, too, which the accelerator can compute.",
    ),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input", "-i", metavar="NAME=FILE",
        help="File with an input: an array (.npy, .npz) or an image. Repeat it for each input, or name one .npz file "
        "with an array for each input.",
    ),
]  # fmt: skip
Trusted = Annotated[
    bool,
    typer.Option(
        "--trust", help="Run the machine code in a Program's file. It can do anything that your user account may do."
    ),
]
Digest = Annotated[
    str | None,
    typer.Option(
        metavar="SHA256", help="Run the machine code in a Program's file if the file has this SHA-256 digest."
    ),
]
Rebuild = Annotated[
    bool,
    typer.Option("--rebuild-kernels", help="Compile a Program's kernels anew from its loops, for this processor."),
]
Random = Annotated[
    bool,
    typer.Option(
        "--random",
        help="Draw random values for inputs without a file: floats from 0 to 1, any bytes, other integers 0 or 1.",
    ),
]
Mean = Annotated[
    list[float] | None,
    typer.Option(help="Number to subtract from pixels, which are 0 to 1. Give it once, or once for each channel."),
]
Std = Annotated[
    list[float] | None,
    typer.Option(help="Number by which pixels are divided after --mean. Give it once, or once for each channel."),
]
ShapeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--shape", "-s", metavar="INPUT=1,80,400",
        help="Shape of an input whose sizes the model leaves open; -1 keeps a size open. Repeat it for each input.",
    ),
]  # fmt: skip
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="INPUT=VALUE",
        help="Make an input a constant: a number, a text, or a list with commas. Then Ifs on it become one branch.",
    ),
]  # fmt: skip
Jobs = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Number of processes that measure. Default: one for each processor."),
]
Pool = Annotated[
    str | None,
    typer.Option(
        metavar="dask://HOST:PORT",
        help="Use the workers of a Dask scheduler; needs the extra `fleet`. With TLS: dask+tls://HOST:PORT.",
    ),
]
InsecurePool = Annotated[
    bool,
    typer.Option(
        "--insecure-pool",
        help="Allow a pool on a public address without TLS. Anybody there can run code on its workers.",
    ),
]
Sudo = Annotated[
    bool, typer.Option("--sudo", help="Run as root on the board through sudo, which must not ask for a password.")
]

Address = Annotated[
    str | None,
    typer.Option(
        metavar="HEX",
        help="Address of the accelerator's registers, if the bitstream has another than Celosia's projects.",
    ),
]
Report = Annotated[Path | None, typer.Option(metavar="REPORT.json", help="Write the report as JSON.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SAMPLES = (
    "Samples: a folder with a .npy, .npz or image file for each, or with such a folder for each class. Or an .npz file "
    "with an array for each input, whose first axis counts samples; it may also hold an array `labels`."
)
"""Help text of an option that takes samples."""
Samples = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Largest number of samples, spread evenly over all. Default: all."),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the search's random numbers.")]
Import = Annotated[
    list[Path] | None,
    typer.Option(
        "--import", metavar="FILE.py", help="Run this Python file first, which may define operators; may be repeated."
    ),
]
