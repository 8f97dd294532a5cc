"""Execution of operators that are no loops over elements, or whose shapes are known only at run time.

`execute` runs a HostOp (from cpu/parse.py) on arrays. In this order it takes: a numpy function that serves all sizes
(hostops/sized.py); a kernel compiled for these shapes (cpu/kernels.py), where the operator is a tensor expression; the
numpy function of `hostops.HOST`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from celosia.compiler.program.host.hostops import FIRST, HOST, sized_function
from celosia.compiler.program.host.kernel_compiler import kernel_compiler
from celosia.compiler.program.host.op import Body, HostError, HostOp, Value, bodies, describe


def needs_compiler(op: HostOp) -> str:
    """Return a sentence that says why `op`, or one in its subgraphs, cannot run without LLVM; "" where it can."""
    if (op.domain, op.op) not in HOST and sized_function(op) is None:
        return str(op.fail("its shapes are known only at run time, when a board cannot compile it any more"))
    return next(filter(None, (needs_compiler(inner) for body in bodies(op) for inner in body.ops)), "")


def execute(op: HostOp, values: Mapping[str, Value], once: bool = False) -> list[Value]:
    """Compute the outputs of `op`. Raises HostError.

    values: by name, of its inputs and of all that its subgraphs capture. once: it will not run for other sizes, so the
    kernel that a Program would contain computes it, with equal results, instead of a numpy function.
    """
    args = [values[name] if name else None for name in op.inputs]
    function = HOST.get((op.domain, op.op))
    compiler = None if op.op in FIRST else kernel_compiler()
    try:
        if not once and op.op not in FIRST and (any_size := sized_function(op)) is not None:
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
        result = (
            function(op, *args) if not any(bodies(op)) else function(op, *args, run=partial(_run_body, outer=values))
        )
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


def _run_body(body: Body, args: Sequence[Value], outer: Mapping[str, Value]) -> list[Value]:
    """Run a subgraph on `args` and return its outputs. outer: values by name from which it captures."""
    values = {name: outer[name] for name in body.captured} | body.constants
    values |= dict(zip(body.inputs, args))
    for op in body.ops:
        values |= zip(op.outputs, execute(op, values))
    return [values[name] for name in body.outputs]
