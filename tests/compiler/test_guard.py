"""Untrusted loops never leave their tensors after `clamp_accesses`; the compiler's own loops keep their meaning."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from celosia.compiler import expr as T
from celosia.compiler.cpu.kernels import compile_op
from celosia.compiler.cpu.llvm import from_loops
from celosia.compiler.expr.affine import is_in_bounds
from celosia.compiler.expr.loops import Store, Update, exprs, statements
from celosia.compiler.expr.nodes import Load, walk
from celosia.compiler.expr.verify import IRError, clamp_accesses, iterations
from celosia.compiler.program.host.kernel import CompiledKernel

HEAD = "f(a: int64[4]) -> (b: int64[4]):\n"


def kernel(text: str, like: str = "int64", size: int = 4, tables: tuple[np.ndarray, ...] = ()) -> CompiledKernel:
    """Return a kernel as a file holds it: with loops and without code."""
    shape = ((like, (size,)),)
    return CompiledKernel("f", shape, shape, 0, b"", "", loops=text, tables=tables)


OUTSIDE = {
    "read far away": "  for i in 4:\n    b[i] = a[(i + 1000000000000)]",
    "read before": "  for i in 4:\n    b[i] = a[(i - 99999999999)]",
    "read where data says": "  for i in 4:\n    b[i] = a[a[i]]",
    "read by lanes where data says": "  vectorized i in 4:\n    b[i] = a[(a[i] * 123456789)]",
    "read where a false guard says": "  for i in 4:\n    b[i] = select((0 <= a[i]), a[(i * 99999999999)], 0)",
    "read what overflows": "  for i in 4:\n    b[i] = a[(i * 9223372036854775807)]",
    "read what overflows twice": "  for i in 4:\n    b[i] = a[(((i * 4611686018427387904) * 4) * 3)]",
    "write far away": "  for i in 4:\n    b[(i + 1000000000000)] = a[i]",
    "write where data says": "  for i in 4:\n    b[(a[i] * 999999999999)] = a[i]",
    "write by lanes where data says": "  vectorized i in 4:\n    b[(a[i] * 999999999999)] = a[i]",
    "update far away": "  for i in 4:\n    b[(i * 99999999999)] sum= a[i]",
    "a definition": "  for i in 4:\n    k = (a[i] * 99999999999)\n    b[k] = a[k]",
}


@pytest.mark.parametrize("what", OUTSIDE)
@pytest.mark.parametrize("value", [7, -(2**63), 2**62])
def test_nothing_outside_is_touched(what: str, value: int) -> None:
    """Loops that leave their tensors are refused, or run with their indices clamped."""
    text, x = HEAD + OUTSIDE[what], np.full(4, value)
    try:
        code = from_loops(kernel(text))
    except IRError as error:
        assert error.rule == "an index stays inside its tensor"
        return
    function = clamp_accesses(T.parse(text))
    loads = [e for s in statements(function.body) for expr in exprs(s) for e in walk(expr) if isinstance(e, Load)]
    stores = [Load(s.tensor, s.index) for s in statements(function.body) if isinstance(s, Store | Update)]
    assert all(map(is_in_bounds, (*loads, *stores)))
    written = "b[i]" in text
    for output, expected in zip(code(x), T.interpret(function, x), strict=True):
        assert not written or np.array_equal(output, expected)


def test_as_they_are_written_they_end_the_process() -> None:
    """Without the guard, these loops crash the process, so the test above notices a missing guard."""
    text = HEAD + OUTSIDE["read where data says"]
    script = (
        "import numpy as np; from celosia.compiler.cpu.llvm import from_loops; "
        "from celosia.compiler.program.host.kernel import CompiledKernel; s = (('int64', (4,)),); "
        f"from_loops(CompiledKernel('f', s, s, 0, b'', '', loops={text!r}), trusted=True)(np.full(4, 2**60))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGSEGV


BROKEN = {
    "calls what it likes": ("  for i in 4:\n    b[i] = system(a[i])", "the function exists"),
    "calls with too little": ("  for i in 4:\n    b[i] = fma(a[i])", "a function has its arguments"),
    "a result of another type": ("  for i in 4:\n    b[i] = int64(isnan.float64(a[i]))", "result has its type"),
    "bytes of another size": (
        "  for i in 4:\n    b[i] = int64(dot4(a[i], a[i]))", "dot4 and popcount4 take four bytes"
    ),
    "cast without a cast": ("  for i in 4:\n    b[i] = int64(bitcast.int32(a[i]))", "result has its type"),
    "no such instruction": ("  halt(a, b)", "a CPU has no such instruction"),
    "a stack without end": ("  local c: int64[99999999999999]\n  b[0] = c[0]", "tensors have at most"),
    "code without end": (
        "  unrolled i in 99999:\n    unrolled j in 99999:\n      b[0] = a[0]", "there are at most 262144 statements"
    ),
    "lanes without end": ("  vectorized i in 99999:\n    b[(i % 4)] = a[0]", "a vector has not so many lanes"),
    "a loop without end": ("  for i in 9223372036854775807:\n    b[0] = a[0]", "there are at most .* iterations"),
    "an input is written": ("  a[0] = 1", "inputs and constants are not written"),
    "a table of another size": (
        "  constant t: int64[99] = ...\n  b[0] = t[98]", r"the values of constant t are int64\[3\]"
    ),
    "no table": (
        "  constant t: int64[99] = ...\n  constant u: int64[99] = ...\n  b[0] = t[98]", "argument 2 is shorter"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_refused(what: str) -> None:
    text, message = BROKEN[what]
    tables = (np.arange(3),) if "constant" in text else ()
    with pytest.raises(ValueError, match=message):
        from_loops(kernel(HEAD + text, tables=tables))


def test_other_tensors_than_the_file_says() -> None:
    text = "f(a: int64[400000]) -> (b: int64[400000]):\n  for i in 400000:\n    b[i] = a[i]"
    with pytest.raises(ValueError, match=r"kernel f.*other tensors"):
        from_loops(kernel(text))
    with pytest.raises(IRError, match="input in the memory of an output"):
        small = "f(a: int8[4]) -> (b: int64[4]):\n  for i in 4:\n    b[i] = int64(a[i])"
        from_loops(replace(kernel(small), in_place=((0, 0),)))


def test_the_names_of_loops_are_no_names_of_code() -> None:
    """A kernel named like a function of the C library does not replace it."""
    text = HEAD.replace("f(", "sin(").replace("int64", "float64") + "  for i in 4:\n    b[i] = sin(a[i])"
    assert np.allclose(from_loops(kernel(text, "float64"))(np.arange(4.0))[0], np.sin(np.arange(4.0)))


COUNT = int(os.environ.get("CELOSIA_LOOPS", "12"))
"""Changed texts of each kernel."""
EDGE = 4096
"""Bytes around outputs that nothing may write."""
CASES = {
    "AveragePool": ({"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}, [(2, 3, 9, 9)]),
    "Conv": ({"pads": [1, 1, 1, 1]}, [(1, 4, 9, 9), (4, 4, 3, 3)]),
    "Gather": ({"axis": 0}, [(9, 3), "indices"]),
    "LSTM": ({"hidden_size": 4}, [(3, 1, 5), (1, 16, 5), (1, 16, 4)]),
    "Softmax": ({"axis": -1}, [(3, 50)]),
    "Pad": ({}, [(3, 5), "pads"]),
}


@pytest.mark.parametrize("op", CASES)
def test_what_the_compiler_writes_means_the_same(op: str, monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """A kernel of the compiler that is parsed, guarded and compiled again, without the cache, gives the same bytes."""
    rng = np.random.default_rng(0)
    special = {"indices": np.array([8, -9, 0]), "pads": np.array([1, 2, 0, 1])}
    attrs, shapes = CASES[op]
    inputs = [special[s] if isinstance(s, str) else rng.standard_normal(tuple(map(int, s))).astype("f") for s in shapes]
    types = [
        value if op == "Pad" and number else (value.shape, value.dtype.name) for number, value in enumerate(inputs)
    ]
    original = compile_op(op, attrs, types, outputs=1)
    assert original.loops
    monkeypatch.setenv("CELOSIA_CACHE", str(tmp_path))
    monkeypatch.setattr("celosia.compiler.cpu.llvm.compile_loops._kernels", {})
    guarded = from_loops(replace(original, code=b"", host=""))
    assert guarded.code != b"" and guarded.name == "guarded"
    for first, again in zip(original(*inputs), guarded(*inputs), strict=True):
        assert first.tobytes() == again.tobytes()


def changed(text: str, rng: random.Random) -> str:
    """Return the text with a number, name or sign changed, or with a line removed or doubled."""
    head, *lines = text.splitlines()
    line = rng.randrange(len(lines))
    if rng.random() < 0.1:
        lines[line : line + 1] = rng.choice(([], [lines[line]] * 2))
        return "\n".join((head, *lines))
    words = re.split(r"(?<![\w.])(\d+|[-+*]|<=|<|[a-z_][\w.]*)(?![\w.])", lines[line])
    for at in rng.sample(range(1, len(words), 2), len(words) // 2):
        word = words[at]
        if word.isdecimal():
            words[at] = rng.choice((word + "0", str(int(word) + rng.choice((-1, 1, 7))), "3", "0", "1000000007"))
        elif word in ("+", "-", "*"):
            words[at] = rng.choice("+-*")
        elif word in ("<", "<="):
            words[at] = "<" if word == "<=" else "<="
        elif rng.random() < 0.3:
            words[at] = rng.choice([other for other in words[1::2] if other[0].isalpha()])
        else:
            continue
        break
    lines[line] = "".join(words)
    return "\n".join((head, *lines))


@pytest.mark.parametrize("op", CASES)
def test_loops_changed_at_random(op: str) -> None:
    """Randomly changed loops are refused in a sentence, or run and leave memory around their outputs alone."""
    special = {"indices": np.array([8, -9, 0]), "pads": np.array([1, 2, 0, 1])}
    given = [special[s] if isinstance(s, str) else np.ones(tuple(map(int, s)), np.float32) for s in CASES[op][1]]
    types = [value if op == "Pad" and number else (value.shape, value.dtype.name) for number, value in enumerate(given)]
    own = compile_op(op, CASES[op][0], types, outputs=1)
    ran = 0
    for seed in range(COUNT):
        text = changed(own.loops, random.Random(f"{op} {seed}"))
        try:
            if iterations(T.parse(text).body) > 10**6:
                continue
            made = from_loops(replace(own, loops=text, code=b"", host=""))
        except (ValueError, RuntimeError, TypeError, KeyError, AttributeError) as error:
            assert str(error)
            continue
        sizes = [np.dtype(dtype).itemsize * int(np.prod(shape)) for dtype, shape in made.outputs]
        around = [np.full(size + 2 * EDGE, 0xA5, np.uint8) for size in sizes]
        outputs = [
            each[EDGE : EDGE + size].view(dtype).reshape(shape)
            for each, size, (dtype, shape) in zip(around, sizes, made.outputs)
        ]
        try:
            made.run([*given], outputs)
        except MemoryError:  # of a workspace larger than this machine
            continue
        assert all((each[:EDGE] == 0xA5).all() and (each[-EDGE:] == 0xA5).all() for each in around)
        ran += 1
    assert ran > COUNT // 10


def test_what_is_certainly_inside_stays() -> None:
    text = HEAD + "  for i in 4:\n    b[i] = (a[(3 - i)] + a[(i % 2)])"
    assert str(clamp_accesses(T.parse(text))).splitlines()[1:] == text.splitlines()[1:]
