"""Tensor expressions in the words of TVM's papers, over those of the compiler: programs written there run here."""

from celosia.compiler.expr.nodes import call, clip, equal, maximum, minimum, select
from celosia.driver.te.build import BuiltKernel, build, lower
from celosia.driver.te.machine import Environment, accelerator, decl_tensor_intrin, hardware_intrin
from celosia.driver.te.nodes import TensorExpr, compute, max, min, placeholder, reduce_axis, sum, var
from celosia.driver.te.schedule import StageView, TensorSchedule, create_schedule, thread_axis

__all__ = [
    "BuiltKernel", "Environment", "StageView", "TensorExpr", "TensorSchedule", "accelerator", "build", "call", "clip",
    "compute", "create_schedule", "decl_tensor_intrin", "equal", "hardware_intrin", "lower", "max", "maximum", "min",
    "minimum", "placeholder", "reduce_axis", "select", "sum", "thread_axis", "var",
]  # fmt: skip
