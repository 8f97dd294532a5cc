"""Kernels of the tile language, beside the compiler's own layers and beside onnxruntime.

python -m benchmarks language
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

import celosia.language as cl
from benchmarks.cpu import SECONDS, error
from benchmarks.kernels import _Writer
from benchmarks.rows import ROOT, Request, Row, Say
from celosia.compiler.language.accelerator import build_verified_image
from celosia.compiler.tensorize.plan import Planner
from celosia.compiler.tune.kernel_trial import time_alternating
from celosia.driver.workstation.oracle import open_session
from celosia.hw.spec.config import Config

Array = NDArray[Any]
COMMAND = "python -m benchmarks language"
LINEAR = ((64, 64, 64), (128, 128, 512), (64, 256, 4096), (100, 72, 200), (33, 500, 1000))
"""Rows, columns and depth; the last two are ragged."""
CONVOLUTIONS = ((28, 64, 64), (14, 128, 256))
"""Rows and columns, channels, output channels."""
SOFTMAXES = ((128, 128), (197, 197))
"""Rows and columns."""
ATTENTIONS = ((12, 64, 32), (12, 128, 32))
"""Heads, tokens and columns of a head: those of MiniLM."""
MAX_LINES = 1500
FLOAT = 1e-4


def linear(x, w, par, y, M, N, K, BM: cl.constexpr, BN: cl.constexpr):  # type: ignore[no-untyped-def]
    """y [M, N] = requantised (x [M, K] wᵀ), of int8; w [N, K]."""
    m, n = cl.program_id(0) * BM, cl.program_id(1) * BN
    acc = cl.zeros((BM, BN), cl.int32)
    for k in cl.range(0, K, 16):
        a = cl.load(x, (m, k), (BM, 16), other=x.zero_point)
        b = cl.load(w, (n, k), (BN, 16))
        acc = cl.dot(a, b.T, acc)
    cl.store(y, (m, n), cl.requantise(acc, cl.load(par, (n,), (BN,)), zero_point=y.zero_point))


def conv3x3(x, w, par, y, H, W, C, N, BH: cl.constexpr, BN: cl.constexpr):  # type: ignore[no-untyped-def]
    """y [H, W, N] = requantised 3x3 convolution of x [H, W, C], of int8; w [N, 3, 3, C]."""
    row, n = cl.program_id(0) * BH, cl.program_id(1) * BN
    acc = cl.zeros((BH * W, BN), cl.int32)
    for c in cl.range(0, C, 16):
        for dy in cl.static_range(3):
            for dx in cl.static_range(3):
                a = cl.load(x, (row + dy - 1, dx - 1, c), (BH, W, 16), other=x.zero_point)
                b = cl.load(w, (n, dy, dx, c), (BN, 1, 1, 16))
                acc = cl.dot(a.reshape(BH * W, 16), b.reshape(BN, 16).T, acc)
    v = cl.requantise(acc, cl.load(par, (n,), (BN,)), zero_point=y.zero_point)
    cl.store(y, (row, 0, n), v.reshape(BH, W, BN))


def shares(v: Any, inside: Any, powers: Any, steps: Any) -> Any:
    """The softmax of rows of int8 v [rows, columns], where `inside` [columns], in steps; see cl.powers."""
    v = v.to(cl.int32)
    e = cl.load(powers + (255 + v - cl.max(v, axis=1)[:, None]), mask=inside, other=0.0)
    return cl.rint(cl.div_rn(e * steps, cl.sum(e, axis=1, ordered=True)[:, None]))


def softmax_bytes(x, powers, steps, y, N, BM: cl.constexpr, BLOCK: cl.constexpr):  # type: ignore[no-untyped-def]
    """y [M, N] = softmax of the rows of x, of int8."""
    row, inside = cl.program_id(0) * BM, cl.arange(0, BLOCK) < N
    v = cl.load(x, (row, 0), (BM, BLOCK), other=-128)
    cl.store(y, (row, 0), (shares(v, inside, powers, steps) + y.zero_point).to(cl.int8))


def attention_bytes(  # type: ignore[no-untyped-def]
    q, k, v, of_scores, powers, steps, of_y, y, T, BM: cl.constexpr, BT: cl.constexpr, E: cl.constexpr,
    D: cl.constexpr,
):  # fmt: skip
    """y [heads, M, D] of q [heads, M, E], k [heads, T, E] and v [heads, T, D], of int8."""
    head, row, inside = cl.program_id(0), cl.program_id(1) * BM, cl.arange(0, BT) < T
    a = cl.load(q, (head, row, 0), (1, BM, E)).reshape(BM, E)
    b = cl.load(k, (head, 0, 0), (1, BT, E)).reshape(BT, E)
    s = cl.where(inside, cl.requantise(cl.dot(a, b.T), cl.load(of_scores, (0,), (1,))), -128)
    p = shares(s, inside, powers, steps).to(cl.int8)
    values = cl.load(v, (head, 0, 0), (1, BT, D), other=v.zero_point).reshape(BT, D)
    mixed = cl.requantise(cl.dot(p, values), cl.load(of_y, (0,), (1,)), zero_point=y.zero_point)
    cl.store(y, (head, row, 0), mixed.reshape(1, BM, D))


@cl.jit(target="cpu", threads=1)
def add(x, y, out, n, BLOCK: cl.constexpr):  # type: ignore[no-untyped-def]
    """out [n] = x + y."""
    at = cl.program_id(0) * BLOCK + cl.arange(0, BLOCK)
    cl.store(out + at, cl.load(x + at, mask=at < n) + cl.load(y + at, mask=at < n), mask=at < n)


@cl.jit(target="cpu", threads=1)
def softmax(x, y, N, BLOCK: cl.constexpr):  # type: ignore[no-untyped-def]
    """y [rows, N] = softmax of x along its last axis."""
    row, columns = cl.program_id(0), cl.arange(0, BLOCK)
    mask = columns < N
    v = cl.load(x + row * N + columns, mask=mask, other=-float("inf"))
    e = cl.exp(v - cl.max(v, axis=0))
    cl.store(y + row * N + columns, e / cl.sum(e, axis=0), mask=mask)


@cl.jit(target="cpu", threads=1)
def layernorm(x, w, b, y, N, eps, BLOCK: cl.constexpr):  # type: ignore[no-untyped-def]
    """y [rows, N] = x normalised along its last axis, times w [N] plus b [N]."""
    row, columns = cl.program_id(0), cl.arange(0, BLOCK)
    mask = columns < N
    v = cl.load(x + row * N + columns, mask=mask, other=0.0)
    d = cl.where(mask, v - cl.sum(v, axis=0) / N, 0.0)
    scale = 1.0 / cl.sqrt(cl.sum(d * d, axis=0) / N + eps)
    v = d * scale * cl.load(w + columns, mask=mask) + cl.load(b + columns, mask=mask)
    cl.store(y + row * N + columns, v, mask=mask)


@cl.autotune(
    [cl.Config(BM=m, BN=n, BK=k) for m in (64, 128, 512) for n in (64, 128) for k in (64, 128)], ("M", "N", "K")
)
@cl.jit(target="cpu", threads=1)
def matmul(a, b, c, M, N, K, BM: cl.constexpr, BN: cl.constexpr, BK: cl.constexpr):  # type: ignore[no-untyped-def]
    """c [M, N] = a [M, K] b [K, N]."""
    m, n = cl.program_id(0) * BM, cl.program_id(1) * BN
    acc = cl.zeros((BM, BN), cl.float32)
    for k in cl.range(0, K, BK):
        acc = cl.dot(cl.load(a, (m, k), (BM, BK)), cl.load(b, (k, n), (BK, BN)), acc)
    cl.store(c, (m, n), acc)


@cl.autotune([cl.Config(BM=m, BN=n) for m in (64, 128, 256) for n in (64, 128, 256)], ("L",))
@cl.jit(target="cpu", threads=1)
def attention(q, k, v, o, L, scale, BM: cl.constexpr, BN: cl.constexpr, D: cl.constexpr):  # type: ignore[no-untyped-def]
    """o [L, D] = softmax(scale q kᵀ) v, without the matrix in between."""
    rows = cl.program_id(0) * BM
    queries = cl.load(q, (rows, 0), (BM, D)) * scale
    most, total = cl.full((BM,), -float("inf"), cl.float32), cl.zeros((BM,), cl.float32)
    acc = cl.zeros((BM, D), cl.float32)
    for n in cl.range(0, L, BN):
        s = cl.dot(queries, cl.load(k, (n, 0), (BN, D)).T)
        if L % BN:
            s = cl.where((n + cl.arange(0, BN) < L)[None, :], s, -float("inf"))
        new = cl.maximum(most, cl.max(s, axis=1))
        alpha, p = cl.exp(most - new), cl.exp(s - new[:, None])
        total = total * alpha + cl.sum(p, axis=1)
        acc = cl.dot(p, cl.load(v, (n, 0), (BN, D)), acc * alpha[:, None])
        most = new
    cl.store(o, (rows, 0), acc / total[:, None])


def rows(asked: Request) -> Iterator[Row]:
    """All of them; layers by default on the RTL."""
    if asked.device == "functional":
        raise SystemExit("python -m benchmarks language: the functional device counts no cycles; take timed or rtl")
    os.environ.pop("CELOSIA_INTERPRET", None)
    yield lines()
    yield call()
    yield from cpu_rows(asked.seconds or SECONDS, asked.say)
    yield from layer_rows(asked.device or "rtl", asked.preset, asked.say)


def lines() -> Row:
    """Count the lines of the language's own code, comments and blank lines among them."""
    files = sorted((ROOT / "compiler" / "language").glob("*.py"))
    count = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    what = "lines of compiler/language, all of them"
    return Row("language/lines", what, f"at most {MAX_LINES}", f"{count}", count <= MAX_LINES, COMMAND)


def call() -> Row:
    """Measure what a call costs beside the kernel."""
    x = np.zeros(1, np.float32)
    add[(1,)](x, x.copy(), x.copy(), 1, 16)
    y, out = x.copy(), x.copy()
    (micros,) = time_alternating([lambda: add[(1,)](x, y, out, 1, 16)], 0.5)
    what = "a call of a kernel that is compiled, of one element"
    return Row("language/call", what, "at most 50 µs", f"{micros * 1e6:.1f} µs", micros <= 50e-6, COMMAND)


# The accelerator ---------------------------------------------------------------------------------------------------


def layer_rows(device: str, config: str, say: Say, most: int = 100) -> Iterator[Row]:
    """Cycles over those of the compiler's own layer, of `most` kernels of each kind; bytes compared with the
    interpreter's. Softmax and attention are timed, on `config` with softmax = 8, or as much as it may have."""
    sizes = [cl.Config(BM=m, BN=n) for m in (16, 32, 64, 96, 128) for n in (16, 32, 64)]
    kernel = cl.jit(linear, config=config)
    for m, n, k in LINEAR[:most]:
        limit = 1.02 if not m % 16 and not n % 16 and not k % 16 else 1.10
        args = *_operands(((m, k), (n, k), (m, n))), m, n, k
        grid = lambda meta, m=m, n=n: (cl.cdiv(m, meta["BM"]), cl.cdiv(n, meta["BN"]))  # noqa: E731
        yield _layer(f"linear {m}x{n}x{k}", kernel, sizes, grid, args, args[3].array, device, limit, say)
    sizes = [cl.Config(BH=m, BN=n) for m in (2, 4, 7, 8, 14) for n in (16, 32, 64)]
    kernel = cl.jit(conv3x3, config=config)
    for h, c, n in CONVOLUTIONS[:most]:
        args = *_operands(((h, h, c), (n, 3, 3, c), (h, h, n))), h, h, c, n
        grid = lambda meta, h=h, n=n: (cl.cdiv(h, meta["BH"]), cl.cdiv(n, meta["BN"]))  # noqa: E731
        what = f"convolution 3x3 of {h}x{h}x{c} to {n}"
        yield _layer(what, kernel, sizes, grid, args, args[3].array, device, 1.05, say)
    cfg = Config.load(config)
    yield from _head_rows(replace(cfg, softmax=min(8, cfg.block_out // 4)), say, most)


def _head_rows(cfg: Config, say: Say, most: int) -> Iterator[Row]:
    """Softmaxes and attention."""
    kernel = cl.jit(softmax_bytes, config=cfg)
    for m, n in SOFTMAXES[:most]:
        x, y = _bytes(m, n), np.zeros((m, n), np.int8)
        args: tuple[Any, ...] = x, cl.powers(n, 0.05), 256.0, cl.quantised(y, -128), n
        sizes = [cl.Config(BM=rows, BLOCK=n) for rows in (16, 32, 64, 128, 256)]
        grid: Any = lambda meta, m=m: (cl.cdiv(m, meta["BM"]),)  # noqa: E731
        yield _layer(f"softmax of {m}x{n}", kernel, sizes, grid, args, y, "timed", 1.0, say)
    kernel = cl.jit(attention_bytes, config=cfg)
    for heads, t, d in ATTENTIONS[:most]:
        q, k, v, y = (_bytes(heads, t, d, seed=seed) for seed in range(4))
        args = q, k, v, cl.parameters([0], [0.002]), cl.powers(t, 0.05), 127.0, cl.parameters([0], [0.02]), y, t
        sizes = [cl.Config(BM=rows, BT=t, E=d, D=d) for rows in (8, 16, 32, 48, 64, 128)]
        grid = lambda meta, heads=heads, t=t: (heads, cl.cdiv(t, meta["BM"]))  # noqa: E731
        yield _layer(f"attention of {heads}x{t}x{d}", kernel, sizes, grid, args, y, "timed", 1.02, say)


def _bytes(*shape: int, seed: int = 0) -> NDArray[np.int8]:
    return np.random.default_rng(seed).integers(-128, 128, shape).astype(np.int8)


def _operands(shapes: tuple[tuple[int, ...], ...]) -> tuple[Any, ...]:
    """x, w, parameters and y of a sum of products of these shapes."""
    rng = np.random.default_rng(0)
    x, w, y = (rng.integers(-128, 128, shape).astype(np.int8) for shape in shapes)
    depth = prod(shapes[1][1:])
    par = cl.parameters(rng.integers(-1000, 1000, len(w)), rng.random(len(w)) / (30 * depth**0.5))
    return cl.quantised(x, 3), w, par, cl.quantised(y, -5)


def _layer(
    name: str, kernel: Any, sizes: list[Any], grid: Any, args: tuple[Any, ...], y: NDArray[np.int8], device: str,
    limit: float, say: Say,
) -> Row:  # fmt: skip
    say(name)
    what = f"{name} in the language: cycles over the compiler's own layer"
    try:
        chosen = cl.autotune(sizes)(kernel).config(grid, args, {}).values
    except cl.LanguageError as error:  # no block fits the scratchpads of a small Config
        return Row(f"language/{name.replace(' ', '_')}", what, f"at most {limit}", f"skipped: {error}", None, COMMAND)
    variant, arrays, _ = kernel.variant(grid, args, chosen)
    ours = variant(arrays, device)
    found = y.copy()
    os.environ["CELOSIA_INTERPRET"] = "1"
    kernel[grid](*args, **chosen)
    del os.environ["CELOSIA_INTERPRET"]
    different = int(np.count_nonzero(found != y))
    variant.image = build_verified_image(variant.cfg, variant.layers, Planner(variant.cfg))
    own = variant(arrays, device)
    ratio = ours["cycles"] / own["cycles"]
    measured = (
        f"{ratio:.3f} ({ours['cycles']:,} of {own['cycles']:,} cycles, {device}), {different} bytes differ; {chosen}"
    )
    met = ratio <= limit and different == 0
    details = {"config": variant.cfg.name, "cycles": ours["cycles"], "own": own["cycles"]}
    return Row(f"language/{name.replace(' ', '_')}", what, f"at most {limit}", measured, met, COMMAND, details)


# The CPU -----------------------------------------------------------------------------------------------------------


def cpu_rows(seconds: float, say: Say, names: Sequence[str] = ()) -> Iterator[Row]:
    """Kernels on one thread of this processor, all or those of `names`, beside onnxruntime and numpy."""
    for name in names or CPU:
        least, make = CPU[name]
        say(name)
        writer = _Writer()
        run, out, numpys = make(writer)
        model = writer.model()
        theirs = open_session(model, threads=1, exact=False)
        names = [value.name for value in theirs.get_outputs()]
        run()
        (expected,) = theirs.run(names, writer.feed)
        gap = error(out, expected)
        with threadpool_limits(1):  # numpy, too
            sides = [run, numpys, lambda: theirs.run(names, writer.feed)]  # noqa: B023
            ours, numpy_seconds, other = time_alternating(sides, seconds)
        ratio = other / ours
        measured = (
            f"{ratio:.2f} × onnxruntime, {numpy_seconds / ours:.1f} × numpy ({ours * 1e6:.0f} µs), error {gap:.0e}"
        )
        what = f"{name} in the language on the CPU, one thread"
        met = ratio >= least and gap <= FLOAT
        details = {"onnxruntime": ratio, "numpy": numpy_seconds / ours, "error": gap}
        yield Row(f"language/cpu/{name}", what, f"at least {least} × onnxruntime", measured, met, COMMAND, details)


Made = tuple[Callable[[], object], Array, Callable[[], object]]
"""What runs the kernel, where its result is, and the same in numpy."""


def _add(w: _Writer) -> Made:
    x, y = w.floats(1 << 18), w.floats(1 << 18)
    out = np.empty_like(x)
    w.node("Add", w.input(x), w.input(y))
    return lambda: add[(len(x) // 4096,)](x, y, out, len(x), 4096), out, lambda: x + y


def _softmax(w: _Writer) -> Made:
    x = w.floats(512, 1024)
    out = np.empty_like(x)
    w.node("Softmax", w.input(x))

    def numpys() -> Array:
        e: Array = np.exp(x - x.max(1, keepdims=True))
        return np.asarray(e / e.sum(1, keepdims=True))

    return lambda: softmax[(512,)](x, out, 1024, 1024), out, numpys


def _layernorm(w: _Writer) -> Made:
    x, scale, bias = w.floats(512, 1024), w.floats(1024), w.floats(1024)
    out = np.empty_like(x)
    w.node("LayerNormalization", w.input(x), w.input(scale), w.input(bias), epsilon=1e-5)

    def numpys() -> Array:
        d: Array = x - x.mean(1, keepdims=True)
        return np.asarray(d / np.sqrt((d * d).mean(1, keepdims=True) + 1e-5) * scale + bias)

    return lambda: layernorm[(512,)](x, scale, bias, out, 1024, 1e-5, 1024), out, numpys


def _matmul(w: _Writer) -> Made:
    a, b = w.floats(512, 512), w.floats(512, 512)
    out = np.empty_like(a)
    w.node("MatMul", w.input(a), w.input(b))
    grid = lambda meta: (cl.cdiv(512, meta["BM"]), cl.cdiv(512, meta["BN"]))  # noqa: E731
    return lambda: matmul[grid](a, b, out, 512, 512, 512), out, lambda: a @ b


def _attention(w: _Writer) -> Made:
    q, k, v = (w.floats(1024, 64) for _ in range(3))
    out = np.empty_like(q)
    scores = w.node("MatMul", w.node("Mul", w.input(q), w.constant(0.125, np.float32)),
                    w.node("Transpose", w.input(k), perm=[1, 0]))  # fmt: skip
    w.node("MatMul", w.node("Softmax", scores), w.input(v))

    def numpys() -> Array:
        s = q @ k.T * np.float32(0.125)
        e: Array = np.exp(s - s.max(1, keepdims=True))
        return np.asarray(e / e.sum(1, keepdims=True) @ v)

    grid = lambda meta: (cl.cdiv(1024, meta["BM"]),)  # noqa: E731
    return lambda: attention[grid](q, k, v, out, 1024, 0.125, D=64), out, numpys


CPU: dict[str, tuple[float, Callable[[_Writer], Made]]] = {
    "add": (1.0, _add), "softmax": (1.0, _softmax), "layernorm": (1.0, _layernorm), "matmul": (0.7, _matmul),
    "attention": (1.0, _attention),
}  # fmt: skip
