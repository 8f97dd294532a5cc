"""Two products in one multiplication are exact for all operands; `logic_product` multiplies without `*`."""

from __future__ import annotations

import numpy as np
import pytest
from amaranth import Cat, Module, Signal, signed
from amaranth.sim import Simulator
from numpy.typing import NDArray

from celosia.hw.gemm_core.array import SPACING
from celosia.hw.vector_unit.multiply import logic_product

INT8 = np.arange(-128, 128, dtype=np.int64)
Int64 = NDArray[np.int64]


def packed(a: Int64, b: Int64) -> Int64:
    """Join two factors as the array does: bits of b with the top one flipped, zeros, bits of a."""
    return (a << SPACING) | ((b & 0xFF) ^ 0x80)


def low_and_high(pair: Int64, spacing: int = SPACING) -> tuple[Int64, Int64]:
    """Return the two fields of a sum of pairs, without the offset of the lower one."""
    return (pair & ((1 << spacing) - 1)) - (1 << (spacing - 1)), pair >> spacing


def test_packed_products_are_exact_for_all_operands() -> None:
    """Packed products are exact for all a, b and c, and sums of two of them fit the lower field."""
    b, c = INT8[:, None], INT8[None, :]
    for a in INT8:
        assert (packed(a, b) * c - 128 * c == (a * c << SPACING) + b * c).all()
    factor = packed(INT8[:, None], INT8[None, :])
    assert factor.min() >= -(1 << 24) and factor.max() < 1 << 24  # 25 bits
    products = np.unique(INT8[:, None] * INT8[None, :])
    low = products[:, None] + products[None, :] + (1 << (SPACING - 1))
    assert low.min() >= 0 and low.max() < 1 << SPACING


@pytest.mark.parametrize(("spacing", "exact"), [(SPACING, True), (16, False)])
def test_pairs_come_apart(spacing: int, exact: bool) -> None:
    """The two fields separate for extreme and random operands, but not with one bit less between them."""
    rng = np.random.default_rng(1)
    ends = np.array(np.meshgrid(*[[-128, -127, -1, 0, 1, 127]] * 6)).reshape(6, -1)
    a0, b0, c0, a1, b1, c1 = np.concatenate([ends, rng.integers(-128, 128, (6, 200_000))], axis=1)
    offset = (1 << (spacing - 1)) - 128 * (c0 + c1)
    pair = ((a0 << spacing) + b0 + 128) * c0 + offset + ((a1 << spacing) + b1 + 128) * c1
    low, high = low_and_high(pair, spacing)
    assert bool((low == b0 * c0 + b1 * c1).all() and (high == a0 * c0 + a1 * c1).all()) == exact


def test_logic_product() -> None:
    """`logic_product` is exact for signed 8-bit and unsigned 24-bit operands with 7 bits, and for two signed bytes."""
    m = Module()
    byte, wide, factor, sums = Signal(signed(8)), Signal(24), Signal(7), Signal(signed(16))
    product, other, both_signed = Signal(31), Signal(signed(8)), Signal(signed(16))
    m.d.comb += [sums.eq(logic_product(byte, factor)), product.eq(logic_product(wide, factor))]
    m.d.comb += [other.eq(Cat(factor, byte[0])), both_signed.eq(logic_product(byte, other))]
    m.d.comb += wide.eq(Cat(byte, ~byte, byte))

    async def check(ctx) -> None:  # type: ignore[no-untyped-def]
        for a in (-128, -127, *range(-120, 120, 9), 126, 127):
            for b in range(128):
                ctx.set(byte, a)
                ctx.set(factor, b)
                assert ctx.get(sums) == a * b
                assert ctx.get(product) == ctx.get(wide) * b
                assert ctx.get(both_signed) == a * ctx.get(other)

    simulator = Simulator(m)
    simulator.add_testbench(check)
    simulator.run()
