"""Check that the tools and packages of a device are installed before a model is compiled for it."""

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
    """Check that the tools of the device called `device` are installed, so that a long compilation is not in vain.

    Nothing is needed for a model without integer operators, and for a Program, which is not compiled. ValueError for an
    unknown device, BuildError without a C++ compiler or Verilator, DeviceError without pynq.
    """
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
    """Return whether parts of an ONNX model could run on the accelerator, by the names of its operators.

    False for a Program, and for a path without a file, whose error comes later.
    """
    from celosia.compiler.graph.importer import read

    if isinstance(model, (str, Path)):
        if not Path(model).is_file() or Program.is_program(model):
            return False
        model = read(Path(model), data=False)
    return any(re.search("Quantize|^Q|Integer", node.op_type) for node in model.graph.node)
