"""Host operators: what one is (HostOp, Body, RunnableBody), which errors and sizes are reported, and the table HOST.

The modules of hostops/ fill the table with the decorator `host`; import HOST from there, where it is complete.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program.dtypes import ONNX_TYPES, numpy_dtype
from celosia.compiler.program.op_spec import declare_operator
from celosia.plain import Sentence

Array = NDArray[Any]
Value = Any
"""An array, a list of values (a sequence), or None (an empty optional)."""
DOMAINS = ("", "ai.onnx", "com.microsoft", "celosia")
"""Domains of the operators in compiler/ops."""
MAX_SENTENCE = 600
"""Limit of the characters of an error, as it may quote long lists and texts of a model."""


def clip_sentence(sentence: str) -> str:
    """Put `sentence` on one line, and replace its middle by dots where it exceeds MAX_SENTENCE."""
    line = " ".join(sentence.split())
    half = MAX_SENTENCE // 2
    return line if len(line) <= MAX_SENTENCE else f"{line[:half]} ... {line[-half:]}"


class HostError(Sentence, ValueError):
    """An operator that cannot run on its inputs; the message names the node."""

    def __init__(self, sentence: str) -> None:
        super().__init__(clip_sentence(sentence))


@dataclass(frozen=True)
class HostOp:
    """One operator that the host runtime executes.

    op, domain: which operator. name: of its node in the model. inputs, outputs: names of values; "" for one that is
    left out. attrs: attributes as Python values; a subgraph is a Body. opset: version of the domain. key: a digest that
    distinguishes operators with different attributes, for compiled kernels.
    """

    op: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: dict[str, Any]
    opset: int
    key: bytes

    def attr(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or `default` where it is missing."""
        return self.attrs.get(name, default)

    @property
    def label(self) -> str:
        """Operator and name of the node (else of its first output), for errors."""
        return f"{self.op} ({self.name or next(filter(None, self.outputs), '')})"

    def fail(self, why: str) -> HostError:
        """Return a HostError that names the operator and says `why`."""
        return HostError(f"{self.label}: {why}")

    @property
    def wanted(self) -> int:
        """Number of outputs that the node has, which a function must return."""
        return len(self.outputs)


@dataclass(frozen=True)
class Body:
    """A subgraph of a control-flow operator.

    inputs, outputs: names of its values. constants: arrays by name. ops: its operators, in the order in which they run.
    captured: names that it reads from the graph around it. types: element type and shape of its outputs, as far as the
    model says; unknown sizes are 0.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: dict[str, Array] = field(repr=False)
    ops: tuple[HostOp, ...]
    captured: tuple[str, ...]
    types: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class RunnableBody:
    """A subgraph that a control-flow operator can run.

    run: function of the subgraph's inputs that returns its outputs. types: element type and shape of each output, as
    far as they are known; unknown sizes are 0.
    """

    run: Callable[[Sequence[Value]], list[Value]]
    types: tuple[tuple[str, tuple[int, ...]], ...]

    def nothing(self, output: int) -> Array:
        """Return a stack of no values of output `output`: the result of a Scan or Loop without iterations."""
        kind, dims = self.types[output]
        return np.zeros((0, *dims), numpy_dtype(kind))


RunnableBodies = Mapping[str, RunnableBody]
"""The subgraphs of an operator, by the names of its attributes."""


def bodies(op: HostOp) -> Iterable[Body]:
    """Yield the subgraphs in the attributes of `op`."""
    for value in op.attrs.values():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Body):
                yield item


def memory_bytes() -> int:
    """Return the bytes of memory of this machine, or those that this process may use if they are fewer."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return physical if limit == resource.RLIM_INFINITY else min(physical, limit)


def check_size(size: int, owner: str) -> None:
    """Raise HostError, which names `owner`, where `size` bytes exceed this machine's memory."""
    if size > memory_bytes():
        raise HostError(f"{owner} takes {size} bytes, more than this machine's memory")


def describe(value: Value) -> str:
    """Return element type and shape of a value, or the length of a sequence, for messages."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    return "none" if value is None else f"a sequence of {len(value)}"


Function = Callable[..., Any]
"""Function of (op, *inputs) that returns an output or a tuple of outputs.

For an operator with subgraphs it also takes bodies=, its RunnableBodies.
"""

HOST: dict[tuple[str, str], Function] = {}
"""(domain, operator) -> function."""
KNOWN_DOMAINS = (*DOMAINS, "ai.onnx.ml", "ai.onnx.preview.training")
"""Domains whose operators have rows in program/op_spec.py, which are found by the operator's name alone."""


def host(*names: str, domain: str = "", **facts: Any) -> Callable[[Function], Function]:
    """Return a decorator that registers a numpy function for the operators `names` of a domain.

    facts: fields of their OpSpec, which it fills in. The decorator raises TypeError where an operator has a function.
    """

    def register(function: Function) -> Function:
        for name in names:
            if (domain, name) in HOST:
                raise TypeError(f"{name}: defined twice, by {HOST[domain, name].__name__} and {function.__name__}")
            HOST[domain, name] = function
            if domain in KNOWN_DOMAINS:  # a user's operator in a domain of its own may share a name with one of ONNX
                declare_operator(name, domain=domain, **facts)
        return function

    return register


def numpy_type(onnx_type: int) -> np.dtype[Any]:
    """Return the numpy type of an ONNX type; strings are objects."""
    return numpy_dtype(ONNX_TYPES[onnx_type])


def int_list(value: Any) -> list[int]:
    """Convert an attribute or array to a list of integers."""
    return [int(v) for v in np.asarray(value).reshape(-1)]
