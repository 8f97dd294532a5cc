"""The host runtime: operators that are no loops, or whose shapes are known only once they run.

`execute` runs a HostOp (from cpu/parse.py) on arrays: in numpy where that serves all sizes (hostops/sized.py), through
a kernel made for the shapes at hand (by cpu/dynamic.py) where it is a tensor expression, else through the numpy
function of `hostops.HOST`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from celosia.compiler.program.host.compiler import makes_kernels
from celosia.compiler.program.host.hostops import FIRST, HOST, sized_function
from celosia.compiler.program.host.op import Body, HostError, HostOp, Value, bodies, describe


def needs_compiler(op: HostOp) -> str:
    """Why `op` cannot run where there is no LLVM; "" where it can."""
    if (op.domain, op.op) not in HOST and sized_function(op) is None:
        return str(op.fail("its shapes are known only at run time, when a board cannot compile it any more"))
    return next(filter(None, (needs_compiler(inner) for body in bodies(op) for inner in body.ops)), "")


def execute(op: HostOp, values: Mapping[str, Value], once: bool = False) -> list[Value]:
    """The outputs of `op`, given what its inputs (and its subgraphs' captured values) are. Raises HostError.

    once: it will not run for other sizes, so that the kernel which a Program would have computes it.
    """
    args = [values[name] if name else None for name in op.inputs]
    function = HOST.get((op.domain, op.op))
    compiler = None if op.op in FIRST else makes_kernels()
    try:
        if not once and op.op not in FIRST and (any_size := sized_function(op)) is not None:
            result = any_size(op, *args)
            if result is not NotImplemented:
                return _results(op, result)
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
        result = function(op, *args) if not any(bodies(op)) else function(op, *args, run=partial(_run, outer=values))
    except HostError:
        raise
    except MemoryError:
        raise op.fail("there is not enough memory") from None
    except Exception as error:  # numpy's errors for impossible shapes, of many classes
        raise op.fail(f"{error} (inputs {', '.join(map(describe, args))})") from error
    return _results(op, result)


def _results(op: HostOp, result: Value) -> list[Value]:
    results = list(result) if isinstance(result, tuple) else [result]
    if len(results) < op.wanted:
        raise op.fail(f"it has no output {len(results)}")
    return [np.asarray(r, order="C") if isinstance(r, (np.ndarray, np.generic)) else r for r in results]


def _run(body: Body, args: Sequence[Value], outer: Mapping[str, Value]) -> list[Value]:
    """The outputs of a subgraph. outer: the values around it."""
    values = {name: outer[name] for name in body.captured} | body.constants
    values |= dict(zip(body.inputs, args))
    for op in body.ops:
        values |= zip(op.outputs, execute(op, values))
    return [values[name] for name in body.outputs]
