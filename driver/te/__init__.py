"""Tensor expressions with the API of TVM's papers, on top of `compiler/expr/`: programs written for TVM run here.

- `nodes.py`: tensors, axes and reductions, also of open sizes; fixes sizes when arrays are known
- `words.py`: functions of elements by TVM's names
- `schedule.py`: schedules and their primitives by TVM's names
- `te_accelerator.py`: blocks, memories and intrinsics of an accelerator; intrinsics that a program declares
- `te_program.py`: `build` and `lower`: compiles a schedule for the CPU or an accelerator, and calls it with arrays
- `kernels.py`: runs a kernel of the accelerator on a Device
"""

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
    """Return a function of elements by name, as `te.exp`. AttributeError for an unknown name."""
    return function(name)
