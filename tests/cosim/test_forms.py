"""Tensors with several kinds of readers have onnxruntime's bytes, and no kernel repeats what a layer computes.

Readers are concatenations, the host, and layers with another form of activations.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import Builder, Tensor

from celosia.compiler.program import CpuStep, Program
from celosia.sim.functional.fsim import FunctionalDevice

pytest.importorskip("onnxruntime")

from agreement import CONFIGS, check
from thorough import paired, tries

FORMS = ("qdq", "qoperator")
SOME_CONFIGS = ("pynq", "tiny", "batch2-8x4", "4x16")
BY_TURNS = paired(FORMS, SOME_CONFIGS, 2)


def right(b: Builder, config: str) -> Program:
    """Return the Program of `b`, after the check that it gives onnxruntime's bytes and computes nothing twice."""
    program = check(b, FunctionalDevice(CONFIGS[config]))
    placed = {row["name"] for row in program.placements if row["place"] == "accelerator"}
    computed = {node.name for step in program.steps if isinstance(step, CpuStep) for node in step.nodes}
    assert placed.isdisjoint(computed)
    return program


def image(b: Builder) -> Tensor:
    """Return an image [2, 16, 4, 6], the result of a convolution."""
    return b.conv(b.input([2, 5, 4, 6]), 16, (1, 1))


def matrices(b: Builder) -> Tensor:
    """Return two matrices [16, 10], the result of a product.

    Their rows are images of the accelerator, but channels in a concatenation.
    """
    return b.matmul(b.input([2, 16, 3]), 10, "MatMul")


@pytest.mark.parametrize(("form", "config"), BY_TURNS)
@pytest.mark.parametrize("axis", [1, 2, 3])
@pytest.mark.parametrize("real", [False, True], ids=["bytes", "floats"])
def test_a_part_that_the_host_reads(config: str, form: str, axis: int, real: bool) -> None:
    """The host reads whole rows, so a part of rows or columns of a concatenation is copied once."""
    b = Builder(form, np.int8, 3)
    x = image(b)
    y = b.concat([x, b.max_pool(x, (3, 3), (1, 1), (1, 1, 1, 1))], equal=True, axis=axis)
    b.output(y, real)
    b.output(x, real)
    program = right(b, config)
    assert len(program.launches) == 1
    copies = [layer for layer in program.launches[0].layers if layer.op == "Map"]
    assert len(copies) == (axis > 1)


@pytest.mark.parametrize(("form", "config"), BY_TURNS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_part_of_a_part_that_a_float_operator_reads(config: str, form: str, depth: int) -> None:
    b = Builder(form, np.int8, 3)
    x = y = image(b)
    for axis in (2, 1, 3)[:depth]:
        y = b.concat([y, b.max_pool(y, (1, 1), (1, 1), (0, 0, 0, 0))], equal=True, axis=axis)
    b.output(b.conv(y, 8, (1, 1)))
    b.output(b.quantise(b.node("Sin", [b.real(x)]), x.shape, 0.01, float_inside=True))
    right(b, config)


@pytest.mark.parametrize(("form", "config"), BY_TURNS)
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("equal", [False, True], ids=["scaled", "equal"])
@pytest.mark.parametrize("read", [False, True], ids=["alone", "read by the host"])
def test_rows_of_matrices_as_channels(config: str, form: str, axis: int, equal: bool, read: bool) -> None:
    b = Builder(form, np.int8, 3)
    x = matrices(b)
    b.output(b.concat([x, b.unary(x, "Relu")], equal, axis))
    if read:
        b.output(x, real=True)
    right(b, config)


@pytest.mark.parametrize(("form", "config"), BY_TURNS)
@pytest.mark.parametrize("other", ["conv", "matmul", "unary"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_sum_of_matrices_and_images(config: str, form: str, other: str, turned: bool) -> None:
    """A sum works for a tensor whose rows are images and one whose rows are channels."""
    b = Builder(form, np.int8, 3)
    x = matrices(b)
    y = {
        "conv": lambda: b.conv(x, 16, (1,)),
        "matmul": lambda: b.matmul(x, 10, "MatMul"),
        "unary": lambda: b.unary(x, "Relu"),
    }
    operands = [x, y[other]()]
    z = b.binary("Add", *operands[::-1] if turned else operands)
    b.output(b.unary(z, "Relu"))
    right(b, config)


@pytest.mark.parametrize("config", SOME_CONFIGS)
@settings(max_examples=tries(15), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_graphs(config: str, data: st.DataObject) -> None:
    """Concatenations of parts in both forms are right, with outputs and float operators that read any part."""
    number = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    b = Builder(data.draw(st.sampled_from(FORMS)), data.draw(st.sampled_from([np.int8, np.uint8])), number(0, 999))
    b.shared = data.draw(st.booleans())
    rows = number(0, 1)
    shape = [number(1, 2), number(1, 20), number(1, 5), number(1, 5)][: 3 + rows]
    x = b.input(shape)
    known = [b.conv(x, number(1, 20), (1, 1)[: rows + 1], (1, 1), (0, 0, 0, 0))]
    if data.draw(st.booleans()):
        known = [b.matmul(x, number(1, 9), "MatMul")]
    for _ in range(number(1, 4)):
        first = data.draw(st.sampled_from(known))
        kind = data.draw(st.sampled_from(["unary", "matmul", "conv", "sum", "concat", "concat"]))
        if kind == "unary":
            known.append(b.unary(first, "Relu"))
        elif kind == "matmul":
            known.append(b.matmul(first, number(1, 9), "MatMul"))
        elif kind == "conv":
            known.append(b.conv(first, number(1, 20), (1, 1)[: rows + 1]))
        elif kind == "sum":
            compatible = [t for t in known if t.shape == first.shape]
            known.append(
                b.binary(data.draw(st.sampled_from(["Add", "Mul"])), first, data.draw(st.sampled_from(compatible)))
            )
        else:
            axis = number(1, 2 + rows)
            compatible = [
                t for t in known if t.shape[:axis] + t.shape[axis + 1 :] == first.shape[:axis] + first.shape[axis + 1 :]
            ]
            parts = data.draw(st.lists(st.sampled_from(compatible), min_size=1, max_size=3))
            known.append(b.concat([first, *parts], data.draw(st.booleans()), axis))
    b.output(known.pop())
    for tensor in data.draw(
        st.lists(st.sampled_from(known), unique_by=lambda t: t.name, max_size=3) if known else st.just([])
    ):
        if data.draw(st.booleans()):
            b.output(tensor, data.draw(st.booleans()))
        else:
            b.output(b.quantise(b.node("Sin", [b.real(tensor)]), tensor.shape, 0.01, float_inside=True))
    right(b, config)
