"""Find errors in a model that the ONNX checker misses, or that would crash it or onnx's shape inference."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from math import prod

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto
from onnx.defs import OpSchema

from celosia.compiler.cpu.parse import dense, to_array
from celosia.compiler.graph.external_data import check_file
from celosia.compiler.graph.importing.inlining import Types, nodes_with_types, opset_of
from celosia.compiler.ops import op_spec
from celosia.compiler.program.op_spec import OpSpec

MAX_DEPTH = 64
"""Levels of graphs inside graphs: onnx recurses into them on the stack."""
MAX_RANK = 64
"""Axes of a tensor; numpy has no more."""
LEAST_AXIS_VALUES = {"axis": -MAX_RANK, "batch_axis": -MAX_RANK, "time_axis": -MAX_RANK, "batch_dims": 0}
"""Attributes that onnx's shape inference uses as an index without a check -> the least value they may have."""
DIVISORS = ("group", "num_groups", "blocksize")
"""Attributes by which onnx's shape inference divides sizes; they must be at least 1."""
MAX_ELEMENTS = 1 << 60
"""Elements of a tensor; a product of sizes beyond this may overflow 64 bits."""
COMMENTS = ("doc_string", "producer_name", "producer_version")
"""Text fields of ONNX messages that nothing depends on."""


def validation_error(proto: ModelProto, folder: str = "") -> str:
    """Return what is wrong with `proto`, naming the part; "" for a sound model.

    folder: where the files of its large constants lie; without one there must be none.
    """
    return next(_errors(proto, folder), "")


def _errors(proto: ModelProto, folder: str) -> Iterator[str]:
    """Yield a sentence for each error of `proto`, in the order of its parts."""
    yield from _text_errors(proto)
    yield from _graph_errors(proto.graph, 1, folder)
    for function in proto.functions:
        for node in function.node:
            yield from _node_errors(node, 1)


def _graph_errors(graph: GraphProto, depth: int, folder: str = "") -> Iterator[str]:
    """Yield the errors of a graph `depth` levels deep, and of the graphs inside it."""
    if depth > MAX_DEPTH:
        yield f"graph {graph.name!r} lies inside more than {MAX_DEPTH} others"
        return
    for tensor in graph.initializer:
        yield from _tensor_errors(tensor, f"the constant {tensor.name!r}", folder)
    for sparse in graph.sparse_initializer:
        yield from _sparse_errors(sparse, f"the constant {sparse.values.name!r}")
    for node in graph.node:
        yield from _node_errors(node, depth)


def _sparse_errors(tensor: SparseTensorProto, label: str) -> Iterator[str]:
    """Yield the error of a sparse constant that cannot be read; `label` names it."""
    try:
        dense(tensor)
    except Exception as error:  # numpy's and onnx's
        yield f"{label} cannot be read: {error}"


def _node_errors(node: NodeProto, depth: int) -> Iterator[str]:
    """Yield the errors of a node: attributes that would crash onnx, and damaged constants.

    depth: levels of graphs around it.
    """
    where = f"{node.op_type} ({node.name or next(iter(node.output), '')})"
    names = [attr.name for attr in node.attribute]
    if node.op_type == "Split" and any(a.name == "num_outputs" and a.i != len(node.output) for a in node.attribute):
        yield f"{where} has {len(node.output)} outputs, which is not its num_outputs"
    for attr in node.attribute:
        label = f"attribute {attr.name!r} of {where}"
        if names.count(attr.name) > 1:
            yield f"{label} is given twice"
        if (
            attr.type == AttributeProto.INT
            and attr.name in LEAST_AXIS_VALUES
            and not LEAST_AXIS_VALUES[attr.name] <= attr.i <= MAX_RANK
        ):
            yield f"{label} is {attr.i}"
        if attr.name in DIVISORS and attr.type == AttributeProto.INT and attr.i < 1:
            yield f"{label} is {attr.i}; it counts from 1 on"
        for text in (*([attr.s] if attr.type == AttributeProto.STRING else ()), *attr.strings):
            try:
                text.decode()
            except UnicodeDecodeError:
                yield f"{label} is no text of UTF-8"
        for tensor in (*([attr.t] if attr.type == AttributeProto.TENSOR else ()), *attr.tensors):
            yield from _tensor_errors(tensor, label)
        if attr.type == AttributeProto.SPARSE_TENSOR:
            yield from _sparse_errors(attr.sparse_tensor, label)
        for graph in (*([attr.g] if attr.type == AttributeProto.GRAPH else ()), *attr.graphs):
            yield from _graph_errors(graph, depth + 1)


def _tensor_errors(tensor: TensorProto, label: str, folder: str = "") -> Iterator[str]:
    """Yield an error where the data of a constant is missing, in no folder, or does not fit its shape.

    label: names the constant. No memory is allocated for data that is not there.
    """
    if any(n < 0 for n in tensor.dims) or prod(tensor.dims) > MAX_ELEMENTS or len(tensor.dims) > MAX_RANK:
        yield f"{label} has the impossible shape {list(tensor.dims)}"
        return
    is_external = onnx.external_data_helper.uses_external_data(tensor)
    if is_external and not folder:
        yield f"{label} is in another file; give the path of the model"
        return
    try:
        if is_external:
            check_file(tensor, folder)
        else:
            to_array(tensor)
    except Exception as error:  # the file's, numpy's and onnx's
        lines = str(error).splitlines()
        yield f"{label} cannot be read: {lines[0] if lines else type(error).__name__}"


def bad_texts(message: Message, where: str) -> Iterator[tuple[Message, str, str, bytes]]:
    """Yield (message, field, description of the message, text) for texts that are no UTF-8; protobuf accepts them."""
    for field, value in message.ListFields():
        items = [value] if isinstance(value, (str, bytes, Message)) else value
        if field.type == FieldDescriptor.TYPE_STRING:
            for text in items:
                if isinstance(text, bytes):
                    yield message, field.name, where, text
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            for item in items:
                name = getattr(item, "name", "")
                yield from bad_texts(item, f"{field.name} {name!r}" if name else where)


def is_comment(message: Message, field: str) -> bool:
    """Return whether nothing depends on `field` of `message`, so that the import may clear it."""
    return field in COMMENTS or (isinstance(message, NodeProto) and field == "name")


def _text_errors(proto: ModelProto) -> Iterator[str]:
    """Yield an error for each text that is no UTF-8, except comments, which `normalise_model` clears."""
    for message, field, where, text in bad_texts(proto, "the model"):
        if not is_comment(message, field):
            yield f"a {field} in {where} is no text of UTF-8: {text!r}"


Formal = tuple[str, str, frozenset[str]]
"""(name of an input, letter or parameter that inputs of one type share, "" if none; element types it may have)."""

VARIADIC = OpSchema.FormalParameterOption.Variadic
"""Option of a formal input that repeats."""
EIGHT_BITS = frozenset(("int8", "uint8"))
"""Element types of bytes."""
QUANTISED = EIGHT_BITS | {f"{sign}int{bits}" for sign in ("", "u") for bits in (2, 4, 16)} | {"int32"}
"""Element types of quantised tensors in onnxruntime."""
LETTERS = {"f": frozenset(("float",)), "i": frozenset(("int32",)), "Q": QUANTISED, ".": frozenset[str]()}
"""Letter of an OpSpec's operand type -> the element types that it stands for; "." stands for any."""


def element_type_error(proto: ModelProto) -> str:
    """Return a sentence about the first input whose element type its operator does not take; "" if there is none.

    proto: a model whose values have types, as far as they are known.
    """
    opset = opset_of(proto, "")
    return next(
        (error for node, types in nodes_with_types(proto.graph, Types()) for error in _type_errors(node, types, opset)),
        "",
    )


def _type_errors(node: NodeProto, types: Types, opset: int) -> Iterator[str]:
    """Yield an error for each input of `node` of a wrong type, or of another type than inputs that share its type."""
    first: dict[str, tuple[str, str]] = {}  # what inputs share -> the first of them, and its type
    for name, (formal, shared, allowed) in zip(node.input, _formal_inputs(node, opset)):
        kind = _element_type(types.get(name)) if name else ""
        if not kind:
            continue
        where = f"{formal} of {node.op_type} ({node.name or next(iter(node.output), '')}) is of {kind}"
        if allowed and kind not in allowed:
            yield f"{where}; it takes {' or '.join(sorted(allowed))}"
        other, expected = first.setdefault(shared, (formal, kind))
        if shared and kind != expected:
            yield f"{where} and {other} of {expected}; both must be of one type"


def _formal_inputs(node: NodeProto, opset: int) -> Iterator[Formal]:
    """Return the formal inputs of an operator: from its OpSpec in onnxruntime's domain, else from ONNX's schema."""
    if node.domain == "com.microsoft":
        return _formals_of_spec(op_spec(node.op_type), len(node.input))
    if node.domain or not onnx.defs.has(node.op_type, opset):
        return iter(())
    return _formals_of_schema(onnx.defs.get_schema(node.op_type, opset))


def _formals_of_spec(spec: OpSpec, count: int) -> Iterator[Formal]:
    """Yield the formal inputs that an OpSpec declares for a node of `count` inputs.

    Inputs whose type is the same capital letter must have the same type.
    """
    for number in range(count):
        operand = spec.operand_at(number)
        letter = (operand.type if operand else "") or "."
        name = f"input {number}" if operand is None else f"input {number} ({operand.name})"
        yield name, letter if letter.isupper() else "", LETTERS.get(letter, EIGHT_BITS)


def _formals_of_schema(schema: OpSchema) -> Iterator[Formal]:
    """Yield the formal inputs of ONNX's schema; a variadic input repeats without end."""
    types_of = {
        constraint.type_param_str: _element_types(constraint.allowed_type_strs)
        for constraint in schema.type_constraints
    }
    for formal in schema.inputs:
        is_variadic = formal.option == VARIADIC
        shared = formal.type_str if formal.type_str in types_of and (formal.is_homogeneous or not is_variadic) else ""
        formal_input = formal.name, shared, types_of.get(formal.type_str) or _element_types([formal.type_str])
        yield from repeat(formal_input) if is_variadic else (formal_input,)


def _element_types(kinds: list[str]) -> frozenset[str]:
    """Return the element types of the tensor types among `kinds`: "tensor(int8)" gives int8."""
    return frozenset(kind[len("tensor(") : -1] for kind in kinds if kind.startswith("tensor("))


def _element_type(value: onnx.TypeProto | None) -> str:
    """Return a tensor's element type in ONNX's spelling, such as "int8"; "" where it is unknown or no tensor's."""
    element = value.tensor_type.elem_type if value is not None else 0
    return TensorProto.DataType.Name(element).lower() if element else ""
