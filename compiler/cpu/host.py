"""The host runtime: operators that are no loops, or whose shapes are known only once they run.

`HostOp` is one ONNX operator (from parse.py), with its subgraphs as `Body`. `execute` runs it on arrays: through a
kernel made for the shapes at hand (by dynamic.py) where it is a tensor expression, else through the numpy function of
`hostops.HOST`.
A value is an array, a list (sequence), or None (an empty optional).
"""

from __future__ import annotations

import functools
import importlib
import os
import resource
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Value = Any
"""An array, a list of values (a sequence), or None (an empty optional)."""
DOMAINS = ("", "ai.onnx", "com.microsoft", "celosia")
"""Domains whose operators cpu.OPS holds."""


MAX_SENTENCE = 600
"""Characters of an error: a model may hold lists and texts of any length, which errors quote."""


def clipped(sentence: str) -> str:
    """`sentence` on one line, without its middle where it is long."""
    line = " ".join(sentence.split())
    half = MAX_SENTENCE // 2
    return line if len(line) <= MAX_SENTENCE else f"{line[:half]} ... {line[-half:]}"


class HostError(ValueError):
    """An operator that cannot run on the values it got; the message names the node."""

    def __init__(self, sentence: str) -> None:
        super().__init__(clipped(sentence))


@dataclass(frozen=True)
class HostOp:
    """One operator. `key` tells operators with the same attributes apart from others; `opset` is of its domain."""

    op: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: dict[str, Any]
    opset: int
    key: bytes

    def attr(self, name: str, default: Any = None) -> Any:
        return self.attrs.get(name, default)

    @property
    def label(self) -> str:
        """Operator and name, for errors."""
        return f"{self.op} ({self.name or next(filter(None, self.outputs), '')})"

    def fail(self, why: str) -> HostError:
        return HostError(f"{self.label}: {why}")

    @property
    def wanted(self) -> int:
        return len(self.outputs)


@dataclass(frozen=True)
class Body:
    """A subgraph: what it takes, constants, operators in order, what it returns, and what it reads from outside."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: dict[str, Array] = field(repr=False)
    ops: tuple[HostOp, ...]
    captured: tuple[str, ...]

    def run(self, args: Sequence[Value], outer: Mapping[str, Value]) -> list[Value]:
        values = {name: outer[name] for name in self.captured} | self.constants
        values |= dict(zip(self.inputs, args))
        for op in self.ops:
            values |= zip(op.outputs, execute(op, values))
        return [values[name] for name in self.outputs]


def bodies(op: HostOp) -> Iterable[Body]:
    """The subgraphs of `op`."""
    for value in op.attrs.values():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Body):
                yield each


def memory_bytes() -> int:
    """Bytes of memory of this machine, or that the process may take of them."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    bytes_ = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return bytes_ if limit == resource.RLIM_INFINITY else min(bytes_, limit)


def check_size(size: int, what: str) -> None:
    """HostError where `size` bytes are more than this machine has."""
    if size > memory_bytes():
        raise HostError(f"{what} takes {size} bytes, more than this machine's memory")


@functools.cache
def _compiler() -> ModuleType | None:
    """What makes kernels when a Program runs; None on a board, which has no LLVM."""
    try:
        return importlib.import_module("celosia.compiler.cpu.dynamic")
    except ModuleNotFoundError:  # of that module itself, or of LLVM
        return None


def needs_compiler(op: HostOp) -> str:
    """Why `op` cannot run where there is no LLVM; "" where it can."""
    from celosia.compiler.cpu.hostops import HOST

    if (op.domain, op.op) not in HOST:
        return str(op.fail("its shapes are known only at run time, when a board cannot compile it any more"))
    return next(filter(None, (needs_compiler(inner) for body in bodies(op) for inner in body.ops)), "")


def execute(op: HostOp, values: Mapping[str, Value]) -> list[Value]:
    """The outputs of `op`, given what its inputs (and its subgraphs' captured values) are. Raises HostError."""
    from celosia.compiler.cpu.hostops import FIRST, HOST

    args = [values[name] if name else None for name in op.inputs]
    function = HOST.get((op.domain, op.op))
    compiler = None if op.op in FIRST else _compiler()
    try:
        if compiler is not None and compiler.has_kernel(op):
            try:
                return list(compiler.by_kernel(op, args))
            except compiler.Unsupported:
                if function is None:
                    raise
        if function is None:
            raise op.fail(
                "there is no such operator" + (f" in domain {op.domain!r}" if op.domain else "")
                if compiler is not None
                else "its shapes are known only at run time, and here is no LLVM to compile it for them"
            )
        result = function(op, *args) if not any(bodies(op)) else function(op, *args, outer=values)
    except HostError:
        raise
    except MemoryError:
        raise op.fail("there is not enough memory") from None
    except Exception as error:  # numpy's errors for impossible shapes, of many classes
        raise op.fail(f"{error} (inputs {', '.join(map(describe, args))})") from error
    results = list(result) if isinstance(result, tuple) else [result]
    if len(results) < op.wanted:
        raise op.fail(f"it has no output {len(results)}")
    return [np.asarray(r, order="C") if isinstance(r, (np.ndarray, np.generic)) else r for r in results]


def describe(value: Value) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    return "none" if value is None else f"a sequence of {len(value)}"
