"""Export a PyTorch module as an ONNX model in memory, with every quantise and dequantise that it has.

torch.export traces it, torch.onnx writes it down without its optimiser, which takes quantisations for arithmetic that
it may move. Features that ONNX would drop in silence (writes to buffers, random numbers, narrower ranges) are errors.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from celosia.compiler.compile import compile as compile_model
from celosia.compiler.graph.importing.dimensions import input_values, open_axes, open_inputs
from celosia.compiler.graph.importing.specialise import open_free_sizes, why_fixed
from celosia.compiler.graph.values import new_constant
from celosia.compiler.program import Program
from celosia.driver.torch.decompose import decompose_fused
from celosia.driver.torch.fake_quantize import PAIRS, UnsettledError, settle_observers
from celosia.hw.spec.config import Config
from celosia.plain import Sentences

NAMES = "pkg.torch.onnx.name_scopes"
"""Key under which torch.onnx notes the operators of PyTorch that an operator of ONNX comes from."""


UNKNOWN = re.compile(r"translating node %(\w+) : .*?target=torch\.ops\.([\w.]+)\]")
"""Pattern of torch.onnx's error for an operator that it cannot write."""
UNREGISTERED = "which is not a known type"
"""Pattern of torch.export's error for a result of a class of the caller's."""


class TorchError(Sentences, ValueError):
    """A module that cannot be taken over from PyTorch; one sentence that names its part and the way out."""


class ExportError(TorchError):
    """Failure of PyTorch's own exporters."""


class UnknownOperator(ExportError):
    """An operator that torch.onnx cannot write. operator: its name, as "aten.linalg_qr.default"."""

    def __init__(self, operator: str) -> None:
        super().__init__(
            f"torch.onnx cannot write the module: it does not know {operator}; compute that part with other operators, "
            "or outside of the module"
        )
        self.operator = operator


def from_torch(
    module: torch.nn.Module | ExportedProgram, example_inputs: Any, config: str | Config = "pynq", *,
    kwargs: Mapping[str, Any] | None = None, input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None, dynamic_shapes: Any = None, **options: Any,
) -> Program:  # fmt: skip
    """Compile a PyTorch module for the accelerator `config`.

    module: in evaluation mode, or what PT2E's `convert_pt2e` or `torch.export.export` returns. example_inputs: a tensor
    or a tuple of its arguments, of the shapes and types that the Program takes. kwargs: arguments by name.
    input_names, output_names: of the Program, in order; by default those of the arguments and of PyTorch's operators.
    dynamic_shapes: which sizes are open, as `torch.export.export` takes them. The Program leaves open what a Program
    can (docs/shapes.md); the others are those of `shapes`, or of the example. For any size give `Runtime` what
    `to_onnx` returns.
    options: those of `celosia.compile`.

    Raises TorchError, and what `celosia.compile` raises.

    >>> program = from_torch(torch.nn.Linear(4, 3).eval(), torch.zeros(2, 4), "tiny")
    >>> [tensor.shape for tensor in (*program.inputs, *program.outputs)]
    [(2, 4), (2, 3)]
    >>> batch = {0: torch.export.Dim("batch")}
    >>> program = from_torch(torch.nn.Linear(4, 3).eval(), torch.zeros(2, 4), "tiny", dynamic_shapes=(batch,))
    >>> program.shape_text(program.inputs[0])
    'float32[n, 4]'
    """
    module = getattr(module, "_orig_mod", module)  # the module inside torch.compile's result
    exported = _run_torch_export(module, example_inputs, kwargs, dynamic_shapes)
    proto = _export_onnx(exported, module, input_names, output_names)
    if open_inputs(proto):
        example = (example_inputs, dict(kwargs or {})) if tree_leaves(example_inputs) else exported.example_inputs
        options["shapes"] = _choose_shapes(proto, example, options.get("shapes") or {})
    program = compile_model(proto, config, **options)
    program.name = proto.graph.name
    return program


def to_onnx(
    module: torch.nn.Module | ExportedProgram, example_inputs: Any = (), *, kwargs: Mapping[str, Any] | None = None,
    input_names: Sequence[str] | None = None, output_names: Sequence[str] | None = None, dynamic_shapes: Any = None,
) -> onnx.ModelProto:  # fmt: skip
    """Return the ONNX model of a module, see `from_torch`, which also `onnx.save` and `Runtime` take. TorchError."""
    module = getattr(module, "_orig_mod", module)  # the module inside torch.compile's result
    return _export_onnx(
        _run_torch_export(module, example_inputs, kwargs, dynamic_shapes), module, input_names, output_names
    )


def _run_torch_export(
    module: torch.nn.Module | ExportedProgram, example_inputs: Any, kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
) -> ExportedProgram:  # fmt: skip
    """Run torch.export. Raises ExportError in place of its errors."""
    if not isinstance(module, ExportedProgram):
        _require_tensors(module, example_inputs)
        return trace(module, example_inputs, kwargs, dynamic_shapes)
    if dynamic_shapes is not None:
        raise TorchError("the module is exported already; give dynamic_shapes to torch.export.export")
    return module


def _require_tensors(module: Any, example_inputs: Any) -> None:
    """Raise TorchError for modules and examples that torch.export does not take."""
    if isinstance(module, torch.jit.ScriptModule):
        raise TorchError("a module of torch.jit has its operators no more; give the module that it was made of")
    if isinstance(example_inputs, Mapping):
        raise TorchError("example_inputs is a tensor, or a tuple of arguments; give those with names as kwargs={...}")
    if any(isinstance(leaf, np.ndarray) for leaf in tree_leaves(example_inputs)):
        raise TorchError("example_inputs holds an array of numpy's; give torch.from_numpy(array)")


def _export_onnx(
    program: ExportedProgram, module: Any, input_names: Sequence[str] | None, output_names: Sequence[str] | None
) -> onnx.ModelProto:
    """Export `program` to an ONNX model, with the given names of inputs and outputs."""
    require_pure(program)
    proto = write_onnx(program, input_names, output_names)
    require_all_pairs(program, proto)
    named = isinstance(module, (ExportedProgram, GraphModule))
    proto.graph.name = _module_class(program) if named else type(module).__name__
    _settle_sizes(proto)
    return proto


# Open sizes ------------------------------------------------------------------------------------------------------


def _settle_sizes(proto: onnx.ModelProto) -> None:
    """Give sizes that torch.export found to be numbers, where the caller left them open, as numbers; and say so."""
    for value in proto.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param.isdigit():
                dim.dim_value = int(dim.dim_param)
                _warn_fixed_size(value.name, axis, dim.dim_value, "torch.export found that the module takes no other")


def _choose_shapes(proto: onnx.ModelProto, example: Any, given_shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the shapes to compile for: those of the example, open where a Program can leave them so, and
    `given_shapes`. A warning names sizes that were to be open and are not."""
    tensors = [leaf for leaf in tree_leaves(example) if isinstance(leaf, torch.Tensor)]
    full_shapes = {name: tuple(tensor.shape) for name, tensor in zip(input_values(proto), tensors, strict=True)}
    full_shapes = {name: full_shapes[name] for name in open_inputs(proto)}
    shapes = open_free_sizes(proto, full_shapes)
    fixed = {
        place for place in open_axes(proto) if place[0] not in given_shapes and shapes[place[0]][place[1]] is not None
    }
    reasons = why_fixed(proto, full_shapes) if fixed else {}
    for name, axis in sorted(fixed):
        reason = f"{reasons[name, axis]}; for any size, give Runtime what celosia.driver.torch.export.to_onnx returns"
        _warn_fixed_size(name, axis, full_shapes[name][axis], reason)
    return {**shapes, **given_shapes}


def _warn_fixed_size(name: str, axis: int, size: int, reason: str) -> None:
    warnings.warn(
        f"dimension {axis} of input {name!r} is {size}, and not open as dynamic_shapes has it: {reason}", stacklevel=4
    )


# The way to ONNX -------------------------------------------------------------------------------------------------


def trace(
    module: torch.nn.Module, example_inputs: Any, kwargs: Mapping[str, Any] | None = None, dynamic_shapes: Any = None
) -> ExportedProgram:
    """Trace `module` with torch.export. TorchError."""
    if not isinstance(module, torch.nn.Module):
        raise TorchError(f"a module of PyTorch is needed, not {type(module).__name__}")
    if module.training and not isinstance(module, GraphModule):  # PT2E removes eval() from a GraphModule
        raise TorchError(f"{type(module).__name__} is in training mode; call its eval() before")
    arguments = tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
    for tensor in (*module.parameters(), *module.buffers(), *tree_leaves((arguments, kwargs))):
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
            raise TorchError(
                f"{type(module).__name__} and its example are to be on the CPU, and a tensor is on {tensor.device}; "
                "call .cpu() of both"
            )
    try:
        with (
            silence_exporters(), torch.no_grad(),
            contextlib.redirect_stderr(io.StringIO()),  # torch.export prints the graph
            settle_observers(module),
        ):  # fmt: skip
            try:
                return torch.export.export(module, arguments, dict(kwargs or {}), dynamic_shapes=dynamic_shapes)
            except Exception as error:
                if UNREGISTERED not in str(error):
                    raise
                _register_dataclasses(module(*arguments, **(kwargs or {})))
            return torch.export.export(module, arguments, dict(kwargs or {}), dynamic_shapes=dynamic_shapes)
    except UnsettledError as error:
        raise TorchError(str(error)) from error
    except Exception as error:  # torch raises many classes
        reason = next(
            (line.strip(" -") for line in str(error).splitlines() if line.startswith("  - ")), _first_line(error)
        )
        raise ExportError(f"torch.export cannot trace {type(module).__name__}: {reason}") from error


def _register_dataclasses(values: Any) -> None:
    """Register with torch.export the dataclasses that a module returned: their fields are outputs."""
    for leaf in tree_leaves(values):
        if is_dataclass(leaf):
            torch.export.register_dataclass(type(leaf))


def require_pure(program: ExportedProgram) -> None:
    """Raise TorchError where `program` does something that an ONNX model cannot: keep state, or draw random numbers."""
    with silence_exporters():
        program = program.run_decompositions({})  # with writes as further outputs
    signature = program.graph_signature
    written = (*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values())
    if written:
        raise TorchError(
            f"the module writes to {written[0]!r}, which a Program cannot; call eval(), or return the value"
        )
    for node in _all_operators(program):
        if _is_random(node):
            raise TorchError(f"{node.name} ({node.target}) draws random numbers; call eval(), or pass them as an input")


def _is_random(node: Node) -> bool:
    """Whether an operator draws numbers: dropout outside of training does not."""
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    schema = node.target._schema.arguments
    arguments = {argument.name: argument.default_value for argument in schema} | dict(
        zip((argument.name for argument in schema), node.args)
    )
    arguments |= node.kwargs
    return arguments.get("train", arguments.get("training")) is not False and arguments.get("dropout_p") != 0.0


def write_onnx(
    program: ExportedProgram, input_names: Sequence[str] | None, output_names: Sequence[str] | None
) -> onnx.ModelProto:
    """Write `program` as ONNX. TorchError."""
    for spec in program.graph_signature.output_specs:
        if isinstance(spec.arg, ConstantArgument) and spec.arg.value is not None:
            raise TorchError(f"the module returns {spec.arg.value!r}, which is no tensor; return tensors alone")
    _require_reals(program)
    try:
        with silence_exporters():
            program = decompose_fused(program)
            exported = torch.onnx.export(
                program, dynamo=True, optimize=False, verbose=False, input_names=input_names, output_names=output_names
            )
            _settle_types(exported.model.graph)
            _settle_axes(exported.model.graph)
            _settle_outputs(exported.model.graph, output_names)
            _name_operators_by_module(exported.model.graph)
            proto: onnx.ModelProto = exported.model_proto
    except Exception as error:  # torch raises many classes
        for cause in _chain_of_causes(error):
            if isinstance(cause, UnsettledError):
                raise TorchError(str(cause).splitlines()[0]) from error  # torch adds where it was
            if match := UNKNOWN.search(str(cause)):
                raise UnknownOperator(match[2]) from error
        raise ExportError(f"torch.onnx cannot write the module: {_first_line(_chain_of_causes(error)[-1])}") from error
    return proto


def _require_reals(program: ExportedProgram) -> None:
    """Raise ExportError for complex inputs and outputs, which torch.onnx makes pairs of."""
    signature = program.graph_signature
    border = {*signature.user_inputs, *signature.user_outputs}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.name in border and isinstance(value, torch.Tensor) and value.is_complex():
            raise ExportError(f"{node.name} is complex, and ONNX has real numbers; pass it as torch.view_as_real does")


def _settle_types(graph: ir.Graph) -> None:
    """CastLike of a constant becomes a constant: onnxruntime does not see through it, and would leave the convolution
    before a ReLU6 in float.
    """
    for node in list(graph):
        if node.op_type != "CastLike" or node.inputs[0] is None or node.inputs[1] is None:
            continue
        fixed, kind = ir.convenience.get_const_tensor(node.inputs[0]), node.inputs[1].dtype
        if fixed is None or kind is None or node.outputs[0].is_graph_output():
            continue
        array = fixed.numpy().astype(kind.numpy())
        value = new_constant(graph, node.outputs[0].name or "constant", array)
        ir.convenience.replace_all_uses_with(node.outputs[0], value)
        graph.remove(node, safe=True)


def _settle_axes(graph: ir.Graph) -> None:
    """Reshape of a constant, in which torch.onnx wraps axes, becomes a constant: where sizes are open, what an operator
    does with samples must be seen before anything is folded.
    """
    for node in list(graph):
        if node.op_type != "Reshape" or node.outputs[0].is_graph_output():
            continue
        fixed, shape = (None if value is None else ir.convenience.get_const_tensor(value) for value in node.inputs)
        if fixed is None or shape is None or fixed.dtype != ir.DataType.INT64:
            continue
        array = fixed.numpy().reshape(shape.numpy())  # torch.onnx writes no 0 there
        value = new_constant(graph, node.outputs[0].name or "constant", array)
        ir.convenience.replace_all_uses_with(node.outputs[0], value)
        graph.remove(node, safe=True)


def _settle_outputs(graph: ir.Graph, names: Sequence[str] | None) -> None:
    """Make two tensors of one that is returned twice, because outputs are told apart by their names."""
    for number, value in enumerate(graph.outputs):
        if value in graph.outputs[:number]:
            name = names[number] if names else f"{value.name}_{number}"
            copy = ir.Value(name=name, shape=value.shape, type=value.type)
            graph.append(ir.Node("", "Identity", [value], outputs=[copy], name=f"node_{name}"))
            graph.outputs[number] = copy
    for value, name in zip(graph.outputs, names or ()):
        value.name = name


# Names -----------------------------------------------------------------------------------------------------------

TRACED = re.compile(r"L\['\w+'\]\.?")
"""Prefix that Dynamo puts before the path of a module."""
PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def _name_operators_by_module(graph: ir.Graph) -> None:
    """Call each operator by the path of its module, "blocks.0.fc": with PyTorch's operator behind it where the module
    has several, "blocks.0.add_1", and with ONNX's where that became several, "blocks.0.fc/Add" beside the product. An
    operator outside of modules keeps its name, as quantisations do.
    """
    parts: dict[str, dict[str, list[ir.Node]]] = {}
    for node in graph:
        path, operator = _module_and_operator(node.metadata_props.get(NAMES))
        if path:
            parts.setdefault(path, {}).setdefault(operator, []).append(node)
    used_names: set[str] = set()
    for path, operators in parts.items():
        for operator, nodes in operators.items():
            full_name = path if len(operators) == 1 else f"{path}.{operator}"
            main = _main_operator(nodes, operator)
            for node in nodes:
                name = full_name if node is main else f"{full_name}/{node.op_type}"
                number, node.name = 1, name
                while node.name in used_names:
                    number += 1
                    node.name = f"{name}_{number}"
                used_names.add(node.name)


def _main_operator(nodes: list[ir.Node], operator: str) -> ir.Node | None:
    """Return the operator to report on: the only product, else the one that torch.onnx named as PyTorch's."""
    products = [node for node in nodes if node.op_type in PRODUCTS]
    named = [node for node in nodes if (node.name or "").startswith(f"node_{operator}")]
    return next(iter(products or named), None) if len(products) < 2 else None


def _module_and_operator(noted: str | None) -> tuple[str, str]:
    """Return (path of the innermost module, name of PyTorch's operator); "" where there is none."""
    names = [str(name) for name in literal_eval(noted)] if noted else []
    return (TRACED.sub("", names[-2]) if len(names) > 1 else ""), (names[-1] if names else "")


def _module_class(program: ExportedProgram) -> str:
    """Class of the module that `program` was exported from, which its operators name."""
    for node in program.graph.nodes:
        for path, kind in node.meta.get("nn_module_stack", {}).values():
            kind = str(kind).rpartition(".")[2]
            if not TRACED.sub("", path) and kind not in ("GraphModule", "Wrapper"):  # torch.export's own
                return kind
    return "model"


# Quantisations ---------------------------------------------------------------------------------------------------


def require_all_pairs(program: ExportedProgram, proto: onnx.ModelProto) -> None:
    """Raise TorchError where the model's quantisations and dequantisations differ from the module's."""
    for node in _all_operators(program):
        if node.target._schema.name == "quantized_decomposed::quantize_per_tensor":
            _require_whole_range(node)
    for kind, op in ("quantize", "QuantizeLinear"), ("dequantize", "DequantizeLinear"):
        before = [node.name for node in _all_operators(program) if _is_quantisation(node, kind)]
        after = [_pytorch_operator(node) for node in proto.graph.node if node.op_type == op]
        if len(before) != len(after):
            lost = [name for name in before if name not in after] or [f"{len(after) - len(before)} too many"]
            shown = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
            raise TorchError(
                f"the module has {len(before)} operators that {kind}, its ONNX model {len(after)} {op}: {shown}; "
                "quantise with torchao's PT2E, whose operators (quantized_decomposed) torch.onnx knows"
            )


def _is_quantisation(node: Node, kind: str) -> bool:
    namespace, name = node.target._schema.name.split("::")
    if node.target in PAIRS:  # a pair is both
        return True
    return namespace in ("quantized_decomposed", "torchao") and name.startswith(f"{kind}_")


def _require_whole_range(node: Node) -> None:
    """Raise TorchError for a quantisation that does not use its type's whole range."""
    low, high, kind = node.args[3:6]
    info = torch.iinfo(kind)
    if (low, high) != (info.min, info.max):
        raise TorchError(
            f"{node.name} quantises to {low}..{high}, and ONNX's QuantizeLinear to {info.min}..{info.max}; let the "
            f"quantiser take quant_min={info.min}, quant_max={info.max} for activations"
        )


def _pytorch_operator(node: onnx.NodeProto) -> str:
    """Name of PyTorch's operator that `node` comes from."""
    return _module_and_operator(next((entry.value for entry in node.metadata_props if entry.key == NAMES), None))[1]


# Helpers ---------------------------------------------------------------------------------------------------------


def _all_operators(program: ExportedProgram) -> Iterator[Node]:
    """Yield every operator, those of subgraphs too."""
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            yield from (node for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload))


def _chain_of_causes(error: BaseException) -> list[BaseException]:
    """Yield `error` and its causes, the first cause last: torch.onnx wraps its errors in pages of text."""
    return [error, *([] if error.__cause__ is None else _chain_of_causes(error.__cause__))]


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextlib.contextmanager
def silence_exporters() -> Iterator[None]:
    """Silence logs and warnings of the exporters, which say nothing of the model."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
