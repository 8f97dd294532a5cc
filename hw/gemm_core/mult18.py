"""Instantiate the multiplier of an ECP5: MULT18X18D, 18 x 18 bits (Lattice FPGA-TN-02205)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amaranth import Cat, ClockSignal, Const, Instance, Signal, Value

from celosia.hw.spec.blocks import Dsp

WIDTH = 18
"""Bits of each operand."""
_REGISTERS = {"INPUTA": 0, "INPUTB": 0, "PIPELINE": 1, "OUTPUT": 2}
"""Registers of the block: names of its parameters, and the number of the enable of each."""


def mult18x18(left: Value, right: Value, moves: Sequence[Value], product: Signal) -> Instance:
    """Instantiate a block that multiplies, with registers at its operands, inside and at its product.

    left, right: the factors, signed, up to 18 bits. moves: the enables of the three registers in the order of the data.
    product: driven with the product, 36 bits, three cycles after the factors.
    """
    parameters: dict[str, Any] = {"p_GSR": "DISABLED", "p_RESETMODE": "SYNC"}
    for register, enable in _REGISTERS.items():
        parameters |= {f"p_REG_{register}_CLK": "CLK0", f"p_REG_{register}_CE": f"CE{enable}"}
    inputs: dict[str, Value] = {"i_CLK0": ClockSignal()}
    inputs |= {f"i_CLK{number}": Const(0, 1) for number in (1, 2, 3)}
    inputs |= {f"i_RST{number}": Const(0, 1) for number in range(4)}
    inputs |= {f"i_CE{number}": enable for number, enable in enumerate((*moves, Const(0, 1)))}
    for side, value in (("A", left), ("B", right)):
        extended = Cat(value, value[-1].replicate(WIDTH - len(value)))
        inputs |= {f"i_{side}{number}": bit for number, bit in enumerate(extended)}
        inputs |= {f"i_SIGNED{side}": Const(1, 1), f"i_SOURCE{side}": Const(0, 1)}
    outputs = {f"o_P{number}": bit for number, bit in enumerate(product)}
    return Instance(Dsp.mult18.value, **parameters, **inputs, **outputs)
