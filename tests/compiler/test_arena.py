"""No live tensor in the CPU's arena is overwritten, and results are the same as without an arena."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import onnx
import pytest
from graph_text import proto
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thorough import tries

import celosia
from celosia.compiler.cpu.kernels import CpuFunction
from celosia.compiler.launch.memory_plan import tensor_bytes
from celosia.compiler.ops.registry import CpuNode, InputType
from celosia.compiler.program import ArenaPlan, CpuStep, LaunchStep, Program
from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.driver.runtime import Runtime

X = np.linspace(-3, 3, 8 * 64, dtype=np.float32).reshape(8, 64)


def compiled(source: str) -> Program:
    return celosia.compile(proto(source), "tiny")


def overwritten(program: Program, arena: ArenaPlan) -> list[str]:
    """Return the tensors that a step reads after another step has overwritten their bytes.

    The function notes for each byte of the arena which step wrote it last.
    """
    owner = np.full(arena.size, -1)
    content: dict[str, int] = {}  # tensor -> the step that wrote its bytes
    wrong = []

    def place(name: str) -> slice:
        return slice(arena.offsets[name], arena.offsets[name] + tensor_bytes(program.tensors[name]))

    for number, step in enumerate(program.steps):
        launch = isinstance(step, LaunchStep)
        read = [pack.value for pack in step.pack] if launch else step.inputs
        written = [unpack.value for unpack in step.unpack] if launch else step.outputs
        wrong += [name for name in read if name in content and np.any(owner[place(name)] != content[name])]
        if isinstance(step, CpuStep) and step.kernel is None:
            content |= {written[0]: content[read[0]]} if read[0] in content else {}
            continue
        in_place = dict(program.kernels[step.kernel].in_place) if isinstance(step, CpuStep) else {}
        for index, name in enumerate(written):
            if name not in arena.offsets:
                continue
            allowed = read[in_place[index]] if index in in_place else None
            for other in read:  # the kernel reads this tensor while it writes
                if other in content and other != allowed and not launch:
                    a, b = place(name), place(other)
                    wrong += [name] * (max(a.start, b.start) < min(a.stop, b.stop))
            content[name] = number
            owner[place(name)] = number
    return wrong


@st.composite
def graphs(draw: st.DrawFn) -> str:
    """Draw up to ten operators on matrices of 8 x 64 and their reshapes, with values of long and short lives."""
    shapes, lines = {"x": (8, 64)}, []
    for number in range(draw(st.integers(3, 10))):
        name, source = f"t{number}", draw(st.sampled_from(sorted(shapes)))
        dims = shapes[source]
        op = draw(st.sampled_from(["Relu", "Neg", "Softmax", "Add", "Add", "Transpose", "Reshape", "ReduceSum"]))
        if op == "Add":
            other = draw(st.sampled_from(sorted(shape for shape in shapes if shapes[shape] == dims)))
            lines.append(f"{name} = Add({source}, {other})")
        elif op == "Reshape":
            lines.append(f"{name} = Reshape({source}, {'flat' if len(dims) == 2 else 'matrix'})")
            dims = (512,) if len(dims) == 2 else (8, 64)
        elif op == "ReduceSum" and dims == (8, 64):
            lines.append(f"{name}s = ReduceSum<keepdims = 1>({source}, axis)  {name} = Add({name}s, {source})")
        elif op in ("Relu", "Neg", "Softmax"):
            lines.append(f"{name} = {op}({source})")
        else:
            lines.append(f"{name} = Transpose({source})")
            dims = dims[::-1]
        shapes[name] = dims
    results = sorted({name, *draw(st.lists(st.sampled_from(sorted(shapes)), max_size=2))} - {"x"})
    outputs = ", ".join(f"float[{', '.join(map(str, shapes[result]))}] {result}" for result in results)
    constants = "<int64[1] flat = {512}, int64[2] matrix = {8, 64}, int64[1] axis = {1}>"
    return f"g (float[8,64] x) => ({outputs}) {constants} {{ {'  '.join(lines)} }}"


@settings(max_examples=tries(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graphs())
def test_random_graphs(source: str) -> None:
    program = compiled(source)
    assert overwritten(program, program.arena) == []
    assert program.arena.size <= 1.10 * program.arena.lower_bound
    outputs = Runtime(program).run({"x": X}).outputs
    plain = Runtime(replace(program, arena=ArenaPlan())).run({"x": X}).outputs
    for name, array in plain.items():
        np.testing.assert_array_equal(outputs[name], array)


CHAIN = """
g (float[8,64] x) => (float[8,64] y) <int64[1] last = {1}> {
  a = Softmax(x)
  t = Transpose(a)
  s = Softmax(t)
  b = Transpose(s)
  m = ReduceMax<keepdims = 1>(b, last)
  c = Sub(b, m)
  u = Transpose(c)
  v = Softmax(u)
  y = Transpose(v)
}
"""


def test_a_broken_arena_is_found() -> None:
    program = compiled(CHAIN)
    assert len(program.arena.offsets) >= 3 and overwritten(program, program.arena) == []
    assert overwritten(program, replace(program.arena, offsets=dict.fromkeys(program.arena.offsets, 0)))


def test_runs_share_nothing() -> None:
    source = """
    g (float[8,64] x) => (float[8,64] y, float[512] flat, float[8,64] same, float[2] fixed)
      <int64[1] all = {512}, float[2] w = {1, 2}> {
      h = Softmax(x)
      y = Softmax(h)
      flat = Reshape(y, all)
      same = Identity(x)
      fixed = Identity(w)
    }
    """
    program = compiled(source)
    runtime = Runtime(program)
    first = runtime.run({"x": X}).outputs
    before = {name: array.copy() for name, array in first.items()}
    for array in first.values():
        assert not any(np.shares_memory(array, other) for other in (X, *program.constants.values()))
    assert not any(np.shares_memory(a, b) for a, b in combinations(first.values(), 2))
    second = runtime.run({"x": -X}).outputs
    for name, array in first.items():
        np.testing.assert_array_equal(array, before[name])
        assert not np.shares_memory(array, second[name])
    np.testing.assert_array_equal(first["same"], X)
    first["fixed"][:] = 0
    assert runtime.run({"x": X}).outputs["fixed"].tolist() == [1, 2]


def test_tensors_inside_are_kept_as_they_were() -> None:
    program = compiled(CHAIN)
    names = {name for step in program.steps if isinstance(step, CpuStep) for name in step.outputs}
    kept = Runtime(program).run({"x": X}, keep=lambda name: name in names).outputs
    plain = Runtime(replace(program, arena=ArenaPlan())).run({"x": X}, keep=lambda name: name in names).outputs
    assert kept.keys() == plain.keys() == names
    for name, array in plain.items():
        np.testing.assert_array_equal(kept[name], array)


def kernel(nodes: list[CpuNode], dims: tuple[int, ...] = (8, 64), dead: str = "x") -> CompiledKernel:
    types = {"x": InputType(dims, "float32"), "z": InputType(dims, "float32")}
    made = CpuFunction(tuple(nodes), types, (nodes[-1].outputs[0],)).compile(frozenset({dead}))
    return made[0]


@pytest.mark.parametrize(
    ("nodes", "legal"),
    [
        ([CpuNode("Relu", ("x",), ("y",))], True),
        ([CpuNode("Relu", ("x",), ("h",)), CpuNode("Add", ("h", "z"), ("y",))], True),
        ([CpuNode("Add", ("x", "x"), ("y",))], True),
        ([CpuNode("Transpose", ("x",), ("y",), {"perm": [1, 0]})], False),
        ([CpuNode("Softmax", ("x",), ("y",))], False),
        ([CpuNode("Cast", ("x",), ("y",), {"to": onnx.TensorProto.INT8})], False),
        ([CpuNode("Cast", ("x",), ("y",), {"to": onnx.TensorProto.INT32})], True),
    ],
    ids=lambda value: value[0].op if isinstance(value, list) else "",
)
def test_what_is_computed_in_place(nodes: list[CpuNode], legal: bool) -> None:
    made = kernel(nodes)
    assert made.in_place == (((0, 0),) if legal else ())
    given = [X, X + 1][: len(made.inputs)]
    copies = [array.copy() for array in given]
    expected = kernel(nodes, dead="")(*given)
    np.testing.assert_array_equal(made(*given), expected)
    for array, copy in zip(given, copies):
        np.testing.assert_array_equal(array, copy)  # an input elsewhere is not touched
    if legal:
        out = copies[0].view(made.outputs[0][0])
        made.run(copies, [out])
        np.testing.assert_array_equal(out, expected[0])


def test_elements_that_are_computed_twice_are_not_computed_in_place() -> None:
    """A kernel of 37 elements in vectors of 16, whose last two vectors overlap, does not compute in place."""
    assert kernel([CpuNode("Relu", ("x",), ("y",))], (3, 37)).in_place == ()


def test_a_saved_program_keeps_its_arena(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("arena") / "p"
    program = compiled(CHAIN)
    program.save(path)
    loaded = Program.load(path)
    assert loaded.arena == program.arena
    assert [k.in_place for k in loaded.kernels] == [k.in_place for k in program.kernels]
    report = Runtime(loaded).run({"x": X}).report["arena"]
    assert report == {"bytes": program.arena.size, "lower_bound": program.arena.lower_bound}
