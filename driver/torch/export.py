"""Export a PyTorch module as an ONNX model in memory, with all its quantise and dequantise operators.

torch.export traces it, and torch.onnx writes it, without its optimiser, which would move quantisations as if they were
arithmetic. Features that ONNX would drop silently (writes to buffers, random numbers, narrower ranges) are errors.
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
from celosia.compiler.graph.importer import why_fixed, with_free_sizes_open
from celosia.compiler.graph.importing.dimensions import input_values, open_axes, open_inputs
from celosia.compiler.graph.values import new_constant
from celosia.compiler.program import Program
from celosia.driver.torch.decompose import decompose_fused
from celosia.driver.torch.fake_quantize import PAIRS, UnsettledError, settle_observers
from celosia.hw.spec.config import Config
from celosia.plain import Sentences

SCOPE_KEY = "pkg.torch.onnx.name_scopes"
"""Metadata key under which torch.onnx writes the PyTorch modules and operator that an ONNX operator comes from."""
UNKNOWN_OPERATOR_ERROR = re.compile(r"translating node %(\w+) : .*?target=torch\.ops\.([\w.]+)\]")
"""Pattern of torch.onnx's error for an operator that it cannot write."""
UNREGISTERED_CLASS_ERROR = "which is not a known type"
"""Part of torch.export's error for a result of a class that it does not know."""


class TorchError(Sentences, ValueError):
    """A module that cannot be converted. The message names the part of the module and the way out."""


class ExportError(TorchError):
    """PyTorch's own exporters failed."""


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
    """Compile a PyTorch module for an accelerator.

    The Program leaves those sizes open that it can (docs/shapes.md). The other sizes are those of the option `shapes`,
    or of the example. For any size, pass the result of `to_onnx` to `Runtime`.

    Args:
        module: A module in evaluation mode, or a result of PT2E's `convert_pt2e` or of `torch.export.export`.
        example_inputs: A tensor or a tuple of the module's arguments, of the shapes and types that the Program takes.
        config: Accelerator, as `celosia.compile` takes it.
        kwargs: Example arguments by name. None: there are none.
        input_names: Names of the Program's inputs, in order. None: those of the arguments.
        output_names: Names of the Program's outputs, in order. None: those of PyTorch's operators.
        dynamic_shapes: Sizes that are open, as `torch.export.export` takes them. None: no size is open.
        **options: Other arguments of `celosia.compile`.

    Returns:
        The Program, with the name of the exported module.

    Raises:
        TorchError: The module cannot be converted. The message names the part of the module and the way out.
        ModelError: `celosia.compile` does not support the module.
        ConfigError: The Config is invalid, or there is none of that name.
        SelfCheckError: The check of `celosia.compile` has detected a fault of Celosia. Its other errors are raised,
            too.

    Examples:
        >>> program = from_torch(torch.nn.Linear(4, 3).eval(), torch.zeros(2, 4), "tiny")
        >>> [tensor.shape for tensor in (*program.inputs, *program.outputs)]
        [(2, 4), (2, 3)]
        >>> batch = {0: torch.export.Dim("batch")}
        >>> program = from_torch(torch.nn.Linear(4, 3).eval(), torch.zeros(2, 4), "tiny", dynamic_shapes=(batch,))
        >>> program.shape_text(program.inputs[0])
        'float32[n, 4]'
    """
    module = getattr(module, "_orig_mod", module)  # the module inside torch.compile's result
    exported = _export_program(module, example_inputs, kwargs, dynamic_shapes)
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
    """Return a module as an ONNX model, for `onnx.save`, `Runtime` or `compile`. Arguments as of `from_torch`.
    TorchError."""
    module = getattr(module, "_orig_mod", module)  # the module inside torch.compile's result
    return _export_onnx(
        _export_program(module, example_inputs, kwargs, dynamic_shapes), module, input_names, output_names
    )


def _export_program(
    module: torch.nn.Module | ExportedProgram, example_inputs: Any, kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
) -> ExportedProgram:  # fmt: skip
    """Return the module as torch.export traces it; an ExportedProgram as it is. TorchError, ExportError."""
    if not isinstance(module, ExportedProgram):
        _require_supported_types(module, example_inputs)
        return trace(module, example_inputs, kwargs, dynamic_shapes)
    if dynamic_shapes is not None:
        raise TorchError("the module is exported already; give dynamic_shapes to torch.export.export")
    return module


def _require_supported_types(module: Any, example_inputs: Any) -> None:
    """Raise TorchError, with a hint, for modules and examples of types that torch.export does not support."""
    if isinstance(module, torch.jit.ScriptModule):
        raise TorchError("a module of torch.jit has its operators no more; give the module that it was made of")
    if isinstance(example_inputs, Mapping):
        raise TorchError("example_inputs is a tensor, or a tuple of arguments; give those with names as kwargs={...}")
    if any(isinstance(leaf, np.ndarray) for leaf in tree_leaves(example_inputs)):
        raise TorchError("example_inputs holds an array of numpy's; give torch.from_numpy(array)")


def _export_onnx(
    program: ExportedProgram, module: Any, input_names: Sequence[str] | None, output_names: Sequence[str] | None
) -> onnx.ModelProto:
    """Write `program` as an ONNX model with these names of inputs and outputs, checked and named after the module."""
    require_pure(program)
    proto = write_onnx(program, input_names, output_names)
    require_all_pairs(program, proto)
    is_traced = isinstance(module, (ExportedProgram, GraphModule))
    proto.graph.name = _module_class(program) if is_traced else type(module).__name__
    _replace_numeric_dim_params(proto)
    return proto


# Open sizes ------------------------------------------------------------------------------------------------------


def _replace_numeric_dim_params(proto: onnx.ModelProto) -> None:
    """Make open sizes that torch.export found to have only one value fixed sizes, and warn of each."""
    for value in proto.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param.isdigit():
                dim.dim_value = int(dim.dim_param)
                _warn_fixed_size(value.name, axis, dim.dim_value, "torch.export found that the module takes no other")


def _choose_shapes(proto: onnx.ModelProto, example: Any, given_shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the shapes to compile for: of the example, open where a Program supports that; `given_shapes` override
    them.

    A warning names sizes that the user left open and that are fixed.
    """
    tensors = [leaf for leaf in tree_leaves(example) if isinstance(leaf, torch.Tensor)]
    example_shapes = {name: tuple(tensor.shape) for name, tensor in zip(input_values(proto), tensors, strict=True)}
    example_shapes = {name: example_shapes[name] for name in open_inputs(proto)}
    shapes = with_free_sizes_open(proto, example_shapes)
    fixed = {
        (name, axis) for name, axis in open_axes(proto) if name not in given_shapes and shapes[name][axis] is not None
    }
    reasons = why_fixed(proto, example_shapes) if fixed else {}
    for name, axis in sorted(fixed):
        reason = f"{reasons[name, axis]}; for any size, give Runtime what celosia.driver.torch.export.to_onnx returns"
        _warn_fixed_size(name, axis, example_shapes[name][axis], reason)
    return {**shapes, **given_shapes}


def _warn_fixed_size(name: str, axis: int, size: int, reason: str) -> None:
    """Warn that a size is fixed which the user left open."""
    warnings.warn(
        f"dimension {axis} of input {name!r} is {size}, and not open as dynamic_shapes has it: {reason}", stacklevel=4
    )


# The way to ONNX -------------------------------------------------------------------------------------------------


def trace(
    module: torch.nn.Module, example_inputs: Any, kwargs: Mapping[str, Any] | None = None, dynamic_shapes: Any = None
) -> ExportedProgram:
    """Trace `module` with torch.export, on the CPU and in evaluation mode.

    TorchError; ExportError if torch.export fails.
    """
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
                if UNREGISTERED_CLASS_ERROR not in str(error):
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
    """Register the dataclasses in a module's results with torch.export, so that their fields become outputs."""
    for leaf in tree_leaves(values):
        if is_dataclass(leaf):
            torch.export.register_dataclass(type(leaf))


def require_pure(program: ExportedProgram) -> None:
    """Raise TorchError where `program` does something that an ONNX model cannot: write state, or draw random
    numbers."""
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
    """Whether an operator draws random numbers. Dropout outside of training does not."""
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
    """Write `program` as ONNX with torch.onnx.

    Names: None for PyTorch's own. TorchError, UnknownOperator, ExportError.
    """
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
            _fold_cast_likes(exported.model.graph)
            _fold_constant_reshapes(exported.model.graph)
            _separate_equal_outputs(exported.model.graph, output_names)
            _name_operators_by_module(exported.model.graph)
            proto: onnx.ModelProto = exported.model_proto
    except Exception as error:  # torch raises many classes
        for cause in _chain_of_causes(error):
            if isinstance(cause, UnsettledError):
                raise TorchError(str(cause).splitlines()[0]) from error  # torch appends the place in the graph
            if match := UNKNOWN_OPERATOR_ERROR.search(str(cause)):
                raise UnknownOperator(match[2]) from error
        raise ExportError(f"torch.onnx cannot write the module: {_first_line(_chain_of_causes(error)[-1])}") from error
    return proto


def _require_reals(program: ExportedProgram) -> None:
    """Raise ExportError for complex inputs and outputs, which torch.onnx would silently turn into pairs of floats."""
    signature = program.graph_signature
    model_tensors = {*signature.user_inputs, *signature.user_outputs}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.name in model_tensors and isinstance(value, torch.Tensor) and value.is_complex():
            raise ExportError(f"{node.name} is complex, and ONNX has real numbers; pass it as torch.view_as_real does")


def _fold_cast_likes(graph: ir.Graph) -> None:
    """Fold each CastLike of a constant to a constant.

    onnxruntime does not fold it, and would compute the convolution before a ReLU6 in float.
    """
    for node in list(graph):
        if node.op_type != "CastLike" or node.inputs[0] is None or node.inputs[1] is None:
            continue
        constant, dtype = ir.convenience.get_const_tensor(node.inputs[0]), node.inputs[1].dtype
        if constant is None or dtype is None or node.outputs[0].is_graph_output():
            continue
        array = constant.numpy().astype(dtype.numpy())
        value = new_constant(graph, node.outputs[0].name or "constant", array)
        ir.convenience.replace_all_uses_with(node.outputs[0], value)
        graph.remove(node, safe=True)


def _fold_constant_reshapes(graph: ir.Graph) -> None:
    """Fold each Reshape of an int64 constant, in which torch.onnx wraps axes.

    With open sizes the compiler examines axes of operators before it folds constants itself.
    """
    for node in list(graph):
        if node.op_type != "Reshape" or node.outputs[0].is_graph_output():
            continue
        constant, shape = (None if value is None else ir.convenience.get_const_tensor(value) for value in node.inputs)
        if constant is None or shape is None or constant.dtype != ir.DataType.INT64:
            continue
        array = constant.numpy().reshape(shape.numpy())  # torch.onnx writes no 0 there
        value = new_constant(graph, node.outputs[0].name or "constant", array)
        ir.convenience.replace_all_uses_with(node.outputs[0], value)
        graph.remove(node, safe=True)


def _separate_equal_outputs(graph: ir.Graph, names: Sequence[str] | None) -> None:
    """Copy a tensor that is returned twice, since outputs need distinct names; then name the outputs."""
    for number, value in enumerate(graph.outputs):
        if value in graph.outputs[:number]:
            name = names[number] if names else f"{value.name}_{number}"
            copy = ir.Value(name=name, shape=value.shape, type=value.type)
            graph.append(ir.Node("", "Identity", [value], outputs=[copy], name=f"node_{name}"))
            graph.outputs[number] = copy
    for value, name in zip(graph.outputs, names or ()):
        value.name = name


# Names -----------------------------------------------------------------------------------------------------------

TRACE_PREFIX = re.compile(r"L\['\w+'\]\.?")
"""Prefix that Dynamo puts before the path of a module."""
PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""ONNX operators that give their module's name to a group of operators."""


def _name_operators_by_module(graph: ir.Graph) -> None:
    """Name each operator after the path of its PyTorch module, so that users recognise it: "blocks.0.fc".

    If the module has several PyTorch operators, the operator's name follows: "blocks.0.add_1". If a PyTorch operator
    became several ONNX operators, all but the main one have their type behind: "blocks.0.fc/Add". Operators outside of
    modules, such as quantisations, keep their names.
    """
    nodes_of: dict[str, dict[str, list[ir.Node]]] = {}
    for node in graph:
        path, operator = _module_and_operator(node.metadata_props.get(SCOPE_KEY))
        if path:
            nodes_of.setdefault(path, {}).setdefault(operator, []).append(node)
    used_names: set[str] = set()
    for path, operators in nodes_of.items():
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
    """Return the main one of the ONNX operators of a PyTorch operator, which gets the module's name: the only product,
    else the one of the operator's name. None where there are several products.
    """
    products = [node for node in nodes if node.op_type in PRODUCTS]
    named = [node for node in nodes if (node.name or "").startswith(f"node_{operator}")]
    return next(iter(products or named), None) if len(products) < 2 else None


def _module_and_operator(scopes: str | None) -> tuple[str, str]:
    """Return (path of the innermost module, name of PyTorch's operator) from metadata; "" where there is none.

    scopes: the value at SCOPE_KEY, a Python list as text; None without.
    """
    names = [str(name) for name in literal_eval(scopes)] if scopes else []
    return (TRACE_PREFIX.sub("", names[-2]) if len(names) > 1 else ""), (names[-1] if names else "")


def _module_class(program: ExportedProgram) -> str:
    """Return the class name of the module that `program` was exported from, as its operators record it; or "model"."""
    for node in program.graph.nodes:
        for path, class_name in node.meta.get("nn_module_stack", {}).values():
            class_name = str(class_name).rpartition(".")[2]
            if not TRACE_PREFIX.sub("", path) and class_name not in ("GraphModule", "Wrapper"):  # torch.export's own
                return class_name
    return "model"


# Quantisations ---------------------------------------------------------------------------------------------------


def require_all_pairs(program: ExportedProgram, proto: onnx.ModelProto) -> None:
    """Raise TorchError unless the ONNX model has as many quantise and dequantise operators as the module.

    torch.onnx drops some silently.
    """
    for node in _all_operators(program):
        if node.target._schema.name == "quantized_decomposed::quantize_per_tensor":
            _require_full_range(node)
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
    """Whether an operator quantises or dequantises. kind: "quantize" or "dequantize"."""
    namespace, name = node.target._schema.name.split("::")
    if node.target in PAIRS:  # a pair is both
        return True
    return namespace in ("quantized_decomposed", "torchao") and name.startswith(f"{kind}_")


def _require_full_range(node: Node) -> None:
    """Raise TorchError for a quantisation to less than its type's full range, which ONNX cannot express."""
    low, high, dtype = node.args[3:6]
    info = torch.iinfo(dtype)
    if (low, high) != (info.min, info.max):
        raise TorchError(
            f"{node.name} quantises to {low}..{high}, and ONNX's QuantizeLinear to {info.min}..{info.max}; let the "
            f"quantiser take quant_min={info.min}, quant_max={info.max} for activations"
        )


def _pytorch_operator(node: onnx.NodeProto) -> str:
    """Return the name of the PyTorch operator that an ONNX node comes from."""
    return _module_and_operator(next((entry.value for entry in node.metadata_props if entry.key == SCOPE_KEY), None))[1]


# Helpers ---------------------------------------------------------------------------------------------------------


def _all_operators(program: ExportedProgram) -> Iterator[Node]:
    """Yield all ATen and custom operators of a program, also those in subgraphs."""
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            yield from (node for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload))


def _chain_of_causes(error: BaseException) -> list[BaseException]:
    """Return `error` and its causes, the original one last: torch.onnx wraps its errors in pages of text."""
    return [error, *([] if error.__cause__ is None else _chain_of_causes(error.__cause__))]


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's message that is not empty; else the name of its class."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextlib.contextmanager
def silence_exporters() -> Iterator[None]:
    """Silence logs and warnings of PyTorch's exporters, which are not about the model."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
