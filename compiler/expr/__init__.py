"""Tensor expressions, schedules and the loop IR, in the order in which a kernel passes the files.

nodes            which kinds of expressions there are, what a tensor is; how expressions are traversed and rewritten;
                 which name a tensor gets whose name is used already
math_functions   which functions expressions may call (their meaning: interpret; their code: cpu/llvm; which are too
                 costly to compute twice: transform)
tensor           how tensors are defined: placeholder, compute, reductions, recurrences (scan)
transform        which definitions are inlined into others (operator fusion), and which axes merge
schedule         in which order, kind and memory the loops of each tensor run; how a schedule is stored as data (trace)
lower            which loops a definition and its schedule become
loops            which kinds of statements there are, and which temporaries are small enough for the stack (how much
                 of it: cpu/llvm/memory_access)
affine           what an index is as a linear form; strides, bounds; which part of a tensor a loop reads; when two
                 indices are equal
loop_passes      which neighbouring loops run as one; where a loop is split, because a condition inside it changes
verify           which loops are legal; which indices and sizes of the loops in an untrusted file are clamped or refused
                 (other contents of the file: program/check_program)
loop_text        how loops are written as text, and read back
interpret        what each node computes (the reference for renderers)
"""

from celosia.compiler.expr.interpret import interpret
from celosia.compiler.expr.loop_passes import fuse_loops
from celosia.compiler.expr.loop_text import ParseError, parse  # registers how expressions and loops are printed
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
    "prod",
    "reduce_axis",
    "scan",
    "select",
    "sum",
    "verify",
    "wrap",
]  # fmt: skip
