"""Compare address generators with itertools.product."""

from __future__ import annotations

import itertools
import random
from functools import partial

import bench
import cocotb
import pytest

from celosia.hw.gemm_core.loops import Loops
from celosia.hw.spec.isa import EXTENT_BITS, GEMM_LOOPS, OUTER_LOOPS, TAP_LOOPS, VECTOR_LOOPS

pytestmark = pytest.mark.rtl

SHAPES = {
    "gemm": (GEMM_LOOPS, {"acc": (6, OUTER_LOOPS), "inp": (9, GEMM_LOOPS), "wgt": (8, GEMM_LOOPS)}, ("k", "r", "s")),
    "vector": (VECTOR_LOOPS, {"dst": (7, OUTER_LOOPS), "a": (6, VECTOR_LOOPS), "par": (5, ("n",))}, ("r", "s")),
    "between": (VECTOR_LOOPS, {"tap": (6, TAP_LOOPS), "a": (4, ("n", "x")), "b": (3, ("n", "s"))}, ("r", "s")),
    "unreduced": (("i", "j"), {"a": (4, ("i", "j")), "b": (4, ("i",))}, ()),
    "single": (("i",), {"a": (4, ("i",))}, ("i",)),
}


def test_loops() -> None:
    bench.run(partial(bench.side_by_side, Loops, SHAPES), __file__)


def test_rejects_loops_in_another_order() -> None:
    with pytest.raises(ValueError, match=r"loops of a must be of \('i', 'j'\), from the first on, not \('j',\)"):
        Loops(("i", "j"), {"a": (4, ("j",))})
    with pytest.raises(ValueError, match=r"loops of a must be of .* from the first on, not \('i', 'k', 'j'\)"):
        Loops(("i", "j", "k"), {"a": (4, ("i", "k", "j"))})
    with pytest.raises(ValueError, match=r"the reduction must be the last of \('i', 'j'\), not \('i',\)"):
        Loops(("i", "j"), {"a": (4, ("i",))}, reduction=("i",))


def random_instruction(names, operands):
    values = {f"extent_{loop}": random.choice([1, 1, 1, 2, 3, 5]) for loop in names}
    for operand, (bits, loops) in operands.items():
        for part in ("base", *loops):
            values[f"{operand}_{part}"] = random.choice([0, 1, random.getrandbits(bits)])
    return values


def iterations(names, operands, reduction, f):
    extents = [f[f"extent_{loop}"] for loop in names]
    for index in itertools.product(*map(range, extents)):
        at = dict(zip(names, index))
        addresses = [
            (f[f"{operand}_base"] + sum(at[loop] * f[f"{operand}_{loop}"] for loop in loops)) % (1 << bits)
            for operand, (bits, loops) in operands.items()
        ]
        first = all(at[loop] == 0 for loop in reduction)
        last = all(at[loop] == f[f"extent_{loop}"] - 1 for loop in reduction)
        yield (*addresses, first, last, all(at[loop] == f[f"extent_{loop}"] - 1 for loop in names))


def concatenate(values, widths):
    word, position = 0, 0
    for value, width in zip(values, widths, strict=True):
        word |= int(value) << position
        position += width
    return word


def encoded(names, operands, f):
    widths = [EXTENT_BITS] * len(names) + [bits for bits, _ in operands.values()]
    order = [f"extent_{loop}" for loop in names] + [f"{operand}_base" for operand in operands]
    for operand, (bits, loops) in operands.items():
        order += [f"{operand}_{loop}" for loop in loops]
        widths += [bits] * len(loops)
    return concatenate([f[name] for name in order], widths)


def stimulus(names, operands, reduction, count):
    programs = [random_instruction(names, operands) for _ in range(count)]
    widths = [*(bits for bits, _ in operands.values()), 1, 1, 1]
    steps = [concatenate(s, widths) for f in programs for s in iterations(names, operands, reduction, f)]
    return [encoded(names, operands, f) for f in programs], steps


@cocotb.test()
@cocotb.parametrize(shape=[*SHAPES], pause=[0.0, 0.5])
async def addresses_and_flags(dut, shape, pause):
    words, steps = stimulus(*SHAPES[shape], bench.tries(50))
    await bench.start(dut, streams=[f"{shape}__step"])
    dut = bench.Part(dut, shape)
    cocotb.start_soon(bench.stream_put(dut, "instr", words, pause))
    assert await bench.stream_get(dut, "step", len(steps), pause) == steps


@cocotb.test()
@cocotb.parametrize(shape=[*SHAPES])
async def no_gap_between_instructions(dut, shape):
    words, steps = stimulus(*SHAPES[shape], bench.tries(70))
    await bench.start(dut, timeout=len(steps) + 3)
    dut = bench.Part(dut, shape)
    cocotb.start_soon(bench.stream_put(dut, "instr", words))
    assert await bench.stream_get(dut, "step", len(steps)) == steps


@cocotb.test()
@cocotb.parametrize(shape=[*SHAPES])
async def halt_drops_the_instruction(dut, shape):
    words, _ = stimulus(*SHAPES[shape], 1)
    await bench.start(dut)
    dut = bench.Part(dut, shape)
    await bench.stream_put(dut, "instr", words)
    dut.halt.value = 1
    dut.instr__valid.value = 1
    dut.step__ready.value = 1
    for _ in range(3):
        await bench.fall(dut)
        assert not dut.step__valid.value
        assert not dut.instr__ready.value
        await bench.rise(dut)
    dut.instr__valid.value = 0
    dut.halt.value = 0
    words, steps = stimulus(*SHAPES[shape], 5)
    cocotb.start_soon(bench.stream_put(dut, "instr", words))
    assert await bench.stream_get(dut, "step", len(steps)) == steps
