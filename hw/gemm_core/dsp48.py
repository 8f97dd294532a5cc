"""The DSP blocks of Xilinx by name: DSP48E1 of the 7 series (UG479), DSP48E2 of UltraScale and UltraScale+ (UG579)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from amaranth import Cat, ClockSignal, Const, Instance, Signal, Value

from celosia.hw.blocks import Dsp


class _Plus(NamedTuple):
    """z: bits of OPMODE, for multiplexer Z. subtracts: P is the product minus Z; else Z plus the product."""

    z: int
    subtracts: bool = False


NOTHING, CASCADE, MINUS_C = _Plus(0b000), _Plus(0b001), _Plus(0b011, subtracts=True)
"""What a block adds to its product: nothing, the sum of the block below, -c."""

_PRODUCT = 0b0101
"""OPMODE's bits for X and Y: both halves of the product."""
_NOT_Z = 0b0001
"""ALUMODE: not Z + X + Y + carry. With a carry of 1 that is X + Y - Z."""
_WIDTHS = {Dsp.e1: {"D": 25, "OPMODE": 7}, Dsp.e2: {"D": 27, "OPMODE": 9}}
_LEFT_OUT = {"ACIN": 30, "BCIN": 18, "INMODE": 5, "CARRYINSEL": 3, "CARRYCASCIN": 1, "MULTSIGNIN": 1}
_NO_REGISTERS = ("AD", "D", "ALUMODE", "CARRYIN", "CARRYINSEL", "INMODE", "OPMODE")
_NO_RESETS = ("A", "ALLCARRYIN", "ALUMODE", "B", "C", "CTRL", "D", "INMODE", "M", "P")
_NO_ENABLES = ("AD", "ALUMODE", "CARRYIN", "CTRL", "D", "INMODE")


def dsp48(
    block: Dsp, left: Value, right: Value, moves: Sequence[Value], plus: _Plus,
    p: Signal, pcout: Signal, c: Value | None = None, pcin: Value | None = None,
) -> Instance:  # fmt: skip
    """A block that multiplies and adds, with registers at both operands, the product and the sum.

    left, right: signed, up to 25 and 18 bits. moves: enables of the registers in the order of the data: of the operands
    (one or two registers), of the product and `c`, of the sum. p, pcout: the sum, 48 bits; the latter leads to pcin of
    the block above, and nowhere else. plus, c (signed, up to 48 bits), pcin: what is added.
    """
    *operands, product, total = moves
    registers = len(operands)
    widths = _WIDTHS[block] | _LEFT_OUT
    return Instance(
        block.value,
        **dict.fromkeys((f"p_{name}{kind}" for name in "AB" for kind in ("REG", "CASCREG")), registers),
        p_CREG=int(c is not None), p_MREG=1, p_PREG=1,
        **{f"p_{name}REG": 0 for name in _NO_REGISTERS},
        i_CLK=ClockSignal(),
        i_A=_extended(left, 30), i_B=_extended(right, 18),
        i_C=Const(0, 48) if c is None else _extended(c, 48),
        i_PCIN=Const(0, 48) if pcin is None else pcin,
        **{f"i_{name}": Const(0, width) for name, width in widths.items() if name != "OPMODE"},
        i_OPMODE=Const(plus.z << 4 | _PRODUCT, widths["OPMODE"]),
        i_ALUMODE=Const(_NOT_Z if plus.subtracts else 0, 4),
        i_CARRYIN=Const(int(plus.subtracts), 1),
        **{f"i_CE{side}1": operands[0] if registers == 2 else Const(0, 1) for side in "AB"},
        **{f"i_CE{side}2": operands[-1] for side in "AB"},
        i_CEC=Const(0, 1) if c is None else product, i_CEM=product, i_CEP=total,
        **{f"i_CE{name}": Const(0, 1) for name in _NO_ENABLES},
        **{f"i_RST{name}": Const(0, 1) for name in _NO_RESETS},
        o_P=p, o_PCOUT=pcout,
    )  # fmt: skip


def _extended(value: Value, width: int) -> Value:
    """A signed value in `width` bits."""
    return Cat(value, value[-1].replicate(width - len(value)))
