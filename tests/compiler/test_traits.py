"""Each operator is one row: there is one for every operator, and no second table beside it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

from celosia.compiler import numerics
from celosia.compiler.cpu.ops import OPS
from celosia.compiler.graph import cost, identities, quantized, sample_rules
from celosia.compiler.graph.select import BUILDERS
from celosia.compiler.program.host.hostops import HOST, sized_names
from celosia.compiler.program.traits import Kind, all_operators, operators_with, state, traits

ROOT = Path(__file__).parents[2]
FOLDERS = ("compiler", "driver")
FEWEST = 4
"""Names of operators in one list that make it a table."""
TABLES = {
    "compiler/cpu/operators_doc.py": "which operators quantisers write, and which of them do not run yet",
    "compiler/graph/float16.py": "for which operators onnxruntime has kernels of float16",
    "compiler/graph/importer.py": "operators whose sizes depend on data",
    "compiler/selfcheck/imported_model.py": "the check shares nothing with what it checks",
    "compiler/graph/propagation.py": "what onnxruntime exchanges with DequantizeLinear, which is not ours to decide",
    "compiler/graph/inference.py": "through which operators onnx's own inference follows lists of sizes",
    "compiler/graph/samples.py": "through which operators lists of sizes are followed, by what stands beside it",
    "compiler/selfcheck/operator_results.py": "the check shares nothing with what it checks",
    "driver/accuracy/matching.py": "what quantisation puts between operators",
    "driver/torch/export.py": "operators that PyTorch's modules are named by",
}
"""Files with a list of operators that is no table of what they are, and what it is."""


def listed(node: ast.AST) -> list[str]:
    """Constant texts of a list; of a dict, its keys, where what they stand for is constant, too, and no code."""
    if isinstance(node, ast.Dict):
        code = (ast.Name, ast.Attribute, ast.Lambda, ast.Call)
        if any(isinstance(inner, code) for value in node.values for inner in ast.walk(value)):
            return []
        parts: list[ast.expr | None] = node.keys
    elif isinstance(node, (ast.Set, ast.Tuple, ast.List)):
        parts = [*node.elts]
    else:
        return []
    return [each.value for each in parts if isinstance(each, ast.Constant) and isinstance(each.value, str)]


def tables(text: str, operators: frozenset[str]) -> Iterator[int]:
    """Lines of a module in which a literal lists FEWEST operators or more."""
    for node in ast.walk(ast.parse(text)):
        if len(operators.intersection(listed(node))) >= FEWEST:
            yield node.lineno  # type: ignore[attr-defined]


def test_no_second_table_lists_operators() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (lines := list(tables(path.read_text(encoding="utf-8"), all_operators())))
    }
    assert set(found) == set(TABLES), found
    several = {"compiler/graph/float16.py": 2, "compiler/selfcheck/imported_model.py": 2}
    assert all(len(lines) == several.get(path, 1) for path, lines in found.items()), found


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
    accepted = {*OPS, *sized_names(), *(op for _, op in HOST)}
    assert accepted == all_operators()
    known = {*numerics.UNARY, *BUILDERS, *quantized.QUANTISABLE, *cost._COUNTS, *sample_rules.RULES, *identities.RULES}
    assert known <= all_operators()
    newest = {schema.name: schema for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    itself = {name for name, schema in newest.items() if not schema.deprecated} - all_operators()
    assert all(newest[name].has_function or newest[name].has_context_dependent_function for name in itself), itself


def test_a_fact_is_stated_once() -> None:
    assert traits("Conv").kind is Kind.COMPLEX and traits("no such operator").kind is Kind.OPAQUE
    with pytest.raises(TypeError, match="Conv: wide stated twice"):
        state("Conv", wide=False)
    assert traits("Conv").wide


def test_scales_are_those_of_onnxruntimes_operators() -> None:
    """Three inputs an operand, in front of the scale and zero point of the result; elsewhere where they are listed."""
    places = {"QGemm": 7, "QLinearConcat": 0, "QLinearWhere": 7, "QLinearNorm": 6}
    for name in operators_with("scale"):
        operands = 2 if name.startswith(("QLinearConv", "QLinearMatMul", "QLinearAdd", "QLinearMul")) else 1
        assert traits(name).scale == places.get(name, 3 * operands), name
