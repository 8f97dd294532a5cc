"""Devices by name, and what they need."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celosia.compiler.program import Program
from celosia.hw.config import Config, did_you_mean
from celosia.sim.device import Device
from celosia.sim.devices import SIMULATORS, open_simulator

if TYPE_CHECKING:
    from onnx import ModelProto

DEVICES = (*SIMULATORS, "board")
"""Devices that can be opened by name."""


def open_device(name: str, config: Config, **options: Any) -> Device:
    """The device called "functional", "timed", "rtl" or "board"; `options` are those of its class. ValueError."""
    require_device(name)
    if name == "board":
        from celosia.driver.board import pynq_device

        return pynq_device(config, **options)
    return open_simulator(name, config, **options)


def require_device(name: str) -> None:
    if name not in DEVICES:
        near = did_you_mean(name, DEVICES)
        raise ValueError(f"there is no device {name!r}{near}; take {', '.join(DEVICES[:-1])} or {DEVICES[-1]}")


def require_tools(device: str, model: str | Path | ModelProto) -> None:
    """Find what the device of this name needs, before `model` is compiled for it; a model without integer operators
    needs nothing, and a Program is not compiled. ValueError where there is no device of that name, BuildError without a
    C++ compiler or Verilator, DeviceError without pynq."""
    require_device(device)
    if device not in ("rtl", "board") or not _has_integers(model):
        return
    if device == "rtl":
        from celosia.sim import build

        build.require_tools()
    else:
        from celosia.driver import board

        board.require_pynq()


def _has_integers(model: str | Path | ModelProto) -> bool:
    """Whether some of an ONNX model could run on the accelerator; of a Program, which knows it, False."""
    from celosia.compiler.graph.importer import read  # with the compiler, which a board has not

    if isinstance(model, (str, Path)):
        if not Path(model).is_file() or Program.is_program(model):
            return False
        model = read(Path(model), data=False)
    return any(re.search("Quantize|^Q|Integer", node.op_type) for node in model.graph.node)
