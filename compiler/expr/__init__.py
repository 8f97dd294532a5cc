"""Tensor expressions, schedules and the loop IR, in the order in which a kernel passes the files.

nodes, math_functions, walk   what an element is: expressions, their intrinsic functions, traversal
tensor, scan                  which tensors there are: placeholder, compute, reductions, recurrences
transform                     which definitions are inlined into others, and which axes merge
schedule, trace               in which order, kind and memory the loops run; the same as data
lower, nest_parts             how definition and schedule become loops (names: unique_names)
loops                         what a statement is
affine, regions               what an index is as a sum, and which part of a tensor is read
fuse, loop_partition          which loops run as one, and where conditions split them
verify, clamp_indices         which loops are legal, and which indices of unknown files are clamped
printer, parser               how loops are written as text and read back
interpret                     what each node means (the reference for renderers)
norm_expressions              how rows are normalised in integer arithmetic
"""

from celosia.compiler.expr import printer  # it registers how they are written
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
    expand,
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
from celosia.compiler.expr.parser import ParseError, parse
from celosia.compiler.expr.schedule import Schedule, ScheduleError, Stage, create_schedule
from celosia.compiler.expr.tensor import (
    compute,
    constant,
    max,
    min,
    ordered_sum,
    placeholder,
    prod,
    reduce_axis,
    scan,
    sum,
)
from celosia.compiler.expr.transform import collapse, fuse_epilogues, fuse_injective
from celosia.compiler.expr.verify import IRError, verify

__all__ = [
    "INDEX",
    "Alloc",
    "Axis",
    "Binary",
    "Block",
    "Call",
    "Cast",
    "Const",
    "Expr",
    "For",
    "Function",
    "IRError",
    "If",
    "Intrinsic",
    "Let",
    "Load",
    "ParseError",
    "Reduce",
    "Schedule",
    "ScheduleError",
    "Select",
    "Stage",
    "Stmt",
    "Store",
    "Tensor",
    "Update",
    "Var",
    "binary",
    "call",
    "cast",
    "clip",
    "collapse",
    "compute",
    "constant",
    "create_schedule",
    "equal",
    "expand",
    "fuse_epilogues",
    "fuse_injective",
    "fuse_loops",
    "interpret",
    "is_float",
    "lower",
    "max",
    "maximum",
    "min",
    "minimum",
    "ordered_sum",
    "parse",
    "placeholder",
    "printer",
    "prod",
    "reduce_axis",
    "scan",
    "select",
    "sum",
    "verify",
    "wrap",
]  # fmt: skip
