"""torch.compile(model, backend="celosia"): Dynamo's graphs run as Programs.

Dynamo cuts a function into graphs, and what it cannot trace between them runs in Python as ever. A graph is compiled
when it is first called, once for each combination of shapes and types. Parameters and buffers are constants of the
Program, which is made again when they have changed. Parts that cannot be exported stay with PyTorch, and a warning
names them.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.traceback import preserve_node_meta

from celosia.compiler.compile import compile as compile_model
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.program import Program
from celosia.driver.runtime import Runtime
from celosia.driver.show.progress import Stages
from celosia.driver.torch.export import (
    ExportError,
    TorchError,
    UnknownOperator,
    require_all_pairs,
    require_pure,
    silence_exporters,
    trace,
    write_onnx,
)
from celosia.driver.torch.parts import is_eager, split
from celosia.hw.spec.config import Config

Array = NDArray[Any]
Compute = Callable[..., Any]
"""Function from the free tensors of a graph to its results."""
log = logging.getLogger("celosia.torch")


@dataclass(frozen=True)
class BackendOptions:
    """Options of `torch.compile(..., options={...})`.

    config, accelerator, check: as of `celosia.compile`. device, threads: as of `Runtime`. programs: a list to which
    each Program is added as it is made, to see what ran where. quiet: nothing is said of progress on standard error.
    """

    config: str | Config = "pynq"
    accelerator: bool = True
    check: bool = True
    device: str = "functional"
    threads: int | None = None
    programs: list[Program] | None = None
    quiet: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> BackendOptions:
        """Parse the options. ValueError for an unknown name."""
        names = [field.name for field in fields(cls)]
        for name in options or {}:
            if name not in names:
                raise ValueError(f"backend celosia has no option {name!r}; its options are {', '.join(names)}")
        return cls(**(options or {}))


def celosia(graph: GraphModule, example_inputs: list[Any], options: Mapping[str, Any] | None = None) -> CompiledGraph:
    """Entry point of Dynamo: return a callable for `graph`. ValueError for an unknown option."""
    places = enumerate(graph.graph.find_nodes(op="placeholder"))
    fixed = [i for i, node in places if "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})]
    return CompiledGraph(graph, BackendOptions.of(options), fixed, *_traced_origin())


@dataclass
class GraphOrigin:
    """Source of graphs: a module or a function. compiled: the pieces of code that a graph was compiled of, which are
    several where Python runs between graphs. told: warnings already given.
    """

    name: str
    compiled: set[CodeType | None] = field(default_factory=set)
    told: set[str] = field(default_factory=set)


_origins: WeakKeyDictionary[Any, GraphOrigin] = WeakKeyDictionary()


def _traced_origin() -> tuple[GraphOrigin, CodeType | None]:
    """Origin and code of what Dynamo is tracing."""
    try:
        frame = InstructionTranslator.current_tx()
    except AttributeError:  # a graph from elsewhere
        return GraphOrigin("a graph"), None
    code = frame.f_code
    module = next((x for x in frame.f_locals.values() if isinstance(x, torch.nn.Module)), None)
    name = re.sub(r"torch_dynamo_resume_in_(\w+)_at_\d+", r"\1", code.co_qualname)
    origin = GraphOrigin(name if module is None else type(module).__name__)
    return _origins.setdefault(code if module is None else module, origin), code


@dataclass(frozen=True)
class SpecialisedGraph:
    """A graph compiled for one combination of shapes. run: returns results for arguments. fixed: the parameters, and
    their versions, whose contents it holds.
    """

    run: Callable[..., tuple[Any, ...]]
    fixed: tuple[tuple[torch.Tensor, int], ...] = ()

    def holds(self, fixed: Sequence[torch.Tensor]) -> bool:
        """Whether the parameters are what they were: the same memory, which `fixed` keeps from being used again, and
        not written to as far as PyTorch counts it (not under inference_mode, nor through `.data`).
        """
        return all(x.data_ptr() == old.data_ptr() and _memory_version(x) == v for x, (old, v) in zip(fixed, self.fixed))


@dataclass(frozen=True)
class Plain:
    """A result that is no tensor."""

    value: Any


class CompiledGraph:
    """Calls `graph` through Runtimes. fixed: which of its arguments are parameters. Raises TorchError where gradients
    are wanted, or a tensor is not the CPU's.
    """

    def __init__(
        self,
        graph: GraphModule,
        options: BackendOptions,
        fixed: Sequence[int],
        origin: GraphOrigin,
        code: CodeType | None,
    ) -> None:
        self.graph, self.options, self.fixed, self.origin, self.code = graph, options, fixed, origin, code
        self.owned = [*graph.parameters(), *graph.buffers()]
        self.scalars = {i for i, node in enumerate(graph.graph.find_nodes(op="placeholder")) if _is_scalar(node)}
        self.cache: dict[tuple[Any, ...], SpecialisedGraph] = {}

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        if self.scalars:
            arguments = tuple(x.numpy(force=True)[()] if i in self.scalars else x for i, x in enumerate(arguments))
        self._require_inference(arguments)
        key = tuple(_key_part(x) for x in arguments)
        fixed = [*(arguments[i] for i in self.fixed), *self.owned]
        cached = self.cache.get(key)
        if cached is None or not cached.holds(fixed):
            with Stages(self.options.quiet) as say:
                self._log_compilation(say, arguments, is_known=cached is not None)
                cached = self.cache[key] = self._specialise(arguments, fixed)
        return cached.run(*arguments)

    def _log_compilation(self, say: Stages, arguments: tuple[Any, ...], is_known: bool) -> None:
        """Say what is compiled, and why it is again: for good where it is, else while it lasts."""
        again = self.code in self.origin.compiled
        self.origin.compiled.add(self.code)
        shapes = [str(tuple(arguments[i].shape)) for i in self._free_positions(arguments)]
        reason = (
            "as its parameters have changed" if is_known else f"for shape{'s' * (len(shapes) > 1)} {', '.join(shapes)}"
        )
        say(f"celosia: compiling {self.origin.name}{' again' * again} {reason}", line=again)

    def _free_positions(self, arguments: tuple[Any, ...]) -> list[int]:
        return [i for i, x in enumerate(arguments) if isinstance(x, torch.Tensor) and i not in self.fixed]

    def _require_inference(self, arguments: tuple[Any, ...]) -> None:
        """Raise TorchError where gradients are needed."""
        tensors = [x for x in (*arguments, *self.owned) if isinstance(x, torch.Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise TorchError(
                "backend celosia computes no gradients; call the compiled model under torch.no_grad() or "
                "torch.inference_mode()"
            )
        for x in tensors:
            if x.device.type != "cpu":
                raise TorchError(f"backend celosia takes tensors of the CPU, and one is on {x.device}; call .cpu()")

    def _specialise(self, arguments: tuple[Any, ...], fixed: Sequence[torch.Tensor]) -> SpecialisedGraph:
        """Compile the graph for the shapes of `arguments`."""
        free = self._free_positions(arguments)
        with torch.inference_mode(False), torch.no_grad():
            bound = _Bound(self.graph, arguments, free).eval()
            try:
                exported = trace(bound, tuple(torch.zeros_like(arguments[i]) for i in free))
                require_pure(exported)
                compute = self._compile_around_unknown(exported)
            except (ExportError, ModelError) as error:
                reason = str(error).replace(_Bound.__name__, self.origin.name)
                self._warn_once(f"{self.origin.name} to PyTorch: {reason}")
                return SpecialisedGraph(lambda *arguments: _result_row(self.graph(*arguments)))
        places = iter(range(len(bound.results)))
        outputs = [next(places) if isinstance(x, torch.Tensor) else Plain(x) for x in bound.results]

        def run(*arguments: Any) -> tuple[Any, ...]:
            results = compute(*(arguments[i] for i in free))
            return tuple(x.value if isinstance(x, Plain) else results[x] for x in outputs)

        return SpecialisedGraph(run, tuple((x.detach(), _memory_version(x)) for x in fixed))

    def _compile_around_unknown(self, exported: ExportedProgram) -> Compute:
        """Compile to a Program; where torch.onnx does not know an operator, to Programs before and after it."""
        try:
            return self._compile_part(exported)
        except UnknownOperator as error:
            with silence_exporters():
                parts = split(exported, error.operator)
            if parts is None:
                raise
            self._warn_once(
                f"{error.operator} of {self.origin.name} to PyTorch, as torch.onnx does not know it; write that part "
                "with other operators, and it is in the Program"
            )
        options = replace(self.options, quiet=True)
        for node in parts.graph.find_nodes(op="call_module"):
            if not is_eager(node.target):
                fixed = [i for i, x in enumerate(node.args) if x.op == "get_attr"]
                part = CompiledGraph(getattr(parts, node.target), options, fixed, self.origin, self.code)
                setattr(parts, node.target, _Part(part))
        compute: Compute = parts
        return compute

    def _compile_part(self, exported: ExportedProgram) -> Compute:
        """Compile an exported graph to a Program, and return the function that runs it."""
        proto = write_onnx(exported, None, None)
        require_all_pairs(exported, proto)
        options = self.options
        program = compile_model(proto, options.config, accelerator=options.accelerator, check=options.check)
        program.name = self.origin.name
        macs = program.macs_accelerator, program.macs_total
        log.info("compiled a graph: %s of %s multiplications on the accelerator", *macs)
        if options.programs is not None:
            options.programs.append(program)
        runtime = Runtime(program, options.device, threads=options.threads)
        names = [tensor.name for tensor in program.inputs]

        def compute(*tensors: torch.Tensor) -> list[torch.Tensor]:
            feed = dict(zip(names, map(to_numpy, tensors), strict=True))
            outputs = runtime.run(feed, trace=False).outputs
            return [to_torch(outputs[tensor.name]) for tensor in program.outputs]

        return compute

    def _warn_once(self, sentence: str) -> None:
        """Warn once about each thing."""
        if sentence not in self.origin.told:
            self.origin.told.add(sentence)
            warnings.warn(f"backend celosia leaves {sentence}", stacklevel=2)


class _Part(torch.nn.Module):  # type: ignore[misc]
    """A part of a graph that runs as its own Programs."""

    def __init__(self, compiled: CompiledGraph) -> None:
        super().__init__()
        self.compiled = compiled
        (result,) = compiled.graph.graph.output_node().args
        self.alone = isinstance(result, Node)

    def forward(self, *arguments: Any) -> Any:
        results = self.compiled(*arguments)
        return results[0] if self.alone else results


class _Bound(torch.nn.Module):  # type: ignore[misc]
    """`graph` as a module of its free inputs alone: parameters are its buffers, numbers are fixed. It returns tensors
    only; `results` are all that the graph returned when it was traced. The trace keeps the modules' names.
    """

    results: tuple[Any, ...] = ()

    def __init__(self, graph: GraphModule, arguments: tuple[Any, ...], free: list[int]) -> None:
        super().__init__()
        self.graph, self.free = graph, free
        self.numbers = {i: x for i, x in enumerate(arguments) if not isinstance(x, torch.Tensor)}
        self.names = [f"{node.name}_" for node in graph.graph.find_nodes(op="placeholder")]  # names in error messages
        for i, x in enumerate(arguments):
            if isinstance(x, torch.Tensor) and i not in free:
                self.register_buffer(self.names[i], x.detach())

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Run the graph node by node; return its tensors and keep all results."""
        values = dict(zip(self.free, inputs)) | self.numbers
        arguments = (values[i] if i in values else getattr(self, name) for i, name in enumerate(self.names))
        with preserve_node_meta():
            results = Interpreter(self.graph).run(*arguments)
        self.results = _result_row(results)
        return tuple(x for x in self.results if isinstance(x, torch.Tensor))


def _is_scalar(node: Node) -> bool:
    """Whether an argument is a Python number that Dynamo holds in a tensor, as it does where sizes are dynamic."""
    return bool(node.users) and all((user.op, user.target) == ("call_method", "item") for user in node.users)


def _result_row(results: Any) -> tuple[Any, ...]:
    """Results that a graph returns: of Dynamo's all, of a part the one alone."""
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _key_part(x: Any) -> Any:
    """Part of a cache key: shape and type of a tensor, a number itself."""
    return (x.dtype, tuple(x.shape)) if isinstance(x, torch.Tensor) else x


def _memory_version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version


def to_numpy(x: torch.Tensor) -> Array:
    """View a tensor as numpy, without a copy where it is contiguous."""
    x = x.detach().resolve_conj().resolve_neg().contiguous()
    if x.dtype != torch.bfloat16:
        array: Array = x.numpy()
        return array
    return np.asarray(x.view(torch.int16).numpy().view(ml_dtypes.bfloat16))


def to_torch(array: Array) -> torch.Tensor:
    """View an array as a tensor that shares its memory; bfloat16, which numpy has not, through its bits."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.asarray(array))
