"""Tensor expressions, schedules and the loop IR."""

from celosia.compiler.expr.fuse import fuse_loops
from celosia.compiler.expr.interpret import interpret
from celosia.compiler.expr.loops import (
    Alloc,
    Block,
    For,
    Function,
    If,
    Intrinsic,
    Let,
    Stmt,
    Store,
    Update,
)
from celosia.compiler.expr.lower import lower
from celosia.compiler.expr.nodes import (
    INDEX,
    Axis,
    Binary,
    Call,
    Cast,
    Const,
    Expr,
    Load,
    Reduce,
    Select,
    Tensor,
    Var,
    binary,
    call,
    cast,
    clip,
    equal,
    is_float,
    maximum,
    minimum,
    select,
    wrap,
)
from celosia.compiler.expr.schedule import Schedule, Stage, create_schedule
from celosia.compiler.expr.tensor import compute, constant, max, min, ordered_sum, placeholder, prod, reduce_axis, sum
from celosia.compiler.expr.transform import collapse, fuse_injective

__all__ = [
    "INDEX", "Alloc", "Axis", "Binary", "Block", "Call", "Cast", "Const", "Expr", "For", "Function", "If",
    "Intrinsic", "Let", "Load", "Reduce", "Schedule", "Select", "Stage", "Stmt", "Store", "Tensor", "Update",
    "Var", "binary", "call", "cast", "clip", "collapse", "compute", "constant", "create_schedule", "equal",
    "fuse_injective", "fuse_loops", "interpret", "is_float", "lower", "max", "maximum", "min", "minimum", "ordered_sum",
    "placeholder", "prod", "reduce_axis", "select", "sum", "wrap",
]  # fmt: skip
