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
    str, one_of("--device", names=SIMULATORS, help="Numpy, alone or with modelled cycles, or the RTL.")
]
OnnxModel = Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="The model: int8, or with QDQ nodes.")]
Model = Annotated[Path, typer.Argument(metavar="MODEL.onnx|PROGRAM", help="An ONNX model, or what `compile` wrote.")]
ConfigOption = Annotated[
    str,
    typer.Option("--config", metavar="NAME|FILE", help="The accelerator: tiny, pynq, ..., or a .toml or .json file."),
]
MaybeConfig = Annotated[
    str | None,
    typer.Option("--config", metavar="NAME|FILE", help="The accelerator, by default pynq, or the Program's."),
]
Board = Annotated[
    str, typer.Option("--board", metavar="NAME|FILE", help=f"The board: {_BOARDS}, or the .toml file of your own.")
]
BoardConfig = Annotated[
    str | None, typer.Option("--config", metavar="NAME|FILE", help="The accelerator, by default the board's.")
]
Place = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NODE=cpu|NODE=accelerator|cost",
        help="Where an operator runs; may be repeated. cost: launches that the CPU is done with sooner are the CPU's.",
    ),
]
NoCheck = Annotated[
    bool,
    typer.Option("--no-check", help="Do not compare each compiled layer with the model's operators on random inputs."),
]
Memory = Annotated[
    str | None,
    typer.Option(metavar="NAME|FILE", help="The memory of timed and rtl: zynq-hp, ideal, or a board's, as pynq-z2."),
]
Keep = Annotated[
    list[str] | None,
    typer.Option(metavar="TENSOR|all", help="Return this tensor inside the model, too, or all; may be repeated."),
]
Without = Annotated[
    list[str] | None,
    typer.Option(metavar="PASS", help="Leave this pass out, to see what it is good for; may be repeated."),
]
TakenDecisions = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Schedules of layers, as `inspect --decisions` writes them.")
]
KnownRecords = Annotated[
    str,
    typer.Option(
        metavar="FILE|none",
        help="What `tune` has measured, beside what comes with Celosia; none: the compiler decides alone.",
    ),
]
Rounding = Annotated[
    str | None,
    typer.Option(
        metavar="onnxruntime|correct",
        help="How normalisations, sums and averages are rounded: as onnxruntime's floats, or correctly, in integers.",
    ),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input", "-i", metavar="NAME=FILE",
        help="An input's array (.npy, .npz) or image; once for each input, or an .npz of arrays by input name.",
    ),
]  # fmt: skip
Trusted = Annotated[
    bool,
    typer.Option(
        "--trust", help="Run what a Program holds as it is, machine code, too: it may do anything with your rights."
    ),
]
Digest = Annotated[
    str | None, typer.Option(metavar="SHA256", help="As --trust, for a Program whose file has this SHA-256 only.")
]
Rebuild = Annotated[
    bool,
    typer.Option(
        "--rebuild-kernels", help="Compile a Program's kernels of the loops in it, whatever processor it is for."
    ),
]
Random = Annotated[
    bool,
    typer.Option("--random", help="Make up inputs that are not given: floats in 0..1, any bytes, indices 0 and 1."),
]
Mean = Annotated[
    list[float] | None, typer.Option(help="Of images: what is subtracted from pixels in 0..1; once or per channel.")
]
Std = Annotated[list[float] | None, typer.Option(help="Of images: what they are divided by then; once or per channel.")]
ShapeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--shape", "-s", metavar="INPUT=1,80,400",
        help="Sizes of an input that the model leaves open, -1 for one that stays so; once for each input.",
    ),
]  # fmt: skip
Jobs = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Processes that measure, by default one a processor.")
]
Pool = Annotated[
    str | None,
    typer.Option(
        metavar="dask://HOST:PORT",
        help="Workers of Dask measure; needs the extra fleet. With TLS: dask+tls://HOST:PORT.",
    ),
]
InsecurePool = Annotated[
    bool,
    typer.Option("--insecure-pool", help="Take a pool on a public address without TLS, where anybody may run code."),
]
Sudo = Annotated[bool, typer.Option("--sudo", help="Run as root there through sudo, which must not ask.")]

Address = Annotated[
    str | None,
    typer.Option(metavar="HEX", help="Address of the registers on a board, if its bitstream has its own."),
]
Report = Annotated[Path | None, typer.Option(metavar="REPORT.json", help="Write the report.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SAMPLES = (
    "A folder of .npy, .npz or image files, one for each sample, or of such folders, one for each class; or an .npz of "
    "arrays by input name whose first axis counts samples, perhaps with an array labels."
)
"""Help text of an option that takes samples."""
Samples = Annotated[int | None, typer.Option(min=1, metavar="N", help="Use no more, spread over all, by default all.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the random numbers of a search.")]
Import = Annotated[
    list[Path] | None,
    typer.Option("--import", metavar="FILE.py", help="Run this first: operators of your own; may be repeated."),
]
