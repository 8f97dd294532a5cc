"""torch.compile(model, backend="celosia"): Dynamo's graphs run as Programs.

Dynamo cuts a function into graphs, and what it cannot trace between them runs in Python as ever. A graph is compiled
when it is first called, once for each combination of shapes and types. Parameters and buffers are constants of the
Program, which is made again when they have changed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx import GraphModule

from celosia.compiler.compile import compile as compile_model
from celosia.compiler.program import Program
from celosia.driver.runtime import Runtime
from celosia.driver.torch.export import TorchError, require_all_pairs, require_pure, trace, written
from celosia.hw.config import Config

Array = NDArray[Any]
log = logging.getLogger("celosia.torch")


@dataclass(frozen=True)
class Options:
    """What `torch.compile(..., options={...})` may hold.

    config, accelerator, check: as of `celosia.compile`. device, threads: as of `Runtime`. programs: a list to which
    each Program is added as it is made, to see what ran where.
    """

    config: str | Config = "pynq"
    accelerator: bool = True
    check: bool = True
    device: str = "functional"
    threads: int | None = None
    programs: list[Program] | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Options:
        names = [field.name for field in fields(cls)]
        for name in given or {}:
            if name not in names:
                raise ValueError(f"backend celosia has no option {name!r}; its options are {', '.join(names)}")
        return cls(**(given or {}))


def celosia(graph: GraphModule, example_inputs: list[Any], options: Mapping[str, Any] | None = None) -> CompiledGraph:
    """Dynamo's entry: a callable for `graph`. ValueError for an unknown option."""
    return CompiledGraph(graph, Options.of(options))


@dataclass(frozen=True)
class Specialised:
    """The Program for one combination of shapes. inputs: which argument is which input. outputs: for each result of the
    graph, the name of an output, or what it is where it is no tensor. fixed: the parameters, and their versions, whose
    contents the Program holds.
    """

    runtime: Runtime
    inputs: tuple[tuple[int, str], ...]
    outputs: tuple[str | Plain, ...]
    fixed: tuple[tuple[torch.Tensor, int], ...]

    def holds(self, fixed: Sequence[torch.Tensor]) -> bool:
        """Whether the parameters are what they were: the same memory, which `fixed` keeps from being used again, and
        not written to as far as PyTorch counts it (not under inference_mode, nor through `.data`).
        """
        return all(x.data_ptr() == old.data_ptr() and _version(x) == v for x, (old, v) in zip(fixed, self.fixed))


@dataclass(frozen=True)
class Plain:
    """A result that is no tensor."""

    value: Any


class CompiledGraph:
    """Calls `graph` through Runtimes. Raises TorchError where gradients are wanted, or a tensor is not the CPU's."""

    def __init__(self, graph: GraphModule, options: Options) -> None:
        self.graph, self.options = graph, options
        places = enumerate(graph.graph.find_nodes(op="placeholder"))
        self.fixed = [i for i, node in places if "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})]
        self.owned = [*graph.parameters(), *graph.buffers()]
        self.cache: dict[tuple[Any, ...], Specialised] = {}

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        self._require_inference(arguments)
        key = tuple(_kind(x) for x in arguments)
        fixed = [*(arguments[i] for i in self.fixed), *self.owned]
        found = self.cache.get(key)
        if found is None or not found.holds(fixed):
            found = self.cache[key] = self._specialise(arguments, fixed)
        feed = {name: to_numpy(arguments[i]) for i, name in found.inputs}
        made = found.runtime.run(feed, trace=False).outputs
        return tuple(x.value if isinstance(x, Plain) else to_torch(made[x]) for x in found.outputs)

    def _require_inference(self, arguments: tuple[Any, ...]) -> None:
        tensors = [x for x in (*arguments, *self.owned) if isinstance(x, torch.Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise TorchError(
                "backend celosia computes no gradients; call the compiled model under torch.no_grad() or "
                "torch.inference_mode()"
            )
        for x in tensors:
            if x.device.type != "cpu":
                raise TorchError(f"backend celosia takes tensors of the CPU, and one is on {x.device}; call .cpu()")

    def _specialise(self, arguments: tuple[Any, ...], fixed: Sequence[torch.Tensor]) -> Specialised:
        """Compile the graph for the shapes of `arguments`."""
        free = [i for i, x in enumerate(arguments) if isinstance(x, torch.Tensor) and i not in self.fixed]
        with torch.inference_mode(False), torch.no_grad():
            bound = _Bound(self.graph, arguments, free).eval()
            exported = trace(bound, tuple(torch.zeros_like(arguments[i]) for i in free))
            require_pure(exported)
            proto = written(exported, None, None)
            require_all_pairs(exported, proto)
        options = self.options
        program = compile_model(proto, options.config, accelerator=options.accelerator, check=options.check)
        macs = program.macs_accelerator, program.macs_total
        log.info("compiled a graph: %s of %s multiplications on the accelerator", *macs)
        if options.programs is not None:
            options.programs.append(program)
        names = iter(tensor.name for tensor in program.outputs)
        outputs = tuple(next(names) if isinstance(x, torch.Tensor) else Plain(x) for x in bound.results)
        inputs = tuple(zip(free, (tensor.name for tensor in program.inputs), strict=True))
        runtime = Runtime(program, options.device, threads=options.threads)
        return Specialised(runtime, inputs, outputs, tuple((x.detach(), _version(x)) for x in fixed))


class _Bound(torch.nn.Module):  # type: ignore[misc]
    """`graph` as a module of its free inputs alone: parameters are its buffers, numbers are fixed. It returns tensors
    only; `results` are all that the graph returned when it was traced.
    """

    results: tuple[Any, ...] = ()

    def __init__(self, graph: GraphModule, arguments: tuple[Any, ...], free: list[int]) -> None:
        super().__init__()
        self.graph, self.free = graph, free
        self.numbers = {i: x for i, x in enumerate(arguments) if not isinstance(x, torch.Tensor)}
        self.count = len(arguments)
        for i, x in enumerate(arguments):
            if isinstance(x, torch.Tensor) and i not in free:
                self.register_buffer(f"fixed_{i}", x.detach())

    def forward(self, *inputs: torch.Tensor) -> Any:
        given = dict(zip(self.free, inputs)) | self.numbers
        arguments = (given[i] if i in given else getattr(self, f"fixed_{i}") for i in range(self.count))
        self.results = self.graph(*arguments)
        return tuple(x for x in self.results if isinstance(x, torch.Tensor))


def _kind(x: Any) -> Any:
    """What a Program is made for: shape and type of a tensor, a number itself."""
    return (x.dtype, tuple(x.shape)) if isinstance(x, torch.Tensor) else x


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version


def to_numpy(x: torch.Tensor) -> Array:
    """The same bytes, without a copy where they are in order."""
    x = x.detach().resolve_conj().resolve_neg().contiguous()
    if x.dtype != torch.bfloat16:
        array: Array = x.numpy()
        return array
    return np.asarray(x.view(torch.int16).numpy().view(ml_dtypes.bfloat16))


def to_torch(array: Array) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.asarray(array))
