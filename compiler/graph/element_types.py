"""Element types of what operators read, beside what their definitions ask for.

onnx's inference looks at some of them alone: a zero point of floats passes it, and onnxruntime refuses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import onnx
from onnx import ModelProto, NodeProto, TensorProto
from onnx.defs import OpSchema

from celosia.compiler.graph.functions import Types, opset_of, typed
from celosia.compiler.ops import op_spec
from celosia.compiler.program.op_spec import OpSpec

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
