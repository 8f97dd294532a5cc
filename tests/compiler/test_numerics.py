"""celosia.compiler.numerics has no difference from onnxruntime in any comparison."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from thorough import some

from celosia.compiler import numerics
from celosia.compiler.numerics import requantiser
from celosia.sim.functional import reference
from celosia.sim.functional.softmax import Pairs

from . import numerics_sweep as sweep

I32 = st.integers(-(2**31), 2**31 - 1)


# Requantise


def test_integer_requantiser_is_the_float32_formula() -> None:
    compared, different = sweep.requantise(100)
    assert (compared, different) == (2_000_000, 0)


def test_requantise_is_onnxruntimes() -> None:
    compared, different = sweep.ort_requantise(5)
    assert compared > 60_000
    assert different == 0


def test_the_comparison_sees_a_requantiser_without_the_tie_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requantiser, "_divide_f32", requantiser.divide_even)
    assert sweep.requantise(20)[1] > 0
    assert sweep.ort_requantise(5)[1] > 0


def test_the_comparison_sees_an_accumulator_that_is_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requantiser, "_round_to_24_bits", lambda v: v)
    assert sweep.requantise(20)[1] > 0


@given(
    acc=I32,
    bias=I32,
    scale=st.floats(0, allow_nan=False, allow_infinity=False, width=32),
    zero_point=st.integers(-128, 127),
    lo=st.integers(-128, 127),
    hi=st.integers(-128, 127),
)
def test_any_scale_folds(acc: int, bias: int, scale: float, zero_point: int, lo: int, hi: int) -> None:
    lo, hi = min(lo, hi), max(lo, hi)
    multiplier, shift = numerics.scale_to_multiplier(scale)
    assert int(multiplier) == 0 or 2**23 <= int(multiplier) < 2**24
    assert int(shift) < 64
    actual = numerics.requantize(acc, bias, multiplier, shift, zero_point, lo, hi)
    assert int(actual) == int(numerics.requantize_f32(acc, bias, scale, zero_point, lo, hi))


@given(st.floats(2.0**-40, 2.0**24, exclude_max=True, width=32))
def test_a_folded_scale_is_the_scale(scale: float) -> None:
    multiplier, shift = numerics.scale_to_multiplier(scale)
    assert int(multiplier) * 2.0 ** -int(shift) == scale


@pytest.mark.parametrize("scale", [-1.0, np.inf, np.nan])
def test_scale_to_multiplier_refuses(scale: float) -> None:
    with pytest.raises(ValueError, match=rf"not negative.*{scale}"):
        numerics.scale_to_multiplier([1.0, scale])


def test_order_of_the_folds_matters() -> None:
    rng = np.random.default_rng(0)
    sx, sw, sy = np.exp(rng.uniform(-6, 0, (3, 1000))).astype(np.float32)
    assert np.mean(numerics.conv_scale(sx, sw, sy) != sx * (sw / sy)) > 0.2


@given(acc=I32, bias=I32, multiplier=st.integers(2**23, 2**24 - 1), shift=st.integers(0, 63))
def test_the_requantiser_is_the_one_of_the_instruction_set(acc: int, bias: int, multiplier: int, shift: int) -> None:
    exact = reference.requantise(
        np.array([acc], np.int32), np.array([bias], np.int32), np.array([multiplier]), np.array([shift])
    )
    assert int(numerics.requantize(acc, bias, multiplier, shift, 0)) == np.clip(exact[0], -128, 127)


# QLinearAdd


def test_qlinear_add_on_all_pairs() -> None:
    assert sweep.qlinear_add(20) == (20 * 2 * 65_536, 0)


@pytest.mark.parametrize("shape", sweep.SHAPES)
def test_qlinear_add_broadcast(shape: str) -> None:
    assert sweep.broadcast("QLinearAdd", numerics.qlinear_add, shape, 100)[1] == 0


def test_the_comparison_sees_exchanged_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sweep.SHAPES, "a a scalar", ((1,), (1000,), False))
    assert sweep.broadcast("QLinearAdd", numerics.qlinear_add, "a a scalar", 100)[1] > 0


def test_rescale_add_is_exact() -> None:
    result = sweep.fit_rescale_add(100)
    assert result["different"] == 0
    assert result["found"] >= 95


@pytest.mark.parametrize("place", ["a", "b"])
def test_a_constant_operand_leaves_more_integers(place: str) -> None:
    """Exact integers of a residual add may exist for some constants although there are none for all pairs of bytes."""
    rng, fits = np.random.default_rng(3), 0
    scales = (0.025849981233477592, 0.0029243521858006716)
    (sa, sb), sc = scales if place == "b" else scales[::-1], 0.02646743319928646
    assert numerics.fit_rescale_add(sa, 0, sb, 0, sc, 0, np.int8) is None
    every = np.arange(-128, 128, dtype=np.int8)
    for _ in range(8):
        constant = rng.choice(every, 120, replace=False)
        p = numerics.fit_rescale_add(sa, 0, sb, 0, sc, 0, np.int8, **{place: constant})  # type: ignore[arg-type]
        if p is None:
            continue
        fits += 1
        a, b = np.meshgrid(constant if place == "a" else every, constant if place == "b" else every)
        np.testing.assert_array_equal(
            numerics.rescale_add(a, b, p), sweep.ort_binary("QLinearAdd", a, b, sa, 0, sb, 0, sc, 0)
        )
    assert fits


@given(
    q=st.integers(-128, 127),
    r=st.integers(-128, 127),
    ma=I32,
    mb=I32,
    c=st.integers(-(2**47), 2**47 - 1),
    shift=st.integers(0, 63),
)
def test_the_residual_add_is_the_one_of_the_instruction_set(
    q: int, r: int, ma: int, mb: int, c: int, shift: int
) -> None:
    exact = reference._round_signed(np.array([q * ma + r * mb + c]), shift)
    assert int(numerics.rescale_add(q, r, numerics.RescaleAdd(ma, mb, c, shift))) == np.clip(exact[0], -128, 127)


def test_rescale_add_fits_its_fields() -> None:
    rng = np.random.default_rng(1)
    for kind in sweep.KINDS:
        for _ in range(20):
            p = numerics.fit_rescale_add(*sweep.operands(rng, kind), kind)
            if p is not None:
                assert abs(p.ma) < 2**31
                assert abs(p.mb) < 2**31
                assert abs(p.c) < 2**47
                assert 0 < p.shift < 64


def test_the_comparison_sees_a_wrong_slope(monkeypatch: pytest.MonkeyPatch) -> None:
    right = numerics.fit_rescale_add

    def wrong(*args: float) -> numerics.RescaleAdd | None:
        p = right(*args)  # type: ignore[arg-type]
        return p and dataclasses.replace(p, ma=p.ma + (p.ma >> 14))

    monkeypatch.setattr(numerics, "fit_rescale_add", wrong)
    assert sweep.fit_rescale_add(4)["different"] > 0


def test_where_no_integers_are_exact_the_answer_is_none() -> None:
    assert numerics.fit_rescale_add(0.41345906, 236, 0.30982688, 38, 1, 238, np.uint8) is None


def test_a_residual_add_of_other_types_is_refused() -> None:
    with pytest.raises(TypeError, match="expected int8 or uint8, not int16"):
        numerics.fit_rescale_add(1, 0, 1, 0, 1, 0, np.int16)


# QLinearMul


def test_qlinear_mul_on_all_pairs() -> None:
    assert sweep.qlinear_mul(20) == (20 * 2 * 65_536, 0)


@pytest.mark.parametrize("shape", ["vectors and a tail", "a a scalar", "b a scalar", "b one value per channel"])
def test_qlinear_mul_broadcast(shape: str) -> None:
    assert sweep.broadcast("QLinearMul", numerics.qlinear_mul, shape, 50)[1] == 0


def test_mul_scale_is_exact() -> None:
    result = sweep.mul_scale(60)
    assert result["different"] == 0
    assert result["found"] >= 57


def test_an_odd_zero_point_moves_into_the_bias() -> None:
    """Ties round with the zero point included. At scale 1/256 every 256th product is a tie."""
    even = numerics.fit_rescale_mul(1 / 16, 0, 1 / 16, 0, 1, 4, np.int8)
    odd = numerics.fit_rescale_mul(1 / 16, 0, 1 / 16, 0, 1, 5, np.int8)
    assert even is not None and (even.bias, even.zero_point) == (0, 4)
    assert odd is not None and odd.bias == 256 * (5 - odd.zero_point) and odd.zero_point % 2 == 0


# Pooling


@pytest.mark.parametrize("channels_last", [0, 1])
def test_global_average_is_exact(channels_last: int) -> None:
    assert sweep.global_average(100, channels_last)[1] == 0


def test_the_comparison_sees_another_order_of_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "global_average_scale", numerics.mean_scale)
    assert sweep.global_average(300, 0)[1] > 0


def test_a_mean_in_float32_is_within_a_step() -> None:
    compared, different, worst = sweep.float_mean(60)
    assert worst <= 1
    assert different < compared / 10


@pytest.mark.parametrize("same_scale", [False, True])
def test_average_pool_reference(same_scale: bool) -> None:
    compared, different, different_integers = sweep.average(40, same_scale)
    assert different == 0
    assert different_integers < compared / (10 if same_scale else 1000)


# One operand


def test_quantise_and_dequantise() -> None:
    assert sweep.quantise(40)[1] == 0


@pytest.mark.parametrize("op", ["QLinearSigmoid", "QLinearLeakyRelu", "QLinearConcat"])
def test_tables_of_qlinear_operators(op: str) -> None:
    assert sweep.qlinear_unary(op, 100)[1] == 0


@pytest.mark.parametrize("op", sweep.FLOAT_FUNCTIONS)
def test_tables_of_float_operators(op: str) -> None:
    """Tables of float operators have onnxruntime's bits, except Atan, which the C library computes."""
    compared, different = sweep.unary(op, 50)
    assert different <= (compared // 10_000 if op == "Atan" else 0)


def test_a_table_of_any_function() -> None:
    table = numerics.unary_table(lambda x: x * x, 1.0, 0, 2.0, -128, np.int8)
    assert table[128 + np.arange(-3, 4)].tolist() == [-124, -126, -128, -128, -128, -126, -124]  # 4.5 and 0.5 to even


@pytest.mark.parametrize("count", some([5, 50], [5]))
def test_softmax_is_exact(count: int) -> None:
    """Reference and compiled softmax are exact for any length, scale, zero point, axis and opset."""
    assert sweep.softmax(count)[1] == 0


@pytest.mark.thorough
def test_another_logarithm_of_softmax_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = lambda n: float(np.log(np.float64(np.finfo(np.float32).max) / n)) - 5  # noqa: E731
    monkeypatch.setattr("celosia.compiler.numerics.tables.exponent_room", wide)
    assert sweep.softmax(20)[1] > 0


def test_softmax_in_integers_is_exact() -> None:
    assert sweep.softmax_in_integers(30)[1] == 0


@pytest.mark.thorough
def test_shares_rounded_but_once_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison finds a softmax whose quotients are not rounded to float32 first."""

    def once(a: Pairs, b: Pairs) -> NDArray[np.int64]:
        (m, e), (m_total, e_total) = a, b
        return np.rint(np.ldexp(m / m_total, np.minimum(e - e_total, 9))).astype(np.int64)

    monkeypatch.setattr("celosia.sim.functional.softmax.divide_pairs", once)
    assert sweep.softmax_in_integers(40)[1] > 0


def test_numerics_needs_no_onnxruntime() -> None:
    code = "import sys; sys.modules['onnxruntime'] = None; import celosia.compiler.numerics"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Averages with padding ------------------------------------------------------------------------------------------

PAIRS = np.stack(np.meshgrid(np.arange(-128, 128), np.arange(-128, 128), indexing="ij"), -1).reshape(1, 65_536, 1, 2)
"""[1, channels, 1, 2]: a row of two pixels with each pair of bytes."""


def quantisation(sx: float, zx: int, sy: float, zy: int) -> tuple[np.ndarray, ...]:
    return np.array(sx, np.float32), np.array(zx, np.int8), np.array(sy, np.float32), np.array(zy, np.int8)


def padded_averages(sx: float, zx: int, sy: float, zy: int, include: int) -> tuple[np.ndarray, np.ndarray]:
    """Return averages [65536, 3] by onnxruntime and by sums of integers: windows of two in padded rows of two."""
    x = PAIRS.astype(np.int8)
    reference = sweep.run_node(
        "QLinearAveragePool", x, *quantisation(sx, zx, sy, zy), out=np.int8,
        kernel_shape=(1, 2), pads=(0, 1, 0, 1), strides=(1, 1), count_include_pad=include,
    ).reshape(-1, 3)  # fmt: skip
    a, b = (PAIRS[0, :, 0, k].astype(np.int64) for k in (0, 1))
    averages = []
    for total, count in ((a, 1), (a + b, 2), (b, 1)):
        multiplier, shift = numerics.scale_to_multiplier(numerics.global_average_scale(sx, sy, 2 if include else count))
        averages.append(numerics.requantize(total, -zx * count, multiplier, shift, zy))
    return reference, np.stack(averages, -1)


def is_proved(sx: float, zx: int, sy: float, include: int) -> bool:
    return all(numerics.average_is_exact(sx, zx, sy, count) for count in ((2,) if include else (1, 2)))


@pytest.mark.parametrize("include", [0, 1])
def test_sums_of_integers_are_not_always_the_mean(include: int) -> None:
    """Windows of two bytes show that a sum of integers may differ from the mean, by at most one step."""
    result, made = padded_averages(0.1, 3, 0.1, -5, include)
    gap = np.abs(result.astype(int) - made)
    assert gap.max() == 1 and np.count_nonzero(gap) > 1000
    assert not is_proved(0.1, 3, 0.1, include)


def test_averages_that_are_proved_are_onnxruntime_s() -> None:
    """Proved averages have onnxruntime's bytes for all pairs of bytes, with and without padding in the count."""
    rng = np.random.default_rng(0)
    proved = 0
    for number in range(60):
        sx, (zx, zy), include = sweep.random_scale(rng), rng.integers(-128, 128, 2).tolist(), number % 2
        sy = float(np.float32(sx * (rng.uniform(0.2, 3) if number % 3 else rng.choice([0.25, 0.5, 0.75, 1, 1.5]))))
        reference, averages = padded_averages(sx, zx, sy, zy, include)
        gap = np.abs(reference.astype(int) - averages).max()
        assert gap <= 1
        if is_proved(sx, zx, sy, include):
            proved += 1
            assert gap == 0
    assert 20 <= proved < 60


@pytest.mark.parametrize(("height", "width"), [(1, 3), (2, 2), (3, 3), (2, 5)])
def test_proved_averages_of_larger_windows(height: int, width: int) -> None:
    """Proved averages of larger windows are exact for sums next to ties, the only ones that could differ."""
    rng, count = np.random.default_rng(height * width), height * width
    checked = 0
    for _ in range(40):
        sx, zx, zy = sweep.random_scale(rng), *rng.integers(-128, 128, 2).tolist()
        sy = float(np.float32(sx * rng.uniform(0.2, 3)))
        if not numerics.average_is_exact(sx, zx, sy, count):
            continue
        x = rng.integers(-128, 128, (1, 20_000, height, width)).astype(np.int8)
        means = (x.sum((2, 3), dtype=np.int64) - zx * count) * (sx / sy / count)
        x = x[:, np.argsort(np.abs(means - np.floor(means) - 0.5))[0, :4000]]  # the nearest to ties
        result = sweep.run_node(
            "QLinearAveragePool", x, *quantisation(sx, zx, sy, zy), out=np.int8,
            kernel_shape=(height, width), strides=(1, 1),
        ).reshape(-1)  # fmt: skip
        multiplier, shift = numerics.scale_to_multiplier(numerics.global_average_scale(sx, sy, count))
        made = numerics.requantize(x.sum((0, 2, 3), dtype=np.int64), -zx * count, multiplier, shift, zy)
        np.testing.assert_array_equal(result, made)
        checked += 1
    assert checked >= 10


def test_means_of_more_than_can_be_tried_are_not_proved() -> None:
    assert not numerics.average_is_exact(0.02, 0, 0.0137, 1 << 24)  # 8 billion sums


def test_the_bound_of_averages_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof without room for roundings accepts an average that differs."""
    monkeypatch.setattr("celosia.compiler.numerics.requantiser.average_error", lambda *args: -1.0)
    assert is_proved(0.1, 3, 0.1, 1)
    reference, averages = padded_averages(0.1, 3, 0.1, -5, 1)
    assert np.any(reference != averages)
