"""torch.compile(model, backend="celosia"): Dynamo's graphs run as Programs.

Dynamo cuts a function into graphs; code between them that it cannot trace runs in Python as usual. A graph is compiled
at its first call, once for each combination of shapes and types. Parameters and buffers are constants of the Program,
which is compiled again when they have changed. Parts that cannot be exported stay with PyTorch, and a warning names
them.
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

    config, accelerator, check: as `celosia.compile` takes them. device, threads: as `Runtime` takes them. programs: a
    list to which each compiled Program is appended, so that the caller can inspect it. quiet: no progress is shown on
    standard error.
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
    """Entry point of Dynamo: return a callable for `graph`. ValueError for an unknown option.

    example_inputs: not used; arguments of the first call decide the shapes.
    """
    placeholders = enumerate(graph.graph.find_nodes(op="placeholder"))
    fixed = [i for i, node in placeholders if "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})]
    return CompiledGraph(graph, BackendOptions.of(options), fixed, *_traced_origin())


@dataclass
class GraphOrigin:
    """The module or function that graphs come from.

    name: for messages. compiled: code objects whose graphs were compiled; several where Python runs between graphs.
    given_warnings: warnings already given.
    """

    name: str
    compiled: set[CodeType | None] = field(default_factory=set)
    given_warnings: set[str] = field(default_factory=set)


_origins: WeakKeyDictionary[Any, GraphOrigin] = WeakKeyDictionary()
"""Origins by module or code object, so that a warning is given once for each."""


def _traced_origin() -> tuple[GraphOrigin, CodeType | None]:
    """Return the origin, and the code object, of the frame that Dynamo is tracing."""
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
    """A graph compiled for one combination of shapes.

    run: returns the results for arguments. fixed: the parameters that are constants in it, with their versions.
    """

    run: Callable[..., tuple[Any, ...]]
    fixed: tuple[tuple[torch.Tensor, int], ...] = ()

    def is_valid_for(self, fixed: Sequence[torch.Tensor]) -> bool:
        """Whether the parameters `fixed` have not changed since: equal memory (kept alive by `self.fixed`) and version.

        PyTorch does not count writes under inference_mode or through `.data`.
        """
        return all(
            x.data_ptr() == old.data_ptr() and _memory_version(x) == version
            for x, (old, version) in zip(fixed, self.fixed)
        )


@dataclass(frozen=True)
class ConstantResult:
    """A result of a graph that is no tensor, which is constant for a combination of shapes."""

    value: Any


class CompiledGraph:
    """Runs `graph` as Programs, and compiles them when it is called with new shapes or changed parameters.

    fixed: numbers of the arguments that are parameters. owned: parameters that the graph holds itself. scalars: numbers
    of the arguments that are Python numbers in tensors. cache: compiled graphs by shapes and types. Raises TorchError
    where gradients are needed, or a tensor is not on the CPU.
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
        shapes_key = tuple(_key_part(x) for x in arguments)
        fixed = [*(arguments[i] for i in self.fixed), *self.owned]
        cached = self.cache.get(shapes_key)
        if cached is None or not cached.is_valid_for(fixed):
            with Stages(self.options.quiet) as say:
                self._log_compilation(say, arguments, is_known=cached is not None)
                cached = self.cache[shapes_key] = self._specialise(arguments, fixed)
        return cached.run(*arguments)

    def _log_compilation(self, say: Stages, arguments: tuple[Any, ...], is_known: bool) -> None:
        """Report that the graph is compiled, and why.

        A repeated compilation stays on the screen, a first one disappears.
        """
        is_repeated = self.code in self.origin.compiled
        self.origin.compiled.add(self.code)
        shapes = [str(tuple(arguments[i].shape)) for i in self._free_positions(arguments)]
        reason = (
            "as its parameters have changed" if is_known else f"for shape{'s' * (len(shapes) > 1)} {', '.join(shapes)}"
        )
        say(f"celosia: compiling {self.origin.name}{' again' * is_repeated} {reason}", line=is_repeated)

    def _free_positions(self, arguments: tuple[Any, ...]) -> list[int]:
        """Return the numbers of the arguments that are inputs of the Program: tensors that are no parameters."""
        return [i for i, x in enumerate(arguments) if isinstance(x, torch.Tensor) and i not in self.fixed]

    def _require_inference(self, arguments: tuple[Any, ...]) -> None:
        """Raise TorchError where gradients are needed, or a tensor is not on the CPU."""
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
        """Compile the graph for the shapes of `arguments`.

        A graph that cannot be exported runs in PyTorch, with a warning.
        """
        free = self._free_positions(arguments)
        with torch.inference_mode(False), torch.no_grad():
            bound = _BoundGraph(self.graph, arguments, free).eval()
            try:
                exported = trace(bound, tuple(torch.zeros_like(arguments[i]) for i in free))
                require_pure(exported)
                compute = self._compile_around_unknown(exported)
            except (ExportError, ModelError) as error:
                reason = str(error).replace(_BoundGraph.__name__, self.origin.name)
                self._warn_once(f"{self.origin.name} to PyTorch: {reason}")
                return SpecialisedGraph(lambda *arguments: _results_as_tuple(self.graph(*arguments)))
        positions = iter(range(len(bound.results)))
        result_sources = [next(positions) if isinstance(x, torch.Tensor) else ConstantResult(x) for x in bound.results]

        def run(*arguments: Any) -> tuple[Any, ...]:
            results = compute(*(arguments[i] for i in free))
            return tuple(x.value if isinstance(x, ConstantResult) else results[x] for x in result_sources)

        return SpecialisedGraph(run, tuple((x.detach(), _memory_version(x)) for x in fixed))

    def _compile_around_unknown(self, exported: ExportedProgram) -> Compute:
        """Compile to a Program; if torch.onnx does not know an operator, to Programs before and after it.

        Return the function that runs them.
        """
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
                setattr(parts, node.target, _CompiledPart(part))
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
            """Run the Program on the graph's inputs."""
            feed = dict(zip(names, map(to_numpy, tensors), strict=True))
            outputs = runtime.run(feed, trace=False).outputs
            return [to_torch(outputs[tensor.name]) for tensor in program.outputs]

        return compute

    def _warn_once(self, sentence: str) -> None:
        """Warn once for each origin that "backend celosia leaves `sentence`".

        sentence: for example "MyModule to PyTorch: it has no tensor inputs".
        """
        if sentence not in self.origin.given_warnings:
            self.origin.given_warnings.add(sentence)
            warnings.warn(f"backend celosia leaves {sentence}", stacklevel=2)


class _CompiledPart(torch.nn.Module):  # type: ignore[misc]
    """A part of a graph that runs as its own Programs, as a module in place of the original part."""

    def __init__(self, compiled: CompiledGraph) -> None:
        super().__init__()
        self.compiled = compiled
        (result,) = compiled.graph.graph.output_node().args
        self.has_one_result = isinstance(result, Node)

    def forward(self, *arguments: Any) -> Any:
        results = self.compiled(*arguments)
        return results[0] if self.has_one_result else results


class _BoundGraph(torch.nn.Module):  # type: ignore[misc]
    """`graph` as a module for `trace`, which takes only the free inputs: parameters are buffers, numbers constants.

    It returns the tensors among the graph's results. results: all results of the last run, of which callers take those
    that are no tensors. A trace keeps the names of the original modules.
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
        self.results = _results_as_tuple(results)
        return tuple(x for x in self.results if isinstance(x, torch.Tensor))


def _is_scalar(node: Node) -> bool:
    """Whether an argument is a Python number that Dynamo has put into a tensor, as it does for dynamic sizes."""
    return bool(node.users) and all((user.op, user.target) == ("call_method", "item") for user in node.users)


def _results_as_tuple(results: Any) -> tuple[Any, ...]:
    """Return the results of a graph as a tuple: a part of a split graph may return a single value."""
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _key_part(x: Any) -> Any:
    """Return an argument's part of the cache key: element type and shape of a tensor, else the value itself."""
    return (x.dtype, tuple(x.shape)) if isinstance(x, torch.Tensor) else x


def _memory_version(x: torch.Tensor) -> int:
    """Return PyTorch's count of writes to a tensor; 0 for inference tensors, which have none."""
    return 0 if x.is_inference() else x._version


def to_numpy(x: torch.Tensor) -> Array:
    """Return a tensor as a numpy array, without a copy if it is contiguous."""
    x = x.detach().resolve_conj().resolve_neg().contiguous()
    if x.dtype != torch.bfloat16:
        array: Array = x.numpy()
        return array
    return np.asarray(x.view(torch.int16).numpy().view(ml_dtypes.bfloat16))


def to_torch(array: Array) -> torch.Tensor:
    """Return an array as a tensor that shares its memory; bfloat16, which numpy does not have, through its bits."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.asarray(array))
