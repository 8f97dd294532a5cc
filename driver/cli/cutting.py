"""`celosia cut`: cut a model for several accelerators."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from celosia.driver.cli import common
from celosia.driver.cli import options as opt
from celosia.driver.cli.errors import command, say

Folder = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", help="The folder for NAME.1.onnx, NAME.2.onnx and so on.")
]
Parts = Annotated[int, typer.Option(min=2, metavar="N", help="Number of accelerators.")]


@command
def cut(
    model: opt.OnnxModel,
    output: Folder,
    parts: Parts = 2,
    config: opt.ConfigOption = "pynq",
    shape: opt.ShapeOption = None,
    quiet: opt.Quiet = False,
) -> None:
    """Cut a model into parts for several accelerators. Each part takes the output of the part before it.

    The model is cut at 8-bit tensors, so that the parts take about the same time by the timing model. In Python,
    `celosia.driver.cut.Relay` runs all parts at the same time, each with another sample.

    \b
    Examples:
      celosia cut resnet50.onnx -o parts
      celosia cut resnet50.onnx --parts 3 -o parts --config zcu104
      celosia cut detector.onnx -o parts --shape image=1,3,480,640
    """
    with common.progress_stages(quiet) as stages:
        shapes = common.parse_shapes(shape)
        common.check_source(model)
        from celosia.compiler.program.safe_files import make_folder, replacing, require_folder

        require_folder(output)
        from celosia.compiler.compile import compile as compile_model
        from celosia.driver.cut import cut as cut_model
        from celosia.driver.run.explain import estimate
        from celosia.hw.boards.memory import ZYNQ_HP

        stages("looking for places")
        cuts = {
            output / f"{model.stem}.{number}.onnx": part
            for number, part in enumerate(cut_model(model, parts, config, shapes=shapes), 1)
        }
        lines = []
        for path, part in cuts.items():
            stages(path.name)
            cycles = estimate(compile_model(part, config, check=False), ZYNQ_HP)["cycles"]
            lines.append(f"{path}: {cycles:,} cycles, to {', '.join(output.name for output in part.graph.output)}")
        make_folder(output)
        for path, part in cuts.items():
            with replacing(path) as temporary:
                temporary.write_bytes(part.SerializeToString(deterministic=True))
    if not quiet:
        say("\n".join(lines))
