"""Execution of operators that are no loops over elements, or whose shapes are known only at run time.

`execute` runs a HostOp (from cpu/parse.py) on arrays. In this order it takes: a numpy function that serves all sizes
(hostops/sized.py); a kernel compiled for these shapes (cpu/kernels.py), where the operator is a tensor expression; the
numpy function of `hostops.HOST`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from celosia.compiler.program.host.hostops import HOST, NUMPY_FIRST, sized_function
from celosia.compiler.program.host.kernel_compiler import kernel_compiler
from celosia.compiler.program.host.op import (
    Body,
    HostError,
    HostOp,
    RunnableBodies,
    RunnableBody,
    Value,
    describe,
)


def needs_compiler(op: HostOp) -> str:
    """Return a sentence that says why `op` cannot run without LLVM; "" where it can."""
    if (op.domain, op.op) not in HOST and sized_function(op) is None:
        return str(op.fail("its shapes are known only at run time, when a board cannot compile it any more"))
    return ""


def execute(
    op: HostOp, values: Mapping[str, Value], once: bool = False, compiled: RunnableBodies | None = None
) -> list[Value]:
    """Compute the outputs of `op`. Raises HostError.

    values: by name, of its inputs and of all that its subgraphs capture. once: it will not run for other sizes, so the
    kernel that a Program would contain computes it, with equal results, instead of a numpy function. compiled: its
    subgraphs as a Program contains them; None: those in its attributes run, operator by operator.
    """
    args = [values[name] if name else None for name in op.inputs]
    function = HOST.get((op.domain, op.op))
    compiler = None if op.op in NUMPY_FIRST else kernel_compiler()
    try:
        if not once and op.op not in NUMPY_FIRST and (any_size := sized_function(op)) is not None:
            result = any_size(op, *args)
            if result is not NotImplemented:
                return _result_list(op, result)
        if compiler is not None and compiler.has_kernel(op):
            try:
                return list(compiler.run_kernel(op, args))
            except compiler.Unsupported:
                if function is None:
                    raise
        if function is None:
            raise op.fail(
                "there is no such operator" + (f" in domain {op.domain!r}" if op.domain else "")
                if compiler is not None
                else "its shapes are known only at run time, and here is no LLVM to compile it for them"
            )
        runnable = compiled or _interpreted_bodies(op, values)
        result = function(op, *args, bodies=runnable) if runnable else function(op, *args)
    except HostError:
        raise
    except MemoryError:
        raise op.fail("there is not enough memory") from None
    except Exception as error:  # numpy's errors for impossible shapes, of many classes
        raise op.fail(f"{error} (inputs {', '.join(map(describe, args))})") from error
    return _result_list(op, result)


def _result_list(op: HostOp, result: Value) -> list[Value]:
    """Convert a function's result, one value or a tuple, to a list. Raises HostError where outputs are missing."""
    results = list(result) if isinstance(result, tuple) else [result]
    if len(results) < op.wanted:
        raise op.fail(f"it has no output {len(results)}")
    return [np.asarray(r, order="C") if isinstance(r, (np.ndarray, np.generic)) else r for r in results]


def _interpreted_bodies(op: HostOp, outer: Mapping[str, Value]) -> RunnableBodies:
    """Return the subgraphs of `op` as functions that run one operator after the other. outer: values around them."""
    return {
        name: RunnableBody(partial(_run_body, body, outer=outer), body.types)
        for name, body in op.attrs.items() if isinstance(body, Body)
    }  # fmt: skip


def _run_body(body: Body, args: Sequence[Value], outer: Mapping[str, Value]) -> list[Value]:
    """Run a subgraph on `args` and return its outputs. outer: values by name from which it captures."""
    values = {name: outer[name] for name in body.captured} | body.constants
    values |= dict(zip(body.inputs, args))
    for op in body.ops:
        values |= zip(op.outputs, execute(op, values))
    return [values[name] for name in body.outputs]
