"""Softmax and attention as kernels give onnxruntime's bytes on the accelerator, in the interpreter and on the CPU."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from benchmarks.language import attention_bytes, shares, softmax_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from language_kernels import both, interpreted, product
from onnx import TensorProto, helper, numpy_helper
from thorough import some, tries

import celosia
import celosia.language as cl
from celosia.hw.spec.config import PRESETS

from ..configs import CONFIGS as SMALL
from ..oracle import opened

CONFIGS = {
    "4x4": SMALL["4x4-softmax2"],
    "tiny": replace(PRESETS["tiny"], softmax=1),
    "pynq": replace(PRESETS["pynq"], softmax=4),
    "pynq8": replace(PRESETS["pynq"], softmax=8),
    "8x4": replace(SMALL["4x4-softmax2"], block_in=8),
    "4x8": replace(SMALL["4x4-softmax2"], block_out=8, forward=False),
}


@cache
def on(config: str, function: Any) -> Any:
    return cl.jit(function, target="cpu") if config == "cpu" else cl.jit(function, config=CONFIGS[config])


def bytes_of(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-128, 128, shape).astype(np.int8)


def by_onnxruntime(nodes: list[Any], inputs_by_name: dict[str, np.ndarray], **constants: Any) -> np.ndarray:
    """Return onnxruntime's tensor y for these inputs."""
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT8, x.shape) for name, x in inputs_by_name.items()]
    graph = helper.make_graph(
        nodes, "g", inputs, [helper.make_tensor_value_info("y", TensorProto.INT8, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    (y,) = opened(helper.make_model(graph, opset_imports=opsets, ir_version=10)).run(None, inputs_by_name)
    return np.asarray(y)


def softmax_node(x: str, y: str) -> Any:
    names = [x, "sx", "none", "sy", "zy"]
    return helper.make_node("QLinearSoftmax", names, [y], domain="com.microsoft", axis=-1, opset=13)


# Softmax ------------------------------------------------------------------------------------------------------------


def softmax_of(config: str, x: np.ndarray, zero: int, scale: float, steps: float, bm: int, block: int) -> np.ndarray:
    """Return the kernel's bytes, after a comparison with the interpreter."""
    y, (rows, columns) = np.zeros_like(x), x.shape
    arguments = x, cl.powers(columns, scale), steps, cl.quantised(y, zero), columns, bm, block
    compiled, interpreted_output = both(lambda: on(config, softmax_bytes)[(cl.cdiv(rows, bm),)](*arguments), y)
    assert np.array_equal(compiled, interpreted_output)
    return compiled


@settings(max_examples=tries(12))
@given(
    st.sampled_from([*CONFIGS, "cpu"]), st.integers(1, 20), st.integers(2, 50), st.sampled_from([1, 3, 4]),
    st.integers(0, 20), st.sampled_from([(-128, 256.0), (0, 127.0), (7, 200.0)]), st.floats(0.001, 0.5),
)  # fmt: skip
def test_softmax_is_onnxruntimes(
    config: str, rows: int, columns: int, bm: int, more: int, result: tuple[int, float], scale: float
) -> None:
    zero, steps = result
    x = bytes_of(np.random.default_rng(rows * columns), rows, columns)
    x[-1] = x[-1, 0]  # a row of equal elements
    outcome = softmax_of(config, x, zero, scale, steps, bm, columns + more)
    sy = np.float32(1 / (steps + 0.25))  # of which QLinearSoftmax makes as many whole steps
    expected = by_onnxruntime(
        [softmax_node("x", "y")], {"x": x}, sx=np.float32(scale), none=np.int8(0), sy=sy, zy=np.int8(zero)
    )
    assert np.array_equal(outcome, expected)


@pytest.mark.parametrize("config", some([*CONFIGS, "cpu"], ["4x4", "cpu"]))
def test_softmax_of_matrices(config: str) -> None:
    x = bytes_of(np.random.default_rng(0), 3, 10, 21)
    y, flat = np.zeros_like(x), np.zeros((30, 21), np.int8)

    def rows(x, powers, steps, y, N: cl.constexpr):
        at = cl.program_id(1), cl.program_id(0) * 4, 0
        v = cl.load(x, at, (1, 4, N)).reshape(4, N)
        cl.store(y, at, shares(v, cl.arange(0, N) < N, powers, steps).to(cl.int8).reshape(1, 4, N))

    powers = cl.powers(21, 0.05)
    kernel = cl.jit(rows, target="cpu") if config == "cpu" else cl.jit(rows, config=CONFIGS[config])
    compiled, interpreted_output = both(lambda: kernel[(3, 3)](x, powers, 100.0, y, 21), y)
    with interpreted():
        on("cpu", softmax_bytes)[(30,)](x.reshape(30, 21), powers, 100.0, flat, 21, 1, 21)
    assert np.array_equal(compiled, interpreted_output) and np.array_equal(compiled.reshape(30, 21), flat)
    assert len(np.unique(compiled)) > 10


def odd(x, powers, other, steps, y, N, WHICH: cl.constexpr, BM: cl.constexpr, BLOCK: cl.constexpr):
    """Compute something that is similar to the accelerator's softmax."""
    row, inside = cl.program_id(0) * BM, cl.arange(0, BLOCK) < N
    padding = {"padding of 0": 0, "padding of 127": 127}.get(WHICH, -128)
    v = cl.load(x, (row, 0), (BM, BLOCK), other=padding).to(cl.int32)
    if WHICH == "the negatives":
        v = cl.where(inside, 0 - v, -128)
    most = cl.max(v, axis=1)[:, None]
    match WHICH:
        case "the largest of another row":
            most = cl.max(v, axis=1)[None, :]
        case "the largest of a column":
            most = cl.max(v, axis=0)[None, :]
        case "the largest of all":
            most = cl.max(v)
        case "the least":
            most = cl.min(v, axis=1)[:, None]
        case "the largest of a column, as if of a row":
            most = cl.max(v, axis=0)[:, None]
        case "the largest of the rows behind":
            most = cl.max(cl.load(x, (row + 1, 0), (BM, BLOCK), other=-128).to(cl.int32), axis=1)[:, None]
    if WHICH == "two rows as one":
        v = v.reshape(BM // 2, 2 * BLOCK)
        inside, most = cl.arange(0, 2 * BLOCK) < N, cl.max(v, axis=1)[:, None]
    place = 255 + v - most
    if WHICH == "differences of bytes":
        place = 255 + (v.to(cl.int8) - most.to(cl.int8)).to(cl.int32)
    if WHICH == "the place before":
        place = place - 1
    if WHICH == "twice the distance":
        place = place + v - most
    if WHICH == "a mask that is one short":
        inside = cl.arange(0, BLOCK) < N - 1
    if WHICH == "a mask of every other":
        inside = inside & (cl.arange(0, BLOCK) % 2 == 0)
    mask = None if WHICH == "no mask" else inside
    e = (
        cl.load(powers + place, mask=mask)
        if WHICH != "powers of 1 behind"
        else cl.load(powers + place, inside, other=1.0)
    )
    total = cl.sum(e, axis=1, ordered=WHICH != "a sum in any order")[:, None]
    if WHICH == "the sum of a column":
        total = cl.sum(e, axis=0, ordered=True)[:, None]
    if WHICH == "the sum of other powers":
        total = cl.sum(cl.load(other + place, mask=inside), axis=1, ordered=True)[:, None]
    if WHICH == "shares of the rows behind":
        behind = cl.load(x, (row + 1, 0), (BM, BLOCK), other=-128).to(cl.int32)
        e = cl.load(powers + (255 + behind - cl.max(behind, axis=1)[:, None]), mask=inside, other=0.0)
    if WHICH == "shares of fewer":
        e = cl.where(cl.arange(0, BLOCK) < N - 1, e, 0.0)
    if WHICH == "doubles":
        e, total = e.to(cl.float64), total.to(cl.float64)
    share = cl.div_rn(e * steps, total)
    match WHICH:
        case "a reciprocal":
            share = e * steps / total
        case "steps behind the quotient":
            share = cl.div_rn(e, total) * steps
        case "turned round":
            share = share.T
        case "steps of another element":
            share = cl.div_rn(e * cl.load(other + 3), total)
    y_ = {"downwards": cl.floor, "upwards": cl.ceil}.get(WHICH, cl.rint)(share)
    y_ = y_ + (0.5 if WHICH == "half a zero point" else 3)
    if WHICH == "another range":
        y_ = cl.minimum(y_, 20)
    cl.store(y, (row, 0), y_.to(cl.int8).reshape(BM, BLOCK))


ODD = {
    "the largest of a column": "over its last axis",
    "the largest of all": "its first elements",
    "the largest of another row": "over its last axis",
    "the negatives": "it is of int8",
    "the least": "the largest element",
    "the largest of a column, as if of a row": "over its last axis",
    "the largest of the rows behind": "the largest element",
    "differences of bytes": "255 + v - cl.max",
    "the place before": "255 + v - cl.max",
    "twice the distance": "255 + v - cl.max",
    "a mask that is one short": "of the 12 columns of y, and here of 11",
    "a mask of every other": "its first elements",
    "no mask": "of the 12 columns of y, and here of 16",
    "powers of 1 behind": "powers are 0",
    "padding of 0": "what a softmax is of is -128",
    "padding of 127": "what a softmax is of is -128",
    "a sum in any order": "ordered=True",
    "the sum of a column": "over its last axis",
    "two rows as one": "is of the 12 columns of y",
    "shares of the rows behind": "are those that are added up",
    "the sum of other powers": "are those that are added up",
    "shares of fewer": "are those that are added up",
    "doubles": "ordered=True",
    "a reciprocal": "cl.div_rn",
    "steps behind the quotient": "cl.div_rn",
    "turned round": "",
    "steps of another element": "a power is cl.load",
    "downwards": "cl.rint",
    "upwards": "cl.rint",
    "half a zero point": "cl.rint",
    "another range": "cl.rint",
}


OUTSIDE = (
    "the least", "the largest of a column, as if of a row", "the largest of the rows behind", "differences of bytes",
    "the place before", "twice the distance", "the largest of another row",
)  # fmt: skip
"""Those that read beyond the table."""
ROUNDED = (
    "a sum in any order", "a reciprocal", "steps behind the quotient", "doubles", "powers of 1 behind", "padding of 0",
    "padding of 127", "the largest of all",
)  # fmt: skip
"""Those that only round differently, if at all: what is subtracted from all elements of a row hardly matters."""


@pytest.mark.parametrize("which", ["", *ODD])
def test_another_softmax_is_never_taken_for_this_one(which: str) -> None:
    """A kernel that is only similar to softmax is refused with a reason, and computes another result."""
    x = bytes_of(np.random.default_rng(3), 16, 12 if which != "turned round" else 16)
    y, (_, columns) = np.zeros_like(x), x.shape
    powers, other = cl.powers(columns, 0.04), cl.powers(columns, 0.05)
    arguments = x, powers, other, 127.0, y, columns, which, 16, 16
    with interpreted():
        on("cpu", odd)[(1,)](*arguments[:6], "", 16, 16)
    right = y.copy()
    if not which:
        on("4x4", odd)[(1,)](*arguments)
        assert np.array_equal(y, right)
        return
    with pytest.raises(cl.LanguageError, match=r"attention\.py:[0-9]+: .*" + re.escape(ODD[which])):
        on("4x4", odd)[(1,)](*arguments)
    if which not in OUTSIDE:
        with interpreted():
            on("cpu", odd)[(1,)](*arguments)
        assert not np.array_equal(y, right) or which in ROUNDED


def test_a_softmax_in_place() -> None:
    x = bytes_of(np.random.default_rng(0), 4, 8)
    with pytest.raises(cl.LanguageError, match="is read and written"):
        on("4x4", softmax_bytes)[(1,)](x, cl.powers(8, 0.04), 127.0, x, 8, 4, 8)


def test_powers_that_are_none() -> None:
    x, y = bytes_of(np.random.default_rng(0), 4, 8), np.zeros((4, 8), np.int8)
    for change in ({3: -1.0}, {7: np.nan}, {200: np.inf}, {255: 0.0}, {255: 3e38}):
        powers = cl.powers(8, 0.04)
        powers[[*change]] = [*change.values()]
        with pytest.raises(cl.LanguageError, match=r"as cl\.powers makes them"):
            on("4x4", softmax_bytes)[(1,)](x, powers, 127.0, y, 8, 4, 8)
    right = cl.powers(8, 0.04)
    others = (right.astype(np.float64), "a power is cl.load"), (np.append(right, right), "powers are float32[256]")
    for powers, says in others:
        with pytest.raises(cl.LanguageError, match=re.escape(says)):
            on("4x4", softmax_bytes)[(1,)](x, powers, 127.0, y, 8, 4, 8)
    with pytest.raises(cl.LanguageError, match="takes a Config with softmax"):
        cl.jit(softmax_bytes, config="tiny")[(1,)](x, cl.powers(8, 0.04), 127.0, y, 8, 4, 8)
    with pytest.raises(cl.LanguageError, match=r"scale.*8 and 0\.0"):
        cl.powers(8, 0.0)


# Attention ----------------------------------------------------------------------------------------------------------


def heads(
    q, k, v, mask, of_scores, powers, steps, of_y, y, T, BM: cl.constexpr, BT: cl.constexpr, D: cl.constexpr,
    BESIDE: cl.constexpr, MASK: cl.constexpr, P: cl.constexpr, WHICH: cl.constexpr,
):  # fmt: skip
    """Compute attention with zero points and masks on [heads, tokens, D] or [tokens, heads * D]. WHICH: a planted
    error."""
    head, row, inside = cl.program_id(0), cl.program_id(1) * BM, cl.arange(0, BT) < T

    def matrix(x, head, row, rows):
        if BESIDE:
            return cl.load(x, (row, head * D), (rows, D), other=x.zero_point)
        return cl.load(x, (head, row, 0), (1, rows, D), other=x.zero_point).reshape(rows, D)

    other = (head + 1) % cl.num_programs(0)
    a = matrix(q, head, row if WHICH != "the first queries" else 0, BM)
    a = a.T if WHICH == "queries the other way round" else a
    b = matrix(k, other if WHICH == "the keys of another head" else head, int(WHICH == "keys from the second on"), BT)
    s = cl.dot(a, b if WHICH == "keys that are not turned" else b.T)
    s = cl.requantise(s, cl.load(of_scores, (0,), of_scores.shape))
    if MASK == "matrix":
        s = cl.residual_add(s, cl.load(mask, (row, 0), (BM, BT)), 3, 2, 0, 2)
    if MASK == "row":
        s = cl.residual_add(s, cl.load(mask, (0, 0), (1, BT)), 3, 2, 0, 2)
    if WHICH != "scores of nothing":
        s = cl.where(inside, s, -128)
    p = (shares(s, inside, powers, steps) + P).to(cl.int8)
    if WHICH == "twice shared":
        p = (shares(cl.where(inside, p, -128), inside, powers, steps) + P).to(cl.int8)
    if WHICH == "shares the other way round":
        p = p.T
    values = matrix(v, other if WHICH == "the values of another head" else head, 0, BT)
    if WHICH == "values beyond the last":
        values = cl.load(v, (head, 0, 0), (1, BT, D), other=5).reshape(BT, D)
    values = values.T if WHICH == "values that are turned" else values
    if P and WHICH != "shares with their zero point":
        v_ = values.to(cl.int32) - v.zero_point
        o = cl.dot(p.to(cl.int32) - P, v_)
    else:
        o = cl.dot(p, values)
    o = cl.requantise(o, cl.load(of_y, (0,), of_y.shape), zero_point=y.zero_point)
    cl.store(y, (row, head * D) if BESIDE else (head, row, 0), o if BESIDE else o.reshape(1, BM, D))


def attended(
    config: str, count: int, queries: int, keys: int, columns: int, bm: int, more: int = 0, beside: bool = False,
    mask: str = "", zeros: tuple[int, int, int, int] = (0, 0, 0, 0), which: str = "", device: Any = "functional",
) -> tuple[np.ndarray, np.ndarray, dict[str, Any], list[Any]]:  # fmt: skip
    """Return (the kernel's bytes, onnxruntime's, the report, the layers). zeros: of q, k, v and the probabilities."""
    rng = np.random.default_rng(count * queries + keys)
    q, k, v = (bytes_of(rng, count, rows, columns) for rows in (queries, keys, keys))
    bias = bytes_of(rng, 1 if mask == "row" else queries, keys)
    s, y_scale = np.float32(0.002 * 8 / columns**0.5), np.float32(1 / 40)
    powers, steps = cl.powers(keys, 0.06), 127.0 if zeros[3] == 0 else 255.0

    def placed(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x.swapaxes(0, 1)).reshape(x.shape[1], -1) if beside else x

    y = placed(np.zeros_like(q))
    arguments = (*(cl.quantised(placed(x), zero) for x, zero in zip((q, k, v), zeros)), bias, cl.parameters([0], [s]),
             powers, steps, cl.parameters([0], [y_scale]), cl.quantised(y, -3), keys, bm, keys + more, columns, beside,
             mask, zeros[3], which)  # fmt: skip
    grid, reports = (count, cl.cdiv(queries, bm)), []
    kernel = on(config, heads)

    def run() -> None:
        reports.append(kernel[grid](*arguments, device=device).report)

    compiled, interpreted_output = both(run, y)
    assert np.array_equal(compiled, interpreted_output)
    variant = list(kernel.variants.values())[-2]
    layers = getattr(variant, "layers", [])
    one, zero = np.float32(1), np.int8(0)
    product = lambda *names: helper.make_node("QLinearMatMul", [*names[:-1]], [names[-1]])  # noqa: E731
    nodes = [
        helper.make_node("Transpose", ["k"], ["turned"], perm=[0, 2, 1]),
        product("q", "s", "zq", "turned", "one", "zk", "one", "zero", "scores"), softmax_node("scores", "p"),
        product("p", "sy", "zy", "v", "sv", "zv", "one", "z", "y"),
    ]  # fmt: skip
    sy = np.float32(1 / (steps + 0.25))
    expected = by_onnxruntime(
        nodes, {"q": q, "k": k, "v": v}, s=s, one=one, zero=zero, none=zero, sx=np.float32(0.06), sy=sy,
        zy=np.int8(zeros[3]), sv=np.float32(y_scale / sy), z=np.int8(-3),
        **{name: np.int8(z) for name, z in zip(("zq", "zk", "zv"), zeros)},
    )  # fmt: skip
    return compiled, placed(expected), reports[0], layers


@settings(max_examples=tries(10))
@given(
    st.sampled_from([*CONFIGS, "cpu"]), st.integers(1, 3), st.integers(1, 20), st.integers(2, 24),
    st.sampled_from([4, 8, 16, 20]), st.sampled_from([1, 4, 8]), st.integers(0, 9), st.booleans(),
    st.sampled_from([(0, 0, 0, 0), (3, -7, 0, 0), (0, 0, 5, -128), (-128, 1, -20, 9)]),
)  # fmt: skip
def test_attention_is_onnxruntimes(
    config: str, count: int, queries: int, keys: int, columns: int, bm: int, more: int, beside: bool,
    zeros: tuple[int, int, int, int],
) -> None:  # fmt: skip
    result, expected, _, _ = attended(config, count, queries, keys, columns, bm, more, beside, zeros=zeros)
    assert np.array_equal(result, expected)


@pytest.mark.parametrize("config", ["4x4", "pynq"])
@pytest.mark.parametrize("mask", ["row", "matrix"])
def test_masks_are_added_to_scores(config: str, mask: str) -> None:
    result, without, _, layers = attended(config, 2, 10, 13, 16, 4, 3, mask=mask)
    assert not np.array_equal(result, without) and len(layers) == 6


def test_scores_are_nowhere_in_dram() -> None:
    """Scores stay on chip if heads fill whole channel groups; other heads run one by one."""
    result, expected, report, layers = attended("pynq", 2, 20, 48, 32, 16, 16, device="timed")
    assert np.array_equal(result, expected)
    (block,) = layers
    assert block.is_block and report["cycles"] > 0
    variant = list(on("pynq", heads).variants.values())[-2]
    (launch,) = variant.image.launches
    assert launch.bytes_stored == [2 * 20 * 32]
    _, _, _, layers = attended("pynq", 2, 20, 40, 32, 16, 8)
    assert [layer.kind for layer in layers].count("Softmax") == 2


WRONG = {
    "the first queries": "the rows of q are those of y", "the keys of another head": "head by head",
    "keys from the second on": "from its first row on", "keys that are not turned": "",
    "scores of nothing": "what a softmax is of is -128", "twice shared": "attention requantises its products",
    "the values of another head": "head by head", "values beyond the last": "values beyond the last are 0",
    "values that are turned": "", "shares the other way round": "takes is a softmax",
    "queries the other way round": "the rows of q are those of y",
}  # fmt: skip


@pytest.mark.parametrize("which", WRONG)
def test_another_attention_is_never_taken_for_this_one(which: str) -> None:
    """A kernel that is only similar to attention is refused, or computes its own meaning."""
    square = "turned" in which
    if WRONG[which]:
        with pytest.raises(cl.LanguageError, match=WRONG[which]):
            sizes = (8, 8, 8, 8, 0) if "way round" in which else (8, 12, 16, 4, 4)
            attended("4x4", 2, *sizes, which=which)
        return
    result, expected, _, _ = attended("4x4", 2, 8, 16 if square else 12, 16, 4, which=which)
    assert not np.array_equal(result, expected)


def test_blocks_that_do_not_fit() -> None:
    x, powers = np.zeros((2, 300), np.int8), cl.powers(300, 0.1)
    with pytest.raises(cl.LanguageError, match=r"75 entries of out.*64"):
        on("4x4", softmax_bytes)[(2,)](x, powers, 127.0, np.zeros_like(x), 300, 1, 300)
    with pytest.raises(cl.LanguageError, match=r"\[1, 200, 16\].*smaller blocks"):
        attended("4x4", 1, 200, 16, 16, 200)
    with pytest.raises(cl.LanguageError, match=r"softmax.*Config with softmax"):
        kernel, y = cl.jit(attention_bytes, config="tiny"), np.zeros((1, 8, 8), np.int8)
        par = cl.parameters([0], [0.01])
        kernel[(1, 1)](y.copy(), y.copy(), y.copy(), par, cl.powers(8, 0.1), 127.0, par, y, 8, 8, 8, 8, 8)


@pytest.mark.parametrize("config", ["4x4", "pynq"])
@pytest.mark.parametrize(("turned", "zeros", "mask"), [(False, (0, 0), False), (True, (3, -7), True)])
def test_products_of_heads(config: str, turned: bool, zeros: tuple[int, int], mask: bool) -> None:
    """A kernel multiplies matrices of any size head by head, without a softmax."""

    def scores(q, k, bias, par, y, BM: cl.constexpr, T: cl.constexpr, D: cl.constexpr):
        head, row = cl.program_id(1), cl.program_id(0) * BM
        a = cl.load(q, (0, head, row, 0), (1, 1, BM, D), other=q.zero_point).reshape(BM, D)
        if turned:
            b = cl.load(k, (0, head, 0, 0), (1, 1, D, T), other=k.zero_point).reshape(D, T)
        else:
            b = cl.load(k, (0, head, 0, 0), (1, 1, T, D), other=k.zero_point).reshape(T, D).T
        s = cl.requantise(cl.dot(a, b), cl.load(par, (0,), (T,)), zero_point=y.zero_point)
        if mask:
            s = cl.residual_add(s, cl.load(bias, (row, 0), (BM, T)), 3, 2, 0, 2)
        cl.store(y, (0, head, row, 0), s.reshape(1, 1, BM, T))

    rng, (count, rows, t, d) = np.random.default_rng(0), (3, 10, 13, 20)
    q, k, y = bytes_of(rng, 1, count, rows, d), bytes_of(rng, 1, count, t, d), np.zeros((1, count, rows, t), np.int8)
    k = np.ascontiguousarray(k.swapaxes(2, 3)) if turned else k
    par = cl.parameters(rng.integers(-500, 500, t), rng.random(t) / 200)
    arguments = cl.quantised(q, zeros[0]), cl.quantised(k, zeros[1]), bytes_of(rng, rows, t), par, cl.quantised(y, 5)
    kernel = cl.jit(scores, config=CONFIGS[config])
    compiled, interpreted_output = both(lambda: kernel[(3, count)](*arguments, 4, t, d), y)
    assert np.array_equal(compiled, interpreted_output) and len(np.unique(compiled)) > 10
    layers = next(v.layers for v in kernel.variants.values() if hasattr(v, "layers"))
    assert [layer.kind for layer in layers] == ["ActivationProduct"] * count


@pytest.mark.parametrize(
    ("of", "says"),
    [(((2, 12, 8), (2, 8, 8), (2, 8, 8)), "the rows of q are those of y"),
     (((3, 8, 8), (2, 8, 8), (2, 8, 8)), "columns of q meet those of k, head by head"),
     (((2, 8, 8), (3, 8, 8), (2, 8, 8)), "k has 3 heads, and y 2"),
     (((2, 8, 8), (2, 8, 8), (3, 8, 8)), "v has 3 heads, and y 2"),
     (((2, 8, 8), (2, 12, 8), (2, 8, 8)), "all 8 keys of k are read at once")],
)  # fmt: skip
def test_sides_that_do_not_fit(of: tuple[tuple[int, ...], ...], says: str) -> None:
    q, k, v = (np.zeros(shape, np.int8) for shape in of)
    par, y = cl.parameters([0], [0.01]), np.zeros((2, 8, 8), np.int8)
    with pytest.raises(cl.LanguageError, match=says):
        on("4x4", attention_bytes)[(2, 2)](q, k, v, par, cl.powers(8, 0.1), 127.0, par, y, 8, 4, 8, 8, 8)


def test_one_array_for_several() -> None:
    x, par = bytes_of(np.random.default_rng(0), 1, 8, 8), cl.parameters([0], [0.01])
    with pytest.raises(cl.LanguageError, match=r"q is read as several.*copies"):
        arguments = x, x, x.copy(), par, cl.powers(8, 0.1), 127.0, par, np.zeros_like(x), 8, 8, 8, 8, 8
        cl.jit(attention_bytes, config=CONFIGS["4x4"])[(1, 1)](*arguments)
    with pytest.raises(cl.LanguageError, match="q is read and written"):
        arguments = x, x.copy(), x.copy(), par, cl.powers(8, 0.1), 127.0, par, x, 8, 8, 8, 8, 8
        cl.jit(attention_bytes, config=CONFIGS["4x4"])[(1, 1)](*arguments)
    with pytest.raises(cl.LanguageError, match="others than x itself"):
        x, par = x[0], cl.parameters(np.zeros(8), np.full(8, 0.01))
        both_sides = cl.quantised(x, 3), cl.quantised(x, 3)
        cl.jit(product, config="tiny")[(1, 1)](*both_sides, par, x, np.zeros_like(x), 8, 8, 8, False, False)


@pytest.mark.rtl
def test_attention_and_a_softmax_on_the_rtl() -> None:
    for queries, off in ((8, 0), (13, 0.03)):  # the last tile of 13 has a single row, after which heads change
        result, expected, report, layers = attended("4x4", 2, queries, 24, 16, 6, device="rtl")
        assert np.array_equal(result, expected) and layers[0].is_block
        _, _, timed, _ = attended("4x4", 2, queries, 24, 16, 6, device="timed")
        assert timed["cycles"] == pytest.approx(report["cycles"], rel=off)
    x, y = bytes_of(np.random.default_rng(0), 7, 13), np.zeros((7, 13), np.int8)
    arguments = x, cl.powers(13, 0.05), 255.0, cl.quantised(y, -128), 13, 4, 16
    compiled, interpreted_output = both(lambda: on("4x4", softmax_bytes)[(2,)](*arguments, device="rtl"), y)
    assert np.array_equal(compiled, interpreted_output)


# In models ----------------------------------------------------------------------------------------------------------


@cl.op("my.domain", "Attention", shape=lambda q, k, v, s, powers, o: (q.shape, "int8"))
def attention_operator(q: Any, k: Any, v: Any, s: Any, powers: Any, o: Any, y: Any) -> None:
    (count, queries, columns), keys = q.shape, k.shape[1]
    kernel = on("4x4", attention_bytes)
    kernel[(count, cl.cdiv(queries, 4))](q, k, v, s, powers, 127.0, o, y, keys, 4, keys, columns, columns)


@pytest.mark.parametrize(("keys", "place"), [(12, "accelerator"), (10, "cpu")])
def test_attention_as_an_operator(keys: int, place: str) -> None:
    names = ["q", "k", "v", "s", "powers", "o"]
    fixed = cl.parameters([0], [0.004]), cl.powers(keys, 0.06), cl.parameters([0], [1 / 40])
    inputs = [helper.make_tensor_value_info(n, TensorProto.INT8, [2, t, 8]) for n, t in zip("qkv", (6, keys, keys))]
    graph = helper.make_graph(
        [helper.make_node("Attention", names, ["y"], domain="my.domain")], "g", inputs,
        [helper.make_tensor_value_info("y", TensorProto.INT8, [2, 6, 8])],
        [numpy_helper.from_array(array, name) for array, name in zip(fixed, names[3:])],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("my.domain", 1)]
    program = celosia.compile(helper.make_model(graph, opset_imports=opsets), config=CONFIGS["4x4"])
    assert [row["place"] for row in program.placements if row["op"] == "Attention"] == [place]
    rng = np.random.default_rng(0)
    arguments, y = {n: bytes_of(rng, 2, t, 8) for n, t in zip("qkv", (6, keys, keys))}, np.zeros((2, 6, 8), np.int8)
    with interpreted():
        attention_operator(*arguments.values(), *fixed, y)
    assert np.array_equal(celosia.Runtime(program).run(arguments).outputs["y"], y) and len(np.unique(y)) > 10


@cl.op("my.domain", "Softmax", shape=lambda x, powers: (x.shape, "int8"))
def softmax_operator(x: Any, powers: Any, y: Any) -> None:
    grid = (cl.cdiv(len(x), 4),)
    on("4x4", softmax_bytes)[grid](x, powers, 127.0, cl.quantised(y, -5), x.shape[1], 4, x.shape[1])


@cl.op("my.domain", "Product", shape=lambda x, w, par: ((x.shape[0], w.shape[0]), "int8"))
def product_operator(x: Any, w: Any, par: Any, y: Any) -> None:
    (m, k), n = x.shape, w.shape[0]
    kernel = on("4x4", product)
    kernel[(cl.cdiv(m, 4), cl.cdiv(n, 4))](cl.quantised(x, 3), w, par, y, cl.quantised(y, 1), k, 4, 4, False, False)


def test_a_softmax_between_products_as_operators() -> None:
    """Kernels as operators of a model compute product, softmax and product of two activations, with ragged rows."""
    rng = np.random.default_rng(0)
    w, x, v = bytes_of(rng, 10, 6), bytes_of(rng, 9, 6), bytes_of(rng, 7, 10)
    a, b = (cl.parameters(rng.integers(-500, 500, n), rng.random(n) / 200) for n in (10, 7))
    powers = cl.powers(10, 0.05)
    nodes = [
        helper.make_node(op, inputs, [y], domain="my.domain")
        for op, inputs, y in (("Product", "xwa", "h"), ("Softmax", "hp", "s"), ("Product", "svb", "y"))
    ]
    feed = {"x": x, "v": v}
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT8, array.shape) for name, array in feed.items()]
    fixed = [numpy_helper.from_array(array, name) for array, name in zip((w, a, powers, b), "wapb")]
    outputs = [helper.make_tensor_value_info("y", TensorProto.INT8, [9, 7])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, fixed)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("my.domain", 1)]
    program = celosia.compile(helper.make_model(graph, opset_imports=opsets), config=CONFIGS["4x4"])
    assert [row["place"] for row in program.placements] == ["accelerator"] * 3
    h, s, y = np.zeros((9, 10), np.int8), np.zeros((9, 10), np.int8), np.zeros((9, 7), np.int8)
    with interpreted():
        product_operator(x, w, a, h)
        softmax_operator(h, powers, s)
        product_operator(s, v, b, y)
    assert np.array_equal(celosia.Runtime(program).run(feed).outputs["y"], y) and len(np.unique(y)) > 10
