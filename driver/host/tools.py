"""Look for the tools and packages of a device before a model is compiled for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from celosia.compiler.program import Program
from celosia.driver.run.open_device import require_device
from celosia.sim.devices import SSH_PREFIX

if TYPE_CHECKING:
    from onnx import ModelProto


def require_tools(device: str, model: str | Path | ModelProto) -> None:
    """Find what the device of this name needs, before `model` is compiled for it; a model without integer operators
    needs nothing, and a Program is not compiled. ValueError where there is no device of that name, BuildError without a
    C++ compiler or Verilator, DeviceError without pynq."""
    if device.startswith(SSH_PREFIX):
        return
    require_device(device)
    if device not in ("rtl", "board") or not _has_integers(model):
        return
    if device == "rtl":
        from celosia.sim.rtl import build

        build.require_tools()
    else:
        from celosia.driver.board import board_device as board

        board.require_pynq()


def _has_integers(model: str | Path | ModelProto) -> bool:
    """Whether some of an ONNX model could run on the accelerator; False for a Program, whose launches are known."""
    from celosia.compiler.graph.importing.importer import read

    if isinstance(model, (str, Path)):
        if not Path(model).is_file() or Program.is_program(model):
            return False
        model = read(Path(model), data=False)
    return any(re.search("Quantize|^Q|Integer", node.op_type) for node in model.graph.node)
