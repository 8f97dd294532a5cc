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
from celosia.compiler.graph.importing.external_data import check_file
from celosia.compiler.graph.importing.functions import Types, opset_of, typed
from celosia.compiler.ops import op_spec
from celosia.compiler.program.op_spec import OpSpec

MAX_DEPTH = 64
"""Graphs inside graphs. onnx recurses into them on the stack."""
MAX_RANK = 64
"""Dimensions of a tensor; numpy has no more."""
AXES = {"axis": -MAX_RANK, "batch_axis": -MAX_RANK, "time_axis": -MAX_RANK, "batch_dims": 0}
"""Attributes that onnx's shape inference uses as an index unchecked, and the least that they may be."""
COUNTS = ("group", "num_groups", "blocksize")
"""Attributes by which sizes are divided."""
MAX_ELEMENTS = 1 << 60
COMMENTS = ("doc_string", "producer_name", "producer_version")
"""Texts for people."""


def validation_error(proto: ModelProto, folder: str = "") -> str:
    """Return what is wrong with `proto`, naming the part; "" for a sound model.

    folder: where the files of its large constants lie; without one there must be none.
    """
    return next(_complaints(proto, folder), "")


def _complaints(proto: ModelProto, folder: str) -> Iterator[str]:
    yield from _texts(proto)
    yield from _graph(proto.graph, 1, folder)
    for function in proto.functions:
        for node in function.node:
            yield from _node(node, 1)


def _graph(graph: GraphProto, depth: int, folder: str = "") -> Iterator[str]:
    if depth > MAX_DEPTH:
        yield f"graph {graph.name!r} lies inside more than {MAX_DEPTH} others"
        return
    for tensor in graph.initializer:
        yield from _tensor(tensor, f"the constant {tensor.name!r}", folder)
    for sparse in graph.sparse_initializer:
        yield from _sparse(sparse, f"the constant {sparse.values.name!r}")
    for node in graph.node:
        yield from _node(node, depth)


def _sparse(tensor: SparseTensorProto, what: str) -> Iterator[str]:
    try:
        dense(tensor)
    except Exception as error:  # numpy's and onnx's
        yield f"{what} cannot be read: {error}"


def _node(node: NodeProto, depth: int) -> Iterator[str]:
    where = f"{node.op_type} ({node.name or next(iter(node.output), '')})"
    names = [attr.name for attr in node.attribute]
    if node.op_type == "Split" and any(a.name == "num_outputs" and a.i != len(node.output) for a in node.attribute):
        yield f"{where} has {len(node.output)} outputs, which is not its num_outputs"
    for attr in node.attribute:
        what = f"attribute {attr.name!r} of {where}"
        if names.count(attr.name) > 1:
            yield f"{what} is given twice"
        if attr.type == AttributeProto.INT and attr.name in AXES and not AXES[attr.name] <= attr.i <= MAX_RANK:
            yield f"{what} is {attr.i}"
        if attr.name in COUNTS and attr.type == AttributeProto.INT and attr.i < 1:
            yield f"{what} is {attr.i}; it counts from 1 on"
        for text in (*([attr.s] if attr.type == AttributeProto.STRING else ()), *attr.strings):
            try:
                text.decode()
            except UnicodeDecodeError:
                yield f"{what} is no text of UTF-8"
        for tensor in (*([attr.t] if attr.type == AttributeProto.TENSOR else ()), *attr.tensors):
            yield from _tensor(tensor, what)
        if attr.type == AttributeProto.SPARSE_TENSOR:
            yield from _sparse(attr.sparse_tensor, what)
        for graph in (*([attr.g] if attr.type == AttributeProto.GRAPH else ()), *attr.graphs):
            yield from _graph(graph, depth + 1)


def _tensor(tensor: TensorProto, what: str, folder: str = "") -> Iterator[str]:
    """Whether its data is there and fits its shape; no memory is taken for data that is not there."""
    if any(n < 0 for n in tensor.dims) or prod(tensor.dims) > MAX_ELEMENTS or len(tensor.dims) > MAX_RANK:
        yield f"{what} has the impossible shape {list(tensor.dims)}"
        return
    outside = onnx.external_data_helper.uses_external_data(tensor)
    if outside and not folder:
        yield f"{what} is in another file; give the path of the model"
        return
    try:
        if outside:
            check_file(tensor, folder)
        else:
            to_array(tensor)
    except Exception as error:  # the file's, numpy's and onnx's
        lines = str(error).splitlines()
        yield f"{what} cannot be read: {lines[0] if lines else type(error).__name__}"


def bad_texts(message: Message, where: str) -> Iterator[tuple[Message, str, str, bytes]]:
    """(message, its field, a name for it, the text) for texts that are no UTF-8, which protobuf lets pass."""
    for field, value in message.ListFields():
        many = [value] if isinstance(value, (str, bytes, Message)) else value
        if field.type == FieldDescriptor.TYPE_STRING:
            for text in many:
                if isinstance(text, bytes):
                    yield message, field.name, where, text
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in many:
                name = getattr(inner, "name", "")
                yield from bad_texts(inner, f"{field.name} {name!r}" if name else where)


def is_comment(message: Message, field: str) -> bool:
    """Whether nothing depends on `field` of `message`."""
    return field in COMMENTS or (isinstance(message, NodeProto) and field == "name")


def _texts(proto: ModelProto) -> Iterator[str]:
    for message, field, where, text in bad_texts(proto, "the model"):
        if not is_comment(message, field):
            yield f"a {field} in {where} is no text of UTF-8: {text!r}"


Formal = tuple[str, str, frozenset[str]]
"""An input's name, the letter or parameter that inputs of one type share ("" if none), and the types it may have."""

VARIADIC = OpSchema.FormalParameterOption.Variadic
EIGHT_BITS = frozenset(("int8", "uint8"))
QUANTISED = EIGHT_BITS | {f"{sign}int{bits}" for sign in ("", "u") for bits in (2, 4, 16)} | {"int32"}
LETTERS = {"f": frozenset(("float",)), "i": frozenset(("int32",)), "Q": QUANTISED, ".": frozenset[str]()}


def mistyped(proto: ModelProto) -> str:
    """The first input of an operator whose element type is not one that the operator takes, in a sentence; "" if none.

    proto: with the types of its values, as far as they are known.
    """
    opset = opset_of(proto, "")
    return next((what for node, types in typed(proto.graph, Types()) for what in _strange(node, types, opset)), "")


def _strange(node: NodeProto, types: Types, opset: int) -> Iterator[str]:
    first: dict[str, tuple[str, str]] = {}  # what inputs share -> the first of them, and its type
    for name, (formal, shared, allowed) in zip(node.input, _formals(node, opset)):
        kind = _kind(types.get(name)) if name else ""
        if not kind:
            continue
        where = f"{formal} of {node.op_type} ({node.name or next(iter(node.output), '')}) is of {kind}"
        if allowed and kind not in allowed:
            yield f"{where}; it takes {' or '.join(sorted(allowed))}"
        other, expected = first.setdefault(shared, (formal, kind))
        if shared and kind != expected:
            yield f"{where} and {other} of {expected}; both must be of one type"


def _formals(node: NodeProto, opset: int) -> Iterator[Formal]:
    if node.domain == "com.microsoft":
        return _from_spec(op_spec(node.op_type), len(node.input))
    if node.domain or not onnx.defs.has(node.op_type, opset):
        return iter(())
    return _from_schema(onnx.defs.get_schema(node.op_type, opset))


def _from_spec(spec: OpSpec, count: int) -> Iterator[Formal]:
    for number in range(count):
        operand = spec.operand_at(number)
        letter = (operand.type if operand else "") or "."
        name = f"input {number}" if operand is None else f"input {number} ({operand.name})"
        yield name, letter if letter.isupper() else "", LETTERS.get(letter, EIGHT_BITS)


def _from_schema(schema: OpSchema) -> Iterator[Formal]:
    kinds = {each.type_param_str: _names(each.allowed_type_strs) for each in schema.type_constraints}
    for formal in schema.inputs:
        many = formal.option == VARIADIC
        shared = formal.type_str if formal.type_str in kinds and (formal.is_homogeneous or not many) else ""
        one = formal.name, shared, kinds.get(formal.type_str) or _names([formal.type_str])
        yield from repeat(one) if many else (one,)


def _names(kinds: list[str]) -> frozenset[str]:
    """Names of the types that are tensors: "tensor(int8)" is int8."""
    return frozenset(kind[len("tensor(") : -1] for kind in kinds if kind.startswith("tensor("))


def _kind(value: onnx.TypeProto | None) -> str:
    """A tensor's element type, as int8; "" where it is unknown, or no tensor's."""
    element = value.tensor_type.elem_type if value is not None else 0
    return TensorProto.DataType.Name(element).lower() if element else ""
