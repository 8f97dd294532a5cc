"""Steps of the softmax engine's pipelines: their layouts, and their pipeline registers."""

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
    """Content of a pipeline stage. valid: the stage holds a step. payload: the step's data."""

    valid: Value
    payload: Any


def delay(m: Module, name: str, step: Step, cycles: int) -> list[Step]:
    """Build pipeline registers for a step. Returns a list of stages: element n is `step` of n cycles ago.

    name: prefix of signals. cycles: number of stages behind `step`. Only `valid` has a reset.
    """
    stages = [step]
    for cycle in range(1, cycles + 1):
        before = stages[-1]
        valid, payload = Signal(name=f"{name}_valid{cycle}"), Reg(before.payload.shape(), name=f"{name}{cycle}")
        m.d.sync += [valid.eq(before.valid), payload.eq(before.payload)]
        stages.append(Step(valid, payload))
    return stages


def find_layout(cfg: Config) -> data.StructLayout:
    """Return the layout of a step of `find`: the number of its row, and whether it is the row's first or last one."""
    return data.StructLayout({"row": row_number_bits(cfg), "first": 1, "last": 1})


def fill_layout(cfg: Config) -> data.StructLayout:
    """Return the layout of a step of `fill`, a part of an entry: its row in the tile, its number, and its buffer."""
    part_bits, buffer_bits = exact_log2(softmax_parts(cfg)), exact_log2(BUFFERS)
    return data.StructLayout({"row": row_bits(cfg), "part": part_bits, "buffer": buffer_bits})


def divide_layout(cfg: Config) -> data.StructLayout:
    """Return the layout of a step of `divide`, a part of an entry.

    row: its row's number, see `row_number_bits`. part: its number in the entries read at once. first, last: it belongs
    to the first or last read of its row. whole: it is the last part of an entry. end: it is the VECTOR's last part.
    """
    return data.StructLayout({
        "row": row_number_bits(cfg), "part": exact_log2(softmax_parts(cfg)), "first": 1, "last": 1,
        "whole": 1, "end": 1,
    })  # fmt: skip
