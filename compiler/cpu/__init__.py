"""The CPU backend: ONNX operators through tensor expressions and loops to machine code."""

from celosia.compiler.cpu.function import CpuFunction, CpuNode, InputType, compile_op, run
from celosia.compiler.cpu.functions import TYPES
from celosia.compiler.cpu.group import group
from celosia.compiler.cpu.kernel import Kernel, compile_function
from celosia.compiler.cpu.ops import OPS, VIEWS, Unsupported, build
from celosia.compiler.cpu.schedule import schedule

__all__ = [
    "OPS", "TYPES", "VIEWS", "CpuFunction", "CpuNode", "InputType", "Kernel", "Unsupported", "build",
    "compile_function", "compile_op", "group", "run", "schedule",
]  # fmt: skip
