"""The instruction stream under construction, and the rings that give tiles their place in the scratchpads.

Every scratchpad is a ring: a tile takes the entries after those of the tile before. So the iterations of a tile loop
run as virtual threads with slots of their own: loads of the next tiles (of the next layer, too) overtake the compute
of this one as far as the rings reach. What must not be overtaken is found by `tokens.py` from the addresses alone.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from celosia.hw.config import Config
from celosia.hw.isa import Opcode


@dataclass
class Instruction:
    """One instruction before encoding; `layer` is the number of the layer it belongs to."""

    opcode: Opcode
    fields: dict[str, int]
    layer: int = 0


class Ring:
    """Gives out contiguous ranges of a scratchpad of `depth` entries, and remembers which tile lies where."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.head = 0
        self.live: dict[Hashable, tuple[int, int]] = {}

    def find(self, key: Hashable) -> int | None:
        """First entry of the tile `key` if it is still there."""
        place = self.live.get(key)
        return None if place is None else place[0]

    def take(self, size: int, key: Hashable = None) -> int:
        """First of `size` fresh entries; what lay there is forgotten."""
        assert 0 < size <= self.depth, (size, self.depth)
        if self.head + size > self.depth:
            self.head = 0
        first, end = self.head, self.head + size
        self.head = end % self.depth
        self.live = {k: (a, b) for k, (a, b) in self.live.items() if b <= first or end <= a}
        if key is not None:
            self.live[key] = (first, end)
        return first


@dataclass
class Stream:
    """Instructions in program order, and the rings of the scratchpads."""

    cfg: Config
    instructions: list[Instruction] = field(default_factory=list)
    layer: int = 0

    def __post_init__(self) -> None:
        cfg = self.cfg
        self.inp, self.wgt, self.acc = Ring(cfg.inp_depth), Ring(cfg.wgt_depth), Ring(cfg.acc_depth)
        self.vin, self.out = Ring(cfg.vin_depth), Ring(cfg.out_depth)
        self.par, self.lut = Ring(cfg.par_depth), Ring(cfg.lut_count)

    def add(self, opcode: Opcode, **fields: int) -> None:
        self.instructions.append(Instruction(opcode, fields, self.layer))
