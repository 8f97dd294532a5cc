"""Verifier of loop nests: for each kind of node a table of rules, each a sentence with the test that finds it broken.

A broken function is a mistake of the compiler, so tests verify after each transformation; files from outside are
verified too.

In order: the rules, `verify`, and what a function from an untrusted file needs besides: `clamp_accesses` and limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from celosia.compiler.expr.affine import flatten, interval, linear
from celosia.compiler.expr.loops import (
    KINDS,
    SCOPES,
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
    children,
    exprs,
    map_accesses,
    statements,
)
from celosia.compiler.expr.math_functions import ARITY, OF_BYTES, OF_INT64, OF_PAIRS, RESULTS
from celosia.compiler.expr.nodes import (
    ARITHMETIC,
    COMPARISONS,
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
    maximum,
    minimum,
    walk,
    wrap,
)
from celosia.compiler.program.dtypes import itemsize


class IRError(ValueError):
    """A function that breaks `rule`; the message says at which node."""

    def __init__(self, rule: str, node: object) -> None:
        super().__init__(f"{rule}: {str(node).splitlines()[0]}")
        self.rule = rule


@dataclass
class Context:
    """Facts that hold at a statement, on which rules depend.

    variables: those that are visible. scopes: memory of each visible tensor. constant: tensors that must not be
    written. guarded: whether a condition decides if the statement runs. lanes: the variable of the vectorised loop
    around, None outside of one. seen: tensors that were allocated anywhere before.
    """

    variables: frozenset[Var]
    scopes: dict[Tensor, str]
    constant: frozenset[Tensor]
    guarded: bool = False
    lanes: Var | None = None
    seen: set[Any] = field(default_factory=set)

    def scope(self, tensor: Tensor) -> str:
        """Return the memory of `tensor`, "dram" where it lies in the workspace."""
        scope = self.scopes.get(tensor, "dram")
        return "dram" if scope == "workspace" else scope


Rules = dict[str, Callable[[Any, Context], Any]]
"""Rule as a sentence -> test whether a node breaks it, in a Context."""


def _has_rank(tensor: Tensor, index: tuple[Expr, ...]) -> bool:
    """Return whether an index has one part for each dimension, or is an element number."""
    return len(index) == len(tensor.shape) or len(index) == 1


def _leaves_tensor(tensor: Tensor, index: tuple[Expr, ...], c: Context) -> bool:
    """Return whether an unguarded access provably leaves its tensor."""
    if c.guarded or not _has_rank(tensor, index):
        return False
    pairs = (
        zip(index, tensor.shape) if len(index) == len(tensor.shape) else [(flatten(tensor.shape, index), tensor.size)]
    )
    for i, size in pairs:
        if all(atom is None or isinstance(atom, Axis) for atom in linear(i)):
            bounds = interval(i)
            if bounds is not None and (bounds[0] < 0 or bounds[1] >= size):
                return True
    return False


_ACCESS_RULES: Rules = {
    "a tensor is an input, an output, a constant, or allocated around": lambda n, c: (
        n.tensor not in c.scopes and n.tensor.value is None
    ),
    "there is one index for each dimension, or one element number": lambda n, c: not _has_rank(n.tensor, n.index),
    "an index is an int64": lambda n, c: any(i.dtype != INDEX for i in n.index),
    "an index stays inside its tensor": lambda n, c: _leaves_tensor(n.tensor, n.index, c),
}
_WRITE_RULES: Rules = {
    **_ACCESS_RULES,
    "inputs and constants are not written": lambda s, c: s.tensor in c.constant or s.tensor.value is not None,
    "what is written has the type of the tensor": lambda s, c: s.value.dtype != s.tensor.dtype,
}
EXPR_RULES: dict[type[Expr], Rules] = {
    Const: {},
    Var: {"a variable is bound by a loop or a definition around": lambda e, c: e not in c.variables},
    Load: _ACCESS_RULES,
    Binary: {
        "the operation exists": lambda e, c: e.op not in ARITHMETIC and e.op not in COMPARISONS,
        "both sides of an operation have one type": lambda e, c: e.a.dtype != e.b.dtype,
    },
    Call: {
        "the function exists": lambda e, c: e.name not in ARITY,
        "a function has its arguments": lambda e, c: len(e.args) != ARITY[e.name],
        "arguments of a function have one type": lambda e, c: len({arg.dtype for arg in e.args}) != 1,
        "dot4 and popcount4 take four bytes": lambda e, c: e.name in OF_BYTES and e.args[0].dtype != "uint32",
        "pairs take two bytes": lambda e, c: e.name in OF_PAIRS and e.args[0].dtype != "uint16",
        "leading_zeros and inverse_root take an int64": lambda e, c: e.name in OF_INT64 and e.args[0].dtype != "int64",
        "a function's result has its type": lambda e, c: not _has_type(e),
    },
    Cast: {},
    Select: {
        "a condition is a bool": lambda e, c: e.cond.dtype != "bool",
        "both arms of a selection have one type": lambda e, c: e.a.dtype != e.b.dtype,
    },
    Reduce: {"reductions have become loops": lambda e, c: True},
}
STMT_RULES: dict[type[Stmt], Rules] = {
    For: {
        "a loop runs at least once": lambda s, c: s.extent < 1,
        "a loop's variable has its extent": lambda s, c: isinstance(s.var, Axis) and s.var.extent != s.extent,
        "the kind of a loop exists": lambda s, c: s.kind not in KINDS,
        "a variable is bound once": lambda s, c: s.var in c.variables,
        "a vectorized loop contains no other": lambda s, c: s.kind == "vectorized" and c.lanes is not None,
    },
    Store: _WRITE_RULES,
    Update: {**_WRITE_RULES, "the reduction exists": lambda s, c: s.kind not in Reduce.COMBINE},
    Let: {
        "a variable is bound once": lambda s, c: s.var in c.variables,
        "a variable has the type of its value": lambda s, c: s.var.dtype != s.value.dtype,
    },
    If: {"a condition is a bool": lambda s, c: s.cond.dtype != "bool"},
    Alloc: {
        "the memory exists": lambda s, c: s.scope not in SCOPES,
        "a tensor is allocated once": lambda s, c: s.tensor in c.seen,
    },
    Block: {},
    Intrinsic: {
        "an intrinsic has the arguments that it declares": lambda s, c: (
            None if s.declared is None else s.declared.argument_error(s.args, c.scope)
        )
    },
}


def _has_type(e: Call) -> bool:
    """Return whether the declared type of a call is the one that its function returns."""
    if e.name == "bitcast":
        return itemsize(e.dtype) == itemsize(e.args[0].dtype)
    return e.dtype == RESULTS.get(e.name, e.args[0].dtype)


def verify(function: Function) -> Function:
    """Return `function` unchanged; IRError for the first rule that it breaks."""
    scopes = {t: "workspace" for t in (*function.inputs, *function.outputs)}
    _verify_statement(function.body, Context(frozenset(function.scalars), scopes, frozenset(function.inputs)))
    return function


def _check(node: Any, rules: Rules, c: Context) -> None:
    """Raise IRError for the first of `rules` that `node` breaks."""
    for rule, broken in rules.items():
        if error := broken(node, c):
            raise IRError(rule, f"{node} ({error})" if isinstance(error, str) else node)


def _verify_statement(s: Stmt, c: Context) -> None:
    """Verify a statement, its expressions and the statements inside it."""
    if type(s) not in STMT_RULES:
        raise IRError("the kind of statement exists", type(s).__name__)
    _check(s, STMT_RULES[type(s)], c)
    done: set[tuple[int, bool]] = set()
    expression_context = replace(c, guarded=True) if isinstance(s, Intrinsic) else c  # it may check its own bounds
    for e in exprs(s):
        if isinstance(s, Intrinsic) and isinstance(e, Reduce):  # a window, whose loops are the intrinsic's
            window_context = replace(expression_context, variables=c.variables | set(e.axes))
            _verify_expression(e.value, window_context, done)
        else:
            _verify_expression(e, expression_context, done)
    for part, context in _parts_with_context(s, c):
        _verify_statement(part, context)


def _parts_with_context(s: Stmt, c: Context) -> Iterator[tuple[Stmt, Context]]:
    """Yield the statements inside `s`, each with the facts that hold there."""
    match s:
        case For(var, _, body, kind):
            lanes = var if kind == "vectorized" else c.lanes
            yield body, replace(c, variables=c.variables | {var}, lanes=lanes)
        case Let(var, _, body):
            yield body, replace(c, variables=c.variables | {var})
        case If(_, body, orelse):
            for part in (body,) if orelse is None else (body, orelse):
                yield part, replace(c, guarded=True)
        case Alloc(tensor, body, scope):
            c.seen.add(tensor)
            yield body, replace(c, scopes={**c.scopes, tensor: scope})
        case Block(body):
            for part in body:
                yield part, c


def _verify_expression(e: Expr, c: Context, done: set[tuple[int, bool]]) -> None:
    """Verify an expression and its operands.

    done: (id, guarded) of nodes that were checked; the arms of a selection are guarded by its condition.
    """
    if (id(e), c.guarded) in done:
        return
    done.add((id(e), c.guarded))
    kind = Var if isinstance(e, Var) else type(e)
    if kind not in EXPR_RULES:
        raise IRError("the kind of expression exists", kind.__name__)
    _check(e, EXPR_RULES[kind], c)
    for child in e.children():
        is_arm = isinstance(e, Select) and child is not e.cond
        _verify_expression(child, replace(c, guarded=True) if is_arm else c, done)


MAX_INDEX = 1 << 62
"""Limit of index magnitudes; sums below it do not overflow int64."""
MAX_ITERATIONS = 1 << 40
"""Limit of the iterations of all loops together, which take a quarter of an hour or more."""
MAX_LANES = 1024
"""Limit of the lanes of a vectorised loop."""
MAX_STATEMENTS = 1 << 18
"""Limit of the statements after unrolling, which bounds the time and memory of LLVM."""
MAX_BYTES = 1 << 36
"""Limit of the bytes of tensors inside a function."""


def clamp_accesses(function: Function) -> Function:
    """Clamp every index of `function` that is not proved to be inside its tensor, for a kernel from an untrusted file.

      b[i] = a[t[i]]      ->      b[i] = a[max(min(t[i], 9), 0)]      a has 10 elements, and t may hold anything

    The compiler's loops read outside of a tensor only where a selection drops the value, so no result changes.
    The result has the fixed name "guarded", because compiled code is cached by name. Raises IRError where the function
    breaks a rule of the verifier or exceeds a limit above.
    """
    verify(function)
    _check_in_place(function)
    _check_limits(function)

    def clamp_load(e: Expr) -> Expr | None:
        if not isinstance(e, Load) or _is_inside(e.tensor, e.index):
            return None
        if not e.tensor.size:
            return wrap(0, e.dtype)
        return Load(e.tensor, _clamped_index(e.tensor, e.index))

    def clamp_write(tensor: Tensor, index: tuple[Expr, ...]) -> tuple[Tensor, tuple[Expr, ...]]:
        if not tensor.size:
            raise IRError("an empty tensor is not written", tensor.name)
        return (tensor, index) if _is_inside(tensor, index) else (tensor, _clamped_index(tensor, index))

    return verify(replace(function, name="guarded", body=map_accesses(function.body, clamp_load, clamp_write)))


def _is_inside(tensor: Tensor, index: tuple[Expr, ...]) -> bool:
    """Return whether the element number is proved to be inside, and no intermediate value of it can overflow."""
    element = flatten(tensor.shape, index)
    span = interval(element)
    if span is None or span[0] < 0 or span[1] >= tensor.size:
        return False
    terms = [(interval(Const(1, INDEX) if atom is None else atom), k) for atom, k in linear(element).items()]
    if sum(abs(k) * _max_magnitude(bounds) for bounds, k in terms) >= MAX_INDEX:
        return False
    return all(_max_magnitude(bounds) < MAX_INDEX for node in walk(element) if (bounds := interval(node)) is not None)


def _max_magnitude(bounds: tuple[int, int] | None) -> int:
    """Return the largest absolute value within `bounds`, or MAX_INDEX where they are not known."""
    return MAX_INDEX if bounds is None else max(map(abs, bounds))


def _clamped_index(tensor: Tensor, index: tuple[Expr, ...]) -> tuple[Expr]:
    """Return an index as an element number that is clamped to the tensor."""
    return (maximum(minimum(flatten(tensor.shape, index), tensor.size - 1), 0),)


def _check_in_place(function: Function) -> None:
    """Raise IRError where an input shares the memory of an output of another size."""
    outputs, inputs = dict(enumerate(function.outputs)), dict(enumerate(function.inputs))
    for output_position, input_position in function.in_place:
        is_valid = (
            output_position in outputs
            and input_position in inputs
            and outputs.pop(output_position).nbytes == inputs.pop(input_position).nbytes
        )
        if not is_valid:
            raise IRError(
                "an input in the memory of an output is as large as it", f"({output_position}, {input_position})"
            )


def _check_limits(function: Function) -> None:
    """Raise IRError for instructions of an accelerator, too wide vectors, or a size above the limits."""
    inside = list(statements(function.body))
    for s in inside:
        if isinstance(s, Intrinsic):
            raise IRError("a CPU has no such instruction", s.name)
        if isinstance(s, For) and s.kind == "vectorized" and s.extent > MAX_LANES:
            raise IRError("a vector has not so many lanes", s)
    if iterations(function.body) > MAX_ITERATIONS:
        raise IRError(f"there are at most {MAX_ITERATIONS} iterations", function.name)
    if _statement_count(function.body) > MAX_STATEMENTS:
        raise IRError(f"there are at most {MAX_STATEMENTS} statements", function.name)
    tensors = (*function.inputs, *function.outputs, *(s.tensor for s in inside if isinstance(s, Alloc)))
    if any(prod(tensor.shape) > MAX_BYTES for tensor in tensors) or _allocated_bytes(function.body) > MAX_BYTES:
        raise IRError(f"tensors have at most {MAX_BYTES} bytes", function.name)


def iterations(s: Stmt) -> int:
    """Count the iterations of the innermost statements inside `s`."""
    times = s.extent if isinstance(s, For) else 1
    return times * max(1, sum(map(iterations, children(s))))


def _unroll_factor(s: Stmt) -> int:
    """Return how many copies of the body of `s` unrolling makes."""
    return s.extent if isinstance(s, For) and s.kind == "unrolled" else 1


def _statement_count(s: Stmt) -> int:
    """Count the statements of `s` after unrolling."""
    return 1 + _unroll_factor(s) * sum(map(_statement_count, children(s)))


def _allocated_bytes(s: Stmt) -> int:
    """Count the bytes that `s` allocates after unrolling."""
    return (s.tensor.nbytes if isinstance(s, Alloc) else 0) + _unroll_factor(s) * sum(
        map(_allocated_bytes, children(s))
    )
