"""Operations of the host runtime: operators with their subgraphs, the errors of both, and how much memory there is."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program.dtypes import numpy_dtype
from celosia.plain import Sentence

Array = NDArray[Any]
Value = Any
"""An array, a list of values (a sequence), or None (an empty optional)."""
DOMAINS = ("", "ai.onnx", "com.microsoft", "celosia")
"""Domains whose operators ops holds."""
MAX_SENTENCE = 600
"""Characters of an error: a model may hold lists and texts of any length, which errors quote."""


def clipped(sentence: str) -> str:
    """`sentence` on one line, without its middle where it is long."""
    line = " ".join(sentence.split())
    half = MAX_SENTENCE // 2
    return line if len(line) <= MAX_SENTENCE else f"{line[:half]} ... {line[-half:]}"


class HostError(Sentence, ValueError):
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
        """The attribute, or `default`."""
        return self.attrs.get(name, default)

    @property
    def label(self) -> str:
        """Operator and name, for errors."""
        return f"{self.op} ({self.name or next(filter(None, self.outputs), '')})"

    def fail(self, why: str) -> HostError:
        """A HostError that names the operator."""
        return HostError(f"{self.label}: {why}")

    @property
    def wanted(self) -> int:
        """How many outputs."""
        return len(self.outputs)


@dataclass(frozen=True)
class Body:
    """A subgraph: what it takes, constants, operators in order, what it returns, and what it reads from outside.

    types: element type and shape of what it returns, as far as the model says; sizes that are open are 0.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: dict[str, Array] = field(repr=False)
    ops: tuple[HostOp, ...]
    captured: tuple[str, ...]
    types: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def nothing(self, output: int) -> Array:
        """A list of that output, of which there is none."""
        kind, dims = self.types[output] if output < len(self.types) else ("float32", ())
        return np.zeros((0, *dims), numpy_dtype(kind))


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


def describe(value: Value) -> str:
    """Type and shape, for messages."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    return "none" if value is None else f"a sequence of {len(value)}"
