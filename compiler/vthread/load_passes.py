"""Passes over the LOADs of a stream: insert codebooks, reorder the first LOADs, and spread weights over both ports."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping
from itertools import combinations, groupby, takewhile

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.vthread.pipeline import StreamInstruction
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Buffer, Opcode, element_bytes, instruction_bytes, load_channels
from celosia.hw.spec.packing import CODEBOOK_ENTRIES
from celosia.hw.spec.scratchpads import scratchpads
from celosia.sim.functional.access import Range, complete_fields, ranges


def load_codebooks(
    cfg: Config, instructions: list[StreamInstruction], books: Mapping[int, NDArray[np.uint8]]
) -> list[StreamInstruction]:  # fmt: skip
    """Insert a LOAD of codebooks before each LOAD of packed weights whose codebooks are not in scratchpad book.

    Both go through one port, in order, so that no token is needed. books: address -> codebooks; the weights that need
    them lie behind them.
    """
    starts, result, loaded = sorted(books), [], np.zeros(0, np.uint8)
    for instruction in instructions:
        if instruction.opcode == Opcode.LOAD and instruction.fields.get("expand"):
            start = starts[bisect(starts, instruction.fields["dram_addr"]) - 1]
            needed = books[start]
            different = np.flatnonzero(needed[: len(loaded)] != loaded[: len(needed)])
            first = int(different[0]) if len(different) else min(len(loaded), len(needed))
            if first < len(needed):
                result.append(_codebook_load(cfg, start, first, len(needed), instruction.layer))
                loaded = np.concatenate([needed, loaded[len(needed) :]])
        result.append(instruction)
    return result


def _codebook_load(cfg: Config, start: int, first: int, end: int, layer: int) -> StreamInstruction:
    """Return the LOAD of the codebooks at address `start`, from the one that holds byte `first` up to byte `end`."""
    size = element_bytes(cfg, Buffer.BOOK)
    entry = first // (size * CODEBOOK_ENTRIES) * CODEBOOK_ENTRIES
    fields = {
        "buffer": int(Buffer.BOOK), "dram_addr": start + entry * size, "x_size": end // size - entry, "y_size": 1,
        "z_size": 1, "sram_base": entry, "sram_x": 1,
    }  # fmt: skip
    return StreamInstruction(Opcode.LOAD, fields, layer)


def reorder_first_loads(cfg: Config, instructions: list[StreamInstruction]) -> list[StreamInstruction]:
    """Sort the LOADs at the begin of a stream by the first instructions that read their data, so that these start
    early."""
    first = list(takewhile(lambda instruction: instruction.opcode == Opcode.LOAD, instructions))
    rest = instructions[len(first) :]
    loaded = {id(load): _accessed_ranges(cfg, load)[0] for load in first}
    if any(_have_overlap(a, b) for a, b in combinations(loaded.values(), 2)):
        return instructions
    needed: dict[int, int] = {}
    for number, instruction in enumerate(rest):
        if len(needed) == len(loaded):
            break
        read = _accessed_ranges(cfg, instruction) if instruction.opcode != Opcode.LOAD else []
        for key, access in loaded.items():
            if any(_have_overlap(access, other) for other in read):
                needed.setdefault(key, number)
    return [*sorted(first, key=lambda load: needed.get(id(load), len(rest))), *rest]


def _accessed_ranges(cfg: Config, instruction: StreamInstruction) -> list[Range]:
    """Return the ranges of scratchpad entries that an instruction reads or writes."""
    return ranges(cfg, instruction.opcode, complete_fields(cfg, instruction.opcode, instruction.fields))


def _have_overlap(a: Range, b: Range) -> bool:
    """Whether two ranges have entries of one scratchpad in common."""
    return a.memory == b.memory and a.first < b.end and b.first < a.end


def spread_weights(cfg: Config, instructions: list[StreamInstruction]) -> None:
    """Mark the weight LOADs of some layers as spread, so that half of each entry goes through the first port.

    These layers would wait for the second port otherwise, as matrix products with one image do: half of their weights
    is more than all bytes that go through the first port. Weights are marked in place.
    """
    if not scratchpads(cfg)["wgt"].spread:
        return
    second = load_channels(cfg)[1]
    for _, layer in groupby(sorted(instructions, key=lambda i: i.layer), key=lambda i: i.layer):
        layer_instructions = list(layer)
        first_bytes, second_bytes, weights = len(layer_instructions) * instruction_bytes(cfg), 0, []
        for instruction in layer_instructions:
            if instruction.opcode == Opcode.LOAD:
                size = _loaded_bytes(cfg, instruction.fields)
                if instruction.fields["buffer"] not in second:
                    first_bytes += size
                    continue
                second_bytes += size
                if instruction.fields["buffer"] == Buffer.WGT and not instruction.fields.get("expand"):
                    weights.append((instruction, size))
        if first_bytes + sum(size for _, size in weights) / 2 < second_bytes:
            for instruction, _ in weights:
                instruction.fields = instruction.fields | {"spread": 1}


def _loaded_bytes(cfg: Config, fields: dict[str, int]) -> int:
    """Return the bytes that a LOAD with these fields reads."""
    size = element_bytes(cfg, Buffer(fields["buffer"]), bool(fields.get("widen")), bool(fields.get("expand")))
    return fields["x_size"] * fields.get("y_size", 1) * fields.get("z_size", 1) * size
