"""Spread loads of weights over both read ports, where the Config has two."""

from __future__ import annotations

from itertools import groupby

from celosia.compiler.vthread.pipeline import StreamInstruction
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Buffer, Opcode, element_bytes, instruction_bytes, load_channels
from celosia.hw.spec.scratchpads import scratchpads


def spread_weights(cfg: Config, instructions: list[StreamInstruction]) -> None:
    """Spread the weights of layers that would otherwise wait for the second port, as matrix products with one image do:
    half of their weights is more than all bytes through the first port."""
    if not scratchpads(cfg)["wgt"].spread:
        return
    second = load_channels(cfg)[1]
    for _, layer in groupby(sorted(instructions, key=lambda i: i.layer), key=lambda i: i.layer):
        own = list(layer)
        first_bytes, second_bytes, weights = len(own) * instruction_bytes(cfg), 0, []
        for instruction in own:
            if instruction.opcode == Opcode.LOAD:
                size = _bytes(cfg, instruction.fields)
                if instruction.fields["buffer"] not in second:
                    first_bytes += size
                    continue
                second_bytes += size
                if instruction.fields["buffer"] == Buffer.WGT and not instruction.fields.get("expand"):
                    weights.append((instruction, size))
        if first_bytes + sum(size for _, size in weights) / 2 < second_bytes:
            for instruction, _ in weights:
                instruction.fields = instruction.fields | {"spread": 1}


def _bytes(cfg: Config, fields: dict[str, int]) -> int:
    """Bytes that a LOAD reads."""
    size = element_bytes(cfg, Buffer(fields["buffer"]), bool(fields.get("widen")), bool(fields.get("expand")))
    return fields["x_size"] * fields.get("y_size", 1) * fields.get("z_size", 1) * size
