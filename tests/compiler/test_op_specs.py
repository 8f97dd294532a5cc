"""Each operator has one specification, and no second table lists operators."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from celosia.compiler.graph import cost
from celosia.compiler.graph.importing import sample_independence
from celosia.compiler.graph.operands import operand
from celosia.compiler.graph.quantized import integerise
from celosia.compiler.graph.quantized.tables import ELEMENTWISE_OPS
from celosia.compiler.graph.select import LAYER_BUILDERS
from celosia.compiler.graph.simplify import redundant
from celosia.compiler.ops import OPS
from celosia.compiler.ops.registry import Node, op
from celosia.compiler.program.host.hostops import HOST, sized_names
from celosia.compiler.program.host.op import KNOWN_DOMAINS, host
from celosia.compiler.program.op_spec import (
    _ROWS,
    Kind,
    Role,
    UnknownOperand,
    all_operators,
    arrange_operands,
    declare_operator,
    op_spec,
    operators_with,
    parse_operands,
    quantised_form,
    quantised_forms,
)

ROOT = Path(__file__).parents[2]
FOLDERS = ("compiler", "driver")
FEWEST = 4
"""Names of operators in one list that make it a table."""
TABLES = {
    "compiler/cpu/operators_doc.py": "which operators quantisers write, and which of them do not run yet",
    "compiler/graph/onnxruntime_rules/float16.py": "for which operators onnxruntime has kernels of float16",
    "compiler/selfcheck/imported_model.py": "the check shares nothing with what it checks",
    "compiler/graph/onnxruntime_rules/propagation.py": "which operators onnxruntime exchanges with DequantizeLinear",
    "compiler/graph/importing/shape_inference.py": "whose sizes depend on data, or only move sizes",
    "compiler/graph/importing/sample_independence.py": "which operators lists of sizes pass through",
    "driver/accuracy/matching.py": "what quantisation puts between operators",
    "driver/torch/export.py": "operators that PyTorch's modules are named by",
}
"""Files with a list of operators that is no table of what they are, and what it is."""


def listed(node: ast.AST) -> list[str]:
    """Return the constant strings of a list, or the keys of a dict whose values are constant and hold no code."""
    if isinstance(node, ast.Dict):
        code = (ast.Name, ast.Attribute, ast.Lambda, ast.Call)
        if any(isinstance(inner, code) for value in node.values for inner in ast.walk(value)):
            return []
        parts: list[ast.expr | None] = node.keys
    elif isinstance(node, (ast.Set, ast.Tuple, ast.List)):
        parts = [*node.elts]
    else:
        return []
    return [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]


parsed = functools.cache(ast.parse)  # several tests look at all modules


def tables(text: str, operators: frozenset[str]) -> Iterator[int]:
    """Yield the lines of a module in which a literal lists FEWEST operators or more."""
    for node in ast.walk(parsed(text)):
        if len(operators.intersection(listed(node))) >= FEWEST:
            yield node.lineno  # type: ignore[attr-defined]


def test_no_second_table_lists_operators() -> None:
    result = {
        str(path.relative_to(ROOT)): lines
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (lines := list(tables(path.read_text(encoding="utf-8"), all_operators())))
    }
    assert set(result) == set(TABLES), result
    several = {
        "compiler/graph/onnxruntime_rules/float16.py": 2,
        "compiler/graph/importing/shape_inference.py": 2,
        "compiler/selfcheck/imported_model.py": 2,
    }
    assert all(len(lines) == several.get(path, 1) for path, lines in result.items()), result


@pytest.mark.parametrize(
    "planted",
    [
        'X = {"Conv", "Gemm", "MatMul", "Resize"}',
        'X = frozenset(("Conv", "Gemm", "MatMul", "Resize", *OTHERS))',
        'def f(op):\n    return op in ["Conv", "Gemm", "MatMul", "LpPool"]',
        'X = {"Conv": 1, "QLinearConv": 3, "ConvInteger": 1, "DeformConv": (1, -2)}',
    ],
)
def test_a_planted_table_is_found(planted: str) -> None:
    assert list(tables(planted, all_operators()))


def test_what_is_defined_by_operator_is_no_table() -> None:
    assert not list(tables('RULES = {"Add": f, "Sub": f, "Mul": f, "Div": g(1)}', all_operators()))
    assert not list(tables('@op("Add", "Sub", "Mul", "Div")\ndef f(node): ...', all_operators()))


def test_every_operator_has_a_row() -> None:
    accepted = {*OPS, *sized_names(), *(op for domain, op in HOST if domain in KNOWN_DOMAINS)}
    assert accepted == all_operators()
    known = {
        *ELEMENTWISE_OPS,
        *LAYER_BUILDERS,
        *integerise.QUANTISABLE,
        *cost._COUNTS,
        *sample_independence.RULES,
        *redundant.RULES,
    }
    assert known <= all_operators()
    newest = {schema.name: schema for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    itself = {name for name, schema in newest.items() if not schema.deprecated} - all_operators()
    assert all(newest[name].has_function or newest[name].has_context_dependent_function for name in itself), itself


def test_a_fact_is_stated_once() -> None:
    assert op_spec("Conv").kind is Kind.COMPLEX and op_spec("no such operator").kind is Kind.OPAQUE
    with pytest.raises(TypeError, match="Conv: rounded_once stated twice"):
        declare_operator("Conv", rounded_once=False)
    assert op_spec("Conv").rounded_once


# Operands -------------------------------------------------------------------------------------------------------

OPTIONAL, VARIADIC = 1, 2
"""Values of onnx.defs.OpSchema.FormalParameterOption, the same numbers in onnxruntime."""
Signature = list[tuple[str, int]]
"""Name in lower case and option of each input."""


def signature(schema: Any) -> Signature:
    """Return the inputs of a schema of ONNX or onnxruntime."""
    return [(formal.name.lower(), int(getattr(formal.option, "value", formal.option))) for formal in schema.inputs]


def declared(name: str) -> Signature:
    """Return the inputs that an operator declares; a repeated group is one variadic input with its first name."""
    spec = op_spec(name)
    once = len(spec.operands) - spec.repeated
    inputs = [(operand.name, OPTIONAL if operand.optional else 0) for operand in spec.operands[:once]]
    return inputs + [(group.name, VARIADIC) for group in spec.operands[once : once + bool(spec.repeated)]]


@cache
def schemas() -> dict[tuple[str, str], Any]:
    """Return the newest schema of each operator by domain and name.

    onnxruntime prints the page docs/ContribOperators.md from its schemas of com.microsoft.
    """
    newest = {(schema.domain, schema.name): schema for schema in onnx.defs.get_all_schemas()}
    for schema in get_all_operator_schema():
        if schema.domain == "com.microsoft" or schema.name == "SimplifiedLayerNormalization":
            newest["com.microsoft", schema.name] = schema
    return newest


OURS = frozenset((
    "Block", "BlockSums", "BlockedAveragePool", "BlockedConv", "BlockedGlobalAveragePool", "BlockedGlobalMaxPool",
    "BlockedMaxPool", "QLinearConvTranspose", "QLinearMean", "QLinearNorm", "QuantizeBlocks", "RoundBlocks",
    "ScaleSums", "Table", "Unblock",
))  # fmt: skip
"""Operators of the domain celosia: nobody else documents them."""


@pytest.mark.parametrize("name", sorted((operators_with("operands") | OPS.keys()) - OURS))
def test_operands_are_those_of_the_documentation(name: str) -> None:
    documented = signature(schemas()[op_spec(name).domain, name.rpartition(".")[2]])
    if name == "QLinearConcat":  # one variadic input, of which each group is a tensor, its scale and its zero point
        documented[-1] = ("x", VARIADIC)
    assert declared(name) == documented


def test_ours_are_in_our_domain() -> None:
    assert {name for name in OPS if op_spec(name).domain == "celosia"} == OURS


@pytest.mark.parametrize(
    "name", sorted(name for name in OPS if any(operand.type for operand in op_spec(name).operands))
)
def test_types_are_those_of_the_documentation(name: str) -> None:
    """Operands with the same type letter have one type parameter; scales and biases have the letter's type."""
    schema = schemas()["com.microsoft", name]
    allowed = {constraint.type_param_str: set(constraint.allowed_type_strs) for constraint in schema.type_constraints}
    of_letter: dict[str, set[str]] = {}
    for formal, own in zip(schema.inputs, op_spec(name).operands):
        if formal.name == "inputs":
            continue
        of_letter.setdefault(own.type, set()).add(formal.typeStr)
        kinds = allowed.get(formal.typeStr, {formal.typeStr})
        expected = {"f": {"tensor(float)"}, "i": {"tensor(int32)"}}.get(own.type)
        assert expected is None or kinds == expected, own.name
    assert all(len(kinds) == 1 for letter, kinds in of_letter.items() if letter != "."), of_letter


def test_a_planted_wrong_operand_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    operands, _ = parse_operands("x x_scale x_zero_point w w_zero_point w_scale y_scale y_zero_point b:bias?")
    monkeypatch.setitem(_ROWS, "QLinearConv", replace(op_spec("QLinearConv"), operands=operands))
    with pytest.raises(AssertionError):
        test_operands_are_those_of_the_documentation("QLinearConv")


QUANTISED = {
    "QLinearConv": ("Conv", "x0 w3 b8", (6, 7)), "QLinearConvTranspose": ("ConvTranspose", "x0 w3 b8", (6, 7)),
    "QLinearMatMul": ("MatMul", "a0 b3", (6, 7)), "QGemm": ("Gemm", "a0 b3 c6", (7, 8)),
    "QLinearAdd": ("Add", "a0 b3", (6, 7)), "QLinearMul": ("Mul", "a0 b3", (6, 7)),
    "QLinearWhere": ("Where", "condition0 x1 y4", (7, 8)), "QLinearSoftmax": ("Softmax", "x0", (3, 4)),
    "QLinearSigmoid": ("Sigmoid", "x0", (3, 4)), "QLinearLeakyRelu": ("LeakyRelu", "x0", (3, 4)),
    "QLinearAveragePool": ("AveragePool", "x0", (3, 4)), "QLinearConcat": ("Concat", "x2", (0, 1)),
    "QLinearGlobalAveragePool": ("GlobalAveragePool", "x0", (3, 4)), "QLinearMean": ("ReduceMean", "x0", (3, 4)),
}  # fmt: skip
"""By quantised form: the float operator, its operands and where they are, and where the result's scale and zero point
are. From ONNX's page of operators and onnxruntime's docs/ContribOperators.md."""


def test_quantised_forms_are_those_of_float_operators() -> None:
    floats = {row[0] for row in QUANTISED.values()}
    assert set(quantised_forms(*floats)) == set(QUANTISED) == set(quantised_forms(*all_operators()))
    for name, (operator, places, result) in QUANTISED.items():
        spec = op_spec(name)
        assert quantised_form(operator) == name and (spec.scale_input, spec.zero_point_input) == result
        own = [(n, each) for n, each in enumerate(spec.operands) if not each.quantises]
        assert [f"{each.name}{n}" for n, each in own] == places.split(), name
        of_float = [operand.role for operand in op_spec(operator).operands if operand.role is not Role.SHAPE]
        assert [each.role for _, each in own] == of_float[: len(own)], name
        for n, each in own:
            if each.role is not Role.BIAS and each.name != "condition":
                assert spec.quantisation_of(n, len(spec.operands)) == (n + 1, n + 2), name


def test_operands_repeat_group_by_group() -> None:
    spec = op_spec("QLinearConcat")
    assert spec.groups(8) == [(2, 3, 4), (5, 6, 7)] and spec.data_among(8) == [2, 5]
    assert spec.quantisation_of(5, 8) == (6, 7)
    parts = [("p", "ps", "pz"), ("q", "qs", "qz")]
    assert arrange_operands("QLinearConcat", parts, ("s", "z")) == ["s", "z", "p", "ps", "pz", "q", "qs", "qz"]
    assert arrange_operands("QLinearAdd", parts, ("s", "z")) == ["p", "ps", "pz", "q", "qs", "qz", "s", "z"]
    assert arrange_operands("QGemm", parts, bias="b") == ["p", "ps", "pz", "q", "qs", "qz", "b"]
    assert arrange_operands("MatMulIntegerToFloat", parts) == ["p", "q", "ps", "qs", "pz", "qz"]


def test_an_unknown_operand_is_named() -> None:
    node = ir.Node("", "QLinearConv", [ir.Value(name="x")])
    assert operand(node, "x") is node.inputs[0] and operand(node, "b") is None
    message = "QLinearConv has no operand 'w_scal'; it has x, x_scale, x_zero_point, w, w_scale"
    with pytest.raises(UnknownOperand, match=message):
        operand(node, "w_scal")
    with pytest.raises(UnknownOperand, match=message):
        Node("QLinearConv", {}, (), ()).scalar("w_scal", "float32")
    with pytest.raises(UnknownOperand, match="NoSuch has no operand 'x'; it has none"):
        operand(ir.Node("", "NoSuch", []), "x")


@pytest.mark.parametrize("text", ["x y(", "x:weight", "x (y z)", "x<TU>", "x-y"])
def test_a_wrong_declaration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"weight|operands"):
        parse_operands(text)


# One definition -------------------------------------------------------------------------------------------------


def test_a_second_definition_is_refused() -> None:
    before = OPS["Conv"]
    with pytest.raises(TypeError, match="Conv: defined twice, by conv and second"):

        @op("Conv", kind=Kind.COMPLEX, operands="x w:weights b:bias?")
        def second(node: Node) -> Any:
            """Define Conv a second time."""

    assert OPS["Conv"] is before


def test_an_operator_of_a_user_leaves_the_row_of_its_namesake() -> None:
    before = op_spec("Softmax")
    try:
        host("Softmax", domain="my.own")(lambda node, x: (x,))
        assert op_spec("Softmax") == before
    finally:
        HOST.pop(("my.own", "Softmax"), None)


NUMBERED = ("inputs", "input", "has", "scalar", "constant", "is_fixed", "list_of")
"""Attributes and methods that take the number of an operand."""
TERMS = ("compiler/superoptimise/", "compiler/program/", "compiler/tune/")
"""Where inputs are those of terms of the algebra, of steps of a Program, or of layers."""


def numbered(text: str) -> Iterator[int]:
    """Yield the lines of a module that access an operand by a number of 2 or more."""
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Subscript):
            owner, places = node.value, [node.slice]
            if isinstance(node.slice, ast.Slice):
                places = [each for each in (node.slice.lower,) if each is not None]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, places = node.func, node.args[:1]
        else:
            continue
        name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
        values = [place.value for place in places if isinstance(place, ast.Constant)]
        if name in NUMBERED and any(isinstance(value, int) and value >= 2 for value in values):
            yield node.lineno


def test_no_operand_is_known_by_a_number() -> None:
    result = {
        str(path.relative_to(ROOT)): lines
        for path in sorted((ROOT / "compiler").rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith(TERMS)
        and (lines := list(numbered(path.read_text(encoding="utf-8"))))
    }
    assert not result


@pytest.mark.parametrize(
    "planted", ["constant(node.inputs[3])", "x, w = node.inputs[3:6]", "node.scalar(2, 'int32')", "node.input(8)"]
)
def test_a_planted_number_is_found(planted: str) -> None:
    assert list(numbered(planted)) and not list(numbered("operand(node, 'w'); node.inputs[0]; node.input(1)"))


# Names of operators ---------------------------------------------------------------------------------------------

FORMS_ALLOWED = {
    "compiler/ops/": "the definitions",
    "compiler/cpu/operators_doc.py": "which operators quantisers write",
    "compiler/graph/select/__init__.py": "the builder of the layers of each",
    "compiler/selfcheck/": "the check shares nothing with what it checks",
}
"""Where quantised forms may be named beside what is listed in NAMED_FORMS."""
NAMED_FORMS: dict[str, set[str]] = {
    "compiler/graph/select/convolution.py": {"QLinearMatMul"},
    "compiler/graph/select/matrices.py": {"QLinearMatMul"},
    "compiler/graph/select/reductions.py": {"QLinearMean"},
    "compiler/graph/importer.py": {"QLinearMatMul"},
    "compiler/graph/quantized/rounded.py": {"QLinearAdd", "QLinearAveragePool"},
    "compiler/graph/transposed_values.py": {"QLinearAdd", "QLinearMatMul", "QLinearMul", "QLinearSoftmax"},
}
"""By module, the quantised forms whose patterns it finds or makes."""


def names(text: str) -> set[str]:
    """Return the operator names that a module holds as constants."""
    constants = (node.value for node in ast.walk(parsed(text)) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str)} & all_operators()


def named_forms(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the quantised forms that modules name against the rule, by path."""
    others = {path: names(text) & set(QUANTISED) for path, text in texts.items()
              if not path.startswith(tuple(FORMS_ALLOWED))}  # fmt: skip
    return {path: output for path, output in others.items() if output}


def texts() -> dict[str, str]:
    paths = sorted((ROOT / "compiler").rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def test_quantised_forms_are_named_where_they_are_defined() -> None:
    assert named_forms(texts()) == NAMED_FORMS


def test_a_planted_name_is_found() -> None:
    planted = {"compiler/graph/new.py": 'if node.op_type == "QLinearConv": pass', "compiler/ops/a.py": '"QGemm"'}
    assert named_forms(planted) == {"compiler/graph/new.py": {"QLinearConv"}}
