"""Tensor expressions in the words of TVM's papers, on top of the compiler's: programs written for TVM run here."""

from collections.abc import Callable

from celosia.compiler.expr.nodes import Expr, call, clip, equal, maximum, minimum, select
from celosia.driver.te.nodes import TensorExpr, compute, max, min, placeholder, reduce_axis, sum, var
from celosia.driver.te.schedule import StageView, TensorSchedule, create_schedule, thread_axis
from celosia.driver.te.te_accelerator import Environment, accelerator, decl_tensor_intrin, hardware_intrin
from celosia.driver.te.te_program import BuiltKernel, build, lower
from celosia.driver.te.words import all, any, const, floordiv, floormod, function

__all__ = [
    "BuiltKernel", "Environment", "StageView", "TensorExpr", "TensorSchedule", "accelerator", "all", "any", "build",
    "call", "clip", "compute", "const", "create_schedule", "decl_tensor_intrin", "equal", "floordiv", "floormod",
    "hardware_intrin", "if_then_else", "lower", "max", "maximum", "min", "minimum", "placeholder", "reduce_axis",
    "select", "size_var", "sum", "thread_axis", "var",
]  # fmt: skip

if_then_else = select
size_var = var


def __getattr__(name: str) -> Callable[..., Expr]:
    """Functions of elements, as `te.exp(x)`. AttributeError for what is not here."""
    return function(name)
