"""`celosia export`: write a model as C."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from celosia.driver.choices import EXPORT_TARGETS
from celosia.driver.cli import common
from celosia.driver.cli import options as opt
from celosia.driver.cli.errors import command, say

if TYPE_CHECKING:
    from celosia.driver.export.c_project import Exported

Folder = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="DIR", help="The folder to write. It may hold models of the same target."),
]
Target = Annotated[
    str,
    opt.one_of("--target", names=EXPORT_TARGETS, help="Processor and operating system for which the C is compiled."),
]
Name = Annotated[str | None, typer.Option(metavar="NAME", help="Prefix of names in C. Default: the model's file name.")]


@command
def export(
    model: opt.OnnxModel,
    output: Folder,
    target: Target = EXPORT_TARGETS[0],
    config: opt.ConfigOption = "pynq",
    name: Name = None,
    decisions: opt.TakenDecisions = None,
    records: opt.KnownRecords = "shipped",
    without: opt.Without = None,
    rounding: opt.Rounding = None,
    shape: opt.ShapeOption = None,
    set_: opt.SetOption = None,
    place: opt.Place = None,
    no_check: opt.NoCheck = False,
    quiet: opt.Quiet = False,
) -> None:
    """Write a C library that runs a model on the accelerator, without Python, malloc or global state.

    The folder holds sources, kernels for the CPU as object files, a Makefile and a CMakeLists.txt. Several models of
    one target may share it.

    \b
    Examples:
      celosia export model.onnx -o firmware
      celosia export model.onnx -o firmware --target armv7-linux --config pynq
      celosia export model.onnx -o firmware --target riscv32-none --name classifier
      celosia export encoder.onnx -o firmware --shape mel=1,80,400 --rounding correct
      celosia export detector.onnx -o firmware --records tuned.jsonl --place /head/Conv=cpu
    """
    with common.progress_stages(quiet) as stages:
        shapes, placed = common.parse_shapes(shape), common.parse_place(place)
        common.check_source(model)
        from celosia.compiler.options import Options
        from celosia.driver.export import c_project

        c_project.require_model(model, name)
        c_project.require_target(output, target)
        options = Options(
            config=config, progress=stages, check=not no_check, decisions=decisions, shapes=shapes,
            set=common.parse_set(set_), records=records,
            place=placed, without=without or (), **common.rounding_option(rounding),
        )  # fmt: skip
        exported = c_project.export(model, target, options, name)
        stages("writing C")
        c_project.write_project(exported, output)
    common.advise(exported.model.program, quiet)
    if not quiet:
        say(_describe_export(exported, output))


def _describe_export(exported: Exported, folder: Path) -> str:
    """Return a sentence on the files that were written, and how to build them."""
    model = exported.model
    cpu = f"{len(model.program.kernels)} kernels" if model.program.kernels else "no kernels"
    needs = f", which call {', '.join(exported.functions)} of the C library" if exported.functions else ""
    return (
        f"{folder}: {model.name}.h for {exported.target.name}; {len(model.program.launches)} launches, {cpu}{needs}; "
        f"{model.memory_map.memory_bytes:,} bytes of memory and {model.device_bytes():,} of the accelerator's; make -C "
        f"{folder}"
    )
