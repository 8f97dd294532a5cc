"""Bodies of If, Loop and Scan run as kernels, and equal onnxruntime: on random control flow, and on edge cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_text import proto
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracle import opened

import celosia
from celosia.compiler.program import CpuStep, HostStep, Program, ProgramError, with_inner_steps
from celosia.driver.runtime import Runtime

Feed = dict[str, NDArray[Any]]


def program_of(model: onnx.ModelProto, folder: Path | None = None) -> Program:
    program = celosia.compile(model, "tiny")
    if folder is None:
        return program
    program.save(folder / "program")
    return Program.load(folder / "program")


def compare(source: str, feeds: list[Feed], opset: int = 17, folder: Path | None = None) -> Program:
    """Run the model on the feeds twice, here and in onnxruntime, and compare; return the Program."""
    model = proto(source, opset)
    session = opened(model)
    program = program_of(model, folder)
    with Runtime(program) as runtime:
        for feed in [*feeds, *feeds]:
            expected = session.run(None, feed)
            outputs = list(runtime.run(feed).outputs.values())
            for ours, reference in zip(outputs, expected, strict=True):
                assert (ours.dtype, ours.shape) == (reference.dtype, reference.shape)
                np.testing.assert_allclose(ours, reference, rtol=1e-5, atol=1e-6)
    return program


def host_operators(program: Program) -> list[str]:
    return [step.op.op for step in with_inner_steps(program.steps) if isinstance(step, HostStep)]


def floats(*dims: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(dims).astype(np.float32)


CONV_BRANCHES = """
g (bool c, float[1, 3, 8, 8] x) => (float[1, 4, 6, 6] y) <float[4, 3, 3, 3] w> {
  x2 = Exp(x)
  y = If (c) <
    then_branch = a () => (float[?, ?, ?, ?] p) { q = Conv(x2, w) r = Relu(q) p = Mul(r, r) },
    else_branch = b () => (float[?, ?, ?, ?] p2) { q2 = Conv(x2, w) r2 = Sigmoid(q2) p2 = Neg(r2) }
  >
}
"""


def with_weights(source: str, **weights: NDArray[Any]) -> onnx.ModelProto:
    model = proto(source, 17)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def test_branches_are_kernels(tmp_path: Path) -> None:
    """A convolution in a branch works on blocks of channels, and is fused with what follows it."""
    model = with_weights(CONV_BRANCHES.replace("<float[4, 3, 3, 3] w>", ""), w=floats(4, 3, 3, 3))
    session, program = opened(model), program_of(model, tmp_path)
    assert host_operators(program) == ["If"]
    inner = [step for step in with_inner_steps(program.steps) if isinstance(step, CpuStep)]
    assert ["BlockedConv", "Relu", "Mul"] in [[node.op for node in step.nodes][:3] for step in inner]
    for c in (True, False):
        feed = {"c": np.array(c), "x": floats(1, 3, 8, 8)}
        result = Runtime(program).run(feed)
        np.testing.assert_allclose(result.outputs["y"], session.run(None, feed)[0], rtol=1e-5, atol=1e-5)
    assert {"Conv", "Neg"} & {node["op"] for node in result.report["cpu_nodes"]}


def test_branches_of_different_shapes() -> None:
    """The shape behind the If is known at run time only; an outer value and an input are returned as they are."""
    source = (
        """
    g (bool c, float[2, 3] x) => (float[m, n] y, float[k] z) {
      s = Neg(x)
      p, q = If (c) <
        then_branch = a () => (float[i, j] u, float[l] v) {
          u = Transpose<perm = [1, 0]>(s)
          v = ReduceSum<keepdims = 0>(s)
        },
        else_branch = b () => (float[i2, j2] u2, float[l2] v2) { u2 = Identity(x) v2 = Flatten<axis = 0>(s) }
      >
      y = Exp(p)
      z = Flatten<axis = 0>(q)
    }
    """.replace("float[l] v)", "float v)")
        .replace("float[l2] v2)", "float[a, b] v2)")
        .replace("float[k] z", "float[a, b] z")
    )
    compare(source, [{"c": np.array(c), "x": floats(2, 3)} for c in (True, False)])


def test_a_branch_returns_an_outer_value() -> None:
    """The outer value must survive the run, in which other kernels use the memory again."""
    source = """
    g (bool c, float[64, 64] x) => (float[64, 64] y, float[64, 64] z) {
      a = Exp(x)
      b = MatMul(a, a)
      y = If (c) <
        then_branch = t () => (float[64, 64] p) { p = Identity(b) },
        else_branch = e () => (float[64, 64] p2) { m = MatMul(b, b) p2 = MatMul(m, b) }
      >
      d = MatMul(b, x)
      z = MatMul(d, d)
    }
    """
    compare(source, [{"c": np.array(c), "x": floats(64, 64, seed=c) / 64} for c in (True, False)])


LOOP = """
g (int64 n, float[4, 4] x, float[4, 4] k) => (float[4, 4] y, float[rows, 4, 4] all, float[m] sizes) {
  kk = MatMul(k, k)
  go = Constant<value = bool {1}>()
  y, all, sizes = Loop (n, go, x) <
    body = b (int64 i, bool on, float[4, 4] s) => (bool more, float[4, 4] t, float[4, 4] o, float z) {
    a = MatMul(s, kk)
    t = Tanh(a)
    o = Add(t, kk)
    j = Cast<to = 1>(i)
    z = Mul(j, j)
    more = Identity(on)
  }>
}
"""


def test_loops_are_kernels(tmp_path: Path) -> None:
    """A captured product lies in the arena and is read in every iteration: no kernel may overwrite it."""
    feeds = [{"n": np.array(n), "x": floats(4, 4), "k": floats(4, 4, seed=1)} for n in (0, 1, 5, 200)]
    program = compare(LOOP, feeds, folder=tmp_path)
    assert host_operators(program) == ["Loop"]


def test_a_loop_ends_by_its_condition() -> None:
    source = """
    g (float[3] x, float limit) => (float[3] y, int64 steps, float[n, 3] seen) {
      go = Constant<value = bool {1}>()
      none = Constant<value = int64 {0}>()
      y, steps, seen = Loop ("", go, x, none) <
        body = b (int64 i, bool on, float[3] s, int64 c) => (bool more, float[3] t, int64 d, float[3] o) {
          t = Add(s, s)
          one = Constant<value = int64 {1}>()
          d = Add(c, one)
          o = Neg(s)
          total = ReduceMax<keepdims = 0>(t)
          more = Less(total, limit)
        }>
    }
    """.replace('""', "")
    program = compare(source, [{"x": np.float32([1, 2, 3]), "limit": np.array(v, np.float32)} for v in (0, 10, 1e6)])
    assert host_operators(program) == ["Loop"]


def test_a_state_that_grows() -> None:
    """Its size is open, whatever the body declares; operators on it run in the host runtime."""
    for declared in ("float[n]", "float[2]"):
        source = f"""
        g (int64 n, float[2] x) => (float[m] y) {{
          go = Constant<value = bool {{1}}>()
          y = Loop (n, go, x) <body = b (int64 i, bool on, {declared} s) => (bool more, {declared} t) {{
            u = Neg(s)
            t = Concat<axis = 0>(s, u)
            more = Identity(on)
          }}>
        }}
        """
        model = proto(source, 17)
        with Runtime(program_of(model)) as runtime:
            for n in (0, 1, 4):
                expected = x = floats(2)
                for _ in range(n):
                    expected = np.concatenate([expected, -expected])
                assert np.array_equal(runtime.run({"n": np.array(n), "x": x}).outputs["y"], expected)


SCAN = """
g (float[3] h, float[5, 2, 3] x, float[2, 5] z) => (float[3] y, float[2, 5] a, float[5, 3] b) {
  y, a, b = Scan <num_scan_inputs = 2, scan_input_directions = [0, 1], scan_input_axes = [0, 1],
                  scan_output_directions = [1, 0], scan_output_axes = [1, 0],
    body = s (float[3] s0, float[2, 3] p, float[2] q) => (float[3] t, float[2] o, float[3] o2) {
      r = ReduceMean<axes = [0], keepdims = 0>(p)
      u = Add(s0, r)
      t = Tanh(u)
      c = Constant<value_ints = [1]>()
      v = ReduceSum<keepdims = 0>(p, c)
      o = Mul(v, q)
      o2 = Exp(u)
    }> (h, x, z)
}
"""


def test_scans_in_both_directions_and_along_other_axes(tmp_path: Path) -> None:
    program = compare(SCAN, [{"h": floats(3), "x": floats(5, 2, 3, seed=1), "z": floats(2, 5)}], folder=tmp_path)
    assert host_operators(program) == ["Scan"]


def test_nested_bodies_and_host_operators() -> None:
    """An If in a Loop in an If, with operators that have no kernel, and a captured value of each level."""
    source = """
    g (bool c, int64 n, float[6] x) => (float[6] y) {
      go = Constant<value = bool {1}>()
      outer = Neg(x)
      y = If (c) <
        then_branch = a () => (float[6] p) {
          half = Constant<value_float = 0.5>()
          middle = Mul(outer, half)
          p = Loop (n, go, x) <body = b (int64 i, bool on, float[6] s) => (bool more, float[6] t) {
            two = Constant<value = int64 {2}>()
            zero = Constant<value = int64 {0}>()
            rest = Mod(i, two)
            even = Equal(rest, zero)
            where = NonZero(s)
            size = Size(where)
            count = Cast<to = 1>(size)
            t = If (even) <
              then_branch = d () => (float[6] u) { w = Add(s, middle) u = Div(w, count) },
              else_branch = e () => (float[6] u2) { w2 = Sub(outer, s) u2 = Mul(w2, half) }
            >
            more = Identity(on)
          }>
        },
        else_branch = f () => (float[6] p2) { p2 = Exp(outer) }
      >
    }
    """
    feeds = [{"c": np.array(c), "n": np.array(n), "x": floats(6)} for c in (True, False) for n in (0, 3)]
    program = compare(source, feeds)
    assert set(host_operators(program)) == {"If", "Loop", "NonZero", "Size"}


def test_a_computed_condition_takes_its_branch() -> None:
    """The condition depends on a shape: only the branch that is taken remains, at any depth."""
    source = """
    g (float[1, 4] x) => (float[?, ?] y) {
      one = Constant<value_ints = [1]>()
      zero = Constant<value_ints = [0]>()
      s = Shape(x)
      d = Gather(s, zero)
      c = Equal(d, one)
      z = If (c) <
        then_branch = a () => (float[?, ?] p) {
          s2 = Shape(x)
          d2 = Gather(s2, one)
          c2 = Equal(d2, one)
          p = If (c2) <
            then_branch = a2 () => (float[?, ?] q) { q = Exp(x) },
            else_branch = b2 () => (float[?, ?] q2) { q2 = Neg(x) }
          >
        },
        else_branch = b () => (float[?] p2) { p2 = Squeeze(x) }
      >
      y = Sqrt(z)
    }
    """
    program = compare(source, [{"x": -np.abs(floats(1, 4))}])
    assert not host_operators(program)
    assert [[node.op for node in step.nodes] for step in program.steps] == [["Neg", "Sqrt"]]


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_random_bodies(data: st.DataObject) -> None:
    """Chains of operators on states and captured values, in a Loop or a Scan."""
    operators = ("Add", "Mul", "Sub", "Max")
    known, lines = ["s", "r", "outer", "x0"], []
    for number in range(data.draw(st.integers(1, 6))):
        op = data.draw(st.sampled_from((*operators, "Tanh", "MatMul", "Transpose")))
        a, b = data.draw(st.sampled_from(known)), data.draw(st.sampled_from(known))
        call = (
            f"Tanh({a})"
            if op == "Tanh"
            else f"Transpose<perm = [1, 0]>({a})"
            if op == "Transpose"
            else f"{op}({a}, {b})"
        )
        bounded = f"Tanh(v{number})"
        lines += [f"v{number} = {call}", f"w{number} = {bounded}"]
        known.append(f"w{number}")
    t, u = data.draw(st.sampled_from(known[4:])), data.draw(st.sampled_from(known[4:]))
    body = "\n".join(lines) + f"\n t = Identity({t})\n r2 = Neg({u})\n o = Sub(r2, s)"
    source = f"""
    g (int64 n, float[3, 3] x, float[3, 3] x0) => (float[3, 3] y, float[3, 3] z, float[m, 3, 3] all) {{
      outer = Exp(x)
      go = Constant<value = bool {{1}}>()
      y, z, all = Loop (n, go, x, x0) <
        body = b (int64 i, bool on, float[3, 3] s, float[3, 3] r)
          => (bool more, float[3, 3] t, float[3, 3] r2, float[3, 3] o) {{
          {body}
          more = Identity(on)
        }}>
    }}
    """
    feeds = [{"n": np.array(n), "x": floats(3, 3, seed=n), "x0": floats(3, 3, seed=9)} for n in (0, 1, 3)]
    assert host_operators(compare(source, feeds)) == ["Loop"]


def test_a_damaged_body_is_refused(tmp_path: Path) -> None:
    program = program_of(proto(LOOP, 17))
    (step,) = [step for step in program.steps if isinstance(step, HostStep)]
    for name, value in (("outputs", ("nothing",)), ("attribute", "then_branch"), ("types", ())):
        body = step.bodies[0].__class__(**{**vars(step.bodies[0]), name: value})
        broken = HostStep(step.nodes, step.inputs, step.outputs, step.op, (body,))
        steps = [broken if other is step else other for other in program.steps]
        program_copy = Program(**{**vars(program), "steps": steps})
        program_copy.save(tmp_path / "broken")
        with pytest.raises(ProgramError, match="step"):
            Program.load(tmp_path / "broken")
