"""Helpers for tests of exported C: models with CPU steps, the runtime as a library, registers with planted faults."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from small_models import Builder

from celosia.compiler.options import Options
from celosia.driver.export import c_header as hardware
from celosia.driver.export.c_project import RUNTIME, Exported, export
from celosia.driver.export.emulate import compile_c
from celosia.driver.export.forms import AffineForm
from celosia.driver.export.targets import find_export_target
from celosia.hw.spec.regs import MAGIC, REGISTERS, STATUS_BUSY, STATUS_DONE, STATUS_STUCK

IDENTITY, SOURCES = 0x12345678, 0x9ABCDEF0


def mixed() -> onnx.ModelProto:
    """Return a model with two launches and float operators between them, which read a second input.

    It has four outputs: one of the accelerator, two of the CPU in integers and floats, and one that is an input.
    """
    b = Builder("qdq", np.uint8, seed=5)
    x = b.conv(b.input([1, 3, 8, 8]), 12, (3, 3), strides=(2, 2), pads=(1, 1, 1, 1))
    b.inputs.append(helper.make_tensor_value_info("2nd: gain", TensorProto.FLOAT, [12, 1, 1]))
    scaled = b.node("Mod", [b.node("Mul", [b.real(x), "2nd: gain"]), "2nd: gain"], fmod=1)  # calls fmodf
    best = b.node("ArgMax", [scaled], axis=1)
    b.outputs.append(helper.make_tensor_value_info(best, TensorProto.INT64, [1, 1, 4, 4]))
    b.outputs.append(helper.make_tensor_value_info(scaled, TensorProto.FLOAT, [1, 12, 4, 4]))
    y = b.conv(b.quantise(scaled, x.shape, 0.2), 5, (1, 1))
    b.output(y)
    b.return_input()
    return b.model()


def exported(model: onnx.ModelProto | Path, target: str, name: str, config: str = "tiny") -> Exported:
    """Export `model` as C."""
    return export(model, target, Options(config=config, check=False), name)


class CDevice(ctypes.Structure):
    """The C structure `celosia_device`."""

    READ = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32)
    WRITE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32)
    MOVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    WAIT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32)
    NOW = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)
    LOCK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    UNLOCK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    _fields_ = (
        ("context", ctypes.c_void_p), ("read", READ), ("write", WRITE), ("memory", ctypes.c_void_p),
        ("base", ctypes.c_uint64), ("size", ctypes.c_size_t), ("flush", MOVE), ("invalidate", MOVE), ("wait", WAIT),
        ("interrupt", ctypes.c_int), ("now", NOW), ("clock_hz", ctypes.c_uint64), ("lock", LOCK), ("unlock", UNLOCK),
    )  # fmt: skip


class CState(ctypes.Structure):
    """The C structure `celosia_state`."""

    _fields_ = (
        ("device", ctypes.c_void_p), ("memory_size", ctypes.c_uint32), ("number", ctypes.c_uint32),
        ("instruction", ctypes.c_uint32), ("status", ctypes.c_uint32), ("cycles", ctypes.c_uint64),
    )  # fmt: skip


class CImage(ctypes.Structure):
    """The C structure `celosia_image`."""

    _fields_ = (
        ("identity", ctypes.c_uint32), ("sources", ctypes.c_uint32), ("memory_size", ctypes.c_uint32),
        ("address", ctypes.c_uint32), ("size", ctypes.c_uint32), ("bytes", ctypes.c_char_p),
    )  # fmt: skip


class CForm(ctypes.Structure):
    """The C structure `celosia_form`."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in (
            "batch", "group", "groups", "first", "images", "channels", "height", "width", "taps", "tap_columns",
        )),
        *((name, ctypes.c_int32 * 2) for name in ("step", "dilation", "before", "bounds")),
        ("apart", ctypes.c_uint32 * 4), ("flip", ctypes.c_uint8), ("pad", ctypes.c_uint8), ("invert", ctypes.c_uint8),
    )  # fmt: skip

    @classmethod
    def of(cls, form: AffineForm) -> CForm:
        """Return the C structure of `form`."""
        return cls(*(getattr(form, name) for name in form.__dataclass_fields__))


def runtime(folder: Path) -> ctypes.CDLL:
    """Compile celosia.c to a library of this machine and load it."""
    for file in ("celosia.h", "celosia.c"):
        (folder / file).write_bytes((RUNTIME / file).read_bytes())
    (folder / hardware.HEADER).write_text(hardware.header_text())
    compile_c(find_export_target("x86_64"), ["-shared", "-fPIC", "celosia.c", "-o", "celosia.so"], folder)
    lib = ctypes.CDLL(str(folder / "celosia.so"))
    lib.celosia_text.restype = ctypes.c_char_p
    return lib


class Misbehaving:
    """Registers of an accelerator whose runs end as a test chooses.

    after: reads of the status register until a run is done. ends: the status at its end. log: all writes, in order.
    on_start: called at each start.
    """

    def __init__(self, after: int = 2, ends: int = STATUS_DONE) -> None:
        self.values = dict.fromkeys(REGISTERS, 0) | {"magic": MAGIC, "identity": IDENTITY, "sources": SOURCES}
        self.after, self.ends, self.left = after, ends, 0
        self.log: list[tuple[str, int]] = []
        self.on_start: Callable[[], object] = lambda: None
        self.aborts_end = True
        self.microseconds = 0
        self.flushed: list[int] = []
        self.in_use = 0

    def device(self, memory: Any, **fields: Any) -> CDevice:
        """Return the device for C. memory: an array. fields: values that replace those of the structure."""
        self.memory = memory
        device = CDevice(
            None, CDevice.READ(self._read), CDevice.WRITE(self._write), memory.ctypes.data, 4096, memory.nbytes,
            CDevice.MOVE(lambda _, start, size: self.flushed.append(size)), CDevice.MOVE(), CDevice.WAIT(self._wait), 0,
            CDevice.NOW(lambda _: self.microseconds), 0, CDevice.LOCK(lambda _: self.in_use), CDevice.UNLOCK(),
        )  # fmt: skip
        for name, value in fields.items():
            setattr(device, name, value)
        return device

    def _read(self, _: object, offset: int) -> int:
        name = next(register.name for register in REGISTERS.values() if register.offset == offset)
        if name == "status" and self.values["status"] & STATUS_BUSY:
            self.left -= 1
            if self.left == 0:
                self.values["status"] = self.ends
        return int(self.values[name])

    def _write(self, _: object, offset: int, value: int) -> None:
        name = next(register.name for register in REGISTERS.values() if register.offset == offset)
        self.log.append((name, value))
        if name != "control":
            self.values[name] = value
        elif value & 1:
            self.values |= {"runs": self.values["runs"] + 1, "status": STATUS_BUSY}
            self.left = self.after
            self.on_start()
        elif self.aborts_end:
            self.values["status"] = STATUS_DONE
        else:
            self.values["status"] = STATUS_DONE | STATUS_STUCK

    def _wait(self, _: object, microseconds: int) -> None:
        self.microseconds += microseconds
