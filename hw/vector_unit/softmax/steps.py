"""Steps on their way through the stages of a softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from amaranth import Module, Signal, Value
from amaranth.lib import data
from amaranth.utils import exact_log2

from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.pipeline import softmax_parts
from celosia.hw.vector_unit.softmax.addresses import BUFFERS, row_bits, row_number_bits


@dataclass(frozen=True)
class Step:
    """Step of a pipeline in one stage: whether there is one, and its data."""

    valid: Value
    payload: Any


def delay(m: Module, name: str, step: Step, cycles: int) -> list[Step]:
    """Delay a step by 0 to `cycles` cycles. Entry n of the result is `step` n cycles ago. Only `valid` has a reset."""
    stages = [step]
    for cycle in range(1, cycles + 1):
        before = stages[-1]
        valid, payload = Signal(name=f"{name}_valid{cycle}"), Reg(before.payload.shape(), name=f"{name}{cycle}")
        m.d.sync += [valid.eq(before.valid), payload.eq(before.payload)]
        stages.append(Step(valid, payload))
    return stages


def find_layout(cfg: Config) -> data.StructLayout:
    """Entry whose largest byte is searched: the number of its row, and whether it is the first or last one there."""
    return data.StructLayout({"row": row_number_bits(cfg), "first": 1, "last": 1})


def fill_layout(cfg: Config) -> data.StructLayout:
    """A part on its way to the adders: its row in the tile, its number in the entry, and its buffer."""
    part_bits, buffer_bits = exact_log2(softmax_parts(cfg)), exact_log2(BUFFERS)
    return data.StructLayout({"row": row_bits(cfg), "part": part_bits, "buffer": buffer_bits})


def divide_layout(cfg: Config) -> data.StructLayout:
    """Part of an entry on its way through table, dividers and output.

    row: its row's number, see `row_number_bits`. part: its number in what is read at once. first, last: it belongs to
    the first or last entry of its row. whole: it is the last part of an entry. end: it is the instruction's last part.
    """
    return data.StructLayout({
        "row": row_number_bits(cfg), "part": exact_log2(softmax_parts(cfg)), "first": 1, "last": 1,
        "whole": 1, "end": 1,
    })  # fmt: skip
