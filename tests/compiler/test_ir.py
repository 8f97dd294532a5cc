"""A test breaks each rule of the loop verifier; the parser names the text that it does not know."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from celosia.compiler import expr as T
from celosia.compiler.expr import loops
from celosia.compiler.expr.nodes import Binary, Call, Select
from celosia.compiler.expr.verify import EXPR_RULES, STMT_RULES, IRError
from celosia.compiler.tensorize import intrinsics as hw
from celosia.hw.spec.config import Config

A = T.Tensor("a", (4,), "float32")
OUT = T.Tensor("out", (4,), "float32")
I = T.Axis("i", extent=4)
ZERO = T.Const(0, T.INDEX)
ONE = T.Const(1.0, "float32")


def function(body: T.Stmt) -> T.Function:
    return T.Function("f", (A,), (OUT,), body)


def store(value: T.Expr = ONE, index: tuple[T.Expr, ...] = (ZERO,), tensor: T.Tensor = OUT) -> T.Stmt:
    return T.Store(tensor, index, value)


def alloc_twice() -> T.Stmt:
    t = T.Tensor("t", (1,), "float32")
    return loops.block(T.Alloc(t, store()), T.Alloc(t, store()))


GEMM = hw.gemm(Config.load("tiny"))
BROKEN: dict[str, Callable[[], T.Stmt]] = {
    "a loop runs at least once": lambda: T.For(T.Var("v"), 0, store()),
    "a loop's variable has its extent": lambda: T.For(I, 3, store()),
    "the kind of a loop exists": lambda: T.For(I, 4, store(), "sideways"),
    "a variable is bound once": lambda: T.For(I, 4, T.For(I, 4, store())),
    "a vectorized loop contains no other": lambda: T.For(
        I, 4, T.For(T.Axis("j", extent=4), 4, store(), "vectorized"), "vectorized"
    ),
    "a tensor is an input, an output, a constant, or allocated around": lambda: store(
        T.Load(T.Tensor("x", (1,), "float32"), (ZERO,))
    ),
    "there is one index for each dimension, or one element number": lambda: store(index=(ZERO, ZERO)),
    "an index is an int64": lambda: store(index=(T.Const(0, "int32"),)),
    "an index stays inside its tensor": lambda: T.For(I, 4, store(A[I + 1], (I,))),
    "inputs and constants are not written": lambda: store(tensor=A),
    "what is written has the type of the tensor": lambda: store(T.Const(1, "int8")),
    "the reduction exists": lambda: T.Update("median", OUT, (ZERO,), ONE),
    "a variable has the type of its value": lambda: T.Let(T.Var("v"), ONE, store()),
    "a condition is a bool": lambda: T.If(ONE, store()),
    "the memory exists": lambda: T.Alloc(T.Tensor("t", (1,), "int8"), store(), "attic"),
    "a tensor is allocated once": alloc_twice,
    "an intrinsic has the arguments that it declares": lambda: T.Intrinsic("gemm", (ZERO,), GEMM),
    "a variable is bound by a loop or a definition around": lambda: store(index=(I,)),
    "the operation exists": lambda: store(Binary("hug", ONE, ONE)),
    "both sides of an operation have one type": lambda: store(Binary("add", ONE, ZERO)),
    "both arms of a selection have one type": lambda: store(Select(T.Const(True, "bool"), ONE, ZERO)),
    "the function exists": lambda: store(Call("system", (ONE,), "float32")),
    "a function has its arguments": lambda: store(Call("fma", (ONE,), "float32")),
    "arguments of a function have one type": lambda: store(Call("clamp", (ONE, ZERO, ZERO), "float32")),
    "dot4 and popcount4 take four bytes": lambda: store(T.Cast(Call("dot4", (ZERO, ZERO), "int32"), "float32")),
    "pairs take two bytes": lambda: store(T.Cast(Call("pairs", (ZERO,) * 4, "int32"), "float32")),
    "leading_zeros and inverse_root take an int64": lambda: store(Call("inverse_root", (ONE,), "float32")),
    "a function's result has its type": lambda: store(Call("isnan", (ONE,), "float32")),
    "reductions have become loops": lambda: store(T.Reduce("sum", ONE, ())),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_named(rule: str) -> None:
    with pytest.raises(IRError) as error:
        T.verify(function(BROKEN[rule]()))
    assert error.value.rule == rule


def test_every_rule_has_a_function_that_breaks_it() -> None:
    rules = {rule for table in (EXPR_RULES, STMT_RULES) for group in table.values() for rule in group}
    assert rules == set(BROKEN)


def test_a_guarded_index_may_lie_outside() -> None:
    T.verify(function(T.For(I, 4, T.If(I < 3, store(A[I + 1], (I,))))))
    T.verify(function(T.For(I, 4, store(T.select(I < 3, A[I + 1], 0.0), (I,)))))


TEXT = """\
f(a: float32[4], b: int8[2, 2]) -> (out: float32[4], n: int8[]):
  constant t: int64[3] = 2 0 1
  constant flags: bool[2] = True False
  local acc: float64[]
  acc[] = float64(-inf)
  vectorized i in 4:
    v = (a[((i * 3) % 4)] - -1.5e-07)
    if ((v < 0.0) & (i != t[(i % 3)])):
      out[i] = select(isnan(v), nan, max(v, a[i]))
    else:
      out[i] = (fma(v, 2.0, exp(v)) / float32(int8(3)))
      acc[] max= float64(float32(0.1))
  unrolled i in 2:
    for j in 2:
      n[] ordered_sum= int8((int32(b[i, j]) >> int32(2)))
      pass_1[i] = bitcast.int32(a[j])
  if flags[0]:
    pass
  thing(a[0], n, 3)""".replace(
    "      pass_1[i] = bitcast.int32(a[j])\n", "      out[j] = bitcast.float32(int32(b[i, 0]))\n"
)


def test_text_and_back() -> None:
    parsed = T.parse(TEXT)
    assert str(parsed) == TEXT
    assert str(T.parse(str(parsed))) == TEXT


def test_names_that_are_alike_are_told_apart() -> None:
    twin, inner = T.Tensor("a", (4,), "float32"), T.Axis("i", extent=4)
    body = T.For(I, 4, T.Alloc(twin, T.For(inner, 4, loops.block(
        store(A[I] + A[inner], (inner,), twin), store(twin[inner], (I,)))), "local"))  # fmt: skip
    text = str(function(body))
    assert "for i_1 in 4" in text and "a_1[i_1] = (a[i] + a[i_1])" in text
    x = np.arange(4, dtype=np.float32)
    np.testing.assert_array_equal(T.interpret(T.parse(text), x)[0], T.interpret(function(body), x)[0])


def test_long_constants_are_given() -> None:
    table = np.arange(100)
    f = T.lower(T.compute((100,), lambda i: T.constant(table, "table")[99 - i], "b"))
    assert "constant table: int64[100] = ..." in str(f)
    again = T.parse(str(f), constants={"table": table})
    np.testing.assert_array_equal(T.interpret(again)[0], table[::-1])
    with pytest.raises(T.ParseError, match=r"line 2.*constant table"):
        T.parse(str(f))


HEAD = "f(a: int8[4]) -> (b: int8[4]):\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: a function begins with"),
        ("f(a) -> (b):", "line 1: `a` are not tensors"),
        ("f(a: tiny[4]) -> (b: int8[4]):", "line 1: tiny is not an element type"),
        (HEAD + "  for i in 4:\n  b[0] = a[0]", "line 3: an indented block is missing"),
        (HEAD + "  b[0] = a[0]\n    b[1] = a[0]", "line 3: unexpected indentation"),
        (HEAD + "  b[0] = c[0]", "line 2: there is no tensor c"),
        (HEAD + "  b[i] = a[0]", "line 2: there is no variable i"),
        (HEAD + "  b[0] median= a[0]", "line 2: there is no reduction median"),
        (HEAD + "  b[0] = (a[0] ? a[1])", r"line 2: ` \? a\[1\]\)` is not understood"),
        (HEAD + "  b[0] = (a[0] [ a[1])", r"line 2: `\[` is not an operation"),
        (HEAD + "  b[0] = a[0] a[1]", "line 2: `a` is not expected"),
        (HEAD + "  b[0] = int8(1.5)", "line 2: 1.5 is not a value of type int8"),
        (HEAD + "  b[0] = a[0]\nb[0] = a[0]", "line 3: nothing follows a function"),
    ],
)
def test_errors_of_the_parser_name_the_line(text: str, message: str) -> None:
    with pytest.raises(T.ParseError, match=message):
        T.parse(text)
