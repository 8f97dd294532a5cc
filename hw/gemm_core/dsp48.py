"""Instantiate Xilinx' DSP blocks: DSP48E1 of the 7 series (UG479), DSP48E2 of UltraScale and UltraScale+ (UG579)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from amaranth import Cat, ClockSignal, Const, Instance, Signal, Value

from celosia.hw.spec.blocks import Dsp


class _AddedTerm(NamedTuple):
    """Term that a DSP block adds to its product.

    z: bits of OPMODE that select the term in multiplexer Z. subtracts: the result is product - Z; else Z + product.
    """

    z: int
    subtracts: bool = False


NOTHING, CASCADE, MINUS_C = _AddedTerm(0b000), _AddedTerm(0b001), _AddedTerm(0b011, subtracts=True)
"""Terms that a block may add to its product: nothing, the sum of the block below (PCIN), or minus input C."""

_PRODUCT = 0b0101
"""OPMODE's bits for multiplexers X and Y: both halves of the product."""
_P, _C = 0b010, 0b011
"""OPMODE's bits for multiplexer Z: the block's own sum, and input C."""
_NOT_Z = 0b0001
"""ALUMODE for (not Z) + X + Y + carry. With a carry of 1 that is X + Y - Z."""
_TAKES_D = 0b00110
"""INMODE by which the multiplier takes D instead of A; with INMODE 0 it takes A."""
_INPUTS = {
    "A": 30, "B": 18, "C": 48, "PCIN": 48, "ACIN": 30, "BCIN": 18, "INMODE": 5, "CARRYINSEL": 3, "CARRYCASCIN": 1,
    "MULTSIGNIN": 1, "CARRYIN": 1, "ALUMODE": 4,
}  # fmt: skip
"""Widths of the input ports that both types of block have alike."""
_WIDTHS = {Dsp.e1: {"D": 25, "OPMODE": 7}, Dsp.e2: {"D": 27, "OPMODE": 9}}
"""Widths of the input ports that differ between the types."""
_REGISTERS = ("A", "ACASC", "AD", "ALUMODE", "B", "BCASC", "C", "CARRYIN", "CARRYINSEL", "D", "INMODE", "OPMODE")
"""Input registers, as the parameters with their numbers are named."""
_RESETS = ("A", "ALLCARRYIN", "ALUMODE", "B", "C", "CTRL", "D", "INMODE", "M", "P")
"""Groups of registers, as the reset ports are named."""
_ENABLES = ("A1", "A2", "AD", "ALUMODE", "B1", "B2", "C", "CARRYIN", "CTRL", "D", "INMODE", "M", "P")
"""Groups of registers, as the clock enable ports are named."""
_D_PORT = {Dsp.e1: {"p_USE_DPORT": "TRUE"}, Dsp.e2: {"p_AMULTSEL": "AD"}}
"""Parameter that connects port D to the multiplier."""


def _instantiate(
    block: Dsp, clock: Value, registers: Mapping[str, int], inputs: Mapping[str, Value], enables: Mapping[str, Value],
    **more: Any,
) -> Instance:  # fmt: skip
    """Instantiate a block with registers at product and sum.

    clock: the block's clock. registers: number of registers at each input, by name; others have none. inputs, enables:
    values by port name; other ports are 0. more: further parameters and ports of the instance.
    """
    widths = _INPUTS | _WIDTHS[block]
    return Instance(
        block.value, p_MREG=1, p_PREG=1, i_CLK=clock,
        **{f"p_{name}REG": registers.get(name, 0) for name in _REGISTERS},
        **{f"i_{name}": inputs.get(name, Const(0, width)) for name, width in widths.items()},
        **{f"i_CE{name}": enables.get(name, Const(0, 1)) for name in _ENABLES},
        **{f"i_RST{name}": Const(0, 1) for name in _RESETS},
        **more,
    )  # fmt: skip


def dsp48(
    block: Dsp, left: Value, right: Value, moves: Sequence[Value], plus: _AddedTerm,
    p: Signal, pcout: Signal, c: Value | None = None, pcin: Value | None = None,
) -> Instance:  # fmt: skip
    """Instantiate a block that multiplies and adds, with registers at both operands, the product and the sum.

    left, right: the factors, signed, up to 25 and 18 bits. moves: enables of the registers in the order of the data:
    one or two for the operands, one for the product and `c`, one for the sum. plus: the term that is added. p, pcout:
    driven with the sum, 48 bits; pcout may only lead to pcin of the block above. c: signed, up to 48 bits, for MINUS_C.
    pcin: the sum of the block below, for CASCADE.
    """
    *operands, product, total = moves
    count = len(operands)
    registers = dict.fromkeys(("A", "ACASC", "B", "BCASC"), count) | {"C": int(c is not None)}
    inputs: dict[str, Value] = {
        "A": _extend_sign(left, 30), "B": _extend_sign(right, 18),
        "OPMODE": Const(plus.z << 4 | _PRODUCT, _WIDTHS[block]["OPMODE"]),
        "ALUMODE": Const(_NOT_Z if plus.subtracts else 0, 4), "CARRYIN": Const(int(plus.subtracts), 1),
    }  # fmt: skip
    enables = {"A2": operands[-1], "B2": operands[-1], "M": product, "P": total}
    if count == 2:
        enables |= {"A1": operands[0], "B1": operands[0]}
    if c is not None:
        inputs["C"], enables["C"] = _extend_sign(c, 48), product
    if pcin is not None:
        inputs["PCIN"] = pcin
    return _instantiate(block, ClockSignal(), registers, inputs, enables, o_P=p, o_PCOUT=pcout)


def pumped_dsp48(
    block: Dsp, lefts: tuple[Value, Value], right: Value, c: Value | None, carry: int, halves: Value,
    moves: Sequence[Value], p: Signal,
) -> Instance:  # fmt: skip
    """Instantiate a block in clock domain `fast` that sums two products in two fast cycles.

    The first cycle computes c + carry + lefts[0] * right, the second one adds carry + lefts[1] * right.

    lefts: left factors, signed, up to 25 bits, stable for both cycles. right: signed, up to 18 bits, first the right
    factor of lefts[0], then that of lefts[1], each a cycle later than `lefts`. c: signed, two cycles after `lefts`;
    None: nothing is added. halves: two bits, one of them 1. The first is 1 in the fast cycles at whose end `right`
    becomes the first factor, the second in the other cycles. moves: enables of the registers in the order of the data:
    of `lefts`; of the selected left factor and `right`; of the product and `c`; of the sum. p: driven with the sum.
    """
    operands, chosen, product, total = moves
    registers = dict.fromkeys(("A", "ACASC", "B", "BCASC", "AD", "D", "INMODE", "OPMODE"), 1)
    registers["C"] = int(c is not None)
    first, second = halves
    z = Cat(Const(0, 1), second, Const(0, 1)) if c is None else Cat(first, Const(1, 1), Const(0, 1))
    widths = _WIDTHS[block]
    inputs: dict[str, Value] = {
        "A": _extend_sign(lefts[0], 30), "D": _extend_sign(lefts[1], widths["D"]), "B": _extend_sign(right, 18),
        "INMODE": Cat(second & Const(bool(_TAKES_D >> bit & 1)) for bit in range(_INPUTS["INMODE"])),
        "OPMODE": Cat(Const(_PRODUCT, 4), z, Const(0, widths["OPMODE"] - 7)), "CARRYIN": Const(carry, 1),
    }  # fmt: skip
    enables = {
        "A2": operands, "D": operands, "AD": chosen, "B2": chosen, "M": product, "P": total,
        "INMODE": Const(1, 1), "CTRL": Const(1, 1),
    }  # fmt: skip
    if c is not None:
        inputs["C"], enables["C"] = _extend_sign(c, 48), product
    return _instantiate(block, ClockSignal("fast"), registers, inputs, enables, **_D_PORT[block], o_P=p)


def _extend_sign(value: Value, width: int) -> Value:
    """Return a signed value with its sign extended to `width` bits."""
    return Cat(value, value[-1].replicate(width - len(value)))
