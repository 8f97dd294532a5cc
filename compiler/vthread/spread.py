"""Spread loads of weights over both read ports, where the Config has two."""

from __future__ import annotations

from itertools import groupby

from celosia.compiler.vthread.pipeline import StreamInstruction
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Buffer, Opcode, element_bytes, instruction_bytes, load_channels
from celosia.hw.spec.scratchpads import scratchpads


def spread_weights(cfg: Config, instructions: list[StreamInstruction]) -> None:
    """Spread the weights of those layers that would otherwise wait for the second port, half of whose weights is more
    than all that comes through the first: as of matrix products with one image."""
    if not scratchpads(cfg)["wgt"].spread:
        return
    second = load_channels(cfg)[1]
    for _, layer in groupby(sorted(instructions, key=lambda i: i.layer), key=lambda i: i.layer):
        own = list(layer)
        near, far, weights = len(own) * instruction_bytes(cfg), 0, []
        for each in own:
            if each.opcode == Opcode.LOAD:
                size = _bytes(cfg, each.fields)
                if each.fields["buffer"] not in second:
                    near += size
                    continue
                far += size
                if each.fields["buffer"] == Buffer.WGT and not each.fields.get("expand"):
                    weights.append((each, size))
        if near + sum(size for _, size in weights) / 2 < far:
            for each, _ in weights:
                each.fields = each.fields | {"spread": 1}


def _bytes(cfg: Config, fields: dict[str, int]) -> int:
    """Bytes that a LOAD reads."""
    size = element_bytes(cfg, Buffer(fields["buffer"]), bool(fields.get("widen")), bool(fields.get("expand")))
    return fields["x_size"] * fields.get("y_size", 1) * fields.get("z_size", 1) * size
